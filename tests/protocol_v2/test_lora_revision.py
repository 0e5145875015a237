"""Revisions of adapters: everything that the files say, nothing that they do not, and no guessing."""

import hashlib
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keying import KeyingTypeError, KeySpace, LoraAdapter, UncacheableRequest, chunk_digests
from keying.engines import AdapterSource, UncacheableReason, from_vllm
from protocol_v2.connectors import lora_revision
from protocol_v2.connectors.lora_revision import AdapterRevisions, lora_content_revision
from tests.keying.engine_samples import refused, vllm_lora, vllm_request

CONFIG = b'{"r": 8, "lora_alpha": 16}'
WEIGHTS = b"weights" * 1000


def adapter(folder: Path, weights: bytes = WEIGHTS, config: bytes = CONFIG, **files: bytes) -> Path:
    """A folder as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose files were read, in order."""
    folders: list[str] = []
    digest = lora_revision._digest

    def counted(folder: str, states: Any) -> str | None:
        folders.append(folder)
        return digest(folder, states)

    monkeypatch.setattr(lora_revision, "_digest", counted)
    return folders


def test_the_revision_is_the_documented_digest(tmp_path: Path) -> None:
    """Framed by name and length, sorted by name; checked against the standard library alone."""
    expected = hashlib.sha256(struct.pack("<I", 14) + b"xk2/lora-files" + struct.pack("<I", 2))
    for name, content in ((b"adapter_config.json", CONFIG), (b"adapter_model.safetensors", WEIGHTS)):
        expected.update(struct.pack("<I", len(name)) + name + struct.pack("<Q", len(content)) + content)
    assert f"sha256:{expected.hexdigest()}" == lora_content_revision(adapter(tmp_path / "a"))


def test_equal_content_has_one_revision_wherever_it_lies(tmp_path: Path) -> None:
    """Neither path nor time enters; links to the folder or in it, as in a model cache, are like the files."""
    one, other = adapter(tmp_path / "a"), adapter(tmp_path / "deep" / "b")
    expected = lora_content_revision(one)
    assert expected == lora_content_revision(str(other))
    (tmp_path / "link").symlink_to(one)
    assert expected == lora_content_revision(tmp_path / "link")
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (linked / name).symlink_to(one / name)
    assert expected == lora_content_revision(linked)


def test_everything_that_is_loaded_counts_and_nothing_else(tmp_path: Path) -> None:
    """Configuration, weights in any format, shards and added embeddings; no notes and no optimizer."""
    variants = [
        adapter(tmp_path / "0"),
        adapter(tmp_path / "1", config=CONFIG + b" "),
        adapter(tmp_path / "2", weights=WEIGHTS + b"x"),
        adapter(tmp_path / "3", weights=b"X" + WEIGHTS[1:]),
        adapter(tmp_path / "4", adapter_model__bin=b"x"),
        adapter(tmp_path / "5", new_embeddings__safetensors=b"x"),
        adapter(tmp_path / "6", new_embeddings__safetensors=b""),
    ]
    assert len(variants) == len({lora_content_revision(one) for one in variants})
    beside = adapter(tmp_path / "7", README__md=b"x", optimizer__pt=b"x", tokenizer__json=b"x")
    assert lora_content_revision(variants[0]) == lora_content_revision(beside)


def test_content_cannot_move_between_files(tmp_path: Path) -> None:
    """The end of one file is not the start of the next: lengths are framed."""
    one = adapter(tmp_path / "a", config=b"ab", weights=b"cd")
    other = adapter(tmp_path / "b", config=b"abc", weights=b"d")
    assert lora_content_revision(one) != lora_content_revision(other)


@pytest.mark.parametrize("ending", ["bin", "pt"])
def test_weights_in_other_formats(tmp_path: Path, ending: str) -> None:
    """Adapters of older tools have no safetensors."""
    folder = adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / f"adapter_model.{ending}")
    assert lora_content_revision(folder).startswith("sha256:")
    assert lora_content_revision(folder) != lora_content_revision(adapter(tmp_path / "b"))


def test_files_are_read_once_for_each_state(tmp_path: Path, readings: list[str]) -> None:
    """Asked for each request, read at the first; each of size, time and file changes the state."""
    folder = adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    first = lora_content_revision(folder)
    assert first == lora_content_revision(folder)
    assert 1 == len(readings)
    weights.write_bytes(b"shorter")
    second = lora_content_revision(folder)
    assert (2, True) == (len(readings), first != second)
    os.utime(weights, ns=(1, 1))
    assert second == lora_content_revision(folder)
    assert 3 == len(readings)
    replaced = tmp_path / "new"
    replaced.write_bytes(b"SHORTER")
    os.utime(replaced, ns=(1, 1))
    replaced.rename(weights)
    assert second != lora_content_revision(folder)
    assert 4 == len(readings)


