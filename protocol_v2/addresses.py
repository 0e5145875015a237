"""What an address looks like, on both sides."""

from __future__ import annotations

import re
from typing import Final

WANTED: Final = "ipc://PATH or tcp://HOST:PORT"

_TCP: Final = re.compile(r"tcp://.+:(?:([0-9]{1,5})|\*)", re.ASCII)
_MAX_PORT: Final = 65_535


def is_address(text: str) -> bool:
    """Whether a text is an address: libzmq takes a port modulo 65536, and so would listen where nobody looks."""
    if text.startswith("ipc://"):
        return len(text) > len("ipc://")
    match = _TCP.fullmatch(text)
    return match is not None and int(match[1] or 0) <= _MAX_PORT
