"""`WorkerSide`: loads chunks into one worker's paged KV and saves chunks out of it.

Engine-neutral. Loads are fetched by threads and written by the engine's own thread, so that they are ordered with its
computing: a synchronous load waits for its fetch, an asynchronous one is written in the step in which its fetch has
ended. Saves are copied by the engine's thread at once, which frees it to reuse the blocks, and stored by a thread; a
store that does not fit the queue is dropped, never waited for.

Nothing here raises for a server that is dead or slow, nor for what it sends: a load that does not deliver everything as
this worker's layers need it has failed, and a save that depends on it is dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

from keying import DIGEST_SIZE
from protocol_v2.connectors.paged import ChunkShapeError
from protocol_v2.errors import ProtocolError
from protocol_v2.wire_keys import Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from keying import ChunkKey
    from protocol_v2.connectors.paged import PagedGroup
    from protocol_v2.connectors.tracker import LoadPlan, SavePlan
    from protocol_v2.operations import KeysLike
    from protocol_v2.results import EndSessionResult, RetrieveResult, StoreResult
    from protocol_v2.tensors import TensorMeta

log = logging.getLogger(__name__)

FETCHERS: Final = 4
MAX_FAILED: Final = 4096
"""Failed loads remembered, so that saves that depend on them are dropped; they are needed for a step or two."""

_SESSIONS: Final = count(1)
"""Numbers for session ids: a session that has ended takes no store, so no two saves of a process share one."""


class WorkerClient(Protocol):
    """What is used of a `protocol_v2.client.CacheClient`."""

    def retrieve(
        self, lease: bytes, count: int, *, first: int, shard: Shard, keys: KeysLike | None, timeout: float | None
    ) -> RetrieveResult:
        """Tensors of chunks of a lease."""

    def store(
        self,
        session: str,
        keys: KeysLike,
        tensors: Sequence[Any],
        *,
        first: int,
        shard: Shard,
        places: Sequence[tuple[int, int]] | None,
        timeout: float | None,
    ) -> StoreResult:
        """Store one shard of chunks."""

    def end_session(self, session: str, *, timeout: float | None) -> EndSessionResult:
        """End a session."""

    def staging(self, metas: Sequence[TensorMeta]) -> Sequence[Any]:
        """Tensors of one chunk to be filled, and then stored without another copy where that can be."""


@dataclass(frozen=True, slots=True)
class LoadTask:
    """A load, as the scheduler's side tells a worker. It travels between processes.

    Attributes:
        request_id: the engine's.
        name: of the load.
        lease: names the chunks.
        first: index of the first chunk.
        stop: index after the last.
        start_token: first position to write.
        stop_token: position after the last.
        blocks: for each KV group the blocks that hold [start_token, stop_token).
        digests: keys of the chunks [0, stop), 32 bytes each, joined. The lease says it all to a server of wire protocol
            2; a tunnel needs them where the lookup was another process's. Empty where there is no such load.
    """

    request_id: str
    name: str
    lease: bytes
    first: int
    stop: int
    start_token: int
    stop_token: int
    blocks: tuple[tuple[int, ...], ...]
    digests: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, plan: LoadPlan, request_id: str, blocks: tuple[tuple[int, ...], ...]) -> LoadTask:
        """The task of a plan."""
        return cls(
            request_id,
            plan.name,
            plan.lease,
            plan.first,
            plan.stop,
            plan.start_token,
            plan.stop_token,
            blocks,
            _join(plan.keys),
        )


@dataclass(frozen=True, slots=True)
class SaveTask:
    """A save, as the scheduler's side tells a worker. It travels between processes.

    Attributes:
        name: of the save.
        digests: keys of the chunks [0, stop), 32 bytes each, joined: 1/8 byte for each token at 256 to a chunk.
        first: index of the first chunk to save.
        stop: index after the last.
        blocks: for each KV group the blocks that hold the chunks.
        after_load: drop it if this load failed.
    """

    name: int
    digests: bytes = field(repr=False)
    first: int
    stop: int
    blocks: tuple[tuple[int, ...], ...]
    after_load: str | None = None

    @classmethod
    def of(cls, plan: SavePlan, name: int, blocks: tuple[tuple[int, ...], ...]) -> SaveTask:
        """The task of a plan."""
        return cls(name, _join(plan.keys), plan.first, plan.stop, blocks, plan.after_load)


def _join(keys: Sequence[ChunkKey]) -> bytes:
    return b"".join(key.digest for key in keys)


def _split(joined: bytes) -> list[bytes]:
    return [joined[i : i + DIGEST_SIZE] for i in range(0, len(joined), DIGEST_SIZE)]


@dataclass(slots=True)
class WorkerReport:
    """What became of loads and saves since the last report. It travels between processes.

    Attributes:
        loads: for each load how many workers are done with it, and how many of them did not get everything.
        saves: for each save how many workers stored it, and how many did not.
        misfit: why chunks of the cache do not fit this engine's layers; None where they do.
    """

    loads: dict[str, tuple[int, int]] = field(default_factory=dict)
    saves: dict[int, tuple[int, int]] = field(default_factory=dict)
    misfit: str | None = None

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.misfit)

    def add(self, other: WorkerReport) -> None:
        """Another worker's, or a later one."""
        for name, (done, failed) in other.loads.items():
            before = self.loads.get(name, (0, 0))
            self.loads[name] = (before[0] + done, before[1] + failed)
        for save, (stored, lost) in other.saves.items():
            had = self.saves.get(save, (0, 0))
            self.saves[save] = (had[0] + stored, had[1] + lost)
        self.misfit = self.misfit or other.misfit


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Chunks of each group, as far as all groups have them, and why there are no more."""

    groups: tuple[tuple[tuple[Any, ...], ...], ...]
    n_chunks: int
    misfit: str | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """A save whose bytes are copied."""

    task: SaveTask
    groups: tuple[list[Sequence[Any]], ...]
    nbytes: int


class WorkerSide:
    """See the head of the module. Its methods are for the engine's thread.

    Args:
        client: of the cache.
        groups: this worker's layers, by KV group.
        world: workers that hold a part of each chunk.
        rank: this one, below `world`.
        chunk_size: tokens of a chunk.
        load_timeout: seconds for all synchronous loads of a step together, and for an asynchronous one.
        store_timeout: seconds for a store.
        queue_bytes: copied bytes that wait to be stored, at most; one save that is larger goes alone.
    """

    def __init__(
        self,
        client: WorkerClient,
        groups: Sequence[PagedGroup],
        *,
        world: int,
        rank: int,
        chunk_size: int,
        load_timeout: float = 5.0,
        store_timeout: float = 10.0,
        queue_bytes: int = 1 << 30,
    ) -> None:
        self._client = client
        self._groups = tuple(groups)
        self._shards = tuple(Shard(world=world, rank=rank, group=group) for group in range(len(groups)))
        self._chunk_size = chunk_size
        self._load_timeout = load_timeout
        self._fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="extra-keys-fetch")
        self._underway: dict[str, tuple[LoadTask, Future[_Fetched]]] = {}
        self._staged: dict[str, _Fetched] = {}
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport()
        self._saver = SaveThread(client, self._shards, chunk_size, store_timeout, queue_bytes)

    # ---- load

    def load(self, tasks: Sequence[LoadTask]) -> None:
        """Load before this returns; what fails is in `failed_blocks` and the report."""
        ends = time.monotonic() + self._load_timeout
        fetches = [(task, self._fetchers.submit(self._fetch, task, ends)) for task in tasks]
        for task, fetch in fetches:
            self._write(task, fetch.result())

    def begin_loads(self, tasks: Iterable[LoadTask]) -> None:
        """Begin to load without waiting; `end_loads` says what is done."""
        for task in tasks:
            ends = time.monotonic() + self._load_timeout
            self._underway[task.name] = (task, self._fetchers.submit(self._fetch, task, ends))

    def end_loads(self) -> list[tuple[LoadTask, bool]]:
        """Write what has been fetched: the loads that are over with this, and whether they delivered everything."""
        done = [name for name, (_, fetch) in self._underway.items() if fetch.done()]
        over = []
        for name in done:
            task, fetch = self._underway.pop(name)
            over.append((task, self._write(task, fetch.result())))
        return over

    def stage(self, task: LoadTask) -> int:
        """Fetch now and keep, for `write_staged` or `drop_staged`; chunks that every group has.

        For engines that cannot be told of a failed load: nothing is promised to them but what is here.
        """
        fetched = self._fetch(task, time.monotonic() + self._load_timeout)
        self._staged[task.name] = fetched
        return fetched.n_chunks

    def write_staged(self, task: LoadTask) -> None:
        """Write what was staged under the task's name into its blocks, which need not have been known then."""
        self._write(task, self._staged.pop(task.name))

    def drop_staged(self, name: str) -> None:
        """Forget what was staged."""
        self._staged.pop(name, None)

    def take_failed_blocks(self) -> set[int]:
        """Blocks, of the first KV group, that should have been loaded and were not."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def _fetch(self, task: LoadTask, ends: float) -> _Fetched:
        """In a fetching thread: the chunks of all groups, checked; never raises."""
        try:
            return self._fetched(task, ends)
        except ProtocolError as error:  # such as a lease that is gone: the same as nothing delivered
            log.warning("a retrieve was refused: %s", error)
        except Exception:  # whatever it is, it costs this load and not the engine
            log.exception("a load failed")
        return _Fetched((), 0)

    def _fetched(self, task: LoadTask, ends: float) -> _Fetched:
        fetched = []
        keys = _split(task.digests)
        n_chunks = task.stop - task.first
        misfit = None
        for group, shard in zip(self._groups, self._shards, strict=True):
            rest = ends - time.monotonic()
            if not n_chunks or rest <= 0:
                n_chunks = 0
                break
            got = self._client.retrieve(
                task.lease, n_chunks, first=task.first, shard=shard, keys=keys or None, timeout=rest
            )
            chunks = []
            for place, chunk in enumerate(got.chunks, task.first):
                try:
                    group.check(place, chunk.tensors)
                    if (chunk.start, chunk.n_tokens) != (place * self._chunk_size, self._chunk_size):
                        raise ChunkShapeError(f"chunk: got {chunk.n_tokens} tokens at {chunk.start}")  # noqa: TRY301
                except ChunkShapeError as error:
                    misfit = str(error)
                    break
                chunks.append(chunk.tensors)
            fetched.append(tuple(chunks))
            n_chunks = len(chunks)
        return _Fetched(tuple(fetched), n_chunks, misfit)

    def _write(self, task: LoadTask, fetched: _Fetched) -> bool:
        """In the engine's thread: put the chunks into the KV. Whether everything was there."""
        for group, blocks, chunks in zip(self._groups, task.blocks, fetched.groups, strict=False):
            for place in range(fetched.n_chunks):
                group.write(blocks, task.start_token, task.stop_token, task.first + place, chunks[place])
        whole = fetched.n_chunks == task.stop - task.first
        if not whole:
            self._note_failed(task, fetched.n_chunks)
        self._report.misfit = self._report.misfit or fetched.misfit
        self._report.add(WorkerReport(loads={task.name: (1, int(not whole))}))
        return whole

    def _note_failed(self, task: LoadTask, delivered: int) -> None:
        self._failed[task.name] = None
        if len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)
        begin = max(task.start_token, (task.first + delivered) * self._chunk_size)
        group = self._groups[0]
        before = begin // group.block_size - task.start_token // group.block_size
        self._bad_blocks.update(task.blocks[0][before:])

    # ---- save

    def save(self, tasks: Iterable[SaveTask]) -> None:
        """Copy what is to be saved, and queue it."""
        for task in tasks:
            # what was computed on KV that never came is dropped; the scheduler's side hands it out again
            job = None if task.after_load in self._failed else self._copied(task)
            if job is None or not self._saver.put(job):
                self._report.add(WorkerReport(saves={task.name: (0, 1)}))

    def _copied(self, task: SaveTask) -> _Job | None:
        if not self._saver.has_room:
            return None
        start, stop = task.first * self._chunk_size, task.stop * self._chunk_size
        groups = []
        for group, blocks in zip(self._groups, task.blocks, strict=True):
            chunks = group.read(blocks, start, stop, self._client.staging)
            if chunks is None:
                return None
            groups.append(chunks)
        nbytes = sum(one.nbytes for chunks in groups for chunk in chunks for one in chunk)
        return _Job(task, tuple(groups), nbytes)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued is stored or lost, at most `timeout` seconds; whether it is."""
        return self._saver.flush(timeout)

    # ---- report and end

    def take_report(self) -> WorkerReport:
        """What became of loads and saves since the last one."""
        report, self._report = self._report, WorkerReport()
        report.add(self._saver.take_report())
        return report

    @property
    def loading(self) -> int:
        """Asynchronous loads that are not over."""
        return len(self._underway)

    def close(self, timeout: float = 10.0) -> None:
        """Let what is queued be stored, for at most `timeout` seconds, and end. Idempotent."""
        self._saver.close(timeout)
        self._fetchers.shutdown(wait=False, cancel_futures=True)


class SaveThread:
    """Stores what was copied, one save after the other.

    Each save has a session of its own, which ends with it: no worker leaves one behind, whatever happens to a request.
    """

    def __init__(
        self, client: WorkerClient, shards: Sequence[Shard], chunk_size: int, timeout: float, queue_bytes: int
    ) -> None:
        self._client = client
        self._shards = shards
        self._chunk_size = chunk_size
        self._timeout = timeout
        self._queue_bytes = queue_bytes
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting = 0
        self._bytes = 0
        self._closed = False
        self._report = WorkerReport()
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        """Whether another save may be copied."""
        return self._bytes < self._queue_bytes and not self._closed

    def put(self, job: _Job) -> bool:
        """Queue a save; False where there is no room."""
        with self._changed:
            if self._closed or (self._bytes and self._bytes + job.nbytes > self._queue_bytes):
                return False
            self._bytes += job.nbytes
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="extra-keys-saves", daemon=True)
                self._thread.start()
        self._queue.put(job)
        return True

    def take_report(self) -> WorkerReport:
        """What became of saves since the last one."""
        with self._changed:
            report, self._report = self._report, WorkerReport()
        return report

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits, at most `timeout` seconds; whether nothing does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self, timeout: float) -> None:
        """Take no more, let the rest be stored for at most `timeout` seconds."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self.flush(timeout)
            self._queue.put(None)
            thread.join(timeout)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            stored = self._stored(job)
            with self._changed:
                self._report.add(WorkerReport(saves={job.task.name: (1, 0) if stored else (0, 1)}))
                self._bytes -= job.nbytes
                self._waiting -= 1
                self._changed.notify_all()

    def _stored(self, job: _Job) -> bool:
        """Whether all chunks are in the cache now."""
        task = job.task
        digests = _split(task.digests)
        places = [(chunk * self._chunk_size, self._chunk_size) for chunk in range(task.first, task.stop)]
        session = f"save.{next(_SESSIONS)}"
        whole = True
        try:
            for shard, chunks in zip(self._shards, job.groups, strict=True):
                done = self._client.store(
                    session,
                    digests,
                    chunks,
                    first=task.first,
                    shard=shard,
                    places=places,
                    timeout=self._timeout,
                )
                whole = whole and done.failure is None and not done.declined
                if done.failure is not None:
                    break
            self._client.end_session(session, timeout=self._timeout)
        except ProtocolError as error:
            log.warning("a store was refused: %s", error)
            return False
        except Exception:  # whatever it is, it costs this save and not those after it
            log.exception("a save failed")
            return False
        return whole
