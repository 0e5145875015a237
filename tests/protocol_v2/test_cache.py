"""The cache core over memory and disk, driven as a server drives it."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from keying import CacheSalt, ExtraKey, KeySpace, LoraAdapter, MultimodalItem, chunk_digests
from protocol_v2.cache import CacheBusyError, CacheLimits, ChunkCache
from protocol_v2.codes import MissReason
from protocol_v2.leases import LeaseScopeError, LeaseTableFullError, LeaseUnknownError
from protocol_v2.outcomes import Hit, Retrieved, StoreOutcome
from protocol_v2.sessions import SessionEndedError, SessionIdentityError
from protocol_v2.storage import ObjectId, Shard, StorageValueError, TensorSpec, stored_object
from protocol_v2.storage.names import description_name
from protocol_v2.storage.objects import OBJECT_OVERHEAD, Envelope
from protocol_v2.tiers import TierFullError, TierReadOnlyError
from tests.protocol_v2.faulty_os import FaultyOs, always, at
from tests.protocol_v2.storage_samples import (
    ALONE,
    CHUNK,
    OTHER_ROOT,
    ROOT,
    chain,
    files_in,
    hits,
    make_object,
    open_cache,
    open_disk,
    run,
    store_chain,
)

if TYPE_CHECKING:
    from pathlib import Path

    from protocol_v2.work import Task

KEYS = chain("cache", 6)
OTHER = chain("other", 6)
COST = 64 + OBJECT_OVERHEAD
BLOCKS = 8192
"""What an object of 64 bytes costs on disk."""


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkCache:
    """An empty cache, in memory alone and over a disk tier."""
    return open_cache(tmp_path if request.param == "disk" else None)


def lookup(cache: ChunkCache, keys: list[bytes], **options: Any) -> Hit:
    """A lookup that takes a lease."""
    defaults: dict[str, Any] = {"owner": "reader", "now": 0.0}
    return cache.lookup(ROOT, keys, **(defaults | options))


def lease_of(cache: ChunkCache, keys: list[bytes], **options: Any) -> bytes:
    """The lease of a lookup that hits."""
    lease = lookup(cache, keys, **options).lease
    assert lease is not None
    return lease


def delivered(
    cache: ChunkCache, lease: bytes, start: int, stop: int, shard: Shard = ALONE, **options: Any
) -> tuple[list[bytes], MissReason | None]:
    """Bytes of a range, and why it ends early."""
    got = run(cache.retrieve(lease, start, stop, shard, **({"now": 0.0} | options)))
    return [bytes(obj.buffers[0]) for obj in got.objects], got.miss


def expected(keys: list[bytes], *places: int, shard: Shard = ALONE) -> list[bytes]:
    """What was stored for chunks of a chain."""
    return [bytes(make_object(keys, place, shard=shard).buffers[0]) for place in places]


# ---- lookup and retrieve


def test_what_was_stored_is_hit_and_delivered(cache: ChunkCache) -> None:
    """Leading chunks are hit, leased and delivered byte for byte; another prompt misses as absent."""
    store_chain(cache, KEYS[:3])
    hit = lookup(cache, KEYS)
    assert (3, MissReason.ABSENT, 60.0) == (hit.chunks, hit.miss, hit.lease_seconds)
    assert hit.lease is not None
    assert (expected(KEYS, 0, 1, 2), None) == delivered(cache, hit.lease, 0, 3)
    assert (expected(KEYS, 1), None) == delivered(cache, hit.lease, 1, 2)
    assert Hit(0, None, 0.0, MissReason.ABSENT) == lookup(cache, OTHER)
    assert Hit(0, None, 0.0, None) == lookup(cache, [])
    assert 3 == cache.release(hit.lease, now=0.0)
    assert (0, 0) == (cache.status(0.0).leases, cache.status(0.0).held)


def test_a_gap_ends_the_hit(cache: ChunkCache) -> None:
    """Chunks behind a missing one are not hit, though they are there."""
    store_chain(cache, KEYS[:2])
    run(cache.store(make_object(KEYS, 3), now=0.0))
    assert 2 == hits(cache, KEYS)
    run(cache.store(make_object(KEYS, 2), now=0.0))
    assert 4 == hits(cache, KEYS)


def test_spaces_are_apart(cache: ChunkCache) -> None:
    """I7, I8: what is stored under one space misses under another, with equal keys too."""
    store_chain(cache, KEYS[:2])
    assert 2 == hits(cache, KEYS)
    assert 0 == hits(cache, KEYS, root=OTHER_ROOT)
    store_chain(cache, KEYS[:1], root=OTHER_ROOT)
    assert (2, 1) == (hits(cache, KEYS), hits(cache, KEYS, root=OTHER_ROOT))


def test_a_hit_needs_every_shard(cache: ChunkCache) -> None:
    """I10: of a 2 x 2 grid of ranks and groups one missing shard is a miss; with all four it is a hit."""
    shards = [Shard(2, rank, group) for group in range(2) for rank in range(2)]
    for shard in shards:
        assert 0 == hits(cache, KEYS[:1], world=2, groups=2)
        run(cache.store(make_object(KEYS, 0, shard=shard), now=0.0))
    assert 1 == hits(cache, KEYS[:1], world=2, groups=2)
    assert 1 == hits(cache, KEYS[:1], world=2, groups=1)
    assert 0 == hits(cache, KEYS[:1], world=2, groups=3)
    assert 0 == hits(cache, KEYS[:1], world=1)
    assert 0 == hits(cache, KEYS[:1], world=4)


def test_the_hit_is_the_minimum_over_the_ranks(cache: ChunkCache) -> None:
    """H10: rank 0 has three chunks, rank 1 has two: the hit is two, and both ranks get them."""
    for rank, count in ((0, 3), (1, 2)):
        for index in range(count):
            run(cache.store(make_object(KEYS, index, shard=Shard(2, rank, 0)), now=0.0))
    hit = lookup(cache, KEYS[:3], world=2)
    assert 2 == hit.chunks
    assert hit.lease is not None
    for rank in range(2):
        shard = Shard(2, rank, 0)
        assert (expected(KEYS, 0, 1, shard=shard), None) == delivered(cache, hit.lease, 0, 2, shard)


@pytest.mark.parametrize(("world", "groups"), [(0, 1), (1, 0), (65536, 1), (1, 65537), (-1, 1), (300, 300)])
def test_impossible_worlds_are_refused(cache: ChunkCache, world: int, groups: int) -> None:
    """A world that no name can address, or that is too large to count, is a typed error."""
    with pytest.raises(StorageValueError, match="world"):
        lookup(cache, KEYS, world=world, groups=groups)
    with pytest.raises(StorageValueError, match="world"):
        cache.prefetch(ROOT, KEYS, world=world, groups=groups, now=0.0)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_shortened_keys_are_refused(cache: ChunkCache, size: int) -> None:
    """S7: a key or root that is not 32 bytes is an error at this boundary, in every keyed call."""
    for root, keys in ((ROOT, [KEYS[0], bytes(size)]), (bytes(size), KEYS)):
        with pytest.raises(StorageValueError, match="wanted exactly 32"):
            cache.lookup(root, keys, owner="a", now=0.0)
        with pytest.raises(StorageValueError, match="wanted exactly 32"):
            cache.prefetch(root, keys, now=0.0)
        with pytest.raises(StorageValueError, match="wanted exactly 32"):
            cache.bind("a", "s", root, keys, now=0.0)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (-1, 1), (0, 4), (3, 4)])
def test_ranges_beyond_the_lease_are_refused(cache: ChunkCache, start: int, stop: int) -> None:
    """J5: a retrieve names a part of its lease: nothing negative, empty or beyond the hit."""
    store_chain(cache, KEYS[:3])
    with pytest.raises(LeaseScopeError, match="range"):
        cache.retrieve(lease_of(cache, KEYS), start, stop, ALONE, now=0.0)


def test_shards_beyond_the_lease_are_refused(cache: ChunkCache) -> None:
    """A shard of another world, and a lease that is not known, are typed errors."""
    store_chain(cache, KEYS[:1])
    lease = lease_of(cache, KEYS)
    for shard in (Shard(2, 0, 0), Shard(1, 0, 1)):
        with pytest.raises(LeaseScopeError, match="shard"):
            cache.retrieve(lease, 0, 1, shard, now=0.0)
    with pytest.raises(LeaseUnknownError, match="look up again"):
        cache.retrieve(bytes(16), 0, 1, ALONE, now=0.0)
    cache.release(lease, now=0.0)
    with pytest.raises(LeaseUnknownError):
        cache.retrieve(lease, 0, 1, ALONE, now=0.0)


def test_readers_cannot_change_what_is_stored(cache: ChunkCache) -> None:
    """R3: writing to what was delivered fails, and writing to what was sent changes nothing."""
    buffer = bytearray(b"right" * 4)
    envelope = Envelope(make_object(KEYS, 0).id, 0, CHUNK, (TensorSpec("uint8", (20,), 20),), ROOT)
    run(cache.store(stored_object(envelope, [buffer]), now=0.0))
    buffer[:5] = b"wrong"
    lease = lease_of(cache, KEYS)
    view = run(cache.retrieve(lease, 0, 1, ALONE, now=0.0)).objects[0].buffers[0]
    assert b"right" * 4 == bytes(view)
    with pytest.raises(TypeError):
        view[0] = 0


def test_a_reused_buffer_never_reaches_the_cache(tmp_path: Path) -> None:
    """J6: a block that is freed and overwritten between submit and copy is stored as it was when it was submitted."""
    cache = open_cache(tmp_path)
    block = bytearray(b"a" * 64)
    envelope = make_object(KEYS, 0).envelope
    task = cache.store(stored_object(envelope, [block]), now=0.0)
    block[:] = b"b" * 64
    run(task)
    assert ([b"a" * 64], None) == delivered(cache, lease_of(cache, KEYS), 0, 1)
    run(cache.close(0.0))
    again = open_cache(tmp_path)
    assert ([b"a" * 64], None) == delivered(again, lease_of(again, KEYS), 0, 1)


def test_records_carry_their_own_sizes(cache: ChunkCache) -> None:
    """J3: a partial tail comes back with its one token and its bytes, not with a chunk's."""
    store_chain(cache, KEYS[:1])
    envelope = Envelope(make_object(KEYS, 1).id, CHUNK, 1, (TensorSpec("uint8", (1, 4), 4),), KEYS[0])
    run(cache.store(stored_object(envelope, [b"tail"]), now=0.0))
    got = run(cache.retrieve(lease_of(cache, KEYS), 0, 2, ALONE, now=0.0)).objects
    assert [(0, 16, 64), (16, 1, 4)] == [
        (one.envelope.start, one.envelope.n_tokens, one.envelope.payload_size) for one in got
    ]


