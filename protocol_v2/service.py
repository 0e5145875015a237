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
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

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
from protocol_v2.frames import is_protocol_2, payload_bytes
from protocol_v2.hello import Refusal, Welcome
from protocol_v2.identity import check_places, resolve_keys
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
    RetrieveRequest,
    StatusReply,
    StatusRequest,
    StoreReply,
    StoreRequest,
)
from protocol_v2.negotiation import ServerTerms, answer_hello
from protocol_v2.outcomes import StoreOutcome
from protocol_v2.server_connection import ServerConnection
from protocol_v2.status import ServiceCounters, describe_status
from protocol_v2.storage import Shard
from protocol_v2.stored_messages import objects_of_store, reply_of_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from keying import KeySpace
    from protocol_v2.cache import ChunkCache
    from protocol_v2.events import Event
    from protocol_v2.frames import Frame
    from protocol_v2.identity import Chunks
    from protocol_v2.messages import Reply
    from protocol_v2.status import Fact
    from protocol_v2.wire_keys import Shard as WireShard
    from protocol_v2.work import Task

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PEERS: Final = 4096
"""Sessions that stand at one time; one more hello is refused as busy."""

MAX_JOBS: Final = 4096
"""Jobs that were taken and not yet finished; a request that would need one more is answered as busy."""

MAX_SPACES: Final = 4096
"""Spaces remembered for the notice in a welcome."""

TICK_SECONDS: Final = 0.1
MAINTENANCE_SECONDS: Final = 1.0
FRAME_SLACK: Final = 1 << 20


@dataclass(slots=True, eq=False)
class Job:
    """Tasks to be run in one thread, one after the other, and what follows on the loop."""

    tasks: Sequence[Task[Any]]
    then: Callable[[float], None]

    def run(self) -> None:
        """The blocking part; in any thread, once. Never raises: each task keeps what it ended in."""
        for task in self.tasks:
            task.run()


class ForeignFront(Protocol):
    """Another protocol on the same port, injected by the caller. Driven by the loop like the service itself."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What the answer to a v1 probe lists beside our own."""

    def receive(self, identity: bytes, frames: Sequence[Frame], now: float) -> None:
        """Take one multipart message that is none of this protocol; it never raises for what a peer sends."""

    def take_outgoing(self) -> list[tuple[bytes, list[Frame]]]:
        """Messages to send, with the identity of the peer each goes to."""

    def take_jobs(self) -> list[Job]:
        """Jobs to run; each comes back by its ``then``."""

    def tick(self, now: float) -> None:
        """Let time pass; called about ten times a second."""

    def facts(self) -> Mapping[str, Fact]:
        """Facts for the status; names begin with ``v1.``."""

    def close(self, now: float) -> None:
        """End all sessions of this front; the cache is closed afterwards by the service."""


@dataclass(slots=True, eq=False)
class _Peer:
    identity: bytes
    connection: ServerConnection


