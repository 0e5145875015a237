"""SGLang's and TensorRT-LLM's adapters over a real server, against duck-typed requests and pools that know right KV."""

import time
from array import array
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keying import CacheSalt, KeySpace
from keying.engines import EngineInputs, from_sglang, from_tensorrt_llm
from protocol_v2.cache import ChunkCache
from protocol_v2.client import CacheClient
from protocol_v2.connectors.settings import ConnectorSettings
from protocol_v2.connectors.sglang import SglangStore
from protocol_v2.connectors.tensorrt_llm import Deployment, TensorRtScheduler, TensorRtWorker
from protocol_v2.errors import ServerUnavailableError
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService
from tests.keying.engine_samples import sglang_req, trt_request

pytestmark = pytest.mark.zmq


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    """A cache server in memory."""
    place = tmp_path_factory.mktemp("e") / "c"
    service = CacheService(ChunkCache(64 << 20), ServerTerms(b"E" * 16), started=time.monotonic())
    with CacheServer(f"ipc://{place}", service) as running:
        yield running


def left_over(server: CacheServer) -> tuple[Any, Any]:
    """Leases and sessions that stand when they have had time to end."""
    with CacheClient(server.address) as client:
        client.wait_ready(5)
        ends = time.monotonic() + 5
        while True:
            facts = client.status()
            left = facts["cache.leases"], facts["cache.sessions"]
            if left == (0, 0) or time.monotonic() > ends:
                return left
            time.sleep(0.005)  # a server says no event when a lease ends


def value(tokens: Any, place: int, salt: str = "") -> int:
    """What the KV of a token is: it follows from all tokens before it."""
    return (sum(int(token) * (at + 7) for at, token in enumerate(tokens[: place + 1])) + sum(salt.encode())) % 65_521


# ---- SGLang


class Ranks:
    """Ranks that agree on counts: each says its own, and the least of all is taken."""

    def __init__(self, others: list[int] | None = None) -> None:
        self.others = others or []

    def __call__(self, count: int) -> int:
        """The least."""
        return min([count, *self.others])


class SglangRank:
    """One rank: a pool of slots with K and V of two layers, and a store behind it."""

    def __init__(self, server: CacheServer, model: str, *, world: int = 1, rank: int = 0, agree: Any = None) -> None:
        space = KeySpace(model, chunk_size=8, kv_dtype="int64")
        self.client = CacheClient(server.address, space)
        self.client.wait_ready(5)
        self.pool = {f"{kind}{layer}": torch.zeros(200, 2, dtype=torch.int64) for layer in range(2) for kind in "kv"}
        self.store = SglangStore(self.client, self.pool, from_sglang, world=world, rank=rank, agree=agree)
        self._free = list(range(1, 200))

    def slots(self, count: int) -> list[int]:
        """Some slots, not in order."""
        taken, self._free = self._free[:count][::-1], self._free[count:]
        return taken

    def serve(self, req: Any, local: int = 0) -> tuple[int, int]:
        """A request's life: matched, loaded, computed, saved, released; tokens offered and delivered."""
        tokens = [*req.origin_input_ids, *req.output_ids]
        slots = self.slots(len(tokens))
        salt = req.cache_salt or ""
        self._compute(tokens, slots, 0, local, salt)
        offered = self.store.match(req, local)
        delivered = self.store.load(req, slots[local : local + offered]) if offered else 0
        self._compute(tokens, slots, local + delivered, len(tokens), salt)
        self.store.checkpoint(req, slots, len(tokens))
        assert [value(tokens, place, salt) for place in range(len(tokens))] == [
            int(self.pool["v1"][slot, 1]) for slot in slots
        ]
        self.store.release(req)
        for tensor in self.pool.values():
            tensor[slots] = -9  # another request's now
        assert self.store.worker.flush(5)
        return offered, delivered

    def _compute(self, tokens: list[int], slots: list[int], start: int, stop: int, salt: str) -> None:
        for place in range(start, stop):
            for tensor in self.pool.values():
                tensor[slots[place]] = value(tokens, place, salt)

    def close(self) -> None:
        """End."""
        self.store.close()
        self.client.close()


