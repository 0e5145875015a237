"""What the v1 front remembers of its clients: workers that registered, and lookups whose chunks are leased.

A v1 engine talks through several sockets: the scheduler looks up, polls and ends, each worker registers, stores and
retrieves, and only the request id connects them. A lookup therefore belongs to the socket that sent it, which alone can
free and end it, and is found by a worker through request id *and* identity: root and chunk hashes. Two engines that
count their requests alike, or an id that is used again with other tokens or another salt, never meet. A socket that
never looked up under an id is told the latest result of it: a client that has reconnected is another socket.

Both tables are bounded and pure: time comes from the caller, and whoever drops a lookup gives its lease back.

Source: docs/spec/v1-formats.md, "Front".
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from compat.v1.front_storage import ChunkLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compat.v1.operations import V1Registration

MAX_LOOKUPS: Final = 65_536
"""Lookups remembered at one time; the one that was used least lately goes first."""

MAX_LOOKUP_KEYS: Final = 4 * 1024 * 1024
"""Chunk hashes that they remember together."""

LOOKUP_TTL: Final = 600.0
"""Seconds without a call after which a lookup is forgotten; LMCache's own session time. What it hit is leased for as
long: an engine may queue a request between lookup and retrieve, and fails it if what it was promised is gone."""

MAX_WORKERS: Final = 4096
"""Workers registered at one time; the one that was silent longest goes first."""

PINGED_TTL: Final = 120.0
"""Seconds of silence after which a worker that used to ping is forgotten; LMCache's own."""

NEVER_PINGED_TTL: Final = 3600.0
"""The same for a worker that never pinged; LMCache's own."""

MAX_CLIENTS: Final = 65_536
"""Sockets counted at one time; the one that was silent longest goes first."""

CLIENT_TTL: Final = 120.0
"""Seconds of silence after which a socket is no longer counted: its client pings every ten."""


@dataclass(slots=True, eq=False)
class V1Lookup:
    """One lookup that was answered.

    Attributes:
        peer: transport identity of who asked.
        request_id: the client's.
        root: of the namespace.
        world: ranks.
        keys: hashes of the chunks that were hit.
        lease: over them; None where nothing was hit.
        readers: retrieves of each chunk of each rank after which it is given back; 0: the client did not say, so
            chunks are given back when the session ends.
        result: hit chunks, until they were told; each lookup is told once.
        last: seconds, monotonic.
    """

    peer: bytes
    request_id: str
    root: bytes
    world: int
    keys: Sequence[bytes]
    lease: bytes | None
    readers: int
    result: int | None
    last: float
    #: how often each chunk was read, by rank; only where more than one reads it
    _reads: dict[int, array[int]] = field(init=False, default_factory=dict)

    def covers(self, root: bytes, hashes: Sequence[bytes]) -> bool:
        """Whether these chunks of a prompt, from the first on, were hit under this identity.

        Hashes are chained, so the last of them stands for all.
        """
        n_chunks = len(hashes)
        return self.root == root and 0 < n_chunks <= len(self.keys) and self.keys[n_chunks - 1] == hashes[-1]

    def count_read(self, rank: int, start: int, stop: int) -> list[tuple[int, int]]:
        """One more reader of a rank has chunks [start, stop); ranges that all of its readers have now."""
        if self.readers <= 1:
            return [(start, stop)] if self.readers else []
        reads = self._reads.setdefault(rank, array("H", bytes(2 * len(self.keys))))
        done: list[tuple[int, int]] = []
        for place in range(start, stop):
            reads[place] = min(reads[place] + 1, self.readers)
            if reads[place] < self.readers:
                continue
            if done and done[-1][1] == place:
                done[-1] = (done[-1][0], place + 1)
            else:
                done.append((place, place + 1))
        return done


