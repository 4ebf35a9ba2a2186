"""Sources of copies, kept until the step that reads them has run.

Without other connectors, a block that the pool hands out again is written by a later step, after
the copy. Another connector writes at once, on a stream of its own.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# vLLM has two steps in flight at most; blocks of one whose output never comes are not lost.
_MAX_STEPS: Final = 64


class Held:
    """References to blocks, released with the steps in flight; at once unless it is ``on``."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._steps: deque[list[KVCacheBlock]] = deque()
        self.on = False

    def begin_step(self) -> None:
        """A step goes to the workers; releases until the next one wait for its output."""
        if not self.on:
            return
        if len(self._steps) == _MAX_STEPS:
            self.end_step()
        self._steps.append([])

    def release(self, blocks: Sequence[KVCacheBlock], *, are_read: bool) -> None:
        """Give references up; ``are_read``: a step in flight may copy from these blocks.

        The last one is free first, as where vLLM frees a request: what remains of a prefix after an
        eviction is its beginning.
        """
        last_first = blocks[::-1]
        if are_read and self._steps:
            self._steps[-1].extend(last_first)
        else:
            self._pool.free_blocks(last_first)

    def end_step(self) -> None:
        """The output of the oldest step in flight is there."""
        if self._steps:
            self._pool.free_blocks(self._steps.popleft())
