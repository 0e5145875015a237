"""The cache over a tier that servers share: what the second server finds, and what a bad day of the store costs."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import pytest

from keying import KeySpace
from protocol_v2.cache import ChunkCache
from protocol_v2.codes import MissReason
from protocol_v2.outcomes import Hit, RemoteStatus, Retrieved, StoreOutcome
from protocol_v2.places.questions import PATIENCE
from protocol_v2.places.remote import RemoteLimits
from protocol_v2.storage import ObjectId, Shard, StorageValueError
from protocol_v2.storage.names import description_name
from protocol_v2.storage.objects import OBJECT_OVERHEAD
from protocol_v2.tiers import TierFullError, TierIOError
from tests.protocol_v2.shared_stores import FaultyStore, LaterExecutor, remote_tier
from tests.protocol_v2.storage_samples import (
    ALONE,
    OTHER_ROOT,
    ROOT,
    chain,
    make_object,
    open_disk,
    payload_of,
    run,
    store_chain,
)

if TYPE_CHECKING:
    from pathlib import Path

KEYS = chain("shared", 8)
COST = 64 + OBJECT_OVERHEAD
SPACE = KeySpace("org/m", chunk_size=16, kv_dtype="bfloat16")


class Server:
    """One of the servers that share a store, on a clock of its own; what it does in threads is done when it is asked.

    Args:
        store: shared.
        folder: of its disk tier; None for none.
        memory: bytes.
        limits: of its remote tier.
    """

    def __init__(self, store: FaultyStore, folder: Path | None = None, *, memory: int = 2**30, **limits: Any) -> None:
        self.now = 100.0
        self.executor = LaterExecutor(at_once=True)
        tier = remote_tier(FaultyStore(store.bucket) if limits.pop("own_link", False) else store, lambda: self.now)
        self.store = tier._store
        self.cache = ChunkCache(
            memory,
            None if folder is None else open_disk(folder),
            tier,
            remote_limits=RemoteLimits(**limits),
            remote_executor=self.executor,
        )
        self.cache.load()

    def lookup(self, keys: list[bytes], root: bytes = ROOT, **options: Any) -> Hit:
        """A lookup as a server makes it: ask, wait, look up."""
        run(self.cache.ask(root, keys, now=self.now, **options), self.now)
        return self.cache.lookup(root, keys, owner="reader", now=self.now, **options)

    def retrieve(self, hit: Hit, shard: Shard = ALONE) -> Retrieved:
        """All of a hit."""
        assert hit.lease is not None
        return run(self.cache.retrieve(hit.lease, 0, hit.chunks, shard, now=self.now), self.now)

    def pass_time(self, seconds: float) -> None:
        """Time passes, and upkeep is done."""
        self.now += seconds
        for task in self.cache.maintain(self.now):
            run(task, self.now)

    @property
    def status(self) -> RemoteStatus:
        """What it says of the remote tier."""
        remote = self.cache.status(self.now).remote
        assert remote is not None
        return remote


@pytest.fixture
def store() -> FaultyStore:
    """An empty store."""
    return FaultyStore()


def values(retrieved: Retrieved) -> list[bytes]:
    """Delivered bytes."""
    return [bytes(obj.buffers[0]) for obj in retrieved.objects]


def stored(keys: list[bytes], count: int) -> list[bytes]:
    """What was stored under the first keys of a chain."""
    return [payload_of(key, ALONE, 64) for key in keys[:count]]


# ---- what servers share


def test_what_one_server_stored_the_next_one_hits(store: FaultyStore, tmp_path: Path) -> None:
    """Without a special call the first lookup of a second server is a hit, with equal bytes; other keys miss."""
    first, second = Server(store, tmp_path / "a"), Server(store, tmp_path / "b")
    store_chain(first.cache, KEYS, now=first.now)
    assert (8, 0, 0) == (first.status.written, first.status.queued, first.status.dropped)
    hit = second.lookup(KEYS)
    assert (8, None) == (hit.chunks, hit.miss)
    retrieved = second.retrieve(hit)
    assert (stored(KEYS, 8), None) == (values(retrieved), retrieved.miss)
    assert {"memory": 0, "disk": 0, "remote": 8} == second.cache.status(second.now).retrieved
    assert (8, 8, 8) == (second.status.asked, second.status.there, second.status.read)
    assert Hit(0, None, 0.0, MissReason.ABSENT) == second.lookup(chain("other", 8))
    assert Hit(0, None, 0.0, MissReason.ABSENT) == second.lookup(KEYS, root=OTHER_ROOT)


def test_what_was_read_is_in_memory_from_then_on(store: FaultyStore) -> None:
    """A second retrieve asks nobody, also when the store is gone."""
    first, second = Server(store), Server(store)
    store_chain(first.cache, KEYS, now=first.now)
    second.retrieve(second.lookup(KEYS))
    store.go_away()
    before = len(store.calls)
    assert stored(KEYS, 8) == values(second.retrieve(second.lookup(KEYS)))
    assert before == len(store.calls)


def test_a_hit_goes_on_through_every_tier(store: FaultyStore) -> None:
    """Chunks here, chunks there, and shards of one chunk in different places make one hit."""
    first, second = Server(store), Server(store, own_link=True)
    shards = [Shard(2, 0, 0), Shard(2, 1, 0)]
    for place in range(8):
        for shard in shards:
            here = place in {0, 3, 4} or (place == 6 and shard.rank == 1)
            server = second if here else first
            if here:
                second.store.fault = TierFullError("no room")  # type: ignore[attr-defined]
            run(server.cache.store(make_object(KEYS, place, shard=shard), now=server.now), server.now)
            second.store.come_back()  # type: ignore[attr-defined]
    second.pass_time(20.0)
    for place in (0, 3, 4, 6):
        for shard in shards:
            assert (store.content(ObjectId(ROOT, KEYS[place], shard)) is None) == (place != 6 or shard.rank == 1)
    hit = second.lookup(KEYS, world=2)
    assert 8 == hit.chunks
    for shard in shards:
        assert [payload_of(key, shard, 64) for key in KEYS] == values(second.retrieve(hit, shard))
    assert 0 == second.lookup(KEYS, world=1).chunks


def test_a_gap_ends_the_hit_and_the_question(store: FaultyStore) -> None:
    """What comes after a chunk that is nowhere cannot be used, so it is not asked for beyond the first batch."""
    first, second = Server(store), Server(store)
    keys = chain("long", 100)
    store_chain(first.cache, keys, now=first.now)
    store.evict(ObjectId(ROOT, keys[1], ALONE))
    assert (1, MissReason.ABSENT) == (second.lookup(keys).chunks, second.lookup(keys).miss)
    assert 1 == store.calls.count("sizes")
    store.evict(ObjectId(ROOT, keys[0], ALONE))
    third = Server(store)
    assert 0 == third.lookup(keys).chunks


def test_absence_and_presence_are_believed_for_a_time(store: FaultyStore) -> None:
    """Asked once, a lookup asks again only when the answer is old; then what others stored or evicted shows."""
    first, second = Server(store), Server(store, trust_seconds=30.0, doubt_seconds=1.0)
    assert 0 == second.lookup(KEYS).chunks
    store_chain(first.cache, KEYS, now=first.now)
    asked = store.calls.count("sizes")
    assert 0 == second.lookup(KEYS).chunks
    assert asked == store.calls.count("sizes")
    second.now += 1.0
    assert 8 == second.lookup(KEYS).chunks
    for key in KEYS:
        store.evict(ObjectId(ROOT, key, ALONE))
    second.now += 29.9
    asked = store.calls.count("sizes")
    assert 8 == second.lookup(KEYS).chunks
    assert asked == store.calls.count("sizes")
    second.now += 0.1
    assert 0 == second.lookup(KEYS).chunks


def test_a_late_answer_is_there_for_the_next_lookup(store: FaultyStore) -> None:
    """A lookup waits a bounded time; what it did not wait for is a hit the next time, without asking again."""
    first, second = Server(store), Server(store, wait_seconds=0.01)
    store_chain(first.cache, KEYS, now=first.now)
    second.executor.at_once = False
    assert 0 == second.lookup(KEYS).chunks
    assert 1 == second.status.late
    second.executor.run()
    assert 8 == second.cache.lookup(ROOT, KEYS, owner="reader", now=second.now).chunks
    assert 1 == store.calls.count("sizes")


def test_a_lookup_that_waited_too_long_for_its_turn_does_not_wait_more(store: FaultyStore) -> None:
    """The time runs from the plan: with all threads taken, nobody waits behind others' waiting."""
    server = Server(store, wait_seconds=3600.0)
    server.executor.at_once = False
    asking = server.cache.ask(ROOT, KEYS, now=server.now)
    server.now += 3600.0
    run(asking, server.now)  # would hang if it waited
    assert 1 == server.status.late


