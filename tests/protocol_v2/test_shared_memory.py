"""Segments: what the owner writes is what the reader gets, or the reader knows that it is not."""

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocol_v2.errors import UnsharedError
from protocol_v2.shared_memory import (
    GRANULE,
    SPLIT_BYTES,
    Copier,
    RangeName,
    Segment,
    SegmentName,
    SegmentReader,
    copy_into,
    private_pool,
)

SIZE = 16 * GRANULE


def filled(segment: Segment, byte: int, nbytes: int = 5000) -> tuple[memoryview, RangeName]:
    """A range full of one byte, announced."""
    view = segment.take(nbytes)
    assert view is not None
    copy_into(view, [bytes([byte]) * nbytes])
    name = segment.announce(view)
    assert name is not None
    return view, name


def held() -> set[tuple[str, int]]:
    """What this process has open, by descriptor and inode, and the segments that it has mapped."""
    found = set()
    for one in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself, and what other threads close
            found.add((one.name, one.stat().st_ino))
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "extra-keys" in line]
    return found | {("mapped", int(fields[4])) for fields in mapped}


def test_a_reader_gets_what_the_owner_wrote() -> None:
    """Byte for byte, for a range of any size and at any place; and once it is withdrawn, nothing of it."""
    segment = Segment(SIZE)
    reader = SegmentReader(segment.name)
    for byte, nbytes in ((1, 1), (2, GRANULE), (3, 5000), (4, 3 * GRANULE)):
        view, name = filled(segment, byte, nbytes)
        into = memoryview(bytearray(nbytes))
        assert reader.read(name, into)
        assert bytes([byte]) * nbytes == into
        segment.withdraw(view)
        assert not reader.read(name, into)


def test_a_range_that_was_reused_is_not_taken_for_the_one_before() -> None:
    """The same place with other bytes has another generation: the old name finds out, and the new one reads."""
    segment = Segment(GRANULE)
    reader = SegmentReader(segment.name)
    view, old = filled(segment, 1, 100)
    del view
    _view, new = filled(segment, 2, 100)
    assert (old.granule, False) == (new.granule, old.generation == new.generation)
    into = memoryview(bytearray(100))
    assert not reader.read(old, into)
    assert reader.read(new, into)
    assert b"\2" * 100 == into


def test_a_range_inside_a_later_one_is_not_taken_for_it() -> None:
    """A place that is now the middle of another range has no generation that an old name could meet."""
    segment = Segment(4 * GRANULE)
    reader = SegmentReader(segment.name)
    first, _ = filled(segment, 1, GRANULE)
    second, old = filled(segment, 2, GRANULE)
    del first, second
    _whole, new = filled(segment, 3, 3 * GRANULE)
    into = memoryview(bytearray(GRANULE))
    assert (0, 1) == (new.granule, old.granule)
    assert not reader.read(old, into)
    assert not reader.read(RangeName(1, new.generation), into)
    assert reader.read(new, into)


def test_a_range_lives_as_long_as_anything_made_of_it() -> None:
    """Slices and read-only views keep it; when the last is gone its place is free again."""
    segment = Segment(2 * GRANULE)
    view = segment.take(GRANULE + 1)
    assert view is not None
    part = view[10:20].toreadonly()
    del view
    assert (2 * GRANULE, None) == (segment.used, segment.take(1))
    assert segment.place(part) == 0
    del part
    assert 0 == segment.used
    assert segment.take(2 * GRANULE) is not None


def test_frames_are_found_where_they_lie() -> None:
    """Frames back to back from the beginning of a range are that range; any others are none."""
    segment = Segment(4 * GRANULE)
    view, other = segment.take(100), segment.take(100)
    assert view is not None
    assert other is not None
    found = segment.find([view[:60], view[60:90]])
    assert found is not None
    assert (90, 0) == (found.nbytes, segment.place(found))
    for elsewhere in ([view[1:]], [view[:60], view[61:]], [view[:60], other], [bytearray(100)], [b""], [b"x"]):
        assert segment.find([memoryview(one) for one in elsewhere]) is None
    del view, found
    assert segment.find([other]) is not None


