"""The connection, both roles: handshake, requests, deadlines, sessions that end, and what may never be said."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keying import CacheSalt
from protocol_v2 import ClientConnection, ClientTerms, Limits, RefusalCode, ServerConnection, State, answer_hello
from protocol_v2.body import encode
from protocol_v2.codes import Code, ErrorCode
from protocol_v2.errors import (
    ClientClosedError,
    HandshakeError,
    LocalProtocolError,
    QueueFullError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerError,
    SessionLostError,
)
from protocol_v2.events import (
    AnswerHello,
    Established,
    Event,
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
from protocol_v2.frames import NO_DIGEST, PRELUDE, PRELUDE_BYTES, Frame, Prelude, join
from protocol_v2.hello import Refusal, Welcome
from protocol_v2.identity import keys_of_tokens
from protocol_v2.messages import (
    EndSessionReply,
    EndSessionRequest,
    LookupReply,
    LookupRequest,
    PingReply,
    PingRequest,
    ReleaseReply,
    Reply,
    Request,
    RetrieveReply,
    RetrieveRequest,
    SharedRange,
    StatusRequest,
    StoreReply,
    StoreRequest,
    encode_message,
)
from protocol_v2.tensors import TensorMeta
from protocol_v2.wire_keys import Keys
from tests.protocol_v2.connection_pair import ConnectionPair
from tests.protocol_v2.strategies import CLIENT_BOOT, LIMITS, OTHER_SPACE, SERVER_BOOT, SPACE, messages, payload_for

KEYS = Keys(digests=bytes(96))
LOOKUP = LookupRequest(session="r", keys=KEYS)
META = TensorMeta("int8", (4,))
STORE = StoreRequest(session="r", keys=KEYS, starts=(0, 4), n_tokens=(4, 4), tensors=((META,),))
RETRIEVE = RetrieveRequest(lease=bytes(16), count=2)
RETRIEVED = RetrieveReply(count=1, starts=(0,), n_tokens=(4,), tensors=((META,),))


@pytest.fixture
def pair() -> ConnectionPair:
    """Two sides with an open session."""
    made = ConnectionPair()
    made.greet()
    return made


def failures(events: list[Event]) -> dict[int, type[Exception]]:
    """Ids of failed requests, and how."""
    return {one.request_id: type(one.error) for one in events if isinstance(one, RequestFailed)}


def states(pair: ConnectionPair) -> tuple[State, State]:
    """Where the client and the server stand."""
    return pair.client.state, pair.server.state


# ---- handshake


def test_a_handshake_opens_one_session_on_both_sides() -> None:
    """Both hold the same transcript and agreement, and the client learns limits, boot id and notice."""
    pair = ConnectionPair()
    assert (State.FRESH, State.FRESH) == states(pair)
    (event,) = pair.greet()
    assert isinstance(event, Established)
    assert (State.OPEN, State.OPEN) == states(pair)
    assert pair.client.transcript == pair.server.transcript
    assert len(pair.client.transcript or b"") == 32
    assert pair.client.agreement == pair.server.agreement == event.agreement
    assert (2, 2, LIMITS, SERVER_BOOT) == (
        event.agreement.wire,
        event.agreement.schema,
        event.limits,
        event.server_boot_id,
    )
    assert (SPACE, CLIENT_BOOT) == (pair.server.space, pair.server.client_boot_id)


def test_our_client_greases_and_learns_that_it_was_heard() -> None:
    """What meant nothing to the server comes back by name."""
    (event,) = ConnectionPair().greet()
    assert isinstance(event, Established)
    seen = event.unrecognised
    assert (("grease_00",), ("grease/00",), (0x0A0A,), (0x0A0A,)) == (
        seen.fields,
        seen.features,
        seen.wire,
        seen.schemas,
    )


def test_a_tool_has_a_session_without_a_space() -> None:
    """Probe, status and the like need no space."""
    pair = ConnectionPair(space=None)
    (event,) = pair.greet()
    assert isinstance(event, Established)
    assert pair.server.space is None


def test_a_refusal_reaches_the_client_and_another_hello_may_be_tried() -> None:
    """H4: refused for the space, with the field; the same connection can say hello again."""
    pair = ConnectionPair(expected_spaces=(OTHER_SPACE,))
    (event,) = pair.greet()
    assert isinstance(event, Refused)
    assert (RefusalCode.SPACE_MISMATCH, "space.kv_dtype", False) == (
        event.refusal.code,
        event.refusal.field,
        event.by_us,
    )
    assert (State.REFUSED, State.REFUSED) == states(pair)
    pair.expected_spaces = (SPACE,)
    assert isinstance(pair.greet()[0], Established)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"root": bytes(32)}, RefusalCode.ROOT_MISMATCH),
        ({"wire": 3}, RefusalCode.WELCOME_INVALID),
        ({"schema": 1}, RefusalCode.WELCOME_INVALID),
    ],
)
def test_the_client_refuses_a_welcome_that_it_did_not_ask_for(change: dict[str, Any], code: RefusalCode) -> None:
    """H7: a server that derives another root, or chose what was not offered, is not used."""
    pair = ConnectionPair()
    pair.client_sends(SayHello(pair.client.new_request_id()))
    (hello,) = pair.at_server()
    assert isinstance(hello, HelloReceived)
    welcome = answer_hello(hello, pair.server_terms())
    assert isinstance(welcome, Welcome)
    forged = msgspec.structs.replace(welcome, **change)
    header = join(Prelude(Code.WELCOME, hello.request_id), encode(forged))
    pair.to_client.append([*header, bytes(32)])
    (event,) = pair.at_client()
    assert isinstance(event, Refused)
    assert (code, True, State.REFUSED) == (event.refusal.code, event.by_us, pair.client.state)


@pytest.mark.parametrize("meddle", ["hello", "welcome", "digest", "no digest", "nothing"])
def test_a_hello_or_welcome_changed_on_the_way_is_noticed(meddle: str) -> None:
    """A proxy that renames a field of the future, or strips it, cannot hide it; left alone, the session stands."""
    pair = ConnectionPair()
    pair.client_sends(SayHello(pair.client.new_request_id()))
    if meddle == "hello":
        pair.to_server[0][2] = bytes(pair.to_server[0][2]).replace(b"grease_00", b"grease_11")
    (hello,) = pair.at_server()
    assert isinstance(hello, HelloReceived)
    pair.server_sends(AnswerHello(hello.request_id, answer_hello(hello, pair.server_terms())))
    welcome = pair.to_client[0]
    if meddle == "welcome":
        welcome[2] = bytes(welcome[2]).replace(b"grease_00", b"grease_11")
    elif meddle == "digest":
        welcome[3] = bytes(32)
    elif meddle == "no digest":
        del welcome[3]
    (event,) = pair.at_client()
    if meddle == "nothing":
        assert isinstance(event, Established)
        return
    assert isinstance(event, Refused)
    assert ("transcript", RefusalCode.WELCOME_INVALID) == (event.refusal.field, event.refusal.code)


@pytest.mark.parametrize(
    ("body", "payload", "code"),
    [
        (b"\xc0", [], RefusalCode.HELLO_MALFORMED),
        (encode({}), [], RefusalCode.HELLO_MALFORMED),
        (None, [b"x"], RefusalCode.HELLO_MALFORMED),
        (encode({"space": {"model": "m", "x": 1}}), [], RefusalCode.SPACE_INVALID),
        (encode({"floor": {"x": 1}}), [], RefusalCode.FLOOR_UNKNOWN),
    ],
)
def test_a_bad_hello_is_answered_with_a_refusal_and_costs_nothing_else(
    pair: ConnectionPair, body: bytes | None, payload: list[bytes], code: RefusalCode
) -> None:
    """Every hello gets an answer that every version can read; an open session goes on."""
    hello = ConnectionPair().client.send(SayHello(9), 0.0)
    frames = join(Prelude(Code.HELLO, 9), bytes(hello[2])[PRELUDE_BYTES:] if body is None else body, payload)
    with pytest.raises(HandshakeError) as caught:
        pair.server.receive_frames(frames, pair.now)
    assert code == caught.value.refusal_code
    assert State.OPEN is pair.server.state
    other = ClientConnection(ClientTerms(CLIENT_BOOT, SPACE))
    while other.new_request_id() < 8:
        pass
    other.send(SayHello(other.new_request_id()), pair.now)
    (event,) = other.receive_frames(pair.server.error_reply(caught.value), pair.now)
    assert isinstance(event, Refused)
    assert (code, pair.server_terms().offer.to_wire()) == (event.refusal.code, event.refusal.accepted)
    assert isinstance(pair.request(LOOKUP), RequestReceived)


def test_a_space_with_a_name_beyond_all_bounds_is_refused_in_bounds() -> None:
    """The refusal's own texts are cut, so that the client can read it."""
    pair = ConnectionPair()
    frames = join(Prelude(Code.HELLO, 1), encode({"space": {"x" * 100_000: 1}}))
    pair.client_sends(SayHello(pair.client.new_request_id()))
    pair.to_server[0] = frames
    assert [] == pair.at_server()
    (event,) = pair.at_client()
    assert isinstance(event, Refused)
    assert RefusalCode.SPACE_INVALID == event.refusal.code


