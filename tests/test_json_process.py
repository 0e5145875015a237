"""The process that tests drive by lines of JSON: every way in which it can end or hang comes back as an error."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.json_process import JsonProcess, JsonProcessError

SCRIPT = """
import faulthandler, json, os, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1)
print("to the log", file=sys.stderr, flush=True)
print(json.dumps({"result": "ready"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["call"] == "add":
        print(json.dumps({"result": asked["a"] + asked["b"]}), flush=True)
    elif asked["call"] == "fail":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
    elif asked["call"] == "die":
        sys.exit(3)
    elif asked["call"] == "hang":  # and a child holds the output open
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, file=sys.stderr, flush=True)
        time.sleep(60)
    elif asked["call"] == "linger":
        os.close(1)
        time.sleep(60)
"""


class SomeError(JsonProcessError):
    """Of a subclass."""


class Some(JsonProcess):
    """A subclass with an error of its own."""

    error = SomeError


def started(folder: Path, **options: bool) -> Some:
    """The script above, started."""
    (folder / "script.py").write_text(SCRIPT)
    return Some(Path(sys.executable), folder / "script.py", folder / "log", dict(os.environ), seconds=60, **options)


def test_results_and_errors_come_back(tmp_path: Path) -> None:
    """A result as it is, an error as the caller's own kind; the process goes on after it."""
    with started(tmp_path) as process:
        assert 3 == process.call("add", a=1, b=2)
        with pytest.raises(SomeError, match="ValueError: no"):
            process.call("fail")
        assert 5 == process.call("add", a=2, b=3)


def test_an_end_says_what_was_printed_last(tmp_path: Path) -> None:
    """In the call during which it ended, and in each one after that."""
    with started(tmp_path) as process:
        for _ in range(2):
            with pytest.raises(SomeError, match=r"the process ended:\nto the log"):
                process.call("die")


def test_a_hang_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    """After the seconds that it had; its stacks are in the error where the script can write them."""
    with started(tmp_path, asks_where=True) as process:
        assert 3 == process.call("add", a=1, b=2)
        process._seconds = 2.0
        with pytest.raises(SomeError, match="did not answer within 2 s and was killed") as caught:
            process.call("hang")
        assert "script.py" in str(caught.value)
        child = int((tmp_path / "log").read_text().splitlines()[1])
        ends = time.monotonic() + 30
        while _lives(child) and time.monotonic() < ends:
            time.sleep(0.01)  # nothing tells of the end of a process that is nobody's child here
        assert not _lives(child)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_one_that_does_not_end_by_itself_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing never waits longer than it says."""
    monkeypatch.setattr("tests.json_process.ENDING", 0.2)
    process = started(tmp_path)
    with pytest.raises(SomeError, match="ended"):
        process.call("linger")
    process.close()
    assert process._process.returncode == -9
