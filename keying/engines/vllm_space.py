"""vLLM: the space of a deployment from a ``VllmConfig``.

Read from the released 0.32 (``config/``, ``v1/kv_cache_interface.py``).
"""

from collections.abc import Callable, Collection, Sequence
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

_CONFIG = "vllm VllmConfig"

MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
"""Fields of ``MultiModalConfig`` that change what is computed; cache sizes, limits, transport and profiling do not."""

TOKEN_DRAFTERS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Speculation without a model: it has no KV of its own and changes nobody's."""


def space_from_vllm(
    vllm_config: Any,
    *,
    chunk_size: int,
    kv_cache_config: Any = None,
    kv_groups: Sequence[Sequence[str]] | None = None,
    kv_dtype: str | None = None,
    model_revision: str | None = None,
    kv_layout: str = "",
    hf_overrides: str | None = None,
    causal: bool = True,
    absent: Collection[str] = (),
) -> KeySpace:
    """The space of a deployment, from the configuration that the engine hands to its connector.

    Args:
        vllm_config: ``vllm.config.VllmConfig``, after the engine resolved it.
        chunk_size: tokens in a chunk of the cache; it need not be the engine's block size.
        kv_cache_config: ``KVCacheConfig``, the connector's third argument: its groups give ``kv_groups``.
        kv_groups: ordered layer names of each group, where there is no ``kv_cache_config``.
        kv_dtype: resolved element type, where the configuration does not say (a checkpoint with its own KV scheme) or
            the platform has another one.
        model_revision: commit or digest of the weights, where the configuration names a branch.
        kv_layout: name of the layout in which the connector stores chunks.
        hf_overrides: what an override function does, in words of the operator; needed where it is a function.
        causal: False declares a model whose KV depends on later positions outside of media spans.
        absent: attributes that this vLLM version is declared not to have; they count as not used.

    Raises:
        SpaceError: a value cannot be read or has no canonical text.
        UncacheableRequest: the model is not causal, so no request of it has a key.
    """

    def read(owner: Any, name: str) -> Any:
        return setting(owner, name, _CONFIG, absent)

    model = known(read(vllm_config, "model_config"), f"{_CONFIG}.model_config")
    cache = known(read(vllm_config, "cache_config"), f"{_CONFIG}.cache_config")
    hf_config = known(read(model, "hf_config"), f"{_CONFIG}.model_config.hf_config")
    text_config = setting(model, "hf_text_config", _CONFIG, ("hf_text_config",)) or hf_config
    _refuse_non_causal(vllm_config, model, hf_config, text_config, kv_cache_config, causal=causal)
    dtype = dtype_name(known(read(model, "dtype"), f"{_CONFIG}.model_config.dtype"))
    skipped = optional(cache, "kv_cache_dtype_skip_layers", _CONFIG) or []
    quantization = {
        "method": read(model, "quantization"),
        "dtype": dtype,
        "settings": optional(model, "quantization_config", _CONFIG),
        "kv_skip_layers": list(skipped) or None,
    }
    attributes = {
        "quantization": canonical_text(quantization, "quantization"),
        "rope": rope_text(text_config, hf_config),
        "max_model_len": canonical_text(whole_setting(read(model, "max_model_len"), "max_model_len"), "max_model_len"),
        "hf_overrides": _overrides_text(read(model, "hf_overrides"), hf_overrides),
        "mm_config": _media_text(read(model, "multimodal_config")),
        "parallel": _parallel_text(known(read(vllm_config, "parallel_config"), f"{_CONFIG}.parallel_config"), read),
        "kv_groups": group_digest(_groups(kv_cache_config, kv_groups)),
        "draft_model": _draft_text(read(vllm_config, "speculative_config"), read),
    }
    name = known(read(model, "model"), f"{_CONFIG}.model_config.model")
    return KeySpace(
        name,
        chunk_size=chunk_size,
        kv_dtype=resolved_kv_dtype(
            kv_dtype, read(cache, "cache_dtype"), dtype, scheme=brings_kv_scheme(hf_config), engine=_CONFIG
        ),
        model_revision=model_revision
        if model_revision is not None
        else model_revision_of(hf_config, optional(model, "revision", _CONFIG)),
        kv_layout=kv_layout,
        attributes=attributes,
    )


