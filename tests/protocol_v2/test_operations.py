"""The steps of stores and retrieves through shared memory, one by one: what is asked for when it fails half-way."""

from concurrent.futures import Future
from typing import Any

import pytest
from msgspec import UNSET

from keying import KeySpace, chunk_keys
from protocol_v2 import operations
from protocol_v2.client_sharing import ClientSharing
from protocol_v2.codes import ErrorCode, MissReason
from protocol_v2.errors import ProtocolError, RequestTimeoutError, ServerError, UnsharedError
from protocol_v2.events import ReplyReceived
from protocol_v2.hello import Limits
from protocol_v2.messages import (
    AttachReply,
    PingReply,
    Reply,
    RetrieveReply,
    RetrieveRequest,
    SharedRange,
    StoreReply,
    StoreRequest,
)
from protocol_v2.operations import Ask, AwaitLimits, Begin, Begun, Collect, Did, Do
from protocol_v2.shared_memory import GRANULE, RangeName, Segment, SegmentReader
from protocol_v2.tensors import TensorMeta, to_numpy
from protocol_v2.wire_keys import Shard

np = pytest.importorskip("numpy")

SPACE = KeySpace("m", chunk_size=4, kv_dtype="uint8")
KEYS = chunk_keys(SPACE, range(8))
VALUES = [np.full(100, 1 + place, dtype=np.uint8) for place in range(2)]


def outcome(answer: Reply | ProtocolError) -> "Future[ReplyReceived | ProtocolError]":
    """What the client's thread says of a request."""
    future: Future[ReplyReceived | ProtocolError] = Future()
    future.set_result(answer if isinstance(answer, ProtocolError) else ReplyReceived(1, answer))
    return future


@pytest.fixture
def server() -> Segment:
    """The segment of a server, in this process."""
    return Segment(16 * GRANULE)


@pytest.fixture
def sharing(server: Segment) -> ClientSharing:
    """A client's side that is attached to it."""
    sharing = ClientSharing(64 * GRANULE)
    pid, fd, nonce, size = server.name
    sharing.attached(outcome(AttachReply(pid=pid, fd=fd, nonce=nonce, size=size)))
    assert sharing.reader is not None
    return sharing


def store(sharing: ClientSharing) -> tuple[Any, StoreRequest]:
    """A store whose request through shared memory has been sent."""
    operation = operations.store(
        session="r", keys=KEYS, tensors=VALUES, first=0, shard=Shard(), places=None, space=SPACE, sharing=sharing
    )
    assert isinstance(next(operation), AwaitLimits)
    staging = operation.send(Limits())
    assert isinstance(staging, Do)
    begin = operation.send(Did(staging.work()))
    assert isinstance(begin, Begin)
    assert isinstance(begin.ask.message, StoreRequest)
    assert () == begin.ask.payload
    assert isinstance(operation.send(Begun("ticket")), Collect)
    return operation, begin.ask.message


def readable(sharing: ClientSharing, message: StoreRequest) -> list[bool]:
    """Whether a server could still copy what a request names."""
    reader = SegmentReader(sharing._segment.name)
    return [reader.read(RangeName(one.granule, one.generation), memoryview(bytearray(100))) for one in message.ranges]


@pytest.mark.parametrize(
    "refusal", [ServerError(ErrorCode.UNSHARED, "no", retriable=False), UnsharedError("another session")]
)
def test_a_store_that_cannot_be_shared_is_sent_inline(sharing: ClientSharing, refusal: ProtocolError) -> None:
    """The server, or the session that stands now, does not share: the same chunks travel in the message."""
    operation, shared = store(sharing)
    assert [True, True] == readable(sharing, shared)
    inline = operation.send(refusal)
    assert isinstance(inline, Ask)
    assert isinstance(inline.message, StoreRequest)
    assert (UNSET, [100, 100]) == (inline.message.shared, [memoryview(one).nbytes for one in inline.payload])
    assert [False, False] == readable(sharing, shared)
    with pytest.raises(StopIteration) as done:
        operation.send(ReplyReceived(1, StoreReply(stored=2)))
    assert (2, None) == (done.value.value.stored, done.value.value.failure)


@pytest.mark.parametrize("how", ["timeout", "reply", "closed"])
def test_ranges_are_withdrawn_however_a_store_ends(sharing: ClientSharing, how: str) -> None:
    """Before the caller has its tensors back nothing of them can be read any more."""
    operation, shared = store(sharing)
    if how == "closed":
        operation.close()
    else:
        answer = RequestTimeoutError("late") if how == "timeout" else ReplyReceived(1, StoreReply(stored=2))
        with pytest.raises(StopIteration) as done:
            operation.send(answer)
        assert (how == "timeout") == (done.value.value.failure is not None)
    assert [False, False] == readable(sharing, shared)
    assert 0 == sharing._segment.used


