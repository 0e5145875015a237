"""Whole-prompt keys: identity is complete, and nothing but identity shows."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keying import (
    CacheSalt,
    ExtraKey,
    KeyingError,
    KeyingTypeError,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    PromptEmbeds,
    Tag,
    chunk_digests,
    chunk_keys,
    decode_part,
    segment_key,
    segment_keys,
)
from keying.parts import PartsIndex
from tests.keying.strategies import extra_key_lists, spaces, token_lists

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
PROMPT = [1, 2, 9, 9, 9, 9, 9, 9, 3, 4, 5, 6]


def keys(extra_keys: list[ExtraKey], tokens: list[int] = PROMPT) -> list[bytes]:
    """Digests under the small space."""
    return chunk_digests(SPACE, tokens, extra_keys)


def test_pictures_part_at_the_chunk_they_touch_and_share_what_is_before() -> None:
    """A1: other item, other keys from its first chunk on; the same item, the same keys; text before it is shared."""
    tokens = [1, 2, 3, 4, *PROMPT]
    x = keys([MultimodalItem("X", 6, 6)], tokens)
    y = keys([MultimodalItem("Y", 6, 6)], tokens)
    assert x == keys([MultimodalItem("X", 6, 6)], tokens)
    assert x[:1] == y[:1] == keys([], tokens)[:1]
    assert not set(x[1:]) & set(y[1:])
    assert not set(x[1:]) & set(keys([], tokens)[1:])


def test_one_picture_at_each_place_among_equal_placeholders() -> None:
    """D1: the place of an item shows although the tokens are all alike."""
    places = [tuple(keys([MultimodalItem("X", offset, 4)], [9] * 8)) for offset in range(5)]
    assert len(set(places)) == 5


def test_the_length_of_an_item_shows() -> None:
    """A8, B15: the same picture with another number of placeholder tokens has other keys."""
    assert keys([MultimodalItem("X", 2, 6)])[0] != keys([MultimodalItem("X", 2, 2)])[0]


def test_order_of_items_shows_and_order_of_arguments_does_not() -> None:
    """B12: [A, B] and [B, A] in the prompt differ; the order in which they are listed does not."""
    ab: list[ExtraKey] = [MultimodalItem("A", 2, 2), MultimodalItem("B", 4, 2)]
    ba: list[ExtraKey] = [MultimodalItem("B", 2, 2), MultimodalItem("A", 4, 2)]
    assert keys(ab) == keys(ab[::-1])
    assert keys(ab)[0] != keys(ba)[0]


def test_adapters_base_and_revisions_are_disjoint() -> None:
    """E1, E3, E4, E11: no adapter, a, b, a reloaded, a scaled, a and b: no key in common; a again: all in common."""
    sets = [
        keys([]),
        keys([LoraAdapter("a", "sha256:1")]),
        keys([LoraAdapter("b", "sha256:1")]),
        keys([LoraAdapter("a", "sha256:2")]),
        keys([LoraAdapter("a", "sha256:1;scale=3f000000")]),
        keys([LoraAdapter("a", "sha256:1"), LoraAdapter("b", "sha256:1")]),
    ]
    assert len({key for one in sets for key in one}) == sum(map(len, sets))
    assert sets[1] == keys([LoraAdapter("a", "sha256:1")])
    assert sets[5] == keys([LoraAdapter("b", "sha256:1"), LoraAdapter("a", "sha256:1")])


def test_an_activated_adapter_shares_the_chunks_before_it() -> None:
    """An adapter that starts later in the prompt leaves the chunks before it to everybody."""
    base, late, early = keys([]), keys([LoraAdapter("a", "", 6)]), keys([LoraAdapter("a")])
    assert base[:1] == late[:1]
    assert not set(base[1:]) & set(late[1:])
    assert not set(late) & set(early)
    assert keys([LoraAdapter("a", "", 5)])[1] != late[1]


def test_an_adapter_implied_by_media_applies_to_the_requests_that_have_them() -> None:
    """Phi-4-multimodal style: vision and speech adapters come with their media, text-only requests share the base."""
    picture: list[ExtraKey] = [MultimodalItem("X", 2, 6), LoraAdapter("vision", "sha256:v")]
    sound: list[ExtraKey] = [MultimodalItem("X", 2, 6), LoraAdapter("speech", "sha256:s")]
    assert not set(keys(picture)) & set(keys(sound))
    assert not set(keys(picture)) & set(keys([]))
    assert keys(picture) == keys(picture[::-1])


def test_salts_are_disjoint_and_equal_salts_share() -> None:
    """F1, F11: the same salt hits AND another salt, or none, does not."""
    assert keys([CacheSalt("a")]) == keys([CacheSalt("a")])
    assert not set(keys([CacheSalt("a")])) & set(keys([CacheSalt("b")]))
    assert not set(keys([CacheSalt("a")])) & set(keys([]))
    assert not set(keys([CacheSalt("\u00e9")])) & set(keys([CacheSalt("e\u0301")]))


def test_one_name_in_every_role_gives_distinct_keys() -> None:
    """G1: adapter X, salt X, item X, tag X and embeddings of the bytes of X are five different things."""
    roles: list[list[ExtraKey]] = [
        [],
        [LoraAdapter("X")],
        [CacheSalt("X")],
        [MultimodalItem("X", 0, 4)],
        [Tag("X", b"")],
        [Tag("t", b"X")],
        [PromptEmbeds(0, b"X", 1, "uint8")],
        [LoraAdapter("X"), CacheSalt("X")],
    ]
    firsts = [keys(role)[0] for role in roles]
    assert len(set(firsts)) == len(roles)


def test_which_positions_are_embeddings_shows() -> None:
    """K1: equal ids and rows but another mask of positions have other keys; no embeddings are no extra key."""
    ids = [0, 0, 0, 0]
    left: list[ExtraKey] = [PromptEmbeds(1, b"r", 1, "u"), PromptEmbeds(3, b"s", 1, "u")]
    right: list[ExtraKey] = [PromptEmbeds(0, b"r", 1, "u"), PromptEmbeds(2, b"s", 1, "u")]
    assert keys(left, ids) != keys(right, ids)
    assert keys(left, ids) == keys(left[::-1], ids)
    assert keys([], ids) == keys([PromptEmbeds(1, b"", 1, "u")], ids)


def test_embeddings_count_by_their_bytes() -> None:
    """K3, K4: equal rows hit; -0.0 and 0.0 differ, as they do in memory; dtype and row size show."""
    rows = b"\0\0\0\0"
    minus_zero = b"\0\0\0\x80"
    assert keys([PromptEmbeds(0, rows, 4, "float32")]) == keys([PromptEmbeds(0, rows, 4, "float32")])
    distinct = {
        tuple(keys([embeds]))
        for embeds in (
            PromptEmbeds(0, rows, 4, "float32"),
            PromptEmbeds(0, minus_zero, 4, "float32"),
            PromptEmbeds(0, rows, 2, "float32"),
            PromptEmbeds(0, rows, 4, "int32"),
        )
    }
    assert len(distinct) == 4


@given(st.integers(0, 9), st.binary(min_size=1, max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_embeddings_split_anywhere_are_the_same_rows(offset: int, rows: bytes, cuts: list[int]) -> None:
    """Ranges that touch, of one dtype and row size, are one range; of two dtypes they are two."""
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    pieces: list[ExtraKey] = [
        PromptEmbeds(offset + low, rows[low:high], 1, "u") for low, high in pairwise(edges) if low < high
    ]
    whole = keys([PromptEmbeds(offset, rows, 1, "u")], [0] * 24)
    assert whole == keys(pieces, [0] * 24)
    if len(pieces) > 1:
        first = pieces[0]
        assert isinstance(first, PromptEmbeds)
        other = [PromptEmbeds(first.offset, first.rows, 1, "other"), *pieces[1:]]
        assert whole != keys(other, [0] * 24)


def test_ranges_beyond_the_prompt_do_not_show() -> None:
    """An item after the tokens changes nothing; one that reaches past the end shows with its whole length."""
    assert keys([]) == keys([MultimodalItem("X", 12, 4), LoraAdapter("a", "", 12), Tag("t", b"", 99)])
    assert keys([MultimodalItem("X", 8, 4)]) != keys([MultimodalItem("X", 8, 400)])


def test_only_full_chunks_are_keyed_unless_the_tail_is_asked_for() -> None:
    """J1: a partial tail has no key by default; with one, it differs from the chunk that it grows into."""
    assert len(chunk_keys(SPACE, PROMPT[:11])) == 2
    tail = chunk_keys(SPACE, PROMPT[:11], partial_tail=True)
    assert [(key.start, key.stop) for key in tail] == [(0, 4), (4, 8), (8, 11)]
    assert tail[:2] == chunk_keys(SPACE, PROMPT)[:2]
    assert tail[2].digest != chunk_keys(SPACE, PROMPT)[2].digest
    assert chunk_keys(SPACE, [], [CacheSalt("s")], partial_tail=True) == []
    assert chunk_keys(SPACE, PROMPT) == chunk_keys(SPACE, PROMPT, partial_tail=True)


def test_digests_alone_are_those_of_the_keys() -> None:
    """One derivation: chunk_digests is chunk_keys without the rest."""
    for tail in (False, True):
        whole = chunk_keys(SPACE, PROMPT[:11], [CacheSalt("s")], partial_tail=tail)
        assert [key.digest for key in whole] == chunk_digests(SPACE, PROMPT[:11], [CacheSalt("s")], partial_tail=tail)


def test_a_truth_value_that_is_not_a_bool_is_refused() -> None:
    """partial_tail takes a bool: a token list in its place is a mistake."""
    with pytest.raises(KeyingTypeError, match="partial_tail"):
        chunk_keys(SPACE, PROMPT, partial_tail=1)  # type: ignore[arg-type]


@given(spaces, token_lists, extra_key_lists(), st.integers(0, 24))
def test_keys_of_a_chunk_aligned_prefix_are_a_prefix_of_the_keys(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey], cut: int
) -> None:
    """Prefix stability, with whatever extra keys."""
    whole = chunk_keys(space, tokens, extra_keys)
    aligned = cut // space.chunk_size * space.chunk_size
    assert whole[: min(cut, len(tokens)) // space.chunk_size] == chunk_keys(space, tokens[:aligned], extra_keys)


@given(spaces, token_lists, extra_key_lists(), st.randoms(use_true_random=False))
def test_order_of_extra_keys_does_not_matter(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey], rng: Any
) -> None:
    """Any permutation gives the same keys and parts."""
    shuffled = extra_keys.copy()
    rng.shuffle(shuffled)
    assert chunk_keys(space, tokens, extra_keys) == chunk_keys(space, tokens, shuffled)
    assert chunk_keys(space, tokens, extra_keys) == chunk_keys(space, tokens, iter(shuffled))


def overlaps(extra_key: ExtraKey, start: int, stop: int) -> bool:
    """The rule of the specification, written out: max(a, s) < min(b, e)."""
    low, high = 0, 2**60
    match extra_key:
        case MultimodalItem():
            low, high = extra_key.offset, extra_key.offset + extra_key.length
        case PromptEmbeds():
            low, high = extra_key.offset, extra_key.stop
        case LoraAdapter() | Tag():
            low = extra_key.start
    return max(low, start) < min(high, stop)


@given(spaces, token_lists, extra_key_lists())
def test_a_chunk_carries_the_overlapping_extra_keys_and_no_other(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey]
) -> None:
    """One part for each extra key whose range overlaps the chunk (touching embeddings count once), sorted."""
    for key in chunk_keys(space, tokens, extra_keys, partial_tail=True):
        touching = [one for one in extra_keys if overlaps(one, key.start, key.stop)]
        embeds = [one for one in touching if isinstance(one, PromptEmbeds)]
        others = len(touching) - len(embeds)
        embeds_parts = sum(type(decode_part(part)).__name__ == "EmbedsPart" for part in key.parts)
        assert others == len(key.parts) - embeds_parts
        assert bool(embeds) == bool(embeds_parts)
        assert embeds_parts <= len(embeds)
        assert list(key.parts) == sorted(key.parts)


@given(spaces, st.lists(st.integers(0, 5), min_size=10, max_size=24), extra_key_lists(), st.data())
def test_a_removed_extra_key_changes_exactly_the_chunks_from_its_first_on(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey], data: st.DataObject
) -> None:
    """Every dimension flipped alone changes the key of each chunk it touches and, by the chain, of all later ones."""
    if not extra_keys:
        return
    gone = data.draw(st.sampled_from(extra_keys))
    whole = chunk_keys(space, tokens, extra_keys)
    less = chunk_keys(space, tokens, [one for one in extra_keys if one is not gone])
    first = next((place for place, key in enumerate(whole) if overlaps(gone, key.start, key.stop)), len(whole))
    assert whole[:first] == less[:first]
    assert not {key.digest for key in whole[first:]} & {key.digest for key in less[first:]}


FULL: list[ExtraKey] = [
    MultimodalItem("X", 2, 6),
    LoraAdapter("a", "r", 1),
    CacheSalt("s"),
    PromptEmbeds(9, b"abcd", 2, "float16"),
    Tag("t", b"v", 3),
]
FLIPS: list[list[ExtraKey]] = [
    [MultimodalItem("Y", 2, 6), *FULL[1:]],
    [MultimodalItem("X", 3, 6), *FULL[1:]],
    [MultimodalItem("X", 2, 5), *FULL[1:]],
    [FULL[0], LoraAdapter("b", "r", 1), *FULL[2:]],
    [FULL[0], LoraAdapter("a", "q", 1), *FULL[2:]],
    [FULL[0], LoraAdapter("a", "r", 2), *FULL[2:]],
    [*FULL[:2], CacheSalt("S"), *FULL[3:]],
    [*FULL[:3], PromptEmbeds(9, b"abcD", 2, "float16"), FULL[4]],
    [*FULL[:3], PromptEmbeds(8, b"abcd", 2, "float16"), FULL[4]],
    [*FULL[:3], PromptEmbeds(9, b"abcd", 1, "float16"), FULL[4]],
    [*FULL[:3], PromptEmbeds(9, b"abcd", 2, "bfloat16"), FULL[4]],
    [*FULL[:4], Tag("u", b"v", 3)],
    [*FULL[:4], Tag("t", b"w", 3)],
    [*FULL[:4], Tag("t", b"v", 2)],
]


def test_every_field_of_every_extra_key_flipped_alone_gives_other_keys() -> None:
    """Completeness: fourteen flips and the original are fifteen different last keys."""
    assert len(FLIPS) + 1 == len({keys(flip)[-1] for flip in [FULL, *FLIPS]})
    assert keys(FULL) == keys(FULL)


def test_sixteen_threads_agree_with_one() -> None:
    """A9: derivation is pure, so five hundred requests from sixteen threads get the keys they get alone."""
    requests: list[list[ExtraKey]] = [[MultimodalItem(f"image-{i}", 2, 6), CacheSalt(f"s{i % 3}")] for i in range(500)]
    alone = [chunk_keys(SPACE, PROMPT, extra) for extra in requests]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda extra: chunk_keys(SPACE, PROMPT, extra), requests))
    assert alone == together


def test_segment_key_is_its_own_domain_and_does_not_show_its_start() -> None:
    """A segment is no chunk; moved as a whole, with its items, it keeps its key."""
    tokens = [9, 9, 3, 4]
    here = segment_key(SPACE, tokens, [MultimodalItem("X", 8, 2)], start=8)
    there = segment_key(SPACE, tokens, [MultimodalItem("X", 20, 2)], start=20)
    assert here.digest == there.digest
    assert (here.start, here.stop) == (8, 12)
    assert here.digest != segment_key(SPACE, tokens, [MultimodalItem("X", 9, 2)], start=8).digest
    assert segment_key(SPACE, tokens).digest != chunk_keys(SPACE, tokens)[0].digest


def test_a_segment_that_cuts_through_a_picture_knows_where() -> None:
    """C7: an item that began before the segment is part of it, with a negative offset."""
    cut = {segment_key(SPACE, [9, 9], [MultimodalItem("X", offset, 8)], start=8).digest for offset in range(2, 9)}
    assert len(cut) == 7


@pytest.mark.parametrize(
    ("tokens", "start", "error"),
    [([], 0, "empty segment"), ([1], -1, "start"), ([1], 2**48, "start"), ([1], True, "start"), ([1], 1.0, "start")],
)
def test_segments_out_of_bounds_are_refused(tokens: list[int], start: Any, error: str) -> None:
    """An empty segment has no key, and positions stay within 2**48."""
    with pytest.raises(KeyingError, match=error):
        segment_key(SPACE, tokens, start=start)
    assert segment_key(SPACE, [1], start=2**48 - 1)


@st.composite
def _ranges(draw: st.DrawFn, n_tokens: int) -> list[tuple[int, int]]:
    """Ranges of a prompt, with and without tokens between them."""
    ends = sorted(draw(st.sets(st.integers(0, n_tokens), max_size=9)))
    return draw(st.lists(st.sampled_from(list(pairwise(ends))), unique=True).map(sorted)) if len(ends) > 1 else []


@given(spaces, token_lists, extra_key_lists(), st.data())
def test_segments_in_one_pass_have_the_keys_that_each_has_alone(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey], data: st.DataObject
) -> None:
    """Places and parts as well: whatever was left out before a segment changes nothing in it."""
    ranges = data.draw(_ranges(len(tokens)))
    alone = [segment_key(space, tokens[start:stop], extra_keys, start=start) for start, stop in ranges]
    assert alone == segment_keys(space, tokens, ranges, extra_keys)
    assert [(start, stop) for start, stop in ranges] == [(key.start, key.stop) for key in alone]


@pytest.mark.parametrize(
    ("ranges", "error", "says"),
    [
        ([(0, 0)], KeyingError, "empty"),
        ([(3, 2)], KeyingError, "start < stop"),
        ([(0, 13)], KeyingError, r"within \[0, 12\)"),
        ([(0, 4), (3, 6)], KeyingError, r"ranges\[1\].*within \[4, 12\)"),
        ([(4, 6), (0, 2)], KeyingError, r"ranges\[1\]"),
        ([(-1, 2)], KeyingError, "out of range"),
        ([(0, True)], KeyingTypeError, "wanted int"),
        ([(0.0, 1)], KeyingTypeError, "wanted int"),
        ([(0, 1, 2)], KeyingTypeError, "start, stop"),
        ([4], KeyingTypeError, "start, stop"),
        (4, KeyingTypeError, "start, stop"),
    ],
)
def test_ranges_that_are_no_segments_are_refused(ranges: Any, error: type[KeyingError], says: str) -> None:
    """Empty, overlapping or unordered ones would get another's parts; the same prompt cut properly has keys."""
    with pytest.raises(error, match=says):
        segment_keys(SPACE, PROMPT, ranges)
    assert len(segment_keys(SPACE, PROMPT, [(0, 4), (4, 6), (8, 12)])) == 3


def test_segments_cost_what_their_tokens_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra keys of a prompt are looked through once, however many segments it has."""
    made: list[int] = []
    before = PartsIndex.__init__

    def counted(index: PartsIndex, extra_keys: Any) -> None:
        made.append(len(extra_keys))
        before(index, extra_keys)

    monkeypatch.setattr(PartsIndex, "__init__", counted)
    pictures = [MultimodalItem(f"picture {place}", 4 * place, 2) for place in range(200)]
    assert len(segment_keys(SPACE, range(800), [(4 * place, 4 * place + 3) for place in range(200)], pictures)) == 200
    assert [200] == made
