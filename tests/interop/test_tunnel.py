"""Our client on released LMCache servers, through the tunnel: what such a server mixes up stays apart, and hits again.

`test_real_server` holds the negative controls: asked in its own way, the same server serves wrong hits for these.
"""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from compat.v1.server_policy import TunnelPolicy, bypass, refuse
from keying import CacheSalt, ExtraKey, KeySpace, LoraAdapter, MultimodalItem, PromptEmbeds, chunk_keys
from protocol_v2.client import CacheClient
from protocol_v2.codes import ErrorCode
from protocol_v2.errors import ServerError, UnsupportedServerError
from protocol_v2.session_keeper import Patience
from protocol_v2.wire_keys import Shard
from tests.interop.environment import needs_lmcache
from tests.interop.our_server import our_server
from tests.interop.real_client import RealClient, V1User
from tests.interop.real_parties import ready_again
from tests.interop.real_server import RealServer, free_port
from tests.protocol_v2.toy_engine import ToyEngine, ToyRequest

if TYPE_CHECKING:
    from protocol_v2.foreign import ForeignPolicy

pytestmark = [pytest.mark.interop, pytest.mark.zmq, needs_lmcache]

CHUNK = 16
PLACEHOLDER = 151_655
PROMPT = [*range(1000, 1008), *[PLACEHOLDER] * 40, *range(2000, 2016)]
"""Four chunks, of which an item covers the first three."""

IMAGE_X, IMAGE_Y = (MultimodalItem(letter * 64, 8, 40) for letter in "xy")
EMBEDS_1, EMBEDS_2 = (PromptEmbeds(0, bytes([fill]) * 64, 4, "float32") for fill in (1, 2))

_numbers = itertools.count()


def new_space() -> KeySpace:
    """A space that nobody else has."""
    return KeySpace(f"org/m{next(_numbers)}", chunk_size=CHUNK, kv_dtype="float16")


def chunk(fill: float) -> torch.Tensor:
    """One chunk's value."""
    return torch.full((2, 1, CHUNK, 8), fill, dtype=torch.float16)


class User:
    """An engine on one client: stores and fetches prompts, each chunk filled with one value."""

    def __init__(self, client: CacheClient, space: KeySpace) -> None:
        self.client = client
        self.space = space

    def store(self, fill: float, *extra: ExtraKey, tokens: list[int] = PROMPT) -> int:
        """Store a prompt; chunks that were stored."""
        keys = chunk_keys(self.space, tokens, extra)
        session = f"s{next(_numbers)}"
        result = self.client.store(session, keys, [chunk(fill + i) for i in range(len(keys))])
        assert result.failure is None
        self.client.end_session(session)
        return result.stored

    def fetch(self, *extra: ExtraKey, tokens: list[int] = PROMPT) -> list[float]:
        """The fills of the chunks that are hit."""
        keys = chunk_keys(self.space, tokens, extra)
        session = f"s{next(_numbers)}"
        found = self.client.lookup(session, keys)
        assert found.failure is None
        if not found.hit_chunks:
            return []
        assert found.lease is not None
        got = self.client.retrieve(found.lease, found.hit_chunks)
        assert (got.failure, got.miss, len(got.chunks)) == (None, None, found.hit_chunks)
        assert self.client.end_session(session).known
        assert all(bool((one.tensors[0] == one.tensors[0].flatten()[0]).all()) for one in got.chunks)
        return [float(one.tensors[0].flatten()[0]) for one in got.chunks]


@contextmanager
def tunnelled(server: RealServer, space: KeySpace) -> Iterator[User]:
    """A user whose client tunnels to a server."""
    with CacheClient(server.address, space, on_foreign=TunnelPolicy(space)) as client:
        yield User(client, space)


@pytest.fixture
def user(real_server: RealServer) -> Iterator[User]:
    """A tunnelled user of a space of its own."""
    with tunnelled(real_server, new_space()) as user:
        yield user


IDENTITIES: dict[str, tuple[ExtraKey, ...]] = {
    "plain": (),
    "image x": (IMAGE_X,),
    "image y": (IMAGE_Y,),
    "image x elsewhere": (MultimodalItem(IMAGE_X.identifier, 9, 39),),
    "adapter a": (LoraAdapter("a"),),
    "adapter b": (LoraAdapter("b"),),
    "adapter a reloaded": (LoraAdapter("a", "sha256:2"),),
    "salt s": (CacheSalt("s"),),
    "salt with / and @": (CacheSalt("s2/x@y=="),),
    "salt of 300 characters": (CacheSalt("s" * 300),),
    "salt named like the adapter": (CacheSalt("a"),),
    "embeddings 1": (EMBEDS_1,),
    "embeddings 2": (EMBEDS_2,),
    "everything": (IMAGE_X, LoraAdapter("a"), CacheSalt("s"), EMBEDS_1),
}