def test_a_slow_store_is_asked_without_waiting(store: FaultyStore) -> None:
    """After a few late answers lookups do not wait any more; what they ask for counts later, and in time ends it."""
    first, second = Server(store), Server(store, wait_seconds=0.001)
    store_chain(first.cache, KEYS, now=first.now)
    second.executor.at_once = False
    for number in range(PATIENCE):
        asking = second.cache.ask(ROOT, chain(f"slow {number}", 1), now=second.now)
        assert not asking.ready
        run(asking, second.now)
    assert second.cache.ask(ROOT, KEYS, now=second.now).ready
    assert (PATIENCE + 1, PATIENCE + 1) == (second.status.late, len(second.executor.waiting))
    second.now += 0.5
    second.executor.run()  # late
    assert 8 == second.cache.lookup(ROOT, KEYS, owner="reader", now=second.now).chunks
    assert second.cache.ask(ROOT, chain("still slow", 1), now=second.now).ready
    second.executor.run()  # in time
    asking = second.cache.ask(ROOT, chain("fast", 1), now=second.now)
    assert not asking.ready
    run(asking, second.now)


def test_questions_under_way_are_bounded(store: FaultyStore) -> None:
    """Beyond the bound a lookup answers from what is known, and that is counted; afterwards it asks again."""
    server = Server(store, wait_seconds=0.0, max_questions=1)
    server.executor.at_once = False
    server.lookup(KEYS)
    server.lookup(chain("more", 2))
    assert (1, 1) == (server.status.skipped, len(server.executor.waiting))
    server.executor.run()
    server.lookup(chain("more", 2))
    assert (1, 1) == (server.status.skipped, len(server.executor.waiting))


