"""`KeySpace`: what a whole deployment shares, and the root that every key chain starts from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from keying.encoding import (
    DOMAIN_SPACE,
    KV_DTYPE,
    MAX_CHUNK_SIZE,
    U32,
    checked_int,
    checked_text,
    digest,
    text,
)
from keying.errors import SpaceError, SpaceTypeError

_text = partial(checked_text, error=SpaceError, type_error=SpaceTypeError)


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The model, the KV representation and the chunk size that keys are derived for.

    Two spaces that differ in one field have different roots, so none of their keys can meet. World size, rank and KV
    group are no part of it: they address a shard of a value.

    Args:
        model: name of the model, as every engine of the deployment spells it; 1 to 4096 bytes of UTF-8.
        chunk_size: tokens in a full chunk, ``1 <= chunk_size < 2**31``.
        kv_dtype: resolved name of the element type of the cache (``bfloat16``, ``float8_e4m3fn``): lower-case letters,
            digits and ``_``; never ``auto``.
        model_revision: commit or digest of the weights; may be empty.
        kv_layout: name of the layout of a chunk's values; may be empty.
        attributes: what else changes KV without showing in tokens (quantization, rope, parallel, ...), text to text.

    Attributes:
        root: 32 bytes, the parent of every first chunk.

    Raises:
        SpaceError: a field is out of bounds.
        SpaceTypeError: a field has the wrong type.

    Source: docs/spec/key-schema-2.md, "Space".
    """

    model: str
    chunk_size: int = field(kw_only=True)
    kv_dtype: str = field(kw_only=True)
    model_revision: str = field(default="", kw_only=True)
    kv_layout: str = field(default="", kw_only=True)
    attributes: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    root: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("model", _text(self.model, "model", empty=False))
        put(
            "chunk_size",
            checked_int(self.chunk_size, "chunk_size", 1, MAX_CHUNK_SIZE, error=SpaceError, type_error=SpaceTypeError),
        )
        put("kv_dtype", _text(self.kv_dtype, "kv_dtype", empty=False))
        if not KV_DTYPE.match(self.kv_dtype) or self.kv_dtype == "auto":
            raise SpaceError(
                f"kv_dtype: got {self.kv_dtype[:64]!r}, wanted a resolved name of lower-case letters, digits and '_' "
                "such as bfloat16; ask the engine what 'auto' came to"
            )
        put("model_revision", _text(self.model_revision, "model_revision", empty=True))
        put("kv_layout", _text(self.kv_layout, "kv_layout", empty=True))
        put("attributes", _checked_attributes(self.attributes))
        put("root", digest(encode_space(self)))

    def __hash__(self) -> int:
        return hash(self.root)

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: getattr(self, name) for name in _FIELDS} | {"attributes": dict(self.attributes)}
        return (_restored, (fields,))


_FIELDS = ("model", "chunk_size", "kv_dtype", "model_revision", "kv_layout")


def _restored(fields: dict[str, Any]) -> KeySpace:
    """Pickle: a read-only mapping does not travel, so the space is made, and checked, again."""
    return KeySpace(**fields)


def _checked_attributes(attributes: object) -> Mapping[str, str]:
    """A read-only snapshot, in the order of the encoding (by UTF-8 bytes of the name, not by code unit)."""
    if not isinstance(attributes, Mapping):
        raise SpaceTypeError(f"attributes: got {type(attributes).__name__}, wanted a mapping of str to str")
    checked = {
        _text(name, "attribute name", empty=False): _text(value, "attribute value", empty=True)
        for name, value in attributes.items()
    }
    if len(checked) != len(attributes):
        raise SpaceError("attributes: two names are the same text; give each name once")
    return MappingProxyType(dict(sorted(checked.items(), key=lambda entry: entry[0].encode())))


def encode_space(space: KeySpace) -> bytes:
    """The pre-image of a root."""
    fields = [
        DOMAIN_SPACE,
        text(space.model),
        text(space.model_revision),
        text(space.kv_dtype),
        U32.pack(space.chunk_size),
        text(space.kv_layout),
        U32.pack(len(space.attributes)),
    ]
    for name, value in space.attributes.items():
        fields += (text(name), text(value))
    return b"".join(fields)
