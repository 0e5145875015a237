"""Chunk events over sockets, and what a connector tells."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from keying import CacheSalt, KeySpace, pack_tokens
from protocol_v2.chunk_events import (
    ChunkEvent,
    ChunkRemoved,
    ChunkStored,
    EventError,
    SpaceCleared,
    SpaceDescribed,
)
from protocol_v2.connectors.chunk_news import ChunkNews
from protocol_v2.connectors.tracker import RequestTracker, SavePlan
from protocol_v2.errors import LocalProtocolError
from protocol_v2.event_feed import ANSWER_BATCHES, EventPublisher, EventSubscriber, topic_of
from protocol_v2.event_log import Lost, Restarted

pytestmark = pytest.mark.zmq

SPACE = KeySpace("m", chunk_size=4, kv_dtype="float32")
ANY = "tcp://127.0.0.1:*"


def removed(number: int) -> ChunkRemoved:
    """An event with a number."""
    return ChunkRemoved((number.to_bytes(32, "big"),))


def publisher_of(*addresses: str) -> EventPublisher:
    """A publisher of one space."""
    return EventPublisher(*addresses, spaces=[SPACE])


def until(subscriber: EventSubscriber, count: int) -> list[Any]:
    """What a subscriber gets, until there are so many removals."""
    out: list[Any] = []
    ends = time.monotonic() + 10
    while sum(isinstance(one, ChunkRemoved) for one in out) < count and time.monotonic() < ends:
        out += subscriber.receive(0.2)
    return out


def joined(publisher: EventPublisher, subscriber: EventSubscriber) -> list[Any]:
    """Publish until the subscriber hears it: a subscription takes a moment, and nothing tells when it stands."""
    out: list[Any] = []
    ends = time.monotonic() + 10
    while not out and time.monotonic() < ends:
        publisher.publish(SPACE.root, (removed(0),))
        out = subscriber.receive(0.05)
    return out


def test_a_subscriber_that_comes_late_gets_all_that_is_kept(tmp_path: Path) -> None:
    """The space first, then every event from the beginning, in order, without a gap."""
    with publisher_of(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r") as publisher:
        for number in range(1, 51):
            publisher.publish(SPACE.root, (removed(number),))
        with EventSubscriber(publisher.address, publisher.replay_address) as subscriber:
            got = subscriber.catch_up()
            assert isinstance(got[0], Restarted)
            assert isinstance(got[1], SpaceDescribed)
            assert [removed(number) for number in range(1, 51)] == got[2:]
            assert [] == subscriber.catch_up()
            joined(publisher, subscriber)
            publisher.publish(SPACE.root, (removed(99),))
            assert removed(99) in until(subscriber, 1)


def test_what_was_missed_is_asked_for(tmp_path: Path) -> None:
    """Events before the subscription are replayed when the first one after it shows the gap."""
    with publisher_of(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r") as publisher:
        for number in range(1, 21):
            publisher.publish(SPACE.root, (removed(number),))
        with EventSubscriber(publisher.address, publisher.replay_address, root=SPACE.root) as subscriber:
            got = joined(publisher, subscriber)
            assert not any(isinstance(one, Lost) for one in got)
            assert [removed(number) for number in range(1, 21)] == [one for one in got if one != removed(0)][2:]


def test_an_answer_of_many_batches_comes_in_pieces(tmp_path: Path) -> None:
    """More than a socket queues for one peer: none is lost, by the publisher's only space and by its root."""
    count = 5 * ANSWER_BATCHES + 3
    with publisher_of(ANY, f"ipc://{tmp_path}/r") as publisher:
        for number in range(1, count):
            publisher.publish(SPACE.root, (removed(number),))
        for root in (None, SPACE.root):
            with EventSubscriber(publisher.address, publisher.replay_address, root=root) as subscriber:
                got = subscriber.catch_up()
            assert not any(isinstance(one, Lost) for one in got)
            assert [removed(number) for number in range(1, count)] == [
                one for one in got if isinstance(one, ChunkRemoved)
            ]


def test_a_publisher_of_several_spaces_is_heard_by_root(tmp_path: Path) -> None:
    """Each space has its own numbers and its own answer; whoever names none gets none of either."""
    other = KeySpace("other", chunk_size=4, kv_dtype="float32")
    with EventPublisher(ANY, f"ipc://{tmp_path}/r", spaces=[SPACE, other]) as publisher:
        for number in range(1, 4):
            publisher.publish(SPACE.root, (removed(number),))
        publisher.publish(other.root, (removed(9),))
        for root, wanted in ((SPACE.root, [1, 2, 3]), (other.root, [9]), (b"n" * 32, []), (None, [])):
            with EventSubscriber(publisher.address, publisher.replay_address, root=root) as subscriber:
                got = [one for one in subscriber.catch_up() if isinstance(one, ChunkRemoved)]
            assert [removed(number) for number in wanted] == got
        publisher.close()
        publisher.close()


def test_without_a_replay_address_what_was_missed_is_lost(tmp_path: Path) -> None:
    """Said by its numbers, and not hidden."""
    with publisher_of(ANY) as publisher:
        publisher.publish(SPACE.root, (removed(1),))
        with EventSubscriber(publisher.address) as subscriber:
            got = joined(publisher, subscriber)
            assert isinstance(got[0], Restarted)
            assert isinstance(got[1], Lost)
            assert 0 == got[1].first
            assert publisher.replay_address is None


def test_a_replay_server_that_does_not_answer_costs_its_timeout(tmp_path: Path) -> None:
    """The gap is lost, after the time that was given."""
    with (
        publisher_of(ANY) as publisher,
        EventSubscriber(publisher.address, f"ipc://{tmp_path}/nobody", replay_timeout=0.1) as subscriber,
    ):
        assert any(isinstance(one, Lost) for one in joined(publisher, subscriber))


