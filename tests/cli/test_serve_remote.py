"""Servers that share a remote tier, as processes: what one stored the other hits, and what an outage costs."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keying import CacheSalt, ChunkKey, KeySpace, MultimodalItem, chunk_keys
from protocol_v2.client import CacheClient
from protocol_v2.codes import MissReason
from protocol_v2.storage import ObjectId, Shard
from tests.cli.processes import Serve, run, serving
from tests.redis_server import RedisServer, needs_redis, redis_server

pytestmark = pytest.mark.zmq
SPACE = KeySpace("org/m", chunk_size=4, kv_dtype="bfloat16")
CAT = [MultimodalItem("sha256-of-the-cat", offset=4, length=4)]
DOG = [MultimodalItem("sha256-of-the-dog", offset=4, length=4)]
KEYS = chunk_keys(SPACE, range(32), CAT)
SIZE = 50_000
_SESSIONS = itertools.count()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A real Redis."""
    with redis_server() as running:
        yield running


@contextmanager
def fleet(url: str, folder: Path, *options: Sequence[str]) -> Iterator[tuple[list[Serve], list[CacheClient]]]:
    """Servers on one remote tier, each with the options given for it, and a client of each."""
    with ExitStack() as stack:
        servers, clients = [], []
        for number, own in enumerate(options):
            home = folder / str(number)
            home.mkdir(parents=True)
            server = stack.enter_context(serving("--remote", url, "--remote-timeout", "0.3", *own, cache_home=home))
            client = stack.enter_context(CacheClient(server.address, SPACE, timeout=20.0))
            client.wait_ready(20)
            servers.append(server)
            clients.append(client)
        yield servers, clients


def value(place: int) -> Any:
    """What belongs to a chunk."""
    return np.random.default_rng(place).integers(0, 256, SIZE, dtype=np.uint8)


def store(client: CacheClient, keys: Sequence[ChunkKey]) -> None:
    """All chunks of a prompt, acknowledged."""
    result = client.store(f"store {next(_SESSIONS)}", keys, [value(place) for place in range(len(keys))])
    assert (len(keys), None) == (result.stored, result.failure)


def served(client: CacheClient, keys: Sequence[ChunkKey]) -> list[bool]:
    """For each chunk that is served: is it the right one?"""
    session = f"read {next(_SESSIONS)}"
    found = client.lookup(session, keys)
    assert found.failure is None
    if found.lease is None:
        return []
    delivered = client.retrieve(found.lease, found.hit_chunks)
    client.end_session(session)
    return [bool((chunk.tensors[0] == value(place)).all()) for place, chunk in enumerate(delivered.chunks)]


def facts_of(client: CacheClient) -> dict[str, Any]:
    """The remote tier, as the server sees it."""
    return {name.removeprefix("remote."): fact for name, fact in client.status().items() if name.startswith("remote.")}


def wait_for(client: CacheClient, **wanted: Any) -> None:
    """Until the server says so of its remote tier; bounded."""
    deadline = time.monotonic() + 20
    while any(facts_of(client)[name] != fact for name, fact in wanted.items()):
        assert time.monotonic() < deadline, facts_of(client)
        time.sleep(0.02)


def assert_apart(client: CacheClient) -> None:
    """Requests with the same tokens and another identity are served nothing that is not theirs."""
    assert 1 == client.lookup("dog", chunk_keys(SPACE, range(32), DOG)).hit_chunks  # the text before the picture
    assert 0 == client.lookup("salted", chunk_keys(SPACE, range(32), [*CAT, CacheSalt("s")])).hit_chunks


@needs_redis
def test_a_second_server_hits_what_the_first_one_stored(tmp_path: Path, redis: RedisServer) -> None:
    """Equal bytes through the other server at its first lookup, also after the first one is gone; others miss."""
    with fleet(redis.url, tmp_path, [], ["--no-store"]) as (servers, (first, second)):
        store(first, KEYS)
        wait_for(first, written=len(KEYS), queued=0)
        assert [True] * 8 == served(second, KEYS)
        assert_apart(second)
        assert (8, "redis", True) == tuple(facts_of(second)[name] for name in ("read", "kind", "up"))
        assert servers[0].stop()[0] == 0
        store(second, chunk_keys(SPACE, range(100, 132)))
        assert servers[1].stop()[0] == 0
    with fleet(redis.url, tmp_path / "later", []) as (_, (third,)):
        assert [True] * 8 == served(third, KEYS)
        assert [True] * 8 == served(third, chunk_keys(SPACE, range(100, 132)))
        assert_apart(third)
    with redis.client() as client:
        names = {name.decode() for name in client.keys("*")}
    assert {str(ObjectId(SPACE.root, key.digest, Shard()).name) for key in KEYS} < names
    assert 17 == len(names)  # and the description


@needs_redis
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_an_outage_is_misses_in_time_and_then_hits_again(tmp_path: Path, redis: RedisServer, how: str) -> None:
    """While Redis is dead or hangs: no error, no stall, what is local is hit; when it is back, hits through it too."""
    with fleet(redis.url, tmp_path, [], ["--no-store"]) as (_, (first, second)):
        store(first, KEYS)
        wait_for(first, written=len(KEYS))
        redis.stop() if how == "killed" else redis.freeze()
        began = time.monotonic()
        assert [] == served(second, KEYS)
        assert [True] * 8 == served(first, KEYS)
        more = chunk_keys(SPACE, range(200, 232))
        store(second, more)
        assert [True] * 8 == served(second, more)
        assert [] == served(second, KEYS)
        assert time.monotonic() - began < 5.0
        wait_for(second, up=False)
        asked = facts_of(second)["skipped"]
        assert [] == served(second, KEYS)
        assert asked < facts_of(second)["skipped"]
        redis.start() if how == "killed" else redis.thaw()
        wait_for(second, up=True, queued=0)
        assert 1 <= facts_of(second)["trips"]
        wait_for(first, up=True)
        assert [True] * 8 == served(first, more)  # what was stored in the outage came later
        newer = chunk_keys(SPACE, range(300, 332))
        store(first, newer)
        wait_for(first, queued=0)
        assert [True] * 8 == served(second, newer)
        assert_apart(first)


