r"""Memory that two processes of one host share: whoever owns it writes, the other one copies out, and checks.

A *segment* is an anonymous file (`memfd`) of its owner, sealed so that nobody else can write to it and nobody can make
it shorter. It has no name in any file system: the other side opens it through ``/proc/<pid>/fd/<fd>``, which works for
processes of one user on one host alone, and when both are dead, however they died, it is gone.

    0       8 bytes "XK2SHM\0\1" || u64 granules || 32 bytes nonce || zeros
    4096    granules times u64: the generation of the range that begins with this granule, 0 for none; zeros up to 4096
    then    granules times 4096 bytes

A range is named by its first granule and its generation. Generations begin at a random number and never come twice.
Before the bytes of a range may change, its owner sets the generation to 0; the reader copies first and looks at the
generation afterwards: is it still the one that was announced, then every byte belonged to the range. So a reader that
was stopped for an hour between message and copy finds out. (Locks taken in between keep the accesses in order.)

The seals make it safe to map a peer's segment: it cannot get shorter under the reader, and a page that is there stays.
A range with pages that are not there is refused: to read them would make them, at the reader's cost. This module is the
only one that maps memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure, byref, c_int, c_ssize_t, c_ubyte, c_void_p, memmove, py_object, pythonapi
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from protocol_v2.errors import UnsharedError
from protocol_v2.ranges import Ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol_v2.frames import Frame

MAGIC: Final = b"XK2SHM\0\1"
GRANULE: Final = 4096
NONCE_BYTES: Final = 32
_HEAD: Final = struct.Struct("<8sQ32s")
_WORD_BYTES: Final = 8
SPLIT_BYTES: Final = 4 << 20
"""Bytes from which on a second thread is worth its waking."""

T = TypeVar("T")
_ADD_SEALS: Final = 1033
_GET_SEALS: Final = 1034
_SEALS: Final = 0x02 | 0x04 | 0x10
"""F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE (Linux 5.1): mappings made before it can write, nothing else can."""


class SegmentName(NamedTuple):
    """How a segment is found, and what makes sure that it is the one that is meant.

    Args:
        pid: of the owner, in the name space of processes that both sides see.
        fd: its file descriptor there.
        nonce: 32 random bytes, which the segment has in its head.
        size: bytes that ranges can have together; a multiple of 4096.
    """

    pid: int
    fd: int
    nonce: bytes
    size: int


class RangeName(NamedTuple):
    """Which range: index of its first granule, and its generation, at least 1."""

    granule: int
    generation: int


class Pool:
    """Memory of a mapping, handed out in ranges that come back when nobody uses them any more. Thread-safe.

    Args:
        memory: of this process, writable.
        begin: where the first granule is.
        granules: how many there are.

    Attributes:
        size: bytes of all of them.
    """

    def __init__(self, memory: mmap.mmap, begin: int, granules: int) -> None:
        self._memory = memory
        self._begin = begin
        self._ranges = Ranges(granules)
        self.size = granules * GRANULE
        self._places: dict[int, int] = {}
        self._blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._address = _address_of(memory) + begin
        self._freed: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes that are taken, rounded up to granules."""
        with self._lock:
            self._collect()
            return self.size - self._ranges.free * GRANULE

    def take(self, nbytes: int) -> memoryview | None:
        """A range that is the caller's as long as this view or one made of it is there; None where there is no room."""
        granules = max(1, -(-nbytes // GRANULE))
        with self._lock:
            self._collect()
            first = self._ranges.take(granules)
            if first is None:
                return None
            block = (c_ubyte * nbytes).from_buffer(self._memory, self._begin + first * GRANULE)
            self._places[id(block)] = first
            self._blocks[first] = block
            weakref.finalize(block, self._let_go, id(block), first, granules).atexit = False
        return memoryview(block).cast("B")

    def place(self, view: memoryview) -> int | None:
        """The first granule of the range that a view is of; None for other memory."""
        return self._places.get(id(view.obj))

    def find(self, frames: Sequence[Frame]) -> memoryview | None:
        """The range whose beginning these frames are, back to back; None for frames that lie elsewhere or otherwise."""
        begin = _address_of(frames[0])
        at = begin - self._address
        block = self._blocks.get(at // GRANULE) if 0 <= at < self.size and not at % GRANULE else None
        if block is None:
            return None
        stop = begin
        for frame in frames:
            if memoryview(frame).nbytes and (memoryview(frame).readonly or _address_of(frame) != stop):
                return None
            stop += memoryview(frame).nbytes
        view = memoryview(block).cast("B")
        return view[: stop - begin] if stop - begin <= view.nbytes else None

    def _let_go(self, block: int, first: int, granules: int) -> None:
        """The last view is gone. Runs wherever that happened, even inside `take`, so it takes no lock."""
        self._places.pop(block, None)
        self._freed.append((first, granules))

    def _collect(self) -> None:
        while self._freed:
            first, granules = self._freed.popleft()
            self._given_back(first)
            self._ranges.give_back(first, granules)

    def _given_back(self, first: int) -> None:
        """A range may be taken again after this."""


def private_pool(nbytes: int) -> Pool:
    """A pool in memory of this process alone: memory that was used before costs no page faults.

    Raises:
        UnsharedError: the operating system has none.
    """
    try:
        memory = mmap.mmap(-1, max(1, nbytes // GRANULE) * GRANULE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UnsharedError(f"{nbytes} bytes of memory cannot be had: {error.strerror}") from None
    _prefer_huge_pages(memory)
    return Pool(memory, 0, len(memory) // GRANULE)


class Segment(Pool):
    """Shared memory that this process owns.

    Args:
        nbytes: bytes that ranges can have together; memory is used as far as it is written to.

    Raises:
        UnsharedError: the operating system has none, or not of this kind.
    """

    def __init__(self, nbytes: int) -> None:
        granules = max(1, nbytes // GRANULE)
        begin = _begin_of(granules)
        try:
            fd = os.memfd_create("extra-keys", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as error:
            raise UnsharedError(f"this system has no anonymous files: {error}") from None
        weakref.finalize(self, os.close, fd).atexit = False
        try:
            os.fchmod(fd, stat.S_IRUSR | stat.S_IWUSR)
            os.ftruncate(fd, begin + granules * GRANULE)
            memory = mmap.mmap(fd, begin + granules * GRANULE)
            fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
        except (OSError, ValueError) as error:
            raise UnsharedError(f"{nbytes} bytes of shared memory cannot be had: {error}") from None
        _prefer_huge_pages(memory)
        super().__init__(memory, begin, granules)
        nonce = secrets.token_bytes(NONCE_BYTES)
        _HEAD.pack_into(memory, 0, MAGIC, granules, nonce)
        self._generations = memoryview(memory)[GRANULE : GRANULE + granules * _WORD_BYTES].cast("Q")
        self._next = secrets.randbits(62) | 1
        self.name = SegmentName(os.getpid(), fd, nonce, granules * GRANULE)

    def announce(self, view: memoryview) -> RangeName | None:
        """Let readers have a range, whose bytes must not change until `withdraw`; None for memory of no range here."""
        first = self.place(view)
        if first is None:
            return None
        with self._lock:
            generation = self._generations[first]
            if not generation:
                generation = self._generations[first] = self._next
                self._next += 1
        return RangeName(first, generation)

    def withdraw(self, view: memoryview) -> None:
        """What was announced is not valid any more: who reads it from now on, or is reading it, finds out."""
        first = self.place(view)
        if first is not None:
            with self._lock:
                self._generations[first] = 0

    def _given_back(self, first: int) -> None:
        self._generations[first] = 0


class SegmentReader:
    """Copies ranges out of another process's segment. Thread-safe; closed when nobody uses it any more.

    Args:
        name: as the owner told it.

    Raises:
        UnsharedError: it is not there, cannot be opened from here, or is not what its owner said.
    """

    def __init__(self, name: SegmentName) -> None:
        self.name = name
        granules = name.size // GRANULE
        self._begin = _begin_of(granules)
        self._fd = _opened(name, self._begin + granules * GRANULE)
        weakref.finalize(self, os.close, self._fd).atexit = False
        if _HEAD.unpack(_read(self._fd, _HEAD.size, 0)) != (MAGIC, granules, name.nonce):
            raise UnsharedError("shared memory: it is not the segment that was announced")
        try:
            self._memory = mmap.mmap(self._fd, self._begin + name.size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise UnsharedError(f"shared memory: {name.size} bytes cannot be mapped: {error}") from None
        self._address = _address_of(self._memory) + self._begin
        self._written = (0, 0)
        self._generations = memoryview(self._memory)[GRANULE : GRANULE + granules * _WORD_BYTES].cast("Q")

    def check(self, name: RangeName, nbytes: int) -> None:
        """Whether a range of so many bytes can be there.

        Raises:
            UnsharedError: it reaches out of the segment.
        """
        if name.granule * GRANULE + nbytes > self.name.size:
            raise UnsharedError(f"shared memory: {nbytes} bytes at granule {name.granule} reach out of the segment")

    def read(self, name: RangeName, into: memoryview) -> bool:
        """Copy a range.

        Args:
            name: as it was announced.
            into: as many bytes as are wanted of it; what is in them afterwards is of no use where the answer is False.

        Returns:
            Whether the range was the announced one until all was copied.

        Raises:
            UnsharedError: it reaches out of the segment, or cannot be read.
        """
        self.check(name, into.nbytes)
        at = name.granule * GRANULE
        self._check_written(at, at + into.nbytes)
        memmove(_address_of(into), self._address + at, into.nbytes)
        return self._generations[name.granule] == name.generation

    def _check_written(self, start: int, stop: int) -> None:
        """Refuse what nobody ever wrote to: to read it would take memory, and where there is none, end the process.

        What is written stays so, since no hole can be made in a file with these seals; so what was found once is not
        looked for again: the search goes on to the next hole, however far that is.
        """
        low, high = self._written
        if low <= start and stop <= high:
            return
        try:
            hole = os.lseek(self._fd, self._begin + start, os.SEEK_HOLE) - self._begin
        except OSError as error:
            raise UnsharedError(f"shared memory: cannot be read: {error.strerror}") from None
        if hole < stop:
            raise UnsharedError("shared memory: a range that was never written to")
        self._written = (min(low, start), max(high, hole)) if low <= start <= high else (start, hole)


class Copier:
    """Copies in the calling thread and in one more: one core does not fill the memory's bandwidth. Thread-safe."""

    def __init__(self) -> None:
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="extra-keys-copy")

    def run(self, copies: Sequence[Callable[[], T]], nbytes: int) -> list[T]:
        """Do all of them, `nbytes` together; what they give, in order.

        Raises:
            whatever the first of them raised, when none is running any more.
        """
        if len(copies) < 2 or nbytes < SPLIT_BYTES:
            return [copy() for copy in copies]
        waiting = deque(enumerate(copies))
        done: dict[int, T] = {}

        def work() -> None:
            while waiting:
                try:
                    place, copy = waiting.popleft()
                except IndexError:  # the other one was quicker
                    return
                done[place] = copy()

        try:
            helping = self._helper.submit(work)
        except RuntimeError:  # closed meanwhile
            work()
        else:
            try:
                work()
            finally:
                waiting.clear()
                if not helping.cancel():
                    helping.result()
        return [done[place] for place in range(len(copies))]

    def close(self) -> None:
        """The other thread ends; copies go on without it."""
        self._helper.shutdown(wait=False)


def copy_into(into: memoryview, frames: Sequence[Frame]) -> None:
    """Copy frames one after the other, without the interpreter's lock."""
    at = 0
    for frame in frames:
        nbytes = memoryview(frame).nbytes
        if at + nbytes > into.nbytes:
            raise UnsharedError(f"got more than the {into.nbytes} bytes that there is room for")
        if nbytes:
            memmove(_address_of(into) + at, _address_of(frame), nbytes)
        at += nbytes


class _Buffer(Structure):
    """`Py_buffer`, which says where an object's bytes are, read-only or not."""

    _fields_ = (
        ("buf", c_void_p),
        ("obj", py_object),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_void_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("suboffsets", c_void_p),
        ("internal", c_void_p),
    )


def _address_of(memory: Frame | mmap.mmap) -> int:
    """Where contiguous bytes are, for as long as the object is there."""
    found = _Buffer()
    pythonapi.PyObject_GetBuffer(py_object(memory), byref(found), 0)
    try:
        return found.buf or 0
    finally:
        pythonapi.PyBuffer_Release(byref(found))


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)


def _begin_of(granules: int) -> int:
    """Where the bytes begin, behind head and table."""
    return GRANULE + -(-granules * _WORD_BYTES // GRANULE) * GRANULE


def _opened(name: SegmentName, size: int) -> int:
    """A descriptor that can read the segment; nothing but an anonymous file with all its seals is ever opened."""
    try:
        handle = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise UnsharedError(
            f"shared memory: the segment of process {name.pid} is not in reach ({error.strerror}): "
            "another host, user or name space of processes"
        ) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise UnsharedError("shared memory: what is there is not the segment that was announced")
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UnsharedError(f"shared memory: cannot be opened: {error.strerror}") from None
    finally:
        os.close(handle)
    try:
        sealed = fcntl.fcntl(fd, _GET_SEALS) & _SEALS == _SEALS
    except OSError:
        sealed = False
    if not sealed:
        os.close(fd)
        raise UnsharedError("shared memory: what is there is not sealed, so it is none of a segment")
    return fd


def _read(fd: int, nbytes: int, at: int) -> bytes:
    data = os.pread(fd, nbytes, at)
    if len(data) != nbytes:
        raise UnsharedError("shared memory: ends early")
    return data
