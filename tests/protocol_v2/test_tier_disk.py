"""The disk tier (docs/spec/storage-2.md, "Files" to "Quarantine")."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keying import KeySpace
from protocol_v2.codes import MissReason
from protocol_v2.storage import EnvelopeError, ObjectMissError, Shard, encode_header
from protocol_v2.storage.descriptions import parse_description
from protocol_v2.storage.names import description_name
from protocol_v2.tiers import (
    DiskTier,
    FolderInUseError,
    Fsync,
    Tier,
    TierError,
    TierFullError,
    TierIOError,
    TierReadOnlyError,
    ownership,
)
from protocol_v2.tiers.layout import charge_of
from tests.protocol_v2.faulty_os import FaultyOs, always, at, never
from tests.protocol_v2.storage_samples import (
    OTHER_ROOT,
    ROOT,
    chain,
    files_in,
    make_object,
    open_disk,
)

KEYS = chain("disk", 8)
SPACE = KeySpace("org/model", chunk_size=16, kv_dtype="bfloat16")


def path_of(folder: Path, index: int) -> Path:
    """The file of one chunk of the chain."""
    return folder / str(make_object(KEYS, index).id.name)


def quarantined(folder: Path) -> list[str]:
    """Files in quarantine, as reason and path."""
    return [
        f"{path.split('/')[1].split('-')[2]}/{path.split('/', 2)[2]}"
        for path in files_in(folder)
        if path.startswith("xk2.quarantine/")
    ]


def test_it_is_a_tier(tmp_path: Path) -> None:
    """The disk tier has every call that a tier has."""
    tier: Tier = open_disk(tmp_path)
    assert "disk" == tier.name
    assert (0, 0) == tier.usage()


@pytest.mark.parametrize("fsync", list(Fsync))
@pytest.mark.parametrize("size", [0, 1, 64, 200_000])
def test_objects_come_and_go(tmp_path: Path, fsync: Fsync, size: int) -> None:
    """What was put is got, byte for byte and read-only; what was not, or was deleted, is absent."""
    tier = open_disk(tmp_path, fsync=fsync)
    obj = make_object(KEYS, 1, size=size, shard=Shard(2, 1, 0))
    written = tier.put(obj)
    got = tier.get(obj.id)
    assert obj.envelope == got.envelope
    assert [bytes(one) for one in obj.buffers] == [bytes(one) for one in got.buffers]
    assert got.buffers[0].readonly
    assert [obj.id.name] == list(tier.names())
    assert (1, written.charge) == tier.usage()
    assert tier.contains(obj.id)
    other = make_object(KEYS, 1).id
    assert not tier.contains(other)
    with pytest.raises(ObjectMissError) as caught:
        tier.get(other)
    assert MissReason.ABSENT is caught.value.reason
    assert tier.delete(obj.id)
    assert not tier.delete(obj.id)
    assert [] == files_in(tmp_path)
    assert (0, 0) == tier.usage()


def test_the_file_is_the_name_and_the_object(tmp_path: Path) -> None:
    """A file has exactly the specified name and bytes, so anything that knows names can serve the folder."""
    tier = open_disk(tmp_path)
    obj = make_object(KEYS, 0)
    tier.put(obj)
    assert [f"xk2/{ROOT[:16].hex()}/{KEYS[0].hex()}/w1r0g0"] == files_in(tmp_path)
    assert encode_header(obj) + bytes(obj.buffers[0]) == path_of(tmp_path, 0).read_bytes()


def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Cached values, the lock and the description are readable for nobody else."""
    folder = tmp_path / "store"
    tier = open_disk(folder)
    tier.put(make_object(KEYS, 0))
    tier.describe(SPACE)
    for place, folders, files in os.walk(folder):
        for name in folders:
            assert 0o700 == stat.S_IMODE((Path(place) / name).stat().st_mode)
        for name in files:
            assert 0o600 == stat.S_IMODE((Path(place) / name).stat().st_mode)


