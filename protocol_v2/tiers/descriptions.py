"""Which spaces a store holds, by the descriptions beside its objects: for notices and people, never for keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol_v2.storage.descriptions import MAX_DESCRIPTION_BYTES, parse_description
from protocol_v2.storage.errors import StorageValueError
from protocol_v2.storage.names import SCHEMA_FOLDER, SPACE_FILE
from protocol_v2.tiers.files import entries

if TYPE_CHECKING:
    from pathlib import Path

    from keying import KeySpace


def described_spaces(folder: Path) -> list[KeySpace]:
    """The spaces that a disk tier's folder describes; what cannot be read or is no description is left out.

    Args:
        folder: of the tier; blocks, one small file a space.
    """
    found = []
    for entry in entries(folder / SCHEMA_FOLDER):
        try:
            with (folder / SCHEMA_FOLDER / entry.name / SPACE_FILE).open("rb") as file:
                found.append(parse_description(file.read(MAX_DESCRIPTION_BYTES + 1)))
        except (OSError, StorageValueError):
            continue
    return found
