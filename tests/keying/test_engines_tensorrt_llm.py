"""TensorRT-LLM requests: runs become one range, id 0 is an adapter, and incomplete layouts are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keying import CacheSalt, LoraAdapter, MultimodalItem, PromptEmbeds, Tag, UncacheableRequest
from keying.engines import EngineInputs, UncacheableReason, from_tensorrt_llm, from_vllm
from tests.keying.engine_samples import (
    HASH_WORDS,
    digests,
    refused,
    revision_of,
    trt_request,
    vllm_feature,
    vllm_request,
    without,
)

IDENTIFIER = "0102030405060708ffffffff00000000212223242526272831323334" + "80000000"
OTHER_WORDS = (*HASH_WORDS[:7], 5)
FLAT = {
    "multimodal_item_run_cu_offsets": [0, 2],
    "multimodal_run_positions": [1, 5],
    "multimodal_run_lengths": [2, 3],
}


def plain(words: Any = HASH_WORDS, position: Any = 5, length: Any = 4, **fields: Any) -> Any:
    """A request with one item at one place, in the oldest layout."""
    return trt_request(
        multimodal_hashes=[list(words)], multimodal_positions=[position], multimodal_lengths=[length], **fields
    )


def runs(by_item: Any, words: Any = HASH_WORDS, **fields: Any) -> Any:
    """A request in the newest layout, which has neither positions nor lengths."""
    request = trt_request(multimodal_hashes=[list(words)], multimodal_item_runs=by_item, **fields)
    return without(request, "multimodal_positions", "multimodal_lengths")


def with_adapter(task: Any = 7, path: str | None = "/adapters/sql", **fields: Any) -> EngineInputs:
    """Inputs of a request with an adapter."""
    return from_tensorrt_llm(trt_request(lora_task_id=task, py_lora_path=path, **fields), adapter_revision=revision_of)


def test_a_text_request_is_its_tokens() -> None:
    """Beam 0, prompt and output; and the same keys that vLLM's request of these tokens has."""
    inputs = from_tensorrt_llm(trt_request())
    assert tuple(range(100, 116)) == inputs.tokens
    assert () == inputs.extra_keys
    assert digests(from_vllm(vllm_request())) == digests(inputs)


def test_the_identifier_is_the_engines_digest() -> None:
    """Eight 32-bit words, most significant byte first, negative ones included; other words are another item."""
    inputs = from_tensorrt_llm(plain())
    assert (MultimodalItem(IDENTIFIER, 5, 4),) == inputs.extra_keys
    assert digests(from_vllm(vllm_request(mm_features=[vllm_feature(IDENTIFIER)]))) == digests(inputs)
    other = from_tensorrt_llm(plain(OTHER_WORDS))
    assert digests(inputs)[0] == digests(other)[0]
    assert digests(inputs)[1] != digests(other)[1]


def test_an_item_of_several_runs_is_one_hull() -> None:
    """D3, D8: [1, 3) and [5, 8) are one range [1, 8), in both layouts that know runs, as tuples or as objects."""
    flat = from_tensorrt_llm(trt_request(multimodal_hashes=[list(HASH_WORDS)], **FLAT))
    assert (MultimodalItem(IDENTIFIER, 1, 7),) == flat.extra_keys
    objects = [SimpleNamespace(prompt_start=1, run_length=2), SimpleNamespace(prompt_start=5, run_length=3)]
    tensors = {name: torch.tensor(value) for name, value in FLAT.items()}
    for request in (
        runs([[(1, 2, []), (5, 3, [1])]]),
        runs([[[1, 2, ()], [5, 3, ()]]]),
        runs([objects]),
        trt_request(multimodal_hashes=[list(HASH_WORDS)], **tensors),
        plain(position=1, length=5, **FLAT),
    ):
        assert flat == from_tensorrt_llm(request)
    assert digests(flat) == digests(from_tensorrt_llm(plain(position=1, length=7)))
    assert digests(flat) != digests(from_tensorrt_llm(plain(position=1, length=5)))


