"""Spaces from engine configurations: what changes KV changes the root, what does not does not, nothing is left out."""

from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keying import KeySpace, SpaceError
from keying.engines import UncacheableReason, space_from_sglang, space_from_tensorrt_llm, space_from_vllm
from keying.engines.configuration import canonical_text, group_digest, resolved_kv_dtype
from tests.keying.engine_samples import (
    KV_CACHE_CONFIG,
    MISSING,
    refused,
    sglang_config,
    trt_config,
    vllm_config,
)

OWN_KV = {"kv_cache_quant_algo": "FP8"}
ATTRIBUTES = [
    "draft_model",
    "hf_overrides",
    "kv_groups",
    "max_model_len",
    "mm_config",
    "parallel",
    "quantization",
    "rope",
]


def vllm(arguments: dict[str, Any] | None = None, **fields: Any) -> KeySpace:
    """The space of a vLLM configuration with parts changed by dotted name."""
    known: dict[str, Any] = {"chunk_size": 16, "kv_cache_config": KV_CACHE_CONFIG}
    return space_from_vllm(vllm_config(**fields), **(known | (arguments or {})))


def sglang(arguments: dict[str, Any] | None = None, **fields: Any) -> KeySpace:
    """The space of an SGLang configuration."""
    config = sglang_config(**fields)
    return space_from_sglang(config.args, **({"model_config": config.model, "chunk_size": 16} | (arguments or {})))


def trt(arguments: dict[str, Any] | None = None, **fields: Any) -> KeySpace:
    """The space of a TensorRT-LLM configuration."""
    config = trt_config(**fields)
    known = {"pretrained_config": config.model, "chunk_size": 16, "kv_groups": [["l.0"]], "mm_config": None}
    return space_from_tensorrt_llm(config.args, **(known | (arguments or {})))


@pytest.mark.parametrize("space", [vllm(), sglang(), trt()])
def test_a_space_has_every_attribute(space: KeySpace) -> None:
    """The eight attributes are always there; what is not used says so, and the element type is resolved."""
    assert ATTRIBUTES == list(space.attributes)
    assert ("org/model", "bfloat16", 16, "") == (space.model, space.kv_dtype, space.chunk_size, space.model_revision)
    assert "null" == space.attributes["draft_model"]
    assert "8192" == space.attributes["max_model_len"]
    assert "{}" == space.attributes["hf_overrides"]


def test_the_texts_are_readable() -> None:
    """A person who compares two deployments sees which value differs."""
    attributes = vllm().attributes
    assert '{"dcp":1,"interleave":1,"pp":1,"tp":1}' == attributes["parallel"]
    assert '{"dtype":"bfloat16","kv_skip_layers":null,"method":null,"settings":null}' == attributes["quantization"]
    assert (
        '{"max_position_embeddings":32768,"rope_scaling":{"factor":4,"rope_type":"yarn"},"rope_theta":10000}'
        == attributes["rope"]
    )


VLLM_CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model", {}, {"model_config.model": "org/other"}),
    ("model_revision", {}, {"model_config.revision": "v2"}),
    ("model_revision", {}, {"model_config.hf_config": SimpleNamespace(_commit_hash="c0ffee")}),
    ("model_revision", {"model_revision": "c0ffee"}, {}),
    ("kv_dtype", {}, {"cache_config.cache_dtype": "fp8"}),
    ("kv_dtype", {"kv_dtype": "float8_e4m3fnuz"}, {}),
    ("kv_dtype", {}, {"model_config.dtype": torch.float16}),
    ("kv_layout", {"kv_layout": "NHD"}, {}),
    ("chunk_size", {"chunk_size": 32}, {}),
    ("quantization", {}, {"model_config.quantization": "awq"}),
    ("quantization", {"kv_dtype": "bfloat16"}, {"model_config.dtype": "float16"}),
    ("quantization", {}, {"cache_config.kv_cache_dtype_skip_layers": ["0"]}),
    ("quantization", {}, {"model_config.quantization_config": {"linear": "fp8"}}),
    ("rope", {}, {"model_config.hf_text_config": SimpleNamespace(rope_theta=5e5)}),
    ("max_model_len", {}, {"model_config.max_model_len": 4096}),
    ("hf_overrides", {}, {"model_config.hf_overrides": {"rope_theta": 1}}),
    ("hf_overrides", {"hf_overrides": "theta doubled"}, {"model_config.hf_overrides": lambda config: config}),
    ("mm_config", {}, {"model_config.multimodal_config": SimpleNamespace(mm_processor_kwargs={"num_crops": 4})}),
    (
        "mm_config",
        {},
        {"model_config.multimodal_config": SimpleNamespace(media_io_kwargs={"video": {}})},
    ),
    ("mm_config", {}, {"model_config.multimodal_config": SimpleNamespace(video_pruning_rate=0.5)}),
    ("parallel", {}, {"parallel_config.tensor_parallel_size": 2}),
    ("parallel", {}, {"parallel_config.pipeline_parallel_size": 2}),
    ("parallel", {}, {"parallel_config.decode_context_parallel_size": 2}),
    ("parallel", {}, {"parallel_config.cp_kv_cache_interleave_size": 16}),
    ("parallel", {}, {"parallel_config.prefill_context_parallel_size": 2}),
    ("kv_groups", {"kv_cache_config": None, "kv_groups": [["l.2"], ["l.0", "l.1"]]}, {}),
    (
        "draft_model",
        {},
        {"speculative_config": SimpleNamespace(method="eagle3", model="org/draft", revision=None, quantization=None)},
    ),
]


