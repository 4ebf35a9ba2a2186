"""Which slots of SGLang's pool a block has, and which ids of blocks have none.

Slots are where SGLang's own are: in memory of the host they are copied by numpy and the index, on a
device by torch, so that nothing waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie._core import Match


class PageSlots:
    """A row of slots for each block, and a stack of ids that no page has.

    Args:
        num_pages: Pages of the pool; as many blocks.
        page_size: Tokens of a page.
        device: Where SGLang's slots are.
    """

    def __init__(self, num_pages: int, page_size: int, device: torch.device) -> None:
        # The slots of a block are next to each other; torch gathers from one dimension sooner.
        shape = (num_pages, page_size) if page_size > 1 else (num_pages,)
        self._table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._host: NDArray[np.int64] | None = None
        if device.type == "cpu":
            self._host = self._table.numpy()
        self._size = page_size
        # The last is taken first. Pages of a prefix then mostly have consecutive ids, also after an
        # eviction, which frees the last page of a prefix first.
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()
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
        """The slots of what a lookup found, one a token."""
        if self._host is not None:
            return torch.from_numpy(found.slots(self._host))
        return self.of(found.blocks)

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
        if self._host is not None:
            rows = values.numpy()[start:end]
            self._host[offered] = rows if self._size == 1 else rows.reshape(count, self._size)
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
