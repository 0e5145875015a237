"""`IndexedPlace`: what memory and disk have in common, an index of what is there and of how it was used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.places.presence import Presence
    from protocol_v2.storage.names import ChunkId
    from protocol_v2.tiers.residency import Residency, Resident

V = TypeVar("V")


class IndexedPlace(Generic[V]):
    """A place that knows all that it holds. Belongs to the loop.

    Args:
        residency: the chunks that are here.
        presence: told what is here.
        is_held: whether a chunk is leased.
    """

    def __init__(self, residency: Residency[V], presence: Presence, is_held: Callable[[ChunkId], bool]) -> None:
        self.residency = residency
        self._presence = presence
        self._is_held = is_held

    def charge(self, chunk: ChunkId) -> int:
        """Bytes that a chunk is charged with; 0 if it is not here."""
        resident = self.residency.find(chunk)
        return resident.size if resident is not None else 0

    def touch(self, chunks: Sequence[ChunkId]) -> None:
        """A prefix was used: its chunks in prompt order."""
        self.residency.touch(chunks)

    def offer(self, chunks: Sequence[ChunkId]) -> None:
        """These may not be leased any more."""
        self.residency.offer(chunks)

    def _forgettable(self, root: bytes | None) -> list[Resident[V]]:
        """What is not leased, of one space or all."""
        return [
            resident
            for resident in self.residency
            if (root is None or resident.id[0] == root) and not self._is_held(resident.id)
        ]
