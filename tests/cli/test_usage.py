"""The command as somebody meets it who has not read anything: help, mistakes, interruptions."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extra_keys_cli.app import app
from tests.cli.processes import SECONDS, run

COMMANDS = ("serve", "probe", "status", "demo", "explain", "diff", "audit", "purge")
SPACE = {"model": "org/m", "chunk_size": 4, "kv_dtype": "bfloat16"}
INPUTS = {"space": SPACE, "tokens": [1, 2, 3, 4]}


def invoked(*arguments: str) -> tuple[int, str]:
    """Exit code and everything printed, in one process, on a wide screen."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, prog_name="extra-keys")
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, " ".join(result.output.split())


def test_every_command_has_help_with_exit_codes() -> None:
    """No command without a sentence on what it does, and none that leaves its exit codes open; all are listed first."""
    assert sorted(COMMANDS) == sorted(command.name or command.callback.__name__ for command in app.registered_commands)  # type: ignore[union-attr]
    code, overview = invoked("--help")
    assert 0 == code
    for name in COMMANDS:
        code, shown = invoked(name, "--help")
        assert (0, True) == (code, f"Usage: extra-keys {name}" in shown)
        assert "Exit codes: 0 done, 1 " in shown
        assert f" {name} " in overview
        assert "[b" not in shown  # markup that was not rendered


def test_the_module_calls_itself_by_the_commands_name() -> None:
    """`python -m extra_keys_cli` gives the same help as the installed command."""
    done = run("audit", "--help")
    assert (0, "") == (done.returncode, done.stderr)
    assert "Usage: extra-keys audit [OPTIONS]" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("audti",), "No such command"),
        (("audit",), "Missing argument"),
        (("purge", "."), "--schema, --older-than, --model, --format"),
        (("purge", ".", "--schema", "one"), "--schema"),
        (("purge", ".", "--older-than", "soon"), "is no age"),
        (("diff", "-", "-"), "one request only"),
        (("status", "ipc://x", "--timeout", "0"), "--timeout"),
        (("demo", "--requests", "/nowhere"), "No such file"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_where_help_is(arguments: tuple[str, ...], says: str) -> None:
    """What was wrong and the way to the help; no traceback."""
    code, shown = invoked(*arguments)
    assert 2 == code
    assert says in shown
    assert "-h' for help" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("probe", "nonsense"), "wanted ipc://PATH or tcp://HOST:PORT"),
        (("probe", "tcp://127.0.0.1:99999"), "wanted ipc://PATH or tcp://HOST:PORT"),
        (("status", "ipc:///nowhere/at/all.sock", "--timeout", "1"), "is a server running there?"),
        (("serve", "--no-store", "--listen", "tcp://127.0.0.1:99999"), "wanted ipc://PATH or tcp://HOST:PORT"),
        (("serve", "--store", "/dev/null"), "a file; give a folder"),
        (("audit", ""), "'' is no place"),
        (("purge", "", "--schema", "1", "--yes"), "'' is no place"),
        (("explain", "/nowhere"), "No such file"),
        (("explain", "{folder}"), "Is a directory"),
        (("explain", "{folder}/bytes"), "not key inputs"),
        (("explain", "{folder}/list.json"), "file: got a list, wanted an object"),
        (("explain", "{folder}/kind.json"), "begins with one of mm, lora, salt, tag, embeds, and not with 'image'"),
        (("explain", "{folder}/field.json"), "unknown field 'extra'"),
        (("explain", "{folder}/absent.json"), "field 'tokens' is missing"),
        (("explain", "{folder}/values.json"), "mm: missing a required argument: 'length'"),
        (("explain", "{folder}/space.json"), "space: got an unexpected keyword argument 'models'"),
        (("explain", "{folder}/deep.json"), "not key inputs (maximum recursion depth"),
        (("probe", "ipc://x", "--space", "{folder}/deep.json"), "not a space (maximum recursion depth"),
        (("probe", "ipc:///nowhere/at/all.sock", "--timeout", "1"), "no session:"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    """What was got and what was wanted; no traceback."""
    (tmp_path / "bytes").write_bytes(b"\xff\x00\xca")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "kind.json").write_text(json.dumps(INPUTS | {"extra_keys": [["image", "a", 0, 4]]}))
    (tmp_path / "absent.json").write_text(json.dumps({"space": SPACE}))
    (tmp_path / "values.json").write_text(json.dumps(INPUTS | {"extra_keys": [["mm", "a", 0]]}))
    (tmp_path / "space.json").write_text(json.dumps(INPUTS | {"space": SPACE | {"models": 1}}))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "field.json").write_text(json.dumps(INPUTS | {"extra": 1}))
    done = run(*(one.format(folder=tmp_path) for one in arguments), cache_home=tmp_path)
    assert (1, "") == (done.returncode, done.stdout)
    assert says in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_what_is_right_is_exit_code_0(tmp_path: Path) -> None:
    """The negative control of the two above: the same command with right input."""
    (tmp_path / "right.json").write_text(json.dumps(INPUTS | {"extra_keys": [["mm", "a", 0, 4]]}))
    code, shown = invoked("explain", str(tmp_path / "right.json"))
    assert (0, True) == (code, "xk2:" in shown)


def test_ctrl_c_is_exit_code_130_without_a_traceback(tmp_path: Path) -> None:
    """A command that waits is interrupted: here for a file that somebody else still writes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "extra_keys_cli", "explain", str(pipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with pipe.open("wb"):  # returns when the command has opened the other end
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert (130, "") == (process.returncode, out)
    assert "Traceback" not in err


def test_output_that_nobody_reads_is_no_error_of_ours(tmp_path: Path) -> None:
    """`extra-keys audit ... | head -0`: no traceback and no message."""
    process = subprocess.Popen(
        [sys.executable, "-m", "extra_keys_cli", "audit", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert b"" == process.stderr.read()
    assert process.wait(SECONDS) in {0, 1}
