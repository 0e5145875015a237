"""The main job on real requests: derive, lookup, store, retrieve; twice, and once more after a restart of the server.

Each request is judged in three ways: what was hit against what was stored before by meaning, what was delivered against
what this very request would have computed, and what outlived the restart against what was there. Beside it stands what
keys over raw tokens would have served.
"""

import contextlib
import hashlib
import importlib.util
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from compat.v1 import V1Generation, v1_chunk_hashes
from extra_keys_cli.captured import CapturedRequest
from extra_keys_cli.failures import CommandError
from extra_keys_cli.oracle import ChunkIdentity, chunk_identities, why_not
from extra_keys_cli.places import socket_address
from extra_keys_cli.screen import stderr, stdout
from keying import ChunkKey, KeySpace, MultimodalItem, chunk_keys
from keying.engines import from_vllm
from protocol_v2.client import CacheClient
from protocol_v2.connectors.lora_revision import AdapterRevisions
from protocol_v2.errors import ProtocolError

ROUNDS = ("1st run", "2nd run", "after restart")
KV_SHAPE = (2, 2, 8)  # layers, keys and values, width; beside the tokens of a chunk
STARTUP_SECONDS = 30.0
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A captured request with its keys, and what is known about it without them."""

    label: str
    space: KeySpace
    keys: list[ChunkKey]
    identities: list[ChunkIdentity]
    v1_keys: list[tuple[str, str | None, bytes]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one request in one round, in chunks."""

    hit: int
    expected: int
    wrong: int
    why: str

    @property
    def right(self) -> bool:
        """Neither wrong content, nor a missing hit, nor a hit that should not be."""
        return self.hit == self.expected and not self.wrong


def prepare(captured: CapturedRequest, chunk_size: int) -> Prepared:
    """Derive the keys of a captured request, as a connector does."""
    space = KeySpace(captured.model, chunk_size=chunk_size, kv_dtype=captured.dtype)
    # the adapters' files stayed where the requests were captured: here the operator declares their folder immutable
    inputs = from_vllm(captured.request, adapter_revision=AdapterRevisions(shared_paths=("/adapters/",)))
    items = [one for one in inputs.extra_keys if isinstance(one, MultimodalItem)]
    raw = v1_chunk_hashes(inputs.tokens, items, generation=V1Generation.RAW, chunk_size=chunk_size)
    return Prepared(
        captured.label,
        space,
        chunk_keys(space, inputs.tokens, inputs.extra_keys),
        chunk_identities(captured, chunk_size),
        [(captured.model, captured.request.cache_salt, one) for one in raw],
    )


def kv_of(identity: ChunkIdentity, chunk_size: int) -> Any:
    """Stands for the KV that an engine computes: a tensor that follows from the identity and from nothing else."""
    import torch

    layers, halves, width = KV_SHAPE
    described = repr((identity.model, identity.tokens, identity.items, identity.adapter, identity.salt)).encode()
    stream = hashlib.shake_256(described).digest(layers * halves * chunk_size * width * 2)
    return torch.frombuffer(bytearray(stream), dtype=torch.int16).reshape(layers, halves, chunk_size, width)


def wrong_v1_hits(requests: list[Prepared]) -> list[int]:
    """For each request, the chunks of another request's KV that a store keyed on raw tokens and salt would serve it."""
    writers: dict[tuple[str, str | None, bytes], ChunkIdentity] = {}
    counts = []
    for one in requests:
        wrong = 0
        for key, identity in zip(one.v1_keys, one.identities, strict=True):
            if key not in writers:
                break
            wrong += writers[key] != identity
        for key, identity in zip(one.v1_keys, one.identities, strict=True):
            writers.setdefault(key, identity)
        counts.append(wrong)
    return counts


