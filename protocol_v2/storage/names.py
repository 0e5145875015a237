"""Names of stored objects: `xk2/<root prefix>/<key>/w<world>r<rank>g<group>`.

    xk2              the storage schema: everything below it can be listed, counted and retired by this part alone
    <root prefix>    first 16 bytes of the space's root, 32 hex digits
    <key>            the whole key, 64 hex digits
    w..r..g..        world size, rank and KV group, decimal, no leading zeros

Hex digits are lower case. There is nothing else in a name, so no user string can reach one, two spaces or schemas never
share one, and the longest component has 64 bytes (file systems that encrypt names allow 143). Half of a root is enough
to find a space; which space it is says the whole root in the envelope. Source: docs/spec/storage-2.md, "Names".
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self, TypeAlias

from keying import DIGEST_SIZE
from protocol_v2.storage.errors import StorageValueError
from protocol_v2.storage.schema import STORAGE_SCHEMA

ROOT_PREFIX_BYTES: Final = 16
MAX_WORLD: Final = 0xFFFF
MAX_GROUP: Final = 0xFFFF
MAX_NAME_BYTES: Final = 124
"""Longest name: five digits each for schema, world, rank and group."""

SCHEMA_FOLDER: Final = f"xk{STORAGE_SCHEMA}"
"""First component of every name that this code writes."""

SPACE_FILE: Final = "space.json"
"""Last component of a space's description; no key looks like it."""

ChunkId: TypeAlias = tuple[bytes, bytes]
"""Root and key of a chunk, 32 bytes each: what is looked up, leased and evicted as one."""

_NUMBER: Final = r"(0|[1-9][0-9]{0,4})"
_NAME: Final = re.compile(rf"xk{_NUMBER}/([0-9a-f]{{32}})/([0-9a-f]{{64}})/w{_NUMBER}r{_NUMBER}g{_NUMBER}", re.ASCII)
_SCHEMA: Final = re.compile(rf"xk{_NUMBER}/", re.ASCII)
_SHARD: Final = re.compile(rf"w{_NUMBER}r{_NUMBER}g{_NUMBER}", re.ASCII)


class _ShardFields(NamedTuple):
    world: int
    rank: int
    group: int


class Shard(_ShardFields):
    """Which part of a chunk's value an object holds.

    Args:
        world: shards of a value in each group, in [1, 65535].
        rank: which of them, in [0, world).
        group: KV group, in [0, 65535].

    Raises:
        StorageValueError: out of range, or not an int.
    """

    __slots__ = ()

    def __new__(cls, world: int = 1, rank: int = 0, group: int = 0) -> Self:
        """Checks the fields."""
        if not (type(world) is int and type(rank) is int and type(group) is int):
            raise StorageValueError("shard: wanted ints for world, rank and group")
        if not (1 <= world <= MAX_WORLD and 0 <= rank < world and 0 <= group <= MAX_GROUP):
            raise StorageValueError(
                f"shard: got world {world}, rank {rank}, group {group}; wanted 1 <= world <= {MAX_WORLD}, "
                f"0 <= rank < world, 0 <= group <= {MAX_GROUP}"
            )
        return super().__new__(cls, world, rank, group)

    def __str__(self) -> str:
        return f"w{self.world}r{self.rank}g{self.group}"


class _ObjectFields(NamedTuple):
    root: bytes
    key: bytes
    shard: Shard


class ObjectId(_ObjectFields):
    """The whole identity of a stored object: what an envelope carries and a reader compares.

    Args:
        root: root of the space, 32 bytes.
        key: key of the chunk or segment, 32 bytes, never shortened.
        shard: which part of the value.

    Raises:
        StorageValueError: a root or key of another length or type.
    """

    __slots__ = ()

    def __new__(cls, root: bytes, key: bytes, shard: Shard) -> Self:
        """Checks the fields."""
        return super().__new__(cls, checked_digest(root, "root"), checked_digest(key, "key"), shard)

    @property
    def chunk(self) -> ChunkId:
        """Root and key: the chunk that this object is a shard of."""
        return (self.root, self.key)

    @property
    def name(self) -> ObjectName:
        """What the object is called in every tier."""
        return ObjectName(self.root[:ROOT_PREFIX_BYTES], self.key, self.shard)

    def __repr__(self) -> str:
        return f"ObjectId({self.name})"


