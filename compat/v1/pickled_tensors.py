"""Tensors as LMCache's clients pickle them, read and written without torch or pickle.

In pickle mode a list of CPU tensors travels as one ``pickle.dumps``, which is two formats inside each other:

    outer    pickle, protocol 4: a list of calls of torch._utils._rebuild_tensor_v2(storage, offset, shape, stride,
             False, OrderedDict()), or _v3 with the element type behind that; a storage is a call of
             torch.storage._load_from_bytes(inner)
    inner    torch's legacy stream: five pickles of protocol 2 (magic number, version, facts of the system, the storage
             as a persistent id, a list with its key), then u64 elements and the raw little-endian data

torch 2.13 writes 8-bit floats over an untyped storage, which its own legacy reader then cannot load, so such a message
fails between released peers. It is read here; what is written has a storage of bytes instead, which torch loads.

The release hands both to ``pickle.loads``, and `_load_from_bytes` calls ``torch.load`` without its safeguards: whoever
can send such a message runs code. Here each is read by a closed reader (`closed_pickle`), and sizes come first.

Source: docs/spec/v1-formats.md, "Pickled tensors"; LMCache 0.5.6, torch 2.13.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final, TypeVar

from compat.errors import CompatError
from compat.v1.closed_pickle import Global, Grammar, PickleRefusedError, load

MAX_TENSORS: Final = 8192
"""Tensors of one message: a chunk each."""

MAX_BYTES: Final = 4 * 2**30
"""Bytes of one message, unless the caller knows better: a worker's registration tells what a chunk weighs."""

MAX_DIMENSIONS: Final = 16
MAX_EXTENT: Final = 2**40
MAX_RUNS: Final = 2**16
"""Contiguous runs that are gathered for one tensor whose memory is not in order; the real clients send none."""

DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "bool": 1,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}
"""Element types that are read and written, by torch's name, and bytes of one element."""

_STORAGES: Final = {
    "bfloat16": "BFloat16Storage",
    "bool": "BoolStorage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
}
_UNTYPED: Final = "torch.storage UntypedStorage"
_STORAGE_DTYPES: Final = {f"torch {name}": dtype for dtype, name in _STORAGES.items()}
_BY_NAME: Final = {f"torch {dtype}": dtype for dtype in DTYPE_BYTES if dtype not in _STORAGES}
_V2: Final = "torch._utils _rebuild_tensor_v2"
_V3: Final = "torch._utils _rebuild_tensor_v3"
_LOAD: Final = "torch.storage _load_from_bytes"
_HOOKS: Final = "collections OrderedDict"
_U64: Final = struct.Struct("<Q")
_TOO_MUCH: Final = "pickled tensors: share memory, and together are too much more than the message"
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor as bytes.

    Attributes:
        dtype: a name of `DTYPE_BYTES`.
        shape: extents, at most 16, each in [0, 2**40].
        data: the elements, C order, little-endian; a view of the message where its memory was in order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def nbytes(self) -> int:
        """Bytes that dtype and shape ask for."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None  # None: untyped, the tensor names the element type
    data: memoryview


def read_tensors(
    data: bytes | memoryview, *, max_bytes: int = MAX_BYTES, max_tensors: int = MAX_TENSORS, max_shared: int = 0
) -> list[PickledTensor]:
    """The tensors of a pickled list. Nothing of the stream is imported or called.

    Args:
        data: what the client pickled.
        max_bytes: bytes that are looked at; a longer message is refused before anything is parsed.
        max_tensors: tensors that are read.
        max_shared: bytes that tensors which share memory may be together, if that is more than the message.

    Raises:
        PickleRefusedError: more than that, or anything else than ``pickle.dumps`` of a list of plain CPU tensors.
    """
    view = memoryview(data).cast("B") if data else memoryview(b"")
    if len(view) > max_bytes:
        raise PickleRefusedError(f"pickled tensors: got {len(view)} bytes, at most {max_bytes}")
    room = max(len(view), max_shared)
    calls = _Calls(max_tensors, room)
    grammar = Grammar(
        protocols=frozenset({4, 5}),
        opcodes=_OUTER_OPCODES,
        globals=frozenset({_V2, _V3, _LOAD, _HOOKS, *_BY_NAME}),
        calls={_V2: calls.rebuilt_v2, _V3: calls.rebuilt_v3, _LOAD: calls.storage, _HOOKS: _hooks},
        max_steps=64 * (max_tensors + 1),
    )
    tensors, end = load(view, 0, grammar)
    if end != len(view):
        raise PickleRefusedError("pickled tensors: bytes follow the pickle")
    if type(tensors) is not list or not all(type(tensor) is PickledTensor for tensor in tensors):
        raise PickleRefusedError("pickled tensors: wanted a list of tensors")
    if len(tensors) > max_tensors:
        raise PickleRefusedError(f"pickled tensors: got {len(tensors)}, at most {max_tensors}")
    if sum(tensor.nbytes for tensor in tensors) > room:  # one that was rebuilt once may be listed often
        raise PickleRefusedError(_TOO_MUCH)
    return tensors


def write_tensors(tensors: Sequence[PickledTensor]) -> bytes:
    """The bytes that ``pickle.loads`` of an LMCache client turns into a list of these tensors.

    Raises:
        CompatError: an element type that is not written, or data of another size than dtype and shape ask for.
    """
    return b"".join(_written(tensors))


def _written(tensors: Sequence[PickledTensor]) -> Iterator[bytes | memoryview]:
    yield b"\x80\x04]("  # PROTO 4, EMPTY_LIST, MARK
    for tensor in tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise CompatError(f"tensor: got elements of {tensor.dtype[:32]!r}, wanted one of {', '.join(DTYPE_BYTES)}")
        data = memoryview(tensor.data).cast("B") if len(tensor.data) else memoryview(b"")
        if len(data) != tensor.nbytes:
            raise CompatError(f"tensor: got {len(data)} bytes, wanted {tensor.nbytes} for its dtype and shape")
        typed = tensor.dtype in _STORAGES
        head = _inner_head(tensor.dtype, len(data))
        yield _global(_V2 if typed else _V3) + b"(" + _global(_LOAD)
        yield b"\x8e" + _U64.pack(len(head) + len(data)) + head  # BINBYTES8
        yield data
        yield b"\x85R"  # TUPLE1, REDUCE
        yield _integer(0) + _integers(tensor.shape) + _integers(_c_strides(tensor.shape))
        yield b"\x89" + _global(_HOOKS) + b")R"  # NEWFALSE, the hooks: OrderedDict()
        yield (b"" if typed else _global(f"torch {tensor.dtype}")) + b"tR"
    yield b"e."


def _inner_head(dtype: str, n_bytes: int) -> bytes:
    """The five pickles and the count that stand in front of a storage's data."""
    kind = f"torch\n{_STORAGES.get(dtype, _STORAGES['uint8'])}\n"
    count = n_bytes // DTYPE_BYTES[dtype]
    persistent = b"(" + _unicode("storage") + b"c" + kind.encode() + _unicode("0") + _unicode("cpu")
    return b"".join(
        (
            b"\x80\x02\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b".",
            b"\x80\x02M" + _VERSION.to_bytes(2, "little") + b".",
            b"\x80\x02}(" + _unicode("protocol_version") + b"M" + _VERSION.to_bytes(2, "little"),
            _unicode("little_endian") + b"\x88" + _unicode("type_sizes"),
            b"}(" + _unicode("short") + b"K\x02" + _unicode("int") + b"K\x04" + _unicode("long") + b"K\x04uu.",
            b"\x80\x02" + persistent + _integer(count) + b"NtQ.",
            b"\x80\x02]" + _unicode("0") + b"a.",
            _U64.pack(count),
        )
    )


