"""Pre-images: decode(encode(x)) == x over everything the types allow, and nothing else decodes."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keying import (
    ChunkPreimage,
    EmbedsPart,
    ExtraKey,
    KeySpace,
    LoraPart,
    MultimodalPart,
    PreimageError,
    SaltPart,
    SegmentPreimage,
    TagPart,
    UnknownPart,
    chunk_keys,
    decode_part,
    decode_preimage,
    encode_preimage,
    segment_key,
)
from keying.encoding import digest, part, text
from tests.keying.strategies import extra_key_lists, spaces, token_ids, token_lists

PARENT = bytes(range(32))


def chunk(tokens: tuple[int, ...], *parts: Any) -> bytes:
    """An encoded chunk pre-image."""
    return encode_preimage(ChunkPreimage(PARENT, tokens, parts))


@given(spaces, token_lists, extra_key_lists())
def test_every_key_is_the_hash_of_its_readable_pre_image(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey]
) -> None:
    """Injectivity by decoding: each chunk's pre-image decodes to what went in, and hashes to its key."""
    parent = space.root
    for key in chunk_keys(space, tokens, extra_keys, partial_tail=True):
        preimage = ChunkPreimage(parent, tuple(tokens[key.start : key.stop]), tuple(map(decode_part, key.parts)))
        data = encode_preimage(preimage)
        assert preimage == decode_preimage(data)
        assert key.digest == digest(data)
        parent = key.digest


@given(spaces, st.lists(token_ids, min_size=1, max_size=12), extra_key_lists(), st.integers(0, 20))
def test_every_segment_is_the_hash_of_its_readable_pre_image(
    space: KeySpace, tokens: list[int], extra_keys: list[ExtraKey], start: int
) -> None:
    """The same for segments."""
    key = segment_key(space, tokens, extra_keys, start=start)
    preimage = SegmentPreimage(space.root, tuple(tokens), tuple(map(decode_part, key.parts)))
    assert key.digest == digest(encode_preimage(preimage))
    assert preimage == decode_preimage(encode_preimage(preimage))


@given(spaces, token_lists, extra_key_lists(), spaces, token_lists, extra_key_lists())
def test_different_inputs_have_different_pre_images(
    space: KeySpace,
    tokens: list[int],
    extra_keys: list[ExtraKey],
    other_space: KeySpace,
    other_tokens: list[int],
    other_extra_keys: list[ExtraKey],
) -> None:
    """Two requests share their last key exactly if space, tokens and overlapping parts agree."""
    one = chunk_keys(space, tokens, extra_keys, partial_tail=True)
    other = chunk_keys(other_space, other_tokens, other_extra_keys, partial_tail=True)
    if not one or not other:
        return
    same_input = (
        space == other_space
        and tokens == other_tokens
        and [(key.start, key.parts) for key in one] == [(key.start, key.parts) for key in other]
    )
    assert same_input == (one[-1].digest == other[-1].digest)


@given(st.binary(max_size=200))
@example(chunk((1, 2), SaltPart("s")))
@example(chunk((1,), MultimodalPart("x", -3, 9), TagPart("t", b"", 0)))
def test_any_bytes_decode_to_their_only_pre_image_or_are_refused(data: bytes) -> None:
    """Bytes give a pre-image that encodes to the same bytes, or PreimageError, nothing else."""
    try:
        preimage = decode_preimage(data)
    except PreimageError:
        return
    assert data == encode_preimage(preimage)


@given(st.data())
def test_mutated_pre_images_never_decode_to_the_original(data: st.DataObject) -> None:
    """One changed, removed or added byte is refused or is another pre-image."""
    whole = bytearray(
        chunk((7, 9), MultimodalPart("x", -1, 9), LoraPart("a", "r", 1), SaltPart("s"), EmbedsPart(0, 1, PARENT))
    )
    original = decode_preimage(bytes(whole))
    place = data.draw(st.integers(0, len(whole) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "add"])):
        case "flip":
            whole[place] ^= data.draw(st.integers(1, 255))
        case "cut":
            del whole[place:]
        case _:
            whole.insert(place, data.draw(st.integers(0, 255)))
    try:
        changed = decode_preimage(bytes(whole))
    except PreimageError:
        return
    assert changed != original


