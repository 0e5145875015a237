"""`ClientSharing`: a client's side of shared memory: what it stores from, and how it reads what the server holds.

A store copies tensors into ranges of the client's own segment (or finds them there already), announces
them, and withdraws them when the request has ended, however it has: a server that comes to a request late, when nobody
waits any more and the memory may hold something else, finds the range withdrawn and keeps nothing. A retrieve copies
the ranges that the reply names into memory of this process; a range that changed before that was done is a miss.

Sessions come and go below it: the client's thread attaches the segment to each new one. Where that fails, or there is
no room, payload travels inline, and is counted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Final

from protocol_v2.errors import ProtocolError, UnsharedError
from protocol_v2.messages import AttachReply, AttachRequest, SharedRange
from protocol_v2.shared_memory import Copier, RangeName, Segment, SegmentName, SegmentReader, copy_into, private_pool
from protocol_v2.stored_messages import metas_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from protocol_v2.events import ReplyReceived
    from protocol_v2.frames import Frame
    from protocol_v2.messages import RetrieveReply

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 64 << 20
"""Bytes of one store request. Each costs a round trip of threads and processes, some milliseconds where they sleep, so
smaller ones are slower: 64 MiB in four requests took 1.5 times as long as in one."""

BATCHES: Final = 2
"""Store requests under way: while the server copies one, the next is copied here."""


@dataclass(slots=True)
class ClientSharingCounters:
    """Counts since the client was made.

    Attributes:
        attached: sessions in which both sides share memory.
        refused: sessions that agreed on it and then could not.
        stored: chunks stored through it.
        in_place: of these, chunks that lay in it already.
        retrieved: chunks retrieved through it.
        no_room: store requests that went inline for want of room.
        stale: ranges that changed before they were copied: misses.
    """

    attached: int = 0
    refused: int = 0
    stored: int = 0
    in_place: int = 0
    retrieved: int = 0
    no_room: int = 0
    stale: int = 0


class Staged:
    """Chunks in announced ranges.

    Attributes:
        ranges: for each chunk.
    """

    def __init__(self, segment: Segment, views: Sequence[memoryview]) -> None:
        self._segment = segment
        self._views = views
        names = [segment.announce(view) for view in views]
        self.ranges = tuple(SharedRange(*name) for name in names if name is not None)

    def withdraw(self) -> None:
        """The request has ended; whoever still reads finds out."""
        for view in self._views:
            self._segment.withdraw(view)
        self._views = ()


class ClientSharing:
    """See the head of the module. Its methods are for any thread, but for those that say otherwise.

    Args:
        nbytes: bytes of the segment, and of the memory that retrieved chunks are copied to; used as far as needed.

    Raises:
        UnsharedError: the operating system has no such memory.

    Attributes:
        reader: of the server's segment; None while no session shares memory.
        failure: why the last session that agreed on it does not; None where it does.
    """

    def __init__(self, nbytes: int) -> None:
        self._segment = Segment(nbytes)
        self._received = private_pool(nbytes)
        self._copier = Copier()
        self.reader: SegmentReader | None = None
        self.failure: ProtocolError | None = None
        self.counters = ClientSharingCounters()

    # ---- in the client's thread

    def attach_request(self) -> AttachRequest:
        """What to ask in a new session that agreed on shared memory."""
        name = self._segment.name
        return AttachRequest(pid=name.pid, fd=name.fd, nonce=name.nonce, size=name.size)

    def attached(self, outcome: Future[ReplyReceived | ProtocolError]) -> None:
        """What became of the request."""
        answer = outcome.result()
        try:
            if isinstance(answer, ProtocolError):
                raise answer
            reply = answer.message
            if not isinstance(reply, AttachReply):
                raise UnsharedError("shared memory: no reply to what was asked")
            self.reader = SegmentReader(SegmentName(reply.pid, reply.fd, reply.nonce, reply.size))
        except ProtocolError as error:
            self.counters.refused += 1
            if str(error) != str(self.failure):
                log.info("payload travels inline: %s", error)
            self.failure = error
        else:
            self.counters.attached += 1
            self.failure = None

    def detach(self) -> None:
        """The session is over."""
        self.reader = None

    # ---- store

    def stage(self, chunks: Sequence[Sequence[Frame]]) -> Staged | None:
        """Bring chunks into announced ranges, each chunk's frames back to back; None where there is no room for all."""
        if self.reader is None:
            return None
        views = []
        copies = []
        total = 0
        for frames in chunks:
            view = self._segment.find(frames)
            if view is not None:
                self.counters.in_place += 1
                views.append(view)
                continue
            nbytes = sum(memoryview(frame).nbytes for frame in frames)
            view = self._segment.take(nbytes) if nbytes else None
            if view is None:
                self.counters.no_room += 1
                return None
            copies.append(partial(copy_into, view, frames))
            total += nbytes
            views.append(view)
        self._copier.run(copies, total)
        self.counters.stored += len(views)
        return Staged(self._segment, views)

    def memory(self, nbytes: int) -> memoryview | None:
        """Memory from which a store copies nothing on this side; None where there is no room, or nobody to read it."""
        return None if self.reader is None else self._segment.take(nbytes)

    # ---- retrieve

    def gather(self, reader: SegmentReader, reply: RetrieveReply, payload: Sequence[Frame]) -> list[Sequence[Frame]]:
        """The frames of each chunk of a reply, in memory of this process: all, or those before a range that changed.

        Args:
            reader: of the segment that the request named.
            reply: with ranges.
            payload: of the chunks without one.
        """
        inline = iter(payload)
        chunks: list[Sequence[Frame]] = []
        copies: dict[int, tuple[RangeName, memoryview]] = {}
        for place, (where, nbytes) in enumerate(zip(reply.ranges, reply.chunk_sizes(), strict=True)):
            metas = metas_of(reply.tensors, place)
            if where is None:
                chunks.append(tuple(islice(inline, len(metas))))
                continue
            view = self._received.take(nbytes)
            if view is None:
                view = memoryview(bytearray(nbytes))
            copies[place] = RangeName(where.granule, where.generation), view
            ends = list(accumulate(meta.nbytes for meta in metas))
            chunks.append([view[end - meta.nbytes : end] for meta, end in zip(metas, ends, strict=True)])
        reads = [partial(_read, reader, name, view) for name, view in copies.values()]
        whole = self._copier.run(reads, reply.shared_bytes())
        self.counters.retrieved += sum(whole)
        self.counters.stale += len(whole) - sum(whole)
        changed = [place for place, kept in zip(copies, whole, strict=True) if not kept]
        return chunks[: changed[0]] if changed else chunks

    def close(self) -> None:
        """No session will come any more."""
        self.detach()
        self._copier.close()


def _read(reader: SegmentReader, name: RangeName, view: memoryview) -> bool:
    try:
        return reader.read(name, view)
    except UnsharedError as error:
        log.warning("a retrieve through shared memory failed: %s", error)
        return False


def make_sharing(nbytes: int) -> ClientSharing | None:
    """The client's side, unless it is not wanted or the operating system has no such memory."""
    if nbytes <= 0:
        return None
    try:
        return ClientSharing(nbytes)
    except UnsharedError as error:
        log.warning("payload travels inline: %s", error)
        return None
