"""The client's side of a connection, sans-IO; see `connection.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from protocol_v2.codes import REQUEST_CODES, Code, ErrorCode, RefusalCode, code_name
from protocol_v2.connection import Connection, Pending, Session, check_payload, finite
from protocol_v2.errors import (
    ClientClosedError,
    HandshakeError,
    LocalProtocolError,
    ProtocolError,
    QueueFullError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerError,
    SessionLostError,
)
from protocol_v2.events import (
    Established,
    HelloTimedOut,
    Refused,
    ReplyReceived,
    RequestFailed,
    SayHello,
    SendRequest,
    SessionLost,
)
from protocol_v2.frames import MAX_DEADLINE_MS, Envelope, Frame, Prelude, join, split
from protocol_v2.hello import (
    TRANSCRIPT_BYTES,
    Hello,
    Limits,
    Refusal,
    decode_refusal,
    decode_welcome,
    encode_hello,
    transcript_digest,
)
from protocol_v2.identity import space_to_wire
from protocol_v2.messages import ErrorReply, Message, PingReply, Reply, decode_message, encode_message
from protocol_v2.negotiation import ClientTerms, check_welcome
from protocol_v2.state import Input, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol_v2.events import Event, Outgoing


class ClientConnection(Connection):
    """The side that asks.

    Args:
        terms: what it says of itself.
    """

    def __init__(self, terms: ClientTerms) -> None:
        super().__init__()
        self._terms = terms
        self._next_id = 1
        self._hello_deadline = math.inf
        self._server_boot_id: bytes | None = None

    @property
    def limits(self) -> Limits | None:
        """What the server holds us to; None without an open session."""
        return None if self._session is None else self._session.limits

    def new_request_id(self) -> int:
        """An id that this connection has not used."""
        request_id = self._next_id
        self._next_id += 1
        return request_id

    def receive_frames(self, frames: Sequence[Frame], now: float) -> list[Event]:
        """See `Connection.receive_frames`."""
        if not self._check_receivable():
            return []
        most = TRANSCRIPT_BYTES if self._session is None else self._session.limits.max_payload_bytes
        try:
            envelope = split(frames, max_payload_bytes=max(most, TRANSCRIPT_BYTES))
        except RemoteProtocolError as error:
            if error.request_id in self._pending:
                return [self._fail(error.request_id, error)]
            raise
        prelude = envelope.prelude
        if prelude.code in REQUEST_CODES or prelude.code == Code.HELLO:
            self._violation(prelude, "server")
        if self._hello is not None and prelude.request_id == self._hello[0]:
            return self._receive_answer(envelope, now)
        if prelude.request_id in self._pending:
            return self._receive_reply(envelope, now)
        self._ignored += 1
        return []

    def send(self, event: Outgoing, now: float) -> list[Frame]:
        """See `Connection.send`."""
        match event:
            case SayHello():
                return self._send_hello(event, now)
            case SendRequest():
                return self._send_request(event, now)
        raise LocalProtocolError(f"{type(event).__name__}: a client never sends this")

    def abandon(self, request_id: int) -> None:
        """Forget a request that could not be sent, or that nobody waits for; a reply to it is ignored."""
        self._pending.pop(request_id, None)

    def expire(self, now: float) -> list[Event]:
        """See `Connection.expire`."""
        events: list[Event] = []
        if self.state is State.GREETED and self._hello_deadline <= now:
            events += self.lose("the hello was not answered in time")
        if self._session is not None and self._silence_ends() <= now:
            return [*events, *self._lost("the server was silent for too long")]
        events += [self._fail(one, RequestTimeoutError("no reply before the deadline")) for one in self._overdue(now)]
        return events

    def next_timeout(self) -> float | None:
        """See `Connection.next_timeout`."""
        ends = [self._earliest_deadline()]
        if self.state is State.GREETED:
            ends.append(self._hello_deadline)
        if self._session is not None:
            ends.append(self._silence_ends())
        return finite(min(ends))

    def lose(self, reason: str) -> list[Event]:
        """See `Connection.lose`."""
        if self.state is State.GREETED:
            self._state.step(Input.TIMEOUT)
            self._hello = None
            return [HelloTimedOut()]
        return self._lost(reason) if self.state is State.OPEN else []

    def close(self) -> list[Event]:
        """See `Connection.close`."""
        self._state.step(Input.CLOSE)
        self._session = self._hello = None
        return self._fail_all(ClientClosedError("the connection was closed"))

    def _send_hello(self, event: SayHello, now: float) -> list[Frame]:
        if self._pending:
            raise LocalProtocolError("hello: requests are pending; lose the session first, so that they fail")
        terms = self._terms
        hello = Hello(
            wire=tuple(sorted(terms.offer.wire)),
            schemas=tuple(sorted(terms.offer.schemas)),
            features=tuple(sorted(terms.offer.features)),
            space=None if terms.space is None else space_to_wire(terms.space),
            boot=terms.boot_id,
            floor=terms.offer.floor(),
            role=terms.role,
            software=terms.software,
        )
        frames = join(Prelude(Code.HELLO, event.request_id), encode_hello(hello, grease=terms.grease))
        self._state.step(Input.HELLO)
        self._session = None
        self._hello = (event.request_id, bytes(frames[2]))
        self._hello_deadline = now + terms.hello_timeout
        return frames

    def _send_request(self, event: SendRequest, now: float) -> list[Frame]:
        if self._session is None:
            self._state.step(Input.REQUEST)  # not in the table without a session: raises
        session = cast("Session", self._session)
        limits = session.limits
        if event.request_id in self._pending or not 0 < event.request_id < self._next_id:
            raise LocalProtocolError("request_id: wanted one from new_request_id, used once")
        if len(self._pending) >= min(self._terms.max_pending, limits.max_pending):
            raise QueueFullError(f"{len(self._pending)} requests are pending; wait for one, or open another session")
        timeout = limits.default_deadline_ms / 1000 if event.timeout is None else event.timeout
        if not 0 < timeout < math.inf:
            raise LocalProtocolError(f"timeout: got {timeout}, wanted a number of seconds above 0")
        timeout = min(timeout, limits.max_deadline_ms / 1000)
        if event.message.code not in REQUEST_CODES:
            raise LocalProtocolError(f"{code_name(event.message.code)}: a client never sends this")
        check_payload(event.message, event.payload, limits, LocalProtocolError)
        prelude = Prelude(
            event.message.code,
            event.request_id,
            min(math.ceil(timeout * 1000), MAX_DEADLINE_MS),
            self._short_digest(),
        )
        frames = join(prelude, self._checked(event.message, session.agreement.wire), event.payload)
        self._state.step(Input.REQUEST)
        self._pending[event.request_id] = Pending(event.message, now + timeout)
        return frames

    def _checked(self, message: Message, wire: int) -> bytes:
        """The body of a message that the server will be able to read; the bounds are those of the decoder."""
        body = encode_message(message)
        try:
            decode_message(message.code, body, wire=wire)
        except RemoteProtocolError as error:
            raise LocalProtocolError(str(error)) from None
        return body

    def _receive_answer(self, envelope: Envelope, now: float) -> list[Event]:
        """What answers the hello that is pending."""
        request_id, hello_header = cast("tuple[int, bytes]", self._hello)
        try:
            match envelope.prelude.code:
                case Code.WELCOME:
                    return [self._open(envelope, hello_header, now)]
                case Code.REFUSAL:
                    refusal = decode_refusal(envelope.body)
                    return [self._refused(refusal)]
                case Code.ERROR:
                    reply = cast("ErrorReply", decode_message(Code.ERROR, envelope.body, wire=2))
                    text = f"{code_name(reply.error, ErrorCode)}: {reply.message}"
                    return [self._refused(Refusal(code=RefusalCode.HELLO_MALFORMED, message=text))]
        except HandshakeError as error:
            refusal = Refusal(
                code=error.refusal_code,
                message=str(error),
                field=error.field,
                asked=self._terms.offer.to_wire(),
            )
            return [self._refused(refusal, by_us=True)]
        except RemoteProtocolError as error:
            error.request_id = request_id
            raise
        self._ignored += 1
        return []

    def _open(self, envelope: Envelope, hello_header: bytes, now: float) -> Event:
        welcome = decode_welcome(envelope.body)
        agreement = check_welcome(welcome, self._terms)
        digest = transcript_digest(hello_header, envelope.header)
        if len(envelope.payload) != 1 or bytes(envelope.payload[0]) != digest:
            raise HandshakeError(
                RefusalCode.WELCOME_INVALID,
                "transcript: the server's digest is not over what was said and heard here; something meddled",
                field="transcript",
            )
        self._state.step(Input.WELCOME)
        self._hello = None
        self._session = Session(agreement, welcome.limits, digest)
        self._server_boot_id = welcome.boot
        self._last_heard = now
        return Established(
            agreement, welcome.limits, welcome.boot, welcome.notice, welcome.unrecognised, welcome.software
        )

    def _refused(self, refusal: Refusal, *, by_us: bool = False) -> Event:
        self._state.step(Input.REFUSAL)
        self._hello = None
        return Refused(refusal, by_us)

    def _receive_reply(self, envelope: Envelope, now: float) -> list[Event]:
        """What answers a pending request: it is used, or the request fails."""
        prelude, session = envelope.prelude, cast("Session", self._session)
        if prelude.digest != self._short_digest():
            return self._lost("the server answered in another session: restarted, replaced or downgraded")
        self._last_heard = now
        try:
            message = decode_message(prelude.code, envelope.body, wire=session.agreement.wire)
            request = self._pending[prelude.request_id].message
            if isinstance(message, ErrorReply):
                if message.error == ErrorCode.SESSION_UNKNOWN:
                    return self._lost("the server does not know the session")
                self._state.step(Input.REPLY)
                error = ServerError(message.error, message.message, retriable=message.retriable)
                return [self._fail(prelude.request_id, error)]
            if not message.answers(request):
                raise RemoteProtocolError(  # noqa: TRY301  (one place makes a failed request of it)
                    ErrorCode.UNEXPECTED,
                    f"{code_name(prelude.code)}: no answer to {code_name(request.code)}, or more than was asked",
                )
            check_payload(message, envelope.payload, session.limits, RemoteProtocolError)
        except RemoteProtocolError as error:
            error.request_id = prelude.request_id
            return [self._fail(prelude.request_id, error)]
        if isinstance(message, PingReply) and message.boot != self._server_boot_id:
            return self._lost("the server was restarted")
        self._state.step(Input.REPLY)
        del self._pending[prelude.request_id]
        return [ReplyReceived(prelude.request_id, cast("Reply", message), envelope.payload)]

    def _lost(self, reason: str) -> list[Event]:
        self._state.step(Input.LOSS)
        self._session = None
        return [SessionLost(reason), *self._fail_all(SessionLostError(f"session lost: {reason}"))]

    def _fail(self, request_id: int, error: ProtocolError) -> Event:
        del self._pending[request_id]
        return RequestFailed(request_id, error)

    def _fail_all(self, error: ProtocolError) -> list[Event]:
        return [self._fail(request_id, error) for request_id in list(self._pending)]

    def _silence_ends(self) -> float:
        return self._last_heard + cast("Session", self._session).limits.silence_ms / 1000
