"""What a transfer says that approximate KV was built under: what it kept of its policy (P19)."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from tests.transfer import cases, naive

import kvtrie

KEY = cases.KEY
SENT = tuple(range(96))
EDITED = (*range(32), *range(48, 64), *[500] * 8, *range(64, 96))
"""In place are 32 tokens. Two runs are moved: 16 tokens after 1 cut and 32 after 2."""

MOVES = kvtrie.ReusePolicy(approximate=True, min_run=8)
PROBED = MOVES.replace(recompute_share=0.25, repair="probe")


def sequence(ids: tuple[int, ...]) -> kvtrie.TokenSequence:
    return cases.sequence(naive.Prompt(ids))


def manifest_of(source: Any = None) -> kvtrie.TransferManifest:
    return kvtrie.TransferManifest.from_blocks(
        sequence(SENT), list(range(24)), key=KEY, num_computed=96, block_size=4, source=source
    )


def loaded(
    policy: kvtrie.ReusePolicy, manifest: kvtrie.TransferManifest | None = None
) -> kvtrie.TransferPlan:
    return kvtrie.plan_transfer(manifest or manifest_of(), sequence(EDITED), key=KEY, policy=policy)


def test_a_moved_run_beyond_the_limits_on_its_context_is_not_loaded() -> None:
    """It was, and was said to be built under the policy with its limits."""
    for policy, tokens in [
        (MOVES, 48),
        (MOVES.replace(max_cuts=1), 16),
        (MOVES.replace(max_cuts=0), 0),
        (MOVES.replace(max_lost_context=0.34), 48),
        (MOVES.replace(max_lost_context=0.33), 0),
        (MOVES.replace(max_new_context=0.14), 16),
    ]:
        move = loaded(policy)
        assert move.num_approximate == tokens, policy
        if tokens:
            assert move.source == kvtrie.Imported(32, hops=1, policy=policy)


def test_the_limits_are_those_of_an_index_that_has_the_senders_kv() -> None:
    """A plan from the sender's path alone moves the same tokens."""
    rng, met = Random(7), Counter[str]()
    for _ in range(100):
        prompt = edited(rng)
        index = kvtrie.RadixIndex(64, block_size=4, min_run=8, seed=0)
        index.insert(sequence(SENT), range(24), num_computed=96, source=kvtrie.COMPUTED)
        limits = [
            MOVES.replace(max_cuts=rng.randrange(3)),
            MOVES.replace(max_lost_context=rng.random()),
            MOVES.replace(max_new_context=rng.random()),
        ]
        counts = []
        for policy in (MOVES, rng.choice(limits)):
            move = kvtrie.plan_transfer(manifest_of(), sequence(prompt), key=KEY, policy=policy)
            moved = move.pairs[move.pairs["class"] == 1]
            tokens = {at for pair in moved for at in range(pair["start"], pair["end"])}
            with index.plan(sequence(prompt), policy, path=sequence(SENT), keep_last=0) as plan:
                runs = [range(run.start, run.end) for run in plan.moved_runs]
            assert tokens == {at for run in runs for at in run}, (prompt, policy)
            counts.append(len(tokens))
        met["moved"] += counts[1] > 0
        met["limited"] += counts[1] < counts[0]
    assert min(met["moved"], met["limited"]) > 20, met


def edited(rng: Random) -> tuple[int, ...]:
    """Pieces of 12 to 24 tokens of the sender, on edges of its blocks, and new ones in between."""
    places = [rng.randrange(0, 18) * 4 for _ in range(rng.randrange(2, 5))]
    pieces = [SENT[at : at + rng.randrange(3, 7) * 4] for at in places]
    gaps = [[900 + at] * rng.choice((0, 4)) for at in range(len(pieces))]
    return tuple(
        token for pair in zip(pieces, gaps, strict=True) for part in pair for token in part
    )


