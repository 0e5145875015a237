"""Pre-images, readable: what was hashed, taken apart again.

The decoder refuses whatever the encoder cannot write, so ``decode(encode(x)) == x`` for all x proves that no two inputs
share a pre-image. It also shows people what a key stands for. Spaces encode as roots; chunks and segments carry their
parent, tokens and parts.

Source: docs/spec/key-schema-2.md, "Decoding".
"""

from dataclasses import dataclass, field
from typing import TypeAlias, final

from keying.encoding import (
    DIGEST_SIZE,
    DOMAIN_CHUNK,
    DOMAIN_SEGMENT,
    DOMAIN_SPACE,
    I64,
    MAX_ADAPTERS,
    MAX_CHUNK_SIZE,
    MAX_ITEMS,
    MAX_POSITION,
    MAX_TAGS,
    MAX_TEXT_BYTES,
    MAX_U32,
    U32,
    U64,
    PartKind,
    framed,
    part,
    text,
)
from keying.errors import KeyingError, PreimageError
from keying.extra_keys import CacheSalt, LoraAdapter, MultimodalItem, Tag
from keying.space import KeySpace, encode_space
from keying.tokens import TOKEN_BYTES, pack_tokens, unpack_tokens

_FIRST_UNASSIGNED = 6
_FIRST_NEVER = 128


@final
@dataclass(frozen=True, slots=True)
class MultimodalPart:
    """Kind 1. ``offset`` is relative to the chunk and negative when the item began in an earlier one."""

    identifier: str
    offset: int
    length: int


@final
@dataclass(frozen=True, slots=True)
class LoraPart:
    """Kind 2. ``start`` is relative to the chunk, 0 when the adapter began before it."""

    name: str
    revision: str
    start: int


@final
@dataclass(frozen=True, slots=True)
class SaltPart:
    """Kind 3. The value does not show in ``repr``."""

    value: str = field(repr=False)


@final
@dataclass(frozen=True, slots=True)
class EmbedsPart:
    """Kind 4. ``first`` and ``rows`` place the rows in the chunk; ``digest``: 32 bytes over dtype, row size, rows."""

    first: int
    rows: int
    digest: bytes


@final
@dataclass(frozen=True, slots=True)
class TagPart:
    """Kind 5. ``start`` is relative to the chunk. The value does not show in ``repr``."""

    name: str
    value: bytes = field(repr=False)
    start: int


@final
@dataclass(frozen=True, slots=True)
class UnknownPart:
    """A kind in 6-127 that this version does not know, shown raw. It can be decoded, never derived."""

    kind: int
    payload: bytes = field(repr=False)


Part: TypeAlias = MultimodalPart | LoraPart | SaltPart | EmbedsPart | TagPart | UnknownPart


@final
@dataclass(frozen=True, slots=True)
class ChunkPreimage:
    """What the key of a chunk is the hash of: parent digest, tokens, parts in the order of their bytes."""

    parent: bytes = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    parts: tuple[Part, ...]


@final
@dataclass(frozen=True, slots=True)
class SegmentPreimage:
    """What the key of a segment is the hash of; ``parent`` is the root of the space."""

    parent: bytes = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    parts: tuple[Part, ...]


Preimage: TypeAlias = KeySpace | ChunkPreimage | SegmentPreimage


