"""Chunk events: what caches and their users tell routers and SDKs. Which chunks can be hit now, and which no more.

Two kinds of publishers tell them. An engine's connector knows what its keys are made of: unlike the block events of
engines its `ChunkStored` is typed and whole, with parent, tokens and parts, each part with its kind, so a subscriber
recomputes the key (`ChunkStored.verify`) and never has to guess what a bare string was. A server knows digests, and
knows them of all engines: its `ChunksHeld` and `ChunkRemoved` are what its lookups go by, evictions included.

Batches are numbered from 0 for each space by each publisher since its start (its boot), so that a subscriber sees what
it missed and asks for it again (`event_log`). A batch is one msgpack map; a version that is not known is refused. Salts
are part of keys, so they are part of events that can be verified; a publisher may leave out tokens and parts of salted
chunks (`hide_salts`). Normative: docs/spec/events-1.md.
"""

from __future__ import annotations

import hashlib
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
from protocol_v2.body import decode
from protocol_v2.errors import LocalProtocolError
from protocol_v2.hello import SpaceFields  # noqa: TC001  (msgspec reads the annotations)

if TYPE_CHECKING:
    from keying import ChunkKey

EVENTS_VERSION: Final = 1
"""Of a batch. Accepted: exactly this one; another is refused, never read as if it were this."""

MAX_EVENTS: Final = 4096
"""Events in a batch."""

MAX_KEYS: Final = 4096
"""Keys in one event."""

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
    """The space of all keys of a batch's root."""

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


class ChunksHeld(Struct, frozen=True, tag="held", kw_only=True, omit_defaults=True):
    """A server holds these chunks now, with every rank of a world size in a KV group.

    A chunk is a hit for a reader with several groups when it is held in each of them.

    Args:
        keys: digests, at most `MAX_KEYS`.
        world: ranks.
        group: KV group.
        tier: where the last of them came in; copies in other tiers may come and go without a word.
    """

    keys: Annotated[tuple[Digest, ...], Meta(max_length=MAX_KEYS)]
    world: Annotated[int, Meta(ge=1)]
    group: Whole
    tier: Text = ""

    def __repr__(self) -> str:
        return f"ChunksHeld({len(self.keys)} keys, world={self.world}, group={self.group}, tier={self.tier!r})"


class ChunkRemoved(Struct, frozen=True, tag="removed", omit_defaults=True):
    """Chunks cannot be hit any more: evicted, forgotten or damaged. So cannot those whose prefix they are part of.

    Args:
        keys: digests, at most `MAX_KEYS`.
        world: ranks of those that held them; None for whatever was told of them (a connector does not tell).
        group: KV group; None likewise.
        tier: the one that had them last, where that is told.
    """

    keys: Annotated[tuple[Digest, ...], Meta(max_length=MAX_KEYS)]
    world: Annotated[int, Meta(ge=1)] | None = None
    group: Whole | None = None
    tier: Text = ""


class SpaceCleared(Struct, frozen=True, tag="cleared", forbid_unknown_fields=True):
    """No chunk of the space can be hit any more."""


ChunkEvent: TypeAlias = SpaceDescribed | ChunkStored | ChunksHeld | ChunkRemoved | SpaceCleared


class EventBatch(Struct, frozen=True, kw_only=True):
    """Events that happened together.

    Args:
        version: `EVENTS_VERSION`.
        boot: 16 bytes, another one at each start of the publisher.
        sequence: of the batch, from 0, for each space.
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


__all__ = [
    "AdapterPart",
    "ChunkEvent",
    "ChunkRemoved",
    "ChunkStored",
    "ChunksHeld",
    "EventBatch",
    "EventError",
    "EventPart",
    "ItemPart",
    "RowsPart",
    "SaltedPart",
    "SpaceCleared",
    "SpaceDescribed",
    "TaggedPart",
    "decode_batch",
]
