"""What a connector works with of vLLM's configuration, read by duck typing: shape of the engine, and its key space.

Read from the released 0.18, 0.20 and 0.32 (``config/``, ``v1/kv_cache_interface.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from keying import UncacheableRequest
from keying.engines import space_from_vllm
from protocol_v2.connectors.paged import LayoutError, Unit, unit_for
from protocol_v2.connectors.settings import ConnectorSettings

if TYPE_CHECKING:
    from keying import KeySpace

STORABLE: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
"""KV whose parts belong to tokens. Recurrent state (Mamba) does not, and is not stored."""

KEEPS_BLOCKS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""KV whose blocks a request keeps to its end, so that appending gives its block table."""


class UnusableError(Exception):
    """The cache cannot be used by this engine; it runs as if there were none."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The parts of the engine's configuration that a connector works with.

    Attributes:
        settings: what the operator says.
        world: workers that hold a part of each value.
        rank: this worker.
        block_sizes: of each KV group, in tokens.
        unit: how chunks are cut out of blocks.
        asynchronous: loads happen between steps.
        keeps_blocks: requests keep all their blocks.
        fails_by_request: a failed load is told by its request: numbers of blocks do not say it where there are several
            KV groups, nor where blocks that slid out of a window all have one number.
        drafts: tokens are proposed, computed and then taken or dropped.
        saves: this engine stores.
        loads: this engine loads.
        release: of vLLM.
        device: kind of the platform's device.
    """

    settings: ConnectorSettings
    world: int
    rank: int
    block_sizes: tuple[int, ...]
    unit: Unit
    asynchronous: bool
    keeps_blocks: bool
    fails_by_request: bool
    drafts: bool
    saves: bool
    loads: bool
    release: str
    device: str


def engine_shape(
    vllm_config: Any, kv_cache_config: Any, *, release: str, device: str, hears_of_requests: bool
) -> EngineShape:
    """Read it.

    Args:
        vllm_config: ``VllmConfig``.
        kv_cache_config: ``KVCacheConfig``.
        release: of vLLM.
        device: kind of the platform's device.
        hears_of_requests: this vLLM can be told of a failed load by its request.

    Raises:
        UnusableError: KV of this engine cannot be stored by tokens.
        SettingsError: the operator's settings are wrong.
        LayoutError: the settings do not go with the engine's KV.
    """
    transfer = vllm_config.kv_transfer_config
    settings = ConnectorSettings.from_mapping(transfer.kv_connector_extra_config)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (getattr(parallel, name, 1) or 1) > 1:
            raise UnusableError(f"{name} is more than 1, so a block's tokens are spread over workers")
    kinds = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", None)  # layers of one kind with sizes of their own
        kinds += [type(one).__name__ for one in (inner.values() if inner else [spec])]
    if not kinds or not set(kinds) <= STORABLE:
        raise UnusableError(f"KV of kind {', '.join(sorted(set(kinds) - STORABLE)) or 'none'} is not kept by tokens")
    block_sizes = tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
    keeps_blocks = set(kinds) <= KEEPS_BLOCKS
    fails_by_request = len(block_sizes) > 1 or not keeps_blocks
    if fails_by_request and not hears_of_requests:
        raise UnusableError("this vLLM cannot be told of a failed load of KV that slides out of a window")
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    between = _only_between_steps(vllm_config, fails_by_request=fails_by_request)
    asynchronous = settings.load == "async" or (settings.load == "auto" and (world > 1 or between is not None))
    unit = unit_for(settings.unit)
    if unit is Unit.TOKENS and device == "cpu":
        raise LayoutError("unit: CPU attention packs tokens of a block together; use the unit blocks")
    if between is not None and not asynchronous:
        raise LayoutError(f"load: got sync, but {between}; use auto or async")
    return EngineShape(
        settings=settings,
        world=world,
        rank=parallel.rank % world,
        block_sizes=block_sizes,
        unit=unit,
        asynchronous=asynchronous,
        keeps_blocks=keeps_blocks,
        fails_by_request=fails_by_request,
        drafts=getattr(vllm_config, "speculative_config", None) is not None,
        saves=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        release=release,
        device=device,
    )


def _only_between_steps(vllm_config: Any, *, fails_by_request: bool) -> str | None:
    """Why a failed load would leave wrong KV or wrong tokens if it was one of a step; None where it would not."""
    if fails_by_request:
        return "with several KV groups or a sliding window the engine hears of failed loads only if they are async"
    if getattr(vllm_config.scheduler_config, "async_scheduling", True) is not False:
        return "asynchronous scheduling takes the tokens of a step that was scheduled on a load before it failed"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages take the tokens of a step that was scheduled on a load before it failed"
    if getattr(vllm_config.cache_config, "enable_prefix_caching", True) is not False:
        return "the engine's prefix cache gives blocks to other requests before a load of the step has filled them"
    return None


def engine_space(vllm_config: Any, kv_cache_config: Any, shape: EngineShape) -> KeySpace:
    """The key space of this engine's deployment.

    Raises:
        UnusableError: the model is not causal, so its requests have no keys.
        SpaceError: a value of the configuration cannot be read.
    """
    settings = shape.settings
    try:
        space = space_from_vllm(
            vllm_config,
            chunk_size=settings.chunk_size,
            kv_cache_config=kv_cache_config,
            kv_dtype=settings.kv_dtype,
            model_revision=settings.model_revision,
            kv_layout=_layout_name(kv_cache_config, shape),
            hf_overrides=settings.hf_overrides,
        )
    except UncacheableRequest as error:
        raise UnusableError(str(error)) from error
    return space if settings.model is None else replace(space, model=settings.model)


def _layout_name(kv_cache_config: Any, shape: EngineShape) -> str:
    """What two engines must have in common to read each other's chunks, beside the space's other fields.

    From 0.30 on layers are seen as [blocks, heads, tokens, content] whatever their order in memory; before, the shape
    was the attention backend's own, so only the same release is sure to have the same.
    """
    axes = "bhnc" if hasattr(kv_cache_config, "kv_cache_layout") else f"vllm-{shape.release}"
    sizes = "" if shape.unit is Unit.TOKENS else "/" + ",".join(str(size) for size in shape.block_sizes)
    return f"{shape.unit}{sizes}/{axes}/{shape.device}"