def test_a_hello_that_is_not_answered_times_out() -> None:
    """No wait without an end: the client is told, and may try again."""
    pair = ConnectionPair()
    pair.client_sends(SayHello(pair.client.new_request_id()))
    assert pair.now + 5.0 == pair.client.next_timeout()
    assert [] == pair.client.expire(pair.now + 4.9)
    assert [HelloTimedOut()] == pair.client.expire(pair.now + 5.0)
    assert State.FRESH is pair.client.state
    pair.to_server.clear()
    assert isinstance(pair.greet()[0], Established)


def test_an_error_in_answer_to_a_hello_is_a_refusal() -> None:
    """A server that can only say that something is wrong has refused."""
    client = ConnectionPair().client
    client.send(SayHello(client.new_request_id()), 0.0)
    server = ServerConnection(ConnectionPair().server_terms())
    error = RemoteProtocolError(ErrorCode.TOO_LARGE, "header", request_id=1)
    (event,) = client.receive_frames(server.error_reply(error), 0.0)
    assert isinstance(event, Refused)
    assert "TOO_LARGE" in event.refusal.message


def test_an_answer_to_a_hello_that_cannot_be_read_costs_itself() -> None:
    """A refusal without sense, or a reply where an answer is due: the hello still waits, and ends by its time."""
    client = ConnectionPair().client
    client.send(SayHello(client.new_request_id()), 0.0)
    with pytest.raises(RemoteProtocolError) as caught:
        client.receive_frames(join(Prelude(Code.REFUSAL, 1), encode({"code": "x"})), 0.0)
    assert (1, State.GREETED) == (caught.value.request_id, client.state)
    assert [] == client.receive_frames(join(Prelude(Code.LOOKUP_REPLY, 1), encode({})), 0.0)
    assert (1, None) == (client.ignored, client.limits)
    assert [HelloTimedOut()] == client.expire(5.0)


