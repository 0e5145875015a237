"""The v1 front: what LMCache 0.5.x clients get from it, byte for byte where the release was captured."""

import pickle
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from compat import CompatError
from compat.v1 import mp_chunk_hashes
from compat.v1.front import V1Front
from compat.v1.front_sessions import CLIENT_TTL, ClientTable
from compat.v1.operations import OPERATIONS, V1Operation
from compat.v1.wire import encode_request
from keying import chunk_keys
from protocol_v2.cache import ChunkCache
from protocol_v2.metrics import StatusCollector
from protocol_v2.tiers import DiskTier
from tests.compat.captured_frames import captured_exchanges
from tests.compat.front_harness import CHUNK, CHUNK_BYTES, SHAPE, FrontHarness, V1Client, pickled
from tests.protocol_v2.service_harness import SPACE, Harness

PROMPT = tuple(range(100, 118))
"""Four chunks and a tail of two."""

OTHER = (1, *PROMPT[1:])
"""No chunk in common with `PROMPT`."""

RELEASE_READ_SECONDS = 300
"""That LMCache's own server keeps what a lookup hit."""

ENCODE = msgspec.msgpack.encode


@pytest.fixture
def harness() -> FrontHarness:
    """A service with a front over memory."""
    return FrontHarness()


@pytest.fixture
def client(harness: FrontHarness) -> V1Client:
    """A client with one worker."""
    return harness.v1_client()


def disk_tier(folder: Path) -> DiskTier:
    """A disk tier over a folder, as a started server has one."""
    return DiskTier(folder / "store", budget=1 << 20)


# ---- what the release was captured saying


def test_every_captured_request_gets_the_captured_answer(harness: FrontHarness) -> None:
    """Frame by frame, but for the capability that the probe lists, and the pickle, which was not kept."""
    for exchange in captured_exchanges():
        (answer,) = harness.raw(b"captured", *exchange.request)
        if exchange.op == "get_experimental":
            assert [*exchange.response[:2], ENCODE(["extra_keys/2"])] == answer
        elif exchange.op == "prepare_retrieve":
            assert list(exchange.response[:2]) == answer[:2]
            decoded = msgspec.msgpack.decode(answer[2])
            assert ["success", "data", "context"] == list(decoded)
            assert decoded["success"] is True
        else:
            assert list(exchange.response) == answer, exchange.op


def test_an_operation_may_be_named_and_is_echoed_as_it_came(client: V1Client) -> None:
    """Number or name, the first two frames come back unchanged."""
    assert [[b"\x07", b"\x18", b"\xa2OK"]] == client.send(b"\x07", b"\x18")
    assert [[b"\x07", ENCODE("noop"), b"\xa2OK"]] == client.send(b"\x07", ENCODE("noop"))
    named = client.send(b"\x07", ENCODE("get_experimental"))
    assert [[b"\x07", ENCODE("get_experimental"), ENCODE(["extra_keys/2"])]] == named


# ---- hits


def test_what_is_stored_is_hit_with_its_own_values(client: V1Client) -> None:
    """Four chunks in, four out, in order; the tail is nobody's."""
    assert client.hits(PROMPT) == 0
    assert client.store(PROMPT, 10)
    assert client.hits(PROMPT) == 4
    assert [10, 11, 12, 13] == client.fetch(PROMPT)


@pytest.mark.parametrize("change", ["salt", "model", "tokens", "world", "dtype"])
def test_every_part_of_an_identity_misses(harness: FrontHarness, client: V1Client, change: str) -> None:
    """Another salt, model, first token, world size or element type is another entry; the same again is a hit."""
    assert client.store(PROMPT, 10)
    assert [10, 11, 12, 13] == client.fetch(PROMPT)
    match change:
        case "salt":
            assert client.fetch(PROMPT, salt="tenant") is None
        case "model":
            assert harness.v1_client(model="org/other").fetch(PROMPT) is None
        case "tokens":
            assert client.fetch(OTHER) is None
        case "world":
            assert harness.v1_client(world=2).fetch(PROMPT) is None
        case "dtype":
            client.ask(V1Operation.UNREGISTER_ENGINE_DRIVEN, client.instances[0])
            assert harness.v1_client(dtype="bfloat16").hits(PROMPT) == 0


def test_a_longer_prompt_hits_what_it_shares(client: V1Client) -> None:
    """A prefix of three chunks, then other tokens: three."""
    assert client.store(PROMPT, 10)
    assert [10, 11, 12] == client.fetch((*PROMPT[: 3 * CHUNK], *range(8)))


