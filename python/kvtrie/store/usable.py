"""What of the runs of a prompt may be used, and with which labels.

A run is looked at with its header, in terms of the prompt: which of its tokens are asked for, which
of them are exact at that position, and why the rest may not be moved. Nothing here reads or writes
KV.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtrie._core import ReusePolicy
from kvtrie.store.contexts import PrefixMarks, PromptContexts, SpanContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie._core import Item, ReusePlan, TokenSequence
    from kvtrie.store.runs import SpanRun
    from kvtrie.store.store import SpanStore
    from kvtrie.store.value import SpanHeader

Ranges = tuple[tuple[int, int], ...]

_LAXEST: Final = ReusePolicy(max_hops=255, scope="namespace")
_MIN_RUN: Final = 16
# Why a run has no context is counted where it is read.
_COUNTED: Final = ""


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Tokens of a prompt whose KV came from the store.

    Attributes:
        start: First token, a position of the prompt.
        end: One past the last.
        is_exact: Whether it was computed at this position after these very tokens, by exact KV.
        hops: 0 if exact; else those of the KV as it is in the pool.
        delta: Position in the prompt minus the position that it was computed at, by which K is
            rotated (rule D20).
        context: What a moved span was computed after, if `SpanLoader.seek` was asked for it.
    """

    start: int
    end: int
    is_exact: bool
    hops: int
    delta: int
    context: SpanContext | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a prompt needs, and what it allows."""

    gaps: Ranges
    all_gaps: Ranges
    num_tokens: int
    policy: ReusePolicy
    session: str | None
    moved_end: int
    # Of the plan: the first approximate token, the most hops, and approximate tokens.
    planned: tuple[int, int, int]
    items: Sequence[Item]
    # Whether the caller cuts what arrives, and wants nothing after the first range that is missing.
    is_whole: bool = False
    to_first_gap: bool = False
    # Whether the caller judges contexts, and the tokens that make two prompts one conversation.
    contexts: bool = False
    shared_prefix: int = 0


class TurnMarks:
    """The marks of a prompt, and of the prompts that its runs were computed in, as needed."""

    def __init__(self, seq: TokenSequence, runs: Sequence[SpanRun]) -> None:
        self._seq = seq
        self._runs = runs
        self._own: PrefixMarks | None = None
        self._turns: dict[str, PrefixMarks | None] = {}

    def of(self, store: SpanStore, run: SpanRun, header: SpanHeader) -> PrefixMarks | None:
        """Those of the prompt that a run was computed in; why there are none is counted."""
        if header.turn is None or self._turns.get(header.turn) is None:
            found = store.get_context(run, header)
            if header.turn is None or found is None:
                return None
            self._turns[header.turn] = found
        return self._turns[header.turn]

    def own(self, store: SpanStore) -> PrefixMarks:
        """Those of the prompt."""
        if self._own is None:
            ends = (at for run in self._runs for at in (run.start, run.end))
            key = store.mark_key(self._seq.namespace)
            self._own = PrefixMarks.of(key, self._seq[:], ends)
        return self._own

    def told(self, store: SpanStore) -> PromptContexts | None:
        """What the caller compares by; None if no run has marks."""
        turns = {name: one for name, one in self._turns.items() if one is not None}
        if not turns:
            return None
        return PromptContexts(self.own(store), turns, store.mark_key(self._seq.namespace))


def approximate_in(plan: ReusePlan) -> tuple[int, int, int]:
    """Of a plan: its first approximate token, its most hops, and its approximate tokens."""
    segments = plan.segments
    some = segments[segments["class"] == 1]
    first = int(some["start"].min()) if len(some) else int(segments["end"].max(initial=0))
    hops = int(some["hops"].max()) if len(some) else 0
    return first, hops, int((some["end"] - some["start"]).sum())


def pieces_within(
    runs: Sequence[SpanRun], gaps: Sequence[tuple[int, int]]
) -> list[tuple[SpanRun, Ranges]]:
    """Runs that have a part in gaps, with that part, as `within` counts it."""
    ends = [high for _, high in gaps]
    return [(run, part) for run in runs if (part := within(run, gaps, ends))]


def within(run: SpanRun, gaps: Sequence[tuple[int, int]], ends: Sequence[int]) -> Ranges:
    """What of a run is in gaps, which end at ``ends``, counted from the run's first token."""
    found = []
    for number in range(bisect_right(ends, run.start), len(gaps)):
        low, high = gaps[number]
        if low >= run.end:
            break
        found.append((max(low, run.start) - run.start, min(high, run.end) - run.start))
    return tuple(found)


