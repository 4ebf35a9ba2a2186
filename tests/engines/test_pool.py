"""KVPool: slots are checked before a byte moves, and only destination slots change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kvtrie._core import LayoutError
from kvtrie.pool import KVLayout, KVPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 3, 2, 5, 7, 11
SLOTS = BLOCK * BLOCKS
MOVES = np.dtype(
    [("source_slot", "i8"), ("dest_slot", "i8"), ("num_tokens", "i8"), ("delta", "i8")]
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def layout(dtype: str = "float32") -> KVLayout:
    return KVLayout(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype, block_size=BLOCK
    )


def poisoned(device: str, dtype: str = "float32") -> KVPool:
    pool = KVPool(layout(dtype), num_blocks=BLOCKS, device=device)
    for number, rows in enumerate((*pool.k, *(v for v in pool.v if v is not None))):
        bits = rows.view({2: torch.int16, 4: torch.int32}[rows.element_size()])
        slot = torch.arange(SLOTS, device=device).view(BLOCKS, BLOCK, 1, 1)
        quiet_nan = 0x7FC0 if rows.element_size() == 2 else 0x7FC00000
        bits.copy_((quiet_nan + 1 + slot % 60 + number // LAYERS).expand_as(bits))
    return pool


def bits(pool: KVPool) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V as integers, ``[layers, slots, ...]``: NaN compares like anything else."""
    kind = {2: torch.int16, 4: torch.int32}[pool.dtype.itemsize]
    k, v = (
        torch.stack([rows.flatten(0, 1) for rows in side if rows is not None])
        .view(kind)
        .cpu()
        .numpy()
        for side in (pool.k, pool.v)
    )
    return k, v


def rows(count: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    rng = torch.Generator().manual_seed(7)
    k, v = torch.randn(2, LAYERS, count, HEADS, DIM, generator=rng).to(dtype).to(device)
    return k, v


def moves(*items: tuple[int, int, int, int]) -> NDArray[Any]:
    return np.array(list(items), dtype=MOVES)


def assert_unchanged(pool: KVPool, before: tuple[NDArray[Any], NDArray[Any]]) -> None:
    for now, then in zip(bits(pool), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 1), (0, BLOCK), (3, 1), (3, BLOCK), (6, 2), (0, 4 * BLOCK), (5, 17), (2, 0)],
)
def test_scatter_changes_destination_slots_alone(
    device: str, dtype: str, start: int, count: int
) -> None:
    pool = poisoned(device, dtype)
    before = bits(pool)
    k, v = rows(count, device, pool.dtype)
    table = [9, 0, 4, 2]
    pool.scatter(k, v, table, start)
    written = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, start + count)]
    others = np.setdiff1d(np.arange(SLOTS), written)
    for new, now, then in zip((k, v), bits(pool), before, strict=True):
        np.testing.assert_array_equal(now[:, others], then[:, others])
        want = new.view({2: torch.int16, 4: torch.int32}[new.element_size()]).cpu().numpy()
        np.testing.assert_array_equal(now[:, written], want)


@pytest.mark.parametrize("device", DEVICES)
def test_gather_returns_what_scatter_wrote(device: str) -> None:
    pool = poisoned(device)
    k, v = rows(20, device)
    pool.scatter(k, v, [9, 0, 4, 2], 3)
    before = bits(pool)
    got_k, got_v = pool.gather(np.array([9, 0, 4, 2], dtype=np.int32), 5, 19)
    assert torch.equal(got_k, k[:, 2:16])
    assert got_v is not None
    assert torch.equal(got_v, v[:, 2:16])
    assert_unchanged(pool, before)


@pytest.mark.parametrize("device", DEVICES)
def test_gather_is_a_copy(device: str) -> None:
    pool = poisoned(device)
    before = bits(pool)
    k, v = pool.gather([1], 0, BLOCK)
    assert v is not None
    k.zero_()
    v.zero_()
    assert_unchanged(pool, before)


