"""What a collector takes and exports; scrapes from threads; names as in vLLM's connector."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from tests.metrics.scraped import counters, scrape, total

import kvtrie
from kvtrie.metrics import FAMILIES, REASONS, Collector, Prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from kvtrie.engines.transformers import Generator

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]

ROOT = Path(__file__).resolve().parents[2]
TENANT = "tenant-of-a-customer"
NS = kvtrie.Namespace(model="m", salt=TENANT)


def index_in_use(num_blocks: int = 16) -> kvtrie.RadixIndex:
    index = kvtrie.RadixIndex(num_blocks, 2)
    seq = kvtrie.TokenSequence(range(1, 9), NS)
    index.insert(seq, [0, 1, 2, 3], num_computed=8, source=kvtrie.COMPUTED, session="chat-of-ann")
    return index


def test_figures_of_an_index_are_those_of_stats() -> None:
    index = index_in_use()
    seq = kvtrie.TokenSequence(range(1, 9), NS)
    index.mark_dead(seq, [(6, 8)])
    index.insert(
        kvtrie.TokenSequence(range(50, 58), NS),
        [4, 5, 6, 7],
        num_computed=8,
        source=kvtrie.Imported(exact_until=2),
    )
    plan = index.plan(kvtrie.TokenSequence([1, 2, 3, 4, 9], NS))
    index.remove_spans(seq, [(2, 4)], force=True)
    index.discard([1, 15])
    index.quarantine([7])
    series = scrape(Collector(index=index))
    stats = index.stats()
    shown: dict[str, float] = {
        "pool_blocks": 16,
        "index_evictable_blocks": index.num_evictable,
        "index_pinned_blocks": stats.pinned,
        "index_condemned_blocks": stats.condemned,
        "index_waiting_blocks": stats.waiting,
        "index_quarantined_blocks": len(index.quarantined),
        "index_dead_blocks": stats.dead,
        "index_holes": stats.holes,
        "index_namespaces": len(index.namespaces()),
        "index_nodes": stats.nodes,
        "index_windows": stats.windows,
        "index_bytes": stats.bytes,
        "index_live_plans": 1,
        "index_visited_nodes_total": stats.nodes_visited,
        "index_compared_bytes_total": stats.bytes_compared,
        "index_search_looks_total": stats.search_looks,
        "index_plans_without_scope_total": stats.plans_without_scope,
        "index_unknown_discards_total": stats.unknown_discards,
    }
    assert {name: total(series, f"kvtrie_{name}") for name in shown} == shown
    zero = {name for name, value in shown.items() if not value}
    assert zero <= {"index_search_looks_total", "index_plans_without_scope_total"} | {
        "index_waiting_blocks",
        "index_windows",
    }
    blocks = "kvtrie_index_blocks"
    approximate = total(series, blocks, **{"class": "approximate"})
    assert approximate == index.num_approximate > 0
    assert total(series, blocks, **{"class": "exact"}) == stats.indexed - approximate
    plan.release()


def test_names_say_what_they_are() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.startswith("kvtrie_")
        assert not family.name.endswith("_total")
    registry = CollectorRegistry()
    registry.register(
        Collector(index=index_in_use(), tracker=kvtrie.TurnTracker(), labels={"replica": "a"})
    )
    for line in generate_latest(registry).decode().splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert name.endswith("_total") == (kind == "counter")


def test_names_are_those_of_the_connector_where_the_meaning_is() -> None:
    folder = ROOT / "python" / "kvtrie" / "integrations" / "vllm"

    def constant(module: str, name: str) -> dict[str, Any]:
        tree = ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))
        names = {
            one.target.id: one.value
            for one in ast.walk(tree)
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        found = names[name]
        assert isinstance(found, ast.Dict)
        keys = [names[key.id] if isinstance(key, ast.Name) else key for key in found.keys]
        return {
            ast.literal_eval(key): ast.literal_eval(value)
            for key, value in zip(keys, found.values, strict=True)
            if key is not None
        }

    theirs = {name: (text, ()) for name, text in constant("_stats", "NAMES").items()}
    theirs |= constant("_stats", "LABELLED")
    ours = {one.name.removeprefix("kvtrie_"): one for one in FAMILIES}
    shared = set(ours) & set(theirs)
    assert shared == {
        "prompt_tokens",
        "computed_tokens",
        "tokens_exact",
        "tokens_moved",
        "plans_not_cleared",
    }
    for name in shared:
        text, labels = theirs[name]
        assert ours[name].labels == labels
        assert ours[name].text.replace(" (exact, moved, recomputed)", "") == text
    reasons = constant("_reasons", "REASONS")
    assert set(REASONS) - set(reasons) == {"other_namespace", "approximate_only"}
    for name in set(REASONS) & set(reasons):
        their = reasons[name].replace("cache_salt", "salt").replace(", or shadow mode is on", "")
        assert REASONS[name] == their


def test_the_page_lists_every_metric_and_reason() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    sections = dict(
        zip(
            ("index", "prompts", "generator", "tracker", "indexer", "proxy"),
            re.findall(r"^\| name \| type \| says \|\n(?:\|.*\n)+", text, re.MULTILINE),
            strict=True,
        )
    )
    for source, table in sections.items():
        shown = [
            (name, tuple(re.findall(r"`(\w+)`", labels)), kind, says)
            for name, labels, kind, says in re.findall(
                r"^\| `(\w+)`(?: \(by (.*?)\))? \| (counter|gauge|histogram) \| (.*) \|$",
                table,
                re.MULTILINE,
            )
        ]
        assert shown == [
            (
                one.name + ("_total" if one.kind == "counter" else ""),
                one.labels,
                one.kind,
                one.text,
            )
            for one in FAMILIES
            if one.source == source
        ]
    reasons = text.partition("## Why tokens are computed")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", reasons, re.MULTILINE)) == REASONS
    queries = text.partition("## The queries to look at")[2].partition("\n## ")[0]
    names = {one.name + ("_total" if one.kind == "counter" else "") for one in FAMILIES}
    assert set(re.findall(r"\bkvtrie_\w+", queries)) <= names


def test_a_generator_and_a_tracker_export_every_family_of_theirs(make: Make) -> None:
    registry = CollectorRegistry()
    registry.register(Collector(generator=make(), tracker=kvtrie.TurnTracker()))
    found = {metric.name: (metric.type, metric.documentation) for metric in registry.collect()}
    engine = [one for one in FAMILIES if one.source not in {"indexer", "proxy"}]
    assert found == {one.name: (one.kind, one.text) for one in engine}


def test_no_label_has_a_tenant_a_session_or_a_token(make: Make, ids: Ids) -> None:
    generator = make(gate="unchecked", policy=kvtrie.ReusePolicy())
    tracker = kvtrie.TurnTracker()
    collector = Collector(generator=generator, tracker=tracker)
    sizes = []
    for number in range(40):
        prompt = ids(20, seed=number)
        name = f"{TENANT}-{number}"
        generator.generate(prompt, salt=name, session=name, max_new_tokens=1)
        space = generator.namespace(name)
        tracker.keep(
            kvtrie.TokenSequence(prompt, space),
            num_computed=19,
            conversation=name,
            payload=name,
        )
        sizes.append(len(scrape(collector)))
    registry = CollectorRegistry()
    registry.register(collector)
    assert TENANT not in generate_latest(registry).decode()
    # No series more for a tenant more.
    assert len(set(sizes[1:])) == 1


def test_several_sources_are_apart_by_their_labels() -> None:
    collector = Collector(index=index_in_use(16), labels={"replica": "a"})
    collector.add(index=index_in_use(32), labels={"replica": "b"})
    series = scrape(collector)
    assert total(series, "kvtrie_pool_blocks", replica="a") == 16
    assert total(series, "kvtrie_pool_blocks", replica="b") == 32


def test_the_default_registry_takes_one() -> None:
    collector = Collector(index=index_in_use())
    REGISTRY.register(collector)
    try:
        assert REGISTRY.get_sample_value("kvtrie_pool_blocks") == 16
        with pytest.raises(ValueError, match="Duplicated"):
            REGISTRY.register(Collector(index=index_in_use()))
    finally:
        REGISTRY.unregister(collector)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"index": 3}, TypeError, "index must be a RadixIndex, not 3"),
        ({"tracker": "t"}, TypeError, "tracker must be a TurnTracker, not 't'"),
        ({"prompts": []}, TypeError, "prompts must be a Prompts"),
        ({"labels": [("a", "b")]}, TypeError, "labels must be a Mapping"),
        ({"labels": {"a": 1}}, TypeError, "a label is two strings, not 'a': 1"),
        ({"labels": {"a-b": "c"}}, ValueError, "no label may be called 'a-b'"),
        ({"labels": {"__a": "c"}}, ValueError, "no label may be called '__a'"),
        ({"labels": {"reason": "c"}}, ValueError, "no label may be called 'reason'"),
        ({"labels": {"le": "c"}}, ValueError, "no label may be called 'le'"),
    ],
)
def test_bad_arguments_are_named(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Collector(**given)
    collector = Collector(index=index_in_use())
    before = scrape(collector)
    with pytest.raises(error, match=message):
        collector.add(**given)
    assert scrape(collector).keys() == before.keys()


def test_sources_that_would_be_one_series_are_refused(make: Make) -> None:
    generator = make()
    with pytest.raises(ValueError, match="give it without them"):
        Collector(generator=generator, index=generator.index)
    collector = Collector(index=index_in_use(), labels={"replica": "a"})
    with pytest.raises(ValueError, match="those of another source"):
        collector.add(index=index_in_use(), labels={"replica": "a"})
    with pytest.raises(ValueError, match=r"labels are \[\], those before \['replica'\]"):
        collector.add(generator=generator)
    # The refused generator has no watcher.
    assert generator._watchers == []


def test_scrapes_from_other_threads_are_safe_and_whole(make: Make, ids: Ids) -> None:
    generator = make(num_blocks=34, gate="unchecked", policy=kvtrie.ReusePolicy(scope="namespace"))
    tracker = kvtrie.TurnTracker(max_tokens=400)
    collector = Collector(generator=generator, tracker=tracker)
    failures: list[BaseException] = []
    scrapes = [0]
    done = threading.Event()

    def scraper() -> None:
        try:
            before = scrape(collector)
            while not done.is_set():
                now = scrape(collector)
                assert all(now[key] >= value for key, value in counters(before).items())
                # Of one moment: these are counted together.
                computed = total(now, "kvtrie_prompt_tokens_total", reuse="recomputed")
                assert total(now, "kvtrie_computed_tokens_total") == computed
                kept = total(now, "kvtrie_tracker_kept_total")
                dropped = total(now, "kvtrie_tracker_dropped_total")
                assert kept - dropped == total(now, "kvtrie_tracker_histories")
                before = now
                scrapes[0] += 1
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=scraper) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        rng = Random(0)
        for number in range(30):
            prompt = ids(50, seed=number % 4)[rng.randrange(20) :]
            generator.submit(prompt, max_new_tokens=4, ignore_eos=True)
            generator.step()
            tracker.keep(kvtrie.TokenSequence(prompt, NS), num_computed=len(prompt))
            tracker.compare(kvtrie.TokenSequence(prompt, NS))
        while generator.num_running or generator.num_waiting:
            generator.step()
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert failures == []
    assert scrapes[0] > 10
    assert total(scrape(collector), "kvtrie_requests_total", finish_reason="length") == 30


def test_prompts_are_counted_from_many_threads() -> None:
    index = index_in_use()
    prompts = Prompts(index)

    def work() -> None:
        for _ in range(300):
            seq = kvtrie.TokenSequence([1, 2, 3, 4, 77, 78], NS)
            with index.plan(seq) as plan:
                prompts.count(seq, plan)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prompts.totals().prompt == {("exact", "other"): 4_800, ("recomputed", "other"): 2_400}


@pytest.mark.parametrize(
    ("hidden", "code", "message"),
    [
        (
            "prometheus_client",
            "from kvtrie.metrics import Collector",
            "kvtrie.metrics.Collector needs prometheus_client: pip install 'kvtrie[metrics]'",
        ),
        (
            "opentelemetry",
            "import kvtrie.metrics.tracing",
            "kvtrie.metrics.tracing needs opentelemetry-api: pip install 'kvtrie[tracing]'",
        ),
        ("torch", "from kvtrie.metrics import Collector, tracing", None),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(
    hidden: str, code: str, message: str | None
) -> None:
    program = f"""
import sys
sys.modules[{hidden!r}] = None
import kvtrie.metrics
try:
    {code}
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ("" if message is None else f"{message}\n")
