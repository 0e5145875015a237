"""vLLM without vLLM: the modules that the connector imports, and a scheduler and worker that call its hooks.

Shapes and order of calls are those of the released 0.18, 0.20 and 0.32 (``v1/core/sched/scheduler.py``,
``v1/worker/kv_connector_model_runner_mixin.py``); ``0.32-v2`` is 0.32 with the second model runner, where a resumed
request comes back among the new ones. KV is that of `toy_engine`: what is computed on wrong KV is wrong.
"""

import enum
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.keying.engine_samples import vllm_config, vllm_request
from tests.protocol_v2.toy_engine import MODULUS

BLOCK = 4
N_BLOCKS = 61
CONNECTOR = "protocol_v2.connectors.vllm"
VERSIONS = ("0.18", "0.20", "0.32", "0.32-v2")


class Role(enum.Enum):
    """``KVConnectorRole``."""

    SCHEDULER = 0
    WORKER = 1


class Base:
    """``KVConnectorBase_V1``."""

    def __init__(self, config: Any, role: Role, kv_cache_config: Any) -> None:
        self._bound: Any = None
        del config, role, kv_cache_config

    def bind_connector_metadata(self, meta: Any) -> None:
        """As in vLLM."""
        self._bound = meta

    def clear_connector_metadata(self) -> None:
        """As in vLLM."""
        self._bound = None

    def _get_connector_metadata(self) -> Any:
        assert self._bound is not None
        return self._bound

    def get_transfer_results(self, finished: set[str]) -> Any:
        """As in vLLM 0.32."""
        sent, received = self.get_finished(finished)  # type: ignore[attr-defined]
        return TransferResults(set(sent or ()), set(received or ()))


@dataclass
class TransferResults:
    """``KVConnectorTransferResults``."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class Stats:
    """``KVConnectorStats``."""

    data: dict[str, Any] = field(default_factory=dict)


def _modules(version: str) -> dict[str, ModuleType]:
    names = (
        "vllm",
        "vllm.platforms",
        "vllm.distributed",
        "vllm.distributed.kv_transfer",
        "vllm.distributed.kv_transfer.kv_connector",
        "vllm.distributed.kv_transfer.kv_connector.v1",
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    )
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name in names[1:]:
        parent, _, child = name.rpartition(".")
        setattr(made[parent], child, made[name])
    made["vllm"].__version__ = version
    made["vllm.platforms"].current_platform = SimpleNamespace(device_type="cpu")
    base = made["vllm.distributed.kv_transfer.kv_connector.v1.base"]
    base.KVConnectorBase_V1, base.KVConnectorRole = Base, Role
    base.KVConnectorMetadata = base.KVConnectorWorkerMetadata = type("Metadata", (), {})
    base.SupportsHMA = type("SupportsHMA", (), {})
    if version.startswith("0.32"):
        base.KVConnectorTransferResults = TransferResults
    made["vllm.distributed.kv_transfer.kv_connector.v1.metrics"].KVConnectorStats = Stats
    return made


@contextmanager
def installed(version: str) -> Iterator[Any]:
    """The connector's module, imported over these modules; gone afterwards."""
    made = _modules(version)
    before = {name: sys.modules.get(name) for name in (*made, CONNECTOR)}
    sys.modules.update(made)
    sys.modules.pop(CONNECTOR, None)
    try:
        yield importlib.import_module(CONNECTOR)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def configs(
    version: str,
    settings: dict[str, Any],
    *,
    rank: int = 0,
    world: int = 1,
    groups: int = 1,
    kind: str = "FullAttentionSpec",
) -> Any:
    """``VllmConfig`` and ``KVCacheConfig`` of one process; this engine has no prefix cache and schedules one step."""
    config = vllm_config(**{"parallel_config.tensor_parallel_size": world})
    config.parallel_config.rank = rank
    config.scheduler_config = SimpleNamespace(async_scheduling=False)
    config.cache_config.enable_prefix_caching = False
    config.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config=settings, kv_load_failure_policy="fail", is_kv_producer=True, is_kv_consumer=True
    )
    spec = type(kind, (), {"block_size": BLOCK})
    cache = SimpleNamespace(
        num_blocks=N_BLOCKS,
        kv_cache_groups=[
            SimpleNamespace(layer_names=[f"g{group}.{layer}" for layer in range(2)], kv_cache_spec=spec())
            for group in range(groups)
        ],
    )
    if version.startswith("0.32"):
        cache.kv_cache_layout = "LBHNC"
    return config, cache


