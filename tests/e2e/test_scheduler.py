"""vLLM's own schedulers, with steps scheduled ahead as on GPUs, over a toy model whose KV tells every wrong slot.

Requests come, go on, are preempted and aborted while loads fail; whatever is stored must be what its key says.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cache_server import Server
from tests.e2e.engines import PATIENT, Engines
from tests.e2e.environment import needs_engine
from tests.e2e.host import SchedulerHost
from tests.e2e.prompts import words

pytestmark = [pytest.mark.e2e, needs_engine]

HEAD = words(64, "head")
BEGIN, A, B = [*HEAD, 1], [*HEAD, *words(5, "a")], [*HEAD, *words(40, "b")]


class Scheduled:
    """Engines that are opened one after the other in one process."""

    def __init__(self, engines: Engines, folder: Path) -> None:
        self._host = SchedulerHost(folder / "scheduler.log")
        self._engines = engines
        self.call = self._host.call

    def open(self, model: str, *, chunk_size: int = 16, load: str = "auto", **options: Any) -> None:
        """An engine; the model's name keeps what it stores apart."""
        settings = {"address": self._engines.address, "chunk_size": chunk_size, "model": model, "load": load, **PATIENT}
        self.call("open", model=str(self._engines.folder / "llama"), settings=settings, **options)

    def fails(self, model: str, *requests: tuple[str, list[int]], gone: bool = False, **options: Any) -> dict[str, Any]:
        """One engine stores the head; another loses it while it loads; what came of its requests.

        Args:
            model: name of.
            requests: of the other engine.
            gone: the first one is aborted as soon as its load has failed.
            options: of both.
        """
        self.open(model, **options)
        self.call("add", name="begin", tokens=BEGIN)
        self.call("run")
        self.open(model, losing=1.0, seed=3, **options)
        for name, tokens in requests:
            self.call("add", name=name, tokens=tokens, max_tokens=6)
            if gone and name == requests[0][0]:
                self.call("step")
                self.call("abort", name=name)
        self.call("run")
        report: dict[str, Any] = self.call("report")
        assert report["load_failures"] >= 1
        assert report["standing"] == 0
        return report


@pytest.fixture(scope="module")
def scheduled(engines: Engines, folder: Path) -> Iterator[Scheduled]:
    """The process."""
    made = Scheduled(engines, folder)
    yield made
    made._host.finish()
    made._host.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", [{}, {"window": 32}, {"window": 32, "hybrid": True}])
def test_a_failed_load_changes_no_answer_and_poisons_nothing(
    scheduled: Scheduled, ahead: bool, kind: dict[str, Any]
) -> None:
    """Alone, beside one that shares its blocks, and aborted at once; one group of KV, one that slides, and two."""
    options: dict[str, Any] = {"ahead": ahead, **kind}
    for gone in (False, True):
        report = scheduled.fails(f"fails {options} {gone}", ("a", A), ("b", B), gone=gone, **options)
        assert ([], []) == (report["wrong"], report["poison"])
    alone = scheduled.fails(f"alone {options}", ("a", A), **options)
    assert ([], []) == (alone["wrong"], alone["poison"])
    assert alone["stored"] > 0


@pytest.mark.parametrize(
    ("options", "wrong", "poisoned"),
    [
        ({"ahead": True}, ["a", "b"], True),
        ({"ahead": False}, [], True),
        ({"ahead": False, "gone": True}, ["b"], True),
        ({"ahead": False, "window": 32}, ["a"], False),
    ],
)
def test_a_load_of_the_step_would_be_seen_where_it_cannot_be_taken_back(
    scheduled: Scheduled, options: dict[str, Any], wrong: list[str], poisoned: bool
) -> None:
    """Negative controls: in such an engine a failed load of the step gives wrong tokens or stores wrong KV."""
    requests = [("a", A)] if "window" in options else [("a", A), ("b", B)]
    report = scheduled.fails(f"careless {options}", *requests, load="sync", careless=True, **options)
    assert (wrong, poisoned) == (report["wrong"], bool(report["poison"]))


@pytest.mark.parametrize("seed", range(9))
def test_whatever_happens_to_requests_what_is_stored_is_right(scheduled: Scheduled, server: Server, seed: int) -> None:
    """Two engines of a random kind with random requests, sessions, aborts and losses; the second has hits."""
    chance = random.Random(seed)
    options: dict[str, Any] = {
        "ahead": seed % 2 == 0,
        "window": 32 if seed % 4 in {0, 1} else None,
        "hybrid": seed % 4 == 0,
        "drafts": 3 if seed % 4 == 3 else 0,
        "policy": chance.choice(["fcfs", "priority"]),
        "n_blocks": chance.choice([20, 30, 64]),
        "budget": chance.choice([20, 48, 256]),
        "prefix": chance.random() < 0.6,
        "chunk_size": chance.choice([8, 16, 24, 40]),
        "losing": 0.3,
    }
    heads = [words(chance.randrange(60, 120), f"mix {seed} {place}") for place in range(3)]
    for turn in range(2):
        scheduled.open(f"mix {seed}", seed=seed, **options)
        mixed(scheduled, chance, heads)
        report = scheduled.call("report")
        assert ([], [], 0) == (report["wrong"], report["poison"], report["standing"]), (turn, options, report)
    assert report["hit_tokens"] > 0
    assert (0, 0) == server.left_over()


def mixed(scheduled: Scheduled, chance: random.Random, heads: list[list[int]]) -> None:
    """Sixty times something happens; then everything comes to its end."""
    sessions: dict[str, int] = {}
    standing: dict[str, str] = {}
    for event in range(60):
        what = chance.random()
        if what < 0.3:
            name, head = f"r{event}", chance.choice(heads)
            tokens = [*head[: chance.randrange(5, len(head) + 1)], *words(chance.choice([0, 1, 5, 20]), f"{event}")]
            goes_on = chance.random() < 0.25
            scheduled.call(
                "add",
                name=name,
                tokens=tokens,
                max_tokens=chance.choice([1, 3, 20, 40]),
                salt=chance.choice([None, None, "s"]),
                priority=chance.randrange(3),
                goes_on=goes_on,
            )
            if goes_on:
                sessions[name] = chance.randrange(3)
        elif what < 0.35 and standing:
            scheduled.call("abort", name=chance.choice(sorted(standing)))
        elif what < 0.37:
            scheduled.call("reset")
        standing = scheduled.call("step", count=chance.choice([1, 1, 3]))
        for name in [name for name, left in sessions.items() if left and standing.get(name) == WAITS]:
            sessions[name] -= 1
            more = words(chance.randrange(1, 30), f"{name} {event}")
            scheduled.call("add", name=name, tokens=more, max_tokens=chance.choice([1, 4, 10]), goes_on=True)
    for name in sessions:  # one that waits for input keeps its blocks, and others may wait for those
        scheduled.call("abort", name=name)
    scheduled.call("run")


WAITS = "WAITING_FOR_STREAMING_REQ"