class LookupTable:
    """Lookups by request id and the socket that sent them.

    Args:
        max_lookups: remembered at one time.
        max_keys: chunk hashes of all of them together; one lookup alone may have more.
        ttl: seconds without a call.
    """

    def __init__(
        self, *, max_lookups: int = MAX_LOOKUPS, max_keys: int = MAX_LOOKUP_KEYS, ttl: float = LOOKUP_TTL
    ) -> None:
        self._max_lookups = max_lookups
        self._max_keys = max_keys
        self._ttl = ttl
        self._all: OrderedDict[tuple[str, bytes], V1Lookup] = OrderedDict()  # least lately used first
        self._peers: dict[str, dict[bytes, None]] = {}
        self._n_keys = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[V1Lookup]:
        return iter(self._all.values())

    def put(self, lookup: V1Lookup) -> list[V1Lookup]:
        """Remember a lookup, in place of the same socket's earlier one of that id; those that had to go."""
        gone = [one for one in (self.pop(lookup.peer, lookup.request_id),) if one is not None]
        self._all[lookup.request_id, lookup.peer] = lookup
        self._peers.setdefault(lookup.request_id, {})[lookup.peer] = None
        self._n_keys += len(lookup.keys)
        while len(self._all) > 1 and (len(self._all) > self._max_lookups or self._n_keys > self._max_keys):
            gone.append(self._drop(next(iter(self._all))))
        return gone

    def find(self, peer: bytes, request_id: str, now: float) -> V1Lookup | None:
        """The lookup that a socket sent under an id."""
        found = self._all.get((request_id, peer))
        return None if found is None else self._used(found, now)

    def find_latest(self, request_id: str, now: float) -> V1Lookup | None:
        """The latest lookup of that id, whoever sent it."""
        peers = self._peers.get(request_id)
        return self.find(next(reversed(peers)), request_id, now) if peers else None

    def find_covering(self, request_id: str, root: bytes, hashes: Sequence[bytes], now: float) -> V1Lookup | None:
        """A lookup of that id that hit those chunks under that identity, whoever sent it."""
        for peer in self._peers.get(request_id, ()):
            found = self._all[request_id, peer]
            if found.covers(root, hashes):
                return self._used(found, now)
        return None

    def pop(self, peer: bytes, request_id: str) -> V1Lookup | None:
        """Forget a lookup; it, if it was there."""
        return self._drop((request_id, peer)) if (request_id, peer) in self._all else None

    def expire(self, now: float) -> list[V1Lookup]:
        """Forget those that no call named for too long."""
        gone = []
        while self._all:
            first = next(iter(self._all))
            if self._all[first].last + self._ttl > now:
                break
            gone.append(self._drop(first))
        return gone

    def clear(self) -> list[V1Lookup]:
        """Forget all."""
        return [self._drop(one) for one in list(self._all)]

    def _used(self, lookup: V1Lookup, now: float) -> V1Lookup:
        lookup.last = now
        self._all.move_to_end((lookup.request_id, lookup.peer))
        return lookup

    def _drop(self, key: tuple[str, bytes]) -> V1Lookup:
        gone = self._all.pop(key)
        self._n_keys -= len(gone.keys)
        peers = self._peers[gone.request_id]
        del peers[gone.peer]
        if not peers:
            del self._peers[gone.request_id]
        return gone


class ClientTable:
    """Sockets that sent a readable request, so that an operator sees how many v1 clients there still are.

    Args:
        max_clients: counted at one time.
        ttl: seconds of silence after which one is not counted any more.
    """

    def __init__(self, *, max_clients: int = MAX_CLIENTS, ttl: float = CLIENT_TTL) -> None:
        self._max_clients = max_clients
        self._ttl = ttl
        self._last: OrderedDict[bytes, float] = OrderedDict()  # silent longest first
        self.last_heard: float | None = None
        """Seconds, monotonic, of the last request of any of them; None before the first. Never forgotten."""

    def __len__(self) -> int:
        return len(self._last)

    def heard(self, peer: bytes, now: float) -> None:
        """One of them sent a request."""
        self.last_heard = self._last[peer] = now
        self._last.move_to_end(peer)
        if len(self._last) > self._max_clients:
            self._last.popitem(last=False)

    def expire(self, now: float) -> None:
        """Forget those that were silent for too long."""
        while self._last and next(iter(self._last.values())) + self._ttl <= now:
            self._last.popitem(last=False)


