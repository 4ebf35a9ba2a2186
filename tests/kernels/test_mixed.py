"""Pools whose layers differ in element type: each as the plain reference has it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.coded import CODE_OF, CODED, LARGEST, NUMBERS, SCALED, expected_of
from tests.kernels.forms import MOVES, random_moves, rotary

import kvtrie
from kvtrie import gates
from kvtrie._core import LayoutError
from kvtrie.kernels import reference
from kvtrie.pool import ChainedRotationError, KVGroup, KVLayout, KVPool, NonFiniteError
from kvtrie.rope import RopeSpec, Rotary
from kvtrie.store import SpanShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BLOCK, BLOCKS = 5, 7
FLOATS = ("bfloat16", "float16", "float32", "float64")
SINGLE = ("fp8_index", "fp8_ds_mla")
TYPES = (*FLOATS, *CODED, "fp8_ds_mla")
MOVE = np.array([(0, 20, 9, -5), (9, 29, 2, 0)], dtype=MOVES)
TAIL = rotary(32, 1e4, start=512, interleaved=True)
ROTARIES: tuple[Rotary | None, ...] = (
    rotary(4),
    rotary(2, 1e4, interleaved=True),
    rotary(3, start=1),
    Rotary((0.7, 0.0)),
    None,
)


def group_of(name: str, layers: list[int], heads: int, width: int) -> KVGroup:
    """Layers of a type; those of one row per token have one head, and no V."""
    sizes = {"num_kv_heads": heads, "head_dim": width, "v_head_dim": width - 1}
    if name in SINGLE:
        sizes = {"num_kv_heads": 1, "head_dim": 576 if name == "fp8_ds_mla" else width}
        sizes["v_head_dim"] = 0
    how = {"dtype": name} if name in FLOATS else {"quant": name}
    return KVGroup(layers=tuple(layers), **sizes, **how)  # type: ignore[arg-type] # by name


def pool_of(groups: list[KVGroup], rotaries: Sequence[Rotary | None], seed: int = 0) -> KVPool:
    """A pool of random rows, all of them finite."""
    first = groups[0]
    layout = KVLayout(
        num_layers=sum(len(group.layers) for group in groups),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        v_head_dim=first.v_head_dim,
        dtype=str(first.dtype),
        quant=first.quant,
        block_size=BLOCK,
        groups=tuple(groups),
    )
    dims = tuple(group.head_dim for group in layout.layers)
    found = [
        (TAIL if rotary else None) if group.quant == "fp8_ds_mla" else rotary
        for group, rotary in zip(layout.layers, rotaries, strict=True)
    ]
    rope = RopeSpec(layers=tuple(found), head_dim=max(dims), head_dims=dims)
    pool = KVPool(layout, rope, num_blocks=BLOCKS)
    rng = np.random.default_rng(seed)
    for group, k, v in zip(layout.layers, pool.k, pool.v, strict=True):
        fill(group, k, rng, is_v=False)
        if v is not None:
            fill(group, v, rng, is_v=True)
    return pool


def fill(group: KVGroup, view: torch.Tensor, rng: np.random.Generator, *, is_v: bool) -> None:
    if group.quant is None:
        view.copy_(torch.from_numpy(rng.standard_normal(view.shape)))
        return
    code = CODE_OF.get(group.quant, "e4m3")
    tame = np.flatnonzero(np.isfinite(NUMBERS[code])).astype(np.uint8)
    view.copy_(torch.from_numpy(rng.choice(tame, view.shape)))

    def scales(at: torch.Tensor) -> None:
        its = (2.0 ** rng.integers(-20, 6, at[..., :1].shape)).astype(np.float32)
        its = np.repeat(its, at.shape[-1] // 4, axis=-1)
        at.copy_(torch.from_numpy(its.view(np.uint8)))

    if group.quant == "fp8_index" and is_v:
        scales(view)
    elif group.quant in SCALED:
        scales(view[..., -4:])
    elif group.quant == "fp8_ds_mla":
        scales(view[..., 512:528])
        tail = torch.from_numpy(rng.standard_normal((*view.shape[:-1], 64))).bfloat16()
        view[..., 528:].copy_(tail.view(torch.uint8))


def floats_after(
    pool: KVPool, layer: int, moves: NDArray[Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K and V of a layer of floats, or with a tail of floats, by slot: one token at a time."""
    group, rope = pool.layout.layers[layer], pool.rope
    assert rope is not None
    k, v = pool.k[layer].flatten(0, 1).clone(), pool.v[layer]
    old_k, old_v = k.clone(), None if v is None else v.flatten(0, 1).clone()
    new_v = None if old_v is None else old_v.clone()
    short = RopeSpec((replace(TAIL, start=0),), 64)
    for source, dest, length, delta in moves.tolist():
        for a, b in zip(range(source, source + length), range(dest, dest + length), strict=True):
            row = old_k[a].clone()
            if delta and rope.layers[layer] is not None:
                if group.quant is None:
                    row = reference.rotate(row.unsqueeze(1), rope, delta, layer).squeeze(1)
                else:
                    tail = row[:, 528:].contiguous().view(torch.bfloat16)
                    row[:, 528:] = reference.rotate(tail, short, delta).view(torch.uint8)
            k[b] = row
            if old_v is not None and new_v is not None:
                new_v[b] = old_v[a]
    return k, new_v


