"""`Knowledge`: what a store that others share was found to have, and not to have, each with a date.

Nobody tells this server what others store or evict there, so there is no index to be right about. What was there counts
as there for a while, what was not there counts as absent for a short one. Belongs to the loop.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol_v2.storage.names import ChunkId, ObjectId, Shard


class _Known:
    __slots__ = ("shards", "until")

    def __init__(self) -> None:
        self.shards: dict[Shard, int] = {}
        self.until = 0.0


class Knowledge:
    """Objects that are known to be there, and chunks that are known not to be whole.

    Args:
        trust: seconds that presence counts.
        doubt: seconds that absence counts.
        limit: chunks of each; the oldest are forgotten.
    """

    def __init__(self, trust: float, doubt: float, limit: int) -> None:
        self._trust = trust
        self._doubt = doubt
        self._limit = limit
        self._known: OrderedDict[ChunkId, _Known] = OrderedDict()
        self._missing: OrderedDict[tuple[ChunkId, int, int], float] = OrderedDict()

    def __len__(self) -> int:
        """Chunks of which some shard is known to be there; a few of them may be out of date."""
        return len(self._known)

    def shards(self, chunk: ChunkId, now: float) -> Mapping[Shard, int]:
        """Shards of a chunk that are known to be there, and their bytes."""
        known = self._known.get(chunk)
        return known.shards if known is not None and known.until > now else {}

    def learn(self, one: ObjectId, size: int, now: float) -> None:
        """An object of that many bytes is there now."""
        known = self._known.get(one.chunk)
        if known is None:
            known = self._known[one.chunk] = _Known()
        elif known.until <= now:
            known.shards.clear()
        self._known.move_to_end(one.chunk)
        known.shards[one.shard] = size
        known.until = now + self._trust
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def unlearn(self, one: ObjectId) -> bool:
        """An object is not there; whether it was known to be."""
        known = self._known.get(one.chunk)
        if known is None or known.shards.pop(one.shard, None) is None:
            return False
        if not known.shards:
            del self._known[one.chunk]
        return True

    def miss(self, chunk: ChunkId, world: int, groups: int, now: float) -> None:
        """Not every shard of a chunk is there now."""
        self._missing[chunk, world, groups] = now + self._doubt
        self._missing.move_to_end((chunk, world, groups))
        if len(self._missing) > self._limit:
            self._missing.popitem(last=False)

    def is_missing(self, chunk: ChunkId, world: int, groups: int, now: float) -> bool:
        """Whether not every shard of a chunk was there a short while ago."""
        return self._missing.get((chunk, world, groups), now) > now

    def expire(self, now: float) -> None:
        """Forget what is out of date."""
        while self._known and next(iter(self._known.values())).until <= now:
            self._known.popitem(last=False)
        while self._missing and next(iter(self._missing.values())) <= now:
            self._missing.popitem(last=False)

    def forget(self, root: bytes | None) -> None:
        """Forget what is known to be there, of one space or all."""
        if root is None:
            self._known.clear()
        for chunk in [chunk for chunk in self._known if chunk[0] == root]:
            del self._known[chunk]

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._missing.clear()
