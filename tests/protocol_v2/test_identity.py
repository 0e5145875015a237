"""Identity between wire and keying: nothing is lost, every bound is checked again, and there is one derivation."""

from typing import Any

import pytest
from hypothesis import given

from keying import (
    CacheSalt,
    ExtraKey,
    KeyingError,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    PromptEmbeds,
    Tag,
    chunk_digests,
    chunk_keys,
)
from protocol_v2 import identity
from protocol_v2.codes import ErrorCode, RefusalCode
from protocol_v2.errors import HandshakeError, LocalProtocolError, RemoteProtocolError
from protocol_v2.hello import SpaceFields
from protocol_v2.identity import (
    check_places,
    extra_key_from_wire,
    extra_key_to_wire,
    keys_of_digests,
    keys_of_tokens,
    resolve_keys,
    space_from_wire,
    space_to_wire,
)
from protocol_v2.messages import LookupRequest, decode_message, encode_message
from protocol_v2.wire_keys import Keys, WireItem, WireSalt, WireTag
from tests.keying.strategies import extra_key, extra_key_lists, spaces, token_lists
from tests.protocol_v2.strategies import SPACE

TOKENS = list(range(10, 23))
EXTRA_KEYS: list[ExtraKey] = [MultimodalItem("img", 2, 6), LoraAdapter("a", "sha256:00", 4), CacheSalt("tenant")]


def over_the_wire(keys: Keys) -> Keys:
    """Keys as the server decodes them."""
    request = LookupRequest(session="r", keys=keys)
    decoded = decode_message(request.code, encode_message(request), wire=2)
    assert isinstance(decoded, LookupRequest)
    return decoded.keys


@given(spaces)
def test_a_space_crosses_the_wire_whole(space: KeySpace) -> None:
    """The server derives the client's root from what the hello said."""
    assert space == space_from_wire(space_to_wire(space))
    assert space.root == space_from_wire(space_to_wire(space)).root


@given(extra_key)
def test_an_extra_key_crosses_the_wire_whole(one: ExtraKey) -> None:
    """Each of the five types comes out as it went in."""
    keys = over_the_wire(Keys(tokens=b"", extra_keys=(extra_key_to_wire(one),)))
    assert one == extra_key_from_wire(keys.extra_keys[0])


@given(spaces, token_lists, extra_key_lists())
def test_digests_and_tokens_name_the_same_chunks(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey]
) -> None:
    """A client that derives and one that does not are given the same answer, with or without the partial tail."""
    for partial_tail in (False, True):
        derived = chunk_keys(space, tokens, extra_keys, partial_tail=partial_tail)
        by_digests = resolve_keys(over_the_wire(keys_of_digests(derived)), space)
        by_tokens = resolve_keys(over_the_wire(keys_of_tokens(tokens, extra_keys, partial_tail=partial_tail)), space)
        assert tuple(key.digest for key in derived) == by_digests.digests == by_tokens.digests
        assert tuple(derived) == by_tokens.keys


def test_identity_differs_where_it_should() -> None:
    """F1, F11: paired over the wire: the same salt gives the same chunks, another salt shares none of them."""
    one, same, other = (
        resolve_keys(over_the_wire(keys_of_tokens(TOKENS, [CacheSalt(salt)])), SPACE).digests
        for salt in ("a", "a", "b")
    )
    assert one == same
    assert not set(one) & set(other)


def test_packed_tokens_are_taken_as_they_are() -> None:
    """Bytes are packed u32 already: the same chunks as the list."""
    packed = b"".join(token.to_bytes(4, "little") for token in TOKENS)
    assert keys_of_tokens(TOKENS) == keys_of_tokens(packed) == keys_of_tokens(bytearray(packed))
    with pytest.raises(LocalProtocolError, match="packed u32"):
        keys_of_tokens(packed[:-1])
    with pytest.raises(LocalProtocolError, match="digests"):
        keys_of_tokens(bytes(4 * (2**21 + 1)))


@pytest.mark.parametrize("tokens", [[-1], [2**32], [True], ["1"], [1.0], None])
def test_tokens_that_keying_refuses_never_reach_the_wire(tokens: Any) -> None:
    """N1: one rule for tokens, the same here as in the derivation."""
    with pytest.raises(KeyingError):
        keys_of_tokens(tokens)


def test_numpy_and_torch_tokens_are_normalised_at_the_edge() -> None:
    """N1: arrays, tensors and numpy scalars become the same packed tokens."""
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    expected = keys_of_tokens(TOKENS)
    for tokens in (
        np.array(TOKENS, dtype=np.int64),
        np.array(TOKENS, dtype=">u4"),
        [np.uint32(token) for token in TOKENS],
        torch.tensor(TOKENS),
    ):
        assert expected == keys_of_tokens(tokens)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"kv_dtype": "auto"}, "space.kv_dtype"),
        ({"kv_dtype": "BF16"}, "space.kv_dtype"),
        ({"model": "x" * 4097}, "space.model"),
        ({"attributes": {"": "x"}}, "space.attribute name"),
        ({"attributes": {"a": "é" * 4096}}, "space.attribute value"),
    ],
)
def test_a_space_is_validated_again_at_the_server(fields: dict[str, Any], name: str) -> None:
    """F6: what the frozen layout lets pass is still checked by keying, and the refusal names the field."""
    good: dict[str, Any] = {"model": "m", "kv_dtype": "bfloat16", "chunk_size": 4}
    assert space_from_wire(SpaceFields(**good)) == SPACE
    with pytest.raises(HandshakeError) as caught:
        space_from_wire(SpaceFields(**good | fields))
    assert (RefusalCode.SPACE_INVALID, name) == (caught.value.refusal_code, caught.value.field)


