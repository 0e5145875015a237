"""The vectors: what this code makes, what it reads, and what a reader of the specification alone reads."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keying import KeySpace, format_digest
from protocol_v2.capability import answer_probe, is_probe
from protocol_v2.codes import Code
from protocol_v2.frames import PRELUDE_BYTES, split
from protocol_v2.hello import decode_hello, decode_refusal, decode_welcome, transcript_digest
from protocol_v2.identity import resolve_keys, space_from_wire
from protocol_v2.messages import LookupRequest, decode_message, encode_message

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS = json.loads((FOLDER / "wire-2.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in VECTORS["messages"]}


def frames(name: str) -> list[bytes]:
    """The frames of a case."""
    return [bytes.fromhex(frame) for frame in CASES[name]["frames"]]


def body(name: str) -> bytes:
    """The body of a case."""
    return frames(name)[2][PRELUDE_BYTES:]


def verify(vectors: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the independent reader."""
    path = folder / "wire-2.json"
    path.write_text(json.dumps(vectors), encoding="utf-8")
    command = [sys.executable, "-I", str(FOLDER / "wire_2_verify.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_vectors_are_what_this_code_makes() -> None:
    """A changed byte of a message is a new wire version, never a refreshed file."""
    spec = importlib.util.spec_from_file_location("wire_2_generate", FOLDER / "wire_2_generate.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.generate() == VECTORS


def test_a_reader_of_the_specification_alone_agrees(tmp_path: Path) -> None:
    """Standard library only, another msgpack, another derivation of the keys."""
    done = verify(VECTORS, tmp_path)
    assert (0, "") == (done.returncode, done.stderr), done.stdout


@pytest.mark.parametrize(
    "path",
    [
        ("root",),
        ("tail_key",),
        ("keys", 1),
        ("transcript", "digest"),
        ("space", "model"),
        *(("messages", place, "frames", 2) for place in (0, 3, 5, 6, 13)),
        ("messages", 10, "frames", 3),
        ("messages", 8, "id"),
    ],
)
def test_the_independent_reader_would_see_a_difference(path: tuple[Any, ...], tmp_path: Path) -> None:
    """Negative control: one byte more or changed anywhere that counts is reported."""
    vectors = json.loads(json.dumps(VECTORS))
    at = vectors
    for step in path[:-1]:
        at = at[step]
    value = at[path[-1]]
    at[path[-1]] = value + 1 if isinstance(value, int) else ("00" if value[:2] != "00" else "01") + value[2:] + "00"
    assert 1 == verify(vectors, tmp_path).returncode


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["code"] >= Code.ERROR])
def test_every_message_is_read_and_written_back(name: str) -> None:
    """Decoding and encoding gives the same bytes, and the payload has the announced sizes."""
    envelope = split(frames(name), max_payload_bytes=1 << 20)
    message = decode_message(envelope.prelude.code, envelope.body, wire=2)
    assert body(name) == encode_message(message)
    assert [len(frame) for frame in envelope.payload] == list(message.payload_sizes())


def test_the_frozen_three_are_read() -> None:
    """Hello (with grease, of a tool, of a later version), welcome and refusal."""
    hello, unknown = decode_hello(body("hello with grease"))
    assert ("grease_00",) == unknown
    assert hello.space is not None
    assert KeySpace(**VECTORS["space"]) == space_from_wire(hello.space)
    assert None is decode_hello(body("hello of a tool"))[0].space
    later, unknown = decode_hello(body("hello of a later version"))
    assert ((2, 3, 9), ("region", "wire_9_ticket")) == (later.wire, unknown)
    welcome = decode_welcome(body("welcome to the first hello"))
    assert VECTORS["root"] == (welcome.root or b"").hex()
    refusal = decode_refusal(body("refusal"))
    assert "space.attributes.rope" == refusal.field


def test_the_transcript_is_the_vectors() -> None:
    """Over both header frames, carried by the welcome."""
    digest = transcript_digest(frames("hello with grease")[2], frames("welcome to the first hello")[2])
    assert VECTORS["transcript"]["digest"] == digest.hex() == frames("welcome to the first hello")[3].hex()


def test_lookup_by_digests_and_by_tokens_name_the_same_chunks() -> None:
    """Both forms, as they come off the wire, against the same vectors."""
    space = KeySpace(**VECTORS["space"])
    by_digests = decode_message(Code.LOOKUP, body("lookup by digests"), wire=2)
    by_tokens = decode_message(Code.LOOKUP, body("lookup by tokens and extra keys"), wire=2)
    assert isinstance(by_digests, LookupRequest)
    assert isinstance(by_tokens, LookupRequest)
    full = [f"xk2:{key}" for key in VECTORS["keys"]]
    assert full == [format_digest(key) for key in resolve_keys(by_digests.keys, space).digests]
    derived = [format_digest(key) for key in resolve_keys(by_tokens.keys, space).digests]
    assert [*full, f"xk2:{VECTORS['tail_key']}"] == derived


def test_the_capability_exchange_is_the_vectors() -> None:
    """What is asked and what a server of this protocol answers."""
    asked = [bytes.fromhex(frame) for frame in VECTORS["capability"]["asked"]]
    assert is_probe(asked)
    assert VECTORS["capability"]["answered"] == [bytes(frame).hex() for frame in answer_probe(asked)]
