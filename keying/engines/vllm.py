"""vLLM: key inputs from a scheduler-side ``Request``.

Read from the released 0.32 and 0.33 (``v1/request.py``, ``multimodal/inputs.py``, ``lora/request.py``). The older
parallel ``mm_hashes`` and ``mm_positions`` are understood as well. ``NewRequestData`` is no source of keys: it has no
``cache_salt``, and a request without that attribute is uncacheable.
"""

from collections.abc import Collection
from itertools import groupby
from typing import Any

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
from keying.engines.tensors import Rows, rows_of
from keying.errors import UncacheableRequest
from keying.extra_keys import CacheSalt, ExtraKey, LoraAdapter, MultimodalItem, PromptEmbeds

_REQUEST = "vllm Request"
_FEATURE = "vllm MultiModalFeatureSpec"
_RANGE = "vllm PlaceholderRange"
_LORA = "vllm LoRARequest"


def from_vllm(
    request: Any,
    *,
    adapter_revision: AdapterRevision | None = None,
    adapter_start: AdapterStart | None = None,
    implied_adapters: ImpliedAdapters | None = None,
    absent: Collection[str] = (),
) -> EngineInputs:
    """Tokens and extra keys of a request as the scheduler side of a connector sees it.

    Call it at admission, and again where the engine changes the request (streaming sessions append media); between the
    two, generated tokens are all that is new: `vllm_tokens`.

    Args:
        request: ``vllm.v1.request.Request``, or an object with its attributes.
        adapter_revision: says what the request's adapter computes, such as
            `protocol_v2.connectors.lora_revision.AdapterRevisions`; without it a request with an adapter is
            uncacheable.
        adapter_start: says where an activated adapter begins; without it every adapter begins at 0.
        implied_adapters: says which adapters the model applies because of the modalities present.
        absent: attributes that the connector, which knows the version, declares this vLLM not to have.

    Raises:
        UncacheableRequest: an identity is missing or malformed; ``reason`` is an `UncacheableReason`.
    """
    return EngineInputs(
        vllm_tokens(request),
        vllm_extra_keys(
            request,
            adapter_revision=adapter_revision,
            adapter_start=adapter_start,
            implied_adapters=implied_adapters,
            absent=absent,
        ),
    )


def vllm_tokens(request: Any, start: int = 0) -> tuple[int, ...]:
    """Prompt and generated tokens from position ``start`` on: O(new tokens) a step.

    Raises:
        UncacheableRequest: the request has no ``all_token_ids``.
    """
    tokens = required(request, "all_token_ids", _REQUEST)
    return token_ids(tokens if not start or tokens is None else tokens[start:], f"{_REQUEST}.all_token_ids")


def vllm_extra_keys(
    request: Any,
    *,
    adapter_revision: AdapterRevision | None = None,
    adapter_start: AdapterStart | None = None,
    implied_adapters: ImpliedAdapters | None = None,
    absent: Collection[str] = (),
) -> tuple[ExtraKey, ...]:
    """The extra keys alone; arguments and refusals as for `from_vllm`."""
    n_tokens = _count(required(request, "all_token_ids", _REQUEST))
    media = _media(request, n_tokens, absent)
    extra_keys: list[ExtraKey] = []
    salt = required(request, "cache_salt", _REQUEST, absent)
    if salt == "":
        raise UncacheableRequest(
            UncacheableReason.EMPTY_SALT,
            f"{_REQUEST}.cache_salt: is empty; None means no salt, and a salt has characters",
        )
    if salt is not None:
        extra_keys.append(make(UncacheableReason.MALFORMED_SALT, CacheSalt, salt))
    lora = required(request, "lora_request", _REQUEST, absent)
    if lora is not None:
        extra_keys.append(_adapter(request, lora, media, adapter_revision, adapter_start))
    for adapter in implied_keys(implied_adapters, (modality for modality, _ in media)):
        if adapter not in extra_keys:
            extra_keys.append(adapter)
    extra_keys += [item for _, item in media]
    extra_keys += _embeds(request, n_tokens, absent, parallel_lists=_has_parallel_lists(request))
    return gathered((), extra_keys).extra_keys


def _count(tokens: Any) -> int:
    try:
        return len(tokens)
    except TypeError as error:
        raise UncacheableRequest(
            UncacheableReason.MISSING_ATTRIBUTE,
            f"{_REQUEST}.all_token_ids: got {type(tokens).__name__}, wanted token ids",
        ) from error


def _has_parallel_lists(request: Any) -> bool:
    """The shape before ``mm_features``: it had no prompt embeddings either."""
    return optional(request, "mm_features", _REQUEST, _NONE) is _NONE and (
        optional(request, "mm_positions", _REQUEST, _NONE) is not _NONE
    )


_NONE = object()


