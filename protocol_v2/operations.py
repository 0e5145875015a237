"""What a client does for each call, as steps without I/O; the synchronous and the asyncio client both run these.

An operation is a generator: it yields what it needs (`AwaitLimits`, `Ask`), is sent what came of it, and returns the
result. What means "no cache now" (no server, no answer in time, a lost session, an expired lease) is a result that says
so in `failure`: a miss, not an exception. What means that the caller is wrong (an identity that does not fit its
session, values out of bounds) is raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from keying import ChunkKey
from protocol_v2.codes import ErrorCode, MissReason, miss_reason
from protocol_v2.errors import (
    ClientClosedError,
    LocalProtocolError,
    ProtocolError,
    ServerError,
    TensorError,
)
from protocol_v2.events import ReplyReceived
from protocol_v2.frames import MAX_PAYLOAD_FRAMES
from protocol_v2.hello import Limits
from protocol_v2.identity import keys_of_digests
from protocol_v2.messages import (
    ClearReply,
    ClearRequest,
    EndSessionReply,
    EndSessionRequest,
    LookupReply,
    LookupRequest,
    PingReply,
    PingRequest,
    PrefetchReply,
    PrefetchRequest,
    ReleaseReply,
    ReleaseRequest,
    Request,
    RetrieveReply,
    RetrieveRequest,
    StatusReply,
    StatusRequest,
    StoreReply,
    StoreRequest,
)
from protocol_v2.tensors import TensorMeta, to_frames
from protocol_v2.wire_keys import Keys, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from keying import KeySpace
    from protocol_v2.frames import Frame

R = TypeVar("R")

_CALLER_IS_WRONG: Final = frozenset(
    {
        ErrorCode.MALFORMED,
        ErrorCode.UNKNOWN_CODE,
        ErrorCode.TOO_LARGE,
        ErrorCode.INVALID_IDENTITY,
        ErrorCode.UNKNOWN_KIND,
        ErrorCode.IDENTITY_MISMATCH,
        ErrorCode.NO_SPACE,
        ErrorCode.UNEXPECTED,
        ErrorCode.UNSUPPORTED,
    }
)


@dataclass(frozen=True, slots=True)
class AwaitLimits:
    """Needs the server's limits; is sent `Limits` or the error that there is instead."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Needs a reply; is sent `ReplyReceived` or the error that there is instead."""

    message: Request
    payload: tuple[Frame, ...] = field(default=(), repr=False)
    keys: Keys | None = field(default=None, repr=False)  # see `SendRequest`


Step: TypeAlias = AwaitLimits | Ask
Answer: TypeAlias = Limits | ReplyReceived | ProtocolError
Operation: TypeAlias = "Generator[Step, Answer, R]"
KeysLike: TypeAlias = "Keys | Sequence[ChunkKey] | Sequence[bytes]"


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


def lookup(*, session: str, keys: KeysLike, world: int, groups: int, lease: bool) -> Operation[LookupResult]:
    """How many leading chunks does every shard hold?"""
    message = LookupRequest(session=session, keys=as_keys(keys), world=index(world), groups=index(groups), lease=lease)
    answer = yield Ask(message)
    reply = _reply(answer, LookupReply)
    if isinstance(reply, ProtocolError):
        return LookupResult(failure=reply)
    return LookupResult(reply.hit_chunks, reply.lease, reply.lease_ms / 1000, _reason(reply.miss))


def retrieve(
    *,
    lease: bytes,
    first: int,
    count: int,
    shard: Shard,
    make: Callable[[TensorMeta, Frame], Any],
    keys: KeysLike | None = None,
) -> Operation[RetrieveResult]:
    """Tensors of a leased range; asks again for what did not fit one message."""
    first, count = index(first), index(count)
    if count < 1:
        raise LocalProtocolError(f"count: got {count}, wanted at least one chunk")
    known = None if keys is None else as_keys(keys)
    chunks: list[RetrievedChunk] = []
    while len(chunks) < count:
        rest = count - len(chunks)
        message = RetrieveRequest(lease=lease, first=first + len(chunks), count=rest, shard=shard)
        answer = yield Ask(message, keys=known)
        reply = _reply(answer, RetrieveReply)
        if isinstance(reply, ProtocolError):
            return RetrieveResult(tuple(chunks), failure=reply)
        chunks += _chunks(reply, answer.payload if isinstance(answer, ReplyReceived) else (), make)
        if reply.miss is not None or reply.count == 0:
            return RetrieveResult(tuple(chunks), _reason(reply.miss))
    return RetrieveResult(tuple(chunks))


