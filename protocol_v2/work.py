"""`Task`: an operation cut in two, the part that blocks and the part that touches the loop's state.

Theory of operation
-------------------
The cache core is driven by one loop. What it answers from memory it answers at once; what needs a disk (or any tier
that can block) it hands back as a `Task`:

    task = cache.retrieve(...)            loop: plans, pins, reserves; never blocks
    if not task.ready:
        executor.submit(task.run)         any thread, once; blocks; never raises; touches no cache state
        ... later, told so by the executor ...
    result = task.finish(now)             loop, once; settles indexes and counters; raises what the operation ends in

Every task is settled exactly once, by `finish` or by `cancel`. `cancel` gives back what planning reserved and is for
tasks whose `run` was never started (deadline passed in the queue, shutdown); a task that runs must be finished, whether
or not anybody waits for its result. Tasks may run in any order and at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from protocol_v2.errors import LocalProtocolError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
U = TypeVar("U")
W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Done(Generic[W]):
    """The blocking part returned this."""

    value: W


@dataclass(frozen=True, slots=True)
class Failed:
    """The blocking part raised this, or never ran."""

    error: Exception


class TaskCancelledError(LocalProtocolError):
    """The blocking part was never run."""


class Task(Generic[T]):
    """One operation; see the module's text for who calls what, where.

    Args:
        run: the blocking part, which raises nothing; None where there is none.
        settle: gives the operation's result, or raises what it ended in, at a time.
    """

    __slots__ = ("_run", "_settle", "_settled", "_started")

    def __init__(self, run: Callable[[], None] | None, settle: Callable[[float], T]) -> None:
        self._run = run
        self._settle = settle
        self._started = False
        self._settled = False

    @property
    def ready(self) -> bool:
        """Whether there is nothing to run: `finish` can be called at once."""
        return self._run is None

    def run(self) -> None:
        """The blocking part. Keeps what it raises for `finish`.

        Raises:
            LocalProtocolError: it was run before.
        """
        if self._started:
            raise LocalProtocolError("task: run twice; run each task once")
        self._started = True
        if self._run is not None:
            self._run()

    def finish(self, now: float) -> T:
        """Settle the operation and give its result.

        Args:
            now: seconds, monotonic.

        Raises:
            LocalProtocolError: it has blocking work that was not run, or was settled before.
            ProtocolError: what the operation ended in.
        """
        if self._run is not None and not self._started:
            raise LocalProtocolError("task: finished before it ran; run it in an executor first, or cancel it")
        return self._settle_once(now)

    def cancel(self, now: float) -> None:
        """Settle an operation that will not be run: nothing comes of it, and nothing stays reserved.

        Raises:
            LocalProtocolError: it was started or settled before.
        """
        if self._started:
            raise LocalProtocolError("task: cancelled after it was started; finish it")
        try:
            self._settle_once(now)
        except TaskCancelledError:
            return

    def after(self, settle: Callable[[Ran[T], float], U]) -> Task[U]:
        """A task that settles this one, and then itself by what this one gave or raised. This one is used up."""

        def settle_both(now: float) -> U:
            outcome: Ran[T]
            try:
                outcome = Done(self._settle_once(now))
            except Exception as error:  # whatever it is, the outer task has something to give back first
                outcome = Failed(error)
            return settle(outcome, now)

        return Task(None if self.ready else self.run, settle_both)

    def then(self, change: Callable[[T], U]) -> Task[U]:
        """A task that settles this one and changes its result; errors pass. This one is used up."""
        return Task(None if self.ready else self.run, lambda now: change(self._settle_once(now)))

    def _settle_once(self, now: float) -> T:
        if self._settled:
            raise LocalProtocolError("task: settled twice")
        self._settled = True
        return self._settle(now)


Ran: TypeAlias = Done[W] | Failed


def blocking(work: Callable[[], W], settle: Callable[[Ran[W], float], T]) -> Task[T]:
    """A task with a blocking part.

    Args:
        work: blocks; runs in any thread.
        settle: runs on the loop with what `work` returned or raised. Where the error is a `TaskCancelledError`, `work`
            never ran and nothing happened: `settle` gives back what was reserved and raises that error again.
    """
    outcome: Ran[W] = Failed(TaskCancelledError("task: never run"))

    def run() -> None:
        nonlocal outcome
        try:
            outcome = Done(work())
        except Exception as error:  # handed to the loop, which raises it where somebody can answer for it
            outcome = Failed(error)

    return Task(run, lambda now: settle(outcome, now))


def immediate(result: T) -> Task[T]:
    """A task that is done already."""
    return Task(None, lambda _now: result)


def failed(error: ProtocolError) -> Task[T]:
    """A task that is done already, and ended in an error."""

    def settle(_now: float) -> T:
        raise error

    return Task(None, settle)


def settle_all(tasks: Sequence[Task[T]], now: float) -> list[T]:
    """Settle every task, whatever the others end in, and give their results.

    Raises:
        ProtocolError: the first that one of them ended in, once all are settled.
    """
    results: list[T] = []
    first: ProtocolError | None = None
    for task in tasks:
        try:
            results.append(task.finish(now))
        except ProtocolError as error:
            first = first or error
    if first is not None:
        raise first
    return results
