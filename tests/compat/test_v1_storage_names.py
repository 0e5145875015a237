"""v1 storage names: what LMCache wrote is recognised, ambiguous names say so, and nothing else is touched."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compat.v1 import AmbiguousName, NameFormat, StoreKind, V1Name, recognise
from compat.v1.storage_names import MAX_READINGS
from tests.compat.golden import GOLDEN
from tests.compat.v1_writers import EngineKey, MpObject

FOLDER, KEY_VALUE, OBJECT_STORE, RAW_BLOCK = StoreKind
DTYPES = ["half", "bfloat16", "float", "double", "int8", "uint8", "bool", "fp8_e4m3fn", "fp8_e5m2fnuz"]
HASH = "ab" * 32

plain_model = st.text("abcQ027._", min_size=1, max_size=12)
model = st.lists(plain_model, min_size=1, max_size=3).map("/".join)
any_model = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="@\0"), min_size=1, max_size=12)
mp_objects = st.builds(
    MpObject,
    any_model,
    st.integers(0, 2**40),
    st.integers(0, 2**16),
    st.sampled_from([8, 24, 32, 33, 48]).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
    st.one_of(st.just(""), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="@/\\\0"), max_size=20)),
)
tag_text = st.text("abc%@-/_3", min_size=0, max_size=6)
engine_keys = st.builds(
    EngineKey,
    st.one_of(model, st.text("ab@/-_", min_size=1, max_size=8)),
    st.integers(1, 64),
    st.integers(0, 63),
    st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(min_size=32, max_size=32)),
    st.sampled_from(DTYPES),
    st.none() | st.integers(0, 99),
    st.lists(st.tuples(tag_text, tag_text), max_size=3).map(tuple),
)


def _readings(name: str, kind: StoreKind) -> tuple[V1Name, ...]:
    found = recognise(name, kind)
    if found is None:
        return ()
    return found.readings if isinstance(found, AmbiguousName) else (found,)


def _of(key: MpObject | EngineKey, form: NameFormat, **more: Any) -> V1Name:
    if isinstance(key, MpObject):
        return V1Name(
            form,
            key.model,
            world_size=key.kv_rank >> 24,
            rank=key.kv_rank >> 16 & 255,
            chunk_hash=key.chunk_hash.hex(),
            group=key.group,
            kv_rank=key.kv_rank,
            salted=bool(key.salt),
            **more,
        )
    return V1Name(
        form,
        key.model,
        world_size=key.world_size,
        rank=key.worker,
        chunk_hash=key.hash_text(),
        dtype=key.dtype,
        layer=key.layer,
        tags=key.tags,
        **more,
    )


def _writes(reading: V1Name, salt: str) -> str:
    """The name that a reading's key would have been written under."""
    if reading.kv_rank is not None:
        assert reading.group is not None
        mp = MpObject(reading.model, reading.kv_rank, reading.group, bytes.fromhex(reading.chunk_hash), salt)
        if reading.format is NameFormat.VALKEY:
            return mp.valkey(str(reading.prefix))
        return {NameFormat.FS: mp.fs, NameFormat.NATIVE: mp.native, NameFormat.RAW_BLOCK: mp.raw_block}[
            reading.format
        ]()
    digits = reading.chunk_hash
    chunk_hash = bytes.fromhex(digits) if len(digits) == 64 else int(digits, 16)
    engine = EngineKey(
        reading.model,
        reading.world_size,
        reading.rank,
        chunk_hash,
        str(reading.dtype),
        reading.layer,
        reading.tags,
    )
    if reading.format is NameFormat.ENGINE_REDIS:
        return engine.redis()[reading.part == "kv_bytes"]
    return {
        NameFormat.ENGINE_KEY: engine.text,
        NameFormat.ENGINE_DISK: engine.disk,
        NameFormat.ENGINE_FS: engine.fs,
        NameFormat.ENGINE_S3: engine.s3,
        NameFormat.ENGINE_GDS: engine.gds,
    }[reading.format]()