def test_two_items_share_out_their_runs() -> None:
    """Each item has its own hull, in prompt order."""
    request = trt_request(
        multimodal_hashes=[list(HASH_WORDS), list(OTHER_WORDS)],
        multimodal_item_run_cu_offsets=[0, 2, 3],
        multimodal_run_positions=[1, 4, 8],
        multimodal_run_lengths=[1, 2, 4],
    )
    assert [(1, 5), (8, 4)] == [
        (one.offset, one.length) for one in from_tensorrt_llm(request).extra_keys if isinstance(one, MultimodalItem)
    ]


@pytest.mark.parametrize("missing", list(FLAT))
def test_a_run_layout_that_lacks_a_part_is_refused(missing: str) -> None:
    """A6: incomplete metadata is not "nothing to add"; also where the older position and length stand beside it."""
    for gone in (None, "away"):
        fields: dict[str, Any] = (
            {**FLAT, missing: None}
            if gone is None
            else {name: value for name, value in FLAT.items() if name != missing}
        )
        refused(UncacheableReason.INCOMPLETE_LAYOUT, from_tensorrt_llm, plain(**fields))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"multimodal_item_run_cu_offsets": [0, 1]}, UncacheableReason.INCOMPLETE_LAYOUT),
        ({"multimodal_item_run_cu_offsets": [1, 2]}, UncacheableReason.INCOMPLETE_LAYOUT),
        ({"multimodal_item_run_cu_offsets": [0, 3]}, UncacheableReason.INCOMPLETE_LAYOUT),
        ({"multimodal_item_run_cu_offsets": [0]}, UncacheableReason.UNEQUAL_LISTS),
        ({"multimodal_item_run_cu_offsets": [0, 1, 2]}, UncacheableReason.UNEQUAL_LISTS),
        ({"multimodal_run_lengths": [2]}, UncacheableReason.UNEQUAL_LISTS),
        ({"multimodal_run_lengths": [2, 0]}, UncacheableReason.MALFORMED_MEDIA),
        ({"multimodal_run_lengths": [2, None]}, UncacheableReason.MALFORMED_MEDIA),
        ({"multimodal_run_positions": [1, -5]}, UncacheableReason.MALFORMED_MEDIA),
        ({"multimodal_run_positions": [5, 1]}, UncacheableReason.MALFORMED_MEDIA),
        ({"multimodal_run_positions": [1, 2]}, UncacheableReason.MALFORMED_MEDIA),
        ({"multimodal_run_positions": [1, 14]}, UncacheableReason.MALFORMED_MEDIA),
    ],
)
def test_flat_runs_that_do_not_add_up_are_refused(change: dict[str, Any], reason: UncacheableReason) -> None:
    """A6: offsets that do not share out the runs, runs that overlap, turn back or leave the prompt."""
    request = trt_request(multimodal_hashes=[list(HASH_WORDS)], **(FLAT | change))
    refused(reason, from_tensorrt_llm, request)


