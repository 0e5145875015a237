"""The upgrade rehearsal, as a reader of MIGRATION.md runs it; and that it would see a wrong hit."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from examples import fleet, rolling_upgrade
from examples.v1_parties import StandIns
from tests.interop.environment import needs_lmcache

pytestmark = pytest.mark.zmq
SCRIPT = Path(rolling_upgrade.__file__)


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    """The script, to its end."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "100"},
        cwd=SCRIPT.parents[1],
    )


def steps_shown(output: str) -> list[list[int]]:
    """Requests, hits, misses, bypasses, wrong hits of v1 and all others, of each step."""
    rows = re.findall(r"\| +(?:v1|v2t?) (?:v1|v2t?) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)", output)
    return [[int(number) for number in row] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "v1"),
    [
        ("servers-first", "stand-ins"),
        ("clients-first", "stand-ins"),
        pytest.param("both", "lmcache", marks=[pytest.mark.interop, needs_lmcache]),
    ],
)
def test_a_fleet_is_upgraded_step_by_step_without_a_wrong_hit(order: str, v1: str) -> None:
    """Every step has hits and none of them is wrong on the v2 side; the v1 side has wrong ones, so they are seen."""
    done = run("--order", order, "--v1", v1)
    assert (0, "") == (done.returncode, done.stderr)
    steps = steps_shown(done.stdout)
    wanted = {"servers-first": 7, "clients-first": 6, "both": 13}[order]
    assert wanted == len(steps), done.stdout
    for requests, hits, misses, bypasses, _, wrong in steps:
        assert hits + misses + bypasses == requests
        assert (True, 0) == (hits > 0, wrong)
    assert steps[0][4] > 0
    assert 0 == steps[-1][4]


def two_steps(folder: Path) -> list[str]:
    """An all-v1 fleet, and one engine of it upgraded; what is wrong with that."""
    with closing(fleet.Fleet(StandIns(), folder)) as small:
        return rolling_upgrade.rehearse(small, rolling_upgrade.clients_first()[:2])


def test_keys_without_the_extra_keys_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a v2 engine that forgets what is beside the tokens is served wrong hits, and they are told."""
    monkeypatch.setattr(fleet.Prompt, "extra_keys", ())
    (problem,) = two_steps(tmp_path)
    assert re.fullmatch(r"engine 1 to v2: \d+ wrong hits", problem)


def test_a_fleet_that_shows_nothing_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without requests that v1 confuses, it says that it would not have seen a wrong hit."""
    monkeypatch.setattr(fleet, "REQUESTS", fleet.prompts(1)[:2])
    (problem,) = two_steps(tmp_path)
    assert "not shown to work" in problem


@pytest.mark.parametrize(("schema", "served", "outcome"), [(1, 2, "wrong"), (2, 1, "wrong"), (1, 1, ""), (2, 2, "")])
def test_kv_of_the_other_schema_is_a_wrong_hit_for_either(schema: int, served: int, outcome: str) -> None:
    """Negative control: the same prompt's KV, from an engine of the other version, is seen; its own is right."""
    ledger = fleet.Ledger()

    class Served:
        """An engine whose cache answers with what an engine of some schema computed."""

        speaks = "test"

        def fetch(self, prompt: fleet.Prompt) -> list[float]:
            return [ledger.number(served, prompt.truth(place)) for place in range(4)]

        def store(self, prompt: fleet.Prompt, values: Sequence[float]) -> None:
            raise AssertionError("nothing is missing")

        def close(self) -> None:
            pass

    engine = type("Engine", (Served,), {"schema": schema})()
    traffic = fleet.Traffic("engine", engine, ledger, seed=0)
    try:
        traffic.await_hits(30)
        counts = traffic.take_counts()
    finally:
        traffic.stop()
    assert (0, 0) == (counts.among_v1, counts.bypassed)
    assert counts.hits == counts.requests > 0
    assert counts.wrong == (counts.hits if outcome else 0)
