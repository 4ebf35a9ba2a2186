"""Plans under M-RoPE: keys rotate by positions, and items have to say how many they take."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import kvtrie
from kvtrie import KVLayout, KVPool, RopeSpec
from kvtrie.kernels.reference import rotate
from kvtrie.rope import ItemPositionsError, Rotary

BLOCK = 4
SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
POLICY = kvtrie.ReusePolicy(min_run=16, scope="namespace")
ROTARY = Rotary(inv_freq=(1.0, 0.25))
AXES = RopeSpec(layers=(ROTARY,), head_dim=4, item_positions=True)
PLAIN = RopeSpec(layers=(ROTARY,), head_dim=4)
TEXT = list(range(100, 140))
# An image of 12 tokens, which takes 4 positions.
IMAGE = kvtrie.Item(8, 20, b"an image", positions=4)


def pool_of(rope: RopeSpec) -> tuple[KVPool, torch.Tensor]:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_size=BLOCK)
    pool = KVPool(layout, rope, num_blocks=64)
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 60, 1, 4, generator=draw)
    pool.scatter(keys, -keys, blocks=range(15), start=0)
    return pool, keys


def planned(item: kvtrie.Item) -> tuple[kvtrie.ReusePlan, Any, Any]:
    """8 tokens, an image and 40 of text are cached; the prompt has no such image before the text.

    Instead it has ``item`` after it.
    """
    index = kvtrie.RadixIndex(num_blocks=64, block_size=BLOCK, seed=0)
    cached = kvtrie.TokenSequence([*range(8), *[9] * 12, *TEXT], SPACE, items=[IMAGE])
    blocks = np.arange(15, dtype=np.int32)
    index.insert(cached, blocks, num_computed=60, source=kvtrie.COMPUTED)
    asked = [*range(8), *TEXT, *[9] * 3, 7]
    seq = kvtrie.TokenSequence(asked, SPACE, items=[item])
    plan = index.plan(seq, POLICY, keep_last=1)
    fresh = np.arange(15, 15 + plan.num_new_blocks, dtype=np.int32)
    table = np.concatenate([plan.blocks, fresh])
    return plan, table, plan.moves(table)


def test_keys_after_a_deleted_image_rotate_by_positions() -> None:
    pool, keys = pool_of(AXES)
    plan, table, moves = planned(kvtrie.Item(48, 51, b"another", positions=2))
    with plan:
        (run,) = plan.segments[plan.segments["class"] == 1]
        assert (run["delta"], run["position_delta"]) == (-12, -4)
        assert set(moves["delta"].tolist()) == {-4}
        pool.apply(moves, items=plan.items)
    start, end = int(run["start"]), int(run["end"])
    found, values = pool.gather(table, start, end)
    assert end - start >= 36
    old = keys[0, start + 12 : end + 12, 0]
    assert torch.equal(found[0, :, 0], rotate(old, AXES, -4))
    assert not torch.allclose(found[0, :, 0], rotate(old, AXES, -12), atol=0.1)
    assert values is not None
    assert torch.equal(values[0, :, 0], -old)


def test_an_item_without_positions_is_refused_before_anything_changes() -> None:
    pool, _ = pool_of(AXES)
    before = [rows.clone() for rows in (*pool.k, *pool.v) if rows is not None]
    nameless = kvtrie.Item(48, 51, b"another")
    plan, _, moves = planned(nameless)
    with plan:
        with pytest.raises(
            ItemPositionsError, match=r"Item\(48, 51, .*\) has no positions"
        ) as seen:
            pool.apply(moves, items=plan.items)
        assert seen.value.item == nameless
        with pytest.raises(ItemPositionsError):
            pool.apply(moves[:0], items=plan.items)
        with pytest.raises(ValueError, match=r"KVPool\.apply: .*give items=plan\.items"):
            pool.apply(moves)
        after = [rows for rows in (*pool.k, *pool.v) if rows is not None]
        assert all(map(torch.equal, before, after))
        pool.apply(moves[:0])
        # Other models have one position per token.
        pool_of(PLAIN)[0].apply(moves, items=plan.items)
        pool_of(PLAIN)[0].apply(moves)


def test_an_item_without_positions_is_not_cached_where_positions_are_needed() -> None:
    """A run after it would go by tokens into a prompt without it, where no item shows that."""
    nameless = kvtrie.Item(8, 20, b"an image")
    cached = kvtrie.TokenSequence([*range(8), *[9] * 12, *TEXT], SPACE, items=[nameless])
    prompt = kvtrie.TokenSequence([*range(8), *TEXT, 7], SPACE)
    index = kvtrie.RadixIndex(num_blocks=64, block_size=BLOCK, seed=0)
    index.insert(cached, range(15), num_computed=60, source=kvtrie.COMPUTED)
    with index.plan(prompt, POLICY) as plan:
        (run,) = plan.segments[plan.segments["class"] == 1]
        # Wrong under M-RoPE: the image took 4 positions.
        assert (run["delta"], run["position_delta"]) == (-12, -12)
        AXES.check_items(plan.items)
    index = kvtrie.RadixIndex(
        num_blocks=64, block_size=BLOCK, seed=0, item_positions=AXES.item_positions
    )
    assert index.item_positions
    before = index.digest()
    with pytest.raises(
        ValueError, match=r"insert: the item at \[8, 20\) does not say how many pos"
    ):
        index.insert(cached, range(15), num_computed=60, source=kvtrie.COMPUTED)
    for policy in (POLICY, kvtrie.EXACT_ONLY):
        with pytest.raises(ValueError, match=r"plan.*: the item at \[8, 20\) does not say"):
            index.plan(cached, policy)
    assert index.digest() == before
    named = kvtrie.TokenSequence(cached[:], SPACE, items=[IMAGE])
    index.insert(named, range(15), num_computed=60, source=kvtrie.COMPUTED)
    again = kvtrie.RadixIndex.restore(index.snapshot(), pool_id=index.pool_id)
    assert again.item_positions
    for one in (index, again):
        with one.plan(prompt, POLICY) as plan:
            (run,) = plan.segments[plan.segments["class"] == 1]
            assert run["position_delta"] == -4
        with pytest.raises(ValueError, match="does not say how many positions"):
            one.plan(cached)


def test_items_are_checked_before_an_insert() -> None:
    nameless = kvtrie.Item(0, 3, b"image")
    AXES.check_items([IMAGE])
    AXES.check_items([])
    PLAIN.check_items([nameless])
    with pytest.raises(ItemPositionsError, match=r"give Item\(\.\.\., positions=\)"):
        AXES.check_items([IMAGE, nameless])


def test_the_error_is_a_value_error_of_kvtrie_and_can_be_pickled() -> None:
    assert issubclass(ItemPositionsError, kvtrie.KvTrieError)
    assert issubclass(ItemPositionsError, ValueError)
    error = pickle.loads(pickle.dumps(ItemPositionsError("message", IMAGE)))  # noqa: S301 - our own
    assert (str(error), error.item) == ("message", IMAGE)


def test_a_spec_says_that_items_need_positions() -> None:
    assert AXES != PLAIN
    assert repr(AXES).endswith("; items need positions)")
    with pytest.raises(TypeError, match="item_positions must be bool, not 1"):
        RopeSpec(layers=(ROTARY,), head_dim=4, item_positions=1)  # type: ignore[arg-type]
