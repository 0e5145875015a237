"""Linux' inotify on one folder, so that a test waits for what happens to a file, and not for time to pass."""

import ctypes
import os
import select
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

APPEARED: Final = 0x00000080  # IN_MOVED_TO: a finished file got its name
DELETED: Final = 0x00000200  # IN_DELETE
_SECONDS: Final = 60.0


class FolderEvents:
    """Events of one folder, from now on; of the folders in it there are none.

    Args:
        folder: that exists.
        kinds: `APPEARED`, `DELETED`, or both.
    """

    def __init__(self, folder: Path, kinds: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = library.inotify_init1(os.O_CLOEXEC)
        if self._descriptor < 0 or library.inotify_add_watch(self._descriptor, os.fsencode(folder), kinds) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def wait(self, count: int = 1) -> None:
        """Wait for that many events since the last call."""
        while count > 0:
            ready, _, _ = select.select([self._descriptor], [], [], _SECONDS)
            assert ready, f"nothing happened in {_SECONDS} s"
            data = os.read(self._descriptor, 1 << 16)
            while data:
                count -= 1
                (n_name_bytes,) = struct.unpack_from("I", data, 12)  # int wd, u32 mask, u32 cookie, u32 len, name
                data = data[16 + n_name_bytes :]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, looking again after each event."""
        while not holds():
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
