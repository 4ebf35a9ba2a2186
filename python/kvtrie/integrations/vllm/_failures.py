"""What a failed copy has touched: which blocks hold KV that was read or computed from it.

With a step in flight, a failure becomes known after the next step was scheduled. By then other
requests may share the blocks, continue after them or copy from them, and some of these may have
ended or been preempted. So steps are remembered until their output is known.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvtrie.integrations.vllm._metadata import Load

# vLLM has two steps in flight at most; a step whose output never comes must not be kept for ever.
_MAX_STEPS: Final = 64
_SLOTS: Final = ("source_slot", "dest_slot", "num_tokens")


@dataclass(slots=True)
class _CopyStep:
    """Tables of the requests that may read what this or an earlier step copies, and its copies."""

    tables: list[Sequence[int]]
    loads: list[Load]

    def copies(self, size: int) -> Iterator[tuple[range, range]]:
        """Blocks read and written by each run of tokens."""
        for moves in (load.moves for load in self.loads if load.moves is not None):
            for source, dest, count in moves[list(_SLOTS)].tolist():
                yield (
                    range(source // size, (source + count - 1) // size + 1),
                    range(dest // size, (dest + count - 1) // size + 1),
                )


_NOTHING: Final = _CopyStep([], [])


class Failures:
    """Follows copies until their outcome is known.

    Args:
        manager: Whose requests these are.
        block_size: Tokens of a block.
        follows: Whether KV is copied here at all, and `scheduled` called.
    """

    def __init__(self, manager: KVCacheManager, block_size: int, *, follows: bool) -> None:
        self._manager = manager
        self._block_size = block_size
        # Whether steps are told. Else readers would be remembered for ever.
        self._follows = follows
        self._steps: deque[_CopyStep] = deque(maxlen=_MAX_STEPS)
        # Requests that were admitted, or got a copy, since the oldest of these steps.
        self._readers: set[str] = set()

    def admitted(self, request_id: str) -> None:
        """A request may share a block that is being copied into."""
        if self._follows:
            self._readers.add(request_id)

    def scheduled(self, output: SchedulerOutput, loads: Sequence[Load]) -> None:
        """Remember a step that is sent to the workers."""
        if not loads and not any(step.loads for step in self._steps):
            # Most steps: no copy is under way.
            self._readers.clear()
            self._steps.append(_NOTHING)
            return
        tables = [
            self._manager.get_block_ids(request_id)[0]
            for request_id in output.num_scheduled_tokens
            if request_id in self._readers
        ]
        self._steps.append(_CopyStep(tables, list(loads)))

    def done(self) -> None:
        """The oldest step's output is known, and its failures are handled."""
        if self._steps:
            self._steps.popleft()

    def touched(self, block_ids: Iterable[int], tables: Iterable[Sequence[int]]) -> set[int]:
        """Blocks with KV from failed blocks, and all blocks after them in any table.

        ``tables`` are those of the running requests.
        """
        touched = set(block_ids)
        readers = [*tables, *(table for step in self._steps for table in step.tables)]
        copies = [copy for step in self._steps for copy in step.copies(self._block_size)]
        before = -1
        while before != len(touched):
            before = len(touched)
            for table in readers:
                first = first_of(table, touched)
                if first is not None:
                    touched.update(table[first:])
            for sources, dests in copies:
                if not touched.isdisjoint(sources):
                    touched.update(dests)
        return touched


def first_of(table: Sequence[int], block_ids: Collection[int]) -> int | None:
    """The position in a table of the first of some blocks."""
    return next((at for at, one in enumerate(table) if one in block_ids), None)
