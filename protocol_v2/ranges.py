"""`Ranges`: which ranges of a row of equal granules are taken. Pure: it counts, and touches no memory.

First fit from the low end, so that what is used stays together and what was never needed is never touched. Free
neighbours are one range again at once.
"""

from __future__ import annotations

from bisect import bisect_left

from protocol_v2.errors import LocalProtocolError


class Ranges:
    """An allocator over `count` granules. Not thread-safe.

    Attributes:
        free: granules that are not taken.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._starts: list[int] = [0] if count else []  # of the free ranges, ascending
        self._sizes: dict[int, int] = {0: count} if count else {}
        self.free = count

    def take(self, count: int) -> int | None:
        """The first of `count` neighbouring granules that are taken from now on; None where there are none.

        Raises:
            LocalProtocolError: fewer than one.
        """
        if count < 1:
            raise LocalProtocolError(f"granules: got {count}, wanted at least one")
        if count > self.free:
            return None
        for place, start in enumerate(self._starts):
            size = self._sizes[start]
            if size < count:
                continue
            del self._sizes[start]
            if size == count:
                del self._starts[place]
            else:
                self._starts[place] = start + count
                self._sizes[start + count] = size - count
            self.free -= count
            return start
        return None

    def give_back(self, first: int, count: int) -> None:
        """Free a range that `take` gave, all of it.

        Raises:
            LocalProtocolError: a part of it is free, or there is no such range.
        """
        stop = first + count
        place = bisect_left(self._starts, first)
        before = self._starts[place - 1] if place else None
        after = self._starts[place] if place < len(self._starts) else None
        if (
            not 0 <= first < stop <= self._count
            or (before is not None and before + self._sizes[before] > first)
            or (after is not None and after < stop)
        ):
            raise LocalProtocolError(f"granules: [{first}, {stop}) were not all taken")
        self.free += count
        if after == stop:
            count += self._sizes.pop(stop)
            del self._starts[place]
        if before is not None and before + self._sizes[before] == first:
            self._sizes[before] += count
        else:
            self._starts.insert(place, first)
            self._sizes[first] = count
