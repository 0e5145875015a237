"""`ChunkNews`: what a connector tells routers of its saves, its misses and its resets.

A chunk is told to be stored when every worker's part of it is; the tokens and parts are those that its key was made of.
It is told to be removed when a lookup finds it gone: the cache says so to whoever asks, and routers hear of it here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from protocol_v2.chunk_events import MAX_EVENTS, ChunkRemoved, ChunkStored, SpaceCleared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from protocol_v2.chunk_events import ChunkEvent
    from protocol_v2.connectors.tracker import SavePlan

TOKEN_BYTES: Final = 4
MAX_TOLD: Final = 262_144
"""Keys remembered as told; of a chunk beyond them no removal is told. 32 bytes and a little each."""

MAX_PENDING: Final = 4096
"""Saves whose outcome is waited for; one that never comes must not be waited for forever."""


class Publisher(Protocol):
    """What is used of an `EventPublisher`."""

    def publish(self, root: bytes, events: Sequence[ChunkEvent]) -> int:
        """Publish a batch of a space."""

    def close(self) -> None:
        """End."""


@dataclass(slots=True)
class _Pending:
    events: list[ChunkStored]
    done: int = 0


class ChunkNews:
    """See the head of the module. Belongs to the engine's scheduler thread.

    Args:
        publisher: where it is told.
        root: of the space.
        world: workers that store a part of each chunk.
        hide_salts: leave out tokens and parts of salted chunks.
    """

    def __init__(self, publisher: Publisher, root: bytes, *, world: int, hide_salts: bool) -> None:
        self._publisher = publisher
        self._root = root
        self._world = world
        self._hide_salts = hide_salts
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._told: OrderedDict[bytes, None] = OrderedDict()

    def saving(self, name: int, plan: SavePlan, tokens: bytes) -> None:
        """A save was handed out.

        Args:
            name: of the save.
            plan: what it saves.
            tokens: of the saved chunks, packed u32.
        """
        events = []
        at = 0
        for place in range(plan.first, plan.stop):
            key = plan.keys[place]
            parent = plan.keys[place - 1].digest if place else self._root
            width = (key.stop - key.start) * TOKEN_BYTES
            events.append(ChunkStored.of(key, parent, tokens[at : at + width], hide_salts=self._hide_salts))
            at += width
        self._pending[name] = _Pending(events)
        if len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)

    def saved(self, outcomes: Mapping[int, tuple[int, int]]) -> None:
        """Workers are done with saves: for each how many stored it, and how many did not."""
        stored: list[ChunkStored] = []
        for name, (done, lost) in outcomes.items():
            pending = self._pending.get(name)
            if pending is None:
                continue
            pending.done += done
            if lost or pending.done >= self._world:
                del self._pending[name]
            if not lost and pending.done >= self._world:
                stored += pending.events
        for first in range(0, len(stored), MAX_EVENTS):
            self._publisher.publish(self._root, stored[first : first + MAX_EVENTS])
        for one in stored:
            self._told[one.key] = None
            if len(self._told) > MAX_TOLD:
                self._told.popitem(last=False)

    def missed(self, key: bytes) -> None:
        """A lookup found a chunk gone."""
        if key in self._told:
            del self._told[key]
            self._publisher.publish(self._root, (ChunkRemoved((key,)),))

    def cleared(self) -> None:
        """The space was emptied."""
        self._told.clear()
        self._pending.clear()
        self._publisher.publish(self._root, (SpaceCleared(),))

    def close(self) -> None:
        """End."""
        self._publisher.close()
