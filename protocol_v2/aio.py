"""`AsyncCacheClient`: the same client for asyncio.

It runs the same operations over the same background thread as `CacheClient`; awaiting never blocks the event loop, and
one client may be used from several loops. Arguments, results and errors are those of `CacheClient`.
"""

# ruff: noqa: ASYNC109  (timeouts are arguments here as in the synchronous client: a request carries its deadline)

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from protocol_v2 import operations
from protocol_v2.client import GRACE, WHOLE, ClientBase, checked_timeout, done_work
from protocol_v2.errors import ProtocolError, RequestTimeoutError
from protocol_v2.operations import Ask, AwaitLimits, Begin, Begun, Collect, Do
from protocol_v2.tensors import to_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from types import TracebackType
    from typing import Self

    from protocol_v2.client_thread import Outcome
    from protocol_v2.events import Established
    from protocol_v2.frames import Frame
    from protocol_v2.hello import Limits
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
    from protocol_v2.tensors import TensorMeta
    from protocol_v2.wire_keys import Shard

R = TypeVar("R")


class AsyncCacheClient(ClientBase):
    """See `CacheClient`; every call is awaited."""

    async def wait_ready(self, timeout: float | None = None) -> Established | None:
        """See `CacheClient.wait_ready`."""
        await self._limits(checked_timeout(self.timeout if timeout is None else timeout))
        return self._thread.keeper.established

    async def close(self) -> None:
        """See `CacheClient.close`."""
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def lookup(
        self,
        session: str,
        keys: KeysLike,
        *,
        world: int = 1,
        groups: int = 1,
        lease: bool = True,
        timeout: float | None = None,
    ) -> LookupResult:
        """See `CacheClient.lookup`."""
        return await self._run(
            operations.lookup(session=session, keys=keys, world=world, groups=groups, lease=lease), timeout
        )

    async def retrieve(
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
        """See `CacheClient.retrieve`."""
        make = make or partial(to_torch, share_read_only=True)
        return await self._run(
            operations.retrieve(
                lease=lease, first=first, count=count, shard=shard, make=make, keys=keys, sharing=self.sharing
            ),
            timeout,
        )

    async def store(
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
        """See `CacheClient.store`. Cancelled, it still returns only when the tensors may change again."""
        return await self._run(
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

    async def prefetch(
        self,
        session: str,
        keys: KeysLike,
        *,
        world: int = 1,
        groups: int = 1,
        timeout: float | None = None,
    ) -> PrefetchResult:
        """See `CacheClient.prefetch`."""
        return await self._run(operations.prefetch(session=session, keys=keys, world=world, groups=groups), timeout)

    async def release(
        self,
        lease: bytes,
        *,
        first: int = 0,
        count: int | None = None,
        timeout: float | None = None,
    ) -> ReleaseResult:
        """See `CacheClient.release`."""
        return await self._run(operations.release(lease=lease, first=first, count=count), timeout)

    async def end_session(self, session: str, *, timeout: float | None = None) -> EndSessionResult:
        """See `CacheClient.end_session`."""
        return await self._run(operations.end_session(session=session), timeout)

    async def ping(self, *, timeout: float | None = None) -> PingReply:
        """See `CacheClient.ping`."""
        return await self._run(operations.ping(), timeout)

    async def status(self, *, timeout: float | None = None) -> dict[str, int | float | str | bool | None]:
        """See `CacheClient.status`."""
        return await self._run(operations.status(), timeout)

    async def clear(self, scope: str, *, timeout: float | None = None) -> ClearResult:
        """See `CacheClient.clear`."""
        return await self._run(operations.clear(scope=scope), timeout)

    async def _run(self, operation: Operation[R], timeout: float | None) -> R:
        ends = time.monotonic() + checked_timeout(self.timeout if timeout is None else timeout)
        self._thread.check_usable()
        begun: set[int] = set()
        try:
            step = next(operation)
            while True:
                step = operation.send(await self._answer(step, ends - time.monotonic(), begun))
        except StopIteration as done:
            result: R = done.value
            return result
        finally:
            operation.close()  # what it announced in shared memory is withdrawn before anything else happens
            for ticket in begun:
                self._thread.cancel(ticket)

    async def _answer(self, step: Step, rest: float, begun: set[int]) -> Answer:
        match step:
            case Collect():
                ticket, future = step.begun.handle
                begun.discard(ticket)
                return await self._wait(ticket, future, rest)
            case _ if rest <= 0:
                return RequestTimeoutError("the time of the whole call is over")
            case AwaitLimits():
                return await self._limits_or_error(rest)
            case Ask():
                return await self._wait(*self._submit(step, rest), rest, wait_released=bool(step.payload))
            case Begin():
                ticket, future = self._submit(step.ask, rest)
                begun.add(ticket)
                return Begun((ticket, future))
            case Do():
                return await asyncio.shield(asyncio.to_thread(done_work, step))

    def _submit(self, step: Ask, timeout: float) -> tuple[int, Future[Outcome]]:
        return self._thread.submit(step.message, step.payload, timeout, keys=step.keys)

    async def _wait(
        self, ticket: int, future: Future[Outcome], timeout: float, *, wait_released: bool = False
    ) -> Answer:
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), max(0.0, timeout) + GRACE)
        except TimeoutError:
            self._thread.cancel(ticket)
            return RequestTimeoutError("the client's own thread did not answer in time")
        except asyncio.CancelledError:
            self._thread.cancel(ticket)
            if wait_released:  # its memory is the caller's again only when the thread has let go of it
                await asyncio.wait([waiting], timeout=GRACE)
            raise

    async def _limits_or_error(self, timeout: float) -> Limits | ProtocolError:
        try:
            return await self._limits(timeout)
        except ProtocolError as error:
            return error

    async def _limits(self, timeout: float) -> Limits:
        if not self._thread.is_settled:
            try:
                await asyncio.wait_for(asyncio.wrap_future(self._thread.when_settled()), timeout)
            except TimeoutError:
                raise RequestTimeoutError("no session before the deadline") from None
        return self._thread.limits()
