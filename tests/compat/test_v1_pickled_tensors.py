"""Pickled tensors: what torch pickles is read, what we write torch reads, and no hostile stream runs or costs much."""

import io
import pickle
import pickletools
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compat.v1.pickled_tensors as module
from compat import CompatError
from compat.v1.closed_pickle import PickleRefusedError
from compat.v1.pickled_tensors import DTYPE_BYTES, PickledTensor, read_tensors, write_tensors
from tests.compat.golden import WIRE

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    n = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (n,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if n else torch.zeros(shape, dtype=dtype)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def _pickled_storage(stream: bytes) -> bytes:
    """A message with one tensor whose storage is that stream; what a client can send without torch's consent."""
    return pickle.dumps([_Rebuild(stream)], protocol=4)


class _Load:
    def __init__(self, stream: bytes) -> None:
        self.stream = stream

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.stream,)


class _Rebuild:
    def __init__(self, stream: bytes, *rest: Any) -> None:
        self.stream, self.rest = stream, rest or (0, (2,), (1,), False, __import__("collections").OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, (_Load(self.stream), *self.rest)


def _inner(tensor: torch.Tensor) -> bytes:
    """The inner stream of a tensor, as torch writes it."""
    (stream,) = (arg for _, arg, _ in pickletools.genops(pickle.dumps(tensor)) if isinstance(arg, bytes))
    return stream


GOOD = _inner(torch.zeros(2, dtype=torch.float16))


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every test fails if reading runs a hostile call."""
    ran: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "_RAN", ran, raising=False)
    yield ran
    assert ran == []


def _run(text: str) -> None:
    sys.modules[__name__]._RAN.append(text)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return _run, ("ran",)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 4, 8), (3,), (), (0,), (2, 0, 3)], ids=str)
def test_what_torch_pickles_is_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every element type that KV comes in, every number of dimensions, empty ones too."""
    tensors = [_tensor(dtype, shape, 1), _tensor(dtype, shape, 2)]
    name = str(dtype).removeprefix("torch.")
    read = read_tensors(pickle.dumps(tensors))
    assert [(name, shape, _bytes(tensor)) for tensor in tensors] == [(r.dtype, r.shape, bytes(r.data)) for r in read]


@pytest.mark.parametrize("protocol", [4, 5])
def test_both_default_protocols_of_python_are_read(protocol: int) -> None:
    """4 up to Python 3.13, 5 from 3.14 on; others are not written by any client."""
    tensors = [torch.arange(6, dtype=torch.float32)]
    assert _bytes(tensors[0]) == bytes(read_tensors(pickle.dumps(tensors, protocol=protocol))[0].data)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_older_protocols_are_refused(protocol: int) -> None:
    """They need opcodes that are not read."""
    with pytest.raises(PickleRefusedError):
        read_tensors(pickle.dumps([torch.zeros(2)], protocol=protocol))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes, st.integers(0, 9)), max_size=5))
def test_what_is_written_is_read_by_pickle_and_by_us(specs: list[tuple[str, tuple[int, ...], int]]) -> None:
    """The real ``pickle.loads`` gives the tensors back, and so does the closed reader."""
    tensors = [_tensor(DTYPES[name], shape, seed) for name, shape, seed in specs]
    ours = [PickledTensor(name, shape, _bytes(t)) for (name, shape, _), t in zip(specs, tensors, strict=True)]
    written = write_tensors(ours)
    loaded = pickle.loads(written)
    assert [(t.dtype, tuple(t.shape), _bytes(t), t.is_contiguous()) for t in tensors] == [
        (t.dtype, tuple(t.shape), _bytes(t), t.is_contiguous()) for t in loaded
    ]
    assert [(t.dtype, t.shape, bytes(t.data)) for t in ours] == [
        (t.dtype, t.shape, bytes(t.data)) for t in read_tensors(written)
    ]


