"""`WorkerConnector`: what the connector does in one of vLLM's workers; hooks as vLLM names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol_v2.client import CacheClient
from protocol_v2.connectors.paged import Axes, PagedGroup, axes_of
from protocol_v2.connectors.worker_side import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable

    from keying import KeySpace
    from protocol_v2.connectors.vllm_engine import EngineShape
    from protocol_v2.connectors.vllm_scheduler import StepTasks
    from protocol_v2.connectors.worker_side import WorkerReport
    from protocol_v2.foreign import ForeignPolicy


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
        kv_cache_config: Any,
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

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV is there.

        Raises:
            LayoutError: its tensors cannot be understood.
        """
        self._groups = [self._paged(group, kv_caches) for group in self._config.kv_cache_groups]

    def _paged(self, group: Any, kv_caches: dict[str, Any]) -> PagedGroup:
        block_size = group.kv_cache_spec.block_size
        layers: dict[str, Any] = {}
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

    def start_load_kv(self, tasks: StepTasks) -> None:
        """Load, begin to load, and write what has been fetched."""
        if tasks.space is not None and self._worker is None:
            self._worker = self._make(tasks.space)
        worker = self._worker
        if worker is None:
            return
        if tasks.loads:
            worker.load(tasks.loads)
        worker.begin_loads(tasks.async_loads)
        for task, whole in worker.end_loads():
            self._finished.add(task.request_id)
            if not whole and self.shape.fails_by_request:
                self._failed.add(task.request_id)

    def _make(self, space: KeySpace) -> WorkerSide:
        settings = self.shape.settings
        self._client = CacheClient(
            settings.address,
            space,
            role=f"vllm worker {self.shape.rank}",
            patience=settings.patience,
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

    def wait_for_save(self, tasks: StepTasks) -> None:
        """Copy what is saved."""
        if self._worker is None or not tasks.saves:
            return
        self._worker.save(tasks.saves)
        if self.shape.settings.wait_for_store:
            self._worker.flush(self.shape.settings.store_timeout)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose load between steps is over, and those of them whose failure is told by request."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks that should have been loaded and were not, unless that is told by request."""
        blocks = set[int]() if self._worker is None else self._worker.take_failed_blocks()
        return set() if self.shape.fails_by_request else blocks

    def take_report(self) -> WorkerReport | None:
        """What became of loads and saves; None where nothing did."""
        report = None if self._worker is None else self._worker.take_report()
        return report or None

    def shutdown(self) -> None:
        """The engine ends: what is copied is stored first, within its time."""
        if self._worker is not None:
            self._worker.close(self.shape.settings.store_timeout)
        if self._client is not None:
            self._client.close()
