"""Unmodified LMCache 0.5.6 clients on our server, next to v2 clients on the same port.

What is right on the released server is right here, with the same values; what is wrong there (see `test_real_server`)
is not copied.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from compat.v1 import v1_token_ids
from compat.v1.generations import V1Generation
from compat.v1.pickled_tensors import PickledTensor, write_tensors
from keying import CacheSalt, KeySpace, MultimodalItem, chunk_keys
from protocol_v2.client import CacheClient
from tests.interop.environment import needs_lmcache
from tests.interop.our_server import our_server
from tests.interop.real_client import RealClient, V1User
from tests.interop.real_server import ask, free_port

pytestmark = [pytest.mark.interop, pytest.mark.zmq, needs_lmcache]

CHUNK = 16
PROMPT = list(range(1000, 1070))
"""Four chunks and a tail."""

OTHER = [7, *PROMPT[1:]]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of one server of ours for the module; users have models of their own."""
    with our_server(chunk_size=CHUNK) as server:
        yield server.address


@pytest.fixture
def user(address: str, real_client: RealClient) -> V1User:
    """An engine with a model of its own on our server."""
    return V1User(real_client, address)


def test_the_client_asks_and_is_answered_as_by_the_release(user: V1User) -> None:
    """Everything an engine says before, between and after its requests."""
    assert user.rpc("noop") == "OK"
    assert user.rpc("ping", None) is True
    assert user.rpc("ping", user.instances[0]) is True
    assert user.rpc("get_chunk_size") == CHUNK
    assert user.rpc("get_experimental") == ["extra_keys/2"]
    assert [{"shm_name": "", "pool_size": 0}] == user.registered
    assert user.client.call("report_blocks", client=user.number, instance=1, model=user.model, tokens=PROMPT) is None
    assert user.rpc("query_prefetch_status", "nobody") == 0
    assert user.rpc("end_session", "nobody") is None
    assert user.rpc("unregister_kv_cache_engine_driven_context", user.instances[0]) is None
    assert user.rpc("unregister_kv_cache_engine_driven_context", user.instances[0]) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8", "uint8"])
def test_what_is_stored_is_hit_with_its_own_values(address: str, real_client: RealClient, dtype: str) -> None:
    """Pickled by the release, read here, kept, written here, and unpickled by the release: the very values."""
    user = V1User(real_client, address, dtype=dtype)
    assert user.lookup(PROMPT) == 0
    assert user.store(PROMPT, 5.0)
    assert (user.lookup(PROMPT), user.lookup(PROMPT, how="query")) == (4, 4)
    assert [5.0, 6.0, 7.0, 8.0] == user.retrieve(PROMPT)
    assert [5.0, 6.0] == user.retrieve([*PROMPT[:32], *OTHER])
    assert user.lookup(PROMPT, salt="tenant-b") == 0
    assert user.lookup(OTHER) == 0


def test_latent_attention_has_one_plane_and_many_readers(address: str, real_client: RealClient) -> None:
    """MLA: every worker of the tensor-parallel group reads the one shard."""
    user = V1User(real_client, address, mla=True)
    assert user.store(PROMPT, 5.0)
    request_id = user.new_request_id()
    assert user.lookup(PROMPT, end=False, request_id=request_id, readers=2) == 4
    for _ in range(2):
        assert [5.0, 6.0, 7.0, 8.0] == user.retrieve_range(PROMPT, request_id=request_id, readers=2)
    assert user.retrieve_range(PROMPT, request_id=request_id, readers=2) is None
    user.end(request_id)


def test_a_world_of_two_ranks_hits_what_both_have(address: str, real_client: RealClient) -> None:
    """As in the release: each rank stores and retrieves its own part."""
    user = V1User(real_client, address, world=2)
    assert user.store(PROMPT, 5.0)
    assert [5.0, 6.0, 7.0, 8.0] == user.retrieve(PROMPT, rank=1)
    assert V1User(real_client, address, model=user.model).lookup(PROMPT) == 0


def test_two_engines_share_what_they_store(address: str, real_client: RealClient, user: V1User) -> None:
    """Another connection, other workers, the same model: hits."""
    assert user.store(PROMPT, 5.0, salt="shared")
    assert [5.0, 6.0, 7.0, 8.0] == V1User(real_client, address, model=user.model).retrieve(PROMPT, salt="shared")


def test_request_configs_are_no_identity(user: V1User) -> None:
    """They are not in the release either, so a client that sends tags keeps its hits."""
    assert user.store(PROMPT, 5.0)
    assert user.lookup(PROMPT, configs={"lmcache.tag.user": "x", "lora": "adapter-1"}) == 4


