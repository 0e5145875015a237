"""Sessions (docs/spec/storage-2.md, "Sessions")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol_v2.codes import ErrorCode
from protocol_v2.sessions import (
    SessionEndedError,
    SessionError,
    SessionIdentityError,
    SessionState,
    SessionTable,
    SessionTableFullError,
)
from tests.protocol_v2.counted_names import CountedName, comparisons_since
from tests.protocol_v2.storage_samples import OTHER_ROOT, ROOT, chain

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS = chain("session", 8)
OTHER = chain("another", 8)
TTL = 10.0


def table(**bounds: int) -> SessionTable:
    """A table with a short time to live."""
    return SessionTable(ttl=TTL, **bounds)


def bind(sessions: SessionTable, keys: Sequence[bytes], *, session: str = "s", root: bytes = ROOT, **more: Any) -> None:
    """A keyed call; a lookup unless `opens` says otherwise."""
    defaults: dict[str, Any] = {"opens": True, "owner": "a", "now": 0.0}
    sessions.bind(session, root, keys, **(defaults | more))


def test_a_session_is_bound_to_its_first_identity() -> None:
    """One id never carries two identities: another key for a known index, or another space, is refused."""
    sessions = table()
    bind(sessions, KEYS[:3])
    bind(sessions, KEYS[:3])
    with pytest.raises(SessionIdentityError, match="chunk 1") as caught:
        bind(sessions, [KEYS[0], OTHER[1]])
    assert ErrorCode.IDENTITY_MISMATCH is caught.value.error_code
    with pytest.raises(SessionIdentityError, match="another space"):
        bind(sessions, KEYS[:3], root=OTHER_ROOT)
    with pytest.raises(SessionIdentityError, match="chunk 2"):
        bind(sessions, OTHER[2:3], first=2, opens=False)
    assert 3 == sessions.bound_keys


def test_growth_is_fine_and_remembered() -> None:
    """A later call may name more chunks; from then on they are bound too, also where others between are not."""
    sessions = table()
    bind(sessions, KEYS[:2])
    bind(sessions, KEYS[:5])
    bind(sessions, KEYS[6:7], first=6, opens=False)
    with pytest.raises(SessionIdentityError, match="chunk 4"):
        bind(sessions, OTHER[4:5], first=4)
    with pytest.raises(SessionIdentityError, match="chunk 6"):
        bind(sessions, [*KEYS[:6], OTHER[6]])
    bind(sessions, KEYS[:8])
    assert 8 == sessions.bound_keys


def test_a_refused_call_is_forgotten() -> None:
    """What a refused call named beside its wrong key is not bound."""
    sessions = table()
    bind(sessions, KEYS[:2])
    with pytest.raises(SessionIdentityError):
        bind(sessions, [OTHER[0], *OTHER[1:5]])
    bind(sessions, KEYS[:5])


def test_shorter_calls_are_fine() -> None:
    """A call that names fewer chunks than are known takes nothing back."""
    sessions = table()
    bind(sessions, KEYS[:5])
    bind(sessions, KEYS[:1])
    bind(sessions, [])
    assert 5 == sessions.bound_keys


def test_sessions_do_not_touch_each_other() -> None:
    """Two ids may stand for two identities, or for one."""
    sessions = table()
    bind(sessions, KEYS[:2], session="s")
    bind(sessions, OTHER[:2], session="t")
    bind(sessions, KEYS[:2], session="u", root=OTHER_ROOT)
    assert 3 == len(sessions)


def test_end_and_cancel_are_apart_and_idempotent() -> None:
    """O5: cancel, then end, each twice: only the first of each counts."""
    sessions = table()
    assert (False, False) == (sessions.cancel("s", 0.0), sessions.end("s", 0.0))
    bind(sessions, KEYS[:2])
    assert SessionState.OPEN is sessions.state("s", 0.0)
    assert (True, False) == (sessions.cancel("s", 0.0), sessions.cancel("s", 0.0))
    assert SessionState.CANCELLED is sessions.state("s", 0.0)
    assert (True, False) == (sessions.end("s", 0.0), sessions.end("s", 0.0))
    assert SessionState.ENDED is sessions.state("s", 0.0)
    assert not sessions.cancel("s", 0.0)
    assert (0, 0) == (len(sessions), sessions.bound_keys)


def test_a_last_store_after_cancel_is_taken_and_checked() -> None:
    """O5: an engine that aborts before its final store still stores, under the same identity only."""
    sessions = table()
    bind(sessions, KEYS[:2])
    sessions.cancel("s", 0.0)
    bind(sessions, KEYS[:3], opens=False)
    with pytest.raises(SessionIdentityError):
        bind(sessions, OTHER[:3], opens=False)


def test_a_store_after_the_end_is_refused() -> None:
    """O5: end before store: the store keeps nothing, and says so; a lookup opens the id anew, for any identity."""
    sessions = table()
    bind(sessions, KEYS[:2])
    sessions.end("s", 0.0)
    with pytest.raises(SessionEndedError, match="has ended") as caught:
        bind(sessions, KEYS[:2], opens=False)
    assert ErrorCode.IDENTITY_MISMATCH is caught.value.error_code
    bind(sessions, OTHER[:2])
    assert SessionState.OPEN is sessions.state("s", 0.0)
    bind(sessions, OTHER[:2], opens=False)


def test_a_store_may_open_a_session() -> None:
    """A store that names an id never seen binds it."""
    sessions = table()
    bind(sessions, KEYS[:2], opens=False)
    with pytest.raises(SessionIdentityError):
        bind(sessions, OTHER[:2])


def test_a_lookup_after_cancel_begins_anew() -> None:
    """A cancelled id may be used for the next request."""
    sessions = table()
    bind(sessions, KEYS[:4])
    sessions.cancel("s", 0.0)
    bind(sessions, OTHER[:2])
    assert (1, 2) == (len(sessions), sessions.bound_keys)


def test_idle_sessions_are_forgotten() -> None:
    """Without a call for its time to live a session, or the memory of its end, is gone; a call renews it."""
    sessions = table()
    bind(sessions, KEYS[:2], session="idle")
    bind(sessions, KEYS[:2], session="busy")
    bind(sessions, KEYS[:2], session="busy", now=5.0)
    bind(sessions, KEYS[:2], session="ended")
    sessions.end("ended", 0.0)
    assert sessions.state("idle", TTL) is None
    assert sessions.state("ended", TTL) is None
    assert ["idle"] == sessions.expire(TTL)
    assert SessionState.OPEN is sessions.state("busy", TTL)
    assert [] == sessions.expire(TTL)
    bind(sessions, OTHER[:2], session="idle", now=TTL)
    bind(sessions, OTHER[:2], session="ended", opens=False, now=TTL)
    assert ["busy"] == sessions.expire(5.0 + TTL)


def test_an_idle_session_is_not_held_against_a_new_request() -> None:
    """An id that is over its time counts as unknown even before it was swept."""
    sessions = table()
    bind(sessions, KEYS[:2])
    bind(sessions, OTHER[:2], opens=False, now=TTL)
    assert not sessions.end("s", TTL * 5)
    assert 2 == sessions.bound_keys


def test_sessions_go_with_their_client() -> None:
    """A client's sessions, ended ones included, are forgotten with it; those of others stay."""
    sessions = table()
    bind(sessions, KEYS[:2], session="one")
    bind(sessions, KEYS[:2], session="two")
    sessions.end("two", 0.0)
    bind(sessions, KEYS[:2], session="three", owner="b")
    assert ["one"] == sessions.drop_owner("a")
    assert [] == sessions.drop_owner("a")
    assert sessions.state("two", 0.0) is None
    assert SessionState.OPEN is sessions.state("three", 0.0)
    assert 2 == sessions.bound_keys


