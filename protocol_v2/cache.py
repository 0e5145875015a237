"""`ChunkCache`: lookup, retrieve, store, prefetch, release and clear over all tiers, without any transport.

Theory of operation
-------------------
One loop drives the cache and passes the time in. Nothing here blocks: what is in memory is answered at once, and what
needs the disk comes back as a `work.Task`, which an executor runs and the loop settles. See `work` for who calls what,
where. Lookups ask indexes only (`places.presence`), whatever tier a chunk is in. A tier that servers share has no index
here: `ask`, just before a lookup, finds out what it has of these keys, for a bounded time (`places.remote`).

*Acknowledged.* `StoreOutcome.STORED` means: visible to lookups from now on and, where there is a disk tier, written
there and durable by its fsync policy, so a restart finds it. It stays until the budget evicts it (counted), a clear
forgets it, or its bytes are found damaged (counted, set aside). A store that fails is not acknowledged; what it brought
may still be served from memory, since it is right, and is not there after a restart. With a disk tier memory holds
copies of what is on disk (write-through), so evicting from memory loses nothing. What is stored is sent on to the
remote tier afterwards, which is no part of the acknowledgement.

*Visible.* An object is visible when it is whole and acknowledged; a chunk is a hit when every shard of it is visible.

*Leases.* A lookup leases its hit; leased chunks stay in the tiers that have them. A retrieve delivers the prefix of its
range that is really there, which is all of it unless something was damaged, the lease had expired, or the remote tier,
which knows no leases, let something go.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keying import DIGEST_SIZE
from protocol_v2.errors import ProtocolError
from protocol_v2.leases import LeaseScopeError, LeaseTable, LeaseTableFullError, LeaseUnknownError
from protocol_v2.outcomes import CacheStatus, Cleared, Hit, Prefetch, Retrieved, StoreOutcome, TierStatus
from protocol_v2.places.disk import DiskPlace
from protocol_v2.places.faults import Faults
from protocol_v2.places.flow import CacheBusyError, Flow
from protocol_v2.places.memory import MemoryPlace
from protocol_v2.places.presence import DISK, MEMORY, Presence
from protocol_v2.places.reading import Reader
from protocol_v2.places.remote import RemoteLimits, RemotePlace
from protocol_v2.sessions import SESSION_TTL, SessionTable
from protocol_v2.storage.errors import StorageValueError
from protocol_v2.storage.names import MAX_GROUP, MAX_WORLD, ObjectId, Shard, checked_digest
from protocol_v2.storage.objects import NO_PARENT
from protocol_v2.storage.schema import schema_fault
from protocol_v2.tiers.base import TierError, TierFullError
from protocol_v2.work import Done, Ran, Task, blocking, failed, immediate

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from concurrent.futures import Executor

    from keying import KeySpace
    from protocol_v2.codes import MissReason
    from protocol_v2.leases import Lease
    from protocol_v2.places.base import Place, Source
    from protocol_v2.storage.names import ChunkId
    from protocol_v2.storage.objects import StoredObject
    from protocol_v2.tiers.disk import DiskTier
    from protocol_v2.tiers.remote import RemoteTier
    from protocol_v2.tiers.residency import Residency

__all__ = ["CacheBusyError", "CacheLimits", "ChunkCache"]


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Bounds of a cache.

    Args:
        lease_ttl: seconds that a lease lasts where the caller names none.
        max_lease_ttl: seconds that a lease lasts at most.
        session_ttl: seconds without a call after which a session is forgotten.
        max_shards: world size times KV groups, at most.
        max_pending: bytes of stores and reads under way together; one that is larger goes alone.
        flush_seconds: seconds between two records of what was used, on disk; a killed server forgets that much.
        max_faults: chunks of which it is remembered why they are not there.
    """

    lease_ttl: float = 60.0
    max_lease_ttl: float = 600.0
    session_ttl: float = SESSION_TTL
    max_shards: int = 65_536
    max_pending: int = 2**30
    flush_seconds: float = 10.0
    max_faults: int = 65_536


