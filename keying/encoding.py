"""The bytes of key schema 2: primitives, domain tags, bounds.

Theory of operation
-------------------
A key is SHA-256 over a pre-image. Every pre-image starts with a length-prefixed domain tag that carries the schema
number, and every field after it has a fixed width or a length in front, so the encoding is injective: `decode_preimage`
gives back what was encoded, and that is the proof. Nothing else enters a key: no clock, no environment, no seed.

    root     H( text("xk2/space") text(model) text(model_revision) text(kv_dtype) u32(chunk_size) text(kv_layout)
                u32(n) n x ( text(name) text(value) ) )
    chunk    H( text("xk2/chunk")   parent[32] u32(n_tokens) n_tokens x u32(token) u32(n_parts) parts )
    segment  H( text("xk2/segment") root[32]   u32(n_tokens) n_tokens x u32(token) u32(n_parts) parts )
    part     u8(kind) u32(len payload) payload                sorted as unsigned bytes over the whole part

        kind 1  multimodal item   text(identifier) i64(offset - chunk_start) u64(length)
        kind 2  LoRA adapter      text(name) text(revision) u64(max(0, start - chunk_start))
        kind 3  cache salt        text(value)
        kind 4  prompt embeddings u64(first row's place in the chunk) u64(rows in the chunk) bytes(H(rows...))
        kind 5  tag               text(name) bytes(value) u64(max(0, start - chunk_start))

All integers are little-endian. ``bytes(b)`` is u32(len b) and b; ``text(s)`` is bytes(utf8(s)), not normalised.

Source: docs/spec/key-schema-2.md. Change a byte and it is schema 3.
"""

import hashlib
import re
import struct
from enum import IntEnum

from keying.errors import KeyingError, KeyingTypeError

KEY_SCHEMA = 2
"""The only key schema this package derives. Acceptance rule: equal, or the key is not ours."""

DIGEST_SIZE = 32
"""Bytes of a key; SHA-256, never truncated."""

MAX_TEXT_BYTES = 4096
"""Bytes of UTF-8 in any text, and bytes in a tag's value. Bounds the work per chunk that a client can cause."""

MAX_POSITION = 2**48
"""Largest prompt position, length and sum of both: keeps i64 differences exact in every language."""

MAX_ADAPTERS = 64
MAX_TAGS = 64
MAX_ITEMS = 65_536
MAX_CHUNK_SIZE = 2**31 - 1
MAX_U32 = 2**32 - 1

REQUEST_LOCAL_IDENTIFIER = re.compile(r"(^|:)renderer[0-9]+-mm-[0-9]+-[a-z_]+-[0-9]+\Z")
"""Identifiers that vLLM makes when nothing was hashed: they count requests and restart with the process, so two
different pictures get one. ``\\Z``: the very end, also where a newline stands there."""

KV_DTYPE = re.compile(r"[a-z0-9_]+\Z")


class PartKind(IntEnum):
    """Kinds of part that schema 2 assigns. 0 and 128-255 never; 6-127 may be assigned, negotiated as ``kind/<n>``."""

    MULTIMODAL = 1
    LORA = 2
    SALT = 3
    EMBEDS = 4
    TAG = 5


U8 = struct.Struct("<B")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")


def framed(data: bytes) -> bytes:
    """``bytes(b)`` of the specification: u32 length, then the bytes."""
    return U32.pack(len(data)) + data


def text(value: str) -> bytes:
    """``text(s)`` of the specification. The caller has checked the value with `checked_text`."""
    return framed(value.encode())


DOMAIN_SPACE = text("xk2/space")
DOMAIN_CHUNK = text("xk2/chunk")
DOMAIN_SEGMENT = text("xk2/segment")
DOMAIN_EMBEDS = text("xk2/embeds")


def part(kind: int, payload: bytes) -> bytes:
    """One part of a chunk: kind, payload length, payload."""
    return U8.pack(kind) + framed(payload)


def digest(preimage: bytes) -> bytes:
    """``H``: SHA-256, 32 bytes."""
    return hashlib.sha256(preimage).digest()


def format_digest(key: bytes) -> str:
    """The printed form of a key, ``xk2:`` and 64 hex digits."""
    return f"xk2:{key.hex()}"


def checked_text(
    value: object,
    field: str,
    *,
    empty: bool,
    error: type[KeyingError] = KeyingError,
    type_error: type[KeyingTypeError] = KeyingTypeError,
) -> str:
    """A str within bounds, as an exact ``str``; the length is looked at before any other work.

    Args:
        value: what the caller gave.
        field: its name, for the message.
        empty: whether "" is legal for this field.
        error: raised for a value out of bounds.
        type_error: raised for another type; None, "" and 0 never mean "no identity".

    Raises:
        KeyingError: longer than `MAX_TEXT_BYTES` bytes of UTF-8, empty where that is not legal, or a lone surrogate.
        KeyingTypeError: not a str.
    """
    if not isinstance(value, str):
        raise type_error(f"{field}: got {type(value).__name__}, wanted str")
    exact = str.__str__(value)
    if len(exact) > MAX_TEXT_BYTES:  # UTF-8 has at least one byte a character: refused before it is encoded
        raise error(
            f"{field}: got {len(exact)} characters, at most {MAX_TEXT_BYTES} bytes of UTF-8; send a digest of it"
        )
    try:
        n_bytes = len(exact.encode())
    except UnicodeEncodeError:
        raise error(f"{field}: has a lone surrogate, which has no UTF-8 form; repair the text at its source") from None
    if n_bytes > MAX_TEXT_BYTES:
        raise error(f"{field}: got {n_bytes} bytes of UTF-8, at most {MAX_TEXT_BYTES}; send a digest of it")
    if not empty and not n_bytes:
        raise error(f"{field}: is empty; leave the key out if it does not apply, or give its value")
    return exact


def checked_int(
    value: object,
    field: str,
    low: int,
    high: int,
    *,
    error: type[KeyingError] = KeyingError,
    type_error: type[KeyingTypeError] = KeyingTypeError,
) -> int:
    """An exact ``int`` in ``[low, high]``; bool is not an int here.

    Raises:
        KeyingError: out of range.
        KeyingTypeError: not an int (numpy integers and floats included), or a bool.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(f"{field}: got {type(value).__name__}, wanted int")
    exact = int.__index__(value)
    if not low <= exact <= high:
        raise error(f"{field}: out of range, wanted {low} <= {field} <= {high}")
    return exact


def checked_bytes(
    value: object,
    field: str,
    limit: int | None,
    *,
    error: type[KeyingError] = KeyingError,
    type_error: type[KeyingTypeError] = KeyingTypeError,
) -> bytes:
    """A snapshot of a bytes-like object of at most ``limit`` bytes; the size is looked at before the copy.

    Raises:
        KeyingError: longer than the limit, or multi-byte elements that are not little-endian.
        KeyingTypeError: no buffer (str and tensors included; hand in their bytes).
    """
    if isinstance(value, str):
        raise type_error(f"{field}: got str, wanted bytes")
    try:
        view = memoryview(value)  # type: ignore[arg-type]  # the TypeError is the test
    except TypeError:
        raise type_error(f"{field}: got {type(value).__name__}, wanted bytes") from None
    if limit is not None and view.nbytes > limit:
        raise error(f"{field}: got {view.nbytes} bytes, at most {limit}")
    if view.format[:1] in {">", "!"} and view.itemsize > 1:
        raise error(f"{field}: big-endian elements; hand in little-endian bytes")
    return view.tobytes()
