"""`serve` and `probe` as a user meets them: processes, signals, exit codes, messages."""

import json
import os
import signal
import stat
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from keying import CacheSalt, KeySpace, chunk_keys
from protocol_v2.chunk_view import ChunkView
from protocol_v2.client import CacheClient
from protocol_v2.errors import SpaceMismatchError
from protocol_v2.event_feed import EventSubscriber
from tests.cli.processes import run, serving
from tests.compat.captured_frames import captured_exchanges

pytestmark = pytest.mark.zmq
SPACE = KeySpace("org/m", chunk_size=4, kv_dtype="bfloat16")
KEYS = chunk_keys(SPACE, range(12))


def store(address: str) -> None:
    """Three chunks, acknowledged."""
    with CacheClient(address, SPACE) as client:
        client.wait_ready(20)
        result = client.store("r", KEYS, [np.full(64, place, dtype=np.uint8) for place in range(3)])
        assert (3, None) == (result.stored, result.failure)


def served(address: str) -> list[int]:
    """What a fresh client is served, and that another salt is served nothing."""
    with CacheClient(address, SPACE) as client:
        client.wait_ready(20)
        assert 0 == client.lookup("salted", chunk_keys(SPACE, range(12), [CacheSalt("s")])).hit_chunks
        found = client.lookup("r", KEYS)
        if found.lease is None:
            return []
        delivered = client.retrieve(found.lease, found.hit_chunks)
        return [int(chunk.tensors[0][0]) for chunk in delivered.chunks]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_defaults_serve_this_user_and_a_restart_finds_the_entries(tmp_path: Path, how: signal.Signals) -> None:
    """Socket and store are made under the cache folder; a signal stops it with 0; entries stay."""
    with serving(cache_home=tmp_path) as server:
        assert f"ipc://{tmp_path}/extra-keys/server.sock" == server.address
        store(server.address)
        assert 0 == run("probe", server.address).returncode
        code, out, err = server.stop(how)
    assert (0, "") == (code, err)
    assert "stopped" in out
    assert not (tmp_path / "extra-keys" / "server.sock").exists()
    with serving(cache_home=tmp_path) as server:
        assert [0, 1, 2] == served(server.address)
        assert 0 == server.stop()[0]


def test_kill_minus_nine_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """A killed server's store is taken over, with every acknowledged entry."""
    with serving(cache_home=tmp_path) as server:
        store(server.address)
        assert -signal.SIGKILL == server.stop(signal.SIGKILL)[0]
    with serving(cache_home=tmp_path) as server:
        assert [0, 1, 2] == served(server.address)
        assert 0 == server.stop()[0]


def test_more_clients_than_the_usual_limit_of_open_files(tmp_path: Path) -> None:
    """R: the server raises its own limit of open files: libzmq ends a process that has none for an ipc client."""
    with serving("--no-store", cache_home=tmp_path, limit="-Sn 64") as server, zmq.Context() as context:
        clients = []
        for number in range(100):
            client = context.socket(zmq.DEALER)
            client.linger = 0
            client.connect(server.address)
            client.send_multipart([number.to_bytes(1, "big"), b"\x20"])
            clients.append(client)
        assert all(client.poll(20_000) for client in clients)
        for client in clients:
            client.close()
        code, _, err = server.stop()
        assert (0, False) == (code, "LimitNOFILE" in err)


def test_a_low_limit_of_open_files_is_told(tmp_path: Path) -> None:
    """R: where the limit cannot be raised, the operator reads how many files there may be, and what to do."""
    with serving("--no-store", cache_home=tmp_path, limit="-n 100") as server:
        store(server.address)
        code, _, err = server.stop()
    assert 0 == code
    assert "only 100 files may be open" in " ".join(err.split())
    assert "LimitNOFILE" in err


def test_memory_only_and_tcp(tmp_path: Path) -> None:
    """--no-store keeps nothing on disk; port 0 is one from the operating system, and it is printed."""
    with serving("--no-store", "--listen", "tcp://127.0.0.1:0", cache_home=tmp_path) as server:
        store(server.address)
        assert [0, 1, 2] == served(server.address)
        assert 0 == server.stop()[0]
    assert not list(tmp_path.rglob("xk2*"))


