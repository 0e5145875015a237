"""Keys of a whole prompt: chained chunks, and segments for position-independent reuse."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

from keying.encoding import (
    DOMAIN_CHUNK,
    DOMAIN_SEGMENT,
    MAX_POSITION,
    MAX_U32,
    U32,
    checked_int,
    digest,
    format_digest,
)
from keying.errors import KeyingError, KeyingTypeError, SpaceTypeError
from keying.extra_keys import ExtraKey
from keying.parts import Parts, PartsCursor, PartsIndex
from keying.space import KeySpace
from keying.tokens import TOKEN_BYTES, pack_tokens

_CHUNK_HASHER = hashlib.sha256(DOMAIN_CHUNK)


class ChunkKey(NamedTuple):
    """The key of one chunk or segment. Prints as ``xk2:<64 hex>``; its parts, which may hold a salt, do not print.

    Attributes:
        digest: 32 bytes.
        start: first prompt position, inclusive.
        stop: last prompt position, exclusive.
        parts: the encoded parts, sorted; see `keying.decode_part`.
    """

    digest: bytes
    start: int
    stop: int
    parts: Parts

    def __str__(self) -> str:
        return format_digest(self.digest)

    def __repr__(self) -> str:
        return f"ChunkKey({self}, start={self.start}, stop={self.stop}, n_parts={len(self.parts)})"


def checked_space(space: object) -> KeySpace:
    """The space, or a typed error that says what was given instead."""
    if not isinstance(space, KeySpace):
        raise SpaceTypeError(f"space: got {type(space).__name__}, wanted KeySpace")
    return space


def encode_parts(parts: Parts) -> bytes:
    """``u32(n_parts) || parts``, the end of a chunk's pre-image."""
    return U32.pack(len(parts)) + b"".join(parts)


