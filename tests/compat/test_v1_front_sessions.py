"""The two tables of the v1 front: bounded, and never mixing identities."""

from hypothesis import given, settings
from hypothesis import strategies as st

from compat.v1.front_sessions import LookupTable, V1Lookup, V1Worker, WorkerTable
from compat.v1.operations import V1Registration

ROOT, OTHER_ROOT = b"r" * 32, b"o" * 32
KEYS = tuple(bytes([place]) * 32 for place in range(4))


def lookup(peer: bytes = b"p", request_id: str = "r", *, keys: tuple[bytes, ...] = KEYS, **fields: int) -> V1Lookup:
    """A lookup that hit all of `keys`."""
    named = {"world": 1, "readers": 1, "result": len(keys), "last": 0} | fields
    return V1Lookup(peer, request_id, ROOT, keys=keys, lease=b"l" * 16, **named)


def registration(
    instance_id: int, *, dtype: str = "float16", mla: bool = False, slots: int | None = None
) -> V1Registration:
    """Of one worker of a world of one."""
    return V1Registration(instance_id, "m", 1, 16, 3, 8, dtype, mla, slots)


def test_a_lookup_covers_the_start_of_its_chain_alone() -> None:
    """Any leading part of what was hit; not another chain, another root, more than was hit, or nothing."""
    one = lookup()
    assert [True] * 4 == [one.covers(ROOT, KEYS[:stop]) for stop in range(1, 5)]
    assert not one.covers(ROOT, ())
    assert not one.covers(OTHER_ROOT, KEYS)
    assert not one.covers(ROOT, (*KEYS, b"x" * 32))
    assert not one.covers(ROOT, (*KEYS[:3], b"x" * 32))


def test_a_lookup_is_found_by_its_own_socket_and_by_identity() -> None:
    """Two sockets, one id: each finds its own; a worker finds whichever covers its chunks."""
    table = LookupTable()
    mine, theirs = lookup(b"mine"), lookup(b"theirs", keys=(b"x" * 32,))
    assert table.put(mine) == []
    assert table.put(theirs) == []
    assert table.find(b"mine", "r", 1) is mine
    assert table.find(b"theirs", "r", 1) is theirs
    assert table.find(b"nobody", "r", 1) is None
    assert table.find_covering("r", ROOT, KEYS[:2], 1) is mine
    assert table.find_covering("r", ROOT, [b"x" * 32], 1) is theirs
    assert table.find_covering("other", ROOT, KEYS, 1) is None
    assert table.pop(b"mine", "r") is mine
    assert table.pop(b"mine", "r") is None
    assert table.find_covering("r", ROOT, KEYS, 1) is None
    assert len(table) == 1


def test_the_least_lately_used_goes_when_there_is_no_room() -> None:
    """In number, and in hashes together; one that is larger than the bound stays alone."""
    table = LookupTable(max_lookups=2, max_keys=6)
    first, second, third = (
        lookup(request_id="1", keys=KEYS[:2]),
        lookup(request_id="2", keys=KEYS[:2]),
        lookup(request_id="3", keys=KEYS[:2]),
    )
    table.put(first)
    table.put(second)
    table.find(b"p", "1", 1)
    assert [second] == table.put(third)
    large = lookup(request_id="large", keys=tuple(bytes([n]) * 32 for n in range(9)))
    assert [first, third] == table.put(large)
    assert [large] == list(table)


def test_lookups_expire_by_their_last_use_and_are_all_cleared() -> None:
    """Ten seconds here; one that was used meanwhile stays."""
    table = LookupTable(ttl=10)
    used, idle = lookup(request_id="used"), lookup(request_id="idle")
    table.put(used)
    table.put(idle)
    table.find(b"p", "used", 5)
    assert table.expire(9.9) == []
    assert [idle] == table.expire(10)
    assert [used] == table.clear()
    assert len(table) == 0


@settings(max_examples=100)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 4)), max_size=12),
)
def test_a_chunk_is_given_back_when_its_readers_have_it_and_not_before(
    readers: int, reads: list[tuple[int, int, int]]
) -> None:
    """Against a plain count, for every order of ranges and ranks; what is given back again is harmless."""
    one = lookup(readers=readers, world=2)
    counts: dict[tuple[int, int], int] = {}
    freed = set()
    for rank, start, length in reads:
        stop = min(start + length, 4)
        for place in range(start, stop):
            counts[rank, place] = counts.get((rank, place), 0) + 1
        for first, last in one.count_read(rank, start, stop):
            freed |= {(rank, place) for place in range(first, last)}
        assert freed == {chunk for chunk, count in counts.items() if count >= readers}


def test_nothing_is_given_back_early_where_readers_are_not_said() -> None:
    """0 readers: a client before 0.5.5."""
    assert lookup(readers=0).count_read(0, 0, 4) == []


def test_a_workers_layout_is_what_the_release_makes_of_a_registration() -> None:
    """Keys and values apart or one latent; as many slots as it says, else one a token."""
    table = WorkerTable(chunk_size=16)
    assert table.register(registration(1), 0).layout.shape == (2, 3, 16, 8)
    assert table.register(registration(2, mla=True), 0).layout.shape == (3, 16, 8)
    assert table.register(registration(3, slots=4), 0).layout.shape == (2, 3, 4, 8)
    assert table.register(registration(3), 0).layout.nbytes == 2 * 3 * 16 * 8 * 2


def test_workers_are_bounded_and_the_one_silent_longest_goes() -> None:
    """A sign of life keeps a worker; registering again replaces."""
    table = WorkerTable(16, max_workers=2)
    table.register(registration(1), 0)
    table.register(registration(2), 0)
    assert isinstance(table.find(1, 1), V1Worker)
    table.register(registration(3), 2)
    assert [True, False, True] == [table.find(instance, 3) is not None for instance in (1, 2, 3)]
    table.register(registration(3, dtype="bfloat16"), 4)
    assert len(table) == 2
    assert {"float16", "bfloat16"} == set(table.dtypes("m", 1))
    table.unregister(1)
    assert ["bfloat16"] == table.dtypes("m", 1)
    table.unregister(3)
    table.unregister(3)
    assert table.dtypes("m", 1) == []


def test_workers_expire_sooner_once_they_have_pinged() -> None:
    """120 seconds, against an hour."""
    table = WorkerTable(16)
    table.register(registration(1), 0)
    table.register(registration(2), 0)
    assert table.ping(2, 0)
    assert table.expire(119) == []
    assert [2] == table.expire(120)
    assert table.expire(3599) == []
    assert [1] == table.expire(3600)


def test_every_other_ping_of_an_unknown_worker_is_answered_as_if_there_were_an_outage() -> None:
    """So that its engine registers anew; then it is known. How many strangers are remembered is bounded."""
    table = WorkerTable(16, max_workers=2)
    table.register(registration(1), 0)
    assert [True, True] == [table.ping(1, 0) for _ in range(2)]
    assert [False, True, False, True] == [table.ping(7, 0) for _ in range(4)]
    assert not table.ping(7, 0)
    table.register(registration(7), 0)
    assert [True, True] == [table.ping(7, 0) for _ in range(2)]
    assert [False] * 3 == [table.ping(stranger, 0) for stranger in (21, 22, 23)]
    assert [False, True, True] == [table.ping(stranger, 0) for stranger in (21, 23, 21)]  # 21 had been forgotten
