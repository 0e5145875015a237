"""The gate (`.ci/run`) itself, beside a Makefile that only says what was asked of it."""

import os
import subprocess
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[1] / ".ci" / "run"
SKIPPED = "###  SKIPPED: "
MAKEFILE = """
.PHONY: setup check test e2e
setup:
	@touch set-up && {setup}
check: set-up
	@echo checked
test: set-up
	@echo tested && {test}
e2e: set-up
	@echo "ran the engine" && {e2e}
.venv-vllm/.installed:
	{build}
.venv-vllm/sglang/.installed:
	{more}
"""
BUILDS = "mkdir -p $(@D) && touch $@"


def gate(
    folder: Path,
    *,
    build: str,
    setup: str = "true",
    more: str = BUILDS,
    test: str = "true",
    e2e: str = "true",
    replaced: tuple[str, str] = ("", ""),
) -> tuple[int, str]:
    """Run it in a folder; its exit code and what it printed."""
    (folder / ".ci").mkdir(exist_ok=True)
    text = GATE.read_text()
    assert replaced[0] in text
    (folder / ".ci" / "run").write_text(text.replace(*replaced) if replaced[0] else text)
    (folder / "Makefile").write_text(MAKEFILE.format(build=build, setup=setup, more=more, test=test, e2e=e2e))
    ran = subprocess.run(
        ["bash", folder / ".ci" / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env={"PATH": _path_with_redis(folder), "HOME": str(folder)},
    )
    return ran.returncode, ran.stdout


def _path_with_redis(folder: Path) -> str:
    """PATH with a `redis-server` on it, whether this machine has one or not, so that nothing is installed here."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "redis-server").touch(mode=0o755)
    return f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"


def test_an_engine_that_can_be_built_is_part_of_the_gate(tmp_path: Path) -> None:
    """Built once, its tests run beside the others, and what fails of either fails the gate; nothing is skipped."""
    code, said = gate(tmp_path, build=BUILDS)
    assert 0 == code
    assert said.index("checked\ntested\n") < said.index("ran the engine\n")
    assert said.endswith("tested\n")
    assert SKIPPED not in said
    for test, e2e in (("false", "true"), ("true", "false")):
        code, said = gate(tmp_path, build="false", test=test, e2e=e2e)  # it stands: it is not built again
        assert 0 != code
        assert "tested\n" in said
        assert "ran the engine\n" in said


def test_what_has_to_be_installed_is_installed_side_by_side(tmp_path: Path) -> None:
    """The engine's environment and the project's own wait for each other here: in turn, neither would ever be there."""
    os.mkfifo(tmp_path / "meet")
    code, said = gate(tmp_path, build=f"echo met >meet && {BUILDS}", setup="cat meet")
    assert 0 == code
    assert "met\n" in said
    assert "ran the engine\n" in said


def test_without_the_project_itself_nothing_is_tested(tmp_path: Path) -> None:
    """A setup that fails fails the gate, with the environment of the engine or without it."""
    for build in (BUILDS, "false"):
        code, said = gate(tmp_path, build=build, setup="echo no compiler; false")
        assert 0 != code
        assert "no compiler\n" in said
        assert "tested\n" not in said.replace("nothing was tested\n", "")
        assert "ran the engine" not in said


@pytest.mark.parametrize(
    ("build", "replaced", "why"),
    [
        ("echo no network; false", ("", ""), "ended with 2; its last lines are above"),
        ("true", ("", ""), "ended with 0"),
        (BUILDS, ("vllm 6000", "vllm 600000000"), "MiB free, and building .venv-vllm wants 600000000"),
        ("sleep 50", ("6000 1200", "6000 1"), "it took more than 1 s"),
    ],
    ids=["fails", "makes nothing", "no room", "too slow"],
)
def test_an_engine_that_cannot_be_built_is_skipped_loudly(
    tmp_path: Path, build: str, replaced: tuple[str, str], why: str
) -> None:
    """What is skipped and why stands in a block of its own, and the rest of the gate runs and decides."""
    code, said = gate(tmp_path, build=build, replaced=replaced)
    assert 0 == code
    assert f"{SKIPPED}make e2e" in said
    assert why in next(line for line in said.splitlines() if line.startswith("###  BECAUSE: "))
    assert "checked\ntested\n" in said
    assert said.endswith("tested\n")
    assert "ran the engine" not in said
    assert ("no network" in said) == ("no network" in build)
    assert 0 != gate(tmp_path, build=build, replaced=replaced, test="false")[0]


def test_what_is_laid_beside_the_engine_is_skipped_by_itself(tmp_path: Path) -> None:
    """SGLang's classes that cannot be had are said to be skipped, and cost the engine's own tests nothing."""
    code, said = gate(tmp_path, build=BUILDS, more="false")
    assert 0 == code
    assert f"{SKIPPED}make sglang" in said
    assert f"{SKIPPED}make e2e" not in said
    assert "ran the engine\n" in said


def test_a_hang_ends_and_fails(tmp_path: Path) -> None:
    """The gate's own time limit, so that no machine waits for it for ever."""
    code, said = gate(tmp_path, build="false", test="sleep 50", replaced=("GATE_SECONDS=3000", "GATE_SECONDS=1"))
    assert 124 == code
    assert "tested\n" in said


def test_a_machine_without_redis_says_so(tmp_path: Path) -> None:
    """Where it can be neither found nor installed: here since the lookup is told to find nothing."""
    wanted = ("command -v redis-server", "command -v no-such-server")
    (tmp_path / "bin").mkdir()
    for name in ("apt-get", "id"):  # not root, and nothing to install it with
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho 1000\n")
        (tmp_path / "bin" / name).chmod(0o755)
    code, said = gate(tmp_path, build=BUILDS, replaced=wanted)
    assert 0 == code
    assert f"{SKIPPED}the tests that want a real redis-server" in said
    assert SKIPPED not in gate(tmp_path, build=BUILDS)[1]
