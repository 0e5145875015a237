"""Requests of the matrix: what is asked (kinds) and where the chunk boundaries fall (phases).

All requests of one phase have the same tokens, so nothing but their identity tells them apart; placeholders stand
wherever any of them has an item. A request's values follow from what its KV depends on, told without any key.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import NamedTuple, TypeAlias

from keying import CacheSalt, ExtraKey, LoraAdapter, MultimodalItem, PromptEmbeds

CHUNK = 16
N_CHUNKS = 4
N_TOKENS = N_CHUNKS * CHUNK + 5
PLACEHOLDER = 151_655
SECOND_ITEM = 6
"""Tokens of the item that follows the first where there are two."""

X = "a1" * 30 + "c0ff"
Y = "b2" * 30 + "c0ff"
"""Ends in the same 16 bits as X."""
VIDEO = "c3" * 30 + "7e11"
AUDIO = "d4" * 30 + "0a0a"
ROW_BYTES = 4


class Kind(StrEnum):
    """What is asked."""

    TEXT = "text"
    IMAGE_X = "image X"
    IMAGE_Y = "image Y"
    TWO_IMAGES = "two images"
    X_ELSEWHERE = "image X elsewhere"
    VIDEO = "video"
    VIDEO_WITH_AUDIO = "overlapping audio in video"
    ADAPTER_A = "adapter a"
    ADAPTER_B = "adapter b"
    ADAPTER_A_RELOADED = "adapter a reloaded"
    SALT_S = "salt s"
    SALT_T = "salt t"
    ADAPTER_S = "adapter named like salt s"
    EMBEDS_P = "prompt embeddings P"
    EMBEDS_Q = "prompt embeddings Q"
    EVERYTHING = "everything together"


class Write(NamedTuple):
    """One store of a request's writer.

    Attributes:
        n_tokens: tokens that there are by then.
        first: chunk that the store begins with.
        anew: whether the writer begins over before it, as after a preemption, with all tokens so far.
    """

    n_tokens: int
    first: int
    anew: bool = False


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """A phase.

    Attributes:
        start: first position of the span.
        stop: one past its last.
        steps: tokens that come at a time.
        writes: stores, in order.
    """

    start: int
    stop: int
    steps: tuple[int, ...] = (N_TOKENS,)
    writes: tuple[Write, ...] = (Write(N_TOKENS, 0),)


_ONE_BY_ONE = (1,) * (N_TOKENS - 40)


class Phase(StrEnum):
    """Where the span lies in its chunks, and how its tokens come."""

    AT_START = "starts a chunk"
    INSIDE = "starts inside a chunk"
    LAST_TOKEN = "starts on a chunk's last token"
    TO_BOUNDARY = "ends at a boundary"
    SEVERAL = "covers several chunks"
    GROWTH = "decode growth"
    RESUMED = "preempted and resumed"


PHASES: dict[Phase, PhaseSpec] = {
    Phase.AT_START: PhaseSpec(16, 26),
    Phase.INSIDE: PhaseSpec(19, 29),
    Phase.LAST_TOKEN: PhaseSpec(31, 41),
    Phase.TO_BOUNDARY: PhaseSpec(20, 32),
    Phase.SEVERAL: PhaseSpec(20, 55),
    # a prompt of 40 tokens; each chunk is stored when decoding has filled it
    Phase.GROWTH: PhaseSpec(19, 29, (40, *_ONE_BY_ONE), (Write(40, 0), Write(48, 2), Write(64, 3))),
    # prefilled in steps; preempted inside the span, then begun over with all tokens there are
    Phase.RESUMED: PhaseSpec(20, 55, (7, 9, 14, 23, 16), (Write(30, 0), Write(53, 1, anew=True), Write(N_TOKENS, 3))),
}

Meaning: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class MatrixRequest:
    """One request.

    Args:
        kind: what is asked.
        phase: where the boundaries fall.
    """

    kind: Kind
    phase: Phase

    @property
    def spec(self) -> PhaseSpec:
        """Of the phase."""
        return PHASES[self.phase]

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The token ids, the same for all kinds of a phase."""
        span = range(self.spec.start, self.spec.stop + SECOND_ITEM)
        return tuple(PLACEHOLDER if place in span else 1000 + place for place in range(N_TOKENS))

    @cached_property
    def extra_keys(self) -> tuple[ExtraKey, ...]:
        """Its identity beside the tokens."""
        start, length = self.spec.start, self.spec.stop - self.spec.start
        x, y, video = (MultimodalItem(name, start, length) for name in (X, Y, VIDEO))
        p, q = (PromptEmbeds(start, _rows(seed, length), ROW_BYTES, "float32") for seed in "pq")
        then_y = MultimodalItem(Y, start + length, SECOND_ITEM)
        by_kind: dict[Kind, tuple[ExtraKey, ...]] = {
            Kind.TEXT: (),
            Kind.IMAGE_X: (x,),
            Kind.IMAGE_Y: (y,),
            Kind.TWO_IMAGES: (x, then_y),
            Kind.X_ELSEWHERE: (MultimodalItem(X, start + 1, length),),
            Kind.VIDEO: (video,),
            Kind.VIDEO_WITH_AUDIO: (video, MultimodalItem(AUDIO, start + 2, length - 4)),
            Kind.ADAPTER_A: (LoraAdapter("a", "sha256:01"),),
            Kind.ADAPTER_B: (LoraAdapter("b", "sha256:01"),),
            Kind.ADAPTER_A_RELOADED: (LoraAdapter("a", "sha256:02"),),
            Kind.SALT_S: (CacheSalt("s"),),
            Kind.SALT_T: (CacheSalt("t"),),
            Kind.ADAPTER_S: (LoraAdapter("s", "sha256:01"),),
            Kind.EMBEDS_P: (p,),
            Kind.EMBEDS_Q: (q,),
            Kind.EVERYTHING: (x, then_y, LoraAdapter("a", "sha256:01"), CacheSalt("s"), p),
        }
        return by_kind[self.kind]

    @cached_property
    def items(self) -> tuple[MultimodalItem, ...]:
        """Its multimodal items: all of its identity that a v1 producer could put into tokens."""
        return tuple(one for one in self.extra_keys if isinstance(one, MultimodalItem))

    @cached_property
    def salt(self) -> str:
        """Its tenant's salt; "" for none."""
        return next((one.value for one in self.extra_keys if isinstance(one, CacheSalt)), "")

    @cached_property
    def meanings(self) -> tuple[Meaning, ...]:
        """What the KV of each chunk depends on: the tokens up to its end, and what begins before that."""
        return tuple(
            (self.tokens[:stop], tuple(sorted(part for one in self.extra_keys for part in _meaning(one, stop))))
            for stop in range(CHUNK, N_CHUNKS * CHUNK + 1, CHUNK)
        )

    @cached_property
    def values(self) -> tuple[int, ...]:
        """The KV of each chunk: a number in [1, 2**24), exact in a float32, that follows from its meaning."""
        digests = (hashlib.sha256(repr(meaning).encode()).digest() for meaning in self.meanings)
        return tuple(1 + int.from_bytes(digest[:4], "little") % (2**24 - 1) for digest in digests)


@cache
def shared_chunks(one: MatrixRequest, other: MatrixRequest) -> int:
    """Leading chunks whose KV is the same for both."""
    return leading_equal(one.meanings, other.meanings)


def leading_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading elements two sequences share."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _meaning(extra: ExtraKey, stop: int) -> list[tuple[str, ...]]:
    """An extra key as far as it matters to positions below `stop`."""
    match extra:
        case MultimodalItem():
            return [("item", extra.identifier, str(extra.offset), str(extra.length))] if extra.offset < stop else []
        case LoraAdapter():
            return [("adapter", extra.name, extra.revision)]
        case CacheSalt():
            return [("salt", extra.value)]
        case PromptEmbeds():
            rows = extra.rows[: max(0, stop - extra.offset) * extra.row_bytes]
            return [("embeddings", extra.dtype, str(extra.offset), rows.hex())] if rows else []
    raise AssertionError(f"no request has a {type(extra).__name__}")


def _rows(seed: str, n_rows: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(n_rows * ROW_BYTES)
