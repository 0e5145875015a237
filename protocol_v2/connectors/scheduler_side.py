"""`SchedulerSide`: the trackers of all requests of an engine, and the cache calls of its scheduler.

Engine-neutral: an engine's connector tells it what the engine does with a request, by id. What has no keys is bypassed
and counted by reason; what the cache does not answer in time is a miss. Nothing here raises for a server that is dead,
slow or of another mind: the engine goes on as if there were no cache.

Lookups wait for their answer, at most `lookup_timeout`. Leases and sessions are given back by a thread of their own, in
order, so that the engine's loop never waits for them; what does not fit its queue is left to the server, which ends
leases by their time and sessions when they are idle.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from keying import KeyingError
from protocol_v2.connectors.tracker import EndSession, Phase, Release, RequestTracker, reason_of
from protocol_v2.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from keying import KeySpace
    from keying.engines import EngineInputs
    from protocol_v2.connectors.tracker import Call, LoadPlan, SavePlan
    from protocol_v2.operations import KeysLike
    from protocol_v2.results import EndSessionResult, LookupResult, ReleaseResult

log = logging.getLogger(__name__)

MAX_CALLS: Final = 16_384
"""Releases and ends that wait; a scheduler that is ahead of the server by more leaves them to the server's clock."""

CALL_TIMEOUT: Final = 2.0
"""Seconds for a release or an end."""

_REQUESTS: Final = itertools.count(1)
"""Numbers for names of requests: session ids begin with them, and no two requests of a process share one."""

REFUSED: Final = "refused_by_cache"
"""Reason of a request whose identity the server did not accept: a fault, never silent."""


class SchedulerClient(Protocol):
    """What is used of a `protocol_v2.client.CacheClient`."""

    def lookup(self, session: str, keys: KeysLike, *, world: int, groups: int, timeout: float | None) -> LookupResult:
        """Leading chunks that are there, and a lease on them."""

    def release(self, lease: bytes, *, first: int, count: int | None, timeout: float | None) -> ReleaseResult:
        """Give back a part of a lease."""

    def end_session(self, session: str, *, timeout: float | None) -> EndSessionResult:
        """End a session and its leases."""