def _short_unicode(text: str) -> bytes:
    return b"\x8c" + len(text).to_bytes(1, "little") + text.encode()


def _unicode(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _global(name: str) -> bytes:
    module, _, attribute = name.partition(" ")
    return _short_unicode(module) + _short_unicode(attribute) + b"\x93"


def _integer(value: int) -> bytes:
    if value < 2**31:
        return b"J" + value.to_bytes(4, "little")
    return b"\x8a\x09" + value.to_bytes(9, "little")


def _integers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"


def _c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


# what the outer pickle may call: each looks at inert values and gives one back


def _hooks(arguments: tuple[Any, ...]) -> Global:
    if arguments:
        raise PickleRefusedError("pickled tensors: backward hooks are not empty")
    return Global(_HOOKS)


class _Calls:
    """Calls of one message. They are counted as they are made: what they give need not be in the list at the end.

    Args:
        max_tensors: tensors, and storages, that are made.
        room: bytes of those tensors together.
    """

    def __init__(self, max_tensors: int, room: int) -> None:
        self._max_tensors = max_tensors
        self._tensors = self._storages = 0
        self._room = room

    def storage(self, arguments: tuple[Any, ...]) -> _Storage:
        self._storages += 1
        if self._storages > self._max_tensors:
            raise PickleRefusedError(f"pickled tensors: got more than {self._max_tensors} storages, a tensor's each")
        return _storage(arguments)

    def rebuilt_v2(self, arguments: tuple[Any, ...]) -> PickledTensor:
        if len(arguments) != 6 or type(arguments[0]) is not _Storage or arguments[0].dtype is None:
            raise PickleRefusedError("pickled tensors: a tensor is not rebuilt from one typed storage")
        return self._rebuilt(arguments[0].data, arguments[0].dtype, arguments[1:])

    def rebuilt_v3(self, arguments: tuple[Any, ...]) -> PickledTensor:
        dtype = _BY_NAME.get(arguments[6].name) if len(arguments) == 7 and type(arguments[6]) is Global else None
        if dtype is None or type(arguments[0]) is not _Storage or arguments[0].dtype not in {None, "uint8"}:
            raise PickleRefusedError(
                "pickled tensors: a tensor is not rebuilt from one storage of bytes and a known dtype"
            )
        return self._rebuilt(arguments[0].data, dtype, arguments[1:6])

    def _rebuilt(self, data: memoryview, dtype: str, arguments: tuple[Any, ...]) -> PickledTensor:
        offset, shape, stride, grad, hooks = arguments
        if grad is not False or type(hooks) is not Global or hooks.name != _HOOKS:
            raise PickleRefusedError("pickled tensors: a tensor wants gradients or has hooks")
        if not (_extents(shape) and _extents(stride) and len(shape) == len(stride) and _extents((offset,))):
            raise PickleRefusedError("pickled tensors: offset, shape or stride is out of range")
        width = DTYPE_BYTES[dtype]
        n_bytes = math.prod(shape) * width
        self._tensors += 1
        self._room -= n_bytes
        if self._tensors > self._max_tensors:
            raise PickleRefusedError(f"pickled tensors: got more than {self._max_tensors} tensors")
        if not n_bytes:
            return PickledTensor(dtype, shape, b"")
        last = offset + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
        if n_bytes > len(data) or (last + 1) * width > len(data):
            raise PickleRefusedError("pickled tensors: a tensor reaches past its storage")
        if self._room < 0:
            raise PickleRefusedError(_TOO_MUCH)
        return PickledTensor(dtype, shape, _gathered(data, width, offset, shape, stride))


def _extents(values: object) -> bool:
    return (
        type(values) is tuple
        and len(values) <= MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value <= MAX_EXTENT for value in values)
    )


