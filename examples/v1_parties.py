"""The v1 side of the rehearsal: servers and engines' caches of LMCache 0.5.x, released ones or stand-ins.

    Released    LMCache's own server and client, as processes in ``.venv-lmcache`` (built by ``make interop``)
    StandIns    the same frames, written and read by `compat.v1.wire`, for a clone without that environment

Both key on token ids and salt: neither knows of adapters, nor that a run of placeholder tokens may be any picture.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq

from compat.v1 import mp_chunk_hashes
from compat.v1.operations import (
    V1Key,
    V1Operation,
    V1Registered,
    V1Registration,
    V1RetrievePrepared,
    V1StorePrepared,
)
from compat.v1.pickled_tensors import PickledTensor, read_tensors, write_tensors
from compat.v1.wire import V1Request, V1WireError, decode_answer, decode_request, encode_answer, encode_request

CHUNK = 16
"""Tokens of a chunk, of all servers and engines of the rehearsal. A tunnel needs at least 9."""

LAYERS, WIDTH = 1, 8
ANSWER_SECONDS = 2.0
"""That a v1 client waits for an answer. LMCache's default is 300."""

HEARTBEAT_SECONDS = 0.5
"""Between two pings of a v1 engine, which registers anew after an outage. LMCache's default is 10."""


class NoCacheError(Exception):
    """No answer from a cache: the engine computes everything itself."""


class V1Server(Protocol):
    """A v1 server that was started."""

    def wait_ready(self) -> object:
        """Wait until it answers."""

    def stop(self) -> None:
        """End it, as if it had been killed. Idempotent."""


class V1Cache(Protocol):
    """One engine's connection to whatever listens at an address, spoken to as v1. A chunk is one number throughout."""

    def fetch(self, tokens: Sequence[int], salt: str) -> list[float]:
        """Look up and retrieve: the values of the leading chunks that are there. Raises `NoCacheError`."""

    def store(self, tokens: Sequence[int], salt: str, values: Sequence[float]) -> None:
        """Store the last ``len(values)`` chunks of a prompt. Raises `NoCacheError`."""

    def close(self) -> None:
        """Hang up."""


class V1Parties(Protocol):
    """Where v1 servers and caches come from."""

    name: str

    def start_server(self, port: int) -> V1Server:
        """Start a server at a port of 127.0.0.1."""

    def connect(self, address: str, model: str) -> V1Cache:
        """A registered worker of a model. Raises `NoCacheError`."""

    def close(self) -> None:
        """End what was started."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# ---- stand-ins


class StandIns:
    """v1 parties for a clone without LMCache's environment."""

    name = "stand-ins that speak LMCache 0.5.6's frames"

    def start_server(self, port: int) -> V1Server:
        """A server in a thread."""
        return StandInServer(f"tcp://127.0.0.1:{port}")

    def connect(self, address: str, model: str) -> V1Cache:
        """A client with a socket of its own."""
        return StandInCache(address, model)

    def close(self) -> None:
        """Nothing is left."""


