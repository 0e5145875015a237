"""The keeper of a session, in virtual time: how it connects, backs off, trips, notices loss, and leaves no request."""

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keying import KeySpace
from protocol_v2 import ClientTerms, Limits, ServerConnection, ServerTerms, answer_hello
from protocol_v2.capability import answer_probe, is_probe
from protocol_v2.codes import ErrorCode
from protocol_v2.errors import (
    ClientClosedError,
    LocalProtocolError,
    ProtocolError,
    QueueFullError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerError,
    ServerUnavailableError,
    SessionLostError,
    SpaceMismatchError,
    UnsupportedServerError,
)
from protocol_v2.events import (
    AnswerHello,
    Event,
    HelloReceived,
    ReplyReceived,
    RequestFailed,
    RequestReceived,
    SendReply,
    SendRequest,
)
from protocol_v2.frames import Frame, Prelude, is_protocol_2, join
from protocol_v2.keeper_actions import CloseSocket, Finish, OpenSocket, Phase, PhaseChanged, Send
from protocol_v2.messages import (
    LookupReply,
    LookupRequest,
    PingReply,
    PingRequest,
    Request,
    RetrieveReply,
    RetrieveRequest,
)
from protocol_v2.session_keeper import Patience, SessionKeeper
from protocol_v2.wire_keys import Keys
from tests.protocol_v2.strategies import CLIENT_BOOT, OTHER_SPACE, SPACE

if TYPE_CHECKING:
    from protocol_v2.foreign import ForeignPolicy

LIMITS = Limits(heartbeat_ms=1000, silence_ms=10_000, max_pending=8)
PATIENCE = Patience(connect=2.0, answer=2.0, ping=0.5, first_delay=0.1, longest_delay=1.6, refused_delay=30.0)
LOOKUP = LookupRequest(session="r", keys=Keys(digests=bytes(64)))


