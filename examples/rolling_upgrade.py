"""Rehearse the upgrade of a live fleet from LMCache 0.5.x to key schema 2, step by step, under traffic.

    python examples/rolling_upgrade.py

A fleet is one server and two engines that share it. The engines send requests all the time: text, two pictures behind
the same placeholder tokens, two adapters, two salts, mixtures. Meanwhile server and engines are exchanged in one of the
two orders of MIGRATION.md, a roll-back included. What an engine "computes" for a chunk is a number that belongs to what
the chunk's KV depends on and to the engine's schema: whatever is served wrongly is seen, and whose it was.

The exit code is 1 if a v2 engine is served anything but its own KV, if a v1 engine is served a v2 engine's, if a step
has no hits, or if the v1 engines do *not* serve each other wrong hits before the upgrade: then this would see none.
"""

import contextlib
import itertools
import logging
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from compat import TunnelPolicy
from compat.v1 import V1Generation, v1_token_ids
from examples.v1_parties import (
    CHUNK,
    LAYERS,
    WIDTH,
    NoCacheError,
    Released,
    StandIns,
    V1Cache,
    V1Parties,
    V1Server,
    free_port,
    uniform,
)
from keying import CacheSalt, ExtraKey, KeySpace, LoraAdapter, MultimodalItem, chunk_keys
from protocol_v2 import CacheClient
from protocol_v2.errors import ProtocolError
from protocol_v2.session_keeper import Patience

MODEL = "org/rehearsal"
SPACE = KeySpace(MODEL, chunk_size=CHUNK, kv_dtype="float32")
SHAPE = (2, LAYERS, CHUNK, WIDTH)
PLACEHOLDER = 151_655
ROUNDS = 2
"""Times that each engine is answered all requests before a step is over: what the first misses, the second hits."""

STEP_SECONDS = 30.0
PACE_SECONDS = 0.001
COMPUTE_SECONDS = 0.02
"""That a request takes longer where there is no cache."""

V2_ANSWER_SECONDS = 2.0
SERVER_SECONDS = 20.0

stdout, stderr = Console(), Console(stderr=True)


class RehearsalError(Exception):
    """The rehearsal itself did not work; nothing is said about hits."""


# ---- requests, and what their KV depends on


@dataclass(frozen=True)
class Prompt:
    """One request: four chunks of tokens, and whatever else its KV depends on."""

    tokens: tuple[int, ...]
    items: tuple[MultimodalItem, ...] = ()
    adapter: str = ""
    salt: str = ""

    @property
    def extra_keys(self) -> tuple[ExtraKey, ...]:
        """What a v2 engine says beside the tokens."""
        adapters = (LoraAdapter(self.adapter, "sha256:5eed"),) if self.adapter else ()
        return (*self.items, *adapters, *((CacheSalt(self.salt),) if self.salt else ()))

    def truth(self, place: int) -> tuple[object, ...]:
        """Everything that the KV of a chunk depends on; kept apart from all keys."""
        stop = (place + 1) * CHUNK
        items = tuple((one.identifier, one.offset, one.length) for one in self.items if one.offset < stop)
        return self.tokens[:stop], items, self.adapter, self.salt


def prompts(conversation: int) -> list[Prompt]:
    """The requests of one conversation: few tokens, many identities."""
    text = tuple(range(1000 * conversation, 1000 * conversation + 4 * CHUNK))
    media = (*text[:8], *[PLACEHOLDER] * 40, *text[8:24])
    cat, dog = (MultimodalItem(letter * 60 + "c0ff", 8, 40) for letter in "ab")
    return [
        Prompt(text),
        Prompt((*text[: 2 * CHUNK], *reversed(text[: 2 * CHUNK]))),
        Prompt(text, adapter="sql"),
        Prompt(text, adapter="chat"),
        Prompt(text, salt="tenant-7"),
        Prompt(text, salt="tenant-8"),
        Prompt(media, (cat,)),
        Prompt(media, (dog,)),
        Prompt(media, (dog,), "sql", "tenant-7"),
        Prompt(media, (cat,), "sql", "tenant-7"),
    ]


REQUESTS = [one for conversation in (1, 2) for one in prompts(conversation)]