def test_a_share_that_nobody_chose_is_not_said_to_be_chosen() -> None:
    """It was said to be chosen as the policy asks."""
    move = loaded(PROBED)
    assert isinstance(move.source, kvtrie.Imported)
    assert move.source.policy == PROBED.replace(repair="fronts")
    assert not move.source.policy.is_at_least_as_strict_as(PROBED)


def test_what_is_loaded_in_place_keeps_the_policy_that_it_was_asked_for() -> None:
    sent = manifest_of(kvtrie.Imported(16, hops=1, policy=PROBED))
    move = kvtrie.plan_transfer(sent, sequence(SENT), key=KEY, policy=PROBED)
    assert move.source == kvtrie.Imported(16, hops=1, policy=PROBED)


@pytest.mark.parametrize("built", [PROBED, PROBED.replace(recompute_first=9)])
def test_kv_of_two_kinds_of_share_is_said_to_have_neither(built: kvtrie.ReusePolicy) -> None:
    policy = PROBED.replace(max_hops=2)
    sent = manifest_of(kvtrie.Imported(16, hops=1, policy=built.replace(max_hops=1)))
    move = loaded(policy, sent)
    assert move.num_approximate > 16
    assert isinstance(move.source, kvtrie.Imported)
    said = move.source.policy
    assert said == policy.replace(repair="fronts", recompute_share=0.0)


def test_a_stricter_reader_does_not_load_what_a_transfer_moved_under_a_laxer_policy() -> None:
    """From engine to engine to engine, and into the index of the last."""
    seq, table = sequence(EDITED), list(range(22))
    for policy, stricter in [(MOVES, MOVES.replace(max_cuts=2)), (PROBED, PROBED)]:
        move = loaded(policy)
        ledger = kvtrie.SequenceLedger(block_size=4)
        ledger.begin("a", seq, table, source=move.source, missing=move.missing)
        sent_on = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY)
        for asked, is_used in [(stricter, False), (said(move), True)]:
            again = kvtrie.plan_transfer(sent_on, sequence(EDITED), key=KEY, policy=asked)
            assert (again.num_approximate > 0) == is_used, asked
        index = kvtrie.RadixIndex(64, block_size=4, min_run=8, seed=0)
        index.insert(sequence(EDITED), table, num_computed=88, source=move.source)
        for asked, is_used in [(stricter, False), (said(move), True)]:
            with index.plan(sequence(EDITED), asked) as plan:
                assert (plan.num_approximate > 0) == is_used, asked


def said(move: kvtrie.TransferPlan) -> kvtrie.ReusePolicy:
    assert isinstance(move.source, kvtrie.Imported)
    assert move.source.policy is not None
    return move.source.policy


def test_a_manifest_of_two_grades_says_what_all_of_it_keeps() -> None:
    """Blocks in place of an index have one grade, the rest of the request another."""
    strict, lax = MOVES.replace(recompute_first=8), MOVES.replace(recompute_first=4)
    other = MOVES.replace(max_cuts=3)
    for first, second, expected in [
        (strict, lax, lax),
        (lax, strict, lax),
        (strict, strict, strict),
        # Neither is as strict as the other: nothing is said, which is the laxest.
        (strict, other, None),
        (strict, None, None),
    ]:
        index = kvtrie.RadixIndex(64, block_size=4, min_run=8, seed=0)
        imported = kvtrie.Imported(16, policy=first)
        index.insert(sequence(SENT[:48]), range(12), num_computed=48, source=imported)
        seq = sequence(SENT)
        with index.plan(seq, first) as plan:
            assert (plan.num_exact, plan.num_approximate) == (16, 32)
            ledger = kvtrie.SequenceLedger(block_size=4)
            source = kvtrie.Imported(48, policy=second)
            table = [*plan.blocks.tolist(), *range(30, 42)]
            ledger.begin("a", seq, table, source=source, plan=plan)
            manifest = kvtrie.TransferManifest.from_ledger(ledger, "a", key=KEY)
            assert manifest.policy == expected, (first, second)
