"""The operations of LMCache 0.5.5 and 0.5.6: names, numbers, payloads, answers.

An operation is sent as its number or as its name. Numbers are frozen in the release; 11 is retired; operations without
one are newer and go by name. 0.5.3 and 0.5.4 number `get_experimental` otherwise, and 0.5.0-0.5.2 nearly all of them.

A v1 client waits, for 300 seconds by default, for an answer of the operation's own type, and there is no error answer.
So each operation has a *failure*: the value of its type that does least harm. `NO_ANSWER` is for the one that has none.

Source: docs/spec/v1-formats.md, "Wire"; LMCache 0.5.6.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from compat.errors import CompatError

MAX_TOKENS: Final = 2**21
"""Token ids in one key. A list of them is decoded into some 80 MB; the longest contexts served today are half of it."""

MAX_TEXT: Final = 4096
"""Characters of a model's name or a request id."""

MAX_SALT: Final = 128
"""Characters of a salt; the release's own bound."""

MAX_WORLD_SIZE: Final = 255
"""Workers; the release packs world size and rank into one byte each."""

_SALT_FORBIDDEN: Final = frozenset("@/\\\0")
_NIL: Final = b"\xc0"

Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Token: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]
Size: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=86_400)]
Position: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class V1Key(Struct, frozen=True, forbid_unknown_fields=True):
    r"""The key map of v1 requests. Unknown fields are refused: whatever else says who asks, it must not be dropped.

    Attributes:
        model_name: at most 4096 characters, no ``@``.
        world_size: workers, 1 to 255.
        worker_id: which of them; None in a lookup, which asks for all.
        token_ids: the prompt so far, ids in [0, 2**32).
        start: first position of the range.
        end: one past its last, ``start <= end <= len(token_ids)``.
        request_id: of the session.
        cache_salt: of the tenant, at most 128 characters, none of ``@ / \ NUL``; "" for none.
        request_configs: a map or nil, undecoded: no v1 server lets it change a key.
        num_kv_readers: workers that will retrieve; 0 from clients before 0.5.5.
    """

    model_name: Annotated[str, Meta(max_length=MAX_TEXT, pattern=r"^[^@]*$")]
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
    worker_id: Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE)] | None
    token_ids: Annotated[tuple[Token, ...], Meta(max_length=MAX_TOKENS)]
    start: Position
    end: Position
    request_id: Text
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] = ""
    request_configs: msgspec.Raw = msgspec.Raw(_NIL)
    num_kv_readers: Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)] = 0

    def __post_init__(self) -> None:
        if not self.start <= self.end <= len(self.token_ids):
            raise CompatError("range: wanted start <= end <= number of token ids")
        if self.worker_id is not None and self.worker_id >= self.world_size:
            raise CompatError("worker_id: wanted less than world_size")
        if not _SALT_FORBIDDEN.isdisjoint(self.cache_salt):
            raise CompatError("cache_salt: has a character that LMCache uses in names")
        kind = bytes(self.request_configs)[:1]
        if not (kind == _NIL or kind in {b"\xde", b"\xdf"} or 0x80 <= kind[0] <= 0x8F):
            raise CompatError("request_configs: wanted a map or nil")

    def __repr__(self) -> str:
        return (
            f"V1Key(model_name={self.model_name!r}, world_size={self.world_size}, worker_id={self.worker_id}, "
            f"{len(self.token_ids)} tokens, [{self.start}, {self.end}), request_id={self.request_id!r}, "
            f"{'salted' if self.cache_salt else 'unsalted'})"
        )


