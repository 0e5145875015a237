"""vLLM's untagged block events: what follows from them is taken, what they leave open is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keying import CacheSalt, ExtraKey, KeySpace, LoraAdapter, MultimodalItem, chunk_keys
from keying.engines import to_vllm_event_extra_keys, to_vllm_extra_keys
from protocol_v2.chunk_events import ChunkStored, EventError
from protocol_v2.connectors.vllm_events import AmbiguousEventError, BlockItem, VllmEventKeys, typed_blocks

SPACE = KeySpace("m", chunk_size=6, kv_dtype="float32")
BLOCK = 4


def event(n_tokens: int, extra_keys: list[ExtraKey], *, first: int = 0, count: int | None = None, **others: Any) -> Any:
    """What vLLM publishes for blocks of a request, its extra keys as vLLM makes them."""
    blocks = to_vllm_event_extra_keys(
        to_vllm_extra_keys(extra_keys, n_tokens=n_tokens, block_size=BLOCK, lora_path="/p")
    )
    stop = len(blocks) if count is None else first + count
    adapter = next((one.name for one in extra_keys if isinstance(one, LoraAdapter)), None)
    return {
        "type": "BlockStored",
        "block_hashes": [100 + place for place in range(first, stop)],
        "parent_block_hash": 99 + first if first else None,
        "token_ids": list(range(first * BLOCK, stop * BLOCK)),
        "block_size": BLOCK,
        "lora_id": None if adapter is None else 1,
        "medium": "GPU",
        "lora_name": adapter,
        "extra_keys": [None if one is None else [list(e) if isinstance(e, tuple) else e for e in one]
                       for one in blocks[first:stop]],
        **others,
    }  # fmt: skip


def reason_of(told: Any) -> str:
    """Why an event is refused."""
    with pytest.raises(AmbiguousEventError) as caught:
        typed_blocks(told)
    return caught.value.reason


def test_what_can_be_told_apart_is_typed() -> None:
    """An adapter that the event names, items, and a salt in the first block."""
    keys: list[ExtraKey] = [CacheSalt("sql"), LoraAdapter("sql", "r"), MultimodalItem("i" * 64, 2, 5)]
    blocks = typed_blocks(event(12, keys))
    assert ["sql", "sql", "sql"] == [one.adapter for one in blocks]
    assert ["sql", None, None] == [one.salt for one in blocks]
    assert [(BlockItem("i" * 64, 2),), (BlockItem("i" * 64, -2),), ()] == [one.items for one in blocks]
    assert [None, 100, 101] == [one.parent for one in blocks]
    assert "sql" not in repr(typed_blocks(event(4, [CacheSalt("sql")])))


def test_older_and_newer_forms_are_the_same_event() -> None:
    """A positional list (before 0.24), a map, an object."""
    told = event(8, [CacheSalt("s")])
    positional = ["BlockStored", *(told[name] for name in (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"
    ))]  # fmt: skip
    assert typed_blocks(told) == typed_blocks(positional) == typed_blocks(SimpleNamespace(**told))


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("untold", {"extra_keys": None}),
        ("unnamed_adapter", {"lora_id": 3}),
        ("adapter_missing", {"lora_name": "sql"}),
        ("adapter_missing", {"lora_name": "sql", "extra_keys": [["other"], ["sql"]]}),
        ("bare_string", {"extra_keys": [None, ["what"]]}),
        ("bare_string", {"extra_keys": [["one", "two"], None]}),
        ("bare_string", {"parent_block_hash": 7, "extra_keys": [["salt?"], None]}),
        ("order", {"extra_keys": [["salt?", ["i", 0]], None]}),
        ("embeds", {"extra_keys": [[bytes(32)], None]}),
        ("unknown_form", {"extra_keys": [[["i", 0, 9]], None]}),
        ("unknown_form", {"extra_keys": [[["i", True]], None]}),
        ("sparse", {"block_hashes": [1]}),
        ("sparse", {"token_ids": [1, 2, 3]}),
        ("lookahead", {"lookahead_token_ids": [5]}),
    ],
)
def test_what_is_left_open_is_refused(reason: str, change: dict[str, Any]) -> None:
    """A bare string that may be anything, an adapter without a name, extra keys that nobody told: never a guess."""
    assert reason == reason_of({**event(8, []), **change})


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "BlockRemoved"},
        ["BlockRemoved"],
        [],
        {"type": "BlockStored"},
        {**event(4, []), "block_size": 0},
        {**event(4, []), "token_ids": "abcd"},
    ],
)
def test_other_events_are_refused(wrong: Any) -> None:
    """What is no such event is not read as one."""
    with pytest.raises(EventError):
        typed_blocks(wrong)


def keys_of(events: list[Any], **known: Any) -> list[ChunkStored]:
    """The chunks of several events."""
    reader = VllmEventKeys(SPACE, **known)
    return [chunk for one in events for chunk in reader.stored(one)]


@given(
    n_tokens=st.integers(4, 40),
    cuts=st.lists(st.integers(1, 4), max_size=5),
    salted=st.booleans(),
    adapter=st.booleans(),
    item=st.none() | st.tuples(st.integers(0, 30), st.integers(1, 12)),
)
@settings(max_examples=150)
def test_the_keys_are_those_of_the_request(
    n_tokens: int, cuts: list[int], salted: bool, adapter: bool, item: tuple[int, int] | None
) -> None:
    """However the blocks are told, with chunks that are no multiple of them: the same keys, which verify."""
    keys: list[ExtraKey] = []
    if salted:
        keys.append(CacheSalt("s"))
    if adapter:
        keys.append(LoraAdapter("sql", "sha256:ab"))
    if item is not None and item[0] < n_tokens // BLOCK * BLOCK:
        keys.append(MultimodalItem("i" * 64, *item))
    events, first = [], 0
    for wanted in [*cuts, 99]:
        count = min(wanted, n_tokens // BLOCK - first)
        if count > 0:
            events.append(event(n_tokens, keys, first=first, count=count))
            first += count
    chunks = keys_of(
        events,
        adapter=lambda name: LoraAdapter(name, "sha256:ab"),
        item_length=lambda _: None if item is None else item[1],
    )
    whole = chunk_keys(SPACE, range(n_tokens // BLOCK * BLOCK), keys)
    assert [key.digest for key in whole] == [chunk.key for chunk in chunks]
    for chunk in chunks:
        chunk.verify()


def test_what_the_event_does_not_have_is_asked_or_refused() -> None:
    """The revision of an adapter, the length of an item, the blocks before."""
    cases: list[tuple[str, list[ExtraKey], dict[str, Any]]] = [
        ("unknown_revision", [LoraAdapter("sql", "r")], {}),
        ("unknown_length", [MultimodalItem("i" * 64, 0, 3)], {}),
        ("item", [MultimodalItem("i" * 64, 1, 8)], {"item_length": lambda _: 2}),
        ("item", [MultimodalItem("i" * 64, 1, 2)], {"item_length": lambda _: 8}),
        ("item", [MultimodalItem("i" * 64, 0, 3)], {"item_length": lambda _: -1}),
    ]
    for reason, keys, known in cases:
        with pytest.raises(AmbiguousEventError) as caught:
            keys_of([event(8, keys)], **known)
        assert reason == caught.value.reason
    with pytest.raises(AmbiguousEventError, match="unknown_parent"):
        keys_of([event(8, [], first=1)])


def test_a_sequence_does_not_change_its_adapter() -> None:
    """Blocks that go on with another adapter, or without one, are no sequence that vLLM computes."""
    known = {"adapter": lambda name: LoraAdapter(name, "r")}
    with_one = event(4, [LoraAdapter("sql", "r")])
    for after in (event(8, [], first=1), event(8, [LoraAdapter("other", "r")], first=1)):
        with pytest.raises(AmbiguousEventError, match="adapter_changed"):
            keys_of([with_one, after], **known)


def test_a_refused_event_leaves_nothing_behind() -> None:
    """Blocks behind one that was refused are refused too, and what was removed or cleared is forgotten."""
    reader = VllmEventKeys(SPACE)
    reader.stored(event(8, []))
    with pytest.raises(AmbiguousEventError):
        reader.stored({**event(16, [], first=2), "extra_keys": [None, ["what"]]})
    with pytest.raises(AmbiguousEventError, match="unknown_parent"):
        reader.stored(event(16, [], first=3))
    assert 1 == len(reader.stored(event(12, [], first=2)))
    reader.forget([102])
    with pytest.raises(AmbiguousEventError, match="unknown_parent"):
        reader.stored(event(16, [], first=3))
    reader.clear()
    with pytest.raises(AmbiguousEventError, match="unknown_parent"):
        reader.stored(event(12, [], first=2))
    small = VllmEventKeys(SPACE, max_blocks=1)
    small.stored(event(8, []))
    small.stored(event(12, [], first=2))
    with pytest.raises(AmbiguousEventError, match="unknown_parent"):
        small.stored(event(12, [], first=2))


def test_a_guess_would_be_seen() -> None:
    """Negative control: a salt taken for an adapter, or left out, gives other keys."""
    right = [key.digest for key in chunk_keys(SPACE, range(12), [CacheSalt("x")])]
    assert right == [one.key for one in keys_of([event(12, [CacheSalt("x")])])]
    for guess in ([], [LoraAdapter("x", "")]):
        assert right != [key.digest for key in chunk_keys(SPACE, range(12), guess)]
