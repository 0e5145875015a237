"""Requests and replies: round trips, tolerance where it is safe, strictness where identity is at stake."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from keying import CacheSalt, LoraAdapter, MultimodalItem, Tag
from protocol_v2.body import encode
from protocol_v2.codes import Code, ErrorCode
from protocol_v2.errors import RemoteProtocolError, TensorError
from protocol_v2.identity import keys_of_tokens
from protocol_v2.messages import (
    LookupReply,
    LookupRequest,
    Message,
    PingReply,
    ReleaseRequest,
    RetrieveReply,
    RetrieveRequest,
    StoreReply,
    StoreRequest,
    decode_message,
    encode_message,
)
from protocol_v2.tensors import TensorMeta
from protocol_v2.wire_keys import Keys, Shard
from tests.protocol_v2.strategies import messages

LEASE = bytes(range(16))
KEYS = keys_of_tokens([1, 2, 3], [MultimodalItem("img", 0, 2), LoraAdapter("a"), CacheSalt("s"), Tag("t", b"v")])
LOOKUP = LookupRequest(session="r", keys=KEYS)
META = TensorMeta("float16", (2, 3))
STORE = StoreRequest(session="r", keys=KEYS, starts=(0, 4), n_tokens=(4, 4), tensors=((META, META),))


def plain(message: Message) -> dict[str, Any]:
    """A message as builtin values, to be spoilt."""
    made: dict[str, Any] = msgspec.msgpack.decode(encode_message(message))
    return made


def refused(code: int, body: dict[str, Any] | bytes) -> RemoteProtocolError:
    """How a body is refused."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_message(code, body if isinstance(body, bytes) else encode(body), wire=2)
    return caught.value


@given(messages)
def test_every_message_round_trips(message: Message) -> None:
    """Decoding undoes encoding, for every struct of the wire version."""
    assert message == decode_message(message.code, encode_message(message), wire=2)


@given(messages)
def test_a_body_is_a_map_with_names(message: Message) -> None:
    """L5: messages are maps, never arrays, so that a field may be added."""
    absent = {name for name in message.__struct_fields__ if getattr(message, name) is UNSET}
    assert set(plain(message)) == set(message.__struct_fields__) - absent
    assert (
        ErrorCode.MALFORMED == refused(message.code, encode(list(plain(message).values()))).error_code
        or not message.__struct_fields__
    )


@given(messages)
def test_unknown_fields_of_a_message_are_tolerated(message: Message) -> None:
    """A later version may add a field to a request or a reply."""
    body = plain(message) | {"added_in_wire_3": [1, {"x": b"y"}]}
    assert message == decode_message(message.code, encode(body), wire=2)


@pytest.mark.parametrize("name", ["lora_nam", "extra_key", "token_ids", "salt"])
def test_unknown_fields_of_an_identity_are_refused(name: str) -> None:
    """N6, L7: a misspelt, retired or newer field beside the keys is refused, never dropped; without it all is read."""
    body = plain(LOOKUP)
    assert LOOKUP == decode_message(Code.LOOKUP, encode(body), wire=2)
    body["keys"][name] = "x"
    error = refused(Code.LOOKUP, body)
    assert (ErrorCode.MALFORMED, True) == (error.error_code, name in str(error))
    store = plain(STORE)
    store["shard"]["pp_rank"] = 1
    assert "pp_rank" in str(refused(Code.STORE, store))


def test_a_message_is_known_by_its_code_not_by_its_shape() -> None:
    """N4: the code in the header decides; a body of another message is not taken for one."""
    assert ErrorCode.UNKNOWN_CODE == refused(99, encode_message(LOOKUP)).error_code
    assert ErrorCode.UNKNOWN_CODE == refused(Code.HELLO, encode_message(LOOKUP)).error_code
    assert ErrorCode.MALFORMED == refused(Code.RETRIEVE, encode_message(LOOKUP)).error_code


@pytest.mark.parametrize("kind", [6, 127, 200, 0, 40_000, 5_000_000_000])
def test_an_extra_key_of_an_unknown_kind_is_named_as_such(kind: int) -> None:
    """N5, G3: one unknown kind refuses the whole request with its own code, and is never read as another kind."""
    body = plain(LOOKUP)
    body["keys"]["extra_keys"].insert(2, [kind, "value"])
    error = refused(Code.LOOKUP, body)
    assert ErrorCode.UNKNOWN_KIND == error.error_code
    assert f"extra_keys[2]: kind {kind}" in str(error)


