"""The tokens of a plan that a request gets, and the slots of their copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import ReusePlan
    from kvtrie.integrations.vllm._filled_plan import FilledPlan
    from kvtrie.integrations.vllm._requests import Range

APPROXIMATE: Final = 1
COMPUTE: Final = 2
"""Classes of segments in `kvtrie.ReusePlan.segments`."""

LEAST_COPIED: Final = 8
"""Fewer tokens are computed: a copy has a fixed cost, and many prompts share their first tokens."""


def usable(
    plan: ReusePlan | FilledPlan,
    num_local: int,
    *,
    resumes: bool,
    may_begin: Callable[[int], bool] | None,
) -> tuple[Range, list[Range]]:
    """The tokens that are worth a copy: those after vLLM's hit, and segments after gaps, ascending.

    Args:
        plan: The plan.
        num_local: Tokens of vLLM's own hit, whole blocks.
        resumes: Whether reuse continues after a gap.
        may_begin: Whether KV may become approximate at a token; None: it already is.
    """
    reusable = [
        (max(segment[0], num_local), segment[1], segment[4] == APPROXIMATE)
        for segment in plan.segments.tolist()
        if segment[1] > num_local and segment[4] != COMPUTE
    ]
    ranges = [(num_local, num_local)]
    for start, end, _ in reusable:
        if start == ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], end)
        elif resumes:
            ranges.append((start, end))
        else:
            break
    ranges = [one for one in ranges if one[1] - one[0] >= LEAST_COPIED]
    if may_begin is not None:
        first = _first_approximate(reusable, ranges)
        if first is not None and not may_begin(first):
            ranges = [(start, min(end, first)) for start, end in ranges if start < first]
    if ranges and ranges[0][0] == num_local:
        return ranges[0], ranges[1:]
    return (num_local, num_local), ranges


def _first_approximate(
    reusable: Sequence[tuple[int, int, bool]], ranges: Sequence[Range]
) -> int | None:
    return next(
        (
            max(start, segment[0])
            for start, end in ranges
            for segment in reusable
            if segment[2] and segment[1] > start and segment[0] < end
        ),
        None,
    )


def moves(
    plan: ReusePlan | FilledPlan, block_ids: Sequence[int], block_size: int, start: int, end: int
) -> NDArray[np.void]:
    """The copies for the tokens of a range, in the form of `kvtrie.ReusePlan.moves`.

    Tokens that the plan uses in place but vLLM's hit does not contain are copied unchanged: they
    are under another lineage than the request had at its lookup.
    """
    own = plan.blocks
    given = np.asarray(block_ids[: -(-end // block_size)], np.int32)
    # Copies go to the request's own blocks, after those that the plan uses in place.
    moved = plan.moves(np.concatenate([own, given[len(own) :]]), start=start, end=end)
    stop = min(end, len(own) * block_size)
    if start >= stop:
        return moved
    numbers = np.arange(start // block_size, -(-stop // block_size))
    begins = numbers * block_size
    whole = np.zeros(len(numbers), moved.dtype)
    whole["source_slot"] = own[numbers].astype(np.int64) * block_size
    whole["dest_slot"] = given[numbers].astype(np.int64) * block_size
    whole["num_tokens"] = np.minimum(stop - begins, block_size)
    return np.concatenate([whole[whole["source_slot"] != whole["dest_slot"]], moved])


def without(given: Range, ranges: Sequence[Range]) -> list[Range]:
    """What is left of a range without others inside it, ascending and apart."""
    position, end = given
    left = []
    for start, stop in ranges:
        if position < start:
            left.append((position, start))
        position = stop
    if position < end:
        left.append((position, end))
    return left


def inside(ranges: Sequence[Range], given: Range) -> list[Range]:
    """The parts of ranges inside another."""
    first, last = given
    cut = ((max(start, first), min(end, last)) for start, end in ranges)
    return [one for one in cut if one[0] < one[1]]
