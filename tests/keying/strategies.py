"""Shared hypothesis strategies for key inputs: small numbers and few letters, so that ranges meet and names collide."""

from typing import Any

from hypothesis import strategies as st

from keying import CacheSalt, ExtraKey, KeyingError, KeySpace, LoraAdapter, MultimodalItem, PromptEmbeds, Tag

names = st.text(alphabet="ab:é\U0001f5bc\0/@", min_size=1, max_size=3)
maybe_empty = st.text(alphabet="abé", max_size=2)
positions = st.integers(0, 24)
token_ids = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
token_lists = st.lists(token_ids, max_size=24)

spaces = st.builds(
    KeySpace,
    names,
    chunk_size=st.integers(1, 9),
    kv_dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    model_revision=maybe_empty,
    kv_layout=maybe_empty,
    attributes=st.dictionaries(names, maybe_empty, max_size=3),
)
items = st.builds(MultimodalItem, names, positions, st.integers(0, 12))
adapters = st.builds(LoraAdapter, names, maybe_empty, positions)
salts = st.builds(CacheSalt, names)
tags = st.builds(Tag, names, st.binary(max_size=3), positions)
embeds = st.builds(
    lambda offset, rows, width, dtype: PromptEmbeds(offset, rows * width, width, dtype),
    positions,
    st.binary(max_size=6),
    st.integers(1, 2),
    st.sampled_from(["float16", "bfloat16"]),
)
extra_key = st.one_of(items, adapters, salts, tags, embeds)


@st.composite
def extra_key_lists(draw: Any, max_size: int = 6) -> list[ExtraKey]:
    """Extra keys that go together: what does not fit with those before it is left out."""
    kept: list[ExtraKey] = []
    space = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
    from keying import chunk_keys

    for one in draw(st.lists(extra_key, max_size=max_size)):
        try:
            chunk_keys(space, [], [*kept, one])
        except KeyingError:
            continue
        kept.append(one)
    return kept
