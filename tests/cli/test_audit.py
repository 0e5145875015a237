"""`audit` and `purge` as a user runs them."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from compat.v1.front_storage import namespace_root
from extra_keys_cli.app import app
from keying import KeySpace, chunk_keys
from protocol_v2.client import CacheClient
from tests.cli.processes import SECONDS, serving
from tests.cli.processes import run as command
from tests.compat import mixed_database
from tests.compat.mixed_folder import GDS, RANK, V1, V2, files, fill
from tests.compat.v1_writers import MpObject
from tests.protocol_v2.storage_samples import chain, make_object
from tests.redis_server import needs_redis, redis_server


def run(*arguments: str, columns: int = 200) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


def test_audit_prints_a_table_and_json(tmp_path: Path) -> None:
    """Both count the same; no salt shows."""
    fill(tmp_path).close()
    code, shown = run("audit", str(tmp_path))
    assert 0 == code
    assert "org/m (ambiguous)" in shown
    code, text = run("audit", str(tmp_path), "--json")
    groups = json.loads(text)["groups"]
    assert 0 == code
    assert len(V1) == sum(group["names"] for group in groups if group["schema"] == 1)
    assert len(V2) == sum(group["names"] for group in groups if group["what"] == "entry" and group["schema"] == 2)
    assert "tenant" not in shown + text


def test_a_narrow_screen_cuts_nothing_off(tmp_path: Path) -> None:
    """Long model names go on in the next line, and a share is a number where a wide screen has a bar."""
    model = "org/" + "a-very-long-name-" * 5 + "end"
    (tmp_path / MpObject(model, RANK, 0, b"\xaa" * 32).fs()).write_bytes(b"123")
    (tmp_path / "junk").write_bytes(b"1")
    wide, narrow = run("audit", str(tmp_path)), run("audit", str(tmp_path), columns=60)
    assert (0, 0) == (wide[0], narrow[0])
    for shown in (wide[1], narrow[1]):
        assert model in "".join(line.split("│")[3].strip() for line in shown.splitlines() if "│" in line)
    assert ("█" in wide[1], "75%" in wide[1]) == (True, False)
    assert ("█" in narrow[1], "75%" in "".join(narrow[1].split())) == (False, True)


def test_purge_is_a_dry_run_until_yes(tmp_path: Path) -> None:
    """Without --yes nothing goes; with it what was announced does."""
    fill(tmp_path).close()
    before = files(tmp_path)
    code, shown = run("purge", str(tmp_path), "--schema", "1")
    assert (0, before) == (code, files(tmp_path))
    assert "Nothing was touched" in shown
    code, text = run("purge", str(tmp_path), "--schema", "1", "--yes", "--json")
    assert (0, before - V1) == (code, files(tmp_path))
    assert len(V1) == json.loads(text)["outcomes"]["retired"]["names"]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 2, "say what is to go"),
        (("--older-than", "soon"), 2, "is no age"),
        (("--schema", "2", "--yes"), 1, "live server"),
    ],
)
def test_purge_refuses(tmp_path: Path, options: tuple[str, ...], code: int, says: str) -> None:
    """A line and an exit code, and nothing is touched."""
    tier = fill(tmp_path)
    before = files(tmp_path)
    got, shown = run("purge", str(tmp_path), *options)
    assert (code, True, before) == (got, says in shown, files(tmp_path))
    tier.close()


@pytest.mark.parametrize(("name", "says"), [("absent", "is not there"), ("file", "is a file")])
@pytest.mark.parametrize("command", [("audit",), ("purge", "--schema", "1", "--yes")])
def test_no_folder_is_an_error(tmp_path: Path, command: tuple[str, ...], name: str, says: str) -> None:
    """What is not there, or is a file, cannot be looked through: one line that says what to give instead."""
    (tmp_path / "file").write_bytes(b"1")
    first, *options = command
    code, shown = run(first, str(tmp_path / name), *options)
    assert (1, 1) == (code, len(shown.splitlines()))
    assert says in shown
    assert "redis://host:6379/0" in shown


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    """Nothing is there, and that is said; nothing is made either."""
    code, shown = run("audit", str(tmp_path))
    assert (0, True) == (code, "Nothing is there." in shown)
    assert (0, {"groups": []}) == (0, json.loads(run("audit", str(tmp_path), "--json")[1]))
    assert 0 == run("purge", str(tmp_path), "--schema", "1", "--yes")[0]
    assert [] == list(tmp_path.iterdir())


_PLAIN_USER = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root is then held to the modes of files, too
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-m", "extra_keys_cli", *sys.argv[1:]])
"""


