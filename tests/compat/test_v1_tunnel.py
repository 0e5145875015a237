"""The tunnel against a v1 server without sockets: our own front, which speaks the same frames, and a mute one."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from compat.tunnel import tunnel_tokens
from compat.v1.front import V1Front
from compat.v1.front_storage import V1RefusedError
from compat.v1.operations import V1Operation, V1RetrievePrepared
from compat.v1.server_policy import TunnelPolicy, bypass, refuse
from compat.v1.tunnel_calls import Call, CallRunner
from compat.v1.tunnel_leases import LEASE_TTL, LeaseBook, TunnelLease
from compat.v1.tunnel_objects import ChunkExpander, model_name, open_chunks, pack_object, pickle_chunks
from compat.v1.tunnel_session import MAX_PENDING, PREPARE_SECONDS, UNFIT_SECONDS, V1Tunnel
from compat.v1.wire import decode_request, encode_answer
from keying import CacheSalt, ChunkKey, KeySpace, LoraAdapter, MultimodalItem, chunk_keys
from protocol_v2.cache import ChunkCache
from protocol_v2.codes import ErrorCode, MissReason
from protocol_v2.errors import (
    LocalProtocolError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
    SessionLostError,
    UnsupportedServerError,
)
from protocol_v2.events import Event, ReplyReceived, RequestFailed, SendRequest, SessionLost
from protocol_v2.identity import keys_of_digests, keys_of_tokens
from protocol_v2.messages import (
    ClearRequest,
    EndSessionRequest,
    LookupRequest,
    PingRequest,
    PrefetchRequest,
    ReleaseRequest,
    Request,
    RetrieveRequest,
    StatusRequest,
    StoreRequest,
)
from protocol_v2.storage import ObjectId, Shard, StoredObject, TensorSpec, stored_object
from protocol_v2.storage.objects import Envelope
from protocol_v2.tensors import TensorMeta
from protocol_v2.wire_keys import Shard as WireShard

if TYPE_CHECKING:
    from protocol_v2.foreign import ForeignPolicy

CHUNK = 16
SPACE = KeySpace("org/m", chunk_size=CHUNK, kv_dtype="float16")
PROMPT = list(range(100, 170))
"""Four chunks and a tail of six."""

V1 = frozenset({"kv_event_stream"})


class Server:
    """A v1 server: our front over a cache of its own. What it is asked is recorded, and it can be made mute or lie."""

    def __init__(self, *, chunk_size: int = CHUNK) -> None:
        self.cache = ChunkCache(1 << 24)
        self.front = V1Front(self.cache, chunk_size=chunk_size)
        self.asked: list[V1Operation] = []
        self.keys: list[Any] = []
        self.mute: set[V1Operation] = set()
        self.lie: Callable[[V1Operation], object] = lambda _: None

    def answer(self, frames: Sequence[bytes], now: float) -> list[list[bytes]]:
        """What comes back for one message."""
        request = decode_request(frames)
        self.asked.append(request.operation)
        self.keys += [one for one in request.payloads[:1] if hasattr(one, "token_ids")]
        if request.operation in self.mute:
            return []
        lie = self.lie(request.operation)
        if lie is not None:
            return [[bytes(frame) for frame in encode_answer(request, lie)]]
        self.front.receive(b"tunnel", frames, now)
        while jobs := self.front.take_jobs():
            for job in jobs:
                job.run()
                job.then(now)
        sent = self.front.take_outgoing()
        return [[bytes(frame) for frame in answer] for peer, answer in sent if peer == b"tunnel"]


class Pair:
    """A tunnel and a server, and the clock between them."""

    def __init__(self, server: Server | None = None, policy: TunnelPolicy | None = None) -> None:
        self.server = server or Server()
        self.policy = policy or TunnelPolicy(SPACE)
        tunnel = self.policy(V1)
        assert isinstance(tunnel, V1Tunnel)
        self.tunnel = tunnel
        self.now = 1000.0
        self.outcomes: dict[int, Any] = {}

    def begin(
        self,
        message: Request,
        payload: Sequence[bytes] = (),
        timeout: float | None = 5.0,
        keys: Sequence[ChunkKey] | None = None,
    ) -> int:
        """Send a request and carry messages until nothing moves."""
        request_id = self.tunnel.new_request_id()
        known = None if keys is None else keys_of_digests(keys)
        self.tunnel.send(SendRequest(request_id, message, tuple(payload), timeout, known), self.now)
        self.pump()
        return request_id

    def pump(self) -> None:
        """Carry messages until nothing moves."""
        while outgoing := self.tunnel.take_outgoing():
            for frames in outgoing:
                for answer in self.server.answer([bytes(frame) for frame in frames], self.now):
                    self.note(self.tunnel.receive_frames(answer, self.now))
        if self.tunnel.next_timeout() == float("-inf"):
            self.note(self.tunnel.expire(self.now))

    def note(self, events: list[Event]) -> None:
        """Keep what requests ended in."""
        for event in events:
            if isinstance(event, ReplyReceived):
                self.outcomes[event.request_id] = event
            elif isinstance(event, RequestFailed):
                self.outcomes[event.request_id] = event.error

    def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds
        self.note(self.tunnel.expire(self.now))
        self.pump()

    def ask(self, message: Request, payload: Sequence[bytes] = ()) -> Any:
        """A request's reply, or the error."""
        ended = self.outcomes[self.begin(message, payload)]
        return ended.message if isinstance(ended, ReplyReceived) else ended

    def lookup(self, *extra: Any, tokens: Sequence[int] = PROMPT, session: str = "r", **more: Any) -> Any:
        """Look a prompt up."""
        keys = keys_of_digests(chunk_keys(SPACE, tokens, extra))
        return self.ask(LookupRequest(session=session, keys=keys, **more))

    def store(self, fill: int, *extra: Any, tokens: Sequence[int] = PROMPT, first: int = 0, **shard: int) -> Any:
        """Store a prompt's chunks from `first` on; chunk i is 8 bytes of ``fill + i``."""
        keys = chunk_keys(SPACE, tokens, extra)
        stored = keys[first:]
        message = StoreRequest(
            session="r",
            keys=keys_of_digests(keys),
            first=first,
            starts=tuple(one.start for one in stored),
            n_tokens=tuple(one.stop - one.start for one in stored),
            shard=WireShard(**shard),
            tensors=((TensorMeta("uint8", (8,)),),),
        )
        return self.ask(message, [bytes([fill + i]) * 8 for i in range(first, len(keys))])

    def retrieve(
        self, lease: bytes, count: int, first: int = 0, *, keys: Sequence[ChunkKey] | None = None, **shard: int
    ) -> list[int] | ProtocolError:
        """The byte of each chunk."""
        request = RetrieveRequest(lease=lease, first=first, count=count, shard=WireShard(**shard))
        ended = self.outcomes[self.begin(request, keys=keys)]
        return [bytes(frame)[0] for frame in ended.payload] if isinstance(ended, ReplyReceived) else ended

    def fetch(self, *extra: Any, tokens: Sequence[int] = PROMPT) -> list[int]:
        """Look up, retrieve what was hit, end."""
        found = self.lookup(*extra, tokens=tokens, session="f")
        got = self.retrieve(found.lease, found.hit_chunks) if found.hit_chunks else []
        self.ask(EndSessionRequest(session="f"))
        assert isinstance(got, list)
        return got


