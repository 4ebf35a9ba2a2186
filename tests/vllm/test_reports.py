"""What a real engine reports of mixed requests, in usage, metrics and stats, and its slots."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import prometheus_client
import pytest
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import HISTORY, PARTS, gapped, words
from tests.vllm.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import Engine

NUM_REQUESTS = 1000


def exported() -> Counter[tuple[str, str]]:
    """vLLM's counters by name and the label that tells them apart, summed over the others."""
    found: Counter[tuple[str, str]] = Counter()
    for metric in prometheus_client.REGISTRY.collect():
        for one in metric.samples:
            if one.name.startswith("vllm:") and not one.name.endswith(("_bucket", "_created")):
                labels = (one.labels.get(name) for name in ("source", "reuse", "reason"))
                found[one.name, next(filter(None, labels), "")] += int(one.value)
    return found


@pytest.mark.long
def test_every_report_of_an_engine_agrees_to_the_token(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE, gaps=True, disable_log_stats=False, blocks=600)
    before = exported()
    traffic = Traffic(17, longest=900)
    names, computed = [], vllm.num_computed
    # Gaps, then an exact copy of a part of a block, then moved runs and plain requests.
    for prompt in (HISTORY, gapped(PARTS), HISTORY[: 4 * BLOCK + 20] + words(30, 3)):
        names.append(vllm.add(prompt))
        vllm.drain()
    while len(names) < NUM_REQUESTS:
        ask = traffic.next()
        name = vllm.add(ask.prompt, max_tokens=ask.max_tokens, mode=ask.mode, salt=ask.salt)
        names.append(name)
        if traffic.random.random() < 0.5:
            vllm.drain()
            traffic.said(ask, vllm.answers[name].tokens)
    vllm.drain()
    grown, counts = exported(), vllm.counts
    grown.subtract(before)
    usage = {name: vllm.answers[name].num_cached for name in names}
    slots = {}
    for full, count in vllm.shadow.reused.items():
        # vLLM lengthens the names of requests.
        slots["-".join(full.split("-")[:2])] = count
    assert usage == slots
    copied = counts["tokens_exact"] + counts["tokens_moved"]
    assert counts["tokens_exact"] > 0
    assert counts["tokens_moved"] > len(HISTORY) // 2
    by_source = "vllm:prompt_tokens_by_source_total"
    local = grown[by_source, "local_cache_hit"]
    assert grown[by_source, "external_kv_transfer"] == copied
    assert local + copied == sum(usage.values())
    assert grown["vllm:external_prefix_cache_hits_total", ""] == copied
    ours = "vllm:kvtrie_prompt_tokens_total"
    assert grown[ours, "exact"] + grown[ours, "moved"] == sum(usage.values())
    assert grown["vllm:kvtrie_tokens_moved_total", ""] == counts["tokens_moved"]
    assert grown["vllm:kvtrie_tokens_exact_total", ""] == counts["tokens_exact"]
    left = grown[by_source, "local_compute"]
    assert left == grown[ours, "recomputed"]
    assert left == grown["vllm:request_prefill_kv_computed_tokens_sum", ""]
    reasons = {one: n for one, n in grown.items() if one[0] == "vllm:kvtrie_computed_tokens_total"}
    assert sum(reasons.values()) == left
    # What the engine computed in all, less what it generated; the last token of a reply is not.
    generated = sum(len(vllm.answers[name].tokens) - 1 for name in names)
    assert vllm.num_computed - computed == left + generated
