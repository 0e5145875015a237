"""What a key is the hash of, and where the keys of two requests part: read back from the pre-images themselves."""

from itertools import zip_longest
from typing import Final

from extra_keys_cli.key_inputs import KeyInputs
from extra_keys_cli.screen import shown, stdout
from keying import (
    EmbedsPart,
    LoraPart,
    MultimodalPart,
    SaltPart,
    TagPart,
    UnknownPart,
    decode_part,
    format_digest,
)

LONGEST_TEXT: Final = 80
"""Characters of a name or value that are shown: any digest is whole."""


def describe_part(encoded: bytes) -> str:
    """One part in words; a salt and a tag's value are not shown."""
    match decode_part(encoded):
        case MultimodalPart(identifier, offset, length):
            where = f"begins {-offset} before the chunk" if offset < 0 else f"begins at +{offset}"
            return f"item {_short(identifier)}, {where}, {length} tokens"
        case LoraPart(name, revision, start):
            return f"adapter {_short(name)} {_short(revision)}".rstrip() + (f" from +{start}" if start else "")
        case SaltPart():
            return "salt (not shown)"
        case EmbedsPart(first, rows, digest):
            return f"embeddings +{first} to +{first + rows} ({digest.hex()[:12]})"
        case TagPart(name, value, start):
            return f"tag {_short(name)} ({len(value)} bytes, not shown)" + (f" from +{start}" if start else "")
        case UnknownPart(kind, payload):
            return f"kind {kind}, unknown here, {len(payload)} bytes"


def explain(inputs: KeyInputs) -> None:
    """Print the space, and each chunk's key with what is in it beside the tokens."""
    space = inputs.space
    _say(
        f"space {space.model}  revision {space.model_revision or '-'}  kv_dtype {space.kv_dtype}  "
        f"chunk {space.chunk_size}  layout {space.kv_layout or '-'}"
    )
    _say(f"root {format_digest(space.root)}")
    for name, value in space.attributes.items():
        _say(f"  {name} = {_short(value)}")
    for place, key in enumerate(inputs.keys):
        _say(f"chunk {place}, tokens {key.start} to {key.stop}")
        _say(f"  {key}")
        for encoded in key.parts:
            _say(f"  {describe_part(encoded)}")
    if not inputs.keys:
        _say(f"no key: {len(inputs.tokens)} tokens fill no chunk of {space.chunk_size}")


def diff(one: KeyInputs, other: KeyInputs) -> bool:
    """Print where two requests part and why.

    Returns:
        Whether they share all their keys.
    """
    if one.space != other.space:
        names = ["model", "model_revision", "kv_dtype", "chunk_size", "kv_layout", "attributes"]
        differing = [name for name in names if getattr(one.space, name) != getattr(other.space, name)]
        _say(f"no chunk is shared: the spaces differ in {', '.join(differing)}")
        return False
    place = sum(1 for a, b in zip(one.keys, other.keys, strict=False) if a.digest == b.digest)
    if place == len(one.keys) == len(other.keys):
        _say(f"shared: all {_chunks(place)}" if place else "neither request fills a chunk")
        return True
    if place == min(len(one.keys), len(other.keys)):
        ends, goes_on, longer = ("first", "second", other) if place == len(one.keys) else ("second", "first", one)
        _say(f"shared: {_chunks(place)}, all of the {ends} request; the {goes_on} has {len(longer.keys)}")
        return False
    _say(f"shared: {_chunks(place)}; from chunk {place} on none is:")
    a, b = one.keys[place], other.keys[place]
    tokens_a, tokens_b = one.tokens[a.start : a.stop], other.tokens[b.start : b.stop]
    if tokens_a != tokens_b:
        differing_at = next(i for i, (x, y) in enumerate(zip_longest(tokens_a, tokens_b)) if x != y)
        _say(f"  tokens differ from position {a.start + differing_at} on")
    for only, sign in ((set(a.parts) - set(b.parts), "first only: "), (set(b.parts) - set(a.parts), "second only:")):
        for encoded in sorted(only):
            _say(f"  {sign} {describe_part(encoded)}")
    return False


def _say(line: str) -> None:
    """One line, never cut or wrapped: keys are there to be copied and searched for."""
    stdout.print(shown(line), highlight=False, soft_wrap=True)


def _chunks(count: int) -> str:
    return f"{count} chunk" if count == 1 else f"{count} chunks"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