def test_nothing_is_read_that_cannot_be_sent(tmp_path: Path) -> None:
    """With room for less than the range its prefix comes, one object at least, and no file behind it is read."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:3])
    lease = lease_of(cache, KEYS)
    assert (expected(KEYS, 0, 1), None) == delivered(cache, lease, 0, 3, room=128)
    assert (expected(KEYS, 2), None) == delivered(cache, lease, 2, 3, room=0)
    run(cache.close(0.0))
    cache = open_cache(tmp_path)
    lease = lease_of(cache, KEYS)
    assert (expected(KEYS, 0, 1), None) == delivered(cache, lease, 0, 3, room=2 * BLOCKS)
    assert 2 == cache.status(0.0).memory.objects
    assert (expected(KEYS, 0, 1, 2), None) == delivered(cache, lease, 0, 3)


def test_another_start_is_a_miss_for_who_cannot_rotate(cache: ChunkCache) -> None:
    """A reader that names the starts it can use gets the prefix that has them; one that names none gets all."""
    store_chain(cache, KEYS[:3])
    lease = lease_of(cache, KEYS)
    assert (expected(KEYS, 0, 1, 2), None) == delivered(cache, lease, 0, 3, starts=[0, 16, 32])
    assert (expected(KEYS, 0), MissReason.IDENTITY_MISMATCH) == delivered(cache, lease, 0, 3, starts=[0, 17, 32])
    with pytest.raises(LeaseScopeError, match="starts"):
        cache.retrieve(lease, 0, 3, ALONE, starts=[0], now=0.0)


def test_identity_of_the_request_reaches_the_cache(cache: ChunkCache) -> None:
    """A1, O1: equal tokens with another image, adapter or salt miss, with the same ones they hit; leases end at 0."""
    space = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
    tokens = list(range(12))
    kinds: list[list[ExtraKey]] = [
        [],
        [MultimodalItem("x", 4, 4)],
        [MultimodalItem("y", 4, 4)],
        [LoraAdapter("a")],
        [CacheSalt("s")],
    ]
    chains = [chunk_digests(space, tokens, kind) for kind in kinds]
    store_chain(cache, chains[1], root=space.root)
    assert [1, 3, 1, 0, 0] == [hits(cache, one, root=space.root) for one in chains]
    for keys in chains:
        lease = cache.lookup(space.root, keys, owner="reader", now=0.0).lease
        if lease is not None:
            cache.release(lease, now=0.0)
    assert 0 == cache.status(0.0).held


# ---- store


def test_a_store_is_idempotent(cache: ChunkCache) -> None:
    """The same identity again is present; the first bytes stay, and the counts tell."""
    assert StoreOutcome.STORED is run(cache.store(make_object(KEYS, 0), now=0.0))
    assert StoreOutcome.PRESENT is run(cache.store(make_object(KEYS, 0, fill=7), now=0.0))
    assert (expected(KEYS, 0), None) == delivered(cache, lease_of(cache, KEYS), 0, 1)
    assert {StoreOutcome.STORED: 1, StoreOutcome.PRESENT: 1} == cache.status(0.0).stored


def test_the_same_store_twice_at_once_leaves_nothing_raised(tmp_path: Path) -> None:
    """O11: two stores of one key under way together both succeed, and no reservation, lease or file is left over."""
    cache = open_cache(tmp_path)
    tasks = [cache.store(make_object(KEYS, 0), now=0.0) for _ in range(3)]
    assert 3 * 64 == cache.status(0.0).pending
    for task in reversed(tasks):
        task.run()
    assert [StoreOutcome.STORED] * 3 == [task.finish(0.0) for task in tasks]
    status = cache.status(0.0)
    assert status.disk is not None
    assert (0, 0, 1, BLOCKS, 1) == (
        status.pending,
        status.held,
        status.disk.objects,
        status.disk.used,
        hits(cache, KEYS),
    )
    lease = lease_of(cache, KEYS)
    cache.release(lease, now=0.0)
    assert 1 == run(cache.clear(now=0.0)).objects
    assert [] == files_in(tmp_path)


def test_a_store_under_way_is_not_visible(tmp_path: Path) -> None:
    """A chunk is a hit from the acknowledgement on: not while it is planned, and not while it is written."""
    cache = open_cache(tmp_path)
    task = cache.store(make_object(KEYS, 0), now=0.0)
    assert 0 == hits(cache, KEYS)
    task.run()
    assert 0 == hits(cache, KEYS)
    task.finish(0.0)
    assert 1 == hits(cache, KEYS)


def test_a_cancelled_store_leaves_nothing(tmp_path: Path) -> None:
    """A store that was never run gives back what it reserved, and what it would have evicted is still there."""
    cache = open_cache(tmp_path, memory=0, disk=2 * BLOCKS)
    store_chain(cache, KEYS[:2])
    task = cache.store(make_object(OTHER, 0), now=0.0)
    assert 1 == hits(cache, KEYS)
    task.cancel(0.0)
    status = cache.status(0.0)
    assert status.disk is not None
    assert (0, 2 * BLOCKS, 0, 2, 0) == (
        status.pending,
        status.disk.used,
        status.disk.evicted,
        hits(cache, KEYS),
        hits(cache, OTHER),
    )
    run(cache.store(make_object(OTHER, 0), now=0.0))
    assert 1 == hits(cache, OTHER)


def test_restarts_find_what_was_acknowledged(tmp_path: Path) -> None:
    """Every acknowledged object is hit and delivered after an orderly end, and after none."""
    for orderly in (True, False):
        folder = tmp_path / str(orderly)
        cache = open_cache(folder)
        store_chain(cache, KEYS)
        if orderly:
            run(cache.close(0.0))
        else:
            disk = cache._disk
            assert disk is not None
            disk.tier.close()
        again = open_cache(folder)
        lease = lease_of(again, KEYS)
        assert (expected(KEYS, *range(6)), None) == delivered(again, lease, 0, 6)
        assert {"disk": 6, "memory": 0} == again.status(0.0).retrieved
        assert (expected(KEYS, *range(6)), None) == delivered(again, lease, 0, 6)
        assert {"disk": 6, "memory": 6} == again.status(0.0).retrieved


def test_close_is_idempotent(tmp_path: Path) -> None:
    """A second close does nothing, and without a disk tier a first one does not either."""
    cache = open_cache(tmp_path)
    run(cache.close(0.0))
    run(cache.close(0.0))
    run(open_cache(None).close(0.0))
    assert 0 == open_cache(tmp_path).status(0.0).failed


def test_spaces_are_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description is written in the background, once; a failure is told and tried again."""
    space = KeySpace("org/model", chunk_size=16, kv_dtype="bfloat16")
    cache = open_cache(tmp_path)
    with monkeypatch.context() as patched:
        FaultyOs(always("open", errno.EROFS)).install(patched)
        with pytest.raises(TierReadOnlyError):
            run(cache.describe(space))
    task = cache.describe(space)
    assert not task.ready
    run(task)
    assert (tmp_path / description_name(space.root)).exists()
    assert cache.describe(space).ready
    assert open_cache(None).describe(space).ready


