"""Rehearse the upgrade of a live fleet from LMCache 0.5.x to key schema 2, step by step, under traffic.

    python examples/rolling_upgrade.py

A fleet is one server and two engines that share it. The engines send requests all the time: text, two pictures behind
the same placeholder tokens, two adapters, two salts, mixtures. Meanwhile server and engines are exchanged in one of the
two orders of MIGRATION.md, a roll-back included. The engines check whatever they are served (`examples/fleet.py`).

The exit code is 1 if a v2 engine is served anything but its own KV, if a v1 engine is served a v2 engine's, if a step
has no hits, or if the v1 engines do *not* serve each other wrong hits before the upgrade: then this would see none.
"""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from examples.fleet import Counts, Fleet
from examples.v1_parties import Released, StandIns, V1Parties

STEP_SECONDS = 30.0
"""That a step may take, once it is done, until it shows hits again."""

stdout, stderr = Console(), Console(stderr=True)


@dataclass
class Step:
    """One thing that an operator does."""

    title: str
    do: Callable[[Fleet], None]
    server: str = ""
    speaks: tuple[str, ...] = ()
    counts: Counts = field(default_factory=Counts)


def servers_first() -> list[Step]:
    """The server takes v1 and v2 engines, then the engines follow."""
    return [
        Step("all v1", lambda _: None),
        Step("server to v2, accepting v1", lambda fleet: fleet.serve_v2(accept_v1=True)),
        Step("engine 1 to v2", lambda fleet: fleet.upgrade(0)),
        Step("ROLL BACK the server", lambda fleet: fleet.serve_v1()),
        Step("forward again", lambda fleet: fleet.serve_v2(accept_v1=True)),
        Step("engine 2 to v2", lambda fleet: fleet.upgrade(1)),
        Step("server accepts v1 no more", lambda fleet: fleet.serve_v2(accept_v1=False)),
    ]


def clients_first() -> list[Step]:
    """Engines tunnel to a server that nobody upgraded, then the server follows."""
    return [
        Step("all v1", lambda _: None),
        Step("engine 1 to v2", lambda fleet: fleet.upgrade(0)),
        Step("ROLL BACK engine 1", lambda fleet: fleet.downgrade(0)),
        Step("forward again", lambda fleet: fleet.upgrade(0)),
        Step("engine 2 to v2", lambda fleet: fleet.upgrade(1)),
        Step("server to v2", lambda fleet: fleet.serve_v2(accept_v1=False)),
    ]


def rehearse(fleet: Fleet, steps: list[Step]) -> list[str]:
    """Do the steps under traffic, fill in what they showed, and say what is wrong with it.

    Raises:
        RuntimeError: a step could not be done, or did not come to its end.
    """
    problems: list[str] = []
    with stderr.status("starting") as shown:
        fleet.start()
        for step in steps:
            shown.update(step.title)
            step.do(fleet)
            for engine in fleet.engines:
                engine.await_hits(STEP_SECONDS)
            step.server = fleet.serves
            step.speaks = tuple(one.engine.speaks for one in fleet.engines)
            for one in fleet.engines:
                step.counts.add(one.take_counts())
                wanted = "v1" if one.engine.schema == 1 else "v2t" if fleet.serves == "v1" else "v2"
                if one.engine.speaks != wanted:
                    problems.append(f"{step.title}: {one.name} speaks {one.engine.speaks}, wanted {wanted}")
            if step.counts.wrong:
                problems.append(f"{step.title}: {step.counts.wrong} wrong hits")
    if not steps[0].counts.among_v1:
        problems.append("v1 engines served each other no wrong hit: the detector is not shown to work")
    return problems