def test_decode_growth_stores_from_where_it_stopped(client: V1Client) -> None:
    """A later store of the same request adds the chunks that became whole, and all of them are hit."""
    grown = (*PROMPT, 7, 8)
    assert client.store(PROMPT, 10, request_id="grows")
    assert client.store(grown, 50, request_id="grows", start=4 * CHUNK)
    assert [10, 11, 12, 13, 50] == client.fetch(grown)


def test_a_chunk_is_hit_when_every_rank_has_it(harness: FrontHarness) -> None:
    """World size 2: one rank alone is no hit; each rank gets its own part."""
    client = harness.v1_client(world=2)
    assert client.store(PROMPT, 10, rank=0)
    assert client.hits(PROMPT) == 0
    assert client.store(PROMPT, 40, rank=1, stop=2 * CHUNK)
    assert client.lookup(PROMPT, request_id="both") == 2
    assert [10, 11] == client.retrieve(PROMPT, rank=0, request_id="both", stop=2 * CHUNK)
    assert [40, 41] == client.retrieve(PROMPT, rank=1, request_id="both", stop=2 * CHUNK)


def test_scheduler_and_workers_have_sockets_of_their_own(harness: FrontHarness, client: V1Client) -> None:
    """One looks up, another retrieves under the same id; a third socket can neither free nor end it."""
    scheduler, stranger = (harness.v1_client() for _ in range(2))
    assert client.store(PROMPT, 10)
    assert scheduler.lookup(PROMPT, request_id="r") == 4
    stranger.ask(V1Operation.FREE_LOOKUP_LOCKS, stranger.key(PROMPT, rank=None, request_id="r"), 1)
    stranger.end("r")
    assert [10, 11, 12, 13] == client.retrieve(PROMPT, request_id="r")


def test_a_result_is_told_to_a_socket_that_has_none_of_its_own(harness: FrontHarness, client: V1Client) -> None:
    """A client that reconnected polls from another socket: the latest; one that looked up itself gets its own."""
    looking, polling, missing, other = (harness.v1_client() for _ in range(4))
    assert client.store(PROMPT, 10)
    for one, tokens, request_id in ((looking, PROMPT, "one"), (missing, OTHER, "both"), (other, PROMPT, "both")):
        assert one.ask(V1Operation.LOOKUP, one.key(tokens, rank=None, request_id=request_id), 1) is None
    assert polling.ask(V1Operation.WAIT_PREFETCH_STATUS, "one", 5.0) == 4
    assert looking.ask(V1Operation.QUERY_PREFETCH_STATUS, "one") == 0
    assert missing.ask(V1Operation.QUERY_PREFETCH_STATUS, "both") == 0
    assert polling.ask(V1Operation.QUERY_PREFETCH_STATUS, "both") == 4
    assert other.ask(V1Operation.QUERY_PREFETCH_STATUS, "both") == 0


def test_a_result_is_told_once(client: V1Client) -> None:
    """As the release does; and 0 for an id that nobody knows."""
    assert client.store(PROMPT, 10)
    assert client.lookup(PROMPT, request_id="once") == 4
    assert client.ask(V1Operation.QUERY_PREFETCH_STATUS, "once") == 0
    assert client.ask(V1Operation.WAIT_PREFETCH_STATUS, "never", 5.0) == 0


def test_entries_outlive_the_server_on_disk(tmp_path: Path) -> None:
    """A restarted server finds v1 entries again, and a clear forgets them on disk too."""
    first = FrontHarness(disk=disk_tier(tmp_path))
    assert first.v1_client().store(PROMPT, 10, salt="s")
    first.service.close(first.now)
    second = FrontHarness(disk=disk_tier(tmp_path))
    client = second.v1_client()
    assert [10, 11, 12, 13] == client.fetch(PROMPT, salt="s")
    assert client.fetch(PROMPT) is None
    assert client.ask(V1Operation.CLEAR, False) is None
    assert client.hits(PROMPT, salt="s") == 0
    second.service.close(second.now)
    third = FrontHarness(disk=disk_tier(tmp_path))
    assert third.v1_client().hits(PROMPT, salt="s") == 0
    third.service.close(third.now)


# ---- beside v2


