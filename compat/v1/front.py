"""`V1Front`: unmodified LMCache 0.5.x clients on the port of a v2 server, in engine-driven mode with pickled tensors.

Injected into the service, which gives it every message that is none of its own; it answers from the same cache, under
roots that no v2 request can meet (`front_storage`). Sans-IO like the service: messages in, messages and jobs out.

Theory of operation
-------------------
A v1 client has no error answer, and waits 300 seconds for one of the operation's own type. So whatever cannot be done
is answered with that type's failure (`operations`) and counted by reason; the first of each reason is logged. Only what
no answer can be told for stays unanswered.

Every request carries all its tokens, so every request is keyed by itself: nothing is remembered of a request id but the
lease of its lookup, and that is only used for the same root and the same chunk hashes. Pickles are read and written in
worker threads, off the loop, by the closed reader and writer of `pickled_tensors`; a store that does not fit the layout
its worker registered is refused whole.

Source: docs/spec/v1-formats.md, "Front".
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final, TypeVar

from compat.errors import CompatError
from compat.v1.chunk_hashes import mp_chunk_hashes
from compat.v1.front_sessions import LOOKUP_TTL, ClientTable, LookupTable, V1Lookup, WorkerTable
from compat.v1.front_storage import (
    V1RefusedError,
    check_delivery,
    is_namespace_root,
    namespace_root,
    pickle_objects,
    stored_chunks,
    unpickle_chunks,
)
from compat.v1.operations import V1Operation, V1Registered, V1RetrievePrepared, V1StorePrepared
from compat.v1.pickled_tensors import DTYPE_BYTES
from compat.v1.wire import MAX_DATA_BYTES, V1WireError, decode_request, encode_answer, encode_failure
from protocol_v2.capability import CAPABILITY
from protocol_v2.errors import ProtocolError
from protocol_v2.jobs import Job
from protocol_v2.outcomes import StoreOutcome
from protocol_v2.storage import Shard
from protocol_v2.work import Done, Task, blocking, settle_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compat.v1.front_sessions import V1Worker
    from compat.v1.operations import V1Key, V1Registration
    from compat.v1.wire import V1Request
    from protocol_v2.cache import ChunkCache
    from protocol_v2.frames import Frame
    from protocol_v2.outcomes import Retrieved
    from protocol_v2.status import Fact
    from protocol_v2.work import Ran

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_JOBS: Final = 1024
"""Jobs of v1 clients that were taken and not yet finished; a request that would need one more fails."""

MAX_PENDING_BYTES: Final = 2**30
"""Bytes of pickles that are read or written at one time; one that is larger goes alone."""

MAX_UNREAD_BYTES: Final = MAX_DATA_BYTES
"""Bytes of answers that may wait for one client before it is given tensors again: it reads none of them."""

_OWNER: Final = ("v1",)
"""Owner of all leases of v1 clients: several sockets share a request, so none of them owns one."""

_EXPIRE_SECONDS: Final = 1.0


class V1Front:
    """Answers v1 clients from a cache.

    Args:
        cache: the service's own; the service closes it.
        chunk_size: tokens of a chunk for v1 clients, who ask for it and take it.
        max_jobs: jobs under way at one time.
        max_pending: bytes of pickles under way at one time.
        max_unread: bytes of answers that wait for one client.
    """

    def __init__(
        self,
        cache: ChunkCache,
        *,
        chunk_size: int = 256,
        max_jobs: int = MAX_JOBS,
        max_pending: int = MAX_PENDING_BYTES,
        max_unread: int = MAX_UNREAD_BYTES,
    ) -> None:
        if chunk_size < 1:
            raise CompatError(f"chunk_size: got {chunk_size}, wanted at least 1")
        self._cache = cache
        self._chunk_size = chunk_size
        self._max_jobs = max_jobs
        self._max_pending = max_pending
        self._max_unread = max_unread
        self._lookups = LookupTable()
        self._asking: dict[tuple[bytes, str], list[tuple[bytes, V1Request]]] = {}
        self._workers = WorkerTable(chunk_size)
        self._clients = ClientTable()
        self._now = 0.0  # of the last call, for facts
        self._outgoing: deque[tuple[bytes, list[Frame]]] = deque()
        self._jobs: deque[Job] = deque()
        self._running = 0
        self._pending = 0
        self._next_expiry = 0.0
        self._closed = False
        self._requests: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._hits = 0

    # ---- driven by the service

    @property
    def capabilities(self) -> tuple[str, ...]:
        """None of LMCache's experimental features."""
        return ()

    @property
    def max_frame_bytes(self) -> int:
        """A store's tensors: all of its chunks are one frame, and one that is not read is never answered."""
        return MAX_DATA_BYTES

    def receive(self, identity: bytes, frames: Sequence[Frame], now: float, *, unread: int = 0) -> None:
        """Take one message of a v1 client, or of whoever else is no v2 peer. Never raises for what a peer sends."""
        self._now = now
        try:
            request = decode_request(frames)
        except V1WireError as error:
            self._count_refusal(str(error.refusal), error)
            self._queue(identity, error.answer)
            return
        self._requests[str(request.operation)] += 1
        self._clients.heard(identity, now)
        try:
            self._dispatch(identity, request, now, unread)
        except Exception as error:  # a handler that fails costs its own request
            self._fail(identity, request, error)

    def take_outgoing(self) -> list[tuple[bytes, list[Frame]]]:
        """Messages to send, with the identity of the peer each goes to."""
        taken = list(self._outgoing)
        self._outgoing.clear()
        return taken

    def take_jobs(self) -> list[Job]:
        """Jobs to run; each comes back by its ``then``."""
        taken = list(self._jobs)
        self._jobs.clear()
        return taken

    def tick(self, now: float) -> None:
        """Forget lookups, workers and clients of which nothing was heard."""
        self._now = now
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRE_SECONDS
        self._clients.expire(now)
        self._give_back(self._lookups.expire(now), now)
        for instance_id in self._workers.expire(now):
            log.warning("v1 worker %d was silent for too long and is forgotten", instance_id)

    def facts(self) -> Mapping[str, Fact]:
        """Facts for the status. Counters run since the start.

        ``v1.clients`` are sockets heard of in the last two minutes, and ``v1.last_request_s`` is how long ago the last
        request was, None before the first: whether anybody still needs this front.
        """
        last = self._clients.last_heard
        return {
            "v1.chunk_size": self._chunk_size,
            "v1.clients": len(self._clients),
            "v1.last_request_s": None if last is None else round(max(0.0, self._now - last), 1),
            "v1.lookups": len(self._lookups),
            "v1.workers": len(self._workers),
            "v1.jobs": self._running,
            "v1.pending_bytes": self._pending,
            "v1.hit_chunks": self._hits,
            **{f"v1.requests.{operation}": count for operation, count in sorted(self._requests.items())},
            **{f"v1.refused.{reason}": count for reason, count in sorted(self._refused.items())},
        }

    def close(self, now: float) -> None:
        """Give back all leases; work that was begun ends where it is settled."""
        self._closed = True
        self._give_back(self._lookups.clear(), now)

    # ---- operations

    def _dispatch(self, peer: bytes, request: V1Request, now: float, unread: int) -> None:
        arguments: tuple[Any, ...] = request.payloads
        match request.operation:
            case V1Operation.LOOKUP:
                self._lookup(peer, request, arguments[0], now)
            case V1Operation.QUERY_PREFETCH_STATUS | V1Operation.WAIT_PREFETCH_STATUS:
                self._tell_result(peer, request, arguments[0], now)
            case V1Operation.PREPARE_RETRIEVE:
                if unread > self._max_unread:
                    raise V1RefusedError("unread", f"retrieve: {unread} bytes of answers wait for that client")
                self._retrieve(peer, request, *arguments, now=now)
            case V1Operation.COMMIT_RETRIEVE:
                self._reply(peer, request, self._worker(*arguments, now=now) is not None)
            case V1Operation.PREPARE_STORE:
                self._worker(*arguments, now=now)
                self._reply(peer, request, V1StorePrepared())
            case V1Operation.COMMIT_STORE:
                self._store(peer, request, *arguments, now=now)
            case V1Operation.FREE_LOOKUP_LOCKS:
                self._free(peer, arguments[0], now)
                self._reply(peer, request, None)
            case V1Operation.END_SESSION:
                gone = self._lookups.pop(peer, arguments[0])
                self._give_back([] if gone is None else [gone], now)
                self._reply(peer, request, None)
            case V1Operation.CLEAR:
                self._clear(peer, request, force=bool(arguments and arguments[0]), now=now)
            case _:
                self._reply(peer, request, self._answer_at_once(request.operation, arguments, now))

    def _answer_at_once(self, operation: V1Operation, arguments: tuple[Any, ...], now: float) -> object:
        """The answers that need neither keys nor the cache."""
        match operation:
            case V1Operation.REGISTER_ENGINE_DRIVEN:
                self._register(arguments[0], now)
                return V1Registered()
            case V1Operation.UNREGISTER_ENGINE_DRIVEN:
                self._workers.unregister(arguments[0])
            case V1Operation.PING:
                return arguments[0] is None or self._workers.ping(arguments[0], now)
            case V1Operation.GET_CHUNK_SIZE:
                return self._chunk_size
            case V1Operation.GET_EXPERIMENTAL:
                return [CAPABILITY, *self.capabilities]
            case V1Operation.NOOP:
                return "OK"
        return None

    def _register(self, registration: V1Registration, now: float) -> None:
        if registration.dtype_str not in DTYPE_BYTES:
            raise V1RefusedError(
                "dtype",
                f"register: got element type {registration.dtype_str!r}, wanted one of {', '.join(DTYPE_BYTES)}",
            )
        worker = self._workers.register(registration, now)
        dtypes = self._workers.dtypes(worker.model, worker.world)
        if len(dtypes) > 1:
            log.warning(
                "v1 workers of %r disagree about the element type (%s): lookups for it miss until they agree",
                worker.model,
                ", ".join(sorted(dtypes)),
            )

    def _lookup(self, peer: bytes, request: V1Request, key: V1Key, now: float) -> None:
        """Look up, after a remote tier was asked, for a bounded time; at once where there is none to ask."""
        self._forget_lookup(peer, key.request_id, now)
        dtypes = self._workers.dtypes(key.model_name, key.world_size)
        if len(dtypes) != 1:
            raise V1RefusedError(
                "no_worker" if not dtypes else "dtypes",
                f"lookup: {len(dtypes)} element types are registered for that model and world size, wanted one",
            )
        root = self._root(key, dtypes[0])
        keys = self._hashes(key)
        asking = self._cache.ask(root, keys, world=key.world_size, now=now)
        place = (peer, key.request_id)
        waiters = self._asking[place] = []

        def asked(now: float) -> None:
            if self._asking.get(place) is waiters:
                del self._asking[place]
            try:
                asking.finish(now)
                self._take_lease(peer, key, root, keys, now)
                self._reply(peer, request, None)
            finally:
                for waiter, waiting in waiters:
                    self._tell_result(waiter, waiting, key.request_id, now)

        try:
            self._run(peer, request, [asking], asked, now)
        except V1RefusedError:
            del self._asking[place]
            raise

    def _forget_lookup(self, peer: bytes, request_id: str, now: float) -> None:
        before = self._lookups.pop(peer, request_id)
        if before is not None:
            self._give_back([before], now)

    def _take_lease(self, peer: bytes, key: V1Key, root: bytes, keys: Sequence[bytes], now: float) -> None:
        self._forget_lookup(peer, key.request_id, now)
        hit = self._cache.lookup(root, keys, world=key.world_size, owner=_OWNER, ttl=LOOKUP_TTL, now=now)
        self._hits += hit.chunks
        lookup = V1Lookup(
            peer,
            key.request_id,
            root,
            key.world_size,
            tuple(keys[: hit.chunks]),
            hit.lease,
            key.num_kv_readers,
            hit.chunks,
            now,
        )
        self._give_back(self._lookups.put(lookup), now)

    def _tell_result(self, peer: bytes, request: V1Request, request_id: str, now: float) -> None:
        """The result of a lookup. While that is under way: nil to who polls, and who waits is told afterwards."""
        waiters = self._asking.get((peer, request_id))
        if waiters is None and self._lookups.find(peer, request_id, now) is None:
            waiters = next((one for (_, asked), one in self._asking.items() if asked == request_id), None)
        if waiters is None:
            self._reply(peer, request, self._take_result(peer, request_id, now))
        elif request.operation is V1Operation.WAIT_PREFETCH_STATUS:
            waiters.append((peer, request))
        else:
            self._reply(peer, request, None)

    def _take_result(self, peer: bytes, request_id: str, now: float) -> int:
        """Hit chunks of a lookup, told once; 0 for one that is not known, as LMCache says."""
        lookup = self._lookups.find(peer, request_id, now) or self._lookups.find_latest(request_id, now)
        if lookup is None:
            return 0
        result, lookup.result = lookup.result, None
        return result or 0

    def _free(self, peer: bytes, key: V1Key, now: float) -> None:
        lookup = self._lookups.find(peer, key.request_id, now)
        if lookup is None or lookup.lease is None or lookup.world != key.world_size:
            return
        shard = None if key.worker_id is None else Shard(key.world_size, key.worker_id)
        start, stop = key.start // self._chunk_size, key.end // self._chunk_size
        self._cache.release(lookup.lease, start=start, stop=stop, shard=shard, now=now)

    def _retrieve(self, peer: bytes, request: V1Request, key: V1Key, instance_id: int, *, now: float) -> None:
        layout = self._worker(key, instance_id, now=now).layout
        shard, start, hashes = self._place(key)
        lookup = self._lookups.find_covering(key.request_id, self._root(key, layout.dtype), hashes, now)
        if lookup is None or lookup.lease is None:
            raise V1RefusedError("not_looked_up", "retrieve: no lookup of that id hit these chunks for this identity")
        lease, stop = lookup.lease, len(hashes)

        def found(retrieved: Retrieved, now: float) -> None:
            check_delivery(retrieved.objects, stop - start, layout)
            size = sum(obj.envelope.payload_size for obj in retrieved.objects)
            for first, last in lookup.count_read(shard.rank, start, stop):
                self._cache.release(lease, start=first, stop=last, shard=shard, now=now)
            self._off_loop(peer, request, size, lambda: pickle_objects(retrieved.objects), written, now=now)

        def written(data: bytes, _now: float) -> None:
            self._reply(peer, request, V1RetrievePrepared(success=True, data=memoryview(data)))

        task = self._cache.retrieve(lease, start, stop, shard, now=now)
        self._run(peer, request, [task], lambda now: found(task.finish(now), now), now)

    def _store(
        self, peer: bytes, request: V1Request, key: V1Key, instance_id: int, data: memoryview, *, now: float
    ) -> None:
        layout = self._worker(key, instance_id, now=now).layout
        shard, start, hashes = self._place(key)
        root = self._root(key, layout.dtype)

        def read(tensors: list[bytes], now: float) -> None:
            objects = stored_chunks(
                root, hashes, tensors, layout, start=start, shard=shard, chunk_size=self._chunk_size
            )
            tasks = [self._cache.store(obj, owner=_OWNER, now=now) for obj in objects]

            def stored(now: float) -> None:
                outcomes = settle_all(tasks, now)
                self._reply(peer, request, StoreOutcome.DECLINED not in outcomes)

            self._run(peer, request, tasks, stored, now)

        self._off_loop(
            peer, request, data.nbytes, lambda: unpickle_chunks(data, len(hashes) - start, layout), read, now=now
        )

    def _clear(self, peer: bytes, request: V1Request, *, force: bool, now: float) -> None:
        """Forget what v1 clients stored, and nothing else."""
        if force:
            self._give_back(self._lookups.clear(), now)
        tasks = [self._cache.clear(root, now=now) for root in self._cache.roots() if is_namespace_root(root)]

        def cleared(now: float) -> None:
            settle_all(tasks, now)
            self._reply(peer, request, None)

        self._run(peer, request, tasks, cleared, now)

    # ---- identity

    def _worker(self, key: V1Key, instance_id: int, *, now: float) -> V1Worker:
        """The worker that a transfer names, if the key is one of its own."""
        worker = self._workers.find(instance_id, now)
        if worker is None:
            raise V1RefusedError("no_worker", f"instance {instance_id} is not registered, or was silent for too long")
        if (worker.model, worker.world) != (key.model_name, key.world_size):
            raise V1RefusedError("other_worker", f"instance {instance_id} was registered for another model or world")
        return worker

    def _root(self, key: V1Key, dtype: str) -> bytes:
        return namespace_root(key.model_name, key.cache_salt, chunk_size=self._chunk_size, dtype=dtype)

    def _hashes(self, key: V1Key) -> list[bytes]:
        """Hashes of all whole chunks up to the end of the key's range."""
        return mp_chunk_hashes(key.token_ids[: key.end], self._chunk_size)

    def _place(self, key: V1Key) -> tuple[Shard, int, list[bytes]]:
        """What a transfer is about: whose part, first chunk, and hashes from the prompt's first chunk on."""
        if key.worker_id is None:
            raise V1RefusedError("no_rank", "transfer: the key names no worker, so no part of a value")
        if key.start % self._chunk_size or key.end % self._chunk_size:
            raise V1RefusedError("unaligned", f"transfer: the range is not one of whole chunks of {self._chunk_size}")
        if key.start == key.end:
            raise V1RefusedError("empty", "transfer: of no chunk at all")
        return Shard(key.world_size, key.worker_id), key.start // self._chunk_size, self._hashes(key)

    def _give_back(self, lookups: Sequence[V1Lookup], now: float) -> None:
        for lookup in lookups:
            if lookup.lease is not None:
                self._cache.release(lookup.lease, now=now)

    # ---- work and replies

    def _off_loop(
        self,
        peer: bytes,
        request: V1Request,
        size: int,
        work: Callable[[], T],
        then: Callable[[T, float], None],
        *,
        now: float,
    ) -> None:
        """Do something about a pickle in a worker thread, then go on with what it gave."""
        if self._pending and self._pending + size > self._max_pending:
            raise V1RefusedError("busy", f"{self._pending} bytes of tensors are under way; at most {self._max_pending}")
        self._pending += size

        def settle(ran: Ran[T], _now: float) -> T:
            self._pending -= size
            if not isinstance(ran, Done):
                raise ran.error
            return ran.value

        task = blocking(work, settle)
        self._run(peer, request, [task], lambda now: then(task.finish(now), now), now)

    def _run(
        self,
        peer: bytes,
        request: V1Request,
        tasks: Sequence[Task[Any]],
        then: Callable[[float], None],
        now: float,
    ) -> None:
        """Run what blocks, then go on; at once where nothing blocks."""

        def guarded(now: float) -> None:
            try:
                then(now)
            except Exception as error:  # what the operation ended in belongs to its own request
                self._fail(peer, request, error)

        if self._closed:  # nobody takes jobs any more
            for task in tasks:
                task.run()
        if self._closed or all(task.ready for task in tasks):
            guarded(now)
            return
        if self._running >= self._max_jobs:
            for task in tasks:
                task.cancel(now)
            raise V1RefusedError("busy", f"{self._max_jobs} operations are under way")
        self._running += 1

        def finished(now: float) -> None:
            self._running -= 1
            guarded(now)

        self._jobs.append(Job(tasks, finished))

    def _reply(self, peer: bytes, request: V1Request, value: object) -> None:
        self._queue(peer, encode_answer(request, value))

    def _fail(self, peer: bytes, request: V1Request, error: Exception) -> None:
        if isinstance(error, CompatError | ProtocolError):
            reason = getattr(error, "reason", None)
            self._count_refusal(reason if isinstance(reason, str) else type(error).__name__, error)
        else:
            self._refused["failed"] += 1
            log.error("a v1 request failed: %s", type(error).__name__, exc_info=error)
        self._queue(peer, encode_failure(request))

    def _count_refusal(self, reason: str, error: Exception) -> None:
        self._refused[reason] += 1
        if self._refused[reason] == 1:
            log.warning("a v1 request was refused (%s; the next ones are only counted): %s", reason, error)

    def _queue(self, peer: bytes, frames: list[Frame] | None) -> None:
        if frames:
            self._outgoing.append((peer, frames))
