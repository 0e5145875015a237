"""A process with a real vLLM engine in it, told what to do by lines of JSON. Runs in the engine's own environment.

One engine at a time, in this process (scheduler and worker too, unless the engine has several workers), so that a test
can look at the connector.
"""

import copy
import faulthandler
import gc
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from answering import answer_calls
from PIL import Image

BLOCK_SIZE = 32


class EngineHost:
    """One engine at a time, and what can be asked of it."""

    def __init__(self) -> None:
        self.llm: Any = None

    # ---- models

    def build_model(self, name: str, folder: str) -> str:
        """Write a tiny model."""
        from tiny_models import build_model

        build_model(name, Path(folder))
        return folder

    def build_adapter(self, model: str, folder: str, seed: int) -> str:
        """Write a tiny adapter."""
        from tiny_models import build_adapter

        build_adapter(Path(model), Path(folder), seed)
        return folder

    # ---- engines

    def open(
        self,
        model: str,
        settings: dict[str, Any] | None = None,
        *,
        connector: str = "ExtraKeysConnector",
        module: str = "protocol_v2.connectors.vllm",
        role: str = "kv_both",
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start an engine, with a connector where there are settings for one."""
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        self.close()
        wanted: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": 16 << 20,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": False,
            "seed": 0,
            "disable_log_stats": True,
            "mm_processor_cache_gb": 0.05,
        }
        if "llava" in model:
            wanted["limit_mm_per_prompt"] = {"image": 2}
        if "qwen2vl" in model:
            wanted["limit_mm_per_prompt"] = {"image": 2, "video": 1}
        if settings is not None:
            wanted["kv_transfer_config"] = KVTransferConfig(
                kv_connector=connector,
                kv_role=role,
                kv_connector_module_path=module,
                kv_connector_extra_config=settings,
            )
        wanted |= options or {}
        if "kv_events_config" in wanted:
            wanted["kv_events_config"] = KVEventsConfig(**wanted["kv_events_config"])
        self.llm = LLM(model=model, **wanted)

    def close(self) -> None:
        """End the engine."""
        if self.llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    # ---- requests

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run requests in one batch; greedy."""
        prompts = [self._prompt(one) for one in requests]
        outputs = self.llm.generate(
            prompts,
            [self._sampling(one) for one in requests],
            lora_request=[self._adapter(one) for one in requests],
            use_tqdm=False,
        )
        return [
            {
                "tokens": list(one.outputs[0].token_ids),
                "logprobs": [max(at.logprob for at in place.values()) for place in one.outputs[0].logprobs],
                "cached": one.num_cached_tokens or 0,
                "prompt": len(one.prompt_token_ids),
                "reason": one.outputs[0].finish_reason,
            }
            for one in outputs
        ]

    def abort(self, requests: list[dict[str, Any]], steps: int) -> int:
        """Begin requests, take steps, abort them all, and let the engine run dry; requests that were not over."""
        engine = self.llm.llm_engine
        names = []
        for place, one in enumerate(requests):
            name = f"abort-{time.monotonic_ns()}-{place}"
            engine.add_request(name, self._prompt(one), self._sampling(one), lora_request=self._adapter(one))
            names.append(name)
        for _ in range(steps):
            if engine.has_unfinished_requests():
                engine.step()
        left = int(engine.get_num_unfinished_requests())
        engine.abort_request(names)
        core = engine.engine_core.engine_core
        ends = time.monotonic() + 120
        while core.scheduler.has_requests() and time.monotonic() < ends:
            core.step()
        return left

    def converse(self, turns: list[dict[str, Any]]) -> dict[str, Any]:
        """A streaming session: each turn appends to one request, which keeps its KV; all tokens, and the answers."""
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        core = engine.engine_core.engine_core
        name = f"session-{time.monotonic_ns()}"
        tokens: list[int] = []
        answers = []
        for one in turns:
            params = self._sampling(one)
            params.output_kind = RequestOutputKind.DELTA
            request = engine.input_processor.process_inputs(
                name, self._prompt(one), params, engine.get_supported_tasks(), resumable=True
            )
            request.external_req_id = name
            engine.output_processor.add_request(request, None, None, 0)
            theirs = copy.copy(
                request
            )  # both sides extend the prompt of a session: in one process they must not share it
            theirs.prompt_token_ids = list(request.prompt_token_ids)
            engine.engine_core.add_request(theirs)
            answer: dict[str, Any] = {"tokens": [], "logprobs": []}
            while core.scheduler.has_unfinished_requests():
                for output in engine.step():
                    answer["tokens"] += output.outputs[0].token_ids
                    answer["logprobs"] += [
                        max(at.logprob for at in place.values()) for place in output.outputs[0].logprobs
                    ]
            answers.append(answer)
            tokens = list(core.scheduler.requests[name].all_token_ids)
        core.abort_requests([name])
        while core.scheduler.has_requests():
            core.step()
        return {"tokens": tokens, "answers": answers}

    def _prompt(self, one: dict[str, Any]) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": one["tokens"]}
        data: dict[str, Any] = {}
        if one.get("images"):
            data["image"] = [picture(seed) for seed in one["images"]]
        if one.get("videos"):
            data["video"] = [film(seed) for seed in one["videos"]]
        if data:
            prompt["multi_modal_data"] = data
        if one.get("uuids"):
            prompt["multi_modal_uuids"] = {"image": one["uuids"]}
        if one.get("salt"):
            prompt["cache_salt"] = one["salt"]
        return prompt

    def _sampling(self, one: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=one.get("max_tokens", 8), ignore_eos=True, logprobs=1)

    def _adapter(self, one: dict[str, Any]) -> Any:
        from vllm.lora.request import LoRARequest

        lora = one.get("adapter")
        if lora is None:
            return None
        return LoRARequest(lora["name"], lora["number"], lora["path"], load_inplace=lora.get("reload", False))

    # ---- looking inside

    def token(self, text: str) -> int:
        """A token's number."""
        return int(self.llm.get_tokenizer().convert_tokens_to_ids(text))

    def facts(self) -> dict[str, Any]:
        """The connector's counters and what it still holds."""
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        side = connector.scheduler.side
        return {**side.counters.facts(), "standing": len(side), "root": connector.scheduler.space.root.hex()}

    def metrics(self) -> dict[str, float]:
        """The engine's own counters."""
        return {one.name: one.value for one in self.llm.get_metrics() if hasattr(one, "value")}

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """Empty the engine's own prefix cache, and the connector's where that is wanted."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))


def picture(seed: int) -> Image.Image:
    """A picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (112, 112, 3), dtype=np.uint8))


def film(seed: int) -> Any:
    """Four frames of noise."""
    return np.random.default_rng(seed).integers(0, 255, (4, 112, 112, 3), dtype=np.uint8)


def main() -> None:
    """Answer until stdin ends."""
    faulthandler.register(signal.SIGUSR1)  # where does it hang? says it to the log
    answer_calls(EngineHost).close()


if __name__ == "__main__":
    main()
