"""Which encoded parts a chunk carries: the extra keys whose ranges overlap it, and no other.

`PartsIndex` checks that extra keys go together and keeps them sorted by where they begin. `PartsCursor` walks it from
chunk to chunk; a run of chunks with the same parts is found in one step, so text costs nothing.
"""

import hashlib
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from keying.encoding import (
    DOMAIN_EMBEDS,
    I64,
    MAX_ADAPTERS,
    MAX_ITEMS,
    MAX_POSITION,
    MAX_TAGS,
    U8,
    U32,
    U64,
    PartKind,
    framed,
    part,
    text,
)
from keying.errors import DuplicateExtraKeyError, ExtraKeyError, OverlappingEmbedsError, UnsupportedExtraKeyError
from keying.extra_keys import CacheSalt, ExtraKey, LoraAdapter, MultimodalItem, PromptEmbeds, Tag

Parts = tuple[bytes, ...]

_ENDLESS = MAX_POSITION + 1
_ZERO = U64.pack(0)
_offset = attrgetter("offset")
_first = attrgetter("start")


class _Item:
    """A multimodal item with the bytes of its part that do not depend on the chunk."""

    __slots__ = ("offset", "prefix", "stop", "suffix")

    def __init__(self, item: MultimodalItem) -> None:
        identifier = text(item.identifier)
        self.offset = item.offset
        self.stop = item.offset + item.length
        self.prefix = U8.pack(PartKind.MULTIMODAL) + U32.pack(len(identifier) + 16) + identifier
        self.suffix = U64.pack(item.length)


class _Lasting:
    """An adapter or a tag: from ``start`` to the end of the sequence."""

    __slots__ = ("prefix", "start")

    def __init__(self, start: int, kind: PartKind, head: bytes) -> None:
        self.start = start
        self.prefix = U8.pack(kind) + U32.pack(len(head) + 8) + head


def first_position(extra_key: ExtraKey) -> int:
    """Where the range of an extra key begins."""
    if isinstance(extra_key, LoraAdapter | Tag):
        return extra_key.start
    if isinstance(extra_key, CacheSalt):
        return 0
    return extra_key.offset


