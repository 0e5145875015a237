"""LMCache clients before 0.5.6 on our server: 0.5.5 and 0.5.3 are served, 0.5.0 is refused without harm to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.environment import needs_lmcache
from tests.interop.our_server import our_server
from tests.interop.real_client import RealClient, RealClientError, V1User

pytestmark = [pytest.mark.interop, pytest.mark.zmq, needs_lmcache]

PROMPT = list(range(1000, 1070))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of one server of ours for the module."""
    with our_server() as server:
        yield server.address


@pytest.mark.parametrize("release", ["0.5.3", "0.5.5"])
def test_an_older_client_is_served(address: str, peer_logs: Path, release: str) -> None:
    """Its own probe, numbers, key fields and clear; 0.5.3 does not even say how many read."""
    with RealClient(peer_logs / f"client-{release}.log", release=release) as client:
        user = V1User(client, address)
        assert user.rpc("get_chunk_size") == 16
        assert user.rpc("get_experimental") == ["extra_keys/2"]
        assert user.rpc("noop") == "OK"
        assert user.rpc("ping", user.instances[0]) is True
        assert user.lookup(PROMPT) == 0
        assert user.store(PROMPT, 5.0)
        assert (user.lookup(PROMPT), user.lookup(PROMPT, how="query")) == (4, 4)
        assert [5.0, 6.0, 7.0, 8.0] == user.retrieve(PROMPT)
        assert user.lookup(PROMPT, salt="tenant") == 0
        assert user.rpc("clear") is None
        assert user.lookup(PROMPT) == 0


def test_releases_share_what_they_store(address: str, peer_logs: Path, real_client: RealClient) -> None:
    """What a 0.5.3 client stored is a hit for 0.5.6, with its values, and the other way round."""
    with RealClient(peer_logs / "client-0.5.3-shared.log", release="0.5.3") as client:
        older = V1User(client, address)
        current = V1User(real_client, address, model=older.model)
        assert older.store(PROMPT, 5.0)
        assert [5.0, 6.0, 7.0, 8.0] == current.retrieve(PROMPT)
        assert current.store(PROMPT, 50.0, salt="t")
        assert [50.0, 51.0, 52.0, 53.0] == older.retrieve(PROMPT, salt="t")


def test_a_client_that_numbers_everything_otherwise_gives_up_on_the_chunk_size(address: str, peer_logs: Path) -> None:
    """0.5.0: silence, so it times out as with no server at all, and its other connections live on."""
    with RealClient(peer_logs / "client-0.5.0.log", release="0.5.0") as client:
        number = client.call("connect", url=address)
        with pytest.raises(RealClientError, match="timeout"):
            client.call("rpc", client=number, operation="get_chunk_size", arguments=[], timeout=0.5)
        assert "Exception in thread" not in (peer_logs / "client-0.5.0.log").read_text()
        assert client.call("rpc", client=number, operation="ping", arguments=[None], timeout=5.0) is False
