"""The protocol without sockets: frames in, events out; events in, frames out; time is an argument.

`ClientConnection` and `ServerConnection` share one state table (`state.py`), one framing and one table of pending
requests; a server has one connection per peer identity. Nothing here waits, reads a clock or knows a socket.

The one receive entry point, `receive_frames`, gives events or raises `RemoteProtocolError`, whatever the bytes were; any
other exception is a bug. One bad message costs one request: a server sends `error_reply(error)`, which is addressed where
an id could be read and empty where not, and goes on. Only a message that this direction does not have (a welcome from a
client, a request from a server) ends the connection in ERROR; its owner then calls `close` and makes another.

`now` is seconds of a monotonic clock, never decreasing. Source: docs/spec/wire-2.md, "Sessions".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, cast

from protocol_v2.body import encode
from protocol_v2.codes import HANDSHAKE_CODES, REPLY_CODES, REQUEST_CODES, Code, ErrorCode, RefusalCode, code_name
from protocol_v2.errors import (
    MAX_ERROR_TEXT,
    ClientClosedError,
    HandshakeError,
    LocalProtocolError,
    ProtocolError,
    QueueFullError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerError,
    SessionLostError,
    is_retriable,
)
from protocol_v2.events import (
    AnswerHello,
    Established,
    HelloReceived,
    HelloTimedOut,
    Refused,
    ReplyReceived,
    RequestFailed,
    RequestReceived,
    RequestsDropped,
    SayHello,
    SendError,
    SendReply,
    SendRequest,
    SessionLost,
)
from protocol_v2.frames import (
    MAX_DEADLINE_MS,
    MAX_ID,
    NO_DIGEST,
    SHORT_DIGEST_BYTES,
    Envelope,
    Frame,
    Prelude,
    join,
    payload_bytes,
    split,
)
from protocol_v2.hello import (
    TRANSCRIPT_BYTES,
    Hello,
    Limits,
    Refusal,
    Welcome,
    decode_hello,
    decode_refusal,
    decode_welcome,
    encode_hello,
    transcript_digest,
)
from protocol_v2.identity import space_from_wire, space_to_wire
from protocol_v2.messages import (
    MESSAGES,
    ErrorReply,
    Message,
    PingReply,
    Reply,
    Request,
    decode_message,
    encode_message,
)
from protocol_v2.negotiation import Agreement, ClientTerms, Offer, ServerTerms, check_welcome
from protocol_v2.state import Input, SessionState, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keying import KeySpace
    from protocol_v2.events import Event, Outgoing

MAX_REMEMBERED: Final = 1024
"""Ids of answered requests that a server remembers, to ignore a message that a link repeats."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request without its reply."""

    message: Message
    deadline: float


@dataclass(frozen=True, slots=True)
class _Session:
    """What a hello and its welcome made."""

    agreement: Agreement
    limits: Limits
    digest: bytes


class Connection(ABC):
    """What both sides share; see `ClientConnection` and `ServerConnection`."""

    def __init__(self) -> None:
        self._state = SessionState()
        self._session: _Session | None = None
        self._pending: dict[int, _Pending] = {}
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
            frames: its frames, without the peer identity that ROUTER puts in front; may be views of the receiver's memory,
                which the payload of an event then is too.
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
            LocalProtocolError: this must not be said, at all or now. Bad values leave everything as it was; a breach of the
                state table ends in ERROR.
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
        return _finite(min(ends))

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
        session = cast("_Session", self._session)
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
        _check_payload(event.message, event.payload, limits, LocalProtocolError)
        prelude = Prelude(
            event.message.code,
            event.request_id,
            min(math.ceil(timeout * 1000), MAX_DEADLINE_MS),
            self._short_digest(),
        )
        frames = join(prelude, encode_message(event.message), event.payload)
        self._state.step(Input.REQUEST)
        self._pending[event.request_id] = _Pending(event.message, now + timeout)
        return frames

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
                "transcript: the server's digest is not over what was said and heard here; something between changed it",
                field="transcript",
            )
        self._state.step(Input.WELCOME)
        self._hello = None
        self._session = _Session(agreement, welcome.limits, digest)
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
        prelude, session = envelope.prelude, cast("_Session", self._session)
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
                raise RemoteProtocolError(
                    ErrorCode.UNEXPECTED,
                    f"{code_name(prelude.code)}: does not answer {code_name(request.code)}, or says more than was asked",
                    request_id=prelude.request_id,
                )
            _check_payload(message, envelope.payload, session.limits, RemoteProtocolError)
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
        return self._last_heard + cast("_Session", self._session).limits.silence_ms / 1000