class World:
    """A keeper, a pretended socket, and a server that behaves as told.

    `behave` is one of: `serve`, `refuse connection`, `black hole` (never connects), `silent` (connects, answers
    nothing), `foreign` (lists something else), `deaf` (answers the hello, then nothing), `full` (queue full), `slow
    link` (serves, and what it says is on its way until `arrive`).
    """

    def __init__(
        self,
        behave: str = "serve",
        *,
        expected: tuple[KeySpace, ...] = (),
        on_foreign: "ForeignPolicy | None" = None,
        max_pending: int = 16,
    ) -> None:
        self.now = 100.0
        self.behave = behave
        self.expected = expected
        self.boot = bytes(16)
        terms = ClientTerms(CLIENT_BOOT, SPACE, hello_timeout=PATIENCE.answer, max_pending=max_pending)
        self.keeper = SessionKeeper(terms, patience=PATIENCE, chance=lambda: 1.0, on_foreign=on_foreign)
        self.server: ServerConnection | None = None
        self.open = False
        self.to_client: deque[list[Frame]] = deque()
        self.on_its_way: deque[list[Frame]] = deque()
        self.finished: dict[int, ReplyReceived | ProtocolError] = {}
        self.log: list[str] = []
        self.keyed_before_capability = False
        self.known: tuple[KeySpace, ...] = ()
        self.mute_hello = False
        self.tickets = 0

    def ask(self, message: Request = LOOKUP, timeout: float = 1.0) -> int:
        """Submit a request; its ticket."""
        self.tickets += 1
        self.keeper.submit(self.tickets, message, (), timeout, self.now)
        self.act()
        return self.tickets

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass, event by event."""
        ends = self.now + seconds
        self.settle()
        for _ in range(10_000):
            due = self.keeper.next_tick()
            if due > ends:
                break
            self.now = max(self.now, due)
            self.settle()
        self.now = ends
        self.settle()

    def settle(self) -> None:
        """Everything that happens at this moment."""
        self.keeper.tick(self.now)
        self.act()
        while self.to_client:
            self.keeper.received(self.to_client.popleft(), self.now)
            self.act()

    def act(self) -> None:
        """Do what the keeper wants, as a shell would."""
        while actions := self.keeper.take_actions():
            for action in actions:
                match action:
                    case OpenSocket():
                        self._connect()
                    case CloseSocket():
                        self.log.append("close")
                        self.open = False
                        self.server = None
                        self.to_client.clear()
                    case Send():
                        self._transmit(action)
                    case Finish():
                        assert action.ticket not in self.finished
                        self.finished[action.ticket] = action.outcome
                    case PhaseChanged():
                        self.log.append(action.phase.value)

    def arrive(self) -> None:
        """What was on its way has come."""
        self.to_client += self.on_its_way
        self.on_its_way.clear()
        self.settle()

    def cut(self) -> None:
        """The connection breaks."""
        self.server = None
        self.open = False
        self.to_client.clear()
        self.keeper.disconnected("cut", self.now)
        self.act()

    def _connect(self) -> None:
        assert not self.open
        self.log.append("open")
        if self.behave == "refuse connection":
            self.keeper.disconnected("refused", self.now)
        elif self.behave != "black hole":
            self.open = True
            self.server = ServerConnection(ServerTerms(self.boot, limits=LIMITS, expected_spaces=self.expected))
            self.keeper.connected(self.now)

    def _transmit(self, action: Send) -> None:
        if not self.open:
            return
        if self.behave == "full":
            self.keeper.unsent(action.ticket, self.now)
            return
        frames = action.frames
        if is_protocol_2(frames):
            self._to_server(frames)
        elif is_probe(frames) and self.behave != "silent":
            foreign = [frames[0], b"\x20", b"\x91\xafkv_event_stream"]
            self.to_client.append(foreign if self.behave == "foreign" else answer_probe(frames))

    def _to_server(self, frames: list[Frame]) -> None:
        self.keyed_before_capability |= self.behave in {"foreign", "silent"}
        if self.server is None or self.behave == "silent":
            return
        try:
            events: list[Event] = self.server.receive_frames(frames, self.now)
        except RemoteProtocolError as error:
            self.to_client.append(self.server.error_reply(error))
            return
        for event in events:
            match event:
                case HelloReceived() if not self.mute_hello:
                    answer = answer_hello(
                        event, ServerTerms(self.boot, limits=LIMITS, expected_spaces=self.expected), self.known
                    )
                    self.to_client.append(self.server.send(AnswerHello(event.request_id, answer), self.now))
                case RequestReceived() if self.behave != "deaf":
                    reply: Any = LookupReply(hit_chunks=2)
                    if isinstance(event.message, PingRequest):
                        reply = PingReply(boot=self.boot)
                    elif isinstance(event.message, RetrieveRequest):
                        reply = RetrieveReply(count=0, miss=1)
                    link = self.on_its_way if self.behave == "slow link" else self.to_client
                    link.append(self.server.send(SendReply(event.request_id, reply), self.now))


def kinds(world: World) -> dict[int, type]:
    """How each request ended."""
    return {ticket: type(outcome) for ticket, outcome in world.finished.items()}


def ended(world: World, ticket: int) -> type:
    """How one request ended."""
    return type(world.finished[ticket])


# ---- connecting


def test_it_asks_for_the_capability_then_says_hello_then_serves() -> None:
    """Requests that were made before the session stands wait for it and are served."""
    world = World()
    first = world.ask()
    world.run()
    assert ["connecting", "open", "probing", "greeting", "up"] == world.log
    assert {first: ReplyReceived} == kinds(world)
    assert (Phase.UP, None, LIMITS, 0) == (
        world.keeper.phase,
        world.keeper.failure,
        world.keeper.limits,
        world.keeper.pending,
    )
    assert frozenset({"extra_keys/2"}) == world.keeper.capabilities
    assert not world.keyed_before_capability


@pytest.mark.parametrize("behave", ["refuse connection", "black hole", "silent"])
def test_a_server_that_is_not_there_costs_one_wait_then_misses_at_once(behave: str) -> None:
    """M5, M11: requests wait for the first attempt, no longer than it takes; then they fail at once."""
    world = World(behave)
    first = world.ask(timeout=60.0)
    world.run(5.0)
    assert {first: ServerUnavailableError} == kinds(world)
    second = world.ask(timeout=60.0)
    assert ServerUnavailableError is ended(world, second)
    assert 0 == world.keeper.pending
    assert not world.keyed_before_capability
    assert isinstance(world.keeper.failure, ServerUnavailableError)


def test_a_request_waits_no_longer_than_its_own_deadline() -> None:
    """The first attempt may take longer than a caller can wait."""
    world = World("black hole")
    short, long = world.ask(timeout=0.5), world.ask(timeout=60.0)
    world.run(0.6)
    assert {short: RequestTimeoutError} == kinds(world)
    world.run(2.0)
    assert {short: RequestTimeoutError, long: ServerUnavailableError} == kinds(world)


def test_attempts_are_spaced_by_a_growing_delay_with_a_limit() -> None:
    """Backoff: 0.1, 0.2, 0.4, 0.8, 1.6, 1.6 ... seconds; jitter only shortens, by half at most."""
    world = World("refuse connection")
    moments = []
    for _ in range(7):
        world.settle()
        moments.append(world.now)
        world.now = world.keeper.next_tick()
    gaps = [round(b - a, 3) for a, b in pairwise(moments)]
    assert [0.1, 0.2, 0.4, 0.8, 1.6, 1.6] == gaps
    lazy = SessionKeeper(ClientTerms(CLIENT_BOOT), patience=PATIENCE, chance=lambda: 0.0)
    lazy.tick(0.0)
    lazy.disconnected("refused", 0.0)
    assert 0.05 == pytest.approx(lazy.next_tick())


def test_it_recovers_when_the_server_comes_back() -> None:
    """M5: after an outage the next attempt within the longest delay succeeds, and requests are served again."""
    world = World("refuse connection")
    world.run(10.0)
    world.behave = "serve"
    world.run(1.7)
    assert Phase.UP is world.keeper.phase
    served = world.ask()
    world.run()
    assert ReplyReceived is ended(world, served)


def test_waiting_requests_are_bounded() -> None:
    """More requests than may be pending are not kept while the first attempt is under way."""
    world = World("black hole", max_pending=3)
    tickets = [world.ask() for _ in range(4)]
    assert {tickets[3]: QueueFullError} == kinds(world)
    assert 3 == world.keeper.pending


# ---- servers that are not ours


def test_a_server_without_the_capability_is_bypassed_and_nothing_keyed_reaches_it() -> None:
    """An LMCache server would serve hits without the extra keys: it is told nothing, and the reason is typed."""
    world = World("foreign")
    first = world.ask()
    world.run(20.0)
    second = world.ask()
    assert {first: UnsupportedServerError, second: UnsupportedServerError} == kinds(world)
    assert not world.keyed_before_capability
    assert (1, 1) == (world.keeper.counters.unsupported, world.keeper.counters.attempts)
    world.behave = "serve"
    world.run(11.0)
    assert Phase.UP is world.keeper.phase


def test_a_server_that_stays_silent_is_never_tunnelled_to() -> None:
    """No answer is never "old but safe": the policy for foreign servers is not even asked."""
    asked: list[frozenset[str]] = []

    def policy(names: frozenset[str]) -> None:
        asked.append(names)

    world = World("silent", on_foreign=policy)
    world.ask()
    world.run(30.0)
    assert [] == asked
    foreign = World("foreign", on_foreign=policy)
    foreign.run(1.0)
    assert [frozenset({"kv_event_stream"})] == asked
    assert isinstance(foreign.keeper.failure, UnsupportedServerError)


def test_a_policy_may_say_what_requests_end_in() -> None:
    """Its own error, for those that wait and for those that come later, until the server is asked again."""
    refusal = ServerError(ErrorCode.UNSUPPORTED, "no", retriable=False)
    world = World("foreign", on_foreign=lambda names: refusal)
    first = world.ask()
    world.run(1.0)
    second = world.ask()
    world.run()
    assert [refusal, refusal] == [world.finished[first], world.finished[second]]
    assert world.keeper.failure is refusal
    world.behave = "serve"
    world.run(60.0)
    assert world.keeper.failure is None


class EchoTunnel:
    """A tunnel that answers lookups by itself after one message of another protocol."""

    limits = LIMITS

    def __init__(self) -> None:
        self.outgoing: list[list[Frame]] = []
        self.pending: dict[int, float] = {}
        self.ids = 0

    def new_request_id(self) -> int:
        """See `Tunnel`, here and below."""
        self.ids += 1
        return self.ids

    def send(self, event: SendRequest, now: float) -> None:
        """Likewise."""
        self.pending[event.request_id] = now + (event.timeout or 1.0)
        self.outgoing.append([b"\x07", b"\x08", str(event.request_id).encode()])

    def receive_frames(self, frames: Any, now: float) -> list[Event]:
        """Likewise."""
        request_id = int(bytes(frames[2]))
        return [ReplyReceived(request_id, LookupReply(hit_chunks=1))] if self.pending.pop(request_id, None) else []

    def take_outgoing(self) -> list[list[Frame]]:
        """Likewise."""
        taken, self.outgoing = self.outgoing, []
        return taken

    def abandon(self, request_id: int) -> None:
        """Likewise."""
        self.pending.pop(request_id, None)

    def expire(self, now: float) -> list[Event]:
        """Likewise."""
        late = [one for one, ends in self.pending.items() if ends <= now]
        return [RequestFailed(one, RequestTimeoutError("late")) for one in late if self.pending.pop(one)]

    def next_timeout(self) -> float | None:
        """Likewise."""
        return min(self.pending.values(), default=None)

    def lose(self, reason: str) -> list[Event]:
        """Likewise."""
        lost, self.pending = list(self.pending), {}
        return [RequestFailed(one, SessionLostError(reason)) for one in lost]


def test_an_injected_tunnel_serves_requests_in_its_own_protocol() -> None:
    """Requests go through the tunnel's messages on the same socket; cut, they fail."""
    tunnel = EchoTunnel()
    world = World("foreign", on_foreign=lambda names: tunnel)
    sent: list[list[Frame]] = []
    transmit = world._transmit

    def spy(action: Send) -> None:
        sent.append(action.frames)
        transmit(action)

    world._transmit = spy  # type: ignore[method-assign]
    first = world.ask()
    world.run()
    assert (Phase.UP, True, None) == (world.keeper.phase, world.keeper.tunnelled, world.keeper.established)
    assert [b"\x07", b"\x08", b"1"] == sent[-1]
    world.to_client.append(sent[-1])
    world.settle()
    assert {first: ReplyReceived} == kinds(world)
    second = world.ask()
    world.cut()
    assert SessionLostError is ended(world, second)
    assert not any(is_protocol_2(frames) for frames in sent)


