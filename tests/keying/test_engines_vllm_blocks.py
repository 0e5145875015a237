"""The tuples that vLLM puts on its blocks, from our extra keys: equal to those of the released 0.33."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from keying import CacheSalt, ExtraKey, ExtraKeyError, KeyingError, LoraAdapter, MultimodalItem, PromptEmbeds, Tag
from keying.engines import from_vllm, to_vllm_event_extra_keys, to_vllm_extra_keys
from tests.keying.engine_samples import revision_of, vllm_feature, vllm_lora, vllm_request

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "vllm-0.33-blocks.json").read_text()
)["cases"]


def nested(value: Any) -> Any:
    """JSON arrays as the tuples that they stand for."""
    return tuple(nested(one) for one in value) if isinstance(value, list) else value


def request_of(case: dict[str, Any]) -> Any:
    """The request behind a case."""
    name, number, path = case["lora"] or (None, 0, None)
    return vllm_request(
        all_token_ids=case["tokens"],
        mm_features=[vllm_feature(*image) for image in case["images"]],
        cache_salt=case["cache_salt"],
        lora_request=name and vllm_lora(name, path, number),
    )


@pytest.mark.parametrize("block_size", ["16", "256"])
@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_blocks_are_those_of_the_release(case: dict[str, Any], block_size: str) -> None:
    """All 11 requests at both block sizes, in the tagged form and in the untagged one of events."""
    inputs = from_vllm(request_of(case), adapter_revision=revision_of)
    blocks = to_vllm_extra_keys(
        inputs.extra_keys,
        n_tokens=len(inputs.tokens),
        block_size=int(block_size),
        lora_path=case["lora"][2] if case["lora"] else None,
    )
    expected = case["blocks"][block_size]
    assert [nested(block["extra_keys"]) for block in expected] == blocks
    assert [nested(block["event_extra_keys"]) for block in expected] == to_vllm_event_extra_keys(blocks)


def test_the_vectors_cover_what_they_should() -> None:
    """Eleven cases, with blocks of every kind among them."""
    kinds = {one[0] for case in GOLDEN for block in case["blocks"]["16"] for one in block["extra_keys"] or ()}
    assert (11, {"lora", "mm", "cache_salt"}) == (len(GOLDEN), kinds)


def test_rows_are_on_every_block_and_behind_the_prompt_empty() -> None:
    """A whole prompt of embeddings: the digest of each block's rows, and of nothing where tokens are generated."""
    rows = bytes(range(48))
    keys = [PromptEmbeds(0, rows[:16], 8, "float32"), PromptEmbeds(2, rows[16:], 8, "float32")]
    blocks = to_vllm_extra_keys(keys, n_tokens=12, block_size=4)
    parts = [rows[:32], rows[32:], b""]
    assert [(("prompt_embeds", hashlib.sha256(part).digest()),) for part in parts] == blocks
    assert [(hashlib.sha256(part).digest(),) for part in parts] == to_vllm_event_extra_keys(blocks)


def test_the_order_within_a_block_is_vllms() -> None:
    """Adapter, items by offset, salt, rows; whatever order they come in."""
    keys: list[ExtraKey] = [
        PromptEmbeds(0, bytes(32), 8, "float32"),
        CacheSalt("s"),
        MultimodalItem("late", 2, 2),
        MultimodalItem("early", 0, 1),
        LoraAdapter("a", "sha256:x"),
    ]
    (block,) = to_vllm_extra_keys(keys, n_tokens=4, block_size=4, lora_path="/a")
    assert block is not None
    assert [("lora", "a", "/a"), ("mm", "early", 0), ("mm", "late", 2), ("cache_salt", "s")] == list(block[:4])
    assert "prompt_embeds" == block[4][0]


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ([Tag("t", b"")], None),
        ([LoraAdapter("a"), LoraAdapter("b")], "/a"),
        ([LoraAdapter("a", start=4)], "/a"),
        ([LoraAdapter("a")], None),
        ([LoraAdapter("a")], ""),
        ([PromptEmbeds(2, bytes(8), 8, "float32")], None),
        ([PromptEmbeds(0, bytes(8), 8, "float32"), PromptEmbeds(2, bytes(8), 8, "float32")], None),
        ([CacheSalt("a"), CacheSalt("b")], None),
        (["a"], None),
    ],
)
def test_what_vllm_cannot_hold_is_refused(keys: list[Any], path: str | None) -> None:
    """Nothing is left out of a block in silence: that would be a weaker identity under vLLM's name."""
    with pytest.raises(ExtraKeyError):
        to_vllm_extra_keys(keys, n_tokens=8, block_size=4, lora_path=path)


@pytest.mark.parametrize(("n_tokens", "block_size"), [(-1, 4), (8, 0), (8.0, 4), (8, True)])
def test_sizes_are_integers_in_bounds(n_tokens: Any, block_size: Any) -> None:
    """A count below 0 or a block of no tokens is refused."""
    with pytest.raises(KeyingError):
        to_vllm_extra_keys([], n_tokens=n_tokens, block_size=block_size)
    assert [None, None] == to_vllm_extra_keys([], n_tokens=11, block_size=4)
