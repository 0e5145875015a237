"""The v1 wire codec: byte for byte the captured exchange, strict with what it does not know."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat import CompatError
from compat.v1.operations import (
    BY_CODE,
    MAX_TOKENS,
    OPERATIONS,
    V1Key,
    V1Operation,
    V1Registered,
    V1Registration,
    V1RetrievePrepared,
    V1StorePrepared,
)
from compat.v1.wire import (
    MAX_KEY_BYTES,
    MAX_SMALL_BYTES,
    V1Refusal,
    V1Request,
    V1WireError,
    decode_answer,
    decode_request,
    encode_answer,
    encode_failure,
    encode_request,
)
from tests.compat.golden import GOLDEN, WIRE

EXCHANGE = WIRE["exchange"]
E = msgspec.msgpack.encode
KEY: dict[str, Any] = {
    "model_name": "m",
    "world_size": 1,
    "worker_id": None,
    "token_ids": [1, 2, 3, 4],
    "start": 0,
    "end": 4,
    "request_id": "r",
    "cache_salt": "",
    "request_configs": None,
    "num_kv_readers": 1,
}
CAPTURED_VALUES: dict[V1Operation, Any] = {
    V1Operation.GET_CHUNK_SIZE: 4,
    V1Operation.GET_EXPERIMENTAL: [],
    V1Operation.PING: True,
    V1Operation.REGISTER_ENGINE_DRIVEN: V1Registered(),
    V1Operation.PREPARE_STORE: V1StorePrepared(),
    V1Operation.COMMIT_STORE: True,
    V1Operation.COMMIT_RETRIEVE: True,
}


def _frames(hexes: list[str]) -> list[bytes]:
    return [bytes.fromhex(h) for h in hexes]


def _refused(frames: list[bytes]) -> V1WireError:
    with pytest.raises(V1WireError) as caught:
        decode_request(frames)
    return caught.value


def _lookup(key: object) -> list[bytes]:
    return [E(5), E(8), E(key), E(1)]


@pytest.mark.parametrize("step", EXCHANGE, ids=lambda s: f"{s['request_frames_hex'][0]}-{s['op']}")
def test_captured_requests_are_read_and_written_byte_for_byte(step: dict[str, Any]) -> None:
    """Every request of a real client decodes, and encodes to the same bytes."""
    frames = _frames(step["request_frames_hex"])
    request = decode_request(frames)
    assert step["op"] == request.operation
    assert frames == encode_request(request.uid, request.operation, *request.payloads)


@pytest.mark.parametrize(
    "step",
    [s for s in EXCHANGE if s["op"] != "prepare_retrieve"],
    ids=lambda s: f"{s['request_frames_hex'][0]}-{s['op']}",
)
def test_captured_answers_are_read_and_written_byte_for_byte(step: dict[str, Any]) -> None:
    """Every answer of a real server decodes to a value of the operation's type, and encodes to the same bytes."""
    request = decode_request(_frames(step["request_frames_hex"]))
    frames = _frames(step["response_frames_hex"])
    uid, value = decode_answer(frames, request.operation)
    assert request.uid == uid
    assert frames == encode_answer(request, value)
    if request.operation in CAPTURED_VALUES:
        assert CAPTURED_VALUES[request.operation] == value


def test_the_captured_register_payload_and_keys_have_their_values() -> None:
    """What was decoded is what the client meant."""
    (registration,) = decode_request(_frames(EXCHANGE[3]["request_frames_hex"])).payloads
    assert V1Registration(7, "m", 1, 4, 1, 2, "float16", False, 4) == registration
    key, tp_size = decode_request(_frames(EXCHANGE[5]["request_frames_hex"])).payloads
    assert tp_size == 1
    assert V1Key("m", 1, None, tuple(range(1, 10)), 0, 8, "r0", num_kv_readers=1) == key
    salted = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["ipc_key_msgpack"][0]["hex"]), type=V1Key)
    assert V1Key("m", 2, None, (1, 2, 300, 70_000), 0, 4, "r", "s", num_kv_readers=2) == salted
    assert bytes.fromhex(GOLDEN["ipc_key_msgpack"][0]["hex"]) == E(salted)