def test_8_bit_floats_of_torch_are_read_where_torch_cannot() -> None:
    """Torch pickles them over a storage that its own loader has no element type for; ours reads them."""
    tensor = torch.ones(4).to(torch.float8_e4m3fn)
    message = pickle.dumps([tensor])
    assert _bytes(tensor) == bytes(read_tensors(message)[0].data)
    try:
        loaded = pickle.loads(message)
    except AttributeError:
        return
    assert _bytes(tensor) == _bytes(loaded[0])


@settings(max_examples=60)
@given(st.data())
def test_views_are_read_as_what_they_show(data: st.DataObject) -> None:
    """Slices, steps and transposed views travel with their whole storage; the elements come in C order."""
    base = torch.arange(120, dtype=torch.int32).reshape(2, 3, 4, 5)
    view = base.permute(data.draw(st.permutations(range(4))))
    slices = tuple(
        slice(data.draw(st.integers(0, n)), data.draw(st.integers(0, n)), data.draw(st.integers(1, 2)))
        for n in view.shape
    )
    view = view[slices]
    (read,) = read_tensors(pickle.dumps([view]), max_bytes=2**20)
    assert (tuple(view.shape), _bytes(view)) == (read.shape, bytes(read.data))


def test_contiguous_data_is_a_view_of_the_message() -> None:
    """Reading copies nothing."""
    message = bytearray(pickle.dumps([torch.zeros(4, dtype=torch.uint8)]))
    (read,) = read_tensors(memoryview(message))
    assert isinstance(read.data, memoryview)
    assert read.data.obj is message


def test_many_tensors_are_read() -> None:
    """More than one batch of pickle's, and more memo places than one byte counts."""
    tensors = [torch.full((2,), float(i), dtype=torch.bfloat16) for i in range(1500)]
    assert [_bytes(t) for t in tensors] == [bytes(r.data) for r in read_tensors(pickle.dumps(tensors))]
    with pytest.raises(PickleRefusedError, match="more than 1499"):
        read_tensors(pickle.dumps(tensors), max_tensors=1499)


def test_a_large_tensor_is_read() -> None:
    """Beyond 64 KiB pickle leaves its frames; beyond 2**16 elements the shape has other opcodes."""
    tensor = torch.arange(200_000, dtype=torch.int32)
    (read,) = read_tensors(pickle.dumps([tensor]))
    assert (200_000,) == read.shape
    assert _bytes(tensor) == bytes(read.data)


def test_globals_are_recalled_from_far_back() -> None:
    """Element types that differ, after more memo places than one byte counts."""
    tensors = [
        *(torch.full((2,), float(i)) for i in range(40)),
        *(torch.ones(2).to(torch.float8_e5m2) for _ in range(40)),
    ]
    assert [_bytes(t) for t in tensors] == [bytes(r.data) for r in read_tensors(pickle.dumps(tensors))]


def test_the_captured_store_is_read() -> None:
    """The pickle that a real client sent: two chunks of zeros, views of one tensor of eight tokens or two of four."""
    step = next(s for s in WIRE["exchange"] if s["op"] == "commit_store")
    frame = bytes.fromhex(step["request_frames_hex"][4])
    (size,) = struct.unpack(">H", frame[1:3])
    assert 3 + size == len(frame)
    tensors = read_tensors(frame[3:])
    assert [(_bytes(t), tuple(t.shape)) for t in pickle.loads(frame[3:])] == [(bytes(t.data), t.shape) for t in tensors]
    assert {"float16"} == {t.dtype for t in tensors}


def test_the_detector_sees_a_hostile_pickle_run(_nothing_runs: list[str]) -> None:  # noqa: PT019
    """Negative control: the real ``pickle.loads``, and the real inner load, run what the closed readers refuse."""
    pickle.loads(pickle.dumps([_Hostile()]))
    assert ["ran"] == _nothing_runs
    with pytest.raises(Exception, match=r".*"):
        pickle.loads(_pickled_storage(pickle.dumps(_Hostile(), protocol=2)))
    assert ["ran", "ran"] == _nothing_runs
    _nothing_runs.clear()


class _System:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


