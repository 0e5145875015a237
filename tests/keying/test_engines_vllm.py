"""vLLM requests: the right extra keys, and a refusal with its reason for everything that is not sure."""

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keying import CacheSalt, ChunkKeyChain, LoraAdapter, MultimodalItem, PromptEmbeds, UncacheableRequest
from keying.engines import (
    AdapterRevision,
    AdapterSource,
    AdapterSpan,
    EngineInputs,
    UncacheableReason,
    from_vllm,
    invocation_start,
    vllm_extra_keys,
    vllm_tokens,
)
from tests.keying.engine_samples import (
    OTHER_PICTURE,
    PICTURE,
    SPACE,
    digests,
    keys,
    refused,
    revision_of,
    vllm_feature,
    vllm_lora,
    vllm_request,
    without,
)

LOCAL = "renderer0-mm-7-image-0"


class ConstantList(Sequence[int]):
    """The read-only view that vLLM hands out."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __getitem__(self, place: Any) -> Any:
        return self._tokens[place]

    def __len__(self) -> int:
        return len(self._tokens)


def with_picture(identifier: Any = PICTURE, offset: Any = 5, length: Any = 4, **fields: Any) -> EngineInputs:
    """Inputs of a request with one picture."""
    return from_vllm(vllm_request(mm_features=[vllm_feature(identifier, offset, length)], **fields))


def with_adapter(**fields: Any) -> EngineInputs:
    """Inputs of a request with an adapter whose revision follows from its path."""
    return from_vllm(vllm_request(lora_request=vllm_lora(**fields)), adapter_revision=revision_of)


def always(revision: str) -> AdapterRevision:
    """A revision function that has one answer."""
    return lambda _: revision


def test_a_request_gives_tokens_and_every_extra_key() -> None:
    """Salt, adapter and items come out with the values of the request; the request id does not."""
    request = vllm_request(mm_features=[vllm_feature()], cache_salt="t-1", lora_request=vllm_lora())
    inputs = from_vllm(request, adapter_revision=revision_of)
    assert tuple(range(100, 116)) == inputs.tokens
    assert (
        CacheSalt("t-1"),
        LoraAdapter("sql", "sha256:/adapters/sql"),
        MultimodalItem(PICTURE, 5, 4),
    ) == inputs.extra_keys
    request.request_id = "another"
    assert inputs == from_vllm(request, adapter_revision=revision_of)


def test_a_request_without_any_of_them_has_no_extra_key() -> None:
    """None is "not used", and an empty list of features is text."""
    assert () == from_vllm(vllm_request()).extra_keys
    assert () == from_vllm(vllm_request(mm_features=None)).extra_keys


def test_tokens_are_prompt_and_output_in_any_container() -> None:
    """D5: all tokens so far, from the engine's read-only view as from a list or an array."""
    tokens = list(range(9))
    expected = from_vllm(vllm_request(all_token_ids=tokens))
    assert tuple(tokens) == expected.tokens
    for container in (ConstantList(tokens), tuple(tokens), array("q", tokens), np.array(tokens), torch.tensor(tokens)):
        request = vllm_request(all_token_ids=container, prompt_token_ids=tokens[:4])
        assert expected == from_vllm(request)
        assert (7, 8) == vllm_tokens(request, 7)


def test_the_inputs_are_a_snapshot_and_print_neither_tokens_nor_salt() -> None:
    """A request that grows does not change what was read before, and nothing confidential is in the repr."""
    tokens = [431, 432]
    inputs = from_vllm(vllm_request(all_token_ids=tokens, cache_salt="secret"))
    tokens.append(433)
    assert (431, 432) == inputs.tokens
    assert "431" not in repr(inputs)
    assert "secret" not in repr(inputs)


def test_prefill_steps_do_not_show_in_keys() -> None:
    """D7: keys from steps of 3, 5, 1 and 7 tokens equal those of the whole request."""
    request = vllm_request(mm_features=[vllm_feature()], cache_salt="t")
    chain = ChunkKeyChain(SPACE, vllm_extra_keys(request))
    start = 0
    for step in (3, 5, 1, 7):
        request.all_token_ids = list(range(100, 100 + start + step))
        chain.extend(vllm_tokens(request, start))
        start += step
    assert keys(from_vllm(request)) == list(chain.keys)


