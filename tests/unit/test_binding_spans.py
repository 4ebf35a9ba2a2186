"""`mark_dead` and `remove_spans` as Python sees them: what they take, refuse and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtrie
from kvtrie import COMPUTED, RadixIndex, TokenSequence

if TYPE_CHECKING:
    from collections.abc import Callable

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


@pytest.fixture
def seq() -> TokenSequence:
    return TokenSequence(list(range(16)), NS)


@pytest.fixture
def index(seq: TokenSequence) -> RadixIndex:
    index = RadixIndex(32, 2)
    index.insert(seq, list(range(8)), num_computed=16, source=COMPUTED)
    return index


def test_dead_blocks_go_first_and_are_counted(index: RadixIndex, seq: TokenSequence) -> None:
    assert index.mark_dead(seq, [(4, 12)]) == 4
    assert index.mark_dead(seq, [(4, 12)]) == 0
    assert (index.stats().dead, index.num_evictable) == (4, 8)
    assert "dead=4" in repr(index.stats())
    assert index.evict(3).tolist() == [5, 4, 3]
    assert (index.stats().dead, index.lookup(seq).blocks.tolist()) == (1, [0, 1, 2])


def test_a_use_revives(index: RadixIndex, seq: TokenSequence) -> None:
    index.mark_dead(seq, [(4, 16)])
    with index.plan(seq):
        assert index.stats().dead == 0
    assert index.evict(1).tolist() == [7]


def test_removed_says_what_became_of_each_block(index: RadixIndex, seq: TokenSequence) -> None:
    other = TokenSequence([*range(8), 90, 91], NS)
    index.insert(other, [0, 1, 2, 3, 20], num_computed=10, source=COMPUTED)
    plan = index.plan(TokenSequence(list(range(12)), NS))
    removed = index.remove_spans(seq, [(4, 8), (8, 16)])
    assert repr(removed) == "Removed(freed=[6, 7], kept=[2, 3], condemned=[4, 5])"
    for ids in (removed.freed, removed.kept, removed.condemned):
        assert ids.dtype == np.int32
    assert index.remove_spans(seq, [(6, 8)], force=True).condemned.tolist() == [3]
    plan.release()
    assert index.take_freed().tolist() == [3, 4, 5]
    index.check()


def test_removed_is_made_by_the_index_alone() -> None:
    with pytest.raises(TypeError, match="cannot create"):
        kvtrie.Removed()


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda pairs: [list(pair) for pair in pairs],
        lambda pairs: [tuple(np.int16(end) for end in pair) for pair in pairs],
        lambda pairs: np.array(pairs, dtype=np.uint8),
        lambda pairs: np.array(pairs, dtype=">i4"),
        lambda pairs: np.array(pairs, dtype=np.uint64)[::1],
        lambda pairs: np.array([(*pair, 7) for pair in pairs])[:, :2],
        lambda pairs: pytest.importorskip("torch").tensor(pairs),
    ],
    ids=["list", "tuple", "lists", "numpy ints", "u1", ">i4", "u8", "strided", "tensor"],
)
def test_ranges_come_in_many_forms(
    index: RadixIndex, seq: TokenSequence, make: Callable[[list[tuple[int, int]]], Any]
) -> None:
    assert index.mark_dead(seq, make([(0, 2), (4, 7), (7, 8)])) == 3
    assert index.remove_spans(seq, make([(0, 2), (4, 7), (7, 8)])).freed.tolist() == [0, 2, 3]


def test_no_ranges_are_fine(index: RadixIndex, seq: TokenSequence) -> None:
    for nothing in ([], (), np.empty((0, 2), dtype=np.int64), [(3, 3)]):
        assert index.mark_dead(seq, nothing) == 0
        assert repr(index.remove_spans(seq, nothing)) == "Removed(freed=[], kept=[], condemned=[])"


@pytest.mark.parametrize("call", ["mark_dead", "remove_spans"])
@pytest.mark.parametrize(
    ("ranges", "error", "says"),
    [
        ([(0, 17)], ValueError, r"ranges has \[0, 17\); it must ascend and lie in \[0, 16\]"),
        ([(0, 2), (6, 4)], ValueError, r"ranges has \[6, 4\); it must ascend"),
        ([(4, 8), (0, 2)], ValueError, r"ranges has \[0, 2\) after a range that ends at 8"),
        ([(4, 8), (7, 9)], ValueError, r"ranges has \[7, 9\) after a range that ends at 8"),
        ([(0, 2), (-1, 4)], ValueError, r"ranges\[1\] has the position -1"),
        ([(0, 2**63)], ValueError, r"ranges\[0\] has the position 9223372036854775808"),
        ([(0, 2**200)], ValueError, r"ranges\[0\]: the integer is beyond every limit"),
        (np.array([[0, 2**64 - 1]], dtype=np.uint64), ValueError, "position 18446744073709551615"),
        ([(0, 2, 4)], ValueError, r"ranges\[0\] has 3 positions; it must have 2"),
        ([()], ValueError, r"ranges\[0\] has 0 positions"),
        (
            np.zeros((2, 3), dtype=int),
            ValueError,
            r"ranges has shape \[2, 3\]; it must be \[n, 2\]",
        ),
        (np.zeros(2, dtype=int), ValueError, r"ranges has shape \[2\]"),
        (np.zeros((1, 2)), TypeError, "ranges has dtype float64; it must be an integer dtype"),
        (np.zeros((1, 2), dtype=bool), TypeError, "ranges has dtype bool"),
        ([(0, True)], TypeError, r"ranges\[0\]: 'bool' object cannot be interpreted"),
        ([(0.0, 2)], TypeError, r"ranges\[0\]: 'float' object"),
        ([0, 2], TypeError, r"ranges\[0\] is of type 'int'; it must be a pair"),
        ([kvtrie.Span(0, 2, "reasoning")], TypeError, r"ranges\[0\] is of type 'Span'"),
        ({(0, 2)}, TypeError, "ranges is of type 'set'; it must be a list or a tuple of pairs"),
        ("0:2", TypeError, "ranges is of type 'str'"),
        (None, TypeError, "ranges is of type 'NoneType'"),
    ],
)
def test_bad_ranges_change_nothing(
    index: RadixIndex, seq: TokenSequence, call: str, ranges: Any, error: type[Exception], says: str
) -> None:
    index.mark_dead(seq, [(14, 16)])
    before = (index.digest(), index.stats())
    with pytest.raises(error, match=says) as caught:
        getattr(index, call)(seq, ranges)
    assert str(caught.value).startswith(f"RadixIndex.{call}: ")
    assert (index.digest(), index.stats()) == before


def test_arguments_of_other_types_are_refused(index: RadixIndex, seq: TokenSequence) -> None:
    with pytest.raises(TypeError):
        index.mark_dead([1, 2], [(0, 2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        index.remove_spans(seq, [(0, 2)], force=1)  # type: ignore[arg-type]
