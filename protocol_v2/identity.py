"""Spaces, extra keys and tokens: between their form on the wire and `keying`'s types.

Whatever comes in is made a `keying` value again, whose constructor checks every bound, so the server trusts no peer's
validation. Keys have one derivation, `keying.chunk_keys`: a request by digests and one by tokens and extra keys name
the same chunks. Source: docs/spec/wire-2.md, "Keys".
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from keying import (
    DIGEST_SIZE,
    CacheSalt,
    ChunkKey,
    KeyingError,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    PromptEmbeds,
    Tag,
    chunk_keys,
    pack_tokens,
)
from protocol_v2.codes import ErrorCode, RefusalCode
from protocol_v2.errors import HandshakeError, LocalProtocolError, RemoteProtocolError
from protocol_v2.hello import MAX_NAMES, SpaceFields
from protocol_v2.wire_keys import (
    MAX_CHUNKS,
    MAX_TOKENS,
    TOKEN_BYTES,
    Keys,
    WireAdapter,
    WireEmbeds,
    WireExtraKey,
    WireItem,
    WireSalt,
    WireTag,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from keying import ExtraKey

_U32: Final = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


def space_to_wire(space: KeySpace) -> SpaceFields:
    """A space as a hello says it.

    Raises:
        LocalProtocolError: more attributes than a hello can carry.
    """
    if len(space.attributes) > MAX_NAMES:
        raise LocalProtocolError(f"space.attributes: got {len(space.attributes)}, wanted at most {MAX_NAMES}")
    return SpaceFields(
        model=space.model,
        model_revision=space.model_revision,
        kv_dtype=space.kv_dtype,
        chunk_size=space.chunk_size,
        kv_layout=space.kv_layout,
        attributes=dict(space.attributes),
    )


def space_from_wire(fields: SpaceFields) -> KeySpace:
    """The space that a hello means, every bound checked again.

    Raises:
        HandshakeError: `SPACE_INVALID`, with the field.
    """
    try:
        return KeySpace(
            fields.model,
            model_revision=fields.model_revision,
            kv_dtype=fields.kv_dtype,
            chunk_size=fields.chunk_size,
            kv_layout=fields.kv_layout,
            attributes=fields.attributes,
        )
    except KeyingError as error:
        name = str(error).partition(":")[0]
        raise HandshakeError(RefusalCode.SPACE_INVALID, str(error), field=f"space.{name}") from None


def extra_key_to_wire(extra_key: ExtraKey) -> WireExtraKey:
    """An extra key as a request carries it.

    Raises:
        LocalProtocolError: none of the five types.
    """
    match extra_key:
        case MultimodalItem():
            return WireItem(extra_key.identifier, extra_key.offset, extra_key.length)
        case LoraAdapter():
            return WireAdapter(extra_key.name, extra_key.revision, extra_key.start)
        case CacheSalt():
            return WireSalt(extra_key.value)
        case PromptEmbeds():
            return WireEmbeds(extra_key.offset, extra_key.rows, extra_key.row_bytes, extra_key.dtype)
        case Tag():
            return WireTag(extra_key.name, extra_key.value, extra_key.start)
    raise LocalProtocolError(f"extra key: got {type(extra_key).__name__}, wanted one of keying's five types")


def extra_key_from_wire(part: WireExtraKey) -> ExtraKey:
    """The extra key that a request means, every bound checked again.

    Raises:
        RemoteProtocolError: `INVALID_IDENTITY`.
    """
    try:
        match part:
            case WireItem():
                return MultimodalItem(part.identifier, part.offset, part.length)
            case WireAdapter():
                return LoraAdapter(part.name, part.revision, part.start)
            case WireSalt():
                return CacheSalt(part.value)
            case WireEmbeds():
                return PromptEmbeds(part.offset, part.rows, part.row_bytes, part.dtype)
            case WireTag():
                return Tag(part.name, part.value, part.start)
    except KeyingError as error:
        raise RemoteProtocolError(ErrorCode.INVALID_IDENTITY, f"extra key: {error}") from None


def keys_of_digests(keys: Iterable[ChunkKey | bytes]) -> Keys:
    """Keys as packed digests.

    Args:
        keys: n chunk keys or 32-byte digests, of the chunks of one prompt from the first on.

    Raises:
        LocalProtocolError: a digest that is not 32 bytes, or more than 65,536.
    """
    digests = [key if isinstance(key, bytes) else key.digest for key in keys]
    if len(digests) > MAX_CHUNKS:
        raise LocalProtocolError(f"keys: got {len(digests)}, wanted at most {MAX_CHUNKS}")
    for place, digest in enumerate(digests):
        if len(digest) != DIGEST_SIZE:
            raise LocalProtocolError(f"keys[{place}]: got {len(digest)} bytes, wanted a digest of {DIGEST_SIZE}")
    return Keys(digests=b"".join(digests))


def keys_of_tokens(tokens: Any, extra_keys: Iterable[ExtraKey] = (), *, partial_tail: bool = False) -> Keys:
    """Keys as tokens and extra keys, for a caller that does not derive.

    Args:
        tokens: any container that `keying` takes, at most 2,097,152 ids; or bytes, packed little-endian u32 already.
        extra_keys: what else the keys depend on.
        partial_tail: the tail that fills no chunk is keyed too.

    Raises:
        KeyingError: tokens that `keying` refuses.
        LocalProtocolError: too many tokens.
    """
    packed = bytes(tokens) if isinstance(tokens, bytes | bytearray | memoryview) else pack_tokens(tokens)
    if len(packed) > MAX_TOKENS * TOKEN_BYTES or len(packed) % TOKEN_BYTES:
        raise LocalProtocolError(
            f"tokens: got {len(packed)} bytes, wanted at most {MAX_TOKENS} packed u32; derive here and send digests"
        )
    return Keys(
        tokens=packed,
        extra_keys=tuple(extra_key_to_wire(one) for one in extra_keys),
        partial_tail=partial_tail,
    )


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks that a keyed request names.

    Args:
        digests: their keys, 32 bytes each.
        keys: the same with places and parts, where tokens came; None where digests came.
        chunk_size: of the space.
    """

    digests: tuple[bytes, ...]
    keys: tuple[ChunkKey, ...] | None
    chunk_size: int


