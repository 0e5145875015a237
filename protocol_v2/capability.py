"""The one question that every server on the port answers alike: which experimental features do you have?

Before the first keyed request on every new connection, a client must know that the server keys on extra keys. It asks
`get_experimental` in the frames of LMCache 0.5.5/0.5.6, where it is operation 32 without payload: a server of this
protocol lists `extra_keys/2`, an LMCache server answers with its own list or stays silent, and none is harmed by it.

    asked       uid (a msgpack int) | 20
    answered    uid                 | 20 | msgpack list of text

Source: docs/spec/wire-2.md, "Capability".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from protocol_v2.body import decode, encode
from protocol_v2.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocol_v2.frames import Frame

CAPABILITY: Final = "extra_keys/2"
"""What a server of this protocol lists."""

GET_EXPERIMENTAL: Final = b"\x20"
MAX_UID_BYTES: Final = 9
MAX_ANSWER_BYTES: Final = 64 * 1024

_names: Final = msgspec.msgpack.Decoder(Annotated[list[str], Meta(max_length=4096)])
_uid: Final = msgspec.msgpack.Decoder(int)


def probe(uid: int) -> list[Frame]:
    """The frames of the question.

    Args:
        uid: u32, chosen by the client; the answer repeats it.
    """
    if not 0 <= uid < 2**32:
        raise LocalProtocolError(f"uid: got {uid}, wanted a number in [0, 2**32)")
    return [encode(uid), GET_EXPERIMENTAL]


def is_probe(frames: Sequence[Frame]) -> bool:
    """Whether a multipart message is the question."""
    return len(frames) == 2 and frames[1] == GET_EXPERIMENTAL and _is_uid(frames[0])


def answer_probe(frames: Sequence[Frame], others: Iterable[str] = ()) -> list[Frame]:
    """The frames of a server's answer to a question that `is_probe`.

    Args:
        frames: the question.
        others: what the server has besides `CAPABILITY`.
    """
    return [bytes(frames[0]), GET_EXPERIMENTAL, encode([CAPABILITY, *others])]


def read_answer(frames: Sequence[Frame], uid: int) -> frozenset[str] | None:
    """What a server listed; None for anything that is no answer to this question."""
    if len(frames) != 3 or len(frames[0]) > MAX_UID_BYTES or len(frames[2]) > MAX_ANSWER_BYTES:
        return None
    if frames[1] != GET_EXPERIMENTAL or not _is_uid(frames[0]):
        return None
    try:
        names: list[str] = decode(frames[2], _names, "get_experimental")
    except RemoteProtocolError:
        return None
    return frozenset(names) if _uid.decode(frames[0]) == uid else None


def _is_uid(frame: Frame) -> bool:
    if len(frame) > MAX_UID_BYTES:
        return False
    try:
        decode(frame, _uid, "uid")
    except RemoteProtocolError:
        return False
    return True
