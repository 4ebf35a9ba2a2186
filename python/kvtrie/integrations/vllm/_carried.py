"""What a copy takes along in the other groups of KV blocks, so that vLLM can go on after it.

vLLM continues a request only where every group has what the next token reads: a group with a
sliding window of W tokens the last W - 1, another group of full attention all of them. So the
copies of a run end where each group has a source for that, at the run's old position. A window's
blocks are written whole, because vLLM may hit them later: from the begin of the block in which the
window begins. Where a group has none, the run is cut, to nothing if need be, and its other tokens
are computed. No window is rebuilt: vLLM cannot compute the layers of one group alone, and a window
that is read without being there would be other KV than that of any prompt.

A block of another group is found by vLLM's hash of the block of full attention at the same place,
which names all tokens before it, and the lineage of approximate KV. It counts only if it is known
to be written: vLLM gives a block its hash before the step that writes it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from kvtrie.integrations._filled_plan import APPROXIMATE
from kvtrie.integrations.vllm import _ranges
from kvtrie.integrations.vllm._carried_copies import NOTHING, Carried, CarriedCopy
from kvtrie.integrations.vllm._sources import used_by
from kvtrie.integrations.vllm._vllm import get_block_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtrie._core import ReusePlan, ReusePolicy
    from kvtrie.integrations._filled_plan import FilledPlan
    from kvtrie.integrations.vllm._ranges import Range
    from kvtrie.integrations.vllm._requests import LiveRequest
    from kvtrie.integrations.vllm._sources import Sources


class _WrittenBlock(NamedTuple):
    """A written block: its hash in vLLM, the hops of its KV, and what it was built under."""

    block: int
    block_hash: bytes
    hops: int
    grade: ReusePolicy | None


class _BlockTable:
    """All blocks that a request has had, by group, also those that have left its window."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [list(numbers) for numbers in groups]
        self.num_noted = 0

    def extend(self, groups: Sequence[Sequence[int]]) -> None:
        for mine, numbers in zip(self.groups, groups, strict=True):
            mine.extend(numbers)


