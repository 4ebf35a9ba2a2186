"""A router's metrics: an index of workers, what feeds it, and the proxy, next to what happened."""

from __future__ import annotations

import pytest
from tests.cluster.publisher import SIZE, Publisher, removed, stored
from tests.cluster.test_subscription import NS, Fed, until
from tests.metrics.scraped import scrape, total

import kvtrie
from kvtrie.metrics import Collector

EVENTS = "kvtrie_cluster_worker_events_total"
STATE = "kvtrie_cluster_subscription_state"


def test_an_index_and_its_subscription_are_what_happened() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        collector = Collector(
            indexer=fed.index,
            subscriptions={"decode-0": fed.subscription},
            labels={"replica": "a"},
        )
        assert total(scrape(collector), EVENTS) == 0
        fed.subscription.wait("live", 20.0)
        publisher.send(stored([1, 2, 3], None, range(6)))
        publisher.send(removed(3), lost=True)
        publisher.send(stored([5], 2, [8, 9]))
        until(lambda: fed.index.worker_stats(fed.worker)["batches"] == 3, fed.__repr__)
        series = scrape(collector)
        stats, counts = fed.index.worker_stats(fed.worker), fed.subscription.counts
        assert (stats["stored"], stats["removed"]) == (4, 1)
        for name in ("batches", "stored", "removed", "conflicts"):
            assert total(series, EVENTS, worker="decode-0", event=name) == stats[name]
        assert total(series, EVENTS, event="refused_unknown_type") == 0
        for name in ("batches", "gaps", "replayed"):
            met = total(series, "kvtrie_cluster_subscription_events_total", event=name)
            assert met == counts[name] > 0
        assert total(series, STATE, worker="decode-0", state="live") == 1
        assert total(series, STATE) == 1
        assert total(series, "kvtrie_cluster_worker_blocks", worker="decode-0") == stats["blocks"]
        index = fed.index.stats()
        for name in ("workers", "blocks", "entries", "bytes"):
            assert total(series, f"kvtrie_cluster_{name}", replica="a") == index[name] > 0


def test_a_worker_that_was_removed_does_not_end_the_scrape() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        workers = {"w": fed.subscription}
        collector = Collector(indexer=fed.index, subscriptions=workers)
        fed.subscription.wait("live", 20.0)
        fed.index.remove_worker(fed.worker)
        publisher.send(stored([1], None, [0, 1]))
        fed.subscription.wait("stale", 20.0)
        series = scrape(collector)
        assert total(series, STATE, worker="w", state="stale") == 1
        assert total(series, EVENTS) == total(series, "kvtrie_cluster_workers") == 0
        # The mapping is read at each scrape.
        workers.clear()
        assert total(scrape(collector), STATE) == 0


def test_sources_of_a_wrong_kind_are_named() -> None:
    index = kvtrie.KvIndexer(SIZE, b"the key of tests")
    index.add_worker("w", NS)
    with pytest.raises(TypeError, match="indexer must be a KvIndexer, not 5"):
        Collector(indexer=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="subscriptions must be a Mapping"):
        Collector(indexer=index, subscriptions=[])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="subscriptions need their indexer"):
        Collector(subscriptions={})
