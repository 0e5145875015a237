"""The tunnel: a chunk's full identity as token ids, for servers that key on token ids alone.

A server that was never upgraded drops an unknown field and serves the request without isolation, but it does hash every
token. So the tokens of a full chunk are replaced by values expanded from the chunk's schema-2 key, in which pictures,
adapters, salts and embeddings already are:

    block i   SHA-256(text("xk2/tunnel") || key || u32(i)), i = 0, 1, ...
    values    each block read as eight little-endian u32, each & 0x7fffffff; the first chunk_size of them

Equal keys give equal tokens in every process, and a chunk of 9 tokens or more carries more bits than a key has. From
there on the strength is the server's own hash over them.

Source: docs/spec/v1-formats.md, "Tunnel".
"""

import hashlib
import sys
from array import array
from typing import Final

from compat.errors import CompatError, CompatTypeError
from keying import DIGEST_SIZE

MIN_CHUNK_SIZE: Final = 9
"""Fewest tokens of a chunk that may be tunnelled: 9 x 31 bits hold a 256-bit key, 8 x 31 do not."""

MAX_CHUNK_SIZE: Final = 2**20
"""Most tokens of a chunk that may be tunnelled. The size is the server's word, and this bounds what it can cost."""

_DOMAIN: Final = len(b"xk2/tunnel").to_bytes(4, "little") + b"xk2/tunnel"
_VALUES_PER_BLOCK: Final = 8
_CLEAR_TOP_BIT: Final = bytes(byte & 0x7F for byte in range(256))
_CODE: Final = next(code for code in "IL" if array(code).itemsize == 4)


def tunnel_tokens(key_digest: bytes, chunk_size: int) -> list[int]:
    """The token ids that stand for a chunk on a v1 server.

    Args:
        key_digest: the chunk's schema-2 key, 32 bytes.
        chunk_size: tokens of a chunk, the server's as well as the space's, ``9 <= chunk_size <= 2**20``.

    Returns:
        ``chunk_size`` ids in [0, 2**31).

    Raises:
        CompatError: the key is not 32 bytes, or the chunk size is out of range.
        CompatTypeError: not bytes, or not an int.

    Source: docs/spec/v1-formats.md, "Tunnel".
    """
    if not isinstance(key_digest, bytes) or isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise CompatTypeError(
            f"tunnel: got {type(key_digest).__name__} and {type(chunk_size).__name__}, wanted bytes and an int"
        )
    if len(key_digest) != DIGEST_SIZE:
        raise CompatError(f"key_digest: got {len(key_digest)} bytes, wanted a whole key of {DIGEST_SIZE}")
    if not MIN_CHUNK_SIZE <= chunk_size <= MAX_CHUNK_SIZE:
        raise CompatError(
            f"chunk_size: got {chunk_size}, wanted {MIN_CHUNK_SIZE} <= chunk_size <= {MAX_CHUNK_SIZE}; a smaller chunk "
            "cannot carry a key, so bypass this server"
        )
    start = hashlib.sha256(_DOMAIN + key_digest)
    blocks = bytearray()
    for counter in range(-(-chunk_size // _VALUES_PER_BLOCK)):
        block = start.copy()
        block.update(counter.to_bytes(4, "little"))
        blocks += block.digest()
    blocks[3::4] = blocks[3::4].translate(_CLEAR_TOP_BIT)
    values = array(_CODE)
    values.frombytes(blocks[: 4 * chunk_size])
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
