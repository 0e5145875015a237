"""The server on real sockets: addresses, ownership, garbage, slow peers, a clean stop."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from keying import KeySpace, chunk_keys
from protocol_v2.cache import ChunkCache
from protocol_v2.client import CacheClient
from protocol_v2.client_connection import ClientConnection
from protocol_v2.codes import ErrorCode
from protocol_v2.errors import LocalProtocolError, ServerError
from protocol_v2.events import Event, RequestFailed, SayHello, SendRequest
from protocol_v2.frames import MAX_HEADER_BYTES
from protocol_v2.hello import Limits
from protocol_v2.identity import keys_of_digests
from protocol_v2.messages import LookupRequest, PingRequest, Request, RetrieveRequest, StatusRequest, StoreRequest
from protocol_v2.negotiation import ClientTerms, ServerTerms
from protocol_v2.server import AddressInUseError, CacheServer, checked_addresses
from protocol_v2.service import CacheService
from protocol_v2.tensors import TensorMeta
from protocol_v2.tiers import DiskTier
from protocol_v2.work import blocking

pytestmark = pytest.mark.zmq
DEADLINE = 10_000


def service(**limits: int) -> CacheService:
    """A service over memory."""
    terms = ServerTerms(boot_id=os.urandom(16), limits=Limits(**limits))
    return CacheService(ChunkCache(1 << 20), terms, started=time.monotonic())


class Sockets:
    """Makes DEALER sockets and closes them."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.opened: list[zmq.Socket[Any]] = []

    def dealer(self, address: str, **options: int) -> "zmq.Socket[Any]":
        """A connected DEALER."""
        socket = self.context.socket(zmq.DEALER)
        self.opened.append(socket)
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(address)
        return socket


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Sockets that are gone at the end."""
    sockets = Sockets()
    yield sockets
    for socket in sockets.opened:
        socket.close()
    sockets.context.term()


@pytest.fixture(params=["ipc", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CacheServer]:
    """A running server."""
    listen = f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"
    with CacheServer(listen, service()) as running:
        yield running


class Dealer:
    """A bare DEALER with a client connection behind it."""

    def __init__(self, sockets: Sockets, address: str, space: KeySpace | None = None, **options: int) -> None:
        self.socket = sockets.dealer(address, **options)
        self.connection = ClientConnection(ClientTerms(boot_id=os.urandom(16), space=space))
        self.exchange(SayHello(self.connection.new_request_id()))

    def receive(self) -> list[Event]:
        """The next message, as events."""
        assert self.socket.poll(DEADLINE), "no answer in time"
        return self.connection.receive_frames(self.socket.recv_multipart(), time.monotonic())

    def exchange(self, event: SayHello) -> list[Event]:
        """Send and wait for the answer."""
        self.socket.send_multipart(self.connection.send(event, time.monotonic()))
        return self.receive()

    def begin(self, message: Request, payload: tuple[bytes, ...] = ()) -> None:
        """Send a request."""
        event = SendRequest(self.connection.new_request_id(), message, payload, 60.0)
        self.socket.send_multipart(self.connection.send(event, time.monotonic()))

    def ask(self, message: Request, payload: tuple[bytes, ...] = ()) -> Any:
        """A request's reply."""
        self.begin(message, payload)
        (event,) = self.receive()
        return event.message  # type: ignore[union-attr]


def test_it_answers_on_both_transports(server: CacheServer, sockets: Sockets) -> None:
    """Hello and ping over ipc and tcp; the port is the one that the operating system gave."""
    assert not server.address.endswith(":0")
    assert Dealer(sockets, server.address).ask(PingRequest()).uptime_ms >= 0


def test_garbage_on_the_socket_harms_nobody(server: CacheServer, sockets: Sockets) -> None:
    """L11, M4, M9: after each kind of garbage the same loop still answers the others."""
    good = Dealer(sockets, server.address)
    bad = sockets.dealer(server.address)
    for frames in ([b""], [b"GET / HTTP/1.1"], [b"XK2\0", b"\x18", b"short"], [os.urandom(99)] * 9, [b"\x01", b"\x08"]):
        bad.send_multipart(frames)
        assert good.ask(PingRequest()).boot == server._service.boot_id


