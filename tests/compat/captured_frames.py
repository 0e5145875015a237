"""The exchange captured from the released server: each request in frames, and what came back."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_SIZE = 4
"""Of the server that the exchange was captured from."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer.

    Args:
        op: name of the operation.
        request: frames.
        response: frames; None where only the size of the frame was kept.
    """

    op: str
    request: tuple[bytes, ...]
    response: tuple[bytes | None, ...]


def captured_exchanges() -> list[Exchange]:
    """In the order they were captured."""
    path = Path(__file__).parents[1] / "vectors" / "lmcache-0.5.6-wire.json"
    captured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [
        Exchange(
            one["op"],
            tuple(bytes.fromhex(frame) for frame in one["request_frames_hex"]),
            tuple(None if "<" in frame else bytes.fromhex(frame) for frame in one["response_frames_hex"]),
        )
        for one in captured["exchange"]
    ]
