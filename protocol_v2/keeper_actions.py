"""What a `SessionKeeper` asks its shell to do, and how far it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from protocol_v2.errors import ProtocolError
    from protocol_v2.events import ReplyReceived
    from protocol_v2.frames import Frame


class Phase(enum.Enum):
    """How far we are with the server."""

    DOWN = "down"
    CONNECTING = "connecting"
    PROBING = "probing"
    GREETING = "greeting"
    UP = "up"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """Make a socket and connect it; report `connected` or `disconnected`."""


@dataclass(frozen=True, slots=True)
class CloseSocket:
    """Close the socket, dropping whatever it still holds."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message without waiting; report `unsent` if its queue is full.

    Args:
        frames: the message.
        ticket: whose request this is; None for the keeper's own.
    """

    frames: list[Frame]
    ticket: int | None


@dataclass(frozen=True, slots=True)
class Finish:
    """A request has ended: hand the outcome to whoever waits."""

    ticket: int
    outcome: ReplyReceived | ProtocolError


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """Whoever waits for a session should look again."""

    phase: Phase


Action: TypeAlias = OpenSocket | CloseSocket | Send | Finish | PhaseChanged
