"""The deprecated producers: bit-exact to LMCache 0.5.6 where it is right, loud where it is silently wrong."""

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compat import (
    SpanError,
    SpanHazardWarning,
    SpanTypeError,
    apply_mm_hashes_to_token_ids,
    mm_hash_to_token_values,
)
from tests.compat.golden import GOLDEN

pytestmark = pytest.mark.filterwarnings("ignore::compat.ExtraKeysDeprecationWarning")


@dataclass
class Span:
    """As vLLM's PlaceholderRange."""

    offset: Any
    length: Any


def _reference(tokens: list[int], spans: list[tuple[str, int, int]]) -> list[int]:
    """The definition, written down once more and slowly."""
    out = list(tokens)
    for identifier, offset, length in spans:
        seed = hashlib.sha256(identifier.encode()).digest()
        for i in range(length):
            if offset + i < len(out):
                block = hashlib.sha256(seed + (i // 8).to_bytes(8, "big")).digest()
                out[offset + i] = int.from_bytes(block[i % 8 * 4 : i % 8 * 4 + 4], "big") % 2**31
    return out


@pytest.mark.parametrize(
    "case", GOLDEN["mm_hash_to_token_values"], ids=lambda c: f"{c['identifier'][:20]}-{c['length']}"
)
def test_values_are_those_of_the_release(case: dict[str, Any]) -> None:
    """Every captured span of surrogate values is reproduced."""
    assert tuple(case["values"]) == mm_hash_to_token_values(case["identifier"], case["length"])


@pytest.mark.parametrize("case", GOLDEN["apply_mm_hashes_to_token_ids"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint32, torch.uint64, torch.float64], ids=str)
def test_spans_are_overwritten_as_by_the_release(case: dict[str, Any], dtype: torch.dtype) -> None:
    """Every captured prompt is reproduced, in place, whatever dtype holds it."""
    tensor = torch.tensor(case["tokens"], dtype=dtype)
    spans = case["spans"]
    result = apply_mm_hashes_to_token_ids(
        tensor, [s["identifier"] for s in spans], [Span(s["offset"], s["length"]) for s in spans]
    )
    assert result is tensor
    assert case["values"] == tensor.tolist()


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.lists(st.tuples(st.text(min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 40)), max_size=5),
)
def test_any_prompt_equals_the_definition(tokens: list[int], spans: list[tuple[str, int, int]]) -> None:
    """Spans past the end, cut, empty, overlapping, in any order: as defined, and twice gives the same."""
    tensor = torch.tensor(tokens, dtype=torch.int64)
    hashes, positions = [s[0] for s in spans], [Span(*s[1:]) for s in spans]
    apply_mm_hashes_to_token_ids(tensor, hashes, positions)
    assert _reference(tokens, spans) == tensor.tolist()
    apply_mm_hashes_to_token_ids(tensor, hashes, positions)
    assert _reference(tokens, spans) == tensor.tolist()


@settings(max_examples=100)
@given(st.text(), st.integers(0, 50), st.integers(0, 50))
def test_a_shorter_span_has_a_prefix_of_the_values(identifier: str, m: int, n: int) -> None:
    """A truncated prompt keys its pictures as the whole one does, and each value has 31 bits."""
    short, long = sorted((m, n))
    values = mm_hash_to_token_values(identifier, long)
    assert values[:short] == mm_hash_to_token_values(identifier, short)
    assert all(0 <= value < 2**31 for value in values)


def test_distinct_identifiers_share_no_value() -> None:
    """Two pictures differ in every position (negative control: the same picture in none)."""
    a, b = mm_hash_to_token_values("img-A", 1000), mm_hash_to_token_values("img-B", 1000)
    assert not [i for i in range(1000) if a[i] == b[i]]
    assert a == mm_hash_to_token_values("img-A", 1000)


def test_the_cache_does_not_show() -> None:
    """Writing into a tensor that was filled from the cache leaves later values as they were."""
    before = mm_hash_to_token_values("cached", 16)
    tensor = torch.zeros(16, dtype=torch.int32)
    apply_mm_hashes_to_token_ids(tensor, ["cached"], [Span(0, 16)])
    tensor.zero_()
    assert before == mm_hash_to_token_values("cached", 16)


def test_what_is_not_text_goes_through_str() -> None:
    """Integers and bytes give the values of their text; True is not 1, as a cache keyed on the object would have it."""
    assert mm_hash_to_token_values("1", 9) == mm_hash_to_token_values(1, 9)  # type: ignore[arg-type]
    assert mm_hash_to_token_values("True", 9) == mm_hash_to_token_values(True, 9)  # type: ignore[arg-type]
    assert mm_hash_to_token_values("b'x'", 9) == mm_hash_to_token_values(b"x", 9)  # type: ignore[arg-type]


def test_the_empty_identifier_is_text_like_any_other() -> None:
    """The values of "" are defined; only keying a prompt on them is a hazard."""
    seed = hashlib.sha256(b"").digest()
    first = int.from_bytes(hashlib.sha256(seed + bytes(8)).digest()[:4], "big") % 2**31
    assert (first,) == mm_hash_to_token_values("", 1)


def test_a_strided_prompt_is_written_in_place() -> None:
    """A column of a batch is a prompt like any other; its neighbours stay."""
    batch = torch.full((6, 2), 9, dtype=torch.int64)
    apply_mm_hashes_to_token_ids(batch[:, 0], ["img-A"], [Span(2, 3)])
    assert _reference([9] * 6, [("img-A", 2, 3)]) == batch[:, 0].tolist()
    assert batch[:, 1].tolist() == [9] * 6


def test_numpy_integers_are_integers() -> None:
    """Offsets that come out of an array work."""
    tensor = torch.full((6,), 9)
    apply_mm_hashes_to_token_ids(tensor, ["img-A"], [Span(np.int64(2), np.int32(3))])
    assert _reference([9] * 6, [("img-A", 2, 3)]) == tensor.tolist()


class _Plain:
    """An object whose text is its address."""


REFUSED: list[tuple[str, list[Any], list[Any], str]] = [
    ("more identifiers", ["a", "b"], [Span(0, 2)], "got 2 and 1"),
    ("more spans", ["a"], [Span(0, 2), Span(2, 2)], "got 1 and 2"),
    ("no identifiers", [], [Span(0, 2)], "got 0 and 1"),
    ("None", ["a", None], [Span(0, 2), Span(2, 2)], "got None"),
    ("address", ["a", _Plain()], [Span(0, 2), Span(2, 2)], "no text but its address"),
    ("surrogate", ["a", "\ud800"], [Span(0, 2), Span(2, 2)], "lone surrogate"),
    ("negative offset", ["a", "b"], [Span(0, 2), Span(-2, 2)], "offset is -2"),
    ("negative length", ["a", "b"], [Span(0, 2), Span(2, -1)], "non-negative, got -1"),
    ("negative length past the end", ["a", "b"], [Span(0, 2), Span(99, -1)], "non-negative, got -1"),
    ("float offset", ["a", "b"], [Span(0, 2), Span(2.0, 2)], r"mm_positions\[1\]"),
    ("no span", ["a", "b"], [Span(0, 2), (2, 2)], r"mm_positions\[1\].*tuple"),
]


@pytest.mark.parametrize(("hashes", "positions", "text"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_no_caller_can_mean_is_refused_and_nothing_is_written(
    hashes: list[Any], positions: list[Any], text: str
) -> None:
    """The release answers each of these with a wrong key or none; here the prompt stays as it was."""
    tensor = torch.full((8,), 9)
    with pytest.raises(SpanError, match=text):
        apply_mm_hashes_to_token_ids(tensor, hashes, positions)
    assert tensor.tolist() == [9] * 8


def test_an_item_past_the_end_needs_no_identity() -> None:
    """A prefix of a prompt is right without the identities of what it does not hold."""
    tensor = torch.full((4,), 9)
    apply_mm_hashes_to_token_ids(tensor, ["img-A", None], [Span(1, 2), Span(4, 2)])  # type: ignore[list-item]
    assert _reference([9] * 4, [("img-A", 1, 2)]) == tensor.tolist()


@pytest.mark.parametrize(
    "token_ids",
    [
        [9, 9, 9],
        np.full(3, 9),
        None,
        torch.full((1, 3), 9),
        torch.tensor(9),
        torch.full((3,), 9, dtype=torch.int16),
        torch.full((3,), 9, dtype=torch.uint8),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.float32),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex128),
    ],
    ids=lambda t: f"{type(t).__name__}-{getattr(t, 'dtype', '')}-{getattr(t, 'ndim', '')}",
)
def test_what_cannot_hold_a_prompt_is_refused(token_ids: Any) -> None:
    """Containers that are no tensor, other dimensions, and dtypes that would round a surrogate."""
    with pytest.raises(SpanTypeError, match="token_ids"):
        apply_mm_hashes_to_token_ids(token_ids, ["a"], [Span(0, 2)])


@pytest.mark.parametrize(("hashes", "positions"), [("a", [Span(0, 2)]), (["a"], None), (b"a", [Span(0, 2)]), (7, [])])
def test_what_is_no_list_of_items_is_refused(hashes: Any, positions: Any) -> None:
    """A str is not a list of its characters."""
    with pytest.raises(SpanTypeError, match="wanted a list"):
        apply_mm_hashes_to_token_ids(torch.full((4,), 9), hashes, positions)


@pytest.mark.parametrize("identifier", [None, _Plain()])
def test_values_need_an_identity(identifier: Any) -> None:
    """None is not the text "None"."""
    with pytest.raises(SpanError, match="identifier"):
        mm_hash_to_token_values(identifier, 1)


def test_refusals_are_value_errors() -> None:
    """Code that catches the release's ValueError goes on working."""
    with pytest.raises(ValueError, match="non-negative"):
        mm_hash_to_token_values("img-A", -1)
    with pytest.raises(TypeError):
        mm_hash_to_token_values("img-A", 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("identifier", ["", "renderer0-mm-3-image-0", "uuid:renderer12-mm-0-audio-1"])
def test_identifiers_that_name_no_content_warn_and_give_the_releases_result(identifier: str) -> None:
    """Right while there is one such item, so the result stands and the hazard is told."""
    tensor = torch.full((6,), 9)
    with pytest.warns(SpanHazardWarning, match="counts requests") as caught:
        apply_mm_hashes_to_token_ids(tensor, [identifier], [Span(2, 3)])
    assert [__file__] == [w.filename for w in caught if w.category is SpanHazardWarning]
    assert _reference([9] * 6, [(identifier, 2, 3)]) == tensor.tolist()


def test_a_suffix_of_a_prompt_warns() -> None:
    """Offsets are absolute; where torch shows that the prompt begins inside another tensor, the caller is told."""
    prompt = torch.full((8,), 9)
    with pytest.warns(SpanHazardWarning, match="clone") as caught:
        apply_mm_hashes_to_token_ids(prompt[4:], ["img-A"], [Span(1, 2)])
    assert [__file__] == [w.filename for w in caught if w.category is SpanHazardWarning]


@pytest.mark.parametrize(
    "prompt",
    [
        torch.full((8,), 9)[:6],
        torch.full((2, 8), 9)[1],
        torch.full((8,), 9)[4:].clone(),
        torch.full((16,), 9)[8:].clone()[:6],
    ],
    ids=["prefix", "row of a batch", "copy", "prefix of a copy"],
)
def test_a_prefix_a_row_and_a_copy_do_not_warn(prompt: torch.Tensor) -> None:
    """The suffix detector's negative control."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpanHazardWarning)
        apply_mm_hashes_to_token_ids(prompt, ["img-A"], [Span(1, 2)])


def test_a_suffix_without_a_span_does_not_warn() -> None:
    """Where nothing is written there is no hazard."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpanHazardWarning)
        apply_mm_hashes_to_token_ids(torch.full((8,), 9)[4:], ["img-A"], [Span(6, 2)])


def test_messages_show_no_identifier() -> None:
    """An identifier may be a user's file name; it stays out of messages."""
    with pytest.raises(SpanError) as caught:
        apply_mm_hashes_to_token_ids(torch.full((8,), 9), ["secret-name"], [])
    assert "secret-name" not in str(caught.value)