class ServerConnection(Connection):
    """The side that answers; one per peer identity.

    Args:
        terms: what it says of itself.
    """

    def __init__(self, terms: ServerTerms) -> None:
        super().__init__()
        self._terms = terms
        self._greeting: HelloReceived | None = None
        self._answered: OrderedDict[int, None] = OrderedDict()

    @property
    def space(self) -> KeySpace | None:
        """The space that the client's keys are derived in; None for tools, and before a hello."""
        return None if self._greeting is None else self._greeting.space

    @property
    def client_boot_id(self) -> bytes | None:
        """The client's boot id; None before a hello."""
        return None if self._greeting is None else self._greeting.boot_id

    def receive_frames(self, frames: Sequence[Frame], now: float) -> list[Event]:
        """See `Connection.receive_frames`."""
        if not self._check_receivable():
            return []
        limits = self._terms.limits
        envelope = split(frames, max_payload_bytes=limits.max_payload_bytes)
        prelude = envelope.prelude
        if prelude.code == Code.HELLO:
            return self._receive_hello(envelope, now)
        if prelude.code in HANDSHAKE_CODES | REPLY_CODES or prelude.code == Code.ERROR:
            self._violation(prelude, "client")
        session = self._session
        if session is None or prelude.digest != self._short_digest():
            self._state.step(Input.STALE)
            raise RemoteProtocolError(
                ErrorCode.SESSION_UNKNOWN,
                "the message belongs to no session of this server; say hello",
                request_id=prelude.request_id,
            )
        self._last_heard = now
        if prelude.request_id in self._pending or prelude.request_id in self._answered:
            self._ignored += 1
            return []
        try:
            if len(self._pending) >= limits.max_pending:
                raise RemoteProtocolError(
                    ErrorCode.BUSY, f"{len(self._pending)} requests of this client are pending; wait for one"
                )
            message = decode_message(prelude.code, envelope.body, wire=session.agreement.wire)
            _check_payload(message, envelope.payload, limits, RemoteProtocolError)
        except RemoteProtocolError as error:
            error.request_id = prelude.request_id
            raise
        self._state.step(Input.REQUEST)
        deadline = now + min(prelude.deadline_ms or limits.default_deadline_ms, limits.max_deadline_ms) / 1000
        self._pending[prelude.request_id] = _Pending(message, deadline)
        return [RequestReceived(prelude.request_id, deadline, cast("Request", message), envelope.payload)]

    def send(self, event: Outgoing, now: float) -> list[Frame]:  # noqa: ARG002  (the server's messages start no timer)
        """See `Connection.send`."""
        match event:
            case AnswerHello():
                return self._send_answer(event)
            case SendReply():
                return self._send_reply(event)
            case SendError():
                return self._send_error(event)
        raise LocalProtocolError(f"{type(event).__name__}: a server never sends this")

    def error_reply(self, error: RemoteProtocolError) -> list[Frame]:
        """The frames that tell the peer what it did wrong.

        A hello is answered with a refusal, which every version can read. Nothing where no id could be read, or after `close`.
        """
        if error.request_id is None or self.state is State.CLOSED:
            return []
        if isinstance(error, HandshakeError):
            refusal = Refusal(
                code=error.refusal_code,
                message=str(error),
                field=error.field,
                accepted=self._terms.offer.to_wire(),
            )
            return join(Prelude(Code.REFUSAL, error.request_id), encode(refusal))
        digest = NO_DIGEST if error.error_code == ErrorCode.SESSION_UNKNOWN else self._short_digest()
        return self._error_frames(
            error.request_id, error.error_code, str(error), is_retriable(error.error_code), digest
        )

    def expire(self, now: float) -> list[Event]:
        """See `Connection.expire`."""
        if self._session is not None and self._silence_ends() <= now:
            return self._lost("the client was silent for too long")
        return self._drop(self._overdue(now))

    def next_timeout(self) -> float | None:
        """See `Connection.next_timeout`."""
        return _finite(min(self._earliest_deadline(), math.inf if self._session is None else self._silence_ends()))

    def lose(self, reason: str) -> list[Event]:
        """See `Connection.lose`."""
        return self._lost(reason) if self.state is State.OPEN else []

    def close(self) -> list[Event]:
        """See `Connection.close`."""
        self._state.step(Input.CLOSE)
        self._session = self._hello = None
        return self._drop(list(self._pending))

    def _receive_hello(self, envelope: Envelope, now: float) -> list[Event]:
        request_id = envelope.prelude.request_id
        try:
            if envelope.payload:
                raise HandshakeError(RefusalCode.HELLO_MALFORMED, "hello: has payload frames; a hello has none")
            hello, unknown = decode_hello(envelope.body)
            greeting = HelloReceived(
                request_id,
                Offer.of_hello(hello),
                None if hello.space is None else space_from_wire(hello.space),
                hello.boot,
                hello.role,
                hello.software,
                unknown,
            )
        except HandshakeError as error:
            error.request_id = request_id
            raise
        events: list[Event] = []
        if self.state is State.OPEN:
            events += [SessionLost("the client said hello again"), *self._drop(list(self._pending))]
        self._state.step(Input.HELLO)
        self._session = None
        self._hello = (request_id, bytes(envelope.header))
        self._greeting = greeting
        self._answered.clear()
        self._last_heard = now
        return [*events, greeting]

    def _send_answer(self, event: AnswerHello) -> list[Frame]:
        if self._hello is None or self._hello[0] != event.request_id:
            return []
        hello_header = self._hello[1]
        if isinstance(event.answer, Refusal):
            frames = join(Prelude(Code.REFUSAL, event.request_id), encode(event.answer))
            self._state.step(Input.REFUSAL)
        else:
            frames = self._open(event.request_id, event.answer, hello_header)
        self._hello = None
        return frames

    def _open(self, request_id: int, welcome: Welcome, hello_header: bytes) -> list[Frame]:
        if welcome.wire not in MESSAGES:
            raise LocalProtocolError(f"welcome: wire {welcome.wire} is none that this code speaks: {list(MESSAGES)}")
        frames = join(Prelude(Code.WELCOME, request_id), encode(welcome))
        digest = transcript_digest(hello_header, frames[2])
        self._state.step(Input.WELCOME)
        agreement = Agreement(welcome.wire, welcome.schema, frozenset(welcome.features))
        self._session = _Session(agreement, welcome.limits, digest)
        return [*frames, digest]

    def _send_reply(self, event: SendReply) -> list[Frame]:
        pending = self._pending.get(event.request_id)
        if pending is None:
            return []
        if not event.message.answers(pending.message):
            raise LocalProtocolError(
                f"{code_name(event.message.code)}: does not answer {code_name(pending.message.code)}, "
                "or says more than was asked"
            )
        _check_payload(event.message, event.payload, self._terms.limits, LocalProtocolError)
        prelude = Prelude(event.message.code, event.request_id, digest=self._short_digest())
        frames = join(prelude, encode_message(event.message), event.payload)
        self._settle(event.request_id)
        return frames

    def _send_error(self, event: SendError) -> list[Frame]:
        if event.request_id not in self._pending:
            return []
        retriable = is_retriable(event.error) if event.retriable is None else event.retriable
        frames = self._error_frames(event.request_id, event.error, event.message, retriable, self._short_digest())
        self._settle(event.request_id)
        return frames

    def _error_frames(self, request_id: int, code: int, text: str, retriable: bool, digest: bytes) -> list[Frame]:
        reply = ErrorReply(error=int(code), message=text[:MAX_ERROR_TEXT], retriable=retriable)
        return join(Prelude(Code.ERROR, request_id, digest=digest), encode_message(reply))

    def _settle(self, request_id: int) -> None:
        """A request has its one reply."""
        self._state.step(Input.REPLY)
        del self._pending[request_id]
        self._remember(request_id)

    def _remember(self, request_id: int) -> None:
        self._answered[request_id] = None
        if len(self._answered) > MAX_REMEMBERED:
            self._answered.popitem(last=False)

    def _lost(self, reason: str) -> list[Event]:
        self._state.step(Input.LOSS)
        self._session = None
        return [SessionLost(reason), *self._drop(list(self._pending))]

    def _drop(self, request_ids: list[int]) -> list[Event]:
        for request_id in request_ids:
            del self._pending[request_id]
            self._remember(request_id)
        return [RequestsDropped(tuple(request_ids))] if request_ids else []

    def _silence_ends(self) -> float:
        return self._last_heard + self._terms.limits.silence_ms / 1000


def _check_payload(
    message: Message,
    payload: Sequence[Frame],
    limits: Limits,
    error: type[LocalProtocolError | RemoteProtocolError],
) -> None:
    """The payload frames are those that the message announces, and not too many bytes."""
    problem = _payload_problem(message, payload)
    total = payload_bytes(payload)
    if problem is None and total > limits.max_payload_bytes:
        problem = f"payload: got {total} bytes, wanted at most {limits.max_payload_bytes}; ask for fewer chunks at once"
    if problem is None:
        return
    if issubclass(error, RemoteProtocolError):
        raise error(ErrorCode.MALFORMED, problem)
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


def _finite(moment: float) -> float | None:
    return None if moment == math.inf else moment
