"""`ChunkRequests`: what a service does with requests about chunks: lookup, prefetch, retrieve, store, clear.

Belongs to the loop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, TypedDict, cast

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import RemoteProtocolError
from protocol_v2.identity import check_places, resolve_keys
from protocol_v2.messages import ClearReply, LookupReply, LookupRequest, PrefetchReply, StoreReply
from protocol_v2.outcomes import Retrieved, StoreOutcome
from protocol_v2.places.flow import CacheBusyError
from protocol_v2.replies import Arrival
from protocol_v2.storage import Shard
from protocol_v2.stored_messages import leading_that_fit, objects_of_store, reply_of_objects, values_of
from protocol_v2.versions import SHARED_MEMORY
from protocol_v2.work import settle_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keying import KeySpace
    from protocol_v2.cache import ChunkCache
    from protocol_v2.events import RequestReceived
    from protocol_v2.hello import Limits
    from protocol_v2.identity import Chunks
    from protocol_v2.jobs import Jobs
    from protocol_v2.messages import ClearRequest, PrefetchRequest, RetrieveRequest, StoreRequest
    from protocol_v2.replies import Peer, Replies
    from protocol_v2.sharing import Sharing
    from protocol_v2.storage import StoredObject
    from protocol_v2.wire_keys import Shard as WireShard

UNREAD_MESSAGES: Final = 2
"""Full messages that a peer may leave unread."""


class _Named(TypedDict):
    """Arguments that a lookup and a prefetch of the cache have in common."""

    root: bytes
    keys: Sequence[bytes]
    world: int
    groups: int
    owner: bytes
    session: str
    full: int


class ChunkRequests:
    """See the head of the module.

    Args:
        cache: the chunks.
        limits: what peers are held to.
        sharing: shared memory; None for none.
        jobs: takes work that nobody waits for.
        replies: answers requests.
    """

    def __init__(
        self, cache: ChunkCache, limits: Limits, sharing: Sharing | None, jobs: Jobs, replies: Replies
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._sharing = sharing
        self._jobs = jobs
        self._replies = replies
        #: retrieves that wait until fewer bytes are under way, in the order in which they came
        self._waiting: deque[tuple[Peer, RequestReceived, RetrieveRequest]] = deque()

    def find(self, peer: Peer, request: RequestReceived, message: LookupRequest | PrefetchRequest, now: float) -> None:
        """Let a remote tier say what it has, for a bounded time, then answer; at once where there is none to ask."""
        named = self._named(peer, message)
        asking = self._cache.ask(named["root"], named["keys"], world=named["world"], groups=named["groups"], now=now)

        def then(now: float) -> None:
            asking.finish(now)
            if not peer.connection.awaits(request.request_id, request.message):
                return  # its session is over, or nobody waits: a lease would be nobody's
            answer = (
                self._lookup(message, named, now) if isinstance(message, LookupRequest) else self._prefetch(named, now)
            )
            self._replies.reply(peer, request, answer, now)

        self._replies.run(peer, request, [asking], then, now)

    def _named(self, peer: Peer, message: LookupRequest | PrefetchRequest) -> _Named:
        """What a lookup and a prefetch name alike."""
        space = peer.connection.space
        chunks = resolve_keys(message.keys, space, max_chunks=self._limits.max_chunks)
        return _Named(
            root=root_of(space),
            keys=chunks.digests,
            world=message.world,
            groups=message.groups,
            owner=peer.identity,
            session=message.session,
            full=_n_full(chunks),
        )

    def _lookup(self, message: LookupRequest, named: _Named, now: float) -> LookupReply:
        ttl = self._limits.lease_ms / 1000
        hit = self._cache.lookup(**named, lease=message.lease, ttl=ttl, now=now)
        return LookupReply(
            hit_chunks=hit.chunks, lease=hit.lease, lease_ms=int(hit.lease_seconds * 1000), miss=hit.miss
        )

    def _prefetch(self, named: _Named, now: float) -> PrefetchReply:
        prefetch = self._cache.prefetch(**named, now=now)
        for task in prefetch.tasks:
            self._jobs.background(task, now)
        return PrefetchReply(accepted=len(prefetch.tasks), resident=prefetch.resident)

    def retrieve(self, peer: Peer, request: RequestReceived, message: RetrieveRequest, now: float) -> None:
        """Deliver leading chunks of a lease, as many as one message has room for.

        Where too many bytes are under way it waits its turn, for as long as its client does: the ranks of one engine
        come all at once. A peer that leaves more answers unread than two messages have room for gets no more until it
        reads.
        """
        most = self._limits.max_payload_bytes
        unread = self._replies.unread(peer)
        if unread > UNREAD_MESSAGES * most:
            raise RemoteProtocolError(
                ErrorCode.BUSY,
                f"{unread} bytes of answers wait for this client, of at most {UNREAD_MESSAGES * most}; read them first",
            )
        try:
            self._read(peer, request, message, now)
        except CacheBusyError:
            self._waiting.append((peer, request, message))

    @property
    def waiting(self) -> int:
        """Retrieves that wait for room."""
        return len(self._waiting)

    def resume(self, now: float) -> None:
        """Go on with retrieves that waited, as far as there is room by now."""
        while self._waiting:
            peer, request, message = self._waiting[0]
            try:
                if peer.connection.awaits(request.request_id, message):
                    self._read(peer, request, message, now)
            except CacheBusyError:
                return
            except Exception as error:  # a handler that fails costs its own request
                self._replies.fail(peer, request, error, now)
            self._waiting.popleft()

    def forget_abandoned(self) -> None:
        """Let go of retrieves that nobody waits for any more."""
        if self._waiting:
            self._waiting = deque(one for one in self._waiting if one[0].connection.awaits(one[1].request_id, one[2]))

    def _read(self, peer: Peer, request: RequestReceived, message: RetrieveRequest, now: float) -> None:
        most = self._limits.max_payload_bytes
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

        self._replies.run(peer, request, [task], then, now)

    def _deliver(
        self, peer: Peer, request: RequestReceived, message: RetrieveRequest, retrieved: Retrieved, now: float
    ) -> None:
        sharing = self._sharing
        if sharing is None or not sharing.reads(message.shared):
            reply, payload = reply_of_objects(retrieved.objects, retrieved.miss)
            self._replies.reply(peer, request, reply, now, payload)
            return
        moving = sharing.move_in(retrieved.objects)

        def then(now: float) -> None:
            moved = {held.id: copy for held, copy in moving.finish(now) if self._cache.rehouse(held, copy)}
            objects = [moved.get(obj.id, obj) for obj in retrieved.objects]
            reply, payload = reply_of_objects(objects, retrieved.miss, sharing.range_of)
            self._replies.reply(peer, request, reply, now, payload)

        self._replies.run(peer, request, [moving], then, now)

    def store(self, peer: Peer, request: RequestReceived, message: StoreRequest, now: float) -> None:
        """Keep chunks; what lies in shared memory is copied first."""
        space = peer.connection.space
        chunks = resolve_keys(message.keys, space, max_chunks=self._limits.max_chunks)
        check_places(chunks, message.first, message.starts, message.n_tokens)
        root = root_of(space)
        if not message.ranges:
            values = values_of(len(message.n_tokens), message.tensors, request.payload)
            self._keep(peer, request, chunks, objects_of_store(root, chunks.digests, message, values), now)
            return
        copying = self.shared_with(peer).copy_in(peer.identity, message, list(message.chunk_sizes()))

        def keep(now: float) -> None:
            values = [[view] for view in copying.finish(now)]
            if peer.connection.awaits(request.request_id, request.message):  # else its session is over, or nobody waits
                self._keep(peer, request, chunks, objects_of_store(root, chunks.digests, message, values), now)

        arrival = Arrival(self._replies.guarded(peer, request, keep))

        def then(now: float) -> None:
            arrival.here = True
            while peer.arrivals and peer.arrivals[0].here:
                peer.arrivals.popleft().keep(now)

        self._replies.run(peer, request, [copying], then, now)
        peer.arrivals.append(arrival)

    def _keep(
        self, peer: Peer, request: RequestReceived, chunks: Chunks, objects: Sequence[StoredObject], now: float
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
            outcomes = settle_all(tasks, now)
            reply = StoreReply(
                stored=outcomes.count(StoreOutcome.STORED),
                present=outcomes.count(StoreOutcome.PRESENT),
                declined=outcomes.count(StoreOutcome.DECLINED),
            )
            self._replies.reply(peer, request, reply, now)

        self._replies.run(peer, request, tasks, then, now)

    def shared_with(self, peer: Peer) -> Sharing:
        """Shared memory, if this session agreed on it."""
        agreement = peer.connection.agreement
        if self._sharing is None or agreement is None or SHARED_MEMORY not in agreement.features:
            raise RemoteProtocolError(ErrorCode.UNSHARED, "this session did not agree on shared memory")
        return self._sharing

    def clear(self, peer: Peer, request: RequestReceived, message: ClearRequest, now: float) -> None:
        """Forget what is not leased."""
        root = root_of(peer.connection.space) if message.scope == "space" else None
        task = self._cache.clear(root, now=now)

        def then(now: float) -> None:
            cleared = task.finish(now)
            self._replies.reply(peer, request, ClearReply(objects=cleared.objects, bytes=cleared.size), now)

        self._replies.run(peer, request, [task], then, now)


def root_of(space: KeySpace | None) -> bytes:
    """The root of a session's space.

    Raises:
        RemoteProtocolError: it was opened without one.
    """
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
