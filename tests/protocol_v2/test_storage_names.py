"""Names of stored objects (docs/spec/storage-2.md, "Names")."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keying import CacheSalt, KeySpace, chunk_keys
from protocol_v2.codes import MissReason
from protocol_v2.storage import STORAGE_SCHEMA, ObjectId, ObjectName, Shard, StorageValueError, parse_name, schema_of
from protocol_v2.storage.names import MAX_NAME_BYTES, description_name, parse_any_schema, parse_shard
from protocol_v2.storage.schema import schema_fault
from tests.protocol_v2.storage_samples import ALONE, ROOT, digests, object_ids, shards

KEY = bytes(range(32))


@given(object_ids)
@example(ObjectId(bytes(32), bytes(32), Shard(1, 0, 0)))
@example(ObjectId(b"\xff" * 32, b"\xff" * 32, Shard(65535, 65534, 65535)))
@example(ObjectId(bytes.fromhex("12" * 32), bytes.fromhex("0123456789" * 6 + "0012"), Shard(10, 1, 10)))
def test_names_format_and_parse_are_inverse(identity: ObjectId) -> None:
    """I1: parse(format(name)) is the name, also where digits look decimal, lead with zeros or have the high bit set."""
    name = identity.name
    assert name == parse_name(str(name))
    assert str(name) == str(parse_name(str(name)))


@given(object_ids)
def test_names_are_short_and_of_a_closed_alphabet(identity: ObjectId) -> None:
    """I6: no component of a name is longer than 143 bytes, and all of it is hex, digits and the grammar's letters."""
    text = str(identity.name)
    assert re.fullmatch(r"xk2/[0-9a-f]{32}/[0-9a-f]{64}/w[0-9]+r[0-9]+g[0-9]+", text)
    assert len(text) <= MAX_NAME_BYTES
    assert max(map(len, text.split("/"))) == 64


@given(st.lists(object_ids, min_size=2, max_size=2, unique_by=lambda one: (one.root[:16], one.key, one.shard)))
def test_names_differ_where_identities_do(pair: list[ObjectId]) -> None:
    """Two identities with another root prefix, key or shard have two names."""
    assert str(pair[0].name) != str(pair[1].name)


@pytest.mark.parametrize("model", ["@@x", "a@b", "a/b", "ü", "a%2Fb", "../../etc", "x" * 134, "a\nb", "a\x00b"])
def test_model_names_and_salts_never_reach_a_name(model: str) -> None:
    """I3, I6: whatever the model and the salt are called, the name has the same length and grammar."""
    space = KeySpace(model, chunk_size=4, kv_dtype="bfloat16")
    [key] = chunk_keys(space, [1, 2, 3, 4], [CacheSalt(model * 8)])
    text = str(ObjectId(space.root, key.digest, ALONE).name)
    assert parse_name(text).key == key.digest
    assert len("xk2/") + 32 + 1 + 64 + 1 + len("w1r0g0") == len(text)


def test_dtype_layout_and_revision_separate_names() -> None:
    """I7: the same tokens under another KV dtype, layout or revision have another space and another key."""
    spaces = [
        KeySpace("m", chunk_size=4, kv_dtype="bfloat16"),
        KeySpace("m", chunk_size=4, kv_dtype="float8_e4m3fn"),
        KeySpace("m", chunk_size=4, kv_dtype="bfloat16", kv_layout="NHD"),
        KeySpace("m", chunk_size=4, kv_dtype="bfloat16", model_revision="2"),
    ]
    names = {ObjectId(one.root, chunk_keys(one, [1, 2, 3, 4])[0].digest, ALONE).name for one in spaces}
    assert len(spaces) == len({name.root_prefix for name in names}) == len({name.key for name in names})


@pytest.mark.parametrize("size", [0, 16, 31, 33, 64])
def test_digests_of_another_length_are_refused(size: int) -> None:
    """S7: a root or key that is not exactly 32 bytes never becomes an identity."""
    with pytest.raises(StorageValueError, match=f"key: got {size} bytes, wanted exactly 32"):
        ObjectId(ROOT, bytes(size), ALONE)
    with pytest.raises(StorageValueError, match=f"root: got {size} bytes, wanted exactly 32"):
        ObjectId(bytes(size), KEY, ALONE)
    with pytest.raises(StorageValueError, match="key"):
        ObjectName(ROOT[:16], bytes(size), ALONE)


@pytest.mark.parametrize("value", ["x" * 32, bytearray(32), None, 32])
def test_digests_of_another_type_are_refused(value: Any) -> None:
    """Only bytes are a digest: text and mutable buffers are not."""
    with pytest.raises(StorageValueError, match="key"):
        ObjectId(ROOT, value, ALONE)