@pytest.fixture(autouse=True)
def layouts_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The released server delivers what is there, whatever layout the reader registered; our front does not."""
    monkeypatch.setattr("compat.v1.front.check_delivery", all_or_nothing)


def all_or_nothing(objects: Sequence[StoredObject], wanted: int, _layout: object) -> None:
    """What the release checks before it delivers."""
    if len(objects) != wanted:
        raise V1RefusedError("incomplete", "some are gone")


@pytest.fixture
def pair() -> Pair:
    """A tunnel to a server."""
    return Pair()


# ---- identity


def test_identities_are_apart_and_are_hit_again(pair: Pair) -> None:
    """Salts, adapters and items: each its own values; nothing of them is in a field that the server has."""
    identities = [(), (CacheSalt("s/@"),), (LoraAdapter("s/@"),), (MultimodalItem("x", 0, 20),), (CacheSalt("t"),)]
    for place, extra in enumerate(identities):
        assert [] == pair.fetch(*extra)
        assert pair.store(10 * place, *extra).stored == 4
    for place, extra in enumerate(identities):
        assert [10 * place + i for i in range(4)] == pair.fetch(*extra)
    assert {("", model_name(SPACE.root, 0))} == {(key.cache_salt, key.model_name) for key in pair.server.keys}
    assert {type(token) for key in pair.server.keys for token in key.token_ids} == {int}


def test_no_request_id_is_used_for_two_identities_or_twice(pair: Pair) -> None:
    """Equal sessions, equal prompts, two tunnels of one policy: every lookup and store has an id of its own."""
    other = Pair(pair.server, pair.policy)
    for one in (pair, other):
        one.store(1)
        one.lookup()
        one.lookup()
        one.lookup(CacheSalt("s"))
    lookups = [key for key in pair.server.keys if key.worker_id is None]
    stores = [key for key in pair.server.keys if key.worker_id is not None]
    ids = {key.request_id for key in [*lookups, *stores]}
    assert len(lookups) + len(stores) == 8
    assert len(ids) == 8
    assert all(len(one) == 68 and one.startswith("xk2-") for one in ids)


def test_a_request_id_is_made_from_process_session_identity_and_count(pair: Pair) -> None:
    """Each of the four is in it, as the spec writes it, so no two identities and no two requests can share one."""
    pair.lookup()
    pair.lookup(CacheSalt("s"))
    expected = []
    for number, extra in enumerate(((), (CacheSalt("s"),)), 1):
        last = chunk_keys(SPACE, PROMPT, extra)[-1].digest
        seed = b"".join(
            len(one).to_bytes(4, "little") + one
            for one in (b"xk2/tunnel-request", pair.tunnel._boot_id, pair.tunnel._session_id, last)
        )
        expected.append("xk2-" + hashlib.sha256(seed + number.to_bytes(8, "little")).hexdigest())
    assert expected == [key.request_id for key in pair.server.keys]
    assert (16, 16) == (len(pair.tunnel._boot_id), len(pair.tunnel._session_id))
    assert pair.tunnel._boot_id != Pair().tunnel._boot_id
    assert pair.tunnel._session_id != Pair(pair.server, pair.policy).tunnel._session_id


def test_keys_by_tokens_name_the_same_chunks(pair: Pair) -> None:
    """Callers that do not derive get the same hits."""
    assert pair.store(1, CacheSalt("s")).stored == 4
    keys = keys_of_tokens(PROMPT, [CacheSalt("s")])
    assert pair.ask(LookupRequest(session="r", keys=keys)).hit_chunks == 4
    assert pair.ask(LookupRequest(session="r", keys=keys_of_tokens(PROMPT))).hit_chunks == 0
    refused = pair.ask(LookupRequest(session="r", keys=keys_of_tokens(PROMPT, [CacheSalt("s"), CacheSalt("t")])))
    assert isinstance(refused, ServerError)
    assert refused.error_code == ErrorCode.INVALID_IDENTITY


def test_growth_stores_what_is_missing(pair: Pair) -> None:
    """Decode: a later store begins where the earlier ended."""
    grown = [*PROMPT, *range(10)]
    assert pair.store(1).stored == 4
    assert pair.store(1, tokens=grown, first=4).stored == 1
    assert [1, 2, 3, 4, 5] == pair.fetch(tokens=grown)
    assert [1, 2] == pair.fetch(tokens=[*PROMPT[:32], *range(40)])


def test_what_the_server_mixes_up_is_a_miss(pair: Pair) -> None:
    """A server that delivers another chunk's object, a damaged one, or none: never the wrong bytes."""
    assert pair.store(1).stored == 4
    assert pair.store(50, CacheSalt("s")).stored == 4
    wrong = pair.lookup(CacheSalt("s"))
    kept = pair.lookup()
    assert wrong.hit_chunks == kept.hit_chunks == 4
    lease = pair.policy._leases.find(kept.lease, pair.now)
    other = pair.policy._leases.find(wrong.lease, pair.now)
    assert lease is not None
    assert other is not None
    real, lease.digests = lease.digests, other.digests
    lease.request_ids, ids = list(other.request_ids), lease.request_ids
    assert [50, 51, 52, 53] == pair.retrieve(kept.lease, 4)  # the detector: this is what the server has there
    lease.digests, lease.request_ids = real, ids
    object_of = {digest: ObjectId(SPACE.root, digest, Shard()) for digest in (*real, *other.digests)}
    packed = [pack_object(small_object(object_of[digest], 9)) for digest in other.digests]
    objects, miss = open_chunks(memoryview(pickle_chunks(packed)), [object_of[digest] for digest in real])
    assert ([], MissReason.IDENTITY_MISMATCH) == (objects, miss)
    damaged = [packed[0][:-1] + b"!", packed[1]]
    objects, miss = open_chunks(memoryview(pickle_chunks(damaged)), [object_of[digest] for digest in other.digests])
    assert ([], MissReason.CHECKSUM) == (objects, miss)
    objects, miss = open_chunks(memoryview(pickle_chunks(packed[:1])), [object_of[d] for d in other.digests[:2]])
    assert (1, MissReason.ABSENT) == (len(objects), miss)


