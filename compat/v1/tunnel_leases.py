"""Leases of a tunnel: what a lookup through a v1 server hit, under an id that this side makes.

A v1 server counts read locks by key and knows no leases, so what was hit, and which ranks have had their part of it, is
remembered here. A lock that was given back twice would be another reader's, therefore each is given back once.

A book may be shared by several clients of one process, so that a worker can retrieve what its scheduler looked up. It
does not reach into other processes: a worker there, which has the keys, looks up its own rank's part by itself, under
locks of its own (`TunnelLease.elsewhere`). Any thread may call it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol_v2.wire_keys import Shard

MAX_LEASES: Final = 16_384
"""Leases remembered at one time; the oldest goes first. Its locks end with the server's own time for them."""

MAX_LEASED_CHUNKS: Final = 2 * 1024 * 1024
"""Chunks that they name together; one lease alone may have more."""

LEASE_TTL: Final = 600.0
"""Seconds after which a lease is forgotten; a v1 server's locks have ended by then."""


@dataclass(slots=True, eq=False)
class TunnelLease:
    """One hit.

    Attributes:
        digests: schema-2 keys of the chunks that were hit, from the prompt's first on.
        world: ranks.
        request_ids: v1 request id of each KV group's lookup; empty where there was none.
        session: the client's.
        made: seconds, monotonic.
        id: 16 bytes.
        rank: whose locks alone were taken; None: those of all ranks.
    """

    digests: tuple[bytes, ...]
    world: int
    request_ids: list[str]
    session: str
    made: float
    id: bytes = field(default_factory=lambda: os.urandom(16))
    rank: int | None = None
    #: chunks whose lock a rank of a group has given back, a byte a chunk
    _given: dict[tuple[int, int], bytearray] = field(init=False, default_factory=dict)

    @classmethod
    def elsewhere(cls, digests: tuple[bytes, ...], shard: Shard, now: float) -> TunnelLease:
        """For one rank's part of what another process looked up: nothing is locked for it yet."""
        return cls(digests, shard.world, [""] * (shard.group + 1), "", now, rank=shard.rank)

    @property
    def groups(self) -> int:
        """KV groups."""
        return len(self.request_ids)

    def give_back(self, start: int, stop: int, group: int, rank: int) -> list[tuple[int, int]]:
        """Mark [start, stop) of one rank; the ranges that were not marked before."""
        given = self._given.setdefault((group, rank), bytearray(len(self.digests)))
        stop = min(stop, len(self.digests))
        fresh: list[tuple[int, int]] = []
        for place in range(start, stop):
            if given[place]:
                continue
            given[place] = 1
            if fresh and fresh[-1][1] == place:
                fresh[-1] = (fresh[-1][0], place + 1)
            else:
                fresh.append((place, place + 1))
        return fresh

    def lock_again(self, group: int, request_id: str, hit: int) -> None:
        """A group was looked up anew: its ranks have locks on [0, hit) again, and none behind."""
        self.request_ids[group] = request_id
        for rank in self._ranks:
            self._given[group, rank] = bytearray(hit) + b"\1" * (len(self.digests) - hit)

    def give_back_all(self, start: int, stop: int) -> list[tuple[int, int | None, int, int]]:
        """Mark [start, stop) of every rank: group, rank and range of what was not marked before.

        The rank is None where that is the same for all ranks of a group.
        """
        fresh: list[tuple[int, int | None, int, int]] = []
        for group, request_id in enumerate(self.request_ids):
            if not request_id:
                continue
            ranges = {rank: self.give_back(start, stop, group, rank) for rank in self._ranks}
            same = ranges[self._ranks[0]]
            if self.rank is None and all(one == same for one in ranges.values()):
                fresh += [(group, None, first, last) for first, last in same]
            else:
                fresh += [(group, rank, first, last) for rank, some in ranges.items() for first, last in some]
        return fresh

    @property
    def _ranks(self) -> Sequence[int]:
        return range(self.world) if self.rank is None else (self.rank,)


class LeaseBook:
    """All leases of the tunnels that share it.

    Args:
        max_leases: remembered at one time.
        max_chunks: that they name together.
    """

    def __init__(self, *, max_leases: int = MAX_LEASES, max_chunks: int = MAX_LEASED_CHUNKS) -> None:
        self._max_leases = max_leases
        self._max_chunks = max_chunks
        self._lock = threading.Lock()
        self._all: OrderedDict[bytes, TunnelLease] = OrderedDict()  # oldest first
        self._n_chunks = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._all)

    def put(self, lease: TunnelLease) -> None:
        """Remember a lease; old ones go where there is no room."""
        with self._lock:
            self._all[lease.id] = lease
            self._n_chunks += len(lease.digests)
            while len(self._all) > 1 and (
                len(self._all) > self._max_leases
                or self._n_chunks > self._max_chunks
                or next(iter(self._all.values())).made + LEASE_TTL <= lease.made
            ):
                self._drop(next(iter(self._all)))

    def find(self, lease_id: bytes, now: float) -> TunnelLease | None:
        """The lease, if it is remembered and not too old."""
        with self._lock:
            lease = self._all.get(lease_id)
            return lease if lease is not None and lease.made + LEASE_TTL > now else None

    def pop(self, lease_id: bytes) -> None:
        """Forget a lease, if it is there."""
        with self._lock:
            if lease_id in self._all:
                self._drop(lease_id)

    def of_session(self, session: str) -> list[TunnelLease]:
        """Leases of one session."""
        with self._lock:
            return [lease for lease in self._all.values() if lease.session == session]

    def _drop(self, lease_id: bytes) -> None:
        self._n_chunks -= len(self._all.pop(lease_id).digests)
