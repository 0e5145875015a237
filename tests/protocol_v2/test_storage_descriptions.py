"""Descriptions of spaces (docs/spec/storage-2.md, "Descriptions")."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keying import KeySpace
from protocol_v2.storage import StorageValueError
from protocol_v2.storage.descriptions import MAX_DESCRIPTION_BYTES, format_description, parse_description

SPACE = KeySpace(
    "org/model",
    chunk_size=256,
    kv_dtype="bfloat16",
    model_revision="abc",
    kv_layout="NHD",
    attributes={"rope": "default", "parallel": "tp=2", "ü": "@@"},
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(texts.filter(bool), texts, st.dictionaries(texts.filter(bool), texts, max_size=3))
def test_descriptions_round_trip(model: str, layout: str, attributes: dict[str, str]) -> None:
    """I3: whatever a space is called, its description gives it back, root and all."""
    space = KeySpace(model, chunk_size=16, kv_dtype="float16", kv_layout=layout, attributes=attributes)
    assert space == parse_description(format_description(space))
    assert space.root == parse_description(format_description(space)).root


def test_descriptions_are_readable() -> None:
    """A person finds model, dtype, chunk size, attributes and the root in plain JSON."""
    fields = json.loads(format_description(SPACE))
    assert "org/model" == fields["model"]
    assert {"rope": "default", "parallel": "tp=2", "ü": "@@"} == fields["attributes"]
    assert (2, 2, 256, SPACE.root.hex()) == (
        fields["storage_schema"],
        fields["key_schema"],
        fields["chunk_size"],
        fields["root"],
    )
    assert format_description(SPACE).decode().count("\n") > 10


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"attributes": {}},
        {"attributes": {"rope": 1}},
        {"attributes": None},
        {"root": "00" * 32},
        {"root": None},
        {"chunk_size": True},
        {"chunk_size": "256"},
        {"kv_dtype": "auto"},
        {"storage_schema": 3},
        {"storage_schema": 2.0},
        {"storage_schema": True},
        {"key_schema": 1},
        {"model": None},
    ],
)
def test_edited_descriptions_are_seen_as_such(change: dict[str, object]) -> None:
    """A file whose fields do not have the root it names, or of another schema, is refused; the unedited one is not."""
    fields = json.loads(format_description(SPACE))
    assert SPACE == parse_description(json.dumps(fields).encode())
    with pytest.raises(StorageValueError, match="description"):
        parse_description(json.dumps(fields | change).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000, b" " * (MAX_DESCRIPTION_BYTES + 1)])
def test_other_files_are_no_descriptions(data: bytes) -> None:
    """Bytes that are no JSON object, or too many, are refused with a typed error."""
    with pytest.raises(StorageValueError, match="description"):
        parse_description(data)
