"""`RedisStore`: values in Redis or Valkey, under the names of storage schema 2.

One value is one string, written by one SET, so it is whole or not there. What is there is asked by STRLEN, which,
unlike EXISTS, counts as a use for the server's eviction policy. Values come back by MGET; keys of another type read as
nothing. Library: redis-py, which speaks to both servers. Errors name what was done and the kind of error, never what
the server said: that may hold addresses and users.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from protocol_v2.tiers.base import TierError, TierFullError, TierIOError, TierReadOnlyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_VALUE: Final = 512 * 1024 * 1024
"""Bytes of a string that Redis takes (proto-max-bulk-len, as it is by default)."""

BATCH: Final = 512
"""Names of one pipeline."""

SCAN: Final = 1000


class RedisStore:
    """Values in one database of one server.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, with user, password and database as redis-py reads them.
        timeout: seconds that connecting, and each read or write of a socket, may take.
        ttl: seconds after which a value goes; None leaves that to the server.

    Raises:
        ValueError: a URL that redis-py cannot read.
        TypeError: options in it that there are not.
    """

    kind = "redis"
    batch = BATCH
    max_value = MAX_VALUE

    def __init__(self, url: str, *, timeout: float, ttl: float | None = None) -> None:
        self._ttl_ms = None if ttl is None else max(1, int(ttl * 1000))
        # One immediate retry, and for broken connections only: a restarted server leaves broken ones in the pool.
        # A timeout is never retried: that would double the wait of whoever is waiting.
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 1, (exceptions.ConnectionError,)),
            decode_responses=False,
        )
        pool = self._client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # raises for options that there are not; does not connect

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Bytes under each name; None for no string."""
        with _typed("ask for sizes"):
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.strlen(name)
            answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not _is_wrong_type(answer):
                    raise answer
            return [None if isinstance(answer, Exception) or not answer else int(answer) for answer in answers]

    def read(self, names: Sequence[str]) -> list[bytes | memoryview | None]:
        """What is under each name; None for no string."""
        with _typed("read objects"):
            return list(self._client.mget(list(names)))

    def write(self, name: str, parts: Sequence[bytes | memoryview], *, once: bool = False) -> None:
        """Put a value under a name, by one SET."""
        with _typed("write an object"):
            self._client.set(name, b"".join(parts), nx=once, px=None if once else self._ttl_ms)

    def move(self, name: str, target: str, content: bytes | memoryview) -> None:
        """RENAME a value, in a transaction that fails if it is not the one that was read any more."""
        with _typed("set an object aside"), self._client.pipeline(transaction=True) as pipeline:
            pipeline.watch(name)
            if pipeline.get(name) != content:
                return
            pipeline.multi()
            pipeline.rename(name, target)
            with contextlib.suppress(exceptions.WatchError):  # replaced meanwhile, so there is nothing to set aside
                pipeline.execute()

    def remove(self, name: str) -> bool:
        """UNLINK a value; whether there was one."""
        with _typed("remove an object"):
            return bool(self._client.unlink(name))

    def listing(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Strings whose names begin with a prefix; by SCAN, which tells a name that stays at least once."""
        cursor, seen = 0, set[str]()
        while True:
            with _typed("list objects"):
                cursor, found = self._client.scan(cursor, match=f"{prefix}*", count=SCAN)
            names = [text for one in found if (text := one.decode("ascii", "replace")) not in seen]
            seen.update(names)
            for name, size in zip(names, self.sizes(names), strict=True):
                if size is not None:
                    yield name, size
            if cursor == 0:
                return

    def ping(self) -> None:
        """PING."""
        with _typed("ping"):
            self._client.ping()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


def _is_wrong_type(error: Exception) -> bool:
    return isinstance(error, exceptions.ResponseError) and str(error).startswith("WRONGTYPE")


@contextlib.contextmanager
def _typed(doing: str) -> Iterator[None]:
    try:
        yield
    except (exceptions.RedisError, OSError) as error:
        raise _tier_error(error, doing) from None


def _tier_error(error: Exception, doing: str) -> TierError:
    name = type(error).__name__
    if isinstance(error, exceptions.OutOfMemoryError):
        return TierFullError(
            f"{doing}: {name}; let the server evict (maxmemory-policy allkeys-lru), or give it more room"
        )
    if isinstance(error, exceptions.ReadOnlyError | exceptions.NoPermissionError):
        return TierReadOnlyError(f"{doing}: {name}; name the primary, and a user that may GET, SET, STRLEN and RENAME")
    if isinstance(error, exceptions.AuthenticationError):
        return TierIOError(f"{doing}: {name}; check user and password in the URL")
    return TierIOError(f"{doing}: {name}")
