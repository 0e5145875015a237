"""`Jobs`: work that blocks, on its way from the loop to a thread and back, within a bound.

A job is made of tasks (`work`). The loop takes jobs out, a thread runs each once, and the loop settles it. Belongs to
the loop; only `Job.run` is for any thread.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.status import ServiceCounters
    from protocol_v2.work import Task

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_JOBS: Final = 4096
"""Jobs that were handed in and are not settled."""


class JobsFullError(ProtocolError):
    """Too many operations are under way."""

    error_code = ErrorCode.BUSY
    retriable = True


@dataclass(slots=True, eq=False)
class Job:
    """Tasks to be run in one thread, one after the other, and what follows on the loop."""

    tasks: Sequence[Task[Any]]
    then: Callable[[float], None]

    def run(self) -> None:
        """The blocking part; in any thread, once. Never raises: each task keeps what it ended in."""
        for task in self.tasks:
            task.run()


class Jobs:
    """All jobs of a service.

    Args:
        counters: told of background tasks that failed.
    """

    def __init__(self, counters: ServiceCounters) -> None:
        self._waiting: deque[Job] = deque()
        self._running = 0
        self._counters = counters

    def __len__(self) -> int:
        """Jobs that are not settled."""
        return self._running + len(self._waiting)

    def run(self, tasks: Sequence[Task[T]], then: Callable[[float], None], now: float) -> None:
        """Run what blocks, then call `then` with the time; at once where nothing blocks.

        Raises:
            JobsFullError: the tasks were cancelled.
        """
        if all(task.ready for task in tasks):
            then(now)
            return
        if len(self) >= MAX_JOBS:
            for task in tasks:
                task.cancel(now)
            raise JobsFullError(f"{MAX_JOBS} operations are under way; retry later")
        self._waiting.append(Job(tasks, then))

    def background(self, task: Task[T], now: float) -> None:
        """Run a task that nobody waits for; it is cancelled where there is no room."""

        def then(now: float) -> None:
            try:
                task.finish(now)
            except ProtocolError as error:
                self._counters.background_failures += 1
                log.warning("background work failed: %s", error)

        if task.ready:
            then(now)
        elif len(self) >= MAX_JOBS:
            task.cancel(now)
        else:
            self._waiting.append(Job([task], then))

    def take(self, others: Sequence[Job] = ()) -> list[Job]:
        """Jobs to run, those of another part of the server with them; each must come back by `settle`."""
        taken = [*self._waiting, *others]
        self._waiting.clear()
        self._running += len(taken)
        return taken

    def settle(self, job: Job, now: float) -> None:
        """A job was run."""
        self._running -= 1
        job.then(now)