def test_v2_and_v1_requests_of_one_model_and_prompt_never_meet(harness: FrontHarness) -> None:
    """One service, one cache, equal model, tokens and chunk size: each hits its own and misses the other's."""
    v1, v2 = harness.v1_client(model=SPACE.model, dtype=SPACE.kv_dtype), harness.client()
    keys = chunk_keys(SPACE, PROMPT)
    v2.store(keys, [b"v2"] * 4)
    assert v2.lookup(keys).hit_chunks == 4
    assert v1.hits(PROMPT) == 0
    data = pickled([10, 11, 12, 13], dtype=SPACE.kv_dtype)
    assert v1.commit(v1.key(OTHER), data)
    assert v1.hits(OTHER) == 4
    assert v2.lookup(chunk_keys(SPACE, OTHER), session="other").hit_chunks == 0


def test_v1_hashes_sent_as_v2_digests_miss(harness: FrontHarness, client: V1Client) -> None:
    """A v2 client that knows the very hashes of v1 entries reaches none of them: roots differ."""
    assert client.store(PROMPT, 10)
    assert harness.client().lookup(mp_chunk_hashes(PROMPT, CHUNK)).hit_chunks == 0
    assert client.hits(PROMPT) == 4


def test_a_v1_clear_forgets_v1_entries_and_no_others(harness: FrontHarness, client: V1Client) -> None:
    """Of all models and salts; what is leased stays unless forced; v2 entries stay whatever is forced."""
    keys = chunk_keys(SPACE, PROMPT)
    harness.client().store(keys, [b"v2"] * 4)
    assert client.store(PROMPT, 10)
    assert client.store(PROMPT, 20, salt="s")
    assert client.lookup(PROMPT, request_id="leased") == 4
    assert client.send(b"\x07", b"\x14") == [[b"\x07", b"\x14"]]  # 0.5.5 and before: no payload
    assert (client.hits(PROMPT), client.hits(PROMPT, salt="s")) == (4, 0)
    assert client.ask(V1Operation.CLEAR, True) is None
    assert client.hits(PROMPT) == 0
    assert harness.client().lookup(keys).hit_chunks == 4


# ---- request ids that are used again


def test_a_request_id_with_other_tokens_or_salt_keeps_its_own_kv(client: V1Client) -> None:
    """Stores under one id land under their own identity; on the release the second lands under the first's."""
    assert client.store(PROMPT, 10, request_id="shared", salt="x")
    assert client.store(PROMPT, 60, request_id="shared", salt="y")
    assert client.store(OTHER, 90, request_id="shared", salt="x")
    assert [10, 11, 12, 13] == client.fetch(PROMPT, salt="x")
    assert [60, 61, 62, 63] == client.fetch(PROMPT, salt="y")
    assert [90, 91, 92, 93] == client.fetch(OTHER, salt="x")


def test_a_lookup_serves_retrieves_of_its_own_identity_alone(harness: FrontHarness, client: V1Client) -> None:
    """Under the id of a lookup of salt x: salt y, other tokens, or another model get nothing, though all are stored."""
    for salt, tokens, fill in (("x", PROMPT, 10), ("y", PROMPT, 60), ("x", OTHER, 90)):
        assert client.store(tokens, fill, salt=salt)
    assert client.lookup(PROMPT, request_id="r", salt="x") == 4
    assert client.retrieve(PROMPT, request_id="r", salt="y") is None
    assert client.retrieve(OTHER, request_id="r", salt="x") is None
    assert harness.refused("not_looked_up") == 2
    assert [10, 11, 12, 13] == client.retrieve(PROMPT, request_id="r", salt="x")


def test_a_second_lookup_replaces_the_first_and_gives_its_lease_back(harness: FrontHarness, client: V1Client) -> None:
    """Same socket, same id, another salt: the result is the second's, and nothing stays leased in the end."""
    assert client.store(PROMPT, 10, salt="x")
    assert client.lookup(PROMPT, request_id="r", salt="x") == 4
    assert client.lookup(PROMPT, request_id="r", salt="y") == 0
    assert harness.fact("cache.leases") == 0
    assert client.retrieve(PROMPT, request_id="r", salt="x") is None