class Ledger:
    """Which number stands for which KV: one for each schema of engine and each truth."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[tuple[int, tuple[object, ...]], float] = {}
        self._owners: dict[float, tuple[int, tuple[object, ...]]] = {}

    def number(self, schema: int, truth: tuple[object, ...]) -> float:
        """What an engine computes for it."""
        with self._lock:
            number = self._numbers.setdefault((schema, truth), float(len(self._numbers) + 1))
            self._owners[number] = (schema, truth)
            return number

    def schema(self, number: float) -> int | None:
        """Which kind of engine computed it; None for a number that nobody did."""
        owner = self._owners.get(number)
        return None if owner is None else owner[0]


# ---- engines


class Engine(Protocol):
    """An engine's side of the cache."""

    schema: ClassVar[int]

    def fetch(self, prompt: Prompt) -> list[float]:
        """Numbers of the leading chunks that the cache has. Raises `NoCacheError`."""

    def store(self, prompt: Prompt, values: Sequence[float]) -> None:
        """Store the last chunks."""

    def close(self) -> None:
        """Hang up."""

    @property
    def speaks(self) -> str:
        """How it speaks to the server now."""


class V1Engine:
    """What a v1 connector does: it hashes token ids, which the generation has media in or not; adapters are nowhere."""

    schema: ClassVar[int] = 1
    speaks = "v1"

    def __init__(self, parties: V1Parties, address: str, generation: V1Generation) -> None:
        self._connect = partial(parties.connect, address, MODEL)
        self._generation = generation
        self._cache: V1Cache | None = None

    def fetch(self, prompt: Prompt) -> list[float]:
        """Look up and retrieve."""
        return self._connected().fetch(self._ids(prompt), prompt.salt)

    def store(self, prompt: Prompt, values: Sequence[float]) -> None:
        """Store the last chunks."""
        self._connected().store(self._ids(prompt), prompt.salt, values)

    def close(self) -> None:
        """Hang up."""
        if self._cache is not None:
            self._cache.close()

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        return v1_token_ids(prompt.tokens, prompt.items, generation=self._generation)

    def _connected(self) -> V1Cache:
        if self._cache is None:
            self._cache = self._connect()
        return self._cache


class V2Engine:
    """What a v2 connector does: keys over tokens and extra keys, by wire protocol 2, or through the tunnel."""

    schema: ClassVar[int] = 2

    def __init__(self, address: str) -> None:
        self._client = CacheClient(
            address,
            SPACE,
            role="engine",
            timeout=V2_ANSWER_SECONDS,
            patience=Patience(longest_delay=0.3, refused_delay=0.3),
            on_foreign=TunnelPolicy(SPACE),
        )
        self._sessions = itertools.count()

    def fetch(self, prompt: Prompt) -> list[float]:
        """Look up and retrieve."""
        session = f"r{next(self._sessions)}"
        found = self._client.lookup(session, chunk_keys(SPACE, prompt.tokens, prompt.extra_keys))
        _answered(found.failure)
        if found.lease is None:
            return []
        got = self._client.retrieve(
            found.lease, found.hit_chunks, make=lambda _, frame: np.frombuffer(frame, np.float32)
        )
        _answered(got.failure)
        self._client.end_session(session)
        return [uniform(chunk.tensors[0]) for chunk in got.chunks]

    def store(self, prompt: Prompt, values: Sequence[float]) -> None:
        """Store the last chunks."""
        keys = chunk_keys(SPACE, prompt.tokens, prompt.extra_keys)
        session = f"s{next(self._sessions)}"
        tensors = [np.full(SHAPE, value, np.float32) for value in values]
        _answered(self._client.store(session, keys, tensors, first=len(keys) - len(values)).failure)
        self._client.end_session(session)

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    @property
    def speaks(self) -> str:
        """Wire 2, or the tunnel where the session has no welcome."""
        if self._client.established is not None:
            return "v2"
        return "none" if self._client.capabilities is None else "v2t"


def _answered(failure: ProtocolError | None) -> None:
    if failure is not None:
        raise NoCacheError(str(failure))


# ---- traffic


