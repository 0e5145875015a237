"""What a client does with a server that answered the probe and does not know `extra_keys/2`: a v1 server.

    tunnel     key on the full identity, through the tokens (`tunnel_session`); the default
    bypass     do without a cache, and look again from time to time
    refuse     the same, but every call raises: for those who would rather stop than run without

Hand a policy to a client as ``on_foreign``. A server that does not answer the probe at all is never tunnelled to,
whatever the policy: such a server may number its operations otherwise. All of this is asked anew on every connection,
so a server that was upgraded under a running client is used by wire protocol 2, and one that was put in place of a v2
server is met as what it is.

Source: docs/spec/v1-formats.md, "Tunnel".
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import TYPE_CHECKING

from compat.tunnel import MAX_CHUNK_SIZE, MIN_CHUNK_SIZE
from compat.v1.tunnel_leases import LeaseBook
from compat.v1.tunnel_objects import ChunkExpander
from compat.v1.tunnel_session import V1Tunnel
from protocol_v2.codes import ErrorCode
from protocol_v2.errors import ServerError, UnsupportedServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keying import KeySpace
    from protocol_v2.errors import ProtocolError

log = logging.getLogger(__name__)


class TunnelPolicy:
    """Tunnels to v1 servers. Clients of one process that share a policy share its leases.

    Args:
        space: of all keys. Its chunk size must be the server's, and at least 9.
    """

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._pid = os.getpid()
        self._boot_id = os.urandom(16)
        self._expander = ChunkExpander(space.chunk_size)
        self._leases = LeaseBook()
        self._counters: Counter[str] = Counter()

    def __call__(self, names: frozenset[str]) -> V1Tunnel | ProtocolError:
        """A tunnel to a server that listed `names`; an error where the space cannot be tunnelled."""
        size = self._space.chunk_size
        if not MIN_CHUNK_SIZE <= size <= MAX_CHUNK_SIZE:
            return UnsupportedServerError(
                f"a v1 server, and chunks of {size} tokens, which hold no key ({MIN_CHUNK_SIZE} to {MAX_CHUNK_SIZE} "
                "do): it is bypassed"
            )
        if self._pid != os.getpid():  # ids and leases of the parent are the parent's
            self._pid, self._boot_id, self._leases = os.getpid(), os.urandom(16), LeaseBook()
        self._counters["sessions"] += 1
        log.warning(
            "the server lists %s and not extra_keys/2: it is spoken to through the tunnel, so its own hash over tokens "
            "is what keeps requests apart; upgrade it",
            sorted(names)[:8],
        )
        return V1Tunnel(
            self._space,
            expander=self._expander,
            leases=self._leases,
            boot_id=self._boot_id,
            count=self._count,
        )

    def facts(self) -> Mapping[str, int]:
        """Counters since the start; names begin with ``tunnel.``."""
        return {f"tunnel.{name}": count for name, count in sorted(self._counters.items())}

    def _count(self, name: str) -> None:
        self._counters[name] += 1


def bypass(names: frozenset[str]) -> None:
    """Do without a v1 server: lookups miss and stores are dropped, with `UnsupportedServerError` as the failure."""
    log.debug("a server that lists %s is bypassed", sorted(names)[:8])


def refuse(names: frozenset[str]) -> ServerError:
    """Raise from every call while the server is a v1 server."""
    return ServerError(
        ErrorCode.UNSUPPORTED,
        f"lists {sorted(names)[:8]} and not extra_keys/2, and the policy is to refuse such servers; upgrade it, or "
        "choose the policy tunnel or bypass",
        retriable=False,
    )
