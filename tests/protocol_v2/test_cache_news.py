"""What a server tells of its cache: exactly what a lookup's answer depends on, and a router's view that equals it."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zmq
from hypothesis import Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from keying import CacheSalt, KeySpace, chunk_digests, chunk_keys
from protocol_v2 import event_feed
from protocol_v2.cache import ChunkCache
from protocol_v2.cache_news import CacheNews
from protocol_v2.chunk_events import (
    ChunkEvent,
    ChunkRemoved,
    ChunksHeld,
    ChunkStored,
    EventError,
    SpaceCleared,
    SpaceDescribed,
    decode_batch,
)
from protocol_v2.chunk_view import ChunkView
from protocol_v2.client import CacheClient
from protocol_v2.event_feed import EventPublisher, EventSubscriber
from protocol_v2.event_log import EventLog, FeedItem, FeedReader, Lost, Restarted
from protocol_v2.identity import space_to_wire
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService
from protocol_v2.storage import Shard
from protocol_v2.storage.objects import OBJECT_OVERHEAD
from protocol_v2.tiers import DiskTier, Fsync
from tests.protocol_v2.storage_samples import (
    OTHER_ROOT,
    ROOT,
    chain,
    hits,
    make_object,
    open_cache,
    run,
    store_chain,
)
from tests.protocol_v2.test_cache_model import CHAINS, ROOTS, Model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

KEYS = chain("news", 4)
COST = 64 + OBJECT_OVERHEAD
SPACE = KeySpace("m", chunk_size=4, kv_dtype="float32")


class Router:
    """A publisher without sockets, and behind it what a subscriber makes of its batches, for each space."""

    def __init__(self) -> None:
        self._log = EventLog(os.urandom(16), clock=lambda: 0.0)
        self._readers: dict[bytes, FeedReader] = {}
        self._views: dict[bytes, ChunkView] = {}
        self.events: list[ChunkEvent] = []
        self.news = CacheNews(self)

    def describe(self, space: KeySpace) -> None:
        """As `EventPublisher`."""
        self._receive(space.root, self._log.describe(space.root, space_to_wire(space)))

    def publish(self, root: bytes, events: Sequence[ChunkEvent]) -> int:
        """As `EventPublisher`."""
        self.events += events
        self._receive(root, self._log.append(root, events))
        return self._log.next(root)

    def _receive(self, root: bytes, told: tuple[int, bytes] | None) -> None:
        if told is not None:
            self.view(root).apply(self._readers.setdefault(root, FeedReader()).receive(decode_batch(told[1])))

    def view(self, root: bytes = ROOT) -> ChunkView:
        """What is known of a space."""
        return self._views.setdefault(root, ChunkView())

    def heard(self) -> list[ChunkEvent]:
        """What was told since the last call."""
        self.news.flush()
        told, self.events = self.events, []
        return told


def listening(cache: ChunkCache) -> Router:
    """A router that hears of a cache from now on; what was there already is told and heard."""
    router = Router()
    cache.listen(router.news.changed)
    router.news.flush()
    return router


def held(*keys: bytes, tier: str = "memory", world: int = 1, group: int = 0) -> ChunksHeld:
    """An event."""
    return ChunksHeld(keys=keys, world=world, group=group, tier=tier)


def removed(*keys: bytes, tier: str = "memory", world: int = 1, group: int = 0) -> ChunkRemoved:
    """An event."""
    return ChunkRemoved(keys, world, group, tier)


# ---- exactly what changes


def test_an_eviction_tells_what_went_and_what_came() -> None:
    """Room for two chunks: of four in turn each pushes one out, and the suffix goes before its prefix."""
    cache = ChunkCache(2 * COST)
    router = listening(cache)
    store_chain(cache, KEYS[:2])
    assert [held(*KEYS[:2])] == router.heard()
    other = chain("another prompt", 1)
    store_chain(cache, other)
    assert [removed(KEYS[1]), held(*other)] == router.heard()
    assert (1, 1) == (router.view().leading(KEYS), hits(cache, KEYS))
    assert [] == router.heard()


def test_a_copy_that_goes_while_another_stays_is_not_told(tmp_path: Path) -> None:
    """Memory that makes room has its chunks on disk still: nothing changes for a lookup."""
    cache = open_cache(tmp_path, memory=2 * COST)
    router = listening(cache)
    store_chain(cache, KEYS)
    assert [held(*KEYS, tier="disk")] == router.heard()
    assert 0 < cache.status(0.0).memory.evicted
    assert 4 == router.view().leading(KEYS) == hits(cache, KEYS)
    run(cache.close(0.0))


def test_a_clear_tells_all_but_what_is_leased(tmp_path: Path) -> None:
    """And of the space that was cleared only."""
    cache = open_cache(tmp_path)
    router = listening(cache)
    store_chain(cache, KEYS)
    store_chain(cache, KEYS[:1], root=OTHER_ROOT)
    router.heard()
    assert cache.lookup(ROOT, KEYS[:2], owner="reader", now=0.0).lease is not None
    run(cache.clear(ROOT, now=0.0))
    assert [removed(*KEYS[2:], tier="disk")] == [
        event for event in router.heard() if isinstance(event, ChunkRemoved | ChunksHeld)
    ]
    assert (2, 1) == (router.view().leading(KEYS), router.view(OTHER_ROOT).leading(KEYS))
    assert (2, 1) == (hits(cache, KEYS), hits(cache, KEYS, OTHER_ROOT))
    run(cache.close(0.0))


def test_a_damaged_file_is_told_when_it_is_set_aside(tmp_path: Path) -> None:
    """Not before, since nobody knew; and that it is back when it is stored again."""
    cache = open_cache(tmp_path, memory=0)
    router = listening(cache)
    store_chain(cache, KEYS)
    router.heard()
    path = tmp_path / str(make_object(KEYS, 1).id.name)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    lease = cache.lookup(ROOT, KEYS, owner="reader", now=0.0).lease
    assert lease is not None
    assert [] == router.heard()
    run(cache.retrieve(lease, 0, 4, Shard(1, 0, 0), now=0.0))
    assert [removed(KEYS[1], tier="disk")] == router.heard()
    assert 1 == router.view().leading(KEYS) == hits(cache, KEYS)
    run(cache.store(make_object(KEYS, 1), now=0.0))
    assert [held(KEYS[1], tier="disk")] == router.heard()
    assert 4 == router.view().leading(KEYS) == hits(cache, KEYS)
    run(cache.close(0.0))


def test_a_restart_tells_what_it_found(tmp_path: Path) -> None:
    """A subscriber forgets the former server's chunks and learns the new one's, which lost its damaged file."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS)
    run(cache.close(0.0))
    (tmp_path / str(make_object(KEYS, 2).id.name)).write_bytes(b"broken")
    cache = open_cache(tmp_path)
    router = listening(cache)
    assert {KEYS[0], KEYS[1], KEYS[3]} == {key for event in router.heard() for key in event.keys}  # type: ignore[union-attr]
    assert 2 == router.view().leading(KEYS) == hits(cache, KEYS)
    run(cache.close(0.0))