def test_two_engines_that_count_alike_do_not_disturb_each_other(harness: FrontHarness) -> None:
    """Two engines of different models use the id "0": both are hits, with their own values."""
    one, two = harness.v1_client(model="one"), harness.v1_client(model="two")
    assert one.store(PROMPT, 10)
    assert two.store(PROMPT, 60)
    assert one.ask(V1Operation.LOOKUP, one.key(PROMPT, rank=None, request_id="0"), 1) is None
    assert two.ask(V1Operation.LOOKUP, two.key(PROMPT, rank=None, request_id="0"), 1) is None
    assert one.ask(V1Operation.QUERY_PREFETCH_STATUS, "0") == 4
    assert two.ask(V1Operation.QUERY_PREFETCH_STATUS, "0") == 4
    assert [10, 11, 12, 13] == one.retrieve(PROMPT, request_id="0")
    one.end("0")
    assert [60, 61, 62, 63] == two.retrieve(PROMPT, request_id="0")


# ---- leases


def leased(harness: FrontHarness) -> int:
    """Chunks that are leased now."""
    return int(harness.fact("cache.held"))


def test_chunks_are_given_back_by_retrieve_free_and_end(harness: FrontHarness, client: V1Client) -> None:
    """Four hit: two retrieved and two freed leave nothing leased; freed twice is once, for another world not at all."""
    assert client.store(PROMPT, 10, salt="s")
    assert client.lookup(PROMPT, request_id="r", salt="s") == 4
    other = harness.v1_client()
    assert other.lookup(PROMPT, request_id="r", salt="s") == 4
    assert leased(harness) == 8
    assert [10, 11] == client.retrieve(PROMPT, request_id="r", salt="s", stop=2 * CHUNK)
    assert leased(harness) == 6
    tail = client.key(PROMPT, rank=None, request_id="r", salt="s", start=2 * CHUNK)
    elsewhere = client.key(PROMPT, rank=None, request_id="r", salt="s", start=2 * CHUNK, world_size=2)
    assert client.ask(V1Operation.FREE_LOOKUP_LOCKS, elsewhere, 1) is None
    assert leased(harness) == 6
    for _ in range(2):
        assert client.ask(V1Operation.FREE_LOOKUP_LOCKS, tail, 1) is None
    assert leased(harness) == 4
    other.end("r")
    other.end("r")
    assert leased(harness) == 0


def test_the_last_of_several_readers_gives_back(harness: FrontHarness, client: V1Client) -> None:
    """Three readers of one shard (MLA): chunks stay leased until each was read three times."""
    assert client.store(PROMPT, 10)
    assert client.lookup(PROMPT, request_id="r", readers=3) == 4
    for still in (4, 4, 2):
        assert client.retrieve(PROMPT, request_id="r", stop=2 * CHUNK) == [10, 11]
        assert leased(harness) == still
    for still in (2, 2, 0):
        assert client.retrieve(PROMPT, request_id="r", start=2 * CHUNK) == [12, 13]
        assert leased(harness) == still


def test_a_client_that_does_not_say_how_many_read_keeps_its_lease_to_the_end(
    harness: FrontHarness, client: V1Client
) -> None:
    """0.5.3 and 0.5.4 send no number of readers; the release refuses them, here they are served."""
    assert client.store(PROMPT, 10)
    assert client.lookup(PROMPT, request_id="r", readers=0) == 4
    for _ in range(3):
        assert [10, 11, 12, 13] == client.retrieve(PROMPT, request_id="r")
    assert leased(harness) == 4
    client.end("r")
    assert leased(harness) == 0


def test_what_was_hit_is_kept_for_as_long_as_the_release_keeps_it() -> None:
    """An engine may queue a request for minutes before it retrieves; what nobody looked up goes in its place."""
    harness = FrontHarness(memory=16 * 1024)
    client = harness.v1_client()
    found, idle, fresh = (range(first, first + 2 * CHUNK) for first in (100, 200, 300))
    assert client.store(found, 1)
    assert client.store(idle, 1)
    assert client.lookup(found, request_id="queued") == 2
    harness.pass_time(RELEASE_READ_SECONDS - 1)
    for place in range(100):
        client.store([*fresh, *[place] * CHUNK], 1)
    assert client.hits(idle) == 0
    assert client.retrieve(found, request_id="queued") == [1, 2]


def test_lookups_that_are_never_ended_are_forgotten_with_their_leases(harness: FrontHarness, client: V1Client) -> None:
    """After LMCache's own ten minutes; and when the front closes."""
    assert client.store(PROMPT, 10)
    assert client.lookup(PROMPT, request_id="lost") == 4
    assert harness.fact("v1.lookups") == 1
    harness.pass_time(601)
    assert (harness.fact("v1.lookups"), leased(harness)) == (0, 0)
    assert client.lookup(PROMPT, request_id="open") == 4
    harness.front.close(harness.now)
    assert (harness.fact("v1.lookups"), leased(harness)) == (0, 0)