def test_another_generation_each_time_it_is_announced() -> None:
    """Announcing again changes nothing; after a withdrawal it is a new name, and the old one stays dead."""
    segment = Segment(SIZE)
    reader = SegmentReader(segment.name)
    view, first = filled(segment, 7)
    assert first == segment.announce(view)
    segment.withdraw(view)
    second = segment.announce(view)
    assert second is not None
    into = memoryview(bytearray(10))
    assert (False, True) == (reader.read(first, into), reader.read(second, into))
    assert segment.announce(memoryview(b"elsewhere")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 2**30},
        {"fd": 2**20},
        {"nonce": bytes(32)},
        {"size": SIZE + GRANULE},
        {"size": SIZE - GRANULE},
        {"size": 2**48},
    ],
)
def test_another_name_opens_nothing(change: dict[str, Any]) -> None:
    """A process, descriptor, nonce or size that is not the segment's is refused, and no descriptor stays open."""
    segment = Segment(SIZE)
    before = held()
    with pytest.raises(UnsharedError, match="shared memory"):
        SegmentReader(segment.name._replace(**change))
    assert not held() - before
    assert SegmentReader(segment.name).name == segment.name


def test_nothing_but_a_sealed_segment_is_opened(tmp_path: Path) -> None:
    """A file, a pipe and an anonymous file without seals are refused at once, whatever is in them."""
    real = Segment(SIZE)
    image = os.pread(real.name.fd, 1 << 20, 0)
    file = tmp_path / "f"
    file.write_bytes(image)
    unsealed = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(unsealed, image)
    opened = [os.open(file, os.O_RDONLY), unsealed, *os.pipe()]
    try:
        for fd in opened:
            with pytest.raises(UnsharedError, match="shared memory: what is there"):
                SegmentReader(real.name._replace(fd=fd))
    finally:
        for fd in opened:
            os.close(fd)
    assert SegmentReader(real.name)


