"""Tokens: containers and widths must not show, and nothing but ids in [0, 2**32) may pass."""

from array import array
from collections import UserList, deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keying import KeySpace, TokenError, TokenTypeError, chunk_digests, chunk_keys, pack_tokens, unpack_tokens

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
IDS = [0, 1, 2, 255, 256, 70_000, 2**31 - 1, 5]


class Indexed:
    """Not an int, but has ``__index__``."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class View(Sequence[int]):
    """A read-only view such as engines hand out."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: Any) -> Any:
        return self._ids[place]


def strided(ids: list[int]) -> np.ndarray[Any, Any]:
    """A numpy view of every second element."""
    wide = np.zeros(2 * len(ids), dtype=np.int64)
    wide[::2] = ids
    return wide[::2]


CONTAINERS = {
    "tuple": tuple(IDS),
    "array I": array("I", IDS),
    "array q": array("q", IDS),
    "array L": array("L", IDS),
    "numpy int32": np.array(IDS, dtype=np.int32),
    "numpy int64": np.array(IDS, dtype=np.int64),
    "numpy uint64": np.array(IDS, dtype=np.uint64),
    "numpy big-endian": np.array(IDS, dtype=">i8"),
    "numpy strided": strided(IDS),
    "numpy reversed view": np.array(IDS[::-1], dtype=np.uint32)[::-1],
    "torch int32": torch.tensor(IDS, dtype=torch.int32),
    "torch int64": torch.tensor(IDS, dtype=torch.int64),
    "torch strided": torch.from_numpy(strided(IDS).copy()).repeat_interleave(2)[::2],
    "numpy scalars": [np.int64(i) for i in IDS],
    "torch scalars": [torch.tensor(i) for i in IDS],
    "__index__": [Indexed(i) for i in IDS],
    "deque": deque(IDS),
    "UserList": UserList(IDS),
    "Sequence view": View(IDS),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_key_of_the_list(name: str) -> None:
    """H9: the same ids give the same keys in every container and width, and other ids do not."""
    expected = chunk_keys(SPACE, IDS)
    assert expected == chunk_keys(SPACE, CONTAINERS[name])
    assert expected != chunk_keys(SPACE, [*IDS[:-1], 6])


def test_range_gives_the_key_of_the_list() -> None:
    """A range is a container like the others."""
    assert chunk_keys(SPACE, list(range(8))) == chunk_keys(SPACE, range(8))
    assert chunk_keys(SPACE, []) == chunk_keys(SPACE, range(0))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_every_width_of_numpy_and_torch(dtype: str) -> None:
    """Integer width is no part of identity."""
    ids = [0, 1, 2, 3, 100, 101, 102, 103]
    expected = chunk_keys(SPACE, ids)
    assert expected == chunk_keys(SPACE, np.array(ids, dtype=dtype))
    assert expected == chunk_keys(SPACE, torch.tensor(ids, dtype=getattr(torch, dtype)))


BOOL_LISTS = [
    [True],
    [False],
    [1, 2, True, 4],
    [*range(2, 40), False],
    [*range(300, 400), True],
    [3] * 400 + [True],
    [1] * 400 + [False],
    [5, torch.tensor(True)],  # torch lets it through __index__
    [5, np.True_],
    [7] * 300 + [torch.tensor(False)],
]


@pytest.mark.parametrize("ids", BOOL_LISTS, ids=range(len(BOOL_LISTS)))
def test_bool_is_refused_at_any_size(ids: list[Any]) -> None:
    """S1: True is not 1, in short lists, long ones, and lists with many small ids."""
    for container in (list(ids), tuple(ids), View(ids)):
        with pytest.raises(TokenTypeError):
            chunk_keys(SPACE, container)
    assert chunk_keys(SPACE, [int(token) for token in ids]) is not None


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80), st.data())
def test_a_bool_anywhere_is_refused(ids: list[int], data: st.DataObject) -> None:
    """Whatever the other ids are, one bool is found."""
    place = data.draw(st.integers(0, len(ids)))
    with pytest.raises(TokenTypeError, match=rf"tokens\[{place}\]: got bool"):
        pack_tokens([*ids[:place], data.draw(st.booleans()), *ids[place:]])
    assert ids == list(unpack_tokens(pack_tokens(ids)))


WRONG_TYPES: list[Any] = [
    "",
    "12",
    b"",
    b"abcd",
    bytearray(4),
    memoryview(b"abcd"),
    {1: 2},
    {1, 2},
    frozenset({1}),
    iter([1]),
    (token for token in [1]),
    map(int, [1]),
    None,
    5,
    1.5,
    object(),
    [1.0],
    ["1"],
    [None],
    [b"1"],
    [[1]],
    [Fraction(1)],
    [1 + 0j],
    array("d", [1.0]),
    array("f"),
    array("u"),
    np.array([1.0]),
    np.array([], dtype=np.float32),
    np.array([True]),
    np.array([], dtype=bool),
    np.array([[1, 2]]),
    np.array(5),
    np.int64(5),
    np.array([1], dtype=object),
    np.array([1], dtype="timedelta64[s]"),
    np.ma.masked_array([1, 2], mask=[False, True]),
    torch.tensor([1.0]),
    torch.tensor([]),
    torch.tensor([True]),
    torch.tensor([[1]]),
    torch.tensor(5),
]


