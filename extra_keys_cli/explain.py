"""What a key is the hash of, and where the keys of two requests part: read back from the pre-images themselves."""

from itertools import zip_longest

from rich.markup import escape
from rich.table import Table

from extra_keys_cli.failures import stdout
from extra_keys_cli.key_inputs import KeyInputs
from keying import (
    ChunkKey,
    EmbedsPart,
    LoraPart,
    MultimodalPart,
    SaltPart,
    TagPart,
    UnknownPart,
    decode_part,
    format_digest,
)


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
    """Print the space and one row a chunk."""
    space = inputs.space
    stdout.print(
        f"space {escape(space.model)}  revision {escape(space.model_revision) or '-'}  kv_dtype {space.kv_dtype}  "
        f"chunk {space.chunk_size}  layout {escape(space.kv_layout) or '-'}  root {format_digest(space.root)}",
        highlight=False,
        soft_wrap=True,
    )
    for name, value in space.attributes.items():
        stdout.print(f"  {escape(name)} = {escape(_short(value, 80))}", highlight=False)
    table = Table("#", "positions", "key", "beside the tokens")
    for place, key in enumerate(inputs.keys):
        table.add_row(str(place), f"{key.start}-{key.stop}", str(key), _parts(key))
    stdout.print(table)


def diff(one: KeyInputs, other: KeyInputs) -> bool:
    """Print where two requests part and why.

    Returns:
        Whether they share all their keys.
    """
    if one.space != other.space:
        names = ["model", "model_revision", "kv_dtype", "chunk_size", "kv_layout", "attributes"]
        differing = [name for name in names if getattr(one.space, name) != getattr(other.space, name)]
        stdout.print(f"no chunk is shared: the spaces differ in {', '.join(differing)}", highlight=False)
        return False
    shared = sum(1 for a, b in zip(one.keys, other.keys, strict=False) if a.digest == b.digest)
    if shared == len(one.keys) == len(other.keys):
        stdout.print(f"all {shared} chunks are shared", highlight=False)
        return True
    stdout.print(f"the first {shared} chunks are shared; from chunk {shared} on none is:", highlight=False)
    if shared == min(len(one.keys), len(other.keys)):
        stdout.print("  one request has no more chunks", highlight=False)
        return False
    a, b = one.keys[shared], other.keys[shared]
    tokens_a, tokens_b = one.tokens[a.start : a.stop], other.tokens[b.start : b.stop]
    if tokens_a != tokens_b:
        place = next(i for i, (x, y) in enumerate(zip_longest(tokens_a, tokens_b)) if x != y)
        stdout.print(f"  tokens differ from position {a.start + place} on", highlight=False)
    for only, sign in ((set(a.parts) - set(b.parts), "first only: "), (set(b.parts) - set(a.parts), "second only:")):
        for encoded in sorted(only):
            stdout.print(f"  {sign} {escape(describe_part(encoded))}", highlight=False)
    return False


def _parts(key: ChunkKey) -> str:
    return "\n".join(escape(describe_part(encoded)) for encoded in key.parts) or "-"


def _short(text: str, limit: int = 24) -> str:
    printable = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"