def test_identifier_and_not_mm_hash() -> None:
    """With an adapter on the media encoder only the identifier has it; ``mm_hash`` never enters a key."""
    bare = vllm_request(mm_features=[vllm_feature(mm_hash=OTHER_PICTURE)])
    prefixed = vllm_request(mm_features=[vllm_feature(f"sql:{PICTURE}", mm_hash=PICTURE)])
    assert digests(with_picture()) == digests(from_vllm(bare))
    assert digests(with_picture())[1:] != digests(from_vllm(prefixed))[1:]


def test_one_picture_at_five_places_has_five_lists_of_keys() -> None:
    """D1: among placeholders only, the place of the item shows."""
    tokens = [9] * 8
    lists = {tuple(digests(with_picture(offset=offset, length=4, all_token_ids=tokens))) for offset in range(5)}
    assert 5 == len(lists)


def test_only_chunks_from_the_item_on_are_its_own() -> None:
    """D3: the chunk before the picture is shared, the picture's and all after it are not."""
    text, cat, dog = digests(from_vllm(vllm_request())), digests(with_picture()), digests(with_picture(OTHER_PICTURE))
    assert text[0] == cat[0] == dog[0]
    assert all(3 == len({text[place], cat[place], dog[place]}) for place in (1, 2, 3))
    assert cat == digests(with_picture())


def test_a_mask_of_embedding_rows_changes_nothing() -> None:
    """D8: the range is the whole placeholder range, whatever of it are rows of the encoder."""
    feature = vllm_feature()
    feature.mm_position.is_embed = [True, False, True, True]
    assert with_picture() == from_vllm(vllm_request(mm_features=[feature]))


def test_overlapping_items_are_both_in_the_key() -> None:
    """D11: sound inside a video is legal, and neither of the two is dropped."""
    both = vllm_request(mm_features=[vllm_feature("v", 2, 4), vllm_feature("s", 4, 4)])
    assert digests(from_vllm(both)) != digests(with_picture("v", 2, 4))
    assert digests(from_vllm(both)) != digests(with_picture("s", 4, 4))
    twice = vllm_request(mm_features=[vllm_feature(), vllm_feature()])
    refused(UncacheableReason.CONFLICTING_KEYS, lambda: from_vllm(twice))


@pytest.mark.parametrize("name", ["all_token_ids", "mm_features", "cache_salt", "lora_request", "prompt_embeds"])
def test_a_missing_attribute_is_never_read_as_unused(name: str) -> None:
    """A connector against another version bypasses the cache, unless it declares the attribute absent."""
    request = without(vllm_request(), name)
    message = refused(UncacheableReason.MISSING_ATTRIBUTE, lambda: from_vllm(request))
    assert name in message
    if name != "all_token_ids":
        assert digests(from_vllm(vllm_request())) == digests(from_vllm(request, absent=(name,)))


def test_new_request_data_is_no_source_of_keys() -> None:
    """What the worker side gets lacks the salt, so a key from it would let tenants share."""
    data = without(vllm_request(), "cache_salt", "request_id", "all_token_ids")
    data.prefill_token_ids = data.prompt_token_ids
    refused(UncacheableReason.MISSING_ATTRIBUTE, lambda: from_vllm(data))


def test_an_attribute_that_raises_is_unreadable() -> None:
    """A property that fails is no "not used" either."""

    class Broken(SimpleNamespace):
        @property
        def cache_salt(self) -> str:
            raise RuntimeError("gone")

    broken = Broken(**vars(without(vllm_request(), "cache_salt")))
    refused(UncacheableReason.UNREADABLE_ATTRIBUTE, lambda: from_vllm(broken))


