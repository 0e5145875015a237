"""``extra-keys audit`` and ``purge``: what a folder or a Redis database holds, and retiring a part of it."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.bar import Bar
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from compat.audit import Count, Group, Holding, described_models, folder_names
from compat.audit import audit as count_names
from compat.purge import Criteria, Verdict, purge_folder
from compat.redis_listing import RedisListing
from extra_keys_cli.ages import format_age
from extra_keys_cli.failures import CommandError
from extra_keys_cli.screen import shown, stderr, stdout
from extra_keys_cli.sizes import format_size

T = TypeVar("T")
_BAR_WIDTH = 12
_WIDE = 100  # columns of a screen that has room for a bar
_EVERY = 256  # names between two updates of the progress bar


def audit(place: str, *, as_json: bool) -> None:
    """Print what a folder or a Redis database holds.

    Raises:
        CommandError: no folder; or, after what was found is printed, a part of it that cannot be looked at.
        CompatError: no server, or one that does not answer.
        OSError: it cannot be listed.
    """
    left_out = _LeftOut("looked at")
    with _opened(place) as (folder, listing):
        if listing is not None:
            names = _watched(listing.names(), listing.total())
            counts = count_names(names, listing.described_models(), listing.kind)
        else:
            counts = count_names(_watched(folder_names(folder, on_error=left_out), None), described_models(folder))
    now = time.time()
    rows = sorted(counts.items(), key=lambda row: (list(Holding).index(row[0].holding), _order(row[0])))
    if as_json:
        stdout.print_json(json.dumps({"groups": [_facts(group, count, now) for group, count in rows]}))
        left_out.tell()
        return
    total = sum(count.n_bytes for count in counts.values())
    age = "age" if listing is None else "last used"
    table = Table(title=shown(place if listing is None else listing.place))
    for column in ("schema", "what", "model", "salted", "names", "bytes", "share", age):
        table.add_column(column, overflow="fold")  # on a narrow screen nothing is cut off
    for group, count in rows:
        model = "" if group.holding is not Holding.ENTRY else group.model or "unknown"
        table.add_row(
            "" if group.schema is None else str(group.schema),
            shown(group.format or group.holding),
            shown(model) + (" (ambiguous)" if group.ambiguous else ""),
            {None: "", True: "yes", False: "no"}[group.salted],
            f"{count.names:,}",
            format_size(count.n_bytes),
            _share(count.n_bytes, total),
            _ages(count, now),
        )
    stdout.print(table)
    if not rows:
        stdout.print("Nothing is there.")
    left_out.tell()


def purge(place: str, criteria: Criteria, *, yes: bool, as_json: bool) -> None:
    """Retire what is asked for, or say what would go.

    Raises:
        CommandError: no folder; or, after all others were done, a file that cannot be removed or looked at.
        CompatError: a live server owns the folder; no Redis server, or one that does not answer.
        OSError: it cannot be listed.
    """
    left_out = _LeftOut("removed or looked at")
    names: Counter[Verdict] = Counter()
    sizes: Counter[Verdict] = Counter()
    with _opened(place) as (folder, listing):
        if listing is not None:
            outcomes = _watched(listing.purge(criteria, dry_run=not yes), listing.total())
        else:
            outcomes = _watched(purge_folder(folder, criteria, dry_run=not yes, on_error=left_out), None)
        for stored, outcome in outcomes:
            names[outcome] += 1
            sizes[outcome] += stored.n_bytes
    if as_json:
        facts = {outcome: {"names": names[outcome], "bytes": sizes[outcome]} for outcome in Verdict}
        stdout.print_json(json.dumps({"dry_run": not yes, "outcomes": facts}))
        left_out.tell()
        return
    table = Table("", "names", "bytes", title=shown(place if listing is None else listing.place))
    for outcome in Verdict:
        if names[outcome] or outcome is Verdict.RETIRED:
            what = "would be retired" if outcome is Verdict.RETIRED and not yes else str(outcome)
            table.add_row(what, f"{names[outcome]:,}", format_size(sizes[outcome]))
    stdout.print(table)
    if not yes:
        stdout.print("Nothing was touched; --yes does it.")
    left_out.tell()


@dataclass
class _LeftOut:
    """Files and folders that a command could do nothing about; told at its end, since the others are done all the same.

    Args:
        undone: what could not be done with them.
    """

    undone: str
    count: int = 0
    first: str = ""

    def __call__(self, error: OSError) -> None:
        self.count += 1
        self.first = self.first or f"{error.filename}: {error.strerror}"

    def tell(self) -> None:
        if self.count:
            raise CommandError(f"{self.count:,} could not be {self.undone}, the first {self.first}")


@contextlib.contextmanager
def _opened(place: str) -> Iterator[tuple[Path, RedisListing | None]]:
    """The folder, or the database, that a command is about."""
    if "://" in place:
        with RedisListing(place) as listing:
            yield Path(), listing
        return
    folder = Path(place)
    if not place or not folder.is_dir():  # an empty text, from a variable that is not set, is not the current folder
        what = "is no place" if not place else "is a file" if folder.exists() else "is not there"
        raise CommandError(
            f"{place or repr(place)} {what}; give the folder of a store, or the URL of a server (redis://host:6379/0)"
        )
    yield folder, None


def _watched(items: Iterable[T], total: int | None) -> Iterator[T]:
    """The items, under a bar where it is known how many there are, and a count where not."""
    count = (TextColumn("{task.completed:,.0f} names"), TimeElapsedColumn())
    columns = (SpinnerColumn(), *count) if total is None else (BarColumn(), TaskProgressColumn(), *count)
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for n, item in enumerate(items):
            if n % _EVERY == 0:
                progress.update(task, completed=n)
            yield item


def _share(n_bytes: int, total: int) -> Bar | str:
    """A part of all bytes: as a bar, or as a number where the screen is narrow."""
    if stdout.width >= _WIDE:
        return Bar(max(total, 1), 0, n_bytes, width=_BAR_WIDTH)
    return f"{n_bytes / max(total, 1):.0%}"


def _ages(count: Count, now: float) -> str:
    if count.oldest is None or count.newest is None:
        return "unknown"
    youngest, oldest = format_age(now - count.newest), format_age(now - count.oldest)
    return youngest if youngest == oldest else f"{youngest} to {oldest}"


def _age(moment: float | None, now: float) -> int | None:
    return None if moment is None else max(0, round(now - moment))


def _order(group: Group) -> tuple[int, str, str, bool, str]:
    return (group.schema or 0, group.format or "", group.model or "", group.ambiguous, str(group.salted))


def _facts(group: Group, count: Count, now: float) -> dict[str, object]:
    return {
        "what": str(group.holding),
        "schema": group.schema,
        "format": group.format,
        "model": group.model,
        "ambiguous": group.ambiguous,
        "salted": group.salted,
        "names": count.names,
        "bytes": count.n_bytes,
        "newest_age_s": _age(count.newest, now),
        "oldest_age_s": _age(count.oldest, now),
    }
