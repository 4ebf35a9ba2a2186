"""KVPool of quantised rows: codes against a naive rotation, and nothing else changes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.coded import (
    BLOCKWISE,
    CODED,
    PLAIN,
    SCALED,
    Coded,
    coded,
    expected,
    forms_of,
    scales_of,
)
from tests.kernels.forms import FORMS, MOVES, ROPES, random_moves, rotary, spec

import kvtrie
from kvtrie import KvTrieError
from kvtrie._core import LayoutError
from kvtrie.kernels import codes, reference
from kvtrie.models.kv_types import KV_TYPES
from kvtrie.pool import ChainedRotationError, KVLayout, KVPool, NonFiniteError
from kvtrie.rope import RopeSpec, Rotary

types = pytest.mark.parametrize("quant", CODED)
MOVE = np.array([(0, 20, 9, -5)], dtype=MOVES)


def check(it: Coded, moves: Any) -> int:
    """Apply, compare every byte, and return the saturated elements."""
    want_k, want_v, count = expected(it.pool, moves)
    before = it.bytes()
    old = [[view.clone() for view in side if view is not None] for side in (it.pool.k, it.pool.v)]
    event = it.pool.apply(moves, hops=1)
    assert event.num_saturated == count
    for want, view in zip((*want_k, *want_v), (*it.pool.k, *it.pool.v), strict=True):
        if want is not None and view is not None:
            np.testing.assert_array_equal(view.flatten(0, 1).numpy(), want)
    # With the rows restored, every byte is as before, padding included.
    for views, kept in zip((it.pool.k, it.pool.v), old, strict=True):
        for view, rows in zip((one for one in views if one is not None), kept, strict=True):
            view.copy_(rows)
    assert all(map(torch.equal, it.bytes(), before))
    return count


@types
def test_a_move_on_every_form(quant: str) -> None:
    for form in forms_of(quant):
        it = coded(form, quant, spec("other-windows-by-layer"), seed=3)
        check(it, random_moves(3, it.pool.num_blocks * 5))


@types
@pytest.mark.parametrize("rope", ROPES)
def test_a_move_with_every_rope(quant: str, rope: str) -> None:
    it = coded(forms_of(quant)[0], quant, spec(rope), seed=5)
    check(it, random_moves(5, it.pool.num_blocks * 5))


@settings(max_examples=25)
@given(
    quant=st.sampled_from(CODED),
    rope=st.sampled_from(sorted(ROPES)),
    number=st.integers(0, 99),
    block_size=st.integers(1, 6),
    is_tame=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_moves(
    quant: str, rope: str, number: int, block_size: int, is_tame: bool, seed: int
) -> None:
    forms = forms_of(quant)
    it = coded(
        forms[number % len(forms)],
        quant,
        spec(rope),
        seed=seed,
        is_tame=is_tame,
        block_size=block_size,
    )
    check(it, random_moves(seed, it.pool.num_blocks * block_size))


@pytest.mark.parametrize("quant", PLAIN)
def test_saturated_elements_are_counted(quant: str) -> None:
    """Codes anywhere in the range: many pairs are longer than the largest code."""
    it = coded(FORMS[0], quant, spec("neox"), seed=7)
    for view in it.pool.k:
        view.copy_({"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B, "int8": 127}[quant] * torch.ones_like(view))
    assert check(it, np.array([(0, 20, 9, 1)], dtype=MOVES)) > 0


@pytest.mark.parametrize("quant", [*SCALED, BLOCKWISE])
def test_a_row_with_its_own_scale_never_saturates(quant: str) -> None:
    it = coded(forms_of(quant)[0], quant, spec("neox"), seed=8)
    assert check(it, np.array([(0, 20, 9, 131)], dtype=MOVES)) == 0


@types
def test_without_a_delta_every_bit_is_copied(quant: str) -> None:
    """NaN with any payload, -128 of int8, scales that are no numbers; and no hops are needed."""
    it = coded(forms_of(quant)[0], quant, spec("neox"), seed=9, is_tame=False)
    moves = np.array([(3, 20, 9, 0)], dtype=MOVES)
    sides = [view for view in (*it.pool.k, *it.pool.v) if view is not None]
    want = [view.flatten(0, 1)[3:12].clone() for view in sides]
    event = it.pool.apply(moves)
    assert (event.num_saturated, event.num_requantized) == (0, 0)
    for view, rows in zip(sides, want, strict=True):
        assert torch.equal(view.flatten(0, 1)[20:29], rows)


@types
def test_layers_without_rope_and_v_keep_every_bit(quant: str) -> None:
    it = coded(forms_of(quant)[0], quant, spec("some-layers-without"), seed=10, is_tame=False)
    untouched = [it.pool.k[0], it.pool.k[2]]
    if quant != BLOCKWISE:
        untouched += [view for view in it.pool.v if view is not None]
    want = [view.flatten(0, 1)[0:9].clone() for view in untouched]
    it.pool.apply(MOVE, hops=1)
    for view, rows in zip(untouched, want, strict=True):
        assert torch.equal(view.flatten(0, 1)[20:29], rows)


@types
def test_a_number_of_requantized_elements(quant: str) -> None:
    """Pairs that stay are none, unless the row has a scale of its own."""
    it = coded(forms_of(quant)[0], quant, spec("still-pairs"), seed=1)
    heads = it.layout.num_kv_heads
    moves = np.array([(0, 20, 9, -5), (9, 30, 2, 0)], dtype=MOVES)
    event = it.pool.apply(moves, hops=1)
    assert event.num_requantized == 9 * heads * 3 * (6 if quant in PLAIN else 12)


@types
@pytest.mark.parametrize(
    ("hops", "error", "message"),
    [
        (None, ValueError, "only once: give hops"),
        (0, ValueError, "hops is 0"),
        (-1, ValueError, "hops is -1"),
        (2, ChainedRotationError, r"2 hops.*max_hops=1"),
        (np.uint16(3), ChainedRotationError, "3 hops"),
        (True, TypeError, "hops must be an int"),
        (1.0, TypeError, "hops must be an int"),
    ],
)
def test_a_second_rotation_is_refused(
    quant: str, hops: Any, error: type[Exception], message: str
) -> None:
    it = coded(forms_of(quant)[0], quant, spec("neox"))
    before = it.bytes()
    with pytest.raises(error, match=message):
        it.pool.apply(MOVE, hops=hops)
    assert all(map(torch.equal, it.bytes(), before))


def test_the_error_of_hops_is_one_of_kvtrie_and_can_be_pickled() -> None:
    assert issubclass(ChainedRotationError, KvTrieError)
    error = pickle.loads(pickle.dumps(ChainedRotationError("message", 2)))  # noqa: S301 - our own
    assert (str(error), error.hops) == ("message", 2)


def test_layers_that_do_not_rotate_need_no_hops() -> None:
    """K without RoPE holds no position, so its bytes are copied however often it moves."""
    it = coded(FORMS[0], "fp8_e4m3", spec("none"))
    want = [view.flatten(0, 1)[0:9].clone() for view in it.pool.k]
    it.pool.apply(MOVE)
    for view, rows in zip(it.pool.k, want, strict=True):
        assert torch.equal(view.flatten(0, 1)[20:29], rows)


@pytest.mark.cuda
@types
def test_a_gpu_has_the_bytes_and_the_count_of_a_cpu(quant: str) -> None:
    moves = random_moves(3, 35)
    found = []
    for device in ("cpu", "cuda"):
        it = coded(forms_of(quant)[0], quant, spec("neox"), seed=3, device=device)
        event = it.pool.apply(moves, hops=1)
        found.append(([one.cpu() for one in it.bytes()], event.num_saturated))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


def unit(quant: str, k: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of bytes and of the scales of ``[layers, tokens, heads, channels]``."""
    form = codes.CodeForm.of(KV_TYPES[quant])
    assert form is not None
    if quant in PLAIN:
        return codes.encode(k.float() / scale, form.code)[0], torch.tensor(scale)
    found, scales = codes.quantize(k, form)
    return found, scales.unsqueeze(-1)


