"""`LoadedAdapters`: whether what an adapter's files say now is what the engine computes with.

Files can be replaced under a running engine, which keeps what it loaded, or loads again at a moment of its own. A key
says what the files hold, so it is right only while the engine has loaded just that. This module keeps, for each of the
engine's slots (the number under which it keeps an adapter), the revision at its first use, and fails closed:

    the slot is used for the first time       its revision is noted
    the same revision again                   fine
    another revision, the request reloads     noted; requests that run with the slot are to be given up, and others that
                                              do not reload are uncacheable until the engine has come to this one
    another revision without a reload         nobody knows what is loaded: uncacheable, until a reload

An engine's own prefix cache that knows adapters by name and path serves KV of replaced weights; what rests on such KV
must not be saved (`is_stale`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keying import UncacheableRequest
from keying.engines import UncacheableReason

if TYPE_CHECKING:
    from keying.engines import AdapterRevision, AdapterSource


@dataclass(slots=True)
class _Slot:
    revision: str
    doubtful: bool = False


@dataclass(slots=True)
class LoadedAdapters:
    """See the head of the module. Belongs to the engine's scheduler thread; grows with adapters, not with requests.

    Args:
        revisions: says what an adapter's files hold.
    """

    revisions: AdapterRevision
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _seen: dict[tuple[str, str | None], set[str]] = field(default_factory=dict)

    def use(self, source: AdapterSource, slot: int, *, reloads: bool) -> tuple[str | None, bool]:
        """A request comes with an adapter.

        Args:
            source: the adapter as the engine names it.
            slot: under which the engine keeps it.
            reloads: the request makes the engine load it again.

        Returns:
            Its revision, or None where that cannot be told; and whether requests that run with the slot must be given
            up, because what they compute changes now.

        Raises:
            UncacheableRequest: what the engine has loaded cannot be told.
        """
        revision = self.revisions(source)
        if revision is None:
            return None, False
        known = self._slots.setdefault(slot, _Slot(revision))
        replaced = known.revision != revision
        known.doubtful = known.doubtful or replaced
        if reloads:
            known.revision = revision
        self._seen.setdefault((source.name, source.path), set()).add(revision)
        if known.doubtful and not reloads:
            raise UncacheableRequest(
                UncacheableReason.ADAPTER_CHANGED,
                "the adapter's files are not what they were when the engine first used it, and nothing says what it "
                "has loaded; give each version a folder of its own and load it as another adapter",
            )
        return revision, replaced

    def waits(self, slot: int, revision: str) -> bool:
        """Whether the engine has yet to load this revision into a slot."""
        known = self._slots.get(slot)
        return known is not None and known.doubtful and known.revision == revision

    def loaded(self, slot: int) -> None:
        """The engine loads what the slot was last noted with."""
        self._slots[slot].doubtful = False

    def is_current(self, source: AdapterSource, revision: str) -> bool:
        """Whether the files still hold what a key says; costs a look at their times and sizes."""
        try:
            return self.revisions(source) == revision
        except UncacheableRequest:
            return False

    def is_stale(self, name: str, path: str | None) -> bool:
        """Whether KV that the engine cached under a name and a path may be of other weights than the present ones."""
        return len(self._seen.get((name, path), ())) > 1
