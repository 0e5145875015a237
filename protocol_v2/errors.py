"""Everything that `protocol_v2` refuses or fails with, by type.

One base, `ProtocolError`. Inside, code raises `LocalProtocolError` when it was misused; what a peer did wrong leaves
the one receive entry point (`Connection.receive_frames`) as `RemoteProtocolError`, with the code to send back. The rest
is what a request can end in. `retriable` says whether the same request may succeed later. Messages name what was got,
what was wanted and what to do; they never contain a salt, a token, a key list or a payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from protocol_v2.codes import RETRIABLE, ErrorCode, RefusalCode, code_name, error_code

if TYPE_CHECKING:
    from protocol_v2.hello import Refusal

MAX_ERROR_TEXT = 512
"""Characters of an error text that travels or is kept; a peer's text is cut to this."""

MAX_SHOWN = 256
"""Characters of a field's name or value that travels in an answer to a hello."""


class ProtocolError(Exception):
    """Base of every error of this package; only subclasses are raised."""

    retriable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        if type(self) is ProtocolError:
            raise TypeError("ProtocolError is a base; raise one of its subclasses")
        super().__init__(message)


class LocalProtocolError(ProtocolError, ValueError):
    """We were misused: a value, a state or an order that this side must not use. Nothing was sent."""


class LocalTypeError(LocalProtocolError, TypeError):
    """We were misused: a value of a wrong type."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules.

    Attributes:
        error_code: what to send back.
        request_id: id of the message at fault, or None where none could be read (then nothing is sent back).
    """

    def __init__(self, error_code: ErrorCode | int, message: str, *, request_id: int | None = None) -> None:
        super().__init__(message[:MAX_ERROR_TEXT])
        self.error_code = error_code
        self.request_id = request_id


class HandshakeError(RemoteProtocolError):
    """A hello or an answer to one that cannot be accepted.

    Attributes:
        refusal_code: what a refusal says.
        field: the field at fault, such as ``space.kv_dtype``.
    """

    def __init__(
        self, refusal_code: RefusalCode, message: str, *, field: str = "", request_id: int | None = None
    ) -> None:
        super().__init__(ErrorCode.MALFORMED, message, request_id=request_id)
        self.refusal_code = refusal_code
        self.field = field[:MAX_SHOWN]


class ServerError(ProtocolError):
    """The server answered the request with an error.

    Attributes:
        error_code: the member, or an int that this code does not know.
        retriable: what the server said, not what we would guess.
    """

    def __init__(self, code: int, message: str, *, retriable: bool) -> None:
        super().__init__(f"server: {code_name(code, ErrorCode)}: {message[:MAX_ERROR_TEXT]}")
        self.error_code = error_code(code)
        self.retriable = retriable  # type: ignore[misc]  # an instance narrows the class's answer


class RequestTimeoutError(ProtocolError, TimeoutError):
    """The deadline passed before a reply came."""

    retriable = True


class ServerUnavailableError(ProtocolError, ConnectionError):
    """No session stands and none can be opened now; the request was not sent."""

    retriable = True


class SessionLostError(ProtocolError, ConnectionError):
    """The session ended before the reply came: the server was restarted, replaced, downgraded, or went silent."""

    retriable = True


class QueueFullError(ProtocolError):
    """A bounded table or queue is full, so this request was not sent."""

    retriable = True


class ClientClosedError(ProtocolError):
    """The client was closed, or is used in a process that did not make it."""


class NegotiationRefusedError(ProtocolError):
    """No session with this server: nothing that both speak, or a space it does not serve.

    Attributes:
        refusal: what was asked, what would be accepted, what differs.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.explain())
        self.refusal = refusal


class SpaceMismatchError(NegotiationRefusedError):
    """The two sides mean different spaces; `refusal.differences` names the fields with both values."""


class UnsupportedServerError(ProtocolError):
    """The server has no `extra_keys/2`, and the policy for such servers is not to use it."""


class UnsharedError(ProtocolError):
    """Shared memory is not there, is not the one that was announced, or a range of it is not: go without."""

    error_code = ErrorCode.UNSHARED


class TensorError(ProtocolError, ValueError):
    """A tensor cannot travel, or received frames do not make the tensors that their description promises."""


def is_retriable(code: int) -> bool:
    """Whether the same request may succeed later, for an error code of ours."""
    return code in RETRIABLE
