"""The frames of LMCache 0.5.6 over ZMQ, both directions, without a socket.

    request     uid | operation | payload ...
    answer      uid | operation | value                   both repeated as they came; no third frame for nil
    stream      uid | empty | "ack" or "cancel"           from a client that subscribed

Every frame is one msgpack value; a struct is a map by field name. Servers of the release answer nothing when they
cannot decode a message or fail at it, and drop unknown fields of a key. Here an undecodable message is a `V1WireError`
that carries the answer which ends the client's waiting, wherever one can be told, and an unknown field is refused.

Sizes are looked at before anything is decoded, nothing is executed, and no message names a salt, a token or a payload.

Source: docs/spec/v1-formats.md, "Wire"; LMCache 0.5.6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import msgspec

from compat.errors import CompatError
from compat.v1.operations import BY_CODE, NO_ANSWER, OPERATIONS, V1Key, V1Operation

Frame: TypeAlias = bytes | memoryview

MAX_ID_BYTES: Final = 9
"""Bytes of a request's uid: the longest msgpack integer. Real clients count from 0 and send 1 to 5."""

MAX_OPERATION_BYTES: Final = 66
"""Bytes of an operation: the longest name has 42."""

MAX_KEY_BYTES: Final = 12 * 2**20
"""Bytes of a key map: `MAX_TOKENS` ids of five bytes, and room for the rest."""

MAX_SMALL_BYTES: Final = 64 * 2**10
"""Bytes of any payload that is neither a key nor tensors."""

MAX_REPORT_BYTES: Final = 16 * 2**20
"""Bytes of a block report, which is dropped unread."""

MAX_DATA_BYTES: Final = 4 * 2**30
"""Bytes of pickled tensors in one message, before the reader's own bounds."""

_LIMITS: Final[dict[Any, int]] = {V1Key: MAX_KEY_BYTES, msgspec.Raw: MAX_REPORT_BYTES, memoryview: MAX_DATA_BYTES}
_DECODERS: Final[dict[V1Operation, tuple[tuple[msgspec.msgpack.Decoder[Any], int], ...]]] = {
    operation: tuple((msgspec.msgpack.Decoder(kind), _LIMITS.get(kind, MAX_SMALL_BYTES)) for kind in spec.payloads)
    for operation, spec in OPERATIONS.items()
    if spec.payloads is not None
}
_REPLY_DECODERS: Final = {
    operation: msgspec.msgpack.Decoder(spec.reply)
    for operation, spec in OPERATIONS.items()
    if spec.payloads is not None
}
_UID: Final = msgspec.msgpack.Decoder(int)
_OPERATION: Final = msgspec.msgpack.Decoder(int | str)
_ENCODER: Final = msgspec.msgpack.Encoder()


class V1Refusal(StrEnum):
    """Why a message was refused; a short word for counters."""

    MALFORMED = "malformed"
    UNKNOWN_OPERATION = "unknown_operation"
    NOT_SERVED = "not_served"
    WRONG_ARITY = "wrong_arity"
    TOO_LARGE = "too_large"
    STREAM_CONTROL = "stream_control"


class V1WireError(CompatError):
    """A v1 message that is not carried out.

    Attributes:
        refusal: why.
        answer: frames that end the client's waiting, or None where no answer can be told and silence is all there is.
        operation: what was asked, where that is known.
    """

    def __init__(
        self,
        refusal: V1Refusal,
        message: str,
        *,
        answer: list[Frame] | None = None,
        operation: V1Operation | None = None,
    ) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.answer = answer
        self.operation = operation


@dataclass(frozen=True, slots=True)
class V1Request:
    """One request, decoded.

    Attributes:
        uid: the client's number of it.
        operation: what is asked.
        payloads: as many as the operation has; optional ones may be missing. Tensor data is a view of its frame.
        envelope: the first two frames, to be repeated in the answer.
    """

    uid: int
    operation: V1Operation
    payloads: tuple[Any, ...]
    envelope: tuple[bytes, bytes]


def decode_request(frames: Sequence[Frame]) -> V1Request:
    """A request from a v1 client.

    Args:
        frames: the multipart message, without the peer identity that ROUTER puts in front.

    Raises:
        V1WireError: anything that the operation's own client would not send. Its ``answer``, if any, is to be sent.
    """
    if len(frames) < 2:
        raise V1WireError(V1Refusal.MALFORMED, f"request: got {len(frames)} frames, wanted a uid and an operation")
    envelope = _envelope(frames)
    uid = _decoded(_UID, envelope[0], "uid")
    if not envelope[1]:
        raise V1WireError(V1Refusal.STREAM_CONTROL, "request: flow control of a stream that does not exist")
    operation = _operation(envelope[1])
    payloads = frames[2:]
    try:
        return V1Request(uid, operation, _payloads(operation, payloads), envelope)
    except V1WireError as error:
        error.operation = operation
        # A 0.5.0-0.5.2 client asks for the chunk size by 18 and no payload; an answer of another type ends its thread.
        if payloads or error.refusal is not V1Refusal.WRONG_ARITY:
            error.answer = _failure(operation, envelope)
        raise


def encode_answer(request: V1Request, value: object) -> list[Frame]:
    """The frames of an answer.

    Args:
        request: that is answered.
        value: of the operation's reply type; None for nil.
    """
    return _answer(request.envelope, value)


