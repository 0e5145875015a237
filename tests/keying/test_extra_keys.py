"""The five extra keys: bounds, refusals, and that no secret prints."""

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest

from keying import (
    CacheSalt,
    DuplicateExtraKeyError,
    ExtraKey,
    ExtraKeyError,
    ExtraKeyTypeError,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    OverlappingEmbedsError,
    PromptEmbeds,
    Tag,
    UncacheableRequest,
    UnsupportedExtraKeyError,
    chunk_keys,
)

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
FAR = 2**48

REFUSED: list[tuple[Any, type[Exception]]] = [
    (lambda: MultimodalItem("", 0, 1), ExtraKeyError),
    (lambda: MultimodalItem(None, 0, 1), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: MultimodalItem(0, 0, 1), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: MultimodalItem(b"x", 0, 1), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: MultimodalItem("\udc00", 0, 1), ExtraKeyError),
    (lambda: MultimodalItem("x" * 4097, 0, 1), ExtraKeyError),
    (lambda: MultimodalItem("x", -1, 1), ExtraKeyError),
    (lambda: MultimodalItem("x", 0, -1), ExtraKeyError),
    (lambda: MultimodalItem("x", FAR + 1, 0), ExtraKeyError),
    (lambda: MultimodalItem("x", 0, FAR + 1), ExtraKeyError),
    (lambda: MultimodalItem("x", FAR, 1), ExtraKeyError),
    (lambda: MultimodalItem("x", True, 1), ExtraKeyTypeError),
    (lambda: MultimodalItem("x", 1.0, 1), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: MultimodalItem("x", "1", 1), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: MultimodalItem("x", None, 1), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: MultimodalItem("x", np.int64(1), 1), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: LoraAdapter(""), ExtraKeyError),
    (lambda: LoraAdapter(None), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: LoraAdapter("a", None), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: LoraAdapter("a", "r" * 4097), ExtraKeyError),
    (lambda: LoraAdapter("a", "", -1), ExtraKeyError),
    (lambda: LoraAdapter("a", "", FAR + 1), ExtraKeyError),
    (lambda: LoraAdapter("a", "", False), ExtraKeyTypeError),
    (lambda: CacheSalt(""), ExtraKeyError),
    (lambda: CacheSalt(None), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: CacheSalt(0), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: CacheSalt("\U0001f9c2" * 1025), ExtraKeyError),
    (lambda: PromptEmbeds(0, b"abc", 2, "float16"), ExtraKeyError),
    (lambda: PromptEmbeds(0, b"ab", 0, "float16"), ExtraKeyError),
    (lambda: PromptEmbeds(0, b"ab", 2**32, "float16"), ExtraKeyError),
    (lambda: PromptEmbeds(-1, b"ab", 2, "float16"), ExtraKeyError),
    (lambda: PromptEmbeds(FAR, b"ab", 2, "float16"), ExtraKeyError),
    (lambda: PromptEmbeds(0, "ab", 2, "float16"), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: PromptEmbeds(0, 5, 2, "float16"), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: PromptEmbeds(0, np.zeros(2, dtype=">f4"), 4, "float32"), ExtraKeyError),  # type: ignore[arg-type]
    (lambda: PromptEmbeds(0, b"ab", 2, ""), ExtraKeyError),
    (lambda: PromptEmbeds(0, b"ab", 2, None), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: PromptEmbeds(0, b"ab", True, "float16"), ExtraKeyTypeError),
    (lambda: Tag("", b""), ExtraKeyError),
    (lambda: Tag("xk.anything", b""), ExtraKeyError),
    (lambda: Tag("t", b"v" * 4097), ExtraKeyError),
    (lambda: Tag("t", "v"), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: Tag("t", None), ExtraKeyTypeError),  # type: ignore[arg-type]
    (lambda: Tag("t", b"v", -1), ExtraKeyError),
    (lambda: Tag("t", b"v", 0.0), ExtraKeyTypeError),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "error"), REFUSED, ids=range(len(REFUSED)))
def test_values_out_of_bounds_are_refused(make: Any, error: type[Exception]) -> None:
    """C9: an invalid extra key cannot exist; None, "" and 0 never mean "no identity"."""
    with pytest.raises(error):
        make()