# ---- eviction


def test_memory_is_a_copy_of_the_disk(tmp_path: Path) -> None:
    """With a disk tier, evicting from memory loses nothing: what does not fit is read from disk."""
    cache = open_cache(tmp_path, memory=2 * COST)
    store_chain(cache, KEYS)
    status = cache.status(0.0)
    assert status.disk is not None
    assert (2, 6) == (status.memory.objects, status.disk.objects)
    assert (expected(KEYS, *range(6)), None) == delivered(cache, lease_of(cache, KEYS), 0, 6)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_suffix_goes_before_prefix_and_is_counted(tmp_path: Path, where: str) -> None:
    """J10: under pressure the end of an old prompt goes first, its beginning last, and evictions are counted."""
    cache = open_cache(None, memory=4 * COST) if where == "memory" else open_cache(tmp_path, memory=0, disk=4 * BLOCKS)
    store_chain(cache, KEYS[:4])
    for index in range(3):
        run(cache.store(make_object(OTHER, index), now=0.0))
        assert (3 - index, index + 1) == (hits(cache, KEYS), hits(cache, OTHER))
    status = cache.status(0.0)
    tier = status.memory if where == "memory" else status.disk
    assert tier is not None
    assert (3, 4) == (tier.evicted, tier.objects)
    if where == "disk":
        assert 4 == len(files_in(tmp_path))
        run(cache.close(0.0))
        again = open_cache(tmp_path, memory=0, disk=4 * BLOCKS)
        assert (1, 3) == (hits(again, KEYS), hits(again, OTHER))


def test_lookups_keep_a_prefix_alive(cache: ChunkCache) -> None:
    """J10: hits of B by way of A touch A too; what was not looked up goes first."""
    cache._memory.residency.budget = 4 * COST
    if cache._disk is not None:
        cache._disk.tier.budget = 4 * BLOCKS
    store_chain(cache, KEYS[:2])
    store_chain(cache, OTHER[:2])
    hits(cache, KEYS)
    run(cache.store(make_object(chain("third", 1), 0), now=0.0))
    assert (2, 1) == (hits(cache, KEYS), hits(cache, OTHER))


def test_leased_chunks_are_not_evicted(cache: ChunkCache) -> None:
    """Under any pressure a leased chunk stays; what finds no room is declined; after the release it goes."""
    cache._memory.residency.budget = 3 * COST
    if cache._disk is not None:
        cache._disk.tier.budget = 3 * BLOCKS
    store_chain(cache, KEYS[:3])
    lease = lease_of(cache, KEYS)
    for index in range(3):
        assert StoreOutcome.DECLINED is run(cache.store(make_object(chain(f"{index}", 1), 0), now=0.0))
    assert (expected(KEYS, 0, 1, 2), None) == delivered(cache, lease, 0, 3)
    assert 1 == cache.release(lease, start=2, now=0.0)
    assert StoreOutcome.STORED is run(cache.store(make_object(OTHER, 0), now=0.0))
    assert (2, 1) == (hits(cache, KEYS), hits(cache, OTHER))
    assert {StoreOutcome.STORED: 4, StoreOutcome.DECLINED: 3} == cache.status(0.0).stored


def test_a_long_prompt_keeps_its_beginning(cache: ChunkCache) -> None:
    """J10: a prompt that is longer than the budget keeps what can be hit, not an end that nothing leads to."""
    cache._memory.residency.budget = 3 * COST
    if cache._disk is not None:
        cache._disk.tier.budget = 3 * BLOCKS
    store_chain(cache, KEYS)
    assert 3 == hits(cache, KEYS)
    assert {StoreOutcome.STORED: 3, StoreOutcome.DECLINED: 3} == cache.status(0.0).stored


def test_eviction_between_lookup_and_retrieve(cache: ChunkCache) -> None:
    """J9: after the lease expired, chunk 2 of 3 goes: the retrieve delivers the prefix that is there and says why."""
    cache._memory.residency.budget = 3 * COST
    if cache._disk is not None:
        cache._disk.tier.budget = 3 * BLOCKS
    store_chain(cache, KEYS[:3])
    lease = lease_of(cache, KEYS, ttl=5.0)
    cache.maintain(5.0)
    run(cache.store(make_object(OTHER, 0), now=5.0), 5.0)
    assert (expected(KEYS, 0, 1), MissReason.ABSENT) == delivered(cache, lease, 0, 3, now=6.0)
    assert {MissReason.ABSENT: 1} == cache.status(6.0).undelivered
    assert 3 == cache.release(lease, now=6.0)
    assert (0, 0) == (cache.status(6.0).held, cache.status(6.0).leases)


def test_restarts_keep_the_order_of_use(tmp_path: Path) -> None:
    """LRU across restarts: what was looked up before outlives what was not, and suffixes still go first."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:2])
    store_chain(cache, OTHER[:2])
    hits(cache, KEYS)
    run(cache.close(0.0))
    cache = open_cache(tmp_path, memory=0, disk=4 * BLOCKS)
    store_chain(cache, chain("third", 3))
    assert (1, 0, 3) == (hits(cache, KEYS), hits(cache, OTHER), hits(cache, chain("third", 3)))


def test_a_smaller_budget_is_kept_from_the_start(tmp_path: Path) -> None:
    """A restart with less room evicts at once, in the order of use, and counts it."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS)
    run(cache.close(0.0))
    cache = open_cache(tmp_path, disk=2 * BLOCKS)
    status = cache.status(0.0)
    assert status.disk is not None
    assert (2, 4, 2) == (hits(cache, KEYS), status.disk.evicted, len(files_in(tmp_path)))