def test_metrics_are_there_for_a_scraper(tmp_path: Path) -> None:
    """A Prometheus scraper reads counters and gauges by name."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving("--metrics-port", str(port), cache_home=tmp_path) as server:
        store(server.address)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert 0 == server.stop()[0]
    assert 'extra_keys_tier_budget{tier="memory"} 2.147483648e+09' in text
    assert "# TYPE extra_keys_requests_total counter" in text


def test_events_tell_a_router_what_is_held_across_a_restart(tmp_path: Path) -> None:
    """A router that only listens knows what a lookup would hit: stored, found again by the next server, cleared."""
    feed = ("--events", f"ipc://{tmp_path}/events", "--events-replay", f"ipc://{tmp_path}/replay")
    digests = [key.digest for key in KEYS]
    view = ChunkView()
    with EventSubscriber(feed[1], feed[3], root=SPACE.root, replay_timeout=20) as router:

        def hears(count: int) -> None:
            ends = time.monotonic() + 30
            while view.leading(digests) != count and time.monotonic() < ends:
                view.apply(router.receive(0.05) or router.catch_up())
            assert (count, 0) == (view.leading(digests), view.lost)

        with serving(*feed, cache_home=tmp_path) as server:
            store(server.address)
            hears(3)
            assert 0 == server.stop()[0]
        with serving(*feed, cache_home=tmp_path) as server:
            view.apply(router.catch_up())
            hears(3)
            with CacheClient(server.address, SPACE) as client:
                client.wait_ready(20)
                assert 3 == client.clear("space").objects
            hears(0)
            assert 0 == server.stop()[0]


def test_a_second_server_is_refused_with_one_line(tmp_path: Path) -> None:
    """The store and the address belong to the live one; the message says what to do, and nothing is harmed."""
    with serving(cache_home=tmp_path) as server:
        second = run("serve", cache_home=tmp_path)
        third = run("serve", "--no-store", cache_home=tmp_path)
        assert (1, 1) == (second.returncode, third.returncode)
        assert "a live server" in second.stderr
        assert "another server listens there" in third.stderr
        assert "Traceback" not in second.stderr + third.stderr
        store(server.address)
        assert 0 == server.stop()[0]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--listen", "127.0.0.1:1"], 1, "wanted ipc://PATH or tcp://HOST:PORT"),
        (["--listen", "tcp://192.0.2.1:1", "--no-store"], 1, "cannot listen"),
        (["--memory", "many"], 2, "is not a size"),
        (["--store", "/proc/nowhere"], 1, "/proc/nowhere: open the store: ENOENT (No such file or directory)"),
        (["--store", "/tmp", "--no-store"], 2, "exclude each other"),
        (["--fsync", "sometimes"], 2, "sometimes"),
        (["--events", "nonsense", "--no-store"], 1, "got 'nonsense', wanted ipc://PATH or tcp://HOST:PORT"),
        (["--events-replay", "tcp://127.0.0.1:0"], 2, "give both"),
        (["--v1-chunk-size", "16"], 2, "--v1-chunk-size is for --accept-v1"),
        (["--accept-v1", "--v1-chunk-size", "0"], 2, "greater than or equal to 1"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, options: list[str], code: int, text: str) -> None:
    """Wrong usage exits with 2, what cannot be had with 1; no traceback."""
    done = run("serve", *options, cache_home=tmp_path)
    assert code == done.returncode
    assert text in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_probe_prints_what_was_agreed(tmp_path: Path) -> None:
    """Exit code 0 and both sides for a live server, as a table and as JSON; 1 and a reason for none."""
    with serving(cache_home=tmp_path) as server:
        shown, scripted = run("probe", server.address), run("probe", "--json", server.address)
        assert 0 == server.stop()[0]
    assert (0, 0) == (shown.returncode, scripted.returncode)
    assert "wire version" in shown.stdout
    answer = json.loads(scripted.stdout)
    assert ({"wire": 2, "schema": 2, "features": ["shared-memory"]}, True) == (answer["agreed"], answer["session"])
    assert ["shared-memory"] == answer["asked"]["features"]
    assert any(name.startswith("grease") for name in answer["not_recognised"]["fields"])
    gone = run("probe", "--timeout", "1", server.address)
    assert 1 == gone.returncode
    assert "no session" in gone.stderr
    scripted = run("probe", "--timeout", "1", "--json", server.address)
    assert (1, False) == (scripted.returncode, json.loads(scripted.stdout)["session"])
    assert 1 == run("probe", "nonsense").returncode


def test_probe_with_a_space_shows_a_mismatch(tmp_path: Path) -> None:
    """An operator sees from outside that a space is none that the server holds, and which field differs."""
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"model": "org/m", "chunk_size": 4, "kv_dtype": "float16"}))
    with serving(cache_home=tmp_path) as server:
        store(server.address)
        shown = run("probe", "--space", str(path), server.address)
        assert 0 == server.stop()[0]
    assert (0, True) == (shown.returncode, "kv_dtype is 'float16', held 'bfloat16'" in shown.stdout)


def test_status_prints_facts(tmp_path: Path) -> None:
    """Every fact by its dotted name, as a table and as JSON; a server that is not there is exit code 1.

    Without an address it asks the one that serve without options starts.
    """
    with serving(cache_home=tmp_path) as server:
        store(server.address)
        shown, scripted = run("status", server.address), run("status", "--json", server.address)
        default, elsewhere = run("status", cache_home=tmp_path), run("status", cache_home=tmp_path / "other")
        assert 0 == server.stop()[0]
    assert (0, 0) == (shown.returncode, scripted.returncode)
    assert (0, 1) == (default.returncode, elsewhere.returncode)
    assert "tier.disk.objects" in shown.stdout
    facts = json.loads(scripted.stdout)
    assert (3, 3, 2) == (facts["tier.disk.objects"], facts["cache.stored.stored"], facts["schema.storage"])
    assert 1 == run("status", "--timeout", "1", server.address).returncode


def test_a_long_cache_folder_gets_a_short_socket(tmp_path: Path) -> None:
    """A path that no Unix socket can have is replaced by a short one, the same every time."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with serving(cache_home=deep, environment={"TMPDIR": str(tmp_path)}) as server:
        assert len(os.fsencode(server.address.removeprefix("ipc://"))) <= 107
        assert server.address.startswith(f"ipc://{tmp_path}/extra-keys-{os.getuid()}/")
        assert 0o700 == stat.S_IMODE((tmp_path / f"extra-keys-{os.getuid()}").stat().st_mode)
        store(server.address)
        assert 0 == run("status", cache_home=deep, environment={"TMPDIR": str(tmp_path)}).returncode
        assert 0 == server.stop()[0]


