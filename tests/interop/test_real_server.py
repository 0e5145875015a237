"""The released LMCache 0.5.6 server as it is: what the design rests on, and the negative controls of every detector.

Each wrong hit below is the real server's. A test of ours that looks for wrong hits in the same way and finds none has
therefore looked.
"""

import msgspec
import pytest
import zmq

from compat.v1 import mp_chunk_hashes, v1_token_ids
from compat.v1.generations import V1Generation
from keying import MultimodalItem
from tests.compat.captured_frames import CHUNK_SIZE, captured_exchanges
from tests.interop.environment import needs_lmcache
from tests.interop.real_client import RealClient, V1User
from tests.interop.real_server import RealServer, ask

pytestmark = [pytest.mark.interop, pytest.mark.zmq, needs_lmcache]

PROMPT = list(range(1000, 1070))
"""Four chunks of 16 and a tail."""

LOOKUP = b"\x08"
PLACEHOLDER = 151_655


@pytest.fixture
def user(real_server: RealServer, real_client: RealClient) -> V1User:
    """An engine with a model of its own on the released server."""
    return V1User(real_client, real_server.address)


def raw_lookup(server: RealServer, user: V1User, key: dict[str, object]) -> int | None:
    """A lookup in frames of our own making, then its result by the real client; None where there was no answer."""
    frames = [b"\x07", LOOKUP, msgspec.msgpack.encode(key), b"\x01"]
    if ask(server.address, frames, seconds=1.0) is None:
        return None
    hit: int = user.rpc("wait_prefetch_status", key["request_id"], 5.0)
    user.end(str(key["request_id"]))
    return hit


