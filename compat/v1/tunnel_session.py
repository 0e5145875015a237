"""`V1Tunnel`: the requests of wire protocol 2, spoken to a v1 server that keys on token ids alone.

Takes the place of a `ClientConnection` in a client's session keeper (`protocol_v2.foreign`). Sans-IO: each request is a
generator that yields v1 calls and is sent their values; time is an argument.

Theory of operation
-------------------
Nothing is keyed by what the server might drop: chunks are token ids expanded from schema-2 keys (`compat.tunnel`), the
model's name is the space's root, the salt is empty. Values carry their envelope, and are verified against the identity
derived here (`tunnel_objects`). Every lookup and store has a v1 request id of its own, made from the boot id, the last
key and a counter, so none is ever used for two identities.

A v1 server answers nothing when it cannot or will not: then the request ends with its deadline. What must be there
before any keyed call (its chunk size, a registered layout) is asked for with a shorter one; a server that does not fit
is bypassed for a while, with the reason in the failure.

Source: docs/spec/v1-formats.md, "Tunnel".
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from compat.v1.operations import MAX_TOKENS, MAX_WORLD_SIZE, V1Key, V1Operation, V1Registration
from compat.v1.tunnel_calls import Call, CallRunner, NoAnswerError
from compat.v1.tunnel_leases import TunnelLease
from compat.v1.tunnel_objects import model_name, open_chunks, pack_object, pickle_chunks
from keying.encoding import U64, framed, text
from protocol_v2.codes import ErrorCode, MissReason
from protocol_v2.errors import (
    LocalProtocolError,
    QueueFullError,
    RemoteProtocolError,
    ServerError,
    SessionLostError,
    UnsupportedServerError,
)
from protocol_v2.events import SessionLost
from protocol_v2.hello import Limits
from protocol_v2.identity import check_places, resolve_keys
from protocol_v2.messages import (
    AttachRequest,
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
    RetrieveRequest,
    StatusReply,
    StatusRequest,
    StoreReply,
    StoreRequest,
)
from protocol_v2.storage import ObjectId, Shard
from protocol_v2.storage.envelope import encoded_size
from protocol_v2.stored_messages import objects_of_store, reply_of_objects, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from compat.v1.tunnel_calls import Part, Steps
    from compat.v1.tunnel_leases import LeaseBook
    from compat.v1.tunnel_objects import ChunkExpander
    from keying import KeySpace
    from protocol_v2.events import Event, SendRequest
    from protocol_v2.frames import Frame
    from protocol_v2.messages import Reply
    from protocol_v2.storage import StoredObject
    from protocol_v2.wire_keys import Keys

log = logging.getLogger(__name__)

MAX_PENDING: Final = 256
MAX_PAYLOAD_BYTES: Final = 256 * 1024 * 1024
"""Bytes of one store or of one answer: what is pickled at one time."""

PREPARE_SECONDS: Final = 5.0
"""For what must be known before the first keyed call. A healthy server answers in a millisecond."""

UNFIT_SECONDS: Final = 30.0
"""How long a server that does not fit is not asked again."""

WAIT_SECONDS: Final = 2.0
"""How long the server holds one wait for a lookup's result; it is asked again after that."""

MAX_GROUPS: Final = 64
"""KV groups; each is looked up by itself."""

MAX_SIZES: Final = 64
"""Sizes of chunks for which a layout is registered; one that is used again comes with no cost."""

_LEASE_MS: Final = 60_000


class _Whose(NamedTuple):
    """Whose part of a value: one rank's, or with None every rank's."""

    world: int
    group: int
    rank: int | None = None


