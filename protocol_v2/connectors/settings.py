"""`ConnectorSettings`: what an operator says to a connector, from the engine's free-form mapping."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from protocol_v2.client_thread import one_address
from protocol_v2.errors import LocalProtocolError
from protocol_v2.session_keeper import Patience

if TYPE_CHECKING:
    from collections.abc import Mapping

LOAD_MODES: Final = ("auto", "sync", "async")


class SettingsError(LocalProtocolError):
    """A setting that is not known, or has a value that it cannot have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """Settings of a connector; names as in the engine's configuration.

    Args:
        address: of the cache server, ``ipc://PATH`` or ``tcp://HOST:PORT``.
        chunk_size: tokens of a chunk; the same in all engines that share a cache.
        load: ``sync`` (in the step), ``async`` (between steps), or ``auto``: sync for one worker where the engine can
            take back what it did on a load that failed.
        unit: ``blocks``, ``tokens`` or ``auto`` (blocks); see `protocol_v2.connectors.paged`.
        model: name of the model in the key space, where engines load it from paths of their own.
        model_revision: commit or digest of the weights, where the engine does not know it.
        kv_dtype: resolved element type of the cache, where the engine does not say.
        hf_overrides: what an override function of the model's configuration does.
        shared_adapters: names of adapters that are the same weights everywhere, for ever.
        shared_adapter_paths: patterns of paths with the same promise.
        lookup_timeout: seconds that the engine's scheduler waits for a lookup.
        load_timeout: seconds for the loads of a step.
        store_timeout: seconds for a store.
        server_timeout: seconds that a server may take to be connected with, to answer a hello, and to answer a ping;
            after that it counts as gone, and requests are misses until it answers.
        save_queue_mib: mebibytes of copied KV that wait to be stored, at most.
        wait_for_store: do not end a step before its saves are stored: for engines that hand over to others.
        events: address to publish chunk events at; None for none.
        events_replay: address at which past events can be asked for; None for none.
        hide_salts: leave tokens and extra keys out of the events of salted requests.
    """

    address: str
    chunk_size: int = 256
    load: str = "auto"
    unit: str = "auto"
    model: str | None = None
    model_revision: str | None = None
    kv_dtype: str | None = None
    hf_overrides: str | None = None
    shared_adapters: tuple[str, ...] = ()
    shared_adapter_paths: tuple[str, ...] = ()
    lookup_timeout: float = 1.0
    load_timeout: float = 5.0
    store_timeout: float = 10.0
    server_timeout: float = 2.0
    save_queue_mib: int = 1024
    wait_for_store: bool = False
    events: str | None = None
    events_replay: str | None = None
    hide_salts: bool = False

    @property
    def patience(self) -> Patience:
        """Of the clients that the connector makes."""
        return Patience(connect=self.server_timeout, answer=self.server_timeout, ping=self.server_timeout)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> ConnectorSettings:
        """Settings from an engine's configuration.

        Raises:
            SettingsError: a name that is none, a value of another type or out of bounds, or no address.
        """
        names = {one.name for one in fields(cls)}
        unknown = sorted(str(name) for name in given if name not in names)
        if unknown:
            raise SettingsError(
                f"settings: {', '.join(unknown)} are not known; wanted some of {', '.join(sorted(names))}"
            )
        if "address" not in given:
            raise SettingsError("settings: address is missing; give ipc://PATH or tcp://HOST:PORT of the cache server")
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
        return cls(**values)

    def __post_init__(self) -> None:
        one_address(self.address)
        _whole("chunk_size", self.chunk_size, 1, 2**31 - 1)
        _whole("save_queue_mib", self.save_queue_mib, 1, 2**20)
        for name in ("lookup_timeout", "load_timeout", "store_timeout", "server_timeout"):
            _seconds(name, getattr(self, name))
        if self.load not in LOAD_MODES:
            raise SettingsError(f"load: got {self.load!r}, wanted one of {', '.join(LOAD_MODES)}")
        for name in ("unit", "model", "model_revision", "kv_dtype", "hf_overrides", "events", "events_replay"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise SettingsError(f"{name}: wanted text that is not empty")
        for name in ("shared_adapters", "shared_adapter_paths"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
                raise SettingsError(f"{name}: wanted a list of texts that are not empty")
        for name in ("wait_for_store", "hide_salts"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name}: wanted true or false")
        if self.events_replay is not None and self.events is None:
            raise SettingsError("events_replay: nothing is published without events; set both")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SettingsError(f"{name}: got {value!r}, wanted a whole number from {low} to {high}")


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 600:
        raise SettingsError(f"{name}: got {value!r}, wanted seconds above 0 and at most 600")
