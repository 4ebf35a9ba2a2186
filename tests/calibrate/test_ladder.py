"""The ladder: each plan gets the cheapest measured policy that is cleared for its kind of edit."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.calibrate.test_boxes import BLOCK, SPACE, edited
from tests.calibrate.test_gates import plan
from tests.cleared import BAD, GOOD, POLICY, gate, kind

import kvtrie
from kvtrie import gates
from kvtrie.testing.model._grades import grade_of, meet

FRONTS = POLICY.replace(recompute_share=0.2)
PROBE = POLICY.replace(recompute_share=0.3, repair="probe")
FEW = gates.Box(cuts=gates.Range(most=1), same_conversation=True)
MANY = gates.Box(cuts=gates.Range(above=1, most=4), same_conversation=True)
FROM_OTHERS = gates.Box(same_conversation=False)


def costing(own: gates.Figures, computed: int) -> gates.Figures:
    """The same figures, with so many of 1,000 tokens computed."""
    return replace(own, exact=0, moved=1000 - computed, computed=computed)


def measured(name: str, policy: kvtrie.ReusePolicy, *kinds: gates.Kind) -> gates.Measured:
    return gates.Measured(name, policy, kinds)


def ladder(*policies: gates.Measured, **given: Any) -> gates.Decision:
    return gate(measured=policies).ladder(model="m@1", **given)


USUAL = (
    measured(
        "rotated",
        POLICY,
        kind("few", FEW, costing(GOOD, 50)),
        kind("many", MANY, costing(BAD, 60)),
    ),
    measured(
        "rotated+fronts20",
        FRONTS,
        kind("few", FEW, costing(GOOD, 210)),
        kind("many", MANY, costing(GOOD, 220)),
    ),
)


def test_ladder_takes_the_cheapest_policy_that_is_cleared() -> None:
    found = ladder(*USUAL)
    assert found.is_cleared
    assert found.reason == (
        "cleared for edits of the kinds few (rotated, rotated+fronts20), many (rotated+fronts20)"
    )
    assert found.policy == POLICY
    assert found.of(plan(1)) is found
    other = found.of(plan(2))
    assert (other.policy, other.is_cleared) == (FRONTS, True)
    assert other.reason == "rotated+fronts20 is cleared for edits of the kinds few, many"
    assert other.of(plan(2)) is other


def test_ladder_is_exact_where_no_policy_is_cleared() -> None:
    found = ladder(*USUAL).of(plan(9))
    assert found.policy == POLICY.replace(approximate=False)
    assert not found.is_cleared
    assert found.reason.startswith("no edit of this kind was measured (9 cuts")
    assert found.of(plan(9)) is found
    both = (USUAL[0], measured("fronts", FRONTS, kind("many", MANY, costing(BAD, 220))))
    reason = ladder(*both).of(plan(2)).reason
    assert reason.startswith("edits of the kind 'many' are not cleared: mean KL is 0.1 above")


def test_plan_that_became_of_another_kind_is_judged_again() -> None:
    """No policy is used for a plan of a kind that it is not cleared for."""
    rung = ladder(*USUAL).of(plan(2))
    again = rung.of(plan(9))
    assert not again.policy.approximate
    assert again.of(plan(9)) is again


def test_of_policies_that_cost_the_same_the_strictest_is_used() -> None:
    same = (
        measured("rotated", POLICY, kind("few", FEW, costing(GOOD, 50))),
        measured("rotated+fronts20", FRONTS, kind("few", FEW, costing(GOOD, 50))),
    )
    for order in (same, same[::-1]):
        assert ladder(*order).of(plan(1)).policy == FRONTS


def test_plan_that_moves_nothing_is_used_as_it_is() -> None:
    """Else a turn after an edit would compute what a laxer policy has built."""
    still = plan(1)
    still.moved_runs = ()  # type: ignore[misc] # a plan of the test
    same = (
        measured("rotated", POLICY, kind("few", FEW, costing(GOOD, 50))),
        measured("rotated+fronts20", FRONTS, kind("few", FEW, costing(GOOD, 50))),
    )
    found = ladder(*same)
    assert found.of(still) is found


def test_plan_without_approximate_tokens_is_used_as_it_is() -> None:
    found = ladder(*USUAL)
    assert found.of(plan(9, approximate=0)) is found


def test_ladder_has_no_rung_that_reuses_other_conversations() -> None:
    """Who wants other conversations' KV has to ask for it by a policy."""
    wide = POLICY.replace(scope="namespace")
    one = measured("rotated+namespace", wide, kind("others", FROM_OTHERS, costing(GOOD, 40)))
    assert ladder(*USUAL, one).policy == POLICY
    none = ladder(one)
    assert not none.is_cleared
    assert none.reason == "no policy was measured that this engine can run"
    assert gate(measured=(one,)).policy(wide, model="m@1").is_cleared


