"""`RequestTracker`: the cache's side of one engine request, from admission to end, without an engine and without I/O.

Theory of operation
-------------------
A tracker holds the one `ChunkKeyChain` of its request; lookup, load, save and events take their keys from it, so they
cannot disagree. It is told what the engine does, and says what to ask of the cache. What it wants done without waiting
for an answer (leases given back, sessions ended) it puts aside for `take_calls`.

    told by the engine          kept                                   asked of the cache
    extend, add, truncate       tokens and extra keys, in the chain
    plan_lookup ... found       the hit, its lease, until when          lookup
    begin_load, decline         the load, whose outcome is open         retrieve; release of what is not loaded
    load_ended                  whether the request may load again      release of the rest
    compute                     tokens that have KV
    take_save                   chunks handed out for saving            store
    preempt                     tokens and saves stay, KV is gone       release
    give_up, end                nothing                                 end of the session, and with it of its leases

Rules that the state machine in the tests checks on every path:

* A save names whole chunks whose KV the engine computed in this request or loaded, each once.
* Nothing that may rest on a failed load is saved. While a load's outcome is open, saves are held back, or handed out
  with the load's name so that whoever copies can drop them (`SavePlan.after_load`); after a failure they are due again.
* A load never touches tokens that the engine has, and leaves at least one token to compute.
* One failed load, and the request computes for itself: no endless circle of hit and failure.
* After `end` and `give_up` no lease and no session is left.

Each step costs O(new tokens). Time is an argument. A tracker belongs to one thread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from keying import ChunkKeyChain, KeyingError, UncacheableRequest
from keying.engines import UncacheableReason
from protocol_v2.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from keying import ChunkKey, ExtraKey, KeySpace, KeysView

MISS_SECONDS: Final = 1.0
"""How long a miss (or no answer) stands before the same tokens are looked up again: engines ask for a waiting request
on every step."""

LEASE_SHARE: Final = 0.5
"""Part of a lease's time for which a hit stands; the rest is for loading it."""


class Phase(enum.Enum):
    """Where a request is."""

    LIVE = "live"
    GIVEN_UP = "given up"
    """The engine's request goes on, the cache has nothing to do with it."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Release:
    """Give back the chunks [first, first + count) of a lease; all from `first` on where count is None."""

    lease: bytes
    first: int
    count: int | None


@dataclass(frozen=True, slots=True)
class EndSession:
    """End a session, and with it whatever leases it has."""

    session: str


Call: TypeAlias = Release | EndSession


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """What to look up.

    Attributes:
        session: to look it up under.
        keys: of all full chunks, from the first on.
    """

    session: str
    keys: Sequence[ChunkKey] = field(repr=False)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load.

    Attributes:
        name: of this load, unlike that of any other load of the process.
        lease: names the chunks.
        first: index of the first chunk to retrieve.
        stop: index after the last.
        start_token: first position to write; what lies before in the first chunk is the engine's already.
        stop_token: position after the last to write.
        keys: of the chunks [0, stop).
    """

    name: str
    lease: bytes
    first: int
    stop: int
    start_token: int
    stop_token: int
    keys: Sequence[ChunkKey] = field(repr=False)

    @property
    def count(self) -> int:
        """Chunks to retrieve."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What to save.

    Attributes:
        keys: of all chunks from the first on, as far as `stop`.
        first: index of the first chunk to save.
        stop: index after the last.
        after_load: name of a load whose outcome is open: if it failed, drop this save. None where there is none.
    """

    keys: Sequence[ChunkKey] = field(repr=False)
    first: int
    stop: int
    after_load: str | None = None


@dataclass(slots=True)
class _Hit:
    """What a lookup found, for a number of keys, until when it stands."""

    n_keys: int
    chunks: int
    lease: bytes | None
    until: float