def sglang_request(rid: str, n_tokens: int = 44, **fields: Any) -> Any:
    """A ``Req``; four tokens of it were generated."""
    tokens = array("q", range(300, 300 + n_tokens))
    return sglang_req(rid=rid, origin_input_ids=tokens[:-4], output_ids=tokens[-4:], **fields)


def test_sglang_loads_what_another_process_saved(server: CacheServer) -> None:
    """Token slots in any order; behind what the tree has; by salt. The last token is always computed."""
    first, second = SglangRank(server, "sgl"), SglangRank(server, "sgl")
    assert (0, 0) == first.serve(sglang_request("a"))
    assert (0, 0) == first.serve(sglang_request("b", cache_salt="s"))
    assert (40, 40) == second.serve(sglang_request("c"))
    assert (28, 28) == second.serve(sglang_request("d", cache_salt="s"), local=12)
    assert (39, 39) == second.serve(sglang_request("e", 40))
    for rank in (first, second):
        assert 0 == len(rank.store.side)
        rank.close()
    assert (0, 0) == left_over(server)


def test_sglang_ranks_promise_and_use_what_all_have(server: CacheServer) -> None:
    """Two ranks hold a part each; a count that is less on another rank is what is taken, and the engine computes on."""
    for _ in range(2):
        ranks = [SglangRank(server, "sgl2", world=2, rank=rank) for rank in (0, 1)]
        got = [rank.serve(sglang_request("r")) for rank in ranks]
        for rank in ranks:
            rank.close()
    assert [(40, 40), (40, 40)] == got
    less = SglangRank(server, "sgl2", world=2, rank=0, agree=Ranks([24]))
    assert (24, 24) == less.serve(sglang_request("less"))
    none = SglangRank(server, "sgl2", world=2, rank=0, agree=Ranks([0]))
    assert (0, 0) == none.serve(sglang_request("none"))
    for rank in (less, none):
        rank.close()