def test_gather_may_name_a_block_twice() -> None:
    pool = KVPool(layout(), num_blocks=BLOCKS)
    k, v = rows(BLOCK, "cpu")
    pool.scatter(k, v, [3], 0)
    twice, _ = pool.gather([3, 3], 0, 2 * BLOCK)
    assert torch.equal(twice, torch.cat([k, k], dim=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_apply_copies_slots_and_nothing_else(device: str, dtype: str) -> None:
    pool = poisoned(device, dtype)
    before = bits(pool)
    # Unaligned, across blocks, touching pieces, one source for two destinations, last slot.
    pool.apply(moves((3, 30, 9, 0), (12, 39, 1, 0), (3, 50, 2, 0), (20, SLOTS - 1, 1, 0)))
    sources = [*range(3, 12), 12, 3, 4, 20]
    dests = [*range(30, 39), 39, 50, 51, SLOTS - 1]
    for now, then in zip(bits(pool), before, strict=True):
        want = then.copy()
        want[:, dests] = then[:, sources]
        np.testing.assert_array_equal(now, want)


def test_apply_of_nothing_changes_nothing() -> None:
    pool = poisoned("cpu")
    before = bits(pool)
    assert pool.apply(moves()).query()
    assert_unchanged(pool, before)


@pytest.mark.cuda
def test_apply_on_a_gpu_returns_an_event() -> None:
    pool = poisoned("cuda")
    event = pool.apply(moves((0, 30, 5, 0)))
    event.wait()
    event.synchronize()
    assert event.query()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        pytest.param((-1, 30, 5, 0), ValueError, r"source_slot \[-1, 4\).*77 slots", id="source<0"),
        pytest.param((73, 30, 5, 0), ValueError, r"source_slot \[73, 78\).*77", id="source-end"),
        pytest.param((0, -1, 5, 0), ValueError, r"dest_slot \[-1, 4\)", id="dest<0"),
        pytest.param((0, 77, 1, 0), ValueError, r"dest_slot \[77, 78\).*77 slots", id="dest-end"),
        pytest.param((0, 30, 2**62, 0), ValueError, "77 slots", id="huge"),
        pytest.param((0, 30, 0, 0), ValueError, "num_tokens 0", id="empty"),
        pytest.param((0, 30, -3, 0), ValueError, "num_tokens -3", id="negative"),
        pytest.param((0, 30, 5, -1534), LayoutError, "delta -1534", id="delta"),
        pytest.param((0, 44, 3, 0), ValueError, "dest_slot 44 is written twice", id="twice"),
        pytest.param((38, 10, 3, 0), ValueError, "slot 40 is both source", id="read-of-dest"),
        pytest.param(
            (0, 2, 3, 0), ValueError, "slot 2 is both source and destination", id="overlap"
        ),
    ],
)
def test_apply_refuses_before_the_first_copy(
    bad: tuple[int, int, int, int], error: type[Exception], message: str
) -> None:
    pool = poisoned("cpu")
    before = bits(pool)
    with pytest.raises(error, match=message):
        pool.apply(moves((20, 40, 5, 0), bad))
    assert_unchanged(pool, before)


@pytest.mark.parametrize("bad", [None, [(0, 30, 5, 0)], np.zeros((3, 4)), np.zeros(3, "i8,i8")])
def test_apply_refuses_what_is_no_copy_list(bad: Any) -> None:
    with pytest.raises(TypeError, match="structured array"):
        poisoned("cpu").apply(bad)


@pytest.mark.parametrize(
    ("table", "start", "end", "error", "message"),
    [
        ([0, 1], 0, 15, ValueError, r"\[0, 15\).*2 blocks \(\[0, 14\]\)"),
        ([0, 1], -1, 3, ValueError, r"\[-1, 3\)"),
        ([0, 1], 4, 3, ValueError, r"\[4, 3\)"),
        ([0, 11], 0, 14, ValueError, "block 11 .slot 77. .*11 blocks"),
        ([-1, 1], 0, 14, ValueError, "block -1"),
        ([0.0, 1.0], 0, 14, TypeError, "float64"),
        ([True, False], 0, 14, TypeError, "bool"),
        ([[0, 1]], 0, 14, TypeError, "2-dimensional"),
    ],
)
def test_scatter_and_gather_refuse_positions_and_blocks(
    table: Any, start: int, end: int, error: type[Exception], message: str
) -> None:
    pool = poisoned("cpu")
    before = bits(pool)
    with pytest.raises(error, match=message):
        pool.gather(table, start, end)
    k, v = rows(max(end - start, 0), "cpu")
    if end >= start:
        with pytest.raises(error, match=message):
            pool.scatter(k, v, table, start)
    assert_unchanged(pool, before)


