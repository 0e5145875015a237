"""The header that every stored object carries, byte for byte, and the one way in: verified before use.

Theory of operation
-------------------
An object is `header || payload`; the payload is its tensors back to back. All integers are little-endian.

    0     8   magic           89 58 4b 45 0d 0a 1a 0a
    8     u32 schema          the storage schema
    12    u32 header_size     bytes of the header, its digest included
    16    32  root            of the space
    48    32  key             of the chunk or segment
    80    32  parent          key of the chunk before; the root; or zeros where it is not known
    112   u32 world
    116   u32 rank
    120   u32 group
    124   u32 n_tokens
    128   u64 start           prompt position of the first token
    136   u64 payload_size
    144   32  payload_digest  SHA-256 over the payload
    176   u32 n_tensors
    180   n_tensors times     u8(len dtype) dtype || u8(n_dims) n_dims x u64(extent) || u64(bytes)
    H-32  32  header_digest   SHA-256 over the H-32 bytes before it; H is header_size

Magic and schema stand where every schema there will be has them, so a reader tells "another schema" from "no object".
The magic has PNG's traps: a byte above 127, CR LF, SUB, LF, which transfers that change text destroy.

Why SHA-256 and not a CRC: the header's digest covers the payload's, so one digest binds identity, description and
bytes together, whole blocks that a file system swaps or repeats included; an undetected error stays out of reach
however many objects a fleet keeps; every language has it. It costs 0.5 ns a byte where the CPU has SHA instructions,
off the loop and with the interpreter lock released; memory tiers never compute it. It is no signature: who can write to
the store can write objects.

A reader checks bounds before work: 16 bytes tell schema and header size, the header's digest comes before any field,
the sizes must add up to what is there, identity must be the one asked for, and then the payload is hashed. Source:
docs/spec/storage-2.md, "Envelope".
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from protocol_v2.codes import MissReason
from protocol_v2.storage.errors import EnvelopeError, StorageValueError
from protocol_v2.storage.names import ObjectId, Shard
from protocol_v2.storage.objects import (
    MAX_DIMENSIONS,
    MAX_DTYPE_BYTES,
    MAX_TENSORS,
    Envelope,
    StoredObject,
    TensorSpec,
    split_payload,
)
from protocol_v2.storage.schema import STORAGE_SCHEMA, schema_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC: Final = b"\x89XKE\r\n\x1a\n"
PRELUDE: Final = struct.Struct("<8sII")
PRELUDE_BYTES: Final = PRELUDE.size
_FIXED: Final = struct.Struct("<32s32s32sIIIIQQ32sI")
_U64: Final = struct.Struct("<Q")
DIGEST_BYTES: Final = 32

MIN_HEADER_BYTES: Final = PRELUDE_BYTES + _FIXED.size + (1 + 1 + 1 + 8) + DIGEST_BYTES
MAX_HEADER_BYTES: Final = (
    PRELUDE_BYTES + _FIXED.size + MAX_TENSORS * (1 + MAX_DTYPE_BYTES + 1 + 8 * MAX_DIMENSIONS + 8) + DIGEST_BYTES
)
"""Bytes of the longest header: 1024 tensors of 16 dimensions. Nothing longer is read."""


class Header(NamedTuple):
    """A header that passed its checks.

    Attributes:
        envelope: what it says about the object.
        size: bytes before the payload.
        payload_digest: SHA-256 that the payload must have.
    """

    envelope: Envelope
    size: int
    payload_digest: bytes


def encode_header(obj: StoredObject) -> bytes:
    """The header that goes before an object's buffers; hashes the payload, copies nothing of it."""
    envelope = obj.envelope
    tensors = b"".join(_encode_tensor(tensor) for tensor in envelope.tensors)
    size = PRELUDE_BYTES + _FIXED.size + len(tensors) + DIGEST_BYTES
    root, key, shard = envelope.id
    fixed = _FIXED.pack(
        root,
        key,
        envelope.parent,
        *shard,
        envelope.n_tokens,
        envelope.start,
        envelope.payload_size,
        digest_of(obj.buffers),
        len(envelope.tensors),
    )
    covered = PRELUDE.pack(MAGIC, STORAGE_SCHEMA, size) + fixed + tensors
    return covered + hashlib.sha256(covered).digest()


def encoded_size(envelope: Envelope) -> int:
    """Bytes of the object: header and payload, without encoding either."""
    tensors = sum(1 + len(tensor.dtype) + 1 + 8 * len(tensor.shape) + 8 for tensor in envelope.tensors)
    return PRELUDE_BYTES + _FIXED.size + tensors + DIGEST_BYTES + envelope.payload_size


def header_size(prelude: bytes | memoryview) -> int:
    """Bytes of the header that begins with these, at least 16.

    Raises:
        EnvelopeError: no object of ours, another schema, or a size out of bounds.
    """
    if len(prelude) < PRELUDE_BYTES:
        raise _invalid(f"got {len(prelude)} bytes, wanted at least {PRELUDE_BYTES}")
    magic, schema, size = PRELUDE.unpack_from(prelude)
    if magic != MAGIC:
        raise _invalid("the magic is none of ours")
    fault = schema_fault(schema)
    if fault is not None:
        raise EnvelopeError(fault, f"the envelope has storage schema {schema}, this reader has {STORAGE_SCHEMA}")
    if not MIN_HEADER_BYTES <= size <= MAX_HEADER_BYTES:
        raise _invalid(f"header size {size}, wanted {MIN_HEADER_BYTES} to {MAX_HEADER_BYTES}")
    return int(size)


