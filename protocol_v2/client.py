"""`CacheClient`: the synchronous client, for connectors, whose scheduler is synchronous.

Thread-safe: any thread may call it, calls run side by side, each waits for its own reply. One background thread owns
the socket (`client_thread.py`). No call waits longer than its timeout and a moment.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from protocol_v2 import operations
from protocol_v2.client_sharing import make_sharing
from protocol_v2.client_thread import ClientThread, chance
from protocol_v2.errors import LocalProtocolError, ProtocolError, RequestTimeoutError
from protocol_v2.negotiation import ClientTerms, Offer
from protocol_v2.operations import Ask, AwaitLimits, Begin, Begun, Collect, Did, Do
from protocol_v2.session_keeper import Patience, SessionKeeper
from protocol_v2.tensors import empty_torch, to_torch
from protocol_v2.versions import SHARED_MEMORY
from protocol_v2.wire_keys import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from types import TracebackType
    from typing import Self

    from keying import KeySpace
    from protocol_v2.client_thread import Outcome
    from protocol_v2.events import Established
    from protocol_v2.foreign import ForeignPolicy
    from protocol_v2.frames import Frame
    from protocol_v2.hello import Limits
    from protocol_v2.keeper_actions import Phase
    from protocol_v2.messages import PingReply
    from protocol_v2.operations import Answer, KeysLike, Operation, Step
    from protocol_v2.results import (
        ClearResult,
        EndSessionResult,
        LookupResult,
        PrefetchResult,
        ReleaseResult,
        RetrieveResult,
        StoreResult,
    )
    from protocol_v2.session_keeper import KeeperCounters
    from protocol_v2.tensors import TensorMeta

R = TypeVar("R")

DEFAULT_TIMEOUT: Final = 10.0
MAX_FRAME_BYTES: Final = (1 << 30) + (16 << 20)
"""A gibibyte of payload in one frame, which is the default limit of a server, and room for a header."""

SHARED_MEMORY_BYTES: Final = 256 << 20

GRACE: Final = 2.0
"""Seconds beyond a timeout in which the background thread ends a request; only a hung process needs more."""

WHOLE: Final = Shard()
"""The only shard of a world of one."""


class ClientBase:
    """What the synchronous and the asyncio client share.

    Connects in the background, at once and again after every loss. While there is no session, lookups miss, and nothing
    stalls: see `session_keeper.py` for when a call waits and when it fails at once. Results that come from no cache
    say so in `failure`.

    A client belongs to the process that made it; after a fork every call raises `ClientClosedError`.

    Args:
        address: ``ipc://PATH`` or ``tcp://HOST:PORT``.
        space: what the keys are derived in; None for tools that send no keys.
        offer: what to offer and what to accept; None: what this code can, and nothing below schema 2.
        role: a label for people.
        software: likewise.
        timeout: seconds that a call takes at most, where it does not say otherwise.
        patience: how long to wait for what while connecting.
        on_foreign: asked for a tunnel when the server does not know ``extra_keys/2``; None bypasses such servers.
        max_pending: requests that may be unanswered at a time.
        max_frame_bytes: a larger frame from the server ends the connection.
        shared_memory: bytes that this client may share with a server on the same host, and as many again to receive;
            used as far as needed. 0 sends everything through the socket.

    Raises:
        LocalProtocolError: an address or another value that cannot be.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        space: KeySpace | None = None,
        *,
        offer: Offer | None = None,
        role: str = "client",
        software: str = "",
        timeout: float = DEFAULT_TIMEOUT,
        patience: Patience | None = None,
        on_foreign: ForeignPolicy | None = None,
        max_pending: int = 1024,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        shared_memory: int = SHARED_MEMORY_BYTES,
    ) -> None:
        self.space = space
        self.timeout = checked_timeout(timeout)
        patience = patience or Patience()
        offer = offer or Offer()
        self.sharing = make_sharing(shared_memory)
        if self.sharing is not None:
            offer = replace(offer, features=offer.features | {SHARED_MEMORY})
        self.offer = offer
        """What is offered, with what this client adds for itself."""
        terms = ClientTerms(
            os.urandom(16),
            space,
            offer,
            role=role,
            software=software,
            hello_timeout=patience.answer,
            max_pending=max_pending,
        )
        keeper = SessionKeeper(terms, patience=patience, chance=chance, on_foreign=on_foreign)
        self._thread = ClientThread(address, keeper, max_frame_bytes=max_frame_bytes, sharing=self.sharing)

    @property
    def phase(self) -> Phase:
        """How far we are with the server."""
        return self._thread.keeper.phase

    @property
    def failure(self) -> ProtocolError | None:
        """Why there is no session; None while one stands or the first attempt is under way."""
        return self._thread.keeper.failure

    @property
    def established(self) -> Established | None:
        """What the last welcome said."""
        return self._thread.keeper.established

    @property
    def capabilities(self) -> frozenset[str] | None:
        """What the server last listed when it was asked for its capabilities; None before it answered."""
        return self._thread.keeper.capabilities

    @property
    def counters(self) -> KeeperCounters:
        """What has happened so far; changes while it is looked at."""
        return self._thread.keeper.counters

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return self._thread.keeper.pending

    def staging(self, metas: Sequence[TensorMeta]) -> tuple[Any, ...]:
        """Uninitialised CPU torch tensors for one chunk, to be filled and then stored.

        They lie where the server can read them, so that filling them is the only copy on this side; where there is no
        shared memory, or no room in it, they are ordinary tensors. Either way they may be written to again when `store`
        has returned.

        Args:
            metas: element type and shape of each.
        """
        return empty_torch(metas, (lambda _: None) if self.sharing is None else self.sharing.memory)


