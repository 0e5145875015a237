"""A service over a remote tier: lookups and prefetches that ask it first, while everything else goes on."""

from typing import Any

import pytest

from keying import CacheSalt, KeySpace, chunk_keys
from protocol_v2.codes import MissReason
from protocol_v2.events import ReplyReceived
from protocol_v2.identity import keys_of_digests
from protocol_v2.messages import LookupRequest, PingReply, PingRequest, PrefetchRequest
from protocol_v2.metrics import StatusCollector
from tests.protocol_v2.service_harness import SPACE, Client, Harness
from tests.protocol_v2.shared_stores import FaultyStore, LaterExecutor, remote_tier

KEYS = chunk_keys(SPACE, range(16))
VALUES = [bytes([place]) * 100 for place in range(4)]


class Fleet:
    """Two servers on one store, each with a client; the second one's threads run when the test says so."""

    def __init__(self) -> None:
        self.store = FaultyStore()
        self.now = 0.0
        self.threads = LaterExecutor(at_once=True)
        first = Harness(remote=remote_tier(self.store, lambda: 0.0), remote_executor=LaterExecutor(at_once=True))
        self.second = Harness(remote=remote_tier(self.store, lambda: self.now), remote_executor=self.threads)
        self.writer, self.reader = first.client(), self.second.client()
        assert 4 == self.writer.store(KEYS, VALUES).stored


@pytest.fixture
def fleet() -> Fleet:
    """A prompt of four chunks was stored through the first server."""
    return Fleet()


def test_the_first_lookup_of_another_server_hits(fleet: Fleet) -> None:
    """Equal bytes, without a special call; another salt and another space miss."""
    found = fleet.reader.lookup(KEYS)
    assert (4, None) == (found.hit_chunks, found.miss)
    assert VALUES == fleet.reader.retrieve(found.lease, 4)
    assert 0 == fleet.reader.lookup(chunk_keys(SPACE, range(16), [CacheSalt("s")]), session="salted").hit_chunks
    other = KeySpace("org/m", chunk_size=4, kv_dtype="float16")
    stranger = fleet.second.client(other, boot=b"d" * 16)
    assert MissReason.ABSENT == stranger.lookup(chunk_keys(other, range(16))).miss
    assert (4, True) == (fleet.second.fact("cache.retrieved.remote"), fleet.second.fact("remote.up"))


def test_a_prefetch_asks_and_pulls(fleet: Fleet) -> None:
    """It says how many chunks are on their way; they are in memory then, and a store that goes away takes nothing."""
    message = PrefetchRequest(session="p", keys=keys_of_digests(KEYS))
    assert (4, 0) == (fleet.reader.ask(message).accepted, 0)
    fleet.store.go_away()
    assert (0, 4) == ((again := fleet.reader.ask(message)).accepted, again.resident)
    assert VALUES == fleet.reader.retrieve(fleet.reader.lookup(KEYS).lease, 4)


def test_a_scraper_sees_the_remote_tier(fleet: Fleet) -> None:
    """Counters grow, gauges say how it is; texts such as the address are for the status alone."""
    fleet.reader.lookup(KEYS)
    families = {one.name: one for one in StatusCollector(lambda: fleet.second.service.status(0.0)).collect()}
    kinds = {name: families[f"extra_keys_remote_{name}"].type for name in ("asked", "up", "queued", "written_bytes")}
    assert {"asked": "counter", "up": "gauge", "queued": "gauge", "written_bytes": "counter"} == kinds
    assert [(4.0,), (1.0,)] == [
        tuple(sample.value for sample in families[f"extra_keys_remote_{name}"].samples) for name in ("asked", "up")
    ]
    assert "extra_keys_remote_address" not in families
    assert "memory://" == fleet.second.fact("remote.address")


def begin_lookup(fleet: Fleet, client: Client) -> int:
    """A lookup whose question is on its way."""
    fleet.second.hold = True
    fleet.threads.at_once = False
    return client.begin(LookupRequest(session="slow", keys=keys_of_digests(KEYS)))


def test_others_are_served_while_a_lookup_waits(fleet: Fleet) -> None:
    """The loop never waits for the store: a ping is answered in between, and the lookup when its answer is there."""
    slow = begin_lookup(fleet, fleet.reader)
    other = fleet.second.client(boot=b"d" * 16)
    assert isinstance(other.ask(PingRequest()), PingReply)
    assert fleet.reader.outcome(slow) is None
    fleet.threads.run()
    fleet.second.release_jobs()
    fleet.reader.receive()
    answer: Any = fleet.reader.outcome(slow)
    assert 4 == answer.message.hit_chunks


def test_a_late_answer_counts_next_time(fleet: Fleet) -> None:
    """A lookup that did not wait any longer is a miss, and the next one a hit."""
    slow = begin_lookup(fleet, fleet.reader)
    fleet.now += 1.0
    fleet.second.release_jobs()
    fleet.reader.receive()
    answer: Any = fleet.reader.outcome(slow)
    assert (0, 1) == (answer.message.hit_chunks, fleet.second.fact("remote.late"))
    fleet.threads.run()
    fleet.threads.at_once = True
    assert 4 == fleet.reader.lookup(KEYS).hit_chunks


def test_a_client_that_is_gone_takes_no_lease(fleet: Fleet) -> None:
    """Whoever left while its lookup waited is not given a lease that nobody would give back."""
    begin_lookup(fleet, fleet.reader)
    fleet.second.pass_time(10_000.0)
    assert 0 == fleet.second.fact("server.peers")
    fleet.threads.run()
    fleet.second.release_jobs()
    assert (0, 0) == (fleet.second.fact("cache.leases"), fleet.second.fact("cache.sessions"))
    fleet.threads.at_once = True
    assert 4 == fleet.second.client(boot=b"d" * 16).lookup(KEYS).hit_chunks
    assert 1 == fleet.second.fact("cache.leases")


def test_a_client_that_said_hello_again_takes_no_lease_of_the_session_before(fleet: Fleet) -> None:
    """Its new session knows nothing of the lookup that waited, so neither lease nor session comes of it."""
    slow = begin_lookup(fleet, fleet.reader)
    fleet.reader.connection.lose("the client says so")
    fleet.reader.hello()
    fleet.threads.run()
    fleet.second.release_jobs()
    fleet.reader.receive()
    assert (0, 0) == (fleet.second.fact("cache.leases"), fleet.second.fact("cache.sessions"))
    assert not isinstance(fleet.reader.outcome(slow), ReplyReceived)
    fleet.threads.at_once = True
    assert 4 == fleet.reader.lookup(KEYS).hit_chunks
    assert 1 == fleet.second.fact("cache.leases")