def test_a_superseded_hello_is_not_answered() -> None:
    """Of two hellos the last counts; an answer to the first is not sent, and if it was, is ignored."""
    pair = ConnectionPair()
    pair.client_sends(SayHello(pair.client.new_request_id()))
    (first,) = pair.at_server()
    assert isinstance(first, HelloReceived)
    early = answer_hello(first, pair.server_terms())
    pair.client.expire(pair.now + 9)
    pair.client_sends(SayHello(pair.client.new_request_id()))
    (second,) = pair.at_server()
    assert isinstance(second, HelloReceived)
    assert [] == pair.server.send(AnswerHello(first.request_id, early), pair.now)
    pair.server_sends(AnswerHello(second.request_id, early))
    assert isinstance(pair.at_client()[0], Established)


# ---- requests


def test_a_request_and_its_reply(pair: ConnectionPair) -> None:
    """Message, deadline and payload arrive; the reply arrives; both tables are empty."""
    request_id = pair.ask(STORE, [b"aaaa", b"bbbb"], timeout=0.25)
    assert (1, 0) == (pair.client.pending, pair.server.pending)
    (received,) = pair.at_server()
    assert RequestReceived(request_id, pair.now + 0.25, STORE, (b"aaaa", b"bbbb")) == received
    pair.server_sends(SendReply(request_id, StoreReply(stored=2)))
    assert [ReplyReceived(request_id, StoreReply(stored=2), ())] == pair.at_client()
    assert (0, 0) == (pair.client.pending, pair.server.pending)


def test_a_reply_with_payload_is_not_copied(pair: ConnectionPair) -> None:
    """The frames that come in are the frames of the event, also as views."""
    received = pair.request(RETRIEVE)
    frame = bytearray(b"dddd")
    pair.server_sends(SendReply(received.request_id, RETRIEVED, (memoryview(frame),)))
    (reply,) = pair.at_client()
    assert isinstance(reply, ReplyReceived)
    frame[0] = 0
    assert b"\0ddd" == bytes(reply.payload[0])


def test_requests_are_told_apart_by_id_and_answered_in_any_order(pair: ConnectionPair) -> None:
    """Many in flight; the replies come as they come."""
    ids = [pair.request(EndSessionRequest(session=str(i))).request_id for i in range(3)]
    for i in (2, 0, 1):
        pair.server_sends(SendReply(ids[i], EndSessionReply(known=bool(i % 2))))
    got = {}
    for _ in ids:
        (reply,) = pair.at_client()
        assert isinstance(reply, ReplyReceived)
        assert isinstance(reply.message, EndSessionReply)
        got[reply.request_id] = reply.message.known
    assert {ids[0]: False, ids[1]: True, ids[2]: False} == got


@settings(max_examples=60)
@given(messages, messages)
def test_every_request_and_reply_passes_or_is_refused_on_both_sides_alike(asked: Request, answer: Reply) -> None:
    """What a connection may say is what the other accepts: no message is sent that the peer then refuses."""
    pair = ConnectionPair(limits=Limits(max_payload_bytes=1 << 20))
    pair.greet()
    try:
        pair.ask(asked, payload_for(asked))
    except LocalProtocolError:
        assert asked.code % 2 == 1 or asked.code == Code.ERROR
        return
    (received,) = pair.at_server()
    assert isinstance(received, RequestReceived)
    assert asked == received.message
    try:
        pair.server_sends(SendReply(received.request_id, answer, payload_for(answer)))
    except LocalProtocolError:
        assert not answer.answers(asked)
        return
    events = pair.at_client()
    if isinstance(answer, PingReply) and answer.boot != SERVER_BOOT:
        assert isinstance(events[0], SessionLost)
    else:
        assert [ReplyReceived(received.request_id, answer, payload_for(answer))] == events


def test_an_error_reply_fails_one_request(pair: ConnectionPair) -> None:
    """F7: an identity mismatch is a typed error for that request; the session goes on."""
    received = pair.request(LOOKUP)
    pair.server_sends(SendError(received.request_id, ErrorCode.IDENTITY_MISMATCH, "the session has another identity"))
    (event,) = pair.at_client()
    assert isinstance(event, RequestFailed)
    assert isinstance(event.error, ServerError)
    assert (ErrorCode.IDENTITY_MISMATCH, False) == (event.error.error_code, event.error.retriable)
    assert (0, 0, State.OPEN) == (pair.client.pending, pair.server.pending, pair.client.state)
    busy = pair.request(LOOKUP)
    pair.server_sends(SendError(busy.request_id, ErrorCode.BUSY))
    (event,) = pair.at_client()
    assert isinstance(event, RequestFailed)
    assert event.error.retriable


