"""Reads `wire-2.json` from the specification alone: `python tests/vectors/wire_2_verify.py [FILE]`.

Standard library only, and nothing of this project is imported. Checks, for every message: the leading frames, the fixed
prelude, the body (decoded here, and encoded again to the same bytes), the payload against the descriptions; then the
transcript digest, the root of the space in hello and welcome, and that the lookup by tokens and extra keys names the
same chunks as the lookup by digests.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int16": 2, "int32": 4, "int64": 8}


class DifferenceError(Exception):
    """A vector is not what the specification says."""


def must(holds: bool, what: str) -> None:
    """Say what is wrong, also where asserts are off."""
    if not holds:
        raise DifferenceError(what)


class Bin(bytes):
    """msgpack's bin."""


def decode(data: bytes) -> Any:
    """One msgpack value that fills `data`; maps as lists of pairs, so that order and repeats show."""
    value, rest = _value(data)
    must(not rest, "trailing bytes")
    return value


def _value(d: bytes) -> tuple[Any, bytes]:
    head, rest = d[0], d[1:]
    if head < 0x80:
        return head, rest
    if head < 0x90:
        return _pairs(head & 15, rest)
    if head < 0xA0:
        return _items(head & 15, rest)
    if head < 0xC0:
        return rest[: head & 31].decode(), rest[head & 31 :]
    if head in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[head], rest
    if head in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB):
        width = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}[head]
        n, rest = int.from_bytes(rest[:width], "big"), rest[width:]
        return (Bin(rest[:n]) if head < 0xC7 else rest[:n].decode()), rest[n:]
    if head == 0xCB:
        return struct.unpack(">d", rest[:8])[0], rest[8:]
    if 0xCC <= head <= 0xCF:
        width = 1 << (head - 0xCC)
        return int.from_bytes(rest[:width], "big"), rest[width:]
    if head in (0xDC, 0xDD, 0xDE, 0xDF):
        width = 2 if head in (0xDC, 0xDE) else 4
        n, rest = int.from_bytes(rest[:width], "big"), rest[width:]
        return (_items if head < 0xDE else _pairs)(n, rest)
    raise DifferenceError(f"no vector needs msgpack byte {head:#x}")


def _items(n: int, rest: bytes) -> tuple[list[Any], bytes]:
    out = []
    for _ in range(n):
        one, rest = _value(rest)
        out.append(one)
    return out, rest


def _pairs(n: int, rest: bytes) -> tuple[dict[str, Any], bytes]:
    flat, rest = _items(2 * n, rest)
    names = flat[::2]
    must(len(set(names)) == len(names), "a name comes twice")
    return {"map": [list(pair) for pair in zip(names, flat[1::2], strict=True)]}, rest


def encode(v: Any) -> bytes:
    """The shortest msgpack for a value."""
    if v is None or isinstance(v, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[v]
    if isinstance(v, int):
        if v < 0x80:
            return bytes([v])
        width = next(w for w in (1, 2, 4, 8) if v < 1 << (8 * w))
        return bytes([{1: 0xCC, 2: 0xCD, 4: 0xCE, 8: 0xCF}[width]]) + v.to_bytes(width, "big")
    if isinstance(v, float):
        return b"\xcb" + struct.pack(">d", v)
    if isinstance(v, Bin):
        return _sized(len(v), 0xC4) + v
    if isinstance(v, str):
        raw = v.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else _sized(len(raw), 0xD9)) + raw
    if isinstance(v, list):
        must(len(v) < 16, "no vector needs a longer array")
        return bytes([0x90 | len(v)]) + b"".join(map(encode, v))
    must(len(v["map"]) < 16, "no vector needs a longer map")
    return bytes([0x80 | len(v["map"])]) + b"".join(encode(k) + encode(one) for k, one in v["map"])


