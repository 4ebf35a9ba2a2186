"""A plan of the pool with runs of the store where it would compute.

It has what the planner and the gate read of a `kvtrie.ReusePlan`. Where a gate or a policy judges
moved runs by what they were computed after, they are judged together: what the store supplies is
context of the pool's runs, and the other way round.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from kvtrie.gates import Ladder
from kvtrie.integrations._served import LEAST_RUN
from kvtrie.store.contexts import KeptContext, PathStretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvtrie._core import MovedRun, RadixIndex, ReusePlan, ReusePolicy
    from kvtrie.gates import Decision
    from kvtrie.store import PlacedSpan, PromptContexts
    from kvtrie.store.contexts import JudgedRun, PrefixMarks

APPROXIMATE: Final = 1
COMPUTE: Final = 2
"""Classes of segments in `kvtrie.ReusePlan.segments`."""

Range = tuple[int, int]
"""Tokens, from the first to one past the last."""

# Paths of the pool that are compared with what the store supplies; runs of others are the worst.
_MOST_PATHS: Final = 16
# Copies of the pool whose paths are read, which are as long as what they were computed after.
_MOST_READ: Final = 64
_OWN: Final = "own"


@dataclass(frozen=True, slots=True)
class _Used:
    """A part of a span, in a gap of the plan."""

    start: int
    end: int
    span: PlacedSpan

    @property
    def is_moved(self) -> bool:
        """Whether it was moved, and not computed here after approximate KV."""
        return not self.span.is_exact and bool(self.span.hops)

    @property
    def old_start(self) -> int:
        context = self.span.context
        return 0 if context is None else context.old_start + self.start - self.span.start

    def cut(self, start: int, end: int) -> _Used | None:
        low, high = max(self.start, start), min(self.end, end)
        return replace(self, start=low, end=high) if low < high else None


class FilledPlan:
    """A plan and spans of the store; its segments cover the prompt as a plan's do.

    Args:
        plan: The plan of the pool, which is released with this one.
        spans: What the store has loaded for the prompt, ascending.
        policy: What may be used of it.
        is_judged: Whether a gate judges plans by the context of their moved runs.
        sought: The policy that the spans were looked up under, if it is another one. What was
            built under it may be too lax for ``policy``.
        contexts: What the spans were computed after. Without it none moves that has to be judged.
        index: That of the pool, with whose paths the spans' are compared.
        ticket: What the worker's half has loaded the spans under.
    """

    def __init__(
        self,
        plan: ReusePlan,
        spans: Sequence[PlacedSpan],
        policy: ReusePolicy,
        *,
        is_judged: bool,
        sought: ReusePolicy | None = None,
        contexts: PromptContexts | None = None,
        index: RadixIndex | None = None,
        ticket: int = 0,
    ) -> None:
        self.pool = plan
        self.ticket = ticket
        self._segments = plan.segments
        rows = self._segments.tolist()
        num_tokens = rows[-1][1] if rows else 0
        self._moved_runs: tuple[MovedRun | JudgedRun, ...] = plan.moved_runs
        gaps = fillable(plan, policy)
        may = _may_use(policy, sought or policy)
        used = _inside([one for one in spans if one.is_exact or may(one)], gaps)
        if policy.approximate:
            runs, rest = _runs(used, policy, contexts)
            judged: _JudgedPlan | None = None
            if is_judged or limits_contexts(policy):
                judged = _judged(plan, runs, rest, policy, contexts, index)
                runs = judged.runs
            moved = _cut(runs, policy)
            count = sum(one.end - one.start for one in (*rest, *moved) if not one.span.is_exact)
            if plan.num_approximate + count > policy.max_approximate_share * num_tokens:
                rest, moved = [one for one in rest if one.span.is_exact], []
                if judged is not None:
                    judged = _judged(plan, [], rest, policy, contexts, index)
            if judged is not None:
                self._moved_runs = judged.entries
                if not judged.is_allowed:
                    rest, moved = [], []
            used = sorted([*rest, *moved], key=lambda one: one.start)
        self.stored: list[Range] = [(one.start, one.end) for one in used]
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
    def moved_runs(self) -> tuple[MovedRun | JudgedRun, ...]:
        """As of a plan; only those of the pool, where nobody judges them."""
        return self._moved_runs

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

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


def missing(plan: ReusePlan | FilledPlan, policy: ReusePolicy, start: int, end: int) -> list[Range]:
    """What of a range a plan computes because its KV is missing, ascending."""
    found = ((max(low, start), min(high, end)) for low, high in fillable(plan, policy))
    return [one for one in found if one[0] < one[1]]


def inside(ranges: Sequence[Range], given: Range) -> list[Range]:
    """The parts of ranges inside another."""
    first, last = given
    cut = ((max(start, first), min(end, last)) for start, end in ranges)
    return [one for one in cut if one[0] < one[1]]


def common(ones: Sequence[Range], others: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    """What two series of ranges have in common, each ascending and apart.

    Yields:
        Start, end, and the number of the range among the others.
    """
    at = 0
    for start, end in ones:
        while at < len(others) and others[at][1] <= start:
            at += 1
        number = at
        while number < len(others) and others[number][0] < end:
            yield max(start, others[number][0]), min(end, others[number][1]), number
            number += 1


def judges(decision: Decision) -> bool:
    """Whether a gate judges plans by the context of their moved runs."""
    return isinstance(decision, Ladder) or decision.kinds is not None


def limits_contexts(policy: ReusePolicy) -> bool:
    """Whether a policy limits what moved runs were computed after."""
    return policy.approximate and (
        policy.max_cuts is not None or policy.max_lost_context < 1 or policy.max_new_context < 1
    )


def _may_use(policy: ReusePolicy, sought: ReusePolicy) -> Callable[[PlacedSpan], bool]:
    """Whether a policy may use an approximate span that was looked up under another one."""
    is_as_strict = sought.is_at_least_as_strict_as(policy)
    kinds_are_known = set(policy.forbid_kinds) <= set(sought.forbid_kinds)
    has_prefix = policy.shared_prefix == sought.shared_prefix

    def may(span: PlacedSpan) -> bool:
        context = span.context
        if not policy.approximate or span.hops > policy.max_hops:
            return False
        if is_as_strict:
            return True
        # What was exact before it moved was built under no policy.
        if context is None or not context.was_exact or not kinds_are_known:
            return False
        return policy.scope == "namespace" or (context.same_conversation and has_prefix)

    return may


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
            found.append(_Used(low, high, one))
            at += 1
    return found


def _runs(
    used: Sequence[_Used], policy: ReusePolicy, contexts: PromptContexts | None
) -> tuple[list[list[_Used]], list[_Used]]:
    """The moved runs, which are of any number of spans, and what was not moved."""
    kept = None if contexts is None else KeptContext({**contexts.turns})
    runs: list[list[_Used]] = []
    rest = []
    for one in used:
        if not one.is_moved:
            rest.append(one)
        elif runs and _continues(runs[-1][-1], one, kept):
            runs[-1].append(one)
        else:
            runs.append([one])
    least = LEAST_RUN if policy.min_run is None else policy.min_run
    return [run for run in runs if run[-1].end - run[0].start >= least], rest


def _continues(before: _Used, one: _Used, kept: KeptContext | None) -> bool:
    """Whether two parts are of one moved run: also of one prompt, where that is known."""
    if before.end != one.start or before.span.delta != one.span.delta:
        return False
    mine, others = before.span.context, one.span.context
    if kept is None:
        return True
    if mine is None or others is None:
        # What is in place has no context, and its place is not that of a run that was moved.
        return mine is others
    common = kept.num_common(mine.turn, others.turn)
    return common is not None and common >= one.old_start


def _cut(runs: Sequence[Sequence[_Used]], policy: ReusePolicy) -> list[_Used]:
    """Moved runs without what the policy computes of them."""
    lengths = [run[-1].end - run[0].start for run in runs]
    # As of a plan: the same number of tokens at the start of each, the fewest that are the share.
    front = _front(lengths, math.ceil(policy.recompute_share * sum(lengths)))
    return [
        part for run in runs for part in _inner(run, max(front, policy.recompute_first), policy)
    ]


def _inner(run: Sequence[_Used], front: int, policy: ReusePolicy) -> list[_Used]:
    """A run without as many tokens at its start, and those that a policy computes at its end."""
    low, high = run[0].start + front, run[-1].end - policy.recompute_last
    return [part for one in run if (part := one.cut(low, high)) is not None]


@dataclass(frozen=True, slots=True)
class _JudgedPlan:
    """Moved runs of the store that a policy allows, and the entries of all moved runs of the plan.

    Without ``is_allowed`` nothing of the store may be used: next to it, a run of the pool would
    have a context that the policy does not allow.
    """

    runs: list[list[_Used]]
    entries: tuple[MovedRun | JudgedRun, ...]
    is_allowed: bool = True


def _judged(
    plan: ReusePlan,
    runs: Sequence[list[_Used]],
    rest: Sequence[_Used],
    policy: ReusePolicy,
    contexts: PromptContexts | None,
    index: RadixIndex | None,
) -> _JudgedPlan:
    """Judge the moved runs of a plan by what they were computed after (rule P17)."""
    if contexts is None:
        # What is exact is at most context of the pool's runs, and nothing moves.
        return _JudgedPlan([], plan.moved_runs)
    paths: dict[Any, PrefixMarks] = {_OWN: contexts.own, **contexts.turns}
    before, of_pool = _of_pool(plan, index, contexts, paths)
    own = _stretches(rest)
    # Stretches, runs of the pool and runs of the store, from left to right.
    order: list[tuple[int, PathStretch | tuple[PathStretch, MovedRun] | list[_Used]]]
    order = [(one.start, one) for one in (*before, *own)]
    order += [(one.start, (one, run)) for one, run in of_pool]
    order += [(run[0].start, run) for run in runs]
    order.sort(key=lambda pair: pair[0])
    kept = KeptContext(paths)
    found: list[list[_Used]] = []
    entries: list[MovedRun | JudgedRun] = []
    # Where the store begins. What the pool has before is as the pool's plan says.
    first = min((one.start for one in own), default=plan.segments["end"].max(initial=0))
    for start, one in order:
        if isinstance(one, PathStretch):
            kept.keep(one)
        elif isinstance(one, tuple):
            stretch, known = one
            judged: MovedRun | JudgedRun = known
            if first < start:
                judged = kept.judge(stretch, same_conversation=known.same_conversation)
                if not judged.is_within(policy):
                    return _JudgedPlan([], plan.moved_runs, is_allowed=False)
            entries.append(judged)
            kept.keep(stretch)
        else:
            # Tokens of ``recompute_first`` and ``recompute_last`` count as computed.
            parts = _inner(one, policy.recompute_first, policy)
            if not parts:
                continue
            judged = kept.judge(_whole(parts), same_conversation=_is_own(parts))
            if judged.is_within(policy):
                first = min(first, start)
                found.append(one)
                entries.append(judged)
                for part in _stretches(parts):
                    kept.keep(part)
    return _JudgedPlan(found, tuple(entries))


def _of_pool(
    plan: ReusePlan,
    index: RadixIndex | None,
    contexts: PromptContexts,
    paths: dict[Any, PrefixMarks],
) -> tuple[list[PathStretch], list[tuple[PathStretch, MovedRun]]]:
    """What the pool supplies, and its moved runs, each with its path."""
    in_place = 0 if index is None else len(plan.blocks) * index.block_size
    runs = plan.moved_runs
    others = [
        (max(row[0], in_place), row[1], row[2] + max(0, in_place - row[0]))
        for row in plan.segments.tolist()
        if row[4] != COMPUTE and row[1] > in_place
    ]
    starts = [run.start for run in runs]
    others = [one for one in others if not _is_inside(one[0], starts, runs)]
    ends = [*(run.end for run in runs), *(end for _, end, _ in others)]
    path_of = _paths_of_pool(plan, index, contexts, paths, ends)
    rest = [PathStretch(0, in_place, 0, _OWN)] if in_place else []
    rest += [PathStretch(start, end, old, path_of.get(end)) for start, end, old in others]
    of_pool = [
        (PathStretch(run.start, run.end, run.old_start, path_of.get(run.end)), run) for run in runs
    ]
    return rest, of_pool


def _is_inside(at: int, starts: Sequence[int], runs: Sequence[MovedRun]) -> bool:
    """Whether a token is of one of some runs, which ascend."""
    number = bisect_right(starts, at) - 1
    return number >= 0 and at < runs[number].end


def _paths_of_pool(
    plan: ReusePlan,
    index: RadixIndex | None,
    contexts: PromptContexts,
    paths: dict[Any, PrefixMarks],
    ends: Sequence[int],
) -> dict[int, object]:
    """Names of the paths that copies which end there come from; their marks are then in ``paths``.

    What is not named has a path that is not known.
    """
    if index is None or not ends:
        return {}
    found: dict[int, object] = {}
    known: list[tuple[int, NDArray[np.uint32]]] = []
    tokens_of = {}
    for end, block in islice(_sources_of(plan, index, ends).items(), _MOST_READ):
        tokens = index.path_tokens(block)
        if tokens is not None:
            tokens_of[end] = block, tokens
    # The longest first: most of the others are the beginnings of one.
    for end, (block, tokens) in sorted(tokens_of.items(), key=lambda one: -len(one[1][1])):
        same = (name for name, path in known if np.array_equal(path[: len(tokens)], tokens))
        name = next(same, None)
        if name is None and len(known) < _MOST_PATHS:
            name = block
            known.append((name, tokens))
            paths[name] = contexts.marks_of(tokens)
        found[end] = name
    return found


def _sources_of(plan: ReusePlan, index: RadixIndex, ends: Sequence[int]) -> dict[int, int]:
    """The blocks that the last tokens before some positions are copied from."""
    size = index.block_size
    own = plan.blocks
    taken = {*own.tolist(), *plan.source_blocks.tolist()}
    num_new = -(-max(ends) // size) - len(own)
    # The plan tells its copies for a table. No block of this one is written.
    free = list(islice((one for one in range(index.num_blocks) if one not in taken), num_new))
    if len(free) < num_new:
        return {}
    table = np.concatenate([own, np.array(free, own.dtype)])
    moves = plan.moves(table, end=max(ends))
    place = {block: number * size for number, block in enumerate(table.tolist())}
    last = {}
    for source, dest, count, _ in moves.tolist():
        last[place[dest // size] + dest % size + count] = source // size
    return {end: last[end] for end in sorted(ends) if end in last}


def _stretches(used: Iterable[_Used]) -> list[PathStretch]:
    """Parts as context of later runs. What was not moved is where the prompt has it."""
    found = []
    for one in used:
        context = one.span.context
        if one.is_moved and context is not None:
            found.append(PathStretch(one.start, one.end, one.old_start, context.turn))
        elif not one.is_moved:
            found.append(PathStretch(one.start, one.end, one.start, _OWN))
    return found


def _whole(parts: Sequence[_Used]) -> PathStretch:
    """A moved run as one; its path is that of its last part, which has those of the others."""
    context = parts[-1].span.context
    path = None if context is None else context.turn
    return PathStretch(parts[0].start, parts[-1].end, parts[0].old_start, path)


def _is_own(parts: Sequence[_Used]) -> bool:
    return all(one.span.context is not None and one.span.context.same_conversation for one in parts)


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
        while number < len(used) and used[number].start < end:
            low, high, span = used[number].start, used[number].end, used[number].span
            if at < low:
                rows.append((at, low, *row[2:]))
            kind = 0 if span.is_exact else APPROXIMATE
            rows.append((low, high, low - span.delta, span.delta, kind, span.hops, 0, span.delta))
            at = high
            number += 1
        if at < end:
            rows.append((at, end, *row[2:]))
    return np.array(rows, dtype=segments.dtype)
