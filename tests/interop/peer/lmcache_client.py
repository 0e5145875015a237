"""The released LMCache's own client, driven by JSON lines: runs in LMCache's environment, never in this project's.

    in    {"call": "store", "client": 0, "key": {...}, "instance": 7, "fills": [1.0, 2.0]}
    out   {"result": true}    or    {"error": "TimeoutError: ..."}

Everything goes through what LMCache's own engine adapters use: `RequestClientFactory` from 0.5.5 on, and before that
the message queue client. Fields that an older release does not know are left out.
"""

import dataclasses
import inspect
import json
import logging
import pickle
import sys
import threading
from types import SimpleNamespace
from typing import Any

logging.disable(logging.CRITICAL)

import msgspec  # noqa: E402  (LMCache configures logging when it is imported)
import torch  # noqa: E402
from lmcache.v1.multiprocess.custom_types import (  # noqa: E402
    BlockAllocationRecord,
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)

try:
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    make_client = RequestClientFactory.create
except ImportError:
    import zmq
    from lmcache.v1.multiprocess.mq import MessageQueueClient
    from lmcache.v1.multiprocess.protocol import RequestType, get_response_class

    class OlderClient:
        """The message queue client with operations as methods."""

        def __init__(self, url: str) -> None:
            self._queue = MessageQueueClient(url, zmq.Context.instance())

        def __getattr__(self, operation: str) -> Any:
            kind = RequestType[operation.upper()]
            return lambda *payloads: self._queue.submit_request(kind, list(payloads), get_response_class(kind))

    make_client = OlderClient

KEY_FIELDS = {field.name for field in dataclasses.fields(IPCCacheServerKey)}
REGISTRATION_FIELDS = set(inspect.signature(RegisterEngineDrivenContextPayload).parameters)

AT_A_TIME = 256
"""Calls that are under way together where there are many."""

TIMEOUT = 10.0
"""Seconds that an answer may take; LMCache's own default is 300."""