def test_generations_are_keyed_as_in_the_release(user: V1User) -> None:
    """The front keys what it is sent: raw placeholders of two pictures still are one prompt, sha31 are two."""
    prompt = [*PROMPT[:8], *[151_655] * 40, *PROMPT[:16]]
    first, second = (MultimodalItem(name, 8, 40) for name in ("ab" * 32, "cd" * 32))
    hits = {}
    for generation in (V1Generation.RAW, V1Generation.SHA31):
        assert user.store(v1_token_ids(prompt, [first], generation=generation), 5.0)
        hits[generation] = user.lookup(v1_token_ids(prompt, [second], generation=generation))
    assert {V1Generation.RAW: 4, V1Generation.SHA31: 0} == hits


def test_what_is_retrieved_or_freed_is_given_back(user: V1User) -> None:
    """A second retrieve of what was given back is a miss, as in the release."""
    assert user.store(PROMPT, 5.0)
    assert user.retrieve_range(PROMPT) is None
    request_id = user.new_request_id()
    assert user.lookup(PROMPT, end=False, request_id=request_id) == 4
    assert [5.0, 6.0] == user.retrieve_range(PROMPT, request_id=request_id, stop=32)
    user.client.call("free", client=user.number, key=user.key(PROMPT, rank=None, request_id=request_id, start=32))
    assert user.retrieve_range(PROMPT, request_id=request_id) is None
    user.end(request_id)
    assert [5.0, 6.0, 7.0, 8.0] == user.retrieve(PROMPT)


# ---- what the release gets wrong


