"""Our server, in a thread of the test's process, on a port from the operating system."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from compat.v1.front import V1Front
from protocol_v2.cache import ChunkCache
from protocol_v2.hello import Limits
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService
from protocol_v2.tiers import DiskTier

MEMORY = 256 << 20


@contextmanager
def our_server(
    *,
    chunk_size: int = 16,
    memory: int = MEMORY,
    disk: DiskTier | None = None,
    address: str = "tcp://127.0.0.1:0",
    front: bool = True,
) -> Iterator[CacheServer]:
    """A started server, with the v1 front unless told otherwise, stopped at the end."""
    cache = ChunkCache(memory, disk)
    cache.load()
    service = CacheService(
        cache,
        ServerTerms(boot_id=os.urandom(16), limits=Limits(), software="test"),
        started=time.monotonic(),
        front=V1Front(cache, chunk_size=chunk_size) if front else None,
    )
    with CacheServer(address, service) as server:
        yield server
