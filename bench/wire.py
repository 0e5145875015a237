"""Round trips of wire protocol 2, against an echo over the same sockets and against LMCache 0.5.6 where it is there.

    python bench/wire.py [--tokens 131072] [--rounds 40] [--seconds 2] [--json]

Every server is a process of its own on an ipc socket. The echo is a ROUTER that sends back one small frame for
whatever it gets: what no protocol over these sockets can undercut. LMCache's released server and client run from
``.venv-lmcache`` (``make interop`` builds it) in the same run; without it those rows are missing, and it is said so.
What ends a session comes after the clock has stopped, for them as for us.

Payload is measured twice: inline, against bare sockets whose server keeps what it gets and sends back what it kept, as
a cache must; and through shared memory, against one copy of the same bytes in one process.

    cold         keys derived from the token list, then one lookup of all chunks
    incremental  256 tokens appended to a chain that holds the rest, then one lookup
"""

import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import zmq
from rich.console import Console
from rich.table import Table

from keying import ChunkKeyChain, KeySpace, chunk_keys
from protocol_v2.client import CacheClient
from protocol_v2.tensors import TensorMeta

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
CHUNK = 256
LOOKUP_CHUNKS = 64
VALUE_BYTES = 1024
TRANSFER_CHUNKS = 16
TRANSFER_BYTES = 4 << 20
TRANSFER_SPACE = KeySpace("bench/transfer", chunk_size=CHUNK, kv_dtype="bfloat16")
AGAINST = {
    "store inline": "bare sockets, kept",
    "retrieve inline": "bare sockets, given back",
    "store shared": "one memcpy",
    "store shared, from staging": "one memcpy",
    "retrieve shared": "one memcpy",
}
ECHO = """
import sys, zmq
kept = []
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
print("listening", flush=True)
while True:
    identity, what, *rest = router.recv_multipart(copy=False)
    if what.bytes == b"keep":
        kept.append(rest)
    elif what.bytes == b"forget":
        kept.clear()
    router.send_multipart([identity, b"ok", *(kept[-1] if what.bytes == b"give" else ())], copy=False)
"""


