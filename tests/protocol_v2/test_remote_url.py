"""URLs of remote tiers: what they open, and that what is secret in them stays there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from protocol_v2.errors import LocalProtocolError
from protocol_v2.tiers import object_store
from protocol_v2.tiers.remote_url import open_remote
from tests.protocol_v2.storage_samples import chain, make_object

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "kind", "address", "wanted"),
    [
        (
            "redis://u:hunter2@h:7000/3",
            "redis",
            "redis://h:7000/3",
            {"host": "h", "port": 7000, "db": 3, "username": "u"},
        ),
        ("valkey://:hunter2@h/1", "redis", "valkey://h/1", {"host": "h", "db": 1, "password": "hunter2"}),
        ("rediss://h", "redis", "rediss://h", {"host": "h"}),
        ("valkeys://h?ttl=30d&ssl_ca_certs=/ca", "redis", "valkeys://h", {"ssl_ca_certs": "/ca"}),
        ("unix://u:hunter2@/run/r.sock?db=2", "redis", "unix:///run/r.sock", {"path": "/run/r.sock", "db": 2}),
    ],
)
def test_urls_of_redis_and_valkey(url: str, kind: str, address: str, wanted: dict[str, Any]) -> None:
    """User, password, database and TLS reach the library; the address for people has none of the secrets."""
    tier = open_remote(url, timeout=0.5)
    assert (kind, address) == (tier.kind, tier.address)
    given = tier._store._client.connection_pool.connection_kwargs  # type: ignore[attr-defined]
    assert wanted == {name: given[name] for name in wanted}
    assert (0.5, 0.5) == (given["socket_timeout"], given["socket_connect_timeout"])
    secure = tier._store._client.connection_pool.connection_class.__name__ == "SSLConnection"  # type: ignore[attr-defined]
    assert url.startswith(("rediss", "valkeys")) == secure
    tier.close()


@pytest.mark.parametrize(
    ("ttl", "milliseconds"), [("30d", 2_592_000_000), ("12h", 43_200_000), ("45m", 2_700_000), ("90s", 90_000)]
)
def test_times_to_live(ttl: str, milliseconds: int) -> None:
    """A time as people write it; none means that the server decides."""
    tiers = [open_remote(f"redis://h{query}", timeout=1) for query in (f"?ttl={ttl}", "")]
    assert [milliseconds, None] == [tier._store._ttl_ms for tier in tiers]  # type: ignore[attr-defined]
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_urls_of_buckets(tmp_path: Path, kind: str) -> None:
    """A folder is made on demand and shared by whoever opens it; memory is each opener's own."""
    url = f"file://{tmp_path}/made/here" if kind == "file" else "memory://"
    first, second = open_remote(url, timeout=1), open_remote(url, timeout=1)
    obj = make_object(chain("url", 1), 0)
    first.put(obj)
    assert first.contains(obj.id)
    assert (kind == "file") == second.contains(obj.id)
    assert (kind == "file") == (tmp_path / "made" / "here" / str(obj.id.name)).is_file()
    first.close()
    second.close()


def test_urls_of_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3, Google and Azure open from the environment's settings, without connecting."""
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url in ("s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix"):
        tier = open_remote(url, timeout=1)
        assert (url[:2], url) == (tier.kind, tier.address)
        tier.close()
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(LocalProtocolError, match="check the path, and the environment"):
        open_remote("az://container/prefix", timeout=1)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:6379",
        "http://u:hunter2@h/x",
        "hunter2:6379",
        "redis://u:hunter2@h:port/0",
        "redis://u:hunter2@h/0?ttl=soon",
        "redis://u:hunter2@h/0?ttl=0s",
        "redis://u:hunter2@h/0?ttl=99999d",
        "redis://u:hunter2@h/0?surprise=1",
        "redis://[u:hunter2@h",
        "s3://u:hunter2@bucket/x",
        "s3://bucket/x?secret_access_key=hunter2",
        "s3://bucket/x?ttl=30d",
        "file:///proc/hunter2/x",
    ],
)
def test_other_urls_are_refused_without_their_secrets(url: str) -> None:
    """What was wanted is said; what was given is not, since it may hold a password."""
    with pytest.raises(LocalProtocolError, match="remote: ") as refused:
        open_remote(url, timeout=1)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_is_more_than_nothing(timeout: float) -> None:
    """A call that may take forever, or no time, is refused."""
    with pytest.raises(LocalProtocolError, match="timeout"):
        open_remote("memory://", timeout=timeout)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who did not install the extra is told its name; Redis needs none."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, object_store.__name__)
    with pytest.raises(LocalProtocolError, match=r"needs the package obstore; install extra-keys\[buckets\]"):
        open_remote("memory://", timeout=1)
    open_remote("redis://h", timeout=1).close()