@dataclass(eq=False)
class Seq:
    """A request and what the scheduler keeps of it."""

    request: Any
    max_tokens: int
    stays: bool = False
    """A streaming session: it waits for more where it would be over."""
    table: list[int] = field(default_factory=list)
    state: str = "waiting"
    fresh: bool = True
    weights: int = 0


class FakeEngine:
    """A scheduler and its workers around the connector.

    Args:
        module: the connector's.
        version: of vLLM.
        settings: of the connector.
        world: workers.
        budget: tokens of a step.
        connector: name of the class.
        groups: KV groups.
        kind: of their KV, which has no effect on what this engine computes.
    """

    def __init__(
        self,
        module: Any,
        version: str,
        settings: dict[str, Any],
        *,
        world: int = 1,
        budget: int = 16,
        connector: str = "ExtraKeysConnector",
        groups: int = 1,
        kind: str = "FullAttentionSpec",
    ) -> None:
        self.version, self.world, self.groups, self.budget = version, world, groups, budget
        make = getattr(module, connector)
        config, cache = configs(version, settings, world=world, groups=groups, kind=kind)
        self.scheduler = make(config, Role.SCHEDULER, cache)
        self.policy = config.kv_transfer_config.kv_load_failure_policy
        self.workers = []
        shape = (N_BLOCKS, 1, BLOCK, 2) if version.startswith("0.32") else (2, N_BLOCKS, 1, BLOCK, 1)
        self.kv = []
        for rank in range(world):
            config, cache = configs(version, settings, rank=rank, world=world, groups=groups, kind=kind)
            worker = make(config, Role.WORKER, cache)
            layers = {
                name: torch.zeros(shape, dtype=torch.int64) for g in cache.kv_cache_groups for name in g.layer_names
            }
            worker.register_kv_caches(layers)
            self.workers.append(worker)
            self.kv.append(layers)
        self.seqs: dict[str, Seq] = {}
        self.finished: set[str] = set()
        self.done: dict[str, Seq] = {}
        self._free = list(range(1, N_BLOCKS))
        self._received: dict[str, int] = {}
        self.hits: dict[str, list[int]] = {}
        """For each request what the connector offered, each time it was asked."""
        self.right: dict[str, bool] = {}
        """For each request whether its KV was right at its end."""

    # ---- what a user does

    def add(
        self, name: str, tokens: list[int], *, max_tokens: int = 1, stays: bool = False, weights: int = 0, **fields: Any
    ) -> Seq:
        """A request of this version's shape; `weights` are those that the engine really computes its adapter with."""
        request = vllm_request(
            request_id=name,
            all_token_ids=list(tokens),
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
            num_preemptions=0,
            **fields,
        )
        if self.version in {"0.18", "0.20"}:
            del request.prompt_is_token_ids
        seq = self.seqs[name] = Seq(request, max_tokens, stays=stays, weights=weights)
        if self.version.startswith("0.32"):
            self.scheduler.on_new_request(request)
        return seq

    def run(self) -> None:
        """Step until all requests are over."""
        ends = time.monotonic() + 20
        while self.seqs:
            self.step()
            assert time.monotonic() < ends, "the engine does not come to an end"
        self.step()  # the workers hear of what has finished

    def preempt(self, name: str) -> None:
        """Take a request's blocks away."""
        seq = self.seqs[name]
        self._release(seq)
        seq.request.num_computed_tokens = 0
        seq.request.num_preemptions += 1
        seq.state = "waiting"

    def finish(self, name: str) -> None:
        """A request is over, or aborted."""
        seq = self.seqs.pop(name)
        self.finished.add(name)
        self.done[name] = seq
        if seq.state == "running":
            self.right[name] = self.is_right(seq, seq.request.num_computed_tokens)
        if hasattr(self.scheduler, "request_finished_all_groups"):
            self.scheduler.request_finished_all_groups(seq.request, tuple([list(seq.table)] * self.groups))
        else:
            self.scheduler.request_finished(seq.request, list(seq.table))
        if seq.state != "loading":
            self._release(seq)

    def stream(self, seq: Seq, tokens: list[int], features: tuple[Any, ...] = ()) -> None:
        """A streaming session goes on: the last sampled token is dropped, media and tokens come behind."""
        request = seq.request
        del request.all_token_ids[request.num_computed_tokens :]
        for feature in features:
            feature.mm_position.offset += len(request.all_token_ids)
        request.mm_features.extend(features)
        request.all_token_ids.extend(tokens)
        request.num_prompt_tokens = len(request.all_token_ids)
        seq.max_tokens += 1
        seq.state, seq.fresh = "waiting", True

    # ---- a step

    def step(self) -> None:
        """Schedule, load, compute, save, and take in what came of it."""
        new, cached, scheduled = [], SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[],
                                                     num_computed_tokens=[], num_output_tokens=[]), {}  # fmt: skip
        left, sync = self.budget, False
        for name, seq in list(self.seqs.items()):
            request = seq.request
            if left <= 0 or seq.state in {"loading", "idle"}:
                continue
            fresh_blocks: Any = None
            if seq.state == "waiting":
                external, asynchronous = 0, False
                if request.num_computed_tokens == 0:
                    external, asynchronous = self.scheduler.get_num_new_matched_tokens(request, 0)
                    self.hits.setdefault(name, []).append(external)
                start = request.num_computed_tokens + external
                more = self._take(-(-(start if asynchronous else len(request.all_token_ids)) // BLOCK) - len(seq.table))
                if more is None:
                    continue
                seq.table += more
                table = tuple([list(seq.table)] * self.groups)
                blocks = SimpleNamespace(get_block_ids=lambda table=table: table)
                self.scheduler.update_state_after_alloc(request, blocks, external)
                if asynchronous:
                    seq.state, request.num_computed_tokens = "loading", start
                    continue
                sync = sync or external > 0
                request.num_computed_tokens = start
                fresh_blocks = table
            else:
                more = self._take(-(-len(request.all_token_ids) // BLOCK) - len(seq.table))
                if more is None:
                    continue
                seq.table += more
                fresh_blocks = tuple([list(more)] * self.groups) if more else None
            n_tokens = min(left, len(request.all_token_ids) - request.num_computed_tokens)
            left -= n_tokens
            scheduled[name] = n_tokens
            as_new = seq.state == "waiting" and (seq.fresh or self.version.endswith("v2"))
            if as_new:
                new.append(
                    SimpleNamespace(
                        req_id=name, block_ids=fresh_blocks, num_computed_tokens=request.num_computed_tokens
                    )
                )
            else:
                cached.req_ids.append(name)
                cached.new_block_ids.append(fresh_blocks)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                if seq.state == "waiting":
                    cached.resumed_req_ids.add(name)
            seq.state, seq.fresh = "running", False
        output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled)
        if self.version.startswith("0.32"):
            tables = {name: tuple([list(seq.table)] * self.groups) for name, seq in self.seqs.items()}
            output.kv_connector_block_state = SimpleNamespace(get_block_ids=tables.get)
        meta = self.scheduler.build_connector_meta(output)
        for name, n_tokens in scheduled.items():
            self.seqs[name].request.num_computed_tokens += n_tokens
        self._take_in(self._execute(meta, scheduled, sync=sync), scheduled)

    def _execute(self, meta: Any, scheduled: dict[str, int], *, sync: bool) -> list[Any]:
        """The workers' part, in the order of the version."""
        early = sync or not self.version.startswith("0.32")
        for worker in self.workers:
            worker.bind_connector_metadata(meta)
            if early:
                worker.start_load_kv(None)
        for name, n_tokens in scheduled.items():
            seq = self.seqs[name]
            self._compute(seq, seq.request.num_computed_tokens - n_tokens, seq.request.num_computed_tokens)
        outputs = []
        for worker in self.workers:
            if not early:
                worker.start_load_kv(None)
            if scheduled or self.version.startswith("0.32"):
                worker.wait_for_save()
            if self.version.startswith("0.32"):
                results = worker.get_transfer_results(self.finished)
            else:
                results = TransferResults(set(), set(worker.get_finished(self.finished)[1] or ()))
            invalid = worker.get_block_ids_with_load_errors()
            report = worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
            outputs.append((results, invalid, report))
        self.finished = set()
        return outputs

    def _take_in(self, outputs: list[Any], scheduled: dict[str, int]) -> None:
        invalid = set[int]().union(*(one[1] for one in outputs))
        received = [one[0].finished_recving for one in outputs]
        failed = set[str]().union(*(one[0].failed_recving for one in outputs))
        for one in received:
            for name in one:
                self._received[name] = self._received.get(name, 0) + 1
        report = None
        for one in outputs:
            report = one[2] if report is None else report if one[2] is None else report.aggregate(one[2])
        again = self._recompute(invalid, failed, scheduled)
        for name in scheduled:
            seq = self.seqs[name]
            if name in again:
                continue
            tokens = seq.request.all_token_ids
            if seq.request.num_computed_tokens == len(tokens):
                seq.max_tokens -= 1
                tokens.append((tokens[-1] * 7 + 1) % 1000)
                if seq.max_tokens <= 0:
                    if seq.stays:
                        seq.state = "idle"
                    else:
                        self.finish(name)
        if report is not None or self.version.startswith("0.32"):
            self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
        for name in [name for name, count in self._received.items() if count == self.world]:
            del self._received[name]
            seq = self.seqs.get(name) or self.done[name]
            if name not in self.seqs:
                self._release(seq)  # aborted while it loaded
                continue
            seq.state = "waiting"
            if not seq.request.num_computed_tokens:
                self._release(seq)

    def _recompute(self, invalid: set[int], failed: set[str], scheduled: dict[str, int]) -> set[str]:
        """Requests whose load failed are computed from the first block that is not there."""
        again = set()
        for name, seq in self.seqs.items():
            places = [place for place, block in enumerate(seq.table) if block in invalid]
            if places:
                seq.request.num_computed_tokens = min(places) * BLOCK
                again.add(name)
            if name in failed:
                seq.request.num_computed_tokens = 0
        return again & set(scheduled)

    # ---- blocks and KV

    def _take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        taken, self._free = self._free[: max(0, count)], self._free[max(0, count) :]
        return taken

    def _release(self, seq: Seq) -> None:
        for block in seq.table:
            for layers in self.kv:
                for tensor in layers.values():
                    self._slots(tensor)[block] = -7  # whoever still reads it reads nonsense
        self._free += seq.table
        seq.table = []

    def _slots(self, tensor: Any) -> Any:
        """The tensor as [blocks, tokens, ...]."""
        return tensor.movedim((0, 2), (0, 1)) if self.version.startswith("0.32") else tensor.movedim((1, 3), (0, 1))

    def _compute(self, seq: Seq, start: int, stop: int) -> None:
        for token in range(start, stop):
            before = self.values(seq, token - 1) if token else []
            for number, tensor in enumerate(self._tensors()):
                value = following(seq, token, before, number)
                self._slots(tensor)[seq.table[token // BLOCK], token % BLOCK] = value

    def values(self, seq: Seq, token: int) -> list[int]:
        """The KV of a token, in all parts."""
        place = seq.table[token // BLOCK], token % BLOCK
        return [int(self._slots(tensor)[place].flatten()[0]) for tensor in self._tensors()]

    def is_right(self, seq: Seq, n_tokens: int) -> bool:
        """Whether the KV of the first tokens is what computing them one by one gives."""
        before: list[int] = []
        for token in range(n_tokens):
            before = [following(seq, token, before, number) for number in range(self.world * self.groups * 2)]
            if before != self.values(seq, token):
                return False
        return True

    def _tensors(self) -> list[Any]:
        return [tensor for layers in self.kv for tensor in layers.values()]

    def close(self) -> None:
        """End."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()


def following(seq: Seq, token: int, before: list[int], number: int) -> int:
    """One part of a token's KV, from its token, the identity and all parts of the token before it."""
    request = seq.request
    identity: int = sum((request.cache_salt or "").encode()) + 1000 * seq.weights
    for item in request.mm_features:
        if item.mm_position.offset <= token:
            identity += int(item.identifier, 16) % 997 * (item.mm_position.offset + 1)
    value = int(request.all_token_ids[token])
    return (sum(before) * 31 + value * 7 + identity * 13 + number * 3 + token) % MODULUS
