"""What an operator says to a connector, and adapters that are replaced."""

from typing import Any

import pytest

from keying import UncacheableRequest
from keying.engines import AdapterSource
from protocol_v2.connectors.loaded_adapters import LoadedAdapters
from protocol_v2.connectors.settings import ConnectorSettings, SettingsError
from protocol_v2.errors import LocalProtocolError

ADDRESS = {"address": "tcp://127.0.0.1:5555"}


def test_an_address_is_enough() -> None:
    """Everything else has a default; lists of an engine's JSON become tuples."""
    settings = ConnectorSettings.from_mapping({**ADDRESS, "shared_adapters": ["a", "b"]})
    assert ("tcp://127.0.0.1:5555", 256, ("a", "b")) == (
        settings.address,
        settings.chunk_size,
        settings.shared_adapters,
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"chunksize": 64}, "chunksize"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": True}, "chunk_size"),
        ({"chunk_size": 2**31}, "chunk_size"),
        ({"load": "maybe"}, "load"),
        ({"load_timeout": 0}, "load_timeout"),
        ({"lookup_timeout": float("nan")}, "lookup_timeout"),
        ({"store_timeout": "10"}, "store_timeout"),
        ({"server_timeout": 601}, "server_timeout"),
        ({"save_queue_mib": -1}, "save_queue_mib"),
        ({"model": ""}, "model"),
        ({"unit": 3}, "unit"),
        ({"shared_adapters": "a"}, "shared_adapters"),
        ({"shared_adapter_paths": [""]}, "shared_adapter_paths"),
        ({"wait_for_store": 1}, "wait_for_store"),
        ({"events_replay": "tcp://*:1"}, "events_replay"),
    ],
)
def test_what_nobody_can_have_meant_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    """A misspelt or impossible setting stops the engine's start; it is never ignored."""
    with pytest.raises(SettingsError, match=said):
        ConnectorSettings.from_mapping({**ADDRESS, **wrong})


def test_an_address_that_is_none_is_refused() -> None:
    """Missing, or of another kind."""
    with pytest.raises(SettingsError, match="address is missing"):
        ConnectorSettings.from_mapping({})
    with pytest.raises(LocalProtocolError, match="address"):
        ConnectorSettings.from_mapping({"address": "http://x"})


# ---- adapters


class Files:
    """What adapters' files hold, by path."""

    def __init__(self, **revisions: str) -> None:
        self.revisions = revisions

    def __call__(self, source: AdapterSource) -> str | None:
        """The revision; unreadable where there is none."""
        if source.path is None:
            return None
        if source.path not in self.revisions:
            raise UncacheableRequest("unreadable_adapter", "gone")
        return self.revisions[source.path]


def source(path: str | None = "p", name: str = "a") -> AdapterSource:
    """An adapter as an engine names it."""
    return AdapterSource(name, path)


def test_a_slot_keeps_the_revision_of_its_first_use() -> None:
    """The same again is fine; other files without a reload are uncacheable, and stay so when the old ones come back."""
    files = Files(p="1")
    adapters = LoadedAdapters(files)
    assert ("1", False) == adapters.use(source(), 1, reloads=False)
    assert ("1", False) == adapters.use(source(), 1, reloads=False)
    files.revisions["p"] = "2"
    for _ in range(2):
        with pytest.raises(UncacheableRequest) as caught:
            adapters.use(source(), 1, reloads=False)
        assert "adapter_changed" == caught.value.reason
        files.revisions["p"] = "1"


def test_a_reload_is_a_new_revision_and_says_so() -> None:
    """Who runs with the slot is to be given up; the slot is in doubt until the engine has loaded it, and right then."""
    files = Files(p="1")
    adapters = LoadedAdapters(files)
    adapters.use(source(), 1, reloads=False)
    files.revisions["p"] = "2"
    assert ("2", True) == adapters.use(source(), 1, reloads=True)
    with pytest.raises(UncacheableRequest):
        adapters.use(source(), 1, reloads=False)
    assert [False, True] == [adapters.waits(1, revision) for revision in "12"]
    adapters.loaded(1)
    assert not adapters.waits(1, "2")
    assert ("2", False) == adapters.use(source(), 1, reloads=False)
    files.revisions["p"] = "3"
    with pytest.raises(UncacheableRequest):
        adapters.use(source(), 1, reloads=False)
    assert ("3", True) == adapters.use(source(), 1, reloads=True)


def test_another_slot_is_another_loading() -> None:
    """The same name and path under a new number: what the engine cached under them may be of the old weights."""
    files = Files(p="1", q="9")
    adapters = LoadedAdapters(files)
    adapters.use(source(), 1, reloads=False)
    adapters.use(source("q"), 2, reloads=False)
    assert (False, False) == (adapters.is_stale("a", "p"), adapters.is_stale("a", "q"))
    files.revisions["p"] = "2"
    assert ("2", False) == adapters.use(source(), 3, reloads=False)
    assert (True, False) == (adapters.is_stale("a", "p"), adapters.is_stale("a", "q"))


def test_files_are_looked_at_again() -> None:
    """Right, changed, gone."""
    files = Files(p="1")
    adapters = LoadedAdapters(files)
    assert adapters.is_current(source(), "1")
    files.revisions["p"] = "2"
    assert not adapters.is_current(source(), "1")
    del files.revisions["p"]
    assert not adapters.is_current(source(), "1")
    assert (None, False) == adapters.use(source(None), 5, reloads=False)
