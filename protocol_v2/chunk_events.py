"""Chunk events: what a cache's users tell routers and SDKs, sans-IO. Which chunks can be hit now, and which no more.

Unlike the block events of engines they are typed and whole: a stored chunk comes with its parent, its tokens and its
parts, each part with its kind, so a subscriber recomputes the key (`ChunkStored.verify`) and never has to guess what a
bare string was. Batches are numbered from 0 by each publisher since its start (its boot), so that a subscriber sees
what it missed and asks for it again.

    EventLog    the publisher's last batches, by number
    FeedReader  the subscriber's order: in sequence, missing ones asked for, what is lost for ever said to be

A batch is one msgpack map; a version that is not known is refused. Salts are part of keys, so they are part of events
that can be verified; a publisher may leave out tokens and parts of salted chunks (`hide_salts`).
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from keying import (
    ChunkPreimage,
    EmbedsPart,
    KeyingError,
    LoraPart,
    MultimodalPart,
    PartKind,
    SaltPart,
    TagPart,
    decode_part,
    encode_preimage,
    unpack_tokens,
)
from protocol_v2.body import decode, encode
from protocol_v2.errors import LocalProtocolError
from protocol_v2.hello import SpaceFields  # noqa: TC001  (msgspec reads the annotations)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from keying import ChunkKey

EVENTS_VERSION: Final = 1
"""Of a batch. Accepted: exactly this one; another is refused, never read as if it were this."""

MAX_EVENTS: Final = 4096
"""Events in a batch."""

DESCRIBE_EVERY: Final = 256
"""Batches from one description of the space to the next, so that whoever comes late finds one among those kept."""

MAX_EVENT_TOKENS: Final = 1 << 20
"""Tokens of a chunk in an event."""

Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
Whole: TypeAlias = Annotated[int, Meta(ge=0)]


class EventError(LocalProtocolError):
    """An event that does not say what it must, or does not fit its key."""


# ---- parts: arrays that begin with their kind in key schema 2


class _Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a chunk; values are hidden from `repr`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class ItemPart(_Part, frozen=True, tag=int(PartKind.MULTIMODAL)):
    """A multimodal item; `offset` is relative to the chunk, negative where the item began before it."""

    identifier: Text
    offset: int
    length: Whole


class AdapterPart(_Part, frozen=True, tag=int(PartKind.LORA)):
    """An adapter; `start` is relative to the chunk, 0 where it began before it."""

    name: Text
    revision: Text
    start: Whole


class SaltedPart(_Part, frozen=True, tag=int(PartKind.SALT)):
    """The salt."""

    value: Text


class RowsPart(_Part, frozen=True, tag=int(PartKind.EMBEDS)):
    """Embedding rows: where in the chunk, how many, and the digest over them."""

    first: Whole
    rows: Whole
    digest: Digest


class TaggedPart(_Part, frozen=True, tag=int(PartKind.TAG)):
    """A tag."""

    name: Text
    value: Annotated[bytes, Meta(max_length=4096)]
    start: Whole


EventPart: TypeAlias = ItemPart | AdapterPart | SaltedPart | RowsPart | TaggedPart


def _to_event(encoded: bytes) -> EventPart:
    part = decode_part(encoded)
    match part:
        case MultimodalPart():
            return ItemPart(part.identifier, part.offset, part.length)
        case LoraPart():
            return AdapterPart(part.name, part.revision, part.start)
        case SaltPart():
            return SaltedPart(part.value)
        case EmbedsPart():
            return RowsPart(part.first, part.rows, part.digest)
        case TagPart():
            return TaggedPart(part.name, part.value, part.start)
    raise EventError(f"part: kind {encoded[0]} has no form in an event")


def _to_keying(part: EventPart) -> MultimodalPart | LoraPart | SaltPart | EmbedsPart | TagPart:
    match part:
        case ItemPart():
            return MultimodalPart(part.identifier, part.offset, part.length)
        case AdapterPart():
            return LoraPart(part.name, part.revision, part.start)
        case SaltedPart():
            return SaltPart(part.value)
        case RowsPart():
            return EmbedsPart(part.first, part.rows, part.digest)
        case TaggedPart():
            return TagPart(part.name, part.value, part.start)


# ---- events


class SpaceDescribed(Struct, frozen=True, tag="space", forbid_unknown_fields=True):
    """The space of all keys of this publisher; its first event."""

    space: SpaceFields


class ChunkStored(Struct, frozen=True, tag="stored", kw_only=True, omit_defaults=True):
    """A chunk is in the cache, with every shard of it.

    Args:
        key: its digest.
        parent: digest of the chunk before it, or the space's root.
        start: position of its first token.
        n_tokens: tokens of it.
        tokens: packed little-endian u32; None where they are not told.
        parts: what else the key is made of, in the order of key schema 2; None where that is not told.
    """

    key: Digest
    parent: Digest
    start: Whole
    n_tokens: Annotated[int, Meta(ge=1, le=MAX_EVENT_TOKENS)]
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_EVENT_TOKENS)] | None = None
    parts: tuple[EventPart, ...] | None = None

    @classmethod
    def of(cls, key: ChunkKey, parent: bytes, tokens: bytes, *, hide_salts: bool = False) -> ChunkStored:
        """The event of a chunk.

        Args:
            key: of the chunk.
            parent: digest of the key before it, or the root.
            tokens: of the chunk, packed little-endian u32.
            hide_salts: leave out tokens and parts of a chunk with a salt.

        Raises:
            EventError: tokens that are not the key's.
        """
        parts = tuple(_to_event(one) for one in key.parts)
        place: dict[str, Any] = {"parent": parent, "start": key.start, "n_tokens": key.stop - key.start}
        if len(tokens) != 4 * place["n_tokens"]:
            raise EventError(f"tokens: got {len(tokens)} bytes, wanted 4 for each of {place['n_tokens']}")
        if hide_salts and any(isinstance(one, SaltedPart) for one in parts):
            return cls(key=key.digest, **place)
        return cls(key=key.digest, tokens=tokens, parts=parts, **place)

    @property
    def is_whole(self) -> bool:
        """Whether it tells what the key is made of."""
        return self.tokens is not None and self.parts is not None

    def verify(self) -> None:
        """Recompute the key.

        Raises:
            EventError: the event does not tell enough, or its key is another.
        """
        if self.tokens is None or self.parts is None:
            raise EventError("event: tells neither tokens nor parts, so its key cannot be recomputed")
        try:
            tokens = tuple(unpack_tokens(self.tokens))
            preimage = encode_preimage(ChunkPreimage(self.parent, tokens, tuple(_to_keying(one) for one in self.parts)))
        except KeyingError as error:
            raise EventError(f"event: no key is made of this: {error}") from error
        if len(tokens) != self.n_tokens or hashlib.sha256(preimage).digest() != self.key:
            raise EventError("event: its key is not the one that its parent, tokens and parts give")

    def __repr__(self) -> str:
        return f"ChunkStored(xk2:{self.key.hex()}, start={self.start}, n_tokens={self.n_tokens})"


class ChunkRemoved(Struct, frozen=True, tag="removed", forbid_unknown_fields=True):
    """Chunks cannot be hit any more: evicted, forgotten or damaged. So cannot those whose prefix they are part of."""

    keys: Annotated[tuple[Digest, ...], Meta(max_length=MAX_EVENTS)]


class SpaceCleared(Struct, frozen=True, tag="cleared", forbid_unknown_fields=True):
    """No chunk of the space can be hit any more."""


ChunkEvent: TypeAlias = SpaceDescribed | ChunkStored | ChunkRemoved | SpaceCleared


class EventBatch(Struct, frozen=True, kw_only=True):
    """Events that happened together.

    Args:
        version: `EVENTS_VERSION`.
        boot: 16 bytes, another one at each start of the publisher.
        sequence: of the batch, from 0.
        time: of the publisher's clock, seconds since 1970.
        root: of the space that all events are about.
        events: in order.
    """

    version: int
    boot: Annotated[bytes, Meta(min_length=16, max_length=16)]
    sequence: Whole
    time: float
    root: Digest
    events: Annotated[tuple[ChunkEvent, ...], Meta(max_length=MAX_EVENTS + 1)]


class _Version(Struct):
    version: int


_version_decoder: Final = msgspec.msgpack.Decoder(_Version)
_batch_decoder: Final = msgspec.msgpack.Decoder(EventBatch)


def decode_batch(body: bytes) -> EventBatch:
    """A batch from its bytes.

    Raises:
        RemoteProtocolError: bytes that are no batch.
        EventError: of a version that this code does not know.
    """
    version = decode(body, _version_decoder, "events").version
    if version != EVENTS_VERSION:
        raise EventError(f"events: got version {version}, wanted {EVENTS_VERSION}; upgrade the subscriber")
    return decode(body, _batch_decoder, "events")


# ---- the publisher's side


class EventLog:
    """Numbers batches and keeps the last of them.

    Args:
        boot: 16 bytes, another one at each start.
        root: of the space.
        space: describes it; told in the first batch, and every `DESCRIBE_EVERY` batches again.
        max_batches: kept, at most.
        max_bytes: of kept batches, at most.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        boot: bytes,
        root: bytes,
        space: SpaceFields,
        *,
        max_batches: int = 10_000,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._boot, self._root, self._clock = boot, root, clock
        self._space = SpaceDescribed(space)
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self.next = 0
        """Number of the next batch."""
        self.append(())

    def append(self, events: Iterable[ChunkEvent]) -> tuple[int, bytes]:
        """Number a batch and keep it; its number and bytes.

        Raises:
            EventError: too many events.
        """
        together = tuple(events)
        if len(together) > MAX_EVENTS:
            raise EventError(f"events: got {len(together)}, wanted at most {MAX_EVENTS} in a batch")
        sequence = self.next
        if sequence % DESCRIBE_EVERY == 0:
            together = (self._space, *together)
        body = encode(
            EventBatch(
                version=EVENTS_VERSION,
                boot=self._boot,
                sequence=sequence,
                time=self._clock(),
                root=self._root,
                events=together,
            )
        )
        self.next += 1
        self._kept.append((sequence, body))
        self._bytes += len(body)
        while len(self._kept) > 1 and (len(self._kept) > self._max_batches or self._bytes > self._max_bytes):
            self._bytes -= len(self._kept.popleft()[1])
        return sequence, body

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """The kept batches from a number on."""
        oldest = self._kept[0][0] if self._kept else self.next
        return [self._kept[place] for place in range(max(0, first - oldest), len(self._kept))]


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


