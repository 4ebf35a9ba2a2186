"""What the probe compares with: one layer's input and attention output of every cached token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from kvtrie.pool.moves import check_moves

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FP8: Final = torch.float8_e4m3fn


class Records:
    """Two rows per token of a pool: a layer's input h and its attention output, ``[hidden]``.

    Rows are by slot, as KV is. A slot counts as known once it is written, and is forgotten with its
    block. ``bytes_per_token`` says what they take: 2 x hidden elements, in fp8 2 x hidden bytes and
    two float32 scales, and one byte that says whether they are known.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens per block.
        hidden: Channels of a row.
        layer: The layer whose rows they are.
        dtype: Of the rows that are written and read.
        fp8: Whether rows are kept as float8 (e4m3), each with its own scale.
        device: Of the pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hidden: int,
        *,
        layer: int,
        dtype: torch.dtype,
        fp8: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layer = layer
        self.hidden = hidden
        self.dtype = dtype
        self.fp8 = fp8
        self._block_size = block_size
        slots = num_blocks * block_size
        # Bytes: few operations know float8.
        kept = torch.uint8 if fp8 else dtype
        self._rows = torch.zeros((slots, 2, hidden), dtype=kept, device=device)
        self._scales = torch.zeros((slots if fp8 else 0, 2), dtype=torch.float32, device=device)
        self._known = torch.zeros(slots, dtype=torch.bool, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of the pool."""
        return 2 * self.hidden * self._rows.element_size() + (8 if self.fp8 else 0) + 1

    def write(self, slots: torch.Tensor, h: torch.Tensor, out: torch.Tensor) -> None:
        """Keep rows.

        Args:
            slots: int64 ``[tokens]``.
            h: The layer's input, ``[tokens, hidden]``.
            out: Its attention output after the output projection, as ``h``.
        """
        rows = torch.stack([h, out], dim=1)
        if self.fp8:
            size = rows.abs().amax(dim=-1).float().clamp_min(1e-12) / torch.finfo(_FP8).max
            self._scales.index_copy_(0, slots, size)
            rows = (rows.float() / size.unsqueeze(-1)).to(_FP8).view(torch.uint8)
        self._rows.index_copy_(0, slots, rows)
        self._known.index_fill_(0, slots, True)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rows of slots, h and out, ``[tokens, hidden]``; None if one is not known."""
        if not bool(self._known[slots].all()):
            return None
        rows = self._rows[slots]
        if self.fp8:
            rows = (rows.view(_FP8).float() * self._scales[slots].unsqueeze(-1)).to(self.dtype)
        h, out = rows.unbind(1)
        return h, out

    def has(self, blocks: NDArray[np.integer[Any]]) -> bool:
        """Whether all rows of blocks are known."""
        ids = torch.as_tensor(blocks, dtype=torch.int64, device=self._known.device)
        return bool(self._known.view(-1, self._block_size)[ids].all())

    def move(self, moves: NDArray[np.void]) -> None:
        """Copy rows as ``KVPool.apply`` copies KV. They do not depend on the position."""
        pieces = check_moves(moves, len(self._known))
        if not len(pieces.count):
            return
        slots, _ = pieces.expand(len(self._known))
        at: Any = torch.from_numpy(slots).to(device=self._rows.device, dtype=torch.int64)
        for kept in (self._rows, self._known, *([self._scales] if self.fp8 else [])):
            kept.index_copy_(0, at[1], kept[at[0]])

    def forget(self, blocks: NDArray[np.integer[Any]]) -> None:
        """Forget the rows of blocks that get a new owner."""
        ids = torch.as_tensor(blocks, dtype=torch.int64, device=self._known.device)
        self._known.view(-1, self._block_size)[ids] = False
