"""`MemoryPlace`: what is in memory, and that lookups see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol_v2.places.base import Forgotten
from protocol_v2.places.indexed import IndexedPlace
from protocol_v2.places.presence import MEMORY
from protocol_v2.storage.names import ObjectId
from protocol_v2.storage.objects import StoredObject
from protocol_v2.tiers.base import TierFullError
from protocol_v2.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol_v2.places.presence import Presence
    from protocol_v2.storage.names import ChunkId
    from protocol_v2.tiers.residency import Resident


class MemoryPlace(IndexedPlace[StoredObject]):
    """The memory tier. Belongs to the loop.

    Args:
        budget: bytes.
        presence: told what is in memory.
        is_held: whether a chunk is leased.
    """

    name = "memory"

    def __init__(self, budget: int, presence: Presence, is_held: Callable[[ChunkId], bool]) -> None:
        self._tier = MemoryTier(budget, protected=is_held, evicted=self._leave)
        super().__init__(self._tier.residency, presence, is_held)

    def find(self, wanted: ObjectId) -> StoredObject | None:
        """The object, or None."""
        return self._tier.find(wanted)

    def keep(self, obj: StoredObject) -> bool:
        """Keep an object, if there is room; whether there was."""
        try:
            self._tier.put(obj)
        except TierFullError:
            return False
        self._presence.add(obj.id.chunk, obj.id.shard, MEMORY)
        return True

    def forget(self, root: bytes | None) -> Forgotten:
        """Forget what is not leased, of one space or all."""
        objects: list[ObjectId] = []
        size = 0
        for resident in self._forgettable(root):
            self.residency.remove(resident.id)
            self._leave(resident)
            objects += [ObjectId(*resident.id, shard) for shard in resident.shards]
            size += resident.size
            resident.shards.clear()  # its entry in the order of eviction may stay for a while: not the bytes
        return Forgotten(objects, size, None)

    def _leave(self, resident: Resident[StoredObject]) -> None:
        self._presence.discard(resident.id, resident.shards, MEMORY)
