"""The two v1 chunk-hash chains, exact to the release."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compat import CompatError
from compat.v1 import (
    NONE_HASH,
    in_process_chunk_hash,
    in_process_chunk_hashes,
    mp_chunk_hashes,
    vllm_none_hash,
)
from keying import TokenError, TokenTypeError
from tests.compat.golden import GOLDEN

tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize(
    "case", GOLDEN["token_hasher_blake3"], ids=lambda c: f"{c['chunk_size']}x{len(c['token_ids'])}"
)
def test_the_mp_chain_is_the_releases(case: dict[str, Any]) -> None:
    """None-hash and every chunk hash, complete chunks only."""
    assert case["none_hash"] == NONE_HASH.hex()
    assert case["chunk_hashes"] == [h.hex() for h in mp_chunk_hashes(case["token_ids"], case["chunk_size"])]


def test_the_in_process_fold_is_the_releases() -> None:
    """Partial tail included; with vLLM's none-hash as without."""
    plain, with_vllm = GOLDEN["token_database"]
    assert plain["hashes_uint64"] == in_process_chunk_hashes(plain["tokens"], plain["chunk_size"])
    assert plain["hashes_uint64"][:2] == in_process_chunk_hashes(
        plain["tokens"], plain["chunk_size"], save_unfull_chunk=False
    )
    assert with_vllm["none_hash"] == vllm_none_hash("0")
    assert with_vllm["hashes_uint64"] == in_process_chunk_hashes(
        with_vllm["tokens"], with_vllm["chunk_size"], none_hash=vllm_none_hash("0")
    )


@pytest.mark.parametrize(
    ("name", "extra_keys"),
    [("None", None), ("[]", []), ("[['img-A',0]]", [["img-A", 0]]), ("['lora-1']", ["lora-1"])],
)
def test_extra_keys_enter_the_fold_as_in_the_release(name: str, extra_keys: list[Any] | None) -> None:
    """The parameter that the release has and never uses."""
    expected = GOLDEN["token_database_extra_keys"][f"extra={name}"]
    assert expected == in_process_chunk_hash([1, 2, 3, 4], extra_keys=extra_keys)


def test_vllms_own_seed_is_the_default() -> None:
    """Without PYTHONHASHSEED the none-hash is a constant, and not that of seed 0."""
    assert vllm_none_hash("vllm-none-hash") == vllm_none_hash()
    assert vllm_none_hash() != vllm_none_hash("0")


@settings(max_examples=60)
@given(tokens_of, st.integers(1, 9), st.integers(0, 40))
def test_a_prefix_has_a_prefix_of_the_hashes(tokens: list[int], chunk_size: int, cut: int) -> None:
    """Both chains depend on what came before and on nothing else; a parent continues the chain."""
    whole = mp_chunk_hashes(tokens, chunk_size)
    part = mp_chunk_hashes(tokens[:cut], chunk_size)
    assert whole[: len(part)] == part
    parent = part[-1] if part else NONE_HASH
    assert whole[len(part) :] == mp_chunk_hashes(tokens[len(part) * chunk_size :], chunk_size, parent=parent)
    folded = in_process_chunk_hashes(tokens, chunk_size, save_unfull_chunk=False)
    assert folded == in_process_chunk_hashes(tokens, chunk_size)[: len(folded)]
    assert len(whole) == len(folded) == len(tokens) // chunk_size


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor, lambda t: np.array(t, dtype=np.int32)])
def test_containers_agree(make: Any) -> None:
    """A prompt has one chain, whatever holds it."""
    tokens = [1, 70_000, 3, 4, 5, 6, 7, 8]
    assert mp_chunk_hashes(tokens, 4) == mp_chunk_hashes(make(tokens), 4)
    assert in_process_chunk_hashes(tokens, 4) == in_process_chunk_hashes(make(tokens), 4)


@pytest.mark.parametrize("bad", [[-1, 2], [2**32, 2]])
def test_ids_that_the_release_fails_on_are_refused(bad: list[int]) -> None:
    """Its server then sends no reply; here it is a typed error."""
    for chain in (mp_chunk_hashes, in_process_chunk_hashes):
        with pytest.raises(TokenError, match="out of range"):
            chain(bad, 2)
    with pytest.raises(TokenTypeError):
        in_process_chunk_hash([True])


@pytest.mark.parametrize("chunk_size", [0, -4])
def test_a_chunk_holds_a_token(chunk_size: int) -> None:
    """A chunk size below 1 is refused."""
    for chain in (mp_chunk_hashes, in_process_chunk_hashes):
        with pytest.raises(CompatError, match="chunk_size"):
            chain([1, 2], chunk_size)
