"""Embedding rows of any tensor as bytes: C-order, little-endian, whatever the device, stride or element type.

torch and numpy are recognised by their attributes. A torch tensor's bytes are read through a view as unsigned bytes, so
element types that numpy lacks (``bfloat16``, the 8-bit floats) need no conversion.
"""

import struct
import sys
from dataclasses import dataclass, field
from typing import Any

from keying.encoding import MAX_U32
from keying.engines.reasons import UncacheableReason
from keying.errors import UncacheableRequest

_DOUBLE = 8
_BIG = sys.byteorder == "big"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a two-dimensional tensor.

    Attributes:
        data: all rows, C-order, little-endian; does not print.
        row_bytes: bytes of one row, at least 1.
        dtype: the element type's own name, such as ``bfloat16``.
    """

    data: bytes = field(repr=False)
    row_bytes: int
    dtype: str

    def __len__(self) -> int:
        return len(self.data) // self.row_bytes

    def between(self, start: int, stop: int) -> bytes:
        """The bytes of rows ``[start, stop)``."""
        return self.data[start * self.row_bytes : stop * self.row_bytes]


def dtype_name(dtype: Any) -> str:
    """``bfloat16`` for ``torch.bfloat16``, ``numpy.dtype('float32')`` and the like."""
    return str(getattr(dtype, "name", None) or dtype).removeprefix("torch.")


def rows_of(value: Any, where: str) -> Rows:
    """The rows of a tensor, an array, or a list of lists of floats.

    Args:
        value: shape [rows, width], or [1, rows, width].
        where: the attribute, for messages.

    Raises:
        UncacheableRequest: another shape, no width, or bytes that cannot be read.
    """
    try:
        if hasattr(value, "dtype"):
            return _tensor_rows(value, where)
        return _listed_rows(value, where)
    except UncacheableRequest:
        raise
    except Exception as error:
        raise _refusal(where, f"reading the rows raised {type(error).__name__}") from error


def _tensor_rows(value: Any, where: str) -> Rows:
    shape = tuple(int(size) for size in value.shape)
    if len(shape) == 3 and shape[0] == 1:
        value, shape = value[0], shape[1:]
    if len(shape) != 2:
        raise _refusal(where, f"has {len(shape)} dimensions, wanted rows x width")
    name = dtype_name(value.dtype)
    data, itemsize = _tensor_bytes(value) if hasattr(value, "detach") else _array_bytes(value)
    row_bytes = shape[1] * itemsize
    if not 1 <= row_bytes <= MAX_U32 or len(data) != shape[0] * row_bytes:
        raise _refusal(where, "has rows without a width, or of another size than its shape says")
    return Rows(data, row_bytes, name)


def _tensor_bytes(tensor: Any) -> tuple[bytes, int]:
    """torch: the module is the one that made the tensor, so it is loaded; nothing is imported for it."""
    local = tensor.detach().cpu().contiguous()
    itemsize = int(local.element_size())
    if not local.numel():
        return b"", itemsize
    flat = local.reshape(-1).view(sys.modules["torch"].uint8)
    return little_endian(flat.numpy().tobytes(), itemsize, big=_BIG), itemsize


def _array_bytes(values: Any) -> tuple[bytes, int]:
    """numpy: the order of bytes is the array's own, not the machine's."""
    itemsize = int(values.dtype.itemsize)
    if values.dtype.hasobject:
        raise TypeError("an array of objects has no rows")
    data = values.tobytes(order="C")
    order = values.dtype.byteorder
    return little_endian(data, itemsize, big=order == ">" or (order == "=" and _BIG)), itemsize


def little_endian(data: bytes, itemsize: int, *, big: bool) -> bytes:
    """Elements of ``itemsize`` bytes, turned around if they are big-endian."""
    if not big or itemsize == 1:
        return data
    turned = bytearray(len(data))
    for place in range(itemsize):
        turned[place::itemsize] = data[itemsize - 1 - place :: itemsize]
    return bytes(turned)


def _listed_rows(value: Any, where: str) -> Rows:
    """Lists of floats, as a request body carries them: each number as a float64, so no rounding is guessed."""
    rows = [list(row) for row in value]
    widths = {len(row) for row in rows}
    if len(widths) != 1 or not all(type(one) in {int, float} for row in rows for one in row):
        raise _refusal(where, "wanted rows of numbers, all of one width")
    (width,) = widths
    if not width:
        raise _refusal(where, "has rows without a width")
    packer = struct.Struct(f"<{width}d")
    return Rows(b"".join(packer.pack(*row) for row in rows), width * _DOUBLE, "float64")


def _refusal(where: str, what: str) -> UncacheableRequest:
    return UncacheableRequest(UncacheableReason.MALFORMED_EMBEDS, f"{where}: {what}")
