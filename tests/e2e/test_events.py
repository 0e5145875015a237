"""What routers hear of a real engine: our events, and vLLM's own made into the same."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from keying import CacheSalt, KeySpace, LoraAdapter, MultimodalItem, chunk_digests, chunk_keys
from protocol_v2.chunk_events import ChunkRemoved, ChunkStored, SpaceDescribed
from protocol_v2.chunk_view import ChunkView
from protocol_v2.connectors.lora_revision import lora_content_revision
from protocol_v2.connectors.vllm_events import AmbiguousEventError, VllmEventKeys
from protocol_v2.event_feed import EventSubscriber
from protocol_v2.event_log import FeedItem
from protocol_v2.identity import space_from_wire
from tests.e2e.cache_server import Server
from tests.e2e.engines import CHUNK, LORA, Engines
from tests.e2e.environment import needs_engine
from tests.e2e.prompts import Request, assert_same, full_hit, words

pytestmark = [pytest.mark.e2e, needs_engine]


def heard(folder: Path) -> tuple[KeySpace, list[ChunkStored]]:
    """What a subscriber that comes late hears of our connector."""
    with EventSubscriber(f"ipc://{folder}/ours", f"ipc://{folder}/ours-again", replay_timeout=60) as subscriber:
        events = subscriber.catch_up()
    space = next(one.space for one in events if isinstance(one, SpaceDescribed))
    return space_from_wire(space), [one for one in events if isinstance(one, ChunkStored)]


def vllm_events(folder: Path) -> list[Any]:
    """All blocks that vLLM told as stored, by its replay socket: ``["", topic, number, batch]``, the last one empty."""
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.linger = 0
    events: list[Any] = []
    try:
        asking.connect(f"ipc://{folder}/theirs-again")
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while asking.poll(60_000):
            batch = asking.recv_multipart()[-1]
            if not batch:
                return [event for event in events if event["type"] == "BlockStored"]
            events += msgspec.msgpack.decode(batch)[1]
        raise TimeoutError("vLLM did not answer")
    finally:
        context.destroy(linger=0)


def open_with_events(engines: Engines, folder: Path, model: str, options: dict[str, Any]) -> None:
    """An engine that publishes both kinds of events."""
    theirs = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/theirs",
        "replay_endpoint": f"ipc://{folder}/theirs-again",
    }
    engines.open(
        "first",
        model,
        events=f"ipc://{folder}/ours",
        events_replay=f"ipc://{folder}/ours-again",
        model_revision=f"of {folder.name}",
        options={**options, "enable_prefix_caching": True, "kv_events_config": theirs},
    )


def test_a_router_recomputes_our_keys_and_makes_the_same_of_vllms_events(engines: Engines, folder: Path) -> None:
    """Text, a salt, an adapter: each chunk that our connector tells has the key of the request.

    vLLM's untagged events of the same requests, made into chunk events, have the same keys.
    """
    place = folder / "events-text"
    place.mkdir()
    open_with_events(engines, place, "llama", LORA)
    texts = [words(200, f"events {number}") for number in range(3)]
    requests: list[Request] = [
        {"tokens": texts[0]},
        {"tokens": texts[1], "salt": "a"},
        {"tokens": texts[2], "adapter": engines.adapter("llama-a")},
    ]
    engines.run("first", requests)
    space, ours = heard(place)
    revision = lora_content_revision(engines.folder / "llama-a")
    identities: list[list[Any]] = [[], [CacheSalt("a")], [LoraAdapter("a", revision)]]
    expected = [
        key.digest for text, keys in zip(texts, identities, strict=True) for key in chunk_keys(space, text, keys)
    ]
    for event in ours:
        event.verify()
    assert expected == [event.key for event in ours]

    reader = VllmEventKeys(space, adapter=lambda name: LoraAdapter(name, revision))
    theirs = [chunk for event in vllm_events(place) for chunk in reader.stored(event)]
    assert expected == [chunk.key for chunk in theirs]
    for chunk in theirs:
        chunk.verify()


def test_vllms_events_of_pictures_leave_their_length_open(engines: Engines, folder: Path) -> None:
    """Refused without it; with it, the keys are those that our connector tells."""
    place = folder / "events-pictures"
    place.mkdir()
    open_with_events(engines, place, "llava", {})
    text = words(150, "events picture")
    engines.run("first", [{"tokens": [*text[:30], 4, *text[30:]], "images": [1]}])
    space, ours = heard(place)
    stored = vllm_events(place)
    with pytest.raises(AmbiguousEventError, match="unknown_length"):
        VllmEventKeys(space).stored(stored[0])
    reader = VllmEventKeys(space, item_length=lambda _identifier: 64)
    assert [event.key for event in ours] == [chunk.key for event in stored for chunk in reader.stored(event)]
    identifier = next(pair[0] for pair in stored[0]["extra_keys"][0])
    expanded = [*text[:30], *[4] * 64, *text[30:]]
    keys = chunk_keys(space, expanded, [MultimodalItem(identifier, 30, 64)])
    assert [key.digest for key in keys] == [event.key for event in ours]
    assert CHUNK == space.chunk_size


def told_by(server: Server, subscriber: EventSubscriber) -> list[FeedItem]:
    """All that a server has to tell: it publishes what it collected ten times a second, and says when that is done."""
    ends = time.monotonic() + 60
    while server.facts()["events.pending"] and time.monotonic() < ends:
        time.sleep(0.02)
    return subscriber.catch_up()


def test_a_router_that_hears_the_server_knows_what_an_engine_will_hit(engines: Engines, folder: Path) -> None:
    """Six prompts in room for about three: before each request the view says how much of it will come from the cache.

    Evictions are heard: at the end prompts that were stored are neither promised nor hit.
    """
    place = folder / "events-server"
    place.mkdir()
    feed = (f"ipc://{place}/events", f"ipc://{place}/replay")
    server = Server(place, options=("--memory", "420KiB", "--events", feed[0], "--events-replay", feed[1])).start()
    requests: list[Request] = [{"tokens": words(300, f"routed {number}")} for number in range(6)]
    try:
        reference = engines.expected("llama", requests)
        engines.open("first", "llama", address=server.address)
        root = bytes.fromhex(engines.hosts["first"].call("facts")["root"])
        view, promised, cached = ChunkView(), [], []
        with EventSubscriber(*feed, root=root, replay_timeout=60) as subscriber:
            heard = told_by(server, subscriber)
            space = next(space_from_wire(one.space) for one in heard if isinstance(one, SpaceDescribed))
            for number in (0, 1, 2, 3, 4, 5, 5, 4, 0, 1):
                keys = chunk_digests(space, requests[number]["tokens"])
                told = told_by(server, subscriber)
                heard += told
                view.apply(told)
                promised.append(min(view.leading(keys) * CHUNK, full_hit(300, CHUNK)))
                run = engines.run("first", [requests[number]])
                assert_same([reference[number]], run.answers)
                cached += run.cached
        assert promised == cached
        assert cached[6] == full_hit(300, CHUNK)
        assert 0 in cached[7:]
        assert any(isinstance(one, ChunkRemoved) for one in heard)
        assert 0 == view.lost
    finally:
        server.stop()