HOSTILE_VALUES: dict[str, Any] = {
    "call": _Hostile(),
    "eval": _System(eval, "1"),
    "exec": _System(exec, "1"),
    "getattr": _System(getattr, "", "join"),
    "import": _System(__import__, "os"),
    "open": _System(open, "/dev/null"),
    "torch.load": _System(torch.load, "/dev/null"),
    "torch.zeros": _System(torch.zeros, 2),
    "path": Path("x"),
    "set": {1},
    "float": 1.5,
    "object": object(),
    "bytearray": bytearray(b"x"),
    "class": dict,
    "parameter": torch.nn.Parameter(torch.zeros(2)),
    "gradient": torch.zeros(2, requires_grad=True),
    "storage": torch.zeros(2).untyped_storage(),
    "complex": torch.zeros(2, dtype=torch.complex64),
    "sparse": torch.eye(2).to_sparse(),
    "negated": torch.zeros(2, dtype=torch.complex64).conj(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: [torch.zeros(1), v], lambda v: [[v]]])
@pytest.mark.parametrize("value", HOSTILE_VALUES.values(), ids=list(HOSTILE_VALUES))
def test_outside_nothing_but_tensors_is_read(value: Any, wrap: Callable[[Any], Any], protocol: int) -> None:
    """A call, a class, another value, a tensor that is more than its memory: refused, and nothing ran."""
    try:
        message = pickle.dumps(wrap(value), protocol=protocol)
    except (TypeError, AttributeError):
        pytest.skip("cannot be pickled")
    with pytest.raises(PickleRefusedError):
        read_tensors(message)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("value", [v for k, v in HOSTILE_VALUES.items() if k in {"call", "eval", "path", "import"}])
def test_inside_nothing_but_one_storage_is_read(value: Any, protocol: int) -> None:
    """A hostile pickle in any of the five places of the inner stream."""
    hostile = pickle.dumps(value, protocol=protocol)
    pieces = _pieces(GOOD)
    for place in range(5):
        stream = b"".join([*pieces[:place], hostile, *pieces[place + 1 :]])
        with pytest.raises(PickleRefusedError):
            read_tensors(_pickled_storage(stream))
    with pytest.raises(PickleRefusedError):
        read_tensors(_pickled_storage(hostile))


