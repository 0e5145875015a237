"""`Residency`: which chunks a tier has, what they cost, and which one goes when room is needed.

Theory of operation
-------------------
A chunk comes and goes as one, with all its shards: a lookup needs them all. Room is made by taking the chunk that was
used longest ago, among those that may go:

- not *protected* (leased, or being written), as the caller's predicate says; - with no chunk below it: a suffix goes
before its prefix. A chunk names its parent, and it hangs at the position where it
  starts; it hangs below exactly the chunk that has the parent's key and stops there. As a chunk starts before it
  stops, no set of claims, true or not, makes a circle, so there is always a chunk that may go unless all are protected.

Candidates sit in a heap by the order of their last use. Using a chunk only writes a number into its entry; the heap
learns of it when it comes to that entry and puts it back. A chunk that cannot go when its turn comes leaves the heap,
and re-enters when what kept it ends: its last child left, or `offer` says that its lease or write is over. So a
lookup of n chunks costs n assignments, and making room costs the heap's logarithm for each chunk that goes.

Nothing here blocks, and nothing is thread-safe: it belongs to the loop.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from protocol_v2.storage.objects import NO_PARENT, Envelope
from protocol_v2.tiers.base import TierFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from protocol_v2.storage.names import ChunkId, Shard

V = TypeVar("V")
Joint: TypeAlias = tuple[bytes, bytes, int]
"""Root, key and stop of a chunk: where its children hang."""


class Resident(Generic[V]):
    """A chunk that a tier has. Read it; only `Residency` changes it.

    Attributes:
        id: root and key.
        joint: where its children hang.
        hangs_at: the joint of its parent; None where the parent is not known.
        order: when it was used last; larger is later.
        shards: charge and value of each shard.
        size: charge of all shards.
        queued: whether the heap has an entry for it.
        gone: whether it left the tier.
    """

    __slots__ = ("gone", "hangs_at", "id", "joint", "order", "queued", "shards", "size")

    def __init__(self, envelope: Envelope) -> None:
        root, parent = envelope.id.root, envelope.parent
        self.id: ChunkId = envelope.id.chunk
        self.joint: Joint = (root, envelope.id.key, envelope.stop)
        self.hangs_at: Joint | None = None if parent == NO_PARENT else (root, parent, envelope.start)
        self.order = 0
        self.shards: dict[Shard, tuple[int, V]] = {}
        self.size = 0
        self.queued = False
        self.gone = True


class Residency(Generic[V]):
    """The chunks of one tier.

    Args:
        budget: bytes that all of them together may be charged with.
        protected: whether a chunk must stay for now.
        track_uses: remember which chunks were used, for `take_touched`.
    """

    def __init__(self, budget: int, protected: Callable[[ChunkId], bool], *, track_uses: bool = False) -> None:
        self.budget = budget
        """Bytes. Where it is lowered, the next `make_room` acts on it."""
        self._protected = protected
        self._chunks: dict[ChunkId, Resident[V]] = {}
        self._children: dict[Joint, int] = {}
        self._heap: list[tuple[int, int, Resident[V]]] = []
        self._ties = itertools.count()
        self._clock = 0
        self._used = 0
        self._reserved = 0
        self._objects = 0
        self._touched: set[ChunkId] | None = set() if track_uses else None
        self.evicted = 0
        """Chunks that had to go for want of room."""

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Resident[V]]:
        return iter(self._chunks.values())

    @property
    def used(self) -> int:
        """Bytes charged, reservations included."""
        return self._used + self._reserved

    @property
    def objects(self) -> int:
        """Shards of all chunks."""
        return self._objects

    def find(self, chunk: ChunkId) -> Resident[V] | None:
        """The chunk's entry, if it is here."""
        return self._chunks.get(chunk)

    def value(self, chunk: ChunkId, shard: Shard) -> V | None:
        """What was added for a shard, or None."""
        resident = self._chunks.get(chunk)
        held = resident.shards.get(shard) if resident is not None else None
        return held[1] if held is not None else None

    def make_room(self, size: int, keep: Sequence[ChunkId] = ()) -> list[Resident[V]]:
        """Let chunks go until `size` bytes fit; those that went, in the order they went.

        Args:
            size: bytes.
            keep: chunks that must not go, protected or not: the one that the room is for, and its parent. So a suffix
                never pushes out its own prefix.

        Raises:
            TierFullError: they cannot fit now; then nothing went.
        """
        gone: list[Resident[V]] = []
        while not self.fits(size):
            victim = self._next_victim(keep) if size <= self.budget else None
            if victim is None:
                for one in reversed(gone):
                    self.restore(one)
                self.offer(keep)
                raise TierFullError(f"room: wanted {size} bytes of {self.budget}; what must stay takes {self.used}")
            self._take_out(victim)
            gone.append(victim)
        self.offer(keep)
        self.evicted += len(gone)
        return gone

    def fits(self, size: int) -> bool:
        """Whether `size` bytes fit without anything going."""
        return self._used + self._reserved + size <= self.budget

    def reserve(self, size: int) -> None:
        """Charge bytes for what is on its way; `make_room` came before. Negative gives back."""
        self._reserved += size

    def add(self, envelope: Envelope, value: V, size: int) -> None:
        """Take in a shard of a chunk, as most recently used; an equal shard is replaced. `make_room` came before."""
        chunk, shard = envelope.id.chunk, envelope.id.shard
        resident = self._chunks.get(chunk)
        self._clock += 1
        if resident is None:
            resident = Resident(envelope)
            resident.order = self._clock
            resident.shards[shard] = (size, value)
            resident.size = size
            self._put_in(resident)
            return
        before = resident.shards.get(shard)
        if before is None:
            self._objects += 1
        more = size - (before[0] if before is not None else 0)
        resident.shards[shard] = (size, value)
        resident.size += more
        resident.order = self._clock
        self._used += more

    def restore(self, resident: Resident[V]) -> None:
        """Take a chunk in again that `make_room` or `remove` let go, with its place in the order."""
        self._put_in(resident)

    def remove(self, chunk: ChunkId) -> Resident[V] | None:
        """Let a chunk go, protected or not; its entry, or None if it is not here."""
        resident = self._chunks.get(chunk)
        if resident is not None:
            self._take_out(resident)
        return resident

    def remove_shard(self, chunk: ChunkId, shard: Shard) -> bool:
        """Let one shard go, and the chunk with its last; whether it was here."""
        resident = self._chunks.get(chunk)
        if resident is None or shard not in resident.shards:
            return False
        if len(resident.shards) == 1:
            self._take_out(resident)
        else:
            size, _ = resident.shards.pop(shard)
            resident.size -= size
            self._used -= size
            self._objects -= 1
        return True

    def touch(self, chunks: Sequence[ChunkId]) -> None:
        """Use a prefix: its chunks in prompt order. The first counts as used last, so that it goes last."""
        find, touched = self._chunks.get, self._touched
        self._clock += len(chunks)
        order = self._clock
        for chunk in chunks:
            resident = find(chunk)
            if resident is not None:
                resident.order = order
                if touched is not None:
                    touched.add(chunk)
            order -= 1

    def offer(self, chunks: Sequence[ChunkId]) -> None:
        """Say that these may not be protected any more."""
        for chunk in chunks:
            self._requeue(chunk)

    def take_touched(self) -> list[Resident[V]]:
        """Chunks used since the last call, least recently used first."""
        touched = sorted((self._chunks[chunk] for chunk in self._touched or ()), key=lambda resident: resident.order)
        if self._touched is not None:
            self._touched = set()
        return touched

    def _next_victim(self, keep: Sequence[ChunkId]) -> Resident[V] | None:
        while self._heap:
            order, _, resident = heapq.heappop(self._heap)
            if resident.gone or not resident.queued:
                continue
            if resident.order != order:
                self._push(resident)
                continue
            resident.queued = False
            if not (resident.joint in self._children or resident.id in keep or self._protected(resident.id)):
                return resident
        return None

    def _put_in(self, resident: Resident[V]) -> None:
        self._chunks[resident.id] = resident
        self._used += resident.size
        self._objects += len(resident.shards)
        resident.gone = False
        if resident.hangs_at is not None:
            self._children[resident.hangs_at] = self._children.get(resident.hangs_at, 0) + 1
        self._queue(resident)

    def _take_out(self, resident: Resident[V]) -> None:
        del self._chunks[resident.id]
        if self._touched is not None:
            self._touched.discard(resident.id)
        self._used -= resident.size
        self._objects -= len(resident.shards)
        resident.gone = True
        resident.queued = False
        joint = resident.hangs_at
        if joint is not None:
            children = self._children[joint] - 1
            if children:
                self._children[joint] = children
            else:
                del self._children[joint]
                self._requeue((joint[0], joint[1]))

    def _requeue(self, chunk: ChunkId) -> None:
        resident = self._chunks.get(chunk)
        if resident is not None and not resident.queued and resident.joint not in self._children:
            self._queue(resident)

    def _queue(self, resident: Resident[V]) -> None:
        resident.queued = True
        self._push(resident)
        if len(self._heap) > 2 * len(self._chunks) + 64:  # entries of chunks that left by another way
            self._heap = [(one.order, next(self._ties), one) for one in self._chunks.values() if one.queued]
            heapq.heapify(self._heap)

    def _push(self, resident: Resident[V]) -> None:
        heapq.heappush(self._heap, (resident.order, next(self._ties), resident))
