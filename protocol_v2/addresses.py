"""What an address looks like, on both sides."""

from __future__ import annotations

import re
from typing import Final

from protocol_v2.errors import LocalProtocolError, LocalTypeError

WANTED: Final = "ipc://PATH or tcp://HOST:PORT"

_TCP: Final = re.compile(r"tcp://.+:(?:([0-9]{1,5})|\*)", re.ASCII)
_MAX_PORT: Final = 65_535


def is_address(text: str) -> bool:
    """Whether a text is an address: libzmq takes a port modulo 65536, and so would listen where nobody looks."""
    if text.startswith("ipc://"):
        return len(text) > len("ipc://")
    match = _TCP.fullmatch(text)
    return match is not None and int(match[1] or 0) <= _MAX_PORT


def checked_address(address: object, what: str) -> str:
    """An address as it was given.

    Args:
        address: what was given.
        what: as which argument, for the message.

    Raises:
        LocalTypeError: no text.
        LocalProtocolError: neither ``ipc://`` nor ``tcp://``, or a port that there is none of.
    """
    if not isinstance(address, str):
        raise LocalTypeError(f"{what}: got {type(address).__name__}, wanted {WANTED}")
    if not is_address(address):
        raise LocalProtocolError(f"{what}: got {address[:256]!r}, wanted {WANTED}")
    return address
