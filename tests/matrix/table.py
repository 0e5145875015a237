"""The matrix as people read it: two tables of cells, and one of phases, from what was observed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import NamedTuple, TypeAlias

from keying import CacheSalt, LoraAdapter, MultimodalItem, PromptEmbeds
from tests.matrix.observation import REQUESTS, Cell, Observed, Pair
from tests.matrix.requests import N_CHUNKS, Kind, Phase
from tests.matrix.rules import Client, Outcome, Server, is_ours

BEGIN = "<!-- matrix:begin -->"
END = "<!-- matrix:end -->"


class Difference(StrEnum):
    """What is different about the request that is read."""

    NOTHING = "nothing"
    MEDIA = "media"
    ADAPTER = "adapter"
    SALT = "salt"
    EMBEDS = "prompt embeddings"
    SEVERAL = "several of these"


_TYPES = {
    Difference.MEDIA: MultimodalItem,
    Difference.ADAPTER: LoraAdapter,
    Difference.SALT: CacheSalt,
    Difference.EMBEDS: PromptEmbeds,
}

Row: TypeAlias = tuple[str, ...]


class Group(NamedTuple):
    """Cells that are equal: every writer with every reader on every server.

    Attributes:
        writers: names.
        readers: likewise.
        servers: likewise.
        row: what is in their columns.
    """

    writers: frozenset[Client]
    readers: frozenset[Client]
    servers: frozenset[Server]
    row: Row


@cache
def difference(pair: Pair) -> Difference:
    """The column of a pair."""
    if pair.written is pair.read:
        return Difference.NOTHING
    one, other = (set(REQUESTS[kind, pair.phase].extra_keys) for kind in (pair.written, pair.read))
    kinds = [name for name, kind in _TYPES.items() if any(isinstance(extra, kind) for extra in one ^ other)]
    return kinds[0] if len(kinds) == 1 else Difference.SEVERAL


def word(pair: Pair, outcome: Outcome) -> str:
    """An outcome in a word. Chunks that both requests share are no hit of one by the other."""
    if outcome.bypass:
        return "bypass"
    if outcome.wrong:
        return "wrong hit"
    return "hit" if pair.written is pair.read and outcome.hit == N_CHUNKS else "miss"


def row_of(outcomes: Mapping[Pair, Outcome]) -> Row:
    """The columns of a cell: a word, or words with their counts."""
    words: dict[Difference, Counter[str]] = {column: Counter() for column in Difference}
    for pair, outcome in outcomes.items():
        words[difference(pair)][word(pair, outcome)] += 1
    return tuple(_counted(words[column]) for column in Difference)


def groups(observed: Observed) -> list[Group]:
    """Equal cells together, as few groups as there are by joining two that differ in one respect."""
    rows = {id(outcomes): row_of(outcomes) for outcomes in {id(one): one for one in observed.values()}.values()}
    found = [
        Group(frozenset({cell.writer}), frozenset({cell.reader}), frozenset({cell.server}), rows[id(outcomes)])
        for cell, outcomes in observed.items()
    ]
    for place in range(3):
        joined: dict[tuple[object, ...], Group] = {}
        for group in found:
            rest = tuple(part for at, part in enumerate(group) if at != place)
            known = joined.get(rest)
            parts = list(group)
            if known is not None:
                parts[place] = known[place] | group[place]  # type: ignore[operator]
            joined[rest] = Group(*parts)  # type: ignore[arg-type]
        found = list(joined.values())
    return found


def render(observed: Observed) -> str:
    """The section of MIGRATION.md, markers included."""
    ours = {cell: outcomes for cell, outcomes in observed.items() if is_ours(cell.writer) or is_ours(cell.reader)}
    theirs = {cell: outcomes for cell, outcomes in observed.items() if cell not in ours}
    columns = Counter(difference(pair) for pair in next(iter(observed.values())))
    header = ["written by", "read by", "server", *(f"{column} ({columns[column]})" for column in Difference)]
    total = sum(len(outcomes) for outcomes in observed.values())
    wrong = sum(one.wrong for outcomes in ours.values() for one in outcomes.values())
    introduction = (
        f"{total:,} cells: {len(Kind)} kinds of request, each written and then read as itself and as every other, in "
        f"{len(Phase)} phases, by {len(observed)} combinations of writer, reader and server. Of the cells in which a "
        f"client of ours takes part, {wrong} are wrong hits. Our client and server run as they are, without sockets, "
        "and LMCache's server is a model; `make interop` runs the cells with LMCache's own client and servers: 0.5.6 "
        "in all phases, 0.5.5 and 0.5.3 in three, servers put in another's place in one.\n\n"
        f"Kinds: {', '.join(Kind)}.\n\n"
        f"Phases: the span {', '.join(list(Phase)[:5])}; {', '.join(list(Phase)[5:])}.\n\n"
        "The columns say what is different about the request that is read, and how many pairs of requests that are. "
        "`hit`: all of its chunks came back, with its own values. `miss`: nothing came back beyond the chunks before "
        "the difference, which both requests share. `bypass`: there was no cache to ask."
    )
    among = (
        "**LMCache's clients among themselves**: what their keys cannot tell apart is a wrong hit, on any server. "
        "These cells show that the matrix sees one."
    )
    phases = (
        "**Phases**: image X is written, and so many of its leading chunks are hit by each request, with wire protocol "
        "2 and through the tunnel alike."
    )
    parts = [
        BEGIN,
        introduction,
        "**Where one side is ours**",
        _table(header, [_titles(group) for group in groups(ours)]),
        among,
        _table(header, [_titles(group) for group in groups(theirs)]),
        phases,
        _table(["the span", *_PHASE_READS], _phase_rows(observed)),
        END,
    ]
    return "\n\n".join(parts)


def replaced(text: str, section: str) -> str:
    """A document with the section in place of the one that it has.

    Raises:
        ValueError: it has none, or several.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"got a document without one {BEGIN} and one {END}; put both where the matrix belongs")
    head, _, rest = text.partition(BEGIN)
    return head + section + rest.partition(END)[2]


