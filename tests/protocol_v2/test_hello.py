"""Hello, welcome, refusal: frozen, tolerant of what is to come, strict about identity and floors."""

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_v2.body import encode
from protocol_v2.codes import RefusalCode
from protocol_v2.errors import HandshakeError, LocalProtocolError, RemoteProtocolError
from protocol_v2.frames import MAX_HANDSHAKE_BYTES
from protocol_v2.hello import (
    Floor,
    Hello,
    Limits,
    OfferFields,
    Refusal,
    SpaceDifference,
    SpaceFields,
    Unrecognised,
    Welcome,
    check_boot_id,
    decode_hello,
    decode_refusal,
    decode_welcome,
    encode_hello,
    transcript_digest,
)
from protocol_v2.versions import is_grease

BOOT = bytes(range(16))
FLOOR = Floor(wire=2, schema=2)
SPACE = SpaceFields(model="m", kv_dtype="bfloat16", chunk_size=4, attributes={"rope": "yarn"})
HELLO = Hello(wire=(2,), schemas=(2,), space=SPACE, boot=BOOT, floor=FLOOR, role="r", software="s")
WELCOME = Welcome(wire=2, schema=2, limits=Limits(), boot=BOOT, root=bytes(32))


def plain(struct: msgspec.Struct) -> dict[str, Any]:
    """A struct as builtin values, to be spoilt."""
    made: dict[str, Any] = msgspec.to_builtins(struct, builtin_types=(bytes,))
    return made


def refused(body: dict[str, Any]) -> HandshakeError:
    """The refusal that a hello earns."""
    with pytest.raises(HandshakeError) as caught:
        decode_hello(encode(body))
    return caught.value


def test_a_hello_round_trips() -> None:
    """What is said without grease is what is heard."""
    assert (HELLO, ()) == decode_hello(encode_hello(HELLO, grease=False))


@given(st.binary(min_size=16, max_size=16))
def test_grease_is_announced_and_heard_as_unknown(boot: bytes) -> None:
    """Our own client sends reserved versions, a reserved feature and a reserved field; a hello with them is heard."""
    said = msgspec.structs.replace(HELLO, boot=boot)
    heard, unknown = decode_hello(encode_hello(said, grease=True))
    assert [True] == [is_grease(one) for one in heard.wire if one not in said.wire]
    assert [True] == [is_grease(one) for one in heard.schemas if one not in said.schemas]
    assert (f"grease/{boot[0]:02x}",) == heard.features
    assert (f"grease_{boot[0]:02x}",) == unknown
    assert said.space == heard.space


def test_a_later_version_s_hello_is_heard() -> None:
    """L1: unknown fields, features and version numbers are tolerated, and their names are kept for the echo."""
    later = plain(HELLO) | {
        "wire": [2, 3, 4, 900],
        "schemas": [2, 3],
        "features": ["kind/6", "shm/3"],
        "region": {"nested": [1, {"deep": b"x"}]},
        "wire_3_terms": None,
    }
    heard, unknown = decode_hello(encode(later))
    assert ((2, 3, 4, 900), (2, 3), ("kind/6", "shm/3")) == (heard.wire, heard.schemas, heard.features)
    assert ("region", "wire_3_terms") == unknown


@pytest.mark.parametrize("missing", ["wire", "schemas", "boot", "floor"])
def test_a_hello_without_what_it_must_have_is_refused(missing: str) -> None:
    """Versions, schemas, boot id and floor are never assumed."""
    body = plain(HELLO)
    del body[missing]
    error = refused(body)
    assert (RefusalCode.HELLO_MALFORMED, True) == (error.refusal_code, missing in str(error))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wire", [70_000]),
        ("wire", [True]),
        ("wire", [2.0]),
        ("wire", ["2"]),
        ("wire", list(range(65))),
        ("schemas", 2),
        ("features", [""]),
        ("features", ["x" * 129]),
        ("boot", b"short"),
        ("boot", "0" * 16),
        ("role", "x" * 129),
        ("floor", None),
    ],
)
def test_values_out_of_bounds_are_refused(field: str, value: object) -> None:
    """Every bound of the frozen layout is checked; no type is taken for another."""
    assert RefusalCode.HELLO_MALFORMED == refused(plain(HELLO) | {field: value}).refusal_code


def test_an_unknown_floor_is_refused_since_it_could_not_be_kept() -> None:
    """A requirement that we do not know is no optional remark."""
    error = refused(plain(HELLO) | {"floor": {"wire": 2, "schema": 2, "storage": 3}})
    assert (RefusalCode.FLOOR_UNKNOWN, "floor.storage") == (error.refusal_code, error.field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokenizer": "t"}, "space.tokenizer"),
        ({"chunk_size": 0}, "space"),
        ({"model": ""}, "space"),
        ({"attributes": {"a": 1}}, "space"),
        ({"attributes": None}, "space"),
    ],
)
def test_a_space_that_is_not_understood_wholly_is_refused(change: dict[str, Any], field: str) -> None:
    """N6: a field of the space that we would drop is part of the identity; so is a bound that is broken."""
    error = refused(plain(HELLO) | {"space": plain(SPACE) | change})
    assert (RefusalCode.SPACE_INVALID, field) == (error.refusal_code, error.field)


