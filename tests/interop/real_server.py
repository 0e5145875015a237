"""The released LMCache server as a process: a port from the operating system, ready when it answers, stopped by pid."""

import json
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from tests.interop.environment import PYTHON, peer_environment

START_SECONDS = 300.0
GET_CHUNK_SIZE = b"\x15"
"""Answered by every release: before 0.5.3 this number is the noop."""


class RealServer:
    """One server process.

    Args:
        log: file that takes what the server prints.
        chunk_size: tokens of a chunk.
        release: one of the older releases; None for 0.5.6.
        port: None: one that nobody listens on.
        adapter: where it keeps values beside its memory: type and fields of an L2 adapter, None for nowhere.
    """

    def __init__(
        self,
        log: Path,
        *,
        chunk_size: int = 16,
        release: str | None = None,
        port: int | None = None,
        adapter: Mapping[str, object] | None = None,
    ) -> None:
        self.chunk_size = chunk_size
        self.log = log
        self._release = release
        self._adapter = () if adapter is None else ("--l2-adapter", json.dumps(adapter))
        self._port = port if port is not None else free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> Self:
        """Start the process and return at once; `wait_ready` follows."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(PYTHON, "-m", "lmcache.v1.multiprocess.server"),
                    *("--host", "127.0.0.1", "--port", str(self._port), "--chunk-size", str(self.chunk_size)),
                    *("--l1-size-gb", "0.1", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
                    *("--supported-transfer-mode", "engine_driven", "--disable-observability"),
                    *("--shm-name", "", "--max-workers", "1", *self._adapter),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=peer_environment(self._release),
                cwd=self.log.parent,
            )
        return self

    def wait_ready(self) -> Self:
        """Wait until it answers a question.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of what it printed.
        """
        ends = time.monotonic() + START_SECONDS
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self.address)
            dealer.send_multipart([b"\x00", GET_CHUNK_SIZE])
            while self.alive and time.monotonic() < ends:
                if dealer.poll(500):
                    return self
        self.stop()
        raise RuntimeError(f"the LMCache server did not come up:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """End the process and wait for it. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # it keeps nothing that wants an orderly end, and takes seconds for one
        process.wait()

    def __enter__(self) -> Self:
        return self.launch().wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ask(address: str, frames: Sequence[bytes], seconds: float = 5.0) -> list[bytes] | None:
    """Send one multipart message from a fresh DEALER; the answer, or None for silence."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        dealer.send_multipart(list(frames))
        return dealer.recv_multipart() if dealer.poll(int(seconds * 1000)) else None
