"""A collector for prometheus_client: reads its sources when it is scraped, and keeps no thread."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
except ImportError as error:
    _MISSING = "kvtrie.metrics.Collector needs prometheus_client: pip install 'kvtrie[metrics]'"
    raise ImportError(_MISSING) from error

from kvtrie._core import KvIndexer, RadixIndex, StaleHandleError
from kvtrie.cluster import Bridge, Replica
from kvtrie.metrics.families import FAMILIES
from kvtrie.metrics.generator import FIRST_TOKEN_BUCKETS, GeneratorCounter
from kvtrie.metrics.prompts import OTHER, REUSES, Prompts
from kvtrie.router import TurnTracker
from kvtrie.router.splicing import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from kvtrie.cluster import Subscription
    from kvtrie.engines.transformers import Generator
    from kvtrie.fleet.proxy import Proxy

_OWN: Final = frozenset(label for family in FAMILIES for label in family.labels) | {"le"}
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

Samples = dict[tuple[str, ...], float]
"""Values by the labels of a family."""


@dataclass(frozen=True, slots=True)
class _Histogram:
    buckets: list[int]
    total: float


class Collector:
    """Exports what is reused, from live objects.

    Give it to ``registry.register``. One collector may have several sources, added with `add`
    under different labels. A source that is given keeps living as long as the collector.

    An error of a source is one of the scrape: after `os.fork`, indexes and trackers of the parent
    raise `StaleHandleError` in the child.

    Args:
        index: An index of an engine of your own.
        tracker: A tracker of a router.
        generator: A generator, with its index. Its requests are counted from here on.
        prompts: Counts of the prompts of an engine of your own. They need no `index`.
        indexer: A router's index of many workers.
        subscriptions: What feeds it, by the worker's name. A mapping that changes is read at
            each scrape.
        replica: What feeds it from bridges; also next to subscriptions, for other workers.
        proxy: A proxy in front of a router.
        labels: Labels of every sample of these sources, by name: a replica, for example. Their
            values should be few.

    Raises:
        TypeError: A source or a label has the wrong type.
        ValueError: A label has a name that Prometheus or a metric uses, or a source occurs twice.

    Example:
        >>> import kvtrie
        >>> from prometheus_client import CollectorRegistry
        >>> from kvtrie.metrics import Collector
        >>> registry = CollectorRegistry()
        >>> index = kvtrie.RadixIndex(num_blocks=8)
        >>> registry.register(Collector(index=index, labels={"replica": "a"}))
        >>> registry.get_sample_value("kvtrie_pool_blocks", {"replica": "a"})
        8.0
    """

    def __init__(
        self,
        *,
        index: RadixIndex | None = None,
        tracker: TurnTracker | None = None,
        generator: Generator | None = None,
        prompts: Prompts | None = None,
        indexer: KvIndexer | None = None,
        subscriptions: Mapping[str, Subscription] | None = None,
        replica: Replica | None = None,
        proxy: Proxy | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._sources: list[_Exported] = []
        self._names: tuple[str, ...] = ()
        self.add(
            index=index,
            tracker=tracker,
            generator=generator,
            prompts=prompts,
            indexer=indexer,
            subscriptions=subscriptions,
            replica=replica,
            proxy=proxy,
            labels=labels,
        )

    def add(
        self,
        *,
        index: RadixIndex | None = None,
        tracker: TurnTracker | None = None,
        generator: Generator | None = None,
        prompts: Prompts | None = None,
        indexer: KvIndexer | None = None,
        subscriptions: Mapping[str, Subscription] | None = None,
        replica: Replica | None = None,
        proxy: Proxy | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Export more sources, under labels of the same names with other values.

        Args:
            index: As for the class; likewise the others.
            tracker: As for the class.
            generator: As for the class.
            prompts: As for the class.
            indexer: As for the class.
            subscriptions: As for the class.
            replica: As for the class.
            proxy: As for the class.
            labels: As for the class.

        Raises:
            TypeError: As for the class.
            ValueError: As for the class; or the labels have other names than those before, or the
                same values.
        """
        _check("labels", labels, Mapping)
        given = {} if labels is None else labels
        for name, value in given.items():
            _check_label(name, value)
        _check("index", index, RadixIndex)
        _check("tracker", tracker, TurnTracker)
        _check("prompts", prompts, Prompts)
        _check("indexer", indexer, KvIndexer)
        _check("subscriptions", subscriptions, Mapping)
        _check("replica", replica, Replica)
        if indexer is None and (subscriptions is not None or replica is not None):
            given_alone = "subscriptions need their" if replica is None else "a replica needs its"
            msg = f"Collector: {given_alone} indexer"
            raise ValueError(msg)
        if generator is not None and (index is not None or prompts is not None):
            msg = "Collector: a generator has its index and its prompts; give it without them"
            raise ValueError(msg)
        names = tuple(sorted(given))
        values = tuple(given[name] for name in names)
        if self._sources and names != self._names:
            msg = f"Collector.add: the labels are {list(names)}, those before {list(self._names)}"
            raise ValueError(msg)
        if any(source.values == values for source in self._sources):
            msg = f"Collector.add: the labels {dict(given)} are those of another source"
            raise ValueError(msg)
        counter = None
        if generator is not None:
            counter = GeneratorCounter(generator)
            index, prompts = generator.index, counter.prompts
        self._names = names
        self._sources = [
            *self._sources,
            _Exported(
                values,
                index,
                tracker,
                generator,
                prompts,
                counter,
                indexer,
                subscriptions,
                replica,
                proxy,
            ),
        ]

    def close(self) -> None:
        """Stop counting the requests of generators; what was counted is still exported.

        Call it where the generator is used, once.
        """
        for source in self._sources:
            if source.generator is not None and source.counter is not None:
                source.generator.unwatch(source.counter)

    def collect(self) -> Iterator[Metric]:
        """Read all sources; called by the registry, from any thread."""
        sources = self._sources
        samples = [source.samples() for source in sources]
        for family in FAMILIES:
            if not any(family.name in found for found in samples):
                continue
            names = (*self._names, *family.labels)
            metric = _KINDS[family.kind](family.name, family.text, labels=names)
            for source, found in zip(sources, samples, strict=True):
                _fill(metric, source.values, found.get(family.name, {}))
            yield metric


