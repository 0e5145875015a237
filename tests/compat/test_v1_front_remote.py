"""v1 clients of servers that share a remote tier: they hit what a v1 client of another server stored."""

from compat.v1.operations import V1Operation
from compat.v1.wire import decode_answer, encode_request
from tests.compat.front_harness import FrontHarness, V1Client
from tests.protocol_v2.shared_stores import FaultyStore, LaterExecutor, remote_tier

PROMPT = range(16)


class Fleet:
    """Two servers on one store, each with a v1 client; the second one's threads run when the test says so."""

    def __init__(self) -> None:
        self.store = FaultyStore()
        self.now = 0.0
        self.threads = LaterExecutor(at_once=True)
        first = FrontHarness(remote=remote_tier(self.store, lambda: 0.0), remote_executor=LaterExecutor(at_once=True))
        self.second = FrontHarness(remote=remote_tier(self.store, lambda: self.now), remote_executor=self.threads)
        self.reader = self.second.v1_client()
        assert first.v1_client().store(PROMPT, 10)


def polled(client: V1Client, operation: V1Operation, *payloads: object) -> list[object]:
    """Answers to a question, those to earlier ones included."""
    answers = client.send(*map(bytes, encode_request(7, operation, *payloads)))
    return [decode_answer(answer, operation)[1] for answer in answers]


def test_what_a_v1_client_stored_elsewhere_is_hit() -> None:
    """With its own values, at the first lookup; another salt, prompt or model misses."""
    fleet = Fleet()
    assert [10, 11, 12, 13] == fleet.reader.fetch(PROMPT)
    assert 0 == fleet.reader.hits(PROMPT, salt="tenant")
    assert 0 == fleet.reader.hits(range(1, 17))
    assert 0 == fleet.second.v1_client(model="org/other").hits(PROMPT)


def test_who_polls_hears_nil_and_who_waits_is_told_when_it_is_known() -> None:
    """As LMCache says it: pending is nil, and nobody is told 0 because the answer took a moment."""
    fleet = Fleet()
    fleet.second.hold = True
    fleet.threads.at_once = False
    key = fleet.reader.key(PROMPT, request_id="slow", rank=None)
    assert [] == polled(fleet.reader, V1Operation.LOOKUP, key, 1)
    assert [None] == polled(fleet.reader, V1Operation.QUERY_PREFETCH_STATUS, "slow")
    other = fleet.second.v1_client()
    assert [None] == polled(other, V1Operation.QUERY_PREFETCH_STATUS, "slow")
    assert [0] == polled(other, V1Operation.QUERY_PREFETCH_STATUS, "unknown")
    assert [] == polled(fleet.reader, V1Operation.WAIT_PREFETCH_STATUS, "slow", 5.0)
    fleet.threads.run()
    fleet.second.release_jobs()
    acknowledged, told = fleet.second.inboxes.pop(fleet.reader.identity)
    assert decode_answer(acknowledged, V1Operation.LOOKUP)[1] is None
    assert 4 == decode_answer(told, V1Operation.WAIT_PREFETCH_STATUS)[1]
    assert [0] == polled(fleet.reader, V1Operation.QUERY_PREFETCH_STATUS, "slow")  # told once


def test_a_second_lookup_of_one_id_counts_alone() -> None:
    """The result is the later one's, and the earlier one leaves no lease behind."""
    fleet = Fleet()
    fleet.second.hold = True
    fleet.threads.at_once = False
    for tokens in (PROMPT, range(1, 17)):
        key = fleet.reader.key(tokens, request_id="twice", rank=None)
        assert [] == polled(fleet.reader, V1Operation.LOOKUP, key, 1)
    fleet.threads.run()
    fleet.second.release_jobs()
    assert [None, None] == [
        decode_answer(answer, V1Operation.LOOKUP)[1] for answer in fleet.second.inboxes.pop(fleet.reader.identity)
    ]
    assert [0] == polled(fleet.reader, V1Operation.QUERY_PREFETCH_STATUS, "twice")
    assert 0 == fleet.second.fact("cache.leases")