def small_object(identity: ObjectId, fill: int) -> Any:
    """An object of eight bytes."""
    envelope = Envelope(identity, 0, CHUNK, (TensorSpec("uint8", (8,), 8),))
    return stored_object(envelope, [bytes([fill]) * 8])


# ---- shards, sizes, leases


def test_a_hit_needs_every_rank_of_every_group(pair: Pair) -> None:
    """And each part is read as it was stored, as often as it is asked for."""
    parts: list[dict[str, Any]] = [
        {"world": 2, "rank": rank, "group": group} for rank in range(2) for group in range(2)
    ]
    for place, shard in enumerate(parts):
        assert pair.lookup(world=2, groups=2).hit_chunks == 0
        assert pair.store(10 * place, **shard).stored == 4
    found = pair.lookup(world=2, groups=2)
    assert found.hit_chunks == 4
    for place, shard in enumerate(parts):
        assert [10 * place + i for i in range(4)] == pair.retrieve(found.lease, 4, **shard)
        assert [10 * place + 1] == pair.retrieve(found.lease, 1, first=1, **shard)
    assert pair.lookup().hit_chunks == 0


def test_a_hit_of_one_group_that_another_has_not_is_given_back(pair: Pair) -> None:
    """Group 0 has four chunks, group 1 two: two are hit, and nothing else stays locked."""
    assert pair.store(1, group=0).stored == 4
    assert pair.store(1, tokens=PROMPT[:32], group=1).stored == 2
    found = pair.lookup(groups=2)
    assert (2, MissReason.ABSENT) == (found.hit_chunks, found.miss)
    assert held(pair) == 4
    assert pair.ask(ReleaseRequest(lease=found.lease)).released == 2
    assert held(pair) == 0