def decode_header(data: bytes | memoryview) -> Header:
    """The header at the beginning of `data`, which may go on with the payload.

    Raises:
        EnvelopeError: with the reason; `data` may hold anything.
    """
    size = header_size(data)
    if len(data) < size:
        raise _invalid(f"got {len(data)} bytes, wanted a header of {size}")
    header = bytes(data[:size])
    covered = header[:-DIGEST_BYTES]
    if hashlib.sha256(covered).digest() != header[-DIGEST_BYTES:]:
        raise EnvelopeError(MissReason.CHECKSUM, "the header is not the one that was written")
    root, key, parent, world, rank, group, n_tokens, start, payload_size, payload_digest, n_tensors = (
        _FIXED.unpack_from(covered, PRELUDE_BYTES)
    )
    # the digest only says that the bytes are as written: the writer may have been wrong, or hostile
    if not 1 <= n_tensors <= MAX_TENSORS:
        raise _invalid(f"{n_tensors} tensors, wanted 1 to {MAX_TENSORS}")
    tensors = _decode_tensors(covered, n_tensors)
    try:
        envelope = Envelope(ObjectId(root, key, Shard(world, rank, group)), start, n_tokens, tensors, parent)
    except StorageValueError as error:
        raise _invalid(str(error)) from None
    if envelope.payload_size != payload_size:
        raise _invalid(f"payload of {payload_size} bytes, but the tensors have {envelope.payload_size}")
    return Header(envelope, size, payload_digest)


def open_object(data: bytes | memoryview, wanted: ObjectId) -> StoredObject:
    """The object that `data` holds, all of it, if it is the one that was asked for.

    Args:
        data: header and payload, nothing after it; immutable, as views of it are handed out.
        wanted: the identity that the reader derived; never one taken from the object.

    Raises:
        EnvelopeError: with the reason; `data` may hold anything.
    """
    view = memoryview(data).toreadonly()
    header = decode_header(view)
    check_identity(header, wanted)
    check_size(header, len(view))
    return open_payload(header, view[header.size :])


def open_payload(header: Header, payload: bytes | memoryview) -> StoredObject:
    """The object of a checked header and its payload, for readers that have the two apart.

    Raises:
        EnvelopeError: these are not the bytes that were written.
    """
    view = memoryview(payload).toreadonly()
    check_size(header, header.size + len(view))
    if digest_of([view]) != header.payload_digest:
        raise EnvelopeError(MissReason.CHECKSUM, "the payload is not the one that was written")
    return StoredObject(header.envelope, tuple(split_payload(view, header.envelope)))


def check_identity(header: Header, wanted: ObjectId) -> None:
    """Raise unless the header names exactly the object that was asked for.

    Raises:
        EnvelopeError: identity mismatch.
    """
    got = header.envelope.id
    if got != wanted:
        field = next(name for name in got._fields if getattr(got, name) != getattr(wanted, name))
        raise EnvelopeError(MissReason.IDENTITY_MISMATCH, f"the envelope has another {field} than was asked for")


def check_size(header: Header, size: int) -> None:
    """Raise unless an object of `size` bytes is whole and has nothing after it.

    Raises:
        EnvelopeError: truncated, or too long.
    """
    expected = header.size + header.envelope.payload_size
    if size != expected:
        raise _invalid(f"got {size} bytes, wanted {expected}")


def digest_of(buffers: Iterable[memoryview]) -> bytes:
    """SHA-256 over buffers back to back; 32 bytes."""
    hasher = hashlib.sha256()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.digest()


def _encode_tensor(tensor: TensorSpec) -> bytes:
    dtype = tensor.dtype.encode("ascii")
    extents = b"".join(map(_U64.pack, tensor.shape))
    return bytes([len(dtype)]) + dtype + bytes([len(tensor.shape)]) + extents + _U64.pack(tensor.size)


def _decode_tensors(data: bytes, count: int) -> tuple[TensorSpec, ...]:
    tensors, at = [], PRELUDE_BYTES + _FIXED.size
    try:
        for _ in range(count):
            length = data[at]
            dtype, at = data[at + 1 : at + 1 + length], at + 1 + length
            dims, at = data[at], at + 1
            if dims > MAX_DIMENSIONS:
                raise _invalid(f"a tensor of {dims} dimensions, wanted at most {MAX_DIMENSIONS}")
            *shape, size = struct.unpack_from(f"<{dims + 1}Q", data, at)
            at += 8 * (dims + 1)
            tensors.append(TensorSpec(dtype.decode("ascii"), tuple(shape), size))
    except (IndexError, struct.error, UnicodeDecodeError):
        raise _invalid("the description of the tensors breaks off or is not ASCII") from None
    if at != len(data):
        raise _invalid(f"{len(data) - at} bytes after the last tensor")
    return tuple(tensors)


def _invalid(message: str) -> EnvelopeError:
    return EnvelopeError(MissReason.ENVELOPE_INVALID, message)
