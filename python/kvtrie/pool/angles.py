"""Which channels of K rotate in a pool, and the tables of cosines and sines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtrie.kernels.geometry import Window
from kvtrie.models.kv_types import DS_MLA_LATENT, DS_MLA_TAIL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie.pool.layout import KVLayout
    from kvtrie.rope import RopeSpec, Rotary


def windows_of(
    layout: KVLayout, rope: RopeSpec | None
) -> tuple[tuple[Window | None, ...], tuple[Rotary, ...]]:
    """The window of each layer, and the Rotary of each table; equal layers share a table."""
    layers: tuple[Rotary | None, ...] = (None,) * layout.num_layers if rope is None else rope.layers
    tables: dict[Rotary, int] = {}
    windows: list[Window | None] = []
    for rotary, group in zip(layers, layout.layers, strict=True):
        if rotary is None or rotary.width == 0:
            windows.append(None)
            continue
        table = tables.setdefault(rotary, len(tables))
        start = rotary.start
        if group.kv_type is not None and not group.kv_type.requantizes:
            # The row in bfloat16: codes and scales, which stay, take two bytes each.
            start += DS_MLA_TAIL // 2 - DS_MLA_LATENT
        windows.append(Window(table, start, len(rotary.inv_freq), rotary.interleaved))
    return tuple(windows), tuple(tables)


class AngleTables:
    """Cosines and sines ``[tables, deltas, pairs]``, with the pairs of the widest, padded to four.

    Rows of a table then start at multiples of 16 bytes. Values are computed in float64, and rounded
    to float32 for layers with at most two bytes per element: others would have more error than one
    rounding.
    """

    def __init__(self, rotaries: Sequence[Rotary], deltas: NDArray[np.int64]) -> None:
        self._rotaries = rotaries
        self._deltas = deltas
        self._known: dict[type, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of layers whose tensors have this element type."""
        precise = np.float32 if dtype.itemsize <= 2 else np.float64
        if precise not in self._known:
            self._known[precise] = self._made(precise)
        return self._known[precise]

    def _made(self, precise: type[np.floating[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        widest = max((len(rotary.inv_freq) for rotary in self._rotaries), default=0)
        pairs = -(-widest // 4) * 4
        tables = np.zeros((2, len(self._rotaries), len(self._deltas), pairs), dtype=precise)
        if len(self._deltas):
            for number, rotary in enumerate(self._rotaries):
                angles = rotary.angles(self._deltas)
                tables[0, number, :, : angles.shape[1]] = np.cos(angles)
                tables[1, number, :, : angles.shape[1]] = np.sin(angles)
        cos, sin = torch.from_numpy(tables).unbind()
        return cos, sin
