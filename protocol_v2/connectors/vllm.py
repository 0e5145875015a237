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
* A load that failed is reported by blocks, or for several KV groups and sliding windows by request, so that the engine
  recomputes (`kv_load_failure_policy` is set to ``recompute``: a cache that is gone must not fail requests). An engine
  that schedules ahead takes tokens of steps that were computed on a load that had failed, unless it is between steps.
* The blocks of a step are asked of the scheduler where it says them: blocks that slid out of a window were given to
  other requests, and a table put together from what was appended does not know.
* Everything is a no-op where the cache cannot be used (a model that is not causal, KV that is no attention's).

Read from the released 0.18, 0.20 and 0.32 (``distributed/kv_transfer``, ``v1/core/sched``); run with 0.32 on CPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_release
from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from protocol_v2.client import CacheClient
from protocol_v2.connectors.paged import LayoutError
from protocol_v2.connectors.vllm_engine import UnusableError, engine_shape, engine_space
from protocol_v2.connectors.vllm_scheduler import SchedulerConnector, StepTasks
from protocol_v2.connectors.vllm_worker import WorkerConnector

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from keying import KeySpace
    from protocol_v2.connectors.vllm_engine import EngineShape
    from protocol_v2.connectors.worker_side import WorkerReport
    from protocol_v2.foreign import ForeignPolicy

log = logging.getLogger(__name__)


@dataclass
class ExtraKeysMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there for the type checker
    """What the workers do in a step."""

    tasks: StepTasks = field(default_factory=StepTasks)


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
            shape = engine_shape(
                vllm_config,
                kv_cache_config,
                release=vllm_release,
                device=_device(),
                hears_of_requests=hasattr(vllm_base, "KVConnectorTransferResults"),
            )
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
        client = CacheClient(
            shape.settings.address, space, role="vllm scheduler", patience=shape.settings.patience, on_foreign=policy
        )
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
        if self.scheduler is None:
            return ExtraKeysMetadata()
        return ExtraKeysMetadata(self.scheduler.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `KVConnectorBase_V1`."""
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        if self.scheduler is not None and isinstance(meta, ExtraKeysWorkerMetadata):
            self.scheduler.take_report(meta.report)

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

    def _tasks(self) -> StepTasks:
        meta = self._get_connector_metadata()
        return meta.tasks if isinstance(meta, ExtraKeysMetadata) else StepTasks()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `KVConnectorBase_V1`."""
        if self.worker is not None:
            self.worker.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `KVConnectorBase_V1`."""
        del forward_context, kwargs
        if self.worker is not None:
            self.worker.start_load_kv(self._tasks())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: what a step loads is there before it computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: chunks are copied whole when the step has computed."""

    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`."""
        if self.worker is not None:
            self.worker.wait_for_save(self._tasks())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `KVConnectorBase_V1`."""
        del finished_req_ids
        if self.worker is None:
            return None, None
        return None, self.worker.take_finished()[0] or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See `KVConnectorBase_V1`; older versions have no such hook."""
        del finished_req_ids
        finished, failed = (set[str](), set[str]()) if self.worker is None else self.worker.take_finished()
        return vllm_base.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `KVConnectorBase_V1`."""
        return set() if self.worker is None else self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See `KVConnectorBase_V1`."""
        report = None if self.worker is None else self.worker.take_report()
        return None if report is None else ExtraKeysWorkerMetadata(report)

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


def _device() -> str:
    """The platform's kind of device."""
    from vllm.platforms import current_platform  # noqa: PLC0415  (probes the machine: not before it is needed)

    return str(current_platform.device_type)
