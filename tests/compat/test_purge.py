"""A purge removes what was asked for, and leaves everything else."""

import os
import time
from pathlib import Path

import pytest

from compat.audit import StoredName, folder_names, identify
from compat.purge import Criteria, PurgeRefusedError, Verdict, purge_folder, remove_file
from tests.compat.mixed_folder import ENGINE, GDS, INTERNAL, PLAIN, SALTED, SLASHED, V1, V2, files, fill
from tests.compat.v1_writers import EngineKey
from tests.protocol_v2.storage_samples import open_disk


def purged(folder: Path, criteria: Criteria, **options: float) -> set[str]:
    """Files that a real purge removed."""
    before = files(folder)
    said = {
        stored.name
        for stored, outcome in purge_folder(folder, criteria, dry_run=False, now=options.get("now"))
        if outcome is Verdict.RETIRED
    }
    gone = before - files(folder)
    assert said == gone
    return gone


def test_a_dry_run_says_what_would_go_and_touches_nothing(tmp_path: Path) -> None:
    """It is the default."""
    fill(tmp_path).close()
    before = files(tmp_path)
    said = {s.name for s, outcome in purge_folder(tmp_path, Criteria(schema=1)) if outcome is Verdict.RETIRED}
    assert V1 == said
    assert before == files(tmp_path)


def test_schema_1_goes_under_a_live_server_and_schema_2_is_refused(tmp_path: Path) -> None:
    """Whatever may touch schema 2 is refused while the folder is owned; v1 names go, and nothing else does."""
    with_owner = fill(tmp_path)
    before = files(tmp_path)
    for criteria in (Criteria(schema=2), Criteria(older_than=0), Criteria(models=frozenset({"one"}))):
        with pytest.raises(PurgeRefusedError, match="live server"):
            list(purge_folder(tmp_path, criteria, dry_run=False))
    assert before == files(tmp_path)
    assert V1 == purged(tmp_path, Criteria(schema=1))
    with_owner.close()


def test_schema_2_goes_and_the_rest_stays(tmp_path: Path) -> None:
    """Entries go with their folders; locks, temporary, quarantined and foreign files stay, and the folder serves on."""
    fill(tmp_path).close()
    assert V2 == purged(tmp_path, Criteria(schema=2))
    assert files(tmp_path) >= INTERNAL | V1
    assert not any((tmp_path / name).parent.exists() for name in V2)
    open_disk(tmp_path).close()


def test_an_age_retires_older_entries_only(tmp_path: Path) -> None:
    """The edge itself stays."""
    fill(tmp_path).close()
    for name in V1 | V2:
        os.utime(tmp_path / name, (1000, 1000))
    os.utime(tmp_path / PLAIN, (999, 999))
    os.utime(tmp_path / "readme.txt", (1, 1))
    assert {PLAIN} == purged(tmp_path, Criteria(older_than=100), now=1100)


def test_a_model_retires_only_what_is_surely_its_own(tmp_path: Path) -> None:
    """Of an ambiguous name all models must be given; a model without description is not guessed."""
    fill(tmp_path).close()
    assert {PLAIN, SALTED, ENGINE} == purged(tmp_path, Criteria(models=frozenset({"one"})))
    assert set() == purged(tmp_path, Criteria(models=frozenset({"org/m"})))
    assert {SLASHED} == purged(tmp_path, Criteria(models=frozenset({"org/m", "org-SEP-m"})))
    assert {GDS} == purged(tmp_path, Criteria(schema=1, models=frozenset({"other", "org/two"})))
    (description,) = tmp_path.glob("xk2/*/space.json")
    kept = description.read_bytes()
    description.write_bytes(b"{}")
    assert set() == purged(tmp_path, Criteria(models=frozenset({"org/two"})))
    description.write_bytes(kept)
    assert V2 == purged(tmp_path, Criteria(models=frozenset({"org/two"})))


def test_a_format_retires_what_one_writer_wrote(tmp_path: Path) -> None:
    """Alone or beside other criteria; a format that nobody has retires nothing."""
    fill(tmp_path).close()
    assert set() == purged(tmp_path, Criteria(format="native"))
    assert {SALTED, PLAIN} == purged(tmp_path, Criteria(format="fs", models=frozenset({"one"})))
    assert {ENGINE} == purged(tmp_path, Criteria(format="engine-disk"))
    assert V2 == purged(tmp_path, Criteria(format="xk2"))
    assert {SLASHED, GDS} == V1 & files(tmp_path)


