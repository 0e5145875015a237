"""The envelope of stored objects (docs/spec/storage-2.md, "Envelope")."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol_v2.codes import MissReason
from protocol_v2.storage import (
    MAX_HEADER_BYTES,
    EnvelopeError,
    ObjectId,
    Shard,
    StorageValueError,
    StoredObject,
    TensorSpec,
    decode_header,
    encode_header,
    open_object,
    stored_object,
)
from protocol_v2.storage.envelope import MAGIC, MIN_HEADER_BYTES, encoded_size, header_size
from protocol_v2.storage.objects import MAX_TENSORS, OBJECT_OVERHEAD, Envelope
from tests.protocol_v2.storage_samples import ALONE, OTHER_ROOT, ROOT, chain, make_object, stored_objects

KEYS = chain("envelope", 3)


def sealed(obj: StoredObject) -> bytes:
    """The bytes of an object as a tier keeps them."""
    return encode_header(obj) + b"".join(obj.buffers)


def resealed(data: bytes) -> bytes:
    """The same bytes with a header digest that fits, as a hostile writer would make them."""
    size = struct.unpack_from("<I", data, 12)[0]
    covered = data[: size - 32]
    return covered + hashlib.sha256(covered).digest() + data[size:]


def reason_of(data: bytes, wanted: ObjectId) -> MissReason:
    """Why these bytes are a miss."""
    with pytest.raises(EnvelopeError) as caught:
        open_object(data, wanted)
    return caught.value.reason


@given(stored_objects())
def test_objects_round_trip(obj: StoredObject) -> None:
    """What was sealed is opened as it was: identity, description and every byte of every tensor."""
    opened = open_object(sealed(obj), obj.id)
    assert obj.envelope == opened.envelope
    assert [bytes(one) for one in obj.buffers] == [bytes(one) for one in opened.buffers]
    assert len(sealed(obj)) == encoded_size(obj.envelope)


@settings(max_examples=20)
@given(stored_objects())
def test_every_single_bit_matters(obj: StoredObject) -> None:
    """No object with one bit flipped, anywhere, is opened; with none flipped it is."""
    data = sealed(obj)
    assert obj.envelope == open_object(data, obj.id).envelope
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EnvelopeError):
            open_object(bytes(broken), obj.id)


@given(stored_objects(), st.data())
def test_every_truncation_and_every_addition_is_noticed(obj: StoredObject, data: st.DataObject) -> None:
    """An object that ends early, or has anything after its payload, is not opened."""
    whole = sealed(obj)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert reason_of(whole[:cut], obj.id) in {MissReason.ENVELOPE_INVALID, MissReason.CHECKSUM}
    more = data.draw(st.binary(min_size=1, max_size=40))
    assert reason_of(whole + more, obj.id) is MissReason.ENVELOPE_INVALID


@given(st.binary(max_size=400))
def test_any_bytes_are_an_object_or_a_typed_miss(data: bytes) -> None:
    """Arbitrary bytes give `EnvelopeError` and nothing else."""
    for prefix in (b"", MAGIC, MAGIC + struct.pack("<I", 2), MAGIC + struct.pack("<II", 2, 220)):
        with pytest.raises(EnvelopeError):
            open_object(prefix + data, make_object(KEYS, 0).id)


@given(st.binary(min_size=24, max_size=300), st.integers(1, 2000))
def test_a_header_that_only_its_digest_makes_right_is_still_checked(tail: bytes, count: int) -> None:
    """A writer can give any header a digest that fits: the fields are checked all the same."""
    base = bytearray(encode_header(make_object(KEYS, 0))[:180])
    struct.pack_into("<I", base, 176, count)
    header = bytearray(bytes(base) + tail + bytes(32))
    struct.pack_into("<I", header, 12, len(header))
    try:
        decoded = decode_header(resealed(bytes(header)))
    except EnvelopeError as error:
        assert error.reason is MissReason.ENVELOPE_INVALID
    else:
        assert decoded.size == len(header)


def test_each_wrong_identity_is_an_identity_mismatch() -> None:
    """I8, S5: an object under another root, key or shard than was asked for is a miss, and says which field differs."""
    obj = make_object(KEYS, 1, shard=Shard(2, 1, 1))
    data = sealed(obj)
    assert obj.envelope == open_object(data, obj.id).envelope
    for wanted, field in [
        (ObjectId(OTHER_ROOT, KEYS[1], Shard(2, 1, 1)), "root"),
        (ObjectId(ROOT, KEYS[0], Shard(2, 1, 1)), "key"),
        (ObjectId(ROOT, KEYS[1], Shard(2, 0, 1)), "shard"),
        (ObjectId(ROOT, KEYS[1], Shard(4, 1, 1)), "shard"),
        (ObjectId(ROOT, KEYS[1], Shard(2, 1, 0)), "shard"),
    ]:
        with pytest.raises(EnvelopeError, match=f"identity_mismatch: the envelope has another {field}") as caught:
            open_object(data, wanted)
        assert MissReason.IDENTITY_MISMATCH is caught.value.reason


def test_a_payload_of_another_object_is_noticed() -> None:
    """The header binds the payload: two whole objects with their payloads swapped are both misses."""
    one, two = make_object(KEYS, 0, size=4096), make_object(KEYS, 1, size=4096)
    assert MissReason.CHECKSUM is reason_of(encode_header(one) + bytes(two.buffers[0]), one.id)
    assert MissReason.CHECKSUM is reason_of(encode_header(two) + bytes(one.buffers[0]), two.id)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (0, MissReason.SCHEMA_RETIRED),
        (1, MissReason.SCHEMA_RETIRED),
        (3, MissReason.SCHEMA_TOO_NEW),
        (2**32 - 1, MissReason.SCHEMA_TOO_NEW),
    ],
)
def test_another_schema_is_told_before_anything_else_is_read(schema: int, reason: MissReason) -> None:
    """I12: an envelope of another schema is a miss with that reason, whatever follows the first 12 bytes."""
    obj = make_object(KEYS, 0)
    data = bytearray(sealed(obj))
    struct.pack_into("<I", data, 8, schema)
    assert reason is reason_of(resealed(bytes(data)), obj.id)
    assert reason is reason_of(bytes(data[:12]) + b"\xff" * 300, obj.id)


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (112, "<I", 0),  # world
        (112, "<I", 65536),
        (116, "<I", 1),  # rank of a world of one
        (120, "<I", 65536),  # group
        (124, "<I", 0),  # n_tokens
        (124, "<I", 2**31),
        (128, "<Q", 2**48 + 1),  # start
        (136, "<Q", 63),  # payload_size
        (136, "<Q", 2**63),
        (176, "<I", 0),  # n_tensors
        (176, "<I", 2),
        (176, "<I", MAX_TENSORS + 1),
        (176, "<I", 2**32 - 1),
        (180, "<B", 0),  # length of the first dtype
        (180, "<B", 255),
        (181, "<B", ord("U")),  # its first letter
        (181, "<B", 0xC3),
        (187, "<B", 0),  # dimensions
        (187, "<B", 17),
        (187, "<B", 255),
        (188, "<Q", 63),  # extent
        (188, "<Q", 2**40),
        (196, "<Q", 2**40),  # bytes of the tensor
    ],
)
def test_hostile_fields_are_refused(offset: int, form: str, value: int) -> None:
    """A header whose digest fits and whose fields are impossible is an invalid envelope."""
    obj = make_object(KEYS, 0)
    data = bytearray(sealed(obj))
    struct.pack_into(form, data, offset, value)
    assert MissReason.ENVELOPE_INVALID is reason_of(resealed(bytes(data)), obj.id)


@pytest.mark.parametrize("size", [0, MIN_HEADER_BYTES - 1, MAX_HEADER_BYTES + 1, 2**32 - 1])
def test_a_header_size_is_bounded_before_it_is_believed(size: int) -> None:
    """No reader allocates or reads by a header size that no writer writes."""
    data = bytearray(sealed(make_object(KEYS, 0)))
    struct.pack_into("<I", data, 12, size)
    with pytest.raises(EnvelopeError, match="header size"):
        header_size(bytes(data[:16]))


def test_announced_sizes_cost_no_memory() -> None:
    """A header that announces 2**63 bytes or 2**32 tensors is refused in the memory of the header."""
    data = bytearray(sealed(make_object(KEYS, 0)))
    struct.pack_into("<Q", data, 136, 2**63)
    struct.pack_into("<I", data, 176, 2**32 - 1)
    hostile = resealed(bytes(data))
    tracemalloc.start()
    try:
        reason_of(hostile, make_object(KEYS, 0).id)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_longest_header_has_room() -> None:
    """1024 tensors of 16 dimensions are within the header's bound, and come back."""
    tensor = TensorSpec("d" * 64, (1,) * 16, 1)
    envelope = replace(make_object(KEYS, 0).envelope, tensors=(tensor,) * MAX_TENSORS)
    obj = stored_object(envelope, [b"x" * MAX_TENSORS])
    assert MAX_HEADER_BYTES == len(encode_header(obj))
    assert envelope == open_object(sealed(obj), obj.id).envelope


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": -1},
        {"start": 2**48 + 1},
        {"n_tokens": 0},
        {"n_tokens": 2**31},
        {"tensors": ()},
        {"tensors": (TensorSpec("uint8", (1,), 1),) * 1025},
        {"tensors": (TensorSpec("", (1,), 1),)},
        {"tensors": (TensorSpec("BF16", (1,), 2),)},
        {"tensors": (TensorSpec("x" * 65, (1,), 1),)},
        {"tensors": (TensorSpec("x\n", (1,), 1),)},
        {"tensors": (TensorSpec("uint8", (1,) * 17, 1),)},
        {"tensors": (TensorSpec("uint8", (-1,), 1),)},
        {"tensors": (TensorSpec("uint8", (2**40,), 2**40),)},
        {"tensors": (TensorSpec("uint8", (2**30, 2**30), 2**60),)},
        {"tensors": (TensorSpec("uint8", (4,), 3),)},
        {"tensors": (TensorSpec("uint8", (4,), 5),)},
        {"tensors": (TensorSpec("uint8", (4,), 68),)},
        {"tensors": (TensorSpec("uint8", (0,), 1),)},
        {"tensors": (TensorSpec("uint8", (2**39,), 2**39),) * 3},
        {"parent": bytes(31)},
    ],
)
def test_impossible_descriptions_are_refused(wrong: dict[str, Any]) -> None:
    """S7 and bounds: a writer cannot make an envelope that a reader refuses."""
    with pytest.raises(StorageValueError):
        replace(make_object(KEYS, 0).envelope, **wrong)


