"""Gate files: what is written is read again, hostile files and what is unmeasured are refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.cleared import GOOD

import kvtrie
from kvtrie import gates

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BAD = replace(GOOD, scenario="five turns", lost=50)
FIVE = replace(GOOD, scenario="five turns")
WINDOW = replace(GOOD, scenario="window of ten")
PLAIN = kvtrie.ReusePolicy(min_run=16)
FIRST4 = kvtrie.ReusePolicy(min_run=16, recompute_first=4)


def control(*figures: gates.Figures, lost: int = 250) -> gates.Control:
    """A control on the data of these figures that loses `lost` answers in each scenario."""
    return gates.Control(
        "unrotated",
        tuple(replace(one, lost=min(lost, one.right_full), gained=0) for one in figures),
    )


def gate(*measured: gates.Measured, **changes: Any) -> gates.Gate:
    """A gate with these policies, and with a control that is detected wherever one can be."""
    policies = measured or (gates.Measured("rotated+first4", FIRST4, (GOOD,)),)
    given: dict[str, Any] = {
        "model": "m@1",
        "kv_dtype": "bfloat16",
        "rope": "default",
        "thresholds": gates.Thresholds(),
        "measured": policies,
        "controls": (control(*policies[0].figures),),
    }
    return gates.Gate(**{**given, **changes})


def reason(*figures: gates.Figures, **changes: Any) -> str:
    decision = gate(gates.Measured("rotated", PLAIN, figures), **changes).policy(PLAIN, model="m@1")
    assert not decision.is_cleared
    assert decision.policy == kvtrie.EXACT_ONLY
    return decision.reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.json"


def test_read_what_was_written_is_equal(path: Path) -> None:
    limits = gates.Thresholds(max_loss=0.02, max_kl_mean=0.5, min_top1=0.9)
    policy = kvtrie.ReusePolicy(
        min_run=24, max_hops=3, max_approximate_share=0.5, recompute_last=2, forbid_kinds=["answer"]
    )
    first = gates.Measured("a", FIRST4, (GOOD, BAD))
    wrote = gate(first, gates.Measured("b", policy, (GOOD, FIVE)), thresholds=limits, data="talk")
    wrote.write(path)
    assert gates.read(path) == wrote
    assert [one.name for one in wrote.cleared()] == ["b"]
    assert [entry.name for entry in path.parent.iterdir()] == ["gate.json"]


def test_write_that_fails_leaves_the_old_file(path: Path) -> None:
    gate().write(path)
    before = path.read_bytes()
    with pytest.raises(gates.GateError, match="NaN"):
        gate(gates.Measured("a", FIRST4, (replace(GOOD, kl_mean=float("nan")),))).write(path)
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        gate().write(path.parent / "none" / "gate.json")
    assert [entry.name for entry in path.parent.iterdir()] == ["gate.json"]


def test_write_replaces_the_file_of_a_link_and_no_device(path: Path) -> None:
    link, pipe = path.parent / "link.json", path.parent / "pipe"
    link.symlink_to(path)
    gate().write(link)
    assert link.is_symlink()
    assert gates.read(path) == gate()
    os.mkfifo(pipe)
    for target in (pipe, path.parent):
        with pytest.raises(OSError, match="not a regular file"):
            gate().write(target)
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["kl_mean", "kl_p99", "top1"])
def test_figures_that_are_not_numbers_clear_nothing(name: str) -> None:
    broken = replace(GOOD, **{name: float("nan")})  # type: ignore[arg-type] # one float field
    broken = replace(broken, scenario="five turns")
    decision = gate(gates.Measured("a", PLAIN, (GOOD, broken))).policy(PLAIN, model="m@1")
    assert not decision.is_cleared
    assert name in decision.reason


def test_no_figures_clear_nothing() -> None:
    decision = gate(gates.Measured("a", PLAIN, ())).policy(PLAIN, model="m@1")
    assert (decision.is_cleared, decision.reason) == (False, "nothing was measured")


def test_gates_need_neither_torch_nor_numpy_themselves() -> None:
    code = "import kvtrie.gates, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_policy_measured_and_good_is_cleared() -> None:
    decision = gate().policy(FIRST4, model="m@1")
    assert decision.policy == FIRST4
    assert decision.is_cleared
    assert "rotated+first4" in decision.reason


@pytest.mark.parametrize(
    "wanted",
    [
        kvtrie.ReusePolicy(min_run=16, recompute_first=3),
        kvtrie.ReusePolicy(min_run=15, recompute_first=4),
        kvtrie.ReusePolicy(recompute_first=4),
        kvtrie.ReusePolicy(min_run=16, recompute_first=4, max_hops=2),
    ],
    ids=["fewer recomputed", "shorter runs", "any runs", "more hops"],
)
def test_policy_that_reuses_more_than_measured_is_exact(wanted: kvtrie.ReusePolicy) -> None:
    decision = gate().policy(wanted, model="m@1")
    assert decision.policy == kvtrie.EXACT_ONLY
    assert not decision.is_cleared


@pytest.mark.parametrize(
    "wanted",
    [
        kvtrie.ReusePolicy(min_run=16, recompute_first=5),
        kvtrie.ReusePolicy(min_run=32, recompute_first=4, recompute_last=2),
        kvtrie.ReusePolicy(min_run=16, recompute_first=4, forbid_kinds=["answer"]),
        kvtrie.ReusePolicy(min_run=16, recompute_first=4, max_approximate_share=0.2),
        kvtrie.ReusePolicy(min_run=16, recompute_first=4, partial_blocks=False),
    ],
)
def test_policy_that_reuses_less_than_a_cleared_one_is_cleared(wanted: kvtrie.ReusePolicy) -> None:
    assert gate().policy(wanted, model="m@1").policy == wanted


@pytest.mark.parametrize(
    "changes", [{"recompute_last": 2}, {"forbid_kinds": ["answer"]}, {"max_approximate_share": 0.2}]
)
def test_policy_measured_with_a_limit_clears_none_without(changes: dict[str, Any]) -> None:
    measured = gates.Measured("a", kvtrie.ReusePolicy(min_run=16, **changes), (GOOD,))
    assert gate(measured).policy(measured.policy, model="m@1").is_cleared
    assert not gate(measured).policy(PLAIN, model="m@1").is_cleared


def test_policy_with_a_failed_measurement_of_its_own_is_exact() -> None:
    verdicts = gate(
        gates.Measured("a", PLAIN, (GOOD, FIVE)), gates.Measured("b", FIRST4, (GOOD, BAD))
    )
    decision = verdicts.policy(FIRST4, model="m@1")
    assert decision.policy == kvtrie.EXACT_ONLY
    assert "five turns" in decision.reason
    assert "10.00" in decision.reason


def test_policy_is_judged_by_all_questions_together() -> None:
    # Two losses of 500 questions may be 1.4 points; of 1500 they are at most 0.5.
    one = replace(GOOD, lost=2)
    alone = gates.Measured("a", FIRST4, (one,))
    three = gates.Measured("a", FIRST4, (one, FIVE, WINDOW))
    assert "563" not in gate(alone).policy(FIRST4, model="m@1").reason
    assert gate(alone).policy(FIRST4, model="m@1").policy == kvtrie.EXACT_ONLY
    assert gate(three).policy(FIRST4, model="m@1").policy == FIRST4


def test_policy_that_loses_in_one_scenario_is_exact_whatever_the_others_gain() -> None:
    worse, better = replace(GOOD, lost=6), replace(GOOD, scenario="window of ten", gained=5)
    verdicts = gate(gates.Measured("a", FIRST4, (worse, better, replace(FIVE, gained=5))))
    assert verdicts.measured[0].interval[1] < 0.01
    decision = verdicts.policy(FIRST4, model="m@1")
    assert decision.policy == kvtrie.EXACT_ONLY
    assert "one turn: 1.20 points" in decision.reason


def test_policy_exact_needs_no_clearance() -> None:
    exact = kvtrie.ReusePolicy(approximate=False, partial_blocks=False)
    assert gate().policy(exact, model="m@1").policy == exact


@pytest.mark.parametrize(
    ("limits", "figures"),
    [
        (gates.Thresholds(), replace(GOOD, questions=0, right_full=0)),
        (gates.Thresholds(), replace(GOOD, lost=2)),
        (gates.Thresholds(max_kl_mean=0.009), GOOD),
        (gates.Thresholds(max_kl_p99=0.1), GOOD),
        (gates.Thresholds(min_top1=0.995), GOOD),
    ],
    ids=["no questions", "lost", "mean", "p99", "top 1"],
)
def test_policy_outside_a_threshold_is_exact(
    limits: gates.Thresholds, figures: gates.Figures
) -> None:
    verdicts = gate(gates.Measured("a", FIRST4, (figures,)), thresholds=limits)
    assert verdicts.policy(FIRST4, model="m@1").policy == kvtrie.EXACT_ONLY
    assert verdicts.cleared() == ()


@pytest.mark.parametrize(
    "running",
    [{"model": "m@2"}, {"model": "m@1", "kv_dtype": "float32"}, {"model": "m@1", "rope": "yarn"}],
    ids=["model", "dtype", "rope"],
)
def test_policy_for_another_model_is_refused(running: dict[str, str]) -> None:
    with pytest.raises(gates.GateMismatchError, match="measured with"):
        gate().policy(FIRST4, **running)


@pytest.mark.parametrize("name", ["max_loss", "max_kl_mean", "max_kl_p99", "min_top1"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), 10**400])
def test_thresholds_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        gates.Thresholds(**{name: value})


@pytest.mark.parametrize("name", ["max_loss", "min_top1"])
def test_thresholds_that_are_shares_end_at_one(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        gates.Thresholds(**{name: 1.1})


@pytest.mark.parametrize("value", [True, None, "0.1"])
def test_thresholds_that_are_not_numbers_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="max_kl_mean"):
        gates.Thresholds(max_kl_mean=value)


def test_figures_with_nothing_right_clear_nothing() -> None:
    # Regression: these figures were cleared, as no answer could be lost when none was right.
    found = reason(replace(GOOD, questions=400, right_full=0, lost=0, kl_mean=2.5, top1=0.2))
    assert "full recomputation is right on 0 of 400 questions, at least 50% are needed" in found
    assert "no control is detected as worse" in found
    assert "mean KL is 2.5, the limit is 0.02" in found
    assert "20.00% of the likeliest tokens agree, the limit is 93.00%" in found


@pytest.mark.parametrize(("right", "is_cleared"), [(249, False), (250, True)])
def test_full_recomputation_must_be_right_on_half(right: int, is_cleared: bool) -> None:
    figures = replace(GOOD, right_full=right)
    verdicts = gate(gates.Measured("a", PLAIN, (figures,)))
    decision = verdicts.policy(PLAIN, model="m@1")
    assert decision.is_cleared == is_cleared
    assert ("right on 249 of 500" in decision.reason) != is_cleared


def test_control_must_be_measured() -> None:
    assert reason(GOOD, controls=()) == "one turn: no control was measured"


def test_control_must_be_measured_in_every_scenario() -> None:
    assert reason(GOOD, FIVE, controls=(control(GOOD),)) == "five turns: no control was measured"


def test_control_must_be_of_the_same_replies() -> None:
    other = control(replace(GOOD, questions=499, right_full=400))
    assert reason(GOOD, controls=(other,)).endswith("the controls were measured on other replies")


def test_control_is_detected_by_the_limit_that_clears() -> None:
    # Of 500 questions, 11 lost are at least 1.2 points, 10 lost at least 1.1, 9 at least 1.0.
    lost = next(n for n in range(500) if gates.paired_interval(n, 0, 500)[0] > 0.01)
    assert lost == 10
    seen = gate(gates.Measured("a", PLAIN, (GOOD,)), controls=(control(GOOD, lost=lost),))
    assert seen.policy(PLAIN, model="m@1").is_cleared
    found = reason(GOOD, controls=(control(GOOD, lost=lost - 1),))
    assert "no control is detected as worse: 'unrotated' loses at least 0.95 points" in found
    assert "the limit is more than 1.00" in found


def test_control_of_either_name_is_enough() -> None:
    blind = replace(control(GOOD, lost=0), name="drop")
    both = gate(gates.Measured("a", PLAIN, (GOOD,)), controls=(blind, control(GOOD)))
    assert both.policy(PLAIN, model="m@1").is_cleared


def test_control_that_a_request_could_ask_for_is_refused() -> None:
    with pytest.raises(ValueError, match="'name' must be one of unrotated, drop, not 'rotated'"):
        gates.Control("rotated", (GOOD,))


def test_policy_without_a_scenario_of_the_control_clears_nothing() -> None:
    found = reason(GOOD, controls=(control(GOOD, FIVE),))
    assert "'figures' lacks the scenario 'five turns'" in found


def test_scenario_that_comes_twice_clears_nothing() -> None:
    # Otherwise counting the same questions again would narrow the interval.
    assert "the scenario 'one turn' twice" in reason(GOOD, GOOD)


def test_refusal_says_how_many_questions_are_needed() -> None:
    few = replace(GOOD, questions=100, right_full=100)
    assert "381 questions are needed" in reason(few)


@pytest.mark.parametrize(
    ("lost", "gained", "most", "needed"),
    [(0, 0, 0.01, 381), (1, 0, 0.01, 563), (0, 0, 0.05, 73), (0, 0, 0.0, None), (0, 0, 1.0, 1)],
)
def test_questions_needed_is_the_least_number(
    lost: int, gained: int, most: float, needed: int | None
) -> None:
    assert gates.questions_needed(lost, gained, most) == needed
    if needed is not None:
        assert gates.paired_interval(lost, gained, needed)[1] <= most
        assert needed == 1 or gates.paired_interval(lost, gained, needed - 1)[1] > most


SPOILED: dict[str, st.SearchStrategy[Any]] = {
    "positions": st.sampled_from((0, 499, 901)),
    "questions": st.sampled_from((0, 10, 495, 500)),
    "right_full": st.integers(0, 500),
    "lost": st.integers(0, 3) | st.integers(0, 500),
    "gained": st.integers(0, 5) | st.integers(0, 500),
    "kl_mean": st.floats(0, 0.04) | st.floats(),
    "kl_p99": st.floats(0, 1) | st.floats(),
    "top1": st.floats(0.9, 1) | st.floats(),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[gates.Figures, gates.Figures, gates.Thresholds]:
    """A policy's figures, a control's and thresholds, of which few fields do not clear it."""
    names = st.sets(st.sampled_from(sorted(SPOILED)), max_size=2)
    figures = replace(GOOD, **{name: draw(SPOILED[name]) for name in draw(names)})
    other = replace(figures, kl_mean=1.0, kl_p99=9.0, top1=0.3, lost=200)
    other = replace(other, **{name: draw(SPOILED[name]) for name in draw(names)})
    limits = gates.Thresholds(
        max_loss=draw(st.sampled_from((0.01, 0.01, 0.0, 0.05, 1.0))),
        max_kl_mean=draw(st.sampled_from((0.02, 0.02, 0.0, 5.0))),
        max_kl_p99=draw(st.sampled_from((0.5, 0.5, 0.0, 5.0))),
        min_top1=draw(st.sampled_from((0.93, 0.93, 0.0, 1.0))),
    )
    return figures, other, limits


def is_cleared(figures: gates.Figures, other: gates.Figures, limits: gates.Thresholds) -> bool:
    measured = gates.Measured("rotated", PLAIN, (figures,))
    given = gate(measured, controls=(gates.Control("drop", (other,)),), thresholds=limits)
    decision = given.policy(PLAIN, model="m@1")
    assert decision.policy == (PLAIN if decision.is_cleared else kvtrie.EXACT_ONLY)
    assert (decision.reason == "cleared by the measurement of 'rotated'") == decision.is_cleared
    return decision.is_cleared


def can_be(one: gates.Figures) -> bool:
    return (
        0 < one.questions <= one.positions
        and one.lost <= one.right_full
        and one.gained <= one.questions - one.right_full
        and math.isfinite(one.kl_mean + one.kl_p99 + one.top1)
        and min(one.kl_mean, one.kl_p99, one.top1) >= 0
        and one.top1 <= 1
    )


@given(cases())
def test_nothing_is_cleared_that_lacks_a_condition(
    case: tuple[gates.Figures, gates.Figures, gates.Thresholds],
) -> None:
    # The rule again, condition by condition, with no code of the module but the interval.
    def interval(one: gates.Figures) -> tuple[float, float]:
        return gates.paired_interval(one.lost, one.gained, one.questions)

    figures, other, limits = case
    conditions = [
        can_be(figures),
        can_be(other),
        2 * figures.right_full >= figures.questions,
        (other.positions, other.questions, other.right_full)
        == (figures.positions, figures.questions, figures.right_full),
        interval(other)[0] > limits.max_loss,
        figures.lost - figures.gained <= limits.max_loss * figures.questions,
        interval(figures)[1] <= limits.max_loss,
        figures.kl_mean <= limits.max_kl_mean,
        figures.kl_p99 <= limits.max_kl_p99,
        figures.top1 >= limits.min_top1,
    ]
    assert is_cleared(figures, other, limits) == all(conditions)


@given(cases(), st.data())
def test_worse_figures_never_clear_what_better_ones_do_not(
    case: tuple[gates.Figures, gates.Figures, gates.Thresholds], data: st.DataObject
) -> None:
    figures, other, limits = case
    assume(
        can_be(figures) and can_be(other)
    )  # impossible ones are refused, and a change may make them possible
    more = st.integers(0, 5)
    worse = replace(
        figures,
        lost=figures.lost + data.draw(more),
        gained=max(0, figures.gained - data.draw(more)),
        kl_mean=figures.kl_mean + data.draw(st.floats(0, 3)),
        kl_p99=figures.kl_p99 + data.draw(st.floats(0, 3)),
        top1=figures.top1 * data.draw(st.floats(0, 1)),
    )
    less = data.draw(st.integers(0, 200))
    weaker = replace(other, lost=max(0, other.lost - less), gained=other.gained + data.draw(more))
    if not is_cleared(figures, other, limits):
        assert not is_cleared(worse, other, limits)
        assert not is_cleared(figures, weaker, limits)
        assert not is_cleared(worse, weaker, limits)


def test_interval_is_monotone_in_both_counts() -> None:
    for asked in (20, 381, 700):
        ends = {
            (lost, gained): gates.paired_interval(lost, gained, asked)[1]
            for lost in range(12)
            for gained in range(min(8, asked - lost))
        }
        for (lost, gained), end in ends.items():
            assert end <= ends.get((lost + 1, gained), 1.0)
            assert end >= ends.get((lost, gained + 1), -1.0)


@pytest.fixture
def document() -> Any:
    """A gate file as JSON, for a test to spoil."""
    return json.loads(gate().to_json())


def write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def inside(document: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        document = document[key]
    return document


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        inside(document, keys[:-1])[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        del inside(document, keys[:-1])[keys[-1]]

    return change


FIGURES = ("policies", 0, "figures", 0)
CONTROL = ("controls", 0, "figures", 0)
HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "no format": drop("format"),
    "another format": put("format", value="gate"),
    "no model": drop("model"),
    "empty model": put("model", value=""),
    "long model": put("model", value="m" * 600),
    "model a number": put("model", value=7),
    "unknown field": put("more", value=1),
    "no policies": put("policies", value=[]),
    "policies an object": put("policies", value={}),
    "a policy a text": put("policies", 0, value="rotated"),
    "no controls": drop("controls"),
    "controls empty": put("controls", value=[]),
    "controls an object": put("controls", value={}),
    "a control a text": put("controls", 0, value="unrotated"),
    "control of another name": put("controls", 0, "name", value="rotated"),
    "control a number": put("controls", 0, "name", value=7),
    "control without figures": put("controls", 0, "figures", value=[]),
    "control of other replies": put(*CONTROL, "questions", value=499),
    "control unknown field": put("controls", 0, "more", value=1),
    "control divergence negative": put(*CONTROL, "kl_mean", value=-1.0),
    "control undetected": put(*CONTROL, "lost", value=0),
    "scenario that the control lacks": put(*FIGURES, "scenario", value="five turns"),
    "cleared wrongly": put(*FIGURES, "lost", value=50),
    "cleared a text": put("policies", 0, "cleared", value="yes"),
    "cleared a number": put("policies", 0, "cleared", value=1),
    "policy exact": put("policies", 0, "policy", "approximate", value=False),
    "policy a number": put("policies", 0, "policy", "approximate", value=1),
    "run unsaid": put("policies", 0, "policy", "min_run", value=None),
    "hops negative": put("policies", 0, "policy", "max_hops", value=-1),
    "hops huge": put("policies", 0, "policy", "max_hops", value=10**40),
    "kinds a text": put("policies", 0, "policy", "forbid_kinds", value="answer"),
    "share a text": put("policies", 0, "policy", "max_approximate_share", value="1"),
    "no figures": put("policies", 0, "figures", value=[]),
    "threshold negative": put("thresholds", "max_loss", value=-1),
    "threshold missing": drop("thresholds", "max_loss"),
    "threshold null": put("thresholds", "max_kl_mean", value=None),
    "threshold huge": put("thresholds", "max_kl_mean", value=10**400),
    "threshold true": put("thresholds", "max_loss", value=True),
    "threshold a text": put("thresholds", "min_top1", value="0.9"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_read_hostile_field_is_refused(
    path: Path, change: Callable[[dict[str, Any]], None], document: Any
) -> None:
    change(document)
    write(path, document)
    with pytest.raises(gates.GateError, match=r"gate\.json"):
        gates.read(path)


FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("positions", "questions", "right_full", "lost", "gained", "exact", "moved", "computed"),
        (-1, True, 1.5, "7", None, 2**53 + 1, 10**400, []),
    ),
    "kl_mean": (-0.001, True, "0", None, 10**400, []),
    "kl_p99": (-0.001, True, "0", None, 10**400, []),
    "top1": (-0.001, 1.001, 2, True, "1", None, 10**400, []),
    "scenario": (7, None, "s" * 600),
}


def test_every_field_of_figures_is_tried() -> None:
    assert set(FIELDS) == {one.name for one in fields(gates.Figures)}


@pytest.mark.parametrize("side", [FIGURES, CONTROL], ids=["policy", "control"])
@pytest.mark.parametrize("name", FIELDS)
def test_read_hostile_figure_is_refused_by_name(
    path: Path, name: str, side: tuple[Any, ...]
) -> None:
    for change in (drop(*side, name), *(put(*side, name, value=one) for one in FIELDS[name])):
        document = json.loads(gate().to_json())
        change(document)
        write(path, document)
        with pytest.raises(gates.GateError, match=rf"gate\.json, (policy|control) 1, .*'{name}'"):
            gates.read(path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("right_full", 501, "'right_full' is 501, more than the 500 questions"),
        ("lost", 496, "'lost' is 496, more than the 495 right answers"),
        ("gained", 6, "'gained' is 6, more than the 5 wrong answers"),
        ("positions", 499, "'questions' is 500, more than the 499 positions"),
    ],
)
def test_read_figures_that_contradict_each_other_are_refused(
    path: Path, name: str, value: int, said: str, document: Any
) -> None:
    put(*FIGURES, name, value=value)(document)
    write(path, document)
    with pytest.raises(gates.GateError, match=said):
        gates.read(path)


def test_read_control_of_other_replies_is_refused(path: Path, document: Any) -> None:
    # Though the other control is of the same replies, and clears the policy.
    second = json.loads(json.dumps(document["controls"][0])) | {"name": "drop"}
    second["figures"][0]["positions"] += 1
    document["controls"].append(second)
    write(path, document)
    said = r"are \(900, 500, 495\), those of the control 'drop' are \(901, 500, 495\)"
    with pytest.raises(gates.GateError, match=said):
        gates.read(path)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["kl_mean", "kl_p99", "top1"])
def test_read_figure_that_is_no_number_is_refused(
    path: Path, name: str, constant: str, document: Any
) -> None:
    put(*FIGURES, name, value="HERE")(document)
    path.write_text(json.dumps(document).replace('"HERE"', constant), encoding="utf-8")
    with pytest.raises(gates.GateError, match=f"{constant} is not a JSON number"):
        gates.read(path)


HOSTILE_BYTES = {
    "empty": b"",
    "cut": b"{",
    "list": b"[]",
    "null": b"null",
    "bytes": b"\xff\xfe",
    "nan": b'{"format": NaN}',
    "twice": b'{"format": "kvtrie-gate", "format": "kvtrie-gate"}',
    "deep": b"[" * 100_000,
    "long number": b"9" * 5_000,
    "deep objects": b'{"a":' * 50_000,
    "large": b" " * (gates.MAX_BYTES + 1),
}


@pytest.mark.parametrize("raw", HOSTILE_BYTES.values(), ids=HOSTILE_BYTES)
def test_read_hostile_bytes_are_refused(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(gates.GateError):
        gates.read(path)


def test_read_version_1_says_why_it_clears_nothing(path: Path, document: Any) -> None:
    # As version 1 wrote it: no controls, and thresholds that limit neither KL nor top 1.
    document["version"] = 1
    del document["controls"]
    document["thresholds"] |= {"max_kl_mean": None, "max_kl_p99": None, "min_top1": None}
    write(path, document)
    with pytest.raises(gates.GateMismatchError) as caught:
        gates.read(path)
    assert str(caught.value) == (
        f"{path}: version 1 clears nothing, because it has no control, no check of full "
        "recomputation and no limits for KL and top 1: run `kvtrie calibrate` again"
    )


@pytest.mark.parametrize("version", [0, 3, True, 1.0, "1", None, 10**30])
def test_read_another_version_is_refused(path: Path, version: Any, document: Any) -> None:
    document["version"] = version
    write(path, document)
    with pytest.raises(gates.GateMismatchError, match="version"):
        gates.read(path)


def test_read_no_such_file_is_an_os_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        gates.read(path)


def test_errors_belong_to_the_root() -> None:
    assert issubclass(gates.GateMismatchError, gates.GateError)
    assert issubclass(gates.GateError, kvtrie.KvTrieError)
