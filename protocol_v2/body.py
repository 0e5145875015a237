"""Message bodies as bytes: msgpack maps in, msgpack maps out, and one translation of everything that can go wrong.

Facts about msgspec 0.23 that this module stands for: a value of the wrong type or out of its bounds is a
`ValidationError`, bytes that are no msgpack a `DecodeError`, bad UTF-8 a `UnicodeDecodeError`, and deep nesting a
`RecursionError`, even inside a field that is skipped. Of two equal map keys the last wins in silence; two readers could
then see two identities in one message, so duplicates are refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from protocol_v2.frames import Frame

_T = TypeVar("_T")

MAX_MAP_ENTRIES: Final = 256
"""Entries of a map whose names are read one by one."""

MAX_DETAIL: Final = 200
"""Characters kept of a decoder's own words: they may quote a name that the peer made up, never a value."""

_UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_encoder: Final = msgspec.msgpack.Encoder()
_splitter: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def encode(value: Any) -> bytes:
    """A body's bytes.

    Raises:
        LocalProtocolError: a value that msgpack cannot carry.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        # the error of a lone surrogate quotes the text, which may be a salt: its type says enough
        raise LocalProtocolError(f"{type(value).__name__}: cannot be encoded ({type(error).__name__})") from None


def decode(data: Frame, decoder: msgspec.msgpack.Decoder[_T], what: str) -> _T:
    """A body's value.

    Raises:
        RemoteProtocolError: `MALFORMED`, for anything at all that is wrong with the bytes.
    """
    try:
        return decoder.decode(data)
    except _UNREADABLE as error:
        raise RemoteProtocolError(ErrorCode.MALFORMED, f"{what}: {_detail(error)}") from None


def split_map(data: Frame, what: str) -> dict[str, msgspec.Raw]:
    """The entries of a map, undecoded, in order.

    Raises:
        RemoteProtocolError: `MALFORMED`: no map with text names, too many entries, or a name that comes twice.
    """
    count = _map_entries(data)
    if count is None or count > MAX_MAP_ENTRIES:
        raise RemoteProtocolError(
            ErrorCode.MALFORMED, f"{what}: wanted a map of at most {MAX_MAP_ENTRIES} entries with text names"
        )
    entries = decode(data, _splitter, what)
    if len(entries) != count:
        raise RemoteProtocolError(ErrorCode.MALFORMED, f"{what}: a name comes twice; send each once")
    return entries


def _map_entries(data: Frame | msgspec.Raw) -> int | None:
    """Entries that a msgpack map header announces, or None for anything else."""
    head = bytes(memoryview(data)[:5])
    if not head:
        return None
    if 0x80 <= head[0] <= 0x8F:
        return head[0] & 0x0F
    if head[0] == 0xDE:
        return int.from_bytes(head[1:3], "big")
    if head[0] == 0xDF:
        return int.from_bytes(head[1:5], "big")
    return None


def _detail(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):  # its own words quote the bytes
        return "text that is not UTF-8"
    return str(error)[:MAX_DETAIL]
