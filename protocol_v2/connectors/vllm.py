"""`ExtraKeysConnector`: vLLM's KV connector for this cache. The only file that imports vLLM.

    --kv-transfer-config '{"kv_connector": "ExtraKeysConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "protocol_v2.connectors.vllm",
                           "kv_connector_extra_config": {"address": "ipc:///run/extra-keys.sock"}}'

Theory of operation
-------------------
vLLM makes one connector in its scheduler and one in each worker. The scheduler's holds a `SchedulerSide` and looks up;
what to load and save goes to the workers as the metadata of a step; each worker's holds a `WorkerSide`, and what became
of it comes back as the worker metadata of the step's output.

* Keys come from the `Request` (`keying.engines`), remembered from admission on: `NewRequestData` has no salt.
* A preempted request asks again with all its tokens; a streaming session appends media and drops its last token.
* A load that failed is reported by blocks, or for several KV groups by request, so that the engine recomputes
  (`kv_load_failure_policy` is set to ``recompute``: a cache that is gone must not fail requests).
* The blocks of a step are asked of the scheduler where it says them: blocks that slid out of a window were given to
  other requests, and a table put together from what was appended does not know.
* Everything is a no-op where the cache cannot be used (a model that is not causal, KV that is no attention's).

Read from the released 0.18, 0.20 and 0.32 (``distributed/kv_transfer``, ``v1/core/sched``); run with 0.32 on CPU.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from keying import LoraAdapter, UncacheableRequest, pack_tokens
from keying.engines import EngineInputs, from_vllm, space_from_vllm, vllm_extra_keys, vllm_tokens
from protocol_v2.client import CacheClient
from protocol_v2.connectors.chunk_news import ChunkNews
from protocol_v2.connectors.event_feed import EventPublisher
from protocol_v2.connectors.loaded_adapters import LoadedAdapters
from protocol_v2.connectors.lora_revision import AdapterRevisions
from protocol_v2.connectors.paged import Axes, LayoutError, PagedGroup, Unit, axes_of, unit_for
from protocol_v2.connectors.scheduler_side import SchedulerSide
from protocol_v2.connectors.settings import ConnectorSettings
from protocol_v2.connectors.worker_side import LoadTask, SaveTask, WorkerReport, WorkerSide
from protocol_v2.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from keying import KeySpace
    from keying.engines import AdapterSource
    from protocol_v2.connectors.tracker import LoadPlan, RequestTracker
    from protocol_v2.foreign import ForeignPolicy

log = logging.getLogger(__name__)

STORABLE: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
"""KV whose parts belong to tokens. Recurrent state (Mamba) does not, and is not stored."""

KEEPS_BLOCKS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""KV whose blocks a request keeps to its end, so that appending gives its block table."""

BlockTable = tuple[list[int], ...]
"""For each KV group the blocks of a request, in order."""


class UnusableError(Exception):
    """The cache cannot be used by this engine; it runs as if there were none."""


# ---- what travels between the scheduler's connector and the workers'


@dataclass
class ExtraKeysMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there for the type checker
    """What the workers do in a step.

    Attributes:
        space: of all keys; in the first step only.
        loads: to do before the step computes.
        async_loads: to begin.
        saves: of what the step, or one before it, computed.
    """

    space: KeySpace | None = None
    loads: list[LoadTask] = field(default_factory=list)
    async_loads: list[LoadTask] = field(default_factory=list)
    saves: list[SaveTask] = field(default_factory=list)


@dataclass
class ExtraKeysWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """What became of it, of one worker or of several."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Several workers' reports as one."""
        if isinstance(other, ExtraKeysWorkerMetadata):
            self.report.add(other.report)
        return self


class ExtraKeysStats(KVConnectorStats):  # type: ignore[misc]  # as above
    """Counters since the last time, by name; for the engine's periodic log line."""

    def reset(self) -> None:
        """Forget."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """As they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