def test_impossible_keys_are_refused_before_anything_is_asked(store: FaultyStore) -> None:
    """As lookups refuse them."""
    server = Server(store)
    with pytest.raises(StorageValueError):
        server.cache.ask(ROOT, [KEYS[0][:16]], now=0.0)
    with pytest.raises(StorageValueError):
        server.cache.ask(ROOT, KEYS, world=0, now=0.0)
    assert [] == store.calls


def test_without_a_remote_tier_nothing_is_asked() -> None:
    """Ask is ready at once."""
    assert ChunkCache(1000).ask(ROOT, KEYS, now=0.0).ready


def test_prefetch_pulls_into_memory(store: FaultyStore) -> None:
    """Prefetch brings what the store has into memory, within its room, and says how many chunks are on their way."""
    first, second = Server(store), Server(store)
    store_chain(first.cache, KEYS, now=first.now)
    run(second.cache.ask(ROOT, KEYS, now=second.now), second.now)
    prefetch = second.cache.prefetch(ROOT, KEYS, now=second.now)
    assert (0, 8) == (prefetch.resident, len(prefetch.tasks))
    assert [True] * 8 == [run(task, second.now) for task in prefetch.tasks]
    store.go_away()
    assert stored(KEYS, 8) == values(second.retrieve(second.lookup(KEYS)))
    small = Server(FaultyStore(store.bucket), memory=3 * COST)
    run(small.cache.ask(ROOT, KEYS, now=small.now), small.now)
    assert 3 >= len(small.cache.prefetch(ROOT, KEYS, now=small.now).tasks) >= 2


