"""A process with SGLang's own scheduler-side classes in it, told what to do by lines of JSON: no engine, no model.

Requests (``Req``), the token slots and their allocator (``MHATokenToKVPool``, ``TokenToKVPoolAllocator``), the table of
rows (``ReqToTokenPool``) and the radix tree (``RadixCache``) are SGLang's, made by its registry of backends and used in
the order of its scheduler; the tree asks our store. KV is not computed by a model: what a token's KV is follows from
all tokens before it and the request's identity, so a wrong hit shows in the values.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from answering import answer_calls
from sglang.srt.managers.mm_utils import pad_mm_tokens
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs, Req
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from keying import KeySpace
from keying.engines import EngineInputs, from_sglang
from protocol_v2.client import CacheClient
from protocol_v2.connectors.sglang import SglangStore

SLOTS = 256
BACKEND = "extra_keys"
PLACEHOLDER = 9
"""The token that stands for a part of a picture, before SGLang writes the picture's sentinels over it."""


def tokens_only(req: Any) -> EngineInputs:
    """The classic fault: placeholder tokens and nothing else."""
    return EngineInputs(from_sglang(req).tokens, ())


class StoredTree(RadixCache):  # type: ignore[misc]  # SGLang lives in an environment of its own
    """SGLang's tree with our cache behind it: the glue that a deployment registers as a backend."""

    def __init__(self, params: CacheInitParams, store: SglangStore) -> None:
        self.store = store
        super().__init__(params)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The tree's own prefix, and behind it what the cache offers."""
        found = super().match_prefix(params)
        if params.req is None:  # the tree asks itself, at a checkpoint
            return found
        return found._replace(host_hit_length=self.store.match(params.req, found.device_prefix_len))

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        """Slots for what was offered, loaded and put into the tree as far as they were delivered."""
        req, node = params.req, params.best_match_node
        before = self.path_device_indices(node)
        slots = self.token_to_kv_pool_allocator.alloc(params.host_hit_length)
        delivered = self.store.load(req, [] if slots is None else slots.tolist())
        if slots is None:
            return 0, node
        self.token_to_kv_pool_allocator.free(slots[delivered:])
        if delivered:
            tokens = req.full_untruncated_fill_ids[: len(before) + delivered]
            key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
            self.insert(InsertParams(key=key, value=torch.cat([before, slots[:delivered]])))
            node = super().match_prefix(MatchPrefixParams(key=key)).last_device_node
        return delivered, node

    def checkpoint(self, req: Req, *, up_to: int, **others: Any) -> None:
        """Whole chunks go to the cache before the tree takes the row over."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
        self.store.checkpoint(req, row.tolist(), up_to)
        super().checkpoint(req, up_to=up_to, **others)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """The request is over."""
        self.store.release(req)
        super().on_release(req, checkpointed=checkpointed)


def truth(tokens: Any, place: int, identity: str) -> float:
    """What the KV of a token is."""
    return float(
        (sum(int(one) * (at + 7) for at, one in enumerate(tokens[: place + 1])) + sum(identity.encode())) % 2039
    )


class SglangHost:
    """One rank."""

    def __init__(self) -> None:
        self.tree: Any = None
        self.pool: Any = None
        self.store: Any = None

    def open(
        self,
        address: str,
        model: str,
        *,
        wrong_keys: bool = False,
        lookup_timeout: float = 30.0,
        load_timeout: float = 60.0,
    ) -> list[str]:
        """Pools, a client, a store and the tree that SGLang's registry makes; the classes that the tree is of."""
        if self.store is None:
            publish(ServerArgs(model_path="none"), role="scheduler")
        else:
            self.store.close()
        self.pool = MHATokenToKVPool(
            size=SLOTS,
            page_size=1,
            dtype=torch.float32,
            head_num=2,
            head_dim=4,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        allocator = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", self.pool, need_sort=False)
        rows = ReqToTokenPool(size=4, max_context_len=SLOTS, device="cpu", enable_memory_saver=False)
        client = CacheClient(address, KeySpace(model, chunk_size=8, kv_dtype="float32"))
        client.wait_ready(30)
        buffers = {
            f"{kind}{layer}": buffer
            for kind, buffers in (("k", self.pool.k_buffer), ("v", self.pool.v_buffer))
            for layer, buffer in enumerate(buffers)
        }
        derive = tokens_only if wrong_keys else from_sglang
        store = SglangStore(client, buffers, derive, lookup_timeout=lookup_timeout, load_timeout=load_timeout)
        if get_radix_cache_factory(BACKEND) is None:
            register_radix_cache_backend(BACKEND, lambda context: StoredTree(context.params, self.store))
        self.store = store
        factory = get_radix_cache_factory(BACKEND)
        assert factory is not None
        params = CacheInitParams(
            disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=1
        )
        self.tree = factory(SimpleNamespace(params=params))
        assert isinstance(self.tree, BasePrefixCache)
        return [one.__name__ for one in type(self.tree).__mro__]

    def serve(self, rid: str, tokens: list[int], *, picture: int | None = None, **fields: Any) -> dict[str, Any]:
        """A request from admission to its end, as SGLang's scheduler goes; what it took from where, and wrong values.

        Values before a picture do not depend on it.
        """
        tree, pool = self.tree, self.pool
        prompt, media = array("q", tokens), None
        begin = tokens.index(PLACEHOLDER) if picture is not None else len(tokens)
        if picture is not None:
            end = begin + tokens.count(PLACEHOLDER)
            item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(begin, end - 1)])
            item.set_identity(picture.to_bytes(32, "big"))
            media = MultimodalInputs(mm_items=[item], im_token_id=PLACEHOLDER)
            prompt = pad_mm_tokens(prompt, media)
        req = Req(rid, "", prompt, SamplingParams(max_new_tokens=1), vocab_size=1000, **fields)
        req.multimodal_inputs = media
        values = [
            truth(tokens, place, f"{fields} {picture if place >= begin else None}") for place in range(len(tokens))
        ]
        req.init_next_round_input(tree)
        local, offered = req.prefix_len, req.host_hit_length
        delivered = 0
        if offered:
            delivered, req.last_node = tree.init_load_back(InitLoadBackParams(req.best_match_node, offered, req=req))
        req.lock = tree.lock(req.last_node)
        cached = local + delivered
        tree.req_to_token_pool.alloc([req])
        fresh = tree.token_to_kv_pool_allocator.alloc(len(tokens) - cached)
        row = torch.cat([tree.path_device_indices(req.last_node), fresh])
        tree.req_to_token_pool.write((req.kv.req_pool_idx, slice(0, len(tokens))), row.to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(tokens)
        req.kv.cache_protected_len = cached
        for place in range(cached, len(tokens)):
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[row[place]] = values[place]
        wrong = [
            place
            for place in range(len(tokens))
            for buffer in (*pool.k_buffer, *pool.v_buffer)
            if not bool((buffer[row[place]] == values[place]).all())
        ]
        release_kv_cache(req, tree, checkpoint=True)
        self.store.worker.flush(30)
        return {"local": local, "offered": offered, "delivered": delivered, "wrong": wrong}

    def evict(self) -> int:
        """Empty SGLang's own tree, and overwrite all slots; tokens that went, after which every slot must be free."""
        gone = self.tree.evict(EvictParams(num_tokens=SLOTS)).num_tokens_evicted
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.fill_(-1.0)
        assert self.tree.token_to_kv_pool_allocator.available_size() == SLOTS
        return int(gone)

    def facts(self) -> dict[str, Any]:
        """The store's counters and what it still holds."""
        return {**self.store.side.counters.facts(), "standing": len(self.store.side)}


if __name__ == "__main__":
    answer_calls(SglangHost)
