"""Loads that fail, servers that die, engines without room, requests that are aborted, adapters that are replaced.

The engine answers as without a cache, and nothing wrong is ever stored.
"""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from tests.e2e.cache_server import Server
from tests.e2e.engines import CHUNK, LORA, Engines
from tests.e2e.environment import needs_engine
from tests.e2e.prompts import Request, assert_same, differences, full_hit, words

pytestmark = [pytest.mark.e2e, needs_engine]


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("chunk_size", [64, 48])
def test_a_failed_load_is_computed_and_poisons_nothing(
    engines: Engines, server: Server, load: str, chunk_size: int
) -> None:
    """Half of a hit goes before it is loaded: the engine computes it, and what it then stores is right.

    The prompt goes on behind what was stored, so that the failing step computes new chunks on KV that never came; the
    second process loads all of it.
    """
    title = f"failed {load} {chunk_size}"
    begin: Request = {"tokens": words(4 * chunk_size + 10, title)}
    whole: Request = {"tokens": words(8 * chunk_size + 10, title)}
    reference = engines.expected("llama", [begin, whole])
    engines.open("first", "llama", chunk_size=chunk_size, load=load)
    assert_same(reference[:1], engines.run("first", [begin]).answers)
    engines.open(
        "second", "llama", chunk_size=chunk_size, load=load, connector="LosingConnector", module="control_connectors"
    )
    failed = engines.run("second", [whole])
    assert_same(reference[1:], failed.answers)
    assert (1, 1, 0) == (failed.facts["loads"], failed.facts["load_failures"], failed.facts["standing"])
    engines.open("first", "llama", chunk_size=chunk_size, load=load)
    again = engines.run("first", [whole])
    assert_same(reference[1:], again.answers)
    assert [8 * chunk_size] == again.cached
    assert (0, 0) == server.left_over()


def test_a_poisoned_store_would_be_seen(engines: Engines) -> None:
    """Negative control: a connector that saves what it computed on a failed load gives the next engine wrong KV."""
    begin: Request = {"tokens": words(266, "poison")}
    whole: Request = {"tokens": words(522, "poison")}
    reference = engines.expected("llama", [begin, whole])
    engines.open("first", "llama", load="sync")
    engines.run("first", [begin])
    engines.open("second", "llama", load="sync", connector="PoisoningConnector", module="control_connectors")
    assert_same(reference[1:], engines.run("second", [whole]).answers)
    engines.open("first", "llama", load="sync")
    again = engines.run("first", [whole])
    assert [512] == again.cached
    assert differences(reference[1:], again.answers)[0] > 0.001


def test_a_server_that_dies_and_comes_back(engines: Engines, own_server: Server) -> None:
    """Killed between requests: the engine answers without a cache. Restarted: it hits again, what was on disk included.

    Killed while requests run: they answer as without a cache.
    """
    requests: list[Request] = [{"tokens": words(300, f"killed {place}")} for place in range(3)]
    reference = engines.expected("llama", requests)
    engines.open(
        "first",
        "llama",
        address=own_server.address,
        lookup_timeout=2,
        load_timeout=2,
        store_timeout=2,
        server_timeout=2,
    )
    assert_same(reference[:1], engines.run("first", requests[:1]).answers)
    own_server.kill()
    dead = engines.run("first", requests)
    assert_same(reference, dead.answers)
    assert [0, 0, 0] == dead.cached
    own_server.start()
    engines.open("second", "llama", address=own_server.address)
    back = engines.run("second", requests)
    assert_same(reference, back.answers)
    assert [256, 0, 0] == back.cached
    recovered = engines.run("first", [*requests, *requests])
    assert_same([*reference, *reference], recovered.answers)
    assert [256, 256, 256] == recovered.cached[3:]
    assert (0, 0) == own_server.left_over()


def test_an_engine_without_a_server_is_a_plain_engine(engines: Engines, folder: object) -> None:
    """Nobody listens there, from the start to the end."""
    requests: list[Request] = [{"tokens": words(300, f"alone {place}")} for place in range(2)]
    reference = engines.expected("llama", requests)
    engines.open("first", "llama", address=f"ipc://{folder}/nobody", lookup_timeout=0.2, store_timeout=0.2)
    run = engines.run("first", [*requests, *requests])
    assert_same([*reference, *reference], run.answers)
    assert [0] * 4 == run.cached
    assert run.facts["lookup_failures"] >= 4