class PartsIndex:
    """The extra keys of one request, checked against each other.

    Args:
        extra_keys: in any order; their order does not show in a key.

    Raises:
        DuplicateExtraKeyError: an item, an adapter (name and revision) or a tag name twice, or two salts.
        OverlappingEmbedsError: two ranges of embeddings overlap.
        ExtraKeyError: more than 64 adapters, 64 tags or 65,536 items.
        UnsupportedExtraKeyError: something else was given as an extra key, or one extra key instead of a sequence.
    """

    __slots__ = ("_given", "_identities", "_n_adapters", "_n_items", "_n_tags", "embeds", "items", "lasting", "salt")

    def __init__(self, extra_keys: Iterable[ExtraKey]) -> None:
        self._given: set[ExtraKey] = set()
        self._identities: set[tuple[Any, ...]] = set()
        self._n_adapters = self._n_tags = self._n_items = 0
        self.salt: bytes | None = None
        self.items: list[_Item] = []
        self.lasting: list[_Lasting] = []
        self.embeds: list[PromptEmbeds] = []
        for extra_key in sorted(_checked(extra_keys), key=first_position):  # in order, so that each insertion appends
            self.add(extra_key)

    def __contains__(self, extra_key: ExtraKey) -> bool:
        """Whether an equal extra key was given."""
        if isinstance(extra_key, PromptEmbeds) and extra_key.n_rows:
            place = bisect_right(self.embeds, extra_key.offset, key=_offset)
            return bool(place) and self.embeds[place - 1] == extra_key
        return extra_key in self._given

    def add(self, extra_key: ExtraKey) -> None:
        """Take one more extra key, or raise and change nothing."""
        match _supported(extra_key):
            case MultimodalItem() as item:
                self._add_item(item)
            case LoraAdapter() as adapter:
                self._add_adapter(adapter)
            case CacheSalt() as salt:
                self._add_salt(salt)
            case PromptEmbeds() as embeds:
                self._add_embeds(embeds)
            case Tag() as tag:
                self._add_tag(tag)
        # the rows of embeddings are compared, not hashed: hashing them would cost as much as their keys
        if not isinstance(extra_key, PromptEmbeds) or not extra_key.n_rows:
            self._given.add(extra_key)

    def _claim(self, identity: tuple[Any, ...], what: str) -> None:
        if identity in self._identities:
            raise DuplicateExtraKeyError(f"extra_keys: {what} was given twice; give each once")
        self._identities.add(identity)

    def _add_item(self, item: MultimodalItem) -> None:
        if self._n_items >= MAX_ITEMS:
            raise ExtraKeyError(f"extra_keys: more than {MAX_ITEMS} multimodal items")
        self._claim((MultimodalItem, item), f"the item at offset {item.offset}, length {item.length}")
        self._n_items += 1
        if item.length:
            insort(self.items, _Item(item), key=_offset)

    def _add_adapter(self, adapter: LoraAdapter) -> None:
        if self._n_adapters >= MAX_ADAPTERS:
            raise ExtraKeyError(f"extra_keys: more than {MAX_ADAPTERS} adapters")
        self._claim((LoraAdapter, adapter.name, adapter.revision), "an adapter (name and revision)")
        self._n_adapters += 1
        head = text(adapter.name) + text(adapter.revision)
        insort(self.lasting, _Lasting(adapter.start, PartKind.LORA, head), key=_first)

    def _add_tag(self, tag: Tag) -> None:
        if self._n_tags >= MAX_TAGS:
            raise ExtraKeyError(f"extra_keys: more than {MAX_TAGS} tags")
        self._claim((Tag, tag.name), "a tag name")
        self._n_tags += 1
        insort(self.lasting, _Lasting(tag.start, PartKind.TAG, text(tag.name) + framed(tag.value)), key=_first)

    def _add_salt(self, salt: CacheSalt) -> None:
        if self.salt is not None:
            raise DuplicateExtraKeyError("extra_keys: two salts were given; a request has one")
        self.salt = part(PartKind.SALT, text(salt.value))

    def _add_embeds(self, embeds: PromptEmbeds) -> None:
        if not embeds.n_rows:
            return
        place = bisect_right(self.embeds, embeds.offset, key=_offset)
        before = self.embeds[place - 1] if place else None
        after = self.embeds[place] if place < len(self.embeds) else None
        if (before and before.stop > embeds.offset) or (after and after.offset < embeds.stop):
            raise OverlappingEmbedsError(
                f"extra_keys: embeddings [{embeds.offset}, {embeds.stop}) overlap another range of embeddings; "
                "one range for each run of rows"
            )
        self.embeds.insert(place, embeds)


def _supported(extra_key: Any) -> ExtraKey:
    if isinstance(extra_key, ExtraKey):
        return extra_key
    raise UnsupportedExtraKeyError(
        f"extra_keys: got {type(extra_key).__name__}, "
        "wanted MultimodalItem, LoraAdapter, CacheSalt, PromptEmbeds or Tag"
    )


def _checked(extra_keys: Any) -> list[ExtraKey]:
    if isinstance(extra_keys, str | bytes | ExtraKey) or not isinstance(extra_keys, Iterable):
        raise UnsupportedExtraKeyError(
            f"extra_keys: got {type(extra_keys).__name__}, wanted a sequence of extra keys; [] where there are none"
        )
    return [_supported(one) for one in extra_keys]


