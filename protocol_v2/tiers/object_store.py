"""`ObjectStore`: values as objects of a bucket (S3, Google, Azure), or of a folder, through ``obstore``.

A put is atomic in all of them: a name has the old object, or the new one, or none. Names are those of storage schema
2, below the prefix that the URL names. Asking and reading go out side by side, a bounded number at a time. Errors name
what was done and the kind of error, never what the store said: that may hold addresses and keys.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from protocol_v2.tiers.base import TierError, TierIOError, TierReadOnlyError
from protocol_v2.tiers.files import tier_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from obstore.store import ObjectStore as Bucket

CONCURRENCY: Final = 32
"""Requests that are under way at one time."""

MAX_VALUE: Final = 5 * 1024**3
"""Bytes of one put without parts, which is what S3 takes; larger than any chunk."""

NOWHERE: Final = "xk2.ping"
"""A name that is never there: that a store says so is its answer to a ping."""


class ObjectStore:
    """Values in a bucket.

    Args:
        bucket: from ``obstore.store``; its own timeouts bound each call.
        kind: what it is, in one word, such as ``s3``.
    """

    batch = CONCURRENCY
    max_value = MAX_VALUE

    def __init__(self, bucket: Bucket, kind: str) -> None:
        self.kind = kind
        self._bucket = bucket
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="extra-keys-bucket")

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Bytes of each object; None for none."""
        return list(self._threads.map(self._size, names))

    def read(self, names: Sequence[str]) -> list[bytes | memoryview | None]:
        """Each object; None for none."""
        return list(self._threads.map(self._read, names))

    def write(self, name: str, parts: Sequence[bytes | memoryview], *, once: bool = False) -> None:
        """Put an object, by one request; once: after a look, as not every bucket knows conditional puts."""
        if once and self._size(name) is not None:
            return
        with _typed("write an object"):
            obstore.put(self._bucket, name, b"".join(parts), use_multipart=False)

    def move(self, name: str, target: str, content: bytes | memoryview) -> None:
        """Rename an object that still has this content; buckets do it by a copy and a delete, not atomically."""
        with _typed("set an object aside"), contextlib.suppress(FileNotFoundError):
            if self._read(name) == content:
                obstore.rename(self._bucket, name, target, overwrite=True)

    def remove(self, name: str) -> bool:
        """Delete an object; whether there was one."""
        if self._size(name) is None:
            return False
        with _typed("remove an object"), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._bucket, name)
        return True

    def listing(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Objects whose names begin with a prefix, which ends with a slash."""
        pages = obstore.list(self._bucket, prefix)
        while True:
            with _typed("list objects"):
                page = next(pages, None)
            if page is None:
                return
            for one in page:
                yield one["path"], one["size"]

    def ping(self) -> None:
        """Ask for a name that is never there."""
        self._size(NOWHERE)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _size(self, name: str) -> int | None:
        with _typed("ask for a size"), contextlib.suppress(FileNotFoundError):
            return obstore.head(self._bucket, name)["size"] or None
        return None

    def _read(self, name: str) -> memoryview | None:
        with _typed("read an object"), contextlib.suppress(FileNotFoundError):
            return memoryview(obstore.get(self._bucket, name).bytes())
        return None


def open_bucket(url: str, kind: str, options: Mapping[str, Any]) -> ObjectStore:
    """The bucket that a URL names, as ``obstore.store.from_url`` takes it. Does not connect.

    Raises:
        ValueError: it cannot be opened; the text is the kind of error alone.
    """
    try:
        bucket = from_url(url, **options)
    except (BaseError, OSError, ValueError) as error:
        raise ValueError(type(error).__name__) from None
    return ObjectStore(bucket, kind)


@contextlib.contextmanager
def _typed(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise tier_error(error, doing) from None
    except BaseError as error:
        raise _tier_error(error, doing) from None


def _tier_error(error: BaseError, doing: str) -> TierError:
    name = type(error).__name__
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return TierReadOnlyError(f"{doing}: {name}; give these credentials the right to get, put, list and delete")
    return TierIOError(f"{doing}: {name}")
