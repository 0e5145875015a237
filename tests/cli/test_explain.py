"""`explain` and `diff` say what a key stands for, without showing what is secret."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from extra_keys_cli.app import app
from keying import CacheSalt, KeySpace, LoraAdapter, MultimodalItem, PromptEmbeds, Tag, chunk_keys

SPACE = {"model": "org/m", "chunk_size": 4, "kv_dtype": "bfloat16"}
TOKENS = [1, 2, 9, 9, 9, 9, 3, 4]
EXTRA: list[list[Any]] = [
    ["mm", "image-id", 2, 4],
    ["lora", "sql", "sha256:ab", 0],
    ["salt", "s3cret"],
    ["tag", "reader", "00ff", 5],
    ["embeds", 6, "0000803f", 4, "float32"],
]


def write(folder: Path, name: str = "inputs.json", **changed: Any) -> str:
    """A file of key inputs."""
    path = folder / name
    path.write_text(json.dumps({"space": SPACE, "tokens": TOKENS, "extra_keys": EXTRA} | changed))
    return str(path)


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_explain_prints_each_key_and_its_parts(tmp_path: Path) -> None:
    """The keys are those of the library, every part shows in words, and no secret does."""
    code, shown = run("explain", write(tmp_path))
    keys = chunk_keys(
        KeySpace("org/m", chunk_size=4, kv_dtype="bfloat16"),
        TOKENS,
        [
            MultimodalItem("image-id", 2, 4),
            LoraAdapter("sql", "sha256:ab"),
            CacheSalt("s3cret"),
            Tag("reader", b"\0\xff", 5),
            PromptEmbeds(6, b"\0\0\x80\x3f", 4, "float32"),
        ],
    )
    assert 0 == code
    for expected in (*map(str, keys), "item image-id, begins at +2", "begins 2 before", "adapter sql", "embeddings +2"):
        assert expected in shown
    assert "s3cret" not in shown
    assert b"s3cret".hex() not in shown


def test_what_a_file_says_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    """Names come out as text: no markup, and no escape sequence; keys and identifiers are whole on a narrow screen."""
    image = "sha256:" + "ab" * 32
    inputs = {"space": SPACE | {"model": "a[red]b\x1b[31m"}, "tokens": TOKENS, "extra_keys": [["mm", image, 2, 4]]}
    result = CliRunner().invoke(app, ["explain", "-"], input=json.dumps(inputs), env={"COLUMNS": "40"})
    assert (0, True) == (result.exit_code, "space a[red]b\ufffd[31m " in result.output)
    assert "\x1b" not in result.output
    assert 2 == sum(line.startswith("  xk2:") and len(line) == 70 for line in result.output.splitlines())
    assert f"item {image}, begins at +2" in result.output


def test_explain_reads_standard_input() -> None:
    """A dash stands for standard input."""
    code, shown = run("explain", "-", stdin=json.dumps({"space": SPACE, "tokens": TOKENS}))
    assert (0, True) == (code, "xk2:" in shown)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "shared: all 2 chunks"),
        ({"extra_keys": [["mm", "other", 2, 4], *EXTRA[1:]]}, "item other"),
        ({"extra_keys": [*EXTRA[:2], ["salt", "other"], *EXTRA[3:]]}, "salt (not shown)"),
        ({"tokens": [*TOKENS[:7], 5]}, "shared: 1 chunk; from chunk 1 on none is:"),
        ({"tokens": [*TOKENS[:7], 5]}, "differ from position 7"),
        ({"tokens": TOKENS[:4]}, "shared: 1 chunk, all of the second request; the first has 2"),
        ({"space": SPACE | {"kv_dtype": "float16"}}, "spaces differ in kv_dtype"),
    ],
)
def test_diff_names_what_differs(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    """The dimension in which two requests part is named; the exit code says whether they do."""
    code, shown = run("diff", write(tmp_path), write(tmp_path, "other.json", **changed))
    assert expected in shown
    assert (1 if changed else 0) == code


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        "{}",
        '{"space": {"model": "m"}, "tokens": []}',
        "[" * 100_000,
        json.dumps({"space": SPACE, "tokens": [True]}),
        json.dumps({"space": SPACE, "tokens": [1], "extra_keys": [["what", "x"]]}),
        json.dumps({"space": SPACE, "tokens": [1], "extra_keys": [["tag", "t", "zz"]]}),
        json.dumps({"space": SPACE, "tokens": [1], "salt": "s"}),
        json.dumps({"space": SPACE, "tokens": [1], "extra_keys": [["salt", ""]]}),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(tmp_path: Path, content: str) -> None:
    """A user's mistake gives a message that names the file, and no traceback."""
    path = tmp_path / "bad.json"
    path.write_text(content)
    code, shown = run("explain", str(path))
    assert 1 == code
    assert "error:" in shown
    assert "Traceback" not in shown
    assert 1 == run("explain", str(tmp_path / "absent.json"))[0]


def test_help_teaches() -> None:
    """Every command is listed with a sentence, and usage mistakes exit with 2."""
    code, shown = run("--help")
    assert 0 == code
    for command in ("serve", "probe", "status", "demo", "explain", "diff"):
        assert command in shown
    assert 2 == run("explain")[0]
    assert 2 == run("no-such-command")[0]
