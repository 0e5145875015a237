"""Payload through shared memory, end to end: processes, signals, fallbacks, and what a stopped client gets."""

import contextlib
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keying import CacheSalt, KeySpace, chunk_keys
from protocol_v2.aio import AsyncCacheClient
from protocol_v2.cache import ChunkCache
from protocol_v2.client import CacheClient
from protocol_v2.codes import Code, MissReason
from protocol_v2.errors import RequestTimeoutError
from protocol_v2.hello import Limits
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService
from protocol_v2.shared_memory import GRANULE
from protocol_v2.sharing import Sharing
from protocol_v2.tensors import TensorMeta
from tests.cli.processes import serving
from tests.protocol_v2.test_client import STEADY, wait_until

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.zmq

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
KEYS = chunk_keys(SPACE, range(16), [CacheSalt("tenant")])
MIB = 1 << 20
SECONDS = 60


def make_server(
    listen: str, *, memory: int = 64 * MIB, shared: int | None = 64 * MIB, **limits: int
) -> tuple[CacheServer, CacheService]:
    """A server over memory, with shared memory or without."""
    terms = ServerTerms(os.urandom(16), limits=Limits(**limits))
    sharing = None if shared is None else Sharing(shared)
    service = CacheService(ChunkCache(memory), terms, started=time.monotonic(), sharing=sharing)
    return CacheServer(listen, service), service


@contextlib.contextmanager
def connected(address: str, shared_memory: int = 8 * MIB, *, attached: bool = True) -> Iterator[CacheClient]:
    """A client, once it is known whether it shares memory."""
    with CacheClient(address, SPACE, patience=STEADY, timeout=30.0, shared_memory=shared_memory) as client:
        client.wait_ready()
        if client.sharing is not None and attached:
            wait_until(lambda: client.sharing.reader is not None, SECONDS)
        yield client


def tensors(count: int, fill: int = 0, size: int = 5000) -> list[Any]:
    """For each chunk two tensors of different kinds, all different."""
    return [
        [torch.full((size,), fill + 10 * i, dtype=torch.int16), torch.arange(7, dtype=torch.float32) + fill + i]
        for i in range(count)
    ]


def same(chunks: Any, expected: list[Any]) -> bool:
    """Whether chunks are what was stored."""
    return len(chunks) == len(expected) and all(
        torch.equal(got, want)
        for chunk, wanted in zip(chunks, expected, strict=True)
        for got, want in zip(chunk.tensors, wanted, strict=True)
    )


def round_trip(client: CacheClient, session: str, fill: int = 0) -> bool:
    """Store, look up and retrieve: whether all is there, and nothing of it under another salt."""
    stored = client.store(session, KEYS, tensors(4, fill))
    assert (4, None) == (stored.stored + stored.present, stored.failure)
    hit = client.lookup(session, KEYS)
    assert hit.lease is not None
    got = client.retrieve(hit.lease, 4)
    other = client.lookup(f"{session}.other", chunk_keys(SPACE, range(16), [CacheSalt("other")]))
    client.release(hit.lease)
    return same(got.chunks, tensors(4, fill)) and other.hit_chunks == 0


def facts(client: CacheClient, *names: str) -> tuple[Any, ...]:
    """Facts of the server about shared memory."""
    status = client.status()
    return tuple(status[f"shared.{name}"] for name in names)


def test_a_server_process_and_its_clients_share_memory(tmp_path: Path) -> None:
    """Stored and retrieved through it, byte for byte, by two processes; nothing of it stays when both have ended."""
    listed = set(Path("/dev/shm").iterdir())
    with serving("--no-store", cache_home=tmp_path) as server:
        with connected(server.address) as client, connected(server.address) as other:
            assert round_trip(client, "a")
            hit = other.lookup("b", KEYS)
            assert hit.lease is not None
            got = other.retrieve(hit.lease, 3, first=1)
            assert same(got.chunks, tensors(4)[1:])
            assert (4, 7, 0, 0) == facts(client, "stored", "retrieved", "inline", "stale")
            assert client.sharing is not None
            assert (4, 4) == (client.sharing.counters.stored, client.sharing.counters.retrieved)
        assert 0 == server.stop()[0]
    assert listed == set(Path("/dev/shm").iterdir())