def test_bytes_that_are_not_zmq_are_closed_or_ignored(sockets: Sockets) -> None:
    """L11: an HTTP client on the port gets no session and does no harm."""
    import socket

    with CacheServer("tcp://127.0.0.1:0", service()) as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
            assert Dealer(sockets, server.address).ask(PingRequest())


def test_an_oversized_frame_closes_its_own_connection(tmp_path: Path, sockets: Sockets) -> None:
    """A frame above the limit is never read into memory; others are served."""
    with CacheServer(f"ipc://{tmp_path}/s", service(max_payload_bytes=1 << 16)) as server:
        good = Dealer(sockets, server.address)
        bad = sockets.dealer(server.address)
        bad.send_multipart([b"XK2\0", b"\x18", bytes(MAX_HEADER_BYTES + (2 << 20))])
        assert good.ask(PingRequest())


def test_a_peer_that_never_reads_does_not_block_the_others(tmp_path: Path, sockets: Sockets) -> None:
    """M1, M10: answers that nobody takes are dropped at the queue's end, and a ping is answered meanwhile."""
    with CacheServer(f"ipc://{tmp_path}/s", service()) as server:
        good = Dealer(sockets, server.address)
        deaf = sockets.dealer(server.address, rcvhwm=1)
        for number in range(5000):
            deaf.send_multipart([b"\xcd" + number.to_bytes(2, "big"), b"\x20"])
        for _ in range(20):
            assert good.ask(PingRequest())
        facts = server._service.facts
        assert facts["server.peers"] in {0, 1}


def test_an_answer_to_a_peer_that_is_gone_is_counted(tmp_path: Path, sockets: Sockets) -> None:
    """An answer that cannot be sent is told by a counter, not dropped in silence; others are served."""
    with CacheServer(f"ipc://{tmp_path}/s", service()) as server:
        good = Dealer(sockets, server.address)
        assert 0 == good.ask(StatusRequest()).status["service.unsent"]
        server._service._replies.queue(b"nobody", [b"answer"])
        good.ask(PingRequest())  # a turn of the loop, which sends what is queued
        assert 1 == good.ask(StatusRequest()).status["service.unsent"]


def test_what_a_peer_asks_for_and_never_reads_is_bounded(tmp_path: Path, sockets: Sockets) -> None:
    """R: a peer that leaves answers unread is told BUSY; it is served again once it has read them."""
    space = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
    keys = keys_of_digests(chunk_keys(space, range(4)))
    size = 512 << 10
    with CacheServer(f"ipc://{tmp_path}/s", service(max_payload_bytes=size)) as server:
        good = Dealer(sockets, server.address)
        deaf = Dealer(sockets, server.address, space, rcvhwm=1)
        tensors = ((TensorMeta("uint8", (size,)),),)
        stored = deaf.ask(
            StoreRequest(session="s", keys=keys, starts=(0,), n_tokens=(4,), tensors=tensors), (bytes(size),)
        )
        assert 1 == stored.stored
        retrieve = RetrieveRequest(lease=deaf.ask(LookupRequest(session="s", keys=keys)).lease, count=1)
        asked, most = 64, 0
        for _ in range(asked):  # each in a turn of its own: what is asked for in one turn is admitted together
            before = good.ask(StatusRequest()).status["service.requests"]
            deaf.begin(retrieve)
            while (facts := good.ask(StatusRequest()).status)["service.requests"] - before < 2:
                before += 1
            most = max(most, facts["server.unread_bytes"])
        assert 2 * size < most < 3 * size + (64 << 10)
        ended = [event for _ in range(asked) for event in deaf.receive()]
        busy = [event.error for event in ended if isinstance(event, RequestFailed)]
        assert 0 < len(busy) <= asked - 3
        assert {ErrorCode.BUSY} == {error.error_code for error in busy if isinstance(error, ServerError)}
        assert 1 == deaf.ask(retrieve).count
        ends = time.monotonic() + DEADLINE / 1000
        while good.ask(StatusRequest()).status["server.unread_bytes"]:  # libzmq lets go a moment after it was read
            assert time.monotonic() < ends


