"""`CacheServer`: the sockets, the clock and the threads around a `CacheService`.

One loop owns the ROUTER socket, the service and all its state. It never blocks on a peer: sends do not wait, and a peer
whose queue is full loses that reply. Nor on disk or a slow tier: tasks run in worker threads and come back through a
wake-up socket. A ping is answered by this loop, so it says that the loop works, not that the process exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from protocol_v2.addresses import WANTED, checked_address
from protocol_v2.errors import LocalProtocolError
from protocol_v2.frames import payload_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from protocol_v2.frames import Frame
    from protocol_v2.jobs import Job
    from protocol_v2.service import CacheService

log = logging.getLogger(__name__)

MAX_MESSAGES_A_TURN: Final = 64
"""Messages taken from the socket before timers and finished work get their turn."""

SEND_QUEUE: Final = 1024
"""Messages that wait for one peer; what comes on top is dropped, and the peer's deadline tells it."""

ZMTP_HEARTBEAT_MS: Final = 5_000
ZMTP_HEARTBEAT_TIMEOUT_MS: Final = 15_000
COPY_BELOW: Final = 64 * 1024
"""Frames smaller than this are copied off the socket: a held zero-copy frame costs more than its bytes."""

ANSWER_SECONDS: Final = 1.0
"""How long a server that stops still answers, with errors, while work that was begun ends."""

LINGER_MS: Final = 200
"""How long what was answered may still be sent after that."""

IPC: Final = "ipc://"


class AddressInUseError(LocalProtocolError):
    """Another live server listens there."""