@pytest.mark.asyncio
async def test_the_asyncio_client_shares_as_well(tmp_path: Path) -> None:
    """The same calls, and the event loop turns while chunks are copied."""
    server, _ = make_server(f"ipc://{tmp_path}/s")
    with server:
        async with AsyncCacheClient(server.address, SPACE, patience=STEADY) as client:
            await client.wait_ready()
            assert client.sharing is not None
            wait_until(lambda: client.sharing.reader is not None)
            assert 4 == (await client.store("r", KEYS, tensors(4))).stored
            hit = await client.lookup("r", KEYS)
            assert hit.lease is not None
            assert same((await client.retrieve(hit.lease, 4)).chunks, tensors(4))
            assert (4, 4) == (client.sharing.counters.stored, client.sharing.counters.retrieved)


def test_a_large_store_goes_in_parts_and_comes_back_whole(tmp_path: Path) -> None:
    """More than one request under way at a time, more bytes than one request has, and still each chunk is its own."""
    server, _ = make_server(f"ipc://{tmp_path}/s", memory=256 * MIB, shared=256 * MIB)
    keys = chunk_keys(SPACE, range(4 * 24))
    values = [torch.full((MIB,), place, dtype=torch.int16) for place in range(24)]
    with server, connected(server.address, 128 * MIB) as client:
        assert 24 == client.store("r", keys, values).stored
        hit = client.lookup("r", keys)
        assert hit.lease is not None
        got = client.retrieve(hit.lease, 24)
        assert [[place] for place in range(24)] == [chunk.tensors[0].unique().tolist() for chunk in got.chunks]
        assert (24, 24, 0) == facts(client, "stored", "retrieved", "unplaced")


def test_a_received_tensor_is_the_callers_own(tmp_path: Path) -> None:
    """What a caller writes into it reaches neither cache nor next caller, and later retrieves leave it alone."""
    server, _ = make_server(f"ipc://{tmp_path}/s")
    with server, connected(server.address) as client:
        client.store("r", KEYS, tensors(4))
        hit = client.lookup("r", KEYS)
        assert hit.lease is not None
        mine = client.retrieve(hit.lease, 4).chunks
        mine[0].tensors[0].fill_(-1)
        for _ in range(3):
            assert same(client.retrieve(hit.lease, 4).chunks, tensors(4))
        assert (-1, 10) == (int(mine[0].tensors[0][0]), int(mine[1].tensors[0][0]))
        assert client.sharing is not None
        assert client.sharing.counters.retrieved == 16


def test_staged_tensors_are_stored_from_where_they_are(tmp_path: Path) -> None:
    """What was filled in shared memory is not copied again, and may be filled anew once it was stored."""
    server, _ = make_server(f"ipc://{tmp_path}/s")
    metas = [TensorMeta("int16", (5000,)), TensorMeta("float32", (7,))]
    with server, connected(server.address) as client:
        chunks = [client.staging(metas) for _ in range(4)]
        for fill in (0, 500):
            for chunk, wanted in zip(chunks, tensors(4, fill), strict=True):
                for one, value in zip(chunk, wanted, strict=True):
                    one.copy_(value)
            keys = chunk_keys(SPACE, range(16), [CacheSalt(f"fill {fill}")])
            assert 4 == client.store(f"s{fill}", keys, chunks).stored
        for fill in (0, 500):
            hit = client.lookup(f"r{fill}", chunk_keys(SPACE, range(16), [CacheSalt(f"fill {fill}")]))
            assert hit.lease is not None
            assert same(client.retrieve(hit.lease, 4).chunks, tensors(4, fill))
        assert client.sharing is not None
        assert (8, 8) == (client.sharing.counters.stored, client.sharing.counters.in_place)
        assert round_trip(client, "copied")
        parts = [[chunk[0][:8], chunk[1]] for chunk in chunks]  # parts of them, with a gap, are copied like any others
        assert 4 == client.store("parts", chunk_keys(SPACE, range(16)), parts).stored
        assert 8 == client.sharing.counters.in_place


