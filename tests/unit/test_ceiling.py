"""The ceiling that coverage is judged by, against one that tries every pair of places."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads.ceiling import Ceiling, Reach, coverage, reused
from workloads.documents import document


def naive(cached: list[list[int]], prompt: list[int], min_run: int, keep_last: int) -> Reach:
    """Every place of the prompt with every place of the cache, token by token."""
    sought = prompt[: max(0, len(prompt) - keep_last)]
    matched = np.zeros(len(prompt), dtype=np.bool_)
    longest = [0] * len(sought)
    prefix = 0
    for ids in cached:
        for start in range(len(sought)):
            for old_start in range(len(ids)):
                length = 0
                while (
                    start + length < len(sought)
                    and old_start + length < len(ids)
                    and sought[start + length] == ids[old_start + length]
                ):
                    length += 1
                if length >= min_run:
                    matched[start : start + length] = True
                longest[start] = max(longest[start], length)
                if start == old_start == 0:
                    prefix = max(prefix, length)

    @cache
    def most(start: int) -> int:
        """Every choice of pieces from a token on."""
        pieces = range(min_run, longest[start] + 1) if start < len(sought) else range(0)
        later = most(start + 1) if start < len(sought) else 0
        return max([later, *(length + most(start + length) for length in pieces)])

    return Reach(prefix, matched, prefix + most(prefix))


token_ids = st.lists(st.integers(0, 3), max_size=24)


@settings(max_examples=300)
@given(
    cached=st.lists(token_ids, max_size=4),
    prompt=token_ids,
    min_run=st.integers(1, 9),
    block_size=st.integers(1, 4),
    keep_last=st.integers(0, 3),
    computed=st.integers(0, 30),
)
def test_ceiling_is_that_of_every_pair_of_places(
    cached: list[list[int]],
    prompt: list[int],
    min_run: int,
    block_size: int,
    keep_last: int,
    computed: int,
) -> None:
    whole = [ids[: min(len(ids), computed) // block_size * block_size] for ids in map(list, cached)]
    ceiling = Ceiling(
        cached, block_size=block_size, min_run=min_run, num_computed=[computed] * len(cached)
    )
    expected = naive(whole, prompt, min_run, keep_last)
    found = ceiling.of(prompt, keep_last=keep_last)
    assert found.prefix == expected.prefix
    assert found.matched.tolist() == expected.matched.tolist()
    assert found.most == expected.most
    assert found.most <= np.count_nonzero(found.mask)
    assert ceiling.num_tokens == sum(map(len, whole))


def test_ceiling_of_nothing() -> None:
    assert Ceiling([]).of([1, 2, 3]).most == 0
    assert Ceiling([[1, 2, 3]], block_size=1, min_run=2).of([]).share == 0.0
    assert Ceiling([[], [1]], block_size=1, min_run=1).of([1]).most == 1


def test_windows_do_not_go_on_into_the_next_sequence() -> None:
    ceiling = Ceiling([[1, 2], [3, 4]], block_size=1, min_run=3)
    assert ceiling.of([0, 1, 2, 3, 4]).most == 0


def test_what_is_left_of_a_run_may_be_too_short() -> None:
    """Both runs have four tokens and share one: a plan uses one of them whole."""
    cached = [[1, 2, 3, 4], [4, 5, 6, 7]]
    ceiling = Ceiling(cached, block_size=1, min_run=4)
    found = ceiling.of([9, 1, 2, 3, 4, 5, 6, 7])
    assert (int(np.count_nonzero(found.matched)), found.most) == (7, 4)
    # Its own prefix has no shortest piece.
    assert ceiling.of([1, 2, 9, 4, 5, 6, 7]).most == 6


def test_moved_pieces_end_before_moved_end_and_come_from_the_scope() -> None:
    cached = [1, 2, 3, 4, 5, 6]
    ceiling = Ceiling([cached], block_size=1, min_run=2, out_of_scope=[[1, 2, 3, 9, 7, 8, 7]])
    prompt = [1, 2, 3, 9, 2, 3, 4, 7, 8]
    assert [ceiling.of(prompt, moved_end=end).most for end in (0, 4, 5, 6, 7, 9, None)] == [
        *(4, 4, 4, 6, 7, 7, 7)
    ]
    with pytest.raises(ValueError, match=r"moved_end is 10, it must be in \[0, 9\]"):
        ceiling.of(prompt, moved_end=10)


def test_ids_up_to_the_last_u32_are_distinguished() -> None:
    top = (1 << 32) - 1
    ceiling = Ceiling([[top, top - 1, 0, 1]], block_size=1, min_run=2)
    assert ceiling.of([5, top, top - 1, 5, 0, 1]).matched.tolist() == [
        False,
        True,
        True,
        False,
        True,
        True,
    ]


def test_a_million_cached_tokens_take_seconds() -> None:
    rows = document(0, 1_000_000).reshape(200, 5_000)
    prompt = np.concatenate([rows[number, 7:2_507] for number in range(8)])
    # The clock of this process: other work of the machine does not count.
    began = time.process_time()
    reach = Ceiling(rows, block_size=8).of(prompt)
    assert reach.matched.all()
    assert time.process_time() - began < 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"min_run": 0}, "min_run is 0"),
        ({"num_computed": [1, 2]}, "2 lengths for 1 sequences"),
        ({"num_computed": [-1]}, "num_computed has -1"),
    ],
)
def test_ceiling_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ceiling([[1, 2]], **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1]], "2 dimensions"),
        ([1.5], "type float64"),
        ([-1], "ids from -1"),
        ([1 << 32], "to 4294967296"),
    ],
)
def test_ceiling_refuses_what_are_no_ids(ids: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ceiling([ids])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=message):
        Ceiling([]).of(ids)  # type: ignore[arg-type]


def test_keep_last_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_last is -1"):
        Ceiling([]).of([1], keep_last=-1)


SEGMENT = np.dtype([("start", np.int64), ("end", np.int64), ("class", np.uint8)])


def test_coverage_is_the_share_of_what_could_be_reused() -> None:
    segments = np.array([(0, 4, 0), (4, 6, 2), (6, 8, 1), (8, 10, 2)], dtype=SEGMENT)
    matched = np.zeros(10, dtype=np.bool_)
    matched[5:9] = True
    assert reused(segments, 10).tolist() == [True] * 4 + [False] * 2 + [True] * 2 + [False] * 2
    assert coverage(segments, Reach(4, matched, 8)) == 6 / 8
    # Tokens reused beyond the ceiling do not count.
    assert coverage(segments, Reach(1, np.zeros(10, dtype=np.bool_), 1)) == 1.0
    assert coverage(segments, Reach(0, np.zeros(10, dtype=np.bool_), 0)) == 1.0