def _pieces(stream: bytes) -> list[bytes]:
    """The five pickles of an inner stream, and the rest."""
    pieces = []
    rest = io.BytesIO(stream)

    class _Closed(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return pid

    for _ in range(5):
        start = rest.tell()
        _Closed(rest).load()
        pieces.append(stream[start : rest.tell()])
    return [*pieces, stream[rest.tell() :]]


def test_the_untouched_stream_is_read() -> None:
    """What the tests below damage is right before (their negative control)."""
    assert b"".join(_pieces(GOOD)) == GOOD
    (read,) = read_tensors(_pickled_storage(GOOD))
    assert ("float16", (2,), bytes(4)) == (read.dtype, read.shape, bytes(read.data))


def _persistent(*identity: Any) -> bytes:
    class _Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return identity if obj is identity else None

    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(identity)
    return out.getvalue()


BAD_STREAMS: dict[str, tuple[int, bytes]] = {
    "another magic": (0, pickle.dumps(0x1950A86A20F9469CFC6D, protocol=2)),
    "magic is a bool": (0, b"\x80\x02\x88."),
    "another version": (1, pickle.dumps(1002, protocol=2)),
    "big-endian": (2, pickle.dumps({"little_endian": False}, protocol=2)),
    "little-endian is 1": (2, pickle.dumps({"little_endian": 1}, protocol=2)),
    "no facts": (2, pickle.dumps({}, protocol=2)),
    "facts are a number": (2, pickle.dumps(7, protocol=2)),
    "number as key": (2, pickle.dumps({1: True}, protocol=2)),
    "on a device": (3, _persistent("storage", torch.HalfStorage, "0", "cuda:0", 2, None)),
    "a module": (3, _persistent("module", torch.nn.Linear, "x", "y")),
    "another class": (3, _persistent("storage", torch.nn.Linear, "0", "cpu", 2, None)),
    "a view": (3, _persistent("storage", torch.HalfStorage, "0", "cpu", 2, ("0", 0, 1))),
    "five fields": (3, _persistent("storage", torch.HalfStorage, "0", "cpu", 2)),
    "more elements": (3, _persistent("storage", torch.HalfStorage, "0", "cpu", 3, None)),
    "negative elements": (3, _persistent("storage", torch.HalfStorage, "0", "cpu", -2, None)),
    "elements as text": (3, _persistent("storage", torch.HalfStorage, "0", "cpu", "2", None)),
    "a number": (3, pickle.dumps(7, protocol=2)),
    "items without a dict": (2, b"\x80\x02X\x01\x00\x00\x00a(X\x01\x00\x00\x00b\x88u."),
    "a key without its value": (2, b"\x80\x02}(X\x01\x00\x00\x00bu."),
    "no keys": (4, pickle.dumps([], protocol=2)),
    "two keys": (4, pickle.dumps(["0", "1"], protocol=2)),
    "another key": (4, pickle.dumps(["x"], protocol=2)),
    "keys as a tuple": (4, pickle.dumps(("0",), protocol=2)),
    "no data": (5, b""),
    "data cut": (5, struct.pack("<q", 2) + bytes(3)),
    "data longer": (5, struct.pack("<q", 2) + bytes(5)),
    "another count": (5, struct.pack("<q", 1) + bytes(4)),
}


@pytest.mark.parametrize(("place", "piece"), BAD_STREAMS.values(), ids=list(BAD_STREAMS))
def test_a_stream_that_is_not_one_storage_is_refused(place: int, piece: bytes) -> None:
    """Each part of the inner stream has one form."""
    pieces = _pieces(GOOD)
    with pytest.raises(PickleRefusedError):
        read_tensors(_pickled_storage(b"".join([*pieces[:place], piece, *pieces[place + 1 :]])))


HOOKS = __import__("collections").OrderedDict()


@pytest.mark.parametrize(
    "rest",
    [
        (1, (2,), (1,), False, HOOKS),
        (0, (3,), (1,), False, HOOKS),
        (0, (2,), (2,), False, HOOKS),
        (0, (2,), (0,), False, HOOKS),  # in bounds, and one element
        (-1, (2,), (1,), False, HOOKS),
        (0, (-2,), (1,), False, HOOKS),
        (0, (2,), (-1,), False, HOOKS),
        (0, (2,), (1, 1), False, HOOKS),
        (0, [2], [1], False, HOOKS),
        (0, (2**40, 2**40), (0, 0), False, HOOKS),
        (0, (2**61,), (0,), False, HOOKS),
        (0, (1,) * 17, (1,) * 17, False, HOOKS),
        (0, (True,), (1,), False, HOOKS),
        (0, ("2",), (1,), False, HOOKS),
        (None, (2,), (1,), False, HOOKS),
        (0, (2,), (1,), True, HOOKS),
        (0, (2,), (1,), 0, HOOKS),
        (0, (2,), (1,), False, None),
        (0, (2,), (1,), False),
        (0, (2,), (1,), False, HOOKS, {}),
    ],
    ids=repr,
)
def test_a_tensor_that_is_not_plain_memory_is_refused(rest: tuple[Any, ...]) -> None:
    """Out of its storage, expanded beyond it, of other types, or with more than memory."""
    message = pickle.dumps([_Rebuild(GOOD, *rest)], protocol=4)
    if rest[2] == (0,) and rest[1] == (2,):
        assert bytes(4) == bytes(read_tensors(message)[0].data)
        return
    with pytest.raises(PickleRefusedError):
        read_tensors(message)


def test_tensors_that_share_a_storage_cannot_be_more_than_the_message() -> None:
    """A memoised storage, or tensor, used a thousand times would make a small message large."""
    tensor = torch.zeros(4096, dtype=torch.uint8)
    assert [4096] * 1 == [len(t.data) for t in read_tensors(pickle.dumps([tensor]))]
    with pytest.raises(PickleRefusedError, match="share memory"):
        read_tensors(pickle.dumps([tensor] * 1000))
    assert [bytes(4096)] * 3 == [bytes(t.data) for t in read_tensors(pickle.dumps([tensor] * 3), max_shared=3 * 4096)]
    with pytest.raises(PickleRefusedError, match="share memory"):
        read_tensors(pickle.dumps([tensor] * 3), max_shared=3 * 4096 - 1)


def _called_again(callee: bytes, arguments: bytes, times: int) -> bytes:
    """A list of what one call with the same, remembered arguments gives, again and again."""
    return b"\x80\x04](" + callee + b"\x94" + arguments + b"\x94R" + b"h\0h\1R" * (times - 1) + b"e."


def _global(name: str) -> bytes:
    module_name, _, attribute = name.partition(" ")
    return b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module_name, attribute)) + b"\x93"


