"""Sessions: which identity a request id stands for, so that one id never carries two.

A session is opened by its first keyed call and bound to one space and one chain of chunk keys, by chunk index. A later
call may name more chunks (growth), never another key for an index that is known. The table is pure: time comes from the
caller.

    call            unknown id        open                      cancelled            ended
    bind (lookup)   opens             checks, grows, renews     opens anew           opens anew
    bind (store)    opens             checks, grows, renews     checks, grows        refused: ended
    cancel          nothing           cancelled                 nothing              nothing
    end             nothing           ended                     ended                nothing

Cancel is an abort: what was under way for the request is dropped, while a last store of what was computed is still
taken. End is for good: a store that comes after it is refused and keeps nothing. An id that ended, or was idle for its
time to live, may be opened again by a lookup, with another identity. Partial tails and segments are not bound: the same
index may hold a partial tail first and the full chunk later. Source: docs/spec/storage-2.md, "Sessions".
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

MAX_SESSIONS: Final = 65_536
"""Open and cancelled sessions; also how many ended ones are remembered."""

MAX_BOUND_KEYS: Final = 4 * 1024 * 1024
"""Keys that all sessions remember together: bounds memory whatever their prompts' lengths."""

SESSION_TTL: Final = 600.0
"""Seconds without a call after which a session is forgotten, in whatever state."""


class SessionError(ProtocolError):
    """Base of what sessions refuse."""

    error_code = ErrorCode.INTERNAL


class SessionIdentityError(SessionError):
    """The session is bound to another space or chain of keys; use a new session id for another request."""

    error_code = ErrorCode.IDENTITY_MISMATCH


class SessionEndedError(SessionError):
    """The session has ended and stands for no identity; nothing was stored."""

    error_code = ErrorCode.IDENTITY_MISMATCH


class SessionTableFullError(SessionError):
    """No room for one more session, or for more keys, now."""

    error_code = ErrorCode.BUSY
    retriable = True


class SessionState(enum.Enum):
    """Where a session is; see the module's table."""

    OPEN = "open"
    CANCELLED = "cancelled"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class _Session:
    root: bytes
    owner: Hashable
    last: float
    cancelled: bool = False
    #: key of each chunk index; None where no call named it
    keys: list[bytes | None] = field(default_factory=list)


