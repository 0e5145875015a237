"""What a server says about itself: counters of its service, and the cache's status by dotted names."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

from protocol_v2.storage import STORAGE_SCHEMA
from protocol_v2.versions import KEY_SCHEMAS, WIRE_VERSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol_v2.outcomes import CacheStatus

Fact: TypeAlias = int | float | str | bool | None


@dataclass(slots=True)
class ServiceCounters:
    """Counts since the start.

    Attributes:
        requests: requests that were read.
        failed: requests that were answered with an error.
        rejected: messages of this protocol that broke its rules.
        foreign: messages of no protocol that is spoken here; dropped.
        dropped: requests that nobody waited for any more.
        unsent: messages that could not be sent.
        welcomed: sessions opened.
        refused: hellos refused.
        space_mismatches: of these, because of the space.
        space_notices: sessions whose space shares no key with the nearest one held of its model.
        background_failures: background work that failed.
    """

    requests: int = 0
    failed: int = 0
    rejected: int = 0
    foreign: int = 0
    dropped: int = 0
    unsent: int = 0
    welcomed: int = 0
    refused: int = 0
    space_mismatches: int = 0
    space_notices: int = 0
    background_failures: int = 0


def describe_status(cache: CacheStatus, counters: ServiceCounters, server: Mapping[str, Fact]) -> dict[str, Fact]:
    """One flat table of facts: names are dotted, values are numbers, texts or nothing."""
    facts: dict[str, Fact] = {
        "schema.wire": max(WIRE_VERSIONS),
        "schema.key": max(KEY_SCHEMAS),
        "schema.storage": STORAGE_SCHEMA,
        **server,
    }
    facts |= {f"service.{name}": count for name, count in asdict(counters).items()}
    for name, tier in (("memory", cache.memory), ("disk", cache.disk)):
        if tier is not None:
            facts |= {f"tier.{name}.{field}": value for field, value in asdict(tier).items()}
    if cache.remote is not None:
        facts |= {f"remote.{field}": value for field, value in asdict(cache.remote).items()}
    facts |= {
        "cache.hits": cache.hits,
        "cache.failed": cache.failed,
        "cache.quarantine_bytes": cache.quarantine,
        "cache.leases": cache.leases,
        "cache.held": cache.held,
        "cache.lapsed_leases": cache.lapsed,
        "cache.sessions": cache.sessions,
        "cache.pending_bytes": cache.pending,
    }
    facts |= {f"cache.misses.{reason.name.lower()}": count for reason, count in cache.misses.items()}
    facts |= {f"cache.undelivered.{reason.name.lower()}": count for reason, count in cache.undelivered.items()}
    facts |= {f"cache.set_aside.{reason.name.lower()}": count for reason, count in cache.set_aside.items()}
    facts |= {f"cache.stored.{outcome.value}": count for outcome, count in cache.stored.items()}
    facts |= {f"cache.retrieved.{tier}": count for tier, count in cache.retrieved.items()}
    facts |= {f"cache.foreign_schema.{schema}": count for schema, count in cache.foreign_schemas.items()}
    return facts
