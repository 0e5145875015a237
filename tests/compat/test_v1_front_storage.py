"""Roots of v1 namespaces, and stores and deliveries that fit or are refused."""

from itertools import combinations

import pytest

from compat.v1.closed_pickle import PickleRefusedError
from compat.v1.front_storage import (
    MARK,
    ChunkLayout,
    V1RefusedError,
    check_delivery,
    is_namespace_root,
    namespace_root,
    pickle_objects,
    stored_chunks,
    unpickle_chunks,
)
from compat.v1.pickled_tensors import PickledTensor, write_tensors
from keying import KeySpace
from protocol_v2.storage import Shard

LAYOUT = ChunkLayout("float16", (2, 4))
ROOT = namespace_root("m", "", chunk_size=4, dtype="float16")
HASHES = [bytes([place]) * 32 for place in range(1, 4)]


def test_a_root_names_model_salt_chunk_size_and_dtype() -> None:
    """Each of them alone changes it, and none can pass for its neighbour."""
    roots = [
        namespace_root(model, salt, chunk_size=size, dtype=dtype)
        for model, salt, size, dtype in (
            ("m", "", 4, "float16"),
            ("n", "", 4, "float16"),
            ("m", "s", 4, "float16"),
            ("ms", "", 4, "float16"),
            ("m", "", 8, "float16"),
            ("m", "", 4, "bfloat16"),
        )
    ]
    assert all(one != two for one, two in combinations(roots, 2))
    assert all(len(root) == 32 and is_namespace_root(root) for root in roots)
    assert ROOT == roots[0]


def test_a_root_is_pinned() -> None:
    """What is on disk is found again by every later version."""
    assert MARK == b"lmc5"
    assert ROOT.hex() == "6c6d63358335a73460886b5a50e7cfe0a4d94c61819e714aac776ef77a6fd726"
    assert not is_namespace_root(KeySpace("m", chunk_size=4, kv_dtype="float16").root)


def test_a_store_comes_back_as_it_went_in() -> None:
    """Pickle, objects, pickle: the same tensors, each object with its own place and parent."""
    data = write_tensors([PickledTensor("float16", (2, 4), bytes([fill]) * 16) for fill in (7, 8)])
    tensors = unpickle_chunks(memoryview(data), 2, LAYOUT)
    assert [bytes] * 2 == [type(tensor) for tensor in tensors]  # no view, which would keep the whole message in memory
    objects = stored_chunks(ROOT, HASHES, tensors, LAYOUT, start=1, shard=Shard(2, 1), chunk_size=4)
    assert [(HASHES[1], HASHES[0], 4, 4), (HASHES[2], HASHES[1], 8, 4)] == [
        (obj.id.key, obj.envelope.parent, obj.envelope.start, obj.envelope.n_tokens) for obj in objects
    ]
    first = stored_chunks(ROOT, HASHES[:1], tensors[:1], LAYOUT, start=0, shard=Shard(2, 1), chunk_size=4)
    assert first[0].envelope.parent == ROOT
    check_delivery(objects, 2, LAYOUT)
    assert data == pickle_objects(objects)


@pytest.mark.parametrize(
    ("wanted", "layout", "reason"),
    [
        (1, LAYOUT, "pickle"),
        (3, LAYOUT, "count"),
        (2, ChunkLayout("float16", (4, 2)), "layout"),
        (2, ChunkLayout("int16", (2, 4)), "layout"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(wanted: int, layout: ChunkLayout, reason: str) -> None:
    """More tensors than chunks are not even read; fewer, or others than registered, have a reason."""
    data = memoryview(write_tensors([PickledTensor("float16", (2, 4), bytes(16))] * 2))
    assert [bytes(16)] * 2 == unpickle_chunks(data, 2, LAYOUT)
    with pytest.raises(PickleRefusedError if reason == "pickle" else V1RefusedError) as caught:
        unpickle_chunks(data, wanted, layout)
    assert reason == getattr(caught.value, "reason", None)


def test_a_pickle_is_measured_before_it_is_read() -> None:
    """Larger than these chunks can be: refused, whatever it says."""
    with pytest.raises(PickleRefusedError, match="at most"):
        unpickle_chunks(memoryview(bytes(1 << 20)), 2, LAYOUT)


def test_a_delivery_is_whole_and_of_the_readers_own_layout() -> None:
    """Fewer chunks, or another layout, deliver nothing."""
    objects = stored_chunks(ROOT, HASHES, [bytes(16)] * 3, LAYOUT, start=0, shard=Shard(), chunk_size=4)
    check_delivery(objects, 3, LAYOUT)
    for wanted, layout, reason in ((4, LAYOUT, "incomplete"), (3, ChunkLayout("float16", (4, 2)), "layout")):
        with pytest.raises(V1RefusedError) as caught:
            check_delivery(objects, wanted, layout)
        assert caught.value.reason == reason
