"""Connectors that are wrong on purpose: they prove that the tests would see a wrong hit, and what happens on faults.

Loaded by the engine by module path, like the real one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keying.engines import EngineInputs
from protocol_v2.connectors.tracker import RequestTracker
from protocol_v2.connectors.vllm import ExtraKeysConnector
from protocol_v2.connectors.vllm_scheduler import SchedulerConnector
from protocol_v2.connectors.vllm_worker import WorkerConnector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol_v2.connectors.worker_side import SaveTask, WorkerSide


class TokensOnlyScheduler(SchedulerConnector):
    """Keys without extra keys: every picture, adapter and salt is the same."""

    def _derive(self, seen: Any) -> EngineInputs:
        return EngineInputs(super()._derive(seen).tokens, ())


class TokensOnlyConnector(ExtraKeysConnector):
    """The classic fault: what a key of tokens alone does."""

    def _scheduler(self, vllm_config: Any, kv_cache_config: Any, shape: Any) -> SchedulerConnector:
        right = super()._scheduler(vllm_config, kv_cache_config, shape)
        space = replace(right.space, attributes={**right.space.attributes, "control": "tokens only"})
        right.client.close()
        return TokensOnlyScheduler(shape, space, type(right.client)(shape.settings.address, space))


class LosingWorker(WorkerConnector):
    """Every other load delivers only its first chunk, as if the rest had gone since it was looked up."""

    def _make(self, space: Any) -> WorkerSide:
        worker = super()._make(space)
        client: Any = worker._client
        retrieve = client.retrieve
        asked = 0

        def losing(lease: bytes, count: int, **others: Any) -> Any:
            nonlocal asked
            asked += 1
            result = retrieve(lease, count, **others)
            return replace(result, chunks=result.chunks[:1]) if asked % 2 else result

        client.retrieve = losing
        return worker


class LosingConnector(ExtraKeysConnector):
    """Loads that fail half-way."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.worker is not None:
            self.worker = LosingWorker(self.worker.shape, kv_cache_config)


class PoisoningConnector(LosingConnector):
    """Loads that fail half-way, and saves that do not care."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.worker is not None:
            make = self.worker._make

            def careless(space: Any) -> WorkerSide:
                worker = make(space)
                save = worker.save

                def all_of(tasks: Iterable[SaveTask]) -> None:
                    save([replace(one, after_load=None) for one in tasks])

                worker.save = all_of  # type: ignore[method-assign]
                return worker

            self.worker._make = careless  # type: ignore[method-assign]


__all__ = ["LosingConnector", "PoisoningConnector", "RequestTracker", "TokensOnlyConnector"]