_PHASE_READS = (Kind.IMAGE_X, Kind.IMAGE_Y, Kind.X_ELSEWHERE, Kind.TWO_IMAGES, Kind.TEXT, Kind.ADAPTER_A, Kind.SALT_S)
_PHASE_SERVERS = (Server.OURS, Server.OURS_WITH_FRONT, Server.LMCACHE_0_5_6, Server.LMCACHE_0_5_5)


def _phase_rows(observed: Observed) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for phase in Phase:
        hits = [
            {
                str(observed[Cell(Client.OURS, Client.OURS, server)][Pair(Kind.IMAGE_X, read, phase)].hit)
                for server in _PHASE_SERVERS
            }
            for read in _PHASE_READS
        ]
        rows.append([phase, *(" or ".join(sorted(one)) for one in hits)])
    return rows


def _titles(group: Group) -> Sequence[str]:
    return [_clients(group.writers), _clients(group.readers), _servers(group.servers), *group.row]


def _clients(some: Iterable[Client]) -> str:
    ordered = [client for client in Client if client in set(some)]
    ours = [str(client) for client in ordered if is_ours(client)]
    theirs = [client.removeprefix("LMCache ") for client in ordered if not is_ours(client)]
    if len(ours) == sum(map(is_ours, Client)):
        ours = ["ours, any policy"]
    elif Client.OURS in ordered:
        ours[0] += ", policy tunnel"
    return "; ".join([*ours, *([f"LMCache {', '.join(theirs)}"] if theirs else [])])


def _servers(some: Iterable[Server]) -> str:
    ordered = [server for server in Server if server in set(some)]
    return "; ".join(server.title for server in ordered)


def _counted(words: Counter[str]) -> str:
    if len(words) == 1:
        return next(iter(words))
    return ", ".join(f"{name} {words[name]}" for name in ("wrong hit", "hit", "miss", "bypass") if words[name])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(fields)} |" for fields in (header, ["---"] * len(header), *rows))
