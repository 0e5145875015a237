"""The migration matrix with real peers: LMCache's client and servers, ours over sockets, and what comes back in bytes.

The rules are those of `tests/matrix`, where every cell runs without sockets. Here run those that a real peer can be in;
with them the model of LMCache's server, which stands in for it there, is held to the real one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol_v2.session_keeper import Patience
from tests.interop.environment import needs_lmcache
from tests.interop.our_server import our_server
from tests.interop.real_client import RealClient
from tests.interop.real_parties import RealOurParty, RealV1Party, real_parties
from tests.interop.real_server import RealServer, free_port
from tests.matrix.in_process import sent_by
from tests.matrix.observation import (
    REQUESTS,
    Cell,
    Observed,
    Pair,
    SiteRun,
    cells,
    deviations,
    pairs,
    write_jobs,
    wrong_hits,
)
from tests.matrix.requests import CHUNK, N_CHUNKS, Kind, Phase
from tests.matrix.rules import Client, Outcome, Server, is_ours

pytestmark = [pytest.mark.interop, pytest.mark.zmq, needs_lmcache]

RELEASES = {Server.LMCACHE_0_5_5: "0.5.5", Server.LMCACHE_0_5_3: "0.5.3"}
MUTE = Patience(answer=0.3)
IMPATIENT = Patience(refused_delay=0.2, longest_delay=0.2)
STAYING = (Client.OURS, Client.RAW)
FEW = (Phase.LAST_TOKEN, Phase.GROWTH, Phase.RESUMED)
"""Phases on the older releases: those in which most can go wrong."""


@pytest.fixture(scope="module")
def older_servers(peer_logs: Path) -> Iterator[dict[Server, RealServer]]:
    """LMCache 0.5.5 and 0.5.3, started side by side."""
    with ExitStack() as exits:
        servers = {}
        for server, release in RELEASES.items():
            log = peer_logs / f"matrix-{release}.log"
            servers[server] = RealServer(log, chunk_size=CHUNK, release=release).launch()
            exits.callback(servers[server].stop)
        yield servers


def run(
    address: str,
    process: RealClient,
    server: Server,
    *,
    phases: Sequence[Phase] = tuple(Phase),
    patience: Patience | None = None,
    seconds: float = 10.0,
) -> Observed:
    """All cells of one server; those with unknown fields, which go one by one, in one phase."""
    here = [cell for cell in cells() if cell.server is server]
    apart = [cell for cell in here if Client.FIELDS in {cell.writer, cell.reader}]
    with real_parties(address, process, patience=patience, seconds=seconds) as parties:
        rest = SiteRun(parties, [cell for cell in here if cell not in apart], pairs(phases)).finish()
        return rest | SiteRun(parties, apart, pairs([Phase.INSIDE])).finish()


def check(observed: Observed) -> None:
    """Every cell is what the rules say, and none of ours is a wrong hit."""
    assert [] == deviations(observed)[:20]
    assert not [cell for cell in wrong_hits(observed) if is_ours(cell.writer) or is_ours(cell.reader)]


def test_sha31_is_what_lmcache_itself_makes_of_the_prompts(real_client: RealClient) -> None:
    """The tokens that a sha31 client sends in these cells are those of the release, item for item."""
    for request in REQUESTS.values():
        items = [[item.identifier, item.offset, item.length] for item in request.items]
        made = real_client.call("sha31_tokens", tokens=request.tokens, items=items)
        assert sent_by(Client.SHA31, request)[0] == tuple(made)


def test_on_lmcache_0_5_6(real_server: RealServer, real_client: RealClient) -> None:
    """Tunnelled, ours are apart from each other and from v1; v1 clients, and unknown fields, are seen to be served."""
    observed = run(real_server.address, real_client, Server.LMCACHE_0_5_6)
    check(observed)
    x_for_y = Pair(Kind.IMAGE_X, Kind.IMAGE_Y, Phase.INSIDE)
    a_for_b = Pair(Kind.ADAPTER_A, Kind.ADAPTER_B, Phase.INSIDE)
    seen = {
        client: [observed[Cell(client, client, Server.LMCACHE_0_5_6)][pair].wrong for pair in (x_for_y, a_for_b)]
        for client in Client
        if not is_ours(client)
    }
    assert {
        Client.RAW: [True, True],
        Client.INT16: [True, True],
        Client.SHA31: [False, True],
        Client.FIELDS: [True, True],
    } == seen


def test_on_lmcache_0_5_5(older_servers: dict[Server, RealServer], real_client: RealClient) -> None:
    """As on 0.5.6."""
    server = older_servers[Server.LMCACHE_0_5_5].wait_ready()
    check(
        run(server.address, real_client, Server.LMCACHE_0_5_5, phases=[Phase.LAST_TOKEN, Phase.GROWTH, Phase.RESUMED])
    )


def test_on_lmcache_0_5_3(older_servers: dict[Server, RealServer], peer_logs: Path) -> None:
    """Ours go without; its own clients are served as before, and it lives."""
    server = older_servers[Server.LMCACHE_0_5_3].wait_ready()
    with RealClient(peer_logs / "matrix-client-0.5.3.log", release="0.5.3") as client:
        check(run(server.address, client, Server.LMCACHE_0_5_3, phases=FEW, patience=MUTE))
    assert server.alive


def test_on_our_server_with_the_front(real_client: RealClient) -> None:
    """Wire protocol 2 and real v1 clients on one port, in two namespaces; unknown fields are served nothing."""
    with our_server(chunk_size=CHUNK) as server:
        observed = run(server.address, real_client, Server.OURS_WITH_FRONT)
    check(observed)
    cell = Cell(Client.RAW, Client.RAW, Server.OURS_WITH_FRONT)
    assert observed[cell][Pair(Kind.IMAGE_X, Kind.IMAGE_Y, Phase.INSIDE)] == Outcome(hit=N_CHUNKS, wrong=True)


def test_on_our_server_without_the_front(real_client: RealClient) -> None:
    """v1 clients are not answered and go without; ours are served."""
    with our_server(chunk_size=CHUNK, front=False) as server:
        check(run(server.address, real_client, Server.OURS, seconds=1.0))


class Stay:
    """Our client, which stays while one server is put in another's place, and LMCache's beside it.

    Args:
        address: of both servers.
        server: which cells.
        process: with LMCache's client in it.
    """

    def __init__(self, address: str, server: Server, process: RealClient) -> None:
        wanted = pairs([Phase.SEVERAL])
        self._ours = RealOurParty(address, Client.OURS, IMPATIENT)
        self._raw = RealV1Party(process, process.call("connect", url=address), Client.RAW, {})
        here = [cell for cell in cells() if cell.server is server and {cell.writer, cell.reader} <= {*STAYING}]
        self._run = SiteRun(dict(zip(STAYING, (self._ours, self._raw), strict=True)), here, wanted)
        self._deployments = [
            job.deployment
            for writer in (Client.OURS.name, "V1")
            for job in write_jobs(f"{server.name}/{writer}", wanted)
        ]

    def come(self) -> None:
        """Have a session in every deployment, and write what is to be written before."""
        self._ours.come(self._deployments)
        self._run.begin()

    def find(self) -> dict[Cell, Mapping[Pair, Outcome]]:
        """What is found after the server was replaced."""
        self._ours.replaced()
        self._raw.replaced()
        try:
            return self._run.finish()
        finally:
            self._ours.close()


def test_servers_that_are_put_in_each_others_place(peer_logs: Path, real_client: RealClient) -> None:
    """LMCache, then ours, then LMCache again, under clients that stay: each is spoken to as what it is.

    Nothing that was written before is hit after, what is written after is; and a v1 client that wrote the same prompts
    on each of them is never met.
    """
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    observed: dict[Cell, Mapping[Pair, Outcome]] = {}
    with RealServer(peer_logs / "matrix-first.log", chunk_size=CHUNK, port=port):
        upgraded = [Stay(address, server, real_client) for server in (Server.UPGRADED_KEPT, Server.UPGRADED)]
        for one in upgraded:
            one.come()
    with our_server(address=address, chunk_size=CHUNK):
        for one in upgraded:
            observed |= one.find()
        downgraded = [Stay(address, server, real_client) for server in (Server.DOWNGRADED_KEPT, Server.DOWNGRADED)]
        for one in downgraded:
            one.come()
    with RealServer(peer_logs / "matrix-last.log", chunk_size=CHUNK, port=port):
        for one in downgraded:
            observed |= one.find()
    check(observed)
    after = observed[Cell(Client.OURS, Client.OURS, Server.DOWNGRADED)]
    assert after[Pair(Kind.EVERYTHING, Kind.EVERYTHING, Phase.SEVERAL)] == Outcome(hit=N_CHUNKS)