def test_uses_are_flushed_in_the_background(tmp_path: Path) -> None:
    """A server that is killed remembers the uses of all but the last seconds."""
    cache = open_cache(tmp_path, flush_seconds=10.0)
    store_chain(cache, KEYS[:2])
    store_chain(cache, OTHER[:2])
    hits(cache, OTHER)
    assert [1, 0] == [len(cache.maintain(now)) for now in (10.0, 10.5)]
    hits(cache, KEYS)
    for task in cache.maintain(20.0):
        run(task)
    disk = cache._disk
    assert disk is not None
    disk.tier.close()
    cache = open_cache(tmp_path, disk=2 * BLOCKS)
    assert (2, 0) == (hits(cache, KEYS), hits(cache, OTHER))


# ---- leases, sessions, clients


def test_the_part_that_is_not_used_is_free_at_once(cache: ChunkCache) -> None:
    """O3: hit five, take two: three are released at once, two after the retrieve."""
    store_chain(cache, KEYS[:5])
    lease = lease_of(cache, KEYS)
    assert 3 == cache.release(lease, start=2, now=0.0)
    assert 2 == cache.status(0.0).held
    assert (expected(KEYS, 0, 1), None) == delivered(cache, lease, 0, 2)
    assert 2 == cache.release(lease, now=0.0)
    assert (0, 0) == (cache.status(0.0).held, cache.status(0.0).leases)


def test_two_readers_hold_apart(cache: ChunkCache) -> None:
    """O4: two readers on one chunk; the first frees twice, the second still holds, under pressure too."""
    cache._memory.residency.budget = COST
    if cache._disk is not None:
        cache._disk.tier.budget = BLOCKS
    store_chain(cache, KEYS[:1])
    first, second = lease_of(cache, KEYS), lease_of(cache, KEYS, owner="other")
    assert [1, 0] == [cache.release(first, now=0.0) for _ in range(2)]
    assert StoreOutcome.DECLINED is run(cache.store(make_object(OTHER, 0), now=0.0))
    assert (expected(KEYS, 0), None) == delivered(cache, second, 0, 1)


def test_every_shard_releases_for_itself(cache: ChunkCache) -> None:
    """A tensor-parallel reader's chunk stays until its last rank gave it back."""
    for rank in range(2):
        run(cache.store(make_object(KEYS, 0, shard=Shard(2, rank, 0)), now=0.0))
    lease = lease_of(cache, KEYS, world=2)
    assert [0, 0, 1] == [cache.release(lease, shard=Shard(2, rank, 0), now=0.0) for rank in (0, 0, 1)]


def test_an_expired_lease_is_taken_again(cache: ChunkCache) -> None:
    """Expired but still resident data can be taken again by the same lease, which then protects it again."""
    store_chain(cache, KEYS[:2])
    lease = lease_of(cache, KEYS, ttl=5.0)
    cache.maintain(100.0)
    assert (0, 1) == (cache.status(100.0).held, cache.status(100.0).lapsed)
    assert (expected(KEYS, 0, 1), None) == delivered(cache, lease, 0, 2, now=100.0)
    assert (2, 0) == (cache.status(100.0).held, cache.status(100.0).lapsed)


def test_leases_last_at_most_as_long_as_the_cache_allows(cache: ChunkCache) -> None:
    """A caller cannot pin chunks for ever."""
    store_chain(cache, KEYS[:1])
    assert 600.0 == lookup(cache, KEYS, ttl=10.0**9).lease_seconds
    assert 0.5 == lookup(cache, KEYS, ttl=0.5).lease_seconds


def test_leases_and_sessions_die_with_their_client(cache: ChunkCache) -> None:
    """O9, O10: when a client is gone, what it held is free and its sessions are forgotten; others keep theirs."""
    store_chain(cache, KEYS[:2])
    lookup(cache, KEYS, session="s")
    other = lease_of(cache, KEYS, owner="other", session="s")
    cache.drop_owner("reader", 0.0)
    status = cache.status(0.0)
    assert (1, 2, 1) == (status.leases, status.held, status.sessions)
    lookup(cache, OTHER, session="s")
    assert (expected(KEYS, 0), None) == delivered(cache, other, 0, 1)
    cache.drop_owner("other", 0.0)
    cache.drop_owner("reader", 0.0)
    assert (0, 0, 0) == (cache.status(0.0).leases, cache.status(0.0).held, cache.status(0.0).sessions)


def test_sessions_hold_one_identity(cache: ChunkCache) -> None:
    """A session id that names another prompt, in any keyed call, is refused, and nothing is stored of it."""
    store_chain(cache, KEYS[:2])
    lookup(cache, KEYS[:4], session="s")
    with pytest.raises(SessionIdentityError):
        lookup(cache, OTHER, session="s")
    with pytest.raises(SessionIdentityError):
        cache.prefetch(ROOT, OTHER, owner="reader", session="s", now=0.0)
    with pytest.raises(SessionIdentityError):
        cache.bind("reader", "s", ROOT, OTHER, now=0.0)
    task = cache.store(make_object(OTHER, 2), owner="reader", session="s", index=2, now=0.0)
    with pytest.raises(SessionIdentityError):
        run(task)
    lookup(cache, OTHER, session="t")
    lookup(cache, OTHER, session="s", owner="other")
    cache.bind("reader", "s", ROOT, KEYS[2:], first=2, now=0.0)
    run(cache.store(make_object(KEYS, 2), owner="reader", session="s", index=2, now=0.0))
    assert (3, 0) == (hits(cache, KEYS), hits(cache, OTHER))


def test_partial_tails_are_not_bound(cache: ChunkCache) -> None:
    """J7: the index of a partial tail may hold the full chunk later, in one session."""
    tail = chain("tail", 1)[0]
    lookup(cache, [*KEYS[:2], tail], session="s", full=2)
    run(cache.store(make_object([*KEYS[:2], tail], 2), owner="reader", session="s", now=0.0))
    lookup(cache, KEYS[:3], session="s")
    with pytest.raises(SessionIdentityError):
        lookup(cache, [*KEYS[:2], tail], session="s")


def test_cancel_end_and_store_in_every_order(cache: ChunkCache) -> None:
    """O5: cancel frees the leases and still takes a last store; end is idempotent, a store after it keeps nothing."""
    store_chain(cache, KEYS[:1])
    lookup(cache, KEYS, session="s")
    assert cache.cancel_session("reader", "s", 0.0)
    assert not cache.cancel_session("reader", "s", 0.0)
    assert 0 == cache.status(0.0).held
    last = cache.store(make_object(KEYS, 1), owner="reader", session="s", index=1, now=0.0)
    assert StoreOutcome.STORED is run(last)
    assert cache.end_session("reader", "s", 0.0)
    assert not cache.end_session("reader", "s", 0.0)
    late = cache.store(make_object(KEYS, 2), owner="reader", session="s", index=2, now=0.0)
    assert late.ready
    with pytest.raises(SessionEndedError):
        late.finish(0.0)
    assert 2 == hits(cache, KEYS)
    lookup(cache, OTHER, session="s")
    assert (1, 0) == (cache.status(0.0).sessions, cache.status(0.0).held)


