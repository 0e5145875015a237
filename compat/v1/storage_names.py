"""Names under which LMCache 0.5.x keeps values: recognised by exact grammar or not at all, and never adopted.

    MP object         {model} @ {rank} @ {group} @ {hash} [@ {salt}]
    fs, fs_native     {model, / as -SEP-} @ 0x{rank} @ {group} @ {hash} [@ {salt}] .data             file name
    native            {model} @ {rank} @ {group} @ {hash} [@ {salt}]                   Redis, Valkey, S3 and others
    valkey            {prefix} @ ... as native
    raw_block         {model, percent-encoded} @ 0x{rank} @ {group} @ {hash} [@ {salt}]

    engine key s      {model} @ {world} @ {worker} @ {hash} @ {dtype} [@ {layer}] [@ {tag} % {value}] ...
    engine key        {s}                                                       Redis-like stores, raw_block legacy
    engine redis      {s} metadata, {s} kv_bytes
    engine disk       {s, / as -} .pt                                           file name
    engine fs         {s, / as -SEP-} .data                                     file name
    engine gds        {s, percent-encoded} .kvcache.safetensors or .weka1, [.metadata]    file name
    engine s3         {s, / as _}

rank: u32 or wider, hex, at least 8 digits; group: hex; hash: hex; world, worker, layer: decimal; none has leading zeros
or capitals, as the release writes none. Names carry no version and nothing is escaped, so two different keys can write
one name: then every reading is given (`AmbiguousName`), and nobody guesses.

A name of schema 2 has no ``@`` and is never recognised here.

Source: docs/spec/v1-formats.md, "Storage names"; LMCache 0.5.6.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations, pairwise
from typing import Final, TypeAlias
from urllib.parse import quote, unquote

MAX_NAME_BYTES: Final = 1024
"""Longest name that is looked at, in bytes of UTF-8: the limit of S3; file systems stop at 255."""

MAX_READINGS: Final = 16
"""Readings that are listed for one name; a path of a dozen dashes has thousands."""

_MAX_SPELLINGS: Final = 256  # tried for one name: bounds the work where most spellings have no reading
_MAX_TAG_FIELDS: Final = 64  # bounds the recursion over tags

_SEP: Final = "@"
_FS_SLASH: Final = "-SEP-"
_FS_SUFFIX: Final = ".data"
_DISK_SUFFIX: Final = ".pt"
_GDS_SUFFIXES: Final = (".kvcache.safetensors", ".weka1")
_GDS_METADATA: Final = ".metadata"
_REDIS_PARTS: Final = ("metadata", "kv_bytes")

_DECIMAL: Final = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z")
_RANK: Final = re.compile(r"(?:[0-9a-f]{8}|[1-9a-f][0-9a-f]{8,15})\Z")
_GROUP: Final = re.compile(r"(?:0|[1-9a-f][0-9a-f]{0,7})\Z")
_OBJECT_HASH: Final = re.compile(r"(?:[0-9a-f]{2}){1,64}\Z")
_ENGINE_HASH: Final = re.compile(r"(?:-?[1-9a-f][0-9a-f]{0,15}|0|[0-9a-f]{64})\Z")
_SALT: Final = re.compile(r"[^@/\\\0]{1,128}\Z")
_DTYPES: Final = frozenset(
    {"half", "bfloat16", "float", "double", "bool", "uint8", "int8", "int16", "int32", "int64"}
    | {"fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz"}
)


Tags: TypeAlias = tuple[tuple[str, str], ...]


class StoreKind(StrEnum):
    """Where a name was found; the same characters mean different things in different stores."""

    FOLDER = "folder"
    """A file name, without its folder."""
    KEY_VALUE = "key-value"
    """A key of Redis, Valkey or a store like them."""
    OBJECT_STORE = "object-store"
    """A key of a bucket, as a listing gives it."""
    RAW_BLOCK = "raw-block"
    """An entry of a raw block device's index."""


class NameFormat(StrEnum):
    """Which of LMCache's writers wrote a name."""

    FS = "fs"
    """MP ``fs`` and ``fs_native``, which write the same names."""
    NATIVE = "native"
    VALKEY = "valkey"
    RAW_BLOCK = "raw_block"
    ENGINE_KEY = "engine-key"
    ENGINE_REDIS = "engine-redis"
    ENGINE_DISK = "engine-disk"
    ENGINE_FS = "engine-fs"
    ENGINE_GDS = "engine-gds"
    ENGINE_S3 = "engine-s3"


