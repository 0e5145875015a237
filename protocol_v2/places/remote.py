"""`RemotePlace`: the loop's half of a tier that many servers share.

Theory of operation
-------------------
A lookup uses what is known of the store (`knowledge`) and never waits here. Before it, `ask` plans a question about the
chunks that the lookup would miss: it goes out in batches, stops at the first chunk that is not whole, and whoever wants
the answer waits for it `wait_seconds` at most. What comes later than that is there for the next lookup. Where answers
are late time and again nobody waits any more, until one comes in time: a slow store costs hits, not threads.

What is stored here is sent on behind the acknowledgement (`outbox`).

A `Breaker` stands before everything. While it is open nothing is asked, known, read or sent, so a dead store costs a
few calls and then nothing; a probe in the background notices that it is back. What was known is forgotten when it
opens: a store that comes back may be empty.

Threads touch the tier, the breaker, and lists that the loop empties at its next call (`collect`).
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from protocol_v2.outcomes import RemoteStatus
from protocol_v2.places.base import Forgotten, Read
from protocol_v2.places.knowledge import Knowledge
from protocol_v2.places.outbox import Outbox
from protocol_v2.storage.errors import ObjectMissError
from protocol_v2.storage.names import ObjectId, Shard
from protocol_v2.storage.objects import OBJECT_OVERHEAD
from protocol_v2.tiers.base import TierError
from protocol_v2.tiers.breaker import Breaker
from protocol_v2.work import Done, Ran, Task, blocking, immediate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from keying import KeySpace
    from protocol_v2.places.presence import Presence
    from protocol_v2.storage.names import ChunkId
    from protocol_v2.storage.objects import StoredObject
    from protocol_v2.tiers.remote import RemoteTier

log = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE: Final = 4
"""Late answers in a row after which lookups ask without waiting."""


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Bounds of what a server does with its remote tier.

    Args:
        wait_seconds: a lookup or prefetch waits for an answer at most.
        trust_seconds: what was there counts as there.
        doubt_seconds: what was not there counts as not there.
        probe_seconds: between two pings while nothing is wrong.
        drain_seconds: closing goes on sending at most.
        queue_bytes: objects that wait to be sent, together; they stay in memory until then.
        read_bytes: objects of one call, together; one that is larger goes alone.
        max_known: chunks that are known, at most.
        max_asked: objects of one question, at most.
        max_questions: under way, at most; a lookup beyond that does not ask.
        threads: for questions, probes and sending.
        senders: of these, for sending at most.
    """

    wait_seconds: float = 0.2
    trust_seconds: float = 30.0
    doubt_seconds: float = 1.0
    probe_seconds: float = 5.0
    drain_seconds: float = 5.0
    queue_bytes: int = 256 * 2**20
    read_bytes: int = 32 * 2**20
    max_known: int = 65_536
    max_asked: int = 8192
    max_questions: int = 64
    threads: int = 6
    senders: int = 2


class _Doubtful(NamedTuple):
    """A chunk to ask about, and the shards of it that nearer tiers do not have."""

    chunk: ChunkId
    shards: Sequence[Shard]


class _Question(NamedTuple):
    """Chunks, first to last; the epoch that the answer belongs to; until when somebody waits for it."""

    world: int
    groups: int
    chunks: Sequence[_Doubtful]
    epoch: int
    deadline: float


class _Answer(NamedTuple):
    """What is there of chunks, in order: bytes of each shard. All but the last are whole; the last may be.

    `in_time` says whether it came while somebody waited: of a long question at least a part may.
    """

    question: _Question
    chunks: Sequence[tuple[_Doubtful, Sequence[int | None]]]
    in_time: bool


class _Ended(NamedTuple):
    """A question will get no more answers."""


class _Got(NamedTuple):
    """Objects were read."""

    objects: int
    size: int


class _Failed(NamedTuple):
    """A question or a probe was not answered."""

    error: TierError


