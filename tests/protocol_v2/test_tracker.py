"""`RequestTracker`: one request from admission to end, case by case."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from keying import (
    CacheSalt,
    KeySpace,
    LateExtraKeyError,
    MultimodalItem,
    TokenError,
    UncacheableRequest,
    chunk_keys,
)
from protocol_v2.connectors.tracker import (
    LEASE_SHARE,
    MISS_SECONDS,
    EndSession,
    LoadPlan,
    Phase,
    Release,
    RequestTracker,
    reason_of,
)
from protocol_v2.errors import LocalProtocolError

SPACE = KeySpace("m", chunk_size=4, kv_dtype="float32")
LEASE = b"L" * 16


def tracked(n_tokens: int, *extra_keys: MultimodalItem | CacheSalt) -> RequestTracker:
    """A request with tokens 0, 1, 2, ..."""
    tracker = RequestTracker(SPACE, extra_keys, name="r1")
    tracker.extend(range(n_tokens))
    return tracker


def hit(tracker: RequestTracker, chunks: int, *, now: float = 0.0, seconds: float = 60.0) -> None:
    """A lookup and its answer."""
    assert tracker.plan_lookup(now) is not None
    tracker.found(chunks, LEASE if chunks else None, seconds if chunks else 0.0, now)


def test_lookup_load_and_save_take_their_keys_from_one_chain() -> None:
    """What is looked up, loaded and saved are the keys of a one-shot derivation, items and salt included."""
    extra = (MultimodalItem("i" * 64, 5, 6), CacheSalt("s"))
    tracker = tracked(18, *extra)
    expected = chunk_keys(SPACE, range(18), extra)
    plan = tracker.plan_lookup(0.0)
    assert plan is not None
    assert expected == list(plan.keys)
    tracker.found(2, LEASE, 60.0, 0.0)
    load = tracker.begin_load(0, 8)
    assert tracker.load_ended(load.name, failed=False)
    tracker.compute(18)
    save = tracker.take_save(hold=False)
    assert save is not None
    assert (expected, 2, 4, None) == (list(save.keys), save.first, save.stop, save.after_load)


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    """The last token is computed again even where every chunk is there; a tail is computed anyway."""
    full, tailed = tracked(12), tracked(14)
    hit(full, 3)
    hit(tailed, 3)
    assert (11, 12) == (full.loadable(0), tailed.loadable(0))


@pytest.mark.parametrize(("computed", "expected"), [(0, 8), (4, 4), (6, 2), (8, 0), (12, 0)])
def test_what_the_engine_has_is_not_loaded_and_the_count_is_never_negative(computed: int, expected: int) -> None:
    """Only tokens beyond the engine's own count, down to none."""
    tracker = tracked(14)
    hit(tracker, 2)
    assert expected == tracker.loadable(computed)


def test_a_load_names_its_tokens_and_gives_back_the_rest_of_the_lease_at_once() -> None:
    """Of five chunks the engine has one and takes two: the first, and the last two, are released at once."""
    tracker = tracked(22)
    hit(tracker, 5)
    load = tracker.begin_load(6, 6)
    assert LoadPlan("r1:1", LEASE, 1, 3, 6, 12, tracker.keys[:3]) == load
    assert load.count == 2
    assert [Release(LEASE, 0, 1), Release(LEASE, 3, None)] == tracker.take_calls()
    assert tracker.load_ended(load.name, failed=False)
    assert [Release(LEASE, 0, None)] == tracker.take_calls()
    assert not tracker.leased


def test_a_declined_hit_is_given_back() -> None:
    """An engine that was offered a hit and found no use for it leaves no lease behind."""
    tracker = tracked(12)
    hit(tracker, 2)
    tracker.decline()
    assert [Release(LEASE, 0, None)] == tracker.take_calls()
    tracker.decline()
    assert [] == tracker.take_calls()


def test_an_answer_stands_for_the_same_tokens_for_a_while() -> None:
    """Engines ask on every step for a request that waits: the cache is asked again only for more tokens or later."""
    tracker = tracked(12)
    hit(tracker, 2, seconds=60.0)
    assert tracker.plan_lookup(60.0 * LEASE_SHARE - 0.1) is None
    assert tracker.plan_lookup(60.0 * LEASE_SHARE) is not None
    tracker.extend([1])
    assert tracker.plan_lookup(1.0) is None
    tracker.extend([1, 2, 3])
    assert tracker.plan_lookup(1.0) is not None
    missed = tracked(12)
    hit(missed, 0)
    assert missed.plan_lookup(MISS_SECONDS - 0.1) is None
    assert missed.plan_lookup(MISS_SECONDS) is not None