def held(pair: Pair) -> int:
    """Chunks that the server holds for somebody."""
    return pair.server.cache.status(pair.now).held


def test_locks_are_given_back_by_release_end_and_a_lookup_without_a_lease(pair: Pair) -> None:
    """Each once; what a rank has read is no longer its to give back."""
    assert pair.store(1, world=2, rank=0).stored == 4
    assert pair.store(1, world=2, rank=1).stored == 4
    assert pair.lookup(world=2, lease=False).hit_chunks == 4
    assert held(pair) == 0
    found = pair.lookup(world=2)
    assert held(pair) == 4
    assert [1, 2] == pair.retrieve(found.lease, 2, world=2, rank=0)
    assert pair.ask(ReleaseRequest(lease=found.lease, first=3)).released == 1
    assert held(pair) == 3
    assert pair.ask(EndSessionRequest(session="r")).known
    assert held(pair) == 0
    assert not pair.ask(EndSessionRequest(session="r")).known
    assert pair.ask(ReleaseRequest(lease=found.lease)).released == 0


def test_clients_that_share_a_policy_share_its_leases(pair: Pair) -> None:
    """A worker retrieves what its scheduler looked up; another policy, as in another process, does not know it."""
    assert pair.store(1).stored == 4
    found = pair.lookup()
    assert [1, 2, 3, 4] == Pair(pair.server, pair.policy).retrieve(found.lease, 4)
    stranger = Pair(pair.server).retrieve(found.lease, 4)
    assert isinstance(stranger, ServerError)
    assert stranger.error_code == ErrorCode.LEASE_UNKNOWN


