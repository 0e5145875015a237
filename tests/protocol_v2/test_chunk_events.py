"""Chunk events: typed, whole, numbered."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keying import (
    CacheSalt,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    PromptEmbeds,
    Tag,
    chunk_keys,
    pack_tokens,
)
from protocol_v2.chunk_events import (
    EVENTS_VERSION,
    MAX_EVENTS,
    ChunkEvent,
    ChunkRemoved,
    ChunksHeld,
    ChunkStored,
    EventBatch,
    EventError,
    ItemPart,
    SaltedPart,
    SpaceCleared,
    SpaceDescribed,
    decode_batch,
)
from protocol_v2.errors import RemoteProtocolError
from protocol_v2.event_log import DESCRIBE_EVERY, MAX_SPACES, EventLog, FeedReader, Lost, Restarted
from protocol_v2.identity import space_to_wire

SPACE = KeySpace("m", chunk_size=4, kv_dtype="float32", attributes={"rope": "{}"})
EVERY_KIND: list[Any] = [
    CacheSalt("tenant"),
    LoraAdapter("sql", "sha256:ab", 2),
    MultimodalItem("i" * 64, 3, 6),
    PromptEmbeds(9, b"\1\2\3\4", 2, "float16"),
    Tag("t", b"v", 1),
]


def stored(n_tokens: int = 12, extra_keys: Any = (), *, hide_salts: bool = False) -> list[ChunkStored]:
    """The events of a prompt's chunks."""
    keys = chunk_keys(SPACE, range(n_tokens), extra_keys)
    parents = [SPACE.root, *(key.digest for key in keys)]
    return [
        ChunkStored.of(key, parent, bytes(pack_tokens(range(key.start, key.stop))), hide_salts=hide_salts)
        for key, parent in zip(keys, parents, strict=False)
    ]


class Log:
    """A publisher's log of one space."""

    def __init__(self, boot: bytes = b"B" * 16, **others: Any) -> None:
        self.all = EventLog(boot, clock=lambda: 1.5, **others)
        assert self.all.describe(SPACE.root, space_to_wire(SPACE)) is not None

    def append(self, events: Sequence[ChunkEvent]) -> tuple[int, bytes]:
        """A batch of the space."""
        return self.all.append(SPACE.root, events)

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """What is kept of the space."""
        return self.all.since(SPACE.root, first)


def test_a_subscriber_recomputes_every_key_from_what_travelled() -> None:
    """Every kind of extra key, over the wire and back: the key is the hash of what the event tells, types are kept."""
    events = stored(12, EVERY_KIND)
    _, body = Log().append(events)
    back = decode_batch(body).events
    assert tuple(events) == back
    for event in back:
        assert isinstance(event, ChunkStored)
        event.verify()
    first = back[0]
    assert isinstance(first, ChunkStored)
    assert first.parts is not None
    assert {"ItemPart", "AdapterPart", "SaltedPart", "TaggedPart"} == {type(one).__name__ for one in first.parts}
    assert ItemPart("i" * 64, 3, 6) in first.parts


@pytest.mark.parametrize("field", ["key", "parent", "tokens", "parts", "n_tokens"])
def test_an_event_that_does_not_fit_its_key_is_seen(field: str) -> None:
    """Negative control: a change of any part of it is another key."""
    event = stored(8, [CacheSalt("s")])[1]
    changed: dict[str, Any] = {
        "key": bytes(32),
        "parent": SPACE.root,
        "tokens": bytes(pack_tokens([4, 5, 6, 8])),
        "parts": (SaltedPart("t"),),
        "n_tokens": 3,
    }
    with pytest.raises(EventError, match="its key is not"):
        msgspec.structs.replace(event, **{field: changed[field]}).verify()
    event.verify()


def test_parts_that_make_no_key_are_refused() -> None:
    """An item that does not touch the chunk, no tokens: no key is made of that."""
    event = stored(4)[0]
    for change in ({"parts": (ItemPart("i", 9, 2),)}, {"tokens": b""}, {"tokens": b"abc"}):
        with pytest.raises(EventError):
            msgspec.structs.replace(event, **change).verify()