def raw_chunk(*parts: bytes, n_tokens: int = 2, tail: bytes = b"") -> bytes:
    """A chunk pre-image with parts as given, valid or not."""
    return b"".join(
        (
            text("xk2/chunk"),
            PARENT,
            n_tokens.to_bytes(4, "little"),
            bytes(4 * n_tokens),
            len(parts).to_bytes(4, "little"),
            *parts,
            tail,
        )
    )


def u64(value: int) -> bytes:
    """Eight little-endian bytes."""
    return value.to_bytes(8, "little", signed=value < 0)


def item(identifier: str, offset: int, length: int) -> bytes:
    """An encoded multimodal part, valid or not."""
    return part(1, text(identifier) + u64(offset) + u64(length))


SALT_A, SALT_B = part(3, text("a")), part(3, text("b"))
EMBEDS = [part(4, u64(first) + u64(rows) + text("") + b"") for first, rows in ((0, 1),)]
NOT_WRITTEN: dict[str, bytes] = {
    "empty": b"",
    "other domain": text("xk3/chunk") + raw_chunk()[13:],
    "no domain length": b"\x09",
    "long domain": b"\xff\xff\xff\xff" + b"x" * 40,
    "trailing byte": raw_chunk(tail=b"\0"),
    "no tokens": raw_chunk(n_tokens=0),
    "tokens cut": raw_chunk()[:50],
    "two salts": raw_chunk(SALT_A, SALT_B),
    "unsorted parts": raw_chunk(SALT_A, item("x", 0, 1)),
    "the same part twice": raw_chunk(SALT_A, SALT_A),
    "kind 0": raw_chunk(part(0, b"")),
    "kind 128": raw_chunk(part(128, b"")),
    "kind 255": raw_chunk(part(255, b"")),
    "empty identifier": raw_chunk(item("", 0, 1)),
    "request-local identifier": raw_chunk(item("renderer0-mm-0-image-0", 0, 1)),
    "item before the chunk": raw_chunk(item("x", -4, 4)),
    "item after the chunk": raw_chunk(item("x", 2, 4)),
    "item of no length": raw_chunk(item("x", 0, 0)),
    "item too long": raw_chunk(item("x", 0, 2**48 + 1)),
    "item that ends too far": raw_chunk(item("x", 1, 2**48)),
    "item that began too early": raw_chunk(item("x", -(2**48) - 1, 2**48)),
    "adapter after the chunk": raw_chunk(part(2, text("a") + text("") + u64(2))),
    "adapter without name": raw_chunk(part(2, text("") + text("r") + u64(0))),
    "adapter twice": raw_chunk(part(2, text("a") + text("") + u64(0)), part(2, text("a") + text("") + u64(1))),
    "tag twice": raw_chunk(part(5, text("t") + text("") + u64(0)), part(5, text("t") + text("") + u64(1))),
    "reserved tag": raw_chunk(part(5, text("xk.a") + text("") + u64(0))),
    "salt with a byte more": raw_chunk(part(3, text("a") + b"\0")),
    "salt of no UTF-8": raw_chunk(part(3, b"\x01\0\0\0\xff")),
    "salt of a surrogate": raw_chunk(part(3, b"\x03\0\0\0\xed\xa0\x80")),
    "salt too long": raw_chunk(part(3, text("a" * 4097))),
    "empty salt": raw_chunk(part(3, text(""))),
    "embeds beyond the chunk": raw_chunk(part(4, u64(1) + u64(2) + b"\x20\0\0\0" + PARENT)),
    "embeds of no rows": raw_chunk(part(4, u64(0) + u64(0) + b"\x20\0\0\0" + PARENT)),
    "embeds with a short digest": raw_chunk(part(4, u64(0) + u64(1) + b"\x1f\0\0\0" + PARENT[:31])),
    "embeds that overlap": raw_chunk(
        part(4, u64(0) + u64(2) + b"\x20\0\0\0" + PARENT), part(4, u64(1) + u64(1) + b"\x20\0\0\0" + PARENT)
    ),
    "part runs past the end": raw_chunk(b"\x03\xff\xff\xff\xff"),
    "65 adapters": raw_chunk(*(part(2, text(f"a{i:02}") + text("") + u64(0)) for i in range(65))),
}


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_what_the_encoder_cannot_write_is_refused(name: str) -> None:
    """Each named malformation is a PreimageError; its well-formed sibling decodes."""
    with pytest.raises(PreimageError):
        decode_preimage(NOT_WRITTEN[name])
    assert decode_preimage(raw_chunk(item("x", -4, 5), SALT_A))


