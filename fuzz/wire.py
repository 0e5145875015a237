"""Fuzz target for the wire: bytes give events or `RemoteProtocolError`, nothing else, within the memory limit.

See README.md. `Fuzzer(seed).run(n)` is what the tests call; `python -m fuzz.wire` runs for long.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keying import KeySpace
from protocol_v2 import ClientConnection, ClientTerms, Limits, ServerConnection, ServerTerms, State, answer_hello
from protocol_v2.capability import is_probe, read_answer
from protocol_v2.errors import RemoteProtocolError
from protocol_v2.events import AnswerHello, HelloReceived, RequestReceived, SayHello, SendRequest
from protocol_v2.frames import PRELUDE, PRELUDE_BYTES, Frame
from protocol_v2.identity import resolve_keys
from protocol_v2.messages import (
    ClearRequest,
    LookupRequest,
    PingRequest,
    PrefetchRequest,
    ReleaseRequest,
    Request,
    RetrieveRequest,
    StatusRequest,
)
from protocol_v2.tensors import to_numpy
from protocol_v2.wire_keys import Keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol_v2 import Connection

Message = list[bytes]

VECTORS = Path(__file__).parents[1] / "tests" / "vectors" / "wire-2.json"
SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
LIMITS = Limits(max_payload_bytes=1 << 20, max_pending=64)

MEMORY_FACTOR = 64
MEMORY_FLOOR = 1 << 20
"""A message of n bytes may cost at most MEMORY_FLOOR + MEMORY_FACTOR * n bytes while it is read."""

_TASTY = (
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xcb\x7f\xf8" + bytes(6),
    b"\xc0",
    b"\xc1",
    b"\xc2",
    b"\xc7\x00\x01",
    b"\xa1\xff",
    b"\x91" * 2000,
    b"\x81\xa1x" * 2000,
    b"\x80",
    b"\x90",
    b"\xc4\x00",
)
_QUESTIONS: tuple[Request, ...] = (
    LookupRequest(session="r", keys=Keys(digests=bytes(96))),
    PrefetchRequest(session="r", keys=Keys(digests=bytes(96))),
    RetrieveRequest(lease=bytes(16), count=3),
    ReleaseRequest(lease=bytes(16)),
    PingRequest(),
    StatusRequest(),
    ClearRequest(scope="all"),
)


class BreachError(AssertionError):
    """The invariant does not hold; the message names the input."""


class Fuzzer:
    """A stream of spoilt messages, determined by its seed, and the two sides they are fed to."""

    def __init__(self, seed: int, *, corpus: Sequence[Message] | None = None) -> None:
        self.random = random.Random(seed)
        self.corpus = list(corpus if corpus is not None else load_corpus())
        self.counts = {"events": 0, "errors": 0, "nothing": 0}
        self.client, self.server = _open_pair()

    def run(self, runs: int, *, trace_memory: bool = False) -> None:
        """Feed `runs` messages to both sides.

        Raises:
            BreachError: the invariant does not hold.
        """
        for _ in range(runs):
            if self.random.random() < 0.02 or State.OPEN not in {self.client.state, self.server.state}:
                self.client, self.server = _open_pair()
            message = self.spoilt()
            for side in (self.server, self.client):
                self.feed(side, message, trace_memory=trace_memory)

    def feed(self, side: Connection, message: Message, *, trace_memory: bool = False) -> None:
        """One message to one side, and what an owner would do with what comes of it."""
        if trace_memory:
            tracemalloc.start()
        try:
            self._receive(side, message)
        except Exception as error:
            raise BreachError(f"{type(error).__name__} from {[frame.hex() for frame in message]}") from error
        finally:
            if trace_memory:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
        if trace_memory and peak > MEMORY_FLOOR + MEMORY_FACTOR * sum(map(len, message)):
            raise BreachError(f"{peak} bytes for {[frame.hex() for frame in message]}")

    def spoilt(self) -> Message:
        """A valid message with a few things wrong."""
        pick = self.random
        message = [bytes(frame) for frame in pick.choice(self.corpus)]
        for _ in range(pick.choice((0, 1, 1, 1, 2, 3, 8))):
            self._spoil(message)
        if len(message) > 2 and len(message[2]) >= PRELUDE_BYTES and pick.random() < 0.8:
            self._belong(message)
        return message

    def _spoil(self, message: Message) -> None:
        pick = self.random
        kind = pick.randrange(9)
        if kind == 0 and message:
            del message[pick.randrange(len(message))]
        elif kind == 1:
            message.insert(pick.randint(0, len(message)), pick.choice((b"", b"x", b"\x18", bytes(40))))
        elif kind == 2 and len(message) > 1:
            message.append(message[pick.randrange(len(message))])
        elif message:
            at = pick.choice((2, 2, 2, pick.randrange(len(message)))) % len(message)
            message[at] = self._spoilt_bytes(message[at], kind)

    def _spoilt_bytes(self, data: bytes, kind: int) -> bytes:
        pick = self.random
        place = pick.randint(0, len(data))
        if kind == 3:
            return data[:place]
        if kind == 4:
            return data[:place] + pick.choice(_TASTY) + data[place:]
        if kind == 5:
            return data[:place] + pick.choice(_TASTY) + data[place + pick.randint(1, 9) :]
        if kind == 6:
            other = pick.choice(pick.choice(self.corpus))
            return data[:place] + other[pick.randint(0, len(other)) :]
        if kind == 7 and data:
            spot = pick.randrange(len(data))
            return data[:spot] + bytes([data[spot] ^ (1 << pick.randrange(8))]) + data[spot + 1 :]
        return data[:place] + pick.randbytes(pick.randint(1, 8)) + data[place:]

    def _belong(self, message: Message) -> None:
        """Give a message the transcript of the session, and sometimes the id of a question that is pending."""
        code, flags, deadline, request_id, _ = PRELUDE.unpack_from(message[2])
        digest = (self.client.transcript or bytes(8))[:8]
        if self.random.random() < 0.5 and self.client.pending:
            request_id = self.random.choice(sorted(self.client._pending))  # noqa: SLF001  (the questions that are open)
        message[2] = struct.pack("<HHIQ8s", code, flags, deadline, request_id, digest) + message[2][PRELUDE_BYTES:]

    def _receive(self, side: Connection, message: Message) -> None:
        frames: list[Frame] = [*message]
        is_probe(frames)
        read_answer(frames, 7)
        try:
            events = side.receive_frames(frames, 1.0)
            for event in events:
                if isinstance(event, HelloReceived) and isinstance(side, ServerConnection):
                    side.send(AnswerHello(event.request_id, answer_hello(event, _server_terms())), 1.0)
                if isinstance(event, RequestReceived):
                    _use(event)
        except RemoteProtocolError as error:
            self.counts["errors"] += 1
            if isinstance(side, ServerConnection):
                side.error_reply(error)
            return
        self.counts["events" if events else "nothing"] += 1


def load_corpus() -> list[Message]:
    """The valid messages of the vectors."""
    cases = json.loads(VECTORS.read_text())["messages"]
    return [[bytes.fromhex(frame) for frame in case["frames"]] for case in cases]


def _use(event: RequestReceived) -> None:
    """What a server does first with a request."""
    keys = getattr(event.message, "keys", None)
    if isinstance(keys, Keys):
        resolve_keys(keys, SPACE, max_chunks=LIMITS.max_chunks)
    metas = [meta for chunk in getattr(event.message, "tensors", ()) for meta in chunk]
    for meta, frame in zip(metas, event.payload, strict=False):
        if to_numpy(meta, frame).dtype == np.dtype(object):
            raise TypeError("no tensor of objects travels")


def _server_terms() -> ServerTerms:
    return ServerTerms(bytes(16), limits=LIMITS)


def _open_pair() -> tuple[ClientConnection, ServerConnection]:
    """Two sides with an open session, and one of each question pending."""
    client, server = ClientConnection(ClientTerms(bytes(16), SPACE)), ServerConnection(_server_terms())
    (hello,) = server.receive_frames(client.send(SayHello(client.new_request_id()), 0.0), 0.0)
    if not isinstance(hello, HelloReceived):
        raise TypeError("no hello came through")
    client.receive_frames(server.send(AnswerHello(hello.request_id, answer_hello(hello, _server_terms())), 0.0), 0.0)
    for question in _QUESTIONS:
        client.send(SendRequest(client.new_request_id(), question, timeout=100.0), 0.0)
    return client, server


def main() -> int:
    """Run for long; 1 if the invariant was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFFFFFF)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=0, help="stop after so many messages instead")
    options = parser.parse_args()
    fuzzer, done, ends = Fuzzer(options.seed), 0, time.monotonic() + options.seconds
    try:
        while done < options.runs or (not options.runs and time.monotonic() < ends):
            fuzzer.run(1000, trace_memory=done % 10_000 == 0)
            done += 1000
    except BreachError as error:
        sys.stdout.write(f"seed {options.seed}: {error}\n")
        return 1
    sys.stdout.write(f"seed {options.seed}: {done} messages to both sides, {fuzzer.counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
