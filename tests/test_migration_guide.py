"""MIGRATION.md is followed by people with a fleet in their hands: what it names is there, and what it shows is so."""

import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from prometheus_client import CollectorRegistry, generate_latest

import compat
import keying
import protocol_v2
from compat import TunnelPolicy
from compat.v1 import mp_chunk_hashes
from compat.v1.front_storage import ChunkLayout, namespace_root, stored_chunks
from compat.v1.tunnel_session import V1Tunnel
from examples import rolling_upgrade
from extra_keys_cli.app import app
from keying import ChunkKey, KeySpace, chunk_keys
from protocol_v2.cache import ChunkCache
from protocol_v2.connectors.scheduler_side import SchedulerCounters
from protocol_v2.connectors.settings import ConnectorSettings
from protocol_v2.events import ReplyReceived, SendRequest
from protocol_v2.messages import StatusReply, StatusRequest
from protocol_v2.metrics import StatusCollector
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService
from protocol_v2.storage import ObjectId, Shard, TensorSpec, stored_object
from protocol_v2.storage.envelope import encoded_size
from protocol_v2.storage.objects import Envelope
from protocol_v2.tiers.layout import charge_of
from tests.compat.front_harness import FrontHarness
from tests.compat.v1_writers import MpObject
from tests.protocol_v2.storage_samples import open_disk

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "MIGRATION.md").read_text()
CONSOLE = [textwrap.dedent(block) for block in re.findall(r"```console\n(.*?)```", GUIDE, re.DOTALL)]
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
CODE = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", GUIDE, flags=re.DOTALL)))
DAY = 86_400


def shown() -> Iterator[tuple[str, list[str]]]:
    """Each command of the guide with the output that it shows."""
    for block in CONSOLE:
        for one in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = one.rstrip("\n").split("\n")
            yield command, output


def commands() -> Iterator[list[str]]:
    """Each `extra-keys` command, in blocks and in the text, as words without what it is piped to."""
    for one in (*(command for command, _ in shown()), *CODE):
        words = shlex.split(one.split(" | ")[0])
        if words and words[0] == "extra-keys":
            yield words[1:]


def unknown_options(words: list[str]) -> list[str]:
    """Words of a command that the command line does not have."""
    group: Any = typer.main.get_command(app)
    command = group.commands.get(words[0])
    if command is None:
        return words[:1]
    known = {option for parameter in command.params for option in parameter.opts}
    return [word for word in words[1:] if word.startswith("-") and word not in known]


def test_every_command_and_option_exists() -> None:
    """No command of the guide is a dead end; an invented one is noticed."""
    found = list(commands())
    assert {"serve", "status", "probe", "audit", "purge"} <= {words[0] for words in found}
    assert [] == [words for words in found if unknown_options(words)]
    assert ["--accept-v9"] == unknown_options(["serve", "--accept-v9"])
    assert ["retire"] == unknown_options(["retire", "--yes"])


def test_every_option_in_the_text_exists() -> None:
    """Options that stand alone are those of some command of ours, or LMCache's."""
    group: Any = typer.main.get_command(app)
    ours = {option for command in group.commands.values() for one in command.params for option in one.opts}
    theirs = {"--chunk-size", "--supported-transfer-mode", "--shm-name", "--transport"}
    told = {shlex.split(code)[0] for code in CODE if code.startswith("--")}
    assert told <= ours | theirs
    assert "--accept-v1" in told


def test_every_file_and_heading_that_is_linked_exists() -> None:
    """Links lead somewhere."""
    for link in re.findall(r"\]\(([^)#]+)", GUIDE):
        assert (ROOT / link).exists(), link
    headings = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", GUIDE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", GUIDE)) <= headings
    assert "](MIGRATION.md" in (ROOT / "README.md").read_text()
    for script in re.findall(r"`(examples/\S+?)`", GUIDE):
        assert (ROOT / script).exists()


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, Any]:
    """Status of a server that met v1 and v2 clients, and a tunnel's."""
    harness = FrontHarness(disk=open_disk(tmp_path))
    client = harness.v1_client()
    prompt = list(range(12))
    assert client.store(prompt, 10)
    assert client.fetch(prompt) == [10, 11, 12]
    client.instances = [77]
    assert not client.store(prompt, 10)
    assert harness.refused("no_worker")
    tunnel = TunnelPolicy(KeySpace("m", chunk_size=16, kv_dtype="float16"))(frozenset())
    assert isinstance(tunnel, V1Tunnel)
    tunnel.send(SendRequest(1, StatusRequest(), (), 1.0), 0.0)
    (told,) = tunnel.expire(0.0)
    assert isinstance(told, ReplyReceived)
    assert isinstance(told.message, StatusReply)
    return {**harness.service.status(harness.now), **told.message.status}