# ---- refusals


def test_a_space_mismatch_is_loud_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """One typed error with the field, one log line, one counter; asked again only after long."""
    world = World(expected=(OTHER_SPACE,))
    first = world.ask()
    world.run(100.0)
    second = world.ask()
    for ticket in (first, second):
        error = world.finished[ticket]
        assert isinstance(error, SpaceMismatchError)
        assert "kv_dtype" == error.refusal.differences[0].field
    counters = world.keeper.counters
    assert (4, 4) == (counters.space_mismatches, counters.attempts)
    assert 1 == sum("SPACE_MISMATCH" in record.message for record in caplog.records)
    world.expected = (SPACE,)
    world.run(30.0)
    assert Phase.UP is world.keeper.phase


# ---- loss


def test_a_cut_connection_fails_what_is_pending_and_is_made_again_at_once() -> None:
    """After a session that had stood, requests wait for the one new attempt instead of failing."""
    world = World()
    world.run(5.0)
    world.behave = "deaf"
    lost = world.ask()
    world.cut()
    assert {lost: SessionLostError} == kinds(world)
    world.behave = "serve"
    waited = world.ask()
    assert waited not in world.finished
    world.run()
    assert ReplyReceived is ended(world, waited)
    assert (2, 1) == (world.keeper.counters.sessions, world.keeper.counters.lost)


