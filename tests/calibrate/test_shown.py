"""The output of `kvtrie calibrate`: nothing is cut, and no claim lacks data."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.cleared import BAD, GOOD, POLICY, kind

from kvtrie import gates
from kvtrie.calibrate import measure, policies
from kvtrie.calibrate._tally import Tally
from kvtrie.cli import _calibrated, _measuring

LIMITS = gates.Thresholds()
LONG = "rotated+first100000000+last100000000+run100000000"
MANY = gates.Box(cuts=gates.Range(above=1))
ONE = gates.Box(cuts=gates.Range(most=1))


def report(*kinds: gates.Kind) -> measure.Report:
    return measure.Report(
        model="m@1",
        kv_dtype="float32",
        rope="",
        template=None,
        block_size=16,
        min_run=16,
        data="talk",
        conversations={"window": 60},
        outside=3,
        measured=(gates.Measured(LONG, POLICY, kinds),),
    )


def shown(capsys: pytest.CaptureFixture[str], *kinds: gates.Kind) -> str:
    _calibrated.show(report(*kinds), LIMITS)
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [None, "20", "80"])
def test_off_a_terminal_no_figure_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    # Regression: tables were cut at 120 columns, or at COLUMNS where colours were forced.
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    out = shown(capsys, kind())
    for text in (LONG, "one cut", "1200", "10.0%", "0.002", "99.9%", "0 of 60", "50", "cleared"):
        assert text in out
    assert "3 replies were of no kind" in out
    assert "\u2026" not in out


def test_cleared_kinds_are_named_with_the_bound_of_their_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, kind("few", ONE), kind("many", MANY, BAD))
    last = out.splitlines()[-1]
    bound = gates.loss_bound(GOOD.losses)
    assert last == (
        f"{LONG}: cleared for this model after few: 0 replies lost and 0 gained of 60, at most "
        f"{100 * bound:.2f} points (95 %)"
    )
    assert f"{LONG}, many: refused: mean KL is 0.1 above that of exact reuse" in out


def test_nothing_cleared_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        shown(capsys, kind(own=BAD)).splitlines()[-1].endswith("nothing is cleared for this model")
    )
    assert shown(capsys).splitlines()[-1].endswith("nothing is cleared for this model")


def test_document_has_every_verdict_and_no_list_of_conversations() -> None:
    document: dict[str, Any] = json.loads(_calibrated.as_json(report(kind()), LIMITS))
    (policy,) = document["policies"]
    assert policy["cleared"] == ["one cut"]
    (found,) = policy["kinds"]
    assert (found["state"], found["reason"], found["lost"]) == ("cleared", None, 0)
    assert found["controls"]["drop"]["lost"] == 50
    assert found["floor"]["kl_mean"] == 0.0005
    assert "losses" not in found


def test_figures_that_are_no_numbers_are_not_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    broken = replace(GOOD, kl_mean=float("nan"))
    assert "'kl_mean' must be a finite number" in shown(capsys, kind(own=broken))


def test_progress_tells_stages_then_the_time_that_is_left() -> None:
    # Regression: nothing was shown until the first conversation was measured.
    out = io.StringIO()
    tally = Tally([policies.policy("rotated")])
    with _measuring.measuring(out, LIMITS) as now:
        now.stage("loading")
        assert out.getvalue() == "loading\n"
        now(measure.Progress(None, 0, tally, 0.0, 0.0, 0.0))
        for done in range(1, 6):
            now(measure.Progress("window", done, tally, 12.0 * done, 600.0, 1200.0))
    assert out.getvalue().splitlines() == [
        "loading",
        "measuring",
        "3 conversations in 0.6 minutes (window); 10.0 to 20.0 minutes are left",
    ]


def test_progress_of_a_resumed_run_says_so() -> None:
    tally = Tally([policies.policy("rotated")])
    said = _measuring.line(measure.Progress(None, 7, tally, 0.0, 0.0, 0.0))
    assert said == "resumed after 7 conversations"
