"""SGLang: key inputs from a scheduler's ``Req``.

Read from the released 0.5.23 (``managers/schedule_batch.py``, ``lora/lora_registry.py``, ``session/``). What the engine
does to its own prefix keys is undone here:

* it overwrites the placeholder tokens of an item with pad values made from a hash; they become placeholders again;
* it joins ``lora_id`` behind ``extra_key``; they are taken apart again;
* an item's ``hash`` has 64 bits; only ``identity``, 256 bits, is taken, or what the caller's function gives.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

from keying.encoding import DIGEST_SIZE, MAX_U32
from keying.engines.adapters import (
    AdapterRevision,
    AdapterSource,
    AdapterStart,
    ImpliedAdapters,
    adapter_key,
    implied_keys,
)
from keying.engines.reading import (
    EngineInputs,
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
from keying.extra_keys import CacheSalt, ExtraKey, LoraAdapter, MultimodalItem, PromptEmbeds, Tag

_REQUEST = "sglang Req"
_INPUTS = "sglang MultimodalInputs"
_ITEM = "sglang MultimodalDataItem"
_LORA = "sglang LoRARef"

EXTRA_KEY_TAG = "sglang.extra_key"
"""Tag of the caller-defined ``extra_key``, without the adapter id that the engine joins to it."""

JOINED_EXTRA_KEY_TAG = "sglang.extra_key.whole"
"""Tag of an ``extra_key`` that does not end with the request's adapter id although there is one: taken whole, under a
name of its own, so that it never equals one that was taken apart."""

ItemIdentity: TypeAlias = Callable[[Any], "str | bytes | None"]
"""Full identity of a ``MultimodalDataItem`` that has only a short hash: text, or at least 32 bytes."""

LoraRefs: TypeAlias = Mapping[str, Any] | Callable[[str], Any]
"""From ``lora_id``, which may be new for each load, to the ``LoRARef`` of it, as in ``LoRAManager.lora_refs``."""

_PLACEHOLDER_OF = {
    "image": "im_token_id",
    "multi_images": "im_token_id",
    "video": "video_token_id",
    "audio": "audio_token_id",
}
"""Which field of ``MultimodalInputs`` names the model's placeholder token, by modality."""

_VETOES = {
    "positional_embed_overrides": UncacheableReason.EMBED_OVERRIDES,
    "token_type_ids": UncacheableReason.CUSTOM_POSITIONS,
    "multi_item_delimiter_indices": UncacheableReason.CUSTOM_POSITIONS,
    "beam_group": UncacheableReason.BEAM_SEARCH,
    "dllm_config": UncacheableReason.NON_CAUSAL,
}
"""Features under which a position's KV does not follow from its prefix. A version without the attribute lacks the
feature."""


def from_sglang(
    req: Any,
    *,
    placeholder_tokens: Mapping[str, int] | None = None,
    item_identity: ItemIdentity | None = None,
    lora_refs: LoraRefs | None = None,
    adapter_revision: AdapterRevision | None = None,
    adapter_start: AdapterStart | None = None,
    implied_adapters: ImpliedAdapters | None = None,
    absent: Collection[str] = (),
) -> EngineInputs:
    """Tokens and extra keys of a request as the scheduler holds it.

    Args:
        req: ``sglang.srt.managers.schedule_batch.Req``, or an object with its attributes.
        placeholder_tokens: the model's placeholder token by modality (``image``, ``video``, ``audio``); needed where
            the request's ``multimodal_inputs`` do not name it. It wins over what they name.
        item_identity: asked where an item has only a short hash; without it such a request is uncacheable.
        lora_refs: from ``lora_id`` to the adapter's name and path; without it a request with an adapter is uncacheable.
        adapter_revision: says what an adapter computes, such as
            `protocol_v2.connectors.lora_revision.AdapterRevisions`.
        adapter_start: says where an activated adapter begins; without it every adapter begins at 0.
        implied_adapters: says which adapters the model applies because of the modalities present.
        absent: attributes that the connector, which knows the version, declares this SGLang not to have: ``cache_salt``
            before it was apart from ``extra_key``, ``extra_key`` before there was one.

    Raises:
        UncacheableRequest: an identity is missing or malformed; ``reason`` is an `UncacheableReason`.
    """
    _refuse_vetoes(req)
    prompt = token_ids(required(req, "origin_input_ids", _REQUEST), f"{_REQUEST}.origin_input_ids")
    tokens = [*prompt, *token_ids(required(req, "output_ids", _REQUEST), f"{_REQUEST}.output_ids")]
    inputs = required(req, "multimodal_inputs", _REQUEST, absent)
    items = _items(inputs)
    extra_keys: list[ExtraKey] = _salt(req, absent)
    lora_id = required(req, "lora_id", _REQUEST, absent)
    if lora_id is not None:
        extra_keys.append(_adapter(lora_id, lora_refs, prompt, adapter_revision, adapter_start))
    for adapter in implied_keys(implied_adapters, (_modality(item) for item in items)):
        if adapter not in extra_keys:
            extra_keys.append(adapter)
    spans = []
    for place, item in enumerate(items):
        own = _spans(item, place)
        extra_keys.append(_item_key(item, own, place, item_identity))
        _set_placeholders(tokens, item, own, inputs, placeholder_tokens or {})
        spans += own
    _refuse_leftover(tokens, spans, optional(req, "vocab_size", _REQUEST))
    extra_keys += _embeds(req, len(prompt), absent)
    extra_keys += _extra_key(req, lora_id, absent)
    return gathered(tuple(tokens), extra_keys)


