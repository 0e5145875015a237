"""An `os` that fails, dies or refuses at a chosen system call, for the modules of the disk tier."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, Final

from protocol_v2.tiers import disk, files, ownership, quarantine, scan

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

CALLS: Final = frozenset(
    {"open", "writev", "fsync", "rename", "unlink", "rmdir", "mkdir", "utime", "pread", "pwrite", "fstat", "close"}
)
MODULES: Final = (disk, files, ownership, quarantine, scan)


class Killed(BaseException):
    """The process is dead: no handler for `Exception` or `OSError` runs."""


class FaultyOs:
    """Stands in for the module `os`.

    Args:
        decide: told each system call with its number, from 1; returns an errno to fail with, `Killed`, or None.

    Attributes:
        calls: names of the calls made, in order.
        names: longest name that may be part of a path.
    """

    def __init__(self, decide: Callable[[int, str], int | type[Killed] | None]) -> None:
        self._decide = decide
        self._dead = False
        self.calls: list[str] = []
        self.names = 255

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._dead:
                raise Killed
            self.calls.append(name)
            verdict = self._decide(len(self.calls), name)
            if verdict is Killed:
                self._dead = True
                raise Killed
            if isinstance(verdict, int):
                raise OSError(verdict, os.strerror(verdict))
            for path in args[:2]:
                if isinstance(path, str | os.PathLike):
                    self._check_name(os.fspath(path))
            return real(*args, **kwargs)

        return call

    def _check_name(self, path: str) -> None:
        if any(len(part.encode()) > self.names for part in path.split("/")):
            raise OSError(errno.ENAMETOOLONG, "name too long")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FaultyOs:
        """Give it to the modules of the disk tier."""
        for module in MODULES:
            monkeypatch.setattr(module, "os", self)
        return self


def never(_number: int, _name: str) -> None:
    """Nothing fails."""


def at(number: int, verdict: int | type[Killed]) -> Callable[[int, str], int | type[Killed] | None]:
    """Only one call fails."""
    return lambda count, _name: verdict if count == number else None


def always(name: str, verdict: int) -> Callable[[int, str], int | None]:
    """Every call of one name fails."""
    return lambda _count, called: verdict if called == name else None
