"""The tokens of a plan that a request gets, and the slots of their copies.

A prompt may have a range for each few tokens, so nothing here takes longer than one pass over what
it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie.integrations._filled_plan import APPROXIMATE, COMPUTE, common

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import ReusePlan
    from kvtrie.integrations._filled_plan import FilledPlan

Range = tuple[int, int]
"""The first of a number of tokens, and the one after the last."""

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
    if plan.num_exact + plan.num_approximate < LEAST_COPIED:
        return (num_local, num_local), []
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
    if may_begin is not None and plan.num_approximate:
        first = _first_approximate(reusable, ranges)
        if first is not None and not may_begin(first):
            ranges = [(start, min(end, first)) for start, end in ranges if start < first]
    if ranges and ranges[0][0] == num_local:
        return ranges[0], ranges[1:]
    return (num_local, num_local), ranges


def _first_approximate(
    reusable: Sequence[tuple[int, int, bool]], ranges: Sequence[Range]
) -> int | None:
    approximate = [(start, end) for start, end, is_approximate in reusable if is_approximate]
    return next((start for start, _, _ in common(ranges, approximate)), None)


def moves(
    plan: ReusePlan | FilledPlan,
    block_ids: Sequence[int],
    block_size: int,
    ranges: Sequence[Range],
) -> NDArray[np.void]:
    """The copies for the tokens of ranges, in the form of `kvtrie.ReusePlan.moves`.

    Tokens that the plan uses in place but vLLM's hit does not contain are copied unchanged: they
    are under another lineage than the request had at its lookup.

    Args:
        plan: The plan.
        block_ids: The request's blocks, from position 0 on.
        block_size: Tokens of a block.
        ranges: Ranges of tokens, ascending and apart. Each but the first begins, and each but the
            last ends, where a segment of the plan does.
    """
    start, end = ranges[0][0], ranges[-1][1]
    own = plan.blocks
    given = np.asarray(block_ids[: -(-end // block_size)], np.int32)
    # Copies go to the request's own blocks, after those that the plan uses in place.
    moved = plan.moves(np.concatenate([own, given[len(own) :]]), start=start, end=end)
    if len(ranges) > 1:
        moved = _inside_ranges(moved, given, block_size, ranges)
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


def _inside_ranges(
    moved: NDArray[np.void],
    given: NDArray[np.int32],
    block_size: int,
    ranges: Sequence[Range],
) -> NDArray[np.void]:
    """The copies into a table of which the tokens are in ranges."""
    order = np.argsort(given)
    numbers, offsets = np.divmod(moved["dest_slot"].astype(np.int64), block_size)
    places = order[np.searchsorted(given, numbers, sorter=order)]
    positions = places * block_size + offsets
    bounds = np.array(ranges, np.int64)
    before = np.searchsorted(bounds[:, 0], positions, side="right") - 1
    found: NDArray[np.void] = moved[(before >= 0) & (positions < bounds[before, 1])]
    return found


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
