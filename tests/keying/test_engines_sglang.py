"""SGLang requests: pad values, 64-bit hashes and joined keys of the engine do not reach a key."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keying import CacheSalt, LoraAdapter, MultimodalItem, PromptEmbeds, Tag, UncacheableRequest
from keying.engines import AdapterSource, EngineInputs, UncacheableReason, from_sglang, from_vllm
from tests.keying.engine_samples import (
    IMAGE_TOKEN,
    PADS,
    Modality,
    digests,
    padded,
    refused,
    revision_of,
    sglang_inputs,
    sglang_item,
    sglang_req,
    vllm_feature,
    vllm_request,
    without,
)

ONE, OTHER = b"\x01" * 32, b"\x02" * 32
REFS = {"f00d": SimpleNamespace(lora_id="f00d", lora_name="sql", lora_path="/adapters/sql")}


def with_items(*items: Any, **fields: Any) -> EngineInputs:
    """Inputs of a request whose prompt holds the items' pad values, as the engine writes them."""
    return from_sglang(
        sglang_req(origin_input_ids=padded(items), multimodal_inputs=sglang_inputs(list(items)), **fields)
    )


def with_adapter(lora_id: str = "f00d", extra_key: Any = "f00d", refs: Any = None, **fields: Any) -> EngineInputs:
    """Inputs of a request with an adapter; the engine joins its id to the extra key."""
    return from_sglang(
        sglang_req(lora_id=lora_id, extra_key=extra_key, **fields),
        lora_refs=REFS if refs is None else refs,
        adapter_revision=revision_of,
    )


def test_a_text_request_is_its_tokens() -> None:
    """Prompt and output; no extra key; and the same keys that vLLM's request of these tokens has."""
    inputs = from_sglang(sglang_req())
    assert tuple(range(100, 116)) == inputs.tokens
    assert () == inputs.extra_keys
    assert digests(from_vllm(vllm_request())) == digests(inputs)


def test_pad_values_become_the_placeholder_token() -> None:
    """Inside a run all four pad values do, so engines that never pad agree; text and output stay."""
    inputs = with_items(sglang_item())
    expected = [*range(100, 105), *[IMAGE_TOKEN] * 4, *range(109, 116)]
    assert tuple(expected) == inputs.tokens
    vllm = vllm_request(all_token_ids=expected, mm_features=[vllm_feature(ONE.hex())])
    assert digests(from_vllm(vllm)) == digests(inputs)


def test_an_unpadded_run_stays_as_it_is() -> None:
    """Tokens that are no pad values are the model's own: separators of rows and frames, or a prompt not yet padded."""
    item = sglang_item(offsets=((4, 9),))
    tokens = padded([item])
    tokens[6] = 77
    inputs = from_sglang(sglang_req(origin_input_ids=tokens, multimodal_inputs=sglang_inputs([item])))
    assert (IMAGE_TOKEN, IMAGE_TOKEN, 77, IMAGE_TOKEN) == inputs.tokens[4:8]
    early = sglang_item(pad_value=None, pad_values=None)
    assert tuple(range(100, 116)) == from_sglang(sglang_req(multimodal_inputs=sglang_inputs([early]))).tokens


def test_the_older_single_pad_value_is_undone_too() -> None:
    """Before there were four, one value of 30 bits stood in the whole run."""
    item = without(sglang_item(pad_value=1_000_000 + 12345, pad_values=(1_000_000 + 12345,)), "pad_values")
    tokens = padded([SimpleNamespace(offsets=item.offsets, pad_values=(item.pad_value,))])
    inputs = from_sglang(sglang_req(origin_input_ids=tokens, multimodal_inputs=sglang_inputs([item])))
    assert with_items(sglang_item()) == inputs


def test_the_full_identity_separates_what_a_short_hash_does_not() -> None:
    """A11, B11: two pictures with one 64-bit hash and one pad value miss; the same picture hits."""
    one, other = with_items(sglang_item(ONE)), with_items(sglang_item(OTHER))
    assert one.tokens == other.tokens
    assert digests(one) == digests(with_items(sglang_item(ONE)))
    assert digests(one)[0] == digests(other)[0]
    assert digests(one)[1] != digests(other)[1]
    assert (MultimodalItem(ONE.hex(), 5, 4),) == one.extra_keys


