"""The deprecated producers: `apply_mm_hashes_to_token_ids` and `mm_hash_to_token_values`, as in LMCache 0.5.6.

They overwrite placeholder tokens with surrogate values derived from the item's identifier, so that a key over tokens
alone tells two pictures apart. Results equal the original's wherever the original is right. Where it goes wrong in
silence:

===========================================  ======================  ==============================================
input                                        LMCache 0.5.6           here
===========================================  ======================  ==============================================
lists of unequal length                      ignores the surplus     refused: an item would go un-keyed
identifier None, or an object that prints    keys on the text of it  refused: all such items would share one key, or
its address                                                          an address that is used again
negative offset                              counts from the end     refused: another span is overwritten
span of negative length past the end         ignored                 refused: the span is malformed
more than one dimension                      writes whole rows       refused
dtype that cannot hold 31 bits               rounds (float32)        refused
identifier "" or a request counter           keys on it              warns: right while there is one such item
suffix of a prompt (offsets are absolute)    overwrites other        warns where the tensor is seen to be one; a
                                             tokens, keys no item    request cut from a packed batch looks the same
===========================================  ======================  ==============================================

Refused where no caller can be right; warned where the right and the wrong call look the same. Nothing is written when
anything is refused.
"""

import warnings
from collections.abc import Iterable
from operator import index
from typing import Any, Final, TypeVar

from compat.deprecations import deprecated
from compat.errors import SpanError, SpanTypeError
from compat.v1.surrogates import SURROGATE_MAX, shared_surrogate_values
from keying.encoding import REQUEST_LOCAL_IDENTIFIER

SINCE: Final = "2.0.0"
REMOVAL: Final = "3.0.0"

_AT_CALLER: Final = 4  # the warning function, the producer, the deprecation wrapper, its caller
_EXACT_FLOATS: Final = "torch.float64"

T = TypeVar("T")


class SpanHazardWarning(UserWarning):
    """A call that is right in one reading and would serve another request's KV in the other."""


@deprecated(
    name="compat.mm_hash_to_token_values",
    since=SINCE,
    removal=REMOVAL,
    instead="keying.MultimodalItem(identifier, offset, length) in extra_keys",
)
def mm_hash_to_token_values(identifier: str, length: int) -> tuple[int, ...]:
    """The surrogate values of one item.

    Args:
        identifier: identity of the item; anything but a str goes through ``str()``.
        length: how many values, ``0 <= length``.

    Returns:
        ``length`` integers in [0, 2**31); for a shorter length, a prefix of the same values.

    Raises:
        SpanError: a negative length, None as the identifier, or one without a text of its own.

    Source: docs/spec/v1-formats.md, "Surrogate values".
    """
    return tuple(shared_surrogate_values(_identity(identifier), _length(length)))


@deprecated(
    name="compat.apply_mm_hashes_to_token_ids",
    since=SINCE,
    removal=REMOVAL,
    instead="keying.chunk_keys(space, tokens, extra_keys) with one keying.MultimodalItem for each item",
)
def apply_mm_hashes_to_token_ids(token_ids: Any, mm_hashes: Iterable[str], mm_positions: Iterable[Any]) -> Any:
    """Overwrite the placeholder spans of a prompt with the surrogate values of their items, in place.

    A span that starts at or past the end is skipped, one that reaches past the end is cut there, an empty one does
    nothing, and where two overlap the later one wins. ``is_embed`` masks are not looked at.

    Args:
        token_ids: n token ids, a one-dimensional torch tensor that holds the whole prompt or a prefix of it, of any
            integer dtype of 32 bits or more (or float64), on any device.
        mm_hashes: identifiers of the items.
        mm_positions: as many placeholder ranges, objects with ``offset`` and ``length`` in positions of the prompt.

    Returns:
        The same tensor.

    Raises:
        SpanError: see the table at the top of this module; nothing has been written.
        SpanTypeError: not a tensor, or a dtype or dimension that cannot hold a prompt.

    Source: docs/spec/v1-formats.md, "Surrogate values".
    """
    import torch  # noqa: PLC0415  (whoever has a tensor has loaded it; importing compat must not)

    n = _prompt_length(torch, token_ids)
    identifiers = _listed(mm_hashes, "mm_hashes")
    positions = _listed(mm_positions, "mm_positions")
    if len(identifiers) != len(positions):
        raise SpanError(
            f"mm_hashes, mm_positions: got {len(identifiers)} and {len(positions)}, wanted one identifier for each "
            "span; an item without its identifier would share the key of every other such item"
        )
    writes = []
    for place, (identifier, position) in enumerate(zip(identifiers, positions, strict=True)):
        offset, length = _span(position, place)
        stop = min(offset + length, n)
        if stop > offset:
            writes.append((offset, stop, _identity(identifier)))
    _warn_of_hazards(token_ids, writes)
    for start, stop, identity in writes:
        values = shared_surrogate_values(identity, stop - start)
        token_ids[start:stop] = torch.frombuffer(values, dtype=torch.int32)
    return token_ids


