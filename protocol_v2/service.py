"""`CacheService`: what a server does with messages, without sockets, threads or a clock.

Messages go in by `receive`, answers are taken out by `take_outgoing`. Work that blocks is taken out by `take_jobs`, run
anywhere, and settled by `finish`; the rest happens on the one loop that calls these methods, and never blocks. One bad
message costs one request: an error reply where an id can be read, a counter where not.

A peer is one transport identity. Leases and sessions belong to it and end with it: when it says a new hello, when it
has been silent for too long, or when the server closes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from protocol_v2.backlog import Backlog
from protocol_v2.capability import answer_probe, is_probe
from protocol_v2.chunk_requests import ChunkRequests
from protocol_v2.codes import ErrorCode, RefusalCode
from protocol_v2.errors import LocalProtocolError, RemoteProtocolError
from protocol_v2.events import (
    AnswerHello,
    HelloReceived,
    RequestReceived,
    RequestsDropped,
    SessionLost,
)
from protocol_v2.frames import MAX_HEADER_BYTES, is_protocol_2
from protocol_v2.hello import Refusal, Welcome
from protocol_v2.jobs import Jobs
from protocol_v2.loop_lag import LoopLag
from protocol_v2.messages import (
    AttachRequest,
    ClearRequest,
    EndSessionReply,
    EndSessionRequest,
    LookupRequest,
    PingReply,
    PingRequest,
    PrefetchRequest,
    ReleaseReply,
    ReleaseRequest,
    RetrieveRequest,
    StatusReply,
    StatusRequest,
    StoreRequest,
)
from protocol_v2.negotiation import ServerTerms, answer_hello
from protocol_v2.replies import Peer, Replies
from protocol_v2.server_connection import ServerConnection
from protocol_v2.status import ServiceCounters, describe_status
from protocol_v2.versions import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from keying import KeySpace
    from protocol_v2.cache import ChunkCache
    from protocol_v2.cache_news import CacheNews
    from protocol_v2.events import Event
    from protocol_v2.foreign import ForeignFront
    from protocol_v2.frames import Frame
    from protocol_v2.jobs import Job
    from protocol_v2.sharing import Sharing
    from protocol_v2.status import Fact

log = logging.getLogger(__name__)

MAX_PEERS: Final = 4096
"""Sessions that stand at one time; one more hello is refused as busy."""

MAX_SPACES: Final = 4096
"""Spaces remembered for the notice in a welcome."""

TICK_SECONDS: Final = 0.1
MAINTENANCE_SECONDS: Final = 1.0
FRAME_SLACK: Final = 1 << 20


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
        self._peers: dict[bytes, Peer] = {}
        self._spaces = {space.root: space for space in islice(spaces, MAX_SPACES)}
        if news is not None:
            for space in self._spaces.values():
                news.describe(space)
            cache.listen(news.changed)
            news.flush()
        self._stopping = False
        self._next_tick = started
        self._next_maintenance = started
        self._lag = LoopLag(started)
        self.counters = ServiceCounters()
        self._jobs = Jobs(self.counters)
        self.backlog = Backlog()
        """Told by the server of what it sends."""
        self._replies = Replies(self._jobs, self.counters, self.backlog)
        self._chunks = ChunkRequests(cache, terms.limits, sharing, self._jobs, self._replies)
        self.facts = self.status(started)
        """Status as of the last maintenance: replaced, never changed, so any thread may read it."""

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame worth receiving at all."""
        foreign = 0 if self._front is None else self._front.max_frame_bytes
        return max(self._terms.limits.max_payload_bytes, MAX_HEADER_BYTES, foreign) + FRAME_SLACK

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
        peer = self._peers.get(identity) or Peer(identity, ServerConnection(self._terms))
        try:
            events = peer.connection.receive_frames(frames, now)
        except RemoteProtocolError as error:
            self.counters.rejected += 1
            self._replies.queue(peer.identity, peer.connection.error_reply(error))
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
        self._chunks.resume(now)

    def take_outgoing(self) -> list[tuple[bytes, list[Frame]]]:
        """Messages to send, with the identity of the peer each goes to."""
        taken = self._replies.take()
        if self._front is not None:
            taken += self._front.take_outgoing()
        return taken

    def take_jobs(self) -> list[Job]:
        """Jobs to run; each must come back by `finish`."""
        return self._jobs.take(() if self._front is None else self._front.take_jobs())

    def next_tick(self, now: float) -> float:
        """When `tick` wants to be called next."""
        busy = bool(self._peers) or self._front is not None
        return self._lag.promise(self._next_tick if busy else max(now, self._next_maintenance))

    def tick(self, now: float) -> None:
        """Let time pass: deadlines, silent peers, leases, sessions, background work."""
        if now < self._next_tick:
            return
        self._lag.came(now)
        self._next_tick = now + TICK_SECONDS
        if self._news is not None:
            self._news.flush()
        for peer in list(self._peers.values()):
            self._handle(peer, peer.connection.expire(now), now)
        if self._front is not None:
            self._front.tick(now)
        self._chunks.forget_abandoned()
        if now >= self._next_maintenance:
            self._next_maintenance = now + MAINTENANCE_SECONDS
            for task in self._cache.maintain(now):
                self._jobs.background(task, now)
            self.facts = self.status(now)

    def note_unsent(self, identity: bytes, errno: int) -> None:
        """A message could not be sent: the peer's queue is full, or the peer is gone."""
        self.counters.unsent += 1
        log.debug("a message to %s was not sent: errno %d", identity.hex(), errno)

    def begin_stop(self, now: float) -> None:
        """Fail what is pending and all that still comes: `SHUTTING_DOWN`, once each. Work that was begun goes on."""
        self._stopping = True
        for peer in self._peers.values():
            for request_id in peer.connection.pending_ids:
                self._replies.fail_pending(peer, request_id, _shutting_down(), now)

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
            self._replies.queue(identity, answer_probe(frames, others))
        elif self._front is not None:
            self._front.receive(identity, frames, now, unread=self.backlog.of(identity))
        else:
            self.counters.foreign += 1

    # ---- events

    def _handle(self, peer: Peer, events: list[Event], now: float) -> None:
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

    def _answer_hello(self, peer: Peer, hello: HelloReceived, now: float) -> None:
        answer: Welcome | Refusal
        if self._stopping:
            answer = self._refusal(hello, RefusalCode.SHUTTING_DOWN, "the server is going away")
        elif len(self._peers) >= self._max_peers and peer.identity not in self._peers:
            text = f"{len(self._peers)} sessions stand, which is all there is room for; retry later"
            answer = self._refusal(hello, RefusalCode.BUSY, text)
        else:
            answer = answer_hello(hello, self._terms, self._spaces.values())
        self._replies.queue(peer.identity, peer.connection.send(AnswerHello(hello.request_id, answer), now))
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

    def _drop(self, peer: Peer, now: float) -> None:
        """End a peer's session from this side."""
        peer.connection.close()
        self._forget(peer, now)

    def _forget(self, peer: Peer, now: float) -> None:
        """Free what a session held."""
        self._cache.drop_owner(peer.identity, now)
        self._peers.pop(peer.identity, None)
        if self._sharing is not None:
            self._sharing.detach(peer.identity)

    def _answer(self, peer: Peer, request: RequestReceived, now: float) -> None:
        self.counters.requests += 1
        try:
            if self._stopping:
                raise _shutting_down()  # noqa: TRY301  (one place makes the error reply)
            self._dispatch(peer, request, now)
        except Exception as error:  # a handler that fails costs its own request
            self._replies.fail(peer, request, error, now)

    def _dispatch(self, peer: Peer, request: RequestReceived, now: float) -> None:
        message = request.message
        match message:
            case LookupRequest():
                self._chunks.find(peer, request, message, now)
            case RetrieveRequest():
                self._chunks.retrieve(peer, request, message, now)
            case StoreRequest():
                self._chunks.store(peer, request, message, now)
            case PrefetchRequest():
                self._chunks.find(peer, request, message, now)
            case ReleaseRequest():
                stop = None if message.count is None else message.first + message.count
                released = self._cache.release(message.lease, start=message.first, stop=stop, now=now)
                self._replies.reply(peer, request, ReleaseReply(released=released), now)
            case EndSessionRequest():
                known = self._cache.end_session(peer.identity, message.session, now)
                self._replies.reply(peer, request, EndSessionReply(known=known), now)
            case PingRequest():
                self._replies.reply(peer, request, self._ping(now), now)
            case StatusRequest():
                self._replies.reply(peer, request, StatusReply(status=self.status(now)), now)
            case ClearRequest():
                self._chunks.clear(peer, request, message, now)
            case AttachRequest():
                self._replies.reply(peer, request, self._chunks.shared_with(peer).attach(peer.identity, message), now)

    # ---- answers

    def _ping(self, now: float) -> PingReply:
        return PingReply(
            boot=self._terms.boot_id,
            uptime_ms=int((now - self._started) * 1000),
            loop_lag_us=int(self._lag.seconds(now) * 1_000_000),
        )

    def status(self, now: float) -> dict[str, int | float | str | bool | None]:
        """Facts for people and tools, by dotted name."""
        server: dict[str, Fact] = {
            "server.uptime_s": round(now - self._started, 3),
            "server.boot_id": self._terms.boot_id.hex(),
            "server.loop_lag_us": int(self._lag.seconds(now) * 1_000_000),
            "server.peers": len(self._peers),
            "server.v1_accepted": self._front is not None,
            "server.spaces": len(self._spaces),
            "server.jobs": len(self._jobs),
            "server.waiting": self._chunks.waiting,
            "server.unread_bytes": self.backlog.total(),
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


def _offering(terms: ServerTerms, feature: str) -> ServerTerms:
    return replace(terms, offer=replace(terms.offer, features=terms.offer.features | {feature}))


def _shutting_down() -> RemoteProtocolError:
    return RemoteProtocolError(ErrorCode.SHUTTING_DOWN, "the server is going away; ask another, or again later")