def test_a_worker_in_another_process_retrieves_by_the_keys(pair: Pair) -> None:
    """Each rank its own part and range, whatever the order; nothing stays locked; another identity's keys miss."""
    for rank in range(2):
        for group in range(2):
            assert pair.store(10 * rank + 40 * group, world=2, rank=rank, group=group).stored == 4
    found = pair.lookup(world=2, groups=2)
    keys = chunk_keys(SPACE, PROMPT)
    for rank in (1, 0):
        worker = Pair(pair.server)
        for group in range(2):
            take = partial(worker.retrieve, found.lease, world=2, rank=rank, group=group)
            base = 10 * rank + 40 * group
            assert [base + 1, base + 2] == take(2, first=1, keys=keys)
            assert [base + i for i in range(4)] == take(4, keys=keys)
            assert [] == take(4, keys=chunk_keys(SPACE, PROMPT, [CacheSalt("s")]))
            refused = take(5, keys=keys)
            assert isinstance(refused, ServerError)
            assert refused.error_code == ErrorCode.MALFORMED
    assert pair.ask(EndSessionRequest(session="r")).known
    assert held(pair) == 0


def test_a_worker_in_another_process_gives_back_what_it_cannot_read(pair: Pair) -> None:
    """Chunks behind the hit: a shorter delivery, no lock left, and the scheduler's lease is as it was."""
    assert pair.store(1, tokens=PROMPT[:32]).stored == 2
    found = pair.lookup()
    assert found.hit_chunks == 2
    worker = Pair(pair.server)
    keys = chunk_keys(SPACE, PROMPT)
    assert [1, 2] == worker.retrieve(found.lease, 4, keys=keys)
    assert [] == worker.retrieve(found.lease, 2, first=2, keys=keys)
    assert [2] == worker.retrieve(found.lease, 1, first=1, keys=keys)
    assert held(pair) == 2
    assert [1, 2] == pair.retrieve(found.lease, 2)
    assert held(pair) == 0


def test_a_part_that_the_lease_has_not_is_refused(pair: Pair) -> None:
    """Past its end, another world, another group."""
    assert pair.store(1).stored == 4
    lease = pair.lookup().lease
    for count, world, group in ((5, 1, 0), (1, 2, 0), (1, 1, 1)):
        refused = pair.retrieve(lease, count, world=world, group=group)
        assert isinstance(refused, ServerError)
        assert refused.error_code == ErrorCode.MALFORMED
    assert [4] == pair.retrieve(lease, 1, first=3)


def test_chunks_that_went_meanwhile_are_not_delivered(pair: Pair) -> None:
    """Locks gone and entries cleared: looked up again once, then a miss."""
    assert pair.store(1).stored == 4
    lease = pair.lookup().lease
    pair.server.front.receive(b"other", [b"\x07", b"\x14", b"\xc3"], pair.now)
    ended = pair.outcomes[pair.begin(RetrieveRequest(lease=lease, count=4))]
    assert (0, MissReason.ABSENT) == (ended.message.count, ended.message.miss)
    assert pair.server.asked.count(V1Operation.PREPARE_RETRIEVE) == 1


def test_layouts_are_registered_once_a_size_and_kept_alive(pair: Pair) -> None:
    """Lookups need one, stores one of their size; a ping speaks for all of them."""
    pair.lookup()
    pair.store(1)
    pair.store(2, CacheSalt("s"))
    assert pair.server.asked.count(V1Operation.REGISTER_ENGINE_DRIVEN) == 2
    assert pair.ask(PingRequest()).uptime_ms == 0
    assert pair.server.asked.count(V1Operation.PING) == 2
    assert Pair().ask(PingRequest()).boot != pair.ask(PingRequest()).boot


def test_the_number_of_layouts_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is unregistered for a new one, and registered again when it is needed."""
    monkeypatch.setattr("compat.v1.tunnel_session.MAX_SIZES", 2)
    for size in (8, 9, 10, 8):
        keys = chunk_keys(SPACE, PROMPT, [CacheSalt(str(size))])
        message = StoreRequest(
            session="r",
            keys=keys_of_digests(keys),
            starts=(0,),
            n_tokens=(CHUNK,),
            tensors=((TensorMeta("uint8", (size,)),),),
        )
        assert pair.ask(message, [bytes(size)]).stored == 1
    assert pair.server.asked.count(V1Operation.UNREGISTER_ENGINE_DRIVEN) == 2
    assert pair.ask(StatusRequest()).status["tunnel.layouts"] == 2


def test_large_answers_come_in_parts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk tells the size, then as many as one answer may hold."""
    assert pair.store(1).stored == 4
    reader = Pair(pair.server, pair.policy)
    monkeypatch.setattr("compat.v1.tunnel_session.MAX_PAYLOAD_BYTES", 600)
    assert [1, 2, 3, 4] == reader.retrieve(reader.lookup().lease, 4)
    assert pair.server.asked.count(V1Operation.PREPARE_RETRIEVE) == 3