def differing(one: KeySpace, other: KeySpace) -> set[str]:
    """Fields and attributes in which two spaces differ."""
    fields = ("model", "model_revision", "kv_dtype", "chunk_size", "kv_layout")
    return {name for name in fields if getattr(one, name) != getattr(other, name)} | {
        name for name in ATTRIBUTES if one.attributes[name] != other.attributes[name]
    }


@pytest.mark.parametrize(("where", "arguments", "fields"), VLLM_CHANGES)
def test_what_changes_kv_changes_the_root_of_vllm(
    where: str, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    """I7: each value shows, in the place where a reader looks for it."""
    changed = vllm(arguments, **fields)
    assert where in differing(vllm(), changed)
    assert vllm().root != changed.root
    assert vllm(arguments, **fields).root == changed.root


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_config.gpu_memory_utilization": 0.5},
        {"cache_config.block_size": 128},
        {"cache_config.enable_prefix_caching": False},
        {"model_config.seed": 7},
        {"model_config.served_model_name": "alias"},
        {"model_config.tokenizer_revision": "x"},
        {"parallel_config.data_parallel_size": 4},
        {"parallel_config.prefill_context_parallel_size": 1},
        {"parallel_config.rank": 3},
        {"instance_id": "other"},
        {"cache_config.cache_dtype": "bfloat16"},
        {"model_config.dtype": torch.bfloat16},
        {"model_config.hf_overrides": None},
        {"speculative_config": SimpleNamespace(method="ngram", model="ngram")},
    ],
)
def test_what_does_not_change_kv_does_not_change_the_root_of_vllm(fields: dict[str, Any]) -> None:
    """E7 for configurations: memory, ranks, seeds, names for users and drafting without a model."""
    assert vllm().root == vllm(None, **fields).root


