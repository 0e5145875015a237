"""A process with a real engine in it, from the test's side."""

from pathlib import Path

from tests.e2e.environment import PYTHON, engine_environment
from tests.json_process import JsonProcess, JsonProcessError

SCRIPT = Path(__file__).parent / "engine" / "engine_host.py"

SECONDS = 300.0
"""That a call may take: starting an engine takes 3 to 10 on an idle machine, a batch less."""


class HostError(JsonProcessError):
    """What the engine's process raised, as text."""


class Host(JsonProcess):
    """A process with an engine in it.

    Args:
        log: file that takes what it prints.
        more: folders with further modules for it.
    """

    error = HostError

    def __init__(self, log: Path, *more: Path) -> None:
        super().__init__(PYTHON, SCRIPT, log, engine_environment(*more), seconds=SECONDS, asks_where=True)
