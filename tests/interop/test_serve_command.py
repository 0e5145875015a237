"""`extra-keys serve --accept-v1`, the process, and the released LMCache's own client."""

import json
from pathlib import Path

import numpy as np
import pytest

from keying import CacheSalt, KeySpace, chunk_keys
from protocol_v2.client import CacheClient
from tests.cli.processes import run, serving
from tests.interop.environment import needs_lmcache
from tests.interop.real_client import RealClient, RealClientError, V1User

pytestmark = [pytest.mark.interop, pytest.mark.zmq, needs_lmcache]

CHUNK = 16
PROMPT = list(range(2000, 2070))
"""Four chunks and a tail."""

OTHER = [7, *PROMPT[1:]]
V1 = ("--accept-v1", "--v1-chunk-size", str(CHUNK))


def test_the_released_client_uses_the_command_beside_a_v2_client(tmp_path: Path, real_client: RealClient) -> None:
    """Both hit their own values and never the other's; entries of both outlive a restart; the status counts both."""
    store = ("--store", str(tmp_path / "store"))
    with serving(*V1, *store, "--listen", "tcp://127.0.0.1:0", cache_home=tmp_path) as server:
        port = server.address.rpartition(":")[2]
        user = V1User(real_client, server.address, chunk_size=CHUNK)
        space = KeySpace(user.model, chunk_size=CHUNK, kv_dtype="float16")
        keys = chunk_keys(space, PROMPT)
        assert user.rpc("get_chunk_size") == CHUNK
        assert user.store(PROMPT, 5.0)
        assert [5.0, 6.0, 7.0, 8.0] == user.retrieve(PROMPT)
        with CacheClient(server.address, space) as client:
            assert 0 == client.lookup("a", keys).hit_chunks
            assert 4 == client.store("a", keys, [np.full(8, 90, dtype=np.uint8)] * 4).stored
            assert 0 == client.lookup("b", chunk_keys(space, PROMPT, [CacheSalt("tenant")])).hit_chunks
        assert [5.0, 6.0, 7.0, 8.0] == user.retrieve(PROMPT)
        assert (0, 0) == (user.lookup(OTHER), user.lookup(PROMPT, salt="tenant"))
        facts = json.loads(run("status", "--json", server.address).stdout)
        assert (True, 1) == (facts["server.v1_accepted"], facts["v1.workers"])
        assert 1 <= facts["v1.clients"]
        assert not [name for name in facts if name.startswith("v1.refused.")]
        assert 0 == server.stop()[0]
    with serving(*V1, *store, "--listen", f"tcp://127.0.0.1:{port}", cache_home=tmp_path) as server:
        again = V1User(real_client, server.address, model=user.model, chunk_size=CHUNK)
        assert [5.0, 6.0, 7.0, 8.0] == again.retrieve(PROMPT)
        assert 0 == again.lookup(OTHER)
        with CacheClient(server.address, space) as client:
            assert 4 == client.lookup("c", keys).hit_chunks
        assert 0 == server.stop()[0]


def test_what_v1_clients_left_is_retired_at_the_end_and_v2_hits_on(tmp_path: Path, real_client: RealClient) -> None:
    """In one store the audit tells their entries from v2's, and a purge of theirs alone leaves v2's where they are."""
    store = tmp_path / "store"
    options = ("--store", str(store), "--listen", "tcp://127.0.0.1:0")
    with serving(*V1, *options, cache_home=tmp_path) as server:
        user = V1User(real_client, server.address, chunk_size=CHUNK)
        space = KeySpace(user.model, chunk_size=CHUNK, kv_dtype="float16")
        keys = chunk_keys(space, PROMPT)
        assert user.store(PROMPT, 5.0)
        with CacheClient(server.address, space) as client:
            assert 4 == client.store("a", keys, [np.full(8, 90, dtype=np.uint8)] * 4).stored
        assert 0 == server.stop()[0]
    groups = json.loads(run("audit", str(store), "--json").stdout)["groups"]
    found = {(one["format"], one["model"]): one["names"] for one in groups if one["what"] == "entry"}
    assert {("xk2", user.model): 4, ("xk2, of v1 clients", None): 4} == found
    done = run("purge", str(store), "--format", "xk2, of v1 clients", "--yes", "--json")
    assert 4 == json.loads(done.stdout)["outcomes"]["retired"]["names"]
    with serving(*V1, *options, cache_home=tmp_path) as server:
        assert 0 == V1User(real_client, server.address, model=user.model, chunk_size=CHUNK).lookup(PROMPT)
        with CacheClient(server.address, space) as client:
            assert 4 == client.lookup("b", keys).hit_chunks
        assert 0 == server.stop()[0]


def test_the_released_client_gets_nothing_from_a_server_that_was_not_told_to(
    tmp_path: Path, real_client: RealClient
) -> None:
    """Without --accept-v1 it waits in vain, and the server goes on serving v2 clients."""
    with serving("--no-store", "--listen", "tcp://127.0.0.1:0", cache_home=tmp_path) as server:
        number = real_client.call("connect", url=server.address)
        with pytest.raises(RealClientError, match="Timeout"):
            real_client.call("rpc", client=number, operation="get_chunk_size", arguments=[], timeout=0.5)
        facts = json.loads(run("status", "--json", server.address).stdout)
        assert (False, True) == (facts["server.v1_accepted"], facts["service.foreign"] > 0)
        assert 0 == run("probe", server.address).returncode
        assert 0 == server.stop()[0]