def test_extra_keys_are_validated_again_at_the_server() -> None:
    """F5: a bound in characters let it pass, the bound in bytes does not; and it says nothing of the salt."""
    salt = "é" * 4096
    for part, word in (
        (WireSalt(salt), "salt"),
        (WireItem("engine:renderer0-mm-3-image-0", 0, 1), "identifier"),
        (WireItem("img", 2**48, 1), "offset"),
        (WireTag("xk.reserved", b"", 0), "tag name"),
    ):
        with pytest.raises(RemoteProtocolError, match=word) as caught:
            resolve_keys(Keys(tokens=bytes(16), extra_keys=(part,)), SPACE)
        assert ErrorCode.INVALID_IDENTITY == caught.value.error_code
        assert "é" not in str(caught.value)


def test_extra_keys_that_do_not_go_together_are_an_invalid_identity() -> None:
    """Two salts, an item twice, embeddings that overlap: refused by the one derivation."""
    rows = PromptEmbeds(0, bytes(8), 4, "float32")
    for extra_keys in (
        [CacheSalt("a"), CacheSalt("b")],
        [MultimodalItem("i", 0, 2)] * 2,
        [rows, PromptEmbeds(1, bytes(8), 4, "float32")],
        [Tag("t", b"1"), Tag("t", b"2")],
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            resolve_keys(keys_of_tokens(TOKENS, extra_keys), SPACE)
        assert ErrorCode.INVALID_IDENTITY == caught.value.error_code


def test_keys_need_a_space() -> None:
    """A session without a space serves tools, not keys."""
    with pytest.raises(RemoteProtocolError) as caught:
        resolve_keys(keys_of_tokens(TOKENS), None)
    assert ErrorCode.NO_SPACE == caught.value.error_code


def test_chunks_are_counted_before_they_are_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's limit costs nothing to keep: two million tokens are refused without a hash."""
    derived: list[int] = []

    def counted(space: KeySpace, tokens: Any, *rest: Any, **options: Any) -> Any:
        derived.append(len(tokens))
        return chunk_keys(space, tokens, *rest, **options)

    monkeypatch.setattr(identity, "chunk_keys", counted)
    with pytest.raises(RemoteProtocolError) as caught:
        resolve_keys(Keys(tokens=bytes(4 * 2**21)), SPACE, max_chunks=1000)
    assert ErrorCode.TOO_LARGE == caught.value.error_code
    assert not derived
    three = keys_of_tokens(TOKENS)
    assert 3 == len(resolve_keys(three, SPACE, max_chunks=3).digests)
    assert [len(TOKENS)] == derived
    four = keys_of_tokens(TOKENS, partial_tail=True)
    for keys in (four, keys_of_digests([bytes(32)] * 4)):
        with pytest.raises(RemoteProtocolError):
            resolve_keys(keys, SPACE, max_chunks=3)


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33)])
def test_a_digest_is_32_bytes(digest: bytes) -> None:
    """S7: a shortened key is refused at the edge."""
    with pytest.raises(LocalProtocolError, match="digest of 32"):
        keys_of_digests([bytes(32), digest])
    with pytest.raises(LocalProtocolError, match="65536"):
        keys_of_digests([bytes(32)] * 65_537)


def test_what_is_no_extra_key_is_not_sent() -> None:
    """Only keying's five types travel."""
    with pytest.raises(LocalProtocolError, match="five types"):
        extra_key_to_wire("salt")  # type: ignore[arg-type]


def test_attributes_that_no_hello_can_carry_are_not_sent() -> None:
    """The frozen hello carries 64 attributes."""
    many = {str(i): "" for i in range(65)}
    with pytest.raises(LocalProtocolError, match="attributes"):
        space_to_wire(KeySpace("m", chunk_size=4, kv_dtype="int8", attributes=many))


@pytest.mark.parametrize(
    ("first", "starts", "n_tokens"),
    [(3, (12, 16), (1, 4)), (0, (0,), (5,)), (0, (1,), (4,)), (0, (0,), (3,)), (4, (16,), (1,))],
)
def test_a_store_names_the_places_of_its_keys(first: int, starts: tuple[int, ...], n_tokens: tuple[int, ...]) -> None:
    """A range beyond the keys, a chunk too long, or a place that is not the key's is refused; the right one passes."""
    chunks = resolve_keys(keys_of_tokens(TOKENS, partial_tail=True), SPACE)
    check_places(chunks, 0, (0, 4, 8, 12), (4, 4, 4, 1))
    check_places(chunks, 2, (8, 12), (4, 1))
    with pytest.raises(RemoteProtocolError) as caught:
        check_places(chunks, first, starts, n_tokens)
    assert ErrorCode.INVALID_IDENTITY == caught.value.error_code


def test_places_of_digests_are_bounded_by_the_chunk_size_only() -> None:
    """Segments start anywhere: with digests only the range and the length can be checked."""
    chunks = resolve_keys(keys_of_digests(chunk_digests(SPACE, TOKENS)), SPACE)
    check_places(chunks, 1, (1000,), (4,))
    with pytest.raises(RemoteProtocolError):
        check_places(chunks, 1, (1000,), (5,))
    with pytest.raises(RemoteProtocolError):
        check_places(chunks, 3, (12,), (1,))
