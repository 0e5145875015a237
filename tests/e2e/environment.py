"""Where the real engine lives, and what to say when it is not there."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
STAMP = ROOT / ".venv-vllm" / ".installed"
"""Written by `make e2e` when the environment is whole."""

ASKED = "EXTRA_KEYS_E2E"
"""Variable that `make e2e` sets to 1: an ordinary run of the tests does not start engines."""

WHY_NOT = (
    "no real engine was tested: run `make e2e`, which builds vLLM 0.32.0 for CPU in .venv-vllm/ once (about 3 minutes, "
    "2.5 GB) and then takes about a quarter of an hour"
)

SGLANG = ROOT / ".venv-vllm" / "sglang"
"""SGLang's packages, beside those of the engine's environment that it shares."""

SGLANG_STAMP = SGLANG / ".installed"
"""Written by `make sglang`."""

WITHOUT_SGLANG = (
    "SGLang's own classes were not tested: run `make sglang`, which adds SGLang 0.5.23 to the environment of "
    "`make e2e` (1.3 GB, most of it Triton) and takes about two minutes"
)

ALONE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Variables of an engine that is offline, on loopback, in one thread, with nothing compiled."""

needs_engine = pytest.mark.skipif(os.environ.get(ASKED) != "1" or not STAMP.exists(), reason=WHY_NOT)


def engine_environment(*more: Path) -> dict[str, str]:
    """Variables for a process of the engine: alone, and able to import this tree and the modules that tests hand to it.

    Args:
        more: folders with further modules.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    paths = (str(ROOT), str(Path(__file__).parent / "engine"), *map(str, more))
    return {**inherited, **ALONE, "PYTHONPATH": os.pathsep.join(paths)}