def test_a_second_answer_gives_back_the_lease_of_the_first() -> None:
    """One request holds one lease."""
    tracker = tracked(12)
    hit(tracker, 2)
    assert tracker.plan_lookup(1000.0) is not None
    tracker.found(3, b"M" * 16, 60.0, 1000.0)
    assert [Release(LEASE, 0, None)] == tracker.take_calls()
    assert tracker.leased


def test_nothing_is_looked_up_where_nothing_could_be_found() -> None:
    """No full chunk, no lookup; nor for a single token, which must be computed anyway."""
    assert tracked(3).plan_lookup(0.0) is None
    one = RequestTracker(KeySpace("m", chunk_size=1, kv_dtype="float32"), name="r")
    one.extend([7])
    assert one.plan_lookup(0.0) is None
    one.extend([8])
    assert one.plan_lookup(0.0) is not None


def test_each_chunk_is_saved_once_when_it_is_whole_and_computed() -> None:
    """Prefill steps and decode hand chunks out as they become whole; what is sampled but not told yet waits."""
    tracker = tracked(10)
    got = []
    for computed in (3, 5, 9, 10):
        tracker.compute(computed)
        save = tracker.take_save(hold=True)
        got.append(None if save is None else (save.first, save.stop))
    assert [None, (0, 1), (1, 2), None] == got
    tracker.compute(12)  # two tokens computed, not told yet
    assert tracker.take_save(hold=True) is None
    tracker.extend([10, 11])
    save = tracker.take_save(hold=True)
    assert save is not None
    assert (2, 3) == (save.first, save.stop)
    assert chunk_keys(SPACE, range(12)) == list(save.keys)


def test_a_chunk_that_ends_inside_an_engines_block_waits_until_it_is_full() -> None:
    """With blocks of 6 tokens, chunks of 4: the second one (to 8) is handed out when 12 are computed."""
    tracker = tracked(14)
    got = []
    for computed in (5, 6, 8, 11, 12, 14):
        tracker.compute(computed)
        save = tracker.take_save(hold=True, align=6)
        got.append(None if save is None else (save.first, save.stop))
    assert [None, (0, 1), None, None, (1, 3), None] == got


def test_what_a_lookup_found_is_not_saved_again() -> None:
    """Chunks of the hit are there; the first one after it is saved."""
    tracker = tracked(12)
    hit(tracker, 2)
    tracker.decline()
    tracker.compute(12)
    save = tracker.take_save(hold=True)
    assert save is not None
    assert (2, 3) == (save.first, save.stop)


def test_while_a_load_is_in_doubt_saves_are_held_or_carry_its_name() -> None:
    """Whoever copies at once must be able to drop; whoever cannot waits for the outcome."""
    for hold in (True, False):
        tracker = tracked(14)
        hit(tracker, 2)
        load = tracker.begin_load(0, 8)
        tracker.compute(14)
        save = tracker.take_save(hold=hold)
        if hold:
            assert save is None
            assert tracker.load_ended(load.name, failed=False)
            save = tracker.take_save(hold=True)
            assert save is not None
            assert save.after_load is None
        else:
            assert save is not None
            assert load.name == save.after_load
        assert (2, 3) == (save.first, save.stop)


def test_after_a_failed_load_saves_are_due_again_and_the_request_computes_for_itself() -> None:
    """What was handed out in doubt comes again from the failed chunk on, and no second load is tried."""
    tracker = tracked(14)
    hit(tracker, 2)
    load = tracker.begin_load(4, 4)
    tracker.compute(14)
    assert tracker.take_save(hold=False) is not None
    assert tracker.load_ended(load.name, failed=True)
    assert (4, 1, 0) == (tracker.computed, tracker.saved, tracker.loadable(0))
    assert tracker.plan_lookup(10_000.0) is None
    tracker.compute(14)
    save = tracker.take_save(hold=True)
    assert save is not None
    assert (1, 3, None) == (save.first, save.stop, save.after_load)