@needs_redis
def test_what_is_wrong_in_redis_is_never_served(tmp_path: Path, redis: RedisServer) -> None:
    """Flipped, cut off, somebody else's and v1 keys: typed misses, set aside or left alone, mended by a store."""
    with fleet(redis.url, tmp_path, ["--no-store"], ["--no-store"], ["--no-store"]) as (_, clients):
        first, second, third = clients
        store(first, KEYS)
        wait_for(first, written=len(KEYS))
        names = [str(ObjectId(SPACE.root, key.digest, Shard()).name) for key in KEYS]
        with redis.client() as client:
            v1 = f"org/m@1@0@{KEYS[0].digest.hex()[:16]}@bfloat16"
            client.set(v1, b"an entry of LMCache")
            client.set(names[0] + "/more", b"foreign")
            flipped = bytearray(client.get(names[5]))
            flipped[-1] ^= 1
            client.set(names[5], bytes(flipped))
            client.set(names[2], client.get(names[2])[:-1])
            client.rename(names[7], names[6])
            assert [True, True] == served(second, KEYS)
            assert MissReason.ENVELOPE_INVALID == second.lookup("again", KEYS).miss
            client.delete(names[2])
            store_again = second.store("mend", KEYS, [value(2)], first=2)
            assert 1 == store_again.stored
            wait_for(second, written=1)
            assert [True] * 5 == served(third, KEYS)
            assert MissReason.CHECKSUM == third.lookup("again", KEYS).miss
            client.set(names[5], b"x" * 500)
            assert (b"an entry of LMCache", b"foreign") == (client.get(v1), client.get(names[0] + "/more"))
            aside = {name.decode().split("/")[1] for name in client.keys("xk2.quarantine/*")}
        assert {"envelope_invalid", "checksum"} == aside
        assert [True] * 5 == served(third, KEYS)
        assert_apart(third)


@needs_redis
def test_a_password_is_used_and_never_shown(tmp_path: Path) -> None:
    """From the environment; neither output, status nor log of a working and of a refused server has it."""
    with redis_server(password="hunter2") as redis:
        right = redis.url.replace("redis://", "valkey://:hunter2@")
        wrong = redis.url.replace("redis://", "valkey://:hunter3@")
        for url in (right, wrong):
            home = tmp_path / url[12:20]
            home.mkdir()
            with serving("--no-store", cache_home=home, environment={"EXTRA_KEYS_REMOTE": url}) as server:
                with CacheClient(server.address, SPACE) as client:
                    client.wait_ready(20)
                    store(client, KEYS)
                    wait_for(client, **({"written": len(KEYS)} if url is right else {"up": False}))
                    facts = facts_of(client)
                code, out, err = server.stop()
            assert 0 == code
            assert not any(secret in f"{facts}{out}{err}" for secret in ("hunter2", "hunter3"))
            assert f"valkey://127.0.0.1:{redis.port}/0" == facts["address"]
            assert (url is wrong) == ("check user and password" in " ".join(err.split()))


def test_a_folder_is_shared_as_a_bucket_is(tmp_path: Path) -> None:
    """file://: two servers share a folder through the same code as S3; equal bytes, other identities miss."""
    with fleet(f"file://{tmp_path}/shared", tmp_path, [], ["--no-store"]) as (_, (first, second)):
        store(first, KEYS)
        wait_for(first, written=len(KEYS), queued=0)
        assert [True] * 8 == served(second, KEYS)
        assert_apart(second)
    names = {str(path.relative_to(tmp_path / "shared")) for path in (tmp_path / "shared").rglob("w*")}
    assert {str(ObjectId(SPACE.root, key.digest, Shard()).name) for key in KEYS} == names


def test_a_server_starts_without_its_remote_tier(tmp_path: Path) -> None:
    """What does not answer is told, not waited for; what is no URL is refused in one line without what was given."""
    with serving("--remote", "redis://127.0.0.1:1/0", cache_home=tmp_path) as server:
        with CacheClient(server.address, SPACE) as client:
            client.wait_ready(20)
            store(client, KEYS)
            assert [True] * 8 == served(client, KEYS)
        code, _, err = server.stop()
    assert (0, True) == (code, "does not answer" in " ".join(err.split()))
    refused = run("serve", "--no-store", "--remote", "http://u:hunter2@h", cache_home=tmp_path)
    assert 1 == refused.returncode
    assert "redis://" in refused.stderr
    assert "hunter2" not in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr


@needs_redis
def test_prefetch_pulls_from_the_remote_tier(tmp_path: Path, redis: RedisServer) -> None:
    """The message says how many chunks are on their way; they are in memory afterwards, whatever happens to Redis."""
    with fleet(redis.url, tmp_path, ["--no-store"], ["--no-store"]) as (_, (first, second)):
        store(first, KEYS)
        wait_for(first, written=len(KEYS))
        assert 0 == second.prefetch("p", chunk_keys(SPACE, range(900, 932))).accepted
        ahead = second.prefetch("p2", KEYS)
        assert (8, 0, None) == (ahead.accepted, ahead.resident, ahead.failure)
        wait_for(second, read=8)
        deadline = time.monotonic() + 20
        while second.prefetch("p3", KEYS).resident < 8:
            assert time.monotonic() < deadline
        redis.stop()
        assert [True] * 8 == served(second, KEYS)
