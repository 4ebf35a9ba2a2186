"""The plan of a request: what the policy and the gate let it reuse of the pool and the store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtrie.integrations._filled_plan import FilledPlan, judges

if TYPE_CHECKING:
    from kvtrie._core import ReusePlan, ReusePolicy
    from kvtrie.gates import Decision
    from kvtrie.integrations.vllm._requests import LiveRequest
    from kvtrie.integrations.vllm._sources import Sources
    from kvtrie.integrations.vllm._stats import Counts

_LOG = logging.getLogger("vllm.kvtrie")


class Plans:
    """Plans for requests under a gate's decision."""

    def __init__(self, sources: Sources, decision: Decision, counts: Counts) -> None:
        self._sources = sources
        self._decision = decision
        self._counts = counts

    def of(self, live: LiveRequest, num_prompt: int) -> ReusePlan | FilledPlan | None:
        """A plan for a request, exact if the gate does not clear the kind of edit.

        None if its blocks keep leaving.
        """
        plan, decision = self.judged(live, live.policy, num_prompt)
        if not live.policy.approximate:
            return plan
        if not decision.policy.approximate:
            self._counts.add("plans_not_cleared")
            _LOG.debug("kvtrie: planned again, exact: %s", decision.reason)
        elif plan is not None and plan.num_approximate:
            live.is_built_under(decision.policy)
        live.granted, live.verdict = decision.policy, decision.reason
        return plan

    def judge_nothing(self, live: LiveRequest) -> None:
        """Note what the gate says of a request whose plan would reuse nothing."""
        if live.policy.approximate:
            live.granted, live.verdict = self._decision.policy, self._decision.reason

    def judged(
        self, live: LiveRequest, policy: ReusePolicy, num_prompt: int
    ) -> tuple[ReusePlan | FilledPlan | None, Decision]:
        """A plan under a policy, and the decision that it is the plan of."""
        decision = self._decision
        if policy.approximate:
            live.find_moved_end(num_prompt)
        plan = self._made(live, policy)
        if not policy.approximate:
            return plan, decision
        while plan is not None and (judged := decision.of(plan)) is not decision:
            plan.release()
            decision = judged
            plan = self._made(live, judged.policy)
        return plan, decision

    def _made(self, live: LiveRequest, policy: ReusePolicy) -> ReusePlan | FilledPlan | None:
        """A plan of the pool, with what the store has loaded."""
        plan = self._sources.plan(live.seq, policy, live.session, live.moved_end)
        if plan is None or live.stored is None:
            return plan
        return FilledPlan(
            plan,
            live.stored.spans,
            policy,
            is_judged=judges(self._decision),
            sought=live.policy,
            contexts=live.stored.contexts,
            ticket=live.ticket,
            index=self._sources.index,
        )