def test_memory_and_remote_together_hold_more_than_memory(store: FaultyStore) -> None:
    """What memory has to let go is a hit still, once it was sent on."""
    server = Server(store, memory=3 * COST)
    store_chain(server.cache, KEYS, now=server.now)
    assert (3, 8) == (server.cache.status(server.now).memory.chunks, server.status.written)
    assert stored(KEYS, 8) == values(server.retrieve(server.lookup(KEYS)))


def test_spaces_are_described_in_the_store(store: FaultyStore) -> None:
    """Once a server; again where it failed."""
    server = Server(store)
    store.go_away()
    run(server.cache.describe(SPACE), server.now)
    assert [] == store.paths()
    store.come_back()
    server.pass_time(1.0)
    written = store.calls.count("write")
    run(server.cache.describe(SPACE), server.now)
    assert [description_name(SPACE.root)] == store.paths()
    assert written == store.calls.count("write")
    refusing = Server(FaultyStore())
    shared: Any = refusing.store
    shared.fault = TierFullError("no room")
    run(refusing.cache.describe(SPACE), refusing.now)
    shared.come_back()
    refusing.pass_time(1.0)
    run(refusing.cache.describe(SPACE), refusing.now)
    assert [description_name(SPACE.root)] == shared.paths()


# ---- what goes wrong


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_what_the_store_evicted_after_the_lookup_ends_the_delivery(store: FaultyStore, cut: int) -> None:
    """A lease holds nothing in a shared store: the prefix that is there is delivered, and the reason for its end."""
    first, second = Server(store), Server(store)
    store_chain(first.cache, KEYS, now=first.now)
    hit = second.lookup(KEYS)
    store.evict(ObjectId(ROOT, KEYS[cut], ALONE))
    retrieved = second.retrieve(hit)
    assert (stored(KEYS, cut), MissReason.ABSENT) == (values(retrieved), retrieved.miss)
    assert cut == second.lookup(KEYS).chunks


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", MissReason.ENVELOPE_INVALID), (b"x" * 500, MissReason.ENVELOPE_INVALID), (None, MissReason.CHECKSUM)],
    ids=["emptied", "foreign", "flipped"],
)
def test_damage_is_a_typed_miss_is_set_aside_and_mended(
    store: FaultyStore, content: bytes | None, reason: MissReason
) -> None:
    """A broken value is never delivered; lookups say why, it costs one read, and a store replaces it for everybody."""
    first, second = Server(store), Server(store)
    store_chain(first.cache, KEYS, now=first.now)
    hit = second.lookup(KEYS)
    one = ObjectId(ROOT, KEYS[3], ALONE)
    if content is None:
        content = store.content(one)
        assert content is not None
        content = content[:-1] + bytes([content[-1] ^ 1])
    store.spoil(one, content)
    retrieved = second.retrieve(hit)
    assert (stored(KEYS, 3), reason) == (values(retrieved), retrieved.miss)
    reads = store.calls.count("read")
    for _ in range(3):
        assert (3, reason) == (second.lookup(KEYS).chunks, second.lookup(KEYS).miss)
    assert reads == store.calls.count("read")
    assert {reason: 1} == second.cache.status(second.now).set_aside
    assert 1 == sum(path.startswith("xk2.quarantine/") for path in store.paths())
    run(second.cache.store(make_object(KEYS, 3), now=second.now), second.now)
    assert stored(KEYS, 8) == values(second.retrieve(second.lookup(KEYS)))
    assert 8 == Server(store).lookup(KEYS).chunks


