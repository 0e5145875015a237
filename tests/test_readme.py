"""The README is what a newcomer runs, so its example runs here."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from keying import ChunkKey, KeySpace, chunk_keys
from protocol_v2.cache import ChunkCache
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer
from protocol_v2.service import CacheService

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_library_example_runs_and_says_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python block of the README runs as it stands, in at most fifteen lines of code, and prints a key."""
    block, _ = BLOCKS
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    exec(compile(block, "README.md", "exec"), {})
    assert re.fullmatch(r"xk2:[0-9a-f]{64}\n", capsys.readouterr().out)


def test_every_make_target_and_file_that_the_readme_names_exists() -> None:
    """No command of the README is a dead end."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)", README):
        assert f"\n{target}:" in makefile, target
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.zmq
def test_the_client_example_computes_once_and_then_reuses(tmp_path: Path) -> None:
    """The second Python block, run against a server: the first call computes all chunks, the second none."""
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[1], "README.md", "exec"), names)
    space = KeySpace("org/model", chunk_size=4, kv_dtype="bfloat16")
    service = CacheService(ChunkCache(1 << 20), ServerTerms(boot_id=os.urandom(16)), started=time.monotonic())
    computed: list[ChunkKey] = []

    def compute(key: ChunkKey) -> Any:
        computed.append(key)
        return torch.full((4,), key.start)

    with CacheServer(f"ipc://{tmp_path}/s", service) as server:
        first = names["reuse"](server.address, space, list(range(12)), compute)
        again = names["reuse"](server.address, space, list(range(12)), compute)
    assert chunk_keys(space, range(12)) == computed
    assert [0, 4, 8] == [int(one[0]) for one in first] == [int(one[0]) for one in again]
