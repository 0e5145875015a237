"""What writers and readers do in every cell, judged by the bytes that come back."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tests.matrix.requests import Kind, MatrixRequest, Phase
from tests.matrix.rules import BYPASS, Client, Outcome, Server, expected, is_ours

REQUESTS = {(kind, phase): MatrixRequest(kind, phase) for kind in Kind for phase in Phase}


class Job(NamedTuple):
    """A request in a deployment: a model, or a space, that nobody else uses.

    Attributes:
        deployment: its name.
        request: what is written or read there.
    """

    deployment: str
    request: MatrixRequest


class Party(Protocol):
    """A client that writes and reads."""

    @property
    def alike(self) -> Hashable:
        """What tells its messages from those of other parties: nothing else about it can matter to a server."""

    def write(self, jobs: Sequence[Job]) -> bool:
        """Store every request, each chunk with the request's own value; whether there was a cache to tell."""

    def read(self, jobs: Sequence[Job]) -> list[tuple[int, ...] | None]:
        """The values of the chunks that are hit; None where there was no cache to ask."""


class Pair(NamedTuple):
    """What was written, and what was read."""

    written: Kind
    read: Kind
    phase: Phase


class Cell(NamedTuple):
    """Who wrote, who read, and where."""

    writer: Client
    reader: Client
    server: Server


Observed = Mapping[Cell, Mapping[Pair, Outcome]]


def cells() -> Iterator[Cell]:
    """Every cell that can differ from the others.

    The client with unknown fields meets ours and itself; the other clients of LMCache it equals or cannot meet. Where
    a server is replaced, one client of LMCache stands for all, and meets ours.
    """
    for server in Server:
        clients = [one for one in Client if not server.replaced or one is Client.RAW or is_ours(one)]
        for writer in clients:
            for reader in clients:
                theirs = not is_ours(writer) and not is_ours(reader)
                if not (theirs and (server.replaced or (Client.FIELDS in {writer, reader} and writer is not reader))):
                    yield Cell(writer, reader, server)


def pairs(phases: Sequence[Phase] = tuple(Phase), kinds: Sequence[Kind] = tuple(Kind)) -> list[Pair]:
    """Every request with itself and with every other of its phase."""
    return [Pair(written, read, phase) for phase in phases for written in kinds for read in kinds]


def write_jobs(name: str, wanted: Sequence[Pair]) -> list[Job]:
    """One deployment for each request that is written."""
    written = dict.fromkeys((pair.written, pair.phase) for pair in wanted)
    return [Job(f"{name}/{phase.name}/{kind.name}", REQUESTS[kind, phase]) for kind, phase in written]


def read_jobs(name: str | None, wanted: Sequence[Pair]) -> list[Job]:
    """One read for each pair, in the deployment of what was written; None: in one to which nobody wrote anything."""
    if name is None:
        return [Job(f"{pair.phase.name}/nothing", REQUESTS[pair.read, pair.phase]) for pair in wanted]
    return [Job(f"{name}/{pair.phase.name}/{pair.written.name}", REQUESTS[pair.read, pair.phase]) for pair in wanted]


def judge(values: tuple[int, ...] | None, pair: Pair) -> Outcome:
    """An outcome by the values that came back.

    Raises:
        AssertionError: a value that nobody wrote.
    """
    if values is None:
        return BYPASS
    written, read = REQUESTS[pair.written, pair.phase], REQUESTS[pair.read, pair.phase]
    assert values == written.values[: len(values)], f"{pair}: got a value that was never written there"
    return Outcome(hit=len(values), wrong=values != read.values[: len(values)])


def read_cell(reader: Party, name: str | None, wanted: Sequence[Pair]) -> dict[Pair, Outcome]:
    """What a reader gets in the deployments of one writer; see `read_jobs`."""
    jobs = read_jobs(name, wanted)
    once = list(dict.fromkeys(jobs))
    got = dict(zip(once, reader.read(once), strict=True))
    return {pair: judge(got[job], pair) for pair, job in zip(wanted, jobs, strict=True)}


def deviations(observed: Observed) -> list[str]:
    """Where what was observed is not what the rules say; one line each."""
    return [
        f"{cell.writer} -> {cell.reader} on {cell.server.title}: {pair.written} written, {pair.read} read, "
        f"span {pair.phase}: got {outcome}, wanted {wanted}"
        for cell, outcomes in observed.items()
        for pair, outcome in outcomes.items()
        if outcome
        != (
            wanted := expected(
                cell.writer,
                cell.reader,
                cell.server,
                REQUESTS[pair.written, pair.phase],
                REQUESTS[pair.read, pair.phase],
            )
        )
    ]


def wrong_hits(observed: Observed) -> dict[Cell, int]:
    """Wrong hits of each cell that has any."""
    counts = {cell: sum(one.wrong for one in outcomes.values()) for cell, outcomes in observed.items()}
    return {cell: count for cell, count in counts.items() if count}


class SiteRun:
    """All cells of one server; or of two, where one is put in the other's place between `begin` and `finish`.

    Parties that are alike are run once (our three policies where all speak wire protocol 2, say). Ours look for what
    LMCache's clients wrote where all of these have written: what is missed there is missed of each.

    Args:
        parties: every client.
        here: the cells, of one server.
        wanted: pairs of requests.
    """

    def __init__(self, parties: Mapping[Client, Party], here: Sequence[Cell], wanted: Sequence[Pair]) -> None:
        self._parties = parties
        self._cells = here
        self._wanted = wanted
        self._server = here[0].server
        self._by_alike: dict[Hashable, str | None] = {}
        self._by_writer: dict[Client, str | None] = {}
        self._by_v1: str | None = None

    def begin(self) -> None:
        """Write, if it is the former server that is written to."""
        if self._server.written_before:
            self._write()

    def finish(self) -> dict[Cell, Mapping[Pair, Outcome]]:
        """Write, if that was not done before, and read."""
        if not self._server.written_before:
            self._write()
        done: dict[Hashable, Mapping[Pair, Outcome]] = {}
        observed: dict[Cell, Mapping[Pair, Outcome]] = {}
        for cell in self._cells:
            reader = self._parties[cell.reader]
            apart = is_ours(cell.writer) or not is_ours(cell.reader)
            name = self._by_writer[cell.writer] if apart else self._by_v1
            if (name, reader.alike) not in done:
                done[name, reader.alike] = read_cell(reader, name, self._wanted)
            observed[cell] = done[name, reader.alike]
        return observed

    def _write(self) -> None:
        for writer in dict.fromkeys(cell.writer for cell in self._cells):
            party, name = self._parties[writer], f"{self._server.name}/{writer.name}"
            if party.alike not in self._by_alike:
                told = party.write(write_jobs(name, self._wanted))
                self._by_alike[party.alike] = name if told else None
            self._by_writer[writer] = self._by_alike[party.alike]
            if not is_ours(writer) and party.write(write_jobs(f"{self._server.name}/V1", self._wanted)):
                self._by_v1 = f"{self._server.name}/V1"
