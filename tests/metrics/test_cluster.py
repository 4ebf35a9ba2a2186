"""A router's metrics: an index of workers, what feeds it, and the proxy, next to what happened."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.cluster.nats_server import SECONDS, NatsServer, needs_nats
from tests.cluster.publisher import SIZE, Publisher, removed, stored
from tests.cluster.test_replicas import Bridged, Followed
from tests.cluster.test_subscription import NS, Fed, block, until
from tests.metrics.scraped import Series, scrape, total

import kvtrie
from kvtrie.cluster import Bridge, Replica, Subscription, follow
from kvtrie.metrics import Collector

if TYPE_CHECKING:
    from pathlib import Path

EVENTS = "kvtrie_cluster_worker_events_total"
STATE = "kvtrie_cluster_subscription_state"
MET = "kvtrie_cluster_subscription_events_total"


def described(kind: type) -> set[str]:
    """What a class says that its `counts` have."""
    text = str(kind.__doc__).partition("counts")[2].partition("    error:")[0]
    return set(re.findall(r"`([a-z_]+)`", text.partition("Attributes:")[0]))


def events(series: Series, name: str) -> set[str]:
    return {dict(labels)["event"] for found, labels in series if found == name}


def test_an_index_and_its_subscription_are_what_happened() -> None:
    with Publisher() as publisher, Fed(publisher) as fed:
        collector = Collector(
            indexer=fed.index,
            subscriptions={"decode-0": fed.subscription},
            labels={"replica": "a"},
        )
        assert total(scrape(collector), EVENTS) == 0
        fed.subscription.wait("live", 20.0)
        # The names of what may happen are there before it does, so rates begin at 0.
        assert events(scrape(collector), MET) == described(Subscription) >= {"gaps", "missed"}
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
            met = total(series, MET, event=name)
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


@needs_nats
def test_a_replica_and_its_bridge_are_what_happened(tmp_path: Path) -> None:
    state, met = "kvtrie_cluster_replica_state", "kvtrie_cluster_replica_events_total"
    with (
        NatsServer(tmp_path) as nats,
        Publisher() as publisher,
        Bridged(publisher, nats) as bridged,
        Followed(nats) as followed,
    ):
        collector = Collector(indexer=followed.index, replica=followed.replica)
        of_bridge = Collector(indexer=bridged.index, subscriptions={"w": bridged.bridge})
        # The names of what may happen are there from the start, so rates begin at 0.
        assert total(scrape(collector), met, event="gaps") == 0
        assert events(scrape(collector), met) == described(Replica) >= {"gaps", "snapshots"}
        may_be = described(Subscription) | described(Bridge)
        assert events(scrape(of_bridge), MET) == may_be >= {"too_large", "snapshots_not_deleted"}
        for number in range(3):
            publisher.send(block(number))
        publisher.send(removed(2))
        until(lambda: followed.counts.get("batches") == 4, followed.__repr__)
        followed.becomes(4)
        assert followed.replica.wait("w", "live", SECONDS)
        assert followed.replica.workers == {"w": followed.worker}
        series, stats = scrape(collector), followed.index.worker_stats(followed.worker)
        assert (stats["stored"], stats["removed"]) == (3, 1)
        for name in ("batches", "stored", "removed"):
            assert total(series, EVENTS, worker="w", event=name) == stats[name]
        assert total(series, "kvtrie_cluster_worker_blocks", worker="w") == stats["blocks"]
        assert total(series, met, event="batches") == followed.counts["batches"] == 4
        assert total(series, met, event="connections") == 1
        assert total(series, state, worker="w", state="live") == total(series, state) == 1
        published = bridged.bridge.counts["published"]
        assert total(scrape(of_bridge), MET, worker="w", event="published") == published > 0
        nats.kill()
        assert followed.replica.wait("w", "stale", SECONDS)
        series = scrape(collector)
        assert total(series, state, worker="w", state="stale") == total(series, state) == 1


def test_sources_of_a_wrong_kind_are_named() -> None:
    index = kvtrie.KvIndexer(SIZE, b"the key of tests")
    index.add_worker("w", NS)
    with pytest.raises(TypeError, match="indexer must be a KvIndexer, not 5"):
        Collector(indexer=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="subscriptions must be a Mapping"):
        Collector(indexer=index, subscriptions=[])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="subscriptions need their indexer"):
        Collector(subscriptions={})
    with pytest.raises(TypeError, match="replica must be a Replica, not 5"):
        Collector(indexer=index, replica=5)  # type: ignore[arg-type]
    workers = {"w": index.add_worker("followed", NS)}
    with (
        follow(index, workers, servers="nats://127.0.0.1:1", timeout=0) as replica,
        pytest.raises(ValueError, match="a replica needs its indexer"),
    ):
        Collector(replica=replica)