@pytest.mark.parametrize(
    ("by_item", "reason"),
    [
        ([], UncacheableReason.UNEQUAL_LISTS),
        ([[(1, 2, [])], [(5, 2, [])]], UncacheableReason.UNEQUAL_LISTS),
        ([[]], UncacheableReason.INCOMPLETE_LAYOUT),
        ([[(1,)]], UncacheableReason.MALFORMED_MEDIA),
        ([[(1, 0, [])]], UncacheableReason.MALFORMED_MEDIA),
        ([[(-1, 2, [])]], UncacheableReason.MALFORMED_MEDIA),
        ([[(1, 2, []), (2, 2, [])]], UncacheableReason.MALFORMED_MEDIA),
        ([[(1, 99, [])]], UncacheableReason.MALFORMED_MEDIA),
        ([[5]], UncacheableReason.MALFORMED_MEDIA),
        ([5], UncacheableReason.MALFORMED_MEDIA),
        ([[SimpleNamespace(prompt_start=1)]], UncacheableReason.MISSING_ATTRIBUTE),
    ],
)
def test_runs_by_item_that_do_not_add_up_are_refused(by_item: Any, reason: UncacheableReason) -> None:
    """A6 in the newest layout."""
    refused(reason, from_tensorrt_llm, runs(by_item))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (plain(position=None), UncacheableReason.MALFORMED_MEDIA),
        (plain(length=0), UncacheableReason.MALFORMED_MEDIA),
        (plain(length=-1), UncacheableReason.MALFORMED_MEDIA),
        (plain(length=12), UncacheableReason.MALFORMED_MEDIA),
        (plain(HASH_WORDS[:7]), UncacheableReason.WEAK_IDENTITY),
        (plain(()), UncacheableReason.WEAK_IDENTITY),
        (plain((*HASH_WORDS[:7], 2**32)), UncacheableReason.MALFORMED_MEDIA),
        (plain((*HASH_WORDS[:7], -(2**32))), UncacheableReason.MALFORMED_MEDIA),
        (plain((*HASH_WORDS[:7], None)), UncacheableReason.MALFORMED_MEDIA),
        (plain((*HASH_WORDS[:7], True)), UncacheableReason.MALFORMED_MEDIA),
        (plain(multimodal_uuids=["a", "b"]), UncacheableReason.UNEQUAL_LISTS),
        (trt_request(multimodal_hashes=[list(HASH_WORDS)]), UncacheableReason.INCOMPLETE_LAYOUT),
        (
            trt_request(multimodal_hashes=[list(HASH_WORDS)], multimodal_positions=[1]),
            UncacheableReason.INCOMPLETE_LAYOUT,
        ),
        (
            trt_request(multimodal_hashes=[list(HASH_WORDS)], multimodal_positions=[], multimodal_lengths=[1]),
            UncacheableReason.UNEQUAL_LISTS,
        ),
        (
            without(trt_request(multimodal_hashes=[list(HASH_WORDS)]), "multimodal_positions"),
            UncacheableReason.MISSING_ATTRIBUTE,
        ),
        (trt_request(multimodal_hashes=[None]), UncacheableReason.INCOMPLETE_LAYOUT),
        (trt_request(multimodal_hashes=5), UncacheableReason.MALFORMED_MEDIA),
    ],
)
def test_items_without_a_sure_identity_and_place_are_refused(request_: Any, reason: UncacheableReason) -> None:
    """A6, C9: hashes of another width, positions that are missing or shorter, ranges that are none."""
    refused(reason, from_tensorrt_llm, request_)


@pytest.mark.parametrize(
    "fields",
    [
        {"multimodal_positions": [5], "multimodal_lengths": [4]},
        {"multimodal_item_runs": [[(1, 1, [])]]},
        {"multimodal_run_positions": [5]},
        {"multimodal_uuids": ["u"]},
        {"multimodal_embedding": torch.zeros(4, 2)},
        {"py_multimodal_data": {"image": {"pixel_values": 1}}},
        {"py_multimodal_data": {"mrope_config": {}, "multimodal_embedding": []}},
        {"py_multimodal_data": ["image"]},
    ],
)
def test_media_without_hashes_are_refused(fields: dict[str, Any]) -> None:
    """A6, D3: anything that says that there are media, without their hashes, is not a text request."""
    refused(UncacheableReason.MISSING_IDENTITY, from_tensorrt_llm, trt_request(**fields))
    empty = trt_request(multimodal_hashes=[], py_multimodal_data={"mrope_config": {"mrope_position_deltas": 0}})
    assert from_tensorrt_llm(trt_request()) == from_tensorrt_llm(empty)


def test_display_names_of_items_change_nothing() -> None:
    """C6: the engine's uuid is for display; the hash is the key."""
    assert from_tensorrt_llm(plain()) == from_tensorrt_llm(plain(multimodal_uuids=["u"]))


def test_adapter_id_zero_is_an_adapter() -> None:
    """0 is never "no adapter": base, 0 and 7 are three."""
    zero, seven = with_adapter(0), with_adapter(7)
    assert (LoraAdapter("0", "sha256:/adapters/sql"),) == zero.extra_keys
    assert 12 == len({*digests(zero), *digests(seven), *digests(from_tensorrt_llm(trt_request()))})
    assert digests(zero) == digests(with_adapter(0))


