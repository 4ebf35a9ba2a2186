"""KVPool.apply(check_finite=True): NaN and infinity are named by block before any write."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tests.kernels.forms import DTYPES, FORMS, MOVES, Form, random_moves, spec

from kvtrie import KvTrieError
from kvtrie.pool import KVLayout, KVPool, NonFiniteError

# Copies of slots 0 to 4, 7 and 8, and 11; blocks have 5 slots.
COPIES = np.array([(0, 20, 5, 0), (7, 25, 2, 0), (11, 30, 1, 0)], dtype=MOVES)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_source_that_is_not_finite_is_named_and_nothing_changes(form: Form, value: float) -> None:
    sizes = form.sizes()
    for layer in range(sizes.layers):
        for side in ("k", "v"):
            held = form.build("float32", sizes)
            pool = form.pool(held, sizes)
            view = getattr(pool, side)[layer]
            if view is None:
                continue
            # One element, the last of its row, of one slot in block 1 and one in block 2.
            view[1, 3, -1, -1] = value
            view[2, 1, 0, 0] = value
            before = held.bits()
            with pytest.raises(
                NonFiniteError, match=r"KVPool\.apply: moves copy slot 8 of block 1"
            ) as raised:
                pool.apply(COPIES, check_finite=True)
            assert raised.value.block_ids == [1, 2]
            assert all(map(torch.equal, held.bits(), before))
            # Without the check it is copied.
            pool.apply(COPIES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_that_are_not_copied_are_not_checked(dtype: str) -> None:
    """Destinations, and slots of a source block next to the copied ones, may hold anything."""
    form = FORMS[0]
    sizes = form.sizes()
    held, same = form.build(dtype, sizes), form.build(dtype, sizes)
    pool, plain = form.pool(held, sizes), form.pool(same, sizes)
    for each in (pool, plain):
        for slot in (5, 6, 9, 10, 12, 20, 25, 34):
            each.k[0][slot // 5, slot % 5] = float("nan")
    assert pool.apply(COPIES, check_finite=True).query()
    plain.apply(COPIES)
    assert all(map(torch.equal, held.bits(), same.bits()))
    pool.apply(COPIES[:0], check_finite=True)


def test_the_largest_finite_numbers_are_finite() -> None:
    """A check by a sum of the row would overflow."""
    for dtype in DTYPES:
        form = FORMS[0]
        sizes = form.sizes()
        held = form.build(dtype, sizes)
        pool = form.pool(held, sizes)
        for view in (*pool.k, *(v for v in pool.v if v is not None)):
            view.fill_(torch.finfo(view.dtype).max)
        pool.apply(COPIES, check_finite=True)


def test_moves_with_deltas_are_checked_before_rotation() -> None:
    form = FORMS[0]
    sizes = form.sizes()
    held = form.build("float32", sizes)
    pool = form.pool(held, sizes, spec("neox"))
    moves = random_moves(3, sizes.slots)
    pool.apply(moves, check_finite=True)
    slot = int(moves[-1]["source_slot"])
    assert pool.v[2] is not None
    pool.v[2][slot // 5, slot % 5, 1, 1] = float("nan")
    with pytest.raises(NonFiniteError) as raised:
        pool.apply(moves, check_finite=True)
    assert raised.value.block_ids == [slot // 5]


def test_more_slots_than_are_looked_at_together() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=16)
    pool = KVPool(layout, num_blocks=5000)
    count = 40_000
    moves = np.array([(0, count, count, 0)], dtype=MOVES)
    pool.apply(moves, check_finite=True)
    for slot in (0, 16_383, 16_384, 39_999):
        pool.k[0][slot // 16, slot % 16, 0, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="4 source slots in 4 blocks") as raised:
        pool.apply(moves, check_finite=True)
    assert raised.value.block_ids == [0, 1023, 1024, 2499]


def test_the_error_is_one_of_kvtrie_and_can_be_pickled() -> None:
    error = NonFiniteError("message", [3, 4])
    assert isinstance(error, KvTrieError)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (str(again), again.block_ids) == ("message", [3, 4])


@pytest.mark.cuda
def test_a_gpu_pool_is_checked_before_it_is_written() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    form = FORMS[0]
    sizes = form.sizes()
    held = form.build("bfloat16", sizes, device="cuda")
    pool = form.pool(held, sizes)
    pool.k[1][1, 3, 0, 0] = float("nan")
    before = held.bits()
    with pytest.raises(NonFiniteError) as raised:
        pool.apply(COPIES, check_finite=True)
    assert raised.value.block_ids == [1]
    assert all(map(torch.equal, held.bits(), before))
