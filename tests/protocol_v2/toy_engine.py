"""An engine without a model: paged KV in which each value follows from all before it, over the sides of a connector.

The KV of a token is a number made of its token, the identity of its request and the KV of the token before it in *all*
ranks, groups and layers; so what is computed on wrong KV is wrong everywhere, as in a real model. Synchronous and
asynchronous loads, several workers and groups, failed loads that are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from keying import CacheSalt
from keying.engines import EngineInputs
from protocol_v2.connectors.paged import Axes, PagedGroup, Unit
from protocol_v2.connectors.scheduler_side import SchedulerSide
from protocol_v2.connectors.worker_side import LoadTask, SaveTask, WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keying import KeySpace
    from protocol_v2.client import CacheClient
    from protocol_v2.connectors.tracker import LoadPlan
    from protocol_v2.tensors import TensorMeta

MODULUS = 1_000_003
LAYERS = 2


@dataclass(slots=True)
class ToyRequest:
    """One request, as an engine keeps it."""

    name: str
    tokens: list[int]
    salt: str
    table: list[int] = field(default_factory=list)
    computed: int = 0


class ToyEngine:
    """See the head of the module.

    Args:
        client: of the cache, for all sides.
        space: of the keys.
        world: workers.
        groups: KV groups.
        block_size: of all groups.
        wait: loads happen in the step; False: between steps.
        lose: for a rank: how many chunks of a retrieve it loses.
        worker_clients: one for each rank, where they are not the scheduler's.
    """

    def __init__(
        self,
        client: CacheClient,
        space: KeySpace,
        *,
        world: int = 1,
        groups: int = 1,
        block_size: int = 4,
        wait: bool = True,
        lose: Callable[[int], int] = lambda _rank: 0,
        worker_clients: Sequence[CacheClient] = (),
    ) -> None:
        self.block_size, self.wait, self.world = block_size, wait, world
        self.chunk_size = space.chunk_size
        self.side = SchedulerSide(client, space, world=world, groups=groups, align=block_size, hold=world > 1)
        self._kv = [[[torch.zeros(200, block_size, 1, dtype=torch.int64) for _ in range(LAYERS)] for _ in range(groups)]
                    for _ in range(world)]  # fmt: skip
        unit = Unit.BLOCKS
        self.workers = [
            WorkerSide(
                LosingClient(worker_clients[rank] if worker_clients else client, rank, lose),
                [
                    PagedGroup({str(n): one for n, one in enumerate(layers)}, [Axes(0, 1)] * LAYERS, block_size,
                               space.chunk_size, unit)
                    for layers in self._kv[rank]
                ],
                world=world,
                rank=rank,
                chunk_size=space.chunk_size,
            )
            for rank in range(world)
        ]  # fmt: skip
        self._free = list(range(1, 200))
        self._saves = 0

    # ---- a request's life

    def run(self, request: ToyRequest, *, step: int = 16, decode: int = 0, local: int = 0) -> int:
        """Admit, load, compute in steps, decode; tokens that were loaded.

        Args:
            request: to run; it has ended afterwards, its blocks are still as it left them.
            step: tokens computed in a step.
            decode: tokens generated.
            local: leading tokens in the engine's own cache, whole blocks.
        """
        self.admit(request)
        n_tokens, load = self.begin(request, local)
        while request.computed < len(request.tokens):
            self.step(request, step, load)
            load = None
        for _ in range(decode):
            request.tokens.append((request.tokens[-1] * 7 + 1) % 1000)
            self.side.change(request.name, lambda tracker: tracker.extend(request.tokens[-1:]))
            self.step(request, 1, None)
        self.finish(request)
        return n_tokens

    def admit(self, request: ToyRequest) -> None:
        """The engine takes a request."""
        self.side.admit(request.name, lambda: EngineInputs(tuple(request.tokens), (CacheSalt(request.salt),)))

    def begin(self, request: ToyRequest, local: int = 0) -> tuple[int, LoadTask | None]:
        """Look up and make room; loads between steps are over when this returns."""
        n_tokens = self.side.lookup(request.name, local)
        n_blocks = -(-(len(request.tokens) + 64) // self.block_size)
        request.table, self._free = self._free[:n_blocks], self._free[n_blocks:]
        self._compute(request, 0, local)
        plan = self.side.allocated(request.name, local, n_tokens)
        request.computed = local
        if plan is None:
            return 0, None
        task = self._task(request, plan)
        if self.wait:
            return n_tokens, task
        for worker in self.workers:
            worker.begin_loads([task])
        waiting = list(self.workers)
        while waiting:
            waiting = [worker for worker in waiting if not worker.end_loads()]
        failed = self._report()
        request.computed = local if failed else local + n_tokens
        return n_tokens, None

    def step(self, request: ToyRequest, n_tokens: int, load: LoadTask | None) -> None:
        """A step of the engine: a load, computing, saves, and what comes of them."""
        start = request.computed
        if load is not None:
            start = load.stop_token
            for worker in self.workers:
                worker.load([load])
        stop = min(len(request.tokens), start + n_tokens)
        tracker = self.side.tracker(request.name)
        if tracker is not None:
            tracker.compute(stop)
        plan = self.side.take_save(request.name)
        self._compute(request, start, stop)
        request.computed = stop
        if plan is not None:
            self._saves += 1
            size = self.chunk_size
            blocks = tuple(
                request.table[plan.first * size // self.block_size : -(-plan.stop * size // self.block_size)]
            )
            task = SaveTask.of(plan, self._saves, (blocks,) * len(self._kv[0]))
            for worker in self.workers:
                worker.save([task])
        failed = self._report()
        if load is not None and failed:
            bad = set[int]().union(*(worker.take_failed_blocks() for worker in self.workers))
            first_bad = min(request.table.index(one) for one in bad)
            request.computed = first_bad * self.block_size

    def finish(self, request: ToyRequest) -> None:
        """The request is over; its blocks are reused once the saves were copied."""
        self.side.end(request.name)

    def flush(self) -> None:
        """Wait for all saves."""
        for worker in self.workers:
            assert worker.flush(10)

    def close(self) -> None:
        """End."""
        for worker in self.workers:
            worker.close()
        self.side.close()

    # ---- KV

    def is_right(self, request: ToyRequest) -> bool:
        """Whether the KV of all tokens is what computing them one by one gives."""
        expected = truth(request, self.world, len(self._kv[0]))
        return expected == [self._values(request, token) for token in range(len(request.tokens))]

    def _compute(self, request: ToyRequest, start: int, stop: int) -> None:
        for token in range(start, stop):
            before = self._values(request, token - 1) if token else []
            block, place = request.table[token // self.block_size], token % self.block_size
            for number, (rank, group, layer) in enumerate(self._parts()):
                value = following(request, token, before, number)
                self._kv[rank][group][layer][block, place, 0] = value

    def _values(self, request: ToyRequest, token: int) -> list[int]:
        block, place = request.table[token // self.block_size], token % self.block_size
        return [int(self._kv[rank][group][layer][block, place, 0]) for rank, group, layer in self._parts()]

    def _parts(self) -> list[tuple[int, int, int]]:
        return [
            (rank, group, layer)
            for rank in range(self.world)
            for group in range(len(self._kv[0]))
            for layer in range(LAYERS)
        ]

    # ---- between the sides

    def _task(self, request: ToyRequest, plan: LoadPlan) -> LoadTask:
        blocks = tuple(request.table[plan.start_token // self.block_size : -(-plan.stop_token // self.block_size)])
        groups = (blocks,) * len(self._kv[0])
        return LoadTask.of(plan, request.name, groups)

    def _report(self) -> bool:
        """Carry the workers' reports over; whether a load failed."""
        failed = False
        for worker in self.workers:
            report = worker.take_report()
            if report.misfit is not None:
                self.side.stop_loading(report.misfit)
            for name, (parts, bad) in report.loads.items():
                failed = self.side.part_loaded(name, parts=parts, failed=bad > 0) or failed
        return failed


