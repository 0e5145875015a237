"""Stored objects as messages carry them: a store's request and a retrieve's reply, with their payload frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol_v2.frames import MAX_PAYLOAD_FRAMES
from protocol_v2.messages import RetrieveReply
from protocol_v2.storage import ObjectId, Shard, TensorSpec, stored_object
from protocol_v2.storage.objects import Envelope
from protocol_v2.tensors import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol_v2.codes import MissReason
    from protocol_v2.frames import Frame
    from protocol_v2.messages import StoreRequest
    from protocol_v2.storage import StoredObject


def objects_of_store(
    root: bytes, digests: Sequence[bytes], message: StoreRequest, payload: Sequence[Frame]
) -> list[StoredObject]:
    """The objects of a store; the payload is chunk-major, of the announced sizes, and belongs to them from now on.

    Args:
        root: of the space.
        digests: keys of the prompt's chunks from the first on, 32 bytes each.
        message: the request, its places checked.
        payload: its frames.
    """
    shard = Shard(message.shard.world, message.shard.rank, message.shard.group)
    objects = []
    at = 0
    for place, (start, n_tokens) in enumerate(zip(message.starts, message.n_tokens, strict=True)):
        metas = message.tensors[0] if len(message.tensors) == 1 else message.tensors[place]
        index = message.first + place
        envelope = Envelope(
            ObjectId(root, digests[index], shard),
            start,
            n_tokens,
            tuple(TensorSpec(meta.dtype, tuple(meta.shape), meta.nbytes) for meta in metas),
            parent=digests[index - 1] if index else root,
        )
        objects.append(stored_object(envelope, payload[at : at + len(metas)], give=True))
        at += len(metas)
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
    objects: Sequence[StoredObject], miss: MissReason | None
) -> tuple[RetrieveReply, tuple[Frame, ...]]:
    """The reply that delivers objects, and its payload, uncopied.

    Args:
        objects: a prefix of what was asked for.
        miss: why the next one is not there; None where all are.
    """
    envelopes = [obj.envelope for obj in objects]
    metas = [tuple(TensorMeta(one.dtype, one.shape) for one in envelope.tensors) for envelope in envelopes]
    alike = len(metas) > 1 and all(one == metas[0] for one in metas)
    reply = RetrieveReply(
        count=len(envelopes),
        starts=tuple(envelope.start for envelope in envelopes),
        n_tokens=tuple(envelope.n_tokens for envelope in envelopes),
        tensors=(metas[0],) if alike else tuple(metas),
        miss=miss,
    )
    return reply, tuple(buffer for obj in objects for buffer in obj.buffers)
