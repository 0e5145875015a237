"""The server's side of shared memory, without sockets: what a client may name, and what comes of it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from keying import chunk_keys
from protocol_v2.codes import Code, ErrorCode
from protocol_v2.errors import ServerError
from protocol_v2.events import ReplyReceived
from protocol_v2.frames import Prelude, join
from protocol_v2.hello import Limits
from protocol_v2.messages import (
    AttachReply,
    AttachRequest,
    ErrorReply,
    ReleaseRequest,
    RetrieveReply,
    RetrieveRequest,
    SharedRange,
    StoreReply,
    StoreRequest,
    decode_message,
    encode_message,
)
from protocol_v2.metrics import StatusCollector
from protocol_v2.negotiation import Offer
from protocol_v2.shared_memory import GRANULE, RangeName, Segment, SegmentName, SegmentReader, copy_into
from protocol_v2.sharing import Sharing
from protocol_v2.tiers import DiskTier
from protocol_v2.versions import SHARED_MEMORY
from tests.protocol_v2.service_harness import SPACE, Client, Harness, store_message

SHARES = Offer(features=frozenset({SHARED_MEMORY}))
KEYS = chunk_keys(SPACE, list(range(16)))


class Sharer:
    """A client with a segment of its own, which it may use rightly or not."""

    def __init__(self, harness: Harness, nbytes: int = 64 * GRANULE, *, attach: bool = True) -> None:
        self.client = harness.client(offer=SHARES)
        self.segment = Segment(nbytes)
        self.reader: SegmentReader | None = None
        if attach:
            reply = self.attach()
            assert isinstance(reply, AttachReply)
            self.reader = SegmentReader(SegmentName(reply.pid, reply.fd, reply.nonce, reply.size))

    def attach(self, **other: Any) -> Any:
        """Name the segment, or another one."""
        name = self.segment.name
        fields: dict[str, Any] = {"pid": name.pid, "fd": name.fd, "nonce": name.nonce, "size": name.size}
        return self.client.ask(AttachRequest(**(fields | other)))

    def stage(self, value: bytes) -> tuple[memoryview, SharedRange]:
        """Bytes in an announced range."""
        view = self.segment.take(len(value))
        assert view is not None
        copy_into(view, [value])
        name = self.segment.announce(view)
        assert name is not None
        return view, SharedRange(*name)

    def message(
        self, values: list[bytes], ranges: list[SharedRange], session: str = "r", first: int = 0
    ) -> StoreRequest:
        """A store that names ranges."""
        message, _ = store_message(KEYS, values, session, first)
        return msgspec.structs.replace(message, shared=tuple(ranges))

    def store(self, values: list[bytes], session: str = "r", first: int = 0) -> Any:
        """Store through shared memory."""
        staged = [self.stage(value) for value in values]
        return self.client.ask(self.message(values, [one for _, one in staged], session, first))

    def retrieve(self, count: int, session: str = "read") -> tuple[RetrieveReply, list[bytes]]:
        """Look up and retrieve: the reply, and each chunk's bytes, from wherever they are."""
        assert self.reader is not None
        hit = self.client.lookup(KEYS[:count], session=session)
        assert count == hit.hit_chunks
        request = RetrieveRequest(lease=hit.lease, count=count, shared=self.reader.name.nonce)
        ended = self.client.outcome(self.client.begin(request))
        assert isinstance(ended, ReplyReceived)
        assert isinstance(ended.message, RetrieveReply)
        inline = iter(ended.payload)
        values = []
        ranges = ended.message.ranges or [None] * count
        for where, nbytes in zip(ranges, ended.message.chunk_sizes(), strict=True):
            into = memoryview(bytearray(nbytes))
            if where is None:
                values.append(bytes(next(inline)))
            else:
                assert self.reader.read(RangeName(where.granule, where.generation), into)
                values.append(bytes(into))
        return ended.message, values


def values(*texts: str, size: int = 40) -> list[bytes]:
    """One value a chunk."""
    return [text.encode() * size for text in texts]


