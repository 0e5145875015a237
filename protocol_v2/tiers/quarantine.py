"""Quarantine: where files go that are broken or foreign. Moved there with their path, counted, never deleted.

Its bytes count against the disk tier's budget; emptying it is an operator's decision.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Final

from protocol_v2.storage.names import SCHEMA_FOLDER
from protocol_v2.tiers.files import FOLDER_MODE
from protocol_v2.tiers.layout import QUARANTINE, charge_below

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

    from protocol_v2.codes import MissReason

_OBJECT_DEPTH: Final = 3
"""Parts of an object's path below the schema's folder; the folder of its key goes with the last shard."""


class Quarantine:
    """The quarantine of one folder. Thread-safe.

    Args:
        folder: the tier's folder.
        lock: held while a name changes its file.
        clock: wall clock in nanoseconds: folders sort by it.

    Attributes:
        size: bytes in it.
    """

    def __init__(self, folder: Path, lock: threading.Lock, clock: Callable[[], int]) -> None:
        self._folder = folder
        self._lock = lock
        self._clock = clock
        self.size = charge_below(folder / QUARANTINE) if (folder / QUARANTINE).is_dir() else 0

    def take(self, path: Path, reason: MissReason, inode: int | None) -> None:
        """Move a file or folder here, if it is still the one that was read; where that fails it stays.

        Args:
            path: below the schema's folder.
            reason: becomes part of the new path.
            inode: of the file that was read; None takes whatever is there.
        """
        with self._lock, contextlib.suppress(OSError):
            if inode is not None and path.lstat().st_ino != inode:
                return
            size = charge_below(path)
            unique = f"{self._clock():016x}-{secrets.token_hex(4)}-{reason.name.lower()}"
            below = path.relative_to(self._folder / SCHEMA_FOLDER)
            target = self._folder / QUARANTINE / unique / below
            target.parent.mkdir(parents=True, mode=FOLDER_MODE)
            os.rename(path, target)  # noqa: PTH104
            self.size += size
            if len(below.parts) == _OBJECT_DEPTH:
                os.rmdir(path.parent)  # noqa: PTH106  (fails, and is suppressed, while other shards are there)
