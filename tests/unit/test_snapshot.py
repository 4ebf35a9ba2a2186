"""Snapshots of an index: the same results later, and errors for everything else."""

from __future__ import annotations

import array
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtrie
from kvtrie import COMPUTED, SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable

NS = kvtrie.Namespace(model="m", kv_dtype="fp8", rope="yarn:4", adapter="lora", salt="tenant")
SHARED = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
POOL = b"pool"
CONFIGURATION = (
    "num_blocks",
    "block_size",
    "min_run",
    "max_candidates",
    "moved_runs",
    "seed",
    "hash_bits",
)


def restored(index: kvtrie.RadixIndex) -> kvtrie.RadixIndex:
    return kvtrie.RadixIndex.restore(index.snapshot(), pool_id=index.pool_id)


def filled(**options: Any) -> kvtrie.RadixIndex:
    """An index with two namespaces, tags, an item, a hole, approximate and condemned blocks."""
    index = kvtrie.RadixIndex(64, 4, pool_id=POOL, **options)
    image = kvtrie.Item(5, 11, b"pixels")
    seq = kvtrie.TokenSequence([7] * 40, NS, items=[image])
    index.insert(seq, list(range(10)), num_computed=40, source=COMPUTED)
    index.tag(seq, [kvtrie.Span(3, 17, "reasoning"), kvtrie.Span(5, 9, "mine")])
    other = kvtrie.TokenSequence(list(range(24)), SHARED)
    source = kvtrie.Imported(exact_until=12, hops=2)
    index.insert(other, list(range(20, 26)), num_computed=24, source=source)
    index.discard([4])
    plan = index.plan(other)
    index.discard([20])
    assert index.stats().condemned == 1
    del plan
    return index


# A plan is dropped there unreleased, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def grown(index: kvtrie.RadixIndex) -> list[object]:
    answers: list[object] = [index.take_freed().tolist()]
    rng = Random(5)
    for number in range(60):
        ids = [7] * rng.randrange(44) + [rng.randrange(3) for _ in range(rng.randrange(9))]
        seq = kvtrie.TokenSequence(ids, rng.choice([NS, SHARED]))
        answers.append(index.lookup(seq).blocks.tolist())
        with index.plan(seq, kvtrie.ReusePolicy(scope="namespace")) as plan:
            answers.append((plan.segments.tolist(), plan.blocks.tolist()))
        answers.append(index.evict(rng.randrange(2)).tolist())
        if number % 3 == 0:
            answers.append(index.explain(seq).to_dict())
        answers.append(index.tags(seq))
    answers.append(index.digest())
    return answers


@pytest.mark.parametrize("moved_runs", [True, False])
def test_restored_index_returns_the_same(moved_runs: bool) -> None:
    index = filled(moved_runs=moved_runs, min_run=8, seed=3, hash_bits=8, max_candidates=2)
    again = restored(index)
    again.check()
    for name in (*CONFIGURATION, "pool_id", "kinds"):
        assert getattr(again, name) == getattr(index, name)
    assert again.snapshot() == restored(again).snapshot()
    assert grown(again) == grown(index)


def test_plans_are_no_part_of_it() -> None:
    index = kvtrie.RadixIndex(8, 2)
    seq = kvtrie.TokenSequence([1, 2, 3], SHARED)
    index.insert(seq, [6], num_computed=2, source=COMPUTED)
    with index.plan(seq) as plan:
        again = restored(index)
        assert (index.num_evictable, again.num_evictable) == (0, 1)
        with pytest.raises(ValueError, match="another index"):
            again.insert(seq, [6], num_computed=2, source=plan)
    assert again.lookup(seq).blocks.tolist() == [6]


@pytest.mark.parametrize(
    "wrap",
    [
        bytes,
        bytearray,
        memoryview,
        lambda blob: memoryview(bytearray(blob)),
        lambda blob: np.frombuffer(blob, dtype=np.uint8),
        lambda blob: array.array("B", blob),
    ],
    ids=["bytes", "bytearray", "memoryview", "writable", "numpy", "array"],
)
def test_any_buffer_of_bytes_will_do(wrap: Callable[[bytes], Any]) -> None:
    index = filled()
    assert kvtrie.RadixIndex.restore(wrap(index.snapshot()), pool_id=POOL).stats().indexed == 14


@pytest.mark.parametrize("blob", ["text", 5, None, [1, 2], np.zeros(4, dtype=np.int64)])
def test_what_is_no_buffer_of_bytes_is_a_type_error(blob: Any) -> None:
    with pytest.raises(TypeError, match=r"RadixIndex\.restore: blob"):
        kvtrie.RadixIndex.restore(blob, pool_id=POOL)