def test_ending_a_session_ends_its_leases(cache: ChunkCache) -> None:
    """The leases of a session, expired ones included, end with it; a lease of another session stands."""
    store_chain(cache, KEYS[:2])
    lapsed = lease_of(cache, KEYS, session="s", ttl=1.0)
    lookup(cache, KEYS, session="s", now=1.0)
    lookup(cache, KEYS, session="t", now=1.0)
    cache.end_session("reader", "s", 1.0)
    assert (1, 2, 0) == (cache.status(1.0).leases, cache.status(1.0).held, cache.status(1.0).lapsed)
    with pytest.raises(LeaseUnknownError):
        cache.retrieve(lapsed, 0, 1, ALONE, now=1.0)


def test_idle_sessions_end_with_their_leases(cache: ChunkCache) -> None:
    """R: a session without a call for its time to live is forgotten by maintenance."""
    store_chain(cache, KEYS[:2])
    lookup(cache, KEYS, session="s", ttl=600.0)
    cache.maintain(599.0)
    assert 1 == cache.status(599.0).sessions
    cache.maintain(600.0)
    assert (0, 0) == (cache.status(600.0).sessions, cache.status(600.0).held)


def test_release_never_waits_for_a_disk(tmp_path: Path) -> None:
    """O7: with every thread stuck in the disk tier, lookups, releases and ends are answered at once."""
    cache = open_cache(tmp_path, memory=0)
    store_chain(cache, KEYS[:2])
    lease = lease_of(cache, KEYS, session="s")
    stuck, go = threading.Event(), threading.Event()
    disk = cache._disk
    assert disk is not None
    real = disk.tier.get

    def slow(wanted: Any) -> Any:
        stuck.set()
        assert go.wait(10)
        return real(wanted)

    disk.tier.get = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        task = cache.retrieve(lease, 0, 2, ALONE, now=0.0)
        running = pool.submit(task.run)
        assert stuck.wait(10)
        assert 2 == hits(cache, KEYS)
        assert 2 == cache.release(lease, now=0.0)
        assert cache.end_session("reader", "s", 0.0)
        cache.drop_owner("reader", 0.0)
        assert 0 == cache.status(0.0).held
        go.set()
        running.result(10)
    assert 2 == len(task.finish(0.0).objects)
    assert 0 == cache.status(0.0).pending


# ---- prefetch


def test_prefetch_brings_leading_chunks_into_memory(tmp_path: Path) -> None:
    """After a restart a prefetch reads ahead, one task a chunk; the retrieve then needs no disk."""
    store = open_cache(tmp_path)
    store_chain(store, KEYS[:4])
    run(store.close(0.0))
    cache = open_cache(tmp_path)
    prefetch = cache.prefetch(ROOT, KEYS, now=0.0)
    assert (0, 4) == (prefetch.resident, len(prefetch.tasks))
    again = cache.prefetch(ROOT, KEYS, now=0.0)
    assert (0, 0) == (again.resident, len(again.tasks))
    assert [True] * 4 == [run(task) for task in prefetch.tasks]
    done = cache.prefetch(ROOT, KEYS, now=0.0)
    assert (4, 0) == (done.resident, len(done.tasks))
    task = cache.retrieve(lease_of(cache, KEYS), 0, 4, ALONE, now=0.0)
    assert task.ready
    assert expected(KEYS, 0, 1, 2, 3) == [bytes(one.buffers[0]) for one in task.finish(0.0).objects]
    assert 0 == cache.status(0.0).pending


def test_prefetch_reads_every_shard(tmp_path: Path) -> None:
    """A prefetch for a world brings all its shards; of a chunk that lacks one it brings none."""
    shards = [Shard(2, rank, group) for rank in range(2) for group in range(2)]
    store = open_cache(tmp_path)
    for shard in shards:
        run(store.store(make_object(KEYS, 0, shard=shard), now=0.0))
    run(store.store(make_object(KEYS, 1, shard=shards[0]), now=0.0))
    run(store.close(0.0))
    cache = open_cache(tmp_path)
    [task] = cache.prefetch(ROOT, KEYS, world=2, groups=2, now=0.0).tasks
    assert run(task)
    assert 4 == cache.status(0.0).memory.objects


def test_prefetch_stays_within_memory_and_bounds(tmp_path: Path) -> None:
    """R: a prefetch reads no more than memory can hold, and no more than may be under way."""
    store = open_cache(tmp_path)
    store_chain(store, KEYS)
    run(store.close(0.0))
    cache = open_cache(tmp_path, memory=2 * BLOCKS)
    assert 2 == len(cache.prefetch(ROOT, KEYS, now=0.0).tasks)
    run(cache.close(0.0))
    cache = open_cache(tmp_path, max_pending=3 * BLOCKS)
    tasks = cache.prefetch(ROOT, KEYS, now=0.0).tasks
    assert 3 == len(tasks)
    for task in tasks:
        task.cancel(0.0)
    assert 0 == cache.status(0.0).pending
    assert 3 == len(cache.prefetch(ROOT, KEYS, now=0.0).tasks)


def test_prefetch_survives_what_it_finds(tmp_path: Path) -> None:
    """A prefetch of a damaged chunk gives False, and the chunk is a miss with its reason."""
    store = open_cache(tmp_path)
    store_chain(store, KEYS[:2])
    run(store.close(0.0))
    path = tmp_path / str(make_object(KEYS, 1).id.name)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    cache = open_cache(tmp_path)
    assert [True, False] == [run(task) for task in cache.prefetch(ROOT, KEYS, now=0.0).tasks]
    hit = lookup(cache, KEYS)
    assert (1, MissReason.CHECKSUM) == (hit.chunks, hit.miss)


def test_in_memory_there_is_nothing_to_prefetch() -> None:
    """Without a disk tier a prefetch tells what is resident."""
    cache = open_cache(None)
    store_chain(cache, KEYS[:2])
    prefetch = cache.prefetch(ROOT, KEYS, owner="a", session="s", now=0.0)
    assert (2, ()) == (prefetch.resident, prefetch.tasks)


# ---- clear


def test_clear_forgets_one_space_or_all(cache: ChunkCache) -> None:
    """I8: clearing one space leaves the others; clearing all leaves nothing; both say how much."""
    store_chain(cache, KEYS[:3])
    store_chain(cache, KEYS[:2], root=OTHER_ROOT)
    cleared = run(cache.clear(ROOT, now=0.0))
    assert (3, 0) == (cleared.objects, cleared.kept)
    assert (0, 2) == (hits(cache, KEYS), hits(cache, KEYS, root=OTHER_ROOT))
    assert 2 == run(cache.clear(now=0.0)).objects
    status = cache.status(0.0)
    assert 0 == status.memory.used == (0 if status.disk is None else status.disk.used)
    assert 0 == run(cache.clear(now=0.0)).objects


def test_clear_leaves_what_is_leased(cache: ChunkCache) -> None:
    """Leased chunks survive a clear, and are delivered; released, the next clear takes them."""
    store_chain(cache, KEYS[:3])
    lease = lease_of(cache, KEYS[:2])
    cleared = run(cache.clear(now=0.0))
    assert (1, 2) == (cleared.objects, cleared.kept)
    assert (expected(KEYS, 0, 1), None) == delivered(cache, lease, 0, 2)
    assert 2 == hits(cache, KEYS)
    cache.release(lease, now=0.0)
    assert (2, 0) == (run(cache.clear(now=0.0)).objects, hits(cache, KEYS))


