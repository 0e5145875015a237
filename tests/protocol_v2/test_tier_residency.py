"""Which chunks a tier has, and which goes first (docs/spec/storage-2.md, "Eviction")."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol_v2.storage import ObjectId, Shard, TensorSpec
from protocol_v2.storage.objects import NO_PARENT, Envelope
from protocol_v2.tiers import Residency, TierFullError
from tests.protocol_v2.storage_samples import ALONE, CHUNK, OTHER_ROOT, ROOT, chain, make_loose, make_object

if TYPE_CHECKING:
    from protocol_v2.storage.names import ChunkId

KEYS = chain("a", 6)
OTHER = chain("b", 6)


def fresh(budget: int, held: set[ChunkId] | None = None, *, track_uses: bool = False) -> Residency[str]:
    """A residency whose protected chunks are those of `held`."""
    held = set() if held is None else held
    return Residency(budget, held.__contains__, track_uses=track_uses)


def add(residency: Residency[str], keys: list[bytes], *places: int, size: int = 1) -> None:
    """Add chunks of a chain, evicting as needed."""
    for place in places:
        envelope = make_object(keys, place).envelope
        residency.make_room(size, keep=envelope.chain)
        residency.add(envelope, f"{place}", size)


def ids(keys: list[bytes], *places: int) -> list[ChunkId]:
    """Chunk ids of a chain."""
    return [(ROOT, keys[place]) for place in places]


def here(residency: Residency[str], keys: list[bytes]) -> list[int]:
    """Places of a chain that are resident."""
    return [place for place in range(len(keys)) if residency.find((ROOT, keys[place])) is not None]


def test_least_recently_used_goes_first() -> None:
    """Of unrelated chunks, the one used longest ago makes room; a use saves it."""
    residency = fresh(3)
    for key in OTHER[:3]:
        residency.add(make_loose(key).envelope, "", 1)
    residency.touch([(ROOT, OTHER[0])])
    assert [(ROOT, OTHER[1])] == [one.id for one in residency.make_room(1)]
    assert [(ROOT, OTHER[2]), (ROOT, OTHER[0])] == [one.id for one in residency.make_room(3)]
    assert (0, 0, 3) == (len(residency), residency.used, residency.evicted)


def test_suffix_goes_before_prefix_in_the_order_of_storing() -> None:
    """J10: chunks stored first to last and never looked up leave last to first."""
    residency = fresh(6)
    add(residency, KEYS, *range(6))
    assert ids(KEYS, 5, 4, 3, 2, 1, 0) == [one.id for one in residency.make_room(6)]


def test_suffix_goes_before_prefix_under_repeated_hits() -> None:
    """J10: hits of B by way of A keep A; under pressure B goes before A."""
    residency = fresh(4)
    add(residency, KEYS, 0, 1)
    for _ in range(5):
        residency.touch(ids(KEYS, 0, 1))
    add(residency, OTHER, 0, 1)
    residency.touch(ids(KEYS, 0, 1))
    residency.touch(ids(OTHER, 0))
    assert ids(OTHER, 1) + ids(KEYS, 1, 0) + ids(OTHER, 0) == [one.id for one in residency.make_room(4)]


def test_a_prefix_outlives_a_suffix_that_was_used_later() -> None:
    """A chunk with something below it stays even where it was used longest ago itself."""
    residency = fresh(2)
    add(residency, KEYS, 0, 1)
    residency.touch(ids(KEYS, 1))
    assert ids(KEYS, 1) == [one.id for one in residency.make_room(1)]
    assert ids(KEYS, 0) == [one.id for one in residency.make_room(2)]


def test_order_of_arrival_does_not_matter_for_the_chain() -> None:
    """A suffix that is there before its prefix hangs below it all the same."""
    residency = fresh(3)
    add(residency, KEYS, 2, 1, 0)
    assert ids(KEYS, 2, 1, 0) == [one.id for one in residency.make_room(3)]


def test_leased_chunks_stay_and_go_after_the_offer() -> None:
    """Eviction never takes what is protected; once it is offered, it goes in its turn."""
    held = set(ids(KEYS, 0, 1))
    residency = fresh(3, held)
    add(residency, KEYS, 0, 1)
    add(residency, OTHER, 0)
    assert ids(OTHER, 0) == [one.id for one in residency.make_room(1)]
    with pytest.raises(TierFullError, match="wanted 2 bytes of 3; what must stay takes 2"):
        residency.make_room(2)
    assert [0, 1] == here(residency, KEYS)
    held.clear()
    residency.offer(ids(KEYS, 0, 1))
    assert ids(KEYS, 1, 0) == [one.id for one in residency.make_room(3)]


def test_a_prefix_of_a_leased_suffix_stays() -> None:
    """A chunk with a leased one below it stays, though nobody leases it itself."""
    held = set(ids(KEYS, 1))
    residency = fresh(2, held)
    add(residency, KEYS, 0, 1)
    with pytest.raises(TierFullError):
        residency.make_room(1)
    held.clear()
    residency.offer(ids(KEYS, 1))
    assert ids(KEYS, 1, 0) == [one.id for one in residency.make_room(2)]


def test_room_is_made_whole_or_not_at_all() -> None:
    """Where the room cannot be made, nothing has gone, and the order is as before."""
    held = set(ids(OTHER, 0))
    residency = fresh(4, held)
    add(residency, OTHER, 0)
    add(residency, KEYS, 0, 1, 2)
    with pytest.raises(TierFullError):
        residency.make_room(4)
    with pytest.raises(TierFullError):
        residency.make_room(5)
    assert ([0, 1, 2], 4, 0) == (here(residency, KEYS), residency.used, residency.evicted)
    assert ids(KEYS, 2, 1, 0) == [one.id for one in residency.make_room(3)]


def test_the_chunk_that_room_is_for_stays() -> None:
    """A chunk does not push out its own shards, and goes in its turn later."""
    residency = fresh(2)
    for rank in range(2):
        envelope = make_object(KEYS, 0, shard=Shard(2, rank, 0)).envelope
        residency.make_room(1, keep=[envelope.id.chunk])
        residency.add(envelope, "", 1)
    with pytest.raises(TierFullError):
        residency.make_room(1, keep=ids(KEYS, 0))
    assert ids(KEYS, 0) == [one.id for one in residency.make_room(1)]


def test_shards_come_and_go_and_are_charged() -> None:
    """Each shard is charged once, a replacement by its difference; the last one takes the chunk with it."""
    residency = fresh(100)
    for rank, size in ((0, 10), (1, 20), (1, 25)):
        residency.add(make_object(KEYS, 0, shard=Shard(2, rank, 0)).envelope, f"{rank}/{size}", size)
    chunk = (ROOT, KEYS[0])
    assert (35, 2, 1) == (residency.used, residency.objects, len(residency))
    assert "1/25" == residency.value(chunk, Shard(2, 1, 0))
    assert residency.value(chunk, ALONE) is None
    assert residency.remove_shard(chunk, Shard(2, 0, 0))
    assert not residency.remove_shard(chunk, Shard(2, 0, 0))
    assert (25, 1, 1) == (residency.used, residency.objects, len(residency))
    assert residency.remove_shard(chunk, Shard(2, 1, 0))
    assert (0, 0, 0) == (residency.used, residency.objects, len(residency))
    assert residency.remove(chunk) is None


def test_reservations_count() -> None:
    """What is on its way takes room already, and gives it back."""
    residency = fresh(10)
    residency.reserve(8)
    with pytest.raises(TierFullError):
        residency.make_room(3)
    residency.reserve(-8)
    assert [] == residency.make_room(10)


def test_uses_are_told_once_and_in_order() -> None:
    """The uses since the last call, least recent first; of what left meanwhile, nothing."""
    residency = fresh(10, track_uses=True)
    add(residency, KEYS, 0, 1, 2)
    residency.touch(ids(KEYS, 0, 1, 2))
    residency.touch(ids(OTHER, 0))
    residency.touch(ids(KEYS, 0))
    residency.remove((ROOT, KEYS[2]))
    assert ids(KEYS, 1, 0) == [one.id for one in residency.take_touched()]
    assert [] == residency.take_touched()


def test_lying_parents_make_no_circle() -> None:
    """Chunks that claim each other, or themselves, as parents can all be evicted."""
    residency = fresh(100)
    for key, parent, start in [
        (KEYS[0], KEYS[1], 0),
        (KEYS[1], KEYS[0], 0),
        (KEYS[2], KEYS[2], 0),
        (KEYS[3], KEYS[4], CHUNK),
        (KEYS[4], KEYS[3], 0),
        (KEYS[5], KEYS[5], CHUNK),
    ]:
        envelope = Envelope(ObjectId(ROOT, key, ALONE), start, CHUNK, (TensorSpec("uint8", (1,), 1),), parent)
        residency.add(envelope, "", 1)
    assert 6 == len(residency.make_room(100))


def test_chunks_of_other_spaces_are_no_parents() -> None:
    """A chunk hangs below a key of its own space only."""
    residency = fresh(2)
    residency.add(make_object(KEYS, 0, root=OTHER_ROOT).envelope, "", 1)
    residency.add(make_object(KEYS, 1).envelope, "", 1)
    assert [(OTHER_ROOT, KEYS[0]), (ROOT, KEYS[1])] == [one.id for one in residency.make_room(2)]


def test_ghosts_cost_nothing() -> None:
    """Using, offering or removing what is not there changes nothing, and making room ends."""
    residency = fresh(2, track_uses=True)
    for _ in range(100):
        residency.touch(ids(OTHER, 0, 1))
        residency.offer(ids(OTHER, 0, 1))
    add(residency, KEYS, 0, 1)
    add(residency, OTHER, 0)
    assert ([0], 2) == (here(residency, KEYS), residency.used)
    assert [] == residency.take_touched()


def test_internal_tables_stay_small() -> None:
    """R: whatever comes and goes, the candidates' heap is bounded by what is there."""
    residency = fresh(8)
    for turn in range(3000):
        key = hashlib.sha256(str(turn % 40).encode()).digest()
        residency.add(make_loose(key).envelope, "", 1)
        residency.touch([(ROOT, key)])
        if turn % 3:
            residency.remove((ROOT, key))
        residency.make_room(0)
    assert len(residency._heap) <= 2 * 8 + 65
    assert {} == residency._children
    roomy = fresh(1000)
    for _ in range(1000):
        add(roomy, KEYS, 0)
        roomy.remove((ROOT, KEYS[0]))
    assert len(roomy._heap) <= 70