SHARED_STORE = msgspec.structs.replace(
    STORE, tensors=((TensorMeta("uint8", (2500,)),),), shared=(SharedRange(0, 1), SharedRange(1, 1))
)
BAD_REQUESTS: dict[str, tuple[int, bytes, list[bytes], ErrorCode]] = {
    "unknown code": (98, encode({}), [], ErrorCode.UNKNOWN_CODE),
    "no msgpack": (Code.LOOKUP, b"\xc1", [], ErrorCode.MALFORMED),
    "another message's body": (Code.RETRIEVE, encode_message(LOOKUP), [], ErrorCode.MALFORMED),
    "deep nesting": (Code.LOOKUP, b"\x81\xa1x" + b"\x91" * 100_000, [], ErrorCode.MALFORMED),
    "extra frame": (Code.LOOKUP, encode_message(LOOKUP), [b"x"], ErrorCode.MALFORMED),
    "missing frame": (Code.STORE, encode_message(STORE), [b"aaaa"], ErrorCode.MALFORMED),
    "short frame": (Code.STORE, encode_message(STORE), [b"aaaa", b"bbb"], ErrorCode.MALFORMED),
    "long frame": (Code.STORE, encode_message(STORE), [b"aaaa", b"bbbbb"], ErrorCode.MALFORMED),
    "payload beyond the limit": (Code.STORE, encode_message(STORE), [bytes(5000)], ErrorCode.TOO_LARGE),
    "shared bytes beyond the limit": (Code.STORE, encode_message(SHARED_STORE), [], ErrorCode.TOO_LARGE),
    "empty salt": (
        Code.LOOKUP,
        encode({"session": "r", "keys": {"tokens": b"", "extra_keys": [[3, ""]]}}),
        [],
        ErrorCode.MALFORMED,
    ),
    "unknown kind": (
        Code.LOOKUP,
        encode({"session": "r", "keys": {"tokens": b"", "extra_keys": [[7, "x"]]}}),
        [],
        ErrorCode.UNKNOWN_KIND,
    ),
}


@pytest.mark.parametrize(("code", "body", "payload", "expected"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_one_bad_message_costs_one_request(
    pair: ConnectionPair, code: int, body: bytes, payload: list[bytes], expected: ErrorCode
) -> None:
    """F4, M4: each kind of bad message gets one error reply to its id, and the next request is served."""
    digest = (pair.server.transcript or b"")[:8]
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.receive_frames(join(Prelude(code, 50, digest=digest), body, payload), pair.now)
    assert (expected, 50) == (caught.value.error_code, caught.value.request_id)
    reply = pair.server.error_reply(caught.value)
    code, _, deadline, request_id, short = PRELUDE.unpack_from(reply[2])
    assert (Code.ERROR, 0, 50, digest) == (code, deadline, request_id, short)
    assert 0 == pair.server.pending
    assert isinstance(pair.request(LOOKUP), RequestReceived)


def test_garbage_without_an_id_is_dropped_in_silence(pair: ConnectionPair) -> None:
    """L11, M9: HTTP, random bytes, a single frame: no reply can be addressed, and the session goes on."""
    for frames in ([b"GET / HTTP/1.1"], [b""], [bytes(100)] * 5, [b"XK2\0"], [b"XK2\0", b"\x18", b"short"]):
        with pytest.raises(RemoteProtocolError) as caught:
            pair.server.receive_frames(frames, pair.now)
        assert [] == pair.server.error_reply(caught.value)
    assert isinstance(pair.request(LOOKUP), RequestReceived)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (RETRIEVED, []),
        (RETRIEVED, [b"ddd"]),
        (RETRIEVED, [b"dddd", b"dddd"]),
        (None, []),
        (StoreReply(stored=1), []),
        (
            RetrieveReply(count=3, starts=(0, 4, 8), n_tokens=(4, 4, 4), tensors=((META,),)),
            [b"dddd"] * 3,
        ),
    ],
)
def test_a_bad_reply_fails_its_request_only(pair: ConnectionPair, message: Any, payload: list[bytes]) -> None:
    """A8: truncated, oversized, foreign or unreadable replies fail that request at once; the session goes on."""
    received = pair.request(RETRIEVE)
    digest = (pair.client.transcript or b"")[:8]
    code, body = (message.code, encode_message(message)) if hasattr(message, "code") else (Code.RETRIEVE_REPLY, b"\xc1")
    prelude = Prelude(code, received.request_id, digest=digest)
    events = pair.client.receive_frames(join(prelude, body, payload), pair.now)
    assert {received.request_id: RemoteProtocolError} == failures(events)
    assert (0, State.OPEN) == (pair.client.pending, pair.client.state)
    again = pair.request(RETRIEVE)
    pair.server_sends(SendReply(again.request_id, RETRIEVED, (b"dddd",)))
    assert isinstance(pair.at_client()[0], ReplyReceived)