def test_many_buffers_and_partial_writes_make_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes seven bytes at a time, of at most three buffers, writes the same object."""
    real = os.writev

    def stingy(descriptor: int, views: list[memoryview]) -> int:
        return real(descriptor, [views[0][:7]])

    tier = open_disk(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", stingy)
        tier.put(make_object(KEYS, 0, size=100))
    assert make_object(KEYS, 0, size=100).buffers[0] == tier.get(make_object(KEYS, 0).id).buffers[0]


def test_scan_finds_what_was_written(tmp_path: Path) -> None:
    """A restart finds every object with its identity, place in the chain and charge; nothing is set aside."""
    tier = open_disk(tmp_path)
    written = {}
    for index, rank in itertools.product(range(3), range(2)):
        obj = make_object(KEYS, index, shard=Shard(2, rank, 0), size=5000)
        written[obj.id] = (obj.envelope, tier.put(obj).charge)
    tier.describe(SPACE)
    tier.close()
    steps: list[tuple[int, int]] = []
    scan = open_disk(tmp_path).scan(lambda done, total: steps.append((done, total)))
    assert written == {one.envelope.id: (one.envelope, one.charge) for one in scan.found}
    assert ([], {}, 0) == (scan.aside, scan.schemas, scan.unreadable)
    assert [(1, 4), (2, 4), (3, 4), (4, 4)] == steps[:4]


def test_uses_order_objects_across_restarts(tmp_path: Path) -> None:
    """Recency survives: objects come back in the order in which they were written and used."""
    tier = open_disk(tmp_path)
    for index in range(4):
        tier.put(make_object(KEYS, index))
    tier.touch([make_object(KEYS, index).id for index in (2, 0, 7)])
    tier.close()
    tier = open_disk(tmp_path)
    order = [one.envelope.start // 16 for one in tier.scan().found]
    assert [1, 3, 2, 0] == order
    tier.touch([make_object(KEYS, 1).id])
    tier.close()
    assert [3, 2, 0, 1] == [one.envelope.start // 16 for one in open_disk(tmp_path).scan().found]


def test_of_equal_times_the_later_chunk_was_used_earlier(tmp_path: Path) -> None:
    """Where a file system keeps coarse times, or a copy lost them, a suffix still goes before its prefix."""
    tier = open_disk(tmp_path)
    for index in range(8):
        tier.put(make_object(KEYS, index))
        os.utime(tmp_path / str(make_object(KEYS, index).id.name), ns=(10**18, 10**18))
    found = [one.envelope.id.key for one in tier.scan().found]
    assert list(reversed(KEYS)) == found
    assert found != sorted(KEYS)  # which is how the folder lists them


def test_uses_stay_in_order_where_the_clock_goes_back(tmp_path: Path) -> None:
    """A wall clock that is set back does not make later uses look earlier."""
    times = iter([10**18] * 3 + [10**15] * 20)
    tier = open_disk(tmp_path, clock=lambda: next(times))
    for index in range(2):
        tier.put(make_object(KEYS, index))
    tier.touch([make_object(KEYS, 0).id])
    tier.touch([make_object(KEYS, 1).id])
    tier.touch([make_object(KEYS, 0).id])
    tier.close()
    assert [1, 0] == [one.envelope.start // 16 for one in open_disk(tmp_path).scan().found]


def test_equal_times_put_the_suffix_first(tmp_path: Path) -> None:
    """On file systems with coarse times, the later part of a prompt counts as used earlier."""
    tier = open_disk(tmp_path)
    for index in (1, 2, 0):
        tier.put(make_object(KEYS, index))
        os.utime(path_of(tmp_path, index), ns=(10**18, 10**18))
    tier.close()
    assert [2, 1, 0] == [one.envelope.start // 16 for one in open_disk(tmp_path).scan().found]


# ---- what is broken or foreign


def damage(path: Path, how: str) -> None:
    """Break an object's file."""
    data = bytearray(path.read_bytes())
    match how:
        case "payload":
            data[-1] ^= 1
        case "header":
            data[60] ^= 1
        case "digest":
            data[150] ^= 1
        case "truncated":
            del data[-10:]
        case "cut header":
            del data[100:]
        case "empty":
            data.clear()
        case "longer":
            data += b"x"
        case "foreign":
            data[:] = b"not one of ours" * 20
        case "schema":
            data[8] = 3
        case "zeros":
            data[:] = bytes(len(data))
        case _:
            raise AssertionError(how)
    path.write_bytes(data)