def test_newer_and_doubled_names_of_rope_are_one() -> None:
    """Transformers 5 gives ``rope_parameters`` once more as ``rope_scaling``; other parameters still show."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    single, doubled, other = (
        vllm(None, **{"model_config.hf_config": config, "model_config.hf_text_config": config})
        for config in (
            SimpleNamespace(rope_parameters=parameters),
            SimpleNamespace(rope_parameters=parameters, rope_scaling=parameters),
            SimpleNamespace(rope_parameters=parameters | {"rope_theta": 1}),
        )
    )
    assert single.root == doubled.root
    assert single.root != other.root


def test_media_options_that_compute_nothing_do_not_show() -> None:
    """Cache sizes, limits and transport of the processor are no identity; a default is like an absent field."""
    one = SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={}, mm_processor_cache_gb=4, limit_per_prompt={})
    other = SimpleNamespace(mm_processor_kwargs={}, mm_processor_cache_type="shm", video_pruning_method="evs")
    spaces = [vllm(None, **{"model_config.multimodal_config": config}) for config in (one, other)]
    assert spaces[0].root == spaces[1].root
    assert spaces[0].root != vllm().root


@pytest.mark.parametrize(
    "name",
    [
        "model_config",
        "cache_config",
        "parallel_config",
        "speculative_config",
        "model_config.model",
        "model_config.dtype",
        "model_config.quantization",
        "model_config.max_model_len",
        "model_config.hf_overrides",
        "model_config.hf_config",
        "model_config.multimodal_config",
        "cache_config.cache_dtype",
        "parallel_config.tensor_parallel_size",
        "parallel_config.pipeline_parallel_size",
        "parallel_config.decode_context_parallel_size",
        "parallel_config.cp_kv_cache_interleave_size",
    ],
)
def test_a_value_that_is_not_there_is_an_error(name: str) -> None:
    """An omission would let two deployments share that differ in it."""
    with pytest.raises(SpaceError):
        vllm(None, **{name: MISSING})


def test_a_version_may_be_declared_not_to_have_a_value() -> None:
    """Context parallelism that a version does not know counts as 1; the older name of its interleave is understood."""
    gone = {"parallel_config.decode_context_parallel_size": MISSING}
    assert vllm().root == vllm({"absent": ("decode_context_parallel_size",)}, **gone).root
    older = {
        "parallel_config.cp_kv_cache_interleave_size": MISSING,
        "parallel_config.dcp_kv_cache_interleave_size": 1,
    }
    assert vllm().root == vllm(None, **older).root


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({}, {"model_config.max_model_len": None}),
        ({}, {"model_config.max_model_len": -1}),
        ({}, {"model_config.max_model_len": True}),
        ({}, {"model_config.dtype": None}),
        ({}, {"model_config.dtype": "auto"}),
        ({}, {"cache_config.cache_dtype": None}),
        ({}, {"model_config.model": ""}),
        ({}, {"model_config.model": 5}),
        ({}, {"model_config.revision": 5}),
        ({}, {"model_config.hf_overrides": lambda config: config}),
        ({}, {"model_config.hf_overrides": {"a": {1, 2}}}),
        ({}, {"model_config.hf_overrides": {1: 2}}),
        ({}, {"model_config.hf_overrides": {"a": float("nan")}}),
        ({}, {"model_config.hf_overrides": {"a": object()}}),
        ({}, {"parallel_config.tensor_parallel_size": None}),
        ({}, {"parallel_config.tensor_parallel_size": 0}),
        ({"kv_cache_config": None}, {}),
        ({"kv_cache_config": None, "kv_groups": []}, {}),
        ({"kv_cache_config": None, "kv_groups": [[]]}, {}),
        ({"kv_cache_config": None, "kv_groups": ["l.0"]}, {}),
        ({"kv_cache_config": None, "kv_groups": [["l.0", 1]]}, {}),
        ({"kv_cache_config": SimpleNamespace()}, {}),
        ({"kv_cache_config": SimpleNamespace(kv_cache_groups=None)}, {}),
        ({"kv_cache_config": SimpleNamespace(kv_cache_groups=[SimpleNamespace()])}, {}),
        ({"chunk_size": 0}, {}),
        ({"kv_dtype": "auto"}, {"model_config.dtype": "auto"}),
        ({"kv_dtype": "BF16"}, {}),
        ({}, {"model_config.hf_config": SimpleNamespace(quantization_config={"kv_cache_scheme": {"num_bits": 8}})}),
        (
            {},
            {
                "model_config.hf_config": SimpleNamespace(
                    quantization_config={"quantization": {"kv_cache_quant_algo": "FP8"}}
                )
            },
        ),
    ],
)
def test_a_value_that_cannot_be_read_is_an_error(arguments: dict[str, Any], fields: dict[str, Any]) -> None:
    """Not resolved, of another type, without a canonical text: a typed error, and no space without it."""
    with pytest.raises(SpaceError):
        vllm(arguments, **fields)


def test_a_property_that_raises_is_an_error() -> None:
    """What the engine cannot say itself is not left out."""

    class Broken(SimpleNamespace):
        @property
        def quantization(self) -> str:
            raise RuntimeError("not resolved")

    fields = {name: value for name, value in vars(vllm_config().model_config).items() if name != "quantization"}
    with pytest.raises(SpaceError, match="quantization"):
        vllm(None, model_config=Broken(**fields))


def test_a_checkpoint_without_its_own_kv_scheme_stores_the_models_type() -> None:
    """Weights may be quantized and KV not."""
    config = SimpleNamespace(quantization_config={"quant_method": "awq", "kv_cache_scheme": None})
    assert "bfloat16" == vllm(None, **{"model_config.hf_config": config}).kv_dtype


@pytest.mark.parametrize(
    "fields",
    [
        {"model_config.is_encoder_decoder": True},
        {"model_config.is_diffusion": True},
        {"diffusion_config": SimpleNamespace()},
        {"model_config.attn_type": "encoder_only"},
        {"model_config.hf_config": SimpleNamespace(is_causal=False)},
        {"model_config.hf_text_config": SimpleNamespace(use_bidirectional_attention=True)},
        {"model_config.hf_text_config": SimpleNamespace(use_bidirectional_attention="all")},
    ],
)
def test_models_that_look_ahead_have_no_space(fields: dict[str, Any]) -> None:
    """KV of a position that depends on later ones follows from no prefix; within one media span it may."""
    refused(UncacheableReason.NON_CAUSAL, vllm, None, **fields)
    within = SimpleNamespace(is_causal=True, use_bidirectional_attention="vision")
    assert vllm(None, **{"model_config.hf_config": within, "model_config.is_mm_prefix_lm": True}).root


def test_a_prefix_lm_shows_in_what_vllm_says_of_its_kv() -> None:
    """Its layers are marked in their KV specs alone, in a group of one spec or of several."""

    def groups(*flags: bool, together: bool) -> Any:
        specs = [SimpleNamespace(non_causal=flag) for flag in flags]
        spec = SimpleNamespace(kv_cache_specs=dict(zip("ab", specs, strict=False))) if together else specs[0]
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["l.0"], kv_cache_spec=spec)])

    for together in (False, True):
        vllm({"kv_cache_config": groups(False, False, together=together)})
        refused(UncacheableReason.NON_CAUSAL, vllm, {"kv_cache_config": groups(True, True, together=together)})
    refused(UncacheableReason.NON_CAUSAL, vllm, {"kv_cache_config": groups(False, True, together=True)})


@pytest.mark.parametrize("space", [vllm, sglang, trt])
def test_a_model_can_be_declared_not_causal(space: Any) -> None:
    """For models whose configuration does not say it."""
    refused(UncacheableReason.NON_CAUSAL, space, {"causal": False})


SGLANG_CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model", {}, {"args.model_path": "org/other"}),
    ("model_revision", {}, {"args.revision": "v2"}),
    ("kv_dtype", {}, {"args.kv_cache_dtype": "fp8_e5m2"}),
    ("kv_dtype", {"kv_dtype": torch.float8_e4m3fn}, {}),
    ("quantization", {}, {"args.quantization": "fp8"}),
    ("quantization", {}, {"args.quantization_param_path": "/scales.json"}),
    ("rope", {}, {"model.hf_text_config": SimpleNamespace(rope_theta=1)}),
    ("max_model_len", {}, {"model.context_len": 4096}),
    ("hf_overrides", {}, {"args.json_model_override_args": '{"a": 1}'}),
    ("mm_config", {}, {"args.mm_process_config": {"image": {"max_pixels": 1}}}),
    ("parallel", {}, {"args.tp_size": 2}),
    ("parallel", {}, {"args.pp_size": 2}),
    ("parallel", {}, {"args.dcp_size": 2}),
    ("parallel", {}, {"args.enable_dp_attention": True, "args.dp_size": 2}),
    ("kv_groups", {}, {"model.num_hidden_layers": 3}),
    ("kv_groups", {}, {"model.full_attention_layer_ids": [0], "model.swa_attention_layer_ids": [1]}),
    ("kv_groups", {"kv_groups": [["a"]]}, {}),
    ("draft_model", {}, {"args.speculative_algorithm": "EAGLE", "args.speculative_draft_model_path": "org/draft"}),
]


@pytest.mark.parametrize(("where", "arguments", "fields"), SGLANG_CHANGES)
def test_what_changes_kv_changes_the_root_of_sglang(
    where: str, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Each value shows in its place, and only there."""
    changed = sglang(arguments, **fields)
    assert {where} == differing(sglang(), changed)
    assert sglang().root != changed.root


