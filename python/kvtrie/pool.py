"""A paged KV pool in torch: checks slots, then gathers, scatters and copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvtrie._core import LayoutError
from kvtrie.kernels import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie.layout import KVLayout

    BlockIds = NDArray[np.integer] | Sequence[int] | torch.Tensor

MAX_BLOCKS: Final = 2**31

_MOVE_FIELDS: Final = ("source_slot", "dest_slot", "num_tokens", "delta")


class KVPool:
    """K and V of all layers, one stacked tensor each.

    Both are ``[num_layers, num_blocks, block_size, kv_heads, head_dim]``. Stacked, because a copy
    then is one kernel for all layers instead of one a layer, while ``pool.k[layer]`` still is the
    contiguous tensor that a paged attention kernel expects.

    Every method checks its block ids and positions before it touches a byte: a call that raises has
    changed nothing. Methods write their destination slots and no others. On a GPU the work is
    queued on the current stream.

    Args:
        layout: Geometry and element type.
        num_blocks: Blocks of the pool, 1 to 2**31.
        device: Where the tensors live.

    Raises:
        ValueError: If ``num_blocks`` is out of range.
        MemoryError: If the device has no room; the message says how much was asked for.

    Example:
        >>> import torch
        >>> from kvtrie.layout import KVLayout
        >>> layout = KVLayout(
        ...     num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4
        ... )
        >>> pool = KVPool(layout, num_blocks=8)
        >>> rows = torch.arange(6.0).reshape(1, 3, 1, 2)
        >>> pool.scatter(rows, -rows, blocks=[5, 2], start=2)
        >>> k, v = pool.gather([5, 2], start=3, end=5)
        >>> k.flatten().tolist()
        [2.0, 3.0, 4.0, 5.0]
    """

    def __init__(
        self, layout: KVLayout, *, num_blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int):
            msg = f"KVPool: num_blocks must be an int, not {num_blocks!r}"
            raise TypeError(msg)
        if not 1 <= num_blocks <= MAX_BLOCKS:
            msg = f"KVPool: num_blocks must be in 1..={MAX_BLOCKS}, not {num_blocks}"
            raise ValueError(msg)
        self._layout = layout
        self._num_blocks = num_blocks
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        shape = (
            layout.num_layers,
            num_blocks,
            layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
        try:
            self._k = torch.zeros(shape, dtype=self._dtype, device=device)
            self._v = torch.zeros(shape, dtype=self._dtype, device=device)
        except (MemoryError, RuntimeError) as error:
            gib = num_blocks * layout.bytes_per_block / 2**30
            msg = (
                f"KVPool: no room for num_blocks={num_blocks} of {layout.bytes_per_block} bytes "
                f"({gib:.1f} GiB) on {device}"
            )
            raise MemoryError(msg) from error
        self._device = self._k.device

    @property
    def layout(self) -> KVLayout:
        """Geometry and element type."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self._device

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self._num_blocks * self._layout.bytes_per_block

    @property
    def k(self) -> torch.Tensor:
        """K: ``[num_layers, num_blocks, block_size, kv_heads, head_dim]``."""
        return self._k

    @property
    def v(self) -> torch.Tensor:
        """V, of the same shape as ``k``."""
        return self._v

    def apply(self, moves: NDArray[Any]) -> torch.cuda.Event | None:
        """Carry out the copies of a plan.

        Args:
            moves: What ``plan.moves(table)`` returned: a structured array with ``source_slot``,
                ``dest_slot``, ``num_tokens`` and ``delta``.

        Returns:
            On a GPU, an event that is done when the copies are; ``None`` on a CPU, where they are
            done already.

        Raises:
            TypeError: If ``moves`` is not such an array.
            ValueError: If a slot lies outside the pool, a destination is named twice, or a slot is
                source and destination at once (nobody writes a block that is still read).
            LayoutError: If a move has a delta: this version does not rotate K.
        """
        sources, dests = self._expand(moves)
        if len(sources):
            source_slots = torch.from_numpy(sources).to(self._device)
            dest_slots = torch.from_numpy(dests).to(self._device)
            for rows in self._rows():
                reference.copy_slots(rows, source_slots, dest_slots)
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, blocks: BlockIds, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the KV of positions ``[start, end)`` out of a block table.

        Args:
            blocks: The table: the block of position 0 first.
            start: First position.
            end: Position behind the last.

        Returns:
            K and V, each ``[num_layers, end - start, kv_heads, head_dim]``.

        Raises:
            TypeError: If ``blocks`` does not hold integers.
            ValueError: If a position lies outside the table or a block outside the pool.
        """
        slots = self.slots(blocks, start, end)
        k_rows, v_rows = self._rows()
        return reference.gather_slots(k_rows, slots), reference.gather_slots(v_rows, slots)

    def scatter(self, k: torch.Tensor, v: torch.Tensor, blocks: BlockIds, start: int) -> None:
        """Write KV to the positions of a block table from ``start`` on.

        Args:
            k: ``[num_layers, tokens, kv_heads, head_dim]``, in the pool's dtype, on its device.
            v: Of the same shape.
            blocks: The table: the block of position 0 first.
            start: Position of the first token.

        Raises:
            TypeError: If ``blocks`` does not hold integers.
            ValueError: If a shape, dtype or device does not match, a position lies outside the
                table, a block lies outside the pool, or a written block comes twice.
        """
        layout = self._layout
        num_tokens = k.shape[1] if k.dim() > 1 else 0
        want = (layout.num_layers, num_tokens, layout.num_kv_heads, layout.head_dim)
        for name, rows in (("k", k), ("v", v)):
            if tuple(rows.shape) != want:
                shown = ("num_layers", "tokens", "kv_heads", "head_dim")
                expected = (layout.num_layers, "tokens", layout.num_kv_heads, layout.head_dim)
                msg = (
                    f"KVPool.scatter: {name} has shape {tuple(rows.shape)}, not {expected} "
                    f"({', '.join(shown)}; as many tokens as k)"
                )
                raise ValueError(msg)
            if rows.dtype != self._dtype or rows.device != self._device:
                msg = (
                    f"KVPool.scatter: {name} is {rows.dtype} on {rows.device}, "
                    f"the pool is {self._dtype} on {self._device}"
                )
                raise ValueError(msg)
        slots = self.slots(blocks, start, start + num_tokens, unique=True)
        k_rows, v_rows = self._rows()
        reference.scatter_slots(k_rows, slots, k)
        reference.scatter_slots(v_rows, slots, v)

    def slots(
        self, blocks: BlockIds, start: int, end: int, *, unique: bool = False
    ) -> torch.Tensor:
        """The checked slots of positions ``[start, end)``, int64, on the pool's device.

        Args:
            blocks: The table: the block of position 0 first.
            start: First position.
            end: Position behind the last.
            unique: Refuse a block that comes twice among those that hold the positions.

        Returns:
            One slot a position.

        Raises:
            TypeError: If ``blocks`` does not hold integers.
            ValueError: As for ``gather`` and ``scatter``.
        """
        block_size = self._layout.block_size
        table = self._checked_blocks(blocks, start, end)
        if unique and len(np.unique(table)) != len(table):
            ids, counts = np.unique(table, return_counts=True)
            msg = f"KVPool: block {ids[counts > 1][0]} comes twice among the blocks to write"
            raise ValueError(msg)
        positions = np.arange(start, end, dtype=np.int64)
        first = start // block_size
        slots = table[positions // block_size - first] * block_size + positions % block_size
        return torch.from_numpy(slots).to(self._device)

    def block_ids(self, blocks: BlockIds, end: int) -> torch.Tensor:
        """The checked ids of the blocks that hold positions ``[0, end)``, int64, on the device.

        Args:
            blocks: The table: the block of position 0 first.
            end: Position behind the last.

        Returns:
            One id a block.

        Raises:
            TypeError: If ``blocks`` does not hold integers.
            ValueError: If ``end`` lies outside the table or a block outside the pool.
        """
        return torch.from_numpy(self._checked_blocks(blocks, 0, end)).to(self._device)

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V with one row a slot."""
        return self._k.flatten(1, 2), self._v.flatten(1, 2)

    def _checked_blocks(self, blocks: BlockIds, start: int, end: int) -> NDArray[np.int64]:
        """The ids of the blocks that hold positions ``[start, end)``."""
        table = np.asarray(blocks)
        if table.size == 0:
            table = table.astype(np.int64)
        if table.ndim != 1 or table.dtype.kind not in "iu":
            msg = (
                "KVPool: blocks must be a one-dimensional array of integers, "
                f"not {table.ndim}-dimensional {table.dtype}"
            )
            raise TypeError(msg)
        block_size = self._layout.block_size
        limit = len(table) * block_size
        if not 0 <= start <= end <= limit:
            msg = (
                f"KVPool: positions [{start}, {end}) lie outside the table of {len(table)} blocks "
                f"(0..={limit})"
            )
            raise ValueError(msg)
        used = table[start // block_size : -(-end // block_size)]
        if len(used) and not (0 <= int(used.min()) and int(used.max()) < self._num_blocks):
            bad = int(used[(used < 0) | (used >= self._num_blocks)][0])
            msg = (
                f"KVPool: block {bad} (slot {bad * block_size}) lies outside the pool of "
                f"{self._num_blocks} blocks ({self._num_blocks * block_size} slots)"
            )
            raise ValueError(msg)
        return used.astype(np.int64)

    def _expand(self, moves: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Check a copy list and name every slot of it: sources and destinations."""
        names = getattr(getattr(moves, "dtype", None), "names", None)
        if names is None or any(name not in names for name in _MOVE_FIELDS):
            msg = f"KVPool.apply: moves must be a structured array with {', '.join(_MOVE_FIELDS)}"
            raise TypeError(msg)
        source, dest, count, delta = (moves[name].astype(np.int64) for name in _MOVE_FIELDS)
        if np.any(delta):
            msg = (
                f"KVPool.apply: a move has delta {delta[delta != 0][0]}; "
                "this version copies unrotated KV only (delta 0)"
            )
            raise LayoutError(msg)
        if np.any(count < 1):
            msg = f"KVPool.apply: a move has num_tokens {count[count < 1][0]}, not at least 1"
            raise ValueError(msg)
        limit = self._num_blocks * self._layout.block_size
        for name, first in (("source_slot", source), ("dest_slot", dest)):
            bad = (first < 0) | (first > limit - count)
            if np.any(bad):
                start, size = int(first[bad][0]), int(count[bad][0])
                msg = (
                    f"KVPool.apply: {name} [{start}, {start + size}) lies outside the pool of "
                    f"{limit} slots"
                )
                raise ValueError(msg)
        inside = np.arange(int(count.sum()), dtype=np.int64)
        inside -= np.repeat(np.cumsum(count) - count, count)
        sources = np.repeat(source, count) + inside
        dests = np.repeat(dest, count) + inside
        ids, counts = np.unique(dests, return_counts=True)
        if len(ids) != len(dests):
            msg = f"KVPool.apply: dest_slot {ids[counts > 1][0]} is written twice"
            raise ValueError(msg)
        both = np.intersect1d(sources, ids)
        if len(both):
            msg = f"KVPool.apply: slot {both[0]} is source and destination at once"
            raise ValueError(msg)
        return sources, dests
