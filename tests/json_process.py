"""A process of another environment that answers lines of JSON, from the test's side.

    in    {"call": "store", ...}
    out   {"result": true}    or    {"error": "TimeoutError: ..."}

Its first line says that it is ready. Every wait has an end: a process that does not answer is killed, and what it
printed last is in the error.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

ENDING = 30.0
"""Seconds that a process has to end by itself once its input is closed."""

LOG_TAIL = 6000


class JsonProcessError(Exception):
    """What the process raised, as text that begins with the type; or that it ended, or was killed, and its log."""


class JsonProcess:
    """A process that answers lines of JSON.

    Args:
        python: interpreter of its environment.
        script: what it runs.
        log: file that takes what it prints.
        environment: its variables.
        seconds: that an answer may take.
        asks_where: send SIGUSR1 before it is killed, to a script that then writes its stacks to the log.
    """

    error: ClassVar[type[JsonProcessError]] = JsonProcessError
    """What `call` raises."""

    def __init__(
        self,
        python: Path,
        script: Path,
        log: Path,
        environment: Mapping[str, str],
        *,
        seconds: float,
        asks_where: bool = False,
    ) -> None:
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [python, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(environment),
                cwd=log.parent,
                text=True,
                start_new_session=True,  # so that what it starts can be killed with it
            )
        self._log = log
        self._seconds = seconds
        self._asks_where = asks_where
        self._late = False
        self._ready = False

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Call something of the script.

        Raises:
            JsonProcessError: see there; of the class's own kind.
        """
        if not self._ready:  # imports take seconds: the first call waits for them, not the constructor
            self._ready = bool(self._read())
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def finish(self) -> None:
        """Ask the process to end, without waiting."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return  # it is gone, with a line that was never written

    def close(self) -> None:
        """End the process and wait for it."""
        self.finish()
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._seconds, self._give_up)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise self.error(answer["error"])
        return answer["result"]

    def _give_up(self) -> None:
        """In the watchdog's thread: the reader then sees the end of the output."""
        self._late = True
        if self._asks_where:
            self._process.send_signal(signal.SIGUSR1)
            threading.Event().wait(1)  # its stacks are written by a signal handler, which says nothing when it is done
        self._kill()

    def _kill(self) -> None:
        """The process and whatever it started, which may hold its output open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> JsonProcessError:
        what = f"did not answer within {self._seconds:.0f} s and was killed" if self._late else "ended"
        return self.error(f"the process {what}:\n{self._log.read_text(errors='replace')[-LOG_TAIL:]}")
