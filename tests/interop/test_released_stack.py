"""The whole released stack: vLLM on CPU with LMCache's own connector, on LMCache's server and on our v1 front.

What that stack keys is right on both; what it does not key, its adapters, is wrong on both, which is the negative
control. The same requests through our connector are right on both, natively and through the tunnel.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.environment import STAMP as ENGINE_STAMP
from tests.e2e.host import Host
from tests.e2e.prompts import words
from tests.interop.environment import ROOT, needs_lmcache
from tests.interop.our_server import our_server
from tests.interop.real_server import RealServer, free_port

CHUNK = 64
LMCACHE = ROOT / ".venv-lmcache" / "for-vllm"
"""LMCache and what only it needs, to lie on the engine's path."""

pytestmark = [
    pytest.mark.interop,
    pytest.mark.zmq,
    needs_lmcache,
    pytest.mark.skipif(
        not (ENGINE_STAMP.exists() and LMCACHE.exists()),
        reason="the released stack was not tested: it needs vLLM too, which `make e2e` builds once in .venv-vllm/",
    ),
]

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


@dataclass(frozen=True, slots=True)
class Stack:
    """A process for engines, models and adapters, and the two servers."""

    host: Host
    folder: Path
    addresses: dict[str, str]
    plain: dict[str, list[Any]]

    def adapter(self, letter: str) -> dict[str, Any]:
        """An adapter as a request names it."""
        number = {"a": 1, "b": 2}[letter]
        return {"name": letter, "number": number, "path": str(self.folder / f"llama-{letter}")}

    def open(self, model: str, connector: str, server: str, *, load: str = "auto", **options: Any) -> None:
        """An engine with a connector on a server, or without one."""
        address = self.addresses[server]
        settings: dict[str, Any] | None = {
            "address": address,
            "chunk_size": CHUNK,
            "wait_for_store": True,
            "load": load,
        }
        module = {"ExtraKeysConnector": "protocol_v2.connectors.vllm", "TunnellingConnector": "compat.connectors.vllm"}
        if connector == "LMCacheMPConnector":
            host, _, port = address.rpartition(":")
            settings = {
                "lmcache.mp.host": host,
                "lmcache.mp.port": int(port),
                "lmcache.mp.mq_timeout": 10.0,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
                "lmcache.mp.heartbeat_interval": 1.0,
            }
        self.host.call(
            "open",
            model=str(self.folder / model),
            settings=settings,
            connector=connector,
            module=module.get(connector, "lmcache_in_vllm"),
            options=options,
        )

    def run(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """Answers to requests, one after the other."""
        return [self.host.call("generate", requests=[one])[0] for one in requests]

    def expected(self, model: str, *requests: dict[str, Any], **options: Any) -> list[list[int]]:
        """Tokens that an engine without a cache answers; computed once for each model."""
        if model not in self.plain:
            self.host.call("open", model=str(self.folder / model), options=options)
            self.plain[model] = [one["tokens"] for one in self.run(*requests)]
        return self.plain[model]


@pytest.fixture(scope="module")
def stack(peer_logs: Path) -> Iterator[Stack]:
    """Both servers, and a process in which engines are opened one after the other."""
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="xk-stack-")))
        exits.enter_context(pytest.MonkeyPatch.context()).setitem(os.environ, "LMCACHE_TRACK_USAGE", "false")
        real = RealServer(peer_logs / "stack.log", chunk_size=CHUNK).launch()
        exits.callback(real.stop)
        ours = exits.enter_context(our_server(chunk_size=CHUNK))
        host = exits.enter_context(Host(folder / "engine.log", Path(__file__).parent / "stack", LMCACHE))
        for model in ("llama", "llava"):
            host.call("build_model", name=model, folder=str(folder / model))
        for letter, seed in (("a", 1), ("b", 2)):
            host.call("build_adapter", model=str(folder / "llama"), folder=str(folder / f"llama-{letter}"), seed=seed)
        yield Stack(host, folder, {"lmcache": real.wait_ready().address, "ours": ours.address}, {})


def text_requests(stack: Stack, salt: str = "tenant") -> list[dict[str, Any]]:
    """One prompt under four identities."""
    tokens = words(300, "the released stack")
    return [
        {"tokens": tokens},
        {"tokens": tokens, "salt": salt},
        {"tokens": tokens, "adapter": stack.adapter("a")},
        {"tokens": tokens, "adapter": stack.adapter("b")},
    ]


