"""Copies and rotations of KV rows in plain torch: the definition for every faster kernel.

The pool checks slots before it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

try:
    import torch
except ImportError as error:
    _MISSING = "kvtrie.kernels needs torch: pip install 'kvtrie[torch]'"
    raise ImportError(_MISSING, name="torch") from error

from kvtrie._core import UnsupportedRopeError
from kvtrie.kernels import codes
from kvtrie.kernels.geometry import Window
from kvtrie.models.kv_types import SCALE_BYTES
from kvtrie.rope import MAX_DELTA, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvtrie.kernels.codes import CodeForm
    from kvtrie.kernels.geometry import Geometry, Rows
    from kvtrie.rope import Rotary

_ROTATED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def views(tensors: Sequence[Tensor], rows: Rows, shape: tuple[int, int, int]) -> list[Tensor]:
    """The rows of each layer as views ``[blocks, tokens, heads, dim]``, for any physical order.

    ``shape`` is blocks, tokens per block, heads.
    """
    return [
        tensors[number].as_strided(
            (*shape, rows.dim), rows.strides, tensors[number].storage_offset() + offset
        )
        for number, offset in zip(rows.tensors, rows.offsets, strict=True)
    ]


def gather_rows(view: Tensor, slots: Tensor) -> Tensor:
    """Copy rows from ``[blocks, tokens, heads, dim]``, by slot: ``[len(slots), heads, dim]``."""
    block_size = view.shape[1]
    if _is_linear(view):
        return _linear(view).index_select(0, slots)
    blocks = slots // block_size
    return view[blocks, slots - blocks * block_size]


def scatter_rows(view: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write ``rows[i]`` to slot ``slots[i]``; no slot may repeat."""
    block_size = view.shape[1]
    if _is_linear(view):
        _linear(view).index_copy_(0, slots, rows)
        return
    blocks = slots // block_size
    view[blocks, slots - blocks * block_size] = rows


def _is_linear(view: Tensor) -> bool:
    """Whether rows of consecutive slots are one token stride apart."""
    return view.stride(0) == view.shape[1] * view.stride(1)


def _linear(view: Tensor) -> Tensor:
    """Indexing one axis fewer is several times faster on a CPU."""
    slots = view.shape[0] * view.shape[1]
    return view.as_strided((slots, *view.shape[2:]), view.stride()[1:], view.storage_offset())


def gather_blocks(blocks_of_layer: Tensor, blocks: Tensor) -> Tensor:
    """Copy whole blocks of a layer, in table order: ``[len(blocks) * block_size, heads, dim]``."""
    return blocks_of_layer.index_select(0, blocks).flatten(0, 1)


def move_rows(
    tensors: Sequence[Tensor], slots: Tensor, cos: Tensor, sin: Tensor, geometry: Geometry
) -> None:
    """Copy rows of all layers from slot to slot, and rotate the window of K.

    A row of K whose token has an angle is widened to the type of the tables, rotated pair by pair,
    and rounded once. Every other bit is copied unchanged. NaN and infinity affect only their own
    pair.

    Args:
        tensors: The tensors that ``geometry`` numbers; their destination slots change.
        slots: ``[3, tokens]``, integers: source slot, destination slot (none twice, none a source),
            and the token's row in the tables, or -1 if its delta is 0.
        cos: ``[tables, rows, pairs]``. Products have its type: float32 for elements of two bytes,
            else float64.
        sin: As ``cos``.
        geometry: Where rows are stored, and which of their channels rotate.
    """
    at = geometry.placement
    shape = (at.num_blocks, at.block_size, at.num_kv_heads)
    device = tensors[0].device
    sources, dests, angle_rows = slots.to(device=device, dtype=torch.int64).unbind()
    rotated = (angle_rows >= 0).nonzero().flatten()
    angles = _Angles(cos, sin, angle_rows[rotated])
    for view, window in zip(views(tensors, at.k, shape), geometry.windows, strict=True):
        rows = gather_rows(view, sources)
        if window is not None and len(rotated):
            if len(rotated) == len(rows):
                _rotate(rows, *angles.of(window), window)
            else:
                some = rows[rotated]
                _rotate(some, *angles.of(window), window)
                rows[rotated] = some
        scatter_rows(view, dests, rows)
    if at.v is not None:
        for view in views(tensors, at.v, shape):
            scatter_rows(view, dests, gather_rows(view, sources))