class Carrier:
    """Knows the written blocks of a model's other groups, and carries them with copies.

    Args:
        manager: vLLM's cache manager.
        sources: The blocks of full attention that copies come from.
        block_size: Tokens of a block, in all groups.
        windows: The window of each other group; None: full attention.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        sources: Sources,
        block_size: int,
        windows: Mapping[int, int | None],
    ) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._sources = sources
        self.block_size = block_size
        self._windows = windows
        self._known: dict[int, dict[bytes, _WrittenBlock]] = {group: {} for group in windows}
        # The group and the hash that a block is known by.
        self._names: dict[int, tuple[int, bytes]] = {}
        self._tables: dict[str, _BlockTable] = {}

    def __len__(self) -> int:
        """The number of known blocks."""
        return len(self._names)

    # --- what is written -----------------------------------------------------------------------

    def step(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, Request],
        lives: Mapping[str, LiveRequest],
    ) -> None:
        """Follow the blocks of requests: a window's leave the table as soon as they are written."""
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = _BlockTable(new.block_ids)
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[at]
            if blocks is None:
                continue
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = _BlockTable(blocks)
            elif request_id in self._tables:
                self._tables[request_id].extend(blocks)
        for request_id, table in list(self._tables.items()):
            live = lives.get(request_id)
            if live is None:
                del self._tables[request_id]
            else:
                self._note(requests[request_id], live, table)

    def ended(self, request: Request, live: LiveRequest) -> None:
        """Take note of the last blocks of a request, before vLLM frees them."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._note(request, live, table)

    def _note(self, request: Request, live: LiveRequest, table: _BlockTable) -> None:
        """Take note of a request's blocks that are written since."""
        # Tokens in flight are not written yet.
        done = request.num_computed_tokens - request.num_in_flight_tokens
        first, last = table.num_noted, min(done // self.block_size, len(request.block_hashes))
        if first >= last:
            return
        table.num_noted = last
        now = self._manager.get_block_ids(request.request_id)
        for group in self._windows:
            numbers = table.groups[group][first:last]
            fresh = []
            for place, number in enumerate(numbers, first):
                block = self._pool.blocks[number]
                # One that has left the table may be another request's by now, which has not
                # written it.
                is_mine = place < len(now[group]) and now[group][place] == number
                if not block.is_null and (is_mine or block.ref_cnt == 0):
                    fresh += self._learn(group, block, request.block_hashes[place], live, place)
            # Take and return a reference at once: the pool reports when it hands the block out.
            self._pool.touch(fresh)
            self._pool.unpin_blocks(fresh, on_reuse=self._on_reuse)

    def _learn(
        self, group: int, block: KVCacheBlock, plain: bytes, live: LiveRequest, place: int
    ) -> list[KVCacheBlock]:
        """Know a block by its hash, unless it has another, or a better one is known."""
        if block.block_hash is None or get_block_hash(block.block_hash) != plain:
            return []
        hops, grade = 0, None
        if not live.is_exact_until((place + 1) * self.block_size):
            hops = live.hops_of(place, self.block_size)
            grade = live.grade
        now = self._valid(group, plain)
        if now is not None and now.hops <= hops:
            return []
        self._known[group][plain] = _WrittenBlock(block.block_id, block.block_hash, hops, grade)
        self._names[block.block_id] = (group, plain)
        return [block]

    def reset(self) -> None:
        for known in self._known.values():
            known.clear()
        self._names.clear()

    def _on_reuse(self, block: KVCacheBlock) -> None:
        group, plain = self._names.pop(block.block_id, (None, b""))
        if group is not None:
            known = self._known[group].get(plain)
            if known is not None and known.block == block.block_id:
                del self._known[group][plain]

    def _valid(self, group: int, plain: bytes) -> _WrittenBlock | None:
        known = self._known[group].get(plain)
        if known is None or self._pool.blocks[known.block].block_hash != known.block_hash:
            return None
        return known

    # --- what is carried -----------------------------------------------------------------------

    def cut(
        self, plan: ReusePlan | FilledPlan, promised: Range, policy: ReusePolicy
    ) -> tuple[Range, Carried]:
        """The beginning of a range after which all groups have what the next token reads."""
        start, end = promised
        rows = self._rows(plan, start, end)
        search = _CarrySearch(self, plan, rows, policy)
        while start < end:
            lack = next((one for one in self._lacks(search, start, end) if one is not None), None)
            if lack is None:
                break
            end = max(start, lack)
        if end - start < _ranges.LEAST_COPIED:
            return (start, start), NOTHING
        pieces: dict[int, Sequence[CarriedCopy]] = {}
        for group, window in self._windows.items():
            low = self._first(window, start, end)
            pieces[group] = tuple(
                piece
                for at in search.inside(low, end)
                if (piece := search.piece(group, at)) is not None
            )
        blocks = {
            piece.source_slot // self.block_size for group in pieces.values() for piece in group
        }
        return (start, end), Carried(pieces, frozenset(blocks))

    def _first(self, window: int | None, start: int, end: int) -> int:
        """The first token that a group needs KV of, where the first computed one is at ``end``."""
        if window is None:
            return start
        return max(start, (end - window + 1) // self.block_size * self.block_size)

    def _lacks(self, search: _CarrySearch, start: int, end: int) -> Iterator[int | None]:
        """For each group, where a range must end because of what it lacks; None: nothing."""
        for group, window in self._windows.items():
            low = self._first(window, start, end)
            inside = search.inside(low, end)
            if search.num_tokens(inside) < end - low:
                # A plan that does not fill the range.
                yield low
            # A window may do without what is before it: what it lacks last counts.
            yield (
                search.first_lack(group, inside)
                if window is None
                else next(
                    (
                        search.rows[at].position
                        for at in reversed(inside)
                        if search.piece(group, at) is None
                    ),
                    None,
                )
            )

    def _rows(self, plan: ReusePlan | FilledPlan, start: int, end: int) -> list[CarriedCopy]:
        """The copies of a plan in the group of full attention, ascending, each in one block."""
        count = -(-end // self.block_size)
        used = set(used_by(plan))
        spare = (one for one in range(self._pool.num_gpu_blocks) if one not in used)
        # Instead of blocks that the request does not have yet.
        table = list(islice(spare, count))
        if len(table) < count:
            return []
        places = {number: place for place, number in enumerate(table)}
        moves = _ranges.moves(plan, table, self.block_size, [(start, end)])
        rows = []
        for source, dest, num_tokens, delta in moves.tolist():
            number, offset = divmod(dest, self.block_size)
            position = places[number] * self.block_size + offset
            low, high = max(position, start), min(position + num_tokens, end)
            if low < high:
                rows.append(CarriedCopy(low, source + low - position, high - low, delta))
        return sorted(rows)

    def find(
        self, group: int, source: int, policy: ReusePolicy, hops: int | None
    ) -> _WrittenBlock | None:
        """The block of a group that holds the tokens of a block of full attention.

        ``hops``: those of its KV at most; None: it must be exact.
        """
        block_hash = self._sources.hash_of(source)
        if block_hash is None:
            return None
        known = self._valid(group, get_block_hash(block_hash))
        if known is None:
            return None
        if known.grade is None:
            return known
        if hops is None or known.hops > hops:
            return None
        return known if known.grade.is_at_least_as_strict_as(policy) else None


class _CarrySearch:
    """The copies of one plan, and what other groups have at their sources."""

    def __init__(
        self,
        carrier: Carrier,
        plan: ReusePlan | FilledPlan,
        rows: list[CarriedCopy],
        policy: ReusePolicy,
    ) -> None:
        self.rows = rows
        self._carrier = carrier
        self._policy = policy
        self._positions = [row.position for row in rows]
        segments = plan.segments.tolist()
        self._starts = [segment[0] for segment in segments]
        # The hops that a window may have had before: moved KV has one more than its source.
        self._hops = [
            max(segment[5] - 1, 0) if segment[4] == APPROXIMATE else None for segment in segments
        ]
        self._found: dict[tuple[int, int], CarriedCopy | None] = {}
        # Tokens of the copies before each.
        self._sums = [0, *accumulate(row.num_tokens for row in rows)]
        # By group, the number of its first copy without a source; all before it have one.
        self._firsts: dict[int, int] = {}

    def inside(self, start: int, end: int) -> range:
        """The numbers of copies with tokens in a range."""
        first = max(0, bisect_right(self._positions, start) - 1)
        last = bisect_right(self._positions, end - 1)
        if first < last:
            row = self.rows[first]
            first += row.position + row.num_tokens <= start
        return range(first, last)

    def num_tokens(self, inside: range) -> int:
        """Tokens of these copies."""
        return self._sums[inside.stop] - self._sums[inside.start]

    def first_lack(self, group: int, inside: range) -> int | None:
        """Where the first copy without a source is, of copies that always begin with the same."""
        at = self._firsts.get(group, inside.start)
        while at < inside.stop and self.piece(group, at) is not None:
            at += 1
        self._firsts[group] = at
        return self.rows[at].position if at < inside.stop else None

    def piece(self, group: int, at: int) -> CarriedCopy | None:
        """A copy in another group; None: it has no source."""
        if (group, at) not in self._found:
            self._found[group, at] = self._piece(group, self.rows[at])
        return self._found[group, at]

    def _piece(self, group: int, row: CarriedCopy) -> CarriedCopy | None:
        size = self._carrier.block_size
        number, offset = divmod(row.source_slot, size)
        hops = self._hops[bisect_right(self._starts, row.position) - 1]
        known = self._carrier.find(group, number, self._policy, hops)
        if known is None:
            return None
        return row._replace(source_slot=known.block * size + offset)
