"""The demo: right on real requests, and able to see what it is there to see."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from extra_keys_cli import demo as demo_module
from extra_keys_cli.captured import default_file, read_captured
from extra_keys_cli.demo import Prepared, Verdict, demo, prepare, result_table, wrong_v1_hits
from extra_keys_cli.failures import CommandError
from keying import chunk_keys
from tests.cli.processes import run

pytestmark = pytest.mark.zmq


def test_the_demo_runs_and_says_that_nothing_was_wrong() -> None:
    """Exit code 0, one row a request, no wrong hit."""
    done = run("demo")
    assert 0 == done.returncode, done.stderr
    assert "0 of them wrong; 0 requests" in " ".join(done.stdout.split())
    for captured in read_captured(default_file()):
        assert captured.label in done.stdout


def test_the_captured_requests_come_with_the_package() -> None:
    """An installed wheel has them: they lie where the package lies, and nowhere beside it."""
    assert default_file().is_relative_to(Path(demo_module.__file__).parent)
    assert 32 == len(read_captured(default_file()))


def test_every_column_is_there_on_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """The table is whole where it is piped: what v1 would have served wrongly is the last column. Also with faults."""
    requests = [prepare(one, 32) for one in read_captured(default_file())]
    right, wrong = Verdict(18, 18, 0, "longer than all before"), Verdict(18, 5, 118, "other picture and text")
    for verdict in (right, wrong):
        table = result_table(requests, [[verdict] * len(requests)] * 3, [115] * len(requests))
        Console(width=80).print(table)
        lines = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "┏┃┡│├└"]
        assert len(lines) > len(requests)
        assert {line[-1] for line in lines} <= set("┓┃┩│┤┘")
        assert len(requests) == sum(line.split("│")[-2].strip() == "115" for line in lines if "│" in line)


def test_the_demo_says_what_to_install_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra `torch` is told so, before a server is started."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CommandError, match=r"install extra-keys\[torch\]"):
        demo(read_captured(default_file()), tmp_path, 32)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("chunk_size", [16, 100])
def test_the_demo_is_right_at_other_chunk_sizes(tmp_path: Path, chunk_size: int) -> None:
    """Also where a picture begins inside a chunk and where a prompt has few of them."""
    assert demo(read_captured(default_file()), tmp_path, chunk_size)


def test_the_demo_sees_keys_without_extra_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with keys over tokens alone the demo finds wrong hits and says so."""

    def without(captured: object, chunk_size: int) -> Prepared:
        right = prepare(captured, chunk_size)  # type: ignore[arg-type]
        tokens = captured.request.all_token_ids  # type: ignore[attr-defined]
        return Prepared(right.label, right.space, chunk_keys(right.space, tokens), right.identities, right.v1_keys)

    monkeypatch.setattr(demo_module, "prepare", without)
    assert not demo(read_captured(default_file()), tmp_path, 32)


def test_what_v1_would_have_served_is_counted_by_request() -> None:
    """Adapters and pictures are served wrongly by keys over raw tokens; equal requests and plain text are not."""
    captured = read_captured(default_file())
    wrong = dict(
        zip(
            [(one.model, one.label) for one in captured],
            wrong_v1_hits([prepare(one, 32) for one in captured]),
            strict=True,
        )
    )
    llama, llava = "tiny-random/llama", "tiny-random/llava"
    assert (18, 18) == (wrong[llama, "text, adapter A"], wrong[llama, "text, adapter B"])
    assert (5, 5) == (wrong[llava, "flower"], wrong[llava, "hopper"])
    assert (0, 0, 0) == (wrong[llama, "text again"], wrong[llava, "china again"], wrong[llama, "text, salt tenant-1"])


@pytest.mark.parametrize("content", [b"", b"not json", b"{}", b"[" * 100_000, b"\xff", b'{"label": "x"}'])
def test_a_file_that_is_none_is_explained(tmp_path: Path, content: bytes) -> None:
    """A wrong file of requests is named, with the line, and no traceback."""
    path = tmp_path / "requests.jsonl"
    path.write_bytes(content)
    done = run("demo", "--requests", str(path))
    assert 2 == done.returncode
    assert "requests.jsonl" in "".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert 2 == run("demo", "--requests", str(tmp_path / "absent")).returncode
