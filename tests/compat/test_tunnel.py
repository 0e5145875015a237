"""The tunnel: a schema-2 key as token ids, byte-exact, and only where a chunk can carry a key."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat import CompatError, CompatTypeError
from compat.tunnel import MAX_CHUNK_SIZE, MIN_CHUNK_SIZE, tunnel_tokens
from compat.v1 import V1Generation, mp_chunk_hashes, v1_chunk_hashes
from keying import CacheSalt, KeySpace, LoraAdapter, MultimodalItem, chunk_digests

VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "key-schema-2.json").read_text(encoding="utf-8"))["tunnel"]
digests = st.binary(min_size=32, max_size=32)


def test_the_shared_vector() -> None:
    """Values of a key of the vectors, for a size that ends inside a block."""
    assert VECTOR["values"] == tunnel_tokens(bytes.fromhex(VECTOR["key"]), VECTOR["chunk_size"])


@settings(max_examples=50)
@given(digests, st.integers(MIN_CHUNK_SIZE, 70))
def test_the_values_are_the_definitions(key: bytes, chunk_size: int) -> None:
    """Written down once more, a value at a time; every one a token id that LMCache takes."""
    expected = []
    for i in range(chunk_size):
        block = hashlib.sha256(b"\x0a\0\0\0xk2/tunnel" + key + (i // 8).to_bytes(4, "little")).digest()
        expected.append(int.from_bytes(block[i % 8 * 4 : i % 8 * 4 + 4], "little") % 2**31)
    assert expected == tunnel_tokens(key, chunk_size)


@settings(max_examples=50)
@given(digests, digests)
def test_two_keys_share_their_tokens_only_if_they_are_one(a: bytes, b: bytes) -> None:
    """Nine tokens tell any two keys apart."""
    assert (a == b) == (tunnel_tokens(a, 9) == tunnel_tokens(b, 9))


def test_requests_that_share_tokens_are_kept_apart_by_a_v1_server() -> None:
    """Its chunk hashes differ with picture, adapter and salt; untunnelled they are all one (negative control)."""
    tokens = [7] * 32
    space = KeySpace("m", chunk_size=16, kv_dtype="bfloat16")
    identities: list[list[Any]] = [
        [],
        [MultimodalItem("x", 0, 4)],
        [MultimodalItem("y", 0, 4)],
        [LoraAdapter("a")],
        [CacheSalt("s2/x@y")],
    ]
    untunnelled = set()
    hashes = [mp_chunk_hashes(tokens, 16)]
    for extra in identities:
        items = [key for key in extra if isinstance(key, MultimodalItem)]
        untunnelled.add(tuple(v1_chunk_hashes(tokens, items, generation=V1Generation.RAW, chunk_size=16)))
        keys = chunk_digests(space, tokens, extra)
        hashes.append(mp_chunk_hashes([t for key in keys for t in tunnel_tokens(key, 16)], 16))
    assert len({h for chunk in hashes for h in chunk}) == 2 * len(hashes)
    assert {tuple(hashes[0])} == untunnelled


@pytest.mark.parametrize("chunk_size", [-1, 0, 8, MAX_CHUNK_SIZE + 1])
def test_a_chunk_that_cannot_carry_a_key_is_refused(chunk_size: int) -> None:
    """Eight tokens hold 248 bits; and a server's word for a chunk size bounds the work that it causes."""
    with pytest.raises(CompatError, match="chunk_size"):
        tunnel_tokens(bytes(32), chunk_size)


@pytest.mark.parametrize("n_bytes", [0, 8, 31, 33])
def test_a_shortened_key_is_refused(n_bytes: int) -> None:
    """Keys are never truncated, here neither."""
    with pytest.raises(CompatError, match="wanted a whole key"):
        tunnel_tokens(bytes(n_bytes), 16)


@pytest.mark.parametrize(("key", "chunk_size"), [("0" * 32, 16), (bytes(32), True), (bytes(32), 16.0), (None, 16)])
def test_other_types_are_refused(key: Any, chunk_size: Any) -> None:
    """A hex string is not a digest, and True is not 1."""
    with pytest.raises(CompatTypeError, match="wanted bytes and an int"):
        tunnel_tokens(key, chunk_size)
