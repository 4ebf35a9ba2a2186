"""What an engine reuses, as Prometheus metrics and OpenTelemetry spans.

`Collector` exports a `RadixIndex`, a `TurnTracker`, a `Generator`, a `KvIndexer` with what feeds it
and a proxy. `Prompts` counts the prompts of an engine of your own: tokens by the source of their
KV, and computed ones by the reason. ``kvtrie.metrics.tracing`` makes spans of a generator's
requests. ``docs/metrics.md`` lists every metric; what vLLM's connector exports too has the same
name without ``vllm:``, the same labels and the same meaning.

Promises: a counter never decreases while its source lives. Approximate tokens are never counted as
exact. No label and no attribute has a prompt, a token id, a session or a salt, so their values are
few. A scrape may come from any thread: it takes each index's lock once for `stats`, which reads
every edge of the index, and the locks of the tracker and of the counts for some microseconds.

`Collector` needs prometheus_client, spans need opentelemetry-api; both are imported when first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvtrie.metrics.families import FAMILIES, MetricFamily
from kvtrie.metrics.prompts import Prompts, PromptTotals
from kvtrie.metrics.reasons import REASONS

if TYPE_CHECKING:
    from kvtrie.metrics.collector import Collector

__all__ = ["FAMILIES", "REASONS", "Collector", "MetricFamily", "PromptTotals", "Prompts"]


def __getattr__(name: str) -> object:
    """Import the collector on first use."""
    if name != "Collector":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    found: object = import_module("kvtrie.metrics.collector").Collector
    return found
