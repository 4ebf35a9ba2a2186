"""Copies inside KV pools in Triton: one launch for all layers, with the rotation of K.

* **The unit is a token.** Pieces end at block edges and at any alignment: one tile per piece would
  leave half its lanes idle.
* **One upload.** Slots and angle (12 bytes per token; 24 from 2**31 slots on), cosines and sines (8
  bytes per pair and delta, computed in float64 on the host), and each layer's address and window go
  to the device in one copy from pinned memory, on the same stream. The host does not wait. It keeps
  the layers' numbers, and the compiled constants, of the pools of the last calls.
* **A tile is rows times channels.** A row is one token of one head; rows count through heads first,
  then tokens. A program has about 16 KiB of KV and issues all loads before its first store. The
  grid is tiles by layers.
* **Loads are 16 bytes wide** if ``dim`` is the innermost axis and base addresses and strides are
  multiples of 16 bytes. Channels outside the window, and V, are moved as integers. Where windows
  differ in position or width between layers, each load is one element.
* **Arithmetic** is float32 (float64 for elements wider than two bytes), with one rounding and no
  fused multiply-add: the same bits as the reference. Triton's interpreter (3.7) truncates bfloat16
  and loses its subnormal numbers: only there, bfloat16 is widened and rounded on integers.

It ran on an H100 (``benches/gpu.py``, docs/pool.md) and under Triton's interpreter, and was
compiled for sm_80.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kvtrie.kernels.geometry import Geometry, Rows

# Bytes of KV per program, and its threads.
TILE_BYTES: Final = 16_384
NUM_WARPS: Final = 4
MAX_TILE_ROWS: Final = 128
_ALIGNMENT: Final = 16
# Pools whose numbers the host keeps: 3 KB for 64 layers.
KEPT: Final = 64

_FLOATS: Final = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    # Bytes of quantised rows are copied here, and rotate elsewhere.
    torch.uint8: tl.int8,
}
_INTS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def row_offsets(
    slots, heads, s_block, s_token, s_head, BLOCK_SIZE: tl.constexpr, LINEAR: tl.constexpr
):
    """Offsets of rows in elements, int64, as ``slots`` and ``heads`` are."""
    if LINEAR:
        return slots * s_token + heads * s_head
    blocks = slots // BLOCK_SIZE
    return blocks * s_block + (slots - blocks * BLOCK_SIZE) * s_token + heads * s_head


@triton.jit
def _widen(bits, FLOAT: tl.constexpr, MATH: tl.constexpr, BY_HAND: tl.constexpr):
    if BY_HAND:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(FLOAT, bitcast=True).to(MATH)


@triton.jit
def _narrow(value, FLOAT: tl.constexpr, INT: tl.constexpr, BY_HAND: tl.constexpr):
    """Round to nearest, ties to even; NaN stays NaN."""
    if BY_HAND:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest).to(INT)
    return value.to(FLOAT).to(INT, bitcast=True)


@triton.jit
def _rotate(
    one,
    two,
    cos,
    sin,
    FLOAT: tl.constexpr,
    MATH: tl.constexpr,
    INT: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """Rotate pairs; those with angle 0 keep their bits."""
    rotates = (cos != 1.0) | (sin != 0.0)
    first = _widen(one, FLOAT, MATH, BY_HAND)
    second = _widen(two, FLOAT, MATH, BY_HAND)
    rotated_one = _narrow(first * cos - second * sin, FLOAT, INT, BY_HAND)
    rotated_two = _narrow(second * cos + first * sin, FLOAT, INT, BY_HAND)
    return tl.where(rotates, rotated_one, one), tl.where(rotates, rotated_two, two)


@triton.jit(do_not_specialize=["num_tokens", "num_angles"])
def _move_rows(
    layers,  # int64 [layers, 6]: addresses of K and V; table (-1: none), start, pairs, interleaved
    slots,  # [3, tokens], int32 or int64: source, destination, row of the tables or -1
    cos,  # [tables, num_angles, ANGLES]
    sin,
    num_tokens,
    num_angles,
    k_block, k_token, k_head, k_channel,
    v_block, v_token, v_head, v_channel,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,  # 0: no V
    K_LINEAR: tl.constexpr,
    V_LINEAR: tl.constexpr,
    FLOAT: tl.constexpr,
    INT: tl.constexpr,
    MATH: tl.constexpr,
    BY_HAND: tl.constexpr,  # bfloat16 is widened and rounded by integer arithmetic
    ALIGNMENT: tl.constexpr,  # of every row, in bytes
    ROTATES: tl.constexpr,  # some row rotates
    ALIKE: tl.constexpr,  # the window below is that of every layer with RoPE
    START: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REST: tl.constexpr,  # most channels outside a window
    ROWS: tl.constexpr,
    ANGLES: tl.constexpr,
    PAIRS_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
):  # fmt: skip
    layer = layers + tl.program_id(1).to(tl.int64) * 6
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    head = row - token * HEADS
    is_row = token < num_tokens
    tokens = tl.cast(num_tokens, tl.int64)
    source = tl.load(slots + token, mask=is_row, other=0).to(tl.int64)
    dest = tl.load(slots + tokens + token, mask=is_row, other=0).to(tl.int64)

    k = tl.multiple_of(tl.load(layer).to(tl.pointer_type(INT)), ALIGNMENT)
    k_source = row_offsets(source, head, k_block, k_token, k_head, BLOCK_SIZE, K_LINEAR)[:, None]
    k_dest = row_offsets(dest, head, k_block, k_token, k_head, BLOCK_SIZE, K_LINEAR)[:, None]

    if V_DIM > 0:
        v = tl.multiple_of(tl.load(layer + 1).to(tl.pointer_type(INT)), ALIGNMENT)
        v_source = row_offsets(source, head, v_block, v_token, v_head, BLOCK_SIZE, V_LINEAR)
        v_dest = row_offsets(dest, head, v_block, v_token, v_head, BLOCK_SIZE, V_LINEAR)
        v_at = tl.arange(0, V_TILE)[None, :]
        v_mask = is_row[:, None] & (v_at < V_DIM)
        v_at = v_at.to(tl.int64) * v_channel
        v_bits = tl.load(v + v_source[:, None] + v_at, mask=v_mask)

    if ROTATES:
        table = tl.load(layer + 2)
        if ALIKE:
            start = START
            pairs = PAIRS
        else:
            start = tl.load(layer + 3)
            pairs = tl.load(layer + 4)
        row_of_angles = tl.load(slots + 2 * tokens + token, mask=is_row, other=-1).to(tl.int64)
        rotates = ((row_of_angles >= 0) & (table >= 0))[:, None]
        pair = tl.arange(0, PAIRS_TILE)[None, :]
        is_pair = is_row[:, None] & (pair < pairs)
        angle_row = (table * num_angles + row_of_angles)[:, None] * ANGLES
        angle = tl.where(rotates, angle_row, 0) + pair
        cosine = tl.load(cos + angle, mask=is_pair & rotates, other=1.0)
        sine = tl.load(sin + angle, mask=is_pair & rotates, other=0.0)

        if REST > 0:
            rest = tl.arange(0, REST_TILE)[None, :]
            is_rest = is_row[:, None] & (rest < K_DIM - 2 * pairs)
            if ALIKE and START == 0:
                rest_at = rest + 2 * PAIRS
            elif ALIKE and START + 2 * PAIRS == K_DIM:
                rest_at = rest
            else:
                rest_at = tl.where(rest < start, rest, rest + 2 * pairs)
            rest_at = rest_at.to(tl.int64) * k_channel
            rest_bits = tl.load(k + k_source + rest_at, mask=is_rest)

        if ALIKE and INTERLEAVED:
            # Loaded together, and split in registers.
            both = tl.arange(0, 2 * PAIRS_TILE)[None, :]
            is_both = is_row[:, None] & (both < 2 * PAIRS)
            both_at = (both + START).to(tl.int64) * k_channel
            bits = tl.load(k + k_source + both_at, mask=is_both)
            one, two = tl.split(tl.reshape(bits, (ROWS, PAIRS_TILE, 2)))
            one, two = _rotate(one, two, cosine, sine, FLOAT, MATH, INT, BY_HAND)
            bits = tl.reshape(tl.join(one, two), (ROWS, 2 * PAIRS_TILE))
            tl.store(k + k_dest + both_at, bits, mask=is_both)
        else:
            if ALIKE:
                one_at = pair + START
                two_at = pair + (START + PAIRS)
            else:
                is_interleaved = tl.load(layer + 5)
                one_at = start + pair * (1 + is_interleaved)
                two_at = one_at + tl.where(is_interleaved > 0, 1, pairs)
            one_at = one_at.to(tl.int64) * k_channel
            two_at = two_at.to(tl.int64) * k_channel
            one = tl.load(k + k_source + one_at, mask=is_pair)
            two = tl.load(k + k_source + two_at, mask=is_pair)
            one, two = _rotate(one, two, cosine, sine, FLOAT, MATH, INT, BY_HAND)
            tl.store(k + k_dest + one_at, one, mask=is_pair)
            tl.store(k + k_dest + two_at, two, mask=is_pair)
        if REST > 0:
            tl.store(k + k_dest + rest_at, rest_bits, mask=is_rest)
    else:
        k_at = tl.arange(0, K_TILE)[None, :]
        k_mask = is_row[:, None] & (k_at < K_DIM)
        k_at = k_at.to(tl.int64) * k_channel
        k_bits = tl.load(k + k_source + k_at, mask=k_mask)
        tl.store(k + k_dest + k_at, k_bits, mask=k_mask)
    if V_DIM > 0:
        tl.store(v + v_dest[:, None] + v_at, v_bits, mask=v_mask)


def move_rows(
    tensors: Sequence[Tensor], slots: Tensor, cos: Tensor, sin: Tensor, geometry: Geometry
) -> None:
    """Do the work of ``reference.move_rows`` in one launch on the device's current stream.

    ``tensors`` are on a CUDA device, or on a CPU under ``TRITON_INTERPRET=1``; all else is on the
    CPU.
    """
    num_tokens = slots.shape[1]
    if num_tokens == 0:
        return
    device = tensors[0].device
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    layers, alignment = layers_of(geometry, addresses, tensors[0].element_size())
    on_device = upload([layers, slots, cos, sin], device)
    settings = _settings(geometry, tensors[0].dtype, alignment, cos.shape[2] if cos.numel() else 0)
    v = geometry.placement.v
    grid = (
        -(-num_tokens * geometry.placement.num_kv_heads // settings["ROWS"]),
        len(geometry.windows),
    )
    # Triton launches on the current device, which need not be the pool's.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _move_rows[grid](
            *on_device,
            num_tokens,
            cos.shape[1],
            *geometry.placement.k.strides,
            *(v.strides if v is not None else (0, 0, 0, 0)),
            **settings,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


@lru_cache(maxsize=KEPT)
def layers_of(geometry: Geometry, addresses: tuple[int, ...], item_size: int) -> tuple[Tensor, int]:
    """The numbers of each layer, of tensors at these addresses.

    Returns:
        Of each layer: addresses of K and V, table (-1: none), start, pairs, whether interleaved.
        And the power of two, at most 16 bytes, that divides every address.
    """
    k, v = geometry.placement.k, geometry.placement.v
    # A layer without RoPE is copied by the same tiles, as if it had the narrowest window.
    pairs = min((window.num_pairs for window in geometry.windows if window), default=0)
    rows: list[tuple[int, ...]] = []
    for layer, window in enumerate(geometry.windows):
        k_at = addresses[k.tensors[layer]] + k.offsets[layer] * item_size
        v_at = addresses[v.tensors[layer]] + v.offsets[layer] * item_size if v is not None else 0
        columns = (-1, 0, pairs, 0)
        if window is not None:
            columns = (window.table, window.start, window.num_pairs, int(window.interleaved))
        rows.append((k_at, v_at, *columns))
    alignment = _alignment([address for row in rows for address in row[:2]])
    return torch.tensor(rows, dtype=torch.int64), max(alignment, item_size)


def upload(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy all parts at once, each 16-byte aligned."""
    if device.type == "cpu":
        return list(parts)
    staged = _packed(parts, pinned=True)
    # The pinned allocator reuses the memory only after the copy is done.
    return _unpacked(staged.to(device, non_blocking=True), parts)


