"""Chunks out of an engine's paged KV, and back: tensors by block or by token, without importing an engine.

A paged layer is a tensor with a block dimension; token i of a request lies in block ``table[i // block_size]`` of it. A
chunk's value for a layer is one contiguous CPU tensor, in one of two units:

    blocks   [blocks, ...the layer's other dimensions]: the blocks that hold the chunk's tokens, each moved whole,
             whatever order lies in it. Engines share values only with the same block size. A chunk that ends inside a
             block brings the rest of it along, so it is read only when that block is full: then the rest is the
             request's own, and no other's.
    tokens   [tokens, ...the other dimensions]: shared between block sizes. Needs a layer in which each token's part is
             apart from other tokens'. CPU attention packs the keys of several tokens together, so it is no such layer.

vLLM's block 0 is its null block: what was dropped (out of a sliding window) or is not needed. It is never written, and
a chunk with a part of it cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from protocol_v2.errors import LocalProtocolError
from protocol_v2.tensors import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NULL_BLOCK: Final = 0


class Unit(StrEnum):
    """How a chunk is cut out of blocks."""

    BLOCKS = "blocks"
    TOKENS = "tokens"


class LayoutError(LocalProtocolError):
    """An engine's tensors cannot be understood, so nothing can be stored from them or loaded into them."""


class ChunkShapeError(LocalProtocolError):
    """A chunk from the cache has not the tensors that this engine's layers have: it was stored by another layout."""


def unit_for(wanted: str) -> Unit:
    """The unit to store chunks in.

    Args:
        wanted: ``auto``, ``blocks`` or ``tokens``; auto is blocks, which is right for every layout.

    Raises:
        LayoutError: another word.
    """
    if wanted == "auto":
        return Unit.BLOCKS
    if wanted not in {Unit.BLOCKS, Unit.TOKENS}:
        raise LayoutError(f"unit: got {wanted!r}, wanted auto, blocks or tokens")
    return Unit(wanted)


@dataclass(frozen=True, slots=True)
class Axes:
    """Where blocks and tokens are in a layer's tensor.

    Attributes:
        block: dimension of blocks.
        token: dimension of the tokens in a block; None where it cannot be told.
        split: tensor blocks that one of the engine's blocks consists of.
    """

    block: int
    token: int | None
    split: int = 1


