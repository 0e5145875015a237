"""`ExtraKeysConnector` under vLLM's hooks, in the shapes and the order of four versions, over a real server.

The engine is `fake_vllm.FakeEngine`; the real one is under test in ``tests/e2e``.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keying import CacheSalt, MultimodalItem, chunk_keys
from protocol_v2.cache import ChunkCache
from protocol_v2.chunk_events import ChunkStored
from protocol_v2.client import CacheClient
from protocol_v2.connectors.paged import LayoutError
from protocol_v2.connectors.settings import SettingsError
from protocol_v2.connectors.vllm_engine import engine_shape
from protocol_v2.errors import ServerUnavailableError
from protocol_v2.event_feed import EventSubscriber
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService
from tests.keying.engine_samples import vllm_feature
from tests.protocol_v2.fake_vllm import VERSIONS, FakeEngine, Role, configs, installed
from tests.protocol_v2.test_client import router
from tests.test_import_rules import imported

pytestmark = pytest.mark.zmq

PICTURES = ("1f" * 32, "2e" * 32)
EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)
EVERY_LOAD = pytest.mark.parametrize("load", ["sync", "async"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    """A cache server in memory."""
    place = tmp_path_factory.mktemp("v") / "c"
    service = CacheService(ChunkCache(64 << 20), ServerTerms(b"V" * 16), started=time.monotonic())
    with CacheServer(f"ipc://{place}", service) as running:
        yield running


Make = Callable[..., FakeEngine]


@pytest.fixture
def make(server: CacheServer) -> Iterator[Make]:
    """Engines over the server; the model is another in each test, so that tests share nothing."""
    model = f"model-{next(_numbers)}"
    made: list[FakeEngine] = []
    stack = []

    def engine(version: str = "0.32", *, settings: dict[str, Any] | None = None, **others: Any) -> FakeEngine:
        context = installed(version)
        module = context.__enter__()
        stack.append(context)
        given = {"address": server.address, "chunk_size": 8, "wait_for_store": True, "model": model, **(settings or {})}
        one = FakeEngine(module, version, given, **others)
        made.append(one)
        return one

    yield engine
    for one in made:
        one.close()
    for context in reversed(stack):
        context.__exit__(None, None, None)


_numbers = itertools.count()


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


def picture(identifier: str, offset: int, length: int = 6) -> Any:
    """An item of a request."""
    return vllm_feature(identifier, offset, length)


def side(engine: FakeEngine) -> Any:
    """The scheduler's side of an engine's connector."""
    return engine.scheduler.scheduler.side


TEXT = list(range(100, 150))


@EVERY_VERSION
@EVERY_LOAD
@pytest.mark.parametrize("chunk_size", [8, 4, 6])
def test_requests_of_every_version_hit_what_another_engine_stored(
    make: Make, server: CacheServer, version: str, load: str, chunk_size: int
) -> None:
    """Text, salts and pictures: KV is right, hits are whole and only of the same identity, nothing is left over."""
    settings = {"load": load, "chunk_size": chunk_size}
    whole = 50 // chunk_size * chunk_size
    for hits in ([0, 0, 0, 12 // chunk_size * chunk_size], [whole] * 4):
        engine = make(version, settings=settings)
        engine.add("text", TEXT)
        engine.run()
        engine.add("salted", TEXT, cache_salt="s")
        engine.run()
        for name, item in zip(("one", "two"), PICTURES, strict=True):
            engine.add(name, [*TEXT[:20], *TEXT[:30]], mm_features=[picture(item, 12)], cache_salt="p")
            engine.run()
        names = ("text", "salted", "one", "two")
        assert dict.fromkeys(names, True) == engine.right
        assert hits == [engine.hits[name][0] for name in names]
        assert 0 == len(side(engine))
    assert (0, 0) == left_over(server)


@EVERY_VERSION
@EVERY_LOAD
def test_preempted_requests_resume_from_the_cache(make: Make, server: CacheServer, version: str, load: str) -> None:
    """Preempted while decoding, a request is looked up again with what it generated, and its KV stays right."""
    engine = make(version, settings={"load": load})
    engine.add("r", TEXT[:20], max_tokens=30)
    for _ in range(16):
        engine.step()
    engine.preempt("r")
    engine.run()
    assert [0, 32] == engine.hits["r"]
    assert engine.right["r"]
    other = make(version, settings={"load": load})
    other.add("again", list(engine.done["r"].request.all_token_ids))
    other.run()
    assert [48] == other.hits["again"]
    assert other.right["again"]
    assert (0, 0) == left_over(server)


@EVERY_VERSION
def test_a_streaming_session_appends_media(make: Make, server: CacheServer, version: str) -> None:
    """A second turn drops the last sampled token, brings a picture of its own, and keys go on from there."""
    engine = make(version)
    seq = engine.add("s", TEXT[:18], max_tokens=3, stays=True, mm_features=[picture(PICTURES[0], 3)])
    while seq.state != "idle":
        engine.step()
    engine.stream(seq, TEXT[:16], (picture(PICTURES[1], 4),))
    seq.stays = False
    engine.run()
    assert engine.right["s"]
    assert {} == dict(side(engine).counters.bypassed)
    other = make(version)
    features = [picture(one.identifier, one.mm_position.offset) for one in seq.request.mm_features]
    other.add("t", list(seq.request.all_token_ids), mm_features=features)
    other.add("u", list(seq.request.all_token_ids), mm_features=features[:1])
    other.run()
    assert (32, 24) == (other.hits["t"][0], other.hits["u"][0])  # the second picture begins at 24
    assert other.right["t"]
    assert other.right["u"]
    assert (0, 0) == left_over(server)


@EVERY_VERSION
@EVERY_LOAD
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("losing", [0, 1])
def test_a_failed_load_is_computed_and_poisons_nothing(
    make: Make, version: str, load: str, world: int, losing: int
) -> None:
    """One of the workers loses a part: the engine is told in the way of its version, and what is stored is right."""
    settings = {"load": load}
    first = make(version, settings=settings, world=world)
    first.add("begin", TEXT[:30])
    first.run()
    second = make(version, settings=settings, world=world, budget=60)
    lose(second.workers[losing % world])
    second.add("whole", TEXT)
    second.run()
    assert 24 == second.hits["whole"][0]
    assert second.right["whole"]
    assert 1 == side(second).counters.load_failures
    third = make(version, settings=settings, world=world)
    third.add("whole", TEXT)
    third.run()
    assert 24 <= third.hits["whole"][0]
    assert third.right["whole"]


def lose(worker: Any) -> None:
    """Have a worker lose all chunks but the first of what it loads."""
    inner = worker.worker
    original = inner._make

    def losing(space: Any) -> Any:
        made = original(space)
        retrieve = made._client.retrieve
        made._client = SimpleNamespace(
            retrieve=lambda *given, **named: truncated(retrieve(*given, **named)),
            store=made._client.store,
            end_session=made._client.end_session,
            staging=made._client.staging,
        )
        return made

    inner._make = losing


def truncated(result: Any) -> Any:
    """A retrieve that delivered its first chunk only."""
    return type(result)(result.chunks[:1], result.miss, result.failure)


@EVERY_LOAD
def test_an_abort_in_every_state_leaves_nothing(make: Make, server: CacheServer, load: str) -> None:
    """After any number of steps all requests are aborted: no tracker, lease or session is left."""
    first = make(settings={"load": load})
    first.add("known", TEXT)
    first.run()
    for steps in range(7):
        engine = make(settings={"load": load})
        engine.add("known", TEXT, max_tokens=5)
        engine.add("fresh", TEXT[::-1], max_tokens=5)
        for _ in range(steps):
            engine.step()
        for name in list(engine.seqs):
            engine.finish(name)
        ends = time.monotonic() + 10
        while len(engine._free) < 60 and time.monotonic() < ends:
            engine.step()  # loads that were under way come to an end
        assert 0 == len(side(engine))
        assert sorted(range(1, 61)) == sorted(engine._free)
    assert (0, 0) == left_over(server)


@pytest.mark.parametrize("version", ["0.32", "0.32-v2"])
@pytest.mark.parametrize(
    "shape", [{"connector": "ExtraKeysHybridConnector", "groups": 2}, {"kind": "SlidingWindowSpec"}]
)
def test_where_blocks_do_not_name_a_request_its_failed_load_is_told_by_id(
    make: Make, version: str, shape: dict[str, Any]
) -> None:
    """Several KV groups, and one whose blocks slide: loads are between steps, and the engine computes all of it."""
    first = make(version, **shape)
    first.add("r", TEXT)
    first.run()
    second = make(version, **shape)
    lose(second.workers[0])
    second.add("r", TEXT)
    second.run()
    third = make(version, **shape)
    third.add("r", TEXT)
    third.run()
    assert ([0], [48, 0], [48]) == (first.hits["r"], second.hits["r"], third.hits["r"])
    assert all(engine.right["r"] for engine in (first, second, third))


def test_failures_by_request_need_an_engine_that_hears_of_them(make: Make) -> None:
    """Older versions cannot be told: the hybrid connector does not start there, the plain one does nothing."""
    with pytest.raises(LayoutError, match="cannot be told"):
        make("0.20", connector="ExtraKeysHybridConnector", groups=2)
    engine = make("0.20", kind="SlidingWindowSpec")
    assert engine.scheduler.scheduler is None
    engine.add("r", TEXT)
    engine.run()
    assert ([0], True) == (engine.hits["r"], engine.right["r"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (None, None),
        ("async_scheduling", "asynchronous scheduling"),
        ("pipeline", "pipeline stages"),
        ("prefix_caching", "prefix cache"),
        ("unknown", "asynchronous scheduling"),
        ("window", "sliding window"),
        ("groups", "several KV groups"),
    ],
)
def test_loads_are_of_a_step_only_where_a_failed_one_can_be_taken_back(change: str | None, why: str | None) -> None:
    """Where others see its blocks before they are filled, or steps are scheduled ahead, a load is between steps."""
    for load in ("auto", "sync", "async"):
        settings = {"address": "ipc:///nowhere", "load": load}
        config, cache = configs(
            "0.32",
            settings,
            groups=2 if change == "groups" else 1,
            kind="SlidingWindowSpec" if change == "window" else "FullAttentionSpec",
        )
        config.scheduler_config.async_scheduling = change == "async_scheduling"
        config.cache_config.enable_prefix_caching = change == "prefix_caching"
        if change == "unknown":
            del config.scheduler_config.async_scheduling
        if change == "pipeline":
            config.parallel_config.pipeline_parallel_size = 2
        if load == "sync" and why is not None:
            with pytest.raises(LayoutError, match=why):
                engine_shape(config, cache, release="0.32", device="cpu", hears_of_requests=True)
        else:
            shape = engine_shape(config, cache, release="0.32", device="cpu", hears_of_requests=True)
            assert shape.asynchronous == (load == "async" or (load == "auto" and why is not None))


def test_one_file_imports_vllm() -> None:
    """Everything else of this tree takes vLLM's objects by their attributes."""
    root = Path(__file__).resolve().parents[2]
    importers = {
        str(path.relative_to(root))
        for package in ("keying", "protocol_v2", "compat")
        for path in (root / package).rglob("*.py")
        if any(name.split(".")[0] == "vllm" for name in imported(path.read_text()))
    }
    assert {"protocol_v2/connectors/vllm.py"} == importers


