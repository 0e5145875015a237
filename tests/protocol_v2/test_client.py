"""The synchronous client on real sockets, against the real server and against servers that misbehave."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from keying import CacheSalt, ChunkKey, KeySpace, chunk_keys
from protocol_v2 import Limits, ServerConnection, ServerTerms, answer_hello
from protocol_v2.cache import ChunkCache
from protocol_v2.capability import answer_probe, is_probe
from protocol_v2.client import CacheClient
from protocol_v2.codes import ErrorCode, MissReason
from protocol_v2.errors import (
    ClientClosedError,
    LocalProtocolError,
    LocalTypeError,
    NegotiationRefusedError,
    ProtocolError,
    QueueFullError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerError,
    ServerUnavailableError,
    SpaceMismatchError,
    TensorError,
    UnsupportedServerError,
)
from protocol_v2.events import AnswerHello, HelloReceived
from protocol_v2.identity import keys_of_tokens
from protocol_v2.keeper_actions import Phase
from protocol_v2.negotiation import Offer
from protocol_v2.probing import probe
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService
from protocol_v2.session_keeper import Patience
from protocol_v2.wire_keys import Shard

if TYPE_CHECKING:
    from protocol_v2.frames import Frame

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.zmq

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
TOKENS = list(range(18))
KEYS = chunk_keys(SPACE, TOKENS, [CacheSalt("tenant")])
# with a live server nothing is waited for that long; without one, or with one that hangs, tests want to be quick
STEADY = Patience(connect=20.0, answer=20.0, ping=10.0, first_delay=0.02, longest_delay=0.2, refused_delay=0.3)
QUICK = Patience(connect=1.0, answer=1.0, ping=0.3, first_delay=0.02, longest_delay=0.2, refused_delay=0.3)


def make_server(listen: str, *, expected: tuple[KeySpace, ...] = (), **limits: int) -> CacheServer:
    """A server over memory."""
    terms = ServerTerms(os.urandom(16), limits=Limits(**limits), expected_spaces=expected, software="test")
    return CacheServer(listen, CacheService(ChunkCache(1 << 26), terms, started=time.monotonic()))


def tensors(count: int, size: int = 6) -> list[Any]:
    """One tensor for each chunk, all different."""
    return [torch.arange(size, dtype=torch.float32) + 100 * i for i in range(count)]


@contextlib.contextmanager
def router(address: str) -> Iterator["zmq.Socket[bytes]"]:
    """A bare ROUTER that the test answers by hand."""
    context = zmq.Context()
    made = context.socket(zmq.ROUTER)
    made.linger = 0
    made.bind(address)
    try:
        yield made
    finally:
        made.close(linger=0)
        context.term()


@pytest.fixture(params=["ipc", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CacheServer]:
    """A running server."""
    with make_server(f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0") as running:
        yield running


@pytest.fixture
def client(server: CacheServer) -> Iterator[CacheClient]:
    """A client of it."""
    with CacheClient(server.address, SPACE, patience=STEADY, timeout=20.0) as made:
        yield made


def wait_until(holds: Any, seconds: float = 5.0) -> None:
    """Wait for something that a thread will do."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "did not happen in time"
        time.sleep(0.005)


# ---- the main job


def test_what_is_stored_is_hit_and_comes_back_exactly(client: CacheClient) -> None:
    """Miss, store, hit, retrieve, release, end: values, places and counts are right; a second store adds nothing."""
    miss = client.lookup("r", KEYS)
    assert (0, None, MissReason.ABSENT, None) == (miss.hit_chunks, miss.lease, miss.miss, miss.failure)
    stored = client.store("r", KEYS, tensors(4))
    assert (4, 0, 0, None) == (stored.stored, stored.present, stored.declined, stored.failure)
    again = client.store("r", KEYS, tensors(4))
    assert (0, 4) == (again.stored, again.present)
    hit = client.lookup("r", KEYS)
    assert (4, None) == (hit.hit_chunks, hit.miss)
    assert hit.lease is not None
    got = client.retrieve(hit.lease, 4)
    assert [(4 * i, 4) for i in range(4)] == [(one.start, one.n_tokens) for one in got.chunks]
    assert all(torch.equal(one.tensors[0], want) for one, want in zip(got.chunks, tensors(4), strict=True))
    part = client.retrieve(hit.lease, 2, first=1)
    assert [4, 8] == [one.start for one in part.chunks]
    assert (2, 2, 0) == (
        client.release(hit.lease, first=2).released,
        client.release(hit.lease).released,
        client.release(hit.lease).released,
    )
    assert (True, False) == (client.end_session("r").known, client.end_session("r").known)


