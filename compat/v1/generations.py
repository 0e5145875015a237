"""The three generations of v1 multimodal keys: what a v1 producer put where the placeholder tokens were.

A v1 key is a hash over token ids alone, so the only way to key a picture was to change its tokens:

    raw     placeholders as the engine wrote them       every picture has the key of every other
    int16   one value for a span, the low 16 bits of    pictures whose identifiers end in the same four hex digits
            the identifier read as a hex number         share a key
    sha31   a 31-bit value for each position            pictures are told apart; adapters and salts still are not

Source: docs/spec/v1-formats.md, "Generations".
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from compat.errors import SpanError
from compat.v1.chunk_hashes import mp_chunk_hashes
from compat.v1.surrogates import shared_surrogate_values
from keying import MultimodalItem, pack_tokens, unpack_tokens

INT16_MASK = 0xFFFF


class V1Generation(StrEnum):
    """How a v1 producer keyed multimodal items."""

    RAW = "raw"
    """Placeholders untouched: LMCache's MP mode before it knew of pictures, and vLLM's in-tree MP connector."""
    INT16 = "int16"
    """One 16-bit value for a span: vLLM's in-tree in-process connector, and LMCache before 31-bit surrogates."""
    SHA31 = "sha31"
    """One 31-bit value for a position: LMCache 0.5.6."""


def v1_token_ids(tokens: Any, items: Iterable[MultimodalItem] = (), *, generation: V1Generation) -> list[int]:
    """The token ids that a v1 producer would have hashed for a request.

    A span that starts past the end is skipped, one that reaches past it is cut, and where two overlap the later wins.

    Args:
        tokens: the prompt with its placeholder tokens, in any container that `keying.chunk_keys` takes.
        items: the request's multimodal items, in the engine's order.
        generation: which producer.

    Returns:
        As many ids as there are tokens.

    Raises:
        keying.TokenError: an id is out of range.
        SpanError: int16 and an identifier that is no hex number; that producer fails on it too.
    """
    ids = list(unpack_tokens(pack_tokens(tokens)))
    which = V1Generation(generation)
    if which is V1Generation.RAW:
        return ids
    for item in items:
        stop = min(item.offset + item.length, len(ids))
        if stop <= item.offset:
            continue
        if which is V1Generation.INT16:
            ids[item.offset : stop] = [_int16(item.identifier)] * (stop - item.offset)
        else:
            ids[item.offset : stop] = shared_surrogate_values(item.identifier, stop - item.offset)
    return ids


def v1_chunk_hashes(
    tokens: Any, items: Iterable[MultimodalItem] = (), *, generation: V1Generation, chunk_size: int
) -> list[bytes]:
    """The chunk hashes that an LMCache MP server would have given a request from a producer of that generation.

    Args:
        tokens: the prompt with its placeholder tokens.
        items: the request's multimodal items, in the engine's order.
        generation: which producer.
        chunk_size: tokens of a chunk, at least 1.

    Returns:
        One 32-byte digest for each complete chunk.

    Raises:
        keying.TokenError: an id is out of range.
        CompatError: ``chunk_size`` is less than 1, or as `v1_token_ids`.
    """
    return mp_chunk_hashes(v1_token_ids(tokens, items, generation=generation), chunk_size)


def _int16(identifier: str) -> int:
    try:
        return int(identifier, 16) & INT16_MASK
    except ValueError:
        raise SpanError(
            "identifier: is no hex number, so an int16 producer fails on the request; it has no int16 key"
        ) from None
