"""What must come out of a cache, from the meaning of a request and not from any key.

The identity of a chunk is everything that the KV of its tokens depends on, from the first token on, as plain values.
Sets of those are slow and cannot be wrong by a hash, so they judge our keys and v1's alike.
"""

from dataclasses import dataclass, field
from typing import Any

from extra_keys_cli.captured import CapturedRequest


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """What the KV of the tokens ``[0, stop)`` of a request depends on."""

    model: str
    tokens: tuple[int, ...] = field(repr=False)
    items: tuple[tuple[str, int, int], ...]
    adapter: tuple[str, str] | None
    salt: str | None = field(repr=False)

    def differences(self, other: "ChunkIdentity") -> list[str]:
        """In words, what tells two identities apart."""
        compared = [
            ("adapter", self.adapter != other.adapter),
            ("salt", self.salt != other.salt),
            ("picture", self.items != other.items),
            ("text", self.tokens != other.tokens),
        ]
        return [word for word, differs in compared if differs]


def chunk_identities(captured: CapturedRequest, chunk_size: int) -> list[ChunkIdentity]:
    """The identity of each full chunk of a captured request."""
    request = captured.request
    tokens = tuple(request.all_token_ids)
    lora: Any = request.lora_request
    adapter = (lora.lora_name, lora.lora_path) if lora else None
    spans = [(one.identifier, one.mm_position.offset, one.mm_position.length) for one in request.mm_features]
    return [
        ChunkIdentity(
            captured.model,
            tokens[:stop],
            tuple(span for span in spans if span[1] < stop),
            adapter,
            request.cache_salt,
        )
        for stop in range(chunk_size, len(tokens) + 1, chunk_size)
    ]


def why_not(missed: ChunkIdentity, earlier: list[list[ChunkIdentity]], place: int) -> str:
    """Why a missed chunk was not there, against the earlier request that came closest.

    Args:
        missed: identity of the first chunk that was not there.
        earlier: identities of the requests served before.
        place: index of that chunk.
    """
    same_model = [one for one in earlier if one and one[0].model == missed.model]
    if not same_model:
        return "first of its model"
    candidates = [missed.differences(one[place]) for one in same_model if place < len(one)]
    if not candidates:
        return "longer than all before"
    nearest = min(candidates, key=len)
    return "other " + " and ".join(nearest) if nearest else "was not stored"
