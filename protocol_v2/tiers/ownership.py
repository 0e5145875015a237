"""Ownership of a folder: one live server at a time.

A lock file is held with `flock` for as long as the process lives, so a dead owner's lock is free by itself, however it
died. The file says which process has it and in which boot of the machine, for people; the lock decides, never the text.
Network file systems without working `flock` are not supported.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Final

from protocol_v2.tiers.base import FolderInUseError
from protocol_v2.tiers.files import FILE_MODE
from protocol_v2.tiers.layout import LOCK_FILE

_MAX_TEXT: Final = 4096
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Ownership:
    """The lock on a folder, held until `release` or the end of the process.

    Args:
        folder: where the lock file is.

    Attributes:
        reclaimed: the last owner did not release it: it died.

    Raises:
        FolderInUseError: a live process has it.
        OSError: the lock file cannot be opened for writing.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            said = _parse(os.pread(self._descriptor, _MAX_TEXT, 0))
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUseError(said.get("pid")) from None
            self.reclaimed = bool(_parse(os.pread(self._descriptor, _MAX_TEXT, 0)))
            with contextlib.suppress(OSError):  # a full disk can still be read from: the lock decides, not the text
                self._say(json.dumps({"pid": os.getpid(), "boot_id": _boot_id()}).encode())
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        """Let others have the folder. Once."""
        with contextlib.suppress(OSError):  # an empty file only tells people that this owner left in order
            self._say(b"")
        os.close(self._descriptor)

    def _say(self, text: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)


def _parse(text: bytes) -> dict[str, int]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {"pid": said["pid"]} if isinstance(said, dict) and isinstance(said.get("pid"), int) else {}


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
