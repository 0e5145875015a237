"""The chunk hashes of LMCache 0.5.x: what a v1 key is made of.

Two chains over token ids alone. Neither has a domain tag, a version or a length in front, and neither knows of adapters
or salts.

    MP server     h_0 = NONE_HASH = blake3(i64be(0) || u32be(0))
                  h_i = blake3(h_{i-1} || u32be(token) ...)                    32 bytes; complete chunks only
    in process    h_i = first 8 bytes, big-endian, of
                        SHA-256(canonical CBOR of [h_{i-1}, [token ...], [extra key ...]])
                  h_0 = 0 where vLLM is absent, else `vllm_none_hash(seed)`    u64; partial tail included by default

Source: docs/spec/v1-formats.md, "Chunk hashes"; LMCache 0.5.6.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

import cbor2
from blake3 import blake3

from compat.errors import CompatError
from keying import pack_tokens, unpack_tokens

NONE_HASH: Final = blake3(bytes(12)).digest()
"""Parent of the first chunk in the MP server's chain; the same for every model, chunk size and tenant."""

VLLM_NONE_HASH_SEED: Final = "vllm-none-hash"
"""Seed of vLLM 0.33 for cryptographic hashes where ``PYTHONHASHSEED`` is not set."""

_CODE: Final = next(code for code in "IL" if array(code).itemsize == 4)


def mp_chunk_hashes(tokens: Any, chunk_size: int, *, parent: bytes = NONE_HASH) -> list[bytes]:
    """Chunk hashes of the multi-process server, blake3 chain.

    Args:
        tokens: n token ids in [0, 2**32), in any container that `keying.chunk_keys` takes.
        chunk_size: tokens of a chunk, at least 1; tokens past the last complete chunk are not hashed.
        parent: hash of the chunk before the first.

    Returns:
        ``n // chunk_size`` digests of 32 bytes.

    Raises:
        keying.TokenError: an id is out of range (LMCache's server then sends no reply at all).
        CompatError: ``chunk_size`` is less than 1.
    """
    packed = _big_endian(tokens)
    step = 4 * _checked(chunk_size)
    hashes: list[bytes] = []
    for start in range(0, len(packed) - step + 1, step):
        parent = blake3(parent + packed[start : start + step]).digest()
        hashes.append(parent)
    return hashes


def in_process_chunk_hash(tokens: Any, parent: int = 0, extra_keys: Sequence[Any] | None = None) -> int:
    """Hash of one chunk in LMCache's in-process token database, algorithm ``sha256_cbor``.

    The released code never passes extra keys, though its function takes them; None and none at all are one.

    Args:
        tokens: the chunk's ids.
        parent: hash of the chunk before, or the none-hash, in [0, 2**64).
        extra_keys: anything that CBOR encodes canonically.

    Returns:
        An integer in [0, 2**64).

    Raises:
        keying.TokenError: an id is out of range.
    """
    return _in_process(unpack_tokens(pack_tokens(tokens)), parent, extra_keys)


def in_process_chunk_hashes(
    tokens: Any, chunk_size: int, *, none_hash: int = 0, save_unfull_chunk: bool = True
) -> list[int]:
    """Chunk hashes of LMCache's in-process chunked token database, algorithm ``sha256_cbor``.

    Args:
        tokens: n token ids.
        chunk_size: tokens of a chunk, at least 1.
        none_hash: parent of the first chunk.
        save_unfull_chunk: whether the partial tail has a hash too; LMCache's default.

    Returns:
        One integer in [0, 2**64) for each chunk.

    Raises:
        keying.TokenError: an id is out of range.
        CompatError: ``chunk_size`` is less than 1.
    """
    ids = unpack_tokens(pack_tokens(tokens))
    size = _checked(chunk_size)
    stop = len(ids) if save_unfull_chunk else len(ids) - len(ids) % size
    hashes: list[int] = []
    parent = none_hash
    for start in range(0, stop, size):
        parent = _in_process(ids[start : start + size], parent, None)
        hashes.append(parent)
    return hashes


def vllm_none_hash(seed: str = VLLM_NONE_HASH_SEED) -> int:
    """The none-hash that LMCache takes from vLLM 0.33 for ``sha256_cbor``.

    Args:
        seed: the value of ``PYTHONHASHSEED``, or vLLM's own constant where that is not set.
    """
    return _first_u64(cbor2.dumps(seed, canonical=True))


def _in_process(ids: tuple[int, ...], parent: int, extra_keys: Sequence[Any] | None) -> int:
    return _first_u64(cbor2.dumps((parent, ids, tuple(extra_keys or ())), canonical=True))


def _first_u64(encoded: bytes) -> int:
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big")


def _big_endian(tokens: Any) -> bytes:
    packed = array(_CODE, pack_tokens(tokens))
    packed.byteswap()  # packed is little-endian whatever the machine: the swap of bytes is the same
    return packed.tobytes()


def _checked(chunk_size: int) -> int:
    if chunk_size < 1:
        raise CompatError(f"chunk_size: got {chunk_size}, wanted at least 1")
    return chunk_size
