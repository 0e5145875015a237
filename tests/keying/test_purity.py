"""keying depends on nothing but its arguments, and is light to import."""

import os
import subprocess
import sys
from pathlib import Path

DERIVE = """
import json, sys
from keying import *
space = KeySpace("m", chunk_size=4, kv_dtype="bfloat16", attributes={"b": "2", "a": "1"})
extra = [MultimodalItem("x", 2, 6), LoraAdapter("a", "r"), CacheSalt("s"), Tag("t", b"v")]
extra.append(PromptEmbeds(8, b"ab", 1, "u"))
print(json.dumps([key.digest.hex() for key in chunk_keys(space, list(range(12)), set(extra))]))
"""


def run(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_two_processes_with_different_hash_seeds_agree() -> None:
    """H1, H3, H4: no process-seeded hash is anywhere in a key, also when extra keys come as a set."""
    first = run(DERIVE, PYTHONHASHSEED="1")
    assert first == run(DERIVE, PYTHONHASHSEED="2")
    assert first.count('"') == 6


def imported(names: str) -> set[str]:
    """Top-level modules that importing these brings into a fresh interpreter."""
    code = f"import sys; before = set(sys.modules); import {names}; print(*(set(sys.modules) - before))"
    return {name.partition(".")[0] for name in run(code).split()}


def test_importing_keying_is_light() -> None:
    """Only the standard library, and nothing heavy of it; how long that takes is a row of bench/keys.py."""
    heavy = {"asyncio", "concurrent", "ctypes", "email", "multiprocessing", "socket", "subprocess", "threading", "xml"}
    brought = imported("keying, keying.engines")
    assert {"keying"} == brought - sys.stdlib_module_names
    assert not brought & heavy
    assert {"msgspec"} <= imported("msgspec") - sys.stdlib_module_names
    assert {"asyncio", "socket"} <= imported("asyncio") & heavy


def test_the_environment_is_not_read() -> None:
    """Keys are the same with an empty environment and another working directory."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    assert (
        run(DERIVE)
        == subprocess.run(
            [sys.executable, "-c", DERIVE],
            env={"PYTHONPATH": str(Path.cwd()) + os.pathsep + path},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
    )