class V1Tunnel:
    """One session with a v1 server.

    Args:
        space: of all keys.
        expander: of its chunk size.
        leases: where hits are remembered.
        boot_id: 16 bytes, made anew in every process.
        count: told the name of each thing that happens, for counters.
    """

    def __init__(
        self,
        space: KeySpace,
        *,
        expander: ChunkExpander,
        leases: LeaseBook,
        boot_id: bytes,
        count: Callable[[str], None],
    ) -> None:
        self._space = space
        self._expander = expander
        self._leases = leases
        self._boot_id = boot_id
        self._count = count
        self._limits = Limits(
            max_payload_bytes=MAX_PAYLOAD_BYTES,
            max_chunks=max(1, min(16_384, MAX_TOKENS // space.chunk_size)),
            max_pending=MAX_PENDING,
            lease_ms=_LEASE_MS,
        )
        self._session_id = os.urandom(16)
        self._next_id = 1
        self._next_number = 0
        self._calls = CallRunner()
        self._fits = False
        self._unfit: UnsupportedServerError | None = None
        self._unfit_until = -math.inf
        self._instances: dict[tuple[int, int, int], int] = {}  # world, group, bytes of a chunk -> instance id
        self._sizes: dict[tuple[int, int], int] = {}  # world, group -> bytes of a chunk, as last seen

    # ---- driven by the keeper

    @property
    def limits(self) -> Limits:
        """What requests are held to."""
        return self._limits

    def new_request_id(self) -> int:
        """An id that this tunnel has not used."""
        request_id = self._next_id
        self._next_id += 1
        return request_id

    def send(self, event: SendRequest, now: float) -> None:
        """Take a request; what to send for it comes out of `take_outgoing`.

        Raises:
            QueueFullError: too many are pending.
            LocalProtocolError: a timeout that is none, or a payload that is not what the message announces.
        """
        if len(self._calls) >= MAX_PENDING:
            raise QueueFullError(f"{len(self._calls)} requests are pending; wait for one")
        seconds = self._limits.default_deadline_ms / 1000 if event.timeout is None else event.timeout
        if not 0 < seconds < math.inf:
            raise LocalProtocolError(f"timeout: got {seconds}, wanted a number of seconds above 0")
        if [memoryview(frame).nbytes for frame in event.payload] != list(event.message.payload_sizes()):
            raise LocalProtocolError("payload: frames are not of the sizes that the message announces")
        self._calls.start(event.request_id, self._steps(event, now), now + seconds, now)

    def receive_frames(self, frames: Sequence[Frame], now: float) -> list[Event]:
        """Take a message of the server; what answers nothing that is waited for is ignored."""
        self._calls.receive(frames, now)
        return self._calls.take_events()

    def take_outgoing(self) -> list[list[Frame]]:
        """Messages to send now."""
        return self._calls.take_outgoing()

    def abandon(self, request_id: int) -> None:
        """Forget a request."""
        self._calls.abandon(request_id)

    def expire(self, now: float) -> list[Event]:
        """Let time pass: calls and requests that had their time end."""
        self._calls.expire(now)
        return self._calls.take_events()

    def next_timeout(self) -> float | None:
        """When `expire` has something to do."""
        return self._calls.next_timeout()

    def lose(self, reason: str) -> list[Event]:
        """The socket is gone; everything pending fails."""
        self._calls.fail_all(SessionLostError(f"session lost: {reason}"))
        return [SessionLost(reason), *self._calls.take_events()]

    def _steps(self, event: SendRequest, now: float) -> Steps:
        match message := event.message:
            case LookupRequest():
                return self._lookup(message, now)
            case RetrieveRequest():
                return self._retrieve(message, event.keys, now)
            case StoreRequest():
                return self._store(message, event.payload, now)
            case ReleaseRequest():
                return self._release(message, now)
            case EndSessionRequest():
                return self._end_session(message)
            case PingRequest():
                return self._ping()
            case PrefetchRequest():
                return _at_once(PrefetchReply(accepted=0))  # a lookup has v1 servers prefetch by themselves
            case StatusRequest():
                return _at_once(StatusReply(status=self._facts()))
            case ClearRequest():
                return _refused("clear: a v1 server can only forget the entries of all its clients")
            case AttachRequest():
                return _refused("attach: a v1 server's shared memory is not this protocol's")

    # ---- what each request does

    def _lookup(self, message: LookupRequest, now: float) -> Steps:
        digests = resolve_keys(message.keys, self._space, max_chunks=self._limits.max_chunks).digests
        _check_world(message.world, message.groups)
        if not digests:
            return LookupReply(hit_chunks=0), ()
        yield from self._prepare(now)
        request_ids: list[str] = []
        hits: list[int] = []
        for group in range(message.groups):
            yield from self._register_any(message.world, group, now)
            request_id, hit = yield from self._look(digests, _Whose(message.world, group))
            request_ids.append(request_id)
            hits.append(hit)
        hit = min(hits)
        kept = hit if message.lease else 0
        for group, more in enumerate(hits):  # nobody is told of these
            yield from self._free(request_ids[group], digests, (kept, more), _Whose(message.world, group))
        self._count("lookups")
        miss = None if hit == len(digests) else MissReason.ABSENT
        if not kept:
            self._end_v1(request_ids)
            return LookupReply(hit_chunks=hit, miss=miss), ()
        lease = TunnelLease(digests[:hit], message.world, request_ids, message.session, now)
        self._leases.put(lease)
        return LookupReply(hit_chunks=hit, lease=lease.id, lease_ms=_LEASE_MS, miss=miss), ()

    def _retrieve(self, message: RetrieveRequest, keys: Keys | None, now: float) -> Steps:
        shard, stop = message.shard, message.first + message.count
        lease = self._leases.find(message.lease, now)
        if lease is None and keys is not None:
            digests = resolve_keys(keys, self._space, max_chunks=self._limits.max_chunks).digests[:stop]
            _check_world(shard.world, shard.group + 1)
            lease = TunnelLease.elsewhere(digests, shard, now)
        if lease is None:
            raise ServerError(
                ErrorCode.LEASE_UNKNOWN,
                "no such lease in this process; hand the keys to retrieve, or look up again",
                retriable=False,
            )
        if stop > len(lease.digests) or shard.world != lease.world or shard.group >= lease.groups:
            raise ServerError(ErrorCode.MALFORMED, "retrieve: not a part of that lease", retriable=False)
        yield from self._prepare(now)
        objects: list[StoredObject] = []
        miss: MissReason | None = None
        while miss is None and len(objects) < message.count:
            first = message.first + len(objects)
            size = self._sizes.get((shard.world, shard.group))  # not known yet: one chunk tells
            room = 1 if size is None else max(1, MAX_PAYLOAD_BYTES // max(size, 1))
            last = min(stop, first + room)
            found, miss = yield from self._fetch(lease, first, last, Shard(shard.world, shard.rank, shard.group), now)
            objects += found
        if lease.rank is not None:
            yield from self._end_own(lease)
        self._count("retrieves")
        return reply_of_objects(objects, miss)

    def _fetch(
        self, lease: TunnelLease, start: int, stop: int, shard: Shard, now: float
    ) -> Generator[Call, Any, tuple[list[StoredObject], MissReason | None]]:
        """Chunks of one shard, as many as one answer holds; looked up again, once, if there are no locks on them."""
        instance = yield from self._register_any(shard.world, shard.group, now)
        whose = _Whose(shard.world, shard.group, shard.rank)
        for again in (False, True):
            if again:
                if lease.rank is not None:
                    yield from self._end_own(lease)
                request_id, hit = yield from self._look(lease.digests, _Whose(shard.world, shard.group, lease.rank))
                lease.lock_again(shard.group, request_id, hit)
                stop = min(stop, hit)
                if stop <= start:
                    break
            elif not lease.request_ids[shard.group]:
                continue
            key = self._key(lease.digests[:stop], lease.request_ids[shard.group], whose, start)
            answer = yield from self._transfer(V1Operation.PREPARE_RETRIEVE, key, instance)
            if not answer.success:
                continue
            lease.give_back(start, stop, shard.group, shard.rank)
            if not len(answer.data):
                raise self._not_fit(
                    "it gives tensors out in shared memory alone; start it with an empty --shm-name", now
                )
            wanted = [ObjectId(self._space.root, digest, shard) for digest in lease.digests[start:stop]]
            objects, miss = open_chunks(answer.data, wanted)
            if objects:
                self._sizes[shard.world, shard.group] = encoded_size(objects[0].envelope)
            if miss is not None:
                self._count(f"misses.{miss.name.lower()}")
            return objects, miss
        return [], MissReason.ABSENT

    def _store(self, message: StoreRequest, payload: Sequence[Frame], now: float) -> Steps:
        chunks = resolve_keys(message.keys, self._space, max_chunks=self._limits.max_chunks)
        check_places(chunks, message.first, message.starts, message.n_tokens)
        _check_world(message.shard.world, message.shard.group + 1)
        yield from self._prepare(now)
        shard = message.shard
        values = values_of(len(message.n_tokens), message.tensors, payload)
        packed = [pack_object(obj) for obj in objects_of_store(self._space.root, chunks.digests, message, values)]
        stored = declined = done = 0
        request_id = self._new_request_id(chunks.digests[message.first + len(packed) - 1])
        while done < len(packed):
            size = len(packed[done])
            end = next((i for i in range(done, len(packed)) if len(packed[i]) != size), len(packed))
            instance = yield from self._register(shard.world, shard.group, size, now)
            first, stop = message.first + done, message.first + end
            key = self._key(chunks.digests[:stop], request_id, _Whose(shard.world, shard.group, shard.rank), first)
            data = pickle_chunks(packed[done:end])
            kept = yield from self._transfer(V1Operation.COMMIT_STORE, key, instance, data)
            self._sizes[shard.world, shard.group] = size
            stored += (end - done) * kept
            declined += (end - done) * (not kept)
            done = end
        self._end_v1([request_id])
        self._count("stores")
        return StoreReply(stored=stored, declined=declined), ()

    def _release(self, message: ReleaseRequest, now: float) -> Steps:
        lease = self._leases.find(message.lease, now)
        released = 0
        if lease is not None:
            stop = len(lease.digests) if message.count is None else message.first + message.count
            released = yield from self._give_back(lease, message.first, stop)
        return ReleaseReply(released=released), ()

    def _end_session(self, message: EndSessionRequest) -> Steps:
        leases = self._leases.of_session(message.session)
        for lease in leases:
            yield from self._give_back(lease, 0, len(lease.digests))
            self._end_v1(lease.request_ids)
            self._leases.pop(lease.id)
        return EndSessionReply(known=bool(leases)), ()

    def _ping(self) -> Steps:
        """Every registered instance gives a sign of life, or the server forgets it."""
        instances: list[int | None] = [*self._instances.values()]
        for instance in instances or [None]:
            yield Call(V1Operation.PING, (instance,))
        return PingReply(boot=self._session_id), ()

    # ---- parts of them

    def _prepare(self, now: float) -> Part:
        """Make sure that the server can be used at all."""
        if self._unfit is not None and now < self._unfit_until:
            raise self._unfit
        if self._fits:
            return
        try:
            size = yield Call(V1Operation.GET_CHUNK_SIZE, (), PREPARE_SECONDS)
        except NoAnswerError:
            raise self._not_fit("it does not tell its chunk size", now) from None
        if size != self._space.chunk_size:
            raise self._not_fit(
                f"its chunks have {size} tokens and the space's {self._space.chunk_size}, so none of its keys is "
                "a chunk's; start it with the space's chunk size",
                now,
            )
        self._fits = True

    def _not_fit(self, reason: str, now: float) -> UnsupportedServerError:
        before, self._unfit = self._unfit, UnsupportedServerError(f"a v1 server, and no tunnel through it: {reason}")
        if str(before) != str(self._unfit):
            log.warning("%s; requests are misses, and it is tried again from time to time", self._unfit)
        self._unfit_until = now + UNFIT_SECONDS
        self._fits = False
        self._count("unfit")
        return self._unfit

    def _register_any(self, world: int, group: int, now: float) -> Generator[Call, Any, int]:
        """An instance of a world and group, whatever its layout: lookups and retrieves need one to be there."""
        for (of_world, of_group, _), instance in self._instances.items():
            if (of_world, of_group) == (world, group):
                return instance
        instance = yield from self._register(world, group, 1, now)
        return instance

    def _register(self, world: int, group: int, size: int, now: float) -> Generator[Call, Any, int]:
        """The instance for chunks of a size; registered when it is first needed."""
        known = self._instances.get((world, group, size))
        if known is not None:
            return known
        if len(self._instances) >= MAX_SIZES:
            oldest = next(iter(self._instances))
            self._calls.post(V1Operation.UNREGISTER_ENGINE_DRIVEN, self._instances.pop(oldest))
        instance = int.from_bytes(os.urandom(8), "big") >> 2
        registration = V1Registration(
            instance_id=instance,
            model_name=model_name(self._space.root, group),
            world_size=world,
            block_size=self._space.chunk_size,
            num_layers=1,
            hidden_dim_size=size,
            dtype_str="uint8",
            use_mla=True,
            num_physical_slots=1,
        )
        try:
            yield Call(V1Operation.REGISTER_ENGINE_DRIVEN, (registration,), PREPARE_SECONDS)
        except NoAnswerError:
            raise self._not_fit(
                "it takes no engine-driven clients; start it with --supported-transfer-mode auto", now
            ) from None
        self._instances[world, group, size] = instance
        return instance

    def _transfer(self, operation: V1Operation, key: V1Key, instance: int, *data: bytes) -> Generator[Call, Any, Any]:
        """A call that names an instance. Unanswered, it may be that the server has forgotten the instance."""
        try:
            return (yield Call(operation, (key, instance, *data)))
        except GeneratorExit:
            self._instances = {layout: one for layout, one in self._instances.items() if one != instance}
            raise

    def _look(self, digests: Sequence[bytes], whose: _Whose) -> Generator[Call, Any, tuple[str, int]]:
        """One v1 lookup: its request id, and how many chunks it hit and locked."""
        request_id = self._new_request_id(digests[-1])
        yield Call(V1Operation.LOOKUP, (self._key(digests, request_id, whose), whose.world))
        hit = None
        while hit is None:
            hit = yield Call(V1Operation.WAIT_PREFETCH_STATUS, (request_id, WAIT_SECONDS))
        if not 0 <= hit <= len(digests):
            raise RemoteProtocolError(ErrorCode.UNEXPECTED, f"lookup: got {hit} hits of {len(digests)} chunks")
        return request_id, hit

    def _give_back(self, lease: TunnelLease, start: int, stop: int) -> Generator[Call, Any, int]:
        """Give locks back for every rank that still has them; chunks of which some rank had."""
        freed = 0
        for group, rank, first, last in lease.give_back_all(start, stop):
            whose = _Whose(lease.world, group, rank)
            yield from self._free(lease.request_ids[group], lease.digests, (first, last), whose)
            freed += last - first
        return min(freed, len(lease.digests))

    def _end_own(self, lease: TunnelLease) -> Part:
        """A worker's own lookups are over, and what it locked by them and did not read is given back."""
        yield from self._give_back(lease, 0, len(lease.digests))
        self._end_v1([one for one in lease.request_ids if one])
        lease.request_ids[:] = [""] * lease.groups

    def _free(self, request_id: str, digests: Sequence[bytes], part: tuple[int, int], whose: _Whose) -> Part:
        """Give one range of locks back. Awaited: a session that ends first takes the server's record of them along."""
        start, stop = part
        if start < stop:
            key = self._key(digests[:stop], request_id, whose, start)
            yield Call(V1Operation.FREE_LOOKUP_LOCKS, (key, whose.world))

    def _end_v1(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._calls.post(V1Operation.END_SESSION, request_id)

    def _key(self, digests: Sequence[bytes], request_id: str, whose: _Whose, start: int = 0) -> V1Key:
        """A key over the chunks from `start` to the last of those."""
        tokens = self._expander.tokens(digests)
        return V1Key(
            model_name=model_name(self._space.root, whose.group),
            world_size=whose.world,
            worker_id=whose.rank,
            token_ids=tokens,
            start=start * self._space.chunk_size,
            end=len(tokens),
            request_id=request_id,
            num_kv_readers=1,
        )

    def _new_request_id(self, last_key: bytes) -> str:
        """A v1 request id that no other identity and no other request has."""
        self._next_number += 1
        seed = text("xk2/tunnel-request") + framed(self._boot_id) + framed(self._session_id) + framed(last_key)
        return f"xk2-{hashlib.sha256(seed + U64.pack(self._next_number)).hexdigest()}"

    def _facts(self) -> dict[str, int | float | str | bool | None]:
        return {
            "tunnel.server": "v1",
            "tunnel.strength": "the v1 server's own hash; what it delivers is verified here",
            "tunnel.chunk_size": self._space.chunk_size,
            "tunnel.leases": len(self._leases),
            "tunnel.pending": len(self._calls),
            "tunnel.layouts": len(self._instances),
        }


def _check_world(world: int, groups: int) -> None:
    if world > MAX_WORLD_SIZE or groups > MAX_GROUPS:
        raise ServerError(
            ErrorCode.UNSUPPORTED,
            f"world: got {world} ranks in {groups} groups, a tunnel takes {MAX_WORLD_SIZE} in {MAX_GROUPS}",
            retriable=False,
        )


def _at_once(reply: Reply) -> Steps:
    yield from ()  # a generator, like the others
    return reply, ()


def _refused(message: str) -> Steps:
    yield from ()  # a generator, like the others
    raise ServerError(ErrorCode.UNSUPPORTED, message, retriable=False)
