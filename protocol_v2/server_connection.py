"""The server's side of a connection, sans-IO, one per peer identity; see `connection.py`."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, cast

from protocol_v2.body import encode
from protocol_v2.codes import HANDSHAKE_CODES, REPLY_CODES, Code, ErrorCode, RefusalCode, code_name
from protocol_v2.connection import Connection, Pending, Session, check_payload, finite
from protocol_v2.errors import (
    MAX_ERROR_TEXT,
    HandshakeError,
    LocalProtocolError,
    RemoteProtocolError,
    is_retriable,
)
from protocol_v2.events import (
    AnswerHello,
    HelloReceived,
    RequestReceived,
    RequestsDropped,
    SendError,
    SendReply,
    SessionLost,
)
from protocol_v2.frames import NO_DIGEST, Envelope, Frame, Prelude, join, split
from protocol_v2.hello import Refusal, Welcome, decode_hello, transcript_digest
from protocol_v2.identity import space_from_wire
from protocol_v2.messages import MESSAGES, ErrorReply, Request, decode_message, encode_message
from protocol_v2.negotiation import Agreement, Offer, ServerTerms
from protocol_v2.state import Input, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keying import KeySpace
    from protocol_v2.events import Event, Outgoing

MAX_REMEMBERED: Final = 1024
"""Ids of answered requests that a server remembers, to ignore a message that a link repeats."""


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
                raise RemoteProtocolError(  # noqa: TRY301  (one place gives the error its id)
                    ErrorCode.BUSY, f"{len(self._pending)} requests of this client are pending; wait for one"
                )
            message = decode_message(prelude.code, envelope.body, wire=session.agreement.wire)
            check_payload(message, envelope.payload, limits, RemoteProtocolError)
        except RemoteProtocolError as error:
            error.request_id = prelude.request_id
            raise
        self._state.step(Input.REQUEST)
        deadline = now + min(prelude.deadline_ms or limits.default_deadline_ms, limits.max_deadline_ms) / 1000
        self._pending[prelude.request_id] = Pending(message, deadline)
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

        A hello is answered with a refusal, which every version can read. Nothing where no id could be read, or after
        `close`.
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
        return finite(min(self._earliest_deadline(), math.inf if self._session is None else self._silence_ends()))

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
                raise HandshakeError(  # noqa: TRY301  (one place gives the error its id)
                    RefusalCode.HELLO_MALFORMED, "hello: has payload frames; a hello has none"
                )
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
        self._session = Session(agreement, welcome.limits, digest)
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
        check_payload(event.message, event.payload, self._terms.limits, LocalProtocolError)
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
