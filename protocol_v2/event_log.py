"""Numbered batches of chunk events, sans-IO: the publisher's memory of them, and the subscriber's order.

EventLog    the publisher's last batches, by space and number
FeedReader  the subscriber's order: in sequence, missing ones asked for, what is lost for ever said to be
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from protocol_v2.body import encode
from protocol_v2.chunk_events import (
    EVENTS_VERSION,
    MAX_EVENTS,
    ChunkEvent,
    EventBatch,
    EventError,
    SpaceDescribed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocol_v2.hello import SpaceFields

DESCRIBE_EVERY: Final = 256
"""Batches from one description of the space to the next, so that whoever comes late finds one among those kept."""

MAX_SPACES: Final = 4096
"""Spaces that one publisher tells of; those beyond are not told of."""


@dataclass(slots=True)
class _Told:
    """What was told of one space."""

    described: SpaceDescribed | None = None
    next: int = 0
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)


class EventLog:
    """Numbers batches, of each space by itself, and keeps the last of them.

    Args:
        boot: 16 bytes, another one at each start.
        max_batches: kept of all spaces together, at most; the newest one always is.
        max_bytes: of kept batches, at most.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        boot: bytes,
        *,
        max_batches: int = 10_000,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._boot, self._clock = boot, clock
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._spaces: dict[bytes, _Told] = {}
        self._order: deque[bytes] = deque()
        self._bytes = 0

    @property
    def roots(self) -> tuple[bytes, ...]:
        """Of the spaces that something was told of."""
        return tuple(self._spaces)

    def next(self, root: bytes) -> int:
        """Number of a space's next batch."""
        told = self._spaces.get(root)
        return 0 if told is None else told.next

    def describe(self, root: bytes, space: SpaceFields) -> tuple[int, bytes] | None:
        """Tell what a root stands for: now, and every `DESCRIBE_EVERY` batches again; None if that was told before.

        Raises:
            EventError: too many spaces.
        """
        told = self._told(root)
        if told.described is not None:
            return None
        told.described = SpaceDescribed(space)
        return self.append(root, () if told.next % DESCRIBE_EVERY == 0 else (told.described,))

    def append(self, root: bytes, events: Iterable[ChunkEvent]) -> tuple[int, bytes]:
        """Number a batch of a space and keep it; its number and bytes.

        Raises:
            EventError: too many events, or too many spaces.
        """
        together = tuple(events)
        if len(together) > MAX_EVENTS:
            raise EventError(f"events: got {len(together)}, wanted at most {MAX_EVENTS} in a batch")
        told = self._told(root)
        if told.next % DESCRIBE_EVERY == 0 and told.described is not None:
            together = (told.described, *together)
        sequence = told.next
        body = encode(
            EventBatch(
                version=EVENTS_VERSION,
                boot=self._boot,
                sequence=sequence,
                time=self._clock(),
                root=root,
                events=together,
            )
        )
        told.next += 1
        told.kept.append((sequence, body))
        self._order.append(root)
        self._bytes += len(body)
        while len(self._order) > 1 and (len(self._order) > self._max_batches or self._bytes > self._max_bytes):
            self._bytes -= len(self._spaces[self._order.popleft()].kept.popleft()[1])
        return sequence, body

    def since(self, root: bytes, first: int, count: int = MAX_EVENTS) -> list[tuple[int, bytes]]:
        """The kept batches of a space from a number on, at most `count`, in order."""
        told = self._spaces.get(root)
        if told is None or not told.kept:
            return []
        skipped = max(0, first - told.kept[0][0])
        return list(islice(told.kept, skipped, skipped + count))

    def _told(self, root: bytes) -> _Told:
        told = self._spaces.get(root)
        if told is None:
            if len(self._spaces) >= MAX_SPACES:
                raise EventError(f"events: {MAX_SPACES} spaces are told of, which is all there is room for")
            told = self._spaces[root] = _Told()
        return told


# ---- the subscriber's side


@dataclass(frozen=True, slots=True)
class Restarted:
    """Another publisher speaks, or the same after a restart: what was known of the former one is void."""

    boot: bytes
    root: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches [first, stop) came neither at first nor when asked for: what they told is not known."""

    first: int
    stop: int


FeedItem: TypeAlias = ChunkEvent | Restarted | Lost


@dataclass(slots=True)
class FeedReader:
    """Puts batches of one space in order.

    `receive` takes a batch as it came or as it was asked for; `missing` says what to ask for; `give_up` goes on
    without it.

    Args:
        max_waiting: batches kept behind a gap; the oldest gap is given up when there are more.
    """

    max_waiting: int = 10_000
    _boot: bytes = b""
    _root: bytes = b""
    _next: int = 0
    _waiting: OrderedDict[int, EventBatch] = field(default_factory=OrderedDict)

    def receive(self, batch: EventBatch) -> list[FeedItem]:
        """What a batch gives: its events and those that waited for it, nothing, or first that the publisher is new.

        Raises:
            EventError: the publisher tells of several spaces, whose batches are numbered each by itself.
        """
        out: list[FeedItem] = []
        if batch.boot != self._boot:
            self._boot, self._root, self._next = batch.boot, batch.root, 0
            self._waiting.clear()
            out.append(Restarted(batch.boot, batch.root))
        if batch.root != self._root:
            raise EventError("events: the publisher tells of several spaces; subscribe to one of them by its root")
        if batch.sequence < self._next or batch.sequence in self._waiting:
            return out
        self._waiting[batch.sequence] = batch
        out += self._ready()
        if len(self._waiting) > self.max_waiting:
            out += self.give_up()
        return out

    @property
    def missing(self) -> tuple[int, int] | None:
        """Numbers [first, stop) of the first gap; None where there is none."""
        return (self._next, min(self._waiting)) if self._waiting else None

    @property
    def next(self) -> int:
        """Number of the batch that is wanted next."""
        return self._next

    @property
    def boot(self) -> bytes:
        """Of the publisher whose numbers these are, 16 bytes; empty before the first batch."""
        return self._boot

    def give_up(self) -> list[FeedItem]:
        """Go on behind the first gap; says what is lost."""
        gap = self.missing
        if gap is None:
            return []
        self._next = gap[1]
        return [Lost(*gap), *self._ready()]

    def _ready(self) -> list[FeedItem]:
        out: list[FeedItem] = []
        while (batch := self._waiting.pop(self._next, None)) is not None:
            out += batch.events
            self._next += 1
        return out