class RemotePlace:
    """A shared tier, as the loop sees it. Its calls never block.

    Args:
        tier: does the blocking part.
        presence: what is in the nearer tiers.
        limits: bounds.
        executor: runs questions, probes and sending; by default threads of its own.
    """

    name = "remote"

    def __init__(
        self,
        tier: RemoteTier,
        presence: Presence,
        *,
        limits: RemoteLimits,
        executor: Executor | None = None,
    ) -> None:
        self._tier = tier
        self._presence = presence
        self._limits = limits
        self._executor = executor or ThreadPoolExecutor(limits.threads, thread_name_prefix="extra-keys-remote")
        self._clock = tier.clock
        self._breaker = Breaker(tier.clock)
        self._knowledge = Knowledge(limits.trust_seconds, limits.doubt_seconds, limits.max_known)
        self._outbox = Outbox(
            tier, self._breaker, self._executor, tier.clock, limit=limits.queue_bytes, senders=limits.senders
        )
        self._news: deque[_Answer | _Ended | _Got | _Failed] = deque()
        self._epoch = 0
        self._trips = 0
        self._away = False
        self._now = 0.0
        self._questions = 0
        self._late_in_a_row = 0
        self._next_probe = 0.0
        self._last_error: str | None = None
        self._asked = self._there = self._late = self._skipped = self._read = self._read_bytes = 0
        self.failed = 0

    # ---- what lookups ask

    def extend(self, found: list[ChunkId], root: bytes, keys: Sequence[bytes], world: int, groups: int) -> None:
        """Go on with a hit through what is known here, and what the nearer tiers have after that.

        Args:
            found: leading chunks that the nearer tiers have; gets those that follow.
            root: of the space.
            keys: of all chunks.
            world: shards of a value in each group.
            groups: KV groups.
        """
        if not self._knowledge or self._breaker.is_open:
            return
        shards = _shards(world, groups)
        for key in keys[len(found) :]:
            chunk = (root, key)
            there = self._knowledge.shards(chunk, self._now)
            if not all(shard in there or self._presence.where(chunk, shard) for shard in shards):
                return
            found.append(chunk)

    def ask(self, root: bytes, keys: Sequence[bytes], world: int, groups: int, now: float) -> Task[None]:
        """Ask what is there of the chunks that a lookup would miss. The task waits for the answer, and raises nothing.

        Args:
            root: of the space.
            keys: of the chunks, from the first that a lookup would miss on.
            world: shards of a value in each group.
            groups: KV groups.
            now: seconds, monotonic.
        """
        self.collect(now)
        if not keys or self._knowledge.is_missing((root, keys[0]), world, groups, now):
            return immediate(None)
        if self._breaker.is_open or self._questions >= self._limits.max_questions:
            self._skipped += 1
            return immediate(None)
        shards = _shards(world, groups)
        most = max(1, self._limits.max_asked // len(shards))
        chunks = [self._doubtful((root, key), shards) for key in keys[:most]]
        deadline = self._clock() + self._limits.wait_seconds
        self._questions += 1
        future = self._executor.submit(self._put_question, _Question(world, groups, chunks, self._epoch, deadline))
        if self._late_in_a_row >= PATIENCE:
            self._late += 1
            return immediate(None)

        def settle(_ran: Ran[None], now: float) -> None:
            if not future.done():
                self._late += 1
                self._late_in_a_row += 1
            self.collect(now)

        return blocking(lambda: _wait_for(future, deadline - self._clock()), settle)

    def knows(self, chunk: ChunkId) -> bool:
        """Whether some shard of a chunk is known to be there."""
        return not self._breaker.is_open and bool(self._knowledge.shards(chunk, self._now))

    # ---- what is read

    def plan_read(self, wanted: ObjectId) -> Read | None:
        """A read of an object, if it is known to be there."""
        if self._breaker.is_open:
            return None
        size = self._knowledge.shards(wanted.chunk, self._now).get(wanted.shard)
        return Read(self, wanted, turn=self._epoch, charge=size) if size is not None else None

    def fetch(self, reads: Sequence[Read]) -> None:
        """Read in order, in calls of bounded size, up to the first that is not there. Blocks; in any thread."""
        for together in _batches(reads, lambda read: read.charge, self._limits.read_bytes):
            try:
                outcomes = self._tier.get_many([read.wanted for read in together])
            except TierError as error:
                self._breaker.note(error)
                together[0].error = error
                return
            self._breaker.note(None)
            for read, outcome in zip(together, outcomes, strict=False):
                if isinstance(outcome, ObjectMissError):
                    read.error = outcome
                    return
                read.found = outcome
            self._news.append(_Got(len(together), sum(read.charge for read in together)))

    def wants_kept(self, read: Read) -> bool:
        """Whether nothing was cleared since the read was planned."""
        return read.turn == self._epoch

    def drop(self, read: Read) -> bool:
        """What was read is not there, or broken: it is not known any more. Whether it was."""
        return self._knowledge.unlearn(read.wanted)

    def note_failure(self, error: TierError | None) -> None:
        """A call failed."""
        self.failed += 1
        self._last_error = str(error)

    # ---- what is sent

    def send(self, obj: StoredObject) -> None:
        """Send an object on, behind everything else, unless it is known to be there."""
        if obj.id.shard not in self._knowledge.shards(obj.id.chunk, self._now):
            self._outbox.put(obj)

    def describe(self, space: KeySpace) -> None:
        """Send the description of a space, unless that was done."""
        self._outbox.describe(space)

    # ---- what the loop calls

    def collect(self, now: float) -> None:
        """Take what threads have found out."""
        self._now = now
        while self._news:
            self._take(self._news.popleft())
        for obj, error in self._outbox.collect():
            if error is not None:
                self.note_failure(error)
            elif obj is not None:
                self._knowledge.learn(obj.id, obj.envelope.payload_size, now)
        if self._trips != self._breaker.trips:
            self._trips = self._breaker.trips
            self._away = True
            self._knowledge.clear()
            log.warning("the remote tier %s is away (%s): doing without", self._tier.address, self._last_error)
        if self._away and not self._breaker.is_open:
            self._away = False
            log.warning("the remote tier %s answers again", self._tier.address)

    def upkeep(self, now: float) -> None:
        """Forget what is out of date, probe, and go on sending. Call about once a second."""
        self.collect(now)
        self._knowledge.expire(now)
        if self._breaker.take_probe() or (now >= self._next_probe and not self._breaker.is_open):
            self._next_probe = now + self._limits.probe_seconds
            self._executor.submit(self._probe)
        self._outbox.start()

    def charge(self, chunk: ChunkId) -> int:
        """Bytes that a chunk would take in memory, roughly, as far as it is known to be there."""
        return sum(size + OBJECT_OVERHEAD for size in self._knowledge.shards(chunk, self._now).values())

    def touch(self, chunks: Sequence[ChunkId]) -> None:
        """Nothing: the store has its own record of uses."""

    def offer(self, chunks: Sequence[ChunkId]) -> None:
        """Nothing: leases hold nothing in a store that others share."""

    def forget(self, root: bytes | None) -> Forgotten:
        """Forget what is known, of one space or all, and what waits to be sent. What is in the store stays there."""
        self._epoch += 1
        self._knowledge.forget(root)
        self._outbox.forget(root)
        return Forgotten((), 0, None)

    def close(self) -> Task[None]:
        """Send what waits, for a bounded time, and give back threads and connections."""

        def work() -> None:
            self._outbox.drain(self._limits.drain_seconds)
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._tier.close()

        def settle(ran: Ran[None], now: float) -> None:
            if not isinstance(ran, Done):
                raise ran.error
            self.collect(now)
            left = self._outbox.end()
            if left:
                log.warning("%d objects were not sent to the remote tier %s before the end", left, self._tier.address)

        return blocking(work, settle)

    def status(self) -> RemoteStatus:
        """Counts, for people and tools."""
        sent = self._outbox.counters
        return RemoteStatus(
            kind=self._tier.kind,
            address=self._tier.address,
            up=not self._breaker.is_open,
            trips=self._breaker.trips,
            failed=self.failed,
            last_error=self._last_error,
            known=len(self._knowledge),
            asked=self._asked,
            there=self._there,
            late=self._late,
            skipped=self._skipped,
            read=self._read,
            read_bytes=self._read_bytes,
            written=sent.written,
            written_bytes=sent.written_bytes,
            dropped=sent.dropped,
            refused=sent.refused,
            queued=self._outbox.objects,
            queued_bytes=self._outbox.size,
        )

    # ---- in threads

    def _put_question(self, question: _Question) -> None:
        try:
            for chunks in _batches(question.chunks, lambda one: len(one.shards), self._tier.batch):
                wanted = [ObjectId(*chunk, shard) for chunk, shards in chunks for shard in shards]
                sizes = iter(self._tier.sizes(wanted))
                self._breaker.note(None)
                answered: list[tuple[_Doubtful, Sequence[int | None]]] = []
                whole = True
                for one in chunks:
                    found = [next(sizes) for _ in one.shards]
                    answered.append((one, found))
                    whole = None not in found
                    if not whole:
                        break
                self._news.append(_Answer(question, answered, self._clock() <= question.deadline))
                if not whole:
                    return
        except TierError as error:
            self._breaker.note(error)
            self._news.append(_Failed(error))
        finally:
            self._news.append(_Ended())

    def _probe(self) -> None:
        try:
            self._tier.ping()
        except TierError as error:
            self._breaker.failed()
            self._news.append(_Failed(error))
        else:
            self._breaker.succeeded()

    # ---- on the loop

    def _doubtful(self, chunk: ChunkId, shards: Sequence[Shard]) -> _Doubtful:
        if self._presence.has(chunk):
            shards = [shard for shard in shards if not self._presence.where(chunk, shard)]
        return _Doubtful(chunk, shards)

    def _take(self, news: _Answer | _Ended | _Got | _Failed) -> None:
        match news:
            case _Answer(question, chunks, in_time):
                if in_time:
                    self._late_in_a_row = 0
                for one, sizes in chunks:
                    self._take_answer(question, one, sizes)
            case _Ended():
                self._questions -= 1
            case _Got(objects, size):
                self._read += objects
                self._read_bytes += size
            case _Failed(error):
                self.note_failure(error)

    def _take_answer(self, question: _Question, one: _Doubtful, sizes: Sequence[int | None]) -> None:
        self._asked += len(sizes)
        self._there += sum(size is not None for size in sizes)
        if question.epoch != self._epoch:
            return
        for shard, size in zip(one.shards, sizes, strict=True):
            if size is None:
                self._knowledge.unlearn(ObjectId(*one.chunk, shard))
            else:
                self._knowledge.learn(ObjectId(*one.chunk, shard), size, self._now)
        if None in sizes:
            self._knowledge.miss(one.chunk, question.world, question.groups, self._now)


def _shards(world: int, groups: int) -> tuple[Shard, ...]:
    return tuple(Shard(world, rank, group) for group in range(groups) for rank in range(world))


def _wait_for(future: Future[None], seconds: float) -> None:
    if seconds > 0:
        wait([future], timeout=seconds)


def _batches(items: Sequence[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Items in order, with as much together as the limit allows and at least one item."""
    together: list[T] = []
    size = 0
    for item in items:
        if together and size + size_of(item) > limit:
            yield together
            together, size = [], 0
        together.append(item)
        size += size_of(item)
    if together:
        yield together
