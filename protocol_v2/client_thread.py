"""The socket, the clock and the one thread of a client: carries out what a `SessionKeeper` asks for.

The thread owns the DEALER socket, its monitor and the keeper; callers hand requests over and wait on futures. Nothing
in it blocks: sends do not wait, and the socket does not reconnect by itself (the keeper opens a new one, asks and says
hello). Closing drops what is unsent.

A payload is sent from the caller's own memory. A request that has one and fails does not end for its caller before
libzmq has let go of that memory: if it is still in a queue, the socket is closed first. So when a call returns, for
whatever reason, the caller may reuse its buffers, and no byte written later is ever stored under the request's keys.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol_v2.addresses import checked_address
from protocol_v2.errors import (
    ClientClosedError,
    ProtocolError,
    ServerUnavailableError,
)
from protocol_v2.keeper_actions import CloseSocket, Finish, OpenSocket, Phase, PhaseChanged, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.client_sharing import ClientSharing
    from protocol_v2.events import ReplyReceived
    from protocol_v2.frames import Frame
    from protocol_v2.hello import Limits
    from protocol_v2.keeper_actions import Action
    from protocol_v2.messages import Request
    from protocol_v2.session_keeper import SessionKeeper
    from protocol_v2.wire_keys import Keys

log = logging.getLogger(__name__)

Outcome: TypeAlias = "ReplyReceived | ProtocolError"

SEND_QUEUE: Final = 1024
"""Messages that wait in the socket; one more fails its request at once."""

MAX_MESSAGES_A_TURN: Final = 64
MAX_WAIT_MS: Final = 1_000
ZMTP_HEARTBEAT_MS: Final = 5_000
CLOSE_SECONDS: Final = 1.5
RELEASE_SECONDS: Final = 1.0
"""How long to wait for libzmq to let go of a payload after its socket was closed; it takes milliseconds."""

ATTACH_SECONDS: Final = 5.0

_CONNECTED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED
_GONE: Final = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(slots=True)
class _Job:
    """A request on its way through the thread."""

    message: Request
    payload: tuple[Frame, ...]
    timeout: float
    keys: Keys | None
    future: Future[Outcome]
    tracker: zmq.MessageTracker | None = None


class ClientThread:
    """Runs a keeper against one address.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`.
        keeper: of this thread alone from now on; others may read its plain properties.
        max_frame_bytes: a larger frame ends the connection before it is read.
        sharing: attached to each session that agrees on shared memory; None for none.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        keeper: SessionKeeper,
        *,
        max_frame_bytes: int,
        sharing: ClientSharing | None = None,
    ) -> None:
        self.address = one_address(address)
        self.keeper = keeper
        self._sharing = sharing
        self._max_frame_bytes = max_frame_bytes
        self._pid = os.getpid()
        self._tickets = itertools.count()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._jobs: dict[int, _Job] = {}
        self._watchers: list[Future[None]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._ended = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._dealer: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="extra-keys-client", daemon=True)
        self._thread.start()

    # ---- for any thread

    def submit(
        self, message: Request, payload: tuple[Frame, ...], timeout: float, *, keys: Keys | None = None
    ) -> tuple[int, Future[Outcome]]:
        """Hand a request over; arguments as in `SendRequest`.

        Returns:
            A ticket for `cancel`, and the future of its outcome, which ends at most a moment after `timeout`.

        Raises:
            ClientClosedError: closed, or in a process that did not make this client.
        """
        self.check_usable()
        ticket = next(self._tickets)
        job = _Job(message, payload, timeout, keys, Future())
        self._post(lambda now: self._take(ticket, job, now))
        return ticket, job.future

    def cancel(self, ticket: int) -> None:
        """Nobody waits for a request any more; its future ends at once."""
        with contextlib.suppress(ClientClosedError):
            self.check_usable()
            self._post(lambda _now: self.keeper.cancel(ticket))

    @property
    def is_settled(self) -> bool:
        """Whether there is a session, or a reason why there is none."""
        return self.keeper.phase in {Phase.UP, Phase.CLOSED} or self.keeper.failure is not None

    def limits(self) -> Limits:
        """What the server holds requests to.

        Raises:
            ProtocolError: why there is no session.
        """
        self.check_usable()
        limits, failure = self.keeper.limits, self.keeper.failure
        if limits is None:
            raise failure or ServerUnavailableError("the session was lost just now")
        return limits

    def when_settled(self) -> Future[None]:
        """A future that ends as soon as there is a session, or a reason why there is none."""
        self.check_usable()
        future: Future[None] = Future()
        self._post(lambda _now: self._add_watcher(future))
        return future

    def close(self) -> None:
        """End everything at once; in less than two seconds whatever the server does. Idempotent, from any thread.

        In a process that did not make this client it only lets go of it: sockets and thread belong to the parent.
        """
        if self._pid != os.getpid():
            self._closing = True
            return
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def check_usable(self) -> None:
        """Raise `ClientClosedError` if this client cannot be used (any more, or here)."""
        if self._pid != os.getpid():
            raise ClientClosedError("this client was made in another process; make a new one after a fork")
        if self._closing or not self._thread.is_alive():
            raise ClientClosedError("the client was closed; make another")

    def _post(self, what: Callable[[float], None]) -> None:
        with self._lock:
            if self._ended:
                raise ClientClosedError("the client was closed; make another")
            self._inbox.append(what)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is under way already; closed: nobody is there to wake
            self._wake_out.send(b"\0")

    # ---- in the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            log.exception("the client's thread failed; every request of it fails")
        finally:
            self._closing = True
            self.keeper.close()
            self._act(time.monotonic())
            self._close_socket()
            with self._lock:
                self._ended = True
            self._end_rest()
            if self._sharing is not None:
                self._sharing.close()
            self._context.destroy(linger=0)
            self._wake_in.close()
            self._wake_out.close()

    def _turn(self) -> None:
        now = time.monotonic()
        self.keeper.tick(now)
        self._act(now)
        wait = min(max(0.0, self.keeper.next_tick() - now) * 1000 + 1, MAX_WAIT_MS)
        ready = dict(self._poller.poll(0 if self._inbox else int(wait)))
        now = time.monotonic()
        if self._wake_in.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while len(self._wake_in.recv(4096)) == 4096:
                    pass
        while self._inbox:
            self._inbox.popleft()(now)
        self._act(now)
        if self._dealer is not None and self._dealer in ready:
            self._receive(self._dealer, now)
        if self._monitor is not None and self._monitor in ready:
            self._watch(self._monitor, now)

    def _take(self, ticket: int, job: _Job, now: float) -> None:
        self._jobs[ticket] = job
        self.keeper.submit(ticket, job.message, job.payload, job.timeout, now, keys=job.keys)

    def _add_watcher(self, future: Future[None]) -> None:
        self._watchers.append(future)
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        if self.is_settled:
            watchers, self._watchers = self._watchers, []
            for future in watchers:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    def _receive(self, dealer: zmq.Socket[bytes], now: float) -> None:
        for _ in range(MAX_MESSAGES_A_TURN):
            if dealer is not self._dealer:
                return
            try:
                parts = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:  # EAGAIN: all read
                return
            self.keeper.received([part.buffer for part in parts], now)
            self._act(now)

    def _watch(self, monitor: zmq.Socket[bytes], now: float) -> None:
        while monitor is self._monitor and monitor.poll(0):
            happened = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
            if happened & _CONNECTED:
                self.keeper.connected(now)
            elif happened & _GONE:
                self.keeper.disconnected(_event_name(happened), now)
            self._act(now)

    def _act(self, now: float) -> None:
        """Carry out what the keeper asks for, and what follows from that."""
        while actions := self.keeper.take_actions():
            for action in actions:
                self._do(action, now)

    def _do(self, action: Action, now: float) -> None:
        match action:
            case Send():
                self._send(action, now)
            case Finish():
                self._finish(action.ticket, action.outcome, now)
            case OpenSocket():
                self._open_socket(now)
            case CloseSocket():
                self._close_socket()
            case PhaseChanged():
                self._tell_watchers()
                if self._sharing is not None:
                    self._share(self._sharing, now)

    def _share(self, sharing: ClientSharing, now: float) -> None:
        """Another session, or none: ask for shared memory where it was agreed on."""
        sharing.detach()
        if self.keeper.shares:
            job = _Job(sharing.attach_request(), (), ATTACH_SECONDS, None, Future())
            job.future.add_done_callback(sharing.attached)
            self._take(next(self._tickets), job, now)

    def _send(self, action: Send, now: float) -> None:
        if self._dealer is None:  # closed by an action before this one: its requests have ended already
            return
        job = None if action.ticket is None else self._jobs.get(action.ticket)
        zero_copy = job is not None and bool(job.payload)
        try:
            tracker = self._dealer.send_multipart(action.frames, zmq.NOBLOCK, copy=not zero_copy, track=zero_copy)
        except zmq.ZMQError:  # EAGAIN: the queue is full, or the connection has just gone
            self.keeper.unsent(action.ticket, now)
            return
        if job is not None and zero_copy:
            job.tracker = tracker

    def _finish(self, ticket: int, outcome: Outcome, now: float) -> None:
        job = self._jobs.get(ticket)
        if job is None:
            return
        if isinstance(outcome, ProtocolError) and job.tracker is not None and not job.tracker.done:
            self.keeper.disconnected("a request failed while its payload was still being sent", now)
            self._close_socket()
            self._wait_released(job.tracker)
        del self._jobs[ticket]
        if job.future.set_running_or_notify_cancel():
            job.future.set_result(outcome)

    def _wait_released(self, tracker: zmq.MessageTracker) -> None:
        try:
            tracker.wait(RELEASE_SECONDS)
        except zmq.NotDone:
            log.exception("libzmq still holds a payload %.0f s after its socket was closed", RELEASE_SECONDS)

    def _open_socket(self, now: float) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.immediate = True
        dealer.reconnect_ivl = -1
        dealer.sndhwm = SEND_QUEUE
        dealer.maxmsgsize = self._max_frame_bytes
        dealer.connect_timeout = dealer.handshake_ivl = 5_000  # a backstop; the keeper gives up sooner
        dealer.heartbeat_ivl = ZMTP_HEARTBEAT_MS
        dealer.heartbeat_timeout = 3 * ZMTP_HEARTBEAT_MS
        monitor = dealer.get_monitor_socket(_CONNECTED | _GONE)
        self._dealer, self._monitor = dealer, monitor
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        try:
            dealer.connect(self.address)
        except zmq.ZMQError as error:
            self.keeper.disconnected(f"cannot connect: {error.strerror}", now)

    def _close_socket(self) -> None:
        dealer, monitor, self._dealer, self._monitor = self._dealer, self._monitor, None, None
        if dealer is None or monitor is None:
            return
        self._poller.unregister(dealer)
        self._poller.unregister(monitor)
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)

    def _end_rest(self) -> None:
        """No future is left open, whatever happened."""
        while self._inbox:
            with contextlib.suppress(ProtocolError):
                self._inbox.popleft()(time.monotonic())
        self._act(time.monotonic())
        for ticket in list(self._jobs):
            self._finish(ticket, ClientClosedError("the client was closed"), time.monotonic())


def one_address(address: str | Sequence[str]) -> str:
    """The address of a server; a sequence of one is that one, and no text is taken letter by letter.

    Raises:
        LocalTypeError: neither a text nor a sequence of one.
        LocalProtocolError: neither `ipc://` nor `tcp://`.
    """
    if isinstance(address, list | tuple) and len(address) == 1:
        address = address[0]
    return checked_address(address, "address")


def _event_name(happened: int) -> str:
    return (zmq.Event(happened).name or str(happened)).lower().replace("_", " ")


def chance() -> float:
    """Jitter for the keeper's backoff."""
    return random.random()  # noqa: S311  (spreads reconnects; nothing secret)
