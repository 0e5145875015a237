"""Duck-typed requests and configurations of each engine: complete, so that a test takes away or changes one thing."""

from array import array
from collections.abc import Callable, Sequence
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest

from keying import ChunkKey, KeySpace, UncacheableRequest, chunk_keys
from keying.engines import AdapterSource, EngineInputs, UncacheableReason

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
PICTURE = "a" * 64
OTHER_PICTURE = "b" * 64


def keys(inputs: EngineInputs, space: KeySpace = SPACE) -> list[ChunkKey]:
    """Chunk keys of a request."""
    return chunk_keys(space, inputs.tokens, inputs.extra_keys)


def digests(inputs: EngineInputs) -> list[bytes]:
    """Their digests."""
    return [key.digest for key in keys(inputs)]


def refused(expected: UncacheableReason, call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The message of a refusal, which has this reason."""
    with pytest.raises(UncacheableRequest) as caught:
        call(*args, **kwargs)
    assert str(expected) == caught.value.reason
    assert expected is UncacheableReason(caught.value.reason)
    return str(caught.value)


def revision_of(source: AdapterSource) -> str:
    """A revision that follows from the path alone."""
    return f"sha256:{source.path}"


def vllm_feature(identifier: Any = PICTURE, offset: Any = 5, length: Any = 4, **fields: Any) -> Any:
    """A ``MultiModalFeatureSpec``."""
    position = SimpleNamespace(offset=offset, length=length, is_embed=None)
    known = {"identifier": identifier, "mm_hash": identifier, "mm_position": position, "modality": "image"}
    return SimpleNamespace(**(known | fields))


def vllm_lora(name: Any = "sql", path: Any = "/adapters/sql", number: int = 1) -> Any:
    """A ``LoRARequest``."""
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number)


def vllm_request(**fields: Any) -> Any:
    """A ``Request`` of 16 text tokens, of vLLM 0.32."""
    tokens = fields.pop("all_token_ids", list(range(100, 116)))
    known: dict[str, Any] = {
        "request_id": "0-ab",
        "all_token_ids": tokens,
        "prompt_token_ids": tokens,
        "num_prompt_tokens": len(tokens) if tokens is not None else 0,
        "mm_features": [],
        "cache_salt": None,
        "lora_request": None,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
    }
    return SimpleNamespace(**(known | fields))


def without(owner: Any, *names: str) -> Any:
    """The same object without attributes."""
    return SimpleNamespace(**{name: value for name, value in vars(owner).items() if name not in names})


class Modality(Enum):
    """SGLang's."""

    IMAGE = auto()
    VIDEO = auto()
    AUDIO = auto()


IMAGE_TOKEN = 151_655
PADS = (1_000_000 + 2**61, 1_000_001 + 2**60, 1_000_002 + 2**59, 1_000_003)


def sglang_item(
    identity: bytes | None = b"\x01" * 32, offsets: Any = ((5, 8),), modality: Modality = Modality.IMAGE, **fields: Any
) -> Any:
    """A ``MultimodalDataItem``; offsets name the last position, inclusive."""
    known = {
        "modality": modality,
        "hash": 0x0123456789ABCDEF,
        "pad_value": PADS[0],
        "pad_values": PADS,
        "offsets": list(offsets) if offsets is not None else None,
        "identity": identity,
    }
    return SimpleNamespace(**(known | fields))


def sglang_inputs(items: Any, **fields: Any) -> Any:
    """``MultimodalInputs``."""
    known = {"mm_items": items, "im_token_id": IMAGE_TOKEN, "video_token_id": None, "audio_token_id": None}
    return SimpleNamespace(**(known | fields))


def sglang_req(**fields: Any) -> Any:
    """A ``Req`` of 12 prompt tokens and 4 generated ones, of SGLang 0.5.23."""
    known: dict[str, Any] = {
        "rid": "r",
        "origin_input_ids": array("q", range(100, 112)),
        "output_ids": array("q", range(112, 116)),
        "multimodal_inputs": None,
        "lora_id": None,
        "extra_key": None,
        "cache_salt": None,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "token_type_ids": None,
        "multi_item_delimiter_indices": None,
        "beam_group": None,
        "dllm_config": None,
        "vocab_size": 152_064,
    }
    return SimpleNamespace(**(known | fields))


def padded(items: Sequence[Any], n_tokens: int = 12) -> "array[int]":
    """Prompt tokens with each item's pad values in its runs, as the engine writes them."""
    tokens = list(range(100, 100 + n_tokens))
    for item in items:
        for first, last in item.offsets:
            width = last - first + 1
            tokens[first : last + 1] = [item.pad_values[place % len(item.pad_values)] for place in range(width)]
    return array("q", tokens)


HASH_WORDS = (0x01020304, 0x05060708, -1, 0, 0x21222324, 0x25262728, 0x31323334, -(2**31))


def trt_request(tokens: Sequence[int] = tuple(range(100, 116)), **fields: Any) -> Any:
    """An ``LlmRequest`` of 16 text tokens, with the layout attributes of the version of early 2026."""
    known: dict[str, Any] = {
        "get_tokens": lambda beam: [list(tokens)][beam],
        "orig_prompt_len": len(tokens),
        "multimodal_hashes": None,
        "multimodal_positions": None,
        "multimodal_lengths": None,
        "multimodal_uuids": None,
        "multimodal_embedding": None,
        "py_multimodal_data": None,
        "lora_task_id": None,
        "lora_weights": None,
        "lora_config": None,
        "py_lora_path": None,
        "cache_salt": None,
        "cache_salt_id": None,
        "prompt_embedding_table": None,
        "position_ids": None,
        "sampling_config": SimpleNamespace(beam_width=1),
    }
    return SimpleNamespace(**(known | fields))


def vllm_config(**fields: Any) -> Any:
    """A ``VllmConfig``; names with a dot change a part of it, such as ``model_config.max_model_len``."""
    hf_config = SimpleNamespace(
        rope_theta=10000.0, rope_scaling={"rope_type": "yarn", "factor": 4}, max_position_embeddings=32768
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            dtype="bfloat16",
            quantization=None,
            max_model_len=8192,
            hf_overrides={},
            hf_config=hf_config,
            hf_text_config=hf_config,
            multimodal_config=None,
            is_encoder_decoder=False,
            attn_type="decoder",
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        speculative_config=None,
        diffusion_config=None,
    )
    return changed(config, fields)


KV_CACHE_CONFIG = SimpleNamespace(
    kv_cache_groups=[SimpleNamespace(layer_names=["l.0", "l.1"]), SimpleNamespace(layer_names=["l.2"])]
)


def sglang_config(**fields: Any) -> Any:
    """``args`` (``ServerArgs``) and ``model`` (``ModelConfig``) of one deployment."""
    hf_config = SimpleNamespace(rope_theta=10000.0, max_position_embeddings=32768)
    config = SimpleNamespace(
        args=SimpleNamespace(
            model_path="org/model",
            revision=None,
            quantization=None,
            quantization_param_path=None,
            kv_cache_dtype="auto",
            json_model_override_args="{}",
            mm_process_config={},
            tp_size=1,
            pp_size=1,
            dcp_size=1,
            dp_size=1,
            enable_dp_attention=False,
            page_size=64,
            speculative_algorithm=None,
            speculative_draft_model_path=None,
            speculative_draft_model_revision=None,
            dllm_algorithm=None,
        ),
        model=SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=hf_config,
            dtype="bfloat16",
            context_len=8192,
            num_hidden_layers=2,
            is_encoder_decoder=False,
            swa_attention_layer_ids=None,
            full_attention_layer_ids=None,
        ),
    )
    return changed(config, fields)


def trt_config(**fields: Any) -> Any:
    """``args`` (``TorchLlmArgs``) and ``model`` (the pretrained configuration) of one deployment."""
    config = SimpleNamespace(
        args=SimpleNamespace(
            model="org/model",
            revision=None,
            dtype="bfloat16",
            quant_config=None,
            kv_cache_config=SimpleNamespace(dtype="auto"),
            max_seq_len=8192,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            context_parallel_size=1,
            cp_config={},
            enable_attention_dp=False,
            speculative_config=None,
        ),
        model=SimpleNamespace(rope_theta=10000.0, max_position_embeddings=32768),
    )
    return changed(config, fields)


MISSING = object()


def changed(config: Any, fields: dict[str, Any]) -> Any:
    """A configuration with parts changed by dotted name; `MISSING` takes the attribute away."""
    for name, value in fields.items():
        *way, last = name.split(".")
        owner = config
        for step in way:
            owner = getattr(owner, step)
        if value is MISSING:
            delattr(owner, last)
        else:
            setattr(owner, last, value)
    return config
