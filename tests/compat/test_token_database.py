"""Token databases: the places that LMCache gives, the keys of schema 2, and a refusal where there is no translation."""

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compat import ChunkedTokenDatabase, CompatError, CompatTypeError, SegmentTokenDatabase, TokenDatabaseKey
from keying import (
    CacheSalt,
    DuplicateExtraKeyError,
    ExtraKey,
    ExtraKeyError,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    PromptEmbeds,
    Tag,
    TokenError,
    TokenTypeError,
    UnsupportedExtraKeyError,
    chunk_digests,
    chunk_keys,
    segment_key,
)
from tests.interop.environment import PYTHON, needs_lmcache, peer_environment

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
CHUNKS = ChunkedTokenDatabase(SPACE)
TAILED = ChunkedTokenDatabase(SPACE, save_unfull_chunk=True)
SEPARATOR = (90, 91)
SEGMENTS = SegmentTokenDatabase(SPACE, separator=SEPARATOR)
TOKENS = list(range(100, 110))
DIGESTS = chunk_digests(SPACE, TOKENS, partial_tail=True)
SECRET = "hunter2-tenant"
IDENTITIES: list[ExtraKey] = [
    MultimodalItem("x", 5, 2),
    MultimodalItem("y", 5, 2),
    LoraAdapter("a"),
    LoraAdapter("b"),
    CacheSalt("s"),
    CacheSalt("t"),
    PromptEmbeds(5, b"\x01" * 8, 4, "float32"),
    PromptEmbeds(5, b"\x02" * 8, 4, "float32"),
    Tag("t", b"1"),
    Tag("t", b"2"),
]


def _digests(database: Any, *args: Any, **kwargs: Any) -> list[bytes]:
    return [key for _, _, key in database.process_tokens(*args, make_key=False, **kwargs)]


def _places(database: Any, *args: Any, **kwargs: Any) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop, _ in database.process_tokens(*args, **kwargs)]


def _mask(n_tokens: int, hidden: int) -> list[bool]:
    return [False] * hidden + [True] * (n_tokens - hidden)


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=30),
    st.lists(st.sampled_from(IDENTITIES), max_size=1),
    st.booleans(),
)
def test_chunks_are_those_of_key_schema_2(tokens: list[int], extra_keys: list[ExtraKey], tail: bool) -> None:
    """Places and keys are those of `chunk_keys`, with and without the tail, as keys and as digests."""
    database = ChunkedTokenDatabase(SPACE, save_unfull_chunk=tail)
    expected = chunk_keys(SPACE, tokens, extra_keys, partial_tail=tail)
    given_keys = list(database.process_tokens(tokens, extra_keys=extra_keys))
    assert [(k.start, k.stop, TokenDatabaseKey(k.digest)) for k in expected] == given_keys
    assert [k.digest for k in expected] == _digests(database, tokens, extra_keys=extra_keys)


def test_the_tail_is_keyed_only_if_it_was_asked_for() -> None:
    """Ten tokens are two chunks of four, and a third of two with `save_unfull_chunk`; off unless it is said."""
    assert [(0, 4), (4, 8)] == _places(CHUNKS, TOKENS)
    assert [(0, 4), (4, 8), (8, 10)] == _places(TAILED, TOKENS)
    assert [] == _places(TAILED, [])
    assert [] == _places(CHUNKS, TOKENS[:3])