def test_salts() -> None:
    """F1, F6: the same salt hits, another one and none miss; any text is a salt, an empty one is a fault."""
    one, again, other = (
        from_vllm(vllm_request(cache_salt=salt)) for salt in ("a@b/../\u00e9", "a@b/../\u00e9", "a@b/../e\u0301")
    )
    assert digests(one) == digests(again)
    assert set() == set(digests(one)) & set(digests(other))
    assert set() == set(digests(one)) & set(digests(from_vllm(vllm_request())))
    refused(UncacheableReason.EMPTY_SALT, lambda: from_vllm(vllm_request(cache_salt="")))
    for wrong in (7, b"t", True, "\ud800"):
        refused(UncacheableReason.MALFORMED_SALT, from_vllm, vllm_request(cache_salt=wrong))
    message = refused(
        UncacheableReason.MALFORMED_SALT, lambda: from_vllm(vllm_request(cache_salt="geheim" * 2_000_000))
    )
    assert "geheim" not in message


def test_adapter_salt_and_item_of_one_name_never_meet() -> None:
    """G1: an adapter, a salt and a picture that are all called X give keys of their own."""
    adapter = with_adapter(name="X")
    salt = from_vllm(vllm_request(cache_salt="X"))
    item = with_picture("X", 0, 16)
    lists = [digests(inputs) for inputs in (adapter, salt, item, from_vllm(vllm_request()))]
    assert 16 == len({digest for one in lists for digest in one})


@pytest.mark.parametrize(
    ("feature", "reason"),
    [
        (vllm_feature(None), UncacheableReason.MISSING_IDENTITY),
        (vllm_feature(""), UncacheableReason.MISSING_IDENTITY),
        (vllm_feature(LOCAL), UncacheableReason.REQUEST_LOCAL_IDENTITY),
        (vllm_feature(f"sql:{LOCAL}"), UncacheableReason.REQUEST_LOCAL_IDENTITY),
        (vllm_feature(0), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(b"\x01" * 32), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature("x" * 5000), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature("\ud800"), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(offset=None), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(offset=-1), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(offset=True), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(offset=1.0), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(length=0), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(length=-3), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(length=None), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(length=2**50), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(offset=14, length=4), UncacheableReason.MALFORMED_MEDIA),
        (vllm_feature(mm_position=None), UncacheableReason.MALFORMED_MEDIA),
        (without(vllm_feature(), "identifier"), UncacheableReason.MISSING_ATTRIBUTE),
        (without(vllm_feature(), "mm_position"), UncacheableReason.MISSING_ATTRIBUTE),
        (vllm_feature(mm_position=SimpleNamespace(offset=5)), UncacheableReason.MISSING_ATTRIBUTE),
        (None, UncacheableReason.MISSING_ATTRIBUTE),
    ],
)
def test_media_without_a_sure_identity_and_place_are_refused(feature: Any, reason: UncacheableReason) -> None:
    """A6, C7, C9: no identity, a wrong type, a range that is none or lies outside: never the key of the text."""
    refused(reason, lambda: from_vllm(vllm_request(mm_features=[feature])))


def test_none_and_the_word_none_are_not_one_identifier() -> None:
    """C9: identifiers are text; nothing is coerced."""
    assert digests(with_picture("None")) != digests(with_picture("0"))
    refused(UncacheableReason.MISSING_IDENTITY, lambda: with_picture(None))


def test_features_that_are_no_list_are_refused() -> None:
    """A mapping or a number in the place of the list says that there are media, and not which."""
    for wrong in ({"image": 1}, 5, "abc"):
        refused(UncacheableReason.MALFORMED_MEDIA, from_vllm, vllm_request(mm_features=wrong))


def parallel(hashes: Any, positions: Any, **fields: Any) -> Any:
    """A request of the shape before ``mm_features``; it knew no prompt embeddings."""
    request = without(vllm_request(**fields), "mm_features", "prompt_embeds", "prompt_is_token_ids")
    request.mm_hashes, request.mm_positions = hashes, positions
    return request


