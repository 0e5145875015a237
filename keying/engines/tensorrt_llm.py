"""TensorRT-LLM: key inputs from an ``LlmRequest``.

Read from the public source of 2026 (``_torch/pyexecutor/llm_request.py``, ``nanobind/batch_manager/bindings.cpp``,
``inputs/multimodal.py``). Where an item stands was told in three ways over time, and all are understood: one position
and length an item; flat runs with offsets for each item; a list of runs for each item. An item of several runs is one
range, their hull.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from keying.engines.adapters import AdapterRevision, AdapterSource, AdapterStart, adapter_key
from keying.engines.reading import (
    EngineInputs,
    equal_lengths,
    gathered,
    listed,
    make,
    media_item,
    optional,
    required,
    token_ids,
    whole_number,
)
from keying.engines.reasons import UncacheableReason
from keying.engines.tensors import rows_of
from keying.errors import UncacheableRequest
from keying.extra_keys import CacheSalt, ExtraKey, MultimodalItem, PromptEmbeds, Tag

_REQUEST = "tensorrt_llm LlmRequest"
_HASH_WORDS = 8
_WORD_BITS = 32

SALT_ID_TAG = "tensorrt_llm.cache_salt_id"
"""Tag of a salt of which the request holds only its 64-bit id. A kind of its own: it never equals a salt's text."""

AdapterName: TypeAlias = Callable[[Any], "str | None"]
"""The deployment-wide name of a request's adapter, from the request; its task id may differ between instances."""

_FLAT_RUNS = ("multimodal_item_run_cu_offsets", "multimodal_run_positions", "multimodal_run_lengths")
_PLAIN = ("multimodal_positions", "multimodal_lengths")

_WITHOUT_MEDIA = frozenset({"mrope_config"})
"""Entries of ``py_multimodal_data`` that text has as well, and that remain after the media were encoded."""


def from_tensorrt_llm(
    request: Any,
    *,
    adapter_revision: AdapterRevision | None = None,
    adapter_name: AdapterName | None = None,
    adapter_start: AdapterStart | None = None,
    vocab_size: int | None = None,
    absent: Collection[str] = (),
) -> EngineInputs:
    """Tokens and extra keys of a request as the executor's scheduler holds it.

    Args:
        request: ``LlmRequest``, or an object with its attributes.
        adapter_revision: says what an adapter computes, such as
            `protocol_v2.connectors.lora_revision.AdapterRevisions`.
        adapter_name: says an adapter's name; without it the name is its task id in decimal digits, 0 included.
        adapter_start: says where an activated adapter begins; without it every adapter begins at 0.
        vocab_size: of the model without the rows of a prompt-tuning table; without it a request with a table is
            uncacheable.
        absent: attributes that the connector, which knows the version, declares this TensorRT-LLM not to have.

    Raises:
        UncacheableRequest: an identity is missing or malformed; ``reason`` is an `UncacheableReason`.
    """
    _refuse_vetoes(request)
    tokens = _tokens(request)
    extra_keys = _salt(request)
    source = _adapter(request, adapter_name, absent)
    if source is not None:

        def prompt() -> tuple[int, ...]:
            n_prompt = required(request, "orig_prompt_len", _REQUEST)
            return tokens[: whole_number(n_prompt, f"{_REQUEST}.orig_prompt_len", UncacheableReason.MALFORMED_ADAPTER)]

        extra_keys.append(adapter_key(source, revision=adapter_revision, start=adapter_start, prompt=prompt))
    extra_keys += _items(request, len(tokens), absent)
    extra_keys += _table(request, tokens, vocab_size, absent)
    return gathered(tokens, extra_keys)


def _tokens(request: Any) -> tuple[int, ...]:
    """Prompt and generated tokens of the only beam."""
    get_tokens = required(request, "get_tokens", _REQUEST)
    try:
        tokens = get_tokens(0)
    except Exception as error:
        raise UncacheableRequest(
            UncacheableReason.UNREADABLE_ATTRIBUTE, f"{_REQUEST}.get_tokens: raised {type(error).__name__}"
        ) from error
    return token_ids(tokens, f"{_REQUEST}.get_tokens(0)")