@dataclass(slots=True, eq=False)
class V1Worker:
    """A worker in engine-driven mode.

    Attributes:
        model: LMCache's model name.
        world: ranks.
        layout: of one chunk's tensor.
        last: seconds, monotonic, of the last sign of life.
        pinged: whether it ever pinged.
    """

    model: str
    world: int
    layout: ChunkLayout
    last: float
    pinged: bool = False


class WorkerTable:
    """Workers by instance id.

    Args:
        chunk_size: tokens of a chunk, which are its slots where a worker does not say how many.
        max_workers: registered at one time.
    """

    def __init__(self, chunk_size: int, *, max_workers: int = MAX_WORKERS) -> None:
        self._chunk_size = chunk_size
        self._max_workers = max_workers
        self._all: OrderedDict[int, V1Worker] = OrderedDict()  # silent longest first
        self._strangers: OrderedDict[int, None] = OrderedDict()  # told so by their last ping
        self._dtypes: dict[tuple[str, int], Counter[str]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def register(self, registration: V1Registration, now: float) -> V1Worker:
        """Take a worker on, in place of an earlier one of the same instance id."""
        slots = registration.num_physical_slots or self._chunk_size
        planes = () if registration.use_mla else (2,)
        worker = V1Worker(
            registration.model_name,
            registration.world_size,
            ChunkLayout(
                registration.dtype_str, (*planes, registration.num_layers, slots, registration.hidden_dim_size)
            ),
            now,
        )
        self.unregister(registration.instance_id)
        self._strangers.pop(registration.instance_id, None)
        self._all[registration.instance_id] = worker
        self._dtypes.setdefault((worker.model, worker.world), Counter())[worker.layout.dtype] += 1
        if len(self._all) > self._max_workers:
            self.unregister(next(iter(self._all)))
        return worker

    def unregister(self, instance_id: int) -> None:
        """Forget a worker, if it is there."""
        worker = self._all.pop(instance_id, None)
        if worker is None:
            return
        dtypes = self._dtypes[worker.model, worker.world]
        dtypes[worker.layout.dtype] -= 1
        if not dtypes[worker.layout.dtype]:
            del dtypes[worker.layout.dtype]
        if not dtypes:
            del self._dtypes[worker.model, worker.world]

    def find(self, instance_id: int, now: float) -> V1Worker | None:
        """The worker, who has given a sign of life."""
        worker = self._all.get(instance_id)
        if worker is not None:
            worker.last = now
            self._all.move_to_end(instance_id)
        return worker

    def ping(self, instance_id: int, now: float) -> bool:
        """A sign of life, and how to answer it: False to every other ping of a worker that is not known.

        An engine of the release registers anew when a ping is answered well after one that was not, and never else. So
        one whose server was replaced between two of its pings would use a server that does not know it for ever.
        """
        worker = self.find(instance_id, now)
        if worker is not None:
            worker.pinged = True
            return True
        if instance_id in self._strangers:
            del self._strangers[instance_id]
            return True
        self._strangers[instance_id] = None
        if len(self._strangers) > self._max_workers:
            self._strangers.popitem(last=False)
        return False

    def dtypes(self, model: str, world: int) -> list[str]:
        """Element types of the workers of a model and world size: one, unless an engine was started with another."""
        return list(self._dtypes.get((model, world), ()))

    def expire(self, now: float) -> list[int]:
        """Forget workers that were silent for too long; their instance ids."""
        gone = [
            instance_id
            for instance_id, worker in self._all.items()
            if worker.last + (PINGED_TTL if worker.pinged else NEVER_PINGED_TTL) <= now
        ]
        for instance_id in gone:
            self.unregister(instance_id)
        return gone