def test_no_two_identities_share_a_key() -> None:
    """Equal extra keys give equal keys, and every other identity other ones, from the first chunk that it touches."""
    plain = _digests(TAILED, TOKENS)
    seen = {tuple(plain)}
    for extra_key in IDENTITIES:
        keyed = _digests(TAILED, TOKENS, extra_keys=[extra_key])
        assert keyed == _digests(TAILED, TOKENS, extra_keys=iter([extra_key]))
        first = 4 if isinstance(extra_key, MultimodalItem | PromptEmbeds) else 0
        assert plain[: first // 4] == keyed[: first // 4]
        assert not set(plain[first // 4 :]) & set(keyed)
        seen.add(tuple(keyed))
    assert len(IDENTITIES) + 1 == len(seen)


@pytest.mark.parametrize("hidden", [0, 4, 8])
def test_a_mask_leaves_out_a_prefix_and_changes_no_key(hidden: int) -> None:
    """What follows the prefix has the keys of the whole prompt, not those of the suffix alone."""
    whole = list(TAILED.process_tokens(TOKENS, extra_keys=[CacheSalt("s")]))
    masked = list(TAILED.process_tokens(TOKENS, mask=_mask(10, hidden), extra_keys=[CacheSalt("s")]))
    assert whole[hidden // 4 :] == masked
    if hidden:
        suffix = _digests(TAILED, TOKENS[hidden:], extra_keys=[CacheSalt("s")])
        assert suffix[0] != masked[0][2].chunk_hash  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "container", [list, tuple, np.array, lambda values: torch.tensor(values, dtype=torch.bool)], ids=str
)
def test_a_mask_in_any_container_is_one_mask(container: Callable[[list[bool]], Any]) -> None:
    """Torch as in LMCache's callers, and what a caller without torch has."""
    assert [(4, 8)] == _places(CHUNKS, torch.tensor(TOKENS), mask=container(_mask(10, 4)))


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (_mask(10, 3), CompatError),
        (_mask(10, 10), CompatError),
        (_mask(9, 4), CompatError),
        ([True] * 4 + [False] * 4 + [True] * 2, CompatError),
        ([True] * 9 + [False], CompatError),
        ([0] * 4 + [1] * 6, CompatTypeError),
        (np.array([0.0] * 4 + [1.0] * 6), CompatTypeError),
        (torch.ones((1, 10), dtype=torch.bool), CompatTypeError),
        (torch.tensor(True), CompatTypeError),
        ("FFFFTTTTTT", CompatTypeError),
        (4, CompatTypeError),
    ],
)
def test_a_mask_that_is_no_prefix_of_whole_chunks_is_refused(mask: Any, error: type[CompatError]) -> None:
    """At the call, as a ValueError, before any key is given; the right mask passes."""
    with pytest.raises(error, match="mask"):
        CHUNKS.process_tokens(TOKENS, mask=mask)
    assert [(4, 8)] == _places(CHUNKS, TOKENS, mask=_mask(10, 4))


def test_digests_are_placed_by_their_lengths() -> None:
    """The lookup of LMCache: one process derives digests and lengths, another gets the same rows back from them."""
    rows = list(TAILED.process_tokens(TOKENS, extra_keys=[LoraAdapter("a")]))
    hashes = _digests(TAILED, TOKENS, extra_keys=[LoraAdapter("a")])
    lengths = [stop - start for start, stop, _ in rows]
    assert rows == list(CHUNKS.process_tokens(hashes=hashes, offsets=lengths))
    assert hashes == _digests(CHUNKS, None, hashes, lengths)
    assert rows[1:] == list(CHUNKS.process_tokens(None, hashes, lengths, _mask(10, 4)))
    assert [] == _places(CHUNKS, hashes=[], offsets=[])
    assert rows != list(TAILED.process_tokens(hashes=_digests(TAILED, TOKENS), offsets=lengths))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({}, CompatError, "neither"),
        ({"tokens": TOKENS, "hashes": DIGESTS, "offsets": [4, 4, 2]}, CompatError, "both"),
        ({"hashes": DIGESTS}, CompatError, "without the other"),
        ({"tokens": TOKENS, "offsets": [4, 4, 2]}, CompatError, "without the other"),
        ({"hashes": DIGESTS, "offsets": [4, 4]}, CompatError, "3 and 2"),
        ({"hashes": [4965923915475442220], "offsets": [4]}, CompatTypeError, "v1 hashes"),
        ({"hashes": [b"12345678"], "offsets": [4]}, CompatError, "v1 hashes"),
        ({"hashes": iter(DIGESTS), "offsets": [4, 4, 2]}, CompatTypeError, "hashes: got"),
        ({"hashes": DIGESTS, "offsets": {4: 4}}, CompatTypeError, "offsets: got"),
        ({"hashes": DIGESTS[:1], "offsets": [True]}, CompatTypeError, "offsets"),
        ({"hashes": DIGESTS[:1], "offsets": [4.0]}, CompatTypeError, "offsets"),
        ({"hashes": DIGESTS[:1], "offsets": [0]}, CompatError, "at least one"),
        ({"hashes": DIGESTS[:1], "offsets": [5]}, CompatError, "each chunk but the last"),
        ({"hashes": DIGESTS[:2], "offsets": [2, 4]}, CompatError, "each chunk but the last"),
        ({"hashes": DIGESTS[:1], "offsets": [4], "extra_keys": [CacheSalt(SECRET)]}, CompatError, "derived"),
        ({"hashes": DIGESTS[:1], "offsets": [4], "request_configs": {"lmcache.tag.t": SECRET}}, CompatError, "derived"),
        ({"hashes": DIGESTS[:1], "offsets": [4], "mask": [True] * 3}, CompatError, "mask"),
        ({"tokens": TOKENS, "extra_keys": None}, CompatTypeError, "extra_keys"),
        ({"tokens": TOKENS, "extra_keys": CacheSalt(SECRET)}, CompatTypeError, "extra_keys"),
        ({"tokens": TOKENS, "extra_keys": [SECRET]}, UnsupportedExtraKeyError, "extra_keys"),
        ({"tokens": [-1]}, TokenError, "tokens"),
        ({"tokens": [True]}, TokenTypeError, "tokens"),
        ({"tokens": torch.zeros((2, 4), dtype=torch.long)}, TokenTypeError, "dimensions"),
        ({"tokens": TOKENS, "request_configs": [("lmcache.tag.t", SECRET)]}, CompatTypeError, "mapping"),
        ({"tokens": TOKENS, "request_configs": {1: SECRET}}, CompatTypeError, "request_configs"),
        ({"tokens": TOKENS, "request_configs": {"lmcache.tag.t": 1}}, CompatTypeError, "as text"),
        ({"tokens": TOKENS, "request_configs": {"lmcache.tag.t": True}}, CompatTypeError, "as text"),
        ({"tokens": TOKENS, "request_configs": {"lmcache.tag.t": None}}, CompatTypeError, "as text"),
        ({"tokens": TOKENS, "request_configs": {"lmcache.tag.t": b"b"}}, CompatTypeError, "as text"),
        ({"tokens": TOKENS, "request_configs": {"lmcache.tag.t": SECRET + "\ud800"}}, CompatError, "surrogate"),
        ({"tokens": TOKENS, "request_configs": {"lmcache.tag.t": SECRET * 400}}, ExtraKeyError, "4096"),
    ],
)
def test_what_has_no_translation_is_refused(arguments: dict[str, Any], error: type[ValueError], says: str) -> None:
    """At the call, as a ValueError that says what, and never shows a salt or a tag's value."""
    with pytest.raises(error, match=says) as refusal:
        CHUNKS.process_tokens(**arguments)
    assert isinstance(refusal.value, ValueError)
    assert SECRET not in str(refusal.value)