@contextlib.contextmanager
def server(command: list[str]) -> Iterator[None]:
    """A process that prints a line with ``listening`` when it is there; stopped at the end."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        if not any("listening" in line for line in process.stdout):
            raise SystemExit(f"{command[:4]} ended with {process.wait()}")
        yield
    finally:
        process.terminate()
        process.communicate(timeout=30)


class Echo:
    """A bare DEALER with the sockets' own round trip."""

    def __init__(self, context: "zmq.Context[Any]", address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(address)

    def ask(self, frames: list[Any]) -> None:
        """Send, and wait for the answer."""
        self._socket.send_multipart(frames, copy=False)
        self._socket.recv_multipart(copy=False)

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close(linger=0)


def medians(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of the seconds that each case says it took; the cases take turns."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 3):
        for name, run in cases.items():
            seconds = run()
            if number >= 3:
                taken[name].append(seconds)
    return {name: statistics.median(times) for name, times in taken.items()}


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def latency(address: str, echo_address: str, n_tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of one lookup of a long request, by case."""
    rng = random.Random(20261)
    space = KeySpace("bench/model", chunk_size=CHUNK, kv_dtype="bfloat16")
    known = [rng.randrange(150_000) for _ in range(n_tokens)]
    unknown = [rng.randrange(150_000) for _ in range(n_tokens)]
    keys = chunk_keys(space, known)
    context = zmq.Context()
    echo = Echo(context, echo_address)
    request = [b"XK2\0", b"\x18", bytes(60 + 32 * len(keys))]  # what the lookup sends
    with CacheClient(address, space) as client:
        client.wait_ready()
        for first in range(0, len(keys), 64):
            values = [memoryview(bytes(VALUE_BYTES))] * len(keys[first : first + 64])
            stored = client.store("fill", keys, [_tensor(value) for value in values], first=first)
            assert stored.failure is None, stored.failure
        sessions = iter(range(10**9))

        def look_up(derive: Callable[[], Any], expected: int) -> float:
            session = f"s{next(sessions)}"
            begin = time.perf_counter()
            found = client.lookup(session, derive())
            taken = time.perf_counter() - begin
            assert found.hit_chunks == expected, found
            client.end_session(session)
            return taken

        chain = ChunkKeyChain(space)
        chain.extend(known[:-CHUNK])
        held = chain.n_tokens

        def grown() -> Any:
            chain.extend(known[-CHUNK:])
            return chain.keys

        def incremental() -> float:
            taken = look_up(grown, len(keys))
            chain.truncate(held)
            return taken

        figures = medians(
            {
                "echo of the same bytes": lambda: timed(partial(echo.ask, request)),
                "derive only": lambda: timed(partial(chunk_keys, space, known)),
                "miss, cold": lambda: look_up(partial(chunk_keys, space, unknown), 0),
                "hit, cold": lambda: look_up(partial(chunk_keys, space, known), len(keys)),
                "hit, incremental": incremental,
            },
            rounds,
        )
    echo.close()
    context.term()
    return figures


def _tensor(value: memoryview) -> Any:
    import numpy as np

    return np.frombuffer(value, dtype=np.uint8)


class Transfers:
    """Stores and retrieves of `TRANSFER_CHUNKS` chunks by one client, each timed; what was stored is cleared."""

    def __init__(self, client: CacheClient, tensors: list[Any]) -> None:
        self._client = client
        self._tensors = tensors
        self._rng = random.Random(20263)
        self._fresh = iter(range(10**9))
        self._lease = b""
        self._delivered: Any = None

    def store(self) -> float:
        """Seconds of a store."""
        session = f"t{next(self._fresh)}"
        keys = chunk_keys(TRANSFER_SPACE, [self._rng.randrange(150_000) for _ in range(CHUNK * TRANSFER_CHUNKS)])
        begin = time.perf_counter()
        stored = self._client.store(session, keys, self._tensors)
        taken = time.perf_counter() - begin
        assert stored.stored == TRANSFER_CHUNKS, stored
        found = self._client.lookup(session, keys)
        assert found.lease is not None
        self._lease = found.lease
        return taken

    def clear(self) -> float:
        """Let the server forget, in no time that counts."""
        self._client.release(self._lease)
        self._client.clear("space")
        return 0.0

    def retrieve(self) -> float:
        """Seconds of a retrieve; the chunks of the one before are given up first, as those of the memcpy are."""
        self._delivered = None
        begin = time.perf_counter()
        self._delivered = self._client.retrieve(self._lease, TRANSFER_CHUNKS)
        taken = time.perf_counter() - begin
        assert len(self._delivered.chunks) == TRANSFER_CHUNKS, self._delivered.failure
        for chunk, tensor in zip(self._delivered.chunks, self._tensors, strict=True):
            assert chunk.tensors[0][-1] == tensor[-1]
        self.clear()
        return taken


def transfer(address: str, echo_address: str, rounds: int) -> dict[str, float]:
    """Seconds of storing and retrieving inline and through shared memory, of bare sockets, and of one copy."""
    import numpy as np

    tensors = [np.full(TRANSFER_BYTES, place, dtype=np.uint8) for place in range(TRANSFER_CHUNKS)]
    frames: list[Any] = [one.data for one in tensors]
    context = zmq.Context()
    echo = Echo(context, echo_address)
    copied: list[Any] = []

    def bare_retrieve() -> float:
        taken = timed(partial(echo.ask, [b"give"]))
        echo.ask([b"forget"])
        return taken

    def memcpy() -> None:
        copied.clear()
        copied.extend(one.copy() for one in tensors)

    with (
        CacheClient(address, TRANSFER_SPACE, timeout=60, shared_memory=0) as inline,
        CacheClient(address, TRANSFER_SPACE, timeout=60) as sharer,
    ):
        inline.wait_ready()
        wait_shared(sharer)
        ours, shared = Transfers(inline, tensors), Transfers(sharer, tensors)
        staged = [sharer.staging([TensorMeta("uint8", (TRANSFER_BYTES,))])[0] for _ in tensors]
        for into, tensor in zip(staged, tensors, strict=True):  # as a connector gathers KV out of an engine's blocks
            into.numpy()[:] = tensor
        gathered = Transfers(sharer, staged)
        figures = medians(
            {
                "bare sockets, kept": lambda: timed(partial(echo.ask, [b"keep", *frames])),
                "bare sockets, given back": bare_retrieve,
                "store inline": ours.store,
                "retrieve inline": ours.retrieve,
                "one memcpy": lambda: timed(memcpy),
                "store shared": shared.store,
                "retrieve shared": shared.retrieve,
                "store shared, from staging": gathered.store,
                "(cleared)": gathered.clear,
            },
            rounds,
        )
        del figures["(cleared)"]
        assert sharer.sharing is not None
        counters = sharer.sharing.counters
        assert (counters.no_room, counters.stale) == (0, 0), counters
    echo.close()
    context.term()
    return figures


def wait_shared(client: CacheClient) -> None:
    """Until a client shares memory with its server; nothing but time tells that it does."""
    client.wait_ready()
    ends = time.monotonic() + 10
    while client.sharing is None or client.sharing.reader is None:
        if client.sharing is None or time.monotonic() > ends:
            raise SystemExit("shared memory cannot be had here")
        time.sleep(0.001)


def throughput(run: Callable[[int], Callable[[], None]], clients: int, seconds: float) -> float:
    """Operations a second of so many clients, each in a thread of its own."""
    counts = [0] * clients
    ready = threading.Barrier(clients + 1)
    over = threading.Event()

    def work(number: int) -> None:
        ask = run(number)
        ask()
        ready.wait()
        while not over.is_set():
            ask()
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    begin = time.perf_counter()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def rates(address: str, echo_address: str, seconds: float) -> dict[int, tuple[float, float]]:
    """For 1, 8 and 64 clients: lookups of 64 chunks a second, and echoes of the same bytes a second."""
    space = KeySpace("bench/model", chunk_size=CHUNK, kv_dtype="bfloat16")
    rng = random.Random(20262)
    keys = chunk_keys(space, [rng.randrange(150_000) for _ in range(CHUNK * LOOKUP_CHUNKS)])
    result = {}
    for clients in (1, 8, 64):
        with contextlib.ExitStack() as stack:
            ours = [stack.enter_context(CacheClient(address, space)) for _ in range(clients)]
            for client in ours:
                client.wait_ready()

            def lookups(number: int, ours: list[CacheClient] = ours) -> Callable[[], None]:
                def ask() -> None:
                    found = ours[number].lookup("r", keys, lease=False)
                    assert found.failure is None, found.failure

                return ask

            served = throughput(lookups, clients, seconds)
        context = zmq.Context()
        echoes = [Echo(context, echo_address) for _ in range(clients)]
        request = [b"XK2\0", b"\x18", bytes(60 + 32 * LOOKUP_CHUNKS)]

        def echoed(number: int, echoes: list[Echo] = echoes, request: list[bytes] = request) -> Callable[[], None]:
            return lambda: echoes[number].ask(request)

        result[clients] = (served, throughput(echoed, clients, seconds))
        for one in echoes:
            one.close()
        context.term()
    return result


def peer(n_tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of the released LMCache's own lookup round trip, or nothing where it is not installed."""
    if not PEER_PYTHON.exists():
        return {}
    command = [str(PEER_PYTHON), str(ROOT / "bench" / "peer_lmcache.py"), "lookup", str(n_tokens), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"LMCache's side failed: {done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the long request.")] = 131_072,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 40,
    seconds: Annotated[float, typer.Option(help="Seconds a throughput measurement lasts.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures for a script.")] = False,
) -> None:
    """Print lookup latency and throughput with their ratios to an echo, and to LMCache where it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        ours, echo = f"ipc://{folder}/s", f"ipc://{folder}/e"
        serve = [sys.executable, "-m", "extra_keys_cli", "serve", "--no-store", "--listen", ours]
        with server(serve), server([sys.executable, "-c", ECHO, echo]):
            latencies = latency(ours, echo, tokens, rounds)
            per_second = rates(ours, echo, seconds)
            transfers = transfer(ours, echo, max(5, rounds // 4))
    theirs = peer(tokens, rounds)
    if as_json:
        print(
            json.dumps(
                {"latency": latencies, "per_second": per_second, "transfer": transfers, "lmcache": theirs}, indent=1
            )
        )
        return
    console = Console()
    base = latencies["echo of the same bytes"]
    table = Table("lookup", "ms", "x echo", title=f"{tokens:,} tokens, chunk {CHUNK}")
    for name, taken in {**latencies, **{f"LMCache 0.5.6: {name}": taken for name, taken in theirs.items()}}.items():
        table.add_row(name, f"{taken * 1e3:.2f}", f"{taken / base:.1f}")
    console.print(table)
    if theirs:
        console.print(
            f"against LMCache 0.5.6: miss {latencies['miss, cold'] / theirs['miss']:.2f}x, "
            f"hit {latencies['hit, cold'] / theirs['hit']:.2f}x of its time"
        )
    else:
        console.print("LMCache 0.5.6 is not installed here ('make interop' does it), so its rows are missing")
    table = Table("clients", "lookups/s", "echoes/s", "ratio", title=f"lookups of {LOOKUP_CHUNKS} chunks")
    for clients, (served, echoed) in per_second.items():
        table.add_row(str(clients), f"{served:,.0f}", f"{echoed:,.0f}", f"{served / echoed:.2f}")
    console.print(table)
    n_bytes = TRANSFER_CHUNKS * TRANSFER_BYTES
    table = Table(
        "payload", "ms", "GB/s", "ratio", "to", title=f"{TRANSFER_CHUNKS} chunks of {TRANSFER_BYTES >> 20} MiB"
    )
    for name, taken in transfers.items():
        floor = AGAINST.get(name, "")
        ratio = f"{taken / transfers[floor]:.2f}" if floor else ""
        table.add_row(name, f"{taken * 1e3:.1f}", f"{n_bytes / taken / 1e9:.2f}", ratio, floor)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