def test_every_fact_and_metric_exists(facts: dict[str, Any]) -> None:
    """Names of `status` and of Prometheus are what a server says; an invented one is noticed."""
    told = {
        code
        for code in CODE
        if re.fullmatch(r"(v1|cache|service|server|tier|schema|tunnel)\.[a-z0-9_.]*[a-z0-9]", code)
    }
    prefixes = {code[:-1] for code in CODE if re.fullmatch(r"(v1|cache|service|tier)\.[a-z0-9_.]+\.\*?", code)}
    assert {"v1.clients", "v1.hit_chunks", "service.foreign", "cache.hits", "tunnel.strength"} <= told
    assert set() == told - set(facts)
    assert all(any(fact.startswith(prefix.rstrip("*")) for fact in facts) for prefix in prefixes)
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: facts))
    exposition = generate_latest(registry).decode()
    metrics = set(re.findall(r"^(extra_keys_\w+)", exposition, re.MULTILINE))
    mentioned = set(re.findall(r"\bextra_keys_\w+", GUIDE.replace("grep ^extra_keys_v1", "")))
    assert "extra_keys_v1_refused_total" in mentioned
    assert set() == mentioned - metrics
    labelled = set(re.findall(r"extra_keys_\w+\{[^}]+\}", GUIDE))
    assert len(labelled) > 1
    assert set() == {one for one in labelled if f"\n{one} " not in exposition}


def test_every_reason_of_a_refusal_exists() -> None:
    """The table of `v1.refused.` names reasons that the front gives."""
    sources = "".join(
        (ROOT / "compat" / "v1" / name).read_text()
        for name in ("front.py", "front_storage.py", "wire.py", "closed_pickle.py")
    )
    table = GUIDE.split("| `v1.refused.` |")[1].split("\n\n")[0]
    told = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {"no_worker", "dtypes", "malformed"} <= told
    assert set() == {name for name in told if f'"{name}"' not in sources}


def resolve(dotted: str) -> Any:
    """What a dotted name stands for: an import path, or something that a package exports."""
    first, *rest = dotted.split(".")
    if first in {"compat", "keying", "protocol_v2"}:
        found: Any = import_module(first)
        for place, name in enumerate(rest, 1):
            found = getattr(found, name, None) or import_module(".".join([first, *rest[:place]]))
        return found
    for package in (keying, protocol_v2, compat):
        if first in package.__all__:
            found = getattr(package, first)
            for name in rest:
                found = getattr(found, name)
            return found
    raise LookupError(dotted)


def test_every_python_name_exists() -> None:
    """Modules, functions, classes and methods, with the arguments that are named."""
    public = {*keying.__all__, *protocol_v2.__all__, *compat.__all__}
    told = {code for code in CODE if re.match(r"(compat|keying|protocol_v2)\.\w", code)}
    told |= {code for code in CODE if re.split(r"[.(]", code)[0] in public}
    v1_calls = {row.split("|")[1] for row in GUIDE.split("| v1 | v2 |")[1].split("\n\n")[0].splitlines()[2:]}
    told -= set(re.findall(r"`([^`]+)`", "".join(v1_calls)))
    assert {"CacheClient.lookup(session, keys)", "compat.REMOVALS", "keying.chunk_keys"} <= told
    for code in sorted(told - {"compat.connectors.vllm"}):  # which imports an engine; see the next test
        name, _, arguments = code.partition("(")
        found = resolve(name)
        if arguments and ")." not in arguments:
            named = {one.partition("=")[0].strip() for one in arguments.rstrip(")").split(",")} - {""}
            plain = {one for one in named if one.isidentifier()}
            assert plain <= set(inspect.signature(found).parameters), code
    with pytest.raises((LookupError, ImportError)):
        resolve("compat.no_such_thing")