def store(
    *,
    session: str,
    keys: KeysLike,
    tensors: Sequence[Any],
    first: int,
    shard: Shard,
    places: Sequence[tuple[int, int]] | None,
    space: KeySpace | None,
) -> Operation[StoreResult]:
    """Store one shard's tensors of the chunks [first, first + len(tensors)), in as many requests as the limits want."""
    make = partial(StoreRequest, session=session, keys=as_keys(keys), shard=shard)
    chunks = [_as_chunk(one) for one in tensors]
    first = index(first)
    where = _places(keys, first, len(chunks), places, space)
    done = StoreResult()
    if not chunks:
        return done
    limits = yield AwaitLimits()
    if isinstance(limits, ProtocolError):
        return StoreResult(failure=_tolerated(limits))
    if not isinstance(limits, Limits):
        raise TypeError(f"got {type(limits).__name__} where limits were awaited")
    for begin, end in _batches(chunks, limits):
        answer = yield _store_part(make, first + begin, chunks[begin:end], where[begin:end])
        reply = _reply(answer, StoreReply)
        if isinstance(reply, ProtocolError):
            return StoreResult(done.stored, done.present, done.declined, reply)
        done = StoreResult(done.stored + reply.stored, done.present + reply.present, done.declined + reply.declined)
    return done


def prefetch(*, session: str, keys: KeysLike, world: int, groups: int) -> Operation[PrefetchResult]:
    """Bring chunks from slower tiers nearer."""
    answer = yield Ask(PrefetchRequest(session=session, keys=as_keys(keys), world=index(world), groups=index(groups)))
    reply = _reply(answer, PrefetchReply)
    if isinstance(reply, ProtocolError):
        return PrefetchResult(failure=reply)
    return PrefetchResult(reply.accepted, reply.resident)


def release(*, lease: bytes, first: int, count: int | None) -> Operation[ReleaseResult]:
    """Give back a part of a lease, or all."""
    message = ReleaseRequest(lease=lease, first=index(first), count=None if count is None else index(count))
    reply = _reply((yield Ask(message)), ReleaseReply)
    return ReleaseResult(failure=reply) if isinstance(reply, ProtocolError) else ReleaseResult(reply.released)


def end_session(*, session: str) -> Operation[EndSessionResult]:
    """The engine's request is over."""
    reply = _reply((yield Ask(EndSessionRequest(session=session))), EndSessionReply)
    return EndSessionResult(failure=reply) if isinstance(reply, ProtocolError) else EndSessionResult(reply.known)


def ping() -> Operation[PingReply]:
    """Is the loop alive? Raises if not."""
    return _certain(_reply((yield Ask(PingRequest())), PingReply))


def status() -> Operation[dict[str, int | float | str | bool | None]]:
    """The server's facts. Raises if there are none."""
    return dict(_certain(_reply((yield Ask(StatusRequest())), StatusReply)).status)


def clear(*, scope: str) -> Operation[ClearResult]:
    """Forget entries. Raises if the server did not say that it did."""
    reply = _certain(_reply((yield Ask(ClearRequest(scope=scope))), ClearReply))
    return ClearResult(reply.objects, reply.bytes)


def as_keys(keys: KeysLike) -> Keys:
    """Keys as they travel: chunk keys and digests are packed, `Keys` stay as they are."""
    return keys if isinstance(keys, Keys) else keys_of_digests(keys)