@pytest.mark.parametrize(
    "fields",
    [
        {"args.page_size": 16},
        {"args.dp_size": 4},
        {"args.mem_fraction_static": 0.5},
        {"args.kv_cache_dtype": "bf16"},
        {"args.json_model_override_args": " { } "},
        {"args.json_model_override_args": {}},
        {"args.mm_process_config": None},
        {"args.speculative_algorithm": "NGRAM"},
        {"model.dtype": torch.bfloat16},
    ],
)
def test_what_does_not_change_kv_does_not_change_the_root_of_sglang(fields: dict[str, Any]) -> None:
    """Pages, replicas, memory, spellings of the same value, and drafting without a model."""
    assert sglang().root == sglang(None, **fields).root


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({}, {"args.model_path": None}),
        ({}, {"args.tp_size": MISSING}),
        ({}, {"args.dcp_size": MISSING}),
        ({}, {"args.quantization": MISSING}),
        ({}, {"args.mm_process_config": MISSING}),
        ({}, {"args.speculative_algorithm": MISSING}),
        ({}, {"args.json_model_override_args": "{"}),
        ({}, {"args.json_model_override_args": 5}),
        ({}, {"model.context_len": None}),
        ({}, {"model.context_len": MISSING}),
        ({}, {"model.hf_config": None}),
        ({}, {"model.dtype": MISSING}),
        ({}, {"model.num_hidden_layers": MISSING}),
        ({}, {"model.full_attention_layer_ids": [], "model.swa_attention_layer_ids": []}),
        ({}, {"model.hf_config": SimpleNamespace(quantization_config={"kv_cache_quant_algo": "FP8"})}),
        ({"kv_groups": []}, {}),
    ],
)
def test_a_value_of_sglang_that_cannot_be_read_is_an_error(arguments: dict[str, Any], fields: dict[str, Any]) -> None:
    """The same promise for SGLang."""
    with pytest.raises(SpaceError):
        sglang(arguments, **fields)


