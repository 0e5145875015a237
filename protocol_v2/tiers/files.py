"""Files: written whole or not at all, read whole, and failing by type.

Theory of operation
-------------------
A file appears under its name by `rename` from a temporary folder on the same file system, so a process that dies at any
point leaves the old file, or the new one, or none; never a half. Whether the *machine* may die as well is the policy:

    ALWAYS        fsync the file before the rename, and its folder and that one's parent after it: what was written when
                  the call returns is there after a power cut
    RENAME_ONLY   no fsync: survives kill -9, not a power cut; after one a file may be there with wrong bytes, which its
                  checksum tells
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
from typing import TYPE_CHECKING, Final, Self

from protocol_v2.tiers.base import TierError, TierFullError, TierIOError, TierReadOnlyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
"""Cached values are as sensitive as the prompts they were computed from."""

_BUFFERS_PER_WRITE: Final = 512
"""Buffers of one `writev`; POSIX allows at least 16, Linux 1024."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class Fsync(enum.Enum):
    """When written data is forced to the disk; see the module's text."""

    ALWAYS = "always"
    RENAME_ONLY = "rename-only"


def tier_error(error: OSError, doing: str) -> TierError:
    """The typed error for what the operating system said. It names the operation and the error, never a path."""
    number = error.errno or 0
    name = f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
    if error.errno in _FULL:
        return TierFullError(f"{doing}: {name}; free some space or lower the budget")
    if error.errno in _READ_ONLY:
        return TierReadOnlyError(f"{doing}: {name}; make the folder writable for this user")
    return TierIOError(f"{doing}: {name}")


def make_folder(path: Path) -> bool:
    """Make a folder for this user alone; whether it was not there before."""
    try:
        os.mkdir(path, FOLDER_MODE)  # noqa: PTH102  (plain system calls: each is a step that may fail, in this order)
    except FileExistsError:
        return False
    return True


def write_file(path: Path, buffers: Sequence[bytes | memoryview], *, sync: bool, modified: int) -> int:
    """Write a file that must not exist yet; its inode. A file that could not be written whole is removed.

    Args:
        path: where.
        buffers: what, back to back.
        sync: force it to the disk.
        modified: its modification time, nanoseconds: file systems' own times are too coarse to order writes.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        try:
            _write_all(descriptor, [view for one in buffers if (view := memoryview(one).cast("B")).nbytes])
            os.utime(descriptor, ns=(modified, modified))
            if sync:
                os.fsync(descriptor)
            return os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
        raise


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OpenFile:
    """A regular file, open for reading; symbolic links, pipes and devices are refused before they can block.

    Attributes:
        size: bytes, when it was opened.
        inode: tells this file from another that takes its name later.
        modified: mtime, nanoseconds.
    """

    __slots__ = ("_descriptor", "inode", "modified", "size")

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(self._descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise IsADirectoryError(errno.EISDIR, "not a regular file")
        except OSError:
            os.close(self._descriptor)
            raise
        self.size, self.inode, self.modified = state.st_size, state.st_ino, state.st_mtime_ns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, size: int, offset: int) -> bytes:
        """Bytes [offset, offset + size), fewer only at the file's end."""
        data = os.pread(self._descriptor, size, offset)
        if len(data) == size or not data:
            return data
        parts, have = [data], len(data)
        while have < size and (more := os.pread(self._descriptor, size - have, offset + have)):
            parts.append(more)
            have += len(more)
        return b"".join(parts)


def entries(path: Path) -> Iterator[os.DirEntry[str]]:
    """A folder's entries, sorted by name; none where there is no folder."""
    try:
        with os.scandir(path) as found:
            yield from sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return


def _write_all(descriptor: int, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        written = os.writev(descriptor, views[first : first + _BUFFERS_PER_WRITE])
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]
