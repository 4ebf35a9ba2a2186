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
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from kvtrie._core import SlotTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie._core import Match

_MAX_PIECES: Final = 1024
"""Pieces of the table that are kept as tensors: prefixes that many requests share are few."""
_MAX_REUSED: Final = 256
"""Pages of one call whose tensor is used again; there is one for each number of them."""
_BY_TOKEN: Final = TokenToKVPoolAllocator
_BY_PAGE: Final = PagedTokenToKVPoolAllocator


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
        memory = None
        if device.type == "cpu":
            self._host = self._table.numpy()
            memory = self._slots.numpy()
        self._size = page_size
        # To make a tensor takes longer than to match a short prompt.
        self.pieces: dict[tuple[int | None, int], torch.Tensor] = {}
        """Slots of prefixes in one piece, by first block and number of tokens."""
        self._reused: dict[int, tuple[NDArray[np.int64], torch.Tensor]] = {}
        # What was given back last is taken first. Pages of a prefix then mostly have consecutive
        # ids, also after an eviction, which frees the last page of a prefix first.
        self._ids = SlotTable(num_pages, page_size, memory)
        self.num_pages = num_pages

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
        piece = self.pieces.get((first, count))
        if piece is None:
            if len(self.pieces) >= _MAX_PIECES:
                self.pieces.clear()
            piece = self.pieces[first, count] = self._slots.narrow(0, first * self._size, count)
        return piece

    def free(self, blocks: NDArray[np.int32], allocator: Any) -> None:  # noqa: ANN401 - SGLang's
        """Give the slots of blocks, of which there is one at least, to SGLang's allocator.

        The ids are free then. If the allocator raises, they are not.
        """
        kind = type(allocator)
        if self._host is not None and (kind is _BY_TOKEN or kind is _BY_PAGE):
            # What their free_segment makes of the slots, without calls of torch for it. Subclasses
            # have one of their own.
            pages = self._ids.give_back(blocks)
            try:
                allocator.free_page_ids(self._tensor(pages, is_kept=allocator.need_sort))
            except BaseException:
                self._ids.take(len(blocks))  # those that were given back last
                raise
            return
        first = _first_of_run(blocks[::-1])  # as an eviction takes them
        if first is None:
            slots = self.of(blocks)
        else:
            slots = self._slots.narrow(0, first * self._size, len(blocks) * self._size)
        self.put_back(blocks)
        try:
            allocator.free_segment(slots, start_pos=0)
        except BaseException:
            self._ids.take(len(blocks))  # those that were given back last
            raise

    def _tensor(self, pages: NDArray[np.int64], *, is_kept: bool) -> torch.Tensor:
        """Pages for SGLang's allocators, which copy them unless they sort free pages."""
        count = len(pages)
        if is_kept or count > _MAX_REUSED:
            return torch.from_numpy(pages)
        # To make a tensor of few pages takes longer than to copy them into one.
        reused = self._reused.get(count)
        if reused is None:
            array = np.empty(count, np.int64)
            reused = self._reused[count] = array, torch.from_numpy(array)
        reused[0][:] = pages
        return reused[1]

    def firsts(self, blocks: NDArray[Any]) -> NDArray[np.int64]:
        """The first slot of each block, in memory of the host."""
        at = torch.from_numpy(blocks).to(self._table.device)
        rows = self._table.index_select(0, at).view(len(blocks), self._size)
        firsts: NDArray[np.int64] = rows[:, 0].numpy(force=True)
        return firsts

    def take(self, values: torch.Tensor, start: int, end: int) -> NDArray[np.int32]:
        """Take ids for the pages of a range of tokens, with their slots.

        Args:
            values: The slots of all tokens from 0 on, of 32 or 64 bits.
            start: The first token, where a page begins.
            end: Where the last page ends.
        """
        # A page that is cached has a block, and no other has: there are as many as pages.
        count = (end - start) // self._size
        if self._host is not None:
            taken = self._ids.take(count, values.numpy(), start)
        else:
            taken = self._ids.take(count)
            self._write(taken, values[start:end])
        return taken

    def _write(self, blocks: NDArray[np.int32], values: torch.Tensor) -> None:
        """Write the slots of blocks where SGLang has them."""
        if not len(blocks):
            return
        first = _first_of_run(blocks)
        if first is not None:
            self._slots.narrow(0, first * self._size, len(values)).copy_(values)
            return
        at = torch.from_numpy(blocks.astype(np.int64)).to(self._table.device)
        rows = values.to(torch.int64).view(len(blocks), *self._table.shape[1:])
        self._table.index_copy_(0, at, rows)

    @property
    def num_free(self) -> int:
        """Ids of blocks that no page has."""
        return self._ids.num_free

    def used(self) -> torch.Tensor:
        """The slots of all blocks that pages have."""
        is_used = np.ones(self.num_pages, np.bool_)
        is_used[self._ids.free_ids] = False
        return self.of(np.flatnonzero(is_used).astype(np.int32))

    def spare(self, count: int) -> NDArray[np.int32]:
        """Ids that no page has now; they stay free."""
        taken = self._ids.take(count)
        try:
            self._ids.give_back(taken[::-1])
        except Exception:  # they would be lost
            self._ids.give_back(taken[::-1])
            raise
        return taken

    def put_back(self, ids: NDArray[np.int32]) -> None:
        """Ids whose pages left."""
        self._ids.give_back(ids)


def _first_of_run(blocks: NDArray[np.int32]) -> int | None:
    """The first of consecutive blocks; None for others."""
    return int(blocks[0]) if (np.diff(blocks) == 1).all() else None