def requantize_rows(
    tensors: Sequence[Tensor],
    saturated: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    geometry: Geometry,
    form: CodeForm,
) -> None:
    """Copy rows of codes from slot to slot; rotate the window of K, and round it to codes again.

    A row of K without an angle, in a layer without a window, or with a scale that is not finite is
    copied bit for bit, and so is V. In other rows, numbers are float32 and rounded once:

    * with one scale per layer, which cancels, the pairs that rotate get new codes;
    * with a scale per row, that is computed again, and every channel gets a new code.

    What is beyond the largest code saturates and is counted. A pair with NaN or infinity becomes
    NaN.

    Args:
        tensors: As for ``move_rows``, uint8.
        saturated: ``[1]``, int64, on the device of ``tensors``: the count is added to it.
        slots: As for ``move_rows``.
        cos: As for ``move_rows``, float32.
        sin: As ``cos``.
        geometry: As for ``move_rows``, in bytes. With ``IN_ROW``, a row of K ends with its scale;
            with ``IN_V``, rows of V are the scales.
        form: How K is coded.
    """
    at = geometry.placement
    shape = (at.num_blocks, at.block_size, at.num_kv_heads)
    device = tensors[0].device
    sources, dests, angle_rows = slots.to(device=device, dtype=torch.int64).unbind()
    rotated = (angle_rows >= 0).nonzero().flatten()
    angles = _Angles(cos, sin, angle_rows[rotated])
    sides = [views(tensors, side, shape) for side in (at.k, at.v) if side is not None]
    for layer, window in enumerate(geometry.windows):
        rows = [gather_rows(side[layer], sources) for side in sides]
        if window is not None and len(rotated):
            some = [side[rotated] for side in rows]
            saturated += _requantize(some, *angles.of(window), window, form)
            for side, new in zip(rows, some, strict=True):
                side[rotated] = new
        for view, side in zip((side[layer] for side in sides), rows, strict=True):
            scatter_rows(view, dests, side)


def _requantize(
    sides: list[Tensor], cos: Tensor, sin: Tensor, window: Window, form: CodeForm
) -> Tensor:
    """Rotate rows of K, and their scales, in place; returns how many elements saturated."""
    k = sides[0]
    scale_bytes = None
    if form.scales == codes.IN_ROW:
        k, scale_bytes = k[..., :-SCALE_BYTES], k[..., -SCALE_BYTES:]
    elif form.scales == codes.IN_V:
        scale_bytes = sides[1]
    numbers = codes.decode(k.contiguous(), form.code)
    _rotate(numbers, cos, sin, window)
    if scale_bytes is None:
        new, saturated = codes.encode(numbers, form.code)
        changes = _channels(window, (cos != 1) | (sin != 0), k.shape[-1]).expand(k.shape)
        k.copy_(torch.where(changes, new, k))
        return (saturated & changes).sum()
    scale = scale_bytes.contiguous().view(torch.float32).squeeze(-1)
    finite = torch.where(numbers.isfinite(), numbers.abs(), 0.0)
    wanted = codes.scale_of(finite.amax(dim=-1) * scale, form)
    new, saturated = codes.encode(numbers * (scale / wanted).unsqueeze(-1), form.code)
    is_good = (scale.isfinite() & wanted.isfinite()).unsqueeze(-1)
    k.copy_(torch.where(is_good, new, k))
    new_bytes = wanted.unsqueeze(-1).view(torch.uint8)
    scale_bytes.copy_(torch.where(is_good, new_bytes, scale_bytes))
    return (saturated & is_good).sum()


def _channels(window: Window, pairs: Tensor, num_channels: int) -> Tensor:
    """Which channels are of these pairs ``[..., pairs]``: ``[..., channels]``."""
    found = pairs.new_zeros((*pairs.shape[:-1], num_channels))
    inside = (
        pairs.repeat_interleave(2, dim=-1) if window.interleaved else torch.cat([pairs, pairs], -1)
    )
    found[..., window.start : window.start + 2 * window.num_pairs] = inside
    return found


