"""What an address looks like, on both sides."""

from __future__ import annotations

import re
from typing import Final

from protocol_v2.errors import LocalProtocolError, LocalTypeError

WANTED: Final = "ipc://PATH or tcp://HOST:PORT"

_TCP: Final = re.compile(r"tcp://.+:(?:([0-9]{1,5})|\*)", re.ASCII)
_MAX_PORT: Final = 65_535
_IPC: Final = "ipc://"
MAX_SOCKET_PATH: Final = 107
"""Bytes of a path that a Unix socket can have on Linux (``sun_path`` without its NUL)."""


def is_address(text: str) -> bool:
    """Whether a text is an address: libzmq takes a port modulo 65536, and so would listen where nobody looks."""
    if text.startswith(_IPC):
        return len(text) > len(_IPC)
    match = _TCP.fullmatch(text)
    return match is not None and int(match[1] or 0) <= _MAX_PORT


def checked_address(address: object, what: str) -> str:
    """An address as it was given.

    Args:
        address: what was given.
        what: as which argument, for the message.

    Raises:
        LocalTypeError: no text.
        LocalProtocolError: neither ``ipc://`` nor ``tcp://``, a port that there is none of, or a path that is too long
            for a socket.
    """
    if not isinstance(address, str):
        raise LocalTypeError(f"{what}: got {type(address).__name__}, wanted {WANTED}")
    if not is_address(address):
        raise LocalProtocolError(f"{what}: got {address[:256]!r}, wanted {WANTED}")
    nbytes = len(address.removeprefix(_IPC).encode(errors="surrogatepass"))
    if address.startswith(_IPC) and nbytes > MAX_SOCKET_PATH:
        raise LocalProtocolError(
            f"{what}: got a path of {nbytes} bytes for a socket, wanted at most {MAX_SOCKET_PATH}, which is all that "
            "the operating system takes; choose a shorter one"
        )
    return address