def without(gaps: Ranges, spans: Sequence[PlacedSpan]) -> Ranges:
    """What is left of gaps; both ascend."""
    left: list[tuple[int, int]] = []
    number = 0
    for low, high in gaps:
        at = low
        while number < len(spans) and spans[number].end <= high:
            if at < spans[number].start:
                left.append((at, spans[number].start))
            at = spans[number].end
            number += 1
        if at < high:
            left.append((at, high))
    return tuple(left)


def usable_spans(
    store: SpanStore,
    asked: Asked,
    run: SpanRun,
    part: Ranges,
    header: SpanHeader,
    contexts: TurnMarks | None = None,
) -> list[PlacedSpan]:
    """What may be used of a run's ranges, with labels. What may not is counted by reason."""
    judged: _Judgement | None = None
    if header.is_at(run):
        exact = [(low, min(high, header.exact_until), True, 0) for low, high in part]
        rest = [(max(low, header.exact_until), high, False, header.hops) for low, high in part]
        found = [one for one in (*exact, *rest) if one[0] < one[1]]
    else:
        edges = [(low, min(high, header.exact_until), 1) for low, high in part]
        edges += [(max(low, header.exact_until), high, header.hops + 1) for low, high in part]
        found = [(low, high, False, hops) for low, high, hops in edges if low < high]
    usable = []
    for low, high, is_exact, hops in sorted(found):
        start, end, delta = run.start + low, run.start + high, run.position - header.position
        context = None
        if not is_exact:
            was_moved = not header.is_at(run)
            if was_moved:
                end = min(end, asked.moved_end)
            why = _refusal(asked, run, header, end - start, hops, was_moved=was_moved)
            if why is None and was_moved:
                judged = judged or _judge(store, asked, run, header, contexts)
                why = judged.why
                if why is None and judged.has_context and header.turn is not None:
                    context = SpanContext(
                        header.turn,
                        header.start + low,
                        judged.same_conversation,
                        low < header.exact_until,
                    )
            if why is not None:
                if why != _COUNTED:
                    store.count(why)
                continue
            if was_moved and not asked.is_whole:
                start += asked.policy.recompute_first
                end -= asked.policy.recompute_last
        if start < end:
            usable.append(PlacedSpan(start, end, is_exact, hops, delta, context))
    return usable


@dataclass(frozen=True, slots=True)
class _Judgement:
    """Whether a run may move by what it was computed after; ``why`` not."""

    why: str | None
    same_conversation: bool = False
    has_context: bool = False


def _judge(
    store: SpanStore, asked: Asked, run: SpanRun, header: SpanHeader, contexts: TurnMarks | None
) -> _Judgement:
    """Whether a moved run is in scope, and its context is known where it has to be."""
    policy = asked.policy
    is_own = asked.session is not None and header.session == asked.session
    wants_prefix = not is_own and asked.shared_prefix > 0 and header.turn is not None
    marks = None
    if contexts is not None and (asked.contexts or (wants_prefix and policy.scope != "namespace")):
        marks = contexts.of(store, run, header)
        if marks is None and asked.contexts:
            return _Judgement(_COUNTED)
    if marks is not None and contexts is not None and wants_prefix:
        is_own = marks.num_common(contexts.own(store)) >= asked.shared_prefix
    if policy.scope == "conversation" and not is_own:
        return _Judgement("scope")
    has_limits = (
        policy.max_cuts is not None or policy.max_lost_context < 1 or policy.max_new_context < 1
    )
    if has_limits and not asked.contexts:
        # Nobody compares which tokens were before the run.
        return _Judgement("context")
    return _Judgement(None, is_own, has_context=asked.contexts)


def _refusal(
    asked: Asked,
    run: SpanRun,
    header: SpanHeader,
    num_tokens: int,
    hops: int,
    *,
    was_moved: bool,
) -> str | None:
    """Why approximate KV may not be used; None if it may."""
    policy = asked.policy
    if not policy.approximate:
        return "not_exact"
    if hops > policy.max_hops:
        return "hops"
    if set(policy.forbid_kinds) & {*run.kinds, *header.kinds}:
        return "kinds"
    if header.exact_until < header.num_tokens:
        built = header.policy or _LAXEST
        if not built.is_at_least_as_strict_as(policy):
            return "laxer_policy"
    if not was_moved:
        return None
    if not asked.is_whole and num_tokens < (policy.min_run or _MIN_RUN):
        return "short"
    return "repair" if policy.recompute_share and not asked.is_whole else None