def _prompt_length(torch: Any, token_ids: Any) -> int:
    if not isinstance(token_ids, torch.Tensor):
        raise SpanTypeError(
            f"token_ids: got {type(token_ids).__name__}, wanted a torch tensor, which is overwritten in place; "
            "wrap it with torch.tensor or torch.from_numpy"
        )
    if token_ids.dim() != 1:
        raise SpanTypeError(f"token_ids: got {token_ids.dim()} dimensions, wanted 1; hand in one prompt at a time")
    dtype = token_ids.dtype
    exact = (
        str(dtype) == _EXACT_FLOATS
        if dtype.is_floating_point or dtype.is_complex
        else dtype != torch.bool and torch.iinfo(dtype).max >= SURROGATE_MAX
    )
    if not exact:
        raise SpanTypeError(f"token_ids: {dtype} cannot hold every 31-bit value; use torch.int64")
    return int(token_ids.size(0))


def _listed(values: Iterable[T], field: str) -> list[T]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise SpanTypeError(f"{field}: got {type(values).__name__}, wanted a list with one element for each item")
    return list(values)


def _span(position: Any, place: int) -> tuple[int, int]:
    try:
        offset, length = index(position.offset), index(position.length)
    except (AttributeError, TypeError):
        raise SpanTypeError(
            f"mm_positions[{place}]: got {type(position).__name__}, wanted an object with integers offset and length"
        ) from None
    if offset < 0:
        raise SpanError(
            f"mm_positions[{place}]: offset is {offset}, wanted 0 or more; offsets are positions of the whole prompt"
        )
    return offset, _length(length)


def _length(length: int) -> int:
    exact = index(length)
    if exact < 0:
        raise SpanError(f"length must be non-negative, got {exact}")
    return exact


def _identity(identifier: object) -> str:
    if identifier is None:
        raise SpanError("identifier: got None, wanted the item's identity; every item without one would share a key")
    kind = type(identifier)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise SpanTypeError(
            f"identifier: got {kind.__name__}, which has no text but its address; hand in its content hash"
        )
    text = str(identifier)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SpanError("identifier: has a lone surrogate, which has no UTF-8 form") from None
    return text


def _warn_of_hazards(token_ids: Any, writes: list[tuple[int, int, str]]) -> None:
    """Report what only the caller can judge, at the caller's line."""
    if not writes:
        return
    if any(not identity or REQUEST_LOCAL_IDENTIFIER.search(identity) for _, _, identity in writes):
        warnings.warn(
            "an identifier is empty or counts requests: two items share it, and their KV, sooner or later; "
            "turn on the engine's media hashing",
            SpanHazardWarning,
            stacklevel=_AT_CALLER,
        )
    base = getattr(token_ids, "_base", None)  # None in inference mode: then torch does not say
    if base is not None and base.dim() == 1 and token_ids.storage_offset() > base.storage_offset():
        warnings.warn(
            "token_ids is a slice that starts inside another tensor; offsets are positions of the whole prompt, so "
            "a suffix is overwritten in the wrong place. If this slice is one whole prompt, clone() it",
            SpanHazardWarning,
            stacklevel=_AT_CALLER,
        )