def test_another_space_is_not_heard(tmp_path: Path) -> None:
    """The topic is the space's."""
    other = KeySpace("other", chunk_size=4, kv_dtype="float32")
    assert topic_of(SPACE.root) != topic_of(other.root)
    with (
        publisher_of(ANY) as publisher,
        EventSubscriber(publisher.address, root=other.root) as deaf,
        EventSubscriber(publisher.address, root=SPACE.root) as subscriber,
    ):
        assert joined(publisher, subscriber)
        assert [] == deaf.receive(0.05)


def test_what_is_no_batch_is_counted_and_another_version_is_an_error(tmp_path: Path) -> None:
    """A stray message costs nothing; a publisher of another version must not be read on in silence."""
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.linger = 0
    publisher.bind(f"ipc://{tmp_path}/e")
    try:
        with EventSubscriber(f"ipc://{tmp_path}/e") as subscriber:
            ends = time.monotonic() + 10
            while not subscriber.unreadable and time.monotonic() < ends:
                publisher.send_multipart([b"xk2/", bytes(8), b"nonsense"])
                publisher.send_multipart([b"xk2/"])
                assert [] == subscriber.receive(0.05)
            publisher.send_multipart([b"xk2/", bytes(8), b"\x81\xa7version\x07"])
            with pytest.raises(EventError, match="version 7"):
                subscriber.receive(10)
    finally:
        context.destroy(linger=0)


def test_a_replay_socket_takes_only_what_it_understands(tmp_path: Path) -> None:
    """Other frames are not answered, and do not end it."""
    with publisher_of(ANY, f"ipc://{tmp_path}/r") as publisher:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{tmp_path}/r")
        for wrong in ([b"XKER"], [b"abcd", bytes(8), b"", b""], [b"XKER", b"1", b"", b""], [b"XKER", bytes(8), b""]):
            dealer.send_multipart(wrong)
        context.destroy(linger=0)
        publisher.publish(SPACE.root, (removed(1),))
        with EventSubscriber(publisher.address, publisher.replay_address) as subscriber:
            assert removed(1) in subscriber.catch_up()


def test_an_address_that_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    """Somebody else has it."""
    with publisher_of(ANY) as publisher, pytest.raises(LocalProtocolError, match="cannot publish"):
        publisher_of(publisher.address)


@pytest.mark.parametrize("made", [EventPublisher, EventSubscriber])
@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1:65536"])
def test_what_is_no_address_is_refused_before_libzmq_reads_it(made: type[Any], address: str) -> None:
    """A port beyond 65535 above all, which libzmq takes modulo 65536; a right address is taken on both sides."""
    for pair in ((address,), (ANY, address)):
        with pytest.raises(LocalProtocolError, match="wanted ipc://PATH or tcp://HOST:PORT"):
            made(*pair)
    made("tcp://127.0.0.1:*" if made is EventPublisher else "tcp://127.0.0.1:1").close()


# ---- what a connector tells


class Told:
    """A publisher that remembers."""

    def __init__(self) -> None:
        self.batches: list[list[ChunkEvent]] = []

    def publish(self, root: bytes, events: Sequence[ChunkEvent]) -> int:
        """Remember."""
        assert SPACE.root == root
        self.batches.append(list(events))
        return len(self.batches)

    def close(self) -> None:
        """Nothing."""


def a_save(n_tokens: int = 12, *, salted: bool = False) -> tuple[SavePlan, bytes]:
    """A save of all chunks of a request, and its tokens."""
    tracker = RequestTracker(SPACE, [CacheSalt("s")] if salted else (), name="r")
    tracker.extend(range(n_tokens))
    tracker.compute(n_tokens)
    plan = tracker.take_save(hold=True)
    assert plan is not None
    return plan, bytes(pack_tokens(range(plan.stop * 4)))


def test_a_chunk_is_told_when_every_worker_has_stored_it() -> None:
    """Not before; not where one of them lost it; with a key that can be recomputed."""
    told = Told()
    news = ChunkNews(told, SPACE.root, world=2, hide_salts=False)
    plan, tokens = a_save()
    news.saving(1, plan, tokens)
    news.saving(2, plan, tokens)
    news.saved({1: (1, 0), 2: (1, 0)})
    assert [] == told.batches
    news.saved({1: (1, 0), 2: (0, 1), 3: (2, 0)})
    assert [3] == [len(one) for one in told.batches]
    for event, key in zip(told.batches[0], plan.keys, strict=True):
        assert isinstance(event, ChunkStored)
        assert key.digest == event.key
        event.verify()
    news.saved({2: (1, 0)})
    assert 1 == len(told.batches)


def test_a_chunk_that_a_lookup_finds_gone_is_told_once() -> None:
    """Only what was told to be there is told to be gone, and after a reset nothing is there."""
    told = Told()
    news = ChunkNews(told, SPACE.root, world=1, hide_salts=True)
    plan, tokens = a_save(salted=True)
    news.saving(1, plan, tokens)
    news.saved({1: (1, 0)})
    news.missed(bytes(32))
    news.missed(plan.keys[1].digest)
    news.missed(plan.keys[1].digest)
    assert [ChunkRemoved((plan.keys[1].digest,))] == told.batches[1]
    news.cleared()
    news.missed(plan.keys[0].digest)
    assert [SpaceCleared()] == told.batches[2]
    assert 3 == len(told.batches)
    first = told.batches[0][0]
    assert isinstance(first, ChunkStored)
    assert not first.is_whole
    news.close()
