"""Rotated keys against float64, bit for bit where nothing is rotated, and bad input."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrie import UnsupportedRopeError
from kvtrie.kernels.reference import rotate
from kvtrie.rope import MAX_DELTA, RopeSpec, Rotary

if TYPE_CHECKING:
    from torch import Tensor

MILLION = 10**6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
EXACT = torch.float64


def frequencies(pairs: int, theta: float = 1e4) -> tuple[float, ...]:
    steps = torch.arange(0, 2 * pairs, 2, dtype=torch.float32)
    return tuple((1.0 / theta ** (steps / (2 * pairs))).tolist())


def spec(**changes: Any) -> RopeSpec:
    fields = {"inv_freq": frequencies(32), **changes}
    head_dim = changes.pop("head_dim", fields.get("start", 0) + 2 * len(fields["inv_freq"]))
    fields.pop("head_dim", None)
    return RopeSpec(layers=(Rotary(**fields),), head_dim=head_dim)


SPECS = {
    "halves": spec(),
    "pairs": spec(interleaved=True),
    "partial": spec(inv_freq=frequencies(16), head_dim=80),
    "partial-pairs": spec(inv_freq=frequencies(16), head_dim=80, interleaved=True),
    "mla": spec(start=48, interleaved=True),
    "reverse": spec(inv_freq=tuple(-value for value in frequencies(32))),
    "still-pairs": spec(inv_freq=frequencies(8) + (0.0,) * 24),
    "far-theta": spec(inv_freq=frequencies(64, 1e7)),
}
specs = pytest.mark.parametrize("rope", SPECS.values(), ids=SPECS)


def keys(rope: RopeSpec, tokens: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, tokens, rope.head_dim, generator=generator, dtype=EXACT)


def complex_rotation(k: Tensor, rope: RopeSpec, delta: Tensor | int) -> Tensor:
    """The rotation computed another way: pairs as complex numbers, in float64."""
    rotary = rope.layers[0]
    assert rotary is not None
    moved = k.double().clone()
    window = moved[..., rotary.start : rotary.start + rotary.width]
    pairs = len(rotary.inv_freq)
    first = torch.arange(pairs) * 2 if rotary.interleaved else torch.arange(pairs)
    second = first + 1 if rotary.interleaved else first + pairs
    deltas = torch.as_tensor(delta, dtype=EXACT).reshape(-1, 1)
    angle = deltas * torch.tensor(rotary.inv_freq, dtype=EXACT)
    rotated = torch.complex(window[..., first], window[..., second]) * torch.exp(1j * angle)
    window[..., first], window[..., second] = rotated.real, rotated.imag
    return moved


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def bits(k: Tensor) -> Tensor:
    return k.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[k.element_size()])


@pytest.mark.parametrize("delta", [1, -1, 1534, -32768, 131071, MILLION, -MILLION, MAX_DELTA])
@specs
@dtypes
def test_error_is_that_of_one_rounding(dtype: torch.dtype, rope: RopeSpec, delta: int) -> None:
    source = keys(rope).to(dtype)
    exact = complex_rotation(source, rope, delta)
    least = error(exact.to(dtype), exact)
    got = error(rotate(source, rope, delta), exact)
    assert got <= 1.05 * least


@specs
@dtypes
def test_every_token_has_its_own_delta(dtype: torch.dtype, rope: RopeSpec) -> None:
    generator = torch.Generator().manual_seed(3)
    source = keys(rope).to(dtype)
    deltas = torch.randint(-MILLION, MILLION, (source.shape[-2],), generator=generator)
    moved = rotate(source, rope, deltas)
    one_by_one = [
        rotate(source[:, token : token + 1], rope, int(deltas[token]))
        for token in range(source.shape[-2])
    ]
    assert torch.equal(bits(moved), bits(torch.cat(one_by_one, dim=1)))
    assert error(moved, complex_rotation(source, rope, deltas)) < 4e-3


@specs
def test_float64_keys_are_an_oracle(rope: RopeSpec) -> None:
    source = keys(rope)
    assert error(rotate(source, rope, -MILLION), complex_rotation(source, rope, -MILLION)) < 1e-15


@pytest.mark.parametrize("delta", [1534, -31000, MILLION])
@specs
def test_bfloat16_is_within_3e_3_of_recomputation(rope: RopeSpec, delta: int) -> None:
    unrotated, old = keys(rope), 31000 + torch.arange(64)
    cached = complex_rotation(unrotated, rope, old).bfloat16()
    recomputed = complex_rotation(unrotated, rope, old + delta)
    assert error(rotate(cached, rope, delta), recomputed) <= 3e-3


@pytest.mark.parametrize(
    ("dtype", "once", "chained"),
    [
        pytest.param(torch.float32, 5e-8, 1.5e-7, id="float32"),
        pytest.param(torch.bfloat16, 3e-3, 1.2e-2, id="bfloat16"),
        pytest.param(torch.float16, 4e-4, 1.5e-3, id="float16"),
    ],
)
def test_sixty_four_chained_rotations_drift_and_one_does_not(
    dtype: torch.dtype, once: float, chained: float
) -> None:
    rope = SPECS["halves"]
    steps = torch.randint(-500, 500, (64,), generator=torch.Generator().manual_seed(5)).tolist()
    unrotated, old = keys(rope), 40000 + torch.arange(64)
    cached = complex_rotation(unrotated, rope, old).to(dtype)
    exact = complex_rotation(unrotated, rope, old + sum(steps))
    moved = cached
    for step in steps:
        moved = rotate(moved, rope, step)
    assert error(rotate(cached, rope, sum(steps)), exact) <= once
    assert error(moved, exact) >= chained


@specs
@dtypes
def test_delta_0_keeps_every_bit(dtype: torch.dtype, rope: RopeSpec) -> None:
    source = keys(rope).to(dtype)
    source[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=dtype)[:, None]
    source[1, 5, ::2], source[1, 5, 1::2] = -0.0, math.inf
    for delta in (0, torch.zeros(64, dtype=torch.int64)):
        assert torch.equal(bits(rotate(source, rope, delta)), bits(source))
    deltas = torch.arange(64) % 2 * 7
    moved = rotate(source, rope, deltas)
    assert torch.equal(bits(moved[:, ::2]), bits(source[:, ::2]))
    assert not torch.equal(bits(moved[:, 1::2]), bits(source[:, 1::2]))


@specs
@dtypes
def test_other_channels_keep_every_bit(dtype: torch.dtype, rope: RopeSpec) -> None:
    rotary = rope.layers[0]
    assert rotary is not None
    source = keys(rope).to(dtype)
    window = range(rotary.start, rotary.start + rotary.width)
    outside = [channel for channel in range(rope.head_dim) if channel not in window]
    source[..., outside] = torch.tensor(math.nan, dtype=dtype)
    moved = rotate(source, rope, 12345)
    assert torch.equal(bits(moved[..., outside]), bits(source[..., outside]))
    assert bool(torch.isfinite(moved[..., list(window)]).all())


def test_pairs_of_frequency_0_keep_every_bit() -> None:
    rope = SPECS["still-pairs"]
    source = keys(rope).bfloat16()
    source[..., 8:32], source[..., 40:] = -0.0, math.inf
    moved = rotate(source, rope, 999)
    assert torch.equal(bits(moved[..., 8:32]), bits(source[..., 8:32]))
    assert torch.equal(bits(moved[..., 40:]), bits(source[..., 40:]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@specs
@dtypes
def test_what_is_no_number_reaches_its_own_pair_alone(
    dtype: torch.dtype, rope: RopeSpec, bad: float
) -> None:
    rotary = rope.layers[0]
    assert rotary is not None
    source = keys(rope, tokens=5).to(dtype)
    clean = rotate(source, rope, 77)
    pairs = len(rotary.inv_freq)
    for channel in (rotary.start, rotary.start + 3):
        inside = channel - rotary.start
        partner = inside ^ 1 if rotary.interleaved else (inside + pairs) % (2 * pairs)
        source_with = source.clone()
        source_with[1, 2, channel] = bad
        moved = rotate(source_with, rope, 77)
        touched = bits(moved) != bits(clean)
        assert bool(touched[1, 2, channel])
        touched[1, 2, [channel, rotary.start + partner]] = False
        assert not bool(touched.any())


def test_layer_without_rope_is_copied() -> None:
    rope = RopeSpec(layers=(SPECS["halves"].layers[0], None), head_dim=64)
    source = keys(rope).bfloat16()
    moved = rotate(source, rope, 31, layer=1)
    assert torch.equal(bits(moved), bits(source))
    assert moved.data_ptr() != source.data_ptr()
    assert not torch.equal(rotate(source, rope, 31, layer=0), source)


@specs
def test_source_stays_and_strides_do_not_matter(rope: RopeSpec) -> None:
    source = keys(rope).float()
    kept = source.clone()
    wide = torch.full((64, 6, rope.head_dim + 3), math.nan)
    strided = wide[:, ::2, 1 : rope.head_dim + 1].transpose(0, 1)
    strided.copy_(source)
    assert torch.equal(rotate(strided, rope, -55), rotate(source, rope, -55))
    assert torch.equal(source, kept)
    expanded = source[:1].expand(3, -1, -1)
    assert torch.equal(rotate(expanded, rope, 9), rotate(source[:1], rope, 9).expand(3, -1, -1))


@pytest.mark.parametrize("shape", [(0, 64), (5, 64), (2, 0, 64), (2, 3, 4, 5, 64)])
def test_any_number_of_axes_and_no_tokens(shape: tuple[int, ...]) -> None:
    source = torch.randn(shape)
    moved = rotate(source, SPECS["halves"], torch.arange(shape[-2]))
    assert moved.shape == source.shape
    assert moved.is_contiguous()


def test_attention_factor_is_not_applied_again() -> None:
    plain, scaled = SPECS["halves"], spec(attention_factor=1.35)
    source = keys(plain).float()
    assert torch.equal(rotate(source, plain, 4096), rotate(source, scaled, 4096))


deltas_of = st.integers(-MILLION, MILLION)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SPECS)), deltas_of, deltas_of, st.integers(0, 2**31))
def test_rotations_add_up_and_can_be_undone(name: str, first: int, second: int, seed: int) -> None:
    rope = SPECS[name]
    source = keys(rope, tokens=4, seed=seed)
    moved = rotate(rotate(source, rope, first), rope, second)
    assert error(moved, rotate(source, rope, first + second)) < 1e-9
    assert error(rotate(rotate(source, rope, first), rope, -first), source) < 1e-14
    if first + second == 0:
        assert error(moved, source) < 1e-14


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SPECS)), deltas_of, st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_rotations_keep_norms_and_dot_products(
    name: str, delta: int, dtype: torch.dtype, seed: int
) -> None:
    rope = SPECS[name]
    source = keys(rope, tokens=4, seed=seed).to(dtype)
    moved = rotate(source, rope, delta)
    close = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    norms = moved.double().norm(dim=-1), source.double().norm(dim=-1)
    assert torch.allclose(*norms, rtol=close)
    dots = (moved.double() @ moved.double().mT, source.double() @ source.double().mT)
    assert torch.allclose(*dots, atol=close * rope.head_dim)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=9).map(tuple),
    st.integers(0, 5),
    st.integers(0, 5),
    st.booleans(),
    st.lists(deltas_of, min_size=1, max_size=6),
)
def test_any_spec_is_a_rotation_of_complex_numbers(
    inv_freq: tuple[float, ...], start: int, rest: int, interleaved: bool, deltas: list[int]
) -> None:
    rotary = Rotary(inv_freq=inv_freq, start=start, interleaved=interleaved)
    rope = RopeSpec(layers=(rotary,), head_dim=start + rotary.width + rest)
    source, moved_by = keys(rope, tokens=len(deltas)), torch.tensor(deltas)
    exact = complex_rotation(source, rope, moved_by)
    assert torch.allclose(rotate(source, rope, moved_by), exact, rtol=0, atol=1e-12)
    assert error(rotate(source.float(), rope, moved_by), exact) < 1e-6


@pytest.mark.parametrize(
    ("changes", "expected", "named"),
    [
        pytest.param({"rope": None}, TypeError, "None", id="no-spec"),
        pytest.param({"rope": SPECS["halves"].layers[0]}, TypeError, "Rotary", id="rotary"),
        pytest.param({"layer": 1}, ValueError, "layer 1 is outside the 1 layers", id="layer"),
        pytest.param({"layer": -1}, ValueError, "layer -1", id="layer-negative"),
        pytest.param({"layer": True}, TypeError, "True", id="layer-bool"),
        pytest.param({"delta": 2**27 + 1}, ValueError, "134217729", id="delta-far"),
        pytest.param({"delta": -(2**63) - 1}, ValueError, "-9223372036854775809", id="delta-huge"),
        pytest.param({"delta": 1.0}, TypeError, "1.0", id="delta-float"),
        pytest.param({"delta": True}, TypeError, "True", id="delta-bool"),
        pytest.param({"delta": [1, 2]}, TypeError, r"\[1, 2\]", id="delta-list"),
        pytest.param({"delta": torch.ones(3, dtype=torch.int32)}, TypeError, "int32", id="int32"),
        pytest.param(
            {"delta": torch.ones(4, dtype=torch.int64)}, ValueError, r"\[3\].*\[4\]", id="too-many"
        ),
        pytest.param(
            {"delta": torch.tensor([1, 2**40, 2])}, ValueError, "1099511627776", id="one-far"
        ),
        pytest.param({"k": torch.zeros(64)}, ValueError, r"\[64\]", id="one-axis"),
        pytest.param({"k": torch.zeros(3, 63)}, ValueError, r"64\], not \[3, 63\]", id="narrow"),
        pytest.param(
            {"k": torch.zeros(3, 64, dtype=torch.int8)}, UnsupportedRopeError, "int8", id="int8"
        ),
        pytest.param(
            {"k": torch.zeros(3, 64).to(torch.float8_e4m3fn)},
            UnsupportedRopeError,
            "float8_e4m3fn",
            id="float8",
        ),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], expected: type[Exception], named: str) -> None:
    arguments = {"k": torch.zeros(3, 64), "rope": SPECS["halves"], "delta": 5, **changes}
    with pytest.raises(expected, match=named):
        rotate(**arguments)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@dtypes
def test_gpu_agrees_bit_for_bit(dtype: torch.dtype, device: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    source = keys(SPECS["pairs"]).to(dtype)
    deltas = torch.arange(64) * 991
    there = rotate(source.to(device), SPECS["pairs"], deltas.to(device))
    assert torch.equal(bits(there.cpu()), bits(rotate(source, SPECS["pairs"], deltas)))


def test_tables_are_float64_rounded_once() -> None:
    rotary = SPECS["halves"].layers[0]
    assert rotary is not None
    deltas = np.array([0, 1, -MILLION], dtype=np.int64)
    cos, sin = rotary.cos_sin(deltas)
    angles = [[float(delta) * value for value in rotary.inv_freq] for delta in deltas]
    assert cos.tolist() == [[float(np.float32(math.cos(a))) for a in row] for row in angles]
    assert sin.tolist() == [[float(np.float32(math.sin(a))) for a in row] for row in angles]
