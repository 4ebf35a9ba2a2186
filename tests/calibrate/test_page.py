"""The page of figures is what its command writes, and its figures distinguish policies."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

import fidelity
from kvtrie import gates


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(fidelity.FIGURES.read_text(encoding="utf-8"))
    return loaded


def test_page_holds_what_the_figures_say(figures: dict[str, Any]) -> None:
    page = fidelity.PAGE.read_text(encoding="utf-8")
    assert fidelity.put(page, fidelity.render(figures)) == page


def test_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks are missing"):
        fidelity.put("# A page", "figures")


def test_figures_hold_their_own_intervals(figures: dict[str, Any]) -> None:
    for model in figures["models"].values():
        for row in model["results"]:
            ends = gates.paired_interval(row["lost"], row["gained"], row["questions"])
            assert (row["loss_low"], row["loss_high"]) == pytest.approx(ends)


def test_controls_and_cleared_policies_are_far_apart(figures: dict[str, Any]) -> None:
    for model in figures["models"].values():
        limits = model["thresholds"]
        for row in model["results"]:
            if row["policy"] in fidelity.CONTROLS:
                assert row["kl_mean"] > 10 * limits["max_kl_mean"]
                assert row["kl_p99"] > 10 * limits["max_kl_p99"]
                assert row["top1"] < limits["min_top1"] - 0.01
                assert row["loss_low"] > limits["max_loss"]
            elif row["policy"] in model["cleared"]:
                assert row["kl_mean"] < limits["max_kl_mean"] / 5
                assert row["kl_p99"] < limits["max_kl_p99"] / 10
                assert row["top1"] > limits["min_top1"] + 0.005


def test_figures_that_measure_nothing_are_named(figures: dict[str, Any]) -> None:
    assert fidelity.failures(figures) == []
    blind = copy.deepcopy(figures)
    for row in blind["models"]["mla"]["results"]:
        row["loss"] = 0.1
        row["right"] = 0.9 * row["questions"]
    found = fidelity.failures(blind)
    assert len(found) == 9
    assert all(line.startswith("mla") for line in found)