DAMAGE = {
    "payload": MissReason.CHECKSUM,
    "header": MissReason.CHECKSUM,
    "digest": MissReason.CHECKSUM,
    "truncated": MissReason.ENVELOPE_INVALID,
    "cut header": MissReason.ENVELOPE_INVALID,
    "empty": MissReason.ENVELOPE_INVALID,
    "longer": MissReason.ENVELOPE_INVALID,
    "foreign": MissReason.ENVELOPE_INVALID,
    "schema": MissReason.SCHEMA_TOO_NEW,
    "zeros": MissReason.ENVELOPE_INVALID,
}


@pytest.mark.parametrize(("how", "reason"), DAMAGE.items())
def test_a_damaged_file_is_a_typed_miss_and_set_aside(tmp_path: Path, how: str, reason: MissReason) -> None:
    """I8: damage is a miss with its reason; the file goes to quarantine with its path, and others are untouched."""
    tier = open_disk(tmp_path)
    for index in range(2):
        tier.put(make_object(KEYS, index, size=70_000))
    damage(path_of(tmp_path, 0), how)
    with pytest.raises(EnvelopeError) as caught:
        tier.get(make_object(KEYS, 0).id)
    assert reason is caught.value.reason
    assert [f"{reason.name.lower()}/{ROOT[:16].hex()}/{KEYS[0].hex()}/w1r0g0"] == quarantined(tmp_path)
    assert 0 < tier.quarantine
    with pytest.raises(ObjectMissError) as again:
        tier.get(make_object(KEYS, 0).id)
    assert MissReason.ABSENT is again.value.reason
    assert 70_000 == tier.get(make_object(KEYS, 1).id).envelope.payload_size
    quarantine = tier.quarantine
    tier.close()
    assert quarantine == open_disk(tmp_path).quarantine


@pytest.mark.parametrize(("how", "reason"), [pair for pair in DAMAGE.items() if pair[0] != "payload"])
def test_a_scan_sets_aside_what_its_header_tells(tmp_path: Path, how: str, reason: MissReason) -> None:
    """A restart does not adopt a file whose header or size is wrong; the sound one beside it is adopted."""
    tier = open_disk(tmp_path)
    for index in range(2):
        tier.put(make_object(KEYS, index))
    tier.close()
    damage(path_of(tmp_path, 0), how)
    tier = open_disk(tmp_path)
    scan = tier.scan()
    assert [make_object(KEYS, 1).id] == [one.envelope.id for one in scan.found]
    assert [(make_object(KEYS, 0).id.name, reason)] == scan.aside
    assert 1 == len(quarantined(tmp_path))
    assert not path_of(tmp_path, 0).parent.exists()