def test_a_salt_and_the_lack_of_one_are_kept_apart(client: CacheClient) -> None:
    """F1, F11: paired: the same salt hits, another salt and none miss, on what one store put there."""
    client.store("r", KEYS, tensors(4))
    same = chunk_keys(SPACE, TOKENS, [CacheSalt("tenant")])
    other = chunk_keys(SPACE, TOKENS, [CacheSalt("other")])
    plain = chunk_keys(SPACE, TOKENS)
    hits = [client.lookup(f"s{i}", keys).hit_chunks for i, keys in enumerate((same, other, plain))]
    assert [4, 0, 0] == hits


def test_digests_and_tokens_get_the_same_answer(client: CacheClient) -> None:
    """A caller that does not derive keys gets what one that does gets."""
    by_tokens = keys_of_tokens(TOKENS, [CacheSalt("tenant")])
    client.store("r", by_tokens, tensors(3))
    assert 3 == client.lookup("a", KEYS).hit_chunks
    assert 3 == client.lookup("b", by_tokens).hit_chunks
    assert 3 == client.lookup("c", [key.digest for key in KEYS]).hit_chunks
    assert 0 == client.lookup("d", keys_of_tokens(TOKENS, [CacheSalt("other")])).hit_chunks


def test_every_shard_counts(client: CacheClient) -> None:
    """H10: the hit is the minimum over the ranks of the world, and each rank gets its own tensors."""
    for rank, count in ((0, 3), (1, 2)):
        client.store("r", KEYS, tensors(count, size=6 + rank), shard=Shard(world=2, rank=rank))
    hit = client.lookup("r", KEYS, world=2)
    assert 2 == hit.hit_chunks
    assert hit.lease is not None
    for rank in (0, 1):
        got = client.retrieve(hit.lease, 2, shard=Shard(world=2, rank=rank))
        assert [6 + rank] * 2 == [one.tensors[0].numel() for one in got.chunks]


def test_several_tensors_and_a_partial_tail(client: CacheClient) -> None:
    """A chunk's value may be many tensors, of different shapes for different chunks; the tail's place is its own."""
    keys = chunk_keys(SPACE, TOKENS, partial_tail=True)
    value = [[torch.ones(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int8)]] * 4 + [[torch.ones(1)]]
    assert 5 == client.store("r", keys, value).stored
    hit = client.lookup("r", keys)
    assert 5 == hit.hit_chunks
    assert hit.lease is not None
    got = client.retrieve(hit.lease, 5).chunks
    assert (16, 2) == (got[-1].start, got[-1].n_tokens)
    assert [2, 2, 2, 2, 1] == [len(one.tensors) for one in got]
    assert torch.bfloat16 is got[0].tensors[0].dtype


def test_a_received_tensor_is_the_callers_own(client: CacheClient) -> None:
    """R3: writing to what was retrieved does not change what the cache holds."""
    client.store("r", KEYS, tensors(1))
    hit = client.lookup("r", KEYS)
    assert hit.lease is not None
    client.retrieve(hit.lease, 1).chunks[0].tensors[0].fill_(-1)
    assert torch.equal(tensors(1)[0], client.retrieve(hit.lease, 1).chunks[0].tensors[0])


