"""What a tier is: objects by identity, verified on the way out; and how one fails, by type.

All calls are synchronous. A tier whose calls can block (`DiskTier`, anything behind a network) is thread-safe and
driven from an executor; `MemoryTier` belongs to the loop. A tier never gives an object that it did not verify, and an
error of one call leaves every other object as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from protocol_v2.codes import ErrorCode
from protocol_v2.storage.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol_v2.storage.names import ObjectId, ObjectName
    from protocol_v2.storage.objects import StoredObject


class TierError(StorageError):
    """Base of what a tier fails with: the tier's trouble, not the object's."""

    error_code = ErrorCode.INTERNAL


class TierFullError(TierError):
    """No room: the budget is taken by what must stay, or the disk is full. What was there is still there."""

    error_code = ErrorCode.BUSY
    retriable = True


class TierReadOnlyError(TierError):
    """The folder or its file system does not take writes. Reading goes on."""


class TierIOError(TierError):
    """The operating system failed an operation for another reason."""


class FolderInUseError(TierError):
    """The folder belongs to another live server.

    Attributes:
        pid: the process that has it, as it wrote it; None if that cannot be read.
    """

    def __init__(self, pid: int | None) -> None:
        super().__init__(
            f"a live server (process {pid if pid is not None else 'unknown'}) has the folder; stop that one or give "
            "this one a folder of its own"
        )
        self.pid = pid


class TierUsage(NamedTuple):
    """What a tier holds.

    Attributes:
        objects: shards.
        size: bytes that a budget is charged with.
    """

    objects: int
    size: int


class Tier(Protocol):
    """The calls that every tier has."""

    @property
    def name(self) -> str:
        """Short name for status and metrics, such as ``disk``."""

    def put(self, obj: StoredObject) -> object:
        """Keep an object: whole or not at all, durable (as far as the tier is) on return. Replaces an equal identity.

        Raises:
            TierError: it was not kept.
        """

    def get(self, wanted: ObjectId) -> StoredObject:
        """The object, verified.

        Raises:
            ObjectMissError: there is none that can be used; what is broken has been set aside.
            TierError: the tier failed.
        """

    def contains(self, wanted: ObjectId) -> bool:
        """Whether an object of that name is there, unverified."""

    def delete(self, wanted: ObjectId) -> bool:
        """Remove an object; whether there was one.

        Raises:
            TierError: the tier failed.
        """

    def names(self) -> Iterator[ObjectName]:
        """Names of all objects, unverified, in any order."""

    def usage(self) -> TierUsage:
        """Objects and bytes."""
