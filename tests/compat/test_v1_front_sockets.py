"""The v1 front behind a real socket: messages larger than any of wire protocol 2, and clients that do not read."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from compat.v1.front import V1Front
from compat.v1.operations import V1Key, V1Operation, V1Registration
from compat.v1.pickled_tensors import PickledTensor, write_tensors
from compat.v1.wire import MAX_DATA_BYTES, decode_answer, encode_request
from protocol_v2.cache import ChunkCache
from protocol_v2.client import CacheClient
from protocol_v2.hello import Limits
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import FRAME_SLACK, CacheService

pytestmark = pytest.mark.zmq

SECONDS = 30
TAKEN = "v1.requests.prepare_retrieve"
HIDDEN = 1 << 18
CHUNK_BYTES = 2 * 4 * HIDDEN * 2
"""4 MiB: more than the server takes of a v2 client in one frame."""


class Socket:
    """One socket of a v1 client, with a worker that is registered."""

    def __init__(self, dealer: "zmq.Socket[bytes]") -> None:
        self.dealer = dealer
        self.uid = 0
        self.ask(
            V1Operation.REGISTER_ENGINE_DRIVEN,
            V1Registration(
                instance_id=1,
                model_name="m",
                world_size=1,
                block_size=4,
                num_layers=1,
                hidden_dim_size=HIDDEN,
                dtype_str="float16",
                use_mla=False,
                num_physical_slots=4,
            ),
        )

    def send(self, operation: V1Operation, *payloads: object) -> None:
        """Ask, and do not wait."""
        self.uid += 1
        self.dealer.send_multipart(list(map(bytes, encode_request(self.uid, operation, *payloads))))

    def receive(self, operation: V1Operation) -> Any:
        """The next answer's value."""
        return decode_answer(self.dealer.recv_multipart(), operation)[1]

    def ask(self, operation: V1Operation, *payloads: object) -> Any:
        """Ask and wait."""
        self.send(operation, *payloads)
        return self.receive(operation)


def key(rank: int | None) -> V1Key:
    """One chunk; 0 readers: what it hit stays leased, so that it can be retrieved again and again."""
    return V1Key("m", 1, rank, (1, 2, 3, 4), 0, 4, "r", num_kv_readers=0)


@contextmanager
def serving(folder: Path, **front: int) -> Iterator[tuple[CacheServer, Socket]]:
    """A server whose v2 clients send at most 64 KiB in a message, and a v1 client of it that stored one chunk."""
    cache = ChunkCache(1 << 26)
    terms = ServerTerms(boot_id=os.urandom(16), limits=Limits(max_payload_bytes=1 << 16))
    service = CacheService(cache, terms, started=time.monotonic(), front=V1Front(cache, chunk_size=4, **front))
    with (
        CacheServer(f"ipc://{folder}/s", service) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.rcvhwm = 1
        dealer.rcvtimeo = SECONDS * 1000
        dealer.connect(server.address)
        client = Socket(dealer)
        data = write_tensors([PickledTensor("float16", (2, 1, 4, HIDDEN), bytes(CHUNK_BYTES))])
        assert client.ask(V1Operation.COMMIT_STORE, key(0), 1, data) is True
        yield server, client


def test_a_store_larger_than_any_v2_message_is_answered(tmp_path: Path) -> None:
    """All chunks of a v1 store are one frame; a connection that ended over it would leave its client waiting."""
    assert 2 * FRAME_SLACK < CHUNK_BYTES
    with serving(tmp_path) as (server, client):
        assert client.ask(V1Operation.LOOKUP, key(None), 1) is None
        assert client.ask(V1Operation.QUERY_PREFETCH_STATUS, "r") == 1
        assert server._service.max_frame_bytes == MAX_DATA_BYTES + FRAME_SLACK


def test_what_a_client_asks_for_and_never_reads_is_bounded(tmp_path: Path) -> None:
    """It gets failures while its answers wait, every request one answer, and chunks again once it has read them."""
    asked, bound = 24, 3 * CHUNK_BYTES
    with serving(tmp_path, max_unread=bound) as (server, client), CacheClient(server.address) as watcher:
        assert client.ask(V1Operation.LOOKUP, key(None), 1) is None
        most = 0
        for number in range(1, asked + 1):  # each in a turn of its own: what is asked for in one is admitted together
            client.send(V1Operation.PREPARE_RETRIEVE, key(0), 1)
            facts = facts_when(watcher, {TAKEN: number, "v1.jobs": 0})
            most = max(most, facts["server.unread_bytes"])
        answers = [client.receive(V1Operation.PREPARE_RETRIEVE) for _ in range(asked)]
        served = sum(one.success for one in answers)
        assert [0 < len(one.data) for one in answers] == [one.success for one in answers]
        facts = facts_when(watcher, {"server.unread_bytes": 0})
        assert asked - served == facts["v1.refused.unread"]
        assert bound < most < bound + 2 * CHUNK_BYTES
        assert 4 <= served < asked
        assert client.ask(V1Operation.PREPARE_RETRIEVE, key(0), 1).success


def facts_when(watcher: CacheClient, wanted: dict[str, int]) -> dict[str, Any]:
    """The server's facts, as soon as some of them are these."""
    ends = time.monotonic() + SECONDS
    while not wanted.items() <= (facts := watcher.status()).items():
        assert time.monotonic() < ends, facts
    return facts
