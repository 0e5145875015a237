"""The fleet of the rehearsal: requests, engines of both versions that check what they are served, and the servers.

What an engine "computes" for a chunk is a number that belongs to what the chunk's KV depends on and to the engine's
schema, so a wrong hit is seen, and whose it was.
"""

import contextlib
import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from compat import TunnelPolicy
from compat.v1 import V1Generation, v1_token_ids
from examples.v1_parties import CHUNK, LAYERS, WIDTH, NoCacheError, V1Cache, V1Parties, V1Server, free_port, uniform
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

PACE_SECONDS = 0.003
COMPUTE_SECONDS = 0.05
"""That a request takes longer where there is no cache."""

V2_ANSWER_SECONDS = 2.0
SERVER_SECONDS = 20.0


class RehearsalError(RuntimeError):
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
            if len(found) < len(computed):
                with contextlib.suppress(NoCacheError):  # the server went in between: it was answered all the same
                    engine.store(prompt, computed[len(found) :])
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
