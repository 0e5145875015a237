"""Token ids in any container become one form: packed little-endian u32.

Containers and integer widths must not show in a key, and nothing that is not an integer in [0, 2**32) may pass: bool is
an int in Python, so ``[True]`` would otherwise share the key of ``[1]``. numpy and torch are recognised by their
attributes and never imported.

Source: docs/spec/key-schema-2.md, "Tokens".
"""

import re
import struct
import sys
from array import array
from collections.abc import Sequence
from operator import index
from typing import Any, Final

from keying.encoding import MAX_U32, U32
from keying.errors import TokenError, TokenTypeError

TOKEN_BYTES: Final = 4
_CODE: Final = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)
_INTEGER_DTYPE: Final = re.compile(r"u?int(8|16|32|64)\Z")
_SWAP: Final = sys.byteorder == "big"
_FEW: Final = 16


def pack_tokens(tokens: Any) -> bytes:
    """Token ids as packed little-endian u32.

    Args:
        tokens: n ids in [0, 2**32) in a list, tuple, range, ``array.array``, one-dimensional integer numpy array or
            torch tensor (any width, byte order, stride, device), or another sequence of objects with ``__index__``.

    Returns:
        4 x n bytes.

    Raises:
        TokenError: an id is negative or too wide; the message gives its place, never the id.
        TokenTypeError: the container or an element cannot hold token ids.
    """
    if type(tokens) is list:
        if len(tokens) == 1 and type(tokens[0]) is int:  # one decoded token: the step that every request takes most
            try:
                return U32.pack(tokens[0])
            except struct.error:
                raise _fault(tokens) from None
        return _pack_list(tokens)
    if type(tokens) is tuple:
        return _pack_list(tokens)
    if isinstance(tokens, str | bytes | bytearray | memoryview):
        raise TokenTypeError(f"tokens: got {type(tokens).__name__}, wanted a sequence of integers; unpack it first")
    if isinstance(tokens, array):
        return _pack_array(tokens)
    if hasattr(tokens, "dtype"):
        return _pack_ndarray(tokens)
    if isinstance(tokens, Sequence):
        return _pack_list(list(tokens))
    raise TokenTypeError(
        f"tokens: got {type(tokens).__name__}, wanted a list, tuple, range, array, one-dimensional integer array or "
        "tensor, or another sequence of integers"
    )


def _pack_list(tokens: list[Any] | tuple[Any, ...]) -> bytes:
    try:
        packed = array(_CODE, tokens)
    except Exception:  # __index__ is the caller's code; the search below names the element
        raise _fault(tokens) from None
    if _SWAP:  # pragma: no cover  (a big-endian machine)
        packed.byteswap()
    data = packed.tobytes()
    _refuse_bools(tokens, data)
    return data


def _refuse_bools(tokens: list[Any] | tuple[Any, ...], data: bytes) -> None:
    """``array`` takes a bool for 0 or 1, so the elements that became 0 or 1 get a second look.

    A token below 256 has a zero second byte; few ids of a large vocabulary have one, and finding those bytes is a
    `memchr`. Where many have one (a small vocabulary), looking at every type in one go is cheaper.
    """
    n = len(tokens)
    if n <= _FEW:
        candidates: Any = tokens
    else:
        second = data[1::4]
        if (zeros := second.count(0)) == 0:
            return
        if zeros * 16 > n:
            if set(map(type, tokens)) == {int}:
                return
            candidates = tokens
        else:
            candidates = []
            place = second.find(0)
            while place >= 0:
                candidates.append(tokens[place])
                place = second.find(0, place + 1)
    for token in candidates:
        if type(token) is not int and _is_bool(token):
            raise _fault(tokens)


def _is_bool(token: Any) -> bool:
    """Also a zero-dimensional bool of numpy or torch, which torch lets through ``__index__``."""
    return isinstance(token, bool) or "bool" in str(getattr(token, "dtype", ""))


def _fault(tokens: list[Any] | tuple[Any, ...]) -> TokenError:
    """The error for the first element that is not a token id."""
    for place, token in enumerate(tokens):
        if _is_bool(token):
            return TokenTypeError(f"tokens[{place}]: got bool, wanted an integer; a mask is not a list of token ids")
        try:
            value = index(token)
        except Exception:  # whatever __index__ raises, it is not an integer
            return TokenTypeError(f"tokens[{place}]: got {type(token).__name__}, wanted an integer")
        if not 0 <= value <= MAX_U32:
            return TokenError(f"tokens[{place}]: out of range, wanted 0 <= token < 2**32")
    return TokenError("tokens: changed while they were read; hand in a sequence that nothing else writes to")


def _pack_array(tokens: "array[Any]") -> bytes:
    if tokens.typecode not in "bBhHiIlLqQ":
        raise TokenTypeError(f"tokens: got an array of typecode {tokens.typecode!r}, wanted an integer one")
    if tokens.typecode == _CODE and not _SWAP:
        return tokens.tobytes()
    return _pack_list(tokens.tolist())


def _pack_ndarray(tokens: Any) -> bytes:
    kind = str(getattr(tokens.dtype, "name", tokens.dtype)).removeprefix("torch.")
    if not _INTEGER_DTYPE.match(kind):
        raise TokenTypeError(f"tokens: got elements of {kind}, wanted an integer dtype")
    dimensions = getattr(tokens, "ndim", None)
    if dimensions != 1:
        raise TokenTypeError(f"tokens: got {dimensions} dimensions, wanted 1; flatten it first")
    if hasattr(tokens, "filled"):
        raise TokenTypeError("tokens: got a masked array; what is under the mask is not a token, compress it first")
    if hasattr(tokens, "detach"):
        return _pack_tensor(tokens)
    if hasattr(tokens, "__array_interface__"):
        return _pack_numpy(tokens)
    return _pack_list(tokens.tolist())


def _pack_tensor(tensor: Any) -> bytes:
    local = tensor.detach().cpu()
    try:
        values = local.numpy()
    except Exception:  # torch without numpy, or a tensor subclass: one list more, the same keys
        return _pack_list(local.tolist())
    return _pack_numpy(values)


def _pack_numpy(values: Any) -> bytes:
    if values.size and (int(values.min()) < 0 or int(values.max()) > MAX_U32):
        raise _fault(values.tolist())
    packed: bytes = values.astype("<u4").tobytes()
    return packed


def unpack_tokens(data: bytes | memoryview) -> tuple[int, ...]:
    """The ids that `pack_tokens` packed.

    Raises:
        TokenError: not a whole number of u32.
    """
    if len(data) % TOKEN_BYTES:
        raise TokenError(f"packed tokens: got {len(data)} bytes, wanted a multiple of {TOKEN_BYTES}")
    packed = array(_CODE, bytes(data))
    if _SWAP:  # pragma: no cover  (a big-endian machine)
        packed.byteswap()
    return tuple(packed)
