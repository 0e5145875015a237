"""What the storage side refuses (`StorageValueError`) and what it misses (`ObjectMissError`), under one base.

Texts name what was got and what was wanted. They carry digests' lengths, never a payload, a model name or a path that a
user chose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import ProtocolError

if TYPE_CHECKING:
    from protocol_v2.codes import MissReason


class StorageError(ProtocolError):
    """Base of every error of storage and tiers."""


class StorageValueError(StorageError, ValueError):
    """A name, identity or value that must not be stored; the caller is at fault, and nothing was stored."""

    error_code = ErrorCode.MALFORMED


class ObjectMissError(StorageError):
    """There is no usable object under that identity.

    Attributes:
        reason: why; stable on the wire, in counters and in docs/spec/storage-2.md.
    """

    def __init__(self, reason: MissReason, message: str) -> None:
        super().__init__(f"{reason.name.lower()}: {message}")
        self.reason = reason


class EnvelopeError(ObjectMissError):
    """An object is there and its envelope, identity or bytes are wrong: it is a miss, and is set aside."""
