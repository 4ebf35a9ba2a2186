"""Why tokens of a prompt are computed, by what its index knows when it is planned.

Each computed token has one reason. One `explain` says why the exact match ends; where moved runs
are allowed, one plan more says whether a wider policy would reuse more, and only if so, further
plans say which limit alone is in the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import EXACT_ONLY
from kvtrie.gates import widening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvtrie._core import RadixIndex, ReusePlan, ReusePolicy, TokenSequence
    from kvtrie.gates import Decision
    from kvtrie.gates.widening import Step

REASONS: Final = {
    "first_seen": "Not one whole block of the prompt is cached.",
    "new": "After the last token that is cached.",
    "diverged": "Other tokens are cached there: an edit, or another conversation branches off.",
    "evicted": "They were cached after the same tokens, and left.",
    "other_namespace": "They are cached under another model, dtype or adapter of the same salt.",
    "other_salt": "The latest prompt with the same first block had another salt.",
    "approximate_only": "They are cached as approximate KV, and the policy allows exact KV alone.",
    "exact_asked": "Approximate KV would do, but exact reuse is asked for.",
    "not_cleared": "Likewise, but the gate file does not clear this kind of edit.",
    "limited": "Moved runs that the policy's limits forbid.",
    "out_of_scope": "Moved runs of other conversations.",
    "recomputed": "Tokens of moved runs that the policy recomputes.",
    "no_room": "KV is there, but there was no room for the prompt next to its pinned sources.",
    "last_token": "The last token, computed for its logits; all before it is reused.",
}
"""Reasons by name. None says what another tenant has."""

NAMES: Final = tuple(REASONS)
CODES: Final = {name: code for code, name in enumerate(NAMES)}
_COMPUTE: Final = 2

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a prompt may reuse.

    Attributes:
        policy: The policy of its plan.
        asked: What the request may reuse before its plan is judged.
        default: What requests may reuse that name no policy; None: no gate is used.
        session: The id of its conversation.
        moved_end: Position from which on moved runs supply no token.
        keep_last: Tokens at the end that are computed in any case.
        wanted: The policy of a plan that found no room just before.
        has_other_salt: Whether the latest prompt with the same first block had another salt.
    """

    policy: ReusePolicy
    asked: ReusePolicy
    default: Decision | None = None
    session: str | None = None
    moved_end: int | None = None
    keep_last: int = 1
    wanted: ReusePolicy | None = None
    has_other_salt: Callable[[], bool] = lambda: False


def label(
    index: RadixIndex, seq: TokenSequence, plan: ReusePlan, context: Context
) -> NDArray[np.int8]:
    """The reason (`CODES`) of each token, should it be computed.

    Tokens that the plan reuses are `"recomputed"`: it may compute some of them after all.
    """
    labels = np.full(len(seq), CODES["recomputed"], np.int8)
    computed, reused = _ranges(plan)
    tail = len(seq) - context.keep_last
    if not computed:
        return labels
    if computed[0][0] >= tail:
        labels[computed[0][0] :] = CODES["last_token"]
        return labels
    why = index.explain(seq, EXACT_ONLY, context=0, keep_last=context.keep_last)
    wider = list(_wider(index, seq, plan, context))
    found = [*reused, *(one for _, ranges in wider for one in ranges)]
    last = max((end for _, end in found if end > why.position), default=0)
    reason = _base(why.reason, why.position, index.block_size, context, goes_on=last > 0)
    marks = np.full(len(seq), CODES[reason], np.int8)
    if last:
        marks[last:] = CODES["new"]
        if last >= tail:
            marks[tail:] = CODES["last_token"]
    # Of several reasons, the one that alone is in the way.
    for name, ranges in reversed(wider):
        for start, end in ranges:
            marks[start:end] = CODES[name]
    for start, end in computed:
        labels[start:end] = marks[start:end]
    return labels


def _base(reason: str, position: int, size: int, context: Context, *, goes_on: bool) -> str:
    """The reason where the exact match ends; ``goes_on``: something after it can be reused."""
    if reason == "approximate_only":
        if not context.policy.approximate and not goes_on:
            return reason
        reason = "diverged"
    if reason in ("evicted", "other_namespace"):
        return reason
    if reason == "complete":
        return "new"
    if goes_on:
        return "diverged"
    if position >= size:
        return "new" if reason == "not_cached" else "diverged"
    return "other_salt" if context.has_other_salt() else "first_seen"


def _wider(
    index: RadixIndex, seq: TokenSequence, plan: ReusePlan, context: Context
) -> Iterator[tuple[str, list[Range]]]:
    """What plans under wider policies would reuse, from the narrowest on."""
    steps = _steps(context)
    if not steps:
        return

    def planned(policy: ReusePolicy) -> tuple[bool, list[Range]]:
        other = index.plan(
            seq,
            policy,
            keep_last=context.keep_last,
            pin=False,
            session=context.session,
            moved_end=context.moved_end,
        )
        decision = context.default
        is_cleared = decision is None or decision.of(other).policy.approximate
        reused = _ranges(other)[1]
        other.release()
        return is_cleared, reused

    _, widest = planned(steps[-1][1])
    if sum(end - start for start, end in widest) <= plan.num_exact + plan.num_approximate:
        return
    for name, policy in steps:
        is_cleared, reused = planned(policy)
        yield ("not_cleared" if name == "exact_asked" and not is_cleared else name), reused


def _steps(context: Context) -> list[Step]:
    """Wider and wider policies, and the reason why a token is reused only from there on."""
    steps: list[Step] = []
    narrow = context.policy
    if context.wanted is not None:
        narrow = context.wanted
        steps.append(("no_room", narrow))
    default = None if context.default is None else context.default.policy
    wide = context.asked
    if not wide.approximate:
        if default is None or not default.approximate:
            return steps
        wide = default
    judged = "not_cleared" if context.asked.approximate else "exact_asked"
    return [*steps, *widening.steps(narrow, wide, judged)]


def _ranges(plan: ReusePlan) -> tuple[list[Range], list[Range]]:
    """What a plan computes, and what it reuses."""
    computed: list[Range] = []
    reused: list[Range] = []
    for start, end, kind in plan.segments[["start", "end", "class"]].tolist():
        (computed if kind == _COMPUTE else reused).append((start, end))
    return computed, reused
