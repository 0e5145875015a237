"""`ChunkKeyChain`: keys of a sequence that grows, shrinks and meets extra keys on the way."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from keying.chunks import ChunkKey, checked_space, chunk_digest, derive_run, make_keys
from keying.encoding import checked_int
from keying.errors import LateExtraKeyError
from keying.extra_keys import ExtraKey
from keying.parts import PartsCursor, PartsIndex, first_position
from keying.space import KeySpace
from keying.tokens import TOKEN_BYTES, pack_tokens


class KeysView(Sequence[ChunkKey]):
    """A live, read-only view of the keys of a chain's full chunks."""

    __slots__ = ("_keys",)

    def __init__(self, keys: list[ChunkKey]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, place: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, place: slice) -> list[ChunkKey]: ...
    def __getitem__(self, place: int | slice) -> ChunkKey | list[ChunkKey]:
        return self._keys[place]

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._keys)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, KeysView):
            return self._keys == other._keys
        return self._keys == list(other) if isinstance(other, list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it is live, so it has no hash

    def __repr__(self) -> str:
        return f"<view of {len(self._keys)} chunk keys>"


class ChunkKeyChain:
    """The keys of one sequence, taken as its tokens come: prefill steps, decode, resume after preemption.

    The keys equal those of `chunk_keys` over all tokens, for every way of splitting; each step costs O(new tokens).
    Every method either does its work or raises and changes nothing. A chain belongs to one request: calls from several
    threads need the caller's lock.

    Args:
        space: what the deployment shares.
        extra_keys: those known at the start; more come with `add`.

    Raises:
        KeyingError: as `chunk_keys`.

    Source: docs/spec/key-schema-2.md, "Incremental derivation".
    """

    __slots__ = ("_cursor", "_index", "_keys", "_next_full", "_packed", "_space", "_tails", "_view")

    def __init__(self, space: KeySpace, extra_keys: Iterable[ExtraKey] = ()) -> None:
        self._space = checked_space(space)
        self._index = PartsIndex(extra_keys)
        self._cursor = PartsCursor(self._index)
        self._keys: list[ChunkKey] = []
        self._view = KeysView(self._keys)
        self._packed = bytearray()
        self._next_full = space.chunk_size * TOKEN_BYTES  # bytes at which the next chunk is full
        self._tails: list[int] = []  # stops of partial tails handed out, rising: they too bound what `add` may change

    @property
    def space(self) -> KeySpace:
        """The space that the chain was made with."""
        return self._space

    @property
    def keys(self) -> KeysView:
        """The keys of the full chunks so far: a view that grows and shrinks with the chain."""
        return self._view

    @property
    def n_tokens(self) -> int:
        """Tokens held, full chunks and tail."""
        return len(self._packed) // TOKEN_BYTES

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<ChunkKeyChain of {self.n_tokens} tokens, {len(self._keys)} keys>"

    def extend(self, tokens: Any) -> list[ChunkKey]:
        """Append tokens.

        Args:
            tokens: n ids in [0, 2**32), as for `chunk_keys`.

        Returns:
            The keys of the chunks that these tokens completed.

        Raises:
            TokenError: as `chunk_keys`; the chain is as before.
        """
        packed = pack_tokens(tokens)
        if len(self._packed) + len(packed) < self._next_full:
            self._packed += packed
            return []
        chunk_size = self._space.chunk_size
        width = chunk_size * TOKEN_BYTES
        done = self._next_full - width
        data = b"".join((self._packed[done:], packed))
        whole = len(data) // width * width
        cursor = self._cursor.copy()
        first = done // TOKEN_BYTES
        digests, parts_of = derive_run(self._parent(), memoryview(data)[:whole], first, chunk_size, cursor)
        fresh = make_keys(digests, parts_of, first, chunk_size)
        self._packed += packed
        self._keys += fresh
        self._cursor = cursor
        self._next_full += whole
        return fresh

    def add(self, extra_key: ExtraKey) -> None:
        """Take an extra key that was not known at the start.

        Args:
            extra_key: its range starts at or after the ``stop`` of the last key handed out, partial tails included. One
                that is equal to a key already held changes nothing.

        Raises:
            LateExtraKeyError: it would change a key that was handed out; truncate first, or start another chain.
            ExtraKeyError: as `chunk_keys`.
        """
        if isinstance(extra_key, ExtraKey) and extra_key in self._index:
            return
        handed_out = max(self._keys[-1].stop if self._keys else 0, self._tails[-1] if self._tails else 0)
        if isinstance(extra_key, ExtraKey) and first_position(extra_key) < handed_out:
            raise LateExtraKeyError(
                f"extra key: {type(extra_key).__name__} starts at {first_position(extra_key)}, but keys up to position "
                f"{handed_out} were handed out; add it before, or truncate the chain"
            )
        self._index.add(extra_key)
        self._cursor = PartsCursor(self._index)

    def truncate(self, n_tokens: int) -> None:
        """Take tokens back, and the keys with them; then `extend` gives what it would have given without them.

        Extra keys stay: they describe positions of the prompt, not tokens that were seen.

        Args:
            n_tokens: how many to keep, ``0 <= n_tokens <= self.n_tokens``.

        Raises:
            KeyingError: more than there are, or negative.
            KeyingTypeError: not an int.
        """
        keep = checked_int(n_tokens, "n_tokens", 0, self.n_tokens)
        if keep == self.n_tokens:
            return
        chunk_size = self._space.chunk_size
        del self._packed[keep * TOKEN_BYTES :]
        if len(self._keys) > keep // chunk_size:
            del self._keys[keep // chunk_size :]
            self._next_full = (len(self._keys) + 1) * chunk_size * TOKEN_BYTES
            self._cursor = PartsCursor(self._index)
        while self._tails and self._tails[-1] > keep:
            self._tails.pop()

    def partial_tail(self) -> ChunkKey | None:
        """The key of the tokens after the last full chunk, or None if there are none."""
        chunk_size = self._space.chunk_size
        start = len(self._keys) * chunk_size
        stop = self.n_tokens
        if start == stop:
            return None
        parts = self._cursor.copy().parts(start, stop)
        tail = bytes(self._packed[start * TOKEN_BYTES :])
        if not self._tails or self._tails[-1] < stop:
            self._tails.append(stop)
        return ChunkKey(chunk_digest(self._parent(), tail, parts), start, stop, parts)

    def _parent(self) -> bytes:
        return self._keys[-1].digest if self._keys else self._space.root
