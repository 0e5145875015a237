"""The frames of a message and their fixed prelude: readable whatever the body holds.

A message is a ZMQ multipart:

    frame 0     58 4b 32 00            "XK2" and NUL: no v1 request id equals it
    frame 1     18                     v1's noop: a v1 server that gets this by mistake logs it and lives
    frame 2     prelude || body        the header
    frame 3..   payload                as many as the body announces

The prelude is 24 bytes, little-endian, and frozen for ever:

    0   u16     code          `codes.Code`
    2   u16     flags         low byte: a receiver refuses a bit that it does not know; high byte: may be ignored
    4   u32     deadline      milliseconds the sender will wait; 0 is none; replies carry 0
    8   u64     id            chosen by the client, repeated by the reply
    16  8 bytes transcript    first bytes of the session's transcript digest; zeros in hello, welcome, refusal

The body is one msgpack map. So an id can be read where the body cannot, and an error reply can be addressed. Frame
count and sizes are checked before anything is parsed. Source: docs/spec/wire-2.md, "Frames".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from protocol_v2.codes import HANDSHAKE_CODES, ErrorCode
from protocol_v2.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

Frame: TypeAlias = bytes | memoryview

MAGIC: Final = b"XK2\0"
NOOP: Final = b"\x18"
LEADING_FRAMES: Final = 3

PRELUDE: Final = struct.Struct("<HHIQ8s")
PRELUDE_BYTES: Final = PRELUDE.size
SHORT_DIGEST_BYTES: Final = 8
NO_DIGEST: Final = bytes(SHORT_DIGEST_BYTES)
CRITICAL_FLAGS: Final = 0x00FF
MAX_ID: Final = 2**64 - 1
MAX_DEADLINE_MS: Final = 2**32 - 1

MAX_HANDSHAKE_BYTES: Final = 256 * 1024
"""Header frame of a hello, welcome or refusal: room for 64 attributes of 4 KiB, little for a stranger to fill."""

MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
"""Header frame of any other message: 2 Mi packed tokens are 8 MiB; prompt embeddings beyond that travel as digests."""

MAX_PAYLOAD_FRAMES: Final = 65_536
"""Payload frames of a message: 1024 chunks of 64 tensors."""


@dataclass(frozen=True, slots=True)
class Prelude:
    """The fixed part of a header.

    Args:
        code: u16.
        request_id: u64.
        deadline_ms: u32, milliseconds from sending; 0 is none.
        digest: 8 bytes.
        flags: u16.
    """

    code: int
    request_id: int
    deadline_ms: int = 0
    digest: bytes = NO_DIGEST
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message taken apart as far as it can be without knowing its code."""

    prelude: Prelude
    header: Frame
    payload: tuple[Frame, ...]

    @property
    def body(self) -> memoryview:
        """The msgpack map behind the prelude."""
        return memoryview(self.header)[PRELUDE_BYTES:]


def is_protocol_2(frames: Sequence[Frame]) -> bool:
    """Whether a multipart message claims to be of this protocol (one port serves others as well)."""
    return len(frames) > 0 and frames[0] == MAGIC


def join(prelude: Prelude, body: bytes, payload: Sequence[Frame] = ()) -> list[Frame]:
    """The frames of a message.

    Raises:
        LocalProtocolError: a number does not fit its field, or a cap is passed.
    """
    try:
        packed = PRELUDE.pack(prelude.code, prelude.flags, prelude.deadline_ms, prelude.request_id, prelude.digest)
    except struct.error as error:
        raise LocalProtocolError(f"prelude: a number does not fit its field: {error}") from None
    if len(prelude.digest) != SHORT_DIGEST_BYTES:
        raise LocalProtocolError(f"prelude: got {len(prelude.digest)} bytes of transcript, wanted {SHORT_DIGEST_BYTES}")
    header = packed + body
    if len(header) > header_cap(prelude.code):
        raise LocalProtocolError(
            f"header: got {len(header)} bytes, wanted at most {header_cap(prelude.code)}; "
            "derive keys on this side and send digests, or ask for fewer chunks at once"
        )
    if len(payload) > MAX_PAYLOAD_FRAMES:
        raise LocalProtocolError(f"payload: got {len(payload)} frames, wanted at most {MAX_PAYLOAD_FRAMES}")
    return [MAGIC, NOOP, header, *payload]


def split(frames: Sequence[Frame], *, max_payload_bytes: int) -> Envelope:
    """Take a message apart, checking counts and sizes before anything is parsed.

    Args:
        frames: the multipart message, without the peer identity that ROUTER puts in front.
        max_payload_bytes: cap on the sum of the payload frames.

    Raises:
        RemoteProtocolError: with the id wherever the prelude could be read.
    """
    if len(frames) < LEADING_FRAMES or frames[0] != MAGIC or frames[1] != NOOP:
        raise RemoteProtocolError(
            ErrorCode.MALFORMED, f"got {len(frames)} frames that do not begin with XK2, 0x18 and a header"
        )
    header = frames[2]
    if len(header) < PRELUDE_BYTES:
        raise RemoteProtocolError(
            ErrorCode.MALFORMED, f"header: got {len(header)} bytes, wanted at least the {PRELUDE_BYTES} of the prelude"
        )
    code, flags, deadline_ms, request_id, digest = PRELUDE.unpack_from(header)
    prelude = Prelude(code, request_id, deadline_ms, digest, flags)
    _check_caps(prelude, len(header), frames[LEADING_FRAMES:], max_payload_bytes)
    return Envelope(prelude, header, tuple(frames[LEADING_FRAMES:]))


def header_cap(code: int) -> int:
    """Bytes that the header frame of a message may have."""
    return MAX_HANDSHAKE_BYTES if code in HANDSHAKE_CODES else MAX_HEADER_BYTES


def payload_bytes(payload: Sequence[Frame]) -> int:
    """Bytes of all payload frames together."""
    return sum(frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in payload)


def _check_caps(prelude: Prelude, header_bytes: int, payload: Sequence[Frame], max_payload_bytes: int) -> None:
    request_id = prelude.request_id
    if prelude.flags & CRITICAL_FLAGS:
        raise RemoteProtocolError(
            ErrorCode.MALFORMED,
            f"flags: got {prelude.flags:#06x}, wanted no bit of the low byte that this version does not know",
            request_id=request_id,
        )
    for what, got, most in (
        ("header bytes", header_bytes, header_cap(prelude.code)),
        ("payload frames", len(payload), MAX_PAYLOAD_FRAMES),
    ):
        if got > most:
            raise RemoteProtocolError(
                ErrorCode.TOO_LARGE, f"{what}: got {got}, wanted at most {most}", request_id=request_id
            )
    total = payload_bytes(payload)
    if total > max_payload_bytes:
        raise RemoteProtocolError(
            ErrorCode.TOO_LARGE,
            f"payload bytes: got {total}, wanted at most {max_payload_bytes}",
            request_id=request_id,
        )