def retrieve(sharing: ClientSharing, reply: RetrieveReply, payload: tuple[bytes, ...] = ()) -> Any:
    """The result of a retrieve of two chunks that is answered so."""
    operation = operations.retrieve(lease=b"l" * 16, first=0, count=2, shard=Shard(), make=to_numpy, sharing=sharing)
    ask = next(operation)
    assert isinstance(ask, Ask)
    assert isinstance(ask.message, RetrieveRequest)
    assert sharing.reader is not None
    assert sharing.reader.name.nonce == ask.message.shared
    assert reply.answers(ask.message)
    step = operation.send(ReplyReceived(1, reply, payload))
    assert isinstance(step, Do)
    with pytest.raises(StopIteration) as done:
        operation.send(Did(step.work()))
    return done.value.value


def announced(server: Segment, byte: int) -> tuple[memoryview, SharedRange]:
    """A chunk in the server's segment."""
    view = server.take(100)
    assert view is not None
    view[:] = bytes([byte]) * 100
    name = server.announce(view)
    assert name is not None
    return view, SharedRange(*name)


def reply_of(*ranges: SharedRange | None) -> RetrieveReply:
    """Two chunks of 100 bytes."""
    return RetrieveReply(
        count=2, starts=(0, 4), n_tokens=(4, 4), tensors=((TensorMeta("uint8", (100,)),),), shared=tuple(ranges)
    )


def test_shared_and_inline_chunks_are_put_together(sharing: ClientSharing, server: Segment) -> None:
    """Each chunk comes from where the reply says, in either order."""
    _view, where = announced(server, 7)
    for ranges, expected in (((where, None), [7, 9]), ((None, where), [9, 7])):
        got = retrieve(sharing, reply_of(*ranges), (b"\t" * 100,))
        assert expected == [int(chunk.tensors[0][0]) for chunk in got.chunks]


def test_a_range_that_changed_is_a_miss_and_so_is_all_behind_it(sharing: ClientSharing, server: Segment) -> None:
    """A prefix is delivered, with the reason why not more; the counter says why."""
    held, first = announced(server, 7)
    gone, second = announced(server, 8)
    server.withdraw(gone)
    got = retrieve(sharing, reply_of(first, second))
    assert ([7], MissReason.ABSENT) == ([int(chunk.tensors[0][0]) for chunk in got.chunks], got.miss)
    server.withdraw(held)
    assert ((), MissReason.ABSENT) == (
        (got := retrieve(sharing, reply_of(first, None), (b"\t" * 100,))).chunks,
        got.miss,
    )
    assert (1, 2) == (sharing.counters.retrieved, sharing.counters.stale)


def test_a_range_out_of_the_servers_segment_is_a_miss(sharing: ClientSharing) -> None:
    """What a broken server names is not read, and no exception reaches a scheduler."""
    got = retrieve(sharing, reply_of(SharedRange(2**40 - 1, 1), SharedRange(16, 1)))
    assert ((), MissReason.ABSENT) == (got.chunks, got.miss)


def test_ranges_answer_only_who_asked_for_them(server: Segment) -> None:
    """A reply with ranges to a request without a nonce is no reply."""
    reply = reply_of(announced(server, 7)[1], None)
    assert not reply.answers(RetrieveRequest(lease=b"l" * 16, count=2))
    assert reply.answers(RetrieveRequest(lease=b"l" * 16, count=2, shared=server.name.nonce))
    assert not reply.answers(RetrieveRequest(lease=b"l" * 16, count=1, shared=server.name.nonce))


@pytest.mark.parametrize("what", ["nonce", "pid", "size", "another reply", "an error"])
def test_a_segment_that_is_not_the_servers_is_not_attached(server: Segment, what: str) -> None:
    """The client checks what the server names, and goes without it; the right one is attached afterwards."""
    sharing = ClientSharing(4 * GRANULE)
    pid, fd, nonce, size = server.name
    right = {"pid": pid, "fd": fd, "nonce": nonce, "size": size}
    wrong = {"nonce": b"n" * 32, "pid": 2**30, "size": size + GRANULE}
    answer: Reply | ProtocolError
    if what in wrong:
        answer = AttachReply(**(right | {what: wrong[what]}))  # type: ignore[arg-type]
    else:
        answer = PingReply(boot=bytes(16)) if what == "another reply" else RequestTimeoutError("late")
    sharing.attached(outcome(answer))
    assert (None, 1, True) == (sharing.reader, sharing.counters.refused, sharing.failure is not None)
    assert sharing.stage([[b"x"]]) is None
    assert sharing.memory(1) is None
    sharing.attached(outcome(AttachReply(pid=pid, fd=fd, nonce=nonce, size=size)))
    assert (1, None) == (sharing.counters.attached, sharing.failure)
    assert sharing.stage([[b"x"]]) is not None