def as_a_plain_user(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """One command to its end, by somebody who may not do everything."""
    return subprocess.run(
        [sys.executable, "-c", _PLAIN_USER, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_what_cannot_be_looked_at_or_removed_is_told_and_all_else_is_done(tmp_path: Path) -> None:
    """Exit code 1 and one line after the output; once it is allowed, the same purge takes the rest."""
    fill(tmp_path).close()
    (tmp_path / "lost+found").mkdir(mode=0)
    (tmp_path / GDS).parent.chmod(0o555)
    purge = ("purge", str(tmp_path), "--schema", "1", "--yes", "--json")
    try:
        seen = as_a_plain_user("audit", str(tmp_path), "--json")
        assert (1, 1) == (seen.returncode, len(seen.stderr.splitlines()))
        assert f"1 could not be looked at, the first {tmp_path}/lost+found: Permission denied" in seen.stderr
        groups = json.loads(seen.stdout)["groups"]
        assert len(V1) == sum(group["names"] for group in groups if group["schema"] == 1)
        done = as_a_plain_user(*purge)
        outcomes = json.loads(done.stdout)["outcomes"]
        assert (1, 1) == (done.returncode, len(done.stderr.splitlines()))
        assert "2 could not be removed or looked at" in done.stderr
        assert (len(V1) - 1, 1) == (outcomes["retired"]["names"], outcomes["could not be removed"]["names"])
        assert {GDS} == V1 & files(tmp_path)
    finally:
        (tmp_path / "lost+found").chmod(0o700)
        (tmp_path / GDS).parent.chmod(0o755)
    done = as_a_plain_user(*purge)
    assert (0, "", set()) == (done.returncode, done.stderr, V1 & files(tmp_path))


def test_entries_of_v1_clients_in_a_v2_store_are_told_apart(tmp_path: Path) -> None:
    """What a v2 server keeps for LMCache clients is a row of its own, and no schema-1 name."""
    root = namespace_root("org/one", "tenant", chunk_size=16, dtype="float16")
    keys = chain("v1", 2, root)
    tier = fill(tmp_path)
    for index in range(2):
        tier.put(make_object(keys, index, root=root))
    tier.close()
    groups = json.loads(run("audit", str(tmp_path), "--json")[1])["groups"]
    found = {group["format"]: (group["schema"], group["names"], group["model"]) for group in groups}
    assert ((2, 2, None), (2, len(V2), "org/two")) == (found["xk2, of v1 clients"], found["xk2"])


# ---- Redis


@needs_redis
def test_a_database_is_audited_and_purged_like_a_folder() -> None:
    """Table and JSON count the same; a dry run until --yes; the URL is shown without what is secret in it."""
    with redis_server() as server, server.client() as client:
        mixed_database.fill(client)
        url = f"redis://someone:secret@127.0.0.1:{server.port}/0"
        client.acl_setuser("someone", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"])
        code, shown = run("audit", url)
        assert 0 == code
        assert f"redis://127.0.0.1:{server.port}/0" in shown
        code, text = run("audit", url, "--json")
        groups = json.loads(text)["groups"]
        assert 0 == code
        assert len(mixed_database.EVERYTHING) == sum(group["names"] for group in groups)
        assert len(mixed_database.V1) == sum(group["names"] for group in groups if group["schema"] == 1)
        assert all(mixed_database.IDLE <= group["oldest_age_s"] for group in groups if group["schema"] == 1)
        code, dry = run("purge", url, "--schema", "1")
        assert (0, mixed_database.EVERYTHING) == (code, mixed_database.keys(client))
        assert "Nothing was touched" in dry
        code, done = run("purge", url, "--schema", "1", "--yes", "--json")
        assert (0, len(mixed_database.V1)) == (code, json.loads(done)["outcomes"]["retired"]["names"])
        assert mixed_database.EVERYTHING - mixed_database.keys(client) == {one.encode() for one in mixed_database.V1}
    assert "secret" not in shown + text + dry + done
    assert "tenant" not in shown + text + dry + done
    code, gone = run("audit", url)
    assert (1, 1) == (code, len(gone.splitlines()))
    assert f"redis://127.0.0.1:{server.port}/0: nobody can be reached there" in gone
    assert "secret" not in gone


@pytest.mark.zmq
@needs_redis
def test_what_a_remote_tier_wrote_is_counted_under_its_model_and_retired(tmp_path: Path) -> None:
    """Objects and description of `serve --remote` are recognised in Redis; after a purge another server misses."""
    space = KeySpace("org/m", chunk_size=4, kv_dtype="bfloat16")
    keys = chunk_keys(space, range(12))
    with redis_server() as redis:
        with serving("--no-store", "--remote", redis.url, cache_home=tmp_path) as server:
            with CacheClient(server.address, space) as client:
                client.wait_ready(20)
                assert 3 == client.store("r", keys, [np.full(64, place, dtype=np.uint8) for place in range(3)]).stored
            assert 0 == server.stop()[0]
        code, text = run("audit", redis.url, "--json")
        found = {(one["what"], one["schema"], one["model"]): one["names"] for one in json.loads(text)["groups"]}
        assert (0, {("entry", 2, "org/m"): 3, ("description", 2, None): 1}) == (code, found)
        hits = []
        for options in ((), ("--model", "org/other"), ("--model", "org/m")):
            if options:
                assert 0 == run("purge", redis.url, *options, "--yes")[0]
            with serving("--no-store", "--remote", redis.url, cache_home=tmp_path) as server:
                with CacheClient(server.address, space) as client:
                    client.wait_ready(20)
                    hits.append(client.lookup("r", keys).hit_chunks)
                assert 0 == server.stop()[0]
    assert [3, 3, 0] == hits


@needs_redis
def test_ages_that_nobody_knows_are_called_unknown() -> None:
    """Under an LFU policy the table says so, JSON has null, and an age retires nothing."""
    with redis_server("--maxmemory-policy", "allkeys-lfu") as server, server.client() as client:
        mixed_database.fill(client)
        shown = run("audit", server.url)[1]
        groups = json.loads(run("audit", server.url, "--json")[1])["groups"]
        outcomes = json.loads(run("purge", server.url, "--older-than", "1s", "--yes", "--json")[1])["outcomes"]
    assert "unknown" in shown
    assert {None} == {group["oldest_age_s"] for group in groups}
    entries = len(mixed_database.V1) + len(mixed_database.V2)
    assert (0, entries) == (outcomes["retired"]["names"], outcomes["age unknown"]["names"])


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """What a command prints to standard output, and to a terminal as its standard error."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "extra_keys_cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    )
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the command has ended
        while part := os.read(ours, 65_536):
            shown += part
    os.close(ours)
    out, _ = process.communicate()
    watchdog.cancel()
    assert 0 == process.returncode
    return out, shown.decode()


@needs_redis
def test_a_long_scan_shows_how_far_it_is_to_people_only(tmp_path: Path) -> None:
    """On a terminal a bar with a part of all keys, or a count of files, beside the output and never in it."""
    fill(tmp_path).close()
    with redis_server() as server, server.client() as client:
        mixed_database.fill(client)
        out, shown = on_a_terminal("audit", server.url, "--json")
        assert len(mixed_database.EVERYTHING) == sum(group["names"] for group in json.loads(out)["groups"])
        assert "%" in shown
        assert " names " in shown
        assert "%" in on_a_terminal("purge", server.url, "--schema", "1")[1]
    out, shown = on_a_terminal("audit", str(tmp_path), "--json")
    assert json.loads(out)["groups"]
    assert (True, False) == (" names " in shown, "%" in shown)
    assert "" == command("audit", str(tmp_path)).stderr


@pytest.mark.parametrize("place", ["http://127.0.0.1", "redis://127.0.0.1/first", "rdis://127.0.0.1"])
def test_another_url_is_an_error(place: str) -> None:
    """One line that says how to write it; brackets in it are printed as they are."""
    code, shown = run("audit", place)
    assert (1, 1) == (code, len(shown.splitlines()))
    assert "redis://[user:password@]host[:port][/db]" in shown
