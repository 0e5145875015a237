"""`open_remote`: the remote tier that a URL names.

    redis://  rediss://  valkey://  valkeys://  unix://      Redis or Valkey; the s is TLS
    s3://  gs://  az://                                      buckets, with credentials from the environment
    file://  memory://                                       a folder that servers share; this process alone (to try it)

A URL may hold a password. It is given to the library and to nobody else: errors and `RemoteTier.address` are made from
scheme, host and path.
"""

from __future__ import annotations

import importlib
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from protocol_v2.errors import LocalProtocolError
from protocol_v2.tiers.redis_store import RedisStore
from protocol_v2.tiers.remote import RemoteTier

if TYPE_CHECKING:
    from urllib.parse import SplitResult

    from protocol_v2.tiers.remote import SharedStore

REDIS: Final = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
"""Schemes of Redis and Valkey, and what redis-py calls them."""

BUCKETS: Final = ("s3", "gs", "az", "file", "memory")
MAX_TTL_SECONDS: Final = 10 * 365 * 86_400
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)


def open_remote(url: str, *, timeout: float) -> RemoteTier:
    """The remote tier that a URL names. Does not connect: whether anybody is there shows when it is used.

    Args:
        url: see the module's text; ``?ttl=30d`` (s, m, h, d) makes values in Redis go after that time.
        timeout: seconds that one call may take, more than 0.

    Raises:
        LocalProtocolError: a URL of another kind, options that there are not, or a library that is not installed.
    """
    if not timeout > 0:
        raise LocalProtocolError(f"remote: got a timeout of {timeout} s, wanted more than 0")
    try:
        parts = urlsplit(url)
        address = _address(parts)
    except ValueError:
        raise LocalProtocolError(
            "remote: not a URL; write for instance redis://HOST:6379/0 or s3://BUCKET/PREFIX"
        ) from None
    if parts.scheme in REDIS:
        return RemoteTier(_open_redis(parts, timeout), address)
    if parts.scheme in BUCKETS:
        return RemoteTier(_open_bucket(parts, timeout), address)
    raise LocalProtocolError(
        f"remote: got a URL of another kind than {', '.join(f'{one}://' for one in (*REDIS, *BUCKETS))}"
    )


def _open_redis(parts: SplitResult, timeout: float) -> SharedStore:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    ttl = options.pop("ttl", None)
    seconds = None if ttl is None else _seconds(ttl)
    url = f"{REDIS[parts.scheme]}://{parts.netloc}{parts.path}" + (f"?{urlencode(options)}" if options else "")
    try:
        return RedisStore(url, timeout=timeout, ttl=seconds)
    except (ValueError, TypeError):
        raise LocalProtocolError(
            "remote: redis-py cannot read this URL; wanted redis://[USER:PASSWORD@]HOST[:PORT][/DB][?ttl=30d], or "
            "unix://[USER:PASSWORD@]/PATH[?db=DB]"
        ) from None


def _open_bucket(parts: SplitResult, timeout: float) -> SharedStore:
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise LocalProtocolError(
            f"remote: {parts.scheme}:// takes a bucket and a prefix only; credentials and region come from the "
            "environment, and how long objects stay is the bucket's lifecycle rule"
        )
    try:
        module = importlib.import_module("protocol_v2.tiers.object_store")
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise LocalProtocolError(
            f"remote: {parts.scheme}:// needs the package obstore; install extra-keys[buckets]"
        ) from None
    limit = timedelta(seconds=timeout)
    options: dict[str, Any] = {}
    if parts.scheme == "file":
        options = {"mkdir": True}
    elif parts.scheme != "memory":
        options = {
            "client_options": {"timeout": limit, "connect_timeout": limit, "allow_http": True},
            "retry_config": {"max_retries": 1, "retry_timeout": limit},
        }
    try:
        store: SharedStore = module.open_bucket(f"{parts.scheme}://{parts.netloc}{parts.path}", parts.scheme, options)
    except ValueError as error:
        raise LocalProtocolError(
            f"remote: {parts.scheme}:// cannot be opened ({error}); check the path, and the environment "
            "for region, endpoint and credentials, as obstore reads them (AWS_REGION, AWS_ENDPOINT, ...)"
        ) from None
    return store


def _address(parts: SplitResult) -> str:
    """A URL for people: scheme, host, port and path."""
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_TTL_SECONDS:
        raise LocalProtocolError("remote: wanted a ttl such as 30d, 12h, 45m or 90s, of at most ten years")
    return seconds
