"""Re-derive every value in the key-schema-2 vector files, from the specification alone.

Owns a second implementation of docs/spec/key-schema-2.md: encoder, refusals and decoder, on the standard library only.
It imports nothing of this project, so agreement with `keying` means that two readings of the text agree.

    python verify_independent.py FILE...

Exit status: 0 when every value agrees, 1 at the first file with differences (each is printed with the case and the
field), 2 when a file cannot be used at all. Numbers such as "9.7" are sections of the specification.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

MAX_BYTES = 4096
MAX_POSITION = 2**48
MAX_COUNT = {"mm": 65_536, "lora": 64, "tag": 64}
REQUEST_LOCAL = re.compile(r"(^|:)renderer[0-9]+-mm-[0-9]+-[a-z_]+-[0-9]+\Z")
RESOLVED_DTYPE = re.compile(r"[a-z0-9_]+\Z")


class RefusedError(Exception):
    """The specification refuses this input; `rule` is the section that says so."""

    def __init__(self, rule: str) -> None:
        super().__init__(f"refused by §{rule}")
        self.rule = rule


class UnusableFileError(Exception):
    """The file is not a vector file that this program can check."""


# --- primitives (section 1) ------------------------------------------------------------------------------------------


def u8(value: int) -> bytes:
    """One unsigned byte."""
    return struct.pack("<B", value)


def u32(value: int) -> bytes:
    """Four bytes, unsigned, little-endian."""
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    """Eight bytes, unsigned, little-endian."""
    return struct.pack("<Q", value)


def i64(value: int) -> bytes:
    """Eight bytes, signed, little-endian."""
    return struct.pack("<q", value)


def framed(value: bytes) -> bytes:
    """`bytes(b)`: the length, then the bytes."""
    return u32(len(value)) + value


def text(value: str) -> bytes:
    """`text(s)`: framed UTF-8, as it is."""
    return framed(value.encode("utf-8"))


def sha256(value: bytes) -> bytes:
    """`H`, 32 bytes."""
    return hashlib.sha256(value).digest()


# --- checks on the way in (sections 8 and 9) -------------------------------------------------------------------------


def checked_text(value: Any, *, may_be_empty: bool = False) -> str:
    """A text within its bounds; the cheap bound comes first."""
    if not isinstance(value, str):
        raise RefusedError("9.1")
    if len(value) > MAX_BYTES:  # no character is shorter than one byte
        raise RefusedError("9.2")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise RefusedError("9.3") from None
    if size > MAX_BYTES:
        raise RefusedError("9.2")
    if not size and not may_be_empty:
        raise RefusedError("9.4")
    return value


def checked_int(value: Any) -> int:
    """An integer that is no boolean."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedError("9.1")
    return value


def checked_position(value: Any) -> int:
    """An integer in [0, 2**48]."""
    position = checked_int(value)
    if not 0 <= position <= MAX_POSITION:
        raise RefusedError("9.7")
    return position


def checked_range(offset: Any, length: Any) -> tuple[int, int]:
    """A start and a size whose sum is a position too."""
    start, size = checked_position(offset), checked_position(length)
    if start + size > MAX_POSITION:
        raise RefusedError("9.7")
    return start, size


def checked_bytes(value: Any) -> bytes:
    """Bytes stand in the file as hex, and anything that is not hex stands for a value that is not bytes."""
    if not isinstance(value, str):
        raise RefusedError("9.1")
    return bytes.fromhex(value)


def root_preimage(space: dict[str, Any]) -> bytes:
    """The bytes whose digest is the root (section 2)."""
    unknown = set(space) - {"model", "chunk_size", "kv_dtype", "model_revision", "kv_layout", "attributes"}
    if unknown:
        raise UnusableFileError(f"space has unknown fields {sorted(unknown)}")
    model = checked_text(space["model"])
    revision = checked_text(space.get("model_revision", ""), may_be_empty=True)
    kv_dtype = checked_text(space["kv_dtype"])
    if kv_dtype == "auto" or not RESOLVED_DTYPE.match(kv_dtype):
        raise RefusedError("9.5")
    chunk_size = checked_int(space["chunk_size"])
    if not 1 <= chunk_size < 2**31:
        raise RefusedError("9.6")
    layout = checked_text(space.get("kv_layout", ""), may_be_empty=True)
    attributes = space.get("attributes", {})
    if not isinstance(attributes, dict):
        raise RefusedError("9.1")
    pairs = [(checked_text(name), checked_text(value, may_be_empty=True)) for name, value in attributes.items()]
    pairs.sort(key=lambda pair: pair[0].encode("utf-8"))
    out = text("xk2/space") + text(model) + text(revision) + text(kv_dtype) + u32(chunk_size) + text(layout)
    return out + u32(len(pairs)) + b"".join(text(name) + text(value) for name, value in pairs)


