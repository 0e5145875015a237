"""What a client does for each call, as steps without I/O; the synchronous and the asyncio client both run these.

An operation is a generator: it yields what it needs (`AwaitLimits`, `Ask`), is sent what came of it, and returns the
result. What means "no cache now" (no server, no answer in time, a lost session, an expired lease) is a result that says
so in `failure`: a miss, not an exception. What means that the caller is wrong (an identity that does not fit its
session, values out of bounds) is raised.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from msgspec import UNSET

from keying import ChunkKey
from protocol_v2.client_sharing import BATCH_BYTES, BATCHES
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
from protocol_v2.results import (
    ClearResult,
    EndSessionResult,
    LookupResult,
    PrefetchResult,
    ReleaseResult,
    RetrievedChunk,
    RetrieveResult,
    StoreResult,
)
from protocol_v2.stored_messages import metas_of, values_of
from protocol_v2.tensors import TensorMeta, to_frames
from protocol_v2.wire_keys import Keys, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from keying import KeySpace
    from protocol_v2.client_sharing import ClientSharing, Staged
    from protocol_v2.frames import Frame
    from protocol_v2.messages import SharedRange

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


@dataclass(frozen=True, slots=True)
class Begin:
    """Needs a request sent; is sent `Begun`, for `Collect`, or the error that there is instead."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that was sent, as whoever runs the operation knows it."""

    handle: Any


@dataclass(frozen=True, slots=True)
class Collect:
    """Needs the reply to what was begun; is sent the same as for `Ask`."""

    begun: Begun


@dataclass(frozen=True, slots=True)
class Do:
    """Needs work done that blocks for as long as copying takes; is sent `Did`, or what the work raised."""

    work: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Did:
    """What the work returned."""

    value: Any


Step: TypeAlias = AwaitLimits | Ask | Begin | Collect | Do
Answer: TypeAlias = Limits | ReplyReceived | ProtocolError | Begun | Did
Operation: TypeAlias = "Generator[Step, Answer, R]"
KeysLike: TypeAlias = "Keys | Sequence[ChunkKey] | Sequence[bytes]"


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
    sharing: ClientSharing | None = None,
) -> Operation[RetrieveResult]:
    """Tensors of a leased range; asks again for what did not fit one message."""
    first, count = index(first), index(count)
    if count < 1:
        raise LocalProtocolError(f"count: got {count}, wanted at least one chunk")
    known = None if keys is None else as_keys(keys)
    chunks: list[RetrievedChunk] = []
    while len(chunks) < count:
        rest = count - len(chunks)
        reader = None if sharing is None else sharing.reader
        message = RetrieveRequest(
            lease=lease,
            first=first + len(chunks),
            count=rest,
            shard=shard,
            shared=UNSET if reader is None else reader.name.nonce,
        )
        answer = yield Ask(message, keys=known)
        reply = _reply(answer, RetrieveReply)
        if isinstance(reply, ProtocolError):
            return RetrieveResult(tuple(chunks), failure=reply)
        payload = answer.payload if isinstance(answer, ReplyReceived) else ()
        if not reply.ranges or sharing is None or reader is None:
            chunks += _chunks(reply, values_of(reply.count, reply.tensors, payload), make)
        else:
            did = yield Do(partial(sharing.gather, reader, reply, payload))
            values = did.value if isinstance(did, Did) else []
            chunks += _chunks(reply, values, make)
            if len(values) < reply.count:
                return RetrieveResult(tuple(chunks), MissReason.ABSENT)
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
    sharing: ClientSharing | None = None,
) -> Operation[StoreResult]:
    """Store one shard's tensors of the chunks [first, first + len(tensors)), in as many requests as the limits want.

    Through shared memory several requests are under way: while the server copies one, the next is copied here.
    """
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
    most = limits.max_payload_bytes
    shares = sharing is not None and sharing.reader is not None
    parts = deque[_Part]()
    try:
        for begin, end in _batches(chunks, min(most, BATCH_BYTES) if shares else most):
            part = _Part(partial(_store_part, make, first + begin, chunks[begin:end], where[begin:end]))
            if sharing is not None:
                yield from part.begin(sharing, chunks[begin:end])
            parts.append(part)
            while parts and (parts[0].begun is None or len(parts) >= BATCHES):
                reply = _reply((yield from parts[0].end()), StoreReply)
                parts.popleft()
                if isinstance(reply, ProtocolError):
                    return _added(done, StoreReply(stored=0), reply)
                done = _added(done, reply)
        while parts:
            reply = _reply((yield from parts[0].end()), StoreReply)
            parts.popleft()
            if isinstance(reply, ProtocolError):
                return _added(done, StoreReply(stored=0), reply)
            done = _added(done, reply)
    finally:
        for part in parts:
            part.withdraw()
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
    reply: RetrieveReply, values: Sequence[Sequence[Frame]], make: Callable[[TensorMeta, Frame], Any]
) -> Iterable[RetrievedChunk]:
    for place, frames in enumerate(values):
        metas = metas_of(reply.tensors, place)
        made = tuple(make(meta, frame) for meta, frame in zip(metas, frames, strict=True))
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