# ---- refusals, each answered in the type that the client waits for


def test_unknown_identity_fields_are_refused(harness: FrontHarness, client: V1Client) -> None:
    """The release drops them and serves a wrong hit; here the lookup misses, nothing is stored, nothing retrieved."""
    assert client.store(PROMPT, 10)
    plain = msgspec.to_builtins(client.key(PROMPT, rank=None, request_id="r"), builtin_types=(msgspec.Raw,))
    plain["request_configs"] = None
    extended = {**plain, "extra_keys": [["mm", "image-a", 0]]}
    assert [[b"\x07", b"\x08"]] == client.send(b"\x07", b"\x08", ENCODE(plain), b"\x01")
    assert client.ask(V1Operation.QUERY_PREFETCH_STATUS, "r") == 4
    client.end("r")
    assert [[b"\x07", b"\x08"]] == client.send(b"\x07", b"\x08", ENCODE(extended), b"\x01")
    assert client.ask(V1Operation.QUERY_PREFETCH_STATUS, "r") == 0
    extended["worker_id"] = 0
    instance = ENCODE(client.instances[0])
    stored = client.send(b"\x07", b"\x11", ENCODE(extended), instance, ENCODE(pickled([1, 2, 3, 4])))
    assert [[b"\x07", b"\x11", b"\xc2"]] == stored
    ((_, _, answer),) = client.send(b"\x07", b"\x12", ENCODE(extended), instance)
    assert {"success": False, "data": b"", "context": {}} == msgspec.msgpack.decode(answer)
    assert harness.refused("malformed") == 3


def test_transfers_of_a_worker_that_is_not_there_fail_at_once(harness: FrontHarness, client: V1Client) -> None:
    """Never registered, unregistered, or of another model: False and no success, where the release stays silent."""
    assert client.store(PROMPT, 10)
    assert client.lookup(PROMPT, request_id="r") == 4
    key = client.key(PROMPT, request_id="r")
    assert client.ask(V1Operation.COMMIT_STORE, key, 999, pickled([1] * 4)) is False
    assert client.ask(V1Operation.PREPARE_RETRIEVE, key, 999).success is False
    assert client.ask(V1Operation.COMMIT_RETRIEVE, key, 999) is False
    assert client.ask(V1Operation.PREPARE_STORE, key, 999).context == {}
    assert harness.refused("no_worker") == 4
    other = harness.v1_client(model="org/other")
    assert client.ask(V1Operation.PREPARE_RETRIEVE, key, other.instances[0]).success is False
    assert harness.refused("other_worker") == 1
    assert client.ask(V1Operation.UNREGISTER_ENGINE_DRIVEN, client.instances[0]) is None
    assert client.ask(V1Operation.UNREGISTER_ENGINE_DRIVEN, client.instances[0]) is None
    assert client.hits(PROMPT) == 0
    client.register(client.instances[0])
    assert client.hits(PROMPT) == 4


def test_workers_that_disagree_about_the_element_type_miss_until_they_agree(
    harness: FrontHarness, client: V1Client
) -> None:
    """A lookup names no worker, so it cannot tell which of both is asking."""
    assert client.store(PROMPT, 10)
    other = harness.v1_client(dtype="bfloat16")
    assert (client.hits(PROMPT), other.hits(PROMPT)) == (0, 0)
    assert other.ask(V1Operation.UNREGISTER_ENGINE_DRIVEN, other.instances[0]) is None
    assert client.hits(PROMPT) == 4