_KINDS: Final[dict[str, Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _fill(metric: Any, values: tuple[str, ...], found: Samples | _Histogram) -> None:  # noqa: ANN401 - of any kind
    if isinstance(found, _Histogram):
        bounds = [*(repr(bound) for bound in FIRST_TOKEN_BUCKETS), "+Inf"]
        buckets = list(zip(bounds, accumulate(found.buckets), strict=True))
        metric.add_metric(values, buckets, found.total)
        return
    for labels, value in found.items():
        metric.add_metric((*values, *labels), value)


def _check(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        msg = f"Collector: {name} must be a {kind.__name__}, not {value!r}"
        raise TypeError(msg)


def _check_label(name: object, value: object) -> None:
    if not isinstance(name, str) or not isinstance(value, str):
        msg = f"Collector: a label is two strings, not {name!r}: {value!r}"
        raise TypeError(msg)
    if _LABEL.fullmatch(name) is None or name in _OWN:
        msg = f"Collector: no label may be called {name!r}: metrics have {', '.join(sorted(_OWN))}"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class _Exported:
    """Objects under the same labels."""

    values: tuple[str, ...]
    index: RadixIndex | None
    tracker: TurnTracker | None
    generator: Generator | None
    prompts: Prompts | None
    counter: GeneratorCounter | None
    indexer: KvIndexer | None
    subscriptions: Mapping[str, Subscription] | None
    replica: Replica | None
    proxy: Proxy | None

    def samples(self) -> dict[str, Samples | _Histogram]:
        found: dict[str, Samples | _Histogram] = {}
        if self.prompts is not None:
            found |= _of_prompts(self.prompts)
        if self.generator is not None and self.counter is not None:
            found |= _of_generator(self.generator, self.counter)
        if self.index is not None:
            found |= _of_index(self.index)
        if self.tracker is not None:
            found |= _of_tracker(self.tracker)
        if self.indexer is not None:
            found |= _of_indexer(self.indexer, self.subscriptions or {}, self.replica)
        if self.proxy is not None:
            found["kvtrie_proxy_requests"] = _by(self.proxy.counts.copy(), ("requests", "routed"))
        return found


def _plain(values: Mapping[str, float]) -> dict[str, Samples | _Histogram]:
    return {f"kvtrie_{name}": {(): float(value)} for name, value in values.items()}


def _by(counts: Mapping[str, float], always: Iterable[str] = ()) -> Samples:
    """Values by one label; those of ``always`` are there from the start, so rates begin at 0."""
    return {(name,): float(counts.get(name, 0)) for name in [*dict.fromkeys([*always, *counts])]}


def _of_prompts(prompts: Prompts) -> dict[str, Samples | _Histogram]:
    now = prompts.totals()
    found = _plain({"tokens_exact": now.copied["exact"], "tokens_moved": now.copied["moved"]})
    tokens: Samples = {(how, OTHER): 0.0 for how in REUSES}
    tokens.update((key, float(count)) for key, count in now.prompt.items())
    found["kvtrie_prompt_tokens"] = tokens
    found["kvtrie_computed_tokens"] = {key: float(count) for key, count in now.computed.items()}
    return found


def _of_generator(
    generator: Generator, counter: GeneratorCounter
) -> dict[str, Samples | _Histogram]:
    now, repairs = counter.totals(), generator.repair_counts
    found = _plain(
        {
            "plans_not_cleared": now.plans_not_cleared,
            "requests_in_place_only": now.requests_in_place_only,
            "requests_running": generator.num_running,
            "requests_waiting": generator.num_waiting,
            "preemptions": now.preemptions,
            "generation_tokens": now.generation_tokens,
            "forward_tokens": now.forward_tokens,
            "plans_repaired": repairs.chosen,
            "plans_without_records": repairs.without_records,
            "saturated_elements": generator.num_saturated,
            "free_blocks": generator.allocator.num_free,
        }
    )
    found["kvtrie_requests"] = _by(now.requests, ("stop", "length", "cancelled", "error"))
    phases = ("plan", "copy", "compute", "decode", "insert")
    found["kvtrie_phase_seconds"] = _by(now.phase_seconds, phases)
    found["kvtrie_phases"] = _by(now.phases, phases)
    found["kvtrie_time_to_first_token_seconds"] = _Histogram(
        now.first_tokens, now.first_token_seconds
    )
    return found


def _of_index(index: RadixIndex) -> dict[str, Samples | _Histogram]:
    now = index.stats()
    found = _plain(
        {
            "pool_blocks": index.num_blocks,
            "index_evictable_blocks": now.evictable,
            "index_pinned_blocks": now.pinned,
            "index_condemned_blocks": now.condemned,
            "index_waiting_blocks": now.waiting,
            "index_quarantined_blocks": now.quarantined,
            "index_dead_blocks": now.dead,
            "index_holes": now.holes,
            "index_namespaces": now.namespaces,
            "index_nodes": now.nodes,
            "index_windows": now.windows,
            "index_bytes": now.bytes,
            "index_live_plans": now.live_plans,
            "index_visited_nodes": now.nodes_visited,
            "index_compared_bytes": now.bytes_compared,
            "index_search_looks": now.search_looks,
            "index_plans_without_scope": now.plans_without_scope,
            "index_unknown_discards": now.unknown_discards,
        }
    )
    found["kvtrie_index_blocks"] = _by(
        {"exact": now.indexed - now.approximate, "approximate": now.approximate}
    )
    return found


def _of_tracker(tracker: TurnTracker) -> dict[str, Samples | _Histogram]:
    now = tracker.stats()
    found = _plain(
        {
            "tracker_conversations": now.conversations,
            "tracker_histories": now.histories,
            "tracker_history_tokens": now.history_tokens,
            "tracker_kept": now.kept,
            "tracker_prompt_tokens": now.prompt_tokens,
            "tracker_transfers": now.transfers,
            "tracker_spliced_tokens": now.spliced_tokens,
        }
    )
    found["kvtrie_tracker_dropped"] = _by(now.dropped, ("expired", "room", "replaced", "forgotten"))
    found["kvtrie_tracker_unknown"] = _by(now.unknown, ("expired", "unknown"))
    found["kvtrie_tracker_answers"] = _by(
        now.answers, ("exact_extension", "alias", "moved_runs", "common_prefix", "start_over")
    )
    found["kvtrie_tracker_splices"] = _by(now.splices, OUTCOMES)
    found["kvtrie_tracker_tokens"] = _by(
        {"exact": now.exact_tokens, "approximate": now.approximate_tokens}
    )
    return found


_STATES: Final = ("syncing", "live", "gapped", "stale")
# What a worker has now, and flags; the rest of what is counted of it only grows.
_OF_SUBSCRIPTION: Final = (
    *("batches", "refused", "gaps", "replays", "replayed", "missed", "dropped", "resyncs"),
    *("snapshots_asked", "snapshots", "snapshots_refused", "unanswered"),
)
_OF_BRIDGE: Final = (
    *("published", "repeats", "retries", "too_large"),
    *("snapshots_stored", "snapshots_not_stored", "snapshots_not_deleted"),
)
_OF_STREAM: Final = (
    *("batches", "repeats", "gaps", "refused", "resyncs"),
    *("snapshots", "snapshots_refused", "connections"),
)
_OF_NOW: Final = ("blocks", "entries", "parked", "refused", "slower_tiers")


def _of_indexer(
    indexer: KvIndexer, subscriptions: Mapping[str, Subscription], replica: Replica | None
) -> dict[str, Samples | _Histogram]:
    now = indexer.stats()
    found = _plain({f"cluster_{name}": now[name] for name in ("workers", "blocks", "entries")})
    found["kvtrie_cluster_bytes"] = {(): float(now["bytes"])}
    states: Samples = {}
    met: Samples = {}
    fed = dict(subscriptions)
    workers = {name: subscription.worker for name, subscription in fed.items()}
    for worker, subscription in fed.items():
        states |= _states(worker, subscription.state)
        may_be = _OF_SUBSCRIPTION + (_OF_BRIDGE if isinstance(subscription, Bridge) else ())
        counts = _by(subscription.counts.copy(), may_be)
        met |= {(worker, *what): n for what, n in counts.items()}
    if replica is not None:
        followed: Samples = {}
        for worker in replica.workers:
            followed |= _states(worker, replica.state(worker))
        found["kvtrie_cluster_replica_state"] = followed
        found["kvtrie_cluster_replica_events"] = _by(replica.counts.copy(), _OF_STREAM)
        workers |= replica.workers
    return found | {
        **_of_workers(indexer, workers),
        "kvtrie_cluster_subscription_state": states,
        "kvtrie_cluster_subscription_events": met,
    }


def _states(worker: str, state: str) -> Samples:
    return {(worker, one): float(one == state) for one in _STATES}


def _of_workers(indexer: KvIndexer, workers: Mapping[str, int]) -> dict[str, Samples | _Histogram]:
    blocks: Samples = {}
    events: Samples = {}
    for worker, number in workers.items():
        try:
            of_worker = indexer.worker_stats(number)
        except StaleHandleError:
            # The worker was removed; what feeds it is stale.
            continue
        blocks[worker,] = float(of_worker["blocks"])
        counts = {name: n for name, n in of_worker.items() if name not in _OF_NOW}
        counts |= {f"refused_{name}": n for name, n in of_worker["refused"].items()}
        events |= {(worker, name): float(n) for name, n in counts.items()}
    return {"kvtrie_cluster_worker_blocks": blocks, "kvtrie_cluster_worker_events": events}
