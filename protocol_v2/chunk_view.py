"""`ChunkView`: what a router knows of one space from a publisher's events: how many chunks of a prompt would be hit."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from protocol_v2.chunk_events import ChunkRemoved, ChunksHeld, ChunkStored, SpaceCleared
from protocol_v2.event_log import Lost, Restarted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocol_v2.event_log import FeedItem

WHOLE: Final = (0, 0)
"""World size and group of what a connector tells: all that its own engine needs."""


class ChunkView:
    """Chunks that can be hit, as far as the events tell that were applied. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[bytes, set[tuple[int, int]]] = {}
        self.lost = 0
        """Batches that never came since the publisher started. Where it is not 0 a chunk may be gone that is in the
        view, which costs a miss, and one may be there that is not in it, which costs the use of it."""

    def __len__(self) -> int:
        """Chunks of which something can be hit."""
        return len(self._held)

    def apply(self, items: Iterable[FeedItem]) -> None:
        """Take in what a subscriber received, in its order."""
        for item in items:
            match item:
                case ChunksHeld():
                    for key in item.keys:
                        self._held.setdefault(key, set()).add((item.world, item.group))
                case ChunkStored():
                    self._held.setdefault(item.key, set()).add(WHOLE)
                case ChunkRemoved():
                    self._remove(item)
                case SpaceCleared():
                    self._held.clear()
                case Restarted():
                    self._held.clear()
                    self.lost = 0
                case Lost():
                    self.lost += item.stop - item.first

    def leading(self, keys: Sequence[bytes], *, world: int = 1, groups: int = 1) -> int:
        """How many leading chunks a lookup of these would hit.

        Args:
            keys: digests of a prompt's chunks from the first on, 32 bytes each.
            world: ranks of the engine that would look up.
            groups: its KV groups.
        """
        wanted = frozenset(zip(repeat(world), range(groups), strict=False))
        for place, key in enumerate(keys):
            held = self._held.get(key)
            if held is None or not (wanted <= held or WHOLE in held):
                return place
        return len(keys)

    def _remove(self, event: ChunkRemoved) -> None:
        for key in event.keys:
            held = self._held.get(key)
            if held is None:
                continue
            if event.world is None or event.group is None:
                held.clear()
            else:
                held.discard((event.world, event.group))
            if not held:
                del self._held[key]