def test_objects_under_the_wrong_name_are_not_adopted(tmp_path: Path) -> None:
    """S5: a whole, sound object under the name of another key, shard or space is an identity mismatch, never served."""
    tier = open_disk(tmp_path)
    tier.put(make_object(KEYS, 0))
    wrong = [
        make_object(KEYS, 1).id,
        make_object(KEYS, 0, shard=Shard(2, 0, 0)).id,
        make_object(KEYS, 0, root=OTHER_ROOT).id,
    ]
    data = path_of(tmp_path, 0).read_bytes()
    for one in wrong:
        path = tmp_path / str(one.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with pytest.raises(EnvelopeError) as caught:
        tier.get(wrong[0])
    assert MissReason.IDENTITY_MISMATCH is caught.value.reason
    tier.close()
    scan = open_disk(tmp_path).scan()
    assert [make_object(KEYS, 0).id] == [one.envelope.id for one in scan.found]
    assert {(one.name, MissReason.IDENTITY_MISMATCH) for one in wrong[1:]} == set(scan.aside)
    assert 3 == len(quarantined(tmp_path))


def test_foreign_files_among_the_objects_are_set_aside(tmp_path: Path) -> None:
    """I5: names of older systems, strays and special files below xk2/ are moved, none is adopted, deleted or opened."""
    tier = open_disk(tmp_path)
    tier.put(make_object(KEYS, 0))
    tier.close()
    space = tmp_path / "xk2" / ROOT[:16].hex()
    (space / "vllm@model@1@0@abcdef").write_text("old")
    (space / KEYS[0].hex() / "w1r0g0.tmp").write_text("stray")
    (space / KEYS[0].hex() / "w01r0g0").write_text("near miss")
    (space / ("A" * 64)).mkdir()
    (space / ("A" * 64) / "w1r0g0").write_text("capitals")
    (tmp_path / "xk2" / "readme.txt").write_text("note")
    (tmp_path / "xk2" / ("0" * 31)).mkdir()
    (tmp_path / "xk2" / ("0" * 31) / "file").write_text("short prefix")
    (space / KEYS[1].hex()).mkdir()
    os.mkfifo(space / KEYS[1].hex() / "w1r0g0")
    (space / KEYS[2].hex()).mkdir()
    (space / KEYS[2].hex() / "w1r0g0").symlink_to("/etc/passwd")
    (space / KEYS[3].hex()).symlink_to(tmp_path)
    (space / KEYS[4].hex() / "w1r0g0").mkdir(parents=True)
    (space / KEYS[5].hex()).mkdir()
    tier = open_disk(tmp_path)
    scan = tier.scan()
    assert [make_object(KEYS, 0).id] == [one.envelope.id for one in scan.found]
    assert [(None, MissReason.ENVELOPE_INVALID)] * 10 == scan.aside
    assert [str(make_object(KEYS, 0).id.name)] == [one for one in files_in(tmp_path) if one.startswith("xk2/")]
    kept = {path.rsplit("/", 1)[1] for path in quarantined(tmp_path)}
    assert {"vllm@model@1@0@abcdef", "w1r0g0.tmp", "w01r0g0", "readme.txt", "file", "w1r0g0"} <= kept
    assert not (space / KEYS[5].hex()).exists()
    assert [] == tier.scan().aside


def test_special_files_are_never_opened_for_long(tmp_path: Path) -> None:
    """A pipe, link, socket or folder under a good name is a miss at once, not a hang and not somebody else's file."""
    tier = open_disk(tmp_path)
    for index in range(4):
        path_of(tmp_path, index).parent.mkdir(parents=True)
    os.mkfifo(path_of(tmp_path, 0))
    path_of(tmp_path, 1).symlink_to("/etc/passwd")
    path_of(tmp_path, 2).mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(path_of(tmp_path, 3).parent)  # socket paths are short
        try:
            bound.bind("w1r0g0")
        finally:
            os.chdir(here)
    for index in range(4):
        with pytest.raises(EnvelopeError) as caught:
            tier.get(make_object(KEYS, index).id)
        assert MissReason.ENVELOPE_INVALID is caught.value.reason


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    """I5, I12: other schemas are counted by name and stay; so does everything else outside xk2/."""
    name = str(make_object(KEYS, 0).id.name)
    for other in ("xk3", "xk1", "xk10"):
        path = tmp_path / name.replace("xk2", other)
        path.parent.mkdir(parents=True)
        path.write_text("not ours to read")
    (tmp_path / "xk3" / "something new").write_text("grammar of tomorrow")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "old@model@1@0@ff").write_text("older system")
    before = files_in(tmp_path)
    tier = open_disk(tmp_path)
    scan = tier.scan(max_elsewhere=2)
    assert ([], [], {1: 1, 3: 1, 10: 1}, 2) == (scan.found, scan.aside, scan.schemas, len(scan.elsewhere))
    assert before == files_in(tmp_path)
    tier.put(make_object(KEYS, 1))
    tier.describe(SPACE)
    assert {0: 1, 1: 1, 2: 1, 3: 1, 10: 1} == tier.inventory()