def test_clear_is_seen_at_once_and_by_a_restart(tmp_path: Path) -> None:
    """Lookups miss from the call on, before a file is gone; a restart finds nothing."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:3])
    task = cache.clear(now=0.0)
    assert (0, 3) == (hits(cache, KEYS), len(files_in(tmp_path)))
    run(task)
    assert [] == files_in(tmp_path)
    run(cache.close(0.0))
    assert 0 == hits(open_cache(tmp_path), KEYS)


def test_a_store_that_a_clear_overtakes_is_gone(tmp_path: Path) -> None:
    """A store under way when the clear came counts as before it: acknowledged, not visible, its file removed."""
    cache = open_cache(tmp_path)
    task = cache.store(make_object(KEYS, 0), now=0.0)
    run(cache.clear(now=0.0))
    assert StoreOutcome.STORED is run(task)
    assert (0, 1) == (hits(cache, KEYS), len(files_in(tmp_path)))
    for upkeep in cache.maintain(0.0):
        run(upkeep)
    assert [] == files_in(tmp_path)
    assert StoreOutcome.STORED is run(cache.store(make_object(KEYS, 0), now=0.0))
    assert 1 == hits(cache, KEYS)


def test_a_cancelled_store_that_a_clear_overtook_leaves_no_file(tmp_path: Path) -> None:
    """Two stores of one object, one acknowledged, then a clear, then the other given up: the file goes all the same."""
    cache = open_cache(tmp_path)
    given_up = cache.store(make_object(KEYS, 0), now=0.0)
    run(cache.store(make_object(KEYS, 0), now=0.0))
    run(cache.clear(now=0.0))
    given_up.cancel(0.0)
    assert (0, 1) == (hits(cache, KEYS), len(files_in(tmp_path)))
    for upkeep in cache.maintain(0.0):
        run(upkeep)
    assert [] == files_in(tmp_path)


@pytest.mark.parametrize("first", ["overtaken", "later"])
def test_a_store_after_the_clear_wins(tmp_path: Path, first: str) -> None:
    """A store that came after the clear stays, whichever of both is done first, and through maintenance."""
    cache = open_cache(tmp_path)
    overtaken = cache.store(make_object(KEYS, 0), now=0.0)
    cleared = cache.clear(now=0.0)
    later = cache.store(make_object(KEYS, 0), now=0.0)
    for task in (overtaken, later) if first == "overtaken" else (later, overtaken):
        run(task)
    run(cleared)
    for upkeep in cache.maintain(0.0):
        run(upkeep)
    assert (1, 1) == (hits(cache, KEYS), len(files_in(tmp_path)))
    run(cache.close(0.0))
    assert 1 == hits(open_cache(tmp_path), KEYS)


def test_a_store_between_clear_and_its_removal_wins(tmp_path: Path) -> None:
    """Files that a clear has still to remove are spared where they were written anew."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:2])
    removal = cache.clear(now=0.0)
    run(cache.store(make_object(KEYS, 0), now=0.0))
    run(removal)
    assert (1, 1) == (hits(cache, KEYS), len(files_in(tmp_path)))


def test_a_read_that_a_clear_overtakes_is_not_kept(tmp_path: Path) -> None:
    """A read under way when its lease ends and a clear comes delivers, or misses as absent; memory stays clear."""
    for early in (True, False):
        cache = open_cache(tmp_path / str(early), memory=0)
        store_chain(cache, KEYS[:1])
        cache._memory.residency.budget = 10 * COST
        lease = lease_of(cache, KEYS)
        task = cache.retrieve(lease, 0, 1, ALONE, now=0.0)
        if early:
            task.run()
        cache.release(lease, now=0.0)
        run(cache.clear(now=0.0))
        if not early:
            task.run()
        got = task.finish(0.0)
        assert (1, None) if early else (0, MissReason.ABSENT) == (len(got.objects), got.miss)
        assert (0, 0) == (cache.status(0.0).memory.objects, hits(cache, KEYS))


def test_a_failed_clear_puts_back_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that cannot be removed are indexed again: nothing that is there is forgotten, and the error is told."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:3])
    FaultyOs(at(3, errno.EROFS)).install(monkeypatch)  # unlink, rmdir, unlink
    with pytest.raises(TierReadOnlyError):
        run(cache.clear(now=0.0))
    monkeypatch.undo()
    status = cache.status(0.0)
    assert status.disk is not None
    assert (2, 2 * BLOCKS, 1) == (status.disk.objects, status.disk.used, status.failed)
    assert 2 == len(files_in(tmp_path))
    assert 2 == run(cache.clear(now=0.0)).objects
    assert [] == files_in(tmp_path)


# ---- damage and failures