# ---- what has no keys


def test_a_request_without_an_identity_is_bypassed_and_counted(make: Make) -> None:
    """Media that the engine did not hash, and an adapter whose files cannot be read: served, not stored, counted."""
    engine = make()
    local = "renderer0-mm-17-image-0"
    engine.add("local", TEXT, mm_features=[vllm_feature(local, 3, 6)]).request.mm_features[0].identifier = local
    engine.add("lora", TEXT, lora_request=lora("sql", 1, "/nowhere"))
    for name in ("local", "lora"):
        engine.seqs[name].request.mm_features = []  # the fake engine computes on; keys were asked for at admission
    engine.run()
    counters = side(engine).counters
    assert {"unreadable_adapter": 1, "request_local_identity": 1} == dict(counters.bypassed)
    assert 0 == counters.saved_chunks
    stats = engine.scheduler.get_kv_connector_stats()
    assert 1 == stats.data["bypassed.unreadable_adapter"]
    assert engine.scheduler.get_kv_connector_stats().is_empty()


def test_an_engine_that_has_no_keys_runs_without_the_cache(make: Make) -> None:
    """A model whose KV depends on later positions, recurrent state: every hook is there and does nothing."""
    with installed("0.32") as module:
        for change in ("attention", "mamba", "context"):
            config, cache = configs("0.32", {"address": "ipc:///nowhere"})
            if change == "attention":
                config.model_config.is_encoder_decoder = True
            elif change == "mamba":
                cache.kv_cache_groups[0].kv_cache_spec = type("MambaSpec", (), {"block_size": 4})()
            else:
                config.parallel_config.decode_context_parallel_size = 2
            connector = module.ExtraKeysConnector(config, Role.SCHEDULER, cache)
            request: Any = SimpleNamespace(request_id="r")
            connector.on_new_request(request)
            assert (0, False) == connector.get_num_new_matched_tokens(request, 0)
            connector.update_state_after_alloc(request, None, 0)
            tasks = connector.build_connector_meta(SimpleNamespace()).tasks
            assert ([], [], []) == (tasks.loads, tasks.async_loads, tasks.saves)
            connector.update_connector_output(SimpleNamespace())
            assert (False, None) == connector.request_finished(request, [])
            assert connector.reset_cache() is None
            connector.shutdown()


