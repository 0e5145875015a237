"""`Faults`: why chunks that were once there are not hits any more, for as long as it is remembered.

A damaged file is set aside and its chunk is then simply absent; the next lookup should still say why. Bounded: the
oldest reasons are forgotten, and read as absent.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from protocol_v2.codes import MissReason
from protocol_v2.storage.names import ROOT_PREFIX_BYTES

if TYPE_CHECKING:
    from protocol_v2.storage.names import ChunkId, ObjectName


class Faults:
    """Reasons by chunk, as far as a name tells it: by root prefix and key.

    Args:
        limit: chunks that are remembered.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: OrderedDict[tuple[bytes, bytes], MissReason] = OrderedDict()

    def reason(self, chunk: ChunkId) -> MissReason:
        """Why a chunk that is not there is not there."""
        root, key = chunk
        return self._reasons.get((root[:ROOT_PREFIX_BYTES], key), MissReason.ABSENT)

    def note(self, name: ObjectName, reason: MissReason) -> None:
        """An object of this name was there and cannot be used."""
        place = (name.root_prefix, name.key)
        self._reasons[place] = reason
        self._reasons.move_to_end(place)
        if len(self._reasons) > self._limit:
            self._reasons.popitem(last=False)

    def forget(self, chunk: ChunkId) -> None:
        """The chunk was stored anew."""
        root, key = chunk
        self._reasons.pop((root[:ROOT_PREFIX_BYTES], key), None)