@pytest.mark.parametrize("load", ["sync", "async"])
def test_preemption_under_a_tiny_budget(engines: Engines, server: Server, load: str) -> None:
    """Twelve requests in 24 blocks: some are preempted and resumed, from the cache where that helps.

    Twice, so that the second round loads; between steps with the engine's own prefix cache, whose hits it goes on from.
    """
    head = words(96, f"pressure {load}")
    requests: list[Request] = [
        {"tokens": [*head, *words(40 + 16 * place, f"pressure {load} {place}")], "max_tokens": 90}
        for place in range(12)
    ]
    reference = engines.expected("llama", requests)
    options = {
        "num_gpu_blocks_override": 24,
        "max_num_seqs": 8,
        "max_model_len": 512,
        "enable_prefix_caching": load == "async",
        "disable_log_stats": False,
    }
    engines.open("first", "llama", load=load, options=options)
    for _ in range(2):
        run = engines.run("first", requests, batch=True)
        assert_same(reference, run.answers)
        engines.hosts["first"].call("reset_prefix_cache")
    assert engines.hosts["first"].call("metrics")["vllm:num_preemptions"] > 0
    assert run.facts["loads"] > 0
    assert (0, 0) == (run.facts["load_failures"], run.facts["standing"])
    assert (0, 0) == server.left_over()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_an_abort_after_any_number_of_steps_leaves_nothing(engines: Engines, server: Server, load: str) -> None:
    """Waiting, loading, in the middle of a prefill, decoding: no lease, no session and no tracker is left."""
    stored: list[Request] = [{"tokens": words(600, f"abort {load} {place}")} for place in range(3)]
    engines.open("first", "llama", load=load)
    engines.run("first", stored)
    fresh: list[Request] = [
        {"tokens": words(600, f"abort {load} fresh {place}"), "max_tokens": 50} for place in range(3)
    ]
    left = [engines.hosts["first"].call("abort", requests=[*stored, *fresh], steps=steps) for steps in range(8)]
    assert left[0] == 6
    assert engines.hosts["first"].call("facts")["standing"] == 0
    assert (0, 0) == server.left_over()
    assert_same(engines.expected("llama", stored), engines.run("first", stored).answers)


def test_an_adapter_that_is_reloaded_under_its_name(engines: Engines) -> None:
    """Other weights, same name: the KV of the old ones is never hit.

    Loaded as another number, from another folder and from the same; then the first weights again, whose KV is hit.
    """
    engines.build_adapter("llama", "versioned", 11)
    old: Request = {"tokens": words(300, "versioned"), "adapter": engines.adapter("versioned", name="v", number=11)}
    reference = engines.expected("llama", [old], **LORA)
    engines.open("first", "llama", options=LORA)
    assert_same(reference, engines.run("first", [old]).answers)

    engines.build_adapter("llama", "versioned-2", 12)
    other_folder: Request = {**old, "adapter": engines.adapter("versioned-2", name="v", number=12)}
    run = engines.run("first", [other_folder])
    assert [0] == run.cached
    assert_same(engines.expected("llama", [other_folder], **LORA), run.answers)

    engines.build_adapter("llama", "versioned", 13)  # the same folder, other weights
    stale = engines.run("first", [old])
    assert [0] == stale.cached
    assert_same(reference, stale.answers)  # the engine computes with what it has loaded: not to be cached
    assert stale.facts["bypassed.adapter_changed"] == 1
    in_place: Request = {**old, "adapter": {**old["adapter"], "number": 14}}
    run = engines.run("first", [in_place])
    assert [0] == run.cached
    assert_same(engines.expected("llama", [in_place], **LORA), run.answers)

    engines.build_adapter("llama", "versioned", 11)
    engines.open("second", "llama", options=LORA)
    back = engines.run("second", [old])
    assert [full_hit(300, CHUNK)] == back.cached
    assert_same(reference, back.answers)


def test_kv_of_replaced_weights_in_the_engines_own_cache_is_not_stored(engines: Engines) -> None:
    """The engine's prefix cache knows adapters by name and path, so after a reload from the folder it serves old KV.

    That is the engine's answer, but it does not reach the cache: another engine hits only what is right.
    """
    engines.build_adapter("llama", "in-place", 21)
    options = {**LORA, "enable_prefix_caching": True}
    begin: Request = {"tokens": words(200, "in-place"), "adapter": engines.adapter("in-place", name="p", number=21)}
    engines.open("first", "llama", options=options)
    engines.run("first", [begin])
    engines.build_adapter("llama", "in-place", 22)
    whole: Request = {"tokens": words(400, "in-place"), "adapter": engines.adapter("in-place", name="p", number=22)}
    stale = engines.run("first", [whole])
    assert stale.facts["distrusted"] == 1
    reference = engines.expected("llama", [whole], **LORA)
    assert differences(reference, stale.answers)[0] > 0.001  # the engine's own fault, seen
    engines.open("second", "llama", options=LORA)
    right = engines.run("second", [whole])
    assert [0] == right.cached
    assert_same(reference, right.answers)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_server_that_dies_while_requests_run(engines: Engines, own_server: Server, load: str) -> None:
    """Killed and restarted in the middle of a batch that loads and saves: every answer is that of a plain engine."""
    requests: list[Request] = [
        {"tokens": words(300, f"mid-run {load} {place}"), "max_tokens": 150} for place in range(8)
    ]
    reference = engines.expected("llama", requests)
    engines.open(
        "first",
        "llama",
        address=own_server.address,
        load=load,
        lookup_timeout=0.5,
        load_timeout=1.0,
        store_timeout=1.0,
        server_timeout=1.0,
    )
    engines.run("first", requests[:4], batch=True)
    with ThreadPoolExecutor(1) as user:
        running = user.submit(engines.run, "first", requests, batch=True)
        for _ in range(3):
            wait([running], timeout=0.3)
            own_server.kill()
            own_server.start()
        assert_same(reference, running.result().answers)
    assert_same(reference, engines.run("first", requests, batch=True).answers)
    assert engines.hosts["first"].call("facts")["standing"] == 0
    assert (0, 0) == own_server.left_over()
