"""Three processes with real engines, driven together: one without a cache, and two that share one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.host import Host
from tests.e2e.prompts import Answer, Request

MODELS = ("llama", "llava", "qwen2vl", "gemma3")
ADAPTERS = {"a": 1, "b": 2, "c": 3}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
CHUNK = 64
"""Chunk size where a test does not say another: two blocks of the engine."""


PATIENT: dict[str, Any] = {
    "wait_for_store": True,
    "lookup_timeout": 30,
    "load_timeout": 60,
    "store_timeout": 60,
    "server_timeout": 30,
}
"""Settings with which no answer comes too late on a busy machine: a test that wants one to be late says so."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of requests.

    Attributes:
        answers: in order.
        facts: the connector's counters afterwards.
    """

    answers: list[Answer]
    facts: dict[str, Any]

    @property
    def cached(self) -> list[int]:
        """Tokens of each request that were not computed."""
        return [one["cached"] for one in self.answers]


class Engines:
    """Models, adapters and processes.

    Args:
        folder: for models and logs.
        address: of the cache server that tests share.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.hosts = {name: Host(folder / f"{name}.log") for name in ("plain", "first", "second")}
        self._known: dict[str, Answer] = {}
        self._open: dict[str, str] = {}
        plain = self.hosts["plain"]
        for name in MODELS:
            plain.call("build_model", name=name, folder=str(folder / name))
        for model in ("llama", "llava"):
            for letter, seed in ADAPTERS.items():
                self.build_adapter(model, f"{model}-{letter}", seed)

    def build_adapter(self, model: str, name: str, seed: int) -> str:
        """An adapter with weights of its own for each seed, in a folder of that name; its path."""
        place = self.folder / name
        self.hosts["plain"].call("build_adapter", model=str(self.folder / model), folder=str(place), seed=seed)
        return str(place)

    def adapter(
        self, folder: str, *, name: str | None = None, number: int | None = None, reload: bool = False
    ) -> dict[str, Any]:
        """An adapter as a request names it; name and number follow from the folder's last letter."""
        letter = folder[-1]
        return {
            "name": letter if name is None else name,
            "number": ADAPTERS.get(letter, 9) if number is None else number,
            "path": str(self.folder / folder),
            "reload": reload,
        }

    def expected(self, model: str, requests: Sequence[Request], **options: Any) -> list[Answer]:
        """What an engine without a cache answers, each request alone; computed once."""
        engine = json.dumps([model, options], sort_keys=True)
        keys = [json.dumps([engine, one], sort_keys=True) for one in requests]
        for key, one in zip(keys, requests, strict=True):
            if key not in self._known:
                if self._open.get("plain") != engine:
                    self.hosts["plain"].call("open", model=str(self.folder / model), options=options)
                    self._open["plain"] = engine
                self._known[key] = self.hosts["plain"].call("generate", requests=[one])[0]
        return [self._known[key] for key in keys]

    def open(
        self,
        process: str,
        model: str,
        *,
        address: str | None = None,
        connector: str = "ExtraKeysConnector",
        module: str = "protocol_v2.connectors.vllm",
        role: str = "kv_both",
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Start an engine with a connector; the one that the process had ends."""
        self.hosts[process].call(
            "open",
            model=str(self.folder / model),
            settings={"address": address or self.address, "chunk_size": CHUNK, **PATIENT, **settings},
            connector=connector,
            module=module,
            role=role,
            options=options or {},
        )

    def run(self, process: str, requests: Sequence[Request], *, batch: bool = False) -> Run:
        """Run requests one after the other, or all at once."""
        host = self.hosts[process]
        together = [list(requests)] if batch else [[one] for one in requests]
        answers = [answer for some in together for answer in host.call("generate", requests=some)]
        return Run(answers, host.call("facts"))

    def close(self) -> None:
        """End all processes."""
        for host in self.hosts.values():
            host.finish()
        for host in self.hosts.values():
            host.close()
