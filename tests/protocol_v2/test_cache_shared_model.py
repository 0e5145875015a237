"""The cache over memory, disk and a store that servers share, against the model of `test_cache_model`.

The shared store may be away, evict, hold damaged objects and those of other servers, and its threads run whenever they
like. On top of what holds without it: no wrong value comes from there, nothing acknowledged is lost by it, lookups hit
exactly what is here or known to be there, what is known was there, and at the end nothing waits.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from obstore.store import MemoryStore

from protocol_v2.cache import CacheBusyError
from protocol_v2.places.outbox import Outbox
from protocol_v2.places.questions import Questions
from protocol_v2.places.remote import RemoteLimits, RemotePlace
from protocol_v2.storage import ObjectId, StoredObject
from protocol_v2.storage.envelope import decode_header, encode_header
from protocol_v2.tiers import TierIOError, remote
from protocol_v2.tiers.object_store import ObjectStore
from tests.protocol_v2.shared_stores import FaultyStore, LaterExecutor, remote_tier
from tests.protocol_v2.storage_samples import make_object, payload_of
from tests.protocol_v2.test_cache_model import (
    CHAINS,
    ROOTS,
    SHARDS,
    SIZE,
    Model,
    Pending,
    assert_noticed,
    open_unverified,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol_v2.cache import ChunkCache

EVERY_OBJECT = [
    ObjectId(root, key, shard) for root in ROOTS for key in dict.fromkeys(itertools.chain(*CHAINS)) for shard in SHARDS
]
LIMITS = RemoteLimits(
    wait_seconds=0.0, trust_seconds=20.0, doubt_seconds=2.0, queue_bytes=4 * (SIZE + 1024), max_asked=5
)


class SharedModel(Model):
    """Drives one cache on one folder and one shared store; see the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = MemoryStore()
        self.threads = LaterExecutor()
        self.link = FaultyStore(self.bucket)
        self.gone: set[ObjectId] = set()

    def open(self, **options: Any) -> ChunkCache:
        """A cache on the folder and the store."""
        self.threads = LaterExecutor()
        self.link.close()
        self.link = FaultyStore(self.bucket)
        return super().open(
            remote=remote_tier(self.link, lambda: self.now),
            remote_limits=LIMITS,
            remote_executor=self.threads,
            **options,
        )

    @property
    def remote(self) -> RemotePlace:
        """The loop's half of the shared store."""
        place = self.cache._remote
        assert place is not None
        return place

    def known(self) -> set[ObjectId]:
        """What is believed to be in the shared store."""
        self.remote.collect(self.now)
        if self.remote._breaker.is_open:
            return set()
        knowledge = self.remote._knowledge
        chunks = list(knowledge._known)
        return {ObjectId(*chunk, shard) for chunk in chunks for shard in knowledge.shards(chunk, self.now)}

    def shared(self) -> list[ObjectId]:
        """What is in the shared store."""
        names = set(self.link.paths())
        return [one for one in EVERY_OBJECT if str(one.name) in names]

    @rule(root=st.sampled_from(ROOTS), which=st.integers(0, 2), length=st.integers(1, 4), at_once=st.booleans())
    def ask(self, root: bytes, which: int, length: int, at_once: bool) -> None:
        """What is there is asked, as before a lookup."""
        task = self.cache.ask(root, CHAINS[which][:length], world=2, now=self.now)
        if at_once:
            self.threads.run()
        if not task.ready:
            self.plan(Pending(task, "ask"), at_once=at_once)

    @rule(root=st.sampled_from(ROOTS), which=st.integers(0, 2), rank=st.integers(0, 1))
    def read_all(self, root: bytes, which: int, rank: int) -> None:
        """A client of this server asks, looks up and retrieves a whole prompt, and lets go of it."""
        self.ask(root, which, 4, at_once=True)
        before = set(self.leases)
        self.lookup(root, which, 4, 10.0)
        for lease in set(self.leases) - before:
            wanted = tuple(ObjectId(root, key, SHARDS[rank]) for key in CHAINS[which][: self.leases[lease][2]])
            with contextlib.suppress(CacheBusyError):
                task = self.cache.retrieve(lease, 0, len(wanted), SHARDS[rank], now=self.now)
                self.plan(Pending(task, "retrieve", wanted), at_once=True)
            self.cache.release(lease, now=self.now)
            del self.leases[lease]
        self.unprotect()

    @rule(root=st.sampled_from(ROOTS), which=st.integers(0, 2), first=st.integers(0, 3))
    def other_server_stores(self, root: bytes, which: int, first: int) -> None:
        """Both ranks of the rest of a prompt come from elsewhere."""
        for place in range(first, 4):
            for shard in SHARDS:
                obj = make_object(CHAINS[which], place, shard=shard, root=root, size=SIZE)
                self.submitted.add(obj.id)
                self.link.spoil(obj.id, encode_header(obj) + bytes(obj.buffers[0]))

    @rule(away=st.booleans())
    def store_goes_or_comes(self, away: bool) -> None:
        """Nothing answers, or everything again."""
        self.link.fault = TierIOError("away") if away else None

    @precondition(lambda self: self.shared())
    @rule(data=st.data())
    def store_evicts(self, data: st.DataObject) -> None:
        """The shared store lets something go."""
        one = data.draw(st.sampled_from(self.shared()))
        self.link.evict(one)
        self.gone.add(one)

    @precondition(lambda self: self.shared())
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """A bit flips in the shared store."""
        one = data.draw(st.sampled_from(self.shared()))
        content = bytearray(self.link.content(one) or b"?")
        content[-1 - data.draw(st.integers(0, SIZE - 1))] ^= 1 << data.draw(st.integers(0, 7))
        self.link.spoil(one, bytes(content))
        self.spoiled.add(one)

    @precondition(lambda self: self.threads.waiting)
    @rule(data=st.data())
    def thread(self, data: st.DataObject) -> None:
        """Some thread of the shared store gets its turn."""
        self.threads.run(data.draw(st.integers(0, len(self.threads.waiting) - 1)))

    @invariant()
    def believes_what_was_true(self) -> None:
        """What is known was there; nothing is anywhere that nobody stored."""
        assert self.known() <= {*self.shared()} | self.gone | self.spoiled
        assert self.in_memory() | self.on_disk() | self.known() <= self.submitted

    def teardown(self) -> None:
        """When the store answers again nothing waits, and what is there is right; and what holds without it."""
        try:
            self.link.fault = None
            self.drain()
            for _ in range(3):  # a probe that closes the breaker, and what waited for that
                self.threads.run()
                self.now += 1000.0
                for one in self.cache.maintain(self.now):
                    one.run()
                    one.finish(self.now)
            status = self.remote.status()
            assert (True, 0, 0) == (status.up, status.queued, status.queued_bytes)
            assert (0, 0) == (self.remote._questions.under_way, self.remote._outbox._senders)
            for sent in {*self.shared()} - self.spoiled:
                content = self.link.content(sent)
                assert content is not None
                assert content.endswith(payload_of(sent.key, sent.shard, SIZE))
        finally:
            super().teardown()
            self.link.close()