def _gathered(
    data: memoryview, width: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> bytes | memoryview:
    """The elements in C order: a view where the memory already is, else a copy, run by run."""
    run, inner = 1, len(shape)
    while inner and (shape[inner - 1] == 1 or stride[inner - 1] == run):
        inner -= 1
        run *= shape[inner]
    outer = shape[:inner]
    if math.prod(outer) > MAX_RUNS:
        raise PickleRefusedError("pickled tensors: a tensor's memory is too scattered; send it contiguous")
    starts = (
        (offset + sum(place * step for place, step in zip(places, stride, strict=False))) * width
        for places in product(*map(range, outer))
    )
    if not outer:
        start = next(starts)
        return data[start : start + run * width]
    return b"".join(data[start : start + run * width] for start in starts)


def _storage(arguments: tuple[Any, ...]) -> _Storage:
    """`_load_from_bytes`, closed: the inner stream of one storage."""
    if len(arguments) != 1 or type(arguments[0]) is not memoryview:
        raise PickleRefusedError("pickled tensors: a storage is not one string of bytes")
    data = arguments[0]
    at = 0
    for wanted in (_MAGIC, _VERSION):
        value, at = load(data, at, _NUMBER)
        if type(value) is not int or value != wanted:
            raise PickleRefusedError("pickled tensors: a storage does not begin as torch's legacy stream does")
    facts, at = load(data, at, _FACTS)
    if type(facts) is not dict or facts.get("little_endian") is not True:
        raise PickleRefusedError("pickled tensors: a storage is not little-endian")
    claim, at = load(data, at, _PERSISTENT)
    keys, at = load(data, at, _KEYS)
    if type(claim) is not _Claim or type(keys) is not list or keys != [claim.key]:
        raise PickleRefusedError("pickled tensors: a stream holds something else than one storage")
    if len(data) - at != _U64.size + claim.count * claim.width or _U64.unpack_from(data, at) != (claim.count,):
        raise PickleRefusedError("pickled tensors: a storage has another size than it says")
    return _Storage(claim.dtype, data[at + _U64.size :])


@dataclass(frozen=True, slots=True)
class _Claim:
    key: str
    dtype: str | None
    count: int

    @property
    def width(self) -> int:
        return 1 if self.dtype is None else DTYPE_BYTES[self.dtype]


def _claim(identity: Any) -> _Claim:
    """The persistent id of a storage: ("storage", type, key, "cpu", elements, None)."""
    match identity:
        case ("storage", Global() as kind, str() as key, "cpu", int() as count, None) if 0 <= count <= MAX_EXTENT:
            return _Claim(key, _STORAGE_DTYPES.get(kind.name), count)
        case _:
            raise PickleRefusedError("pickled tensors: a persistent id does not name one storage on the CPU")


def _opcodes(text: str) -> frozenset[int]:
    return frozenset(bytes.fromhex(text))


_OUTER_OPCODES: Final = _opcodes("95 5d 94 28 8c 93 43 42 8e 85 86 87 74 29 52 4b 4d 4a 8a 89 68 6a 61 65")
_inner: Callable[..., Grammar] = partial(Grammar, frozenset({2}))
_NUMBER: Final = _inner(_opcodes("8a 4d"), frozenset())
_FACTS: Final = _inner(_opcodes("7d 71 28 58 4d 4b 88 89 75"), frozenset())
_PERSISTENT: Final = _inner(
    _opcodes("28 58 71 63 4b 4d 4a 8a 4e 74 51"), frozenset({_UNTYPED, *_STORAGE_DTYPES}), persistent=_claim
)
_KEYS: Final = _inner(_opcodes("5d 71 58 61"), frozenset())
