"""A closed reader of pickles: inert values from a short list of opcodes, and nothing called by the stream's choice.

A pickle is a program that can call any importable function. This reader knows numbers, text, bytes, tuples, lists,
dicts with text keys, and the few globals that its caller names; a global stands for itself and is never imported, and
what "calling" one means is a function of the caller's that looks at inert values. Every other opcode, global and call
is refused. Steps, depth and the length of each text are bounded, so a stream costs no more than its bytes.

Bytes are given as views of the stream.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from compat.errors import CompatError

MAX_TEXT_BYTES: Final = 256
"""Bytes of any one text; the longest that torch writes has 32."""

MAX_LONG_BYTES: Final = 10
"""Bytes of a long integer: those of the magic number of torch's streams."""

MAX_DEPTH: Final = 32
"""Open marks at one time; a list of tensors has three."""

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class PickleRefusedError(CompatError):
    """A pickle holds something that the closed reader does not know, or more of it than it reads."""

    reason: Final = "pickle"
    """A short word for counters."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the stream mentions and the reader knows. Not the thing itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """What one kind of stream may hold.

    Args:
        protocols: pickle protocols.
        opcodes: opcodes besides PROTO and STOP.
        globals: names, ``module name`` with a space.
        calls: what calling a global with a tuple of inert values gives; the function may raise `PickleRefusedError`.
        persistent: what a persistent id stands for; None where there are none.
        max_steps: opcodes in the stream.
    """

    protocols: frozenset[int]
    opcodes: frozenset[int]
    globals: frozenset[str]
    calls: Mapping[str, Callable[[tuple[Any, ...]], Any]] = field(default_factory=dict)
    persistent: Callable[[Any], Any] | None = None
    max_steps: int = 64


def load(data: memoryview, start: int, grammar: Grammar) -> tuple[Any, int]:
    """The value of one pickle, and where it ended.

    Args:
        data: bytes; more may follow the pickle.
        start: where the pickle begins.
        grammar: what it may hold.

    Raises:
        PickleRefusedError: anything else; the message names an opcode or a global, never a value.
    """
    try:
        return _Machine(data, start, grammar).run()
    except (IndexError, struct.error):  # from an empty stack, or past the end of the stream
        raise PickleRefusedError("pickle: is cut short, or takes more from its stack than is there") from None


class _Machine:
    def __init__(self, data: memoryview, start: int, grammar: Grammar) -> None:
        self._data = data
        self._at = start
        self._grammar = grammar
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> tuple[Any, int]:
        data, grammar = self._data, self._grammar
        if data[self._at] != 0x80 or data[self._at + 1] not in grammar.protocols:
            raise PickleRefusedError(f"pickle: wanted protocol {sorted(grammar.protocols)}")
        self._at += 2
        for _ in range(grammar.max_steps):
            opcode = data[self._at]
            self._at += 1
            if opcode == 0x2E:  # STOP
                if self._marks or len(self._stack) != 1:
                    raise PickleRefusedError("pickle: does not end with one value")
                return self._stack[0], self._at
            if opcode not in grammar.opcodes:
                raise PickleRefusedError(f"pickle: opcode 0x{opcode:02x} is not part of such a stream")
            self._step(opcode)
        raise PickleRefusedError(f"pickle: has more than {grammar.max_steps} steps")

    def _step(self, opcode: int) -> None:
        stack = self._stack
        match opcode:
            case 0x94:  # MEMOIZE
                self._memo[len(self._memo)] = stack[-1]
            case 0x71:  # BINPUT
                self._memo[self._u8()] = stack[-1]
            case 0x68:  # BINGET
                stack.append(self._remembered(self._u8()))
            case 0x6A:  # LONG_BINGET
                stack.append(self._remembered(self._u32()))
            case 0x4B:  # BININT1
                stack.append(self._u8())
            case 0x4D:  # BININT2
                stack.append(int.from_bytes(self._take(2), "little"))
            case 0x4A:  # BININT
                stack.append(int.from_bytes(self._take(4), "little", signed=True))
            case 0x8A:  # LONG1
                stack.append(int.from_bytes(self._take(self._u8(), MAX_LONG_BYTES), "little", signed=True))
            case 0x4E:  # NONE
                stack.append(None)
            case 0x88 | 0x89:  # NEWTRUE, NEWFALSE
                stack.append(opcode == 0x88)
            case 0x8C:  # SHORT_BINUNICODE
                stack.append(self._text(self._u8()))
            case 0x58:  # BINUNICODE
                stack.append(self._text(self._u32()))
            case 0x43:  # SHORT_BINBYTES
                stack.append(self._take(self._u8()))
            case 0x42:  # BINBYTES
                stack.append(self._take(self._u32()))
            case 0x8E:  # BINBYTES8
                stack.append(self._take(self._u64()))
            case 0x28:  # MARK
                if len(self._marks) == MAX_DEPTH:
                    raise PickleRefusedError(f"pickle: has more than {MAX_DEPTH} levels")
                self._marks.append(stack)
                self._stack = []
            case 0x74:  # TUPLE
                items = self._popped_mark()
                self._stack.append(tuple(items))
            case 0x29:  # EMPTY_TUPLE
                stack.append(())
            case 0x85 | 0x86 | 0x87:  # TUPLE1, TUPLE2, TUPLE3
                n = opcode - 0x84
                if len(stack) < n:
                    raise IndexError
                stack[-n:] = [tuple(stack[-n:])]
            case 0x5D:  # EMPTY_LIST
                stack.append([])
            case 0x61:  # APPEND
                value = stack.pop()
                self._top(list).append(value)
            case 0x65:  # APPENDS
                items = self._popped_mark()
                self._top(list).extend(items)
            case 0x7D:  # EMPTY_DICT
                stack.append({})
            case 0x75:  # SETITEMS
                self._set_items(self._popped_mark())
            case 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                stack.append(self._global(module, name))
            case 0x63:  # GLOBAL
                module, name = self._line(), self._line()
                stack.append(self._global(module, name))
            case 0x52:  # REDUCE
                arguments, callee = stack.pop(), stack.pop()
                stack.append(self._called(callee, arguments))
            case 0x51:  # BINPERSID
                stack.append(self._persistent(stack.pop()))
            case 0x95:  # FRAME: a hint for buffering; what it frames is read all the same
                if self._u64() > len(self._data) - self._at:
                    raise PickleRefusedError("pickle: a frame is longer than the stream")
            case _:
                raise PickleRefusedError(f"pickle: opcode 0x{opcode:02x} is not known to the closed reader")

    def _take(self, n: int, limit: int | None = None) -> memoryview:
        if limit is not None and n > limit:
            raise PickleRefusedError(f"pickle: a value has {n} bytes, at most {limit}")
        stop = self._at + n
        if stop > len(self._data):
            raise PickleRefusedError("pickle: a value is longer than the stream")
        taken = self._data[self._at : stop]
        self._at = stop
        return taken

    def _u8(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._data, self._at)
        self._at += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._data, self._at)
        self._at += 8
        return int(value)

    def _text(self, n: int) -> str:
        try:
            return str(self._take(n, MAX_TEXT_BYTES), "ascii")
        except UnicodeDecodeError:
            raise PickleRefusedError("pickle: a text is not ASCII") from None

    def _line(self) -> str:
        for stop in range(self._at, min(self._at + MAX_TEXT_BYTES, len(self._data))):
            if self._data[stop] == 0x0A:
                line = self._text(stop - self._at)
                self._at += 1
                return line
        raise PickleRefusedError("pickle: the name of a global does not end")

    def _remembered(self, place: int) -> Any:
        if place not in self._memo:
            raise PickleRefusedError("pickle: recalls what it did not remember")
        return self._memo[place]

    def _popped_mark(self) -> list[Any]:
        if not self._marks:
            raise PickleRefusedError("pickle: closes what it did not open")
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _top(self, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
        top = self._stack[-1]
        if type(top) is not kind:
            raise PickleRefusedError(f"pickle: puts items into something that is no {kind.__name__}")
        return top

    def _set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        keys, values = items[0::2], items[1::2]
        if len(keys) != len(values) or not all(type(key) is str for key in keys):
            raise PickleRefusedError("pickle: a dict wants pairs, and text as keys")
        target.update(zip(keys, values, strict=True))

    def _global(self, module: object, name: object) -> Global:
        full = f"{module} {name}" if type(module) is str and type(name) is str else ""
        if full not in self._grammar.globals:
            raise PickleRefusedError(f"pickle: global {full[:80]!r} is not part of such a stream; nothing was imported")
        return Global(full)

    def _called(self, callee: object, arguments: object) -> Any:
        call = self._grammar.calls.get(callee.name) if type(callee) is Global else None
        if call is None or type(arguments) is not tuple:
            raise PickleRefusedError("pickle: calls something that is not called in such a stream; nothing was run")
        return call(arguments)

    def _persistent(self, identity: object) -> Any:
        if self._grammar.persistent is None:
            raise PickleRefusedError("pickle: has a persistent id where there is none")
        return self._grammar.persistent(identity)
