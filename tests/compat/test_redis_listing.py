"""Audit and purge of a database of a real redis-server: what can be named is, and nothing else is touched."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from compat.audit import Group, Holding, audit
from compat.purge import Criteria, Verdict
from compat.redis_listing import PASSWORD_VARIABLE, RedisError, RedisListing, is_redis_url
from tests.compat.mixed_database import (
    DESCRIPTION,
    ENGINE,
    ENGINE_PARTS,
    EVERYTHING,
    IDLE,
    INTERNAL,
    JUNK,
    NOT_UTF8,
    PLAIN,
    PREFIXED,
    SALTED,
    V1,
    V2,
    WRONG_TYPE,
    fill,
    keys,
    names,
)
from tests.redis_server import RedisServer, needs_redis, redis_server

pytestmark = [needs_redis, pytest.mark.zmq]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One server for the module; every test begins with an empty database."""
    with redis_server() as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    """A client of its own for the test, on a database with all that `mixed_database` has."""
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.flushall()
        fill(client)
        yield client


def purged(server: RedisServer, client: Any, criteria: Criteria, *, page: int = 7) -> set[str]:
    """Keys that a real purge removed, and said that it did."""
    before = names(client)
    with RedisListing(server.url, page=page) as listing:
        said = {stored.name for stored, outcome in listing.purge(criteria, dry_run=False) if outcome is Verdict.RETIRED}
    gone = before - names(client)
    assert said == gone
    return gone


def outcome_of(listing: RedisListing, criteria: Criteria, name: str) -> Verdict:
    """What a dry run says of one key."""
    return {stored.name: outcome for stored, outcome in listing.purge(criteria)}[name]


# ---- audit


@pytest.mark.parametrize("page", [1, 5, 512])
def test_a_mixed_database_is_counted_by_schema_format_model_and_salt(
    server: RedisServer, client: Any, page: int
) -> None:
    """Each key is counted once, under what its name says, whatever the page; other databases do not show."""
    with server.client(db=1) as other:
        other.set(PLAIN, b"1")
    with RedisListing(server.url, page=page) as listing:
        assert len(EVERYTHING) == listing.total()
        counts = audit(listing.names(), listing.described_models(), listing.kind)
    plain: Any = {"ambiguous": False, "salted": None}
    assert {
        Group(Holding.ENTRY, 1, "native", "org/one", ambiguous=False, salted=False): 1,
        Group(Holding.ENTRY, 1, "native", "org/one", ambiguous=False, salted=True): 1,
        Group(Holding.ENTRY, 1, "valkey", "org/one", ambiguous=False, salted=False): 1,
        Group(Holding.ENTRY, 1, "engine-key", "org/two", ambiguous=False, salted=False): 1,
        Group(Holding.ENTRY, 1, "engine-redis", "org/other", ambiguous=False, salted=False): 2,
        Group(Holding.ENTRY, 2, "xk2", "org/two", **plain): len(V2),
        Group(Holding.DESCRIPTION, 2, None, None, **plain): 1,
        Group(Holding.INTERNAL, 2, None, None, **plain): len(INTERNAL),
        Group(Holding.UNRECOGNISED, None, None, None, **plain): len(JUNK) + 2,  # the list, and what is no UTF-8
    } == {group: count.names for group, count in counts.items()}
    for count in counts.values():
        assert 100 * count.names < count.n_bytes < 1000 * count.names  # values of 100 bytes, and what the server adds


def test_an_audit_is_no_use_of_a_key(server: RedisServer, client: Any) -> None:
    """Idle times are as before, so a second audit and the server's eviction see the same; STRLEN would not do."""
    for _ in range(2):
        with RedisListing(server.url) as listing:
            ages = {stored.name: stored.modified for stored in listing.names()}
            listing.described_models()
        assert IDLE <= client.object("idletime", PLAIN) < IDLE + 60
    assert IDLE <= client.time()[0] - (ages[PLAIN] or 0) < IDLE + 60
    client.strlen(SALTED)
    assert 60 > client.object("idletime", SALTED)


def test_a_policy_that_hides_idle_times_leaves_the_age_unknown_and_nothing_goes_by_it(
    server: RedisServer, client: Any
) -> None:
    """Under LFU the age is unknown: counted so, and kept by an age; by schema alone it goes."""
    client.config_set("maxmemory-policy", "allkeys-lfu")
    with RedisListing(server.url) as listing:
        counts = audit(listing.names(), {}, listing.kind)
        assert {None} == {count.oldest for count in counts.values()}
        assert Verdict.AGE_UNKNOWN is outcome_of(listing, Criteria(schema=1, older_than=1), PLAIN)
    assert set() == purged(server, client, Criteria(older_than=0))
    assert V1 == purged(server, client, Criteria(schema=1))