def test_tags_are_identity_and_other_configs_are_not() -> None:
    """A tag keys the prompt under its full name, in any order; any other name changes nothing, as in the release."""
    plain = _digests(CHUNKS, TOKENS)
    tagged = _digests(CHUNKS, TOKENS, request_configs={"lmcache.tag.a": "x", "lmcache.tag.b": "y"})
    expected = chunk_digests(SPACE, TOKENS, [Tag("lmcache.tag.a", b"x"), Tag("lmcache.tag.b", b"y")])
    assert expected == tagged
    assert tagged == _digests(CHUNKS, TOKENS, request_configs={"lmcache.tag.b": "y", "x": 1, "lmcache.tag.a": "x"})
    no_tags: list[dict[str, Any] | None] = [
        None,
        {},
        {"lmcache.skip_save": True, "lmcache.tag": "x", "tag.a": object()},
    ]
    for configs in no_tags:
        assert plain == _digests(CHUNKS, TOKENS, request_configs=configs)
    for other in (
        {"lmcache.tag.a": "x@b%y"},  # one to_string with the two tags in the release
        {"lmcache.tag.a": "x"},
        {"lmcache.tag.a": "y", "lmcache.tag.b": "x"},
        {"lmcache.tag.": "x"},
        {"lmcache.tag.a": ""},
    ):
        assert not {*plain, *tagged} & set(_digests(CHUNKS, TOKENS, request_configs=other))


