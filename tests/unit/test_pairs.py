"""The statistics of paired rounds are right, and rounds survive an interruption."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from typing import TYPE_CHECKING

import pytest
from vllm_connector.pairs import Difference, Kept, Round, measure, report, signed_rank, student

if TYPE_CHECKING:
    from pathlib import Path

MEMBERS = ("off", "control", "mine")


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # From a table of Student's t, one-sided 95 %.
    [(7, 1.8946), (10, 1.8125), (20, 1.7247), (39, 1.6849), (199, 1.6525)],
)
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, abs=3e-4)


@pytest.mark.parametrize("count", range(1, 13))
def test_signed_ranks_by_counting_all_signs(count: int) -> None:
    sums = [
        sum(rank for rank, sign in zip(range(1, count + 1), signs, strict=True) if sign)
        for signs in itertools.product((0, 1), repeat=count)
    ]
    rank = signed_rank(count)
    below = [sum(one <= limit for one in sums) / len(sums) for limit in (rank - 1, rank)]
    assert below[0] <= 0.05 < below[1]


def test_four_rounds_have_no_bound_of_the_middle() -> None:
    assert math.isinf(Difference.of([1.0, 2.0, 3.0, 4.0]).middle_bound)
    found = Difference.of([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (found.mean, found.middle, found.middle_bound) == (4.0, 3.0, 10.0)


def test_one_round_has_no_bound() -> None:
    found = Difference.of([2.0])
    assert (found.mean, found.middle) == (2.0, 2.0)
    assert math.isinf(found.mean_bound)
    assert math.isinf(found.middle_bound)


def test_the_true_difference_is_below_the_bound_in_95_of_100() -> None:
    rng = random.Random(4)
    below = dict.fromkeys(("mean", "middle"), 0)
    for _ in range(1_000):
        found = Difference.of([rng.gauss(3.0, 1.0) for _ in range(20)])
        below["mean"] += found.mean_bound >= 3.0
        below["middle"] += found.middle_bound >= 3.0
    # By more than three standard deviations of a count of 1,000.
    assert all(925 <= count <= 975 for count in below.values()), below


def test_a_disturbed_round_hardly_moves_the_middle() -> None:
    quiet = [0.01 * number for number in range(-10, 11)]
    found = Difference.of([*quiet, 50.0])
    assert found.middle == pytest.approx(0.0, abs=0.02)
    assert found.middle_bound < 0.06
    assert found.mean == pytest.approx(statistics.fmean([*quiet, 50.0]))


class Source:
    """Members with known seconds, the first ``fails_at`` of which work."""

    def __init__(self, fails_at: int = 10_000) -> None:
        self.taken: list[str] = []
        self._fails_at = fails_at

    def take(self, member: str) -> dict[str, float]:
        if len(self.taken) == self._fails_at:
            raise KeyboardInterrupt
        self.taken.append(member)
        return {"first": 1.0, "end": 2.0 + (member == "mine")}


def run(path: Path | None, source: Source, **settings: object) -> list[Round]:
    kept = Kept(path, settings)
    rng = random.Random(0)
    return measure("work {}", MEMBERS, source.take, 4, rng, warm_up=1, kept=kept)


def test_every_round_has_each_member_once() -> None:
    source = Source()
    rounds = run(None, source)
    assert len(rounds) == 4
    taken = [source.taken[at : at + 3] for at in range(0, 15, 3)]
    assert all(sorted(one) == sorted(MEMBERS) for one in taken)
    assert len({tuple(one) for one in taken}) > 1


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, Source(fails_at=3 * 3 + 1), model="a")
    assert len(Kept(path, {"model": "a"}).read("work {}")) == 2
    # The line that was being written.
    with path.open("a") as file:
        file.write('\n{"name": "wo')
    source = Source()
    assert len(run(path, source, model="a")) == 4
    assert len(source.taken) == 3 * 3
    assert len(run(path, again := Source(), model="a")) == 4
    assert again.taken == []


def test_rounds_of_other_settings_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    run(path, Source(), model="a")
    run(path, source := Source(), model="b")
    assert len(source.taken) == 3 * 5
    names = [json.loads(line)["settings"]["model"] for line in path.read_text().splitlines()]
    assert names == ["a"] * 4 + ["b"] * 4


def test_a_report_has_a_row_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    report("work: {}", run(None, Source()), MEMBERS)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows] == ["| work: first", "| work: end"]
    assert "mean +1,000,000 us, +50.00 %" in rows[1].split(" | ")[4]