def test_a_dead_server_after_a_loss_costs_one_refused_connection() -> None:
    """The breaker opens with the first attempt that fails."""
    world = World()
    world.run(5.0)
    world.behave = "refuse connection"
    world.cut()
    waited = world.ask()
    world.run()
    assert ServerUnavailableError is ended(world, waited)
    assert ServerUnavailableError is ended(world, world.ask())
    assert 1 == world.keeper.counters.fast_failures


def test_a_flapping_server_is_not_hammered() -> None:
    """A session that ends within a second counts as a failed attempt: the delay grows."""
    world = World()
    for _ in range(5):
        world.run(2.0)
        world.settle()
        assert Phase.UP is world.keeper.phase
        world.keeper._live.since = world.now  # type: ignore[union-attr]
        world.cut()
    assert 1.6 == pytest.approx(world.keeper.next_tick() - world.now)


def test_a_hung_server_costs_one_deadline_then_misses() -> None:
    """A request times out in silence: the next fail at once, until a ping says whether the loop lives."""
    world = World()
    world.run(0.5)
    world.behave = "silent"
    first = world.ask(timeout=0.2)
    world.run(0.25)
    assert {first: RequestTimeoutError} == kinds(world)
    second = world.ask(timeout=0.2)
    assert ServerUnavailableError is ended(world, second)
    world.run(0.6)
    assert (1, 1) == (world.keeper.counters.lost, world.keeper.counters.sessions)
    assert ServerUnavailableError is ended(world, world.ask())
    world.run(2.5)
    world.behave = "serve"
    world.run(3.0)
    assert Phase.UP is world.keeper.phase


