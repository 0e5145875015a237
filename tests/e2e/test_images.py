"""Two multimodal models: pictures, where they stand, and what is shared before them."""

from typing import Any

import pytest

from tests.e2e.engines import CHUNK, LORA, Engines
from tests.e2e.environment import needs_engine
from tests.e2e.prompts import Request, assert_same, differences, full_hit, words

pytestmark = [pytest.mark.e2e, needs_engine]

PICTURE = {"llava": [4], "qwen2vl": [6, 9, 7]}
"""Tokens that stand for a picture in a prompt, before the engine expands them."""

FILM = [6, 10, 7]
MULTIMODAL = pytest.mark.parametrize("model", ["llava", "qwen2vl"])


def picture_at(model: str, place: int, picture: int, title: str, *, n_tokens: int = 100) -> Request:
    """A text with a picture at a place."""
    text = words(n_tokens, title)
    return {"tokens": [*text[:place], *PICTURE[model], *text[place:]], "images": [picture]}


def two_pictures(model: str, first: int, second: int, title: str) -> Request:
    """A text with two pictures."""
    text = words(160, title)
    return {
        "tokens": [*text[:20], *PICTURE[model], *text[20:60], *PICTURE[model], *text[60:]],
        "images": [first, second],
    }


@MULTIMODAL
def test_other_pictures_miss_and_the_same_picture_hits(engines: Engines, model: str) -> None:
    """Three pictures with one text: the tokens are equal, the KV is not. The second process hits what the first stored.

    The text before the picture fills one chunk, which all three share.
    """
    requests = [picture_at(model, 70, picture, f"{model} isolation") for picture in (1, 2, 3, 1)]
    reference = engines.expected(model, requests)
    assert len({tuple(one["logprobs"]) for one in reference}) == 3
    n_tokens = reference[0]["prompt"]
    full = full_hit(n_tokens, CHUNK)
    for process, hits in (("first", [0, CHUNK, CHUNK, full]), ("second", [full] * 4)):
        engines.open(process, model)
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        assert hits == run.cached


@MULTIMODAL
def test_two_pictures_and_the_same_two_swapped(engines: Engines, model: str) -> None:
    """Which picture stands where is part of the identity: swapped, or twice the same, is another prompt."""
    title = f"{model} two"
    requests = [two_pictures(model, *pair, title) for pair in ((1, 2), (2, 1), (1, 1), (2, 2))]
    reference = engines.expected(model, requests)
    assert len({tuple(one["logprobs"]) for one in reference}) == 4
    engines.open("first", model)
    first = engines.run("first", requests)
    assert_same(reference, first.answers)
    # the first picture begins in the first chunk (place 20), so only a prompt that begins with the same one shares it
    shared = first.cached[2]
    assert [0, 0, shared, shared] == first.cached
    assert CHUNK <= shared < full_hit(reference[0]["prompt"], CHUNK)
    engines.open("second", model)
    second = engines.run("second", requests)
    assert_same(reference, second.answers)
    assert [full_hit(one["prompt"], CHUNK) for one in reference] == second.cached


@pytest.mark.parametrize("place", [0, 1, 31, 32, 33, 63, 64, 65, 95])
def test_a_picture_at_each_phase_of_a_chunk(engines: Engines, place: int) -> None:
    """Wherever it begins and ends: chunks wholly before it are shared with another picture, those it touches are not.

    The engine keeps running over all phases: one process stores and the other hits.
    """
    requests = [picture_at("llava", place, picture, f"phase {place}", n_tokens=130) for picture in (4, 5)]
    reference = engines.expected("llava", requests)
    full = full_hit(reference[0]["prompt"], CHUNK)
    before = place // CHUNK * CHUNK
    for process, hits in (("first", [0, before]), ("second", [full, full])):
        open_once(engines, process, "llava")
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        assert hits == run.cached


def open_once(engines: Engines, process: str, model: str) -> None:
    """An engine that is open with the ordinary settings stays open."""
    if _opened.get(process) != id(engines):
        engines.open(process, model)
        _opened[process] = id(engines)


_opened: dict[str, int] = {}


def test_text_before_a_picture_is_shared_with_plain_text(engines: Engines) -> None:
    """A prompt without a picture and one with it share the chunks before the picture, in both directions."""
    text = words(200, "shared prefix")
    plain: Request = {"tokens": text}
    pictured: Request = {"tokens": [*text[:150], *PICTURE["llava"], *text[150:]], "images": [6]}
    reference = engines.expected("llava", [plain, pictured, plain])
    engines.open("first", "llava")
    run = engines.run("first", [plain, pictured, plain])
    assert_same(reference, run.answers)
    assert [0, 128, 192] == run.cached


def test_a_client_named_picture_is_known_by_its_name(engines: Engines) -> None:
    """An identifier that the client gives stands for the picture in both processes; another name is another picture."""
    requests: list[Request] = [
        {**picture_at("llava", 10, 7, "named"), "uuids": [name]} for name in ("invoice-1", "invoice-2", "invoice-1")
    ]
    reference = engines.expected("llava", requests)
    full = full_hit(reference[0]["prompt"], CHUNK)
    for process, hits in (("first", [0, 0, full]), ("second", [full] * 3)):
        engines.open(process, "llava")
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        assert hits == run.cached


