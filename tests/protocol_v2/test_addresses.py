"""Addresses are checked before libzmq reads them its own way."""

import pytest

from protocol_v2.addresses import is_address
from protocol_v2.client import CacheClient
from protocol_v2.errors import LocalProtocolError
from protocol_v2.server import checked_addresses


@pytest.mark.parametrize(
    "address",
    ["ipc:///run/x.sock", "ipc://@abstract", "tcp://127.0.0.1:0", "tcp://*:65535", "tcp://[::1]:5556", "tcp://host:*"],
)
def test_addresses_are_taken(address: str) -> None:
    """Both transports, wildcards, and every port that there is."""
    assert is_address(address)
    assert (address,) == checked_addresses(address)


@pytest.mark.parametrize(
    "address",
    ["", "ipc://", "tcp://", "tcp://:1", "tcp://host", "tcp://host:65536", "tcp://host:-1", "tcp://host:", "udp://h:1"],
)
def test_what_is_no_address_is_refused_on_both_sides(address: str) -> None:
    """A port beyond 65535 above all: libzmq would take it modulo 65536, and nobody would find the server."""
    assert not is_address(address)
    with pytest.raises(LocalProtocolError, match="wanted ipc://PATH or tcp://HOST:PORT"):
        checked_addresses([address])
    with pytest.raises(LocalProtocolError, match="wanted ipc://PATH or tcp://HOST:PORT"):
        CacheClient(address)


def test_a_path_that_is_too_long_for_a_socket_is_refused_on_both_sides() -> None:
    """107 bytes, not characters, are taken and one more is refused, by its length."""
    longest = f"ipc:///{'ä' * 53}"
    assert (longest,) == checked_addresses(longest)
    with pytest.raises(LocalProtocolError, match="108 bytes for a socket, wanted at most 107"):
        checked_addresses(f"{longest}x")
    with pytest.raises(LocalProtocolError, match="wanted at most 107"):
        CacheClient(f"{longest}x")
