"""What vLLM reports of each request, next to what the scheduler's output shows."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.prompts import ANSWER, EDITED, HISTORY, PARTS, QUESTION, REASONING, gapped, words
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import BLOCK
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PromptTokenStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

UNCHECKED = {"gate": "unchecked", "policy": {"scope": "namespace"}}
in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
# No request is preempted.
ROOMY: dict[str, Any] = SMALL | {"blocks": 600}
# Some are, with each scheduler.
TIGHT: dict[str, Any] = SMALL | {"blocks": 66}


def reported(vllm: Core) -> PromptTokenStats:
    """What vLLM exports as `vllm:prompt_tokens_by_source`."""
    stats = PromptTokenStats()
    for answer in vllm.answers.values():
        if answer.prefill is not None:
            stats.update_from_output(answer.prefill)
    return stats


@in_flight
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "gap-by-gap"])
def test_what_is_reused_after_gaps_counts_as_cached(
    core: Callable[..., Core], in_flight: bool, rows: bool
) -> None:
    # Only the prefix before the first gap did: a quarter of what was copied. What rows compute is
    # promised to vLLM like the rest, which counts it as cached.
    vllm = core(connector=UNCHECKED, gaps=True, in_flight=in_flight, log_stats=True)
    vllm.ask(HISTORY)
    before, rows_before = vllm.worker.num_moved, vllm.shadow.num_rows
    with nullcontext() if rows else vllm.gap_by_gap():
        name = vllm.add(gapped(PARTS))
        vllm.drain()
    assert bool(vllm.shadow.num_rows > rows_before) == rows
    moved = vllm.worker.num_moved - before
    prefill = vllm.answers[name].prefill
    assert prefill is not None
    # The last token is computed.
    assert prefill.num_external_cached_tokens == moved == len(HISTORY) - 1
    assert prefill.num_cached_tokens == moved
    assert prefill.num_computed_tokens == len(gapped(PARTS)) - moved
    assert vllm.hits.hits == moved
    assert vllm.hits.hits_by_source == {CacheHitSource.EXTERNAL_UNSPECIFIED: moved}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        pytest.param(ROOMY, 1000, marks=pytest.mark.long, id="roomy"),
        pytest.param(TIGHT, 1000, id="small-pool"),
    ],
)
@pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
@in_flight
def test_every_report_agrees_to_the_token(
    core: Callable[..., Core], options: dict[str, Any], count: int, gaps: bool, in_flight: bool
) -> None:
    vllm = core(connector=UNCHECKED, gaps=gaps, in_flight=in_flight, log_stats=True, **options)
    run = Run(vllm, seed=81 + 2 * gaps + in_flight)
    # Of an aborted request, or a forgotten cache, some of these say nothing.
    run.disturbs = False
    run.go(count)
    is_roomy = options is ROOMY
    assert bool(vllm.shadow.num_rows) == gaps
    assert bool(vllm.num_preempted) != is_roomy
    prefills = {name: answer.prefill for name, answer in vllm.answers.items()}
    assert {name: one.num_cached_tokens for name, one in prefills.items() if one} == dict(
        vllm.shadow.reused
    )
    counts, totals = vllm.counts, reported(vllm)
    by_source = {how: counts[f"prompt_tokens/{how}/other"] for how in ("exact", "moved")}
    assert totals.cached_tokens == sum(by_source.values()) > 0
    assert totals.computed == counts["prompt_tokens/recomputed/other"]
    if is_roomy:
        copied = counts["tokens_exact"] + counts["tokens_moved"]
        assert totals.external_kv_transfer == vllm.hits.hits == copied > 0


@in_flight
def test_a_copy_that_fails_counts_as_computed(core: Callable[..., Core], in_flight: bool) -> None:
    # vLLM counts what the admission found, and no failure after it.
    vllm = core(connector=UNCHECKED, gaps=True, in_flight=in_flight, shadow=False, log_stats=True)
    vllm.ask(QUESTION + REASONING + ANSWER)
    vllm.worker.fails = lambda _: True
    name = vllm.add(EDITED)
    vllm.drain(limit=100)
    prefill = vllm.answers[name].prefill
    assert prefill is not None
    assert prefill.num_cached_tokens == prefill.num_local_cached_tokens
    assert prefill.num_cached_tokens == len(QUESTION) // BLOCK * BLOCK


def test_requests_without_room_are_counted_once(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM asks in every step until there is room: 150 were counted for fewer than 30 requests.
    vllm = core(connector=UNCHECKED, blocks=40, max_model_len=608, max_num_seqs=4)
    requests = vllm.connector.planner.half.requests
    refused, without = requests.refused, set()

    def watched(request: Any, live: Any, **given: Any) -> None:
        refused(request, live, **given)
        if live.num_refused >= 2:
            without.add(request.request_id)

    monkeypatch.setattr(requests, "refused", watched)
    for number in range(6):
        vllm.ask(QUESTION + REASONING + ANSWER)
        names = [vllm.add(EDITED + words(60, 20 + number), max_tokens=4) for _ in range(4)]
        vllm.drain()
        assert all(vllm.answers[name].finished for name in names)
    assert len(vllm.answers) == 30
    assert 0 < vllm.counts["requests_without_room"] == len(without)


@in_flight
@pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
def test_a_request_that_waits_for_others_keeps_its_reuse(
    core: Callable[..., Core], gaps: bool, in_flight: bool
) -> None:
    # After two steps without a block taken or freed, it was admitted without copies, at last.
    vllm = core(connector=UNCHECKED, gaps=gaps, in_flight=in_flight, blocks=60, max_model_len=608)
    vllm.ask(QUESTION + REASONING + ANSWER, max_tokens=1)
    running = vllm.add(words(22 * BLOCK, 50), max_tokens=100)
    vllm.step()
    name = vllm.add(EDITED + words(600 - len(EDITED) - 16, 51), max_tokens=4)
    for _ in range(60):
        vllm.step()
    assert not vllm.answers[running].finished
    assert not vllm.answers[name].tokens
    vllm.drain()
    assert vllm.counts["requests_without_room"] == 0
    assert vllm.counts["tokens_moved"] > 0


@pytest.mark.parametrize(
    ("connector", "gaps"),
    [
        pytest.param(UNCHECKED, False, id="moving"),
        pytest.param(UNCHECKED, True, id="gaps"),
        pytest.param({"mode": "exact"}, False, id="exact"),
    ],
)
@pytest.mark.parametrize("finds", [True, False], ids=["reuse", "none"])
def test_a_request_that_waits_is_planned_when_something_has_changed(
    core: Callable[..., Core],
    monkeypatch: pytest.MonkeyPatch,
    connector: dict[str, Any],
    gaps: bool,
    finds: bool,
) -> None:
    # It was planned in each step, a thousand times if it waited so long.
    vllm = core(connector=connector, gaps=gaps, blocks=64, max_model_len=608)
    vllm.ask(QUESTION + REASONING + ANSWER, max_tokens=1)
    running = vllm.add(words(26 * BLOCK, 50), max_tokens=92)
    for _ in range(3):
        vllm.step()
    sources = vllm.connector.planner.half.sources
    asked, planned = [], []
    match, plan = vllm.connector.planner.match, sources.plan
    find_nothing = vllm.connector.planner.half.reasons.find_nothing

    def matching(request: Any, num_local: int) -> int | None:
        asked.append(request)
        found: int | None = match(request, num_local)
        return found

    def planning(*given: Any) -> Any:
        planned.append(given)
        return plan(*given)

    def finding(*given: Any) -> Any:
        planned.append(given)
        return find_nothing(*given)

    monkeypatch.setattr(vllm.connector.planner, "match", matching)
    monkeypatch.setattr(sources, "plan", planning)
    monkeypatch.setattr(vllm.connector.planner.half.reasons, "find_nothing", finding)
    cached = QUESTION + REASONING + ANSWER
    cached = cached[: len(cached) // BLOCK * BLOCK - 4]
    start = {True: cached, False: words(len(EDITED), 60)}[finds]
    if connector is UNCHECKED and finds:
        start = EDITED
    name = vllm.add(start + words(584 - len(start), 51), max_tokens=4)
    for _ in range(80):
        vllm.step()
    assert not vllm.answers[running].finished
    assert not vllm.answers[name].tokens
    assert len(asked) == 80
    # Questions whether there is anything to plan are among them.
    before = len(planned)
    assert before <= 2
    # What is indexed meanwhile may bring more.
    sources.num_changes += 1
    vllm.step()
    assert before < len(planned) <= 2 * before
    vllm.drain()
    assert not vllm.counts["errors"]
    assert vllm.counts["requests_without_room"] == 0
    if finds:
        assert vllm.counts["tokens_moved"] + vllm.counts["tokens_exact"] > 0


def waiting(vllm: Core) -> tuple[str, int]:
    """A request without room next to a running one; how many of its tokens are cached."""
    cached = QUESTION + REASONING + ANSWER
    vllm.ask(cached, max_tokens=1)
    vllm.add(words(22 * BLOCK, 50), max_tokens=100)
    for _ in range(3):
        vllm.step()
    start = cached[: len(cached) // BLOCK * BLOCK - 4]
    name = vllm.add(start + words(584 - len(start), 51), max_tokens=4)
    return name, len(start)


def test_a_plan_that_is_not_kept_is_released(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where a request that waits is planned in each step, each plan was left to be collected.
    vllm = core(connector=UNCHECKED | {"shadow": True}, blocks=60, max_model_len=608)
    name, _ = waiting(vllm)
    planner, promised = vllm.connector.planner, []
    match = planner.match

    def matching(request: Any, num_local: int) -> int | None:
        found: int | None = match(request, num_local)
        promised.append(found)
        return found

    monkeypatch.setattr(planner, "match", matching)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(10):
            vllm.step()
    assert not vllm.answers[name].tokens
    assert len(promised) == 10
    assert all(promised)
    assert [str(one.message) for one in warned if one.category is ResourceWarning] == []
    vllm.drain()


def test_a_request_that_waits_leaves_the_prefix_its_order(core: Callable[..., Core]) -> None:
    # Its sources were freed with the first block first, which vLLM then evicted before the others.
    vllm = core(connector={"mode": "exact"}, blocks=60, max_model_len=608)
    name, num_cached = waiting(vllm)
    vllm.drain()
    prefill = vllm.answers[name].prefill
    assert prefill is not None
    # What the other request needed more than there was.
    assert prefill.num_local_cached_tokens >= num_cached // BLOCK * BLOCK - BLOCK
