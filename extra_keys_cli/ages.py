"""Ages as people write them."""

import re

import typer

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"([0-9]{1,9})([smhdw])\Z", re.ASCII)


def parse_age(text: str) -> int:
    """Seconds for texts such as ``30d`` or ``12h``.

    Raises:
        typer.BadParameter: no age; shown to the user as such.
    """
    match = _AGE.match(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text[:40]!r} is no age; write for instance 90s, 30m, 12h, 7d or 2w")
    return int(match[1]) * _SECONDS[match[2]]


def format_age(seconds: float) -> str:
    """An age for people, in the largest unit that it has one of."""
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
