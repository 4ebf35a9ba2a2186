"""Quantised pools for tests, and a naive rotation of their rows, one code at a time.

Numbers of codes come from the formats' definitions, and codes of numbers from a search among all:
nothing here calls the package's codes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tests.kernels.forms import FORMS, Form, Held, Maker, Sizes

from kvtrie.pool import KVLayout, KVPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.rope import RopeSpec, Rotary

BY_NAME = {form.name: form for form in FORMS}
PLAIN = ("fp8_e4m3", "fp8_e5m2", "int8")
SCALED = ("fp8_per_token_head", "int8_per_token_head")
BLOCKWISE = "fp8_index"
CODED = (*PLAIN, *SCALED, BLOCKWISE)
CODE_OF = {
    "fp8_e4m3": "e4m3",
    "fp8_per_token_head": "e4m3",
    "fp8_index": "e4m3",
    "fp8_e5m2": "e5m2",
    "int8": "int8",
    "int8_per_token_head": "int8",
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
# The number that would follow the largest, and whether its code would be even.
NEXT = {"e4m3": (480.0, False), "e5m2": (65536.0, True), "int8": (128.0, True)}
SCALE = 4


def _float_code(byte: int, exponent_bits: int, mantissa_bits: int, *, has_infinity: bool) -> float:
    sign = -1.0 if byte >> 7 else 1.0
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = byte & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        if has_infinity:
            return sign * float("inf") if mantissa == 0 else float("nan")
        if mantissa == (1 << mantissa_bits) - 1:
            return float("nan")
    if exponent == 0:
        return float(sign * mantissa * 2.0 ** (1 - bias - mantissa_bits))
    return float(sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias))


NUMBERS: dict[str, NDArray[np.float32]] = {
    "e4m3": np.array([_float_code(b, 4, 3, has_infinity=False) for b in range(256)], np.float32),
    "e5m2": np.array([_float_code(b, 5, 2, has_infinity=True) for b in range(256)], np.float32),
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}


def nearest(number: float, code: str) -> tuple[int, bool]:
    """The byte of the nearest number, ties to even; and whether the number saturated."""
    if not np.isfinite(number):
        return (0 if code == "int8" else 0x7F), False
    numbers = NUMBERS[code].astype(np.float64)
    sign = bool(np.signbit(number))
    usable = np.isfinite(numbers) & (np.abs(numbers) <= LARGEST[code])
    if code != "int8":
        usable &= np.signbit(numbers) == sign
    bounded = min(max(number, -LARGEST[code]), LARGEST[code])
    distance = np.where(usable, np.abs(numbers - bounded), np.inf)
    best = np.flatnonzero(distance == distance.min())
    byte = int(best[0] if len(best) == 1 else next(one for one in best if one % 2 == 0))
    beyond, is_even = NEXT[code]
    halfway = (LARGEST[code] + beyond) / 2
    return byte, abs(number) > halfway or (abs(number) == halfway and is_even)


def rotated(
    row: NDArray[np.uint8], scale: NDArray[np.uint8] | None, quant: str, rotary: Rotary, delta: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None, int]:
    """The right codes and scale of one row of K, and how many elements saturated."""
    code = CODE_OF[quant]
    numbers = NUMBERS[code][row].copy()
    changed = np.zeros(len(row), bool)
    with np.errstate(all="ignore"):
        for i, frequency in enumerate(rotary.inv_freq):
            angle = np.float64(delta) * np.float64(frequency)
            cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
            if cos == 1 and sin == 0:
                continue
            a = rotary.start + (2 * i if rotary.interleaved else i)
            b = a + (1 if rotary.interleaved else len(rotary.inv_freq))
            one, two = numbers[a], numbers[b]
            numbers[a] = np.float32(one * cos) - np.float32(two * sin)
            numbers[b] = np.float32(two * cos) + np.float32(one * sin)
            changed[[a, b]] = True
        new_scale = None
        if scale is not None:
            changed[:] = True
            old = np.frombuffer(scale.tobytes(), np.float32)[0]
            finite = np.abs(numbers[np.isfinite(numbers)])
            size = np.float32(finite.max(initial=0) * old)
            most = np.float32(LARGEST[code])
            if quant == BLOCKWISE:
                bits = np.float32(max(size, np.float32(1e-4)) / most).view(np.int32)
                exponent = (int(bits) >> 23) + (1 if int(bits) & 0x7FFFFF else 0)
                wanted = np.float32(struct.unpack("f", struct.pack("I", exponent << 23))[0])
            else:
                wanted = max(np.float32(size / most), np.float32(1e-6))
            if not (np.isfinite(old) and np.isfinite(wanted)):
                return row.copy(), scale.copy(), 0
            numbers = numbers * np.float32(old / wanted)
            new_scale = np.frombuffer(np.float32(wanted).tobytes(), np.uint8).copy()
    new = row.copy()
    count = 0
    for channel in np.flatnonzero(changed):
        byte, is_beyond = nearest(float(numbers[channel]), code)
        new[channel] = byte
        count += is_beyond
    return new, new_scale, count


@dataclass(frozen=True)
class Coded:
    """A quantised pool in an engine's tensors."""

    held: Held
    layout: KVLayout
    pool: KVPool

    def bytes(self) -> list[torch.Tensor]:
        return [storage.clone() for storage in self.held.storages]


