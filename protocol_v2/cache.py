"""`ChunkCache`: lookup, retrieve, store, prefetch, release and clear over memory and disk, without any transport.

One loop drives it and passes the time in. Nothing here blocks: what needs the disk comes back as a `work.Task`, which an
executor runs and the loop settles. See `work` for who calls what, where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from keying import KeySpace
    from protocol_v2.outcomes import CacheStatus, Cleared, Hit, Prefetch, Retrieved, StoreOutcome
    from protocol_v2.storage import Shard, StoredObject
    from protocol_v2.tiers.disk import DiskTier
    from protocol_v2.work import Task


class ChunkCache:
    """The cache core. Signatures first; bodies follow in the next commit."""

    def __init__(self, memory_budget: int, disk: DiskTier | None = None) -> None:
        raise NotImplementedError

    def load(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Build the index from the disk tier, before serving; blocks. progress(key folders done, of). Gives objects."""
        raise NotImplementedError

    def describe(self, space: KeySpace) -> Task[None]:
        """Write the space's description beside its objects, once."""
        raise NotImplementedError

    def bind(
        self, owner: Hashable, session: str, root: bytes, keys: Sequence[bytes], *, first: int = 0, now: float
    ) -> None:
        """Hold keys against a session without looking up (a store's whole chain). Raises SessionError."""
        raise NotImplementedError

    def lookup(
        self,
        root: bytes,
        keys: Sequence[bytes],
        *,
        world: int = 1,
        groups: int = 1,
        owner: Hashable,
        session: str | None = None,
        lease: bool = True,
        ttl: float | None = None,
        full: int | None = None,
        now: float,
    ) -> Hit:
        """Leading chunks that every shard holds. full: how many of `keys` are of full chunks (the rest is not bound)."""
        raise NotImplementedError

    def retrieve(
        self,
        lease: bytes,
        start: int,
        stop: int,
        shard: Shard,
        *,
        starts: Sequence[int] | None = None,
        now: float,
    ) -> Task[Retrieved]:
        """Objects of a leased range for one shard. Raises LeaseUnknownError, LeaseScopeError, CacheBusyError."""
        raise NotImplementedError

    def release(
        self, lease: bytes, *, start: int = 0, stop: int | None = None, shard: Shard | None = None, now: float
    ) -> int:
        """Give back a part of a lease, or all; chunks that it holds no more."""
        raise NotImplementedError

    def store(
        self,
        obj: StoredObject,
        *,
        owner: Hashable = None,
        session: str | None = None,
        index: int | None = None,
        now: float,
    ) -> Task[StoreOutcome]:
        """Keep an object. index: its chunk index, for a full chunk of a session. Acknowledged means durable."""
        raise NotImplementedError

    def prefetch(
        self,
        root: bytes,
        keys: Sequence[bytes],
        *,
        world: int = 1,
        groups: int = 1,
        owner: Hashable = None,
        session: str | None = None,
        full: int | None = None,
        now: float,
    ) -> Prefetch:
        """Bring chunks from disk into memory."""
        raise NotImplementedError

    def cancel_session(self, owner: Hashable, session: str, now: float) -> bool:
        """Abort: leases of the session end; a last store is still taken."""
        raise NotImplementedError

    def end_session(self, owner: Hashable, session: str, now: float) -> bool:
        """End: leases of the session end; a later store that names it is refused."""
        raise NotImplementedError

    def drop_owner(self, owner: Hashable, now: float) -> None:
        """A client is gone: its leases and sessions end."""
        raise NotImplementedError

    def clear(self, root: bytes | None = None, *, now: float) -> Task[Cleared]:
        """Forget what is not leased, of one space or all."""
        raise NotImplementedError

    def maintain(self, now: float) -> list[Task[None]]:
        """Expire leases and sessions; background work for the executor. Call about once a second."""
        raise NotImplementedError

    def status(self, now: float) -> CacheStatus:
        """Counts and sizes."""
        raise NotImplementedError

    def close(self, now: float) -> Task[None]:
        """Last flush of recency; the folder is free afterwards. All tasks must be settled before."""
        raise NotImplementedError