def _refuse_vetoes(req: Any) -> None:
    for name, reason in _VETOES.items():
        if optional(req, name, _REQUEST) is not None:
            raise UncacheableRequest(reason, f"{_REQUEST}.{name}: is set, so KV does not follow from the prefix")


def _salt(req: Any, absent: Collection[str]) -> list[ExtraKey]:
    salt = required(req, "cache_salt", _REQUEST, absent)
    if salt is None:
        return []
    if salt == "":
        raise UncacheableRequest(UncacheableReason.EMPTY_SALT, f"{_REQUEST}.cache_salt: is empty; None means no salt")
    return [make(UncacheableReason.MALFORMED_SALT, CacheSalt, salt)]


def _extra_key(req: Any, lora_id: Any, absent: Collection[str]) -> list[Tag]:
    value = required(req, "extra_key", _REQUEST, absent)
    if value is None:
        return []
    where = f"{_REQUEST}.extra_key"
    if not isinstance(value, str):
        raise UncacheableRequest(
            UncacheableReason.MALFORMED_EXTRA_KEY, f"{where}: got {type(value).__name__}, wanted str"
        )
    name = EXTRA_KEY_TAG
    if lora_id is not None:
        if value == lora_id:  # the engine joins the id to nothing where the caller gave no key
            return []
        if value.endswith(lora_id):
            value = value.removesuffix(lora_id)
        else:
            name = JOINED_EXTRA_KEY_TAG
    if not value:
        raise UncacheableRequest(UncacheableReason.MALFORMED_EXTRA_KEY, f"{where}: is empty; None means none")
    try:
        data = value.encode()
    except UnicodeEncodeError as error:
        raise UncacheableRequest(UncacheableReason.MALFORMED_EXTRA_KEY, f"{where}: has a lone surrogate") from error
    return [make(UncacheableReason.MALFORMED_EXTRA_KEY, Tag, name, data)]


def _adapter(
    lora_id: Any,
    refs: LoraRefs | None,
    prompt: tuple[int, ...],
    revision: AdapterRevision | None,
    start: AdapterStart | None,
) -> LoraAdapter:
    where = f"{_REQUEST}.lora_id"
    if not isinstance(lora_id, str) or not lora_id:
        raise UncacheableRequest(UncacheableReason.UNKNOWN_ADAPTER, f"{where}: wanted the id of a loaded adapter")
    if refs is None:
        raise UncacheableRequest(
            UncacheableReason.UNKNOWN_ADAPTER, f"{where}: names an adapter of this process only; hand in lora_refs"
        )
    try:
        ref = refs.get(lora_id) if isinstance(refs, Mapping) else refs(lora_id)
    except Exception as error:
        raise UncacheableRequest(
            UncacheableReason.UNKNOWN_ADAPTER, f"{where}: asking lora_refs raised {type(error).__name__}"
        ) from error
    if ref is None:
        raise UncacheableRequest(UncacheableReason.UNKNOWN_ADAPTER, f"{where}: lora_refs do not know the adapter")
    name, path = required(ref, "lora_name", _LORA), optional(ref, "lora_path", _LORA)
    source = AdapterSource(name, path or None, handle=ref)
    return adapter_key(source, revision=revision, start=start, prompt=lambda: prompt)


def _items(inputs: Any) -> list[Any]:
    if inputs is None:
        return []
    return listed(known_items(required(inputs, "mm_items", _INPUTS)), f"{_INPUTS}.mm_items")


def known_items(items: Any) -> Any:
    """Multimodal inputs without their list of items say that there is media, and not which.

    Raises:
        UncacheableRequest: the list is None.
    """
    if items is None:
        raise UncacheableRequest(UncacheableReason.MISSING_IDENTITY, f"{_INPUTS}.mm_items: is None")
    return items


def _modality(item: Any) -> str:
    modality = optional(item, "modality", _ITEM, "")
    return str(getattr(modality, "name", modality)).lower()