def test_an_interrupted_purge_goes_on_where_it_is_run_again(tmp_path: Path) -> None:
    """A part is done, the lock is free, and a second run does the rest and no more; a third finds nothing."""
    fill(tmp_path).close()
    running = purge_folder(tmp_path, Criteria(schema=2), dry_run=False)
    for _, outcome in running:
        if outcome is Verdict.RETIRED:
            break
    running.close()  # type: ignore[attr-defined]
    left = V2 & files(tmp_path)
    assert len(V2) - 1 == len(left)
    assert left == purged(tmp_path, Criteria(schema=2))
    assert set() == purged(tmp_path, Criteria(schema=2))


def test_criteria_that_ask_for_nothing_are_refused() -> None:
    """An empty purge would be everything."""
    with pytest.raises(PurgeRefusedError, match="no criterion"):
        Criteria()
    with pytest.raises(PurgeRefusedError, match="negative"):
        Criteria(older_than=-1)


def test_a_name_with_more_readings_than_are_listed_goes_by_schema_and_never_by_model(tmp_path: Path) -> None:
    """Even if all listed models are given, one that is not listed may own it; that it is v1 is certain."""
    name = EngineKey("-".join("abcdefghijkl"), 1, 0, 255, "half").disk()
    (tmp_path / name).write_bytes(b"1")
    what = identify(StoredName(name, 1, 0.0))
    assert not what.complete
    assert set() == purged(tmp_path, Criteria(models=what.models))
    outcomes = [outcome for _, outcome in purge_folder(tmp_path, Criteria(models=frozenset({"unrelated"})))]
    assert [Verdict.AMBIGUOUS] == outcomes
    assert {name} == purged(tmp_path, Criteria(schema=1))


def test_a_file_that_became_younger_since_it_was_judged_stays(tmp_path: Path) -> None:
    """It is looked at once more right before it goes: a writer that was there in between keeps its file."""
    fill(tmp_path).close()
    for name in V1:
        os.utime(tmp_path / name, (1000, 1000))
    judged = {stored.name: stored for stored in folder_names(tmp_path)}
    os.utime(tmp_path / PLAIN, (1090, 1090))
    (tmp_path / ENGINE).unlink()
    (tmp_path / SALTED).unlink()
    (tmp_path / SALTED).symlink_to("/dev/null")
    old = Criteria(schema=1, older_than=50)
    removed = {name: remove_file(tmp_path, judged[name], old, 1100) for name in V1}
    assert {PLAIN: False, SALTED: False, ENGINE: True, SLASHED: True, GDS: True} == removed
    assert {PLAIN, SALTED} == V1 & files(tmp_path)
    assert remove_file(tmp_path, judged[PLAIN], Criteria(schema=1), 1100)
    assert {SALTED} == V1 & files(tmp_path)


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    """What is behind it was never judged: it stays, and so does an equal file in the folder's old place."""
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    folders = {"linked": elsewhere, "kept": store / "kept"}
    for folder in (store / "linked", elsewhere, store / "kept"):
        folder.mkdir(parents=True)
        (folder / PLAIN).write_bytes(b"1")
    judged = [stored for stored in folder_names(store) if stored.name.endswith(PLAIN)]
    (store / "linked").rename(tmp_path / "moved")
    (store / "linked").symlink_to(elsewhere)
    removed = {stored.name.split("/")[0]: remove_file(store, stored, Criteria(schema=1), 0) for stored in judged}
    assert {"linked": False, "kept": True} == removed
    assert {"linked": True, "kept": False} == {name: (folder / PLAIN).exists() for name, folder in folders.items()}
    assert (tmp_path / "moved" / PLAIN).exists()


def test_entries_of_a_server_that_starts_during_a_purge_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder was not there when the locks were taken, so nobody owns it; what was asked for of schema 1 goes."""
    tiers = []

    def a_server_starts(folder: Path) -> dict[str, str]:
        tiers.append(fill(folder))
        return {}

    monkeypatch.setattr("compat.purge.described_models", a_server_starts)
    purge = purge_folder(tmp_path, Criteria(older_than=0), dry_run=False, now=time.time() + 60)
    assert V1 == {stored.name for stored, outcome in purge if outcome is Verdict.RETIRED}
    assert (set(), V2) == (V1 & files(tmp_path), V2 & files(tmp_path))
    for tier in tiers:
        tier.close()
    monkeypatch.undo()
    assert V2 == purged(tmp_path, Criteria(older_than=0), now=time.time() + 60)
