"""How keys and shards travel: the structs that carry identity.

They refuse unknown fields, since a dropped field is a lost identity.
An extra key is an array that begins with its kind in key schema 2, so a kind that this version does not have is known
as such, and is never read as another. Values are hidden from `repr`. Source: docs/spec/wire-2.md, "Keys".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from keying import DIGEST_SIZE, PartKind
from protocol_v2.body import decode
from protocol_v2.codes import ErrorCode
from protocol_v2.errors import RemoteProtocolError

if TYPE_CHECKING:
    from protocol_v2.frames import Frame

TOKEN_BYTES: Final = 4
MAX_CHUNKS: Final = 65_536
MAX_TOKENS: Final = 2 * 1024 * 1024
MAX_EXTRA_KEYS: Final = 65_536 + 64 + 64 + 1
"""Key schema 2's own bounds together: items, adapters, tags, one salt."""

MAX_POSITION: Final = 2**48

Position: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_POSITION)]
NonEmptyText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]
SomeText: TypeAlias = Annotated[str, Meta(max_length=4096)]
U16: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFF)]


class _Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """An extra key: an array that begins with its kind in key schema 2. Values are hidden from `repr`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class WireItem(_Part, frozen=True, tag=int(PartKind.MULTIMODAL)):
    """A `keying.MultimodalItem`."""

    identifier: NonEmptyText
    offset: Position
    length: Position


class WireAdapter(_Part, frozen=True, tag=int(PartKind.LORA)):
    """A `keying.LoraAdapter`."""

    name: NonEmptyText
    revision: SomeText
    start: Position


class WireSalt(_Part, frozen=True, tag=int(PartKind.SALT)):
    """A `keying.CacheSalt`."""

    value: NonEmptyText


class WireEmbeds(_Part, frozen=True, tag=int(PartKind.EMBEDS)):
    """A `keying.PromptEmbeds`."""

    offset: Position
    rows: bytes
    row_bytes: Annotated[int, Meta(ge=1, lt=2**32)]
    dtype: NonEmptyText


class WireTag(_Part, frozen=True, tag=int(PartKind.TAG)):
    """A `keying.Tag`."""

    name: NonEmptyText
    value: Annotated[bytes, Meta(max_length=4096)]
    start: Position


WireExtraKey: TypeAlias = WireItem | WireAdapter | WireSalt | WireEmbeds | WireTag
KNOWN_KINDS: Final = frozenset(int(kind) for kind in PartKind)


class Keys(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The chunk keys of a prompt, from its first chunk on: as digests, or as what they are derived from.

    Exactly one of `digests` and `tokens` is given; the others go with `tokens`.

    Args:
        digests: n x 32 bytes, n at most 65,536.
        tokens: m x 4 bytes, little-endian u32, m at most 2,097,152.
        extra_keys: what else the keys depend on.
        partial_tail: the tail that fills no chunk is keyed too.
    """

    digests: Annotated[bytes, Meta(max_length=MAX_CHUNKS * DIGEST_SIZE)] | None = None
    tokens: Annotated[bytes, Meta(max_length=MAX_TOKENS * TOKEN_BYTES)] | None = None
    extra_keys: Annotated[tuple[WireExtraKey, ...], Meta(max_length=MAX_EXTRA_KEYS)] = ()
    partial_tail: bool = False

    def __post_init__(self) -> None:
        if (self.digests is None) == (self.tokens is None):
            raise ValueError("keys: wanted exactly one of digests and tokens")
        if self.digests is not None:
            if len(self.digests) % DIGEST_SIZE:
                raise ValueError(f"keys.digests: got {len(self.digests)} bytes, wanted a multiple of {DIGEST_SIZE}")
            if self.extra_keys or self.partial_tail:
                raise ValueError("keys: extra_keys and partial_tail go with tokens; digests hold them already")
        elif self.tokens is not None and len(self.tokens) % TOKEN_BYTES:
            raise ValueError(f"keys.tokens: got {len(self.tokens)} bytes, wanted a multiple of {TOKEN_BYTES}")

    @property
    def max_chunks(self) -> int:
        """Chunks named, or for tokens the most that there can be."""
        if self.digests is not None:
            return len(self.digests) // DIGEST_SIZE
        return len(self.tokens or b"") // TOKEN_BYTES

    def __repr__(self) -> str:
        if self.digests is not None:
            return f"Keys({len(self.digests) // DIGEST_SIZE} digests)"
        return f"Keys({len(self.tokens or b'') // TOKEN_BYTES} tokens, {len(self.extra_keys)} extra keys)"


class Shard(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of a chunk's value: the storage name's `w<world>r<rank>g<group>`.

    Args:
        world: shards of a value in each group, 1 to 65,535.
        rank: which of them, below `world`.
        group: KV group.
    """

    world: Annotated[int, Meta(ge=1, le=0xFFFF)] = 1
    rank: U16 = 0
    group: U16 = 0

    def __post_init__(self) -> None:
        if self.rank >= self.world:
            raise ValueError(f"shard: got rank {self.rank} of {self.world}, wanted a rank below the world size")


class _LooseKeys(Struct):
    extra_keys: tuple[msgspec.Raw, ...] = ()


class _LooseKeyed(Struct):
    keys: _LooseKeys


_loose_keyed_decoder: Final = msgspec.msgpack.Decoder(_LooseKeyed)


def refuse_unknown_kinds(body: Frame) -> None:
    """Say so if what makes a keyed request unreadable is an extra key of a kind that this version does not have.

    Raises:
        RemoteProtocolError: `UNKNOWN_KIND`.
    """
    try:
        raws = decode(body, _loose_keyed_decoder, "keys").keys.extra_keys
    except RemoteProtocolError:
        return
    for place, raw in enumerate(raws):
        kind = _leading_kind(raw)
        if kind is not None and kind not in KNOWN_KINDS:
            raise RemoteProtocolError(
                ErrorCode.UNKNOWN_KIND,
                f"keys.extra_keys[{place}]: kind {kind} is none that this version derives keys with",
            )


def _leading_kind(raw: msgspec.Raw) -> int | None:
    """The integer that an extra key's array begins with."""
    data = memoryview(raw)
    if len(data) < 2 or not 0x91 <= data[0] <= 0x9F:  # a fixarray of at least one element
        return None
    kind, width = data[1], {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(data[1], 0)
    if width:
        return int.from_bytes(data[2 : 2 + width], "big")
    return kind if kind < 0x80 else None  # a positive fixint
