"""One database of Redis or Valkey as a listing of names, and retiring a part of it. Only descriptions are ever read.

Names come by SCAN, page after page, so the server is never held up. Of each key are asked, in one pipeline a page:

    TYPE               LMCache and we store strings; anything else is none of ours
    MEMORY USAGE       bytes that key and value take in the server. STRLEN would do, but counts as a use: an audit would
                       make every key look young, and undo the server's own order of eviction
    OBJECT IDLETIME    seconds since the last read or write. An LFU policy does not track it: then the age is unknown,
                       and nothing goes by age

A key is retired by a script on the server, which looks at type and idle time once more and unlinks in the same step:
one that was used or replaced since it was judged stays.

SCAN tells every key that is there throughout, and may tell one twice; a million keys are remembered to count such once.
A cluster is looked at node by node. Source: docs/spec/v1-formats.md, "Storage names"; docs/spec/storage-2.md.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import redis
from redis import exceptions
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from compat.audit import DESCRIPTION_NAME, StoredName, checked_model, identify
from compat.errors import CompatError
from compat.purge import Criteria, Verdict, verdict
from compat.v1 import StoreKind
from protocol_v2.storage.descriptions import MAX_DESCRIPTION_BYTES
from protocol_v2.storage.names import SPACE_FILE

SCHEMES: Final = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
"""Schemes of URLs, and what redis-py calls them: Valkey's are Redis' own under another name."""

PASSWORD_VARIABLE: Final = "REDISCLI_AUTH"  # noqa: S105
"""Environment variable with the password, for URLs that have none; redis-cli's own. No list of processes shows it."""

PAGE: Final = 512
"""Keys that SCAN looks at for one page."""

SEEN: Final = 1_000_000
"""Keys remembered to see repetitions; about 70 bytes each."""

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 30.0
_RETRIES: Final = 2

_PATH: Final = re.compile(r"(?:/[0-9]*)?\Z", re.ASCII)
_NEEDED: Final = "PING, DBSIZE, SCAN, TYPE, MEMORY USAGE, OBJECT IDLETIME and GETRANGE, and to purge EVAL and UNLINK"

_RETIRE: Final = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return 0 end
if kind ~= 'string' then return -1 end
if ARGV[1] ~= '' then
  local idle = redis.call('OBJECT', 'IDLETIME', KEYS[1])
  if not idle or idle <= tonumber(ARGV[1]) then return -1 end