def test_a_chunk_is_held_when_every_rank_is_there() -> None:
    """By world size and group: one rank of two is nothing, and a reader with two groups needs both."""
    cache = ChunkCache(2**20)
    router = listening(cache)
    run(cache.store(make_object(KEYS, 0, shard=Shard(2, 0, 0)), now=0.0))
    assert [] == router.heard()
    run(cache.store(make_object(KEYS, 0, shard=Shard(2, 1, 0)), now=0.0))
    assert [held(KEYS[0], world=2)] == router.heard()
    for rank in (0, 1):
        run(cache.store(make_object(KEYS, 0, shard=Shard(2, rank, 1)), now=0.0))
    assert [held(KEYS[0], world=2, group=1)] == router.heard()
    for world, groups in itertools.product((1, 2), (1, 2, 3)):
        assert hits(cache, KEYS, world=world, groups=groups) == router.view().leading(KEYS, world=world, groups=groups)
    run(cache.clear(None, now=0.0))
    assert [removed(KEYS[0], world=2), removed(KEYS[0], world=2, group=1)] == router.heard()
    assert (0, 0) == (len(router.view()), router.view().lost)


def test_what_came_and_went_in_between_is_not_told() -> None:
    """A router is told of states, not of every step, so a busy cache does not flood it."""
    cache = ChunkCache(2**20)
    router = listening(cache)
    store_chain(cache, KEYS)
    run(cache.clear(None, now=0.0))
    assert [] == router.heard()
    store_chain(cache, KEYS[:1])
    assert [held(KEYS[0])] == router.heard()