def test_a_silent_worker_is_forgotten_and_one_that_pings_is_not(harness: FrontHarness) -> None:
    """120 seconds once it has pinged, an hour before; so a slow start costs nothing."""
    pinging, quiet = harness.v1_client(), harness.v1_client(model="org/quiet")
    assert pinging.ask(V1Operation.PING, pinging.instances[0]) is True
    assert pinging.ask(V1Operation.PING, None) is True
    for _ in range(3):
        harness.pass_time(100)
        assert pinging.ask(V1Operation.PING, pinging.instances[0]) is True
    assert harness.fact("v1.workers") == 2
    assert quiet.store(PROMPT, 10)
    harness.pass_time(130)
    assert harness.fact("v1.workers") == 1
    assert quiet.hits(PROMPT) == 4
    assert [False, True] == [pinging.ask(V1Operation.PING, pinging.instances[0]) for _ in range(2)]
    pinging.register(pinging.instances[0])
    assert pinging.ask(V1Operation.PING, pinging.instances[0]) is True
    harness.pass_time(3600)
    assert harness.fact("v1.workers") == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pickled([1, 2, 3]), "count"),
        (pickled([1, 2, 3, 4], shape=(2, 1, 2, CHUNK)), "layout"),
        (pickled([1, 2, 3, 4], dtype="bfloat16"), "layout"),
        (b"", "pickle"),
        (b"\x80\x04]q\x00.", "pickle"),
        (b"cos\nsystem\n(S'true'\ntR.", "pickle"),
        (pickled([1, 2, 3, 4, 5]), "pickle"),
        (bytes(1 << 20), "pickle"),
    ],
    ids=["too few", "shape", "dtype", "empty", "not a list of tensors", "code", "too many", "too large"],
)
def test_a_store_that_does_not_fit_is_refused_whole(
    harness: FrontHarness, client: V1Client, data: bytes, reason: str
) -> None:
    """Nothing of it is kept, nothing in it runs, and the next store works."""
    assert client.commit(client.key(PROMPT), data) is False
    assert harness.refused(reason) == 1
    assert client.hits(PROMPT) == 0
    assert harness.fact("v1.pending_bytes") == 0
    assert client.store(PROMPT, 10)
    assert client.hits(PROMPT) == 4


def test_ranges_that_are_not_of_whole_chunks_are_refused_in_transfers(harness: FrontHarness, client: V1Client) -> None:
    """A lookup rounds down, as in the release; a transfer must know what it moves, and must name its rank."""
    assert client.store(PROMPT, 10)
    assert client.lookup(PROMPT, request_id="r", stop=15) == 3
    assert client.retrieve(PROMPT, request_id="r", stop=11) is None
    assert client.retrieve(PROMPT, request_id="r", start=2, stop=12) is None
    assert client.retrieve(PROMPT, request_id="r", start=12, stop=12) is None
    assert (harness.refused("unaligned"), harness.refused("empty")) == (2, 1)
    nobody = client.key(PROMPT, request_id="r", rank=None)
    assert client.ask(V1Operation.PREPARE_RETRIEVE, nobody, client.instances[0]).success is False
    assert harness.refused("no_rank") == 1


def test_a_registration_that_cannot_be_served_is_answered_and_not_kept(harness: FrontHarness) -> None:
    """The client is told what an empty registration is told; its lookups and transfers then miss."""
    client = harness.v1_client(dtype="complex64")
    assert harness.fact("v1.workers") == 0
    assert harness.refused("dtype") == 1
    assert client.hits(PROMPT) == 0
    assert client.store(PROMPT, 10) is False


def test_another_layout_is_never_delivered(harness: FrontHarness, client: V1Client) -> None:
    """A worker that registers again with other layers gets no chunk of the old shape."""
    assert client.store(PROMPT, 10)
    assert client.lookup(PROMPT, request_id="r") == 4
    client.register(client.instances[0], num_layers=2)
    assert (
        client.ask(V1Operation.PREPARE_RETRIEVE, client.key(PROMPT, request_id="r"), client.instances[0]).success
        is False
    )
    assert harness.refused("layout") == 1
    client.register(client.instances[0])
    assert [10, 11, 12, 13] == client.retrieve(PROMPT, request_id="r")


def test_a_store_that_finds_no_room_says_so(client: V1Client) -> None:
    """Larger than the whole memory: False, as the chunks are not there afterwards."""
    small = FrontHarness(memory=2 * (CHUNK_BYTES + 1024)).v1_client()
    assert small.store(PROMPT, 10) is False
    assert small.hits(PROMPT) < 4
    assert client.store(PROMPT, 10) is True


def test_what_is_evicted_between_lookup_and_retrieve_is_not_half_delivered(
    tmp_path: Path,
) -> None:
    """A file is gone: the whole retrieve fails, though three of four chunks are there."""
    harness = FrontHarness(memory=1, disk=disk_tier(tmp_path))
    client = harness.v1_client()
    assert client.store(PROMPT, 10)
    assert client.lookup(PROMPT, request_id="r") == 4
    next(tmp_path.rglob("w1r0g0*")).unlink()
    assert client.retrieve(PROMPT, request_id="r") is None
    assert harness.refused("incomplete") == 1
    harness.service.close(harness.now)


