"""Make tests/vectors/storage-2.json from fixed inputs, through `protocol_v2.storage`.

No clock, environment or random source is read; pseudo-random bytes come from SHA-256 over a counter.

    python tests/vectors/storage_2_generate.py            write the file
    python tests/vectors/storage_2_generate.py --check    write nothing; exit status 1 if the file differs

A changed name or object is another storage schema, and needs another number.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from keying import KeySpace
from protocol_v2.storage import (
    STORAGE_SCHEMA,
    EnvelopeError,
    ObjectId,
    Shard,
    TensorSpec,
    encode_header,
    open_object,
    stored_object,
)
from protocol_v2.storage.descriptions import format_description
from protocol_v2.storage.objects import NO_PARENT, Envelope

TARGET = Path(__file__).with_name("storage-2.json")
PROVENANCE = (
    "made by tests/vectors/storage_2_generate.py of the project extra-keys from fixed inputs; confirmed by "
    "storage_2_verify.py, which shares no code with it. Bytes in hex. refused: an object, the identity that a reader "
    "asked for, and the miss reason it must give"
)
Case = dict[str, Any]


def filler(label: str, size: int) -> bytes:
    """Pseudo-random bytes that follow from a label."""
    blocks = (hashlib.sha256(f"{label}/{index}".encode()).digest() for index in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def identity(root: bytes, key: bytes, shard: Shard) -> Case:
    """An object's identity."""
    return {"root": root.hex(), "key": key.hex(), "world": shard.world, "rank": shard.rank, "group": shard.group}


def names() -> list[Case]:
    """Identities with their names."""
    digests = [
        bytes(32),
        b"\xff" * 32,
        bytes.fromhex("12" * 32),
        bytes.fromhex("0e" * 32),
        filler("a", 32),
        filler("b", 32),
    ]
    shards = [Shard(1, 0, 0), Shard(8, 7, 0), Shard(10, 1, 12), Shard(65535, 65534, 65535)]
    return [
        identity(root, key, shard) | {"name": str(ObjectId(root, key, shard).name)}
        for root, key in zip(digests, digests[::-1], strict=True)
        for shard in shards
    ]


def no_names() -> list[str]:
    """Strings that are no name of this schema."""
    good = f"xk2/{'0a' * 16}/{'0b' * 32}/w2r1g0"
    return [
        "",
        "xk2",
        f"{good}\n",
        f"{good}/",
        f"/{good}",
        f"./{good}",
        good.upper(),
        good.replace("0a", "0A", 1),
        good.replace("xk2", "xk02"),
        good.replace("xk2", "xk1"),
        good.replace("xk2", "xk3"),
        good.replace("w2", "w02"),
        good.replace("w2", "w0"),
        good.replace("w2", "w65536"),
        good.replace("r1", "r2"),
        good.replace("g0", "g"),
        good.replace("g0", "g65536"),
        good.replace("g0", "g\u0663"),
        good.replace("0b", "", 1),
        good.replace("0a", "0a0a", 1),
        "org@model@2@0@" + "0b" * 32,
        f"xk2/{'0a' * 16}/space.json",
    ]


def envelope(label: str, shard: Shard, start: int, n_tokens: int, tensors: list[TensorSpec], parent: bytes) -> Envelope:
    """An envelope whose root and key follow from a label."""
    identity = ObjectId(filler(f"{label}/root", 32), filler(f"{label}/key", 32), shard)
    return Envelope(identity, start, n_tokens, tuple(tensors), parent)


def objects() -> list[tuple[str, Envelope, bytes]]:
    """Envelopes with their payloads."""
    cases = [
        ("one tensor", Shard(), 0, 4, [TensorSpec("bfloat16", (2, 4), 16)], filler("one tensor/root", 32)),
        ("scalar", Shard(2, 1, 3), 4, 1, [TensorSpec("uint8", (), 1)], filler("p", 32)),
        ("empty tensor", Shard(), 8, 2, [TensorSpec("float32", (0, 7), 0)], NO_PARENT),
        (
            "many",
            Shard(65535, 65534, 65535),
            2**48,
            2**31 - 1,
            [TensorSpec("float8_e4m3fn", (3,), 3), TensorSpec("int64", (1,) * 16, 8), TensorSpec("x" * 64, (2,), 32)],
            b"\xff" * 32,
        ),
    ]
    made = [(label, envelope(label, *rest)) for label, *rest in cases]  # type: ignore[arg-type]
    return [(label, one, filler(f"{label}/payload", one.payload_size)) for label, one in made]