def test_a_slow_server_that_answers_pings_keeps_its_session() -> None:
    """Paired: a time-out alone does not end a session whose loop lives."""
    world = World()
    world.run(0.5)
    world.behave = "deaf"
    world.ask(timeout=0.2)
    world.run(0.1)
    world.behave = "serve"
    world.run(0.3)
    assert [RequestTimeoutError] == [type(one) for one in world.finished.values()]
    assert (Phase.UP, 0) == (world.keeper.phase, world.keeper.counters.lost)
    served = world.ask()
    world.run()
    assert ReplyReceived is ended(world, served)


def test_a_large_reply_on_a_slow_link_keeps_its_session() -> None:
    """While payload is on its way nothing else is heard: the retrieve's own deadline counts, and no ping's."""
    world = World()
    world.run(0.5)
    world.behave = "slow link"
    retrieve = world.ask(RetrieveRequest(lease=bytes(16), count=2), timeout=20.0)
    lookup = world.ask(timeout=1.0)
    world.run(8.0)
    assert {lookup: RequestTimeoutError} == kinds(world)
    assert (Phase.UP, 0) == (world.keeper.phase, world.keeper.counters.lost)
    assert world.keeper.counters.timeouts > 2  # pings
    world.arrive()
    assert ReplyReceived is ended(world, retrieve)
    world.behave = "serve"
    served = world.ask()
    world.run()
    assert ReplyReceived is ended(world, served)


@pytest.mark.parametrize(
    "message",
    [LOOKUP, RetrieveRequest(lease=bytes(16), count=2, shared=bytes(32))],
    ids=["lookup", "retrieve through shared memory"],
)
def test_a_small_reply_that_does_not_come_is_a_hung_server(message: Request) -> None:
    """Paired: where no payload goes through the socket, two pings without an answer end the session."""
    world = World()
    world.run(0.5)
    world.behave = "slow link"
    pending = world.ask(message, timeout=20.0)
    world.run(3.0)
    assert 1 == world.keeper.counters.lost
    assert isinstance(world.finished[pending], ProtocolError)


