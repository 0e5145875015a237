"""ChunkKeyChain: every way of growing gives the keys of the whole, and nothing handed out ever changes."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keying import (
    CacheSalt,
    ChunkKey,
    ChunkKeyChain,
    DuplicateExtraKeyError,
    ExtraKey,
    KeyingError,
    KeyingTypeError,
    KeySpace,
    LateExtraKeyError,
    LoraAdapter,
    MultimodalItem,
    OverlappingEmbedsError,
    PromptEmbeds,
    Tag,
    TokenError,
    UnsupportedExtraKeyError,
    chunk_keys,
)
from tests.keying.strategies import extra_key, extra_key_lists, spaces, token_ids, token_lists

SPACE = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")


@given(spaces, token_lists, extra_key_lists(), st.lists(st.integers(0, 24)))
def test_any_splitting_equals_one_shot(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey], cuts: list[int]
) -> None:
    """D7, D12: steps of any size give the keys of the whole, and the steps' results add up to them."""
    chain = ChunkKeyChain(space, extra_keys)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    handed_out: list[ChunkKey] = []
    for low, high in pairwise(edges):
        handed_out += chain.extend(tokens[low:high])
    expected = chunk_keys(space, tokens, extra_keys, partial_tail=True)
    tail = chain.partial_tail()
    assert expected == [*chain.keys, *([tail] if tail else [])]
    assert handed_out == chain.keys


def test_decode_growth_and_resume_after_preemption() -> None:
    """D5, J7: prompt, decoded tokens, and the whole list at resume give one set of keys."""
    extra_keys = [MultimodalItem("X", 1, 4)]
    prompt, decoded = [1, 9, 9, 9, 9, 2], [3, 4, 5, 6, 7, 8]
    chain = ChunkKeyChain(SPACE, extra_keys)
    chain.extend(prompt)
    for token in decoded:
        chain.extend([token])
    resumed = ChunkKeyChain(SPACE, extra_keys)
    resumed.extend(prompt + decoded)
    assert len(chain.keys) == 3
    assert chain.keys == resumed.keys
    assert chunk_keys(SPACE, prompt + decoded, extra_keys) == chain.keys


def test_streaming_session_appends_media_and_drops_the_last_sampled_token() -> None:
    """A session that truncates, adds a picture and goes on ends with the keys of its final prompt."""
    chain = ChunkKeyChain(SPACE, [CacheSalt("s")])
    chain.extend([1, 2, 3, 4, 5, 6])
    chain.truncate(5)
    chain.add(MultimodalItem("X", 7, 3))
    chain.extend([7, 8, 9, 9, 9, 10, 11])
    expected = chunk_keys(SPACE, [1, 2, 3, 4, 5, 7, 8, 9, 9, 9, 10, 11], [CacheSalt("s"), MultimodalItem("X", 7, 3)])
    assert expected == chain.keys


def test_late_extra_keys_are_refused_and_change_nothing() -> None:
    """What would change a key that was handed out is refused; at the boundary itself it is accepted."""
    chain = ChunkKeyChain(SPACE, [MultimodalItem("X", 0, 2)])
    chain.extend([1, 2, 3, 4, 5])
    before = list(chain.keys)
    for late in (
        MultimodalItem("Y", 3, 4),
        LoraAdapter("a"),
        CacheSalt("s"),
        Tag("t", b"", 3),
        PromptEmbeds(3, b"ab", 1, "u"),
        MultimodalItem("Y", 3, 0),
        PromptEmbeds(2, b"", 1, "u"),
    ):
        with pytest.raises(LateExtraKeyError, match="up to position 4"):
            chain.add(late)
    assert before == list(chain.keys)
    chain.add(LoraAdapter("a", "", 4))
    chain.extend([6, 7, 8])
    assert chunk_keys(SPACE, range(1, 9), [MultimodalItem("X", 0, 2), LoraAdapter("a", "", 4)]) == chain.keys


def test_an_equal_extra_key_again_is_no_change() -> None:
    """Engines report the same items at every step: repeating them is fine however late."""
    held: list[ExtraKey] = [
        MultimodalItem("X", 0, 2),
        CacheSalt("s"),
        LoraAdapter("a"),
        Tag("t", b"v"),
        PromptEmbeds(2, b"ab", 1, "u"),
        PromptEmbeds(1, b"", 1, "u"),
    ]
    chain = ChunkKeyChain(SPACE, held)
    chain.extend([1] * 9)
    for again in held:
        chain.add(again)
    assert chunk_keys(SPACE, [1] * 9, held) == chain.keys


def test_a_partial_tail_that_was_handed_out_binds_too() -> None:
    """After a tail key up to position 6, an item may start at 6 but not at 5; truncating takes the tail back."""
    chain = ChunkKeyChain(SPACE)
    chain.extend([1, 2, 3, 4, 5, 6])
    assert chain.partial_tail() is not None
    with pytest.raises(LateExtraKeyError, match="up to position 6"):
        chain.add(MultimodalItem("X", 5, 1))
    chain.add(MultimodalItem("X", 6, 1))
    chain.truncate(5)
    chain.add(MultimodalItem("Y", 5, 1))
    chain.extend([7, 8, 9])
    expected = chunk_keys(SPACE, [1, 2, 3, 4, 5, 7, 8, 9], [MultimodalItem("X", 6, 1), MultimodalItem("Y", 5, 1)])
    assert expected == chain.keys