def test_memory_that_is_gathered_again_and_again_is_bounded_by_the_message() -> None:
    """Refused before a byte too many is copied: what a call gives takes memory before the list is looked at."""
    stream = _inner(torch.zeros(2**20, dtype=torch.uint8))
    storage = _global("torch.storage _load_from_bytes") + b"\x8e" + struct.pack("<Q", len(stream)) + stream + b"\x85R"
    # 1000 rows of 1000 bytes that stand 1024 bytes apart
    view = (
        b"(" + storage + b"K\0M\xe8\x03M\xe8\x03\x86M\0\x04K\x01\x86\x89" + _global("collections OrderedDict") + b")Rt"
    )
    rebuild = _global("torch._utils _rebuild_tensor_v2")
    (once,) = read_tensors(_called_again(rebuild, view, 1))
    assert bytes(10**6) == once.data
    assert len(read_tensors(_called_again(rebuild, view, 3), max_shared=3 * 10**6)) == 3
    tracemalloc.start()
    try:
        with pytest.raises(PickleRefusedError, match="share memory"):
            read_tensors(_called_again(rebuild, view, 200))
        assert tracemalloc.get_traced_memory()[1] < 3 * len(stream)
    finally:
        tracemalloc.stop()
    with pytest.raises(PickleRefusedError, match="more than 4 tensors"):
        read_tensors(_called_again(rebuild, view, 5), max_tensors=4, max_shared=5 * 10**6)


def test_storages_are_bounded_by_the_tensors() -> None:
    """One string of bytes that is parsed a hundred thousand times would keep a small message busy for minutes."""
    load = _global("torch.storage _load_from_bytes")
    arguments = b"B" + struct.pack("<I", len(GOOD)) + GOOD + b"\x85"
    with pytest.raises(PickleRefusedError, match="wanted a list of tensors"):
        read_tensors(_called_again(load, arguments, 4), max_tensors=4)
    with pytest.raises(PickleRefusedError, match="more than 4 storages"):
        read_tensors(_called_again(load, arguments, 5), max_tensors=4)


def test_scattered_memory_is_bounded() -> None:
    """A tensor that would need more copies than the bound is refused."""
    tensor = torch.zeros(2 * module.MAX_RUNS + 2, dtype=torch.uint8)
    assert len(read_tensors(pickle.dumps([tensor[: 2 * module.MAX_RUNS : 2]]))) == 1
    with pytest.raises(PickleRefusedError, match="contiguous"):
        read_tensors(pickle.dumps([tensor[::2]]))


def test_size_comes_before_parsing() -> None:
    """A message over the bound is refused whatever it holds."""
    message = pickle.dumps([torch.zeros(100)])
    assert len(read_tensors(message, max_bytes=len(message))) == 1
    with pytest.raises(PickleRefusedError, match="at most"):
        read_tensors(message, max_bytes=len(message) - 1)


