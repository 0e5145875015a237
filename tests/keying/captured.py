"""Requests captured from a real vLLM engine, as objects with the engine's attribute names."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "examples" / "data" / "vllm_requests.jsonl"


@dataclass(frozen=True)
class Captured:
    """One line of the file: what was asked, of which engine, and the request as its scheduler held it."""

    label: str
    model: str
    dtype: str
    request: Any


def vllm_request(fields: dict[str, Any]) -> Any:
    """One JSON object of the file as a duck-typed ``vllm.v1.request.Request``."""
    lora = fields["lora"]
    tokens = fields["prompt_token_ids"]
    return SimpleNamespace(
        request_id=fields["request_id"],
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        cache_salt=fields["cache_salt"],
        lora_request=lora
        and SimpleNamespace(lora_name=lora["name"], lora_int_id=lora["int_id"], lora_path=lora["path"]),
        prompt_embeds=None,
        prompt_is_token_ids=None,
        mm_features=[
            SimpleNamespace(
                modality=one["modality"],
                identifier=one["identifier"],
                mm_hash=one["mm_hash"],
                mm_position=SimpleNamespace(offset=one["offset"], length=one["length"], is_embed=one["is_embed"]),
                data=None,
            )
            for one in fields["mm_features"]
        ],
    )


@cache
def captured_requests() -> tuple[Captured, ...]:
    """All requests, in the order in which they were sent."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    return tuple(Captured(line["label"], line["model"], line["dtype"], vllm_request(line)) for line in lines)
