"""Reading an engine's objects by their attributes, failing closed, without importing the engine.

`EngineInputs` is what every engine's function gives. `required` and `optional` are the only ways in which the modules
beside this one look at an engine's object: what the engine is known to have and does not have is an error, never
"not used".

Source: docs/engines.md; docs/spec/key-schema-2.md §13.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar

from keying.encoding import REQUEST_LOCAL_IDENTIFIER
from keying.engines.reasons import UncacheableReason
from keying.errors import KeyingError, UncacheableRequest
from keying.extra_keys import ExtraKey, MultimodalItem
from keying.parts import PartsIndex

_T = TypeVar("_T")
_MISSING = object()


class EngineInputs(NamedTuple):
    """What a request's keys are derived from: ``tokens, extra_keys = from_vllm(request)``.

    Attributes:
        tokens: prompt and generated token ids so far; they do not print.
        extra_keys: in the order salt, adapters, items, embeddings, tags. They are checked against each other.
    """

    tokens: tuple[int, ...]
    extra_keys: tuple[ExtraKey, ...]

    def __repr__(self) -> str:
        return f"EngineInputs({len(self.tokens)} tokens, extra_keys={self.extra_keys})"


def required(owner: Any, name: str, engine: str, absent: Collection[str] = ()) -> Any:
    """An attribute (of an object) or entry (of a mapping) that the engine is known to have.

    Args:
        owner: the engine's object.
        name: the attribute.
        engine: name of the engine's type, for the message.
        absent: attributes that the caller declares this engine version not to have: they read as None.

    Raises:
        UncacheableRequest: it is not there, or reading it raised.
    """
    value = optional(owner, name, engine, _MISSING)
    if value is not _MISSING:
        return value
    if name in absent:
        return None
    raise UncacheableRequest(
        UncacheableReason.MISSING_ATTRIBUTE,
        f"{engine}.{name}: not there on {type(owner).__name__}; this engine version is not known, or its connector "
        "must declare the attribute absent",
    )


def optional(owner: Any, name: str, engine: str, default: Any = None) -> Any:
    """An attribute or entry that only some versions have: absent means that this version lacks the feature.

    Raises:
        UncacheableRequest: reading it raised.
    """
    if isinstance(owner, Mapping):
        return owner.get(name, default)
    try:
        return getattr(owner, name)
    except AttributeError:
        return default
    except Exception as error:
        raise UncacheableRequest(
            UncacheableReason.UNREADABLE_ATTRIBUTE, f"{engine}.{name}: reading it raised {type(error).__name__}"
        ) from error


def make(reason: UncacheableReason, build: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """An extra key, or the refusal of its fields turned into an uncacheable request."""
    try:
        return build(*args, **kwargs)
    except KeyingError as error:
        raise UncacheableRequest(reason, str(error)) from error


def media_item(identifier: Any, offset: Any, length: Any, where: str, n_tokens: int | None = None) -> MultimodalItem:
    """One item of a request that says it has media.

    Args:
        identifier: what the engine gives as its identity.
        offset: first prompt position.
        length: positions of the whole range, at least 1.
        where: place of the item, for the message.
        n_tokens: tokens of the request, if the item must lie within them.

    Raises:
        UncacheableRequest: no identity, a request-local one, or a range that is none.
    """
    if identifier is None or (isinstance(identifier, str) and not identifier):
        raise UncacheableRequest(
            UncacheableReason.MISSING_IDENTITY,
            f"{where}: has no identifier; turn on the engine's media hashing",
        )
    if (
        isinstance(identifier, str)
        and len(identifier) <= _LONGEST_LOCAL
        and REQUEST_LOCAL_IDENTIFIER.search(identifier)
    ):
        raise UncacheableRequest(
            UncacheableReason.REQUEST_LOCAL_IDENTITY,
            f"{where}: the identifier counts requests and names no content; turn on the engine's media hashing",
        )
    begin = whole_number(offset, f"{where} offset", UncacheableReason.MALFORMED_MEDIA)
    width = whole_number(length, f"{where} length", UncacheableReason.MALFORMED_MEDIA, 1)
    item = make(UncacheableReason.MALFORMED_MEDIA, MultimodalItem, identifier, begin, width)
    if n_tokens is not None and item.offset + item.length > n_tokens:
        raise UncacheableRequest(
            UncacheableReason.MALFORMED_MEDIA, f"{where}: reaches past the request's {n_tokens} tokens"
        )
    return item


_LONGEST_LOCAL = 4096
"""Characters. Longer identifiers are refused for their length, before the expression is tried."""


def listed(value: Any, where: str, reason: UncacheableReason = UncacheableReason.MALFORMED_MEDIA) -> list[Any]:
    """A sequence of an engine's objects as a list; None is none.

    Raises:
        UncacheableRequest: neither None nor a sequence.
    """
    if value is None:
        return []
    if isinstance(value, str | bytes | bytearray | Mapping):
        raise UncacheableRequest(reason, f"{where}: got {type(value).__name__}, wanted a list")
    try:
        return list(value)
    except Exception as error:
        raise UncacheableRequest(reason, f"{where}: got {type(value).__name__}, wanted a list") from error


def equal_lengths(lists: Mapping[str, Sequence[Any]]) -> None:
    """Lists that belong together have one length.

    Raises:
        UncacheableRequest: they do not; each is named with its length.
    """
    if len({len(one) for one in lists.values()}) > 1:
        told = ", ".join(f"{name} has {len(one)}" for name, one in lists.items())
        raise UncacheableRequest(UncacheableReason.UNEQUAL_LISTS, f"{told}; wanted one length")


def whole_number(value: Any, where: str, reason: UncacheableReason, low: int = 0) -> int:
    """An int of at least ``low``, also from another integer type (numpy's); bool is no int here.

    Raises:
        UncacheableRequest: anything else.
    """
    try:
        number = index(value)
    except Exception as error:
        raise UncacheableRequest(reason, f"{where}: got {type(value).__name__}, wanted int") from error
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise UncacheableRequest(reason, f"{where}: got bool, wanted int")
    if number < low:
        raise UncacheableRequest(reason, f"{where}: out of range, wanted at least {low}")
    return number


def gathered(tokens: tuple[int, ...], extra_keys: Iterable[ExtraKey]) -> EngineInputs:
    """Inputs whose extra keys were checked against each other.

    Raises:
        UncacheableRequest: one twice, overlapping embeddings, or too many.
    """
    together = tuple(extra_keys)
    make(UncacheableReason.CONFLICTING_KEYS, PartsIndex, together)
    return EngineInputs(tokens, together)


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """A snapshot of an engine's token ids; what they hold is checked where keys are derived.

    Raises:
        UncacheableRequest: None, or no sequence.
    """
    if value is None or isinstance(value, str | bytes | bytearray | Mapping):
        raise UncacheableRequest(
            UncacheableReason.MISSING_ATTRIBUTE, f"{where}: got {type(value).__name__}, wanted token ids"
        )
    if hasattr(value, "tolist"):  # array.array, numpy, torch: plain ints, in one go
        value = value.tolist()
    try:
        return tuple(value)
    except Exception as error:
        raise UncacheableRequest(
            UncacheableReason.UNREADABLE_ATTRIBUTE, f"{where}: reading the token ids raised {type(error).__name__}"
        ) from error
