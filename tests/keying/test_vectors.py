"""The vectors of key schema 2: `keying` reproduces every value, refuses what must be refused, and no file changes."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from keying import (
    KEY_SCHEMA,
    ChunkKey,
    ChunkKeyChain,
    ChunkPreimage,
    KeyingError,
    PreimageError,
    SegmentPreimage,
    UnknownPart,
    chunk_digests,
    chunk_keys,
    decode_part,
    decode_preimage,
    encode_preimage,
    segment_key,
)

VECTORS = Path(__file__).parents[1] / "vectors"
SPEC = Path(__file__).parents[2] / "docs" / "spec" / "key-schema-2.md"
GIVEN, OWN = "key-schema-2.json", "key-schema-2-own.json"
PINNED = {
    GIVEN: "63179c71811787dd0aa16f32dd0998a5fc860fcc7f8463e78ec38d4b838c2129",
    OWN: "3f2316decc81f10fdaa408655297e13eb2f6c72ab38cb147eb89f5fcdbd0c721",
}

Entry = dict[str, Any]


def load_generator() -> ModuleType:
    """generate.py, which knows how an input in a file becomes a value of `keying`."""
    spec = importlib.util.spec_from_file_location("key_schema_2_generate", VECTORS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()
CONTENT: dict[str, Entry] = {file: json.loads((VECTORS / file).read_text(encoding="utf-8")) for file in (GIVEN, OWN)}
CASES = [pytest.param(case, id=f"{file}-{case['name']}"[:90]) for file in CONTENT for case in CONTENT[file]["cases"]]
REFUSALS = [pytest.param(entry, id=f"{entry['rule']}-{entry['name']}") for entry in CONTENT[OWN]["refusals"]]
ACCEPTED = [pytest.param(entry, id=entry["name"]) for entry in CONTENT[OWN]["accepted_preimages"]]
REFUSED = [pytest.param(entry, id=f"{entry['rule']}-{entry['name']}") for entry in CONTENT[OWN]["refused_preimages"]]


def extra_keys_of(case: Entry) -> list[Any]:
    """The extra keys of a case, as values of `keying`."""
    return [generate.extra_key_of(entry) for entry in generate.entries_of(case)]


@pytest.mark.parametrize("case", CASES)
def test_keys_and_parts(case: Entry) -> None:
    """Root, keys, places and parts are those of the file, for every public way to derive them."""
    space, extra_keys = generate.space_of(case), extra_keys_of(case)
    assert case["root"] == space.root.hex()
    keys = chunk_keys(space, case["tokens"], extra_keys, partial_tail=case["partial_tail"])
    assert case["keys"] == [key.digest.hex() for key in keys]
    assert [f"xk2:{digest}" for digest in case["keys"]] == [str(key) for key in keys]
    digests = chunk_digests(space, case["tokens"], extra_keys, partial_tail=case["partial_tail"])
    assert case["keys"] == [digest.hex() for digest in digests]
    size = case["space"]["chunk_size"]
    stops = [min((i + 1) * size, len(case["tokens"])) for i in range(len(keys))]
    assert [(i * size, stop) for i, stop in enumerate(stops)] == [(key.start, key.stop) for key in keys]
    if "parts_of_chunks" in case:
        assert case["parts_of_chunks"] == [[part.hex() for part in key.parts] for key in keys]


@pytest.mark.parametrize("case", CASES)
def test_chain_in_steps_of_three(case: Entry) -> None:
    """Tokens that come three at a time give the keys of the file too."""
    chain = ChunkKeyChain(generate.space_of(case), extra_keys_of(case))
    for start in range(0, len(case["tokens"]), 3):
        chain.extend(case["tokens"][start : start + 3])
    digests = [key.digest.hex() for key in chain.keys]
    tail = chain.partial_tail()
    if case["partial_tail"] and tail is not None:
        digests.append(tail.digest.hex())
    assert case["keys"] == digests


def check_preimage(form: type[ChunkPreimage | SegmentPreimage], key: ChunkKey, parent: bytes, case: Entry) -> str:
    """The pre-image of `key` in hex, after both directions were checked."""
    parts = tuple(decode_part(part) for part in key.parts)
    preimage = form(parent, tuple(case["tokens"][key.start : key.stop]), parts)
    encoded = encode_preimage(preimage)
    assert key.digest == hashlib.sha256(encoded).digest()
    assert preimage == decode_preimage(encoded)
    return encoded.hex()


@pytest.mark.parametrize("case", CASES)
def test_preimages_both_ways(case: Entry) -> None:
    """Every key is the SHA-256 of its pre-image, which is that of the file and decodes to what went in."""
    space = generate.space_of(case)
    root = encode_preimage(space)
    assert space == decode_preimage(root)
    assert case["root"] == hashlib.sha256(root).hexdigest()
    assert root.hex() == case.get("preimage_of_root", root.hex())
    keys = chunk_keys(space, case["tokens"], extra_keys_of(case), partial_tail=case["partial_tail"])
    parents = [space.root, *(key.digest for key in keys)]
    preimages = [check_preimage(ChunkPreimage, key, parent, case) for key, parent in zip(keys, parents, strict=False)]
    assert preimages == case.get("preimages", preimages)
    if "preimage_of_chunk_0" in case:
        assert preimages[0] == case["preimage_of_chunk_0"]


@pytest.mark.parametrize("case", [case for case in CASES if "segment" in case.values[0]])  # type: ignore[operator]
def test_segment(case: Entry) -> None:
    """The segment's key, parts and pre-image are those of the file."""
    space, given = generate.space_of(case), case["segment"]
    tokens = case["tokens"][given["start"] : given["stop"]]
    key = segment_key(space, tokens, extra_keys_of(case), start=given["start"])
    assert given["key"] == key.digest.hex()
    assert (given["start"], given["stop"]) == (key.start, key.stop)
    parts = [part.hex() for part in key.parts]
    assert parts == given.get("parts", parts)
    preimage = check_preimage(SegmentPreimage, key, space.root, case)
    assert preimage == given.get("preimage", preimage)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusal(refusal: Entry) -> None:
    """An input that the specification refuses raises a typed error, and gives no key."""
    with pytest.raises(KeyingError):
        generate.derive(refusal)