def test_every_identity_is_apart_from_every_other_and_is_hit_again(user: User) -> None:
    """One prompt under all identities: each misses before it is stored, and then has its own values."""
    for place, (name, extra) in enumerate(IDENTITIES.items()):
        assert [] == user.fetch(*extra), name
        assert user.store(10.0 * place, *extra) == 4
    for place, (name, extra) in enumerate(IDENTITIES.items()):
        assert [10.0 * place + i for i in range(4)] == user.fetch(*extra), name


def test_what_is_shared_is_shared(user: User) -> None:
    """An item in the last chunk leaves the chunks before it to everybody."""
    late = MultimodalItem("z" * 64, 56, 8)
    assert user.store(1.0) == 4
    assert [1.0, 2.0, 3.0] == user.fetch(late)
    assert [1.0, 2.0, 3.0] == user.fetch(tokens=[*PROMPT[:48], *range(16)])


def test_equal_requests_hit_across_clients_and_processes(real_server: RealServer, user: User, tmp_path: Path) -> None:
    """Another client, and another process, derive the same tokens and find the values."""
    assert user.store(1.0, IMAGE_X, CacheSalt("s")) == 4
    with tunnelled(real_server, user.space) as other:
        assert [1.0, 2.0, 3.0, 4.0] == other.fetch(IMAGE_X, CacheSalt("s"))
        assert [] == other.fetch(IMAGE_Y, CacheSalt("s"))
    script = f"""
import sys
from tests.interop.test_tunnel import *
space = KeySpace({user.space.model!r}, chunk_size=CHUNK, kv_dtype="float16")
with CacheClient({real_server.address!r}, space, on_foreign=TunnelPolicy(space)) as client:
    there = User(client, space)
    print(there.fetch(IMAGE_X, CacheSalt("s")), there.fetch(IMAGE_Y, CacheSalt("s")))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=60)
    assert done.stdout.strip() == "[1.0, 2.0, 3.0, 4.0] []", done.stderr


def test_a_v1_client_on_the_same_server_is_unharmed(
    real_server: RealServer, real_client: RealClient, user: User
) -> None:
    """The same model and prompt, plain, in both ways: each has its own values, before and after the other's stores."""
    v1 = V1User(real_client, real_server.address, model=user.space.model)
    assert v1.store(PROMPT, 50.0)
    assert [] == user.fetch()
    assert user.store(1.0) == 4
    assert [50.0, 51.0, 52.0, 53.0] == v1.retrieve(PROMPT)
    assert [1.0, 2.0, 3.0, 4.0] == user.fetch()
    assert v1.store([7, *PROMPT], 60.0)
    assert [60.0, 61.0, 62.0, 63.0] == v1.retrieve([7, *PROMPT])


def test_ranks_and_groups_have_their_own_parts(user: User) -> None:
    """A hit needs every rank of every group; each part is retrieved as it was stored."""
    keys = chunk_keys(user.space, PROMPT)
    parts = [Shard(world=2, rank=rank, group=group) for rank in range(2) for group in range(2)]
    for place, shard in enumerate(parts):
        assert user.client.lookup("r", keys, world=2, groups=2).hit_chunks == 0
        assert user.client.store("r", keys, [chunk(10.0 * place)] * 4, shard=shard).stored == 4
    found = user.client.lookup("r", keys, world=2, groups=2)
    assert found.hit_chunks == 4
    assert found.lease is not None
    for place, shard in enumerate(parts):
        for _ in range(2):  # a v1 server's lock is gone after the first: it is taken again
            got = user.client.retrieve(found.lease, 4, shard=shard)
            assert [10.0 * place] * 4 == [float(one.tensors[0].flatten()[0]) for one in got.chunks]
    assert user.client.lookup("t", keys).hit_chunks == 0