def test_a_salt_is_hidden_where_that_is_wanted_and_never_printed() -> None:
    """Without tokens and parts the key is still told; other chunks stay whole."""
    plain, salted = stored(4, hide_salts=True)[0], stored(4, [CacheSalt("very-secret")], hide_salts=True)[0]
    assert (True, False) == (plain.is_whole, salted.is_whole)
    assert (chunk_keys(SPACE, range(4), [CacheSalt("very-secret")])[0].digest, 0, 4) == (
        salted.key,
        salted.start,
        salted.n_tokens,
    )
    with pytest.raises(EventError, match="neither"):
        salted.verify()
    shown = stored(4, [CacheSalt("very-secret")])
    assert "very-secret" not in repr((shown, shown[0].parts, salted))
    with pytest.raises(EventError, match="tokens"):
        ChunkStored.of(chunk_keys(SPACE, range(4))[0], SPACE.root, b"1234")


def test_a_batch_of_another_version_is_refused() -> None:
    """Never read as if it were this one; other bytes are no batch."""
    _, body = Log().append((SpaceCleared(),))
    batch = msgspec.msgpack.decode(body)
    with pytest.raises(EventError, match="version 2"):
        decode_batch(msgspec.msgpack.encode({**batch, "version": EVENTS_VERSION + 1}))
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode({**batch, "boot": b"short"}), body[:-1]):
        with pytest.raises(RemoteProtocolError):
            decode_batch(wrong)


def test_the_space_is_told_first_and_again() -> None:
    """A root stands for its fields, which tell how to derive keys; whoever comes late finds them in the log."""
    kept = Log(max_batches=DESCRIBE_EVERY)
    for _ in range(2 * DESCRIBE_EVERY):
        kept.append((SpaceCleared(),))
    batches = [decode_batch(body) for _, body in kept.since(0)]
    assert DESCRIBE_EVERY == len(batches)
    told = [event for batch in batches for event in batch.events if isinstance(event, SpaceDescribed)]
    assert [SpaceDescribed(space_to_wire(SPACE))] == told


def test_the_log_keeps_the_last_batches() -> None:
    """By number and by bytes; the newest one is always there."""
    by_count = Log(max_batches=3)
    for _ in range(5):
        by_count.append((SpaceCleared(),))
    assert [3, 4, 5] == [number for number, _ in by_count.since(0)]
    assert [5] == [number for number, _ in by_count.since(5)]
    assert [] == by_count.since(6)
    by_bytes = Log(max_bytes=1)
    assert [by_bytes.append((SpaceCleared(),))[0]] == [number for number, _ in by_bytes.since(0)]
    with pytest.raises(EventError, match="at most"):
        by_bytes.append([SpaceCleared()] * (MAX_EVENTS + 1))


def test_spaces_are_numbered_each_by_itself_and_share_the_room() -> None:
    """What one space tells moves no number of another, and the oldest batch goes, whosever it is."""
    kept = EventLog(b"B" * 16, max_batches=4, clock=lambda: 0.0)
    one, other = b"1" * 32, b"2" * 32
    for root in (one, other, one, other, other):
        kept.append(root, (SpaceCleared(),))
    assert (one, other) == kept.roots
    assert (2, 3) == (kept.next(one), kept.next(other))
    assert [1] == [number for number, _ in kept.since(one, 0)]
    assert [0, 1, 2] == [number for number, _ in kept.since(other, 0)]
    assert [0, 1] == [number for number, _ in kept.since(other, 0, 2)]
    assert ([], 0) == (kept.since(b"3" * 32, 0), kept.next(b"3" * 32))
    assert {other} == {decode_batch(body).root for _, body in kept.since(other, 0)}
    kept.describe(one, space_to_wire(SPACE))
    assert kept.describe(one, space_to_wire(SPACE)) is None
    _, body = kept.since(one, 2)[0]
    assert (SpaceDescribed(space_to_wire(SPACE)),) == decode_batch(body).events
    for number in range(MAX_SPACES - 2):
        kept.append(b"%032d" % number, ())
    with pytest.raises(EventError, match="all there is room for"):
        kept.append(b"4" * 32, ())


