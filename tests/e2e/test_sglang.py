"""SGLang's own requests, slots, allocator and radix tree over our cache: two processes in turn, one server.

No engine and no model runs: values stand for KV, and each follows from everything before it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cache_server import Server
from tests.e2e.environment import SGLANG_STAMP, WITHOUT_SGLANG
from tests.e2e.host import SglangHost

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not SGLANG_STAMP.exists(), reason=WITHOUT_SGLANG)]

TEXT = list(range(300, 344))
PICTURE = [*range(300, 320), *[9] * 10, *range(320, 334)]
"""A text with a picture of ten tokens behind the first 20: two chunks of 8 are before it."""


def made(local: int, offered: int, delivered: int | None = None) -> dict[str, Any]:
    """What a request was served: tokens of the tree, offered by the cache behind them and delivered; no wrong value."""
    return {"local": local, "offered": offered, "delivered": offered if delivered is None else delivered, "wrong": []}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For logs, and a short path for the socket."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture(scope="module")
def cache(place: Path) -> Iterator[Server]:
    """A cache server."""
    server = Server(place).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def ranks(place: Path) -> Iterator[list[SglangHost]]:
    """Two processes with SGLang."""
    with SglangHost(place / "first.log") as first, SglangHost(place / "second.log") as second:
        yield [first, second]


def test_the_second_process_loads_what_the_first_saved(ranks: list[SglangHost], cache: Server) -> None:
    """Text, salts and extra keys over SGLang's tree: each hits its own in the tree, and behind it in the cache.

    The tree is made by SGLang's registry and is one of its own; every slot is free again at the end.
    """
    first, second = ranks
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "s"}, {"cache_salt": "t"}, {"extra_key": "s"}]
    for rank, served in ((first, made(0, 0)), (second, made(0, 40))):
        classes = rank.call("open", address=cache.address, model="sgl text")
        assert ["StoredTree", "RadixCache", "BasePrefixCache"] == classes[:3]
        for number, kind in enumerate(kinds):
            assert served == rank.call("serve", rid=f"r{number}", tokens=TEXT, **kind)
    assert made(43, 0) == second.call("serve", rid="again", tokens=TEXT)
    assert made(24, 0) == second.call("serve", rid="part", tokens=[*TEXT[:24], *range(500, 508)], cache_salt="s")
    assert 4 * 44 + 8 == second.call("evict")
    assert made(0, 40) == second.call("serve", rid="evicted", tokens=TEXT, cache_salt="t")
    facts = second.call("facts")
    assert (0, 0) == (facts["load_failures"], facts["standing"])
    assert (0, 0) == cache.left_over()


def test_a_prefix_of_the_tree_goes_on_in_the_cache(ranks: list[SglangHost], cache: Server) -> None:
    """What the tree has is not loaded again, also where it ends inside a chunk."""
    first, second = ranks
    first.call("open", address=cache.address, model="sgl behind")
    assert made(0, 0) == first.call("serve", rid="a", tokens=TEXT)
    second.call("open", address=cache.address, model="sgl behind")
    assert made(0, 8) == second.call("serve", rid="b", tokens=TEXT[:12])
    assert made(12, 28) == second.call("serve", rid="c", tokens=TEXT)
    assert (0, 0) == cache.left_over()


def test_pictures_keep_apart_and_share_the_text_before_them(ranks: list[SglangHost], cache: Server) -> None:
    """SGLang writes sentinels of a picture over its placeholders; the keys have its 256-bit identity and place."""
    for rank, hits in zip(ranks, ((0, 16, 40, 40), (40, 40, 40, 40)), strict=True):
        rank.call("open", address=cache.address, model="sgl pictures")
        for number, (picture, hit) in enumerate(zip((1, 2, 1, 2), hits, strict=True)):
            served = rank.call("serve", rid=f"r{number}", tokens=PICTURE, picture=picture)
            assert [] == served["wrong"]
            assert hit == served["offered"] == served["delivered"]
            rank.call("evict")
    assert (0, 0) == cache.left_over()


def test_a_request_without_identity_goes_by(ranks: list[SglangHost], cache: Server) -> None:
    """An adapter that nobody can name is neither looked up nor saved, by SGLang's own request too."""
    first, _ = ranks
    first.call("open", address=cache.address, model="sgl adapter")
    for number in range(2):
        assert made(0, 0) == first.call("serve", rid=f"r{number}", tokens=TEXT, lora_id="5")
        first.call("evict")
    facts = first.call("facts")
    assert (2, 0, 0) == (facts["bypassed.unknown_adapter"], facts["saved_chunks"], facts["lookups"])


def test_keys_of_tokens_alone_would_be_seen(ranks: list[SglangHost], cache: Server) -> None:
    """Negative control: without extra keys another picture's values are loaded, and seen to be wrong."""
    first, second = ranks
    first.call("open", address=cache.address, model="sgl control", wrong_keys=True)
    assert made(0, 0) == first.call("serve", rid="a", tokens=PICTURE, picture=1)
    second.call("open", address=cache.address, model="sgl control", wrong_keys=True)
    served = second.call("serve", rid="b", tokens=PICTURE, picture=2)
    assert 40 == served["delivered"]
    assert {20, 39} <= set(served["wrong"])
    assert not set(range(20)) & set(served["wrong"])


def test_a_dead_server_is_a_tree_alone(ranks: list[SglangHost], place: Path) -> None:
    """Killed: SGLang serves from its tree and computes the rest."""
    folder = place / "d"
    folder.mkdir()
    server = Server(folder).start()
    first, _ = ranks
    try:
        first.call("open", address=server.address, model="sgl dead", lookup_timeout=0.5, load_timeout=0.5)
        assert made(0, 0) == first.call("serve", rid="a", tokens=TEXT)
        server.kill()
        assert made(43, 0) == first.call("serve", rid="b", tokens=TEXT)
        first.call("evict")
        assert made(0, 0) == first.call("serve", rid="c", tokens=TEXT)
        assert 0 < first.call("facts")["lookup_failures"]
    finally:
        server.stop()
