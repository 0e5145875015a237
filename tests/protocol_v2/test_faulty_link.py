"""Two real connections over a link that drops, repeats, reorders, truncates, lengthens and swells messages.

Whatever the link does: nothing but events and `RemoteProtocolError`, every request has exactly one end, a value that is
received is the one that was answered to that very question, and in the end both tables are empty and a session can be
opened again.
"""

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol_v2 import State, answer_hello
from protocol_v2.codes import ErrorCode
from protocol_v2.errors import ServerError
from protocol_v2.events import (
    AnswerHello,
    Established,
    Event,
    HelloReceived,
    ReplyReceived,
    RequestFailed,
    RequestReceived,
    RequestsDropped,
    SayHello,
    SendError,
    SendReply,
)
from protocol_v2.messages import (
    LookupReply,
    LookupRequest,
    RetrieveReply,
    RetrieveRequest,
    StoreReply,
    StoreRequest,
)
from protocol_v2.tensors import TensorMeta
from protocol_v2.wire_keys import Keys
from tests.protocol_v2.connection_pair import FAULTS, ConnectionPair, Fault, deliver
from tests.protocol_v2.strategies import LIMITS, payload_for

META = TensorMeta("int8", (4,))
faults = st.one_of(st.just(deliver), st.just(deliver), st.sampled_from(FAULTS))


