"""The cache over memory and disk against a simple model, with tasks in any order, faults, damage, kills and restarts.

What must hold, whatever happens: no wrong value is ever delivered; what was acknowledged is there until it was evicted
(and counted), cleared or damaged; leased chunks are delivered whole; at the end nothing is held, reserved or under way,
and the folder has exactly the files that the index says.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protocol_v2.cache import CacheBusyError, ChunkCache
from protocol_v2.codes import MissReason
from protocol_v2.leases import LeaseTable, LeaseUnknownError
from protocol_v2.outcomes import Retrieved, StoreOutcome
from protocol_v2.places.disk import DiskPlace
from protocol_v2.places.presence import DISK, MEMORY
from protocol_v2.storage import ObjectId, Shard, StoredObject
from protocol_v2.storage.objects import split_payload
from protocol_v2.tiers import DiskTier, MemoryTier, Residency, TierError, scan
from protocol_v2.tiers.disk import Written
from protocol_v2.tiers.layout import QUARANTINE
from tests.protocol_v2.faulty_os import MODULES, FaultyOs
from tests.protocol_v2.storage_samples import OTHER_ROOT, ROOT, chain, make_object, open_cache, payload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protocol_v2.storage import Header
    from protocol_v2.storage.names import ChunkId
    from protocol_v2.work import Task

SIZE = 64
MEMORY_BUDGET = 2 * (SIZE + 1024)
DISK_BUDGET = 10 * 8192
PROMPT = chain("model", 2)
CHAINS = [PROMPT + chain("left", 2, PROMPT[-1]), PROMPT + chain("right", 2, PROMPT[-1]), chain("third", 4)]
SHARDS = [Shard(2, 0, 0), Shard(2, 1, 0)]
ROOTS = [ROOT, OTHER_ROOT]


@contextlib.contextmanager
def failing(after: int, number: int) -> Iterator[None]:
    """Every system call of the disk tier that writes fails from the given one on."""
    faulty = FaultyOs(
        lambda count, name: number if count >= after and name not in {"close", "pread", "fstat"} else None
    )
    with pytest.MonkeyPatch.context() as patched:
        for module in MODULES:
            patched.setattr(module, "os", faulty)
        yield


@dataclass(eq=False)
class Pending:
    """A task that the server has not finished."""

    task: Task[Any]
    kind: str
    wanted: tuple[ObjectId, ...] = ()
    whole: bool = False
    overtaken: bool = False
    started: bool = False


class Model(RuleBasedStateMachine):
    """Drives one cache on one folder; see the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="xk2-model-"))
        self.now = 0.0
        self.ticks = itertools.count(1)  # nothing may depend on real time, or a failure could not be replayed
        self.pending: list[Pending] = []
        self.submitted: set[ObjectId] = set()
        self.acknowledged: set[ObjectId] = set()
        self.spoiled: set[ObjectId] = set()
        self.held_here: set[bytes] = set()
        self.damaged: set[ObjectId] = set()
        self.leases: dict[bytes, tuple[int, int, int, float]] = {}
        self.cache: ChunkCache
        self.resident: set[ChunkId] = set()
        self.evicted = 0
        self.failed = False

    @initialize()
    def begin(self) -> None:
        """A server starts on an empty folder."""
        self.start()

    def start(self) -> None:
        """A server starts on what is in the folder."""
        self.cache = self.open()
        self.pending, self.leases = [], {}
        self.evicted = self.disk.residency.evicted

    def open(self, **options: Any) -> ChunkCache:
        """A cache on the folder."""
        return open_cache(
            self.folder,
            ticks=self.ticks,
            memory=MEMORY_BUDGET,
            disk=DISK_BUDGET,
            lease_ttl=10.0,
            flush_seconds=0.0,
            max_pending=20 * SIZE,
            **options,
        )

    @property
    def disk(self) -> DiskPlace:
        """The loop's half of the disk tier."""
        disk = self.cache._disk
        assert disk is not None
        return disk

    def on_disk(self) -> set[ObjectId]:
        """What the index says is on disk."""
        return {ObjectId(*one.id, shard) for one in self.disk.residency for shard in one.shards}

    def in_memory(self) -> set[ObjectId]:
        """What the index says is in memory."""
        return {ObjectId(*one.id, shard) for one in self.cache._memory.residency for shard in one.shards}

    def known(self) -> set[ObjectId]:
        """What is believed to be somewhere else, where lookups and retrieves find it too."""
        return set()

    def account(self, gone: set[ObjectId]) -> None:
        """Acknowledged objects leave by eviction, which is counted, or because the model took or damaged them."""
        present = self.on_disk()
        self.acknowledged -= gone | (self.damaged - present)
        lost = self.acknowledged - present
        assert len({one.chunk for one in lost}) <= max(0, self.disk.residency.evicted - self.evicted)
        self.acknowledged -= lost

    def plan(self, one: Pending, *, at_once: bool) -> None:
        """A task is done at once, or waits for its turn."""
        self.pending.append(one)
        if at_once:
            one.started = True
            one.task.run()
            self.settle(one)

    # ---- what clients do

    @rule(root=st.sampled_from(ROOTS), which=st.integers(0, 2), length=st.integers(1, 4))
    def store_prompt(self, root: bytes, which: int, length: int) -> None:
        """Both ranks send a whole prompt."""
        for place in range(length):
            for rank in range(2):
                self.store(root, which, place, rank, at_once=True)

    @rule(
        root=st.sampled_from(ROOTS),
        which=st.integers(0, 2),
        place=st.integers(0, 3),
        rank=st.integers(0, 1),
        at_once=st.booleans(),
    )
    def store(self, root: bytes, which: int, place: int, rank: int, at_once: bool) -> None:
        """A shard of a chunk is sent."""
        obj = make_object(CHAINS[which], place, shard=SHARDS[rank], root=root, size=SIZE)
        self.submitted.add(obj.id)
        present = self.disk.turn(obj.id.chunk, obj.id.shard) is not None
        task = self.cache.store(obj, now=self.now)
        if not task.ready:
            self.plan(Pending(task, "store", (obj.id,)), at_once=at_once)
            return
        try:
            outcome = task.finish(self.now)
        except CacheBusyError:
            assert self.pending
        else:
            assert (StoreOutcome.PRESENT if present else StoreOutcome.DECLINED) is outcome

    @rule(
        root=st.sampled_from(ROOTS), which=st.integers(0, 2), length=st.integers(1, 4), ttl=st.sampled_from([3.0, 10.0])
    )
    def lookup(self, root: bytes, which: int, length: int, ttl: float) -> None:
        """A prompt is looked up; the hit is exactly what every shard has."""
        keys = CHAINS[which][:length]
        there = self.on_disk() | self.in_memory() | self.known()
        expected = 0
        while expected < length and all(ObjectId(root, keys[expected], shard) in there for shard in SHARDS):
            expected += 1
        hit = self.cache.lookup(root, keys, world=2, owner=f"client {which}", session=None, ttl=ttl, now=self.now)
        assert expected == hit.chunks
        assert (hit.miss is None) == (hit.chunks == length)
        if hit.lease is not None:
            self.leases[hit.lease] = (ROOTS.index(root), which, hit.chunks, self.now + ttl)
            leased = {ObjectId(root, key, shard) for key in keys[: hit.chunks] for shard in SHARDS}
            if leased <= self.on_disk() | self.in_memory():
                self.held_here.add(hit.lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), rank=st.integers(0, 1), at_once=st.booleans())
    def retrieve(self, data: st.DataObject, rank: int, at_once: bool) -> None:
        """A leased range is asked for."""
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        root, which, count, expires = self.leases[lease]
        start = data.draw(st.integers(0, count - 1))
        stop = data.draw(st.integers(start + 1, count))
        wanted = tuple(ObjectId(ROOTS[root], key, SHARDS[rank]) for key in CHAINS[which][start:stop])
        try:
            task = self.cache.retrieve(lease, start, stop, SHARDS[rank], now=self.now)
        except CacheBusyError:
            assert self.pending
            return
        except LeaseUnknownError:
            assert expires <= self.now
            return
        pending = Pending(task, "retrieve", wanted, whole=expires > self.now and lease in self.held_here)
        if expires <= self.now:  # taken again: it protects what is there from now on
            self.leases[lease] = (root, which, count, -1.0)
        if task.ready:
            self.finished(pending, task.finish(self.now))
        else:
            self.plan(pending, at_once=at_once)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), whole=st.booleans())
    def release(self, data: st.DataObject, whole: bool) -> None:
        """A lease is given back, in whole or from some chunk on; twice counts once."""
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        root, which, count, expires = self.leases[lease]
        start = 0 if whole else data.draw(st.integers(0, count - 1))
        self.cache.release(lease, start=start, now=self.now)
        assert 0 == self.cache.release(lease, start=start, now=self.now)
        if start:
            self.leases[lease] = (root, which, start, expires)
        else:
            del self.leases[lease]
        self.unprotect()

    @rule(which=st.integers(0, 2))
    def die(self, which: int) -> None:
        """A client is gone."""
        self.cache.drop_owner(f"client {which}", self.now)
        self.leases = {lease: state for lease, state in self.leases.items() if state[1] != which}
        self.unprotect()

    def unprotect(self) -> None:
        """After a release, what is still being read is not promised any more."""
        for one in self.pending:
            one.whole = False

    @rule(root=st.sampled_from([None, *ROOTS]), at_once=st.booleans())
    def clear(self, root: bytes | None, at_once: bool) -> None:
        """Everything that is not leased is forgotten."""
        kept = {one for one in self.on_disk() if self.cache._leases.is_held(one.chunk)}
        task = self.cache.clear(root, now=self.now)
        gone = {one for one in self.acknowledged if root in {None, one.root}} - kept
        self.account(gone)
        for one in self.pending:  # a store that is overtaken is acknowledged, and then not there
            if one.kind == "store" and root in {None, one.wanted[0].root}:
                one.overtaken = True
        if task.ready:
            task.finish(self.now)
        else:
            self.plan(Pending(task, "clear"), at_once=at_once)

    @rule(root=st.sampled_from(ROOTS), which=st.integers(0, 2), at_once=st.booleans())
    def prefetch(self, root: bytes, which: int, at_once: bool) -> None:
        """A prompt is read ahead."""
        for task in self.cache.prefetch(root, CHAINS[which], world=2, now=self.now).tasks:
            self.plan(Pending(task, "prefetch"), at_once=at_once)

    # ---- what time and threads do

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        """Time passes, and maintenance plans its work."""
        self.now += seconds
        for task in self.cache.maintain(self.now):
            self.pending.append(Pending(task, "upkeep"))
        for one in self.pending:
            one.whole = False

    @precondition(lambda self: any(not one.started for one in self.pending))
    @rule(data=st.data(), fault=st.sampled_from([None, None, None, errno.ENOSPC, errno.EROFS]), after=st.integers(1, 9))
    def run(self, data: st.DataObject, fault: int | None, after: int) -> None:
        """A thread runs the blocking part of some task, on a disk that may fail."""
        one = data.draw(st.sampled_from([one for one in self.pending if not one.started]))
        one.started = True
        if fault is None or one.kind == "retrieve":
            one.task.run()
            return
        self.failed = True
        with failing(after, fault):
            one.task.run()

    @precondition(lambda self: any(one.started for one in self.pending))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """The loop settles some task that ran."""
        self.settle(data.draw(st.sampled_from([one for one in self.pending if one.started])))

    @precondition(lambda self: any(not one.started for one in self.pending))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A task is given up before it ran."""
        one = data.draw(st.sampled_from([one for one in self.pending if not one.started]))
        self.pending.remove(one)
        one.task.cancel(self.now)

    def settle(self, one: Pending) -> None:
        """Finish a task and look at what it gave."""
        self.pending.remove(one)
        try:
            result = one.task.finish(self.now)
        except TierError:
            assert one.kind in {"store", "clear"}
            return
        self.finished(one, result)

    def finished(self, one: Pending, result: Any) -> None:
        """What a task gave is right."""
        if one.kind == "store":
            assert StoreOutcome.STORED is result
            if self.disk.turn(one.wanted[0].chunk, one.wanted[0].shard) is not None:
                self.acknowledged.add(one.wanted[0])
                self.damaged.discard(one.wanted[0])
            else:
                assert one.overtaken, "acknowledged, and neither there nor overtaken by a clear"
        elif one.kind == "retrieve":
            self.check_delivery(one, result)

    def check_delivery(self, one: Pending, result: Retrieved) -> None:
        """Every delivered value is the right one; what was leased and sound is delivered whole."""
        for wanted, obj in zip(one.wanted, result.objects, strict=False):
            assert wanted == obj.id
            assert payload_of(wanted.key, wanted.shard, SIZE) == bytes(obj.buffers[0])
        if len(result.objects) == len(one.wanted):
            assert result.miss is None
            return
        missing = one.wanted[len(result.objects)]
        assert result.miss is not None
        if one.whole:
            assert missing in self.damaged
        if result.miss is not MissReason.ABSENT:
            assert result.miss is MissReason.CHECKSUM
            assert missing in self.damaged | self.spoiled
        if self.disk.turn(missing.chunk, missing.shard) is None:
            self.acknowledged.discard(missing)

    # ---- what goes wrong

    def sound(self) -> list[ObjectId]:
        """What is on disk and undamaged."""
        return sorted(one for one in self.on_disk() - self.damaged if (self.folder / str(one.name)).exists())

    @precondition(lambda self: self.sound())
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A bit of some file flips."""
        wanted = data.draw(st.sampled_from(self.sound()))
        path = self.folder / str(wanted.name)
        content = bytearray(path.read_bytes())
        content[-1 - data.draw(st.integers(0, SIZE - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        self.damaged.add(wanted)

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        """The server ends, in order or killed, and starts again on the folder."""
        if orderly:
            self.drain()
            closing = self.cache.close(self.now)
            closing.run()
            closing.finish(self.now)
        else:
            self.disk.tier.close()
        self.acknowledged -= self.damaged
        shutil.rmtree(self.folder / QUARANTINE)  # the operator empties it, or the budget would be gone
        before = self.acknowledged
        self.start()
        present = self.on_disk()
        assert present <= self.submitted
        lost = before - present
        assert len({one.chunk for one in lost}) <= self.disk.residency.evicted
        self.acknowledged = before & present
        self.evicted = self.disk.residency.evicted

    def drain(self) -> None:
        """Everything under way is done."""
        while self.pending:
            one = self.pending[0]
            if not one.started:
                one.started = True
                one.task.run()
            self.settle(one)

    # ---- what holds at all times

    @invariant()
    def consistent(self) -> None:
        """Nothing acknowledged is lost; the indexes agree with each other; budgets are kept."""
        self.account(set())
        self.evicted = self.disk.residency.evicted
        presence = self.cache._presence
        for tier, there in ((DISK, self.on_disk()), (MEMORY, self.in_memory())):
            assert there == {
                ObjectId(*chunk, shard)
                for chunk, held in presence._chunks.items()
                for shard, where in held.shards.items()
                if where & tier
            }
        memory = self.cache._memory.residency
        assert memory.used == sum(one.size for one in memory) <= MEMORY_BUDGET
        charged = sum(one.size for one in self.disk.residency)
        writes = sum(len(writes) for writes in self.disk._writes.values())
        assert self.disk.residency.used == charged + 8192 * writes
        assert writes == sum(one.kind == "store" for one in self.pending)

    def teardown(self) -> None:
        """When all is done nothing is held, reserved or under way, and the folder is what the index says."""
        try:
            self.drain()
            for lease in self.leases:
                self.cache.release(lease, now=self.now)
            for one in self.cache.maintain(self.now + 1000.0):
                one.run()
                one.finish(self.now)
            status = self.cache.status(self.now + 1000.0)
            assert (0, 0, 0) == (status.leases, status.held, status.pending)
            assert {} == self.disk._writes == self.disk._strays
            assert {one.name for one in self.on_disk()} == set(self.disk.tier.names())
            if not self.failed:  # where removing failed too, the next start removes what is left
                assert [] == list((self.folder / "xk2.tmp").iterdir())
            self.cache.close(self.now).run()
        finally:
            shutil.rmtree(self.folder)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=150, stateful_step_count=60, report_multiple_bugs=False)


def assert_noticed(model: type[Model]) -> None:
    """A search finds that something is wrong."""
    search = settings(
        max_examples=1000,
        stateful_step_count=60,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(model, settings=search)


def forget_leases(patched: pytest.MonkeyPatch) -> None:
    """Eviction does not ask for leases."""
    patched.setattr(LeaseTable, "is_held", lambda _self, _chunk: False)


def forget_to_put_back(patched: pytest.MonkeyPatch) -> None:
    """What a failed removal left is not indexed again."""
    patched.setattr(DiskPlace, "_put_back", lambda _self, _victims, _removal: 0)


def trust_payloads(patched: pytest.MonkeyPatch) -> None:
    """Payloads are not verified when they are read."""
    patched.setattr(scan, "open_payload", open_unverified)


def open_unverified(header: Header, payload: bytes | memoryview) -> StoredObject:
    """What `open_payload` would be without its check."""
    return StoredObject(header.envelope, tuple(split_payload(memoryview(payload), header.envelope)))


def forget_overtaken(patched: pytest.MonkeyPatch) -> None:
    """Files whose write a clear overtook are not removed."""
    patched.setattr(DiskPlace, "_note_stray", lambda _self, _wanted: None)


def mix_up_shards(patched: pytest.MonkeyPatch) -> None:
    """Memory gives the first shard that it has of a chunk."""

    def find(self: MemoryTier, wanted: ObjectId) -> StoredObject | None:
        resident = self.residency.find(wanted.chunk)
        return next(iter(resident.shards.values()))[1] if resident is not None else None

    patched.setattr(MemoryTier, "find", find)


def acknowledge_early(patched: pytest.MonkeyPatch) -> None:
    """A write is acknowledged though nothing was written."""
    patched.setattr(DiskTier, "put", lambda _self, _obj: Written(8192, 1))


def count_evictions_wrong(patched: pytest.MonkeyPatch) -> None:
    """Evictions are not counted."""
    real = Residency.make_room

    def make_room(self: Residency[Any], size: int, keep: Any = ()) -> Any:
        gone = real(self, size, keep)
        self.evicted -= len(gone)
        return gone

    patched.setattr(Residency, "make_room", make_room)


@pytest.mark.parametrize(
    "sabotage",
    [
        forget_leases,
        forget_to_put_back,
        trust_payloads,
        forget_overtaken,
        mix_up_shards,
        acknowledge_early,
        count_evictions_wrong,
    ],
    ids=lambda sabotage: sabotage.__name__,
)
def test_the_model_notices(sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a cache with this fault does not pass."""
    sabotage(monkeypatch)
    assert_noticed(Model)