@pytest.mark.parametrize("case", GOLDEN["object_key"], ids=["plain", "salted"])
def test_captured_object_names_are_recognised(case: dict[str, Any]) -> None:
    """fs, native, S3 and raw_block, as the release wrote them."""
    key = MpObject(
        case["model_name"],
        case["kv_rank"],
        case["object_group_id"],
        bytes.fromhex(case["chunk_hash"]),
        case["cache_salt"],
    )
    assert case["fs_filename"] == key.fs()
    assert case["native_s3_string"] == key.native()
    assert case["raw_block"] == key.raw_block()
    fs = recognise(case["fs_filename"], FOLDER)
    assert isinstance(fs, AmbiguousName)
    assert fs.complete
    assert _of(key, NameFormat.FS) == fs.likely
    assert {"org/m", "org-SEP-m"} == fs.models
    assert _of(key, NameFormat.NATIVE) == recognise(case["native_s3_string"], KEY_VALUE)
    assert _of(key, NameFormat.NATIVE) == recognise(case["native_s3_string"], OBJECT_STORE)
    assert _of(key, NameFormat.RAW_BLOCK) == recognise(case["raw_block"], RAW_BLOCK)


@pytest.mark.parametrize("case", GOLDEN["cache_engine_key"], ids=lambda c: c["to_string"])
def test_captured_engine_keys_are_recognised(case: dict[str, Any]) -> None:
    """``to_string`` as the release wrote it; its own reading comes first."""
    fields = case["fields"]
    tags = tuple(
        (name.removeprefix("lmcache.tag."), value)
        for name, value in (fields["request_configs"] or {}).items()
        if name.startswith("lmcache.tag.")
    )
    dtype = case["to_string"].split("@")[4]
    key = EngineKey(
        fields["model_name"],
        fields["world_size"],
        fields["worker_id"],
        fields["chunk_hash"],
        dtype,
        case["layer_id"],
        tags,
    )
    assert case["to_string"] == key.text()
    assert _of(key, NameFormat.ENGINE_KEY) == _readings(key.text(), KEY_VALUE)[0]


@settings(max_examples=150)
@given(mp_objects, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="@"), min_size=1, max_size=8))
def test_whatever_an_mp_writer_writes_is_recognised(key: MpObject, prefix: str) -> None:
    """Its key is among the readings, in every store that it can be in."""
    written = [
        (key.native(), KEY_VALUE, _of(key, NameFormat.NATIVE)),
        (key.native(), OBJECT_STORE, _of(key, NameFormat.NATIVE)),
        (key.valkey(prefix), KEY_VALUE, _of(key, NameFormat.VALKEY, prefix=prefix)),
        (key.raw_block(), RAW_BLOCK, _of(key, NameFormat.RAW_BLOCK)),
        (key.fs(), FOLDER, _of(key, NameFormat.FS)),
    ]
    for name, kind, expected in written:
        assert expected in _readings(name, kind)


@settings(max_examples=150)
@given(engine_keys)
def test_whatever_an_in_process_writer_writes_is_recognised(key: EngineKey) -> None:
    """Its key is among the readings, unless there are more than are listed, and then the name says so."""
    metadata, kv_bytes = key.redis()
    written = [
        (key.text(), KEY_VALUE, NameFormat.ENGINE_KEY, None),
        (key.text(), RAW_BLOCK, NameFormat.ENGINE_KEY, None),
        (metadata, KEY_VALUE, NameFormat.ENGINE_REDIS, "metadata"),
        (kv_bytes, KEY_VALUE, NameFormat.ENGINE_REDIS, "kv_bytes"),
        (key.disk(), FOLDER, NameFormat.ENGINE_DISK, None),
        (key.fs(), FOLDER, NameFormat.ENGINE_FS, None),
        (key.gds(), FOLDER, NameFormat.ENGINE_GDS, None),
        (key.gds() + ".metadata", FOLDER, NameFormat.ENGINE_GDS, "metadata"),
        (key.s3(), OBJECT_STORE, NameFormat.ENGINE_S3, None),
    ]
    for name, kind, form, part in written:
        found = recognise(name, kind)
        assert found is not None
        listed_all = isinstance(found, V1Name) or found.complete
        assert not listed_all or _of(key, form, part=part) in _readings(name, kind)