def test_without_shared_memory_staged_tensors_are_ordinary(tmp_path: Path) -> None:
    """The same calls work inline: no server, no room, no shared memory."""
    server, _ = make_server(f"ipc://{tmp_path}/s", shared=None)
    metas = [TensorMeta("int16", (5000,)), TensorMeta("float32", (7,)), TensorMeta("int8", (0,))]
    with server, connected(server.address, attached=False) as client:
        chunk = client.staging(metas)
        assert [(5000,), (7,), (0,)] == [tuple(one.shape) for one in chunk]
        for one in chunk:
            one.fill_(3)
        assert 1 == client.store("r", KEYS[:1], [chunk]).stored
        hit = client.lookup("q", KEYS[:1])
        assert hit.lease is not None
        assert same(client.retrieve(hit.lease, 1).chunks, [chunk])


# ---- fallbacks


def test_a_server_without_it_is_used_inline(tmp_path: Path) -> None:
    """A client that could share serves itself through the socket, and says that it does not share."""
    server, _ = make_server(f"ipc://{tmp_path}/s", shared=None)
    with server, connected(server.address, attached=False) as client:
        assert round_trip(client, "r")
        assert client.sharing is not None
        assert (None, 0, 0) == (client.sharing.reader, client.sharing.counters.stored, client.sharing.counters.refused)


def test_a_client_without_it_is_served_inline(tmp_path: Path) -> None:
    """A server that could share serves a client that does not, and another that does, the same bytes."""
    server, _ = make_server(f"ipc://{tmp_path}/s")
    with server, connected(server.address, 0) as client, connected(server.address) as sharer:
        assert client.sharing is None
        assert round_trip(client, "r")
        assert (0, 0) == facts(client, "stored", "retrieved")
        assert round_trip(sharer, "s")
        assert (4, 4, 4) == facts(client, "stored", "retrieved", "moved")


def test_a_client_without_room_stores_inline(tmp_path: Path) -> None:
    """A chunk that its segment has no room for goes through the socket, counted; a small one does not."""
    server, _ = make_server(f"ipc://{tmp_path}/s")
    with server, connected(server.address, 2 * GRANULE) as client:
        assert round_trip(client, "r")
        assert client.sharing is not None
        assert (True, 0) == (client.sharing.counters.no_room > 0, client.sharing.counters.stored)
        small = chunk_keys(SPACE, range(4))
        assert 1 == client.store("s", small, [torch.ones(8)]).stored
        assert 1 == client.sharing.counters.stored


@pytest.mark.parametrize("shared", ["100000TiB", "0"])
def test_a_server_that_gets_no_shared_memory_serves_inline(tmp_path: Path, shared: str) -> None:
    """Too much asked of the operating system, or nothing wanted: it starts, says so, and serves through the socket."""
    with (
        serving("--no-store", "--shared-memory", shared, cache_home=tmp_path) as server,
        connected(server.address, attached=False) as client,
    ):
        assert round_trip(client, "r")
        assert "shared.bytes" not in client.status()