def test_the_engines_connectors_are_where_the_guide_says() -> None:
    """The module that an engine is told to load, and the classes in it."""
    source = (ROOT / "compat" / "connectors" / "vllm.py").read_text()
    assert {"compat.connectors.vllm", "TunnellingConnector", "ExtraKeysConnector"} <= CODE
    assert "class TunnellingConnector(ExtraKeysConnector):" in source


def test_names_of_the_engines_log_line_exist() -> None:
    """What the guide tells an operator to look for in the engine's log is counted by the connector."""
    names = SchedulerCounters().facts()
    for name in ("hit_tokens", "lookup_failures"):
        assert f"`{name}`" in GUIDE
        assert name in names
    texts = "".join((ROOT / "compat" / "v1" / name).read_text() for name in ("server_policy.py", "tunnel_session.py"))
    joined = re.sub(r'"\n\s+f?"', "", texts)
    quoted = re.findall(r'"(it is spoken to[^"]+|no tunnel through it)"', GUIDE)
    assert 2 == len(quoted)
    for text in quoted:
        assert text in joined


def test_the_calendar_is_the_removal_table() -> None:
    """Names and releases, row by row."""
    rows = GUIDE.split("# Deprecation calendar\n")[1]
    told = re.findall(r"^\| `([\w.]+)` \| ([\d.]+) \| ([\d.]+) \|", rows, re.MULTILINE)
    assert [(row.name, row.since, row.removal) for row in compat.REMOVALS] == told


def test_the_marks_of_the_matrix_are_there_once() -> None:
    """Whoever prints the matrix finds its place."""
    assert (1, 1) == (GUIDE.count("<!-- matrix:begin -->"), GUIDE.count("<!-- matrix:end -->"))