@dataclass(frozen=True, slots=True)
class V1Name:
    """One reading of a v1 name. The salt itself is not kept.

    Attributes:
        format: which writer.
        model: the model's name as the engine knows it.
        world_size: workers, tensor and pipeline parallel together.
        rank: which of them.
        chunk_hash: as written: hex, with a sign where an engine key has one.
        group: object group of an MP object; None for an engine key.
        kv_rank: the packed rank of an MP object; None for an engine key.
        salted: whether a tenant's salt is part of the name. Engine keys have none.
        dtype: LMCache's name of it; None for an MP object.
        layer: layer of a layer-wise engine key.
        tags: (name, value) of each ``lmcache.tag.*``; not shown in ``repr``, since a tag may name a tenant.
        prefix: key prefix of a Valkey deployment.
        part: ``metadata`` or ``kv_bytes`` where one value has two names.
    """

    format: NameFormat
    model: str
    world_size: int
    rank: int
    chunk_hash: str
    group: int | None = None
    kv_rank: int | None = None
    salted: bool = False
    dtype: str | None = None
    layer: int | None = None
    tags: Tags = field(default=(), repr=False)
    prefix: str | None = None
    part: str | None = None


@dataclass(frozen=True, slots=True)
class AmbiguousName:
    """A name that more than one key writes. All readings are v1; which one it is, the name does not say.

    Attributes:
        readings: at most `MAX_READINGS`, and at least two where that is all; LMCache's own parser, where there is one,
            gives the first.
        complete: whether these are all.
    """

    readings: tuple[V1Name, ...]
    complete: bool

    @property
    def likely(self) -> V1Name:
        """The reading of LMCache's own parser, or the name as it is written where there is none."""
        return self.readings[0]

    @property
    def models(self) -> frozenset[str]:
        """Every model that it may belong to; more if not `complete`."""
        return frozenset(reading.model for reading in self.readings)


def recognise(name: str, kind: StoreKind) -> V1Name | AmbiguousName | None:
    """What LMCache 0.5.x wrote under a name, if it wrote it.

    Args:
        name: as the store lists it; a file name without its folder.
        kind: what sort of store lists it.

    Returns:
        The reading; all readings where there are several; None where no released writer writes such a name.
    """
    if not _fits(name):
        return None
    found: dict[V1Name, None] = {}
    complete = True
    for reading in _READERS[StoreKind(kind)](name):
        if reading is None or len(found) == MAX_READINGS:
            complete = False
            break
        found[reading] = None
    readings = tuple(found)
    if not readings:
        return None
    if complete and len(readings) == 1:
        return readings[0]
    return AmbiguousName(readings, complete)


Readings: TypeAlias = Iterator[V1Name | None]
"""Readings of a name, LMCache's own first; None where the search stopped before its end."""


def _fits(name: str) -> bool:
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # a file name that is no UTF-8: LMCache writes none
        return False


def _folder(name: str) -> Readings:
    if "/" in name or "\0" in name:
        return
    if name.endswith(_FS_SUFFIX):
        stem = name.removesuffix(_FS_SUFFIX)
        yield from _object_in_fs(stem)
        yield from _spelled_engine_keys(stem, NameFormat.ENGINE_FS, _FS_SLASH, most_slashes_first=True)
    elif name.endswith(_DISK_SUFFIX):
        stem = name.removesuffix(_DISK_SUFFIX)
        yield from _spelled_engine_keys(stem, NameFormat.ENGINE_DISK, "-", most_slashes_first=False)
    else:
        file = name.removesuffix(_GDS_METADATA)
        part = None if file == name else "metadata"
        for suffix in _GDS_SUFFIXES:
            if file.endswith(suffix) and (text := _unquoted(file.removesuffix(suffix))) is not None:
                yield from _engine_keys(text, NameFormat.ENGINE_GDS, part=part)


def _key_value(name: str) -> Readings:
    fields = name.split(_SEP)
    yield from _object(NameFormat.NATIVE, fields)
    if fields[0]:
        yield from _object(NameFormat.VALKEY, fields[1:], prefix=fields[0])
    yield from _engine_keys(name, NameFormat.ENGINE_KEY)
    for part in _REDIS_PARTS:
        if name.endswith(part):
            yield from _engine_keys(name.removesuffix(part), NameFormat.ENGINE_REDIS, part=part)


def _object_store(name: str) -> Readings:
    yield from _object(NameFormat.NATIVE, name.split(_SEP))
    if "/" not in name:
        yield from _spelled_engine_keys(name, NameFormat.ENGINE_S3, "_", most_slashes_first=False)


def _raw_block(name: str) -> Readings:
    model, *fields = name.split(_SEP)
    if (exact := _unquoted(model)) is not None:
        yield from _object(NameFormat.RAW_BLOCK, [exact, *fields], rank_prefix="0x")
    yield from _engine_keys(name, NameFormat.ENGINE_KEY)


