"""What the rules say, by hand: each example holds for the model and for the index alike.

The expected values were derived from the rules on paper; the letter D names the rule (docs/design).
Token ids are small; blocks have two tokens unless an example says otherwise.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
from tests.property.kit import NS, OTHER, Kit, hit, put, result, shown, stats

import kvtrie
from kvtrie import COMPUTED, EXACT_ONLY, Imported, Item, ReusePolicy, Span

A, B, C, D = [1, 2], [3, 4], [5, 6], [7, 8]
X, Y, Z = [11, 12], [13, 14], [15, 16]
IN_PLACE_ONLY = ReusePolicy(approximate=False, partial_blocks=False)


# --- D1: only full blocks below num_computed ------------------------------------------------------


def test_insert_half_a_block_is_surplus(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, [5])
    assert result(put(index, seq, [0, 1, 2])) == ([0, 1], 4, [], [2], [])
    assert hit(index, seq) == (4, [0, 1])


def test_insert_takes_only_what_is_computed(kit: Kit, index: Any) -> None:
    done = index.insert(kit.seq(A, B, C), [0, 1, 2], num_computed=3, source=COMPUTED)
    assert result(done) == ([0], 2, [], [1, 2], [])
    assert hit(index, kit.seq(A, B, C)) == (2, [0])


def test_insert_needs_no_more_ids_than_full_computed_blocks(kit: Kit, index: Any) -> None:
    done = index.insert(kit.seq(A, B, C), [0], num_computed=3, source=COMPUTED)
    assert result(done) == ([0], 2, [], [], [])


def test_insert_too_few_ids_is_refused(kit: Kit, index: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        index.insert(kit.seq(A, B), [0], num_computed=4, source=COMPUTED)
    assert stats(index, "indexed", "clock") == (0, 0)


@pytest.mark.parametrize("start", [1, 8, -2])
def test_insert_wrong_start_is_refused(kit: Kit, index: Any, start: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        index.insert(kit.seq(A, B, C), [0, 1, 2], num_computed=6, start=start, source=COMPUTED)
    with pytest.raises(ValueError, match=r"."):
        index.lookup(kit.seq(A, B, C), start=start)
    assert stats(index, "clock") == (0,)


def test_insert_from_start_continues_a_path(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    done = index.insert(kit.seq(A, B, C, D), [2, 3], num_computed=8, start=4, source=COMPUTED)
    assert result(done) == ([2, 3], 8, [], [], [])
    assert hit(index, kit.seq(A, B, C, D)) == (8, [0, 1, 2, 3])


def test_insert_from_start_after_an_absent_block_takes_nothing(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    index.discard([0])
    done = index.insert(kit.seq(A, B, C), [2], num_computed=6, start=4, source=COMPUTED)
    assert result(done) == ([], 0, [], [2], [])
    assert stats(index, "indexed", "clock") == (1, 2)


def test_insert_from_start_touches_the_whole_path(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    put(index, kit.seq(X), [5])
    index.insert(kit.seq(A, B), [], num_computed=4, start=4, source=COMPUTED)
    # X was last used at 2, A and B at 3.
    assert index.evict(3).tolist() == [5, 1, 0]


def test_insert_from_start_pins_the_whole_path(kit: Kit, index: Any) -> None:
    plan = index.plan(kit.seq(A, B, C))
    put(index, kit.seq(A, B), [0, 1])
    index.insert(kit.seq(A, B, C), [2], num_computed=6, start=4, source=plan)
    assert stats(index, "pinned") == (3,)
    plan.release()


def test_insert_num_computed_before_start_needs_nothing(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    done = index.insert(kit.seq(A, B, C), [2], num_computed=2, start=4, source=COMPUTED)
    assert done.blocks.tolist() == []
    assert done.surplus.tolist() == [2]


# --- D2: who backs a place ------------------------------------------------------------------------


def test_insert_same_ids_again_changes_nothing(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    assert result(put(index, kit.seq(A, B), [0, 1])) == ([0, 1], 4, [], [], [])


def test_insert_other_ids_are_duplicates(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    assert result(put(index, kit.seq(A, B, C), [4, 1, 5])) == ([0, 1, 5], 6, [4], [], [])


def test_insert_exact_replaces_approximate(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    assert result(put(index, seq, [0, 1], source=Imported(exact_until=2, hops=1)))[:2] == (
        [0, 1],
        2,
    )
    assert hit(index, seq) == (2, [0])
    assert result(put(index, seq, [4, 5])) == ([0, 5], 4, [4], [], [1])
    assert hit(index, seq) == (4, [0, 5])


def test_insert_approximate_never_replaces_exact(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1])
    done = put(index, seq, [4, 5], source=Imported(exact_until=0, hops=0))
    assert result(done) == ([0, 1], 4, [4, 5], [], [])


@pytest.mark.parametrize(
    ("first", "second", "replaced"), [(2, 1, True), (1, 1, False), (1, 2, False), (1, 0, True)]
)
def test_insert_fewer_hops_win(
    kit: Kit, index: Any, first: int, second: int, replaced: bool
) -> None:
    put(index, kit.seq(A), [0], source=Imported(exact_until=0, hops=first))
    done = put(index, kit.seq(A), [1], source=Imported(exact_until=0, hops=second))
    freed: list[int] = [0] if replaced else []
    duplicates: list[int] = [] if replaced else [1]
    assert result(done) == ([1 if replaced else 0], 0, duplicates, [], freed)


def test_insert_same_id_never_raises_a_label(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A), [0], source=Imported(exact_until=0, hops=1))
    assert result(put(index, kit.seq(A), [0])) == ([0], 0, [], [], [])
    assert hit(index, kit.seq(A)) == (0, [])
    assert stats(index, "approximate") == (1,)


def test_insert_replacing_a_pinned_block_condemns_it(kit: Kit, index: Any) -> None:
    plan = index.plan(kit.seq(A, [9]))
    put(index, kit.seq(A, [9]), [0], source=Imported(exact_until=0))
    index.insert(kit.seq(A, [9]), [0], num_computed=2, source=plan)
    assert result(put(index, kit.seq(A), [1])) == ([1], 2, [], [], [])
    assert stats(index, "indexed", "condemned", "waiting") == (1, 1, 0)
    plan.release()
    assert stats(index, "indexed", "condemned", "waiting") == (1, 1, 1)
    assert index.take_freed().tolist() == [0]


def test_insert_owned_ids_are_never_surplus(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    done = index.insert(kit.seq(A, B), [0, 1], num_computed=0, source=COMPUTED)
    assert result(done) == ([], 0, [], [], [])


# --- D3: a block backs one entry ------------------------------------------------------------------


def test_insert_id_of_another_place_is_refused(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    for blocks, seq in (
        ([1, 2], kit.seq(A, B)),  # the right path, the wrong position
        ([0], kit.seq(X)),  # another path
        ([0], kit.seq(A, ns=OTHER)),  # another namespace
        ([0, 1], kit.seq(A)),  # a longer path than the sequence given
        ([5, 0], kit.seq(X)),  # surplus, too
    ):
        with pytest.raises(kvtrie.BlockInUseError):
            put(index, seq, blocks)
    assert stats(index, "indexed", "clock") == (2, 1)


def test_insert_own_place_after_num_computed_is_fine(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    done = index.insert(kit.seq(A, B), [0, 1], num_computed=2, source=COMPUTED)
    assert result(done) == ([0], 2, [], [], [])


def test_insert_id_twice_is_refused(kit: Kit, index: Any) -> None:
    with pytest.raises(kvtrie.BlockInUseError):
        put(index, kit.seq(A, B), [3, 3])
    with pytest.raises(kvtrie.BlockInUseError):
        put(index, kit.seq(A), [3, 4, 4])
    assert stats(index, "indexed", "clock") == (0, 0)


# --- D5: a match ----------------------------------------------------------------------------------


def test_lookup_matches_whole_exact_blocks_only(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    assert hit(index, kit.seq(A, B, [5])) == (4, [0, 1])
    assert hit(index, kit.seq(A, B, C), keep_last=1) == (4, [0, 1])
    assert hit(index, kit.seq(A, B, C, [1]), keep_last=1) == (6, [0, 1, 2])
    assert hit(index, kit.seq(A, B, C), keep_last=99) == (0, [])
    assert hit(index, kit.seq(A, B, C), start=4) == (6, [2])
    assert hit(index, kit.seq(A, X, C, D), start=4) == (2, [])
    assert hit(index, kit.seq()) == (0, [])


def test_lookup_stops_at_a_hole(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    assert index.discard([1]).tolist() == [1]
    assert hit(index, kit.seq(A, B, C)) == (2, [0])
    assert stats(index, "indexed", "holes") == (2, 1)
    # Once it is filled with exact KV, the blocks after it match at once.
    assert result(put(index, kit.seq(A, B), [0, 5])) == ([0, 5], 4, [], [], [])
    assert hit(index, kit.seq(A, B, C)) == (6, [0, 5, 2])
    assert stats(index, "holes") == (0,)


def test_lookup_namespaces_are_walls(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    assert hit(index, kit.seq(A, B, ns=OTHER)) == (0, [])
    put(index, kit.seq(A, B, ns=OTHER), [2, 3])
    assert hit(index, kit.seq(A, B, ns=OTHER)) == (4, [2, 3])
    equal = kvtrie.Namespace(model="m", salt="tenant")
    assert hit(index, kit.seq(A, B, ns=equal)) == (4, [2, 3])


def test_lookup_compares_items(kit: Kit, index: Any) -> None:
    image = kit.seq([1, 9, 9, 9], items=(Item(1, 4, b"cat"),))
    put(index, image, [0, 1])
    assert hit(index, image) == (4, [0, 1])
    assert hit(index, kit.seq([1, 9, 9, 9])) == (0, [])
    assert hit(index, kit.seq([1, 9, 9, 9], items=(Item(1, 4, b"dog"),))) == (0, [])
    assert hit(index, kit.seq([1, 9, 9, 9], items=(Item(1, 3, b"cat"),))) == (2, [0])
    # The same digest with another offset is another token.
    two = kit.seq([1, 9, 9, 9], items=(Item(1, 2, b"cat"), Item(2, 4, b"cat")))
    assert hit(index, two) == (2, [0])
    assert hit(index, kit.seq([1, 9, 9, 9], items=(Item(2, 4, b"cat"),))) == (0, [])
    # Cut off, the item keeps start and digest.
    image.truncate(3)
    image.extend([9])
    assert hit(index, image) == (2, [0])


# --- D6: the clock --------------------------------------------------------------------------------


def test_clock_advances_for_use_only(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1])
    index.lookup(seq)
    plan = index.plan(seq)
    index.lookup(kit.seq(X))
    assert stats(index, "clock") == (4,)
    index.lookup(seq, touch=False)
    index.tag(seq, [Span(0, 2, "user")])
    index.tags(seq)
    plan.release_sources()
    plan.release()
    index.evict(1)
    index.discard([0])
    index.drop(NS)
    index.reset()
    index.take_freed()
    assert stats(index, "clock") == (4,)


# --- D7: pins -------------------------------------------------------------------------------------


def test_plan_pins_what_it_uses_in_place(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    plan = index.plan(kit.seq(A, B, X))
    assert plan.blocks.tolist() == [0, 1]
    assert stats(index, "pinned", "evictable") == (2, 1)
    assert index.evict(9).tolist() == [2]
    plan.release()
    assert index.evict(9).tolist() == [1, 0]


def test_plan_copied_block_is_pinned_until_release_sources(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    plan = index.plan(kit.seq(A, [3, 9]))
    assert plan.source_blocks.tolist() == [1]
    assert stats(index, "pinned", "evictable") == (2, 0)
    plan.release_sources()
    plan.release_sources()
    assert stats(index, "pinned", "evictable") == (1, 1)
    assert index.evict(9).tolist() == [1]
    plan.release()
    with pytest.raises(kvtrie.StaleHandleError):
        plan.release_sources()
    with pytest.raises(kvtrie.StaleHandleError):
        plan.release()


def test_plan_blocks_above_a_pinned_one_are_not_evictable(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    plan = index.plan(kit.seq(A, B, C, [1]))
    # The first block is replaced by another: not pinned, but above pinned ones.
    assert index.discard([0]).tolist() == []
    put(index, kit.seq(A), [4])
    assert stats(index, "indexed", "pinned", "condemned", "evictable") == (3, 3, 1, 0)
    assert index.evict(9).tolist() == []
    plan.release()
    assert index.take_freed().tolist() == [0]
    assert index.evict(9).tolist() == [2, 1, 4]


def test_plan_unpinned_pins_nothing(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, [9])
    put(index, seq, [0, 1, 2])
    plan = index.plan(seq, pin=False)
    assert not plan.pinned
    assert plan.validate().tolist() == [True, True]
    index.insert(seq, [0, 1], num_computed=4, source=plan)
    assert stats(index, "pinned", "evictable") == (0, 2)
    assert index.evict(1).tolist() == [1]
    assert plan.validate().tolist() == [False, True]
    # The same id back at the same place does not make it true again.
    put(index, seq, [0, 1, 2])
    assert plan.validate().tolist() == [False, True]
    plan.release()
    with pytest.raises(kvtrie.StaleHandleError):
        index.insert(seq, [0, 1], num_computed=4, source=plan)
    with pytest.raises(kvtrie.StaleHandleError):
        plan.release()


def test_plan_validate_returns_one_bool_per_segment(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    seq = kit.seq(A, [3, 9, 9])
    pinned, loose = index.plan(seq), index.plan(seq, pin=False)
    assert len(pinned.segments) == 3
    index.discard([1])
    assert pinned.validate().tolist() == [True, True, True]
    assert loose.validate().tolist() == [True, False, True]
    pinned.release_sources()
    assert pinned.validate().tolist() == [True, False, True]
    pinned.release()
    loose.release()


# --- D8: eviction ---------------------------------------------------------------------------------


def test_evict_least_recently_used_leaf_first(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A), [0])
    put(index, kit.seq(B), [1])
    put(index, kit.seq(C), [2])
    index.lookup(kit.seq(A))
    assert index.num_evictable == 3
    assert index.evict(2).tolist() == [1, 2]
    assert index.evict(2).tolist() == [0]
    assert index.evict(2).tolist() == []


def test_evict_deepest_first_then_lowest_id(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [5, 6, 7])
    put(index, kit.seq(A, X), [5, 3])
    put(index, kit.seq(A, Y), [5, 2])
    for seq in (kit.seq(A, B, C), kit.seq(A, X), kit.seq(A, Y)):
        index.lookup(seq)
    # Last uses: 7 and 6 at 4, 3 at 5, 2 and 5 at 6.
    assert index.evict(5).tolist() == [7, 6, 3, 2, 5]


def test_evict_same_last_use_lowest_id(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    put(index, kit.seq(A, X), [0, 2])
    put(index, kit.seq(A, Y), [0, 3])
    # The plan touches A, and the sibling that it copies from, at the same time.
    index.lookup(kit.seq(A, B))
    plan = index.plan(kit.seq(A, [11, 9]))
    plan.release()
    # Last uses: 3 at 3, 1 at 4, 2 and 0 at 5.
    assert index.evict(9).tolist() == [3, 1, 2, 0]


def test_evict_parent_keeps_its_own_last_use(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    put(index, kit.seq(X), [2])
    # A's last use is 1, older than X's: once B is gone, A goes before X.
    assert index.evict(2).tolist() == [1, 0]


def test_evict_waiting_blocks_first(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A), [0])
    put(index, kit.seq(B), [1])
    plan = index.plan(kit.seq(B, [9]))
    assert index.discard([1]).tolist() == []
    assert index.evict(0).tolist() == []
    plan.release()
    assert index.evict(1).tolist() == [1]
    assert index.evict(1).tolist() == [0]


def test_evict_hole_below_protects(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    index.discard([1])
    put(index, kit.seq(X), [5])
    # A has nothing right below, but C still hangs there.
    index.lookup(kit.seq(X))
    assert index.evict(1).tolist() == [2]
    assert stats(index, "holes") == (0,)
    assert index.evict(2).tolist() == [0, 5]


# --- D9: discard ----------------------------------------------------------------------------------


def test_discard_returns_ids_in_call_order(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    assert index.discard([2, 0, 2, 9]).tolist() == [2, 0]
    assert stats(index, "indexed", "unknown_discards") == (1, 1)
    assert index.discard([9, 9]).tolist() == []
    assert stats(index, "unknown_discards") == (2,)


def test_discard_pinned_is_condemned_and_then_unknown(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    plan = index.plan(kit.seq(A, B, [9]))
    assert index.discard([1]).tolist() == []
    assert stats(index, "indexed", "condemned", "waiting", "pinned") == (1, 1, 0, 2)
    assert index.discard([1]).tolist() == []
    assert stats(index, "unknown_discards") == (1,)
    assert index.take_freed().tolist() == []
    plan.release()
    assert stats(index, "condemned", "waiting") == (1, 1)
    assert index.discard([1]).tolist() == []
    assert stats(index, "unknown_discards") == (2,)
    assert index.take_freed().tolist() == [1]
    assert index.take_freed().tolist() == []


# --- R7: quarantine -------------------------------------------------------------------------------

KNOWN = ("indexed", "condemned", "waiting", "quarantined")


def test_quarantine_removes_permanently(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    assert index.quarantine([1, 1]) == 1
    assert index.quarantine([1]) == 0
    assert stats(index, *KNOWN, "unknown_discards") == (2, 0, 0, 1, 1)
    assert hit(index, kit.seq(A, B, C)) == (2, [0])
    assert index.discard([1]).tolist() == []
    assert index.evict(9).tolist() == [2, 0]
    assert index.reset().tolist() == index.take_freed().tolist() == []
    assert index.quarantined.tolist() == [1]


def test_quarantine_pinned_follows_after_the_last_release(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    plan, other = index.plan(kit.seq(A, B, [9])), index.plan(kit.seq(A, B, [9]))
    index.discard([1])
    assert index.quarantine([1, 0]) == 2
    assert stats(index, *KNOWN) == (0, 2, 0, 0)
    assert index.quarantined.tolist() == [0, 1]
    plan.release()
    assert stats(index, *KNOWN) == (0, 2, 0, 0)
    other.release()
    assert stats(index, *KNOWN) == (0, 0, 0, 2)
    assert index.take_freed().tolist() == []


def test_quarantine_waiting_waits_no_more(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    with index.plan(kit.seq(A, B, [9])):
        index.discard([0, 1])
    assert index.quarantine([0]) == 1
    assert stats(index, *KNOWN) == (0, 1, 1, 1)
    assert index.take_freed().tolist() == [1]


def test_quarantine_unknown_is_counted_and_taken(kit: Kit, index: Any) -> None:
    assert index.quarantine([5, 3, 5]) == 2
    assert stats(index, *KNOWN, "unknown_discards") == (0, 0, 0, 2, 2)
    # As with condemned ids: an insert stops there, and the id is not its caller's.
    assert result(put(index, kit.seq(A, B, C), [0, 3, 1])) == ([0], 2, [], [1], [])
    put(index, kit.seq(A, B, C), [0, 2, 1])
    assert result(put(index, kit.seq(A, B, C), [0, 3, 1])) == ([0, 2, 1], 6, [], [], [])


@pytest.mark.parametrize("wrong", [-1, 100])
def test_quarantine_outside_the_pool_changes_nothing(kit: Kit, index: Any, wrong: int) -> None:
    put(index, kit.seq(A), [0])
    before = index.digest()
    with pytest.raises(ValueError, match=r"."):
        index.quarantine([0, wrong])
    assert index.digest() == before
    assert index.quarantine([0]) == 1
    assert index.digest() != before


# --- D10: the bound on holes ----------------------------------------------------------------------


def test_discard_holes_beyond_the_bound_let_tails_go(kit: Kit) -> None:
    index = kit.index(num_blocks=4)
    put(index, kit.seq(A, B, C, D), [0, 1, 2, 3])
    index.discard([0, 1, 2])
    assert stats(index, "indexed", "holes", "waiting") == (1, 3, 0)
    put(index, kit.seq(X, Y, Z), [0, 1, 2])
    index.discard([0])
    # Four holes are as many as there are blocks; one more is too many.
    assert stats(index, "holes", "waiting") == (4, 0)
    assert index.discard([1]).tolist() == [1]
    # The older tail, block 3, left with its three holes.
    assert stats(index, "indexed", "holes", "waiting") == (1, 2, 1)
    assert index.take_freed().tolist() == [3]


def test_discard_holes_beyond_the_bound_wait_for_pins(kit: Kit) -> None:
    index = kit.index(num_blocks=4)
    deep, wide = kit.seq(A, B, C, D), kit.seq(X, Y, Z)
    put(index, deep, [0, 1, 2, 3])
    first = index.plan(kit.seq(A, B, C, D, [9]))
    index.discard([0, 1, 2])
    assert stats(index, "condemned") == (3,)
    first.release()
    index.take_freed()
    second = index.plan(wide)
    put(index, wide, [0, 1, 2])
    index.insert(wide, [0, 1, 2], num_computed=6, source=second)
    index.discard([0, 1])
    # Block 3 is not pinned and goes; block 2 is pinned and cut off, and stays.
    assert stats(index, "indexed", "condemned", "holes", "waiting") == (1, 3, 2, 1)
    second.release()
    assert sorted(index.take_freed().tolist()) == [0, 1, 3]


# --- D12: the condemned ---------------------------------------------------------------------------


def test_insert_condemned_id_at_an_empty_place_ends_the_insert(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, seq, [0, 1, 2])
    plan = index.plan(kit.seq(A, B, C, [9]))
    index.discard([1])
    assert result(put(index, seq, [0, 1, 5])) == ([0], 2, [], [5], [])
    # The block after it, at its own place, is the index's: neither list has it.
    assert result(put(index, seq, [0, 1, 2])) == ([0], 2, [], [], [])
    plan.release()
    # What waits counts as condemned.
    assert result(put(index, seq, [0, 1, 5])) == ([0], 2, [], [5], [])
    assert index.take_freed().tolist() == [1]
    assert result(put(index, seq, [0, 1, 2])) == ([0, 1, 2], 6, [], [], [])


def test_insert_condemned_id_at_a_cached_place_returns_the_cached_one(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    plan = index.plan(kit.seq(A, B, [9]))
    index.discard([1])
    put(index, kit.seq(A, B), [0, 4])
    put(index, kit.seq(X), [5], source=Imported(exact_until=0, hops=3))
    # At its own place, at another place, and before an approximate entry: never an error.
    assert result(put(index, kit.seq(A, B), [0, 1])) == ([0, 4], 4, [], [], [])
    assert result(put(index, kit.seq(X), [1])) == ([], 0, [], [], [])
    assert result(put(index, kit.seq(Y), [1])) == ([], 0, [], [], [])
    assert result(put(index, kit.seq(A), [0, 1])) == ([0], 2, [], [], [])
    plan.release()
    assert index.take_freed().tolist() == [1]


def test_take_freed_oldest_release_first(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [3, 1])
    put(index, kit.seq(X, Y), [2, 0])
    first, second = index.plan(kit.seq(X, Y, [9])), index.plan(kit.seq(A, B, [9]))
    index.discard([0, 1, 2, 3])
    first.release()
    second.release()
    assert index.take_freed().tolist() == [0, 2, 1, 3]


def test_take_freed_waits_for_the_last_release(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A), [0])
    first, second = index.plan(kit.seq(A, [9])), index.plan(kit.seq(A, [9]))
    index.discard([0])
    first.release()
    assert index.take_freed().tolist() == []
    second.release()
    assert index.take_freed().tolist() == [0]


# --- D13: what a plan copies ----------------------------------------------------------------------


def test_plan_of_nothing_computes_all(kit: Kit, index: Any) -> None:
    with index.plan(kit.seq(A, B, [5])) as plan:
        assert shown(plan) == "0-5 c"
        assert plan.blocks.tolist() == []
        assert plan.num_new_blocks == 3
        assert plan.gaps.tolist() == [[0, 5]]
        assert (plan.num_exact, plan.num_approximate, plan.num_compute) == (0, 0, 5)


def test_plan_of_an_empty_sequence(kit: Kit, index: Any) -> None:
    with index.plan(kit.seq()) as plan:
        assert shown(plan) == ""
        assert plan.gaps.shape == (0, 2)
        assert plan.num_new_blocks == 0
        assert plan.validate().tolist() == []


def test_plan_copies_the_block_where_tokens_diverge(kit: Kit) -> None:
    index = kit.index(block_size=4)
    put(index, kit.seq([1, 2, 3, 4], [5, 6, 7, 8]), [0, 1])
    prompt = kit.seq([1, 2, 3, 4], [5, 6, 9, 9], [9])
    with index.plan(prompt) as plan:
        assert shown(plan) == "0-4 e, 4-6 e, 6-9 c"
        assert plan.source_blocks.tolist() == [1]
        assert plan.num_new_blocks == 2
        assert plan.moves([0, 7, 8]).tolist() == [(4, 28, 2, 0)]
        assert plan.moves([0, 7, 8], 5).tolist() == [(5, 29, 1, 0)]
        assert plan.moves([0, 7, 8], 0, 5).tolist() == [(4, 28, 1, 0)]
        assert plan.moves([0, 7, 8], 6).tolist() == []
    with index.plan(prompt, IN_PLACE_ONLY) as plan:
        assert shown(plan) == "0-4 e, 4-9 c"
        assert plan.source_blocks.tolist() == []


def test_plan_copies_up_to_keep_last(kit: Kit) -> None:
    index = kit.index(block_size=4)
    seq = kit.seq([1, 2, 3, 4])
    put(index, seq, [0])
    with index.plan(seq) as plan:
        assert shown(plan) == "0-3 e, 3-4 c"
    with index.plan(seq, keep_last=0) as plan:
        assert shown(plan) == "0-4 e"
        assert plan.blocks.tolist() == [0]
        assert plan.num_new_blocks == 0
        assert plan.gaps.shape == (0, 2)
    with index.plan(seq, keep_last=4) as plan:
        assert shown(plan) == "0-4 c"


def test_plan_copies_up_to_the_end_of_the_prompt(kit: Kit) -> None:
    index = kit.index(block_size=4)
    put(index, kit.seq([1, 2, 3, 4]), [0])
    with index.plan(kit.seq([1, 2]), keep_last=0) as plan:
        assert shown(plan) == "0-2 e"
        assert plan.num_new_blocks == 1


def test_plan_copies_the_sibling_that_shares_most(kit: Kit) -> None:
    index = kit.index(block_size=4)
    put(index, kit.seq([1, 9, 9, 9]), [0])
    put(index, kit.seq([1, 2, 9, 9]), [1])
    put(index, kit.seq([1, 2, 8, 9]), [2])
    with index.plan(kit.seq([1, 2, 3, 4, 5])) as plan:
        # Both 1 and 2 share two tokens; (1, 2, 8, 9) sorts before (1, 2, 9, 9).
        assert plan.source_blocks.tolist() == [2]
        assert shown(plan) == "0-2 e, 2-5 c"


def test_plan_sibling_without_an_item_sorts_first(kit: Kit, index: Any) -> None:
    put(index, kit.seq([1, 5], items=(Item(1, 2, b"b"),)), [0])
    put(index, kit.seq([1, 5], items=(Item(1, 2, b"a"),)), [1])
    with index.plan(kit.seq([1, 9, 9])) as plan:
        assert plan.source_blocks.tolist() == [1]
    put(index, kit.seq([1, 5]), [2])
    with index.plan(kit.seq([1, 9, 9])) as plan:
        assert plan.source_blocks.tolist() == [2]
    put(index, kit.seq([1, 4], items=(Item(1, 2, b"z"),)), [3])
    with index.plan(kit.seq([1, 9, 9])) as plan:
        # The id decides before the item.
        assert plan.source_blocks.tolist() == [3]


def test_plan_never_copies_approximate_tokens(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A), [0], source=Imported(exact_until=0))
    with index.plan(kit.seq([1, 9, 9])) as plan:
        assert shown(plan) == "0-3 c"
    with index.plan(kit.seq(A, [9])) as plan:
        assert shown(plan) == "0-3 c"


def test_plan_touches_what_it_uses(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    put(index, kit.seq(X), [2])
    with index.plan(kit.seq(A, [3, 9])):
        pass
    assert index.evict(3).tolist() == [2, 1, 0]


# --- D14: labels ----------------------------------------------------------------------------------


def test_insert_after_an_approximate_block_is_approximate(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, kit.seq(A, B), [0, 1], source=Imported(exact_until=2, hops=1))
    assert result(put(index, seq, [0, 1, 2])) == ([0, 1, 2], 2, [], [], [])
    assert hit(index, seq) == (2, [0])
    assert stats(index, "approximate") == (2,)
    # When the block before becomes exact, the block after it keeps its label.
    put(index, kit.seq(A, B), [0, 4])
    assert hit(index, seq) == (4, [0, 4])


def test_insert_said_exact_after_approximate_has_no_hops(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1], source=Imported(exact_until=0, hops=2))
    # At A, the cached id; at B a block computed after it: approximate, with fewer hops, none.
    assert result(put(index, seq, [0, 3])) == ([0, 3], 0, [], [], [1])
    done = put(index, seq, [0, 4], source=Imported(exact_until=0, hops=0))
    assert result(done) == ([0, 3], 0, [4], [], [])


@pytest.mark.parametrize(
    ("exact_until", "exact"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (99, 4)]
)
def test_insert_imported_is_exact_up_to_whole_blocks(
    kit: Kit, index: Any, exact_until: int, exact: int
) -> None:
    seq = kit.seq(A, B)
    assert put(index, seq, [0, 1], source=Imported(exact_until=exact_until)).num_exact == exact
    assert hit(index, seq)[0] == exact


def test_insert_plan_of_computed_tokens_replaces_approximate(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, kit.seq(A, B), [0, 1], source=Imported(exact_until=2, hops=0))
    plan = index.plan(seq)
    assert plan.blocks.tolist() == [0]
    # KV computed under the plan is exact: it replaces the approximate block, whatever its hops.
    done = index.insert(seq, [0, 3], num_computed=4, source=plan)
    assert result(done) == ([0, 3], 4, [], [], [1])
    plan.release()


def test_insert_plan_that_adopted_approximate_blocks_labels_later_ones(
    kit: Kit, index: Any
) -> None:
    seq = kit.seq(A, B, C)
    plan = index.plan(seq)
    put(index, kit.seq(A), [0], source=Imported(exact_until=0, hops=0))
    # The engine offers the cached id: the result is approximate at token 0.
    assert index.insert(seq, [0], num_computed=2, source=plan).num_exact == 0
    put(index, kit.seq(A), [5])
    assert hit(index, kit.seq(A)) == (2, [5])
    # For the life of the plan, everything from there on is approximate, whatever the path is.
    done = index.insert(seq, [5, 6], num_computed=4, source=plan)
    assert result(done) == ([5, 6], 2, [], [], [])
    plan.release()
    assert sorted(index.take_freed().tolist()) == [0]


def test_insert_sequence_that_does_not_start_with_the_plan_is_refused(kit: Kit, index: Any) -> None:
    plan = index.plan(kit.seq(A, B))
    for seq in (
        kit.seq(A, X),
        kit.seq(A),
        kit.seq(A, B, ns=OTHER),
        kit.seq(A, B, items=(Item(0, 1, b"i"),)),
    ):
        with pytest.raises(ValueError, match=r"."):
            put(index, seq, [0, 1], source=plan)
    assert result(put(index, kit.seq(A, B, C), [0, 1, 2], source=plan))[0] == [0, 1, 2]
    plan.release()


def test_insert_plan_of_another_index_is_refused(kit: Kit) -> None:
    index, other = kit.index(), kit.index()
    plan = other.plan(kit.seq(A))
    with pytest.raises(ValueError, match=r"."):
        put(index, kit.seq(A), [0], source=plan)
    plan.release()


# --- D17: tags ------------------------------------------------------------------------------------


def tags(index: Any, seq: Any) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.kind) for span in index.tags(seq)]


def test_tags_belong_to_the_prefix(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    index.tag(kit.seq(A, B, X), [Span(1, 6, "reasoning"), Span(0, 2, "user")])
    assert tags(index, kit.seq(A, B, C)) == [(0, 2, "user"), (1, 4, "reasoning")]
    assert tags(index, kit.seq(A, B, X)) == [(0, 2, "user"), (1, 4, "reasoning")]
    assert tags(index, kit.seq(A)) == [(0, 2, "user"), (1, 2, "reasoning")]
    assert tags(index, kit.seq(A, B, ns=OTHER)) == []


def test_tags_replacement_keeps_them_and_removal_drops_them(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1], source=Imported(exact_until=2), spans=[Span(0, 4, "mine")])
    put(index, seq, [0, 5])
    assert tags(index, seq) == [(0, 4, "mine")]
    index.discard([0])
    assert tags(index, seq) == [(2, 4, "mine")]
    put(index, seq, [0, 5])
    assert tags(index, seq) == [(2, 4, "mine")]
    assert index.kinds[7:] == ("mine",)


def test_tags_runs_are_maximal(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, seq, [0, 1, 2])
    index.tag(seq, [Span(0, 1, "user"), Span(1, 3, "user"), Span(4, 5, "user"), Span(2, 2, "none")])
    assert tags(index, seq) == [(0, 3, "user"), (4, 5, "user")]


def test_insert_spans_tag_whatever_was_taken(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [0, 1])
    index.insert(kit.seq(A, B), [], num_computed=0, source=COMPUTED, spans=[Span(0, 4, "system")])
    assert tags(index, kit.seq(A, B)) == [(0, 4, "system")]


def test_plan_kinds_of_its_source_tokens(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1])
    index.tag(seq, [Span(0, 1, "system"), Span(1, 2, "user"), Span(3, 4, "answer")])
    with index.plan(kit.seq(A, [3, 9, 9])) as plan:
        assert [int(kinds) for kinds in plan.segments["kinds"]] == [0b11, 0, 0]
    index.tag(seq, [Span(2, 3, "reasoning")])
    with index.plan(kit.seq(A, [3, 9, 9])) as plan:
        assert [int(kinds) for kinds in plan.segments["kinds"]] == [0b11, 0b100, 0]


def test_tag_empty_span_is_a_no_op(kit: Kit, index: Any) -> None:
    seq = kit.seq(A)
    put(index, seq, [0])
    index.tag(seq, [Span(1, 1, "mine"), Span(0, 0, "user"), Span(2, 2, "yours")])
    assert tags(index, seq) == []
    assert len(index.kinds) == 7
    index.tag(seq, [Span(0, 1, "yours"), Span(1, 1, "mine")])
    assert index.kinds[7:] == ("yours",)


def test_tag_more_than_64_kinds_is_refused(kit: Kit, index: Any) -> None:
    seq = kit.seq(A)
    put(index, seq, [0])
    index.tag(seq, [Span(0, 1, f"kind {i}") for i in range(57)])
    assert len(index.kinds) == 64
    with pytest.raises(ValueError, match=r"."):
        index.tag(seq, [Span(0, 1, "user"), Span(0, 1, "one more")])
    assert len(index.kinds) == 64
    assert "user" not in [kind for _, _, kind in tags(index, seq)]


# --- D18: epochs ----------------------------------------------------------------------------------


def test_drop_frees_a_namespace_and_ends_its_plans(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [1, 0])
    put(index, kit.seq(A, ns=OTHER), [2])
    seq = kit.seq(A, B, C)
    plan, other = index.plan(kit.seq(A, [9])), index.plan(kit.seq(A, [9], ns=OTHER))
    late = index.plan(seq)
    late.release()
    assert index.drop(NS).tolist() == [0]
    assert stats(index, "indexed", "condemned", "waiting") == (1, 1, 0)
    # A plan of the epoch before inserts nothing, even where nothing is cached.
    done = index.insert(kit.seq(A, [9]), [5], num_computed=2, source=plan)
    assert result(done) == ([], 0, [], [5], [])
    assert result(index.insert(kit.seq(A, [9]), [1], num_computed=2, source=plan))[3] == []
    done = index.insert(kit.seq(A, [9], ns=OTHER), [2], num_computed=2, source=other)
    assert result(done) == ([2], 2, [], [], [])
    plan.release()
    assert index.take_freed().tolist() == [1]
    other.release()


def test_reset_frees_all_and_ends_all_plans(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B), [3, 1])
    put(index, kit.seq(A, ns=OTHER), [2])
    plan = index.plan(kit.seq(X))
    assert index.reset().tolist() == [1, 2, 3]
    assert result(put(index, kit.seq(X), [0], source=plan)) == ([], 0, [], [0], [])
    plan.release()
    assert stats(index, "indexed", "clock") == (0, 4)


def test_drop_of_an_unknown_namespace_starts_an_epoch(kit: Kit, index: Any) -> None:
    plan = index.plan(kit.seq(A))
    assert index.drop(NS).tolist() == []
    assert result(put(index, kit.seq(A), [0], source=plan)) == ([], 0, [], [0], [])
    plan.release()


def test_insert_with_an_older_epoch_advances_the_clock_and_touches_nothing(
    kit: Kit, index: Any
) -> None:
    plan = index.plan(kit.seq(A))
    index.drop(NS)
    put(index, kit.seq(A), [0])
    put(index, kit.seq(B), [1])
    assert result(put(index, kit.seq(A), [0], source=plan)) == ([], 0, [], [], [])
    assert stats(index, "clock", "pinned") == (4, 0)
    assert index.evict(1).tolist() == [0]
    plan.release()


# --- D19: collected plans -------------------------------------------------------------------------


def test_plan_collected_unreleased_releases_itself_and_warns(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A), [0])
    plan = index.plan(kit.seq(A, [9]))
    assert stats(index, "pinned", "live_plans") == (1, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del plan
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning]
    assert stats(index, "pinned", "live_plans") == (0, 0)


def test_plan_context_releases_once(kit: Kit, index: Any) -> None:
    with index.plan(kit.seq(A)) as plan:
        assert not plan.released
    assert plan.released
    with index.plan(kit.seq(A)) as plan:
        plan.release()
    with pytest.raises(kvtrie.StaleHandleError):
        plan.release()
    plan = index.plan(kit.seq(A))

    def fail() -> None:
        with plan:
            message = "inside"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert plan.released


# --- the allocator --------------------------------------------------------------------------------


def test_allocator_all_or_nothing(kit: Kit) -> None:
    pool = kit.allocator_class(4)
    index = kit.index(num_blocks=4)
    ids = pool.allocate(3)
    put(index, kit.seq(A, B), ids[:2].tolist())
    assert (pool.num_free, pool.num_blocks) == (1, 4)
    with pytest.raises(kvtrie.OutOfBlocksError, match=r"4.*3"):
        pool.allocate(4, evict_from=index)
    assert stats(index, "indexed") == (2,)
    assert pool.num_free == 1
    with pytest.raises(kvtrie.OutOfBlocksError, match=r"2.*1"):
        pool.allocate(2)
    got = pool.allocate(3, evict_from=index)
    assert sorted([*got.tolist(), int(ids[2])]) == [0, 1, 2, 3]
    assert stats(index, "indexed") == (0,)
    assert pool.num_free == 0
    assert pool.allocate(0).tolist() == []


def test_allocator_waiting_blocks_count_as_available(kit: Kit) -> None:
    pool = kit.allocator_class(2)
    index = kit.index(num_blocks=2)
    ids = pool.allocate(2).tolist()
    put(index, kit.seq(A, B), ids)
    plan = index.plan(kit.seq(A, B, [9]))
    index.discard(ids)
    with pytest.raises(kvtrie.OutOfBlocksError):
        pool.allocate(1, evict_from=index)
    plan.release()
    assert sorted(pool.allocate(2, evict_from=index).tolist()) == sorted(ids)


def test_allocator_double_free_is_refused(kit: Kit) -> None:
    pool = kit.allocator_class(4)
    ids = pool.allocate(2)
    pool.free(ids[:1])
    for wrong in (ids, ids[:1], [int(ids[1])] * 2, [4], [-1]):
        with pytest.raises(ValueError, match=r"."):
            pool.free(wrong)
        assert pool.num_free == 3
    never = ({0, 1, 2, 3} - set(ids.tolist())).pop()
    with pytest.raises(ValueError, match=r"."):
        pool.free([never])
    pool.free(np.array(ids[1:]))
    assert pool.num_free == 4


# --- P19: grades ----------------------------------------------------------------------------------


def test_an_offer_is_no_stricter_because_of_a_kind_that_came_later(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    with index.plan(seq, EXACT_ONLY, pin=False) as plan:
        put(index, seq, [0, 1], source=Imported(exact_until=2))
        # From here on, what the plan builds after the first block is approximate (D14).
        assert put(index, seq, [0, 1], source=plan).num_exact == 2
        index.discard([1])
        assert result(put(index, seq, [0, 2], source=plan)) == ([0, 2], 2, [], [], [])
        # No approximate block was before it, so its grade is the strictest, and stays that.
        index.tag(seq, [Span(0, 1, "mine")])
        assert result(put(index, seq, [0, 3], source=plan)) == ([0, 2], 2, [3], [], [])


# --- defaults -------------------------------------------------------------------------------------


def test_defaults_are_exact(kit: Kit) -> None:
    index = kit.index_class(4)
    sizes = (index.num_blocks, index.block_size, index.min_run, index.max_candidates)
    assert sizes == (4, 16, 16, 64)
    assert not EXACT_ONLY.approximate
    kinds = "system user reasoning answer tool_call tool_result lookahead"
    assert index.kinds == tuple(kinds.split())
