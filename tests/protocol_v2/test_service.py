"""The service: one bad message costs one request, identity holds, leases and sessions end with their peer."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keying import (
    CacheSalt,
    ChunkKey,
    ExtraKey,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    PromptEmbeds,
    Tag,
    chunk_keys,
)
from protocol_v2.cache import CacheLimits
from protocol_v2.codes import ErrorCode, MissReason, RefusalCode
from protocol_v2.errors import ServerError
from protocol_v2.events import Established, Refused, ReplyReceived, RequestFailed, SendRequest
from protocol_v2.hello import Limits
from protocol_v2.identity import keys_of_digests, keys_of_tokens
from protocol_v2.messages import (
    ClearRequest,
    EndSessionRequest,
    LookupRequest,
    PingRequest,
    PrefetchRequest,
    ReleaseRequest,
    RetrieveReply,
    RetrieveRequest,
    StatusRequest,
)
from protocol_v2.tiers import DiskTier
from tests.protocol_v2.service_harness import SPACE, Client, Harness, store_message

TOKENS = list(range(1, 13))


def keys(*extra_keys: ExtraKey, tokens: list[int] = TOKENS) -> list[ChunkKey]:
    """Keys in the small space."""
    return chunk_keys(SPACE, tokens, extra_keys)


def values(*texts: str) -> list[bytes]:
    """One value a chunk."""
    return [text.encode() * 8 for text in texts]


def code_of(answer: Any) -> Any:
    """The error code of a failed request."""
    assert isinstance(answer, ServerError), answer
    return answer.error_code


def test_store_lookup_retrieve_and_another_picture_misses() -> None:
    """The main job: what was stored is hit with its bytes, and the same tokens with another picture are not."""
    client = Harness().client()
    cat, dog = keys(MultimodalItem("cat", 5, 4)), keys(MultimodalItem("dog", 5, 4))
    assert (3, 0, 0) == _counts(client.store(cat, values("a", "b", "c")))
    hit = client.lookup(cat)
    assert (3, None) == (hit.hit_chunks, hit.miss)
    assert values("a", "b", "c") == client.retrieve(hit.lease, 3)
    other = client.lookup(dog, session="other")
    assert (1, MissReason.ABSENT) == (other.hit_chunks, other.miss)
    assert values("a") == client.retrieve(other.lease, 1)


def _counts(reply: Any) -> tuple[int, int, int]:
    return reply.stored, reply.present, reply.declined


def test_digests_and_tokens_give_one_answer() -> None:
    """A caller that sends tokens and extra keys gets what a caller that derives gets."""
    client = Harness().client()
    extra: list[ExtraKey] = [MultimodalItem("cat", 5, 4), LoraAdapter("a", "r", 1), CacheSalt("s")]
    client.store(keys(*extra), values("a", "b", "c"))
    by_tokens = client.ask(LookupRequest(session="t", keys=keys_of_tokens(TOKENS, extra)))
    without = client.ask(LookupRequest(session="u", keys=keys_of_tokens(TOKENS, extra[:2])))
    assert (3, 0) == (by_tokens.hit_chunks, without.hit_chunks)
    assert 3 == client.lookup(keys(*extra), session="v").hit_chunks


def test_a_second_store_of_the_same_chunks_changes_nothing() -> None:
    """O11: store is idempotent, and what is there wins."""
    client = Harness().client()
    client.store(keys(), values("a", "b", "c"))
    assert (0, 3, 0) == _counts(client.store(keys(), values("x", "y", "z"), session="s"))
    assert values("a", "b", "c") == client.retrieve(client.lookup(keys(), session="t").lease, 3)


def test_hit_length_is_the_minimum_over_all_shards() -> None:
    """H10, I10: a chunk is held if every rank of every group is; disagreement is not fatal."""
    client = Harness().client()
    client.store(keys(), values("a", "b", "c"), world=2, rank=0)
    assert 0 == client.lookup(keys(), world=2).hit_chunks
    client.store(keys(), values("d", "e"), world=2, rank=1)
    hit = client.lookup(keys(), world=2)
    assert 2 == hit.hit_chunks
    assert 0 == client.lookup(keys(), session="two groups", world=2, groups=2).hit_chunks
    assert 0 == client.lookup(keys(), session="another world", world=1).hit_chunks
    assert values("d", "e") == client.retrieve(hit.lease, 2, world=2, rank=1)


def test_another_space_never_hits() -> None:
    """I7: a client with another dtype shares the server and no key; both sides are told what differs."""
    harness = Harness()
    client = harness.client()
    client.store(keys(), values("a", "b", "c"))
    fp8 = KeySpace("org/m", chunk_size=4, kv_dtype="float8_e4m3fn")
    other = harness.client(fp8, boot=b"d" * 16)
    notice = other.established().notice
    assert ["kv_dtype"] == [one.field for one in notice]
    assert 1 == harness.fact("service.space_notices")
    assert 0 == other.lookup(chunk_keys(fp8, TOKENS)).hit_chunks
    assert 0 == other.lookup(keys(), session="wrong root").hit_chunks
    assert 3 == client.lookup(keys(), session="own").hit_chunks


def test_a_pinned_server_refuses_another_space_and_names_the_field(caplog: pytest.LogCaptureFixture) -> None:
    """A space mismatch is loud: a refusal with both values, a counter, one line in the server's log, no session."""
    harness = Harness(expected=(SPACE,))
    harness.client()
    client = Client(harness, b"wrong", KeySpace("org/m", chunk_size=8, kv_dtype="bfloat16"), b"d" * 16)
    refused = client.hello()
    assert isinstance(refused, Refused)
    assert (RefusalCode.SPACE_MISMATCH, "space.chunk_size") == (refused.refusal.code, refused.refusal.field)
    assert (1, 1) == (harness.fact("service.space_mismatches"), harness.fact("server.peers"))
    [line] = [one for one in caplog.messages if one.startswith("refused ")]
    assert "space.chunk_size: asked '8', accepted '4'" in line


