"""Deprecation warnings of this distribution: who warns, since when, until when, and what to use instead.

Python hides `DeprecationWarning` outside ``__main__``, and a connector's author would first learn of a removal from an
`ImportError`. The category here is a `FutureWarning`, which is shown by default, and it is reported at the line that
called the entry point, so the warning leads to the code that has to change.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from compat.errors import CompatError

P = ParamSpec("P")
R = TypeVar("R")

_ATTRIBUTE = "__extra_keys_deprecation__"
_AT_CALLER = 2  # frames above the wrapper: its caller


class ExtraKeysDeprecationWarning(FutureWarning):
    """An entry point of an older key schema was called; it will be removed."""


@dataclass(frozen=True, slots=True)
class Deprecation:
    """One row of the removal table.

    Args:
        name: the entry point, as it is imported.
        since: first release that warns.
        removal: the release without it.
        instead: what to call, as the middle of a sentence.

    Raises:
        CompatError: a field is empty.
    """

    name: str
    since: str
    removal: str
    instead: str

    def __post_init__(self) -> None:
        for field in ("name", "since", "removal", "instead"):
            if not getattr(self, field):
                raise CompatError(f"deprecation of {self.name!r}: {field} is empty; every row of the table is complete")

    @property
    def message(self) -> str:
        """What the warning says."""
        return (
            f"{self.name} is deprecated since extra-keys {self.since} and will be removed in {self.removal}; "
            f"use {self.instead} instead"
        )


def deprecated(*, name: str, since: str, removal: str, instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark an entry point: each call warns at the caller's line, then does its work.

    Args:
        name: the entry point, as it is imported.
        since: first release that warns.
        removal: the release without it.
        instead: what to call.

    Returns:
        A decorator. The function that it gives carries the row, which `deprecation_of` reads.

    Raises:
        CompatError: a field is empty.
    """
    row = Deprecation(name=name, since=since, removal=removal, instead=instead)

    def mark(entry_point: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(entry_point)
        def warning(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(row.message, ExtraKeysDeprecationWarning, stacklevel=_AT_CALLER)
            return entry_point(*args, **kwargs)

        setattr(warning, _ATTRIBUTE, row)
        return warning

    return mark


def deprecation_of(entry_point: Callable[..., object]) -> Deprecation:
    """The row that a deprecated entry point carries.

    Raises:
        CompatError: it carries none.
    """
    row = getattr(entry_point, _ATTRIBUTE, None)
    if not isinstance(row, Deprecation):
        raise CompatError(f"{getattr(entry_point, '__name__', entry_point)!r} is not deprecated; it has no row")
    return row
