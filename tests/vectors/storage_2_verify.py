"""Check storage-2.json by docs/spec/storage-2.md, with the standard library alone.

Shares no code with the project and imports nothing of it: it is what somebody would write who has the page and no more.

    python tests/vectors/storage_2_verify.py [FILE ...]    exit status 1, and a line for each case that is wrong
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HEX = "0123456789abcdef"
BOUNDS = (223, 207060)
Case = dict[str, Any]
Place = tuple[int, int, int]


class MissError(Exception):
    """A reader's reason."""


def number(text: str) -> int:
    """A decimal number of the names' grammar."""
    if not (1 <= len(text) <= 5 and all(c in "0123456789" for c in text)) or (text[0] == "0" and text != "0"):
        raise ValueError(text)
    return int(text)


def parse(name: str) -> tuple[bytes, bytes, Place]:
    """Root prefix, key and shard of a name; ValueError for any other string."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "xk2":
        raise ValueError("shape")
    _, prefix, key, shard = parts
    for text, size in ((prefix, 32), (key, 64)):
        if len(text) != size or any(c not in HEX for c in text):
            raise ValueError("hex")
    if not shard.startswith("w"):
        raise ValueError("shard")
    world, rest = shard[1:].split("r")
    rank, group = (number(text) for text in rest.split("g"))
    world = number(world)
    if not (1 <= world <= 65535 and rank < world and group <= 65535):
        raise ValueError("range")
    return bytes.fromhex(prefix), bytes.fromhex(key), (world, rank, group)


def shard_of(case: Case) -> Place:
    """World, rank and group of a case."""
    return case["world"], case["rank"], case["group"]


def write(case: Case) -> bytes:
    """The object of a case, by section 3."""
    payload = bytes.fromhex(case["payload"])
    tensors = b""
    for tensor in case["tensors"]:
        dtype = tensor["dtype"].encode("ascii")
        tensors += bytes([len(dtype)]) + dtype + bytes([len(tensor["shape"])])
        tensors += b"".join(struct.pack("<Q", extent) for extent in tensor["shape"]) + struct.pack("<Q", tensor["size"])
    size = 180 + len(tensors) + 32
    header = bytes.fromhex("89584b450d0a1a0a") + struct.pack("<II", 2, size)
    header += bytes.fromhex(case["root"]) + bytes.fromhex(case["key"]) + bytes.fromhex(case["parent"])
    header += struct.pack("<IIIIQQ", *shard_of(case), case["n_tokens"], case["start"], len(payload))
    header += hashlib.sha256(payload).digest() + struct.pack("<I", len(case["tensors"])) + tensors
    return header + hashlib.sha256(header).digest() + payload


def need(condition: bool, reason: str) -> None:
    """Miss unless the condition holds."""
    if not condition:
        raise MissError(reason)


def read(data: bytes, root: bytes, key: bytes, shard: Place) -> Case:
    """Fields and payload of an object, by section 4; MissError with the reason."""
    invalid = "envelope_invalid"
    need(len(data) >= 16 and data[:8] == bytes.fromhex("89584b450d0a1a0a"), invalid)
    schema, size = struct.unpack_from("<II", data, 8)
    need(schema <= 2, "schema_too_new")
    need(schema >= 2, "schema_retired")
    need(BOUNDS[0] <= size <= BOUNDS[1] and len(data) >= size, invalid)
    need(hashlib.sha256(data[: size - 32]).digest() == data[size - 32 : size], "checksum")
    got_root, got_key, parent = data[16:48], data[48:80], data[80:112]
    world, rank, group, n_tokens, start, payload_size = struct.unpack_from("<IIIIQQ", data, 112)
    (n_tensors,) = struct.unpack_from("<I", data, 176)
    need(1 <= world <= 65535 and rank < world and group <= 65535, invalid)
    need(1 <= n_tokens < 2**31 and start <= 2**48 and payload_size <= 2**40 and 1 <= n_tensors <= 1024, invalid)
    at, end, tensors = 180, size - 32, []
    for _ in range(n_tensors):
        need(at < end, invalid)
        length = data[at]
        dtype = data[at + 1 : at + 1 + length]
        at += 1 + length
        need(
            1 <= length <= 64 and at < end and all(chr(c) in "abcdefghijklmnopqrstuvwxyz0123456789_" for c in dtype),
            invalid,
        )
        dims = data[at]
        at += 1
        need(dims <= 16 and at + 8 * (dims + 1) <= end, invalid)
        *shape, tensor_size = struct.unpack_from(f"<{dims + 1}Q", data, at)
        at += 8 * (dims + 1)
        elements = 1
        for extent in shape:
            need(extent < 2**40, invalid)
            elements *= extent
        need(elements <= 2**48, invalid)
        width, left = divmod(tensor_size, elements) if elements else (1, tensor_size)
        need(left == 0 and 1 <= width <= 16, invalid)
        tensors.append({"dtype": dtype.decode(), "shape": shape, "size": tensor_size})
    need(at == end and sum(tensor["size"] for tensor in tensors) == payload_size, invalid)
    need((got_root, got_key, (world, rank, group)) == (root, key, shard), "identity_mismatch")
    need(len(data) == size + payload_size, invalid)
    need(hashlib.sha256(data[size:]).digest() == data[144:176], "checksum")
    return {
        "parent": parent.hex(),
        "start": start,
        "n_tokens": n_tokens,
        "tensors": tensors,
        "payload": data[size:].hex(),
    }


def framed(text: str) -> bytes:
    """A text with its length before it."""
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def root_of(fields: Case) -> bytes:
    """The root that a description's fields have (key-schema-2.md)."""
    attributes = sorted(fields["attributes"].items(), key=lambda pair: pair[0].encode())
    data = framed("xk2/space") + framed(fields["model"]) + framed(fields["model_revision"]) + framed(fields["kv_dtype"])
    data += struct.pack("<I", fields["chunk_size"]) + framed(fields["kv_layout"]) + struct.pack("<I", len(attributes))
    return hashlib.sha256(data + b"".join(framed(name) + framed(value) for name, value in attributes)).digest()


