"""The migration matrix without sockets: every cell against the rules, and the table against MIGRATION.md.

And what proves that a wrong cell would be seen.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compat.v1.tunnel_session import V1Tunnel
from keying import CacheSalt, ChunkKeyChain, ExtraKey, LoraAdapter, MultimodalItem, PromptEmbeds, Tag, chunk_keys
from tests.matrix import in_process
from tests.matrix.in_process import OurParty, Site, observe
from tests.matrix.lmcache_model import LmcacheModel
from tests.matrix.observation import REQUESTS, Cell, Job, Observed, Pair, cells, deviations, pairs, wrong_hits
from tests.matrix.requests import CHUNK, N_CHUNKS, N_TOKENS, PHASES, Kind, Phase, shared_chunks
from tests.matrix.rules import MISS, Client, Outcome, Server, Speech, is_ours, speech
from tests.matrix.table import BEGIN, END, render, replaced

MIGRATION = Path(__file__).parents[2] / "MIGRATION.md"
V1_CLIENTS = [client for client in Client if not is_ours(client)]
V1_SERVERS = [Server.OURS_WITH_FRONT, Server.LMCACHE_0_5_3, Server.LMCACHE_0_5_5, Server.LMCACHE_0_5_6]


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    """The whole matrix, run once."""
    logging.disable(logging.WARNING)  # every client says that it tunnels
    yield observe()
    logging.disable(logging.NOTSET)


# ---- the matrix


def test_every_cell_is_what_the_rules_say(observed: Observed) -> None:
    """Hit, miss or bypass, to the chunk: a miss that should be a hit is as wrong as a hit that should be a miss."""
    assert set(cells()) == set(observed)
    assert all(len(pairs()) == len(outcomes) for outcomes in observed.values())
    assert [] == deviations(observed)[:20]


def test_no_cell_of_ours_is_a_wrong_hit_and_what_is_equal_hits(observed: Observed) -> None:
    """The promise itself, told without the rules: judged by values alone."""
    assert {} == {cell: count for cell, count in wrong_hits(observed).items() if is_ours(cell.writer)}
    assert {} == {cell: count for cell, count in wrong_hits(observed).items() if is_ours(cell.reader)}
    for server in (Server.OURS, Server.OURS_WITH_FRONT, Server.LMCACHE_0_5_5, Server.LMCACHE_0_5_6, Server.DOWNGRADED):
        for pair, outcome in observed[Cell(Client.OURS, Client.OURS, server)].items():
            one, other = (REQUESTS[kind, pair.phase] for kind in (pair.written, pair.read))
            assert Outcome(hit=shared_chunks(one, other)) == outcome, pair


def test_nothing_of_ours_meets_anything_of_v1(observed: Observed) -> None:
    """Not even text without any identity, which both would key rightly: two namespaces, on every server."""
    hits = [
        cell
        for cell, outcomes in observed.items()
        if is_ours(cell.writer) != is_ours(cell.reader) and any(one.hit for one in outcomes.values())
    ]
    assert [] == hits
    assert any(one.hit for one in observed[Cell(Client.RAW, Client.RAW, Server.OURS_WITH_FRONT)].values())


def test_who_has_no_session_is_told_so(observed: Observed) -> None:
    """A bypass is one in every pair. 0.5.3 does not answer the probe, so no policy tunnels to it."""
    for cell, outcomes in observed.items():
        none = speech(cell.reader, cell.server.now) is Speech.NONE
        assert {none} == {one.bypass for one in outcomes.values()}, cell
    for client in filter(is_ours, Client):
        assert all(one.bypass for one in observed[Cell(client, client, Server.LMCACHE_0_5_3)].values())


def test_the_table_in_migration_md_is_what_was_observed(observed: Observed) -> None:
    """The guide's table is printed by this run; `python -m tests.matrix --write MIGRATION.md` writes it."""
    text = MIGRATION.read_text(encoding="utf-8")
    assert BEGIN + text.partition(BEGIN)[2].partition(END)[0] + END == render(observed)


def test_a_table_of_other_outcomes_is_another_table(observed: Observed) -> None:
    """Negative control: one cell of half a million that is not what it was changes the table."""
    cell = Cell(Client.OURS, Client.OURS, Server.LMCACHE_0_5_6)
    pair = Pair(Kind.EVERYTHING, Kind.EVERYTHING, Phase.RESUMED)
    other = {cell: {**observed[cell], pair: MISS}}
    assert len(deviations(other)) == 1
    assert render({**observed, **other}) not in MIGRATION.read_text(encoding="utf-8")


