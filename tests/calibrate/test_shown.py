"""The output of `kvtrie calibrate`: nothing is cut, and no claim lacks data."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest

from kvtrie import gates
from kvtrie.calibrate import measure, policies
from kvtrie.cli import _calibrated, _progress

LIMITS = gates.Thresholds()
GOOD = gates.Figures(
    "window of ten",
    positions=123_456_789,
    kl_mean=0.00123456,
    kl_p99=0.0123456,
    top1=0.987,
    questions=700,
    right_full=690,
    lost=0,
    gained=0,
    exact=1_234_567_890_123,
    moved=2_345_678_901_234,
    computed=3_456_789_012_345,
)
LONG = "rotated+first100000000+last100000000+run100000000"


def report(figures: gates.Figures, *, control_lost: int | None = 600) -> measure.Report:
    results = [measure.Result(policies.policy(LONG), figures)]
    if control_lost is not None:
        worse = replace(figures, lost=min(control_lost, figures.right_full), gained=0)
        results.append(measure.Result(policies.policy("unrotated"), worse))
    return measure.Report(
        model="m@1",
        kv_dtype="float32",
        rope="",
        block_size=1,
        min_run=16,
        data="talk",
        conversations={figures.scenario: 70},
        results=tuple(results),
    )


def row(found: measure.Report) -> dict[str, Any]:
    document = json.loads(_calibrated.as_json(found, LIMITS))
    rows: list[dict[str, Any]] = document["results"]
    return rows[0]


def line(capsys: pytest.CaptureFixture[str], found: measure.Report) -> str:
    _calibrated.show(found, LIMITS)
    lines = capsys.readouterr().out.splitlines()
    return next(one for one in lines if one.strip().startswith(LONG))


@pytest.mark.parametrize("columns", [None, "20", "80"])
def test_off_a_terminal_no_figure_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    # Regression: tables were cut at 120 columns, or at COLUMNS where colours were forced.
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    _calibrated.show(report(GOOD), LIMITS)
    shown = capsys.readouterr().out
    figures = (GOOD.exact, GOOD.moved, GOOD.computed, GOOD.positions)
    for text in (
        LONG,
        *map(str, figures),
        "0.0012",
        "0.012",
        "98.7%",
        "690 of 700",
        "(-0.55 to 0.55)",
    ):
        assert text in shown
    assert "\u2026" not in shown


def test_within_limits_where_the_data_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert line(capsys, report(GOOD)).split()[-1] == "yes"
    assert (row(report(GOOD))["within_thresholds"], row(report(GOOD))["reason"]) == (True, None)


def test_outside_limits_says_the_value_and_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    bad = report(replace(GOOD, kl_mean=0.3))
    assert line(capsys, bad).split()[-1] == "no"
    assert row(bad)["within_thresholds"] is False
    assert row(bad)["reason"] == "mean KL is 0.3, the limit is 0.02"


def test_too_few_questions_cannot_tell_and_say_how_many_are_needed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Regression: four right answers of four were shown as within the limits.
    few = report(replace(GOOD, questions=100, right_full=100))
    assert line(capsys, few).rstrip().endswith("undecided: 381 needed")
    found = row(few)
    assert (found["within_thresholds"], found["questions_needed"]) == (None, 381)
    assert "381 questions are needed, 100 were asked" in found["reason"]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (report(replace(GOOD, questions=0, right_full=0)), "the data has no answers"),
        (report(replace(GOOD, right_full=300)), "right on 300 of 700 questions"),
        (report(GOOD, control_lost=3), "no control is detected as worse"),
        (report(GOOD, control_lost=None), "no control was measured"),
    ],
    ids=["no questions", "half wrong", "control undetected", "no control"],
)
def test_data_that_could_not_refuse_cannot_tell(
    capsys: pytest.CaptureFixture[str], found: measure.Report, why: str
) -> None:
    assert "undecided" in line(capsys, found)
    assert row(found)["within_thresholds"] is None
    assert why in row(found)["reason"]


def test_figures_that_are_no_numbers_are_outside() -> None:
    flawed = report(replace(GOOD, kl_mean=float("nan")))
    verdict = _calibrated.verdict(flawed, flawed.results[0], LIMITS)
    assert verdict.within_thresholds is False
    assert "'kl_mean'" in str(verdict.reason)


def test_stages_are_shown_before_the_steps() -> None:
    # Regression: nothing was shown until the first conversation was measured.
    out = io.StringIO()
    with _progress.ticks(out, most=2) as tick:
        tick.stage("loading")
        assert out.getvalue() == "loading\n"
        tick.stage("cutting")
        for done in (3, 4):
            tick(done, 4, "one turn")
    assert out.getvalue().splitlines() == ["loading", "cutting", "1/2 one turn", "2/2 one turn"]