def test_the_older_parallel_lists_give_the_same_keys() -> None:
    """``mm_hashes`` and ``mm_positions`` are identifiers and ranges, pair by pair; ranges may be mappings."""
    expected = digests(with_picture())
    ranges: list[Any] = [SimpleNamespace(offset=5, length=4), {"offset": 5, "length": 4}]
    for one in ranges:
        assert expected == digests(from_vllm(parallel([PICTURE], [one])))
        assert expected != digests(from_vllm(parallel([OTHER_PICTURE], [one])))
    nothings: list[Any] = [None, []]
    for nothing in nothings:
        assert digests(from_vllm(vllm_request())) == digests(from_vllm(parallel(nothing, nothing)))


@pytest.mark.parametrize(
    ("hashes", "positions", "reason"),
    [
        ([PICTURE], None, UncacheableReason.UNEQUAL_LISTS),
        ([PICTURE], [], UncacheableReason.UNEQUAL_LISTS),
        (None, [{"offset": 5, "length": 4}], UncacheableReason.UNEQUAL_LISTS),
        ([PICTURE, OTHER_PICTURE], [{"offset": 5, "length": 4}], UncacheableReason.UNEQUAL_LISTS),
        ([None], [{"offset": 5, "length": 4}], UncacheableReason.MISSING_IDENTITY),
        ([PICTURE], [None], UncacheableReason.MALFORMED_MEDIA),
        ([PICTURE], [{"offset": 5}], UncacheableReason.MISSING_ATTRIBUTE),
        ([PICTURE], [{"offset": 5, "length": 0}], UncacheableReason.MALFORMED_MEDIA),
        (PICTURE, [{"offset": 5, "length": 4}], UncacheableReason.MALFORMED_MEDIA),
    ],
)
def test_parallel_lists_that_do_not_match_are_refused(hashes: Any, positions: Any, reason: UncacheableReason) -> None:
    """A6, C9: nothing is zipped to the shorter list."""
    refused(reason, lambda: from_vllm(parallel(hashes, positions)))


def test_both_shapes_at_once_must_agree() -> None:
    """A request whose features are gone but whose older lists say that it has media is not text."""
    request = vllm_request(mm_hashes=[PICTURE], mm_positions=[SimpleNamespace(offset=5, length=4)])
    refused(UncacheableReason.UNEQUAL_LISTS, lambda: from_vllm(request))
    request.mm_features = [vllm_feature()]
    assert with_picture() == from_vllm(request)
    modal = parallel([PICTURE], [{"offset": 5, "length": 4}], mm_modalities=["image", "image"])
    refused(UncacheableReason.UNEQUAL_LISTS, lambda: from_vllm(modal))


def test_the_missing_half_of_the_older_shape_is_missed() -> None:
    """Positions without the attribute for hashes are an unknown version."""
    request = without(parallel([PICTURE], [{"offset": 5, "length": 4}]), "mm_hashes")
    refused(UncacheableReason.MISSING_ATTRIBUTE, lambda: from_vllm(request))


def test_adapters_are_apart_from_each_other_and_from_the_base() -> None:
    """E1: none, a and b give three disjoint lists, and a again gives a's."""
    base, a, b = from_vllm(vllm_request()), with_adapter(name="a", path="/a"), with_adapter(name="b", path="/b")
    assert digests(a) == digests(with_adapter(name="a", path="/a"))
    assert 12 == len({*digests(base), *digests(a), *digests(b)})


def test_the_number_of_an_adapter_says_nothing() -> None:
    """E7: instances that load adapters in another order share; E3: other weights under the name do not."""
    assert digests(with_adapter(number=1)) == digests(with_adapter(number=2))
    assert set() == set(digests(with_adapter(path="/v1"))) & set(digests(with_adapter(path="/v2")))


def test_a_reloaded_adapter_has_other_keys_until_its_content_is_back() -> None:
    """E4: v1, then v2 under the same name and path, then v1 again."""
    lists = [
        digests(from_vllm(vllm_request(lora_request=vllm_lora()), adapter_revision=always(revision)))
        for revision in ("sha256:v1", "sha256:v2", "sha256:v1")
    ]
    assert set() == set(lists[0]) & set(lists[1])
    assert lists[0] == lists[2]