def test_an_outcome_of_another_load_changes_nothing() -> None:
    """A load that a preemption overtook reports too late."""
    tracker = tracked(14)
    hit(tracker, 2)
    load = tracker.begin_load(0, 8)
    tracker.preempt()
    assert not tracker.load_ended(load.name, failed=True)
    hit(tracker, 2)
    again = tracker.begin_load(0, 8)
    assert load.name != again.name
    assert not tracker.load_ended(load.name, failed=True)
    assert tracker.load == again


def test_after_a_preemption_in_doubt_what_was_handed_out_is_due_again() -> None:
    """Its outcome is never heard, so nobody knows whether those saves were dropped."""
    tracker = tracked(14)
    hit(tracker, 2)
    tracker.begin_load(4, 4)
    tracker.compute(14)
    assert tracker.take_save(hold=False) is not None
    tracker.preempt()
    assert 1 == tracker.saved


def test_a_resumed_request_has_the_keys_of_one_that_was_never_interrupted() -> None:
    """Preempted after decoding, the whole sequence is looked up, and keys go on as they were."""
    tracker = tracked(6)
    tracker.compute(6)
    tracker.extend([6, 7, 8])
    tracker.preempt()
    assert 0 == tracker.computed
    plan = tracker.plan_lookup(0.0)
    assert plan is not None
    assert chunk_keys(SPACE, range(9)) == list(plan.keys)


def test_kv_of_an_untrusted_engine_cache_is_not_saved_until_the_engine_starts_anew() -> None:
    """An engine that may reuse KV of replaced weights poisons nothing; after a preemption it computes for itself."""
    tracker = tracked(12)
    tracker.compute(12, own=False)
    assert tracker.take_save(hold=True) is None
    tracker.compute(12)
    assert tracker.take_save(hold=True) is None
    tracker.preempt()
    tracker.compute(12)
    assert tracker.take_save(hold=True) is not None


def test_a_streaming_session_appends_media_and_keeps_its_session() -> None:
    """New items behind what was keyed are taken; the last sampled token goes; the keys are those of the whole."""
    first, second = MultimodalItem("a" * 64, 1, 2), MultimodalItem("b" * 64, 9, 2)
    tracker = tracked(7, first)
    hit(tracker, 0)
    session = tracker.session
    tracker.truncate(6)
    tracker.extend([6, 7, 8, 9, 10, 11])
    tracker.add(first)
    with pytest.raises(LateExtraKeyError):
        tracker.add(second)  # its chunk is keyed already
    tracker.truncate(7)
    assert [EndSession(session)] == tracker.take_calls()
    tracker.add(second)
    tracker.extend([7, 8, 9, 10, 11])
    assert chunk_keys(SPACE, range(12), [first, second]) == list(tracker.keys)


def test_taking_back_a_keyed_chunk_begins_another_session() -> None:
    """Another chunk may come at that index, and one session never stands for both."""
    tracker = tracked(9)
    hit(tracker, 2)
    tracker.truncate(8)
    assert [] == tracker.take_calls()
    session = tracker.session
    tracker.truncate(7)
    assert [EndSession(session)] == tracker.take_calls()
    assert not tracker.leased
    assert session != tracker.session
    assert 1 == tracker.saved


@pytest.mark.parametrize("state", ["new", "missed", "hit", "loading", "running", "preempted", "given up"])
def test_an_abort_in_every_state_leaves_nothing(state: str) -> None:
    """No lease and no session is left, and a second end does nothing."""
    tracker = tracked(14)
    if state == "missed":
        hit(tracker, 0)
    elif state != "new":
        hit(tracker, 3)
    if state in {"loading", "running"}:
        load = tracker.begin_load(0, 8)
        tracker.compute(14)
        if state == "running":
            assert tracker.load_ended(load.name, failed=False)
    if state == "preempted":
        tracker.preempt()
    if state == "given up":
        tracker.give_up("missing_identity")
    tracker.end()
    calls = tracker.take_calls()
    assert ([EndSession("r1.1")] if state != "new" else []) == [one for one in calls if isinstance(one, EndSession)]
    assert not tracker.leased
    tracker.end()
    assert [] == tracker.take_calls()
    assert tracker.plan_lookup(1e9) is None
    assert tracker.take_save(hold=False) is None
    assert Phase.ENDED is tracker.phase