def test_many_changes_are_told_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event has more keys than it may, and what is collected is published without waiting for the next flush."""
    router = Router()
    keys = [number.to_bytes(32, "big") for number in range(10_000)]
    for key in keys:
        router.news.changed((ROOT, key), (1, 0), 1, True)
    told = router.heard()
    assert [4096, 4096, 10_000 - 8192] == [len(event.keys) for event in told if isinstance(event, ChunksHeld)]
    assert keys == [key for event in told if isinstance(event, ChunksHeld) for key in event.keys]
    assert (10_000, 1) == (len(router.view()), router.news.batches)
    monkeypatch.setattr("protocol_v2.cache_news.FLUSH_AT", 10)
    for key in keys[:25]:
        router.news.changed((ROOT, key), (1, 0), 1, False)
    assert [10, 10] == [len(event.keys) for event in router.events if isinstance(event, ChunkRemoved)]


def test_spaces_beyond_the_room_are_counted_and_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's table of spaces is bounded; those that are in it are told of as before."""
    monkeypatch.setattr("protocol_v2.event_log.MAX_SPACES", 1)
    router = Router()
    router.news.changed((ROOT, KEYS[0]), (1, 0), 1, True)
    router.news.changed((OTHER_ROOT, KEYS[0]), (1, 0), 1, True)
    router.news.flush()
    router.news.describe(SPACE)
    assert (1, 2) == (router.news.batches, router.news.untold)
    router.news.changed((ROOT, KEYS[0]), (1, 0), 1, False)
    assert removed(KEYS[0]) in router.heard()
    with pytest.raises(EventError, match="1 spaces"):
        router.describe(SPACE)


# ---- a view is what a lookup says, whatever happens


class NewsModel(Model):
    """The cache's model with a router behind it: tasks in any order, faults, damage, kills and restarts."""

    def start(self) -> None:
        """A server starts, and tells what it found."""
        super().start()
        self.router = listening(self.cache)

    @invariant()
    def the_view_is_what_a_lookup_says(self) -> None:
        """For every prompt, space and number of ranks, once everything was told."""
        if not hasattr(self, "router"):
            return
        self.router.news.flush()
        for keys, root, world in itertools.product(CHAINS, ROOTS, (1, 2)):
            found = self.cache._presence.leading(root, keys, world, 1)
            assert len(found) == self.router.view(root).leading(keys, world=world)


def test_a_view_equals_the_lookups_after_anything() -> None:
    """Whatever comes, goes, fails or is damaged, a router that heard all of it would route by the truth."""
    run_state_machine_as_test(
        NewsModel,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            derandomize=True,
            phases=(Phase.generate,),
            database=None,
        ),
    )


def test_a_view_that_missed_a_removal_would_be_seen() -> None:
    """Negative control: without one event the view and the lookup differ."""
    cache = ChunkCache(2 * COST)
    router = listening(cache)
    store_chain(cache, KEYS[:2])
    router.heard()
    router._log.append(ROOT, ())  # a batch that the subscriber never gets
    store_chain(cache, chain("another prompt", 1))
    router.heard()
    assert (2, 1) == (router.view().leading(KEYS), hits(cache, KEYS))


def test_a_view_of_a_connectors_events() -> None:
    """Stored, found gone, cleared, restarted and lost; what a connector tells is enough for its own engine's shape."""
    keys = chunk_keys(SPACE, range(12), [CacheSalt("s")])
    view = ChunkView()
    parents = [SPACE.root, *(key.digest for key in keys)]
    view.apply(
        ChunkStored(key=key.digest, parent=parent, start=key.start, n_tokens=4)
        for key, parent in zip(keys, parents, strict=False)
    )
    digests = chunk_digests(SPACE, range(12), [CacheSalt("s")])
    assert (3, 3, 0) == (
        view.leading(digests),
        view.leading(digests, world=8, groups=2),
        view.leading(chunk_digests(SPACE, range(12))),
    )
    view.apply([ChunkRemoved((digests[1], bytes(32)))])
    assert (1, 2) == (view.leading(digests), len(view))
    view.apply([Lost(3, 5), SpaceCleared()])
    assert (0, 0, 2) == (view.leading(digests), len(view), view.lost)
    view.apply([ChunksHeld(keys=(digests[0],), world=1, group=0), Restarted(b"b" * 16, SPACE.root)])
    assert (0, 0) == (len(view), view.lost)


# ---- over sockets


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[EventPublisher]:
    """What a server publishes by."""
    with EventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as made:
        yield made


def serving(tmp_path: Path, publisher: EventPublisher, *, memory: int = 2**20, store: bool = False) -> CacheServer:
    """A server that tells of its cache."""
    disk = DiskTier(tmp_path / "store", budget=2**30, fsync=Fsync.RENAME_ONLY) if store else None
    cache = ChunkCache(memory, disk)
    cache.load()
    terms = ServerTerms(boot_id=os.urandom(16))
    service = CacheService(cache, terms, started=time.monotonic(), news=CacheNews(publisher))
    return CacheServer(f"ipc://{tmp_path}/cache", service)