def test_an_adapter_on_the_encoder_separates_the_item_by_its_revision() -> None:
    """E5: the identifier has the adapter's name only, and the adapter's part beside it has the generation."""
    request = vllm_request(mm_features=[vllm_feature(f"sql:{PICTURE}", mm_hash=PICTURE)], lora_request=vllm_lora())
    v1, v2 = (digests(from_vllm(request, adapter_revision=always(one))) for one in ("sha256:1", "sha256:2"))
    assert v1 == digests(from_vllm(request, adapter_revision=lambda _: "sha256:1"))
    assert set() == set(v1) & set(v2)


def test_scales_are_identity() -> None:
    """E11: an adapter at half its scale, and a set of two, are others; the order of the set is not."""
    request = vllm_request(lora_request=vllm_lora("a", "/a"))
    b = LoraAdapter("b", "sha256:/b")
    whole = from_vllm(request, adapter_revision=revision_of)
    half = from_vllm(request, adapter_revision=lambda source: f"{revision_of(source)};scale=3f000000")
    two = from_vllm(request, adapter_revision=revision_of, implied_adapters=lambda _: [b])
    turned = from_vllm(
        vllm_request(lora_request=vllm_lora("b", "/b")),
        adapter_revision=revision_of,
        implied_adapters=lambda _: [LoraAdapter("a", "sha256:/a")],
    )
    assert 12 == len({*digests(whole), *digests(half), *digests(two)})
    assert digests(two) == digests(turned)


@pytest.mark.parametrize("answer", [None, "", 5, b"sha256:ab"])
def test_an_adapter_without_a_revision_is_refused(answer: Any) -> None:
    """The name alone is no identity of the weights."""
    request = vllm_request(lora_request=vllm_lora())
    refused(UncacheableReason.UNKNOWN_REVISION, lambda: from_vllm(request, adapter_revision=lambda _: answer))
    refused(UncacheableReason.UNKNOWN_REVISION, lambda: from_vllm(request))


def test_a_revision_function_that_raises_makes_the_request_uncacheable() -> None:
    """Its own reason is kept where it gives one."""

    def fails(_: AdapterSource) -> str:
        raise OSError("disk")

    def knows_why(_: AdapterSource) -> str:
        raise UncacheableRequest(UncacheableReason.UNREADABLE_ADAPTER, "no such folder")

    request = vllm_request(lora_request=vllm_lora())
    refused(UncacheableReason.UNKNOWN_REVISION, lambda: from_vllm(request, adapter_revision=fails))
    refused(UncacheableReason.UNREADABLE_ADAPTER, lambda: from_vllm(request, adapter_revision=knows_why))


def test_an_adapter_without_a_name_is_refused() -> None:
    """An empty name, None and another object are no name."""
    for wrong in ("", None, 3):
        request = vllm_request(lora_request=vllm_lora(wrong))
        refused(UncacheableReason.UNKNOWN_ADAPTER, from_vllm, request, adapter_revision=revision_of)
    nameless = vllm_request(lora_request=SimpleNamespace(lora_path="/a"))
    refused(UncacheableReason.MISSING_ATTRIBUTE, lambda: from_vllm(nameless, adapter_revision=revision_of))
    long = vllm_request(lora_request=vllm_lora("n" * 5000))
    refused(UncacheableReason.MALFORMED_ADAPTER, lambda: from_vllm(long, adapter_revision=revision_of))


def test_a_modality_adapter_reaches_us_as_an_ordinary_adapter() -> None:
    """The engine registers it under the modality's name; an adapter called "image" is no picture."""
    adapter = with_adapter(name="image", path="/vision")
    assert (LoraAdapter("image", "sha256:/vision"),) == adapter.extra_keys
    assert set() == set(digests(adapter)) & set(digests(with_picture("image", 0, 16)))


def vision(modalities: frozenset[str]) -> list[LoraAdapter]:
    """Phi-4-multimodal's way: the model applies its vision adapter to the whole sequence once a picture is in it."""
    return [LoraAdapter("vision", "sha256:of-the-checkpoint")] if "image" in modalities else []