def test_the_callers_name_makes_ids_of_instances_agree() -> None:
    """E7: two instances that numbered their adapters otherwise share, by a name that the deployment knows."""
    name = lambda request: f"adapter of {request.py_lora_path}"
    lists = [
        digests(
            from_tensorrt_llm(
                trt_request(lora_task_id=task, py_lora_path="/adapters/sql"),
                adapter_name=name,
                adapter_revision=revision_of,
            )
        )
        for task in (1, 2)
    ]
    assert lists[0] == lists[1]
    assert lists[0] != digests(with_adapter(1))


def test_an_adapter_that_cannot_be_named_is_refused() -> None:
    """Weights or a path without an id, an id that is none, a name function without an answer."""

    def fails(_: Any) -> str:
        raise KeyError

    fields: list[dict[str, Any]] = [{"lora_weights": object()}, {"lora_config": object()}, {"py_lora_path": "/a"}]
    for one in fields:
        refused(UncacheableReason.UNKNOWN_ADAPTER, from_tensorrt_llm, trt_request(**one))
    ids: list[Any] = [-1, True, "7", 7.0]
    for task in ids:
        refused(UncacheableReason.UNKNOWN_ADAPTER, with_adapter, task)
    request = trt_request(lora_task_id=1)
    for name in (fails, lambda _: None, lambda _: ""):
        refused(
            UncacheableReason.UNKNOWN_ADAPTER,
            from_tensorrt_llm,
            request,
            adapter_name=name,
            adapter_revision=revision_of,
        )
    refused(UncacheableReason.UNKNOWN_REVISION, from_tensorrt_llm, request)

    def knows_why(_: Any) -> str:
        raise UncacheableRequest(UncacheableReason.ADAPTER_ENDS, "after this turn")

    refused(UncacheableReason.ADAPTER_ENDS, from_tensorrt_llm, request, adapter_name=knows_why)


def test_an_activated_adapter_begins_in_the_prompt() -> None:
    """The function sees the prompt and no generated tokens."""
    late = from_tensorrt_llm(
        trt_request(lora_task_id=3, orig_prompt_len=12, py_lora_path="/a"),
        adapter_revision=revision_of,
        adapter_start=lambda _, prompt: len(prompt) - 1,
    )
    assert (LoraAdapter("3", "sha256:/a", start=11),) == late.extra_keys


def test_salts() -> None:
    """F1: the text of the salt where there is one; the same one hits, another misses, an empty one is refused."""
    one, again, other = (from_tensorrt_llm(trt_request(cache_salt=salt, cache_salt_id=5)) for salt in ("s", "s", "t"))
    assert (CacheSalt("s"),) == one.extra_keys
    assert digests(one) == digests(again)
    assert 12 == len({*digests(one), *digests(other), *digests(from_tensorrt_llm(trt_request()))})
    refused(UncacheableReason.EMPTY_SALT, from_tensorrt_llm, trt_request(cache_salt=""))
    refused(UncacheableReason.MALFORMED_SALT, from_tensorrt_llm, trt_request(cache_salt=7))


def test_a_salt_of_which_only_the_id_is_known_is_of_another_kind() -> None:
    """Older versions keep 64 bits of it; 0 is a salt, and no text of a salt equals an id."""
    old = [from_tensorrt_llm(without(trt_request(cache_salt_id=one), "cache_salt")) for one in (0, 5, 2**64 - 1)]
    assert (Tag("tensorrt_llm.cache_salt_id", (5).to_bytes(8, "little")),) == old[1].extra_keys
    text = from_tensorrt_llm(trt_request(cache_salt="5"))
    lists = [digests(one) for one in (*old, text, from_tensorrt_llm(trt_request()))]
    assert 20 == len({digest for one in lists for digest in one})
    assert old[1] == from_tensorrt_llm(trt_request(cache_salt=None, cache_salt_id=5))
    wrong: list[Any] = [-1, 2**64, "5", True]
    for value in wrong:
        refused(UncacheableReason.MALFORMED_SALT, from_tensorrt_llm, trt_request(cache_salt_id=value))


def test_a_request_without_either_salt_attribute_is_refused() -> None:
    """One of the two is known to be there."""
    request = without(trt_request(), "cache_salt", "cache_salt_id")
    refused(UncacheableReason.MISSING_ATTRIBUTE, from_tensorrt_llm, request)
    assert from_tensorrt_llm(trt_request()) == from_tensorrt_llm(without(trt_request(), "cache_salt_id"))


