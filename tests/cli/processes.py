"""The command as a user starts it: a process of its own, its output read line by line, always ended."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SECONDS = 60


class Serve:
    """A running ``extra-keys serve``."""

    def __init__(self, process: "subprocess.Popen[str]", address: str, announced: str) -> None:
        self.process = process
        self.address = address
        self.announced = announced

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; exit code, rest of the output, errors."""
        self.process.send_signal(how)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err


@contextmanager
def serving(
    *options: str, cache_home: Path, environment: Mapping[str, str] | None = None, limit: str = ""
) -> Iterator[Serve]:
    """Start ``extra-keys serve`` and wait until it says where it listens.

    Args:
        options: of the command.
        cache_home: its cache folder.
        environment: what is different in its environment.
        limit: what the shell's ``ulimit`` is told before; empty for nothing.
    """
    command = [sys.executable, "-m", "extra_keys_cli", "serve", *options]
    if limit:
        command = ["/bin/sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *command]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache_home)} | dict(environment or {}),
    )
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        announced = ""
        for line in process.stdout:
            announced += line
            if line.startswith("listening on "):
                yield Serve(process, line.removeprefix("listening on ").strip(), announced)
                return
        raise AssertionError(f"it ended with {process.wait()}: {process.communicate()[1]}")
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
            process.communicate()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def run(
    *arguments: str, cache_home: Path | None = None, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """One command to its end, with what is different in its environment."""
    home = {"XDG_CACHE_HOME": str(cache_home)} if cache_home else {}
    return subprocess.run(
        [sys.executable, "-m", "extra_keys_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"COLUMNS": "200"} | home | dict(environment or {}),
        check=False,
    )