class CacheClient(ClientBase):
    """The synchronous client of one server; see `ClientBase` for how it is made."""

    # ---- the session

    def wait_ready(self, timeout: float | None = None) -> Established | None:
        """Wait for a session.

        Returns:
            What the welcome said; None for a session through a tunnel.

        Raises:
            ProtocolError: why there is none (yet): `SpaceMismatchError`, `NegotiationRefusedError`,
                `UnsupportedServerError`, `ServerUnavailableError`, or `RequestTimeoutError`.
        """
        self._limits(checked_timeout(self.timeout if timeout is None else timeout))
        return self._thread.keeper.established

    def close(self) -> None:
        """End at once; what is pending fails. In under two seconds whatever the server does. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- chunks

    def lookup(
        self,
        session: str,
        keys: KeysLike,
        *,
        world: int = 1,
        groups: int = 1,
        lease: bool = True,
        timeout: float | None = None,
    ) -> LookupResult:
        """How many leading chunks does every shard hold?

        Args:
            session: the engine's request, 1 to 256 characters; bound to one identity by its first keyed call.
            keys: chunk keys or digests of the prompt, from the first chunk on; or `Keys` of tokens and extra keys.
            world: shards that a value has in each KV group.
            groups: KV groups.
            lease: keep the hit for a retrieve.
            timeout: seconds.

        Raises:
            ServerError: the identity is not the session's, or is none.
            LocalProtocolError: a value that cannot be sent.
            ClientClosedError: closed, or after a fork.
        """
        return self._run(
            operations.lookup(session=session, keys=keys, world=world, groups=groups, lease=lease), timeout
        )

    def retrieve(
        self,
        lease: bytes,
        count: int,
        *,
        first: int = 0,
        shard: Shard = WHOLE,
        make: Callable[[TensorMeta, Frame], Any] | None = None,
        keys: KeysLike | None = None,
        timeout: float | None = None,
    ) -> RetrieveResult:
        """Tensors of the chunks [first, first + count) of a lease.

        Args:
            lease: of a lookup.
            count: chunks, at least 1.
            first: the first of them.
            shard: whose tensors.
            make: what to make of a description and a frame, such as `to_numpy`; None: torch tensors over the received
                memory.
            keys: of the lease's chunks, from the prompt's first on, at least as far as the range. A server of this
                protocol knows them; a tunnel to one that has no leases needs them where the lookup was another
                process's.
            timeout: seconds.

        Raises:
            as `lookup`.
        """
        make = make or partial(to_torch, share_read_only=True)
        return self._run(
            operations.retrieve(
                lease=lease, first=first, count=count, shard=shard, make=make, keys=keys, sharing=self.sharing
            ),
            timeout,
        )

    def store(
        self,
        session: str,
        keys: KeysLike,
        tensors: Sequence[Any],
        *,
        first: int = 0,
        shard: Shard = WHOLE,
        places: Sequence[tuple[int, int]] | None = None,
        timeout: float | None = None,
    ) -> StoreResult:
        """Store one shard's tensors of the chunks [first, first + len(tensors)).

        Contiguous CPU tensors are sent from their own memory: they must not change until this returns. When it has
        returned, for whatever reason, they may.

        Args:
            session: as in `lookup`.
            keys: as in `lookup`, at least as far as the last chunk stored.
            tensors: for each chunk a tensor or a list of tensors.
            first: index of the first chunk that is stored.
            shard: whose tensors these are.
            places: (start, tokens) of each chunk; None: those of the chunk keys, else of full chunks.
            timeout: seconds.

        Raises:
            TensorError: something that does not travel.
            ServerError, LocalProtocolError, ClientClosedError: as `lookup`.
        """
        return self._run(
            operations.store(
                session=session,
                keys=keys,
                tensors=tensors,
                first=first,
                shard=shard,
                places=places,
                space=self.space,
                sharing=self.sharing,
            ),
            timeout,
        )

    def prefetch(
        self, session: str, keys: KeysLike, *, world: int = 1, groups: int = 1, timeout: float | None = None
    ) -> PrefetchResult:
        """Bring chunks from slower tiers into memory, without waiting for them. Arguments as in `lookup`."""
        return self._run(operations.prefetch(session=session, keys=keys, world=world, groups=groups), timeout)

    def release(
        self, lease: bytes, *, first: int = 0, count: int | None = None, timeout: float | None = None
    ) -> ReleaseResult:
        """Give back the chunks [first, first + count) of a lease, all from `first` on without a count. Idempotent."""
        return self._run(operations.release(lease=lease, first=first, count=count), timeout)

    def end_session(self, session: str, *, timeout: float | None = None) -> EndSessionResult:
        """The engine's request is over: its session and leases end. Idempotent."""
        return self._run(operations.end_session(session=session), timeout)

    # ---- the server

    def ping(self, *, timeout: float | None = None) -> PingReply:
        """Is the loop alive that does the work? Raises `ProtocolError` if no answer comes."""
        return self._run(operations.ping(), timeout)

    def status(self, *, timeout: float | None = None) -> dict[str, int | float | str | bool | None]:
        """The server's facts by dotted name. Raises `ProtocolError` if no answer comes."""
        return self._run(operations.status(), timeout)

    def clear(self, scope: str, *, timeout: float | None = None) -> ClearResult:
        """Forget entries that are not leased: of the space (``space``) or all (``all``). Raises as `ping`."""
        return self._run(operations.clear(scope=scope), timeout)

    # ---- running operations

    def _run(self, operation: Operation[R], timeout: float | None) -> R:
        ends = time.monotonic() + checked_timeout(self.timeout if timeout is None else timeout)
        self._thread.check_usable()
        begun: set[int] = set()
        try:
            step = next(operation)
            while True:
                step = operation.send(self._answer(step, ends - time.monotonic(), begun))
        except StopIteration as done:
            result: R = done.value
            return result
        finally:
            operation.close()  # what it announced in shared memory is withdrawn before anything else happens
            for ticket in begun:
                self._thread.cancel(ticket)

    def _answer(self, step: Step, rest: float, begun: set[int]) -> Answer:
        match step:
            case Collect():
                ticket, future = step.begun.handle
                begun.discard(ticket)
                return self._wait(ticket, future, rest)
            case _ if rest <= 0:
                return RequestTimeoutError("the time of the whole call is over")
            case AwaitLimits():
                return self._limits_or_error(rest)
            case Ask():
                return self._wait(*self._submit(step, rest), rest, wait_released=bool(step.payload))
            case Begin():
                ticket, future = self._submit(step.ask, rest)
                begun.add(ticket)
                return Begun((ticket, future))
            case Do():
                return done_work(step)

    def _submit(self, step: Ask, timeout: float) -> tuple[int, Future[Outcome]]:
        return self._thread.submit(step.message, step.payload, timeout, keys=step.keys)

    def _wait(self, ticket: int, future: Future[Outcome], timeout: float, *, wait_released: bool = False) -> Answer:
        try:
            return future.result(max(0.0, timeout) + GRACE)
        except FutureTimeoutError:
            self._thread.cancel(ticket)
            return RequestTimeoutError("the client's own thread did not answer in time")
        except BaseException:  # interrupted: the payload's memory is the caller's again when the thread let go of it
            self._thread.cancel(ticket)
            if wait_released:
                wait([future], GRACE)
            raise

    def _limits_or_error(self, timeout: float) -> Limits | ProtocolError:
        try:
            return self._limits(timeout)
        except ProtocolError as error:
            return error

    def _limits(self, timeout: float) -> Limits:
        if not self._thread.is_settled:
            try:
                self._thread.when_settled().result(timeout)
            except FutureTimeoutError:
                raise RequestTimeoutError("no session before the deadline") from None
        return self._thread.limits()


def done_work(step: Do) -> Answer:
    """Run the work of a step."""
    try:
        return Did(step.work())
    except ProtocolError as error:
        return error


def checked_timeout(timeout: float) -> float:
    """Seconds that a call may take.

    Raises:
        LocalProtocolError: not a number above 0, or endless.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise LocalProtocolError(f"timeout: got {timeout!r}, wanted a number of seconds above 0")
    return float(timeout)
