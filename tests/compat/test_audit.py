"""The audit names what it can by name alone, and nothing else."""

import tracemalloc
from pathlib import Path

import pytest

from compat.audit import Group, Holding, StoredName, audit, described_models, folder_names, identify
from compat.v1 import StoreKind
from protocol_v2.storage.descriptions import MAX_DESCRIPTION_BYTES
from tests.compat.mixed_folder import ENGINE, INTERNAL, JUNK, PLAIN, RANK, SALTED, SLASHED, V1, V2, fill
from tests.compat.v1_writers import MpObject


def test_a_mixed_folder_is_counted_by_schema_format_model_and_salt(tmp_path: Path) -> None:
    """Each file is counted once, under what its name says."""
    fill(tmp_path).close()
    counts = audit(folder_names(tmp_path), described_models(tmp_path))
    names = {group: count.names for group, count in counts.items()}
    expected = {
        Group(Holding.ENTRY, 1, "fs", "one", ambiguous=False, salted=False): 1,
        Group(Holding.ENTRY, 1, "fs", "one", ambiguous=False, salted=True): 1,
        Group(Holding.ENTRY, 1, "fs", "org/m", ambiguous=True, salted=False): 1,
        Group(Holding.ENTRY, 1, "engine-disk", "one", ambiguous=False, salted=False): 1,
        Group(Holding.ENTRY, 1, "engine-gds", "other", ambiguous=False, salted=False): 1,
        Group(Holding.ENTRY, 2, "xk2", "org/two", ambiguous=False, salted=None): len(V2),
        Group(Holding.DESCRIPTION, 2, None, None, ambiguous=False, salted=None): 1,
        Group(Holding.INTERNAL, 2, None, None, ambiguous=False, salted=None): len(INTERNAL),
        Group(Holding.UNRECOGNISED, None, None, None, ambiguous=False, salted=None): len(JUNK),
    }
    assert expected == names
    assert 10 * len(JUNK) == counts[Group(Holding.UNRECOGNISED, None, None, None, False, None)].n_bytes


def test_ages_and_bytes_are_summed() -> None:
    """A group has the sum of the sizes, and the first and last time."""
    names = [StoredName(PLAIN, 3, 50.0), StoredName(PLAIN, 4, 20.0), StoredName(PLAIN, 5, 90.0)]
    (count,) = audit(names).values()
    assert (3, 12, 20.0, 90.0) == (count.names, count.n_bytes, count.oldest, count.newest)


def test_links_are_never_followed_or_named(tmp_path: Path) -> None:
    """A link with a v1 name is no entry, and a linked folder is not entered; a file of that name is an entry."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / SALTED).write_bytes(b"1")
    store = tmp_path / "store"
    store.mkdir()
    (store / PLAIN).symlink_to(tmp_path / "elsewhere" / SALTED)
    (store / "linked").symlink_to(tmp_path / "elsewhere")
    (store / ENGINE).write_bytes(b"1")
    holdings = {stored.name: identify(stored).holding for stored in folder_names(store)}
    assert {
        PLAIN: Holding.UNRECOGNISED,
        "linked": Holding.UNRECOGNISED,
        ENGINE: Holding.ENTRY,
    } == holdings


def test_a_description_that_does_not_agree_gives_no_model(tmp_path: Path) -> None:
    """Models come from descriptions of the folder that they are in; not from another's, a link's or a huge one's."""
    fill(tmp_path).close()
    (description,) = tmp_path.glob("xk2/*/space.json")
    other = tmp_path / "xk2" / ("0" * 32) / "space.json"
    other.parent.mkdir()
    other.write_bytes(description.read_bytes())
    assert {f"xk2/{description.parent.name}": "org/two"} == described_models(tmp_path)
    kept = description.read_bytes()
    description.write_bytes(kept + b" " * MAX_DESCRIPTION_BYTES)
    assert {} == described_models(tmp_path)
    (tmp_path / "elsewhere.json").write_bytes(kept)
    description.unlink()
    description.symlink_to(tmp_path / "elsewhere.json")
    assert {} == described_models(tmp_path)
    description.unlink()
    description.write_bytes(b"{}")
    assert {} == described_models(tmp_path)
    description.write_bytes(kept)
    assert {f"xk2/{description.parent.name}": "org/two"} == described_models(tmp_path)


def test_every_v1_name_is_schema_1_and_slashes_leave_the_model_open() -> None:
    """All are recognised; the spelled slash alone is ambiguous."""
    found = {name: identify(StoredName(name, 0, 0.0)) for name in V1}
    assert {1} == {what.schema for what in found.values()}
    assert {SLASHED} == {name for name, what in found.items() if what.ambiguous}


@pytest.mark.parametrize("suffix", ["", "-g1"])
def test_what_came_through_the_tunnel_is_schema_1_under_its_root(suffix: str) -> None:
    """Its model looks like our own folders and is none: it is an entry of the v1 server that keeps it."""
    model = f"xk2-{'ab' * 32}{suffix}"
    obj = MpObject(model, RANK, 0, b"\xaa" * 32)
    for name, kind in ((obj.fs(), StoreKind.FOLDER), (obj.native(), StoreKind.KEY_VALUE)):
        what = identify(StoredName(name, 0, 0.0), kind=kind)
        assert (Holding.ENTRY, 1, model, False) == (what.holding, what.schema, what.likely_model, what.ambiguous)


@pytest.mark.parametrize(("model", "entry"), [("xk2/m", False), ("xk2.tmp", False), ("xk2", True), ("my-xk2/m", True)])
def test_whatever_begins_like_our_folders_is_never_taken_for_v1(model: str, entry: bool) -> None:
    """A v1 name below `xk2/`, or of a model that is called like a folder of ours, is not named, and so stays."""
    name = MpObject(model, RANK, 0, b"\xaa" * 32).native()
    assert entry is (identify(StoredName(name, 0, 0.0), kind=StoreKind.KEY_VALUE).holding is Holding.ENTRY)


def test_a_large_folder_costs_no_more_than_its_names(tmp_path: Path) -> None:
    """LMCache keeps all values in one folder: what is remembered of a file is its name, and each is counted."""
    many, bytes_each = 4000, 650
    for number in range(many):
        (tmp_path / MpObject("one", RANK, 0, number.to_bytes(32, "big")).fs()).touch()
    tracemalloc.start()
    try:
        counts = audit(folder_names(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < many * bytes_each
    finally:
        tracemalloc.stop()
    assert [many] == [count.names for count in counts.values()]