def test_films_keep_apart_and_hit_their_own(engines: Engines) -> None:
    """The same for videos, which are other placeholder tokens and other positions."""
    text = words(100, "films")
    requests: list[Request] = [{"tokens": [*text[:70], *FILM, *text[70:]], "videos": [film]} for film in (1, 2, 1)]
    reference = engines.expected("qwen2vl", requests)
    assert len({tuple(one["logprobs"]) for one in reference}) == 2
    full = full_hit(reference[0]["prompt"], CHUNK)
    for process, hits in (("first", [0, CHUNK, full]), ("second", [full] * 3)):
        engines.open(process, "qwen2vl")
        run = engines.run(process, requests)
        assert_same(reference, run.answers)
        assert hits == run.cached


def test_a_streaming_session_appends_pictures(engines: Engines) -> None:
    """Each turn brings a picture: the session's keys are those of the whole sequence, in another process too."""
    turns: list[Request] = [
        {**picture_at("llava", 20 + 30 * place, place + 1, f"turn {place}"), "max_tokens": 20} for place in range(3)
    ]
    engines.expected("llava", [turns[0]])  # opens the engine without a cache
    expected = engines.hosts["plain"].call("converse", turns=turns)
    engines.open("first", "llava")
    session = engines.hosts["first"].call("converse", turns=turns)
    assert expected["tokens"] == session["tokens"]
    assert_same(expected["answers"], session["answers"])
    assert engines.hosts["first"].call("facts")["standing"] == 0

    flat = [
        token
        for token, before in zip(session["tokens"], [0, *session["tokens"]], strict=False)
        if token != 4 or before != 4
    ]
    whole: Request = {"tokens": flat, "images": [1, 2, 3]}
    options = {"limit_mm_per_prompt": {"image": 3}}
    reference = engines.expected("llava", [whole], **options)
    engines.open("second", "llava", options=options)
    run = engines.run("second", [whole])
    assert_same(reference, run.answers)
    assert [(len(session["tokens"]) - 1) // CHUNK * CHUNK] == run.cached


@MULTIMODAL
def test_mixed_traffic_in_one_batch(engines: Engines, model: str) -> None:
    """Pictures, plain text and salts computed together, stored together and hit together by the other process."""
    text = words(90, f"{model} mixed")
    requests: list[Request] = [
        picture_at(model, 30, 1, f"{model} mixed"),
        {"tokens": text},
        picture_at(model, 30, 2, f"{model} mixed"),
        {**picture_at(model, 30, 1, f"{model} mixed"), "salt": "tenant"},
        two_pictures(model, 1, 2, f"{model} mixed"),
        {"tokens": text, "salt": "tenant"},
    ]
    reference = engines.expected(model, requests)
    engines.open("first", model)
    first = engines.run("first", requests, batch=True)
    assert_same(reference, first.answers)
    engines.open("second", model)
    second = engines.run("second", requests, batch=True)
    assert_same(reference, second.answers)
    assert [full_hit(one["prompt"], CHUNK) for one in reference] == second.cached


def test_every_kind_of_identity_in_one_batch(engines: Engines) -> None:
    """One prompt with a picture: plain, by salt, by adapter, by both, and with another picture, computed together.

    All are stored in one batch by the first process, and hit in one batch by the second, each its own.
    """
    picture, other = (picture_at("llava", 20, number, "every kind", n_tokens=150) for number in (1, 2))
    adapter = engines.adapter("llava-a")
    requests: list[Request] = [
        picture,
        {**picture, "salt": "a"},
        {**picture, "adapter": adapter},
        {**picture, "adapter": adapter, "salt": "a"},
        other,
        {**other, "adapter": engines.adapter("llava-b")},
    ]
    options = {**LORA, "max_num_seqs": 6}
    reference = engines.expected("llava", requests, **options)
    assert len({tuple(one["logprobs"]) for one in reference}) == 4  # salts change no answer
    for process, hits in (("first", None), ("second", [full_hit(one["prompt"], CHUNK) for one in reference])):
        engines.open(process, "llava", options=options)
        run = engines.run(process, requests, batch=True)
        assert_same(reference, run.answers)
        assert hits is None or hits == run.cached


def test_keys_of_tokens_alone_would_be_seen(engines: Engines) -> None:
    """Negative control: the same connector without extra keys hits another picture's KV, and gives another answer."""
    requests = [picture_at("llava", 8, picture, "control") for picture in (1, 2)]
    reference = engines.expected("llava", requests)
    engines.open("first", "llava", connector="TokensOnlyConnector", module="control_connectors")
    run = engines.run("first", requests)
    full = full_hit(reference[0]["prompt"], CHUNK)
    assert [0, full] == run.cached
    wrong: list[Any] = differences(reference, run.answers)
    assert wrong[0] == 0.0
    assert wrong[1] > 0.01