def test_ladder_has_the_rungs_that_the_engine_can_run() -> None:
    one = measured("rotated+probe30", PROBE, kind("many", MANY, costing(GOOD, 330)))
    assert not ladder(USUAL[0], one).of(plan(2)).policy.approximate
    both = ladder(USUAL[0], one, repairs=("fronts", "probe"))
    assert both.of(plan(2)).policy == PROBE
    assert not ladder(*USUAL, min_run=17).is_cleared
    assert ladder(*USUAL, min_run=16).is_cleared


def test_ladder_without_a_cleared_kind_is_exact_and_says_why() -> None:
    found = ladder(measured("rotated", POLICY, kind("many", MANY, BAD)))
    assert (found.policy, found.is_cleared) == (kvtrie.EXACT_ONLY, False)
    assert found.reason.startswith("rotated, many: mean KL is 0.1 above")


def test_explicit_policy_stays_a_single_rung() -> None:
    found = gate(measured=USUAL).policy(POLICY, model="m@1")
    assert not found.of(plan(2)).policy.approximate
    stricter = gate(measured=USUAL).policy(FRONTS, model="m@1")
    assert stricter.of(plan(2)) is stricter
    assert stricter.of(plan(1)) is stricter


def test_ladder_of_another_model_is_refused() -> None:
    with pytest.raises(gates.GateMismatchError, match=r"Gate\.ladder: .* model 'm@1', not 'm@2'"):
        gate(measured=USUAL).ladder(model="m@2")
    with pytest.raises(ValueError, match=r"Gate\.ladder: give the running model"):
        gate(measured=USUAL).ladder()


shares = st.sampled_from((0.0, 0.1, 0.2, 1.0))
some_policies = st.builds(
    kvtrie.ReusePolicy,
    min_run=st.sampled_from((None, 8, 16, 40)),
    max_hops=st.sampled_from((0, 1, 255)),
    max_approximate_share=shares,
    recompute_first=st.sampled_from((0, 4)),
    recompute_last=st.sampled_from((0, 4)),
    max_cuts=st.sampled_from((None, 0, 3)),
    max_lost_context=shares,
    max_new_context=shares,
    scope=st.sampled_from(("conversation", "namespace")),
    shared_prefix=st.sampled_from((1, 16)),
    recompute_share=shares,
    repair=st.sampled_from(("fronts", "ngrams", "probe", "question", "adaptive")),
    forbid_kinds=st.sampled_from(((), ("tool",), ("tool", "thinking"))),
)


@given(given=st.lists(some_policies, min_size=1, max_size=4))
def test_laxest_is_the_meet_of_rule_p19(given: list[kvtrie.ReusePolicy]) -> None:
    found = gates.laxest(given)
    assert all(one.is_at_least_as_strict_as(found) for one in given)
    kinds = ("tool", "thinking")
    assert grade_of(found, kinds) == meet(grade_of(one, kinds) for one in given)


