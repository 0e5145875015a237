"""`audit` and `purge` as a user runs them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extra_keys_cli.app import app
from tests.compat.mixed_folder import V1, V2, files, fill


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_audit_prints_a_table_and_json(tmp_path: Path) -> None:
    """Both count the same; no salt shows."""
    fill(tmp_path).close()
    code, shown = run("audit", str(tmp_path))
    assert 0 == code
    assert "org/m (ambiguous)" in shown
    code, text = run("audit", str(tmp_path), "--json")
    groups = json.loads(text)["groups"]
    assert 0 == code
    assert len(V1) == sum(group["names"] for group in groups if group["schema"] == 1)
    assert len(V2) == sum(group["names"] for group in groups if group["what"] == "entry" and group["schema"] == 2)
    assert "tenant" not in shown + text


def test_purge_is_a_dry_run_until_yes(tmp_path: Path) -> None:
    """Without --yes nothing goes; with it what was announced does."""
    fill(tmp_path).close()
    before = files(tmp_path)
    code, shown = run("purge", str(tmp_path), "--schema", "1")
    assert (0, before) == (code, files(tmp_path))
    assert "Nothing was touched" in shown
    code, text = run("purge", str(tmp_path), "--schema", "1", "--yes", "--json")
    assert (0, before - V1) == (code, files(tmp_path))
    assert len(V1) == json.loads(text)["outcomes"]["retired"]["names"]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 1, "no criterion"),
        (("--older-than", "soon"), 2, "is no age"),
        (("--schema", "2", "--yes"), 1, "live server"),
    ],
)
def test_purge_refuses(tmp_path: Path, options: tuple[str, ...], code: int, says: str) -> None:
    """A line and an exit code, and nothing is touched."""
    tier = fill(tmp_path)
    before = files(tmp_path)
    got, shown = run("purge", str(tmp_path), *options)
    assert (code, True, before) == (got, says in shown, files(tmp_path))
    tier.close()


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    """What is not there cannot be audited."""
    code, shown = run("audit", str(tmp_path / "absent"))
    assert (1, True) == (code, "no folder" in shown)
