"""`DiskPlace`: the loop's half of the disk tier: what is on disk, what is being written, what has to go.

Theory of operation
-------------------
The loop decides, threads do. Between both a file can be in one of these states:

    planned    room was made and reserved; the write is a task that is waiting or running
    resident   written and, by the fsync policy, durable: only now it is visible
    doomed     out of the index, its removal is part of a task
    stray      on disk and not wanted (its write was overtaken by a clear); removed by maintenance

Two rules keep a write and a removal of one name apart: what is being written is never doomed, and a write that follows
a removal of the same name takes the name out of it (`tiers.disk.Removal`). A removal that fails or is cancelled puts
what it left back into the index, so nothing that is still there is lost.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

from protocol_v2.places.base import Forgotten, Read
from protocol_v2.places.indexed import IndexedPlace
from protocol_v2.places.presence import DISK
from protocol_v2.storage.envelope import encoded_size
from protocol_v2.storage.errors import ObjectMissError
from protocol_v2.storage.names import ObjectId
from protocol_v2.tiers.base import TierError
from protocol_v2.tiers.layout import charge_of
from protocol_v2.tiers.residency import Residency
from protocol_v2.work import Done, Ran, Task, TaskCancelledError, blocking, immediate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from keying import KeySpace
    from protocol_v2.places.presence import Presence
    from protocol_v2.storage.names import ChunkId, Shard
    from protocol_v2.storage.objects import StoredObject
    from protocol_v2.tiers.disk import DiskTier, Removal, Written
    from protocol_v2.tiers.residency import Resident
    from protocol_v2.tiers.scan import Scan

log = logging.getLogger(__name__)

_DESCRIBED: Final = 4096
"""Spaces remembered as described."""


class _Write:
    """A write under way."""

    __slots__ = ("overtaken",)

    def __init__(self) -> None:
        self.overtaken = False
        """Cleared before it was done: what it writes is not wanted."""


class DiskPlace(IndexedPlace[int]):
    """The index over a disk tier. Belongs to the loop.

    Args:
        tier: does the blocking part.
        presence: told what is on disk.
        is_held: whether a chunk is leased.
    """

    name = "disk"

    def __init__(self, tier: DiskTier, presence: Presence, is_held: Callable[[ChunkId], bool]) -> None:
        super().__init__(Residency(tier.budget, self._is_protected, track_uses=True), presence, is_held)
        self.tier = tier
        self._writes: dict[ObjectId, list[_Write]] = {}
        self._writing: Counter[ChunkId] = Counter()
        self._guarded: Counter[ChunkId] = Counter()
        self._strays: dict[ObjectId, None] = {}
        self._described: OrderedDict[bytes, None] = OrderedDict()
        self.failed = 0
        """Operations of the tier that failed."""
        self._trouble = ""
        """What it failed with last, as it was told; empty once an object was written again."""

    def load(self, progress: Callable[[int, int], None] | None, max_elsewhere: int) -> Scan:
        """Build the index from what is in the folder, and remove what the budget has no room for. Blocks."""
        scan = self.tier.scan(progress, max_elsewhere=max_elsewhere)
        for found in scan.found:
            self.residency.add(found.envelope, 0, found.charge)
            self._presence.add(found.envelope.id.chunk, found.envelope.id.shard, DISK)
        self._update_budget()
        victims, removal = self._evict(0, ())
        try:
            removal.run()
        except TierError as error:
            self.note_failure(error)
            self.residency.evicted -= self._put_back(victims, removal)
        return scan

    def turn(self, chunk: ChunkId, shard: Shard) -> int | None:
        """Which write a shard on disk comes from; None if it is not there."""
        return self.residency.value(chunk, shard)

    def is_writing(self, chunk: ChunkId) -> bool:
        """Whether some shard of a chunk is being written."""
        return chunk in self._writing

    def fits(self, obj: StoredObject) -> bool:
        """Whether an object can be kept without anything going."""
        return self.residency.fits(charge_of(encoded_size(obj.envelope)))

    def describe(self, space: KeySpace) -> Task[None]:
        """Write the description of a space beside its objects, unless that was done. The task raises `TierError`."""
        root = space.root
        if root in self._described:
            return immediate(None)

        def settle(ran: Ran[None], _now: float) -> None:
            if not isinstance(ran, Done):
                self.note_failure(ran.error)
                raise ran.error
            self._described[root] = None
            if len(self._described) > _DESCRIBED:
                self._described.popitem(last=False)

        return blocking(lambda: self.tier.describe(space), settle)

    def plan_read(self, wanted: ObjectId) -> Read | None:
        """A read of an object, if it is on disk."""
        resident = self.residency.find(wanted.chunk)
        held = resident.shards.get(wanted.shard) if resident is not None else None
        return Read(self, wanted, turn=held[1], charge=held[0]) if held is not None else None

    def fetch(self, reads: Sequence[Read]) -> None:
        """Read in order, up to the first that is not there. Blocks; in any thread."""
        for read in reads:
            try:
                read.found = self.tier.get(read.wanted)
            except (ObjectMissError, TierError) as error:
                read.error = error
                break

    def wants_kept(self, read: Read) -> bool:
        """Whether the object is still on disk: it was not cleared since the read was planned."""
        return self.turn(read.wanted.chunk, read.wanted.shard) is not None

    def write(self, obj: StoredObject) -> Task[None]:
        """Plan to write an object: room is made now, the rest is the task's. The task raises `TierError`.

        Raises:
            TierFullError: no room within the budget.
        """
        charge = charge_of(encoded_size(obj.envelope))
        self._update_budget()
        victims, removal = self._evict(charge, obj.envelope.chain)
        self.residency.reserve(charge)
        write = _Write()
        self._writes.setdefault(obj.id, []).append(write)
        self._writing[obj.id.chunk] += 1
        self._guarded.update(obj.envelope.chain)

        def work() -> Written:
            removal.run()
            return self.tier.put(obj)

        def settle(ran: Ran[Written], _now: float) -> None:
            self.residency.reserve(-charge)
            self._end_write(obj, write)
            if isinstance(ran, Done):
                self._settle_written(obj, write, ran.value)
                if self._trouble:
                    self._trouble = ""
                    log.warning("the disk tier takes entries again")
                return
            self.residency.evicted -= self._put_back(victims, removal)
            self.note_failure(ran.error)
            if write.overtaken or not isinstance(ran.error, TaskCancelledError):
                self._note_stray(obj.id)
            raise ran.error

        return blocking(work, settle)

    def drop(self, read: Read) -> bool:
        """Take a shard out of the index, if it is still the one that was read; the file is somebody else's business."""
        wanted = read.wanted
        if self.turn(wanted.chunk, wanted.shard) != read.turn:
            return False
        self.residency.remove_shard(wanted.chunk, wanted.shard)
        self._presence.discard(wanted.chunk, [wanted.shard], DISK)
        return True

    def note_failure(self, error: Exception | None) -> None:
        """An operation failed; told once for each kind of trouble, and counted. What was only cancelled is neither."""
        if isinstance(error, TaskCancelledError):
            return
        self.failed += 1
        trouble = str(error) if isinstance(error, TierError) else type(error).__name__
        if error is not None and trouble != self._trouble:
            self._trouble = trouble
            log.warning("the disk tier fails: %s", trouble)

    def forget(self, root: bytes | None) -> Forgotten:
        """Forget what is not leased, of one space or all."""
        for wanted, writes in self._writes.items():
            if (root is None or wanted.root == root) and not self._is_held(wanted.chunk):
                for write in writes:
                    write.overtaken = True
        victims = self._forgettable(root)
        for resident in victims:
            self.residency.remove(resident.id)
            self._presence.discard(resident.id, resident.shards, DISK)
        objects = _objects_of(victims)
        size = sum(resident.size for resident in victims)
        free = [one for one in objects if one not in self._writes]  # the others are strays when their write is done
        if not free:
            return Forgotten(objects, size, None)
        removal = self.tier.doom(free)

        def settle(ran: Ran[None], _now: float) -> None:
            if isinstance(ran, Done):
                return
            self._put_back(victims, removal)
            self.note_failure(ran.error)
            raise ran.error

        return Forgotten(objects, size, blocking(removal.run, settle))

    def maintain(self) -> Task[None] | None:
        """Remove strays."""
        strays = [one for one in self._strays if one not in self._writes and self.turn(one.chunk, one.shard) is None]
        self._strays.clear()
        if not strays:
            return None
        removal = self.tier.doom(strays)

        def settle(ran: Ran[None], _now: float) -> None:
            if isinstance(ran, Done):
                return
            self.tier.give_up(removal)
            self._strays.update(removal.left)
            if isinstance(ran.error, TaskCancelledError):
                raise ran.error
            self.note_failure(ran.error)

        return blocking(removal.run, settle)

    def flush_uses(self) -> Task[None] | None:
        """Record which chunks were used, so that eviction goes on where it was after a restart."""
        uses = _objects_of(self.residency.take_touched())
        if not uses:
            return None

        def settle(ran: Ran[None], _now: float) -> None:
            if not isinstance(ran, Done):
                if isinstance(ran.error, TaskCancelledError):
                    raise ran.error
                self.note_failure(ran.error)  # the order of eviction suffers, nothing else

        return blocking(lambda: self.tier.touch(uses), settle)

    def close(self) -> Task[None]:
        """Record the last uses and let the folder go."""
        flush = self.flush_uses() or immediate(None)

        def work() -> None:
            flush.run()
            self.tier.close()

        def settle(ran: Ran[None], now: float) -> None:
            if not isinstance(ran, Done):
                raise ran.error
            flush.finish(now)

        return blocking(work, settle)

    def _is_protected(self, chunk: ChunkId) -> bool:
        return chunk in self._guarded or self._is_held(chunk)

    def _update_budget(self) -> None:
        self.residency.budget = max(0, self.tier.budget - self.tier.quarantine)

    def _evict(self, charge: int, keep: Sequence[ChunkId]) -> tuple[list[Resident[int]], Removal]:
        victims = self.residency.make_room(charge, keep)
        for resident in victims:
            self._presence.discard(resident.id, resident.shards, DISK)
        return victims, self.tier.doom(_objects_of(victims))

    def _put_back(self, victims: Iterable[Resident[int]], removal: Removal) -> int:
        """Index again what a removal left; how many chunks."""
        self.tier.give_up(removal)
        restored = 0
        for resident in victims:
            for shard in list(resident.shards):
                if ObjectId(*resident.id, shard) not in removal.left:
                    size, _ = resident.shards.pop(shard)
                    resident.size -= size
            if not resident.shards:
                continue
            if self.is_writing(resident.id) or self.residency.find(resident.id) is not None:
                # stored anew meanwhile, and indexed by that; what is left beside it goes
                for shard in resident.shards:
                    self._note_stray(ObjectId(*resident.id, shard))
                continue
            self.residency.restore(resident)
            restored += 1
            for shard in resident.shards:
                self._presence.add(resident.id, shard, DISK)
        return restored

    def _end_write(self, obj: StoredObject, write: _Write) -> None:
        writes = self._writes[obj.id]
        writes.remove(write)
        if not writes:
            del self._writes[obj.id]
        _count_down(self._writing, obj.id.chunk)
        for chunk in obj.envelope.chain:
            _count_down(self._guarded, chunk)
        self.residency.offer(obj.envelope.chain)

    def _settle_written(self, obj: StoredObject, write: _Write, written: Written) -> None:
        chunk, shard = obj.id.chunk, obj.id.shard
        before = self.turn(chunk, shard)
        if write.overtaken and before is None:
            self._note_stray(obj.id)
            return
        if before is None or before < written.turn:
            self.residency.add(obj.envelope, written.turn, written.charge)
            self._presence.add(chunk, shard, DISK)

    def _note_stray(self, wanted: ObjectId) -> None:
        """A file of this name may be there that nobody wants, unless it is indexed or written by now."""
        if self.turn(wanted.chunk, wanted.shard) is None:
            self._strays[wanted] = None


def _count_down(counts: Counter[ChunkId], chunk: ChunkId) -> None:
    counts[chunk] -= 1
    if not counts[chunk]:
        del counts[chunk]


def _objects_of(residents: Sequence[Resident[int]]) -> list[ObjectId]:
    return [ObjectId(*resident.id, shard) for resident in residents for shard in resident.shards]
