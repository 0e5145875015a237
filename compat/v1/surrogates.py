"""Surrogate values: what the sha31 generation writes over the placeholder tokens of a multimodal item.

    seed      SHA-256(utf8(identifier))
    block c   SHA-256(seed || u64be(c)), c = 0, 1, ...
    value i   word i % 8 (u32, big-endian) of block i // 8, its top bit cleared

So a value depends on identifier and position alone, and a shorter span has a prefix of a longer one's values. There is
no domain tag: the values share their 31-bit space with real token ids, which is one reason why schema 2 exists.

Source: docs/spec/v1-formats.md, "Surrogate values"; LMCache 0.5.6.
"""

import hashlib
import sys
from array import array
from functools import lru_cache
from typing import Final

SURROGATE_MAX: Final = 2**31 - 1
"""Largest surrogate value; a container for surrogates must hold it exactly."""

VALUES_PER_BLOCK: Final = 8

_CACHED_SPANS: Final = 256
_CODE: Final = next(code for code in "il" if array(code).itemsize == 4)
_CLEAR_TOP_BIT: Final = bytes(byte & 0x7F for byte in range(256))


def surrogate_values(identifier: str, length: int) -> "array[int]":
    """The first ``length`` surrogate values of an item, as 32-bit integers. The array is the caller's own.

    Args:
        identifier: identity of the item, any text that has a UTF-8 form.
        length: how many, ``0 <= length``.

    Raises:
        UnicodeEncodeError: the identifier has a lone surrogate character.
    """
    return shared_surrogate_values(identifier, length)[:]


@lru_cache(maxsize=_CACHED_SPANS)
def shared_surrogate_values(identifier: str, length: int) -> "array[int]":
    """As `surrogate_values`, from a cache of 256 spans: for callers that only read. 4 bytes a value."""
    start = hashlib.sha256(hashlib.sha256(identifier.encode()).digest())
    blocks = bytearray()
    for counter in range(-(-length // VALUES_PER_BLOCK)):
        block = start.copy()
        block.update(counter.to_bytes(8, "big"))
        blocks += block.digest()
    del blocks[4 * length :]
    blocks[0::4] = blocks[0::4].translate(_CLEAR_TOP_BIT)
    values = array(_CODE)
    values.frombytes(blocks)
    if sys.byteorder == "little":
        values.byteswap()
    return values
