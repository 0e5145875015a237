"""Every change of state of a session, in one table.

Theory of operation. A session is what a hello and its welcome make: both sides hold the same transcript digest, and
every later message repeats it. One table serves both sides: it does not know whether "we" said a hello or heard one, so
what we may do and what we accept from the peer are judged by the same rules (`connection.py` says who may say what).

    FRESH     no hello yet, or the last one was not answered in time.
    GREETED   a hello is unanswered. A second hello replaces it.
    OPEN      requests and replies flow. A hello here begins a new session and ends this one: what was in flight fails.
    REFUSED   the hello was declined. Another hello may be tried.
    LOST      the session ended without farewell: the server does not know it (any more), answers under another
              transcript, shows another boot id, or one side was silent for too long. The way back is a hello.
    CLOSED    we are done.
    ERROR     a rule of this table was broken. For good: make a new connection.

STALE is a message of a session that is not this one. It changes nothing: the receiver answers `SESSION_UNKNOWN`, and it
is that answer which, to the side that asked, is a LOSS. Messages that answer nothing that is pending never get here;
they are dropped by id. Nor do messages whose bytes cannot be read: each costs itself only. An unlisted pair breaks the
protocol and ends in ERROR. Source: docs/spec/wire-2.md, "States", whose diagram is made from this table.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from protocol_v2.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping


class State(enum.Enum):
    """Where a session stands."""

    FRESH = "fresh"
    GREETED = "greeted"
    OPEN = "open"
    REFUSED = "refused"
    LOST = "lost"
    CLOSED = "closed"
    ERROR = "error"


class Input(enum.Enum):
    """What happens to a session, whoever did it."""

    HELLO = "hello"
    WELCOME = "welcome"
    REFUSAL = "refusal"
    REQUEST = "request"
    #: A reply or an error reply to a pending request.
    REPLY = "reply"
    #: A message of another session.
    STALE = "stale"
    #: The session is known to have ended.
    LOSS = "loss"
    #: The hello was not answered in time.
    TIMEOUT = "timeout"
    #: A message that this direction does not have.
    VIOLATION = "violation"
    CLOSE = "close"


TRANSITIONS: Final[Mapping[State, Mapping[Input, State]]] = MappingProxyType(
    {
        State.FRESH: MappingProxyType(
            {
                Input.HELLO: State.GREETED,
                Input.STALE: State.FRESH,
                Input.VIOLATION: State.ERROR,
                Input.CLOSE: State.CLOSED,
            }
        ),
        State.GREETED: MappingProxyType(
            {
                Input.HELLO: State.GREETED,
                Input.WELCOME: State.OPEN,
                Input.REFUSAL: State.REFUSED,
                Input.STALE: State.GREETED,
                Input.TIMEOUT: State.FRESH,
                Input.VIOLATION: State.ERROR,
                Input.CLOSE: State.CLOSED,
            }
        ),
        State.OPEN: MappingProxyType(
            {
                Input.HELLO: State.GREETED,
                Input.REQUEST: State.OPEN,
                Input.REPLY: State.OPEN,
                Input.STALE: State.OPEN,
                Input.LOSS: State.LOST,
                Input.VIOLATION: State.ERROR,
                Input.CLOSE: State.CLOSED,
            }
        ),
        State.REFUSED: MappingProxyType(
            {
                Input.HELLO: State.GREETED,
                Input.STALE: State.REFUSED,
                Input.VIOLATION: State.ERROR,
                Input.CLOSE: State.CLOSED,
            }
        ),
        State.LOST: MappingProxyType(
            {
                Input.HELLO: State.GREETED,
                Input.STALE: State.LOST,
                Input.VIOLATION: State.ERROR,
                Input.CLOSE: State.CLOSED,
            }
        ),
        State.CLOSED: MappingProxyType({Input.CLOSE: State.CLOSED}),
        State.ERROR: MappingProxyType({Input.CLOSE: State.CLOSED}),
    }
)


class SessionState:
    """The state of one session, moved by `step` only."""

    __slots__ = ("_state",)

    def __init__(self, state: State = State.FRESH) -> None:
        self._state = state

    @property
    def state(self) -> State:
        """Where the session stands."""
        return self._state

    def allows(self, happening: Input) -> bool:
        """Whether the table has this pair."""
        return happening in TRANSITIONS[self._state]

    def step(self, happening: Input) -> State:
        """Move.

        Returns:
            The next state.

        Raises:
            LocalProtocolError: the table does not have this pair; the state is ERROR from now on.
        """
        before = self._state
        after = TRANSITIONS[before].get(happening)
        if after is None:
            self._state = State.ERROR
            raise LocalProtocolError(f"{happening.value}: not possible in state {before.value}; make a new connection")
        self._state = after
        return after