TestSharedModel = SharedModel.TestCase
TestSharedModel.settings = settings(max_examples=100, stateful_step_count=60, report_multiple_bugs=False)


def trust_the_shared_store(patched: pytest.MonkeyPatch) -> None:
    """What comes from the shared store is not verified."""

    def open_object(value: bytes | memoryview, _wanted: ObjectId) -> StoredObject:
        header = decode_header(value)
        return open_unverified(header, memoryview(value)[header.size :])

    patched.setattr(remote, "open_object", open_object)


def believe_absence_to_be_presence(patched: pytest.MonkeyPatch) -> None:
    """What is not there is learnt as if it were."""
    real = Questions._learn

    def learn(self: Questions, question: Any, one: Any, sizes: Any, now: float) -> None:
        real(self, question, one, [size or 64 for size in sizes], now)

    patched.setattr(Questions, "_learn", learn)


def forget_to_leave_the_queue(patched: pytest.MonkeyPatch) -> None:
    """What was sent still counts as waiting."""
    patched.setattr(Outbox, "_leave", lambda _self, _entry: None)


def mix_up_names(patched: pytest.MonkeyPatch) -> None:
    """Every rank is written under the first one's name."""
    real = ObjectStore.write

    def write(self: ObjectStore, name: str, parts: Any, *, once: bool = False) -> None:
        real(self, name.replace("r1", "r0"), parts, once=once)

    patched.setattr(ObjectStore, "write", write)


@pytest.mark.parametrize(
    "sabotage",
    [
        trust_the_shared_store,
        believe_absence_to_be_presence,
        forget_to_leave_the_queue,
        mix_up_names,
    ],
    ids=lambda sabotage: sabotage.__name__,
)
def test_the_model_notices(sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a cache with this fault does not pass."""
    sabotage(monkeypatch)
    assert_noticed(SharedModel)