@pytest.mark.parametrize("identity", [None, b"\x01" * 8, b"", "a" * 64, 0x1234])
def test_a_short_identity_is_refused(identity: Any) -> None:
    """Eight bytes are no identity, and neither is what has another type."""
    refused(UncacheableReason.WEAK_IDENTITY, with_items, sglang_item(identity))
    refused(UncacheableReason.WEAK_IDENTITY, with_items, without(sglang_item(), "identity"))


def test_the_caller_can_give_the_identity() -> None:
    """Asked only where the engine has none; bytes are taken by their digits, text as it is."""
    weak = sglang_item(None, feature=b"pixels")
    request = sglang_req(origin_input_ids=padded([weak]), multimodal_inputs=sglang_inputs([weak]))

    def digest(item: Any) -> bytes:
        return hashlib.sha256(item.feature).digest()

    inputs = from_sglang(request, item_identity=digest)
    assert (MultimodalItem(digest(weak).hex(), 5, 4),) == inputs.extra_keys
    assert inputs == from_sglang(request, item_identity=lambda item: digest(item).hex())
    assert with_items(sglang_item()) == from_sglang(
        sglang_req(origin_input_ids=padded([sglang_item()]), multimodal_inputs=sglang_inputs([sglang_item()])),
        item_identity=digest,
    )


def test_an_identity_function_that_has_no_answer_is_a_refusal() -> None:
    """None, too few bytes, nothing, an exception: bypass."""
    weak = sglang_item(None)
    request = sglang_req(origin_input_ids=padded([weak]), multimodal_inputs=sglang_inputs([weak]))

    def fails(_: Any) -> str:
        raise LookupError

    def knows_why(_: Any) -> str:
        raise UncacheableRequest(UncacheableReason.REQUEST_LOCAL_IDENTITY, "a counter")

    refused(UncacheableReason.REQUEST_LOCAL_IDENTITY, from_sglang, request, item_identity=knows_why)
    refused(UncacheableReason.WEAK_IDENTITY, from_sglang, request, item_identity=lambda _: None)
    refused(UncacheableReason.WEAK_IDENTITY, from_sglang, request, item_identity=lambda _: b"\x01" * 31)
    refused(UncacheableReason.MISSING_IDENTITY, from_sglang, request, item_identity=lambda _: "")
    refused(UncacheableReason.MISSING_IDENTITY, from_sglang, request, item_identity=fails)


def test_an_item_of_several_runs_is_one_range() -> None:
    """D8: tiles with text between them have one identity, so the range is the hull of the runs."""
    inputs = with_items(sglang_item(offsets=((2, 4), (7, 9))))
    assert (MultimodalItem(ONE.hex(), 2, 8),) == inputs.extra_keys
    assert (105, 106) == inputs.tokens[5:7]
    assert digests(inputs) != digests(with_items(sglang_item(offsets=((2, 9),))))


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        (None, UncacheableReason.MALFORMED_MEDIA),
        ((), UncacheableReason.MALFORMED_MEDIA),
        (((5,),), UncacheableReason.MALFORMED_MEDIA),
        (((5, 4),), UncacheableReason.MALFORMED_MEDIA),
        (((-1, 4),), UncacheableReason.MALFORMED_MEDIA),
        (((5, None),), UncacheableReason.MALFORMED_MEDIA),
        ((5, 8), UncacheableReason.MALFORMED_MEDIA),
    ],
)
def test_items_that_stand_nowhere_are_refused(offsets: Any, reason: UncacheableReason) -> None:
    """A6: an identity without a place is no extra key, and no reason to share the text's."""
    item = sglang_item(offsets=offsets, pad_values=None, pad_value=None)
    refused(reason, from_sglang, sglang_req(multimodal_inputs=sglang_inputs([item])))
    refused(
        UncacheableReason.MISSING_ATTRIBUTE,
        from_sglang,
        sglang_req(multimodal_inputs=sglang_inputs([without(item, "offsets")])),
    )