def test_a_retrieve_answer_carries_its_data() -> None:
    """A map of success, data and context, as the client expects it; tensor data comes as a view."""
    request = decode_request(_frames(EXCHANGE[13]["request_frames_hex"]))
    frames = encode_answer(request, V1RetrievePrepared(success=True, data=memoryview(b"tensors")))
    assert bytes.fromhex("83a773756363657373c3a464617461c40774656e736f7273a7636f6e7465787480") == frames[2]
    _, value = decode_answer(frames, V1Operation.PREPARE_RETRIEVE)
    assert value.success
    assert b"tensors" == value.data


def test_every_number_of_the_release_is_taken_once() -> None:
    """1 to 33 without 11, which is retired; three operations go by name."""
    assert set(range(1, 34)) - {11} | {40} == set(BY_CODE)
    assert BY_CODE[32] is BY_CODE[40]
    assert {
        V1Operation.CB_REORDER_PLAN,
        V1Operation.SUBSCRIBE_KV_EVENTS,
        V1Operation.SERVER_MODULE_CALL,
    } == {operation for operation, spec in OPERATIONS.items() if spec.code is None}
    assert set(V1Operation) == set(OPERATIONS)
    assert "register_kv_cache_engine_driven_context" == max(V1Operation, key=len).removeprefix("un")


def test_the_specification_lists_what_is_served() -> None:
    """Every operation that is served has its row: number, name, number of payloads."""
    page = (Path(__file__).parents[2] / "docs" / "spec" / "v1-formats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|(.*?)\|", page, re.MULTILINE)
    listed = {(int(number), name, payloads.count(",") + bool(payloads.strip())) for number, name, payloads in rows}
    served = {(spec.code, str(op), len(spec.payloads)) for op, spec in OPERATIONS.items() if spec.payloads is not None}
    assert served == listed


def test_an_operation_may_come_by_name_and_is_echoed_as_it_came() -> None:
    """The client compares the operation, whose bytes are repeated."""
    request = decode_request([E(7), E("noop")])
    assert V1Operation.NOOP is request.operation
    assert [E(7), E("noop"), E("OK")] == encode_answer(request, "OK")


def test_clear_came_without_a_payload_before_0_5_6() -> None:
    """Both forms are read; a third is not."""
    assert decode_request([E(1), E(20)]).payloads == ()
    assert decode_request([E(1), E(20), E(True)]).payloads == (True,)
    assert V1Refusal.WRONG_ARITY is _refused([E(1), E(20), E(True), E(True)]).refusal


def test_views_of_frames_are_frames() -> None:
    """A receiver that does not copy hands in views."""
    frames = _frames(EXCHANGE[9]["request_frames_hex"])
    views = [memoryview(frame) for frame in frames]
    request = decode_request(views)
    assert decode_request(frames).payloads[0] == request.payloads[0]
    assert isinstance(request.payloads[2], memoryview)
    assert decode_request(frames).payloads[2] == request.payloads[2]


@pytest.mark.parametrize("field", ["extra_keys", "cache_identity", "lora_name", "grease_1"])
def test_an_unknown_field_of_a_key_is_refused(field: str) -> None:
    """The release drops it and serves the request without that identity; here the lookup finds nothing."""
    assert decode_request(_lookup(KEY)).operation is V1Operation.LOOKUP
    error = _refused(_lookup(KEY | {field: ["x"]}))
    assert (V1Refusal.MALFORMED, [E(5), E(8)]) == (error.refusal, error.answer)
    assert field in str(error)
    store = _refused([E(5), E(17), E(KEY | {field: ["x"]}), E(7), E(b"")])
    assert [E(5), E(17), E(False)] == store.answer


def test_an_unknown_field_of_a_registration_is_refused() -> None:
    """It says what the cache holds."""
    fields = msgspec.msgpack.decode(bytes.fromhex(WIRE["extra"]["register_payload_hex"]))
    assert decode_request([E(3), E(14), E(fields)]).operation is V1Operation.REGISTER_ENGINE_DRIVEN
    error = _refused([E(3), E(14), E(fields | {"lora": "a"})])
    assert [E(3), E(14), E({"shm_name": "", "pool_size": 0})] == error.answer


