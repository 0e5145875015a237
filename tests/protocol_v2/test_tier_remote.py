"""The remote tier over each kind of shared store: a real Redis, a bucket in memory, and one in a folder."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import obstore
import pytest
import redis
from obstore.store import LocalStore, MemoryStore

from keying import KeySpace
from protocol_v2.codes import MissReason
from protocol_v2.storage.descriptions import parse_description
from protocol_v2.storage.envelope import encode_header
from protocol_v2.storage.errors import EnvelopeError, ObjectMissError
from protocol_v2.storage.names import ObjectId, Shard, description_name
from protocol_v2.tiers import Tier, TierError, TierFullError, TierIOError, TierReadOnlyError, TierUsage
from protocol_v2.tiers.object_store import ObjectStore
from protocol_v2.tiers.redis_store import RedisStore
from protocol_v2.tiers.remote import STUCK_SECONDS, RemoteTier
from tests.protocol_v2.storage_samples import OTHER_ROOT, ROOT, chain, make_object
from tests.redis_server import RedisServer, needs_redis, redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from protocol_v2.storage import StoredObject

KEYS = chain("remote", 6)
SPACE = KeySpace("org/m", chunk_size=16, kv_dtype="bfloat16")


class Bytes:
    """A store's contents, past the tier: what another server, an operator or an accident sees."""

    def __init__(self, store: redis.Redis | MemoryStore | LocalStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> bytes | None:
        if isinstance(self._store, redis.Redis):
            return cast("bytes | None", self._store.get(name))
        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def __setitem__(self, name: str, value: bytes) -> None:
        if isinstance(self._store, redis.Redis):
            self._store.set(name, value)
        else:
            obstore.put(self._store, name, value)

    def names(self) -> set[str]:
        """All of them."""
        if isinstance(self._store, redis.Redis):
            return {name.decode() for name in cast("list[bytes]", self._store.keys("*"))}
        return {one["path"] for page in obstore.list(self._store) for one in page}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A real Redis for this module."""
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def everything(server: RedisServer) -> Iterator[Any]:
    """A client that may do everything there."""
    with server.client() as client:
        yield client


@pytest.fixture(params=[pytest.param("redis", marks=needs_redis), "memory", "file"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RemoteTier, Bytes]]:
    """An empty store, as the tier and past it."""
    if request.param == "redis":
        client = request.getfixturevalue("everything")
        client.flushall()
        url = request.getfixturevalue("server").url
        tier = RemoteTier(RedisStore(url, timeout=10.0), url)
        contents = Bytes(client)
    else:
        bucket = MemoryStore() if request.param == "memory" else LocalStore(tmp_path)
        tier = RemoteTier(ObjectStore(bucket, request.param), request.param)
        contents = Bytes(bucket)
    try:
        yield tier, contents
    finally:
        tier.close()


def whole(obj: StoredObject) -> bytes:
    """An object's bytes by the specification: header, and right after it the payload."""
    return encode_header(obj) + b"".join(bytes(buffer) for buffer in obj.buffers)


def test_it_is_a_tier(shared: tuple[RemoteTier, Bytes]) -> None:
    """It has the calls that every tier has, and holds nothing to begin with."""
    tier: Tier = shared[0]
    assert ("remote", TierUsage(0, 0), []) == (tier.name, tier.usage(), list(tier.names()))


@pytest.mark.parametrize("size", [0, 64, 3_000_000])
def test_objects_come_and_go(shared: tuple[RemoteTier, Bytes], size: int) -> None:
    """What was put is what comes back, by its whole identity; another shard, space or key is absent."""
    tier, _ = shared
    obj = make_object(KEYS, 1, size=size)
    others = [ObjectId(ROOT, KEYS[1], Shard(2, 1, 0)), ObjectId(OTHER_ROOT, KEYS[1], Shard()), make_object(KEYS, 2).id]
    assert not tier.contains(obj.id)
    tier.put(obj)
    assert tier.contains(obj.id)
    got = tier.get(obj.id)
    assert (obj.envelope, b"".join(obj.buffers)) == (got.envelope, b"".join(got.buffers))
    assert all(buffer.readonly for buffer in got.buffers)
    assert [False] * 3 == [tier.contains(one) for one in others]
    for one in others:
        with pytest.raises(ObjectMissError) as missed:
            tier.get(one)
        assert MissReason.ABSENT is missed.value.reason
    assert tier.delete(obj.id)
    assert not tier.delete(obj.id)
    assert not tier.contains(obj.id)


def test_names_and_bytes_are_those_of_the_specification(shared: tuple[RemoteTier, Bytes]) -> None:
    """A value is named and wrapped as on disk, so any tool that knows storage schema 2 can read it."""
    tier, contents = shared
    obj = make_object(KEYS, 0, shard=Shard(4, 3, 1))
    tier.put(obj)
    name = f"xk2/{ROOT[:16].hex()}/{KEYS[0].hex()}/w4r3g1"
    assert {name} == contents.names()
    assert whole(obj) == contents[name]
    assert [obj.id.name] == list(tier.names())
    assert TierUsage(1, len(whole(obj))) == tier.usage()


def test_many_are_asked_and_read_in_order(shared: tuple[RemoteTier, Bytes]) -> None:
    """Sizes come in the order asked, with what is absent in its place; values up to the first that is absent."""
    tier, _ = shared
    objects = [make_object(KEYS, place, size=64 + place) for place in range(6)]
    for place in (0, 1, 2, 5):
        tier.put(objects[place])
    assert [True, True, True, False, False, True] == [size is not None for size in tier.sizes([o.id for o in objects])]
    *found, missed = tier.get_many([obj.id for obj in objects])
    assert [bytes(obj.buffers[0]) for obj in objects[:3]] == [
        bytes(one.buffers[0]) for one in found if not isinstance(one, ObjectMissError)
    ]
    assert isinstance(missed, ObjectMissError)


def flipped(data: bytes, place: int) -> bytes:
    """One bit is another."""
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


DAMAGE: dict[str, tuple[Any, MissReason]] = {
    "a bit of the payload": (lambda data: flipped(data, -1), MissReason.CHECKSUM),
    "a bit of the header": (lambda data: flipped(data, 60), MissReason.CHECKSUM),
    "cut off": (lambda data: data[:-1], MissReason.ENVELOPE_INVALID),
    "cut to almost nothing": (lambda data: data[:3], MissReason.ENVELOPE_INVALID),
    "something behind it": (lambda data: data + b"x", MissReason.ENVELOPE_INVALID),
    "somebody else's value": (lambda _data: b"hello", MissReason.ENVELOPE_INVALID),
    "another chunk's object": (lambda _data: whole(make_object(KEYS, 5)), MissReason.IDENTITY_MISMATCH),
    "a later schema": (lambda data: data[:8] + b"\x03" + data[9:], MissReason.SCHEMA_TOO_NEW),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_what_is_broken_is_a_typed_miss_and_set_aside(shared: tuple[RemoteTier, Bytes], how: str) -> None:
    """It is never served, is moved with its bytes to quarantine, costs nobody a second look, and can be stored anew."""
    tier, contents = shared
    change, reason = DAMAGE[how]
    obj, sound = make_object(KEYS, 1), make_object(KEYS, 2)
    tier.put(obj)
    tier.put(sound)
    bad = change(whole(obj))
    contents[str(obj.id.name)] = bad
    with pytest.raises(EnvelopeError) as missed:
        tier.get(obj.id)
    assert reason is missed.value.reason
    assert not tier.contains(obj.id)
    aside = f"xk2.quarantine/{reason.name.lower()}/{str(obj.id.name).removeprefix('xk2/')}"
    assert {aside, str(sound.id.name)} == contents.names()
    assert bad == contents[aside]
    tier.put(obj)
    assert bytes(obj.buffers[0]) == bytes(tier.get(obj.id).buffers[0])
    assert sound.envelope == tier.get(sound.id).envelope


def test_what_was_replaced_meanwhile_is_not_set_aside(shared: tuple[RemoteTier, Bytes]) -> None:
    """Between reading broken bytes and moving them another server may have stored a good object: that one stays."""
    tier, contents = shared
    obj = make_object(KEYS, 1)
    tier.put(obj)
    name = str(obj.id.name)
    store: Any = tier._store
    store.move(name, "xk2.quarantine/x", b"the bytes that were read before")
    assert bytes(obj.buffers[0]) == bytes(tier.get(obj.id).buffers[0])
    store.move("xk2/not/there", "xk2.quarantine/x", b"gone meanwhile")
    assert {name} == contents.names()
    store.move(name, "xk2.quarantine/x", whole(obj))
    assert {"xk2.quarantine/x"} == contents.names()


def test_what_cannot_be_set_aside_is_absent_for_a_while(
    shared: tuple[RemoteTier, Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes no writes keeps the broken value; it is a miss, and no lookup is told that it is there."""
    tier, contents = shared
    now = [0.0]
    tier.clock = lambda: now[0]
    obj = make_object(KEYS, 1)
    tier.put(obj)
    contents[str(obj.id.name)] = b"broken"

    def refuse(*_: object) -> None:
        raise TierReadOnlyError("no")

    monkeypatch.setattr(tier._store, "move", refuse)
    assert tier.contains(obj.id)
    with pytest.raises(EnvelopeError):
        tier.get(obj.id)
    assert not tier.contains(obj.id)
    now[0] += STUCK_SECONDS
    assert tier.contains(obj.id)
    with pytest.raises(EnvelopeError):
        tier.get(obj.id)
    tier.put(obj)
    assert tier.contains(obj.id)


def test_what_others_keep_there_is_left_alone(shared: tuple[RemoteTier, Bytes]) -> None:
    """Names of LMCache, of other schemas, and almost-names are neither listed, read nor changed."""
    tier, contents = shared
    obj = make_object(KEYS, 0)
    name = str(obj.id.name)
    foreign = [
        "vllm@org/m@1@0@7a2b9c@bfloat16",
        "org--m@bfloat16@4@0@00ff",
        name.replace("xk2/", "xk3/"),
        name + "x",
        f"xk2/{ROOT[:16].hex()}/note",
        "lmcache:" + name,
    ]
    for one in foreign:
        contents[one] = b"theirs"
    tier.put(obj)
    assert [obj.id.name] == list(tier.names())
    assert [None] == tier.sizes([make_object(KEYS, 1).id])
    assert {*foreign, name} == contents.names()
    assert all(b"theirs" == contents[one] for one in foreign)


def test_spaces_are_described_once(shared: tuple[RemoteTier, Bytes]) -> None:
    """The readable description stands beside the objects; a second server leaves it as it is."""
    tier, contents = shared
    tier.describe(SPACE)
    text = contents[description_name(SPACE.root)]
    assert text is not None
    assert SPACE == parse_description(text)
    contents[description_name(SPACE.root)] = b"an operator's words"
    tier.describe(SPACE)
    assert b"an operator's words" == contents[description_name(SPACE.root)]
    assert [] == list(tier.names())


def test_threads_write_and_read_one_name(shared: tuple[RemoteTier, Bytes]) -> None:
    """Many writers of one name and a reader: the reader gets one of the values, whole, every time."""
    tier, _ = shared
    objects = [make_object(KEYS, 0, size=4096, fill=fill) for fill in range(4)]
    tier.put(objects[0])
    threads = [threading.Thread(target=lambda o=obj: [tier.put(o) for _ in range(20)]) for obj in objects]
    for thread in threads:
        thread.start()
    for _ in range(40):
        assert 1 == len(set(bytes(tier.get(objects[0].id).buffers[0])))
    for thread in threads:
        thread.join()


# ---- Redis


@pytest.fixture
def empty(everything: Any) -> Any:
    """The real Redis, empty, as a client that may do everything."""
    everything.flushall()
    return everything


@needs_redis
def test_a_redis_key_of_another_type_is_absent(empty: Any, server: RedisServer) -> None:
    """A list under one of our names is no object: not there, not read, and replaced by a store."""
    tier = RemoteTier(RedisStore(server.url, timeout=10.0), server.url)
    obj = make_object(KEYS, 0)
    empty.rpush(str(obj.id.name), "a", "b")
    assert not tier.contains(obj.id)
    with pytest.raises(ObjectMissError) as missed:
        tier.get(obj.id)
    assert MissReason.ABSENT is missed.value.reason
    assert [] == list(tier.names())
    tier.put(obj)
    assert obj.envelope == tier.get(obj.id).envelope
    tier.close()


@needs_redis
def test_redis_values_go_after_their_time(empty: Any, server: RedisServer) -> None:
    """With a ttl values expire and descriptions stay; without one the server decides."""
    obj = make_object(KEYS, 0)
    for ttl in (3600.0, None):
        tier = RemoteTier(RedisStore(server.url, timeout=10.0, ttl=ttl), server.url)
        tier.put(obj)
        tier.describe(SPACE)
        left = empty.ttl(str(obj.id.name))
        assert (3500 < left <= 3600) if ttl else left == -1
        assert -1 == empty.ttl(description_name(SPACE.root))
        tier.close()


@needs_redis
def test_asking_redis_counts_as_a_use(empty: Any, server: RedisServer) -> None:
    """What lookups ask for is not what the server evicts first."""
    empty.config_set("maxmemory-policy", "allkeys-lfu")
    try:
        tier = RemoteTier(RedisStore(server.url, timeout=10.0), server.url)
        used, unused = make_object(KEYS, 0), make_object(KEYS, 1)
        tier.put(used)
        tier.put(unused)
        for _ in range(100):
            tier.sizes([used.id])
        counts = [empty.object("freq", str(one.id.name)) for one in (used, unused)]
        assert counts[0] > counts[1]
        tier.close()
    finally:
        empty.config_set("maxmemory-policy", "noeviction")


@needs_redis
def test_a_full_redis_is_full(empty: Any, server: RedisServer) -> None:
    """No room is its own error, with what to do; what was there still is."""
    tier = RemoteTier(RedisStore(server.url, timeout=10.0), server.url)
    obj = make_object(KEYS, 0)
    tier.put(obj)
    empty.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(TierFullError, match="maxmemory-policy"):
            tier.put(make_object(KEYS, 1, size=2_000_000))
        assert obj.envelope == tier.get(obj.id).envelope
    finally:
        empty.config_set("maxmemory", "0")
        tier.close()


@needs_redis
def test_a_user_without_rights_is_read_only(empty: Any, server: RedisServer) -> None:
    """A user that may only read reads; its broken finds stay where they are, and are absent for it."""
    empty.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+get", "+mget", "+strlen", "+ping")
    tier = RemoteTier(RedisStore(server.url.replace("redis://", "redis://reader:pw@"), timeout=10.0), "x")
    writer = RemoteTier(RedisStore(server.url, timeout=10.0), "x")
    obj = make_object(KEYS, 0)
    writer.put(obj)
    assert obj.envelope == tier.get(obj.id).envelope
    with pytest.raises(TierReadOnlyError):
        tier.put(obj)
    empty.set(str(obj.id.name), b"broken")
    with pytest.raises(EnvelopeError):
        tier.get(obj.id)
    assert (False, True) == (tier.contains(obj.id), writer.contains(obj.id))
    tier.close()
    writer.close()


@needs_redis
def test_a_wrong_password_is_told_without_it(empty: Any, server: RedisServer) -> None:
    """The error names what to check and holds neither user, password nor path."""
    tier = RemoteTier(RedisStore(server.url.replace("redis://", "redis://nobody:hunter2@"), timeout=10.0), "x")
    with pytest.raises(TierIOError, match="check user and password") as refused:
        tier.ping()
    assert not any(secret in str(refused.value) for secret in ("hunter2", "nobody", str(server.port)))
    tier.close()


@needs_redis
def test_a_redis_that_hangs_or_dies_is_an_error_in_time() -> None:
    """Every call ends within its bound with a typed error; after a restart calls work again on the same tier."""
    obj = make_object(KEYS, 0)
    with redis_server() as server:
        tier = RemoteTier(RedisStore(server.url, timeout=0.2), server.url)
        tier.put(obj)
        server.freeze()
        calls: list[Any] = [
            tier.ping,
            lambda: tier.put(obj),
            lambda: tier.get(obj.id),
            lambda: tier.sizes([obj.id]),
            lambda: tier.delete(obj.id),
            lambda: list(tier.names()),
            lambda: tier.describe(SPACE),
        ]
        for call in calls:
            with pytest.raises(TierIOError, match="TimeoutError"):
                call()
        server.thaw()
        with server.client() as client:
            client.ping()
        assert obj.envelope == tier.get(obj.id).envelope
        server.stop()
        for call in calls:
            with pytest.raises(TierIOError, match="ConnectionError"):
                call()
        server.start()
        assert not tier.contains(obj.id)
        tier.put(obj)
        assert obj.envelope == tier.get(obj.id).envelope
        tier.close()


@needs_redis
def test_a_value_that_redis_does_not_take_is_refused_before_it_is_sent(
    empty: Any, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest string of the server bounds an object; one byte less is kept."""
    store = RedisStore(server.url, timeout=10.0)
    obj = make_object(KEYS, 0, size=5000)
    tier = RemoteTier(store, "x")
    monkeypatch.setattr(store, "max_value", len(whole(obj)) - 1, raising=False)
    with pytest.raises(TierFullError, match="redis takes"):
        tier.put(obj)
    assert not tier.contains(obj.id)
    monkeypatch.setattr(store, "max_value", len(whole(obj)), raising=False)
    tier.put(obj)
    assert tier.contains(obj.id)
    tier.close()


# ---- buckets


def test_a_bucket_that_fails_is_typed(tmp_path: Path) -> None:
    """A folder that cannot be used fails by type, and the text holds no path."""
    (tmp_path / "xk2").write_text("a file where a folder must be")
    tier = RemoteTier(ObjectStore(LocalStore(tmp_path), "file"), "x")
    with pytest.raises(TierError) as failed:
        tier.put(make_object(KEYS, 0))
    assert str(tmp_path) not in str(failed.value)
    tier.close()
