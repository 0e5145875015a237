"""`portions`: a sequence cut into parts of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")


def portions(items: Sequence[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Items in order, with as much together as the limit allows and at least one item."""
    together: list[T] = []
    size = 0
    for item in items:
        if together and size + size_of(item) > limit:
            yield together
            together, size = [], 0
        together.append(item)
        size += size_of(item)
    if together:
        yield together