def _spans(item: Any, place: int) -> list[tuple[int, int]]:
    """Half-open runs of an item; the engine's offsets name the last position, inclusive."""
    where = f"{_INPUTS}.mm_items[{place}].offsets"
    runs = listed(required(item, "offsets", _ITEM), where)
    if not runs:
        raise UncacheableRequest(UncacheableReason.MALFORMED_MEDIA, f"{where}: says nothing of where the item stands")
    spans = []
    for run in runs:
        ends = listed(run, where)
        if len(ends) != 2:
            raise UncacheableRequest(UncacheableReason.MALFORMED_MEDIA, f"{where}: wanted pairs of first and last")
        first = whole_number(ends[0], where, UncacheableReason.MALFORMED_MEDIA)
        spans.append((first, whole_number(ends[1], where, UncacheableReason.MALFORMED_MEDIA, first) + 1))
    return spans


def _item_key(item: Any, spans: Sequence[tuple[int, int]], place: int, asked: ItemIdentity | None) -> MultimodalItem:
    """One item, one range: the hull of its runs, as its identity covers all of them."""
    where = f"{_INPUTS}.mm_items[{place}]"
    begin, end = min(first for first, _ in spans), max(stop for _, stop in spans)
    return media_item(_identity(item, asked, where), begin, end - begin, where)


def _identity(item: Any, asked: ItemIdentity | None, where: str) -> str:
    identity = optional(item, "identity", _ITEM)
    if identity is None and asked is not None:
        try:
            identity = asked(item)
        except UncacheableRequest:
            raise
        except Exception as error:
            raise UncacheableRequest(
                UncacheableReason.MISSING_IDENTITY, f"{where}: asking for its identity raised {type(error).__name__}"
            ) from error
        if isinstance(identity, str):
            return identity
    if identity is None:
        raise UncacheableRequest(
            UncacheableReason.WEAK_IDENTITY,
            f"{where}: has no identity of {DIGEST_SIZE} bytes (a 64-bit hash is none); hand in item_identity",
        )
    if not isinstance(identity, bytes | bytearray) or len(identity) < DIGEST_SIZE:
        raise UncacheableRequest(
            UncacheableReason.WEAK_IDENTITY, f"{where}: wanted an identity of {DIGEST_SIZE} bytes or more"
        )
    return identity.hex()


def _set_placeholders(
    tokens: list[int], item: Any, spans: Sequence[tuple[int, int]], inputs: Any, told: Mapping[str, int]
) -> None:
    """Pad values inside the item's runs become the model's placeholder token; row and frame separators stay."""
    pads = {*listed(optional(item, "pad_values", _ITEM), f"{_ITEM}.pad_values"), optional(item, "pad_value", _ITEM)}
    pads.discard(None)
    placeholder: int | None = None
    for begin, end in spans:
        run = tokens[begin:end]
        if pads.isdisjoint(run):
            continue
        if placeholder is None:
            placeholder = _placeholder(_modality(item), inputs, told)
        tokens[begin:end] = [placeholder if token in pads else token for token in run]


def _placeholder(modality: str, inputs: Any, told: Mapping[str, int]) -> int:
    value = told.get(modality)
    if value is None and modality in _PLACEHOLDER_OF:
        value = optional(inputs, _PLACEHOLDER_OF[modality], _INPUTS)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_U32:
        raise UncacheableRequest(
            UncacheableReason.UNKNOWN_PLACEHOLDER,
            f"{_INPUTS}: names no placeholder token for {modality or 'this modality'}; hand in placeholder_tokens",
        )
    return value


def _refuse_leftover(tokens: list[int], spans: list[tuple[int, int]], vocab_size: Any) -> None:
    """A value that no token can have, outside of every run, is the trace of an item that is not on the request."""
    known_size = isinstance(vocab_size, int) and not isinstance(vocab_size, bool) and vocab_size > 0
    limit = vocab_size if known_size else MAX_U32 + 1
    at = 0
    for begin, end in [*sorted(spans), (len(tokens), len(tokens))]:
        if _highest(tokens[at:begin]) >= limit:
            raise UncacheableRequest(
                UncacheableReason.LEFTOVER_PAD_VALUE,
                f"{_REQUEST}: a value that is no token stands outside of every media span; the request's "
                "multimodal_inputs are incomplete",
            )
        at = max(at, end)


def _highest(tokens: list[int]) -> int:
    """The greatest id; what is no integer at all is named where keys are derived."""
    try:
        return index(max(tokens, default=0))
    except TypeError:
        return 0


def _embeds(req: Any, n_prompt: int, absent: Collection[str]) -> list[PromptEmbeds]:
    """``input_embeds`` stand in for the whole prompt, whose token ids are then made up."""
    value = required(req, "input_embeds", _REQUEST, absent)
    if value is None:
        return []
    rows = rows_of(value, f"{_REQUEST}.input_embeds")
    if len(rows) != n_prompt:
        raise UncacheableRequest(
            UncacheableReason.MALFORMED_EMBEDS, f"{_REQUEST}.input_embeds: {len(rows)} rows for {n_prompt} positions"
        )
    return [make(UncacheableReason.MALFORMED_EMBEDS, PromptEmbeds, 0, rows.data, rows.row_bytes, rows.dtype)]
