"""Retire entries of a folder by schema, age, model or format. What cannot be named, or is ambiguous, stays.

A purge keeps no state: it lists, decides by name and age, and unlinks one file after another. An interrupted one has
done a part of the work, and running it again does the rest. Descriptions, locks, temporary and quarantined files are
never touched. Names of schema 2 and later go only while the purge owns the folder as a server would.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from compat.audit import Holding, Identity, StoredName, described_models, folder_names, identify
from compat.errors import CompatError
from protocol_v2.tiers.layout import schema_folders


class PurgeRefusedError(CompatError):
    """A purge that would not be safe, or that asks for nothing."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """What is to go: entries for which all that is given holds.

    Args:
        schema: storage schema, 1 for LMCache 0.5.x; None for any.
        older_than: seconds since the last modification of a file, or the last use of a key; None for any age.
        models: models; empty for any. A name that several models may have written goes if all of them are given.
        format: which writer, as the audit calls it; None for any.

    Raises:
        PurgeRefusedError: nothing is given, or a negative age.
    """

    schema: int | None = None
    older_than: float | None = None
    models: frozenset[str] = frozenset()
    format: str | None = None

    def __post_init__(self) -> None:
        if self.schema is None and self.older_than is None and not self.models and self.format is None:
            raise PurgeRefusedError("purge: got no criterion; give a schema, an age, a model or a format")
        if self.older_than is not None and not self.older_than >= 0:
            raise PurgeRefusedError("purge: got a negative age; wanted seconds, at least 0")


class Verdict(StrEnum):
    """Why a name goes or stays."""

    RETIRED = "retired"
    NOT_ASKED = "not asked for"
    CHANGED = "changed meanwhile"
    """Judged to go, and found younger, or another thing, when it was to be removed."""
    FAILED = "could not be removed"
    AGE_UNKNOWN = "age unknown"
    AMBIGUOUS = "ambiguous model"
    MODEL_UNKNOWN = "model unknown"
    UNRECOGNISED = "unrecognised"
    NO_ENTRY = "not an entry"


def verdict(stored: StoredName, what: Identity, criteria: Criteria, now: float) -> Verdict:
    """Whether a file goes. now: seconds since the epoch."""
    if what.holding is Holding.UNRECOGNISED:
        return Verdict.UNRECOGNISED
    if what.holding is not Holding.ENTRY:
        return Verdict.NO_ENTRY
    if criteria.schema not in {None, what.schema} or criteria.format not in {None, what.format}:
        return Verdict.NOT_ASKED
    if criteria.older_than is not None and stored.modified is not None:
        if now - stored.modified <= criteria.older_than:
            return Verdict.NOT_ASKED
    elif criteria.older_than is not None:
        return Verdict.AGE_UNKNOWN
    if not criteria.models or (what.complete and what.models and what.models <= criteria.models):
        return Verdict.RETIRED
    if not what.models:
        return Verdict.MODEL_UNKNOWN
    # an incomplete list may hide a model that was asked for, or one that was not
    undecided = not what.complete or bool(what.models & criteria.models)
    return Verdict.AMBIGUOUS if undecided else Verdict.NOT_ASKED


def purge_folder(
    folder: Path,
    criteria: Criteria,
    *,
    dry_run: bool = True,
    now: float | None = None,
    on_error: Callable[[OSError], None] | None = None,
) -> Iterator[tuple[StoredName, Verdict]]:
    """List a folder and remove what is to go, file by file, as the iterator is advanced.

    Args:
        folder: the store's.
        criteria: what goes.
        dry_run: say what would go, and touch nothing.
        now: seconds since the epoch; None for the clock.
        on_error: told of each file that cannot be removed, and of what is below and cannot be looked at: it stays, and
            the purge goes on. None raises it.

    Yields:
        Each file and what became, or would become, of it: a retired one is gone by then.

    Raises:
        PurgeRefusedError: a live server owns the folder, and names of its schema may go.
        OSError: the folder itself cannot be listed.
    """
    with contextlib.ExitStack() as held:
        if not dry_run:
            # those that exist now: an entry of a schema that appears later is not owned, and stays
            owned = {int(top.removeprefix("xk")) for top in schema_folders(folder)} - {1}
            if criteria.schema is not None:
                owned &= {criteria.schema}
            for schema in sorted(owned):
                held.enter_context(_owning(folder, schema))
        models = described_models(folder)
        moment = time.time() if now is None else now
        for stored in folder_names(folder, on_error=on_error):
            what = identify(stored, models)
            outcome = verdict(stored, what, criteria, moment)
            if outcome is Verdict.RETIRED and not dry_run:
                ours = what.schema != 1
                if ours and int(stored.name.split("/")[0].removeprefix("xk")) not in owned:
                    yield stored, Verdict.NOT_ASKED
                    continue
                try:
                    gone = remove_file(folder, stored, criteria, moment, with_folder=ours)
                except OSError as error:
                    if on_error is None:
                        raise
                    on_error(error)
                    yield stored, Verdict.FAILED
                    continue
                if not gone:
                    yield stored, Verdict.CHANGED
                    continue
            yield stored, outcome


def remove_file(folder: Path, stored: StoredName, criteria: Criteria, now: float, *, with_folder: bool = False) -> bool:
    """Remove a file that was judged, if it is still a file, still in that folder, and still as old as is asked for.

    A folder below the store's that has become a link since is not followed: what is behind it was not judged.

    Args:
        folder: the store's.
        stored: the file, as it was listed.
        criteria: what it was judged by.
        now: seconds since the epoch.
        with_folder: its folder goes with it, if nothing else is in there.

    Returns:
        Whether it is gone now, whoever removed it.

    Raises:
        OSError: it cannot be removed.
    """
    above, _, name = stored.name.rpartition("/")
    try:
        with _opened(folder, above) as place:
            facts = os.stat(name, dir_fd=place, follow_symlinks=False)
            if not stat.S_ISREG(facts.st_mode):
                return False
            if criteria.older_than is not None and now - facts.st_mtime <= criteria.older_than:
                return False
            os.unlink(name, dir_fd=place)
    except FileNotFoundError:  # somebody was faster: it is gone, as was asked
        pass
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            return False
        error.filename = folder / stored.name
        raise
    if with_folder:  # a key's folder goes with its last shard; if it is not empty, or cannot go, it stays
        above, _, name = above.rpartition("/")
        with contextlib.suppress(OSError), _opened(folder, above) as place:
            os.rmdir(name, dir_fd=place)
    return True


@contextlib.contextmanager
def _opened(folder: Path, below: str) -> Iterator[int]:
    """A folder below the store's, reached without following a link."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in filter(None, below.split("/")):
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            os.close(place)
            place = deeper
        yield place
    finally:
        os.close(place)


@contextlib.contextmanager
def _owning(folder: Path, schema: int) -> Iterator[None]:
    """Hold a schema's lock, as its server would."""
    name = f"xk{schema}.lock"
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PurgeRefusedError(
                f"purge: a live server owns the folder ({name}); stop it, or purge schema 1 only"
            ) from None
        yield
    finally:
        os.close(descriptor)