def encode_failure(request: V1Request) -> list[Frame] | None:
    """The frames that say, in the operation's own type, that it was not done; None where no value would do."""
    return _failure(request.operation, request.envelope)


def encode_request(uid: int, operation: V1Operation, *payloads: object) -> list[Frame]:
    """The frames of a request to a v1 server.

    Args:
        uid: a number of the client's own, ``0 <= uid < 2**63``.
        operation: one that every server of the series numbers alike, or that the peer is known to have.
        payloads: its payloads.

    Raises:
        CompatError: the operation is not served by this codec, or has another number of payloads.
    """
    spec = OPERATIONS[operation]
    if spec.payloads is None or spec.code is None:
        raise CompatError(f"{operation}: is not spoken here")
    if not len(spec.payloads) - spec.optional <= len(payloads) <= len(spec.payloads):
        raise CompatError(f"{operation}: got {len(payloads)} payloads, wanted {len(spec.payloads)}")
    if not 0 <= uid < 2**63:
        raise CompatError("uid: wanted a number in [0, 2**63)")
    return [_ENCODER.encode(uid), _ENCODER.encode(spec.code), *map(_ENCODER.encode, payloads)]


def decode_answer(frames: Sequence[Frame], operation: V1Operation) -> tuple[int, Any]:
    """Uid and value of a v1 server's answer to an operation.

    Raises:
        V1WireError: it is no answer to that operation, or its value has another type.
    """
    if len(frames) not in {2, 3}:
        raise V1WireError(V1Refusal.MALFORMED, f"answer: got {len(frames)} frames, wanted 2 or 3")
    envelope = _envelope(frames)
    uid = _decoded(_UID, envelope[0], "uid")
    if _operation(envelope[1]) is not operation or operation not in _REPLY_DECODERS:
        raise V1WireError(V1Refusal.MALFORMED, f"answer: is to another operation than {operation}", operation=operation)
    limit = MAX_DATA_BYTES if operation is V1Operation.PREPARE_RETRIEVE else MAX_SMALL_BYTES
    value = frames[2] if len(frames) == 3 else b"\xc0"
    if len(value) > limit:
        raise V1WireError(V1Refusal.TOO_LARGE, f"answer: got {len(value)} bytes, at most {limit}", operation=operation)
    return uid, _decoded(_REPLY_DECODERS[operation], value, str(operation))


def _envelope(frames: Sequence[Frame]) -> tuple[bytes, bytes]:
    uid, operation = frames[:2]
    if len(uid) > MAX_ID_BYTES or len(operation) > MAX_OPERATION_BYTES:
        raise V1WireError(
            V1Refusal.MALFORMED,
            f"envelope: got {len(uid)} and {len(operation)} bytes, at most {MAX_ID_BYTES} and {MAX_OPERATION_BYTES}",
        )
    return bytes(uid), bytes(operation)


def _operation(frame: bytes) -> V1Operation:
    wanted = _decoded(_OPERATION, frame, "operation")
    known = BY_CODE.get(wanted) if isinstance(wanted, int) else V1Operation._value2member_map_.get(wanted)
    if not isinstance(known, V1Operation):
        raise V1WireError(
            V1Refusal.UNKNOWN_OPERATION,
            f"operation: got {str(wanted)[:64]!r}, which LMCache 0.5.6 has not; the type of its answer is unknown",
        )
    return known


def _payloads(operation: V1Operation, frames: Sequence[Frame]) -> tuple[Any, ...]:
    decoders = _DECODERS.get(operation)
    if decoders is None:
        raise V1WireError(V1Refusal.NOT_SERVED, f"{operation}: is not served here")
    if not len(decoders) - OPERATIONS[operation].optional <= len(frames) <= len(decoders):
        raise V1WireError(
            V1Refusal.WRONG_ARITY, f"{operation}: got {len(frames)} payloads, wanted {len(decoders)} of them"
        )
    for place, (frame, (_, limit)) in enumerate(zip(frames, decoders, strict=False)):
        if len(frame) > limit:
            raise V1WireError(
                V1Refusal.TOO_LARGE, f"{operation}: payload {place} has {len(frame)} bytes, at most {limit}"
            )
    return tuple(
        _decoded(decoder, frame, f"{operation}: payload {place}")
        for place, (frame, (decoder, _)) in enumerate(zip(frames, decoders, strict=False))
    )


def _decoded(decoder: msgspec.msgpack.Decoder[Any], frame: Frame, what: str) -> Any:
    try:
        return decoder.decode(frame)
    except msgspec.ValidationError as error:  # names a field and a bound, never a value
        raise V1WireError(V1Refusal.MALFORMED, f"{what}: {str(error)[:300]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise V1WireError(V1Refusal.MALFORMED, f"{what}: is not one msgpack value of the right type") from None


def _failure(operation: V1Operation, envelope: tuple[bytes, bytes]) -> list[Frame] | None:
    failure = OPERATIONS[operation].failure
    return None if failure is NO_ANSWER else _answer(envelope, failure)


def _answer(envelope: tuple[bytes, bytes], value: object) -> list[Frame]:
    return [*envelope] if value is None else [*envelope, _ENCODER.encode(value)]