def test_an_adapter_implied_by_media_covers_the_text_before_them() -> None:
    """With a picture the first chunk is the adapter's; the same text alone is the base's, and is shared."""
    request = vllm_request(mm_features=[vllm_feature()])
    implied, plain = from_vllm(request, implied_adapters=vision), from_vllm(request)
    assert digests(implied)[0] != digests(plain)[0]
    text = vllm_request()
    assert digests(from_vllm(text)) == digests(from_vllm(text, implied_adapters=vision))
    assert from_vllm(request, implied_adapters=vision) == implied


def test_an_implied_adapter_that_is_asked_for_too_is_one() -> None:
    """The same adapter, by name and revision, is no second one."""
    request = vllm_request(mm_features=[vllm_feature()], lora_request=vllm_lora("vision", "x"))
    same = from_vllm(request, adapter_revision=lambda _: "sha256:of-the-checkpoint", implied_adapters=vision)
    assert 2 == len(same.extra_keys)


def test_an_implied_adapter_that_cannot_be_told_is_refused() -> None:
    """A function that raises, or gives names instead of adapters, bypasses the cache."""

    def fails(_: frozenset[str]) -> list[LoraAdapter]:
        raise KeyError("audio")

    request = vllm_request(mm_features=[vllm_feature()])
    wrong: Any = lambda _: ["vision"]
    refused(UncacheableReason.UNKNOWN_ADAPTER, lambda: from_vllm(request, implied_adapters=fails))
    refused(UncacheableReason.MALFORMED_ADAPTER, lambda: from_vllm(request, implied_adapters=wrong))


def activated(start: Any, **fields: Any) -> EngineInputs:
    """Inputs of a request whose adapter begins where a function says."""
    request = vllm_request(lora_request=vllm_lora(), **fields)
    return from_vllm(request, adapter_revision=revision_of, adapter_start=lambda *_: start)


def test_an_activated_adapter_shares_what_comes_before_it() -> None:
    """The prefix before the invocation is the base model's; from its chunk on the keys are the adapter's."""
    base, late = digests(from_vllm(vllm_request())), digests(activated(9))
    assert base[:2] == late[:2]
    assert set() == set(base[2:]) & set(late[2:])
    assert digests(with_adapter()) == digests(activated(0)) == digests(activated(AdapterSpan()))
    assert digests(activated(9)) != digests(activated(10))


def test_the_place_of_the_invocation_is_found_in_the_prompt() -> None:
    """The last occurrence counts, and generated tokens do not move it."""
    tokens = [1, 2, 7, 8, 3, 7, 8, 4, 5, 6, 7, 8]
    request = vllm_request(all_token_ids=tokens, num_prompt_tokens=9, lora_request=vllm_lora())
    inputs = from_vllm(
        request,
        adapter_revision=revision_of,
        adapter_start=lambda _, prompt: invocation_start(prompt, (7, 8)),
    )
    assert (LoraAdapter("sql", "sha256:/adapters/sql", start=5),) == inputs.extra_keys
    assert None is invocation_start((1, 2), (7, 8))
    assert None is invocation_start((1, 2), ())
    assert 0 == invocation_start((7,), (7,))


def test_an_adapter_that_ends_or_begins_nowhere_is_refused() -> None:
    """Key schema 2 has no end of an adapter; a start that is not known, or none, is no start."""
    refused(UncacheableReason.ADAPTER_ENDS, lambda: activated(AdapterSpan(2, 9)))
    refused(UncacheableReason.ADAPTER_ENDS, lambda: activated(AdapterSpan(2, 99)))
    for wrong in (None, -1, True, "5", AdapterSpan(-1)):
        refused(UncacheableReason.MALFORMED_ADAPTER, activated, wrong)
    request = without(vllm_request(lora_request=vllm_lora()), "num_prompt_tokens")
    refused(
        UncacheableReason.MISSING_ATTRIBUTE,
        lambda: from_vllm(request, adapter_revision=revision_of, adapter_start=lambda *_: 3),
    )

    def fails(*_: Any) -> int:
        raise LookupError

    def knows_why(*_: Any) -> int:
        raise UncacheableRequest(UncacheableReason.ADAPTER_ENDS, "until the next turn")

    request = vllm_request(lora_request=vllm_lora())
    for start, reason in (
        (fails, UncacheableReason.MALFORMED_ADAPTER),
        (knows_why, UncacheableReason.ADAPTER_ENDS),
    ):
        refused(reason, from_vllm, request, adapter_revision=revision_of, adapter_start=start)