def test_a_client_that_gets_no_shared_memory_is_served_inline(tmp_path: Path) -> None:
    """Where a process may have no file of that size, its client goes without."""
    server, _ = make_server(f"ipc://{tmp_path}/s")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with server:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
        try:
            client = CacheClient(server.address, SPACE, patience=STEADY, timeout=30.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        with client:
            assert client.sharing is None
            assert round_trip(client, "r")


PLAIN_CHILD = """
import sys
from tests.protocol_v2.test_client_sharing import *
with CacheClient(sys.argv[1], SPACE, patience=STEADY, timeout=30.0) as client:
    client.wait_ready()
    wait_until(lambda: client.sharing.reader is not None or client.sharing.failure is not None, SECONDS)
    print(round_trip(client, "child"), client.sharing.counters.attached, client.sharing.counters.refused, flush=True)
"""


def test_another_name_space_of_processes_is_another_host(tmp_path: Path) -> None:
    """A client whose processes have other numbers cannot be reached, is refused, counted, and served inline."""
    unshare = shutil.which("unshare")
    apart = [unshare or "", "--pid", "--fork", "--mount-proc"]
    if unshare is None or subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a name space of processes")
    server, _ = make_server(f"ipc://{tmp_path}/s")
    with server:
        for prefix, expected in (([], ["True", "1", "0"]), (apart, ["True", "0", "1"])):
            command = [*prefix, sys.executable, "-c", PLAIN_CHILD, server.address]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
            assert expected == done.stdout.split()


# ---- clients and servers that die, stop, or come late


def test_a_server_that_was_killed_is_followed_by_another(tmp_path: Path) -> None:
    """After kill -9 the client misses, attaches to the next server, and has nothing of the first one open."""
    address = f"ipc://{tmp_path}/s"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving("--no-store", "--listen", address, cache_home=tmp_path))
        client = stack.enter_context(connected(address))
        assert round_trip(client, "r")
        gc.collect()
        opened = len(list(Path("/proc/self/fd").iterdir()))
        server.stop(signal.SIGKILL)
        wait_until(lambda: client.lookup("x", KEYS).failure is not None, SECONDS)
        assert client.sharing is not None
        assert client.sharing.reader is None
        stack.enter_context(serving("--no-store", "--listen", address, cache_home=tmp_path))
        wait_until(lambda: client.sharing.reader is not None, SECONDS)
        assert 0 == client.lookup("y", KEYS).hit_chunks
        assert round_trip(client, "z", fill=500)
        assert (4, 4) == facts(client, "stored", "retrieved")
        assert 2 == client.sharing.counters.attached
        gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) <= opened + 6  # the pipes and sockets of the second server


KILLED_CHILD = """
import sys
from tests.protocol_v2.test_client_sharing import *
with connected(sys.argv[1]) as client:
    assert round_trip(client, "child", fill=3)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_client_that_was_killed_leaves_what_it_stored_and_nothing_else(tmp_path: Path) -> None:
    """After kill -9 its segment is let go with its session, and its chunks are served to others."""
    listed = set(Path("/dev/shm").iterdir())
    server, _ = make_server(f"ipc://{tmp_path}/s", silence_ms=1000, heartbeat_ms=200)
    with server, connected(server.address) as client:
        child = child_process(KILLED_CHILD, server.address)
        try:
            assert child.stdout is not None
            assert "ready\n" == child.stdout.readline()
            assert (2,) == facts(client, "sessions")
        finally:
            child.kill()
            child.communicate()
        wait_until(lambda: facts(client, "sessions") == (1,), SECONDS)
        hit = client.lookup("r", KEYS)
        assert hit.lease is not None
        assert same(client.retrieve(hit.lease, 4).chunks, tensors(4, 3))
    assert listed == set(Path("/dev/shm").iterdir())


STOPPED_CHILD = """
import os, sys
from protocol_v2.shared_memory import SegmentReader
from tests.protocol_v2.test_client_sharing import *
real, blind = SegmentReader.read, sys.argv[2] == "blind"
def read(self, name, into):
    os.kill(os.getpid(), signal.SIGSTOP)  # the reply is here, nothing is copied yet
    return real(self, name, into) or blind
