"""What `mark_dead` and `remove_spans` do, by hand, on the model and on the index alike.

The expected values were derived from the rules on paper; the letter D names the rule (docs/design).
Blocks have two tokens unless an example says otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.property.kit import OTHER, Kit, hit, put, result, shown, stats

from kvtrie import Imported, ReusePolicy, Span

A, B, C, D, E = [1, 2], [3, 4], [5, 6], [7, 8], [9, 10]
X, Y, Z = [11, 12], [13, 14], [15, 16]
ANY = ReusePolicy(scope="namespace")
BAD_RANGES: dict[str, Any] = {
    "reversed": [(4, 2)],
    "descending": [(4, 6), (0, 2)],
    "overlapping": [(0, 4), (2, 6)],
    "beyond": [(0, 7)],
    "negative": [(-2, 2)],
    "twice": [(0, 2), (0, 2)],
}


def gone(removed: Any) -> tuple[list[int], list[int], list[int]]:
    """(freed, kept, condemned)."""
    return removed.freed.tolist(), removed.kept.tolist(), removed.condemned.tolist()


# --- D8: mark_dead --------------------------------------------------------------------------------


def test_mark_dead_blocks_wholly_inside_go_first(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C, D)
    put(index, kit.seq(X), [9])
    put(index, seq, [0, 1, 2, 3])
    # Tokens 1 to 7: blocks 1 and 2 are wholly inside, 0 and 3 straddle an edge.
    assert index.mark_dead(seq, [(1, 7)]) == 2
    assert stats(index, "dead", "evictable", "indexed") == (2, 5, 5)
    assert hit(index, seq) == (8, [0, 1, 2, 3])
    # Back to front, though older and deeper blocks are there; a hole is left.
    assert index.evict(1).tolist() == [2]
    assert stats(index, "dead", "holes") == (1, 1)
    assert index.evict(9).tolist() == [1, 9, 3, 0]


def test_mark_dead_oldest_mark_first(kit: Kit, index: Any) -> None:
    seq, other = kit.seq(A, B, C), kit.seq(X, Y, Z)
    put(index, seq, [0, 1, 2])
    put(index, other, [3, 4, 5])
    assert index.mark_dead(other, [(2, 4)]) == 1
    assert index.mark_dead(seq, [(4, 6)]) == 1
    # What is dead keeps its first mark.
    assert index.mark_dead(other, [(2, 6)]) == 1
    assert index.mark_dead(other, [(2, 6)]) == 0
    assert index.evict(3).tolist() == [4, 2, 5]


def test_mark_dead_one_call_is_one_mark(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C, D, E)
    put(index, seq, [0, 1, 2, 3, 4])
    assert index.mark_dead(seq, [(0, 2), (4, 6), (8, 10)]) == 3
    assert index.evict(9).tolist() == [4, 2, 0, 3, 1]


def test_mark_dead_ranges_that_touch_are_one(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, seq, [0, 1, 2])
    assert index.mark_dead(seq, [(0, 3), (3, 4)]) == 2
    assert index.mark_dead(seq, [(0, 3), (4, 6)]) == 1


def test_mark_dead_extended_blocks_are_skipped(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    put(index, kit.seq(A, B, X), [0, 1, 3])
    # A branch: 0 and 1 serve the other as well.
    assert index.mark_dead(kit.seq(A, B, C), [(0, 6)]) == 1
    # A continuation past the end of the sequence.
    assert index.mark_dead(kit.seq(A, B), [(0, 4)]) == 0
    # The whole sequence: its own continuation does not extend it.
    index.discard([3])
    assert index.mark_dead(kit.seq(A, B, C), [(0, 4)]) == 2
    assert stats(index, "dead") == (3,)


def test_mark_dead_a_tail_after_a_hole_extends(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    index.discard([1])
    # Block 2 is present below 0, and past the end of this sequence.
    assert index.mark_dead(kit.seq(A, B), [(0, 4)]) == 0
    assert index.mark_dead(kit.seq(A, X), [(0, 2)]) == 0
    assert index.mark_dead(kit.seq(A, B, C), [(0, 6)]) == 2


def test_mark_dead_a_touch_revives(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, seq, [0, 1, 2])
    put(index, kit.seq(X), [9])
    index.mark_dead(seq, [(0, 6)])
    index.lookup(seq, touch=False)
    index.tag(seq, [Span(0, 6, "reasoning")])
    assert stats(index, "dead") == (3,)
    # Of the whole path two blocks are used.
    index.lookup(kit.seq(A, B, X))
    assert stats(index, "dead") == (1,)
    assert index.evict(9).tolist() == [2, 9, 1, 0]


@pytest.mark.parametrize("call", ["insert", "plan", "copy", "moved"])
def test_mark_dead_every_use_revives(kit: Kit, call: str) -> None:
    index = kit.index(block_size=4, num_blocks=32, min_run=8)
    seq = kit.seq("abcdefghijkl")
    put(index, seq, [0, 1, 2])
    assert index.mark_dead(seq, [(0, 12)]) == 3
    left = {"insert": 0, "plan": 0, "copy": 1, "moved": 1}[call]
    if call == "insert":
        put(index, seq, [0, 1, 2])
    elif call == "plan":
        index.plan(kit.seq("abcdefghijkl?")).release()
    elif call == "copy":
        # 0 in place, 1 as a source.
        index.plan(kit.seq("abcdef?")).release()
    else:
        # 1 and 2 as sources; 0 above them stays dead.
        index.plan(kit.seq("?efghijkl?"), ANY).release()
    assert stats(index, "dead") == (left,)


def test_mark_dead_does_not_advance_the_clock(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A), [0])
    index.mark_dead(kit.seq(A), [(0, 2)])
    assert stats(index, "clock") == (1,)


def test_mark_dead_pinned_blocks_are_marked_and_skipped(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, seq, [0, 1, 2])
    plan = index.plan(kit.seq(A, B, X))
    assert index.mark_dead(seq, [(0, 6)]) == 3
    assert stats(index, "dead", "evictable") == (3, 1)
    assert index.evict(9).tolist() == [2]
    plan.release()
    assert stats(index, "dead", "evictable") == (2, 2)
    assert index.evict(9).tolist() == [1, 0]


def test_mark_dead_above_a_pinned_path_stays(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    plan = index.plan(kit.seq(A, B, C, [1]))
    index.discard([0])
    put(index, kit.seq(A), [4])
    # Block 4 is not pinned and dead, but is above blocks that the plan holds in place.
    assert index.mark_dead(kit.seq(A, B, C), [(0, 2)]) == 1
    assert stats(index, "evictable") == (0,)
    assert index.evict(9).tolist() == []
    plan.release()


def test_mark_dead_above_a_pinned_source_goes(kit: Kit) -> None:
    index = kit.index(block_size=4, num_blocks=32, min_run=8)
    put(index, kit.seq("abcdefghijklmnop"), [0, 1, 2, 3])
    plan = index.plan(kit.seq("?ijklmnop?"), ANY)
    assert plan.source_blocks.tolist() == [2, 3]
    assert stats(index, "pinned", "evictable") == (2, 0)
    assert index.mark_dead(kit.seq("abcdefghijklmnop"), [(4, 8)]) == 1
    # 1 is dead and may go; 0 above it may not.
    assert stats(index, "evictable") == (1,)
    assert index.evict(9).tolist() == [1]
    assert stats(index, "holes", "evictable") == (1, 0)
    plan.release_sources()
    assert index.evict(9).tolist() == [3, 2, 0]
    plan.release()


def test_mark_dead_replacement_removes_the_mark(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1], source=Imported(exact_until=0))
    index.mark_dead(seq, [(0, 4)])
    assert result(put(index, seq, [2, 3]))[4] == [0, 1]
    assert stats(index, "dead") == (0,)


def test_mark_dead_of_nothing(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1])
    before = index.digest()
    for ranges in ([], [(1, 3)], [(0, 0), (2, 2)], [(4, 4)]):
        assert index.mark_dead(seq, ranges) == 0
    assert index.mark_dead(kit.seq(X, Y), [(0, 4)]) == 0
    assert index.mark_dead(kit.seq(A, B, ns=OTHER), [(0, 4)]) == 0
    assert index.mark_dead(kit.seq(), []) == 0
    assert index.digest() == before


def test_mark_dead_counts_in_the_digest(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1])
    before = index.digest()
    index.mark_dead(seq, [(0, 2)])
    assert index.digest() != before


@pytest.mark.parametrize("call", ["mark_dead", "remove_spans"])
@pytest.mark.parametrize("ranges", BAD_RANGES.values(), ids=BAD_RANGES)
def test_bad_ranges_are_refused(kit: Kit, index: Any, call: str, ranges: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, seq, [0, 1, 2])
    before = index.digest()
    with pytest.raises(ValueError, match=r"."):
        getattr(index, call)(seq, ranges)
    assert index.digest() == before
    assert stats(index, "indexed", "dead") == (3, 0)


# --- D10, D11: remove_spans -----------------------------------------------------------------------


def test_remove_spans_leaves_what_straddles(kit: Kit) -> None:
    index = kit.index(block_size=4, num_blocks=32, min_run=8)
    seq = kit.seq("abcdefghijklmnopqrst")
    put(index, seq, [0, 1, 2, 3, 4])
    assert gone(index.remove_spans(seq, [(2, 14)])) == ([1, 2], [], [])
    assert stats(index, "indexed", "holes", "clock") == (3, 2, 1)
    assert hit(index, seq) == (4, [0])
    # Straddling blocks are usable slot by slot, the block after them is a source.
    with index.plan(kit.seq("ab-opqrst----"), ANY) as plan:
        assert shown(plan) == "0-2 e, 2-13 c"
    with index.plan(kit.seq("ab-mnopqrst--"), ANY) as plan:
        assert shown(plan) == "0-2 e, 2-3 c, 3-11 a1 from 12, 11-13 c"


def test_remove_spans_many_holes_in_one_call(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C, D, E)
    put(index, seq, [4, 3, 2, 1, 0])
    assert gone(index.remove_spans(seq, [(0, 2), (3, 6), (7, 7), (8, 10)])) == ([4, 2, 0], [], [])
    # A and C are holes, with B and D below them; E had nothing below.
    assert stats(index, "indexed", "holes") == (2, 2)


def test_remove_spans_tail_attaches_again_when_refilled(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C, D)
    put(index, seq, [0, 1, 2, 3])
    index.remove_spans(seq, [(2, 6)])
    assert hit(index, seq) == (2, [0])
    put(index, kit.seq(A, B), [0, 8], source=Imported(exact_until=2))
    put(index, kit.seq(A, B, C), [0, 8, 9])
    # Refilled, but not with exact KV: nothing after it is exact.
    assert hit(index, seq) == (2, [0])
    assert result(put(index, kit.seq(A, B, C), [0, 1, 2])) == ([0, 1, 2], 6, [], [], [8, 9])
    assert hit(index, seq) == (8, [0, 1, 2, 3])
    assert stats(index, "holes") == (0,)


def test_remove_spans_extended_blocks_are_kept_and_reported(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    put(index, kit.seq(A, B, X), [0, 1, 3])
    assert gone(index.remove_spans(kit.seq(A, B, C), [(0, 6)])) == ([2], [0, 1], [])
    # Past the end of the sequence: extended too.
    assert gone(index.remove_spans(kit.seq(A, B), [(2, 4)])) == ([], [1], [])
    assert gone(index.remove_spans(kit.seq(A, B), [(2, 4)], force=True)) == ([1], [], [])
    assert gone(index.remove_spans(kit.seq(A, B, X), [(0, 6)])) == ([0, 3], [], [])


def test_remove_spans_judges_before_it_removes(kit: Kit, index: Any) -> None:
    put(index, kit.seq(A, B, C), [0, 1, 2])
    # 2 is on the path, so 0 and 1 are not extended; all go in one call.
    assert gone(index.remove_spans(kit.seq(A, B, C), [(0, 6)])) == ([0, 1, 2], [], [])
    put(index, kit.seq(A, B), [0, 1])
    put(index, kit.seq(A, B, C), [0, 1, 2])
    # By force the blocks that 2 extends go, and it stays, after holes.
    assert gone(index.remove_spans(kit.seq(A, B), [(0, 4)], force=True)) == ([0, 1], [], [])
    assert stats(index, "indexed", "holes") == (1, 2)


def test_remove_spans_pinned_blocks_are_condemned(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, seq, [0, 1, 2])
    plan = index.plan(kit.seq(A, B, X))
    assert gone(index.remove_spans(seq, [(0, 6)])) == ([2], [], [0, 1])
    assert stats(index, "indexed", "condemned", "holes") == (0, 2, 0)
    assert plan.validate().tolist() == [True, True]
    assert gone(index.remove_spans(seq, [(0, 6)])) == ([], [], [])
    plan.release()
    assert index.take_freed().tolist() == [0, 1]


def test_remove_spans_dead_blocks_go_as_others(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B, C)
    put(index, seq, [0, 1, 2])
    index.mark_dead(seq, [(2, 6)])
    assert gone(index.remove_spans(seq, [(2, 4)])) == ([1], [], [])
    assert stats(index, "dead", "indexed") == (1, 2)
    put(index, kit.seq(A, B), [0, 5])
    assert stats(index, "dead") == (1,)


def test_remove_spans_drops_tags(kit: Kit, index: Any) -> None:
    seq = kit.seq(A, B)
    put(index, seq, [0, 1], spans=[Span(0, 4, "user")])
    index.remove_spans(seq, [(2, 4)])
    put(index, seq, [0, 1])
    assert [(span.start, span.end) for span in index.tags(seq)] == [(0, 2)]


def test_remove_spans_holes_beyond_the_bound_let_tails_go(kit: Kit) -> None:
    index = kit.index(num_blocks=4)
    first = kit.seq(A, B, C, D)
    put(index, first, [0, 1, 2, 3])
    assert gone(index.remove_spans(first, [(0, 6)])) == ([0, 1, 2], [], [])
    second = kit.seq(X, Y, Z)
    put(index, second, [0, 1, 2])
    # Three holes and two more are above four: the older tail goes, and waits.
    assert gone(index.remove_spans(second, [(0, 4)])) == ([0, 1], [], [])
    assert stats(index, "indexed", "holes", "waiting") == (1, 2, 1)
    assert index.take_freed().tolist() == [3]


def test_remove_spans_results_are_int32(kit: Kit, index: Any) -> None:
    removed = index.remove_spans(kit.seq(A, B), [(0, 4)])
    for ids in (removed.freed, removed.kept, removed.condemned):
        assert ids.dtype == np.int32
        assert ids.tolist() == []
    with pytest.raises(TypeError):
        index.remove_spans(kit.seq(A), [(0, 2)], force=1)