def code_of(answer: Any) -> Any:
    """The error code of a failed request."""
    assert isinstance(answer, ServerError), answer
    return answer.error_code


def test_what_was_stored_through_shared_memory_is_served_to_all() -> None:
    """Its bytes come through shared memory and inline alike, and another prompt's client is served none of them."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    one, other = Sharer(harness), Sharer(harness)
    assert (2, 0, 0) == _counts(one.store(values("a", "b")))
    reply, got = other.retrieve(2)
    assert (values("a", "b"), 2, ()) == (got, len(reply.ranges), tuple(reply.payload_sizes()))
    plain = harness.client()
    hit = plain.lookup(KEYS)
    assert values("a", "b") == plain.retrieve(hit.lease, 2)
    assert 0 == plain.lookup(chunk_keys(SPACE, list(range(1, 17))), session="else").hit_chunks
    assert (2, 2, 0) == tuple(harness.fact(f"shared.{name}") for name in ("stored", "retrieved", "stale"))


def test_what_a_client_does_to_its_memory_afterwards_changes_nothing() -> None:
    """After the acknowledgement the value is the server's: what is written over the staged bytes reaches nobody."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    sharer = Sharer(harness)
    view, where = sharer.stage(values("a")[0])
    assert (1, 0, 0) == _counts(sharer.client.ask(sharer.message(values("a"), [where])))
    view[:] = values("z")[0]
    assert values("a") == sharer.retrieve(1)[1]


def test_a_late_store_finds_out_that_its_range_is_another() -> None:
    """The client gave up, and the memory holds something else by the time the server comes to it: nothing is kept."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    sharer = Sharer(harness)
    harness.hold = True
    view, where = sharer.stage(values("a")[0])
    late = sharer.client.begin(sharer.message(values("a"), [where]))
    sharer.segment.withdraw(view)
    view[:] = values("z")[0]
    sharer.segment.announce(view)
    harness.release_jobs()
    sharer.client.receive()
    failed = sharer.client.outcome(late)
    assert ErrorCode.UNSHARED == code_of(failed.error)  # type: ignore[union-attr]
    assert 0 == sharer.client.lookup(KEYS, session="q").hit_chunks
    harness.hold = True  # and one that is in time is kept
    view, where = sharer.stage(values("a")[0])
    in_time = sharer.client.begin(sharer.message(values("a"), [where], session="s"))
    harness.release_jobs()
    sharer.client.receive()
    assert (1, 0, 0) == _counts(sharer.client.outcome(in_time).message)  # type: ignore[union-attr]
    assert (1, 1) == (harness.fact("shared.stale"), harness.fact("shared.stored"))


def test_stores_are_kept_in_the_order_in_which_they_came() -> None:
    """The second of two that are copied side by side is done first, and waits: no chunk is kept before its prefix."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    sharer = Sharer(harness)
    harness.hold = True
    ids = []
    for place, text in enumerate("ab"):
        _, where = sharer.stage(values(text)[0])
        ids.append(sharer.client.begin(sharer.message(values(text), [where], first=place)))
    first, second = harness.held_jobs
    harness.held_jobs = []
    harness.hold = False
    for job, answered in ((second, (False, False)), (first, (True, True))):
        job.run()
        harness.service.finish(job, harness.now)
        sharer.client.receive()
        assert answered == tuple(sharer.client.outcome(one) is not None for one in ids)
    assert values("a", "b") == sharer.retrieve(2)[1]


