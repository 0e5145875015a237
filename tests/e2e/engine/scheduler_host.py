"""A process with vLLM's own schedulers in it and a toy in place of the model, told what to do by lines of JSON.

vLLM's `Scheduler` and `AsyncScheduler`, its KV cache manager, its requests and both sides of the connector are real
ones; `AsyncScheduler` schedules a step ahead, as engines on GPUs do and the CPU engine does not. The model is two
layers of sums over what is in the KV cache: whatever is read from a wrong slot, or was not written, changes the tokens.
"""

import os

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import random
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from answering import answer_calls
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from keying import CacheSalt, chunk_keys
from protocol_v2.connectors import vllm_engine

BLOCK = 16
MODULUS = 1_000_003
WORDS = 400
UNKNOWN = 7
"""Token of a draft that nobody proposed."""


# ---- the model


def first_layer(tokens: list[int], start: int, identity: int) -> Any:
    """KV of tokens by themselves; the first one is at position `start`."""
    places = torch.arange(start, start + len(tokens))
    return (torch.tensor(tokens, dtype=torch.int64) * 7 + identity * 13 + places * 3 + 5) % MODULUS


def attend(values: Any, first: int, start: int, stop: int, window: int | None, number: int) -> Any:
    """For the positions [start, stop) a sum over what each sees of `values`, which begin at position `first`."""
    seen, places = torch.arange(first, first + len(values)), torch.arange(start, stop)
    mask = seen[None, :] <= places[:, None]
    if window is not None:
        mask &= seen[None, :] > places[:, None] - window
    return (mask * (values * (seen + number) % MODULUS)[None, :]).sum(1) % MODULUS


def layers(tokens: list[int], identity: int, window: int | None, *, hybrid: bool) -> tuple[Any, Any, Any]:
    """Both layers' KV of a sequence, and what follows from it at each position."""
    one = first_layer(tokens, 0, identity)
    two = attend(one, 0, 0, len(tokens), window, 11)
    return one, two, attend(two, 0, 0, len(tokens), None if hybrid else window, 3)


def spoken(value: Any) -> int:
    """The token that follows."""
    return 10 + int(value) % WORDS


def identity_of(request: Any) -> int:
    """What else KV depends on."""
    return sum((request.cache_salt or "").encode())


@dataclass
class Row:
    """A request, as a model runner keeps it."""

    tokens: list[int]
    n_prompt: int
    blocks: list[list[int]]
    """Of each layer."""
    identity: int


