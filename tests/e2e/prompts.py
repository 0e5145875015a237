"""Requests for a real engine, and what an answer should be."""

import random
from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-4
"""Between log-probabilities of one request computed in batches of other shapes; wrong KV moves them by 0.01 to 2."""

Request = dict[str, Any]
Answer = dict[str, Any]


def words(n_tokens: int, title: str) -> list[int]:
    """The beginning of a text of its own for each title."""
    chance = random.Random(title)
    return [chance.randrange(30, 500) for _ in range(n_tokens)]


BLOCK = 32
"""Tokens of the engine's block."""


def full_hit(n_tokens: int, chunk_size: int, *, generated: int = 8) -> int:
    """Tokens that come from a cache that holds every chunk which an engine saved.

    The last token of a prompt is always computed, and a chunk that ends inside a block is saved when that is full.

    Args:
        n_tokens: of the prompt.
        chunk_size: of the cache.
        generated: tokens that the engine went on with when it saved; the last one has no KV.
    """
    full = (n_tokens + generated - 1) // BLOCK * BLOCK
    return min(full // chunk_size * chunk_size, n_tokens // chunk_size * chunk_size, n_tokens - 1)


def difference(expected: Answer, got: Answer) -> float:
    """The largest difference of log-probabilities; infinite where tokens differ."""
    if expected["tokens"] != got["tokens"]:
        return float("inf")
    pairs = zip(expected["logprobs"], got["logprobs"], strict=True)
    return max(float(abs(one - other)) for one, other in pairs)


def differences(expected: Sequence[Answer], got: Sequence[Answer]) -> list[float]:
    """Of each answer from the expected one, as far as they are more than noise; 0.0 for the same answer."""
    found = [difference(one, other) for one, other in zip(expected, got, strict=True)]
    return [0.0 if one <= TOLERANCE else one for one in found]


def assert_same(expected: Sequence[Answer], got: Sequence[Answer]) -> None:
    """Every answer is that of an engine without a cache."""
    found = differences(expected, got)
    assert [0.0] * len(expected) == found, found
