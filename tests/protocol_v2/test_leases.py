"""Leases (docs/spec/storage-2.md, "Leases")."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol_v2.codes import ErrorCode
from protocol_v2.errors import LocalProtocolError
from protocol_v2.leases import Lease, LeaseScopeError, LeaseTable, LeaseTableFullError
from protocol_v2.storage import Shard
from tests.protocol_v2.counted_names import CountedName, comparisons_since
from tests.protocol_v2.storage_samples import ROOT, chain

if TYPE_CHECKING:
    from protocol_v2.storage.names import ChunkId

CHUNKS: list[ChunkId] = [(ROOT, key) for key in chain("lease", 8)]
TTL = 10.0


def table(**bounds: int) -> LeaseTable:
    """A table whose ids count."""
    ids = itertools.count(1)
    return LeaseTable(lambda: next(ids).to_bytes(16), **bounds)


def grant(leases: LeaseTable, count: int, *, start: int = 0, **options: Any) -> Lease:
    """A lease over the chunks [start, start + count)."""
    defaults: dict[str, Any] = {"world": 1, "groups": 1, "owner": "a", "ttl": TTL, "now": 0.0}
    return leases.grant(CHUNKS[start : start + count], **(defaults | options))


def holders(leases: LeaseTable, count: int = 8) -> list[int]:
    """How many leases hold each chunk."""
    return [leases.holders(chunk) for chunk in CHUNKS[:count]]


def test_a_lease_holds_its_chunks_until_it_is_released() -> None:
    """O1: release names the lease, never a key, and leaves a count of 0 for every chunk."""
    leases = table()
    lease = grant(leases, 3)
    assert [1, 1, 1, 0] == holders(leases, 4)
    assert leases.is_held(CHUNKS[0])
    assert not leases.is_held(CHUNKS[3])
    assert (1, 3) == (len(leases), leases.held)
    assert CHUNKS[:3] == leases.release(lease.id)
    assert ([0] * 8, 0, 0) == (holders(leases), leases.held, len(leases))
    assert leases.find(lease.id, 0.0) is None


def test_what_the_engine_computes_itself_is_given_back_at_once() -> None:
    """O3: of five chunks hit, three are released at once, the other two after the retrieve; nothing stays."""
    leases = table()
    lease = grant(leases, 5)
    assert 3 == len(leases.release(lease.id, start=2))
    assert [1, 1, 0, 0, 0] == holders(leases, 5)
    assert 2 == len(leases.release(lease.id, start=0, stop=2))
    assert (0, 0) == (leases.held, len(leases))


def test_release_is_exact_and_once_only() -> None:
    """O4: of two readers on one chunk the first frees twice; the second still holds it, and only own parts count."""
    leases = table()
    first, second = grant(leases, 3), grant(leases, 3, owner="b")
    assert [CHUNKS[1]] == leases.release(first.id, start=1, stop=2)
    assert [] == leases.release(first.id, start=1, stop=2)
    assert [2, 1, 2] == holders(leases, 3)
    assert 2 == len(leases.release(first.id))
    assert [] == leases.release(first.id)
    assert [1, 1, 1] == holders(leases, 3)
    assert 3 == len(leases.release(second.id))
    assert 0 == leases.held


def test_shards_release_apart() -> None:
    """A chunk is held until every shard of the world gave it back; one shard that repeats itself counts once."""
    leases = table()
    lease = grant(leases, 2, world=2, groups=2)
    shards = [Shard(2, rank, group) for rank in range(2) for group in range(2)]
    for shard in shards[:3]:
        for _ in range(2):
            assert [] == leases.release(lease.id, shard=shard)
    assert [1, 1] == holders(leases, 2)
    assert [CHUNKS[0]] == leases.release(lease.id, stop=1, shard=shards[3])
    assert [0, 1] == holders(leases, 2)
    assert [CHUNKS[1]] == leases.release(lease.id, shard=shards[3])
    assert (0, 0) == (leases.held, len(leases))


def test_all_shards_and_one_shard_mix() -> None:
    """A release for all shards ends what single shards had left, and what they say afterwards counts nothing."""
    leases = table()
    lease = grant(leases, 3, world=2)
    leases.release(lease.id, shard=Shard(2, 0, 0))
    assert CHUNKS[:2] == leases.release(lease.id, stop=2)
    assert [CHUNKS[2]] == leases.release(lease.id, shard=Shard(2, 1, 0))
    assert 0 == leases.held


@pytest.mark.parametrize("shard", [Shard(1, 0, 0), Shard(4, 0, 0), Shard(2, 0, 1)])
def test_foreign_shards_and_negative_ranges_are_refused(shard: Shard) -> None:
    """A shard of another world, and a range with a negative end, are typed errors that release nothing."""
    leases = table()
    lease = grant(leases, 2, world=2)
    with pytest.raises(LeaseScopeError, match="shard"):
        leases.release(lease.id, shard=shard)
    for start, stop in ((-1, None), (0, -1)):
        with pytest.raises(LeaseScopeError, match="range") as caught:
            leases.release(lease.id, start=start, stop=stop)
        assert ErrorCode.MALFORMED is caught.value.error_code
    assert 2 == leases.held


@pytest.mark.parametrize(("start", "stop"), [(3, None), (2, 2), (2, 1), (5, 9)])
def test_empty_ranges_release_nothing(start: int, stop: int | None) -> None:
    """A range that holds no chunk of the lease releases none; one that reaches past its end ends there."""
    leases = table()
    lease = grant(leases, 3)
    assert [] == leases.release(lease.id, start=start, stop=stop)
    assert [CHUNKS[2]] == leases.release(lease.id, start=2, stop=100)


def test_unknown_leases_release_nothing() -> None:
    """Releasing what is not known, or was released, is no error: it is idempotent."""
    assert [] == table().release(bytes(16))


def test_leases_expire_exactly_at_their_time() -> None:
    """A lease stands until its time to live is over, by the time that is passed in, and then holds nothing."""
    leases = table()
    lease = grant(leases, 2)
    grant(leases, 3, now=5.0)
    assert TTL == leases.next_expiry()
    assert [] == leases.expire(TTL - 0.001)
    assert leases.find(lease.id, TTL - 0.001) is lease
    assert leases.find(lease.id, TTL) is None
    assert CHUNKS[:2] == leases.expire(TTL)
    assert [1, 1, 1] == holders(leases, 3)
    assert 3 == len(leases.expire(100.0))
    assert (0, 0, 2, None) == (leases.held, len(leases), leases.lapsed, leases.next_expiry())


def test_an_expired_lease_can_be_taken_again() -> None:
    """What expired and was not released stands again under its id, with what it held, for its time to live."""
    leases = table()
    lease = grant(leases, 3)
    leases.release(lease.id, stop=1)
    leases.expire(TTL)
    lapsed = leases.find_lapsed(lease.id)
    assert lapsed is lease
    assert leases.retake(lapsed, 50.0)
    assert [0, 1, 1] == holders(leases, 3)
    assert leases.find(lease.id, 50.0 + TTL - 0.1) is lease
    assert 2 == len(leases.expire(50.0 + TTL))
    assert leases.find_lapsed(lease.id) is lease


def test_an_expired_lease_can_still_be_released() -> None:
    """A release after the expiry frees nothing twice, and what is released for good is not taken again."""
    leases = table()
    lease = grant(leases, 2)
    leases.expire(TTL)
    assert [] == leases.release(lease.id, stop=1)
    assert leases.retake(lease, 20.0)
    assert [0, 1] == holders(leases, 2)
    leases.expire(100.0)
    assert [] == leases.release(lease.id)
    assert leases.find_lapsed(lease.id) is None
    assert 0 == leases.held


def test_only_a_lapsed_lease_is_taken_again() -> None:
    """Taking a lease again that stands is a misuse."""
    leases = table()
    lease = grant(leases, 1)
    with pytest.raises(LocalProtocolError):
        leases.retake(lease, 0.0)


def test_leases_die_with_their_client() -> None:
    """All leases of a client end with it, lapsed ones included; those of others stand."""
    leases = table()
    gone, lapsed, other = grant(leases, 2), grant(leases, 2, ttl=1.0), grant(leases, 2, owner="b")
    leases.expire(1.0)
    assert CHUNKS[:2] == leases.drop_owner("a")
    assert [] == leases.drop_owner("a")
    assert leases.find(gone.id, 0.0) is None
    assert leases.find_lapsed(lapsed.id) is None
    assert [1, 1] == holders(leases, 2)
    assert leases.find(other.id, 0.0) is other


def test_leases_end_with_their_session() -> None:
    """All leases of a session end with it, lapsed ones included; a lease without a session is of none."""
    leases = table()
    grant(leases, 2, session="s")
    lapsed = grant(leases, 2, session="s", ttl=1.0)
    grant(leases, 2, session="t")
    grant(leases, 2)
    leases.expire(1.0)
    assert CHUNKS[:2] == leases.drop_session("s")
    assert leases.find_lapsed(lapsed.id) is None
    assert [] == leases.drop_session("s")
    assert [2, 2] == holders(leases, 2)


@pytest.mark.parametrize("bounds", [{"max_leases": 2}, {"max_held": 5}])
def test_the_table_is_bounded(bounds: dict[str, int]) -> None:
    """R: beyond its bounds a lease is refused as busy, and a release makes room again."""
    leases = table(**bounds)
    first = grant(leases, 2)
    grant(leases, 2)
    with pytest.raises(LeaseTableFullError, match="release some") as caught:
        grant(leases, 2)
    assert (ErrorCode.BUSY, True) == (caught.value.error_code, caught.value.retriable)
    assert 4 == leases.held
    leases.release(first.id)
    grant(leases, 2)


def test_a_full_table_takes_nothing_again() -> None:
    """A lapsed lease is not taken again where there is no room; it stays lapsed."""
    leases = table(max_leases=1)
    lease = grant(leases, 1)
    leases.expire(TTL)
    other = grant(leases, 1, now=TTL)
    assert not leases.retake(lease, TTL)
    assert leases.find_lapsed(lease.id) is lease
    leases.release(other.id)
    assert leases.retake(lease, TTL)


def test_lapsed_leases_are_bounded() -> None:
    """R: only so many expired leases are remembered; the oldest are forgotten."""
    leases = table(max_lapsed=2)
    granted = [grant(leases, 1, ttl=1.0 + index) for index in range(4)]
    leases.expire(100.0)
    assert [False, False, True, True] == [leases.find_lapsed(one.id) is not None for one in granted]


def test_leases_that_are_released_early_cost_nothing() -> None:
    """R: a million leases that are released before their time leave no trail of deadlines."""
    leases = table()
    for _ in range(2000):
        leases.release(grant(leases, 1).id)
    assert len(leases._deadlines) < 200
    assert ({}, {}, {}) == (leases._by_owner, leases._by_session, leases._counts)


def test_ends_never_walk_through_what_others_left() -> None:
    """R: a session or a client that ends costs its own leases, however many of others have lapsed."""
    leases = table()
    for number in range(1000):
        grant(leases, 1, owner=CountedName(f"o{number}"), session=CountedName(f"s{number}"), ttl=1.0)
    leases.expire(1.0)
    grant(leases, 1, owner=CountedName("o7"), session=CountedName("s7"))
    before = CountedName.comparisons
    assert CHUNKS[:1] == leases.drop_session(CountedName("s7"))
    assert [] == leases.drop_owner(CountedName("o8"))
    assert 998 == leases.lapsed
    assert comparisons_since(before) < 50
    for number in range(1000):
        leases.drop_owner(CountedName(f"o{number}"))
    assert (0, {}, {}) == (leases.lapsed, leases._by_owner, leases._by_session)


def test_lapsed_leases_that_are_forgotten_leave_nothing() -> None:
    """R: a lapsed lease that newer ones push out, or that is released, is in no index any more."""
    leases = table(max_lapsed=2)
    granted = [grant(leases, 1, session="s", ttl=1.0 + index) for index in range(4)]
    leases.expire(100.0)
    for lease in granted:
        leases.release(lease.id)
    assert (0, {}, {}) == (leases.lapsed, leases._by_owner, leases._by_session)


def test_misuse_is_told() -> None:
    """A lease over nothing, or an id source that repeats itself, is a misuse."""
    with pytest.raises(LocalProtocolError, match="no chunks"):
        grant(table(), 0)
    leases = LeaseTable(lambda: bytes(16))
    grant(leases, 1)
    with pytest.raises(LocalProtocolError, match="same id twice"):
        grant(leases, 1)
    assert 1 == leases.held


class Model(RuleBasedStateMachine):
    """The table against plain sets: who holds which chunk for which shard."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.leases = table(max_lapsed=1000)
        self.standing: dict[bytes, tuple[str, float, set[tuple[int, int]]]] = {}
        self.lapsed: dict[bytes, tuple[str, set[tuple[int, int]]]] = {}

    @rule(start=st.integers(0, 7), count=st.integers(1, 8), owner=st.sampled_from("ab"), ttl=st.integers(1, 5))
    def grant(self, start: int, count: int, owner: str, ttl: int) -> None:
        """A client takes a lease over chunks and two shards."""
        lease = grant(self.leases, count, start=start, owner=owner, ttl=float(ttl), now=self.now, world=2)
        held = {(place, rank) for place in range(start, min(8, start + count)) for rank in range(2)}
        self.standing[lease.id] = (owner, self.now + ttl, held)

    @precondition(lambda self: self.standing or self.lapsed)
    @rule(data=st.data(), start=st.integers(0, 8), stop=st.integers(0, 9), rank=st.sampled_from([None, 0, 1]))
    def release(self, data: st.DataObject, start: int, stop: int, rank: int | None) -> None:
        """A part of a lease is given back."""
        lease_id = data.draw(st.sampled_from([*self.standing, *self.lapsed]))
        lease = self.leases.find(lease_id, self.now) or self.leases.find_lapsed(lease_id)
        assert lease is not None
        first = CHUNKS.index(lease.chunks[0])
        gone = {(place, one) for place in range(first + start, first + stop) for one in range(2) if rank in {None, one}}
        held = self.standing[lease_id][2] if lease_id in self.standing else self.lapsed[lease_id][1]
        before = {place for place, _ in held} if lease_id in self.standing else set()
        held -= gone
        freed = self.leases.release(lease_id, start=start, stop=stop, shard=None if rank is None else Shard(2, rank, 0))
        expected = before - {place for place, _ in held}
        assert expected == {CHUNKS.index(chunk) for chunk in freed}
        assert len(expected) == len(freed)
        if not held:
            self.standing.pop(lease_id, None)
            self.lapsed.pop(lease_id, None)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        """Time passes; what is due expires."""
        self.now += seconds
        self.leases.expire(self.now)
        for lease_id, (owner, expires, held) in list(self.standing.items()):
            if expires <= self.now:
                del self.standing[lease_id]
                self.lapsed[lease_id] = (owner, held)

    @precondition(lambda self: self.lapsed)
    @rule(data=st.data())
    def retake(self, data: st.DataObject) -> None:
        """An expired lease is taken again."""
        lease_id = data.draw(st.sampled_from(sorted(self.lapsed)))
        lease = self.leases.find_lapsed(lease_id)
        assert lease is not None
        assert self.leases.retake(lease, self.now)
        owner, held = self.lapsed.pop(lease_id)
        self.standing[lease_id] = (owner, self.now + lease.ttl, held)

    @rule(owner=st.sampled_from("ab"))
    def die(self, owner: str) -> None:
        """A client is gone."""
        self.leases.drop_owner(owner)
        self.standing = {one: state for one, state in self.standing.items() if state[0] != owner}
        self.lapsed = {one: state for one, state in self.lapsed.items() if state[0] != owner}

    @invariant()
    def same(self) -> None:
        """Counts are exactly those of the sets, and both know the same leases."""
        counts = Counter(place for *_, held in self.standing.values() for place in {place for place, _ in held})
        assert [counts[place] for place in range(8)] == holders(self.leases)
        assert counts.total() == self.leases.held
        assert (len(self.standing), len(self.lapsed)) == (len(self.leases), self.leases.lapsed)

    def teardown(self) -> None:
        """When everybody is done, nothing is held."""
        for lease_id in list(self.standing):
            self.leases.release(lease_id)
        assert (0, 0) == (self.leases.held, len(self.leases))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=30)