def test_a_reply_beyond_the_caps_fails_its_request(pair: ConnectionPair) -> None:
    """A header or payload beyond the caps is not read, and the request does not wait for its deadline."""
    received = pair.request(RETRIEVE)
    frames = join(Prelude(Code.RETRIEVE_REPLY, received.request_id), b"", [bytes(5000)])
    assert {received.request_id: RemoteProtocolError} == failures(pair.client.receive_frames(frames, pair.now))
    with pytest.raises(RemoteProtocolError):
        pair.client.receive_frames(frames, pair.now)
    with pytest.raises(RemoteProtocolError):
        pair.client.receive_frames([b"garbage"], pair.now)
    assert State.OPEN is pair.client.state


def test_an_abandoned_request_is_forgotten(pair: ConnectionPair) -> None:
    """What could not be sent, or is not waited for, leaves no entry, and a reply to it is ignored."""
    received = pair.request(PingRequest())
    pair.client.abandon(received.request_id)
    pair.client.abandon(received.request_id)
    assert 0 == pair.client.pending
    pair.server_sends(SendReply(received.request_id, PingReply(boot=SERVER_BOOT)))
    assert [] == pair.at_client()


def test_late_and_repeated_replies_are_ignored_by_id(pair: ConnectionPair) -> None:
    """M7: a reply after the deadline, and a second reply, answer nothing."""
    request_id = pair.ask(PingRequest(), timeout=0.1)
    pair.at_server()
    assert {request_id: RequestTimeoutError} == failures(pair.client.expire(pair.now + 0.1))
    pair.server_sends(SendReply(request_id, PingReply(boot=SERVER_BOOT)))
    late = pair.to_client[0]
    assert [] == pair.at_client()
    assert [] == pair.client.receive_frames(late, pair.now)
    assert 2 == pair.client.ignored


def test_a_repeated_request_is_executed_once(pair: ConnectionPair) -> None:
    """While it is pending and after it was answered, the same id means the same request."""
    pair.ask(LOOKUP)
    frames = pair.to_server[0]
    (received,) = pair.at_server()
    assert isinstance(received, RequestReceived)
    assert [] == pair.server.receive_frames(frames, pair.now)
    pair.server_sends(SendReply(received.request_id, LookupReply(hit_chunks=0)))
    assert [] == pair.server.receive_frames(frames, pair.now)
    assert 2 == pair.server.ignored
    assert 0 == pair.server.pending


def test_the_memory_for_repeated_requests_is_bounded(pair: ConnectionPair) -> None:
    """A server remembers the last ids only."""
    for _ in range(1100):
        received = pair.request(PingRequest())
        pair.server_sends(SendReply(received.request_id, PingReply(boot=SERVER_BOOT)))
        pair.at_client()
    assert 1024 == len(pair.server._answered)


# ---- deadlines and bounds


def test_deadlines_end_requests_on_both_sides(pair: ConnectionPair) -> None:
    """R1: each side is told at the deadline, and neither table keeps anything."""
    ids = [pair.ask(PingRequest(), timeout=t) for t in (0.1, 0.2, 0.3)]
    for _ in ids:
        pair.at_server()
    assert pair.now + 0.1 == pair.client.next_timeout() == pair.server.next_timeout()
    assert {ids[0], ids[1]} == set(failures(pair.client.expire(pair.now + 0.2)))
    assert [RequestsDropped((ids[0], ids[1]))] == pair.server.expire(pair.now + 0.2)
    assert [] == pair.server.send(SendReply(ids[0], PingReply(boot=SERVER_BOOT)), pair.now)
    assert {ids[2]} == set(failures(pair.client.expire(pair.now + 0.3)))
    assert 0 == pair.client.pending


def test_a_request_without_a_timeout_has_the_servers_default(pair: ConnectionPair) -> None:
    """M11: there is no request without a deadline, and none beyond the server's longest."""
    pair.ask(PingRequest())
    assert pair.now + 0.5 == pair.client.next_timeout()
    pair.ask(PingRequest(), timeout=1e6)
    for expected in (0.5, LIMITS.max_deadline_ms / 1000):
        (received,) = pair.at_server()
        assert isinstance(received, RequestReceived)
        assert pair.now + expected == received.deadline


def test_a_prelude_without_a_deadline_gets_the_default(pair: ConnectionPair) -> None:
    """A peer that names no deadline does not get an endless one."""
    frames = join(Prelude(Code.PING, 77, 0, (pair.server.transcript or b"")[:8]), encode({}))
    (received,) = pair.server.receive_frames(frames, pair.now)
    assert isinstance(received, RequestReceived)
    assert pair.now + 0.5 == received.deadline


def test_pending_requests_are_bounded_on_both_sides(pair: ConnectionPair) -> None:
    """Queue full fails that request only and at once; the server says BUSY to a client that does not count."""
    for _ in range(LIMITS.max_pending):
        pair.request(PingRequest())
    before = pair.client.pending
    with pytest.raises(QueueFullError):
        pair.ask(PingRequest())
    assert before == pair.client.pending
    frames = join(Prelude(Code.PING, 99, 0, (pair.server.transcript or b"")[:8]), encode({}))
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.receive_frames(frames, pair.now)
    assert (ErrorCode.BUSY, 99) == (caught.value.error_code, caught.value.request_id)


