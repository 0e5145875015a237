"""The released LMCache's own client in a process of its environment, and a user of it that thinks in prompts."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.environment import PYTHON, peer_environment
from tests.json_process import JsonProcess, JsonProcessError

SCRIPT = Path(__file__).parent / "peer" / "lmcache_client.py"

SECONDS = 180.0
"""That a call may take, its imports included; operations have shorter limits of their own."""

_numbers = itertools.count(1)


class RealClientError(JsonProcessError):
    """What the client raised, as text."""


class RealClient(JsonProcess):
    """A process with LMCache's client in it.

    Args:
        log: file that takes what it prints.
        release: one of the older releases; None for 0.5.6.
    """

    error = RealClientError

    def __init__(self, log: Path, *, release: str | None = None) -> None:
        super().__init__(PYTHON, SCRIPT, log, peer_environment(release), seconds=SECONDS)


class V1User:
    """An engine that uses a server through the real client: one model, one registered worker for each rank.

    Args:
        client: the process.
        address: of a server, LMCache's or ours.
        model: that no other user has, unless they mean to share; a fresh one by default.
        chunk_size: the server's.
        world: ranks.
        dtype: of the KV.
        timeout: seconds that an answer may take.
    """

    def __init__(
        self,
        client: RealClient,
        address: str,
        *,
        model: str | None = None,
        chunk_size: int = 16,
        world: int = 1,
        dtype: str = "float16",
        mla: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.client = client
        self.chunk_size = chunk_size
        self.model = model or f"org/m{next(_numbers)}"
        self.world = world
        self.number: int = client.call("connect", url=address, timeout=timeout)
        self.instances = [1_000_000 + next(_numbers) for _ in range(world)]
        self.registered = [
            client.call(
                "register",
                client=self.number,
                instance_id=instance,
                model_name=self.model,
                world_size=world,
                block_size=chunk_size,
                num_layers=1,
                hidden_dim_size=8,
                dtype_str=dtype,
                use_mla=mla,
                num_physical_slots=chunk_size,
            )
            for instance in self.instances
        ]

    def rpc(self, operation: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Any operation whose arguments are plain values."""
        return self.client.call(
            "rpc", client=self.number, operation=operation, arguments=list(arguments), timeout=timeout
        )

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
        configs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The fields of a key over a range of whole chunks of a prompt."""
        return {
            "model_name": self.model,
            "world_size": self.world,
            "worker_id": rank,
            "token_ids": list(tokens),
            "start": start,
            "end": len(tokens) // self.chunk_size * self.chunk_size if stop is None else stop,
            "request_id": request_id or self.new_request_id(),
            "cache_salt": salt,
            "request_configs": configs,
            "num_kv_readers": readers,
        }

    def new_request_id(self) -> str:
        """One that nobody had."""
        return f"r{next(_numbers)}"

    def store(self, tokens: Sequence[int], fill: float, **key: Any) -> bool:
        """Store a whole prompt: chunk i is filled with ``fill + i`` on every rank; whether all ranks were told yes."""
        return self.store_fills(tokens, [fill + place for place in range(len(tokens) // self.chunk_size)], **key)

    def store_fills(self, tokens: Sequence[int], fills: Sequence[float], **key: Any) -> bool:
        """Store a range of a prompt, the whole unless told otherwise: a value for each chunk of it."""
        request_id = key.pop("request_id", None) or self.new_request_id()
        stored = [
            self.client.call(
                "store",
                client=self.number,
                key=self.key(tokens, request_id=request_id, rank=rank, **key),
                instance=self.instances[rank],
                fills=list(fills),
            )
            for rank in range(self.world)
        ]
        self.end(request_id)
        return all(stored)

    def lookup(self, tokens: Sequence[int], *, how: str = "wait", end: bool = True, **key: Any) -> int:
        """How many leading chunks the server says it has; the session is ended unless told otherwise."""
        fields = self.key(tokens, rank=None, **key)
        hit: int = self.client.call("lookup", client=self.number, key=fields, how=how)
        if end:
            if hit:
                self.client.call("free", client=self.number, key={**fields, "end": hit * self.chunk_size})
            self.end(fields["request_id"])
        return hit

    def retrieve(self, tokens: Sequence[int], *, rank: int = 0, **key: Any) -> list[float] | None:
        """Look up and retrieve what was hit; the fill of each chunk, None for a miss."""
        request_id = key.pop("request_id", None) or self.new_request_id()
        hit = self.lookup(tokens, end=False, request_id=request_id, **key)
        found: list[float] | None = None
        if hit:
            stop = hit * self.chunk_size
            found = self.retrieve_range(tokens, rank=rank, request_id=request_id, stop=stop, **key)
        self.end(request_id)
        return found

    def retrieve_range(self, tokens: Sequence[int], *, rank: int = 0, **key: Any) -> list[float] | None:
        """Retrieve without a lookup before."""
        found: list[float] | None = self.client.call(
            "retrieve",
            client=self.number,
            key=self.key(tokens, rank=rank, **key),
            instance=self.instances[rank],
        )
        return found

    def end(self, request_id: str) -> None:
        """End a session."""
        self.rpc("end_session", request_id)