def _refuse_vetoes(request: Any) -> None:
    encoder_tokens = listed(optional(request, "encoder_tokens", _REQUEST), f"{_REQUEST}.encoder_tokens")
    if encoder_tokens or optional(request, "py_encoder_input_features", _REQUEST) is not None:
        raise UncacheableRequest(
            UncacheableReason.ENCODER_INPUT, f"{_REQUEST}: has an encoder's input, which the decoder's KV depends on"
        )
    sampling = optional(request, "sampling_config", _REQUEST)
    width = None if sampling is None else optional(sampling, "beam_width", "tensorrt_llm SamplingConfig")
    if width not in (None, 1):
        raise UncacheableRequest(
            UncacheableReason.BEAM_SEARCH, f"{_REQUEST}: searches with several beams, which swap their histories"
        )
    positions = listed(optional(request, "position_ids", _REQUEST), f"{_REQUEST}.position_ids")
    if positions != list(range(len(positions))):
        raise UncacheableRequest(UncacheableReason.CUSTOM_POSITIONS, f"{_REQUEST}.position_ids: are not the plain ones")


_MISSING = object()


def _salt(request: Any) -> list[ExtraKey]:
    """The salt's text where the version has it, or else its 64-bit id under a tag of its own.

    Raises:
        UncacheableRequest: the request has neither attribute, or a malformed one.
    """
    text = optional(request, "cache_salt", _REQUEST, _MISSING)
    number = optional(request, "cache_salt_id", _REQUEST, _MISSING)
    if text is _MISSING and number is _MISSING:
        required(request, "cache_salt", _REQUEST)
    if text == "":
        raise UncacheableRequest(UncacheableReason.EMPTY_SALT, f"{_REQUEST}.cache_salt: is empty; None means no salt")
    if text is not None and text is not _MISSING:
        return [make(UncacheableReason.MALFORMED_SALT, CacheSalt, text)]
    if number is None or number is _MISSING:
        return []
    value = whole_number(number, f"{_REQUEST}.cache_salt_id", UncacheableReason.MALFORMED_SALT)
    if value >> 64:
        raise UncacheableRequest(UncacheableReason.MALFORMED_SALT, f"{_REQUEST}.cache_salt_id: wider than 64 bits")
    return [Tag(SALT_ID_TAG, value.to_bytes(8, "little"))]


def _adapter(request: Any, name_of: AdapterName | None, absent: Collection[str]) -> AdapterSource | None:
    task = required(request, "lora_task_id", _REQUEST, absent)
    path = optional(request, "py_lora_path", _REQUEST)
    if task is None:  # 0 is an adapter, None is none
        if any(optional(request, name, _REQUEST) is not None for name in ("lora_weights", "lora_config")) or path:
            raise UncacheableRequest(
                UncacheableReason.UNKNOWN_ADAPTER, f"{_REQUEST}.lora_task_id: is None, and the request has an adapter"
            )
        return None
    number = whole_number(task, f"{_REQUEST}.lora_task_id", UncacheableReason.UNKNOWN_ADAPTER)
    name: str | None = str(number)
    if name_of is not None:
        try:
            name = name_of(request)
        except UncacheableRequest:
            raise
        except Exception as error:
            raise UncacheableRequest(
                UncacheableReason.UNKNOWN_ADAPTER, f"asking for the adapter's name raised {type(error).__name__}"
            ) from error
    if not name:
        raise UncacheableRequest(UncacheableReason.UNKNOWN_ADAPTER, "the adapter's name is not known")
    return AdapterSource(name, path or None, handle=request)


def _items(request: Any, n_tokens: int, absent: Collection[str]) -> list[MultimodalItem]:
    hashes = listed(required(request, "multimodal_hashes", _REQUEST, absent), f"{_REQUEST}.multimodal_hashes")
    if not hashes:
        _refuse_unnamed_media(request)
        return []
    for name in ("multimodal_uuids", *_PLAIN):  # uuids are for display; where they stand they must match
        beside = optional(request, name, _REQUEST)
        if beside is not None:
            equal_lengths({"multimodal_hashes": hashes, name: listed(beside, f"{_REQUEST}.{name}")})
    runs = _runs(request, len(hashes))
    items = []
    for place, (words, own) in enumerate(zip(hashes, runs, strict=True)):
        where = f"{_REQUEST}.multimodal_hashes[{place}]"
        begin, end = _hull(own, where)
        items.append(media_item(_identifier(words, where), begin, end - begin, where, n_tokens))
    return items