def test_a_thousand_timeouts_leave_nothing(pair: ConnectionPair) -> None:
    """R1: the tables are empty after any number of timeouts."""
    for _ in range(1000):
        pair.ask(PingRequest(), timeout=0.001)
        pair.now += 0.0005
        pair.client.expire(pair.now + 0.001)
    assert 0 == pair.client.pending


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf])
def test_a_timeout_that_is_none_is_refused(pair: ConnectionPair, timeout: float) -> None:
    """M11: zero, negative, endless and meaningless timeouts are refused, and nothing is registered."""
    with pytest.raises(LocalProtocolError, match="timeout"):
        pair.ask(PingRequest(), timeout=timeout)
    assert (0, State.OPEN) == (pair.client.pending, pair.client.state)


# ---- sessions that end


def in_flight(pair: ConnectionPair) -> int:
    """A request that the server has received and not answered."""
    return pair.request(LOOKUP).request_id


def test_a_restarted_server_is_noticed_on_the_next_message(pair: ConnectionPair) -> None:
    """L10: another server in the same place knows nothing of the session; what is in flight fails, then hello again."""
    first = in_flight(pair)
    pair.server = pair.new_server()
    second = pair.ask(LOOKUP)
    assert [] == pair.at_server()
    assert [ErrorCode.SESSION_UNKNOWN] == [one.error_code for one in pair.errors]
    events = pair.at_client()
    assert isinstance(events[0], SessionLost)
    assert {first: SessionLostError, second: SessionLostError} == failures(events)
    assert (State.LOST, State.FRESH) == states(pair)
    assert 0 == pair.client.pending
    assert isinstance(pair.greet()[0], Established)
    assert isinstance(pair.request(LOOKUP), RequestReceived)


def test_a_reply_of_another_session_is_not_used(pair: ConnectionPair) -> None:
    """A replaced server that answers a pending id under its own transcript is noticed; its values are not served."""
    request_id = in_flight(pair)
    other = ConnectionPair(boot=bytes(16))
    other.greet()
    digest = (other.server.transcript or b"")[:8]
    frames = join(Prelude(Code.LOOKUP_REPLY, request_id, digest=digest), encode_message(LookupReply(hit_chunks=3)))
    events = pair.client.receive_frames(frames, pair.now)
    assert isinstance(events[0], SessionLost)
    assert {request_id: SessionLostError} == failures(events)


def test_a_request_of_an_old_session_is_not_executed(pair: ConnectionPair) -> None:
    """A server executes nothing that was asked under another agreement or space."""
    pair.ask(LOOKUP)
    old = pair.to_server.pop()
    pair.client.lose("for the test")
    pair.greet()
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.receive_frames(old, pair.now)
    assert ErrorCode.SESSION_UNKNOWN == caught.value.error_code
    assert NO_DIGEST == PRELUDE.unpack_from(pair.server.error_reply(caught.value)[2])[4]
    assert [] == pair.client.receive_frames(pair.server.error_reply(caught.value), pair.now)
    assert (State.OPEN, State.OPEN) == states(pair)


def test_another_boot_id_in_a_pong_ends_the_session(pair: ConnectionPair) -> None:
    """L10: paired: the welcome's boot id keeps the session, another one ends it once."""
    same = pair.request(PingRequest())
    pair.server_sends(SendReply(same.request_id, PingReply(boot=SERVER_BOOT)))
    assert isinstance(pair.at_client()[0], ReplyReceived)
    other = pair.request(PingRequest())
    pair.server_sends(SendReply(other.request_id, PingReply(boot=CLIENT_BOOT)))
    events = pair.at_client()
    assert [SessionLost("the server was restarted")] == events[:1]
    assert {other.request_id: SessionLostError} == failures(events)


def test_a_new_hello_drops_what_the_server_had_in_flight(pair: ConnectionPair) -> None:
    """The old session ends first, with its requests; a reply to one of them is not sent."""
    request_id = in_flight(pair)
    pair.client.lose("for the test")
    pair.client_sends(SayHello(pair.client.new_request_id()))
    events = pair.at_server()
    assert [SessionLost, RequestsDropped, HelloReceived] == [type(one) for one in events]
    assert RequestsDropped((request_id,)) == events[1]
    assert [] == pair.server.send(SendReply(request_id, LookupReply(hit_chunks=0)), pair.now)
    assert [] == pair.server.send(SendError(request_id, ErrorCode.INTERNAL), pair.now)


def test_silence_ends_a_session_on_both_sides(pair: ConnectionPair) -> None:
    """O9: who says nothing for too long has no session; a ping in time keeps it; hello brings it back."""
    pair.now += 3.9
    ping = pair.request(PingRequest())
    pair.server_sends(SendReply(ping.request_id, PingReply(boot=SERVER_BOOT)))
    pair.at_client()
    pair.now += 3.9
    assert [] == pair.server.expire(pair.now) == pair.client.expire(pair.now)
    assert pair.now + 0.1 == pytest.approx(pair.server.next_timeout())
    request_id = pair.ask(PingRequest(), timeout=100)
    pair.now += 0.2
    assert [SessionLost("the client was silent for too long")] == pair.server.expire(pair.now)
    events = pair.client.expire(pair.now)
    assert [SessionLost("the server was silent for too long")] == events[:1]
    assert {request_id: SessionLostError} == failures(events)
    assert (State.LOST, State.LOST) == states(pair)
    pair.to_server.clear()
    assert isinstance(pair.greet()[0], Established)