def test_a_retrieve_from_a_hung_server_costs_its_deadline_then_misses() -> None:
    """Once the payload's own time is over, its silence counts as any other."""
    world = World()
    world.run(0.5)
    world.behave = "deaf"
    retrieve = world.ask(RetrieveRequest(lease=bytes(16), count=2), timeout=4.0)
    world.run(4.0)
    assert RequestTimeoutError is ended(world, retrieve)
    assert ServerUnavailableError is ended(world, world.ask(timeout=0.2))
    world.run(0.6)
    assert 1 == world.keeper.counters.lost


def test_heartbeats_keep_an_idle_session() -> None:
    """O9: pings go out from the welcome on, so that an idle client's leases live; neither side falls silent."""
    world = World()
    world.run(60.0)
    assert world.server is not None
    assert [] == world.server.expire(world.now)
    assert (1, 0, Phase.UP) == (world.keeper.counters.sessions, world.keeper.counters.lost, world.keeper.phase)
    assert world.now - world.server.last_heard <= 1.1


def test_a_restarted_server_is_noticed_by_the_heartbeat() -> None:
    """L10: another boot id in a pong, or a session that the server does not know: hello again, once."""
    world = World()
    world.run(2.0)
    assert world.server is not None
    world.boot = b"\1" * 16
    world.server = ServerConnection(ServerTerms(world.boot, limits=LIMITS))
    world.run(3.0)
    assert (2, 1, Phase.UP) == (world.keeper.counters.sessions, world.keeper.counters.lost, world.keeper.phase)
    assert world.keeper.established is not None
    assert b"\1" * 16 == world.keeper.established.server_boot_id


def test_a_server_that_breaks_the_protocol_is_left() -> None:
    """A request from a server ends the connection for good; a new one is made."""
    world = World()
    world.run(2.0)
    world.behave = "deaf"
    ticket = world.ask(timeout=10.0)
    digest = world.server.transcript[:8] if world.server and world.server.transcript else b""
    world.keeper.received(join(Prelude(16, 1, digest=digest), b"\x80"), world.now)
    world.act()
    assert {ticket: SessionLostError} == kinds(world)
    world.keeper.received([b"garbage"], world.now)
    world.behave = "serve"
    world.run(1.0)
    assert (Phase.UP, 1) == (world.keeper.phase, world.keeper.counters.bad_messages)


# ---- requests


def test_a_full_queue_fails_that_request_only() -> None:
    """M1: not sent is failed at once; the session and other requests go on."""
    world = World()
    world.run(2.0)
    world.behave = "full"
    full = world.ask()
    assert {full: QueueFullError} == kinds(world)
    world.behave = "serve"
    fine = world.ask()
    world.run()
    assert ReplyReceived is ended(world, fine)
    assert 0 == world.keeper.pending


def test_a_question_that_cannot_be_sent_is_a_failed_attempt() -> None:
    """What the keeper itself cannot send ends the attempt, not the client."""
    world = World("full")
    ticket = world.ask(timeout=60.0)
    world.run()
    assert ServerUnavailableError is ended(world, ticket)
    world.behave = "serve"
    world.run(2.0)
    assert Phase.UP is world.keeper.phase


