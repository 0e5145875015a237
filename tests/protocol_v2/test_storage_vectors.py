"""The vectors of storage schema 2: made by us, confirmed by a verifier that shares no code with us."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol_v2.codes import MissReason
from protocol_v2.storage import (
    STORAGE_SCHEMA,
    EnvelopeError,
    ObjectId,
    Shard,
    StorageValueError,
    open_object,
    parse_name,
)
from protocol_v2.storage.descriptions import parse_description

VECTORS = Path(__file__).parents[1] / "vectors"
CONTENT = json.loads((VECTORS / "storage-2.json").read_text(encoding="utf-8"))
VERIFIER = VECTORS / "storage_2_verify.py"


def identity(case: dict[str, Any]) -> ObjectId:
    """An identity as the vectors write it."""
    shard = Shard(case["world"], case["rank"], case["group"])
    return ObjectId(bytes.fromhex(case["root"]), bytes.fromhex(case["key"]), shard)


def verify(*files: Path) -> subprocess.CompletedProcess[str]:
    """One run of the verifier, in an interpreter that has nothing but the standard library."""
    command = [sys.executable, "-I", "-S", str(VERIFIER), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_file_is_what_the_generator_makes() -> None:
    """The vectors have not drifted from the code: a changed one needs another schema number."""
    command = [sys.executable, str(VECTORS / "storage_2_generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (0, "") == (done.returncode, done.stderr)
    assert STORAGE_SCHEMA == CONTENT["storage_schema"] == 2


@pytest.mark.parametrize("case", CONTENT["names"], ids=lambda case: case["name"][-24:])
def test_names_of_the_vectors(case: dict[str, Any]) -> None:
    """Each identity has the listed name, and the name gives it back."""
    assert case["name"] == str(identity(case).name)
    assert identity(case).name == parse_name(case["name"])


@pytest.mark.parametrize("name", CONTENT["no_names"])
def test_strings_that_are_no_names(name: str) -> None:
    """Each listed string is refused."""
    with pytest.raises(StorageValueError):
        parse_name(name)


@pytest.mark.parametrize("case", CONTENT["objects"], ids=lambda case: case["case"])
def test_objects_of_the_vectors(case: dict[str, Any]) -> None:
    """Each object opens as listed."""
    opened = open_object(bytes.fromhex(case["object"]), identity(case))
    assert case["payload"] == b"".join(opened.buffers).hex()
    assert (case["start"], case["n_tokens"], case["parent"]) == (
        opened.envelope.start,
        opened.envelope.n_tokens,
        opened.envelope.parent.hex(),
    )


@pytest.mark.parametrize("case", CONTENT["refused"], ids=lambda case: case["case"])
def test_refused_objects_of_the_vectors(case: dict[str, Any]) -> None:
    """Each damaged, foreign or hostile object is a miss with the listed reason."""
    with pytest.raises(EnvelopeError) as caught:
        open_object(bytes.fromhex(case["object"]), identity(case["asked"]))
    assert case["reason"] == caught.value.reason.name.lower()


def test_every_reason_that_an_envelope_can_give_is_listed() -> None:
    """The refused objects cover all miss reasons but absent."""
    assert {reason.name.lower() for reason in MissReason} - {"absent"} == {one["reason"] for one in CONTENT["refused"]}


def test_the_description_of_the_vectors() -> None:
    """The listed fields describe the space whose root they name."""
    space = parse_description(json.dumps(CONTENT["description"]["fields"]).encode())
    assert CONTENT["description"]["name"] == f"xk2/{space.root[:16].hex()}/space.json"


def test_the_verifier_agrees_and_shares_no_code() -> None:
    """An implementation by the page alone, without our packages, gives every listed result."""
    done = verify(VECTORS / "storage-2.json")
    assert (0, "storage-2.json: 73 cases\n") == (done.returncode, done.stdout)
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(VERIFIER.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize("part", ["names", "no_names", "objects", "refused", "description"])
def test_the_verifier_can_fail(part: str, tmp_path: Path) -> None:
    """Negative control: a file with one wrong value in any part is found wrong."""
    content = json.loads(json.dumps(CONTENT))
    match part:
        case "names":
            content[part][0]["name"] = content[part][0]["name"].replace("w1", "w2")
        case "no_names":
            content[part].append(content["names"][0]["name"])
        case "objects":
            content[part][0]["start"] += 1
        case "refused":
            content[part][-1]["object"] = content["objects"][0]["object"]
        case _:
            content[part]["fields"]["model"] += "x"
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(content))
    done = verify(file)
    assert 1 == done.returncode
    assert f"wrong.json: {part}" in done.stdout
