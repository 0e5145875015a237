"""The asyncio client: the same calls, results and errors, and an event loop that is never blocked."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from keying import CacheSalt, chunk_keys
from protocol_v2.aio import AsyncCacheClient
from protocol_v2.client import CacheClient
from protocol_v2.errors import (
    ClientClosedError,
    LocalProtocolError,
    RequestTimeoutError,
    ServerError,
    ServerUnavailableError,
    SpaceMismatchError,
)
from tests.protocol_v2.strategies import OTHER_SPACE
from tests.protocol_v2.test_client import KEYS, QUICK, SPACE, STEADY, TOKENS, make_server, router, tensors

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.zmq, pytest.mark.asyncio]


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncCacheClient]:
    """A client of a running server."""
    with make_server(f"ipc://{tmp_path}/s") as server:
        async with AsyncCacheClient(server.address, SPACE, patience=STEADY, timeout=20.0) as made:
            yield made


async def test_the_main_job(client: AsyncCacheClient) -> None:
    """Miss, store, hit, retrieve, release, end; another salt misses what this one hits."""
    established = await client.wait_ready()
    assert established is not None
    assert 0 == (await client.lookup("r", KEYS)).hit_chunks
    assert 4 == (await client.store("r", KEYS, tensors(4))).stored
    hit = await client.lookup("r", KEYS)
    other = await client.lookup("o", chunk_keys(SPACE, TOKENS, [CacheSalt("other")]))
    assert (4, 0) == (hit.hit_chunks, other.hit_chunks)
    assert hit.lease is not None
    got = await client.retrieve(hit.lease, 4)
    assert all(torch.equal(one.tensors[0], want) for one, want in zip(got.chunks, tensors(4), strict=True))
    assert 4 == (await client.release(hit.lease)).released
    assert (await client.end_session("r")).known
    assert established.server_boot_id == (await client.ping()).boot
    assert await client.status()
    assert 4 == (await client.prefetch("p", KEYS)).resident
    await client.end_session("p")
    assert 4 == (await client.clear("space")).objects


async def test_calls_run_side_by_side(client: AsyncCacheClient) -> None:
    """A hundred calls at once, each with its own answer."""

    async def work(number: int) -> int:
        keys = chunk_keys(SPACE, range(1000 * number, 1000 * number + 4 * (number % 4 + 1)))
        await client.store(f"w{number}", keys, tensors(len(keys)))
        return (await client.lookup(f"w{number}", keys)).hit_chunks

    assert [number % 4 + 1 for number in range(100)] == await asyncio.gather(*map(work, range(100)))
    assert 0 == client.pending


async def test_a_large_retrieve_comes_whole(tmp_path: Path) -> None:
    """What does not fit one message is asked for until it is there, and a part of the range is that part."""
    with make_server(f"ipc://{tmp_path}/s", max_payload_bytes=10_000) as server:
        async with AsyncCacheClient(server.address, SPACE, patience=STEADY, timeout=20.0) as client:
            assert 4 == (await client.store("r", KEYS, tensors(4, size=1000))).stored
            hit = await client.lookup("r", KEYS)
            assert hit.lease is not None
            for first, count in ((0, 4), (1, 3)):
                got = await client.retrieve(hit.lease, count, first=first)
                wanted = tensors(4, size=1000)[first : first + count]
                assert all(torch.equal(a.tensors[0], b) for a, b in zip(got.chunks, wanted, strict=True))
                assert (None, None) == (got.miss, got.failure)


async def test_waiting_does_not_block_the_loop(tmp_path: Path) -> None:
    """While a call waits for a silent server, the loop turns."""
    address = f"ipc://{tmp_path}/s"
    with router(address):
        async with AsyncCacheClient(address, SPACE) as client:
            turns = 0

            async def turn() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0.005)

            turning = asyncio.create_task(turn())
            results = await asyncio.gather(
                client.lookup("r", KEYS, timeout=0.3),
                client.store("r", KEYS, tensors(4), timeout=0.3),
                client.retrieve(bytes(16), 1, timeout=0.3),
            )
            turning.cancel()
    assert all(isinstance(one.failure, RequestTimeoutError) for one in results)
    assert turns > 20


async def test_failures_are_those_of_the_synchronous_client(tmp_path: Path, client: AsyncCacheClient) -> None:
    """Misses without a server, typed errors for what the caller did wrong, a refusal for another space."""
    async with AsyncCacheClient(f"ipc://{tmp_path}/none", SPACE, patience=QUICK) as dead:
        assert isinstance((await dead.lookup("r", KEYS)).failure, ServerUnavailableError)
        with pytest.raises(ServerUnavailableError):
            await dead.ping()
    with pytest.raises(LocalProtocolError):
        await client.lookup("", KEYS)
    with pytest.raises(LocalProtocolError):
        await client.lookup("r", KEYS, timeout=-1)
    await client.lookup("r", KEYS)
    with pytest.raises(ServerError):
        await client.lookup("r", chunk_keys(SPACE, [7] * 8))
    with make_server(f"ipc://{tmp_path}/pinned", expected=(OTHER_SPACE,)) as pinned:
        async with AsyncCacheClient(pinned.address, SPACE, patience=STEADY) as refused:
            with pytest.raises(SpaceMismatchError):
                await refused.wait_ready()


async def test_a_cancelled_call_is_forgotten(tmp_path: Path) -> None:
    """Cancelling ends the wait at once, also for a store, and leaves nothing pending."""
    address = f"ipc://{tmp_path}/s"
    with router(address):
        async with AsyncCacheClient(address, SPACE) as client:
            calls: list[asyncio.Task[Any]] = [
                asyncio.create_task(client.lookup("r", KEYS, timeout=30.0)),
                asyncio.create_task(client.store("r", KEYS, tensors(4), timeout=30.0)),
                asyncio.create_task(client.wait_ready(0.5)),
            ]
            await asyncio.sleep(0.05)
            begun = time.monotonic()
            for call in calls:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [asyncio.CancelledError] * 3 == [type(one) for one in results]
            assert time.monotonic() - begun < 1.0
            for _ in range(100):
                if client.pending == 0:
                    break
                await asyncio.sleep(0.01)
            assert 0 == client.pending


async def test_closing_ends_what_waits(tmp_path: Path) -> None:
    """Under two seconds whatever the peer does; later calls say that the client was closed."""
    address = f"ipc://{tmp_path}/s"
    with router(address):
        client = AsyncCacheClient(address, SPACE)
        call = asyncio.create_task(client.lookup("r", KEYS, timeout=30.0))
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        await client.close()
        with pytest.raises(ClientClosedError):
            await call
        assert time.monotonic() - begun < 2.0
        with pytest.raises(ClientClosedError):
            await client.ping()


async def test_both_clients_have_the_same_calls() -> None:
    """Names, parameters and defaults are one surface."""

    def surface(kind: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(member))
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert surface(CacheClient) == surface(AsyncCacheClient)


async def test_a_client_may_be_used_from_two_loops(client: AsyncCacheClient) -> None:
    """Replies find the loop that asked."""

    def other_loop() -> int:
        return asyncio.run(client.lookup("other", KEYS)).hit_chunks

    await client.store("r", KEYS, tensors(2))
    assert [2, 2] == [await asyncio.to_thread(other_loop), (await client.lookup("r", KEYS)).hit_chunks]