def told(publisher: EventPublisher, view: ChunkView, subscriber: EventSubscriber, count: int) -> list[FeedItem]:
    """What a subscriber hears until the server is quiet and the view has that many chunks."""
    heard: list[FeedItem] = []
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        items = subscriber.receive(0.05) or subscriber.catch_up()
        view.apply(items)
        heard += items
        if not items and len(view) == count:
            break
    return heard


def tensors(count: int) -> list[Any]:
    """A value for each chunk."""
    return [torch.full((64,), place, dtype=torch.uint8) for place in range(count)]


@pytest.mark.zmq
def test_a_router_knows_what_a_server_would_hit(tmp_path: Path, publisher: EventPublisher) -> None:
    """Two prompts in room for five chunks, then a clear: at each point the view says what a lookup says."""
    first, second = (chunk_digests(SPACE, range(start, start + 16)) for start in (0, 100))
    with (
        serving(tmp_path, publisher, memory=5 * COST) as server,
        CacheClient(server.address, SPACE) as client,
        EventSubscriber(publisher.address, publisher.replay_address, root=SPACE.root) as subscriber,
    ):
        client.wait_ready(10)
        view = ChunkView()
        client.store("one", chunk_keys(SPACE, range(16)), tensors(4))
        heard = told(publisher, view, subscriber, 4)
        assert SpaceDescribed(space_to_wire(SPACE)) in heard
        assert (4, 0) == (view.leading(first), view.leading(second))
        client.store("two", chunk_keys(SPACE, range(100, 116)), tensors(4))
        heard = told(publisher, view, subscriber, 5)
        assert 3 == sum(len(one.keys) for one in heard if isinstance(one, ChunkRemoved))
        for session, keys in (("three", first), ("four", second)):
            found = client.lookup(session, keys, lease=False)
            assert view.leading(keys) == found.hit_chunks
        assert (1, 4) == (view.leading(first), view.leading(second))
        assert 0 < int(client.status()["events.batches"] or 0)
        client.clear("space")
        told(publisher, view, subscriber, 0)
        assert (0, 0, 0) == (len(view), view.lost, client.lookup("five", first, lease=False).hit_chunks)


@pytest.mark.zmq
def test_a_restarted_server_is_another_publisher(tmp_path: Path) -> None:
    """What the first one told is void; what it left on disk is told by the second, to whoever listened all along."""
    keys = chunk_digests(SPACE, range(16))
    with EventSubscriber(
        f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", root=SPACE.root, replay_timeout=10
    ) as subscriber:
        view = ChunkView()
        for turn in range(2):
            with (
                EventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as publisher,
                serving(tmp_path, publisher, store=True) as server,
                CacheClient(server.address, SPACE) as client,
            ):
                client.wait_ready(10)
                if not turn:
                    client.store("one", chunk_keys(SPACE, range(16)), tensors(4))
                heard = told(publisher, view, subscriber, 4)
                assert 1 == sum(isinstance(one, Restarted) for one in heard)
                assert (4, 0) == (view.leading(keys), view.lost)


@pytest.mark.zmq
def test_a_subscriber_that_does_not_read_stalls_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue fills and drops while the publisher goes on; the numbers then tell it what to ask for."""
    monkeypatch.setattr(event_feed, "SEND_QUEUE", 4)
    context = zmq.Context()
    sleeper = context.socket(zmq.SUB)
    sleeper.rcvhwm = 1
    sleeper.linger = 0
    try:
        with EventPublisher(f"ipc://{tmp_path}/small", f"ipc://{tmp_path}/small-replay") as small:
            sleeper.connect(small.address)
            sleeper.subscribe(b"xk2/")
            ends = time.monotonic() + 10
            while not sleeper.poll(20) and time.monotonic() < ends:
                small.publish(SPACE.root, ())
            big = ChunkRemoved(tuple(bytes(32) for _ in range(4096)))
            last = [small.publish(SPACE.root, (big,)) for _ in range(200)][-1]
            numbers = []
            while sleeper.poll(100):
                numbers.append(int.from_bytes(sleeper.recv_multipart()[1], "big"))
            assert len(numbers) < 200 <= last  # negative control: it did miss some
            with EventSubscriber(small.address, small.replay_address, root=SPACE.root, replay_timeout=10) as reader:
                got = reader.catch_up()
            assert 200 == sum(isinstance(one, ChunkRemoved) for one in got)
            assert not any(isinstance(one, Lost) for one in got)
    finally:
        context.destroy(linger=0)
