"""The allocator of shared memory: no range is given twice, nothing is lost, free neighbours are one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_v2.errors import LocalProtocolError
from protocol_v2.ranges import Ranges

SIZE = 24


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 30)), max_size=60))
def test_any_order_of_calls_keeps_ranges_apart(calls: list[tuple[bool, int, int]]) -> None:
    """As a model of granules says: ranges never overlap, the first that fits is given, all come together again."""
    ranges = Ranges(SIZE)
    taken: dict[int, int] = {}
    for takes, count, which in calls:
        granules = {granule for first, size in taken.items() for granule in range(first, first + size)}
        if takes:
            first = ranges.take(count)
            fits = [at for at in range(SIZE - count + 1) if not granules & set(range(at, at + count))]
            assert first == (fits[0] if fits else None)
            if first is not None:
                taken[first] = count
        elif taken:
            first = sorted(taken)[which % len(taken)]
            ranges.give_back(first, taken.pop(first))
        assert SIZE - sum(taken.values()) == ranges.free
    for first, count in taken.items():
        ranges.give_back(first, count)
    assert 0 == ranges.take(SIZE)


@pytest.mark.parametrize(("first", "count"), [(0, 3), (5, 2), (1, 4), (-1, 2), (23, 2), (2, 0), (2, -1)])
def test_what_was_not_taken_is_not_given_back(first: int, count: int) -> None:
    """A range that is free, in part too, or outside of the row, is refused, and the right one is not."""
    ranges = Ranges(SIZE)
    ranges.take(2)
    ranges.take(3)
    ranges.give_back(0, 2)
    with pytest.raises(LocalProtocolError, match="not all taken"):
        ranges.give_back(first, count)
    ranges.give_back(2, 3)
    assert SIZE == ranges.free


def test_nothing_fits_into_nothing() -> None:
    """An empty row has no range, and no range has fewer than one granule."""
    assert Ranges(0).take(1) is None
    with pytest.raises(LocalProtocolError, match="at least one"):
        Ranges(SIZE).take(0)