class _NameFields(NamedTuple):
    root_prefix: bytes
    key: bytes
    shard: Shard


class ObjectName(_NameFields):
    """A name, taken apart. `str()` formats it; `parse_name` is the inverse.

    Args:
        root_prefix: first 16 bytes of the root.
        key: 32 bytes.
        shard: which part of the value.

    Raises:
        StorageValueError: bytes of another length or type.
    """

    __slots__ = ()

    def __new__(cls, root_prefix: bytes, key: bytes, shard: Shard) -> Self:
        """Checks the fields."""
        checked_digest(root_prefix, "root_prefix", ROOT_PREFIX_BYTES)
        return super().__new__(cls, root_prefix, checked_digest(key, "key"), shard)

    def __str__(self) -> str:
        return f"{space_folder(self.root_prefix)}/{self.key.hex()}/{self.shard}"


def parse_name(name: str) -> ObjectName:
    """The parts of a name of storage schema 2; exactly the strings that `str(ObjectName(...))` gives, and no other.

    Raises:
        StorageValueError: any other string, a name of another schema included.
    """
    schema, parsed = parse_any_schema(name)
    if schema != STORAGE_SCHEMA:
        raise StorageValueError(f"name: got storage schema {schema}, wanted {STORAGE_SCHEMA}")
    return parsed


def parse_any_schema(name: str) -> tuple[int, ObjectName]:
    """Schema number and parts of a name that has this grammar, whatever its schema: for counting, not for reading.

    Raises:
        StorageValueError: another grammar.
    """
    match = _NAME.fullmatch(name) if len(name) <= MAX_NAME_BYTES else None
    if match is None:
        raise StorageValueError(f"name: got {len(name)} characters that are no xk<n>/<root>/<key>/w<n>r<n>g<n>")
    schema, prefix, key, world, rank, group = match.groups()
    shard = Shard(int(world), int(rank), int(group))
    return int(schema), ObjectName(bytes.fromhex(prefix), bytes.fromhex(key), shard)


def schema_of(name: str) -> int | None:
    """The storage schema that a name's first component claims; None for names that are none of ours."""
    match = _SCHEMA.match(name)
    return int(match[1]) if match else None


def parse_shard(text: str) -> Shard:
    """A name's last component.

    Raises:
        StorageValueError: any other string.
    """
    match = _SHARD.fullmatch(text) if len(text) <= MAX_NAME_BYTES else None
    if match is None:
        raise StorageValueError(f"shard: got {len(text)} characters, wanted w<world>r<rank>g<group>")
    return Shard(int(match[1]), int(match[2]), int(match[3]))


def space_folder(root_prefix: bytes) -> str:
    """What the names of one space begin with, no slash at the end. root_prefix: 16 bytes."""
    return f"{SCHEMA_FOLDER}/{root_prefix.hex()}"


def description_name(root: bytes) -> str:
    """Name of a space's description. root: 32 bytes."""
    return f"{space_folder(checked_digest(root, 'root')[:ROOT_PREFIX_BYTES])}/{SPACE_FILE}"


def checked_digest(value: bytes, what: str, size: int = DIGEST_SIZE) -> bytes:
    """`value`, if it is `bytes` of that size.

    Raises:
        StorageValueError: it is not.
    """
    if type(value) is not bytes or len(value) != size:
        got = f"{len(value)} bytes" if type(value) is bytes else type(value).__name__
        raise StorageValueError(f"{what}: got {got}, wanted exactly {size} bytes; digests are never shortened")
    return value