def test_a_tag_is_not_taken_for_a_callers_own() -> None:
    """The short name stays free; the full name given twice is refused."""
    from_configs = _digests(CHUNKS, TOKENS, request_configs={"lmcache.tag.a": "x"})
    assert from_configs != _digests(CHUNKS, TOKENS, extra_keys=[Tag("a", b"x")])
    assert from_configs == _digests(CHUNKS, TOKENS, extra_keys=[Tag("lmcache.tag.a", b"x")])
    with pytest.raises(DuplicateExtraKeyError):
        CHUNKS.process_tokens(TOKENS, request_configs={"lmcache.tag.a": "x"}, extra_keys=[Tag("lmcache.tag.a", b"y")])


def test_a_key_has_the_names_that_v1_callers_read() -> None:
    """`chunk_hash` is the digest, `to_string` the printed form; equal digests are one dictionary key."""
    key = TokenDatabaseKey(DIGESTS[0])
    assert DIGESTS[0] == key.chunk_hash
    assert f"xk2:{DIGESTS[0].hex()}" == key.to_string() == str(key)
    assert f"TokenDatabaseKey({key})" == repr(key)
    assert {key: 1} == {TokenDatabaseKey(bytes(DIGESTS[0])): 1}
    assert key != TokenDatabaseKey(DIGESTS[1])
    with pytest.raises(CompatError, match="digest"):
        TokenDatabaseKey(b"short")
    with pytest.raises(CompatTypeError, match="digest"):
        TokenDatabaseKey(bytearray(32))  # type: ignore[arg-type]


@pytest.mark.parametrize("space", [None, "m", {"chunk_size": 4}])
def test_a_database_is_built_from_a_space_alone(space: Any) -> None:
    """A v1 configuration is no space."""
    for make in (ChunkedTokenDatabase, lambda given: SegmentTokenDatabase(given, separator=[1])):
        with pytest.raises(CompatTypeError, match="space"):
            make(space)


def test_settings_are_checked_and_can_be_read() -> None:
    """`chunk_size` and `sep_tokens`, as in the release; a separator of nothing would split nowhere."""
    assert 4 == CHUNKS.chunk_size
    assert (90, 91) == SegmentTokenDatabase(SPACE, separator=torch.tensor([90, 91])).sep_tokens
    with pytest.raises(CompatTypeError, match="save_unfull_chunk"):
        ChunkedTokenDatabase(SPACE, save_unfull_chunk=1)  # type: ignore[arg-type]
    with pytest.raises(CompatError, match="separator"):
        SegmentTokenDatabase(SPACE, separator=[])
    with pytest.raises(TokenError):
        SegmentTokenDatabase(SPACE, separator=[-1])


def test_segments_stand_between_separators() -> None:
    """Separators belong to none and leave no empty one, at the ends or side by side; half of one splits nothing."""
    assert [(0, 2), (4, 7)] == _places(SEGMENTS, [1, 2, *SEPARATOR, 3, 4, 5])
    assert [(2, 3), (7, 8)] == _places(SEGMENTS, [*SEPARATOR, 1, *SEPARATOR, *SEPARATOR, 2, *SEPARATOR])
    assert [(0, 4)] == _places(SEGMENTS, [1, 90, 90, 1])
    assert [(0, 2), (4, 5)] == _places(SEGMENTS, [1, 90, *SEPARATOR, 91])
    assert [(0, 1)] == _places(SEGMENTS, [90])
    assert [] == _places(SEGMENTS, SEPARATOR)
    assert [] == _places(SEGMENTS, [])