@settings(max_examples=200)
@given(st.one_of(engine_keys.map(lambda k: k.disk()), mp_objects.map(lambda k: k.fs()), engine_keys.map(EngineKey.fs)))
def test_every_reading_of_a_file_name_writes_that_file_name(name: str) -> None:
    """No reading is invented: each is a key whose name this is. None is listed twice, and never more than said."""
    assume("/" not in name)
    readings = _readings(name, FOLDER)
    salt = name.removesuffix(".data").split("@")[-1]
    assert len(readings) <= MAX_READINGS
    assert len(set(readings)) == len(readings)
    for reading in readings:
        assert name == _writes(reading, salt if reading.salted else "")


@settings(max_examples=200)
@given(st.text("a0123456789f@%x-/_ metadatkv_bytes.", max_size=60), st.sampled_from(StoreKind))
def test_arbitrary_text_is_recognised_only_if_a_writer_writes_it(name: str, kind: StoreKind) -> None:
    """The grammar is exact: whatever is recognised is written again as it was."""
    for reading in _readings(name, kind):
        assert reading.salted or name.removesuffix(".metadata") == _writes(reading, "")


def _edge(name: str, kind: StoreKind) -> Any:
    return pytest.param(name, kind, id=f"{kind}:{name}"[:70])


RANK = "01000100"
LONG_SALT = "s" * 129


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # nothing of LMCache's
        _edge("", FOLDER),
        _edge("@", FOLDER),
        _edge("README.md", FOLDER),
        _edge("user@example.com", KEY_VALUE),
        _edge("a@b@c@d", KEY_VALUE),
        _edge("a@b@c@d.data", FOLDER),
        # field counts of the release before, and of none
        _edge(f"m@0x{RANK}@{HASH}.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}@s@t.data", FOLDER),
        _edge(f"m@{RANK}@{HASH}", KEY_VALUE),
        _edge(f"p@m@{RANK}@0@{HASH}@s@t", KEY_VALUE),
        # one character off
        _edge(f"@0x{RANK}@0@{HASH}.data", FOLDER),
        _edge(f"m@{RANK}@0@{HASH}.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}.dat", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}.data.tmp", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}.tmp", FOLDER),
        _edge(f"m@0X{RANK}@0@{HASH}.data", FOLDER),
        _edge(f"m@0x1000100@0@{HASH}.data", FOLDER),
        _edge(f"m@0x0{RANK}@0@{HASH}.data", FOLDER),
        _edge(f"m@0x0100010A@0@{HASH}.data", FOLDER),
        _edge(f"m@0x{RANK}@00@{HASH}.data", FOLDER),
        _edge(f"m@0x{RANK}@A@{HASH}.data", FOLDER),
        _edge(f"m@0x{RANK}@-1@{HASH}.data", FOLDER),
        _edge(f"m@0x{RANK}@@{HASH}.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH[1:]}.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH.upper()}.data", FOLDER),
        _edge(f"m@0x{RANK}@0@.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}@.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}@a\\b.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}@{LONG_SALT}.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}.data\n", FOLDER),
        _edge(f"m@0x{RANK}@0\n@{HASH}.data", FOLDER),
        _edge(f"m@0x{RANK}@0@{HASH}\n.data", FOLDER),
        _edge(f"sub/m@0x{RANK}@0@{HASH}.data", FOLDER),
        _edge(f"m@{RANK}@0@{HASH}@a/b", KEY_VALUE),
        _edge(f"m@0x{RANK}@0@{HASH}", KEY_VALUE),
        _edge(f"org/m@0x{RANK}@0@{HASH}", RAW_BLOCK),
        _edge(f"org%2fm@0x{RANK}@0@{HASH}", RAW_BLOCK),
        _edge(f"org%m@0x{RANK}@0@{HASH}", RAW_BLOCK),
        _edge(f"a%40b@0x{RANK}@0@{HASH}", RAW_BLOCK),
        _edge(f"%FF@0x{RANK}@0@{HASH}", RAW_BLOCK),
        _edge(f"m@{RANK}@0@{HASH}", RAW_BLOCK),
        # engine keys
        _edge("m@1@0@ff@float16.pt", FOLDER),
        _edge("m@1@0@ff@half", FOLDER),
        _edge("m@01@0@ff@half.pt", FOLDER),
        _edge("m@1@+0@ff@half.pt", FOLDER),
        _edge("m@1@0@0ff@half.pt", FOLDER),
        _edge("m@1@0@0xff@half.pt", FOLDER),
        _edge("m@1@0@--5@half.pt", FOLDER),
        _edge("m@1@0@-0@half.pt", FOLDER),
        _edge("m@1@0@FF@half.pt", FOLDER),
        _edge("@1@0@ff@half.pt", FOLDER),
        _edge("m@1@0@ff@half@.pt", FOLDER),
        _edge("m@1@0@ff@half@tag.pt", FOLDER),
        _edge("m@1@0@ff@half@03.pt", FOLDER),
        _edge("m@1@0@ff@half@\u0663.pt", FOLDER),
        _edge("m@1@0@" + "f" * 17 + "@half", KEY_VALUE),
        _edge("m@1@0@ff@halfmeta", KEY_VALUE),
        _edge("m@1@0@ff@half@3metadata2", KEY_VALUE),
        _edge("org/m@1@0@ff@half", OBJECT_STORE),
        _edge("org%2Fm%401%400%40ff%40half.kvcache.safetensors", KEY_VALUE),
        _edge("org/m@1@0@ff@half.kvcache.safetensors", FOLDER),
        _edge("m@1@0@ff@half.kvcache.safetensors", FOLDER),
        # other forms of text
        _edge("m\ud800@1@0@ff@half", KEY_VALUE),
        _edge("m" * 1024 + "@1@0@ff@half", KEY_VALUE),
    ],
)
def test_what_no_writer_writes_is_not_recognised(name: str, kind: StoreKind) -> None:
    """Junk, other releases, and names one character off the grammar stay untouched."""
    assert recognise(name, kind) is None


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("tail", ["", ".data", ".pt", "metadata", ".kvcache.safetensors"])
def test_a_name_of_schema_2_is_never_a_v1_name(kind: StoreKind, tail: str) -> None:
    """Neither whole nor as a file name."""
    name = f"xk2/{'0' * 32}/{HASH}/w1r0g0"
    assert recognise(name + tail, kind) is None
    assert recognise(name.rpartition("/")[2] + tail, kind) is None
    assert recognise(name.replace("/", "-") + tail, kind) is None


