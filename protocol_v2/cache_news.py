"""`CacheNews`: what a server tells routers of its cache: which chunks its lookups hit now, and which no more.

The cache's index (`places.presence`) calls `changed` for every chunk that becomes whole somewhere, or stops being whole
anywhere, whatever the reason: stored, found at the start, evicted, cleared, set aside. Changes are collected, so that a
chunk that came and went in between is not told at all, and published by `flush`. Belongs to the loop; never waits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from protocol_v2.chunk_events import MAX_KEYS, ChunkRemoved, ChunksHeld, EventError
from protocol_v2.places.presence import TIER_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keying import KeySpace
    from protocol_v2.chunk_events import ChunkEvent
    from protocol_v2.storage.names import ChunkId

log = logging.getLogger(__name__)

EVENTS_A_BATCH: Final = 8
"""Events of at most `MAX_KEYS` keys in one batch: about 1 MiB."""

FLUSH_AT: Final = 65_536
"""Changes that are collected before they are published without waiting for `flush`."""

Shards: TypeAlias = tuple[int, int]
"""World size and KV group."""


class SpacePublisher(Protocol):
    """What is used of an `EventPublisher`."""

    def describe(self, space: KeySpace) -> None:
        """Tell what a root stands for."""

    def publish(self, root: bytes, events: Sequence[ChunkEvent]) -> int:
        """Publish a batch of a space."""


class CacheNews:
    """See the head of the module.

    Args:
        publisher: where it is told; whoever made it closes it.
    """

    def __init__(self, publisher: SpacePublisher) -> None:
        self._publisher = publisher
        self._pending: dict[bytes, dict[tuple[bytes, Shards], tuple[bool, int]]] = {}
        self.pending = 0
        """Changes that were collected and not yet published."""
        self.batches = 0
        """Batches published."""
        self.untold = 0
        """Batches and descriptions of spaces beyond those that there is room for."""

    def describe(self, space: KeySpace) -> None:
        """A space is known by its fields."""
        try:
            self._publisher.describe(space)
        except EventError as error:
            self._give_up(error)

    def changed(self, chunk: ChunkId, shards: Shards, tier: int, held: bool) -> None:
        """A chunk is whole now for a world size and group, or no more; see `Presence.listen`."""
        root, key = chunk
        pending = self._pending.setdefault(root, {})
        if pending.pop((key, shards), None) is not None:
            self.pending -= 1
            return
        pending[key, shards] = held, tier
        self.pending += 1
        if self.pending >= FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        """Publish what was collected: for each space what went, then what came."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        self.pending = 0
        for root, changes in pending.items():
            events = _events(changes)
            for first in range(0, len(events), EVENTS_A_BATCH):
                try:
                    self._publisher.publish(root, events[first : first + EVENTS_A_BATCH])
                except EventError as error:
                    self._give_up(error)
                else:
                    self.batches += 1

    def _give_up(self, error: EventError) -> None:
        if not self.untold:
            log.warning("not every space is told of: %s", error)
        self.untold += 1


def _events(changes: dict[tuple[bytes, Shards], tuple[bool, int]]) -> list[ChunkEvent]:
    together: dict[tuple[bool, Shards, int], list[bytes]] = {}
    for (key, shards), (held, tier) in changes.items():
        together.setdefault((held, shards, tier), []).append(key)
    events: list[ChunkEvent] = []
    for (held, (world, group), tier), keys in sorted(together.items(), key=lambda one: one[0]):
        name = TIER_NAMES.get(tier, "")
        for first in range(0, len(keys), MAX_KEYS):
            some = tuple(keys[first : first + MAX_KEYS])
            events.append(
                ChunksHeld(keys=some, world=world, group=group, tier=name)
                if held
                else ChunkRemoved(some, world, group, name)
            )
    return events
