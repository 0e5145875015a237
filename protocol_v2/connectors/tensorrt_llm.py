"""TensorRT-LLM's KV cache connector, over its published interface. TensorRT-LLM is not imported.

``KvCacheConnectorConfig`` names a module and two classes in it, which the engine calls with its ``TorchLlmArgs``. That
module is the operator's, since it says what the arguments do not (the space needs the model's own configuration):

    def deployment(llm_args): return Deployment(settings=..., space=..., tokens_per_block=...)

    Scheduler = partial(TensorRtScheduler, deployment)
    Worker = partial(TensorRtWorker, deployment)

The interface has no way to say that a load failed. So nothing is promised but what is here: the scheduler fetches into
memory before it answers, and the worker, in the same process, writes it. Engines of several ranks would promise for
others; there hits are not offered, and saving goes on.

Read from the public source of 1.2 (``_torch/pyexecutor/kv_cache_connector.py``); run against duck-typed requests and a
pool, not against TensorRT-LLM itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from keying.engines import EngineInputs, from_tensorrt_llm
from protocol_v2.client import CacheClient
from protocol_v2.connectors.paged import Axes, PagedGroup, Unit
from protocol_v2.connectors.scheduler_side import SchedulerSide
from protocol_v2.connectors.worker_side import LoadTask, SaveTask, WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keying import KeySpace
    from protocol_v2.connectors.settings import ConnectorSettings
    from protocol_v2.connectors.tracker import LoadPlan


@dataclass(frozen=True, slots=True)
class Deployment:
    """What an operator says of a deployment.

    Args:
        settings: of the connector.
        space: of all keys: `keying.engines.space_from_tensorrt_llm` with ``kv_layout=f"blocks/{tokens_per_block}"``.
        tokens_per_block: of the engine's ``kv_cache_config``.
        world: ranks.
        rank: of this process.
        derive: key inputs of an ``LlmRequest``.
    """

    settings: ConnectorSettings
    space: KeySpace
    tokens_per_block: int
    world: int = 1
    rank: int = 0
    derive: Callable[[Any], EngineInputs] = from_tensorrt_llm


DeploymentOf: TypeAlias = "Callable[[Any], Deployment]"
"""From ``TorchLlmArgs`` to what the operator says."""


@dataclass(slots=True)
class StepTasks:
    """What the workers do in a step; travels between ranks."""

    loads: list[LoadTask] = field(default_factory=list)
    saves: list[SaveTask] = field(default_factory=list)


class TensorRtWorker:
    """``KvCacheConnectorWorker``: writes what was fetched, and saves.

    Args:
        deployment: what the operator says.
        llm_args: ``TorchLlmArgs``.
    """

    of_process: ClassVar[TensorRtWorker | None] = None
    """The worker of this process, in which rank 0's scheduler fetches."""

    def __init__(self, deployment: DeploymentOf, llm_args: Any) -> None:
        self._deployment = deployment(llm_args)
        self._tasks: StepTasks | None = None
        self.side: WorkerSide | None = None
        self._client: CacheClient | None = None
        TensorRtWorker.of_process = self

    def register_forward_pass_callable(self) -> None:
        """Nothing is to be called."""

    def bind_connector_meta(self, metadata: object) -> None:
        """The step's tasks."""
        self._tasks = metadata if isinstance(metadata, StepTasks) else None

    def get_connector_meta(self) -> object:
        """The step's tasks."""
        return self._tasks

    def _clear_connector_meta(self) -> None:
        self._tasks = None

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The engine's pool: [blocks, ...], each block with all layers."""
        deployment, settings = self._deployment, self._deployment.settings
        pool = PagedGroup(
            {"pool": kv_cache_tensor},
            [Axes(0, None)],
            deployment.tokens_per_block,
            settings.chunk_size,
            Unit.BLOCKS,
            null_block=None,
        )
        self._client = CacheClient(
            settings.address,
            deployment.space,
            role=f"tensorrt-llm worker {deployment.rank}",
            patience=settings.patience,
        )
        self.side = WorkerSide(
            self._client,
            [pool],
            world=deployment.world,
            rank=deployment.rank,
            chunk_size=settings.chunk_size,
            load_timeout=settings.load_timeout,
            store_timeout=settings.store_timeout,
            queue_bytes=settings.save_queue_mib << 20,
        )

    def start_load_kv(self, stream: Any) -> None:
        """Write what the scheduler promised."""
        del stream
        if self._tasks is None or self.side is None:
            return
        for task in self._tasks.loads:
            self.side.write_staged(task)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: all layers are there before the step."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: blocks are copied whole when the step has computed."""

    def wait_for_save(self, stream: Any) -> None:
        """Copy what is saved, once the step has computed."""
        if self._tasks is None or self.side is None or not self._tasks.saves:
            return
        stream.synchronize()
        self.side.save(self._tasks.saves)
        if self._deployment.settings.wait_for_store:
            self.side.flush(self._deployment.settings.store_timeout)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing is under way between steps."""
        del finished_gen_req_ids, started_loading_req_ids
        return [], []

    def close(self) -> None:
        """The engine ends."""
        if self.side is not None:
            self.side.close()
        if self._client is not None:
            self._client.close()


@dataclass(slots=True)
class _Seen:
    request: Any
    table: list[int] = field(default_factory=list)
    local: int = 0
    loaded: int = 0
    """Tokens promised, until the step in which the request is new."""
    plan: LoadPlan | None = None


class TensorRtScheduler:
    """``KvCacheConnectorScheduler``, on rank 0.

    Args:
        deployment_of: what the operator says.
        llm_args: ``TorchLlmArgs``.
    """

    def __init__(self, deployment_of: DeploymentOf, llm_args: Any) -> None:
        deployment = self._deployment = deployment_of(llm_args)
        settings = deployment.settings
        self._client = CacheClient(
            settings.address, deployment.space, role="tensorrt-llm scheduler", patience=settings.patience
        )
        self.side = SchedulerSide(
            self._client,
            deployment.space,
            world=deployment.world,
            parts=1,
            align=deployment.tokens_per_block,
            lookup_timeout=settings.lookup_timeout,
        )
        if deployment.world > 1:
            self.side.stop_loading("an engine of several ranks cannot be told that one of them failed to load")
        self._seen: dict[int, _Seen] = {}
        self._loads: list[LoadTask] = []
        self._saves = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that are in this process already, in whole blocks; never between steps."""
        name, size = str(request.request_id), self._deployment.tokens_per_block
        seen = self._seen.setdefault(request.request_id, _Seen(request))
        self.side.admit(name, lambda: self._deployment.derive(request))
        if seen.table:  # it had blocks and asks again: they were taken away
            self.side.preempt(name)
            seen.table = []
        self._follow(seen)
        self._drop(seen)
        seen.local = num_computed_tokens
        offered = 0 if num_computed_tokens % size else self.side.lookup(name, num_computed_tokens)
        offered -= (num_computed_tokens + offered) % size
        if offered > 0 and self._fetched(seen, name, offered):
            return seen.loaded, False
        self.side.allocated(name, num_computed_tokens, 0)
        return 0, False

    def _fetched(self, seen: _Seen, name: str, offered: int) -> bool:
        """Fetch what is to be promised; whether all of it is here."""
        worker = TensorRtWorker.of_process
        if worker is None or worker.side is None:
            return False
        plan = self.side.allocated(name, seen.local, offered)
        if plan is None:
            return False
        whole = worker.side.stage(self._task(seen, plan, ())) == plan.count
        self.side.part_loaded(plan.name, failed=not whole)
        if not whole:
            worker.side.drop_staged(plan.name)
            return False
        seen.plan, seen.loaded = plan, offered
        return True

    def _task(self, seen: _Seen, plan: LoadPlan, blocks: tuple[int, ...]) -> LoadTask:
        return LoadTask.of(plan, str(seen.request.request_id), (blocks,))

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The blocks of a request are known."""
        seen = self._seen.get(request.request_id)
        if seen is None:
            return
        seen.table = list(block_ids)
        if seen.plan is not None:
            self._loads.append(
                self._task(seen, seen.plan, self._cut(seen.table, seen.plan.start_token, seen.plan.stop_token))
            )
            seen.plan = None

    def _cut(self, table: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
        size = self._deployment.tokens_per_block
        return tuple(table[start // size : -(-stop // size)])

    def build_connector_meta(self, scheduler_output: Any) -> StepTasks:
        """What the workers do in this step."""
        tasks = StepTasks(loads=self._loads)
        self._loads = []
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            seen = self._seen.get(data.request_id)
            if seen is None:
                continue
            known = set(seen.table)
            seen.table += [block for block in data.new_block_ids if block not in known]
            self._follow(seen)
            tracker = self.side.tracker(str(data.request_id))
            if tracker is None:
                continue
            # the position does not count what was promised, in the step in which the request is new
            tracker.compute(data.computed_position + seen.loaded + data.num_scheduled_tokens)
            seen.loaded = 0
            self._add_save(tasks, seen)
        return tasks

    def _add_save(self, tasks: StepTasks, seen: _Seen) -> None:
        plan = self.side.take_save(str(seen.request.request_id))
        if plan is None:
            return
        self._saves += 1
        size = self._deployment.settings.chunk_size
        blocks = self._cut(seen.table, plan.first * size, plan.stop * size)
        tasks.saves.append(SaveTask.of(plan, self._saves, (blocks,)))

    def _follow(self, seen: _Seen) -> None:
        def tell(tracker: Any) -> None:
            tokens = seen.request.get_tokens(0)
            if len(tokens) > tracker.n_tokens:
                tracker.extend(tokens[tracker.n_tokens :])

        self.side.change(str(seen.request.request_id), tell)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """The request is over; saves are copies by now, so its blocks may go."""
        del cache_block_ids
        seen = self._seen.pop(request.request_id, None)
        if seen is not None:
            self._drop(seen)
        self.side.end(str(request.request_id))
        return False

    def _drop(self, seen: _Seen) -> None:
        """What was promised and got no blocks."""
        worker, plan = TensorRtWorker.of_process, seen.plan
        if plan is not None and worker is not None and worker.side is not None:
            worker.side.drop_staged(plan.name)
        seen.plan, seen.loaded = None, 0

    def close(self) -> None:
        """The engine ends."""
        self.side.close()
        self._client.close()