# ---- servers that do not fit, do not answer, or lie


def test_a_server_with_other_chunks_is_not_keyed_at_all(caplog: pytest.LogCaptureFixture) -> None:
    """Asked for its chunk size, and nothing else for half a minute; why is logged, once."""
    pair = Pair(Server(chunk_size=32))
    for _ in range(2):
        failure = pair.lookup()
        assert isinstance(failure, UnsupportedServerError)
        assert "have 32 tokens" in str(failure)
        assert isinstance(pair.store(1), UnsupportedServerError)
    assert [V1Operation.GET_CHUNK_SIZE] == pair.server.asked
    pair.pass_time(UNFIT_SECONDS)
    assert isinstance(pair.lookup(), UnsupportedServerError)
    assert [V1Operation.GET_CHUNK_SIZE] * 2 == pair.server.asked
    assert {"tunnel.sessions": 1, "tunnel.unfit": 2} == pair.policy.facts()
    assert 1 == caplog.text.count("no tunnel through it: its chunks have 32 tokens")


@pytest.mark.parametrize(
    ("operation", "text"),
    [(V1Operation.GET_CHUNK_SIZE, "chunk size"), (V1Operation.REGISTER_ENGINE_DRIVEN, "engine-driven")],
)
def test_a_server_that_does_not_answer_what_comes_first_is_left_alone(
    pair: Pair, operation: V1Operation, text: str
) -> None:
    """Sooner than the request's own deadline; requests then fail at once, until it is tried again."""
    pair.server.mute.add(operation)
    keys = keys_of_digests(chunk_keys(SPACE, PROMPT))
    request_id = pair.begin(LookupRequest(session="r", keys=keys), timeout=60)
    assert request_id not in pair.outcomes
    pair.pass_time(PREPARE_SECONDS)
    assert text in str(pair.outcomes[request_id])
    assert isinstance(pair.lookup(), UnsupportedServerError)
    pair.server.mute.clear()
    pair.pass_time(UNFIT_SECONDS)
    assert pair.store(1).stored == 4


def test_an_unanswered_call_costs_its_own_request(pair: Pair) -> None:
    """A timeout; the next request works, with a layout that is registered anew."""
    assert pair.store(1).stored == 4
    pair.server.mute.add(V1Operation.COMMIT_STORE)
    asked = pair.server.asked.count(V1Operation.REGISTER_ENGINE_DRIVEN)
    keys = chunk_keys(SPACE, PROMPT)
    message = StoreRequest(
        session="r", keys=keys_of_digests(keys), starts=(0,), n_tokens=(CHUNK,), tensors=((TensorMeta("uint8", (8,)),),)
    )
    request_id = pair.begin(message, [bytes(8)])
    pair.pass_time(5)
    assert isinstance(pair.outcomes[request_id], RequestTimeoutError)
    pair.server.mute.clear()
    assert pair.store(1).stored == 4
    assert pair.server.asked.count(V1Operation.REGISTER_ENGINE_DRIVEN) == asked + 1
    assert [1, 2, 3, 4] == pair.fetch()


def test_a_pending_lookup_is_asked_for_again(pair: Pair) -> None:
    """A server whose prefetch takes its time answers nil, and is waited for."""
    assert pair.store(1).stored == 4
    nils = iter([None])

    class Pending:
        """Once nil, then the truth."""

    def lie(operation: V1Operation) -> object:
        return Pending if operation is V1Operation.WAIT_PREFETCH_STATUS and next(nils, Pending) is None else None

    answer = pair.server.answer

    def answered(frames: Sequence[bytes], now: float) -> list[list[bytes]]:
        request = decode_request(frames)
        if lie(request.operation) is Pending:
            return [[bytes(frame) for frame in encode_answer(request, None)]]
        return answer(frames, now)

    pair.server.answer = answered  # type: ignore[method-assign]
    assert pair.lookup().hit_chunks == 4


@pytest.mark.parametrize("lie", [5, -1, "four"])
def test_a_lookup_that_claims_what_cannot_be_fails(pair: Pair, lie: object) -> None:
    """More chunks than there are, fewer than none, or no number."""
    assert pair.store(1).stored == 4
    pair.server.lie = lambda operation: lie if operation is V1Operation.WAIT_PREFETCH_STATUS else None
    assert isinstance(pair.lookup(), ProtocolError)
    pair.server.lie = lambda _: None
    assert [1, 2, 3, 4] == pair.fetch()