def test_a_store_whose_copy_fails_does_not_hold_up_the_next() -> None:
    """A range that is none costs its own request; the store that came after it is kept."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    sharer = Sharer(harness)
    harness.hold = True
    bad = sharer.client.begin(sharer.message(values("a"), [SharedRange(0, 1)]))
    _, where = sharer.stage(values("b")[0])
    good = sharer.client.begin(sharer.message(values("b"), [where], session="s"))
    harness.release_jobs()
    sharer.client.receive()
    assert ErrorCode.UNSHARED == code_of(sharer.client.outcome(bad).error)  # type: ignore[union-attr]
    assert (1, 0, 0) == _counts(sharer.client.outcome(good).message)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([[0, 1]], ErrorCode.UNSHARED),
        ([[63, 5]], ErrorCode.UNSHARED),
        ([[64, 5]], ErrorCode.UNSHARED),
        ([[2**40 - 1, 5]], ErrorCode.UNSHARED),
        ([[2**40, 5]], ErrorCode.MALFORMED),
        ([[2**63, 5]], ErrorCode.MALFORMED),
        ([[-1, 5]], ErrorCode.MALFORMED),
        ([[0, 0]], ErrorCode.MALFORMED),
        ([[0, -5]], ErrorCode.MALFORMED),
        ([[0, 2**63]], ErrorCode.MALFORMED),
        ([[0, 1.5]], ErrorCode.MALFORMED),
        ([[0, 1, 2]], ErrorCode.MALFORMED),
        ([["0", 1]], ErrorCode.MALFORMED),
        ([None], ErrorCode.MALFORMED),
        ([], ErrorCode.MALFORMED),
        ([[0, 1], [1, 1]], ErrorCode.MALFORMED),
        (b"r" * 32, ErrorCode.MALFORMED),
    ],
    ids=str,
)
def test_hostile_ranges_are_typed_errors_and_harm_nobody(ranges: Any, expected: ErrorCode) -> None:
    """Outside, unknown, negative, huge, of another shape or number: refused, nothing is stored, others are served."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    bystander, hostile = Sharer(harness), Sharer(harness)
    bystander.store(values("a"))
    message, _ = store_message(KEYS, values("a"), "evil")
    assert expected == code_of(_raw(hostile.client, message, ranges))
    assert values("a") == bystander.retrieve(1)[1]
    assert 0 == hostile.client.lookup(KEYS[1:], session="q").hit_chunks
    assert (1, 0, 0) == _counts(hostile.store(values("b"), session="fine", first=1))


def test_ranges_that_overlap_are_refused() -> None:
    """Two chunks in the same granules are malformed; side by side they are two chunks."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    sharer = Sharer(harness)
    two = [bytes([7]) * 5000, bytes([8]) * 5000]
    message, _ = store_message(KEYS, two, "s")
    assert ErrorCode.MALFORMED == code_of(_raw(sharer.client, message, [[0, 5], [1, 5]]))
    assert ErrorCode.MALFORMED == code_of(_raw(sharer.client, message, [[4, 5], [4, 5]]))
    assert (2, 0, 0) == _counts(sharer.store(two, session="s"))


def test_another_clients_segment_is_not_attached() -> None:
    """Who names another's descriptor without its nonce, or its nonce with another descriptor, is refused."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    victim, hostile = Sharer(harness), Sharer(harness, attach=False)
    theirs = victim.segment.name
    for other in ({"fd": theirs.fd}, {"nonce": theirs.nonce}, {"pid": 2**30}, {"size": GRANULE}, {"fd": 0}):
        assert ErrorCode.UNSHARED == code_of(hostile.attach(**other))
    assert ErrorCode.UNSHARED == code_of(hostile.store(values("a")))
    assert (1, 0, 0) == _counts(victim.store(values("a")))
    assert (1, 5) == (harness.fact("shared.sessions"), harness.fact("shared.refused"))
    assert isinstance(hostile.attach(), AttachReply)


def test_without_the_feature_nothing_is_shared() -> None:
    """A session that did not agree on it, on either side, can neither attach nor name ranges; inline it is served."""
    sharing = Sharing(64 * GRANULE)
    for harness, offer in ((Harness(sharing=sharing), Offer()), (Harness(), SHARES)):
        client = harness.client(offer=offer)
        assert frozenset() == client.established().agreement.features
        name = Segment(GRANULE).name
        attach = AttachRequest(pid=name.pid, fd=name.fd, nonce=name.nonce, size=name.size)
        assert ErrorCode.UNSHARED == code_of(client.ask(attach))
        message, payload = store_message(KEYS, values("a"))
        ranges = msgspec.structs.replace(message, shared=(SharedRange(0, 1),))
        assert ErrorCode.UNSHARED == code_of(client.ask(ranges))
        assert (1, 0, 0) == _counts(client.ask(message, payload))
        hit = client.lookup(KEYS[:1], session="q")
        request_id = client.begin(RetrieveRequest(lease=hit.lease, count=1, shared=b"n" * 32))
        ended = client.outcome(request_id)
        assert isinstance(ended, ReplyReceived)
        assert values("a") == [bytes(frame) for frame in ended.payload]