def test_nobody_else_can_write_or_shorten_it() -> None:
    """A process that opens the segment for writing can neither write, nor map it writable, nor shorten it."""
    segment = Segment(SIZE)
    view, name = filled(segment, 1)
    fd = os.open(f"/proc/self/fd/{segment.name.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, GRANULE)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    into = memoryview(bytearray(5000))
    assert SegmentReader(segment.name).read(name, into)
    assert view == into


@pytest.mark.parametrize("name", [RangeName(16, 1), RangeName(2**40, 1), RangeName(15, 2)])
def test_a_range_outside_is_an_error(name: RangeName) -> None:
    """Where the bytes wanted are not all in the segment nothing is read; at its very end they are."""
    segment = Segment(SIZE)
    whole = segment.take(SIZE)
    assert whole is not None
    whole[:] = bytes(SIZE)
    reader = SegmentReader(segment.name)
    with pytest.raises(UnsharedError, match="reach out"):
        reader.read(name, memoryview(bytearray(GRANULE + 1)))
    assert not reader.read(RangeName(15, 1), memoryview(bytearray(GRANULE)))


def test_a_hole_is_not_read() -> None:
    """A range that was never written to is an error, so that reading costs no memory; once written, it is read."""
    segment = Segment(SIZE)
    reader = SegmentReader(segment.name)
    view = segment.take(3 * GRANULE)
    assert view is not None
    view[: 2 * GRANULE] = bytes(2 * GRANULE)
    name = segment.announce(view)
    assert name is not None
    before = os.fstat(segment.name.fd).st_blocks
    with pytest.raises(UnsharedError, match="never written"):
        reader.read(name, memoryview(bytearray(3 * GRANULE)))
    assert before == os.fstat(segment.name.fd).st_blocks
    view[-1] = 1
    assert reader.read(name, memoryview(bytearray(3 * GRANULE)))


def test_a_copier_does_everything_once_and_in_order() -> None:
    """With its other thread, without it, and after it was closed; what one copy raises is raised when none runs."""
    copier = Copier()
    calls: list[int] = []

    def copy(number: int) -> int:
        calls.append(number)
        if number == 13:
            raise UnsharedError("thirteen")
        return number * 2

    copies = [partial(copy, number) for number in range(12)]
    for nbytes in (1, SPLIT_BYTES):
        calls.clear()
        assert [number * 2 for number in range(12)] == copier.run(copies, nbytes)
        assert list(range(12)) == sorted(calls)
    for number in range(20):
        with pytest.raises(UnsharedError, match="thirteen"):
            copier.run([*copies[:number], partial(copy, 13), *copies[number:]], SPLIT_BYTES)
    copier.close()
    assert [0, 2] == copier.run(copies[:2], SPLIT_BYTES)


def test_memory_and_descriptors_come_back() -> None:
    """When segment, reader and ranges are gone, nothing of them is open or mapped."""
    before = held()
    segment = Segment(SIZE)
    reader = SegmentReader(segment.name)
    view, _ = filled(segment, 1)
    assert {"mapped"} < {name for name, _ in held() - before}
    del segment, reader
    assert 1 == view[0]
    del view
    gc.collect()
    assert not held() - before


def test_nothing_is_left_of_an_owner_that_was_killed() -> None:
    """It has no name in a file system; after kill -9 of its owner nobody can open it, and who has it open reads on."""
    program = (
        "import sys; from protocol_v2.shared_memory import *\n"
        "s = Segment(16 * GRANULE); v = s.take(4); v[:] = b'okay'\n"
        "print(*s.name[:2], s.name.nonce.hex(), *s.announce(v), flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdin is not None
    try:
        pid, fd, nonce, granule, generation = owner.stdout.readline().split()
        name = SegmentName(int(pid), int(fd), bytes.fromhex(nonce), SIZE)
        reader = SegmentReader(name)
        opened = [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]
        assert "/memfd:extra-keys (deleted)" in opened
        assert not [one for one in opened if one.startswith("/dev/shm/")]
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()
    into = memoryview(bytearray(4))
    assert reader.read(RangeName(int(granule), int(generation)), into)
    assert b"okay" == bytes(into)
    with pytest.raises(UnsharedError, match="not in reach"):
        SegmentReader(name)


def test_a_system_without_such_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the operating system gives none it is one typed error, and nothing stays open."""
    before = held()
    with pytest.raises(UnsharedError, match="cannot be had"):
        Segment(2**62)
    with pytest.raises(UnsharedError, match="cannot be had"):
        private_pool(2**62)
    gc.collect()
    assert not held() - before
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsharedError, match="no anonymous files"):
        Segment(SIZE)


def test_readers_in_threads_never_get_a_torn_range() -> None:
    """Ranges are reused as fast as can be while a thread reads: each read that counts is of one byte throughout."""
    segment = Segment(4 * GRANULE)
    reader = SegmentReader(segment.name)
    names: list[tuple[int, RangeName]] = []
    over = threading.Event()
    counted = {True: 0, False: 0}
    torn = []

    def read() -> None:
        into = memoryview(bytearray(2 * GRANULE))
        while not over.is_set() or not counted[True]:
            if names:
                byte, name = names[-1]
                whole = reader.read(name, into)
                counted[whole] += 1
                if whole and into != bytes([byte]) * len(into):
                    torn.append(byte)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for turn in range(2000):
            view, name = filled(segment, turn % 251, 2 * GRANULE)
            names.append((turn % 251, name))
            del names[:-1]
            if turn % 2:
                segment.withdraw(view)
            del view
    finally:
        last = filled(segment, 9, 2 * GRANULE)
        names.append((9, last[1]))
        over.set()
        thread.join()
    assert [] == torn
    assert counted[True]


def test_what_was_written_is_found_once_and_what_was_not_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for holes goes on to the next one; behind that each range is looked at for itself."""
    segment = Segment(SIZE)
    begin, blank, behind = segment.take(2 * GRANULE), segment.take(GRANULE), segment.take(GRANULE)
    assert begin is not None
    assert blank is not None
    assert behind is not None
    begin[:], behind[:] = b"b" * begin.nbytes, b"e" * behind.nbytes
    first, hole, last = (segment.announce(view) for view in (begin, blank, behind))
    assert first is not None
    assert hole is not None
    assert last is not None
    reader = SegmentReader(segment.name)
    searches: list[int] = []
    seek = os.lseek

    def counted(fd: int, at: int, how: int) -> int:
        searches.append(at)
        return seek(fd, at, how)

    monkeypatch.setattr(os, "lseek", counted)
    into = memoryview(bytearray(GRANULE))
    for _ in range(3):
        assert reader.read(first, into)
        assert b"b" * GRANULE == bytes(into)
    assert len(searches) == 1
    for _ in range(2):
        with pytest.raises(UnsharedError, match="never written"):
            reader.read(hole, into)
    assert reader.read(last, into)
    assert b"e" * GRANULE == bytes(into)
    assert len(searches) == 4
    blank[:] = b"m" * blank.nbytes
    assert reader.read(hole, into)
    assert b"m" * GRANULE == bytes(into)


def test_nobody_can_make_a_hole_in_what_was_written() -> None:
    """Not even its owner; in a file without the seals it works (negative control)."""
    libc = ctypes.CDLL(None, use_errno=True)
    segment = Segment(SIZE)
    view, _ = filled(segment, 1)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC)
    os.ftruncate(plain, SIZE)

    def punched(fd: int) -> bool:
        keep_size_and_punch = 0x03
        return not libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(SIZE))

    try:
        assert punched(plain)
        assert not punched(segment.name.fd)
        assert errno.EPERM == ctypes.get_errno()
    finally:
        os.close(plain)
    assert 1 == view[0]
