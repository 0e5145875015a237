"""A stored object in memory: whose value it is, what its tensors are, and their bytes, which nobody can change.

Buffers are taken without a copy where nothing else can write to them: `bytes`, or memory that the caller gives away.
All else is copied once, here. What goes out are read-only views, so no reader can change what the next one gets.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from keying.encoding import MAX_CHUNK_SIZE, MAX_POSITION
from protocol_v2.storage.errors import StorageValueError
from protocol_v2.storage.names import ObjectId, checked_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from protocol_v2.storage.names import ChunkId

MAX_TENSORS: Final = 1024
"""Tensors of an object."""

MAX_DIMENSIONS: Final = 16
MAX_EXTENT: Final = 2**40 - 1
MAX_ELEMENTS: Final = 2**48
MAX_ELEMENT_BYTES: Final = 16
MAX_DTYPE_BYTES: Final = 64
MAX_PAYLOAD_BYTES: Final = 2**40
"""Bytes of an object's payload that can be described; what a tier takes is its budget's business."""

NO_PARENT: Final = bytes(32)
"""Parent of an object whose parent is not known."""

OBJECT_OVERHEAD: Final = 1024
"""Bytes that an object costs in memory beside its payload: identity, indexes, views; so that empty ones cost too."""

_DTYPE: Final = re.compile(r"[a-z0-9_]+", re.ASCII)


class TensorSpec(NamedTuple):
    """One tensor of an object.

    Args:
        dtype: resolved name of the element type, such as ``bfloat16``: lower-case letters, digits, ``_``; 1 to 64.
        shape: extents, at most 16, each in [0, 2**40); their product at most 2**48.
        size: bytes; elements times a whole number of bytes in [1, 16].
    """

    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an object says about itself, beside its bytes.

    Args:
        id: root, key and shard.
        start: prompt position of the first token, in [0, 2**48].
        n_tokens: tokens that the value covers, in [1, 2**31).
        tensors: 1 to 1024.
        parent: key of the chunk before (the root, for a first chunk or a segment), or `NO_PARENT`. It orders
            eviction, nothing else: a wrong parent never makes a wrong hit.

    Raises:
        StorageValueError: a field is out of bounds.
    """

    id: ObjectId
    start: int
    n_tokens: int
    tensors: tuple[TensorSpec, ...]
    parent: bytes = NO_PARENT

    def __post_init__(self) -> None:
        checked_digest(self.parent, "parent")
        if not 0 <= self.start <= MAX_POSITION:
            raise StorageValueError(f"start: got {self.start}, wanted 0 to {MAX_POSITION}")
        if not 1 <= self.n_tokens <= MAX_CHUNK_SIZE:
            raise StorageValueError(f"n_tokens: got {self.n_tokens}, wanted 1 to {MAX_CHUNK_SIZE}")
        if not 1 <= len(self.tensors) <= MAX_TENSORS:
            raise StorageValueError(f"tensors: got {len(self.tensors)}, wanted 1 to {MAX_TENSORS}")
        for place, tensor in enumerate(self.tensors):
            _check_tensor(tensor, place)
        if self.payload_size > MAX_PAYLOAD_BYTES:
            raise StorageValueError(f"payload: got {self.payload_size} bytes, wanted at most {MAX_PAYLOAD_BYTES}")

    @property
    def payload_size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def chain(self) -> tuple[ChunkId, ChunkId]:
        """This chunk and the one before it: what must stay while this one is stored."""
        return self.id.chunk, (self.id.root, self.parent)

    @property
    def stop(self) -> int:
        """Prompt position after the last token."""
        return self.start + self.n_tokens


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """An object: envelope, and one read-only buffer for each tensor. Made by `stored_object` or `open_object`."""

    envelope: Envelope
    buffers: tuple[memoryview, ...]

    @property
    def id(self) -> ObjectId:
        """Whose value this is."""
        return self.envelope.id

    @property
    def charge(self) -> int:
        """Bytes that a memory budget is charged with."""
        return self.envelope.payload_size + OBJECT_OVERHEAD

    def __repr__(self) -> str:
        return f"StoredObject({self.id.name}, {len(self.buffers)} tensors, {self.envelope.payload_size} bytes)"


def stored_object(envelope: Envelope, buffers: Sequence[Buffer], *, give: bool = False) -> StoredObject:
    """An object from a caller's buffers.

    Args:
        envelope: what the buffers are.
        buffers: one for each tensor in order, or a single one that holds all of them back to back.
        give: the caller gives the memory away: nobody else can write to it from now on. False copies what is not
            `bytes`.

    Raises:
        StorageValueError: buffers that are not the sizes that the envelope promises.
    """
    views = [_frozen(buffer, give=give) for buffer in buffers]
    sizes = [tensor.size for tensor in envelope.tensors]
    if len(views) == 1 and views[0].nbytes == sum(sizes):
        views = split_payload(views[0], envelope)
    if [view.nbytes for view in views] != sizes:
        raise StorageValueError(
            f"payload: got {len(views)} buffers of {sum(view.nbytes for view in views)} bytes, wanted one for each of "
            f"{len(sizes)} tensors, of {sum(sizes)} bytes in all"
        )
    return StoredObject(envelope, tuple(views))


def split_payload(payload: memoryview, envelope: Envelope) -> list[memoryview]:
    """A payload cut into its tensors. payload: read-only bytes, as many as the envelope says."""
    views, at = [], 0
    for tensor in envelope.tensors:
        views.append(payload[at : at + tensor.size])
        at += tensor.size
    return views


def _frozen(buffer: Buffer, *, give: bool) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    elif view.nbytes == 0:
        return memoryview(b"")
    elif not (give or type(view.obj) is bytes):
        view = memoryview(bytes(view))
    return view.cast("B").toreadonly()


def _check_tensor(tensor: TensorSpec, place: int) -> None:
    if not (len(tensor.dtype) <= MAX_DTYPE_BYTES and _DTYPE.fullmatch(tensor.dtype)):
        raise StorageValueError(f"tensors[{place}].dtype: wanted 1 to {MAX_DTYPE_BYTES} of a-z, 0-9 and _")
    if len(tensor.shape) > MAX_DIMENSIONS or not all(0 <= extent <= MAX_EXTENT for extent in tensor.shape):
        raise StorageValueError(
            f"tensors[{place}].shape: wanted at most {MAX_DIMENSIONS} extents, each 0 to {MAX_EXTENT}"
        )
    elements = math.prod(tensor.shape)
    if elements > MAX_ELEMENTS:
        raise StorageValueError(f"tensors[{place}].shape: got {elements} elements, wanted at most {MAX_ELEMENTS}")
    fits = tensor.size == 0 if elements == 0 else elements <= tensor.size <= elements * MAX_ELEMENT_BYTES
    if not fits or (elements and tensor.size % elements):
        raise StorageValueError(
            f"tensors[{place}].size: got {tensor.size} bytes for {elements} elements, wanted a whole number of bytes "
            f"for each, 1 to {MAX_ELEMENT_BYTES}"
        )