def test_a_session_carries_one_identity() -> None:
    """F7: after a lookup with one salt, a store under the same session with another is refused and keeps nothing."""
    client = Harness().client()
    client.lookup(keys(CacheSalt("a")), session="r")
    assert ErrorCode.IDENTITY_MISMATCH == code_of(
        client.store(keys(CacheSalt("b")), values("x", "y", "z"), session="r")
    )
    assert 0 == client.lookup(keys(CacheSalt("b")), session="other").hit_chunks
    assert (3, 0, 0) == _counts(client.store(keys(CacheSalt("a")), values("x", "y", "z"), session="r"))


def test_sessions_of_two_clients_do_not_meet() -> None:
    """Request ids are unique in one engine only: the same id of another client is another session."""
    harness = Harness()
    one, other = harness.client(), harness.client(boot=b"d" * 16)
    one.lookup(keys(CacheSalt("a")), session="0")
    assert 0 == other.lookup(keys(CacheSalt("b")), session="0").hit_chunks
    assert not isinstance(other.store(keys(CacheSalt("b")), values("x"), session="0"), ServerError)


def test_a_lease_ends_by_release_by_session_and_with_its_client() -> None:
    """O1, O3, O4, O5: part by part, whole, twice, by end of session, by silence; the count is 0 after each."""
    harness = Harness(limits=Limits(silence_ms=20_000))
    client = harness.client()
    client.store(keys(), values("a", "b", "c"))
    hit = client.lookup(keys())
    assert 3 == harness.fact("cache.held")
    assert 1 == client.ask(ReleaseRequest(lease=hit.lease, first=2)).released
    assert 0 == client.ask(ReleaseRequest(lease=hit.lease, first=2)).released
    assert 2 == harness.fact("cache.held")
    assert client.ask(EndSessionRequest(session="r")).known
    assert not client.ask(EndSessionRequest(session="r")).known
    assert (0, 0) == (harness.fact("cache.held"), harness.fact("cache.leases"))
    client.lookup(keys(), session="again")
    assert 3 == harness.fact("cache.held")
    harness.pass_time(21)
    assert (0, 0) == (harness.fact("cache.held"), harness.fact("server.peers"))