class RequestTracker:
    """The cache's side of one engine request; see the head of the module.

    Args:
        space: what the deployment shares.
        extra_keys: known at admission; `add` takes more.
        name: of the request, unique among those that stand in this process; session ids begin with it.

    Raises:
        KeyingError: extra keys that do not go together.
    """

    def __init__(self, space: KeySpace, extra_keys: Iterable[ExtraKey] = (), *, name: str) -> None:
        self.name = name
        self.phase = Phase.LIVE
        self.reason: str | None = None
        """Why it was given up, a word for counters; None where it was not."""
        self._chain = ChunkKeyChain(space, extra_keys)
        self._chunk_size = space.chunk_size
        self._computed = 0
        self._saved = 0
        self._may_load = True
        self._may_save = True
        self._hit: _Hit | None = None
        self._load: LoadPlan | None = None
        self._n_loads = 0
        self._n_sessions = 1
        self._session_used = False
        self._calls: list[Call] = []

    # ---- what there is

    @property
    def keys(self) -> KeysView:
        """Keys of the full chunks so far."""
        return self._chain.keys

    @property
    def n_tokens(self) -> int:
        """Tokens known."""
        return self._chain.n_tokens

    @property
    def computed(self) -> int:
        """Tokens that have KV, those of the step under way included."""
        return self._computed

    @property
    def saved(self) -> int:
        """Leading chunks that need no saving: handed out for it, or found in the cache."""
        return self._saved

    @property
    def load(self) -> LoadPlan | None:
        """The load whose outcome is open."""
        return self._load

    @property
    def leased(self) -> bool:
        """Whether a lease is held."""
        return self._hit is not None and self._hit.lease is not None

    @property
    def session(self) -> str:
        """The session that the request stands for now."""
        return f"{self.name}.{self._n_sessions}"

    def __repr__(self) -> str:
        return (
            f"<RequestTracker {self.name} {self.phase.value}: {self.n_tokens} tokens, {self._computed} computed, "
            f"{self._saved} chunks saved>"
        )

    def take_calls(self) -> list[Call]:
        """Calls to carry out, in order, without waiting for their answers."""
        calls, self._calls = self._calls, []
        return calls

    # ---- tokens

    def extend(self, tokens: Any) -> None:
        """New tokens: more of the prompt, or generated ones.

        Raises:
            KeyingError: tokens that `keying` refuses; nothing has changed.
        """
        self._check_live()
        self._chain.extend(tokens)

    def add(self, extra_key: ExtraKey) -> None:
        """An extra key that was not known at admission; one that is known changes nothing.

        Raises:
            LateExtraKeyError: it would change keys that were handed out.
            KeyingError: it does not go with the others.
        """
        self._check_live()
        self._chain.add(extra_key)

    def truncate(self, n_tokens: int) -> None:
        """The engine took tokens back (a streaming session drops its last sampled one).

        Raises:
            KeyingError: more than there are, or negative.
        """
        self._check_live()
        before = len(self.keys)
        self._chain.truncate(n_tokens)
        self._computed = min(self._computed, n_tokens)
        if len(self.keys) == before:
            return
        # keys are gone, and others will take their indexes: a session must not stand for both
        self._saved = min(self._saved, len(self.keys))
        self._drop_load()
        self._end_session()

    # ---- lookup

    def plan_lookup(self, now: float) -> LookupPlan | None:
        """What to look up; None where there is nothing to find, or the last answer still stands.

        Args:
            now: seconds, monotonic.
        """
        n_keys = len(self.keys)
        if self.phase is not Phase.LIVE or not self._may_load or not n_keys or self.n_tokens < 2:
            return None
        if self._load is not None:  # its lease must stay
            return None
        if self._hit is not None and self._hit.n_keys == n_keys and now < self._hit.until:
            return None
        self._session_used = True  # whether or not an answer comes: the server may have heard it
        return LookupPlan(self.session, self.keys)

    def found(self, chunks: int, lease: bytes | None, lease_seconds: float, now: float) -> None:
        """The answer to what was looked up last.

        Args:
            chunks: leading chunks that are there, 0 for a miss or where there was no answer.
            lease: names them; None without a hit.
            lease_seconds: how long it lasts.
            now: seconds, monotonic.

        Raises:
            LocalProtocolError: more chunks than there are keys, or a hit without a lease.
        """
        self._check_live()
        if not 0 <= chunks <= len(self.keys):
            raise LocalProtocolError(f"hit: got {chunks} chunks, wanted at most the {len(self.keys)} looked up")
        if chunks and lease is None:
            raise LocalProtocolError("hit: got chunks without a lease, so they may go before they are loaded")
        self._drop_hit()
        stands = lease_seconds * LEASE_SHARE if chunks else MISS_SECONDS
        self._hit = _Hit(len(self.keys), chunks, lease, now + stands)
        self._saved = max(self._saved, chunks)

    def loadable(self, computed: int) -> int:
        """Tokens beyond the engine's own that can be loaded, at least one token being left to compute.

        Args:
            computed: leading tokens that the engine has.
        """
        if self._hit is None or self._load is not None or not self._may_load:
            return 0
        return max(0, min(self._hit.chunks * self._chunk_size, self.n_tokens - 1) - computed)

    # ---- load

    def begin_load(self, computed: int, n_tokens: int) -> LoadPlan:
        """The engine made room for tokens to load.

        Args:
            computed: leading tokens that the engine has.
            n_tokens: tokens to load after them, at least 1 and at most `loadable`.

        Raises:
            LocalProtocolError: more than can be loaded.
        """
        self._check_live()
        hit = self._hit
        if hit is None or hit.lease is None or not 0 < n_tokens <= self.loadable(computed):
            raise LocalProtocolError(f"load: got {n_tokens} tokens, wanted 1 to {self.loadable(computed)}")
        stop_token = computed + n_tokens
        first, stop = computed // self._chunk_size, -(-stop_token // self._chunk_size)
        self._n_loads += 1
        self._load = LoadPlan(
            f"{self.name}:{self._n_loads}", hit.lease, first, stop, computed, stop_token, self.keys[:stop]
        )
        if first:
            self._calls.append(Release(hit.lease, 0, first))
        if stop < hit.chunks:
            self._calls.append(Release(hit.lease, stop, None))
        self._computed = stop_token
        return self._load

    def decline(self) -> None:
        """The engine was offered a hit and does not load it."""
        self._drop_hit()

    def load_ended(self, name: str, *, failed: bool) -> bool:
        """The outcome of a load, of every part of the engine that took part in it.

        Args:
            name: of the load.
            failed: not everything was delivered.

        Returns:
            Whether it was this request's load under way; an outcome that comes after a preemption or the end is not.
        """
        load = self._load
        if load is None or load.name != name:
            return False
        self._load = None
        if failed:
            self._may_load = False
            self._saved = min(self._saved, load.first)
            self._computed = min(self._computed, load.start_token)
        self._drop_hit()
        return True

    # ---- compute and save

    def compute(self, n_tokens: int, *, own: bool = True) -> None:
        """The engine has, or computes in this step, the KV of the first `n_tokens` tokens.

        Args:
            n_tokens: may be more than the tokens known (sampled, but not told yet), and fewer than before
                (tokens that are computed again).
            own: False where KV comes from a cache of the engine's own that is not to be trusted: nothing that rests on
                it is saved, until the engine starts from nothing.
        """
        if self.phase is not Phase.LIVE:
            return
        self._computed = n_tokens
        self._may_save = self._may_save and own

    def take_save(self, *, hold: bool, align: int = 1) -> SavePlan | None:
        """Chunks that became whole and computed, each once; None where there are none.

        Args:
            align: tokens that the engine keeps together: a chunk that ends inside such a block waits until it is full.
            hold: while a load's outcome is open hand out nothing; False: hand out with the load's name.
        """
        stop = min(self._computed // align * align, self.n_tokens) // self._chunk_size
        if self.phase is not Phase.LIVE or not self._may_save or stop <= self._saved:
            return None
        if self._load is not None and hold:
            return None
        first, self._saved = self._saved, stop
        return SavePlan(self.keys[:stop], first, stop, None if self._load is None else self._load.name)

    # ---- ends

    def preempt(self) -> None:
        """The engine dropped the KV and will start again, with the tokens that there are now."""
        if self.phase is not Phase.LIVE:
            return
        self._computed = 0
        self._may_save = True
        self._drop_load()
        self._drop_hit()

    def give_up(self, reason: str) -> None:
        """From here on the engine's request goes on without the cache. Idempotent.

        Args:
            reason: a word for counters.
        """
        if self.phase is Phase.LIVE:
            self._finish(Phase.GIVEN_UP)
            self.reason = reason

    def end(self) -> None:
        """The engine's request is over, for whatever reason, in whatever state. Idempotent."""
        if self.phase is Phase.LIVE:
            self._finish(Phase.ENDED)
        self.phase = Phase.ENDED

    # ---- inside

    def _finish(self, phase: Phase) -> None:
        self._load = None
        self._end_session()
        self.phase = phase

    def _drop_load(self) -> None:
        """Its outcome will not be heard: what was handed out in doubt is due again."""
        if self._load is not None:
            self._saved = min(self._saved, self._load.first)
            self._load = None

    def _drop_hit(self) -> None:
        hit, self._hit = self._hit, None
        if hit is not None and hit.lease is not None:
            self._calls.append(Release(hit.lease, 0, None))

    def _end_session(self) -> None:
        self._hit = None  # its lease ends with the session
        if self._session_used:
            self._calls.append(EndSession(self.session))
            self._session_used = False
            self._n_sessions += 1

    def _check_live(self) -> None:
        if self.phase is not Phase.LIVE:
            raise LocalProtocolError(f"request {self.name}: is {self.phase.value}, so the cache has no part in it")


def reason_of(error: KeyingError) -> str:
    """The word for counters of why a request has no keys."""
    return str(error.reason) if isinstance(error, UncacheableRequest) else UncacheableReason.CONFLICTING_KEYS.value