# ---- what a connector knows of the engine


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
        saves: this engine stores.
        loads: this engine loads.
    """

    settings: ConnectorSettings
    world: int
    rank: int
    block_sizes: tuple[int, ...]
    unit: Unit
    asynchronous: bool
    keeps_blocks: bool
    saves: bool
    loads: bool


def engine_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineShape:
    """Read it.

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
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    asynchronous = settings.load == "async" or (settings.load == "auto" and (world > 1 or len(block_sizes) > 1))
    unit = unit_for(settings.unit)
    if unit is Unit.TOKENS and _device() == "cpu":
        raise LayoutError("unit: CPU attention packs tokens of a block together; use the unit blocks")
    if len(block_sizes) > 1 and not asynchronous:
        raise LayoutError("load: with several KV groups the engine hears of failed loads only if they are async")
    return EngineShape(
        settings=settings,
        world=world,
        rank=parallel.rank % world,
        block_sizes=block_sizes,
        unit=unit,
        asynchronous=asynchronous,
        keeps_blocks=set(kinds) <= KEEPS_BLOCKS,
        saves=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
    )


def engine_space(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, shape: EngineShape) -> KeySpace:
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


def _layout_name(kv_cache_config: KVCacheConfig, shape: EngineShape) -> str:
    """What two engines must have in common to read each other's chunks, beside the space's other fields.

    From 0.30 on layers are seen as [blocks, heads, tokens, content] whatever their order in memory; before, the shape
    was the attention backend's own, so only the same release is sure to have the same.
    """
    from vllm import __version__  # noqa: PLC0415  (read here alone)

    axes = "bhnc" if hasattr(kv_cache_config, "kv_cache_layout") else f"vllm-{__version__}"
    sizes = "" if shape.unit is Unit.TOKENS else "/" + ",".join(str(size) for size in shape.block_sizes)
    return f"{shape.unit}{sizes}/{axes}/{_device()}"


def _device() -> str:
    """The platform's kind of device."""
    from vllm.platforms import current_platform  # noqa: PLC0415  (probes the machine: not before it is needed)

    return str(current_platform.device_type)


# ---- the scheduler's side


@dataclass(slots=True)
class _Seen:
    """A request that the scheduler's connector knows."""

    request: Request
    n_prompt: int
    lora: tuple[AdapterSource, LoraAdapter] | None
    table: BlockTable = ()
    local: int = 0
    """Tokens that the engine had when it asked last."""
    running: bool = False
    loading: bool = False


