"""`LoopLag`: how late a loop comes to its timers, whatever held it up: a handler, the machine, a stopped process."""

from __future__ import annotations

from typing import Final

WINDOW_SECONDS: Final = 1.0
"""The worst of the last one to two of these is told, so that a stall is seen by whoever asks soon after it."""


class LoopLag:
    """Lateness of a loop; it belongs to the loop.

    Args:
        now: seconds, monotonic, as all moments here.
    """

    def __init__(self, now: float) -> None:
        self._due = now
        self._window_ends = now + WINDOW_SECONDS
        self._before = self._worst = 0.0

    def promise(self, due: float) -> float:
        """The loop means to come at this moment; gives it back."""
        self._due = due
        return due

    def came(self, now: float) -> None:
        """It has come."""
        late = now - self._due
        if now >= self._window_ends:
            self._before, self._worst = self._worst, 0.0
            self._window_ends = now + WINDOW_SECONDS
        self._worst = max(self._worst, late)

    def seconds(self, now: float) -> float:
        """How late it was at most, lately; what it is late by at this moment counts."""
        return max(self._before, self._worst, now - self._due, 0.0)
