"""The dashboard's queries, run by a real Prometheus over a live engine, index and tracker.

tests/vllm_scheduler does the same for the row of vLLM.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry
from tests.cluster.publisher import Publisher, stored
from tests.cluster.test_subscription import NS, Fed, until
from tests.metrics.prometheus import DASHBOARD, queries, scraping
from tools.dashboard import ROWS, dashboard

import kvtrie
from kvtrie.cluster import Replica, follow
from kvtrie.fleet import Dispatcher
from kvtrie.fleet.proxy import Proxy
from kvtrie.metrics import FAMILIES, Collector

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

    from kvtrie.engines.transformers import Generator

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]

OURS = {"Embedded engine, or your own", "Index", "Router", "Index of many workers"}


def test_the_file_is_what_the_tool_writes() -> None:
    assert json.loads(DASHBOARD.read_text(encoding="utf-8")) == dashboard()


def test_panels_have_ids_places_and_texts_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])


def test_every_metric_is_on_the_dashboard() -> None:
    text = " ".join(expr for _, expr in queries(OURS))
    named = set(re.findall(r"\bkvtrie_\w+", text))
    suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    exported = {family.name + suffix[family.kind] for family in FAMILIES}
    assert named <= exported
    # Phases are shown by their time.
    assert exported - named == {"kvtrie_phases_total", "kvtrie_plans_repaired_total"}


def test_every_query_returns_series(make: Make, ids: Ids, tmp_path: Path) -> None:
    generator = make(gate="unchecked", policy=kvtrie.ReusePolicy(scope="namespace"))
    tracker = kvtrie.TurnTracker()
    registry = CollectorRegistry()
    usages = []

    def turn(number: int) -> None:
        prompt = ids(50, seed=number % 3).tolist()[number % 2 :]
        done = generator.generate(prompt, max_new_tokens=3, ignore_eos=True)
        usages.append(done.usage)
        seq = kvtrie.TokenSequence([*prompt, *done.tokens], generator.namespace())
        tracker.compare(seq)
        tracker.keep(seq, num_computed=len(seq) - 1)

    with Publisher() as publisher, Fed(publisher) as fed, following(fed.index) as replica:
        proxy = Proxy("http://127.0.0.1:1", Dispatcher(fed.index), {})
        registry.register(
            Collector(
                generator=generator,
                tracker=tracker,
                indexer=fed.index,
                subscriptions={"w": fed.subscription},
                replica=replica,
                proxy=proxy,
            )
        )
        turn(0)
        publisher.send(stored([1], None, [0, 1]))
        until(lambda: fed.subscription.counts["batches"] == 1, fed.__repr__)
        ask(registry, tmp_path, turn, usages)


def following(index: kvtrie.KvIndexer) -> Replica:
    """A replica whose stream nobody has."""
    worker = index.add_worker("followed", NS)
    return follow(index, {"followed": worker}, servers="nats://127.0.0.1:1", timeout=0)


def ask(
    registry: CollectorRegistry, folder: Path, turn: Callable[[int], None], usages: list[Any]
) -> None:
    with scraping(registry, folder) as server:
        server.wait()
        for number in range(1, 9):
            turn(number)
        server.wait()
        assert server.unanswered(queries(OURS)) == []
        # What Prometheus has is what happened.
        for how, value in (
            ("exact", sum(usage.exact for usage in usages)),
            ("moved", sum(usage.moved for usage in usages)),
            ("recomputed", sum(usage.computed for usage in usages)),
        ):
            expr = f'sum(kvtrie_prompt_tokens_total{{reuse="{how}"}})'
            assert server.query(expr) == [({}, value)]
            assert value > 0
        ((_, growth),) = server.query("sum(rate(kvtrie_generation_tokens_total[5m]))")
        assert growth > 0
        with pytest.raises(AssertionError, match="parse error"):
            server.query("sum(")


def test_rows_are_known() -> None:
    assert {title for title, _ in ROWS} == OURS | {"vLLM"}
