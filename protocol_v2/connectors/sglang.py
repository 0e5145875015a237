"""`SglangStore`: what a prefix cache of SGLang asks of this cache. SGLang is not imported.

SGLang's place for other caches is its radix cache (``--radix-cache-backend``, `register_radix_cache_backend`): each
tensor-parallel rank runs the same scheduler in step, and the tree decides which token slots a request has. Its storage
backends (``HiCacheStorage``) are no such place: they get page hashes that SGLang made, without the identities.

    match_prefix / init_load_back      `match`, then `load` into the slots that were allocated
    cache_unfinished_req               `checkpoint`
    cache_finished_req                 `checkpoint`, then `release`
    release_aborted_request            `release`
    retraction                         `retract`
    flush_cache, after new weights     `reset`

Counts are agreed among the ranks (`agree`, a minimum over the group), so that all promise and use the same tokens; a
load says how many it delivered, and the engine computes the rest.

Read from the released 0.5.23 (``mem_cache/registry.py``, ``base_prefix_cache.py``, ``memory_pool.py``), and run with
its own requests, pools and radix tree on CPU (``make sglang``); no engine of SGLang was run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol_v2.connectors.paged import Axes, PagedGroup, Unit
from protocol_v2.connectors.scheduler_side import SchedulerSide
from protocol_v2.connectors.worker_side import LoadTask, SaveTask, WorkerSide
from protocol_v2.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from keying.engines import EngineInputs
    from protocol_v2.client import CacheClient


class SglangStore:
    """The cache behind one rank's radix cache.

    Args:
        client: of the cache, of this rank alone; made with the space (`keying.engines.space_from_sglang`).
        buffers: the rank's KV pool: a tensor [slots, ...] for each K and V of each layer, by name, in order.
        derive: key inputs of a ``Req``: `keying.engines.from_sglang` with what it needs to know of the deployment.
        world: ranks that hold a part of each chunk (tensor times pipeline parallel).
        rank: this one.
        agree: the least of a count over all ranks, such as an all-reduce over the CPU group; None for one rank.
        lookup_timeout: seconds that a scheduler waits for a lookup.
        load_timeout: seconds for a load.
        queue_bytes: copied bytes that wait to be stored.
    """

    def __init__(
        self,
        client: CacheClient,
        buffers: Mapping[str, Any],
        derive: Callable[[Any], EngineInputs],
        *,
        world: int = 1,
        rank: int = 0,
        agree: Callable[[int], int] | None = None,
        lookup_timeout: float = 1.0,
        load_timeout: float = 5.0,
        queue_bytes: int = 1 << 30,
    ) -> None:
        if client.space is None:
            raise ValueError("client: has no space; make it with the deployment's")
        self._derive = derive
        self._agree = agree or (lambda count: count)
        self._client = client
        self._chunk_size = client.space.chunk_size
        self.side = SchedulerSide(client, client.space, world=world, parts=1, lookup_timeout=lookup_timeout)
        # slots are blocks of one token: any chunk size fits, and no slot stands for nothing
        slots = PagedGroup(buffers, [Axes(0, None)] * len(buffers), 1, self._chunk_size, Unit.BLOCKS, null_block=None)
        self.worker = WorkerSide(
            client,
            [slots],
            world=world,
            rank=rank,
            chunk_size=self._chunk_size,
            load_timeout=load_timeout,
            queue_bytes=queue_bytes,
        )
        self._saves = 0
        self._offered: dict[
            str, tuple[int, int]
        ] = {}  # request -> tokens that the tree had, tokens offered behind them

    def match(self, req: Any, local: int) -> int:
        """Tokens behind the tree's own that can be loaded, the same on every rank.

        Args:
            req: a ``Req``; its tokens are read anew, so that a retracted one is looked up with what it generated.
            local: leading tokens that the tree has, the same on every rank.
        """
        self._follow(req)
        offered = self._agree(self.side.lookup(req.rid, local))
        self._offered[req.rid] = (local, offered)
        if not offered:
            self.side.allocated(req.rid, local, 0)
        return offered

    def load(self, req: Any, slots: Sequence[int]) -> int:
        """Load into slots that were allocated for what `match` offered; tokens that are there now, on every rank.

        The engine frees the slots behind them and computes those tokens.

        Args:
            req: a ``Req``.
            slots: for the tokens behind the tree's own, at most as many as were offered; fewer, down to none, are fine.
        """
        local, offered = self._offered.pop(req.rid, (0, 0))
        wanted = min(offered, len(slots))
        plan = self.side.allocated(req.rid, local, wanted)
        delivered = 0
        if plan is not None:
            blocks = (tuple(slots[:wanted]),)
            task = LoadTask.of(plan, req.rid, blocks)
            self.worker.load([task])
            bad = self.worker.take_failed_blocks()
            delivered = next((place for place, slot in enumerate(blocks[0]) if slot in bad), wanted)
        agreed = self._agree(delivered)
        self._take_report(plan.name if plan is not None else None, failed=agreed < wanted)
        return agreed

    def _take_report(self, name: str | None, *, failed: bool) -> None:
        report = self.worker.take_report()
        if report.misfit is not None:
            self.side.stop_loading(report.misfit)
        if name is not None:  # failed on whatever rank: known here, so nothing rests on it in doubt
            self.side.part_loaded(name, failed=failed)

    def checkpoint(self, req: Any, slots: Sequence[int], n_tokens: int, *, own: bool = True) -> None:
        """The first tokens of a request have KV: save whole chunks, each once. Slots may be reused when it returns.

        Args:
            req: a ``Req``.
            slots: of the tokens from the first on, at least `n_tokens` (``req_to_token_pool``).
            n_tokens: that have KV.
            own: False where a part came out of the tree and may be of an adapter's former weights.
        """
        self._follow(req)
        tracker = self.side.tracker(req.rid)
        if tracker is None:
            return
        tracker.compute(n_tokens, own=own)
        plan = self.side.take_save(req.rid)
        if plan is None:
            return
        self._saves += 1
        blocks = tuple(int(slot) for slot in slots[plan.first * self._chunk_size : plan.stop * self._chunk_size])
        self.worker.save([SaveTask.of(plan, self._saves, (blocks,))])

    def retract(self, req: Any) -> None:
        """The engine dropped a request's KV and will match it again."""
        self._offered.pop(req.rid, None)
        self.side.preempt(req.rid)

    def release(self, req: Any) -> None:
        """A request is over or aborted. Idempotent."""
        self._offered.pop(req.rid, None)
        self.side.end(req.rid)

    def reset(self, timeout: float = 10.0) -> bool:
        """Forget the space: the engine's weights have changed, and no request computes with the former ones.

        What the ranks had still to store is stored first, so that it goes too. Requests that stand go on without the
        cache. What was not cleared on every rank is not loaded any more.

        Args:
            timeout: seconds for what waits to be stored.

        Returns:
            Whether that worked, the same on every rank.
        """
        self._offered.clear()
        self.side.forget("cache_reset")
        stored = self._agree(int(self.worker.flush(timeout)))
        try:
            self._client.clear("space")
        except ProtocolError:
            stored = 0
        if not self._agree(stored):
            self.side.stop_loading("the cache may hold what was computed with former weights")
            return False
        return True

    def close(self) -> None:
        """The engine ends."""
        self.side.close()
        self.worker.close()

    def _follow(self, req: Any) -> None:
        """Admit a request, or tell the tracker of its new tokens."""
        if self.side.admit(req.rid, lambda: self._derive(req)) is None:
            return

        def tell(tracker: Any) -> None:
            if len(req.origin_input_ids) + len(req.output_ids) > tracker.n_tokens:
                inputs = self._derive(req)
                for extra_key in inputs.extra_keys:
                    tracker.add(extra_key)
                tracker.extend(inputs.tokens[tracker.n_tokens :])

        self.side.change(req.rid, tell)
