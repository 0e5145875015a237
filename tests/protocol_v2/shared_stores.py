"""A shared store for tests, with faults, and threads that run when a test says so."""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.store import MemoryStore

from protocol_v2.tiers.base import TierError, TierIOError
from protocol_v2.tiers.object_store import ObjectStore
from protocol_v2.tiers.remote import RemoteTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.storage import ObjectId

T = TypeVar("T")


class FaultyStore(ObjectStore):
    """A bucket in memory that can be away, and whose contents a test can reach.

    Attributes:
        fault: what every call raises; None for none.
        calls: names of the calls that were made.
    """

    def __init__(self, bucket: MemoryStore | None = None) -> None:
        self.bucket = bucket or MemoryStore()
        super().__init__(self.bucket, "memory")
        self.fault: TierError | None = None
        self.calls: list[str] = []

    def go_away(self) -> None:
        """Nothing answers from now on."""
        self.fault = TierIOError("away")

    def come_back(self) -> None:
        """It answers again."""
        self.fault = None

    def content(self, one: ObjectId) -> bytes | None:
        """What is under an object's name."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(obstore.get(self.bucket, str(one.name)).bytes())
        return None

    def spoil(self, name: ObjectId | str, content: bytes) -> None:
        """Put other bytes under a name."""
        obstore.put(self.bucket, name if isinstance(name, str) else str(name.name), content)

    def evict(self, one: ObjectId) -> None:
        """The store lets an object go."""
        obstore.delete(self.bucket, str(one.name))

    def paths(self) -> list[str]:
        """All names."""
        return sorted(one["path"] for page in obstore.list(self.bucket) for one in page)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """As the bucket."""
        self._begin("sizes")
        return super().sizes(names)

    def read(self, names: Sequence[str]) -> list[bytes | memoryview | None]:
        """As the bucket."""
        self._begin("read")
        return super().read(names)

    def write(self, name: str, parts: Sequence[bytes | memoryview], *, once: bool = False) -> None:
        """As the bucket."""
        self._begin("write")
        super().write(name, parts, once=once)

    def ping(self) -> None:
        """As the bucket."""
        self._begin("ping")
        super().ping()

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        if self.fault is not None:
            raise self.fault


def remote_tier(store: FaultyStore, clock: Callable[[], float]) -> RemoteTier:
    """A tier over it, on a clock of the test's."""
    return RemoteTier(store, "memory://", clock=clock)


class LaterExecutor(Executor):
    """Runs what was submitted when the test says so, in the order or out of it.

    Attributes:
        waiting: what was submitted and not run yet.
        at_once: run everything when it is submitted.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.at_once = at_once

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Keep it for later."""
        future: Future[T] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        if self.at_once:
            self.run()
        return future

    def run(self, place: int | None = None) -> None:
        """Run one that waits, or all of them, those that are submitted meanwhile included."""
        while self.waiting:
            future, call = self.waiting.pop(0 if place is None else place)
            future.set_result(call())
            if place is not None:
                return

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What waits is run, or cancelled."""
        if cancel_futures:
            self.waiting.clear()
        self.run()