def test_the_captured_exchange_is_still_what_the_release_says(real_server: RealServer) -> None:
    """Every captured request gets the captured answer, frame by frame."""
    with (
        RealServer(real_server.log.with_name("captured.log"), chunk_size=CHUNK_SIZE) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.connect(server.address)
        for exchange in captured_exchanges():
            dealer.send_multipart(exchange.request)
            assert dealer.poll(10_000), exchange.op
            got = dealer.recv_multipart()
            assert len(exchange.response) == len(got), exchange.op
            assert [want for want in exchange.response if want is not None] == [
                frame for want, frame in zip(exchange.response, got, strict=True) if want is not None
            ], exchange.op


def test_what_is_stored_is_hit_with_its_own_values_and_another_salt_misses(user: V1User) -> None:
    """The harness is sound: right hits are hits, and the values are those of the store."""
    assert [{"shm_name": "", "pool_size": 0}] == user.registered
    assert user.lookup(PROMPT) == 0
    assert user.store(PROMPT, 5.0)
    assert user.lookup(PROMPT) == 4
    assert user.lookup(PROMPT, how="query") == 4
    assert [5.0, 6.0, 7.0, 8.0] == user.retrieve(PROMPT)
    assert user.lookup(PROMPT, salt="tenant") == 0
    assert user.lookup([7, *PROMPT[1:]]) == 0


def test_an_unknown_field_of_a_key_is_dropped_and_the_request_is_a_wrong_hit(
    real_server: RealServer, user: V1User
) -> None:
    """Negative control: extra keys sent to this server are served without isolation."""
    assert user.store(PROMPT, 1.0)
    key = user.key(PROMPT, rank=None)
    assert raw_lookup(real_server, user, key) == 4
    assert raw_lookup(real_server, user, {**key, "extra_keys": [["mm", "image-a", 0]]}) == 4


def test_adapters_hit_the_entries_of_the_base_model(real_server: RealServer, user: V1User) -> None:
    """Negative control: an adapter is in no key, wherever it is written."""
    assert user.store(PROMPT, 1.0)
    assert user.lookup(PROMPT, configs={"lmcache.tag.lora": "adapter-a"}) == 4
    assert user.lookup(PROMPT, configs={"lora_name": "adapter-b"}) == 4
    assert raw_lookup(real_server, user, {**user.key(PROMPT, rank=None), "lora_name": "adapter-b"}) == 4


def test_placeholder_tokens_of_two_images_hit_each_other(user: V1User) -> None:
    """Negative control: raw and int16 producers are wrong on this server; sha31 is not."""
    prompt = [*PROMPT[:8], *[PLACEHOLDER] * 40, *PROMPT[:16]]
    first, second = (MultimodalItem(name, 8, 40) for name in ("ab" * 31 + "c0ff", "cd" * 31 + "c0ff"))
    found = {}
    for generation, fill in ((V1Generation.RAW, 10.0), (V1Generation.INT16, 20.0), (V1Generation.SHA31, 30.0)):
        assert user.store(v1_token_ids(prompt, [first], generation=generation), fill)
        assert user.lookup(v1_token_ids(prompt, [first], generation=generation)) == 4
        found[generation] = user.lookup(v1_token_ids(prompt, [second], generation=generation))
    assert {V1Generation.RAW: 4, V1Generation.INT16: 4, V1Generation.SHA31: 0} == found


def test_a_request_id_used_again_serves_one_identity_the_kv_of_another(user: V1User) -> None:
    """Negative control: under one id, the second salt's KV is stored as the first salt's, and read as such."""
    shared = user.new_request_id()
    user.retrieve_range(PROMPT, request_id=shared, salt="x")
    assert user.client.call(
        "store",
        client=user.number,
        key=user.key([9, *PROMPT[1:]], request_id=shared, salt="x"),
        instance=user.instances[0],
        fills=[50.0, 51.0, 52.0, 53.0],
    )
    user.end(shared)
    assert [50.0, 51.0, 52.0, 53.0] == user.retrieve(PROMPT, salt="x")
    assert user.lookup([9, *PROMPT[1:]], salt="x") == 0


def test_what_it_cannot_read_is_never_answered(real_server: RealServer, user: V1User) -> None:
    """An unknown operation, a wrong number of payloads, a key as an array: silence, and a server that lives."""
    key = user.key(PROMPT, rank=None)
    readable = {name: value for name, value in key.items() if name != "num_kv_readers"}
    silent = [
        [msgspec.msgpack.encode("negotiate_schema"), b"\x01"],
        [msgspec.msgpack.encode(4095)],
        [b"\x0b"],
        [b"\x16"],
        [LOOKUP, msgspec.msgpack.encode(list(key.values())), b"\x01"],
        [LOOKUP, msgspec.msgpack.encode(readable), b"\x01"],
        [LOOKUP, msgspec.msgpack.encode({**key, "token_ids": [2**32, *PROMPT]}), b"\x01"],
    ]
    answered = [frames for frames in silent if ask(real_server.address, [b"\x07", *frames], seconds=0.3) is not None]
    # a lookup without the number of readers is only refused where the model is registered
    assert [] == answered
    assert real_server.alive
    assert [b"\x07", b"\x18", b"\xa2OK"] == ask(real_server.address, [b"\x07", b"\x18"])


def test_a_message_of_protocol_2_sent_by_mistake_is_a_noop_with_too_many_payloads(real_server: RealServer) -> None:
    """The second frame of every v2 message leaves this server alone; a clear in its place is executed."""
    assert ask(real_server.address, [b"XK2\0", b"\x18", b"header", b"payload"], seconds=0.3) is None
    assert real_server.alive
    assert [b"XK2\0", b"\x14"] == ask(real_server.address, [b"XK2\0", b"\x14", b"\xc2"])


def test_chunk_hashes_are_those_of_the_release(user: V1User) -> None:
    """A prompt that shares three chunks hits three: the chain is what `compat.v1` computes."""
    other = [*PROMPT[:48], 1, *PROMPT[49:]]
    assert user.store(PROMPT, 1.0)
    assert user.lookup(other) == 3
    assert mp_chunk_hashes(PROMPT, 16)[:3] == mp_chunk_hashes(other, 16)[:3]
    assert mp_chunk_hashes(PROMPT, 16)[3] != mp_chunk_hashes(other, 16)[3]
