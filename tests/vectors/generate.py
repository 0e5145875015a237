"""Make tests/vectors/key-schema-2-own.json from fixed inputs, through `keying`.

Owns the inputs: every case, refusal and pre-image of that file stands here once. No clock, environment or random
source is read; pseudo-random cases come from a counter hashed with SHA-256. The file key-schema-2.json is a given one,
and is not made here.

    python tests/vectors/generate.py            write the file
    python tests/vectors/generate.py --check    write nothing; exit status 1 if the file differs

A change of a digest, a part or a pre-image is a change of the key schema, and needs another schema number.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import unicodedata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import keying
from keying import (
    CacheSalt,
    ChunkKey,
    ChunkPreimage,
    EmbedsPart,
    ExtraKey,
    KeyingError,
    KeySpace,
    LoraAdapter,
    LoraPart,
    MultimodalItem,
    MultimodalPart,
    PromptEmbeds,
    SaltPart,
    SegmentPreimage,
    Tag,
    TagPart,
    UnknownPart,
)

TARGET = Path(__file__).with_name("key-schema-2-own.json")
PROVENANCE = (
    "made by tests/vectors/generate.py of the project extra-keys from fixed inputs; the values are those of its "
    "package keying, confirmed by verify_independent.py and verify_independent.mjs, which share no code with it"
)
NOTE = (
    "digests and bytes in hex; extra_keys: mm identifier offset length | lora name revision start | salt value | "
    "embeds offset rows(hex) row_bytes dtype | tag name value(hex) start; decoded parts: mm identifier offset-in-chunk "
    "length | lora name revision start-in-chunk | salt value | embeds first rows digest | tag name value "
    "start-in-chunk | unknown kind payload; start and stop of a segment are positions of the prompt; "
    "repeated_extra_keys: the template count times, {i} counting from 0; refusals with segment_start: tokens are the "
    "segment's own; rule: the section of docs/spec/key-schema-2.md that refuses it"
)

Case = dict[str, Any]
Entry = list[Any]

SPACE: Case = {"model": "org/model-a", "chunk_size": 4, "kv_dtype": "bfloat16"}
TEN = list(range(1, 11))
PICTURE = [1, 2, 9, 9, 9, 9, 9, 9, 3, 4, 5, 6]
LONG = "\u00e9\u20ac\U0001f600" * 455 + "x"  # 455 x (2 + 3 + 4) + 1 = 4096 bytes, 1366 characters


# --- how inputs in a file become values of keying --------------------------------------------------------------------


def space_of(case: Case) -> KeySpace:
    """The space of a case."""
    return KeySpace(**case["space"])


def extra_key_of(entry: Entry) -> ExtraKey:
    """One entry of `extra_keys`; what is not hex where bytes are wanted is handed on as it is, to be refused."""
    kind, *fields = entry
    if kind == "embeds":
        offset, rows, row_bytes, dtype = fields
        return PromptEmbeds(offset, bytes.fromhex(rows) if isinstance(rows, str) else rows, row_bytes, dtype)
    if kind == "tag":
        name, value, start = fields
        return Tag(name, bytes.fromhex(value) if isinstance(value, str) else value, start)
    if kind == "unknown":
        return fields  # type: ignore[return-value]
    classes: dict[str, Any] = {"mm": MultimodalItem, "lora": LoraAdapter, "salt": CacheSalt}
    key: ExtraKey = classes[kind](*fields)
    return key


def entries_of(case: Case) -> list[Entry]:
    """The entries of `extra_keys`, and those that `repeated_extra_keys` stands for."""
    entries: list[Entry] = list(case["extra_keys"])
    repeated = case.get("repeated_extra_keys")
    if repeated:
        entries += [
            [f.replace("{i}", str(i)) if isinstance(f, str) else f for f in repeated["template"]]
            for i in range(repeated["count"])
        ]
    return entries


def derive(case: Case) -> list[ChunkKey] | ChunkKey:
    """What `keying` makes of a case or a refusal: its chunk keys, or the key of the segment."""
    space, keys = space_of(case), [extra_key_of(entry) for entry in entries_of(case)]
    if "segment_start" in case:
        return keying.segment_key(space, case["tokens"], keys, start=case["segment_start"])
    return keying.chunk_keys(space, case["tokens"], keys, partial_tail=case["partial_tail"])


def part_fields(part: object) -> Entry:
    """A decoded part as it stands in a file."""
    match part:
        case MultimodalPart(identifier, offset, length):
            return ["mm", identifier, offset, length]
        case LoraPart(name, revision, start):
            return ["lora", name, revision, start]
        case SaltPart(value):
            return ["salt", value]
        case EmbedsPart(first, rows, digest):
            return ["embeds", first, rows, digest.hex()]
        case TagPart(name, tag_value, start):
            return ["tag", name, tag_value.hex(), start]
        case UnknownPart(kind, payload):
            return ["unknown", kind, payload.hex()]
    raise TypeError(type(part).__name__)


def decoded_fields(preimage: bytes) -> Case:
    """A decoded pre-image as it stands in a file."""
    decoded = keying.decode_preimage(preimage)
    if isinstance(decoded, KeySpace):
        names = ("model", "model_revision", "kv_dtype", "chunk_size", "kv_layout")
        return {
            "form": "space",
            **{name: getattr(decoded, name) for name in names},
            "attributes": dict(decoded.attributes),
        }
    return {
        "form": "chunk" if isinstance(decoded, ChunkPreimage) else "segment",
        "parent": decoded.parent.hex(),
        "tokens": list(decoded.tokens),
        "parts": [part_fields(part) for part in decoded.parts],
    }


def preimage_of(key: ChunkKey, tokens: list[int], parent: bytes, form: type[Any] = ChunkPreimage) -> bytes:
    """The bytes that `key` is the digest of; refuses to go on if it is not."""
    parts = tuple(keying.decode_part(part) for part in key.parts)
    preimage = keying.encode_preimage(form(parent, tuple(tokens[key.start : key.stop]), parts))
    if hashlib.sha256(preimage).digest() != key.digest:
        raise AssertionError("a pre-image does not hash to its key")
    return preimage


def preimages_of(keys: list[ChunkKey], tokens: list[int], root: bytes) -> list[bytes]:
    """The pre-images of a chain."""
    parents = [root, *(key.digest for key in keys)]
    return [preimage_of(key, tokens, parent) for key, parent in zip(keys, parents, strict=False)]


# --- the inputs ------------------------------------------------------------------------------------------------------


def case(name: str, tokens: list[int], *extra_keys: Entry, tail: bool = False, **more: Any) -> Case:
    """A case to derive; `segment=(start, stop)`, and anything else is a field of the space."""
    segment = more.pop("segment", None)
    out: Case = {"name": name, "space": {**SPACE, **more}, "tokens": tokens, "extra_keys": list(extra_keys)}
    return {**out, "partial_tail": tail, **({"segment": segment} if segment else {})}


def stream(seed: str, count: int) -> list[int]:
    """`count` numbers in [0, 2**32), fixed by `seed`."""
    blocks = (hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(-(-count // 8)))
    return [number for block in blocks for number in struct.unpack("<8I", block)][:count]


def random_case(seed: int) -> Case:
    """A big case of many extra keys of every kind."""
    draw = iter(stream(f"draw {seed}", 400))

    def below(limit: int) -> int:
        return next(draw) % limit

    n_tokens = 40 + below(240)
    extra: list[Entry] = [
        ["mm", hashlib.sha256(f"item {seed} {i}".encode()).hexdigest(), below(n_tokens + 20), below(90)]
        for i in range(1 + below(8))
    ]
    extra += [["lora", f"adapter-{i % 2}", f"sha256:{below(2**32):08x}", below(n_tokens)] for i in range(below(4))]
    if below(2):
        extra.append(["salt", f"tenant-{below(1000)}"])
    at = below(10)
    for _ in range(below(5)):
        row_bytes, rows = (2, 4, 6)[below(3)], below(12)
        data = struct.pack(f"<{rows}I", *stream(f"rows {seed} {at}", rows))[: rows * row_bytes]
        data += bytes(rows * row_bytes - len(data))
        extra.append(["embeds", at, data.hex(), row_bytes, ("bfloat16", "float32")[below(2)]])
        at += rows + below(2)
    extra += [
        ["tag", f"tag-{i}", bytes(below(256) for _ in range(below(6))).hex(), below(n_tokens)] for i in range(below(4))
    ]
    start = below(n_tokens - 1)
    return case(
        f"pseudo-random {seed}",
        stream(f"tokens {seed}", n_tokens),
        *extra,
        tail=bool(below(2)),
        chunk_size=(1, 3, 7, 16, 64)[below(5)] if seed else 256,
        model=f"org/random-{seed}",
        attributes={f"a{below(100)}": f"v{below(100)}" for _ in range(below(5))},
        segment=(start, start + 1 + below(n_tokens - start)),
    )


X = "img-X"
NFC, NFD = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
ROWS = bytes(range(48)).hex()
ALL_KINDS: list[Entry] = [
    ["mm", X, 2, 6],
    ["mm", "img-Y", 8, 3],
    ["lora", "sql", "sha256:aa;scale=3f000000", 0],
    ["lora", "vision", "sha256:bb", 5],
    ["salt", "tenant-7"],
    ["embeds", 9, ROWS[:48], 8, "float16"],
    ["tag", "reader", "00ff", 0],
    ["tag", "mode", "", 7],
]

CASES: list[Case] = [
    # sizes of chunks and prompts
    case("chunk size 1", [5, 6, 7], chunk_size=1),
    case("chunk size 1, an item over two chunks", [5, 6, 7], ["mm", X, 1, 2], chunk_size=1),
    case("chunk size 256, one full chunk and 44 over", list(range(300)), chunk_size=256),
    case("chunk size 256, an item over the border", list(range(520)), ["mm", X, 250, 12], chunk_size=256),
    case("chunk size 2**31 - 1, nothing is full", TEN, ["mm", X, 2, 3], chunk_size=2**31 - 1),
    case("chunk size 2**31 - 1, partial tail", TEN, ["mm", X, 2, 3], tail=True, chunk_size=2**31 - 1),
    case("the least and the greatest token", [0, 2**32 - 1, 2**31, 2**31 - 1]),
    case("four times token 0", [0, 0, 0, 0]),
    case("one token, no full chunk", [7]),
    case("one token, partial tail", [7], tail=True),
    case("no tokens, partial tail asked for", [], ["salt", "s"], tail=True),
    case("exactly two chunks, partial tail asked for", TEN[:8], tail=True),
    *(case(f"partial tail of {n}", TEN[: 4 + n], ["mm", X, 3, 9], tail=True) for n in (1, 2, 3)),
    case("an adapter from the last token of the tail", TEN, ["lora", "sql", "", 9], tail=True),
    case("an adapter from behind the tail", TEN, ["lora", "sql", "", 10], tail=True),
    case("rows up to the tail and beyond", TEN, ["embeds", 7, ROWS, 8, "float16"], tail=True),
    # where an item meets the borders of chunks
    *(
        case(f"an item of {length} at {offset}", PICTURE, ["mm", X, offset, length])
        for offset, length in (
            (0, 1),
            (3, 1),
            (3, 2),
            (4, 1),
            (5, 2),
            (7, 1),
            (7, 2),
            (8, 4),
            (11, 1),
            (12, 1),
            (11, 99),
        )
    ),
    case("an item over three chunks", PICTURE, ["mm", X, 3, 6]),
    case("an item over everything", PICTURE, ["mm", X, 0, 12]),
    case("an item over everything and beyond", PICTURE, ["mm", X, 0, 2**48]),
    case("an item without length is none, at a border", PICTURE, ["mm", X, 4, 0]),
    case("an item without length is none, inside", PICTURE, ["mm", X, 5, 0]),
    case("an item beyond the prompt is none", PICTURE, ["mm", X, 12, 5]),
    case("an item at the last position there can be", PICTURE, ["mm", X, 2**48 - 1, 1]),
    case("three overlapping items", PICTURE, ["mm", "video", 1, 9], ["mm", "audio", 2, 4], ["mm", "subtitles", 5, 6]),
    case("one identifier at two places", PICTURE, ["mm", X, 2, 2], ["mm", X, 5, 2]),
    case("one identifier at one place, two lengths", PICTURE, ["mm", X, 2, 2], ["mm", X, 2, 3]),
    case("two items side by side in one chunk", PICTURE, ["mm", "a", 4, 2], ["mm", "b", 6, 2]),
    case("the same two items, swapped", PICTURE, ["mm", "b", 4, 2], ["mm", "a", 6, 2]),
    case("identifier and length, ab 1", PICTURE, ["mm", "ab", 2, 1]),
    # identifiers that look request-local, and are not
    *(
        case(f"identifier that is not request-local, {i}", PICTURE, ["mm", identifier, 2, 6])
        for i, identifier in enumerate(
            [
                "xrenderer0-mm-1-image-0",
                "renderer0-mm-1-image-0x",
                "renderer0-mm-1-image-0\n",
                "a\nrenderer0-mm-1-image-0",
                "renderer-mm-1-image-0",
                "renderer0-mm-1-IMAGE-0",
                "renderer\u0663-mm-1-image-0",
                "renderer0-mm-1-image-0:lora",
            ]
        )
    ),
    # adapters
    case("one adapter in two revisions", TEN, ["lora", "a", "1", 0], ["lora", "a", "2", 5]),
    case("two adapters with starts", TEN, ["lora", "a", "", 3], ["lora", "b", "r", 4], tail=True),
    case("name and revision, ab c", TEN, ["lora", "ab", "c", 0]),
    case("name and revision, a bc", TEN, ["lora", "a", "bc", 0]),
    case("an adapter named like a salt", TEN, ["lora", "tenant-7", "", 0]),
    case("sixty-four adapters", TEN[:4], *(["lora", f"a{i}", "", i % 5] for i in range(64))),
    # salts and other texts
    case("salt in composed form", TEN, ["salt", NFC]),
    case("salt in decomposed form", TEN, ["salt", NFD]),
    case("salt of 4096 bytes", TEN, ["salt", LONG]),
    case("salt with a byte order mark, NUL and newline", TEN, ["salt", "\ufeffa\x00\n"]),
    case("salt None as a word", TEN, ["salt", "None"]),
    case("salt 0 as a word", TEN, ["salt", "0"]),
    case("identifier of 4096 bytes", PICTURE, ["mm", LONG, 2, 6]),
    # tags
    case("tag without a value", TEN, ["tag", "t", "", 0]),
    case("tag with a value of 4096 bytes", TEN, ["tag", "t", "a5" * 4096, 0]),
    case(
        "tag names close to the reserved ones",
        TEN,
        ["tag", "xk", "01", 0],
        ["tag", "XK.a", "02", 0],
        ["tag", "axk.b", "03", 0],
        ["tag", " xk.c", "04", 0],
        ["tag", "xk-d", "05", 0],
    ),
    case("tag and value, ab c", TEN, ["tag", "ab", b"c".hex(), 0]),
    case("tag and value, a bc", TEN, ["tag", "a", b"bc".hex(), 0]),
    case("tag from the last token of a chunk", TEN, ["tag", "t", "01", 3]),
    case("tag named like an adapter", TEN, ["tag", "sql", "", 0]),
    case("sixty-four tags", TEN[:4], *(["tag", f"t{i}", "", i % 5] for i in range(64))),
    # prompt embeddings
    case("one row", PICTURE, ["embeds", 5, "00112233", 4, "float32"]),
    case("one row over everything", [1, 2, 3, 4], ["embeds", 0, ROWS[:32], 4, "float32"]),
    case("rows over three chunks, of 1 byte", PICTURE, ["embeds", 3, ROWS[:12], 1, "uint8"]),
    case("rows that begin before the chunk", PICTURE, ["embeds", 2, ROWS[:24], 4, "float32"]),
    case("rows beyond the prompt", PICTURE, ["embeds", 10, ROWS, 8, "float16"]),
    case("rows wholly beyond the prompt are none", PICTURE, ["embeds", 12, ROWS, 8, "float16"]),
    case("no rows are none", PICTURE, ["embeds", 5, "", 8, "float16"]),
    case("no rows inside others are none", PICTURE, ["embeds", 3, ROWS, 8, "float16"], ["embeds", 5, "", 8, "float16"]),
    case("no rows twice are none", PICTURE, ["embeds", 5, "", 8, "float16"], ["embeds", 5, "", 8, "float16"]),
    case(
        "three touching ranges merge, any order",
        PICTURE,
        ["embeds", 6, ROWS[16:24], 4, "float32"],
        ["embeds", 5, ROWS[8:16], 4, "float32"],
        ["embeds", 4, ROWS[:8], 4, "float32"],
    ),
    case("the same rows in one range", PICTURE, ["embeds", 4, ROWS[:24], 4, "float32"]),
    case(
        "ranges that touch at a border of chunks merge",
        PICTURE,
        ["embeds", 2, ROWS[:16], 4, "float32"],
        ["embeds", 4, ROWS[16:32], 4, "float32"],
    ),
    case(
        "touching, of other dtype, stay two",
        PICTURE,
        ["embeds", 4, ROWS[:16], 4, "float32"],
        ["embeds", 6, ROWS[16:32], 4, "int32"],
    ),
    case(
        "touching, of other row size, stay two",
        PICTURE,
        ["embeds", 4, ROWS[:16], 4, "float32"],
        ["embeds", 6, ROWS[16:32], 8, "float32"],
    ),
    case("the same bytes as two rows of 4", PICTURE, ["embeds", 4, ROWS[:16], 4, "float16"]),
    case("the same bytes as one row of 8", PICTURE, ["embeds", 4, ROWS[:16], 8, "float16"]),
    # spaces
    case("space, model and revision, ab c", TEN, model="ab", model_revision="c"),
    case("space, model and revision, a bc", TEN, model="a", model_revision="bc"),
    case("space, a name in layout instead of revision", TEN, kv_layout="c"),
    case("space, an attribute without a value", TEN, attributes={"quantization": ""}),
    case("space, attributes ab=c", TEN, attributes={"ab": "c"}),
    case("space, attributes a=bc", TEN, attributes={"a": "bc"}),
    case("space, attribute names that look like numbers", TEN, attributes={"9": "b", "10": "a", "2": "c"}),
    case("space, attribute names one within the other", TEN, attributes={"ab": "1", "a": "2", "abc": "3", "B": "4"}),
    case("space, attribute names with a life of their own", TEN, attributes={"__proto__": "1", "constructor": "2"}),
    case("space, model of 4096 bytes", TEN, model=LONG),
    case("space, kv_dtype of one digit", TEN, kv_dtype="8"),
    case("space, kv_dtype that begins with auto", TEN, kv_dtype="auto_"),
    # segments
    case("segment of text", PICTURE, segment=(3, 9)),
    case("segment of one token", PICTURE, segment=(11, 12)),
    case("segment as long as a chunk is another key", TEN[:4], segment=(0, 4)),
    case("segment at another start, text only, same tokens", [1, 2, 3, 1, 2, 3], segment=(3, 6)),
    case("segment at start 0, text only, same tokens", [1, 2, 3, 1, 2, 3], segment=(0, 3)),
    case("segment that begins inside an item", PICTURE, ["mm", X, 2, 6], segment=(5, 12)),
    case("segment that ends where the item begins", PICTURE, ["mm", X, 5, 2], segment=(2, 5)),
    case("segment with an adapter from before", PICTURE, ["lora", "a", "1", 2], segment=(5, 8)),
    case("segment with an adapter from within", PICTURE, ["lora", "a", "1", 6], segment=(5, 8)),
    case("segment with an adapter from its stop", PICTURE, ["lora", "a", "1", 8], segment=(5, 8)),
    case("segment with a salt", PICTURE, ["salt", "tenant-7"], segment=(5, 8)),
    case("segment with rows from before to beyond", PICTURE, ["embeds", 3, ROWS, 4, "float32"], segment=(5, 8)),
    case("segment with a tag from within", PICTURE, ["tag", "t", "01", 7], segment=(5, 8)),
    case("segment with everything", PICTURE, *ALL_KINDS, segment=(5, 11)),
    # together
    case(
        "everything together",
        PICTURE,
        *ALL_KINDS,
        tail=True,
        chunk_size=5,
        attributes={"rope": "yarn", "parallel": "tp2"},
    ),
    case(
        "everything together, other input order",
        PICTURE,
        *reversed(ALL_KINDS),
        tail=True,
        chunk_size=5,
        attributes={"parallel": "tp2", "rope": "yarn"},
    ),
    *(random_case(seed) for seed in range(10)),
]


def refusal(rule: str, name: str, *extra_keys: Entry, tokens: Any = None, **more: Any) -> Case:
    """An input that must be refused, by the section `rule`."""
    segment = {"segment_start": more.pop("segment_start")} if "segment_start" in more else {}
    repeated = {"repeated_extra_keys": more.pop("repeated")} if "repeated" in more else {}
    out: Case = {"name": name, "rule": rule, "space": {**SPACE, **more}, "tokens": TEN if tokens is None else tokens}
    return {**out, "extra_keys": list(extra_keys), **repeated, "partial_tail": False, **segment}


REFUSALS: list[Case] = [
    refusal("9.1", "model null", model=None),
    refusal("9.1", "model a number", model=1),
    refusal("9.1", "chunk size a boolean", chunk_size=True),
    refusal("9.1", "chunk size a string", chunk_size="4"),
    refusal("9.1", "chunk size a fraction", chunk_size=4.5),
    refusal("9.1", "attribute value a number", attributes={"a": 1}),
    refusal("9.1", "attributes a list", attributes=["a"]),
    refusal("9.1", "identifier null", ["mm", None, 2, 6]),
    refusal("9.1", "identifier a number", ["mm", 0, 2, 6]),
    refusal("9.1", "offset a boolean", ["mm", X, True, 6]),
    refusal("9.1", "offset null", ["mm", X, None, 6]),
    refusal("9.1", "length a fraction", ["mm", X, 2, 1.5]),
    refusal("9.1", "adapter name null", ["lora", None, "", 0]),
    refusal("9.1", "adapter revision null", ["lora", "a", None, 0]),
    refusal("9.1", "adapter start a string", ["lora", "a", "", "0"]),
    refusal("9.1", "salt null", ["salt", None]),
    refusal("9.1", "salt 0", ["salt", 0]),
    refusal("9.1", "rows null", ["embeds", 0, None, 4, "float32"]),
    refusal("9.1", "row size a boolean", ["embeds", 0, "00", True, "float32"]),
    refusal("9.1", "tag value null", ["tag", "t", None, 0]),
    refusal("9.2", "model of 4097 bytes", model=LONG + "x"),
    refusal("9.2", "attribute name of 4097 bytes", attributes={LONG + "x": ""}),
    refusal("9.2", "attribute value of 4097 bytes", attributes={"a": LONG + "x"}),
    refusal("9.2", "identifier of 4097 bytes", ["mm", LONG + "x", 2, 6]),
    refusal("9.2", "adapter name of 4097 bytes", ["lora", "a" * 4097, "", 0]),
    refusal("9.2", "adapter revision of 4098 bytes, 2049 characters", ["lora", "a", "\u00e9" * 2049, 0]),
    refusal("9.2", "salt of 4097 bytes", ["salt", LONG + "x"]),
    refusal("9.2", "salt of 4098 bytes, 1366 characters", ["salt", "\u20ac" * 1366]),
    refusal("9.2", "dtype of rows of 4097 bytes", ["embeds", 0, "00", 1, "f" * 4097]),
    refusal("9.2", "tag name of 4097 bytes", ["tag", "t" * 4097, "", 0]),
    refusal("9.2", "tag value of 4097 bytes", ["tag", "t", "00" * 4097, 0]),
    refusal("9.3", "salt with a lone high surrogate", ["salt", "a\ud800"]),
    refusal("9.3", "salt with a lone low surrogate", ["salt", "\udc00a"]),
    refusal("9.3", "identifier with surrogates in the wrong order", ["mm", "\udc00\ud800", 2, 6]),
    refusal("9.3", "model with a lone surrogate", model="\ud800"),
    refusal("9.4", "model empty", model=""),
    refusal("9.4", "kv_dtype empty", kv_dtype=""),
    refusal("9.4", "attribute name empty", attributes={"": "a"}),
    refusal("9.4", "identifier empty", ["mm", "", 2, 6]),
    refusal("9.4", "adapter name empty", ["lora", "", "r", 0]),
    refusal("9.4", "salt empty", ["salt", ""]),
    refusal("9.4", "tag name empty", ["tag", "", "00", 0]),
    refusal("9.4", "dtype of rows empty", ["embeds", 0, "00", 1, ""]),
    refusal("9.5", "kv_dtype auto", kv_dtype="auto"),
    refusal("9.5", "kv_dtype in capitals", kv_dtype="BFloat16"),
    refusal("9.5", "kv_dtype with a module", kv_dtype="torch.bfloat16"),
    refusal("9.5", "kv_dtype with a newline", kv_dtype="bfloat16\n"),
    refusal("9.5", "kv_dtype with a digit that is not ASCII", kv_dtype="float1\u0666"),
    refusal("9.6", "chunk size 0", chunk_size=0),
    refusal("9.6", "chunk size -1", chunk_size=-1),
    refusal("9.6", "chunk size 2**31", chunk_size=2**31),
    refusal("9.7", "offset -1", ["mm", X, -1, 6]),
    refusal("9.7", "length -1", ["mm", X, 2, -1]),
    refusal("9.7", "offset 2**48 + 1", ["mm", X, 2**48 + 1, 0]),
    refusal("9.7", "offset + length 2**48 + 1", ["mm", X, 2**48, 1]),
    refusal("9.7", "length 2**48 + 1", ["mm", X, 0, 2**48 + 1]),
    refusal("9.7", "adapter start -1", ["lora", "a", "", -1]),
    refusal("9.7", "adapter start 2**48 + 1", ["lora", "a", "", 2**48 + 1]),
    refusal("9.7", "tag start -1", ["tag", "t", "", -1]),
    refusal("9.7", "offset of rows -1", ["embeds", -1, "00", 1, "uint8"]),
    refusal("9.7", "rows beyond 2**48", ["embeds", 2**48, "00", 1, "uint8"]),
    refusal("9.7", "segment start -1", segment_start=-1),
    refusal("9.7", "segment beyond 2**48", segment_start=2**48 - 9),
    refusal("9.8", "request-local identifier", ["mm", "renderer0-mm-1-image-0", 2, 6]),
    refusal("9.8", "request-local identifier, more digits", ["mm", "renderer12-mm-345-input_audio-67", 2, 6]),
    refusal("9.8", "request-local identifier behind a prefix", ["mm", "sql:renderer0-mm-1-image-0", 2, 6]),
    refusal("9.9", "row size 0", ["embeds", 0, "0011", 0, "float32"]),
    refusal("9.9", "row size -4", ["embeds", 0, "0011", -4, "float32"]),
    refusal("9.9", "row size 2**32", ["embeds", 0, "", 2**32, "float32"]),
    refusal("9.9", "row size does not divide the rows", ["embeds", 0, "001122", 2, "float32"]),
    refusal("9.10", "rows given twice", ["embeds", 2, "0011", 1, "uint8"], ["embeds", 2, "0011", 1, "uint8"]),
    refusal("9.10", "rows that overlap by one", ["embeds", 2, "0011", 1, "uint8"], ["embeds", 3, "2233", 1, "uint8"]),
    refusal("9.10", "overlap of other dtype", ["embeds", 2, "0011", 1, "uint8"], ["embeds", 3, "2233", 1, "int8"]),
    refusal(
        "9.10",
        "rows inside others, both beyond the prompt",
        ["embeds", 50, "00112233", 1, "uint8"],
        ["embeds", 51, "22", 1, "uint8"],
    ),
    refusal("9.11", "an item twice", ["mm", X, 2, 6], ["mm", X, 2, 6]),
    refusal("9.11", "an item without length twice", ["mm", X, 2, 0], ["mm", X, 2, 0]),
    refusal("9.12", "an adapter twice", ["lora", "a", "1", 0], ["lora", "a", "1", 0]),
    refusal("9.12", "an adapter twice, other start", ["lora", "a", "1", 0], ["lora", "a", "1", 4]),
    refusal("9.13", "a tag twice", ["tag", "t", "00", 0], ["tag", "t", "00", 0]),
    refusal("9.13", "a tag twice, other value and start", ["tag", "t", "00", 0], ["tag", "t", "01", 4]),
    refusal("9.14", "two salts", ["salt", "a"], ["salt", "b"]),
    refusal("9.14", "the salt twice", ["salt", "a"], ["salt", "a"]),
    refusal("9.15", "65 adapters", repeated={"count": 65, "template": ["lora", "a{i}", "", 0]}),
    refusal("9.15", "65 tags", repeated={"count": 65, "template": ["tag", "t{i}", "", 0]}),
    refusal("9.15", "65537 items", repeated={"count": 65537, "template": ["mm", "i{i}", 0, 1]}),
    refusal("9.16", "an extra key that is none", ["unknown", "a"]),
    refusal("9.17", "reserved tag name", ["tag", "xk.", "", 0]),
    refusal("9.17", "reserved tag name, longer", ["tag", "xk.future", "00", 0]),
    refusal("9.18", "token true", tokens=[1, 2, True, 4]),
    refusal("9.18", "token false in the partial tail", tokens=[1, 2, 3, 4, False]),
    refusal("9.18", "token a fraction", tokens=[1, 2.5, 3, 4]),
    refusal("9.18", "token a string", tokens=[1, "2", 3, 4]),
    refusal("9.18", "token null", tokens=[None, 2, 3, 4]),
    refusal("9.18", "token a list", tokens=[[1, 2], [3, 4]]),
    refusal("9.19", "token -1", tokens=[1, -1, 3, 4]),
    refusal("9.19", "token 2**32", tokens=[1, 2, 3, 2**32]),
    refusal("9.19", "token 2**32 behind the last full chunk", tokens=[1, 2, 3, 4, 2**32]),
    refusal("9.20", "tokens a string", tokens="1234"),
    refusal("9.20", "tokens an object", tokens={"1": 2}),
    refusal("9.20", "tokens a number", tokens=4),
    refusal("9.21", "segment without tokens", tokens=[], segment_start=0),
]


# --- pre-images, put together by hand so that they can be wrong -------------------------------------------------------


def number(form: str, value: int) -> bytes:
    """A fixed-width little-endian number: B u8, I u32, Q u64, q i64."""
    return struct.pack("<" + form, value)


def framed(value: bytes | str) -> bytes:
    """`bytes(value)` or `text(value)` of the specification."""
    raw = value if isinstance(value, bytes) else value.encode()
    return number("I", len(raw)) + raw


def part(kind: int, *fields: bytes) -> bytes:
    """A part of any kind and payload."""
    return number("B", kind) + framed(b"".join(fields))


def item(identifier: bytes | str, offset: int, length: int) -> bytes:
    """A part of kind 1."""
    return part(1, framed(identifier), number("q", offset), number("Q", length))


def lora(name: bytes | str, revision: str, start: int) -> bytes:
    """A part of kind 2."""
    return part(2, framed(name), framed(revision), number("Q", start))


def rows(first: int, count: int, digest: bytes = bytes(32)) -> bytes:
    """A part of kind 4."""
    return part(4, number("Q", first), number("Q", count), framed(digest))


def tag(name: str, value: bytes, start: int) -> bytes:
    """A part of kind 5."""
    return part(5, framed(name), framed(value), number("Q", start))


def chunk(*parts: bytes, tokens: tuple[int, ...] = (1, 2, 3, 4), domain: str = "xk2/chunk") -> bytes:
    """The pre-image of a chunk or a segment, with `parts` as they come."""
    head = framed(domain) + bytes(range(32)) + number("I", len(tokens)) + b"".join(number("I", t) for t in tokens)
    return head + number("I", len(parts)) + b"".join(parts)


def space(*attributes: bytes, model: bytes | str = "m", kv_dtype: str = "bfloat16", chunk_size: int = 4) -> bytes:
    """The pre-image of a root, with names and values of attributes as they come."""
    head = framed("xk2/space") + framed(model) + framed("") + framed(kv_dtype) + number("I", chunk_size) + framed("")
    return head + number("I", len(attributes) // 2) + b"".join(attributes)


ONE = chunk(item(X, 1, 2))
SALT = part(3, framed("s"))
FAR = 2**48

ACCEPTED: list[tuple[str, bytes]] = [
    ("a chunk without parts", chunk()),
    ("a chunk of one token", chunk(tokens=(0,))),
    ("a chunk with one item", ONE),
    ("a segment with one item", chunk(item(X, 1, 2), domain="xk2/segment")),
    ("a space without attributes", space()),
    ("a space with attributes", space(*map(framed, ("A", "", "a", "1", "a\x00", "2", "\u00e9", "3")))),
    ("a space of the greatest chunk size", space(chunk_size=2**31 - 1)),
    ("kind 6, which nothing uses yet, shown raw", chunk(part(6, b"\x00\xff"))),
    ("kind 6 without a payload", chunk(part(6))),
    ("kind 127 behind the known ones", chunk(item(X, 1, 2), SALT, part(127, bytes(5000)))),
    ("two parts of an unknown kind", chunk(part(6, b"a"), part(6, b"b"))),
    ("an item that began before the chunk", chunk(item(X, -3, 4))),
    ("an item that fills all positions", chunk(item(X, 0, FAR))),
    ("an item that began as far away as can be", chunk(item(X, 1 - FAR, FAR))),
    ("an item that begins at the last token", chunk(item(X, 3, 1))),
    ("an adapter that begins at the last token", chunk(lora("a", "", 3))),
    ("one adapter in two revisions", chunk(lora("a", "1", 0), lora("a", "2", 3))),
    ("runs of rows that touch", chunk(rows(0, 2), rows(2, 2))),
    ("rows over the whole chunk", chunk(rows(0, 4))),
    ("sixty-four tags", chunk(*(tag(f"{i:02}", b"", 0) for i in range(64)))),
    ("a salt with a byte order mark", chunk(part(3, framed("\ufeffs")))),
    ("a text of 4096 bytes", chunk(part(3, framed(LONG)))),
]

REFUSED: list[tuple[str, str, bytes]] = [
    ("11.1", "nothing at all", b""),
    ("11.1", "an unknown domain tag", chunk(domain="xk2/chunks")),
    ("11.1", "the domain tag of schema 3", chunk(domain="xk3/chunk")),
    ("11.1", "the domain tag of row digests", chunk(domain="xk2/embeds")),
    ("11.1", "a domain tag in capitals", chunk(domain="XK2/CHUNK")),
    ("11.1", "a domain tag without its length", chunk()[4:]),
    ("11.1", "a domain tag cut short", chunk()[:12]),
    ("11.2", "nothing behind the domain tag", chunk()[:13]),
    ("11.2", "a parent cut short", chunk()[:44]),
    ("11.2", "no count of tokens", chunk()[:45]),
    ("11.2", "a token cut short", chunk()[:-5]),
    ("11.2", "more tokens announced than there are", chunk()[:45] + number("I", 2**32 - 1) + chunk()[49:]),
    ("11.2", "no count of parts", chunk()[:-4]),
    ("11.2", "more parts announced than there are", chunk()[:-4] + number("I", 2**32 - 1)),
    ("11.2", "a part cut short", ONE[:-1]),
    ("11.2", "a part without a length", chunk()[:-4] + number("I", 1) + b"\x01"),
    (
        "11.2",
        "a payload longer than what is left",
        chunk()[:-4] + number("I", 1) + b"\x06" + number("I", 9) + b"12345678",
    ),
    ("11.2", "a payload length of 2**32 - 1", chunk()[:-4] + number("I", 1) + b"\x06" + number("I", 2**32 - 1)),
    ("11.2", "a text that runs past its payload", chunk(part(3, number("I", 2), b"s"))),
    ("11.2", "an item without a length", chunk(part(1, framed(X), number("q", 1)))),
    ("11.2", "an adapter without a start", chunk(part(2, framed("a"), framed("")))),
    ("11.2", "rows without a digest", chunk(part(4, number("Q", 0), number("Q", 1)))),
    ("11.2", "a salt with an empty payload", chunk(part(3))),
    ("11.2", "a space cut short", space()[:-1]),
    ("11.2", "more attributes announced than there are", space()[:-4] + number("I", 2**32 - 1)),
    ("11.3", "a byte behind a chunk", ONE + b"\x00"),
    ("11.3", "a byte behind a segment", chunk(domain="xk2/segment") + b"\x00"),
    ("11.3", "a byte behind a space", space() + b"\x00"),
    (
        "11.3",
        "a byte behind an item, in its payload",
        chunk(part(1, framed(X), number("q", 1), number("Q", 2), b"\x00")),
    ),
    ("11.3", "a byte behind a salt, in its payload", chunk(part(3, framed("s"), b"\x00"))),
    ("11.4", "a salt that is not UTF-8", chunk(part(3, framed(b"\xff")))),
    ("11.4", "a salt cut inside a character", chunk(part(3, framed(b"\xe2\x82")))),
    ("11.4", "an overlong encoding", chunk(part(3, framed(b"\xc0\x80")))),
    ("11.4", "an encoded surrogate", chunk(part(3, framed(b"\xed\xa0\x80")))),
    ("11.4", "a character beyond U+10FFFF", chunk(part(3, framed(b"\xf4\x90\x80\x80")))),
    ("11.4", "a model that is not UTF-8", space(model=b"\x80")),
    ("11.5", "a salt of 4097 bytes", chunk(part(3, framed("s" * 4097)))),
    ("11.5", "an identifier of 4097 bytes", chunk(item("i" * 4097, 1, 2))),
    ("11.5", "a tag value of 4097 bytes", chunk(tag("t", bytes(4097), 0))),
    ("11.5", "a model of 4097 bytes", space(model="m" * 4097)),
    ("11.6", "an empty salt", chunk(part(3, framed("")))),
    ("11.6", "an empty identifier", chunk(item("", 1, 2))),
    ("11.6", "an empty adapter name", chunk(lora("", "r", 0))),
    ("11.6", "an empty tag name", chunk(tag("", b"v", 0))),
    ("11.6", "an empty model", space(model="")),
    ("11.6", "an empty kv_dtype", space(kv_dtype="")),
    ("11.6", "an empty attribute name", space(framed(""), framed("v"))),
    ("11.7", "kv_dtype auto", space(kv_dtype="auto")),
    ("11.7", "kv_dtype in capitals", space(kv_dtype="FP8")),
    ("11.7", "kv_dtype with a newline", space(kv_dtype="bfloat16\n")),
    ("11.7", "chunk size 0", space(chunk_size=0)),
    ("11.7", "chunk size 2**31", space(chunk_size=2**31)),
    ("11.8", "attributes in falling order", space(*map(framed, ("b", "", "a", "")))),
    ("11.8", "an attribute twice", space(*map(framed, ("a", "1", "a", "2")))),
    ("11.8", "attributes in the order of UTF-16", space(*map(framed, ("\U00010000", "", "\uffff", "")))),
    ("11.9", "a chunk without tokens", chunk(tokens=())),
    ("11.9", "a segment without tokens", chunk(tokens=(), domain="xk2/segment")),
    ("11.10", "kind 0", chunk(part(0, b"a"))),
    ("11.10", "kind 128", chunk(part(128, b"a"))),
    ("11.10", "kind 255", chunk(part(255, b"a"))),
    ("11.11", "parts in falling order of kinds", chunk(SALT, item(X, 1, 2))),
    ("11.11", "parts in falling order of lengths", chunk(item("abc", 1, 2), item("z", 1, 2))),
    ("11.11", "parts in falling order of payloads", chunk(item("b", 1, 2), item("a", 1, 2))),
    ("11.11", "an item twice", chunk(item(X, 1, 2), item(X, 1, 2))),
    ("11.11", "the salt twice", chunk(SALT, SALT)),
    ("11.11", "an unknown part twice", chunk(part(6, b"a"), part(6, b"a"))),
    ("11.12", "an item behind the chunk", chunk(item(X, 4, 2))),
    ("11.12", "an item before the chunk", chunk(item(X, -2, 2))),
    ("11.12", "an item without length", chunk(item(X, 1, 0))),
    ("11.12", "an adapter from behind the chunk", chunk(lora("a", "", 4))),
    ("11.12", "a tag from behind the chunk", chunk(tag("t", b"", 4))),
    ("11.12", "rows behind the chunk", chunk(rows(4, 1))),
    ("11.12", "no rows", chunk(rows(1, 0))),
    ("11.13", "an item longer than all positions", chunk(item(X, -1, FAR + 1))),
    ("11.13", "an item that ends behind all positions", chunk(item(X, 1, FAR))),
    ("11.13", "an item that began before all positions", chunk(item(X, -FAR - 1, 2))),
    ("11.13", "two items that no one chunk start allows", chunk(item("Z", 0, FAR), item(X, -FAR // 2, FAR // 2 + 1))),
    ("11.13", "an item from the least i64", chunk(item(X, -(2**63), 2))),
    ("11.13", "an item of the greatest u64", chunk(item(X, 0, 2**64 - 1))),
    ("11.13", "an adapter from the greatest u64", chunk(lora("a", "", 2**64 - 1))),
    ("11.13", "rows of the greatest u64", chunk(rows(0, 2**64 - 1))),
    ("11.14", "a digest of 31 bytes", chunk(rows(0, 1, bytes(31)))),
    ("11.14", "a digest of 33 bytes", chunk(rows(0, 1, bytes(33)))),
    ("11.15", "rows from the chunk and beyond", chunk(rows(2, 3))),
    ("11.15", "rows that overlap", chunk(rows(0, 2), rows(1, 2))),
    ("11.15", "rows twice, other digest", chunk(rows(0, 2), rows(0, 2, b"\x01" * 32))),
    ("11.16", "two salts", chunk(part(3, framed("a")), part(3, framed("b")))),
    ("11.16", "an adapter twice, other start", chunk(lora("a", "r", 0), lora("a", "r", 1))),
    ("11.16", "a tag twice, other value", chunk(tag("t", b"1", 0), tag("t", b"2", 0))),
    ("11.16", "a tag twice, not side by side", chunk(tag("t", b"1", 0), tag("u", b"1", 0), tag("t", b"12", 0))),
    ("11.17", "65 adapters", chunk(*(lora(f"{i:02}", "", 0) for i in range(65)))),
    ("11.17", "65 tags", chunk(*(tag(f"{i:02}", b"", 0) for i in range(65)))),
    ("11.18", "a request-local identifier", chunk(item("renderer0-mm-1-image-0", 1, 2))),
    ("11.18", "a reserved tag name", chunk(tag("xk.a", b"", 0))),
]


# --- the file --------------------------------------------------------------------------------------------------------


def filled_case(given: Case) -> Case:
    """A case with what `keying` derives from it; pre-images of big cases are left to the verifiers."""
    space_value, tokens = space_of(given), given["tokens"]
    extra_keys = [extra_key_of(entry) for entry in given["extra_keys"]]
    keys = keying.chunk_keys(space_value, tokens, extra_keys, partial_tail=given["partial_tail"])
    out: Case = {field: value for field, value in given.items() if field != "segment"}
    out["root"] = space_value.root.hex()
    out["keys"] = [key.digest.hex() for key in keys]
    out["parts_of_chunks"] = [[encoded.hex() for encoded in key.parts] for key in keys]
    preimages = preimages_of(keys, tokens, space_value.root)
    out["preimage_of_root"] = keying.encode_preimage(space_value).hex()
    if sum(map(len, preimages)) <= 2000:
        out["preimages"] = [preimage.hex() for preimage in preimages]
    elif preimages and len(preimages[0]) <= 2000:
        out["preimage_of_chunk_0"] = preimages[0].hex()
    if "segment" in given:
        start, stop = given["segment"]
        key = keying.segment_key(space_value, tokens[start:stop], extra_keys, start=start)
        preimage = preimage_of(key, tokens, space_value.root, SegmentPreimage)
        parts = [encoded.hex() for encoded in key.parts]
        out["segment"] = {"start": start, "stop": stop, "key": key.digest.hex(), "parts": parts}
        out["segment"]["preimage"] = preimage.hex()
    return out


def must_refuse(name: str, call: Any) -> None:
    """Stop if `keying` does what it should refuse."""
    try:
        call()
    except KeyingError:
        return
    raise AssertionError(f"{name}: keying accepts what the list says must be refused")


def content() -> Case:
    """The whole file, as a value."""
    cases = [filled_case(given) for given in CASES]
    accepted = [
        {"name": name, "preimage": preimage.hex(), "decoded": decoded_fields(preimage)} for name, preimage in ACCEPTED
    ]
    for given in REFUSALS:
        must_refuse(given["name"], lambda given=given: derive(given))
    for _, name, preimage in REFUSED:
        must_refuse(name, lambda preimage=preimage: keying.decode_preimage(preimage))
    refused = [{"name": name, "rule": rule, "preimage": preimage.hex()} for rule, name, preimage in REFUSED]
    sections: dict[str, list[Case]] = {
        "cases": cases,
        "refusals": REFUSALS,
        "accepted_preimages": accepted,
        "refused_preimages": refused,
    }
    for section, entries in sections.items():
        names = [entry["name"] for entry in entries]
        if len(names) != len(set(names)):
            raise AssertionError(f"{section}: a name is used twice")
    return {"key_schema": keying.KEY_SCHEMA, "provenance": PROVENANCE, "note": NOTE, **sections}


def rendered() -> str:
    """The file as text: one field a line, so that a change shows as the lines it changes."""
    value = content()
    lines = [f" {json.dumps(field)}: {json.dumps(value[field])}" for field in ("key_schema", "provenance", "note")]
    for section in (field for field, entries in value.items() if isinstance(entries, list)):
        entries = [
            "  {\n" + ",\n".join(f"   {json.dumps(field)}: {json.dumps(entry[field])}" for field in entry) + "\n  }"
            for entry in value[section]
        ]
        lines.append(f" {json.dumps(section)}: [\n" + ",\n".join(entries) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str]) -> int:
    """Write the file, or with --check compare it."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: generate.py [--check]\n")
        return 2
    wanted = rendered()
    if not arguments:
        TARGET.write_text(wanted, encoding="utf-8")
        sys.stdout.write(f"{TARGET.name}: written, {len(CASES)} cases\n")
        return 0
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != wanted:
        sys.stderr.write(
            f"{TARGET}: differs from what the inputs give. If a key changed, that is another key schema; if only "
            "inputs were added, run generate.py and pin the new digest in tests/keying/test_vectors.py\n"
        )
        return 1
    sys.stdout.write(f"{TARGET.name}: as generated, {len(CASES)} cases\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
