"""A `V1Front` in a service without sockets, and v1 clients that speak to it in frames."""

import itertools
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from compat.v1.front import V1Front
from compat.v1.operations import V1Key, V1Operation, V1Registration
from compat.v1.pickled_tensors import PickledTensor, read_tensors, write_tensors
from compat.v1.wire import decode_answer, encode_request
from protocol_v2.cache import ChunkCache
from protocol_v2.tiers import DiskTier
from protocol_v2.tiers.remote import RemoteTier
from tests.protocol_v2.service_harness import MEMORY, Harness

CHUNK = 4
SHAPE = (2, 1, CHUNK, 2)
CHUNK_BYTES = 2 * CHUNK * 2 * 2

_request_ids = (f"r{number}" for number in itertools.count())


class FrontHarness(Harness):
    """A service with a front, and the clock that the test moves."""

    front: V1Front

    def __init__(
        self,
        *,
        memory: int = MEMORY,
        disk: DiskTier | None = None,
        remote: RemoteTier | None = None,
        remote_executor: Executor | None = None,
        **front: Any,
    ) -> None:
        def make(cache: ChunkCache) -> V1Front:
            self.front = V1Front(cache, chunk_size=CHUNK, **front)
            return self.front

        super().__init__(memory=memory, disk=disk, remote=remote, remote_executor=remote_executor, front=make)

    def v1_client(self, *, model: str = "org/m", world: int = 1, dtype: str = "float16") -> "V1Client":
        """A client with a socket of its own, whose workers are registered."""
        return V1Client(self, next(self._identities), model, world, dtype)

    def refused(self, reason: str) -> int:
        """How many requests were refused for a reason."""
        return int(self.service.status(self.now).get(f"v1.refused.{reason}") or 0)


class V1Client:
    """One socket of a v1 engine."""

    def __init__(self, harness: FrontHarness, identity: bytes, model: str, world: int, dtype: str) -> None:
        self.harness = harness
        self.identity = identity
        self.model = model
        self.world = world
        self.instances = [int.from_bytes(identity, "big") % 10**6 * 10 + rank for rank in range(world)]
        for instance in self.instances:
            self.register(instance, dtype_str=dtype)

    def register(self, instance: int, **fields: Any) -> Any:
        """Register a worker; keyword arguments replace fields."""
        registration: dict[str, Any] = {
            "instance_id": instance,
            "model_name": self.model,
            "world_size": self.world,
            "block_size": CHUNK,
            "num_layers": 1,
            "hidden_dim_size": 2,
            "dtype_str": "float16",
            "use_mla": False,
            "num_physical_slots": CHUNK,
        }
        return self.ask(V1Operation.REGISTER_ENGINE_DRIVEN, V1Registration(**(registration | fields)))

    def send(self, *frames: bytes) -> list[list[bytes]]:
        """Send frames; all that comes back."""
        return [[bytes(frame) for frame in answer] for answer in self.harness.raw(self.identity, *frames)]

    def ask(self, operation: V1Operation, *payloads: object) -> Any:
        """Ask; the value of the one answer."""
        (answer,) = self.send(*map(bytes, encode_request(7, operation, *payloads)))
        uid, value = decode_answer(answer, operation)
        assert uid == 7
        return value

    def key(
        self,
        tokens: Sequence[int],
        *,
        request_id: str | None = None,
        rank: int | None = 0,
        start: int = 0,
        stop: int | None = None,
        salt: str = "",
        readers: int = 1,
        **fields: Any,
    ) -> V1Key:
        """A key over a range of whole chunks."""
        named: dict[str, Any] = {
            "model_name": self.model,
            "world_size": self.world,
            "worker_id": rank,
            "token_ids": tuple(tokens),
            "start": start,
            "end": len(tokens) // CHUNK * CHUNK if stop is None else stop,
            "request_id": request_id or next(_request_ids),
            "cache_salt": salt,
            "num_kv_readers": readers,
        }
        return V1Key(**(named | fields))

    def lookup(self, tokens: Sequence[int], *, request_id: str, **key: Any) -> int:
        """Look up and take the result; the session stays."""
        assert self.ask(V1Operation.LOOKUP, self.key(tokens, request_id=request_id, rank=None, **key), 1) is None
        found: int = self.ask(V1Operation.QUERY_PREFETCH_STATUS, request_id)
        return found

    def hits(self, tokens: Sequence[int], **key: Any) -> int:
        """Look up under a fresh id, and end the session."""
        request_id = next(_request_ids)
        found = self.lookup(tokens, request_id=request_id, **key)
        self.end(request_id)
        return found

    def end(self, request_id: str) -> None:
        """End a session."""
        assert self.ask(V1Operation.END_SESSION, request_id) is None

    def store(self, tokens: Sequence[int], fill: int, *, rank: int = 0, **key: Any) -> bool:
        """Store a range of a prompt; chunk i of the range is filled with byte ``fill + i``."""
        fields = self.key(tokens, rank=rank, **key)
        n_chunks = (fields.end - fields.start) // CHUNK
        return self.commit(fields, pickled([fill + place for place in range(n_chunks)]), rank=rank)

    def commit(self, key: V1Key, data: bytes, *, rank: int = 0) -> bool:
        """Prepare and commit a store of any bytes."""
        assert self.ask(V1Operation.PREPARE_STORE, key, self.instances[rank]).context == {}
        stored: bool = self.ask(V1Operation.COMMIT_STORE, key, self.instances[rank], data)
        return stored

    def retrieve(self, tokens: Sequence[int], *, rank: int = 0, **key: Any) -> list[int] | None:
        """Retrieve a range that was looked up before; the byte that fills each chunk."""
        fields = self.key(tokens, rank=rank, **key)
        answer = self.ask(V1Operation.PREPARE_RETRIEVE, fields, self.instances[rank])
        assert self.ask(V1Operation.COMMIT_RETRIEVE, fields, self.instances[rank]) is True
        assert {} == answer.context
        if not answer.success:
            assert len(answer.data) == 0
            return None
        return filled(answer.data)

    def fetch(self, tokens: Sequence[int], **key: Any) -> list[int] | None:
        """Look up, retrieve what was hit, and end the session."""
        request_id = next(_request_ids)
        found = self.lookup(tokens, request_id=request_id, **key)
        values = self.retrieve(tokens, request_id=request_id, stop=found * CHUNK, **key) if found else None
        self.end(request_id)
        return values


def pickled(fills: Sequence[int], *, dtype: str = "float16", shape: tuple[int, ...] = SHAPE) -> bytes:
    """What a client commits: a tensor a chunk, each of one byte throughout."""
    return write_tensors([PickledTensor(dtype, shape, bytes([fill]) * CHUNK_BYTES) for fill in fills])


def filled(data: bytes | memoryview) -> list[int]:
    """The byte that fills each tensor of an answer."""
    values = []
    for tensor in read_tensors(data):
        assert (tensor.dtype, tensor.shape) == ("float16", SHAPE)
        (value,) = set(bytes(tensor.data))
        values.append(value)
    return values