@pytest.mark.parametrize("tokens", WRONG_TYPES, ids=range(len(WRONG_TYPES)))
def test_what_cannot_hold_token_ids_is_refused(tokens: Any) -> None:
    """A wrong container or element is a TypeError of ours, empty or not."""
    with pytest.raises(TokenTypeError) as refused:
        chunk_keys(SPACE, tokens)
    assert isinstance(refused.value, TypeError)
    assert isinstance(refused.value, ValueError)


OUT_OF_RANGE: list[Any] = [
    [-1],
    [2**32],
    [1, 2, 2**64],
    range(-1, 3),
    range(2**32 - 1, 2**32 + 1),
    array("q", [-1]),
    array("q", [2**32]),
    np.array([-1, 4]),
    np.array([2**32]),
    np.array([2**63], dtype=np.uint64),
    torch.tensor([-5]),
    torch.tensor([2**32]),
    [np.int64(-3)],
    [Indexed(2**40)],
]


@pytest.mark.parametrize("tokens", OUT_OF_RANGE, ids=range(len(OUT_OF_RANGE)))
def test_negative_and_wide_tokens_are_refused_the_same_everywhere(tokens: Any) -> None:
    """S1: -1 and 2**32 have no key in any container; the message gives the place and never the id."""
    with pytest.raises(TokenError, match=r"tokens\[\d+\]: out of range, wanted 0 <= token < 2\*\*32") as refused:
        chunk_keys(SPACE, tokens)
    assert str(2**40) not in str(refused.value)


def test_an_index_that_raises_is_refused() -> None:
    """Code of the caller that raises gives a typed error that names the element."""

    class Broken:
        def __index__(self) -> int:
            raise RuntimeError

    with pytest.raises(TokenTypeError, match=r"tokens\[1\]: got Broken"):
        chunk_keys(SPACE, [1, Broken()])


def test_a_sequence_that_changes_while_it_is_read_is_refused() -> None:
    """An id that was out of range once and is not any more has no place to name; the request still gets no key."""

    class Settling:
        reads = 0

        def __index__(self) -> int:
            Settling.reads += 1
            return -1 if Settling.reads == 1 else 5

    with pytest.raises(TokenError, match="changed while they were read"):
        chunk_keys(SPACE, [1, Settling()])


def test_a_tensor_without_numpy_gives_the_same_key() -> None:
    """A tensor that has no numpy view (torch without numpy, a subclass) is read as a list: same keys, same refusals."""

    class Bare:
        ndim = 1
        dtype = torch.int64

        def __init__(self, ids: list[int]) -> None:
            self.ids = ids

        def detach(self) -> "Bare":
            return self

        def cpu(self) -> "Bare":
            return self

        def tolist(self) -> list[int]:
            return self.ids

    class OnlyList(Bare):
        detach = None  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            if name == "detach":
                raise AttributeError(name)
            return super().__getattribute__(name)

    for kind in (Bare, OnlyList):
        assert chunk_keys(SPACE, IDS) == chunk_keys(SPACE, kind(IDS))
        with pytest.raises(TokenError):
            chunk_keys(SPACE, kind([-1]))


def test_extreme_ids_have_distinct_keys() -> None:
    """The ends of the range are ids like others."""
    keys = {chunk_digests(SPACE, [token] * 4)[0] for token in (0, 1, 2**31, 2**32 - 1)}
    assert len(keys) == 4


def test_neighbouring_changes_that_keep_a_rolling_hash_change_every_key() -> None:
    """S4: token[j] + 31 and token[j+1] - 1 cancel out in a polynomial hash, never here."""
    ids = list(range(100, 116))
    expected = chunk_digests(SPACE, ids)
    for place in range(15):
        changed = [*ids]
        changed[place] += 31
        changed[place + 1] -= 1
        chunk = place // 4
        assert expected[:chunk] == chunk_digests(SPACE, changed)[:chunk]
        assert not set(expected[chunk:]) & set(chunk_digests(SPACE, changed)[chunk:])


def test_packed_tokens_must_be_whole() -> None:
    """Three bytes are no token."""
    with pytest.raises(TokenError, match="3 bytes"):
        unpack_tokens(b"abc")


def test_a_refusal_of_a_long_list_does_not_print_it() -> None:
    """The message of a refusal stays short however long the list."""
    with pytest.raises(TokenError) as refused:
        chunk_keys(SPACE, [*range(100_000), -7])
    assert len(str(refused.value)) < 200