def test_a_reloaded_adapter_never_meets_its_older_self(tmp_path: Path) -> None:
    """E4: v1, v2 under the same name and path, and v1's content again, through to the keys of a request."""
    space = KeySpace("m", chunk_size=4, kv_dtype="bfloat16")
    request = vllm_request(lora_request=vllm_lora("sql", str(tmp_path / "a")))

    def keys(weights: bytes) -> list[bytes]:
        adapter(tmp_path / "a", weights)
        inputs = from_vllm(request, adapter_revision=AdapterRevisions())
        return chunk_digests(space, inputs.tokens, inputs.extra_keys)

    v1, v2, again = keys(b"v1"), keys(b"v2!"), keys(b"v1")
    assert set() == set(v1) & set(v2)
    assert v1 == again


def test_threads_wait_for_one_reading(tmp_path: Path, readings: list[str]) -> None:
    """A9: 16 threads that ask at once get one digest, read once."""
    folder = adapter(tmp_path / "a")
    gate = threading.Barrier(16)
    found: list[str] = []

    def ask() -> None:
        gate.wait(timeout=30)
        found.append(lora_content_revision(folder))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert (16, 1, 1) == (len(found), len(set(found)), len(readings))


def during_the_first(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object], times: int = 1) -> None:
    """Something happens after the files were read and before their state is looked at again."""
    digest = lora_revision._digest
    left = [times]

    def changing(folder: str, states: Any) -> str | None:
        revision = digest(folder, states)
        if left[0]:
            left[0] -= 1
            change()
        return revision

    monkeypatch.setattr(lora_revision, "_digest", changing)


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of a mixture is never given out."""
    folder = adapter(tmp_path / "a")
    expected = lora_content_revision(adapter(tmp_path / "b", weights=b"later"))
    during_the_first(monkeypatch, lambda: (folder / "adapter_model.safetensors").write_bytes(b"later"))
    assert expected == lora_content_revision(folder)


def test_a_file_that_keeps_changing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three readings, then the request goes past the cache; when the files rest the adapter is served."""
    folder = adapter(tmp_path / "a")
    count = iter(range(100))
    during_the_first(
        monkeypatch,
        lambda: (folder / "adapter_model.safetensors").write_bytes(b"x" * next(count)),
        lora_revision.ATTEMPTS,
    )
    refused(UncacheableReason.ADAPTER_CHANGED, lora_content_revision, folder)
    assert lora_content_revision(folder).startswith("sha256:")


@pytest.mark.parametrize("size", [0, len(WEIGHTS) - 1, len(WEIGHTS) + 1])
def test_a_file_of_another_size_than_its_state_is_noticed(tmp_path: Path, size: int) -> None:
    """A reading that ends early or goes on is no reading of that state."""
    folder = adapter(tmp_path / "a")
    states = lora_revision._file_states(str(folder))
    assert None is not lora_revision._digest(str(folder), states)
    (folder / "adapter_model.safetensors").write_bytes(bytes(size))
    assert None is lora_revision._digest(str(folder), states)


def broken(folder: Path, how: str) -> Path:
    """A folder that is no adapter, or cannot be read."""
    if how == "missing":
        return folder / "nowhere"
    adapter(folder)
    weights = folder / "adapter_model.safetensors"
    if how == "file":
        return weights
    if how == "no config":
        (folder / "adapter_config.json").unlink()
    if how in {"no weights", "pipe", "dangling", "folder"}:
        weights.unlink()
    if how == "pipe":
        os.mkfifo(weights)
    if how == "dangling":
        weights.symlink_to(folder / "gone")
    if how == "folder":
        weights.mkdir()
    return folder


@pytest.mark.parametrize("how", ["missing", "file", "no config", "no weights", "pipe", "dangling", "folder"])
def test_what_cannot_be_read_is_refused(tmp_path: Path, how: str) -> None:
    """A typed refusal that does not block and does not name the path to a log."""
    folder = broken(tmp_path / "a", how)
    message = refused(UncacheableReason.UNREADABLE_ADAPTER, lora_content_revision, folder)
    assert str(tmp_path) not in message
    source = AdapterSource("sql", str(folder))
    refused(UncacheableReason.UNREADABLE_ADAPTER, AdapterRevisions(), source)


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    """Empty, with a NUL, or bytes."""
    refused(UncacheableReason.UNREADABLE_ADAPTER, lora_content_revision, path)