def test_settings_are_checked_when_the_engine_starts(make: Make) -> None:
    """An unknown name, no address, a value of a wrong type: the engine does not start with what nobody meant."""
    for settings in ({"adress": "ipc:///x"}, {"chunk_size": 0}, {"load": "later"}, {"shared_adapters": "a"}):
        with pytest.raises(SettingsError):
            make(settings=settings)
    with installed("0.32") as module:
        config, cache = configs("0.32", {})
        with pytest.raises(SettingsError, match="address is missing"):
            module.ExtraKeysConnector(config, Role.SCHEDULER, cache)


def test_a_server_that_says_nothing_counts_as_gone_after_the_set_time(make: Make, tmp_path: Path) -> None:
    """A lookup may wait far longer, and does not: the request is computed, and the lookup counts as one that failed."""
    address = f"ipc://{tmp_path}/mute"
    with router(address):
        engine = make(settings={"address": address, "server_timeout": 0.05, "lookup_timeout": 600})
        engine.add("r", TEXT)
        engine.run()
        assert ([0], 1) == (engine.hits["r"], side(engine).counters.lookup_failures)


def test_a_failed_load_never_fails_a_request(make: Make) -> None:
    """The engine's default policy fails requests whose load failed; a cache must not, so the connector changes it."""
    assert "recompute" == make().policy


