"""Copies and turns of KV rows in plain torch: the meaning of every faster kernel.

Rows are named by slot (block * block_size + offset). No function here checks a slot: the pool does,
before it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtrie._core import UnsupportedRopeError
from kvtrie.rope import MAX_DELTA, RopeSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvtrie.rope import Rotary

_TURNED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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


def rotate(k: Tensor, rope: RopeSpec, delta: int | Tensor, layer: int = 0) -> Tensor:
    """Turn keys to where they would be, had their tokens stood ``delta`` positions further on.

    Angles are computed in float64, cosines and products one step wider than ``k`` is kept (float32
    for bfloat16 and float16; float64 for float32 and float64), and the result is rounded once.
    Channels outside the window, pairs whose angle is 0 and tokens whose delta is 0 are copied bit
    for bit; what is not a number reaches its own pair alone. What the engine multiplied K by (YaRN)
    stays in it.

    Turn from the original bytes: each turn rounds once, so chained turns drift.

    Args:
        k: Keys ``[..., tokens, head_dim]``: float32, bfloat16, float16 or float64.
        rope: How the model turns its keys.
        delta: New position minus old one: an int, or int64 ``[tokens]``. At most ``2**27`` either
            way.
        layer: The attention layer that ``k`` belongs to.

    Returns:
        A new tensor of the shape, dtype and device of ``k``.

    Raises:
        UnsupportedRopeError: If ``k`` has a dtype that cannot be turned (int4, int8, float8).
        ValueError: If a shape does not fit, or ``layer`` or ``delta`` is out of range.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import torch
        >>> from kvtrie.rope import Rotary, RopeSpec
        >>> rope = RopeSpec(layers=(Rotary(inv_freq=(1.0,)),), head_dim=3)
        >>> rotate(torch.tensor([[1.0, 0.0, 7.0]]), rope, delta=2)
        tensor([[-0.4161,  0.9093,  7.0000]])
    """
    _check_turn(k, rope, layer)
    rotary = rope.layers[layer]
    deltas = _deltas(delta, k.shape[-2])
    moved = k.clone(memory_format=torch.contiguous_format)
    if rotary is None:
        return moved
    # In float32 arithmetic, float32 keys would err by 1.7 times what one rounding costs.
    precise = torch.float32 if k.element_size() == 2 else torch.float64
    cos, sin = _cos_sin(rotary, deltas, precise, k.device)
    window = moved[..., rotary.start : rotary.start + rotary.width]
    if rotary.interleaved:
        first, second = window[..., 0::2], window[..., 1::2]
    else:
        first, second = window.chunk(2, dim=-1)
    a, b = first.to(precise), second.to(precise)
    # The rows of a pair that does not turn keep their bits: even 0 * inf is not a number.
    turns = (cos != 1) | (sin != 0)
    new_first = torch.where(turns, (a * cos - b * sin).to(k.dtype), first)
    new_second = torch.where(turns, (b * cos + a * sin).to(k.dtype), second)
    first.copy_(new_first)
    second.copy_(new_second)
    return moved


def _check_turn(k: Tensor, rope: object, layer: object) -> None:
    if not isinstance(rope, RopeSpec):
        msg = f"rotate: rope must be a RopeSpec, not {rope!r}"
        raise TypeError(msg)
    if isinstance(layer, bool) or not isinstance(layer, int):
        msg = f"rotate: layer must be an int, not {layer!r}"
        raise TypeError(msg)
    if not 0 <= layer < len(rope.layers):
        msg = f"rotate: layer {layer} is outside the {len(rope.layers)} layers of the spec"
        raise ValueError(msg)
    if k.dtype not in _TURNED_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TURNED_DTYPES)
        msg = (
            f"rotate: keys of {str(k.dtype).removeprefix('torch.')} cannot be turned ({known} can)"
        )
        raise UnsupportedRopeError(msg)
    if k.ndim < 2 or k.shape[-1] != rope.head_dim:
        msg = f"rotate: k must be [..., tokens, {rope.head_dim}], not {list(k.shape)}"
        raise ValueError(msg)


def _deltas(delta: object, num_tokens: int) -> NDArray[np.int64]:
    """One delta, or one a token, on the host."""
    if isinstance(delta, torch.Tensor):
        if delta.dtype != torch.int64:
            msg = f"rotate: delta must be int64, not {str(delta.dtype).removeprefix('torch.')}"
            raise TypeError(msg)
        if delta.shape != (num_tokens,):
            msg = f"rotate: delta must be [{num_tokens}], one a token, not {list(delta.shape)}"
            raise ValueError(msg)
        return delta.cpu().numpy()
    if isinstance(delta, bool) or not isinstance(delta, int):
        msg = f"rotate: delta must be an int or an int64 tensor, not {delta!r}"
        raise TypeError(msg)
    if abs(delta) > MAX_DELTA:
        msg = f"rotate: delta {delta} is beyond {MAX_DELTA} positions"
        raise ValueError(msg)
    return np.array([delta], dtype=np.int64)


def _cos_sin(
    rotary: Rotary, deltas: NDArray[np.int64], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[1 or tokens, pairs]``; equal deltas are computed once."""
    values, place = np.unique(deltas, return_inverse=True)
    if dtype == torch.float64:
        angles = rotary.angles(values)
        tables: tuple[NDArray[np.floating], NDArray[np.floating]] = np.cos(angles), np.sin(angles)
    else:
        tables = rotary.cos_sin(values)
    cos, sin = (torch.from_numpy(table[place]).to(device) for table in tables)
    return cos, sin