def test_an_adapter_that_changes_identifiers_begins_at_zero() -> None:
    """It computes on the encoder, so it is there before it is activated in the text."""
    prefixed = activated(9, mm_features=[vllm_feature(f"sql:{PICTURE}", mm_hash=PICTURE)])
    plain = activated(9, mm_features=[vllm_feature()])
    assert 0 == next(one.start for one in prefixed.extra_keys if isinstance(one, LoraAdapter))
    assert 9 == next(one.start for one in plain.extra_keys if isinstance(one, LoraAdapter))


ROWS = torch.arange(32, dtype=torch.float32).reshape(8, 4) / 3


def embedded(rows: Any = ROWS, tokens: list[int] | None = None, **fields: Any) -> EngineInputs:
    """Inputs of a request whose prompt is embeddings only."""
    return from_vllm(vllm_request(prompt_embeds=rows, all_token_ids=tokens or [0] * 8, prompt_token_ids=None, **fields))


def test_prompt_embeddings_are_identity() -> None:
    """K3: equal rows hit, other rows miss, and a row behind the first chunk leaves the first chunk shared."""
    other = ROWS.clone()
    other[7, 3] = -0.0
    assert digests(embedded()) == digests(embedded(ROWS.clone()))
    assert digests(embedded())[0] == digests(embedded(other))[0]
    assert digests(embedded())[1] != digests(embedded(other))[1]


def test_rows_are_the_same_bytes_whatever_holds_them() -> None:
    """Strides, byte order, and numpy or torch do not show; the element type does."""
    expected = embedded()
    holders: list[Any] = [
        ROWS.t().contiguous().t(),
        ROWS.numpy(),
        ROWS.numpy().astype(">f4"),
        np.asfortranarray(ROWS.numpy()),
        ROWS[None],
        ROWS.clone().requires_grad_(),
    ]
    for rows in holders:
        assert expected == embedded(rows)
    assert digests(expected) != digests(embedded(ROWS.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_element_types_that_numpy_lacks(dtype: torch.dtype) -> None:
    """bfloat16 and the 8-bit floats come out as their own bytes, little-endian."""
    rows = ROWS.to(dtype)
    (one,) = embedded(rows).extra_keys
    assert isinstance(one, PromptEmbeds)
    assert (str(dtype).removeprefix("torch."), 4 * dtype.itemsize, 8) == (one.dtype, one.row_bytes, one.n_rows)
    assert bytes(rows.reshape(-1).view(torch.uint8).tolist()) == one.rows


def mixed(mask: Any, rows: Any = ROWS) -> EngineInputs:
    """Inputs of a prompt that mixes tokens and embeddings; the engine zeroes the ids under embeddings."""
    return from_vllm(
        vllm_request(
            prompt_embeds=rows,
            prompt_is_token_ids=mask,
            prompt_token_ids=[0] * 8,
            all_token_ids=[0] * 8,
        )
    )


def test_the_mask_of_a_mixed_prompt_is_identity() -> None:
    """K1: equal ids and rows under masks 0101... and 1010... miss; each run of rows is a range of its own."""
    one, other = mixed([False, True] * 4), mixed([True, False] * 4)
    assert set() == set(digests(one)) & set(digests(other))
    assert [0, 2, 4, 6] == [key.offset for key in one.extra_keys if isinstance(key, PromptEmbeds)]
    runs = mixed([True, False, False, True, True, False, False, False]).extra_keys
    assert [(1, 2), (5, 3)] == [(key.offset, key.n_rows) for key in runs if isinstance(key, PromptEmbeds)]
    assert digests(embedded()) == digests(mixed([False] * 8))


def test_a_mask_of_tokens_only_is_no_embeddings_at_all() -> None:
    """K1: all positions take their token, so nothing of the tensor is used."""
    assert digests(from_vllm(vllm_request(all_token_ids=[0] * 8))) == digests(mixed([True] * 8))


def test_generated_tokens_have_no_rows() -> None:
    """The rows cover the prompt, however long the sequence grows."""
    grown = embedded(tokens=[0] * 8 + [5, 6, 7, 8])
    assert digests(embedded()) == digests(grown)[:2]
    assert 8 == next(one.stop for one in grown.extra_keys if isinstance(one, PromptEmbeds))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_embeds": torch.zeros(2, 3, 4)}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_embeds": torch.zeros(8)}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_embeds": torch.zeros(8, 0)}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_embeds": torch.zeros(9, 4)}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_embeds": torch.zeros(8, 4, device="meta")}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_embeds": np.array([[object()]])}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_embeds": "rows"}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_is_token_ids": [False] * 7}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_is_token_ids": [0] * 8}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_is_token_ids": 8}, UncacheableReason.MALFORMED_EMBEDS),
        ({"prompt_token_ids": [0] * 8}, UncacheableReason.AMBIGUOUS_EMBEDS),
    ],
)
def test_embeddings_that_do_not_fit_the_prompt_are_refused(fields: dict[str, Any], reason: UncacheableReason) -> None:
    """A6 for embeddings: another shape, an unreadable tensor, a mask of another length, or no telling them apart."""
    request = vllm_request(**({"prompt_embeds": ROWS, "all_token_ids": [0] * 8, "prompt_token_ids": None} | fields))
    refused(reason, lambda: from_vllm(request))