FLOODS: dict[str, bytes] = {
    "nested lists": b"\x80\x04" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
    "nested tuples": b"\x80\x04)" + b"\x85" * 4_000_000 + b".",
    "marks": b"\x80\x04" + b"(" * 1_000_000 + b".",
    "memo": b"\x80\x04N" + b"\x94" * 1_000_000 + b".",
    "a long frame": b"\x80\x04\x95" + b"\xff" * 8 + b"].",
    "long bytes": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "long text": b"\x80\x04X" + b"\xff" * 4 + b".",
    "long integer": b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".",
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "an unknown memo": b"\x80\x04h\x07.",
    "an empty stack": b"\x80\x04a.",
    "a tuple of nothing": b"\x80\x04\x86.",
    "close without open": b"\x80\x04t.",
    "append to a tuple": b"\x80\x04)K\x01a.",
    "a storage of a number": b"\x80\x04\x8c\x0dtorch.storage\x8c\x10_load_from_bytes\x93K\x01\x85R.",
    "a tensor of nothing": b"\x80\x04\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v3\x93)R.",
    "an older tensor of nothing": b"\x80\x04\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2\x93)R.",
    "no end": b"\x80\x04]",
    "two values": b"\x80\x04]].",
    "no value": b"\x80\x04.",
    "an open mark": b"\x80\x04](.",
    "more behind": b"\x80\x04]..",
    "nothing": b"",
    "two protocols": b"\x80\x04\x80\x04].",
    "an extension": b"\x80\x04\x82\x01.",
    "build": b"\x80\x04]}b.",
    "new object": b"\x80\x04))\x81.",
    "instance": b"\x80\x04(ios\nsystem\n.",
    "buffers": b"\x80\x05\x97.",
    "a persistent id": b"\x80\x04]Q.",
    "a global by line": b"\x80\x04cos\nsystem\n.",
    "a global of numbers": b"\x80\x04K\x01K\x02\x93.",
    "a global by dots": b"\x80\x04\x8c\x05torch\x8c\x0fstorage.UntypedS\x93.",
    "a call of a tuple": b"\x80\x04))R.",
    "a call with a list": b"\x80\x04\x8c\x0bcollections\x8c\x0bOrderedDict\x93]R.",
    "hooks with an entry": b"\x80\x04\x8c\x0bcollections\x8c\x0bOrderedDict\x93]\x85R.",
    "text that is not ascii": b"\x80\x04\x8c\x02\xc3\xa9.",
}


@pytest.mark.parametrize("message", FLOODS.values(), ids=list(FLOODS))
def test_a_hostile_stream_costs_no_more_than_its_bytes(message: bytes) -> None:
    """Refused within a bounded number of steps; deep ones do not reach a recursion, long ones no allocation."""
    with pytest.raises(PickleRefusedError):
        read_tensors(message, max_tensors=16)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_are_tensors_or_refused(data: bytes, with_head: bool) -> None:
    """Nothing else comes out."""
    try:
        assert isinstance(read_tensors(b"\x80\x04" * with_head + data), list)
    except PickleRefusedError:
        return


VALID = pickle.dumps([torch.arange(3, dtype=torch.float16), torch.ones(2, 2).to(torch.float8_e5m2)])


@settings(max_examples=200)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=3), st.integers(0, 4))
def test_a_damaged_message_is_tensors_or_refused(place: int, patch: bytes, cut: int) -> None:
    """Bytes replaced, inserted or left out at any place of a real message."""
    try:
        for tensor in read_tensors(VALID[:place] + patch + VALID[place + cut :]):
            assert tensor.nbytes == len(tensor.data)
    except PickleRefusedError:
        return


@pytest.mark.parametrize(
    "tensor",
    [
        PickledTensor("complex64", (1,), bytes(8)),
        PickledTensor("float16", (2,), bytes(3)),
        PickledTensor("float16", (2,), bytes(5)),
        PickledTensor("float16", (0,), bytes(2)),
        PickledTensor("float8_e4m3fn", (2,), b""),
    ],
    ids=repr,
)
def test_what_cannot_be_written_is_refused(tensor: PickledTensor) -> None:
    """An element type that the reader does not know, or data that is not what the shape asks for."""
    with pytest.raises(CompatError, match="tensor"):
        write_tensors([tensor])


def test_memory_of_other_elements_is_bytes() -> None:
    """A view of 16-bit elements is written by its bytes."""
    data = memoryview(bytearray(8)).cast("H")
    assert torch.equal(
        torch.zeros(4, dtype=torch.float16), pickle.loads(write_tensors([PickledTensor("float16", (4,), data)]))[0]
    )
