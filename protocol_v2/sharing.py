"""`Sharing`: a server's side of shared memory: its own segment, those that clients attached, and what lies where.

Values that clients store through shared memory are copied into the server's segment, at once and once, so nothing that
a client does to its own memory afterwards changes what others are served. A value that lies there is retrieved without
another copy on this side: the reply names its range, the lease keeps it where it is, and the client copies it out. A
value that came in a message or from disk is copied in when it is first retrieved through shared memory. Where there is
no room, values lie in ordinary memory and travel inline.

A range is free again when nobody in this process uses its bytes any more: the memory tier, a write to disk, a message
that is being sent. Belongs to the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import RemoteProtocolError, UnsharedError
from protocol_v2.messages import AttachReply, SharedRange
from protocol_v2.shared_memory import Copier, RangeName, Segment, SegmentName, SegmentReader, copy_into
from protocol_v2.storage import stored_object
from protocol_v2.work import Done, Ran, Task, blocking, immediate

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from protocol_v2.messages import AttachRequest, StoreRequest
    from protocol_v2.status import Fact
    from protocol_v2.storage import StoredObject

MAX_ATTACHED: Final = 512
"""Sessions that have shared memory at one time: each costs a file descriptor."""


@dataclass(slots=True)
class SharingCounters:
    """Counts since the start.

    Attributes:
        attached: segments of clients that were attached.
        refused: those that could not be, or for which there was no room.
        stored: chunks that came through shared memory.
        unplaced: of these, chunks for which the segment had no room.
        stale: stores whose ranges were not what was announced.
        retrieved: chunks that were named in a reply.
        moved: of these, chunks that had to be copied into the segment first.
        inline: chunks that were sent inline though shared memory was asked for.
    """

    attached: int = 0
    refused: int = 0
    stored: int = 0
    unplaced: int = 0
    stale: int = 0
    retrieved: int = 0
    moved: int = 0
    inline: int = 0


class Sharing:
    """See the head of the module.

    Args:
        nbytes: bytes of values that the segment can hold.

    Raises:
        UnsharedError: the operating system has no such memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._segment = Segment(nbytes)
        self._readers: dict[Hashable, SegmentReader] = {}
        self._copier = Copier()
        self.counters = SharingCounters()

    def attach(self, owner: Hashable, message: AttachRequest) -> AttachReply:
        """Attach a client's segment, in the place of the one before.

        Raises:
            UnsharedError: it is not in reach, or there is no room for one more.
        """
        name = SegmentName(message.pid, message.fd, message.nonce, message.size)
        try:
            if len(self._readers) >= MAX_ATTACHED and owner not in self._readers:
                raise UnsharedError(f"{MAX_ATTACHED} sessions share memory, which is all there is room for")  # noqa: TRY301
            self._readers[owner] = SegmentReader(name)
        except UnsharedError:
            self.counters.refused += 1
            raise
        self.counters.attached += 1
        ours = self._segment.name
        return AttachReply(pid=ours.pid, fd=ours.fd, nonce=ours.nonce, size=ours.size)

    def detach(self, owner: Hashable) -> None:
        """A session has ended."""
        self._readers.pop(owner, None)

    def close(self) -> None:
        """No session will come any more."""
        self._readers.clear()
        self._copier.close()

    def copy_in(self, owner: Hashable, message: StoreRequest, sizes: Sequence[int]) -> Task[list[memoryview]]:
        """Copy what a store names into memory of this process: one buffer for each chunk, read-only from now on.

        The task raises `UnsharedError` where a range is not what was announced, before, while or after it was copied.

        Args:
            owner: of the request.
            message: with ranges.
            sizes: bytes of each chunk.

        Raises:
            RemoteProtocolError: this session has attached nothing.
            UnsharedError: a range reaches out of the client's segment.
        """
        reader = self._readers.get(owner)
        if reader is None:
            raise RemoteProtocolError(ErrorCode.UNSHARED, "the session has attached no shared memory")
        names = [RangeName(one.granule, one.generation) for one in message.ranges]
        for name, nbytes in zip(names, sizes, strict=True):
            reader.check(name, nbytes)
        views = [self._take(nbytes) for nbytes in sizes]

        def work() -> None:
            reads = [partial(reader.read, name, view) for name, view in zip(names, views, strict=True)]
            if not all(self._copier.run(reads, sum(sizes))):
                raise UnsharedError("a range of shared memory is not the one that was announced")

        def settle(ran: Ran[None], _now: float) -> list[memoryview]:
            if not isinstance(ran, Done):
                self.counters.stale += isinstance(ran.error, UnsharedError)
                raise ran.error
            self.counters.stored += len(views)
            return [view.toreadonly() for view in views]

        return blocking(work, settle)

    def reads(self, nonce: object) -> bool:
        """Whether a retrieve asks for ranges of this segment."""
        return nonce == self._segment.name.nonce

    def move_in(self, objects: Sequence[StoredObject]) -> Task[list[tuple[StoredObject, StoredObject]]]:
        """Those objects that are not in the segment, each with its copy there, as far as there is room."""
        moving: list[tuple[StoredObject, memoryview]] = []
        for obj in objects:
            nbytes = obj.envelope.payload_size
            if nbytes and self._segment.place(obj.buffers[0]) is None:
                view = self._segment.take(nbytes)
                if view is None:
                    break
                moving.append((obj, view))
        if not moving:
            return immediate([])

        def work() -> None:
            copies = [partial(copy_into, view, obj.buffers) for obj, view in moving]
            self._copier.run(copies, sum(view.nbytes for _, view in moving))

        def settle(ran: Ran[None], _now: float) -> list[tuple[StoredObject, StoredObject]]:
            if not isinstance(ran, Done):
                raise ran.error
            self.counters.moved += len(moving)
            return [(obj, stored_object(obj.envelope, [view], give=True)) for obj, view in moving]

        return blocking(work, settle)

    def range_of(self, obj: StoredObject) -> SharedRange | None:
        """Where an object lies; None for one that does not lie in the segment."""
        name = self._segment.announce(obj.buffers[0])
        if name is None:
            self.counters.inline += 1
            return None
        self.counters.retrieved += 1
        return SharedRange(*name)

    def facts(self) -> dict[str, Fact]:
        """Facts for the status."""
        counters = self.counters
        return {
            "shared.bytes": self._segment.size,
            "shared.used": self._segment.used,
            "shared.sessions": len(self._readers),
            **{f"shared.{name}": getattr(counters, name) for name in counters.__slots__},
        }

    def _take(self, nbytes: int) -> memoryview:
        view = self._segment.take(nbytes)
        if view is None:
            self.counters.unplaced += 1
            view = memoryview(bytearray(nbytes))
        return view