def test_a_client_that_goes_never_walks_through_the_ends_of_others() -> None:
    """R: a client that goes costs its own sessions, however many of others are remembered as ended."""
    sessions = table()
    for number in range(1000):
        bind(sessions, KEYS[:1], session=f"{number}", owner=CountedName(f"o{number}"))
        sessions.end(f"{number}", 0.0)
    bind(sessions, KEYS[:1], session="open", owner=CountedName("o7"))
    before = CountedName.comparisons
    assert ["open"] == sessions.drop_owner(CountedName("o7"))
    assert comparisons_since(before) < 50
    assert sessions.state("7", 0.0) is None
    assert SessionState.ENDED is sessions.state("8", 0.0)
    sessions.expire(TTL)
    assert {} == sessions._by_owner


def test_the_table_is_bounded() -> None:
    """R: beyond its bounds a session, or more keys, is refused as busy; ending one makes room."""
    sessions = table(max_sessions=2, max_keys=5)
    bind(sessions, KEYS[:2], session="one")
    bind(sessions, KEYS[:2], session="two")
    with pytest.raises(SessionTableFullError) as caught:
        bind(sessions, KEYS[:1], session="three")
    assert (ErrorCode.BUSY, True) == (caught.value.error_code, caught.value.retriable)
    with pytest.raises(SessionTableFullError, match="4 keys are bound, of at most 5"):
        bind(sessions, KEYS[:4], session="two")
    bind(sessions, KEYS[:3], session="two")
    sessions.end("one", 0.0)
    bind(sessions, KEYS[:1], session="three")


