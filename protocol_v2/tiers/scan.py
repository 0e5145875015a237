"""Reading a disk tier's files: one object, or all there are when a server starts.

A scan opens every file and reads its header: a name alone proves nothing. Headers carry what the index needs (start,
length, parent), and their sizes must add up to the file's, so foreign and truncated files are found before anybody asks
for them. Payloads are verified when they are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from keying import DIGEST_SIZE
from protocol_v2.codes import MissReason
from protocol_v2.storage.envelope import check_identity, check_size, decode_header, header_size, open_payload
from protocol_v2.storage.errors import EnvelopeError, StorageValueError
from protocol_v2.storage.names import (
    ROOT_PREFIX_BYTES,
    SCHEMA_FOLDER,
    SPACE_FILE,
    ObjectName,
    parse_any_schema,
    parse_shard,
)
from protocol_v2.tiers.files import OpenFile, entries
from protocol_v2.tiers.layout import charge_of, files_below, is_folder, is_hex, schema_folders

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol_v2.storage.envelope import Header
    from protocol_v2.storage.names import ObjectId
    from protocol_v2.storage.objects import Envelope, StoredObject
    from protocol_v2.tiers.quarantine import Quarantine

NO_REGULAR_FILE: Final = frozenset({errno.EISDIR, errno.ELOOP, errno.ENXIO})
"""What opening a folder, a symbolic link or a device fails with."""

_FIRST_READ: Final = 64 * 1024
"""Bytes of the first read of an object: every usual header, and small objects whole."""

_SCAN_READ: Final = 4096
"""Bytes that a scan reads of a file: every usual header."""


class Found(NamedTuple):
    """A file that a scan found sound, as far as its header and size tell.

    Attributes:
        envelope: what it says about itself.
        charge: bytes that it costs on disk.
        modified: when it was used last, nanoseconds of the wall clock.
    """

    envelope: Envelope
    charge: int
    modified: int


@dataclass(slots=True)
class Scan:
    """What is in the folder.

    Attributes:
        found: usable objects, least recently used first.
        aside: what was set aside: the name, where it has one, and the reason.
        elsewhere: names of other storage schemas; at most as many as were asked for.
        schemas: how many names of each other storage schema there are.
        unreadable: files that could not be opened or read; left where they are, and not used.
    """

    found: list[Found] = field(default_factory=list)
    aside: list[tuple[ObjectName | None, MissReason]] = field(default_factory=list)
    elsewhere: list[tuple[ObjectName, int]] = field(default_factory=list)
    schemas: dict[int, int] = field(default_factory=dict)
    unreadable: int = 0


def read_object(file: OpenFile, wanted: ObjectId) -> StoredObject:
    """The object that a file holds, if it is the one that was asked for.

    Raises:
        EnvelopeError: with the reason; the file may hold anything.
        OSError: it cannot be read.
    """
    header, data = _read_header(file, _FIRST_READ)
    check_identity(header, wanted)
    check_size(header, file.size)
    if len(data) == file.size:
        return open_payload(header, memoryview(data)[header.size :])
    return open_payload(header, file.read(header.envelope.payload_size, header.size))


def scan_folder(
    folder: Path, quarantine: Quarantine, progress: Callable[[int, int], None] | None, max_elsewhere: int
) -> Scan:
    """Look at everything in a tier's folder; set aside what is broken or foreign.

    Args:
        folder: the tier's folder.
        quarantine: where to set aside.
        progress: told the key folders that were done, and how many there are.
        max_elsewhere: names of other schemas that are listed.

    Raises:
        OSError: a folder cannot be read.
    """
    scanner = _Scanner(quarantine)
    spaces = []
    for entry in entries(folder / SCHEMA_FOLDER):
        if is_folder(entry) and is_hex(entry.name, ROOT_PREFIX_BYTES):
            spaces.append(Path(entry.path))
        else:
            scanner.set_aside(Path(entry.path))
    total, done = sum(map(_count, spaces)), 0
    for space in spaces:
        for key in entries(space):
            scanner.scan_key(space.name, key)
            done += 1
            if progress is not None:
                progress(done, total)
    scanner.count_elsewhere(folder, max_elsewhere)
    # equal times (coarse file systems): what starts later in its prompt was used earlier
    scanner.result.found.sort(key=lambda one: (one.modified, -one.envelope.start))
    return scanner.result


class _Scanner:
    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self.result = Scan()

    def scan_key(self, space: str, entry: os.DirEntry[str]) -> None:
        """Everything below one entry of a space's folder."""
        path = Path(entry.path)
        if entry.name == SPACE_FILE and entry.is_file(follow_symlinks=False):
            return
        if not (is_folder(entry) and is_hex(entry.name, DIGEST_SIZE)):
            self.set_aside(path)
            return
        prefix, key = bytes.fromhex(space), bytes.fromhex(entry.name)
        for file in entries(path):
            try:
                name = ObjectName(prefix, key, parse_shard(file.name))
            except StorageValueError:
                self.set_aside(Path(file.path))
            else:
                self._scan_object(Path(file.path), name)
        with contextlib.suppress(OSError):  # a folder without a file is left by a process that died
            os.rmdir(path)  # noqa: PTH106

    def set_aside(self, path: Path, inode: int | None = None) -> None:
        """Count and move what is no object."""
        self._quarantine.take(path, MissReason.ENVELOPE_INVALID, inode)
        self.result.aside.append((None, MissReason.ENVELOPE_INVALID))

    def count_elsewhere(self, folder: Path, limit: int) -> None:
        """Names of other storage schemas, by name alone."""
        for top in schema_folders(folder):
            if top == SCHEMA_FOLDER:
                continue
            for path in files_below(folder, top):
                with contextlib.suppress(StorageValueError):
                    schema, name = parse_any_schema(path)
                    self.result.schemas[schema] = self.result.schemas.get(schema, 0) + 1
                    if len(self.result.elsewhere) < limit:
                        self.result.elsewhere.append((name, schema))

    def _scan_object(self, path: Path, name: ObjectName) -> None:
        try:
            with OpenFile(path) as file:
                try:
                    header, _ = _read_header(file, _SCAN_READ)
                    _check_name(header, name)
                    check_size(header, file.size)
                except EnvelopeError as error:
                    self._quarantine.take(path, error.reason, file.inode)
                    self.result.aside.append((name, error.reason))
                    return
                self.result.found.append(Found(header.envelope, charge_of(file.size), file.modified))
        except OSError as error:
            if error.errno in NO_REGULAR_FILE:
                self.set_aside(path)
            else:
                self.result.unreadable += 1


def _read_header(file: OpenFile, first_read: int) -> tuple[Header, bytes]:
    """A file's header, checked, and the bytes that were read for it, which may go on."""
    data = file.read(min(file.size, first_read), 0)
    size = header_size(data)
    if size > len(data):
        data = file.read(size, 0)
    return decode_header(data), data


def _check_name(header: Header, name: ObjectName) -> None:
    if header.envelope.id.name != name:
        raise EnvelopeError(MissReason.IDENTITY_MISMATCH, "the envelope has another name than the file")


def _count(folder: Path) -> int:
    with os.scandir(folder) as found:
        return sum(1 for _ in found)