def test_older_clients_leave_fields_out() -> None:
    """0.5.3 sends no reader count and no configuration; without a salt a key is unsalted, as on the release."""
    old = {name: KEY[name] for name in list(KEY)[:7]}
    (key, _) = decode_request(_lookup(old)).payloads
    assert ("", 0) == (key.cache_salt, key.num_kv_readers)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2, 3, 2**32]},
        {"token_ids": [1, 2, 3, -1]},
        {"token_ids": [1, 2, 3, 4.0]},
        {"token_ids": [1, 2, 3, True]},
        {"token_ids": [1, 2, 3, None]},
        {"token_ids": b"\x01\x02\x03\x04"},
        {"token_ids": "1234"},
        {"token_ids": None},
        {"end": 5},
        {"end": 2**60},
        {"start": 3, "end": 2},
        {"start": -1},
        {"world_size": 0},
        {"world_size": 256},
        {"world_size": True},
        {"worker_id": 1},
        {"worker_id": -1},
        {"model_name": None},
        {"model_name": "a@b"},
        {"model_name": "m" * 4097},
        {"cache_salt": "a/b=="},
        {"cache_salt": "x@y"},
        {"cache_salt": "a\\b"},
        {"cache_salt": "n\0"},
        {"cache_salt": "z" * 129},
        {"cache_salt": None},
        {"cache_salt": b"s"},
        {"request_id": 7},
        {"request_id": "r" * 4097},
        {"request_configs": []},
        {"request_configs": "lora"},
        {"num_kv_readers": -1},
        {"num_kv_readers": 2**40},
    ],
    ids=repr,
)
def test_a_key_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    """The client gets the answer of its type at once; the message names the field and shows no value."""
    error = _refused(_lookup(KEY | change))
    assert (V1Refusal.MALFORMED, V1Operation.LOOKUP, [E(5), E(8)]) == (error.refusal, error.operation, error.answer)
    for value in ("a/b==", "zzz", "x@y", "4294967296"):
        assert value not in str(error)


@pytest.mark.parametrize("missing", list(KEY)[:7])
def test_a_key_without_a_mandatory_field_is_refused(missing: str) -> None:
    """Nothing that says who asks has a default."""
    key = {name: value for name, value in KEY.items() if name != missing}
    assert V1Refusal.MALFORMED is _refused(_lookup(key)).refusal


def test_a_key_as_an_array_is_refused() -> None:
    """As by the release, where the client then waits."""
    assert V1Refusal.MALFORMED is _refused(_lookup(list(KEY.values()))).refusal


def test_a_request_configuration_is_a_map_that_nobody_decodes() -> None:
    """Tags do not enter MP keys, and a deep one costs no more than its bytes."""
    (key, _) = decode_request(_lookup(KEY | {"request_configs": {"lmcache.tag.user": "u", "n": [1]}})).payloads
    assert {"lmcache.tag.user": "u", "n": [1]} == msgspec.msgpack.decode(key.request_configs)
    deep = b"\x91" * 100_000 + b"\xc0"
    error = _refused(_lookup(KEY | {"request_configs": {"a": msgspec.Raw(deep)}}))
    assert V1Refusal.MALFORMED is error.refusal


