"""What a store holds, by name alone: schema, format, model, salted or not, age, bytes. No value is ever opened.

    entry          a name of schema 1 (`compat.v1.recognise`) or of schema 2 and later (`xk<n>/...`)
    description    a space's space.json; it gives the model of the schema-2 entries beside it, if its root agrees
    internal       lock, temporary and quarantined files of a disk tier
    unrecognised   everything else, links and special files included

Entries that a v2 server keeps for v1 clients are schema 2, and told apart by their root: format `xk2, of v1 clients`.

Which generation of v1 producers (raw, int16, sha31) derived a key, no name says. Below `xk<n>` and `xk<n>.*` nothing is
ever taken for a v1 name, whatever it is called.

Source: docs/spec/v1-formats.md, "Storage names"; docs/spec/storage-2.md.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from compat.v1 import AmbiguousName, StoreKind, recognise
from compat.v1.front_storage import is_namespace_root
from keying import KeyingError
from protocol_v2.storage.descriptions import MAX_DESCRIPTION_BYTES, parse_description
from protocol_v2.storage.errors import StorageValueError
from protocol_v2.storage.names import ROOT_PREFIX_BYTES, SPACE_FILE, parse_any_schema

_OURS: Final = re.compile(r"xk(0|[1-9][0-9]{0,4})(?:\.[^/]*)?(?:/|\Z)", re.ASCII)
DESCRIPTION_NAME: Final = re.compile(rf"xk(0|[1-9][0-9]{{0,4}})/([0-9a-f]{{32}})/{re.escape(SPACE_FILE)}", re.ASCII)
"""Schema and root prefix of a description's name."""


class Holding(StrEnum):
    """What sort of thing a name stands for."""

    ENTRY = "entry"
    DESCRIPTION = "description"
    INTERNAL = "internal"
    UNRECOGNISED = "unrecognised"


@dataclass(frozen=True, slots=True)
class StoredName:
    """One file or key, as a listing gives it.

    Attributes:
        name: path below the store's folder, with ``/``; or the key.
        n_bytes: its size.
        modified: seconds since the epoch: last modification of a file, last use of a key; None where nobody knows.
        regular: whether it is a file, not a link or special file; or a key with a string.
    """

    name: str
    n_bytes: int
    modified: float | None
    regular: bool = True


@dataclass(frozen=True, slots=True)
class Identity:
    """What a name says.

    Attributes:
        holding: what sort of thing.
        schema: storage schema; None where the name has none.
        format: which v1 writer, or `xk<n>`; None for what is no entry.
        models: every model that it may belong to; empty where none is known.
        complete: whether these are all.
        likely_model: the model to show; None where none is known.
        salted: whether a v1 tenant's salt is in the name; None where the name does not say.
    """

    holding: Holding
    schema: int | None = None
    format: str | None = None
    models: frozenset[str] = frozenset()
    complete: bool = True
    likely_model: str | None = None
    salted: bool | None = None

    @property
    def ambiguous(self) -> bool:
        """Whether the name leaves open which model it belongs to."""
        return len(self.models) > 1 or not self.complete


def identify(
    stored: StoredName, models: Mapping[str, str] | None = None, kind: StoreKind = StoreKind.FOLDER
) -> Identity:
    """What one file or key is.

    Args:
        stored: the file or key.
        models: model by space folder (`xk2/<root prefix>`), as `described_models` gives it.
        kind: of the store: the same characters mean different things in different stores.
    """
    name = stored.name
    if not stored.regular:
        return Identity(Holding.UNRECOGNISED)
    if (ours := _OURS.match(name)) is not None:
        return _identify_ours(name, int(ours[1]), models or {})
    found = recognise(name.rsplit("/", 1)[-1] if kind is StoreKind.FOLDER else name, kind)
    if found is None:
        return Identity(Holding.UNRECOGNISED)
    if isinstance(found, AmbiguousName):
        salted = {reading.salted for reading in found.readings}
        return Identity(
            Holding.ENTRY,
            schema=1,
            format=str(found.likely.format),
            models=found.models,
            complete=found.complete,
            likely_model=found.likely.model,
            salted=salted.pop() if found.complete and len(salted) == 1 else None,
        )
    return Identity(Holding.ENTRY, 1, str(found.format), frozenset({found.model}), True, found.model, found.salted)