def test_a_lost_transport_fails_what_is_pending(pair: ConnectionPair) -> None:
    """The owner says that the transport is gone; each state answers in its way."""
    request_id = in_flight(pair)
    events = pair.client.lose("the socket was closed")
    assert SessionLost("the socket was closed") == events[0]
    assert {request_id: SessionLostError} == failures(events)
    assert [] == pair.client.lose("again")
    assert [SessionLost("gone"), RequestsDropped((request_id,))] == pair.server.lose("gone")
    assert [] == pair.server.lose("again")
    pair.client_sends(SayHello(pair.client.new_request_id()))
    assert [HelloTimedOut()] == pair.client.lose("and again")


def test_closing_fails_what_is_pending_and_hears_nothing_more(pair: ConnectionPair) -> None:
    """After `close` there is no state to break: late messages are ignored, nothing can be sent."""
    request_id = in_flight(pair)
    assert {request_id: ClientClosedError} == failures(pair.client.close())
    assert [RequestsDropped((request_id,))] == pair.server.close()
    assert [] == pair.client.close() == pair.server.close()
    for connection in (pair.client, pair.server):
        assert [] == connection.receive_frames([b"anything"], pair.now)
        assert connection.next_timeout() is None
        assert [] == connection.expire(math.inf)
    assert [] == pair.server.error_reply(RemoteProtocolError(ErrorCode.MALFORMED, "x", request_id=1))
    with pytest.raises(LocalProtocolError):
        pair.ask(PingRequest())
    assert State.ERROR is pair.client.state


# ---- what may never be said


@pytest.mark.parametrize("code", [Code.WELCOME, Code.REFUSAL, Code.ERROR, Code.LOOKUP_REPLY, Code.CLEAR_REPLY])
def test_a_client_that_speaks_as_a_server_has_failed_for_good(pair: ConnectionPair, code: Code) -> None:
    """A message that this direction does not have ends the connection; a new one serves the peer again."""
    frames = join(Prelude(code, 3, digest=(pair.server.transcript or b"")[:8]), encode({}))
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.receive_frames(frames, pair.now)
    assert (ErrorCode.UNEXPECTED, 3, State.ERROR) == (
        caught.value.error_code,
        caught.value.request_id,
        pair.server.state,
    )
    assert pair.server.error_reply(caught.value)
    with pytest.raises(RemoteProtocolError):
        pair.server.receive_frames(join(Prelude(Code.PING, 4), encode({})), pair.now)
    pair.server = pair.new_server()
    pair.client.lose("for the test")
    assert isinstance(pair.greet()[0], Established)


@pytest.mark.parametrize("code", [Code.HELLO, Code.LOOKUP, Code.CLEAR])
def test_a_server_that_speaks_as_a_client_has_failed_for_good(pair: ConnectionPair, code: Code) -> None:
    """What was pending fails when the owner closes the connection."""
    request_id = in_flight(pair)
    frames = join(Prelude(code, request_id, digest=(pair.client.transcript or b"")[:8]), encode({}))
    with pytest.raises(RemoteProtocolError):
        pair.client.receive_frames(frames, pair.now)
    assert State.ERROR is pair.client.state
    assert {request_id: ClientClosedError} == failures(pair.client.close())


def test_misuse_before_a_session_ends_in_error() -> None:
    """A request without a session breaks the state table."""
    pair = ConnectionPair()
    with pytest.raises(LocalProtocolError, match="request: not possible in state fresh"):
        pair.ask(PingRequest())
    assert State.ERROR is pair.client.state


def test_bad_values_change_nothing(pair: ConnectionPair) -> None:
    """M3: what cannot be sent is refused before it is registered; the next request is fine."""
    client, server = pair.client, pair.server
    used = in_flight(pair)
    for event in (
        SendRequest(used, LOOKUP),
        SendRequest(0, LOOKUP),
        SendRequest(10**6, LOOKUP),
        SendRequest(client.new_request_id(), STORE, (b"aaaa",)),
        SendRequest(client.new_request_id(), LOOKUP, (b"x",)),
        SendRequest(client.new_request_id(), LookupReply(hit_chunks=1)),  # type: ignore[arg-type]
        SendRequest(client.new_request_id(), STORE, (bytes(4000), bytes(4000))),
        SendRequest(client.new_request_id(), EndSessionRequest(session="\ud800")),
        SayHello(client.new_request_id()),
        SendReply(used, LookupReply(hit_chunks=0)),
    ):
        with pytest.raises(LocalProtocolError):
            client.send(event, pair.now)
    for reply in (
        SendReply(used, EndSessionReply(known=True)),
        SendReply(used, LookupReply(hit_chunks=4)),
        SendReply(used, LookupReply(hit_chunks=3), (b"x",)),
        SendRequest(used, LOOKUP),
        SayHello(1),
    ):
        with pytest.raises(LocalProtocolError):
            server.send(reply, pair.now)
    assert (1, 1, State.OPEN, State.OPEN) == (client.pending, server.pending, client.state, server.state)
    pair.server_sends(SendReply(used, LookupReply(hit_chunks=3)))
    assert isinstance(pair.at_client()[0], ReplyReceived)


