"""One real server and one process of real clients for all tests of this folder; none of them when not installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.environment import MISSING, STAMP
from tests.interop.real_client import RealClient
from tests.interop.real_server import RealServer


@pytest.fixture(scope="session")
def peer_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the peers' output goes."""
    return tmp_path_factory.mktemp("lmcache")


@pytest.fixture(scope="session")
def lmcache_processes(peer_logs: Path) -> Iterator[tuple[RealServer, RealClient]]:
    """The released server (chunk size 16) and client, started side by side."""
    if not STAMP.exists():
        pytest.skip(MISSING)
    server = RealServer(peer_logs / "server.log").launch()
    try:
        with RealClient(peer_logs / "client.log") as client:
            yield server.wait_ready(), client
    finally:
        server.stop()


@pytest.fixture(scope="session")
def real_server(lmcache_processes: tuple[RealServer, RealClient]) -> RealServer:
    """The released server; tests use models of their own."""
    return lmcache_processes[0]


@pytest.fixture(scope="session")
def real_client(lmcache_processes: tuple[RealServer, RealClient]) -> RealClient:
    """The released client, in a process of its own."""
    return lmcache_processes[1]
