"""What may be injected for peers that do not know wire protocol 2: a tunnel into a client, a front into a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from protocol_v2.errors import ProtocolError
    from protocol_v2.events import Event, SendRequest
    from protocol_v2.frames import Frame
    from protocol_v2.hello import Limits
    from protocol_v2.jobs import Job
    from protocol_v2.status import Fact


class Tunnel(Protocol):
    """Speaks another protocol to a server that does not know this one, on the socket that is open.

    Injected for such servers by whoever knows their protocol. It takes the same requests and gives the same events as a
    `ClientConnection` with an open session, by whatever messages it needs.
    """

    @property
    def limits(self) -> Limits:
        """What requests are held to."""

    def new_request_id(self) -> int:
        """An id that this tunnel has not used."""

    def send(self, event: SendRequest, now: float) -> None:
        """Take a request; what to send for it comes out of `take_outgoing`."""

    def receive_frames(self, frames: Sequence[Frame], now: float) -> list[Event]:
        """Take a message of the server."""

    def take_outgoing(self) -> list[list[Frame]]:
        """Messages to send now."""

    def abandon(self, request_id: int) -> None:
        """Forget a request."""

    def expire(self, now: float) -> list[Event]:
        """Let time pass."""

    def next_timeout(self) -> float | None:
        """When `expire` has something to do."""

    def lose(self, reason: str) -> list[Event]:
        """The socket is gone; everything pending fails."""


ForeignPolicy: TypeAlias = "Callable[[frozenset[str]], Tunnel | ProtocolError | None]"
"""Given what a server without `extra_keys/2` listed: a tunnel to it, or None to bypass it. An error is what requests
end in until the next attempt, raised from calls or told in their results, as if the server had answered it."""


class ForeignFront(Protocol):
    """Another protocol on the same port, injected by the caller. Driven by the loop like the service itself."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What the answer to a v1 probe lists beside our own."""

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame that its clients send; a larger one may end the connection before it is read."""

    def receive(self, identity: bytes, frames: Sequence[Frame], now: float, *, unread: int) -> None:
        """Take one multipart message that is none of this protocol; it never raises for what a peer sends.

        Args:
            identity: the peer's.
            frames: the message.
            now: seconds, monotonic.
            unread: bytes of answers that wait for that peer.
        """

    def take_outgoing(self) -> list[tuple[bytes, list[Frame]]]:
        """Messages to send, with the identity of the peer each goes to."""

    def take_jobs(self) -> list[Job]:
        """Jobs to run; each comes back by its ``then``."""

    def tick(self, now: float) -> None:
        """Let time pass; called about ten times a second."""

    def facts(self) -> Mapping[str, Fact]:
        """Facts for the status; names begin with ``v1.``."""

    def close(self, now: float) -> None:
        """End all sessions of this front; the cache is closed afterwards by the service."""
