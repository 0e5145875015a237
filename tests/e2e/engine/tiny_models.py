"""Tiny random models and adapters for a real engine, built on this machine in seconds; needs torch and transformers.

Text (``llama``), images (``llava``, whose picture is 64 tokens; ``qwen2vl``, with positions in three dimensions, also
videos) and two KV groups (``gemma3``). Weights are wide (initializer range 0.5), so that outputs vary with their input:
what is computed on wrong KV then shows in the log-probabilities.

Facts about the engine that shape them: head sizes are one of a list (32, 64, ...); transformers 5 saves CLIP weights as
``vision_tower.X`` where vLLM 0.32 reads ``vision_tower.vision_model.X``; Gemma 3's tokenizer needs line breaks.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 512
PICTURE = 112
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,
}


def build_model(name: str, folder: Path) -> None:
    """Write a model, its tokenizer and its processor; the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    _BUILDERS[name](folder)


def build_adapter(model: Path, folder: Path, seed: int) -> None:
    """Write a LoRA adapter with random weights, as PEFT saves one."""
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    prefix = "base_model.model.model." + ("language_model." if "text_config" in config else "")
    widths = {"q_proj": text["num_attention_heads"] * head, "v_proj": text["num_key_value_heads"] * head}
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(text["num_hidden_layers"]):
        for module, width in widths.items():
            key = f"{prefix}layers.{layer}.self_attn.{module}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, text["hidden_size"], generator=chance)
            weights[f"{key}.lora_B.weight"] = torch.randn(width, 8, generator=chance)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(widths),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _tokenizer(special: Sequence[str] | Mapping[str, str] = ()) -> Any:
    """One word a token; `special` may name attributes of the tokenizer."""
    names = list(special.values()) if isinstance(special, Mapping) else list(special)
    words = ["<unk>", "<s>", "</s>", "<pad>", *names]
    words += [f"w{place}" for place in range(len(words), VOCABULARY)]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=dict(special) if isinstance(special, Mapping) else names,
    )


def _save(model: Any, folder: Path) -> None:
    model.to(torch.float32).save_pretrained(folder)
    file = folder / "model.safetensors"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.") if "vision_model." not in name else name: weight
        for name, weight in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def _llama(folder: Path) -> None:
    _save(tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT)), folder)
    _tokenizer().save_pretrained(folder)


def _llava(folder: Path) -> None:
    tokenizer = _tokenizer(["<image>"])
    vision = tf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=PICTURE,
        patch_size=14,
        projection_dim=32,
        initializer_range=0.5,
    )
    config = tf.LlavaConfig(
        vision_config=vision,
        text_config=tf.LlamaConfig(**TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=64,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    _save(tf.LlavaForConditionalGeneration(config), folder)
    tf.LlavaProcessor(
        image_processor=tf.CLIPImageProcessor(
            size={"shortest_edge": PICTURE}, crop_size={"height": PICTURE, "width": PICTURE}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def _qwen2vl(folder: Path) -> None:
    names = [f"<|{word}|>" for word in ("im_start", "im_end", "vision_start", "vision_end", "vision_pad")]
    tokenizer = _tokenizer([*names, "<|image_pad|>", "<|video_pad|>"])
    token = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = tf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope, "model_type": "qwen2_vl_text"},
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "initializer_range": 0.5,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    _save(tf.Qwen2VLForConditionalGeneration(config), folder)
    tf.Qwen2VLProcessor(
        image_processor=tf.Qwen2VLImageProcessor(
            min_pixels=56 * 56, max_pixels=224 * 224, patch_size=14, merge_size=2, temporal_patch_size=2
        ),
        tokenizer=tokenizer,
        video_processor=tf.Qwen2VLVideoProcessor(),
    ).save_pretrained(folder)


def _gemma3(folder: Path) -> None:
    special = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image_soft>"}
    breaks = {f"break{count}": "\n" * count for count in range(1, 5)}
    tokenizer = _tokenizer({**special, **breaks})
    token = tokenizer.convert_tokens_to_ids
    text = {name: value for name, value in TEXT.items() if name != "tie_word_embeddings"}
    text |= {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 32,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PICTURE,
        "patch_size": 14,
    }
    config = tf.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=16,
        boi_token_index=token("<boi>"),
        eoi_token_index=token("<eoi>"),
        image_token_index=token("<image_soft>"),
    )
    _save(tf.Gemma3ForConditionalGeneration(config), folder)
    tf.Gemma3Processor(
        image_processor=tf.Gemma3ImageProcessor(size={"height": PICTURE, "width": PICTURE}),
        tokenizer=tokenizer,
        image_seq_length=16,
    ).save_pretrained(folder)


_BUILDERS: dict[str, Callable[[Path], None]] = {
    "llama": _llama,
    "llava": _llava,
    "qwen2vl": _qwen2vl,
    "gemma3": _gemma3,
}
