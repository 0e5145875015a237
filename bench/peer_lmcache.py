"""LMCache 0.5.6's own code, run by `bench/wire.py` and `bench/keys.py` with the interpreter of ``.venv-lmcache``.

    peer_lmcache.py lookup TOKENS ROUNDS

Starts the released server on a free port of 127.0.0.1, drives it with the released client, and prints one line of JSON:
median seconds of lookup, wait for the prefetch status and end of session, for a miss and for a full hit.

    peer_lmcache.py keys CHUNK

Reads a line of JSON, the token ids of a request. Then, for each further line, derives their chunk hashes once with the
released hasher and prints the seconds it took.
"""

import json
import os
import pickle
import random
import socket
import statistics
import subprocess
import sys
import time
import uuid

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["PYTHONHASHSEED"] = "0"

CHUNK = 256
TIMEOUT = 30.0
MODEL = "bench-model"


def keys(chunk: int) -> None:
    """The hasher of the released server, on demand."""
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    hasher = TokenHasher(chunk_size=chunk, hash_algorithm="blake3")
    tokens = json.loads(sys.stdin.readline())
    for _ in sys.stdin:
        begin = time.perf_counter()
        hashes = hasher.compute_chunk_hashes(tokens)
        taken = time.perf_counter() - begin
        assert len(hashes) == len(tokens) // chunk
        print(taken, flush=True)


def lookup(n_tokens: int, rounds: int) -> None:
    """Measure and print."""
    import torch
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{sys.executable} -m lmcache.v1.multiprocess.server --host 127.0.0.1 --port {port} --chunk-size {CHUNK}"
    command += " --l1-size-gb 2 --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode engine_driven"
    process = subprocess.Popen(
        [*command.split(), "--disable-observability", "--shm-name", "", "--max-workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        client.noop().result(timeout=60)
        client.register_kv_cache_engine_driven_context(
            RegisterEngineDrivenContextPayload(
                instance_id=1,
                model_name=MODEL,
                world_size=1,
                block_size=16,
                num_layers=1,
                hidden_dim_size=8,
                dtype_str="float16",
                use_mla=False,
                num_physical_slots=CHUNK,
            )
        ).result(timeout=TIMEOUT)

        def key(tokens: list[int], request: str, worker: int | None, end: int) -> IPCCacheServerKey:
            return IPCCacheServerKey(
                model_name=MODEL,
                world_size=1,
                worker_id=worker,
                token_ids=tuple(tokens),
                start=0,
                end=end,
                request_id=request,
                cache_salt="",
                request_configs=None,
                num_kv_readers=1,
            )

        def look_up(tokens: list[int]) -> tuple[float, int]:
            request = uuid.uuid4().hex
            begin = time.perf_counter()
            client.lookup(key(tokens, request, None, len(tokens)), 1).result(timeout=TIMEOUT)
            hits = None
            while hits is None:
                hits = client.wait_prefetch_status(request, 10.0).result(timeout=TIMEOUT)
            taken = time.perf_counter() - begin
            if hits:
                client.free_lookup_locks(key(tokens, request, None, hits * CHUNK), 1).result(timeout=TIMEOUT)
            client.end_session(request).result(timeout=TIMEOUT)
            return taken, hits

        rng = random.Random(20261)
        known, unknown = ([rng.randrange(150_000) for _ in range(n_tokens)] for _ in range(2))
        chunks = [torch.zeros(2, 1, CHUNK, 8, dtype=torch.float16) for _ in range(n_tokens // CHUNK)]
        store = key(known, "fill", 0, n_tokens)
        client.prepare_store(store, 1).result(timeout=TIMEOUT)
        assert client.commit_store(store, 1, pickle.dumps(chunks)).result(timeout=TIMEOUT)
        client.end_session("fill").result(timeout=TIMEOUT)
        taken: dict[str, list[float]] = {"miss": [], "hit": []}
        for number in range(rounds + 3):
            for name, tokens, expected in (("miss", unknown, 0), ("hit", known, n_tokens // CHUNK)):
                seconds, hits = look_up(tokens)
                assert hits == expected, (name, hits)
                if number >= 3:
                    taken[name].append(seconds)
        print(json.dumps({name: statistics.median(times) for name, times in taken.items()}))
        client.close()
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    if sys.argv[1] == "keys":
        keys(int(sys.argv[2]))
    else:
        lookup(int(sys.argv[2]), int(sys.argv[3]))
