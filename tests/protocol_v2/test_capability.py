"""The question that every server on the port answers alike."""

import pytest

from protocol_v2.capability import CAPABILITY, answer_probe, is_probe, probe, read_answer
from protocol_v2.errors import LocalProtocolError


def test_the_frames_are_those_of_lmcache() -> None:
    """Id and 0x20, answered by id, 0x20 and a list; byte-exact with the exchange of LMCache 0.5.6."""
    assert [b"\x01", b"\x20"] == probe(1)
    assert frozenset() == read_answer([b"\x01", b"\x20", b"\x90"], 1)
    assert [b"\x01", b"\x20", b"\x91\xacextra_keys/2"] == answer_probe(probe(1))


def test_a_server_of_this_protocol_is_known_by_its_answer_and_another_is_not() -> None:
    """Paired: `extra_keys/2` is read from our answer, and is not in an LMCache server's."""
    ours = read_answer(answer_probe(probe(7), ["kv_event_stream"]), 7)
    theirs = read_answer([b"\x07", b"\x20", b"\x91\xafkv_event_stream"], 7)
    assert frozenset({CAPABILITY, "kv_event_stream"}) == ours
    assert frozenset({"kv_event_stream"}) == theirs


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\x07", b"\x20"],
        [b"\x08", b"\x20", b"\x90"],
        [b"\x07", b"\x21", b"\x90"],
        [b"\x07", b"\x20", b"\x80"],
        [b"\x07", b"\x20", b"\x91\x01"],
        [b"\x07", b"\x20", b"\x90\x00"],
        [b"\x07", b"\x20", b""],
        [b"XK2\0", b"\x18", bytes(24)],
        [bytes(99), b"\x20", b"\x90"],
        [b"\x07", b"\x20", bytes(70_000)],
        [b"\x07", b"\x20", b"\x91" * 50_000],
        [b"\xa1a", b"\x20", b"\x90"],
    ],
)
def test_what_is_no_answer_is_none(frames: list[bytes]) -> None:
    """An unreadable or foreign answer is no answer, and no answer is never "old but safe"."""
    assert read_answer(frames, 7) is None
    assert read_answer([b"\x07", b"\x20", b"\x90"], 7) == frozenset()


def test_only_the_question_is_taken_for_it() -> None:
    """A uid that is no small msgpack int, another operation or a payload make it something else."""
    assert all(is_probe(probe(uid)) for uid in (0, 127, 128, 2**32 - 1))
    for frames in ([b"\x07"], [b"\x07", b"\x20", b""], [b"\x07", b"\x14"], [b"XK2\0", b"\x20"], [bytes(10), b"\x20"]):
        assert not is_probe(frames)
    with pytest.raises(LocalProtocolError, match="uid"):
        probe(-1)
