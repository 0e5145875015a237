"""A disk tier's folder: what stands where, and what a file costs.

    <folder>/xk2/<root prefix>/<key>/w<world>r<rank>g<group>   an object: header and payload (storage.envelope)
    <folder>/xk2/<root prefix>/space.json                      description of the space (storage.descriptions)
    <folder>/xk2.tmp/                                          files being written; emptied at start
    <folder>/xk2.quarantine/<n>-<reason>/...                   what was found broken or foreign below xk2/
    <folder>/xk2.lock                                          ownership

Everything that has another name is left alone, folders of other storage schemas included.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol_v2.storage.names import SCHEMA_FOLDER, schema_of
from protocol_v2.tiers.files import entries

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPORARY: Final = f"{SCHEMA_FOLDER}.tmp"
QUARANTINE: Final = f"{SCHEMA_FOLDER}.quarantine"
LOCK_FILE: Final = f"{SCHEMA_FOLDER}.lock"

BLOCK: Final = 4096
"""Bytes that file systems round a file up to, and that a folder costs: a budget counts both."""


def charge_of(size: int) -> int:
    """Bytes that a file of `size` bytes costs: whole blocks, and one for its folder."""
    return -(-size // BLOCK) * BLOCK + BLOCK


def charge_below(path: Path) -> int:
    """Bytes that a file, or all files below a folder, cost."""
    if not path.is_dir() or path.is_symlink():
        return charge_of(path.lstat().st_size)
    return sum(charge_of((Path(place) / file).lstat().st_size) for place, _, files in os.walk(path) for file in files)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder itself, not a link to one."""
    return entry.is_dir(follow_symlinks=False)


def is_hex(text: str, size: int) -> bool:
    """Whether a name is `size` bytes in lower-case hex."""
    return len(text) == 2 * size and all(digit in "0123456789abcdef" for digit in text)


def schema_folders(folder: Path) -> list[str]:
    """Names of the folders of all storage schemas, this one's included."""
    return [entry.name for entry in entries(folder) if is_folder(entry) and schema_of(f"{entry.name}/") is not None]


def files_below(folder: Path, top: str) -> Iterator[str]:
    """Paths of all files below `folder/top`, relative to `folder`: the form that names have."""
    for place, folders, files in os.walk(folder / top):
        folders.sort()
        below = Path(place).relative_to(folder).as_posix()
        yield from (f"{below}/{file}" for file in sorted(files))