def test_remembered_ends_are_bounded() -> None:
    """R: only so many ended ids are remembered; the oldest are forgotten."""
    sessions = table(max_sessions=3)
    for index in range(10):
        bind(sessions, KEYS[:1], session=f"{index}")
        sessions.end(f"{index}", 0.0)
    assert [None] * 7 + [SessionState.ENDED] * 3 == [sessions.state(f"{index}", 0.0) for index in range(10)]


def test_a_far_index_costs_within_the_bound() -> None:
    """R: a call that names chunk 10**9 alone is refused before anything is allocated for it."""
    sessions = table(max_keys=1000)
    with pytest.raises(SessionTableFullError):
        bind(sessions, KEYS[:1], first=10**9)
    assert 0 == len(sessions)


class Model(RuleBasedStateMachine):
    """The table against dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = table()
        self.now = 0.0
        self.open: dict[str, tuple[bytes, dict[int, bytes], bool, float]] = {}
        self.ended: dict[str, float] = {}

    def standing(self, session: str) -> tuple[bytes, dict[int, bytes], bool, float] | None:
        """The model's session, if it is not over its time."""
        known = self.open.get(session)
        return known if known is not None and known[3] + TTL > self.now else None

    @rule(
        session=st.sampled_from("st"),
        root=st.sampled_from([ROOT, ROOT, ROOT, OTHER_ROOT]),
        keys=st.sampled_from([KEYS, KEYS, OTHER]),
        first=st.integers(0, 3),
        count=st.integers(0, 4),
        opens=st.booleans(),
    )
    def bind(self, session: str, root: bytes, keys: list[bytes], first: int, count: int, opens: bool) -> None:
        """A keyed call: taken or refused as the model says."""
        named = {index: keys[index] for index in range(first, first + count)}
        known = self.standing(session)
        ended = session in self.ended and self.ended[session] + TTL > self.now
        expected: type[SessionError] | None = None
        if known is None or (known[2] and opens):
            if ended and known is None and not opens:
                expected = SessionEndedError
            else:
                self.open[session] = (root, named, False, self.now)
                self.ended.pop(session, None)
        elif known[0] != root or any(known[1].get(index, key) != key for index, key in named.items()):
            expected = SessionIdentityError
        else:
            self.open[session] = (root, known[1] | named, known[2], self.now)
        try:
            bind(
                self.sessions,
                list(named.values()),
                session=session,
                root=root,
                first=first,
                opens=opens,
                now=self.now,
            )
        except SessionError as error:
            assert expected is type(error)
        else:
            assert expected is None

    @rule(session=st.sampled_from("st"), ends=st.booleans())
    def leave(self, session: str, ends: bool) -> None:
        """Cancel or end."""
        known = self.standing(session)
        if ends:
            assert (known is not None) == self.sessions.end(session, self.now)
            if known is not None:
                del self.open[session]
                self.ended[session] = self.now
        else:
            assert (known is not None and not known[2]) == self.sessions.cancel(session, self.now)
            if known is not None:
                self.open[session] = (known[0], known[1], True, known[3])

    @rule(seconds=st.integers(1, 6), sweep=st.booleans())
    def wait(self, seconds: int, sweep: bool) -> None:
        """Time passes, swept or not."""
        self.now += seconds
        if sweep:
            self.sessions.expire(self.now)

    @invariant()
    def same(self) -> None:
        """Both tell the same state."""
        for session in "st":
            known = self.standing(session)
            state = self.sessions.state(session, self.now)
            if known is not None:
                assert (SessionState.CANCELLED if known[2] else SessionState.OPEN) is state
            else:
                assert state in {None, SessionState.ENDED}


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=30)
