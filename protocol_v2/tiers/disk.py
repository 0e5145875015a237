"""`DiskTier`: objects as files in one folder (`layout`). Survives restarts, kill -9, corruption and a full disk.

Calls block and are thread-safe; a server makes them from an executor. Policy (budget, leases, what goes) is not here
but in `residency`, on the loop: it tells this tier what to remove.

What was read is verified before it is used; what is wrong with it is a typed miss, and the file is moved to quarantine,
its path below `xk2/` kept, never deleted. A file that was replaced while it was read is not moved: its inode tells.

Removal and writing of one name may meet in two threads. Both take the tier's lock for the one system call that counts
(`unlink`, `rename`), and a removal that was decided before a write skips what was written since: see `Removal`. A
removal must not be decided while a write of the same name is under way; that is the loop's to see to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from protocol_v2.codes import MissReason
from protocol_v2.storage.descriptions import format_description
from protocol_v2.storage.envelope import encode_header
from protocol_v2.storage.errors import EnvelopeError, ObjectMissError, StorageValueError
from protocol_v2.storage.names import SCHEMA_FOLDER, SPACE_FILE, description_name, parse_any_schema, parse_name
from protocol_v2.tiers.base import TierUsage
from protocol_v2.tiers.files import (
    FOLDER_MODE,
    Fsync,
    OpenFile,
    entries,
    make_folder,
    sync_folder,
    tier_error,
    write_file,
)
from protocol_v2.tiers.layout import QUARANTINE, TEMPORARY, charge_of, files_below, is_folder, schema_folders
from protocol_v2.tiers.ownership import Ownership
from protocol_v2.tiers.quarantine import Quarantine
from protocol_v2.tiers.scan import NO_REGULAR_FILE, Scan, read_object, scan_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from keying import KeySpace
    from protocol_v2.storage.names import ObjectId, ObjectName
    from protocol_v2.storage.objects import StoredObject


class Written(NamedTuple):
    """A file that was written.

    Attributes:
        charge: bytes that it costs on disk.
        turn: which of two writes of one name came last: the larger one's.
    """

    charge: int
    turn: int


class Removal:
    """Files to remove, decided on the loop and done in a thread. What is written meanwhile is spared.

    Attributes:
        left: what is still there and is not to go any more once `run` failed; nothing once it succeeded.
        removed: how many files are gone by this.
    """

    def __init__(self, tier: DiskTier, objects: Sequence[ObjectId]) -> None:
        self._tier = tier
        self.left: dict[ObjectId, None] = dict.fromkeys(objects)
        self.removed = 0

    def run(self) -> None:
        """Remove the files.

        Raises:
            TierError: one could not be removed; it and those after it are in `left`.
        """
        for one in list(self.left):
            self._tier.remove_doomed(one, self)


class DiskTier:
    """Objects in a folder.

    Args:
        folder: made if it is not there; belongs to one live server at a time.
        budget: bytes that objects and quarantine may take together; kept by whoever drives the tier.
        fsync: when data is forced to the disk.
        clock: wall clock in nanoseconds; orders uses across restarts.

    Attributes:
        reclaimed: the last owner died without releasing the folder.

    Raises:
        FolderInUseError: a live server has the folder.
        TierReadOnlyError: it cannot be written.
        TierError: it cannot be used for another reason.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        *,
        budget: int,
        fsync: Fsync = Fsync.ALWAYS,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.budget = budget
        self._folder = folder
        self._sync = fsync is Fsync.ALWAYS
        self._clock = clock
        self._lock = threading.Lock()
        self._turns = 0
        self._doomed: dict[ObjectId, Removal] = {}
        self._durable_spaces: set[str] = set()
        self._last_use = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
            self._ownership = Ownership(folder)
        except OSError as error:
            raise tier_error(error, "open the store") from None
        self.reclaimed = self._ownership.reclaimed
        try:
            for part in (SCHEMA_FOLDER, TEMPORARY, QUARANTINE):
                make_folder(folder / part)
            for stale in entries(folder / TEMPORARY):  # whoever wrote these is dead: see Ownership
                if not is_folder(stale):
                    os.unlink(stale.path)  # noqa: PTH108
            if self._sync:
                sync_folder(folder)
            self._quarantine = Quarantine(folder, self._lock, clock)
        except OSError as error:
            self._ownership.release()
            raise tier_error(error, "open the store") from None

    @property
    def quarantine(self) -> int:
        """Bytes in quarantine."""
        return self._quarantine.size

    def scan(self, progress: Callable[[int, int], None] | None = None, *, max_elsewhere: int = 0) -> Scan:
        """Look at everything in the folder; set aside what is broken or foreign. For the start, before anything else.

        Args:
            progress: told the key folders that were done, and how many there are.
            max_elsewhere: names of other schemas that are listed.

        Raises:
            TierError: the folder cannot be read.
        """
        try:
            result = scan_folder(self._folder, self._quarantine, progress, max_elsewhere)
        except OSError as error:
            raise tier_error(error, "scan the store") from None
        self._last_use = result.found[-1].modified if result.found else 0
        return result

    def put(self, obj: StoredObject) -> Written:
        """Write an object; whole and, by the fsync policy, durable on return.

        Raises:
            TierError: it was not kept; no temporary file is left.
        """
        header = encode_header(obj)
        path = self._path(obj.id.name)
        try:
            inode, turn = self._place(path, [header, *obj.buffers], obj.id)
            try:
                self._sync_entries(path)
            except OSError:
                self._take_back(path, inode)
                raise
        except OSError as error:
            raise tier_error(error, "write an object") from None
        return Written(charge_of(len(header) + obj.envelope.payload_size), turn)

    def get(self, wanted: ObjectId) -> StoredObject:
        """The object, verified.

        Raises:
            ObjectMissError: absent; or an `EnvelopeError`, and the file was set aside.
            TierIOError: it cannot be read.
        """
        path = self._path(wanted.name)
        try:
            with OpenFile(path) as file:
                try:
                    return read_object(file, wanted)
                except EnvelopeError as error:
                    self._quarantine.take(path, error.reason, file.inode)
                    raise
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissError(MissReason.ABSENT, "no such file") from None
        except OSError as error:
            if error.errno in NO_REGULAR_FILE:
                self._quarantine.take(path, MissReason.ENVELOPE_INVALID, None)
                raise EnvelopeError(MissReason.ENVELOPE_INVALID, "not a regular file") from None
            raise tier_error(error, "read an object") from None

    def contains(self, wanted: ObjectId) -> bool:
        """Whether a file of that name is there, unverified."""
        return self._path(wanted.name).is_file()

    def delete(self, wanted: ObjectId) -> bool:
        """Remove an object; whether there was one.

        Raises:
            TierError: it cannot be removed.
        """
        removal = self.doom([wanted])
        removal.run()
        return removal.removed == 1

    def doom(self, objects: Sequence[ObjectId]) -> Removal:
        """Decide to remove objects, none of which is being written; `Removal.run` does it. Never blocks."""
        removal = Removal(self, objects)
        for one in objects:
            self._doomed[one] = removal
        return removal

    def remove_doomed(self, one: ObjectId, removal: Removal) -> None:
        """One step of a `Removal`.

        Raises:
            TierError: the file cannot be removed.
        """
        path = self._path(one.name)
        with self._lock:
            if self._doomed.get(one) is not removal:  # written since
                return
            try:
                os.unlink(path)  # noqa: PTH108
                removal.removed += 1
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                raise tier_error(error, "remove an object") from None
            del self._doomed[one]
            del removal.left[one]
            with contextlib.suppress(OSError):  # other shards are still there
                os.rmdir(path.parent)  # noqa: PTH106

    def give_up(self, removal: Removal) -> None:
        """Let what a removal has left live; for one that failed or will not be run. Never blocks."""
        for one in list(removal.left):
            if self._doomed.get(one) is removal:
                self._doomed.pop(one, None)  # a write in another thread may have been faster

    def touch(self, uses: Sequence[ObjectId]) -> None:
        """Record uses, least recent first, as modification times: they order eviction after a restart.

        Raises:
            TierError: the folder does not take writes.
        """
        at = self._times(len(uses))
        for place, one in enumerate(uses):
            try:
                os.utime(self._path(one.name), ns=(at + place, at + place), follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue  # evicted meanwhile
            except OSError as error:
                raise tier_error(error, "record uses") from None

    def describe(self, space: KeySpace) -> None:
        """Write the description of a space beside its objects, unless it is there.

        Raises:
            TierError: it could not be written.
        """
        path = self._folder / description_name(space.root)
        try:
            if not path.exists():
                self._place(path, [format_description(space)], None)
                self._sync_entries(path)
        except OSError as error:
            raise tier_error(error, "describe a space") from None

    def names(self) -> Iterator[ObjectName]:
        """Names of all files that have a name of this schema, unverified."""
        for path in files_below(self._folder, SCHEMA_FOLDER):
            with contextlib.suppress(StorageValueError):
                yield parse_name(path)

    def inventory(self) -> dict[int, int]:
        """How many objects of each storage schema there are, by name alone, descriptions not counted.

        0 stands for files in a schema's folder whose names have another grammar.
        """
        counts: dict[int, int] = {}
        for top in schema_folders(self._folder):
            for path in files_below(self._folder, top):
                if path.endswith(f"/{SPACE_FILE}"):
                    continue
                try:
                    schema, _ = parse_any_schema(path)
                except StorageValueError:
                    schema = 0
                counts[schema] = counts.get(schema, 0) + 1
        return counts

    def usage(self) -> TierUsage:
        """Objects and bytes; walks the folder."""
        charges = [charge_of(self._path(name).lstat().st_size) for name in self.names()]
        return TierUsage(len(charges), sum(charges))

    def close(self) -> None:
        """Let another server have the folder. Nothing may be called afterwards."""
        self._ownership.release()

    def _path(self, name: ObjectName) -> Path:
        return self._folder / str(name)

    def _times(self, count: int) -> int:
        """The first of `count` times for uses, later than all before, whatever the wall clock does."""
        with self._lock:
            first = max(self._clock(), self._last_use + 1)
            self._last_use = first + count - 1
        return first

    def _place(self, path: Path, buffers: Sequence[bytes | memoryview], written: ObjectId | None) -> tuple[int, int]:
        """Write a file under a temporary name and give it its own; inode and turn."""
        temporary = self._folder / TEMPORARY / secrets.token_hex(16)
        inode = write_file(temporary, buffers, sync=self._sync, modified=self._times(1))
        try:
            with self._lock:
                if written is not None:
                    make_folder(path.parent.parent)
                make_folder(path.parent)
                os.rename(temporary, path)  # noqa: PTH104
                self._turns += 1
                turn = self._turns
                removal = self._doomed.pop(written, None) if written is not None else None
                if removal is not None and written is not None:
                    removal.left.pop(written, None)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
        return inode, turn

    def _sync_entries(self, path: Path) -> None:
        """Make a new file's name durable: its folder, and those above that may be new.

        Key folders are as many as objects, so both levels are synced each time: another thread may have made the folder
        and not come to this point. Spaces are few: the top level is synced once for each.
        """
        if not self._sync:
            return
        space = self._folder / SCHEMA_FOLDER / path.relative_to(self._folder / SCHEMA_FOLDER).parts[0]
        if path.parent != space:
            sync_folder(path.parent)
        sync_folder(space)
        if space.name not in self._durable_spaces:
            sync_folder(space.parent)
            self._durable_spaces.add(space.name)

    def _take_back(self, path: Path, inode: int) -> None:
        """Remove a file that could not be made durable, unless another one has its name by now."""
        with self._lock, contextlib.suppress(OSError):
            if path.lstat().st_ino == inode:
                os.unlink(path)  # noqa: PTH108
