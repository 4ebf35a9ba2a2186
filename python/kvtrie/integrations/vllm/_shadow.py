"""Shadow mode: what moving KV would reuse of a prompt. Nothing is moved, pinned or copied for it.

The counts are those of an engine that moves, for the prompts that such an engine would have served
with what is cached here. It would also have cached what it moved, and moved that again; here such
tokens are computed, so their KV is exact, and cached in other blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.integrations._filled_plan import APPROXIMATE, common
from kvtrie.integrations.vllm import _ranges
from kvtrie.record import Would

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie._core import ReusePlan
    from kvtrie.integrations._filled_plan import FilledPlan
    from kvtrie.integrations.vllm._stats import Counts


def would(
    plan: ReusePlan | FilledPlan,
    num_local: int,
    num_prompt: int,
    *,
    may_begin: Callable[[int], bool],
    cleared: bool,
) -> Would:
    """What a plan brings after vLLM's own hit of ``num_local`` tokens, with reuse after gaps."""
    first, after = _ranges.usable(plan, num_local, resumes=True, may_begin=may_begin)
    ranges = [first, *after]
    approximate = [(one[0], one[1]) for one in plan.segments.tolist() if one[4] == APPROXIMATE]
    moved = sum(end - start for start, end, _ in common(ranges, approximate))
    reused = num_local + sum(end - start for start, end in ranges)
    return Would(
        exact=reused - moved,
        moved=moved,
        after_gaps=sum(end - start for start, end in after),
        computed=num_prompt - reused,
        cleared=cleared,
    )


def count(one: Would, counts: Counts) -> None:
    """Count it, when the prompt is computed."""
    counts.add("tokens_would_be_exact", one.exact)
    counts.add("tokens_would_move", one.moved)
    counts.add("tokens_would_follow_gaps", one.after_gaps)
    counts.add("tokens_would_compute", one.computed)
    counts.add("plans_would_not_clear", int(not one.cleared))
