"""Every policy at every pool size, as numbers that can be printed, drawn or written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.replay import indexed, prefix
from kvtrie.replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.replay.trace import LogGaps, Trace

NOT_VISIBLE: Final = "moved runs not visible"
NOT_MARKED: Final = "reasoning not marked"
NOT_KNOWN: Final = "not known"
_SIZES: Final = 10

POLICIES: Final = {
    "prefix": "prefix, LRU",
    "dead_first": "dead reasoning first",
    "kvtrie": "kvtrie",
    "optimum": "offline optimum",
}
"""Fields of a `PoolRow`, as they are called in tables and pictures."""


@dataclass(frozen=True, slots=True)
class ReuseFigures:
    """What a policy finds, in prompt tokens summed over all requests.

    Attributes:
        exact: Found as exact KV.
        approximate: Reused as moved runs, and KV that was built from them. None where the trace
            does not show moved runs, and 0 for a policy that moves none.
        computed: The rest of the prompts; what moved runs would save is in it where the trace does
            not show them.
        hit_rate: The share of prompt tokens that are not computed.
    """

    exact: int
    approximate: int | None
    computed: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class PoolRow:
    """All policies in a pool of one size.

    Attributes:
        num_blocks: Blocks in the pool.
        num_tokens: Tokens that fill it.
        prefix: Prefix reuse, least recently used first.
        dead_first: The same, dead reasoning first. None where the trace marks no reasoning.
        kvtrie: kvtrie's index.
        optimum: The offline optimum of prefix reuse.
    """

    num_blocks: int
    num_tokens: int
    prefix: ReuseFigures
    dead_first: ReuseFigures | None
    kvtrie: ReuseFigures
    optimum: ReuseFigures


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """A replayed trace.

    Attributes:
        path: Its file.
        format: The format of the file.
        synthetic: The overlay that made replies and marked reasoning, or ``""``.
        block_size: Tokens per block.
        num_requests: Requests that were replayed.
        prompt_tokens: Tokens of all prompts.
        distinct_tokens: Tokens of all distinct full blocks: a pool of this size evicts nothing.
        shows_moved_runs: Whether the trace shows moved runs.
        marks_reasoning: Whether it marks reasoning that will be dropped, by itself or by an
            overlay.
        reasoning: How that is known, or why it is not, in a sentence, or ``""``.
        gaps: What a recorder's log does not have; None for other formats.
        tokens_are: What the tokens are where they are no model's, or ``""``.
        bytes_per_token: Of the model's KV, or None.
        rows: One per pool size.
        unlimited: Prefix reuse in a pool without limits.
    """

    path: str
    format: str
    synthetic: str
    block_size: int
    num_requests: int
    prompt_tokens: int
    distinct_tokens: int
    shows_moved_runs: bool
    marks_reasoning: bool
    reasoning: str
    gaps: LogGaps | None
    tokens_are: str
    bytes_per_token: int | None
    rows: tuple[PoolRow, ...]
    unlimited: ReuseFigures

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document; sizes are in tokens."""
        return asdict(self)


def default_sizes(trace: Trace) -> tuple[int, ...]:
    """Ten sizes of pools in blocks: from the longest request to all distinct blocks.

    Raises:
        TraceError: As `replay`.
    """
    least, most = _least(trace), max(trace.num_ids, 1)
    sizes = np.geomspace(least, max(least, most), _SIZES).round().astype(int)
    return tuple(sorted({least, most, *sizes.tolist()} - {0}))


def replay(
    trace: Trace,
    sizes: Sequence[int] | None = None,
    *,
    min_run: int = 16,
    bytes_per_token: int | None = None,
    step: Callable[[int, int, str], None] | None = None,
) -> TrafficReport:
    """Replay a trace with every policy.

    Args:
        trace: The requests.
        sizes: Blocks of each pool. None: `default_sizes`.
        min_run: The shortest run that kvtrie moves, in tokens.
        bytes_per_token: For the report.
        step: Called after each step with the steps done, all steps, and what was done.

    Raises:
        TraceError: A pool is too small for one of the requests, or there is no request.
        ValueError: ``min_run`` is out of range.
    """
    least = _least(trace)
    sizes = default_sizes(trace) if sizes is None else sizes
    for size in sizes:
        if size < least:
            longest = trace.longest
            reason = (
                f"the request has {len(longest.cached)} blocks of {trace.block_size} tokens, and "
                f"a pool of {size} blocks does not hold them"
            )
            raise trace.error(longest, reason)
    steps = len(sizes) + 1
    say = step or (lambda _done, _all, _text: None)
    counted, uses = prefix.runs(trace), prefix.next_uses(trace)
    say(1, steps, "uses of blocks")
    rows = []
    for number, size in enumerate(sizes):
        rows.append(_row(trace, size, counted, uses, min_run))
        say(number + 2, steps, f"a pool of {size * trace.block_size:,} tokens")
    return TrafficReport(
        path=trace.path,
        format=trace.format,
        synthetic=trace.synthetic,
        block_size=trace.block_size,
        num_requests=len(trace.requests),
        prompt_tokens=_prompts(trace),
        distinct_tokens=trace.num_ids * trace.block_size,
        shows_moved_runs=trace.shows_tokens,
        marks_reasoning=trace.marks_reasoning,
        reasoning=trace.reasoning,
        gaps=trace.gaps,
        tokens_are=trace.tokens_are,
        bytes_per_token=bytes_per_token,
        rows=tuple(rows),
        unlimited=_found(trace, prefix.unlimited(trace, counted)),
    )


def _row(
    trace: Trace,
    size: int,
    counted: prefix.Runs,
    uses: Sequence[Sequence[tuple[int, int]]],
    min_run: int,
) -> PoolRow:
    dead_first = None
    if trace.marks_reasoning:
        dead_first = _found(trace, indexed.exact(trace, size, dead_first=True))
    if trace.shows_tokens:
        ours = _found(trace, *indexed.planned(trace, size, min_run))
    else:
        ours = _found(trace, indexed.exact(trace, size, dead_first=False), None)
    return PoolRow(
        num_blocks=size,
        num_tokens=size * trace.block_size,
        prefix=_found(trace, prefix.lru(trace, counted, size)),
        dead_first=dead_first,
        kvtrie=ours,
        optimum=_found(trace, prefix.optimum(trace, uses, size)),
    )


def _found(trace: Trace, exact: int, approximate: int | None = 0) -> ReuseFigures:
    prompts = _prompts(trace)
    computed = prompts - exact - (approximate or 0)
    return ReuseFigures(exact, approximate, computed, 1 - computed / prompts)


def _prompts(trace: Trace) -> int:
    return sum(one.num_tokens for one in trace.requests)


def _least(trace: Trace) -> int:
    if not trace.requests:
        raise TraceError(trace.path, None, "there is no request")
    return max(len(trace.longest.cached), 1)
