"""`RemoteTier`: objects in a store that many servers share, such as Redis or a bucket. Slow, and allowed to be away.

The tier gives names and bytes to a `SharedStore` and verifies what comes back exactly as the disk tier does. A shared
store has its own rules about what stays: objects may go at any time, and come from servers that nobody here knows.

*Set aside.* Bytes that fail their checks are renamed in the store from ``xk2/...`` to ``xk2.quarantine/<reason>/...``,
if they are still the ones that were read; so no server meets them twice, and they can be looked at. Where the store
does not let us, the name is *stuck*: absent for this server, for ten minutes or until it writes it anew itself.

Calls block, each for a bounded time, and are thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from protocol_v2.codes import MissReason
from protocol_v2.storage.descriptions import format_description
from protocol_v2.storage.envelope import encode_header, encoded_size, open_object
from protocol_v2.storage.errors import EnvelopeError, ObjectMissError, StorageValueError
from protocol_v2.storage.names import SCHEMA_FOLDER, description_name, parse_name
from protocol_v2.tiers.base import TierError, TierFullError, TierUsage
from protocol_v2.tiers.layout import QUARANTINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from keying import KeySpace
    from protocol_v2.codes import MissReason as Reason
    from protocol_v2.storage.names import ObjectId, ObjectName
    from protocol_v2.storage.objects import StoredObject

STUCK_SECONDS: Final = 600.0
MAX_STUCK: Final = 65_536
"""Names that are remembered as stuck."""


class SharedStore(Protocol):
    """Bytes by name, somewhere else. Every call ends within a bounded time and raises nothing but `TierError`.

    Attributes:
        kind: what it is, in one word, such as ``redis``.
        batch: names that one call handles at about the cost of one.
        max_value: bytes of the largest value that it takes.
    """

    kind: str
    batch: int
    max_value: int

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Bytes under each name; None where there is nothing that could be an object. Counts as a use of it."""

    def read(self, names: Sequence[str]) -> list[bytes | memoryview | None]:
        """What is under each name; None where there is nothing that could be an object."""

    def write(self, name: str, parts: Sequence[bytes | memoryview], *, once: bool = False) -> None:
        """Put parts, back to back, under a name: whole or not at all.

        Args:
            name: what was there goes.
            parts: the value.
            once: leave what is there, and let it stay for good: for descriptions.
        """

    def move(self, name: str, target: str, content: bytes | memoryview) -> None:
        """Give a value another name, if it still is this content. It may be gone or replaced meanwhile."""

    def remove(self, name: str) -> bool:
        """Remove a value; whether there was one."""

    def listing(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Names that begin with a prefix, and their bytes, in any order."""

    def ping(self) -> None:
        """Ask whether it is there."""

    def close(self) -> None:
        """Give back connections."""


class RemoteTier:
    """Objects in a shared store.

    Args:
        store: keeps the bytes.
        address: where that is, for people; without user, password and options.
        clock: seconds, monotonic.
    """

    name = "remote"

    def __init__(self, store: SharedStore, address: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._store = store
        self.clock = clock
        self._lock = threading.Lock()
        self._stuck: OrderedDict[str, float] = OrderedDict()

    @property
    def kind(self) -> str:
        """What kind of store it is, in one word."""
        return self._store.kind

    @property
    def batch(self) -> int:
        """Objects that one call of `sizes` handles at about the cost of one."""
        return self._store.batch

    def sizes(self, wanted: Sequence[ObjectId]) -> list[int | None]:
        """Bytes of each object, unverified; None for one that is not there.

        Raises:
            TierError: the store failed.
        """
        names = [str(one.name) for one in wanted]
        sizes = self._store.sizes(names)
        return [None if self._is_stuck(name) else size for name, size in zip(names, sizes, strict=True)]

    def get_many(self, wanted: Sequence[ObjectId]) -> list[StoredObject | ObjectMissError]:
        """The objects in order, verified, up to the first that is not there, in whose place it says why.

        What is broken has been set aside. What comes after it was not looked at.

        Raises:
            TierError: the store failed.
        """
        values = self._store.read([str(one.name) for one in wanted])
        found: list[StoredObject | ObjectMissError] = []
        for one, value in zip(wanted, values, strict=True):
            found.append(self._open(one, value))
            if isinstance(found[-1], ObjectMissError):
                break
        return found

    def get(self, wanted: ObjectId) -> StoredObject:
        """The object, verified.

        Raises:
            ObjectMissError: absent; or an `EnvelopeError`, and it was set aside.
            TierError: the store failed.
        """
        [found] = self.get_many([wanted])
        if isinstance(found, ObjectMissError):
            raise found
        return found

    def put(self, obj: StoredObject) -> int:
        """Write an object, whole or not at all; its bytes. Replaces an equal identity.

        Raises:
            TierFullError: no room, or larger than the store takes.
            TierError: it was not kept.
        """
        size = encoded_size(obj.envelope)
        if size > self._store.max_value:
            raise TierFullError(f"write an object: {size} bytes, {self.kind} takes {self._store.max_value}")
        name = str(obj.id.name)
        self._store.write(name, [encode_header(obj), *obj.buffers])
        with self._lock:
            self._stuck.pop(name, None)
        return size

    def describe(self, space: KeySpace) -> None:
        """Write the description of a space beside its objects, unless it is there.

        Raises:
            TierError: it could not be written.
        """
        self._store.write(description_name(space.root), [format_description(space)], once=True)

    def contains(self, wanted: ObjectId) -> bool:
        """Whether something of that name is there, unverified."""
        return self.sizes([wanted])[0] is not None

    def delete(self, wanted: ObjectId) -> bool:
        """Remove an object; whether there was one.

        Raises:
            TierError: the store failed.
        """
        return self._store.remove(str(wanted.name))

    def names(self) -> Iterator[ObjectName]:
        """Names of all objects, unverified; walks the store."""
        for name, _ in self._objects():
            yield name

    def usage(self) -> TierUsage:
        """Objects and bytes; walks the store."""
        sizes = [size for _, size in self._objects()]
        return TierUsage(len(sizes), sum(sizes))

    def ping(self) -> None:
        """Ask whether the store is there.

        Raises:
            TierError: it is not.
        """
        self._store.ping()

    def close(self) -> None:
        """Give back connections. Nothing may be called afterwards."""
        self._store.close()

    def _objects(self) -> Iterator[tuple[ObjectName, int]]:
        for text, size in self._store.listing(f"{SCHEMA_FOLDER}/"):
            try:
                yield parse_name(text), size
            except StorageValueError:
                continue

    def _open(self, wanted: ObjectId, value: bytes | memoryview | None) -> StoredObject | ObjectMissError:
        if value is None:
            return ObjectMissError(MissReason.ABSENT, "nothing of that name")
        try:
            return open_object(value, wanted)
        except EnvelopeError as error:
            self._set_aside(str(wanted.name), value, error.reason)
            return error

    def _set_aside(self, name: str, value: bytes | memoryview, reason: Reason) -> None:
        below = name.removeprefix(f"{SCHEMA_FOLDER}/")
        try:
            self._store.move(name, f"{QUARANTINE}/{reason.name.lower()}/{below}", value)
        except TierError:  # it stays where it is, and is a miss
            with self._lock:
                self._stuck[name] = self.clock() + STUCK_SECONDS
                if len(self._stuck) > MAX_STUCK:
                    self._stuck.popitem(last=False)

    def _is_stuck(self, name: str) -> bool:
        with self._lock:
            until = self._stuck.get(name)
            if until is not None and until <= self.clock():
                del self._stuck[name]
                until = None
        return until is not None