def test_an_address_belongs_to_one_live_server(tmp_path: Path, sockets: Sockets) -> None:
    """A second server on a live address is an error; after a stop it is free, and no socket file stays."""
    address = f"ipc://{tmp_path}/s"
    with CacheServer(address, service()) as server:
        with pytest.raises(AddressInUseError, match="another server listens there"):
            CacheServer(address, service()).start()
        assert Dealer(sockets, server.address).ask(PingRequest())
    assert not (tmp_path / "s").exists()
    with CacheServer([address, "tcp://127.0.0.1:0"], service()) as server:
        assert 2 == len(server.addresses)
        with pytest.raises(AddressInUseError):
            CacheServer(server.addresses[1], service()).start()
        for one in server.addresses:
            assert Dealer(sockets, one).ask(PingRequest())


def test_addresses_are_checked_early() -> None:
    """L3: a text is one address, not its letters; anything else is refused with the forms that are known."""
    assert ("tcp://127.0.0.1:1",) == checked_addresses("tcp://127.0.0.1:1") == checked_addresses(["tcp://127.0.0.1:1"])
    for wrong in ([], "", "tcp://", "127.0.0.1:5", ["ipc://a", 5], ["udp://x"]):
        with pytest.raises(LocalProtocolError, match="listen"):
            checked_addresses(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        checked_addresses(5)  # type: ignore[arg-type]


def test_stop_is_clean_and_idempotent(tmp_path: Path, sockets: Sockets) -> None:
    """Stop ends the loop and the threads, once and again, started or not."""
    before = {thread.name for thread in threading.enumerate()}
    server = CacheServer(f"ipc://{tmp_path}/s", service()).start()
    dealer = Dealer(sockets, server.address)
    assert dealer.ask(PingRequest())
    server.stop()
    server.stop()
    assert server.join(0)
    assert before >= {thread.name for thread in threading.enumerate()}
    CacheServer(f"ipc://{tmp_path}/t", service()).stop()
    with pytest.raises(LocalProtocolError, match="started twice"):
        server.start()


def test_a_loop_that_dies_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A8, M9: a dead loop is no healthy server: `join` sees it, and `stop` raises what it died of."""
    server = CacheServer(f"ipc://{tmp_path}/s", service())

    def broken(_: float) -> None:
        raise RuntimeError("tick")

    monkeypatch.setattr(server._service, "tick", broken)
    server.start()
    assert server.join(DEADLINE / 1000)
    with pytest.raises(RuntimeError, match="loop failed"):
        server.stop()


def test_a_stop_answers_what_is_pending(tmp_path: Path) -> None:
    """A request that waits for a worker fails with SHUTTING_DOWN at the stop, long before its own deadline."""
    held, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        held.wait()

    cache = ChunkCache(1 << 20, DiskTier(tmp_path / "store", budget=1 << 24))
    cache.load()
    service = CacheService(cache, ServerTerms(boot_id=os.urandom(16)), started=time.monotonic())
    service._jobs.background(blocking(hold, lambda _ran, _now: None), 0.0)  # the only worker is busy
    space = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
    keys = chunk_keys(space, range(4))
    server = CacheServer(f"ipc://{tmp_path}/s", service, workers=1).start()
    try:
        assert begun.wait(DEADLINE / 1000)
        with CacheClient(server.address, space, timeout=120.0) as client, ThreadPoolExecutor(1) as caller:
            client.wait_ready()
            storing = caller.submit(client.store, "r", keys, [np.zeros(8, np.uint8)])
            while len(service._jobs) < 2:
                assert not storing.done()
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            failure = storing.result(DEADLINE / 1000).failure
            assert isinstance(failure, ServerError)
            assert ErrorCode.SHUTTING_DOWN == failure.error_code
            held.set()
            stopping.join(DEADLINE / 1000)
            assert not stopping.is_alive()
    finally:
        held.set()
        server.stop()


def test_a_peer_that_never_reads_does_not_hold_up_a_stop(tmp_path: Path, sockets: Sockets) -> None:
    """Answers that nobody takes are dropped in the end: the stop is over in a few seconds."""
    server = CacheServer(f"ipc://{tmp_path}/s", service()).start()
    deaf = sockets.dealer(server.address, rcvhwm=1)
    for number in range(5000):
        deaf.send_multipart([b"\xcd" + number.to_bytes(2, "big"), b"\x20"])
    assert Dealer(sockets, server.address).ask(PingRequest())
    begin = time.monotonic()
    server.stop()
    assert time.monotonic() - begin < DEADLINE / 1000
    assert server.join(0)