def resolve_keys(keys: Keys, space: KeySpace | None, *, max_chunks: int = MAX_CHUNKS) -> Chunks:
    """The chunks that a request's keys name, in the session's space.

    Args:
        keys: as received.
        space: of the session.
        max_chunks: the server's limit.

    Raises:
        RemoteProtocolError: `NO_SPACE`, `TOO_LARGE`, or `INVALID_IDENTITY`.
    """
    if space is None:
        raise RemoteProtocolError(
            ErrorCode.NO_SPACE, "keys: the session was opened without a space; say hello with the space they belong to"
        )
    _check_count(keys, space, max_chunks)
    if keys.digests is not None:
        return Chunks(_cut(keys.digests), None, space.chunk_size)
    try:
        derived = chunk_keys(
            space,
            _unpacked(keys.tokens or b""),
            [extra_key_from_wire(part) for part in keys.extra_keys],
            partial_tail=keys.partial_tail,
        )
    except KeyingError as error:
        raise RemoteProtocolError(ErrorCode.INVALID_IDENTITY, f"keys: {error}") from None
    return Chunks(tuple(key.digest for key in derived), tuple(derived), space.chunk_size)


def check_places(chunks: Chunks, first: int, starts: Sequence[int], n_tokens: Sequence[int]) -> None:
    """Check a store's places against its keys: the range exists, and where tokens came the places are theirs.

    Raises:
        RemoteProtocolError: `INVALID_IDENTITY`.
    """
    stop = first + len(starts)
    if stop > len(chunks.digests):
        raise RemoteProtocolError(
            ErrorCode.INVALID_IDENTITY, f"chunks: got [{first}, {stop}), wanted a range of {len(chunks.digests)} keys"
        )
    for place, (start, length) in enumerate(zip(starts, n_tokens, strict=True)):
        if length > chunks.chunk_size:
            raise RemoteProtocolError(
                ErrorCode.INVALID_IDENTITY,
                f"n_tokens[{place}]: got {length}, wanted at most the space's chunk size {chunks.chunk_size}",
            )
        if chunks.keys is not None:
            key = chunks.keys[first + place]
            if (key.start, key.stop - key.start) != (start, length):
                raise RemoteProtocolError(
                    ErrorCode.INVALID_IDENTITY,
                    f"chunk {first + place}: got start {start} and {length} tokens, "
                    f"wanted start {key.start} and {key.stop - key.start}",
                )


def _check_count(keys: Keys, space: KeySpace, max_chunks: int) -> None:
    """Before any work: how many chunks will there be?"""
    if keys.digests is not None:
        count = len(keys.digests) // DIGEST_SIZE
    else:
        n_tokens = len(keys.tokens or b"") // TOKEN_BYTES
        count = (n_tokens + (space.chunk_size - 1 if keys.partial_tail else 0)) // space.chunk_size
    if count > max_chunks:
        raise RemoteProtocolError(ErrorCode.TOO_LARGE, f"keys: got {count} chunks, wanted at most {max_chunks}")


def _cut(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[i : i + DIGEST_SIZE] for i in range(0, len(packed), DIGEST_SIZE))


def _unpacked(packed: bytes) -> array[int]:
    """Packed tokens in the container that `keying` packs again fastest."""
    tokens = array(_U32)
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
