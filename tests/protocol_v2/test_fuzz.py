"""A short seeded run of the fuzzer, messages it once broke on, and a control that it would see a breach."""

from collections.abc import Sequence

import pytest

from fuzz.wire import BreachError, Fuzzer
from protocol_v2 import ServerConnection
from protocol_v2.events import Event
from protocol_v2.frames import Frame


def test_bytes_give_events_or_a_protocol_error() -> None:
    """20,000 spoilt messages to both sides: nothing else comes out, and all three outcomes are reached."""
    fuzzer = Fuzzer(20_260_101)
    fuzzer.run(10_000)
    assert all(count > 500 for count in fuzzer.counts.values()), fuzzer.counts


def test_no_message_costs_more_memory_than_its_size_allows() -> None:
    """A fixed multiple of the message's own size, also for lengths that promise four billion entries."""
    Fuzzer(7).run(1_000, trace_memory=True)


def test_a_run_is_determined_by_its_seed() -> None:
    """A breach can be met again."""
    one, other = Fuzzer(4), Fuzzer(4)
    assert [one.spoilt() for _ in range(50)] == [other.spoilt() for _ in range(50)]


class _Leaky(ServerConnection):
    """A server whose decoder lets a foreign exception or too much memory through."""

    greedy = False

    def receive_frames(self, frames: Sequence[Frame], now: float) -> list[Event]:
        """Break the invariant."""
        if self.greedy:
            self.hoard = bytearray(8 << 20)
            return []
        raise RecursionError(len(frames) + now)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_breach_would_be_seen(greedy: bool) -> None:
    """Negative control: a foreign exception and a hoard of memory are both reported, with the input."""
    fuzzer = Fuzzer(1)
    leaky = _Leaky(fuzzer.server._terms)
    leaky.greedy = greedy
    with pytest.raises(BreachError, match="58"):
        fuzzer.feed(leaky, [b"XK2\0"], trace_memory=True)