def test_older_sglang_and_non_causal_ones() -> None:
    """A version without context parallelism is declared; diffusion and encoders are refused."""
    assert sglang().root == sglang({"absent": ("dcp_size",)}, **{"args.dcp_size": MISSING}).root
    refused(UncacheableReason.NON_CAUSAL, sglang, None, **{"args.dllm_algorithm": "LowConfidence"})
    refused(UncacheableReason.NON_CAUSAL, sglang, None, **{"model.is_encoder_decoder": True})


TRT_CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model", {}, {"args.model": PurePosixPath("/models/other")}),
    ("model_revision", {}, {"args.revision": "v2"}),
    ("kv_dtype", {}, {"args.kv_cache_config": SimpleNamespace(dtype="fp8")}),
    ("kv_dtype", {"kv_dtype": "nvfp4"}, {}),
    ("quantization", {}, {"args.quant_config": SimpleNamespace(quant_algo="FP8", kv_cache_quant_algo=None)}),
    ("rope", {"pretrained_config": SimpleNamespace(rope_theta=1)}, {}),
    ("max_model_len", {"max_model_len": 1024}, {}),
    ("hf_overrides", {}, {"args.model_kwargs": {"num_hidden_layers": 2}}),
    ("mm_config", {"mm_config": {"max_pixels": 1}}, {}),
    ("parallel", {}, {"args.tensor_parallel_size": 2}),
    ("parallel", {}, {"args.pipeline_parallel_size": 2}),
    ("parallel", {}, {"args.context_parallel_size": 2}),
    ("parallel", {}, {"args.enable_attention_dp": True}),
    ("kv_groups", {"kv_groups": [["l.0"], ["l.1"]]}, {}),
    (
        "draft_model",
        {},
        {"args.speculative_config": SimpleNamespace(decoding_type="Eagle", speculative_model="org/draft")},
    ),
]


