"""KeySpace: every field is in the root, and nothing unresolved gets in."""

import pickle
from typing import Any

import pytest
from hypothesis import given

from keying import KeySpace, SpaceError, SpaceTypeError, chunk_digests, decode_preimage, encode_preimage
from tests.keying.strategies import spaces

BASE: dict[str, Any] = {"model": "org/m", "chunk_size": 256, "kv_dtype": "bfloat16"}


def make(**changed: Any) -> KeySpace:
    """A space with some fields changed."""
    fields = BASE | changed
    return KeySpace(fields.pop("model"), **fields)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "org/n"},
        {"chunk_size": 16},
        {"kv_dtype": "float8_e4m3fn"},
        {"model_revision": "r"},
        {"kv_layout": "r"},
        {"attributes": {"rope": "r"}},
        {"attributes": {"rope": ""}},
        {"model": "ORG/m"},
        {"model": "org/m "},
    ],
)
def test_every_field_changes_the_root(changed: dict[str, Any]) -> None:
    """I7, I8: dtype, layout and geometry are part of the namespace; equal fields share it."""
    assert make().root == make().root
    assert make().root != make(**changed).root
    assert make() != make(**changed)
    assert not set(chunk_digests(make(), [1] * 512)) & set(chunk_digests(make(**changed), [1] * 512))


def test_no_boundary_between_fields_can_shift() -> None:
    """E10, G1: text that moves from one field to the next gives another root."""
    assert make(model="ab", model_revision="c").root != make(model="a", model_revision="bc").root
    assert make(attributes={"ab": "c"}).root != make(attributes={"a": "bc"}).root
    assert make(model_revision="x").root != make(kv_layout="x").root


def test_attributes_are_sorted_by_utf8_and_not_by_code_unit() -> None:
    """The order of the mapping does not show; U+FFFF comes before U+10000 as in UTF-8, unlike UTF-16."""
    one = make(attributes={"\U00010000": "4", "b": "2", "\uffff": "3"})
    other = make(attributes={"b": "2", "\uffff": "3", "\U00010000": "4"})
    assert one.root == other.root
    assert list(one.attributes) == ["b", "\uffff", "\U00010000"]


REFUSED: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"model": ""}, SpaceError),
    ({"model": None}, SpaceTypeError),
    ({"model": b"m"}, SpaceTypeError),
    ({"model": "\ud800"}, SpaceError),
    ({"model": "a" * 4097}, SpaceError),
    ({"model": "é" * 2049}, SpaceError),
    ({"chunk_size": 0}, SpaceError),
    ({"chunk_size": -1}, SpaceError),
    ({"chunk_size": 2**31}, SpaceError),
    ({"chunk_size": True}, SpaceTypeError),
    ({"chunk_size": 16.0}, SpaceTypeError),
    ({"chunk_size": "16"}, SpaceTypeError),
    ({"kv_dtype": "auto"}, SpaceError),
    ({"kv_dtype": ""}, SpaceError),
    ({"kv_dtype": "BFloat16"}, SpaceError),
    ({"kv_dtype": "torch.bfloat16"}, SpaceError),
    ({"kv_dtype": "bfloat16\n"}, SpaceError),
    ({"kv_dtype": None}, SpaceTypeError),
    ({"model_revision": None}, SpaceTypeError),
    ({"model_revision": 0}, SpaceTypeError),
    ({"kv_layout": None}, SpaceTypeError),
    ({"attributes": {"": "x"}}, SpaceError),
    ({"attributes": {"a": None}}, SpaceTypeError),
    ({"attributes": {1: "x"}}, SpaceTypeError),
    ({"attributes": [("a", "b")]}, SpaceTypeError),
    ({"attributes": None}, SpaceTypeError),
]


@pytest.mark.parametrize(("changed", "error"), REFUSED, ids=range(len(REFUSED)))
def test_fields_out_of_bounds_are_refused_by_name(changed: dict[str, Any], error: type[Exception]) -> None:
    """Each refusal is typed and names the field."""
    with pytest.raises(error, match=next(iter(changed)).removesuffix("s")):
        make(**changed)
    assert make(model="é" * 2048, model_revision="", kv_layout="", attributes={"a": ""}).root


def test_a_space_is_immutable_and_keeps_a_snapshot() -> None:
    """Changing the caller's mapping afterwards changes nothing, and the space's own cannot be changed."""
    attributes = {"rope": "a"}
    space = make(attributes=attributes)
    attributes["rope"] = "b"
    assert make(attributes={"rope": "a"}) == space
    with pytest.raises(TypeError):
        space.attributes["rope"] = "c"  # type: ignore[index]
    with pytest.raises(AttributeError):
        space.model = "other"  # type: ignore[misc]


@given(spaces)
def test_pickle_hash_and_decoder_give_the_space_back(space: KeySpace) -> None:
    """A space survives pickling and its own pre-image."""
    assert space == pickle.loads(pickle.dumps(space))
    assert space == decode_preimage(encode_preimage(space))
    assert {space: 1}[pickle.loads(pickle.dumps(space))] == 1


def test_something_else_than_a_space_is_refused() -> None:
    """A model name is not a space."""
    with pytest.raises(SpaceTypeError, match="got str, wanted KeySpace"):
        chunk_digests("org/m", [1])  # type: ignore[arg-type]


def test_two_names_that_are_one_text_are_refused() -> None:
    """A mapping whose names only look different cannot drop an attribute in silence."""

    class Shy(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

    with pytest.raises(SpaceError, match="two names are the same text"):
        make(attributes={Shy("rope"): "a", Shy("rope"): "b"})