def _refuse_unnamed_media(request: Any) -> None:
    """Media without hashes: the layout, the payload or the embedding says that there are some."""
    for name in ("multimodal_item_runs", *_FLAT_RUNS, *_PLAIN, "multimodal_uuids"):
        if listed(optional(request, name, _REQUEST), f"{_REQUEST}.{name}"):
            raise UncacheableRequest(
                UncacheableReason.MISSING_IDENTITY, f"{_REQUEST}.{name}: names media, and there are no hashes"
            )
    payload = optional(request, "py_multimodal_data", _REQUEST)
    plain = payload is None or (isinstance(payload, Mapping) and not set(payload) - _WITHOUT_MEDIA)
    if not plain or optional(request, "multimodal_embedding", _REQUEST) is not None:
        raise UncacheableRequest(
            UncacheableReason.MISSING_IDENTITY, f"{_REQUEST}: carries media, and there are no hashes"
        )


def _identifier(words: Any, where: str) -> str:
    """The 256 bits of an item's hash, as the engine's own digest: eight 32-bit words, most significant byte first."""
    values = listed(words, where)
    if len(values) != _HASH_WORDS:
        raise UncacheableRequest(
            UncacheableReason.WEAK_IDENTITY, f"{where}: {len(values)} words, wanted {_HASH_WORDS} of {_WORD_BITS} bits"
        )
    digest = b""
    for value in values:
        word = whole_number(value, where, UncacheableReason.MALFORMED_MEDIA, -(2 ** (_WORD_BITS - 1)))
        if word >> _WORD_BITS not in (0, -1):
            raise UncacheableRequest(UncacheableReason.MALFORMED_MEDIA, f"{where}: a word is wider than 32 bits")
        digest += (word % 2**_WORD_BITS).to_bytes(_WORD_BITS // 8, "big")
    return digest.hex()


_Run: TypeAlias = tuple[Any, Any]


def _runs(request: Any, n_items: int) -> list[list[_Run]]:
    """Start and length of every run of every item, by the newest layout that the request has.

    Raises:
        UncacheableRequest: a layout is there in part, or there is none.
    """
    by_item = optional(request, "multimodal_item_runs", _REQUEST)
    if by_item is not None:
        lists = listed(by_item, f"{_REQUEST}.multimodal_item_runs")
        if len(lists) != n_items:
            raise UncacheableRequest(
                UncacheableReason.UNEQUAL_LISTS,
                f"{_REQUEST}: multimodal_item_runs has {len(lists)}, multimodal_hashes has {n_items}",
            )
        return [[_run(run) for run in listed(own, f"{_REQUEST}.multimodal_item_runs")] for own in lists]
    flat = {name: optional(request, name, _REQUEST) for name in _FLAT_RUNS}
    if any(value is not None for value in flat.values()):
        return _flat_runs({name: value for name, value in flat.items() if value is not None}, n_items)
    plain = [required(request, name, _REQUEST) for name in _PLAIN]
    if any(value is None for value in plain):
        raise UncacheableRequest(
            UncacheableReason.INCOMPLETE_LAYOUT, f"{_REQUEST}: has multimodal_hashes, and not where the items stand"
        )
    positions, lengths = (listed(value, f"{_REQUEST}.{name}") for name, value in zip(_PLAIN, plain, strict=True))
    equal_lengths({_PLAIN[0]: positions, _PLAIN[1]: lengths})
    return [[run] for run in zip(positions, lengths, strict=True)]


def _run(run: Any) -> _Run:
    if hasattr(run, "prompt_start"):
        kind = "tensorrt_llm MultimodalItemRun"
        return required(run, "prompt_start", kind), required(run, "run_length", kind)
    parts = listed(run, f"{_REQUEST}.multimodal_item_runs")
    if len(parts) < 2:
        raise UncacheableRequest(
            UncacheableReason.MALFORMED_MEDIA, f"{_REQUEST}.multimodal_item_runs: a run lacks its start or length"
        )
    return parts[0], parts[1]


def _flat_runs(told: Mapping[str, Any], n_items: int) -> list[list[_Run]]:
    if len(told) != len(_FLAT_RUNS):
        raise UncacheableRequest(
            UncacheableReason.INCOMPLETE_LAYOUT,
            f"{_REQUEST}: has {', '.join(told)} of the run layout; wanted {', '.join(_FLAT_RUNS)} together",
        )
    cuts, positions, lengths = (
        [
            whole_number(value, f"{_REQUEST}.{name}", UncacheableReason.MALFORMED_MEDIA)
            for value in (told[name].tolist() if hasattr(told[name], "tolist") else listed(told[name], name))
        ]
        for name in _FLAT_RUNS
    )
    equal_lengths({"multimodal_run_positions": positions, "multimodal_run_lengths": lengths})
    if len(cuts) != n_items + 1:
        raise UncacheableRequest(
            UncacheableReason.UNEQUAL_LISTS,
            f"{_REQUEST}.multimodal_item_run_cu_offsets: {len(cuts)} offsets for {n_items} items, wanted one more",
        )
    if cuts[0] != 0 or cuts[-1] != len(positions) or any(after < before for before, after in pairwise(cuts)):
        raise UncacheableRequest(
            UncacheableReason.INCOMPLETE_LAYOUT,
            f"{_REQUEST}.multimodal_item_run_cu_offsets: do not share out the {len(positions)} runs",
        )
    runs = list(zip(positions, lengths, strict=True))
    return [runs[first:stop] for first, stop in pairwise(cuts)]


def _hull(runs: Sequence[_Run], where: str) -> tuple[int, int]:
    """From the first position of the first run to the end of the last; runs are in order and do not overlap."""
    if not runs:
        raise UncacheableRequest(UncacheableReason.INCOMPLETE_LAYOUT, f"{where}: the item stands nowhere")
    begin = end = -1
    for start, length in runs:
        first = whole_number(start, f"{where} run start", UncacheableReason.MALFORMED_MEDIA)
        width = whole_number(length, f"{where} run length", UncacheableReason.MALFORMED_MEDIA, 1)
        if first < end:
            raise UncacheableRequest(
                UncacheableReason.MALFORMED_MEDIA, f"{where}: its runs overlap or are out of order"
            )
        begin = first if begin < 0 else begin
        end = first + width
    return begin, end


def _table(
    request: Any, tokens: tuple[int, ...], vocab_size: int | None, absent: Collection[str]
) -> list[PromptEmbeds]:
    """A prompt-tuning table: token ``vocab_size + k`` takes row ``k`` of it, so each run of them is embeddings."""
    table = required(request, "prompt_embedding_table", _REQUEST, absent)
    if table is None:
        return []
    where = f"{_REQUEST}.prompt_embedding_table"
    if vocab_size is None:
        raise UncacheableRequest(
            UncacheableReason.PROMPT_TABLE, f"{where}: nothing tells its rows from tokens; hand in vocab_size"
        )
    whole_number(vocab_size, "vocab_size", UncacheableReason.PROMPT_TABLE, 1)
    rows = rows_of(table, where)
    ranges: list[tuple[int, list[bytes]]] = []
    for place, token in enumerate(tokens):
        row = token - vocab_size
        if row < 0:
            continue
        if row >= len(rows):
            raise UncacheableRequest(
                UncacheableReason.MALFORMED_EMBEDS, f"{where}: a token takes a row it does not have"
            )
        if ranges and ranges[-1][0] + len(ranges[-1][1]) == place:
            ranges[-1][1].append(rows.between(row, row + 1))
        else:
            ranges.append((place, [rows.between(row, row + 1)]))
    return [
        make(UncacheableReason.MALFORMED_EMBEDS, PromptEmbeds, place, b"".join(own), rows.row_bytes, rows.dtype)
        for place, own in ranges
    ]