def floats(quant: str, bytes_: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    code = {"int8": codes.INT8, "fp8_e5m2": codes.E5M2}.get(quant, codes.E4M3)
    if quant == "int8_per_token_head":
        code = codes.INT8
    return codes.decode(bytes_, code).double() * scales.double()


@types
@pytest.mark.parametrize("delta", [1, -57, 1534, -131_072])
@pytest.mark.parametrize("interleaved", [False, True])
def test_error_is_within_one_and_a_half_of_direct_rounding(
    quant: str, delta: int, interleaved: bool
) -> None:
    """Direct rounding: the same K, computed at the new position, and rounded once."""
    dim, tokens, heads = 128, 96, 1 if quant == BLOCKWISE else 2
    rope = RopeSpec((rotary(dim // 2, 1e4, interleaved=interleaved),) * 2, dim)
    k = torch.randn(2, tokens, heads, dim, generator=torch.Generator().manual_seed(delta % 97))
    # Some pairs are much larger than others, as in real keys: both channels, since they rotate.
    large = torch.ones(dim // 2)
    large[5::16] = 4
    k *= large.repeat_interleave(2) if interleaved else torch.cat([large, large])
    want = torch.stack(
        [
            reference.rotate(rows.double().transpose(0, 1), rope, delta, layer).transpose(0, 1)
            for layer, rows in enumerate(k)
        ]
    )
    scale = float(k.abs().max()) / {"int8": 127.0, "fp8_e5m2": 57344.0}.get(quant, 448.0)
    direct = floats(quant, *unit(quant, want, scale * 1.05))
    bytes_, scales = unit(quant, k, scale * 1.05)
    v_dim = 0 if quant == BLOCKWISE else dim
    layout = KVLayout(
        num_layers=2,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype="uint8",
        quant=quant,
    )
    pool = KVPool(layout, rope, num_blocks=12)
    rows = bytes_
    if quant in SCALED:
        rows = torch.cat([bytes_, scales.contiguous().view(torch.uint8)], dim=-1)
    v: torch.Tensor = rows
    if quant == BLOCKWISE:
        v = scales.contiguous().view(torch.uint8)
    pool.scatter(rows, v, [*range(6)], 0)
    pool.apply(np.array([(0, 96, tokens, delta)], dtype=MOVES), hops=1)
    got_k, got_v = pool.gather([*range(6, 12)], 0, tokens)
    its = torch.tensor(scale * 1.05)
    if quant in SCALED:
        its = got_k[..., -4:].contiguous().view(torch.float32)
    elif quant == BLOCKWISE:
        assert got_v is not None
        its = got_v.contiguous().view(torch.float32)
    else:
        assert got_v is not None
        assert torch.equal(got_v, v)
    moved = floats(quant, got_k[..., :dim], its)
    ratio = float((moved - want).norm() / (direct - want).norm())
    assert ratio <= 1.5, ratio


# --- latent rows with a bfloat16 tail -------------------------------------------------------------


def ds_mla(
    seed: int = 0, *, heads_axis: bool = False, interleaved: bool = True
) -> tuple[list[torch.Tensor], KVPool]:
    rng = torch.Generator().manual_seed(seed)
    shape = (7, 1, 5, 656) if heads_axis else (7, 5, 656)
    tensors = [torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8) for _ in range(3)]
    for tensor in tensors:
        tail = tensor[..., 528:].unflatten(-1, (64, 2))
        wanted = torch.randn(tail.shape[:-1], generator=rng).bfloat16()
        tail.copy_(wanted.unsqueeze(-1).view(torch.uint8))
        scales = torch.rand((*tail.shape[:-2], 4), generator=rng)
        tensor[..., 512:528].copy_(scales.view(torch.uint8))
        codes_ = tensor[..., :512]
        codes_[(codes_ & 0x7F) == 0x7F] = 0x11
    layout = KVLayout.from_tensors(
        tensors,
        axes="blocks heads tokens dim" if heads_axis else "blocks tokens dim",
        block_size=5,
        num_kv_heads=1,
        head_dim=576,
        v_head_dim=0,
        quant="fp8_ds_mla",
    )
    window = rotary(32, 1e4, start=512, interleaved=interleaved)
    return tensors, KVPool.wrap(tensors, layout, RopeSpec((window, None, window), 576))


def of_tail(rows: torch.Tensor) -> torch.Tensor:
    return rows[..., 528:].contiguous().view(torch.bfloat16)


@pytest.mark.parametrize("heads_axis", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("delta", [-57, 1534])
def test_latent_bytes_are_copied_and_the_tail_is_rounded_once(
    heads_axis: bool, interleaved: bool, delta: int
) -> None:
    tensors, pool = ds_mla(3, heads_axis=heads_axis, interleaved=interleaved)
    before = [view.flatten(0, 1).squeeze(1).clone() for view in pool.k]
    pool.apply(np.array([(2, 20, 9, delta), (11, 30, 3, 0)], dtype=MOVES))
    short = RopeSpec((rotary(32, 1e4, interleaved=interleaved),), 64)
    for layer, (view, old) in enumerate(zip(pool.k, before, strict=True)):
        now = view.flatten(0, 1).squeeze(1)
        want = old.clone()
        want[20:29], want[30:33] = old[2:11], old[11:14]
        if layer != 1:
            source = of_tail(old[2:11])
            moved = reference.rotate(source, short, delta)
            want[20:29, 528:] = moved.view(torch.uint8)
            exact = reference.rotate(source.double(), short, delta)
            once = (exact.bfloat16().double() - exact).norm()
            assert float((moved.double() - exact).norm()) <= 1.0001 * float(once)
        assert torch.equal(now, want)
    assert all(tensor.dtype == torch.uint8 for tensor in tensors)


def test_latent_rows_need_no_hops() -> None:
    """Only bfloat16 is rounded, as in a pool of bfloat16."""
    _, pool = ds_mla()
    event = pool.apply(MOVE)
    assert (event.num_saturated, event.num_requantized) == (0, 0)
    pool.apply(MOVE, hops=3)


def test_latent_rows_at_odd_addresses_are_refused() -> None:
    whole = torch.zeros(1 + 7 * 5 * 657, dtype=torch.uint8)
    padded = whole[: 7 * 5 * 657].view(7, 5, 657)[..., :656]
    odd = whole[1 : 1 + 7 * 5 * 656].view(7, 5, 656)
    for tensor in (padded, odd):
        layout = KVLayout.from_tensors(
            [tensor],
            axes="blocks tokens dim",
            block_size=5,
            num_kv_heads=1,
            head_dim=576,
            v_head_dim=0,
            quant="fp8_ds_mla",
        )
        with pytest.raises(LayoutError, match="even strides"):
            KVPool.wrap([tensor], layout)


def test_a_window_in_the_latent_is_refused() -> None:
    tensors, pool = ds_mla()
    window = rotary(32, start=500)
    with pytest.raises(LayoutError, match="layer 0 rotates channels from 500 on"):
        KVPool.wrap(tensors, pool.layout, RopeSpec((window,) * 3, 576))


def test_a_pool_makes_its_own_latent_rows() -> None:
    layout = KVLayout(
        num_layers=2, num_kv_heads=1, head_dim=576, v_head_dim=0, dtype="uint8", quant="fp8_ds_mla"
    )
    window = rotary(32, start=512, interleaved=True)
    pool = KVPool(layout, RopeSpec((window, window), 576), num_blocks=4)
    assert layout.bytes_per_token == 2 * 656
    rows = torch.zeros(2, 3, 1, 656, dtype=torch.uint8)
    rows[..., 528:] = torch.ones(2, 3, 1, 64).bfloat16().view(torch.uint8)
    pool.scatter(rows, None, [0], 0)
    pool.apply(np.array([(0, 16, 3, 7)], dtype=MOVES))
    got, v = pool.gather([1], 0, 3)
    assert v is None
    assert not torch.equal(of_tail(got), of_tail(rows))
    assert torch.equal(got[..., :528], rows[..., :528])


# --- index rows move with their run ---------------------------------------------------------------


def test_index_rows_move_with_the_latent_rows() -> None:
    """Two pools with the same blocks, one list of moves."""
    _, pool = ds_mla(5)
    page = 5 * (128 + 4)
    tensors = [torch.zeros(7, page, dtype=torch.uint8) for _ in range(3)]
    form = codes.CodeForm(codes.E4M3, codes.IN_V, is_power_of_two=True)
    k = torch.randn(3, 9, 1, 128, generator=torch.Generator().manual_seed(2))
    bytes_, scales = codes.quantize(k, form)
    layout = KVLayout.from_tensors(
        tensors,
        axes="blocks (kv tokens dim)",
        block_size=5,
        num_kv_heads=1,
        head_dim=128,
        v_head_dim=0,
        quant="fp8_index",
    )
    assert layout.bytes_per_block == 3 * page
    rope = RopeSpec((Rotary(tuple(1e4 ** (-i / 32) for i in range(32))),) * 3, 128)
    index = KVPool.wrap(tensors, layout, rope)
    index.scatter(bytes_, scales.unsqueeze(-1).view(torch.uint8), [0, 1], 0)
    # The page has the codes of all its tokens, and then their scales.
    assert torch.equal(tensors[0][0, : 5 * 128], bytes_[0, :5].flatten())
    assert torch.equal(tensors[0][0, 5 * 128 :].view(torch.float32), scales[0, :5].flatten())
    for one in (pool, index):
        one.apply(np.array([(0, 20, 9, -5)], dtype=MOVES), hops=1)
    got, got_scales = index.gather([4, 5], 0, 9)
    assert got_scales is not None
    moved = codes.decode(got, codes.E4M3) * got_scales.contiguous().view(torch.float32)
    want = torch.stack(
        [reference.rotate(rows.transpose(0, 1).double(), rope, -5).transpose(0, 1) for rows in k]
    )
    direct, its = codes.quantize(want, form)
    rounded = codes.decode(direct, codes.E4M3) * its.unsqueeze(-1)
    assert float((moved - want).norm()) <= 1.5 * float((rounded - want).norm())
    # Scales are powers of two, so channels without RoPE keep their bits where the scale stays.
    same = (got_scales.view(torch.float32).flatten() == scales.flatten()).view(3, 9)
    assert bool(same.any())
    assert torch.equal(got[..., 0, 64:][same], bytes_[..., 0, 64:][same])


# --- finite numbers -------------------------------------------------------------------------------


def spoil(it: Coded, at: tuple[int, int]) -> list[Any]:
    """Ways to make a row of a slot not finite: bytes to write, and where."""
    quant = it.layout.quant
    nan = torch.tensor([torch.nan]).view(torch.uint8)
    found: list[Any] = []
    if quant not in ("int8", "int8_per_token_head"):
        found.append((it.pool.k[1][at][0, 3:4], torch.tensor([0xFF], dtype=torch.uint8)))
    found += [(view[at][0], nan) for view in scales_of(it.pool)]
    if quant in SCALED:
        found += [(view[at][0, -4:], nan) for view in it.pool.v if view is not None]
    return found


@pytest.mark.parametrize("quant", [one for one in CODED if one != "int8"])
def test_sources_that_are_not_finite_are_named(quant: str) -> None:
    it = coded(forms_of(quant)[0], quant, spec("neox"), seed=2)
    for view in it.pool.v:
        if view is not None and quant != BLOCKWISE:
            view.zero_()
    it.pool.apply(MOVE, check_finite=True, hops=1)
    for place, bytes_ in spoil(it, (1, 2)):
        kept = place.clone()
        place.copy_(bytes_)
        before = it.bytes()
        with pytest.raises(NonFiniteError, match="slot 7 of block 1") as raised:
            it.pool.apply(MOVE, check_finite=True, hops=1)
        assert raised.value.block_ids == [1]
        assert all(map(torch.equal, it.bytes(), before))
        place.copy_(kept)


def test_codes_of_int8_are_always_finite() -> None:
    it = coded(FORMS[0], "int8", spec("neox"), seed=2, is_tame=False)
    it.pool.apply(MOVE, check_finite=True, hops=1)


@pytest.mark.parametrize(
    ("start", "value"), [(7, [0x7F]), (516, [0, 0, 0xC0, 0x7F]), (530, [0x80, 0x7F])]
)
def test_latent_rows_that_are_not_finite_are_named(start: int, value: list[int]) -> None:
    """A code, a scale, and an element of the tail."""
    _, pool = ds_mla(4)
    pool.apply(MOVE, check_finite=True)
    pool.k[2][1, 2, 0, start : start + len(value)] = torch.tensor(value, dtype=torch.uint8)
    with pytest.raises(NonFiniteError, match="slot 7 of block 1"):
        pool.apply(MOVE, check_finite=True)


# --- layouts --------------------------------------------------------------------------------------


def layout(**changes: Any) -> KVLayout:
    known: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "uint8"}
    return KVLayout(**(known | changes))


@pytest.mark.parametrize(
    ("quant", "why"),
    [
        ("fp8", "name fp8_e4m3, fp8_e5m2"),
        ("int4", "4-bit codes"),
        ("int4_per_token_head", "transformed before it is rounded"),
        ("uint4", "4-bit codes"),
        ("nvfp4", "groups of 4-bit codes share a scale"),
        ("nvfp4_4over6", "groups of 4-bit codes share a scale"),
        ("nvfp4_ds_mla", "RoPE channels are quantised too"),
        ("mxfp4", "groups of codes share a scale"),
        ("mxfp8", "groups of codes share a scale"),
        ("turboquant_k8v4", "transformed before it is rounded"),
        ("ultraquant_4bit", "groups of 4-bit codes share a scale"),
        ("fp8_inc", "number format"),
        ("fp8_e4m3fnuz", "another bias"),
        ("fp6", "unknown; known are fp8_e4m3, fp8_e5m2, int8"),
        (8, "unknown"),
    ],
)
def test_other_types_are_refused_by_name(quant: Any, why: str) -> None:
    with pytest.raises(LayoutError, match=why) as caught:
        layout(quant=quant)
    assert repr(quant) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "'uint8' is not supported without quant"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn' is not supported without quant"),
        ({"quant": "fp8_e4m3", "dtype": "bfloat16"}, "are uint8 or float8_e4m3fn, not 'bfloat16'"),
        ({"quant": "fp8_e5m2", "dtype": "float8_e4m3fn"}, "are uint8 or float8_e5m2"),
        ({"quant": "int8", "dtype": "float8_e5m2"}, "are int8 or uint8"),
        ({"quant": "fp8_ds_mla"}, "has head_dim 576, not 8"),
        ({"quant": "fp8_ds_mla", "head_dim": 576}, "one row per token"),
        ({"quant": "fp8_index", "num_kv_heads": 1}, "one row per token"),
    ],
)
def test_sizes_and_types_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        layout(**changes)


@pytest.mark.parametrize(
    ("quant", "k_row", "v_row"),
    [("fp8_e4m3", 8, 6), ("int8", 8, 6), ("fp8_per_token_head", 12, 10)],
)
def test_bytes_have_the_scales_that_are_stored_with_rows(
    quant: str, k_row: int, v_row: int
) -> None:
    it = layout(quant=quant, v_head_dim=6)
    assert (it.k_row, it.v_row, it.item_size) == (k_row, v_row, 1)
    assert it.bytes_per_token == 2 * 2 * (k_row + v_row)
    assert it.kv_dtype == quant
    pool = KVPool(it, num_blocks=3)
    assert pool.dtype == torch.uint8
    assert pool.num_bytes == 3 * it.bytes_per_block
    assert pool.k[0].shape == (3, 16, 2, k_row)


def test_a_layout_of_a_config_is_quantised_by_replacing_fields() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "dtype": "bfloat16",
    }
    it = replace(KVLayout.from_config(config), dtype="uint8", quant="fp8_per_token_head")
    assert (it.head_dim, it.k_row, it.bytes_per_token) == (32, 36, 3 * 2 * 2 * 36)
    KVPool(it, RopeSpec.from_config(config), num_blocks=2)


def test_floats_are_called_by_their_type() -> None:
    it = layout(dtype="bfloat16")
    assert (it.kv_dtype, it.kv_type, it.k_row, it.v_row) == ("bfloat16", None, 8, 8)


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn"])
def test_tensors_of_float8_are_moved_like_bytes(dtype: str) -> None:
    rope = RopeSpec((rotary(4),), 8)
    pools = []
    for kind in ("uint8", dtype):
        tensors = [torch.arange(2 * 6 * 4 * 3 * 8).to(torch.uint8).view(2, 6, 4, 3, 8)]
        tensors[0][(tensors[0] & 0x7F) == 0x7F] = 0
        held = [tensors[0].view(getattr(torch, kind))]
        found = KVLayout.from_tensors(
            held,
            axes="kv blocks tokens heads dim",
            block_size=4,
            num_kv_heads=3,
            head_dim=8,
            quant="fp8_e4m3",
        )
        assert found.dtype == kind
        pool = KVPool.wrap(held, found, rope)
        pool.apply(np.array([(0, 12, 5, 3)], dtype=MOVES), hops=1)
        pools.append(held[0].view(torch.uint8))
    assert torch.equal(*pools)


def test_scatter_takes_bytes() -> None:
    it = coded(FORMS[0], "fp8_per_token_head", None)
    k = torch.zeros(3, 2, 3, 16, dtype=torch.uint8)
    it.pool.scatter(k, k, [1], 0)
    with pytest.raises(ValueError, match="shape"):
        it.pool.scatter(k[..., :12], k, [1], 0)
    with pytest.raises(ValueError, match="uint8"):
        it.pool.scatter(k.float(), k, [1], 0)


# --- plans ----------------------------------------------------------------------------------------


def most_hops(plan: kvtrie.ReusePlan) -> int:
    return int(plan.segments["hops"].max())


@pytest.mark.parametrize("quant", ["fp8_e4m3", "int8_per_token_head"])
def test_a_plan_moves_codes_once_and_never_again(quant: str) -> None:
    """A conversation that loses a block twice: the second plan would rotate rotated K."""
    rope = RopeSpec((rotary(6),), 12)
    layout_ = KVLayout(num_layers=1, num_kv_heads=1, head_dim=12, dtype="uint8", quant=quant)
    pool = KVPool(layout_, rope, num_blocks=32)
    index = kvtrie.RadixIndex(num_blocks=32, block_size=16, min_run=16)
    space = kvtrie.Namespace(model="m", kv_dtype=layout_.kv_dtype, salt=kvtrie.SHARED)
    first = np.arange(1000, 1160)
    table = np.arange(10)
    k, scales = unit(quant, torch.randn(1, 160, 1, 12), 0.02)
    rows = k if quant in PLAIN else torch.cat([k, scales.view(torch.uint8)], dim=-1)
    pool.scatter(rows, rows, table, 0)
    index.insert(
        kvtrie.TokenSequence(first, space), table, num_computed=160, source=kvtrie.COMPUTED
    )
    lax = kvtrie.ReusePolicy(scope="namespace", max_hops=2)

    second = np.concatenate([first[:16], first[32:]])
    seq = kvtrie.TokenSequence(second, space)
    with index.plan(seq, lax, keep_last=0) as plan:
        fresh = np.arange(10, 10 + plan.num_new_blocks)
        new_table = np.concatenate([plan.blocks, fresh])
        assert most_hops(plan) == 1
        event = pool.apply(plan.moves(new_table), hops=most_hops(plan))
        assert event.num_requantized == 128 * 12
        plan.release_sources()
        index.insert(seq, new_table, num_computed=len(second), source=plan)
    # Only the moved copy remains.
    index.discard(table[1:])

    third = np.concatenate([first[:16], first[48:]])
    seq = kvtrie.TokenSequence(third, space)
    with index.plan(seq, lax, keep_last=0) as plan:
        moves = plan.moves(np.concatenate([plan.blocks, 20 + np.arange(plan.num_new_blocks)]))
        assert most_hops(plan) == 2
        before = pool.k[0].clone()
        with pytest.raises(ChainedRotationError, match="2 hops") as raised:
            pool.apply(moves, hops=most_hops(plan))
        assert raised.value.hops == 2
        assert torch.equal(pool.k[0], before)
    # The default computes what would be a second hop.
    with index.plan(seq, lax.replace(max_hops=1), keep_last=0) as plan:
        assert most_hops(plan) <= 1
        assert not (plan.segments["delta"][plan.segments["hops"] > 0] != 0).any()