@pytest.mark.parametrize(
    ("frames", "refusal", "answer"),
    [
        ([], V1Refusal.MALFORMED, None),
        ([b""], V1Refusal.MALFORMED, None),
        ([b"\x01"], V1Refusal.MALFORMED, None),
        ([b"", b"\x18"], V1Refusal.MALFORMED, None),
        ([b"XK2\0", b"\x18", b"x"], V1Refusal.MALFORMED, None),
        ([E("uid"), b"\x18"], V1Refusal.MALFORMED, None),
        ([E(True), b"\x18"], V1Refusal.MALFORMED, None),
        ([E(1) + b"\x01", b"\x18"], V1Refusal.MALFORMED, None),
        ([b"\x01" * 10, b"\x18"], V1Refusal.MALFORMED, None),
        ([E(1), E("n" * 70)], V1Refusal.MALFORMED, None),
        ([E(1), E(2.5)], V1Refusal.MALFORMED, None),
        ([E(1), b"\xff\xff"], V1Refusal.MALFORMED, None),
        ([E(1), b"\xa2\xff\xff"], V1Refusal.MALFORMED, None),
        ([E(1), E(11)], V1Refusal.UNKNOWN_OPERATION, None),
        ([E(1), E(34)], V1Refusal.UNKNOWN_OPERATION, None),
        ([E(1), E(-1)], V1Refusal.UNKNOWN_OPERATION, None),
        ([E(1), E("negotiate_schema"), E(1)], V1Refusal.UNKNOWN_OPERATION, None),
        ([E(1), b"", b"ack"], V1Refusal.STREAM_CONTROL, None),
        ([E(1), b"", b"cancel"], V1Refusal.STREAM_CONTROL, None),
        ([E(1), E(22), E(1), E(1)], V1Refusal.WRONG_ARITY, [E(1), E(22), E(False)]),
        ([E(1), E(22)], V1Refusal.WRONG_ARITY, None),
        ([E(1), E(18)], V1Refusal.WRONG_ARITY, None),
        ([E(1), E(24), E(1)], V1Refusal.WRONG_ARITY, [E(1), E(24), E("OK")]),
        ([E(1), E(21), E(1)], V1Refusal.WRONG_ARITY, None),
        ([E(1), E(22), E("7")], V1Refusal.MALFORMED, [E(1), E(22), E(False)]),
        ([E(1), E(9), E(7)], V1Refusal.MALFORMED, [E(1), E(9), E(0)]),
        ([E(1), E(10), E("r"), E(-1.0)], V1Refusal.MALFORMED, [E(1), E(10), E(0)]),
        ([E(1), E(10), E("r"), E(float("nan"))], V1Refusal.MALFORMED, [E(1), E(10), E(0)]),
        ([E(1), E(10), E("r"), E(float("inf"))], V1Refusal.MALFORMED, [E(1), E(10), E(0)]),
        ([E(1), E(20), E(2)], V1Refusal.MALFORMED, [E(1), E(20)]),
        ([E(1), E(13), E("r" * MAX_SMALL_BYTES)], V1Refusal.TOO_LARGE, [E(1), E(13)]),
        ([E(1), E(8), bytes(MAX_KEY_BYTES + 1), E(1)], V1Refusal.TOO_LARGE, [E(1), E(8)]),
        ([E(1), E(17), E(KEY), E(7), E("text")], V1Refusal.MALFORMED, [E(1), E(17), E(False)]),
        ([E(1), E(6), b"anything"], V1Refusal.NOT_SERVED, [E(1), E(6), E((b"", False))]),
        ([E(1), E(7)], V1Refusal.NOT_SERVED, [E(1), E(7), E((b"", False))]),
        ([E(1), E(1), b"\xc7\x04\x01\x80\x04K\x01"], V1Refusal.NOT_SERVED, [E(1), E(1)]),
        ([E(1), E(33), E(1)], V1Refusal.NOT_SERVED, [E(1), E(33), E((1, False))]),
        ([E(1), E("subscribe_kv_events")], V1Refusal.NOT_SERVED, [E(1), E("subscribe_kv_events")]),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, list) else "",
)
def test_what_is_not_carried_out_says_why_and_ends_the_waiting(
    frames: list[bytes], refusal: V1Refusal, answer: list[bytes] | None
) -> None:
    """A failure in the type that the client waits for; silence only where no type is known."""
    error = _refused(frames)
    assert (refusal, answer) == (error.refusal, error.answer)


def test_every_failure_is_of_the_type_that_is_waited_for() -> None:
    """What is answered when nothing could be done decodes as the operation's own answer."""
    for operation, spec in OPERATIONS.items():
        request = V1Request(3, operation, (), (E(3), E(spec.code or operation.value)))
        frames = encode_failure(request)
        if operation is V1Operation.GET_CHUNK_SIZE:
            assert frames is None
        elif spec.payloads is not None:
            assert frames is not None
            assert 3 == decode_answer(frames, operation)[0]