def test_workers_in_other_processes_retrieve_by_lease_and_keys(real_server: RealServer, user: User) -> None:
    """What their scheduler looked up, each rank its own part, as often as it likes; then all is there again."""
    extra, shards = (IMAGE_X, CacheSalt("s")), [Shard(world=2, rank=rank) for rank in range(2)]
    keys = chunk_keys(user.space, PROMPT, extra)
    for shard in shards:
        assert user.client.store("w", keys, [chunk(10.0 * shard.rank + i) for i in range(4)], shard=shard).stored == 4
    script = f"""
from tests.interop.test_tunnel import *
import sys
space = KeySpace({user.space.model!r}, chunk_size=CHUNK, kv_dtype="float16")
lease, rank = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
with CacheClient({real_server.address!r}, space, on_foreign=TunnelPolicy(space)) as client:
    def fills(**more):
        got = client.retrieve(lease, 2, first=1, shard=Shard(world=2, rank=rank), **more)
        return [float(one.tensors[0].flatten()[0]) for one in got.chunks], type(got.failure).__name__
    right, other = (chunk_keys(space, PROMPT, [CacheSalt(salt), IMAGE_X]) for salt in "st")
    print(fills(keys=right), fills(keys=right), fills(keys=other), fills())
"""
    for _ in range(2):
        found = user.client.lookup("r", keys, world=2)
        assert found.hit_chunks == 4
        assert found.lease is not None
        for rank in (1, 0):
            command = [sys.executable, "-c", script, found.lease.hex(), str(rank)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            there = f"([{10.0 * rank + 1}, {10.0 * rank + 2}], 'NoneType')"
            assert f"{there} {there} ([], 'NoneType') ([], 'ServerError')\n" == done.stdout
        assert user.client.end_session("r").known


def test_an_engine_with_workers_of_their_own_loads_through_the_tunnel(real_server: RealServer, user: User) -> None:
    """Two ranks with a policy each, as in processes of their own: a second run loads it all, another salt nothing."""
    prompt = [1 + i % 7 for i in range(3 * CHUNK + 5)]
    loaded = []
    with tunnelled(real_server, user.space) as one, tunnelled(real_server, user.space) as two:
        for salt in ("s", "s", "t"):
            engine = ToyEngine(user.client, user.space, world=2, worker_clients=[one.client, two.client])
            request = ToyRequest(f"e{next(_numbers)}", list(prompt), salt)
            loaded.append(engine.run(request))
            engine.flush()
            assert engine.is_right(request)
            engine.close()
    assert [0, 3 * CHUNK, 0] == loaded


def test_several_tensors_of_any_kind_make_a_chunk(user: User) -> None:
    """What a v1 server has no word for travels all the same: lists of tensors, a partial tail, other sizes."""
    tokens = [*PROMPT, 1, 2, 3]
    keys = chunk_keys(user.space, tokens, partial_tail=True)
    values = [[torch.arange(n, dtype=torch.int64), torch.ones(2, n, dtype=torch.bfloat16)] for n in (3, 3, 4, 4, 1)]
    assert user.client.store("r", keys, values).stored == 5
    found = user.client.lookup("r", keys)
    assert found.hit_chunks == 5
    assert found.lease is not None
    got = user.client.retrieve(found.lease, 5)
    assert [(64, 3)] == [(one.start, one.n_tokens) for one in got.chunks[4:]]
    for want, one in zip(values, got.chunks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, one.tensors, strict=True))


def test_leases_are_given_back(user: User) -> None:
    """Released in part and twice, or ended: what is given back is counted once."""
    assert user.store(1.0) == 4
    keys = chunk_keys(user.space, PROMPT)
    found = user.client.lookup("r", keys)
    assert found.lease is not None
    assert user.client.release(found.lease, first=2).released == 2
    assert user.client.release(found.lease).released == 2
    assert user.client.release(found.lease).released == 0
    assert user.client.end_session("r").known
    assert not user.client.end_session("r").known
    gone = user.client.retrieve(found.lease, 4).failure
    assert isinstance(gone, ServerError)
    assert gone.error_code == ErrorCode.LEASE_UNKNOWN
    assert user.client.lookup("r", keys, lease=False).lease is None


def test_status_says_whose_strength_it_is(user: User) -> None:
    """And ping works; a clear, which would forget every v1 client's entries, does not."""
    user.client.wait_ready(10)
    assert "the v1 server's own hash" in str(user.client.status()["tunnel.strength"])
    assert user.client.ping().uptime_ms == 0
    with pytest.raises(ServerError, match="all its clients"):
        user.client.clear("space")


