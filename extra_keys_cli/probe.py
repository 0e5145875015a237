"""``extra-keys probe`` and ``status``: what a server speaks, and what it says of itself."""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from rich.table import Column, Table

from extra_keys_cli.ages import format_age
from extra_keys_cli.failures import CommandError
from extra_keys_cli.screen import shown, stderr, stdout
from keying import KeySpace
from protocol_v2 import CacheClient, ProbeReport
from protocol_v2 import probe as ask
from protocol_v2.errors import ServerUnavailableError


def probe(address: str, space: KeySpace | None, timeout: float, *, as_json: bool) -> bool:
    """Say hello, print both sides and what was agreed.

    Args:
        address: of the server.
        space: to say, so that a mismatch shows; None for none.
        timeout: seconds for all of it.
        as_json: print one object, for scripts.

    Returns:
        Whether a session of wire protocol 2 stood.
    """
    _say_once()
    report = ask(address, space, timeout=timeout)
    if as_json:
        stdout.print_json(json.dumps(_facts(report)))
    elif report.ok:
        _print_session(report)
    else:
        stderr.print(f"[red]no session:[/red] {shown(report.error)}", highlight=False, soft_wrap=True)
    return report.ok


def status(address: str, timeout: float, *, as_json: bool) -> None:
    """Print a server's facts.

    Raises:
        ProtocolError: no session, or no answer in time.
    """
    _say_once()
    with CacheClient(address, role="status", timeout=timeout) as client:
        try:
            client.wait_ready()
        except ServerUnavailableError as error:
            raise CommandError(f"{address}: no session ({error}); is a server running there?") from None
        facts = client.status()
    if as_json:
        stdout.print_json(json.dumps(facts))
        return
    table = Table("fact", Column("value", overflow="fold"))
    group = ""
    for name, value in sorted(facts.items()):
        first = name.split(".", 1)[0]
        if group and first != group:
            table.add_section()
        group = first
        table.add_row(name, "-" if value is None else f"{value:,}" if isinstance(value, int) else shown(value))
    stdout.print(table)
    stdout.print(_who_is_there(facts), highlight=False, soft_wrap=True)


def _say_once() -> None:
    """That nobody answers is said by the command, and not by a warning of the client as well."""
    logging.getLogger("protocol_v2").setLevel(logging.ERROR)


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, versions)) or "none"


def _who_is_there(facts: Mapping[str, Any]) -> str:
    """How many clients of either protocol there are: what an operator of a roll-out looks for."""
    v2 = f"v2: sessions {facts.get('server.peers')}, requests {facts.get('service.requests')}"
    if not facts.get("server.v1_accepted"):
        return f"{v2}\nv1: not accepted; messages left without an answer {facts.get('service.foreign')}"
    requests, refused = (
        sum(count for name, count in facts.items() if name.startswith(prefix))
        for prefix in ("v1.requests.", "v1.refused.")
    )
    last = facts.get("v1.last_request_s")
    when = "never" if last is None else f"{format_age(last)} ago"
    return (
        f"{v2}\nv1: accepted; clients in the last two minutes {facts.get('v1.clients')}, "
        f"workers {facts.get('v1.workers')}, requests {requests} (refused {refused}), the last one {when}"
    )


def _facts(report: ProbeReport) -> dict[str, Any]:
    established = report.established
    return {
        "session": report.ok,
        "address": report.address,
        "capabilities": None if report.capabilities is None else sorted(report.capabilities),
        "asked": msgspec.to_builtins(report.offer.to_wire()),
        "agreed": established
        and {
            "wire": established.agreement.wire,
            "schema": established.agreement.schema,
            "features": sorted(established.agreement.features),
        },
        "server": established
        and {"software": established.server_software, "boot_id": established.server_boot_id.hex()},
        "limits": established and msgspec.to_builtins(established.limits),
        "space_notice": established and msgspec.to_builtins(established.notice),
        "not_recognised": established and msgspec.to_builtins(established.unrecognised),
        "refusal": report.refusal and msgspec.to_builtins(report.refusal),
        "error": report.error and {"type": type(report.error).__name__, "message": str(report.error)},
        "hello_ms": round(report.hello_seconds * 1e3, 3),
        "ping_ms": None if report.ping_seconds is None else round(report.ping_seconds * 1e3, 3),
    }


def _print_session(report: ProbeReport) -> None:
    facts = _facts(report)
    asked, agreed, server = facts["asked"], facts["agreed"], facts["server"]
    floor = asked["floor"]
    columns = (Column(name, overflow="fold") for name in ("", "we", "server", "agreed"))
    table = Table(*columns, title=f"session with {shown(report.address)}")
    for name, *cells in (
        ("capabilities", "", ", ".join(facts["capabilities"] or ["none said"]), ""),
        ("wire version", f"{_listed(asked['wire'])}, at least {floor['wire']}", "", agreed["wire"]),
        ("key schema", f"{_listed(asked['schemas'])}, at least {floor['schema']}", "", agreed["schema"]),
        ("features", ", ".join(asked["features"]) or "none", "", ", ".join(agreed["features"]) or "none"),
        ("space", report.space.model if report.space else "none", "", ""),
        ("software", "extra-keys", server["software"], ""),
        ("boot id", "", server["boot_id"], ""),
        ("hello, ping", f"{facts['hello_ms']} ms, {facts['ping_ms']} ms", "", ""),
    ):
        table.add_row(name, *map(shown, cells))
    stdout.print(table)
    for one in facts["space_notice"]:
        stdout.print(
            f"[yellow]space differs from the nearest that the server holds:[/yellow] "
            f"{shown(one['field'])} is {shown(repr(one['asked']))}, held {shown(repr(one['accepted']))}",
            soft_wrap=True,
        )
    limits = Table("limit", "value")
    for name, value in facts["limits"].items():
        limits.add_row(name, f"{value:,}")
    stdout.print(limits)