class LosingClient:
    """A cache client that loses the end of what one rank retrieves."""

    def __init__(self, client: CacheClient, rank: int, lose: Callable[[int], int]) -> None:
        self._client = client
        self._rank = rank
        self._lose = lose

    def retrieve(self, lease: bytes, count: int, **others: Any) -> Any:
        """What is there, less what is lost."""
        result = self._client.retrieve(lease, count, **others)
        lost = self._lose(self._rank)
        if not lost:
            return result
        return type(result)(result.chunks[: max(0, count - lost)], result.miss, result.failure)

    def store(self, session: str, keys: Any, tensors: Sequence[Any], **others: Any) -> Any:
        """As the client."""
        return self._client.store(session, keys, tensors, **others)

    def end_session(self, session: str, **others: Any) -> Any:
        """As the client."""
        return self._client.end_session(session, **others)

    def staging(self, metas: Sequence[TensorMeta]) -> Sequence[Any]:
        """As the client."""
        return self._client.staging(metas)


def truth(request: ToyRequest, world: int, groups: int) -> list[list[int]]:
    """The KV of each token, in all parts."""
    before: list[int] = []
    values = []
    for token in range(len(request.tokens)):
        before = [following(request, token, before, number) for number in range(world * groups * LAYERS)]
        values.append(before)
    return values


def following(request: ToyRequest, token: int, before: list[int], number: int) -> int:
    """One part of a token's KV."""
    identity = sum(request.salt.encode())
    return (sum(before) * 31 + request.tokens[token] * 7 + identity * 13 + number * 3 + token) % MODULUS