def axes_of(shape: Sequence[int], *, num_blocks: int, block_size: int) -> Axes:
    """Find them in a shape by the sizes that they have.

    Args:
        shape: of a layer's tensor.
        num_blocks: blocks that the engine has, the null block included.
        block_size: tokens in a block.

    Raises:
        LayoutError: no dimension, or several, can be that of blocks.
    """
    found = [
        (place, shape[place] // num_blocks)
        for place in range(len(shape))
        if shape[place] >= num_blocks
        and shape[place] % num_blocks == 0
        and block_size % (shape[place] // num_blocks) == 0
    ]
    exact = [one for one in found if one[1] == 1] or found
    if len(exact) != 1:
        raise LayoutError(
            f"layer: which dimension of {list(shape)} holds {num_blocks} blocks cannot be told; say it by the layout"
        )
    block, split = exact[0]
    tokens = [place for place, size in enumerate(shape) if place != block and size == block_size // split]
    return Axes(block, tokens[0] if len(tokens) == 1 else None, split)


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """The layers of one KV group in one worker.

    Args:
        layers: tensor by name, in the group's order; empty where this worker has none of the group (pipeline stages).
        axes: of each layer, in the same order.
        block_size: tokens of the engine's block.
        chunk_size: tokens of a chunk.
        unit: how chunks are cut.
        null_block: the engine's block for "nothing"; None for an engine that has none.

    Raises:
        LayoutError: tokens are wanted of a layer whose token dimension is not known.
    """

    layers: Mapping[str, Any] = field(repr=False)
    axes: Sequence[Axes]
    block_size: int
    chunk_size: int
    unit: Unit
    null_block: int | None = NULL_BLOCK

    def __post_init__(self) -> None:
        for name, axes in zip(self.layers, self.axes, strict=True):
            if self.unit is Unit.TOKENS and axes.token is None:
                raise LayoutError(f"{name}: where tokens lie in a block cannot be told; use the unit blocks")

    def span(self, start: int, stop: int) -> slice:
        """Places in a block table of the blocks that hold tokens [start, stop)."""
        return slice(start // self.block_size, -(-stop // self.block_size))

    def read(
        self, blocks: Sequence[int], start: int, stop: int, staging: Callable[[Sequence[TensorMeta]], Sequence[Any]]
    ) -> list[Sequence[Any]] | None:
        """The values of the chunks in tokens [start, stop): for each chunk and each layer one tensor, copied.

        Args:
            blocks: the part `span(start, stop)` of the request's block table.
            start: a multiple of the chunk size.
            stop: likewise.
            staging: gives the tensors of one chunk, to be filled.

        Returns:
            None where a part of them is not there any more.
        """
        if self.null_block in blocks:
            return None
        n_chunks = (stop - start) // self.chunk_size
        if not self.layers:
            return [[_nothing()] for _ in range(n_chunks)]
        chunks: list[Sequence[Any]] = []
        for place in range(n_chunks):
            shapes = [self._chunk_shape(start // self.chunk_size + place, *layer) for layer in self._layers()]
            chunks.append(staging([TensorMeta(str(dtype).removeprefix("torch."), shape) for shape, dtype in shapes]))
        for number, (tensor, axes) in enumerate(self._layers()):
            rows = self._rows(tensor, axes, blocks, start, stop)
            for place, chunk in enumerate(chunks):
                begin = start + place * self.chunk_size
                chunk[number].copy_(rows[self._place(axes, start, begin, begin + self.chunk_size)])
        return chunks

    def _layers(self) -> Iterator[tuple[Any, Axes]]:
        return zip(self.layers.values(), self.axes, strict=True)

    def _place(self, axes: Axes, origin: int, start: int, stop: int) -> slice:
        """Rows of tokens [start, stop) in a value that begins with the token or block of `origin`."""
        if self.unit is Unit.TOKENS:
            return slice(start - origin, stop - origin)
        before, span = origin // self.block_size, self.span(start, stop)
        return slice((span.start - before) * axes.split, (span.stop - before) * axes.split)

    def _rows(self, tensor: Any, axes: Axes, blocks: Sequence[int], start: int, stop: int) -> Any:
        """Blocks, or tokens, first."""
        index = _index(tensor, _split(blocks, axes.split))
        picked = tensor.index_select(axes.block, index)
        if self.unit is Unit.BLOCKS:
            return picked.movedim(axes.block, 0)
        picked = picked.movedim((axes.block, axes.token), (0, 1))
        before = start % self.block_size
        return picked.flatten(0, 1)[before : before + stop - start]

    def check(self, chunk: int, tensors: Sequence[Any]) -> None:
        """Whether a chunk's tensors are what this worker's layers take.

        Args:
            chunk: index of the chunk.
            tensors: its value.

        Raises:
            ChunkShapeError: they are not.
        """
        wanted = [self._chunk_shape(chunk, *layer) for layer in self._layers()]
        got = [(tuple(one.shape), one.dtype) for one in tensors]
        if not self.layers:
            wanted = [((0,), _nothing().dtype)]
        if wanted != got:
            raise ChunkShapeError(f"chunk: got {got[:2]} in {len(got)} layers, wanted {wanted[:2]} in {len(wanted)}")

    def _chunk_shape(self, chunk: int, tensor: Any, axes: Axes) -> tuple[tuple[int, ...], Any]:
        if self.unit is Unit.BLOCKS:
            rest = [size for place, size in enumerate(tensor.shape) if place != axes.block]
            rows = self._place(axes, 0, chunk * self.chunk_size, (chunk + 1) * self.chunk_size)
            return (rows.stop - rows.start, *rest), tensor.dtype
        rest = [size for place, size in enumerate(tensor.shape) if place not in {axes.block, axes.token}]
        return (self.chunk_size, *rest), tensor.dtype

    def write(self, blocks: Sequence[int], start: int, stop: int, chunk: int, tensors: Sequence[Any]) -> None:
        """Put one chunk's value where tokens [start, stop) of the request lie, as far as they are the chunk's.

        Chunks are written in order: where two share a block, the later one has more of it. Whole blocks are written at
        the end, so slots behind `stop` in its block are, too: the engine computes those.

        Args:
            blocks: the part `span(start, stop)` of the request's block table.
            start: a multiple of the block size: what lies before it may belong to other requests as well.
            stop: not before `start`.
            chunk: index of the chunk.
            tensors: its value, which `check` took.

        Raises:
            LocalProtocolError: a start inside a block.
        """
        if start % self.block_size:
            raise LocalProtocolError(f"start: got {start}, wanted a multiple of the block size {self.block_size}")
        begin, end = chunk * self.chunk_size, (chunk + 1) * self.chunk_size
        if self.unit is Unit.BLOCKS:
            covered = self.span(begin, end)
            begin, end = covered.start * self.block_size, covered.stop * self.block_size
        low, high = max(begin, start), min(end, -(-stop // self.block_size) * self.block_size)
        for tensor, axes, value in zip(self.layers.values(), self.axes, tensors, strict=False):
            if self.unit is Unit.BLOCKS:
                self._write_blocks(tensor, axes, value, blocks, (begin, low, high, start))
            else:
                self._write_tokens(tensor, axes, value, blocks, (begin, low, high, start))

    def _write_blocks(self, tensor: Any, axes: Axes, value: Any, blocks: Sequence[int], at: tuple[int, ...]) -> None:
        begin, low, high, start = (token // self.block_size for token in at)
        into = [
            (block, place * axes.split + part)
            for place in range(low, high)
            if (block := blocks[place - start]) != self.null_block
            for part in range(axes.split)
        ]
        if not into:
            return
        target = tensor.movedim(axes.block, 0)
        rows = [row - begin * axes.split for _, row in into]
        ids = [block * axes.split + row % axes.split for block, row in into]
        picked = value if rows == list(range(len(value))) else value[rows]
        target[_index(tensor, ids)] = picked.to(tensor.device)

    def _write_tokens(self, tensor: Any, axes: Axes, value: Any, blocks: Sequence[int], at: tuple[int, ...]) -> None:
        begin, low, high, start = at
        size = self.block_size // axes.split
        into = [
            (token - begin, block * axes.split + token % self.block_size // size, token % size)
            for token in range(low, high)
            if (block := blocks[token // self.block_size - start // self.block_size]) != self.null_block
        ]
        if not into:
            return
        rows, places, inside = (list(one) for one in zip(*into, strict=True))
        target = tensor.movedim((axes.block, axes.token), (0, 1))
        picked = value if rows == list(range(len(value))) else value[rows]
        target[_index(tensor, places), _index(tensor, inside)] = picked.to(tensor.device)


def _split(blocks: Sequence[int], split: int) -> Sequence[int]:
    return blocks if split == 1 else [block * split + part for block in blocks for part in range(split)]


def _index(tensor: Any, places: Sequence[int]) -> Any:
    import torch  # noqa: PLC0415  (the layers prove that it is there; importing this module must not need it)

    return torch.tensor(places, dtype=torch.int64, device=tensor.device)


def _nothing() -> Any:
    """What a worker stores that has no layer of a group: a value without bytes, so that every shard is there."""
    import torch  # noqa: PLC0415  (as above)

    return torch.empty(0, dtype=torch.uint8)