def test_separators_do_not_overlap() -> None:
    """Three sevens hold one separator of two, found from the left, and a segment of one."""
    database = SegmentTokenDatabase(SPACE, separator=[7, 7])
    assert [(2, 3)] == _places(database, [7, 7, 7])
    assert [(0, 1), (5, 6)] == _places(database, [1, 7, 7, 7, 7, 2])


def test_a_segment_has_one_key_wherever_it_stands() -> None:
    """It is `segment_key`'s; other tokens, and the same tokens as a chunk, have others."""
    first, second = (key for _, _, key in SEGMENTS.process_tokens([1, 2, *SEPARATOR, 3, 4, 5]))
    moved, other = (key for _, _, key in SEGMENTS.process_tokens([3, 4, 5, *SEPARATOR, 1, 2]))
    assert (first, second) == (other, moved)
    assert first != second
    assert TokenDatabaseKey(segment_key(SPACE, [3, 4, 5], start=4).digest) == second
    assert {first, second}.isdisjoint({key for _, _, key in TAILED.process_tokens([3, 4, 5])})


def test_a_segment_is_left_out_if_it_begins_under_the_mask() -> None:
    """Any number of False, but not all of them; the rest is as without a mask."""
    tokens = [1, 2, *SEPARATOR, 3, 4, 5]
    whole = list(SEGMENTS.process_tokens(tokens))
    assert whole == list(SEGMENTS.process_tokens(tokens, mask=_mask(7, 0)))
    for hidden in (1, 2, 4):
        assert whole[1:] == list(SEGMENTS.process_tokens(tokens, mask=_mask(7, hidden)))
    assert [] == list(SEGMENTS.process_tokens(tokens, mask=_mask(7, 5)))
    with pytest.raises(CompatError, match="mask"):
        SEGMENTS.process_tokens(tokens, mask=_mask(7, 7))
    assert [] == list(SEGMENTS.process_tokens([], mask=[]))


PICTURE = [5, 5, *SEPARATOR, 5, 5, 5]
AROUND = [1, *SEPARATOR, 2, *PICTURE, 3, *SEPARATOR, 4]
"""Text, separator, text, a picture at 4 with what reads as a separator inside it at 6, text, separator, text."""


def _cut(identifier: str, offset: int = 4) -> list[TokenDatabaseKey | bytes]:
    item = MultimodalItem(identifier, offset, len(PICTURE))
    return [key for _, _, key in SEGMENTS.process_tokens(AROUND, extra_keys=[item])]


def test_segments_that_cut_through_a_picture_carry_it() -> None:
    """Both halves differ with the picture and agree when it is equal; segments of text alone never change."""
    assert [(0, 1), (3, 6), (8, 12), (14, 15)] == _places(SEGMENTS, AROUND)
    plain = [key for _, _, key in SEGMENTS.process_tokens(AROUND)]
    x, y = _cut("x"), _cut("y")
    assert x == _cut("x")
    assert plain[0] == x[0] == y[0]
    assert plain[3] == x[3] == y[3]
    for half in (1, 2):
        assert 3 == len({plain[half], x[half], y[half]})
    assert x[2] != _cut("x", offset=5)[2]


def test_a_half_picture_is_found_again_at_another_place() -> None:
    """The same halves after more text have the same keys, and where the picture began elsewhere they have not."""
    moved = [8, 9, *AROUND]
    item = MultimodalItem("x", 6, len(PICTURE))
    keys = [key for _, _, key in SEGMENTS.process_tokens(moved, extra_keys=[item])]
    assert _cut("x")[1:] == keys[1:]
    began_earlier = [MultimodalItem("x", 5, len(PICTURE))]
    assert _cut("x")[2] != next(
        key for start, _, key in SEGMENTS.process_tokens(moved, extra_keys=began_earlier) if start == 10
    )


