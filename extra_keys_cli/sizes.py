"""Byte counts as people write them."""

import re

import typer

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\Z", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes for texts such as ``4GiB``, ``512MB``, ``1.5g`` or ``1048576``.

    Raises:
        typer.BadParameter: not a size; shown to the user as such.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text[:40]!r} is not a size; write for instance 4GiB, 512MB or 1048576")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "").lower()])


def checked_size(text: str | None) -> str | None:
    """A size as it was written, if it is one or none was: the callback of an option.

    Raises:
        typer.BadParameter: not a size.
    """
    if text is not None:
        parse_size(text)
    return text


def format_size(n_bytes: float) -> str:
    """A byte count for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"
