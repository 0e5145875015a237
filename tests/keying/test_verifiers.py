"""The independent verifiers of the key-schema-2 vectors: they agree with every file, can fail, and share no code."""

import ast
import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

VECTORS = Path(__file__).parents[1] / "vectors"
FILES = sorted(VECTORS.glob("key-schema-2*.json"))
NODE = shutil.which("node")
NOT_PROVEN = (
    "NODE IS NOT ON PATH: it is NOT PROVEN here that an implementation in another language derives the same keys from "
    "docs/spec/key-schema-2.md, nor that the JavaScript verifier can fail"
)
# -I and -S leave out the working directory and every installed package, so that `keying` could not be imported at all.
COMMANDS = {
    "python": [sys.executable, "-I", "-S", str(VECTORS / "verify_independent.py")],
    "node": [NODE or "node", str(VECTORS / "verify_independent.mjs")],
}
verifiers = pytest.mark.parametrize(
    "verifier", ["python", pytest.param("node", marks=pytest.mark.skipif(NODE is None, reason=NOT_PROVEN))]
)

Content = dict[str, Any]


def run(verifier: str, *files: Path) -> subprocess.CompletedProcess[str]:
    """One run of a verifier."""
    return subprocess.run(
        [*COMMANDS[verifier], *map(str, files)], capture_output=True, text=True, encoding="utf-8", timeout=120
    )


def load(file: str) -> Content:
    """A vector file of this tree."""
    content: Content = json.loads((VECTORS / file).read_text(encoding="utf-8"))
    return content


def flipped(digits: str, at: int) -> str:
    """`digits` with one bit of one hex digit changed."""
    at %= len(digits)
    return digits[:at] + f"{int(digits[at], 16) ^ 1:x}" + digits[at + 1 :]


def damaged(value: Any) -> Any:
    """`value` changed as little as its type allows: one hex digit, one bit, one element less, one character more."""
    match value:
        case bool():
            return not value
        case int():
            return value ^ 1
        case list():
            return value[:-1]
        case str() if re.fullmatch(r"[0-9a-f]+", value):
            return flipped(value, -1)
        case _:
            return f"{value}x"


def damage(entry: Any, path: tuple[Any, ...]) -> None:
    """Damage what stands at `path` in `entry`; a last number in a string of hex is the place of a digit."""
    *way, last = path
    for step in way[:-1]:
        entry = entry[step]
    if not way:
        entry[last] = damaged(entry[last])
    elif isinstance(entry[way[-1]], str):
        entry[way[-1]] = flipped(entry[way[-1]], last)
    else:
        entry[way[-1]][last] = damaged(entry[way[-1]][last])


@verifiers
def test_every_file_agrees(verifier: str) -> None:
    """Both files hold what each verifier derives from the inputs, and the count says how much was compared."""
    result = run(verifier, *FILES)
    assert (0, "") == (result.returncode, result.stderr)
    assert ["key-schema-2-own.json", "key-schema-2.json"] == [file.name for file in FILES]
    own, given = result.stdout.splitlines()
    assert "30 cases" in given
    sizes = {section: len(load("key-schema-2-own.json")[section]) for section in ("cases", "refusals")}
    assert f"{sizes['cases']} cases" in own
    assert f"{sizes['refusals']} refusals" in own


def test_verifiers_compare_the_same_amount() -> None:
    """Neither verifier leaves out a value that the other looks at."""
    if NODE is None:
        pytest.skip(NOT_PROVEN)
    assert run("python", *FILES).stdout == run("node", *FILES).stdout


# --- negative controls: file, section, name of the entry, path of what is damaged, what the report must name ----------

GIVEN, OWN = "key-schema-2.json", "key-schema-2-own.json"
RAW_KIND = "kind 6, which nothing uses yet, shown raw"
CONTROLS: list[tuple[str, str, str, tuple[Any, ...], str]] = [
    # values that were derived
    (GIVEN, "cases", "text only", ("keys", 1), "keys"),
    (GIVEN, "cases", "text only", ("keys", 0, 0), "keys"),
    (GIVEN, "cases", "text only", ("keys",), "keys"),
    (GIVEN, "cases", "text only", ("root", 0), "root"),
    (GIVEN, "cases", "one item across two chunks", ("parts_of_chunks", 1, 0, 12), "parts_of_chunks"),
    (GIVEN, "cases", "one item across two chunks", ("parts_of_chunks", 0), "parts_of_chunks"),
    (GIVEN, "cases", "one item across two chunks", ("preimage_of_chunk_0",), "preimage_of_chunk_0"),
    (GIVEN, "cases", "segment cut at 8, item that began at 6", ("segment", "key"), "segment key"),
    (OWN, "cases", "everything together", ("preimages", 2, 100), "preimages"),
    (OWN, "cases", "everything together", ("preimage_of_root",), "preimage_of_root"),
    (OWN, "cases", "segment with everything", ("segment", "parts", -1), "segment parts"),
    (OWN, "cases", "segment with everything", ("segment", "preimage"), "segment preimage"),
    # inputs
    (GIVEN, "cases", "text only", ("tokens", 0), "keys"),
    (GIVEN, "cases", "text only", ("space", "model"), "root"),
    (GIVEN, "cases", "text only", ("space", "chunk_size"), "root"),
    (GIVEN, "cases", "text only", ("partial_tail",), "keys"),
    (GIVEN, "cases", "one item across two chunks", ("extra_keys", 0, 2), "keys"),
    (GIVEN, "cases", "one item across two chunks", ("extra_keys", 0, 1), "keys"),
    (GIVEN, "cases", "one item across two chunks", ("extra_keys",), "keys"),
    (GIVEN, "cases", "prompt embeddings over three chunks", ("extra_keys", 0, 2, 7), "keys"),
    (GIVEN, "cases", "adapter", ("extra_keys", 0, 2), "keys"),
    (GIVEN, "cases", "salt", ("extra_keys", 0, 1), "keys"),
    (GIVEN, "cases", "tag", ("extra_keys", 0, 2), "keys"),
    (OWN, "cases", "segment of text", ("segment", "start"), "segment key"),
    # refusals, and what a decoder makes of a pre-image
    (OWN, "refusals", "two salts", ("extra_keys",), "was accepted"),
    (OWN, "refusals", "two salts", ("rule",), "rule"),
    (OWN, "accepted_preimages", RAW_KIND, ("decoded", "parts", 0, 2), "decoded"),
    (OWN, "accepted_preimages", RAW_KIND, ("preimage",), "decoded"),
    (OWN, "accepted_preimages", RAW_KIND, ("preimage", 0), "refuses"),
    (OWN, "refused_preimages", "chunk size 0", ("preimage", -23), "was accepted"),
    (OWN, "refused_preimages", "two salts", ("rule",), "rule"),
]