@pytest.mark.parametrize(("where", "arguments", "fields"), TRT_CHANGES)
def test_what_changes_kv_changes_the_root_of_tensorrt_llm(
    where: str, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Each value shows in its place, and only there."""
    changed = trt(arguments, **fields)
    assert {where} == differing(trt(), changed)
    assert trt().root != changed.root


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({}, {"args.model": None}),
        ({}, {"args.max_seq_len": None}),
        ({}, {"args.quant_config": MISSING}),
        ({}, {"args.quant_config": SimpleNamespace(quant_algo="FP8")}),
        ({}, {"args.quant_config": SimpleNamespace(quant_algo=None, kv_cache_quant_algo="FP8")}),
        ({}, {"args.kv_cache_config": None}),
        ({}, {"args.kv_cache_config": SimpleNamespace()}),
        ({}, {"args.dtype": "auto"}),
        ({}, {"args.context_parallel_size": MISSING}),
        ({}, {"args.speculative_config": MISSING}),
        ({"kv_groups": None}, {}),
        ({"mm_config": {"processor": object()}}, {}),
    ],
)
def test_a_value_of_tensorrt_llm_that_cannot_be_read_is_an_error(
    arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    """The same promise for TensorRT-LLM."""
    with pytest.raises(SpaceError):
        trt(arguments, **fields)


def test_the_checkpoints_type_stands_for_auto_in_tensorrt_llm() -> None:
    """``dtype: auto`` is the checkpoint's own type, under either of its names; encoder-decoders are refused."""
    for name in ("torch_dtype", "dtype"):
        config = SimpleNamespace(rope_theta=10000, max_position_embeddings=32768, **{name: torch.bfloat16})
        assert trt().root == trt({"pretrained_config": config}, **{"args.dtype": "auto"}).root
    encoder = SimpleNamespace(is_encoder_decoder=True)
    refused(UncacheableReason.NON_CAUSAL, trt, {"pretrained_config": encoder})
    nested = SimpleNamespace(text_config=trt_config().model)
    assert trt().root == trt({"pretrained_config": nested}).root


class Kind(Enum):
    """A setting as an enum member."""

    ONE = "one"


@dataclass
class Settings:
    """A setting as a dataclass."""

    b: int
    a: float


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (1.0, "1"),
        (-0.0, "0"),
        (1e6, "1000000"),
        (0.1, "0.1"),
        (2.0**60, "1.152921504606847e+18"),
        ("\u00e9", '"\\u00e9"'),
        ((1, "a"), '[1,"a"]'),
        ({"b": 1, "a": [None]}, '{"a":[null],"b":1}'),
        (torch.bfloat16, '"bfloat16"'),
        (Kind.ONE, '"one"'),
        (Settings(1, 2.0), '{"a":2,"b":1}'),
        (SimpleNamespace(model_dump=lambda: {"x": 1}), '{"x":1}'),
    ],
)
def test_canonical_text(value: Any, text: str) -> None:
    """One text for equal values: the rules of the module, one by one."""
    assert text == canonical_text(value, "value")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(plain)
@settings(max_examples=150)
def test_canonical_text_does_not_depend_on_order(value: Any) -> None:
    """A mapping in another order has the same text, and bool is not the number that it equals."""

    def turned(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: turned(one[name]) for name in reversed(one)}
        return [turned(inner) for inner in one] if isinstance(one, list) else one

    assert canonical_text(value, "value") == canonical_text(turned(value), "value")
    assert canonical_text([value, True], "value") != canonical_text([value, 1], "value")


def test_a_long_value_becomes_its_digest() -> None:
    """An attribute has at most 4096 bytes; a digest is the text of no value, so the two cannot be confused."""
    long, other = ({"layers": ["x" * 5000, last]} for last in "ab")
    text = canonical_text(long, "value")
    assert text.startswith("sha256:")
    assert text == canonical_text(dict(long), "value")
    assert text != canonical_text(other, "value")
    assert text != canonical_text(text, "value")


def test_bottomless_values_are_refused() -> None:
    """A value that contains itself ends in an error, not in a crash."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SpaceError, match="levels"):
        canonical_text(loop, "value")


def test_groups_are_framed_and_ordered() -> None:
    """Which layers are in one group, their order and the groups' order all show; names cannot run together."""
    groups = [[["a", "b"], ["c"]], [["a"], ["b", "c"]], [["c"], ["a", "b"]], [["b", "a"], ["c"]], [["ab"], ["c"]]]
    assert 5 == len({group_digest(one) for one in groups})
    assert group_digest([["a"]]) == group_digest([("a",)])


@pytest.mark.parametrize(
    ("told", "configured", "expected"),
    [
        (None, "fp8", "float8_e4m3fn"),
        (None, "fp8_e4m3", "float8_e4m3fn"),
        (None, "fp8_e5m2", "float8_e5m2"),
        (None, "bf16", "bfloat16"),
        (None, "half", "float16"),
        (None, "int8_per_token_head", "int8_per_token_head"),
        (None, torch.float32, "float32"),
        ("bfloat16", "auto", "bfloat16"),
    ],
)
def test_one_name_for_each_element_type(told: str | None, configured: Any, expected: str) -> None:
    """Engines call one type by several names; a deployment of two engines would never hit."""
    assert expected == resolved_kv_dtype(told, configured, "float16", scheme=False, engine="engine")