def test_values_at_the_bounds_are_accepted() -> None:
    """The bounds are inclusive, and count bytes of UTF-8, not characters."""
    assert chunk_keys(
        SPACE,
        [1, 2, 3, 4],
        [
            MultimodalItem("é" * 2048, FAR, 0),
            MultimodalItem("x", 0, FAR),
            LoraAdapter("a" * 4096, "r" * 4096, FAR),
            CacheSalt("\U0001f9c2" * 1024),
            Tag("t", b"v" * 4096, FAR),
            PromptEmbeds(FAR - 1, b"ab", 2, "float16"),
        ],
    )


@pytest.mark.parametrize(
    "identifier", ["renderer0-mm-7-image-0", "lora:renderer12-mm-0-video_clip-3", "a:b:renderer0-mm-1-audio-11"]
)
def test_identifiers_that_count_requests_are_refused(identifier: str) -> None:
    """A request-local identifier restarts with the process, so two pictures would share it."""
    with pytest.raises(ExtraKeyError, match="counts requests"):
        MultimodalItem(identifier, 0, 1)


@pytest.mark.parametrize(
    "identifier",
    [
        "renderer0-mm-7-image-0x",
        "xrenderer0-mm-7-image-0",
        "renderer-mm-7-image-0",
        "renderer0-mm-7-Image-0",
        "None",
        "0",
    ],
)
def test_identifiers_that_only_look_alike_are_accepted(identifier: str) -> None:
    """The pattern is exact: it does not take other identifiers with it."""
    assert identifier == MultimodalItem(identifier, 0, 1).identifier


class Text(str):
    """A str subclass, as numpy's str_ is one."""

    __slots__ = ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: CacheSalt("s" * 10_000_000),
        lambda: CacheSalt(Text("s" * 10_000_000)),
        lambda: MultimodalItem("s" * 10_000_000, 0, 1),
        lambda: LoraAdapter("a", "s" * 10_000_000),
        lambda: Tag("t", b"s" * 10_000_000),
    ],
    ids=range(5),
)
def test_ten_megabytes_are_refused_before_any_work_on_them(make: Any) -> None:
    """F5: a huge text is neither copied nor encoded before it is refused, so it cannot stall a scheduler."""
    size = 10_000_000
    tracemalloc.start()
    try:
        with pytest.raises(ExtraKeyError, match=f"got {size}"):
            make()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size + size // 2 + (size if "Text" in make.__code__.co_names else 0)


@pytest.mark.parametrize(
    "secret", [CacheSalt("s3cret"), Tag("t", b"s3cret"), PromptEmbeds(0, b"s3cret", 6, "uint8")], ids=type
)
def test_secrets_do_not_print(secret: ExtraKey) -> None:
    """A repr that lands in a log shows no salt, tag value or row; nor does the key that carries it."""
    (key,) = chunk_keys(SPACE, [1, 2, 3, 4], [secret])
    for shown in (repr(secret), str(secret), repr(key), str(key), f"{key}"):
        assert "s3cret" not in shown
        assert b"s3cret".hex() not in shown


def test_refusals_do_not_print_secrets() -> None:
    """A refused salt or tag value is not in the message."""
    for make in (
        lambda: CacheSalt("s3cret" * 1000),
        lambda: Tag("t", b"s3cret" * 1000),
        lambda: CacheSalt("s3cret\ud800"),
    ):
        with pytest.raises(ExtraKeyError) as refused:
            make()
        assert "s3cret" not in str(refused.value)


def test_key_prints_in_its_textual_form() -> None:
    """A key prints as xk2: and 64 hex digits."""
    (key,) = chunk_keys(SPACE, [1, 2, 3, 4])
    assert f"xk2:{key.digest.hex()}" == str(key)
    assert len("xk2:") + 64 == len(str(key))


X = MultimodalItem("x", 0, 4)
TOGETHER_REFUSED: list[tuple[list[Any], type[Exception]]] = [
    ([X, MultimodalItem("x", 0, 4)], DuplicateExtraKeyError),
    ([MultimodalItem("x", 0, 0), MultimodalItem("x", 0, 0)], DuplicateExtraKeyError),
    ([LoraAdapter("a"), LoraAdapter("a")], DuplicateExtraKeyError),
    ([LoraAdapter("a"), LoraAdapter("a", "", 4)], DuplicateExtraKeyError),
    ([Tag("t", b"1"), Tag("t", b"2")], DuplicateExtraKeyError),
    ([CacheSalt("a"), CacheSalt("b")], DuplicateExtraKeyError),
    ([CacheSalt("a"), CacheSalt("a")], DuplicateExtraKeyError),
    ([PromptEmbeds(0, b"abcd", 1, "u"), PromptEmbeds(3, b"x", 1, "u")], OverlappingEmbedsError),
    ([PromptEmbeds(3, b"x", 1, "u"), PromptEmbeds(0, b"abcd", 1, "u")], OverlappingEmbedsError),
    ([PromptEmbeds(1, b"x", 1, "u"), PromptEmbeds(1, b"x", 1, "u")], OverlappingEmbedsError),
    ([LoraAdapter(f"a{i}") for i in range(65)], ExtraKeyError),
    ([Tag(f"t{i}", b"") for i in range(65)], ExtraKeyError),
    ([MultimodalItem("x", i, 0) for i in range(65_537)], ExtraKeyError),
    (["x"], UnsupportedExtraKeyError),
    ([("x", 0, 4)], UnsupportedExtraKeyError),
    ([None], UnsupportedExtraKeyError),
    ([{"salt": "s"}], UnsupportedExtraKeyError),
    ([MultimodalItem], UnsupportedExtraKeyError),
]


