"""The versioned wire and storage of the cache: wire protocol 2 without sockets, then server and clients over ZMQ.

Imports go one way: ``compat -> protocol_v2 -> keying``; nothing here imports ``compat``. The wire, from the bottom up:

    codes, versions   every number on the wire, and the rule that accepts it
    errors            what is refused or fails, by type
    frames, body      a message as frames; a body as msgpack
    tensors           tensors as frames
    shared_memory     memory that two processes share; ``ranges`` allocates it
    hello             hello, welcome, refusal: frozen for ever
    wire_keys         keys and shards: what carries identity
    messages          requests and replies
    identity          spaces and extra keys between wire and keying
    negotiation       what two peers agree on
    state             every change of state, in one table
    events            what a connection tells and is told
    connection        the protocol, sans-IO: client_connection, server_connection

The client: ``capability`` asks whom we talk to, ``session_keeper`` keeps a session (sans-IO; ``foreign`` is what may
be injected), ``client_thread`` owns the socket, ``client_sharing`` its shared memory, ``operations`` are the calls
and ``results`` what they give, ``client`` and ``aio`` run them. The server: ``storage`` and ``tiers`` hold values,
``cache`` is the core, ``service`` answers messages (sans-IO), by ``chunk_requests`` what is about chunks and by
``replies`` each once, ``sharing`` is its shared memory, ``server`` owns the sockets. For routers: ``chunk_events``
and ``event_log`` (sans-IO) say which chunks can be hit, ``event_feed`` owns the sockets, ``cache_news`` is what a
server tells, ``chunk_view`` what a subscriber makes of it. Importing this package imports no zmq, torch or numpy; the
names at its end do when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

# for routers: which chunks can be hit
from protocol_v2.chunk_events import ChunkRemoved as ChunkRemoved
from protocol_v2.chunk_events import ChunksHeld as ChunksHeld
from protocol_v2.chunk_events import ChunkStored as ChunkStored
from protocol_v2.chunk_events import EventError as EventError
from protocol_v2.chunk_events import SpaceCleared as SpaceCleared
from protocol_v2.chunk_events import SpaceDescribed as SpaceDescribed
from protocol_v2.chunk_view import ChunkView as ChunkView

# the protocol, sans-IO
from protocol_v2.client_connection import ClientConnection as ClientConnection

# numbers
from protocol_v2.codes import Code as Code
from protocol_v2.codes import ErrorCode as ErrorCode
from protocol_v2.codes import MissReason as MissReason
from protocol_v2.codes import RefusalCode as RefusalCode
from protocol_v2.connection import Connection as Connection

# refusals and failures
from protocol_v2.errors import ClientClosedError as ClientClosedError
from protocol_v2.errors import HandshakeError as HandshakeError
from protocol_v2.errors import LocalProtocolError as LocalProtocolError
from protocol_v2.errors import LocalTypeError as LocalTypeError
from protocol_v2.errors import NegotiationRefusedError as NegotiationRefusedError
from protocol_v2.errors import ProtocolError as ProtocolError
from protocol_v2.errors import QueueFullError as QueueFullError
from protocol_v2.errors import RemoteProtocolError as RemoteProtocolError
from protocol_v2.errors import RequestTimeoutError as RequestTimeoutError
from protocol_v2.errors import ServerError as ServerError
from protocol_v2.errors import ServerUnavailableError as ServerUnavailableError
from protocol_v2.errors import SessionLostError as SessionLostError
from protocol_v2.errors import SpaceMismatchError as SpaceMismatchError
from protocol_v2.errors import TensorError as TensorError
from protocol_v2.errors import UnsupportedServerError as UnsupportedServerError
from protocol_v2.event_log import Lost as Lost
from protocol_v2.event_log import Restarted as Restarted
from protocol_v2.foreign import Tunnel as Tunnel

# negotiation
from protocol_v2.hello import Limits as Limits

# what a call names and gives
from protocol_v2.identity import keys_of_digests as keys_of_digests
from protocol_v2.identity import keys_of_tokens as keys_of_tokens
from protocol_v2.keeper_actions import Phase as Phase
from protocol_v2.negotiation import Agreement as Agreement
from protocol_v2.negotiation import ClientTerms as ClientTerms
from protocol_v2.negotiation import Disagreement as Disagreement
from protocol_v2.negotiation import Offer as Offer
from protocol_v2.negotiation import ServerTerms as ServerTerms
from protocol_v2.negotiation import answer_hello as answer_hello
from protocol_v2.negotiation import negotiate as negotiate
from protocol_v2.results import ClearResult as ClearResult
from protocol_v2.results import EndSessionResult as EndSessionResult
from protocol_v2.results import LookupResult as LookupResult
from protocol_v2.results import PrefetchResult as PrefetchResult
from protocol_v2.results import ReleaseResult as ReleaseResult
from protocol_v2.results import RetrievedChunk as RetrievedChunk
from protocol_v2.results import RetrieveResult as RetrieveResult
from protocol_v2.results import StoreResult as StoreResult
from protocol_v2.server_connection import ServerConnection as ServerConnection
from protocol_v2.session_keeper import Patience as Patience
from protocol_v2.state import State as State
from protocol_v2.tensors import TensorMeta as TensorMeta
from protocol_v2.tensors import to_numpy as to_numpy
from protocol_v2.wire_keys import Keys as Keys
from protocol_v2.wire_keys import Shard as Shard

# sockets: imported when first used
if TYPE_CHECKING:
    from protocol_v2.aio import AsyncCacheClient as AsyncCacheClient
    from protocol_v2.client import CacheClient as CacheClient
    from protocol_v2.event_feed import EventSubscriber as EventSubscriber
    from protocol_v2.probing import ProbeReport as ProbeReport
    from protocol_v2.probing import probe as probe
    from protocol_v2.server import CacheServer as CacheServer

_WITH_SOCKETS = {
    "AsyncCacheClient": "protocol_v2.aio",
    "CacheClient": "protocol_v2.client",
    "CacheServer": "protocol_v2.server",
    "EventSubscriber": "protocol_v2.event_feed",
    "ProbeReport": "protocol_v2.probing",
    "probe": "protocol_v2.probing",
}

__all__ = [
    "Agreement",
    "AsyncCacheClient",
    "CacheClient",
    "CacheServer",
    "ChunkRemoved",
    "ChunkStored",
    "ChunkView",
    "ChunksHeld",
    "ClearResult",
    "ClientClosedError",
    "ClientConnection",
    "ClientTerms",
    "Code",
    "Connection",
    "Disagreement",
    "EndSessionResult",
    "ErrorCode",
    "EventError",
    "EventSubscriber",
    "HandshakeError",
    "Keys",
    "Limits",
    "LocalProtocolError",
    "LocalTypeError",
    "LookupResult",
    "Lost",
    "MissReason",
    "NegotiationRefusedError",
    "Offer",
    "Patience",
    "Phase",
    "PrefetchResult",
    "ProbeReport",
    "ProtocolError",
    "QueueFullError",
    "RefusalCode",
    "ReleaseResult",
    "RemoteProtocolError",
    "RequestTimeoutError",
    "Restarted",
    "RetrieveResult",
    "RetrievedChunk",
    "ServerConnection",
    "ServerError",
    "ServerTerms",
    "ServerUnavailableError",
    "SessionLostError",
    "Shard",
    "SpaceCleared",
    "SpaceDescribed",
    "SpaceMismatchError",
    "State",
    "StoreResult",
    "TensorError",
    "TensorMeta",
    "Tunnel",
    "UnsupportedServerError",
    "answer_hello",
    "keys_of_digests",
    "keys_of_tokens",
    "negotiate",
    "probe",
    "to_numpy",
]


def __getattr__(name: str) -> Any:
    """Import what owns sockets when it is first used."""
    module = _WITH_SOCKETS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
