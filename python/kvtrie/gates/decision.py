"""Decides what a request may reuse, and on each of its plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtrie.gates.boxes import terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie._core import ReusePolicy
    from kvtrie.gates.boxes import Box, Plan, Terms


@dataclass(frozen=True, slots=True)
class Judged:
    """A kind of edit, as `Decision` looks it up.

    Attributes:
        name: Its name.
        box: The plans that are of this kind.
        failure: Why it is not cleared; None if it is.
        computed: Share of the measured prompts that was computed.
    """

    name: str
    box: Box
    failure: str | None
    computed: float = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request may reuse, and which of its plans.

    Attributes:
        policy: The wanted policy, or an exact one.
        is_cleared: Whether it is the wanted policy.
        reason: Why, in one sentence.
        kinds: The kinds of edit that the policy was measured on, the best fitting measurement
            first; None: a plan of any kind may be used.
    """

    policy: ReusePolicy
    is_cleared: bool
    reason: str
    kinds: tuple[Judged, ...] | None = None

    def of(self, plan: Plan) -> Decision:
        """The decision on one plan of this policy.

        Takes time linear in the plan's moved runs and segments and in the kinds.

        Args:
            plan: A plan that is not released.

        Returns:
            This decision, if the plan may be used. Else one with the exact policy under which to
            plan again, and the reason.
        """
        if self.kinds is None:
            return self
        found = terms(plan)
        if found is None:
            return self
        kind = self.kind_of(found)
        if kind is not None and kind.failure is None:
            return self
        reason = f"no edit of this kind was measured ({_shown(found)})"
        if kind is not None:
            reason = f"edits of the kind {kind.name!r} are not cleared: {kind.failure}"
        exact = self.policy.replace(approximate=False)
        return Decision(exact, is_cleared=False, reason=reason)

    def kind_of(self, found: Terms) -> Judged | None:
        """The measured kind of edit that a plan is of, or None.

        Args:
            found: What ``terms`` says of a plan.
        """
        return next((kind for kind in self.kinds or () if found in kind.box), None)


@dataclass(frozen=True, slots=True)
class Ladder(Decision):
    """What a request that names no policy may reuse: the measured policies, by what they compute.

    A plan is made under ``policy`` first. It is of one kind of edit, and of the rungs that are
    cleared for this kind, the one that computed the fewest tokens when it was measured is the
    plan's; of equals the strictest. Where that is another policy, the plan is made again under it,
    and judged again, as that policy's. So a request takes at most three plans.

    Attributes:
        policy: The strictest one that no rung is stricter than: often the laxest rung.
        rungs: A decision for each policy that is cleared for a kind of edit.
    """

    rungs: tuple[Decision, ...] = ()

    def of(self, plan: Plan) -> Decision:
        """The decision on one plan of this policy.

        Takes time linear in the plan's moved runs and segments and in the kinds.

        Args:
            plan: A plan that is not released.

        Returns:
            This ladder, if the plan may be used. Else the decision on the policy under which to
            plan again, and which then decides on that plan.
        """
        found = terms(plan)
        if found is None:
            return self
        best: tuple[float, Decision] | None = None
        for rung in self.rungs:
            kind = rung.kind_of(found)
            if kind is None or kind.failure is not None:
                continue
            if not plan.moved_runs and _is_same(rung.policy, self.policy):
                # Nothing moves: another policy could not compute less.
                return self
            if (
                best is None
                or kind.computed < best[0]
                or (
                    kind.computed == best[0]
                    and rung.policy.is_at_least_as_strict_as(best[1].policy)
                )
            ):
                best = kind.computed, rung
        if best is None:
            reasons = dict.fromkeys(rung.of(plan).reason for rung in self.rungs)
            exact = self.policy.replace(approximate=False)
            return Decision(exact, is_cleared=False, reason="; ".join(reasons))
        return self if _is_same(best[1].policy, self.policy) else best[1]


def laxest(policies: Sequence[ReusePolicy]) -> ReusePolicy:
    """The strictest policy that all of these are at least as strict as; see rule P19.

    Args:
        policies: At least one, all approximate.
    """

    def least(name: str) -> Any:  # noqa: ANN401 - of the field's type
        return min(getattr(one, name) for one in policies)

    def most(name: str) -> Any:  # noqa: ANN401 - of the field's type
        values = [getattr(one, name) for one in policies]
        return None if None in values else max(values)

    first = policies[0]
    runs = [one.min_run for one in policies]
    kinds = set(first.forbid_kinds).intersection(*(one.forbid_kinds for one in policies))
    is_wide = any(one.scope == "namespace" for one in policies)
    has_one_repair = len({one.repair for one in policies}) == 1
    return first.replace(
        min_run=None if None in runs else min(run for run in runs if run is not None),
        **{name: least(name) for name in ("recompute_first", "recompute_last", "shared_prefix")},
        **{
            name: most(name)
            for name in (
                *("max_hops", "max_approximate_share"),
                *("max_cuts", "max_lost_context", "max_new_context"),
            )
        },
        scope="namespace" if is_wide else "conversation",
        forbid_kinds=tuple(sorted(kinds)),
        recompute_share=least("recompute_share") if has_one_repair else 0.0,
        repair=first.repair if has_one_repair else "fronts",
    )


def _is_same(one: ReusePolicy, other: ReusePolicy) -> bool:
    return one.is_at_least_as_strict_as(other) and other.is_at_least_as_strict_as(one)


def _shown(found: Terms) -> str:
    whose = "own" if found.same_conversation else "other"
    return (
        f"{found.cuts} cuts, {found.lost_context:.0%} of the context lost, "
        f"{found.new_context:.0%} new, moved by {found.distance}, {found.hops} hops, from {whose} "
        "conversations"
    )
