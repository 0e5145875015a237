"""What the cache core answers: plain frozen data, for a server to put on the wire and for a person to read."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol_v2.codes import MissReason
    from protocol_v2.storage.objects import StoredObject
    from protocol_v2.work import Task


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer to a lookup.

    Attributes:
        chunks: leading chunks that every shard holds.
        lease: names them, 16 bytes; None where none was asked for or nothing was hit.
        lease_seconds: how long the lease lasts from now; 0 without one.
        miss: why the first chunk that is not a hit is not one; None where all were.
    """

    chunks: int
    lease: bytes | None
    lease_seconds: float
    miss: MissReason | None


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Answer to a retrieve: the prefix of the range that is really there.

    Attributes:
        objects: one for each chunk delivered, in order; buffers are read-only and stay valid whatever is evicted.
        miss: why the first chunk of the range that was not delivered was not; None where all were.
    """

    objects: tuple[StoredObject, ...]
    miss: MissReason | None


class StoreOutcome(enum.Enum):
    """What became of a stored object that no tier failed on."""

    #: Visible now, and on disk to stay if there is a disk tier: the acknowledgement.
    STORED = "stored"
    #: It had been there already; what was sent is dropped.
    PRESENT = "present"
    #: Not kept, for want of room: all that could go is leased or its own prefix, it is larger than the budget, or the
    #: chunk before it is not there and something else would have to go for what no lookup can come to.
    DECLINED = "declined"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Answer to a prefetch.

    Attributes:
        resident: leading chunks that are in memory already.
        tasks: one for each chunk to be read, in order; results are of no interest to the asker.
    """

    resident: int
    tasks: tuple[Task[bool], ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Answer to a clear.

    Attributes:
        objects: objects that are gone, each counted once whatever tiers it was in.
        size: bytes that they were charged with, in all tiers.
        kept: chunks that stayed because they are leased.
    """

    objects: int
    size: int
    kept: int


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier, for people and tools.

    Attributes:
        budget: bytes that it may be charged with.
        used: bytes that it is charged with, object overhead or block rounding included.
        chunks: chunks of which it has at least one shard.
        objects: shards.
        evicted: chunks that had to go for want of room, since the start.
    """

    budget: int
    used: int
    chunks: int
    objects: int
    evicted: int


@dataclass(frozen=True, slots=True)
class RemoteStatus:
    """The remote tier, for people and tools. What it holds is not known here: others store and evict there too.

    Attributes:
        kind: ``redis``, ``s3``, ...
        address: where it is, without user, password and options.
        up: whether it is used; False while it does not answer.
        trips: how often it was found away.
        failed: calls that failed.
        last_error: what the last of them failed with; None where none did.
        known: chunks of which some shard is known to be there.
        asked: objects that were asked about.
        there: of these, that were there.
        late: lookups and prefetches that did not wait for the answer any longer.
        skipped: lookups and prefetches that did not ask though they would have: it is away, or too many ask.
        read: objects that were read.
        read_bytes: bytes of them.
        written: objects that were sent and taken.
        written_bytes: payload of them.
        dropped: objects that were not sent: the queue was full, they were cleared, or the server stopped.
        refused: objects that were sent and not taken.
        queued: objects that wait to be sent.
        queued_bytes: bytes of memory that they keep.
    """

    kind: str
    address: str
    up: bool
    trips: int
    failed: int
    last_error: str | None
    known: int
    asked: int
    there: int
    late: int
    skipped: int
    read: int
    read_bytes: int
    written: int
    written_bytes: int
    dropped: int
    refused: int
    queued: int
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The cache, for people and tools. Counters run since the start.

    Attributes:
        memory: the memory tier.
        disk: the disk tier; None without one.
        remote: the remote tier; None without one.
        hits: chunks that lookups hit.
        misses: lookups that did not hit all their chunks, by why the first one missed.
        retrieved: chunks delivered, by the tier they came from.
        undelivered: retrieves that delivered less than their range, by why.
        stored: objects by what became of them.
        failed: operations of the disk tier that failed.
        set_aside: objects that were found corrupt or foreign and moved to quarantine, by reason.
        quarantine: bytes in quarantine.
        leases: leases that stand.
        held: chunks that they hold, each counted as often as it is held.
        lapsed: expired leases that can be taken again.
        sessions: sessions that are open or cancelled.
        pending: bytes of operations under way.
        foreign_schemas: objects of other storage schemas that were seen and left alone, by schema number.
    """

    memory: TierStatus
    disk: TierStatus | None
    remote: RemoteStatus | None
    hits: int
    misses: Mapping[MissReason, int]
    retrieved: Mapping[str, int]
    undelivered: Mapping[MissReason, int]
    stored: Mapping[StoreOutcome, int]
    failed: int
    set_aside: Mapping[MissReason, int]
    quarantine: int
    leases: int
    held: int
    lapsed: int
    sessions: int
    pending: int
    foreign_schemas: Mapping[int, int]
