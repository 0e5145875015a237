"""`Outbox`: objects on their way to a shared store, behind the acknowledgement of whoever stored them.

A queue of bounded bytes, emptied by a few threads. What does not fit is dropped and counted, never waited for. While
the store is away the queue stands, and goes on when it is back; an object that fails time and again is given up, so
that it cannot hold up the others or keep the breaker open. The loop puts in, counts, and is told what became of
each by `collect`; threads only take from the queue and report.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from keying import KeySpace
from protocol_v2.tiers.base import TierError, TierFullError, TierReadOnlyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from protocol_v2.storage.objects import StoredObject
    from protocol_v2.tiers.breaker import Breaker
    from protocol_v2.tiers.remote import RemoteTier

_DESCRIBED: Final = 4096
"""Spaces remembered as described."""

ATTEMPTS: Final = 6
"""Times that an object is sent before it is given up: twice as often as open the breaker."""


@dataclass(slots=True)
class OutboxCounters:
    """Counts since the start.

    Attributes:
        written: objects that the store took.
        written_bytes: payload of them.
        dropped: objects that were not sent: no room in the queue, cleared before, or the server stopped.
        refused: objects that the store did not take, for want of room or rights, or after several attempts.
    """

    written: int = 0
    written_bytes: int = 0
    dropped: int = 0
    refused: int = 0


class _Entry(NamedTuple):
    """An object, or a space to describe; the bytes that it counts for; how often it was sent."""

    item: StoredObject | KeySpace
    size: int
    attempts: int = 0


class _Report(NamedTuple):
    """What became of an entry. Without one: an attempt that failed and is made again, or, no error, a thread's end."""

    entry: _Entry | None
    error: TierError | None


class Outbox:
    """What is on its way to a remote tier. Belongs to the loop, `collect` and all.

    Args:
        tier: takes it.
        breaker: told how calls end; while it is open nothing is sent.
        executor: for the threads.
        clock: seconds, monotonic, for threads.
        limit: bytes in the queue; one object that is larger waits alone.
        senders: threads at one time.
    """

    def __init__(
        self,
        tier: RemoteTier,
        breaker: Breaker,
        executor: Executor,
        clock: Callable[[], float],
        *,
        limit: int,
        senders: int,
    ) -> None:
        self._tier = tier
        self._breaker = breaker
        self._executor = executor
        self._clock = clock
        self._limit = limit
        self._most = senders
        self._queue: deque[_Entry] = deque()
        self._reports: deque[_Report] = deque()
        self._described: OrderedDict[bytes, None] = OrderedDict()
        self._senders = 0
        self.size = 0
        """Bytes that were put in and of which nothing was heard yet."""
        self.objects = 0
        """Objects and descriptions, likewise."""
        self.counters = OutboxCounters()

    def put(self, obj: StoredObject) -> None:
        """Send an object; dropped where the queue is full."""
        if self.size and self.size + obj.charge > self._limit:
            self.counters.dropped += 1
            return
        self._enter(_Entry(obj, obj.charge))

    def describe(self, space: KeySpace) -> None:
        """Send the description of a space, unless that was done."""
        if space.root in self._described:
            return
        self._described[space.root] = None
        if len(self._described) > _DESCRIBED:
            self._described.popitem(last=False)
        self._enter(_Entry(space, 0))

    def start(self) -> None:
        """Let threads send what waits, unless they do or the store is away."""
        if self._queue and self._senders < self._most and not self._breaker.is_open:
            self._senders += 1
            self._executor.submit(self._run)

    def collect(self) -> Iterator[tuple[StoredObject | None, TierError | None]]:
        """What came of each attempt since the last call: the object, if it is done with and is one; why it failed."""
        while self._reports:
            entry, error = self._reports.popleft()
            if entry is None:
                if error is None:
                    self._senders -= 1
                else:
                    yield None, error
                continue
            self._leave(entry)
            item = entry.item
            if isinstance(item, KeySpace):
                if error is not None:
                    self._described.pop(item.root, None)
                yield None, error
                continue
            if error is None:
                self.counters.written += 1
                self.counters.written_bytes += item.envelope.payload_size
            else:
                self.counters.refused += 1
            yield item, error

    def forget(self, root: bytes | None) -> None:
        """Drop the objects that wait, of one space or all."""
        for _ in range(len(self._queue)):
            try:
                entry = self._queue.popleft()
            except IndexError:  # a thread was faster
                return
            if isinstance(entry.item, KeySpace) or (root is not None and entry.item.id.root != root):
                self._queue.append(entry)
                continue
            self._leave(entry)
            self.counters.dropped += 1

    def drain(self, seconds: float) -> None:
        """Send what waits, for so long at most, then give the rest up. Blocks; for the end."""
        self._send(self._clock() + seconds)
        self._queue.clear()

    def end(self) -> int:
        """After `drain` and when no thread is left: how many entries were given up."""
        left = self.objects
        self.counters.dropped += left
        self.objects = self.size = 0
        return left

    def _enter(self, entry: _Entry) -> None:
        self.objects += 1
        self.size += entry.size
        self._queue.append(entry)
        self.start()

    def _leave(self, entry: _Entry) -> None:
        self.objects -= 1
        self.size -= entry.size

    def _run(self) -> None:
        try:
            self._send(float("inf"))
        finally:
            self._reports.append(_Report(None, None))

    def _send(self, until: float) -> None:
        while not self._breaker.is_open and self._clock() < until:
            try:
                entry = self._queue.popleft()
            except IndexError:
                return
            error = None
            try:
                if isinstance(entry.item, KeySpace):
                    self._tier.describe(entry.item)
                else:
                    self._tier.put(entry.item)
            except TierError as failure:
                error = failure
            self._breaker.note(error)
            final = error is None or isinstance(error, TierFullError | TierReadOnlyError)
            if final or entry.attempts + 1 == ATTEMPTS:
                self._reports.append(_Report(entry, error))
            else:
                self._queue.appendleft(entry._replace(attempts=entry.attempts + 1))
                self._reports.append(_Report(None, error))
