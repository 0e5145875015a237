"""The README is what a newcomer runs, so its example runs here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_library_example_runs_and_says_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python block of the README runs as it stands, in at most fifteen lines of code, and prints a key."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    exec(compile(block, "README.md", "exec"), {})
    assert re.fullmatch(r"xk2:[0-9a-f]{64}\n", capsys.readouterr().out)


def test_every_make_target_and_file_that_the_readme_names_exists() -> None:
    """No command of the README is a dead end."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)", README):
        assert f"\n{target}:" in makefile, target
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
