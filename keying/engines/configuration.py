"""From an engine's configuration to the attributes of a `KeySpace`.

A value that cannot be read is an error, not an omission: two deployments that differ in it would share keys. Each value
becomes one canonical text, the same for equal values in every process and version:

* JSON with sorted names, no blanks and ASCII escapes; None is ``null``;
* a float that is a whole number is written as that number (``10000.0`` is ``10000``), other floats as Python's shortest
  form that reads back the same; infinities and NaN are refused;
* tuples are lists; an enum member is its value; an element type is its name (``bfloat16``);
* a dataclass or a pydantic model is the mapping of its fields; names are text;
* sets, functions and other objects are refused, because they have no order or no content to read;
* a text longer than 4096 bytes is replaced by ``sha256:<hex>`` over it, which is the text of no value.

Source: docs/engines.md, "Space".
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from keying.encoding import MAX_TEXT_BYTES, U32, text
from keying.engines.reading import optional
from keying.engines.reasons import UncacheableReason
from keying.engines.tensors import dtype_name
from keying.errors import SpaceError, UncacheableRequest

_ABSENT = object()
_DEEPEST = 32
"""Levels of nesting in a configuration value; more is no configuration."""

_EXACT = 2**53
"""Whole floats up to here are exact integers."""

DTYPE_NAMES: Mapping[str, str] = {
    "half": "float16",
    "float": "float32",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""One name for each element type that engines call by several. Platforms with another 8-bit float (``float8_e4m3fnuz``)
hand in ``kv_dtype``: the configuration does not tell them apart."""

ROPE_FIELDS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_dim",
    "rotary_emb_base",
    "position_embedding_type",
    "alibi",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
"""Fields of a model configuration that say how positions enter KV. A model has those that apply to it."""

DOMAIN_GROUPS = text("xk2/kv-groups")


def space_error(message: str) -> SpaceError:
    """The refusal of a configuration value."""
    return SpaceError(message)


def setting(owner: Any, name: str, engine: str, absent: Collection[str]) -> Any:
    """A configuration value that the engine is known to have; None where it is declared absent.

    Raises:
        SpaceError: it is not there, or reading it raised.
    """
    try:
        value = optional(owner, name, engine, _ABSENT)
    except UncacheableRequest as error:
        raise SpaceError(str(error)) from error
    if value is not _ABSENT:
        return value
    if name in absent:
        return None
    raise SpaceError(
        f"{engine}.{name}: not there on {type(owner).__name__}; this engine version is not known, or its connector "
        "must declare the attribute absent"
    )


def known(value: Any, where: str) -> Any:
    """A value that must not be None.

    Raises:
        SpaceError: it is.
    """
    if value is None:
        raise SpaceError(f"{where}: is None, so it cannot be read; hand in the engine's resolved configuration")
    return value