class SessionTable:
    """All sessions of a server, by any hashable id (a server uses client and session id together).

    Args:
        ttl: seconds without a call after which a session is forgotten.
        max_sessions: sessions that stand at one time; also how many ended ones are remembered.
        max_keys: keys that all of them remember together.
    """

    def __init__(
        self, *, ttl: float = SESSION_TTL, max_sessions: int = MAX_SESSIONS, max_keys: int = MAX_BOUND_KEYS
    ) -> None:
        self._ttl = ttl
        self._max_sessions = max_sessions
        self._max_keys = max_keys
        self._live: OrderedDict[Hashable, _Session] = OrderedDict()  # least recently used first
        self._ended: OrderedDict[Hashable, tuple[float, Hashable]] = OrderedDict()  # first ended first
        #: sessions that stand or are remembered as ended: a client that goes never costs a walk through those of others
        self._by_owner: dict[Hashable, dict[Hashable, None]] = {}
        self._keys = 0

    def __len__(self) -> int:
        """Sessions that are open or cancelled."""
        return len(self._live)

    @property
    def bound_keys(self) -> int:
        """Keys that all sessions remember together."""
        return self._keys

    def state(self, session: Hashable, now: float) -> SessionState | None:
        """Where a session is; None if it is not known."""
        known = self._standing(session, now)
        if known is not None:
            return SessionState.CANCELLED if known.cancelled else SessionState.OPEN
        return SessionState.ENDED if self._has_ended(session, now) else None

    def bind(
        self,
        session: Hashable,
        root: bytes,
        keys: Sequence[bytes],
        *,
        first: int = 0,
        opens: bool,
        owner: Hashable,
        now: float,
    ) -> None:
        """Hold a call's keys against what the session stands for, and remember the new ones.

        Args:
            session: any hashable.
            root: root of the space, 32 bytes.
            keys: keys of the full chunks `first`, `first + 1`, ...; 32 bytes each.
            first: chunk index of the first key, at least 0.
            opens: the call begins a request (lookup, prefetch): it may reopen what was cancelled or ended.
            owner: the client; its sessions go with it.
            now: seconds, monotonic.

        Raises:
            SessionIdentityError: another space, or another key for a known index; nothing is remembered of the call.
            SessionEndedError: the session ended and this call does not open one.
            SessionTableFullError: a bound is reached.
        """
        known = self._standing(session, now)
        if known is None or (opens and known.cancelled):
            if not opens and self._has_ended(session, now):
                raise SessionEndedError("session: it has ended and stands for no identity; look up again first")
            self._check_room(first + len(keys))
            known = self._open(session, root, owner, now)
        elif known.root != root:
            raise SessionIdentityError("session: bound to another space; use a new session id")
        else:
            _check_keys(known, keys, first)
            self._check_room(first + len(keys) - len(known.keys))
        known.last = now
        self._live.move_to_end(session)
        self._grow(known, keys, first)

    def cancel(self, session: Hashable, now: float) -> bool:
        """Abort: whether there was such an open session. Its keys stay bound, so that a last store is still checked."""
        known = self._standing(session, now)
        if known is None or known.cancelled:
            return False
        known.cancelled = True
        return True

    def end(self, session: Hashable, now: float) -> bool:
        """End for good: whether there was such a session, open or cancelled."""
        known = self._standing(session, now)
        if known is None:
            return False
        self._end(session)
        self._ended[session] = (now, known.owner)
        if len(self._ended) > self._max_sessions:
            self._forget(next(iter(self._ended)))
        return True

    def drop_owner(self, owner: Hashable) -> list[Hashable]:
        """Forget the sessions of a client; the ids of those that had not ended."""
        known = list(self._by_owner.get(owner, ()))
        dropped = [session for session in known if session in self._live]
        for session in known:
            self._forget(session)
        return dropped

    def expire(self, now: float) -> list[Hashable]:
        """Forget what was idle for its time to live; the ids of those that had not ended."""
        late = []
        for session, known in self._live.items():
            if known.last + self._ttl > now:
                break
            late.append(session)
        for session in late:
            self._forget(session)
        while self._ended and next(iter(self._ended.values()))[0] + self._ttl <= now:
            self._forget(next(iter(self._ended)))
        return late

    def _standing(self, session: Hashable, now: float) -> _Session | None:
        known = self._live.get(session)
        return known if known is not None and known.last + self._ttl > now else None

    def _has_ended(self, session: Hashable, now: float) -> bool:
        ended = self._ended.get(session)
        return ended is not None and ended[0] + self._ttl > now

    def _open(self, session: Hashable, root: bytes, owner: Hashable, now: float) -> _Session:
        if session in self._live:  # cancelled, or idle for too long
            self._forget(session)
        if len(self._live) >= self._max_sessions:
            raise SessionTableFullError(
                f"sessions: {len(self._live)} stand, of at most {self._max_sessions}; end some or retry later"
            )
        if session in self._ended:
            self._forget(session)
        known = self._live[session] = _Session(root, owner, now)
        self._by_owner.setdefault(owner, {})[session] = None
        return known

    def _check_room(self, more: int) -> None:
        if more > 0 and self._keys + more > self._max_keys:
            raise SessionTableFullError(
                f"sessions: {self._keys} keys are bound, of at most {self._max_keys}; end sessions or retry later"
            )

    def _grow(self, known: _Session, keys: Sequence[bytes], first: int) -> None:
        bound, before = known.keys, len(known.keys)
        if first > before:
            bound.extend([None] * (first - before))
        bound[first : first + len(keys)] = keys
        self._keys += len(bound) - before

    def _forget(self, session: Hashable) -> None:
        """Let go of a session, whether it stands or ended."""
        ended = self._ended.pop(session, None)
        owner = self._end(session).owner if ended is None else ended[1]
        sessions = self._by_owner[owner]
        del sessions[session]
        if not sessions:
            del self._by_owner[owner]

    def _end(self, session: Hashable) -> _Session:
        """Take a session out of those that stand; it is still its owner's."""
        known = self._live.pop(session)
        self._keys -= len(known.keys)
        return known


def _check_keys(known: _Session, keys: Sequence[bytes], first: int) -> None:
    bound = known.keys[first : first + len(keys)]
    if bound == list(keys[: len(bound)]):
        return
    for place, (old, key) in enumerate(zip(bound, keys, strict=False)):
        if old is not None and old != key:
            raise SessionIdentityError(
                f"session: bound to another key for chunk {first + place}; use a new session id for another request"
            )