def test_a_reset_empties_the_space(make: Make) -> None:
    """What was stored before is not hit after; the server's word decides whether it worked."""
    engine = make()
    engine.add("r", TEXT)
    engine.run()
    assert engine.scheduler.reset_cache() is True
    engine.add("again", TEXT)
    engine.run()
    assert [0] == engine.hits["again"]


def test_what_was_computed_before_a_reset_is_not_hit_after_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is under way lands after the clear: nothing is loaded until it is over and cleared as well.

    A request that stands keeps its KV, so it saves no more; nor does one that rests on the engine's own cache.
    """
    engine = make(settings={"wait_for_store": False})
    may_store = threading.Event()
    engine.add("first", TEXT[::-1])
    engine.run()
    worker = engine.workers[0].worker._worker
    assert worker.flush(20)
    store = worker._saver._client.store

    def late(*given: Any, **others: Any) -> Any:
        assert may_store.wait(20)
        return store(*given, **others)

    monkeypatch.setattr(worker._saver._client, "store", late)
    engine.add("before", TEXT[:40])
    engine.run()
    stands = engine.add("stands", TEXT[10:40], max_tokens=40)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_cache() is True
    saved = side(engine).counters.saved_chunks
    may_store.set()
    assert worker.flush(20)
    engine.add("late", TEXT[:40])
    engine.run()
    assert [0] == engine.hits["late"]
    assert len(stands.request.all_token_ids) == 70
    assert {"cache_reset": 1} == dict(side(engine).counters.bypassed)
    assert saved + 5 == side(engine).counters.saved_chunks  # those of the last one
    assert [True, False] == [engine.scheduler.scheduler._own_is_former, engine.scheduler.scheduler._to_clear]
    engine.add("after", TEXT[5:45])
    engine.run()
    assert worker.flush(20)
    other = make()
    for name, tokens, hit in (("first", TEXT[::-1], 0), ("stands", TEXT[10:40], 0), ("after", [*TEXT[5:45], 1], 40)):
        other.add(name, tokens)
        other.run()
        assert [hit] == other.hits[name]


def test_a_reset_that_failed_ends_loading_until_it_worked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server did not hear of it: what it has may be of former weights, so it is not asked until it is cleared."""
    engine = make()
    engine.add("before", TEXT)
    engine.run()
    connector = engine.scheduler.scheduler
    clear = connector.client.clear

    def gone(scope: str) -> Any:
        raise ServerUnavailableError(f"no clear of the {scope}")

    monkeypatch.setattr(connector.client, "clear", gone)
    assert engine.scheduler.reset_cache() is False
    engine.add("during", TEXT)
    engine.run()
    monkeypatch.setattr(connector.client, "clear", clear)
    connector._next_clear = 0.0
    engine.add("after", TEXT)
    engine.run()
    engine.add("again", TEXT)
    engine.run()
    assert [[0], [0], [48]] == [engine.hits[name] for name in ("during", "after", "again")]


