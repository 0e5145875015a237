"""Bodies: everything that can be wrong with bytes is one typed error, and no name comes twice."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_v2.body import MAX_MAP_ENTRIES, decode, encode, split_map
from protocol_v2.codes import ErrorCode
from protocol_v2.errors import LocalProtocolError, RemoteProtocolError

_decoder: msgspec.msgpack.Decoder[dict[str, int]] = msgspec.msgpack.Decoder(dict[str, int])

BAD = {
    "empty": b"",
    "trailing": encode({"a": 1}) + b"\x00",
    "no map": encode([1]),
    "bad utf-8": b"\x81\xa2\xff\xfe\x01",
    "truncated": encode({"a": 1})[:-1],
    "promises four billion entries": b"\xdf\xff\xff\xff\xff",
    "reserved byte": b"\xc1",
    "deep": b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_every_kind_of_bad_bytes_is_one_error(data: bytes) -> None:
    """N: trailing bytes, empty input, bad UTF-8 and 100,000 nested arrays (a RecursionError) are all `MALFORMED`."""
    for read in (lambda: decode(data, _decoder, "x"), lambda: split_map(data, "x")):
        with pytest.raises(RemoteProtocolError) as caught:
            read()
        assert ErrorCode.MALFORMED == caught.value.error_code


def test_deep_nesting_in_a_field_that_is_skipped_is_caught() -> None:
    """Unknown fields are skipped with recursion: the RecursionError of that is caught too."""

    class Known(msgspec.Struct):
        a: int = 0

    with pytest.raises(RemoteProtocolError, match="nested too deeply"):
        decode(BAD["deep"].replace(b"\xa1a", b"\xa1z", 1), msgspec.msgpack.Decoder(Known), "x")


@given(st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=20))
def test_split_map_keeps_names_order_and_values(value: dict[str, int]) -> None:
    """The raw entries are the map's entries."""
    entries = split_map(encode(value), "x")
    assert list(value.items()) == [(name, msgspec.msgpack.decode(raw)) for name, raw in entries.items()]


def test_names_that_come_twice_are_refused() -> None:
    """Of two equal names msgspec keeps the last in silence; two readers could see two identities in one message."""
    twice = b"\x82\xa1a\x01\xa1a\x02"
    assert {"a": 2} == msgspec.msgpack.decode(twice)
    with pytest.raises(RemoteProtocolError, match="twice"):
        split_map(twice, "x")
    assert ["a", "b"] == list(split_map(b"\x82\xa1a\x01\xa1b\x02", "x"))


def test_map_entries_are_bounded_in_every_header_width() -> None:
    """At the bound a map is read, beyond it is refused, whichever of the three headers it has."""
    most = {str(i): i for i in range(MAX_MAP_ENTRIES)}
    assert MAX_MAP_ENTRIES == len(split_map(encode(most), "x"))
    with pytest.raises(RemoteProtocolError, match="at most"):
        split_map(encode(most | {"more": 1}), "x")
    assert ["a"] == list(split_map(b"\xde\x00\x01\xa1a\x01", "x"))
    assert ["a"] == list(split_map(b"\xdf\x00\x00\x00\x01\xa1a\x01", "x"))


@pytest.mark.parametrize("value", [object(), {"a": 2**64}, "\ud800", {"a": {1, object()}}])
def test_what_msgpack_cannot_carry_is_ours_to_answer_for(value: object) -> None:
    """M3: a value that cannot be encoded is refused before anything is registered, and its text does not show."""
    with pytest.raises(LocalProtocolError) as caught:
        encode(value)
    assert "ud800" not in str(caught.value)