@pytest.mark.parametrize("name", ["get_tokens", "multimodal_hashes", "lora_task_id", "prompt_embedding_table"])
def test_a_missing_attribute_is_never_read_as_unused(name: str) -> None:
    """A request of an unknown version bypasses the cache."""
    request = without(trt_request(), name)
    assert name in refused(UncacheableReason.MISSING_ATTRIBUTE, from_tensorrt_llm, request)
    if name != "get_tokens":
        assert from_tensorrt_llm(trt_request()) == from_tensorrt_llm(request, absent=(name,))


def test_tokens_that_cannot_be_read_are_refused() -> None:
    """The engine's own exception becomes a bypass."""

    def fails(_: int) -> list[int]:
        raise IndexError

    refused(UncacheableReason.UNREADABLE_ATTRIBUTE, from_tensorrt_llm, trt_request(get_tokens=fails))


VOCABULARY = 1000
TABLE = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
TUNED = (1000, 1001, 5, 6, 1002, 1002, 7, 8)


def tuned(table: Any = TABLE, tokens: tuple[int, ...] = TUNED) -> EngineInputs:
    """Inputs of a prompt whose ids behind the vocabulary take rows of a table."""
    return from_tensorrt_llm(trt_request(tokens, prompt_embedding_table=table), vocab_size=VOCABULARY)


def test_a_prompt_tuning_table_is_prompt_embeddings() -> None:
    """Each run of ids behind the vocabulary is a range of rows; rows that no id takes do not show."""
    inputs = tuned()
    first, second = inputs.extra_keys
    assert isinstance(first, PromptEmbeds)
    assert isinstance(second, PromptEmbeds)
    assert [(0, 2), (4, 2)] == [(first.offset, first.n_rows), (second.offset, second.n_rows)]
    assert ("bfloat16", 8) == (first.dtype, first.row_bytes)
    assert second.rows[:8] == second.rows[8:]
    assert inputs == tuned(TABLE[None])
    other = TABLE.clone()
    other[2, 0] = 77
    assert digests(inputs)[0] == digests(tuned(other))[0]
    assert digests(inputs)[1] != digests(tuned(other))[1]
    unused = torch.cat([TABLE, torch.zeros(1, 4, dtype=torch.bfloat16)])
    assert digests(inputs) == digests(tuned(unused))


def test_a_table_that_cannot_be_placed_is_refused() -> None:
    """Without the vocabulary's size nothing tells rows from tokens; a row that is not there is no row."""
    request = trt_request(TUNED, prompt_embedding_table=TABLE)
    refused(UncacheableReason.PROMPT_TABLE, from_tensorrt_llm, request)
    refused(UncacheableReason.PROMPT_TABLE, from_tensorrt_llm, request, vocab_size=0)
    refused(UncacheableReason.MALFORMED_EMBEDS, tuned, TABLE, (1003,))
    refused(UncacheableReason.MALFORMED_EMBEDS, tuned, torch.zeros(3))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"encoder_tokens": [1, 2]}, UncacheableReason.ENCODER_INPUT),
        ({"py_encoder_input_features": torch.zeros(2)}, UncacheableReason.ENCODER_INPUT),
        ({"sampling_config": SimpleNamespace(beam_width=4)}, UncacheableReason.BEAM_SEARCH),
        ({"position_ids": [0, 1, 1, 2]}, UncacheableReason.CUSTOM_POSITIONS),
        ({"position_ids": 3}, UncacheableReason.MALFORMED_MEDIA),
    ],
)
def test_what_breaks_the_prefix_is_refused(fields: dict[str, Any], reason: UncacheableReason) -> None:
    """KV that depends on an encoder, on swapped histories or on other positions has no key."""
    refused(reason, from_tensorrt_llm, trt_request(**fields))
    usual = trt_request(encoder_tokens=None, position_ids=list(range(16)), sampling_config=None)
    assert from_tensorrt_llm(trt_request()) == from_tensorrt_llm(usual)