@pytest.mark.parametrize("operation", [one for one, spec in OPERATIONS.items() if spec.payloads is None])
def test_operations_that_are_not_served_are_answered(client: V1Client, operation: V1Operation) -> None:
    """Device memory, blending and what belongs between servers: answered in their own type, whatever the payload."""
    code = OPERATIONS[operation].code
    (answer,) = client.send(b"\x07", ENCODE(str(operation) if code is None else code), b"\xc0", b"\xc1")
    assert len(answer) == (2 if OPERATIONS[operation].failure is None else 3)


def test_what_no_answer_can_be_told_for_is_counted_and_dropped(harness: FrontHarness, client: V1Client) -> None:
    """Unknown operations, flow control of no stream, and what is no request at all; the front lives on."""
    for frames in ([b"\x07", ENCODE("negotiate")], [b"\x07", b"\x0b"], [b"GET / HTTP/1.1"], [], [b"\x07", b"", b"ack"]):
        assert [] == client.send(*frames)
    assert (harness.refused("unknown_operation"), harness.refused("stream_control")) == (2, 1)
    assert client.ask(V1Operation.NOOP) == "OK"


def test_a_uid_that_is_no_number_is_not_carried_out(harness: FrontHarness, client: V1Client) -> None:
    """The release executes a clear whose first frame is another protocol's magic; here nothing is forgotten."""
    assert client.store(PROMPT, 10)
    assert [] == client.send(b"XK2!", b"\x14", b"\xc2")
    assert client.hits(PROMPT) == 4


def test_block_reports_are_taken_and_dropped(client: V1Client) -> None:
    """The scheduler of vLLM waits for the answer; the report itself is nobody's business here."""
    report = encode_request(7, V1Operation.REPORT_BLOCK_ALLOCATION, 1, "m", [{"req_id": "r", "new_block_ids": [1]}])
    assert [[b"\x07", b"\x17"]] == client.send(*map(bytes, report))


def test_a_failing_cache_costs_one_request(
    harness: FrontHarness, client: V1Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that raises answers in the operation's type; the next request works."""
    assert client.store(PROMPT, 10)
    with monkeypatch.context() as patch:
        patch.setattr(ChunkCache, "lookup", lambda *_, **__: 1 / 0)
        assert client.hits(PROMPT) == 0
    assert harness.refused("failed") == 1
    assert client.hits(PROMPT) == 4


# ---- work off the loop


def test_the_loop_answers_while_pickles_are_read(harness: FrontHarness, client: V1Client) -> None:
    """A store whose job is held: pings are answered, and the store is, once its job ran."""
    harness.hold = True
    key = client.key(PROMPT)
    frames = encode_request(7, V1Operation.COMMIT_STORE, key, client.instances[0], pickled([1, 2, 3, 4]))
    assert [] == client.send(*map(bytes, frames))
    assert harness.fact("v1.jobs") == 1
    assert client.ask(V1Operation.PING, None) is True
    harness.release_jobs()
    assert [[b"\x07", b"\x11", b"\xc3"]] == harness.inboxes.pop(client.identity)
    assert (harness.fact("v1.jobs"), harness.fact("v1.pending_bytes")) == (0, 0)


def test_more_work_than_there_is_room_for_fails_at_once() -> None:
    """Bounded in jobs and in bytes; what is refused leaves nothing reserved."""
    for harness in (FrontHarness(max_jobs=1), FrontHarness(max_pending=1)):
        client = harness.v1_client()
        harness.hold = True
        frames = encode_request(7, V1Operation.COMMIT_STORE, client.key(PROMPT), client.instances[0], pickled([1] * 4))
        assert [] == client.send(*map(bytes, frames))
        assert [[b"\x07", b"\x11", b"\xc2"]] == client.send(*map(bytes, frames))
        assert harness.refused("busy") == 1
        harness.release_jobs()
        assert (harness.fact("v1.jobs"), harness.fact("v1.pending_bytes")) == (0, 0)
        assert client.hits(PROMPT) == 4


def test_one_tensor_sent_for_every_chunk_is_a_store(client: V1Client) -> None:
    """Pickle writes it once; each chunk has it."""
    data = pickle.dumps([torch.full(SHAPE, 3.0, dtype=torch.float16)] * 4)
    assert len(data) < len(pickled([1] * 4))
    assert client.commit(client.key(PROMPT), data)
    assert client.hits(PROMPT) == 4


def test_closing_settles_what_is_under_way(tmp_path: Path) -> None:
    """A store that was being read when the server stopped is on disk after a restart."""
    harness = FrontHarness(disk=disk_tier(tmp_path))
    client = harness.v1_client()
    frames = encode_request(7, V1Operation.COMMIT_STORE, client.key(PROMPT), client.instances[0], pickled([1] * 4))
    harness.service.receive(client.identity, list(frames), harness.now)
    harness.service.close(harness.now)
    again = FrontHarness(disk=disk_tier(tmp_path))
    assert again.v1_client().hits(PROMPT) == 4
    again.service.close(again.now)


def test_a_chunk_size_below_one_is_refused() -> None:
    """At construction."""
    with pytest.raises(CompatError, match="at least 1"):
        V1Front(ChunkCache(1), chunk_size=0)


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"\x07", b"\x08", b"\x11", b"\x14", b"\xc0"]), max_size=5))
def test_any_frames_are_survived(frames: list[bytes]) -> None:
    """Whatever is sent, the front raises nothing, and still answers."""
    harness = FrontHarness()
    harness.raw(b"fuzz", *frames)
    assert [[b"\x07", b"\x18", b"\xa2OK"]] == harness.raw(b"real", b"\x07", b"\x18")