class Peer:
    """All clients of one process, by number."""

    def __init__(self) -> None:
        self.clients: list[Any] = []
        self.timeouts: list[float] = []
        self.layouts: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
        self.payloads: dict[int, Any] = {}
        self.heartbeats: dict[int, Any] = {}

    def connect(self, url: str, timeout: float = TIMEOUT) -> int:
        """A client of a server, whose answers may take so long; its number."""
        self.clients.append(make_client(url))
        self.timeouts.append(timeout)
        return len(self.clients) - 1

    def rpc(self, client: int, operation: str, arguments: list[Any], timeout: float | None = None) -> Any:
        """Any operation of the contract whose arguments are plain values."""
        future = getattr(self.clients[client], operation)(*arguments)
        return future.result(timeout=self.timeouts[client] if timeout is None else timeout)

    def keyed(self, client: int, operation: str, key: dict[str, Any], arguments: list[Any]) -> Any:
        """Any operation that begins with a key; None among the arguments stands for an empty event handle."""
        plain = [b"" if one is None else one for one in arguments]
        return self.rpc(client, operation, [_key(key), *plain])

    def register(self, client: int, **fields: Any) -> Any:
        """Register an engine-driven context; the chunk's shape follows as LMCache makes it."""
        known = {name: value for name, value in fields.items() if name in REGISTRATION_FIELDS}
        payload = RegisterEngineDrivenContextPayload(**known)
        planes = () if payload.use_mla else (2,)
        shape = (*planes, payload.num_layers, fields["num_physical_slots"], payload.hidden_dim_size)
        self.layouts[payload.instance_id] = (shape, getattr(torch, payload.dtype_str))
        self.payloads[payload.instance_id] = payload
        return self.rpc(client, "register_kv_cache_engine_driven_context", [payload])

    def heartbeat(self, client: int, instance: int, interval: float) -> None:
        """LMCache's own heartbeat of a worker, which registers it anew when it takes the server to have been away."""
        from lmcache.integration.vllm.vllm_multi_process_adapter import HeartbeatThread

        def register() -> bool:
            self.rpc(client, "register_kv_cache_engine_driven_context", [self.payloads[instance]])
            return True

        healthy = threading.Event()
        healthy.set()
        beat = self.heartbeats[instance] = HeartbeatThread(self.clients[client], healthy, interval, instance)
        beat.register_recover_callback(register)
        beat.start()

    def end_heartbeat(self, instance: int) -> None:
        """No more pings of a worker."""
        self.heartbeats.pop(instance).stop()

    def lookup(self, client: int, key: dict[str, Any], how: str = "wait") -> Any:
        """Lookup, then its result by whichever of the two operations."""
        self.rpc(client, "lookup", [_key(key), 1])
        if how == "wait":
            return self.rpc(client, "wait_prefetch_status", [key["request_id"], 5.0])
        return self.rpc(client, "query_prefetch_status", [key["request_id"]])

    def free(self, client: int, key: dict[str, Any]) -> None:
        """Give back what a lookup locked, in the key's range."""
        self.rpc(client, "free_lookup_locks", [_key(key), 1])

    def store(self, client: int, key: dict[str, Any], instance: int, fills: list[float]) -> Any:
        """Store one tensor a chunk, each filled with one value."""
        shape, dtype = self.layouts[instance]
        self.rpc(client, "prepare_store", [_key(key), instance])
        chunks = [torch.full(shape, fill).to(dtype) for fill in fills]
        return self.rpc(client, "commit_store", [_key(key), instance, pickle.dumps(chunks)])

    def commit_raw(self, client: int, key: dict[str, Any], instance: int, data: str) -> Any:
        """Commit a store of any bytes, given in hex."""
        return self.rpc(client, "commit_store", [_key(key), instance, bytes.fromhex(data)])

    def retrieve(self, client: int, key: dict[str, Any], instance: int) -> list[float] | None:
        """The value that fills each chunk; None where the server says that it has them not."""
        shape, dtype = self.layouts[instance]
        answer = self.rpc(client, "prepare_retrieve", [_key(key), instance])
        self.rpc(client, "commit_retrieve", [_key(key), instance])
        if not answer.success or not answer.data:
            return None
        chunks = pickle.loads(answer.data)
        for chunk in chunks:
            if (tuple(chunk.shape), chunk.dtype) != (shape, dtype) or not bool((chunk == chunk.flatten()[0]).all()):
                raise ValueError(f"a chunk of {chunk.dtype} {tuple(chunk.shape)} is not what any store sent")
        return [chunk.flatten()[0].float().item() for chunk in chunks]

    # ---- many at a time: each operation is sent for all before the first answer is waited for

    def register_all(self, client: int, registrations: list[dict[str, Any]]) -> None:
        """Register many workers."""
        made = []
        for fields in registrations:
            payload = RegisterEngineDrivenContextPayload(**_known(fields, REGISTRATION_FIELDS))
            shape = (payload.num_layers, fields["num_physical_slots"], payload.hidden_dim_size)
            self.layouts[payload.instance_id] = (shape, getattr(torch, payload.dtype_str))
            made.append([payload])
        self._all(client, "register_kv_cache_engine_driven_context", made)

    def store_all(self, client: int, stores: list[list[Any]]) -> list[bool]:
        """Store for many keys; each with its instance and the value that fills each chunk. Sessions stay."""
        named = [(_key(key), instance, fills) for key, instance, fills in stores]
        self._all(client, "prepare_store", [[key, instance] for key, instance, _ in named])
        filled = []
        for key, instance, fills in named:
            shape, dtype = self.layouts[instance]
            chunks = [torch.full(shape, fill).to(dtype) for fill in fills]
            filled.append([key, instance, pickle.dumps(chunks)])
        stored: list[bool] = self._all(client, "commit_store", filled)
        return stored

    def fetch_all(self, client: int, fetches: list[list[Any]], chunk_size: int) -> list[list[float]]:
        """Look up many keys, retrieve what is hit, and end the sessions; the values that fill the chunks."""
        self._all(client, "lookup", [[_key(key), 1] for key, _ in fetches])
        names = [[key["request_id"]] for key, _ in fetches]
        hits = self._all(client, "wait_prefetch_status", [[*name, 5.0] for name in names])
        found = [
            [_key({**key, "worker_id": 0, "end": hit * chunk_size}), instance]
            for (key, instance), hit in zip(fetches, hits, strict=True)
            if hit
        ]
        answers = iter(self._all(client, "prepare_retrieve", found))
        self._all(client, "commit_retrieve", found)
        self._all(client, "end_session", names)
        return [_filled(next(answers).data) if hit else [] for hit in hits]

    def end_all(self, client: int, request_ids: list[str]) -> None:
        """End many sessions."""
        self._all(client, "end_session", [[one] for one in request_ids])

    def sha31_tokens(self, tokens: list[int], items: list[list[Any]]) -> list[int]:
        """The token ids that LMCache itself makes of a prompt, whose items are identifier, offset and length."""
        from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids

        ids = torch.tensor(tokens)
        spans = [SimpleNamespace(offset=offset, length=length) for _, offset, length in items]
        apply_mm_hashes_to_token_ids(ids, [identifier for identifier, *_ in items], spans)
        made: list[int] = ids.tolist()
        return made

    def _all(self, client: int, operation: str, calls: list[list[Any]]) -> list[Any]:
        results = []
        for begin in range(0, len(calls), AT_A_TIME):
            futures = [getattr(self.clients[client], operation)(*call) for call in calls[begin : begin + AT_A_TIME]]
            results += [future.result(timeout=self.timeouts[client]) for future in futures]
        return results

    def report_blocks(self, client: int, instance: int, model: str, tokens: list[int]) -> None:
        """What vLLM's scheduler reports after each step."""
        records = [BlockAllocationRecord(req_id="r", new_block_ids=[1, 2], new_token_ids=tokens)]
        self.rpc(client, "report_block_allocation", [instance, model, records])

    def encode_key(self, key: dict[str, Any]) -> str:
        """A key's wire form, in hex."""
        return msgspec.msgpack.encode(_key(key)).hex()


def _key(fields: dict[str, Any]) -> Any:
    return IPCCacheServerKey(**{**_known(fields, KEY_FIELDS), "token_ids": tuple(fields["token_ids"])})


def _known(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in names}


def _filled(data: bytes) -> list[float]:
    """The value that fills each chunk of an answer."""
    values = []
    for chunk in pickle.loads(data):
        if not bool((chunk == chunk.flatten()[0]).all()):
            raise ValueError("a chunk is not one value throughout")
        values.append(chunk.flatten()[0].double().item())
    return values


def main() -> None:
    """Answer each line of standard input with a line on what was standard output."""
    peer = Peer()
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever the library prints must not come between the answers
    print(json.dumps({"result": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = getattr(peer, request.pop("call"))(**request)
            answer = {"result": msgspec.to_builtins(result)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
