"""The matrix without sockets: our own client and server code, our v1 front, and LMCache's server as a model."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np

from compat.v1 import v1_token_ids
from compat.v1.front import V1Front
from compat.v1.operations import V1Key, V1Operation, V1Registration
from compat.v1.pickled_tensors import PickledTensor, read_tensors, write_tensors
from compat.v1.server_policy import TunnelPolicy, bypass, refuse
from compat.v1.tunnel_objects import model_name
from compat.v1.wire import decode_answer, encode_request
from keying import ChunkKey, ChunkKeyChain, KeySpace, chunk_keys
from protocol_v2 import operations
from protocol_v2.errors import ProtocolError, ServerError, ServerUnavailableError
from protocol_v2.events import ReplyReceived  # noqa: TC001
from protocol_v2.foreign import ForeignPolicy
from protocol_v2.keeper_actions import Finish, OpenSocket, Phase, Send
from protocol_v2.negotiation import ClientTerms
from protocol_v2.operations import Answer, AwaitLimits, Operation
from protocol_v2.results import LookupResult, RetrieveResult
from protocol_v2.session_keeper import Patience, SessionKeeper
from protocol_v2.tensors import to_numpy
from protocol_v2.wire_keys import Shard
from tests.matrix.lmcache_model import LmcacheModel
from tests.matrix.observation import Cell, Job, Observed, Pair, SiteRun, cells, pairs
from tests.matrix.requests import CHUNK, MatrixRequest
from tests.matrix.rules import GENERATIONS, Client, Outcome, Server, Speech, Stand, is_ours
from tests.protocol_v2.service_harness import Harness

MEMORY = 1 << 28
SHAPE = (1, CHUNK, 1)
VALUE_BYTES = 4 * CHUNK
POLICIES: dict[Client, Callable[[KeySpace], ForeignPolicy]] = {
    Client.OURS: TunnelPolicy,
    Client.OURS_BYPASS: lambda _: bypass,
    Client.OURS_REFUSE: lambda _: refuse,
}

R = TypeVar("R")


class Place(Protocol):
    """Where a server stands."""

    def deliver(self, identity: bytes, frames: Sequence[bytes], now: float) -> list[list[bytes]]:
        """Answers to one message."""


class Standing(Protocol):
    """Servers of which one after the other stands in one place."""

    @property
    def places(self) -> Sequence[Place]:
        """The servers."""

    @property
    def stage(self) -> int:
        """Which of them stands there now."""


class OurServer:
    """Our service, with the v1 front or without."""

    def __init__(self, *, front: bool) -> None:
        make = (lambda cache: V1Front(cache, chunk_size=CHUNK)) if front else None
        self._harness = Harness(memory=MEMORY, front=make, max_peers=1 << 16)

    def deliver(self, identity: bytes, frames: Sequence[bytes], _now: float) -> list[list[bytes]]:
        """See `Place`."""
        return [[bytes(frame) for frame in answer] for answer in self._harness.raw(identity, *frames)]


def place_of(stand: Stand) -> Place:
    """A server that stands so."""
    return OurServer(front=stand.serves_v1) if stand.keys_extras else LmcacheModel(tells=stand.tells)


@cache
def space_of(deployment: str) -> KeySpace:
    """The space of a deployment."""
    return KeySpace(f"org/{deployment}", chunk_size=CHUNK, kv_dtype="float32")


@cache
def v1_model_of(deployment: str) -> str:
    """LMCache's name of a deployment's model: the tunnel's own, so that no name keeps the two apart."""
    return model_name(space_of(deployment).root, 0)


def written_keys(space: KeySpace, request: MatrixRequest) -> Iterator[tuple[int, list[ChunkKey]]]:
    """First chunk of each store, and all keys that there are by then, from tokens as they come."""
    steps = iter(request.spec.steps)
    chain = ChunkKeyChain(space, request.extra_keys)
    n_tokens = 0
    for write in request.spec.writes:
        if write.anew:
            chain = ChunkKeyChain(space, request.extra_keys)
            chain.extend(request.tokens[:n_tokens])
        while n_tokens < write.n_tokens:
            step = next(steps)
            chain.extend(request.tokens[n_tokens : n_tokens + step])
            n_tokens += step
        yield write.first, list(chain.keys)