@pytest.mark.parametrize("server", ["lmcache", "ours"])
def test_the_released_connector_is_right_on_text_and_salts_and_wrong_on_adapters(stack: Stack, server: str) -> None:
    """Each twice: text and salts hit their own and answer the same; adapters hit the base prompt's KV and answer wrong.

    The wrong answers are the released stack's fault, on its own server as on ours: a v1 request does not say which
    adapter it is for. They show that these tests would see a wrong hit.
    """
    requests = text_requests(stack)
    expected = stack.expected("llama", *requests, **LORA)
    stack.open("llama", "LMCacheMPConnector", server, **LORA)
    text, salted = requests[:2]
    answers = stack.run(text, text, salted, salted)
    assert [0, 256, 0, 256] == [one["cached"] for one in answers]
    assert [expected[0], expected[0], expected[1], expected[1]] == [one["tokens"] for one in answers]
    adapters = stack.run(*requests[2:])
    assert [256, 256] == [one["cached"] for one in adapters]
    assert expected[2] != adapters[0]["tokens"]
    assert expected[3] != adapters[1]["tokens"]


@pytest.mark.parametrize("server", ["lmcache", "ours"])
def test_the_released_connector_is_right_on_images(stack: Stack, server: str) -> None:
    """Its tokens are overwritten by the image's values: a second image misses, the first hits again."""
    stack.open("llava", "LMCacheMPConnector", server)
    x, y = image_requests(stack)
    expected = stack.expected("llava", x, y)
    stack.open("llava", "LMCacheMPConnector", server)
    answers = stack.run(x, y, x, y)
    assert [expected[0], expected[1]] * 2 == [one["tokens"] for one in answers]
    cached = [one["cached"] for one in answers]
    assert cached[0] == 0
    assert cached[1] < cached[3]
    assert cached[2] == cached[3] > 0


def image_requests(stack: Stack) -> list[dict[str, Any]]:
    """One prompt with an image in it, and with another; an engine with that model is open."""
    image = stack.host.call("token", text="<image>")
    tokens = [*words(20, "before"), image, *words(150, "after")]
    return [{"tokens": tokens, "images": [seed]} for seed in (1, 2)]


@pytest.mark.parametrize(("connector", "server"), [("ExtraKeysConnector", "ours"), ("TunnellingConnector", "lmcache")])
def test_our_connector_is_right_on_everything(stack: Stack, connector: str, server: str) -> None:
    """The same requests, natively on our server and through the tunnel on LMCache's: each misses, then hits its own.

    Text is loaded in the step, pictures between steps.
    """
    requests = text_requests(stack, "tenant/with@characters")
    expected = stack.expected("llama", *text_requests(stack), **LORA)
    stack.open("llama", connector, server, **LORA)
    answers = stack.run(*requests, *requests)
    assert [0] * 4 + [256] * 4 == [one["cached"] for one in answers]
    assert expected * 2 == [one["tokens"] for one in answers]
    stack.open("llava", connector, server)
    x, y = image_requests(stack)
    pictures = stack.expected("llava", x, y)
    stack.open("llava", connector, server, load="async")
    answers = stack.run(x, y, x, y)
    assert pictures * 2 == [one["tokens"] for one in answers]
    cached = [one["cached"] for one in answers]
    assert cached[0] == 0
    assert cached[1] < cached[3]
    assert cached[2] == cached[3] > 0


def test_a_released_engine_goes_on_when_its_server_is_replaced(stack: Stack, peer_logs: Path) -> None:
    """LMCache's server, then ours in its place, under a running engine: right answers throughout, and hits again."""
    text = text_requests(stack)[0]
    expected = stack.expected("llama", *text_requests(stack), **LORA)[0]
    port = free_port()
    stack.addresses["replaced"] = f"tcp://127.0.0.1:{port}"
    with RealServer(peer_logs / "replaced.log", chunk_size=CHUNK, port=port):
        stack.open("llama", "LMCacheMPConnector", "replaced", **LORA)
        answers = stack.run(text, text)
        assert [0, 256] == [one["cached"] for one in answers]
    with our_server(chunk_size=CHUNK, address=stack.addresses["replaced"]):
        ends = time.monotonic() + 60
        answers += stack.run(text)
        while answers[-1]["cached"] != 256:
            assert time.monotonic() < ends, [one["cached"] for one in answers]
            answers += stack.run(text)
    assert all(one["tokens"] == expected for one in answers)
