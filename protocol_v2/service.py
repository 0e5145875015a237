"""`CacheService`: what a server does with messages, without sockets, threads or a clock.

Messages go in by `receive`, answers are taken out by `take_outgoing`. Work that blocks is taken out by `take_jobs`, run
anywhere, and settled by `finish`; the rest happens on the one loop that calls these methods, and never blocks. One bad
message costs one request: an error reply where an id can be read, a counter where not.

A peer is one transport identity. Leases and sessions belong to it and end with it: when it says a new hello, when it
has been silent for too long, or when the server closes.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar, cast

from protocol_v2.capability import answer_probe, is_probe
from protocol_v2.codes import ErrorCode, RefusalCode
from protocol_v2.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from protocol_v2.events import (
    AnswerHello,
    HelloReceived,
    RequestReceived,
    RequestsDropped,
    SendError,
    SendReply,
    SessionLost,
)
from protocol_v2.frames import is_protocol_2
from protocol_v2.hello import Refusal, Welcome
from protocol_v2.identity import check_places, resolve_keys
from protocol_v2.jobs import Jobs
from protocol_v2.messages import (
    AttachRequest,
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
    RetrieveRequest,
    StatusReply,
    StatusRequest,
    StoreReply,
    StoreRequest,
)
from protocol_v2.negotiation import ServerTerms, answer_hello
from protocol_v2.outcomes import Retrieved, StoreOutcome
from protocol_v2.server_connection import ServerConnection
from protocol_v2.status import ServiceCounters, describe_status
from protocol_v2.storage import Shard
from protocol_v2.stored_messages import leading_that_fit, objects_of_store, reply_of_objects, values_of
from protocol_v2.versions import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from keying import KeySpace
    from protocol_v2.cache import ChunkCache
    from protocol_v2.cache_news import CacheNews
    from protocol_v2.events import Event
    from protocol_v2.foreign import ForeignFront
    from protocol_v2.frames import Frame
    from protocol_v2.identity import Chunks
    from protocol_v2.jobs import Job
    from protocol_v2.messages import Reply
    from protocol_v2.sharing import Sharing
    from protocol_v2.status import Fact
    from protocol_v2.storage import StoredObject
    from protocol_v2.wire_keys import Shard as WireShard
    from protocol_v2.work import Task

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PEERS: Final = 4096
"""Sessions that stand at one time; one more hello is refused as busy."""

MAX_SPACES: Final = 4096
"""Spaces remembered for the notice in a welcome."""

TICK_SECONDS: Final = 0.1
MAINTENANCE_SECONDS: Final = 1.0
FRAME_SLACK: Final = 1 << 20


@dataclass(slots=True, eq=False)
class _Arrival:
    """A store whose bytes are being copied out of shared memory; what follows it waits until it is here."""

    keep: Callable[[float], None]
    here: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    identity: bytes
    connection: ServerConnection
    #: in the order in which they came: a chunk is kept after the one before it
    arrivals: deque[_Arrival] = field(default_factory=deque)


class _Named(TypedDict):
    """Arguments that a lookup and a prefetch of the cache have in common."""

    root: bytes
    keys: Sequence[bytes]
    world: int
    groups: int
    owner: bytes
    session: str
    full: int


class CacheService:
    """Answers the peers of one server from one cache.

    Args:
        cache: loaded; the service drives it and closes it.
        terms: what the server says of itself.
        started: seconds, monotonic.
        max_peers: sessions that stand at one time.
        front: what answers messages of another protocol; None counts and drops them.
        spaces: those that the cache holds entries of from earlier runs, for the notice in a welcome.
        news: what tells routers which chunks can be hit; None for nothing.
        sharing: the shared memory for peers on this host; None offers none.
    """

    def __init__(
        self,
        cache: ChunkCache,
        terms: ServerTerms,
        *,
        started: float,
        max_peers: int = MAX_PEERS,
        front: ForeignFront | None = None,
        spaces: Iterable[KeySpace] = (),
        news: CacheNews | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._cache = cache
        self._news = news
        self._sharing = sharing
        self._terms = terms if sharing is None else _offering(terms, SHARED_MEMORY)
        self._started = started
        self._max_peers = max_peers
        self._front = front
        self._peers: dict[bytes, _Peer] = {}
        self._spaces = {space.root: space for space in islice(spaces, MAX_SPACES)}
        if news is not None:
            for space in self._spaces.values():
                news.describe(space)
            cache.listen(news.changed)
            news.flush()
        self._outgoing: deque[tuple[bytes, list[Frame]]] = deque()
        self._stopping = False
        self._next_tick = started
        self._next_maintenance = started
        self._lag = 0.0
        self.counters = ServiceCounters()
        self._jobs = Jobs(self.counters)
        self.facts = self.status(started)
        """Status as of the last maintenance: replaced, never changed, so any thread may read it."""

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame worth receiving at all."""
        return self._terms.limits.max_payload_bytes + FRAME_SLACK

    @property
    def boot_id(self) -> bytes:
        """16 bytes, made anew at every start."""
        return self._terms.boot_id

    # ---- driven by the loop

    def receive(self, identity: bytes, frames: Sequence[Frame], now: float) -> None:
        """Take one multipart message of a peer."""
        if not is_protocol_2(frames):
            self._receive_foreign(identity, frames, now)
            return
        peer = self._peers.get(identity) or _Peer(identity, ServerConnection(self._terms))
        try:
            events = peer.connection.receive_frames(frames, now)
        except RemoteProtocolError as error:
            self.counters.rejected += 1
            self._queue(peer, peer.connection.error_reply(error))
            if error.error_code == ErrorCode.UNEXPECTED and identity in self._peers:
                self._drop(peer, now)
            return
        self._handle(peer, events, now)

    @property
    def busy(self) -> bool:
        """Whether some work is not settled."""
        return len(self._jobs) > 0

    def finish(self, job: Job, now: float) -> None:
        """Settle a job that was run."""
        self._jobs.settle(job, now)

    def take_outgoing(self) -> list[tuple[bytes, list[Frame]]]:
        """Messages to send, with the identity of the peer each goes to."""
        taken = list(self._outgoing)
        self._outgoing.clear()
        if self._front is not None:
            taken += self._front.take_outgoing()
        return taken

    def take_jobs(self) -> list[Job]:
        """Jobs to run; each must come back by `finish`."""
        return self._jobs.take(() if self._front is None else self._front.take_jobs())

    def next_tick(self, now: float) -> float:
        """When `tick` wants to be called next."""
        busy = bool(self._peers) or self._front is not None
        return self._next_tick if busy else max(now, self._next_maintenance)

    def tick(self, now: float) -> None:
        """Let time pass: deadlines, silent peers, leases, sessions, background work."""
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        if self._news is not None:
            self._news.flush()
        for peer in list(self._peers.values()):
            self._handle(peer, peer.connection.expire(now), now)
        if self._front is not None:
            self._front.tick(now)
        if now >= self._next_maintenance:
            self._next_maintenance = now + MAINTENANCE_SECONDS
            for task in self._cache.maintain(now):
                self._jobs.background(task, now)
            self.facts = self.status(now)

    def note_lag(self, seconds: float) -> None:
        """How late the loop last was."""
        self._lag = seconds

    def note_unsent(self, identity: bytes, errno: int) -> None:
        """A message could not be sent: the peer's queue is full, or the peer is gone."""
        self.counters.unsent += 1
        log.debug("a message to %s was not sent: errno %d", identity.hex(), errno)

    def begin_stop(self, now: float) -> None:
        """Fail what is pending and all that still comes: `SHUTTING_DOWN`, once each. Work that was begun goes on."""
        self._stopping = True
        for peer in self._peers.values():
            for request_id in peer.connection.pending_ids:
                self._fail(peer, request_id, _shutting_down(), now)

    def close(self, now: float) -> None:
        """End all sessions and close the cache, once; blocks while the cache writes what it has."""
        for peer in list(self._peers.values()):
            self._drop(peer, now)
        if self._front is not None:
            self._front.close(now)
        for job in self.take_jobs():
            job.run()
            self.finish(job, now)
        if self._news is not None:
            self._news.flush()
        if self._sharing is not None:
            self._sharing.close()
        closing = self._cache.close(now)
        closing.run()
        closing.finish(now)

    # ---- other protocols on the same port

    def _receive_foreign(self, identity: bytes, frames: Sequence[Frame], now: float) -> None:
        """A probe is always answered; the rest goes to the front, or is counted and dropped as a v1 server drops it."""
        if is_probe(frames):
            others = () if self._front is None else self._front.capabilities
            self._outgoing.append((identity, answer_probe(frames, others)))
        elif self._front is not None:
            self._front.receive(identity, frames, now)
        else:
            self.counters.foreign += 1

    # ---- events

    def _handle(self, peer: _Peer, events: list[Event], now: float) -> None:
        for event in events:
            match event:
                case HelloReceived():
                    self._answer_hello(peer, event, now)
                case RequestReceived():
                    self._answer(peer, event, now)
                case RequestsDropped():
                    self.counters.dropped += len(event.request_ids)
                case SessionLost():
                    self._forget(peer, now)
                case _:
                    raise LocalProtocolError(f"{type(event).__name__}: not an event of a server's connection")

    def _answer_hello(self, peer: _Peer, hello: HelloReceived, now: float) -> None:
        answer: Welcome | Refusal
        if self._stopping:
            answer = self._refusal(hello, RefusalCode.SHUTTING_DOWN, "the server is going away")
        elif len(self._peers) >= self._max_peers and peer.identity not in self._peers:
            text = f"{len(self._peers)} sessions stand, which is all there is room for; retry later"
            answer = self._refusal(hello, RefusalCode.BUSY, text)
        else:
            answer = answer_hello(hello, self._terms, self._spaces.values())
        self._queue(peer, peer.connection.send(AnswerHello(hello.request_id, answer), now))
        label = f"{hello.role or 'peer'} {hello.boot_id.hex()[:8]}"
        if isinstance(answer, Refusal):
            self._peers.pop(peer.identity, None)
            self.counters.refused += 1
            if answer.code == RefusalCode.SPACE_MISMATCH:
                self.counters.space_mismatches += 1
            log.warning("refused %s: %s", label, answer.explain())
            return
        self._peers[peer.identity] = peer
        self.counters.welcomed += 1
        if answer.notice:
            self.counters.space_notices += 1
            names = ", ".join(f"{one.field} ({one.asked!r} against {one.accepted!r})" for one in answer.notice)
            log.warning(
                "%s shares no key with the nearest space held here of its model; it differs in %s", label, names
            )
        if hello.space is not None and hello.space.root not in self._spaces and len(self._spaces) < MAX_SPACES:
            self._spaces[hello.space.root] = hello.space
            if self._news is not None:
                self._news.describe(hello.space)
            self._jobs.background(self._cache.describe(hello.space), now)

    def _refusal(self, hello: HelloReceived, code: RefusalCode, text: str) -> Refusal:
        asked, accepted = hello.offer.to_wire(), self._terms.offer.to_wire()
        return Refusal(code=code, message=text, asked=asked, accepted=accepted)

    def _drop(self, peer: _Peer, now: float) -> None:
        """End a peer's session from this side."""
        peer.connection.close()
        self._forget(peer, now)

    def _forget(self, peer: _Peer, now: float) -> None:
        """Free what a session held."""
        self._cache.drop_owner(peer.identity, now)
        self._peers.pop(peer.identity, None)
        if self._sharing is not None:
            self._sharing.detach(peer.identity)

    def _answer(self, peer: _Peer, request: RequestReceived, now: float) -> None:
        self.counters.requests += 1
        try:
            if self._stopping:
                raise _shutting_down()  # noqa: TRY301  (one place makes the error reply)
            self._dispatch(peer, request, now)
        except Exception as error:  # a handler that fails costs its own request
            self._fail(peer, request.request_id, error, now)

    def _dispatch(self, peer: _Peer, request: RequestReceived, now: float) -> None:
        message = request.message
        match message:
            case LookupRequest():
                self._find(peer, request, message, now)
            case RetrieveRequest():
                self._retrieve(peer, request, message, now)
            case StoreRequest():
                self._store(peer, request, message, now)
            case PrefetchRequest():
                self._find(peer, request, message, now)
            case ReleaseRequest():
                stop = None if message.count is None else message.first + message.count
                released = self._cache.release(message.lease, start=message.first, stop=stop, now=now)
                self._reply(peer, request, ReleaseReply(released=released), now)
            case EndSessionRequest():
                known = self._cache.end_session(peer.identity, message.session, now)
                self._reply(peer, request, EndSessionReply(known=known), now)
            case PingRequest():
                self._reply(peer, request, self._ping(now), now)
            case StatusRequest():
                self._reply(peer, request, StatusReply(status=self.status(now)), now)
            case ClearRequest():
                self._clear(peer, request, message, now)
            case AttachRequest():
                self._reply(peer, request, self._shared_with(peer).attach(peer.identity, message), now)

    # ---- answers

    def _find(
        self, peer: _Peer, request: RequestReceived, message: LookupRequest | PrefetchRequest, now: float
    ) -> None:
        """Let a remote tier say what it has, for a bounded time, then answer; at once where there is none to ask."""
        named = self._named(peer, message)
        asking = self._cache.ask(named["root"], named["keys"], world=named["world"], groups=named["groups"], now=now)

        def then(now: float) -> None:
            asking.finish(now)
            if self._peers.get(peer.identity) is not peer:
                return  # it is gone: a lease would be nobody's
            answer = (
                self._lookup(message, named, now) if isinstance(message, LookupRequest) else self._prefetch(named, now)
            )
            self._reply(peer, request, answer, now)

        self._run(peer, request, [asking], then, now)

    def _named(self, peer: _Peer, message: LookupRequest | PrefetchRequest) -> _Named:
        """What a lookup and a prefetch name alike."""
        space = peer.connection.space
        chunks = resolve_keys(message.keys, space, max_chunks=self._terms.limits.max_chunks)
        return _Named(
            root=_root(space),
            keys=chunks.digests,
            world=message.world,
            groups=message.groups,
            owner=peer.identity,
            session=message.session,
            full=_n_full(chunks),
        )

    def _lookup(self, message: LookupRequest, named: _Named, now: float) -> LookupReply:
        ttl = self._terms.limits.lease_ms / 1000
        hit = self._cache.lookup(**named, lease=message.lease, ttl=ttl, now=now)
        return LookupReply(
            hit_chunks=hit.chunks, lease=hit.lease, lease_ms=int(hit.lease_seconds * 1000), miss=hit.miss
        )

    def _prefetch(self, named: _Named, now: float) -> PrefetchReply:
        prefetch = self._cache.prefetch(**named, now=now)
        for task in prefetch.tasks:
            self._jobs.background(task, now)
        return PrefetchReply(accepted=len(prefetch.tasks), resident=prefetch.resident)

    def _retrieve(self, peer: _Peer, request: RequestReceived, message: RetrieveRequest, now: float) -> None:
        most = self._terms.limits.max_payload_bytes
        task = self._cache.retrieve(
            message.lease,
            message.first,
            message.first + message.count,
            _storage_shard(message.shard),
            room=most,
            now=now,
        )

        def then(now: float) -> None:
            retrieved = task.finish(now)
            fitting = leading_that_fit(retrieved.objects, most)
            if retrieved.objects and not fitting:
                size = retrieved.objects[0].envelope.payload_size
                raise RemoteProtocolError(
                    ErrorCode.TOO_LARGE, f"payload: the chunk has {size} bytes, of at most {most} in one message"
                )
            miss = retrieved.miss if len(fitting) == len(retrieved.objects) else None
            self._deliver(peer, request, message, Retrieved(tuple(fitting), miss), now)

        self._run(peer, request, [task], then, now)

    def _deliver(
        self, peer: _Peer, request: RequestReceived, message: RetrieveRequest, retrieved: Retrieved, now: float
    ) -> None:
        sharing = self._sharing
        if sharing is None or not sharing.reads(message.shared):
            reply, payload = reply_of_objects(retrieved.objects, retrieved.miss)
            self._reply(peer, request, reply, now, payload)
            return
        moving = sharing.move_in(retrieved.objects)

        def then(now: float) -> None:
            moved = {held.id: copy for held, copy in moving.finish(now) if self._cache.rehouse(held, copy)}
            objects = [moved.get(obj.id, obj) for obj in retrieved.objects]
            reply, payload = reply_of_objects(objects, retrieved.miss, sharing.range_of)
            self._reply(peer, request, reply, now, payload)

        self._run(peer, request, [moving], then, now)

    def _store(self, peer: _Peer, request: RequestReceived, message: StoreRequest, now: float) -> None:
        space = peer.connection.space
        chunks = resolve_keys(message.keys, space, max_chunks=self._terms.limits.max_chunks)
        check_places(chunks, message.first, message.starts, message.n_tokens)
        root = _root(space)
        if not message.ranges:
            values = values_of(len(message.n_tokens), message.tensors, request.payload)
            self._keep(peer, request, chunks, objects_of_store(root, chunks.digests, message, values), now)
            return
        copying = self._shared_with(peer).copy_in(peer.identity, message, list(message.chunk_sizes()))

        def keep(now: float) -> None:
            values = [[view] for view in copying.finish(now)]
            if peer.connection.is_pending(request.request_id):  # else its session is over, or nobody waits
                self._keep(peer, request, chunks, objects_of_store(root, chunks.digests, message, values), now)

        arrival = _Arrival(self._guarded(peer, request, keep))

        def then(now: float) -> None:
            arrival.here = True
            while peer.arrivals and peer.arrivals[0].here:
                peer.arrivals.popleft().keep(now)

        self._run(peer, request, [copying], then, now)
        peer.arrivals.append(arrival)

    def _keep(
        self, peer: _Peer, request: RequestReceived, chunks: Chunks, objects: Sequence[StoredObject], now: float
    ) -> None:
        """Store the objects of a request, and answer it."""
        message = cast("StoreRequest", request.message)
        n_bound = _n_full(chunks)
        if message.first + len(objects) == n_bound and message.n_tokens[-1] < chunks.chunk_size:
            n_bound -= 1
        root = objects[0].id.root
        self._cache.bind(peer.identity, message.session, root, chunks.digests[:n_bound], now=now)
        tasks = []
        for place, obj in enumerate(objects, message.first):
            index = place if place < n_bound else None
            tasks.append(self._cache.store(obj, owner=peer.identity, session=message.session, index=index, now=now))

        def then(now: float) -> None:
            outcomes = _settle_all(tasks, now)
            reply = StoreReply(
                stored=outcomes.count(StoreOutcome.STORED),
                present=outcomes.count(StoreOutcome.PRESENT),
                declined=outcomes.count(StoreOutcome.DECLINED),
            )
            self._reply(peer, request, reply, now)

        self._run(peer, request, tasks, then, now)

    def _shared_with(self, peer: _Peer) -> Sharing:
        """Shared memory, if this session agreed on it."""
        agreement = peer.connection.agreement
        if self._sharing is None or agreement is None or SHARED_MEMORY not in agreement.features:
            raise RemoteProtocolError(ErrorCode.UNSHARED, "this session did not agree on shared memory")
        return self._sharing

    def _ping(self, now: float) -> PingReply:
        return PingReply(
            boot=self._terms.boot_id,
            uptime_ms=int((now - self._started) * 1000),
            loop_lag_us=int(self._lag * 1_000_000),
        )

    def _clear(self, peer: _Peer, request: RequestReceived, message: ClearRequest, now: float) -> None:
        root = _root(peer.connection.space) if message.scope == "space" else None
        task = self._cache.clear(root, now=now)

        def then(now: float) -> None:
            cleared = task.finish(now)
            self._reply(peer, request, ClearReply(objects=cleared.objects, bytes=cleared.size), now)

        self._run(peer, request, [task], then, now)

    def status(self, now: float) -> dict[str, int | float | str | bool | None]:
        """Facts for people and tools, by dotted name."""
        server: dict[str, Fact] = {
            "server.uptime_s": round(now - self._started, 3),
            "server.boot_id": self._terms.boot_id.hex(),
            "server.loop_lag_us": int(self._lag * 1_000_000),
            "server.peers": len(self._peers),
            "server.v1_accepted": self._front is not None,
            "server.spaces": len(self._spaces),
            "server.jobs": len(self._jobs),
        }
        if self._news is not None:
            server |= {
                "events.batches": self._news.batches,
                "events.pending": self._news.pending,
                "events.untold": self._news.untold,
            }
        if self._sharing is not None:
            server |= self._sharing.facts()
        if self._front is not None:
            server |= self._front.facts()
        return describe_status(self._cache.status(now), self.counters, server)

    # ---- work and replies

    def _run(
        self,
        peer: _Peer,
        request: RequestReceived,
        tasks: Sequence[Task[T]],
        then: Callable[[float], None],
        now: float,
    ) -> None:
        """Run what blocks, then answer; at once where nothing blocks."""
        self._jobs.run(tasks, self._guarded(peer, request, then), now)

    def _guarded(self, peer: _Peer, request: RequestReceived, then: Callable[[float], None]) -> Callable[[float], None]:
        """What an operation ends in belongs to its own request."""

        def guarded(now: float) -> None:
            try:
                then(now)
            except Exception as error:  # a handler that fails costs its own request
                self._fail(peer, request.request_id, error, now)

        return guarded

    def _reply(
        self, peer: _Peer, request: RequestReceived, message: Reply, now: float, payload: tuple[Frame, ...] = ()
    ) -> None:
        self._queue(peer, peer.connection.send(SendReply(request.request_id, message, payload), now))

    def _fail(self, peer: _Peer, request_id: int, error: Exception, now: float) -> None:
        self.counters.failed += 1
        code = getattr(error, "error_code", ErrorCode.INTERNAL)
        if isinstance(error, LocalProtocolError) and code is ErrorCode.INTERNAL:
            code = ErrorCode.MALFORMED
        text = str(error) if isinstance(error, ProtocolError) else "the server failed; nothing was served"
        if not isinstance(error, ProtocolError):
            log.error("a request failed: %s", type(error).__name__, exc_info=error)
        self._queue(peer, peer.connection.send(SendError(request_id, ErrorCode(code), text), now))

    def _queue(self, peer: _Peer, frames: list[Frame]) -> None:
        if frames:
            self._outgoing.append((peer.identity, frames))