def test_a_notice_of_another_space_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Never a silent 0 % hit rate: an open server that holds another space of the model says how it differs."""
    world = World()
    world.known = (OTHER_SPACE,)
    world.run()
    assert Phase.UP is world.keeper.phase
    assert 1 == sum("kv_dtype ('bfloat16', held 'float8_e4m3fn')" in record.message for record in caplog.records)


def test_an_unanswered_hello_is_a_failed_attempt() -> None:
    """A server that lists the capability and then says nothing."""
    world = World()
    world.mute_hello = True
    ticket = world.ask(timeout=60.0)
    world.run(2.5)
    assert ServerUnavailableError is ended(world, ticket)
    assert "hello" in str(world.finished[ticket])


def test_a_bad_request_fails_itself_only() -> None:
    """M3: what cannot be sent has its error, and the next request is served."""
    world = World()
    world.run()
    bad = world.ask(LookupRequest(session="", keys=Keys(digests=b"")))
    good = world.ask()
    world.run()
    assert {bad: LocalProtocolError, good: ReplyReceived} == kinds(world)


def test_a_cancelled_request_is_forgotten_wherever_it_is() -> None:
    """Waiting for the session or for the reply: it ends at once, and the reply is ignored."""
    world = World("black hole")
    waiting = world.ask()
    world.keeper.cancel(waiting)
    world.act()
    up = World()
    up.run()
    up.behave = "deaf"
    pending = up.ask()
    up.keeper.cancel(pending)
    up.keeper.cancel(pending)
    up.act()
    for one, ticket in ((world, waiting), (up, pending)):
        assert {ticket: ClientClosedError} == kinds(one)
        assert 0 == one.keeper.pending


def test_closing_ends_everything_for_good() -> None:
    """In every phase: what is pending fails, the socket is closed, nothing is begun again."""
    for behave in ("serve", "black hole", "silent", "refuse connection", "deaf"):
        world = World(behave)
        world.run(2.5)
        ticket = world.ask(timeout=60.0)
        world.keeper.close()
        world.keeper.close()
        world.act()
        assert ticket in world.finished
        later = world.ask()
        assert ClientClosedError is ended(world, later)
        world.run(100.0)
        assert (Phase.CLOSED, 0) == (world.keeper.phase, world.keeper.pending)
        world.keeper.connected(world.now)
        world.keeper.disconnected("late", world.now)
        world.keeper.received([b"late"], world.now)
        assert Phase.CLOSED is world.keeper.phase


def test_a_thousand_timeouts_leave_nothing() -> None:
    """R1: the tables are empty after an outage of any length."""
    world = World()
    world.run()
    world.behave = "deaf"
    for _ in range(1000):
        world.ask(timeout=0.01)
        world.run(0.02)
    world.run(10.0)
    assert 1000 == len(world.finished)
    assert 0 == world.keeper.pending


@pytest.mark.parametrize("name", Patience.__slots__)
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_patience_has_an_end(name: str, value: float) -> None:
    """M11: no wait is endless."""
    with pytest.raises(LocalProtocolError, match=name):
        Patience(**{name: value})


class Fleet(RuleBasedStateMachine):
    """Any order of outages, requests and time: every request ends once, in time, and the keeper always recovers."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.deadlines: dict[int, float] = {}

    @rule(behave=st.sampled_from(["serve", "serve", "refuse connection", "black hole", "silent", "deaf", "full"]))
    def change(self, behave: str) -> None:
        """The server behaves otherwise from now on."""
        self.world.behave = behave

    @rule(timeout=st.sampled_from([0.05, 1.0, 5.0]))
    def ask(self, timeout: float) -> None:
        """A request."""
        ticket = self.world.ask(timeout=timeout)
        self.deadlines[ticket] = self.world.now + timeout

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 2.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        """Time passes."""
        self.world.run(seconds)

    @precondition(lambda self: self.world.open)
    @rule()
    def cut(self) -> None:
        """The connection breaks."""
        self.world.cut()

    @invariant()
    def no_request_is_late(self) -> None:
        """What is past its deadline has ended."""
        late = {ticket for ticket, ends in self.deadlines.items() if ends < self.world.now}
        assert late <= set(self.world.finished)

    @invariant()
    def the_table_is_what_is_open(self) -> None:
        """Pending is what has not ended."""
        assert len(self.deadlines) - len(self.world.finished) == self.world.keeper.pending

    def teardown(self) -> None:
        """With a server that serves, the session comes back within bounds."""
        self.world.behave = "serve"
        self.world.run(40.0)
        assert Phase.UP is self.world.keeper.phase
        assert set(self.deadlines) == set(self.world.finished)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=30)
