"""Gather and scatter of KV rows in plain torch: the meaning of every faster kernel.

Rows are named by slot (block * block_size + offset). No function here checks a slot: the pool does,
before it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gather_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """Copy rows out: ``[layers, slots, heads, dim]`` to ``[layers, len(slots), heads, dim]``."""
    return rows.index_select(1, slots)


def scatter_slots(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write ``values[:, i]`` to ``rows[:, slots[i]]``; no slot may come twice."""
    rows.index_copy_(1, slots, values)


def copy_slots(rows: Tensor, sources: Tensor, dests: Tensor) -> None:
    """Copy row ``sources[i]`` to row ``dests[i]`` in every layer; all reads come first."""
    rows.index_copy_(1, dests, rows.index_select(1, sources))


def gather_blocks(blocks_of_layer: Tensor, blocks: Tensor) -> Tensor:
    """Read whole blocks of one layer, in table order.

    Args:
        blocks_of_layer: ``[num_blocks, block_size, heads, dim]``.
        blocks: Block ids, int64.

    Returns:
        ``[len(blocks) * block_size, heads, dim]``, a copy.
    """
    return blocks_of_layer.index_select(0, blocks).flatten(0, 1)