class FaultyLink(RuleBasedStateMachine):
    """A client with an honest owner, a server with an honest owner, and the link between them."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = ConnectionPair()
        self.asked: dict[int, int] = {}
        self.ended: dict[int, Event] = {}
        self.waiting: dict[int, RequestReceived] = {}
        self.executed: set[tuple[bytes | None, int]] = set()

    @initialize()
    def open_session(self) -> None:
        """Begin with a session."""
        self.pair.greet()

    @precondition(lambda self: self.pair.client.state in {State.FRESH, State.GREETED, State.LOST, State.REFUSED})
    @rule()
    def say_hello(self) -> None:
        """The client wants a session (again)."""
        self.pair.client_sends(SayHello(self.pair.client.new_request_id()))

    @precondition(lambda self: self.pair.client.state is State.OPEN and self.pair.client.pending < LIMITS.max_pending)
    @rule(number=st.integers(0, 3), kind=st.sampled_from(["lookup", "store", "retrieve"]))
    def ask(self, number: int, kind: str) -> None:
        """A request whose right answer depends on what is asked."""
        message: Any = {
            "lookup": LookupRequest(session="r", keys=Keys(digests=bytes(32) * number)),
            "retrieve": RetrieveRequest(lease=bytes(16), count=number + 1),
            "store": StoreRequest(
                session="r",
                keys=Keys(digests=bytes(32) * (number + 1)),
                starts=tuple(range(number + 1)),
                n_tokens=(1,) * (number + 1),
                tensors=((META,),),
            ),
        }[kind]
        request_id = self.pair.ask(message, payload_for(message), timeout=0.3)
        self.asked[request_id] = number

    @precondition(lambda self: self.pair.to_server)
    @rule(fault=faults, first=st.booleans())
    def to_server(self, fault: Fault, first: bool) -> None:
        """One message reaches the server, in or out of order."""
        if not first:
            self.pair.to_server.rotate(1)
        for event in self.pair.at_server(fault):
            match event:
                case HelloReceived():
                    self.waiting.clear()
                    self.pair.server_sends(AnswerHello(event.request_id, answer_hello(event, self.pair.server_terms())))
                case RequestReceived():
                    asked = (self.pair.server.transcript, event.request_id)
                    assert asked not in self.executed
                    self.executed.add(asked)
                    self.waiting[event.request_id] = event

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), good=st.booleans())
    def answer(self, data: st.DataObject, good: bool) -> None:
        """The server answers a request, well or with an error."""
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        message = self.waiting.pop(request_id).message
        if not good:
            self.pair.server_sends(SendError(request_id, ErrorCode.BUSY))
            return
        reply: Any
        match message:
            case LookupRequest():
                reply = LookupReply(hit_chunks=message.keys.max_chunks)
            case StoreRequest():
                reply = StoreReply(stored=len(message.n_tokens))
            case RetrieveRequest():
                chunks = tuple(range(1, message.count + 1))
                reply = RetrieveReply(count=message.count, starts=chunks, n_tokens=chunks, tensors=((META,),))
        self.pair.server_sends(SendReply(request_id, reply, payload_for(reply)))

    @precondition(lambda self: self.pair.to_client)
    @rule(fault=faults, first=st.booleans())
    def to_client(self, fault: Fault, first: bool) -> None:
        """One message reaches the client, in or out of order."""
        if not first:
            self.pair.to_client.rotate(1)
        self.note(self.pair.at_client(fault))

    @rule(seconds=st.sampled_from([0.1, 0.4, 5.0]))
    def let_time_pass(self, seconds: float) -> None:
        """Deadlines and silence."""
        self.pair.now += seconds
        self.note(self.pair.client.expire(self.pair.now))
        for event in self.pair.server.expire(self.pair.now):
            if isinstance(event, RequestsDropped):
                for request_id in event.request_ids:
                    self.waiting.pop(request_id, None)

    @rule()
    def restart_server(self) -> None:
        """A fresh server in the same place."""
        self.pair.server = self.pair.new_server()
        self.waiting.clear()

    def note(self, events: list[Event]) -> None:
        """Every request ends once, and a value is the answer to its own question."""
        for event in events:
            if not isinstance(event, ReplyReceived | RequestFailed):
                continue
            assert event.request_id not in self.ended
            self.ended[event.request_id] = event
            if isinstance(event, RequestFailed):
                assert not isinstance(event.error, ServerError) or isinstance(event.error.error_code, ErrorCode)
                continue
            number = self.asked[event.request_id]
            match event.message:
                case LookupReply():
                    assert number == event.message.hit_chunks
                case StoreReply():
                    assert number + 1 == event.message.stored
                case RetrieveReply():
                    assert number + 1 == event.message.count == len(event.payload)

    @invariant()
    def nobody_has_failed_for_good(self) -> None:
        """No fault of a link looks like a peer that breaks the state table."""
        assert State.ERROR not in {self.pair.client.state, self.pair.server.state}

    @invariant()
    def tables_are_bounded_and_account_for_every_request(self) -> None:
        """What was asked has ended or is pending."""
        assert len(self.asked) == len(self.ended) + self.pair.client.pending
        assert max(self.pair.client.pending, self.pair.server.pending) <= LIMITS.max_pending

    def teardown(self) -> None:
        """In the end everything has ended, and a session can be opened."""
        self.note(self.pair.client.expire(self.pair.now + 1000))
        assert set(self.asked) == set(self.ended)
        assert 0 == self.pair.client.pending
        self.pair.server.expire(math.inf)
        assert 0 == self.pair.server.pending
        self.pair.to_server.clear()
        self.pair.to_client.clear()
        assert isinstance(self.pair.greet()[0], Established)


TestFaultyLink = FaultyLink.TestCase
TestFaultyLink.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_no_more_than_its_message(fault: Fault) -> None:
    """One spoilt request, one spoilt reply: the next exchange works in the same session."""
    pair = ConnectionPair()
    pair.greet()
    store = StoreRequest(session="r", keys=Keys(digests=bytes(32)), starts=(0,), n_tokens=(1,), tensors=((META,),))
    for spoil_request in (True, False):
        pair.ask(store, payload_for(store), timeout=0.1)
        for event in pair.at_server(fault if spoil_request else deliver):
            if isinstance(event, RequestReceived):
                pair.server_sends(SendReply(event.request_id, StoreReply(stored=1)))
        while pair.to_client:
            pair.at_client(deliver if spoil_request else fault)
        pair.now += 0.2
        pair.client.expire(pair.now)
        pair.server.expire(pair.now)
        assert (0, 0) == (pair.client.pending, pair.server.pending)
        received = pair.request(store, payload_for(store))
        pair.server_sends(SendReply(received.request_id, StoreReply(stored=1)))
        assert isinstance(pair.at_client()[0], ReplyReceived)


def test_a_detector_of_wrong_answers_would_see_one() -> None:
    """Negative control: an answer that fits the request's shape but not its question is caught by `note`."""
    machine = FaultyLink()
    machine.open_session()
    machine.ask(2, "retrieve")
    (event,) = machine.pair.at_server()
    assert isinstance(event, RequestReceived)
    wrong = RetrieveReply(count=1, starts=(0,), n_tokens=(1,), tensors=((META,),))
    machine.pair.server_sends(SendReply(event.request_id, wrong, payload_for(wrong)))
    with pytest.raises(AssertionError):
        machine.note(machine.pair.at_client())
