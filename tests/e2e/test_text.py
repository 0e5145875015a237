"""A text model: two engine processes in turn, over one cache server."""

import pytest

from tests.e2e.cache_server import Server
from tests.e2e.engines import LORA, Engines
from tests.e2e.environment import needs_engine
from tests.e2e.prompts import Request, assert_same, full_hit, words

pytestmark = [pytest.mark.e2e, needs_engine]


@pytest.mark.parametrize(
    ("chunk_size", "load"),
    [(64, "sync"), (64, "async"), (32, "sync"), (96, "async"), (48, "sync"), (80, "async"), (256, "sync")],
)
def test_the_second_engine_process_hits_what_the_first_stored(
    engines: Engines, server: Server, chunk_size: int, load: str
) -> None:
    """For chunks of one block of the engine (32), of several, and of neither; loaded in the step and between steps.

    A prompt that is prefilled in two steps, two of whole chunks only (their last token is computed again), and one
    that is shorter than a chunk. A full hit may end inside a block of the engine.
    """
    lengths = [(700, 8), (3 * chunk_size, 8), (3 * chunk_size, 40), (chunk_size - 1, 8)]
    requests = [
        {"tokens": words(n_tokens, f"text {place} {chunk_size} {load}"), "max_tokens": generated}
        for place, (n_tokens, generated) in enumerate(lengths)
    ]
    full = [full_hit(n_tokens, chunk_size, generated=generated) for n_tokens, generated in lengths]
    reference = engines.expected("llama", requests)
    for process, hits in (("first", [0, 0, 0, 0]), ("second", full)):
        engines.open(process, "llama", chunk_size=chunk_size, load=load)
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        assert hits == run.cached, run.facts
        assert (4, 0, 0) == (run.facts["requests"], run.facts["load_failures"], run.facts["standing"])
    assert (0, 0) == server.left_over()


def test_what_was_generated_is_hit_by_the_next_turn(engines: Engines) -> None:
    """Chunks that decoding filled have the keys of a prompt with the same tokens."""
    turn = {"tokens": words(100, "a turn"), "max_tokens": 120}
    engines.open("first", "llama")
    first = engines.run("first", [turn])
    assert_same(engines.expected("llama", [turn]), first.answers)
    following = {"tokens": [*words(100, "a turn"), *first.answers[0]["tokens"], *words(20, "the next turn")]}
    engines.open("second", "llama")
    second = engines.run("second", [following])
    assert_same(engines.expected("llama", [following]), second.answers)
    assert [192] == second.cached  # 219 of the 220 tokens have KV: three chunks of 64


def test_salts_and_adapters_keep_apart_and_each_hits_its_own(engines: Engines, server: Server) -> None:
    """Nine identities with the same tokens: in the first process each misses, in the second each hits its own.

    Without and with salts, with adapters, with both, and with an adapter that is named like a salt.
    """
    tokens, salt = words(300, "identities"), "tenant@x/../y"
    requests: list[Request] = [
        {"tokens": tokens},
        {"tokens": tokens, "salt": "a"},
        {"tokens": tokens, "salt": salt},
        {"tokens": tokens, "adapter": engines.adapter("llama-a")},
        {"tokens": tokens, "adapter": engines.adapter("llama-b")},
        {"tokens": tokens, "adapter": engines.adapter("llama-a"), "salt": "a"},
        {"tokens": tokens, "adapter": engines.adapter("llama-a"), "salt": "b"},
        {"tokens": tokens, "adapter": engines.adapter("llama-b"), "salt": "a"},
        {"tokens": tokens, "adapter": engines.adapter("llama-c", name=salt)},
    ]
    reference = engines.expected("llama", requests, **LORA)
    assert len({tuple(reference[place]["tokens"]) for place in (0, 3, 4, 8)}) == 4
    for process, hit in (("first", 0), ("second", 256)):
        engines.open(process, "llama", options=LORA)
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        assert [hit] * 9 == run.cached
    assert (0, 0) == server.left_over()
