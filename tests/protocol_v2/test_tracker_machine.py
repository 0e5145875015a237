"""`RequestTracker` against a model of an engine and a cache, over every path that hypothesis finds.

The engine of this test knows for each position whether its KV is right; computing on wrong KV gives wrong KV. The cache
of this test knows its leases and sessions. Neither looks into the tracker.
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keying import CacheSalt, KeySpace, MultimodalItem, chunk_keys
from protocol_v2.connectors.tracker import EndSession, LoadPlan, Release, RequestTracker, SavePlan

CHUNK = 3
SPACE = KeySpace("m", chunk_size=CHUNK, kv_dtype="float32")


class FakeCache:
    """Chunks that are there, leases by chunk, sessions by identity."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bool] = {}
        self.leases: dict[bytes, tuple[str, set[int]]] = {}
        self.sessions: dict[str, list[bytes]] = {}
        self._ids = itertools.count(1)

    def lookup(self, session: str, digests: list[bytes]) -> tuple[int, bytes | None]:
        """Leading chunks and a lease on them; a session that stands for other keys is a fault of the tracker."""
        bound = self.sessions.setdefault(session, [])
        for old, key in zip(bound, digests, strict=False):
            assert old == key, "a session stands for two identities"
        bound[: len(digests)] = digests
        hit = len(list(itertools.takewhile(self.stored.__contains__, digests)))
        if not hit:
            return 0, None
        lease = next(self._ids).to_bytes(16, "big")
        self.leases[lease] = (session, set(range(hit)))
        return hit, lease

    def carry_out(self, tracker: RequestTracker) -> None:
        """What the tracker put aside."""
        for call in tracker.take_calls():
            match call:
                case Release():
                    if call.lease in self.leases:
                        held = self.leases[call.lease][1]
                        held -= {one for one in held if one >= call.first and _before(one, call)}
                        if not held:
                            del self.leases[call.lease]
                case EndSession():
                    self.sessions.pop(call.session, None)
                    self.leases = {k: v for k, v in self.leases.items() if v[0] != call.session}


def _before(chunk: int, call: Release) -> bool:
    return call.count is None or chunk < call.first + call.count