def test_a_slash_that_was_written_as_sep_is_ambiguous() -> None:
    """LMCache reads every -SEP- as a slash; a model may have been named so. Without one the name is certain."""
    found = recognise(f"a-SEP-SEP-b@0x{RANK}@0@{HASH}@s.data", FOLDER)
    assert isinstance(found, AmbiguousName)
    assert {"a/SEP-b", "a-SEP/b", "a-SEP-SEP-b"} == found.models
    assert found.likely.salted
    certain = recognise(f"org-m@0x{RANK}@0@{HASH}@s.data", FOLDER)
    assert isinstance(certain, V1Name)
    assert certain.model == "org-m"


def test_a_dash_on_disk_may_have_been_a_slash() -> None:
    """org/m and org-m share a file; the written form comes first. No dash, no doubt."""
    found = recognise("org-m@1@0@-5@half.pt", FOLDER)
    assert isinstance(found, AmbiguousName)
    assert ["org-m", "org/m"] == [reading.model for reading in found.readings]
    assert ["-5", "-5"] == [reading.chunk_hash for reading in found.readings]
    certain = recognise("m@1@0@-5@half.pt", FOLDER)
    assert isinstance(certain, V1Name)


def test_more_readings_than_are_listed_are_counted_as_such() -> None:
    """A model of many dashes has more readings than anyone wants; the name says that these are not all."""
    found = recognise("a-b-c-d-e-f@1@0@ff@half.pt", FOLDER)
    assert isinstance(found, AmbiguousName)
    assert (MAX_READINGS, False) == (len(found.readings), found.complete)
    fewer = recognise("a-b-c-d-e@1@0@ff@half.pt", FOLDER)
    assert isinstance(fewer, AmbiguousName)
    assert (16, True) == (len(fewer.readings), fewer.complete)