def index_of(rng: Random, seed: int) -> tuple[kvtrie.RadixIndex, list[list[int]]]:
    """An index with two conversations, one of which is the request's."""
    index = kvtrie.RadixIndex(num_blocks=2048, block_size=BLOCK, min_run=8, seed=seed)
    texts = [[rng.randrange(5000) for _ in range(60)] for _ in range(2)]
    for number, text in enumerate(texts):
        seq = kvtrie.TokenSequence(text, SPACE)
        index.insert(
            seq,
            np.arange(number * 15, number * 15 + 15, dtype=np.int32),
            num_computed=60,
            source=kvtrie.COMPUTED,
            session=None if number else "own",
        )
    return index, texts


def test_kind_of_a_plan_does_not_depend_on_the_share_that_is_computed() -> None:
    """By P7, P17 and P20: so one plan under the laxest rung says which rung is the plan's."""
    rng = Random(3)
    index, texts = index_of(rng, 3)
    num_moved = 0
    for _ in range(2000):
        seq = kvtrie.TokenSequence(edited(rng, texts), SPACE)
        lax = kvtrie.ReusePolicy(min_run=8, scope=rng.choice(("conversation", "namespace")))
        share, repair = rng.choice((0.1, 0.2, 0.6)), rng.choice(("fronts", "ngrams", "probe"))
        strict = lax.replace(recompute_share=share, repair=repair)
        with index.plan(seq, lax, pin=False, session="own") as one:
            first = gates.terms(one)
        with index.plan(seq, strict, pin=False, session="own") as other:
            approximate = other.segments[other.segments["class"] == 1]
            if repair != "fronts" and len(approximate):
                start, end = approximate[0][["start", "end"]].tolist()
                other.recompute([(start, min(end, start + 4))])
            second = gates.terms(other)
        # What is wholly computed has no terms.
        assert second in (first, None)
        num_moved += second is not None and second.distance > 0
    assert num_moved > 1000


def random_gate(rng: Random) -> gates.Gate:
    """A gate of rungs with other kinds, boxes and costs, cleared or not."""

    def kinds() -> tuple[gates.Kind, ...]:
        cuts = rng.choice((0, 1, 2))
        boxes = [
            gates.Box(cuts=gates.Range(most=cuts), same_conversation=True),
            gates.Box(cuts=gates.Range(above=cuts), same_conversation=True),
        ]
        if rng.random() < 0.3:
            boxes = [replace(one, new_context=gates.Range(most=0.5)) for one in boxes]
        return tuple(
            kind(name, box, costing(rng.choice((GOOD, BAD)), rng.randrange(10, 900)))
            for name, box in zip(("few", "many"), boxes, strict=True)
            if rng.random() < 0.9
        )

    lax = kvtrie.ReusePolicy(min_run=8)
    policies = {
        "rotated": lax,
        "fronts20": lax.replace(recompute_share=0.2),
        "fronts60": lax.replace(recompute_share=0.6),
        "first4": lax.replace(recompute_first=4),
        "run12": lax.replace(min_run=12),
    }
    names = rng.sample(list(policies), rng.randint(1, 4))
    return gate(measured=tuple(measured(name, policies[name], *kinds()) for name in names))


