"""Runs: the pieces of a prompt that are stored, cut so that a prompt names them by itself.

A prompt is cut where messages and sections begin and end, and a long piece every 256 tokens from
its start. Deleting a section, reordering messages or appending changes no other piece.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from kvtrie.store.keys import items_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvtrie._core import Span, TokenSequence
    from kvtrie.store.keys import StoreKey, TenantKey
    from kvtrie.tags import Stream, TurnPolicy

LONGEST: Final = 256


@dataclass(frozen=True, slots=True)
class SpanRun:
    """A run of a prompt's tokens. `SpanStore.runs` makes it.

    Attributes:
        start: First token, its number in the prompt.
        end: One past the last.
        position: Of the first token, by which K is rotated: ``start``, unless items before it say
            how many positions they take.
        name: The run's key in the store.
        prefix: Digest of all tokens before ``start``.
        key: Of the tenant.
        kinds: Kinds of the spans that it overlaps, sorted.
    """

    start: int
    end: int
    position: int
    name: str
    prefix: str
    key: TenantKey = field(repr=False, compare=False)
    kinds: tuple[str, ...] = ()

    @property
    def tenant(self) -> str:
        """The tenant's part of ``name``."""
        return self.key.name

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start


def pieces(
    num_tokens: int, borders: Iterable[int], *, longest: int = LONGEST
) -> list[tuple[int, int]]:
    """Cut a prompt into ranges.

    Args:
        num_tokens: Length of the prompt.
        borders: Positions where it is cut, in any order; 0 and the end are borders.
        longest: Tokens of a range at most.

    Raises:
        ValueError: A border is outside the prompt, or ``longest`` is below 1.

    Example:
        >>> pieces(620, [20, 25, 600])
        [(0, 20), (20, 25), (25, 281), (281, 537), (537, 600), (600, 620)]
    """
    if longest < 1:
        msg = f"pieces: longest is {longest}; it must be at least 1"
        raise ValueError(msg)
    marks = sorted({0, num_tokens, *borders})
    if marks[0] < 0 or marks[-1] > num_tokens:
        msg = f"pieces: borders {marks[0]} to {marks[-1]} are not in a prompt of {num_tokens}"
        raise ValueError(msg)
    return [
        (at, min(at + longest, end))
        for start, end in pairwise(marks)
        for at in range(start, end, longest)
    ]


def name_runs(
    key: StoreKey,
    space: bytes,
    seq: TokenSequence,
    borders: Iterable[int],
    spans: Sequence[Span],
    *,
    longest: int,
) -> list[SpanRun]:
    """Cut and name the runs of a sequence; ``space`` is what KV depends on besides."""
    ranges = pieces(len(seq), borders, longest=longest)
    tenant = key.tenant(seq.namespace.salt)
    tokens, items = seq[:], seq.items
    prefixes = tenant.prefixes(space, tokens, items, [start for start, _ in ranges])
    kinds = _kinds(ranges, spans)
    runs, first, shift = [], 0, 0
    for (start, end), prefix, of_run in zip(ranges, prefixes, kinds, strict=True):
        while first < len(items) and items[first].end <= start:
            shift += (items[first].positions or 0) - (items[first].num_tokens or 0)
            first += 1
        last = first
        while last < len(items) and items[last].start < end:
            last += 1
        said = items_of(items[first:last], start, end)
        name = tenant.run_name(space, tokens[start:end], said)
        runs.append(SpanRun(start, end, start + shift, name, prefix, tenant, of_run))
    return runs


def _kinds(ranges: Sequence[tuple[int, int]], spans: Sequence[Span]) -> Iterator[tuple[str, ...]]:
    """The kinds of the spans that overlap each of ascending ranges."""
    opening = deque(sorted((one.start, one.end, one.kind) for one in spans if one.start < one.end))
    closing: list[tuple[int, str]] = []
    active: Counter[str] = Counter()
    for start, end in ranges:
        while opening and opening[0][0] < end:
            _, last, kind = opening.popleft()
            heapq.heappush(closing, (last, kind))
            active[kind] += 1
        while closing and closing[0][0] <= start:
            active[heapq.heappop(closing)[1]] -= 1
        yield tuple(sorted(+active))


def borders_of(stream: Stream) -> list[int]:
    """Where a stream's sections begin and end, and where what a template deletes of them does."""
    return sorted(
        {
            at
            for one in stream.sections
            for at in (one.span.start, one.span.end, *one.dropped)
            if at <= len(stream)
        }
    )


def worth_keeping(runs: Iterable[SpanRun], stream: Stream, policy: TurnPolicy) -> list[SpanRun]:
    """The runs of which later prompts may have all tokens.

    Left out is every run with tokens that the template deletes, or that the policy evicts first or
    drops, in any turn. Reasoning of a turn that is open counts as deleted, unless the policy
    preserves it.

    Args:
        runs: Those of the sequence that the stream has read.
        stream: The sections of the sequence.
        policy: What happens to the sections of a turn.
    """
    gone = gone_of(stream, policy)
    return [run for run in runs if not gone.has_some_of(run.start, run.end)]


class Gone:
    """Ranges of a sequence that later prompts do not have."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        # Where each begins, and the furthest end of all that begin no later.
        found = sorted(one for one in ranges if one[0] < one[1])
        self._starts = [start for start, _ in found]
        self._ends = list(accumulate((end for _, end in found), max))

    def has_some_of(self, start: int, end: int) -> bool:
        """Whether a token of a range is gone."""
        before = bisect_left(self._starts, end)
        return before > 0 and self._ends[before - 1] > start


def gone_of(stream: Stream, policy: TurnPolicy) -> Gone:
    """What `worth_keeping` leaves out."""
    what = policy.decide(stream, all_turns=True)
    gone = [*what.evict_first, *what.drop]
    if policy.thinking != "preserved" and stream.tagger.format.boundary != "never":
        gone += [one.dropped for one in stream.sections if one.kind == "reasoning"]
        if stream.open is not None and stream.open.kind == "reasoning":
            gone.append((stream.open.start, len(stream)))
    return Gone(gone)
