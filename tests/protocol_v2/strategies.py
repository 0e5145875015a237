"""Shared hypothesis strategies for the wire: small numbers, so that peers meet, and every message type."""

from typing import Any

from hypothesis import strategies as st
from msgspec import UNSET

from keying import KeySpace
from protocol_v2 import Limits, Offer
from protocol_v2.identity import extra_key_to_wire
from protocol_v2.messages import (
    MESSAGES,
    AttachReply,
    AttachRequest,
    ClearReply,
    ClearRequest,
    EndSessionReply,
    EndSessionRequest,
    ErrorReply,
    LookupReply,
    LookupRequest,
    Message,
    PingReply,
    PingRequest,
    PrefetchReply,
    PrefetchRequest,
    ReleaseReply,
    ReleaseRequest,
    RetrieveReply,
    RetrieveRequest,
    SharedRange,
    StatusReply,
    StatusRequest,
    StoreReply,
    StoreRequest,
)
from protocol_v2.tensors import DTYPE_BYTES, TensorMeta
from protocol_v2.wire_keys import Keys, Shard
from tests.keying.strategies import extra_key_lists, spaces

numbers = st.one_of(st.integers(1, 4), st.just(0x2A2A), st.integers(0, 0xFFFF))
feature_names = st.sampled_from(["a", "b", "kind/6", "grease/2a"])
offers = st.builds(
    Offer,
    st.frozensets(numbers, max_size=4),
    st.frozensets(numbers, max_size=4),
    st.frozensets(feature_names),
    st.integers(0, 3),
    st.integers(0, 3),
    st.frozensets(feature_names, max_size=1),
)
boot_ids = st.binary(min_size=16, max_size=16)
session_ids = st.text(alphabet="rs1é", min_size=1, max_size=4)
lease_ids = st.binary(min_size=16, max_size=16)
counts = st.integers(0, 65_536)
u16 = st.integers(0, 0xFFFF)
shards = st.integers(1, 5).flatmap(
    lambda world: st.builds(Shard, world=st.just(world), rank=st.integers(0, world - 1), group=st.integers(0, 3))
)
digest_keys = st.lists(st.binary(min_size=32, max_size=32), max_size=5).map(lambda ds: Keys(digests=b"".join(ds)))
token_keys = st.builds(
    lambda tokens, extra_keys, tail: Keys(
        tokens=b"".join(t.to_bytes(4, "little") for t in tokens),
        extra_keys=tuple(extra_key_to_wire(one) for one in extra_keys),
        partial_tail=tail,
    ),
    st.lists(st.integers(0, 2**32 - 1), max_size=12),
    extra_key_lists(),
    st.booleans(),
)
keys = st.one_of(digest_keys, token_keys)
metas = st.builds(TensorMeta, st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 4), max_size=3).map(tuple))


@st.composite
def chunk_fields(draw: Any, min_size: int = 0) -> dict[str, Any]:
    """Places and tensors of some chunks, in one of the two forms that descriptions may take."""
    count = draw(st.integers(min_size, 3))
    chunk_metas = st.lists(metas, min_size=1, max_size=2).map(tuple)
    lists = draw(st.sampled_from(sorted({min(count, 1), count})))
    return {
        "starts": tuple(draw(st.lists(st.integers(0, 2**48), min_size=count, max_size=count))),
        "n_tokens": tuple(draw(st.lists(st.integers(1, 256), min_size=count, max_size=count))),
        "tensors": tuple(draw(st.lists(chunk_metas, min_size=lists, max_size=lists))),
    }


nonces = st.binary(min_size=32, max_size=32)


@st.composite
def ranges(draw: Any, count: int, *, some: bool = False) -> Any:
    """Ranges in shared memory for some small chunks, apart from each other; with `some` not for all, or none at all."""
    if not count or draw(st.booleans()):
        return UNSET
    taken = draw(st.lists(st.integers(0, 2**40 - 1), min_size=count, max_size=count, unique=True))
    made = [SharedRange(granule, draw(st.integers(1, 2**63 - 1))) for granule in taken]
    return tuple(None if some and draw(st.booleans()) else one for one in made)


@st.composite
def attachments(draw: Any, kind: Any) -> Any:
    """Where a segment is."""
    size = 4096 * draw(st.integers(1, 2**36))
    numbers = st.integers(1, 2**31 - 1)
    return kind(pid=draw(numbers), fd=draw(numbers), nonce=draw(nonces), size=size)


