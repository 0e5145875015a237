"""Engines of other shapes: two KV groups, two workers, the engine in processes of its own, other element types."""

from typing import Any

import pytest

from tests.e2e.cache_server import Server
from tests.e2e.engines import CHUNK, LORA, Engines
from tests.e2e.environment import needs_engine
from tests.e2e.prompts import Request, assert_same, difference, full_hit, words

pytestmark = [pytest.mark.e2e, needs_engine]


def picture(place: int, seed: int, title: str) -> Request:
    """A text with a picture of gemma3."""
    text = words(260, title)
    return {"tokens": [*text[:place], 4, *text[place:]], "images": [seed]}


def test_two_kv_groups_with_blocks_of_their_own(engines: Engines, server: Server) -> None:
    """Sliding and full attention: blocks slide out of the window, and only chunks that are whole in both are hit."""
    requests: list[Request] = [
        {"tokens": words(300, "hybrid")},
        {"tokens": words(300, "hybrid"), "salt": "s"},
        picture(100, 1, "hybrid picture"),
        picture(100, 2, "hybrid picture"),
    ]
    reference = engines.expected("gemma3", requests)
    for process in ("first", "second"):
        engines.open(process, "gemma3", connector="ExtraKeysHybridConnector", load="async")
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        if process == "second":
            assert [full_hit(one["prompt"], CHUNK) for one in reference] == run.cached
        else:
            assert [0, 0, 0, CHUNK] == run.cached
        assert 0 == run.facts["load_failures"]
    assert (0, 0) == server.left_over()


def test_a_hybrid_model_in_one_group(engines: Engines) -> None:
    """The plain connector takes the same model with one KV group."""
    requests: list[Request] = [{"tokens": words(300, "one group")}, picture(100, 1, "one group")]
    reference = engines.expected("gemma3", requests)
    for process in ("first", "second"):
        engines.open(process, "gemma3")
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
    assert [full_hit(one["prompt"], CHUNK) for one in reference] == run.cached


@pytest.mark.parametrize("load", ["sync", "async"])
def test_two_workers_hold_a_shard_each(engines: Engines, server: Server, load: str) -> None:
    """Tensor parallel: each worker stores and loads its own part, and a chunk is a hit when both parts are there."""
    requests: list[Request] = [
        {"tokens": words(300, f"two {load}")},
        {"tokens": words(300, f"two {load}"), "salt": "s"},
    ]
    options: dict[str, Any] = {"tensor_parallel_size": 2}
    reference = engines.expected("llama", requests, **options)
    for process, hit in (("first", 0), ("second", 256)):
        engines.open(process, "llama", load=load, options=options)
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        assert [hit, hit] == run.cached, run.facts
    assert (0, 0) == server.left_over()


def test_bfloat16_and_adapters_on_a_model_with_pictures(engines: Engines) -> None:
    """Another element type is another space; an adapter over a prompt with a picture keeps its own KV."""
    text = words(150, "bfloat16")
    pictured: Request = {"tokens": [*text[:20], 4, *text[20:]], "images": [1]}
    requests: list[Request] = [pictured, {**pictured, "adapter": engines.adapter("llava-a")}]
    options: dict[str, Any] = {**LORA, "dtype": "bfloat16"}
    reference = engines.expected("llava", requests, **options)
    assert difference(*reference) > 0.01
    for process, hit in (("first", 0), ("second", full_hit(reference[0]["prompt"], CHUNK))):
        engines.open(process, "llava", options=options)
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        assert [hit, hit] == run.cached
    engines.open("first", "llava", options=LORA)
    assert [0, 0] == engines.run("first", requests).cached


def test_producers_only_save_and_consumers_only_load(engines: Engines) -> None:
    """An engine that prefills for others, and one that takes what they computed."""
    request: Request = {"tokens": words(300, "roles")}
    reference = engines.expected("llama", [request])
    engines.open("first", "llama", role="kv_producer")
    twice = engines.run("first", [request, request])
    assert_same([*reference, *reference], twice.answers)
    assert [0, 0] == twice.cached
    engines.open("second", "llama", role="kv_consumer")
    loaded = engines.run("second", [request, {"tokens": words(300, "roles, other")}])
    assert_same(reference, loaded.answers[:1])
    assert [256, 0] == loaded.cached
    assert 0 == loaded.facts["saved_chunks"]


def test_a_reset_forgets_the_space(engines: Engines) -> None:
    """When weights have changed the engine resets its caches, and the connector's with them: nothing is hit after."""
    request: Request = {"tokens": words(300, "reset")}
    reference = engines.expected("llama", [request])
    engines.open("first", "llama", model_revision="to be reset")
    assert [0, 256] == engines.run("first", [request, request]).cached
    assert engines.hosts["first"].call("reset_prefix_cache", connector=True)
    after = engines.run("first", [request])
    assert_same(reference, after.answers)
    assert [0] == after.cached