class OurClient:
    """Our client's keeper and operations over an address, for one space."""

    _identities = itertools.count()

    def __init__(self, places: Sequence[Place], space: KeySpace, policy: ForeignPolicy) -> None:
        self.space = space
        self.speeches: tuple[Speech, ...] = ()
        self._places = places
        self._identity = b""
        self._now = 1000.0
        self._tickets = itertools.count()
        self._outcomes: dict[int, ReplyReceived | ProtocolError] = {}
        self._keeper = SessionKeeper(
            ClientTerms(b"c" * 16, space), patience=Patience(), chance=lambda: 0.5, on_foreign=policy
        )

    @property
    def speech(self) -> Speech:
        """How it speaks now."""
        return self.speeches[-1]

    def stay(self, stage: int) -> None:
        """Be there while one server after the other stands in the place, up to the given one."""
        while len(self.speeches) <= stage:
            if self.speeches:
                self._now += 10
                self._keeper.disconnected("gone", self._now)
                self._now += 60
            self.speeches += (Speech.NONE,)
            self._keeper.tick(self._now)
            self._carry()
            if self._keeper.phase is not Phase.UP:  # whatever waits for an answer waits no longer
                self._now += 3
                self._keeper.tick(self._now)
                self._carry()
            if self._keeper.phase is Phase.UP:
                speech = Speech.TUNNEL if self._keeper.tunnelled else Speech.NATIVE
                self.speeches = (*self.speeches[:-1], speech)

    def store(self, request: MatrixRequest) -> bool:
        """Store every chunk, in the steps of the request's phase; False without a session."""
        for first, keys in written_keys(self.space, request):
            values = [np.full(CHUNK, request.values[place], np.float32) for place in range(first, len(keys))]
            result = self._run(
                operations.store(
                    session=self._session(),
                    keys=keys,
                    tensors=values,
                    first=first,
                    shard=Shard(),
                    places=None,
                    space=self.space,
                )
            )
            if result is None:
                return False
            assert (result.failure, result.declined) == (None, 0), result
        return True

    def lookup(self, request: MatrixRequest, session: str) -> LookupResult | None:
        """Look a request up; None without a session."""
        keys = chunk_keys(self.space, request.tokens, request.extra_keys)
        found = self._run(operations.lookup(session=session, keys=keys, world=1, groups=1, lease=True))
        assert found is None or found.failure is None, found
        return found

    def retrieve(self, lease: bytes, count: int) -> RetrieveResult | None:
        """Retrieve leading chunks of a lease."""
        return self._run(operations.retrieve(lease=lease, first=0, count=count, shard=Shard(), make=to_numpy))

    def fetch(self, request: MatrixRequest) -> tuple[int, ...] | None:
        """Values of the chunks that are hit; None without a session."""
        session = self._session()
        found = self.lookup(request, session)
        if found is None:
            return None
        if not found.hit_chunks:
            return ()
        assert found.lease is not None
        got = self.retrieve(found.lease, found.hit_chunks)
        self._run(operations.end_session(session=session))
        assert got is not None
        assert (got.failure, got.miss, len(got.chunks)) == (None, None, found.hit_chunks), got
        return tuple(number_of(bytes(chunk.tensors[0].data)) for chunk in got.chunks)

    def _session(self) -> str:
        return f"s{next(self._tickets)}"

    def _run(self, operation: "Operation[R]") -> R | None:
        """What comes of an operation; None without a session, whatever the policy makes of that."""
        bypassed = self.speech is Speech.NONE
        try:
            step = next(operation)
            while True:
                assert isinstance(step, AwaitLimits | operations.Ask)  # the others are for shared memory
                step = operation.send(self._limits() if isinstance(step, AwaitLimits) else self._ask(step))
        except StopIteration as done:
            result: R = done.value
            return None if bypassed else result
        except ServerError:
            if bypassed:
                return None
            raise

    def _limits(self) -> Answer:
        return self._keeper.limits or self._keeper.failure or ServerUnavailableError("no session")

    def _ask(self, step: operations.Ask) -> Answer:
        ticket = next(self._tickets)
        payload = tuple(bytes(frame) for frame in step.payload)
        self._keeper.submit(ticket, step.message, payload, 5.0, self._now)
        self._carry()
        return self._outcomes.pop(ticket)

    def _carry(self) -> None:
        """Do what the keeper asks for until it asks for nothing."""
        while True:
            actions = self._keeper.take_actions()
            for action in actions:
                match action:
                    case OpenSocket():
                        self._identity = b"ours-%d" % next(self._identities)
                        self._keeper.connected(self._now)
                    case Send():
                        frames = [bytes(frame) for frame in action.frames]
                        for answer in self._places[len(self.speeches) - 1].deliver(self._identity, frames, self._now):
                            self._keeper.received(answer, self._now)
                    case Finish():
                        self._outcomes[action.ticket] = action.outcome
            if not actions and self._keeper.next_tick() > float("-inf"):
                return
            self._keeper.tick(self._now)


