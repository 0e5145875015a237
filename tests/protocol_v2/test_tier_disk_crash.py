"""The disk tier and a process that dies: at each system call, and by a real SIGKILL."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from keying import KeySpace
from protocol_v2.storage import EnvelopeError, ObjectMissError
from protocol_v2.tiers import DiskTier, Fsync
from tests.protocol_v2.faulty_os import FaultyOs, Killed, at, never
from tests.protocol_v2.storage_samples import chain, files_in, make_object, open_disk

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = chain("crash", 6)
OLD = [make_object(KEYS, index, size=9000) for index in range(3)]
NEW = make_object(KEYS, 3, size=9000)
PROJECT = Path(__file__).parents[2]
SPACE = KeySpace("m", chunk_size=16, kv_dtype="bfloat16")


def bury(tier: DiskTier) -> None:
    """What the system does for a dead process: close its descriptors, which frees the lock."""
    os.close(tier._ownership._descriptor)


def close_below(folder: Path) -> None:
    """Close all descriptors of this process that are for files below a folder."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(folder):
                os.close(int(link.name))


def break_and_get(tier: DiskTier, folder: Path) -> None:
    """Read a damaged object, which sets it aside."""
    path = folder / str(OLD[2].id.name)
    if path.exists():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(EnvelopeError):
        tier.get(OLD[2].id)


ACTIONS: dict[str, Callable[[DiskTier, Path], object]] = {
    "write anew": lambda tier, _folder: tier.put(NEW),
    "write again": lambda tier, _folder: tier.put(OLD[0]),
    "remove": lambda tier, _folder: tier.delete(OLD[2].id),
    "use": lambda tier, _folder: tier.touch([OLD[1].id, OLD[2].id]),
    "describe": lambda tier, _folder: tier.describe(SPACE),
    "set aside": break_and_get,
}


def start(folder: Path) -> DiskTier:
    """A tier with the old entries."""
    tier = open_disk(folder, fsync=Fsync.ALWAYS)
    for obj in OLD:
        tier.put(obj)
    return tier


@pytest.mark.parametrize("action", ACTIONS)
def test_a_death_at_any_step_leaves_old_entries_whole_and_new_ones_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """Killed between any two system calls: a restart has every old entry, no half one, and no litter."""
    counting = FaultyOs(never).install(monkeypatch)
    tier = start(tmp_path / "whole")
    before = len(counting.calls)
    ACTIONS[action](tier, tmp_path / "whole")
    steps = len(counting.calls) - before
    assert steps >= 2
    for step in range(1, steps + 1):
        folder = tmp_path / str(step)
        monkeypatch.undo()
        tier = start(folder)
        FaultyOs(at(step, Killed)).install(monkeypatch)
        with pytest.raises(Killed):
            ACTIONS[action](tier, folder)
        monkeypatch.undo()
        bury(tier)
        tier = open_disk(folder)
        scan = tier.scan()
        assert tier.reclaimed
        assert [] == scan.aside
        assert [] == [one for one in files_in(folder) if one.startswith("xk2.tmp")]
        found = {one.envelope.id for one in scan.found}
        certain = OLD[:2] if action in {"remove", "set aside"} else OLD
        assert {obj.id for obj in certain} <= found <= {obj.id for obj in [*OLD, NEW]}
        for obj in certain:
            assert obj.buffers[0] == tier.get(obj.id).buffers[0]
        for obj in (NEW, OLD[2]):
            try:
                assert obj.buffers[0] == tier.get(obj.id).buffers[0]
            except ObjectMissError:
                assert action in {"remove", "set aside"} or obj is NEW
        tier.put(NEW)
        assert NEW.buffers[0] == tier.get(NEW.id).buffers[0]


def test_a_death_while_opening_leaves_the_folder_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any system call of the start: the next start finds everything."""
    start(tmp_path).close()
    (tmp_path / "xk2.tmp" / "stale").write_bytes(b"half")
    for step in itertools.count(1):
        FaultyOs(at(step, Killed)).install(monkeypatch)
        try:
            tier = open_disk(tmp_path)
        except Killed:
            monkeypatch.undo()
            close_below(tmp_path)
            continue
        break
    monkeypatch.undo()
    assert step > 5
    assert {obj.id for obj in OLD} == {one.envelope.id for one in tier.scan().found}
    assert [] == [one for one in files_in(tmp_path) if one.startswith("xk2.tmp")]


WRITER = """
import sys
from pathlib import Path
from protocol_v2.tiers import Fsync
from tests.protocol_v2.storage_samples import chain, make_object, open_disk
tier = open_disk(Path(sys.argv[1]), fsync=Fsync(sys.argv[2]))
tier.scan()
keys = chain(sys.argv[3], 1000)
for index in range(1000):
    tier.put(make_object(keys, index, size=300_000))
    print(index, flush=True)
"""


@pytest.mark.parametrize("fsync", [Fsync.ALWAYS, Fsync.RENAME_ONLY])
def test_sigkill_loses_nothing_that_was_acknowledged(tmp_path: Path, fsync: Fsync) -> None:
    """A writer killed with SIGKILL in mid-write, twice on one folder: every acknowledged object is whole afterwards."""
    acknowledged: dict[str, int] = {}
    for name in ("first", "second"):
        command = [sys.executable, "-c", WRITER, str(tmp_path), fsync.value, name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) as writer:
            assert writer.stdout is not None
            for line in itertools.islice(writer.stdout, 5):
                acknowledged[name] = int(line)
            writer.kill()
            acknowledged[name] = max([acknowledged[name], *(int(line) for line in writer.stdout)])
    assert all(4 <= last < 999 for last in acknowledged.values())
    tier = open_disk(tmp_path)
    scan = tier.scan()
    assert tier.reclaimed
    assert [] == scan.aside
    assert [] == [one for one in files_in(tmp_path) if not one.startswith("xk2/")]
    for name, last in acknowledged.items():
        keys = chain(name, last + 1)
        for index in range(last + 1):
            obj = make_object(keys, index, size=300_000)
            assert obj.buffers[0] == tier.get(obj.id).buffers[0]
    assert len(scan.found) - sum(last + 1 for last in acknowledged.values()) in {0, 1, 2}