def test_a_replaced_file_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound object that took the name of a damaged one while that was read stays where it is."""
    tier = open_disk(tmp_path)
    tier.put(make_object(KEYS, 0))
    damage(path_of(tmp_path, 0), "payload")
    real, take = tier._quarantine.take, tier._quarantine

    def late(path: Path, reason: MissReason, inode: int | None) -> None:
        tier.put(make_object(KEYS, 0))
        real(path, reason, inode)

    with monkeypatch.context() as patched:
        patched.setattr(take, "take", late)
        with pytest.raises(EnvelopeError):
            tier.get(make_object(KEYS, 0).id)
    assert [] == quarantined(tmp_path)
    assert make_object(KEYS, 0).envelope == tier.get(make_object(KEYS, 0).id).envelope


# ---- descriptions


def test_spaces_are_described_once_and_never_trusted(tmp_path: Path) -> None:
    """The description is there, readable, written once, and an edited one changes nothing about the objects."""
    tier = open_disk(tmp_path)
    tier.describe(SPACE)
    path = tmp_path / description_name(SPACE.root)
    assert SPACE == parse_description(path.read_bytes())
    path.write_text("{}")
    tier.describe(SPACE)
    assert "{}" == path.read_text()
    tier.close()
    scan = open_disk(tmp_path).scan()
    assert ([], []) == (scan.found, scan.aside)


# ---- ownership


def test_a_folder_has_one_live_owner(tmp_path: Path) -> None:
    """A folder that a live server has is refused, naming its process; after an orderly end it is free."""
    first = open_disk(tmp_path)
    assert not first.reclaimed
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()}") as caught:
        open_disk(tmp_path)
    assert os.getpid() == caught.value.pid
    first.put(make_object(KEYS, 0))
    first.close()
    second = open_disk(tmp_path)
    assert not second.reclaimed
    assert 1 == len(second.scan().found)


def test_a_full_disk_can_still_be_read_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server starts on a disk without room for a single byte: its entries are served, and the folder is its own."""
    first = open_disk(tmp_path)
    first.put(make_object(KEYS, 0))
    first.close()
    FaultyOs(lambda _, name: errno.ENOSPC if name in {"pwrite", "writev"} else None).install(monkeypatch)
    second = open_disk(tmp_path)
    assert 1 == len(second.scan().found)
    assert make_object(KEYS, 0).buffers[0] == second.get(make_object(KEYS, 0).id).buffers[0]
    with pytest.raises(TierFullError):
        second.put(make_object(KEYS, 1))
    with pytest.raises(FolderInUseError):
        open_disk(tmp_path)


OWNER = """
import sys, time
from pathlib import Path
from protocol_v2.tiers import DiskTier
tier = DiskTier(Path(sys.argv[1]), budget=1)
print("open", flush=True)
sys.stdin.read()
"""