SPACE_BYTES = encode_preimage(KeySpace("m", chunk_size=4, kv_dtype="bfloat16", attributes={"a": "1", "b": "2"}))


@pytest.mark.parametrize(
    "data",
    [
        SPACE_BYTES + b"\0",
        SPACE_BYTES[:-1],
        SPACE_BYTES.replace(b"bfloat16", b"BFloat16"),
        SPACE_BYTES.replace(text("bfloat16") + b"\4\0\0\0", text("bfloat16") + b"\0\0\0\0"),
        SPACE_BYTES.replace(text("a") + text("1"), text("c") + text("1")),
        SPACE_BYTES.replace(text("b") + text("2"), text("a") + text("2")),
        SPACE_BYTES.replace(text("m"), text("")),
    ],
    ids=range(7),
)
def test_malformed_spaces_are_refused(data: bytes) -> None:
    """Unsorted, repeated or out-of-bounds fields of a space do not decode."""
    with pytest.raises(PreimageError):
        decode_preimage(data)
    assert decode_preimage(SPACE_BYTES)


@pytest.mark.parametrize(
    "make",
    [
        lambda: encode_preimage("chunk"),  # type: ignore[arg-type]
        lambda: chunk(()),
        lambda: encode_preimage(ChunkPreimage(b"short", (1,), ())),
        lambda: encode_preimage(ChunkPreimage("x" * 32, (1,), ())),  # type: ignore[arg-type]
        lambda: chunk((1,), UnknownPart(6, b"")),
        lambda: chunk((1,), "part"),
        lambda: chunk((1,), MultimodalPart("x", 1, 1)),
        lambda: chunk((1,), MultimodalPart("x", 2**70, 1)),
        lambda: chunk((1,), SaltPart("\ud800")),
        lambda: chunk((1,), SaltPart(None)),  # type: ignore[arg-type]
        lambda: chunk((1,), SaltPart("a"), SaltPart("b")),
        lambda: chunk((1,), EmbedsPart(0, 1, b"short")),
        lambda: decode_preimage("text"),  # type: ignore[arg-type]
    ],
    ids=range(13),
)
def test_what_cannot_be_derived_cannot_be_encoded(make: Any) -> None:
    """Encoding has the same rules as decoding, and every failure is a PreimageError."""
    with pytest.raises(PreimageError):
        make()


def test_an_unknown_kind_is_shown_raw_and_never_derived() -> None:
    """Kinds 6 to 127 may come: a reader of this version shows them and refuses to write them."""
    decoded = decode_preimage(raw_chunk(SALT_A, part(6, b"new"), part(127, b"")))
    assert isinstance(decoded, ChunkPreimage)
    assert (SaltPart("a"), UnknownPart(6, b"new"), UnknownPart(127, b"")) == decoded.parts
    with pytest.raises(PreimageError, match="kind 6: not known"):
        encode_preimage(decoded)


def test_secrets_in_decoded_parts_do_not_print() -> None:
    """A decoded pre-image in a log shows neither salt nor tokens nor tag values."""
    shown = repr(decode_preimage(chunk((123456,), SaltPart("s3cret"), TagPart("t", b"s3cret", 0))))
    assert "s3cret" not in shown
    assert "123456" not in shown