def test_a_store_that_goes_away_is_misses_and_comes_back(store: FaultyStore, caplog: pytest.LogCaptureFixture) -> None:
    """After a few failures nothing is asked any more; upkeep notices that it is back, and hits go on."""
    first, second = Server(store), Server(store)
    store_chain(first.cache, KEYS, now=first.now)
    hit = second.lookup(KEYS)
    store.go_away()
    retrieved = second.retrieve(hit)
    assert ([], MissReason.ABSENT) == (values(retrieved), retrieved.miss)
    for number in range(10):
        second.lookup(chain(f"cold {number}", 2))
    assert (False, 1, 3) == (second.status.up, second.status.trips, second.status.failed)
    assert "away" == second.status.last_error
    assert 8 == second.status.skipped
    calls = len(store.calls)
    assert Hit(0, None, 0.0, MissReason.ABSENT) == second.lookup(KEYS)
    assert calls == len(store.calls)
    second.pass_time(0.5)
    assert calls + 1 == len(store.calls)  # one probe
    store.come_back()
    second.pass_time(0.5)
    early = second.status.up  # the next probe is later
    second.pass_time(0.5)
    assert (False, True) == (early, second.status.up)
    assert stored(KEYS, 8) == values(second.retrieve(second.lookup(KEYS)))
    assert ["is away", "answers again"] == [
        text for record in caplog.records for text in ("is away", "answers again") if text in record.message
    ]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_stores_never_wait_for_the_remote_tier(store: FaultyStore, tmp_path: Path) -> None:
    """A store is acknowledged by the nearer tiers; what an outage kept back is sent when it is over."""
    for folder in (None, tmp_path / "disk"):
        server = Server(FaultyStore(), folder)
        shared: Any = server.store
        shared.go_away()
        for place in range(8):
            task = server.cache.store(make_object(KEYS, place), now=server.now)
            assert StoreOutcome.STORED is run(task, server.now)
        assert 8 == server.lookup(KEYS).chunks
        assert (False, 0, 8) == (server.status.up, server.status.refused, server.status.queued)
        shared.come_back()
        server.pass_time(1.0)
        assert (True, 8, 0) == (server.status.up, server.status.written, server.status.queued)
        assert 8 == len(shared.paths())