class TrackerMachine(RuleBasedStateMachine):
    """One request after the other against one cache."""

    hold = False

    def __init__(self) -> None:
        super().__init__()
        self.cache = FakeCache()
        self.now = 0.0
        self.n_requests = 0
        self.tracker: RequestTracker | None = None
        self.saved: list[int] = []

    # ---- the request

    @initialize()
    def first(self) -> None:
        """There is a request, and the cache holds a part of it."""
        self._admit(10, held=2, salted=False)

    @precondition(lambda self: self.tracker is None)
    @rule(n_tokens=st.integers(1, 16), held=st.integers(0, 4), salted=st.booleans())
    def admit(self, n_tokens: int, held: int, salted: bool) -> None:
        """The next request, of which another engine stored some chunks already."""
        self._admit(n_tokens, held=held, salted=salted)

    def _admit(self, n_tokens: int, *, held: int, salted: bool) -> None:
        self.n_requests += 1
        self.extra: list[Any] = [CacheSalt("s")] if salted else []
        self.tokens = list(range(n_tokens))
        for key in chunk_keys(SPACE, self.tokens, self.extra)[:held]:
            self.cache.stored[key.digest] = True
        self.tracker = RequestTracker(SPACE, self.extra, name=f"r{self.n_requests}")
        self.tracker.extend(self.tokens)
        self.kv: list[bool] = []
        self.load: LoadPlan | None = None
        self.load_fails = False
        self.doubtful: list[SavePlan] = []
        self.failed_once = False
        self.given_up = False
        self.saved = []

    def _live(self) -> RequestTracker:
        assert self.tracker is not None
        return self.tracker

    @precondition(lambda self: self.tracker is not None and not self.given_up)
    @rule(n_tokens=st.integers(1, 4))
    def decode(self, n_tokens: int) -> None:
        """The engine tells tokens that it sampled."""
        more = list(range(len(self.tokens), len(self.tokens) + n_tokens))
        self.tokens += more
        self._live().extend(more)

    @precondition(lambda self: self.tracker is not None and not self.given_up and self.load is None)
    @rule(drop=st.integers(0, 2), media=st.booleans())
    def stream(self, drop: int, media: bool) -> None:
        """A streaming session drops sampled tokens, appends media and goes on."""
        tracker = self._live()
        keep = max(1, len(self.tokens) - drop)
        tracker.truncate(keep)
        del self.tokens[keep:]
        del self.kv[keep:]
        self.saved = [one for one in self.saved if one < keep // CHUNK]
        if media:
            item = MultimodalItem(f"item-{len(self.extra)}", len(self.tokens), 2)
            if item not in self.extra:
                self.extra.append(item)
            tracker.add(item)
        self.tokens += [1000 + len(self.tokens)]
        tracker.extend(self.tokens[-1:])

    # ---- the cache

    @precondition(lambda self: self.tracker is not None)
    @rule(seconds=st.sampled_from([0.0, 0.5, 40.0]))
    def lookup(self, seconds: float) -> None:
        """The engine asks what could be loaded."""
        tracker = self._live()
        self.now += seconds
        plan = tracker.plan_lookup(self.now)
        if plan is not None:
            assert not self.given_up
            assert chunk_keys(SPACE, self.tokens, self.extra) == list(plan.keys)
            hit, lease = self.cache.lookup(plan.session, [key.digest for key in plan.keys])
            tracker.found(hit, lease, 60.0 if hit else 0.0, self.now)

    @precondition(lambda self: self.tracker is not None)
    @rule()
    def lookup_without_answer(self) -> None:
        """The server heard the question, and its answer was lost."""
        tracker = self._live()
        plan = tracker.plan_lookup(self.now)
        if plan is not None:
            self.cache.lookup(plan.session, [key.digest for key in plan.keys])
            tracker.found(0, None, 0.0, self.now)

    @precondition(lambda self: self.tracker is not None and self.load is None)
    @rule(
        local=st.sampled_from([0, 0, 0, 2, 3, 5]),
        fails=st.booleans(),
        take=st.sampled_from([True, True, False]),
        cut=st.integers(0, 4),
    )
    def allocate(self, local: int, fails: bool, take: bool, cut: int = 0) -> None:
        """The engine, which starts from nothing or its own cache, makes room for the hit, or declines it."""
        if self.kv:
            return
        self.lookup(0.0)
        tracker = self._live()
        local = min(local, len(self.tokens) - 1)
        n_tokens = tracker.loadable(local)
        assert local + n_tokens < len(self.tokens), "no token left to compute"
        self.kv = [True] * local
        if not n_tokens or not take:
            tracker.decline()
            tracker.compute(local)
            return
        assert not self.failed_once, "a second load after a failed one"
        n_tokens = max(1, n_tokens - cut)
        self.load = tracker.begin_load(local, n_tokens)
        self.load_fails = fails
        assert (local, local + n_tokens) == (self.load.start_token, self.load.stop_token)
        self.kv += [not fails] * n_tokens

    @rule(
        n_tokens=st.integers(4, 16),
        held=st.integers(1, 4),
        local=st.sampled_from([0, 0, 2, 3, 5]),
        fails=st.booleans(),
        cut=st.sampled_from([0, 0, 4]),
        before=st.integers(0, 9),
        after=st.integers(0, 9),
    )
    def serve(self, n_tokens: int, held: int, local: int, fails: bool, cut: int, before: int, after: int) -> None:
        """A whole life that reaches a load: steps while its outcome is open, and after it, then whatever comes."""
        if self.tracker is not None:
            self.end(0)
        self._admit(n_tokens, held=held, salted=False)
        self.allocate(local, fails, take=True, cut=cut)
        self.carried_out()
        if before:
            self.step(before, 0)
        if self.load is not None and after:
            self.outcome()
            self.allocate(0, fails, take=True)
            self.step(after, 0)

    @precondition(lambda self: self.load is not None)
    @rule()
    def outcome(self) -> None:
        """Whether the load was whole comes out."""
        assert self.load is not None
        tracker = self._live()
        loaded = set(range(self.load.first, self.load.stop))
        assert loaded == self.cache.leases[self.load.lease][1], "leases something else than it loads"
        tracker.load_ended(self.load.name, failed=self.load_fails)
        for plan in self.doubtful:
            if not self.load_fails:
                self._store(plan)
        if self.load_fails:
            self.failed_once = True
            del self.kv[self.load.start_token :]
        self.doubtful, self.load = [], None

    # ---- compute and save

    @precondition(lambda self: self.tracker is not None)
    @rule(n_tokens=st.integers(1, 5), ahead=st.integers(0, 1))
    def step(self, n_tokens: int, ahead: int) -> None:
        """A step: tokens are computed, on whatever KV there is before them, and what is whole is handed out."""
        tracker = self._live()
        right = all(self.kv)
        n_tokens = min(n_tokens, len(self.tokens) - len(self.kv))
        if n_tokens <= 0:
            return
        self.kv += [right] * n_tokens
        tracker.compute(len(self.kv) + (ahead if len(self.kv) == len(self.tokens) else 0))
        self._save(tracker)
        whole = min(len(self.kv), len(self.tokens)) // CHUNK
        if self.load is None and not self.given_up:
            keys = chunk_keys(SPACE, self.tokens, self.extra)[:whole]
            assert all(key.digest in self.cache.stored for key in keys), "a chunk was never handed out"

    def _save(self, tracker: RequestTracker) -> None:
        plan = tracker.take_save(hold=self.hold)
        if plan is None:
            return
        assert not self.given_up
        assert plan.after_load is None or not self.hold
        assert plan.stop * CHUNK <= len(self.kv), "saves what is not computed"
        assert chunk_keys(SPACE, self.tokens[: plan.stop * CHUNK], self.extra) == list(plan.keys)
        if plan.after_load is None:
            self._store(plan)
        else:
            assert self.load is not None
            assert self.load.name == plan.after_load
            self.doubtful.append(plan)

    def _store(self, plan: SavePlan) -> None:
        for chunk in range(plan.first, plan.stop):
            assert all(self.kv[: (chunk + 1) * CHUNK]), "stores what rests on a failed load"
            assert chunk not in self.saved, "stores a chunk twice"
            self.saved.append(chunk)
            self.cache.stored[plan.keys[chunk].digest] = True

    # ---- ends

    @precondition(lambda self: self.tracker is not None)
    @rule()
    def preempt(self) -> None:
        """The engine drops the KV."""
        self._live().preempt()
        if self.load is not None and not self.load_fails:
            for plan in self.doubtful:
                self._store(plan)
        self.kv, self.doubtful, self.load = [], [], None
        self.saved = []  # handed out in doubt, so due again: twice is allowed across a preemption

    @precondition(lambda self: self.tracker is not None)
    @rule(really=st.integers(0, 9))
    def give_up(self, really: int) -> None:
        """The request turns out to have no keys, which is rare."""
        if really:
            return
        self._live().give_up("missing_identity")
        self.given_up, self.doubtful, self.load = True, [], None

    @precondition(lambda self: self.tracker is not None)
    @rule(really=st.integers(0, 3))
    def end(self, really: int) -> None:
        """Finished or aborted, whatever it is doing."""
        if really:
            return
        tracker = self._live()
        tracker.end()
        self.cache.carry_out(tracker)
        assert {} == self.cache.leases
        assert {} == self.cache.sessions
        self.tracker = None
        self.load = None

    @invariant()
    def carried_out(self) -> None:
        """What is put aside is carried out; given up means that nothing is left."""
        if self.tracker is None:
            return
        self.cache.carry_out(self.tracker)
        if self.given_up:
            assert ({}, {}) == (self.cache.leases, self.cache.sessions)


class HoldingTrackerMachine(TrackerMachine):
    """The same where saves wait for the outcome of a load."""

    hold = True


TestTracker = TrackerMachine.TestCase
TestTracker.settings = settings(max_examples=200, stateful_step_count=30)
TestHoldingTracker = HoldingTrackerMachine.TestCase
TestHoldingTracker.settings = settings(max_examples=200, stateful_step_count=30)