def test_extra_keys_that_do_not_fit_are_refused_by_add() -> None:
    """The rules between extra keys hold for those that come later, and a refusal leaves the chain as it was."""
    chain = ChunkKeyChain(SPACE, [CacheSalt("s"), LoraAdapter("a"), PromptEmbeds(8, b"abcd", 1, "u")])
    with pytest.raises(DuplicateExtraKeyError):
        chain.add(CacheSalt("t"))
    with pytest.raises(DuplicateExtraKeyError):
        chain.add(LoraAdapter("a", "", 8))
    with pytest.raises(OverlappingEmbedsError):
        chain.add(PromptEmbeds(11, b"x", 1, "u"))
    with pytest.raises(UnsupportedExtraKeyError):
        chain.add("salt")  # type: ignore[arg-type]
    chain.extend([1] * 12)
    assert (
        chunk_keys(SPACE, [1] * 12, [CacheSalt("s"), LoraAdapter("a"), PromptEmbeds(8, b"abcd", 1, "u")]) == chain.keys
    )


def test_extend_is_atomic() -> None:
    """A step with one bad token adds nothing, however many keys it would have completed."""
    chain = ChunkKeyChain(SPACE)
    chain.extend([1, 2])
    with pytest.raises(TokenError):
        chain.extend([*range(100), -1])
    assert (chain.n_tokens, len(chain.keys)) == (2, 0)
    chain.extend([3, 4])
    assert chunk_keys(SPACE, [1, 2, 3, 4]) == chain.keys


@pytest.mark.parametrize(
    ("n_tokens", "error"), [(-1, KeyingError), (3, KeyingError), (True, KeyingTypeError), (1.0, KeyingTypeError)]
)
def test_truncate_out_of_range_is_refused(n_tokens: Any, error: type[Exception]) -> None:
    """Only what is there can be taken back."""
    chain = ChunkKeyChain(SPACE)
    chain.extend([1, 2])
    with pytest.raises(error, match="n_tokens"):
        chain.truncate(n_tokens)
    assert chain.n_tokens == 2


def test_the_view_is_live_and_read_only() -> None:
    """`keys` follows the chain; it cannot be written to, and slices are lists."""
    chain = ChunkKeyChain(SPACE)
    view = chain.keys
    chain.extend(range(12))
    assert 3 == len(view) == len(chain)
    assert view[0:2] == list(view)[:2]
    assert view[-1] in view
    assert not hasattr(view, "append")
    with pytest.raises(TypeError):
        view[0] = view[1]  # type: ignore[index]
    assert view != 5
    assert "3 chunk keys" in repr(view)
    assert "12 tokens" in repr(chain)
    chain.truncate(0)
    assert view == []
    assert chain.space == SPACE


class ChainMachine(RuleBasedStateMachine):
    """A chain against the one-shot derivation over a plain list of tokens and extra keys."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = ChunkKeyChain(SPACE)
        self.tokens: list[int] = []
        self.extra_keys: list[ExtraKey] = []
        self.stops: list[int] = []  # stops of all keys handed out and not taken back

    @rule(fresh=st.lists(token_ids, max_size=9))
    def extend(self, fresh: list[int]) -> None:
        """Tokens come."""
        self.tokens += fresh
        self.stops += [key.stop for key in self.chain.extend(fresh)]

    @rule(one=extra_key)
    def add(self, one: ExtraKey) -> None:
        """An extra key comes: refused exactly if late or unfit, and accepted ones show."""
        first = getattr(one, "offset", getattr(one, "start", 0))
        late = one not in self.extra_keys and first < max(self.stops, default=0)
        try:
            chunk_keys(SPACE, [], [*self.extra_keys, one])
            fits = True
        except KeyingError:
            fits = one in self.extra_keys
        try:
            self.chain.add(one)
        except KeyingError as error:
            assert late or not fits
            assert isinstance(error, LateExtraKeyError) == late
        else:
            assert fits
            assert not late
            if one not in self.extra_keys:
                self.extra_keys.append(one)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Tokens are taken back, and the keys that covered them."""
        keep = data.draw(st.integers(0, len(self.tokens)))
        del self.tokens[keep:]
        self.stops = [stop for stop in self.stops if stop <= keep]
        self.chain.truncate(keep)

    @rule()
    def tail(self) -> None:
        """A partial tail is handed out."""
        tail = self.chain.partial_tail()
        expected = chunk_keys(SPACE, self.tokens, self.extra_keys, partial_tail=True)
        if len(self.tokens) % 4:
            assert expected[-1] == tail
            self.stops.append(len(self.tokens))
        else:
            assert tail is None

    @invariant()
    def equals_one_shot(self) -> None:
        """After every step the keys are those of the whole."""
        assert chunk_keys(SPACE, self.tokens, self.extra_keys) == self.chain.keys
        assert len(self.tokens) == self.chain.n_tokens


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(max_examples=150, stateful_step_count=25)