class StandInServer:
    """A v1 server that keeps tensors in memory, by model, salt and LMCache's hash over token ids; in a thread."""

    def __init__(self, address: str) -> None:
        self._chunks: dict[tuple[str, str, bytes], PickledTensor] = {}
        self._found: dict[str, int] = {}
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(address)
        self._thread = threading.Thread(target=self._run, name="v1-stand-in", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """It listens from the start."""

    def stop(self) -> None:
        """End the thread; connections break. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._router.close()
        self._context.term()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            peer, *frames = self._router.recv_multipart()
            with contextlib.suppress(V1WireError):  # what it cannot read it leaves unanswered, as the release does
                request = decode_request(frames)
                self._router.send_multipart([peer, *encode_answer(request, self._answer(request))])

    def _answer(self, request: V1Request) -> object:
        arguments: tuple[Any, ...] = request.payloads
        match request.operation:
            case V1Operation.GET_EXPERIMENTAL:
                return []  # a server of protocol 2 lists extra_keys/2 here
            case V1Operation.GET_CHUNK_SIZE:
                return CHUNK
            case V1Operation.REGISTER_ENGINE_DRIVEN:
                return V1Registered()
            case V1Operation.LOOKUP:
                names = self._names(arguments[0])
                self._found[arguments[0].request_id] = next(
                    (place for place, name in enumerate(names) if name not in self._chunks), len(names)
                )
            case V1Operation.WAIT_PREFETCH_STATUS:
                return self._found.pop(arguments[0], 0)
            case V1Operation.PREPARE_STORE:
                return V1StorePrepared()
            case V1Operation.COMMIT_STORE:
                key, _, data = arguments
                tensors = read_tensors(data)
                for name, tensor in zip(self._names(key)[key.start // CHUNK :], tensors, strict=True):
                    self._chunks[name] = PickledTensor(tensor.dtype, tensor.shape, bytes(tensor.data))
                return True
            case V1Operation.PREPARE_RETRIEVE:
                key = arguments[0]
                wanted = [self._chunks[name] for name in self._names(key)[key.start // CHUNK :]]
                return V1RetrievePrepared(success=True, data=memoryview(write_tensors(wanted)))
            case V1Operation.COMMIT_RETRIEVE | V1Operation.PING:
                return True
            case V1Operation.NOOP:
                return "OK"
        return None  # locks and sessions, of which it keeps none

    def _names(self, key: V1Key) -> list[tuple[str, str, bytes]]:
        hashes = mp_chunk_hashes(key.token_ids[: key.end], CHUNK)
        return [(key.model_name, key.cache_salt, one) for one in hashes]


class StandInCache:
    """LMCache's frames, written and read here: the calls of its engine adapter in engine-driven mode."""

    def __init__(self, address: str, model: str) -> None:
        self._model = model
        self._instance = int.from_bytes(os.urandom(6), "big")
        self._uids = itertools.count()
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.connect(address)
        self._registration = V1Registration(
            instance_id=self._instance,
            model_name=model,
            world_size=1,
            block_size=CHUNK,
            num_layers=LAYERS,
            hidden_dim_size=WIDTH,
            dtype_str="float32",
            use_mla=False,
            num_physical_slots=CHUNK,
        )
        self._healthy = False
        self._next_beat = 0.0

    def fetch(self, tokens: Sequence[int], salt: str) -> list[float]:
        """Look up and retrieve."""
        self._heartbeat()
        request = f"r-{os.urandom(8).hex()}"
        self._ask(V1Operation.LOOKUP, self._key(tokens, salt, request, rank=None), 1)
        hit = self._ask(V1Operation.WAIT_PREFETCH_STATUS, request, ANSWER_SECONDS / 2) or 0
        values: list[float] = []
        if hit:
            key = self._key(tokens[: hit * CHUNK], salt, request)
            answer = self._ask(V1Operation.PREPARE_RETRIEVE, key, self._instance)
            self._ask(V1Operation.COMMIT_RETRIEVE, key, self._instance)
            if answer.success:
                values = [uniform(np.frombuffer(one.data, np.float32)) for one in read_tensors(answer.data)]
        self._ask(V1Operation.END_SESSION, request)
        return values

    def store(self, tokens: Sequence[int], salt: str, values: Sequence[float]) -> None:
        """Store the last chunks of a prompt."""
        shape = (2, LAYERS, CHUNK, WIDTH)
        data = write_tensors(
            [PickledTensor("float32", shape, np.full(shape, value, np.float32).tobytes()) for value in values]
        )
        key = self._key(tokens, salt, f"s-{os.urandom(8).hex()}", start=len(tokens) - len(values) * CHUNK)
        self._ask(V1Operation.PREPARE_STORE, key, self._instance)
        self._ask(V1Operation.COMMIT_STORE, key, self._instance, data)
        self._ask(V1Operation.END_SESSION, key.request_id)

    def close(self) -> None:
        """Hang up."""
        self._dealer.close()
        self._context.term()

    def _heartbeat(self) -> None:
        """As LMCache's: a ping that is answered well after one that was not registers anew."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + HEARTBEAT_SECONDS
        was_healthy, self._healthy = self._healthy, False
        if self._ask(V1Operation.PING, self._instance):
            if not was_healthy:
                self._ask(V1Operation.REGISTER_ENGINE_DRIVEN, self._registration)
            self._healthy = True

    def _key(self, tokens: Sequence[int], salt: str, request_id: str, *, start: int = 0, rank: int | None = 0) -> V1Key:
        return V1Key(
            model_name=self._model,
            world_size=1,
            worker_id=rank,
            token_ids=tuple(tokens),
            start=start,
            end=len(tokens),
            request_id=request_id,
            cache_salt=salt,
            num_kv_readers=1,
        )

    def _ask(self, operation: V1Operation, *payloads: object) -> Any:
        request = encode_request(next(self._uids), operation, *payloads)
        self._dealer.send_multipart(request)
        ends = time.monotonic() + ANSWER_SECONDS
        while (rest := ends - time.monotonic()) > 0 and self._dealer.poll(int(rest * 1000) + 1):
            answer = self._dealer.recv_multipart()
            if answer[0] == request[0]:  # else one that came too late
                return decode_answer(answer, operation)[1]
        raise NoCacheError(f"{operation}: no answer")


def uniform(values: Any) -> float:
    """The one value of an array; NaN, which is nobody's, where there are several."""
    return float(values[0]) if values.size and bool((values == values[0]).all()) else float("nan")


# ---- the released LMCache


class Released:
    """LMCache 0.5.6 itself: servers are processes, and all its clients live in one.

    Args:
        folder: for what they print.
    """

    name = "LMCache 0.5.6, its own server and client"

    def __init__(self, folder: Path) -> None:
        # the harness of the interop tests drives these processes, in the environment that is built for those tests
        from tests.interop.real_client import RealClient  # noqa: PLC0415

        self._folder = folder
        self._client = RealClient(folder / "clients.log")
        self._lock = threading.Lock()
        self._servers = itertools.count()

    @staticmethod
    def is_installed() -> bool:
        """Whether LMCache's environment is there and whole."""
        from tests.interop.environment import STAMP  # noqa: PLC0415

        return STAMP.exists()

    def start_server(self, port: int) -> V1Server:
        """A server process."""
        from tests.interop.real_server import RealServer  # noqa: PLC0415

        log = self._folder / f"server-{next(self._servers)}.log"
        return RealServer(log, chunk_size=CHUNK, port=port).launch()

    def connect(self, address: str, model: str) -> V1Cache:
        """One more client in the process of clients."""
        return ReleasedCache(self._client, self._lock, address, model)

    def close(self) -> None:
        """End the process of clients."""
        self._client.close()


class ReleasedCache:
    """LMCache's client, through the process that it lives in."""

    def __init__(self, client: Any, lock: threading.Lock, address: str, model: str) -> None:
        from tests.interop.real_client import RealClientError, V1User  # noqa: PLC0415

        self._error = RealClientError
        self._lock = lock
        self._client = client
        with self._lock:
            try:
                self._user = V1User(
                    client, address, model=model, chunk_size=CHUNK, dtype="float32", timeout=ANSWER_SECONDS
                )
                client.call(
                    "heartbeat",
                    client=self._user.number,
                    instance=self._user.instances[0],
                    interval=HEARTBEAT_SECONDS,
                )
            except RealClientError as error:
                raise NoCacheError(str(error)) from None

    def fetch(self, tokens: Sequence[int], salt: str) -> list[float]:
        """Look up and retrieve."""
        with self._lock:
            try:
                return self._user.retrieve(tokens, salt=salt) or []
            except self._error as error:
                raise NoCacheError(str(error)) from None

    def store(self, tokens: Sequence[int], salt: str, values: Sequence[float]) -> None:
        """Store the last chunks of a prompt."""
        with self._lock:
            try:
                self._user.store_fills(tokens, values, start=len(tokens) - len(values) * CHUNK, salt=salt)
            except self._error as error:
                raise NoCacheError(str(error)) from None

    def close(self) -> None:
        """End the heartbeat; the socket lives until its process ends."""
        with self._lock, contextlib.suppress(self._error):  # the process may be gone
            self._client.call("end_heartbeat", instance=self._user.instances[0])
