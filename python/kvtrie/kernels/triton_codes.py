"""Rotation of one-byte codes in Triton: one launch for all layers, with the copy of K and V.

As ``triton.py``: rows of a token and head, one upload, no wait of the host. Numbers are float32,
without fused multiply-add and with exact division: the same bits as the reference, in codes, scales
and the count of saturated elements.

* **Codes are read and rounded by integer arithmetic.** Not every GPU converts e4m3, and
  Triton's interpreter rounds it differently.
* **Loads are 16 bytes wide** if ``dim`` is the innermost axis and base addresses and strides are
  multiples of 16 bytes, and the window's pairs are halves. A scale is read byte by byte, since rows
  of codes may begin at any address.
* **Each program adds to the count once**, if any of its elements saturated.

It ran under Triton's interpreter and was compiled for sm_80 and sm_90; on an H100 it ran before it
knew of alignment.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from kvtrie.kernels import codes
from kvtrie.kernels.triton import (
    KEPT,
    MAX_TILE_ROWS,
    NUM_WARPS,
    is_linear,
    layers_of,
    row_offsets,
    upload,
)
from kvtrie.models.kv_types import SCALE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kvtrie.kernels.codes import CodeForm
    from kvtrie.kernels.geometry import Geometry

# Bytes of KV per program: a code of K takes a register.
TILE_BYTES: Final = 8_192

_E4M3: Final = tl.constexpr(codes.E4M3)
_INT8: Final = tl.constexpr(codes.INT8)
_IN_LAYER: Final = tl.constexpr(codes.IN_LAYER)
_IN_ROW: Final = tl.constexpr(codes.IN_ROW)
_IN_V: Final = tl.constexpr(codes.IN_V)
_LEAST_SCALE: Final = tl.constexpr(codes.LEAST_SCALE)
_LEAST_OF_POWER: Final = tl.constexpr(codes.LEAST_OF_POWER)


@triton.jit
def _is_finite(value):
    return (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _decode(byte, CODE: tl.constexpr):
    """Numbers of codes (int8), float32, exact."""
    if CODE == _INT8:
        return byte.to(tl.float32)
    wide = byte.to(tl.int32)
    if CODE == _E4M3:
        # The same exponent and mantissa in float16 are the number times 2**-8.
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16)
        number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)
    return ((wide & 0xFF) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _encode(value, CODE: tl.constexpr, LARGEST: tl.constexpr, ROUNDS_DOWN: tl.constexpr):
    """Round to nearest, ties to even: codes (int8), and which finite numbers saturated."""
    bits = value.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7FFFFFFF) < 0x7F800000
    size = tl.where(is_finite, (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 0.0)
    saturated = size > ROUNDS_DOWN
    size = tl.minimum(size, LARGEST)
    plain = size.to(tl.int32, bitcast=True)
    if CODE == _INT8:
        # Adding 2**23 rounds to integers, in the low bits.
        whole = (size + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        return tl.where(bits < 0, -whole, whole).to(tl.int8), saturated
    if CODE == _E4M3:
        normal = ((plain + 0x7FFFF + ((plain >> 20) & 1)) >> 20) - 960
        # Below 2**-6, a step is 2**-9: that of float32 at 2**14.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
    else:
        normal = ((plain + 0xFFFFF + ((plain >> 21) & 1)) >> 21) - 448
        # Below 2**-14, a step is 2**-16: that of float32 at 2**7.
        small = (size + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        code = tl.where(size < 0.00006103515625, small, normal)
    code = tl.where(is_finite, code | ((bits >> 24) & 0x80), 0x7F)
    return code.to(tl.int8), saturated


@triton.jit
def _largest(value, mask):
    """The largest finite magnitude of each row."""
    return tl.max(tl.where(mask & _is_finite(value), tl.abs(value), 0.0), axis=1)


@triton.jit
def _load_scale(at, step, mask):
    """Four bytes, of any alignment: the bits of a float32."""
    bits = tl.load(at, mask=mask, other=0).to(tl.int32) & 0xFF
    bits |= (tl.load(at + step, mask=mask, other=0).to(tl.int32) & 0xFF) << 8
    bits |= (tl.load(at + 2 * step, mask=mask, other=0).to(tl.int32) & 0xFF) << 16
    bits |= (tl.load(at + 3 * step, mask=mask, other=0).to(tl.int32) & 0xFF) << 24
    return bits


@triton.jit
def _store_scale(at, step, bits, mask):
    tl.store(at, bits.to(tl.int8), mask=mask)
    tl.store(at + step, (bits >> 8).to(tl.int8), mask=mask)
    tl.store(at + 2 * step, (bits >> 16).to(tl.int8), mask=mask)
    tl.store(at + 3 * step, (bits >> 24).to(tl.int8), mask=mask)


@triton.jit
def _rotate_pairs(one, two, cos, sin):
    rotates = (cos != 1.0) | (sin != 0.0)
    new_one = tl.where(rotates, one * cos - two * sin, one)
    new_two = tl.where(rotates, two * cos + one * sin, two)
    return new_one, new_two, rotates


@triton.jit(do_not_specialize=["num_tokens", "num_angles"])
def _requantize_rows(
    layers,  # int64 [layers, 6], as in triton.py
    slots,  # [3, tokens], likewise
    cos,  # float32 [tables, num_angles, ANGLES]
    sin,
    count,  # int64 [1]: saturated elements are added
    num_tokens,
    num_angles,
    k_block, k_token, k_head, k_channel,
    v_block, v_token, v_head, v_channel,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,  # codes of a row of K
    V_DIM: tl.constexpr,  # bytes of a row of V; 0: no V
    K_LINEAR: tl.constexpr,
    V_LINEAR: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUNDS_DOWN: tl.constexpr,
    SCALES: tl.constexpr,
    IS_POWER: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of every layer's address, in bytes
    ALIKE: tl.constexpr,  # the window below is that of every layer with RoPE
    START: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REST: tl.constexpr,
    ANGLES: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
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

    k = tl.multiple_of(tl.load(layer).to(tl.pointer_type(tl.int8)), ALIGNMENT)
    k_source = row_offsets(source, head, k_block, k_token, k_head, BLOCK_SIZE, K_LINEAR)
    k_dest = row_offsets(dest, head, k_block, k_token, k_head, BLOCK_SIZE, K_LINEAR)
    if V_DIM > 0:
        v = tl.multiple_of(tl.load(layer + 1).to(tl.pointer_type(tl.int8)), ALIGNMENT)
        v_source = row_offsets(source, head, v_block, v_token, v_head, BLOCK_SIZE, V_LINEAR)
        v_dest = row_offsets(dest, head, v_block, v_token, v_head, BLOCK_SIZE, V_LINEAR)
        if SCALES != _IN_V:
            v_at = tl.arange(0, V_TILE)[None, :]
            v_mask = is_row[:, None] & (v_at < V_DIM)
            v_at = v_at.to(tl.int64) * v_channel
            v_bytes = tl.load(v + v_source[:, None] + v_at, mask=v_mask)

    table = tl.load(layer + 2)
    if ALIKE:
        start = START
        pairs = PAIRS
        is_interleaved = INTERLEAVED
    else:
        start = tl.load(layer + 3)
        pairs = tl.load(layer + 4)
        is_interleaved = tl.load(layer + 5)
    row_of_angles = tl.load(slots + 2 * tokens + token, mask=is_row, other=-1).to(tl.int64)
    rotates = (row_of_angles >= 0) & (table >= 0)
    pair = tl.arange(0, PAIRS_TILE)[None, :]
    is_pair = is_row[:, None] & (pair < pairs)
    angle_row = (table * num_angles + row_of_angles)[:, None] * ANGLES
    angle = tl.where(rotates[:, None], angle_row, 0) + pair
    cosine = tl.load(cos + angle, mask=is_pair & rotates[:, None], other=1.0)
    sine = tl.load(sin + angle, mask=is_pair & rotates[:, None], other=0.0)

    one_at = start + pair * (1 + is_interleaved)
    two_at = one_at + tl.where(is_interleaved > 0, 1, pairs)
    one_at = one_at.to(tl.int64) * k_channel
    two_at = two_at.to(tl.int64) * k_channel
    one = tl.load(k + k_source[:, None] + one_at, mask=is_pair, other=0)
    two = tl.load(k + k_source[:, None] + two_at, mask=is_pair, other=0)
    if REST > 0:
        rest = tl.arange(0, REST_TILE)[None, :]
        is_rest = is_row[:, None] & (rest < DIM - 2 * pairs)
        rest_at = tl.where(rest < start, rest, rest + 2 * pairs).to(tl.int64) * k_channel
        others = tl.load(k + k_source[:, None] + rest_at, mask=is_rest, other=0)

    first, second, is_changed = _rotate_pairs(_decode(one, CODE), _decode(two, CODE), cosine, sine)
    if SCALES != _IN_LAYER:
        if SCALES == _IN_ROW:
            scale_at = k + k_source + DIM * k_channel
            scale_to = k + k_dest + DIM * k_channel
            step = k_channel
        else:
            scale_at = v + v_source
            scale_to = v + v_dest
            step = v_channel
        scale_bits = _load_scale(scale_at, step, is_row)
        scale = scale_bits.to(tl.float32, bitcast=True)
        largest = tl.maximum(_largest(first, is_pair), _largest(second, is_pair))
        if REST > 0:
            third = _decode(others, CODE)
            largest = tl.maximum(largest, _largest(third, is_rest))
        size = largest * scale
        if IS_POWER:
            wanted = tl.div_rn(tl.maximum(size, _LEAST_OF_POWER), LARGEST)
            power = (wanted.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            wanted = power.to(tl.float32, bitcast=True)
        else:
            wanted = tl.maximum(tl.div_rn(size, LARGEST), _LEAST_SCALE)
        is_new = rotates & _is_finite(scale) & _is_finite(size) & _is_finite(wanted)
        factor = tl.where(is_new, tl.div_rn(scale, tl.where(is_new, wanted, 1.0)), 1.0)[:, None]
        first *= factor
        second *= factor
        is_changed = is_pair & is_new[:, None]
        new_bits = tl.where(is_new, wanted.to(tl.int32, bitcast=True), scale_bits)
        _store_scale(scale_to, step, new_bits, is_row)
    is_changed &= is_pair
    new_one, beyond_one = _encode(first, CODE, LARGEST, ROUNDS_DOWN)
    new_two, beyond_two = _encode(second, CODE, LARGEST, ROUNDS_DOWN)
    tl.store(k + k_dest[:, None] + one_at, tl.where(is_changed, new_one, one), mask=is_pair)
    tl.store(k + k_dest[:, None] + two_at, tl.where(is_changed, new_two, two), mask=is_pair)
    beyond = (beyond_one & is_changed).to(tl.int32) + (beyond_two & is_changed).to(tl.int32)
    if REST > 0:
        if SCALES != _IN_LAYER:
            # A row with its own scale never saturates.
            is_code = is_rest & is_new[:, None]
            new_others, _ = _encode(third * factor, CODE, LARGEST, ROUNDS_DOWN)
            others = tl.where(is_code, new_others, others)
        tl.store(k + k_dest[:, None] + rest_at, others, mask=is_rest)
    total = tl.sum(tl.sum(beyond, axis=1), axis=0)
    tl.atomic_add(count, total.to(tl.int64), mask=total > 0)
    if V_DIM > 0 and SCALES != _IN_V:
        tl.store(v + v_dest[:, None] + v_at, v_bytes, mask=v_mask)


def requantize_rows(
    tensors: Sequence[Tensor],
    saturated: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    geometry: Geometry,
    form: CodeForm,
) -> None:
    """Do the work of ``reference.requantize_rows`` in one launch on the current stream.

    ``tensors`` and ``saturated`` are on a CUDA device, or on a CPU under ``TRITON_INTERPRET=1``;
    all else is on the CPU.
    """
    num_tokens = slots.shape[1]
    if num_tokens == 0:
        return
    device = tensors[0].device
    layers, alignment = layers_of(geometry, tuple([tensor.data_ptr() for tensor in tensors]), 1)
    on_device = upload([layers, slots, cos, sin], device)
    settings = _settings(geometry, form, alignment, cos.shape[2])
    v = geometry.placement.v
    grid = (
        -(-num_tokens * geometry.placement.num_kv_heads // settings["ROWS"]),
        len(geometry.windows),
    )
    # Triton launches on the current device, which need not be the pool's.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _requantize_rows[grid](
            *on_device,
            saturated,
            num_tokens,
            cos.shape[1],
            *geometry.placement.k.strides,
            *(v.strides if v is not None else (0, 0, 0, 0)),
            **settings,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


@lru_cache(maxsize=KEPT)
def _settings(geometry: Geometry, form: CodeForm, alignment: int, angles: int) -> Mapping[str, Any]:
    """The compiled constants."""
    at, k, v = geometry.placement, geometry.placement.k, geometry.placement.v
    v_dim = v.dim if v is not None else 0
    dim = k.dim - (SCALE_BYTES if form.scales == codes.IN_ROW else 0)
    shapes = {
        (window.start, window.num_pairs, window.interleaved)
        for window in geometry.windows
        if window is not None
    }
    start, pairs, interleaved = min(shapes, default=(0, 0, False))
    widths = [shape[1] for shape in shapes]
    rest = dim - 2 * min(widths, default=0)
    rows = min(triton.next_power_of_2(max(TILE_BYTES // (k.dim + v_dim), 1)), MAX_TILE_ROWS)
    return {
        "BLOCK_SIZE": at.block_size,
        "HEADS": at.num_kv_heads,
        "DIM": dim,
        "V_DIM": v_dim,
        "K_LINEAR": is_linear(k, at.block_size),
        "V_LINEAR": v is not None and is_linear(v, at.block_size),
        "CODE": form.code,
        "LARGEST": codes.LARGEST[form.code],
        "ROUNDS_DOWN": codes.ROUNDS_DOWN[form.code],
        "SCALES": form.scales,
        "IS_POWER": form.is_power_of_two,
        "ALIGNMENT": alignment,
        "ALIKE": len(shapes) == 1,
        "START": start,
        "PAIRS": pairs,
        "INTERLEAVED": int(interleaved),
        "REST": rest,
        "ANGLES": angles,
        "ROWS": rows,
        "PAIRS_TILE": triton.next_power_of_2(max(widths, default=1)),
        "REST_TILE": triton.next_power_of_2(max(rest, 1)),
        "V_TILE": triton.next_power_of_2(max(v_dim, 1)),
    }