@dataclass(slots=True)
class PartsCursor:
    """Walks an index forward, chunk by chunk.

    After `parts` returned, ``same_until`` is a position such that every further chunk whose stop is at or before it
    carries the same parts.
    """

    index: PartsIndex
    next_item: int = 0  # first item that no chunk has reached
    active: list[_Item] = field(default_factory=list)  # items that a chunk reached and that may reach further
    next_lasting: int = 0  # first adapter or tag that begins after the start of the last chunk
    steady: list[bytes] = field(default_factory=list)  # parts that every further chunk carries
    steady_parts: Parts | None = None  # the same, sorted, made when it is asked for
    same_until: int = 0

    def __post_init__(self) -> None:
        if not self.steady and self.index.salt is not None:
            self.steady.append(self.index.salt)

    def copy(self) -> "PartsCursor":
        """A cursor at the same place that moves by itself."""
        return replace(self, active=self.active.copy(), steady=self.steady.copy())

    def parts(self, start: int, stop: int) -> Parts:
        """The encoded parts, sorted, of the positions ``[start, stop)``; ``start`` never decreases."""
        index = self.index
        lasting = index.lasting
        while self.next_lasting < len(lasting) and lasting[self.next_lasting].start <= start:
            self.steady.append(lasting[self.next_lasting].prefix + _ZERO)
            self.next_lasting += 1
            self.steady_parts = None
        if self.steady_parts is None:
            self.steady_parts = tuple(sorted(self.steady))
        items = self._item_parts(start, stop)
        varying: list[bytes] = []
        place = self.next_lasting
        while place < len(lasting) and lasting[place].start < stop:
            varying.append(lasting[place].prefix + U64.pack(lasting[place].start - start))
            place += 1
        if index.embeds:
            varying += _embeds_parts(index.embeds, start, stop)
        if varying:
            self.same_until = stop
            return tuple(sorted((*items, *self.steady, *varying)))
        if items:  # kind 1 sorts before every other kind
            self.same_until = stop
            return (*items, *self.steady_parts)
        self.same_until = self._next_change(stop)
        return self.steady_parts

    def _item_parts(self, start: int, stop: int) -> list[bytes]:
        items = self.index.items
        active = self.active
        while self.next_item < len(items) and items[self.next_item].offset < stop:
            active.append(items[self.next_item])
            self.next_item += 1
        if not active:
            return []
        if any(item.stop <= start for item in active):
            self.active = active = [item for item in active if item.stop > start]
        parts = [item.prefix + I64.pack(item.offset - start) + item.suffix for item in active]
        if len(parts) > 1:
            parts.sort()
        return parts

    def _next_change(self, stop: int) -> int:
        index = self.index
        upcoming = [_ENDLESS]
        if self.next_item < len(index.items):
            upcoming.append(index.items[self.next_item].offset)
        if self.next_lasting < len(index.lasting):
            upcoming.append(index.lasting[self.next_lasting].start)
        place = bisect_right(index.embeds, stop - 1, key=_offset)
        if place < len(index.embeds):
            upcoming.append(index.embeds[place].offset)
        return min(upcoming)


def _embeds_parts(embeds: list[PromptEmbeds], start: int, stop: int) -> list[bytes]:
    """Parts of the embedding rows in ``[start, stop)``; ranges that touch, of equal dtype and row size, are one."""
    parts: list[bytes] = []
    nearest = max(bisect_right(embeds, start, key=_offset) - 1, 0)
    run: tuple[int, int, Any] | None = None  # first position, one past the last, hasher
    previous: PromptEmbeds | None = None
    for place in range(nearest, len(embeds)):
        piece = embeds[place]
        if piece.offset >= stop:
            break
        if piece.stop <= start:
            continue
        low, high = max(piece.offset, start), min(piece.stop, stop)
        merges = (
            previous is not None
            and previous.stop == piece.offset
            and (previous.dtype, previous.row_bytes) == (piece.dtype, piece.row_bytes)
        )
        if run is not None and merges:
            first, _, hasher = run
        else:
            if run is not None:
                parts.append(_embeds_part(run, start))
            first, hasher = low, hashlib.sha256(DOMAIN_EMBEDS + text(piece.dtype) + U32.pack(piece.row_bytes))
        rows = memoryview(piece.rows)
        hasher.update(rows[(low - piece.offset) * piece.row_bytes : (high - piece.offset) * piece.row_bytes])
        run, previous = (first, high, hasher), piece
    if run is not None:
        parts.append(_embeds_part(run, start))
    return parts


def _embeds_part(run: tuple[int, int, Any], start: int) -> bytes:
    first, stop, hasher = run
    return part(PartKind.EMBEDS, U64.pack(first - start) + U64.pack(stop - first) + framed(hasher.digest()))
