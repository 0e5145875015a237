"""`SchedulerConnector`: what the connector does in vLLM's scheduler; hooks as vLLM names them, objects duck-typed."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from keying import LoraAdapter, UncacheableRequest, pack_tokens
from keying.engines import EngineInputs, UncacheableReason, from_vllm, vllm_extra_keys, vllm_tokens
from protocol_v2.connectors.chunk_news import ChunkNews
from protocol_v2.connectors.loaded_adapters import LoadedAdapters
from protocol_v2.connectors.lora_revision import AdapterRevisions
from protocol_v2.connectors.scheduler_side import SchedulerSide
from protocol_v2.connectors.worker_side import LoadTask, SaveTask
from protocol_v2.errors import ProtocolError
from protocol_v2.event_feed import EventPublisher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from keying import KeySpace
    from keying.engines import AdapterSource
    from protocol_v2.client import CacheClient
    from protocol_v2.connectors.settings import ConnectorSettings
    from protocol_v2.connectors.tracker import LoadPlan, RequestTracker
    from protocol_v2.connectors.vllm_engine import EngineShape
    from protocol_v2.connectors.worker_side import WorkerReport

log = logging.getLogger(__name__)

CLEAR_SECONDS: Final = 1.0
"""Until a clear that failed is tried again."""


@dataclass(slots=True)
class StepTasks:
    """What the workers do in a step; travels between processes.

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


