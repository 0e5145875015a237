"""Engines, models and a cache server for all tests of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cache_server import Server
from tests.e2e.engines import Engines


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A short path for sockets, logs and models."""
    with tempfile.TemporaryDirectory(prefix="xk-e2e-") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    """A cache server that all tests share: each has prompts, or a model or chunk size, of its own."""
    place = folder / "shared"
    place.mkdir()
    server = Server(place).start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def engines(folder: Path, server: Server) -> Iterator[Engines]:
    """The processes with engines."""
    engines = Engines(folder, server.address)
    yield engines
    engines.close()


@pytest.fixture
def own_server(folder: Path) -> Iterator[Server]:
    """A cache server of the test's own, with a disk tier, to be killed and restarted."""
    with tempfile.TemporaryDirectory(prefix="own-", dir=folder) as place:
        server = Server(Path(place), store=Path(place) / "store").start()
        yield server
        server.stop()