def sealed(one: Envelope, payload: bytes) -> bytes:
    """The object's bytes."""
    return encode_header(stored_object(one, [payload])) + payload


def resealed(data: bytes) -> bytes:
    """The same header with a digest that fits: what a writer with other ideas would write."""
    size = struct.unpack_from("<I", data, 12)[0]
    return data[: size - 32] + hashlib.sha256(data[: size - 32]).digest() + data[size:]


def changed(data: bytes, offset: int, form: str, value: int) -> bytes:
    """The object with one field set."""
    copy = bytearray(data)
    struct.pack_into(form, copy, offset, value)
    return bytes(copy)


def refused() -> list[Case]:
    """Damaged, foreign and hostile objects."""
    _, one, payload = objects()[0]
    good, shard = sealed(one, payload), one.id.shard
    other = ObjectId(one.id.root, filler("another", 32), shard)
    last = len(good) - 1
    cases: list[tuple[str, bytes, ObjectId]] = [
        ("nothing", b"", one.id),
        ("another magic", b"PK\x03\x04" + good[4:], one.id),
        ("header cut", good[:100], one.id),
        ("payload cut", good[:-1], one.id),
        ("a byte after the payload", good + b"\0", one.id),
        ("a later schema", resealed(changed(good, 8, "<I", STORAGE_SCHEMA + 1)), one.id),
        ("an earlier schema", resealed(changed(good, 8, "<I", STORAGE_SCHEMA - 1)), one.id),
        ("a header of 2**32 - 1 bytes", changed(good, 12, "<I", 2**32 - 1), one.id),
        ("a bit of the root flipped", changed(good, 16, "<B", good[16] ^ 1), one.id),
        ("a bit of the payload flipped", changed(good, last, "<B", good[last] ^ 128), one.id),
        ("asked for another key", good, other),
        ("asked for another root", good, ObjectId(filler("other root", 32), one.id.key, shard)),
        ("asked for another rank", good, ObjectId(one.id.root, one.id.key, Shard(2, 1, 0))),
        ("rank not below world", resealed(changed(good, 116, "<I", 1)), one.id),
        ("no tokens", resealed(changed(good, 124, "<I", 0)), one.id),
        ("start beyond the bound", resealed(changed(good, 128, "<Q", 2**48 + 1)), one.id),
        ("payload size that is not the tensors'", resealed(changed(good, 136, "<Q", 17)), one.id),
        ("no tensors", resealed(changed(good, 176, "<I", 0)), one.id),
        ("more tensors than there are", resealed(changed(good, 176, "<I", 2)), one.id),
        ("dtype in capitals", resealed(changed(good, 181, "<B", ord("B"))), one.id),
        ("seventeen dimensions", resealed(changed(good, 189, "<B", 17)), one.id),
        ("a fraction of a byte for each element", resealed(changed(good, 190, "<Q", 3)), one.id),
    ]
    return [
        {"case": case, "object": data.hex(), "asked": identity(*asked), "reason": reason_of(data, asked)}
        for case, data, asked in cases
    ]


def reason_of(data: bytes, asked: ObjectId) -> str:
    """Why the bytes are a miss."""
    try:
        open_object(data, asked)
    except EnvelopeError as error:
        return error.reason.name.lower()
    raise AssertionError("a case of the refused ones was opened")


def content() -> Case:
    """The whole file."""
    space = KeySpace("org/m\u00f6del", chunk_size=16, kv_dtype="bfloat16", attributes={"rope": "default", "a": "b"})
    return {
        "provenance": PROVENANCE,
        "storage_schema": STORAGE_SCHEMA,
        "names": names(),
        "no_names": no_names(),
        "objects": [
            identity(*one.id)
            | {
                "case": label,
                "parent": one.parent.hex(),
                "start": one.start,
                "n_tokens": one.n_tokens,
                "tensors": [
                    {"dtype": tensor.dtype, "shape": list(tensor.shape), "size": tensor.size} for tensor in one.tensors
                ],
                "payload": payload.hex(),
                "object": sealed(one, payload).hex(),
            }
            for label, one, payload in objects()
        ],
        "refused": refused(),
        "description": {
            "name": f"xk2/{space.root[:16].hex()}/space.json",
            "fields": json.loads(format_description(space)),
        },
    }


def main() -> int:
    """Write or check the file."""
    text = json.dumps(content(), indent=1, ensure_ascii=True) + "\n"
    if "--check" in sys.argv[1:]:
        if TARGET.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write(
            f"{TARGET.name} differs from what {Path(__file__).name} makes: a changed vector is another schema\n"
        )
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
