"""Where the released token databases put boundaries: runs in LMCache's environment, never in this project's.

in    one JSON object: chunk_size, and calls of each database
out   one JSON object of the ``[start, end]`` pairs, in the order of the calls
"""

import json
import logging
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

logging.disable(logging.CRITICAL)

import torch  # noqa: E402  (LMCache configures logging when it is imported)
from lmcache.v1 import token_database  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402

START_TOKEN = 1
METADATA = SimpleNamespace(model_name="m", use_mla=False)


class Tokenizer:
    """Text of numbers, with a start token in front; LMCache would load one from the network."""

    @classmethod
    def from_pretrained(cls, _model: str) -> "Tokenizer":
        """For any model."""
        return cls()

    def encode(self, text: str) -> list[int]:
        """The start token and the numbers."""
        return [START_TOKEN, *map(int, text.split())]


def bounds(rows: Iterable[tuple[int, int, Any]]) -> list[list[int]]:
    """Places without keys."""
    return [[start, end] for start, end, _ in rows]


def mask_of(n_tokens: int, hidden: int) -> torch.Tensor:
    """False over a prefix."""
    return torch.arange(n_tokens) >= hidden


def main() -> None:
    """Answer one request."""
    asked = json.load(sys.stdin)
    answer: dict[str, list[Any]] = {"chunks": [], "placed": [], "segments": []}
    for save_unfull_chunk, n_tokens, hidden in asked["chunks"]:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=asked["chunk_size"], save_unfull_chunk=save_unfull_chunk, pre_caching_hash_algorithm="builtin"
        )
        chunked = token_database.ChunkedTokenDatabase(config, METADATA)
        tokens = torch.arange(n_tokens)
        rows = chunked.process_tokens(tokens, None, None, mask_of(n_tokens, hidden), make_key=False)
        answer["chunks"].append(bounds(rows))
        lengths = [end - start for start, end, _ in chunked.process_tokens(tokens, make_key=False)]
        placed = chunked.process_tokens(hashes=[0] * len(lengths), offsets=lengths, make_key=False)
        answer["placed"].append(bounds(placed))
    token_database.AutoTokenizer = Tokenizer
    for separator, tokens, hidden in asked["segments"]:
        config = LMCacheEngineConfig.from_defaults(
            blend_special_str=" ".join(map(str, separator)), pre_caching_hash_algorithm="builtin"
        )
        segmented = token_database.SegmentTokenDatabase(config, METADATA)
        rows = segmented.process_tokens(tokens, mask=mask_of(len(tokens), hidden), make_key=False)
        answer["segments"].append(bounds(rows))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
