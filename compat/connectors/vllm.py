"""`TunnellingConnector` for vLLM: `ExtraKeysConnector`, with the tunnel to v1 servers.

Load it with ``kv_connector="TunnellingConnector"`` and ``kv_connector_module_path="compat.connectors.vllm"``.
Settings are those of `ExtraKeysConnector`; the chunk size must be the server's.

Scheduler and worker of one process share one policy for each space, and through it the leases of what the scheduler
looked up. Where vLLM runs workers in processes of their own (more than one worker, or a data parallel engine), each
looks up its own rank's part again, by the keys that come with the load: one round trip more for each load.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from compat.v1.server_policy import TunnelPolicy
from protocol_v2.connectors.vllm import ExtraKeysConnector

if TYPE_CHECKING:
    from keying import KeySpace
    from protocol_v2.foreign import ForeignPolicy

_LOCK: Final = threading.Lock()
_POLICIES: Final[dict[bytes, TunnelPolicy]] = {}


class TunnellingConnector(ExtraKeysConnector):
    """`ExtraKeysConnector` that tunnels to servers which do not know `extra_keys/2`."""

    def foreign_policy(self, space: KeySpace) -> ForeignPolicy:
        """The policy of this process for a space."""
        with _LOCK:
            return _POLICIES.setdefault(space.root, TunnelPolicy(space))
