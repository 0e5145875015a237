"""Key inputs in a JSON file: a space, tokens and extra keys, in the notation of the test vectors.

    {
      "space": {"model": "org/m", "chunk_size": 4, "kv_dtype": "bfloat16"},
      "tokens": [1, 2, 9, 9, 9, 9, 3, 4],
      "extra_keys": [["mm", "image-id", 2, 4], ["lora", "sql", "sha256:ab", 0], ["salt", "tenant-7"],
                     ["tag", "reader", "00ff", 0], ["embeds", 0, "0000803f", 4, "float32"]]
    }

Tag values and embedding rows are hex. `partial_tail` may be true.
"""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
T = TypeVar("T")


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
    name = "standard input" if source == "-" else source
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from None
    try:
        return _inputs(json.loads(data))
    except KeyingError as error:
        raise CommandError(f"{name}: {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise CommandError(f"{name}: not key inputs ({error}); see 'extra-keys explain --help' for the form") from None


def read_space(path: Path) -> KeySpace:
    """A space from a JSON file: the fields of `KeySpace`, or a store's own ``space.json``.

    Raises:
        CommandError: not such a file.
    """
    try:
        data = path.read_bytes()
        fields = json.loads(data)
        return parse_description(data) if isinstance(fields, dict) and "root" in fields else _space(fields)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError, StorageValueError) as error:
        raise CommandError(f"{path}: not a space ({error})") from None


def _inputs(fields: Any) -> KeyInputs:
    _check(fields, dict, "file")
    if unknown := set(fields) - _FIELDS:
        raise ValueError(f"unknown field {min(unknown)!r}")
    if missing := {"space", "tokens"} - set(fields):
        raise ValueError(f"field {min(missing)!r} is missing")
    space = _space(fields["space"])
    tokens, given = fields["tokens"], fields.get("extra_keys", [])
    _check(tokens, list, "tokens")
    _check(given, list, "extra_keys")
    partial_tail = fields.get("partial_tail", False)
    _check(partial_tail, bool, "partial_tail")
    extra_keys = [_extra_key(one) for one in given]
    return KeyInputs(space, tokens, extra_keys, chunk_keys(space, tokens, extra_keys, partial_tail=partial_tail))


def _space(fields: Any) -> KeySpace:
    _check(fields, dict, "space")
    return _made(KeySpace, "space", **fields)


def _extra_key(given: Any) -> ExtraKey:
    _check(given, list, "an extra key")
    kind, values = (given[0], given[1:]) if given else ("", [])
    if not isinstance(kind, str) or kind not in _MAKERS:
        raise ValueError(f"an extra key begins with one of {', '.join(_MAKERS)}, and not with {kind!r}")
    return _made(_MAKERS[kind], kind, *values)


def _made(maker: Callable[..., T], what: str, *values: Any, **named: Any) -> T:
    """What a class or function makes of these arguments, if it takes them."""
    try:
        inspect.signature(maker).bind(*values, **named)
    except TypeError as error:
        raise ValueError(f"{what}: {error}") from None
    return maker(*values, **named)


def _check(value: Any, wanted: type, what: str) -> None:
    if not isinstance(value, wanted):
        raise TypeError(f"{what}: got {_JSON_NAMES[type(value)]}, wanted {_JSON_NAMES[wanted]}")
