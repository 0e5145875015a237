"""Chunk events over sockets: PUB for what happens, ROUTER for what was missed.

    published  [topic, number (u64 big-endian), batch]       topic: ``xk2/<first 16 bytes of the root, hex>``
    asked      [XKER, number, topic, boot]                   what is kept of that space from this number on; an empty
                                                             topic means the only space, and a boot that is not the
                                                             publisher's (or empty) means from the beginning
    answered   [XKER, number, batch] ..., [XKER, number]     at most 256 of them, in order; the last one ends it,
                                                             with the number to ask for next

The publisher never waits: what a slow subscriber does not take is dropped by its queue, and asked for again by number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

import zmq

from protocol_v2.addresses import checked_address
from protocol_v2.chunk_events import EventError, decode_batch
from protocol_v2.errors import LocalProtocolError, ProtocolError
from protocol_v2.event_log import EventLog, FeedReader
from protocol_v2.identity import space_to_wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType
    from typing import Self

    from keying import KeySpace
    from protocol_v2.chunk_events import ChunkEvent
    from protocol_v2.event_log import FeedItem

log = logging.getLogger(__name__)

MAGIC: Final = b"XKER"
NUMBER_BYTES: Final = 8
SEND_QUEUE: Final = 10_000
"""Batches that wait for one subscriber."""

MAX_BATCH_BYTES: Final = 64 << 20

ANSWER_BATCHES: Final = 256
"""Batches in one answer: well below what a socket queues for one peer, so that none of them is dropped."""


class EventPublisher:
    """Publishes chunk events, of each space by itself.

    Args:
        address: to publish at, ``tcp://HOST:PORT`` or ``ipc://PATH``.
        replay_address: to answer at; None: what was missed is lost.
        spaces: told at once; see `describe`.

    Raises:
        LocalProtocolError: what is no address, or cannot be bound.
    """

    def __init__(self, address: str, replay_address: str | None = None, *, spaces: Iterable[KeySpace] = ()) -> None:
        checked_address(address, "events")
        if replay_address is not None:
            checked_address(replay_address, "events replay")
        self._boot = os.urandom(16)
        self._log = EventLog(self._boot)
        self._topics: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._publish = self._bound(zmq.PUB, address, SEND_QUEUE)
        self.address = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_address: str | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        if replay_address is not None:
            router = self._bound(zmq.ROUTER, replay_address, 4 * ANSWER_BATCHES)
            self.replay_address = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._answer, args=(router,), name="extra-keys-replay", daemon=True)
            self._thread.start()
        for space in spaces:
            self.describe(space)

    def _bound(self, kind: int, address: str, queue: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = queue  # before it is bound: it holds for what connects afterwards
        try:
            made.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise LocalProtocolError(f"events: cannot publish at {address}: {error.strerror}") from None
        return made

    def describe(self, space: KeySpace) -> None:
        """Tell what a root stands for, once and from time to time again. From one thread, as `publish`.

        Raises:
            EventError: too many spaces.
        """
        fields = space_to_wire(space)
        with self._lock:
            told = self._log.describe(space.root, fields)
            self._topics.setdefault(topic_of(space.root), space.root)
        if told is not None:
            self._send(space.root, *told)

    def publish(self, root: bytes, events: Sequence[ChunkEvent]) -> int:
        """Publish a batch of one space, from one thread; its number. Never waits.

        Raises:
            EventError: too many events, or too many spaces.
        """
        with self._lock:
            number, body = self._log.append(root, events)
            self._topics.setdefault(topic_of(root), root)
        self._send(root, number, body)
        return number

    def _send(self, root: bytes, number: int, body: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # PUB drops by subscriber, and numbers tell
            self._publish.send_multipart([topic_of(root), number.to_bytes(NUMBER_BYTES, "big"), body], zmq.NOBLOCK)

    def close(self) -> None:
        """End. Idempotent."""
        if self._closed:
            return
        self._closed = self._stopping = True
        if self._thread is not None:
            self._thread.join(2)
        self._context.destroy(linger=100)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        try:
            while not self._stopping:
                if router.poll(100):
                    self._answer_one(router)
        finally:
            router.close(linger=0)

    def _answer_one(self, router: zmq.Socket[bytes]) -> None:
        identity, *frames = router.recv_multipart()
        if len(frames) != 4 or frames[0] != MAGIC or len(frames[1]) != NUMBER_BYTES:
            return
        _, number_asked, topic, boot = frames
        first = int.from_bytes(number_asked, "big") if boot == self._boot else 0
        with self._lock:
            root = self._asked_root(topic)
            kept = self._log.since(root, first, ANSWER_BATCHES)
            following = kept[-1][0] + 1 if kept else self._log.next(root)
        with contextlib.suppress(zmq.Again):  # a subscriber that asks and does not read asks again
            for number, body in kept:
                router.send_multipart([identity, MAGIC, number.to_bytes(NUMBER_BYTES, "big"), body], zmq.NOBLOCK)
            router.send_multipart([identity, MAGIC, following.to_bytes(NUMBER_BYTES, "big")], zmq.NOBLOCK)

    def _asked_root(self, topic: bytes) -> bytes:
        """Of the space that a topic names, or of the only one; of which nothing is kept where there is none."""
        if topic:
            return self._topics.get(topic, b"")
        roots = self._log.roots
        return roots[0] if len(roots) == 1 else b""


class EventSubscriber:
    """Receives the chunk events of one publisher about one space, in order.

    Args:
        address: where it publishes.
        replay_address: where it answers; None: what was missed is `Lost`.
        root: of the space to listen to; None for the only one that an engine's connector tells of. A server tells of
            many.
        replay_timeout: seconds to wait for an answer.

    Raises:
        LocalProtocolError: what is no address.
    """

    def __init__(
        self,
        address: str,
        replay_address: str | None = None,
        *,
        root: bytes | None = None,
        replay_timeout: float = 2.0,
    ) -> None:
        checked_address(address, "events")
        if replay_address is not None:
            checked_address(replay_address, "events replay")
        self._reader = FeedReader()
        self._topic = b"" if root is None else topic_of(root)
        self._replay_timeout = replay_timeout
        self._context = zmq.Context()
        self._subscribed = self._context.socket(zmq.SUB)
        self._subscribed.rcvhwm = SEND_QUEUE
        self._subscribed.maxmsgsize = MAX_BATCH_BYTES
        self._subscribed.subscribe(self._topic or b"xk2/")
        self._subscribed.connect(address)
        self._replay_address = replay_address
        self.unreadable = 0
        """Messages that were no batches."""

    def receive(self, timeout: float) -> list[FeedItem]:
        """What has happened, waiting at most `timeout` seconds for something to happen.

        A gap is asked for at once; what cannot be had is `Lost`, and what was known before `Restarted` is void.
        """
        if not self._subscribed.poll(int(timeout * 1000)):
            return []
        out: list[FeedItem] = []
        while True:
            try:
                frames = self._subscribed.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            out += self._take(frames[1:])
        if self._reader.missing is not None:
            out += self._replay()
        return out

    def catch_up(self) -> list[FeedItem]:
        """Ask for all that is kept and was not received, without waiting for something to happen.

        To begin with, and now and then on a quiet feed: that the last batch was lost, or that the publisher restarted,
        shows only when another one comes.
        """
        return self._replay()

    def close(self) -> None:
        """End. Idempotent."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, frames: Sequence[bytes]) -> list[FeedItem]:
        """[number, batch]; the number is in the batch as well, which is what counts."""
        if len(frames) != 2:
            self.unreadable += 1
            return []
        try:
            batch = decode_batch(frames[1])
        except EventError:
            raise
        except ProtocolError as error:
            log.warning("a message on the event socket was no batch: %s", error)
            self.unreadable += 1
            return []
        return self._reader.receive(batch)

    def _replay(self) -> list[FeedItem]:
        out: list[FeedItem] = []
        if self._replay_address is not None:
            out += self._asked(self._replay_address)
        while self._reader.missing is not None:
            out += self._reader.give_up()
        return out

    def _asked(self, address: str) -> list[FeedItem]:
        """All that is kept from the wanted number on, answer by answer."""
        out: list[FeedItem] = []
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.maxmsgsize = MAX_BATCH_BYTES
        first: int | None = self._reader.next
        try:
            dealer.connect(address)
            while first is not None:
                number = first.to_bytes(NUMBER_BYTES, "big")
                dealer.send_multipart([MAGIC, number, self._topic, self._reader.boot])
                first = self._take_answer(dealer, out)
        finally:
            dealer.close(linger=0)
        return out

    def _take_answer(self, dealer: zmq.Socket[bytes], out: list[FeedItem]) -> int | None:
        """One answer; the number to ask for next, None where that was all or it did not come to its end."""
        ends = time.monotonic() + self._replay_timeout
        following: int | None = None
        while (rest := ends - time.monotonic()) > 0 and dealer.poll(int(rest * 1000) + 1):
            frames = dealer.recv_multipart()
            if len(frames) < 2 or frames[0] != MAGIC or len(frames[1]) != NUMBER_BYTES:
                return None
            number = int.from_bytes(frames[1], "big")
            if len(frames) == 2:
                return number if following is not None and following == number else None
            out += self._take(frames[1:])
            following = number + 1
        return None


def topic_of(root: bytes) -> bytes:
    """The topic of a space's events."""
    return b"xk2/" + root[:16].hex().encode()