def derive_run(
    parent: bytes, data: memoryview, first: int, chunk_size: int, cursor: PartsCursor
) -> tuple[list[bytes], list[Parts]]:
    """Digests and parts of consecutive full chunks.

    Args:
        parent: digest before the first of them, or the root.
        data: packed tokens, a whole number of chunks.
        first: prompt position of the first token.
        chunk_size: tokens in a chunk.
        cursor: at or before ``first``; it is moved.
    """
    digests: list[bytes] = []
    parts_of: list[Parts] = []
    append, copy = digests.append, _CHUNK_HASHER.copy
    width = chunk_size * TOKEN_BYTES
    count = U32.pack(chunk_size)
    end = len(data)
    at = 0
    while at < end:
        start = first + at // TOKEN_BYTES
        parts = cursor.parts(start, start + chunk_size)
        tail = encode_parts(parts)
        chunks = min((end - at) // width, max(1, (cursor.same_until - start) // chunk_size))
        run_end = at + chunks * width
        for low in range(at, run_end, width):
            hasher = copy()
            hasher.update(parent + count)
            hasher.update(data[low : low + width])
            hasher.update(tail)
            parent = hasher.digest()
            append(parent)
        parts_of += repeat(parts, chunks)
        at = run_end
    return digests, parts_of


def chunk_digest(parent: bytes, packed: bytes | memoryview, parts: Parts) -> bytes:
    """The digest of one chunk of any length."""
    hasher = _CHUNK_HASHER.copy()
    hasher.update(parent + U32.pack(len(packed) // TOKEN_BYTES))
    hasher.update(packed)
    hasher.update(encode_parts(parts))
    return hasher.digest()


def make_keys(digests: list[bytes], parts_of: list[Parts], first: int, chunk_size: int) -> list[ChunkKey]:
    """Key objects for consecutive full chunks."""
    starts = range(first, first + len(digests) * chunk_size, chunk_size)
    stops = range(first + chunk_size, first + (len(digests) + 1) * chunk_size, chunk_size)
    # tuple.__new__ in C for each row; the NamedTuple constructor would be a Python call a chunk
    return list(map(tuple.__new__, repeat(ChunkKey), zip(digests, starts, stops, parts_of, strict=True)))


def _derive(
    space: KeySpace, tokens: Any, extra_keys: Iterable[ExtraKey], *, partial_tail: bool
) -> tuple[list[bytes], list[Parts], int]:
    """Digests, parts, and the number of tokens in the partial tail that was added (0 for none)."""
    if not isinstance(partial_tail, bool):
        raise KeyingTypeError(f"partial_tail: got {type(partial_tail).__name__}, wanted bool")
    chunk_size = checked_space(space).chunk_size
    cursor = PartsCursor(PartsIndex(extra_keys))
    packed = pack_tokens(tokens)
    whole = len(packed) // (chunk_size * TOKEN_BYTES) * chunk_size * TOKEN_BYTES
    view = memoryview(packed)
    digests, parts_of = derive_run(space.root, view[:whole], 0, chunk_size, cursor)
    n_tail = (len(packed) - whole) // TOKEN_BYTES if partial_tail else 0
    if n_tail:
        start = whole // TOKEN_BYTES
        parts = cursor.parts(start, start + n_tail)
        digests.append(chunk_digest(digests[-1] if digests else space.root, view[whole:], parts))
        parts_of.append(parts)
    return digests, parts_of, n_tail


def chunk_keys(
    space: KeySpace, tokens: Any, extra_keys: Iterable[ExtraKey] = (), *, partial_tail: bool = False
) -> list[ChunkKey]:
    """The keys of a prompt's chunks, chained from the space's root.

    Args:
        space: what the deployment shares.
        tokens: n ids in [0, 2**32), in any of the containers of `pack_tokens`.
        extra_keys: what tells this request from others with the same tokens; any order.
        partial_tail: also key the tokens after the last full chunk.

    Returns:
        ``n // chunk_size`` keys, and one more for a non-empty tail if it was asked for. No tokens: no keys.

    Raises:
        KeyingError: one of its subclasses, see `keying.errors`.

    Source: docs/spec/key-schema-2.md, "Chunk".
    """
    digests, parts_of, n_tail = _derive(space, tokens, extra_keys, partial_tail=partial_tail)
    keys = make_keys(digests, parts_of, 0, space.chunk_size)
    if n_tail:
        last = keys[-1]
        keys[-1] = last._replace(stop=last.start + n_tail)
    return keys


def chunk_digests(
    space: KeySpace, tokens: Any, extra_keys: Iterable[ExtraKey] = (), *, partial_tail: bool = False
) -> list[bytes]:
    """The digests alone, 32 bytes each; equal to those of `chunk_keys`, which documents arguments and errors."""
    return _derive(space, tokens, extra_keys, partial_tail=partial_tail)[0]


def segment_key(space: KeySpace, tokens: Any, extra_keys: Iterable[ExtraKey] = (), *, start: int = 0) -> ChunkKey:
    """The key of a run of tokens wherever it stands, for position-independent reuse.

    ``start`` is not hashed. The KV of a segment still carries the positions and the context it was computed with, so a
    reader that cannot re-rotate must treat a value stored for another start as a miss.

    Args:
        space: what the deployment shares.
        tokens: the segment's own ids, positions ``[start, start + n)`` of the prompt; not empty.
        extra_keys: of the whole prompt, at their prompt positions.
        start: prompt position of the first token, ``0 <= start`` and ``start + n <= 2**48``.

    Raises:
        KeyingError: an empty segment, or any refusal of `chunk_keys`.

    Source: docs/spec/key-schema-2.md, "Segment".
    """
    checked_space(space)
    checked_int(start, "start", 0, MAX_POSITION)
    cursor = PartsCursor(PartsIndex(extra_keys))
    packed = pack_tokens(tokens)
    n = len(packed) // TOKEN_BYTES
    if not n:
        raise KeyingError("tokens: an empty segment has no key; leave it out")
    checked_int(n, "number of tokens", 1, MAX_U32)
    checked_int(start + n, "start + number of tokens", 1, MAX_POSITION)
    parts = cursor.parts(start, start + n)
    return ChunkKey(_segment_digest(space.root, packed, parts), start, start + n, parts)


def segment_keys(
    space: KeySpace, tokens: Any, ranges: Iterable[tuple[int, int]], extra_keys: Iterable[ExtraKey] = ()
) -> list[ChunkKey]:
    """The keys of a prompt's segments, in one pass: for each range that of `segment_key` for its tokens at its start.

    Args:
        space: what the deployment shares.
        tokens: the prompt's n ids, in any of the containers of `pack_tokens`.
        ranges: prompt positions ``(start, stop)`` of each segment, ``start < stop <= n``, from the left and without
            overlap; there may be tokens between them.
        extra_keys: of the whole prompt, at their prompt positions.

    Returns:
        A key for each range.

    Raises:
        KeyingError: an empty, overlapping, unordered or too far reaching range, or any refusal of `chunk_keys`.

    Source: docs/spec/key-schema-2.md, "Segment".
    """
    root = checked_space(space).root
    cursor = PartsCursor(PartsIndex(extra_keys))
    packed = memoryview(pack_tokens(tokens))
    n_tokens = len(packed) // TOKEN_BYTES
    keys: list[ChunkKey] = []
    free = 0
    for place, (start, stop) in enumerate(_checked_ranges(ranges)):
        if not free <= start < stop <= n_tokens:
            raise KeyingError(
                f"ranges[{place}]: got [{start}, {stop}), wanted start < stop within [{free}, {n_tokens}), which "
                "is in the prompt and after the range before; leave out empty ones"
            )
        free = stop
        parts = cursor.parts(start, stop)
        segment = packed[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        keys.append(ChunkKey(_segment_digest(root, segment, parts), start, stop, parts))
    return keys


def _segment_digest(root: bytes, packed: bytes | memoryview, parts: Parts) -> bytes:
    n_tokens = U32.pack(len(packed) // TOKEN_BYTES)
    return digest(b"".join((DOMAIN_SEGMENT, root, n_tokens, packed, encode_parts(parts))))


def _checked_ranges(ranges: Any) -> Iterator[tuple[int, int]]:
    if not isinstance(ranges, Iterable):
        raise KeyingTypeError(f"ranges: got {type(ranges).__name__}, wanted a (start, stop) for each segment")
    for place, one in enumerate(ranges):
        if not isinstance(one, tuple | list) or len(one) != 2:
            raise KeyingTypeError(f"ranges[{place}]: got {type(one).__name__}, wanted (start, stop)")
        start, stop = (checked_int(end, f"ranges[{place}]", 0, MAX_POSITION) for end in one)
        yield start, stop