def test_only_the_segment_that_was_asked_for_is_named() -> None:
    """A client that can read another segment (of a server before this one) is answered inline, with the same bytes."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    sharer = Sharer(harness)
    sharer.store(values("a"))
    hit = sharer.client.lookup(KEYS[:1], session="q")
    for nonce, n_ranges in ((b"o" * 32, 0), (sharer.reader.name.nonce, 1)):  # type: ignore[union-attr]
        ended = sharer.client.outcome(sharer.client.begin(RetrieveRequest(lease=hit.lease, count=1, shared=nonce)))
        assert isinstance(ended, ReplyReceived)
        assert isinstance(ended.message, RetrieveReply)
        assert (n_ranges, 1 - n_ranges) == (len(ended.message.ranges), len(ended.payload))


def test_a_full_segment_sends_inline() -> None:
    """With room for one of three chunks all are stored, and all are served: the one by name, the others inline."""
    harness = Harness(sharing=Sharing(GRANULE))
    sharer = Sharer(harness)
    assert (3, 0, 0) == _counts(sharer.store(values("a", "b", "c")))
    reply, got = sharer.retrieve(3)
    assert values("a", "b", "c") == got
    assert [False, True, True] == [one is None for one in reply.ranges]
    assert 2 == harness.fact("shared.unplaced")


def test_values_from_elsewhere_are_moved_in_when_they_are_asked_for(tmp_path: Path) -> None:
    """What came inline, and what a restart finds on disk, is named in a reply after one copy, and needs none again."""
    for _ in range(2):
        harness = Harness(disk=DiskTier(tmp_path, budget=1 << 24), sharing=Sharing(64 * GRANULE))
        sharer = Sharer(harness)
        harness.client().store(KEYS, values("a", "b"))
        for _ in range(2):
            reply, got = sharer.retrieve(2)
            assert (values("a", "b"), True) == (got, all(reply.ranges))
        assert (2, 0) == (harness.fact("shared.moved"), harness.fact("shared.inline"))
        harness.service.close(harness.now)


def test_a_range_is_free_again_when_its_chunk_is_gone() -> None:
    """Evicted and cleared chunks give their memory back, and leased ones do not."""
    harness = Harness(memory=9000, sharing=Sharing(4 * GRANULE))
    sharer = Sharer(harness)
    sharer.store([b"a" * 3000], session="a")
    hit = sharer.client.lookup(KEYS[:1], session="holds")
    for turn in range(12):
        other = chunk_keys(SPACE, list(range(100 + turn, 104 + turn)))
        message, _ = store_message(other, [bytes([turn]) * 3000], f"s{turn}")
        staged = sharer.stage(bytes([turn]) * 3000)
        assert (1, 0, 0) == _counts(sharer.client.ask(msgspec.structs.replace(message, shared=(staged[1],))))
    assert (0, 3 * GRANULE) > (harness.fact("shared.unplaced"), harness.fact("shared.used"))
    assert [b"a" * 3000] == sharer.client.retrieve(hit.lease, 1)
    sharer.client.ask(ReleaseRequest(lease=hit.lease))
    harness.service._cache.clear(now=harness.now)
    assert 0 == harness.fact("shared.used")


def test_a_store_of_a_session_that_ended_meanwhile_is_none_of_the_next() -> None:
    """It was being copied when the client said hello again: nothing is kept, and its session id is free."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    sharer = Sharer(harness)
    staged = sharer.stage(b"a" * 3000)
    harness.hold = True
    sharer.client.begin(sharer.message([b"a" * 3000], [staged[1]]))
    sharer.client.connection.lose("test")
    sharer.client.hello()
    harness.release_jobs()
    assert (0, 0) == (harness.fact("cache.sessions"), harness.fact("tier.memory.objects"))
    other = chunk_keys(SPACE, list(range(50, 66)))
    assert 0 == sharer.client.lookup(other, session="r").hit_chunks