def _identify_ours(name: str, schema: int, models: Mapping[str, str]) -> Identity:
    folder, *below = name.split("/")
    if schema < 2:  # v1 has no folder of its own
        return Identity(Holding.UNRECOGNISED)
    if not below or "." in folder:
        return Identity(Holding.INTERNAL, schema)
    if DESCRIPTION_NAME.fullmatch(name):
        return Identity(Holding.DESCRIPTION, schema)
    try:
        parse_any_schema(name)
    except StorageValueError:
        return Identity(Holding.UNRECOGNISED)
    model = models.get(f"{folder}/{below[0]}")
    known = frozenset() if model is None else frozenset({model})
    form = f"{folder}, of v1 clients" if is_namespace_root(bytes.fromhex(below[0])) else folder
    return Identity(Holding.ENTRY, schema, form, known, True, model)


@dataclass(frozen=True, slots=True)
class Group:
    """What is counted as one: a row of the audit."""

    holding: Holding
    schema: int | None
    format: str | None
    model: str | None
    ambiguous: bool
    salted: bool | None


@dataclass(slots=True)
class Count:
    """Sum over a group. Times are seconds since the epoch, of the names whose time is known; None without any."""

    names: int = 0
    n_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, stored: StoredName) -> None:
        """One more name."""
        self.names += 1
        self.n_bytes += stored.n_bytes
        if (time := stored.modified) is not None:
            self.oldest = time if self.oldest is None else min(self.oldest, time)
            self.newest = time if self.newest is None else max(self.newest, time)


def audit(
    names: Iterable[StoredName], models: Mapping[str, str] | None = None, kind: StoreKind = StoreKind.FOLDER
) -> dict[Group, Count]:
    """Counts of all names. A name that leaves its model open counts under the likely one, marked ambiguous."""
    counts: dict[Group, Count] = {}
    for stored in names:
        what = identify(stored, models, kind)
        group = Group(what.holding, what.schema, what.format, what.likely_model, what.ambiguous, what.salted)
        counts.setdefault(group, Count()).add(stored)
    return counts


def folder_names(folder: Path, *, on_error: Callable[[OSError], None] | None = None) -> Iterator[StoredName]:
    """Every file below a folder. Links are listed, never followed; what vanishes meanwhile is left out.

    Args:
        folder: the store's.
        on_error: told of what is below and cannot be looked at, which is left out; None raises it.

    Raises:
        OSError: the folder itself cannot be listed.
    """
    waiting = [""]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(folder / place) as listing:
                found = [entry.name for entry in listing]  # names alone: a folder may have millions
        except OSError as error:
            if not place:
                raise
            _left_out(error, on_error)
            continue
        for one in found:
            name = f"{place}{one}"
            try:
                facts = (folder / name).lstat()
            except OSError as error:
                _left_out(error, on_error)
                continue
            if stat.S_ISDIR(facts.st_mode):
                waiting.append(f"{name}/")
            else:
                yield StoredName(name, facts.st_size, facts.st_mtime, stat.S_ISREG(facts.st_mode))


def _left_out(error: OSError, on_error: Callable[[OSError], None] | None) -> None:
    if isinstance(error, FileNotFoundError):  # removed, or renamed, since its folder was listed
        return
    if on_error is None:
        raise error
    on_error(error)


def described_models(folder: Path) -> dict[str, str]:
    """Model by space folder, of each schema-2 space whose description agrees with the folder that it is in."""
    models = {}
    for path in sorted((folder / "xk2").glob(f"*/{SPACE_FILE}")):
        prefix = path.parent.name
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_DESCRIPTION_BYTES:
                continue
            model = checked_model(prefix, path.read_bytes())
        except OSError:
            continue
        if model is not None:
            models[f"xk2/{prefix}"] = model
    return models


def checked_model(prefix: str, data: bytes) -> str | None:
    """The model that a description names; None if it does not describe the space of that root prefix (hex)."""
    try:
        space = parse_description(data)
    except (StorageValueError, KeyingError):
        return None
    return space.model if space.root[:ROOT_PREFIX_BYTES].hex() == prefix else None