def _offering(terms: ServerTerms, feature: str) -> ServerTerms:
    return replace(terms, offer=replace(terms.offer, features=terms.offer.features | {feature}))


def _shutting_down() -> RemoteProtocolError:
    return RemoteProtocolError(ErrorCode.SHUTTING_DOWN, "the server is going away; ask another, or again later")


def _root(space: KeySpace | None) -> bytes:
    if space is None:
        raise RemoteProtocolError(ErrorCode.NO_SPACE, "the session was opened without a space; say hello with one")
    return space.root


def _n_full(chunks: Chunks) -> int:
    """How many of the chunks are full, which is what a session is bound to; digests do not tell and count as full."""
    if chunks.keys is None:
        return len(chunks.digests)
    return sum(key.stop - key.start == chunks.chunk_size for key in chunks.keys)


def _storage_shard(shard: WireShard) -> Shard:
    return Shard(shard.world, shard.rank, shard.group)


def _settle_all(tasks: Sequence[Task[T]], now: float) -> list[T]:
    """Settle every task, whatever the others end in; then the first error, if there is one."""
    results: list[T] = []
    first: ProtocolError | None = None
    for task in tasks:
        try:
            results.append(task.finish(now))
        except ProtocolError as error:
            first = first or error
    if first is not None:
        raise first
    return results