def test_a_welcome_that_we_cannot_keep_is_not_sent() -> None:
    """A server does not agree on a wire version that it does not speak."""
    pair = ConnectionPair()
    pair.client_sends(SayHello(pair.client.new_request_id()))
    (hello,) = pair.at_server()
    assert isinstance(hello, HelloReceived)
    welcome = answer_hello(hello, pair.server_terms())
    assert isinstance(welcome, Welcome)
    with pytest.raises(LocalProtocolError, match="wire 3"):
        pair.server.send(AnswerHello(hello.request_id, msgspec.structs.replace(welcome, wire=3)), pair.now)
    assert State.GREETED is pair.server.state
    pair.server_sends(AnswerHello(hello.request_id, Refusal(code=RefusalCode.BUSY)))
    (event,) = pair.at_client()
    assert isinstance(event, Refused)
    assert RefusalCode.BUSY == event.refusal.code


def test_no_error_text_tells_a_salt(pair: ConnectionPair) -> None:
    """F5: whatever is wrong with a request that carries a salt, its text does not show in the error."""
    salt = "s3cret-of-tenant"
    keys = keys_of_tokens([1, 2, 3, 4], [CacheSalt(salt)])
    good = encode_message(LookupRequest(session="r", keys=keys))
    digest = (pair.server.transcript or b"")[:8]
    for body in (good + b"\0", good[:-1], good.replace(b"session", b"sessiox"), good.replace(b"\xa7", b"\xa6", 1)):
        with pytest.raises(RemoteProtocolError) as caught:
            pair.server.receive_frames(join(Prelude(Code.LOOKUP, 5, digest=digest), body), pair.now)
        assert salt not in str(caught.value)
        assert salt.encode() not in b"".join(map(bytes, pair.server.error_reply(caught.value)))


def test_what_the_server_says_without_reason_answers_nothing(pair: ConnectionPair) -> None:
    """A welcome, refusal, release or unknown code under an id that is not pending is ignored."""
    digest = (pair.client.transcript or b"")[:8]
    frames: list[list[Frame]] = [
        join(Prelude(code, 400, digest=digest), encode_message(ReleaseReply(released=1)))
        for code in (Code.WELCOME, Code.REFUSAL, Code.RELEASE_REPLY, Code.ERROR, 99)
    ]
    for one in frames:
        assert [] == pair.client.receive_frames(one, pair.now)
    assert len(frames) == pair.client.ignored
    pending = pair.request(StatusRequest()).request_id
    unknown = join(Prelude(99, pending, digest=digest), encode({}))
    assert {pending: RemoteProtocolError} == failures(pair.client.receive_frames(unknown, pair.now))


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["hello", "answer", "ask", "reply", "error", "lose", "tick", "restart"]), max_size=25))
def test_any_order_of_honest_steps_keeps_both_sides_in_step(steps: list[str]) -> None:
    """Whatever honest owners do in whatever order: no exception but misuse that is refused, and every request ends."""
    pair = ConnectionPair()
    asked, ended, waiting, hellos = set(), set(), [], []

    def note(events: list[Event]) -> None:
        for one in events:
            if isinstance(one, ReplyReceived | RequestFailed):
                assert one.request_id not in ended
                ended.add(one.request_id)

    def settle() -> None:
        while pair.to_server or pair.to_client:
            if pair.to_server:
                for one in pair.at_server():
                    if isinstance(one, HelloReceived):
                        hellos.append(one)
                    elif isinstance(one, RequestReceived):
                        waiting.append(one.request_id)
            if pair.to_client:
                note(pair.at_client())

    for step in steps:
        if step == "hello" and not pair.client.pending:
            pair.client_sends(SayHello(pair.client.new_request_id()))
        elif step == "answer" and hellos:
            hello = hellos.pop()
            pair.server_sends(AnswerHello(hello.request_id, answer_hello(hello, pair.server_terms())))
        elif step == "ask" and pair.client.state is State.OPEN and pair.client.pending < LIMITS.max_pending:
            asked.add(pair.ask(LOOKUP))
        elif step == "reply" and waiting:
            pair.server_sends(SendReply(waiting.pop(), LookupReply(hit_chunks=0)))
        elif step == "error" and waiting:
            pair.server_sends(SendError(waiting.pop(), ErrorCode.INTERNAL))
        elif step == "lose":
            note(pair.client.lose("for the test"))
        elif step == "tick":
            pair.now += 0.4
            note(pair.client.expire(pair.now))
            pair.server.expire(pair.now)
        elif step == "restart":
            pair.server = pair.new_server()
        settle()
    note(pair.client.expire(math.inf))
    note(pair.client.close())
    assert asked == ended
    assert 0 == pair.client.pending
