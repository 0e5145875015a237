"""Engines, models and a cache server for all tests of this folder; what their processes logged, where a test fails."""

import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.cache_server import Server
from tests.e2e.engines import Engines

LOG_LINES = 30
"""Of each process, shown where a test fails."""

FOLDER = pytest.StashKey[Path]()


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A short path for sockets, logs and models."""
    with tempfile.TemporaryDirectory(prefix="xk-e2e-") as made:
        request.config.stash[FOLDER] = Path(made)
        yield Path(made)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The folder goes with the run, so a test that fails takes along what the processes logged until then."""
    report = yield
    place = item.config.stash.get(FOLDER, None)
    if report.failed and place is not None:
        for log in sorted(place.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            report.sections.append((f"end of {log.relative_to(place)}", "\n".join(lines)))
    return report


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