class CacheServer:
    """A cache server on one or more addresses, in a thread of its own.

    Args:
        listen: an address or several, ``ipc://PATH`` or ``tcp://HOST:PORT`` (port 0: one from the operating system).
        service: what answers; the server drives it and closes it.
        workers: threads for disk and slow tiers.

    Raises:
        LocalProtocolError: no address, or one of another kind.
    """

    def __init__(self, listen: str | Sequence[str], service: CacheService, *, workers: int = 4) -> None:
        self._wanted = checked_addresses(listen)
        self._service = service
        self._n_workers = workers
        self._addresses: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._finished: deque[Job] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._ended = False
        self._locks: list[tuple[int, str]] = []
        self._failure: BaseException | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, ports resolved; empty before `start`."""
        return self._addresses

    @property
    def address(self) -> str:
        """The first of them."""
        return self._addresses[0]

    def start(self) -> Self:
        """Bind and begin to answer. Where that fails everything is given back, the service closed included.

        Raises:
            AddressInUseError: another live server is there.
            OSError: the address cannot be bound.
        """
        if self._thread is not None or self._ended:
            raise LocalProtocolError("server: started twice; make another one")
        context = zmq.Context()
        try:
            router = self._bind(context)
        except BaseException:
            context.destroy(linger=0)
            self._end()
            raise
        self._thread = threading.Thread(target=self._run, args=(context, router), name="extra-keys-server", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Fail what is pending with `SHUTTING_DOWN`, let running work end, give everything back. Idempotent.

        Peers are answered for `ANSWER_SECONDS` and `LINGER_MS` at most, whatever they do; then their connections close.

        Args:
            timeout: seconds to wait for work that runs.

        Raises:
            RuntimeError: the loop had failed, or did not end in time.
        """
        self._stopping.set()
        self._wake()
        thread = self._thread
        if thread is None:
            self._end()
            return
        thread.join(timeout)
        if thread.is_alive():
            raise RuntimeError(f"server: work did not end within {timeout:.0f} s")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise RuntimeError("server: the loop failed") from failure

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the loop has ended, at most ``timeout`` seconds. Whether it has."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.sndhwm = SEND_QUEUE
        router.router_mandatory = True  # an answer to a peer that is gone is an error we count, not a silent drop
        router.heartbeat_ivl = ZMTP_HEARTBEAT_MS
        router.heartbeat_timeout = ZMTP_HEARTBEAT_TIMEOUT_MS
        router.maxmsgsize = self._service.max_frame_bytes
        bound = []
        for address in self._wanted:
            if address.startswith(IPC):
                self._lock_socket_file(address.removeprefix(IPC))
            try:
                router.bind(address)
            except zmq.ZMQError as error:
                kind = AddressInUseError if error.errno == zmq.EADDRINUSE else LocalProtocolError
                raise kind(f"{address}: cannot listen: {error.strerror}") from None
            bound.append(router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._addresses = tuple(bound)
        return router

    def _lock_socket_file(self, path: str) -> None:
        """Binding an ipc address takes it from whoever has it, so a lock beside it says if somebody lives there."""
        if path.startswith("@"):
            return
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise AddressInUseError(f"{IPC}{path}: another server listens there; stop it or choose another") from None
        self._locks.append((lock, path))

    def _release_locks(self) -> None:
        while self._locks:
            lock, path = self._locks.pop()
            Path(path).unlink(missing_ok=True)  # ours as long as the lock is
            os.close(lock)

    def _end(self) -> None:
        """Give back what the constructor and `start` took; once."""
        if not self._ended:
            self._ended = True
            self._service.close(time.monotonic())
            self._release_locks()
            self._wake_in.close()
            self._wake_out.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is under way already; closed: nobody is there to wake
            self._wake_out.send(b"\0")

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        executor = ThreadPoolExecutor(self._n_workers, thread_name_prefix="extra-keys-worker")
        try:
            self._loop(router, executor)
        except BaseException as error:
            log.exception("the loop of the server failed")
            self._failure = error
        finally:
            router.close(linger=LINGER_MS)
            context.term()
            executor.shutdown(wait=True, cancel_futures=False)
            self._finish_jobs(time.monotonic())
            self._end()

    def _loop(self, router: zmq.Socket[bytes], executor: ThreadPoolExecutor) -> None:
        service = self._service
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        ends = math.inf
        while True:
            now = time.monotonic()
            if ends == math.inf and self._stopping.is_set():
                ends = now + ANSWER_SECONDS
                service.begin_stop(now)
                self._flush(router)
            if ends < math.inf and (now >= ends or not service.busy):
                return
            wait = max(0.0, min(service.next_tick(now), ends) - now)
            ready = dict(poller.poll(int(wait * 1000) + 1))
            now = time.monotonic()
            if self._wake_in.fileno() in ready:
                self._drain_wake()
            self._finish_jobs(now)
            if router in ready:
                self._receive(router, now)
            service.tick(time.monotonic())
            self._begin_jobs(executor)
            self._flush(router)

    def _receive(self, router: zmq.Socket[bytes], now: float) -> None:
        for _ in range(MAX_MESSAGES_A_TURN):
            try:
                parts = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity, *rest = parts
            frames: list[Frame] = [part.bytes if len(part) < COPY_BELOW else part.buffer for part in rest]
            self._service.receive(identity.bytes, frames, now)

    def _begin_jobs(self, executor: ThreadPoolExecutor) -> None:
        for job in self._service.take_jobs():
            executor.submit(self._work, job)

    def _finish_jobs(self, now: float) -> None:
        while self._finished:
            self._service.finish(self._finished.popleft(), now)

    def _work(self, job: Job) -> None:
        """In a worker thread: the part of a task that blocks."""
        try:
            job.run()
        finally:
            self._finished.append(job)
            self._wake()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _flush(self, router: zmq.Socket[bytes]) -> None:
        for identity, frames in self._service.take_outgoing():
            try:
                self._send(router, identity, frames)
            except zmq.ZMQError as error:  # EAGAIN: its queue is full; EHOSTUNREACH: it is gone
                self._service.note_unsent(identity, error.errno or 0)

    def _send(self, router: zmq.Socket[bytes], identity: bytes, frames: list[Frame]) -> None:
        nbytes = payload_bytes(frames)
        if nbytes < COPY_BELOW:
            router.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
            return
        # frames leave in order, so the last one tells of all
        last = zmq.Frame(frames[-1], track=True, copy=False, copy_threshold=0)
        router.send_multipart([identity, *frames[:-1], last], zmq.NOBLOCK, copy=False)
        self._service.backlog.add(identity, last.tracker, nbytes)


def checked_addresses(listen: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses to listen on: one as a text is a list of one, never of its letters.

    Raises:
        LocalProtocolError: none, or one that is neither ``ipc://`` nor ``tcp://``.
    """
    addresses = (listen,) if isinstance(listen, str) else tuple(listen)
    if not addresses:
        raise LocalProtocolError(f"listen: no address; give {WANTED}")
    return tuple(checked_address(address, "listen") for address in addresses)