def test_large_stores_and_retrieves_go_in_parts(tmp_path: Path) -> None:
    """Calls beyond the server's limits are split and put together again."""
    with (
        make_server(f"ipc://{tmp_path}/s", max_payload_bytes=10_000) as server,
        CacheClient(server.address, SPACE, patience=STEADY) as client,
    ):
        assert 4 == client.store("r", KEYS, tensors(4, size=1000)).stored
        hit = client.lookup("r", KEYS)
        assert hit.lease is not None
        before = client.status()
        got = client.retrieve(hit.lease, 4)
        after = client.status()
        assert all(torch.equal(a.tensors[0], b) for a, b in zip(got.chunks, tensors(4, size=1000), strict=True))
        assert (2 + 1, 0) == tuple(after[f"service.{n}"] - before[f"service.{n}"] for n in ("requests", "failed"))  # type: ignore[operator]
        with pytest.raises(LocalProtocolError, match="payload"):
            client.store("r", KEYS, tensors(1, size=5000))


def test_prefetch_ping_status_and_clear(client: CacheClient, server: CacheServer) -> None:
    """The rest of the messages, as a caller sees them."""
    client.store("r", KEYS, tensors(2))
    assert 2 == client.prefetch("r", KEYS).resident
    established = client.established
    assert established is not None
    assert established.server_boot_id == client.ping().boot
    assert client.status()
    client.end_session("r")
    assert 2 == client.clear("space").objects
    assert 0 == client.lookup("q", KEYS).hit_chunks
    with pytest.raises(LocalProtocolError):
        client.clear("everything")


def test_a_session_id_has_one_identity(client: CacheClient) -> None:
    """F7: lookup with salt a, then store with salt b under the same session: a typed error, and nothing is stored."""
    client.lookup("r", KEYS)
    other = chunk_keys(SPACE, TOKENS, [CacheSalt("b")])
    with pytest.raises(ServerError) as caught:
        client.store("r", other, tensors(4))
    assert ErrorCode.IDENTITY_MISMATCH == caught.value.error_code
    assert 0 == client.lookup("other", other).hit_chunks
    assert 0 == client.lookup("r", KEYS).hit_chunks


def test_a_lease_that_is_not_known_is_a_miss_with_a_reason(client: CacheClient) -> None:
    """Expired, released or another's: no exception in a scheduler, and no value."""
    got = client.retrieve(bytes(16), 2)
    assert () == got.chunks
    assert isinstance(got.failure, ServerError)
    assert ErrorCode.LEASE_UNKNOWN == got.failure.error_code


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.lookup("", KEYS), LocalProtocolError),
        (lambda c: c.lookup("x" * 257, KEYS), LocalProtocolError),
        (lambda c: c.lookup("r", KEYS, world=0), LocalProtocolError),
        (lambda c: c.lookup("r", KEYS, world=1.5), TypeError),
        (lambda c: c.lookup("r", [b"short"]), LocalProtocolError),
        (lambda c: c.lookup("r", KEYS, timeout=0), LocalProtocolError),
        (lambda c: c.lookup("r", KEYS, timeout=float("inf")), LocalProtocolError),
        (lambda c: c.lookup("r", KEYS, timeout=True), LocalProtocolError),
        (lambda c: c.retrieve(b"short", 1), LocalProtocolError),
        (lambda c: c.retrieve(bytes(16), 0), LocalProtocolError),
        (lambda c: c.store("r", KEYS, [object()]), TensorError),
        (lambda c: c.store("r", KEYS, [[]]), TensorError),
        (lambda c: c.store("r", KEYS, tensors(2), places=[(0, 4)]), LocalProtocolError),
        (lambda c: c.store("r", KEYS, tensors(1), places=[(-1, 4)]), LocalProtocolError),
        (lambda c: c.store("r", KEYS, tensors(5)), ServerError),
        (lambda c: c.store("r", KEYS, tensors(1), places=[(0, 5)]), ServerError),
        (lambda c: c.release(b""), LocalProtocolError),
        (lambda c: c.end_session("\ud800"), LocalProtocolError),
    ],
)
def test_bad_values_are_the_callers_and_cost_nothing(client: CacheClient, call: Any, error: type[Exception]) -> None:
    """M3: a value that cannot be is raised at the caller; nothing stays pending, and the next call is served."""
    with pytest.raises(error):
        call(client)
    assert 0 == client.pending
    assert client.lookup("ok", KEYS).failure is None