def test_tokens_are_bounded_by_number_too() -> None:
    """Ids of one byte would fit many more than the bound into a frame."""
    tokens = b"\xdd" + (MAX_TOKENS + 1).to_bytes(4, "big") + bytes(MAX_TOKENS + 1)
    error = _refused(_lookup(KEY | {"token_ids": msgspec.Raw(tokens)}))
    assert V1Refusal.MALFORMED is error.refusal
    at_the_bound = b"\xdd" + MAX_TOKENS.to_bytes(4, "big") + bytes(MAX_TOKENS)
    (key, _) = decode_request(_lookup(KEY | {"token_ids": msgspec.Raw(at_the_bound)})).payloads
    assert MAX_TOKENS == len(key.token_ids)


def test_a_key_shows_neither_salt_nor_tokens() -> None:
    """A request can be logged."""
    (key, _) = decode_request(_lookup(KEY | {"cache_salt": "secret", "token_ids": [77_777] * 4})).payloads
    assert "secret" not in repr(key)
    assert "77777" not in repr(key)
    assert "salted" in repr(key)


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=24), max_size=5))
def test_arbitrary_frames_give_a_request_or_a_typed_error(frames: list[bytes]) -> None:
    """Nothing else comes out, in either direction."""
    try:
        assert isinstance(decode_request(frames), V1Request)
    except V1WireError as error:
        assert error.answer is None or error.answer[:2] == frames[:2]
    for operation in (V1Operation.PING, V1Operation.LOOKUP, V1Operation.GET_EXPERIMENTAL):
        try:
            decode_answer(frames, operation)
        except V1WireError:
            continue


@settings(max_examples=200)
@given(
    st.sampled_from([s["request_frames_hex"] for s in EXCHANGE]), st.integers(0, 2000), st.integers(0, 255), st.data()
)
def test_a_damaged_captured_frame_gives_a_request_or_a_typed_error(
    hexes: list[str], place: int, byte: int, data: st.DataObject
) -> None:
    """One byte changed, or the frame cut there."""
    frames = _frames(hexes)
    which = data.draw(st.integers(0, len(frames) - 1))
    at = place % len(frames[which])
    cut = data.draw(st.booleans())
    frames[which] = frames[which][:at] + (b"" if cut else bytes([byte]) + frames[which][at + 1 :])
    try:
        decode_request(frames)
    except V1WireError as error:
        assert error.answer is None or error.answer[:2] == frames[:2]


@pytest.mark.parametrize(
    ("operation", "frames"),
    [
        (V1Operation.PING, [E(1)]),
        (V1Operation.PING, [E(1), E(22), E(True), E(True)]),
        (V1Operation.PING, [E(1), E(24), E("OK")]),
        (V1Operation.PING, [E(1), E(22), E(1)]),
        (V1Operation.PING, [E(1), E(22)]),
        (V1Operation.GET_CHUNK_SIZE, [E(1), E(21), E("OK")]),
        (V1Operation.GET_CHUNK_SIZE, [E(1), E(21), E(True)]),
        (V1Operation.LOOKUP, [E(1), E(8), E(4)]),
        (V1Operation.GET_EXPERIMENTAL, [E(1), E(32), E([1])]),
        (V1Operation.GET_EXPERIMENTAL, [E(1), E(32), E("x" * MAX_SMALL_BYTES)]),
        (V1Operation.STORE, [E(1), E(6), E((b"", True))]),
    ],
)
def test_an_answer_of_another_type_is_refused(operation: V1Operation, frames: list[bytes]) -> None:
    """A server of another release must not be misread: 0.5.0 says "OK" where 0.5.6 says its chunk size."""
    with pytest.raises(V1WireError):
        decode_answer(frames, operation)


def test_a_request_that_this_codec_does_not_speak_is_refused() -> None:
    """Operations by name kill the message thread of 0.5.5: none is ever sent."""
    for operation in (V1Operation.SUBSCRIBE_KV_EVENTS, V1Operation.STORE):
        with pytest.raises(CompatError, match="not spoken"):
            encode_request(1, operation)
    with pytest.raises(CompatError, match="payloads"):
        encode_request(1, V1Operation.PING)
    with pytest.raises(CompatError, match="uid"):
        encode_request(-1, V1Operation.NOOP)
    assert [b"\x01", b"\x14"] == encode_request(1, V1Operation.CLEAR)
