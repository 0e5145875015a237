"""The same inputs to the released LMCache and to us: one process of it, asked once."""

import base64
import json
import random
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import ExtraKeysDeprecationWarning, apply_mm_hashes_to_token_ids
from compat.v1 import AmbiguousName, NameFormat, StoreKind, V1Name, mp_chunk_hashes, recognise
from compat.v1.pickled_tensors import PickledTensor, read_tensors, write_tensors
from tests.compat.v1_writers import EngineKey, MpObject
from tests.interop.environment import PYTHON, needs_lmcache, peer_environment

pytestmark = [pytest.mark.interop, needs_lmcache]

SCRIPT = Path(__file__).parent / "peer" / "lmcache_formats.py"
ONES = PickledTensor("float16", (2, 3), b"\x00\x3c" * 6)
EIGHT_BIT = PickledTensor("float8_e4m3fn", (4,), b"8888")
WRITTEN = [ONES, PickledTensor("bfloat16", (2,), b"\x80\x3f" * 2), EIGHT_BIT]


class Span:
    """As vLLM's PlaceholderRange."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length


def _inputs() -> dict[str, Any]:
    rng = random.Random(20)

    def text(alphabet: str, n: int) -> str:
        return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, n)))

    objects = [
        [
            text("aZ0-_./SEP\u4e2d %\n", 14),
            rng.randint(1, 300) << 24 | rng.randint(0, 7) << 16 | 0x0801,
            rng.randint(0, 40),
            rng.randbytes(rng.choice([8, 32, 33, 48])).hex(),
            rng.choice(["", text("ab-_.%\u4e2d ", 12)]),
        ]
        for _ in range(500)
    ]
    engine_keys = [
        [
            text("aZ0-_./SEP@", 10),
            rng.randint(1, 9),
            rng.randint(0, 8),
            rng.randrange(-(2**63), 2**64),
            rng.choice(["half", "bfloat16", "float", "uint8", "fp8_e4m3fn", "fp8_e5m2"]),
            rng.choice([None, rng.randint(0, 80)]),
            [[f"{i}{text('ab%@', 3)}", text("xy%@/-_3", 4)] for i in range(rng.choice([0, 0, 1, 2]))],
        ]
        for _ in range(500)
    ]
    prompts = [
        [
            [rng.randrange(1000) for _ in range(rng.randint(1, 60))],
            [[text("abc\u00e9\u4e2d0", 8), rng.randint(0, 70), rng.randint(0, 40)] for _ in range(rng.randint(0, 4))],
        ]
        for _ in range(200)
    ]
    return {
        "objects": objects,
        "engine_keys": engine_keys,
        "prompts": prompts,
        "tokens": [rng.randrange(2**32) for _ in range(200)],
        "pickle": base64.b64encode(write_tensors(WRITTEN)).decode(),
    }


INPUTS = _inputs()


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What LMCache 0.5.6 gave."""
    done = subprocess.run(
        [PYTHON, SCRIPT],
        input=json.dumps(INPUTS),
        env=peer_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(json.loads(done.stdout[done.stdout.index("{") :]))


def _has(name: str, kind: StoreKind, form: NameFormat, model: str, chunk_hash: str) -> bool:
    """Whether the key is among the readings, or may be among those that are not listed."""
    found = recognise(name, kind)
    if isinstance(found, AmbiguousName) and not found.complete:
        return True
    readings = found.readings if isinstance(found, AmbiguousName) else (found,) if isinstance(found, V1Name) else ()
    return any((r.format, r.model, r.chunk_hash) == (form, model, chunk_hash) for r in readings)


def test_object_names_are_written_as_we_say_and_recognised(answer: dict[str, Any]) -> None:
    """Our account of the writers is LMCache's, and every name is read back."""
    for fields, names in zip(INPUTS["objects"], answer["object_names"], strict=True):
        model, kv_rank, group, chunk_hash, salt = fields
        ours = MpObject(model, kv_rank, group, bytes.fromhex(chunk_hash), salt)
        fs, native, raw_block = names
        assert (fs, native, raw_block) == (ours.fs(), ours.native(), ours.raw_block())
        assert _has(fs, StoreKind.FOLDER, NameFormat.FS, model, chunk_hash)
        assert _has(native, StoreKind.KEY_VALUE, NameFormat.NATIVE, model, chunk_hash)
        assert _has(native, StoreKind.OBJECT_STORE, NameFormat.NATIVE, model, chunk_hash)
        assert _has(raw_block, StoreKind.RAW_BLOCK, NameFormat.RAW_BLOCK, model, chunk_hash)


def test_engine_keys_are_written_as_we_say_and_recognised(answer: dict[str, Any]) -> None:
    """``to_string`` likewise."""
    for fields, text in zip(INPUTS["engine_keys"], answer["engine_texts"], strict=True):
        model, world_size, worker, chunk_hash, dtype, layer, tags = fields
        ours = EngineKey(model, world_size, worker, chunk_hash, dtype, layer, tuple(map(tuple, tags)))
        assert ours.text() == text
        assert _has(text, StoreKind.KEY_VALUE, NameFormat.ENGINE_KEY, model, ours.hash_text())


def test_prompts_are_substituted_as_by_the_release(answer: dict[str, Any]) -> None:
    """The deprecated producer and the original, on the same prompts."""
    for (tokens, spans), expected in zip(INPUTS["prompts"], answer["substituted"], strict=True):
        tensor = torch.tensor(tokens, dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtraKeysDeprecationWarning)
            apply_mm_hashes_to_token_ids(tensor, [s[0] for s in spans], [Span(*s[1:]) for s in spans])
        assert expected == tensor.tolist()


def test_chunk_hashes_are_those_of_the_release(answer: dict[str, Any]) -> None:
    """Over token ids of the whole range."""
    assert answer["chunk_hashes"] == [h.hex() for h in mp_chunk_hashes(INPUTS["tokens"], 16)]


def test_pickles_go_both_ways(answer: dict[str, Any]) -> None:
    """LMCache's environment loads what we write, 8-bit floats included, and we read what it dumps."""
    assert [
        ["torch.float16", [2, 3], 6.0],
        ["torch.bfloat16", [2], 2.0],
        ["torch.float8_e4m3fn", [4], 4.0],
    ] == answer["tensors"]
    read = read_tensors(base64.b64decode(answer["pickle"]))
    assert [(t.dtype, t.shape, t.data) for t in WRITTEN[:2]] == [(t.dtype, t.shape, bytes(t.data)) for t in read]