def test_damage_is_found() -> None:
    blob = filled().snapshot()
    rng = Random(1)
    for at in (0, 7, 8, 13, 20, *(rng.randrange(len(blob)) for _ in range(200))):
        changed = bytearray(blob)
        changed[at] ^= 1 << rng.randrange(8)
        with pytest.raises(SnapshotError, match=r"^RadixIndex\.restore: "):
            kvtrie.RadixIndex.restore(changed, pool_id=POOL)
        with pytest.raises(SnapshotError):
            kvtrie.RadixIndex.restore(blob[:at], pool_id=POOL)
    with pytest.raises(SnapshotError, match="announced"):
        kvtrie.RadixIndex.restore(blob + b"x", pool_id=POOL)
    assert issubclass(SnapshotError, kvtrie.KvTrieError)


def test_pool_beyond_the_limit_is_refused() -> None:
    blob = kvtrie.RadixIndex(1 << 25, pool_id=POOL).snapshot()
    with pytest.raises(SnapshotError, match="33554432 blocks; the limit of this call is 16777216"):
        kvtrie.RadixIndex.restore(blob, pool_id=POOL)
    assert kvtrie.RadixIndex.restore(blob, pool_id=POOL, max_blocks=1 << 31).num_blocks == 1 << 25
    for limit in (0, -1, 1 << 32):
        with pytest.raises(ValueError, match="max_blocks"):
            kvtrie.RadixIndex.restore(blob, pool_id=POOL, max_blocks=limit)


def test_snapshot_changes_nothing() -> None:
    index = filled()
    before = index.digest(), index.stats()
    assert index.snapshot() == index.snapshot()
    assert (index.digest(), index.stats()) == before


def test_a_snapshot_of_another_pool_is_refused_by_both_names() -> None:
    blob = filled().snapshot()
    with pytest.raises(SnapshotError, match=r"RadixIndex\.restore: .* pool 706f6f6c, not of 01ff"):
        kvtrie.RadixIndex.restore(blob, pool_id=b"\x01\xff")
    with pytest.raises(TypeError, match="pool_id"):
        kvtrie.RadixIndex.restore(blob)  # type: ignore[call-arg]  # refused
    assert kvtrie.RadixIndex.pool_of_snapshot(blob) == POOL
    with pytest.raises(SnapshotError, match="no snapshot"):
        kvtrie.RadixIndex.pool_of_snapshot(b"something else")


def test_pools_have_names_of_their_own() -> None:
    one, two = kvtrie.RadixIndex(8), kvtrie.RadixIndex(8)
    assert len(one.pool_id) == len(two.pool_id) == 16
    assert one.pool_id != two.pool_id
    with pytest.raises(SnapshotError, match=f"pool {one.pool_id.hex()}, not of"):
        kvtrie.RadixIndex.restore(one.snapshot(), pool_id=two.pool_id)


@pytest.mark.parametrize("wrong", [b"", b"x" * 65])
def test_the_name_of_a_pool_has_limits(wrong: bytes) -> None:
    named = f"pool_id has {len(wrong)} bytes; it must have 1 to 64"
    with pytest.raises(ValueError, match=f"^RadixIndex: {named}"):
        kvtrie.RadixIndex(8, pool_id=wrong)
    with pytest.raises(ValueError, match=rf"^RadixIndex\.restore: {named}"):
        kvtrie.RadixIndex.restore(filled().snapshot(), pool_id=wrong)
    assert kvtrie.RadixIndex(8, pool_id=b"x" * 64).pool_id == b"x" * 64


@pytest.mark.parametrize("wrong", ["pool", 5, bytearray(b"pool")])
def test_the_name_of_a_pool_is_bytes(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^RadixIndex: pool_id .* bytes, or None"):
        kvtrie.RadixIndex(8, pool_id=wrong)
    with pytest.raises(TypeError, match=r"^RadixIndex\.restore: pool_id .* bytes, or None"):
        kvtrie.RadixIndex.restore(filled().snapshot(), pool_id=wrong)


def test_a_lost_pool_gives_the_empty_index_of_the_same_configuration() -> None:
    index = filled(moved_runs=False, min_run=9, seed=3, hash_bits=8, max_candidates=2)
    index.quarantine([63])
    empty = kvtrie.RadixIndex.restore(index.snapshot(), pool_id=None)
    for name in CONFIGURATION:
        assert getattr(empty, name) == getattr(index, name)
    assert len(empty.pool_id) == 16
    assert empty.pool_id != index.pool_id
    fresh = kvtrie.RadixIndex(64, 4, seed=3)
    assert empty.digest() == fresh.digest()
    assert empty.stats().quarantined == empty.stats().indexed == 0
    with pytest.raises(SnapshotError):
        kvtrie.RadixIndex.restore(index.snapshot()[:-1], pool_id=None)


def test_quarantine_survives() -> None:
    index = filled()
    with index.plan(kvtrie.TokenSequence([7] * 40, NS)) as plan:
        assert plan.blocks.tolist() == [0]
        index.quarantine([0, 63])
        again = restored(index)
    assert again.quarantined.tolist() == index.quarantined.tolist() == [0, 63]
    assert again.stats().quarantined == 2
    assert again.digest() == index.digest()
