"""What a client's call gives: what came of it, and where no cache answered, why (`failure`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protocol_v2.codes import MissReason
    from protocol_v2.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Leading chunks that every shard holds.

    Attributes:
        hit_chunks: how many.
        lease: names them in `retrieve` and `release`; None where none was asked for, or nothing was hit.
        lease_seconds: how long the lease lasts from the reply on.
        miss: why the first chunk that is not a hit is none; None where all were, or there is a failure.
        failure: why there is no answer from a cache; None where there is.
    """

    hit_chunks: int = 0
    lease: bytes | None = None
    lease_seconds: float = 0.0
    miss: MissReason | int | None = None
    failure: ProtocolError | None = None


@dataclass(frozen=True, slots=True)
class RetrievedChunk:
    """One chunk's value for one shard.

    Attributes:
        start: prompt position of its first token.
        n_tokens: tokens of it.
        tensors: as they were stored, over the received memory, which nobody else has.
    """

    start: int
    n_tokens: int
    tensors: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RetrieveResult:
    """What was really delivered: a prefix of what was asked for.

    Attributes:
        chunks: the prefix.
        miss: why the first chunk that was not delivered was not; None where all were, or there is a failure.
        failure: why no (more) answer came from a cache.
    """

    chunks: tuple[RetrievedChunk, ...] = ()
    miss: MissReason | int | None = None
    failure: ProtocolError | None = None


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of the chunks.

    Attributes:
        stored: now visible.
        present: had been there already.
        declined: not kept, for want of room.
        failure: why the rest has no answer; those chunks may or may not be there.
    """

    stored: int = 0
    present: int = 0
    declined: int = 0
    failure: ProtocolError | None = None


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """Chunks under way, and leading chunks in memory already."""

    accepted: int = 0
    resident: int = 0
    failure: ProtocolError | None = None


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """Chunks given back. After a failure the lease ends by itself: with its time, or with the session."""

    released: int = 0
    failure: ProtocolError | None = None


@dataclass(frozen=True, slots=True)
class EndSessionResult:
    """Whether there was such a session."""

    known: bool = False
    failure: ProtocolError | None = None


@dataclass(frozen=True, slots=True)
class ClearResult:
    """Objects and bytes that were forgotten."""

    objects: int
    bytes: int