def damage(folder: Path, place: int) -> None:
    """Flip a bit in the payload of a stored chunk."""
    path = folder / str(make_object(KEYS, place).id.name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damage_is_a_typed_miss_and_is_mended_by_a_store(tmp_path: Path) -> None:
    """I8: damaged bytes are never delivered; retrieve and lookup tell the reason until the chunk is stored again."""
    cache = open_cache(tmp_path, memory=0)
    store_chain(cache, KEYS[:3])
    damage(tmp_path, 1)
    lease = lease_of(cache, KEYS[:3])
    assert (expected(KEYS, 0), MissReason.CHECKSUM) == delivered(cache, lease, 0, 3)
    assert (expected(KEYS, 0), MissReason.CHECKSUM) == delivered(cache, lease, 0, 3)
    hit = lookup(cache, KEYS[:3])
    assert (1, MissReason.CHECKSUM) == (hit.chunks, hit.miss)
    status = cache.status(0.0)
    assert {MissReason.CHECKSUM: 1} == status.set_aside == status.misses
    assert {MissReason.CHECKSUM: 2} == status.undelivered
    assert 0 < status.quarantine
    assert StoreOutcome.STORED is run(cache.store(make_object(KEYS, 1), now=0.0))
    assert (expected(KEYS, 0, 1, 2), None) == delivered(cache, lease, 0, 3)
    assert lookup(cache, KEYS[:3]).miss is None
    cache.drop_owner("reader", 0.0)
    run(cache.clear(now=0.0))
    hit = lookup(cache, KEYS[1:3])  # what it was set aside for is over, now that it is gone for another reason
    assert (0, MissReason.ABSENT) == (hit.chunks, hit.miss)


def test_memory_serves_on_where_the_file_is_damaged(tmp_path: Path) -> None:
    """What is in memory was verified or never left it: it is served whatever happens to its file."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:1])
    damage(tmp_path, 0)
    assert (expected(KEYS, 0), None) == delivered(cache, lease_of(cache, KEYS), 0, 1)


def test_a_restart_tells_why_chunks_are_missing(tmp_path: Path) -> None:
    """Objects set aside at the start, and objects of other schemas, give lookups their reasons and are counted."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:1])
    run(cache.close(0.0))
    name = str(make_object(KEYS, 0).id.name)
    for schema, keys in ((3, OTHER), (1, chain("old", 1))):
        path = tmp_path / name.replace("xk2", f"xk{schema}").replace(KEYS[0].hex(), keys[0].hex())
        path.parent.mkdir(parents=True)
        path.write_bytes(b"of another version")
    (tmp_path / name).write_bytes(b"broken")
    cache = open_cache(tmp_path)
    reasons = [lookup(cache, keys).miss for keys in (KEYS, OTHER, chain("old", 1), chain("none", 1))]
    assert [
        MissReason.ENVELOPE_INVALID,
        MissReason.SCHEMA_TOO_NEW,
        MissReason.SCHEMA_RETIRED,
        MissReason.ABSENT,
    ] == reasons
    status = cache.status(0.0)
    assert ({1: 1, 3: 1}, {MissReason.ENVELOPE_INVALID: 1}) == (status.foreign_schemas, status.set_aside)
    run(cache.store(make_object(OTHER, 0), now=0.0))
    assert (1, None) == (lookup(cache, OTHER[:1]).chunks, lookup(cache, OTHER[:1]).miss)


def test_reasons_are_remembered_within_bounds(tmp_path: Path) -> None:
    """R: only so many reasons are kept; what is forgotten reads as absent."""
    cache = open_cache(tmp_path, memory=0, max_faults=1)
    store_chain(cache, KEYS[:1])
    store_chain(cache, OTHER[:1])
    for keys in (KEYS, OTHER):
        lease = lease_of(cache, keys)
        path = tmp_path / str(make_object(keys, 0).id.name)
        path.write_bytes(b"")
        delivered(cache, lease, 0, 1)
    assert MissReason.ABSENT is lookup(cache, KEYS).miss
    assert MissReason.ENVELOPE_INVALID is lookup(cache, OTHER).miss


def test_a_file_that_somebody_removed_is_absent(tmp_path: Path) -> None:
    """A file that vanished is a miss, and the next lookup knows it."""
    cache = open_cache(tmp_path, memory=0)
    store_chain(cache, KEYS[:2])
    lease = lease_of(cache, KEYS)
    (tmp_path / str(make_object(KEYS, 0).id.name)).unlink()
    assert ([], MissReason.ABSENT) == delivered(cache, lease, 0, 2)
    assert 0 == hits(cache, KEYS)


def test_a_disk_that_cannot_be_read_is_a_miss_and_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error costs the retrieve, is counted, and condemns nothing: the object is served when the disk is back."""
    cache = open_cache(tmp_path, memory=0)
    store_chain(cache, KEYS[:1])
    lease = lease_of(cache, KEYS)
    FaultyOs(always("pread", errno.EIO)).install(monkeypatch)
    assert ([], MissReason.ABSENT) == delivered(cache, lease, 0, 1)
    monkeypatch.undo()
    assert (1, {}) == (cache.status(0.0).failed, cache.status(0.0).set_aside)
    assert (expected(KEYS, 0), None) == delivered(cache, lease, 0, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_full_or_read_only_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """A store that fails is told by type, leaves no litter and no reservation; what was acknowledged is still there.

    The operator reads of it once, and once that it is over.
    """
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:2])
    FaultyOs(always("open", number)).install(monkeypatch)
    for _ in range(3):
        with pytest.raises(TierFullError if number == errno.ENOSPC else Exception, match=errno.errorcode[number]):
            run(cache.store(make_object(KEYS, 2), now=0.0))
    monkeypatch.undo()
    status = cache.status(0.0)
    assert status.disk is not None
    assert (3, 0, 2, 2 * BLOCKS) == (status.failed, status.pending, status.disk.objects, status.disk.used)
    [told] = caplog.messages
    assert errno.errorcode[number] in told
    assert 3 == hits(cache, KEYS)  # right, so served from memory; not acknowledged
    assert StoreOutcome.STORED is run(cache.store(make_object(KEYS, 2), now=0.0))
    assert [told, "the disk tier takes entries again"] == caplog.messages
    run(cache.close(0.0))
    assert 3 == hits(open_cache(tmp_path), KEYS)


def test_what_is_being_written_is_not_evicted_though_it_is_there_already(tmp_path: Path) -> None:
    """One object stored twice at the same time: while the second write goes on, nobody takes the chunk's room."""
    cache = open_cache(tmp_path, memory=0, disk=2 * BLOCKS)
    first, second = (cache.store(make_object(KEYS, 0), now=0.0) for _ in range(2))
    assert StoreOutcome.STORED is run(first)
    assert StoreOutcome.DECLINED is run(cache.store(make_object(OTHER, 0), now=0.0))
    assert 1 == hits(cache, KEYS)
    assert StoreOutcome.STORED is run(second)
    assert StoreOutcome.STORED is run(cache.store(make_object(OTHER, 0), now=0.0))
    assert StoreOutcome.STORED is run(cache.store(make_object(OTHER, 1), now=0.0))  # nothing is written: it may go
    assert (0, 2) == (hits(cache, KEYS), hits(cache, OTHER))


def test_an_eviction_that_fails_puts_its_victims_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose eviction fails is an error, and what was to go is indexed again and can be read."""
    cache = open_cache(tmp_path, memory=0, disk=2 * BLOCKS)
    store_chain(cache, KEYS[:2])
    FaultyOs(always("unlink", errno.EROFS)).install(monkeypatch)
    with pytest.raises(TierReadOnlyError):
        run(cache.store(make_object(OTHER, 0), now=0.0))
    monkeypatch.undo()
    assert (expected(KEYS, 0, 1), None) == delivered(cache, lease_of(cache, KEYS), 0, 2)
    status = cache.status(0.0)
    assert status.disk is not None
    assert (2 * BLOCKS, 0) == (status.disk.used, status.disk.evicted)


def test_a_start_that_cannot_evict_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller budget on a disk that cannot remove: nothing is forgotten that is there, and the failure is counted."""
    cache = open_cache(tmp_path)
    store_chain(cache, KEYS[:3])
    run(cache.close(0.0))
    tier = open_disk(tmp_path, budget=BLOCKS)
    cache = ChunkCache(2**20, tier)
    FaultyOs(always("unlink", errno.EROFS)).install(monkeypatch)
    assert 3 == cache.load()
    monkeypatch.undo()
    status = cache.status(0.0)
    assert status.disk is not None
    assert (3, 0, 1) == (hits(cache, KEYS), status.disk.evicted, status.failed)
    run(cache.close(0.0))
    assert 1 == hits(open_cache(tmp_path, disk=BLOCKS), KEYS)


def test_upkeep_that_fails_is_counted_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strays that cannot be removed, or uses that cannot be recorded, cost a count; strays go next time."""
    cache = open_cache(tmp_path, flush_seconds=0.0)
    store_chain(cache, OTHER[:1])
    hits(cache, OTHER)
    overtaken = cache.store(make_object(KEYS, 0), now=0.0)
    lookup(cache, OTHER)
    run(cache.clear(now=0.0))
    run(overtaken)
    broken = {"unlink", "utime"}
    FaultyOs(lambda _count, name: errno.EROFS if name in broken else None).install(monkeypatch)
    upkeep = cache.maintain(1.0)
    assert 2 == len(upkeep)
    for task in upkeep:
        run(task)
    monkeypatch.undo()
    assert (2, 2) == (cache.status(1.0).failed, len(files_in(tmp_path)))
    for task in cache.maintain(2.0):
        run(task)
    assert 1 == len(files_in(tmp_path))


def test_upkeep_that_is_cancelled_is_tried_again(tmp_path: Path) -> None:
    """A server that is too busy for upkeep loses nothing by giving it up."""
    cache = open_cache(tmp_path)
    overtaken = cache.store(make_object(KEYS, 0), now=0.0)
    run(cache.clear(now=0.0))
    run(overtaken)
    for task in cache.maintain(0.0):
        task.cancel(0.0)
    assert (0, 1) == (cache.status(0.0).failed, len(files_in(tmp_path)))
    for task in cache.maintain(1.0):
        run(task)
    assert [] == files_in(tmp_path)


def test_an_expired_lease_waits_where_there_is_no_room(cache: ChunkCache) -> None:
    """R: taking an expired lease again is refused as busy while the table is full, and works afterwards."""
    store_chain(cache, KEYS[:2])
    lease = lease_of(cache, KEYS, ttl=1.0)
    cache._leases._max_leases = 1
    other = lease_of(cache, KEYS, now=2.0)
    with pytest.raises(LeaseTableFullError):
        cache.retrieve(lease, 0, 1, ALONE, now=2.0)
    cache.release(other, now=2.0)
    assert (expected(KEYS, 0), None) == delivered(cache, lease, 0, 1, now=2.0)


def test_many_threads_and_one_loop(tmp_path: Path) -> None:
    """Under small budgets, with four threads and tasks settled as they come, all is right and nothing is left."""
    cache = open_cache(tmp_path, memory=4 * COST, disk=8 * BLOCKS, flush_seconds=0.0)
    chains = [chain(f"{name}", 3) for name in range(5)]
    wrong: list[object] = []

    def deliver(keys: list[bytes], got: Retrieved) -> None:
        wrong.extend(
            obj.id
            for place, obj in enumerate(got.objects)
            if obj.id.key != keys[place] or obj.buffers[0] != make_object(keys, place).buffers[0]
        )

    with ThreadPoolExecutor(4) as pool:
        running: list[tuple[Future[None], Task[Any], list[bytes] | None]] = []
        for turn in range(600):
            keys, now = chains[turn * 7 % 5], turn / 100
            tasks: list[tuple[Task[Any], list[bytes] | None]] = []
            match turn % 6:
                case 0 | 1 | 2 | 3:
                    tasks = [(cache.store(make_object(keys, turn % 3), now=now), None)]
                case 4:
                    hit = lookup(cache, keys, owner=turn % 3, ttl=0.5, now=now)
                    if hit.lease is not None:
                        tasks = [(cache.retrieve(hit.lease, 0, hit.chunks, ALONE, now=now), keys)]
                        cache.release(hit.lease, start=turn % 2, now=now)
                case _:
                    tasks = [(task, None) for task in cache.maintain(now)]
                    tasks += [(cache.clear(now=now), None)] if turn % 60 == 59 else []
                    cache.drop_owner(turn % 3, now)
            running += [(pool.submit(task.run), task, of) for task, of in tasks if not task.ready]
            for task, of in [pair for pair in tasks if pair[0].ready]:
                result = task.finish(now)
                if of is not None:
                    deliver(of, result)
            ripe = running if turn == 599 else [one for one in running if one[0].done()]
            for future, task, of in list(ripe):
                future.result(30)
                result = task.finish(now)
                if of is not None:
                    deliver(of, result)
                running.remove((future, task, of))
        for task in cache.maintain(1000.0):
            run(task)
    assert [] == wrong
    status = cache.status(1000.0)
    assert status.disk is not None
    assert (0, 0, 0, 0, {}) == (status.leases, status.held, status.pending, status.failed, status.set_aside)
    disk = cache._disk
    assert disk is not None
    indexed = {str(ObjectId(*one.id, shard).name) for one in disk.residency for shard in one.shards}
    assert indexed == set(files_in(tmp_path))
    assert status.disk.used == BLOCKS * len(indexed) <= 8 * BLOCKS
    run(cache.close(1000.0))
    assert len(indexed) == len(open_disk(tmp_path).scan().found)


def test_a_victim_that_was_half_stored_anew_is_not_put_back(tmp_path: Path) -> None:
    """Of an evicted chunk one shard is stored again before the eviction is given up: the other one goes."""
    cache = open_cache(tmp_path, memory=0, disk=3 * BLOCKS)
    shards = [Shard(2, rank, 0) for rank in range(2)]
    for shard in shards:
        run(cache.store(make_object(KEYS, 0, shard=shard), now=0.0))
    evicting = cache.store(make_object(OTHER, 0, size=5000), now=0.0)
    run(cache.store(make_object(KEYS, 0, shard=shards[0]), now=0.0))
    evicting.cancel(0.0)
    for task in cache.maintain(0.0):
        run(task)
    assert [str(make_object(KEYS, 0, shard=shards[0]).id.name)] == files_in(tmp_path)
    status = cache.status(0.0)
    assert status.disk is not None
    assert (BLOCKS, 1, 1) == (status.disk.used, status.disk.objects, status.disk.evicted)


def test_quarantine_counts_against_the_budget(tmp_path: Path) -> None:
    """R: what is set aside takes room from the budget, so a store with damage does not grow without bound."""
    cache = open_cache(tmp_path, memory=0, disk=3 * BLOCKS)
    store_chain(cache, KEYS[:2])
    damage(tmp_path, 1)
    delivered(cache, lease_of(cache, KEYS), 0, 2)
    cache.drop_owner("reader", 0.0)
    run(cache.store(make_object(OTHER, 0), now=0.0))
    run(cache.store(make_object(OTHER, 1), now=0.0))
    status = cache.status(0.0)
    assert status.disk is not None
    assert (BLOCKS, 2 * BLOCKS, 2 * BLOCKS) == (status.quarantine, status.disk.budget, status.disk.used)


def test_work_under_way_is_bounded(tmp_path: Path) -> None:
    """R: beyond the bound on bytes under way, stores and reads are refused as busy; one that is larger goes alone."""
    cache = open_cache(tmp_path, memory=0, max_pending=100)
    first = cache.store(make_object(KEYS, 0), now=0.0)
    second = cache.store(make_object(KEYS, 1), now=0.0)
    assert second.ready
    with pytest.raises(CacheBusyError) as caught:
        run(second)
    assert caught.value.retriable
    run(first)
    run(cache.store(make_object(KEYS, 1, size=5000), now=0.0))
    lease = lease_of(cache, KEYS)
    reading = cache.retrieve(lease, 0, 2, ALONE, now=0.0)
    with pytest.raises(CacheBusyError):
        cache.retrieve(lease, 0, 1, ALONE, now=0.0)
    run(reading)
    assert 0 == cache.status(0.0).pending


def test_an_object_larger_than_the_budget_is_declined(cache: ChunkCache) -> None:
    """An object that can never fit pushes out nothing."""
    cache._memory.residency.budget = 3 * COST
    if cache._disk is not None:
        cache._disk.tier.budget = 3 * BLOCKS
    store_chain(cache, KEYS[:2])
    assert StoreOutcome.DECLINED is run(cache.store(make_object(OTHER, 0, size=10 * BLOCKS), now=0.0))
    assert 2 == hits(cache, KEYS)


def test_a_full_lease_table_refuses_the_lookup(cache: ChunkCache) -> None:
    """R: beyond the bound on leases a lookup is refused as busy, and nothing is held by it."""
    store_chain(cache, KEYS[:2])
    cache._leases._max_held = 3
    lookup(cache, KEYS)
    with pytest.raises(LeaseTableFullError):
        lookup(cache, KEYS)
    assert 2 == cache.status(0.0).held
    assert 2 == hits(cache, KEYS)


def test_status_is_plain_data(cache: ChunkCache) -> None:
    """The status tells tiers, hits, misses, leases and sessions as numbers."""
    store_chain(cache, KEYS[:2])
    lookup(cache, KEYS, session="s")
    status = cache.status(0.0)
    assert (2, {MissReason.ABSENT: 1}, {StoreOutcome.STORED: 2}) == (status.hits, status.misses, status.stored)
    assert (1, 2, 0, 1, 0, 0) == (
        status.leases,
        status.held,
        status.lapsed,
        status.sessions,
        status.pending,
        status.quarantine,
    )
    assert (2**30, 2 * COST, 2, 2, 0) == (
        status.memory.budget,
        status.memory.used,
        status.memory.chunks,
        status.memory.objects,
        status.memory.evicted,
    )
    assert (status.disk is None) == (cache._disk is None)


def test_limits_have_sensible_defaults() -> None:
    """A cache without limits has bounds all the same."""
    limits = CacheLimits()
    assert 0 < limits.lease_ttl <= limits.max_lease_ttl
    assert 0 < limits.max_pending
    assert Hit(0, None, 0.0, MissReason.ABSENT) == lookup(ChunkCache(10), KEYS)


def test_the_folder_is_refused_while_the_cache_lives(tmp_path: Path) -> None:
    """A cache owns its folder until it is closed."""
    cache = open_cache(tmp_path)
    with pytest.raises(Exception, match="live server"):
        open_disk(tmp_path)
    run(cache.close(0.0))
    open_disk(tmp_path)