@pytest.mark.parametrize(("extra_keys", "error"), TOGETHER_REFUSED, ids=range(len(TOGETHER_REFUSED)))
def test_extra_keys_that_do_not_go_together_are_refused(extra_keys: list[Any], error: type[Exception]) -> None:
    """D11: twice the same is refused, never silently dropped, and an unknown type is never taken for a known one."""
    with pytest.raises(error):
        chunk_keys(SPACE, [1, 2, 3, 4], extra_keys)


@pytest.mark.parametrize("extra_keys", [X, CacheSalt("s"), "x", None, 0], ids=repr)
def test_one_extra_key_is_not_a_sequence_of_them(extra_keys: Any) -> None:
    """None and a bare extra key are mistakes, not "no extra keys"."""
    with pytest.raises(UnsupportedExtraKeyError, match="wanted a sequence"):
        chunk_keys(SPACE, [1, 2, 3, 4], extra_keys)


@pytest.mark.parametrize(
    "extra_keys",
    [
        [X, MultimodalItem("x", 4, 4)],
        [X, MultimodalItem("x", 0, 5)],
        [X, MultimodalItem("y", 0, 4)],
        [X, MultimodalItem("y", 2, 4)],
        [LoraAdapter("a"), LoraAdapter("b")],
        [LoraAdapter("a"), LoraAdapter("a", "r2")],
        [PromptEmbeds(0, b"ab", 1, "u"), PromptEmbeds(2, b"c", 1, "u")],
        [PromptEmbeds(0, b"ab", 1, "u"), PromptEmbeds(1, b"", 1, "u")],
        [LoraAdapter(f"a{i}") for i in range(64)] + [Tag(f"t{i}", b"") for i in range(64)],
    ],
    ids=range(9),
)
def test_extra_keys_that_may_stand_together(extra_keys: list[ExtraKey]) -> None:
    """Audio inside video, one picture twice, and several adapters are legal, and each one shows in the key."""
    whole = chunk_keys(SPACE, list(range(8)), extra_keys)
    assert whole == chunk_keys(SPACE, list(range(8)), extra_keys[::-1])
    assert whole != chunk_keys(SPACE, list(range(8)), extra_keys[:-1]) or not getattr(extra_keys[-1], "n_rows", 1)


def test_a_value_survives_pickle_and_cannot_be_changed() -> None:
    """Extra keys travel between processes unchanged and are immutable."""
    rows = bytearray(b"abcd")
    embeds = PromptEmbeds(1, rows, 2, "float16")  # type: ignore[arg-type]  # any buffer
    rows[0] = 0
    values: list[ExtraKey] = [X, LoraAdapter("a", "r", 3), CacheSalt("s"), embeds, Tag("t", b"v", 2)]
    assert values == pickle.loads(pickle.dumps(values))
    assert embeds == PromptEmbeds(1, b"abcd", 2, "float16")
    with pytest.raises(AttributeError):
        X.offset = 3  # type: ignore[misc]


def test_str_subclasses_count_by_their_text() -> None:
    """A str subclass (numpy's str_, an enum) is its text."""
    assert MultimodalItem("x", 0, 4) == MultimodalItem(np.str_("x"), 0, 4)
    assert type(CacheSalt(np.str_("x")).value) is str


def test_a_refusal_travels_between_processes() -> None:
    """An uncacheable request keeps its reason and text through pickle."""
    error = UncacheableRequest("missing_attribute", "vllm Request.cache_salt: not there")
    again = pickle.loads(pickle.dumps(error))
    assert (error.reason, str(error)) == (again.reason, str(again))
