"""What the released LMCache writes for inputs of ours: runs in LMCache's environment, never in this project's.

in    one JSON object of inputs
out   one JSON object of what its own functions gave
"""

import base64
import json
import logging
import pickle
import sys
from typing import Any

logging.disable(logging.CRITICAL)

import torch  # noqa: E402  (LMCache configures logging when it is imported)
from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids  # noqa: E402
from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE, CacheEngineKey, LayerCacheEngineKey  # noqa: E402
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, native_connector_l2_adapter  # noqa: E402
from lmcache.v1.multiprocess.token_hasher import TokenHasher  # noqa: E402
from lmcache.v1.storage_backend.raw_block import key_codec  # noqa: E402


class Span:
    """As vLLM's PlaceholderRange."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length


def object_names(fields: list[Any]) -> list[str]:
    """File name, native string and raw block entry of an object key."""
    model, kv_rank, group, chunk_hash, salt = fields
    key = ObjectKey(bytes.fromhex(chunk_hash), model, kv_rank, group, salt)
    return [
        fs_l2_adapter._object_key_to_filename(key),
        native_connector_l2_adapter._object_key_to_string(key),
        key_codec.object_key_to_string(key),
    ]


def engine_text(fields: list[Any]) -> str:
    """``to_string`` of an engine key."""
    model, world_size, worker, chunk_hash, dtype, layer, tags = fields
    configs = {f"lmcache.tag.{name}": value for name, value in tags} or None
    common = (model, world_size, worker, chunk_hash, STR_DTYPE_TO_TORCH_DTYPE[dtype], configs)
    key = CacheEngineKey(*common) if layer is None else LayerCacheEngineKey(*common, layer_id=layer)
    return str(key.to_string())


def substituted(tokens: list[int], spans: list[list[Any]]) -> list[int]:
    """The prompt after LMCache's own producer."""
    tensor = torch.tensor(tokens, dtype=torch.int64)
    apply_mm_hashes_to_token_ids(tensor, [s[0] for s in spans], [Span(*s[1:]) for s in spans])
    return list(tensor.tolist())


def main() -> None:
    """Answer one request."""
    asked = json.load(sys.stdin)
    tensors = pickle.loads(base64.b64decode(asked["pickle"]))
    answer = {
        "object_names": [object_names(fields) for fields in asked["objects"]],
        "engine_texts": [engine_text(fields) for fields in asked["engine_keys"]],
        "substituted": [substituted(*prompt) for prompt in asked["prompts"]],
        "chunk_hashes": [h.hex() for h in TokenHasher(16).compute_chunk_hashes(asked["tokens"])],
        "tensors": [[str(t.dtype), list(t.shape), t.float().sum().item()] for t in tensors],
        "pickle": base64.b64encode(pickle.dumps(tensors[:2])).decode(),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