def test_a_valkey_prefix_and_a_salt_can_spell_the_same() -> None:
    """Two formats fit: both readings, one of them salted."""
    found = recognise("m@10000100@10000100@aa@bbcc", KEY_VALUE)
    assert isinstance(found, AmbiguousName)
    assert [(NameFormat.NATIVE, True, None), (NameFormat.VALKEY, False, "m")] == [
        (reading.format, reading.salted, reading.prefix) for reading in found.readings
    ]


def test_an_object_and_an_engine_key_can_spell_the_same() -> None:
    """A rank of eight decimal digits is also a world size, and a salt may be the name of a dtype."""
    found = recognise("m@10000100@0@aa@half", KEY_VALUE)
    assert isinstance(found, AmbiguousName)
    assert [NameFormat.NATIVE, NameFormat.ENGINE_KEY] == [reading.format for reading in found.readings]


def test_two_tags_and_one_tag_can_spell_the_same() -> None:
    """{a: x, b: y} and {a: "x@b%y"} share a key in every string store of LMCache."""
    found = recognise("m@1@0@ff@half@a%x@b%y", KEY_VALUE)
    assert isinstance(found, AmbiguousName)
    assert (("a", "x"), ("b", "y")) == found.likely.tags
    assert {(("a", "x"), ("b", "y")), (("a", "x@b%y"),), (("a%x@b", "y"),)} == {r.tags for r in found.readings}
    certain = recognise("m@1@0@ff@half@a%x", KEY_VALUE)
    assert isinstance(certain, V1Name)


def test_a_redis_part_and_a_tag_can_spell_the_same() -> None:
    """A tag's value may end in the word that marks the metadata."""
    found = recognise("m@1@0@ff@half@t%vmetadata", KEY_VALUE)
    assert isinstance(found, AmbiguousName)
    assert [(NameFormat.ENGINE_KEY, None), (NameFormat.ENGINE_REDIS, "metadata")] == [
        (reading.format, reading.part) for reading in found.readings
    ]
    assert recognise("m@1@0@ff@half@3metadata", KEY_VALUE) == V1Name(
        NameFormat.ENGINE_REDIS, "m", 1, 0, "ff", dtype="half", layer=3, part="metadata"
    )


def test_a_model_may_have_an_at_sign() -> None:
    """The release writes such engine keys and cannot read them."""
    assert recognise("a@b@1@0@ff@half", KEY_VALUE) == V1Name(NameFormat.ENGINE_KEY, "a@b", 1, 0, "ff", dtype="half")


def test_neither_a_salt_nor_a_tag_shows() -> None:
    """A reading can be logged: salts are not kept, and tags stay out of ``repr``."""
    for name in (f"m@{RANK}@0@{HASH}@secret", "m@1@0@ff@half@user%secret", "m@1@0@ff@half@user%secret@b%c"):
        assert "secret" not in repr(recognise(name, KEY_VALUE))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m@1@0@ff@half" + "@%%%%" * 150, KEY_VALUE),
        ("m@1@0@ff@half" + "@a%b" * 60 + "@c", KEY_VALUE),
        ("m@1@0@ff@half" + "@%" * 63, KEY_VALUE),
        ("-" * 200 + "m@1@0@ff@half.pt", FOLDER),
        ("-" * 200 + "m@1@0@ff@junk.pt", FOLDER),
        ("-SEP" * 200 + f"-@0x{RANK}@0@{HASH}.data", FOLDER),
        ("m@1@0@ff@half@" * 70, KEY_VALUE),
    ],
)
def test_a_hostile_name_costs_little(name: str, kind: StoreKind) -> None:
    """Readings and spellings are bounded, whatever the name; the search says that it stopped."""
    found = recognise(name, kind)
    assert found is None or (isinstance(found, AmbiguousName) and not found.complete)


def test_an_unknown_kind_of_store_is_refused() -> None:
    """There are four."""
    with pytest.raises(ValueError, match="StoreKind"):
        recognise("m@1@0@ff@half", "tape")  # type: ignore[arg-type]