def check(pool: KVPool, moves: NDArray[Any]) -> None:
    """Apply, and compare every byte of every layer, and both counts."""
    want: list[tuple[Any, Any]] = []
    saturated = requantized = 0
    rows = int(moves["num_tokens"][moves["delta"] != 0].sum())
    assert pool.rope is not None
    for layer, (group, its) in enumerate(zip(pool.layout.layers, pool.rope.layers, strict=True)):
        if group.quant in CODED:
            *sides, more = expected_of(pool, layer, moves)
            saturated += more
            k, v = (None if one is None else torch.from_numpy(one) for one in sides)
            want.append((k, v))
            if its is not None:
                own_scale = group.quant in (*SCALED, "fp8_index")
                turning = 2 * sum(value != 0 for value in its.inv_freq)
                channels = group.head_dim if own_scale else turning
                requantized += rows * group.num_kv_heads * channels
        else:
            want.append(floats_after(pool, layer, moves))
    event = pool.apply(moves, hops=1)
    for layer, (k, v) in enumerate(want):
        got_v = pool.v[layer]
        for name, wanted, got in (("k", k, pool.k[layer]), ("v", v, got_v)):
            assert (wanted is None) == (got is None)
            if wanted is not None and got is not None:
                same = wanted.contiguous().view(torch.uint8)
                assert torch.equal(got.flatten(0, 1).view(torch.uint8), same), (layer, name)
    assert (event.num_saturated, event.num_requantized) == (saturated, requantized)


@settings(max_examples=40)
@given(st.data())
def test_each_group_moves_as_the_reference_has_it(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=5))
    parts: dict[tuple[str, int, int], list[int]] = {}
    for layer, name in enumerate(names):
        key = (name, data.draw(st.integers(1, 2)), data.draw(st.sampled_from([8, 12])))
        parts.setdefault(key, []).append(layer)
    groups = [group_of(name, layers, *sizes) for (name, *sizes), layers in parts.items()]
    turns = [data.draw(st.sampled_from(ROTARIES)) for _ in names]
    seed = data.draw(st.integers(0, 2**32))
    check(pool_of(groups, turns, seed), random_moves(seed, BLOCKS * BLOCK))


def deepseek() -> KVPool:
    """As DeepSeek V3.2 in small: latent rows, and index rows as layers of their own."""
    latent = group_of("fp8_ds_mla", [0, 1, 2], 1, 576)
    index = group_of("fp8_index", [3, 4, 5], 1, 128)
    return pool_of([latent, index], [TAIL] * 3 + [rotary(32)] * 3, seed=3)


def test_index_rows_are_in_one_pool_with_the_latent_rows() -> None:
    pool = deepseek()
    assert pool.layout.kv_dtype == "fp8_ds_mla+fp8_index[3-5]"
    assert pool.layout.bytes_per_token == 3 * (656 + 128 + 4)
    check(pool, MOVE)


def test_the_hops_of_any_group_that_rounds_again_count() -> None:
    pool = deepseek()
    before = [view.clone() for view in (*pool.k, *pool.v) if view is not None]
    with pytest.raises(ValueError, match="K of fp8_index may be rounded to codes again only once"):
        pool.apply(MOVE)
    with pytest.raises(ChainedRotationError, match="2 hops, and K of fp8_index"):
        pool.apply(MOVE, hops=2)
    after = [view for view in (*pool.k, *pool.v) if view is not None]
    assert all(map(torch.equal, before, after))
    pool.apply(np.array([(0, 20, 9, 0)], dtype=MOVES))


