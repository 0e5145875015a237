"""``extra-keys audit`` and ``purge``: what a store's folder holds, and retiring a part of it."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from compat.audit import Count, Group, Holding, described_models, folder_names
from compat.audit import audit as count_names
from compat.purge import Criteria, Verdict, purge_folder
from extra_keys_cli.ages import format_age
from extra_keys_cli.failures import CommandError, stderr, stdout
from extra_keys_cli.sizes import format_size

T = TypeVar("T")
_EVERY = 256  # names between two updates of the progress bar


def audit(folder: Path, *, as_json: bool) -> None:
    """Print what a folder holds.

    Raises:
        CommandError: no folder.
        OSError: it cannot be listed.
    """
    _check_folder(folder)
    counts = count_names(_watched(folder_names(folder), "names"), described_models(folder))
    now = time.time()
    rows = sorted(counts.items(), key=lambda row: (list(Holding).index(row[0].holding), _order(row[0])))
    if as_json:
        stdout.print_json(json.dumps({"groups": [_facts(group, count, now) for group, count in rows]}))
        return
    table = Table("schema", "what", "model", "salted", "names", "bytes", "age")
    for group, count in rows:
        model = "" if group.holding is not Holding.ENTRY else group.model or "unknown"
        table.add_row(
            "" if group.schema is None else str(group.schema),
            escape(group.format or str(group.holding)),
            escape(_printable(model)) + (" (ambiguous)" if group.ambiguous else ""),
            {None: "", True: "yes", False: "no"}[group.salted],
            f"{count.names:,}",
            format_size(count.n_bytes),
            f"{format_age(now - count.newest)} to {format_age(now - count.oldest)}",
        )
    stdout.print(table)


def purge(folder: Path, criteria: Criteria, *, yes: bool, as_json: bool) -> None:
    """Retire what is asked for, or say what would go.

    Raises:
        CommandError: no folder.
        PurgeRefusedError: a live server owns the folder.
        OSError: a file cannot be removed; running again goes on.
    """
    _check_folder(folder)
    names: Counter[Verdict] = Counter()
    sizes: Counter[Verdict] = Counter()
    for stored, outcome in _watched(purge_folder(folder, criteria, dry_run=not yes), "names"):
        names[outcome] += 1
        sizes[outcome] += stored.n_bytes
    if as_json:
        outcomes = {outcome: {"names": names[outcome], "bytes": sizes[outcome]} for outcome in Verdict}
        stdout.print_json(json.dumps({"dry_run": not yes, "outcomes": outcomes}))
        return
    table = Table("", "names", "bytes")
    for outcome in Verdict:
        if names[outcome] or outcome is Verdict.RETIRED:
            shown = "would be retired" if outcome is Verdict.RETIRED and not yes else str(outcome)
            table.add_row(shown, f"{names[outcome]:,}", format_size(sizes[outcome]))
    stdout.print(table)
    if not yes:
        stdout.print("Nothing was touched; --yes does it.")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise CommandError(f"{escape(str(folder))} is no folder; give the folder of a store")


def _watched(items: Iterable[T], unit: str) -> Iterator[T]:
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} " + unit), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("", total=None)
        for n, item in enumerate(items):
            if n % _EVERY == 0:
                progress.update(task, completed=n)
            yield item


def _order(group: Group) -> tuple[int, str, str, bool, str]:
    return (group.schema or 0, group.format or "", group.model or "", group.ambiguous, str(group.salted))


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


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
        "newest_age_s": round(now - count.newest),
        "oldest_age_s": round(now - count.oldest),
    }