@pytest.mark.parametrize(
    "fields", [(0, 0, 0), (1, 1, 0), (2, -1, 0), (65536, 0, 0), (1, 0, -1), (1, 0, 65536), (True, 0, 0), (1.0, 0, 0)]
)
def test_impossible_shards_are_refused(fields: tuple[Any, Any, Any]) -> None:
    """A shard has 1 <= world <= 65535, a rank below it, and a group below 65536; ints only."""
    with pytest.raises(StorageValueError, match="shard"):
        Shard(*fields)


GOOD = f"xk2/{'0a' * 16}/{'0b' * 32}/w2r1g0"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "xk2",
        GOOD + "\n",
        GOOD + "/",
        "/" + GOOD,
        GOOD.upper(),
        GOOD.replace("0a", "0A", 1),
        GOOD.replace("xk2", "xk02"),
        GOOD.replace("xk2", "xk1"),
        GOOD.replace("xk2", "xk3"),
        GOOD.replace("xk2", "xk"),
        GOOD.replace("w2", "w02"),
        GOOD.replace("w2", "w0"),
        GOOD.replace("r1", "r2"),
        GOOD.replace("r1", "r-1"),
        GOOD.replace("g0", "g"),
        GOOD.replace("g0", "g123456"),
        GOOD.replace("g0", "g٣"),
        GOOD.replace("0b", "", 1),
        GOOD.replace("0b", "0b0b", 1),
        GOOD.replace("0a", "", 1),
        GOOD.replace("/w", "//w"),
        GOOD + "x" * 100_000,
        "org@model@1@0@0a0b",
        "vllm/model@2@0@" + "0b" * 32,
        "xk2/../../etc/passwd",
    ],
)
def test_other_strings_are_no_names(name: str) -> None:
    """I5: only what the formatter writes is parsed; names of older systems and near misses are not, the good one is."""
    assert GOOD == str(parse_name(GOOD))
    with pytest.raises(StorageValueError):
        parse_name(name)


@given(st.text(max_size=140))
def test_any_string_parses_to_itself_or_is_refused(name: str) -> None:
    """No string is read as a name that formats to another string."""
    try:
        parsed = parse_name(name)
    except StorageValueError:
        return
    assert name == str(parsed)


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        (GOOD, 2),
        ("xk3/whatever there is", 3),
        ("xk12345/", 12345),
        ("xk2", None),
        ("xk2.tmp/a", None),
        ("xk02/", None),
        ("xk123456/", None),
        ("org@model@1", None),
        ("", None),
    ],
)
def test_schema_is_told_by_the_name_alone(name: str, schema: int | None) -> None:
    """Counting and retiring by schema needs a name's first component and nothing else."""
    assert schema == schema_of(name)


def test_other_schemas_are_recognised_and_not_read() -> None:
    """I12: a name of another schema with our grammar tells its number; it is no name that this version reads."""
    other = GOOD.replace("xk2", "xk7")
    assert (7, parse_name(GOOD)) == parse_any_schema(other)
    with pytest.raises(StorageValueError, match="got storage schema 7, wanted 2"):
        parse_name(other)


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (STORAGE_SCHEMA, None),
        (STORAGE_SCHEMA + 1, MissReason.SCHEMA_TOO_NEW),
        (2**32 - 1, MissReason.SCHEMA_TOO_NEW),
        (STORAGE_SCHEMA - 1, MissReason.SCHEMA_RETIRED),
        (0, MissReason.SCHEMA_RETIRED),
    ],
)
def test_only_the_one_schema_is_accepted(schema: int, fault: MissReason | None) -> None:
    """An unknown number is a miss with its reason, never read as the latest."""
    assert fault is schema_fault(schema)


@given(shards)
def test_shard_parts_format_and_parse(shard: Shard) -> None:
    """The last component is parsed alone as well, by the same grammar."""
    assert shard == parse_shard(str(shard))
    for wrong in (f"{shard} ", f"{shard}g0", f"W{str(shard)[1:]}"):
        with pytest.raises(StorageValueError):
            parse_shard(wrong)


@given(digests)
def test_descriptions_are_beside_the_objects(root: bytes) -> None:
    """A space's description has the objects' folder and a last component that no key has."""
    assert str(ObjectId(root, KEY, ALONE).name).rsplit("/", 2)[0] + "/space.json" == description_name(root)


def test_identities_print_without_anything_but_the_name() -> None:
    """What is logged of an identity is its name: digits and hex."""
    identity = ObjectId(ROOT, KEY, Shard(2, 1, 3))
    assert f"ObjectId(xk2/{ROOT[:16].hex()}/{KEY.hex()}/w2r1g3)" == repr(identity)
