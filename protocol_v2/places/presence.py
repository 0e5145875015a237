"""`Presence`: which shards of which chunks are in some tier, so that a lookup asks nothing else.

A chunk is *full* for a world size and KV group when every rank of it is there, whatever tiers they are in. That is
brought up to date when a shard comes or goes, so a lookup costs one dictionary access and one set comparison a chunk.
Belongs to the loop; not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from protocol_v2.storage.names import ChunkId, Shard


MEMORY: Final = 1
DISK: Final = 2
"""Tiers that may have a shard, as bits."""

TIER_NAMES: Final = {MEMORY: "memory", DISK: "disk"}


class _Held:
    __slots__ = ("full", "shards")

    def __init__(self) -> None:
        self.shards: dict[Shard, int] = {}
        #: world size and group of which every rank is there
        self.full: frozenset[tuple[int, int]] = frozenset()


class Presence:
    """The shards of all chunks."""

    def __init__(self) -> None:
        self._chunks: dict[ChunkId, _Held] = {}
        self._spaces: Counter[bytes] = Counter()
        self._listener: Callable[[ChunkId, tuple[int, int], int, bool], None] | None = None

    def listen(self, listener: Callable[[ChunkId, tuple[int, int], int, bool], None]) -> None:
        """Tell of every chunk that becomes full or stops being it, beginning with those that are.

        Args:
            listener: called with the chunk, (world size, group), the tier that made the difference, and whether it is
                full now. It must neither block nor change anything here.
        """
        self._listener = listener
        for chunk, held in self._chunks.items():
            for world, group in held.full:
                tiers = min(tier for shard, tier in held.shards.items() if (shard.world, shard.group) == (world, group))
                listener(chunk, (world, group), tiers & -tiers, True)

    def __len__(self) -> int:
        """Chunks of which at least one shard is somewhere."""
        return len(self._chunks)

    def count(self, root: bytes | None) -> int:
        """Chunks of one space, or all."""
        return len(self._chunks) if root is None else self._spaces.get(root, 0)

    def roots(self) -> set[bytes]:
        """Roots of the spaces of which some chunk is somewhere."""
        return set(self._spaces)

    def has(self, chunk: ChunkId) -> bool:
        """Whether some shard of a chunk is somewhere."""
        return chunk in self._chunks

    def where(self, chunk: ChunkId, shard: Shard) -> int:
        """Tiers that have a shard, as bits."""
        held = self._chunks.get(chunk)
        return held.shards.get(shard, 0) if held is not None else 0

    def add(self, chunk: ChunkId, shard: Shard, tier: int) -> None:
        """A tier has a shard now."""
        held = self._chunks.get(chunk)
        if held is None:
            held = self._chunks[chunk] = _Held()
            self._spaces[chunk[0]] += 1
        before = held.shards.get(shard, 0)
        held.shards[shard] = before | tier
        if not before and len(held.shards) >= shard.world:
            world, _, group = shard
            if (world, group) not in held.full and all((world, rank, group) in held.shards for rank in range(world)):
                held.full = _shared(held.full | {(world, group)})
                if self._listener is not None:
                    self._listener(chunk, (world, group), tier, True)

    def discard(self, chunk: ChunkId, shards: Iterable[Shard], tier: int) -> None:
        """A tier does not have these shards any more."""
        held = self._chunks.get(chunk)
        if held is None:
            return
        for shard in shards:
            left = held.shards.get(shard, 0) & ~tier
            if left:
                held.shards[shard] = left
            elif held.shards.pop(shard, None) is not None and (shard.world, shard.group) in held.full:
                held.full = _shared(held.full - {(shard.world, shard.group)})
                if self._listener is not None:
                    self._listener(chunk, (shard.world, shard.group), tier, False)
        if not held.shards:
            del self._chunks[chunk]
            self._spaces[chunk[0]] -= 1
            if not self._spaces[chunk[0]]:
                del self._spaces[chunk[0]]

    def leading(self, root: bytes, keys: Sequence[bytes], world: int, groups: int) -> list[ChunkId]:
        """The leading chunks of which every rank of every group is somewhere."""
        wanted = frozenset(zip(repeat(world), range(groups), strict=False))
        find = self._chunks.get
        found: list[ChunkId] = []
        for chunk in zip(repeat(root), keys, strict=False):
            held = find(chunk)
            if held is None or not wanted <= held.full:
                break
            found.append(chunk)
        return found

    def all_in(self, chunk: ChunkId, world: int, groups: int, tier: int) -> bool:
        """Whether one tier alone has every rank of every group."""
        held = self._chunks.get(chunk)
        if held is None:
            return False
        return all(
            held.shards.get((world, rank, group), 0) & tier  # type: ignore[call-overload]  # equal to a Shard
            for group in range(groups)
            for rank in range(world)
        )


@lru_cache(maxsize=1024)
def _shared(full: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    """One object for equal sets: nearly all chunks of a deployment have the same shards."""
    return full