def test_numpy_integers_are_taken(client: CacheClient) -> None:
    """N1: numbers are normalised at the edge."""
    np = pytest.importorskip("numpy")
    client.store("r", KEYS, tensors(4), first=np.int64(0))
    hit = client.lookup("r", KEYS, world=np.uint32(1))
    assert hit.lease is not None
    assert 2 == len(client.retrieve(hit.lease, np.int32(2), first=np.int64(1)).chunks)


@pytest.mark.parametrize("address", ["", "ipc://", "tcp://", "http://x", "t", "inproc://x"])
def test_an_address_that_cannot_be_is_refused_early(address: str) -> None:
    """L3: with a clear message, before any thread is made."""
    with pytest.raises(LocalProtocolError, match="wanted ipc"):
        CacheClient(address, SPACE)


def test_an_address_in_a_list_is_that_address(server: CacheServer) -> None:
    """L3: a text and a list of one are the same; a number is a TypeError."""
    with CacheClient([server.address], SPACE, patience=STEADY) as client:
        assert client.lookup("r", KEYS).failure is None
    with pytest.raises(LocalTypeError):
        CacheClient(5, SPACE)  # type: ignore[arg-type]
    with pytest.raises(LocalTypeError):
        CacheClient(["tcp://a:1", "tcp://b:1"], SPACE)


# ---- many at once


def test_many_threads_share_a_client(client: CacheClient) -> None:
    """Calls run side by side; each gets its own answer."""

    def work(number: int) -> None:
        keys = chunk_keys(SPACE, range(number * 100, number * 100 + 16))
        assert 4 == client.store(f"w{number}", keys, tensors(4)).stored
        for _ in range(20):
            hit = client.lookup(f"w{number}", keys)
            assert 4 == hit.hit_chunks
            assert hit.lease is not None
            got = client.retrieve(hit.lease, 4)
            assert [0, 4, 8, 12] == [one.start for one in got.chunks]
            client.release(hit.lease)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert 0 == client.pending


def test_more_requests_than_the_server_takes_fail_at_once(tmp_path: Path) -> None:
    """Queue full fails that request only."""
    with router(f"ipc://{tmp_path}/s") as peer:
        thread = threading.Thread(target=_serve_handshake_only, args=(peer,), daemon=True)
        thread.start()
        with CacheClient(f"ipc://{tmp_path}/s", SPACE, patience=QUICK) as client:
            client.wait_ready()
            with ThreadPoolExecutor(12) as pool:
                results = list(pool.map(lambda i: client.lookup(f"r{i}", KEYS, timeout=0.5).failure, range(12)))
            kinds = [type(one) for one in results]
            assert kinds.count(QueueFullError) >= 4
            assert set(kinds) <= {QueueFullError, RequestTimeoutError, ServerUnavailableError}
            assert 0 == client.pending
        thread.join(5)


def _serve_handshake_only(peer: "zmq.Socket[bytes]", seconds: float = 1.5) -> None:
    """Answer the capability question and hellos, and nothing else."""
    terms = ServerTerms(bytes(16), limits=Limits(max_pending=8))
    ends = time.monotonic() + seconds
    connections: dict[bytes, ServerConnection] = {}
    while time.monotonic() < ends:
        if not peer.poll(20):
            continue
        identity, *parts = peer.recv_multipart()
        frames: list[Frame] = [*parts]
        if is_probe(frames):
            peer.send_multipart([identity, *answer_probe(frames)])
            continue
        connection = connections.setdefault(identity, ServerConnection(terms))
        with contextlib.suppress(RemoteProtocolError):  # more requests than it takes
            for event in connection.receive_frames(frames, time.monotonic()):
                if isinstance(event, HelloReceived):
                    answer = AnswerHello(event.request_id, answer_hello(event, terms))
                    peer.send_multipart([identity, *connection.send(answer, time.monotonic())])


