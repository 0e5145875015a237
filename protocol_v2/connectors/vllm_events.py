"""From vLLM's KV events to chunk events, refusing what they leave open. Nothing of vLLM is imported.

vLLM publishes the extra keys of a block without tags (``to_event_extra_keys``): the adapter's bare name, pairs
``(identifier, item start - block start)``, the bare salt, the bare digest of embedding rows, in this order. So a bare
string may be a name or a salt, an adapter has no path, an item no length, and some publishers tell no extra keys.
What follows from the rest of the event is taken; the rest is an `AmbiguousEventError`, never a guess:

    adapter     the first string of each block, if the event names the adapter and the string is that name
    salt        the one other string, in the first block of a sequence only
    item        a pair; its length is asked of whoever knows it
    rows        refused: the digest says neither element type nor shape, and is not key schema 2's
    untold      refused: no list of extra keys is not the same as none

Source: vLLM 0.33 ``distributed/kv_events.py``, ``v1/core/kv_cache_utils.py``, ``v1/core/block_pool.py``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from keying import (
    CacheSalt,
    ChunkPreimage,
    KeyingError,
    LoraAdapter,
    LoraPart,
    MultimodalItem,
    MultimodalPart,
    SaltPart,
    encode_preimage,
    pack_tokens,
)
from protocol_v2.chunk_events import AdapterPart, ChunkStored, EventError, EventPart, ItemPart, SaltedPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from keying import KeySpace

MAX_BLOCKS: Final = 1_000_000
"""Blocks remembered as parents of others; an event behind a forgotten one is refused."""

_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
"""In the order of the positional form that vLLM before 0.24 publishes."""

BlockHash: TypeAlias = bytes | int


class AmbiguousEventError(EventError):
    """An event does not say what the keys of its blocks are made of.

    Attributes:
        reason: a word for counters.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"ambiguous ({reason}): {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BlockItem:
    """A pair of an event: an item, and its start relative to the block."""

    identifier: str
    offset: int


@dataclass(frozen=True, slots=True)
class TypedBlock:
    """One block of an event, with what its extra keys are.

    Attributes:
        block_hash: vLLM's.
        parent: vLLM's hash of the block before it; None for the first of a sequence.
        tokens: of the block.
        adapter: name of the adapter; None without one.
        salt: of the sequence, in its first block; it does not print.
        items: that touch the block.
    """

    block_hash: BlockHash
    parent: BlockHash | None
    tokens: tuple[int, ...] = field(repr=False)
    adapter: str | None
    salt: str | None = field(repr=False)
    items: tuple[BlockItem, ...]


def typed_blocks(event: Any) -> list[TypedBlock]:
    """The blocks of a ``BlockStored`` event.

    Args:
        event: the decoded map, the older positional list, or an object with its attributes.

    Raises:
        AmbiguousEventError: the event leaves open what a block's extra keys are.
        EventError: it is no such event.
    """
    get = _reader(event)
    hashes, size = _list(get("block_hashes"), "block_hashes"), get("block_size")
    tokens, told = _list(get("token_ids"), "token_ids"), get("extra_keys")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise EventError(f"block_size: got {type(size).__name__}, wanted a positive int")
    if told is None:
        raise AmbiguousEventError(
            "untold", "the publisher tells no extra keys, which is not the same as that there are none"
        )
    if get("lookahead_token_ids"):
        raise AmbiguousEventError("lookahead", "extra keys of a block that looks ahead cover more than the block")
    extra_keys = _list(told, "extra_keys")
    if len(extra_keys) != len(hashes) or len(tokens) != len(hashes) * size:
        raise AmbiguousEventError(
            "sparse",
            f"{len(hashes)} hashes, {len(extra_keys)} extra keys and {len(tokens)} tokens in blocks of {size}: some "
            "blocks are left out, and nothing says which",
        )
    adapter = get("lora_name")
    if adapter is None and get("lora_id") is not None:
        raise AmbiguousEventError("unnamed_adapter", "the event has an adapter by number only")
    parent = get("parent_block_hash")
    blocks = []
    for place, (block_hash, extra) in enumerate(zip(hashes, extra_keys, strict=True)):
        adapter_name, salt, items = _parsed(extra, adapter, first=parent is None)
        span = tuple(tokens[place * size : (place + 1) * size])
        blocks.append(TypedBlock(block_hash, parent, span, adapter_name, salt, items))
        parent = block_hash
    return blocks