def test_buffers_must_be_what_the_envelope_says() -> None:
    """J3: what is stored has the sizes of its record: more, less or another split is refused; one buffer is cut up."""
    tensors = (TensorSpec("uint8", (2, 2), 4), TensorSpec("float16", (3,), 6), TensorSpec("uint8", (0, 9), 0))
    envelope = Envelope(make_object(KEYS, 0).id, 0, 2, tensors)
    apart = stored_object(envelope, [b"abcd", b"efghij", b""])
    whole = stored_object(envelope, [b"abcdefghij"])
    assert [bytes(one) for one in apart.buffers] == [bytes(one) for one in whole.buffers] == [b"abcd", b"efghij", b""]
    for wrong in ([], [b"abcd"], [b"abcde", b"fghij", b""], [b"abcdefghij", b""], [b"abcdefghijk"]):
        with pytest.raises(StorageValueError, match="payload"):
            stored_object(envelope, wrong)


def test_a_short_last_chunk_has_its_own_size() -> None:
    """J3: a partial tail's record has its own token count and bytes, not those of a full chunk."""
    envelope = Envelope(make_object(KEYS, 1).id, 16, 1, (TensorSpec("uint8", (1, 4), 4),))
    opened = open_object(sealed(stored_object(envelope, [b"tail"])), envelope.id)
    assert (1, 17, b"tail") == (opened.envelope.n_tokens, opened.envelope.stop, bytes(opened.buffers[0]))


