"""The parties of the migration matrix as they are: LMCache's own client, and ours over sockets."""

import contextlib
import itertools
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import zmq

from keying import KeySpace, chunk_keys
from protocol_v2.client import CacheClient
from protocol_v2.errors import ProtocolError, ServerError
from protocol_v2.session_keeper import Patience
from protocol_v2.tensors import to_numpy
from tests.interop.real_client import RealClient, RealClientError
from tests.matrix.in_process import (
    POLICIES,
    SHAPE,
    Place,
    V1Party,
    number_of,
    sent_by,
    space_of,
    v1_model_of,
    written_keys,
)
from tests.matrix.observation import Job, Party
from tests.matrix.requests import CHUNK, MatrixRequest
from tests.matrix.rules import Client, Speech, is_ours

_numbers = itertools.count(2_000_000)


class RealV1Party:
    """LMCache's own client, whose engine keys items as one generation does.

    Args:
        process: with the client in it.
        number: of its connection.
        client: which generation.
        instances: of all parties on that connection, by deployment: one engine's workers serve every generation.
    """

    def __init__(self, process: RealClient, number: int, client: Client, instances: dict[str, int | None]) -> None:
        self._process = process
        self._number = number
        self._client = client
        self._instances = instances

    @property
    def alike(self) -> Hashable:
        """See `Party`."""
        self._register({"alike"})
        return None if self._instances["alike"] is None else self._client

    def replaced(self) -> None:
        """Another server stands there: its workers register anew."""
        self._instances.clear()

    def write(self, jobs: Sequence[Job]) -> bool:
        """See `Party`. Each request is one session, whose stores follow each other."""
        if self.alike is None:
            return False
        self._register({job.deployment for job in jobs})
        ids = [f"w{next(_numbers)}" for _ in jobs]
        for place in range(max(len(job.request.spec.writes) for job in jobs)):
            stores = [
                self._store(job, request_id, place)
                for job, request_id in zip(jobs, ids, strict=True)
                if place < len(job.request.spec.writes)
            ]
            assert all(self._process.call("store_all", client=self._number, stores=stores))
        self._process.call("end_all", client=self._number, request_ids=ids)
        return True

    def read(self, jobs: Sequence[Job]) -> list[tuple[int, ...] | None]:
        """See `Party`. Requests that are one in LMCache's protocol are sent once."""
        if self.alike is None:
            return [None] * len(jobs)
        self._register({job.deployment for job in jobs})
        sent = [(job.deployment, sent_by(self._client, job.request)) for job in jobs]
        once = dict(zip(sent, jobs, strict=True))
        fetches = [
            [self._key(job, f"r{next(_numbers)}", None), self._instances[job.deployment]] for job in once.values()
        ]
        got = self._process.call("fetch_all", client=self._number, fetches=fetches, chunk_size=CHUNK)
        values = {one: tuple(map(int, some)) for one, some in zip(once, got, strict=True)}
        return [values[one] for one in sent]

    def _store(self, job: Job, request_id: str, place: int) -> list[Any]:
        write = job.request.spec.writes[place]
        key = self._key(job, request_id, 0, first=write.first, n_tokens=write.n_tokens)
        return [key, self._instances[job.deployment], job.request.values[write.first : write.n_tokens // CHUNK]]

    def _key(
        self, job: Job, request_id: str, rank: int | None, *, first: int = 0, n_tokens: int | None = None
    ) -> dict[str, Any]:
        tokens, salt = sent_by(self._client, job.request)
        tokens = tokens[:n_tokens]
        return {
            "model_name": v1_model_of(job.deployment),
            "world_size": 1,
            "worker_id": rank,
            "token_ids": tokens,
            "start": first * CHUNK,
            "end": len(tokens) // CHUNK * CHUNK,
            "request_id": request_id,
            "cache_salt": salt,
            "num_kv_readers": 1,
        }

    def _register(self, deployments: Iterable[str]) -> None:
        """Register a worker in each deployment that has none; None where nobody answers."""
        fresh = {deployment: next(_numbers) for deployment in deployments if deployment not in self._instances}
        layout = {
            "world_size": 1,
            "block_size": CHUNK,
            "num_layers": SHAPE[0],
            "hidden_dim_size": SHAPE[2],
            "dtype_str": "float32",
            "use_mla": True,
            "num_physical_slots": SHAPE[1],
        }
        registrations = [
            {"instance_id": instance, "model_name": v1_model_of(deployment), **layout}
            for deployment, instance in fresh.items()
        ]
        try:
            self._process.call("register_all", client=self._number, registrations=registrations)
        except RealClientError as error:
            assert "timeout" in str(error).lower(), error
            self._instances |= dict.fromkeys(fresh)
        else:
            self._instances |= fresh


class RealOurParty:
    """Our client over sockets: one for each deployment, kept open where a server is to be replaced under it.

    Args:
        address: of the server.
        client: which policy.
        patience: for a server that does not answer the probe.
    """

    def __init__(self, address: str, client: Client, patience: Patience | None = None) -> None:
        self._address = address
        self._policy = POLICIES[client]
        self._patience = patience
        self._open: dict[str, CacheClient] = {}
        self._alike: Speech | None = None

    @property
    def alike(self) -> Hashable:
        """See `Party`."""
        if self._alike is None:
            with self._client("alike") as client:
                self._alike = speech_of(client)
        return self._alike

    def come(self, deployments: Iterable[str]) -> None:
        """Open clients that stay."""
        for deployment in deployments:
            self._open[deployment] = self._made(deployment)
            assert speech_of(self._open[deployment]) is not Speech.NONE

    def replaced(self) -> None:
        """Another server stands there: those who stay find it by themselves."""
        self._alike = None
        for client in self._open.values():
            ready_again(client)

    def close(self) -> None:
        """Close those who stayed."""
        for client in self._open.values():
            client.close()
        self._open.clear()

    def write(self, jobs: Sequence[Job]) -> bool:
        """See `Party`."""
        if self.alike is Speech.NONE:
            with self._client("alike") as client:
                told = [store(client, job.request) for job in jobs]
            return any(told)
        for job in jobs:
            with self._client(job.deployment) as client:
                assert store(client, job.request)
        return True

    def read(self, jobs: Sequence[Job]) -> list[tuple[int, ...] | None]:
        """See `Party`."""
        if self.alike is Speech.NONE:  # who has no session has no deployment either
            with self._client("alike") as client:
                return [fetch(client, job.request) for job in jobs]
        values: list[tuple[int, ...] | None] = []
        for deployment, some in groupby(jobs, lambda job: job.deployment):
            with self._client(deployment) as client:
                values += [fetch(client, job.request) for job in some]
        return values

    @contextmanager
    def _client(self, deployment: str) -> Iterator[CacheClient]:
        if deployment in self._open:
            yield self._open[deployment]
        else:
            with self._made(deployment) as client:
                yield client

    def _made(self, deployment: str) -> CacheClient:
        space = space_of(deployment)
        return CacheClient(self._address, space, on_foreign=self._policy(space), patience=self._patience)


class FieldsParty(V1Party):
    """A v1 client of our own over a socket, since LMCache's cannot send a field that it does not know."""

    def __init__(self, address: str) -> None:
        self._socket = SocketPlace(address)
        super().__init__(Alone(self._socket), Client.FIELDS)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class SocketPlace:
    """Where a server stands that is reached by a socket.

    Args:
        address: of it.
        seconds: that an answer may take; none that takes longer is expected.
    """

    def __init__(self, address: str, *, seconds: float = 2.0) -> None:
        self._milliseconds = int(1000 * seconds)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.connect(address)

    def deliver(self, _identity: bytes, frames: Sequence[bytes], _now: float) -> list[list[bytes]]:
        """See `Place`."""
        self._dealer.send_multipart(list(frames))
        return [self._dealer.recv_multipart()] if self._dealer.poll(self._milliseconds) else []

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close()
        self._context.term()


@dataclass(frozen=True, slots=True)
class Alone:
    """See `Standing`: one server."""

    place: Place
    stage: int = 0

    @property
    def places(self) -> Sequence[Place]:
        """The one."""
        return [self.place]


@contextmanager
def real_parties(
    address: str, process: RealClient, *, patience: Patience | None = None, seconds: float = 10.0
) -> Iterator[Mapping[Client, Party]]:
    """Every client of one server.

    Args:
        address: of the server.
        process: with LMCache's client in it.
        patience: of our clients.
        seconds: that an answer to LMCache's may take.
    """
    number = process.call("connect", url=address, timeout=seconds)
    instances: dict[str, int | None] = {}
    fields = FieldsParty(address)
    parties: dict[Client, Party] = {Client.FIELDS: fields}
    for client in Client:
        if is_ours(client):
            parties[client] = RealOurParty(address, client, patience)
        elif client is not Client.FIELDS:
            parties[client] = RealV1Party(process, number, client, instances)
    try:
        yield parties
    finally:
        fields.close()


def speech_of(client: CacheClient) -> Speech:
    """How a client speaks to its server."""
    try:
        return Speech.NATIVE if client.wait_ready(10) is not None else Speech.TUNNEL
    except ProtocolError:
        return Speech.NONE


def ready_again(client: CacheClient) -> None:
    """Wait for a session that answers; until there is a server, or a loss was noticed, what asks fails."""
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        with contextlib.suppress(ProtocolError):
            client.wait_ready(1.0)
            client.ping(timeout=1.0)
            return
        time.sleep(0.02)
    raise AssertionError(f"no session: {client.failure}")


def store(client: CacheClient, request: MatrixRequest) -> bool:
    """Store every chunk, in the steps of the request's phase; False without a session."""
    session = f"s{next(_numbers)}"
    for first, keys in written_keys(_space(client), request):
        values = [np.full(CHUNK, value, np.float32) for value in request.values[first : len(keys)]]
        try:
            stored = client.store(session, keys, values, first=first)
        except ServerError:
            assert speech_of(client) is Speech.NONE  # the policy refuse
            return False
        if stored.failure is not None:
            assert speech_of(client) is Speech.NONE, stored
            return False
        assert stored.declined == 0
    client.end_session(session)
    return True


def fetch(client: CacheClient, request: MatrixRequest) -> tuple[int, ...] | None:
    """Values of the chunks that are hit; None without a session."""
    session = f"s{next(_numbers)}"
    try:
        found = client.lookup(session, chunk_keys(_space(client), request.tokens, request.extra_keys))
    except ServerError:
        assert speech_of(client) is Speech.NONE  # the policy refuse
        return None
    if found.failure is not None:
        assert speech_of(client) is Speech.NONE, found
        return None
    if found.lease is None:
        return ()
    got = client.retrieve(found.lease, found.hit_chunks, make=to_numpy)
    client.end_session(session)
    assert (got.failure, got.miss, len(got.chunks)) == (None, None, found.hit_chunks), got
    return tuple(number_of(bytes(chunk.tensors[0].data)) for chunk in got.chunks)


def _space(client: CacheClient) -> KeySpace:
    assert client.space is not None
    return client.space
