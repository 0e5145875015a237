"""Where the v1 front keeps what v1 clients store: keys as LMCache derives them, under roots of their own.

A chunk's key is LMCache's chunk hash, 32 bytes, unchanged. What else makes an LMCache object key is the namespace or
the shard: model and salt are in the root, the rank (LMCache's `kv_rank`) is the shard, the object group is always 0.

    root    MARK || first 28 bytes of SHA-256( text("lmcache-0.5/front") || text(model) || text(salt)
                                               || u32(chunk_size) || text(dtype) )

No v2 request can meet these entries: a session's root is a SHA-256 over another domain tag. The chunk size and the
element type are not in LMCache's keys; here they are, so that a server that was restarted with others misses.
`MARK` lets a clear from a v1 client, and people who list a store, tell v1 entries from the rest.

Source: docs/spec/v1-formats.md, "Front".
"""

from __future__ import annotations

import hashlib
from typing import Final

from keying.encoding import U32, text

MARK: Final = b"lmc5"
"""First bytes of the root of every v1 namespace. A schema-2 root begins so once in 2**32 spaces, and then a v1 client's
clear forgets that space too: a miss, never a wrong hit."""

_TAG: Final = "lmcache-0.5/front"
_DIGEST_BYTES: Final = 32 - len(MARK)


def namespace_root(model: str, salt: str, *, chunk_size: int, dtype: str) -> bytes:
    """The root that the entries of one model and salt are kept under.

    Args:
        model: LMCache's model name.
        salt: LMCache's `cache_salt`; "" for none.
        chunk_size: tokens of a chunk.
        dtype: torch's name of the element type.

    Returns:
        32 bytes.
    """
    preimage = text(_TAG) + text(model) + text(salt) + U32.pack(chunk_size) + text(dtype)
    return MARK + hashlib.sha256(preimage).digest()[:_DIGEST_BYTES]


def is_namespace_root(root: bytes) -> bool:
    """Whether a root is one of these."""
    return root.startswith(MARK)