def test_segments_of_two_pictures_take_one_each() -> None:
    """Swapping the pictures swaps no key by chance, and a salt reaches every segment."""
    tokens = [5, 5, *SEPARATOR, 5, 5]

    def keys(*extra_keys: ExtraKey) -> list[TokenDatabaseKey | bytes]:
        return [key for _, _, key in SEGMENTS.process_tokens(tokens, extra_keys=iter(extra_keys))]

    one, two = keys(MultimodalItem("x", 0, 2), MultimodalItem("y", 4, 2))
    assert [two, one] == keys(MultimodalItem("y", 0, 2), MultimodalItem("x", 4, 2))
    assert one != two
    salted = keys(MultimodalItem("x", 0, 2), MultimodalItem("y", 4, 2), CacheSalt("s"))
    assert 4 == len({one, two, *salted})
    tagged = [key for _, _, key in SEGMENTS.process_tokens(tokens, request_configs={"lmcache.tag.a": "x"})]
    assert tagged == keys(Tag("lmcache.tag.a", b"x"))
    assert tagged != keys()


def test_segments_are_not_placed_by_lengths() -> None:
    """Separators are dropped, so lengths do not give a start, which decides whether a value may be used."""
    tokens = [1, 2, *SEPARATOR, 3, 4, 5]
    hashes = _digests(SEGMENTS, tokens)
    with pytest.raises(CompatError, match="where segments stand"):
        SEGMENTS.process_tokens(hashes=hashes, offsets=[2, 3])
    assert hashes == _digests(SEGMENTS, tokens)


PEER = Path(__file__).parent / "peer" / "lmcache_token_databases.py"


def _calls() -> dict[str, Any]:
    rng = random.Random(4)
    chunks = []
    for _ in range(100):
        n_tokens = rng.randint(1, 40)
        chunks.append([rng.random() < 0.5, n_tokens, rng.randint(0, n_tokens // 4) * 4])
    segments = []
    for _ in range(200):
        separator = rng.choice([[0], [0, 1], [0, 0, 1], [2, 1, 0]])
        tokens = [rng.randrange(3) for _ in range(rng.randint(len(separator), 30))]
        segments.append([separator, tokens, rng.choice([0, rng.randrange(len(tokens))])])
    return {"chunk_size": 4, "chunks": chunks, "segments": [*segments, [[7, 7], [1, 7, 7, 7], 0]]}


@pytest.fixture(scope="module")
def release() -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls, and where LMCache 0.5.6 put the boundaries."""
    calls = _calls()
    done = subprocess.run(
        [PYTHON, PEER],
        input=json.dumps(calls),
        env=peer_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return calls, json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.interop
@needs_lmcache
def test_chunks_stand_where_the_release_puts_them(release: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """With tails, masks and precomputed hashes, on the same calls."""
    calls, answer = release
    for (tail, n_tokens, hidden), bounds, placed in zip(
        calls["chunks"], answer["chunks"], answer["placed"], strict=True
    ):
        database = ChunkedTokenDatabase(SPACE, save_unfull_chunk=tail)
        assert [tuple(row) for row in bounds] == _places(database, range(n_tokens), mask=_mask(n_tokens, hidden))
        hashes = _digests(database, range(n_tokens))
        lengths = [stop - start for start, stop in _places(database, range(n_tokens))]
        assert [tuple(row) for row in placed] == _places(database, hashes=hashes, offsets=lengths)


@pytest.mark.interop
@needs_lmcache
def test_segments_stand_where_the_release_puts_them(release: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """But for empty ones, which its callers skip, and for overlapping separators, where its places pass the end."""
    calls, answer = release
    found = empty = 0
    *rows, overlapping = zip(calls["segments"], answer["segments"], strict=True)
    for (separator, tokens, hidden), bounds in rows:
        database = SegmentTokenDatabase(SPACE, separator=separator)
        expected = [(start, end) for start, end in bounds if start < end]
        assert expected == _places(database, tokens, mask=_mask(len(tokens), hidden))
        found += len(expected)
        empty += len(bounds) - len(expected)
    assert found > 200
    assert empty > 50
    (_, tokens, _), bounds = overlapping
    assert bounds[-1][0] > len(tokens)
    assert [(0, 1), (3, 4)] == _places(SegmentTokenDatabase(SPACE, separator=[7, 7]), tokens)