def _reader(event: Any) -> Callable[[str], Any]:
    if isinstance(event, Mapping):
        if event.get("type") not in {"BlockStored", None}:
            raise EventError(f"event: got {event.get('type')!r}, wanted BlockStored")
        return event.get
    if isinstance(event, list | tuple):
        if not event or event[0] != "BlockStored":
            raise EventError("event: wanted BlockStored")
        return dict(zip(_FIELDS, event[1:], strict=False)).get
    return lambda name: getattr(event, name, None)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise EventError(f"{name}: got {type(value).__name__}, wanted a list")
    return list(value)


def _parsed(extra: Any, adapter: Any, *, first: bool) -> tuple[str | None, str | None, tuple[BlockItem, ...]]:
    """Adapter, salt and items of one block."""
    left = [] if extra is None else _list(extra, "extra_keys of a block")
    if adapter is not None:
        if not left or left[0] != adapter:
            raise AmbiguousEventError(
                "adapter_missing", "the event names an adapter, and the block's extra keys do not begin with its name"
            )
        left = left[1:]
    items: list[BlockItem] = []
    salt: str | None = None
    for one in left:
        if isinstance(one, bytes | bytearray):
            raise AmbiguousEventError("embeds", "a digest of embedding rows says neither element type nor shape")
        if isinstance(one, str):
            if not first or salt is not None:
                raise AmbiguousEventError(
                    "bare_string", "a string that is neither the named adapter nor a salt, which only a first block has"
                )
            salt = one
        elif isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[0], str) and type(one[1]) is int:
            if salt is not None:
                raise AmbiguousEventError(
                    "order", "an item behind a salt: not vLLM's order, so the string may be anything"
                )
            items.append(BlockItem(one[0], one[1]))
        else:
            raise AmbiguousEventError("unknown_form", f"an extra key of type {type(one).__name__}")
    return adapter, salt, tuple(items)


@dataclass(frozen=True, slots=True)
class _End:
    """What a sequence is at the end of a block."""

    parent: bytes
    start: int
    tail: tuple[int, ...] = field(repr=False)
    salt: CacheSalt | None
    adapter: LoraAdapter | None
    items: tuple[MultimodalItem, ...]


