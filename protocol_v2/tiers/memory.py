"""`MemoryTier`: objects in this process, within a byte budget.

Objects are immutable (`storage.objects`), so they are handed out as they are: a reader that still uses one keeps its
bytes alive, whatever is evicted meanwhile. Leased chunks stay, a suffix goes before its prefix (`residency`). Belongs
to the loop; not thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol_v2.codes import MissReason
from protocol_v2.storage.errors import ObjectMissError
from protocol_v2.tiers.base import TierUsage
from protocol_v2.tiers.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protocol_v2.storage.names import ChunkId, ObjectId, ObjectName
    from protocol_v2.storage.objects import StoredObject
    from protocol_v2.tiers.residency import Resident


class MemoryTier:
    """Objects in memory.

    Args:
        budget: bytes of payload plus `OBJECT_OVERHEAD` for each object.
        protected: whether a chunk must stay for now; by default none must.
        evicted: told of each chunk that goes for want of room.

    Attributes:
        residency: the chunks, for whoever looks up and leases them.
    """

    name = "memory"

    def __init__(
        self,
        budget: int,
        *,
        protected: Callable[[ChunkId], bool] = lambda _chunk: False,
        evicted: Callable[[Resident[StoredObject]], None] = lambda _resident: None,
    ) -> None:
        self.residency: Residency[StoredObject] = Residency(budget, protected)
        self._evicted = evicted

    def put(self, obj: StoredObject) -> None:
        """Keep an object.

        Raises:
            TierFullError: it does not fit, or all that could go is protected; nothing changed.
        """
        before = self.find(obj.id)
        more = obj.charge - (before.charge if before is not None else 0)
        for resident in self.residency.make_room(more, keep=obj.envelope.chain):
            self._evicted(resident)
        self.residency.add(obj.envelope, obj, obj.charge)

    def find(self, wanted: ObjectId) -> StoredObject | None:
        """The object, or None. Does not count as a use: lookups do."""
        return self.residency.value(wanted.chunk, wanted.shard)

    def get(self, wanted: ObjectId) -> StoredObject:
        """The object.

        Raises:
            ObjectMissError: absent.
        """
        found = self.find(wanted)
        if found is None:
            raise ObjectMissError(MissReason.ABSENT, "not in memory")
        return found

    def contains(self, wanted: ObjectId) -> bool:
        """Whether the object is here."""
        return self.find(wanted) is not None

    def delete(self, wanted: ObjectId) -> bool:
        """Remove an object; whether there was one."""
        return self.residency.remove_shard(wanted.chunk, wanted.shard)

    def names(self) -> Iterator[ObjectName]:
        """Names of all objects."""
        for resident in self.residency:
            for _, obj in resident.shards.values():
                yield obj.id.name

    def usage(self) -> TierUsage:
        """Objects and bytes."""
        return TierUsage(self.residency.objects, self.residency.used)
