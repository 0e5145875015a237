"""Leases: promises that chunks stay where they are until they were read.

A lease is granted by a lookup over the chunks of its hit and all shards of the world, and is held per chunk and
shard. It ends by release (in part or whole, each part once), by time, with its session, or with its client. The table
is pure: time and ids come from the caller, and whoever evicts asks `is_held`.

    granted --release of the last part, end of session or client--> gone
    granted --time--> lapsed --retake--> granted
                      lapsed --push-out by newer ones--> gone

A lapsed lease holds nothing. It is remembered for a while, so that a slow reader can take again what is still there
instead of failing. Source: docs/spec/storage-2.md, "Leases".
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import LocalProtocolError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from protocol_v2.storage.names import ChunkId, Shard

MAX_LEASES: Final = 65_536
"""Leases that stand at one time. A client holds one a request in flight."""

MAX_HELD_CHUNKS: Final = 4 * 1024 * 1024
"""Chunks of all leases together, each counted as often as it is leased: bounds memory whatever is looked up."""

MAX_LAPSED: Final = 4096
"""Expired leases that can still be taken again."""


class LeaseError(ProtocolError):
    """Base of what leases refuse."""

    error_code = ErrorCode.INTERNAL


class LeaseUnknownError(LeaseError):
    """No such lease: released, ended, of another server, or expired too long ago. Look up again."""

    error_code = ErrorCode.LEASE_UNKNOWN


class LeaseTableFullError(LeaseError):
    """No room for one more lease now."""

    error_code = ErrorCode.BUSY
    retriable = True


class LeaseScopeError(LeaseError, ValueError):
    """A range or shard that the lease does not cover."""

    error_code = ErrorCode.MALFORMED


@dataclass(slots=True, eq=False)
class Lease:
    """One lease. Read it; only `LeaseTable` changes it.

    Attributes:
        id: names it on the wire.
        owner: the client it dies with.
        session: the session it ends with, or None.
        chunks: what it was granted over, in prompt order.
        world: shards of a value in each group.
        groups: KV groups.
        ttl: seconds it lasts from grant or retake.
        expires: seconds, monotonic.
    """

    id: bytes
    owner: Hashable
    session: Hashable
    chunks: tuple[ChunkId, ...]
    world: int
    groups: int
    ttl: float
    expires: float
    #: shards that still hold each chunk
    _remaining: list[int] = field(init=False)
    #: what each shard gave back, a byte a chunk; shards that gave back nothing are not listed
    _given: dict[tuple[int, int], bytearray] = field(init=False, default_factory=dict)
    #: chunks that some shard still holds
    _open: int = field(init=False)

    def __post_init__(self) -> None:
        self._remaining = [self.world * self.groups] * len(self.chunks)
        self._open = len(self.chunks)

    def covers(self, shard: Shard) -> bool:
        """Whether the shard belongs to the world that the lease was granted for."""
        return shard.world == self.world and shard.group < self.groups

    def held(self) -> list[ChunkId]:
        """Chunks that at least one shard still holds."""
        return [chunk for chunk, remaining in zip(self.chunks, self._remaining, strict=True) if remaining]

    def give_back(self, start: int, stop: int, shard: Shard | None) -> list[ChunkId]:
        """Mark [start, stop) as given back; the chunks that nobody holds through this lease any more."""
        remaining, freed = self._remaining, []
        if shard is None:
            for index in range(start, stop):
                if remaining[index]:
                    remaining[index] = 0
                    freed.append(self.chunks[index])
        else:
            given = self._given.setdefault((shard.rank, shard.group), bytearray(len(self.chunks)))
            for index in range(start, stop):
                if remaining[index] and not given[index]:
                    given[index] = 1
                    remaining[index] -= 1
                    if not remaining[index]:
                        freed.append(self.chunks[index])
        self._open -= len(freed)
        return freed

    @property
    def open(self) -> int:
        """How many chunks are still held; 0 ends the lease."""
        return self._open


class LeaseTable:
    """All leases of a server.

    Args:
        new_id: gives a fresh id, 16 bytes, never the same twice.
        max_leases: leases that stand at one time.
        max_held: chunks of all of them together.
        max_lapsed: expired ones that are remembered.
    """

    def __init__(
        self,
        new_id: Callable[[], bytes],
        *,
        max_leases: int = MAX_LEASES,
        max_held: int = MAX_HELD_CHUNKS,
        max_lapsed: int = MAX_LAPSED,
    ) -> None:
        self._new_id = new_id
        self._max_leases = max_leases
        self._max_held = max_held
        self._max_lapsed = max_lapsed
        self._leases: dict[bytes, Lease] = {}
        self._lapsed: OrderedDict[bytes, Lease] = OrderedDict()
        #: ids of leases that stand or lapsed: what ends them together never walks through those of others
        self._by_owner: dict[Hashable, dict[bytes, None]] = {}
        self._by_session: dict[Hashable, dict[bytes, None]] = {}
        self._counts: dict[ChunkId, int] = {}
        self._deadlines: list[tuple[float, bytes]] = []
        self._total = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> int:
        """Chunks held by all leases, each counted as often as it is held; 0 when everybody is done."""
        return self._total

    @property
    def lapsed(self) -> int:
        """Expired leases that can still be taken again."""
        return len(self._lapsed)

    def is_held(self, chunk: ChunkId) -> bool:
        """Whether some lease holds the chunk, for any shard."""
        return chunk in self._counts

    def holders(self, chunk: ChunkId) -> int:
        """Leases that hold the chunk."""
        return self._counts.get(chunk, 0)

    def grant(
        self,
        chunks: Sequence[ChunkId],
        *,
        world: int,
        groups: int,
        owner: Hashable,
        session: Hashable = None,
        ttl: float,
        now: float,
    ) -> Lease:
        """A lease over chunks, for all shards of all groups.

        Args:
            chunks: in prompt order, at least one, none twice.
            world: shards of a value in each group.
            groups: KV groups.
            owner: the client; any hashable.
            session: the session; any hashable, None for no session.
            ttl: seconds.
            now: seconds, monotonic.

        Raises:
            LeaseTableFullError: a bound of the table is reached.
            LocalProtocolError: no chunks.
        """
        if not chunks:
            raise LocalProtocolError("lease: no chunks; a lookup that hits nothing takes no lease")
        if len(self._leases) >= self._max_leases or self._total + len(chunks) > self._max_held:
            raise LeaseTableFullError(
                f"leases: {len(self._leases)} stand and hold {self._total} chunks, of at most {self._max_leases} and "
                f"{self._max_held}; release some or retry later"
            )
        lease = Lease(self._new_id(), owner, session, tuple(chunks), world, groups, ttl, now + ttl)
        if lease.id in self._leases or lease.id in self._lapsed:
            raise LocalProtocolError("lease: the id source gave the same id twice")
        _index(self._by_owner, lease.owner, lease.id)
        if lease.session is not None:
            _index(self._by_session, lease.session, lease.id)
        self._stand(lease)
        return lease

    def find(self, lease_id: bytes, now: float) -> Lease | None:
        """The lease, if it stands at `now`."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.expires > now else None

    def find_lapsed(self, lease_id: bytes) -> Lease | None:
        """The lease, if it expired and can be taken again; `expire` has been called for `now`."""
        return self._lapsed.get(lease_id)

    def retake(self, lease: Lease, now: float) -> bool:
        """Let a lapsed lease stand again under its id, with what it held when it lapsed. False if there is no room."""
        if lease.id not in self._lapsed:
            raise LocalProtocolError("lease: only a lapsed lease is taken again; call expire first")
        if len(self._leases) >= self._max_leases or self._total + lease.open > self._max_held:
            return False
        del self._lapsed[lease.id]
        lease.expires = now + lease.ttl
        self._stand(lease)
        return True

    def release(
        self, lease_id: bytes, *, start: int = 0, stop: int | None = None, shard: Shard | None = None
    ) -> list[ChunkId]:
        """Give back chunks [start, stop) of a lease, for one shard or all; every part counts once, however often given.

        Args:
            lease_id: a lease that may be gone: then nothing happens.
            start: first chunk, in the lease's own order.
            stop: chunk after the last; None for all from `start` on; beyond the end is the end.
            shard: None gives back for all shards.

        Returns:
            Chunks that this lease held and holds no more (some other lease may).

        Raises:
            LeaseScopeError: a negative range, or a shard of another world.
        """
        lease = self._leases.get(lease_id) or self._lapsed.get(lease_id)
        if lease is None:
            return []
        stop = len(lease.chunks) if stop is None else min(stop, len(lease.chunks))
        if start < 0 or stop < 0:
            raise LeaseScopeError(f"release: got range [{start}, {stop}), wanted no negative ends")
        if shard is not None and not lease.covers(shard):
            raise LeaseScopeError(f"release: shard {shard} is none of world {lease.world} with {lease.groups} groups")
        freed = lease.give_back(start, stop, shard) if start < stop else []
        if lease.id in self._lapsed:  # it holds nothing, so there is nothing to count down
            if not lease.open:
                self._forget_lapsed(lease.id)
            return []
        for chunk in freed:
            self._count_down(chunk)
        if not lease.open:
            del self._leases[lease.id]
            self._unindex(lease)
        return freed

    def expire(self, now: float) -> list[ChunkId]:
        """End leases whose time is over; the chunks that they held."""
        freed: list[ChunkId] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            expires, lease_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is None or lease.expires != expires:  # released before, or taken again with a later end
                continue
            freed += self._end(lease)
            self._lapsed[lease_id] = lease
            if len(self._lapsed) > self._max_lapsed:
                self._forget_lapsed(next(iter(self._lapsed)))
        return freed

    def next_expiry(self) -> float | None:
        """When `expire` may have something to do, in seconds, monotonic; None if no lease stands."""
        return self._deadlines[0][0] if self._deadlines else None

    def drop_session(self, session: Hashable) -> list[ChunkId]:
        """End all leases of a session; the chunks that they held."""
        return self._drop_all(self._by_session.get(session))

    def drop_owner(self, owner: Hashable) -> list[ChunkId]:
        """End all leases of a client; the chunks that they held."""
        return self._drop_all(self._by_owner.get(owner))

    def _drop_all(self, ids: dict[bytes, None] | None) -> list[ChunkId]:
        freed: list[ChunkId] = []
        for lease_id in list(ids or ()):
            if lease_id in self._lapsed:
                self._forget_lapsed(lease_id)
                continue
            lease = self._leases[lease_id]
            freed += self._end(lease)
            self._unindex(lease)
        return freed

    def _stand(self, lease: Lease) -> None:
        self._leases[lease.id] = lease
        heapq.heappush(self._deadlines, (lease.expires, lease.id))
        if len(self._deadlines) > 2 * len(self._leases) + 64:  # most leases are released long before their time
            self._deadlines = [(one.expires, one.id) for one in self._leases.values()]
            heapq.heapify(self._deadlines)
        counts = self._counts
        for chunk in lease.held():
            counts[chunk] = counts.get(chunk, 0) + 1
            self._total += 1

    def _end(self, lease: Lease) -> list[ChunkId]:
        """Let a lease stand no more; the chunks that it held. It is still its owner's and session's."""
        freed = lease.held()
        for chunk in freed:
            self._count_down(chunk)
        del self._leases[lease.id]
        return freed

    def _count_down(self, chunk: ChunkId) -> None:
        self._total -= 1
        count = self._counts[chunk] - 1
        if count:
            self._counts[chunk] = count
        else:
            del self._counts[chunk]

    def _forget_lapsed(self, lease_id: bytes) -> None:
        self._unindex(self._lapsed.pop(lease_id))

    def _unindex(self, lease: Lease) -> None:
        _discard(self._by_owner, lease.owner, lease.id)
        if lease.session is not None:
            _discard(self._by_session, lease.session, lease.id)


def _index(index: dict[Hashable, dict[bytes, None]], key: Hashable, lease_id: bytes) -> None:
    index.setdefault(key, {})[lease_id] = None


def _discard(index: dict[Hashable, dict[bytes, None]], key: Hashable, lease_id: bytes) -> None:
    ids = index[key]
    del ids[lease_id]
    if not ids:
        del index[key]