def checked_tokens(tokens: Any) -> list[int]:
    """Tokens within their bounds (section 3)."""
    if not isinstance(tokens, list):
        raise RefusedError("9.20")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RefusedError("9.18")
    if not all(0 <= token < 2**32 for token in tokens):
        raise RefusedError("9.19")
    return tokens


def checked_extra_key(entry: list[Any]) -> tuple[Any, ...]:
    """One entry of the file, checked on its own."""
    kind, *fields = entry
    match kind, fields:
        case "mm", [identifier, offset, length]:
            if REQUEST_LOCAL.search(checked_text(identifier)):
                raise RefusedError("9.8")
            return ("mm", identifier, *checked_range(offset, length))
        case "lora", [name, revision, start]:
            return ("lora", checked_text(name), checked_text(revision, may_be_empty=True), checked_position(start))
        case "salt", [value]:
            return ("salt", checked_text(value))
        case "embeds", [offset, rows, row_bytes, dtype]:
            data = checked_bytes(rows)
            if not 1 <= checked_int(row_bytes) < 2**32 or len(data) % row_bytes:
                raise RefusedError("9.9")
            start, _ = checked_range(offset, len(data) // row_bytes)
            return ("embeds", start, data, row_bytes, checked_text(dtype))
        case "tag", [name, value, start]:
            if checked_text(name).startswith("xk."):
                raise RefusedError("9.17")
            data = checked_bytes(value)
            if len(data) > MAX_BYTES:
                raise RefusedError("9.2")
            return ("tag", name, data, checked_position(start))
        case _:
            raise RefusedError("9.16")


def checked_extra_keys(entries: list[list[Any]]) -> list[tuple[Any, ...]]:
    """All the extra keys of a prompt, checked against each other, with touching embeddings merged (section 5.4)."""
    keys = [checked_extra_key(entry) for entry in entries]
    for kind, most in MAX_COUNT.items():
        if sum(key[0] == kind for key in keys) > most:
            raise RefusedError("9.15")
    identities = {"mm": slice(1, 4), "lora": slice(1, 3), "tag": slice(1, 2), "salt": slice(1, 1)}
    rules = {"mm": "9.11", "lora": "9.12", "tag": "9.13", "salt": "9.14"}
    for kind, identity in identities.items():
        named = [key[identity] for key in keys if key[0] == kind]
        if len(named) != len(set(named)):
            raise RefusedError(rules[kind])
    embeds = sorted((key for key in keys if key[0] == "embeds" and key[2]), key=lambda key: key[1])
    merged: list[tuple[Any, ...]] = []
    for key in embeds:
        if merged:
            _, offset, rows, row_bytes, dtype = merged[-1]
            stop = offset + len(rows) // row_bytes
            if key[1] < stop:
                raise RefusedError("9.10")
            if key[1] == stop and (row_bytes, dtype) == key[3:]:
                merged[-1] = ("embeds", offset, rows + key[2], row_bytes, dtype)
                continue
        merged.append(key)
    return [key for key in keys if key[0] != "embeds"] + merged


# --- parts, chunks, segments (sections 5, 6, 7) ----------------------------------------------------------------------


def fields_in(key: tuple[Any, ...], start: int, stop: int) -> list[Any] | None:
    """What a decoder must read back from the part of `key` in the chunk [start, stop); None where it has no part."""
    match key:
        case "mm", identifier, offset, length:
            lo, hi, out = offset, offset + length, ["mm", identifier, offset - start, length]
        case "lora", name, revision, first:
            lo, hi, out = first, stop, ["lora", name, revision, max(0, first - start)]
        case "salt", value:
            lo, hi, out = 0, stop, ["salt", value]
        case "tag", name, value, first:
            lo, hi, out = first, stop, ["tag", name, value.hex(), max(0, first - start)]
        case _:
            _, offset, rows, row_bytes, dtype = key
            lo, hi = offset, offset + len(rows) // row_bytes
            first, last = max(lo, start), min(hi, stop)
            inside = rows[(first - lo) * row_bytes : max(first - lo, last - lo) * row_bytes]
            digest = sha256(text("xk2/embeds") + text(dtype) + u32(row_bytes) + inside)
            out = ["embeds", first - start, last - first, digest.hex()]
    return out if max(lo, start) < min(hi, stop) else None


def part(fields: list[Any]) -> bytes:
    """One encoded part (section 5), from the fields that a decoder gives."""
    match fields:
        case "mm", identifier, offset, length:
            return u8(1) + framed(text(identifier) + i64(offset) + u64(length))
        case "lora", name, revision, start:
            return u8(2) + framed(text(name) + text(revision) + u64(start))
        case "salt", value:
            return u8(3) + framed(text(value))
        case "embeds", first, rows, digest:
            return u8(4) + framed(u64(first) + u64(rows) + framed(bytes.fromhex(digest)))
        case "tag", name, value, start:
            return u8(5) + framed(text(name) + framed(bytes.fromhex(value)) + u64(start))
        case "unknown", kind, payload:
            return u8(kind) + framed(bytes.fromhex(payload))
        case _:
            raise UnusableFileError(f"no part of the form {fields[:1]}")


class Chunk:
    """One chunk or segment: its pre-image, its encoded parts, and what decoding must give back."""

    def __init__(self, tag: str, parent: bytes, tokens: list[int], keys: list[tuple[Any, ...]], start: int) -> None:
        stop = start + len(tokens)
        present = [fields for fields in (fields_in(key, start, stop) for key in keys) if fields]
        pairs = sorted((part(fields), fields) for fields in present)
        self.parts = [encoded for encoded, _ in pairs]
        self.preimage = (
            text(tag)
            + parent
            + u32(len(tokens))
            + struct.pack(f"<{len(tokens)}I", *tokens)
            + u32(len(self.parts))
            + b"".join(self.parts)
        )
        self.digest = sha256(self.preimage)
        self.decoded = {
            "form": tag.removeprefix("xk2/"),
            "parent": parent.hex(),
            "tokens": tokens,
            "parts": [fields for _, fields in pairs],
        }


def derive_chunks(case: dict[str, Any]) -> list[Chunk]:
    """The chunks of a case, in order (section 6)."""
    parent = sha256(root_preimage(case["space"]))
    tokens = checked_tokens(case["tokens"])
    keys = checked_extra_keys(extra_keys_of(case))
    size = case["space"]["chunk_size"]
    chunks = []
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        if len(piece) == size or case["partial_tail"]:
            chunks.append(Chunk("xk2/chunk", parent, piece, keys, start))
            parent = chunks[-1].digest
    return chunks


def derive_segment(case: dict[str, Any], tokens: Any, start: Any) -> Chunk:
    """The segment of `tokens`, which begin at `start` (section 7)."""
    root = sha256(root_preimage(case["space"]))
    tokens = checked_tokens(tokens)
    if not tokens:
        raise RefusedError("9.21")
    checked_range(start, len(tokens))
    return Chunk("xk2/segment", root, tokens, checked_extra_keys(extra_keys_of(case)), start)


def extra_keys_of(case: dict[str, Any]) -> list[list[Any]]:
    """The extra keys of a case; `repeated_extra_keys` stands for long lists, with {i} counting from 0."""
    keys: list[list[Any]] = list(case["extra_keys"])
    repeated = case.get("repeated_extra_keys")
    if repeated:
        keys += [
            [f.replace("{i}", str(i)) if isinstance(f, str) else f for f in repeated["template"]]
            for i in range(repeated["count"])
        ]
    return keys


# --- decoder (section 11) --------------------------------------------------------------------------------------------


class Reader:
    """Takes fields off the front of some bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self.data) - self.at:
            raise RefusedError("11.2")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        """The next number of a struct format."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def framed(self, most: int | None = None) -> bytes:
        """The next framed bytes; `most` bounds them before they are looked at."""
        size = self.number("<I")
        if most is not None and size > most:
            raise RefusedError("11.5")
        return self.take(size)

    def text(self, *, may_be_empty: bool = False) -> str:
        """The next text."""
        raw = self.framed(MAX_BYTES)
        if not raw and not may_be_empty:
            raise RefusedError("11.6")
        try:
            return raw.decode("utf-8", "strict")
        except UnicodeDecodeError:
            raise RefusedError("11.4") from None

    def end(self) -> None:
        """Nothing may be left."""
        if self.at != len(self.data):
            raise RefusedError("11.3")


def decode(data: bytes) -> dict[str, Any]:
    """The fields of a pre-image of any of the three forms."""
    for form in ("space", "chunk", "segment"):
        tag = text(f"xk2/{form}")
        if data.startswith(tag):
            reader = Reader(data[len(tag) :])
            out = decode_space(reader) if form == "space" else decode_chunk(reader)
            reader.end()
            return {"form": form, **out}
    raise RefusedError("11.1")


def decode_space(reader: Reader) -> dict[str, Any]:
    """The fields behind the domain tag of a space."""
    model = reader.text()
    revision = reader.text(may_be_empty=True)
    kv_dtype = reader.text()
    chunk_size = reader.number("<I")
    if kv_dtype == "auto" or not RESOLVED_DTYPE.match(kv_dtype) or not 1 <= chunk_size < 2**31:
        raise RefusedError("11.7")
    layout = reader.text(may_be_empty=True)
    attributes: dict[str, str] = {}
    last = b""
    for _ in range(reader.number("<I")):
        name = reader.text()
        if name.encode() <= last:
            raise RefusedError("11.8")
        last = name.encode()
        attributes[name] = reader.text(may_be_empty=True)
    return {
        "model": model,
        "model_revision": revision,
        "kv_dtype": kv_dtype,
        "chunk_size": chunk_size,
        "kv_layout": layout,
        "attributes": attributes,
    }


def decode_chunk(reader: Reader) -> dict[str, Any]:
    """The fields behind the domain tag of a chunk or a segment."""
    parent = reader.take(32)
    n_tokens = reader.number("<I")
    if not n_tokens:
        raise RefusedError("11.9")
    tokens = list(struct.unpack(f"<{n_tokens}I", reader.take(4 * n_tokens)))
    parts: list[list[Any]] = []
    last = b""
    for _ in range(reader.number("<I")):
        start = reader.at
        kind = reader.number("<B")
        payload = Reader(reader.framed())
        fields = decode_part(kind, payload, n_tokens)
        payload.end()
        encoded = reader.data[start : reader.at]
        if encoded <= last:
            raise RefusedError("11.11")
        last = encoded
        parts.append(fields)
    check_together(parts, n_tokens)
    return {"parent": parent.hex(), "tokens": tokens, "parts": parts}


def decode_part(kind: int, payload: Reader, n_tokens: int) -> list[Any]:
    """The fields of one part, checked on its own."""
    if kind == 0 or kind >= 128:
        raise RefusedError("11.10")
    if kind == 1:
        identifier = payload.text()
        if REQUEST_LOCAL.search(identifier):
            raise RefusedError("11.18")
        offset, length = payload.number("<q"), payload.number("<Q")
        if offset < -MAX_POSITION or length > MAX_POSITION or max(0, offset) + length > MAX_POSITION:
            raise RefusedError("11.13")
        if not max(0, offset) < min(n_tokens, offset + length):
            raise RefusedError("11.12")
        return ["mm", identifier, offset, length]
    if kind == 2:
        return ["lora", payload.text(), payload.text(may_be_empty=True), decode_start(payload, n_tokens)]
    if kind == 3:
        return ["salt", payload.text()]
    if kind == 4:
        first, rows, digest = payload.number("<Q"), payload.number("<Q"), payload.framed()
        if max(first, rows, first + rows) > MAX_POSITION:
            raise RefusedError("11.13")
        if len(digest) != 32:
            raise RefusedError("11.14")
        if not rows or first >= n_tokens:
            raise RefusedError("11.12")
        if first + rows > n_tokens:
            raise RefusedError("11.15")
        return ["embeds", first, rows, digest.hex()]
    if kind == 5:
        name = payload.text()
        if name.startswith("xk."):
            raise RefusedError("11.18")
        return ["tag", name, payload.framed(MAX_BYTES).hex(), decode_start(payload, n_tokens)]
    rest = payload.take(len(payload.data) - payload.at)
    return ["unknown", kind, rest.hex()]


def decode_start(payload: Reader, n_tokens: int) -> int:
    """Where an adapter or a tag begins in the chunk."""
    start = payload.number("<Q")
    if start > MAX_POSITION:
        raise RefusedError("11.13")
    if start >= n_tokens:
        raise RefusedError("11.12")
    return start


def check_together(parts: list[list[Any]], n_tokens: int) -> None:
    """What only shows when the parts are seen together."""
    for kind, most in MAX_COUNT.items():
        if sum(fields[0] == kind for fields in parts) > most:
            raise RefusedError("11.17")
    for kind, identity in {"lora": slice(1, 3), "tag": slice(1, 2), "salt": slice(1, 1)}.items():
        named = [tuple(fields[identity]) for fields in parts if fields[0] == kind]
        if len(named) != len(set(named)):
            raise RefusedError("11.16")
    rows = sorted((fields[1], fields[1] + fields[2]) for fields in parts if fields[0] == "embeds")
    if any(right[0] < left[1] for left, right in pairwise(rows)):
        raise RefusedError("11.15")
    earliest = max([0, *(-fields[2] for fields in parts if fields[0] == "mm")])
    if any(earliest + end_of(fields) > MAX_POSITION for fields in parts):
        raise RefusedError("11.13")


def end_of(fields: list[Any]) -> int:
    """How far after the chunk's start a part says that something begins or ends."""
    if fields[0] == "mm":
        return int(fields[2] + fields[3])
    if fields[0] == "embeds":
        return int(fields[1] + fields[2])
    return int(fields[3]) if fields[0] in {"lora", "tag"} else 0


# --- comparing with a file -------------------------------------------------------------------------------------------

CASE_FIELDS = {
    "name",
    "space",
    "tokens",
    "extra_keys",
    "repeated_extra_keys",
    "partial_tail",
    "root",
    "keys",
    "segment",
}
CASE_FIELDS |= {"parts_of_chunks", "preimage_of_root", "preimage_of_chunk_0", "preimages"}


class Checker:
    """Compares the values of one file and keeps the differences."""

    def __init__(self) -> None:
        self.differences: list[str] = []
        self.values = 0

    def same(self, name: str, field: str, derived: Any, given: Any) -> None:
        """Count a value, and note it if it differs."""
        self.values += 1
        if derived != given:
            self.differences.append(f"{name}: {field}: derived {short(derived)}, file has {short(given)}")

    def refused(self, name: str, rule: str, call: Any) -> None:
        """Note it if `call` is not refused by `rule`."""
        self.values += 1
        try:
            call()
        except RefusedError as refusal:
            self.same(name, "rule", refusal.rule, rule)
        else:
            self.differences.append(f"{name}: must be refused by §{rule}, and was accepted")

    def decodes_to(self, name: str, field: str, preimage_hex: str, wanted: dict[str, Any]) -> None:
        """Note it if a pre-image does not decode to `wanted`."""
        try:
            self.same(name, f"{field}, decoded", decode(bytes.fromhex(preimage_hex)), wanted)
        except RefusedError as refusal:
            self.differences.append(f"{name}: {field}: decoder refuses it by §{refusal.rule}")

    def case(self, case: dict[str, Any]) -> None:
        """Every value of one case."""
        name = case["name"]
        unknown = set(case) - CASE_FIELDS
        if unknown:
            raise UnusableFileError(f"case {name!r} has fields that nobody checks: {sorted(unknown)}")
        root = root_preimage(case["space"])
        self.same(name, "root", sha256(root).hex(), case["root"])
        defaults = {"model_revision": "", "kv_layout": "", "attributes": {}}
        self.decodes_to(name, "preimage_of_root", root.hex(), {"form": "space", **defaults, **case["space"]})
        chunks = derive_chunks(case)
        self.same(name, "keys", [chunk.digest.hex() for chunk in chunks], case["keys"])
        for i, chunk in enumerate(chunks):
            self.decodes_to(name, f"preimage of chunk {i}", chunk.preimage.hex(), chunk.decoded)
        if "preimage_of_root" in case:
            self.same(name, "preimage_of_root", root.hex(), case["preimage_of_root"])
        if "parts_of_chunks" in case:
            parts = [[encoded.hex() for encoded in chunk.parts] for chunk in chunks]
            self.same(name, "parts_of_chunks", parts, case["parts_of_chunks"])
        if "preimages" in case:
            self.same(name, "preimages", [chunk.preimage.hex() for chunk in chunks], case["preimages"])
        if "preimage_of_chunk_0" in case:
            self.same(name, "preimage_of_chunk_0", chunks[0].preimage.hex(), case["preimage_of_chunk_0"])
        if "segment" in case:
            self.segment(name, case, case["segment"])

    def segment(self, name: str, case: dict[str, Any], given: dict[str, Any]) -> None:
        """Every value of a case's segment."""
        unknown = set(given) - {"start", "stop", "key", "parts", "preimage"}
        if unknown:
            raise UnusableFileError(f"segment of {name!r} has fields that nobody checks: {sorted(unknown)}")
        segment = derive_segment(case, case["tokens"][given["start"] : given["stop"]], given["start"])
        self.same(name, "segment key", segment.digest.hex(), given["key"])
        self.decodes_to(name, "preimage of the segment", segment.preimage.hex(), segment.decoded)
        if "parts" in given:
            self.same(name, "segment parts", [encoded.hex() for encoded in segment.parts], given["parts"])
        if "preimage" in given:
            self.same(name, "segment preimage", segment.preimage.hex(), given["preimage"])

    def refusal(self, case: dict[str, Any]) -> None:
        """An input that must be refused."""
        if "segment_start" in case:
            self.refused(
                case["name"], case["rule"], lambda: derive_segment(case, case["tokens"], case["segment_start"])
            )
        else:
            self.refused(case["name"], case["rule"], lambda: derive_chunks(case))

    def tunnel(self, given: dict[str, Any]) -> None:
        """The values that a key expands to for a server that was never upgraded."""
        key, size = bytes.fromhex(given["key"]), given["chunk_size"]
        values: list[int] = []
        for i in range(-(-size // 8)):
            values += struct.unpack("<8I", sha256(text("xk2/tunnel") + key + u32(i)))
        self.same("tunnel", "values", [value & 0x7FFFFFFF for value in values[:size]], given["values"])


def short(value: Any) -> str:
    """A value as text that fits a line."""
    shown = json.dumps(value)
    return shown if len(shown) <= 200 else f"{shown[:160]}... ({len(shown)} characters)"


def check_file(path: Path) -> tuple[str, list[str]]:
    """A one-line count for `path`, and its differences."""
    content = json.loads(path.read_text(encoding="utf-8"))
    known = {
        "key_schema",
        "note",
        "provenance",
        "cases",
        "tunnel",
        "refusals",
        "accepted_preimages",
        "refused_preimages",
    }
    if not isinstance(content, dict) or set(content) - known or content.get("key_schema") != 2:
        raise UnusableFileError("is not a vector file of key schema 2, or has sections that nobody checks")
    if not content.get("cases"):
        raise UnusableFileError("has no cases")
    checker = Checker()
    for case in content["cases"]:
        checker.case(case)
    for case in content.get("refusals", []):
        checker.refusal(case)
    for case in content.get("accepted_preimages", []):
        checker.decodes_to(case["name"], "preimage", case["preimage"], case["decoded"])
        if case["decoded"]["form"] != "space":
            encoded = b"".join(part(fields) for fields in case["decoded"]["parts"]).hex()
            checker.same(case["name"], "parts, encoded again", case["preimage"].endswith(encoded), True)
    for case in content.get("refused_preimages", []):
        checker.refused(case["name"], case["rule"], partial(decode, bytes.fromhex(case["preimage"])))
    if "tunnel" in content:
        checker.tunnel(content["tunnel"])
    counts = ", ".join(f"{len(content[name])} {name}" for name in sorted(known) if isinstance(content.get(name), list))
    return f"{path.name}: {counts}, {checker.values} values compared", checker.differences


def main(arguments: list[str]) -> int:
    """Check each file; the exit status."""
    if not arguments:
        sys.stderr.write("usage: verify_independent.py FILE...\n")
        return 2
    for argument in arguments:
        try:
            count, differences = check_file(Path(argument))
        except (UnusableFileError, OSError, KeyError, TypeError, ValueError, struct.error, RefusedError) as reason:
            sys.stderr.write(f"{argument}: cannot be checked: {type(reason).__name__}: {reason}\n")
            return 2
        if differences:
            sys.stderr.write("\n".join(f"{argument}: {difference}" for difference in differences[:20]) + "\n")
            sys.stderr.write(f"{argument}: {len(differences)} differences\n")
            return 1
        sys.stdout.write(count + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
