"""The paired interval: closed forms, its own definition, and coverage by simulation."""

from __future__ import annotations

import math
from random import Random

import pytest

from kvtrie.gates import paired_interval
from kvtrie.gates.statistics import is_above, is_below, upper_bound

Z = 1.959963984540054


def test_interval_without_questions_is_everything() -> None:
    assert paired_interval(0, 0, 0) == (-1.0, 1.0)


@pytest.mark.parametrize("asked", [1, 20, 400, 10**6])
def test_interval_without_a_difference_has_a_closed_form(asked: int) -> None:
    low, high = paired_interval(0, 0, asked)
    assert high == pytest.approx(Z * Z / (asked + Z * Z))
    assert low == pytest.approx(-high)


def test_interval_without_a_difference_needs_381_questions_for_a_point() -> None:
    assert paired_interval(0, 0, 381)[1] < 0.01 < paired_interval(0, 0, 380)[1]


def test_interval_of_everything_lost_ends_at_one() -> None:
    low, high = paired_interval(50, 0, 50)
    assert high == pytest.approx(1.0)
    assert 0.8 < low < 1.0


@pytest.mark.parametrize("exponent", range(29, 52))
def test_interval_of_huge_counts_is_a_number(exponent: int) -> None:
    # Regression: rounding took the root of a number below 0, "math domain error".
    low, high = paired_interval(4, 0, 2**exponent + 2)
    assert -1e-6 < low < high < 1e-6


def test_interval_mirrors_when_the_sides_are_exchanged() -> None:
    low, high = paired_interval(9, 3, 100)
    assert paired_interval(3, 9, 100) == pytest.approx((-high, -low))


@pytest.mark.parametrize(("lost", "gained", "asked"), [(9, 3, 100), (1, 0, 420), (40, 20, 160)])
def test_interval_ends_where_the_constrained_score_is_the_quantile(
    lost: int, gained: int, asked: int
) -> None:
    def likelihood(delta: float, share: float) -> float:
        # Of the shares of lost (share + delta), gained (share) and equal pairs.
        rest = asked - lost - gained
        logs = [(lost, share + delta), (gained, share), (rest, 1 - 2 * share - delta)]
        return sum(number * math.log(max(p, 1e-300)) for number, p in logs if number)

    for end in paired_interval(lost, gained, asked):
        grid = (n / 200_000 for n in range(1, 100_000))
        inside = [p for p in grid if p + end > 0 and 2 * p + end < 1]
        share = max(inside, key=lambda p: likelihood(end, p))
        score = (lost - gained - asked * end) / math.sqrt(asked * (2 * share + end * (1 - end)))
        assert abs(score) == pytest.approx(Z, rel=2e-2)


@pytest.mark.parametrize(("lost", "gained"), [(0.03, 0.01), (0.1, 0.0), (0.005, 0.005)])
def test_interval_covers_the_truth(lost: float, gained: float) -> None:
    rng, asked, held = Random(5), 200, 0
    for _ in range(600):
        draws = [rng.random() for _ in range(asked)]
        one = sum(draw < lost for draw in draws)
        other = sum(lost <= draw < lost + gained for draw in draws)
        low, high = paired_interval(one, other, asked)
        held += low <= lost - gained <= high
    assert held / 600 >= 0.93


def worlds(mean: float, seed: int, count: int) -> list[float]:
    """Skewed values, such as divergences of conversations, with this mean and none above 0.1."""
    rng = Random(seed)
    return [0.1 if rng.random() < mean / 0.1 else 0.0 for _ in range(count)]


def test_evidence_holds_at_every_look() -> None:
    # At the limit itself, looking after every value, the level is 5 %.
    said = 0
    for seed in range(400):
        values = worlds(0.02, seed, 120)
        said += any(is_below(values[:looks], 0.02, 0.1) for looks in range(10, 121, 5))
    assert said <= 0.05 * 400 + 2 * math.sqrt(0.05 * 0.95 * 400)


def test_evidence_decides_where_means_differ() -> None:
    assert all(is_below(worlds(0.004, seed, 120), 0.02, 0.1) for seed in range(20))
    assert all(is_above(worlds(0.06, seed, 120), 0.02, -0.1) for seed in range(20))
    assert not any(is_below(worlds(0.06, seed, 120), 0.02, 0.1) for seed in range(20))


def test_evidence_of_nothing_decides_nothing() -> None:
    assert not is_below([], 0.02, 0.1)
    assert not is_above([], 0.02, -0.1)
    assert not is_below(1000 * [0.0], 0.0, 0.01)


@pytest.mark.parametrize("value", [0.0, 0.01, 0.019, 5.0, -5.0])
def test_evidence_is_of_one_side_alone(value: float) -> None:
    values = 400 * [value]
    assert not (is_below(values, 0.02, 0.1) and is_above(values, 0.02, -0.1))


def test_upper_bound_is_the_least_limit_that_is_shown() -> None:
    values = [*(300 * [0.0]), *(3 * [1.0])]
    bound = upper_bound(values, 1.0, 0.01)
    assert 0.01 < bound < 0.06
    assert is_below(values, bound + 1e-9, 1.0)
    assert not is_below(values, bound - 1e-3, 1.0)
    assert upper_bound([], 1.0, 0.0) == 1.0
