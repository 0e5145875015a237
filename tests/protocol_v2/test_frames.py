"""Frames and prelude: what is readable whatever the body holds, and what is refused before anything is parsed."""

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_v2.codes import Code, ErrorCode
from protocol_v2.errors import LocalProtocolError, RemoteProtocolError
from protocol_v2.frames import (
    MAGIC,
    MAX_HANDSHAKE_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_FRAMES,
    NOOP,
    PRELUDE_BYTES,
    Prelude,
    is_protocol_2,
    join,
    payload_bytes,
    split,
)

preludes = st.builds(
    Prelude,
    st.integers(0, 0xFFFF),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 0xFF).map(lambda high: high << 8),
)


@given(preludes, st.binary(max_size=20), st.lists(st.binary(max_size=5), max_size=3))
def test_split_undoes_join(prelude: Prelude, body: bytes, payload: list[bytes]) -> None:
    """What was joined comes apart into the same prelude, body and payload, from bytes and from views alike."""
    frames = join(prelude, body, payload)
    for form in (frames, [memoryview(frame) for frame in frames]):
        envelope = split(form, max_payload_bytes=100)
        assert (prelude, body, payload) == (envelope.prelude, bytes(envelope.body), [*map(bytes, envelope.payload)])


def test_the_layout_is_the_documented_one() -> None:
    """24 bytes, little-endian: code, flags, deadline, id, transcript; then the body."""
    frames = join(Prelude(16, 7, 250, b"digest!!"), b"\x80", [b"p"])
    assert [b"XK2\0", b"\x18", struct.pack("<HHIQ8s", 16, 0, 250, 7, b"digest!!") + b"\x80", b"p"] == frames
    assert 24 == PRELUDE_BYTES


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [MAGIC],
        [MAGIC, NOOP],
        [b"XK3\0", NOOP, bytes(40)],
        [MAGIC, b"\x14", bytes(40)],
        [b"\x00", b"\x16", b"\xc0"],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [MAGIC, NOOP, bytes(PRELUDE_BYTES - 1)],
    ],
)
def test_what_is_no_message_is_refused_without_an_id(frames: list[bytes]) -> None:
    """L11: other protocols, random bytes and short headers are refused, and nobody is there to be answered."""
    with pytest.raises(RemoteProtocolError) as caught:
        split(frames, max_payload_bytes=100)
    assert (ErrorCode.MALFORMED, None) == (caught.value.error_code, caught.value.request_id)


def test_an_unknown_critical_flag_is_refused_and_an_unknown_other_ignored() -> None:
    """The low byte of the flags must be understood, the high byte may be ignored."""
    with pytest.raises(RemoteProtocolError, match="flags") as caught:
        split(join(Prelude(16, 9, flags=0x0001), b""), max_payload_bytes=0)
    assert 9 == caught.value.request_id
    assert 0x0100 == split(join(Prelude(16, 9, flags=0x0100), b""), max_payload_bytes=0).prelude.flags


@pytest.mark.parametrize(
    ("code", "header_bytes", "frames", "payload"),
    [
        (Code.LOOKUP, MAX_HEADER_BYTES + 1, 0, 0),
        (Code.HELLO, MAX_HANDSHAKE_BYTES + 1, 0, 0),
        (Code.STORE, 100, MAX_PAYLOAD_FRAMES + 1, 0),
        (Code.STORE, 100, 1, 1001),
    ],
)
def test_caps_are_checked_before_parsing_and_the_answer_has_an_id(
    code: int, header_bytes: int, frames: int, payload: int
) -> None:
    """Beyond a cap: `TOO_LARGE` with the id; exactly at the caps: accepted."""
    header = struct.pack("<HHIQ8s", code, 0, 0, 5, bytes(8))
    message = [MAGIC, NOOP, header.ljust(header_bytes, b"\x91"), *[bytes(payload)] * frames]
    with pytest.raises(RemoteProtocolError) as caught:
        split(message, max_payload_bytes=1000)
    assert (ErrorCode.TOO_LARGE, 5) == (caught.value.error_code, caught.value.request_id)
    most = [MAGIC, NOOP, header.ljust(MAX_HANDSHAKE_BYTES), *[b""] * MAX_PAYLOAD_FRAMES]
    assert 5 == split([*most[:-1], bytes(1000)], max_payload_bytes=1000).prelude.request_id


def test_refusing_an_oversized_message_costs_no_memory() -> None:
    """A bound is checked before the work it bounds."""
    message = [MAGIC, NOOP, struct.pack("<HHIQ8s", 16, 0, 0, 5, bytes(8)) + bytes(64 << 20)]
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError):
        split(message, max_payload_bytes=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    "prelude",
    [Prelude(-1, 1), Prelude(1 << 16, 1), Prelude(1, 1 << 64), Prelude(1, -1), Prelude(1, 1, 1 << 32)],
)
def test_numbers_that_do_not_fit_are_ours_to_answer_for(prelude: Prelude) -> None:
    """A number that its field cannot hold is refused where the message is made."""
    with pytest.raises(LocalProtocolError, match="does not fit"):
        join(prelude, b"")


def test_join_keeps_the_caps_too() -> None:
    """What no peer would accept is not sent."""
    with pytest.raises(LocalProtocolError, match="header"):
        join(Prelude(Code.LOOKUP, 1), bytes(MAX_HEADER_BYTES))
    with pytest.raises(LocalProtocolError, match="frames"):
        join(Prelude(Code.STORE, 1), b"", [b""] * (MAX_PAYLOAD_FRAMES + 1))
    with pytest.raises(LocalProtocolError, match="transcript"):
        join(Prelude(Code.STORE, 1, digest=b"short"), b"")


def test_one_port_serves_other_protocols() -> None:
    """Only the magic makes a message ours."""
    assert is_protocol_2([MAGIC])
    assert not is_protocol_2([])
    assert not is_protocol_2([b"\x00", b"\x20"])


def test_payload_bytes_counts_bytes_of_wide_views() -> None:
    """A view of wider elements counts by bytes."""
    assert 11 == payload_bytes([b"abc", memoryview(bytes(8)).cast("I")])