def test_a_session_that_ends_lets_go_of_the_clients_memory() -> None:
    """Silence, a new hello and a close end it; what was stored stays."""
    harness = Harness(sharing=Sharing(64 * GRANULE), limits=Limits(silence_ms=1000))
    sharer = Sharer(harness)
    sharer.store(values("a"))
    assert 1 == harness.fact("shared.sessions")
    sharer.client.hello()
    assert 0 == harness.fact("shared.sessions")
    assert ErrorCode.UNSHARED == code_of(sharer.store(values("b"), session="s", first=1))
    assert isinstance(sharer.attach(), AttachReply)
    assert values("a") == sharer.retrieve(1)[1]
    harness.pass_time(2)
    assert 0 == harness.fact("shared.sessions")
    assert 1 == harness.client().lookup(KEYS).hit_chunks


def test_a_chunk_beyond_the_limits_is_no_larger_through_shared_memory() -> None:
    """The payload limit bounds what one message names, in both directions."""
    harness = Harness(sharing=Sharing(64 * GRANULE), limits=Limits(max_payload_bytes=10_000))
    sharer = Sharer(harness)
    large = [b"a" * 6000, b"b" * 6000]
    staged = [sharer.stage(value) for value in large]
    message = sharer.message(large, [one for _, one in staged])
    assert ErrorCode.TOO_LARGE == code_of(
        _raw(sharer.client, message, [[one.granule, one.generation] for _, one in staged])
    )
    for place, value in enumerate(large):
        assert (1, 0, 0) == _counts(sharer.store([value], first=place))
    hit = sharer.client.lookup(KEYS[:2], session="q")
    request = RetrieveRequest(lease=hit.lease, count=2, shared=sharer.reader.name.nonce)  # type: ignore[union-attr]
    ended = sharer.client.outcome(sharer.client.begin(request))
    assert isinstance(ended, ReplyReceived)
    assert 1 == ended.message.count  # type: ignore[union-attr]


def test_a_scraper_sees_shared_memory() -> None:
    """What is counted grows, what is in use is a gauge, and every fact is one or the other."""
    harness = Harness(sharing=Sharing(64 * GRANULE))
    sharer = Sharer(harness)
    sharer.store(values("a"))
    facts = {name for name in harness.service.status(0.0) if name.startswith("shared.")}
    families = {one.name: one for one in StatusCollector(lambda: harness.service.status(0.0)).collect()}
    kinds = {name: families[f"extra_keys_{name.replace('.', '_')}"].type for name in facts}
    gauges = {"shared.bytes", "shared.used", "shared.sessions"}
    assert {name: "gauge" if name in gauges else "counter" for name in facts} == kinds
    assert 1.0 == families["extra_keys_shared_stored"].samples[0].value


def _counts(reply: Any) -> tuple[int, int, int]:
    assert isinstance(reply, StoreReply), reply
    return reply.stored, reply.present, reply.declined


def _raw(client: Client, message: StoreRequest, ranges: Any) -> Any:
    """Send a store whose ranges no client of ours would send; the error."""
    body = msgspec.msgpack.decode(encode_message(message)) | {"shared": ranges}
    request_id = client.connection.new_request_id()
    digest = client.connection._short_digest()
    frames = join(Prelude(Code.STORE, request_id, 1000, digest), msgspec.msgpack.encode(body))
    (answer,) = client.harness.raw(client.identity, *[bytes(frame) for frame in frames])
    reply = decode_message(Code.ERROR, bytes(answer[2])[24:], wire=2)
    assert isinstance(reply, ErrorReply)
    return ServerError(reply.error, reply.message, retriable=reply.retriable)
