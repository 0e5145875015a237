"""Keeps a session with one server: connects, asks, says hello, pings, notices loss, backs off and tries again.

Sans-IO like the connection below it: a shell (`client_thread.py`) owns the socket and the clock, reports what happens
to them, and carries out the actions that come back, in order. Time is an argument; chance (for jitter) is handed in.

    DOWN        no socket. At `retry_at` the next attempt begins. CONNECTING  a socket is on its way. PROBING
    connected; asked whether the server keys on extra keys. Nothing keyed is sent before it said so. GREETING    it
    does; hello said. UP          requests flow: by wire protocol 2, or through a tunnel that was injected for servers
    that do not know it. CLOSED      for good.

Circuit breaker. A request while UP is sent at once. While the very first attempt, or the first after a session that had
stood, is under way, requests wait for it, each no longer than its own deadline. Once an attempt has failed they fail at
once until the next one succeeds. A request that times out while nothing at all was heard makes the server *suspect*: it
is pinged, and further requests fail at once until it is heard again; if that ping is not answered either, the session
is given up. So a dead or hung server costs each caller one deadline at most, then misses, not stalls.

A message arrives whole or not at all, and a large one takes its time: while a request is pending that brings payload or
sends it, silence says nothing. Then that request's own deadline decides, and the `silence_ms` of the session.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from protocol_v2.capability import CAPABILITY, probe, read_answer
from protocol_v2.client_connection import ClientConnection
from protocol_v2.codes import RefusalCode
from protocol_v2.errors import (
    ClientClosedError,
    LocalProtocolError,
    NegotiationRefusedError,
    ProtocolError,
    QueueFullError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerUnavailableError,
    SessionLostError,
    SpaceMismatchError,
    UnsharedError,
    UnsupportedServerError,
)
from protocol_v2.events import (
    Established,
    Event,
    HelloTimedOut,
    Refused,
    ReplyReceived,
    RequestFailed,
    SayHello,
    SendRequest,
    SessionLost,
)
from protocol_v2.keeper_actions import CloseSocket, Finish, OpenSocket, Phase, PhaseChanged, Send
from protocol_v2.messages import PingRequest, RetrieveRequest
from protocol_v2.state import State
from protocol_v2.versions import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.foreign import ForeignPolicy, Tunnel
    from protocol_v2.frames import Frame
    from protocol_v2.hello import Limits
    from protocol_v2.keeper_actions import Action
    from protocol_v2.messages import Request
    from protocol_v2.negotiation import ClientTerms
    from protocol_v2.wire_keys import Keys

log = logging.getLogger(__name__)

SHORTEST_HEARTBEAT: Final = 0.1
"""Seconds; a server that wants to be pinged more often is not obeyed."""

SHORT_LIFE: Final = 1.0
"""Seconds; a session that ended sooner counts as a failed attempt, so that a flapping server is not hammered."""

_PING: Final = -1


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what; all in seconds.

    Args:
        connect: for a socket to connect.
        answer: for the answer to the capability question; to a hello see `ClientTerms.hello_timeout`.
        ping: for the answer to a ping.
        first_delay: between the first failed attempt and the next; doubled each time, with jitter.
        longest_delay: at most this.
        refused_delay: after a refusal, or a server that does not know the protocol.
    """

    connect: float = 2.0
    answer: float = 2.0
    ping: float = 2.0
    first_delay: float = 0.05
    longest_delay: float = 5.0
    refused_delay: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < math.inf:
                raise LocalProtocolError(f"{name}: got {getattr(self, name)}, wanted seconds above 0")