def test_sglang_computes_what_a_load_did_not_deliver(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the hit is lost: the count says so, the rest is computed, and what is then saved is right."""
    first = SglangRank(server, "sgl3")
    first.serve(sglang_request("a", 32))
    losing = SglangRank(server, "sgl3")
    retrieve = losing.client.retrieve

    def half(*given: Any, **named: Any) -> Any:
        result = retrieve(*given, **named)
        return type(result)(result.chunks[:2])

    monkeypatch.setattr(losing.client, "retrieve", half)
    assert (32, 16) == losing.serve(sglang_request("b"))
    assert 1 == losing.store.side.counters.load_failures
    third = SglangRank(server, "sgl3")
    assert (40, 40) == third.serve(sglang_request("c"))
    for rank in (first, losing, third):
        rank.close()


def test_sglang_retracted_and_aborted_requests_leave_nothing(server: CacheServer) -> None:
    """Matched and retracted, matched and aborted, loaded without slots: no lease is left."""
    rank = SglangRank(server, "sgl4")
    rank.serve(sglang_request("a"))
    retracted, aborted, crowded = (sglang_request(name) for name in ("r", "x", "n"))
    assert [40, 40, 40] == [rank.store.match(one, 0) for one in (retracted, aborted, crowded)]
    rank.store.retract(retracted)
    retracted.output_ids.extend(range(900, 904))
    assert 40 == rank.store.match(retracted, 0)
    assert 0 == rank.store.load(crowded, [])
    for one in (retracted, aborted, crowded, aborted):
        rank.store.release(one)
    rank.store.checkpoint(aborted, [1, 2, 3], 0)
    rank.store.release(aborted)
    assert (0, 0) == left_over(server)
    rank.close()


def test_sglang_forgets_when_its_weights_change(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored and what stands is of the former weights; where the clear failed nothing is loaded any more."""
    rank = SglangRank(server, "sglang-reset")
    rank.serve(sglang_request("before", 28))
    stands, slots = sglang_request("stands", 28), rank.slots(28)
    assert 24 == rank.store.match(stands, 0)  # a lease, which would keep its chunks
    assert rank.store.reset()
    assert 0 == rank.store.load(stands, slots[:24])
    rank.store.checkpoint(stands, slots, 28)
    rank.store.release(stands)
    assert {"cache_reset": 1} == dict(rank.store.side.counters.bypassed)
    assert [(0, 0), (24, 24)] == [rank.serve(sglang_request(rid, 28)) for rid in ("after", "again")]

    def gone(scope: str) -> Any:
        raise ServerUnavailableError(f"no clear of the {scope}")

    monkeypatch.setattr(rank.client, "clear", gone)
    assert not rank.store.reset()
    assert (0, 0) == rank.serve(sglang_request("uncleared", 28))
    rank.close()


def test_sglang_without_an_identity_goes_by(server: CacheServer) -> None:
    """An adapter that nobody can name, and a client without a space."""
    rank = SglangRank(server, "sgl5")
    rank.serve(sglang_request("a", lora_id="5"))
    assert {"unknown_adapter": 1} == dict(rank.store.side.counters.bypassed)
    assert (0, 0) == rank.serve(sglang_request("b", lora_id="5"))
    rank.close()
    with CacheClient(server.address) as client, pytest.raises(ValueError, match="no space"):
        SglangStore(client, {}, from_sglang)


# ---- TensorRT-LLM


class TensorRt:
    """An executor of one rank around the two classes, as ``KvCacheConnectorManager`` calls them."""

    def __init__(self, server: CacheServer, model: str, *, world: int = 1, chunk_size: int = 8) -> None:
        deployment = Deployment(
            ConnectorSettings(address=server.address, chunk_size=chunk_size, wait_for_store=True),
            KeySpace(model, chunk_size=chunk_size, kv_dtype="int64"),
            4,
            world=world,
            derive=derive,
        )
        self.worker = partial(TensorRtWorker, lambda _args: deployment)(SimpleNamespace())
        self.scheduler = partial(TensorRtScheduler, lambda _args: deployment)(SimpleNamespace())
        self.pool = torch.zeros(60, 2, 4, 3, dtype=torch.int64)  # blocks, layers, tokens, content
        self.worker.register_kv_caches(self.pool)
        self.scheduler._client.wait_ready(5)
        self._free = list(range(60))

    def serve(self, request: Any, *, decode: int = 0, computed: int = 0, step: int = 20) -> int:
        """A request's life; tokens that were promised."""
        tokens = request.tokens
        offered, asynchronous = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert not asynchronous
        table, self._free = self._free[: len(tokens) // 4 + 8], self._free[len(tokens) // 4 + 8 :]
        self._compute(tokens, table, 0, computed)
        self.scheduler.update_state_after_alloc(request, table)
        position, new = computed + offered, True
        while position < len(tokens):
            n_tokens = min(step, len(tokens) - position)
            data = SimpleNamespace(
                request_id=request.request_id,
                new_tokens=[],
                new_block_ids=table if new else [],
                computed_position=position - (offered if new else 0),
                num_scheduled_tokens=n_tokens,
            )
            self._step(data, table, tokens, position, n_tokens, new=new)
            position, new = position + n_tokens, False
            if position == len(tokens) and decode:
                tokens.append(tokens[-1] + 3)
                decode -= 1
        assert [value(tokens, place) for place in range(position)] == [
            int(self.pool[table[place // 4], 1, place % 4, 2]) for place in range(position)
        ]
        assert not self.scheduler.request_finished(request, table)
        self.pool[table] = -9  # another request's now
        self._free += table
        return offered

    def _step(self, data: Any, table: list[int], tokens: list[int], start: int, count: int, *, new: bool) -> None:
        output = SimpleNamespace(new_requests=[data] if new else [], cached_requests=[] if new else [data])
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        for layer in range(2):
            self.worker.wait_for_layer_load(layer, None)
            self.worker.save_kv_layer(layer, None)
        self._compute(tokens, table, start, start + count)
        self.worker.wait_for_save(SimpleNamespace(synchronize=lambda: None))
        assert ([], []) == self.worker.get_finished([], [])
        self.worker._clear_connector_meta()
        assert self.worker.get_connector_meta() is None

    def _compute(self, tokens: list[int], table: list[int], start: int, stop: int) -> None:
        for place in range(start, stop):
            self.pool[table[place // 4], :, place % 4] = value(tokens, place)

    def close(self) -> None:
        """End."""
        self.scheduler.close()
        self.worker.close()


def derive(request: Any) -> EngineInputs:
    """Key inputs: the engine's own, and the salt of the test."""
    inputs = from_tensorrt_llm(request)
    return EngineInputs(inputs.tokens, (*inputs.extra_keys, *([CacheSalt(request.salt)] if request.salt else [])))


def trt(request_id: int, n_tokens: int = 40, *, salt: str = "") -> Any:
    """An ``LlmRequest`` whose tokens grow."""
    tokens = list(range(300, 300 + n_tokens))
    request = trt_request(get_tokens=lambda beam: [tokens][beam], request_id=request_id)
    request.tokens, request.salt = tokens, salt
    return request


def test_tensorrt_promises_what_is_fetched_and_saves_what_is_computed(server: CacheServer) -> None:
    """In whole blocks, behind what the engine has, with what decoding filled; block 0 is a block as any other."""
    first, second = TensorRt(server, "trt"), None
    assert 0 == first.serve(trt(1), decode=9)
    first.close()
    second = TensorRt(server, "trt")
    assert 36 == second.serve(trt(2))  # the last token is computed, and its block with it
    longer = trt(3, 40)
    longer.tokens += [longer.tokens[-1] + 3 * place for place in range(1, 10)]
    assert 48 == second.serve(longer)
    assert 24 == second.serve(trt(4), computed=12)
    assert 0 == second.serve(trt(5, salt="other"))
    assert 0 == len(second.scheduler.side)
    second.close()
    assert (0, 0) == left_over(server)


def test_tensorrt_offers_nothing_where_the_fetch_fails(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine cannot be told of a failed load, so a hit that is not all here is none; its KV is right."""
    first = TensorRt(server, "trt2")
    first.serve(trt(1))
    first.close()
    second = TensorRt(server, "trt2")
    side: Any = second.worker.side
    retrieve = side._client.retrieve

    def part(*given: Any, **named: Any) -> Any:
        result = retrieve(*given, **named)
        return type(result)(result.chunks[:2])

    monkeypatch.setattr(side._client, "retrieve", part)
    assert 0 == second.serve(trt(2))
    assert {} == side._staged
    second.close()
    assert (0, 0) == left_over(server)


def test_tensorrt_engines_of_several_ranks_save_and_do_not_load(server: CacheServer) -> None:
    """One rank cannot promise for another, and the interface has no way to say that it was wrong."""
    for _ in range(2):
        engine = TensorRt(server, "trt3", world=2)
        assert 0 == engine.serve(trt(1))
        assert 0 < engine.scheduler.side.counters.saved_chunks
        engine.close()


def test_tensorrt_requests_that_ask_again_or_end_early_leave_nothing(server: CacheServer) -> None:
    """Asked twice before there were blocks; preempted; finished before their first step: nothing is staged or held."""
    engine = TensorRt(server, "trt4")
    engine.serve(trt(1))
    scheduler, side = engine.scheduler, engine.worker.side
    assert side is not None
    request = trt(2)
    assert (36, False) == scheduler.get_num_new_matched_tokens(request, 0)
    assert (36, False) == scheduler.get_num_new_matched_tokens(request, 0)
    assert 1 == len(side._staged)
    scheduler.update_state_after_alloc(request, list(range(30, 42)))
    assert (36, False) == scheduler.get_num_new_matched_tokens(request, 0)
    assert (0, False) == scheduler.get_num_new_matched_tokens(trt(9), 3)  # not at a block
    for one in (request, trt(9)):
        assert not scheduler.request_finished(one, [])
    scheduler.update_state_after_alloc(trt(77), [1])
    scheduler.build_connector_meta(SimpleNamespace(new_requests=[SimpleNamespace(request_id=77)], cached_requests=[]))
    assert 0 == len(scheduler.side)
    assert (0, 0) == left_over(server)
    engine.close()
