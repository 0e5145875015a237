"""Requests and replies of wire protocol 2: one struct per message, bounds in the annotations.

Messages are maps with names and tolerate unknown ones, so that a later version may add a field; what carries identity
(`wire_keys.py`) does not. Which struct stands for which code is a table per wire version.
Source: docs/spec/wire-2.md, "Messages".
"""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from protocol_v2.body import decode, encode, split_map
from protocol_v2.codes import Code, ErrorCode, code_name
from protocol_v2.errors import MAX_ERROR_TEXT, RemoteProtocolError
from protocol_v2.tensors import TensorMeta
from protocol_v2.wire_keys import MAX_CHUNKS, U16, Keys, Position, Shard, refuse_unknown_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from protocol_v2.frames import Frame

LEASE_BYTES: Final = 16
SEGMENT_NONCE_BYTES: Final = 32
GRANULE: Final = 4096
"""Bytes of a granule of shared memory."""

SessionId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
LeaseId: TypeAlias = Annotated[bytes, Meta(min_length=LEASE_BYTES, max_length=LEASE_BYTES)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
U64: TypeAlias = Annotated[int, Meta(ge=0)]
ChunkTensors: TypeAlias = Annotated[tuple[TensorMeta, ...], Meta(min_length=1, max_length=1024)]


Pid: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
Descriptor: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
SegmentSize: TypeAlias = Annotated[int, Meta(ge=GRANULE, le=2**48, multiple_of=GRANULE)]
SegmentNonce: TypeAlias = Annotated[bytes, Meta(min_length=SEGMENT_NONCE_BYTES, max_length=SEGMENT_NONCE_BYTES)]


class SharedRange(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of the sender's segment (`shared_memory`): where the tensors of one chunk lie, back to back.

    Args:
        granule: index of the granule that it begins with.
        generation: of the range.
    """

    granule: Annotated[int, Meta(ge=0, lt=2**40)]
    generation: Annotated[int, Meta(ge=1, le=2**63 - 1)]


class Message(Struct, frozen=True, kw_only=True):
    """Base of all requests and replies."""

    code: ClassVar[Code]

    def payload_sizes(self) -> Iterator[int]:
        """Bytes that each payload frame must have, in order; most messages have none."""
        return iter(())

    def shared_bytes(self) -> int:
        """Bytes that the message names in shared memory, which travel in no frame."""
        return 0

    def answers(self, request: Message) -> bool:
        """Whether a reply says no more than was asked; what a caller may rely on without looking."""
        return request.code + 1 == self.code


class LookupRequest(Message, frozen=True, kw_only=True):
    """How many leading chunks does every shard hold?

    Args:
        session: the engine's request; bound to one identity by its first keyed message.
        keys: chunks of the prompt, from the first on.
        world: shards that a value has in each KV group.
        groups: KV groups; a chunk is held if every rank of every group is.
        lease: take a lease on the hit, so that it stays for the retrieve.
    """

    code: ClassVar[Code] = Code.LOOKUP
    session: SessionId
    keys: Keys
    world: Annotated[int, Meta(ge=1, le=0xFFFF)] = 1
    groups: Annotated[int, Meta(ge=1, le=0xFFFF)] = 1
    lease: bool = True


class LookupReply(Message, frozen=True, kw_only=True):
    """The hit.

    Args:
        hit_chunks: leading chunks that every shard holds.
        lease: names the hit in retrieve and release; None where none was asked for or nothing was hit.
        lease_ms: how long the lease lasts from now.
        miss: a `MissReason` for the first chunk that is not a hit (a number this version does not know stays one); None
            where all were.
    """

    code: ClassVar[Code] = Code.LOOKUP_REPLY
    hit_chunks: Count
    lease: LeaseId | None = None
    lease_ms: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    miss: U16 | None = None

    def answers(self, request: Message) -> bool:
        """No more chunks than there were keys."""
        return isinstance(request, LookupRequest) and self.hit_chunks <= request.keys.max_chunks


class RetrieveRequest(Message, frozen=True, kw_only=True):
    """Tensors of the chunks [first, first + count) of a lease, for one shard.

    Args:
        lease: of a lookup.
        first: the first chunk.
        count: how many.
        shard: whose tensors.
        shared: nonce of the server's segment that the client can read; unset: send everything inline.
    """

    code: ClassVar[Code] = Code.RETRIEVE
    lease: LeaseId
    first: Count = 0
    count: Positive
    shard: Shard = Shard()
    shared: SegmentNonce | UnsetType = UNSET


class RetrieveReply(Message, frozen=True, kw_only=True):
    """What was really delivered: a prefix of the range.

    The payload is chunk-major: all tensors of the first chunk, then of the second.

    Args:
        count: chunks delivered.
        starts: prompt position of each chunk's first token.
        n_tokens: tokens of each chunk.
        tensors: descriptions of one chunk's tensors: one list for all chunks, or one for each.
        miss: a `MissReason` for the first chunk of the range that was not delivered; None where all were.
        shared: for each chunk its range in the segment that the request named, or None for a chunk in the payload;
            unset: all are in the payload.
    """

    code: ClassVar[Code] = Code.RETRIEVE_REPLY
    count: Count
    starts: Annotated[tuple[Position, ...], Meta(max_length=MAX_CHUNKS)] = ()
    n_tokens: Annotated[tuple[Positive, ...], Meta(max_length=MAX_CHUNKS)] = ()
    tensors: Annotated[tuple[ChunkTensors, ...], Meta(max_length=MAX_CHUNKS)] = ()
    miss: U16 | None = None
    shared: Annotated[tuple[SharedRange | None, ...], Meta(max_length=MAX_CHUNKS)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        _check_chunks(self.count, self.starts, self.n_tokens, self.tensors)
        _check_shared(self.ranges, self.count, self.tensors)

    @property
    def ranges(self) -> Sequence[SharedRange | None]:
        """For each chunk its range, or None; empty where all are in the payload."""
        return () if self.shared is UNSET else self.shared

    def chunk_sizes(self) -> Iterator[int]:
        """Bytes of each chunk."""
        return _chunk_sizes(self.count, self.tensors)

    def payload_sizes(self) -> Iterator[int]:
        """Bytes of each frame."""
        return _sizes(self.count, self.tensors, self.ranges)

    def shared_bytes(self) -> int:
        """Bytes in the ranges."""
        return _shared_bytes(self.ranges, self.tensors)

    def answers(self, request: Message) -> bool:
        """No more chunks than were asked for, and shared memory only where it was."""
        if not isinstance(request, RetrieveRequest) or self.count > request.count:
            return False
        return self.shared is UNSET or request.shared is not UNSET


class StoreRequest(Message, frozen=True, kw_only=True):
    """Tensors of the chunks [first, first + len(n_tokens)) of a prompt, from one shard.

    Args:
        session: as in `LookupRequest`.
        keys: chunks of the prompt, from the first on, at least as far as the range.
        first: index of the first chunk that is stored.
        starts: prompt position of each stored chunk's first token.
        n_tokens: tokens of each stored chunk.
        shard: whose tensors these are.
        tensors: as in `RetrieveReply`.
        shared: for each chunk its range in the segment that the client attached; there is no payload then. Unset: all
            is in the payload.
    """

    code: ClassVar[Code] = Code.STORE
    session: SessionId
    keys: Keys
    first: Count = 0
    starts: Annotated[tuple[Position, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    n_tokens: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    shard: Shard = Shard()
    tensors: Annotated[tuple[ChunkTensors, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    shared: Annotated[tuple[SharedRange, ...], Meta(min_length=1, max_length=MAX_CHUNKS)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        _check_chunks(len(self.n_tokens), self.starts, self.n_tokens, self.tensors)
        _check_shared(self.ranges, len(self.n_tokens), self.tensors)

    @property
    def ranges(self) -> Sequence[SharedRange]:
        """For each chunk its range; empty where all are in the payload."""
        return () if self.shared is UNSET else self.shared

    def chunk_sizes(self) -> Iterator[int]:
        """Bytes of each chunk."""
        return _chunk_sizes(len(self.n_tokens), self.tensors)

    def payload_sizes(self) -> Iterator[int]:
        """Bytes of each frame."""
        return _sizes(len(self.n_tokens), self.tensors, self.ranges)

    def shared_bytes(self) -> int:
        """Bytes in the ranges."""
        return _shared_bytes(self.ranges, self.tensors)


class StoreReply(Message, frozen=True, kw_only=True):
    """What became of the chunks; the three counts add up to those sent.

    Args:
        stored: now visible.
        present: had been there already.
        declined: not kept, for want of room; not an error.
    """

    code: ClassVar[Code] = Code.STORE_REPLY
    stored: Count
    present: Count = 0
    declined: Count = 0

    def answers(self, request: Message) -> bool:
        """As many chunks as were sent."""
        return isinstance(request, StoreRequest) and self.stored + self.present + self.declined == len(request.n_tokens)


class PrefetchRequest(Message, frozen=True, kw_only=True):
    """Bring chunks from slower tiers into memory, without waiting for them. Fields as in `LookupRequest`."""

    code: ClassVar[Code] = Code.PREFETCH
    session: SessionId
    keys: Keys
    world: Annotated[int, Meta(ge=1, le=0xFFFF)] = 1
    groups: Annotated[int, Meta(ge=1, le=0xFFFF)] = 1


class PrefetchReply(Message, frozen=True, kw_only=True):
    """Chunks under way, and leading chunks that are in memory already."""

    code: ClassVar[Code] = Code.PREFETCH_REPLY
    accepted: Count
    resident: Count = 0


class ReleaseRequest(Message, frozen=True, kw_only=True):
    """Give back the chunks [first, first + count) of a lease; all from `first` on where count is None. Idempotent."""

    code: ClassVar[Code] = Code.RELEASE
    lease: LeaseId
    first: Count = 0
    count: Count | None = None


class ReleaseReply(Message, frozen=True, kw_only=True):
    """Chunks that this request gave back; 0 for a lease that is not known (any more)."""

    code: ClassVar[Code] = Code.RELEASE_REPLY
    released: Count


class EndSessionRequest(Message, frozen=True, kw_only=True):
    """The engine's request is over: its session and its leases end. Idempotent."""

    code: ClassVar[Code] = Code.END_SESSION
    session: SessionId


class EndSessionReply(Message, frozen=True, kw_only=True):
    """Whether there was such a session."""

    code: ClassVar[Code] = Code.END_SESSION_REPLY
    known: bool


class PingRequest(Message, frozen=True, kw_only=True):
    """Is the loop that does the work alive?"""

    code: ClassVar[Code] = Code.PING


class PingReply(Message, frozen=True, kw_only=True):
    """Said by the loop that does the work.

    Args:
        boot: the server's boot id; another one than the welcome's ends the session.
        uptime_ms: since the server started.
        loop_lag_us: how late the loop came to its timers at most, lately.
    """

    code: ClassVar[Code] = Code.PING_REPLY
    boot: Annotated[bytes, Meta(min_length=16, max_length=16)]
    uptime_ms: U64 = 0
    loop_lag_us: U64 = 0


class StatusRequest(Message, frozen=True, kw_only=True):
    """Facts for people and tools."""

    code: ClassVar[Code] = Code.STATUS


class StatusReply(Message, frozen=True, kw_only=True):
    """Facts by dotted name, such as `tier.memory.bytes`; which there are is the server's to say."""

    code: ClassVar[Code] = Code.STATUS_REPLY
    status: Annotated[dict[str, int | float | str | bool | None], Meta(max_length=4096)]


class ClearRequest(Message, frozen=True, kw_only=True):
    """Forget entries that are not leased: of the session's space (`space`), or all (`all`)."""

    code: ClassVar[Code] = Code.CLEAR
    scope: Annotated[str, Meta(pattern="^(space|all)$", max_length=16)]


class ClearReply(Message, frozen=True, kw_only=True):
    """What was forgotten."""

    code: ClassVar[Code] = Code.CLEAR_REPLY
    objects: U64
    bytes: U64 = 0


class AttachRequest(Message, frozen=True, kw_only=True):
    """Both are on one host, says the client: here is its segment, into which it stores; the server tells its own.

    Args:
        pid: of the client's process.
        fd: of the segment, in it.
        nonce: that the segment has in its head.
        size: bytes that its ranges can have together.
    """

    code: ClassVar[Code] = Code.ATTACH
    pid: Pid
    fd: Descriptor
    nonce: SegmentNonce
    size: SegmentSize


class AttachReply(Message, frozen=True, kw_only=True):
    """The server can read the client's segment; this is its own, from which the client retrieves. Fields likewise."""

    code: ClassVar[Code] = Code.ATTACH_REPLY
    pid: Pid
    fd: Descriptor
    nonce: SegmentNonce
    size: SegmentSize


class ErrorReply(Message, frozen=True, kw_only=True):
    """A request failed.

    Args:
        error: an `ErrorCode`, or a number that this version does not know.
        message: one sentence for people, without secrets.
        retriable: the same request may succeed later.
    """

    code: ClassVar[Code] = Code.ERROR
    error: U16
    message: Annotated[str, Meta(max_length=MAX_ERROR_TEXT)] = ""
    retriable: bool = False


Request: TypeAlias = (
    LookupRequest
    | RetrieveRequest
    | StoreRequest
    | PrefetchRequest
    | ReleaseRequest
    | EndSessionRequest
    | PingRequest
    | StatusRequest
    | ClearRequest
    | AttachRequest
)
Reply: TypeAlias = (
    LookupReply
    | RetrieveReply
    | StoreReply
    | PrefetchReply
    | ReleaseReply
    | EndSessionReply
    | PingReply
    | StatusReply
    | ClearReply
    | AttachReply
)

_WIRE_2: Final[tuple[type[Message], ...]] = (
    ErrorReply,
    LookupRequest,
    LookupReply,
    RetrieveRequest,
    RetrieveReply,
    StoreRequest,
    StoreReply,
    PrefetchRequest,
    PrefetchReply,
    ReleaseRequest,
    ReleaseReply,
    EndSessionRequest,
    EndSessionReply,
    PingRequest,
    PingReply,
    StatusRequest,
    StatusReply,
    ClearRequest,
    ClearReply,
    AttachRequest,
    AttachReply,
)

MESSAGES: Final[Mapping[int, Mapping[int, type[Message]]]] = MappingProxyType(
    {2: MappingProxyType({int(message.code): message for message in _WIRE_2})}
)
"""wire version -> code -> struct. A shape that changes is a new struct in a new row, never an edited one."""

_decoders: Final = {
    message: msgspec.msgpack.Decoder(message) for table in MESSAGES.values() for message in table.values()
}
_KEYED: Final = frozenset({LookupRequest, StoreRequest, PrefetchRequest})
_STRICT_MAPS: Final = ("keys", "shard")


def encode_message(message: Message) -> bytes:
    """The body of a message.

    Raises:
        LocalProtocolError: a value that cannot be encoded.
    """
    return encode(message)


def decode_message(code: int, body: Frame, *, wire: int) -> Message:
    """The message that a body holds, under an agreed wire version.

    Raises:
        RemoteProtocolError: `UNKNOWN_CODE`, `UNKNOWN_KIND` (of an extra key) or `MALFORMED`.
    """
    struct = MESSAGES[wire].get(code)
    if struct is None:
        raise RemoteProtocolError(ErrorCode.UNKNOWN_CODE, f"code: got {code}, which wire {wire} does not have")
    what = code_name(code)
    entries = split_map(body, what)
    for name in _STRICT_MAPS:
        if name in struct.__struct_fields__ and name in entries:
            split_map(memoryview(entries[name]), f"{what}.{name}")
    try:
        return decode(body, _decoders[struct], what)
    except RemoteProtocolError:
        if struct in _KEYED:
            refuse_unknown_kinds(body)
        raise


def _check_chunks(
    count: int, starts: tuple[int, ...], n_tokens: tuple[int, ...], tensors: tuple[tuple[TensorMeta, ...], ...]
) -> None:
    if len(starts) != count or len(n_tokens) != count:
        raise ValueError(f"chunks: got {len(starts)} starts and {len(n_tokens)} n_tokens, wanted {count} of each")
    if len(tensors) not in {min(count, 1), count}:
        raise ValueError(f"tensors: got {len(tensors)} lists, wanted one for all {count} chunks or one for each")


def _check_shared(
    ranges: Sequence[SharedRange | None], count: int, tensors: tuple[tuple[TensorMeta, ...], ...]
) -> None:
    if not ranges:
        return
    if len(ranges) != count:
        raise ValueError(f"shared: got {len(ranges)} ranges, wanted one for each of {count} chunks")
    taken = sorted(
        (one.granule, one.granule + max(1, -(-nbytes // GRANULE)))
        for one, nbytes in zip(ranges, _chunk_sizes(count, tensors), strict=True)
        if one is not None
    )
    for (_, stop), (start, _) in pairwise(taken):
        if start < stop:
            raise ValueError(f"shared: granule {start} is in two ranges; name each once")


def _chunk_sizes(count: int, tensors: tuple[tuple[TensorMeta, ...], ...]) -> Iterator[int]:
    """Bytes of each chunk."""
    sizes = [sum(meta.nbytes for meta in one) for one in tensors]
    return iter(sizes * count if len(sizes) == 1 else sizes)


def _shared_bytes(ranges: Sequence[SharedRange | None], tensors: tuple[tuple[TensorMeta, ...], ...]) -> int:
    if not ranges:
        return 0
    sizes = zip(ranges, _chunk_sizes(len(ranges), tensors), strict=True)
    return sum(nbytes for one, nbytes in sizes if one is not None)


def _sizes(
    count: int, tensors: tuple[tuple[TensorMeta, ...], ...], ranges: Sequence[SharedRange | None]
) -> Iterator[int]:
    if not tensors:
        return
    for chunk in range(count):
        if ranges and ranges[chunk] is not None:
            continue
        for meta in tensors[0] if len(tensors) == 1 else tensors[chunk]:
            yield meta.nbytes
