"""Chunks out of paged tensors and back, for the layouts that engines have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol_v2.connectors.paged import (
    NULL_BLOCK,
    Axes,
    ChunkShapeError,
    LayoutError,
    PagedGroup,
    Unit,
    axes_of,
    unit_for,
)
from protocol_v2.errors import LocalProtocolError
from protocol_v2.tensors import TensorMeta, empty_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

N_BLOCKS = 23

LAYOUTS: dict[str, tuple[tuple[int, ...], Axes]] = {
    "bhnc": ((N_BLOCKS, 3, 4, 5), Axes(0, 2)),
    "2bnhd": ((2, N_BLOCKS, 4, 3, 5), Axes(1, 2)),
    "b2nhd": ((N_BLOCKS, 2, 4, 3, 5), Axes(0, 2)),
    "2bhnd": ((2, N_BLOCKS, 3, 4, 5), Axes(1, 3)),
    "mla": ((N_BLOCKS, 4, 7), Axes(0, 1)),
    "split": ((N_BLOCKS * 2, 3, 2, 5), Axes(0, 2, 2)),
}
"""Shape and axes of a layer with 23 blocks of 4 tokens; ``split`` has tensor blocks of 2."""


def ordinary(metas: Sequence[TensorMeta]) -> Sequence[Any]:
    """Tensors in memory of their own."""
    return empty_torch(metas, lambda _nbytes: None)


def layer(layout: str, *, fill: int | None = None) -> torch.Tensor:
    """A layer with numbers, all different, or all the same."""
    shape, _ = LAYOUTS[layout]
    size = int(torch.tensor(shape).prod())
    return (torch.arange(size) if fill is None else torch.full((size,), fill)).to(torch.float32).reshape(shape)


def group(layout: str, unit: Unit, chunk_size: int, *layers: torch.Tensor) -> PagedGroup:
    """A group of layers of one layout."""
    axes = LAYOUTS[layout][1]
    return PagedGroup({f"l{i}": one for i, one in enumerate(layers)}, [axes] * len(layers), 4, chunk_size, unit)


def slot(tensor: torch.Tensor, layout: str, table: list[int], token: int) -> Any:
    """A token's part of a layer, by the definition of a block table."""
    axes = LAYOUTS[layout][1]
    size = 4 // axes.split
    place = table[token // 4] * axes.split + token % 4 // size
    return tensor.movedim((axes.block, axes.token or 0), (0, 1))[place, token % size]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_axes_are_found_by_their_sizes(layout: str) -> None:
    """Blocks and tokens are told from the other dimensions."""
    shape, axes = LAYOUTS[layout]
    assert axes == axes_of(shape, num_blocks=N_BLOCKS, block_size=4)


def test_axes_that_cannot_be_told_are_refused_or_left_out() -> None:
    """Two dimensions of the blocks' size, or none: refused. Two of the tokens' size: no token axis, so no tokens."""
    with pytest.raises(LayoutError, match="cannot be told"):
        axes_of((8, 8, 4), num_blocks=8, block_size=4)
    with pytest.raises(LayoutError, match="cannot be told"):
        axes_of((7, 4), num_blocks=8, block_size=4)
    assert Axes(0, None) == axes_of((9, 4, 4), num_blocks=9, block_size=4)
    with pytest.raises(LayoutError, match="unit blocks"):
        PagedGroup({"l": torch.zeros(9, 4, 4)}, [Axes(0, None)], 4, 6, Unit.TOKENS)


def test_the_unit_is_blocks_unless_another_is_wanted() -> None:
    """Blocks are right for every layout; another word is refused."""
    assert (Unit.BLOCKS, Unit.BLOCKS, Unit.TOKENS) == tuple(unit_for(one) for one in ("auto", "blocks", "tokens"))
    with pytest.raises(LayoutError, match="unit"):
        unit_for("pages")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("unit", "chunk_size"), [(Unit.BLOCKS, 8), (Unit.BLOCKS, 6), (Unit.TOKENS, 8), (Unit.TOKENS, 6)]
)
def test_what_was_read_is_written_where_it_belongs_and_nowhere_else(layout: str, unit: Unit, chunk_size: int) -> None:
    """Chunks 1 and 2 go from one request's blocks to another's; every other slot stays as it was."""
    source, target = layer(layout), layer(layout, fill=-1)
    mine, theirs = [3, 9, 2, 7, 1, 8, 5], [4, 1, 6, 10, 2, 9, 3]
    reader, writer = (
        group(layout, unit, chunk_size, source, source + 0.5),
        group(layout, unit, chunk_size, target, target.clone()),
    )
    start, stop = chunk_size, 3 * chunk_size
    chunks = reader.read(mine[reader.span(start, stop)], start, stop, ordinary)
    assert chunks is not None
    assert [2, 2] == [len(one) for one in chunks]
    begin = start // 4 * 4  # loads begin at a block; of tokens, what lies before the chunk in it is left alone
    low, high = (start, stop) if unit is Unit.TOKENS else (begin, -(-stop // 4) * 4)
    for place, tensors in enumerate(chunks):
        reader.check(1 + place, tensors)
        writer.write(theirs[writer.span(begin, stop)], begin, stop, 1 + place, tensors)
    for number, tensor in enumerate(writer.layers.values()):
        for token in range(28):
            expected = slot(source, layout, mine, token) + 0.5 * number
            got = slot(tensor, layout, theirs, token)
            assert torch.equal(expected if low <= token < high else torch.full_like(got, -1), got), token
    untouched = layer(layout, fill=-1)
    for token in range(28):
        slot(target, layout, theirs, token)[:] = -1
    assert torch.equal(untouched, target)


@given(
    chunk_size=st.integers(1, 12),
    n_chunks=st.integers(1, 3),
    begin=st.integers(0, 8),
    short=st.integers(0, 3),
    reader_block=st.sampled_from([2, 4, 8]),
    writer_block=st.sampled_from([2, 4, 8]),
)
@settings(max_examples=150)
def test_tokens_go_between_engines_with_other_block_sizes(
    chunk_size: int, n_chunks: int, begin: int, short: int, reader_block: int, writer_block: int
) -> None:
    """Any chunk size, start at a block and end: the tokens of the load are there, and none before it is touched."""
    n_tokens = chunk_size * n_chunks
    source = torch.arange(1, 41, dtype=torch.float32).reshape(40, 1).repeat(1, 2).reshape(-1, reader_block, 2)
    source = torch.cat([torch.zeros(1, reader_block, 2), source])
    target = torch.full((41, writer_block, 2), -1.0)
    reader = PagedGroup({"l": source}, [Axes(0, 1)], reader_block, chunk_size, Unit.TOKENS)
    writer = PagedGroup({"l": target}, [Axes(0, 1)], writer_block, chunk_size, Unit.TOKENS)
    chunks = reader.read(list(range(1, 40))[reader.span(0, n_tokens)], 0, n_tokens, ordinary)
    assert chunks is not None
    start = min(begin * writer_block, (n_tokens - 1) // writer_block * writer_block)
    stop = max(start + 1, n_tokens - short)
    table = list(range(40, 0, -1))
    for place in range(start // chunk_size, -(-stop // chunk_size)):
        writer.write(table[writer.span(start, stop)], start, stop, place, chunks[place])
    got = [float(target[table[token // writer_block], token % writer_block, 0]) for token in range(n_tokens)]
    assert [-1.0] * start + [float(token + 1) for token in range(start, stop)] == got[:stop]


def test_a_null_block_is_never_written_and_cannot_be_read() -> None:
    """What slid out of a window is not there: no chunk with it is stored, and no load writes over it."""
    for unit in Unit:
        target = layer("bhnc", fill=-1)
        paged = group("bhnc", unit, 8, target)
        assert paged.read([3, NULL_BLOCK], 0, 8, ordinary) is None
        value = group("bhnc", unit, 8, layer("bhnc")).read([3, 9], 0, 8, ordinary)
        assert value is not None
        paged.write([NULL_BLOCK, 5], 0, 8, 0, value[0])
        assert bool((target[NULL_BLOCK] == -1).all())
        assert torch.equal(layer("bhnc")[9], target[5])


def test_a_worker_without_layers_of_a_group_stores_a_value_without_bytes() -> None:
    """Every shard of a chunk is there, also of a pipeline stage that has none of a group."""
    paged = PagedGroup({}, [], 4, 8, Unit.BLOCKS)
    chunks = paged.read([1, 2, 3, 4], 0, 16, ordinary)
    assert chunks is not None
    assert [[0], [0]] == [[one.nbytes for one in chunk] for chunk in chunks]
    paged.check(0, chunks[0])
    paged.write([1, 2], 0, 8, 0, chunks[0])


def test_a_chunk_of_another_layout_is_refused() -> None:
    """Other heads, other element type, more layers: none of it is written."""
    paged = group("bhnc", Unit.BLOCKS, 8, layer("bhnc"))
    right = torch.zeros(2, 3, 4, 5)
    paged.check(0, [right])
    for wrong in ([right[:1]], [right.to(torch.float16)], [right, right], [torch.zeros(2, 4, 3, 5)], []):
        with pytest.raises(ChunkShapeError):
            paged.check(0, wrong)


def test_a_load_begins_at_a_block() -> None:
    """What lies before a load's start in a block may be other requests' as well, so a start inside is refused."""
    paged = group("bhnc", Unit.TOKENS, 8, layer("bhnc"))
    with pytest.raises(LocalProtocolError, match="multiple of the block size"):
        paged.write([1, 2], 2, 8, 0, [torch.zeros(8, 3, 5)])