def test_a_flood_in_both_directions_makes_progress(client: CacheClient) -> None:
    """M10: two sides that send at each other as fast as they can both go on reading."""
    client.store("r", KEYS, tensors(4, size=50_000))
    hit = client.lookup("r", KEYS)
    assert hit.lease is not None
    lease = hit.lease

    def flood(number: int) -> int:
        keys = chunk_keys(SPACE, range(1000 * number, 1000 * number + 16))
        stored = client.store(f"f{number}", keys, tensors(4, size=50_000), timeout=20)
        assert stored.failure is None
        return len(client.retrieve(lease, 4, timeout=20).chunks)

    with ThreadPoolExecutor(8) as pool:
        assert [4] * 24 == list(pool.map(flood, range(24)))


# ---- servers that are not there


def test_a_dead_server_is_a_miss_and_not_a_stall(tmp_path: Path) -> None:
    """M1: 1,500 requests to a dead address cost next to nothing, others go on, and closing does not wait."""
    with make_server(f"ipc://{tmp_path}/live") as live, CacheClient(live.address, SPACE, patience=STEADY) as other:
        other.wait_ready()
        dead = CacheClient(f"ipc://{tmp_path}/dead", SPACE, patience=QUICK)
        begun = time.monotonic()
        for number in range(1500):
            result = dead.lookup(f"r{number}", KEYS)
            assert (0, True) == (result.hit_chunks, isinstance(result.failure, ServerUnavailableError))
            if number % 100 == 0:
                assert other.lookup("alive", KEYS).failure is None
        assert time.monotonic() - begun < 15.0  # a stall each would be 1,500 s
        begun = time.monotonic()
        dead.close()
        assert time.monotonic() - begun < 2.0
        assert 0 == dead.pending


def test_a_black_hole_costs_the_patience_for_connecting(tmp_path: Path) -> None:
    """M5: a socket that listens and never accepts costs a bounded wait, and the client recovers when it lives."""
    hole = socket.socket()
    hole.bind(("127.0.0.1", 0))
    hole.listen(0)
    port = hole.getsockname()[1]
    fillers = [socket.socket() for _ in range(3)]
    for one in fillers:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect(("127.0.0.1", port))
    patience = Patience(connect=0.3, answer=0.3, first_delay=0.02, longest_delay=0.1)
    with CacheClient(f"tcp://127.0.0.1:{port}", SPACE, patience=patience) as client:
        begun = time.monotonic()
        result = client.lookup("r", KEYS)
        assert isinstance(result.failure, ServerUnavailableError)
        assert time.monotonic() - begun < 5.0  # the socket itself would wait for minutes
        for one in (hole, *fillers):
            one.close()
        with make_server(f"tcp://127.0.0.1:{port}"):
            wait_until(lambda: client.phase is Phase.UP)
            assert client.lookup("r", KEYS).failure is None


def test_a_restarted_server_is_found_again(tmp_path: Path) -> None:
    """L10: what was in flight fails, then the client says hello by itself; leases of the old server are misses."""
    address = f"ipc://{tmp_path}/s"
    with CacheClient(address, SPACE, patience=QUICK) as client:
        with make_server(address):
            wait_until(lambda: client.phase is Phase.UP)
            client.store("r", KEYS, tensors(4))
            lease = client.lookup("r", KEYS).lease
        assert lease is not None
        assert client.lookup("r", KEYS).failure is not None
        with make_server(address):
            wait_until(lambda: client.phase is Phase.UP)
            assert 0 == client.lookup("r", KEYS).hit_chunks
            assert client.retrieve(lease, 1).failure is not None
            assert 1 <= client.counters.lost