def test_a_second_reader_keeps_its_lease() -> None:
    """O4: a reader that frees twice does not free another's chunks."""
    harness = Harness()
    one, other = harness.client(), harness.client(boot=b"d" * 16)
    one.store(keys(), values("a", "b", "c"))
    first, second = one.lookup(keys(), session="x"), other.lookup(keys(), session="y")
    one.ask(ReleaseRequest(lease=first.lease))
    one.ask(ReleaseRequest(lease=first.lease))
    assert 3 == harness.fact("cache.held")
    assert values("a", "b", "c") == other.retrieve(second.lease, 3)


def test_a_worker_retrieves_by_the_scheduler_s_lease() -> None:
    """Lookup and retrieve come from two processes of one engine: the lease is what joins them."""
    harness = Harness()
    scheduler, worker = harness.client(), harness.client(boot=b"d" * 16)
    worker.store(keys(), values("a", "b", "c"))
    hit = scheduler.lookup(keys())
    assert values("b", "c") == worker.retrieve(hit.lease, 2, first=1)
    assert ErrorCode.LEASE_UNKNOWN == code_of(worker.retrieve(b"n" * 16, 1))


def test_a_new_hello_ends_what_the_old_session_held() -> None:
    """A client that says hello again holds nothing of before, and its old messages are of no session."""
    harness = Harness()
    client = harness.client()
    client.store(keys(), values("a", "b", "c"))
    client.lookup(keys())
    client.hello()
    assert 0 == harness.fact("cache.held")
    assert 3 == client.lookup(keys()).hit_chunks


@pytest.mark.parametrize("broken", [False, True])
def test_work_of_an_ended_session_answers_nothing_of_the_next(tmp_path: Path, broken: bool) -> None:
    """A store that was begun before another hello is no acknowledgement, and no failure, of a later one with its id."""
    harness = Harness(disk=DiskTier(tmp_path, budget=1 << 20))
    before = harness.client()
    harness.release_jobs()
    harness.hold = True
    begun = before.begin(*store_message(keys(), values("a", "b")))
    [old] = harness.held_jobs
    again = Client(harness, before.identity, SPACE, b"c" * 16)
    assert isinstance(again.hello(), Established)
    other = keys(CacheSalt("s"))
    request = again.begin(*store_message(other, values("x", "y")))
    assert begun == request
    [_, new] = harness.held_jobs
    harness.held_jobs = []
    if broken:
        (tmp_path / "xk2.tmp").rmdir()
    old.run()
    harness.service.finish(old, harness.now)
    again.receive()
    assert again.outcome(request) is None
    (tmp_path / "xk2.tmp").mkdir(exist_ok=True)
    new.run()
    harness.service.finish(new, harness.now)
    again.receive()
    assert isinstance(again.outcome(request), ReplyReceived)
    assert 2 == again.lookup(other, "t").hit_chunks


def test_a_restarted_server_is_noticed_on_the_next_message() -> None:
    """A message of the old session is answered as such, and the client's request fails cleanly, not wrongly."""
    harness = Harness()
    client = harness.client()
    client.store(keys(), values("a", "b", "c"))
    replaced = Harness(boot=b"t" * 16)
    client.harness = replaced
    answer = client.lookup(keys())
    assert "session" in str(answer).lower()
    assert isinstance(client.hello(), Established)
    assert 0 == client.lookup(keys()).hit_chunks