def test_a_run_may_reach_past_a_truncated_prompt() -> None:
    """The engine cuts prompts that are too long, also inside of an item."""
    item = sglang_item(offsets=((10, 29),))
    tokens = padded([sglang_item(offsets=((10, 11),))])
    request = sglang_req(origin_input_ids=tokens, output_ids=[], multimodal_inputs=sglang_inputs([item]))
    assert (MultimodalItem(ONE.hex(), 10, 20),) == from_sglang(request).extra_keys


def test_the_placeholder_is_that_of_the_modality() -> None:
    """What the caller says wins; else the request's own; else the request is refused, but only if it is needed."""
    video = sglang_item(modality=Modality.VIDEO)
    request = sglang_req(origin_input_ids=padded([video]), multimodal_inputs=sglang_inputs([video]))
    refused(UncacheableReason.UNKNOWN_PLACEHOLDER, from_sglang, request)
    assert 7 == from_sglang(request, placeholder_tokens={"video": 7}).tokens[5]
    named = sglang_inputs([video], video_token_id=8)
    request.multimodal_inputs = named
    assert 8 == from_sglang(request).tokens[5]
    assert 7 == from_sglang(request, placeholder_tokens={"video": 7}).tokens[5]
    wrong: list[Any] = [True, -1, 2**32, "9"]
    for value in wrong:
        refused(UncacheableReason.UNKNOWN_PLACEHOLDER, from_sglang, request, placeholder_tokens={"video": value})
    unpadded = sglang_item(modality=Modality.VIDEO, pad_value=None, pad_values=None)
    assert from_sglang(sglang_req(multimodal_inputs=sglang_inputs([unpadded]))).extra_keys


def test_a_pad_value_outside_of_every_run_is_refused() -> None:
    """A text request with the trace of a picture in it has lost its media; a short hash must not stand for them."""
    tokens = padded([sglang_item()])
    refused(UncacheableReason.LEFTOVER_PAD_VALUE, from_sglang, sglang_req(origin_input_ids=tokens))
    elsewhere = sglang_inputs([sglang_item(offsets=((0, 3),))])
    request = sglang_req(origin_input_ids=tokens, multimodal_inputs=elsewhere)
    refused(UncacheableReason.LEFTOVER_PAD_VALUE, from_sglang, request)
    old = sglang_req(origin_input_ids=[1, 2, 1_000_000 + 99, 4])
    refused(UncacheableReason.LEFTOVER_PAD_VALUE, from_sglang, old)
    old.vocab_size = None  # without the vocabulary's size only what is no token at all can be told
    assert 4 + 4 == len(from_sglang(old).tokens)
    old.origin_input_ids = [1, PADS[0]]
    refused(UncacheableReason.LEFTOVER_PAD_VALUE, from_sglang, old)


def test_multimodal_inputs_without_their_items_are_refused() -> None:
    """None for the list says that there are media, and not which; an empty list is text."""
    refused(UncacheableReason.MISSING_IDENTITY, from_sglang, sglang_req(multimodal_inputs=sglang_inputs(None)))
    refused(UncacheableReason.MISSING_ATTRIBUTE, from_sglang, sglang_req(multimodal_inputs=SimpleNamespace()))
    assert from_sglang(sglang_req()) == from_sglang(sglang_req(multimodal_inputs=sglang_inputs([])))


@pytest.mark.parametrize(
    "name",
    ["origin_input_ids", "output_ids", "multimodal_inputs", "lora_id", "extra_key", "cache_salt", "input_embeds"],
)
def test_a_missing_attribute_is_never_read_as_unused(name: str) -> None:
    """An older version that has no such thing is declared by its connector."""
    request = without(sglang_req(), name)
    assert name in refused(UncacheableReason.MISSING_ATTRIBUTE, from_sglang, request)
    if not name.endswith("_ids"):
        assert from_sglang(sglang_req()) == from_sglang(request, absent=(name,))


def test_adapter_and_extra_key_are_apart() -> None:
    """The engine joins them to one text: "ab" with adapter "c" and "a" with adapter "bc" would be one."""
    refs = {name: SimpleNamespace(lora_name="x", lora_path="/x") for name in ("c", "bc")}
    one, other = with_adapter("c", "abc", refs), with_adapter("bc", "abc", refs)
    assert (LoraAdapter("x", "sha256:/x"), Tag("sglang.extra_key", b"ab")) == one.extra_keys
    assert (LoraAdapter("x", "sha256:/x"), Tag("sglang.extra_key", b"a")) == other.extra_keys
    assert set() == set(digests(one)) & set(digests(other))


