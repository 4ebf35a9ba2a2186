"""Wider and wider policies, from the one of a plan on: which limit is in the way of more reuse?

A plan under each of them costs as much as any other; a caller looks at the widest one first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie._core import ReusePolicy

Step = tuple[str, "ReusePolicy"]


def steps(narrow: ReusePolicy, wide: ReusePolicy, judged: str) -> list[Step]:
    """Policies with the reason why a token is reused only from there on, the narrowest first.

    Args:
        narrow: The policy of the plan.
        wide: What the request asked for, or what the gate would give it.
        judged: The reason of tokens that only ``wide`` reuses.
    """
    found: list[Step] = []
    for name, policy in (
        ("recomputed", _computing_nothing(narrow)),
        (judged, _computing_nothing(wide)),
        ("limited", _unlimited(wide)),
        ("out_of_scope", _unlimited(wide).replace(scope="namespace")),
    ):
        if policy != narrow:
            found.append((name, policy))
        narrow = policy
    return found


def _computing_nothing(policy: ReusePolicy) -> ReusePolicy:
    if not policy.approximate:
        return policy
    return policy.replace(recompute_first=0, recompute_last=0, recompute_share=0.0, repair="fronts")


def _unlimited(policy: ReusePolicy) -> ReusePolicy:
    return _computing_nothing(policy).replace(
        min_run=None,
        max_hops=255,
        max_approximate_share=1.0,
        forbid_kinds=(),
        max_cuts=None,
        max_lost_context=1.0,
        max_new_context=1.0,
    )
