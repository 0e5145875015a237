"""A real redis-server as a process: a port and a Unix socket of its own, nothing on disk, ended by its id."""

import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
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
    """A running server.

    Attributes:
        port: on 127.0.0.1.
        socket_path: of its Unix socket.
        process: its process.
    """

    def __init__(self, port: int, socket_path: Path, process: "subprocess.Popen[str]", password: str | None) -> None:
        self.port = port
        self.socket_path = socket_path
        self.process = process
        self._password = password

    @property
    def url(self) -> str:
        """Of database 0, without a password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, db: int = 0) -> Any:
        """A client of a database, which the caller closes (or uses in a `with`)."""
        return redis.Redis(host="127.0.0.1", port=self.port, db=db, password=self._password, socket_timeout=30)

    def stop(self) -> None:
        """End the process and wait for it."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def redis_server(*options: str, password: str | None = None) -> Iterator[RedisServer]:
    """Start a server and wait until it says that it is ready."""
    assert PROGRAM is not None, MISSING
    with tempfile.TemporaryDirectory(prefix="extra-keys-redis-") as folder:  # a short path: sockets have 107 bytes
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        socket_path = Path(folder) / "redis.sock"
        secret = () if password is None else ("--requirepass", password)
        process = subprocess.Popen(
            [
                *(PROGRAM, "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(socket_path)),
                *("--save", "", "--appendonly", "no", "--dir", folder, "--daemonize", "no", *secret, *options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        server = RedisServer(port, socket_path, process, password)
        watchdog = threading.Timer(START_SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if "Ready to accept connections" in line or "now ready to accept connections at" in line:
                    break
            else:
                raise AssertionError(f"redis-server ended:\n{said}")
            watchdog.cancel()
            yield server
        finally:
            watchdog.cancel()
            server.stop()
