"""The seed of the hashes: drawn unless given, kept by a snapshot, and never shown."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

import kvtrie
from kvtrie.testing.model import ModelIndex

if TYPE_CHECKING:
    from collections.abc import Callable


def test_indexes_draw_seeds_of_their_own() -> None:
    seeds = {kvtrie.RadixIndex(8).seed for _ in range(20)}
    assert len(seeds) == 20
    # Of 64 bits, not of fewer.
    assert max(seeds) > 1 << 56
    assert kvtrie.RadixIndex(8, seed=None).seed not in seeds


def test_a_given_seed_is_kept() -> None:
    for seed in (0, 5, 2**64 - 1):
        assert kvtrie.RadixIndex(8, seed=seed).seed == seed
    assert ModelIndex(8, seed=None, pool_id=b"x").stats().indexed == 0


def test_a_restored_index_keeps_its_seed() -> None:
    index = kvtrie.RadixIndex(8)
    again = kvtrie.RadixIndex.restore(index.snapshot(), pool_id=index.pool_id)
    assert again.seed == index.seed
    assert kvtrie.RadixIndex.restore(index.snapshot(), pool_id=None).seed == index.seed


def test_a_seed_is_in_no_repr() -> None:
    seed = 0x6B76_7472_6965_1234
    index = kvtrie.RadixIndex(8, seed=seed)
    with index.plan(kvtrie.TokenSequence([1], kvtrie.Namespace(model="m", salt="s"))) as plan:
        shown = f"{index!r} {index.stats()!r} {plan!r} {index}"
    assert str(seed) not in shown
    assert f"{seed:x}" not in shown.lower()


@pytest.mark.parametrize("make", [kvtrie.RadixIndex, ModelIndex])
def test_index_and_model_take_the_same_arguments(make: Callable[..., object]) -> None:
    assert list(inspect.signature(make).parameters) == [
        "num_blocks",
        "block_size",
        "min_run",
        "max_candidates",
        "moved_runs",
        "seed",
        "pool_id",
        "hash_bits",
        "groups",
        "item_positions",
    ]