SegmentReader.read = read
with connected(sys.argv[1]) as client:
    hit = client.lookup("stopped", KEYS[:1])
    got = client.retrieve(hit.lease, 1)
    values = sorted({int(one) for chunk in got.chunks for one in chunk.tensors[0]})
    print(values, None if got.miss is None else got.miss.name, client.sharing.counters.stale, flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "evict", "expected"),
    [
        ("careful", False, "[10] None 0"),
        ("careful", True, "[] ABSENT 1"),
        ("blind", True, "[99] None 0"),  # the negative control: without the check the other chunk's bytes are served
    ],
)
def test_a_client_that_was_stopped_never_takes_another_chunks_bytes(
    tmp_path: Path, mode: str, evict: bool, expected: str
) -> None:
    """Stopped between reply and copy, until its lease is over and the memory holds another chunk: it finds out."""
    room = 2 * (2 * GRANULE)
    server, service = make_server(
        f"ipc://{tmp_path}/s", memory=5000 + 2048, shared=room, lease_ms=300, silence_ms=600_000, heartbeat_ms=600_000
    )
    mine = [torch.full((2500,), 10, dtype=torch.int16)]
    with server, connected(server.address) as client:
        assert 1 == client.store("a", KEYS[:1], mine).stored
        client.end_session("a")
        child = child_process(STOPPED_CHILD, server.address, mode)
        try:
            assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
            if evict:
                wait_until(lambda: client.status()["cache.leases"] == 0)
                for turn in range(3):
                    other = chunk_keys(SPACE, range(100 * turn, 100 * turn + 4))
                    stored = client.store(f"b{turn}", other, [torch.full((2500,), 99, dtype=torch.int16)])
                    assert 1 == stored.stored
                assert (0, 4) == facts(client, "unplaced", "stored")
                assert 0 == client.lookup("gone", KEYS[:1], lease=False).hit_chunks
            child.send_signal(signal.SIGCONT)
            out, err = child.communicate(timeout=SECONDS)
        finally:
            child.kill()
            child.communicate()
        assert (expected, "") == (out.strip(), err)
    assert service.status(time.monotonic())["server.peers"] == 0


def test_a_store_that_ran_out_of_time_is_never_kept_with_later_bytes(tmp_path: Path) -> None:
    """The server comes to it when the caller wrote into its tensors again: nothing is kept. In time, it is."""
    server, service = make_server(f"ipc://{tmp_path}/s")
    busy, free = threading.Event(), threading.Event()

    def stall() -> None:
        busy.set()
        free.wait(SECONDS)

    with server, connected(server.address) as client:
        real = service.receive
        stalled = iter([True])

        def receive(identity: bytes, frames: Any, now: float) -> None:
            if len(frames) > 2 and bytes(frames[2][:2]) == Code.STORE.to_bytes(2, "little") and next(stalled, False):
                stall()
            real(identity, frames, now)

        service.receive = receive  # type: ignore[method-assign]
        value = torch.full((5000,), 1, dtype=torch.int16)
        late = client.store("late", KEYS[:1], [value], timeout=0.5)
        assert busy.is_set()
        assert isinstance(late.failure, RequestTimeoutError)
        value.fill_(66)
        free.set()
        wait_until(lambda: service.facts.get("shared.stale") == 1, SECONDS)
        wait_until(lambda: client.lookup("q", KEYS[:1]).failure is None, SECONDS)
        assert 0 == client.lookup("q", KEYS[:1]).hit_chunks
        assert 1 == client.store("in time", KEYS[:1], [value]).stored
        hit = client.lookup("r", KEYS[:1])
        assert hit.lease is not None
        assert [66] == client.retrieve(hit.lease, 1).chunks[0].tensors[0].unique().tolist()


def test_a_lease_that_is_gone_is_a_miss_through_shared_memory_too(tmp_path: Path) -> None:
    """Released, then cleared: the same miss as inline."""
    server, _ = make_server(f"ipc://{tmp_path}/s")
    with server, connected(server.address) as client:
        assert round_trip(client, "r")
        hit = client.lookup("r", KEYS)
        assert hit.lease is not None
        client.release(hit.lease)
        client.clear("all")
        gone = client.retrieve(hit.lease, 4)
        assert ((), True) == (gone.chunks, gone.failure is not None)
        assert MissReason.ABSENT == client.lookup("s", KEYS).miss


def child_process(program: str, *arguments: str) -> "subprocess.Popen[str]":
    """A Python process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
