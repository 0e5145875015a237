"""LMCache's server as a dictionary, in frames: what 0.5.5 and 0.5.6 do with the operations of engine-driven clients.

Held to the real server by `tests/interop/test_migration_matrix.py`, cell by cell. Its faults are kept: an unknown
field of a key is dropped; what a request id hashed to first stays, whatever tokens come with it later; and what cannot
be read is not answered. A release before 0.5.5 does not know the number that 0.5.5 gave to `get_experimental`.
"""

from collections.abc import Sequence

import msgspec

from compat.v1 import mp_chunk_hashes
from compat.v1.operations import V1Key, V1Operation, V1Registered, V1RetrievePrepared, V1StorePrepared
from compat.v1.pickled_tensors import PickledTensor, read_tensors, write_tensors
from compat.v1.wire import V1Request, V1WireError, decode_request, encode_answer
from tests.matrix.requests import CHUNK

KEY_FIELDS = frozenset(V1Key.__struct_fields__)
GET_EXPERIMENTAL = b"\x20"


class LmcacheModel:
    """One server.

    Args:
        tells: whether it answers the question for its capabilities.
    """

    def __init__(self, *, tells: bool = True) -> None:
        self._tells = tells
        self._values: dict[tuple[str, str, int, bytes], PickledTensor] = {}
        self._hashes: dict[str, list[bytes]] = {}
        self._results: dict[str, int] = {}
        #: model, salt and token ids of every keyed request, by its request id
        self.seen: dict[str, set[tuple[str, str, tuple[int, ...]]]] = {}

    def deliver(self, _identity: bytes, frames: Sequence[bytes], _now: float) -> list[list[bytes]]:
        """Answers to one message."""
        if frames[1] == GET_EXPERIMENTAL and not self._tells:
            return []
        request = _decoded(frames) or _decoded([*frames[:2], *map(_without_unknown_fields, frames[2:])])
        if request is None:
            return []
        value = self._answer(request.operation, *request.payloads)
        return [[bytes(frame) for frame in encode_answer(request, value)]]

    def _answer(self, operation: V1Operation, *payloads: object) -> object:
        match operation, payloads:
            case V1Operation.GET_EXPERIMENTAL, _:
                return ["kv_event_stream"]
            case V1Operation.GET_CHUNK_SIZE, _:
                return CHUNK
            case V1Operation.REGISTER_ENGINE_DRIVEN, _:
                return V1Registered()
            case (V1Operation.PING, _):
                return True
            case V1Operation.LOOKUP, (V1Key() as key, _):
                self._note(key)
                self._results[key.request_id] = self._held(key)
            case V1Operation.WAIT_PREFETCH_STATUS, (str() as request_id, _):
                return self._results.pop(request_id, 0)
            case V1Operation.PREPARE_STORE, (V1Key() as key, _):
                self._note(key)
                return V1StorePrepared()
            case V1Operation.COMMIT_STORE, (V1Key() as key, _, memoryview() as data):
                self._note(key)
                for digest, tensor in zip(self._range(key), read_tensors(data), strict=True):
                    owned = PickledTensor(tensor.dtype, tensor.shape, bytes(tensor.data))
                    self._values.setdefault(_place(key, digest), owned)
                return True
            case V1Operation.PREPARE_RETRIEVE, (V1Key() as key, _):
                self._note(key)
                found = [self._values.get(_place(key, digest)) for digest in self._range(key)]
                there = [one for one in found if one is not None]
                if len(there) < len(found):
                    return V1RetrievePrepared(success=False)
                return V1RetrievePrepared(success=True, data=memoryview(write_tensors(there)))
            case V1Operation.COMMIT_RETRIEVE, _:
                return True
            case V1Operation.END_SESSION, (str() as request_id,):
                self._hashes.pop(request_id, None)
        return None

    def _note(self, key: V1Key) -> None:
        self.seen.setdefault(key.request_id, set()).add((key.model_name, key.cache_salt, key.token_ids[: key.end]))

    def _held(self, key: V1Key) -> int:
        """Leading chunks that every rank has. A lookup hashes its own tokens, whatever its request id is known for."""
        for place, digest in enumerate(mp_chunk_hashes(key.token_ids[: key.end], CHUNK)):
            if any((*_name(key), rank, digest) not in self._values for rank in range(key.world_size)):
                return place
        return key.end // CHUNK

    def _range(self, key: V1Key) -> list[bytes]:
        """Hashes of a transfer's chunks: those that its request id is known for, then those of its tokens."""
        known = self._hashes.setdefault(key.request_id, [])
        known += mp_chunk_hashes(key.token_ids[: key.end], CHUNK)[len(known) :]
        return known[key.start // CHUNK : key.end // CHUNK]


def _decoded(frames: Sequence[bytes]) -> V1Request | None:
    try:
        return decode_request(frames)
    except V1WireError:
        return None


def _name(key: V1Key) -> tuple[str, str]:
    return key.model_name, key.cache_salt


def _place(key: V1Key, digest: bytes) -> tuple[str, str, int, bytes]:
    assert key.worker_id is not None
    return (*_name(key), key.worker_id, digest)


def _without_unknown_fields(frame: bytes) -> bytes:
    """A payload as the release reads it: of a key, the fields that it knows."""
    if frame[:1] and (0x80 <= frame[0] <= 0x8F or frame[0] in {0xDE, 0xDF}):
        fields = msgspec.msgpack.decode(frame)
        if "token_ids" in fields:
            return msgspec.msgpack.encode({name: value for name, value in fields.items() if name in KEY_FIELDS})
    return frame
