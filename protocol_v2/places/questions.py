"""`Questions`: what a shared store is asked before lookups, and what its answers teach.

A question is about the chunks that a lookup would miss. It goes out in portions, stops at the first chunk that is not
whole, and whoever wants the answer waits for it a bounded time. What comes later is there for the next lookup. Where
answers are late time and again nobody waits any more, until one comes in time: a slow store costs hits, not threads.

Threads ask the tier and report; the loop takes what they found at its next `collect`.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from protocol_v2.places.portions import portions
from protocol_v2.storage.names import ObjectId, Shard
from protocol_v2.tiers.base import TierError
from protocol_v2.work import Ran, Task, blocking, immediate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor, Future

    from protocol_v2.places.knowledge import Knowledge
    from protocol_v2.places.presence import Presence
    from protocol_v2.storage.names import ChunkId
    from protocol_v2.tiers.breaker import Breaker
    from protocol_v2.tiers.remote import RemoteTier

PATIENCE: Final = 4
"""Late answers in a row after which lookups ask without waiting."""


@dataclass(slots=True)
class QuestionCounters:
    """Counts since the start.

    Attributes:
        asked: objects that were asked about.
        there: of these, that were there.
        late: lookups and prefetches that did not wait for the answer any longer.
        skipped: those that did not ask though they would have: the store is away, or too many ask.
    """

    asked: int = 0
    there: int = 0
    late: int = 0
    skipped: int = 0


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
    """A question will get no more answers; why not, if the store failed."""

    error: TierError | None


class Questions:
    """Questions to a remote tier. Belongs to the loop, `collect` and all.

    Args:
        tier: is asked.
        breaker: told how calls end; while it is open nothing is asked.
        executor: for the threads.
        presence: what is in the nearer tiers, and not asked for.
        knowledge: learns the answers.
        wait_seconds: that somebody waits, at most.
        max_asked: objects of one question, at most.
        limit: questions under way, at most.

    Attributes:
        under_way: questions that will get more answers.
        epoch: what was asked before it was raised teaches nothing: something was cleared.
    """

    def __init__(
        self,
        tier: RemoteTier,
        breaker: Breaker,
        executor: Executor,
        presence: Presence,
        knowledge: Knowledge,
        *,
        wait_seconds: float,
        max_asked: int,
        limit: int,
    ) -> None:
        self._tier = tier
        self._breaker = breaker
        self._executor = executor
        self._presence = presence
        self._knowledge = knowledge
        self._wait_seconds = wait_seconds
        self._max_asked = max_asked
        self._limit = limit
        self._late_in_a_row = 0
        self._news: deque[_Answer | _Ended] = deque()
        self.under_way = 0
        self.epoch = 0
        self.counters = QuestionCounters()

    def ask(self, root: bytes, keys: Sequence[bytes], world: int, groups: int, now: float) -> Task[None]:
        """Ask what is there of chunks. The task waits for the answer, for a bounded time, and raises nothing.

        Args:
            root: of the space.
            keys: of the chunks, from the first that a lookup would miss on.
            world: shards of a value in each group.
            groups: KV groups.
            now: seconds, monotonic.
        """
        if not keys or self._knowledge.is_missing((root, keys[0]), world, groups, now):
            return immediate(None)
        if self._breaker.is_open or self.under_way >= self._limit:
            self.counters.skipped += 1
            return immediate(None)
        shards = shards_of(world, groups)
        most = max(1, self._max_asked // len(shards))
        chunks = [self._doubtful((root, key), shards) for key in keys[:most]]
        deadline = self._tier.clock() + self._wait_seconds
        self.under_way += 1
        future = self._executor.submit(self._put, _Question(world, groups, chunks, self.epoch, deadline))
        if self._late_in_a_row >= PATIENCE:
            self.counters.late += 1
            return immediate(None)

        def settle(_ran: Ran[None], _now: float) -> None:
            if not future.done():
                self.counters.late += 1
                self._late_in_a_row += 1

        return blocking(lambda: _wait_for(future, deadline - self._tier.clock()), settle)

    def collect(self, now: float) -> Iterator[TierError]:
        """Learn from the answers since the last call; gives what questions failed with."""
        while self._news:
            match self._news.popleft():
                case _Answer(question, chunks, in_time):
                    if in_time:
                        self._late_in_a_row = 0
                    for one, sizes in chunks:
                        self._learn(question, one, sizes, now)
                case _Ended(error):
                    self.under_way -= 1
                    if error is not None:
                        yield error

    def _doubtful(self, chunk: ChunkId, shards: Sequence[Shard]) -> _Doubtful:
        if self._presence.has(chunk):
            shards = [shard for shard in shards if not self._presence.where(chunk, shard)]
        return _Doubtful(chunk, shards)

    def _put(self, question: _Question) -> None:
        """In a thread."""
        failure: TierError | None = None
        try:
            for chunks in portions(question.chunks, lambda one: len(one.shards), self._tier.batch):
                answer, whole = self._answer(question, chunks)
                self._news.append(answer)
                if not whole:
                    break
        except TierError as error:
            self._breaker.note(error)
            failure = error
        finally:
            self._news.append(_Ended(failure))

    def _answer(self, question: _Question, chunks: Sequence[_Doubtful]) -> tuple[_Answer, bool]:
        """What is there of a portion, and whether all of it is."""
        sizes = iter(self._tier.sizes([ObjectId(*chunk, shard) for chunk, shards in chunks for shard in shards]))
        self._breaker.note(None)
        in_time = self._tier.clock() <= question.deadline
        answered: list[tuple[_Doubtful, Sequence[int | None]]] = []
        for one in chunks:
            found = [next(sizes) for _ in one.shards]
            answered.append((one, found))
            if None in found:
                return _Answer(question, answered, in_time), False
        return _Answer(question, answered, in_time), True

    def _learn(self, question: _Question, one: _Doubtful, sizes: Sequence[int | None], now: float) -> None:
        self.counters.asked += len(sizes)
        self.counters.there += sum(size is not None for size in sizes)
        if question.epoch != self.epoch:
            return
        for shard, size in zip(one.shards, sizes, strict=True):
            if size is None:
                self._knowledge.unlearn(ObjectId(*one.chunk, shard))
            else:
                self._knowledge.learn(ObjectId(*one.chunk, shard), size, now)
        if None in sizes:
            self._knowledge.miss(one.chunk, question.world, question.groups, now)


def shards_of(world: int, groups: int) -> tuple[Shard, ...]:
    """Every rank of every group."""
    return tuple(Shard(world, rank, group) for group in range(groups) for rank in range(world))


def _wait_for(future: Future[None], seconds: float) -> None:
    if seconds > 0:
        wait([future], timeout=seconds)