@dataclass(slots=True)
class FeedReader:
    """Puts batches in order.

    `receive` takes a batch as it came or as it was asked for; `missing` says what to ask for; `give_up` goes on
    without it.

    Args:
        max_waiting: batches kept behind a gap; the oldest gap is given up when there are more.
    """

    max_waiting: int = 10_000
    _boot: bytes | None = None
    _next: int = 0
    _waiting: OrderedDict[int, EventBatch] = field(default_factory=OrderedDict)

    def receive(self, batch: EventBatch) -> list[ChunkEvent | Restarted | Lost]:
        """What a batch gives: its events and those that waited for it, nothing, or first that the publisher is new."""
        out: list[ChunkEvent | Restarted | Lost] = []
        if batch.boot != self._boot:
            self._boot, self._next = batch.boot, 0
            self._waiting.clear()
            out.append(Restarted(batch.boot, batch.root))
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

    def give_up(self) -> list[ChunkEvent | Restarted | Lost]:
        """Go on behind the first gap; says what is lost."""
        gap = self.missing
        if gap is None:
            return []
        self._next = gap[1]
        return [Lost(*gap), *self._ready()]

    def _ready(self) -> list[ChunkEvent | Restarted | Lost]:
        out: list[ChunkEvent | Restarted | Lost] = []
        while (batch := self._waiting.pop(self._next, None)) is not None:
            out += batch.events
            self._next += 1
        return out


__all__ = [
    "AdapterPart",
    "ChunkEvent",
    "ChunkRemoved",
    "ChunkStored",
    "EventBatch",
    "EventError",
    "EventLog",
    "EventPart",
    "FeedReader",
    "ItemPart",
    "Lost",
    "Restarted",
    "RowsPart",
    "SaltedPart",
    "SpaceCleared",
    "SpaceDescribed",
    "TaggedPart",
    "decode_batch",
]