class _Angles:
    """Cosines and sines of rotated tokens, ``[tokens, 1, pairs]``, gathered once per table."""

    def __init__(self, cos: Tensor, sin: Tensor, rows: Tensor) -> None:
        self._tables = cos, sin
        self._rows = rows
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, window: Window) -> tuple[Tensor, Tensor]:
        if window.table not in self._known:
            cos, sin = (
                table[window.table, :, : window.num_pairs].to(self._rows.device)[self._rows]
                for table in self._tables
            )
            self._known[window.table] = (cos.unsqueeze(1), sin.unsqueeze(1))
        return self._known[window.table]


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor, window: Window) -> None:
    """Rotate the window of ``[..., dim]`` in place; angles broadcast to ``[..., pairs]``."""
    channels = rows[..., window.start : window.start + 2 * window.num_pairs]
    if window.interleaved:
        one, two = channels[..., 0::2], channels[..., 1::2]
    else:
        one, two = channels.chunk(2, dim=-1)
    first, second = one.to(cos.dtype), two.to(cos.dtype)
    new_one = (first * cos - second * sin).to(rows.dtype)
    new_two = (second * cos + first * sin).to(rows.dtype)
    # A pair without rotation keeps its bits: 0 * inf would be NaN.
    rotates = (cos != 1) | (sin != 0)
    if not bool(rotates.all()):
        new_one, new_two = torch.where(rotates, new_one, one), torch.where(rotates, new_two, two)
    one.copy_(new_one)
    two.copy_(new_two)


def rotate(k: Tensor, rope: RopeSpec, delta: int | Tensor, layer: int = 0) -> Tensor:
    """Rotate keys to the positions ``delta`` further on; ``docs/rope.md`` has the accuracy.

    Angles are computed in float64, cosines and products one step wider than ``k`` (float32 for
    bfloat16 and float16, else float64), and the result is rounded once. What does not rotate is
    copied bit for bit. NaN and infinity affect only their own pair. The engine's factor in K (YaRN)
    stays.

    Args:
        k: Keys ``[..., tokens, head_dim]``: float32, bfloat16, float16 or float64. Give the
            original bytes: chained rotations round each time.
        rope: How the model rotates its keys.
        delta: New position minus old position: an int, or int64 ``[tokens]``. At most ``2**27``
            either way.
        layer: The attention layer of ``k``.

    Returns:
        A new tensor of the shape, dtype and device of ``k``.

    Raises:
        UnsupportedRopeError: ``k`` has a dtype that cannot be rotated (int4, int8, float8).
        ValueError: A shape does not fit, or ``layer`` or ``delta`` is out of range.
        TypeError: An argument has the wrong type.

    Example:
        >>> import torch
        >>> from kvtrie.rope import Rotary, RopeSpec
        >>> rope = RopeSpec(layers=(Rotary(inv_freq=(1.0,)),), head_dim=3)
        >>> rotate(torch.tensor([[1.0, 0.0, 7.0]]), rope, delta=2)
        tensor([[-0.4161,  0.9093,  7.0000]])
    """
    _check_rotate(k, rope, layer)
    rotary = rope.layers[layer]
    deltas = _deltas(delta, k.shape[-2])
    moved = k.clone(memory_format=torch.contiguous_format)
    if rotary is None:
        return moved
    # In float32 arithmetic, float32 keys would have 1.7 times the error of one rounding.
    precise = torch.float32 if k.element_size() == 2 else torch.float64
    cos, sin = _cos_sin(rotary, deltas, precise, k.device)
    _rotate(moved, cos, sin, Window(0, rotary.start, len(rotary.inv_freq), rotary.interleaved))
    return moved


def _check_rotate(k: Tensor, rope: object, layer: object) -> None:
    if not isinstance(rope, RopeSpec):
        msg = f"rotate: rope must be a RopeSpec, not {rope!r}"
        raise TypeError(msg)
    if isinstance(layer, bool) or not isinstance(layer, int):
        msg = f"rotate: layer must be an int, not {layer!r}"
        raise TypeError(msg)
    if not 0 <= layer < len(rope.layers):
        msg = f"rotate: layer {layer} is outside the {len(rope.layers)} layers of the spec"
        raise ValueError(msg)
    if k.dtype not in _ROTATED_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ROTATED_DTYPES)
        msg = (
            f"rotate: keys of {str(k.dtype).removeprefix('torch.')} cannot be rotated ({known} can)"
        )
        raise UnsupportedRopeError(msg)
    dim = rope.dims[layer]
    if k.ndim < 2 or k.shape[-1] != dim:
        msg = f"rotate: k must be [..., tokens, {dim}], not {list(k.shape)}"
        raise ValueError(msg)


def _deltas(delta: object, num_tokens: int) -> NDArray[np.int64]:
    if isinstance(delta, torch.Tensor):
        if delta.dtype != torch.int64:
            msg = f"rotate: delta must be int64, not {str(delta.dtype).removeprefix('torch.')}"
            raise TypeError(msg)
        if delta.shape != (num_tokens,):
            msg = f"rotate: delta must be [{num_tokens}], one per token, not {list(delta.shape)}"
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
