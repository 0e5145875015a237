"""The versioned wire and storage of the cache: wire protocol 2 without sockets, then server and clients over ZMQ.

Imports go one way: ``compat -> protocol_v2 -> keying``; nothing here imports ``compat``. Inside, from the bottom up:

    codes, versions   every number on the wire, and the rule that accepts it
    errors            what is refused or fails, by type
    frames, body      a message as frames; a body as msgpack
    tensors           tensors as frames
    hello             hello, welcome, refusal: frozen for ever
    wire_keys         keys and shards: what carries identity
    messages          requests and replies
    identity          spaces and extra keys between wire and keying
    negotiation       what two peers agree on
    state             every change of state, in one table
    events            what a connection tells and is told
    connection        the protocol, sans-IO: client_connection, server_connection
"""

# the protocol, sans-IO
from protocol_v2.client_connection import ClientConnection as ClientConnection

# numbers
from protocol_v2.codes import Code as Code
from protocol_v2.codes import ErrorCode as ErrorCode
from protocol_v2.codes import MissReason as MissReason
from protocol_v2.codes import RefusalCode as RefusalCode
from protocol_v2.connection import Connection as Connection

# negotiation
from protocol_v2.hello import Limits as Limits
from protocol_v2.negotiation import Agreement as Agreement
from protocol_v2.negotiation import ClientTerms as ClientTerms
from protocol_v2.negotiation import Disagreement as Disagreement
from protocol_v2.negotiation import Offer as Offer
from protocol_v2.negotiation import ServerTerms as ServerTerms
from protocol_v2.negotiation import answer_hello as answer_hello
from protocol_v2.negotiation import negotiate as negotiate
from protocol_v2.server_connection import ServerConnection as ServerConnection
from protocol_v2.state import State as State
