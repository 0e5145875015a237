"""What a `Connection` tells its owner, and what its owner tells it to send.

Frozen, and distinct from the structs that travel: an event says what happened, a message is bytes in another form.
Payloads are hidden from `repr`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from keying import KeySpace
    from protocol_v2.codes import ErrorCode
    from protocol_v2.errors import ProtocolError
    from protocol_v2.frames import Frame
    from protocol_v2.hello import Limits, Refusal, SpaceDifference, Unrecognised, Welcome
    from protocol_v2.messages import Reply, Request
    from protocol_v2.negotiation import Agreement, Offer
    from protocol_v2.wire_keys import Keys

# ---- what a client sends


@dataclass(frozen=True, slots=True)
class SayHello:
    """Open a session, or open it anew; what is said comes from the connection's terms.

    Args:
        request_id: from `Connection.new_request_id`.
    """

    request_id: int


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Ask.

    Args:
        request_id: from `Connection.new_request_id`.
        message: what to ask.
        payload: the frames that the message announces.
        timeout: seconds until the request fails; above 0. None: the server's default.
        keys: of a retrieve's lease, from the prompt's first chunk on; None where they are not known. They do not
            travel: only a tunnel to a server without leases has a use for them.
    """

    request_id: int
    message: Request
    payload: tuple[Frame, ...] = field(default=(), repr=False)
    timeout: float | None = None
    keys: Keys | None = field(default=None, repr=False)


# ---- what a client is told


@dataclass(frozen=True, slots=True)
class Established:
    """The session stands.

    Args:
        agreement: wire version, key schema, features.
        limits: what the server holds us to.
        server_boot_id: 16 bytes.
        notice: fields in which the nearest space that the server holds differs from ours.
        unrecognised: what of our hello meant nothing to the server.
        server_software: a label for people.
    """

    agreement: Agreement
    limits: Limits
    server_boot_id: bytes
    notice: tuple[SpaceDifference, ...]
    unrecognised: Unrecognised
    server_software: str


@dataclass(frozen=True, slots=True)
class Refused:
    """No session.

    Args:
        refusal: why.
        by_us: the server agreed, and we did not accept what it chose.
    """

    refusal: Refusal
    by_us: bool = False


@dataclass(frozen=True, slots=True)
class HelloTimedOut:
    """The hello was not answered in time."""


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    """The one reply to a pending request.

    Args:
        request_id: of the request.
        message: the reply.
        payload: its frames, in the sizes that the message announces.
    """

    request_id: int
    message: Reply
    payload: tuple[Frame, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A pending request has ended without a reply that can be used.

    Args:
        request_id: of the request.
        error: why: `ServerError`, `RequestTimeoutError`, `SessionLostError`, or `RemoteProtocolError` for a reply that
            breaks the rules.
    """

    request_id: int
    error: ProtocolError


# ---- what a server sends


@dataclass(frozen=True, slots=True)
class AnswerHello:
    """Accept or decline a hello (`negotiation.answer_hello` decides which)."""

    request_id: int
    answer: Welcome | Refusal


@dataclass(frozen=True, slots=True)
class SendReply:
    """Answer a request. Nothing is sent if nobody waits for it any more."""

    request_id: int
    message: Reply
    payload: tuple[Frame, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class SendError:
    """Answer a request with an error. Nothing is sent if nobody waits for it any more.

    Args:
        request_id: of the request.
        error: why.
        message: one sentence for people, without secrets; cut to 512 characters.
        retriable: None: as the code says.
    """

    request_id: int
    error: ErrorCode
    message: str = ""
    retriable: bool | None = None


# ---- what a server is told


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """A client wants a session; answer with `AnswerHello`.

    Args:
        request_id: to answer to.
        offer: what the client can and accepts.
        space: the client's space, or None for tools.
        boot_id: 16 bytes.
        role: a label.
        software: a label.
        unknown_fields: names in the hello that this version does not know.
    """

    request_id: int
    offer: Offer
    space: KeySpace | None
    boot_id: bytes
    role: str
    software: str
    unknown_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A request of the open session.

    Args:
        request_id: to answer to.
        deadline: after this, by the clock of `now`, nobody waits for the reply.
        message: what is asked.
        payload: its frames, in the sizes that the message announces.
    """

    request_id: int
    deadline: float
    message: Request
    payload: tuple[Frame, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class RequestsDropped:
    """Nobody waits for these requests any more: deadline passed, or their session ended. Work on them may stop."""

    request_ids: tuple[int, ...]


# ---- what both are told


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session has ended without farewell. A client says hello again; a server frees what the session held."""

    reason: str


Outgoing: TypeAlias = SayHello | SendRequest | AnswerHello | SendReply | SendError
Event: TypeAlias = (
    Established
    | Refused
    | HelloTimedOut
    | ReplyReceived
    | RequestFailed
    | HelloReceived
    | RequestReceived
    | RequestsDropped
    | SessionLost
)
