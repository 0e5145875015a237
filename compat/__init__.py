"""Everything about older schemas: v1 producers, v1 formats, and the calendar of their removal.

`compat` imports `protocol_v2` and `keying`; neither of them imports `compat`.

    deprecations     the warning, and the row that each entry point carries
    producers        apply_mm_hashes_to_token_ids, mm_hash_to_token_values (deprecated)
    tunnel           a schema-2 key as token ids, for servers that key on tokens alone
    token_database   ChunkedTokenDatabase, SegmentTokenDatabase: process_tokens as LMCache's callers know it
    audit, purge     what a folder holds by schema, and retiring a part of it
    redis_listing    the same of a database of Redis or Valkey
    v1               one module for each format of LMCache 0.5.x; of them, re-exported here:
                     V1Front, which lets unmodified v1 clients use a v2 server (``CacheService(front=...)``), and
                     TunnelPolicy, bypass, refuse, what a v2 client does with a v1 server (``on_foreign=``)

`REMOVALS` is the removal table: which entry point warns since which release, which release is without it, and what to
use instead. Nothing is removed that did not warn first.
"""

from typing import Final

from compat.deprecations import Deprecation as Deprecation
from compat.deprecations import ExtraKeysDeprecationWarning as ExtraKeysDeprecationWarning
from compat.deprecations import deprecation_of as deprecation_of
from compat.errors import CompatError as CompatError
from compat.errors import CompatTypeError as CompatTypeError
from compat.errors import SpanError as SpanError
from compat.errors import SpanTypeError as SpanTypeError
from compat.producers import SpanHazardWarning as SpanHazardWarning
from compat.producers import apply_mm_hashes_to_token_ids as apply_mm_hashes_to_token_ids
from compat.producers import mm_hash_to_token_values as mm_hash_to_token_values
from compat.token_database import ChunkedTokenDatabase as ChunkedTokenDatabase
from compat.token_database import SegmentTokenDatabase as SegmentTokenDatabase
from compat.token_database import TokenDatabaseKey as TokenDatabaseKey
from compat.tunnel import tunnel_tokens as tunnel_tokens
from compat.v1.front import V1Front as V1Front
from compat.v1.server_policy import TunnelPolicy as TunnelPolicy
from compat.v1.server_policy import bypass as bypass
from compat.v1.server_policy import refuse as refuse

REMOVALS: Final = tuple(deprecation_of(entry) for entry in (apply_mm_hashes_to_token_ids, mm_hash_to_token_values))
"""The removal table."""

__all__ = [
    "REMOVALS",
    "ChunkedTokenDatabase",
    "CompatError",
    "CompatTypeError",
    "Deprecation",
    "ExtraKeysDeprecationWarning",
    "SegmentTokenDatabase",
    "SpanError",
    "SpanHazardWarning",
    "SpanTypeError",
    "TokenDatabaseKey",
    "TunnelPolicy",
    "V1Front",
    "apply_mm_hashes_to_token_ids",
    "bypass",
    "deprecation_of",
    "mm_hash_to_token_values",
    "refuse",
    "tunnel_tokens",
]
