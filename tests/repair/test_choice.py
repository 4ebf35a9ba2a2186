"""Choosers, against slow ones that look at one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtrie
from kvtrie.repair import Adaptive, Fronts, Moved, Ngrams, Probed, Scored
from kvtrie.repair.choice import WINDOW, as_ranges, smoothed
from kvtrie.repair.ngrams import MAX_ORDER, MAX_PATHS, changed, matches

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
FIELDS = [("start", "i8"), ("end", "i8"), ("old_start", "i8"), ("delta", "i8"), ("class", "u1")]


def moved_of(tokens: list[int], parts: list[tuple[int, int, int]], path: list[int]) -> Moved:
    """A prompt with parts (start, end, old start) of one path; all else is computed."""
    segments, at = [], 0
    for start, end, old in parts:
        if at < start:
            segments.append((at, start, at, 0, 2))
        segments.append((start, end, old, start - old, 1))
        at = end
    if at < len(tokens):
        segments.append((at, len(tokens), at, 0, 2))
    whole = np.array(path, dtype=np.int64)
    array = np.array(segments, dtype=FIELDS)
    return Moved(np.array(tokens, dtype=np.int64), array, 0, lambda _: whole)


@given(st.lists(st.integers(1, 40), max_size=8), st.floats(0, 1))
def test_fronts_are_those_of_the_index(lengths: list[int], share: float) -> None:
    parts, at = [], 0
    for length in lengths:
        parts.append((at + 1, at + 1 + length, 7 * at))
        at += length + 1
    chosen = Fronts().choose(moved_of([0] * (at + 1), parts, []), share)
    wanted, first = math.ceil(share * sum(lengths)), 0
    while sum(min(first, length) for length in lengths) < wanted:
        first += 1
    expected = [[start, min(start + first, end)] for start, end, _ in parts if first]
    assert chosen.tolist() == expected


def test_fronts_equal_those_that_a_plan_has() -> None:
    index = kvtrie.RadixIndex(64, 4, min_run=8)
    text = list(range(100, 140))
    index.insert(
        kvtrie.TokenSequence(text, SPACE), range(10), num_computed=40, source=kvtrie.COMPUTED
    )
    prompt = [1, *text[:9], 2, *text[12:24], 3, *text[24:], 4]
    seq = kvtrie.TokenSequence(prompt, SPACE)
    for share in (0.0, 0.01, 0.2, 0.5, 0.9, 1.0):
        with (
            index.plan(seq, kvtrie.ReusePolicy(recompute_share=share)) as own,
            index.plan(seq, kvtrie.ReusePolicy()) as plan,
        ):
            chosen = Fronts().choose(Moved.of(plan, np.array(prompt), 4), share)
            plan.recompute(chosen)
            assert plan.gaps.tolist() == own.gaps.tolist()


def naive_matches(tokens: list[int]) -> list[tuple[int, int]]:
    found = []
    for at in range(len(tokens)):
        best = (-1, 0)
        for order in range(1, min(MAX_ORDER, at) + 1):
            gram = tokens[at - order : at]
            earlier = [i for i in range(order, at) if tokens[i - order : i] == gram]
            if earlier:
                best = (earlier[-1], order)
        found.append(best)
    return found


@given(st.lists(st.integers(0, 3), max_size=40))
def test_matches_are_the_last_after_the_longest_n_gram(tokens: list[int]) -> None:
    match, length = matches(np.array(tokens, dtype=np.int64))
    assert list(zip(match.tolist(), length.tolist(), strict=True)) == naive_matches(tokens)


@given(st.data(), st.lists(st.integers(0, 3), min_size=30, max_size=50))
def test_changed_matches_are_those_in_lost_or_gained_text(
    data: st.DataObject, path: list[int]
) -> None:
    first = data.draw(st.integers(0, 10))
    cut = data.draw(st.integers(first, 20))
    new = data.draw(st.lists(st.integers(0, 3), max_size=8))
    tokens = new + path[first:cut] + path[20:] + [9]
    parts = [(len(new), len(new) + cut - first, first)] if cut > first else []
    parts.append((len(new) + cut - first, len(tokens) - 1, 20))
    scores = changed(moved_of(tokens, parts, path))
    old_of = {start + i: old + i for start, end, old in parts for i in range(end - start)}
    here, there = naive_matches(tokens), naive_matches(path)
    expected = []
    for at, old in sorted(old_of.items()):
        (new_at, new_length), (old_at, old_length) = here[at], there[old]
        is_same = new_length == old_length and (new_at < 0 or old_of.get(new_at) == old_at)
        expected.append(0 if is_same else max(new_length, old_length))
    assert scores.tolist() == expected


def test_runs_without_a_known_context_count_as_changed() -> None:
    tokens, path = list(range(40)), list(range(100))
    moved = moved_of(tokens, [(5, 20, 50)], path)
    assert changed(Moved(moved.tokens, moved.segments, 0)).tolist() == [1.0] * 15
    # So do those of more paths than are compared.
    parts = [(2 * i, 2 * i + 1, 0) for i in range(MAX_PATHS + 5)]
    many = moved_of(list(range(1000, 1060)), parts, path)
    ways = Moved(many.tokens, many.segments, 0, lambda number: np.array([number + 1]))
    assert changed(ways).sum() == 5


@pytest.mark.parametrize("share", [0.0, 0.1, 0.34, 1.0])
def test_half_of_the_budget_goes_to_fronts(share: float) -> None:
    moved = moved_of([0] * 60, [(1, 21, 30), (22, 52, 70)], [])
    scores = np.zeros(50)
    scores[[15, 40, 41, 42]] = [1, 2, np.nan, 3]
    chosen = Scored(lambda _: scores).choose(moved, share)
    positions = [at for start, end in chosen.tolist() for at in range(start, end)]
    wanted = math.ceil(share * 50)
    assert wanted <= len(positions) <= wanted + 1
    if share in (0.1, 0.34):
        assert 1 in positions
        assert 22 in positions
        assert 44 in positions  # the highest score
    # A chooser repeats itself.
    assert chosen.tolist() == Scored(lambda _: scores).choose(moved, share).tolist()


@given(st.dictionaries(st.integers(0, 60), st.floats(0, 1), max_size=40))
def test_smoothed_scores_are_means_of_what_is_near(scores: dict[int, float]) -> None:
    at = sorted(scores)
    found = smoothed(np.array([scores[one] for one in at]), np.array(at, dtype=np.int64))
    for one, value in zip(at, found, strict=True):
        near = [scores[other] for other in at if abs(other - one) <= WINDOW // 2]
        assert value == pytest.approx(sum(near) / len(near), abs=1e-9)


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_counts_as_nothing_changed(score: float) -> None:
    found = smoothed(np.array([1.0, score, 1.0]), np.array([0, 1, 2]))
    assert found == pytest.approx([2 / 3] * 3)


def test_the_probe_prefers_phrases_to_single_tokens() -> None:
    # Half of the scores' budget: one high score alone, or five neighbours that are nearly as high.
    moved = moved_of([0] * 102, [(1, 101, 130)], [])
    scores = np.zeros(100)
    scores[40], scores[70:75] = 1.0, 0.9
    chosen = Probed(scores).choose(moved, 0.04)
    positions = [at for start, end in chosen.tolist() for at in range(start, end)]
    assert positions == [1, 72, 73, 74]  # a quarter at the front


@pytest.mark.parametrize(
    ("change", "tokens"),
    [(0.0, 0), (0.0099, 5), (0.0399, 20), (0.0599, 30), (0.08, 40), (5.0, 40)],
)
def test_an_adaptive_share_follows_the_change_up_to_twice_itself(
    change: float, tokens: int
) -> None:
    moved = moved_of([0] * 102, [(1, 101, 130)], [])
    scores = np.full(100, change)
    chosen = Adaptive(scores).choose(moved, 0.2)
    assert chosen.tolist() == Probed(scores).choose(moved, tokens / 100).tolist()
    assert (chosen[:, 1] - chosen[:, 0]).sum() == tokens


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("places", [slice(None), slice(7, 8), slice(7, None)])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_scores_that_are_not_finite_cost_no_token_of_the_share(
    score: float, places: slice, share: float
) -> None:
    """An adaptive share of scores without a number was 0: nothing was computed."""
    moved = moved_of([0] * 102, [(1, 101, 130)], [])
    scores = np.full(100, 0.001)
    scores[places] = score
    chosen = Adaptive(scores).choose(moved, share)
    assert chosen.tolist() == Probed(scores).choose(moved, share).tolist()
    assert (chosen[:, 1] - chosen[:, 0]).sum() == share * 100


def test_an_adaptive_share_is_at_most_all_tokens() -> None:
    moved = moved_of([0] * 102, [(1, 101, 130)], [])
    assert Adaptive(np.ones(100)).choose(moved, 0.8).tolist() == [[1, 101]]


def test_a_part_of_the_budget_is_from_0_to_1() -> None:
    with pytest.raises(ValueError, match=r"fronts must be from 0 to 1, not 1\.5"):
        Scored(lambda moved: np.zeros(len(moved.positions)), fronts=1.5)


def test_nothing_moved_is_nothing_chosen() -> None:
    moved = moved_of([1, 2, 3], [], [])
    for chooser in (Fronts(), Ngrams(), Adaptive(np.empty(0))):
        assert chooser.choose(moved, 1.0).shape == (0, 2)
    assert as_ranges(np.array([3, 4, 6])).tolist() == [[3, 5], [6, 7]]