def test_stored_bytes_cannot_be_changed_by_who_gave_them() -> None:
    """R3, J6: a caller's buffer is copied, so what it holds later changes nothing in the object."""
    buffer = bytearray(b"first" * 10)
    envelope = Envelope(make_object(KEYS, 0).id, 0, 1, (TensorSpec("uint8", (50,), 50),))
    for given_buffer in (buffer, memoryview(buffer), memoryview(buffer).toreadonly()):
        obj = stored_object(envelope, [given_buffer])
        buffer[:5] = b"other"
        assert b"first" * 10 == bytes(obj.buffers[0])
        buffer[:5] = b"first"


def test_stored_bytes_cannot_be_changed_by_who_got_them() -> None:
    """R3: what is handed out is read-only, given memory included."""
    buffer = bytearray(b"given" * 10)
    envelope = Envelope(make_object(KEYS, 0).id, 0, 1, (TensorSpec("uint8", (50,), 50),))
    for obj in (stored_object(envelope, [buffer], give=True), stored_object(envelope, [bytes(buffer)])):
        with pytest.raises(TypeError):
            obj.buffers[0][0] = 1
    opened = open_object(sealed(obj), obj.id)
    with pytest.raises(TypeError):
        opened.buffers[0][0] = 1


def test_given_memory_and_bytes_are_not_copied() -> None:
    """Bytes, and memory that the caller gives away, are kept as they are."""
    buffer, data = bytearray(4096), bytes(4096)
    envelope = Envelope(make_object(KEYS, 0).id, 0, 1, (TensorSpec("uint8", (4096,), 4096),))
    assert stored_object(envelope, [buffer], give=True).buffers[0].obj is buffer
    assert stored_object(envelope, [data]).buffers[0].obj is data
    assert stored_object(envelope, [buffer]).buffers[0].obj is not buffer


def test_wider_and_strided_buffers_are_bytes_in_c_order() -> None:
    """A view of wider elements, or of every second byte, is stored as the bytes that it shows."""
    envelope = Envelope(make_object(KEYS, 0).id, 0, 1, (TensorSpec("uint32", (2,), 8),))
    wide = memoryview(bytes(range(8))).cast("I")
    strided = memoryview(bytes(range(16)))[::2]
    assert bytes(range(8)) == bytes(stored_object(envelope, [wide]).buffers[0])
    assert bytes(range(0, 16, 2)) == bytes(stored_object(envelope, [strided]).buffers[0])


def test_objects_print_and_cost_what_they_are() -> None:
    """An object's repr shows name and sizes, never bytes; its charge counts an overhead beside the payload."""
    obj = make_object(KEYS, 0, size=64, shard=ALONE)
    assert f"StoredObject({obj.id.name}, 1 tensors, 64 bytes)" == repr(obj)
    assert 64 + OBJECT_OVERHEAD == obj.charge