class Cache:
    """A server process on a folder, stopped with SIGTERM; one client a space."""

    def __init__(self, folder: Path) -> None:
        self._address = socket_address(folder)
        self._store = folder / "store"
        self._held: set[ChunkIdentity] = set()

    @contextlib.contextmanager
    def running(self, spaces: list[KeySpace]) -> Iterator[dict[KeySpace, CacheClient]]:
        """Start the server, connect, and stop both at the end.

        Raises:
            CommandError: the server did not come up, or did not stop cleanly.
        """
        command = [sys.executable, "-m", "extra_keys_cli", "serve"]
        command += ["--listen", self._address, "--store", str(self._store)]
        process = subprocess.Popen(  # noqa: S603  (our own command, no shell)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        try:
            _await_listening(process)
            with contextlib.ExitStack() as stack:
                yield {space: stack.enter_context(CacheClient(self._address, space, role="demo")) for space in spaces}
        finally:
            code = _stopped(process)
        if code != 0:
            raise CommandError(f"the server ended with exit code {code}")

    def serve(self, session: str, one: Prepared, client: CacheClient, earlier: list[list[ChunkIdentity]]) -> Verdict:
        """One request as an engine makes it: look up, retrieve what is there, compute and store the rest."""
        chunk_size = one.space.chunk_size
        expected = _leading(one.identities, self._held)
        found = client.lookup(session, one.keys)
        _require(found.failure)
        wrong = 0
        if found.lease is not None:
            delivered = client.retrieve(found.lease, found.hit_chunks)
            _require(delivered.failure)
            wrong = found.hit_chunks - len(delivered.chunks)
            for chunk, identity in zip(delivered.chunks, one.identities, strict=False):
                wrong += not bool((chunk.tensors[0] == kv_of(identity, chunk_size)).all())
        missed = one.identities[found.hit_chunks :]
        if missed:
            values = [kv_of(identity, chunk_size) for identity in missed]
            _require(client.store(session, one.keys, values, first=found.hit_chunks).failure)
            self._held.update(missed)
        client.end_session(session)
        why = why_not(missed[0], earlier, found.hit_chunks) if missed else ""
        return Verdict(found.hit_chunks, expected, wrong, why)


def _require(failure: ProtocolError | None) -> None:
    """The demo's server is there: an answer that comes from no cache is a failure of the demo."""
    if failure is not None:
        raise failure


def _await_listening(process: "subprocess.Popen[str]") -> None:
    """Read what the server prints until it says where it listens; one that hangs is killed, which ends the reading."""
    if process.stdout is None:
        raise CommandError("the server's output was not captured")
    watchdog = threading.Timer(STARTUP_SECONDS, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if line.startswith("listening on"):
                return
    finally:
        watchdog.cancel()
    raise CommandError(f"the server ended with exit code {process.wait()} before it listened")


def _stopped(process: "subprocess.Popen[str]") -> int:
    """SIGTERM, and the exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise CommandError(f"the server did not stop within {STOP_SECONDS:.0f} s of SIGTERM") from None
    return process.returncode


def _leading(identities: list[ChunkIdentity], held: set[ChunkIdentity]) -> int:
    return next((place for place, identity in enumerate(identities) if identity not in held), len(identities))


def run_rounds(requests: list[Prepared], folder: Path) -> list[list[Verdict]]:
    """All rounds over all requests; the server is restarted before the last."""
    cache = Cache(folder)
    spaces = list(dict.fromkeys(one.space for one in requests))
    rounds: list[list[Verdict]] = []
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("", total=len(ROUNDS) * len(requests))

        def run(name: str, clients: dict[KeySpace, CacheClient]) -> None:
            progress.update(bar, description=name)
            earlier: list[list[ChunkIdentity]] = []
            verdicts = []
            for number, one in enumerate(requests):
                verdicts.append(cache.serve(f"{name}/{number}", one, clients[one.space], earlier))
                earlier.append(one.identities)
                progress.advance(bar)
            rounds.append(verdicts)

        with cache.running(spaces) as clients:
            run(ROUNDS[0], clients)
            run(ROUNDS[1], clients)
        with cache.running(spaces) as clients:
            run(ROUNDS[2], clients)
    return rounds


def result_table(requests: list[Prepared], rounds: list[list[Verdict]], v1_wrong: list[int]) -> Table:
    """One row a request, for people who see this for the first time."""
    table = Table(
        title="Chunks served from the cache",
        caption="1st, 2nd, restart: chunks hit in each run.\n"
        "v1-raw wrong: chunks of another request's KV that keys over\n"
        "raw tokens and salt would have served in the first run.",
    )
    for header in ("request", "chunks", "1st", "why not more", "2nd", "restart", "v1-raw\nwrong"):
        table.add_column(header, justify="left" if header in {"request", "why not more"} else "right")
    model = ""
    for number, one in enumerate(requests):
        if one.space.model != model:
            model = one.space.model
            table.add_section()
            table.add_row(Text(model.rpartition("/")[2], style="bold"))
        first, *later = [verdicts[number] for verdicts in rounds]
        wrong = v1_wrong[number]
        table.add_row(
            one.label,
            str(len(one.keys)),
            _shown(first),
            first.why,
            *map(_shown, later),
            Text(str(wrong), style="red") if wrong else Text("-", style="dim"),
        )
    return table


def _shown(verdict: Verdict) -> Text:
    if verdict.wrong:
        return Text(f"{verdict.hit}, {verdict.wrong} WRONG", style="bold red")
    if not verdict.right:
        return Text(f"{verdict.hit}, wanted {verdict.expected}", style="bold red")
    return Text(str(verdict.hit), style="green" if verdict.hit else "")


def demo(captured: list[CapturedRequest], folder: Path, chunk_size: int) -> bool:
    """Run all rounds and print what happened.

    Args:
        captured: the requests.
        folder: an empty folder for socket and store.
        chunk_size: tokens in a chunk.

    Returns:
        Whether there was no wrong hit, no missing hit and no lost entry.

    Raises:
        CommandError: torch is not installed, or the server could not be started or stopped.
    """
    if importlib.util.find_spec("torch") is None:
        raise CommandError("the demo stores torch tensors, and torch is not installed; install extra-keys[torch]")
    requests = [prepare(one, chunk_size) for one in captured]
    rounds = run_rounds(requests, folder)
    v1_wrong = wrong_v1_hits(requests)
    stdout.print(result_table(requests, rounds, v1_wrong))
    failures = sum(not verdict.right for verdicts in rounds for verdict in verdicts)
    served = sum(verdict.hit for verdicts in rounds for verdict in verdicts)
    wrong = sum(verdict.wrong for verdicts in rounds for verdict in verdicts)
    stdout.print(
        f"{len(requests)} requests, {len(rounds)} rounds: {served} chunks from the cache, {wrong} of them wrong; "
        f"{failures} requests that got less or more than they should.",
        highlight=False,
    )
    stdout.print(
        f"Keys over raw tokens and salt (LMCache's multi-process mode without media hashes): {sum(v1_wrong)} chunks of "
        f"another request's KV in one run, to {sum(map(bool, v1_wrong))} requests.",
        highlight=False,
    )
    return not failures
