"""Chunk events over sockets: PUB for what happens, ROUTER for what was missed.

    published  [topic, number (u64 big-endian), batch]       topic: ``xk2/<first 16 bytes of the root, hex>``
    asked      [XKER, number]                                all that is kept from this number on
    answered   [XKER, number, batch] ..., [XKER, number]     the last one ends it, with the number that comes next

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

from protocol_v2.chunk_events import EventError, EventLog, FeedReader, decode_batch
from protocol_v2.errors import LocalProtocolError, ProtocolError
from protocol_v2.identity import space_to_wire

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from keying import KeySpace
    from protocol_v2.chunk_events import ChunkEvent, Lost, Restarted

log = logging.getLogger(__name__)

MAGIC: Final = b"XKER"
NUMBER_BYTES: Final = 8
SEND_QUEUE: Final = 10_000
"""Batches that wait for one subscriber."""

MAX_BATCH_BYTES: Final = 64 << 20


class EventPublisher:
    """Publishes the chunk events of one space.

    Args:
        space: of all keys.
        address: to publish at, ``tcp://HOST:PORT`` or ``ipc://PATH``.
        replay_address: to answer at; None: what was missed is lost.

    Raises:
        LocalProtocolError: an address that cannot be bound.
    """

    def __init__(self, space: KeySpace, address: str, replay_address: str | None = None) -> None:
        self._log = EventLog(os.urandom(16), space.root, space_to_wire(space))
        self._topic = topic_of(space.root)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._publish = self._bound(zmq.PUB, address)
        self._publish.sndhwm = SEND_QUEUE
        self.address = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_address: str | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        if replay_address is not None:
            router = self._bound(zmq.ROUTER, replay_address)
            self.replay_address = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._answer, args=(router,), name="extra-keys-replay", daemon=True)
            self._thread.start()

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        try:
            made.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise LocalProtocolError(f"events: cannot publish at {address}: {error.strerror}") from None
        return made

    def publish(self, events: Sequence[ChunkEvent]) -> int:
        """Publish a batch, from one thread; its number. Never waits."""
        with self._lock:
            number, body = self._log.append(events)
        with contextlib.suppress(zmq.Again):  # PUB drops by subscriber, and numbers tell
            self._publish.send_multipart([self._topic, number.to_bytes(NUMBER_BYTES, "big"), body], zmq.NOBLOCK)
        return number

    def close(self) -> None:
        """End. Idempotent."""
        self._stopping = True
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
        frames = router.recv_multipart()
        if len(frames) != 3 or frames[1] != MAGIC or len(frames[2]) != NUMBER_BYTES:
            return
        with self._lock:
            kept, following = self._log.since(int.from_bytes(frames[2], "big")), self._log.next
        with contextlib.suppress(zmq.Again):  # a subscriber that asks and does not read asks again
            for number, body in kept:
                router.send_multipart([frames[0], MAGIC, number.to_bytes(NUMBER_BYTES, "big"), body], zmq.NOBLOCK)
            router.send_multipart([frames[0], MAGIC, following.to_bytes(NUMBER_BYTES, "big")], zmq.NOBLOCK)


class EventSubscriber:
    """Receives the chunk events of one publisher, in order.

    Args:
        address: where it publishes.
        replay_address: where it answers; None: what was missed is `Lost`.
        root: of the space to listen to; None for whatever it publishes.
        replay_timeout: seconds to wait for an answer.
    """

    def __init__(
        self,
        address: str,
        replay_address: str | None = None,
        *,
        root: bytes | None = None,
        replay_timeout: float = 2.0,
    ) -> None:
        self._reader = FeedReader()
        self._replay_timeout = replay_timeout
        self._context = zmq.Context()
        self._subscribed = self._context.socket(zmq.SUB)
        self._subscribed.rcvhwm = SEND_QUEUE
        self._subscribed.maxmsgsize = MAX_BATCH_BYTES
        self._subscribed.subscribe(b"xk2/" if root is None else topic_of(root))
        self._subscribed.connect(address)
        self._replay_address = replay_address
        self.unreadable = 0
        """Messages that were no batches."""

    def receive(self, timeout: float) -> list[ChunkEvent | Restarted | Lost]:
        """What has happened, waiting at most `timeout` seconds for something to happen.

        A gap is asked for at once; what cannot be had is `Lost`, and what was known before `Restarted` is void.
        """
        if not self._subscribed.poll(int(timeout * 1000)):
            return []
        out: list[ChunkEvent | Restarted | Lost] = []
        while True:
            try:
                frames = self._subscribed.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            out += self._take(frames[1:])
        if self._reader.missing is not None:
            out += self._replay()
        return out

    def catch_up(self) -> list[ChunkEvent | Restarted | Lost]:
        """Ask for all that is kept, without waiting for something to happen."""
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

    def _take(self, frames: Sequence[bytes]) -> list[ChunkEvent | Restarted | Lost]:
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

    def _replay(self) -> list[ChunkEvent | Restarted | Lost]:
        out: list[ChunkEvent | Restarted | Lost] = []
        if self._replay_address is not None:
            out += self._asked(self._replay_address)
        while self._reader.missing is not None:
            out += self._reader.give_up()
        return out

    def _asked(self, address: str) -> list[ChunkEvent | Restarted | Lost]:
        out: list[ChunkEvent | Restarted | Lost] = []
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.maxmsgsize = MAX_BATCH_BYTES
        try:
            dealer.connect(address)
            dealer.send_multipart([MAGIC, self._reader.next.to_bytes(NUMBER_BYTES, "big")])
            ends = time.monotonic() + self._replay_timeout
            while (rest := ends - time.monotonic()) > 0 and dealer.poll(int(rest * 1000) + 1):
                frames = dealer.recv_multipart()
                if frames[0] != MAGIC or len(frames) == 2:
                    break
                out += self._take(frames[1:])
        finally:
            dealer.close(linger=0)
        return out


def topic_of(root: bytes) -> bytes:
    """The topic of a space's events."""
    return b"xk2/" + root[:16].hex().encode()
