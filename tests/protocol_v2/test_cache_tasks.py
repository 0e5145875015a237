"""Tasks: the seam between the loop and the threads that block."""

from __future__ import annotations

import pytest

from protocol_v2.errors import LocalProtocolError
from protocol_v2.work import Done, Failed, Ran, Task, TaskCancelledError, blocking, failed, immediate


class OddError(Exception):
    """What a blocking part fails with."""


def noting(outcomes: list[Ran[int]], *, fails: bool = False) -> Task[str]:
    """A task that notes the outcome of its blocking part."""

    def work() -> int:
        if fails:
            raise OddError
        return 7

    def settle(ran: Ran[int], now: float) -> str:
        outcomes.append(ran)
        if isinstance(ran, Failed):
            raise ran.error
        return f"{ran.value} at {now}"

    return blocking(work, settle)


def test_a_task_runs_and_is_finished_once() -> None:
    """The loop settles with what the thread returned, once."""
    outcomes: list[Ran[int]] = []
    task = noting(outcomes)
    assert not task.ready
    task.run()
    assert [] == outcomes
    assert "7 at 3.0" == task.finish(3.0)
    assert [Done(7)] == outcomes
    with pytest.raises(LocalProtocolError, match="settled twice"):
        task.finish(3.0)
    with pytest.raises(LocalProtocolError, match="run twice"):
        task.run()


def test_running_never_raises() -> None:
    """What the blocking part raises comes out on the loop, where somebody answers for it."""
    outcomes: list[Ran[int]] = []
    task = noting(outcomes, fails=True)
    task.run()
    with pytest.raises(OddError):
        task.finish(0.0)
    assert 1 == len(outcomes)


def test_a_task_that_was_not_run_cannot_be_finished_but_cancelled() -> None:
    """Cancelling settles with the error that nothing ran; a started task cannot be cancelled."""
    outcomes: list[Ran[int]] = []
    task = noting(outcomes)
    with pytest.raises(LocalProtocolError, match="finished before it ran"):
        task.finish(0.0)
    task.cancel(0.0)
    [outcome] = outcomes
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, TaskCancelledError)
    with pytest.raises(LocalProtocolError, match="settled twice"):
        task.cancel(0.0)
    started = noting([])
    started.run()
    with pytest.raises(LocalProtocolError, match="cancelled after it was started"):
        started.cancel(0.0)


def test_tasks_that_are_done_already() -> None:
    """An answer from memory, and a refusal, are ready: nothing is to be run."""
    assert immediate("x").ready
    assert "x" == immediate("x").finish(0.0)
    refusal: Task[str] = failed(LocalProtocolError("no"))
    assert refusal.ready
    with pytest.raises(LocalProtocolError, match="no"):
        refusal.finish(0.0)


def test_tasks_change_their_results() -> None:
    """`then` changes a result and passes errors; ready stays ready."""
    task = noting([]).then(str.upper)
    task.run()
    assert "7 AT 1.0" == task.finish(1.0)
    assert immediate("x").then(str.upper).ready
    wrong = noting([], fails=True).then(str.upper)
    wrong.run()
    with pytest.raises(OddError):
        wrong.finish(0.0)


@pytest.mark.parametrize("end", ["done", "failed", "cancelled"])
def test_tasks_settle_one_after_the_other(end: str) -> None:
    """`after` settles the inner task first, and hands on what it gave, raised, or that it never ran."""
    outcomes: list[Ran[int]] = []
    seen: list[Ran[str]] = []

    def settle(ran: Ran[str], _now: float) -> int:
        seen.append(ran)
        if isinstance(ran, Failed):
            raise ran.error
        return len(ran.value)

    task = noting(outcomes, fails=end == "failed").after(settle)
    if end == "cancelled":
        task.cancel(0.0)
        assert isinstance(seen[0], Failed)
        assert isinstance(seen[0].error, TaskCancelledError)
    else:
        task.run()
        if end == "done":
            assert 8 == task.finish(1.0)
        else:
            with pytest.raises(OddError):
                task.finish(1.0)
    assert (1, 1) == (len(outcomes), len(seen))