_READERS: Final[dict[StoreKind, Callable[[str], Readings]]] = {
    StoreKind.FOLDER: _folder,
    StoreKind.KEY_VALUE: _key_value,
    StoreKind.OBJECT_STORE: _object_store,
    StoreKind.RAW_BLOCK: _raw_block,
}


def _object_in_fs(stem: str) -> Readings:
    model, *fields = stem.split(_SEP)
    for text in _spellings(model, _FS_SLASH, most_slashes_first=True):
        if text is None:
            yield None
        else:
            yield from _object(NameFormat.FS, [text, *fields], rank_prefix="0x")


def _object(form: NameFormat, fields: list[str], *, rank_prefix: str = "", prefix: str | None = None) -> Readings:
    """The MP object that these fields spell, if they do."""
    if len(fields) not in {4, 5}:
        return
    model, rank, group, chunk_hash, *salt = fields
    digits = rank.removeprefix(rank_prefix)
    if not (
        model
        and _SEP not in model
        and rank == rank_prefix + digits
        and _RANK.match(digits)
        and _GROUP.match(group)
        and _OBJECT_HASH.match(chunk_hash)
        and all(map(_SALT.match, salt))
    ):
        return
    kv_rank = int(digits, 16)
    yield V1Name(
        form,
        model,
        world_size=kv_rank >> 24,
        rank=kv_rank >> 16 & 0xFF,
        chunk_hash=chunk_hash,
        group=int(group, 16),
        kv_rank=kv_rank,
        salted=bool(salt),
        prefix=prefix,
    )


def _spelled_engine_keys(written: str, form: NameFormat, replacement: str, *, most_slashes_first: bool) -> Readings:
    if _SEP not in written:
        return
    for text in _spellings(written, replacement, most_slashes_first=most_slashes_first):
        if text is None:
            yield None
        else:
            yield from _engine_keys(text, form)


def _engine_keys(text: str, form: NameFormat, *, part: str | None = None) -> Readings:
    """Every engine key whose text this is. A model may have an ``@``, so the fields after it may stand anywhere."""
    fields = text.split(_SEP)
    for place in range(1, len(fields) - 3):
        model = _SEP.join(fields[:place])
        world, worker, chunk_hash, dtype, *rest = fields[place:]
        if not (
            model
            and dtype in _DTYPES
            and _DECIMAL.match(world)
            and _DECIMAL.match(worker)
            and _ENGINE_HASH.match(chunk_hash)
        ):
            continue
        if len(rest) > _MAX_TAG_FIELDS:
            yield None
            return
        for layer, tags in _layers_and_tags(rest):
            yield V1Name(
                form,
                model,
                world_size=int(world),
                rank=int(worker),
                chunk_hash=chunk_hash,
                dtype=dtype,
                layer=layer,
                tags=tags,
                part=part,
            )


def _layers_and_tags(rest: list[str]) -> Iterator[tuple[int | None, Tags]]:
    if rest and _DECIMAL.match(rest[0]):
        for tags in _tags(rest[1:]):
            yield int(rest[0]), tags
    for tags in _tags(rest):
        yield None, tags


def _tags(rest: list[str]) -> Iterator[Tags]:
    """Every list of tags that is written like this: neither ``@`` nor ``%`` is escaped in names and values."""
    if not rest:
        yield ()
        return
    for n in range(1, len(rest) + 1):
        if n < len(rest) and not any("%" in piece for piece in rest[n:]):
            continue  # what is left could not be a tag
        first = _SEP.join(rest[:n])
        for place in (at for at, character in enumerate(first) if character == "%"):
            for others in _tags(rest[n:]):
                yield ((first[:place], first[place + 1 :]), *others)


def _spellings(written: str, replacement: str, *, most_slashes_first: bool) -> Iterator[str | None]:
    """Every text that turns into ``written`` when its slashes are replaced; None where the search stopped early."""
    places = []
    place = written.find(replacement)
    while place >= 0:
        places.append(place)
        place = written.find(replacement, place + 1)
    counts = range(len(places) + 1)
    n = 0
    for count in reversed(counts) if most_slashes_first else counts:
        for chosen in combinations(places, count):
            if n == _MAX_SPELLINGS:
                yield None
                return
            n += 1
            if all(b - a >= len(replacement) for a, b in pairwise(chosen)):
                yield _with_slashes(written, replacement, chosen)


def _with_slashes(written: str, replacement: str, places: tuple[int, ...]) -> str:
    pieces = []
    start = 0
    for place in places:
        pieces.append(written[start:place])
        start = place + len(replacement)
    return "/".join([*pieces, written[start:]])


def _unquoted(text: str) -> str | None:
    """What ``quote`` with nothing safe wrote as this text, if it did."""
    try:
        plain = unquote(text, errors="strict")
    except UnicodeDecodeError:
        return None
    return plain if quote(plain, safe="") == text else None