def test_a_coded_group_without_rope_needs_no_hops() -> None:
    groups = [group_of("bfloat16", [0], 2, 8), group_of("int8", [1], 2, 8)]
    event = pool_of(groups, [rotary(4), None]).apply(MOVE)
    assert (event.num_saturated, event.num_requantized) == (0, 0)


def test_tables_are_as_precise_as_each_group_needs() -> None:
    """Keys of float32 have angles of float64, whatever the first group has."""
    groups = [group_of("fp8_e4m3", [0], 2, 8), group_of("float32", [1], 2, 8)]
    check(pool_of(groups, [rotary(4, 1e6)] * 2), np.array([(0, 20, 9, -131_072)], dtype=MOVES))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_check_reads_each_group_in_its_type(layer: int) -> None:
    names = ("bfloat16", "int8_per_token_head", "fp8_e4m3")
    pool = pool_of([group_of(name, [at], 2, 8) for at, name in enumerate(names)], [None] * 3)
    pool.apply(MOVE, check_finite=True)
    row = pool.k[layer][1, 2]
    if layer == 0:
        row[1, 3] = torch.inf
    else:
        row[1, -4:] = torch.tensor([torch.nan]).view(torch.uint8) if layer == 1 else 0x7F
    with pytest.raises(NonFiniteError, match="slot 7 of block 1"):
        pool.apply(MOVE, check_finite=True)


def test_the_type_of_a_pool_is_that_of_its_first_group() -> None:
    """Whichever layers it has."""
    for layers in ([0], [1]):
        groups = [group_of("bfloat16", layers, 2, 8), group_of("int8", [1 - layers[0]], 2, 8)]
        assert pool_of(groups, [None] * 2).dtype == torch.bfloat16
        assert pool_of(groups[::-1], [None] * 2).dtype == torch.uint8


def test_one_tensor_cannot_hold_unlike_types() -> None:
    pool = pool_of([group_of("bfloat16", [0], 2, 8), group_of("fp8_e4m3", [1], 2, 8)], [None] * 2)
    assert pool.num_bytes == BLOCKS * BLOCK * 2 * 15 * 3
    assert [view.dtype for view in pool.k] == [torch.bfloat16, torch.uint8]
    with pytest.raises(LayoutError, match=r"gather: .* element type \(bfloat16\+fp8_e4m3\[1\]\)"):
        pool.gather([0], 0, 1)
    with pytest.raises(LayoutError, match=r"scatter: .* element type"):
        pool.scatter(torch.zeros(2, 1, 2, 8), None, [0], 0)
    with pytest.raises(LayoutError, match=r"SpanShape: .* \(bfloat16\+fp8_e4m3\[1\]\)"):
        SpanShape.of(pool.layout)


def test_a_store_takes_no_rows_of_one_size_and_unlike_type() -> None:
    """Their bytes are as many, and mean something else."""
    groups = [group_of("fp8_e4m3", [0], 2, 8), group_of("fp8_e5m2", [1], 2, 8)]
    with pytest.raises(LayoutError, match=r"SpanShape: .* \(fp8_e4m3\+fp8_e5m2\[1\]\)"):
        SpanShape.of(pool_of(groups, [None] * 2).layout)


def test_a_gate_of_one_mix_is_refused_for_another() -> None:
    first, second = group_of("bfloat16", [0, 2], 2, 8), group_of("fp8_e4m3", [1, 3], 2, 8)
    turned = [group_of("bfloat16", [0, 1], 2, 8), group_of("fp8_e4m3", [2, 3], 2, 8)]
    own = pool_of([first, second], [None] * 4).layout.kv_dtype
    gate = gates.Gate("m@1", own, "default", gates.Thresholds(), ())
    gate.policy(kvtrie.ReusePolicy(), model="m@1", kv_dtype=own)
    assert kvtrie.Namespace(model="m@1", kv_dtype=own, salt="a").kv_dtype == own
    for other in ("bfloat16", "fp8_e4m3", pool_of(turned, [None] * 4).layout.kv_dtype):
        with pytest.raises(gates.GateMismatchError, match="bfloat16"):
            gate.policy(kvtrie.ReusePolicy(), model="m@1", kv_dtype=other)


def test_codes_of_a_type_saturate_alone() -> None:
    groups = [group_of("float32", [0], 2, 8), group_of("fp8_e4m3", [1], 2, 8)]
    pool = pool_of(groups, [rotary(4)] * 2)
    pool.k[0].fill_(LARGEST["e4m3"])
    pool.k[1].fill_(0x7E)
    check(pool, np.array([(0, 20, 9, 1)], dtype=MOVES))
