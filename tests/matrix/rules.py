"""What must come out of every cell, written once, from principles and without deriving a key.

A request that was written is hit by one that is read as far as three things hold:

    1. both clients have a session, and in one namespace: LMCache's keys, schema 2, or schema 2 through a tunnel;
    2. what was written is still there: nothing outlives a server that was replaced;
    3. the two requests are equal in what their clients' keys can express of them, chunk by chunk from the first on.

A hit is *wrong* where it goes further than the chunks whose KV is the same for both requests.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache
from typing import NamedTuple

from compat.v1.generations import V1Generation
from tests.matrix.requests import CHUNK, N_CHUNKS, MatrixRequest, leading_equal, shared_chunks


class Client(StrEnum):
    """Who writes or reads."""

    OURS = "ours"
    """Our client with the policy tunnel, which is the default for a server that does not know `extra_keys/2`."""
    OURS_BYPASS = "ours, policy bypass"
    OURS_REFUSE = "ours, policy refuse"
    RAW = "LMCache raw"
    INT16 = "LMCache int16"
    SHA31 = "LMCache sha31"
    FIELDS = "LMCache with unknown fields"
    """Sends the identity in fields that are not in LMCache's keys, and raw placeholders."""


GENERATIONS = {
    Client.RAW: V1Generation.RAW,
    Client.INT16: V1Generation.INT16,
    Client.SHA31: V1Generation.SHA31,
    Client.FIELDS: V1Generation.RAW,
}
"""How each v1 client keys items."""


class Stand(NamedTuple):
    """One server as far as clients can tell.

    Attributes:
        tells: whether it answers the question for its capabilities.
        keys_extras: whether it lists `extra_keys/2`.
        serves_v1: whether it serves v1 clients.
    """

    tells: bool
    keys_extras: bool
    serves_v1: bool


SPEAKS_2 = Stand(tells=True, keys_extras=True, serves_v1=False)
SPEAKS_BOTH = Stand(tells=True, keys_extras=True, serves_v1=True)
SPEAKS_V1 = Stand(tells=True, keys_extras=False, serves_v1=True)
SILENT = Stand(tells=False, keys_extras=False, serves_v1=True)


class Server(Enum):
    """Who serves, and who served before it.

    Args:
        title: for people.
        before: who stood on the address when the clients came.
        now: who stands there when the reader reads.
        written_before: whether the writer wrote to the former.
    """

    OURS = ("ours", SPEAKS_2, SPEAKS_2, False)
    OURS_WITH_FRONT = ("ours with v1 front", SPEAKS_BOTH, SPEAKS_BOTH, False)
    LMCACHE_0_5_6 = ("LMCache 0.5.6", SPEAKS_V1, SPEAKS_V1, False)
    LMCACHE_0_5_5 = ("LMCache 0.5.5", SPEAKS_V1, SPEAKS_V1, False)
    LMCACHE_0_5_3 = ("LMCache 0.5.3", SILENT, SILENT, False)
    DOWNGRADED_KEPT = ("ours, then LMCache 0.5.6; written before", SPEAKS_BOTH, SPEAKS_V1, True)
    DOWNGRADED = ("ours, then LMCache 0.5.6; written after", SPEAKS_BOTH, SPEAKS_V1, False)
    UPGRADED_KEPT = ("LMCache 0.5.6, then ours with v1 front; written before", SPEAKS_V1, SPEAKS_BOTH, True)
    UPGRADED = ("LMCache 0.5.6, then ours with v1 front; written after", SPEAKS_V1, SPEAKS_BOTH, False)

    def __init__(self, title: str, before: Stand, now: Stand, written_before: bool) -> None:
        self.title = title
        self.before = before
        self.now = now
        self.written_before = written_before

    @property
    def replaced(self) -> bool:
        """Whether one was put in the other's place."""
        return self.before is not self.now

    @property
    def written_to(self) -> Stand:
        """Who stands there when the writer writes."""
        return self.before if self.written_before else self.now


class Speech(StrEnum):
    """How a client and a server speak; also the namespace of what is kept."""

    NATIVE = "wire protocol 2"
    TUNNEL = "tunnel"
    V1 = "LMCache's protocol"
    NONE = "not at all"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reader got.

    Attributes:
        bypass: it had no cache to ask.
        hit: leading chunks that it was given.
        wrong: whether one of them is not what it would have computed.
    """

    bypass: bool = False
    hit: int = 0
    wrong: bool = False

    def __str__(self) -> str:
        if self.bypass:
            return "bypass"
        return f"{'wrong ' if self.wrong else ''}hit of {self.hit}" if self.hit else "miss"


BYPASS = Outcome(bypass=True)
MISS = Outcome()


def is_ours(client: Client) -> bool:
    """Whether a client is one of ours."""
    return client not in GENERATIONS


def speech(client: Client, stand: Stand) -> Speech:
    """How a client speaks to a server, or that it goes without."""
    if not is_ours(client):
        return Speech.V1 if stand.serves_v1 else Speech.NONE
    if stand.keys_extras:
        return Speech.NATIVE
    if stand.tells and client is Client.OURS:
        return Speech.TUNNEL
    return Speech.NONE


def expected(writer: Client, reader: Client, server: Server, written: MatrixRequest, read: MatrixRequest) -> Outcome:
    """What the reader of a request must get from a server to which another one was written."""
    wrote, reads = speech(writer, server.written_to), speech(reader, server.now)
    if reads is Speech.NONE:
        return BYPASS
    if wrote is not reads or (server.replaced and server.written_before):
        return MISS
    if server.now.keys_extras and Client.FIELDS in {writer, reader}:
        return MISS  # what we do not know may say who asks, so it is refused
    hit = leading_equal(expressed(writer, written), expressed(reader, read))
    return Outcome(hit=hit, wrong=hit > shared_chunks(written, read))


@cache
def expressed(client: Client, request: MatrixRequest) -> tuple[object, ...]:
    """What a client's key of each chunk can say of a request."""
    if is_ours(client):
        return request.meanings
    seen: list[object] = list(request.tokens)
    for item in request.items:
        for position in range(item.offset, item.offset + item.length):
            if GENERATIONS[client] is V1Generation.INT16:
                seen[position] = item.identifier[-4:]
            elif GENERATIONS[client] is V1Generation.SHA31:
                seen[position] = (item.identifier, position - item.offset)
    return tuple((tuple(seen[:stop]), request.salt) for stop in range(CHUNK, N_CHUNKS * CHUNK + 1, CHUNK))
