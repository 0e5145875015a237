"""Key inputs in a JSON file: a space, tokens and extra keys, in the notation of the test vectors.

    {
      "space": {"model": "org/m", "chunk_size": 4, "kv_dtype": "bfloat16"},
      "tokens": [1, 2, 9, 9, 9, 9, 3, 4],
      "extra_keys": [["mm", "image-id", 2, 4], ["lora", "sql", "sha256:ab", 0], ["salt", "tenant-7"],
                     ["tag", "reader", "00ff", 0], ["embeds", 0, "0000803f", 4, "float32"]]
    }

Tag values and embedding rows are hex. `partial_tail` may be true.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extra_keys_cli.failures import CommandError
from keying import (
    CacheSalt,
    ChunkKey,
    ExtraKey,
    KeyingError,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    PromptEmbeds,
    Tag,
    chunk_keys,
)
from protocol_v2.storage.descriptions import parse_description
from protocol_v2.storage.errors import StorageValueError

_MAKERS: dict[str, Callable[..., ExtraKey]] = {
    "mm": MultimodalItem,
    "lora": LoraAdapter,
    "salt": CacheSalt,
    "tag": lambda name, value, *start: Tag(name, bytes.fromhex(value), *start),
    "embeds": lambda offset, rows, row_bytes, dtype: PromptEmbeds(offset, bytes.fromhex(rows), row_bytes, dtype),
}
_FIELDS = {"space", "tokens", "extra_keys", "partial_tail"}


@dataclass(frozen=True, slots=True)
class KeyInputs:
    """What keys are derived from, and the keys."""

    space: KeySpace
    tokens: list[int]
    extra_keys: list[ExtraKey]
    keys: list[ChunkKey]


def read_key_inputs(source: str) -> KeyInputs:
    """Read a file, or standard input for ``-``, and derive.

    Raises:
        CommandError: not JSON, not this form, or refused by `keying`.
    """
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise CommandError(f"{source}: {error.strerror}") from None
    try:
        return _inputs(json.loads(data))
    except KeyingError as error:
        raise CommandError(f"{source}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{source}: not key inputs ({error}); see 'extra-keys explain --help' for the form"
        ) from None


def read_space(path: Path) -> KeySpace:
    """A space from a JSON file: the fields of `KeySpace`, or a store's own ``space.json``.

    Raises:
        CommandError: not such a file.
    """
    try:
        data = path.read_bytes()
        fields = json.loads(data)
        if "root" in fields:
            return parse_description(data)
        return KeySpace(fields.pop("model"), **fields)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, StorageValueError) as error:
        raise CommandError(f"{path}: not a space ({error})") from None


def _inputs(fields: Any) -> KeyInputs:
    if not isinstance(fields, dict):
        raise TypeError("wanted a JSON object")
    if unknown := set(fields) - _FIELDS:
        raise ValueError(f"unknown field {min(unknown)!r}")
    space_fields = dict(fields["space"])
    space = KeySpace(space_fields.pop("model"), **space_fields)
    extra_keys = [_extra_key(*given) for given in fields.get("extra_keys", [])]
    tokens = list(fields["tokens"])
    keys = chunk_keys(space, tokens, extra_keys, partial_tail=fields.get("partial_tail", False))
    return KeyInputs(space, tokens, extra_keys, keys)


def _extra_key(kind: str = "", *values: Any) -> ExtraKey:
    if kind not in _MAKERS:
        raise ValueError(f"an extra key begins with one of {', '.join(_MAKERS)}, and not with {kind!r}")
    return _MAKERS[kind](*values)