# ---- purge


def test_a_dry_run_says_what_would_go_and_touches_nothing(server: RedisServer, client: Any) -> None:
    """It is the default."""
    with RedisListing(server.url) as listing:
        said = {stored.name for stored, outcome in listing.purge(Criteria(schema=1)) if outcome is Verdict.RETIRED}
    assert (V1, EVERYTHING) == (said, keys(client))


def test_a_schema_goes_and_nothing_else(server: RedisServer, client: Any) -> None:
    """v1 first, then schema 2; descriptions, what was set aside, junk, a list and names that are no text stay."""
    assert V1 == purged(server, client, Criteria(schema=1))
    assert V2 == purged(server, client, Criteria(schema=2))
    assert {*(name.encode() for name in {*INTERNAL, *JUNK, DESCRIPTION, WRONG_TYPE}), NOT_UTF8} == keys(client)
    assert set() == purged(server, client, Criteria(older_than=0))


def test_a_model_retires_only_what_is_surely_its_own(server: RedisServer, client: Any) -> None:
    """v1 entries by name; schema-2 entries by the description beside them, and without one they stay."""
    assert {PLAIN, SALTED} == purged(server, client, Criteria(models=frozenset({"org/one"}), format="native"))
    assert {PREFIXED} == purged(server, client, Criteria(format="valkey"))
    assert ENGINE_PARTS == purged(server, client, Criteria(schema=1, models=frozenset({"org/other"})))
    kept = client.getset(DESCRIPTION, b"{}")
    assert {ENGINE} == purged(server, client, Criteria(models=frozenset({"org/two"})))
    client.set(DESCRIPTION, kept)
    assert V2 == purged(server, client, Criteria(models=frozenset({"org/two"})))


def test_an_age_retires_what_nobody_used_for_that_long(server: RedisServer, client: Any) -> None:
    """A key that was read a moment ago is young, whenever it was written."""
    client.get(PLAIN)
    client.get(min(V2))
    assert set() == purged(server, client, Criteria(older_than=2 * IDLE))
    assert (V1 | V2) - {PLAIN, min(V2)} == purged(server, client, Criteria(older_than=IDLE - 10))


def test_a_key_that_changed_since_it_was_judged_stays(server: RedisServer, client: Any) -> None:
    """Used, or replaced by another type, between the listing and the removal: the server itself looks once more."""
    old = Criteria(schema=1, older_than=IDLE - 10)
    with RedisListing(server.url) as listing:
        judged = {stored.name: stored for stored in listing.names()}
        client.get(PLAIN)
        client.delete(ENGINE)
        client.delete(SALTED)
        client.rpush(SALTED, b"another thing")
        going = [judged[name] for name in (PLAIN, SALTED, PREFIXED, ENGINE)]
        assert [False, False, True, True] == listing.retire(going, old)
        assert {PLAIN, SALTED} == {PLAIN, SALTED, PREFIXED, ENGINE} & names(client)
        assert [True, False] == listing.retire(going[:2], Criteria(schema=1))


def test_a_purge_says_changed_of_what_was_used_meanwhile(server: RedisServer, client: Any) -> None:
    """The generator is stopped between two pages, a key of a later page is used, and the purge goes on."""
    criteria = Criteria(schema=1, older_than=IDLE - 10)
    with RedisListing(server.url, page=1) as listing:
        running = listing.purge(criteria, dry_run=False)
        outcomes = [next(running)]
        used = min(V1 & names(client))
        client.get(used)
        outcomes += running
    assert {used} == V1 & names(client)
    assert {stored.name: outcome for stored, outcome in outcomes}[used] in {Verdict.NOT_ASKED, Verdict.CHANGED}


def test_an_interrupted_purge_goes_on_where_it_is_run_again(server: RedisServer, client: Any) -> None:
    """A part is done; a second run does the rest and no more; a third finds nothing."""
    with RedisListing(server.url, page=1) as listing:
        for _, outcome in listing.purge(Criteria(schema=1), dry_run=False):
            if outcome is Verdict.RETIRED:
                break
    left = V1 & names(client)
    assert 0 < len(left) < len(V1)
    assert left == purged(server, client, Criteria(schema=1))
    assert set() == purged(server, client, Criteria(schema=1))


