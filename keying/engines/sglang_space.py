"""SGLang: the space of a deployment from ``ServerArgs`` and ``ModelConfig``.

Read from the released 0.5.23 (``configs/model_config.py``, ``arg_groups/fields/``, ``mem_cache/kv_cache_dtype.py``).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keying.engines.configuration import (
    brings_kv_scheme,
    canonical_text,
    causal_or_refused,
    group_digest,
    groups_or_refused,
    known,
    model_revision_of,
    resolved_kv_dtype,
    rope_text,
    setting,
    space_error,
    whole_setting,
)
from keying.engines.reading import optional
from keying.engines.tensors import dtype_name
from keying.space import KeySpace

_ARGS = "sglang ServerArgs"
_MODEL = "sglang ModelConfig"

TOKEN_DRAFTERS = frozenset({"NGRAM"})
"""Speculation without a model: it has no KV of its own."""


def space_from_sglang(
    server_args: Any,
    *,
    model_config: Any,
    chunk_size: int,
    kv_dtype: Any = None,
    kv_groups: Sequence[Sequence[str]] | None = None,
    model_revision: str | None = None,
    kv_layout: str = "",
    causal: bool = True,
    absent: Collection[str] = (),
) -> KeySpace:
    """The space of a deployment.

    Args:
        server_args: ``ServerArgs``, resolved.
        model_config: ``ModelConfig`` of the target model.
        chunk_size: tokens in a chunk of the cache; it need not be the engine's page size.
        kv_dtype: ``ModelRunner.kv_cache_dtype``, the resolved element type (a torch dtype or its name); needed where
            the arguments say ``auto`` and the checkpoint brings its own KV quantization.
        kv_groups: ordered layer names of each KV group; without it one group of all layers, or full and sliding-window
            layers apart where the model has both. Hybrid state-space models must hand it in.
        model_revision: commit or digest of the weights, where the arguments name a branch.
        kv_layout: name of the layout in which the connector stores chunks.
        causal: False declares a model whose KV depends on later positions outside of media spans.
        absent: attributes that this SGLang version is declared not to have; they count as not used.

    Raises:
        SpaceError: a value cannot be read or has no canonical text.
        UncacheableRequest: the model is not causal, so no request of it has a key.
    """

    def argument(name: str) -> Any:
        return setting(server_args, name, _ARGS, absent)

    hf_config = known(setting(model_config, "hf_config", _MODEL, absent), f"{_MODEL}.hf_config")
    text_config = setting(model_config, "hf_text_config", _MODEL, ("hf_text_config",)) or hf_config
    causal_or_refused(
        {
            "causal=False": not causal,
            "is_encoder_decoder": bool(optional(model_config, "is_encoder_decoder", _MODEL)),
            "dllm_algorithm": optional(server_args, "dllm_algorithm", _ARGS) is not None,
        },
        hf_config,
        text_config,
    )
    dtype = dtype_name(known(setting(model_config, "dtype", _MODEL, absent), f"{_MODEL}.dtype"))
    quantization = {
        "method": argument("quantization") or optional(model_config, "quantization", _MODEL),
        "dtype": dtype,
        "kv_scales": argument("quantization_param_path"),
    }
    context = known(setting(model_config, "context_len", _MODEL, absent), f"{_MODEL}.context_len")
    name = known(argument("model_path"), f"{_ARGS}.model_path")
    return KeySpace(
        name,
        chunk_size=chunk_size,
        kv_dtype=resolved_kv_dtype(
            None if kv_dtype is None else dtype_name(kv_dtype),
            argument("kv_cache_dtype"),
            dtype,
            scheme=brings_kv_scheme(hf_config),
            engine=_ARGS,
        ),
        model_revision=model_revision
        if model_revision is not None
        else model_revision_of(hf_config, argument("revision")),
        kv_layout=kv_layout,
        attributes={
            "quantization": canonical_text(quantization, "quantization"),
            "rope": rope_text(text_config, hf_config),
            "max_model_len": canonical_text(whole_setting(context, "context_len"), "max_model_len"),
            "hf_overrides": _overrides_text(argument("json_model_override_args")),
            "mm_config": canonical_text(argument("mm_process_config") or None, "mm_config"),
            "parallel": _parallel_text(argument),
            "kv_groups": group_digest(_groups(model_config, kv_groups)),
            "draft_model": _draft_text(argument),
        },
    )


def _overrides_text(told: Any) -> str:
    if told is None or isinstance(told, Mapping):
        return canonical_text(told or {}, "hf_overrides")
    try:
        return canonical_text(json.loads(told), "hf_overrides")
    except (ValueError, TypeError) as error:
        raise space_error("json_model_override_args: is not JSON, so it cannot be read") from error


def _parallel_text(argument: Callable[[str], Any]) -> str:
    dcp = argument("dcp_size") or 1
    sizes = {
        "tp": argument("tp_size"),
        "pp": argument("pp_size"),
        "dcp": dcp,
        "interleave": argument("page_size") if dcp != 1 else 1,
    }
    attention_dp = argument("dp_size") if argument("enable_dp_attention") else 1
    if attention_dp != 1:  # each attention group holds all heads of its requests
        sizes["attention_dp"] = attention_dp
    return canonical_text({name: whole_setting(size, f"parallel {name}") for name, size in sizes.items()}, "parallel")


def _groups(model_config: Any, told: Sequence[Sequence[str]] | None) -> list[list[str]]:
    if told is not None:
        return groups_or_refused(told, "kv_groups")
    full = optional(model_config, "full_attention_layer_ids", _MODEL)
    sliding = optional(model_config, "swa_attention_layer_ids", _MODEL)
    if full is None and sliding is None:
        layers = whole_setting(setting(model_config, "num_hidden_layers", _MODEL, ()), "num_hidden_layers")
        return [[f"layers.{layer}" for layer in range(layers)]]
    return groups_or_refused(
        [[f"layers.{layer}" for layer in group] for group in (full, sliding) if group], "kv_groups"
    )


def _draft_text(argument: Callable[[str], Any]) -> str:
    algorithm = argument("speculative_algorithm")
    if algorithm is None or str(algorithm).upper() in TOKEN_DRAFTERS:
        return canonical_text(None, "draft_model")
    draft = {
        "method": algorithm,
        "model": argument("speculative_draft_model_path"),
        "revision": argument("speculative_draft_model_revision"),
    }
    return canonical_text(draft, "draft_model")