def _sized(n: int, first: int) -> bytes:
    width = next(w for w in (1, 2, 4) if n < 1 << (8 * w))
    return bytes([first + width // 2]) + n.to_bytes(width, "big")


def plain(v: Any) -> Any:
    """A value as the vectors write it."""
    if isinstance(v, Bin):
        return {"bin": v.hex()}
    if isinstance(v, list):
        return [plain(one) for one in v]
    if isinstance(v, dict):
        return {"map": [[plain(k), plain(one)] for k, one in v["map"]]}
    return v


def named(v: Any) -> Any:
    """Maps as dicts, for looking into."""
    if isinstance(v, list):
        return [named(one) for one in v]
    return {k: named(one) for k, one in v["map"]} if isinstance(v, dict) else v


def u32(n: int) -> bytes:
    """Little-endian u32."""
    return struct.pack("<I", n)


def framed(raw: bytes) -> bytes:
    """Bytes behind their length."""
    return u32(len(raw)) + raw


def text(s: str) -> bytes:
    """UTF-8 behind its length."""
    return framed(s.encode())


def sha(*parts: bytes) -> bytes:
    """The hash of key schema 2."""
    return hashlib.sha256(b"".join(parts)).digest()


def root(space: dict[str, Any]) -> bytes:
    """Key schema 2, "Space"."""
    pairs = sorted(space.get("attributes", {}).items(), key=lambda pair: pair[0].encode())
    return sha(
        text("xk2/space"),
        text(space["model"]),
        text(space.get("model_revision", "")),
        text(space["kv_dtype"]),
        u32(space["chunk_size"]),
        text(space.get("kv_layout", "")),
        u32(len(pairs)),
        *(text(name) + text(value) for name, value in pairs),
    )


def parts(extra_keys: list[Any], start: int, stop: int) -> list[bytes]:
    """Key schema 2, "Parts": of the chunk [start, stop)."""
    out = []
    for kind, *v in extra_keys:
        if kind == 1 and max(v[1], start) < min(v[1] + v[2], stop):
            payload = text(v[0]) + struct.pack("<qQ", v[1] - start, v[2])
        elif kind == 2 and v[2] < stop:
            payload = text(v[0]) + text(v[1]) + struct.pack("<Q", max(0, v[2] - start))
        elif kind == 3:
            payload = text(v[0])
        elif kind == 4 and max(v[0], start) < min(v[0] + len(v[1]) // v[2], stop):
            first, last = max(v[0], start), min(v[0] + len(v[1]) // v[2], stop)
            rows = v[1][(first - v[0]) * v[2] : (last - v[0]) * v[2]]
            payload = struct.pack("<QQ", first - start, last - first)
            payload += framed(sha(text("xk2/embeds"), text(v[3]), u32(v[2]), rows))
        elif kind == 5 and v[2] < stop:
            payload = text(v[0]) + framed(v[1]) + struct.pack("<Q", max(0, v[2] - start))
        else:
            continue
        out.append(bytes([kind]) + framed(payload))
    return sorted(out)


def chunk_keys(space: dict[str, Any], keys: dict[str, Any]) -> list[str]:
    """Key schema 2, "Chunk": the keys that a `keys` map with tokens names."""
    tokens, size, parent, out = keys["tokens"], space["chunk_size"], root(space), []
    count = len(tokens) // 4
    for start in range(0, count, size):
        stop = min(start + size, count)
        if stop - start < size and not keys.get("partial_tail"):
            break
        own = parts(keys.get("extra_keys", []), start, stop)
        parent = sha(text("xk2/chunk"), parent, u32(stop - start), tokens[4 * start : 4 * stop], u32(len(own)), *own)
        out.append(parent.hex())
    return out


def check_message(case: dict[str, Any]) -> tuple[list[bytes], dict[str, Any]]:
    """Frames, prelude, body, payload."""
    frames = [bytes.fromhex(frame) for frame in case["frames"]]
    must(frames[:2] == [b"XK2\0", b"\x18"], "leading frames")
    head = struct.unpack("<HHIQ8s", frames[2][:24])
    wanted = (case["code"], case["flags"], case["deadline_ms"], case["id"], bytes.fromhex(case["digest"]))
    must(head == wanted, f"prelude {head}")
    body = decode(frames[2][24:])
    must(plain(body) == case["body"], "body")
    must(encode(body) == frames[2][24:], "body encoded again")
    body = named(body)
    lists = body.get("tensors", [])
    count = len(body.get("n_tokens", []))
    per_chunk = lists * count if len(lists) == 1 else lists
    ranges = body.get("shared")
    if isinstance(ranges, list):  # what lies in shared memory travels in no frame
        must(len(ranges) == count, "ranges")
        must(all(one is None or (len(one) == 2 and one[1] >= 1) for one in ranges), "range")
        per_chunk = [one for one, where in zip(per_chunk, ranges, strict=True) if where is None]
    sizes = []
    for dtype, shape in (meta for chunk in per_chunk for meta in chunk):
        size = SIZES.get(dtype, 1)
        for extent in shape:
            size *= extent
        sizes.append(size)
    if case["code"] != 2:
        must(sizes == [len(frame) for frame in frames[3:]], "payload")
    return frames, body


def verify(vectors: dict[str, Any]) -> int:
    """All of it."""
    by_name = {case["name"]: check_message(case) for case in vectors["messages"]}
    hello, welcome = by_name["hello with grease"], by_name["welcome to the first hello"]
    digest = sha(text("xk2/transcript"), framed(hello[0][2]), framed(welcome[0][2]))
    must(digest == welcome[0][3], "transcript in the welcome")
    must(digest.hex() == vectors["transcript"]["digest"], "transcript")
    later = [case for case in vectors["messages"] if case["code"] > 3]
    must(all(case["digest"] == digest[:8].hex() for case in later), "transcript in every later message")
    must(all(case["digest"] == "00" * 8 for case in vectors["messages"] if case["code"] <= 3), "no transcript yet")
    must(hello[1]["space"] == vectors["space"], "space")
    must(root(vectors["space"]).hex() == vectors["root"] == welcome[1]["root"].hex(), "root")
    by_digests = by_name["lookup by digests"][1]["keys"]["digests"].hex()
    derived = chunk_keys(vectors["space"], by_name["lookup by tokens and extra keys"][1]["keys"])
    must(derived == [*vectors["keys"], vectors["tail_key"]], "keys of tokens and extra keys")
    must(by_digests == "".join(vectors["keys"]), "keys by digests")
    return len(by_name)


def main() -> int:
    """0 if every vector is what the specification says."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("wire-2.json")
    try:
        count = verify(json.loads(path.read_text(encoding="utf-8")))
    except (DifferenceError, KeyError, ValueError, IndexError) as error:
        sys.stdout.write(f"{path.name}: {type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{path.name}: {count} messages are what the specification says\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
