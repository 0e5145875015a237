"""Numbers on the wire: unique, appended to and never moved, and never read as a neighbour."""

import enum
import json
from pathlib import Path

import pytest

from protocol_v2.codes import (
    HANDSHAKE_CODES,
    REPLY_CODES,
    REQUEST_CODES,
    Code,
    ErrorCode,
    MissReason,
    RefusalCode,
    code_name,
    error_code,
    miss_reason,
    refusal_code,
)
from protocol_v2.messages import MESSAGES
from protocol_v2.versions import KEY_SCHEMAS, WIRE_VERSIONS, grease_number, is_grease

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "wire-2.json").read_text())
REGISTRIES = (Code, ErrorCode, RefusalCode, MissReason)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_numbers_are_unique_and_u16(registry: type[enum.IntEnum]) -> None:
    """No two names share a number (an alias would hide), and every number fits its field."""
    assert len(registry.__members__) == len(set(registry.__members__.values()))
    assert all(0 < member <= 0xFFFF for member in registry)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_numbers_are_pinned_by_the_vectors(registry: type[enum.IntEnum]) -> None:
    """A pinned number keeps its name for ever; one that is added shows as a changed vector file."""
    assert VECTORS["numbers"][registry.__name__] == {name: int(value) for name, value in registry.__members__.items()}


def test_every_code_is_handshake_error_request_or_reply_to_one() -> None:
    """Requests are even, the reply is the request plus one, and each has one struct in the wire version's row."""
    assert set(Code) == HANDSHAKE_CODES | {Code.ERROR} | REQUEST_CODES | REPLY_CODES
    assert {code + 1 for code in REQUEST_CODES} == REPLY_CODES
    for wire in WIRE_VERSIONS:
        assert set(MESSAGES[wire]) == {Code.ERROR} | REQUEST_CODES | REPLY_CODES
        for code, struct in MESSAGES[wire].items():
            assert code == struct.code


def test_unknown_numbers_stay_numbers() -> None:
    """A number that this version does not know is kept as it is, and a known one becomes its member."""
    assert (ErrorCode.BUSY, 999) == (error_code(10), error_code(999))
    assert (RefusalCode.SPACE_MISMATCH, 999) == (refusal_code(4), refusal_code(999))
    assert (MissReason.CHECKSUM, 999) == (miss_reason(6), miss_reason(999))
    assert type(error_code(999)) is int
    assert ("LOOKUP", "Code 99", "ErrorCode 99") == (code_name(16), code_name(99), code_name(99, ErrorCode))


def test_reserved_versions_are_never_real_ones() -> None:
    """Grease numbers have the reserved form, and no version of ours has it."""
    assert [0x0A0A, 0x2A2A, 0xFAFA] == [grease_number(seed) for seed in (0, 0x2F, 255)]
    assert all(is_grease(grease_number(seed)) for seed in range(256))
    assert not any(is_grease(number) for number in (*WIRE_VERSIONS, *KEY_SCHEMAS, 0, 0x0A, 0x0A0B, 0x0A1A, 0xFFFF))
