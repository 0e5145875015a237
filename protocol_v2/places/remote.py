"""`RemotePlace`: the loop's half of a tier that many servers share.

Theory of operation
-------------------
A lookup uses what is known of the store (`knowledge`) and never waits here. Before it, `ask` finds out what the lookup
would miss (`questions`). What is stored here is sent on behind the acknowledgement (`outbox`).

A `Breaker` stands before everything. While it is open nothing is asked, known, read or sent, so a dead store costs a
few calls and then nothing; a probe in the background notices that it is back. What was known is forgotten when it
opens: a store that comes back may be empty.

Threads touch the tier, the breaker, and lists that the loop empties at its next call (`collect`).
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from protocol_v2.outcomes import RemoteStatus
from protocol_v2.places.base import Forgotten, Read
from protocol_v2.places.knowledge import Knowledge
from protocol_v2.places.outbox import Outbox
from protocol_v2.places.portions import portions
from protocol_v2.places.questions import Questions, shards_of
from protocol_v2.storage.errors import ObjectMissError
from protocol_v2.storage.objects import OBJECT_OVERHEAD
from protocol_v2.tiers.base import TierError
from protocol_v2.tiers.breaker import Breaker
from protocol_v2.work import Done, Ran, Task, blocking

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from keying import KeySpace
    from protocol_v2.places.presence import Presence
    from protocol_v2.storage.names import ChunkId, ObjectId
    from protocol_v2.storage.objects import StoredObject
    from protocol_v2.tiers.remote import RemoteTier

log = logging.getLogger(__name__)


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


class _Got(NamedTuple):
    """Objects were read."""

    objects: int
    size: int


class _Failed(NamedTuple):
    """A probe was not answered."""

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
        self._breaker = Breaker(tier.clock)
        self._knowledge = Knowledge(limits.trust_seconds, limits.doubt_seconds, limits.max_known)
        self._outbox = Outbox(
            tier, self._breaker, self._executor, tier.clock, limit=limits.queue_bytes, senders=limits.senders
        )
        self._questions = Questions(
            tier,
            self._breaker,
            self._executor,
            presence,
            self._knowledge,
            wait_seconds=limits.wait_seconds,
            max_asked=limits.max_asked,
            limit=limits.max_questions,
        )
        self._news: deque[_Got | _Failed] = deque()
        self._trips = 0
        self._away = False
        self._now = 0.0
        self._next_probe = 0.0
        self._last_error: str | None = None
        self._read = self._read_bytes = 0
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
        shards = shards_of(world, groups)
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
        return self._questions.ask(root, keys, world, groups, now).after(lambda _ran, now: self.collect(now))

    def knows(self, chunk: ChunkId) -> bool:
        """Whether some shard of a chunk is known to be there."""
        return not self._breaker.is_open and bool(self._knowledge.shards(chunk, self._now))

    # ---- what is read

    def plan_read(self, wanted: ObjectId) -> Read | None:
        """A read of an object, if it is known to be there."""
        if self._breaker.is_open:
            return None
        size = self._knowledge.shards(wanted.chunk, self._now).get(wanted.shard)
        return Read(self, wanted, turn=self._questions.epoch, charge=size) if size is not None else None

    def fetch(self, reads: Sequence[Read]) -> None:
        """Read in order, in calls of bounded size, up to the first that is not there. Blocks; in any thread."""
        for together in portions(reads, lambda read: read.charge, self._limits.read_bytes):
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
        return read.turn == self._questions.epoch

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
            match self._news.popleft():
                case _Got(objects, size):
                    self._read += objects
                    self._read_bytes += size
                case _Failed(failure):
                    self.note_failure(failure)
        for failure in self._questions.collect(now):
            self.note_failure(failure)
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
        self._questions.epoch += 1
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
        asked, sent = self._questions.counters, self._outbox.counters
        return RemoteStatus(
            kind=self._tier.kind,
            address=self._tier.address,
            up=not self._breaker.is_open,
            trips=self._breaker.trips,
            failed=self.failed,
            last_error=self._last_error,
            known=len(self._knowledge),
            asked=asked.asked,
            there=asked.there,
            late=asked.late,
            skipped=asked.skipped,
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

    def _probe(self) -> None:
        try:
            self._tier.ping()
        except TierError as error:
            self._breaker.failed()
            self._news.append(_Failed(error))
        else:
            self._breaker.succeeded()