class CacheService:
    """Answers the peers of one server from one cache.

    Args:
        cache: loaded; the service drives it and closes it.
        terms: what the server says of itself.
        started: seconds, monotonic.
        max_peers: sessions that stand at one time.
        front: what answers messages of another protocol; None counts and drops them.
        spaces: those that the cache holds entries of from earlier runs, for the notice in a welcome.
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
    ) -> None:
        self._cache = cache
        self._terms = terms
        self._started = started
        self._max_peers = max_peers
        self._front = front
        self._peers: dict[bytes, _Peer] = {}
        self._spaces = {space.root: space for space in islice(spaces, MAX_SPACES)}
        self._outgoing: deque[tuple[bytes, list[Frame]]] = deque()
        self._jobs: deque[Job] = deque()
        self._running = 0
        self._next_tick = started
        self._next_maintenance = started
        self._lag = 0.0
        self.counters = ServiceCounters()
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

    def finish(self, job: Job, now: float) -> None:
        """Settle a job that was run."""
        self._running -= 1
        job.then(now)

    def take_outgoing(self) -> list[tuple[bytes, list[Frame]]]:
        """Messages to send, with the identity of the peer each goes to."""
        taken = list(self._outgoing)
        self._outgoing.clear()
        if self._front is not None:
            taken += self._front.take_outgoing()
        return taken

    def take_jobs(self) -> list[Job]:
        """Jobs to run; each must come back by `finish`."""
        taken = list(self._jobs)
        self._jobs.clear()
        if self._front is not None:
            taken += self._front.take_jobs()
        self._running += len(taken)
        return taken

    def next_tick(self, now: float) -> float:
        """When `tick` wants to be called next."""
        busy = bool(self._peers) or self._front is not None
        return self._next_tick if busy else max(now, self._next_maintenance)

    def tick(self, now: float) -> None:
        """Let time pass: deadlines, silent peers, leases, sessions, background work."""
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        for peer in list(self._peers.values()):
            self._handle(peer, peer.connection.expire(now), now)
        if self._front is not None:
            self._front.tick(now)
        if now >= self._next_maintenance:
            self._next_maintenance = now + MAINTENANCE_SECONDS
            for task in self._cache.maintain(now):
                self._background(task, now)
            self.facts = self.status(now)

    def note_lag(self, seconds: float) -> None:
        """How late the loop last was."""
        self._lag = seconds

    def note_unsent(self, identity: bytes, errno: int) -> None:
        """A message could not be sent: the peer's queue is full, or the peer is gone."""
        self.counters.unsent += 1
        log.debug("a message to %s was not sent: errno %d", identity.hex(), errno)

    def close(self, now: float) -> None:
        """End all sessions and close the cache, once; blocks while the cache writes what it has."""
        for peer in list(self._peers.values()):
            self._drop(peer, now)
        if self._front is not None:
            self._front.close(now)
        for job in self.take_jobs():
            job.run()
            self.finish(job, now)
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
                    self._cache.drop_owner(peer.identity, now)
                    self._peers.pop(peer.identity, None)
                case _:
                    raise LocalProtocolError(f"{type(event).__name__}: not an event of a server's connection")

    def _answer_hello(self, peer: _Peer, hello: HelloReceived, now: float) -> None:
        answer: Welcome | Refusal
        if len(self._peers) >= self._max_peers and peer.identity not in self._peers:
            answer = Refusal(
                code=RefusalCode.BUSY,
                message=f"{len(self._peers)} sessions stand, which is all there is room for; retry later",
                asked=hello.offer.to_wire(),
                accepted=self._terms.offer.to_wire(),
            )
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
            self._background(self._cache.describe(hello.space), now)

    def _drop(self, peer: _Peer, now: float) -> None:
        """End a peer's session from this side."""
        peer.connection.close()
        self._cache.drop_owner(peer.identity, now)
        self._peers.pop(peer.identity, None)

    def _answer(self, peer: _Peer, request: RequestReceived, now: float) -> None:
        self.counters.requests += 1
        try:
            self._dispatch(peer, request, now)
        except Exception as error:  # a handler that fails costs its own request
            self._fail(peer, request.request_id, error, now)

    def _dispatch(self, peer: _Peer, request: RequestReceived, now: float) -> None:
        message = request.message
        match message:
            case LookupRequest():
                self._reply(peer, request, self._lookup(peer, message, now), now)
            case RetrieveRequest():
                self._retrieve(peer, request, message, now)
            case StoreRequest():
                self._store(peer, request, message, now)
            case PrefetchRequest():
                self._reply(peer, request, self._prefetch(peer, message, now), now)
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

    # ---- answers

    def _lookup(self, peer: _Peer, message: LookupRequest, now: float) -> LookupReply:
        space = peer.connection.space
        chunks = resolve_keys(message.keys, space, max_chunks=self._terms.limits.max_chunks)
        hit = self._cache.lookup(
            _root(space),
            chunks.digests,
            world=message.world,
            groups=message.groups,
            owner=peer.identity,
            session=message.session,
            lease=message.lease,
            ttl=self._terms.limits.lease_ms / 1000,
            full=_n_full(chunks),
            now=now,
        )
        return LookupReply(
            hit_chunks=hit.chunks, lease=hit.lease, lease_ms=int(hit.lease_seconds * 1000), miss=hit.miss
        )

    def _retrieve(self, peer: _Peer, request: RequestReceived, message: RetrieveRequest, now: float) -> None:
        task = self._cache.retrieve(
            message.lease, message.first, message.first + message.count, _storage_shard(message.shard), now=now
        )

        def then(now: float) -> None:
            retrieved = task.finish(now)
            reply, payload = reply_of_objects(retrieved.objects, retrieved.miss)
            most, total = self._terms.limits.max_payload_bytes, payload_bytes(payload)
            if total > most:
                raise RemoteProtocolError(
                    ErrorCode.TOO_LARGE, f"payload: got {total} bytes, wanted at most {most}; name fewer chunks at once"
                )
            self._reply(peer, request, reply, now, payload)

        self._run(peer, request, [task], then, now)

    def _store(self, peer: _Peer, request: RequestReceived, message: StoreRequest, now: float) -> None:
        space = peer.connection.space
        chunks = resolve_keys(message.keys, space, max_chunks=self._terms.limits.max_chunks)
        check_places(chunks, message.first, message.starts, message.n_tokens)
        root = _root(space)
        objects = objects_of_store(root, chunks.digests, message, request.payload)
        n_bound = _n_full(chunks)
        if message.first + len(objects) == n_bound and message.n_tokens[-1] < chunks.chunk_size:
            n_bound -= 1
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

    def _prefetch(self, peer: _Peer, message: PrefetchRequest, now: float) -> PrefetchReply:
        space = peer.connection.space
        chunks = resolve_keys(message.keys, space, max_chunks=self._terms.limits.max_chunks)
        prefetch = self._cache.prefetch(
            _root(space),
            chunks.digests,
            world=message.world,
            groups=message.groups,
            owner=peer.identity,
            session=message.session,
            full=_n_full(chunks),
            now=now,
        )
        for task in prefetch.tasks:
            self._background(task, now)
        return PrefetchReply(accepted=len(prefetch.tasks), resident=prefetch.resident)

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
            "server.jobs": self._running + len(self._jobs),
        }
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

        def guarded(now: float) -> None:
            try:
                then(now)
            except Exception as error:  # what the operation ended in belongs to its own request
                self._fail(peer, request.request_id, error, now)

        if all(task.ready for task in tasks):
            guarded(now)
            return
        if self._running + len(self._jobs) >= MAX_JOBS:
            for task in tasks:
                task.cancel(now)
            raise RemoteProtocolError(ErrorCode.BUSY, f"{MAX_JOBS} operations are under way; retry later")
        self._jobs.append(Job(tasks, guarded))

    def _background(self, task: Task[T], now: float) -> None:
        """Work that nobody waits for."""

        def then(now: float) -> None:
            try:
                task.finish(now)
            except ProtocolError as error:
                self.counters.background_failures += 1
                log.warning("background work failed: %s", error)

        if task.ready:
            then(now)
        elif self._running + len(self._jobs) >= MAX_JOBS:
            task.cancel(now)
        else:
            self._jobs.append(Job([task], then))

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