GARBAGE: list[list[bytes]] = [
    [],
    [b""],
    [b"GET / HTTP/1.1\r\n\r\n"],
    [b"XK2\0"],
    [b"XK2\0", b"\x18"],
    [b"XK2\0", b"\x18", b""],
    [b"XK2\0", b"\x18", b"\x10\0" + bytes(22)],
    [b"XK2\0", b"\x18", bytes(24) + b"\x80"],
    [b"XK2\0", b"\x18", b"\x01\0" + bytes(22) + b"\x80"],
    [b"XK2\0", b"\x18", b"\x01\0" + bytes(22) + b"\x91" * 100_000],
    [b"XK2\0", b"\x19", bytes(24)],
    [b"XK3\0", b"\x18", bytes(64)],
    [b"\x07", b"\x08", b"\x80", b"\x01"],
    [b"\xff" * 300] * 50,
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_costs_nobody_anything(frames: list[bytes]) -> None:
    """L11, M4, M9: any bytes are answered with an error or silence; others are served, and nothing is lost."""
    harness = Harness()
    client = harness.client()
    client.store(keys(), values("a", "b", "c"))
    hit = client.lookup(keys())
    for identity in (b"stranger", client.identity):
        answers = harness.raw(identity, *frames)
        assert len(answers) <= 1
    assert values("a", "b", "c") == client.retrieve(hit.lease, 3)
    assert 1 == harness.fact("server.peers")


def test_an_unreadable_body_is_answered_where_an_id_can_be_read() -> None:
    """The prelude gives the id, so the one request at fault gets its error and the next one is served."""
    client = Harness().client()
    request_id = client.connection.new_request_id()
    frames = client.connection.send(SendRequest(request_id, PingRequest()), client.harness.now)
    frames[2] = bytes(frames[2])[:24] + b"\xc1"
    client.send(frames)
    ended = client.outcome(request_id)
    assert ended is not None
    assert ErrorCode.MALFORMED == code_of(getattr(ended, "error", None))
    assert client.ask(PingRequest()).boot == client.harness.service.boot_id


@pytest.mark.parametrize(
    ("frames", "expected"),
    [([b"\x05", b"\x20"], b"\x05"), ([b"\xcd\x01\x00", b"\x20"], b"\xcd\x01\x00")],
)
def test_the_v1_probe_lists_what_the_server_can(frames: list[bytes], expected: bytes) -> None:
    """A client that does not know who listens gets extra_keys/2 in the frames that v1 servers use."""
    ((uid, operation, answer),) = Harness().raw(b"probe", *frames)
    assert (expected, b"\x20") == (uid, operation)
    assert "extra_keys/2" in msgspec.msgpack.decode(answer)


def test_keyed_requests_need_a_space() -> None:
    """A tool that said hello without a space may ask for status, not for keys."""
    harness = Harness()
    tool = harness.client(None)
    assert ErrorCode.NO_SPACE == code_of(tool.lookup(keys()))
    assert ErrorCode.NO_SPACE == code_of(tool.store(keys(), values("a", "b", "c")))
    assert harness.fact("schema.storage") == tool.ask(StatusRequest()).status["schema.storage"]


def test_bounds_are_answered_as_such() -> None:
    """Too many chunks, places that are not the keys', and a store of nothing that fits are errors of their request."""
    client = Harness(limits=Limits(max_chunks=2)).client()
    assert ErrorCode.TOO_LARGE == code_of(client.lookup(keys()))
    wide = Harness().client()
    message, payload = store_message(keys(), values("a"))
    assert ErrorCode.INVALID_IDENTITY == code_of(wide.ask(msgspec.structs.replace(message, n_tokens=(5,)), payload))
    assert ErrorCode.INVALID_IDENTITY == code_of(wide.ask(msgspec.structs.replace(message, first=3), payload))
    assert ErrorCode.MALFORMED == code_of(wide.lookup(keys(), world=256, groups=257))
    assert 0 == wide.lookup(keys(), world=256, groups=256).hit_chunks
    declined = Harness(memory=1 << 12).client()
    assert (0, 0, 1) == _counts(declined.store(keys(), [b"x" * 10_000]))


def test_a_retrieve_beyond_the_payload_limit_gives_what_fits() -> None:
    """The leading chunks that fit, without a miss; the rest when it is asked for; all of it where all fits."""
    client = Harness(limits=Limits(max_payload_bytes=2000)).client()
    whole = [b"a" * 900, b"b" * 900, b"c" * 900]
    client.store(keys(), whole[:2])
    client.store(keys(), whole[2:], session="rest", first=2)
    hit = client.lookup(keys(), session="read")
    assert 3 == hit.hit_chunks
    ended = client.outcome(client.begin(RetrieveRequest(lease=hit.lease, count=3)))
    assert isinstance(ended, ReplyReceived)
    assert isinstance(ended.message, RetrieveReply)
    assert (2, None) == (ended.message.count, ended.message.miss)
    assert whole[:2] == [bytes(frame) for frame in ended.payload]
    assert whole[2:] == client.retrieve(hit.lease, 1, first=2)


def test_a_chunk_beyond_the_payload_limit_is_too_large(tmp_path: Path) -> None:
    """One that does not fit alone, kept from a run with a wider limit, is refused; those before it are delivered."""
    wide = Harness(disk=DiskTier(tmp_path / "store", budget=1 << 24))
    wide.client().store(keys(), [b"a" * 900, b"b" * 2100])
    wide.service.close(wide.now)
    narrow = Harness(disk=DiskTier(tmp_path / "store", budget=1 << 24), limits=Limits(max_payload_bytes=2000)).client()
    hit = narrow.lookup(keys())
    assert 2 == hit.hit_chunks
    assert [b"a" * 900] == narrow.retrieve(hit.lease, 2)
    assert ErrorCode.TOO_LARGE == code_of(narrow.retrieve(hit.lease, 1, first=1))


def crowded(tmp_path: Path) -> tuple[Harness, list[Client], list[int]]:
    """Three chunks on disk that only one reader at a time may read, and three clients that have asked for them."""
    limits = CacheLimits(max_pending=1)
    harness = Harness(memory=0, disk=DiskTier(tmp_path, budget=1 << 20), cache_limits=limits)
    for place, value in enumerate(values("a", "b", "c")):
        assert (1, 0, 0) == _counts(harness.client().store(keys(), [value], first=place))
    clients = [harness.client() for _ in range(3)]
    leases = [client.lookup(keys()).lease for client in clients]
    harness.hold = True
    asked = [
        client.begin(RetrieveRequest(lease=lease, count=3), timeout=timeout)
        for client, lease, timeout in zip(clients, leases, (60.0, 5.0, 60.0), strict=True)
    ]
    return harness, clients, asked


def test_retrieves_of_many_ranks_wait_their_turn(tmp_path: Path) -> None:
    """Readers that come all at once are served one after the other, not refused; memory stays within its bound."""
    harness, clients, asked = crowded(tmp_path)
    assert 1 == len(harness.held_jobs)
    assert [None] * 3 == [client.outcome(one) for client, one in zip(clients, asked, strict=True)]
    harness.release_jobs()
    for client, one in zip(clients, asked, strict=True):
        client.receive()
        ended = client.outcome(one)
        assert isinstance(ended, ReplyReceived)
        assert values("a", "b", "c") == [bytes(frame) for frame in ended.payload]
    assert 0 == harness.fact("cache.pending_bytes")
    harness.service.close(harness.now)


def test_a_retrieve_that_waited_too_long_is_not_read(tmp_path: Path) -> None:
    """One whose client does not wait any more is let go of, and keeps nobody behind it from being served."""
    harness, clients, asked = crowded(tmp_path)
    assert 2 == harness.fact("server.waiting")
    harness.pass_time(6)
    assert (1, 1) == (harness.fact("service.dropped"), harness.fact("server.waiting"))
    harness.release_jobs()
    clients[2].receive()
    assert isinstance(clients[2].outcome(asked[2]), ReplyReceived)
    assert 6 == harness.fact("cache.retrieved.disk")
    harness.service.close(harness.now)


def test_retrieves_that_wait_end_with_their_session_and_with_the_server(tmp_path: Path) -> None:
    """A hello drops what waits of the session before it; a stop answers the rest, and nothing is read for either."""
    harness, clients, asked = crowded(tmp_path)
    clients[1].connection.lose("test")
    assert isinstance(clients[1].hello(), Established)
    harness.service.begin_stop(harness.now)
    clients[2].receive()
    ended = clients[2].outcome(asked[2])
    assert isinstance(ended, RequestFailed)
    assert ErrorCode.SHUTTING_DOWN == code_of(ended.error)
    harness.release_jobs()
    assert (3, False) == (harness.fact("cache.retrieved.disk"), harness.service.busy)
    harness.service.close(harness.now)


def test_clear_forgets_what_is_not_leased() -> None:
    """Clear reports what went; leased chunks stay and are still served."""
    harness = Harness()
    client = harness.client()
    client.store(keys(), values("a", "b", "c"))
    hit = client.lookup(keys()[:1])
    assert 2 == client.ask(ClearRequest(scope="space")).objects
    assert values("a") == client.retrieve(hit.lease, 1)
    client.ask(EndSessionRequest(session="r"))
    assert 1 == client.ask(ClearRequest(scope="all")).objects
    assert 0 == client.lookup(keys(), session="after").hit_chunks


def test_one_more_peer_than_there_is_room_for_is_refused_as_busy() -> None:
    """The table of peers is bounded, and a refusal says that a retry may help."""
    harness = Harness(max_peers=1)
    harness.client()
    late = Client(harness, b"late", SPACE, b"d" * 16)
    refused = late.hello()
    assert isinstance(refused, Refused)
    assert RefusalCode.BUSY == refused.refusal.code


def test_a_stop_fails_what_is_pending_and_what_still_comes(tmp_path: Path) -> None:
    """What is pending gets one SHUTTING_DOWN at once, a later request too, a hello a refusal; a begun store is kept."""
    harness = Harness(disk=DiskTier(tmp_path, budget=1 << 20))
    client = harness.client()
    harness.release_jobs()
    harness.hold = True
    begun = client.begin(*store_message(keys(), values("a")))
    assert client.outcome(begun) is None
    harness.service.begin_stop(harness.now)
    client.receive()
    failed = client.outcome(begun)
    assert isinstance(failed, RequestFailed)
    assert (ErrorCode.SHUTTING_DOWN, True) == (code_of(failed.error), failed.error.retriable)
    assert ErrorCode.SHUTTING_DOWN == code_of(client.ask(PingRequest()))
    refused = Client(harness, b"late", SPACE, b"d" * 16).hello()
    assert isinstance(refused, Refused)
    assert RefusalCode.SHUTTING_DOWN == refused.refusal.code
    assert harness.service.busy
    n_events = len(client.events)
    harness.release_jobs()
    client.receive()
    assert (n_events, False) == (len(client.events), harness.service.busy)
    harness.service.close(harness.now)
    assert 1 == Harness(disk=DiskTier(tmp_path, budget=1 << 20)).client().lookup(keys()).hit_chunks


def test_work_on_disk_never_holds_up_a_ping(tmp_path: Path) -> None:
    """O7: while a store waits for the disk, others are answered; the store is acknowledged when it is durable."""
    harness = Harness(disk=DiskTier(tmp_path, budget=1 << 20))
    client = harness.client()
    harness.release_jobs()
    harness.hold = True
    pending = client.begin(*store_message(keys(), values("a", "b", "c")))
    assert client.outcome(pending) is None
    assert client.ask(PingRequest()).boot == harness.service.boot_id
    assert 0 == client.lookup(keys(), session="early").hit_chunks
    harness.release_jobs()
    client.receive()
    assert client.outcome(pending) is not None
    assert 3 == client.lookup(keys(), session="late").hit_chunks
    harness.service.close(harness.now)


def test_work_that_blocks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R: beyond the bound a request is told BUSY, and nothing stays reserved for it; later it is served."""
    harness = Harness(disk=DiskTier(tmp_path, budget=1 << 20))
    client = harness.client()
    harness.release_jobs()
    harness.hold = True
    monkeypatch.setattr("protocol_v2.jobs.MAX_JOBS", 1)
    begun = client.begin(*store_message(keys(), values("a")))
    pending = harness.fact("cache.pending_bytes")
    assert pending > 0
    assert ErrorCode.BUSY == code_of(client.store(keys(), values("b"), first=1))
    assert pending == harness.fact("cache.pending_bytes")
    harness.pass_time(60)  # what nobody waits for is given up too
    assert 1 == len(harness.held_jobs)
    harness.release_jobs()
    client.receive()
    assert client.outcome(begun) is None  # its deadline is over; it is kept
    again = harness.client()
    assert 1 == again.lookup(keys(), session="q").hit_chunks
    assert (1, 0, 0) == _counts(again.store(keys(), values("b"), session="q", first=1))
    harness.service.close(harness.now)


def test_a_restart_finds_what_was_acknowledged(tmp_path: Path) -> None:
    """Acknowledged entries are there after a restart, with their bytes; prefetch brings them into memory."""
    before = Harness(disk=DiskTier(tmp_path, budget=1 << 20))
    before.client().store(keys(), values("a", "b", "c"))
    before.service.close(before.now)
    after = Harness(disk=DiskTier(tmp_path, budget=1 << 20), boot=b"t" * 16)
    client = after.client()
    prefetched = client.ask(PrefetchRequest(session="r", keys=keys_of_digests(keys())))
    assert (3, 0) == (prefetched.accepted, prefetched.resident)
    again = client.ask(PrefetchRequest(session="r", keys=keys_of_digests(keys())))
    assert (0, 3) == (again.accepted, again.resident)
    hit = client.lookup(keys())
    assert values("a", "b", "c") == client.retrieve(hit.lease, 3)
    assert 0 == client.lookup(keys(CacheSalt("s")), session="salted").hit_chunks
    after.service.close(after.now)


def test_a_ping_tells_of_a_stall_of_the_loop() -> None:
    """A loop that was held up says by how much, to whoever asks during it or soon after, and not for ever."""
    harness = Harness()
    client = harness.client()

    def lag() -> float:
        seconds: float = client.ask(PingRequest()).loop_lag_us / 1e6
        assert harness.fact("server.loop_lag_us") / 1e6 == seconds
        return seconds

    def turns(count: int) -> None:
        for _ in range(count):
            harness.pass_time(max(0.0, harness.service.next_tick(harness.now) - harness.now))

    turns(30)
    assert pytest.approx(0, abs=1e-6) == lag()
    due = harness.service.next_tick(harness.now)
    harness.now = due + 2.5
    assert pytest.approx(2.5) == lag()
    turns(5)
    assert pytest.approx(2.5) == lag()
    turns(30)
    assert pytest.approx(0, abs=1e-6) == lag()


def test_a_reply_after_the_deadline_is_not_sent(tmp_path: Path) -> None:
    """Nobody waits for it any more: it is dropped and counted, and the entry it acknowledged is there."""
    harness = Harness(disk=DiskTier(tmp_path, budget=1 << 20))
    client = harness.client()
    harness.hold = True
    client.begin(*store_message(keys(), values("a", "b", "c")), timeout=1.0)
    harness.pass_time(2)
    assert 1 == harness.fact("service.dropped")
    harness.release_jobs()
    assert 3 == client.lookup(keys(), session="late").hit_chunks
    harness.service.close(harness.now)


def test_a_handler_that_fails_costs_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """M3, M4: an exception in a handler is an INTERNAL error of that request; its text does not leave the server."""
    harness = Harness()
    client = harness.client()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("s3cret detail")

    monkeypatch.setattr(harness.service._cache, "release", broken)
    answer = client.ask(ReleaseRequest(lease=b"l" * 16))
    assert ErrorCode.INTERNAL == code_of(answer)
    assert "s3cret" not in str(answer)
    assert 0 == client.lookup(keys()).hit_chunks


def test_hello_again_with_the_same_identity_is_one_peer() -> None:
    """A client that greets many times takes one place in the table."""
    harness = Harness(max_peers=2)
    client = harness.client()
    for _ in range(5):
        assert isinstance(client.hello(), Established)
    assert 1 == harness.fact("server.peers")


VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "key-schema-2.json").read_text())["cases"]
MAKERS: dict[str, Any] = {
    "mm": MultimodalItem,
    "lora": LoraAdapter,
    "salt": CacheSalt,
    "tag": lambda name, value, start: Tag(name, bytes.fromhex(value), start),
    "embeds": lambda offset, rows, width, dtype: PromptEmbeds(offset, bytes.fromhex(rows), width, dtype),
}


@pytest.mark.parametrize("case", [case for case in VECTORS if case["keys"]], ids=lambda case: case["name"])
def test_tokens_and_digests_meet_in_the_vectors(case: dict[str, Any]) -> None:
    """The server derives from tokens what the client derives, and both are the digests of the shared vectors."""
    fields = dict(case["space"])
    space = KeySpace(fields.pop("model"), **fields)
    extra_keys = [MAKERS[kind](*arguments) for kind, *arguments in case["extra_keys"]]
    derived = chunk_keys(space, case["tokens"], extra_keys, partial_tail=case["partial_tail"])
    assert case["keys"] == [key.digest.hex() for key in derived]
    client = Harness().client(space)
    client.store(derived, [key.digest for key in derived])
    asked = keys_of_tokens(case["tokens"], extra_keys, partial_tail=case["partial_tail"])
    hit = client.ask(LookupRequest(session="tokens", keys=asked))
    assert len(derived) == hit.hit_chunks
    assert [key.digest for key in derived] == client.retrieve(hit.lease, len(derived))
    salted = keys_of_tokens(case["tokens"], [*_without_salt(extra_keys), CacheSalt("other")])
    assert 0 == client.ask(LookupRequest(session="salted", keys=salted)).hit_chunks


def _without_salt(extra_keys: list[ExtraKey]) -> list[ExtraKey]:
    return [one for one in extra_keys if not isinstance(one, CacheSalt)]


CAPTURED_V1: list[list[str]] = [
    ["00", "15"],  # get_chunk_size
    ["02", "16", "c0"],  # ping(None)
    ["03", "0e", "81aa6d6f64656c5f6e616d65a16d"],  # register, cut short
    ["05", "08", "8aaa6d6f64656c5f6e616d65a16daa776f726c645f73697a6501", "01"],  # lookup, cut short
    ["06", "09", "a27230"],  # query_prefetch_status
    ["07", "18"],  # noop
    ["08", "14", "c2"],  # clear
    ["0f", "0d", "a27232"],  # end_session
]


def test_captured_v1_frames_harm_no_entry_and_get_no_wrong_answer() -> None:
    """L13: a server without a v1 front answers v1's probe, is silent to the rest (clear included), and serves on."""
    harness = Harness()
    client = harness.client()
    client.store(keys(), values("a", "b", "c"))
    for frames in CAPTURED_V1:
        assert [] == harness.raw(b"v1 client", *map(bytes.fromhex, frames))
    assert harness.raw(b"v1 client", b"\x01", b"\x20")
    assert len(CAPTURED_V1) == harness.fact("service.foreign")
    assert 3 == client.lookup(keys(), session="after").hit_chunks
