"""The five extra keys: what tells two requests with the same tokens apart.

A closed union. Each value checks itself when it is made, so an invalid one cannot exist; each is immutable, and equal
values are equal in every process. Positions are absolute positions of the prompt, in tokens.

Source: docs/spec/key-schema-2.md, "Parts".
"""

from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, final

from keying.encoding import (
    MAX_POSITION,
    MAX_TEXT_BYTES,
    MAX_U32,
    REQUEST_LOCAL_IDENTIFIER,
    checked_bytes,
    checked_int,
    checked_text,
)
from keying.errors import ExtraKeyError, ExtraKeyTypeError

_text = partial(checked_text, error=ExtraKeyError, type_error=ExtraKeyTypeError)
_int = partial(checked_int, error=ExtraKeyError, type_error=ExtraKeyTypeError)
_bytes = partial(checked_bytes, error=ExtraKeyError, type_error=ExtraKeyTypeError)


@final
@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, audio clip or video that stands in the prompt as placeholder tokens.

    Args:
        identifier: content identity of the item, 1 to 4096 bytes of UTF-8. Never a request-local counter.
        offset: first position of the placeholder range, ``0 <= offset <= 2**48``.
        length: tokens of the whole range, ``0 <= length`` and ``offset + length <= 2**48``; 0 covers nothing. The range
            may reach past the tokens there are.

    Raises:
        ExtraKeyError: out of bounds, or the identifier counts requests instead of content.
        ExtraKeyTypeError: not str, int, int.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("identifier", _text(self.identifier, "identifier", empty=False))
        if REQUEST_LOCAL_IDENTIFIER.search(self.identifier):
            raise ExtraKeyError(
                "identifier: counts requests and restarts with the process, so it names no content; "
                "turn on the engine's media hashing or hand in a content hash"
            )
        put("offset", _int(self.offset, "offset", 0, MAX_POSITION))
        put("length", _int(self.length, "length", 0, MAX_POSITION))
        _int(self.offset + self.length, "offset + length", 0, MAX_POSITION)


@final
@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that computes the KV from ``start`` on.

    Args:
        name: its name, 1 to 4096 bytes of UTF-8.
        revision: identity of everything that it computes (``sha256:<hex>``, and ``;scale=<hex>`` where that is not 1).
        start: first position that it touches; later than 0 for an adapter that is activated in the prompt.

    Raises:
        ExtraKeyError: out of bounds.
        ExtraKeyTypeError: not str, str, int.
    """

    name: str
    revision: str = ""
    start: int = 0

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("name", _text(self.name, "adapter name", empty=False))
        put("revision", _text(self.revision, "adapter revision", empty=True))
        put("start", _int(self.start, "start", 0, MAX_POSITION))


@final
@dataclass(frozen=True, slots=True)
class CacheSalt:
    """A tenant's salt: keys under two salts never meet. It does not show in ``repr``.

    Args:
        value: 1 to 4096 bytes of UTF-8, any characters, not normalised.

    Raises:
        ExtraKeyError: empty or too long.
        ExtraKeyTypeError: not a str.
    """

    value: str = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _text(self.value, "cache salt", empty=False))


@final
@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """A run of prompt positions whose input is embedding rows, not tokens.

    Args:
        offset: position of the first row, ``0 <= offset <= 2**48``.
        rows: the rows' bytes, C-order, little-endian; a snapshot is taken. None at all covers nothing.
        row_bytes: bytes of one row, ``1 <= row_bytes < 2**32``; divides ``len(rows)``.
        dtype: name of the element type, such as ``bfloat16``.

    Raises:
        ExtraKeyError: out of bounds, or ``row_bytes`` does not divide the rows.
        ExtraKeyTypeError: not int, bytes-like, int, str.
    """

    offset: int
    rows: bytes = field(repr=False)
    row_bytes: int
    dtype: str

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("offset", _int(self.offset, "offset", 0, MAX_POSITION))
        put("row_bytes", _int(self.row_bytes, "row_bytes", 1, MAX_U32))
        put("dtype", _text(self.dtype, "dtype", empty=False))
        put("rows", _bytes(self.rows, "rows", None))
        if len(self.rows) % self.row_bytes:
            raise ExtraKeyError(
                f"rows: got {len(self.rows)} bytes, wanted a multiple of row_bytes ({self.row_bytes}); "
                "hand in whole rows"
            )
        _int(self.stop, "offset + number of rows", 0, MAX_POSITION)

    @property
    def n_rows(self) -> int:
        """Rows, which is positions covered."""
        return len(self.rows) // self.row_bytes

    @property
    def stop(self) -> int:
        """One past the last position covered."""
        return self.offset + self.n_rows


@final
@dataclass(frozen=True, slots=True)
class Tag:
    """Anything else that changes KV from ``start`` on. The value does not show in ``repr``.

    Args:
        name: 1 to 4096 bytes of UTF-8; names that begin with ``xk.`` are reserved and refused.
        value: at most 4096 bytes.
        start: first position that it touches.

    Raises:
        ExtraKeyError: out of bounds, or a reserved name.
        ExtraKeyTypeError: not str, bytes-like, int.
    """

    name: str
    value: bytes = field(repr=False)
    start: int = 0

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("name", _text(self.name, "tag name", empty=False))
        if self.name.startswith("xk."):
            raise ExtraKeyError("tag name: names that begin with 'xk.' are reserved; choose another")
        put("value", _bytes(self.value, "tag value", MAX_TEXT_BYTES))
        put("start", _int(self.start, "start", 0, MAX_POSITION))


ExtraKey: TypeAlias = MultimodalItem | LoraAdapter | CacheSalt | PromptEmbeds | Tag
