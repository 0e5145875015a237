"""A process with a real engine in it, from the test's side."""

from pathlib import Path

from tests.e2e.environment import PYTHON, SGLANG, engine_environment
from tests.json_process import JsonProcess, JsonProcessError

SCRIPT = Path(__file__).parent / "engine" / "engine_host.py"
SCHEDULER_SCRIPT = SCRIPT.with_name("scheduler_host.py")
SGLANG_SCRIPT = SCRIPT.with_name("sglang_host.py")

SECONDS = 600.0
"""That a call may take: starting an engine takes 3 to 30 on an idle machine, and ten times that on a busy one."""


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


class SchedulerHost(JsonProcess):
    """A process with vLLM's own schedulers in it.

    Args:
        log: file that takes what it prints.
    """

    error = HostError

    def __init__(self, log: Path) -> None:
        super().__init__(PYTHON, SCHEDULER_SCRIPT, log, engine_environment(), seconds=SECONDS)


class SglangHost(JsonProcess):
    """A process with SGLang's own classes in it.

    Args:
        log: file that takes what it prints.
    """

    error = HostError

    def __init__(self, log: Path) -> None:
        super().__init__(PYTHON, SGLANG_SCRIPT, log, engine_environment(SGLANG), seconds=SECONDS)
