"""KVPool.apply on every form: its result, and that it changes nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.forms import (
    DTYPES,
    FORMS,
    MOVES,
    RANDOM_FORMS,
    ROPES,
    WAYS,
    Form,
    Held,
    Sizes,
    random_moves,
    rotary,
    same_bits,
    spec,
)

import kvtrie
from kvtrie._core import LayoutError
from kvtrie.kernels import reference
from kvtrie.pool import KVLayout, KVPool
from kvtrie.rope import RopeSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


def moved(
    sides: list[tuple[torch.Tensor, torch.Tensor | None]],
    moves: NDArray[Any],
    rope: RopeSpec | None,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The right K and V: one token at a time, rotated by the reference function."""
    after = []
    for layer, (k, v) in enumerate(sides):
        new_k, new_v = k.clone(), None if v is None else v.clone()
        size = k.shape[1]
        for move in moves:
            for i in range(int(move["num_tokens"])):
                a, b = int(move["source_slot"]) + i, int(move["dest_slot"]) + i
                row = k[a // size, a % size]
                if rope is not None and move["delta"]:
                    rotated = reference.rotate(row.unsqueeze(1), rope, int(move["delta"]), layer)
                    row = rotated.squeeze(1)
                new_k[b // size, b % size] = row
                if v is not None and new_v is not None:
                    new_v[b // size, b % size] = v[a // size, a % size]
        after.append((new_k, new_v))
    return after


def check_apply(
    form: Form, held: Held, sizes: Sizes, moves: NDArray[Any], rope: RopeSpec | None
) -> None:
    pool = form.pool(held, sizes, rope)
    bits = held.bits()
    before = form.split(held.tensors, sizes)
    want = moved(before, moves, rope)
    assert pool.apply(moves).query()
    for (k, v), (new_k, new_v) in zip(want, form.split(held.tensors, sizes), strict=True):
        assert same_bits(k, new_k)
        assert v is None or new_v is None or same_bits(v, new_v)
    # With the destinations restored, every byte is as before: nothing else was written.
    dests = [int(move["dest_slot"]) + i for move in moves for i in range(int(move["num_tokens"]))]
    for old, views in zip(zip(*before, strict=True), (pool.k, pool.v), strict=True):
        for old_rows, rows in zip(old, views, strict=True):
            if rows is not None:
                for slot in dests:
                    at = (slot // sizes.block_size, slot % sizes.block_size)
                    rows[at] = old_rows[at]
    for now, then in zip(held.bits(), bits, strict=True):
        assert torch.equal(now, then)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_on_every_form_and_dtype(form: Form, dtype: str) -> None:
    sizes = form.sizes()
    held = form.build(dtype, sizes, seed=1)
    check_apply(form, held, sizes, random_moves(3, sizes.slots), spec("other-windows-by-layer"))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_with_every_rope(rope: str, dtype: str) -> None:
    form = FORMS[3]
    sizes = form.sizes()
    held = form.build(dtype, sizes, seed=2)
    check_apply(form, held, sizes, random_moves(5, sizes.slots), spec(rope))


@RANDOM_FORMS
def test_apply_of_random_plans(
    form: Form, rope: str, dtype: str, blocks: int, block_size: int, seed: int
) -> None:
    sizes = form.sizes(blocks=blocks, block_size=block_size)
    held = form.build(dtype, sizes, seed=seed)
    check_apply(form, held, sizes, random_moves(seed, sizes.slots), spec(rope))


@pytest.mark.parametrize("rope", ["neox", "interleaved", "still-pairs", "window-in-the-middle"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_pair(rope: str, dtype: str, value: float) -> None:
    form = FORMS[0]
    for channel in range(12):
        sizes = form.sizes()
        held = form.build(dtype, sizes)
        held.tensors[0][0, 1, 2, 1, channel] = value
        pool = form.pool(held, sizes, spec(rope))
        pool.apply(np.array([(7, 30, 1, 5)], dtype=MOVES))
        row = pool.k[0][6, 0]
        rotary = ROPES[rope][0]
        assert rotary is not None
        pairs = [
            (rotary.start + 2 * i, rotary.start + 2 * i + 1)
            if rotary.interleaved
            else (rotary.start + i, rotary.start + i + len(rotary.inv_freq))
            for i, angle in enumerate(rotary.inv_freq)
            if angle
        ]
        spoiled = next((set(pair) for pair in pairs if channel in pair), {channel})
        assert set((~row[1].isfinite()).nonzero().flatten().tolist()) == spoiled
        assert bool(row[[0, 2]].isfinite().all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_unrotated_rows_keep_every_bit(dtype: str) -> None:
    """Payloads of NaN, subnormal numbers and the sign of zero, in K without a delta and in V."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=12, dtype=dtype, block_size=4)
    pool = KVPool(layout, RopeSpec((rotary(6),), 12), num_blocks=4)
    kind = {2: torch.int16, 4: torch.int32}[pool.dtype.itemsize]
    rng = torch.Generator().manual_seed(0)
    for views in (pool.k, pool.v):
        rows = views[0]
        assert rows is not None
        rows.view(kind).random_(-(2**15), 2**15, generator=rng)
    k = pool.k[0].clone()
    pool.apply(np.array([(1, 9, 3, 0), (4, 12, 2, 6)], dtype=MOVES))
    assert same_bits(pool.k[0].view(-1, 12)[9:12], k.view(-1, 12)[1:4])
    v = pool.v[0]
    assert v is not None
    assert same_bits(v.view(-1, 12)[12:14], v.view(-1, 12)[4:6])


def test_apply_of_nothing_touches_nothing() -> None:
    form = FORMS[0]
    held = form.build("float32", form.sizes())
    bits = held.bits()
    event = form.pool(held, form.sizes()).apply(np.array([], dtype=MOVES))
    event.wait()
    event.synchronize()
    assert event.query()
    assert all(torch.equal(now, then) for now, then in zip(held.bits(), bits, strict=True))


def _fields(**kinds: str) -> np.dtype[Any]:
    return np.dtype([(name, kinds.get(name, "i8")) for name in MOVES.names or ()])


BAD_MOVES = [
    ("no-array", [(0, 20, 1, 0)], TypeError, "structured array"),
    ("no-fields", np.zeros((1, 4), dtype=np.int64), TypeError, "structured array"),
    ("one-short", np.zeros(1, dtype=[("source_slot", "i8")]), TypeError, "structured array"),
    ("float", np.zeros(1, dtype=_fields(delta="f8")), TypeError, "delta .* integer, not float64"),
    ("sub-array", np.zeros(1, dtype=_fields(delta="2i8")), TypeError, "delta .* integer"),
    ("two-dim", np.zeros((1, 1), dtype=MOVES), TypeError, "one dimension"),
    ("zero-dim", np.zeros((), dtype=MOVES), TypeError, "one dimension"),
    ("empty-move", [(0, 20, 0, 0)], ValueError, "num_tokens 0"),
    ("negative", [(0, 20, -4, 0)], ValueError, "num_tokens -4"),
    ("source-before", [(-1, 20, 2, 0)], ValueError, r"source_slot \[-1, 1\)"),
    ("source-beyond", [(34, 20, 2, 0)], ValueError, r"source_slot \[34, 36\).*35 slots"),
    ("dest-before", [(0, -2, 2, 0)], ValueError, r"dest_slot \[-2, 0\)"),
    ("dest-beyond", [(0, 34, 2, 0)], ValueError, r"dest_slot \[34, 36\)"),
    ("far", [(2**63 - 1, 20, 2, 0)], ValueError, "source_slot"),
    ("long", [(0, 20, 2**63 - 1, 0)], ValueError, "35 slots"),
    ("delta", [(0, 20, 2, 2**31)], ValueError, "delta 2147483648"),
    ("minus-delta", [(0, 20, 2, -(2**31))], ValueError, "delta -2147483648"),
    ("least-delta", [(0, 20, 2, -(2**63))], ValueError, "delta -9223372036854775808"),
    ("twice", [(0, 20, 5, 0), (6, 24, 2, 0)], ValueError, "dest_slot 24 is written twice"),
    ("within", [(0, 20, 9, 0), (10, 22, 1, 0)], ValueError, "dest_slot 22 is written twice"),
    ("same", [(0, 20, 2, 0), (0, 20, 2, 0)], ValueError, "dest_slot 20 is written twice"),
    ("itself", [(5, 5, 2, 0)], ValueError, "slot 5 is both source and destination"),
    ("overlap", [(5, 7, 4, 1)], ValueError, "slot 7 is both source and destination"),
    ("overlap-back", [(7, 5, 4, 1)], ValueError, "slot 7 is both source and destination"),
    (
        "chain",
        [(0, 20, 3, 0), (22, 30, 2, 0)],
        ValueError,
        "slot 22 is both source and destination",
    ),
    (
        "after-a-touching-one",
        [(0, 10, 10, 0), (20, 28, 4, 0), (5, 22, 2, 0)],
        ValueError,
        "slot 22 is both source and destination",
    ),
    ("touch", [(18, 0, 3, 0), (1, 20, 3, 0)], ValueError, "slot 1 is both source and destination"),
]


@pytest.mark.parametrize(
    ("bad", "error", "message"), [case[1:] for case in BAD_MOVES], ids=[c[0] for c in BAD_MOVES]
)
def test_apply_refuses_before_any_byte_moves(
    bad: Any, error: type[Exception], message: str
) -> None:
    form = FORMS[0]
    held = form.build("bfloat16", form.sizes())
    pool = form.pool(held, form.sizes(), spec("neox"))
    bits = held.bits()
    if isinstance(bad, list) and "structured" not in message:
        bad = np.array([(26, 33, 2, 3), *bad], dtype=MOVES)
    with pytest.raises(error, match=message):
        pool.apply(bad)
    assert all(torch.equal(now, then) for now, then in zip(held.bits(), bits, strict=True))


@pytest.mark.parametrize("kind", ["<u8", ">u8"])
def test_apply_refuses_unsigned_numbers_that_would_wrap(kind: str) -> None:
    form = FORMS[0]
    held = form.build("bfloat16", form.sizes())
    pool = form.pool(held, form.sizes(), spec("neox"))
    bad = np.array([(0, 20, 2, 2**64 - 1)], dtype=_fields(delta=kind))
    with pytest.raises(ValueError, match="delta 18446744073709551615"):
        pool.apply(bad)


def test_apply_refuses_a_delta_without_rope() -> None:
    form = FORMS[0]
    held = form.build("float32", form.sizes())
    pool = form.pool(held, form.sizes())
    bits = held.bits()
    with pytest.raises(LayoutError, match=r"delta -7.*without rope"):
        pool.apply(np.array([(0, 20, 2, 0), (4, 30, 2, -7)], dtype=MOVES))
    assert all(torch.equal(now, then) for now, then in zip(held.bits(), bits, strict=True))


@given(seed=st.integers(0, 2**32), changes=st.integers(0, 2))
def test_checks_agree_with_naming_every_slot(seed: int, changes: int) -> None:
    """Pieces are sorted and compared by their ends; the reference compares sets of slots."""
    rng = np.random.default_rng(seed)
    moves = random_moves(seed, 40)
    for _ in range(changes if len(moves) else 0):
        name = ("source_slot", "dest_slot", "num_tokens")[int(rng.integers(3))]
        moves[name][int(rng.integers(len(moves)))] += int(rng.integers(-6, 7))
    sources: set[int] = set()
    dests: list[int] = []
    for source, dest, count, _ in moves.tolist():
        sources |= set(range(source, source + count))
        dests += range(dest, dest + count)
    is_good = (
        all(count > 0 for count in moves["num_tokens"].tolist())
        and all(0 <= slot < 40 for slot in (*sources, *dests))
        and len(set(dests)) == len(dests)
        and not sources & set(dests)
    )
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=8)
    pool = KVPool(layout, RopeSpec((rotary(1),), 2), num_blocks=5)
    try:
        pool.apply(moves)
    except ValueError:
        assert not is_good
    else:
        assert is_good


def test_plan_of_an_index_is_applied_to_a_labelled_pool() -> None:
    """Every position of the new prompt holds the KV of the token that the plan reused there."""
    block_size, blocks = 4, 64
    layout = KVLayout(
        num_layers=2, num_kv_heads=2, head_dim=12, dtype="float32", block_size=block_size
    )
    rope = RopeSpec((rotary(6), None), 12)
    pool = KVPool(layout, rope, num_blocks=blocks)
    rng = np.random.default_rng(0)
    index = kvtrie.RadixIndex(num_blocks=blocks, block_size=block_size, min_run=8)
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    old = rng.integers(10, 9_999, 91)
    seq = kvtrie.TokenSequence(old, space)
    table = rng.permutation(blocks)[:23]
    labels = torch.arange(91.0).reshape(1, 91, 1, 1).expand(2, 91, 2, 12)
    k_rows = labels + torch.rand(2, 1, 2, 12)
    pool.scatter(k_rows, labels.contiguous(), table, 0)
    index.insert(seq, table, num_computed=91, source=kvtrie.COMPUTED)
    # A shared head, two gaps of fresh tokens, and the old tail in another order.
    fresh = rng.integers(20_000, 30_000, 7)
    new = np.concatenate([old[:13], fresh, old[50:85], fresh[:5], old[20:47]])
    wanted = [*range(13), *[-1] * 7, *range(50, 85), *[-1] * 5, *range(20, 47)]
    policy = kvtrie.ReusePolicy(scope="namespace")
    with index.plan(kvtrie.TokenSequence(new, space), policy, keep_last=0) as plan:
        unused = np.setdiff1d(np.arange(blocks), table)[: plan.num_new_blocks]
        new_table = np.concatenate([plan.blocks, unused])
        pool.apply(plan.moves(new_table)).synchronize()
        gaps = {p for start, end in plan.gaps.tolist() for p in range(start, end)}
    k, v = pool.gather(new_table, 0, len(new))
    assert v is not None
    reused = 0
    for position, was in enumerate(wanted):
        if position in gaps:
            continue
        reused += 1
        assert bool((v[:, position] == was).all())
        delta = position - was
        for layer in range(2):
            want = reference.rotate(k_rows[layer, was].unsqueeze(1), rope, delta, layer)
            assert torch.equal(k[layer, position], want.squeeze(1))
    # Whole blocks were indexed, so the last tokens of the old prompt are not there to be found.
    assert reused >= 13 + 35 + 27 - block_size


def test_slots_beyond_two_to_the_31_elements() -> None:
    """A pool of more than 2**31 elements, of which few pages are ever touched."""
    block = 2**30 + 64
    storage = torch.empty(2 * block + 4096, dtype=torch.float16)
    k = storage.as_strided((3, 4, 1, 8), (block, 8, 8, 1))
    layout = KVLayout.from_tensors(
        [k], axes="blocks tokens heads dim", block_size=4, num_kv_heads=1, head_dim=8, v_head_dim=0
    )
    pool = KVPool.wrap([k], layout, RopeSpec((rotary(4),), 8))
    k[0] = torch.randn(4, 1, 8)
    k[2] = 0
    assert k[2, 3].storage_offset() > 2**31
    pool.apply(np.array([(0, 8, 2, 0), (1, 11, 1, 40)], dtype=MOVES))
    assert same_bits(k[2, :2], k[0, :2])
    assert pool.rope is not None
    assert same_bits(k[2, 3], reference.rotate(k[0, 1].unsqueeze(1), pool.rope, 40).squeeze(1))
    assert not k[2, 2].any()