def _packed(parts: Sequence[Tensor], *, pinned: bool) -> Tensor:
    sizes = [_padded(part.nbytes) for part in parts]
    staged = torch.empty(max(sum(sizes), _ALIGNMENT), dtype=torch.uint8, pin_memory=pinned)
    # By numpy: a part takes a tenth of the time that views of tensors take.
    there, start = staged.numpy(), 0
    for part, size in zip(parts, sizes, strict=True):
        there[start : start + part.nbytes] = part.numpy().reshape(-1).view("u1")
        start += size
    return staged


def _unpacked(staged: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    views: list[Tensor] = []
    start = 0
    for part in parts:
        views.append(staged[start : start + part.nbytes].view(part.dtype).view(part.shape))
        start += _padded(part.nbytes)
    return views


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=KEPT)
def _settings(
    geometry: Geometry, dtype: torch.dtype, alignment: int, angles: int
) -> Mapping[str, Any]:
    """The compiled constants; without ``angles`` nothing rotates."""
    at, k, v = geometry.placement, geometry.placement.k, geometry.placement.v
    v_dim = v.dim if v is not None else 0
    shapes = {
        (window.start, window.num_pairs, window.interleaved)
        for window in geometry.windows
        if window is not None and angles
    }
    start, pairs, interleaved = min(shapes, default=(0, 0, False))
    widths = [shape[1] for shape in shapes]
    rest = k.dim - 2 * min(widths, default=0)
    per_row = (k.dim + v_dim) * dtype.itemsize
    rows = min(triton.next_power_of_2(max(TILE_BYTES // per_row, 1)), MAX_TILE_ROWS)
    return {
        "BLOCK_SIZE": at.block_size,
        "HEADS": at.num_kv_heads,
        "K_DIM": k.dim,
        "V_DIM": v_dim,
        "K_LINEAR": is_linear(k, at.block_size),
        "V_LINEAR": v is not None and is_linear(v, at.block_size),
        "FLOAT": _FLOATS[dtype],
        "INT": _INTS[dtype.itemsize],
        "MATH": tl.float32 if dtype.itemsize <= 2 else tl.float64,
        "BY_HAND": not isinstance(_move_rows, triton.JITFunction) and dtype == torch.bfloat16,
        "ALIGNMENT": alignment,
        "ROTATES": bool(shapes),
        "ALIKE": len(shapes) == 1,
        "START": start,
        "PAIRS": pairs,
        "INTERLEAVED": interleaved,
        "REST": rest,
        "ROWS": rows,
        "ANGLES": angles,
        "PAIRS_TILE": triton.next_power_of_2(max(widths, default=1)),
        "REST_TILE": triton.next_power_of_2(max(rest, 1)),
        "K_TILE": triton.next_power_of_2(k.dim),
        "V_TILE": triton.next_power_of_2(max(v_dim, 1)),
    }


def is_linear(rows: Rows, block_size: int) -> bool:
    """Whether rows of consecutive slots are one token stride apart."""
    block, token, _, _ = rows.strides
    return block == block_size * token


def _alignment(addresses: Sequence[int]) -> int:
    """The power of two, at most 16 bytes, that divides every address."""
    found = _ALIGNMENT
    for address in addresses:
        while address % found:
            found //= 2
    return found