def test_an_object_that_never_gets_through_holds_up_nobody(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After several attempts it is given up and counted; the others arrive."""
    server = Server(store)
    poison = make_object(KEYS, 2)
    write = store.write

    def fail(name: str, parts: Any, **options: Any) -> None:
        if name == str(poison.id.name):
            raise TierIOError("odd")
        write(name, parts, **options)

    monkeypatch.setattr(store, "write", fail)
    store_chain(server.cache, KEYS, now=server.now)
    for _ in range(3):
        server.pass_time(1.0)
    assert (True, 7, 1, 0) == (
        server.status.up,
        server.status.written,
        server.status.refused,
        server.status.queued,
    )
    assert 7 == len(store.paths())


def test_the_queue_is_bounded(store: FaultyStore) -> None:
    """What does not fit is dropped and counted, the store is acknowledged all the same, and the rest arrives."""
    server = Server(store, queue_bytes=3 * COST)
    server.executor.at_once = False
    store_chain(server.cache, KEYS, now=server.now)
    assert (3, 3 * COST, 5) == (server.status.queued, server.status.queued_bytes, server.status.dropped)
    assert 8 == server.lookup(KEYS).chunks
    server.executor.run()
    server.pass_time(1.0)
    assert (0, 0, 3) == (server.status.queued, server.status.queued_bytes, server.status.written)
    assert [str(make_object(KEYS, place).id.name) for place in range(3)] == sorted(
        store.paths(), key=[str(make_object(KEYS, place).id.name) for place in range(3)].index
    )


def test_a_full_store_refuses_and_serves_on(store: FaultyStore) -> None:
    """That there is no room is counted and told; reads go on, and nothing is held to be away."""
    first, second = Server(store), Server(store, own_link=True)
    store_chain(first.cache, KEYS[:4], now=first.now)
    link: Any = second.store
    for place in range(4, 8):
        link.fault = TierFullError("no room")
        run(second.cache.store(make_object(KEYS, place), now=second.now), second.now)
        link.fault = None
    second.pass_time(0.0)
    assert (True, 4, 0, "no room") == (
        second.status.up,
        second.status.refused,
        second.status.written,
        second.status.last_error,
    )
    assert stored(KEYS, 8) == values(second.retrieve(second.lookup(KEYS)))


# ---- clear and the end


def test_clear_is_of_this_server_alone(store: FaultyStore) -> None:
    """It forgets what it has and knows, and what waits to be sent; what the fleet shares stays and may be hit again."""
    server, other = Server(store), Server(store)
    store_chain(server.cache, KEYS[:4], now=server.now)
    server.executor.at_once = False
    for place in range(4, 8):
        run(server.cache.store(make_object(KEYS, place), now=server.now), server.now)
    assert 8 == run(server.cache.clear(ROOT, now=server.now), server.now).objects
    assert 0 == server.cache.lookup(ROOT, KEYS, owner="reader", now=server.now).chunks
    server.executor.at_once = True
    server.executor.run()
    assert (4, 4, 0) == (server.status.written, server.status.dropped, server.status.queued)
    assert 4 == len(store.paths())
    assert 4 == other.lookup(KEYS).chunks
    assert 4 == server.lookup(KEYS).chunks


def test_clear_of_another_space_keeps_what_waits(store: FaultyStore) -> None:
    """Only what was cleared is dropped from the queue, and the rest keeps its order."""
    server = Server(store)
    server.executor.at_once = False
    for root in (ROOT, OTHER_ROOT):
        store_chain(server.cache, chain("two", 3, root), root=root, now=server.now)
    server.cache.describe(SPACE)
    run(server.cache.clear(OTHER_ROOT, now=server.now), server.now)
    server.executor.run()
    names = [str(make_object(chain("two", 3), place).id.name) for place in range(3)]
    assert sorted([*names, description_name(SPACE.root)]) == store.paths()
    assert (3, 3) == (server.status.dropped, server.status.written)


def test_a_read_that_a_clear_overtakes_is_not_kept(store: FaultyStore) -> None:
    """It is delivered, since it is right, and is not in memory afterwards; nor is an old answer believed."""
    first, second = Server(store), Server(store)
    store_chain(first.cache, KEYS, now=first.now)
    hit = second.lookup(KEYS)
    assert hit.lease is not None
    task = second.cache.retrieve(hit.lease, 0, 8, ALONE, now=second.now)
    second.executor.at_once = False
    asking = second.cache.ask(ROOT, chain("x", 1), now=second.now)
    second.cache.release(hit.lease, now=second.now)
    run(second.cache.clear(now=second.now), second.now)
    assert stored(KEYS, 8) == values(run(task, second.now))
    second.executor.run()
    run(asking, second.now)
    assert (0, 0) == (second.cache.status(second.now).memory.chunks, second.status.known)
    assert not second.cache._remote._knowledge.is_missing((ROOT, chain("x", 1)[0]), 1, 1, second.now)  # type: ignore[union-attr]


@pytest.mark.parametrize("away", [False, True])
def test_the_end_sends_what_waits(store: FaultyStore, away: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An orderly end sends the queue; where the store does not take it, that is counted and said."""
    server = Server(store)
    server.executor.at_once = False
    store_chain(server.cache, KEYS, now=server.now)
    if away:
        store.go_away()
    run(server.cache.close(server.now), server.now)
    assert (0 if away else 8) == len(store.paths())
    sent = (0, 0, 8) if away else (8, 0, 0)
    assert sent == (server.status.written, server.status.refused, server.status.dropped)
    assert away == ("8 objects were not sent" in caplog.text)
    assert run(server.cache.close(server.now), server.now) is None


def test_the_end_is_bounded_in_time(store: FaultyStore) -> None:
    """A store that is slow is given so long, and no longer."""
    server = Server(store, drain_seconds=5.0)
    server.executor.at_once = False
    store_chain(server.cache, KEYS, now=server.now)
    seconds = itertools.count(server.now, 2.0)
    server.cache._remote._outbox._clock = seconds.__next__  # type: ignore[union-attr]
    run(server.cache.close(server.now), server.now)
    assert (2, 6) == (server.status.written, server.status.dropped)