def test_a_stopped_process_is_noticed(tmp_path: Path) -> None:
    """M9, O9: a server that hangs costs one time-out, then misses; continued, it serves again."""
    code = (
        "import sys,time;from tests.protocol_v2.test_client import make_server;"
        "s=make_server(sys.argv[1]).start();print('up',flush=True);time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, f"ipc://{tmp_path}/s"], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert process.stdout is not None
        assert b"up\n" == process.stdout.readline()
        with CacheClient(f"ipc://{tmp_path}/s", SPACE, patience=QUICK) as client:
            assert client.lookup("r", KEYS).failure is None
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            begun = time.monotonic()
            assert isinstance(client.lookup("r", KEYS, timeout=0.3).failure, RequestTimeoutError)
            for _ in range(100):
                assert client.lookup("r", KEYS, timeout=5.0).failure is not None
            assert time.monotonic() - begun < 10.0  # a time-out each would be 500 s
            os.kill(process.pid, signal.SIGCONT)
            wait_until(lambda: client.lookup("r", KEYS).failure is None, 10.0)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("answer", [None, b"\x90", b"\x91\xafkv_event_stream"])
def test_a_server_without_the_capability_gets_nothing_keyed(tmp_path: Path, answer: bytes | None) -> None:
    """An LMCache server, or one that does not answer: the one frame that reaches it is the question."""
    seen: list[list[bytes]] = []
    stop = threading.Event()

    def play(peer: "zmq.Socket[bytes]") -> None:
        while not stop.is_set():
            if peer.poll(20):
                identity, *frames = peer.recv_multipart()
                seen.append(frames)
                if answer is not None:
                    peer.send_multipart([identity, frames[0], frames[1], answer])

    with router(f"ipc://{tmp_path}/s") as peer:
        thread = threading.Thread(target=play, args=(peer,))
        thread.start()
        try:
            patience = Patience(connect=0.3, answer=0.3, refused_delay=60.0)
            with CacheClient(f"ipc://{tmp_path}/s", SPACE, patience=patience) as client:
                result = client.lookup("r", KEYS)
                stored = client.store("r", KEYS, tensors(4))
                expected = UnsupportedServerError if answer else ServerUnavailableError
                assert isinstance(result.failure, expected)
                assert (0, 0) == (result.hit_chunks, stored.stored)
                with pytest.raises(expected):
                    client.wait_ready(1.0)
        finally:
            stop.set()
            thread.join()
    assert all(frames[1:] == [b"\x20"] for frames in seen)
    assert seen


def test_a_space_mismatch_is_a_typed_failure_on_every_call(tmp_path: Path) -> None:
    """Never a silent 0 % hit rate: the field that differs is in the error, in `failure`, and in the server's status."""
    other = KeySpace("m", chunk_size=4, kv_dtype="float8_e4m3fn")
    with (
        make_server(f"ipc://{tmp_path}/s", expected=(other,)) as server,
        CacheClient(server.address, SPACE, patience=STEADY) as client,
        CacheClient(server.address, other, patience=STEADY) as right,
    ):
        with pytest.raises(SpaceMismatchError, match="kv_dtype"):
            client.wait_ready()
        failure = client.lookup("r", KEYS).failure
        assert isinstance(failure, SpaceMismatchError)
        assert "space.kv_dtype" == failure.refusal.field
        assert right.lookup("r", []).failure is None
        assert 1 <= client.counters.space_mismatches


def test_garbage_from_the_server_is_survived(tmp_path: Path) -> None:
    """Bytes that are no message cost nothing; the call ends by its time-out."""
    garbage = [[b""], [b"\xc1" * 100], [b"XK2\0"], [b"XK2\0", b"\x18", bytes(24)], [b"\x00", b"\x20", b"\xc1"]]
    address = f"ipc://{tmp_path}/s"
    with router(address) as peer, CacheClient(address, SPACE, patience=QUICK) as client:
        identity, *_ = peer.recv_multipart()
        for frames in garbage:
            peer.send_multipart([identity, *frames])
        assert client.lookup("r", KEYS, timeout=0.2).failure is not None
        wait_until(lambda: client.counters.bad_messages == len(garbage))


# ---- memory of payloads


class StallingProxy:
    """A TCP proxy that can stop reading from the client, so that what it sends stays in its own memory."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self.flowing = threading.Event()
        self.flowing.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.inner = (host, int(port))
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outside, _ = self.listener.accept()
                inside = socket.create_connection(self.inner)
                for pair in ((outside, inside, True), (inside, outside, False)):
                    self.threads.append(threading.Thread(target=self._pump, args=pair, daemon=True))
                    self.threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, stalls: bool) -> None:
        with contextlib.suppress(OSError):
            while True:
                if stalls:
                    self.flowing.wait()
                data = source.recv(1 << 16)
                if not data:
                    break
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        """Stop accepting; connections end with their peers."""
        self.flowing.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in list(self.threads):
            thread.join(5)


@pytest.mark.parametrize("guarded", [True, False])
def test_the_callers_memory_is_his_again_when_a_store_returns(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """J6: a store that failed while its payload was queued never stores bytes that were written after it returned.

    Negative control: without the guard (no tracker is kept) exactly that happens.
    """
    if not guarded:
        monkeypatch.setattr("protocol_v2.client_thread._Job.tracker", property(lambda _: None, lambda _, __: None))
    big = torch.zeros(32 << 20, dtype=torch.uint8)
    patience = Patience(ping=30.0)
    with make_server("tcp://127.0.0.1:0", heartbeat_ms=60_000, silence_ms=120_000) as server:
        proxy = StallingProxy(server.address)
        try:
            with (
                CacheClient(proxy.address, SPACE, patience=patience) as client,
                CacheClient(server.address, SPACE, patience=patience) as other,
            ):
                client.wait_ready()
                proxy.flowing.clear()
                result = client.store("r", KEYS, [big], timeout=0.3)
                assert result.failure is not None
                big.fill_(255)
                proxy.flowing.set()
                wait_until(lambda: guarded or other.lookup("o", KEYS[:1]).hit_chunks == 1)
                hit = other.lookup("o", KEYS[:1])
                if guarded:
                    assert 0 == hit.hit_chunks
                    assert 0 == client.lookup("r", KEYS[:1], timeout=5.0).hit_chunks
                else:
                    assert hit.lease is not None
                    assert 255 == int(other.retrieve(hit.lease, 1).chunks[0].tensors[0].max())
        finally:
            proxy.close()


# ---- closing and forking


@pytest.mark.parametrize("peer", ["serving", "dead", "silent", "full of requests"])
def test_closing_takes_under_two_seconds_whatever_the_peer_does(tmp_path: Path, peer: str) -> None:
    """M1: close never blocks, ends every call that waits, and may be repeated."""
    address = f"ipc://{tmp_path}/s"
    with contextlib.ExitStack() as stack:
        if peer == "serving":
            stack.enter_context(make_server(address))
        elif peer != "dead":
            stack.enter_context(router(address))
        client = CacheClient(address, SPACE)
        waiting: list[Any] = []

        def wait() -> None:
            try:
                waiting.append(client.lookup("r", KEYS, timeout=30.0))
            except ProtocolError as error:
                waiting.append(error)

        threads = [threading.Thread(target=wait) for _ in range(20 if peer == "full of requests" else 1)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        begun = time.monotonic()
        client.close()
        client.close()
        for thread in threads:
            thread.join(2.0)
            assert not thread.is_alive()
        assert time.monotonic() - begun < 2.0
        assert len(threads) == len(waiting)
        assert 0 == client.pending
        with pytest.raises(ClientClosedError):
            client.lookup("r", KEYS)
        with pytest.raises(ClientClosedError):
            client.wait_ready()


def test_a_client_is_of_no_use_after_a_fork_and_says_so(tmp_path: Path) -> None:
    """Fork-safe: the child's calls raise, its close lets go, and the parent's client goes on."""
    with make_server(f"ipc://{tmp_path}/s") as server:
        code = f"""
import os, sys
from keying import KeySpace
from protocol_v2.client import CacheClient
from protocol_v2.errors import ClientClosedError
client = CacheClient({server.address!r}, KeySpace("m", chunk_size=4, kv_dtype="bfloat16"))
client.wait_ready(5)
pid = os.fork()
if pid == 0:
    try:
        client.lookup("r", [])
    except ClientClosedError as error:
        client.close()
        del client
        sys.exit(7 if "after a fork" in str(error) else 1)
    sys.exit(2)
_, status = os.waitpid(pid, 0)
assert client.lookup("r", []).failure is None
client.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
        assert (7, "") == (done.returncode, done.stderr)


def test_a_client_that_is_only_dropped_leaves_nothing_behind(tmp_path: Path) -> None:
    """No sockets, threads or warnings of clients that were closed."""
    before = threading.active_count()
    with make_server(f"ipc://{tmp_path}/s") as server:
        for _ in range(5):
            with CacheClient(server.address, SPACE, patience=STEADY) as client:
                client.wait_ready()
    gc.collect()
    assert before >= threading.active_count()  # those of earlier tests may end meanwhile


def test_a_thread_that_fails_ends_every_call(
    client: CacheClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours leaves no caller waiting: the call that met it and all later ones say that the client is closed."""
    client.wait_ready()
    monkeypatch.setattr(client._thread.keeper, "submit", lambda *_: 1 / 0)
    with pytest.raises(ClientClosedError):
        client.lookup("r", KEYS)
    with pytest.raises(ClientClosedError):
        client.lookup("r", KEYS)
    assert "the client's thread failed" in caplog.text


def test_an_interrupted_call_is_forgotten(server: CacheServer) -> None:
    """Ctrl-C while a store waits: it is raised, and nothing stays pending."""
    code = f"""
import signal, threading, time, torch
from keying import KeySpace, chunk_keys
from protocol_v2 import CacheClient, keys_of_tokens
from protocol_v2.session_keeper import SessionKeeper
client = CacheClient({server.address!r}, KeySpace("m", chunk_size=4, kv_dtype="bfloat16"))
client.wait_ready(5)
SessionKeeper.received = lambda *_: None
threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
begun = time.monotonic()
try:
    client.store("r", keys_of_tokens(range(4)), [torch.zeros(4)], timeout=30)
except KeyboardInterrupt:
    time.sleep(0.1)
    assert client.pending == 0
    assert time.monotonic() - begun < 5
    print("interrupted")
client.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ("interrupted\n", "") == (done.stdout, done.stderr)


def test_an_address_that_zmq_refuses_is_an_unavailable_server() -> None:
    """A host that is none: a miss with a reason, and no crash of the thread."""
    with CacheClient("tcp://a b:1", SPACE, patience=QUICK) as client:
        assert isinstance(client.lookup("r", KEYS).failure, ServerUnavailableError)
        assert "cannot connect" in str(client.failure)


# ---- probe


def test_a_probe_reports_both_sides(server: CacheServer) -> None:
    """Exit 0 only if a session stands: capability, agreement, limits, boot id and a ping."""
    report = probe(server.address, SPACE)
    assert report.ok
    assert report.established is not None
    assert report.pong is not None
    assert (2, 2) == (report.established.agreement.wire, report.established.agreement.schema)
    assert report.established.server_boot_id == report.pong.boot
    assert frozenset({"extra_keys/2"}) == report.capabilities
    assert report.ping_seconds is not None
    assert probe(server.address).ok


def test_a_probe_says_why_there_is_no_session(tmp_path: Path) -> None:
    """Dead, pinned to another space, or of another version: not ok, and the reason is in the report."""
    dead = probe(f"ipc://{tmp_path}/none", timeout=0.5)
    assert (False, None) == (dead.ok, dead.refusal)
    assert isinstance(dead.error, ServerUnavailableError)
    other = KeySpace("m", chunk_size=4, kv_dtype="int8")
    with make_server(f"ipc://{tmp_path}/s", expected=(other,)) as server:
        pinned = probe(server.address, SPACE)
        assert isinstance(pinned.error, SpaceMismatchError)
        assert pinned.refusal is not None
        assert "kv_dtype" == pinned.refusal.differences[0].field
        future = probe(server.address, other, offer=Offer(wire=frozenset({3}), wire_floor=3))
        assert isinstance(future.error, NegotiationRefusedError)
        assert future.refusal is not None
        assert future.refusal.asked is not None
        assert future.refusal.accepted is not None
        assert (3, (2,)) == (future.refusal.asked.wire[0], future.refusal.accepted.wire)
        assert "asked wire [3] (floor 3)" in str(future.error)
    with pytest.raises(LocalProtocolError):
        probe("nowhere")


def test_keys_of_any_form_are_one(client: CacheClient) -> None:
    """A slice of chunk keys is a prefix: looked up alone it hits as far as it goes."""
    client.store("r", KEYS, tensors(4))
    prefix: list[ChunkKey] = KEYS[:2]
    assert 2 == client.lookup("p", prefix).hit_chunks
    assert 0 == client.lookup("e", []).hit_chunks