@dataclass(slots=True)
class SchedulerCounters:
    """What has happened so far.

    Attributes:
        requests: admitted, bypassed ones included.
        bypassed: requests without keys, by reason.
        lookups: answered by the cache.
        lookup_failures: without an answer.
        queried_tokens: of lookups, beyond what the engine had.
        hit_tokens: of those, offered to the engine.
        loads: begun.
        load_failures: that did not deliver everything.
        saved_chunks: handed out for saving.
        calls_dropped: releases and ends left to the server's clock.
        distrusted: requests that were not saved since they rest on an engine cache that may be stale.
    """

    requests: int = 0
    bypassed: Counter[str] = field(default_factory=Counter)
    lookups: int = 0
    lookup_failures: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    loads: int = 0
    load_failures: int = 0
    saved_chunks: int = 0
    calls_dropped: int = 0
    distrusted: int = 0

    def facts(self) -> dict[str, int]:
        """By name; bypasses as ``bypassed.<reason>``."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "bypassed"}
        return plain | {f"bypassed.{reason}": count for reason, count in sorted(self.bypassed.items())}


class SchedulerSide:
    """See the head of the module. Belongs to the engine's scheduler thread.

    Args:
        client: of the cache.
        space: of all keys.
        world: shards that a chunk's value has in each KV group.
        groups: KV groups.
        parts: workers that report each load to this scheduler; None: all of `world`. Engines with a scheduler in each
            worker report to each their own.
        align: tokens that the engine keeps together in a block: a chunk that ends inside one is saved when it is full.
        hold: hand out no save while its request's load is in doubt. Needed where several workers load parts of one
            value and one cannot know that another failed.
        lookup_timeout: seconds that the scheduler waits for a lookup.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        client: SchedulerClient,
        space: KeySpace,
        *,
        world: int = 1,
        groups: int = 1,
        parts: int | None = None,
        align: int = 1,
        hold: bool = False,
        lookup_timeout: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space = space
        self.counters = SchedulerCounters()
        self.loading = True
        """Whether hits are offered to the engine; `stop_loading` ends it."""
        self.missed: Callable[[bytes], None] = lambda _key: None
        """Told the key of the first chunk of each lookup that the cache does not have."""
        self._client = client
        self._world, self._groups = world, groups
        self._parts = world if parts is None else parts
        self._align = align
        self._hold = hold
        self._lookup_timeout = lookup_timeout
        self._clock = clock
        self._trackers: dict[str, RequestTracker] = {}
        self._loads: dict[str, tuple[str, int, bool]] = {}  # name -> request, parts heard of, one failed
        self._calls = CallThread(client)

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._trackers)

    # ---- a request's life

    def admit(self, request_id: str, derive: Callable[[], EngineInputs]) -> RequestTracker | None:
        """A request that the engine took; one that is known is left as it is.

        Args:
            request_id: the engine's.
            derive: gives its key inputs.

        Returns:
            Its tracker, or None where it is bypassed.
        """
        known = self._trackers.get(request_id)
        if known is None:
            self.counters.requests += 1
            known = self._trackers[request_id] = self._made(derive)
        return known if known.phase is Phase.LIVE else None

    def tracker(self, request_id: str) -> RequestTracker | None:
        """The tracker of a request, or None where it is bypassed or not known."""
        known = self._trackers.get(request_id)
        return known if known is not None and known.phase is Phase.LIVE else None

    def change(self, request_id: str, how: Callable[[RequestTracker], None]) -> RequestTracker | None:
        """Tell a request's tracker of tokens or extra keys; a refusal of keys turns the request into a bypass.

        Returns:
            The tracker, or None where the request is bypassed or not known.
        """
        tracker = self.tracker(request_id)
        if tracker is None:
            return None
        try:
            how(tracker)
        except KeyingError as error:
            self.bypass(request_id, reason_of(error))
            return None
        self._carry_out(tracker)
        return tracker

    def bypass(self, request_id: str, reason: str) -> None:
        """The request goes on without the cache."""
        tracker = self.tracker(request_id)
        if tracker is not None:
            tracker.give_up(reason)
            self._count_bypass(reason)
            self._carry_out(tracker)

    def preempt(self, request_id: str) -> None:
        """The engine dropped a request's KV and will start it again."""
        tracker = self.tracker(request_id)
        if tracker is not None:
            tracker.preempt()
            self._carry_out(tracker)

    def end(self, request_id: str) -> None:
        """The engine's request is over, for whatever reason, in whatever state. Idempotent."""
        tracker = self._trackers.pop(request_id, None)
        if tracker is not None:
            tracker.end()
            self._carry_out(tracker)

    # ---- lookup and load

    def lookup(self, request_id: str, computed: int) -> int:
        """Tokens beyond the engine's own that can be loaded; 0 where there is no cache, no hit or no key.

        Args:
            request_id: the engine's.
            computed: leading tokens that the engine has.
        """
        tracker = self.tracker(request_id)
        if tracker is None or not self.loading:
            return 0
        plan = tracker.plan_lookup(self._clock())
        if plan is not None:
            try:
                answer = self._client.lookup(
                    plan.session, plan.keys, world=self._world, groups=self._groups, timeout=self._lookup_timeout
                )
                tracker.found(answer.hit_chunks, answer.lease, answer.lease_seconds, self._clock())
            except ProtocolError as error:
                # refused identity, a closed client, a hit that cannot be one: never an engine's fault
                log.warning("a lookup was refused: %s", error)
                self.bypass(request_id, REFUSED)
                return 0
            self.counters.queried_tokens += max(0, tracker.n_tokens - computed)
            self.counters.hit_tokens += tracker.loadable(computed)
            if answer.failure is None:
                self.counters.lookups += 1
                if answer.hit_chunks < len(plan.keys):
                    self.missed(plan.keys[answer.hit_chunks].digest)
            else:
                self.counters.lookup_failures += 1
            self._carry_out(tracker)
        return tracker.loadable(computed)

    def allocated(self, request_id: str, computed: int, n_tokens: int) -> LoadPlan | None:
        """The engine made room for a request, and for tokens to load.

        Args:
            request_id: the engine's.
            computed: leading tokens that the engine has.
            n_tokens: tokens to load after them; 0 where the engine has no use for the hit.

        Returns:
            What to load, or None for nothing.
        """
        tracker = self.tracker(request_id)
        if tracker is None:
            return None
        plan = None
        if n_tokens:
            plan = tracker.begin_load(computed, n_tokens)
            self._loads[plan.name] = (request_id, 0, False)
            self.counters.loads += 1
        elif tracker.load is None:
            tracker.decline()
        self._carry_out(tracker)
        return plan

    def part_loaded(self, name: str, *, parts: int = 1, failed: bool) -> bool:
        """One of the workers that take part in a load is done with it.

        Args:
            name: of the load.
            parts: how many workers this is told of.
            failed: one of them did not get everything.

        Returns:
            Whether the load failed and this was the last part of it.
        """
        known = self._loads.get(name)
        if known is None:
            return False
        request_id, heard, any_failed = known
        heard, any_failed = heard + parts, any_failed or failed
        if heard < self._parts:
            self._loads[name] = (request_id, heard, any_failed)
            return False
        del self._loads[name]
        self.counters.load_failures += any_failed
        tracker = self.tracker(request_id)
        if tracker is not None:
            tracker.load_ended(name, failed=any_failed)
            self._carry_out(tracker)
        return any_failed

    def stop_loading(self, why: str) -> None:
        """What is in the cache does not fit this engine: no more hits are offered. Saving goes on."""
        if self.loading:
            log.error("no more KV is loaded: %s", why)
        self.loading = False

    # ---- save

    def take_save(self, request_id: str) -> SavePlan | None:
        """Chunks of a request that became whole and computed, each once."""
        tracker = self.tracker(request_id)
        plan = None if tracker is None else tracker.take_save(hold=self._hold, align=self._align)
        if plan is not None:
            self.counters.saved_chunks += plan.stop - plan.first
        return plan

    # ---- ends

    def forget(self, reason: str, timeout: float = CALL_TIMEOUT) -> None:
        """All requests go on without the cache, and give back what they have of it.

        Args:
            reason: a word for counters.
            timeout: seconds to wait until that is done.
        """
        for request_id in self._trackers:
            self.bypass(request_id, reason)
        self._calls.flush(timeout)

    def close(self, timeout: float = 2.0) -> None:
        """End all requests, and give the rest of the calls `timeout` seconds. Idempotent."""
        for request_id in list(self._trackers):
            self.end(request_id)
        self._calls.close(timeout)

    # ---- inside

    def _made(self, derive: Callable[[], EngineInputs]) -> RequestTracker:
        name = f"r{next(_REQUESTS)}"
        try:
            inputs = derive()
            tracker = RequestTracker(self.space, inputs.extra_keys, name=name)
            tracker.extend(inputs.tokens)
        except KeyingError as error:
            tracker = RequestTracker(self.space, name=name)
            reason = reason_of(error)
            tracker.give_up(reason)
            self._count_bypass(reason)
        return tracker

    def _count_bypass(self, reason: str) -> None:
        self.counters.bypassed[reason] += 1
        if self.counters.bypassed[reason] == 1:
            log.warning("a request is served without the cache: %s (logged once for each reason)", reason)

    def _carry_out(self, tracker: RequestTracker) -> None:
        for call in tracker.take_calls():
            if not self._calls.put(call):
                self.counters.calls_dropped += 1


class CallThread:
    """Carries out releases and ends, in order, in a thread of its own, which starts with the first."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client
        self._queue: queue.Queue[Call | threading.Event | None] = queue.Queue(MAX_CALLS)
        self._thread: threading.Thread | None = None

    def flush(self, timeout: float) -> bool:
        """Wait until what is queued is carried out, at most `timeout` seconds; whether it is."""
        if self._thread is None:
            return True
        done = threading.Event()
        return self.put(done) and done.wait(timeout)

    def put(self, call: Call | threading.Event) -> bool:
        """Queue a call, or an event to be set in its turn; False where there is no room."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="extra-keys-releases", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            return False
        return True

    def close(self, timeout: float) -> None:
        """Let what is queued be carried out, for at most `timeout` seconds."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                match call:
                    case Release():
                        self._client.release(call.lease, first=call.first, count=call.count, timeout=CALL_TIMEOUT)
                    case EndSession():
                        self._client.end_session(call.session, timeout=CALL_TIMEOUT)
                    case threading.Event():
                        call.set()
            except ProtocolError as error:  # the server's clock ends it
                log.debug("a release or an end was refused: %s", error)