@dataclass(slots=True)
class KeeperCounters:
    """What has happened so far."""

    attempts: int = 0
    sessions: int = 0
    lost: int = 0
    refused: int = 0
    space_mismatches: int = 0
    unsupported: int = 0
    timeouts: int = 0
    fast_failures: int = 0
    bad_messages: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for the session."""

    message: Request
    payload: tuple[Frame, ...]
    timeout: float
    deadline: float
    keys: Keys | None


@dataclass(slots=True)
class _Sent:
    """A request that is pending in the session.

    Args:
        ticket: whose it is.
        at: when it was sent, seconds.
        bulky: its payload, or that of its reply, goes through the socket; nothing else is heard meanwhile.
    """

    ticket: int
    at: float
    bulky: bool


@dataclass(slots=True)
class _Live:
    """What there is only while a session stands."""

    speaker: ClientConnection | Tunnel
    limits: Limits
    since: float
    heard: float
    said: float
    suspect: bool = False
    sent: dict[int, _Sent] = field(default_factory=dict)


class SessionKeeper:
    """See the head of the module.

    Args:
        terms: what the client says of itself.
        patience: how long to wait for what.
        on_foreign: asked for a tunnel when the server does not know the protocol; None always bypasses it.
        chance: numbers in [0, 1), for jitter.
    """

    def __init__(
        self,
        terms: ClientTerms,
        *,
        patience: Patience,
        chance: Callable[[], float],
        on_foreign: ForeignPolicy | None = None,
    ) -> None:
        self._terms = terms
        self._patience = patience
        self._chance = chance
        self._on_foreign = on_foreign
        self._actions: deque[Action] = deque()
        self._phase = Phase.DOWN
        self._retry_at = -math.inf
        self._phase_ends = math.inf
        self._failures = 0
        self._uid = 0
        self._connection: ClientConnection | None = None
        self._live: _Live | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._capabilities: frozenset[str] | None = None
        self._established: Established | None = None
        self._failure: ProtocolError | None = None
        self.counters = KeeperCounters()

    @property
    def phase(self) -> Phase:
        """How far we are."""
        return self._phase

    @property
    def failure(self) -> ProtocolError | None:
        """Why there is no session; None while one stands or the first attempt is under way."""
        return self._failure

    @property
    def established(self) -> Established | None:
        """What the last welcome said; None before one, and through a tunnel."""
        return self._established

    @property
    def capabilities(self) -> frozenset[str] | None:
        """What the server last listed; None before it answered."""
        return self._capabilities

    @property
    def limits(self) -> Limits | None:
        """What requests are held to; None without a session."""
        return None if self._live is None else self._live.limits

    @property
    def tunnelled(self) -> bool:
        """Whether the session goes through a tunnel."""
        return self._live is not None and not isinstance(self._live.speaker, ClientConnection)

    @property
    def shares(self) -> bool:
        """Whether a session stands that agreed on shared memory."""
        speaker = None if self._live is None else self._live.speaker
        if not isinstance(speaker, ClientConnection) or speaker.agreement is None:
            return False
        return SHARED_MEMORY in speaker.agreement.features

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + len(self._tickets())

    def take_actions(self) -> list[Action]:
        """What the shell is to do now, in order."""
        taken = list(self._actions)
        self._actions.clear()
        return taken

    # ---- what the shell reports

    def connected(self, now: float) -> None:
        """The socket has connected."""
        if self._phase is Phase.CONNECTING:
            self._uid = (self._uid + 1) % 2**32
            self._enter(Phase.PROBING, now + self._patience.answer)
            self._actions.append(Send(probe(self._uid), None))

    def disconnected(self, reason: str, now: float) -> None:
        """The socket could not connect, or is not connected any more."""
        if self._phase is Phase.UP:
            self._lose(reason, now)
        elif self._phase not in {Phase.DOWN, Phase.CLOSED}:
            self._attempt_failed(ServerUnavailableError(f"no connection: {reason}"), now)

    def received(self, frames: Sequence[Frame], now: float) -> None:
        """A message has come."""
        try:
            if self._phase is Phase.PROBING:
                self._receive_capability(frames, now)
            elif self._phase is Phase.GREETING and self._connection is not None:
                self._greeted(self._connection, self._connection.receive_frames(frames, now), now)
            elif self._live is not None:
                self._live.heard, self._live.suspect = now, False
                self._take_events(self._live.speaker.receive_frames(frames, now), now)
        except RemoteProtocolError as error:
            self.counters.bad_messages += 1
            if self._connection is not None and self._connection.state is State.ERROR:
                self.disconnected(f"the server broke the protocol: {error}", now)

    def unsent(self, ticket: int | None, now: float) -> None:
        """A message could not be sent, as its queue is full."""
        if ticket is None:
            self.disconnected("the queue to the server is full", now)
            return
        self._forget(ticket)
        self._finish(ticket, QueueFullError("the queue to the server is full; the request was not sent"))

    def submit(
        self,
        ticket: int,
        message: Request,
        payload: tuple[Frame, ...],
        timeout: float,
        now: float,
        *,
        keys: Keys | None = None,
    ) -> None:
        """Take a request.

        Args:
            ticket: names it in `Finish`, once.
            message: what to ask.
            payload: its frames.
            timeout: seconds until it fails.
            now: seconds, monotonic.
            keys: as in `SendRequest`.
        """
        waiting = _Waiting(message, payload, timeout, now + timeout, keys)
        if self._live is not None and not self._live.suspect:
            self._send(ticket, waiting, now)
        elif self._live is None and self._failures == 0 and self._phase is not Phase.CLOSED and self._failure is None:
            if len(self._waiting) >= self._terms.max_pending:
                self._finish(ticket, QueueFullError(f"{len(self._waiting)} requests wait for the session"))
            else:
                self._waiting[ticket] = waiting
        else:
            self.counters.fast_failures += 1
            self._finish(ticket, self._why_not())

    def cancel(self, ticket: int) -> None:
        """Nobody waits for a request any more."""
        if self._forget(ticket):
            self._finish(ticket, ClientClosedError("the request was cancelled"))

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self._phase is Phase.DOWN and self._retry_at <= now:
            self.counters.attempts += 1
            self._enter(Phase.CONNECTING, now + self._patience.connect)
            self._actions.append(OpenSocket())
        elif self._phase in {Phase.CONNECTING, Phase.PROBING} and self._phase_ends <= now:
            doing = "connect" if self._phase is Phase.CONNECTING else "say whether it knows extra_keys/2"
            self._attempt_failed(ServerUnavailableError(f"the server did not {doing} in time"), now)
        elif self._phase is Phase.GREETING and self._connection is not None:
            self._greeted(self._connection, self._connection.expire(now), now)
        elif self._live is not None:
            self._take_events(self._live.speaker.expire(now), now)
            self._heartbeat(now)
        for ticket in [ticket for ticket, one in self._waiting.items() if one.deadline <= now]:
            del self._waiting[ticket]
            self._timed_out(ticket, "no session before the deadline")

    def next_tick(self) -> float:
        """When `tick` has something to do; infinity for never."""
        ends = [one.deadline for one in self._waiting.values()]
        if self._phase is Phase.DOWN:
            ends.append(self._retry_at)
        elif self._phase in {Phase.CONNECTING, Phase.PROBING}:
            ends.append(self._phase_ends)
        elif self._phase is Phase.GREETING and self._connection is not None:
            ends.append(_or_never(self._connection.next_timeout()))
        elif self._live is not None:
            ends.append(_or_never(self._live.speaker.next_timeout()))
            if not self._pinging(self._live):
                ends.append(self._next_heartbeat(self._live))
        return min(ends, default=math.inf)

    def close(self) -> None:
        """End for good: everything pending fails."""
        if self._phase is Phase.CLOSED:
            return
        error = ClientClosedError("the client was closed")
        tickets = [*self._waiting, *self._tickets()]
        self._waiting.clear()
        if self._live is not None:
            self._live.speaker.lose("the client was closed")
        self._live = self._connection = None
        self._failure = error
        self._enter(Phase.CLOSED, math.inf)
        self._actions.append(CloseSocket())
        for ticket in tickets:
            self._finish(ticket, error)

    # ---- opening a session

    def _receive_capability(self, frames: Sequence[Frame], now: float) -> None:
        names = read_answer(frames, self._uid)
        if names is None:
            self.counters.bad_messages += 1
            return
        self._capabilities = names
        if CAPABILITY in names:
            connection = ClientConnection(self._terms)
            hello = connection.send(SayHello(connection.new_request_id()), now)
            self._connection = connection
            self._enter(Phase.GREETING, math.inf)
            self._actions.append(Send(hello, None))
            return
        answer = None if self._on_foreign is None else self._on_foreign(names)
        if answer is not None and not isinstance(answer, ProtocolError):
            self._established = None
            self._up(answer, answer.limits, now)
            return
        self.counters.unsupported += 1
        error = answer or UnsupportedServerError(
            f"the server lists {sorted(names)[:8]} and not {CAPABILITY}: it would serve hits without the extra keys, "
            "so it is bypassed; upgrade it, or hand in a tunnel"
        )
        self._refused(error, now)

    def _greeted(self, connection: ClientConnection, events: list[Event], now: float) -> None:
        for event in events:
            match event:
                case Established():
                    self._established = event
                    self._up(connection, event.limits, now)
                    if event.notice:
                        names = ", ".join(f"{one.field} ({one.asked!r}, held {one.accepted!r})" for one in event.notice)
                        log.warning("no key of ours is in any space of this model that the server holds: %s", names)
                case Refused():
                    self.counters.refused += 1
                    mismatch = event.refusal.code in {RefusalCode.SPACE_MISMATCH, RefusalCode.ROOT_MISMATCH}
                    self.counters.space_mismatches += mismatch
                    self._refused((SpaceMismatchError if mismatch else NegotiationRefusedError)(event.refusal), now)
                case HelloTimedOut():
                    self._attempt_failed(ServerUnavailableError("the server did not answer the hello in time"), now)

    def _up(self, speaker: ClientConnection | Tunnel, limits: Limits, now: float) -> None:
        self.counters.sessions += 1
        self._failure = None
        self._live = _Live(speaker, limits, now, now, now)
        self._enter(Phase.UP, math.inf)
        waiting, self._waiting = self._waiting, {}
        for ticket, one in waiting.items():
            self._send(ticket, one, now)

    def _refused(self, error: ProtocolError, now: float) -> None:
        """The server is there, and there is no use in asking again soon."""
        if str(error) != str(self._failure):
            log.warning("%s", error)
        self._down(error, now + self._patience.refused_delay)

    def _attempt_failed(self, error: ProtocolError, now: float) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("%s; requests are misses until a session stands", error)
        delay = min(self._patience.longest_delay, self._patience.first_delay * 2 ** min(self._failures - 1, 32))
        self._down(error, now + delay * (0.5 + self._chance() / 2))

    def _down(self, error: ProtocolError | None, retry_at: float) -> None:
        if error is not None:
            self._failure = error
        self._connection = self._live = None
        self._retry_at = retry_at
        self._enter(Phase.DOWN, math.inf)
        self._actions.append(CloseSocket())
        if error is not None:
            waiting, self._waiting = self._waiting, {}
            for ticket in waiting:
                self._finish(ticket, error)

    def _enter(self, phase: Phase, ends: float) -> None:
        self._phase, self._phase_ends = phase, ends
        self._actions.append(PhaseChanged(phase))

    # ---- while it stands

    def _send(self, ticket: int, one: _Waiting, now: float) -> None:
        live = self._live
        if live is None:
            self._finish(ticket, self._why_not())
            return
        if one.message.shared_bytes() and not self.shares:
            self._finish(ticket, UnsharedError("the session that stands now did not agree on shared memory"))
            return
        request_id = live.speaker.new_request_id()
        event = SendRequest(request_id, one.message, one.payload, max(one.deadline - now, 1e-3), one.keys)
        try:
            frames = live.speaker.send(event, now)
        except ProtocolError as error:
            self._finish(ticket, error)
            return
        live.sent[request_id] = _Sent(ticket, now, _is_bulky(one))
        live.said = now
        if frames:
            self._actions.append(Send(frames, ticket))
        self._flush_tunnel()

    def _take_events(self, events: list[Event], now: float) -> None:
        for event in events:
            match event:
                case ReplyReceived():
                    self._ended(event.request_id, event, now)
                case RequestFailed():
                    self._ended(event.request_id, event.error, now)
                case SessionLost():
                    self._session_over(event.reason, events, now)
                    return
        self._flush_tunnel()

    def _ended(self, request_id: int, outcome: ReplyReceived | ProtocolError, now: float) -> None:
        live = self._live
        sent = None if live is None else live.sent.pop(request_id, None)
        if live is None or sent is None:
            return
        if isinstance(outcome, RequestTimeoutError):
            self.counters.timeouts += 1
            if live.heard <= sent.at and not any(one.bulky for one in live.sent.values()):
                self._grow_suspicious(live, sent, now)
        self._finish(sent.ticket, outcome)

    def _grow_suspicious(self, live: _Live, sent: _Sent, now: float) -> None:
        """Nothing was heard for the whole time of a request."""
        if sent.ticket == _PING and live.suspect:
            self._lose("the server does not answer", now)
            return
        live.suspect = True
        if not self._pinging(live):
            self._ping(live, now)

    def _heartbeat(self, now: float) -> None:
        live = self._live
        if live is not None and not self._pinging(live) and self._next_heartbeat(live) <= now:
            self._ping(live, now)

    def _next_heartbeat(self, live: _Live) -> float:
        """Both must be heard: we by the server, and the server by us."""
        return min(live.said, live.heard) + max(live.limits.heartbeat_ms / 1000, SHORTEST_HEARTBEAT)

    def _ping(self, live: _Live, now: float) -> None:
        self._send(_PING, _Waiting(PingRequest(), (), self._patience.ping, now + self._patience.ping, None), now)
        live.said = now

    def _pinging(self, live: _Live) -> bool:
        return any(sent.ticket == _PING for sent in live.sent.values())

    def _lose(self, reason: str, now: float) -> None:
        if self._live is not None:
            self._session_over(reason, self._live.speaker.lose(reason), now)

    def _session_over(self, reason: str, events: list[Event], now: float) -> None:
        live = self._live
        if live is None:
            return
        self.counters.lost += 1
        log.info("session lost: %s", reason)
        errors = {event.request_id: event.error for event in events if isinstance(event, RequestFailed)}
        rest = SessionLostError(f"session lost: {reason}")
        if live.suspect or now - live.since < SHORT_LIFE:
            self._attempt_failed(ServerUnavailableError(f"session lost: {reason}"), now)
        else:
            self._failures = 0
            self._down(None, now)
        for request_id, sent in live.sent.items():
            self._finish(sent.ticket, errors.get(request_id, rest))

    # ---- helpers

    def _flush_tunnel(self) -> None:
        if self._live is not None and not isinstance(self._live.speaker, ClientConnection):
            self._actions += [Send(frames, None) for frames in self._live.speaker.take_outgoing()]

    def _tickets(self) -> list[int]:
        return [] if self._live is None else [one.ticket for one in self._live.sent.values() if one.ticket != _PING]

    def _forget(self, ticket: int) -> bool:
        """Drop a request wherever it is; whether it was anywhere."""
        if self._waiting.pop(ticket, None) is not None:
            return True
        live = self._live
        if live is not None:
            for request_id, sent in live.sent.items():
                if sent.ticket == ticket:
                    live.speaker.abandon(request_id)
                    del live.sent[request_id]
                    return True
        return False

    def _finish(self, ticket: int, outcome: ReplyReceived | ProtocolError) -> None:
        if ticket != _PING:
            self._actions.append(Finish(ticket, outcome))

    def _timed_out(self, ticket: int, message: str) -> None:
        self.counters.timeouts += 1
        self._finish(ticket, RequestTimeoutError(message))

    def _why_not(self) -> ProtocolError:
        if self._phase is Phase.CLOSED:
            return ClientClosedError("the client was closed; make another")
        if self._live is not None:
            return ServerUnavailableError("a request had no answer, and the ping after it has none yet")
        if self._failure is not None:
            return self._failure
        return ServerUnavailableError("no session stands")


def _is_bulky(request: _Waiting) -> bool:
    """Whether payload goes through the socket for it."""
    message = request.message
    return bool(request.payload) or (isinstance(message, RetrieveRequest) and message.shared is UNSET)


def _or_never(moment: float | None) -> float:
    return math.inf if moment is None else moment