@dataclass
class Counts:
    """What became of the requests of a step."""

    requests: int = 0
    hits: int = 0
    misses: int = 0
    bypassed: int = 0
    among_v1: int = 0
    wrong: int = 0

    def add(self, other: "Counts") -> None:
        """Sum up."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


class Traffic:
    """Requests of one engine, one after the other, for ever, in a thread; the engine may be exchanged between two."""

    def __init__(self, name: str, engine: Engine, ledger: Ledger, seed: int) -> None:
        self.name = name
        self._engine = engine
        self._ledger = ledger
        self._random = random.Random(seed)
        self._turn = threading.Condition()
        self._counts = Counts()
        self._answered = self._hit = 0
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine that sends now."""
        return self._engine

    def exchange(self, engine: Engine) -> None:
        """Another engine takes over, between two requests."""
        with self._turn:
            self._engine, gone = engine, self._engine
        gone.close()

    def take_counts(self) -> Counts:
        """What happened since the last time."""
        with self._turn:
            counts, self._counts = self._counts, Counts()
            return counts

    def await_hits(self, seconds: float) -> None:
        """Wait until the cache has answered all requests `ROUNDS` times, and hit as many as there are in one.

        Raises:
            RehearsalError: not in time, or the engine failed.
        """
        with self._turn:
            answers, hits = self._answered + ROUNDS * len(REQUESTS), self._hit + len(REQUESTS)
            done = self._turn.wait_for(
                lambda: self._failure or (self._answered >= answers and self._hit >= hits), seconds
            )
            if self._failure is not None:
                raise RehearsalError(f"{self.name} failed: {self._failure!r}") from self._failure
            if not done:
                raise RehearsalError(f"{self.name}: had no hits, or no answers, for {seconds:.0f} s")

    def stop(self) -> None:
        """No more requests."""
        self._stop.set()
        self._thread.join(60)
        self._engine.close()

    def _run(self) -> None:
        waiting: list[Prompt] = []
        while not self._stop.wait(PACE_SECONDS):
            if not waiting:
                waiting = self._random.sample(REQUESTS, len(REQUESTS))
            try:
                if not self._request(waiting.pop()):
                    self._stop.wait(COMPUTE_SECONDS)
            except Exception as error:  # told to whoever waits for answers
                with self._turn:
                    self._failure = error
                    self._turn.notify_all()
                return

    def _request(self, prompt: Prompt) -> bool:
        """What the cache has is checked, what it lacks is computed and stored; whether there was a cache."""
        with self._turn:
            engine, counts = self._engine, self._counts
            counts.requests += 1
            computed = [self._ledger.number(engine.schema, prompt.truth(i)) for i in range(len(prompt.tokens) // CHUNK)]
            try:
                found = engine.fetch(prompt)
                if len(found) < len(computed):
                    engine.store(prompt, computed[len(found) :])
            except NoCacheError:
                counts.bypassed += 1
                return False
            counts.hits += bool(found)
            counts.misses += not found
            wrong = [got for got, right in zip(found, computed, strict=False) if got != right]
            if wrong and engine.schema == 1 and all(self._ledger.schema(one) == 1 for one in wrong):
                counts.among_v1 += 1
            elif wrong:
                counts.wrong += 1
            self._answered += 1
            self._hit += bool(found)
            self._turn.notify_all()
            return True


# ---- the fleet


class V2Server:
    """``extra-keys serve`` as an operator starts it."""

    def __init__(self, port: int, store: Path, *, accept_v1: bool) -> None:
        options = ["--listen", f"tcp://127.0.0.1:{port}", "--store", str(store), "--memory", "64MiB", "--disk", "1GiB"]
        options += ["--accept-v1", "--v1-chunk-size", str(CHUNK)] if accept_v1 else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "extra_keys_cli", "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        watchdog = threading.Timer(SERVER_SECONDS, self._process.kill)
        watchdog.start()
        lines = self._process.stdout or ()
        listening = any(line.startswith("listening on") for line in lines)
        watchdog.cancel()
        if not listening:
            raise RehearsalError(f"extra-keys serve ended with exit code {self._process.wait()}; run it by hand")

    def wait_ready(self) -> None:
        """It listens since it was made."""

    def stop(self) -> None:
        """SIGTERM, as a service manager does it. Idempotent."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.communicate(timeout=SERVER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


class Fleet:
    """One server, and two engines that use it: what the steps are done to."""

    def __init__(self, parties: V1Parties, folder: Path) -> None:
        self._parties = parties
        self._store = folder
        self._port = free_port()
        self._address = f"tcp://127.0.0.1:{self._port}"
        self._server: V1Server = parties.start_server(self._port)
        self.serves = "v1"
        self.engines: list[Traffic] = []

    def start(self) -> None:
        """Wait for the first server, and let the engines send."""
        self._server.wait_ready()
        ledger = Ledger()
        self.engines = [Traffic(f"engine {i + 1}", self._v1_engine(i), ledger, seed=i) for i in range(2)]

    def upgrade(self, number: int) -> None:
        """Restart an engine with the v2 connector."""
        self.engines[number].exchange(V2Engine(self._address))

    def downgrade(self, number: int) -> None:
        """Restart an engine with its v1 connector."""
        self.engines[number].exchange(self._v1_engine(number))

    def serve_v1(self) -> None:
        """A v1 server in the place of whatever served."""
        self._server.stop()
        self._server = self._parties.start_server(self._port)
        self._server.wait_ready()
        self.serves = "v1"

    def serve_v2(self, *, accept_v1: bool) -> None:
        """A v2 server in the place of whatever served."""
        self._server.stop()
        self._server = V2Server(self._port, self._store, accept_v1=accept_v1)
        self.serves = "v2+v1" if accept_v1 else "v2"

    def close(self) -> None:
        """Stop all of it. Idempotent."""
        for engine in self.engines:
            engine.stop()
        self._server.stop()

    def _v1_engine(self, number: int) -> V1Engine:
        # the second knows of media; the first is a connector from before that
        generation = (V1Generation.RAW, V1Generation.SHA31)[number]
        return V1Engine(self._parties, self._address, generation)


@dataclass
class Step:
    """One thing that an operator does."""

    title: str
    do: Callable[[Fleet], None]
    server: str = ""
    speaks: tuple[str, ...] = ()
    counts: Counts = field(default_factory=Counts)


def servers_first() -> list[Step]:
    """The server takes v1 and v2 engines, then the engines follow."""
    return [
        Step("all v1", lambda _: None),
        Step("server to v2, accepting v1", lambda fleet: fleet.serve_v2(accept_v1=True)),
        Step("engine 1 to v2", lambda fleet: fleet.upgrade(0)),
        Step("ROLL BACK the server", lambda fleet: fleet.serve_v1()),
        Step("forward again", lambda fleet: fleet.serve_v2(accept_v1=True)),
        Step("engine 2 to v2", lambda fleet: fleet.upgrade(1)),
        Step("server accepts v1 no more", lambda fleet: fleet.serve_v2(accept_v1=False)),
    ]


def clients_first() -> list[Step]:
    """Engines tunnel to a server that nobody upgraded, then the server follows."""
    return [
        Step("all v1", lambda _: None),
        Step("engine 1 to v2", lambda fleet: fleet.upgrade(0)),
        Step("ROLL BACK engine 1", lambda fleet: fleet.downgrade(0)),
        Step("forward again", lambda fleet: fleet.upgrade(0)),
        Step("engine 2 to v2", lambda fleet: fleet.upgrade(1)),
        Step("server to v2", lambda fleet: fleet.serve_v2(accept_v1=False)),
    ]


def rehearse(fleet: Fleet, steps: list[Step]) -> list[str]:
    """Do the steps under traffic, fill in what they showed, and say what is wrong with it.

    Raises:
        RehearsalError: a step could not be done, or did not come to its end.
    """
    problems: list[str] = []
    with stderr.status("starting") as shown:
        fleet.start()
        for step in steps:
            shown.update(step.title)
            step.do(fleet)
            for engine in fleet.engines:
                engine.await_hits(STEP_SECONDS)
            step.server = fleet.serves
            step.speaks = tuple(one.engine.speaks for one in fleet.engines)
            for one in fleet.engines:
                step.counts.add(one.take_counts())
                wanted = "v1" if one.engine.schema == 1 else "v2t" if fleet.serves == "v1" else "v2"
                if one.engine.speaks != wanted:
                    problems.append(f"{step.title}: {one.name} speaks {one.engine.speaks}, wanted {wanted}")
            if step.counts.wrong:
                problems.append(f"{step.title}: {step.counts.wrong} wrong hits")
    if not steps[0].counts.among_v1:
        problems.append("v1 engines served each other no wrong hit: the detector is not shown to work")
    return problems


def table_of(title: str, steps: list[Step]) -> Table:
    """A row a step."""
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="fleet: server | engines. v2t: v2 through the tunnel; v2+v1: takes both.\n"
        "v1 wrong: v1 engines were served each other's KV, as they are today.\n"
        "wrong: any other wrong hit; must be 0. All counts are of requests.",
    )
    table.add_column("step")
    table.add_column("fleet", no_wrap=True)
    for header in ("requests", "hits", "misses", "bypasses", "v1\nwrong", "wrong"):
        table.add_column(header, justify="right", no_wrap=True)
    for step in steps:
        counts = step.counts
        table.add_row(
            step.title,
            f"{step.server} | {' '.join(step.speaks)}",
            *map(str, (counts.requests, counts.hits, counts.misses, counts.bypassed)),
            f"[yellow]{counts.among_v1}[/yellow]",
            f"[bold red]{counts.wrong}[/bold red]" if counts.wrong else "[green]0[/green]",
        )
    return table


# ---- the command


class Order(StrEnum):
    """Which of the two orders of MIGRATION.md."""

    BOTH = "both"
    SERVERS_FIRST = "servers-first"
    CLIENTS_FIRST = "clients-first"


class Parties(StrEnum):
    """Who plays v1."""

    AUTO = "auto"
    LMCACHE = "lmcache"
    STAND_INS = "stand-ins"


ORDERS: dict[Order, Callable[[], list[Step]]] = {
    Order.SERVERS_FIRST: servers_first,
    Order.CLIENTS_FIRST: clients_first,
}


def main(
    order: Annotated[Order, typer.Option(help="Which roll-out to rehearse.")] = Order.BOTH,
    v1: Annotated[
        Parties, typer.Option(help="auto: LMCache's own server and client if .venv-lmcache is there, else stand-ins.")
    ] = Parties.AUTO,
) -> None:
    """Rehearse the upgrade of a fleet (one server, two engines) from LMCache 0.5.x to v2, under traffic.

    Each order of roll-out of MIGRATION.md is done step by step, with a roll-back. The table says for each step what
    became of the requests. Exit code 1 on a wrong hit that is not v1 engines' among themselves, or when a step shows
    nothing. Takes about half a minute; listens on 127.0.0.1 only.
    """
    logging.basicConfig(level=logging.ERROR)  # servers that come and go are warned of
    released = Released.is_installed() if v1 is Parties.AUTO else v1 is Parties.LMCACHE
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rolling-upgrade-") as name, contextlib.ExitStack() as stack:
        begun = time.monotonic()
        folder = Path(name)
        parties: V1Parties = Released(folder) if released else StandIns()
        stack.callback(parties.close)
        stdout.print(f"v1: {parties.name}", highlight=False)
        fleets = {one: Fleet(parties, folder / one) for one in (ORDERS if order is Order.BOTH else [order])}
        for fleet in fleets.values():  # servers that take their time to start have begun to
            stack.callback(fleet.close)
        for one, fleet in fleets.items():
            steps = ORDERS[one]()
            try:
                problems += [f"{one}: {problem}" for problem in rehearse(fleet, steps)]
            except RehearsalError as error:
                problems.append(f"{one}: {error}")
            fleet.close()
            stdout.print(table_of(one.value.replace("-", " "), [step for step in steps if step.server]))
    for problem in problems:
        stderr.print(f"[red]problem:[/red] {problem}", highlight=False)
    if not problems:
        stdout.print(
            f"No wrong hit on the v2 side, and v1 engines were never served v2 KV ({time.monotonic() - begun:.0f} s).",
            highlight=False,
        )
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
