"""TensorRT-LLM: the space of a deployment from the arguments of an ``LLM``.

Read from the public source of 2025 and 2026 (``llmapi/llm_args.py``).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keying.engines.configuration import (
    canonical_text,
    causal_or_refused,
    group_digest,
    groups_or_refused,
    known,
    model_revision_of,
    resolved_kv_dtype,
    rope_text,
    setting,
    whole_setting,
)
from keying.engines.reading import optional
from keying.engines.tensors import dtype_name
from keying.space import KeySpace

_ARGS = "tensorrt_llm LlmArgs"


def space_from_tensorrt_llm(
    llm_args: Any,
    *,
    pretrained_config: Any,
    chunk_size: int,
    kv_groups: Sequence[Sequence[str]],
    mm_config: Mapping[str, Any] | None,
    max_model_len: int | None = None,
    kv_dtype: str | None = None,
    model_revision: str | None = None,
    kv_layout: str = "",
    causal: bool = True,
    absent: Collection[str] = (),
) -> KeySpace:
    """The space of a deployment.

    Args:
        llm_args: ``TorchLlmArgs``, as a connector's constructor gets it.
        pretrained_config: the model's own configuration (``ModelConfig.pretrained_config``): gives ``rope``.
        chunk_size: tokens in a chunk of the cache; it need not be ``tokens_per_block``.
        kv_groups: ordered layer names of each layer group.
        mm_config: options of the input processor that change media, or None where there are none: the arguments do not
            hold them in one place.
        max_model_len: the resolved length, where ``max_seq_len`` is None.
        kv_dtype: the resolved element type, where ``kv_cache_config.dtype`` says ``auto``.
        model_revision: commit or digest of the weights, where the arguments name a branch.
        kv_layout: name of the layout in which the connector stores chunks.
        causal: False declares a model whose KV depends on later positions outside of media spans.
        absent: attributes that this TensorRT-LLM version is declared not to have; they count as not used.

    Raises:
        SpaceError: a value cannot be read or has no canonical text.
        UncacheableRequest: the model is not causal, so no request of it has a key.
    """

    def argument(name: str) -> Any:
        return setting(llm_args, name, _ARGS, absent)

    text_config = (
        setting(pretrained_config, "text_config", "model configuration", ("text_config",)) or pretrained_config
    )
    encoder = setting(pretrained_config, "is_encoder_decoder", "model configuration", ("is_encoder_decoder",))
    causal_or_refused({"causal=False": not causal, "is_encoder_decoder": bool(encoder)}, pretrained_config, text_config)
    quant = argument("quant_config")
    algorithms = {
        name: None if quant is None else setting(quant, name, "tensorrt_llm QuantConfig", absent)
        for name in ("quant_algo", "kv_cache_quant_algo")
    }
    cache = known(argument("kv_cache_config"), f"{_ARGS}.kv_cache_config")
    dtype = dtype_name(known(argument("dtype"), f"{_ARGS}.dtype"))
    if dtype == "auto":  # the checkpoint's own type
        own = setting(pretrained_config, "torch_dtype", "model configuration", ("torch_dtype",)) or setting(
            pretrained_config, "dtype", "model configuration", ("dtype",)
        )
        dtype = dtype_name(known(own, "model configuration dtype"))
    length = argument("max_seq_len") if max_model_len is None else max_model_len
    return KeySpace(
        _model_name(known(argument("model"), f"{_ARGS}.model")),
        chunk_size=chunk_size,
        kv_dtype=resolved_kv_dtype(
            kv_dtype,
            setting(cache, "dtype", "tensorrt_llm KvCacheConfig", absent),
            dtype,
            scheme=algorithms["kv_cache_quant_algo"] is not None,
            engine=_ARGS,
        ),
        model_revision=model_revision
        if model_revision is not None
        else model_revision_of(pretrained_config, argument("revision")),
        kv_layout=kv_layout,
        attributes={
            "quantization": canonical_text({"method": algorithms, "dtype": dtype}, "quantization"),
            "rope": rope_text(text_config, pretrained_config),
            "max_model_len": canonical_text(whole_setting(length, "max_seq_len"), "max_model_len"),
            "hf_overrides": canonical_text(optional(llm_args, "model_kwargs", _ARGS) or {}, "hf_overrides"),
            "mm_config": canonical_text(mm_config, "mm_config"),
            "parallel": _parallel_text(argument),
            "kv_groups": group_digest(groups_or_refused(kv_groups, "kv_groups")),
            "draft_model": _draft_text(argument("speculative_config")),
        },
    )


def _model_name(model: Any) -> Any:
    return str(model) if hasattr(model, "__fspath__") else model


def _parallel_text(argument: Callable[[str], Any]) -> str:
    context = argument("context_parallel_size")
    layout = argument("cp_config")
    parallel: dict[str, Any] = {
        "tp": whole_setting(argument("tensor_parallel_size"), "parallel tp"),
        "pp": whole_setting(argument("pipeline_parallel_size"), "parallel pp"),
        "dcp": whole_setting(context, "parallel dcp"),
        "interleave": 1 if context == 1 or not layout else layout,
    }
    if argument("enable_attention_dp"):  # each rank holds all heads of its requests
        parallel["attention_dp"] = True
    return canonical_text(parallel, "parallel")


def _draft_text(speculative: Any) -> str:
    if speculative is None:
        return canonical_text(None, "draft_model")
    model = optional(speculative, "speculative_model", _ARGS) or optional(speculative, "speculative_model_dir", _ARGS)
    draft = {
        "method": optional(speculative, "decoding_type", _ARGS) or type(speculative).__name__,
        "model": None if model is None else str(model),
    }
    return canonical_text(draft, "draft_model")
