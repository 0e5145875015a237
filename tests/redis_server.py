"""A real redis-server as a process: a port and a Unix socket of its own, nothing on disk, ended by its id."""

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

PROGRAM = shutil.which("redis-server")
MISSING = (
    "there is no redis-server on PATH, so nothing was tested against a real one; install it (Debian: apt-get install "
    "redis-server)"
)
START_SECONDS = 30
needs_redis = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


class RedisServer:
    """A server that can be started, frozen, killed and started again, empty each time.

    Args:
        folder: with a short path: sockets have 107 bytes.
        options: of ``redis-server``.
        password: of the default user; None for none.

    Attributes:
        port: on 127.0.0.1.
        socket_path: of its Unix socket.
        process: its process.
    """

    process: "subprocess.Popen[str]"

    def __init__(self, folder: Path, options: Sequence[str], password: str | None) -> None:
        assert PROGRAM is not None, MISSING
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.socket_path = folder / "redis.sock"
        self._password = password
        secret = () if password is None else ("--requirepass", password)
        self._command = [
            *(PROGRAM, "--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", str(self.socket_path)),
            *("--save", "", "--appendonly", "no", "--dir", str(folder), "--daemonize", "no", *secret, *options),
        ]

    @property
    def url(self) -> str:
        """Of database 0, without a password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, db: int = 0) -> Any:
        """A client of a database, which the caller closes (or uses in a `with`)."""
        return redis.Redis(host="127.0.0.1", port=self.port, db=db, password=self._password, socket_timeout=30)

    def start(self) -> None:
        """Start and wait until it says that it is ready."""
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        watchdog = threading.Timer(START_SECONDS, self.process.kill)
        watchdog.start()
        try:
            assert self.process.stdout is not None
            said = ""
            for line in self.process.stdout:
                said += line
                if "Ready to accept connections" in line or "now ready to accept connections at" in line:
                    return
            raise AssertionError(f"redis-server ended:\n{said}")
        finally:
            watchdog.cancel()

    def freeze(self) -> None:
        """It takes connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the process and wait for it; what it held is gone."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def redis_server(*options: str, password: str | None = None) -> Iterator[RedisServer]:
    """A running server."""
    with tempfile.TemporaryDirectory(prefix="extra-keys-redis-") as folder:
        server = RedisServer(Path(folder), options, password)
        try:
            server.start()
            yield server
        finally:
            server.stop()
