"""`Flow`: bytes that are under way in tasks, bounded together, so that slow tiers cannot pile up memory."""

from __future__ import annotations

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import ProtocolError


class CacheBusyError(ProtocolError):
    """Too many bytes are under way; retry when some of it is done."""

    error_code = ErrorCode.BUSY
    retriable = True


class Flow:
    """Bytes under way. Belongs to the loop.

    Args:
        limit: bytes under way together; one operation that is larger goes alone.

    Attributes:
        size: bytes that were taken and not given back.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.size = 0

    def take(self, size: int, doing: str) -> None:
        """Count bytes as under way; `give_back` as many when they are done.

        Raises:
            CacheBusyError: there is no room for them now; nothing was taken.
        """
        if self.size and self.size + size > self._limit:
            raise CacheBusyError(f"{doing}: {self.size} bytes are under way, of at most {self._limit}")
        self.size += size

    def give_back(self, size: int) -> None:
        """These bytes are done."""
        self.size -= size
