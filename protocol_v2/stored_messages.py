"""Stored objects as messages carry them: a store's request and a retrieve's reply, with their payload frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from protocol_v2.frames import MAX_PAYLOAD_FRAMES
from protocol_v2.messages import RetrieveReply
from protocol_v2.storage import ObjectId, Shard, TensorSpec, stored_object
from protocol_v2.storage.objects import Envelope
from protocol_v2.tensors import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.codes import MissReason
    from protocol_v2.frames import Frame
    from protocol_v2.messages import SharedRange, StoreRequest
    from protocol_v2.storage import StoredObject


def values_of(count: int, tensors: Sequence[tuple[TensorMeta, ...]], payload: Sequence[Frame]) -> list[Sequence[Frame]]:
    """A payload, cut into the frames of each of its `count` chunks."""
    values, at = [], 0
    for place in range(count):
        frames = len(metas_of(tensors, place))
        values.append(payload[at : at + frames])
        at += frames
    return values


def objects_of_store(
    root: bytes, digests: Sequence[bytes], message: StoreRequest, values: Sequence[Sequence[Frame]]
) -> list[StoredObject]:
    """The objects of a store.

    Args:
        root: of the space.
        digests: keys of the prompt's chunks from the first on, 32 bytes each.
        message: the request, its places checked.
        values: for each chunk its tensors' bytes, one buffer for each or all back to back in one; they belong to the
            objects from now on.
    """
    shard = Shard(message.shard.world, message.shard.rank, message.shard.group)
    objects = []
    for place, (start, n_tokens) in enumerate(zip(message.starts, message.n_tokens, strict=True)):
        index = message.first + place
        envelope = Envelope(
            ObjectId(root, digests[index], shard),
            start,
            n_tokens,
            tuple(TensorSpec(meta.dtype, tuple(meta.shape), meta.nbytes) for meta in metas_of(message.tensors, place)),
            parent=digests[index - 1] if index else root,
        )
        objects.append(stored_object(envelope, values[place], give=True))
    return objects


def leading_that_fit(objects: Sequence[StoredObject], most: int) -> Sequence[StoredObject]:
    """The leading objects that one message can carry: `most` bytes, and as many frames as a message may have."""
    size = frames = 0
    for count, obj in enumerate(objects):
        size += obj.envelope.payload_size
        frames += len(obj.buffers)
        if size > most or frames > MAX_PAYLOAD_FRAMES:
            return objects[:count]
    return objects


def reply_of_objects(
    objects: Sequence[StoredObject],
    miss: MissReason | None,
    range_of: Callable[[StoredObject], SharedRange | None] | None = None,
) -> tuple[RetrieveReply, tuple[Frame, ...]]:
    """The reply that delivers objects, and its payload, uncopied.

    Args:
        objects: a prefix of what was asked for.
        miss: why the next one is not there; None where all are.
        range_of: says where an object lies in shared memory; None sends all in the payload.
    """
    envelopes = [obj.envelope for obj in objects]
    metas = [tuple(TensorMeta(one.dtype, one.shape) for one in envelope.tensors) for envelope in envelopes]
    alike = len(metas) > 1 and all(one == metas[0] for one in metas)
    ranges = [None] * len(objects) if range_of is None else [range_of(obj) for obj in objects]
    reply = RetrieveReply(
        count=len(envelopes),
        starts=tuple(envelope.start for envelope in envelopes),
        n_tokens=tuple(envelope.n_tokens for envelope in envelopes),
        tensors=(metas[0],) if alike else tuple(metas),
        miss=miss,
        shared=tuple(ranges) if any(ranges) else UNSET,
    )
    inline = [obj for obj, where in zip(objects, ranges, strict=True) if where is None]
    return reply, tuple(buffer for obj in inline for buffer in obj.buffers)


def metas_of(tensors: Sequence[tuple[TensorMeta, ...]], place: int) -> tuple[TensorMeta, ...]:
    """Descriptions of one chunk's tensors: one list may stand for all chunks."""
    return tensors[0] if len(tensors) == 1 else tensors[place]