def test_a_key_that_scan_tells_twice_counts_once(server: RedisServer, client: Any) -> None:
    """A table that shrinks under a scan repeats keys that were told; each is listed once, and SCAN did repeat some."""
    client.flushall()
    client.config_set("hz", 500)
    with client.pipeline(transaction=False) as pipeline:
        for number in range(8000):
            pipeline.set(f"k{number}", b"1")
        pipeline.execute()
    cursor, raw = client.scan(0, count=100)
    with RedisListing(server.url, page=100) as listing:
        running = listing.names()
        told = [next(running).name for _ in raw]
        assert {key.decode() for key in raw} == set(told)
        client.unlink(*names(client) - set(told))
        deadline = time.monotonic() + 20
        while client.memory_stats()["db.0"]["overhead.hashtable.main"] > 20_000:
            assert time.monotonic() < deadline, "the server did not shrink its table"
        told += [stored.name for stored in running]
    while cursor:
        cursor, more = client.scan(cursor, count=100)
        raw += more
    assert len(set(raw)) < len(raw)
    assert len(told) == len(set(told))
    assert names(client) == set(told)


# ---- the server


def test_every_way_to_name_a_server_reaches_it(server: RedisServer, client: Any) -> None:
    """redis://, valkey:// and unix://, with a database; how it is called has neither query nor user."""
    for url, place in (
        (server.url, server.url),
        (f"valkey://127.0.0.1:{server.port}", f"valkey://127.0.0.1:{server.port}"),
        (f"unix://{server.socket_path}?db=0", f"unix://{server.socket_path}"),
    ):
        with RedisListing(url) as listing:
            assert (place, len(EVERYTHING)) == (listing.place, listing.total())
    with RedisListing(f"redis://127.0.0.1:{server.port}/1") as listing:
        assert [] == list(listing.names())
    assert is_redis_url(server.url)
    assert not is_redis_url("/var/cache/kv")
    assert not is_redis_url("http://127.0.0.1")


def test_a_password_works_from_url_and_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or with a wrong one, an error that says so; no message and no name of the place has it."""
    secret = "s3/cr#t"
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with redis_server(password=secret) as server:
        bare = f"redis://127.0.0.1:{server.port}/0"
        with pytest.raises(RedisError, match="password"):
            RedisListing(bare)
        with pytest.raises(RedisError, match="refuses user or password") as wrong:
            RedisListing(f"redis://:wr0ng@127.0.0.1:{server.port}/0")
        assert "wr0ng" not in str(wrong.value)
        with RedisListing(f"redis://:s3%2Fcr%23t@127.0.0.1:{server.port}/0") as listing:
            assert (bare, 0) == (listing.place, listing.total())
        monkeypatch.setenv(PASSWORD_VARIABLE, secret)
        with RedisListing(bare) as listing:
            assert 0 == listing.total()
        for text in (f"redis://:{secret}@127.0.0.1:{server.port}/0", f"redis://:cr#t@127.0.0.1:{server.port}"):
            with pytest.raises(RedisError, match="percent-encoded") as unread:
                RedisListing(text)
            assert "cr" not in str(unread.value).removeprefix("no URL of a server; write").replace("encoded", "")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1", "redis:/127.0.0.1", "redis://127.0.0.1:port/0", "redis://127.0.0.1/zero", "rdis://x/0"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    """With what to write instead."""
    with pytest.raises(RedisError, match="no URL of a server"):
        RedisListing(url)


def test_a_server_that_is_not_there_or_goes_away_is_one_clear_error() -> None:
    """Dead from the start, or killed between two pages; and a database that the server does not have."""
    with redis_server() as server:
        with server.client() as client:
            fill(client)
        with pytest.raises(RedisError, match="no database of that number"):
            RedisListing(f"redis://127.0.0.1:{server.port}/99")
        with RedisListing(server.url, page=1) as listing:
            running = listing.names()
            next(running)
            server.stop()
            with pytest.raises(RedisError, match=f"127.0.0.1:{server.port}/0: nobody can be reached"):
                list(running)
    with pytest.raises(RedisError, match="Connection refused"):
        RedisListing(server.url)


def test_a_user_who_may_not_is_told_what_is_needed(server: RedisServer, client: Any) -> None:
    """A reader audits; the same user's purge is refused before anything is touched."""
    client.acl_setuser(
        "reader",
        enabled=True,
        nopass=True,
        keys=["*"],
        commands=["+ping", "+dbsize", "+scan", "+type", "+memory", "+object", "+getrange", "+select", "+client"],
    )
    with RedisListing(f"redis://reader:any@127.0.0.1:{server.port}/0") as listing:
        assert len(EVERYTHING) == len(list(listing.names()))
        with pytest.raises(RedisError, match="EVAL and UNLINK"):
            list(listing.purge(Criteria(schema=1), dry_run=False))
    assert EVERYTHING == keys(client)
    client.acl_deluser("reader")