@pytest.mark.parametrize(
    "part",
    ["bare string", [], ["lora", "a"], [-1, "x"], [True, "x"], {"kind": 1}, [1, "img", 0], [1, "img", 0, 2, 9], None],
)
def test_what_is_no_extra_key_is_malformed(part: object) -> None:
    """G3: bare strings, names for kinds, too few and too many elements are refused, not guessed at."""
    body = plain(LOOKUP)
    body["keys"]["extra_keys"] = [part]
    assert ErrorCode.MALFORMED == refused(Code.LOOKUP, body).error_code


@pytest.mark.parametrize(
    "part",
    [
        [1, "", 0, 1],
        [1, "i", -1, 1],
        [1, "i", 0, 2**48 + 1],
        [1, "i", 1.0, 1],
        [1, "i", True, 1],
        [1, b"i", 0, 1],
        [2, "x" * 4097, "", 0],
        [3, ""],
        [3, None],
        [3, b"salt"],
        [4, 0, b"", 0, "float16"],
        [4, 0, "rows", 1, "float16"],
        [5, "t", "not bytes", 0],
        [5, "t", bytes(4097), 0],
    ],
)
def test_values_of_extra_keys_out_of_bounds_are_refused_at_entry(part: list[object]) -> None:
    """F4, F5: an empty salt, a huge text, a wrong type never get past the decoder."""
    body = plain(LOOKUP)
    body["keys"]["extra_keys"] = [part]
    assert ErrorCode.MALFORMED == refused(Code.LOOKUP, body).error_code


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"digests": bytes(32), "tokens": bytes(4)},
        {"digests": bytes(31)},
        {"digests": bytes(33)},
        {"tokens": bytes(3)},
        {"digests": bytes(32), "extra_keys": [[3, "s"]]},
        {"digests": bytes(32), "partial_tail": True},
        {"digests": [1, 2]},
        {"digests": "0" * 64},
        {"tokens": [1, 2, 3]},
        {"digests": 2**63},
        {"digests": bytes(32 * 65_537)},
        {"tokens": bytes(4 * (2**21 + 1))},
    ],
)
def test_keys_are_exactly_one_of_digests_and_tokens(keys: dict[str, Any]) -> None:
    """H6, N3, L9: digests are bytes of the right length, never numbers or text, and nothing is left to guess."""
    body = plain(LOOKUP) | {"keys": keys}
    assert ErrorCode.MALFORMED == refused(Code.LOOKUP, body).error_code


@pytest.mark.parametrize("digest", [bytes(32), b"\xff" * 32, b"\x80" + bytes(31)])
def test_digests_of_every_bit_pattern_travel_whole(digest: bytes) -> None:
    """H6: an all-zero digest and one with the top bit set come out as they went in."""
    request = LookupRequest(session="r", keys=Keys(digests=digest * 2))
    decoded = decode_message(Code.LOOKUP, encode_message(request), wire=2)
    assert isinstance(decoded, LookupRequest)
    assert digest * 2 == decoded.keys.digests