def test_bypass_misses_and_refuse_raises(real_server: RealServer) -> None:
    """The other two policies send the server nothing but the probe."""
    space = new_space()
    keys = chunk_keys(space, PROMPT)
    for policy in (bypass, None):
        with CacheClient(real_server.address, space, on_foreign=policy) as client:
            found = client.lookup("r", keys)
            assert isinstance(found.failure, UnsupportedServerError)
            assert isinstance(client.store("r", keys, [chunk(1.0)] * 4).failure, UnsupportedServerError)
    with CacheClient(real_server.address, space, on_foreign=refuse) as client:
        for _ in range(2):
            with pytest.raises(ServerError, match="refuse such servers"):
                client.lookup("r", keys)
        with pytest.raises(ServerError, match="refuse such servers"):
            client.wait_ready(5)
    with tunnelled(real_server, space) as user:
        assert [] == user.fetch()


def test_a_server_with_other_chunks_is_bypassed(real_server: RealServer) -> None:
    """Its keys would not be a chunk's; said in the failure, and nothing keyed is sent."""
    for size, text in ((32, "have 16 tokens"), (8, "hold no key")):
        space = KeySpace("org/m", chunk_size=size, kv_dtype="float16")
        with CacheClient(real_server.address, space, on_foreign=TunnelPolicy(space)) as client:
            found = client.lookup("r", chunk_keys(space, range(100)))
            assert isinstance(found.failure, UnsupportedServerError)
            assert text in str(found.failure)


# ---- servers that come and go under a running client


def test_an_upgrade_is_taken_up_and_a_downgrade_is_noticed(peer_logs: Path) -> None:
    """One port: LMCache, then ours, then LMCache again. Each is spoken to as what it is, and no hit is ever wrong."""
    space, port = new_space(), free_port()
    address = f"tcp://127.0.0.1:{port}"
    patience = Patience(refused_delay=0.2, longest_delay=0.2)
    old = RealServer(peer_logs / "upgraded.log", chunk_size=CHUNK, port=port)
    with CacheClient(address, space, on_foreign=TunnelPolicy(space), patience=patience) as client:
        user = User(client, space)
        with old:
            ready_again(client)
            assert user.store(1.0, IMAGE_X) == 4
            assert [1.0, 2.0, 3.0, 4.0] == user.fetch(IMAGE_X)
            assert not speaks_2(client)
        with our_server(address=address):
            ready_again(client)
            assert speaks_2(client)
            assert [] == user.fetch(IMAGE_X)
            assert user.store(20.0, IMAGE_X) == 4
            assert [20.0, 21.0, 22.0, 23.0] == user.fetch(IMAGE_X)
        with RealServer(peer_logs / "downgraded.log", chunk_size=CHUNK, port=port):
            ready_again(client)
            assert not speaks_2(client)
            assert [] == user.fetch(IMAGE_X)
            assert [] == user.fetch(IMAGE_Y)
            assert user.store(30.0, IMAGE_X) == 4
            assert [30.0, 31.0, 32.0, 33.0] == user.fetch(IMAGE_X)


def speaks_2(client: CacheClient) -> bool:
    """Whether the session is one of wire protocol 2."""
    return client.established is not None


# ---- older servers


def test_0_5_5_is_tunnelled_to_like_0_5_6(peer_logs: Path) -> None:
    """It answers the probe; identities are apart, and equal requests hit."""
    space = new_space()
    with RealServer(peer_logs / "server-0.5.5.log", release="0.5.5") as server, tunnelled(server, space) as user:
        assert user.store(1.0, IMAGE_X, CacheSalt("a/b")) == 4
        assert [1.0, 2.0, 3.0, 4.0] == user.fetch(IMAGE_X, CacheSalt("a/b"))
        assert [] == user.fetch(IMAGE_Y, CacheSalt("a/b"))
        assert [] == user.fetch(IMAGE_X)
        assert server.alive


@pytest.mark.parametrize("release", ["0.5.0", "0.5.3"])
def test_a_server_that_does_not_answer_the_probe_is_never_tunnelled_to(peer_logs: Path, release: str) -> None:
    """Whatever the policy: misses, nothing but probes sent, and the server lives on."""
    space = new_space()
    keys = chunk_keys(space, PROMPT)
    policies: list[ForeignPolicy] = [TunnelPolicy(space), bypass, refuse]
    with RealServer(peer_logs / f"server-{release}.log", release=release) as server:
        for policy in policies:
            patience = Patience(answer=0.3)
            with CacheClient(server.address, space, on_foreign=policy, patience=patience) as client:
                assert client.lookup("r", keys, timeout=2.0).failure is not None
                assert client.store("r", keys, [chunk(1.0)] * 4, timeout=2.0).failure is not None
                assert client.capabilities is None
        assert server.alive
        assert server.wait_ready() is server