class SchedulerConnector:
    """What the connector does in the scheduler; hooks as vLLM names them.

    Args:
        shape: of the engine.
        space: of all keys.
        client: of the cache; closed with this.
    """

    def __init__(self, shape: EngineShape, space: KeySpace, client: CacheClient) -> None:
        self.shape = shape
        self.space = space
        self.client = client
        self.side = SchedulerSide(
            client,
            space,
            world=shape.world,
            groups=len(shape.block_sizes),
            align=math.lcm(*shape.block_sizes),
            hold=shape.world > 1,
            lookup_timeout=shape.settings.lookup_timeout,
        )
        self.adapters = LoadedAdapters(
            AdapterRevisions(shape.settings.shared_adapters, shape.settings.shared_adapter_paths)
        )
        self._seen: dict[str, _Seen] = {}
        self._loads: list[LoadTask] = []
        self._n_saves = 0
        self._space_told = False
        self._told: dict[str, int] = {}
        self.news = self._news(shape.settings)

    def _news(self, settings: ConnectorSettings) -> ChunkNews | None:
        """Tells routers, if the operator wants it."""
        if settings.events is None:
            return None
        publisher = EventPublisher(self.space, settings.events, settings.events_replay)
        news = ChunkNews(publisher, self.space.root, world=self.shape.world, hide_salts=settings.hide_salts)
        self.side.missed = news.missed
        return news

    # ---- requests

    def on_new_request(self, request: Request) -> None:
        """The engine took a request."""
        self._known(request)

    def _known(self, request: Request) -> _Seen:
        seen = self._seen.get(request.request_id)
        if seen is None:
            seen = self._seen[request.request_id] = _Seen(request, request.num_prompt_tokens, None)
            self.side.admit(request.request_id, lambda: self._derive(seen))
        return seen

    def _derive(self, seen: _Seen) -> EngineInputs:
        return from_vllm(seen.request, adapter_revision=lambda source: self._revision(seen, source))

    def _revision(self, seen: _Seen, source: AdapterSource) -> str | None:
        lora = source.handle
        revision, replaced = self.adapters.use(source, lora.lora_int_id, reloads=bool(lora.load_inplace))
        if replaced:
            for request_id, other in self._seen.items():
                theirs = other.request.lora_request
                if other is not seen and theirs is not None and theirs.lora_int_id == lora.lora_int_id:
                    self.side.bypass(request_id, "adapter_changed")
        if revision is not None:
            seen.lora = (source, LoraAdapter(source.name, revision))
        return revision

    def _follow(self, seen: _Seen, kept: int) -> RequestTracker | None:
        """Tell the tracker what is new in the request.

        Args:
            seen: the request.
            kept: tokens that a streaming session kept, if it went on since the last time.
        """
        request = seen.request
        goes_on = request.num_prompt_tokens != seen.n_prompt

        def tell(tracker: RequestTracker) -> None:
            if goes_on:
                tracker.truncate(min(kept, tracker.n_tokens))
                for extra_key in vllm_extra_keys(request, adapter_revision=lambda source: self._revision(seen, source)):
                    tracker.add(extra_key)
            if len(request.all_token_ids) > tracker.n_tokens:
                tracker.extend(vllm_tokens(request, tracker.n_tokens))

        seen.n_prompt = request.num_prompt_tokens
        return self.side.change(request.request_id, tell)

    def request_finished(self, request: Request) -> None:
        """The request is over."""
        self._seen.pop(request.request_id, None)
        self.side.end(request.request_id)

    # ---- lookup and load

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond the engine's own, and whether between steps."""
        seen = self._known(request)
        if seen.running:
            self.side.preempt(request.request_id)
        seen.running = seen.loading = False
        seen.local = num_computed_tokens
        aligned = all(num_computed_tokens % size == 0 for size in self.shape.block_sizes)
        if self._follow(seen, request.num_computed_tokens) is None or not self.shape.loads or not aligned:
            return 0, False
        if request.skip_reading_prefix_cache:
            return 0, False
        n_tokens = self.side.lookup(request.request_id, num_computed_tokens)
        return n_tokens, bool(n_tokens) and self.shape.asynchronous

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The engine has room for the request, and for what is loaded."""
        seen = self._known(request)
        if seen.loading and not num_external_tokens:
            return  # the second call for a load between steps
        try:
            plan = self.side.allocated(request.request_id, seen.local, num_external_tokens)
        except ProtocolError as error:
            log.error("the engine wants to load what was not offered: %s", error)  # noqa: TRY400  (no trace is needed)
            plan = None
        if not num_external_tokens:
            return
        seen.loading = True
        self._loads.append(self._load_task(seen, plan, blocks.get_block_ids(), num_external_tokens))

    def _load_task(self, seen: _Seen, plan: LoadPlan | None, table: Sequence[Sequence[int]], n_tokens: int) -> LoadTask:
        """What the workers load.

        Where there is no plan the task names a lease that nobody has, so that it fails: the engine counts on these
        tokens, and only a failed load makes it compute them.
        """
        start, stop = seen.local, seen.local + n_tokens
        size = self.shape.settings.chunk_size
        name, lease, first, last = f"none:{seen.request.request_id}", bytes(16), start // size, -(-stop // size)
        if plan is not None:
            name, lease, first, last = plan.name, plan.lease, plan.first, plan.stop
        return LoadTask(seen.request.request_id, name, lease, first, last, start, stop, self._cut(table, start, stop))

    def _cut(self, table: Sequence[Sequence[int]], start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(blocks[start // size : -(-stop // size)])
            for blocks, size in zip(table, self.shape.block_sizes, strict=True)
        )

    # ---- steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExtraKeysMetadata:
        """What the workers do in this step."""
        meta = ExtraKeysMetadata(None if self._space_told else self.space)
        self._space_told = True
        loads, self._loads = self._loads, []
        (meta.async_loads if self.shape.asynchronous else meta.loads).extend(loads)
        starts = self._take_blocks(scheduler_output)
        tables = getattr(scheduler_output, "kv_connector_block_state", None)
        for request_id, n_tokens in scheduler_output.num_scheduled_tokens.items():
            seen = self._seen.get(request_id)
            if seen is None or request_id not in starts:
                continue
            start = starts[request_id]
            tracker = self._follow(seen, start)
            if tracker is None:
                continue
            tracker.compute(start + n_tokens, own=seen.running or not self._rests_on_stale(seen))
            seen.running = True
            table = None if tables is None else tables.get_block_ids(request_id)
            if table is None:
                table = seen.table if self.shape.keeps_blocks else None
            if table is not None and self.shape.saves:
                meta.saves += self._saves(seen, table)
        return meta

    def _take_blocks(self, scheduler_output: SchedulerOutput) -> dict[str, int]:
        """Keep block tables, and give each request's number of tokens computed before this step."""
        starts = {}
        for new in scheduler_output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            if new.req_id in self._seen:
                self._seen[new.req_id].table = tuple(list(blocks) for blocks in new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for place, request_id in enumerate(cached.req_ids):
            starts[request_id] = cached.num_computed_tokens[place]
            seen, fresh = self._seen.get(request_id), cached.new_block_ids[place]
            if seen is None or fresh is None:
                continue
            if request_id in cached.resumed_req_ids or not seen.table:
                seen.table = tuple(list(blocks) for blocks in fresh)
            else:
                for blocks, more in zip(seen.table, fresh, strict=True):
                    blocks.extend(more)
        return starts

    def _rests_on_stale(self, seen: _Seen) -> bool:
        """Whether the engine took KV from its own cache that may be of an adapter's former weights."""
        if not seen.local or seen.lora is None:
            return False
        source, _ = seen.lora
        stale = self.adapters.is_stale(source.name, source.path)
        self.side.counters.distrusted += stale
        return stale

    def _saves(self, seen: _Seen, table: Sequence[Sequence[int]]) -> Iterable[SaveTask]:
        request_id = seen.request.request_id
        plan = self.side.take_save(request_id)
        if plan is None:
            return
        if seen.lora is not None and not self.adapters.is_current(seen.lora[0], seen.lora[1].revision):
            self.side.bypass(request_id, "adapter_changed")
            return
        self._n_saves += 1
        size = self.shape.settings.chunk_size
        if self.news is not None:
            tokens = pack_tokens(vllm_tokens(seen.request, plan.first * size)[: (plan.stop - plan.first) * size])
            self.news.saving(self._n_saves, plan, bytes(tokens))
        yield SaveTask(
            self._n_saves,
            b"".join(key.digest for key in plan.keys),
            plan.first,
            plan.stop,
            self._cut(table, plan.first * size, plan.stop * size),
            plan.after_load,
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What became of loads and saves."""
        meta = getattr(output, "kv_connector_worker_meta", None)
        if not isinstance(meta, ExtraKeysWorkerMetadata):
            return
        report = meta.report
        if report.misfit is not None:
            self.side.stop_loading(report.misfit)
        for name, (done, failed) in report.loads.items():
            self.side.part_loaded(name, parts=done, failed=failed > 0)
        if self.news is not None:
            self.news.saved(report.saves)

    # ---- the rest

    def reset_cache(self) -> bool:
        """Forget the space: weights have changed, or somebody wants an empty cache. Whether that worked."""
        try:
            cleared = self.client.clear("space")
        except ProtocolError as error:
            log.warning("the cache was not cleared: %s", error)
            return False
        log.info("cleared %d objects of the cache", cleared.objects)
        if self.news is not None:
            self.news.cleared()
        return True

    def take_stats(self) -> dict[str, int]:
        """Counters since the last time."""
        now = self.side.counters.facts()
        since = {name: count - self._told.get(name, 0) for name, count in now.items()}
        self._told = now
        return {name: count for name, count in since.items() if count}

    def shutdown(self) -> None:
        """The engine ends."""
        log.info("counters: %s", self.side.counters.facts())
        self.side.close()
        self.client.close()
        if self.news is not None:
            self.news.close()


# ---- a worker's side


class WorkerConnector:
    """What the connector does in a worker; hooks as vLLM names them.

    Args:
        shape: of the engine.
        kv_cache_config: of this worker.
        policy: gives what its client does with a server that does not know wire protocol 2; None: bypasses it.
    """

    def __init__(
        self,
        shape: EngineShape,
        kv_cache_config: KVCacheConfig,
        *,
        policy: Callable[[KeySpace], ForeignPolicy | None] = lambda _space: None,
    ) -> None:
        self.shape = shape
        self._policy = policy
        self._config = kv_cache_config
        self._groups: list[PagedGroup] = []
        self._client: CacheClient | None = None
        self._worker: WorkerSide | None = None
        self._finished: set[str] = set()
        self._failed: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV is there.

        Raises:
            LayoutError: its tensors cannot be understood.
        """
        self._groups = [self._paged(group, kv_caches) for group in self._config.kv_cache_groups]

    def _paged(self, group: Any, kv_caches: dict[str, torch.Tensor]) -> PagedGroup:
        block_size = group.kv_cache_spec.block_size
        layers: dict[str, torch.Tensor] = {}
        for name in group.layer_names:
            tensor = kv_caches.get(name)
            if tensor is not None and all(tensor.data_ptr() != one.data_ptr() for one in layers.values()):
                layers[name] = tensor
        n_blocks = self._config.num_blocks
        canonical = hasattr(self._config, "kv_cache_layout")
        axes = [
            Axes(0, 2, tensor.shape[0] // n_blocks)
            if canonical and tensor.ndim == 4
            else axes_of(tuple(tensor.shape), num_blocks=n_blocks, block_size=block_size)
            for tensor in layers.values()
        ]
        return PagedGroup(layers, axes, block_size, self.shape.settings.chunk_size, self.shape.unit)

    def start_load_kv(self, meta: ExtraKeysMetadata) -> None:
        """Load, begin to load, and write what has been fetched."""
        if meta.space is not None and self._worker is None:
            self._worker = self._make(meta.space)
        worker = self._worker
        if worker is None:
            return
        if meta.loads:
            worker.load(meta.loads)
        worker.begin_loads(meta.async_loads)
        for task, whole in worker.end_loads():
            self._finished.add(task.request_id)
            if not whole:
                self._failed.add(task.request_id)

    def _make(self, space: KeySpace) -> WorkerSide:
        settings = self.shape.settings
        self._client = CacheClient(
            settings.address,
            space,
            role=f"vllm worker {self.shape.rank}",
            timeout=settings.store_timeout,
            on_foreign=self._policy(space),
        )
        return WorkerSide(
            self._client,
            self._groups,
            world=self.shape.world,
            rank=self.shape.rank,
            chunk_size=settings.chunk_size,
            load_timeout=settings.load_timeout,
            store_timeout=settings.store_timeout,
            queue_bytes=settings.save_queue_mib << 20,
        )

    def wait_for_save(self, meta: ExtraKeysMetadata) -> None:
        """Copy what is saved."""
        if self._worker is None or not meta.saves:
            return
        self._worker.save(meta.saves)
        if self.shape.settings.wait_for_store:
            self._worker.flush(self.shape.settings.store_timeout)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose load between steps is over, and those of them whose load failed."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks that should have been loaded and were not."""
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def take_report(self) -> ExtraKeysWorkerMetadata | None:
        """What became of loads and saves; None where nothing did."""
        report = None if self._worker is None else self._worker.take_report()
        return ExtraKeysWorkerMetadata(report) if report else None

    def shutdown(self) -> None:
        """The engine ends: what is copied is stored first, within its time."""
        if self._worker is not None:
            self._worker.close(self.shape.settings.store_timeout)
        if self._client is not None:
            self._client.close()


# ---- what vLLM loads


class ExtraKeysConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not there for the type checker
    """The connector for models with one KV group; vLLM keeps hybrid models in one group for it.

    Settings: `ConnectorSettings`, in ``kv_connector_extra_config``.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        self.scheduler: SchedulerConnector | None = None
        self.worker: WorkerConnector | None = None
        try:
            shape = engine_shape(vllm_config, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                self.scheduler = self._scheduler(vllm_config, kv_cache_config, shape)
            else:
                self.worker = WorkerConnector(shape, kv_cache_config, policy=self.foreign_policy)
        except UnusableError as error:
            log.error("this engine runs without the cache: %s", error)  # noqa: TRY400  (no fault: no trace)

    def _scheduler(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, shape: EngineShape
    ) -> SchedulerConnector:
        space = engine_space(vllm_config, kv_cache_config, shape)
        policy = self.foreign_policy(space)
        client = CacheClient(shape.settings.address, space, role="vllm scheduler", on_foreign=policy)
        return SchedulerConnector(shape, space, client)

    def foreign_policy(self, space: KeySpace) -> ForeignPolicy | None:
        """What the clients do with a server that does not know wire protocol 2. For subclasses; here, bypass it."""
        del space
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is saved: a save that is lost is a miss later."""
        return False

    # ---- scheduler

    def on_new_request(self, request: Request) -> None:
        """See `KVConnectorBase_V1`."""
        if self.scheduler is not None:
            self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`."""
        if self.scheduler is None:
            return 0, False
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See `KVConnectorBase_V1`."""
        if self.scheduler is not None:
            self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See `KVConnectorBase_V1`."""
        return ExtraKeysMetadata() if self.scheduler is None else self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `KVConnectorBase_V1`."""
        if self.scheduler is not None:
            self.scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnectorBase_V1`; saves are copies by now, so blocks may go at once."""
        del block_ids
        if self.scheduler is not None:
            self.scheduler.request_finished(request)
        return False, None

    def reset_cache(self) -> bool | None:
        """See `KVConnectorBase_V1`."""
        return None if self.scheduler is None else self.scheduler.reset_cache()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """See `KVConnectorBase_V1`."""
        return None if self.scheduler is None else ExtraKeysStats(data=self.scheduler.take_stats())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """See `KVConnectorBase_V1`."""
        return ExtraKeysStats(data=data or {})

    # ---- worker

    def _meta(self) -> ExtraKeysMetadata:
        meta = self._get_connector_metadata()
        return meta if isinstance(meta, ExtraKeysMetadata) else ExtraKeysMetadata()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `KVConnectorBase_V1`."""
        if self.worker is not None:
            self.worker.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `KVConnectorBase_V1`."""
        del forward_context, kwargs
        if self.worker is not None:
            self.worker.start_load_kv(self._meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: what a step loads is there before it computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: chunks are copied whole when the step has computed."""

    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`."""
        if self.worker is not None:
            self.worker.wait_for_save(self._meta())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `KVConnectorBase_V1`."""
        del finished_req_ids
        if self.worker is None:
            return None, None
        return None, self.worker.take_finished()[0] or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `KVConnectorBase_V1`."""
        return set() if self.worker is None else self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See `KVConnectorBase_V1`."""
        return None if self.worker is None else self.worker.take_report()

    def shutdown(self) -> None:
        """See `KVConnectorBase_V1`."""
        if self.scheduler is not None:
            self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()


class ExtraKeysHybridConnector(ExtraKeysConnector, SupportsHMA):  # type: ignore[misc]  # as above
    """The connector for models with several KV groups (sliding and full attention), which keep their own blocks.

    Needs a vLLM that hears of failed loads by request (0.30 and later); loads are asynchronous.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if not hasattr(vllm_base, "KVConnectorTransferResults"):
            raise LayoutError(
                "ExtraKeysHybridConnector: this vLLM cannot be told of a failed load with several KV groups; "
                "use ExtraKeysConnector"
            )
        super().__init__(vllm_config, role, kv_cache_config)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `SupportsHMA`."""
        return self.request_finished(request, block_ids[0])

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See `KVConnectorBase_V1`."""
        del finished_req_ids
        finished, failed = (set[str](), set[str]()) if self.worker is None else self.worker.take_finished()
        return vllm_base.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """None: numbers of blocks are not unique over groups, so failures are told by request."""
        super().get_block_ids_with_load_errors()
        return set()