def test_the_id_alone_is_no_extra_key() -> None:
    """A request with an adapter and no key of its own carries the bare id; one of a newer version may carry none."""
    assert (LoraAdapter("sql", "sha256:/adapters/sql"),) == with_adapter().extra_keys
    assert with_adapter() == with_adapter(extra_key=None)


def test_an_extra_key_that_does_not_end_with_the_id_is_whole() -> None:
    """It has a name of its own, so it never equals one that was taken apart."""
    whole = with_adapter(extra_key="tenant")
    assert Tag("sglang.extra_key.whole", b"tenant") == whole.extra_keys[-1]
    assert set() == set(digests(whole)) & set(digests(with_adapter(extra_key="tenantf00d")))


def test_extra_keys_separate() -> None:
    """G5: the same one hits, another one and none miss."""
    one, again, other = (from_sglang(sglang_req(extra_key=key)) for key in ("a", "a", "b"))
    assert digests(one) == digests(again)
    assert 12 == len({*digests(one), *digests(other), *digests(from_sglang(sglang_req()))})


@pytest.mark.parametrize("value", ["", 7, b"a", "\ud800", "x" * 5000])
def test_a_malformed_extra_key_is_refused(value: Any) -> None:
    """Empty, too long, or no text."""
    refused(UncacheableReason.MALFORMED_EXTRA_KEY, from_sglang, sglang_req(extra_key=value))


def test_adapters_are_named_by_the_registry_not_by_their_id() -> None:
    """E7, E9: the id is random for each load; name and content are what processes share."""
    again = {"beef": REFS["f00d"]}
    assert digests(with_adapter()) == digests(with_adapter("beef", "beef", again))
    other = {"f00d": SimpleNamespace(lora_name="sql", lora_path="/adapters/sql-v2")}
    assert set() == set(digests(with_adapter())) & set(digests(with_adapter(refs=other)))
    assert with_adapter() == with_adapter(refs=REFS.get)


def test_an_adapter_that_nobody_knows_is_refused() -> None:
    """No registry, an id that is not in it, a registry that raises, an id that is none, a nameless entry."""

    def fails(_: str) -> Any:
        raise RuntimeError

    request = sglang_req(lora_id="f00d", extra_key="f00d")
    refused(UncacheableReason.UNKNOWN_ADAPTER, from_sglang, request, adapter_revision=revision_of)
    refused(UncacheableReason.UNKNOWN_ADAPTER, from_sglang, request, lora_refs={}, adapter_revision=revision_of)
    refused(UncacheableReason.UNKNOWN_ADAPTER, from_sglang, request, lora_refs=fails, adapter_revision=revision_of)
    refused(UncacheableReason.UNKNOWN_ADAPTER, with_adapter, "", "")
    refused(UncacheableReason.MISSING_ATTRIBUTE, with_adapter, refs={"f00d": SimpleNamespace(lora_path="/a")})
    nameless = {"f00d": SimpleNamespace(lora_name=None, lora_path="/a")}
    refused(UncacheableReason.UNKNOWN_ADAPTER, with_adapter, refs=nameless)
    refused(UncacheableReason.UNKNOWN_REVISION, from_sglang, request, lora_refs=REFS)


