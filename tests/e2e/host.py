"""A process with a real engine in it, from the test's side."""

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.e2e.environment import PYTHON, engine_environment

SCRIPT = Path(__file__).parent / "engine" / "engine_host.py"


class HostError(Exception):
    """What the engine's process raised, as text."""


class Host:
    """A process with an engine in it.

    Args:
        log: file that takes what it prints.
        more: folders with further modules for it.
    """

    def __init__(self, log: Path, *more: Path) -> None:
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [PYTHON, SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=engine_environment(*more),
                cwd=log.parent,
                text=True,
            )
        self._log = log
        self._ready = False

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Call a method of the host script.

        Raises:
            HostError: it raised; the text begins with the type.
        """
        if not self._ready:  # imports take seconds: the first call waits for them, not the constructor
            self._ready = bool(self._read())
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise HostError(f"the engine's process ended:\n{self._log.read_text()[-6000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer["result"]

    def finish(self) -> None:
        """Ask the process to end, without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """End the process and wait for it."""
        self.finish()
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