def test_a_dead_owners_folder_is_reclaimed(tmp_path: Path) -> None:
    """The folder of a live process is refused; killed with SIGKILL, its lock is free and that is told."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with owner:
        assert owner.stdout is not None
        assert "open\n" == owner.stdout.readline()
        said = json.loads((tmp_path / "xk2.lock").read_text())
        assert owner.pid == said["pid"]
        with pytest.raises(FolderInUseError, match=f"process {owner.pid}"):
            open_disk(tmp_path)
        owner.kill()
        owner.wait()
    tier = open_disk(tmp_path)
    assert tier.reclaimed


@pytest.mark.parametrize("text", ["", "junk", "[]", '{"pid": "1"}', '{"pid": 1, "boot_id": "x"}', "[" * 5000])
def test_the_text_of_a_lock_decides_nothing(tmp_path: Path, text: str) -> None:
    """A lock file without a living holder is free whatever it says."""
    (tmp_path / "xk2.lock").write_text(text)
    tier = open_disk(tmp_path)
    tier.put(make_object(KEYS, 0))
    with pytest.raises(FolderInUseError):
        open_disk(tmp_path)


# ---- failures


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, TierFullError),
        (errno.EDQUOT, TierFullError),
        (errno.EROFS, TierReadOnlyError),
        (errno.EACCES, TierReadOnlyError),
        (errno.EIO, TierIOError),
    ],
)
@pytest.mark.parametrize("fsync", list(Fsync))
def test_a_put_that_fails_at_any_step_is_typed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TierError], fsync: Fsync
) -> None:
    """Disk full, read-only or broken at any system call: a typed error, no litter, old entries whole."""
    tier = open_disk(tmp_path, fsync=fsync)
    tier.put(make_object(KEYS, 0))
    counting = FaultyOs(never).install(monkeypatch)
    tier.put(make_object(KEYS, 1))
    steps = list(counting.calls)
    assert (3 if fsync is Fsync.ALWAYS else 0) == steps.count("fsync")
    for step in range(1, len(steps) + 1):
        FaultyOs(at(step, number)).install(monkeypatch)
        with pytest.raises(kind, match=errno.errorcode[number]):
            tier.put(make_object(KEYS, 2))
        monkeypatch.undo()
        assert [] == [one for one in files_in(tmp_path) if one.startswith("xk2.tmp")]
        assert not tier.contains(make_object(KEYS, 2).id)
        for index in range(2):
            assert make_object(KEYS, index).buffers[0] == tier.get(make_object(KEYS, index).id).buffers[0]
    tier.put(make_object(KEYS, 2))
    assert make_object(KEYS, 2).buffers[0] == tier.get(make_object(KEYS, 2).id).buffers[0]


def test_errors_never_name_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error text says operation and errno, not where the operator keeps the store."""
    folder = tmp_path / "secret-project"
    tier = open_disk(folder)
    FaultyOs(always("rename", errno.ENOSPC)).install(monkeypatch)
    with pytest.raises(TierFullError) as caught:
        tier.put(make_object(KEYS, 0))
    assert "secret" not in str(caught.value)
    assert caught.value.retriable


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only folder, or a file in its place, is a typed error, and nothing keeps the lock."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TierIOError):
        open_disk(tmp_path / "file")
    with monkeypatch.context() as patched:
        FaultyOs(always("open", errno.EROFS)).install(patched)
        with pytest.raises(TierReadOnlyError):
            open_disk(tmp_path / "store")
    with monkeypatch.context() as patched:
        FaultyOs(always("mkdir", errno.EACCES)).install(patched)
        with pytest.raises(TierReadOnlyError):
            open_disk(tmp_path / "store")
    open_disk(tmp_path / "store")


