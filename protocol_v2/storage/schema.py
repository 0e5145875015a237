"""The storage schema: one number for names and envelope together, and what any other number means to this reader."""

from __future__ import annotations

from typing import Final

from protocol_v2.codes import MissReason

STORAGE_SCHEMA: Final = 2
"""The only storage schema this code writes and reads. It is neither the wire version nor the package's version."""

MAX_SCHEMA: Final = 99_999
"""Largest schema number that a name can carry (five digits)."""


def schema_fault(schema: int) -> MissReason | None:
    """Why an object of this storage schema cannot be read: None only for the one schema that can.

    A higher number was written by a later version and stays untouched for it; a lower one is retired. Neither is ever
    read as if it were the schema known here.
    """
    if schema == STORAGE_SCHEMA:
        return None
    return MissReason.SCHEMA_TOO_NEW if schema > STORAGE_SCHEMA else MissReason.SCHEMA_RETIRED
