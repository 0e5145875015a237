"""The readable file beside a space's objects: which model, which representation. For people and tools, never for keys.

It is JSON in UTF-8, named `xk2/<root prefix>/space.json`, and says again what the root is the digest of. Nothing reads
it to derive or accept a key: whoever has a space has its root. `parse_description` recomputes the root from the fields,
so a file that was edited or belongs to another space is seen as such. Source: docs/spec/storage-2.md, "Descriptions".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from keying import KEY_SCHEMA, KeyingError, KeySpace
from protocol_v2.storage.errors import StorageValueError
from protocol_v2.storage.schema import STORAGE_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DESCRIPTION_BYTES: Final = 1024 * 1024
"""Bytes of a description that is read: a space has at most some hundred texts of 4 KiB."""

_ABOUT: Final = "Describes the objects beside it. Informative: keys are derived from the space, never from this file."


def format_description(space: KeySpace) -> bytes:
    """The description of a space: JSON, indented, names sorted, a newline at the end."""
    fields = {
        "about": _ABOUT,
        "storage_schema": STORAGE_SCHEMA,
        "key_schema": KEY_SCHEMA,
        "root": space.root.hex(),
        "model": space.model,
        "model_revision": space.model_revision,
        "kv_dtype": space.kv_dtype,
        "chunk_size": space.chunk_size,
        "kv_layout": space.kv_layout,
        "attributes": dict(space.attributes),
    }
    return json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def parse_description(data: bytes) -> KeySpace:
    """The space that a description describes.

    Raises:
        StorageValueError: not such a file, another schema, or fields that do not have the root that the file names.
    """
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise StorageValueError(f"description: got {len(data)} bytes, wanted at most {MAX_DESCRIPTION_BYTES}")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise StorageValueError("description: wanted JSON in UTF-8") from None
    if not isinstance(fields, dict):
        raise StorageValueError("description: wanted a JSON object")
    _expect(fields, "storage_schema", STORAGE_SCHEMA)
    _expect(fields, "key_schema", KEY_SCHEMA)
    try:
        space = KeySpace(
            fields.get("model", ""),
            chunk_size=fields.get("chunk_size", 0),
            kv_dtype=fields.get("kv_dtype", ""),
            model_revision=fields.get("model_revision", ""),
            kv_layout=fields.get("kv_layout", ""),
            attributes=fields.get("attributes", {}),
        )
    except KeyingError as error:
        raise StorageValueError(f"description: {error}") from None
    _expect(fields, "root", space.root.hex())
    return space


def _expect(fields: Mapping[str, object], name: str, wanted: object) -> None:
    got = fields.get(name)
    if type(got) is not type(wanted) or got != wanted:
        raise StorageValueError(f"description.{name}: the file was edited, or is another schema's or space's")
