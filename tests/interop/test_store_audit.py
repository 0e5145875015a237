"""`audit` and `purge` on stores that the released LMCache 0.5.6 server wrote itself: a folder, and a Redis database."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keying import KeySpace, chunk_keys
from protocol_v2.client import CacheClient
from tests.cli.processes import run, serving
from tests.compat.mixed_folder import files
from tests.folder_events import APPEARED, FolderEvents
from tests.interop.environment import needs_lmcache
from tests.interop.real_client import RealClient, V1User
from tests.interop.real_server import RealServer
from tests.protocol_v2.storage_samples import chain, make_object
from tests.redis_server import needs_redis, redis_server

pytestmark = [pytest.mark.interop, pytest.mark.zmq, needs_lmcache]

PROMPT = list(range(3000, 3070))
"""Four chunks of 16 and a tail."""

N_CHUNKS = 4
ONE, OTHER = "org/one", "other"
SPACE = KeySpace(ONE, chunk_size=16, kv_dtype="float16")
KEYS = chunk_keys(SPACE, PROMPT)


def fill_v1(client: RealClient, server: RealServer) -> None:
    """The prompt through the released client: for one model with and without a salt, and for another model."""
    one, other = (V1User(client, server.address, model=model) for model in (ONE, OTHER))
    assert one.store(PROMPT, 5.0)
    assert one.store(PROMPT, 15.0, salt="tenant")
    assert other.store(PROMPT, 25.0)


def served_v1(client: RealClient, server: RealServer, model: str, salt: str = "") -> list[float] | None:
    """What the released server serves for the prompt; another prompt misses."""
    user = V1User(client, server.address, model=model)
    assert user.lookup([7, *PROMPT], salt=salt) == 0
    return user.retrieve(PROMPT, salt=salt)


def served_v2(address: str) -> list[int]:
    """What a v2 server serves for the prompt; another prompt misses."""
    with CacheClient(address, SPACE) as client:
        client.wait_ready(60)
        assert 0 == client.lookup("a", chunk_keys(SPACE, [7, *PROMPT])).hit_chunks
        found = client.lookup("b", KEYS)
        assert found.lease is not None
        return [int(chunk.tensors[0][0]) for chunk in client.retrieve(found.lease, found.hit_chunks).chunks]


def audited(place: str) -> Counter[tuple[str, int | None, str | None, str | None, bool | None]]:
    """Names by what, schema, format, model and salted, as `extra-keys audit` counts them."""
    done = run("audit", place, "--json")
    assert (0, "") == (done.returncode, done.stderr)
    groups: list[dict[str, Any]] = json.loads(done.stdout)["groups"]
    return Counter(
        {(one["what"], one["schema"], one["format"], one["model"], one["salted"]): one["names"] for one in groups}
    )


def purged(place: str, *options: str) -> int:
    """How many names `extra-keys purge` says that it retired, or would."""
    done = run("purge", place, "--json", *options)
    assert (0, "") == (done.returncode, done.stderr)
    retired: int = json.loads(done.stdout)["outcomes"]["retired"]["names"]
    return retired


def edge_names(name: str) -> set[str]:
    """Names that only resemble one that LMCache wrote."""
    model, rank, group, digest = name.removesuffix(".data").split("@")
    return {
        f"{name}.tmp",
        name.removesuffix(".data"),
        f"{name}.data",
        f"@{rank}@{group}@{digest}.data",
        f"{model}@{rank.removeprefix('0x')}@{group}@{digest}.data",
        f"{model}@0X{rank.removeprefix('0x')}@{group}@{digest}.data",
        f"{model}@{rank}@0{group}@{digest}.data",
        f"{model}@{rank}@{group}@{digest[:-1]}.data",
        f"{model}@{rank}@{group}@{digest.upper()}.data",
        f"{model}@{rank}@{group}@{digest}@.data",
        f"{model}@{rank}@{group}@{digest}@a@b.data",
        f"{model}@{rank}@{digest}.data",
        "notes.txt",
        f"xk1/{name}",
        f"xk2/{name}",
    }


def test_a_folder_that_the_release_wrote_is_counted_and_purged_exactly(tmp_path: Path, real_client: RealClient) -> None:
    """Mixed with v2 entries and near misses: exact counts, exact removal, and whatever was left is served on."""
    store = tmp_path / "store"
    store.mkdir()
    adapter = {"type": "fs", "base_path": str(store)}
    with FolderEvents(store, APPEARED) as events, RealServer(tmp_path / "first.log", adapter=adapter) as server:
        fill_v1(real_client, server)
        events.wait_until(lambda: 3 * N_CHUNKS == len(list(store.glob("*.data"))))
    v1 = files(store)
    of_other = {name for name in v1 if name.startswith(f"{OTHER}@")}
    assert (3 * N_CHUNKS, N_CHUNKS) == (len(v1), len(of_other))

    with serving("--store", str(store), "--listen", f"ipc://{tmp_path}/v2.sock", cache_home=tmp_path) as v2_server:
        with CacheClient(v2_server.address, SPACE) as client:
            client.wait_ready(60)
            values = [np.full(64, place, dtype=np.uint8) for place in range(N_CHUNKS)]
            assert N_CHUNKS == client.store("r", KEYS, values).stored
        v2 = files(store) - v1
        junk = edge_names(min(of_other))
        for name in junk:
            (store / name).parent.mkdir(exist_ok=True)
            (store / name).write_bytes(b"0123456789")
        everything = {name: (store / name).lstat().st_mtime_ns for name in v1 | v2 | junk}

        fs = ("entry", 1, "fs")
        assert {
            (*fs, ONE, False): N_CHUNKS,
            (*fs, ONE, True): N_CHUNKS,
            (*fs, OTHER, False): N_CHUNKS,
            ("entry", 2, "xk2", ONE, None): N_CHUNKS,
            ("description", 2, None, None, None): 1,
            ("internal", 2, None, None, None): 1,
            ("unrecognised", None, None, None, None): len(junk),
        } == audited(str(store))
        assert len(v1) == purged(str(store), "--schema", "1")
        assert N_CHUNKS == purged(str(store), "--model", OTHER)
        assert everything == {name: (store / name).lstat().st_mtime_ns for name in files(store)}

        assert 0 == purged(str(store), "--schema", "1", "--model", ONE, "--yes")  # -SEP- may be spelled so in a name
        assert N_CHUNKS == purged(str(store), "--schema", "1", "--model", OTHER, "--yes")
        assert set(everything) - of_other == files(store)
        with RealServer(tmp_path / "second.log", adapter=adapter) as server:
            assert [5.0, 6.0, 7.0, 8.0] == served_v1(real_client, server, ONE)
            assert None is served_v1(real_client, server, OTHER)
            assert list(range(N_CHUNKS)) == served_v2(v2_server.address)
            assert 2 * N_CHUNKS == purged(str(store), "--schema", "1", "--yes")
            assert set(everything) - v1 == files(store)
            assert None is served_v1(real_client, server, ONE, salt="tenant")
        assert list(range(N_CHUNKS)) == served_v2(v2_server.address)
        assert 0 == v2_server.stop()[0]


@needs_redis
def test_a_database_that_the_release_wrote_is_counted_and_purged_exactly(
    tmp_path: Path, real_client: RealClient
) -> None:
    """The same through its native Redis client: exact counts, exact removal, and the rest is served on."""
    objects = [make_object(chain("redis", 3), index) for index in range(3)]
    v2 = {str(one.id.name) for one in objects}
    with redis_server("--notify-keyspace-events", "K$") as redis, redis.client() as client:
        adapter = {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 1}
        with client.pubsub(ignore_subscribe_messages=True) as events:
            events.psubscribe("__keyspace@0__:*")
            with RealServer(tmp_path / "first.log", adapter=adapter) as server:
                fill_v1(real_client, server)
                while client.dbsize() < 3 * N_CHUNKS:
                    assert events.get_message(timeout=60) or client.dbsize() == 3 * N_CHUNKS
        v1 = {key.decode() for key in client.keys("*")}
        native = min(name for name in v1 if name.startswith(OTHER))
        junk = {name.removesuffix(".data") for name in edge_names(native.replace("@", "@0x", 1))} - v1
        for name in v2 | junk:
            client.set(name, b"0123456789")
        everything = v1 | v2 | junk
        form = ("entry", 1, "native")
        assert {
            (*form, ONE, False): N_CHUNKS,
            (*form, ONE, True): N_CHUNKS,
            (*form, OTHER, False): N_CHUNKS,
            ("entry", 2, "xk2", None, None): len(v2),
            ("unrecognised", None, None, None, None): len(junk),
        } == audited(redis.url)
        assert len(v1) == purged(redis.url, "--schema", "1")
        assert everything == {key.decode() for key in client.keys("*")}

        assert 2 * N_CHUNKS == purged(redis.url, "--model", ONE, "--yes")
        with RealServer(tmp_path / "second.log", adapter=adapter) as server:
            assert [25.0, 26.0, 27.0, 28.0] == served_v1(real_client, server, OTHER)
            assert None is served_v1(real_client, server, ONE)
            assert None is served_v1(real_client, server, ONE, salt="tenant")
        assert N_CHUNKS == purged(redis.url, "--schema", "1", "--yes")
        assert v2 | junk == {key.decode() for key in client.keys("*")}
