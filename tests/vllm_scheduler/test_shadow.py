"""Shadow mode counts what moving would reuse, and its engine is one with exact reuse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.prompts import EDITED, HISTORY, PARTS, gapped, words
from tests.vllm_scheduler.test_reasons import TURN, reasons
from tests.vllm_scheduler.test_traffic import NUM_REQUESTS, SMALL, Run
from tests.vllm_scheduler.worker import continuation

from kvtrie.integrations.vllm import _gate, _lineage, _shadow
from kvtrie.record import Log, Would

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm_scheduler.core import Core

SEEDED = {"seed": 7}
SHADOW: dict[str, Any] = {"shadow": True, "policy": {"scope": "namespace"}, **SEEDED}
SHIFTED = words(5, 30) + TURN[:300] + words(90, 31) + TURN[340:] + words(33, 32)
# Exact KV at both ends of what moves, and a hole of the user's own text.
PAIRS = {
    "an edit without new tokens": (TURN, EDITED),
    "gaps": (HISTORY, gapped(PARTS)),
    "everything moved by five": (TURN, SHIFTED),
    "nothing in common": (TURN, words(300, 33)),
    "the same again": (TURN, TURN),
}
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"recompute_first": 4},
    {"max_cuts": 0},
    {"min_run": 100},
    {"recompute_share": 0.3},
)


def counted(core: Core) -> Would:
    counts = core.counts
    return Would(
        exact=counts["tokens_would_be_exact"],
        moved=counts["tokens_would_move"],
        after_gaps=counts["tokens_would_follow_gaps"],
        computed=counts["tokens_would_compute"],
        cleared=not counts["plans_would_not_clear"],
    )


def served(core: Core, pair: tuple[list[int], list[int]]) -> dict[str, int]:
    """Prompt tokens of the second one, by where their KV came from."""
    core.ask(pair[0])
    core.counts.clear()
    core.ask(pair[1])
    assert core.counts["errors"] == 0
    found: dict[str, int] = {}
    for name, count in core.counts.items():
        what, *labels = name.split("/")
        if what == "prompt_tokens":
            found[labels[0]] = found.get(labels[0], 0) + count
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("gaps", [True, False], ids=["gaps", "scheduler-of-vllm"])
def test_the_counts_are_those_of_an_engine_that_moves(
    core: Callable[..., Core], policy: dict[str, Any], gaps: bool
) -> None:
    policy = {"scope": "namespace", **policy}
    moved = {}
    for name, pair in PAIRS.items():
        # Nothing of the pair before is left.
        vllm = core(connector={"gate": "unchecked", "policy": policy, **SEEDED}, gaps=gaps)
        moved[name] = served(vllm, pair)
    num_moved = 0
    for name, pair in PAIRS.items():
        vllm = core(connector={"shadow": True, "policy": policy, **SEEDED}, gaps=gaps)
        exact = served(vllm, pair)
        would = counted(vllm)
        num_moved += would.moved
        assert "moved" not in exact
        assert would.exact + would.moved + would.computed == len(pair[1])
        if gaps:
            assert would == Would(
                exact=moved[name].get("exact", 0),
                moved=moved[name].get("moved", 0),
                after_gaps=would.after_gaps,
                computed=moved[name]["recomputed"],
                cleared=True,
            ), name
        else:
            assert would.computed + would.after_gaps == moved[name]["recomputed"], name
    assert num_moved > 0 or "min_run" in policy or "max_cuts" in policy


def test_shadow_mode_moves_nothing(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a part of moving runs in shadow mode")

    for name in ("start", "join"):
        monkeypatch.setattr(_lineage, name, never)
    vllm = core(connector=SHADOW, gaps=True)
    assert vllm.ask(TURN) == continuation(TURN, 8)
    vllm.counts.clear()
    assert vllm.ask(EDITED, mode="approximate") == continuation(EDITED, 8)
    assert counted(vllm) == Would(exact=200, moved=150, after_gaps=0, computed=40, cleared=True)
    assert vllm.worker.num_moved == vllm.counts["tokens_moved"] == vllm.counts["errors"] == 0
    assert vllm.connector.planner.half.sources.index.num_approximate == 0
    # What shadow mode found has a reason of its own.
    assert reasons(vllm.counts) == {"exact_asked": 150, "new": 40}


@pytest.mark.parametrize("gaps", [True, False], ids=["gaps", "scheduler-of-vllm"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_the_engine_does_what_it_does_with_exact_reuse(
    core: Callable[..., Core], gaps: bool, in_flight: bool
) -> None:
    seen = []
    for connector in ({"gate": None, **SEEDED}, SHADOW):
        vllm = core(connector=connector, gaps=gaps, in_flight=in_flight, **SMALL)
        worker = vllm.worker
        before = (worker.num_computed, worker.num_copied, vllm.num_preempted)
        run = Run(vllm, seed=29 + in_flight)
        run.resets = False
        run.go(min(NUM_REQUESTS, 150))
        now = (worker.num_computed, worker.num_copied, vllm.num_preempted)
        free = [block.block_id for block in vllm.pool.free_block_queue.get_all_free_blocks()]
        answers = [vllm.answers[name].tokens for name in run.asked]
        did = [after - first for first, after in zip(before, now, strict=True)]
        seen.append((answers, did, run.num_steps, run.num_checked, len(free)))
        assert vllm.counts["errors"] == vllm.worker.num_moved == 0
    assert seen[0] == seen[1]
    # Tokens of requests whose prompts were computed; those of aborted ones may not be.
    would = counted(vllm)
    assert would.moved > 0
    totals = {name: count for name, count in vllm.counts.items() if name.startswith("prompt_")}
    assert would.exact + would.moved + would.computed <= sum(totals.values())


def test_a_kind_of_edit_that_the_gate_does_not_clear(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=SHADOW)
    vllm.ask(TURN)
    planner = vllm.connector.planner
    decision = replace(planner._decision, kinds=())
    for one in (planner._plans, planner.half.reasons):
        monkeypatch.setattr(one, "_decision", decision)
    vllm.counts.clear()
    vllm.ask(EDITED)
    assert counted(vllm) == Would(exact=200, moved=0, after_gaps=0, computed=190, cleared=False)


def test_requests_that_would_not_move(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=SHADOW)
    vllm.ask(TURN)
    vllm.counts.clear()
    vllm.ask(EDITED, mode="exact")
    assert counted(vllm) == Would(exact=200, moved=0, after_gaps=0, computed=190, cleared=True)
    monkeypatch.setattr(_gate, "covers", lambda *_: False)
    vllm.counts.clear()
    vllm.ask(EDITED[:300] + words(90, 8))
    assert counted(vllm).moved == 0
    assert vllm.counts["requests_uncalibrated"] == 1


def test_an_error_in_shadow_mode_is_counted_and_costs_only_the_counts(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=SHADOW)
    vllm.ask(TURN)

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("shadow mode fails")

    monkeypatch.setattr(_shadow, "would", fail)
    vllm.counts.clear()
    assert vllm.ask(TURN) == continuation(TURN, 8)
    assert vllm.counts["errors"] == 1
    assert counted(vllm) == Would(exact=0, moved=0, after_gaps=0, computed=0, cleared=True)
    # The request itself goes on with what it has: 8 tokens of its reply are in its last block.
    assert vllm.counts["prompt_tokens/exact/other"] == 509


def test_the_log_has_what_would_have_been(core: Callable[..., Core], tmp_path: Path) -> None:
    path = tmp_path / "log"
    vllm = core(connector={**SHADOW, "record": str(path)})
    vllm.ask(TURN)
    vllm.ask(EDITED)
    assert vllm.connector.planner.half.recording._recorder.flush()
    first, second = Log(path)
    assert first.would == Would(exact=0, moved=0, after_gaps=0, computed=510, cleared=True)
    assert second.would == Would(exact=200, moved=150, after_gaps=0, computed=40, cleared=True)
    assert second.reused == ((0, 200, "exact"),)
    assert second.computed == {"exact_asked": 150, "new": 40}
