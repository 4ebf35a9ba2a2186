"""What a gate clears: by policy and kind of edit, and nothing that was not shown."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cleared import BAD, DETECTED, FLOOR, GOOD, POLICY, UNDETECTED, figures, gate, kind

import kvtrie
from kvtrie import gates
from kvtrie.cli._calibrated import summary

if TYPE_CHECKING:
    from kvtrie.gates.boxes import Plan

FIRST4 = kvtrie.ReusePolicy(min_run=16, recompute_first=4)
LITTLE = gates.Box(cuts=gates.Range(most=1), same_conversation=True)
MUCH = gates.Box(cuts=gates.Range(above=1), same_conversation=True)


def plan(cuts: int, *, approximate: int = 100, hops: int = 1, own: bool = True) -> Plan:
    run: Any = SimpleNamespace(
        cuts=cuts, lost_context=0.5, new_context=0.0, distance=10, same_conversation=own
    )
    segments = np.array([(0,), (hops,)], dtype=[("hops", "u2")])
    return SimpleNamespace(num_approximate=approximate, moved_runs=(run,), segments=segments)


def decided(given: gates.Gate, wanted: kvtrie.ReusePolicy = POLICY) -> gates.Decision:
    return given.policy(wanted, model="m@1")


def refused(*kinds: gates.Kind, **changes: Any) -> str:
    decision = decided(gate(*kinds, **changes))
    assert not decision.is_cleared
    assert decision.policy == kvtrie.EXACT_ONLY
    return decision.reason


def test_gates_need_neither_torch_nor_numpy_themselves() -> None:
    code = "import kvtrie.gates, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_policy_measured_and_good_is_cleared() -> None:
    decision = decided(gate())
    assert (decision.policy, decision.is_cleared) == (POLICY, True)
    assert decision.of(plan(1)) is decision


def test_plan_is_judged_by_its_kind() -> None:
    decision = decided(gate(kind("few", LITTLE), kind("many", MUCH, BAD)))
    assert decision.is_cleared
    assert decision.of(plan(1)) is decision
    judged = decision.of(plan(2))
    assert judged.policy == POLICY.replace(approximate=False)
    assert not judged.is_cleared
    assert "edits of the kind 'many' are not cleared: mean KL is 0.1 above" in judged.reason


def test_plan_of_a_kind_that_was_not_measured_is_exact() -> None:
    decision = decided(gate(kind("few", LITTLE)))
    judged = decision.of(plan(2))
    assert not judged.policy.approximate
    assert judged.reason == (
        "no edit of this kind was measured (2 cuts, 50% of the context lost, 0% new, moved by 10, "
        "1 hops, from own conversations)"
    )
    assert not decision.of(plan(0, own=False)).policy.approximate


def test_plan_from_another_conversation_is_not_what_its_own_cleared() -> None:
    wide = POLICY.replace(scope="namespace")
    decision = decided(gate(kind("few", LITTLE), policy=wide), wide)
    assert decision.is_cleared
    space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    index = kvtrie.RadixIndex(num_blocks=64, block_size=4, min_run=8)
    seq = kvtrie.TokenSequence(range(40), space)
    index.insert(seq, range(10), num_computed=40, source=kvtrie.COMPUTED, session="chat-7")
    prompt = kvtrie.TokenSequence([99, *range(40), 98], space)
    for session, own in [("chat-7", True), ("chat-8", False), (None, False)]:
        with index.plan(prompt, wide, session=session) as found:
            assert found.num_approximate == 40
            terms = gates.terms(found)
            assert terms is not None
            assert terms.same_conversation is own
            judged = decision.of(found)
        assert judged.policy.approximate is own
        assert own or "from other conversations" in judged.reason


def test_plan_without_approximate_tokens_is_of_no_kind() -> None:
    decision = decided(gate(kind("few", LITTLE)))
    assert decision.of(plan(9, approximate=0)) is decision


def test_exact_policy_and_its_plans_need_no_clearance() -> None:
    exact = kvtrie.ReusePolicy(approximate=False, partial_blocks=False)
    decision = decided(gate(), exact)
    assert (decision.policy, decision.of(plan(9))) == (exact, decision)


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
def test_policy_laxer_than_measured_is_exact(wanted: kvtrie.ReusePolicy) -> None:
    decision = decided(gate(policy=FIRST4), wanted)
    assert (decision.policy, decision.is_cleared) == (kvtrie.EXACT_ONLY, False)
    assert decision.reason == "nothing that reuses as much was measured"


@pytest.mark.parametrize(
    "wanted",
    [
        kvtrie.ReusePolicy(min_run=16, recompute_first=5),
        kvtrie.ReusePolicy(min_run=32, recompute_first=4, recompute_last=2),
        kvtrie.ReusePolicy(min_run=16, recompute_first=4, forbid_kinds=["answer"]),
        kvtrie.ReusePolicy(min_run=16, recompute_first=4, max_approximate_share=0.2),
    ],
)
def test_policy_stricter_than_measured_is_cleared(wanted: kvtrie.ReusePolicy) -> None:
    assert decided(gate(policy=FIRST4), wanted).policy == wanted


def test_policy_is_judged_by_its_own_measurement_first() -> None:
    lax = gates.Measured("rotated", POLICY, (kind("few", LITTLE), kind("many", MUCH)))
    own = gates.Measured("first4", FIRST4, (kind("few", LITTLE, BAD),))
    decision = decided(gate(measured=(lax, own)), FIRST4)
    assert not decision.of(plan(1)).is_cleared
    # It was not measured on this kind, so the laxer policy decides.
    assert decision.of(plan(2)) is decision


@pytest.mark.parametrize(
    "running",
    [
        {"model": "m@2"},
        {"model": "m@1", "kv_dtype": "float32"},
        {"model": "m@1", "rope": "yarn"},
        {"model": "m@1", "template": "abcd"},
        {"checkpoint": "abcd"},
    ],
    ids=["model", "dtype", "rope", "template", "checkpoint"],
)
def test_gate_of_another_model_is_refused(running: dict[str, str]) -> None:
    with pytest.raises(gates.GateMismatchError, match="measured with"):
        gate().policy(POLICY, **running)
    with pytest.raises(ValueError, match="give the running model"):
        gate().policy(POLICY)


def stored(quant: str | None) -> str:
    """What a layout calls its KV."""
    dtype = "bfloat16" if quant is None else "uint8"
    return kvtrie.KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=64, dtype=dtype, quant=quant
    ).kv_dtype


@pytest.mark.parametrize(
    ("measured", "running"),
    [
        (None, "fp8_e4m3"),
        ("fp8_e4m3", None),
        ("fp8_e4m3", "fp8_e5m2"),
        ("fp8_e4m3", "fp8_per_token_head"),
        ("int8_per_token_head", "int8"),
    ],
)
def test_gate_of_another_kv_type_is_refused(measured: str | None, running: str | None) -> None:
    """However KV is quantised: the error of a moved key depends on it."""
    one = replace(gate(), kv_dtype=stored(measured))
    for call in (one.ladder, lambda **its: one.policy(POLICY, **its)):
        assert call(model="m@1", kv_dtype=stored(measured)).is_cleared
        with pytest.raises(gates.GateMismatchError) as caught:
            call(model="m@1", kv_dtype=stored(running))
        assert f"kv_dtype {stored(measured)!r}, not {stored(running)!r}" in str(caught.value)
    # The file says it, too.
    again = replace(one, kv_dtype=stored(running)).to_json()
    assert f'"kv_dtype": "{stored(running)}"' in again


def test_zero_right_of_400_clear_nothing() -> None:
    nothing = replace(FLOOR, questions=400, right_full=0)
    own = replace(GOOD, questions=400, right_full=0)
    control = gates.Control("drop", replace(DETECTED.figures, questions=400, right_full=0, lost=0))
    reason = refused(kind(own=own, floor=nothing, controls=(control,)))
    assert "full recomputation is right on 0 of 400 questions, at least 50% are needed" in reason


@pytest.mark.parametrize("controls", [(), (UNDETECTED,)], ids=["none", "undetected"])
def test_control_that_is_not_detected_clears_nothing(controls: tuple[gates.Control, ...]) -> None:
    reason = refused(kind(controls=controls))
    assert ("no control was measured" in reason) == (not controls)
    assert ("no control is detected as worse: 'unrotated' loses 0 of 60" in reason) == bool(
        controls
    )


def test_control_must_lose_replies_and_diverge() -> None:
    in_kl = gates.Control("drop", figures(excess=2.0, drop=0.5, lost=0))
    in_replies = gates.Control("unrotated", figures(lost=50))
    assert "no control is detected" in refused(kind(controls=(in_kl, in_replies)))
    assert decided(gate(kind(controls=(in_kl, DETECTED)))).is_cleared


def test_exact_reuse_must_keep_95_of_100_replies() -> None:
    for lost, is_cleared in ((3, True), (4, False)):
        decision = decided(gate(kind(floor=replace(FLOOR, lost=lost))))
        assert decision.is_cleared == is_cleared
    assert "exact reuse loses 4 of 60 right replies, at most 5%" in decision.reason


def test_too_few_answers_clear_nothing() -> None:
    few: dict[str, Any] = {"questions": 19, "right_full": 19}
    own = replace(GOOD, **few, losses=19 * (0.0,))
    control = replace(DETECTED.figures, **few, lost=19, losses=19 * (1.0,))
    floor = replace(FLOOR, **few)
    reason = refused(kind(own=own, floor=floor, controls=(gates.Control("drop", control),)))
    assert reason == "one cut: full recomputation is right on 19 questions, at least 20 are needed"


def test_limits_are_relative_to_exact_reuse() -> None:
    # Rounding alone exceeds both limits; the policy adds little to it.
    rough: dict[str, Any] = {"kl_mean": 0.08, "kl_p99": 0.9, "top1": 0.93}
    floor = replace(FLOOR, **rough)
    own = replace(GOOD, kl_mean=0.082, kl_p99=0.92, top1=0.929)
    control = replace(DETECTED.figures, kl_mean=2.08, top1=0.43)
    controls = (gates.Control("drop", control),)
    assert decided(gate(kind(own=own, floor=floor, controls=controls))).is_cleared


@pytest.mark.parametrize(
    ("own", "state", "said"),
    [
        (figures(excess=0.05), "refused", "mean KL is 0.05 above"),
        (figures(excess=0.019), "undecided", "not shown to be below 0.02"),
        (figures(drop=0.1), "refused", "89.00% of the likeliest tokens agree, the limit is 98.00%"),
        (figures(drop=0.0195), "undecided", "not shown by 60 conversations"),
        (figures(lost=20), "refused", "33.33 points of accuracy lost (60 questions)"),
        (replace(GOOD, kl_p99=0.6), "undecided", "99th percentile is 0.59 above"),
    ],
    ids=["KL", "KL near", "top 1", "top 1 near", "lost", "tail"],
)
def test_verdict_says_value_and_limit(own: gates.Figures, state: str, said: str) -> None:
    verdict = kind(own=own).verdict(gates.Thresholds())
    assert verdict.state == state
    assert said in str(verdict.reason)


def test_mean_beyond_its_limit_clears_nothing_however_few_conversations_make_it() -> None:
    """The evidence caps what one conversation counts, which hid the top 1 of these three."""
    few = 3 * (0.6,) + 57 * (0.0,)
    own = replace(GOOD, top1=FLOOR.top1 - 0.03, top1_drop=few)
    verdict = kind(own=own).verdict(gates.Thresholds())
    assert (verdict.state, verdict.looks_worse) == ("undecided", True)
    assert "96.00% of the likeliest tokens agree, the limit is 98.00%" in str(verdict.reason)
    own = replace(GOOD, kl_mean=FLOOR.kl_mean + 0.03, kl_excess=few)
    verdict = kind(own=own).verdict(gates.Thresholds())
    assert (verdict.state, verdict.looks_worse) == ("undecided", True)


def test_accuracy_per_kind_takes_more_questions() -> None:
    limits = gates.Thresholds(loss_per_kind=True)
    verdict = kind().verdict(limits)
    assert verdict.state == "undecided"
    assert "about 381 questions are needed" in str(verdict.reason)
    assert kind().verdict(replace(limits, max_loss=0.2)).state == "cleared"


def test_accuracy_is_bounded_over_all_cleared_kinds() -> None:
    one = gates.Measured("rotated", POLICY, (kind("few", LITTLE), kind("many", MUCH)))
    alone = gates.Measured("rotated", POLICY, (kind("few", LITTLE), kind("many", MUCH, BAD)))
    limits = gates.Thresholds()
    together, half = one.most_lost(limits), alone.most_lost(limits)
    assert together is not None
    assert half is not None
    assert together < half < 0.1
    assert gates.Measured("rotated", POLICY, ()).most_lost(limits) is None


def test_a_loss_that_all_cleared_kinds_show_together_is_said() -> None:
    """No kind shows by itself that it loses more than a point, so each is cleared."""
    ranges = gates.Range(most=1), gates.Range(1, 3), gates.Range(above=3)
    some = figures(lost=4)
    kinds = [kind(str(at), gates.Box(cuts=cuts), some) for at, cuts in enumerate(ranges)]
    limits = gates.Thresholds()
    one = gates.Measured("rotated", POLICY, tuple(kinds))
    assert len(one.cleared(limits)) == 3
    least, most = one.least_lost(limits), one.most_lost(limits)
    assert least is not None
    assert most is not None
    assert limits.max_loss < least < 12 / 180 < most
    said = summary(one, limits)
    assert f"12 replies lost and 0 gained of 180, {100 * least:.2f} to {100 * most:.2f}" in said
    assert said.endswith("(each end 95 %): more than 1.00, which no kind alone shows")
    alone = gates.Measured("rotated", POLICY, (kind(),))
    assert alone.least_lost(limits) == 0
    assert summary(alone, limits).endswith("points (95 %)")
    assert gates.Measured("rotated", POLICY, ()).least_lost(limits) is None


@pytest.mark.parametrize("name", ["kl_mean", "kl_p99", "top1"])
def test_figures_that_are_not_numbers_clear_nothing(name: str) -> None:
    broken: Any = {name: float("nan")}
    assert name in refused(kind(own=replace(GOOD, **broken)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"positions": 1}, "'questions' is 60, more than the 1 positions"),
        ({"questions": 59, "right_full": 59}, "it is of the replies"),
        ({"kl_excess": (0.002,)}, "'kl_excess' has 1 values for 60 cases"),
        ({"kl_excess": 60 * (0.0,)}, "'kl_excess' has another mean"),
        ({"top1_drop": 60 * (-0.5,)}, "'top1_drop' has another mean"),
        ({"top1_drop": 60 * (2.0,)}, "'top1_drop' must be finite"),
        ({"losses": ()}, "'losses' has 0 values"),
        ({"losses": 60 * (0.5,)}, "'losses' adds up to 30"),
        ({"lost": 61}, "'lost' is 61, more than the 60"),
    ],
)
def test_figures_that_contradict_themselves_clear_nothing(
    changes: dict[str, Any], said: str
) -> None:
    assert said in refused(kind(own=replace(GOOD, **changes)))


@pytest.mark.parametrize("name", ["max_loss", "max_kl", "max_kl_p99", "min_top1"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), 10**400])
def test_thresholds_out_of_range_are_refused(name: str, value: float) -> None:
    given: Any = {name: value}
    with pytest.raises(ValueError, match=name):
        gates.Thresholds(**given)


def test_thresholds_of_another_type_are_refused() -> None:
    for value in (True, None, "0.1"):
        wrong: Any = {"max_kl": value}
        with pytest.raises(TypeError, match="max_kl"):
            gates.Thresholds(**wrong)
    wrong = {"loss_per_kind": 1}
    with pytest.raises(TypeError, match="loss_per_kind"):
        gates.Thresholds(**wrong)


def test_control_that_a_request_could_ask_for_is_refused() -> None:
    with pytest.raises(ValueError, match="'name' must be one of drop, unrotated, not 'rotated'"):
        gates.Control("rotated", GOOD)


def test_boxes_that_meet_are_refused() -> None:
    wide = gates.Box(cuts=gates.Range(most=5))
    with pytest.raises(ValueError, match="the boxes of 'few' and 'wide' meet"):
        gates.Measured("rotated", POLICY, (kind("few", LITTLE), kind("wide", wide)))
    with pytest.raises(ValueError, match="two kinds have the name 'few'"):
        gates.Measured("rotated", POLICY, (kind("few", LITTLE), kind("few", MUCH)))


@given(
    excess=st.floats(0, 0.06),
    drop=st.floats(0, 0.06),
    lost=st.integers(0, 10),
    worse=st.tuples(st.floats(0, 0.05), st.floats(0, 0.05), st.integers(0, 5)),
)
def test_verdict_is_monotone(
    excess: float, drop: float, lost: int, worse: tuple[float, float, int]
) -> None:
    def state(*of: Any) -> str:
        return kind(own=figures(*of)).verdict(gates.Thresholds()).state

    if state(excess, drop, lost) != "cleared":
        assert state(excess + worse[0], drop + worse[1], lost + worse[2]) != "cleared"


def test_errors_belong_to_the_root() -> None:
    assert issubclass(gates.GateMismatchError, gates.GateError)
    assert issubclass(gates.GateError, kvtrie.KvTrieError)


@pytest.mark.parametrize(
    "changes", [{"max_cuts": 3}, {"max_lost_context": 0.5}, {"max_new_context": 0.25}]
)
def test_policy_measured_with_a_limit_clears_none_without(changes: dict[str, Any]) -> None:
    limited = POLICY.replace(**changes)
    assert decided(gate(policy=limited), limited).is_cleared
    assert not decided(gate(policy=limited)).is_cleared
    assert decided(gate(), limited).is_cleared