def test_names_that_come_twice_are_refused_at_every_level() -> None:
    """Two readers of one hello never see two spaces."""
    body, space = encode(plain(HELLO)), encode(plain(SPACE))
    assert body.count(space) == 1
    twice_in_space = bytes([space[0] + 1]) + space[1:] + encode("model") + encode("other")
    twice_in_attributes = space.replace(b"\x81\xa4rope\xa4yarn", b"\x82\xa4rope\xa4yarn\xa4rope\xa3ntk")
    twice_on_top = bytes([body[0] + 1]) + body[1:] + encode("space") + b"\xc0"
    for spoilt, code in (
        (body.replace(space, twice_in_space), RefusalCode.SPACE_INVALID),
        (body.replace(space, twice_in_attributes), RefusalCode.SPACE_INVALID),
        (twice_on_top, RefusalCode.HELLO_MALFORMED),
    ):
        assert spoilt != body
        with pytest.raises(HandshakeError, match="twice") as caught:
            decode_hello(spoilt)
        assert code == caught.value.refusal_code
    assert HELLO == decode_hello(body)[0]


def test_unknown_names_are_bounded() -> None:
    """What must be echoed is bounded in number and length."""
    assert 64 == len(decode_hello(encode(plain(HELLO) | {f"u{i}": 0 for i in range(64)}))[1])
    assert RefusalCode.HELLO_MALFORMED == refused(plain(HELLO) | {f"u{i}": 0 for i in range(65)}).refusal_code
    assert RefusalCode.HELLO_MALFORMED == refused(plain(HELLO) | {"u" * 129: 0}).refusal_code


def test_a_later_version_s_welcome_and_refusal_are_read() -> None:
    """Unknown names in the answers are tolerated, in nested maps too."""
    limits = plain(WELCOME.limits) | {"max_streams": 4}
    assert WELCOME == decode_welcome(encode(plain(WELCOME) | {"limits": limits, "ticket": b"x"}))
    accepted = OfferFields(wire=(3,), schemas=(3,), floor=Floor(wire=3, schema=3))
    refusal = Refusal(code=999, message="m", accepted=accepted)
    body = plain(refusal) | {"retry_ms": 5}
    body["accepted"] |= {"storage": [3], "floor": {"wire": 3, "schema": 3, "storage": 3}}
    assert refusal == decode_refusal(encode(body))


@pytest.mark.parametrize(
    "change", [{"wire": "2"}, {"root": b"short"}, {"limits": {"lease_ms": 0}}, {"boot": None}, {"notice": [1]}]
)
def test_a_bad_welcome_is_refused_by_the_client(change: dict[str, Any]) -> None:
    """The client accepts no welcome that breaks the frozen layout."""
    with pytest.raises(HandshakeError) as caught:
        decode_welcome(encode(plain(WELCOME) | change))
    assert RefusalCode.WELCOME_INVALID == caught.value.refusal_code


def test_a_bad_refusal_is_an_error_too() -> None:
    """Not even a refusal may be unreadable."""
    with pytest.raises(RemoteProtocolError):
        decode_refusal(encode({"code": "x"}))


def test_the_largest_answers_fit_their_cap() -> None:
    """Whatever is asked, welcome and refusal stay below the header cap of the handshake."""
    names = tuple(f"{i:02}" + "\U0001f5bc" * 126 for i in range(64))
    versions = tuple(range(65_472, 65_536))
    shown = "\U0001f5bc" * 256
    differences = (SpaceDifference(field=shown, asked=shown, accepted=shown),) * 16
    offer = OfferFields(
        wire=versions, schemas=versions, features=names, floor=Floor(wire=1, schema=1, features=names[:10])
    )
    welcome = Welcome(
        wire=2,
        schema=2,
        features=names,
        unrecognised=Unrecognised(fields=names, features=names, wire=versions, schemas=versions),
        limits=Limits(),
        boot=BOOT,
        notice=differences,
    )
    refusal = Refusal(code=4, message=shown * 4, field=shown, asked=offer, accepted=offer, differences=differences)
    assert len(encode(welcome)) < MAX_HANDSHAKE_BYTES
    assert len(encode(refusal)) < MAX_HANDSHAKE_BYTES
    assert welcome == decode_welcome(encode(welcome))
    assert refusal == decode_refusal(encode(refusal))


def test_a_refusal_explains_both_ranges_and_every_field() -> None:
    """H4: one line names both ranges and the fields of the space with both values."""
    text = Refusal(
        code=4,
        message="pinned",
        asked=OfferFields(wire=(2, 3), schemas=(2,), floor=FLOOR),
        accepted=OfferFields(wire=(4,), schemas=(3,), floor=Floor(wire=4, schema=3)),
        differences=(SpaceDifference(field="kv_dtype", asked="bfloat16", accepted="float8_e4m3fn"),),
    ).explain()
    assert (
        "session refused: SPACE_MISMATCH: pinned; asked wire [2, 3] (floor 2), schema [2] (floor 2); "
        "accepted wire [4] (floor 4), schema [3] (floor 3); "
        "space.kv_dtype: asked 'bfloat16', accepted 'float8_e4m3fn'" == text
    )
    assert "session refused: RefusalCode 999" == Refusal(code=999).explain()


def test_the_transcript_is_length_framed_over_both_headers() -> None:
    """The documented digest, and no boundary between the two can be shifted."""
    by_hand = hashlib.sha256(b"\x0e\0\0\0xk2/transcript" + b"\2\0\0\0ab" + b"\1\0\0\0c").digest()
    assert by_hand == transcript_digest(b"ab", memoryview(b"c"))
    assert by_hand != transcript_digest(b"a", b"bc")
    assert by_hand != transcript_digest(b"c", b"ab")


@pytest.mark.parametrize("boot", [b"", bytes(15), bytes(17), "0" * 16, None])
def test_a_boot_id_is_sixteen_bytes(boot: Any) -> None:
    """Nothing else is a boot id."""
    assert BOOT == check_boot_id(BOOT)
    with pytest.raises(LocalProtocolError, match="boot_id"):
        check_boot_id(boot)
