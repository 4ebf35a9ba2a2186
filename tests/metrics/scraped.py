"""What a scrape gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from kvtrie.metrics import Collector

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(collector: Collector) -> Series:
    """Every sample by its name and labels, read back from the text that Prometheus gets."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(series: Series, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    return sum(
        value
        for (found, having), value in series.items()
        if found == name and labels.items() <= dict(having).items()
    )


def counters(series: Series) -> Series:
    return {
        key: value
        for key, value in series.items()
        if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
    }
