"""Three generations of v1 multimodal keys, side by side with schema 2."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compat import SpanError, apply_mm_hashes_to_token_ids
from compat.v1 import V1Generation, mp_chunk_hashes, v1_chunk_hashes, v1_token_ids
from keying import KeySpace, LoraAdapter, MultimodalItem, chunk_digests
from tests.compat.golden import GOLDEN

RAW, INT16, SHA31 = V1Generation.RAW, V1Generation.INT16, V1Generation.SHA31
PLACEHOLDER = 151_655
PROMPT = [1, 2, *[PLACEHOLDER] * 6, 3, 4, 5, 6]
X = "a" * 60 + "0001"
X_LOW = "b" * 60 + "0001"  # the same low 16 bits
Y = "c" * 60 + "0002"


def _hashes(identifier: str, generation: V1Generation) -> list[bytes]:
    return v1_chunk_hashes(PROMPT, [MultimodalItem(identifier, 2, 6)], generation=generation, chunk_size=4)


def test_raw_serves_one_picture_for_another() -> None:
    """The fault that started it all, kept as the negative control of every test that says 'no wrong hit'."""
    assert _hashes(X, RAW) == _hashes(Y, RAW) == mp_chunk_hashes(PROMPT, 4)


def test_int16_tells_most_pictures_apart_and_not_those_with_equal_low_bits() -> None:
    """Y is told from X, X_LOW is not."""
    assert not set(_hashes(X, INT16)) & set(_hashes(Y, INT16))
    assert _hashes(X, INT16) == _hashes(X_LOW, INT16)


def test_sha31_tells_pictures_apart() -> None:
    """Also those that int16 confuses; the same picture has the same hashes."""
    assert not set(_hashes(X, SHA31)) & set(_hashes(Y, SHA31))
    assert not set(_hashes(X, SHA31)) & set(_hashes(X_LOW, SHA31))
    assert _hashes(X, SHA31) == _hashes(X, SHA31)


def test_generations_are_three_different_key_spaces_for_pictures_and_one_for_text() -> None:
    """A text-only prompt has one v1 key; a picture has three, none equal."""
    per_generation = [set(_hashes(X, g)) for g in V1Generation]
    assert len(set().union(*per_generation)) == 9
    assert len({tuple(v1_chunk_hashes(PROMPT, generation=g, chunk_size=4)) for g in V1Generation}) == 1


def test_the_captured_prompt_with_a_picture_has_the_releases_hashes() -> None:
    """From placeholder tokens to chunk hashes, the whole way as the release went it."""
    case = GOLDEN["token_hasher_blake3"][-1]
    hashes = v1_chunk_hashes(
        [1, 2, 9, 9, 9, 9, 3, 4], [MultimodalItem("img-A", 2, 4)], generation=SHA31, chunk_size=case["chunk_size"]
    )
    assert case["chunk_hashes"] == [h.hex() for h in hashes]


def test_int16_writes_one_value_over_the_span() -> None:
    """The low 16 bits of the identifier as a hex number, whatever its form."""
    items = [MultimodalItem("0xFFFFABCD", 1, 2), MultimodalItem("7", 4, 99)]
    assert v1_token_ids([9] * 6, items, generation=INT16) == [9, 0xABCD, 0xABCD, 9, 7, 7]


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=30),
    st.lists(st.tuples(st.sampled_from(["a1", "b2", "c3"]), st.integers(0, 40), st.integers(0, 20)), max_size=4),
)
@pytest.mark.filterwarnings("ignore::compat.ExtraKeysDeprecationWarning")
def test_sha31_tokens_are_the_producers(tokens: list[int], spans: list[tuple[str, int, int]]) -> None:
    """What the deprecated producer writes into a tensor is what this generation hashes."""
    items = {(i, o): MultimodalItem(i, o, n) for i, o, n in spans}.values()
    tensor = torch.tensor(tokens, dtype=torch.int64)
    apply_mm_hashes_to_token_ids(tensor, [i.identifier for i in items], list(items))
    assert tensor.tolist() == v1_token_ids(tokens, items, generation=SHA31)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([PLACEHOLDER, 1, 2]), min_size=4, max_size=32),
    st.lists(st.sampled_from([("a1", 0, 3), ("b2", 2, 9), ("c3", 12, 4)]), unique=True, max_size=3),
    st.sampled_from([1, 4]),
)
def test_no_schema_2_key_is_a_v1_hash(tokens: list[int], spans: list[tuple[str, int, int]], chunk_size: int) -> None:
    """Old entries miss: schema 2 never meets raw, int16 or sha31, with or without items and adapters."""
    items = [MultimodalItem(*span) for span in spans]
    space = KeySpace("m", chunk_size=chunk_size, kv_dtype="bfloat16")
    v1 = {h for g in V1Generation for h in v1_chunk_hashes(tokens, items, generation=g, chunk_size=chunk_size)}
    v2 = {*chunk_digests(space, tokens, items), *chunk_digests(space, tokens, [*items, LoraAdapter("a")])}
    assert not v1 & v2
    assert v1
    assert v2


def test_an_identifier_that_is_no_hex_number_has_no_int16_key() -> None:
    """That producer raised on it; raw and sha31 work on any text."""
    item = MultimodalItem("img-A", 0, 2)
    with pytest.raises(SpanError, match="hex"):
        v1_token_ids([9, 9], [item], generation=INT16)
    assert v1_token_ids([9, 9], [item], generation=RAW) == [9, 9]
    assert len(v1_token_ids([9, 9], [item], generation=SHA31)) == 2


@pytest.mark.parametrize("generation", ["sha32", "", None, 2])
def test_an_unknown_generation_is_refused(generation: Any) -> None:
    """There were three."""
    with pytest.raises(ValueError, match="V1Generation"):
        v1_token_ids([1], generation=generation)