class OurParty:
    """Our clients on one address: one for each deployment."""

    def __init__(self, site: Standing, client: Client) -> None:
        self._site = site
        self._policy = POLICIES[client]
        self._clients: dict[str, OurClient] = {}

    @property
    def alike(self) -> Hashable:
        """What tells its messages from those of other parties: nothing else about it can matter to a server."""
        return self.client("alike").speeches

    def client(self, deployment: str) -> OurClient:
        """The client of a deployment, which was there before the server was replaced."""
        if deployment not in self._clients:
            space = space_of(deployment)
            self._clients[deployment] = OurClient(self._site.places, space, self._policy(space))
        client = self._clients[deployment]
        client.stay(self._site.stage)
        return client

    def write(self, jobs: Sequence[Job]) -> bool:
        """See `Party`."""
        told = [self.client(job.deployment).store(job.request) for job in jobs]
        return all(told)

    def read(self, jobs: Sequence[Job]) -> list[tuple[int, ...] | None]:
        """See `Party`."""
        if self.client("alike").speech is Speech.NONE:  # who has no session has no deployment either
            asked = {request: self.client("alike").fetch(request) for _, request in jobs}
            return [asked[job.request] for job in jobs]
        return [self.client(job.deployment).fetch(job.request) for job in jobs]


class V1Party:
    """LMCache's engines on one address, in LMCache's frames: one registration for each deployment."""

    _numbers = itertools.count(1)

    def __init__(self, site: Standing, client: Client) -> None:
        self._site = site
        self._client = client
        self._identity = b"v1-%d" % next(self._numbers)
        self._instances: dict[tuple[int, str], int | None] = {}

    @property
    def alike(self) -> Hashable:
        """See `OurParty.alike`."""
        return None if self._instance("alike") is None else self._client

    def write(self, jobs: Sequence[Job]) -> bool:
        """See `Party`."""
        if self.alike is None:
            return False
        for deployment, request in jobs:
            instance = self._instance(deployment)
            request_id = self._request_id()
            for write in request.spec.writes:
                key = self._key(deployment, request, request_id, first=write.first, n_tokens=write.n_tokens)
                n_chunks = write.n_tokens // CHUNK
                values = [pickled(request.values[place]) for place in range(write.first, n_chunks)]
                self._ask(V1Operation.PREPARE_STORE, key, instance)
                self._ask(V1Operation.COMMIT_STORE, key, instance, write_tensors(values))
            self._ask(V1Operation.END_SESSION, request_id)
        return True

    def read(self, jobs: Sequence[Job]) -> list[tuple[int, ...] | None]:
        """See `Party`. Requests that are one in LMCache's protocol are sent once."""
        if self.alike is None:
            return [None] * len(jobs)
        known: dict[tuple[object, ...], tuple[int, ...]] = {}
        answers: list[tuple[int, ...] | None] = []
        for job in jobs:
            sent = (job.deployment, *sent_by(self._client, job.request), self._unknown_fields(job.request))
            if sent not in known:
                known[sent] = self._fetch(job)
            answers.append(known[sent])
        return answers

    def _fetch(self, job: Job) -> tuple[int, ...]:
        instance = self._instance(job.deployment)
        request_id = self._request_id()
        self._ask(V1Operation.LOOKUP, self._key(job.deployment, job.request, request_id, rank=None), 1)
        hit = self._ask(V1Operation.WAIT_PREFETCH_STATUS, request_id, 1.0)
        values: tuple[int, ...] = ()
        if hit:
            key = self._key(job.deployment, job.request, request_id, n_tokens=hit * CHUNK)
            answer = self._ask(V1Operation.PREPARE_RETRIEVE, key, instance)
            assert answer.success
            values = numbers_of(bytes(answer.data))
            self._ask(V1Operation.COMMIT_RETRIEVE, key, instance)
        self._ask(V1Operation.END_SESSION, request_id)
        return values

    def _key(
        self,
        deployment: str,
        request: MatrixRequest,
        request_id: str,
        *,
        rank: int | None = 0,
        first: int = 0,
        n_tokens: int | None = None,
    ) -> dict[str, Any]:
        tokens, salt = sent_by(self._client, request)
        n_tokens = len(tokens) if n_tokens is None else n_tokens
        fields = {
            "model_name": v1_model_of(deployment),
            "world_size": 1,
            "worker_id": rank,
            "token_ids": tokens[:n_tokens],
            "start": first * CHUNK,
            "end": n_tokens // CHUNK * CHUNK,
            "request_id": request_id,
            "cache_salt": salt,
            "num_kv_readers": 1,
        }
        assert fields.keys() <= set(V1Key.__struct_fields__)
        unknown = self._unknown_fields(request)
        return fields | ({"extra_keys": unknown} if unknown else {})

    def _unknown_fields(self, request: MatrixRequest) -> tuple[str, ...]:
        return tuple(map(repr, request.extra_keys)) or ("none",) if self._client is Client.FIELDS else ()

    def _instance(self, deployment: str) -> int | None:
        """Registered worker of a deployment; None where nobody answers."""
        there = (self._site.stage, deployment)  # LMCache's clients register anew with a server that was replaced
        if there not in self._instances:
            instance = next(self._numbers)
            registration = V1Registration(
                instance_id=instance,
                model_name=v1_model_of(deployment),
                world_size=1,
                block_size=CHUNK,
                num_layers=SHAPE[0],
                hidden_dim_size=SHAPE[2],
                dtype_str="float32",
                use_mla=True,
                num_physical_slots=SHAPE[1],
            )
            answered = self._send(V1Operation.REGISTER_ENGINE_DRIVEN, registration)
            self._instances[there] = instance if answered else None
        return self._instances[there]

    def _ask(self, operation: V1Operation, *payloads: object) -> Any:
        (answer,) = self._send(operation, *payloads)
        return decode_answer(answer, operation)[1]

    def _send(self, operation: V1Operation, *payloads: object) -> list[list[bytes]]:
        frames = [bytes(frame) for frame in encode_request(7, operation, *payloads)]
        return self._site.places[self._site.stage].deliver(self._identity, frames, 1000.0)

    def _request_id(self) -> str:
        return f"r{next(self._numbers)}"


