"""The breaker before a remote tier."""

from __future__ import annotations

from protocol_v2.tiers import TierFullError, TierIOError, TierReadOnlyError
from protocol_v2.tiers.breaker import Breaker


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def test_it_opens_after_failures_in_a_row_only() -> None:
    """Two failures, a success and two failures pass; three in a row do not, and that is counted once."""
    breaker = Breaker(Clock())
    for ends in (False, False, True, False, False):
        (breaker.succeeded if ends else breaker.failed)()
        assert not breaker.is_open
    breaker.failed()
    assert (True, 1) == (breaker.is_open, breaker.trips)
    breaker.failed()
    assert (True, 1) == (breaker.is_open, breaker.trips)


def test_that_a_store_is_full_or_read_only_is_an_answer() -> None:
    """Only silence opens it: a store that refuses writes may well serve."""
    breaker = Breaker(Clock())
    for error in (
        TierIOError("x"),
        TierIOError("x"),
        TierFullError("x"),
        TierIOError("x"),
        TierReadOnlyError("x"),
        None,
    ):
        breaker.note(error)
    assert not breaker.is_open
    for _ in range(3):
        breaker.note(TierIOError("x"))
    assert breaker.is_open


def test_one_probe_at_a_time_and_later_each_time() -> None:
    """A probe is due after a pause, nobody else's until it has ended, and the pause doubles up to a bound."""
    clock = Clock()
    breaker = Breaker(clock, threshold=1, first_pause=1.0, longest_pause=4.0)
    assert not breaker.take_probe()
    breaker.failed()
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.now += pause - 0.01
        breaker.failed()  # of a call that began before: it delays nothing
        assert not breaker.take_probe()
        clock.now += 0.01
        assert breaker.take_probe()
        clock.now += 100.0
        assert not breaker.take_probe()
        breaker.failed()
    clock.now += 4.0
    assert breaker.take_probe()
    breaker.succeeded()
    assert (False, False) == (breaker.is_open, breaker.take_probe())
    breaker.failed()
    clock.now += 1.0
    assert breaker.take_probe()
    assert 2 == breaker.trips