def _media(request: Any, n_tokens: int, absent: Collection[str]) -> list[tuple[str, MultimodalItem]]:
    """Modality and extra key of every item."""
    positions = listed(optional(request, "mm_positions", _REQUEST), f"{_REQUEST}.mm_positions")
    hashes = listed(optional(request, "mm_hashes", _REQUEST), f"{_REQUEST}.mm_hashes")
    if _has_parallel_lists(request):
        required(request, "mm_hashes", _REQUEST)
        equal_lengths({"mm_hashes": hashes, "mm_positions": positions})
        modalities = listed(optional(request, "mm_modalities", _REQUEST), f"{_REQUEST}.mm_modalities")
        if modalities:
            equal_lengths({"mm_modalities": modalities, "mm_positions": positions})
        return [
            (
                str(modality),
                _ranged(identifier, position, f"{_REQUEST}.mm_positions[{place}]", n_tokens),
            )
            for place, (identifier, position, modality) in enumerate(
                zip(hashes, positions, modalities or [""] * len(hashes), strict=True)
            )
        ]
    features = listed(required(request, "mm_features", _REQUEST, absent), f"{_REQUEST}.mm_features")
    if hashes or positions:  # both shapes at once: they must speak of the same number of items
        equal_lengths({"mm_features": features, "mm_positions": positions or features, "mm_hashes": hashes or features})
    items = []
    for place, feature in enumerate(features):
        where = f"{_REQUEST}.mm_features[{place}]"
        identifier = required(feature, "identifier", _FEATURE)
        position = required(feature, "mm_position", _FEATURE)
        items.append((str(optional(feature, "modality", _FEATURE, "")), _ranged(identifier, position, where, n_tokens)))
    return items


def _ranged(identifier: Any, position: Any, where: str, n_tokens: int) -> MultimodalItem:
    if position is None:
        raise UncacheableRequest(UncacheableReason.MALFORMED_MEDIA, f"{where}: has no placeholder range")
    offset, length = required(position, "offset", _RANGE), required(position, "length", _RANGE)
    return media_item(identifier, offset, length, where, n_tokens)


def _adapter(
    request: Any,
    lora: Any,
    media: list[tuple[str, MultimodalItem]],
    revision: AdapterRevision | None,
    start: AdapterStart | None,
) -> LoraAdapter:
    name = required(lora, "lora_name", _LORA)
    source = AdapterSource(name, optional(lora, "lora_path", _LORA) or None, handle=lora)

    def prompt() -> tuple[int, ...]:
        n_prompt = whole_number(
            required(request, "num_prompt_tokens", _REQUEST),
            f"{_REQUEST}.num_prompt_tokens",
            UncacheableReason.MALFORMED_ADAPTER,
        )
        return vllm_tokens(request)[:n_prompt]

    # an adapter on the media encoder shows as a prefix of the identifiers; then it computes before it is activated
    on_encoder = any(item.identifier.startswith(f"{name}:") for _, item in media)
    return adapter_key(source, revision=revision, start=start, prompt=prompt, changes_items=on_encoder)


def _embeds(request: Any, n_tokens: int, absent: Collection[str], *, parallel_lists: bool) -> list[PromptEmbeds]:
    """One extra key for each run of positions whose input is a row."""
    declared = ("prompt_embeds",) if parallel_lists else ()
    value = required(request, "prompt_embeds", _REQUEST, (*absent, *declared))
    if value is None:
        return []
    rows = rows_of(value, f"{_REQUEST}.prompt_embeds")
    if len(rows) > n_tokens:
        raise UncacheableRequest(
            UncacheableReason.MALFORMED_EMBEDS, f"{_REQUEST}.prompt_embeds: {len(rows)} rows for {n_tokens} tokens"
        )
    is_token = _mask(request, rows, absent)
    ranges = []
    place = 0
    for token, run in groupby(is_token):
        width = sum(1 for _ in run)
        if not token:
            ranges.append(
                make(
                    UncacheableReason.MALFORMED_EMBEDS,
                    PromptEmbeds,
                    place,
                    rows.between(place, place + width),
                    rows.row_bytes,
                    rows.dtype,
                )
            )
        place += width
    return ranges


def _mask(request: Any, rows: Rows, absent: Collection[str]) -> list[bool]:
    """Which positions take a token. Without a mask every row is an input, if there are no prompt tokens beside it.

    Source: ``Request.__init__`` of vLLM 0.32: the mask is None unless tokens and embeddings are interleaved.
    """
    mask = optional(request, "prompt_is_token_ids", _REQUEST, _NONE)
    if (
        mask is _NONE and "prompt_is_token_ids" not in absent
    ):  # a version without mixed prompts had no prompt tokens here
        prompt = required(request, "prompt_token_ids", _REQUEST)
    else:
        prompt = optional(request, "prompt_token_ids", _REQUEST)
    if mask is None or mask is _NONE:
        if prompt is not None:
            raise UncacheableRequest(
                UncacheableReason.AMBIGUOUS_EMBEDS,
                f"{_REQUEST}: has prompt_token_ids and prompt_embeds, and no prompt_is_token_ids that tells them apart",
            )
        return [False] * len(rows)
    where = f"{_REQUEST}.prompt_is_token_ids"
    flags = mask.tolist() if hasattr(mask, "tolist") else listed(mask, where, UncacheableReason.MALFORMED_EMBEDS)
    if len(flags) != len(rows) or not all(isinstance(flag, bool) for flag in flags):
        raise UncacheableRequest(
            UncacheableReason.MALFORMED_EMBEDS, f"{where}: wanted one bool for each of the {len(rows)} rows"
        )
    return flags
