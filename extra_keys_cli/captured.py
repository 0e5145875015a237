"""Requests captured from a real vLLM engine, as objects with the engine's own attribute names.

The file's README describes its fields. The objects go through `keying.engines` like any live request, so the demo
derives keys in the one way there is.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """One request: a label in words, the engine's facts, and the request as the engine handed it over."""

    label: str
    model: str
    dtype: str
    request: Any


def default_file() -> Path:
    """The captured requests that come with the command."""
    return Path(__file__).parent / "data" / "vllm_requests.jsonl"


def read_captured(path: Path) -> list[CapturedRequest]:
    """All requests of a file, in order.

    Raises:
        typer.BadParameter: no such file, or a line that is not one of these requests.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path}: no text; wanted a JSON object a line") from None
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(_request(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise typer.BadParameter(f"{path}, line {number}: not a captured request ({error!r})") from None
    if not requests:
        raise typer.BadParameter(f"{path}: holds no requests")
    return requests


def _request(fields: dict[str, Any]) -> CapturedRequest:
    lora = fields["lora"]
    request = SimpleNamespace(
        request_id=fields["request_id"],
        prompt_token_ids=fields["prompt_token_ids"],
        all_token_ids=fields["prompt_token_ids"],
        num_tokens=len(fields["prompt_token_ids"]),
        num_prompt_tokens=len(fields["prompt_token_ids"]),
        cache_salt=fields["cache_salt"],
        lora_request=lora
        and SimpleNamespace(lora_name=lora["name"], lora_int_id=lora["int_id"], lora_path=lora["path"]),
        prompt_embeds=None,
        prompt_is_token_ids=None,
        mm_features=[
            SimpleNamespace(
                modality=item["modality"],
                identifier=item["identifier"],
                mm_hash=item["mm_hash"],
                mm_position=SimpleNamespace(offset=item["offset"], length=item["length"], is_embed=item["is_embed"]),
                data=None,
            )
            for item in fields["mm_features"]
        ],
    )
    return CapturedRequest(fields["label"], fields["model"], fields["dtype"], request)
