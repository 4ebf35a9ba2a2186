"""The copies that the next step takes along."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.integrations._asked import named
from kvtrie.integrations._filled_plan import APPROXIMATE, FilledPlan, common
from kvtrie.integrations.vllm import _ranges
from kvtrie.integrations.vllm._metadata import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvtrie._core import ReusePlan
    from kvtrie.integrations.vllm._failures import Failures
    from kvtrie.integrations.vllm._ranges import Range
    from kvtrie.integrations.vllm._requests import LiveRequest
    from kvtrie.integrations.vllm._stats import Counts


class Loads:
    """Collects copies, and counts what they copy.

    Attributes:
        moved: Called for each range of approximate KV, with its request and hops; None: for none.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        block_size: int,
        counts: Counts,
        failures: Failures,
        surprise: Callable[..., None],
        *,
        group: int = 0,
    ) -> None:
        self._manager = manager
        self._group = group
        self._block_size = block_size
        self._counts = counts
        self._failures = failures
        self._surprise = surprise
        self._loads: list[Load] = []
        self.moved: Callable[[Request, int, int, int], None] | None = None

    def __len__(self) -> int:
        return len(self._loads)

    def take(self) -> list[Load]:
        loads, self._loads = self._loads, []
        return loads

    def add(
        self,
        request: Request,
        live: LiveRequest,
        plan: ReusePlan | FilledPlan,
        ranges: Sequence[Range],
        *,
        most: int,
    ) -> int:
        """Copy the tokens of ranges, on which vLLM relies from now on, ascending.

        If they cannot be copied, such as those after ``most``, all are reported as a failed copy,
        with what is between them. Returns how many are copied.
        """
        start, end = ranges[0][0], ranges[-1][1]
        self._failures.admitted(request.request_id)
        tables = self._manager.get_block_ids(request.request_id)
        ids = tables[self._group]
        blocks = tuple(ids[start // self._block_size : -(-end // self._block_size)])
        try:
            if end > most:
                msg = f"vLLM expects tokens [{start}, {end}); [{start}, {most}) were promised"
                raise RuntimeError(msg)  # noqa: TRY301 - logged and counted like other errors
            moves = _ranges.moves(plan, ids, self._block_size, ranges)
            others = self._carried(live, tables, (start, end), moves.dtype)
        except Exception:
            self._surprise("the copies of request %s failed", named(request.request_id))
            self._loads.append(Load(None, blocks, request_id=request.request_id))
            return 0
        stored: list[Range] = []
        ticket = 0
        if isinstance(plan, FilledPlan):
            stored = [(low, high) for low, high, _ in common(ranges, plan.stored)]
            ticket = plan.ticket
        first = start // self._block_size * self._block_size
        loaded = tuple(stored), request.request_id, first, ticket
        self._loads.append(Load(moves, blocks, *loaded, others))
        if live.pending is not None:
            live.pending.is_read = True
        rows = plan.segments
        low, high = (
            np.searchsorted(rows["end"], start, "right"),
            np.searchsorted(rows["start"], end),
        )
        segments = rows[low:high].tolist()
        bounds = [(segment[0], segment[1]) for segment in segments]
        copied = list(common(ranges, bounds))
        for first, last, number in copied:
            is_moved = segments[number][4] == APPROXIMATE
            self._counts.add("tokens_moved" if is_moved else "tokens_exact", last - first)
            live.account.copy(first, last, is_approximate=is_moved)
            if is_moved:
                hops = segments[number][5]
                live.moved.append((first, last, hops))
                if self.moved is not None:
                    self.moved(request, first, last, hops)
        for first, last, at in common(stored, [one[:2] for one in copied]):
            is_moved = segments[copied[at][2]][4] == APPROXIMATE
            name = "store_tokens_moved" if is_moved else "store_tokens_exact"
            self._counts.add(name, last - first)
        return sum(last - first for first, last in ranges)

    def _carried(
        self,
        live: LiveRequest,
        tables: Sequence[Sequence[int]],
        given: Range,
        dtype: np.dtype[np.void],
    ) -> tuple[tuple[int, NDArray[np.void]], ...]:
        """The copies in other groups of blocks."""
        if live.pending is None:
            return ()
        null = self._manager.block_pool.null_block.block_id
        return tuple(live.pending.carried.moves(tables, self._block_size, null, given, dtype))