def test_a_request_without_an_identity_goes_on_without_the_cache() -> None:
    """Given up for a reason, it looks nothing up and saves nothing, whatever the engine does with it."""
    tracker = tracked(12)
    hit(tracker, 2)
    tracker.give_up("missing_identity")
    tracker.give_up("another")
    assert ("missing_identity", Phase.GIVEN_UP) == (tracker.reason, tracker.phase)
    assert [EndSession("r1.1")] == tracker.take_calls()
    tracker.compute(12)
    tracker.preempt()
    assert (None, None, 0) == (tracker.plan_lookup(99.0), tracker.take_save(hold=False), tracker.loadable(0))
    with pytest.raises(LocalProtocolError):
        tracker.extend([1])


def test_refusals_change_nothing() -> None:
    """A hit without a lease, more chunks than keys, a load beyond the hit, a token that is none: all refused."""
    tracker = tracked(12)
    with pytest.raises(LocalProtocolError, match="without a lease"):
        tracker.found(1, None, 0.0, 0.0)
    with pytest.raises(LocalProtocolError, match="4 chunks"):
        tracker.found(4, LEASE, 60.0, 0.0)
    with pytest.raises(LocalProtocolError, match="load"):
        tracker.begin_load(0, 4)
    hit(tracker, 2)
    for n_tokens in (0, 9):
        with pytest.raises(LocalProtocolError, match="load"):
            tracker.begin_load(0, n_tokens)
    with pytest.raises(TokenError):
        tracker.extend([1, -1])
    assert (12, 8) == (tracker.n_tokens, tracker.loadable(0))


def test_the_word_for_a_counter_is_the_reason_of_the_refusal() -> None:
    """An uncacheable request says its own word; other refusals of keys have one."""
    assert "empty_salt" == reason_of(UncacheableRequest("empty_salt", "is empty"))
    assert "conflicting_keys" == reason_of(LateExtraKeyError("late"))


def test_a_salt_shows_nowhere() -> None:
    """Neither a tracker nor its plans print a salt."""
    tracker = tracked(12, CacheSalt("very-secret"))
    hit(tracker, 2)
    load = tracker.begin_load(0, 8)
    tracker.compute(12)
    shown = repr((tracker, load, tracker.take_save(hold=False), tracker.plan_lookup(1e9), tracker.take_calls()))
    assert "very-secret" not in shown


# ---- cost


def work_of_a_step(tracker: RequestTracker, step: Callable[[RequestTracker], object]) -> tuple[int, int]:
    """Lines of Python that a decode step executes, and bytes that it has allocated at one time; no clock is asked."""
    lines = 0

    def count(_frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    gc.collect()
    gc.disable()  # a collection within the step would run finalizers of earlier tests
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    was = sys.gettrace()
    sys.settrace(count)
    try:
        step(tracker)
    finally:
        sys.settrace(was)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gc.enable()
    return lines, peak - before


def at_length(n_tokens: int) -> RequestTracker:
    """A request with so many tokens, all computed and saved."""
    tracker = RequestTracker(KeySpace("m", chunk_size=16, kv_dtype="float32"), [CacheSalt("s")], name="r")
    tracker.extend(range(n_tokens))
    tracker.compute(n_tokens)
    tracker.take_save(hold=True)
    return tracker


def a_decode_step(tracker: RequestTracker) -> object:
    """One more token, inside a chunk."""
    tracker.extend([7])
    tracker.compute(tracker.n_tokens)
    return tracker.take_save(hold=True)


def a_step_that_reads_all(tracker: RequestTracker) -> object:
    """The fault that the count is for."""
    stop = 0
    for key in tracker.keys:
        stop = key.stop
    return stop


def test_a_step_costs_what_is_new_at_any_length() -> None:
    """A decode step executes the same lines, and allocates next to nothing, behind 1,024 tokens and behind 262,144.

    Negative control: a step that reads all tokens again, or copies all keys, is seen by one of the two counts.
    """
    short, long = at_length(1024), at_length(262_144)
    lines, _ = work_of_a_step(short, a_decode_step)
    costs = [work_of_a_step(long, a_decode_step) for _ in range(12)]
    assert {lines} == {one for one, _ in costs}
    assert min(size for _, size in costs) < 4096
    _, copied = work_of_a_step(long, lambda tracker: list(tracker.keys))
    assert copied > 100_000
    read_again, _ = work_of_a_step(long, a_step_that_reads_all)
    assert read_again > 10 * lines
