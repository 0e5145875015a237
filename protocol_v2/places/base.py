"""What a place is: the loop's half of one tier; and `Read`, one object to be read from a tier that can block.

The cache asks its places in order, nearest first. The nearest is memory, which answers at once; the others plan a
`Read` on the loop, `fetch` it in a thread, and are asked on the loop again what its outcome means for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol_v2.storage.errors import ObjectMissError
    from protocol_v2.storage.names import ChunkId, ObjectId
    from protocol_v2.storage.objects import StoredObject
    from protocol_v2.tiers.base import TierError
    from protocol_v2.work import Task


class Forgotten(NamedTuple):
    """What a place forgot at a clear.

    Attributes:
        objects: those that it had and has no more.
        size: bytes that they were charged with.
        removal: removes what they left behind; None where there is nothing. It raises `TierError`.
    """

    objects: Sequence[ObjectId]
    size: int
    removal: Task[None] | None


class Place(Protocol):
    """A tier, as the loop sees it. Never blocks."""

    def charge(self, chunk: ChunkId) -> int:
        """Bytes that a chunk is charged with here; 0 if it is not here."""

    def touch(self, chunks: Sequence[ChunkId]) -> None:
        """A prefix was used: its chunks in prompt order."""

    def offer(self, chunks: Sequence[ChunkId]) -> None:
        """These may not be leased any more."""

    def forget(self, root: bytes | None) -> Forgotten:
        """Forget what is not leased, of one space or all."""


class Source(Place, Protocol):
    """A place whose objects must be read, by a call that blocks.

    Attributes:
        name: short name, such as ``disk``, under which deliveries are counted.
    """

    name: str

    def plan_read(self, wanted: ObjectId) -> Read | None:
        """A read of an object, if it is here."""

    def fetch(self, reads: Sequence[Read]) -> None:
        """Read in order, up to the first that is not there; each says what it found. Blocks; in any thread."""

    def wants_kept(self, read: Read) -> bool:
        """Whether an object that was read may be kept in memory: it was not cleared meanwhile."""

    def drop(self, read: Read) -> bool:
        """What was read is not there, or broken: take it out of the index. Whether it was still the one in it."""

    def note_failure(self, error: TierError | None) -> None:
        """A read failed, for no fault of the object's."""


class Read:
    """One object to be read: planned on the loop, run in a thread, settled on the loop.

    Attributes:
        source: where from.
        wanted: which object.
        turn: which write it came from when the read was planned.
        charge: bytes that are under way for it.
        found: the object, once it was read.
        error: why it was not; None where it was not tried.
    """

    __slots__ = ("charge", "error", "found", "source", "turn", "wanted")

    def __init__(self, source: Source, wanted: ObjectId, turn: int, charge: int) -> None:
        self.source = source
        self.wanted = wanted
        self.turn = turn
        self.charge = charge
        self.found: StoredObject | None = None
        self.error: ObjectMissError | TierError | None = None