@dataclass(slots=True)
class _Seen:
    """A request that the scheduler's connector knows."""

    request: Any
    n_prompt: int
    lora: tuple[AdapterSource, LoraAdapter] | None
    table: tuple[list[int], ...] = ()
    local: int = 0
    """Tokens that the engine had when it asked last, in whole blocks."""
    external: int = 0
    """Tokens that were to be loaded behind them."""
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
        self._open_saves: dict[int, int] = {}  # name -> workers that have not told of it
        self._former_saves: set[int] = set()  # handed out before the last reset
        self._to_clear = False
        self._next_clear = 0.0
        self._own_is_former = False
        self._space_told = False
        self._told: dict[str, int] = {}
        self.news = self._news(shape.settings)

    def _news(self, settings: ConnectorSettings) -> ChunkNews | None:
        """Tells routers, if the operator wants it."""
        if settings.events is None:
            return None
        publisher = EventPublisher(settings.events, settings.events_replay, spaces=[self.space])
        news = ChunkNews(publisher, self.space.root, world=self.shape.world, hide_salts=settings.hide_salts)
        self.side.missed = news.missed
        return news

    # ---- requests

    def on_new_request(self, request: Any) -> None:
        """The engine took a request."""
        self._known(request)

    def _known(self, request: Any) -> _Seen:
        seen = self._seen.get(request.request_id)
        if seen is None:
            seen = self._seen[request.request_id] = _Seen(request, request.num_prompt_tokens, None)
            self.side.admit(request.request_id, lambda: self._derive(seen))
        return seen

    def _derive(self, seen: _Seen) -> EngineInputs:
        return from_vllm(seen.request, adapter_revision=lambda source: self._revision(seen, source))

    def _revision(self, seen: _Seen, source: AdapterSource) -> str | None:
        lora = source.handle
        revision, replaced = self.adapters.use(
            source, lora.lora_int_id, reloads=bool(getattr(lora, "load_inplace", False))
        )
        if replaced:
            for request_id, other in self._seen.items():
                theirs = other.request.lora_request
                if other is not seen and theirs is not None and theirs.lora_int_id == lora.lora_int_id:
                    self.side.bypass(request_id, "adapter_changed")
        if revision is not None:
            adapter = LoraAdapter(source.name, revision)
            if seen.lora is not None and seen.lora[1] != adapter:
                raise UncacheableRequest(
                    UncacheableReason.ADAPTER_CHANGED, "the adapter's files changed in the middle of a session"
                )
            seen.lora = (source, adapter)
        return revision

    def _settle_reloads(self, scheduled: Collection[str]) -> None:
        """Requests that make the engine load their adapter anew, and begin in this step.

        vLLM takes one of the requests of a step for each adapter, and not that one's word if another's does not ask for
        a reload; then what it computes with is not known.
        """
        together: dict[int, list[_Seen]] = {}
        for request_id in scheduled:
            seen = self._seen.get(request_id)
            lora = None if seen is None else seen.request.lora_request
            if seen is not None and lora is not None:
                together.setdefault(lora.lora_int_id, []).append(seen)
        for slot, users in together.items():
            for seen in users:
                if seen.running or seen.lora is None or not self.adapters.waits(slot, seen.lora[1].revision):
                    continue
                alone = all(getattr(one.request.lora_request, "load_inplace", False) for one in users)
                if alone and self.adapters.is_current(seen.lora[0], seen.lora[1].revision):
                    self.adapters.loaded(slot)
                else:
                    self.side.bypass(seen.request.request_id, UncacheableReason.ADAPTER_CHANGED)

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
                if self.shape.drafts:
                    # a turn that ended inside accepted drafts counts the rest of them as computed: the first new tokens
                    # are then taken to have KV, and it is that of drafts
                    tracker.compute(kept, own=False)
                    self.side.counters.distrusted += 1
                for extra_key in vllm_extra_keys(request, adapter_revision=lambda source: self._revision(seen, source)):
                    tracker.add(extra_key)
            if len(request.all_token_ids) > tracker.n_tokens:
                tracker.extend(vllm_tokens(request, tracker.n_tokens))

        seen.n_prompt = request.num_prompt_tokens
        return self.side.change(request.request_id, tell)

    def request_finished(self, request: Any) -> None:
        """The request is over."""
        self._seen.pop(request.request_id, None)
        self.side.end(request.request_id)

    # ---- lookup and load

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond the engine's own, and whether between steps."""
        seen = self._known(request)
        if seen.running:
            self.side.preempt(request.request_id)
        seen.running = seen.loading = False
        seen.local, seen.external = num_computed_tokens, 0
        aligned = all(num_computed_tokens % size == 0 for size in self.shape.block_sizes)
        if self._follow(seen, request.num_computed_tokens) is None or not self.shape.loads or not aligned:
            return 0, False
        if request.skip_reading_prefix_cache or self._to_clear:
            return 0, False
        n_tokens = self.side.lookup(request.request_id, num_computed_tokens)
        return n_tokens, bool(n_tokens) and self.shape.asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
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
        seen.loading, seen.external = True, num_external_tokens
        self._loads.append(self._load_task(seen, plan, blocks.get_block_ids(), num_external_tokens))

    def _load_task(self, seen: _Seen, plan: LoadPlan | None, table: Sequence[Sequence[int]], n_tokens: int) -> LoadTask:
        """What the workers load.

        Where there is no plan the task names a lease that nobody has, so that it fails: the engine counts on these
        tokens, and only a failed load makes it compute them.
        """
        start, stop = seen.local, seen.local + n_tokens
        request_id, blocks = seen.request.request_id, self._cut(table, start, stop)
        if plan is not None:
            return LoadTask.of(plan, request_id, blocks)
        size = self.shape.settings.chunk_size
        return LoadTask(
            request_id, f"none:{request_id}", bytes(16), start // size, -(-stop // size), start, stop, blocks
        )

    def _cut(self, table: Sequence[Sequence[int]], start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(blocks[start // size : -(-stop // size)])
            for blocks, size in zip(table, self.shape.block_sizes, strict=True)
        )

    # ---- steps

    def build_connector_meta(self, scheduler_output: Any) -> StepTasks:
        """What the workers do in this step."""
        if self._to_clear and not self._former_saves and self._next_clear <= time.monotonic():
            self._clear()
        meta = StepTasks(None if self._space_told else self.space)
        self._space_told = True
        loads, self._loads = self._loads, []
        (meta.async_loads if self.shape.asynchronous else meta.loads).extend(loads)
        starts = self._take_blocks(scheduler_output)
        self._settle_reloads(starts)
        tables = getattr(scheduler_output, "kv_connector_block_state", None)
        for request_id, n_tokens in scheduler_output.num_scheduled_tokens.items():
            seen = self._seen.get(request_id)
            if seen is None or request_id not in starts:
                continue
            start = starts[request_id]
            tracker = self._follow(seen, start)
            if tracker is None:
                continue
            tracker.compute(start + n_tokens, own=seen.running or not self._rests_on_stale(seen, start))
            seen.running = True
            table = None if tables is None else tables.get_block_ids(request_id)
            if table is None:
                table = seen.table if self.shape.keeps_blocks else None
            if table is not None and self.shape.saves:
                meta.saves += self._saves(seen, table)
        return meta

    def _take_blocks(self, scheduler_output: Any) -> dict[str, int]:
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

    def _rests_on_stale(self, seen: _Seen, start: int) -> bool:
        """Whether the engine took KV from its own cache that may be of the model's or an adapter's former weights.

        Args:
            seen: a request that begins.
            start: tokens that it has: its own, perhaps with a part of a block, and what was loaded.
        """
        if max(seen.local, start - seen.external) <= 0:
            return False
        stale = self._own_is_former
        if seen.lora is not None:
            source, _ = seen.lora
            stale = stale or self.adapters.is_stale(source.name, source.path)
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
        self._open_saves[self._n_saves] = self.shape.world
        size = self.shape.settings.chunk_size
        if self.news is not None:
            tokens = pack_tokens(vllm_tokens(seen.request, plan.first * size)[: (plan.stop - plan.first) * size])
            self.news.saving(self._n_saves, plan, bytes(tokens))
        yield SaveTask.of(plan, self._n_saves, self._cut(table, plan.first * size, plan.stop * size))

    def take_report(self, report: WorkerReport) -> None:
        """What became of loads and saves."""
        if report.misfit is not None:
            self.side.stop_loading(report.misfit)
        for name, (done, failed) in report.loads.items():
            self.side.part_loaded(name, parts=done, failed=failed > 0)
        for save, (stored, lost) in report.saves.items():
            left = self._open_saves.pop(save, 0) - stored - lost
            if left > 0:
                self._open_saves[save] = left
            else:
                self._former_saves.discard(save)
        if self.news is not None:
            self.news.saved(report.saves)

    # ---- the rest

    def reset_cache(self) -> bool:
        """Forget the space: weights have changed, or somebody wants an empty cache. Whether that worked.

        Requests that stand go on without the cache. What workers still store is of the former weights: nothing is
        loaded until that is over and the space was cleared once more. Where requests keep their KV, the engine's own
        prefix cache was not emptied, and what rests on it is not saved until a reset at which none does.
        """
        self.side.forget("cache_reset")
        self._own_is_former = any(seen.request.num_computed_tokens for seen in self._seen.values())
        self._former_saves = set(self._open_saves)
        self._to_clear = True
        return self._clear()

    def _clear(self) -> bool:
        """Clear the space, and be done with it if nothing of before is still stored. Whether it was cleared."""
        try:
            cleared = self.client.clear("space")
        except ProtocolError as error:
            log.warning("the cache was not cleared, and nothing is loaded until it is: %s", error)
            self._next_clear = time.monotonic() + CLEAR_SECONDS
            return False
        log.info("cleared %d objects of the cache", cleared.objects)
        self._to_clear = bool(self._former_saves)
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