def test_activated_and_implied_adapters() -> None:
    """An adapter may begin in the prompt, and a modality may bring one of its own."""
    seen: list[tuple[AdapterSource, tuple[int, ...]]] = []

    def start(source: AdapterSource, prompt: tuple[int, ...]) -> int:
        seen.append((source, prompt))
        return 9

    late = from_sglang(
        sglang_req(lora_id="f00d", extra_key="f00d"),
        lora_refs=REFS,
        adapter_revision=revision_of,
        adapter_start=start,
    )
    assert (LoraAdapter("sql", "sha256:/adapters/sql", 9),) == late.extra_keys
    assert [(AdapterSource("sql", "/adapters/sql", handle=REFS["f00d"]), tuple(range(100, 112)))] == seen
    vision = LoraAdapter("vision", "sha256:v")
    item = sglang_item()
    request = sglang_req(origin_input_ids=padded([item]), multimodal_inputs=sglang_inputs([item]))
    implied = from_sglang(request, implied_adapters=lambda kinds: [vision] if "image" in kinds else [])
    assert vision in implied.extra_keys
    assert () == from_sglang(sglang_req(), implied_adapters=lambda kinds: [vision] if kinds else []).extra_keys
    again = sglang_req(lora_id="f00d", extra_key="f00d")
    asked = LoraAdapter("sql", "sha256:/adapters/sql")
    both = from_sglang(again, lora_refs=REFS, adapter_revision=revision_of, implied_adapters=lambda _: [asked])
    assert (asked,) == both.extra_keys


def test_salts() -> None:
    """F1: the same salt hits and another misses; a salt is no extra key; an empty one is refused."""
    one, again, other = (from_sglang(sglang_req(cache_salt=salt)) for salt in ("s", "s", "t"))
    assert (CacheSalt("s"),) == one.extra_keys
    assert digests(one) == digests(again)
    assert 12 == len({*digests(one), *digests(other), *digests(from_sglang(sglang_req(extra_key="s")))})
    refused(UncacheableReason.EMPTY_SALT, from_sglang, sglang_req(cache_salt=""))
    refused(UncacheableReason.MALFORMED_SALT, from_sglang, sglang_req(cache_salt=7))


def test_prompt_embeddings_cover_the_prompt() -> None:
    """K3: lists of floats are taken as float64, so equal numbers hit and other numbers miss."""
    rows: list[list[Any]] = [[0.5 * place, 1] for place in range(12)]
    inputs = from_sglang(sglang_req(origin_input_ids=[1] * 12, input_embeds=rows))
    (one,) = inputs.extra_keys
    assert isinstance(one, PromptEmbeds)
    assert (0, 12, 16, "float64") == (one.offset, one.n_rows, one.row_bytes, one.dtype)
    tensor = torch.tensor(rows, dtype=torch.float64)
    assert inputs == from_sglang(sglang_req(origin_input_ids=[1] * 12, input_embeds=tensor))
    rows[11][1] = 1.5
    other = from_sglang(sglang_req(origin_input_ids=[1] * 12, input_embeds=rows))
    assert digests(inputs)[:2] == digests(other)[:2]
    assert digests(inputs)[2:] != digests(other)[2:]


@pytest.mark.parametrize("rows", [[[1.0]] * 11, [[1.0]] * 11 + [[1.0, 2.0]], [[]] * 12, [[True]] * 12, [["a"]] * 12, 5])
def test_embeddings_that_do_not_fit_are_refused(rows: Any) -> None:
    """Another number of rows, rows of several widths or none, and what is no number."""
    refused(UncacheableReason.MALFORMED_EMBEDS, from_sglang, sglang_req(input_embeds=rows))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("positional_embed_overrides", SimpleNamespace(), UncacheableReason.EMBED_OVERRIDES),
        ("token_type_ids", [0, 1], UncacheableReason.CUSTOM_POSITIONS),
        ("multi_item_delimiter_indices", [3], UncacheableReason.CUSTOM_POSITIONS),
        ("beam_group", SimpleNamespace(), UncacheableReason.BEAM_SEARCH),
        ("dllm_config", SimpleNamespace(), UncacheableReason.NON_CAUSAL),
    ],
)
def test_what_breaks_the_prefix_is_refused(name: str, value: Any, reason: UncacheableReason) -> None:
    """KV that does not follow from the prefix has no key; versions without the feature are served."""
    refused(reason, from_sglang, sglang_req(**{name: value}))
    assert from_sglang(sglang_req()) == from_sglang(without(sglang_req(), name))


def test_what_is_no_token_is_named_where_keys_are_derived() -> None:
    """Wrong elements pass through here, and no key comes of them."""
    with pytest.raises(TypeError, match=r"tokens\[0\]"):
        digests(from_sglang(sglang_req(origin_input_ids=["a"], output_ids=[])))