@pytest.mark.parametrize("entry", ACCEPTED)
def test_accepted_preimage(entry: Entry) -> None:
    """A pre-image decodes to what the file says; encoding gives it back, unless it holds a kind that is not known."""
    preimage = bytes.fromhex(entry["preimage"])
    assert entry["decoded"] == generate.decoded_fields(preimage)
    decoded = decode_preimage(preimage)
    parts = decoded.parts if isinstance(decoded, ChunkPreimage | SegmentPreimage) else ()
    if any(isinstance(part, UnknownPart) for part in parts):
        with pytest.raises(PreimageError):
            encode_preimage(decoded)
    else:
        assert preimage == encode_preimage(decoded)


@pytest.mark.parametrize("entry", REFUSED)
def test_refused_preimage(entry: Entry) -> None:
    """The decoder refuses what no encoder writes, with the one error it has for that."""
    with pytest.raises(PreimageError):
        decode_preimage(bytes.fromhex(entry["preimage"]))


def test_different_inputs_have_different_keys() -> None:
    """Across all cases, two keys are equal only if their pre-images are."""
    seen: dict[str, str] = {}
    for content in CONTENT.values():
        for case in content["cases"]:
            for key, preimage in zip(case["keys"], case.get("preimages", []), strict=False):
                assert preimage == seen.setdefault(key, preimage), case["name"]
    assert len(seen) == len(set(seen.values())) > 100


def test_rules_stand_in_the_specification() -> None:
    """Every refusal cites a rule that docs/spec/key-schema-2.md numbers, and every decoder rule is cited."""
    rules = re.findall(r"^\| *§(\d+\.\d+) *\|", SPEC.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rules) == len(set(rules))
    cited = {entry["rule"] for section in ("refusals", "refused_preimages") for entry in CONTENT[OWN][section]}
    # what no vector can hold: calls on a chain that has handed out keys
    assert set(rules) == cited | {"9.22", "9.23"}


def dump(title: str) -> bytes:
    """The bytes of one annotated dump in the specification."""
    found = re.search(rf"<!-- bytes of {title} -->\n```\n(.*?)```", SPEC.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return b"".join(bytes.fromhex(line.split("|")[0]) for line in found[1].splitlines())


def test_dumps_in_the_specification() -> None:
    """The worked example, read back from the page, hashes to the root and the keys of its vector."""
    named = {case["name"]: case for case in CONTENT[GIVEN]["cases"]}
    case = named["everything, unicode"]
    assert case["root"] == hashlib.sha256(dump("the root")).hexdigest()
    assert case["keys"] == [hashlib.sha256(dump(f"chunk {i}")).hexdigest() for i in range(3)]
    assert case["preimage_of_chunk_0"] == dump("chunk 0").hex()
    assert named["prompt embeddings over three chunks"]["parts_of_chunks"][1] == [dump("rows").hex()]
    text = SPEC.read_text(encoding="utf-8")
    assert all(f"xk2:{digest}" in text for digest in case["keys"])


def test_generator_gives_the_file() -> None:
    """`generate.py --check` finds the own vectors as they are generated."""
    result = subprocess.run(
        [sys.executable, str(VECTORS / "generate.py"), "--check"], capture_output=True, text=True, timeout=120
    )
    assert (0, "") == (result.returncode, result.stderr)


def test_generator_sees_a_changed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` fails for a file that differs by one digit, and for a missing one, and writes neither."""
    changed = tmp_path / OWN
    whole = (VECTORS / OWN).read_text(encoding="utf-8")
    digest = CONTENT[OWN]["cases"][0]["keys"][0]
    monkeypatch.setattr(generate, "TARGET", changed)
    assert 1 == generate.main(["--check"])
    assert not changed.exists()
    changed.write_text(whole, encoding="utf-8")
    assert 0 == generate.main(["--check"])
    changed.write_text(whole.replace(digest, digest[:-1] + ("0" if digest[-1] != "0" else "1")), encoding="utf-8")
    assert 1 == generate.main(["--check"])
    assert "another key schema" in capsys.readouterr().err


@pytest.mark.parametrize("file", PINNED)
def test_vectors_are_pinned_to_the_schema(file: str) -> None:
    """A vector file changes only together with this pin, and a changed value only together with the schema number."""
    content = (VECTORS / file).read_bytes()
    assert KEY_SCHEMA == json.loads(content)["key_schema"] == 2
    assert PINNED[file] == hashlib.sha256(content).hexdigest(), (
        f"{file} changed while KEY_SCHEMA is still {KEY_SCHEMA}. A changed root, key, part or pre-image means a NEW "
        "SCHEMA NUMBER and a new file; only if cases were ADDED, and none changed, may the digest here be replaced"
    )


def test_generated_cases_do_not_repeat_the_given_names() -> None:
    """A name points at one case, across both files."""
    names = [case["name"] for content in CONTENT.values() for case in content["cases"]]
    assert len(names) == len(set(names))
