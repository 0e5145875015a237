"""docs/connectors.md: its connector runs as it stands there, and its tables name what there is."""

import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keying import CacheSalt, KeySpace, chunk_digests
from protocol_v2.cache import ChunkCache
from protocol_v2.chunk_events import ChunksHeld
from protocol_v2.client import CacheClient
from protocol_v2.connectors.settings import ConnectorSettings
from protocol_v2.event_feed import EventPublisher
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService

pytestmark = pytest.mark.zmq

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "connectors.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SOURCE = next(block for block in BLOCKS if "class Connector" in block)
ROUTER = next(block for block in BLOCKS if "ChunkView" in block)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    """A cache server in memory."""
    service = CacheService(ChunkCache(1 << 20), ServerTerms(b"D" * 16), started=time.monotonic())
    with CacheServer(f"ipc://{tmp_path}/c", service) as running:
        yield running


def value(request: Any, place: int) -> int:
    """What the KV of a token is: it follows from all tokens before it, and the salt."""
    salt = sum(sum(one.value.encode()) for one in request.extra_keys)
    total: int = sum(token * (at + 3) for at, token in enumerate(request.tokens[: place + 1])) + salt
    return total % 65_521


def serve(connector: Any, layers: dict[str, Any], request: Any, table: list[int]) -> int:
    """An engine without a model: tokens that were loaded."""
    matched = connector.match(request, 0)
    begin = connector.allocated(request, 0, matched, table)
    for place in range(begin, len(request.tokens)):
        for tensor in layers.values():
            tensor[table[place // 4], place % 4] = value(request, place)
    connector.step(request, len(request.tokens), table)
    for place in range(len(request.tokens)):
        for tensor in layers.values():
            assert value(request, place) == int(tensor[table[place // 4], place % 4])
    connector.finished(request)
    assert connector.worker.flush(5)
    return int(matched)


def test_the_connector_on_the_page_runs_as_it_stands_there(server: CacheServer) -> None:
    """Two engines over one server: the second hits what the first stored, of the same salt only; KV is right."""
    names: dict[str, Any] = {}
    exec(compile(SOURCE, "docs/connectors.md", "exec"), names)
    space = KeySpace("m", chunk_size=8, kv_dtype="int64")
    got = []
    for _ in range(2):
        layers = {name: torch.zeros(40, 4, dtype=torch.int64) for name in ("k", "v")}
        connector = names["Connector"](server.address, space, layers, 4)
        connector.client.wait_ready(5)
        for place, salt in enumerate(("a", "b")):
            request = SimpleNamespace(id=salt, tokens=list(range(50, 71)), extra_keys=(CacheSalt(salt),))
            got.append(serve(connector, layers, request, list(range(place * 10, place * 10 + 10))))
        connector.side.close()
        connector.worker.close()
        connector.client.close()
    assert [0, 0, 16, 16] == got
    with CacheClient(server.address) as client:
        client.wait_ready(5)
        assert 0 == client.status()["cache.leases"]


def test_the_router_on_the_page_knows_what_a_server_would_hit(tmp_path: Path) -> None:
    """Two of three chunks are held; with another salt none is. Its addresses are exchanged for some of this machine."""
    space, tokens = KeySpace("m", chunk_size=4, kv_dtype="int64"), range(12)
    source = ROUTER.replace("tcp://server:5557", f"ipc://{tmp_path}/e").replace(
        "tcp://server:5558", f"ipc://{tmp_path}/r"
    )
    assert 2 == source.count(f"ipc://{tmp_path}")
    with EventPublisher(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r", spaces=[space]) as publisher:
        held = tuple(chunk_digests(space, tokens, [CacheSalt("a")])[:2])
        publisher.publish(space.root, (ChunksHeld(keys=held, world=1, group=0),))
        hits = []
        for salt in ("a", "b"):
            names = {"space": space, "tokens": tokens, "extra_keys": [CacheSalt(salt)], "chunk_digests": chunk_digests}
            exec(compile(source, "docs/connectors.md", "exec"), names)
            hits.append(names["hit"])
    assert [2, 0] == hits


def test_it_has_60_lines() -> None:
    """As promised: lines that are not blank."""
    assert 60 >= len([line for line in SOURCE.splitlines() if line.strip() and not line.startswith(("from", "import"))])


def test_every_setting_is_on_the_page() -> None:
    """And no other name stands in the table."""
    table = PAGE.split("| setting |")[1].split("\n\n")[0]
    told = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {one.name for one in dataclasses.fields(ConnectorSettings)} == told


def test_every_reason_of_an_ambiguous_event_is_on_the_page() -> None:
    """What is refused is explained."""
    source = (ROOT / "protocol_v2" / "connectors" / "vllm_events.py").read_text()
    reasons = set(re.findall(r'AmbiguousEventError\(\s*"(\w+)"', source))
    told = set(re.findall(r"`(\w+)`", PAGE.split("| reason |")[1]))
    assert reasons == told & reasons
    assert len(reasons) > 10