def test_a_read_error_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails while the files are read is no digest of what came before."""

    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    folder = adapter(tmp_path / "a")
    monkeypatch.setattr(os, "open", fails)
    assert "Input/output" in refused(UncacheableReason.UNREADABLE_ADAPTER, lora_content_revision, folder)


def test_scales_are_part_of_the_revision(tmp_path: Path) -> None:
    """E11: 1 in any spelling is not written; other scales as the bits of a float32."""
    folder = adapter(tmp_path / "a")
    plain = lora_content_revision(folder)
    whole: list[Any] = [1, 1.0, 1 + 2**-30]
    for one in whole:
        assert plain == lora_content_revision(folder, scale=one)
    assert f"{plain};scale=3f000000" == lora_content_revision(folder, scale=0.5)
    assert f"{plain};scale=bf800000" == lora_content_revision(folder, scale=-1)
    assert f"{plain};scale=00000000" == lora_content_revision(folder, scale=0)
    assert f"{plain};scale=3f000000" == AdapterRevisions()(AdapterSource("sql", str(folder), scale=0.5))
    wrong: list[Any] = [float("nan"), float("inf"), 1e39, True, "1", None]
    for one in wrong:
        refused(UncacheableReason.MALFORMED_ADAPTER, lora_content_revision, folder, scale=one)


def test_declared_names_and_paths_are_not_read(readings: list[str]) -> None:
    """The operator's word stands for files that are not here; it can never be taken for a digest."""
    revisions = AdapterRevisions(shared_names=("sql",), shared_paths=("/adapters/*", "/mnt/"))
    sources = [
        AdapterSource("sql", "/anywhere"),
        AdapterSource("sql"),
        AdapterSource("x", "/adapters/x"),
        AdapterSource("y", "/mnt/deep/y"),
        AdapterSource("x", "/adapters/x", scale=2.0),
    ]
    assert [
        "declared:name",
        "declared:name",
        "declared:path:/adapters/x",
        "declared:path:/mnt/deep/y",
        "declared:path:/adapters/x;scale=40000000",
    ] == [revisions(source) for source in sources]
    assert [] == readings


def test_paths_are_told_apart_and_spellings_are_not(readings: list[str]) -> None:
    """Two declared folders under one name are two adapters; a doubled slash is none."""
    revisions = AdapterRevisions(shared_paths=("/adapters/",))
    one, other, again = (
        revisions(AdapterSource("a", path)) for path in ("/adapters/v1", "/adapters/v2", "/adapters//v1/")
    )
    assert one != other
    assert one == again
    assert [] == readings


@pytest.mark.parametrize("path", ["/adapters/../etc", "/adaptersX/a", "/other/adapters/a", "/ADAPTERS/a", "adapters/a"])
def test_a_path_outside_of_the_declaration_is_read(path: str) -> None:
    """There is no way out of a declared folder, and a pattern is no part of another name."""
    revisions = AdapterRevisions(shared_paths=("/adapters/*",))
    refused(UncacheableReason.UNREADABLE_ADAPTER, revisions, AdapterSource("a", path))


def test_an_adapter_of_which_nothing_is_known_has_no_revision(tmp_path: Path) -> None:
    """No path, no declaration: None, which makes the request uncacheable; a path by name fills the gap."""
    assert None is AdapterRevisions()(AdapterSource("sql"))
    folder = adapter(tmp_path / "a")
    known = AdapterRevisions(paths={"sql": str(folder)})
    assert lora_content_revision(folder) == known(AdapterSource("sql"))
    assert None is known(AdapterSource("other"))


def test_declarations_are_collections_of_text() -> None:
    """A lone string would be taken letter by letter; a pattern of no characters matches nothing."""
    wrong: list[dict[str, Any]] = [
        {"shared_names": "sql"},
        {"shared_paths": "/adapters/*"},
        {"shared_names": [1]},
        {"shared_paths": [""]},
    ]
    for fields in wrong:
        with pytest.raises(KeyingTypeError):
            AdapterRevisions(**fields)


def test_digests_are_kept_in_bounds(tmp_path: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: the folder asked for least recently is forgotten, and read again when it comes back."""
    monkeypatch.setattr(lora_revision, "MAX_KEPT", 2)
    monkeypatch.setattr(lora_revision, "_DIGESTS", lora_revision._Digests())
    folders = [adapter(tmp_path / name) for name in "abc"]
    for place in (0, 1, 0, 2, 0, 1):
        lora_content_revision(folders[place])
    assert ["a", "b", "c", "b"] == [Path(folder).name for folder in readings]


def test_a_revision_fits_the_extra_key(tmp_path: Path) -> None:
    """A declared path that is longer than a text may be is a refusal of the request, not a crash."""
    request = vllm_request(lora_request=vllm_lora("a", "/adapters/" + "x" * 5000))
    revisions = AdapterRevisions(shared_paths=("/adapters/*",))
    with pytest.raises(UncacheableRequest):
        from_vllm(request, adapter_revision=revisions)
    short = vllm_request(lora_request=vllm_lora("a", "/adapters/x"))
    assert (LoraAdapter("a", "declared:path:/adapters/x"),) == from_vllm(short, adapter_revision=revisions).extra_keys
