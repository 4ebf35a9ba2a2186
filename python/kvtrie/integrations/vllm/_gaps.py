"""Reuse after gaps: the ranges that requests skip, and the gaps before them.

A gap is computed in a step of its own, at whose end the next range is skipped, or in the step that
skips the range, as a row (`GapRows`).
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter
from typing import TYPE_CHECKING

from kvtrie.integrations._filled_plan import inside
from kvtrie.integrations.vllm import _ranges
from kvtrie.integrations.vllm._vllm import CacheHitSource, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.v1.metrics.stats import PrefixCacheStats
    from vllm.v1.request import Request

    from kvtrie.integrations.vllm._loads import Loads
    from kvtrie.integrations.vllm._ranges import Range
    from kvtrie.integrations.vllm._requests import LiveRequest, Pending
    from kvtrie.integrations.vllm._rows import GapRows
    from kvtrie.integrations.vllm._runners import MovedRequests


class Gaps:
    """Lets requests skip cached segments, and counts what they reuse.

    Attributes:
        resumes: Whether reuse continues after gaps, which only `KvtrieScheduler` can.
        rows: What computes gaps in the step that skips what follows; None: nothing does.
        hit_stats: vLLM's current record of external hits, if it keeps one.
    """

    def __init__(
        self,
        loads: Loads,
        moved: MovedRequests,
        lives: Mapping[str, LiveRequest],
        pending: Mapping[str, Request],
        guarded: Callable[..., object],
    ) -> None:
        self._loads = loads
        self._moved = moved
        self._lives = lives
        self._pending = pending
        self._guarded = guarded
        self.resumes = False
        self.rows: GapRows | None = None
        self.hit_stats: Callable[[], PrefixCacheStats | None] = lambda: None

    @property
    def is_idle(self) -> bool:
        """Whether no request has anything left to copy."""
        return not self._pending

    # --- before a step is sent -----------------------------------------------------------------

    def promise(self, request: Request, pending: Pending) -> None:
        """Extend what a request that is not admitted is promised, as far as rows fill the gaps."""
        start, end = pending.promised
        stop = self._fill(request, pending, end, pending.after_gaps, is_running=False)
        if stop is not None:
            pending.promised = (start, stop)
            del pending.after_gaps[: _first_from(pending.after_gaps, stop)]

    def jump(self, requests: Sequence[Request]) -> None:
        """Skip cached segments that the next step would compute first."""
        if not self._pending:
            return
        for request in requests:
            pending = self._pending_of(request)
            if pending is None or not pending.after_gaps:
                continue
            start, end = pending.after_gaps[0]
            if request.num_computed_tokens == start:
                request.num_computed_tokens = end
                pending.jumped = (start, end)

    def skip(self, request: Request) -> None:
        """Skip the segments of a running request of which rows fill the gaps before."""
        pending = self._pending_of(request)
        if pending is None or not pending.after_gaps or request.status != RequestStatus.RUNNING:
            return
        position = request.num_computed_tokens
        stop = self._fill(request, pending, position, pending.after_gaps, is_running=True)
        if stop is not None:
            start = position if pending.jumped is None else pending.jumped[0]
            pending.jumped = (start, stop)
            request.num_computed_tokens = stop

    def end(self, request: Request, position: int) -> int | None:
        """The end of a gap that a cached segment follows."""
        pending = self._pending_of(request)
        if pending is None:
            return None
        at = _first_from(pending.after_gaps, position + 1)
        return pending.after_gaps[at][0] if at < len(pending.after_gaps) else None

    def _fill(
        self,
        request: Request,
        pending: Pending,
        position: int,
        ranges: Sequence[Range],
        *,
        is_running: bool,
    ) -> int | None:
        """The end of the last range that can be skipped from a position on, with rows before it."""
        if self.rows is None:
            return None
        # No more gaps than rows: there may be thousands.
        first = _first_from(ranges, position)
        ranges = ranges[first : first + self.rows.most + 1]
        if not ranges:
            return None
        count = self.rows.fit(request, position, ranges, is_running=is_running)
        if not count:
            return None
        stop = ranges[count - 1][1]
        pending.rows = _ranges.without((position, stop), ranges[:count])
        return stop

    def _pending_of(self, request: Request) -> Pending | None:
        live = self._lives.get(request.request_id)
        return None if live is None else live.pending

    # --- with the step -------------------------------------------------------------------------

    def admit(
        self, request: Request, live: LiveRequest, pending: Pending, num_external: int
    ) -> None:
        """Copy and compute as many of the promised tokens as vLLM relies on."""
        start, end = pending.promised
        if not num_external:
            pending.rows = []
            return
        self._carry(request, live, pending, (start, start + num_external), most=end)
        # vLLM counts all of them as hits when the connector has returned.
        pending.num_overcounted = sum(last - first for first, last in pending.rows)
        pending.rows = []

    def advance(
        self, request: Request, live: LiveRequest, pending: Pending, *, is_scheduled: bool
    ) -> None:
        """Carry out what the request has skipped, if the step has it; take it back otherwise."""
        if pending.num_overcounted:
            count, pending.num_overcounted = pending.num_overcounted, 0
            self._guarded(self._count, request, live, -count)
        if pending.jumped is None:
            return
        start, end = pending.jumped
        pending.jumped = None
        if is_scheduled:
            copied = self._carry(request, live, pending, (start, end), most=end)
            if copied:
                self._guarded(self._count, request, live, copied)
            del pending.after_gaps[: _first_from(pending.after_gaps, end)]
            self._moved.forward(request)
        elif request.num_computed_tokens == end:
            request.num_computed_tokens = start
        pending.rows = []

    def _carry(
        self, request: Request, live: LiveRequest, pending: Pending, given: Range, *, most: int
    ) -> int:
        """Compute the rows of a range, and copy the rest; return how many tokens are copied."""
        pending.rows = inside(pending.rows, given)
        ranges = _ranges.without(given, pending.rows)
        copied = 0
        if ranges:
            copied = self._loads.add(request, live, pending.plan, ranges, most=most)
        if pending.rows and self.rows is not None:
            self.rows.keep(request, pending.rows)
        return copied

    def _count(self, request: Request, live: LiveRequest, count: int) -> None:
        """Count what vLLM's scheduler, which counts at the admission, does not know of."""
        live.account.tell(request)
        stats = self.hit_stats()
        if stats is None:
            return
        if request.num_preemptions:
            stats.preempted_hits += count
            return
        stats.hits += count
        by_source = stats.hits_by_source
        source = CacheHitSource.EXTERNAL_UNSPECIFIED
        by_source[source] = by_source.get(source, 0) + count


def _first_from(ranges: Sequence[Range], position: int) -> int:
    """The number of the first range that begins at a position or after it."""
    return bisect_left(ranges, position, key=itemgetter(0))