def raw_lookup(address: str, user: V1User, key: dict[str, object]) -> int:
    """A lookup in frames of our own making on its own socket, and its result there."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        answers = []
        for frames in (
            [b"\x07", b"\x08", msgspec.msgpack.encode(key), b"\x01"],
            [b"\x08", b"\x09", msgspec.msgpack.encode(key["request_id"])],
        ):
            dealer.send_multipart(frames)
            assert dealer.poll(5_000)
            answers.append(dealer.recv_multipart())
    assert [b"\x07", b"\x08"] == answers[0]
    hit: int = msgspec.msgpack.decode(answers[1][2])
    return hit


def test_an_unknown_field_of_a_key_is_refused_and_misses(address: str, user: V1User) -> None:
    """On the release it is dropped and hits: the negative control of this test."""
    assert user.store(PROMPT, 5.0)
    key = user.key(PROMPT, rank=None)
    assert raw_lookup(address, user, key) == 4
    assert raw_lookup(address, user, {**key, "extra_keys": [["mm", "image-a", 0]]}) == 0
    assert raw_lookup(address, user, {**key, "lora_name": "adapter-b"}) == 0


def test_a_request_id_used_again_serves_each_identity_its_own_kv(user: V1User) -> None:
    """On the release the second identity's KV is served as the first's."""
    shared = user.new_request_id()
    user.retrieve_range(PROMPT, request_id=shared, salt="x")
    for tokens, salt, fill in ((PROMPT, "x", 10.0), (OTHER, "x", 50.0), (PROMPT, "y", 70.0)):
        assert user.client.call(
            "store",
            client=user.number,
            key=user.key(tokens, request_id=shared, salt=salt),
            instance=user.instances[0],
            fills=[fill] * 4,
        )
    user.end(shared)
    assert [10.0] * 4 == user.retrieve(PROMPT, salt="x")
    assert [50.0] * 4 == user.retrieve(OTHER, salt="x")
    assert [70.0] * 4 == user.retrieve(PROMPT, salt="y")


def test_what_the_release_leaves_unanswered_is_answered(address: str, user: V1User) -> None:
    """A key as an array, without readers, or with a token past 2**32: a miss in the type the client waits for."""
    key = user.key(PROMPT, rank=None)
    for bad in (list(key.values()), {**key, "token_ids": [2**32, *PROMPT]}, {**key, "cache_salt": "a/b"}):
        assert [b"\x07", b"\x08"] == ask(address, [b"\x07", b"\x08", msgspec.msgpack.encode(bad), b"\x01"])
    assert user.store(PROMPT, 5.0)
    unsaid = {name: value for name, value in key.items() if name != "num_kv_readers"}
    assert raw_lookup(address, user, unsaid) == 4


def test_a_hostile_pickle_from_a_real_client_is_refused_and_runs_nothing(user: V1User, tmp_path: Path) -> None:
    """At both levels; False at once, and the next store of the same client works."""
    proof = tmp_path / "ran"
    hostile = b"cos\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR."
    good = write_tensors([PickledTensor("float16", (2, 1, CHUNK, 8), bytes(512))] * 4)
    magic = good.index(b"\x80\x02\x8a\x0a")
    inner = good[:magic] + hostile + good[magic + len(hostile) :]

    def commit(data: bytes) -> bool:
        arguments = {"key": user.key(PROMPT), "instance": user.instances[0], "data": data.hex()}
        stored: bool = user.client.call("commit_raw", client=user.number, **arguments)
        return stored

    assert [False] * 5 == [commit(data) for data in (hostile, inner, bytes(1000), b"", good[:-5])]
    assert not proof.exists()
    assert user.lookup(PROMPT) == 0
    assert commit(good)
    assert [0.0] * 4 == user.retrieve(PROMPT)


def test_operations_of_other_modes_fail_at_once(user: V1User) -> None:
    """A client in LMCache-driven mode, or with blending, is told no; it does not wait."""
    for operation, arguments, failure in (
        ("store", [1, [[1]], None], ["", False]),
        ("retrieve", [1, [[1]], None, 0], ["", False]),
        ("store_q", [1, [[1]], None], ["", False]),
        ("cb_retrieve_pre_computed", [[], [[1]], 1, None], ["", False]),
        ("cb_reorder_plan", [0, 5], []),
    ):
        told = user.client.call(
            "keyed", client=user.number, operation=operation, key=user.key(PROMPT), arguments=arguments
        )
        assert failure == told, operation
    blended = user.client.call(
        "keyed", client=user.number, operation="cb_unified_lookup", key=user.key(PROMPT), arguments=[1]
    )
    assert (0, []) == (blended["prefix_coverage_tokens"], blended["non_prefix_segments"])
    assert [1, False] == user.rpc("cb_protocol_handshake", 1)
    assert user.rpc("unregister_kv_cache", 1) is None
    assert user.rpc("p2p_lookup_and_lock", [], {}) == 0
    assert user.rpc("p2p_query_lookup_results", 0) == []


# ---- beside v2 clients on the same port


def test_a_v2_client_and_a_v1_client_share_the_port_and_nothing_else(address: str, user: V1User) -> None:
    """Same model, tokens, chunk size and salt: each hits its own values; a v1 clear leaves the v2 entries."""
    space = KeySpace(user.model, chunk_size=CHUNK, kv_dtype="float16")
    keys = chunk_keys(space, PROMPT, [CacheSalt("tenant")])
    with CacheClient(address, space) as client:
        assert client.lookup("a", keys).hit_chunks == 0
        assert user.store(PROMPT, 5.0, salt="tenant")
        assert client.lookup("b", keys).hit_chunks == 0
        assert client.store("b", keys, [torch.full((2, 1, CHUNK, 8), 90.0, dtype=torch.float16)] * 4).stored == 4
        found = client.lookup("c", keys)
        assert found.hit_chunks == 4
        assert found.lease is not None
        chunks = client.retrieve(found.lease, 4).chunks
        assert [90.0] * 4 == [float(chunk.tensors[0].flatten()[0]) for chunk in chunks]
        assert [5.0, 6.0, 7.0, 8.0] == user.retrieve(PROMPT, salt="tenant")
        client.end_session("c")
        user.rpc("clear", True)
        assert user.lookup(PROMPT, salt="tenant") == 0
        assert client.lookup("d", keys).hit_chunks == 4
        assert "v1.refused.failed" not in client.status()


def test_an_engine_registers_anew_when_its_server_was_replaced_between_two_pings(real_client: RealClient) -> None:
    """The release's own heartbeat finds the way back; an engine without one stays unknown, and misses."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with our_server(address=address):
        beating, mute = V1User(real_client, address), V1User(real_client, address)
        assert (beating.store(PROMPT, 5.0), mute.store(PROMPT, 6.0)) == (True, True)
        real_client.call("heartbeat", client=beating.number, instance=beating.instances[0], interval=0.2)
    with our_server(address=address):
        ends = time.monotonic() + 30
        while not beating.store(PROMPT, 5.0):
            assert time.monotonic() < ends
        assert [5.0, 6.0, 7.0, 8.0] == beating.retrieve(PROMPT)
        assert (mute.store(PROMPT, 6.0), mute.lookup(PROMPT)) == (False, 0)
