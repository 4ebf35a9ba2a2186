"""Triton against the reference, bit for bit; ``test_triton.py`` runs this in another process.

Under ``TRITON_INTERPRET=1`` the kernel runs on CPU tensors; without it on a CUDA device. The
variable must be set before triton is imported, which other tests may have done.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.coded import CODED, LARGEST, NUMBERS, coded, forms_of
from tests.kernels.forms import (
    DTYPES,
    FORMS,
    MOVES,
    RANDOM_FORMS,
    ROPES,
    WAYS,
    Form,
    clone_of,
    geometry_of,
    random_moves,
    rotary,
    same_bits,
    spec,
    tensors_of,
)

from kvtrie.kernels import codes, reference, triton_codes
from kvtrie.kernels import triton as fused
from kvtrie.kernels.geometry import Geometry
from kvtrie.pool import KVLayout
from kvtrie.pool.angles import AngleTables
from kvtrie.pool.kv_pool import KVPool
from kvtrie.pool.moves import check_moves
from kvtrie.rope import RopeSpec, Rotary

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def arguments(
    pool: KVPool, moves: NDArray[Any], num_slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots, deltas = check_moves(moves, num_slots).expand(num_slots)
    cos, sin = AngleTables(pool._rotaries, deltas).of(pool.dtype)
    return torch.from_numpy(slots), cos, sin


def check_form(form: Form, dtype: str, rope: RopeSpec, seed: int, **changes: int) -> None:
    sizes = form.sizes(**changes)
    held = form.build(dtype, sizes, DEVICE, seed)
    pool = form.pool(held, sizes, rope)
    given = arguments(pool, random_moves(seed, sizes.slots), sizes.slots)
    copies, tensors = clone_of(held, pool)
    reference.move_rows(tensors, *given, geometry_of(pool))
    fused.move_rows(tensors_of(pool), *given, geometry_of(pool))
    for storage, copy in zip(held.storages, copies, strict=True):
        assert same_bits(storage, copy)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_and_dtype(form: Form, dtype: str) -> None:
    check_form(form, dtype, spec("some-layers-without"), seed=8)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [FORMS[1], FORMS[-1]], ids=lambda form: form.name)
def test_every_rope(form: Form, rope: str, dtype: str) -> None:
    check_form(form, dtype, spec(rope), seed=5)


@settings(max_examples=60)
@RANDOM_FORMS
def test_random_plans(
    form: Form, rope: str, dtype: str, blocks: int, block_size: int, seed: int
) -> None:
    check_form(form, dtype, spec(rope), seed, blocks=blocks, block_size=block_size)


@settings(max_examples=30)
@given(
    head_dim=st.integers(1, 40),
    heads=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_random_windows(
    head_dim: int, heads: int, dtype: str, data: st.DataObject, seed: int
) -> None:
    layers: list[Rotary | None] = []
    for _ in range(3):
        pairs = data.draw(st.integers(0, head_dim // 2))
        start = data.draw(st.integers(0, head_dim - 2 * pairs))
        window = rotary(pairs, start=start, interleaved=data.draw(st.booleans())) if pairs else None
        layers.append(data.draw(st.sampled_from([window, window, None])))
    form = FORMS[0]
    changes = {"head_dim": head_dim, "v_head_dim": head_dim, "heads": heads}
    check_form(form, dtype, RopeSpec(tuple(layers), head_dim), seed, **changes)


# The interpreter computes in numpy, which warns of what is tested here.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", ["neox", "interleaved", "other-windows-by-layer", "none"])
def test_every_bit_pattern(dtype: str, rope: str) -> None:
    """NaN with any payload, infinity, subnormal numbers and both zeros, wherever they are."""
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=12, dtype=dtype, block_size=4)
    pools = [KVPool(layout, spec(rope), num_blocks=40, device=DEVICE) for _ in range(2)]
    width = pools[0].dtype.itemsize
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    limit = 2 ** (8 * width) - 1
    infinity = {"float16": 0x7C00, "float64": 0x7FF0}.get(dtype, 0x7F80) << (8 * width - 16)
    smallest = [0, 1, limit // 2 + 1, limit // 2 + 2]
    special = np.array([*smallest, infinity, infinity + 1, limit // 2, limit], dtype=f"u{width}")
    rng = np.random.default_rng(1)
    for tensor, other in zip(tensors_of(pools[0]), tensors_of(pools[1]), strict=True):
        values = np.frombuffer(rng.bytes(tensor.nbytes), dtype=f"i{width}").copy()
        spots = rng.random(len(values)) < 0.2
        values[spots] = rng.choice(special, int(spots.sum())).view(f"i{width}")
        for each in (tensor, other):
            each.view(kind).copy_(torch.from_numpy(values).view(each.shape))
    moves = np.array([(0, 80, 70, 3), (70, 150, 10, 0)], dtype=MOVES)
    given = arguments(pools[0], moves, 160)
    reference.move_rows(tensors_of(pools[0]), *given, geometry_of(pools[0]))
    fused.move_rows(tensors_of(pools[1]), *given, geometry_of(pools[1]))
    for mine, other in zip(tensors_of(pools[1]), tensors_of(pools[0]), strict=True):
        # A NaN that comes out of arithmetic is a NaN; its payload is the machine's.
        both_nan = mine.isnan() & other.isnan()
        assert bool(((mine.view(kind) == other.view(kind)) | both_nan).all())
    if rope == "none":
        for mine, other in zip(tensors_of(pools[1]), tensors_of(pools[0]), strict=True):
            assert same_bits(mine, other)


def test_nothing_to_move() -> None:
    form = FORMS[0]
    held = form.build("bfloat16", form.sizes(), DEVICE)
    bits = held.bits()
    pool = form.pool(held, form.sizes(), spec("neox"))
    given = arguments(pool, np.array([], dtype=MOVES), form.sizes().slots)
    fused.move_rows(tensors_of(pool), *given, geometry_of(pool))
    assert all(torch.equal(now, then) for now, then in zip(held.bits(), bits, strict=True))


def test_slots_of_64_bits() -> None:
    """Slots of pools of 2**31 slots and more are passed in int64."""
    form = FORMS[0]
    sizes = form.sizes()
    held = form.build("float32", sizes, DEVICE)
    pool = form.pool(held, sizes, spec("neox"))
    copies, tensors = clone_of(held, pool)
    slots, cos, sin = arguments(pool, random_moves(4, sizes.slots), sizes.slots)
    wide = check_moves(random_moves(4, sizes.slots), sizes.slots).expand(2**31)[0]
    assert slots.dtype == torch.int32
    assert wide.dtype == np.int64
    reference.move_rows(tensors, slots, cos, sin, geometry_of(pool))
    fused.move_rows(tensors_of(pool), torch.from_numpy(wide), cos, sin, geometry_of(pool))
    assert all(same_bits(one, two) for one, two in zip(held.storages, copies, strict=True))


@pytest.mark.parametrize("ends", [(0, -1), (-1, 0)], ids=["to-far", "from-far"])
@pytest.mark.parametrize("axis", ["blocks", "tokens", "dim"])
@pytest.mark.parametrize(
    "window",
    [
        pytest.param(rotary(4), id="near-window"),
        pytest.param(rotary(2, start=8), id="far-window"),
        pytest.param(rotary(2, start=8, interleaved=True), id="far-pairs"),
    ],
)
def test_addresses_beyond_two_to_the_31_elements(
    axis: str, window: Rotary, ends: tuple[int, int]
) -> None:
    """Strides so long that their products need 64 bits, though each fits 32; few pages are real."""
    far = 2**30 + 64
    strides = {"blocks": (far, 12, 1), "tokens": (12, far, 1), "dim": (12, 4, far // 4)}[axis]
    shape = (1 if axis == "tokens" else 3, 3, 12)
    slots = shape[0] * shape[1]
    source, dest = (slot % slots for slot in ends)
    k, v = (
        torch.empty(3 * far + 4096, dtype=torch.float16, device=DEVICE).as_strided(shape, strides)
        for _ in range(2)
    )
    for rows in (k, v):
        rows.copy_(torch.randn(shape))
    layout = KVLayout.from_tensors(
        ([k], [v]), axes="blocks tokens dim", block_size=3, num_kv_heads=1, head_dim=12
    )
    rope = RopeSpec((window,), 12)
    pool = KVPool.wrap(([k], [v]), layout, rope)
    before = k.clone(), v.clone()
    moves = np.array([(source, dest, 1, 40)], dtype=MOVES)
    fused.move_rows(tensors_of(pool), *arguments(pool, moves, slots), geometry_of(pool))
    rotated = reference.rotate(before[0].view(-1, 12)[source].unsqueeze(0), rope, 40)
    for rows, old, row in zip(
        (k, v), before, (rotated[0], before[1].view(-1, 12)[source]), strict=True
    ):
        now = rows.clone()
        assert same_bits(now.view(-1, 12)[dest], row)
        now.view(-1, 12)[dest] = old.view(-1, 12)[dest]
        assert same_bits(now, old)


def test_bases_that_are_not_aligned() -> None:
    """A tensor may start anywhere: loads are only as wide as all addresses allow."""
    whole = torch.randn(1 + 2 * 6 * 4 * 3 * 16, device=DEVICE).to(torch.bfloat16)
    assert whole[1:].data_ptr() % 16 == 2
    assert fused._alignment([whole.data_ptr(), 0]) == 16
    assert fused._alignment([whole.data_ptr(), whole[1:].data_ptr()]) == 2
    k = whole[1:].view(2, 6, 4, 3, 16)
    layout = KVLayout.from_tensors(
        [k], axes="kv blocks tokens heads dim", block_size=4, num_kv_heads=3, head_dim=16
    )
    pool = KVPool.wrap([k], layout, RopeSpec((rotary(8),), 16))
    other = whole.clone()
    given = arguments(pool, random_moves(3, 24), 24)
    reference.move_rows([other[1:].view(2, 6, 4, 3, 16)], *given, geometry_of(pool))
    fused.move_rows(tensors_of(pool), *given, geometry_of(pool))
    assert same_bits(whole, other)


def test_one_upload_holds_all_tables() -> None:
    parts = [
        torch.arange(18).view(3, 6),
        torch.arange(15, dtype=torch.int32).view(3, 5),
        torch.empty(2, 0, 4),
        torch.rand(1, 3, 4, dtype=torch.float64),
    ]
    staged = fused._packed(parts, pinned=DEVICE == "cuda")
    for part, arrived in zip(parts, fused._unpacked(staged, parts), strict=True):
        assert arrived.data_ptr() % 16 == 0
        assert torch.equal(part, arrived)


def test_geometry_survives_being_numbers() -> None:
    for form in FORMS:
        held = form.build("bfloat16", form.sizes(), DEVICE)
        pool = form.pool(held, form.sizes(), spec("other-windows-by-layer"))
        geometry = geometry_of(pool)
        assert Geometry.from_ints(geometry.to_ints()) == geometry


# --- codes ----------------------------------------------------------------------------------------


# The interpreter computes in numpy, which warns of NaN and infinity.
NAN = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")


def check_codes(
    form: Form,
    quant: str,
    rope: RopeSpec,
    seed: int,
    *,
    is_tame: bool = True,
    fill: int | None = None,
    moves: NDArray[Any] | None = None,
    **changes: int,
) -> int:
    """The same bytes and the same count as the reference; returns the count."""
    it = coded(form, quant, rope, seed=seed, device=DEVICE, is_tame=is_tame, **changes)
    if fill is not None:
        for view in it.pool.k:
            view.fill_(fill)
    num_slots = it.pool.num_blocks * it.layout.block_size
    given = arguments(it.pool, random_moves(seed, num_slots) if moves is None else moves, num_slots)
    of_k = it.pool._launches[0].form
    assert of_k is not None
    copies, tensors = clone_of(it.held, it.pool)
    counts = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    geometry = geometry_of(it.pool)
    reference.requantize_rows(tensors, counts[0], *given, geometry, of_k)
    triton_codes.requantize_rows(tensors_of(it.pool), counts[1], *given, geometry, of_k)
    for storage, copy in zip(it.held.storages, copies, strict=True):
        assert torch.equal(storage, copy)
    assert torch.equal(*counts)
    return int(counts[0])


@NAN
@pytest.mark.parametrize("quant", CODED)
def test_codes_on_every_form(quant: str) -> None:
    for number, form in enumerate(forms_of(quant)[::5]):
        check_codes(form, quant, spec("some-layers-without"), seed=number)


@NAN
@pytest.mark.parametrize("quant", ["fp8_e5m2", "fp8_per_token_head", "fp8_index"])
@pytest.mark.parametrize("rope", [name for name in ROPES if name != "none"])
def test_codes_with_every_rope(quant: str, rope: str) -> None:
    check_codes(forms_of(quant)[0], quant, spec(rope), seed=5)


@NAN
@settings(max_examples=15)
@given(
    quant=st.sampled_from(CODED),
    rope=st.sampled_from([name for name in ROPES if name != "none"]),
    number=st.integers(0, 99),
    blocks=st.integers(1, 9),
    block_size=st.integers(1, 7),
    is_tame=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_codes_of_random_plans(
    quant: str, rope: str, number: int, blocks: int, block_size: int, is_tame: bool, seed: int
) -> None:
    forms = forms_of(quant)
    changes: dict[str, Any] = {"blocks": blocks, "block_size": block_size}
    form = forms[number % len(forms)]
    check_codes(form, quant, spec(rope), seed, is_tame=is_tame, **changes)


@pytest.mark.parametrize(("quant", "fill"), [("fp8_e4m3", 0x7E), ("fp8_e5m2", 0x7B), ("int8", 127)])
def test_codes_that_saturate_are_counted(quant: str, fill: int) -> None:
    moves = np.array([(0, 20, 9, 1)], dtype=MOVES)
    assert check_codes(FORMS[0], quant, spec("neox"), seed=5, fill=fill, moves=moves) > 0


@NAN
@pytest.mark.parametrize("name", LARGEST)
def test_every_code_is_read_and_rounded_as_in_the_reference(name: str) -> None:
    """A row of every pair of codes that rotates by a quarter: each becomes its partner."""
    kind = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "int8": "int8"}[name]
    layout = KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=512, v_head_dim=1, dtype="uint8", quant=kind
    )
    rope = RopeSpec((Rotary((float(np.pi / 2),) * 256),), 512)
    both = []
    for run in (reference.requantize_rows, triton_codes.requantize_rows):
        pool = KVPool(layout, rope, num_blocks=2, device=DEVICE)
        pool.k[0][0, 0, 0] = torch.arange(512).to(torch.uint8)
        moves = np.array([(0, 16, 1, 1)], dtype=MOVES)
        given = arguments(pool, moves, 32)
        count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        assert pool._launches[0].form is not None
        run(tensors_of(pool), count, *given, geometry_of(pool), pool._launches[0].form)
        both.append((pool.k[0].clone(), int(count)))
    assert torch.equal(both[0][0], both[1][0])
    assert both[0][1] == both[1][1]
    code = {"e4m3": codes.E4M3, "e5m2": codes.E5M2, "int8": codes.INT8}[name]
    got = codes.decode(both[1][0][1, 0, 0].cpu(), code).numpy()
    numbers = NUMBERS[name]
    finite = np.isfinite(numbers) & (np.abs(numbers) <= LARGEST[name])
    # sin is 1 in float32, cos 6e-17.
    np.testing.assert_array_equal(got[256:][finite], numbers[finite])


def test_bytes_without_a_delta_are_copied_by_the_first_kernel() -> None:
    it = coded(FORMS[0], "fp8_per_token_head", spec("neox"), device=DEVICE, is_tame=False)
    copies, tensors = clone_of(it.held, it.pool)
    moves = np.array([(3, 20, 9, 0)], dtype=MOVES)
    given = arguments(it.pool, moves, 35)
    reference.move_rows(tensors, *given, geometry_of(it.pool))
    fused.move_rows(tensors_of(it.pool), *given, geometry_of(it.pool))
    assert all(map(torch.equal, it.held.storages, copies))