end
redis.call('UNLINK', KEYS[1])
return 1
"""


class RedisError(CompatError):
    """The server cannot be asked, or does not answer what it was asked. Never names a user, a password or a key."""


class RedisListing:
    """A connection to one database.

    Args:
        url: ``redis://[user:password@]host[:port][/db]``, ``rediss://``, ``valkey://``, ``valkeys://``, or
            ``unix:///path/to/socket[?db=n]``. Without a password in it, the one in ``$REDISCLI_AUTH`` is used.
        page: keys that SCAN looks at for one page.

    Raises:
        RedisError: no such URL, or nobody answers there.
    """

    kind: Final = StoreKind.KEY_VALUE

    def __init__(self, url: str, *, page: int = PAGE) -> None:
        self._page = page
        self._client, self.place = _client(url)
        with self._typed():
            self._client.ping()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def total(self) -> int:
        """How many keys there are now."""
        with self._typed():
            return int(self._client.dbsize())

    def names(self) -> Iterator[StoredName]:
        """Every key, with the bytes it takes and when it was last used.

        Raises:
            RedisError: the server stops answering.
        """
        for page in self._pages():
            yield from page

    def described_models(self) -> dict[str, str]:
        """Model by space folder, of each schema-2 space whose description agrees with the name that it has."""
        models = {}
        with self._typed():
            for key in self._client.scan_iter(match=f"xk2/*/{SPACE_FILE}", count=self._page, _type="string"):
                name = _text(key)
                if (match := DESCRIPTION_NAME.fullmatch(name)) is None or match[1] != "2":
                    continue
                data = self._client.getrange(key, 0, MAX_DESCRIPTION_BYTES)
                if (model := checked_model(match[2], bytes(data))) is not None:
                    models[f"xk2/{match[2]}"] = model
        return models

    def purge(self, criteria: Criteria, *, dry_run: bool = True) -> Iterator[tuple[StoredName, Verdict]]:
        """Retire what is to go, page by page, as the iterator is advanced.

        Args:
            criteria: what goes. An age is seconds since the last use.
            dry_run: say what would go, and touch nothing.

        Yields:
            Each key and what became, or would become, of it: a retired one is gone by then.

        Raises:
            RedisError: the server stops answering, or refuses to remove; running again goes on.
        """
        models = self.described_models()
        for page in self._pages():
            now = int(time.time())
            outcomes = [verdict(stored, identify(stored, models, self.kind), criteria, now) for stored in page]
            if not dry_run:
                going = [place for place, outcome in enumerate(outcomes) if outcome is Verdict.RETIRED]
                for place, gone in zip(going, self.retire([page[one] for one in going], criteria), strict=True):
                    if not gone:
                        outcomes[place] = Verdict.CHANGED
            yield from zip(page, outcomes, strict=True)

    def retire(self, going: Sequence[StoredName], criteria: Criteria) -> list[bool]:
        """Remove keys that were judged, each if it is still a string and still as old as is asked for.

        Returns:
            Whether each is gone now, whoever removed it.
        """
        older = "" if criteria.older_than is None else repr(float(criteria.older_than))
        with self._typed():
            pipeline = self._client.pipeline(transaction=False)
            for stored in going:
                pipeline.eval(_RETIRE, 1, stored.name.encode(errors="surrogateescape"), older)
            return [answer >= 0 for answer in pipeline.execute()]

    def _pages(self) -> Iterator[list[StoredName]]:
        cursor, seen = 0, set[int]()
        while True:
            with self._typed():
                cursor, keys = self._client.scan(cursor, count=self._page)
            fresh = [key for key in dict.fromkeys(keys) if hash(key) not in seen]
            if len(seen) < SEEN:
                seen.update(map(hash, fresh))
            if fresh:
                yield self._described(fresh)
            if cursor == 0:
                return

    def _described(self, keys: Sequence[bytes]) -> list[StoredName]:
        """Facts of keys; one that went meanwhile is left out."""
        with self._typed():
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.type(key).memory_usage(key).object("IDLETIME", key)
            answers = pipeline.execute(raise_on_error=False)
            now = int(time.time())
            names = []
            for place, key in enumerate(keys):
                kind, size, idle = answers[3 * place : 3 * place + 3]
                for answer in (kind, size):
                    if isinstance(answer, Exception):
                        raise answer
                if size is not None:
                    modified = float(now - idle) if isinstance(idle, int) else None
                    names.append(StoredName(_text(key), int(size), modified, regular=kind == b"string"))
            return names

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.RedisError, OSError) as error:
            raise RedisError(f"{self.place}: {_explained(error)}") from None


def is_redis_url(text: str) -> bool:
    """Whether a text is meant as a URL of a Redis or Valkey server."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def _client(url: str) -> tuple[Any, str]:
    """A client that has not connected yet, and how to name the server to people."""
    scheme, _, rest = url.partition("://")
    full = f"{SCHEMES.get(scheme, '')}://{rest}"
    try:
        parts = urlsplit(full)
        wrong = not parts.scheme or parts.fragment or (scheme != "unix" and not _PATH.match(parts.path))
        place = parts.path if scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}{parts.path}"
        options: dict[str, Any] = {}
        if not (parts.password or "password=" in parts.query) and (password := os.environ.get(PASSWORD_VARIABLE)):
            options["password"] = password
        client = redis.Redis.from_url(
            full,
            **options,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.1), _RETRIES),
            decode_responses=False,
        )
    except (ValueError, TypeError, exceptions.RedisError):  # what they say may hold a part of the password
        wrong = True
    if wrong:
        raise RedisError(
            "no URL of a server; write redis://[user:password@]host[:port][/db] or unix:///path/to/socket[?db=n], with "
            "special characters of a password percent-encoded"
        )
    return client, f"{scheme}://{place}"


def _text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


def _explained(error: Exception) -> str:
    """What to do about an error. What a server says may quote keys, so it is not repeated."""
    match error:
        case exceptions.AuthenticationError() | exceptions.AuthorizationError():
            return f"the server refuses user or password; give them in the URL, or the password in ${PASSWORD_VARIABLE}"
        case exceptions.NoPermissionError():
            return f"the user may not do all that this needs: {_NEEDED}"
        case exceptions.ReadOnlyError():
            return "a replica, which takes no removals; name the primary"
        case exceptions.BusyLoadingError():
            return "the server is still loading its data; try again later"
        case exceptions.TimeoutError() | TimeoutError():
            return "no answer in time"
        case exceptions.ResponseError():
            if "NOAUTH" in str(error)[:16]:
                return f"the server wants a password; give it in the URL, or in ${PASSWORD_VARIABLE}"
            if "DB index" in str(error):
                return "the server has no database of that number"
            return f"the server does not do what this needs: {_NEEDED}"
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror if isinstance(cause, OSError) else type(error).__name__
    return f"nobody can be reached there ({reason}); is the server running?"