def table_of(title: str, steps: list[Step]) -> Table:
    """A row a step."""
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="fleet: server | engines. v2t: v2 through the tunnel; v2+v1: takes both.\n"
        "v1 wrong: v1 engines were served each other's KV, as they are today.\n"
        "wrong: any other wrong hit; must be 0. All counts are of requests.",
    )
    table.add_column("step")
    table.add_column("fleet", no_wrap=True)
    for header in ("requests", "hits", "misses", "bypasses", "v1\nwrong", "wrong"):
        table.add_column(header, justify="right", no_wrap=True)
    for step in steps:
        counts = step.counts
        table.add_row(
            step.title,
            f"{step.server} | {' '.join(step.speaks)}",
            *map(str, (counts.requests, counts.hits, counts.misses, counts.bypassed)),
            f"[yellow]{counts.among_v1}[/yellow]",
            f"[bold red]{counts.wrong}[/bold red]" if counts.wrong else "[green]0[/green]",
        )
    return table


# ---- the command


class Order(StrEnum):
    """Which of the two orders of MIGRATION.md."""

    BOTH = "both"
    SERVERS_FIRST = "servers-first"
    CLIENTS_FIRST = "clients-first"


class Parties(StrEnum):
    """Who plays v1."""

    AUTO = "auto"
    LMCACHE = "lmcache"
    STAND_INS = "stand-ins"


ORDERS: dict[Order, Callable[[], list[Step]]] = {
    Order.SERVERS_FIRST: servers_first,
    Order.CLIENTS_FIRST: clients_first,
}


def main(
    order: Annotated[Order, typer.Option(help="Which roll-out to rehearse.")] = Order.BOTH,
    v1: Annotated[
        Parties, typer.Option(help="auto: LMCache's own server and client if .venv-lmcache is there, else stand-ins.")
    ] = Parties.AUTO,
) -> None:
    """Rehearse the upgrade of a fleet (one server, two engines) from LMCache 0.5.x to v2, under traffic.

    Each order of roll-out of MIGRATION.md is done step by step, with a roll-back. A table says for each step who speaks
    what, and what became of the requests: hits, misses, bypasses (no cache), wrong hits.

    Wrong hits of v1 engines among themselves are v1's own, and show that one would be seen. Any other is a failure.

    Exit code 0 if there was no such hit and every step came to right hits, else 1. Takes about a minute; listens on
    127.0.0.1 only, and leaves nothing behind.
    """
    logging.basicConfig(level=logging.ERROR)  # servers that come and go are warned of
    installed = Released.is_installed()
    if v1 is Parties.LMCACHE and not installed:
        stderr.print("[red]problem:[/red] there is no LMCache in .venv-lmcache; `make interop` builds it")
        raise typer.Exit(1)
    released = installed and v1 is not Parties.STAND_INS
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rolling-upgrade-") as name, contextlib.ExitStack() as stack:
        begun = time.monotonic()
        folder = Path(name)
        parties: V1Parties = Released(folder) if released else StandIns()
        stack.callback(parties.close)
        why = "" if installed else "LMCache's environment is absent (`make interop` builds it): "
        stdout.print(f"v1: {why}{parties.name}", highlight=False, soft_wrap=True)
        fleets = {one: Fleet(parties, folder / one) for one in (ORDERS if order is Order.BOTH else [order])}
        for fleet in fleets.values():  # servers that take their time to start have begun to
            stack.callback(fleet.close)
        for one, fleet in fleets.items():
            steps = ORDERS[one]()
            try:
                problems += [f"{one}: {problem}" for problem in rehearse(fleet, steps)]
            except RuntimeError as error:  # RehearsalError, or an LMCache server that did not come up
                problems.append(f"{one}: {error}")
            fleet.close()
            stdout.print(table_of(one.value.replace("-", " "), [step for step in steps if step.server]))
    for problem in problems:
        stderr.print(f"[red]problem:[/red] {problem}", highlight=False)
    if not problems:
        stdout.print(
            f"No wrong hit on the v2 side, and v1 engines were never served v2 KV ({time.monotonic() - begun:.0f} s).",
            highlight=False,
        )
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    command = typer.Typer(
        add_completion=False, rich_markup_mode="markdown", context_settings={"help_option_names": ["-h", "--help"]}
    )
    command.command()(main)
    command()