def test_a_document_without_its_marks_is_left_alone() -> None:
    """A guide that lost its marks, or has them twice, is not written over."""
    for text in ("", f"# Guide\n{BEGIN}\n", f"{BEGIN}{END}{BEGIN}{END}"):
        with pytest.raises(ValueError, match="put both where the matrix belongs"):
            replaced(text, "new")
    assert replaced(f"a {BEGIN} old {END} z", "new") == "a new z"


# ---- what the requests are


def test_all_requests_of_a_phase_are_the_same_tokens_and_none_the_same_identity() -> None:
    """Nothing but the identity tells them apart, and every pair differs in some chunk."""
    for pair in pairs():
        one, other = (REQUESTS[kind, pair.phase] for kind in (pair.written, pair.read))
        assert one.tokens == other.tokens
        assert (shared_chunks(one, other) == N_CHUNKS) == (pair.written is pair.read)


def test_a_value_stands_for_one_meaning() -> None:
    """So two chunks with one value are one chunk, and a wrong hit is a wrong value."""
    meanings = {meaning for request in REQUESTS.values() for meaning in request.meanings}
    values = {value for request in REQUESTS.values() for value in request.values}
    assert len(meanings) == len(values) > 200
    assert all(1 <= value < 2**24 for value in values)


def test_phases_are_what_they_are_called() -> None:
    """Where the span starts and ends, and that stores cover every chunk once."""
    spans = {phase: range(spec.start, spec.stop) for phase, spec in PHASES.items()}
    assert spans[Phase.AT_START].start % CHUNK == 0
    assert 0 < spans[Phase.INSIDE].start % CHUNK < CHUNK - 1
    assert spans[Phase.INSIDE].start // CHUNK == spans[Phase.INSIDE][-1] // CHUNK
    assert spans[Phase.LAST_TOKEN].start % CHUNK == CHUNK - 1
    assert spans[Phase.TO_BOUNDARY].stop % CHUNK == 0
    assert spans[Phase.SEVERAL][-1] // CHUNK - spans[Phase.SEVERAL].start // CHUNK == 2
    assert len(PHASES[Phase.GROWTH].steps) > CHUNK
    assert [write.anew for write in PHASES[Phase.RESUMED].writes] == [False, True, False]
    for spec in PHASES.values():
        assert sum(spec.steps) == N_TOKENS
        assert spec.writes[0].first == 0
        assert all(before.n_tokens // CHUNK == after.first for before, after in pairwise(spec.writes))
        assert spec.writes[-1].n_tokens // CHUNK == N_CHUNKS


# ---- negative controls: what the matrix sees


def test_wrong_hits_of_each_generation_are_seen(observed: Observed) -> None:
    """Raw serves every picture for every other, int16 two that end alike, sha31 none; none knows of adapters."""
    x_for_y = Pair(Kind.IMAGE_X, Kind.IMAGE_Y, Phase.INSIDE)
    x_for_video = Pair(Kind.IMAGE_X, Kind.VIDEO, Phase.INSIDE)
    a_for_b = Pair(Kind.ADAPTER_A, Kind.ADAPTER_B, Phase.INSIDE)
    s_for_t = Pair(Kind.SALT_S, Kind.SALT_T, Phase.INSIDE)
    for server in V1_SERVERS:
        seen = {
            client: [pair for pair in (x_for_y, x_for_video, a_for_b, s_for_t) if found[pair].wrong]
            for client in (Client.RAW, Client.INT16, Client.SHA31)
            if (found := observed[Cell(client, client, server)])
        }
        assert {
            Client.RAW: [x_for_y, x_for_video, a_for_b],
            Client.INT16: [x_for_y, a_for_b],
            Client.SHA31: [a_for_b],
        } == seen


def test_identity_in_unknown_fields_is_no_identity_on_lmcache_and_refused_by_ours(observed: Observed) -> None:
    """LMCache drops what it does not know and serves without isolation; our front serves nothing for it."""
    for server in (Server.LMCACHE_0_5_3, Server.LMCACHE_0_5_5, Server.LMCACHE_0_5_6):
        outcomes = observed[Cell(Client.FIELDS, Client.FIELDS, server)]
        assert outcomes[Pair(Kind.IMAGE_X, Kind.IMAGE_Y, Phase.INSIDE)] == Outcome(hit=N_CHUNKS, wrong=True)
        assert outcomes[Pair(Kind.IMAGE_X, Kind.IMAGE_X, Phase.INSIDE)] == Outcome(hit=N_CHUNKS)
    assert {MISS} == set(observed[Cell(Client.FIELDS, Client.FIELDS, Server.OURS_WITH_FRONT)].values())


Change = Callable[[Sequence[ExtraKey]], Sequence[ExtraKey]]


def without(*kinds: type) -> Change:
    """A derivation that forgets some of a request's identity."""
    return lambda extra_keys: [one for one in extra_keys if not isinstance(one, kinds)]


@pytest.mark.parametrize("server", [Server.OURS, Server.LMCACHE_0_5_6])
@pytest.mark.parametrize(
    ("forgotten", "pair"),
    [
        ((object,), Pair(Kind.IMAGE_X, Kind.IMAGE_Y, Phase.INSIDE)),
        ((CacheSalt,), Pair(Kind.SALT_S, Kind.SALT_T, Phase.INSIDE)),
        ((LoraAdapter,), Pair(Kind.ADAPTER_A, Kind.ADAPTER_A_RELOADED, Phase.INSIDE)),
        ((PromptEmbeds,), Pair(Kind.EMBEDS_P, Kind.EMBEDS_Q, Phase.INSIDE)),
    ],
    ids=["everything", "salts", "adapters", "embeddings"],
)
def test_a_derivation_that_forgets_an_identity_is_seen(
    monkeypatch: pytest.MonkeyPatch, server: Server, forgotten: tuple[type, ...], pair: Pair
) -> None:
    """Negative control: natively and through the tunnel, what the keys do not say is a wrong hit of ours."""
    break_derivation(monkeypatch, without(*forgotten), without(*forgotten))
    seen = observe(pairs([Phase.INSIDE]), [server])
    ours = Cell(Client.OURS, Client.OURS, server)
    assert seen[ours][pair] == Outcome(hit=N_CHUNKS, wrong=True)
    assert ours in wrong_hits(seen)
    assert deviations(seen)


def test_a_span_that_is_off_by_one_is_seen_in_the_phase_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: keys of items that begin one token late are only wrong where that token ends a chunk."""

    def late(extra_keys: Sequence[ExtraKey]) -> Sequence[ExtraKey]:
        return [
            MultimodalItem(one.identifier, one.offset + 1, one.length - 1) if isinstance(one, MultimodalItem) else one
            for one in extra_keys
        ]

    break_derivation(monkeypatch, late, late)
    seen = observe(pairs(kinds=[Kind.TEXT, Kind.IMAGE_X, Kind.IMAGE_Y]), [Server.OURS])
    ours = seen[Cell(Client.OURS, Client.OURS, Server.OURS)]
    assert {Phase.LAST_TOKEN} == {pair.phase for pair, outcome in ours.items() if outcome.wrong}
    assert ours[Pair(Kind.IMAGE_X, Kind.IMAGE_Y, Phase.LAST_TOKEN)] == Outcome(hit=2, wrong=True)


def test_a_reader_that_derives_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: keys that separate too much are misses that should have been hits, and no wrong hit."""
    break_derivation(monkeypatch, list, lambda extra_keys: [*extra_keys, Tag("host", b"2")])
    seen = observe(pairs([Phase.INSIDE]), [Server.OURS])
    assert {} == wrong_hits(seen)
    assert seen[Cell(Client.OURS, Client.OURS, Server.OURS)][Pair(Kind.TEXT, Kind.TEXT, Phase.INSIDE)] == MISS
    assert len(deviations(seen)) > 100


def test_keys_that_hang_on_how_the_tokens_came_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a writer that begins a fresh chain without its extra keys is seen in the phase that does so."""

    def forgetful(space: Any, extra_keys: Sequence[ExtraKey] = ()) -> ChunkKeyChain:
        made.append(space.model)
        return ChunkKeyChain(space, extra_keys if made.count(space.model) == 1 else ())

    made: list[str] = []
    monkeypatch.setattr(in_process, "ChunkKeyChain", forgetful)
    seen = observe(pairs([Phase.INSIDE, Phase.RESUMED], [Kind.TEXT, Kind.IMAGE_X]), [Server.OURS])
    assert deviations(seen)
    assert all("preempted and resumed" in line for line in deviations(seen))


def break_derivation(monkeypatch: pytest.MonkeyPatch, writes: Change, reads: Change) -> None:
    """Change what our clients' keys are derived from."""
    monkeypatch.setattr(in_process, "ChunkKeyChain", lambda space, extra=(): ChunkKeyChain(space, writes(extra)))
    monkeypatch.setattr(
        in_process, "chunk_keys", lambda space, tokens, extra=(): chunk_keys(space, tokens, reads(extra))
    )


# ---- request ids, and servers that are put in another's place


def identities_under_one_id(model: LmcacheModel) -> int:
    """Request ids of a v1 server under which two identities came."""

    def several(seen: set[tuple[str, str, tuple[int, ...]]]) -> bool:
        *names, longest = max(seen, key=lambda one: len(one[2]))
        return any([*others] != names or tokens != longest[: len(tokens)] for *others, tokens in seen)

    return sum(map(several, model.seen.values()))


def one_deployment(client: Client) -> tuple[Site, LmcacheModel, list[tuple[int, ...] | None]]:
    """All kinds of two phases, written and then read in one deployment of an LMCache server; the values."""
    site = Site(Server.LMCACHE_0_5_6)
    jobs = [Job("shared", REQUESTS[kind, phase]) for phase in (Phase.INSIDE, Phase.RESUMED) for kind in Kind]
    site.parties[client].write(jobs)
    (model,) = site.places
    assert isinstance(model, LmcacheModel)
    return site, model, site.parties[client].read(jobs)


WANTED = [REQUESTS[kind, phase].values for phase in (Phase.INSIDE, Phase.RESUMED) for kind in Kind]


def test_one_v1_request_id_never_carries_two_identities() -> None:
    """All requests side by side in one space: each id is one identity's, and each request has its own values."""
    _, model, values = one_deployment(Client.OURS)
    assert identities_under_one_id(model) == 0
    assert len(model.seen) > len(WANTED)
    assert WANTED == values


def test_a_tunnel_that_shares_its_request_ids_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a v1 server keeps what an id hashed to first, and one request is served another's values."""
    monkeypatch.setattr(V1Tunnel, "_new_request_id", lambda self, last_key: "one for all")
    monkeypatch.setattr(V1Tunnel, "_end_v1", lambda self, request_ids: None)
    _, model, values = one_deployment(Client.OURS)
    assert identities_under_one_id(model) == 1
    assert WANTED != values


@pytest.mark.parametrize("server", [Server.DOWNGRADED_KEPT, Server.UPGRADED_KEPT])
def test_a_lease_does_not_outlive_its_server(server: Server) -> None:
    """Looked up before, retrieved after: nothing of it, though LMCache's client has put the same prompt there since."""
    site = Site(server)
    party, other = site.parties[Client.OURS], site.parties[Client.RAW]
    assert isinstance(party, OurParty)
    job = Job("leased", REQUESTS[Kind.TEXT, Phase.INSIDE])
    party.write([job])
    client = party.client(job.deployment)
    found = client.lookup(job.request, "r")
    assert found is not None
    assert found.lease is not None
    assert found.hit_chunks == N_CHUNKS
    site.replace()
    other.write([job])
    assert [job.request.values] == other.read([job])
    assert client is party.client(job.deployment)
    late = client.retrieve(found.lease, N_CHUNKS)
    assert late is not None
    assert () == late.chunks
    assert [()] == party.read([job])


@pytest.mark.parametrize(
    ("server", "speeches"),
    [
        (Server.DOWNGRADED, (Speech.NATIVE, Speech.TUNNEL)),
        (Server.UPGRADED, (Speech.TUNNEL, Speech.NATIVE)),
        (Server.LMCACHE_0_5_3, (Speech.NONE,)),
    ],
)
def test_a_client_speaks_to_every_server_in_its_way(server: Server, speeches: tuple[Speech, ...]) -> None:
    """What a server knows is asked anew on every connection."""
    site = Site(server)
    party = site.parties[Client.OURS]
    assert isinstance(party, OurParty)
    assert speeches[:1] == party.client("of both").speeches
    site.replace()
    assert speeches == party.client("of both").speeches
