"""How long keys take: `keying` against the physical floor and against the peers' derivations, in one run.

    python bench/keys.py [--tokens 131072] [--rounds 30] [--json]

LMCache's released hasher runs from ``.venv-lmcache`` (``make interop`` builds it), in a process of its own that takes
its turn like the other rows and times itself; without it that row is missing, and it is said so. Its chain is also
written down here, in the tightest way that we know of.

The floor is what no implementation can avoid: the list of ids becomes bytes once, and one SHA-256 runs over them.
Every figure is the median of interleaved rounds, so a slow moment of the machine hits all rows alike. Ratios are to the
floor of the same rounds. The bars are for chunk 256: at most 2x, and at most 15 % more with images, adapter and salt.
"""

import contextlib
import hashlib
import json
import random
import statistics
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import blake3
import cbor2
import typer
from rich.console import Console
from rich.table import Table

from keying import CacheSalt, ChunkKeyChain, ExtraKey, KeySpace, LoraAdapter, MultimodalItem, chunk_keys

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
ITEM_TOKENS = 1024
VOCABULARY = 150_000


def extras(n_tokens: int) -> list[ExtraKey]:
    """Eight images of 1024 tokens, one adapter, one salt."""
    step = n_tokens // 8
    images = [MultimodalItem(hashlib.sha256(bytes([i])).hexdigest(), i * step + 100, ITEM_TOKENS) for i in range(8)]
    return [*images, LoraAdapter("sql", "sha256:" + "a" * 64), CacheSalt("tenant-7")]


def floor(tokens: list[int]) -> bytes:
    """One pass to bytes, one digest."""
    return hashlib.sha256(array("I", tokens).tobytes()).digest()


def lmcache_chain(tokens: list[int], chunk: int) -> bytes:
    """The chain of LMCache 0.5.6's token hasher: blake3 over the previous digest and big-endian ids."""
    parent = blake3.blake3(bytes(12)).digest()
    pack = struct.Struct(f">{chunk}I").pack
    for start in range(0, len(tokens) - chunk + 1, chunk):
        parent = blake3.blake3(parent + pack(*tokens[start : start + chunk])).digest()
    return parent


def vllm_chain(tokens: list[int], chunk: int) -> bytes:
    """The chain of vLLM's ``sha256_cbor``: canonical CBOR of (parent, ids, extra keys)."""
    parent = hashlib.sha256(b"vllm-none-hash").digest()
    for start in range(0, len(tokens) - chunk + 1, chunk):
        block = (parent, tuple(tokens[start : start + chunk]), None)
        parent = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()
    return parent


def decode_steps(space: KeySpace, tokens: list[int], steps: int) -> Callable[[], object]:
    """Appends ``steps`` single tokens to a chain that holds the whole prompt already."""
    chain = ChunkKeyChain(space, extras(len(tokens)))
    chain.extend(tokens)
    held = chain.n_tokens
    fresh = [[token] for token in tokens[:steps]]

    def run() -> None:
        for step in fresh:
            chain.extend(step)
        chain.truncate(held)

    return run


@contextlib.contextmanager
def released_hasher(tokens: list[int], chunk: int) -> Iterator[dict[str, Callable[[], float]]]:
    """A row that derives with the released LMCache and gives its seconds; none where it is not installed."""
    if not PEER_PYTHON.exists():
        yield {}
        return
    command = [str(PEER_PYTHON), str(ROOT / "bench" / "peer_lmcache.py"), "keys", str(chunk)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        print(json.dumps(tokens), file=stdin, flush=True)

        def run() -> float:
            print(file=stdin, flush=True)
            return float(next(line for line in stdout if line[0].isdigit()))

        yield {"LMCache 0.5.6 itself": run}
        stdin.close()


def importing(rounds: int) -> dict[str, float]:
    """Median seconds that imports take in fresh interpreters, started for nothing else, taking turns.

    The floor is `dataclasses`, the one module of the standard library that keying cannot do without.
    """

    def seconds(names: str) -> float:
        code = f"import time; begin = time.perf_counter(); import {names}; print(time.perf_counter() - begin)"
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT).stdout)

    rows = {"floor: import dataclasses": "dataclasses", "import keying": "keying, keying.engines"}
    return measure({name: partial(seconds, names) for name, names in rows.items()}, rounds)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of the seconds that each case says it took; the cases take turns."""
    for run in cases.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            taken[name].append(run())
    return {name: statistics.median(times) for name, times in taken.items()}


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the request.")] = 131_072,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures for a script.")] = False,
) -> None:
    """Print key derivation as a ratio to the floor, for chunk 256 and 16."""
    rng = random.Random(20260)
    ids = [rng.randrange(VOCABULARY) for _ in range(tokens)]
    small = [rng.randrange(2, 256) for _ in range(tokens)]
    ones = [1] * tokens
    figures: dict[str, dict[str, float]] = {}
    for chunk in (256, 16):
        space = KeySpace("org/model", chunk_size=chunk, kv_dtype="bfloat16")
        extra_keys = extras(tokens)
        steps = 512
        cases: dict[str, Callable[[], object]] = {
            "floor: list to bytes + one SHA-256": partial(floor, ids),
            "keying, text": partial(chunk_keys, space, ids),
            "keying, 8 images + adapter + salt": partial(chunk_keys, space, ids, extra_keys),
            "keying, text, every id below 256": partial(chunk_keys, space, small),
            "keying, text, every id 1 (worst case)": partial(chunk_keys, space, ones),
            "LMCache 0.5.6 chain (blake3), written tightly": partial(lmcache_chain, ids, chunk),
            "vLLM chain (sha256_cbor)": partial(vllm_chain, ids, chunk),
            f"keying, {steps} decode steps of one token": decode_steps(space, ids, steps),
        }
        with released_hasher(ids, chunk) as peer:
            ours = {name: partial(timed, run) for name, run in cases.items()}
            figures[f"{tokens:,} tokens, chunk {chunk}"] = measure({**ours, **peer}, rounds)
    figures["imports"] = importing(rounds)
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    console = Console()
    for title, rows in figures.items():
        base = next(iter(rows.values()))
        table = Table("what", "ms", "x floor", title=title)
        for name, seconds in rows.items():
            if "decode steps" in name:
                table.add_row(name, f"{seconds * 1e3:.3f}", f"{seconds / steps * 1e6:.2f} us a step")
            else:
                table.add_row(name, f"{seconds * 1e3:.3f}", f"{seconds / base:.2f}")
        console.print(table)
    if not PEER_PYTHON.exists():
        console.print("LMCache 0.5.6 is not installed here ('make interop' does it), so its own row is missing")


if __name__ == "__main__":
    typer.run(main)