def _batches(chunks: Sequence[_Chunk], most: int) -> Iterable[tuple[int, int]]:
    """Ranges of chunks, each of `most` bytes and the frames of a message at most, and at least one chunk."""
    begin = nbytes = frames = 0
    for place, chunk in enumerate(chunks):
        fits = nbytes + chunk.nbytes <= most and frames + len(chunk.frames) <= MAX_PAYLOAD_FRAMES
        if place > begin and not fits:
            yield begin, place
            begin, nbytes, frames = place, 0, 0
        nbytes, frames = nbytes + chunk.nbytes, frames + len(chunk.frames)
    yield begin, len(chunks)


class _Part:
    """One request of a store: through shared memory if it can be, else inline.

    Args:
        ask: makes the request, given the ranges that its chunks are in.

    Attributes:
        begun: the request through shared memory, once it was sent.
    """

    def __init__(self, ask: Callable[[Sequence[SharedRange]], Ask]) -> None:
        self._ask = ask
        self._staged: Staged | None = None
        self.begun: Begun | None = None

    def begin(self, sharing: ClientSharing, chunks: Sequence[_Chunk]) -> Generator[Step, Answer, None]:
        """Copy the chunks into shared memory and send the request; nothing where there is no room."""
        did = yield Do(partial(sharing.stage, [chunk.frames for chunk in chunks]))
        self._staged = did.value if isinstance(did, Did) else None
        if self._staged is not None:
            begun = yield Begin(self._ask(self._staged.ranges))
            self.begun = begun if isinstance(begun, Begun) else None

    def end(self) -> Generator[Step, Answer, Answer]:
        """The answer; where shared memory failed, to the same request sent inline."""
        if self.begun is not None:
            answer = yield Collect(self.begun)
            self.withdraw()
            code = getattr(answer, "error_code", None) if isinstance(answer, ProtocolError) else None
            if code != ErrorCode.UNSHARED:
                return answer
        self.withdraw()
        return (yield self._ask(()))

    def withdraw(self) -> None:
        """What was announced is not valid any more."""
        if self._staged is not None:
            self._staged.withdraw()
            self._staged = None


def _added(done: StoreResult, reply: StoreReply, failure: ProtocolError | None = None) -> StoreResult:
    return StoreResult(
        done.stored + reply.stored, done.present + reply.present, done.declined + reply.declined, failure
    )


def _store_part(
    make: Callable[..., StoreRequest],
    first: int,
    chunks: Sequence[_Chunk],
    where: Sequence[tuple[int, int]],
    ranges: Sequence[SharedRange],
) -> Ask:
    """One request of a store: descriptions are shared where all chunks have the same. No ranges: payload inline."""
    shared = all(chunk.metas == chunks[0].metas for chunk in chunks)
    message = make(
        first=first,
        starts=tuple(start for start, _ in where),
        n_tokens=tuple(n_tokens for _, n_tokens in where),
        tensors=(chunks[0].metas,) if shared else tuple(chunk.metas for chunk in chunks),
        shared=tuple(ranges) or UNSET,
    )
    return Ask(message, () if ranges else tuple(frame for chunk in chunks for frame in chunk.frames))