@dataclass
class Engine:
    """A scheduler, the connector's two sides, and the KV.

    Args:
        config: ``VllmConfig``.
        ahead: a step is scheduled before the one before it is known.
        window: of the attention; None for all.
        hybrid: only what the first layer's KV is read with is a window, and each layer's KV is a group of its own.
        n_blocks: of KV.
        drafts: tokens that are proposed for each step.
        losing: probability that a retrieve delivers only a part.
    """

    config: Any
    ahead: bool
    window: int | None
    hybrid: bool
    n_blocks: int
    drafts: int
    losing: float
    chance: random.Random
    rows: dict[str, Row] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    prompts: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    answers: dict[str, list[int]] = field(default_factory=dict)
    stored: list[tuple[bytes, int, list[Any]]] = field(default_factory=list)
    underway: deque[tuple[Any, Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.int64}
        full = FullAttentionSpec(**shape)
        spec = full if self.window is None else SlidingWindowSpec(**shape, sliding_window=self.window)
        groups = [KVCacheGroupSpec(["one", "two"], spec)]
        if self.hybrid:
            groups = [KVCacheGroupSpec(["one"], spec), KVCacheGroupSpec(["two"], full)]
        cache = KVCacheConfig(
            num_blocks=self.n_blocks, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout="LBHNC"
        )
        self.kv = [torch.full((self.n_blocks, 1, BLOCK, 2), -99, dtype=torch.int64) for _ in range(2)]
        with set_current_vllm_config(self.config):
            self.worker = KVConnectorFactory.create_connector(
                config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=cache
            )
            self.worker.register_kv_caches({"one": self.kv[0], "two": self.kv[1]})
            self.scheduler = (AsyncScheduler if self.ahead else Scheduler)(
                vllm_config=self.config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=True,
            )
        hashing = get_hash_fn_by_name("sha256")
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(BLOCK, hashing)
        self.connector = self.scheduler.connector.scheduler
        self._watch()

    def _watch(self) -> None:
        """Lose parts of what is loaded, and remember what is stored."""
        make = self.worker.worker._make

        def watched(space: Any) -> Any:
            side = make(space)
            client = side._client
            retrieve, store = client.retrieve, client.store

            def losing(*given: Any, **others: Any) -> Any:
                result = retrieve(*given, **others)
                if result.chunks and self.chance.random() < self.losing:
                    result = replace(result, chunks=result.chunks[: self.chance.randrange(len(result.chunks))])
                return result

            def remembering(session: str, keys: Any, tensors: Any, *, first: int, shard: Any, **others: Any) -> Any:
                for key, chunk in zip(keys[first:], tensors, strict=True):
                    self.stored.append((key, shard.group, [one.clone() for one in chunk]))
                return store(session, keys, tensors, first=first, shard=shard, **others)

            client.retrieve, client.store = losing, remembering
            return side

        self.worker.worker._make = watched

    # ---- what a user does

    def add(
        self, name: str, tokens: list[int], max_tokens: int, salt: str | None, priority: int, *, goes_on: bool
    ) -> None:
        """A request, or more input for a session of that name."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        params.skip_reading_prefix_cache = False
        request = Request(
            name,
            list(tokens),
            params,
            None,
            cache_salt=salt,
            priority=priority,
            block_hasher=self.hasher,
            resumable=goes_on,
        )
        if name not in self.requests:
            self.requests[name] = request
            self.prompts[name] = list(tokens), max_tokens
            self.answers[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Its user has gone."""
        self.aborted.add(name)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # ---- a step

    def step(self) -> None:
        """As ``EngineCore.step``, or ``step_with_batch_queue`` where it schedules ahead."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.underway.append((output, self._execute(output)))
            if self.ahead and len(self.underway) < 2 and output.total_num_scheduled_tokens:
                return
        if not self.underway:
            return
        output, computed = self.underway.popleft()
        for outputs in self.scheduler.update_from_output(output, computed).values():
            for one in outputs.outputs:
                self.answers[one.request_id] += one.new_token_ids
        if self.drafts:
            self._propose(output)

    def run(self) -> None:
        """Until nothing is left but sessions that wait for input."""
        ends = time.monotonic() + 300
        while time.monotonic() < ends:
            if not self.underway and not self.scheduler.has_unfinished_requests():
                waiting = self.scheduler.num_waiting_for_streaming_input
                if waiting or not self.scheduler.has_requests():
                    return
            self.step()
        raise TimeoutError("the engine does not come to an end")

    def _execute(self, output: Any) -> Any:
        """As the first model runner: rows are updated, what is scheduled is computed between the connector's hooks."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        starts = self._update_rows(output)
        names, sampled = list(output.num_scheduled_tokens), []
        with (
            set_current_vllm_config(self.config),
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output) as transfers,
        ):
            for name in names:
                drafts = output.scheduled_spec_decode_tokens.get(name, [])
                sampled.append(self._compute(name, starts[name], output.num_scheduled_tokens[name], drafts))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=transfers,
        )

    def _update_rows(self, output: Any) -> dict[str, int]:
        """As ``GPUModelRunner._update_states``; where each request begins to compute."""
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        starts = {}
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            identity = identity_of(self.requests[new.req_id])
            self.rows[new.req_id] = Row(prompt, len(prompt), self._by_layer(new.block_ids), identity)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            row, fresh, n_output = self.rows[name], cached.new_block_ids[place], cached.num_output_tokens[place]
            starts[name] = cached.num_computed_tokens[place]
            del row.tokens[row.n_prompt + n_output :]
            if name in cached.resumed_req_ids:
                row.blocks = self._by_layer(fresh)
            elif fresh is not None:
                row.blocks = [[*had, *more] for had, more in zip(row.blocks, self._by_layer(fresh), strict=True)]
            if n_output and name in cached.all_token_ids:
                row.tokens[row.n_prompt :] = cached.all_token_ids[name][-n_output:]
        return starts

    def _by_layer(self, blocks: Any) -> list[list[int]]:
        return [list(blocks[0]), list(blocks[-1])]

    def _compute(self, name: str, start: int, n_tokens: int, drafts: list[int]) -> list[int]:
        row, stop = self.rows[name], start + n_tokens
        known = [*row.tokens, *drafts]
        tokens = [known[place] if place < len(known) else UNKNOWN for place in range(start, stop)]
        first = 0 if self.window is None else max(0, start - self.window + 1)
        self._put(0, row, start, first_layer(tokens, start, row.identity))
        self._put(1, row, start, attend(self._got(0, row, first, stop), first, start, stop, self.window, 11))
        window, first = (None, 0) if self.hybrid else (self.window, first)
        after = attend(self._got(1, row, first, stop), first, start, stop, window, 3)
        if stop < len(row.tokens):
            return []
        place = len(row.tokens) - 1
        sampled = [spoken(after[place - start])]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            place += 1
            sampled.append(spoken(after[place - start]))
        row.tokens += sampled
        return sampled

    def _slots(self, layer: int, row: Row, start: int, stop: int) -> Any:
        places = torch.arange(start, stop)
        return torch.tensor(row.blocks[layer])[places // BLOCK] * BLOCK + places % BLOCK

    def _got(self, layer: int, row: Row, start: int, stop: int) -> Any:
        return self.kv[layer].view(-1, 2)[self._slots(layer, row, start, stop), 0]

    def _put(self, layer: int, row: Row, start: int, values: Any) -> None:
        self.kv[layer].view(-1, 2)[self._slots(layer, row, start, start + len(values))] = values[:, None]

    def _layers(self, tokens: list[int], request: Any) -> tuple[Any, Any, Any]:
        return layers(tokens, identity_of(request), self.window, hybrid=self.hybrid)

    def _propose(self, output: Any) -> None:
        """Drafts for the next step, most of them right."""
        names = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests]
        drafts = []
        for name in names:
            tokens = list(self.scheduler.requests[name].all_token_ids)
            length = len(tokens)
            for _ in range(self.drafts):
                right = spoken(self._layers(tokens, self.requests[name])[2][-1])
                tokens.append(right + (self.chance.random() < 0.3))
            drafts.append(tokens[length:])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    # ---- what came of it

    def wrong(self) -> list[str]:
        """Requests that were not answered as an engine without a cache answers; sessions and aborted ones left out."""
        found = []
        for name, (prompt, max_tokens) in self.prompts.items():
            if name in self.aborted or self.requests[name].resumable:
                continue
            tokens = list(prompt)
            for _ in range(max_tokens):
                tokens.append(spoken(self._layers(tokens, self.requests[name])[2][-1]))
            if self.answers[name] != tokens[len(prompt) :]:
                found.append(name)
        return found

    def poison(self) -> list[list[int]]:
        """Start and end of stored chunks that are not the KV of what their key says."""
        right = {}
        for request in self.requests.values():
            tokens, salt = list(request.all_token_ids), request.cache_salt
            values = self._layers(tokens, request)[:2]
            for key in chunk_keys(self.connector.space, tokens, [] if salt is None else [CacheSalt(salt)]):
                right[key.digest] = key.start, key.stop, values
        found = []
        for digest, group, tensors in self.stored:
            start, stop, values = right[digest]
            for tensor, value in zip(tensors, values[group : group + 1] if self.hybrid else values, strict=True):
                rows = tensor[:, 0, :, 0].flatten()[start % BLOCK :][: stop - start]
                if not torch.equal(rows, value[start:stop]):
                    found.append([start, stop])
                    break
        return found

    def close(self) -> None:
        """End."""
        self.scheduler.shutdown()
        self.worker.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None


