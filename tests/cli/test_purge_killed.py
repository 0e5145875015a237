"""`extra-keys purge` killed with -9 in the middle: run again, all that was asked for is gone, and nothing else."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import SECONDS, run
from tests.compat import mixed_database
from tests.compat.mixed_folder import ENGINE, PLAIN, RANK, SALTED, files, fill
from tests.compat.v1_writers import MpObject
from tests.folder_events import DELETED, FolderEvents
from tests.redis_server import needs_redis, redis_server

MANY = 10_000
"""Names to retire."""

SOME = 1000
"""Names that are gone when the purge is killed; more by the time that it dies."""


def objects() -> list[MpObject]:
    """As many v1 objects of one model."""
    return [MpObject("one", RANK, 0, number.to_bytes(32, "big")) for number in range(MANY)]


def killed_in_the_middle(place: str, *options: str, some_gone: Callable[[], object]) -> None:
    """Start a purge, wait until it has removed some, and kill it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "extra_keys_cli", "purge", place, *options, "--yes", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        some_gone()
    finally:
        process.kill()
        out, err = process.communicate(timeout=SECONDS)
    assert (-signal.SIGKILL, b"", b"") == (process.returncode, out, err), "it was done before it was killed"


def retired(place: str, *options: str) -> int:
    """How many names a purge to its end says that it retired."""
    done = run("purge", place, *options, "--yes", "--json")
    assert (0, "") == (done.returncode, done.stderr)
    count: int = json.loads(done.stdout)["outcomes"]["retired"]["names"]
    return count


def test_a_killed_purge_of_schema_1_goes_on_where_it_is_run_again(tmp_path: Path) -> None:
    """Some files are gone, none by half, and nothing but what was asked for; the second run takes the rest."""
    store = tmp_path / "store"
    store.mkdir()
    fill(store).close()
    wanted = {PLAIN, SALTED, ENGINE, *(one.fs() for one in objects())}
    kept = files(store) - wanted
    for one in objects():
        (store / one.fs()).write_bytes(b"1")
    options = ("--schema", "1", "--model", "one")
    with FolderEvents(store, DELETED) as events:
        killed_in_the_middle(str(store), *options, some_gone=lambda: events.wait(SOME))
    left = files(store)
    assert kept | wanted >= left > kept
    assert SOME <= len(wanted - left) < len(wanted)
    assert len(wanted & left) == retired(str(store), *options)
    assert kept == files(store)
    assert 0 == retired(str(store), *options)


@pytest.mark.zmq
@needs_redis
def test_a_killed_purge_of_a_database_goes_on_where_it_is_run_again() -> None:
    """The same of Redis: the removals are told by the server, and the second run takes the rest."""
    with redis_server("--notify-keyspace-events", "Eg") as server, server.client() as client:
        mixed_database.fill(client)
        with client.pipeline(transaction=False) as pipeline:
            for one in objects():
                pipeline.set(one.native(), b"1")
            pipeline.execute()
        before = mixed_database.keys(client)
        wanted = {one.native().encode() for one in objects()} | {name.encode() for name in mixed_database.V1}
        with client.pubsub(ignore_subscribe_messages=True) as events:
            events.subscribe("__keyevent@0__:del")
            assert events.get_message(timeout=SECONDS) is None  # the subscription stands
            killed_in_the_middle(server.url, "--schema", "1", some_gone=lambda: removals(events))
        left = mixed_database.keys(client)
        assert before >= left >= before - wanted
        assert SOME <= len(wanted - left) < len(wanted)
        assert len(wanted & left) == retired(server.url, "--schema", "1")
        assert before - wanted == mixed_database.keys(client)
        assert 0 == retired(server.url, "--schema", "1")


def removals(events: Any) -> None:
    """Wait until the server told of enough."""
    for _ in range(SOME):
        assert events.get_message(timeout=SECONDS) is not None
