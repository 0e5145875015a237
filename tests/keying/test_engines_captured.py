"""Requests of a real engine: what must be shared is shared, and nothing else."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations

import pytest

from extra_keys_cli.captured import CapturedRequest, default_file, read_captured
from keying import KeySpace, chunk_digests
from keying.engines import UncacheableReason, from_vllm
from protocol_v2.connectors.lora_revision import AdapterRevisions
from tests.keying.engine_samples import refused

CHUNK = 16
SYSTEM_PROMPT = 180
"""Tokens that the requests of one model share, but for those whose label says otherwise."""

REQUESTS = read_captured(default_file())
REVISIONS = AdapterRevisions(shared_paths=("/adapters/",))


@cache
def derived(model: str, chunk_size: int = CHUNK) -> dict[str, list[bytes]]:
    """Digests of all requests of a model, by label."""
    found: dict[str, list[bytes]] = {}
    for one in REQUESTS:
        if one.model == model:
            space = KeySpace(model, chunk_size=chunk_size, kv_dtype=one.dtype)
            inputs = from_vllm(one.request, adapter_revision=REVISIONS)
            found[one.label] = chunk_digests(space, inputs.tokens, inputs.extra_keys)
    return found


def shared(one: list[bytes], other: list[bytes]) -> int:
    """Leading chunks that two requests share."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def first_difference(one: CapturedRequest, other: CapturedRequest) -> int:
    """The first position at which two requests differ, by what was captured and not by any key."""
    a, b = one.request, other.request
    if a.cache_salt != b.cache_salt or a.lora_request != b.lora_request:
        return 0
    end = min(len(a.all_token_ids), len(b.all_token_ids))
    token = next((place for place in range(end) if a.all_token_ids[place] != b.all_token_ids[place]), end)
    spans = [
        {(one.identifier, one.mm_position.offset, one.mm_position.length) for one in request.mm_features}
        for request in (a, b)
    ]
    return min([token, *(int(offset) for _, offset, _ in spans[0] ^ spans[1])])


def pairs() -> Iterator[tuple[CapturedRequest, CapturedRequest]]:
    """Every two requests of one model."""
    return ((one, other) for one, other in combinations(REQUESTS, 2) if one.model == other.model)


def test_the_file_is_what_its_readme_says() -> None:
    """32 requests of three models; a detector that sees none proves nothing."""
    requests = REQUESTS
    assert 32 == len(requests)
    assert {"tiny-random/llama", "tiny-random/llava", "tiny-random/qwen2vl"} == {one.model for one in requests}
    assert 155 == sum(1 for _ in pairs())


@pytest.mark.parametrize("chunk_size", [1, 16, 64, 256])
def test_requests_share_exactly_the_chunks_before_their_first_difference(chunk_size: int) -> None:
    """F1, G1, E1: every pair, against the first difference in what was captured: no chunk more, no chunk less."""
    for one, other in pairs():
        a, b = (derived(one.model, chunk_size)[label] for label in (one.label, other.label))
        expected = min(first_difference(one, other) // chunk_size, len(a), len(b))
        assert (one.label, other.label, expected) == (one.label, other.label, shared(a, b))


@pytest.mark.parametrize("model", ["tiny-random/llava", "tiny-random/qwen2vl"])
def test_the_same_photo_again_shares_everything(model: str) -> None:
    """H12: a content hash makes the second a hit; the photo under a client's id, a salt or an adapter is apart."""
    keys = derived(model)
    assert keys["china"] == keys["china again"]
    for label in ("flower", "china, client id"):
        assert SYSTEM_PROMPT // CHUNK == shared(keys["china"], keys[label])
    for label in ("china, salt tenant-1", "china, adapter A"):
        assert 0 == shared(keys["china"], keys[label])


@pytest.mark.parametrize("model", ["tiny-random/llava", "tiny-random/qwen2vl"])
def test_swapped_photos_part_where_the_first_begins(model: str) -> None:
    """B12: the order of two pictures shows, from the chunk on in which the first one begins."""
    keys = derived(model)
    assert 100 // CHUNK == shared(keys["china then flower"], keys["flower then china"])
    assert 0 < shared(keys["china then flower"], keys["china"])


def test_text_again_shares_everything_and_salts_nothing() -> None:
    """F1, F11: the same tenant hits all of it, another tenant and no tenant none of it."""
    keys = derived("tiny-random/llama")
    assert keys["text"] == keys["text again"]
    lists = [keys[label] for label in ("text", "text, salt tenant-1", "text, salt tenant-2")]
    assert all(0 == shared(one, other) for one, other in combinations(lists, 2))


def test_adapter_a_and_salt_a_are_apart() -> None:
    """G1: vLLM's own bug on its own kind of request: the adapter, the salt of its name, both, and neither."""
    keys = derived("tiny-random/llama")
    labels = ("text", "text, adapter A", "text, adapter B", "text, salt A", "text, adapter A, salt A")
    lists = [keys[label] for label in labels]
    assert sum(len(one) for one in lists) == len({digest for one in lists for digest in one})


def test_models_share_nothing() -> None:
    """The same text for two models has two lists of keys."""
    one = derived("tiny-random/llava")["text only, multimodal model"]
    other = derived("tiny-random/qwen2vl")["text only, multimodal model"]
    assert one
    assert 0 == shared(one, other)


def test_without_the_declaration_the_adapters_are_refused() -> None:
    """Their folders are not here, so nothing says what they compute."""
    adapted = [one.request for one in REQUESTS if one.request.lora_request]
    assert adapted
    for request in adapted:
        refused(UncacheableReason.UNREADABLE_ADAPTER, from_vllm, request, adapter_revision=AdapterRevisions())


def test_the_order_of_arrival_says_nothing() -> None:
    """Derived in another order, the keys are the same."""
    again = {
        (one.model, one.label): chunk_digests(
            KeySpace(one.model, chunk_size=CHUNK, kv_dtype=one.dtype), inputs.tokens, inputs.extra_keys
        )
        for one in reversed(REQUESTS)
        if (inputs := from_vllm(one.request, adapter_revision=REVISIONS))
    }
    assert {(model, label): derived(model)[label] for model, label in again} == again