class SchedulerHost:
    """One engine at a time."""

    def __init__(self) -> None:
        self.engine: Any = None
        self._between = vllm_engine._only_between_steps

    def open(
        self,
        model: str,
        settings: dict[str, Any],
        *,
        seed: int = 0,
        ahead: bool = False,
        window: int | None = None,
        hybrid: bool = False,
        n_blocks: int = 64,
        budget: int = 256,
        prefix: bool = True,
        drafts: int = 0,
        policy: str = "fcfs",
        losing: float = 0.0,
        careless: bool = False,
    ) -> None:
        """Start an engine; a careless one takes loads of a step although it cannot take a failed one back."""
        self.close()
        vllm_engine._only_between_steps = (lambda *_, **__: None) if careless else self._between
        transfer = KVTransferConfig(
            kv_connector="ExtraKeysHybridConnector" if hybrid else "ExtraKeysConnector",
            kv_role="kv_both",
            kv_connector_module_path="protocol_v2.connectors.vllm",
            kv_connector_extra_config=settings,
        )
        speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
        config = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            block_size=32,
            kv_cache_memory_bytes=16 << 20,
            max_num_seqs=8,
            max_num_batched_tokens=max(budget, 64),
            enable_prefix_caching=prefix,
            scheduling_policy=policy,
            kv_transfer_config=transfer,
            speculative_config=speculation if drafts else None,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = ahead  # the CPU platform switches it off
        config.scheduler_config.max_num_scheduled_tokens = budget
        config.cache_config.block_size = BLOCK  # and wants more than this
        config.cache_config.num_gpu_blocks = n_blocks
        self.engine = Engine(config, ahead, window, hybrid, n_blocks, drafts, losing, random.Random(seed))

    def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def add(
        self,
        name: str,
        tokens: list[int],
        *,
        max_tokens: int = 1,
        salt: str | None = None,
        priority: int = 0,
        goes_on: bool = False,
    ) -> None:
        """See `Engine.add`."""
        self.engine.add(name, tokens, max_tokens, salt, priority, goes_on=goes_on)

    def abort(self, name: str) -> None:
        """See `Engine.abort`."""
        self.engine.abort(name)

    def step(self, count: int = 1) -> dict[str, str]:
        """Take steps; the requests that stand afterwards, and their state."""
        for _ in range(count):
            self.engine.step()
        return {name: request.status.name for name, request in self.engine.scheduler.requests.items()}

    def reset(self) -> bool:
        """Empty the engine's prefix cache, if nothing uses it."""
        return bool(self.engine.scheduler.reset_prefix_cache())

    def run(self) -> None:
        """See `Engine.run`."""
        self.engine.run()

    def report(self) -> dict[str, Any]:
        """What came of all requests."""
        engine = self.engine
        side = engine.connector.side
        return {
            **side.counters.facts(),
            "standing": len(side),
            "preemptions": sum(one.num_preemptions for one in engine.requests.values()),
            "stored": len(engine.stored),
            "wrong": engine.wrong(),
            "poison": engine.poison(),
        }


if __name__ == "__main__":
    answer_calls(SchedulerHost)
