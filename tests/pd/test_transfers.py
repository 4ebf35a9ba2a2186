"""Whatever happens between two engines, no slot has a wrong label, and everything is freed."""

from __future__ import annotations

import collections

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import pd
from tests.pd import driver, groups

import kvtrie

SEEDS = 24
TURNS = 30


@pytest.mark.parametrize("seed", range(SEEDS))
def test_serving_engines_with_faults(seed: int) -> None:
    counts = driver.play(seed, TURNS)
    assert counts["transfers"]


def test_serving_engines_meet_everything() -> None:
    """A driver that stopped to preempt, to refuse or to move would prove nothing."""
    counts: driver.Counts = collections.Counter()
    for seed in range(SEEDS, 2 * SEEDS):
        counts.update(driver.play(seed, TURNS))
    expected = [
        "preemptions",
        "preemptions in flight",
        "aborts",
        "commits",
        "transfers that loaded",
        "connection broke",
    ]
    expected += ["retries", "contradictions"]
    expected += ["lease ended", "exported in flight", "next to another"]
    expected += ["begun as computed", "begun as imported", "refused: digest", "refused: malformed"]
    expected += ["refused: namespace", "tokens loaded exact", "tokens loaded approximate"]
    expected += [f"fault: {fault}" for fault in pd.faults.FAULTS if fault != "dropped"]
    assert not [name for name in expected if not counts[name]], counts


def test_several_groups_of_unequal_blocks() -> None:
    counts: driver.Counts = collections.Counter()
    for seed in range(1000):
        counts.update(groups.play(seed))
    assert counts["pairs, groups"]
    assert counts["refused: groups"]


@given(seed=st.integers(0, 2**32), turns=st.integers(1, 12))
@settings(max_examples=50)
def test_serving_engines_in_few_turns(seed: int, turns: int) -> None:
    driver.play(seed, turns)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    alphabet = draw(st.sampled_from([2, 5, 5000]))
    token = st.integers(0, alphabet - 1)
    sent = draw(st.lists(token, min_size=1, max_size=90))
    wanted = list(sent)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(wanted)))
        end = draw(st.integers(start, min(len(wanted), start + 30)))
        wanted[start:end] = draw(st.lists(token, max_size=6))
    return sent, wanted


@given(
    texts=cases(),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    without_kv=st.integers(0, 3),
    lookahead=st.integers(0, 5),
    cached=st.integers(0, 90),
    keep_last=st.integers(0, 2),
    policy=st.sampled_from(
        [
            kvtrie.EXACT_ONLY,
            kvtrie.ReusePolicy(approximate=True, min_run=8),
            kvtrie.ReusePolicy(approximate=True, min_run=8, recompute_first=1, recompute_last=2),
            kvtrie.ReusePolicy(approximate=True, max_approximate_share=0.5),
        ]
    ),
)
@example(
    texts=([0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0]),
    sizes=(2, 2),
    without_kv=0,
    lookahead=0,
    cached=0,
    keep_last=0,
    policy=kvtrie.EXACT_ONLY,
).via("the prompt ends inside a block of the sender, whose digest is of the whole block")
@settings(max_examples=200)
def test_one_transfer(
    texts: tuple[list[int], list[int]],
    sizes: tuple[int, int],
    without_kv: int,
    lookahead: int,
    cached: int,
    keep_last: int,
    policy: kvtrie.ReusePolicy,
) -> None:
    sent, wanted = texts
    computed = max(0, len(sent) - without_kv)
    cached = min(cached, len(wanted))
    held = pd.Engine("P", block_size=sizes[0]).compute(
        sent, num_computed=computed, lookahead=lookahead
    )
    receiver = pd.Engine("D", block_size=sizes[1])
    rule = pd.RangePlan(policy, keep_last=keep_last)
    outcome = pd.transfer(held, receiver, wanted, cached=cached, rule=rule)
    assert outcome.wrong == 0
    assert outcome.tainted == 0
    assert outcome.refused is None
    if not policy.approximate:
        assert outcome.exact == outcome.loaded
    # All common whole blocks of the sender are loaded, and its last block even if it is partial,
    # but for what the receiver has or must compute.
    common = 0
    while common < min(computed, len(wanted)) and sent[common] == wanted[common]:
        common += 1
    if common == computed:
        end = min(common, len(wanted) - keep_last)
        assert outcome.exact >= max(0, end - cached)
    else:
        whole = min(common - common % sizes[0], len(wanted) - keep_last)
        assert outcome.exact >= max(0, whole - cached)
