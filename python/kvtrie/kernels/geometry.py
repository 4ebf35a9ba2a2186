"""Where rows of a pool are stored, and which channels rotate. Needs no torch.

A custom op takes only tensors and numbers, so a ``Geometry`` is flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEADER: Final = 14
_PER_LAYER: Final = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """K or V of all layers: one strided array ``[blocks, tokens, heads, dim]`` per layer.

    Attributes:
        dim: Channels of a row, the last axis.
        strides: Of blocks, tokens, heads and dim, in elements; the same for every layer.
        tensors: The number of the tensor of each layer.
        offsets: Elements from that tensor's first to the layer's first, per layer.
    """

    dim: int
    strides: tuple[int, int, int, int]
    tensors: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where K and V of all layers are stored; ``v`` is ``None`` if a row of K serves as both."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    k: Rows
    v: Rows | None


@dataclass(frozen=True, slots=True)
class Window:
    """The channels of a row of K that rotate, and the table of their angles.

    Attributes:
        table: The layer's row in the tables of cosines and sines.
        start: First channel.
        num_pairs: Pairs of channels.
        interleaved: Pairs are ``(2i, 2i + 1)``; else ``(i, i + num_pairs)``, from ``start`` on.
    """

    table: int
    start: int
    num_pairs: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Geometry:
    """A pool's geometry; one window per layer, ``None`` for no rotation."""

    placement: Placement
    windows: tuple[Window | None, ...]

    def to_ints(self) -> tuple[int, ...]:
        """The geometry as numbers, for a custom op."""
        at, k, v = self.placement, self.placement.k, self.placement.v
        header = (at.num_blocks, at.block_size, at.num_kv_heads, len(k.tensors))
        ints = [*header, k.dim, *k.strides, *((v.dim, *v.strides) if v else (0,) * 5)]
        for layer, window in enumerate(self.windows):
            ints += [k.tensors[layer], k.offsets[layer]]
            ints += [v.tensors[layer], v.offsets[layer]] if v else [0, 0]
            if window is None:
                ints += [-1, 0, 0, 0]
            else:
                ints += [window.table, window.start, window.num_pairs, int(window.interleaved)]
        return tuple(ints)

    @staticmethod
    def from_ints(ints: Sequence[int]) -> Geometry:
        """The geometry of ``to_ints``; a ValueError for other numbers."""
        return _parse(tuple(ints))


@lru_cache(maxsize=64)
def _parse(ints: tuple[int, ...]) -> Geometry:
    if len(ints) < _HEADER or len(ints) != _HEADER + _PER_LAYER * ints[3]:
        msg = f"Geometry.from_ints: {len(ints)} numbers are not a geometry"
        raise ValueError(msg)
    num_blocks, block_size, num_kv_heads = ints[:3]
    layers = [ints[at : at + _PER_LAYER] for at in range(_HEADER, len(ints), _PER_LAYER)]
    k_dim, kb, kt, kh, kd, v_dim, vb, vt, vh, vd = ints[4:_HEADER]
    k = Rows(k_dim, (kb, kt, kh, kd), tuple(x[0] for x in layers), tuple(x[1] for x in layers))
    v = Rows(v_dim, (vb, vt, vh, vd), tuple(x[2] for x in layers), tuple(x[3] for x in layers))
    windows = tuple(
        None if table < 0 else Window(table, start, pairs, bool(interleaved))
        for _, _, _, _, table, start, pairs, interleaved in layers
    )
    return Geometry(
        Placement(num_blocks, block_size, num_kv_heads, k, v if v_dim else None), windows
    )