def test_names_that_come_twice_are_refused_where_identity_is() -> None:
    """A second `keys`, `digests` or `world` does not overrule the first in silence."""
    keys = encode({"digests": bytes(32)})
    twice = b"\x82" + keys[1:] + encode("digests") + encode(b"\1" * 32)
    for body in (
        b"\x82" + encode("session") + encode("r") + encode("keys") + twice,
        b"\x83" + encode("session") + encode("r") + (encode("keys") + keys) * 2,
    ):
        assert "twice" in str(refused(Code.LOOKUP, body))
    shard = b"\x82" + (encode("world") + encode(1)) * 2
    body = b"\x83" + encode("lease") + encode(LEASE) + encode("count") + encode(1) + encode("shard") + shard
    assert "twice" in str(refused(Code.RETRIEVE, body))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (LOOKUP, {"session": ""}),
        (LOOKUP, {"session": "x" * 257}),
        (LOOKUP, {"session": b"r"}),
        (LOOKUP, {"world": 0}),
        (LOOKUP, {"world": True}),
        (LOOKUP, {"groups": 70_000}),
        (LOOKUP, {"lease": 1}),
        (RetrieveRequest(lease=LEASE, count=1), {"lease": bytes(15)}),
        (RetrieveRequest(lease=LEASE, count=1), {"count": 0}),
        (RetrieveRequest(lease=LEASE, count=1), {"first": -1}),
        (RetrieveRequest(lease=LEASE, count=1), {"shard": {"world": 2, "rank": 2}}),
        (RetrieveRequest(lease=LEASE, count=1), {"shard": {"world": 0}}),
        (STORE, {"starts": [0]}),
        (STORE, {"n_tokens": [4, 0]}),
        (STORE, {"starts": [], "n_tokens": []}),
        (STORE, {"tensors": [[["float16", [1]]]] * 3}),
        (STORE, {"tensors": [[["complex64", [1]]]]}),
        (STORE, {"tensors": [[["float16", [-1]]]]}),
        (STORE, {"tensors": [[["float16", [1] * 17]]]}),
        (STORE, {"tensors": [[["float16", [1], 1]]]}),
        (STORE, {"tensors": [[]]}),
        (LookupReply(hit_chunks=1), {"hit_chunks": -1}),
        (LookupReply(hit_chunks=1), {"miss": -1}),
        (ReleaseRequest(lease=LEASE), {"count": -1}),
        (PingReply(boot=LEASE), {"boot": True}),
        (PingReply(boot=LEASE), {"uptime_ms": -1}),
    ],
)
def test_values_out_of_bounds_are_refused(message: Message, change: dict[str, Any]) -> None:
    """J5: bounds hold at the receiver, counts are never negative, and no type is taken for another."""
    assert ErrorCode.MALFORMED == refused(message.code, plain(message) | change).error_code


def test_a_shard_names_a_rank_below_its_world() -> None:
    """A shard that cannot be is not made."""
    assert (4, 3, 1) == (Shard(world=4, rank=3, group=1).world, 3, 1)
    with pytest.raises(ValueError, match="rank 4 of 4"):
        Shard(world=4, rank=4)


def test_payload_sizes_follow_the_descriptions_chunk_major() -> None:
    """Shared descriptions count for every chunk, own ones for their chunk; most messages have no payload."""
    other = TensorMeta("int8", (5,))
    own = StoreRequest(session="r", keys=KEYS, starts=(0, 4), n_tokens=(4, 4), tensors=((META,), (META, other)))
    assert [12, 12, 12, 12] == list(STORE.payload_sizes())
    assert [12, 12, 5] == list(own.payload_sizes())
    assert [] == list(LOOKUP.payload_sizes())
    assert [] == list(RetrieveReply(count=0).payload_sizes())
    with pytest.raises(TensorError):
        TensorMeta("complex64", ())


def test_a_reply_says_no_more_than_was_asked() -> None:
    """More chunks than keys, than asked for, or than sent are no answer; another message's reply is none either."""
    retrieve = RetrieveRequest(lease=LEASE, count=1)
    one = RetrieveReply(count=1, starts=(0,), n_tokens=(4,), tensors=((META,),))
    two = RetrieveReply(count=2, starts=(0, 4), n_tokens=(4, 4), tensors=((META,),))
    assert one.answers(retrieve)
    assert not two.answers(retrieve)
    assert not one.answers(LOOKUP)
    lookup = LookupRequest(session="r", keys=Keys(digests=bytes(64)))
    assert LookupReply(hit_chunks=2).answers(lookup)
    assert not LookupReply(hit_chunks=3).answers(lookup)
    assert StoreReply(stored=1, declined=1).answers(STORE)
    assert not StoreReply(stored=1).answers(STORE)


@given(st.binary(max_size=64), st.sampled_from([16, 18, 20, 24, 4, 17, 31]))
def test_any_bytes_are_a_message_or_an_error(data: bytes, code: int) -> None:
    """Decoding gives a message or `RemoteProtocolError`, nothing else."""
    with contextlib.suppress(RemoteProtocolError):
        assert code == decode_message(code, data, wire=2).code