def test_a_version_without_masks_had_embeddings_only_without_tokens() -> None:
    """Before mixed prompts ``prompt_token_ids`` was None beside embeddings; anything else is an unknown version."""
    old = without(vllm_request(prompt_embeds=ROWS, all_token_ids=[0] * 8, prompt_token_ids=None), "prompt_is_token_ids")
    assert digests(embedded()) == digests(from_vllm(old))
    refused(UncacheableReason.MISSING_ATTRIBUTE, lambda: from_vllm(without(old, "prompt_token_ids")))
    old.prompt_token_ids = [0] * 8
    refused(UncacheableReason.AMBIGUOUS_EMBEDS, lambda: from_vllm(old))


def test_masks_may_be_tensors() -> None:
    """A mask of the engine's tensor type reads like a list."""
    assert mixed([False, True] * 4) == mixed(torch.tensor([False, True] * 4))


def test_no_tokens_are_no_tokens() -> None:
    """None in the place of the ids is refused; an empty prompt has no keys."""
    refused(UncacheableReason.MISSING_ATTRIBUTE, lambda: from_vllm(vllm_request(all_token_ids=None)))
    refused(UncacheableReason.MISSING_ATTRIBUTE, vllm_extra_keys, vllm_request(all_token_ids=None))
    assert [] == keys(from_vllm(vllm_request(all_token_ids=[])))

    class Gone(ConstantList):
        def __getitem__(self, place: Any) -> Any:
            raise RuntimeError

    refused(UncacheableReason.UNREADABLE_ATTRIBUTE, from_vllm, vllm_request(all_token_ids=Gone([1])))


@pytest.mark.parametrize("version", ["0.18", "0.20", "0.32", "0.33"])
def test_request_shapes_of_four_versions_give_one_key(version: str) -> None:
    """What a version has beside the attributes that enter keys changes nothing."""
    beside: dict[str, dict[str, Any]] = {
        "0.18": {"eos_token_id": 2, "status": "WAITING"},
        "0.20": {"eos_token_id": 2, "resumable": False},
        "0.32": {"session_id": "s", "kv_hints": None, "resumable": True, "skip_reading_prefix_cache": True},
        "0.33": {"session_id": "s", "kv_hints": {}, "replay_start": 0},
    }
    request = vllm_request(mm_features=[vllm_feature()], cache_salt="t", **beside[version])
    if version in {"0.18", "0.20"}:
        request = without(request, "prompt_is_token_ids")
    assert with_picture(cache_salt="t") == from_vllm(request)