# ---- adapters


def lora(name: str, number: int, path: str, *, reload: bool = False) -> Any:
    """A ``LoRARequest``."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=reload)


def write_adapter(folder: Path, weights: int) -> str:
    """An adapter's files."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(bytes([weights]) * (64 + weights))
    return str(folder)


@pytest.mark.parametrize("version", ["0.18", "0.32"])
def test_adapters_keep_apart_by_what_they_compute(make: Make, version: str, tmp_path: Path) -> None:
    """Base, two adapters, and one of them under another number and path: the last hits, the others miss."""
    one, two = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "two", 2)
    copy = write_adapter(tmp_path / "copy", 1)
    engine = make(version)
    for name, adapter, weights in (
        ("base", None, 0),
        ("one", lora("a", 1, one), 1),
        ("two", lora("b", 2, two), 2),
        ("copy", lora("a", 3, copy), 1),
    ):
        engine.add(name, TEXT, lora_request=adapter, weights=weights)
        engine.run()
    assert [0, 0, 0, 48] == [engine.hits[name][0] for name in ("base", "one", "two", "copy")]
    assert all(engine.right.values())


def test_an_adapter_replaced_under_a_running_engine_is_not_keyed(make: Make, tmp_path: Path) -> None:
    """Its files change and nothing says that the engine loaded them: uncacheable, also when the old files come back."""
    path = write_adapter(tmp_path / "v", 1)
    engine = make()
    engine.add("before", TEXT, lora_request=lora("v", 1, path), weights=1)
    engine.run()
    write_adapter(tmp_path / "v", 2)
    engine.add("after", TEXT, lora_request=lora("v", 1, path), weights=1)
    engine.run()
    write_adapter(tmp_path / "v", 1)
    engine.add("back", TEXT, lora_request=lora("v", 1, path), weights=1)
    engine.run()
    assert [[0], [0], [0]] == [engine.hits[name] for name in ("before", "after", "back")]
    assert {"adapter_changed": 2} == dict(side(engine).counters.bypassed)


