"""Tensors as frames: every element type, no needless copies, and no shared memory that could be written."""

import subprocess
import sys
from typing import Any

import pytest

from protocol_v2.errors import TensorError
from protocol_v2.tensors import DTYPE_BYTES, TensorMeta, describe, to_frame, to_frames, to_numpy, to_torch

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def some_tensor(dtype: str, shape: tuple[int, ...] = (2, 3, 4)) -> Any:
    """A tensor whose bytes are all different patterns."""
    count = int(np.prod(shape)) * DTYPE_BYTES[dtype]
    raw = torch.arange(count, dtype=torch.int64).to(torch.uint8)
    if dtype == "bool":
        raw %= 2
    return raw.view(getattr(torch, dtype)).reshape(shape)


def same_bits(one: Any, other: Any) -> bool:
    """Equal dtype, shape and bits (NaNs included)."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(to_frame(one.contiguous())) == bytes(to_frame(other.contiguous()))
    )


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_element_type_travels(dtype: str) -> None:
    """Torch tensors of every named type come out with the same bits, from writable and read-only frames."""
    tensor = some_tensor(dtype)
    (meta,), (frame,) = to_frames([tensor])
    assert TensorMeta(dtype, (2, 3, 4)) == meta
    assert meta.nbytes == memoryview(frame).nbytes == tensor.numel() * tensor.element_size()
    for received in (bytes(frame), memoryview(bytearray(frame)), memoryview(bytes(frame))):
        assert same_bits(tensor, to_torch(meta, received))


@pytest.mark.parametrize(
    "dtype", [name for name in DTYPE_BYTES if name not in {"bfloat16", "float8_e4m3fn", "float8_e5m2"}]
)
def test_numpy_arrays_travel_to_the_same_frames(dtype: str) -> None:
    """A numpy array and a torch tensor of the same values are the same frame and come out equal."""
    tensor = some_tensor(dtype)
    array = tensor.numpy()
    assert describe(tensor) == describe(array)
    assert bytes(to_frame(tensor)) == bytes(to_frame(array))
    received = to_numpy(describe(array), bytes(to_frame(array)))
    assert received.tobytes() == array.tobytes()
    assert received.dtype == array.dtype


def test_types_without_a_numpy_name_come_as_their_bits() -> None:
    """bfloat16 and the 8-bit floats come to numpy as integers of the same width."""
    tensor = some_tensor("bfloat16")
    array = to_numpy(describe(tensor), bytes(to_frame(tensor)))
    assert (np.dtype("uint16"), (2, 3, 4)) == (array.dtype, array.shape)
    assert array.tobytes() == bytes(to_frame(tensor))


def test_big_endian_arrays_travel_little_endian() -> None:
    """Byte order does not show in a frame."""
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    assert TensorMeta("int32", (2, 3)) == describe(array)
    assert np.arange(6, dtype="<i4").tobytes() == bytes(to_frame(array))


def test_non_contiguous_tensors_are_made_contiguous() -> None:
    """Transposed, strided and broadcast input travels in C order."""
    base = some_tensor("float16", (4, 6))
    for tensor in (base.t(), base[:, ::2], base[1:3, 1:4], base[:1].expand(4, 6), base.requires_grad_(False)):
        assert same_bits(tensor, to_torch(describe(tensor), bytes(to_frame(tensor))))
    array = base.numpy()[::2, ::-1]
    assert np.ascontiguousarray(array).tobytes() == bytes(to_frame(array))


def test_contiguous_input_is_not_copied() -> None:
    """A frame of a contiguous CPU tensor is the tensor's own memory; so it must not change before it was sent."""
    tensor = torch.zeros(4, dtype=torch.int32)
    frame = to_frame(tensor)
    tensor[0] = 7
    assert 7 == memoryview(frame)[0]
    array = np.zeros(4, dtype=np.int32)
    frame = to_frame(array)
    array[0] = 7
    assert 7 == memoryview(frame)[0]


def test_received_frames_are_not_copied_when_they_are_the_receivers_own() -> None:
    """A writable frame is the receiver's own memory: tensor and frame are one."""
    frame = bytearray(8)
    tensor = to_torch(TensorMeta("int32", (2,)), memoryview(frame))
    frame[0] = 9
    assert 9 == int(tensor[0])


def test_no_read_only_memory_can_be_written_through_a_tensor() -> None:
    """R3: mutating what was received never changes a frame that is not the receiver's to write."""
    frame = bytes(8)
    tensor = to_torch(TensorMeta("int32", (2,)), frame)
    tensor[0] = 9
    assert bytes(8) == frame
    array = to_numpy(TensorMeta("int32", (2,)), frame)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    shared = to_torch(TensorMeta("int32", (2,)), frame, share_read_only=True)
    assert [0, 0] == shared.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_scalars_and_empty_tensors_travel(shape: tuple[int, ...]) -> None:
    """No extents, or an extent of zero, is a tensor like any other."""
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    frame = to_frame(tensor)
    assert describe(tensor).nbytes == len(frame)
    assert same_bits(tensor, to_torch(describe(tensor), bytes(frame)))
    assert shape == to_numpy(describe(tensor), bytes(frame)).shape


def test_frames_may_begin_anywhere_in_memory() -> None:
    """A frame that is not aligned for its element type still becomes a tensor."""
    buffer = bytearray(17)
    buffer[1:] = np.arange(2, dtype=np.int64).tobytes()
    assert [0, 1] == to_torch(TensorMeta("int64", (2,)), memoryview(buffer)[1:]).tolist()


@pytest.mark.parametrize("nbytes", [0, 7, 9, 16])
def test_a_frame_of_another_size_is_refused(nbytes: int) -> None:
    """D: no tensor is made of bytes that its description does not promise."""
    for make in (to_torch, to_numpy):
        with pytest.raises(TensorError, match="wanted 8"):
            make(TensorMeta("int32", (2,)), bytes(nbytes))


@pytest.mark.parametrize("value", [[1, 2], None, b"bytes", 3])
def test_what_is_no_tensor_is_refused(value: object) -> None:
    """Only torch tensors and numpy arrays travel."""
    with pytest.raises(TensorError, match="wanted a torch tensor or a numpy array"):
        describe(value)


@pytest.mark.parametrize(
    "value", [np.zeros(1, dtype=np.complex64), np.zeros(1, dtype=object), torch.zeros(1).to(torch.complex64)]
)
def test_element_types_that_do_not_travel_are_refused(value: Any) -> None:
    """An element type without a name on the wire is refused, and never sent under another name."""
    with pytest.raises(TensorError, match="dtype"):
        to_frame(value)


def test_importing_the_module_imports_neither_torch_nor_numpy() -> None:
    """A router or a command line pays for neither."""
    code = "import sys, protocol_v2, protocol_v2.tensors; print({'torch', 'numpy', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "set()" == done.stdout.strip()