@cache
def sent_by(client: Client, request: MatrixRequest) -> tuple[tuple[int, ...], str]:
    """Token ids and salt of a request as a v1 client sends it."""
    tokens = v1_token_ids(request.tokens, request.items, generation=GENERATIONS[client])
    return tuple(tokens), request.salt


@cache
def pickled(value: int) -> PickledTensor:
    """A chunk's tensor."""
    return PickledTensor("float32", SHAPE, np.full(CHUNK, value, "<f4").tobytes())


@cache
def numbers_of(data: bytes) -> tuple[int, ...]:
    """The values that fill pickled chunks."""
    return tuple(number_of(bytes(tensor.data)) for tensor in read_tensors(memoryview(data)))


def number_of(data: bytes) -> int:
    """The value that fills a chunk.

    Raises:
        AssertionError: it is not one value throughout.
    """
    (value,) = set(np.frombuffer(data, "<f4").tolist())
    assert value == int(value)
    return int(value)


class Site:
    """A server, or two of which the second is put in the place of the first, and every client.

    Attributes:
        places: the servers.
        stage: which of them stands there now.
        parties: every client.
    """

    def __init__(self, server: Server) -> None:
        stands = [server.before, server.now] if server.replaced else [server.now]
        self.places = [place_of(stand) for stand in stands]
        self.stage = 0
        self.parties = {client: (OurParty if is_ours(client) else V1Party)(self, client) for client in Client}

    def replace(self) -> None:
        """Put the second server, if there is one, in the place of the first."""
        self.stage = len(self.places) - 1


def observe(wanted: Sequence[Pair] | None = None, servers: Iterable[Server] = Server) -> Observed:
    """Run the matrix.

    Servers between which the model makes no difference are run once.

    Args:
        wanted: pairs of requests; None for all.
        servers: where.
    """
    wanted = pairs() if wanted is None else wanted
    observed: dict[Cell, Mapping[Pair, Outcome]] = {}
    for alike in _alike(servers):
        site = Site(alike[0])
        run = SiteRun(site.parties, [cell for cell in cells() if cell.server is alike[0]], wanted)
        run.begin()
        site.replace()
        for cell, outcomes in run.finish().items():
            observed |= {cell._replace(server=server): outcomes for server in alike}
    return observed


def _alike(servers: Iterable[Server]) -> list[list[Server]]:
    """Servers that are one here."""
    groups: dict[Hashable, list[Server]] = {}
    for server in servers:
        groups.setdefault((server.before, server.now, server.written_before), []).append(server)
    return list(groups.values())