class V1Registration(Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker in engine-driven mode says about its cache.

    Attributes:
        instance_id: of the worker.
        model_name: at most 4096 characters, no ``@``.
        world_size: workers, 1 to 255.
        block_size: tokens of an engine's block.
        num_layers: layers of this worker.
        hidden_dim_size: elements of one token in one layer.
        dtype_str: torch's name of the element type.
        use_mla: whether keys and values are one latent.
        num_physical_slots: slots gathered into a chunk; None from older clients: one for each token.
    """

    instance_id: int
    model_name: Annotated[str, Meta(max_length=MAX_TEXT, pattern=r"^[^@]*$")]
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
    block_size: Size
    num_layers: Size
    hidden_dim_size: Size
    dtype_str: Annotated[str, Meta(max_length=64)]
    use_mla: bool
    num_physical_slots: Size | None = None


class V1Registered(Struct, frozen=True):
    """Answer to a registration. An empty name: tensors travel inline, as a pickle."""

    shm_name: str = ""
    pool_size: int = 0


class V1StorePrepared(Struct, frozen=True):
    """Answer to `prepare_store`; an empty context in pickle mode."""

    context: dict[str, Any] = {}


class V1RetrievePrepared(Struct, frozen=True):
    """Answer to `prepare_retrieve`: the pickled tensors, or failure."""

    success: bool
    data: memoryview = memoryview(b"")
    context: dict[str, Any] = {}


class V1BlendLookup(Struct, frozen=True):
    """Answer to `cb_unified_lookup`. Only the empty one is ever sent from here."""

    prefix_coverage_tokens: int = 0
    non_prefix_segments: tuple[()] = ()
    segmented_prefix_segments: tuple[()] = ()


class V1ModuleAnswer(Struct, frozen=True):
    """Answer to `server_module_call`. Only a refusal is ever sent from here."""

    success: bool = False
    payload: bytes = b""
    error: str = "this server has no modules"


class V1Operation(StrEnum):
    """Every operation of the release."""

    REGISTER_KV_CACHE = "register_kv_cache"
    UNREGISTER_KV_CACHE = "unregister_kv_cache"
    REGISTER_Q_CACHE = "register_q_cache"
    UNREGISTER_Q_CACHE = "unregister_q_cache"
    STORE_Q = "store_q"
    STORE = "store"
    RETRIEVE = "retrieve"
    LOOKUP = "lookup"
    QUERY_PREFETCH_STATUS = "query_prefetch_status"
    WAIT_PREFETCH_STATUS = "wait_prefetch_status"
    FREE_LOOKUP_LOCKS = "free_lookup_locks"
    END_SESSION = "end_session"
    REGISTER_ENGINE_DRIVEN = "register_kv_cache_engine_driven_context"
    UNREGISTER_ENGINE_DRIVEN = "unregister_kv_cache_engine_driven_context"
    PREPARE_STORE = "prepare_store"
    COMMIT_STORE = "commit_store"
    PREPARE_RETRIEVE = "prepare_retrieve"
    COMMIT_RETRIEVE = "commit_retrieve"
    CLEAR = "clear"
    GET_CHUNK_SIZE = "get_chunk_size"
    PING = "ping"
    REPORT_BLOCK_ALLOCATION = "report_block_allocation"
    NOOP = "noop"
    CB_REGISTER_ROPE = "cb_register_rope"
    CB_UNREGISTER_ROPE = "cb_unregister_rope"
    CB_RETRIEVE_PRE_COMPUTED = "cb_retrieve_pre_computed"
    CB_UNIFIED_LOOKUP = "cb_unified_lookup"
    P2P_LOOKUP_AND_LOCK = "p2p_lookup_and_lock"
    P2P_QUERY_LOOKUP_RESULTS = "p2p_query_lookup_results"
    P2P_UNLOCK_OBJECTS = "p2p_unlock_objects"
    GET_EXPERIMENTAL = "get_experimental"
    CB_PROTOCOL_HANDSHAKE = "cb_protocol_handshake"
    CB_REORDER_PLAN = "cb_reorder_plan"
    SUBSCRIBE_KV_EVENTS = "subscribe_kv_events"
    SERVER_MODULE_CALL = "server_module_call"


class NoAnswer(Enum):
    """Marks an operation that has no value for failure."""

    NO_ANSWER = "no answer"


NO_ANSWER: Final = NoAnswer.NO_ANSWER


@dataclass(frozen=True, slots=True)
class OperationSpec:
    """One operation.

    Attributes:
        code: its number; None: it goes by name only.
        payloads: types of its payloads; None: it is not served here, and its payloads are not looked at.
        optional: how many of the last payloads may be left out.
        reply: type of its answer, for the client side; None for a nil.
        failure: what is answered when it cannot be done; `NO_ANSWER` where no value would do.
    """

    code: int | None
    payloads: tuple[Any, ...] | None
    optional: int = 0
    reply: Any = None
    failure: object = None


_MOVED: Final = (b"", False)  # event handle, success
_KEYED: Final = (V1Key, int)

OPERATIONS: Final[Mapping[V1Operation, OperationSpec]] = MappingProxyType(
    {
        # served
        V1Operation.LOOKUP: OperationSpec(8, _KEYED),
        V1Operation.QUERY_PREFETCH_STATUS: OperationSpec(9, (Text,), reply=int | None, failure=0),
        V1Operation.WAIT_PREFETCH_STATUS: OperationSpec(10, (Text, Seconds), reply=int | None, failure=0),
        V1Operation.FREE_LOOKUP_LOCKS: OperationSpec(12, _KEYED),
        V1Operation.END_SESSION: OperationSpec(13, (Text,)),
        V1Operation.REGISTER_ENGINE_DRIVEN: OperationSpec(
            14, (V1Registration,), reply=V1Registered, failure=V1Registered()
        ),
        V1Operation.UNREGISTER_ENGINE_DRIVEN: OperationSpec(15, (int,)),
        V1Operation.PREPARE_STORE: OperationSpec(16, _KEYED, reply=V1StorePrepared, failure=V1StorePrepared()),
        V1Operation.COMMIT_STORE: OperationSpec(17, (V1Key, int, memoryview), reply=bool, failure=False),
        V1Operation.PREPARE_RETRIEVE: OperationSpec(
            18, _KEYED, reply=V1RetrievePrepared, failure=V1RetrievePrepared(success=False)
        ),
        V1Operation.COMMIT_RETRIEVE: OperationSpec(19, _KEYED, reply=bool, failure=False),
        V1Operation.CLEAR: OperationSpec(20, (bool,), optional=1),
        V1Operation.GET_CHUNK_SIZE: OperationSpec(21, (), reply=int, failure=NO_ANSWER),
        V1Operation.PING: OperationSpec(22, (int | None,), reply=bool, failure=False),
        V1Operation.REPORT_BLOCK_ALLOCATION: OperationSpec(23, (int, Text, msgspec.Raw)),
        V1Operation.NOOP: OperationSpec(24, (), reply=str, failure="OK"),
        V1Operation.GET_EXPERIMENTAL: OperationSpec(32, (), reply=list[str], failure=()),
        # answered with failure, since a client would wait: they share device memory, blend, or belong between servers
        V1Operation.REGISTER_KV_CACHE: OperationSpec(1, None),
        V1Operation.UNREGISTER_KV_CACHE: OperationSpec(2, None),
        V1Operation.REGISTER_Q_CACHE: OperationSpec(3, None),
        V1Operation.UNREGISTER_Q_CACHE: OperationSpec(4, None),
        V1Operation.STORE_Q: OperationSpec(5, None, failure=_MOVED),
        V1Operation.STORE: OperationSpec(6, None, failure=_MOVED),
        V1Operation.RETRIEVE: OperationSpec(7, None, failure=_MOVED),
        V1Operation.CB_REGISTER_ROPE: OperationSpec(25, None),
        V1Operation.CB_UNREGISTER_ROPE: OperationSpec(26, None),
        V1Operation.CB_RETRIEVE_PRE_COMPUTED: OperationSpec(27, None, failure=_MOVED),
        V1Operation.CB_UNIFIED_LOOKUP: OperationSpec(28, None, failure=V1BlendLookup()),
        V1Operation.P2P_LOOKUP_AND_LOCK: OperationSpec(29, None, failure=0),
        V1Operation.P2P_QUERY_LOOKUP_RESULTS: OperationSpec(30, None, failure=()),
        V1Operation.P2P_UNLOCK_OBJECTS: OperationSpec(31, None),
        V1Operation.CB_PROTOCOL_HANDSHAKE: OperationSpec(33, None, failure=(1, False)),
        V1Operation.CB_REORDER_PLAN: OperationSpec(None, None, failure=()),
        V1Operation.SUBSCRIBE_KV_EVENTS: OperationSpec(None, None),  # no third frame ends the stream
        V1Operation.SERVER_MODULE_CALL: OperationSpec(None, None, failure=V1ModuleAnswer()),
    }
)
"""Every operation, once."""

BY_CODE: Final[Mapping[int, V1Operation]] = MappingProxyType(
    {
        **{spec.code: operation for operation, spec in OPERATIONS.items() if spec.code is not None},
        40: V1Operation.GET_EXPERIMENTAL,  # as 0.5.3 and 0.5.4 number it; later releases have no 40
    }
)
"""Operation of each number."""
