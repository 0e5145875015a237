"""`Breaker`: after failures in a row nobody asks any more, until a probe says that it works again.

Closed, all calls pass. After `threshold` failures in a row it opens: callers do without. One probe is due after a
while, which doubles with each probe that fails; the first success, whoever has it, closes it. Thread-safe.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from protocol_v2.tiers.base import TierFullError, TierReadOnlyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol_v2.tiers.base import TierError

_UNDER_WAY: Final = float("inf")
"""When the next probe is due while one is under way."""


class Breaker:
    """Whether something is worth asking.

    Args:
        clock: seconds, monotonic.
        threshold: failures in a row that open it.
        first_pause: seconds from opening to the first probe.
        longest_pause: seconds between probes at most.

    Attributes:
        trips: how often it opened.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        threshold: int = 3,
        first_pause: float = 0.5,
        longest_pause: float = 15.0,
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._lock = threading.Lock()
        self._failures = 0
        self._open = False
        self._pause = first_pause
        self._probe_at = 0.0
        self.trips = 0

    @property
    def is_open(self) -> bool:
        """Whether callers should do without."""
        return self._open

    def note(self, error: TierError | None) -> None:
        """How a call ended. That a store is full or takes no writes is an answer: others may well be served."""
        if error is None or isinstance(error, TierFullError | TierReadOnlyError):
            self.succeeded()
        else:
            self.failed()

    def succeeded(self) -> None:
        """A call was answered."""
        with self._lock:
            self._failures = 0
            self._open = False
            self._pause = self._first_pause

    def failed(self) -> None:
        """A call was not answered."""
        with self._lock:
            self._failures += 1
            if self._open and self._probe_at != _UNDER_WAY:
                return  # a call that began before it opened says nothing new
            if self._open:
                self._pause = min(self._longest_pause, 2 * self._pause)
            elif self._failures < self._threshold:
                return
            else:
                self._open = True
                self.trips += 1
            self._probe_at = self._clock() + self._pause

    def take_probe(self) -> bool:
        """Whether it is open and a probe is due; the caller makes it, and nobody else until its outcome is told."""
        with self._lock:
            if not self._open or self._clock() < self._probe_at:
                return False
            self._probe_at = _UNDER_WAY
            return True