def test_a_disk_that_turned_read_only_still_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads go on, damage is still a miss though it cannot be moved, removals and touches are typed errors."""
    tier = open_disk(tmp_path)
    for index in range(2):
        tier.put(make_object(KEYS, index))
    damage(path_of(tmp_path, 1), "payload")
    before = [one for one in files_in(tmp_path) if one.startswith("xk2/")]
    broken = {"rename", "unlink", "mkdir", "utime", "rmdir"}
    FaultyOs(lambda _count, name: errno.EROFS if name in broken else None).install(monkeypatch)
    assert make_object(KEYS, 0).envelope == tier.get(make_object(KEYS, 0).id).envelope
    for _ in range(2):
        with pytest.raises(EnvelopeError):
            tier.get(make_object(KEYS, 1).id)
    with pytest.raises(TierReadOnlyError):
        tier.delete(make_object(KEYS, 0).id)
    with pytest.raises(TierReadOnlyError):
        tier.touch([make_object(KEYS, 0).id])
    with pytest.raises(TierReadOnlyError):
        tier.describe(SPACE)
    monkeypatch.undo()
    assert before == [one for one in files_in(tmp_path) if one.startswith("xk2/")]


def test_an_unreadable_file_is_no_object_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error is the tier's trouble: typed, nothing moved; a scan counts the file and goes on."""
    tier = open_disk(tmp_path)
    tier.put(make_object(KEYS, 0))
    FaultyOs(always("pread", errno.EIO)).install(monkeypatch)
    with pytest.raises(TierIOError, match="EIO"):
        tier.get(make_object(KEYS, 0).id)
    scan = tier.scan()
    assert ([], [], 1) == (scan.found, scan.aside, scan.unreadable)
    monkeypatch.undo()
    assert make_object(KEYS, 0).envelope == tier.get(make_object(KEYS, 0).id).envelope


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that cannot read a folder is a typed error: a server must not start as if the store were empty."""
    tier = open_disk(tmp_path)
    tier.put(make_object(KEYS, 0))

    def denied(_path: object) -> object:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(TierReadOnlyError, match="scan the store: EACCES"):
        tier.scan()
    monkeypatch.undo()
    assert 1 == len(tier.scan().found)


def test_a_folder_that_was_removed_is_empty(tmp_path: Path) -> None:
    """Where the operator removed everything there is nothing, and writing goes on after a restart."""
    tier = open_disk(tmp_path)
    tier.put(make_object(KEYS, 0))
    shutil.rmtree(tmp_path / "xk2")
    assert [] == tier.scan().found
    with pytest.raises(ObjectMissError):
        tier.get(make_object(KEYS, 0).id)
    assert not tier.delete(make_object(KEYS, 0).id)
    tier.touch([make_object(KEYS, 0).id])
    with pytest.raises(TierIOError):
        tier.put(make_object(KEYS, 0))
    tier.close()
    open_disk(tmp_path).put(make_object(KEYS, 0))


def test_short_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that reads a thousand bytes at a time gives the same object; one that stops early gives a miss."""
    tier = open_disk(tmp_path)
    obj = make_object(KEYS, 0, size=100_000)
    tier.put(obj)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: real(descriptor, min(size, 1000), offset))
    assert obj.buffers[0] == tier.get(obj.id).buffers[0]
    monkeypatch.setattr(
        os, "pread", lambda descriptor, size, offset: real(descriptor, size, offset) if offset == 0 else b""
    )
    with pytest.raises(EnvelopeError) as caught:
        tier.get(obj.id)
    assert MissReason.ENVELOPE_INVALID is caught.value.reason


def test_ownership_needs_no_boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells no boot id the lock works all the same."""
    monkeypatch.setattr(ownership, "_BOOT_ID", tmp_path / "none")
    open_disk(tmp_path / "store")
    assert "" == json.loads((tmp_path / "store" / "xk2.lock").read_text())["boot_id"]
    with pytest.raises(FolderInUseError):
        open_disk(tmp_path / "store")


def test_names_fit_where_names_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: a file system that allows 143 bytes for a name takes writes, descriptions, quarantine and restarts."""
    strict = FaultyOs(never)
    strict.names = 143
    strict.install(monkeypatch)
    space = KeySpace("m" * 1000, chunk_size=16, kv_dtype="bfloat16", attributes={"a" * 1000: "@/" * 500})
    tier = open_disk(tmp_path / "store", fsync=Fsync.ALWAYS)
    tier.put(make_object(KEYS, 0, shard=Shard(65535, 65534, 65535)))
    tier.put(make_object(KEYS, 1))
    tier.describe(space)
    damage(path_of(tmp_path / "store", 1), "payload")
    with pytest.raises(EnvelopeError):
        tier.get(make_object(KEYS, 1).id)
    assert 1 == len(quarantined(tmp_path / "store"))
    tier.close()
    assert 1 == len(open_disk(tmp_path / "store").scan().found)
    strict.names = 20
    with pytest.raises(TierIOError, match="ENAMETOOLONG"):
        open_disk(tmp_path / "other").put(make_object(KEYS, 2))


