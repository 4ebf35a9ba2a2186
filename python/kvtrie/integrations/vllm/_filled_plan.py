"""A plan of the pool with runs of the store where it would compute.

It has what the planner and the gate read of a `kvtrie.ReusePlan`. The store does not know which
tokens were before a run that was moved, so a gate file, which judges by that, gets no such run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.integrations._served import LEAST_RUN
from kvtrie.integrations.vllm._ranges import APPROXIMATE, COMPUTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie._core import MovedRun, ReusePlan, ReusePolicy
    from kvtrie.integrations.vllm._requests import Range
    from kvtrie.store import PlacedSpan


class FilledPlan:
    """A plan and spans of the store; its segments cover the prompt as a plan's do.

    Args:
        plan: The plan of the pool, which is released with this one.
        spans: What the store has loaded for the prompt, ascending.
        policy: What may be used of it.
        is_judged: Whether a gate judges plans by the context of their moved runs.
        sought: The policy that the spans were looked up under, if it is another one. What was
            built under it may be too lax for ``policy``.
    """

    def __init__(
        self,
        plan: ReusePlan,
        spans: Sequence[PlacedSpan],
        policy: ReusePolicy,
        *,
        is_judged: bool,
        sought: ReusePolicy | None = None,
    ) -> None:
        self.pool = plan
        self._segments = plan.segments
        rows = self._segments.tolist()
        num_tokens = rows[-1][1] if rows else 0
        gaps = fillable(plan, policy)
        allows = policy.approximate and (sought or policy).is_at_least_as_strict_as(policy)
        used = _inside([one for one in spans if one.is_exact or allows], gaps)
        if policy.approximate:
            used = _cut(used, policy, is_judged=is_judged)
            count = sum(end - start for start, end, *_, is_exact in used if not is_exact)
            if plan.num_approximate + count > policy.max_approximate_share * num_tokens:
                used = [one for one in used if one[4]]
        self.stored: list[Range] = [(one[0], one[1]) for one in used]
        self._segments = _laid_over(self._segments, used)

    @property
    def segments(self) -> NDArray[np.void]:
        """As of a plan."""
        return self._segments

    @property
    def blocks(self) -> NDArray[np.int32]:
        """As of a plan."""
        return self.pool.blocks

    @property
    def source_blocks(self) -> NDArray[np.int32]:
        """As of a plan."""
        return self.pool.source_blocks

    @property
    def moved_runs(self) -> tuple[MovedRun, ...]:
        """Those of the pool's plan."""
        return self.pool.moved_runs

    @property
    def gaps(self) -> NDArray[np.int64]:
        """As of a plan."""
        some = self._segments[self._segments["class"] == COMPUTE]
        return np.stack([some["start"], some["end"]], axis=1).astype(np.int64)

    @property
    def num_exact(self) -> int:
        """As of a plan."""
        return self._count(0)

    @property
    def num_approximate(self) -> int:
        """As of a plan."""
        return self._count(APPROXIMATE)

    @property
    def num_compute(self) -> int:
        """As of a plan."""
        return self._count(COMPUTE)

    def moves(self, table: Any, start: int = 0, end: int | None = None) -> NDArray[np.void]:  # noqa: ANN401 - as of a plan
        """The copies inside the pool."""
        return self.pool.moves(table, start=start, end=end)

    def release(self) -> None:
        """Release the plan of the pool."""
        self.pool.release()

    def _count(self, kind: int) -> int:
        some = self._segments[self._segments["class"] == kind]
        return int((some["end"] - some["start"]).sum())


def fillable(plan: ReusePlan | FilledPlan, policy: ReusePolicy) -> list[Range]:
    """What a plan computes because its KV is missing, ascending.

    Not what the policy wants computed: inside moved runs of the pool, and at their ends.
    """
    found = [(row[0], row[1]) for row in plan.segments.tolist() if row[4] == COMPUTE]
    if not (policy.recompute_first or policy.recompute_last or policy.recompute_share):
        return found
    runs = [
        (run.start - policy.recompute_first, run.end + policy.recompute_last)
        for run in plan.moved_runs
    ]
    left: list[Range] = []
    first = 0
    for low, high in found:
        while first < len(runs) and runs[first][1] <= low:
            first += 1
        at, number = low, first
        while number < len(runs) and runs[number][0] < high:
            if at < runs[number][0]:
                left.append((at, runs[number][0]))
            at = max(at, runs[number][1])
            number += 1
        if at < high:
            left.append((at, high))
    return left


# Start, end, hops, delta, whether it is exact.
_Used = tuple[int, int, int, int, bool]


def _inside(spans: Sequence[PlacedSpan], gaps: Sequence[Range]) -> list[_Used]:
    """The parts of spans in gaps; both ascend."""
    found: list[_Used] = []
    first = 0
    for one in spans:
        while first < len(gaps) and gaps[first][1] <= one.start:
            first += 1
        at = first
        while at < len(gaps) and gaps[at][0] < one.end:
            low, high = max(one.start, gaps[at][0]), min(one.end, gaps[at][1])
            found.append((low, high, one.hops, one.delta, one.is_exact))
            at += 1
    return found


def _cut(used: list[_Used], policy: ReusePolicy, *, is_judged: bool) -> list[_Used]:
    """Without what the policy computes of moved runs, which are of any number of spans."""
    runs: list[list[_Used]] = []
    rest = []
    for one in used:
        if one[4] or not one[2]:
            # Exact, or computed here after approximate KV: nothing of it was moved.
            rest.append(one)
        elif runs and runs[-1][-1][1] == one[0] and runs[-1][-1][3] == one[3]:
            runs[-1].append(one)
        else:
            runs.append([one])
    least = LEAST_RUN if policy.min_run is None else policy.min_run
    runs = [run for run in runs if run[-1][1] - run[0][0] >= least]
    if is_judged:
        runs = []
    lengths = [run[-1][1] - run[0][0] for run in runs]
    # As of a plan: the same number of tokens at the start of each, the fewest that are the share.
    front = _front(lengths, math.ceil(policy.recompute_share * sum(lengths)))
    front = max(front, policy.recompute_first)
    for run in runs:
        start, end = run[0][0] + front, run[-1][1] - policy.recompute_last
        for one in run:
            low, high = max(one[0], start), min(one[1], end)
            if low < high:
                rest.append((low, high, *one[2:]))
    return sorted(rest)


def _front(lengths: Sequence[int], wanted: int) -> int:
    low, high = 0, max(lengths, default=0)
    while low < high:
        middle = (low + high) // 2
        if sum(min(middle, length) for length in lengths) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def _laid_over(segments: NDArray[np.void], used: Sequence[_Used]) -> NDArray[np.void]:
    rows: list[tuple[int, ...]] = []
    number = 0
    for row in segments.tolist():
        if row[4] != COMPUTE:
            rows.append(row)
            continue
        at, end = row[0], row[1]
        while number < len(used) and used[number][0] < end:
            low, high, hops, delta, is_exact = used[number]
            if at < low:
                rows.append((at, low, *row[2:]))
            kind = 0 if is_exact else APPROXIMATE
            rows.append((low, high, low - delta, delta, kind, hops, 0, delta))
            at = high
            number += 1
        if at < end:
            rows.append((at, end, *row[2:]))
    return np.array(rows, dtype=segments.dtype)
