"""A server's status as Prometheus metrics.

The collector reads the facts that the loop published last, so a scrape never waits for the loop, nor the loop for a
scrape. Names: ``extra_keys_<...>``; reasons, tiers and kinds of schema are labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from protocol_v2.status import Fact

_LABELLED: Final = (
    # prefix of the fact's name, metric, label, whether it only grows, help
    ("cache.misses.", "lookup_misses", "reason", True, "Lookups that did not hit all their chunks, by why."),
    ("cache.undelivered.", "undelivered", "reason", True, "Retrieves that delivered less than their range, by why."),
    ("cache.set_aside.", "set_aside", "reason", True, "Objects found corrupt or foreign and moved to quarantine."),
    ("cache.stored.", "store_outcomes", "outcome", True, "Objects by what became of them."),
    ("cache.retrieved.", "retrieved_chunks", "tier", True, "Chunks delivered, by the tier they came from."),
    ("cache.foreign_schema.", "foreign_schema_objects", "schema", False, "Objects of other storage schemas seen."),
    ("v1.requests.", "v1_requests", "operation", True, "Requests of v1 clients, by operation."),
    ("v1.refused.", "v1_refused", "reason", True, "Requests of v1 clients that were answered with a failure, by why."),
    ("schema.", "schema", "kind", False, "Highest number of each schema that is spoken."),
)
_TIER: Final = "tier."
_SERVICE: Final = "service."
_GROWING: Final = frozenset(
    {
        *("cache.hits", "cache.failed", "v1.hit_chunks", "events.batches", "events.untold"),
        *("remote.trips", "remote.failed", "remote.asked", "remote.there", "remote.late", "remote.skipped"),
        *("remote.read", "remote.read_bytes", "remote.written", "remote.written_bytes"),
        *("remote.dropped", "remote.refused"),
        *("shared.attached", "shared.refused", "shared.stored", "shared.unplaced", "shared.stale"),
        *("shared.retrieved", "shared.moved", "shared.inline"),
    }
)


class StatusCollector(Collector):
    """Reads the facts of a `CacheService` at every scrape.

    Args:
        facts: gives the facts as they were last published.
    """

    def __init__(self, facts: Callable[[], Mapping[str, Fact]]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        families: dict[str, Metric] = {}
        for name, value in self._facts().items():
            if isinstance(value, int | float):
                _add(families, name, float(value))
        yield from families.values()


def _add(families: dict[str, Metric], name: str, value: float) -> None:
    for prefix, metric, label, grows, text in _LABELLED:
        if name.startswith(prefix):
            _family(families, metric, text, grows=grows, label=label).add_metric([name.removeprefix(prefix)], value)
            return
    if name.startswith(_TIER):
        tier, field = name.removeprefix(_TIER).split(".", 1)
        text = f"Tier: {field}."
        _family(families, f"tier_{field}", text, grows=field == "evicted", label="tier").add_metric([tier], value)
        return
    grows = name.startswith(_SERVICE) or name in _GROWING
    plain = name.removeprefix(_SERVICE).replace(".", "_")
    _family(families, plain, f"Server: {name}.", grows=grows).add_metric([], value)


def _family(
    families: dict[str, Metric], metric: str, text: str, *, grows: bool, label: str = ""
) -> CounterMetricFamily | GaugeMetricFamily:
    family = families.get(metric)
    if not isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        kind = CounterMetricFamily if grows else GaugeMetricFamily
        family = families[metric] = kind(f"extra_keys_{metric}", text, labels=[label] if label else [])
    return family
