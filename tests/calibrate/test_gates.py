"""Gate files: what is written is read again, hostile files and what is unmeasured are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import kvtrie
from kvtrie import gates

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GOOD = gates.Figures(
    "one turn",
    positions=900,
    kl_mean=0.01,
    kl_p99=0.2,
    top1=0.99,
    questions=500,
    right_full=495,
    lost=0,
    gained=0,
    exact=700,
    moved=200,
    computed=100,
)
BAD = replace(GOOD, scenario="five turns", lost=50)
PLAIN = kvtrie.ReusePolicy(min_run=16)
FIRST4 = kvtrie.ReusePolicy(min_run=16, recompute_first=4)


def gate(*measured: gates.Measured, **changes: Any) -> gates.Gate:
    fields: dict[str, Any] = {
        "model": "m@1",
        "kv_dtype": "bfloat16",
        "rope": "default",
        "thresholds": gates.Thresholds(),
        "measured": measured or (gates.Measured("rotated+first4", FIRST4, (GOOD,)),),
    }
    return gates.Gate(**{**fields, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.json"


def test_read_what_was_written_is_equal(path: Path) -> None:
    limits = gates.Thresholds(max_loss=0.02, max_kl_mean=0.5, min_top1=0.9)
    policy = kvtrie.ReusePolicy(
        min_run=24, max_hops=3, max_approximate_share=0.5, recompute_last=2, forbid_kinds=["answer"]
    )
    first = gates.Measured("a", FIRST4, (GOOD, BAD))
    wrote = gate(first, gates.Measured("b", policy, (GOOD,)), thresholds=limits, data="talk")
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


@pytest.mark.parametrize("name", ["kl_mean", "kl_p99", "top1"])
def test_figures_that_are_not_numbers_clear_nothing(name: str) -> None:
    broken = replace(GOOD, **{name: float("nan")})  # type: ignore[arg-type] # one float field
    decision = gate(gates.Measured("a", PLAIN, (GOOD, broken))).policy(PLAIN, model="m@1")
    assert not decision.is_cleared
    assert name in decision.reason


def test_no_figures_clear_nothing() -> None:
    decision = gate(gates.Measured("a", PLAIN, ())).policy(PLAIN, model="m@1")
    assert (decision.is_cleared, decision.reason) == (False, "nothing was measured")


def test_gates_need_neither_torch_nor_numpy_themselves() -> None:
    code = "import kvtrie.gates, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- verdicts -------------------------------------------------------------------------------------


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
    verdicts = gate(gates.Measured("a", PLAIN, (GOOD,)), gates.Measured("b", FIRST4, (GOOD, BAD)))
    decision = verdicts.policy(FIRST4, model="m@1")
    assert decision.policy == kvtrie.EXACT_ONLY
    assert "five turns" in decision.reason
    assert "10.00" in decision.reason


def test_policy_is_judged_by_all_questions_together() -> None:
    # Two losses of 500 questions may be 1.4 points; of 1500 they are at most 0.5.
    one = replace(GOOD, lost=2)
    alone = gates.Measured("a", FIRST4, (one,))
    three = gates.Measured("a", FIRST4, (one, GOOD, replace(GOOD, scenario="window of ten")))
    assert gate(alone).policy(FIRST4, model="m@1").policy == kvtrie.EXACT_ONLY
    assert gate(three).policy(FIRST4, model="m@1").policy == FIRST4


def test_policy_that_loses_in_one_scenario_is_exact_whatever_the_others_gain() -> None:
    worse, better = replace(GOOD, lost=6), replace(GOOD, scenario="window of ten", gained=5)
    verdicts = gate(gates.Measured("a", FIRST4, (worse, better, better)))
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


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_thresholds_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="max_loss"):
        gates.Thresholds(max_loss=value)


# --- hostile files --------------------------------------------------------------------------------


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        inner: Any = document
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        inner: Any = document
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return change


FIGURES = ("policies", 0, "figures", 0)
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
    "cleared a lie": put(*FIGURES, "lost", value=50),
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
    "positions negative": put(*FIGURES, "positions", value=-1),
    "positions true": put(*FIGURES, "positions", value=True),
    "positions a float": put(*FIGURES, "positions", value=1.5),
    "divergence negative": put(*FIGURES, "kl_mean", value=-1.0),
    "divergence huge": put(*FIGURES, "kl_mean", value=10**400),
    "share above one": put(*FIGURES, "top1", value=1.5),
    "more right than asked": put(*FIGURES, "right_full", value=501),
    "more lost than right": put(*FIGURES, "lost", value=496),
    "more gained than wrong": put(*FIGURES, "gained", value=6),
    "threshold negative": put("thresholds", "max_loss", value=-1),
    "threshold missing": drop("thresholds", "max_loss"),
    "threshold a text": put("thresholds", "min_top1", value="0.9"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_read_hostile_field_is_refused(
    path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    document = json.loads(gate().to_json())
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(gates.GateError, match=r"gate\.json"):
        gates.read(path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": NaN}',
        b'{"format": "kvtrie-gate", "format": "kvtrie-gate"}',
        b"[" * 100_000,
        b"9" * 5_000,
        b'{"a":' * 50_000,
        b" " * (gates.MAX_BYTES + 1),
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "null",
        "bytes",
        "nan",
        "twice",
        "deep",
        "long number",
        "deep objects",
        "large",
    ],
)
def test_read_hostile_bytes_are_refused(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(gates.GateError):
        gates.read(path)


@pytest.mark.parametrize("version", [0, 2, True, 1.0, "1", None, 10**30])
def test_read_another_version_is_refused(path: Path, version: Any) -> None:
    document = json.loads(gate().to_json())
    document["version"] = version
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(gates.GateMismatchError, match="version"):
        gates.read(path)


def test_read_no_such_file_is_an_os_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        gates.read(path)


def test_errors_belong_to_the_root() -> None:
    assert issubclass(gates.GateMismatchError, gates.GateError)
    assert issubclass(gates.GateError, kvtrie.KvTrieError)
