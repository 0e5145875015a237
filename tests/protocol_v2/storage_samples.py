"""Chains, objects and tiers that the storage and cache tests are made from."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st

from protocol_v2.cache import CacheLimits, ChunkCache
from protocol_v2.storage import ObjectId, Shard, StoredObject, TensorSpec, stored_object
from protocol_v2.storage.objects import NO_PARENT, Envelope
from protocol_v2.tiers import DiskTier, Fsync

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from protocol_v2.places.remote import RemoteLimits
    from protocol_v2.tiers.remote import RemoteTier
    from protocol_v2.work import Task

T = TypeVar("T")
CHUNK = 16
ROOT = hashlib.sha256(b"space").digest()
OTHER_ROOT = hashlib.sha256(b"another space").digest()
ALONE = Shard(1, 0, 0)


def chain(name: str, count: int, root: bytes = ROOT) -> list[bytes]:
    """Keys that hang together like those of one prompt."""
    keys, parent = [], root
    for index in range(count):
        parent = hashlib.sha256(parent + f"{name}/{index}".encode()).digest()
        keys.append(parent)
    return keys


def make_object(
    keys: Sequence[bytes],
    index: int,
    *,
    shard: Shard = ALONE,
    root: bytes = ROOT,
    size: int = 64,
    fill: int | None = None,
    parent: bytes | None = None,
) -> StoredObject:
    """The object of one chunk of a chain; its bytes follow from key and shard unless `fill` is given."""
    tensor = TensorSpec("uint8", (size,), size)
    if parent is None:
        parent = keys[index - 1] if index else root
    envelope = Envelope(ObjectId(root, keys[index], shard), index * CHUNK, CHUNK, (tensor,), parent)
    return stored_object(envelope, [payload_of(keys[index], shard, size) if fill is None else bytes([fill]) * size])


def make_loose(key: bytes, *, size: int = 64, start: int = 0, shard: Shard = ALONE) -> StoredObject:
    """An object whose parent is not known."""
    envelope = Envelope(ObjectId(ROOT, key, shard), start, CHUNK, (TensorSpec("uint8", (size,), size),), NO_PARENT)
    return stored_object(envelope, [payload_of(key, shard, size)])


def payload_of(key: bytes, shard: Shard, size: int) -> bytes:
    """The bytes that belong to a key and shard."""
    return (hashlib.sha256(key + str(shard).encode()).digest() * (size // 32 + 1))[:size]


def run(task: Task[T], now: float = 0.0) -> T:
    """Run and finish a task, as a server with one thread would."""
    if not task.ready:
        task.run()
    return task.finish(now)


def open_disk(folder: Path, *, budget: int = 2**30, fsync: Fsync = Fsync.RENAME_ONLY, **options: Any) -> DiskTier:
    """A disk tier; without fsync, which no test here can tell from the other."""
    return DiskTier(folder, budget=budget, fsync=fsync, **options)


def open_cache(
    folder: Path | None,
    *,
    memory: int = 2**30,
    disk: int = 2**30,
    ticks: Iterator[int] | None = None,
    remote: RemoteTier | None = None,
    remote_limits: RemoteLimits | None = None,
    remote_executor: Executor | None = None,
    **limits: Any,
) -> ChunkCache:
    """A loaded cache; without a folder in memory alone. With `ticks` its clock and lease ids are counted."""
    counted: dict[str, Any] = {}
    clocked: dict[str, Any] = {}
    if ticks is not None:
        counted = {"new_lease_id": lambda: next(ticks).to_bytes(16, "big")}
        clocked = {"clock": ticks.__next__}
    cache = ChunkCache(
        memory,
        None if folder is None else open_disk(folder, budget=disk, **clocked),
        remote,
        limits=CacheLimits(**limits),
        remote_limits=remote_limits,
        remote_executor=remote_executor,
        **counted,
    )
    cache.load()
    return cache


def store_chain(cache: ChunkCache, keys: Sequence[bytes], *, now: float = 0.0, **options: Any) -> None:
    """Store all chunks of a chain, first to last."""
    for index in range(len(keys)):
        run(cache.store(make_object(keys, index, **options), now=now), now)


def hits(cache: ChunkCache, keys: Sequence[bytes], root: bytes = ROOT, **options: Any) -> int:
    """How many leading chunks a lookup without a lease hits."""
    defaults: dict[str, Any] = {"owner": "reader", "lease": False, "now": 0.0}
    return cache.lookup(root, keys, **(defaults | options)).chunks


def files_in(folder: Path) -> list[str]:
    """All files below a folder, as relative paths; the lock file is left out."""
    return sorted(
        str((Path(place) / file).relative_to(folder))
        for place, _, files in os.walk(folder)
        for file in files
        if file != "xk2.lock"
    )


digests = st.binary(min_size=32, max_size=32)
shards = st.integers(1, 0xFFFF).flatmap(
    lambda world: st.builds(Shard, st.just(world), st.integers(0, world - 1), st.integers(0, 0xFFFF))
)
object_ids = st.builds(ObjectId, digests, digests, shards)
dtypes = st.sampled_from(["bfloat16", "float16", "uint8", "float8_e4m3fn", "x"])


@st.composite
def tensor_specs(draw: st.DrawFn) -> TensorSpec:
    """Small tensors of any shape, scalars and empty ones included."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    elements = 1
    for extent in shape:
        elements *= extent
    return TensorSpec(draw(dtypes), shape, elements * draw(st.integers(1, 16)))


@st.composite
def stored_objects(draw: st.DrawFn) -> StoredObject:
    """Any small object."""
    tensors = tuple(draw(st.lists(tensor_specs(), min_size=1, max_size=4)))
    envelope = Envelope(
        draw(object_ids), draw(st.integers(0, 2**48)), draw(st.integers(1, 2**31 - 1)), tensors, draw(digests)
    )
    return stored_object(envelope, [draw(st.binary(min_size=one.size, max_size=one.size)) for one in tensors])
