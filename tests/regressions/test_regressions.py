"""Bugs that were fixed, each with its smallest input, through the public API."""

from __future__ import annotations

import numpy as np
import pytest

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def test_empty_span_does_not_name_a_kind() -> None:
    index = kvtrie.RadixIndex(num_blocks=4, block_size=2)
    before = index.kinds
    index.tag(kvtrie.TokenSequence([1, 2], SPACE), [kvtrie.Span(1, 1, "mine")])
    assert index.kinds == before


def test_block_that_the_index_got_elsewhere_is_not_allocated_twice() -> None:
    pool = kvtrie.BlockAllocator(4)
    index = kvtrie.RadixIndex(num_blocks=4, block_size=1)
    pool.allocate(3)
    index.insert(
        kvtrie.TokenSequence([1, 2, 3], SPACE), [0, 1, 3], num_computed=3, source=kvtrie.COMPUTED
    )
    with pytest.raises(ValueError, match="was not handed out here"):
        pool.allocate(4, evict_from=index)
    ids = pool.allocate(3, evict_from=index)
    assert len(np.unique(ids)) == 3


def test_block_in_place_of_a_discarded_pinned_one_is_pinned() -> None:
    index = kvtrie.RadixIndex(num_blocks=8, block_size=1)
    seq = kvtrie.TokenSequence([1, 2], SPACE)
    with index.plan(seq) as plan:
        index.insert(seq, [0, 1], num_computed=2, source=plan)
        index.discard([1])
        index.insert(seq, [0, 2], num_computed=2, source=plan)
        assert index.num_evictable == 0
        index.check()