def test_an_answer_without_tensors_means_shared_memory(pair: Pair) -> None:
    """Such a server is left alone, and told so."""
    assert pair.store(1).stored == 4
    lease = pair.lookup().lease
    pair.server.lie = lambda one: V1RetrievePrepared(success=True) if one is V1Operation.PREPARE_RETRIEVE else None
    failure = pair.retrieve(lease, 4)
    assert isinstance(failure, UnsupportedServerError)
    assert "shared memory" in str(failure)


def test_a_hostile_answer_runs_nothing_and_costs_one_request(pair: Pair) -> None:
    """Tensors that are no pickle of tensors."""
    assert pair.store(1).stored == 4
    hostile = V1RetrievePrepared(success=True, data=memoryview(b"cos\nsystem\n(S'false'\ntR."))
    lease = pair.lookup().lease
    pair.server.lie = lambda one: hostile if one is V1Operation.PREPARE_RETRIEVE else None
    assert isinstance(pair.retrieve(lease, 4), ServerError)
    pair.server.lie = lambda _: None
    assert [1, 2, 3, 4] == pair.fetch()


def test_a_declined_store_is_told(pair: Pair) -> None:
    """The server's word for no room."""
    pair.server.lie = lambda operation: False if operation is V1Operation.COMMIT_STORE else None
    assert (0, 4) == ((told := pair.store(1)).stored, told.declined)


def test_more_than_a_v1_server_has_is_refused(pair: Pair) -> None:
    """Worlds and groups; and a clear, which would be everybody's."""
    for refused in (pair.lookup(world=256), pair.lookup(groups=65), pair.ask(ClearRequest(scope="all"))):
        assert isinstance(refused, ServerError)
        assert refused.error_code == ErrorCode.UNSUPPORTED
    assert V1Operation.CLEAR not in pair.server.asked


def test_status_and_prefetch_need_no_server(pair: Pair) -> None:
    """Facts of this side; v1 servers prefetch when they look up."""
    assert pair.ask(PrefetchRequest(session="r", keys=keys_of_digests([]))).accepted == 0
    status = pair.ask(StatusRequest()).status
    assert "the v1 server's own hash" in status["tunnel.strength"]
    assert [] == pair.server.asked
    assert pair.ask(LookupRequest(session="r", keys=keys_of_digests([]))).hit_chunks == 0
    assert [] == pair.server.asked


def test_losing_the_socket_fails_everything(pair: Pair) -> None:
    """And late answers, to requests that were forgotten or that are none, are ignored."""
    pair.server.mute.add(V1Operation.PING)
    first, second = pair.begin(PingRequest()), pair.begin(PingRequest())
    pair.tunnel.abandon(first)
    assert [] == pair.tunnel.receive_frames([b"\x01", b"\x16", b"\xc3"], pair.now)
    assert [] == pair.tunnel.receive_frames([bytes(10)], pair.now)
    assert [] == pair.tunnel.receive_frames([b"\xa1a", b"\x16"], pair.now)
    assert [] == pair.tunnel.receive_frames([], pair.now)
    lost, failed = pair.tunnel.lose("gone")
    assert isinstance(lost, SessionLost)
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == second
    assert isinstance(failed.error, SessionLostError)
    assert pair.tunnel.next_timeout() is None


def test_misuse_is_refused(pair: Pair) -> None:
    """Too many requests, a timeout that is none, a payload of another size."""
    with pytest.raises(LocalProtocolError, match="timeout"):
        pair.begin(PingRequest(), timeout=0)
    with pytest.raises(LocalProtocolError, match="payload"):
        pair.begin(PingRequest(), [b"more"])
    pair.server.mute.add(V1Operation.PING)
    for _ in range(MAX_PENDING):
        pair.begin(PingRequest())
    with pytest.raises(QueueFullError):
        pair.begin(PingRequest())


def test_a_reply_without_a_call_comes_with_the_next_tick() -> None:
    """Requests that need no server end in `expire`, which is due at once."""
    runner = CallRunner()

    def steps() -> Iterator[Call]:
        yield from ()
        return "reply", ()  # type: ignore[return-value]

    runner.start(1, steps(), 10.0, 0.0)  # type: ignore[arg-type]
    assert runner.next_timeout() == float("-inf")
    assert len(runner.take_events()) == 1
    assert runner.next_timeout() is None


