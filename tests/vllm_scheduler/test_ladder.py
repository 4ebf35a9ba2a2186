"""Without a policy in the settings, each plan has the cheapest policy that the gate clears."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.cleared import GOOD, POLICY, gate, kind
from tests.vllm.prompts import words
from tests.vllm_scheduler.worker import BLOCK

from kvtrie import TokenSequence, gates
from kvtrie.integrations.vllm import _gate

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from tests.vllm_scheduler.core import Core

FRONTS = POLICY.replace(recompute_share=0.2)
# One path of 16 whole blocks is a conversation.
HEAD = words(16 * BLOCK, 1)
PARTS = [words(4 * BLOCK, seed) for seed in range(2, 7)]


def test_requests_get_the_cheapest_policy_that_is_cleared(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = gates.Box(cuts=gates.Range(most=1))
    more = gates.Box(cuts=gates.Range(above=1, most=2))
    costly = replace(GOOD, moved=500, computed=400)
    ladder = gate(
        measured=(
            gates.Measured("rotated", POLICY, (kind("few", few),)),
            gates.Measured("rotated+fronts20", FRONTS, (kind("more", more, costly),)),
        )
    ).ladder(model="m@1")
    monkeypatch.setattr(_gate, "decision_of", lambda *_: ladder)
    vllm = core(connector={"gate": "gate.json"}, gaps=True)
    sources: Any = vllm.connector.planner.half.sources
    space = vllm.connector.planner.half.space_of(None, None)

    def in_place(prompt: list[int], policy: Any) -> int:
        plan = sources.plan(TokenSequence(prompt, space), policy)
        num: int = len(plan.blocks)
        plan.release()
        return num

    vllm.ask(HEAD + [token for part in PARTS for token in part])
    once = [*HEAD, *PARTS[1], *PARTS[2], *PARTS[3], 7]
    assert vllm.computed_for(once) == 1
    assert in_place(once, POLICY) > 16
    # What was built without fronts is nothing for a policy with them.
    assert in_place(once, FRONTS) == 16
    assert vllm.counts["plans_not_cleared"] == 0
    twice = [*HEAD, *PARTS[2], *PARTS[4], 8]
    computed = vllm.computed_for(twice)
    assert 0.2 * 8 * BLOCK <= computed - 1 <= 0.2 * 8 * BLOCK + 2
    assert vllm.counts["plans_not_cleared"] == 0
    assert in_place(twice, FRONTS) > 16