def test_what_a_server_tells_travels_and_does_not_show_its_keys() -> None:
    """Keys by world and group, and where; the ones that a connector tells say neither, and cost no byte for it."""
    held = ChunksHeld(keys=(b"k" * 32,), world=2, group=1, tier="disk")
    gone, gone_somewhere = ChunkRemoved((b"k" * 32,), 2, 1, "memory"), ChunkRemoved((b"k" * 32,))
    _, body = Log().append((held, gone, gone_somewhere))
    assert (held, gone, gone_somewhere) == decode_batch(body).events
    assert "1 keys" in repr(held)
    assert (None, None, "") == (gone_somewhere.world, gone_somewhere.group, gone_somewhere.tier)
    assert 2 == len(msgspec.msgpack.decode(msgspec.msgpack.encode(gone_somewhere)))


# ---- the reader


def batches(count: int, boot: bytes = b"B" * 16) -> list[EventBatch]:
    """Batches of one publisher, each with one removed key that is its number."""
    made = Log(boot)
    for number in range(1, count):
        made.append((ChunkRemoved((number.to_bytes(32, "big"),)),))
    return [decode_batch(body) for _, body in made.since(0)]


def gap(reader: FeedReader) -> tuple[int, int] | None:
    """What is missing now."""
    return reader.missing


def numbers(items: list[Any]) -> list[int]:
    """The numbers of the batches that were handed out."""
    return [int.from_bytes(one.keys[0], "big") for one in items if isinstance(one, ChunkRemoved)]


def test_a_gap_waits_for_what_is_missing() -> None:
    """Nothing behind it is handed out before; then all is, in order."""
    reader, all_of = FeedReader(), batches(6)
    assert [Restarted(b"B" * 16, SPACE.root), *all_of[0].events] == reader.receive(all_of[0])
    assert [] == reader.receive(all_of[3])
    assert [] == reader.receive(all_of[4])
    assert (1, 3) == gap(reader)
    assert [1] == numbers(reader.receive(all_of[1]))
    assert [2, 3, 4] == numbers(reader.receive(all_of[2]))
    assert gap(reader) is None
    assert [] == reader.receive(all_of[2])


def test_what_is_lost_is_said() -> None:
    """Given up, the gap is named, and what is behind it comes."""
    reader, all_of = FeedReader(), batches(6)
    reader.receive(all_of[0])
    reader.receive(all_of[4])
    assert [Lost(1, 4), *all_of[4].events] == reader.give_up()
    assert [] == reader.give_up()
    late = FeedReader()
    assert [Restarted(b"B" * 16, SPACE.root)] == late.receive(all_of[3])
    assert (0, 3) == gap(late)
    crowded = FeedReader(max_waiting=1)
    crowded.receive(all_of[0])
    crowded.receive(all_of[2])
    assert Lost(1, 2) in crowded.receive(all_of[4])


def test_a_reader_of_one_space_refuses_to_mix_it_with_another() -> None:
    """Batches of two spaces have equal numbers: taken for one space's, half of them would be dropped in silence."""
    reader, all_of = FeedReader(), batches(2)
    reader.receive(all_of[0])
    with pytest.raises(EventError, match="several spaces"):
        reader.receive(msgspec.structs.replace(all_of[1], root=b"o" * 32))
    assert [1] == numbers(reader.receive(all_of[1]))


def test_a_restart_voids_what_was_known() -> None:
    """Another boot begins from 0, and what waited of the former one never comes."""
    reader = FeedReader()
    reader.receive(batches(3)[0])
    reader.receive(batches(3)[2])
    other = batches(2, b"C" * 16)
    assert [Restarted(b"C" * 16, SPACE.root), *other[0].events] == reader.receive(other[0])
    assert [1] == numbers(reader.receive(other[1]))


@given(order=st.permutations(list(range(8))), repeats=st.lists(st.integers(0, 7), max_size=8))
@settings(max_examples=100)
def test_any_order_comes_out_in_order(order: list[int], repeats: list[int]) -> None:
    """Repeated and reordered batches: each is handed out once, in sequence."""
    reader, all_of, out = FeedReader(), batches(8), []
    for place in [*order, *repeats]:
        out += reader.receive(all_of[place])
    assert list(range(1, 8)) == numbers(out)
    assert gap(reader) is None