def encode_preimage(preimage: Preimage) -> bytes:
    """The bytes whose SHA-256 is the root, the chunk key or the segment key.

    Args:
        preimage: a space, a chunk or a segment. Parts may come in any order and are sorted.

    Raises:
        PreimageError: it describes something that derivation cannot produce: no tokens, parts that do not overlap the
            tokens, twice the same part, a kind this version does not know.
        KeyingTypeError: none of the three forms, or a token that is not an integer.
    """
    if isinstance(preimage, KeySpace):
        return encode_space(preimage)
    if not isinstance(preimage, ChunkPreimage | SegmentPreimage):
        raise PreimageError(
            f"pre-image: got {type(preimage).__name__}, wanted KeySpace, ChunkPreimage or SegmentPreimage"
        )
    if not isinstance(preimage.parent, bytes) or len(preimage.parent) != DIGEST_SIZE:
        raise PreimageError(f"parent: wanted {DIGEST_SIZE} bytes")
    domain = DOMAIN_CHUNK if isinstance(preimage, ChunkPreimage) else DOMAIN_SEGMENT
    packed = pack_tokens(preimage.tokens)
    encoded = sorted(encode_part(one) for one in preimage.parts)
    data = b"".join(
        (domain, preimage.parent, U32.pack(len(packed) // TOKEN_BYTES), packed, U32.pack(len(encoded)), *encoded)
    )
    decode_preimage(data)  # the one set of rules about what can be written
    return data


def decode_preimage(data: bytes) -> Preimage:
    """The inverse of `encode_preimage`.

    Args:
        data: a pre-image; at most a few bytes a token, but bounds are checked before the work they bound.

    Raises:
        PreimageError: anything that the encoder cannot write.
    """
    reader = _Reader(data)
    domain = framed(reader.take(reader.u32("domain length", len(DOMAIN_SEGMENT)), "domain"))
    if domain == DOMAIN_SPACE:
        return _decode_space(reader)
    if domain not in {DOMAIN_CHUNK, DOMAIN_SEGMENT}:
        raise PreimageError("domain: not one of key schema 2; these bytes belong to something else")
    parent = reader.take(DIGEST_SIZE, "parent")
    form, longest = (ChunkPreimage, MAX_CHUNK_SIZE) if domain == DOMAIN_CHUNK else (SegmentPreimage, MAX_U32)
    n_tokens = reader.u32("n_tokens", longest)
    if not n_tokens:
        raise PreimageError("n_tokens: 0; no tokens have no key")
    tokens = unpack_tokens(reader.take(n_tokens * TOKEN_BYTES, "tokens"))
    n_parts = reader.u32("n_parts", MAX_U32)
    parts: list[Part] = []
    previous = b""
    for _ in range(n_parts):
        encoded = reader.part()
        if encoded <= previous:
            raise PreimageError("parts: not in rising order of their bytes, or one stands twice")
        previous = encoded
        parts.append(decode_part(encoded))
    reader.end()
    _check_together(parts, n_tokens)
    return form(parent, tokens, tuple(parts))


def encode_part(one: Part) -> bytes:
    """One part as it stands in a pre-image.

    Raises:
        PreimageError: a kind that this version does not know, or a value that its type refuses.
    """
    if isinstance(one, UnknownPart):
        raise PreimageError(
            f"part kind {one.kind}: not known to this version, which derives no key that it cannot check"
        )
    try:
        encoded = _encode_known(one)
    except PreimageError:
        raise
    except Exception as error:  # a field of another type or width: struct, str and bytes each raise their own
        raise PreimageError(f"{type(one).__name__}: holds a value that no part can carry") from error
    decode_part(encoded)
    return encoded


def _encode_known(one: Part) -> bytes:
    if isinstance(one, MultimodalPart):
        return part(PartKind.MULTIMODAL, text(one.identifier) + I64.pack(one.offset) + U64.pack(one.length))
    if isinstance(one, LoraPart):
        return part(PartKind.LORA, text(one.name) + text(one.revision) + U64.pack(one.start))
    if isinstance(one, SaltPart):
        return part(PartKind.SALT, text(one.value))
    if isinstance(one, EmbedsPart):
        return part(PartKind.EMBEDS, U64.pack(one.first) + U64.pack(one.rows) + framed(one.digest))
    if isinstance(one, TagPart):
        return part(PartKind.TAG, text(one.name) + framed(one.value) + U64.pack(one.start))
    raise PreimageError(f"part: got {type(one).__name__}, wanted one of the part types")


def decode_part(data: bytes) -> Part:
    """One encoded part, such as those in `ChunkKey.parts`.

    Raises:
        PreimageError: not one part exactly, or one that no extra key encodes to.
    """
    outer = _Reader(data)
    kind = outer.take(1, "part kind")[0]
    reader = _Reader(outer.framed("part payload", MAX_U32))
    outer.end()
    if kind == 0 or kind >= _FIRST_NEVER:
        raise PreimageError(f"part kind {kind}: never assigned in key schema 2")
    if kind >= _FIRST_UNASSIGNED:
        return UnknownPart(kind, bytes(reader.rest()))
    try:
        one = _decode_known(PartKind(kind), reader)
    except PreimageError:
        raise
    except KeyingError as error:
        raise PreimageError(f"part kind {kind}: {error}") from error
    reader.end()
    return one


def _decode_known(kind: PartKind, reader: "_Reader") -> Part:
    """Each value goes through the constructor of its extra key, so both have one set of bounds."""
    if kind is PartKind.MULTIMODAL:
        identifier = reader.text("identifier")
        offset, length = reader.i64("offset"), reader.u64("length")
        if not -MAX_POSITION <= offset <= MAX_POSITION or offset + length > MAX_POSITION:
            raise PreimageError("multimodal part: offset or length beyond 2**48")
        MultimodalItem(identifier, 0, length)
        return MultimodalPart(identifier, offset, length)
    if kind is PartKind.LORA:
        adapter = LoraAdapter(reader.text("adapter name"), reader.text("adapter revision"), reader.u64("start"))
        return LoraPart(adapter.name, adapter.revision, adapter.start)
    if kind is PartKind.SALT:
        return SaltPart(CacheSalt(reader.text("cache salt")).value)
    if kind is PartKind.EMBEDS:
        first, rows = reader.u64("first row"), reader.u64("rows")
        digest = bytes(reader.framed("embeds digest", DIGEST_SIZE))
        if len(digest) != DIGEST_SIZE:
            raise PreimageError(f"embeds digest: got {len(digest)} bytes, wanted {DIGEST_SIZE}")
        return EmbedsPart(first, rows, digest)
    tag = Tag(reader.text("tag name"), bytes(reader.framed("tag value", MAX_TEXT_BYTES)), reader.u64("start"))
    return TagPart(tag.name, tag.value, tag.start)


def _check_together(parts: list[Part], n_tokens: int) -> None:
    """What the encoder never writes although each part by itself is legal."""
    once: set[tuple[object, ...]] = set()
    covered = 0
    least_start = max([0, *(-one.offset for one in parts if isinstance(one, MultimodalPart))])
    counts = {LoraPart: 0, TagPart: 0, MultimodalPart: 0}
    for one in parts:
        identity: tuple[object, ...] | None = None
        low, high = 0, n_tokens
        if isinstance(one, MultimodalPart):
            low, high = max(one.offset, 0), min(one.offset + one.length, n_tokens)
        elif isinstance(one, LoraPart):
            low, identity = one.start, (LoraPart, one.name, one.revision)
        elif isinstance(one, TagPart):
            low, identity = one.start, (TagPart, one.name)
        elif isinstance(one, SaltPart):
            identity = (SaltPart,)
        elif isinstance(one, EmbedsPart):
            low, high = one.first, one.first + one.rows
            if low < covered or high > n_tokens:
                raise PreimageError("embeds parts: overlap each other or reach beyond the chunk")
            covered = high
        if least_start + max(low, _end(one)) > MAX_POSITION:
            raise PreimageError("parts: no chunk start allows them all within 2**48 positions")
        if low >= high:
            raise PreimageError(f"{type(one).__name__}: does not overlap the tokens, so the encoder left it out")
        if identity is not None:
            if identity in once:
                raise PreimageError(f"{type(one).__name__}: an adapter, a tag name or the salt stands twice")
            once.add(identity)
        if type(one) in counts:
            counts[type(one)] += 1
    limits = {LoraPart: MAX_ADAPTERS, TagPart: MAX_TAGS, MultimodalPart: MAX_ITEMS}
    for kind, limit in limits.items():
        if counts[kind] > limit:
            raise PreimageError(f"parts: more than {limit} of {kind.__name__}")


def _end(one: Part) -> int:
    """How far after the chunk's start a part says that something ends."""
    if isinstance(one, MultimodalPart):
        return one.offset + one.length
    return one.first + one.rows if isinstance(one, EmbedsPart) else 0


def _decode_space(reader: "_Reader") -> KeySpace:
    model, revision, kv_dtype = reader.text("model"), reader.text("model_revision"), reader.text("kv_dtype")
    chunk_size = reader.u32("chunk_size", MAX_CHUNK_SIZE)
    layout = reader.text("kv_layout")
    attributes: dict[str, str] = {}
    previous: bytes | None = None
    for _ in range(reader.u32("number of attributes", MAX_U32)):
        name = reader.text("attribute name")
        if previous is not None and name.encode() <= previous:
            raise PreimageError("attributes: names not in rising order of their bytes, or one stands twice")
        previous = name.encode()
        attributes[name] = reader.text("attribute value")
    reader.end()
    try:
        return KeySpace(
            model,
            chunk_size=chunk_size,
            kv_dtype=kv_dtype,
            model_revision=revision,
            kv_layout=layout,
            attributes=attributes,
        )
    except KeyingError as error:
        raise PreimageError(f"space: {error}") from error


class _Reader:
    """Reads fields off the front of a buffer; every length is checked against what is left before it is used."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes | memoryview) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise PreimageError(f"pre-image: got {type(data).__name__}, wanted bytes")
        self._data = memoryview(data).cast("B")
        self._at = 0

    def take(self, n: int, field: str) -> bytes:
        if n > len(self._data) - self._at:
            raise PreimageError(f"{field}: runs past the end; {n} bytes wanted, {len(self._data) - self._at} left")
        self._at += n
        return bytes(self._data[self._at - n : self._at])

    def u32(self, field: str, limit: int) -> int:
        (value,) = U32.unpack(self.take(U32.size, field))
        if value > limit:
            raise PreimageError(f"{field}: {value} is above {limit}")
        return int(value)

    def u64(self, field: str) -> int:
        return int(U64.unpack(self.take(U64.size, field))[0])

    def i64(self, field: str) -> int:
        return int(I64.unpack(self.take(I64.size, field))[0])

    def framed(self, field: str, limit: int) -> bytes:
        return self.take(self.u32(field, limit), field)

    def text(self, field: str) -> str:
        try:
            return self.framed(field, MAX_TEXT_BYTES).decode()
        except UnicodeDecodeError:
            raise PreimageError(f"{field}: not UTF-8") from None

    def part(self) -> bytes:
        """A whole part, kind and length included."""
        kind = self.take(1, "part kind")
        return kind + framed(self.framed("part payload", MAX_U32))

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at, "rest")

    def end(self) -> None:
        if self._at != len(self._data):
            raise PreimageError(f"{len(self._data) - self._at} bytes too many at the end")