@verifiers
@pytest.mark.parametrize(
    ("file", "section", "name", "path", "reported"),
    CONTROLS,
    ids=[f"{name}-{'.'.join(map(str, path))}" for _, _, name, path, _ in CONTROLS],
)
def test_verifier_sees_damage(
    tmp_path: Path, verifier: str, file: str, section: str, name: str, path: tuple[Any, ...], reported: str
) -> None:
    """One changed digit or input makes each verifier fail, and name the case and the field."""
    content = load(file)
    (entry,) = (entry for entry in content[section] if entry["name"] == name)
    whole = copy.deepcopy(entry)
    damage(entry, path)
    assert whole != entry
    copied = tmp_path / file
    kept = {"key_schema": 2, "cases": content["cases"][:1]}
    kept[section] = [entry]
    copied.write_text(json.dumps(kept), encoding="utf-8")
    result = run(verifier, copied)
    assert 1 == result.returncode, result.stderr
    assert name in result.stderr
    assert reported in result.stderr


@verifiers
def test_verifier_sees_damage_among_all_cases(tmp_path: Path, verifier: str) -> None:
    """One digit in the last case of a whole file is found, and nothing else is reported."""
    content = load(OWN)
    content["cases"][-1]["keys"][-1] = flipped(content["cases"][-1]["keys"][-1], -1)
    copied = tmp_path / OWN
    copied.write_text(json.dumps(content), encoding="utf-8")
    result = run(verifier, copied)
    assert (1, "") == (result.returncode, result.stdout)
    first, total = result.stderr.splitlines()
    assert content["cases"][-1]["name"] in first
    assert total.endswith("1 differences")


@verifiers
def test_verifier_sees_a_damaged_tunnel_value(tmp_path: Path, verifier: str) -> None:
    """The values that a key expands to are checked too."""
    content = load(GIVEN)
    content["tunnel"]["values"][-1] ^= 1
    copied = tmp_path / GIVEN
    copied.write_text(json.dumps(content), encoding="utf-8")
    result = run(verifier, copied)
    assert 1 == result.returncode
    assert "tunnel" in result.stderr


UNCHECKABLE: list[tuple[tuple[Any, ...], Any]] = [
    (("key_schema",), 3),
    (("cases",), []),
    (("more_cases",), [{"name": "nobody would check this"}]),
    (("cases", 0, "preimage_of_chunk_1"), "00"),
    (("cases", 0, "space", "seed"), "1"),
    (("cases", -1, "segment", "stops"), 1),
]


@verifiers
@pytest.mark.parametrize(("path", "value"), UNCHECKABLE, ids=[".".join(map(str, path)) for path, _ in UNCHECKABLE])
def test_verifier_refuses_what_it_cannot_check(
    tmp_path: Path, verifier: str, path: tuple[Any, ...], value: Any
) -> None:
    """A file with nothing to check, or with something that would go unchecked, never counts as agreeing."""
    content: Any = load(GIVEN)
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    copied = tmp_path / GIVEN
    copied.write_text(json.dumps(content), encoding="utf-8")
    result = run(verifier, copied)
    assert (2, "") == (result.returncode, result.stdout)


@verifiers
def test_verifier_refuses_no_file_and_a_missing_one(tmp_path: Path, verifier: str) -> None:
    """Checking nothing is not a success."""
    assert 2 == run(verifier).returncode
    assert 2 == run(verifier, tmp_path / "missing.json").returncode


def test_python_verifier_imports_the_standard_library_only() -> None:
    """It shares no code with `keying`, so agreement is worth something."""
    tree = ast.parse((VECTORS / "verify_independent.py").read_text(encoding="utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert set() == {name.split(".")[0] for name in imported} - sys.stdlib_module_names


def test_javascript_verifier_imports_nodes_own_modules_only() -> None:
    """It needs no package and runs nothing else."""
    source = (VECTORS / "verify_independent.mjs").read_text(encoding="utf-8")
    imported = re.findall(r"^import .* from \"(.*)\";$", source, re.MULTILINE)
    assert ["node:crypto", "node:fs", "node:path"] == imported
    assert source.count("import ") == len(imported)