class ChunkCache:
    """The cache core. Belongs to one loop; not thread-safe.

    Args:
        memory_budget: bytes of the memory tier.
        disk: the disk tier; None keeps everything in memory. The cache closes it.
        remote: the tier that servers share; None for none. The cache closes it.
        limits: bounds.
        remote_limits: bounds of what is done with the remote tier.
        remote_executor: runs what is asked of it and sent to it; by default threads of its own.
        new_lease_id: gives a fresh lease id, 16 bytes; by default random, so that no id of another server or boot
            is ever taken for one of this.
    """

    def __init__(
        self,
        memory_budget: int,
        disk: DiskTier | None = None,
        remote: RemoteTier | None = None,
        *,
        limits: CacheLimits | None = None,
        remote_limits: RemoteLimits | None = None,
        remote_executor: Executor | None = None,
        new_lease_id: Callable[[], bytes] = lambda: os.urandom(16),
    ) -> None:
        self._limits = limits or CacheLimits()
        self._presence = Presence()
        self._leases = LeaseTable(new_lease_id)
        self._sessions = SessionTable(ttl=self._limits.session_ttl)
        self._flow = Flow(self._limits.max_pending)
        self._faults = Faults(self._limits.max_faults)
        self._memory = MemoryPlace(memory_budget, self._presence, self._leases.is_held)
        self._disk = DiskPlace(disk, self._presence, self._leases.is_held) if disk is not None else None
        self._remote = (
            RemotePlace(remote, self._presence, limits=remote_limits or RemoteLimits(), executor=remote_executor)
            if remote is not None
            else None
        )
        sources: list[Source] = [source for source in (self._disk, self._remote) if source is not None]
        self._places: tuple[Place, ...] = (self._memory, *sources)
        self._reader = Reader(self._memory, sources, keep=self._keep_in_memory, faults=self._faults, flow=self._flow)
        self._prefetching: set[ChunkId] = set()
        self._next_flush = 0.0
        self._closed = False
        self._hits = 0
        self._misses: Counter[MissReason] = Counter()
        self._stored: Counter[StoreOutcome] = Counter()
        self._foreign_schemas: dict[int, int] = {}

    # ---- start and end

    def load(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Build the index from the disk tier. Blocks; for the start, before anything else.

        Args:
            progress: told the key folders that were read, and how many there are.

        Returns:
            Objects found.

        Raises:
            TierError: the folder cannot be read.
        """
        if self._disk is None:
            return 0
        scan = self._disk.load(progress, self._limits.max_faults)
        for name, reason in scan.aside:
            self._reader.set_aside[reason] += 1
            if name is not None:
                self._faults.note(name, reason)
        for name, schema in scan.elsewhere:
            fault = schema_fault(schema)
            if fault is not None:
                self._faults.note(name, fault)
        self._foreign_schemas = dict(scan.schemas)
        self._disk.failed += scan.unreadable
        return len(scan.found)

    def close(self, now: float) -> Task[None]:
        """End: record the last uses, let the folder go, send what waits for the remote tier (for a bounded time).

        Every other task must be settled before it is run.

        The cache takes no calls afterwards; a second close does nothing.
        """
        self._expire(now)
        if self._closed:
            return immediate(None)
        self._closed = True
        ends = [place.close() for place in (self._disk, self._remote) if place is not None]
        if not ends:
            return immediate(None)

        def work() -> None:
            for end in ends:
                end.run()

        def settle(_ran: Ran[None], now: float) -> None:
            for end in ends:
                end.finish(now)

        return blocking(work, settle)

    def describe(self, space: KeySpace) -> Task[None]:
        """Write the description of a space beside its objects, unless that was done. The task raises `TierError`."""
        if self._remote is not None:
            self._remote.describe(space)
        return immediate(None) if self._disk is None else self._disk.describe(space)

    # ---- the keyed calls

    def bind(
        self, owner: Hashable, session: str, root: bytes, keys: Sequence[bytes], *, first: int = 0, now: float
    ) -> None:
        """Hold keys of full chunks against a session, as a store does: the whole chain that it belongs to.

        Raises:
            SessionError: another identity, an ended session, or no room.
        """
        _check_keys(root, keys)
        self._sessions.bind((owner, session), root, keys, first=first, opens=False, owner=owner, now=now)

    def ask(self, root: bytes, keys: Sequence[bytes], *, world: int = 1, groups: int = 1, now: float) -> Task[None]:
        """Ask the remote tier about chunks that a lookup or prefetch of these keys would miss; for just before one.

        Ready at once where there is nothing to ask. Otherwise it waits for the answer, for a bounded time, and raises
        nothing; what comes later is there for the next lookup. Arguments as `lookup`.

        Raises:
            StorageValueError: as `lookup`.
        """
        if self._remote is None:  # the lookup checks its arguments itself
            return immediate(None)
        self._expire(now)
        self._check_lookup(root, keys, world, groups)
        return self._remote.ask(root, keys[len(self._leading(root, keys, world, groups)) :], world, groups, now)

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
        """How many leading chunks does every shard hold?

        Counts as a use of all of them, first chunk last, so that a prefix outlives its suffix.

        Args:
            root: root of the space, 32 bytes.
            keys: keys of a prompt's chunks from the first on, 32 bytes each.
            world: shards of a value in each KV group.
            groups: KV groups.
            owner: the client: leases and sessions go with it.
            session: the client's request; None for none.
            lease: take a lease on the hit.
            ttl: seconds that the lease lasts; the cache's own by default.
            full: how many of `keys` belong to full chunks; a partial tail is not bound to the session. Default all.
            now: seconds, monotonic.

        Raises:
            SessionError: the session stands for another identity, or there is no room for it.
            LeaseTableFullError: no room for a lease.
            StorageValueError: a key of another length, or a world of impossible size.
        """
        self._expire(now)
        self._check_lookup(root, keys, world, groups)
        bound = keys if full is None else keys[:full]
        if session is not None:
            self._sessions.bind((owner, session), root, bound, opens=True, owner=owner, now=now)
        found = self._leading(root, keys, world, groups)
        miss = None
        if len(found) < len(keys):
            miss = self._faults.reason((root, keys[len(found)]))
            self._misses[miss] += 1
        self._hits += len(found)
        self._touch(found)
        if not (lease and found):
            return Hit(len(found), None, 0.0, miss)
        seconds = min(self._limits.lease_ttl if ttl is None else ttl, self._limits.max_lease_ttl)
        granted = self._leases.grant(
            found,
            world=world,
            groups=groups,
            owner=owner,
            session=None if session is None else (owner, session),
            ttl=seconds,
            now=now,
        )
        return Hit(len(found), granted.id, seconds, miss)

    def retrieve(
        self,
        lease: bytes,
        start: int,
        stop: int,
        shard: Shard,
        *,
        starts: Sequence[int] | None = None,
        room: int | None = None,
        now: float,
    ) -> Task[Retrieved]:
        """Objects of the chunks [start, stop) of a lease, for one shard: the prefix that is really there.

        A lease that expired is taken again if that is possible; what went meanwhile is not delivered.

        Args:
            lease: from a lookup, of whatever client.
            start: first chunk, in the lease's own order.
            stop: chunk after the last.
            shard: whose part of the value.
            starts: prompt position at which the reader will use each chunk, for readers that cannot re-rotate
                segments: an object with another start is a miss. None takes every start.
            room: bytes; the prefix ends before what would not fit, without a miss, and has one object at least: nothing
                is read that cannot be sent. None takes all.
            now: seconds, monotonic.

        Raises:
            LeaseUnknownError: look up again.
            LeaseScopeError: a range or shard that the lease does not cover.
            LeaseTableFullError: an expired lease cannot be taken again now.
            CacheBusyError: too many bytes are under way.
        """
        self._expire(now)
        standing = self._standing_lease(lease, now)
        if not 0 <= start < stop <= len(standing.chunks):
            raise LeaseScopeError(
                f"retrieve: got range [{start}, {stop}), wanted a part of the lease's [0, {len(standing.chunks)})"
            )
        if not standing.covers(shard):
            raise LeaseScopeError(
                f"retrieve: shard {shard} is none of world {standing.world} with {standing.groups} groups"
            )
        chunks = standing.chunks[start:stop]
        if starts is not None and len(starts) != len(chunks):
            raise LeaseScopeError(f"retrieve: got {len(starts)} starts for {len(chunks)} chunks, wanted one for each")
        return self._reader.read([ObjectId(*chunk, shard) for chunk in chunks], starts, room)

    def rehouse(self, held: StoredObject, copy: StoredObject) -> bool:
        """Let a copy take the place of an object in memory; whether that very object was still there."""
        return self._memory.find(held.id) is held and self._memory.keep(copy)

    def release(
        self, lease: bytes, *, start: int = 0, stop: int | None = None, shard: Shard | None = None, now: float
    ) -> int:
        """Give back chunks [start, stop) of a lease, for one shard or all. Idempotent, and never touches a tier.

        Returns:
            Chunks that the lease held and holds no more; 0 for a lease that is gone.

        Raises:
            LeaseScopeError: a negative range, or a shard of another world.
        """
        self._expire(now)
        freed = self._leases.release(lease, start=start, stop=stop, shard=shard)
        self._offer(freed)
        return len(freed)

    def store(
        self,
        obj: StoredObject,
        *,
        owner: Hashable = None,
        session: str | None = None,
        index: int | None = None,
        now: float,
    ) -> Task[StoreOutcome]:
        """Keep an object. Equal identity is kept once: the first stays.

        Never raises; the task does: `SessionError`, `CacheBusyError`, or the `TierError` that kept it from being
        durable.

        Args:
            obj: whole; see `storage.stored_object`.
            owner: the client.
            session: its request; None for none.
            index: chunk index, for a full chunk of the session; None (partial tail, segment) is not bound.
            now: seconds, monotonic.
        """
        self._expire(now)
        if session is not None:
            keys, first = ([], 0) if index is None else ([obj.id.key], index)
            try:
                self._sessions.bind((owner, session), obj.id.root, keys, first=first, opens=False, owner=owner, now=now)
            except ProtocolError as error:
                return failed(error)
        chunk, shard = obj.id.chunk, obj.id.shard
        if self._presence.where(chunk, shard) & (MEMORY if self._disk is None else DISK):
            self._touch([chunk])
            return self._stored_as(StoreOutcome.PRESENT)
        if self._is_loose(obj) and not self._fits(obj):
            return self._declined(obj)
        if self._disk is None:
            if not self._keep_in_memory(obj):
                return self._declined(obj)
            self._send(obj)
            return self._stored_as(StoreOutcome.STORED)
        return self._store_durably(obj, self._disk)

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
        """Bring leading chunks that every shard holds into memory, as far as it has room; arguments as `lookup`.

        Each task gives whether its chunk is in memory now; none of them raises.

        Raises:
            SessionError: as `lookup`.
            StorageValueError: as `lookup`.
        """
        self._expire(now)
        self._check_lookup(root, keys, world, groups)
        if session is not None:
            bound = keys if full is None else keys[:full]
            self._sessions.bind((owner, session), root, bound, opens=True, owner=owner, now=now)
        found = self._leading(root, keys, world, groups)
        self._touch(found)
        resident, leading = 0, True
        tasks: list[Task[bool]] = []
        room = self._memory.residency.budget
        for chunk in found:
            # what it takes or would take, roughly: files are a little larger than objects
            room -= next(filter(None, (place.charge(chunk) for place in self._places)), 0)
            if self._presence.all_in(chunk, world, groups, MEMORY):
                resident += leading
                continue
            leading = False
            if room < 0:
                break
            if chunk in self._prefetching:
                continue
            try:
                tasks.append(self._prefetch_chunk(chunk, world, groups))
            except CacheBusyError:
                break
        return Prefetch(resident, tuple(tasks))

    # ---- ends

    def cancel_session(self, owner: Hashable, session: str, now: float) -> bool:
        """Abort: the session's leases end; a last store that names it is still taken. Whether it was open."""
        self._expire(now)
        self._offer(self._leases.drop_session((owner, session)))
        return self._sessions.cancel((owner, session), now)

    def end_session(self, owner: Hashable, session: str, now: float) -> bool:
        """End: the session's leases end; a later store that names it is refused. Whether it was there."""
        self._expire(now)
        self._offer(self._leases.drop_session((owner, session)))
        return self._sessions.end((owner, session), now)

    def drop_owner(self, owner: Hashable, now: float) -> None:
        """A client is gone: its leases and sessions end."""
        self._expire(now)
        self._offer(self._leases.drop_owner(owner))
        self._sessions.drop_owner(owner)

    def listen(self, listener: Callable[[ChunkId, tuple[int, int], int, bool], None]) -> None:
        """Tell of every chunk that can be hit from now on, or no more; see `Presence.listen`."""
        self._presence.listen(listener)

    def roots(self) -> set[bytes]:
        """Roots of the spaces of which something can be hit."""
        return self._presence.roots()

    def clear(self, root: bytes | None = None, *, now: float) -> Task[Cleared]:
        """Forget what is not leased, of one space or all. Lookups miss it at once; the task removes the files.

        The task raises `TierError` if a file could not be removed; such files are indexed again.
        """
        self._expire(now)
        objects: set[ObjectId] = set()
        size = 0
        removal: Task[None] | None = None
        for place in self._places:
            forgotten = place.forget(root)
            objects.update(forgotten.objects)
            size += forgotten.size
            removal = forgotten.removal or removal
        cleared = Cleared(len(objects), size, kept=self._presence.count(root))
        return immediate(cleared) if removal is None else removal.then(lambda _: cleared)

    # ---- upkeep

    def maintain(self, now: float) -> list[Task[None]]:
        """Let leases and sessions expire; background work to run. Call about once a second."""
        self._expire(now)
        for session in self._sessions.expire(now):
            self._offer(self._leases.drop_session(session))
        if self._remote is not None:
            self._remote.upkeep(now)
        if self._disk is None:
            return []
        tasks = [self._disk.maintain()]
        if now >= self._next_flush:
            self._next_flush = now + self._limits.flush_seconds
            tasks.append(self._disk.flush_uses())
        return [task for task in tasks if task is not None]

    def status(self, now: float) -> CacheStatus:
        """Counts and sizes. Counters run since the start."""
        self._expire(now)
        disk = self._disk
        return CacheStatus(
            memory=_tier_status(self._memory.residency),
            disk=None if disk is None else _tier_status(disk.residency),
            remote=None if self._remote is None else self._remote.status(),
            hits=self._hits,
            misses=dict(self._misses),
            retrieved=dict(self._reader.retrieved),
            undelivered=dict(self._reader.undelivered),
            stored=dict(self._stored),
            failed=0 if disk is None else disk.failed,
            set_aside=dict(self._reader.set_aside),
            quarantine=0 if disk is None else disk.tier.quarantine,
            leases=len(self._leases),
            held=self._leases.held,
            lapsed=self._leases.lapsed,
            sessions=len(self._sessions),
            pending=self._flow.size,
            foreign_schemas=dict(self._foreign_schemas),
        )

    # ---- inside

    def _expire(self, now: float) -> None:
        self._offer(self._leases.expire(now))
        if self._remote is not None:
            self._remote.collect(now)

    def _leading(self, root: bytes, keys: Sequence[bytes], world: int, groups: int) -> list[ChunkId]:
        """The leading chunks of which every shard is in memory, on disk, or known to be in the remote tier."""
        found = self._presence.leading(root, keys, world, groups)
        if self._remote is not None and len(found) < len(keys):
            self._remote.extend(found, root, keys, world, groups)
        return found

    def _send(self, obj: StoredObject) -> None:
        if self._remote is not None:
            self._remote.send(obj)

    def _offer(self, chunks: Sequence[ChunkId]) -> None:
        """Chunks that a lease held and holds no more: they may go, unless another lease holds them."""
        for place in self._places:
            place.offer(chunks)

    def _touch(self, chunks: Sequence[ChunkId]) -> None:
        for place in self._places:
            place.touch(chunks)

    def _keep_in_memory(self, obj: StoredObject) -> bool:
        kept = self._memory.keep(obj)
        if kept:
            self._faults.forget(obj.id.chunk)
        return kept

    def _check_lookup(self, root: bytes, keys: Sequence[bytes], world: int, groups: int) -> None:
        _check_keys(root, keys)
        if not (1 <= world <= MAX_WORLD and 1 <= groups <= MAX_GROUP + 1):
            raise StorageValueError(f"world: got {world} shards in {groups} groups, wanted 1 to {MAX_WORLD} of each")
        if world * groups > self._limits.max_shards:
            raise StorageValueError(
                f"world: got {world} times {groups} shards, wanted at most {self._limits.max_shards} in all"
            )

    def _standing_lease(self, lease: bytes, now: float) -> Lease:
        standing = self._leases.find(lease, now)
        if standing is not None:
            return standing
        lapsed = self._leases.find_lapsed(lease)
        if lapsed is None:
            raise LeaseUnknownError("lease: released, ended or expired, or of another server; look up again")
        if not self._leases.retake(lapsed, now):
            raise LeaseTableFullError("leases: it expired and there is no room to take it again; look up later")
        return lapsed

    def _is_loose(self, obj: StoredObject) -> bool:
        """Whether the chunk before this one is nowhere: then no lookup can come to this one."""
        root, parent = obj.envelope.chain[1]
        if parent in (root, NO_PARENT) or self._presence.has((root, parent)):
            return False
        if self._disk is not None and self._disk.is_writing((root, parent)):
            return False
        return self._remote is None or not self._remote.knows((root, parent))

    def _fits(self, obj: StoredObject) -> bool:
        """Whether an object can be kept without anything going."""
        if self._disk is None:
            return self._memory.residency.fits(obj.charge)
        return self._disk.fits(obj)

    def _declined(self, obj: StoredObject) -> Task[StoreOutcome]:
        """No room here; where servers share a tier there may be some."""
        self._send(obj)
        return self._stored_as(StoreOutcome.DECLINED)

    def _stored_as(self, outcome: StoreOutcome) -> Task[StoreOutcome]:
        self._stored[outcome] += 1
        return immediate(outcome)

    def _store_durably(self, obj: StoredObject, disk: DiskPlace) -> Task[StoreOutcome]:
        size = obj.envelope.payload_size
        try:
            self._flow.take(size, "store")
        except CacheBusyError as error:
            return failed(error)
        try:
            write = disk.write(obj)
        except TierFullError:
            self._flow.give_back(size)
            return self._declined(obj)

        def settle(ran: Ran[None], _now: float) -> StoreOutcome:
            self._flow.give_back(size)
            if not isinstance(ran, Done):
                if isinstance(ran.error, TierError):
                    self._keep_in_memory(obj)
                raise ran.error
            if disk.turn(obj.id.chunk, obj.id.shard) is not None:
                self._keep_in_memory(obj)
                self._faults.forget(obj.id.chunk)
                self._send(obj)
            self._stored[StoreOutcome.STORED] += 1
            return StoreOutcome.STORED

        return write.after(settle)

    def _prefetch_chunk(self, chunk: ChunkId, world: int, groups: int) -> Task[bool]:
        shards = (Shard(world, rank, group) for group in range(groups) for rank in range(world))
        pulling = self._reader.pull([ObjectId(*chunk, shard) for shard in shards])
        self._prefetching.add(chunk)

        def settle(ran: Ran[None], _now: float) -> bool:
            self._prefetching.discard(chunk)
            if not isinstance(ran, Done):
                raise ran.error
            return self._presence.all_in(chunk, world, groups, MEMORY)

        return pulling.after(settle)


def _check_keys(root: bytes, keys: Sequence[bytes]) -> None:
    checked_digest(root, "root")
    for key in keys:
        if len(key) != DIGEST_SIZE:
            checked_digest(key, "key")


def _tier_status(residency: Residency[StoredObject] | Residency[int]) -> TierStatus:
    return TierStatus(residency.budget, residency.used, len(residency), residency.objects, residency.evicted)
