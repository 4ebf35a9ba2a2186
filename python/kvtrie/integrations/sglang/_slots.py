"""Which slots of SGLang's pool a block has, and which ids of blocks have none.

Slots are where SGLang's own are: in memory of the host they are copied by numpy and the index, on a
device by torch, so that nothing waits for the device.

Blocks that are stored together mostly have consecutive ids. Their slots are then one piece of the
table, which is read and written as a whole, or given out as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie._core import Match


_MAX_PIECES: Final = 1024
"""Pieces of the table that are kept as tensors: prefixes that many requests share are few."""


class PageSlots:
    """A row of slots for each block, and a stack of ids that no page has.

    Args:
        num_pages: Pages of the pool; as many blocks.
        page_size: Tokens of a page.
        device: Where SGLang's slots are.
    """

    def __init__(self, num_pages: int, page_size: int, device: torch.device) -> None:
        # The slots of a block are next to each other; torch gathers from one dimension sooner.
        self._slots = torch.zeros(num_pages * page_size, dtype=torch.int64, device=device)
        self._table = self._slots.view(num_pages, page_size) if page_size > 1 else self._slots
        self._host: NDArray[np.int64] | None = None
        if device.type == "cpu":
            self._host = self._table.numpy()
        self._size = page_size
        # To make a tensor takes longer than to match a short prompt.
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}
        # The last is taken first. Pages of a prefix then mostly have consecutive ids, also after an
        # eviction, which frees the last page of a prefix first.
        self._ids = np.arange(num_pages, dtype=np.int32)
        self._free = self._ids[::-1].copy()
        self.num_pages = num_pages
        self.num_free = num_pages
        """Ids of blocks that no page has."""

    def of(self, blocks: NDArray[np.int32]) -> torch.Tensor:
        """The slots of blocks, one a token."""
        if self._host is not None:
            return torch.from_numpy(self._host.take(blocks, 0).reshape(-1))
        at = torch.from_numpy(blocks).to(self._table.device)
        return self._table.index_select(0, at).view(-1)

    def of_match(self, found: Match) -> torch.Tensor:
        """The slots of what a lookup from position 0 found, one a token.

        They are valid until one of the blocks leaves. Nobody may write to them: they may be a piece
        of the table.
        """
        first = found.consecutive_from
        if first is None:
            if self._host is not None:
                return torch.from_numpy(found.slots(self._host))
            return self.of(found.blocks)
        count = found.num_tokens
        piece = self._pieces.get((first, count))
        if piece is None:
            if len(self._pieces) >= _MAX_PIECES:
                self._pieces.clear()
            piece = self._pieces[first, count] = self._slots.narrow(0, first * self._size, count)
        return piece

    def free(self, blocks: NDArray[np.int32], allocator: Any) -> None:  # noqa: ANN401 - SGLang's
        """Give the slots of blocks, of which there is one at least, to SGLang's allocator."""
        first = self._run(blocks[::-1])  # as an eviction takes them
        size = self._size
        start, end = (0, 0) if first is None else (first * size, (first + len(blocks)) * size)
        if self._host is None:
            slots = self.of(blocks) if first is None else self._slots[start:end]
            allocator.free_segment(slots, start_pos=0)
            return
        if first is None:
            rows = self._host.take(blocks, 0).reshape(-1)
        else:
            rows = self._host.reshape(-1)[start:end]
        if size > 1 and type(allocator) is PagedTokenToKVPoolAllocator:
            # What its free_segment makes of the slots, without three calls of torch. Subclasses
            # have one of their own.
            allocator.free_page_ids(torch.from_numpy(rows[::size] // size))
        else:
            allocator.free_segment(torch.from_numpy(rows), start_pos=0)

    def _run(self, blocks: NDArray[np.int32]) -> int | None:
        """The first of consecutive blocks; None for others."""
        first = int(blocks[0])
        is_run = blocks.tobytes() == self._ids[first : first + len(blocks)].tobytes()
        return first if is_run else None

    def firsts(self, blocks: NDArray[Any]) -> NDArray[np.int64]:
        """The first slot of each block, in memory of the host."""
        at = torch.from_numpy(blocks).to(self._table.device)
        rows = self._table.index_select(0, at).view(len(blocks), self._size)
        firsts: NDArray[np.int64] = rows[:, 0].numpy(force=True)
        return firsts

    def offer(self, values: torch.Tensor, start: int, end: int) -> NDArray[np.int32]:
        """Ids for the pages of a range of tokens, with their slots. `take` makes them used.

        Args:
            values: The slots of all tokens from 0 on, of any integer type.
            start: The first token, where a page begins.
            end: Where the last page ends.
        """
        count = (end - start) // self._size
        # A page that is cached has a block, and no other has: there are as many as pages.
        offered = self._free[self.num_free - count : self.num_free][::-1].copy()
        if not count:
            return offered
        first = self._run(offered)
        size = self._size
        if self._host is not None:
            rows = values.numpy()[start:end]
            if first is not None:
                self._host.reshape(-1)[first * size : (first + count) * size] = rows
            else:
                self._host[offered] = rows if size == 1 else rows.reshape(count, size)
            return offered
        if first is not None:
            self._slots.narrow(0, first * size, count * size).copy_(values[start:end])
            return offered
        at = torch.from_numpy(offered.astype(np.int64)).to(self._table.device)
        new = values[start:end].to(torch.int64)
        self._table.index_copy_(0, at, new.view(count, *self._table.shape[1:]))
        return offered

    def used(self) -> torch.Tensor:
        """The slots of all blocks that pages have."""
        is_used = np.ones(self.num_pages, np.bool_)
        is_used[self._free[: self.num_free]] = False
        return self.of(np.flatnonzero(is_used).astype(np.int32))

    def take(self, count: int) -> None:
        """Use the ids that were offered last."""
        self.num_free -= count

    def spare(self, count: int) -> NDArray[np.int32]:
        """Ids that no page has now; they stay free."""
        return self._free[self.num_free - count : self.num_free]

    def put_back(self, ids: NDArray[np.int32]) -> None:
        """Ids whose pages left."""
        self._free[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)