@pytest.mark.parametrize("kind", ["others may write", "a link", "a file"])
@pytest.mark.parametrize("command", ["serve", "status"])
def test_a_short_socket_is_never_where_somebody_else_can_listen(tmp_path: Path, kind: str, command: str) -> None:
    """Names in the temporary folder are anybody's to take first: neither a server nor a client uses one that was."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    taken = tmp_path / f"extra-keys-{os.getuid()}"
    if kind == "others may write":
        taken.mkdir()
        taken.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(tmp_path / "elsewhere")
    else:
        taken.touch()
    done = run(command, cache_home=deep, environment={"TMPDIR": str(tmp_path)})
    assert 1 == done.returncode
    assert "nobody else can write to" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pinned_server_refuses_other_spaces_by_name_of_the_field(tmp_path: Path) -> None:
    """--space: the right space is served; another is refused with both values, in the client's error and the log."""
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"model": "org/m", "chunk_size": 4, "kv_dtype": "bfloat16"}))
    with serving("--space", str(path), cache_home=tmp_path) as server:
        store(server.address)
        other = KeySpace("org/m", chunk_size=4, kv_dtype="float16")
        with CacheClient(server.address, other) as client, pytest.raises(SpaceMismatchError, match="kv_dtype"):
            client.wait_ready(20)
        code, _, err = server.stop()
    assert 0 == code
    assert 1 == err.count("kv_dtype")
    assert 1 == run("serve", "--space", str(tmp_path / "none"), cache_home=tmp_path).returncode
    path.write_text("{}")
    assert "not a space" in run("serve", "--space", str(path), cache_home=tmp_path).stderr


