"""`Reader`: objects from wherever they are, nearest place first, as far as they are really there.

Planning on the loop finds for each object the nearest place that has it. What is in memory needs no more; the rest is
fetched in a thread, in order, up to the first object that is not there: a prefix is all that anybody can use. What came
from a slower place is kept in memory, if there is room and it was not cleared meanwhile.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

from protocol_v2.codes import MissReason
from protocol_v2.outcomes import Retrieved
from protocol_v2.places.base import Read
from protocol_v2.storage.errors import EnvelopeError, ObjectMissError
from protocol_v2.work import Done, Ran, Task, blocking, immediate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.places.base import Source
    from protocol_v2.places.faults import Faults
    from protocol_v2.places.flow import Flow
    from protocol_v2.places.memory import MemoryPlace
    from protocol_v2.storage.names import ObjectId
    from protocol_v2.storage.objects import StoredObject


class Reader:
    """Reads of a cache. Belongs to the loop.

    Args:
        memory: the nearest place, where what is read is kept.
        sources: the others, nearest first.
        keep: keeps an object in memory.
        faults: remembers why chunks are not there.
        flow: bounds the bytes under way.

    Attributes:
        retrieved: chunks delivered, by the place they came from.
        undelivered: ranges delivered short, by why.
        set_aside: objects found broken or foreign, by why.
    """

    def __init__(
        self,
        memory: MemoryPlace,
        sources: Sequence[Source],
        *,
        keep: Callable[[StoredObject], bool],
        faults: Faults,
        flow: Flow,
    ) -> None:
        self._memory = memory
        self._sources = sources
        self._keep = keep
        self._faults = faults
        self._flow = flow
        self.retrieved: Counter[str] = Counter(dict.fromkeys([memory.name, *(one.name for one in sources)], 0))
        self.undelivered: Counter[MissReason] = Counter()
        self.set_aside: Counter[MissReason] = Counter()

    def read(self, wanted: Sequence[ObjectId], starts: Sequence[int] | None, room: int | None) -> Task[Retrieved]:
        """The objects, as far as they are there and fit.

        Args:
            wanted: in order.
            starts: prompt position at which the reader will use each; None takes every start.
            room: bytes that may be delivered; the first object is read in any case. None takes all.

        Raises:
            CacheBusyError: too many bytes are under way.
        """
        plan: list[StoredObject | Read] = []
        missing: MissReason | None = None
        size = 0
        for one in wanted:
            held = self._memory.find(one) or self._plan(one)
            if held is None:
                missing = self._faults.reason(one.chunk)
                break
            size += held.charge if isinstance(held, Read) else held.envelope.payload_size
            if plan and room is not None and size > room:
                break
            plan.append(held)
        reads = [one for one in plan if isinstance(one, Read)]

        def settle(_: None) -> Retrieved:
            objects: list[StoredObject] = []
            origins: list[str] = []
            miss = missing
            for one in plan:
                found = self._settle(one) if isinstance(one, Read) else one
                if isinstance(found, MissReason):
                    miss = found
                    break
                objects.append(found)
                origins.append(one.source.name if isinstance(one, Read) else self._memory.name)
            return self._deliver(objects, origins, miss, starts)

        return self._fetch(reads).then(settle) if reads else immediate(settle(None))

    def pull(self, wanted: Sequence[ObjectId]) -> Task[None]:
        """Bring objects into memory, up to the first that is not there. The task raises nothing but cancellation.

        Raises:
            CacheBusyError: too many bytes are under way.
        """
        planned = (None if self._memory.find(one) is not None else self._plan(one) for one in wanted)
        reads = [read for read in planned if read is not None]

        def settle(_: None) -> None:
            for read in reads:
                if isinstance(self._settle(read), MissReason):
                    break

        return self._fetch(reads).then(settle)

    def _plan(self, wanted: ObjectId) -> Read | None:
        for source in self._sources:
            read = source.plan_read(wanted)
            if read is not None:
                return read
        return None

    def _fetch(self, reads: Sequence[Read]) -> Task[None]:
        """Read, in order, up to the first that is not there."""
        size = sum(read.charge for read in reads)
        self._flow.take(size, "read")

        def work() -> None:
            for _, group in groupby(reads, key=lambda read: read.source.name):
                together = list(group)
                together[0].source.fetch(together)
                if together[-1].found is None:
                    break

        def settle(ran: Ran[None], _now: float) -> None:
            self._flow.give_back(size)
            if not isinstance(ran, Done):
                raise ran.error

        return blocking(work, settle)

    def _settle(self, read: Read) -> StoredObject | MissReason:
        """What a read found, in memory from now on if there is room and it was not cleared meanwhile."""
        if read.found is not None:
            if self._memory.find(read.wanted) is None and read.source.wants_kept(read):
                self._keep(read.found)
            return read.found
        if not isinstance(read.error, ObjectMissError):
            read.source.note_failure(read.error)
            return MissReason.ABSENT
        reason = read.error.reason
        if read.source.drop(read) and isinstance(read.error, EnvelopeError):
            self.set_aside[reason] += 1
            self._faults.note(read.wanted.name, reason)
        return reason

    def _deliver(
        self,
        objects: list[StoredObject],
        origins: list[str],
        miss: MissReason | None,
        starts: Sequence[int] | None,
    ) -> Retrieved:
        for place, start in enumerate(starts or ()):
            if place < len(objects) and objects[place].envelope.start != start:
                del objects[place:]
                miss = MissReason.IDENTITY_MISMATCH
                break
        if miss is not None:
            self.undelivered[miss] += 1
        self.retrieved.update(origins[: len(objects)])
        return Retrieved(tuple(objects), miss)