# ---- removal against writing


def test_a_write_after_the_decision_is_spared(tmp_path: Path) -> None:
    """What is written after its removal was decided stays, whichever thread comes first."""
    tier = open_disk(tmp_path)
    objects = [make_object(KEYS, index) for index in range(3)]
    for obj in objects:
        tier.put(obj)
    removal = tier.doom([obj.id for obj in objects])
    tier.put(objects[1])
    removal.run()
    assert [objects[1].id.name] == list(tier.names())
    assert (2, {}) == (removal.removed, removal.left)


def test_a_later_decision_removes_what_an_earlier_one_spared(tmp_path: Path) -> None:
    """Removals of one name do not undo each other: the last decision counts."""
    tier = open_disk(tmp_path)
    obj = make_object(KEYS, 0)
    tier.put(obj)
    first = tier.doom([obj.id])
    tier.put(obj)
    second = tier.doom([obj.id])
    first.run()
    assert tier.contains(obj.id)
    second.run()
    assert not tier.contains(obj.id)


def test_a_removal_that_fails_says_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed step the rest is still there and listed, and giving up lets it live."""
    tier = open_disk(tmp_path)
    objects = [make_object(KEYS, index) for index in range(3)]
    for obj in objects:
        tier.put(obj)
    removal = tier.doom([obj.id for obj in objects])
    FaultyOs(at(3, errno.EROFS)).install(monkeypatch)  # unlink, rmdir, unlink
    with pytest.raises(TierReadOnlyError):
        removal.run()
    monkeypatch.undo()
    assert [one.id for one in objects[1:]] == list(removal.left)
    tier.give_up(removal)
    removal.run()
    assert {one.id.name for one in objects[1:]} == set(tier.names())


def test_threads_write_read_and_remove_one_name(tmp_path: Path) -> None:
    """Under contention on few names every read gives the right bytes or a miss, and nothing is left half."""
    tier = open_disk(tmp_path)
    objects = [make_object(KEYS, index, size=3000) for index in range(3)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for turn in range(60):
                obj = objects[(seed + turn) % 3]
                match (seed * 7 + turn) % 4:
                    case 0 | 1:
                        tier.put(obj)
                    case 2:
                        tier.delete(obj.id)
                    case _:
                        try:
                            if tier.get(obj.id).buffers[0] != obj.buffers[0]:
                                wrong.append(obj)
                        except ObjectMissError as error:
                            if error.reason is not MissReason.ABSENT:
                                wrong.append(error)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong
    assert [] == quarantined(tmp_path)
    tier.close()
    scan = open_disk(tmp_path).scan()
    assert [] == scan.aside
    assert len(scan.found) <= 3


def test_charges_count_blocks_and_folders() -> None:
    """A file costs its blocks and one for its folder, so empty ones cost too."""
    assert [4096, 8192, 8192, 12288] == [charge_of(size) for size in (0, 1, 4096, 4097)]


def test_a_tier_survives_any_first_contents_of_its_temporary_folder(tmp_path: Path) -> None:
    """Stale temporary files are removed at the start; a folder there, which is none of ours, stays."""
    tier = open_disk(tmp_path)
    tier.close()
    (tmp_path / "xk2.tmp" / "stale").write_bytes(b"half")
    (tmp_path / "xk2.tmp" / "folder").mkdir()
    open_disk(tmp_path)
    assert ["folder"] == [one.name for one in (tmp_path / "xk2.tmp").iterdir()]


def test_default_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told otherwise a put forces file, both folders, and once a space's entry, to the disk."""
    tier = DiskTier(tmp_path, budget=1)
    counting = FaultyOs(never).install(monkeypatch)
    tier.put(make_object(KEYS, 0))
    first = counting.calls.count("fsync")
    tier.put(make_object(KEYS, 1))
    assert (4, 3) == (first, counting.calls.count("fsync") - first)