def test_a_restarted_server_still_knows_the_spaces_that_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Never a silent hit rate of 0: another dtype of a held model is told so, also after a restart, on both sides."""
    with serving(cache_home=tmp_path) as server:
        store(server.address)
        assert 0 == server.stop()[0]
    with serving(cache_home=tmp_path) as server:
        with CacheClient(server.address, KeySpace("org/m", chunk_size=4, kv_dtype="float16")) as client:
            established = client.wait_ready(20)
        assert established is not None
        assert ["kv_dtype"] == [one.field for one in established.notice]
        code, _, err = server.stop()
    assert (0, 1) == (code, err.count("kv_dtype"))
    assert "kv_dtype" in caplog.text


# ---- v1 clients on the same port


PROBE_ANSWER = msgspec.msgpack.encode(["extra_keys/2"])


@contextmanager
def v1_socket(address: str) -> Iterator["zmq.Socket[bytes]"]:
    """The socket of a v1 client."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 20_000
        socket.connect(address)
        yield socket


def test_v1_and_v2_clients_share_one_server(tmp_path: Path) -> None:
    """--accept-v1: captured requests are answered as by the release, v2 hits its own, the status counts them apart."""
    with serving("--accept-v1", "--v1-chunk-size", "4", cache_home=tmp_path) as server:
        with v1_socket(server.address) as socket:
            for exchange in captured_exchanges():
                socket.send_multipart(exchange.request)
                answer, expected = socket.recv_multipart(), list(exchange.response)
                if exchange.op == "get_experimental":
                    expected[2] = PROBE_ANSWER
                elif exchange.op == "prepare_retrieve":  # its pickle was not kept
                    expected[2] = answer[2]
                assert expected == answer, exchange.op
        store(server.address)
        assert [0, 1, 2] == served(server.address)
        shown, facts = run("status", server.address), json.loads(run("status", "--json", server.address).stdout)
        code, _, err = server.stop()
    assert (0, "") == (code, err)
    assert "v1) clients are accepted too, in chunks of 4 tokens" in server.announced
    assert (True, 1, 4) == (facts["server.v1_accepted"], facts["v1.clients"], facts["v1.chunk_size"])
    v1 = sum(count for name, count in facts.items() if name.startswith("v1.requests."))
    assert (len(captured_exchanges()) - 1, 0) == (v1, facts["service.foreign"])  # the probe is the service's own
    assert f"v1: accepted; clients in the last two minutes 1, workers 0, requests {v1} (refused 0)" in shown.stdout


def test_without_accept_v1_only_the_probe_is_answered(tmp_path: Path) -> None:
    """A v1 client that was not asked for gets nothing but what the server can do, and the status says so."""
    with serving(cache_home=tmp_path) as server:
        with v1_socket(server.address) as socket:
            for exchange in captured_exchanges():
                socket.send_multipart(exchange.request)
            socket.send_multipart([b"\x63", b"\x20"])  # a probe; answers keep their order
            assert [b"\x01", b"\x20", PROBE_ANSWER] == socket.recv_multipart()
            assert [b"\x63", b"\x20", PROBE_ANSWER] == socket.recv_multipart()
        store(server.address)
        assert [0, 1, 2] == served(server.address)
        shown, facts = run("status", server.address), json.loads(run("status", "--json", server.address).stdout)
        code, _, _ = server.stop()
    silent = len(captured_exchanges()) - 1
    assert (0, False) == (code, "(v1)" in server.announced)
    assert (False, silent) == (facts["server.v1_accepted"], facts["service.foreign"])
    assert f"v1: not accepted; messages left without an answer {silent}" in shown.stdout
    assert not any(name.startswith("v1.") for name in facts)
