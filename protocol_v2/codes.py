"""Every number that names something on the wire: message codes, error codes, refusal codes, miss reasons.

All are append-only: a number that has been given a meaning keeps it for ever, a retired one is never used again, and
`tests/vectors/wire-2.json` pins them. A number that is not listed stays an `int`; it is never mapped to a neighbour.
Source: docs/spec/wire-2.md, "Codes".
"""

from __future__ import annotations

import enum
from typing import Final, TypeVar

_Registry = TypeVar("_Registry", bound=enum.IntEnum)


class Code(enum.IntEnum):
    """What a message is: the first two bytes of its header. Requests are even, the reply is the request plus one."""

    #: Client opens a session: what it can, what it will accept, its space.
    HELLO = 1
    #: Server accepts; the session stands.
    WELCOME = 2
    #: Server declines, and says what it would accept.
    REFUSAL = 3
    #: A request failed; carries an `ErrorCode`.
    ERROR = 4

    #: How many leading chunks does every shard hold? May take a lease.
    LOOKUP = 16
    LOOKUP_REPLY = 17
    #: Tensors of a leased range of chunks, for one shard.
    RETRIEVE = 18
    RETRIEVE_REPLY = 19
    #: Tensors of a range of chunks, from one shard.
    STORE = 20
    STORE_REPLY = 21
    #: Bring chunks from slower tiers nearer.
    PREFETCH = 22
    PREFETCH_REPLY = 23
    #: Give back a part of a lease, or all of it.
    RELEASE = 24
    RELEASE_REPLY = 25
    #: The request of the engine is over.
    END_SESSION = 26
    END_SESSION_REPLY = 27
    #: Is the loop that does the work alive?
    PING = 28
    PING_REPLY = 29
    #: Facts for people and tools.
    STATUS = 30
    STATUS_REPLY = 31
    #: Forget entries.
    CLEAR = 32
    CLEAR_REPLY = 33
    #: Both are on one host: here is my shared memory, which is yours?
    ATTACH = 34
    ATTACH_REPLY = 35


HANDSHAKE_CODES: Final = frozenset({Code.HELLO, Code.WELCOME, Code.REFUSAL})
REQUEST_CODES: Final = frozenset(code for code in Code if code >= Code.LOOKUP and code % 2 == 0)
REPLY_CODES: Final = frozenset(code for code in Code if code >= Code.LOOKUP and code % 2 == 1)


class ErrorCode(enum.IntEnum):
    """Why one request failed. `RETRIABLE` says which are worth the same request again."""

    #: Frames, header or body break the layout, or a value is of a wrong type or out of bounds.
    MALFORMED = 1
    #: The header is readable, the message code is none that the agreed wire version has.
    UNKNOWN_CODE = 2
    #: A cap on header, frames, payload or chunks is passed.
    TOO_LARGE = 3
    #: The message belongs to a session that the receiver does not have (any more): say hello again.
    SESSION_UNKNOWN = 4
    #: Tokens, extra keys or digests are not a valid identity.
    INVALID_IDENTITY = 5
    #: An extra key of a kind that the agreed schema and features do not have.
    UNKNOWN_KIND = 6
    #: The session id is bound to another identity.
    IDENTITY_MISMATCH = 7
    #: A keyed request in a session that was opened without a space.
    NO_SPACE = 8
    #: The lease is not known: expired, released, or of another client.
    LEASE_UNKNOWN = 9
    #: A table or queue of the server is full.
    BUSY = 10
    #: The request's deadline passed before it was done.
    DEADLINE_EXCEEDED = 11
    #: The server failed; nothing was served.
    INTERNAL = 12
    #: The server is going away.
    SHUTTING_DOWN = 13
    #: The message is not allowed in this direction or state; the connection is of no further use.
    UNEXPECTED = 14
    #: The request is understood and not supported by this server.
    UNSUPPORTED = 15
    #: Shared memory cannot be attached, or a range of it is not what was announced: send it inline.
    UNSHARED = 16


RETRIABLE: Final = frozenset(
    {ErrorCode.SESSION_UNKNOWN, ErrorCode.BUSY, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.SHUTTING_DOWN}
)


class RefusalCode(enum.IntEnum):
    """Why a session was not opened."""

    #: No wire version that both speak and both floors allow.
    NO_COMMON_WIRE = 1
    #: No key schema that both derive and both floors allow.
    NO_COMMON_SCHEMA = 2
    #: A feature that one side requires is not one that both have.
    FEATURE_REQUIRED = 3
    #: The server is pinned to spaces, and the client's is none of them.
    SPACE_MISMATCH = 4
    #: The space is not one that the key schema allows, or it has a field the server does not know.
    SPACE_INVALID = 5
    #: The hello breaks the frozen layout.
    HELLO_MALFORMED = 6
    #: The floor has a requirement that the server does not know, so it cannot keep it.
    FLOOR_UNKNOWN = 7
    #: The server has no room for one more peer.
    BUSY = 8
    #: The server is going away.
    SHUTTING_DOWN = 9
    #: Said by the client: the welcome chose what was not offered, or breaks the frozen layout.
    WELCOME_INVALID = 10
    #: Said by the client: the server derives another root from the same space.
    ROOT_MISMATCH = 11


class MissReason(enum.IntEnum):
    """Why the first chunk that is not a hit is not one."""

    #: Nothing under that name.
    ABSENT = 1
    #: An object of a storage schema above the reader's.
    SCHEMA_TOO_NEW = 2
    #: An object of a storage schema that the reader has retired.
    SCHEMA_RETIRED = 3
    #: The envelope is truncated, foreign or breaks its layout.
    ENVELOPE_INVALID = 4
    #: The envelope names another root, key or shard than was asked for.
    IDENTITY_MISMATCH = 5
    #: The bytes are not the ones that were written.
    CHECKSUM = 6


def error_code(value: int) -> ErrorCode | int:
    """The member for a number from the wire, or the number itself if this code does not know it."""
    return _known(ErrorCode, value)


def refusal_code(value: int) -> RefusalCode | int:
    """The member for a number from the wire, or the number itself if this code does not know it."""
    return _known(RefusalCode, value)


def miss_reason(value: int) -> MissReason | int:
    """The member for a number from the wire, or the number itself if this code does not know it."""
    return _known(MissReason, value)


def code_name(value: int, registry: type[enum.IntEnum] = Code) -> str:
    """A readable name for a number: `LOOKUP`, or `Code 99` when the registry has none."""
    known = registry._value2member_map_.get(value)
    return known.name if isinstance(known, registry) else f"{registry.__name__} {value}"


def _known(registry: type[_Registry], value: int) -> _Registry | int:
    try:
        return registry(value)
    except ValueError:
        return value
