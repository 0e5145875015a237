"""The extra keys that vLLM itself would put on each of its blocks, from ours.

For routers and tests that hold vLLM's block hashes beside our keys. It goes one way and only for requests that vLLM can
hold: what has no place in vLLM's tuples is refused, never left out.

Source: vLLM 0.33 ``v1/core/kv_cache_utils.py``; the values in tests/vectors/vllm-0.33-blocks.json.
"""

import hashlib
from collections.abc import Iterable
from typing import TypeAlias

from keying.encoding import MAX_CHUNK_SIZE, MAX_POSITION, checked_int
from keying.errors import ExtraKeyError
from keying.extra_keys import CacheSalt, ExtraKey, LoraAdapter, MultimodalItem, PromptEmbeds
from keying.parts import PartsIndex

BlockExtraKeys: TypeAlias = tuple[tuple[object, ...], ...] | None
"""``("lora", name, path)``, ``("mm", identifier, offset - block_start)``, ``("cache_salt", salt)`` and
``("prompt_embeds", digest)`` in this order, or None for a block without any."""

EventExtraKeys: TypeAlias = tuple[object, ...] | None
"""The untagged form of KV events: bare name, ``(identifier, offset - block_start)``, bare salt, bare digest."""


def to_vllm_extra_keys(
    extra_keys: Iterable[ExtraKey], *, n_tokens: int, block_size: int, lora_path: str | None = None
) -> list[BlockExtraKeys]:
    """The extra keys of each full block, as vLLM 0.33 makes them.

    Args:
        extra_keys: of one request.
        n_tokens: tokens of the request, prompt and generated.
        block_size: vLLM's, in tokens.
        lora_path: the path under which this engine loaded the adapter; vLLM hashes it, schema 2 does not.

    Returns:
        ``n_tokens // block_size`` entries.

    Raises:
        ExtraKeyError: something that vLLM's blocks cannot hold: a tag, several adapters, an adapter that begins in the
            prompt or whose path was not given, embeddings mixed with tokens.
    """
    count = checked_int(n_tokens, "n_tokens", 0, MAX_POSITION, error=ExtraKeyError)
    size = checked_int(block_size, "block_size", 1, MAX_CHUNK_SIZE, error=ExtraKeyError)
    given = tuple(extra_keys)
    PartsIndex(given)  # refuses what does not go together
    lora = _lora(given, lora_path)
    items = sorted((one for one in given if isinstance(one, MultimodalItem)), key=lambda one: one.offset)
    salts = tuple(("cache_salt", one.value) for one in given if isinstance(one, CacheSalt))
    embeds = _whole_prompt_rows(given)
    blocks: list[BlockExtraKeys] = []
    first = 0
    for start in range(0, count - size + 1, size):
        stop = start + size
        while first < len(items) and items[first].offset + items[first].length <= start:
            first += 1
        media = tuple(
            ("mm", item.identifier, item.offset - start)
            for item in items[first:]
            if max(item.offset, start) < min(item.offset + item.length, stop)
        )
        rows = () if embeds is None else (("prompt_embeds", _digest(embeds, start, stop)),)
        blocks.append((*lora, *media, *(salts if start == 0 else ()), *rows) or None)
    return blocks


def to_vllm_event_extra_keys(blocks: Iterable[BlockExtraKeys]) -> list[EventExtraKeys]:
    """The same blocks in the untagged form of KV events, in which an adapter's path is gone.

    Args:
        blocks: from `to_vllm_extra_keys`.
    """
    return [None if block is None else tuple(_untagged(one) for one in block) for block in blocks]


def _untagged(one: tuple[object, ...]) -> object:
    return one[1:] if one[0] == "mm" else one[1]


def _lora(extra_keys: tuple[ExtraKey, ...], path: str | None) -> tuple[tuple[object, ...], ...]:
    adapters = [one for one in extra_keys if isinstance(one, LoraAdapter)]
    if not all(isinstance(one, LoraAdapter | MultimodalItem | CacheSalt | PromptEmbeds) for one in extra_keys):
        raise ExtraKeyError("extra_keys: a tag has no place in vLLM's blocks")
    if not adapters:
        return ()
    if len(adapters) > 1 or adapters[0].start:
        raise ExtraKeyError("extra_keys: vLLM's blocks hold one adapter, from position 0 on")
    if not path:
        raise ExtraKeyError("lora_path: vLLM hashes the adapter's path; hand in the one this engine loaded it from")
    return (("lora", adapters[0].name, path),)


def _whole_prompt_rows(extra_keys: tuple[ExtraKey, ...]) -> list[PromptEmbeds] | None:
    """Rows from position 0 on without a gap: vLLM hashes the rows of every position, which only then are all here."""
    ranges = sorted(
        (one for one in extra_keys if isinstance(one, PromptEmbeds) and one.n_rows), key=lambda one: one.offset
    )
    if not ranges:
        return None
    reached = 0
    for one in ranges:
        if one.offset != reached:
            raise ExtraKeyError(
                "extra_keys: vLLM also hashes the rows of token positions, which extra keys do not hold"
            )
        reached = one.stop
    return ranges


def _digest(ranges: list[PromptEmbeds], start: int, stop: int) -> bytes:
    """SHA-256 over the rows of a block; over nothing behind the prompt."""
    hasher = hashlib.sha256()
    for one in ranges:
        begin, end = max(one.offset, start) - one.offset, min(one.stop, stop) - one.offset
        if begin < end:
            hasher.update(one.rows[begin * one.row_bytes : end * one.row_bytes])
    return hasher.digest()
