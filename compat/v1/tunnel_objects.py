"""What travels through the tunnel: chunk keys as token ids, and stored objects as tensors of bytes.

A v1 server takes one tensor a chunk, and all of one worker have one shape. So each chunk's value goes as one tensor of
bytes: the object of storage schema 2, envelope and all, which the reader verifies against the identity that it derived
itself. Whatever such a server mixes up is then a miss.

Source: docs/spec/v1-formats.md, "Tunnel".
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from compat.tunnel import tunnel_tokens
from compat.v1.pickled_tensors import PickledTensor, read_tensors, write_tensors
from protocol_v2.codes import MissReason
from protocol_v2.storage import EnvelopeError, StoredObject, encode_header, open_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol_v2.storage import ObjectId

MAX_CACHED_TOKENS: Final = 2**22
"""Token ids of chunks that are kept expanded, 4 bytes each: a prompt's are needed three times."""

_CODE: Final = next(code for code in "IL" if array(code).itemsize == 4)


class ChunkExpander:
    """Token ids of chunks, the latest remembered.

    Args:
        chunk_size: the server's and the space's.
    """

    def __init__(self, chunk_size: int) -> None:
        cached = lru_cache(maxsize=max(1, MAX_CACHED_TOKENS // chunk_size))
        self._expand = cached(lambda digest: array(_CODE, tunnel_tokens(digest, chunk_size)))

    def tokens(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """The token ids that stand for a prompt's chunks."""
        tokens = array(_CODE)
        for digest in digests:
            tokens += self._expand(digest)
        return tuple(tokens)


def model_name(root: bytes, group: int) -> str:
    """What a v1 server is told for a model: the space, so that nobody else's chunks or layouts are under it."""
    return f"xk2-{root.hex()}" if group == 0 else f"xk2-{root.hex()}-g{group}"


def pack_object(obj: StoredObject) -> bytes:
    """An object as the bytes of one tensor."""
    return b"".join((encode_header(obj), *obj.buffers))


def pickle_chunks(chunks: Sequence[bytes]) -> bytes:
    """What a store commits: a tensor of bytes for each chunk, all of one size."""
    return write_tensors([PickledTensor("uint8", (1, 1, len(chunk)), chunk) for chunk in chunks])


def open_chunks(data: memoryview, wanted: Sequence[ObjectId]) -> tuple[list[StoredObject], MissReason | None]:
    """The leading objects of an answer that are what was asked for, and why the next one is not.

    Raises:
        CompatError: not the pickle of tensors at all.
    """
    objects: list[StoredObject] = []
    tensors = read_tensors(data, max_tensors=len(wanted))
    for tensor, identity in zip(tensors, wanted, strict=False):
        try:
            objects.append(open_object(tensor.data, identity))
        except EnvelopeError as error:
            return objects, error.reason
    return objects, None if len(objects) == len(wanted) else MissReason.ABSENT