def _reply(answer: Answer, kind: type[R]) -> R | ProtocolError:
    """The reply, or an error that is a result; any other error is raised."""
    if isinstance(answer, ProtocolError):
        return _tolerated(answer)
    if isinstance(answer, ReplyReceived) and isinstance(answer.message, kind):
        return answer.message
    raise TypeError(f"got {type(answer).__name__} where a {kind.__name__} was awaited")


def _tolerated(error: ProtocolError) -> ProtocolError:
    """An error that means "no cache now"."""
    wrong = isinstance(error, LocalProtocolError | ClientClosedError | TensorError)
    if isinstance(error, ServerError) and error.error_code in _CALLER_IS_WRONG:
        wrong = True
    if wrong:
        raise error
    return error


def _certain(reply: R | ProtocolError) -> R:
    if isinstance(reply, ProtocolError):
        raise reply
    return reply


def _reason(miss: int | None) -> MissReason | int | None:
    return None if miss is None else miss_reason(miss)


def _chunks(
    reply: RetrieveReply, payload: Sequence[Frame], make: Callable[[TensorMeta, Frame], Any]
) -> Iterable[RetrievedChunk]:
    frames = iter(payload)
    for place in range(reply.count):
        metas = reply.tensors[0] if len(reply.tensors) == 1 else reply.tensors[place]
        made = tuple(make(meta, next(frames)) for meta in metas)
        yield RetrievedChunk(reply.starts[place], reply.n_tokens[place], made)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk's tensors, described and as frames."""

    metas: tuple[TensorMeta, ...]
    frames: list[Frame]
    nbytes: int


def _as_chunk(tensors: Any) -> _Chunk:
    """A tensor, or a sequence of them, that is one chunk's value."""
    several = tensors if isinstance(tensors, list | tuple) else [tensors]
    metas, frames = to_frames(several)
    if not metas:
        raise TensorError("tensors: a chunk has none; give at least one for each")
    return _Chunk(metas, frames, sum(meta.nbytes for meta in metas))


def _places(
    keys: KeysLike, first: int, count: int, places: Sequence[tuple[int, int]] | None, space: KeySpace | None
) -> Sequence[tuple[int, int]]:
    """Start and tokens of each stored chunk: as given, of the chunk keys, or of full chunks."""
    if places is not None:
        if len(places) != count:
            raise LocalProtocolError(f"places: got {len(places)}, wanted one for each of {count} chunks")
        return places
    if not isinstance(keys, Keys):
        own = [(one.start, one.stop - one.start) for one in keys[first : first + count] if isinstance(one, ChunkKey)]
        if len(own) == count:
            return own
    if space is None:
        raise LocalProtocolError("places: without a space the places of chunks must be given, or chunk keys")
    return [((first + i) * space.chunk_size, space.chunk_size) for i in range(count)]


def _batches(chunks: Sequence[_Chunk], limits: Limits) -> Iterable[tuple[int, int]]:
    """Ranges of chunks, each as long as the limits allow and at least one chunk."""
    begin = nbytes = frames = 0
    for place, chunk in enumerate(chunks):
        fits = nbytes + chunk.nbytes <= limits.max_payload_bytes and frames + len(chunk.frames) <= MAX_PAYLOAD_FRAMES
        if place > begin and not fits:
            yield begin, place
            begin, nbytes, frames = place, 0, 0
        nbytes, frames = nbytes + chunk.nbytes, frames + len(chunk.frames)
    yield begin, len(chunks)


def _store_part(
    make: Callable[..., StoreRequest], first: int, chunks: Sequence[_Chunk], where: Sequence[tuple[int, int]]
) -> Ask:
    """One request of a store: descriptions are shared where all chunks have the same."""
    shared = all(chunk.metas == chunks[0].metas for chunk in chunks)
    message = make(
        first=first,
        starts=tuple(start for start, _ in where),
        n_tokens=tuple(n_tokens for _, n_tokens in where),
        tensors=(chunks[0].metas,) if shared else tuple(chunk.metas for chunk in chunks),
    )
    return Ask(message, tuple(frame for chunk in chunks for frame in chunk.frames))