def test_whatever_is_used_was_cleared_for_its_kind_and_inherits_nothing_laxer() -> None:
    """Conversations under random gates, whose KV is built under whatever rung their plans took."""
    rng = Random(11)
    seen = {"as planned": 0, "another rung": 0, "exact": 0, "mixed": 0}
    for number in range(150):
        given_gate = random_gate(rng)
        wanted = given_gate.ladder(model="m@1")
        rungs = {one.policy: one for one in given_gate.measured}
        index, texts = index_of(rng, number)
        built: dict[int, kvtrie.ReusePolicy] = {}
        free = iter(range(100, 2048))
        for _ in range(12):
            prompt = edited(rng, texts)
            if len(texts) > 2 and rng.random() < 0.4:
                prompt = [*texts[-1], *(rng.randrange(5000, 9000) for _ in range(8)), 9999]
            seq = kvtrie.TokenSequence(prompt, SPACE)
            decision, plans = wanted, 1
            found = index.plan(seq, decision.policy, pin=False, session="own")
            while (judged := decision.of(found)) is not decision:
                found.release()
                decision, plans = judged, plans + 1
                found = index.plan(seq, decision.policy, pin=False, session="own")
            assert plans <= 3
            with found:
                terms = gates.terms(found)
                if terms is not None:
                    used = next(one for one in rungs if one == decision.policy)
                    its = rungs[used].kind_of(terms)
                    assert its is not None
                    assert its.verdict(given_gate.thresholds).state == "cleared"
                    blocks = {*found.blocks.tolist(), *found.source_blocks.tolist()}
                    laxer = [one for one in blocks if one in built]
                    assert all(built[one].is_at_least_as_strict_as(used) for one in laxer)
                    seen["mixed"] += any(built[one] != used for one in laxer)
                    seen["as planned" if plans == 1 else "another rung"] += 1
                elif plans > 1:
                    seen["exact"] += 1
                num = len(prompt) // BLOCK
                ids = [*found.blocks.tolist(), *(next(free) for _ in range(num))][:num]
                starts = found.segments[found.segments["class"] == 1]["start"]
                took = index.insert(
                    seq,
                    np.array(ids, np.int32),
                    num_computed=num * BLOCK,
                    source=found,
                    session="own",
                )
                for at, block in enumerate(took.blocks.tolist()):
                    is_moved = len(starts) and (at + 1) * BLOCK > starts.min()
                    if is_moved and block not in built and block in ids[len(found.blocks) :]:
                        built[block] = decision.policy
            if num * BLOCK >= 24:
                texts.append(prompt[: num * BLOCK])
            del texts[2:-3]
    assert min(seen.values()) >= 10, seen


def test_strict_turn_does_not_inherit_what_a_lax_turn_of_the_conversation_built() -> None:
    """A changed head, reused as it is, and then several cuts, which need fronts."""
    found = ladder(
        measured("rotated", POLICY, kind("few", FEW, costing(GOOD, 50))),
        measured("rotated+fronts20", FRONTS, kind("many", MANY, costing(GOOD, 220))),
    )
    index = kvtrie.RadixIndex(num_blocks=256, block_size=BLOCK, min_run=8)
    text = list(range(200))

    def turn(prompt: list[int], first: int) -> tuple[gates.Decision, list[int], list[int]]:
        seq = kvtrie.TokenSequence(prompt, SPACE)
        decision = found
        planned = index.plan(seq, decision.policy, keep_last=1, session="chat")
        while (judged := decision.of(planned)) is not decision:
            planned.release()
            decision = judged
            planned = index.plan(seq, decision.policy, keep_last=1, session="chat")
        with planned:
            used = sorted({*planned.blocks.tolist(), *planned.source_blocks.tolist()})
            num = len(prompt) // BLOCK - len(planned.blocks)
            ids = [*planned.blocks.tolist(), *range(first, first + num)]
            took = index.insert(
                seq,
                np.array(ids, np.int32),
                num_computed=len(ids) * BLOCK,
                source=planned,
                session="chat",
            )
            return decision, used, took.blocks.tolist()

    seq = kvtrie.TokenSequence(text, SPACE)
    index.insert(seq, range(50), num_computed=200, source=kvtrie.COMPUTED, session="chat")
    lax, used, built = turn([7000, 7001, *text[2:], 9999], 60)
    assert lax is found
    assert set(built).isdisjoint(range(50))
    often = [7000, 7001, *text[2:60], *text[80:104], *text[120:144], *text[160:]]
    strict, used, _ = turn([*often, 9998], 120)
    assert strict.policy == FRONTS
    assert used
    assert set(used).isdisjoint(built)
    # The other way round nothing is lost: what is strict may be used by all.
    again, used, _ = turn([*often, 9997], 180)
    assert again is found
    assert set(used) & set(range(120, 180))