def test_a_reload_in_place_gives_up_what_runs_with_the_old_weights(make: Make, tmp_path: Path) -> None:
    """The engine changes an adapter under requests that compute with it: their keys no longer say what their KV is.

    Nor is the first to reload believed while one of them is in its step: vLLM asks one of them whether to reload.
    """
    path = write_adapter(tmp_path / "v", 1)
    engine = make()
    running = engine.add("running", TEXT[:20], lora_request=lora("v", 1, path), weights=1, max_tokens=20)
    for _ in range(4):
        engine.step()
    write_adapter(tmp_path / "v", 2)
    engine.add("reloads", TEXT, lora_request=lora("v", 1, path, reload=True), weights=2)
    running.weights = 2
    engine.run()
    assert {"adapter_changed": 2} == dict(side(engine).counters.bypassed)
    engine.add("alone", TEXT, lora_request=lora("v", 1, path, reload=True), weights=2)
    engine.run()
    engine.add("after", TEXT, lora_request=lora("v", 1, path), weights=2)
    engine.run()
    assert {"adapter_changed": 2} == dict(side(engine).counters.bypassed)
    other = make()
    other.add("new", TEXT, lora_request=lora("v", 7, path), weights=2)
    other.run()
    assert ([0], [48], [48]) == (engine.hits["alone"], engine.hits["after"], other.hits["new"])
    assert other.right["new"]
    assert engine.right["after"]


@pytest.mark.parametrize("aborted", [False, True])
def test_a_reload_counts_when_the_engine_comes_to_it(make: Make, tmp_path: Path, aborted: bool) -> None:
    """Requests that come while it waits, or after it was aborted, may still be computed with the old weights."""
    path = write_adapter(tmp_path / "v", 1)
    engine = make()
    engine.add("old", TEXT, lora_request=lora("v", 1, path), weights=1)
    engine.run()
    write_adapter(tmp_path / "v", 2)
    reloads = engine.add("reloads", TEXT, lora_request=lora("v", 1, path, reload=True), weights=2)
    reloads.state = "loading"  # it waits for something, and others pass it
    engine.add("passes", TEXT, lora_request=lora("v", 1, path), weights=1)
    for _ in range(8):
        engine.step()
    assert "passes" in engine.right
    assert {"adapter_changed": 1} == dict(side(engine).counters.bypassed)
    reloads.state = "waiting"
    if aborted:
        engine.finish("reloads")
    engine.run()
    engine.add("after", TEXT, lora_request=lora("v", 1, path), weights=1 if aborted else 2)
    engine.run()
    assert {"adapter_changed": 1 + aborted} == dict(side(engine).counters.bypassed)
    assert [0 if aborted else 48] == engine.hits["after"]
    assert engine.right["after"]
    other = make()
    other.add("new", TEXT, lora_request=lora("v", 7, path), weights=2)
    other.run()
    assert other.right["new"]


def test_a_session_whose_adapter_changed_between_turns_is_given_up(make: Make, tmp_path: Path) -> None:
    """Also where no key was handed out yet, so that another adapter would still go into its first chunk."""
    path = write_adapter(tmp_path / "v", 1)
    engine = make()
    seq = engine.add("s", TEXT[:3], lora_request=lora("v", 1, path, reload=True), weights=1, stays=True)
    while seq.state != "idle":
        engine.step()
    write_adapter(tmp_path / "v", 2)
    engine.stream(seq, TEXT)
    seq.stays = False
    engine.run()
    assert {"adapter_changed": 1} == dict(side(engine).counters.bypassed)
    assert 0 == side(engine).counters.saved_chunks


