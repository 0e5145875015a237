"""`Backlog`: answers that were sent and that peers have not taken yet.

They wait in the transport's queues, in memory that no budget of a tier counts: what a peer asks for and does not read
would pile up there. So their bytes are counted by peer, and whoever answers asks for the count first. Belongs to the
loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol


class Sending(Protocol):
    """A message that was handed to the transport."""

    @property
    def done(self) -> bool:
        """Whether the transport has let go of it: it is on its way, or its peer is gone."""


@dataclass(slots=True)
class _Waiting:
    messages: deque[tuple[Sending, int]] = field(default_factory=deque)
    nbytes: int = 0


class Backlog:
    """Bytes that wait for peers."""

    def __init__(self) -> None:
        self._peers: dict[bytes, _Waiting] = {}

    def add(self, identity: bytes, sending: Sending, nbytes: int) -> None:
        """A message was handed over for a peer."""
        waiting = self._peers.setdefault(identity, _Waiting())
        waiting.messages.append((sending, nbytes))
        waiting.nbytes += nbytes

    def of(self, identity: bytes) -> int:
        """Bytes that wait for a peer."""
        waiting = self._peers.get(identity)
        if waiting is None:
            return 0
        while waiting.messages and waiting.messages[0][0].done:  # a transport sends to one peer in order
            waiting.nbytes -= waiting.messages.popleft()[1]
        if not waiting.messages:
            del self._peers[identity]
        return waiting.nbytes

    def total(self) -> int:
        """Bytes that wait for all peers together."""
        return sum(self.of(identity) for identity in list(self._peers))