# ---- policies


def test_policies() -> None:
    """Tunnel where the chunk size can carry a key; an error where not, and to refuse; None to bypass."""
    assert isinstance(TunnelPolicy(SPACE)(V1), V1Tunnel)
    small = TunnelPolicy(KeySpace("m", chunk_size=8, kv_dtype="float16"))(V1)
    assert isinstance(small, UnsupportedServerError)
    answers = [policy(V1) for policy in cast("list[ForeignPolicy]", [bypass, refuse])]
    assert answers[0] is None
    refusal = refuse(V1)
    assert refusal.error_code == ErrorCode.UNSUPPORTED
    assert "kv_event_stream" in str(refusal)


def test_a_forked_process_has_ids_and_leases_of_its_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that was made before a fork is made anew in the child."""
    assert pair.store(1).stored == 4
    lease = pair.lookup().lease
    monkeypatch.setattr(os, "getpid", lambda: -1)
    child = Pair(pair.server, pair.policy)
    assert isinstance(child.retrieve(lease, 4), ServerError)
    assert [1, 2, 3, 4] == child.fetch()


# ---- leases


def lease(n_chunks: int = 4, *, made: float = 0.0, world: int = 2, session: str = "s") -> TunnelLease:
    """A lease of some chunks in one group."""
    return TunnelLease(tuple(bytes([i]) * 32 for i in range(n_chunks)), world, ["id"], session, made)


def test_a_worker_elsewhere_locks_its_own_rank_alone() -> None:
    """Nothing to give back before it has looked up; then what it locked, for its rank and group, once."""
    one = TunnelLease.elsewhere(tuple(bytes([i]) * 32 for i in range(4)), WireShard(world=3, rank=2, group=1), 0.0)
    assert [] == one.give_back_all(0, 4)
    one.lock_again(1, "own", 3)
    assert [(0, 2)] == one.give_back(0, 2, 1, 2)
    assert [(1, 2, 2, 3)] == one.give_back_all(0, 4)
    assert [] == one.give_back_all(0, 4)


def test_each_lock_is_given_back_once() -> None:
    """For one rank or all, in whatever parts; again after it was taken again."""
    one = lease()
    assert [(0, 2)] == one.give_back(0, 2, 0, 0)
    assert [(2, 3)] == one.give_back(1, 3, 0, 0)
    assert [(0, 0, 3, 4), (0, 1, 0, 4)] == one.give_back_all(0, 9)
    assert [] == one.give_back_all(0, 4)
    one.lock_again(0, "other", 4)
    assert ["other"] == one.request_ids
    assert [(0, None, 1, 2)] == one.give_back_all(1, 2)
    assert [(0, 1), (2, 4)] == one.give_back(0, 4, 0, 1)
    one.lock_again(0, "third", 2)
    assert [(0, None, 0, 2)] == one.give_back_all(0, 4)


def test_a_book_is_bounded_and_forgets() -> None:
    """In leases, in chunks, and by time."""
    book = LeaseBook(max_leases=2, max_chunks=9)
    first, second, third = lease(session="a"), lease(session="b"), lease(session="b")
    for one in (first, second, third):
        book.put(one)
    assert [None, second, third] == [book.find(one.id, 1.0) for one in (first, second, third)]
    assert [second, third] == book.of_session("b")
    large = lease(20)
    book.put(large)
    assert len(book) == 1
    assert book.find(large.id, LEASE_TTL) is None
    later = lease(made=LEASE_TTL)
    book.put(later)
    assert len(book) == 1
    book.pop(later.id)
    book.pop(later.id)
    assert len(book) == 0


def test_expanded_tokens_are_those_of_the_tunnel() -> None:
    """One chunk after the other; the specification's vector."""
    digests = [bytes([i]) * 32 for i in range(3)]
    expander = ChunkExpander(CHUNK)
    wanted = tuple(token for digest in digests for token in tunnel_tokens(digest, CHUNK))
    assert wanted == expander.tokens(digests)
    assert wanted == expander.tokens(digests)
    assert model_name(b"\xab" * 32, 0) == "xk2-" + "ab" * 32
    assert model_name(b"\xab" * 32, 3) == "xk2-" + "ab" * 32 + "-g3"