def test_a_part_of_a_block_of_former_weights_is_not_trusted_either(make: Make, tmp_path: Path) -> None:
    """An engine's own hit may end inside a block, and is told to the connector without that part."""
    path = write_adapter(tmp_path / "v", 1)
    engine = make()
    for weights in (1, 2):
        write_adapter(tmp_path / "v", weights)
        engine.add(f"{weights}", TEXT, lora_request=lora("v", weights, path), weights=weights)
        engine.run()
    connector = engine.scheduler.scheduler
    request = engine.add("r", TEXT[::-1], lora_request=lora("v", 2, path), weights=2).request
    assert (0, False) == connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, None, 0)
    seen = connector._seen["r"]
    assert [False, True] == [connector._rests_on_stale(seen, start) for start in (0, 3)]
    seen.external = 8
    assert [False, True] == [connector._rests_on_stale(seen, start) for start in (8, 11)]


def test_a_session_beside_drafts_saves_its_first_turn_only(make: Make) -> None:
    """A turn that ends inside accepted drafts leaves KV of drafts under the tokens of the next one."""
    hits = []
    for drafts in (None, object()):
        engine = make()
        connector = engine.scheduler.scheduler
        connector.shape = replace(connector.shape, drafts=drafts is not None)
        salt = f"{drafts is not None}"
        seq = engine.add("s", TEXT[:18], max_tokens=3, stays=True, cache_salt=salt)
        while seq.state != "idle":
            engine.step()
        engine.stream(seq, TEXT[:16])
        seq.stays = False
        engine.run()
        assert int(drafts is not None) == side(engine).counters.distrusted
        other = make()
        other.add("t", list(seq.request.all_token_ids), cache_salt=salt)
        other.run()
        hits.append(other.hits["t"][0])
    assert [32, 16] == hits


def test_files_that_change_while_a_request_runs_end_its_saves(make: Make, tmp_path: Path) -> None:
    """Before each save the files are looked at once more: what the engine loaded may be either version."""
    path = write_adapter(tmp_path / "v", 1)
    engine = make(budget=8)
    engine.add("r", TEXT, lora_request=lora("v", 1, path), weights=1)
    engine.step()
    write_adapter(tmp_path / "v", 2)
    engine.run()
    assert {"adapter_changed": 1} == dict(side(engine).counters.bypassed)
    write_adapter(tmp_path / "v", 1)
    other = make()
    other.add("r", TEXT, lora_request=lora("v", 1, path), weights=1)
    other.run()
    assert [8] == other.hits["r"]


# ---- the detector


def test_keys_without_extra_keys_would_be_seen(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with keys of tokens alone a second picture hits the first one's KV, which is wrong."""
    engine = make()
    connector = engine.scheduler.scheduler
    derive = connector._derive
    monkeypatch.setattr(connector, "_derive", lambda seen: type(derive(seen))(derive(seen).tokens, ()))
    for name, item in zip(("one", "two"), PICTURES, strict=True):
        engine.add(name, TEXT, mm_features=[picture(item, 3)])
        engine.run()
    assert ([0], [48]) == (engine.hits["one"], engine.hits["two"])
    assert {"one": True, "two": False} == engine.right


# ---- events


def test_routers_hear_of_what_is_stored_and_can_recompute_it(make: Make, tmp_path: Path) -> None:
    """Two workers, a salted prompt with a picture: every chunk is told once both have stored it, with typed parts."""
    settings = {"events": f"ipc://{tmp_path}/e", "events_replay": f"ipc://{tmp_path}/r"}
    engine = make(settings=settings, world=2)
    engine.add("r", TEXT, cache_salt="s", mm_features=[picture(PICTURES[0], 3)])
    engine.run()
    with EventSubscriber(settings["events"], settings["events_replay"]) as subscriber:
        events = [one for one in subscriber.catch_up() if isinstance(one, ChunkStored)]
    space = engine.scheduler.scheduler.space
    keys = chunk_keys(space, TEXT, [CacheSalt("s"), MultimodalItem(PICTURES[0], 3, 6)])
    assert [key.digest for key in keys] == [event.key for event in events]
    for event in events:
        event.verify()
    assert [space.root, *(key.digest for key in keys[:-1])] == [event.parent for event in events]