def test_positions_look_at_their_own_blocks_alone() -> None:
    pool = KVPool(layout(), num_blocks=BLOCKS)
    k, v = rows(BLOCK, "cpu")
    pool.scatter(k, v, [99, 3, 99], BLOCK)
    assert torch.equal(pool.gather([99, 3, -5], BLOCK, 2 * BLOCK)[0], k)


def test_scatter_refuses_a_block_that_comes_twice() -> None:
    pool = poisoned("cpu")
    before = bits(pool)
    with pytest.raises(ValueError, match="block 4 occurs twice"):
        pool.scatter(*rows(2 * BLOCK, "cpu"), [4, 4], 0)
    assert_unchanged(pool, before)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda t: t[:2], id="layers"),
        pytest.param(lambda t: t[:, :, :1], id="heads"),
        pytest.param(lambda t: t[..., :4], id="dim"),
        pytest.param(lambda t: t[0], id="ndim"),
        pytest.param(lambda t: t[:, :3], id="tokens"),
        pytest.param(lambda t: t.double(), id="dtype"),
        pytest.param(lambda t: t.to("meta"), id="device"),
    ],
)
def test_scatter_refuses_wrong_tensors(which: int, spoil: Any) -> None:
    pool = poisoned("cpu")
    before = bits(pool)
    given = list(rows(5, "cpu"))
    given[which] = spoil(given[which])
    with pytest.raises(ValueError, match=r"KVPool\.scatter"):
        pool.scatter(given[0], given[1], [0], 0)
    assert_unchanged(pool, before)


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31 + 1])
def test_pool_refuses_num_blocks_out_of_range(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks.*{num_blocks}"):
        KVPool(layout(), num_blocks=num_blocks)


@pytest.mark.parametrize("num_blocks", [True, 4.0, "4"])
def test_pool_refuses_num_blocks_of_wrong_type(num_blocks: Any) -> None:
    with pytest.raises(TypeError, match="num_blocks"):
        KVPool(layout(), num_blocks=num_blocks)


def test_pool_without_room_says_how_much_was_asked_for() -> None:
    wide = KVLayout(num_layers=512, num_kv_heads=512, head_dim=512, dtype="float32", block_size=16)
    with pytest.raises(MemoryError, match=r"num_blocks=2147483648 .*GiB"):
        KVPool(wide, num_blocks=2**31)


def test_only_a_lack_of_memory_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []

    def fail(*_args: Any, **_options: Any) -> None:
        raise errors[-1]

    monkeypatch.setattr(torch, "zeros", fail)
    for lack in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ):
        errors.append(lack)
        with pytest.raises(MemoryError, match=r"num_blocks=6 .*GiB"):
            KVPool(layout(), num_blocks=6)
    errors.append(RuntimeError("No CUDA GPUs are available"))
    with pytest.raises(RuntimeError) as raised:
        KVPool(layout(), num_blocks=6, device="cuda")
    assert raised.value is errors[-1]


def test_a_cpu_without_room_says_how_much_was_asked_for() -> None:
    """Torch's own words for it: more than a process may address, and than 63 bits count."""
    wide = KVLayout(num_layers=64, num_kv_heads=64, head_dim=512, dtype="float32", block_size=16)
    with pytest.raises(MemoryError, match=r"num_blocks=16777216 .*GiB"):
        KVPool(wide, num_blocks=2**24)


def test_layers_are_contiguous_views() -> None:
    pool = KVPool(layout(), num_blocks=BLOCKS)
    assert pool.k[1].is_contiguous()
    assert pool.k[1].shape == (BLOCKS, BLOCK, HEADS, DIM)
    every = [rows for side in (pool.k, pool.v) for rows in side if rows is not None]
    assert pool.num_bytes == sum(rows.nbytes for rows in every)
