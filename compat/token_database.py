"""Token databases: the ``process_tokens`` that LMCache's callers know, over schema-2 keys.

In the release a database is built from a configuration and gives keys over token ids alone. Here it is built from a
`KeySpace`, takes the request's extra keys as well, and gives schema-2 keys, so a caller moves over by changing the
import and the constructor. What has no exact counterpart is refused at the call, before anything is given out.

    tokens      keys are derived; the caller hands in the engine's own ids, not ids with surrogate values in them
    hashes      digests derived before, with the lengths of their chunks; they are placed, not changed
    mask        False over a prefix that is already there, True after it: what begins in the prefix is left out
    tags        ``lmcache.tag.*`` of request_configs is identity in the release, so it becomes a `keying.Tag` each

Source: docs/spec/v1-formats.md, "Token databases".
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from compat.errors import CompatError, CompatTypeError
from keying import (
    DIGEST_SIZE,
    ExtraKey,
    KeySpace,
    Tag,
    chunk_digests,
    format_digest,
    pack_tokens,
    segment_keys,
    unpack_tokens,
)

TAG_PREFIX: Final = "lmcache.tag."
"""Names in ``request_configs`` that are part of an in-process v1 key; all others are not."""

_NO_V1_HASHES: Final = "v1 hashes cannot be translated, derive anew from the tokens"

_Row: TypeAlias = tuple[int, int, bytes]
_Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenDatabaseKey:
    """The key of a chunk or segment, wherever it stands: equal digests are equal keys. Prints as ``xk2:<64 hex>``.

    There is one for all layers and ranks; those address a shard of the value and are no part of a key.

    Args:
        digest: 32 bytes.

    Raises:
        CompatError: another length.
        CompatTypeError: not bytes.
    """

    digest: bytes

    def __post_init__(self) -> None:
        _checked_digest(self.digest, "digest")

    @property
    def chunk_hash(self) -> bytes:
        """The digest, under the name that v1 callers read."""
        return self.digest

    def to_string(self) -> str:
        """The printed form, under the name that v1 callers call; it has no ``@`` and is no v1 name."""
        return format_digest(self.digest)

    def __str__(self) -> str:
        return format_digest(self.digest)

    def __repr__(self) -> str:
        return f"TokenDatabaseKey({self})"


ProcessedTokens: TypeAlias = tuple[int, int, TokenDatabaseKey | bytes]
"""First position, one past the last, and the key, or the digest alone."""


class _TokenDatabase(ABC):
    """What both databases share: how a call is read."""

    __slots__ = ("space",)

    def __init__(self, space: KeySpace) -> None:
        if not isinstance(space, KeySpace):
            raise CompatTypeError(f"space: got {type(space).__name__}, wanted a KeySpace; a v1 configuration says less")
        self.space = space

    def process_tokens(  # noqa: PLR0917  (LMCache's callers give the first four by position)
        self,
        tokens: Any = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Any = None,
        make_key: bool = True,
        request_configs: Mapping[str, Any] | None = None,
        extra_keys: Iterable[ExtraKey] = (),
    ) -> Iterator[ProcessedTokens]:
        """The keys of a prompt with their places, in order. Everything is checked and derived at the call.

        Args:
            tokens: the n ids of the prompt, in any container that `keying.chunk_keys` takes.
            hashes: instead of tokens, digests that this method gave for ``make_key=False``; 32 bytes each.
            offsets: with hashes, the number of tokens of each.
            mask: n bools in a list, tuple, array or tensor: False over a prefix, True after it. What begins in the
                prefix is left out; keys are those of the whole prompt all the same.
            make_key: give a `TokenDatabaseKey`, else the digest.
            request_configs: names that begin with ``lmcache.tag.`` become tags of the whole prompt, under their full
                names; other names are no identity and are not looked at.
            extra_keys: of the whole prompt, at their prompt positions. With hashes: none, they are in the digests.

        Returns:
            ``(start, stop, key)`` for each chunk or segment.

        Raises:
            CompatError: the arguments do not go together, or cannot be translated exactly.
            CompatTypeError: one of them has a type that cannot.
            keying.KeyingError: tokens or extra keys that have no key.

        Source: docs/spec/v1-formats.md, "Token databases".
        """
        if (tokens is None) == (hashes is None):
            raise CompatError(f"tokens, hashes: got {'neither' if tokens is None else 'both'}; give one of the two")
        if (offsets is None) != (hashes is None):
            raise CompatError("hashes, offsets: got one without the other; they go together")
        identity = (*_extra_keys(extra_keys), *_tags(request_configs))
        if hashes is None:
            ids = unpack_tokens(pack_tokens(tokens))
            n_tokens = len(ids)
            rows = self._derive(ids, identity, self._hidden(mask, n_tokens))
        else:
            if identity:
                raise CompatError(
                    "hashes: got extra keys or tags beside them, which a digest cannot take in any more; "
                    "hand them in where the digests are derived, and not again"
                )
            placed = self._place(_pairs(hashes, offsets))
            hidden = self._hidden(mask, placed[-1][1] if placed else 0)
            rows = [row for row in placed if row[0] >= hidden]
        if make_key:
            return ((start, stop, TokenDatabaseKey(digest)) for start, stop, digest in rows)
        return iter(rows)

    def _hidden(self, mask: Any, n_tokens: int) -> int:
        """Tokens in the prefix that the mask leaves out."""
        return 0 if mask is None else _false_prefix(mask, n_tokens)

    @abstractmethod
    def _derive(self, ids: _Ids, identity: tuple[ExtraKey, ...], hidden: int) -> list[_Row]:
        """Places and digests of what begins at or after ``hidden``."""

    @abstractmethod
    def _place(self, pairs: list[tuple[bytes, int]]) -> list[_Row]:
        """The places of digests that were derived before."""


class ChunkedTokenDatabase(_TokenDatabase):
    """Chained chunks of the space's chunk size; the keys are those of `keying.chunk_keys`.

    Args:
        space: what the deployment shares.
        save_unfull_chunk: also key the tokens after the last full chunk. Off, as in LMCache's configuration.

    Raises:
        CompatTypeError: not a `KeySpace`, or not a bool.
    """

    __slots__ = ("save_unfull_chunk",)

    def __init__(self, space: KeySpace, *, save_unfull_chunk: bool = False) -> None:
        super().__init__(space)
        if not isinstance(save_unfull_chunk, bool):
            raise CompatTypeError(f"save_unfull_chunk: got {type(save_unfull_chunk).__name__}, wanted bool")
        self.save_unfull_chunk = save_unfull_chunk

    @property
    def chunk_size(self) -> int:
        """Tokens of a full chunk."""
        return self.space.chunk_size

    def _hidden(self, mask: Any, n_tokens: int) -> int:
        hidden = super()._hidden(mask, n_tokens)
        if hidden % self.chunk_size:
            raise CompatError(
                f"mask: got {hidden} False, wanted a multiple of the chunk size ({self.chunk_size}); "
                "a chunk is there as a whole or not at all"
            )
        return hidden

    def _derive(self, ids: _Ids, identity: tuple[ExtraKey, ...], hidden: int) -> list[_Row]:
        digests = chunk_digests(self.space, ids, identity, partial_tail=self.save_unfull_chunk)
        starts = range(0, len(digests) * self.chunk_size, self.chunk_size)
        rows = zip(starts, digests, strict=True)
        return [(start, min(start + self.chunk_size, len(ids)), key) for start, key in rows if start >= hidden]

    def _place(self, pairs: list[tuple[bytes, int]]) -> list[_Row]:
        if any(n != self.chunk_size for _, n in pairs[:-1]) or any(n > self.chunk_size for _, n in pairs[-1:]):
            raise CompatError(
                f"offsets: wanted {self.chunk_size} for each chunk but the last, which may be shorter; "
                "hand in all of the prompt's chunks, derived in this space"
            )
        starts = range(0, len(pairs) * self.chunk_size, self.chunk_size)
        return [(start, start + n, key) for start, (key, n) in zip(starts, pairs, strict=True)]


class SegmentTokenDatabase(_TokenDatabase):
    """Segments between separators, each keyed by itself as by `keying.segment_key`, wherever it stands.

    Separators are looked for from the left and do not overlap; they belong to no segment, and neighbours leave no empty
    one. A prompt is split where its ids say so, also inside a picture; each segment then carries the picture at its own
    distance.
    ``start`` is not in a key: a reader that cannot re-rotate treats a value stored for another start as a miss.

    Args:
        space: what the deployment shares.
        separator: the separator's token ids, without the tokenizer's start token; not empty.

    Raises:
        CompatError: an empty separator.
        CompatTypeError: not a `KeySpace`.
        keying.TokenError: no token ids.
    """

    __slots__ = ("sep_tokens",)

    def __init__(self, space: KeySpace, *, separator: Any) -> None:
        super().__init__(space)
        self.sep_tokens = unpack_tokens(pack_tokens(separator))
        if not self.sep_tokens:
            raise CompatError("separator: is empty; give the token ids that stand between segments")

    def _hidden(self, mask: Any, n_tokens: int) -> int:
        hidden = super()._hidden(mask, n_tokens)
        if n_tokens and hidden == n_tokens:
            raise CompatError("mask: leaves out the whole prompt; do not ask where nothing is wanted")
        return hidden

    def _derive(self, ids: _Ids, identity: tuple[ExtraKey, ...], hidden: int) -> list[_Row]:
        ranges = ((start, stop) for start, stop in self._segments(ids) if start < stop and start >= hidden)
        keys = segment_keys(self.space, ids, ranges, identity)
        return [(key.start, key.stop, key.digest) for key in keys]

    def _segments(self, ids: _Ids) -> Iterator[tuple[int, int]]:
        """The ranges between separators, empty ones too."""
        separator = self.sep_tokens
        start = place = 0
        for _ in range(ids.count(separator[0])):
            place = ids.index(separator[0], place)
            if place >= start and ids[place : place + len(separator)] == separator:
                yield start, place
                start = place + len(separator)
            place += 1
        yield start, len(ids)

    def _place(self, pairs: list[tuple[bytes, int]]) -> list[_Row]:
        raise CompatError(
            f"hashes: got {len(pairs)} with lengths, which do not say where segments stand, as separators are dropped; "
            "hand in the tokens, since a value is only good for its own start"
        )


def _extra_keys(extra_keys: Iterable[ExtraKey]) -> tuple[ExtraKey, ...]:
    """All of them at once: an iterator would be empty for the second segment."""
    try:
        return tuple(extra_keys)
    except TypeError:
        raise CompatTypeError(
            f"extra_keys: got {type(extra_keys).__name__}, wanted a sequence of extra keys, () for none"
        ) from None


def _tags(request_configs: Mapping[str, Any] | None) -> Iterator[Tag]:
    """The tags of a request. Only text has one reading: v1 names print 1, True and "1" alike."""
    if request_configs is None:
        return
    if not isinstance(request_configs, Mapping):
        raise CompatTypeError(f"request_configs: got {type(request_configs).__name__}, wanted a mapping or None")
    for name, value in request_configs.items():
        if not isinstance(name, str):
            raise CompatTypeError(f"request_configs: got a name of type {type(name).__name__}, wanted str")
        if not name.startswith(TAG_PREFIX):
            continue
        if not isinstance(value, str):
            raise CompatTypeError(
                f"request_configs: a tag's value is {type(value).__name__}, wanted str; write it as text, one way"
            )
        try:
            encoded = value.encode()
        except UnicodeEncodeError:
            raise CompatError("request_configs: a tag's value has a lone surrogate, which has no UTF-8 form") from None
        yield Tag(name, encoded)


def _false_prefix(mask: Any, n_tokens: int) -> int:
    """How many False a mask begins with, where it has no other."""
    values = mask.tolist() if hasattr(mask, "tolist") else mask
    if not isinstance(values, list | tuple):
        raise CompatTypeError(f"mask: got {type(mask).__name__}, wanted one bool for each token")
    if not set(map(type, values)) <= {bool}:
        raise CompatTypeError("mask: has elements that are no bool; wanted one bool for each token, in one dimension")
    if len(values) != n_tokens:
        raise CompatError(f"mask: got {len(values)} elements for {n_tokens} tokens, wanted one for each")
    hidden = values.count(False)
    if any(values[:hidden]):
        raise CompatError("mask: has a False after a True; wanted False over a prefix and True after it")
    return hidden


def _checked_digest(value: object, field: str) -> bytes:
    """A schema-2 digest; an integer or eight bytes is a v1 hash, whose identity nobody knows."""
    if not isinstance(value, bytes):
        raise CompatTypeError(f"{field}: got {type(value).__name__}, wanted {DIGEST_SIZE} bytes; {_NO_V1_HASHES}")
    if len(value) != DIGEST_SIZE:
        raise CompatError(f"{field}: got {len(value)} bytes, wanted {DIGEST_SIZE}; {_NO_V1_HASHES}")
    return value


def _pairs(hashes: Any, offsets: Any) -> list[tuple[bytes, int]]:
    """Digests with the numbers of their tokens, as many of each."""
    for field, values in (("hashes", hashes), ("offsets", offsets)):
        if not isinstance(values, list | tuple):
            raise CompatTypeError(f"{field}: got {type(values).__name__}, wanted a list or tuple")
    if len(hashes) != len(offsets):
        raise CompatError(f"hashes, offsets: got {len(hashes)} and {len(offsets)}, wanted as many of each")
    for place, (digest, n) in enumerate(zip(hashes, offsets, strict=True)):
        _checked_digest(digest, f"hashes[{place}]")
        if isinstance(n, bool) or not isinstance(n, int):
            raise CompatTypeError(f"offsets[{place}]: got {type(n).__name__}, wanted int")
        if n < 1:
            raise CompatError(f"offsets[{place}]: got {n}, wanted at least one token")
    return list(zip(hashes, offsets, strict=True))