# ---- what an operator sees


def test_an_operator_sees_how_many_v1_clients_there_still_are(harness: FrontHarness) -> None:
    """Sockets that ask are counted, apart from v2, for two minutes; the last one's age is kept; noise is no client."""
    assert (True, 0) == (harness.fact("server.v1_accepted"), harness.fact("v1.clients"))
    assert None is harness.service.status(harness.now)["v1.last_request_s"]
    harness.client()
    harness.raw(b"scanner", b"nonsense", b"frames")
    assert (0, 1, 1) == (harness.fact("v1.clients"), harness.refused("malformed"), harness.fact("server.peers"))
    first, second = harness.v1_client(), harness.v1_client()
    assert 2 == harness.fact("v1.clients")
    harness.pass_time(100.0)
    assert first.ask(V1Operation.PING, None) is True
    harness.pass_time(19.0)
    assert (2, 19.0) == (harness.fact("v1.clients"), harness.fact("v1.last_request_s"))
    harness.pass_time(2.0)
    assert (1, 21.0) == (harness.fact("v1.clients"), harness.fact("v1.last_request_s"))
    harness.pass_time(120.0)
    assert (0, 141.0) == (harness.fact("v1.clients"), harness.fact("v1.last_request_s"))
    assert second.ask(V1Operation.PING, None) is True
    assert 1 == harness.fact("v1.clients")
    assert 0 == Harness().fact("server.v1_accepted")


def test_the_table_of_clients_is_bounded() -> None:
    """However many sockets come, the one that was silent longest goes first; one that asks again stays."""
    clients = ClientTable(max_clients=2)
    for peer in (b"a", b"b", b"a", b"c"):
        clients.heard(peer, 1.0)
    assert 2 == len(clients)
    clients.heard(b"a", 2.0)
    clients.expire(1.0 + CLIENT_TTL)
    assert (1, 2.0) == (len(clients), clients.last_heard)


def test_a_scraper_sees_v1_requests_and_refusals_apart_from_v2(harness: FrontHarness, client: V1Client) -> None:
    """Counters by operation and by reason with fixed names; gauges for who is there; v2's own are not touched."""
    assert client.store(PROMPT, 1)
    assert not client.commit(client.key(PROMPT), b"no pickle")
    text = scraped(harness)
    for line in (
        "extra_keys_server_v1_accepted 1.0",
        "extra_keys_v1_clients 1.0",
        "extra_keys_v1_last_request_s 0.0",
        'extra_keys_v1_requests_total{operation="commit_store"} 2.0',
        'extra_keys_v1_refused_total{reason="pickle"} 1.0',
        "extra_keys_requests_total 0.0",
        "# TYPE extra_keys_v1_hit_chunks_total counter",
    ):
        assert line in text.splitlines()
    bare = scraped(Harness())
    assert "extra_keys_server_v1_accepted 0.0" in bare.splitlines()
    assert "extra_keys_v1_" not in bare


def scraped(harness: Harness) -> str:
    """What a Prometheus scraper reads."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: harness.service.status(harness.now)))
    return generate_latest(registry).decode()