def _refuse_non_causal(
    vllm_config: Any, model: Any, hf_config: Any, text_config: Any, kv_cache_config: Any, *, causal: bool
) -> None:
    kind = optional(model, "attn_type", _CONFIG)
    causal_or_refused(
        {
            "causal=False": not causal,
            "is_encoder_decoder": bool(optional(model, "is_encoder_decoder", _CONFIG)),
            "is_diffusion": bool(optional(model, "is_diffusion", _CONFIG)),
            "diffusion_config": optional(vllm_config, "diffusion_config", _CONFIG) is not None,
            "attn_type": kind in {"encoder_only", "encoder", "encoder_decoder"},
            "kv_cache_spec.non_causal": any(
                optional(spec, "non_causal", _CONFIG) for spec in _kv_cache_specs(kv_cache_config)
            ),
        },
        hf_config,
        text_config,
    )


def _kv_cache_specs(kv_cache_config: Any) -> list[Any]:
    """What the layers say of their KV: only there does vLLM tell of a prefix-LM layer."""
    specs: list[Any] = []
    for group in optional(kv_cache_config, "kv_cache_groups", _CONFIG) or ():
        spec = optional(group, "kv_cache_spec", _CONFIG)
        inner = optional(spec, "kv_cache_specs", _CONFIG)  # layers of one kind with sizes of their own
        specs += [spec] if inner is None else inner.values()
    return specs


def _overrides_text(overrides: Any, told: str | None) -> str:
    if told is not None:
        return canonical_text({"declared": told}, "hf_overrides")
    if callable(overrides):
        raise space_error(
            "hf_overrides: is a function, whose effect cannot be read; hand in hf_overrides=... in your own words"
        )
    return canonical_text(overrides or {}, "hf_overrides")


def _media_text(config: Any) -> str:
    if config is None:
        return canonical_text(None, "mm_config")
    values = {name: optional(config, name, _CONFIG) for name in MEDIA_SETTINGS}
    if not values["video_pruning_rate"]:  # a method without a rate prunes nothing
        values["video_pruning_method"] = values["video_pruning_rate"] = None
    return canonical_text({name: value for name, value in values.items() if value not in (None, {})}, "mm_config")


def _parallel_text(parallel: Any, read: Callable[[Any, str], Any]) -> str:
    interleave = optional(parallel, "cp_kv_cache_interleave_size", _CONFIG)
    if interleave is None:
        interleave = read(parallel, "dcp_kv_cache_interleave_size")
    sizes = {
        "tp": read(parallel, "tensor_parallel_size"),
        "pp": read(parallel, "pipeline_parallel_size"),
        "dcp": _one_if_none(read(parallel, "decode_context_parallel_size")),
        "interleave": _one_if_none(interleave),
    }
    prefill = optional(parallel, "prefill_context_parallel_size", _CONFIG)
    if prefill not in (None, 1):
        sizes["pcp"] = prefill
    return canonical_text({name: whole_setting(size, f"parallel {name}") for name, size in sizes.items()}, "parallel")


def _one_if_none(value: Any) -> Any:
    """A size that a version is declared not to have is 1."""
    return 1 if value is None else value


def _groups(kv_cache_config: Any, kv_groups: Sequence[Sequence[str]] | None) -> list[list[str]]:
    if kv_cache_config is None:
        return groups_or_refused(kv_groups, "kv_cache_config (the connector's third argument) or kv_groups")
    groups = known(setting(kv_cache_config, "kv_cache_groups", "vllm KVCacheConfig", ()), "kv_cache_groups")
    return groups_or_refused(
        [setting(group, "layer_names", "vllm KVCacheGroupSpec", ()) for group in groups], "kv_cache_groups"
    )


def _draft_text(speculative: Any, read: Callable[[Any, str], Any]) -> str:
    if speculative is None or read(speculative, "method") in TOKEN_DRAFTERS:
        return canonical_text(None, "draft_model")
    draft = {
        "method": read(speculative, "method"),
        "model": read(speculative, "model"),
        "revision": optional(speculative, "revision", _CONFIG),
        "quantization": optional(speculative, "quantization", _CONFIG),
    }
    return canonical_text(draft, "draft_model")
