"""The scheduler's and the workers' sides of a connector, over a real server, against an engine that knows right KV."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keying import KeySpace, UncacheableRequest
from keying.engines import EngineInputs
from protocol_v2.cache import ChunkCache
from protocol_v2.client import CacheClient
from protocol_v2.connectors.scheduler_side import REFUSED, SchedulerSide
from protocol_v2.connectors.worker_side import LoadTask, SaveTask, WorkerReport, WorkerSide
from protocol_v2.errors import ServerUnavailableError
from protocol_v2.negotiation import ServerTerms
from protocol_v2.results import LookupResult, RetrieveResult
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService
from protocol_v2.sharing import Sharing
from tests.protocol_v2.toy_engine import ToyEngine, ToyRequest

pytestmark = pytest.mark.zmq

SPACES = {size: KeySpace("toy", chunk_size=size, kv_dtype="int64") for size in (4, 6, 8)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    """A cache server in memory, which it shares."""
    place = tmp_path_factory.mktemp("s") / "c"
    service = CacheService(
        ChunkCache(64 << 20), ServerTerms(b"B" * 16), started=time.monotonic(), sharing=Sharing(80 << 20)
    )
    with CacheServer(f"ipc://{place}", service) as running:
        yield running


@pytest.fixture(scope="module")
def clients(server: CacheServer) -> Iterator[dict[int, CacheClient]]:
    """A client for each chunk size."""
    made = {size: CacheClient(server.address, space, timeout=5.0) for size, space in SPACES.items()}
    for client in made.values():
        client.wait_ready(5)
    yield made
    for client in made.values():
        client.close()


_numbers = iter(range(1_000_000))


def a_request(n_tokens: int, title: str | None = None) -> ToyRequest:
    """A request; the same title has the same tokens and the same salt."""
    title = f"t{next(_numbers)}" if title is None else title
    tokens = [(sum(title.encode()) * 31 + place * 17) % 1000 for place in range(n_tokens)]
    return ToyRequest(f"{title}#{next(_numbers)}", tokens, title)


def left_over(client: CacheClient) -> tuple[Any, Any]:
    """Leases and sessions that stand when they have had time to end."""
    ends = time.monotonic() + 5
    while True:
        facts = client.status()
        left = facts["cache.leases"], facts["cache.sessions"]
        if left == (0, 0) or time.monotonic() > ends:
            return left
        time.sleep(0.005)  # a server says no event when a lease ends


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("world", "groups"), [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("chunk_size", [4, 8, 6])
def test_a_second_engine_loads_what_the_first_computed(
    clients: dict[int, CacheClient], wait: bool, world: int, groups: int, chunk_size: int
) -> None:
    """KV is right, hits are whole, nothing is left over: for any number of workers and groups, in and between steps."""
    title = f"second {wait} {world} {groups} {chunk_size}"
    hits = []
    sharing = clients[chunk_size].sharing
    assert sharing is not None
    before = sharing.counters.retrieved, sharing.counters.in_place
    for _ in range(2):
        engine = ToyEngine(clients[chunk_size], SPACES[chunk_size], world=world, groups=groups, wait=wait)
        request = a_request(50, title)
        hits.append(engine.run(request, decode=10))
        engine.flush()
        assert engine.is_right(request)
        assert len(engine.side) == 0
        engine.close()
    assert [0, 50 // chunk_size * chunk_size] == hits
    assert sharing.counters.retrieved > before[0]
    assert sharing.counters.in_place > before[1]
    assert (0, 0) == left_over(clients[chunk_size])


def test_a_generated_chunk_is_hit_by_a_longer_prompt(clients: dict[int, CacheClient]) -> None:
    """What decoding filled is there for the next turn."""
    engine = ToyEngine(clients[8], SPACES[8])
    first = a_request(20, "turns")
    engine.run(first, decode=13)
    engine.flush()
    following = ToyRequest("turns, the second", [*first.tokens, 1, 2, 3], first.salt)
    assert 32 == engine.run(following)
    assert engine.is_right(following)
    engine.close()


def test_a_load_goes_on_from_the_engines_own_blocks(clients: dict[int, CacheClient]) -> None:
    """With 12 tokens of its own the engine loads from the middle of a chunk on, and its own blocks stay as they are."""
    engine = ToyEngine(clients[8], SPACES[8])
    engine.run(a_request(40, "local"))
    engine.flush()
    request = a_request(40, "local")
    assert 27 == engine.run(request, local=12)
    assert engine.is_right(request)
    engine.close()


@given(
    world=st.integers(1, 3),
    groups=st.integers(1, 2),
    chunk_size=st.sampled_from([4, 6, 8]),
    known=st.integers(0, 40),
    n_tokens=st.integers(2, 60),
    step=st.integers(1, 60),
    losing=st.integers(0, 2),
    lost=st.integers(0, 8),
    local=st.sampled_from([0, 0, 4, 8]),
    wait=st.booleans(),
)
@example(
    world=1, groups=1, chunk_size=8, known=32, n_tokens=60, step=60, losing=0, lost=2, local=0, wait=True
)  # the step of the failed load fills chunks
@example(
    world=2, groups=1, chunk_size=8, known=32, n_tokens=60, step=60, losing=1, lost=2, local=0, wait=True
)  # and the other rank does not know of it
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_failed_load_poisons_nothing(
    clients: dict[int, CacheClient],
    world: int,
    groups: int,
    chunk_size: int,
    known: int,
    n_tokens: int,
    step: int,
    losing: int,
    lost: int,
    local: int,
    wait: bool,
) -> None:
    """Whichever rank loses whatever part of a hit: the engine's KV is right in the end, and so is what is stored."""
    title = f"poison {next(_numbers)}"
    client, space = clients[chunk_size], SPACES[chunk_size]
    shape: dict[str, Any] = {"world": world, "groups": groups, "wait": wait or groups == 1}
    first = ToyEngine(client, space, **shape)
    first.run(a_request(min(known, n_tokens), title)) if known else None
    first.flush()
    second = ToyEngine(client, space, **shape, lose=lambda rank: lost if rank == losing else 0)
    request = a_request(n_tokens, title)
    second.run(request, step=step, local=min(local, (n_tokens - 1) // 4 * 4))
    second.flush()
    assert second.is_right(request)
    third = ToyEngine(client, space, **shape)
    again = a_request(n_tokens, title)
    third.run(again)
    assert third.is_right(again)
    for engine in (first, second, third):
        assert len(engine.side) == 0
        engine.close()
    assert (0, 0) == left_over(client)


def test_a_careless_save_would_be_seen(clients: dict[int, CacheClient]) -> None:
    """Negative control: a worker that saves what it computed on a failed load gives the next engine wrong KV."""
    first = ToyEngine(clients[8], SPACES[8])
    first.run(a_request(32, "careless"))
    first.flush()
    second = ToyEngine(clients[8], SPACES[8], lose=lambda _rank: 2)
    careless = second.workers[0].save
    second.workers[0].save = lambda tasks: careless([without_doubt(one) for one in tasks])  # type: ignore[method-assign]
    request = a_request(64, "careless")
    second.run(request, step=64)
    second.flush()
    assert second.is_right(request)
    third = ToyEngine(clients[8], SPACES[8])
    again = a_request(64, "careless")
    assert 63 == third.run(again)
    assert not third.is_right(again)
    for engine in (first, second, third):
        engine.close()


def without_doubt(task: SaveTask) -> SaveTask:
    """A save that does not know what it depends on."""
    return SaveTask(task.name, task.digests, task.first, task.stop, task.blocks)


def test_other_salts_miss_and_the_same_hits(clients: dict[int, CacheClient]) -> None:
    """Same tokens, other salt: nothing; same salt: all."""
    engine = ToyEngine(clients[8], SPACES[8])
    mine = a_request(32, "salted")
    engine.run(mine)
    engine.flush()
    assert 0 == engine.run(ToyRequest("other", list(mine.tokens[:32]), "another"))
    assert 31 == engine.run(a_request(32, "salted"))
    engine.close()


def test_a_chunk_of_another_layout_ends_loading(clients: dict[int, CacheClient]) -> None:
    """Chunks that do not fit the layers are not written, the load has failed, and no more hits are offered."""
    first = ToyEngine(clients[8], SPACES[8], block_size=4)
    first.run(a_request(32, "misfit"))
    first.flush()
    second = ToyEngine(clients[8], SPACES[8], block_size=8)
    request = a_request(32, "misfit")
    assert 31 == second.run(request)
    assert second.is_right(request)
    assert not second.side.loading
    assert 0 == second.run(a_request(32, "misfit"))
    assert 1 == second.side.counters.load_failures
    first.close()
    second.close()


# ---- the scheduler's side alone


class ScriptedClient:
    """A cache client that answers as it is told, and remembers."""

    def __init__(self, answer: Callable[[], LookupResult]) -> None:
        self.answer = answer
        self.asked = 0

    def lookup(self, session: str, keys: Any, **others: Any) -> LookupResult:
        """Answer."""
        self.asked += 1
        return self.answer()

    def release(self, lease: bytes, **others: Any) -> Any:
        """Nothing."""

    def end_session(self, session: str, **others: Any) -> Any:
        """Nothing."""


def scheduler(answer: Callable[[], LookupResult], now: Callable[[], float] = lambda: 0.0) -> SchedulerSide:
    """A scheduler's side with a request of 20 tokens."""
    side = SchedulerSide(ScriptedClient(answer), SPACES[8], clock=now)
    assert side.admit("r", lambda: EngineInputs(tuple(range(20)), ())) is not None
    return side


def test_a_dead_server_is_a_miss_that_is_not_asked_again_at_once() -> None:
    """No answer, no hit, no error; the same request is looked up again after a while only."""
    clock = [0.0]
    side = scheduler(lambda: LookupResult(failure=ServerUnavailableError("gone")), lambda: clock[0])
    client: Any = side._client
    assert [0, 0, 0] == [side.lookup("r", 0) for _ in range(3)]
    clock[0] = 5.0
    assert 0 == side.lookup("r", 0)
    assert (2, 2, 0) == (client.asked, side.counters.lookup_failures, side.counters.lookups)
    side.close()


def test_a_server_that_refuses_the_identity_ends_the_request_for_the_cache() -> None:
    """It is counted by its reason, the engine goes on, and nothing is saved under an identity that is in doubt."""

    def refuse() -> LookupResult:
        raise ServerUnavailableError("the identity is not the session's")

    side = scheduler(refuse)
    assert 0 == side.lookup("r", 0)
    assert {REFUSED: 1} == dict(side.counters.bypassed)
    assert side.tracker("r") is None
    assert side.take_save("r") is None
    side.close()


@pytest.mark.parametrize("answer", [LookupResult(hit_chunks=1), LookupResult(hit_chunks=3, lease=bytes(16))])
def test_a_hit_that_cannot_be_one_ends_the_request_for_the_cache(answer: LookupResult) -> None:
    """Chunks without a lease, and more than were asked for: a server of another mind costs hits and no engine."""
    side = scheduler(lambda: answer)
    assert 0 == side.lookup("r", 0)
    assert {REFUSED: 1} == dict(side.counters.bypassed)
    assert side.take_save("r") is None
    side.close()
    right = scheduler(lambda: LookupResult(hit_chunks=2, lease=bytes(16), lease_seconds=9.0))
    assert 16 == right.lookup("r", 0)
    right.close()


def test_a_request_without_keys_is_bypassed_and_counted_once() -> None:
    """By its reason; the engine may do with it what it wants."""
    side = SchedulerSide(ScriptedClient(LookupResult), SPACES[8])

    def refuse() -> EngineInputs:
        raise UncacheableRequest("missing_identity", "an item has no identifier")

    assert side.admit("r", refuse) is None
    assert side.admit("r", refuse) is None
    assert (1, {"missing_identity": 1}) == (side.counters.requests, dict(side.counters.bypassed))
    assert (0, None, None) == (side.lookup("r", 0), side.allocated("r", 0, 0), side.take_save("r"))
    side.preempt("r")
    side.end("r")
    side.end("r")
    assert 0 == len(side)
    assert {"bypassed.missing_identity": 1} == {k: v for k, v in side.counters.facts().items() if "bypassed" in k}
    side.close()


def test_tokens_that_are_none_turn_a_request_into_a_bypass() -> None:
    """A placeholder such as -1 is no token: the request goes on without the cache, and its session ends."""
    side = scheduler(LookupResult)
    side.lookup("r", 0)
    assert side.change("r", lambda tracker: tracker.extend([-1])) is None
    assert {"conflicting_keys": 1} == dict(side.counters.bypassed)
    assert side.change("r", lambda tracker: tracker.extend([1])) is None
    side.close()


def test_a_load_has_failed_if_one_worker_says_so_and_is_over_when_all_have_spoken() -> None:
    """Of three workers one did not get everything."""
    side = SchedulerSide(
        ScriptedClient(lambda: LookupResult(2, b"L" * 16, 60.0)), SPACES[8], world=3, hold=True, clock=lambda: 0.0
    )
    side.admit("r", lambda: EngineInputs(tuple(range(20)), ()))
    assert 16 == side.lookup("r", 0)
    plan = side.allocated("r", 0, 16)
    assert plan is not None
    assert not side.part_loaded(plan.name, failed=False)
    assert not side.part_loaded(plan.name, failed=True)
    assert side.part_loaded(plan.name, failed=False)
    assert not side.part_loaded(plan.name, failed=True)
    assert 1 == side.counters.load_failures
    tracker = side.tracker("r")
    assert tracker is not None
    assert tracker.load is None
    side.close()


# ---- a worker's side alone


def test_a_load_under_a_lease_that_nobody_has_fails_and_names_its_blocks(clients: dict[int, CacheClient]) -> None:
    """The engine hears of every block that should have been loaded."""
    engine = ToyEngine(clients[8], SPACES[8])
    worker = engine.workers[0]
    worker.load([LoadTask("r", "r:1", bytes(16), 0, 2, 4, 16, ((7, 8, 9),))])
    assert {7, 8, 9} == worker.take_failed_blocks()
    assert set() == worker.take_failed_blocks()
    assert {"r:1": (1, 1)} == worker.take_report().loads
    assert not worker.take_report()
    engine.close()


def test_saves_that_do_not_fit_the_queue_are_dropped_and_reported(clients: dict[int, CacheClient]) -> None:
    """The engine never waits for a slow cache: what is more than the queue takes is lost, and said to be."""
    engine = ToyEngine(clients[8], SPACES[8])
    paged = engine.workers[0]._groups
    gate: list[Any] = []

    class Stuck:
        def retrieve(self, lease: bytes, count: int, **others: Any) -> RetrieveResult:
            return RetrieveResult()

        def store(self, session: str, keys: Any, tensors: Any, **others: Any) -> Any:
            while not gate:
                time.sleep(0.001)  # until the test opens the gate
            return clients[8].store(session, keys, tensors, **others)

        def end_session(self, session: str, **others: Any) -> Any:
            return clients[8].end_session(session, **others)

        def staging(self, metas: Any) -> Any:
            return clients[8].staging(metas)

    worker = WorkerSide(Stuck(), paged, world=1, rank=0, chunk_size=8, queue_bytes=300)
    for name in range(1, 5):
        worker.save([SaveTask(name, bytes([name]) * 32, 0, 1, ((1, 2),))])
    assert not worker.flush(0.01)
    gate.append(True)
    assert worker.flush(5)
    assert {1: (1, 0), 2: (1, 0), 3: (0, 1), 4: (0, 1)} == worker.take_report().saves
    worker.close()
    worker.save([SaveTask(9, bytes(32), 0, 1, ((1, 2),))])
    assert {9: (0, 1)} == worker.take_report().saves
    engine.close()


def test_reports_of_several_workers_add_up() -> None:
    """For each load and save how many are done and how many failed."""
    report = WorkerReport(loads={"a": (1, 0)}, saves={1: (1, 0)})
    report.add(WorkerReport(loads={"a": (1, 1), "b": (1, 0)}, saves={1: (0, 1)}, misfit="other heads"))
    assert WorkerReport({"a": (2, 1), "b": (1, 0)}, {1: (1, 1)}, "other heads") == report
    assert not WorkerReport()
