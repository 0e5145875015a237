"""`Replies`: how requests of peers are answered: each once, whatever it ends in, after what blocks for it has run.

Belongs to the loop, as all of a service does.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import LocalProtocolError, ProtocolError
from protocol_v2.events import SendError, SendReply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.backlog import Backlog
    from protocol_v2.events import RequestReceived
    from protocol_v2.frames import Frame
    from protocol_v2.jobs import Jobs
    from protocol_v2.messages import Reply
    from protocol_v2.server_connection import ServerConnection
    from protocol_v2.status import ServiceCounters
    from protocol_v2.work import Task

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Arrival:
    """A store whose bytes are being copied out of shared memory; what follows it waits until it is here."""

    keep: Callable[[float], None]
    here: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    """One transport identity, and the session that it may have."""

    identity: bytes
    connection: ServerConnection
    #: in the order in which they came: a chunk is kept after the one before it
    arrivals: deque[Arrival] = field(default_factory=deque)


class Replies:
    """See the head of the module.

    Args:
        jobs: what blocks.
        counters: told of failures.
        backlog: what was sent and peers have not taken yet.
    """

    def __init__(self, jobs: Jobs, counters: ServiceCounters, backlog: Backlog) -> None:
        self._jobs = jobs
        self._counters = counters
        self._backlog = backlog
        self._outgoing: deque[tuple[bytes, list[Frame]]] = deque()

    def take(self) -> list[tuple[bytes, list[Frame]]]:
        """Messages to send, with the identity of the peer each goes to."""
        taken = list(self._outgoing)
        self._outgoing.clear()
        return taken

    def unread(self, peer: Peer) -> int:
        """Bytes of answers that wait for a peer to take them."""
        return self._backlog.of(peer.identity)

    def run(
        self,
        peer: Peer,
        request: RequestReceived,
        tasks: Sequence[Task[T]],
        then: Callable[[float], None],
        now: float,
    ) -> None:
        """Run what blocks, then answer; at once where nothing blocks."""
        self._jobs.run(tasks, self.guarded(peer, request, then), now)

    def guarded(self, peer: Peer, request: RequestReceived, then: Callable[[float], None]) -> Callable[[float], None]:
        """What an operation ends in belongs to its own request."""

        def guarded(now: float) -> None:
            try:
                then(now)
            except Exception as error:  # a handler that fails costs its own request
                self.fail(peer, request, error, now)

        return guarded

    def reply(
        self, peer: Peer, request: RequestReceived, message: Reply, now: float, payload: tuple[Frame, ...] = ()
    ) -> None:
        """Answer a request. Nothing is sent where nobody waits any more, or its session is over."""
        if peer.connection.awaits(request.request_id, request.message):
            self.queue(peer.identity, peer.connection.send(SendReply(request.request_id, message, payload), now))

    def fail(self, peer: Peer, request: RequestReceived, error: Exception, now: float) -> None:
        """Answer a request with the error that it ended in; likewise."""
        if not isinstance(error, ProtocolError):
            log.error("a request failed: %s", type(error).__name__, exc_info=error)
        if peer.connection.awaits(request.request_id, request.message):
            self.fail_pending(peer, request.request_id, error, now)
        else:
            self._counters.failed += 1

    def fail_pending(self, peer: Peer, request_id: int, error: Exception, now: float) -> None:
        """Answer whatever request is pending under an id with an error."""
        self._counters.failed += 1
        code = getattr(error, "error_code", ErrorCode.INTERNAL)
        if isinstance(error, LocalProtocolError) and code is ErrorCode.INTERNAL:
            code = ErrorCode.MALFORMED
        text = str(error) if isinstance(error, ProtocolError) else "the server failed; nothing was served"
        self.queue(peer.identity, peer.connection.send(SendError(request_id, ErrorCode(code), text), now))

    def queue(self, identity: bytes, frames: list[Frame]) -> None:
        """Send a message to a peer, if there is one to send."""
        if frames:
            self._outgoing.append((identity, frames))
