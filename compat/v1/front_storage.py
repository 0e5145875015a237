"""What the v1 front keeps: LMCache's keys under roots of their own, and v1 tensors as stored objects.

A chunk's key is LMCache's chunk hash, 32 bytes, unchanged. What else makes an LMCache object key is the namespace or
the shard: model and salt are in the root, the rank (LMCache's `kv_rank`) is the shard, the object group is always 0.

    root    MARK || first 28 bytes of SHA-256( text("lmcache-0.5/front") || text(model) || text(salt)
                                               || u32(chunk_size) || text(dtype) )

No v2 request can meet these entries: a session's root is a SHA-256 over another domain tag. The chunk size and the
element type are not in LMCache's keys; here they are, so that a server that was restarted with others misses.
`MARK` lets a clear from a v1 client, and people who list a store, tell v1 entries from the rest.

Source: docs/spec/v1-formats.md, "Front".
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from compat.errors import CompatError
from compat.v1.pickled_tensors import DTYPE_BYTES, PickledTensor, read_tensors, write_tensors
from keying.encoding import U32, text
from protocol_v2.storage import ObjectId, TensorSpec, stored_object
from protocol_v2.storage.objects import Envelope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol_v2.storage import Shard, StoredObject

MARK: Final = b"lmc5"
"""First bytes of the root of every v1 namespace. A schema-2 root begins so once in 2**32 spaces, and then a v1 client's
clear forgets that space too: a miss, never a wrong hit."""

_TAG: Final = "lmcache-0.5/front"
_DIGEST_BYTES: Final = 32 - len(MARK)
_PICKLE_OVERHEAD: Final = 64 * 1024
"""Bytes of a pickle for each tensor, beside its data (of which a slice of a larger buffer brings more than its own)."""

_MAX_SHARED_BYTES: Final = 16 * 1024 * 1024
"""Bytes that one tensor, sent for several chunks, may become: what a small message can cost."""


class V1RefusedError(CompatError):
    """A readable request that is not carried out; it is answered with its operation's failure.

    Args:
        reason: a short word for counters.
        message: for people; without salts, tokens or payloads.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChunkLayout(NamedTuple):
    """What one chunk's tensor is.

    Args:
        dtype: torch's name of the element type, one that travels.
        shape: extents.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def namespace_root(model: str, salt: str, *, chunk_size: int, dtype: str) -> bytes:
    """The root that the entries of one model and salt are kept under.

    Args:
        model: LMCache's model name.
        salt: LMCache's `cache_salt`; "" for none.
        chunk_size: tokens of a chunk.
        dtype: torch's name of the element type.

    Returns:
        32 bytes.
    """
    preimage = text(_TAG) + text(model) + text(salt) + U32.pack(chunk_size) + text(dtype)
    return MARK + hashlib.sha256(preimage).digest()[:_DIGEST_BYTES]


def is_namespace_root(root: bytes) -> bool:
    """Whether a root is one of these."""
    return root.startswith(MARK)


def unpickle_chunks(data: memoryview, wanted: int, layout: ChunkLayout) -> list[bytes]:
    """The bytes of a store's tensors, which is kept whole or not at all. Copies: for worker threads.

    Args:
        data: the pickle.
        wanted: chunks that the store names.
        layout: that its worker registered.

    Raises:
        PickleRefusedError: not a pickle that LMCache writes, or larger than these chunks can be.
        V1RefusedError: another number of tensors, or one of another layout.
    """
    limit = (wanted + 1) * (2 * layout.nbytes + _PICKLE_OVERHEAD)
    tensors = read_tensors(data, max_bytes=limit, max_tensors=max(wanted, 1), max_shared=_MAX_SHARED_BYTES)
    if len(tensors) != wanted:
        raise V1RefusedError("count", f"store: got {len(tensors)} tensors for {wanted} chunks; nothing was kept")
    for tensor in tensors:
        got = ChunkLayout(tensor.dtype, tensor.shape)
        if got != layout:
            raise V1RefusedError("layout", f"store: got {got}, wanted {layout} as registered; nothing was kept")
    return [bytes(tensor.data) for tensor in tensors]  # else one chunk would keep the whole message in memory


def pickle_objects(objects: Sequence[StoredObject]) -> bytes:
    """The answer to a retrieve, as the real client reads it. Copies the tensors: for worker threads."""
    tensors = [(obj.envelope.tensors[0], obj.buffers[0]) for obj in objects]
    return write_tensors([PickledTensor(spec.dtype, spec.shape, data) for spec, data in tensors])


def stored_chunks(
    root: bytes,
    hashes: Sequence[bytes],
    tensors: Sequence[bytes],
    layout: ChunkLayout,
    *,
    start: int,
    shard: Shard,
    chunk_size: int,
) -> list[StoredObject]:
    """The objects of a store.

    Args:
        root: of the namespace.
        hashes: of all chunks from the first of the prompt on, as far as the store goes.
        tensors: bytes of one for each chunk from `start` on.
        layout: what they are.
        start: first chunk of the store.
        shard: whose part.
        chunk_size: tokens of a chunk.
    """
    chain = (root, *hashes)
    return [
        stored_object(
            Envelope(
                ObjectId(root, chain[index + 1], shard),
                index * chunk_size,
                chunk_size,
                (TensorSpec(*layout, len(tensor)),),
                parent=chain[index],
            ),
            [tensor],
        )
        for index, tensor in enumerate(tensors, start)
    ]


def check_delivery(objects: Sequence[StoredObject], wanted: int, layout: ChunkLayout) -> None:
    """A retrieve gets all that it asked for, in its own layout, or nothing.

    Raises:
        V1RefusedError: fewer chunks, or some other layout.
    """
    if len(objects) != wanted:
        raise V1RefusedError("incomplete", f"retrieve: {len(objects)} of {wanted} chunks are still there")
    for obj in objects:
        (tensor, *more) = obj.envelope.tensors
        if more or ChunkLayout(tensor.dtype, tensor.shape) != layout:
            raise V1RefusedError("layout", "retrieve: stored by a worker with another layout")
