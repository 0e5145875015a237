"""The numbers that two peers agree on, each one constant with its acceptance rule beside it.

The wire protocol and the key schema are negotiated (`negotiation.py`); the storage schema belongs to `storage/`. None
of them is the package's version, and an unknown number is never read as "the latest".
Source: docs/spec/wire-2.md, "Numbers".
"""

from __future__ import annotations

from typing import Final

from keying import KEY_SCHEMA

WIRE_VERSIONS: Final = (2,)
"""Wire protocols this code speaks, ascending. Acceptance: membership of this tuple, nothing else."""

KEY_SCHEMAS: Final = (KEY_SCHEMA,)
"""Key schemas this code derives, ascending. Acceptance: membership of this tuple, nothing else."""

WIRE_FLOOR: Final = 2
"""Lowest wire protocol our own client accepts."""

SCHEMA_FLOOR: Final = 2
"""Lowest key schema our own client accepts: below it, extra keys are not part of the key."""

SHARED_MEMORY: Final = "shared-memory"
"""The optional feature of wire 2 that this code knows: payload in memory that both sides share (`shared_memory.py`). A
side offers it where it has such memory. Kinds of extra key above 5 would be features `kind/<n>`."""

GREASE_PREFIX: Final = "grease"
"""Names of fields (`grease_..`) and features (`grease/..`) that mean nothing and must be tolerated for ever."""

MAX_VERSION: Final = 0xFFFF
"""Versions and schemas are u16 on the wire."""


def is_grease(number: int) -> bool:
    """Whether a version number is reserved to mean nothing (both bytes equal, low nibbles `0xA`: 0x0A0A, 0x1A1A, ...).

    Such numbers are announced to keep peers tolerant of versions they do not know, and are never chosen.
    """
    return number >> 8 == number & 0xFF and number & 0x0F == 0x0A


def grease_number(seed: int) -> int:
    """The reserved version number that goes with `seed` (any byte)."""
    return ((seed & 0xF0) | 0x0A) * 0x0101