class Model(RuleBasedStateMachine):
    """Residency against a list in order of use, with leases and two chains that share a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[ChunkId] = set()
        self.residency = fresh(6, self.held)
        prompt = chain("shared", 3)
        self.chains = [prompt + chain("x", 3, prompt[-1]), prompt + chain("y", 3, prompt[-1])]
        self.order: list[ChunkId] = []  # least recent first
        self.parents = {(ROOT, keys[at]): (ROOT, keys[at - 1]) for keys in self.chains for at in range(1, 6)}

    def evictable(self) -> list[ChunkId]:
        """What may go, least recently used first."""
        parents = {self.parents.get(one) for one in self.order}
        return [one for one in self.order if one not in self.held and one not in parents]

    @rule(which=st.integers(0, 1), place=st.integers(0, 5), parent_known=st.booleans())
    def store(self, which: int, place: int, parent_known: bool) -> None:
        """A chunk comes, and pushes out what the model says, in its order."""
        keys = self.chains[which]
        chunk = (ROOT, keys[place])
        if chunk in self.order:
            return
        expected, before, missing = [], list(self.order), len(self.order) + 1 - 6
        while missing > 0 and (free := self.evictable()):
            expected.append(free[0])
            self.order.remove(free[0])
            missing -= 1
        obj = make_object(keys, place, parent=None if parent_known else NO_PARENT)
        if missing > 0:
            self.order = before
            with pytest.raises(TierFullError):
                self.residency.make_room(1)
            return
        assert expected == [one.id for one in self.residency.make_room(1)]
        self.residency.add(obj.envelope, "", 1)
        self.order.append(chunk)
        if not parent_known:
            self.parents = {child: parent for child, parent in self.parents.items() if child != chunk}
        elif place:
            self.parents[chunk] = (ROOT, keys[place - 1])

    @rule(which=st.integers(0, 1), length=st.integers(1, 6))
    def use(self, which: int, length: int) -> None:
        """A prefix is used, first chunk last."""
        chunks = [(ROOT, key) for key in self.chains[which][:length]]
        self.residency.touch(chunks)
        for chunk in reversed(chunks):
            if chunk in self.order:
                self.order.remove(chunk)
                self.order.append(chunk)

    @rule(which=st.integers(0, 1), place=st.integers(0, 5))
    def lease(self, which: int, place: int) -> None:
        """A chunk is leased."""
        self.held.add((ROOT, self.chains[which][place]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A chunk is not leased any more."""
        chunk = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(chunk)
        self.residency.offer([chunk])

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A chunk leaves by another way."""
        chunk = data.draw(st.sampled_from(self.order))
        self.order.remove(chunk)
        assert self.residency.remove(chunk) is not None

    @invariant()
    def same(self) -> None:
        """Both have the same chunks and bytes."""
        assert sorted(self.order) == sorted(one.id for one in self.residency)
        assert len(self.order) == self.residency.used == self.residency.objects


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40)


def test_a_suffix_never_pushes_out_its_own_prefix() -> None:
    """J10: a prompt that is longer than the budget keeps its beginning; what follows finds no room."""
    residency = fresh(3)
    add(residency, KEYS, 0, 1, 2)
    with pytest.raises(TierFullError):
        add(residency, KEYS, 3)
    assert [0, 1, 2] == here(residency, KEYS)
    add(residency, OTHER, 0)
    assert ([0, 1], [0]) == (here(residency, KEYS), here(residency, OTHER))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_budget_is_never_passed(places: list[tuple[bool, int]]) -> None:
    """After any sequence of additions, taken or refused, the charge is within the budget."""
    residency = fresh(3)
    for first, place in places:
        with contextlib.suppress(TierFullError):
            add(residency, KEYS if first else OTHER, place)
        assert residency.used <= 3