def test_the_engines_configuration_names_settings_that_exist() -> None:
    """The JSON that an engine is started with."""
    (block,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    told = json.loads(block)
    assert ("TunnellingConnector", "compat.connectors.vllm") == (told["kv_connector"], told["kv_connector_module_path"])
    settings = {one.name for one in dataclasses.fields(ConnectorSettings)}
    assert {"address", "chunk_size"} == set(told["kv_connector_extra_config"]) <= settings


def test_a_chunk_costs_what_the_formula_says() -> None:
    """1 KiB in memory; whole blocks and one more on disk, with less than 0.3 KiB of envelope."""
    assert "in memory = payload + 1 KiB" in GUIDE
    assert "on disk   = payload + 0.3 KiB, rounded up to 4 KiB, + 4 KiB" in GUIDE
    root, key = bytes(32), bytes(31) + b"1"
    spec = TensorSpec("bfloat16", (2, 1, 16, 128), 8192)
    obj = stored_object(Envelope(ObjectId(root, key, Shard()), 0, 16, (spec,)), [bytes(8192)])
    assert 8192 + 1024 == obj.charge
    header = encoded_size(obj.envelope) - 8192
    assert 0 < header < 0.3 * 1024
    assert -(-(8192 + header) // 4096) * 4096 + 4096 == charge_of(encoded_size(obj.envelope))
    assert "32 MiB a chunk, 128 KiB a token, 122 GiB for a million tokens" in GUIDE
    per_token = 32 * 2 * 8 * 128 * 2
    assert (32 << 20, 128 << 10, 122) == (256 * per_token, per_token, per_token * 10**6 >> 30)


def test_the_rehearsal_is_shown_step_by_step() -> None:
    """Every step of both orders, none of them with a wrong hit."""
    (block,) = (block for block in CONSOLE if "rolling_upgrade.py" in block)
    rows = re.findall(r"^ (.+?)  +\S+ \| \S+ \S+ .* (\d+)$", block, re.MULTILINE)
    steps = [step.title for order in rolling_upgrade.ORDERS.values() for step in order()]
    assert [(title, "0") for title in steps] == rows


# ---- what is shown is so


def old_store(folder: Path) -> None:
    """LMCache's folder, as the guide's audit has it."""
    folder.mkdir()
    for model, salt, n, days in (("org/m", "", 8, 9), ("org/m", "tenant-7", 4, 9), ("org/other", "", 4, 44)):
        for number in range(n):
            path = folder / MpObject(model, 0x01000100, 0, bytes([number]) * 32, salt).fs()
            path.write_bytes(bytes(8192))
            moment = time.time() - days * DAY
            os.utime(path, (moment, moment))


def new_store(folder: Path) -> None:
    """Our folder with entries of both sides, as the guide's audit has it."""
    space = KeySpace("org/m", chunk_size=256, kv_dtype="float16")
    spec = TensorSpec("float16", (2, 1, 256, 8), 8192)
    layout = ChunkLayout("float16", (2, 1, 256, 8))
    tier = open_disk(folder)
    tier.describe(space)
    for salt, n in (("", 8), ("tenant-7", 4)):
        root = namespace_root("org/m", salt, chunk_size=256, dtype="float16")
        hashes = mp_chunk_hashes(range(n * 256), 256)
        tensors = [bytes(8192)] * n
        for obj in stored_chunks(root, hashes, tensors, layout, start=0, shard=Shard(), chunk_size=256):
            tier.put(obj)
    for key in chunk_keys(space, range(8 * 256)):
        envelope = Envelope(ObjectId(space.root, key.digest, Shard()), key.start, 256, (spec,))
        tier.put(stored_object(envelope, [bytes(8192)]))
    tier.close()
    for path in folder.glob("xk2/*/*/*"):
        os.utime(path, (time.time() - 3 * DAY,) * 2)


def cells(line: str) -> list[str]:
    """A line of a table without its frame and padding; any other line by its words."""
    return [one.strip() for one in re.split("[│┃]", line)] if line[:1] in "│┃" else line.split()


def test_audit_and_purge_show_what_the_guide_shows(tmp_path: Path) -> None:
    """Each audit and purge of the guide, run in its order on such a store: every line shown is printed."""
    old_store(tmp_path / "lmcache-l2")
    new_store(tmp_path / "kv")
    ran = 0
    for command, output in shown():
        words = shlex.split(command)
        if words[:2] not in (["extra-keys", "audit"], ["extra-keys", "purge"]) or words[2] not in {"lmcache-l2", "kv"}:
            continue
        done = subprocess.run(
            [sys.executable, "-m", "extra_keys_cli", *words[1:]],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
            env=os.environ | {"COLUMNS": "200", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        printed = [cells(line) for line in done.stdout.splitlines()]
        assert (0, []) == (done.returncode, [line for line in output if cells(line) not in printed]), done.stdout
        assert output
        ran += 1
    assert 8 == ran
    assert not list((tmp_path / "lmcache-l2").iterdir())


def test_the_key_examples_run() -> None:
    """The first Python block, as it stands."""
    exec(compile(PYTHON[0], "MIGRATION.md", "exec"), {})


@pytest.mark.zmq
def test_the_request_example_runs(tmp_path: Path) -> None:
    """The second Python block, against a server: computed once, then served; a server that is not there computes."""
    names: dict[str, Any] = {}
    exec(compile(PYTHON[1], "MIGRATION.md", "exec"), names)
    assert 2 == len(PYTHON)
    space = KeySpace("org/model", chunk_size=4, kv_dtype="bfloat16")
    keys = chunk_keys(space, range(12))
    service = CacheService(ChunkCache(1 << 20), ServerTerms(boot_id=os.urandom(16)), started=time.monotonic())
    computed: list[ChunkKey] = []

    def compute(key: ChunkKey) -> Any:
        computed.append(key)
        return torch.full((4,), key.start)

    with CacheServer(f"ipc://{tmp_path}/s", service) as server:
        with closing(protocol_v2.CacheClient(server.address, space)) as client:
            first = names["serve"](client, "a", keys, compute)
            again = names["serve"](client, "b", keys, compute)
        assert keys == computed
    assert [0, 4, 8] == [int(one[0]) for one in first] == [int(one[0]) for one in again]