def whole_setting(value: Any, name: str) -> int:
    """A positive int from a configuration.

    Raises:
        SpaceError: anything else, so also a size that the engine has not chosen yet.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpaceError(f"{name}: got {type(value).__name__}, wanted a positive int that the engine has resolved")
    return value


def canonical_text(value: Any, where: str) -> str:
    """The one text of a configuration value, by the rules at the top of this module.

    Raises:
        SpaceError: the value has no canonical text.
    """
    told = json.dumps(_plain(value, where, _DEEPEST), sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(told) > MAX_TEXT_BYTES:  # ASCII: characters are bytes
        return f"sha256:{hashlib.sha256(told.encode()).hexdigest()}"
    return told


def _plain(value: Any, where: str, levels: int) -> Any:
    if levels == 0:
        raise SpaceError(f"{where}: nested more than {_DEEPEST} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, where, levels - 1)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(value, where)
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise SpaceError(f"{where}: a name in it is not text")
        return {str(name): _plain(one, f"{where}.{name}", levels - 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, where, levels - 1) for one in value]
    if type(value).__name__ == "dtype":
        return dtype_name(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain({one.name: getattr(value, one.name) for one in fields(value)}, where, levels - 1)
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump(), where, levels - 1)
    raise SpaceError(f"{where}: got {type(value).__name__}, which has no canonical text; hand in plain values")


def _number(value: float, where: str) -> int | float:
    if not math.isfinite(value):
        raise SpaceError(f"{where}: is not a finite number")
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


def rope_text(*configs: Any) -> str:
    """How positions enter KV, from a model's text configuration and its whole configuration.

    Raises:
        SpaceError: a field has no canonical text.
    """
    found: dict[str, Any] = {}
    for config in configs:
        for name in ROPE_FIELDS:
            value = setting(config, name, "model configuration", ROPE_FIELDS)
            if value is not None:
                found.setdefault(name, value)
    if "rope_parameters" in found:  # newer configurations give the same once more under the older name
        found.pop("rope_scaling", None)
    return canonical_text(found, "rope")


def model_revision_of(hf_config: Any, revision: Any) -> str:
    """The commit that the weights were loaded at, or else what the configuration asks for; empty where it asks nothing.

    Raises:
        SpaceError: a revision that is not text.
    """
    commit = setting(hf_config, "_commit_hash", "model configuration", ("_commit_hash",))
    for value in (commit, revision):
        if isinstance(value, str) and value:
            return value
    if revision is not None and not isinstance(revision, str):
        raise SpaceError(f"model revision: got {type(revision).__name__}, wanted str")
    return ""


def resolved_kv_dtype(told: str | None, configured: Any, model_dtype: str, *, scheme: bool, engine: str) -> str:
    """The element type of the cache by its one name, never ``auto``.

    Args:
        told: what the caller hands in; it wins.
        configured: what the engine's configuration says.
        model_dtype: the model's element type, which ``auto`` stands for.
        scheme: the checkpoint brings its own KV quantization, so ``auto`` may stand for that.
        engine: name of the configuration, for messages.

    Raises:
        SpaceError: it cannot be told.
    """
    value = told if told is not None else configured
    if not isinstance(value, str):
        value = dtype_name(known(value, f"{engine} KV element type"))
    if value == "auto":
        if scheme or model_dtype == "auto":
            raise SpaceError(
                f"{engine}: the KV element type is 'auto', and what it stands for is not in the configuration; hand in "
                "kv_dtype"
            )
        value = model_dtype
    return DTYPE_NAMES.get(value, value)


def brings_kv_scheme(hf_config: Any) -> bool:
    """Whether the checkpoint brings its own KV quantization, which ``auto`` then stands for."""
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    config = setting(hf_config, "quantization_config", "model configuration", ("quantization_config",))
    if config is None:
        return False
    inner = setting(config, "quantization", "model configuration", ("quantization",))
    sources = [config, *([inner] if isinstance(inner, Mapping) else [])]
    return any(setting(source, name, "model configuration", names) is not None for source in sources for name in names)


def groups_or_refused(groups: Any, wanted: str) -> list[list[str]]:
    """Ordered layer names of each KV group.

    Raises:
        SpaceError: none are given, or a name is not text.
    """
    if groups is None:
        raise SpaceError(f"kv_groups: cannot be read; hand in {wanted}")
    told: list[list[str]] = [
        list(group) if isinstance(group, Sequence) and not isinstance(group, str) else [] for group in groups
    ]
    if not told or not all(told) or not all(isinstance(name, str) and name for group in told for name in group):
        raise SpaceError("kv_groups: wanted for each group the names of its layers, in order")
    return told


def group_digest(groups: Sequence[Sequence[str]]) -> str:
    """``sha256:<hex>`` over ``text("xk2/kv-groups") || u32(n) || n x (u32(m) || m x text(name))``: order counts."""
    parts = [DOMAIN_GROUPS, U32.pack(len(groups))]
    for group in groups:
        parts.append(U32.pack(len(group)))
        parts += [text(name) for name in group]
    return f"sha256:{hashlib.sha256(b''.join(parts)).hexdigest()}"


def causal_or_refused(signs: Mapping[str, bool], *configs: Any) -> None:
    """Models whose KV depends on later positions outside of a media span have no keys.

    Attention among the positions of one media span is fine: the item's identity covers all of them.

    Args:
        signs: what speaks against it, by name.
        configs: model configurations; ``is_causal`` and ``use_bidirectional_attention`` are looked at.

    Raises:
        UncacheableRequest: the model is such a one.
    """
    found = [name for name, holds in signs.items() if holds]
    for config in configs:
        if setting(config, "is_causal", "model configuration", ("is_causal",)) is False:
            found.append("is_causal")
        if setting(config, "use_bidirectional_attention", "model configuration", ("use_bidirectional_attention",)) in (
            True,
            "all",
        ):
            found.append("use_bidirectional_attention")
    if found:
        raise UncacheableRequest(
            UncacheableReason.NON_CAUSAL,
            f"KV of this model depends on later positions or on an encoder ({', '.join(dict.fromkeys(found))}); run it "
            "without an external cache",
        )
