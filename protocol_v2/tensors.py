"""Tensors as frames: a description that travels in the body, and the bytes, uncopied, as payload.

A frame is the C-order, little-endian bytes of one tensor. numpy and torch are never imported by importing this module:
input is recognised by its attributes, and output imports torch (or numpy) when it is first asked for.

Whose memory is it? Out: a contiguous CPU tensor is sent from its own memory, so it must not change until it was sent
(`CacheClient.store` returns after that); anything else is copied once. In: tensors are made over the received frames
without a copy. A frame that came through a socket is the receiver's own, so writing to such a tensor changes nothing in
the cache. numpy arrays over a read-only frame are read-only; torch has no such flag, which is why `to_torch` copies
read-only frames unless told that the caller will not write.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta, Struct

from protocol_v2.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.frames import Frame

DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
"""Element types that travel, by the name both torch and this wire use, and bytes of one element. Append-only."""

_NUMPY_CARRIERS: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""numpy has no such element type: arrays carry the bits."""

MAX_DIMENSIONS: Final = 16


class TensorMeta(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Element type and shape of one tensor.

    Args:
        dtype: a name of `DTYPE_BYTES`.
        shape: extents, each in [0, 2**40); an empty shape is a scalar.
    """

    dtype: Annotated[str, Meta(max_length=64)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**40)], ...], Meta(max_length=MAX_DIMENSIONS)]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise TensorError(f"dtype: got {self.dtype[:64]!r}, wanted one of {', '.join(DTYPE_BYTES)}")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's frame."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def describe(tensor: Any) -> TensorMeta:
    """Element type and shape of a torch tensor or numpy array.

    Raises:
        TensorError: neither of both, or an element type that does not travel.
    """
    dtype, shape = getattr(tensor, "dtype", None), getattr(tensor, "shape", None)
    if dtype is None or shape is None:
        raise TensorError(f"tensor: got {type(tensor).__name__}, wanted a torch tensor or a numpy array")
    name = str(dtype).removeprefix("torch.")
    if hasattr(dtype, "byteorder"):  # numpy: the name, whatever the byte order
        name = str(dtype.name)
    return TensorMeta(name, tuple(int(extent) for extent in shape))


def to_frame(tensor: Any) -> Frame:
    """The bytes of a tensor: its own memory where that is contiguous, little-endian and on the CPU, else a copy.

    Raises:
        TensorError: as `describe`.
    """
    describe(tensor)
    array = _torch_bytes(tensor) if hasattr(tensor, "data_ptr") else _numpy_bytes(tensor)
    return memoryview(array).cast("B") if array.nbytes else b""


def to_frames(tensors: Sequence[Any]) -> tuple[tuple[TensorMeta, ...], list[Frame]]:
    """Descriptions and frames of several tensors, in order."""
    return tuple(describe(one) for one in tensors), [to_frame(one) for one in tensors]


def to_numpy(meta: TensorMeta, frame: Frame) -> Any:
    """A numpy array over a received frame, without a copy; read-only where the frame is.

    bfloat16 comes as uint16 and the 8-bit floats as uint8, which carry the bits.

    Raises:
        TensorError: the frame has not the bytes that the description promises.
    """
    import numpy as np  # noqa: PLC0415  (numpy is optional, and importing this module must not import it)

    _check_size(meta, frame)
    dtype = np.dtype(_NUMPY_CARRIERS.get(meta.dtype, meta.dtype)).newbyteorder("<")
    return np.frombuffer(frame, dtype=dtype).reshape(meta.shape)


def to_torch(meta: TensorMeta, frame: Frame, *, share_read_only: bool = False) -> Any:
    """A CPU torch tensor over a received frame.

    Args:
        meta: what the frame holds.
        frame: the bytes.
        share_read_only: a read-only frame (`bytes`) is copied, since torch would let the caller write into it; with
            True it is shared, and the caller promises not to write.

    Raises:
        TensorError: the frame has not the bytes that the description promises.
    """
    import torch  # noqa: PLC0415  (torch is optional, and importing this module must not import it)

    _check_size(meta, frame)
    dtype = getattr(torch, meta.dtype)
    if not meta.nbytes:
        return torch.empty(meta.shape, dtype=dtype)
    view = memoryview(frame)
    if view.readonly and not share_read_only:
        view = memoryview(bytearray(view))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(view, dtype=torch.uint8)
    if sys.byteorder == "big":
        flat = flat.reshape(-1, DTYPE_BYTES[meta.dtype]).flip(1).contiguous().reshape(-1)
    if flat.data_ptr() % DTYPE_BYTES[meta.dtype]:  # a frame may begin anywhere; torch wants aligned elements
        flat = flat.clone()
    return flat.view(dtype).reshape(meta.shape)


def empty_torch(metas: Sequence[TensorMeta], memory: Callable[[int], memoryview | None]) -> tuple[Any, ...]:
    """CPU torch tensors to be filled.

    Args:
        metas: what they are.
        memory: gives so many writable bytes for all of them, back to back, or None: then they get memory of their own.
    """
    import torch  # noqa: PLC0415  (as in `to_torch`)

    nbytes = sum(meta.nbytes for meta in metas)
    view = memory(nbytes) if nbytes else None
    tensors, at = [], 0
    for meta in metas:
        if view is None or at % DTYPE_BYTES[meta.dtype]:
            tensors.append(torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)))
        else:
            tensors.append(to_torch(meta, view[at : at + meta.nbytes]))
        at += meta.nbytes
    return tuple(tensors)


def _check_size(meta: TensorMeta, frame: Frame) -> None:
    got = memoryview(frame).nbytes
    if got != meta.nbytes:
        raise TensorError(f"frame: got {got} bytes, wanted {meta.nbytes} for {meta.dtype}{list(meta.shape)}")


def _torch_bytes(tensor: Any) -> Any:
    import torch  # noqa: PLC0415  (the caller's tensor proves that it is there)

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if sys.byteorder == "big":
        flat = flat.reshape(-1, tensor.element_size()).flip(1).contiguous().reshape(-1)
    return flat.numpy()


def _numpy_bytes(array: Any) -> Any:
    import numpy as np  # noqa: PLC0415  (the caller's array proves that it is there)

    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8)