class VllmEventKeys:
    """Chunk keys of what vLLM says that it stored.

    Args:
        space: to derive in; its chunk size need not be vLLM's block size.
        adapter: gives the adapter that a name stands for in that engine; None where that is not known.
        item_length: gives the length of an item's placeholder range by its identifier; None where that is not known.
        max_blocks: remembered as parents.
    """

    def __init__(
        self,
        space: KeySpace,
        *,
        adapter: Callable[[str], LoraAdapter | None] = lambda _name: None,
        item_length: Callable[[str], int | None] = lambda _identifier: None,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self._space = space
        self._adapter = adapter
        self._item_length = item_length
        self._max_blocks = max_blocks
        self._ends: OrderedDict[BlockHash, _End] = OrderedDict()

    def stored(self, event: Any) -> list[ChunkStored]:
        """The chunks that an event's blocks complete, with typed parts.

        Raises:
            AmbiguousEventError: a key cannot be derived without guessing; the event's blocks are not remembered.
            EventError: no such event.
        """
        found: list[ChunkStored] = []
        ends: list[tuple[BlockHash, _End]] = []
        before: _End | None = None
        for block in typed_blocks(event):
            if before is None:
                before = self._before(block)
            end = self._follow(before, block)
            try:
                chunks, end = self._cut(end)
            except KeyingError as error:
                raise EventError(f"event: no key is made of this: {error}") from error
            found += chunks
            ends.append((block.block_hash, end))
            before = end
        for block_hash, end in ends:
            self._ends[block_hash] = end
            self._ends.move_to_end(block_hash)
        while len(self._ends) > self._max_blocks:
            self._ends.popitem(last=False)
        return found

    def _before(self, block: TypedBlock) -> _End:
        if block.parent is None:
            return _End(self._space.root, 0, (), None, None, ())
        known = self._ends.get(block.parent)
        if known is None:
            raise AmbiguousEventError(
                "unknown_parent", "the blocks before it were not told, so its position is not known"
            )
        return known

    def _follow(self, before: _End, block: TypedBlock) -> _End:
        begin = before.start + len(before.tail)
        salt = CacheSalt(block.salt) if block.salt else before.salt
        adapter = before.adapter
        if block.adapter is not None and (adapter is None or adapter.name != block.adapter):
            if begin:
                raise AmbiguousEventError("adapter_changed", "the sequence goes on with another adapter")
            adapter = self._adapter(block.adapter)
            if adapter is None:
                raise AmbiguousEventError("unknown_revision", "what the adapter computes is not in the event")
        if block.adapter is None and adapter is not None:
            raise AmbiguousEventError("adapter_changed", "the sequence goes on without its adapter")
        stop = begin + len(block.tokens)
        items = {(one.identifier, one.offset): one for one in before.items}
        told = {(one.identifier, begin + one.offset) for one in block.items}
        for identifier, offset in sorted(told - items.keys()):
            items[identifier, offset] = self._item(identifier, offset)
        touching = {
            place for place, one in items.items() if max(one.offset, begin) < min(one.offset + one.length, stop)
        }
        if touching != told:
            raise AmbiguousEventError(
                "item", "by the lengths that were given, other items touch the block than it tells"
            )
        return _End(before.parent, before.start, (*before.tail, *block.tokens), salt, adapter, tuple(items.values()))

    def _item(self, identifier: str, offset: int) -> MultimodalItem:
        length = self._item_length(identifier)
        if length is None:
            raise AmbiguousEventError("unknown_length", "how long an item's placeholder range is, is not in the event")
        try:
            return MultimodalItem(identifier, offset, length)
        except KeyingError as error:
            raise AmbiguousEventError("item", str(error)) from error

    def _cut(self, end: _End) -> tuple[list[ChunkStored], _End]:
        """Whole chunks off the front."""
        size = self._space.chunk_size
        parent, start, tail, found = end.parent, end.start, end.tail, []
        while len(tail) >= size:
            tokens, tail = tail[:size], tail[size:]
            parts, told = self._parts(end, start)
            preimage = encode_preimage(ChunkPreimage(parent, tokens, tuple(parts)))
            digest = hashlib.sha256(preimage).digest()
            found.append(
                ChunkStored(
                    key=digest,
                    parent=parent,
                    start=start,
                    n_tokens=size,
                    tokens=bytes(pack_tokens(tokens)),
                    parts=tuple(told),
                )
            )
            parent, start = digest, start + size
        items = tuple(one for one in end.items if one.offset + one.length > start)
        return found, _End(parent, start, tail, end.salt, end.adapter, items)

    def _parts(self, end: _End, start: int) -> tuple[list[MultimodalPart | LoraPart | SaltPart], list[EventPart]]:
        stop = start + self._space.chunk_size
        parts: list[MultimodalPart | LoraPart | SaltPart] = []
        told: list[EventPart] = []
        for item in end.items:
            if max(item.offset, start) < min(item.offset + item.length, stop):
                parts.append(MultimodalPart(item.identifier, item.offset - start, item.length))
                told.append(ItemPart(item.identifier, item.offset - start, item.length))
        if end.adapter is not None and end.adapter.start < stop:
            begins = max(0, end.adapter.start - start)
            parts.append(LoraPart(end.adapter.name, end.adapter.revision, begins))
            told.append(AdapterPart(end.adapter.name, end.adapter.revision, begins))
        if end.salt is not None:
            parts.append(SaltPart(end.salt.value))
            told.append(SaltedPart(end.salt.value))
        return parts, told

    def forget(self, block_hashes: Sequence[BlockHash]) -> None:
        """Blocks that vLLM removed: what follows them now is refused."""
        for block_hash in block_hashes:
            self._ends.pop(block_hash, None)

    def clear(self) -> None:
        """The engine emptied its cache."""
        self._ends.clear()
