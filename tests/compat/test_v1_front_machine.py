"""The v1 front under any order of calls, with few names so that they clash: nobody is ever given another's KV."""

from unittest import mock

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from compat.v1 import front
from compat.v1.front_sessions import LookupTable
from compat.v1.front_storage import namespace_root
from compat.v1.operations import V1Operation
from tests.compat.front_harness import CHUNK, FrontHarness, V1Client, pickled

PROMPTS = ((1,) * 14, (1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), (2,) * 9)
"""The first two share a chunk."""

SALTS = ("", "s", "t")
MODELS = ("m", "n")
REQUEST_IDS = ("0", "1")

prompts, salts, request_ids = st.sampled_from(PROMPTS), st.sampled_from(SALTS), st.sampled_from(REQUEST_IDS)
users = st.integers(0, 3)


class FrontMachine(RuleBasedStateMachine):
    """Four sockets of two models; what each identity's chunks are filled with is known."""

    @initialize()
    def start(self) -> None:
        """A service over memory with room for everything."""
        self.harness = FrontHarness()
        self.clients = [self.harness.v1_client(model=MODELS[place % 2]) for place in range(4)]
        self.fills: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self.looked_up: dict[tuple[int, str], int] = {}

    def fill(self, client: V1Client, salt: str, prefix: tuple[int, ...]) -> int:
        """The byte of one chunk: another for every identity."""
        return self.fills.setdefault((client.model, salt, prefix), len(self.fills) + 1)

    @rule(user=users, tokens=prompts, salt=salts, request_id=request_ids, start=st.integers(0, 1))
    def store(self, user: int, tokens: tuple[int, ...], salt: str, request_id: str, start: int) -> None:
        """A worker stores what it computed, under whatever request id."""
        client, stop = self.clients[user], len(tokens) // CHUNK
        key = client.key(tokens, request_id=request_id, salt=salt, start=start * CHUNK)
        fills = [self.fill(client, salt, tokens[: (place + 1) * CHUNK]) for place in range(start, stop)]
        assert client.commit(key, pickled(fills))

    @rule(user=users, tokens=prompts, salt=salts, request_id=request_ids, readers=st.integers(0, 2))
    def look_up(self, user: int, tokens: tuple[int, ...], salt: str, request_id: str, readers: int) -> None:
        """A scheduler looks up and polls."""
        client = self.clients[user]
        found = client.lookup(tokens, request_id=request_id, salt=salt, readers=readers)
        assert 0 <= found <= len(tokens) // CHUNK
        for place in range(found):
            assert (client.model, salt, tokens[: (place + 1) * CHUNK]) in self.fills
        self.looked_up[user, request_id] = found

    @rule(user=users, tokens=prompts, salt=salts, request_id=request_ids)
    def store_and_look_up(self, user: int, tokens: tuple[int, ...], salt: str, request_id: str) -> None:
        """What is there is hit: stored by one request, looked up by the next."""
        self.store(user, tokens, salt, "stored", 0)
        self.look_up(user, tokens, salt, request_id, 1)
        assert self.looked_up[user, request_id] == len(tokens) // CHUNK

    @rule(user=users, tokens=prompts, salt=salts, request_id=request_ids, start=st.integers(0, 1))
    def retrieve(self, user: int, tokens: tuple[int, ...], salt: str, request_id: str, start: int) -> None:
        """A worker retrieves what somebody may have looked up: its own identity's, or nothing."""
        client, stop = self.clients[user], len(tokens) // CHUNK
        got = client.retrieve(tokens, request_id=request_id, salt=salt, start=start * CHUNK)
        if got is not None:
            assert got == [self.fill(client, salt, tokens[: (place + 1) * CHUNK]) for place in range(start, stop)]

    @rule(user=users, request_id=request_ids)
    def poll(self, user: int, request_id: str) -> None:
        """Anybody polls."""
        assert self.clients[user].ask(V1Operation.QUERY_PREFETCH_STATUS, request_id) >= 0

    @rule(user=users, tokens=prompts, request_id=request_ids)
    def free(self, user: int, tokens: tuple[int, ...], request_id: str) -> None:
        """A scheduler frees."""
        client = self.clients[user]
        assert (
            client.ask(V1Operation.FREE_LOOKUP_LOCKS, client.key(tokens, rank=None, request_id=request_id), 1) is None
        )

    @rule(user=users, request_id=request_ids)
    def end(self, user: int, request_id: str) -> None:
        """A scheduler ends."""
        self.clients[user].end(request_id)
        self.looked_up.pop((user, request_id), None)

    @rule(user=users, force=st.booleans())
    def clear(self, user: int, force: bool) -> None:
        """Somebody clears."""
        assert self.clients[user].ask(V1Operation.CLEAR, force) is None

    @rule(seconds=st.sampled_from([1, 61, 601]))
    def wait(self, seconds: int) -> None:
        """Leases and lookups expire."""
        self.harness.pass_time(seconds)

    @invariant()
    def holds_what_is_asked_for(self) -> None:
        """No lease without a lookup, none of more than was hit, no failure inside."""
        assert self.harness.fact("cache.held") <= sum(self.looked_up.values())
        assert self.harness.refused("failed") == 0


FrontMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestFrontMachine = FrontMachine.TestCase

CONTROL = settings(
    max_examples=300,
    stateful_step_count=30,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
"""For a machine that is to fail: as soon as it does, without looking for a shorter way."""


def test_the_machine_sees_a_front_that_forgets_the_salt() -> None:
    """Negative control: with salts left out of the root, the machine finds KV of another tenant."""

    def saltless(model: str, _salt: str, *, chunk_size: int, dtype: str) -> bytes:
        return namespace_root(model, "", chunk_size=chunk_size, dtype=dtype)

    with mock.patch.object(front, "namespace_root", saltless), pytest.raises(AssertionError):
        run_state_machine_as_test(FrontMachine, settings=CONTROL)


def test_the_machine_sees_lookups_that_serve_any_identity() -> None:
    """Negative control: a retrieve that takes whatever lookup has its request id."""

    def any_lookup(self: LookupTable, request_id: str, _root: bytes, _hashes: object, now: float) -> object:
        return self.find_latest(request_id, now)

    with mock.patch.object(LookupTable, "find_covering", any_lookup), pytest.raises(AssertionError):
        run_state_machine_as_test(FrontMachine, settings=CONTROL)
