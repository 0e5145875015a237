"""Which shards of which chunks are in some tier."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from protocol_v2.places.presence import DISK, MEMORY, Presence
from protocol_v2.storage import Shard
from tests.protocol_v2.storage_samples import ALONE, OTHER_ROOT, ROOT, chain

KEYS = chain("presence", 4)

steps = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 2),
        st.integers(1, 3).flatmap(
            lambda world: st.builds(Shard, st.just(world), st.integers(0, world - 1), st.integers(0, 1))
        ),
        st.sampled_from([MEMORY, DISK]),
    ),
    max_size=60,
)


@given(steps)
def test_a_hit_is_what_a_count_of_all_shards_says(changes: list[tuple[bool, int, Shard, int]]) -> None:
    """I10: after any coming and going, leading chunks are those of which every rank of every group is somewhere."""
    presence = Presence()
    there: set[tuple[int, Shard, int]] = set()
    for comes, place, shard, tier in changes:
        if comes:
            presence.add((ROOT, KEYS[place]), shard, tier)
            there.add((place, shard, tier))
        else:
            presence.discard((ROOT, KEYS[place]), [shard], tier)
            there.discard((place, shard, tier))
    somewhere = {(place, shard) for place, shard, _ in there}
    for world, groups in itertools.product((1, 2, 3), (1, 2)):
        wanted = [Shard(world, rank, group) for rank in range(world) for group in range(groups)]
        whole = [all((place, shard) in somewhere for shard in wanted) for place in range(4)]
        assert len(list(itertools.takewhile(bool, whole))) == len(presence.leading(ROOT, KEYS, world, groups))
        for tier in (MEMORY, DISK):
            here = all((0, shard, tier) in there for shard in wanted)
            assert here == presence.all_in((ROOT, KEYS[0]), world, groups, tier)
    for place in range(3):
        assert any(place == one for one, _ in somewhere) == presence.has((ROOT, KEYS[place]))
    assert len({place for place, _ in somewhere}) == len(presence) == presence.count(None) == presence.count(ROOT)


def test_spaces_and_tiers_are_apart() -> None:
    """A shard in two tiers stays while it is in one; an equal key of another space is another chunk."""
    presence = Presence()
    chunk = (ROOT, KEYS[0])
    presence.add(chunk, ALONE, MEMORY)
    presence.add(chunk, ALONE, DISK)
    assert MEMORY | DISK == presence.where(chunk, ALONE)
    presence.discard(chunk, [ALONE], MEMORY)
    assert (DISK, 1) == (presence.where(chunk, ALONE), len(presence.leading(ROOT, KEYS, 1, 1)))
    assert [] == presence.leading(OTHER_ROOT, KEYS, 1, 1)
    assert ({ROOT}, 1) == (presence.roots(), presence.count(ROOT))
    assert (0, 0) == (presence.where((OTHER_ROOT, KEYS[0]), ALONE), presence.count(OTHER_ROOT))
    presence.discard(chunk, [ALONE], DISK)
    presence.discard(chunk, [ALONE], DISK)
    presence.discard(chunk, [ALONE], DISK)
    assert (0, 0, set()) == (presence.where(chunk, ALONE), len(presence), presence.roots())