MESSAGE_STRATEGIES: dict[type[Message], st.SearchStrategy[Message]] = {
    ErrorReply: st.builds(ErrorReply, error=u16, message=st.text(max_size=9), retriable=st.booleans()),
    LookupRequest: st.builds(
        LookupRequest,
        session=session_ids,
        keys=keys,
        world=st.integers(1, 8),
        groups=st.integers(1, 3),
        lease=st.booleans(),
    ),
    LookupReply: st.builds(
        LookupReply,
        hit_chunks=counts,
        lease=st.none() | lease_ids,
        lease_ms=st.integers(0, 2**32 - 1),
        miss=st.none() | u16,
    ),
    RetrieveRequest: st.builds(
        RetrieveRequest,
        lease=lease_ids,
        first=counts,
        count=st.integers(1, 65_536),
        shard=shards,
        shared=st.just(UNSET) | nonces,
    ),
    RetrieveReply: st.builds(
        lambda fields, miss, shared: RetrieveReply(count=len(fields["starts"]), miss=miss, shared=shared, **fields),
        fields := st.shared(chunk_fields(), key="retrieved"),
        st.none() | u16,
        fields.flatmap(lambda fields: ranges(len(fields["starts"]), some=True)),
    ),
    StoreRequest: st.builds(
        lambda session, keys, first, shard, fields, shared: StoreRequest(
            session=session, keys=keys, first=first, shard=shard, shared=shared, **fields
        ),
        session_ids,
        keys,
        counts,
        shards,
        fields := st.shared(chunk_fields(min_size=1), key="stored"),
        fields.flatmap(lambda fields: ranges(len(fields["starts"]))),
    ),
    StoreReply: st.builds(StoreReply, stored=counts, present=counts, declined=counts),
    PrefetchRequest: st.builds(
        PrefetchRequest, session=session_ids, keys=keys, world=st.integers(1, 8), groups=st.integers(1, 3)
    ),
    PrefetchReply: st.builds(PrefetchReply, accepted=counts, resident=counts),
    ReleaseRequest: st.builds(ReleaseRequest, lease=lease_ids, first=counts, count=st.none() | counts),
    ReleaseReply: st.builds(ReleaseReply, released=counts),
    EndSessionRequest: st.builds(EndSessionRequest, session=session_ids),
    EndSessionReply: st.builds(EndSessionReply, known=st.booleans()),
    PingRequest: st.just(PingRequest()),
    PingReply: st.builds(
        PingReply, boot=boot_ids, uptime_ms=st.integers(0, 2**64 - 1), loop_lag_us=st.integers(0, 2**64 - 1)
    ),
    StatusRequest: st.just(StatusRequest()),
    StatusReply: st.builds(
        StatusReply,
        status=st.dictionaries(
            st.text(max_size=6),
            st.one_of(
                st.none(),
                st.booleans(),
                st.integers(-(2**63), 2**64 - 1),
                st.text(max_size=6),
                st.floats(allow_nan=False),
            ),
            max_size=4,
        ),
    ),
    ClearRequest: st.builds(ClearRequest, scope=st.sampled_from(["space", "all"])),
    ClearReply: st.builds(ClearReply, objects=st.integers(0, 2**64 - 1), bytes=st.integers(0, 2**64 - 1)),
    AttachRequest: attachments(AttachRequest),
    AttachReply: attachments(AttachReply),
}
messages = st.one_of(*MESSAGE_STRATEGIES.values())

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
OTHER_SPACE = KeySpace("m", chunk_size=4, kv_dtype="float8_e4m3fn", attributes={"rope": "yarn"})
CLIENT_BOOT = bytes(range(16))
SERVER_BOOT = bytes(range(100, 116))
LIMITS = Limits(max_payload_bytes=4096, max_pending=4, heartbeat_ms=1000, silence_ms=4000, default_deadline_ms=500)

__all__ = [
    "CLIENT_BOOT",
    "LIMITS",
    "MESSAGE_STRATEGIES",
    "OTHER_SPACE",
    "SERVER_BOOT",
    "SPACE",
    "boot_ids",
    "keys",
    "messages",
    "offers",
    "payload_for",
    "spaces",
]


def payload_for(message: Message) -> tuple[bytes, ...]:
    """Payload frames in the sizes that a message announces."""
    return tuple(bytes(nbytes) for nbytes in message.payload_sizes())


assert set(MESSAGE_STRATEGIES) == set(MESSAGES[2].values()), "a message has no strategy"
