"""The protocol without sockets: frames in, events out; events in, frames out; time is an argument.

`ClientConnection` and `ServerConnection` share one state table (`state.py`), one framing and one table of pending
requests; a server has one connection per peer identity. Nothing here waits, reads a clock or knows a socket.

The one receive entry point, `receive_frames`, gives events or raises `RemoteProtocolError`, whatever the bytes were;
any other exception is a bug. One bad message costs one request: a server sends `error_reply(error)`, which is addressed
where an id could be read and empty where not, and goes on. Only a message that this direction does not have (a welcome
from a client, a request from a server) ends the connection in ERROR; its owner then calls `close` and makes another.

`now` is seconds of a monotonic clock, never decreasing. Source: docs/spec/wire-2.md, "Sessions".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from protocol_v2.codes import ErrorCode, code_name
from protocol_v2.errors import LocalProtocolError, RemoteProtocolError
from protocol_v2.frames import NO_DIGEST, SHORT_DIGEST_BYTES, Frame, Prelude, payload_bytes
from protocol_v2.state import Input, SessionState, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol_v2.events import Event, Outgoing
    from protocol_v2.hello import Limits
    from protocol_v2.messages import Message
    from protocol_v2.negotiation import Agreement


@dataclass(frozen=True, slots=True)
class Pending:
    """A request without its reply."""

    message: Message
    deadline: float


@dataclass(frozen=True, slots=True)
class Session:
    """What a hello and its welcome made."""

    agreement: Agreement
    limits: Limits
    digest: bytes


class Connection(ABC):
    """What both sides share; see `ClientConnection` and `ServerConnection`."""

    def __init__(self) -> None:
        self._state = SessionState()
        self._session: Session | None = None
        self._pending: dict[int, Pending] = {}
        self._hello: tuple[int, bytes] | None = None
        self._last_heard = -math.inf
        self._ignored = 0

    @property
    def state(self) -> State:
        """Where the session stands."""
        return self._state.state

    @property
    def agreement(self) -> Agreement | None:
        """What was agreed; None without an open session."""
        return None if self._session is None else self._session.agreement

    @property
    def transcript(self) -> bytes | None:
        """The 32-byte digest that names the session; None without an open one."""
        return None if self._session is None else self._session.digest

    @property
    def pending(self) -> int:
        """Requests without a reply."""
        return len(self._pending)

    @property
    def pending_ids(self) -> tuple[int, ...]:
        """Their ids, in the order in which they came."""
        return tuple(self._pending)

    def awaits(self, request_id: int, message: Message) -> bool:
        """Whether this very request, as it was received, is without a reply, and somebody waits for one.

        An id alone does not tell: after another hello a peer may use it again.
        """
        pending = self._pending.get(request_id)
        return pending is not None and pending.message is message

    @property
    def ignored(self) -> int:
        """Messages dropped by id so far: late, repeated, or an answer to nothing."""
        return self._ignored

    @property
    def last_heard(self) -> float:
        """When the peer last sent a message of this session or opened one; minus infinity before that."""
        return self._last_heard

    @abstractmethod
    def receive_frames(self, frames: Sequence[Frame], now: float) -> list[Event]:
        """Take one multipart message in.

        Args:
            frames: its frames, without the peer identity that ROUTER puts in front; may be views of the receiver's
                memory, which the payload of an event then is too.
            now: seconds, monotonic.

        Returns:
            What it means, in order; nothing for a message that is dropped by id.

        Raises:
            RemoteProtocolError: the peer broke the rules.
        """

    @abstractmethod
    def send(self, event: Outgoing, now: float) -> list[Frame]:
        """The frames of a message to send; register what is sent.

        Args:
            event: what to say.
            now: seconds, monotonic.

        Returns:
            Frames; none where nobody waits for the message any more.

        Raises:
            LocalProtocolError: this must not be said, at all or now. Bad values leave everything as it was; a breach of
                the state table ends in ERROR.
            QueueFullError: too many requests are pending; nothing changed.
        """

    @abstractmethod
    def expire(self, now: float) -> list[Event]:
        """Let time pass: fail what has waited too long. Call it at `next_timeout`, or at any time."""

    @abstractmethod
    def next_timeout(self) -> float | None:
        """When `expire` will next have something to do; None for never."""

    @abstractmethod
    def lose(self, reason: str) -> list[Event]:
        """The transport is gone: end the session, fail what is pending."""

    @abstractmethod
    def close(self) -> list[Event]:
        """End for good; what is pending fails. Idempotent. Messages that still come in are ignored."""

    def _check_receivable(self) -> bool:
        """False if the message is to be ignored."""
        if self.state is State.CLOSED:
            self._ignored += 1
            return False
        if self.state is State.ERROR:
            raise RemoteProtocolError(ErrorCode.UNEXPECTED, "the connection has failed; a new one is needed")
        return True

    def _violation(self, prelude: Prelude, who: str) -> NoReturn:
        self._state.step(Input.VIOLATION)
        raise RemoteProtocolError(
            ErrorCode.UNEXPECTED,
            f"{code_name(prelude.code)}: a {who} never sends this",
            request_id=prelude.request_id,
        )

    def _short_digest(self) -> bytes:
        return NO_DIGEST if self._session is None else self._session.digest[:SHORT_DIGEST_BYTES]

    def _earliest_deadline(self) -> float:
        return min((one.deadline for one in self._pending.values()), default=math.inf)

    def _overdue(self, now: float) -> list[int]:
        return [request_id for request_id, one in self._pending.items() if one.deadline <= now]


def check_payload(
    message: Message,
    payload: Sequence[Frame],
    limits: Limits,
    error: type[LocalProtocolError | RemoteProtocolError],
) -> None:
    """The payload frames are those that the message announces, and not too many bytes."""
    code, problem = ErrorCode.MALFORMED, _payload_problem(message, payload)
    total = payload_bytes(payload) + message.shared_bytes()
    if problem is None and total > limits.max_payload_bytes:
        code = ErrorCode.TOO_LARGE
        problem = f"payload: got {total} bytes, wanted at most {limits.max_payload_bytes}; name fewer chunks at once"
    if problem is None:
        return
    if issubclass(error, RemoteProtocolError):
        raise error(code, problem)
    raise LocalProtocolError(problem)


def _payload_problem(message: Message, payload: Sequence[Frame]) -> str | None:
    what, place = code_name(message.code), 0
    for place, nbytes in enumerate(message.payload_sizes(), 1):
        if place > len(payload):
            return f"{what}: got {len(payload)} payload frames, wanted more"
        got = memoryview(payload[place - 1]).nbytes
        if got != nbytes:
            return f"{what}: got {got} bytes in payload frame {place - 1}, wanted {nbytes}"
    if place != len(payload):
        return f"{what}: got {len(payload)} payload frames, wanted {place}"
    return None


def finite(moment: float) -> float | None:
    """A moment, or None for one that never comes."""
    return None if moment == math.inf else moment