def forms_of(quant: str) -> list[Form]:
    """Forms that can hold this type: scales after a block's codes need an axis of their own."""
    if quant == BLOCKWISE:
        return [BY_NAME["vllm-cpu"]]
    return [form for form in FORMS if not form.latent]


def coded(
    form: Form,
    quant: str,
    rope: RopeSpec | None,
    *,
    seed: int = 0,
    device: str = "cpu",
    is_tame: bool = True,
    **changes: int,
) -> Coded:
    """Random rows; without NaN and infinity if ``is_tame``."""
    single = quant == BLOCKWISE
    sizes = form.sizes(**(changes | ({"heads": 1} if single else {})))
    v_dim = 0 if single else sizes.v_head_dim
    known: dict[str, Any] = {
        "block_size": sizes.block_size,
        "num_kv_heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "v_head_dim": v_dim,
        "quant": quant,
    }
    rows = KVLayout(num_layers=1, dtype="uint8", **known)
    stored = Sizes(
        sizes.layers, sizes.blocks, sizes.block_size, sizes.heads, rows.k_row, rows.v_row
    )
    maker = Maker(torch.uint8, device)
    held = Held(form.make(maker, stored), maker.storages)
    rng = np.random.default_rng(seed)
    for storage in held.storages:
        storage.copy_(torch.from_numpy(rng.integers(0, 256, storage.shape, np.uint8)))
    layout = KVLayout.from_tensors(held.tensors, axes=form.axes, **known)
    pool = KVPool.wrap(held.tensors, layout, rope)
    code = CODE_OF[quant]
    for view in pool.k:
        numbers = view[..., : sizes.head_dim]
        if is_tame:
            tame = np.flatnonzero(np.isfinite(NUMBERS[code]))
            numbers.copy_(torch.from_numpy(rng.choice(tame, numbers.shape).astype(np.uint8)))
    for at in scales_of(pool):
        count = at[..., 0].numel()
        scales = (10.0 ** rng.uniform(-8, 2, count)).astype(np.float32)
        if quant == BLOCKWISE:
            scales = (2.0 ** rng.integers(-20, 6, count)).astype(np.float32)
        if not is_tame:
            scales[rng.integers(0, count, count // 5)] = rng.choice([np.nan, np.inf, 0.0, 1e30])
        at.copy_(torch.from_numpy(scales.view(np.uint8).reshape(at.shape)))
    return Coded(held, layout, pool)


def scales_of(pool: KVPool) -> list[torch.Tensor]:
    """The bytes of the scales of K, a view per layer."""
    quant = pool.layout.quant
    if quant in SCALED:
        return [view[..., -SCALE:] for view in pool.k]
    return [view for view in pool.v if view is not None] if quant == BLOCKWISE else []


def expected(
    pool: KVPool, moves: NDArray[Any]
) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8] | None], int]:
    """The right K and V of every layer, ``[slots, heads, bytes]``, and the saturated elements."""
    found = [expected_of(pool, layer, moves) for layer in range(len(pool.k))]
    return [one[0] for one in found], [one[1] for one in found], sum(one[2] for one in found)


def expected_of(
    pool: KVPool, layer: int, moves: NDArray[Any]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None, int]:
    """The same of one layer, which is coded."""
    group = pool.layout.layers[layer]
    quant, dim, count = str(group.quant), group.head_dim, 0
    k = pool.k[layer].flatten(0, 1).cpu().numpy()
    v_view = pool.v[layer]
    v = None if v_view is None else v_view.flatten(0, 1).cpu().numpy()
    new_k, new_v = k.copy(), None if v is None else v.copy()
    rotary = pool.rope.layers[layer] if pool.rope is not None else None
    for source, dest, length, delta in moves.tolist():
        for a, b in zip(range(source, source + length), range(dest, dest + length), strict=True):
            new_k[b] = k[a]
            if v is not None and new_v is not None:
                new_v[b] = v[a]
            if rotary is None or not delta or not rotary.width:
                continue
            for head in range(k.shape[1]):
                scale = None
                if quant in SCALED:
                    scale = k[a, head, dim:]
                elif v is not None and quant == BLOCKWISE:
                    scale = v[a, head]
                codes, its, more = rotated(k[a, head, :dim], scale, quant, rotary, delta)
                count += more
                new_k[b, head, :dim] = codes
                if its is not None and quant in SCALED:
                    new_k[b, head, dim:] = its
                elif its is not None and new_v is not None:
                    new_v[b, head] = its
    return new_k, new_v, count