def check(content: Case) -> Iterator[str]:
    """Yield a line for each case that is wrong."""
    if content["storage_schema"] != 2:
        yield "storage_schema"
    for case in content["names"]:
        key, root = bytes.fromhex(case["key"]), bytes.fromhex(case["root"])
        name = f"xk2/{root[:16].hex()}/{key.hex()}/w{case['world']}r{case['rank']}g{case['group']}"
        if case["name"] != name or parse(case["name"]) != (root[:16], key, shard_of(case)):
            yield f"names: {case['name']}"
    for name in content["no_names"]:
        try:
            parse(name)
        except ValueError:
            continue
        yield f"no_names: {name!r} was parsed"
    for case in content["objects"]:
        if write(case).hex() != case["object"]:
            yield f"objects: {case['case']}: written differently"
        try:
            got = read(
                bytes.fromhex(case["object"]), bytes.fromhex(case["root"]), bytes.fromhex(case["key"]), shard_of(case)
            )
        except MissError as miss:
            yield f"objects: {case['case']}: {miss}"
            continue
        if any(got[field] != case[field] for field in got):
            yield f"objects: {case['case']}: read differently"
    for case in content["refused"]:
        asked = case["asked"]
        try:
            read(
                bytes.fromhex(case["object"]),
                bytes.fromhex(asked["root"]),
                bytes.fromhex(asked["key"]),
                shard_of(asked),
            )
        except MissError as miss:
            if str(miss) != case["reason"]:
                yield f"refused: {case['case']}: {miss}, not {case['reason']}"
            continue
        yield f"refused: {case['case']}: was opened"
    description = content["description"]
    root = root_of(description["fields"]).hex()
    if description["fields"]["root"] != root or description["name"] != f"xk2/{root[:32]}/space.json":
        yield "description: the root is another one"


def main(files: list[str]) -> int:
    """Check files; the number of wrong cases."""
    wrong = 0
    for file in files:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        for line in check(content):
            wrong += 1
            sys.stdout.write(f"{Path(file).name}: {line}\n")
        count = 1 + sum(len(content[part]) for part in ("names", "no_names", "objects", "refused"))
        sys.stdout.write(f"{Path(file).name}: {count} cases\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [str(Path(__file__).with_name("storage-2.json"))]))
