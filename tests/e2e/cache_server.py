"""The cache server as users run it: ``extra-keys serve``, a process of its own."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from protocol_v2.client import CacheClient
from protocol_v2.errors import ProtocolError

STARTING = 120.0
"""Seconds that a server has to start or to stop; it takes less than one on an idle machine."""


class Server:
    """A cache server in memory.

    Args:
        folder: for its socket and log; short, as socket paths are.
        store: folder of its disk tier; None for memory only.
        options: more of the command line.
    """

    def __init__(self, folder: Path, store: Path | None = None, *, options: Sequence[str] = ()) -> None:
        self._options = options
        self.address = f"ipc://{folder}/cache"
        self._log = folder / "server.log"
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start, and wait until it answers."""
        tier = ["--no-store"] if self._store is None else ["--store", str(self._store)]
        command = [
            str(Path(sys.executable).parent / "extra-keys"),
            "serve",
            "--listen",
            self.address,
            *tier,
            *self._options,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        ends = time.monotonic() + STARTING
        while True:
            try:
                self.facts()
            except ProtocolError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.05)  # nothing tells when a process begins to listen
            else:
                return self

    def kill(self) -> None:
        """As a machine that fails."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """In order."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STARTING)

    def facts(self) -> dict[str, Any]:
        """Its status."""
        with CacheClient(self.address) as client:
            client.wait_ready(10)
            return client.status()

    def left_over(self, timeout: float = 60.0) -> tuple[int, int]:
        """Leases and sessions that stand when they have had time to end; both 0 if all is given back."""
        ends = time.monotonic() + timeout
        while True:
            try:
                facts = self.facts()
            except ProtocolError:
                facts = {}
            left = facts.get("cache.leases", -1), facts.get("cache.sessions", -1)
            if left == (0, 0) or time.monotonic() > ends:
                return left
            time.sleep(0.05)  # the server says no event when a lease ends
