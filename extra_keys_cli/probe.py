"""``extra-keys probe``: hello, and what came of it."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from extra_keys_cli.failures import stderr, stdout
from protocol_v2.client import CacheClient
from protocol_v2.errors import NegotiationRefusedError, ProtocolError
from protocol_v2.events import Established
from protocol_v2.negotiation import Offer

TOLD = (
    "server.uptime_s",
    "server.peers",
    "tier.memory.used",
    "tier.memory.budget",
    "tier.disk.used",
    "tier.disk.budget",
)


def probe(address: str, timeout: float, *, as_json: bool) -> bool:
    """Say hello without a space, print both sides and what was agreed.

    Args:
        address: of the server.
        timeout: seconds.
        as_json: print one object, for scripts.

    Returns:
        Whether a session of wire protocol 2 stands.
    """
    ours = Offer()
    with CacheClient(address, role="probe", timeout=timeout) as client:
        try:
            established = client.wait_ready()
            if established is None:
                stderr.print("[red]no session:[/red] the server speaks another protocol", highlight=False)
                return False
            status = client.status()
        except ProtocolError as error:
            _print_failure(ours, error, as_json=as_json)
            return False
    if as_json:
        stdout.print_json(json.dumps(_facts(address, ours, established, status)))
    else:
        _print_session(address, ours, established, status)
    return True


def _facts(address: str, ours: Offer, established: Established, status: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "session": True,
        "address": address,
        "asked": msgspec.to_builtins(ours.to_wire()),
        "agreed": {
            "wire": established.agreement.wire,
            "schema": established.agreement.schema,
            "features": sorted(established.agreement.features),
        },
        "server": {"software": established.server_software, "boot_id": established.server_boot_id.hex()},
        "limits": msgspec.to_builtins(established.limits),
        "not_recognised": msgspec.to_builtins(established.unrecognised),
        "status": dict(status),
    }


def _print_session(address: str, ours: Offer, established: Established, status: Mapping[str, Any]) -> None:
    agreement = established.agreement
    table = Table("", "we", "server", "agreed", title=f"session with {escape(address)}")
    for name, *cells in (
        ("wire version", f"{sorted(ours.wire)}, at least {ours.wire_floor}", "", agreement.wire),
        ("key schema", f"{sorted(ours.schemas)}, at least {ours.schema_floor}", "", agreement.schema),
        ("storage schema", "", status.get("schema.storage", ""), ""),
        ("features", sorted(ours.features) or "none", "", sorted(agreement.features) or "none"),
        ("software", "extra-keys", established.server_software, ""),
        ("boot id", "", established.server_boot_id.hex(), ""),
    ):
        table.add_row(name, *(escape(str(cell)) for cell in cells))
    stdout.print(table)
    facts = Table("limit or fact", "value")
    for name, value in msgspec.to_builtins(established.limits).items():
        facts.add_row(name, f"{value:,}")
    for name in TOLD:
        if name in status:
            facts.add_row(name, f"{status[name]:,}")
    stdout.print(facts)


def _print_failure(ours: Offer, error: ProtocolError, *, as_json: bool) -> None:
    refusal = error.refusal if isinstance(error, NegotiationRefusedError) else None
    if as_json:
        answer = {
            "session": False,
            "error": type(error).__name__,
            "message": str(error),
            "asked": msgspec.to_builtins(ours.to_wire()),
            "refusal": None if refusal is None else msgspec.to_builtins(refusal),
        }
        stdout.print_json(json.dumps(answer))
    else:
        stderr.print(f"[red]no session:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
