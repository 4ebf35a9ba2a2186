"""The peers' bugs: each rule gives the reported symptom, and kvtrie's gives 0 wrong labels.

Every number is derived by hand from the report: which blocks land where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests import pd

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Iterable

MOVING = kvtrie.ReusePolicy(approximate=True)
QUESTION, REASONING, ANSWER, NEW = range(64), range(100, 260), range(300, 348), range(400, 432)


def blocks(names: str, size: int = 16) -> list[int]:
    """Tokens of blocks by their names: `"q0 a1"`, each with ids of its own."""
    return [
        1000 * (ord(name[0]) - 97) + 100 * int(name[1:] or 0) + offset
        for name in names.split()
        for offset in range(size)
    ]


def right(outcome: pd.Outcome) -> tuple[int, int]:
    assert outcome.wrong == 0, outcome
    assert outcome.tainted == 0, outcome
    assert outcome.failed is None, outcome
    return outcome.loaded, outcome.computed


def stripped(rule: pd.Rule) -> pd.Outcome:
    turn = pd.Engine("D").compute([*QUESTION, *REASONING, *ANSWER])
    prompt = [*QUESTION, *ANSWER, *NEW]
    return pd.transfer(turn, pd.Engine("P"), prompt, cached=64, rule=rule)


def test_vllm_43094_suffix_trim_loads_80_of_80_tokens_wrong() -> None:
    # 17 blocks at D, 5 uncached at P: [t8, t9, a0, a1, a2] for [a0, a1, a2, n0, n1].
    outcome = stripped(pd.vllm.suffix_trim)
    assert (outcome.loaded, outcome.wrong) == (80, 80)
    assert outcome.never_computed == len(NEW) == 32


def test_vllm_43094_exact_only_recomputes_the_answer() -> None:
    outcome = stripped(pd.RangePlan())
    assert right(outcome) == (0, 48 + 32)


def test_vllm_43094_an_approximate_policy_moves_the_answer() -> None:
    outcome = stripped(pd.RangePlan(MOVING))
    assert right(outcome) == (48, 32)
    assert outcome.exact == 0


SEVEN = "q0 q1 t0 t1 t2 a0 a1"


def asked_for_five(rule: pd.Rule) -> pd.Outcome:
    """D holds seven blocks; the prompt has four of them, without reasoning, and a new one."""
    turn = pd.Engine("D").compute(blocks(SEVEN))
    return pd.transfer(turn, pd.Engine("P"), blocks("q0 q1 a0 a1 n0"), rule=rule)


def test_vllm_43094_five_of_seven_blocks_are_the_last_five() -> None:
    outcome = asked_for_five(pd.vllm.suffix_trim)
    assert (outcome.loaded, outcome.wrong) == (80, 80)
    assert outcome.never_computed == 16


@pytest.mark.parametrize(
    ("rule", "loaded", "exact"),
    [
        pytest.param(pd.RangePlan(), 32, 32, id="exact only"),
        pytest.param(pd.RangePlan(MOVING), 64, 32, id="approximate"),
    ],
)
def test_vllm_43094_five_of_seven_blocks_by_ranges(
    rule: pd.RangePlan, loaded: int, exact: int
) -> None:
    outcome = asked_for_five(rule)
    assert right(outcome) == (loaded, 80 - loaded)
    assert outcome.exact == exact


def test_vllm_43996_the_lookahead_block_lands_in_the_first() -> None:
    held = pd.Engine("P").compute(range(16), lookahead=1, drafts=[77])
    outcome = pd.transfer(held, pd.Engine("D"), range(16), rule=pd.vllm.suffix_trim)
    assert (outcome.loaded, outcome.wrong) == (16, 16)
    assert outcome.unwritten == 15, "all but the draft"


def test_vllm_43996_decode_context_parallelism_keeps_the_lookahead_block() -> None:
    # Two ranks of 16 make a block of 32. The clip counts 32 / 16 = 2 blocks, and both stay, for a
    # push to trim from the end.
    held = pd.Engine("P", block_size=32).compute(range(32), lookahead=3)
    assert len(held.blocks) == 2
    rule = pd.vllm.SuffixTrim(clip=16)
    outcome = pd.transfer(held, pd.Engine("D", block_size=32), range(32), rule=rule)
    assert (outcome.loaded, outcome.wrong, outcome.unwritten) == (32, 32, 32)


@pytest.mark.parametrize("policy", [kvtrie.EXACT_ONLY, MOVING], ids=["exact only", "approximate"])
@pytest.mark.parametrize(
    ("size", "lookahead", "drafts"),
    [
        pytest.param(16, 1, [77], id="prompt 16, look-ahead 1"),
        pytest.param(32, 3, [], id="two ranks, prompt 32, look-ahead 3"),
        pytest.param(32, 3, [77, 78, 79], id="two ranks, drafts written"),
    ],
)
def test_vllm_43996_by_ranges(
    size: int, lookahead: int, drafts: list[int], policy: kvtrie.ReusePolicy
) -> None:
    held = pd.Engine("P", block_size=size).compute(range(size), lookahead=lookahead, drafts=drafts)
    outcome = pd.transfer(
        held, pd.Engine("D", block_size=size), range(size), rule=pd.RangePlan(policy)
    )
    assert right(outcome) == (size, 0)
    assert outcome.exact == size


def one_longer(rule: pd.Rule, *, size: int, prompt: int, cached: int) -> pd.Outcome:
    """A proxy appended the first sampled token: the receiver's prompt starts one block more."""
    held = pd.Engine("P", block_size=size).compute(range(prompt))
    receiver = pd.Engine("D", block_size=size)
    return pd.transfer(held, receiver, range(prompt + 1), cached=cached, rule=rule)


def test_vllm_50558_one_more_block_fails_an_assertion() -> None:
    outcome = one_longer(pd.vllm.suffix_trim, size=16, prompt=32, cached=0)
    assert outcome.failed == "AssertionError: 3 local blocks <= 2 remote blocks"


def test_vllm_50558_one_more_block_behind_a_cached_prefix_is_silent() -> None:
    # 31 of 32 blocks cached: [b30, b31] land where b31 and the sampled token belong.
    outcome = one_longer(pd.vllm.suffix_trim, size=64, prompt=2048, cached=1984)
    assert (outcome.loaded, outcome.wrong, outcome.tainted) == (64, 64, 1)


@pytest.mark.parametrize(
    ("size", "prompt", "cached"),
    [(16, 32, 0), (64, 2048, 1984)],
    ids=["nothing cached", "31 of 32"],
)
def test_vllm_50558_by_ranges(size: int, prompt: int, cached: int) -> None:
    outcome = one_longer(pd.RangePlan(), size=size, prompt=prompt, cached=cached)
    assert right(outcome) == (prompt - cached, 1)


def test_vllm_48758_push_writes_the_first_blocks_behind_the_cached_prefix() -> None:
    held = pd.Engine("P").compute(range(64))
    outcome = pd.transfer(held, pd.Engine("D"), range(64), cached=32, rule=pd.vllm.head_trim)
    assert (outcome.loaded, outcome.wrong) == (32, 32)


def test_vllm_48758_by_ranges() -> None:
    held = pd.Engine("P").compute(range(64))
    outcome = pd.transfer(held, pd.Engine("D"), range(64), cached=32, rule=pd.RangePlan())
    assert right(outcome) == (32, 0)


def test_vllm_34616_a_rounded_length_claims_a_token_without_kv() -> None:
    # 894 tokens have KV and fill 56 blocks: rounded up that is 896, and the prompt has 895.
    held = pd.Engine("P").compute(range(895), num_computed=894)
    rule = pd.vllm.SuffixTrim(rounded=True)
    outcome = pd.transfer(held, pd.Engine("D"), range(895), rule=rule)
    assert (outcome.loaded, outcome.wrong, outcome.unwritten) == (895, 1, 1)


def test_vllm_52617_scheduler_and_worker_differ_by_one() -> None:
    held = pd.Engine("P").compute(range(895), num_computed=894)
    rule = pd.lmcache.CountedHit()
    outcome = pd.transfer(held, pd.Engine("D"), range(895), rule=rule)
    assert rule.lengths == [(894, 895)]
    assert (outcome.loaded, outcome.wrong, outcome.unwritten) == (895, 1, 1)


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("num_computed", [894, 895])
def test_vllm_34616_and_52617_by_ranges(num_computed: int, keep_last: int) -> None:
    held = pd.Engine("P").compute(range(895), num_computed=num_computed)
    rule = pd.RangePlan(keep_last=keep_last)
    loaded = min(num_computed, 895 - keep_last)
    outcome = pd.transfer(held, pd.Engine("D"), range(895), rule=rule)
    assert right(outcome) == (loaded, 895 - loaded)
    (plan,) = rule.plans
    assert plan.compute.tolist() == ([[loaded, 895]] if loaded < 895 else [])


def decode_steps(tracker: pd.lmcache.Tracker, prompt: int, steps: int) -> int:
    """Asynchronous scheduling: the counter counts the step in flight, whose id is not there yet."""
    ids, counter = list(range(prompt)), 0
    tracker.update(counter, prompt, ids)
    counter += prompt
    for step in range(steps):
        tracker.update(counter, 1, ids)
        counter += 1
        ids.append(900 + step)
    return len(tracker.ids) - prompt


def test_lmcache_2821_what_is_decoded_is_never_tracked() -> None:
    assert decode_steps(pd.lmcache.Tracker(), prompt=20, steps=100) == 0


def test_lmcache_2821_clamped_follows_one_step_behind() -> None:
    assert decode_steps(pd.lmcache.Tracker(clamped=True), prompt=20, steps=100) == 99


def test_lmcache_2821_the_ledger_follows_ids_behind_the_counter() -> None:
    engine = pd.Engine("D", block_size=4)
    index = kvtrie.RadixIndex(num_blocks=4096, block_size=4)
    ledger = kvtrie.SequenceLedger(block_size=4)
    ids, counter = list(range(20)), 0
    table = engine.allocate(20 + 101)
    slots = engine.pool.slots(table)
    seq = kvtrie.TokenSequence(ids, engine.namespace)
    ledger.begin("r", seq, table)
    ledger.step(["r"], [20], [counter], [], [0, 0])
    counter += 20
    new: list[int] = []
    for step in range(100):
        ledger.step(["r"], [1], [counter], new, [0, len(new)])
        ids += new
        counter += 1
        new = [900 + step]
        start, end = ledger.final_range("r")
        assert (start, end) == (0, 20 + max(step, 0))
    # All steps have run by now: the KV of every id but the last.
    engine.pool.compute(slots, ids, engine.chain(ids), 0, len(ids), root=engine.root)
    start, end = ledger.final_range("r")
    assert (end - 20, len(ids) - 20) == (99, 99)
    assert [engine.pool.token[slot] for slot in slots[:end]] == ids
    done = ledger.commit("r", index)
    assert len(done.blocks) == end // 4
    ledger.finish("r", index)
    index.check()


def resumed(tracker: pd.lmcache.Tracker) -> int:
    """40 tokens tracked, preempted, resumed with 16 computed: how many ids get a wrong slot."""
    engine = pd.Engine("D")
    ids = list(range(40))
    tracker.update(0, 40, ids)
    tracker.update(16, 24, ids)
    return tracker.wrong(engine.compute(ids))


@pytest.mark.parametrize("clamped", [False, True], ids=["counter", "clamped"])
def test_lmcache_2929_a_resumed_request_tracks_ids_twice(*, clamped: bool) -> None:
    assert resumed(pd.lmcache.Tracker(clamped=clamped)) == 24


def test_lmcache_2929_the_ledger_rolls_back() -> None:
    engine = pd.Engine("D")
    ledger = kvtrie.SequenceLedger(block_size=16)
    ids = list(range(40))
    held = engine.compute(ids)
    ledger.begin("r", kvtrie.TokenSequence(ids, engine.namespace), held.blocks, num_computed=40)
    gone = ledger.rollback("r", 16, drop_blocks=True)
    assert gone.ranges.tolist() == [[16, 40]]
    assert gone.blocks.tolist() == held.blocks[1:]
    assert ledger.final_range("r") == (0, 16)
    assert ledger.missing("r").tolist() == [[16, 40]]
    engine.allocator.free(gone.blocks)
    more = engine.allocate(24)
    ledger.add_blocks("r", more)
    ledger.schedule("r", 24)
    table = ledger.blocks("r").tolist()
    engine.pool.compute(engine.pool.slots(table), ids, engine.chain(ids), 16, 40, root=engine.root)
    ledger.confirm("r", 40)
    assert ledger.final_range("r") == (0, 40)
    assert len(ledger.sequence("r")) == 40
    slots = engine.pool.slots(ledger.blocks_for("r", 0, 40).tolist())
    assert [engine.pool.token[slot] for slot in slots[:40]] == ids


def test_lmcache_2929_a_full_hit_minus_one_fails_an_assertion() -> None:
    with pytest.raises(pd.PeerError, match="num_computed_tokens is 47, expected 48"):
        pd.lmcache.check_resumed(47, num_stored=48, num_cached=0)


def test_lmcache_2929_the_ledger_has_one_length() -> None:
    held = pd.Engine("P").compute(range(48))
    rule = pd.RangePlan(keep_last=1)
    outcome = pd.transfer(held, pd.Engine("D"), range(48), rule=rule)
    assert right(outcome) == (47, 1)
    engine, (plan,) = pd.Engine("D"), rule.plans
    ledger = kvtrie.SequenceLedger(block_size=16)
    seq = kvtrie.TokenSequence(list(range(48)), engine.namespace)
    ledger.begin("r", seq, engine.allocate(48), source=plan.source, missing=plan.missing)
    assert ledger.final_range("r") == (0, 47)
    assert ledger.missing("r").tolist() == [[47, 48]]


def letters(text: str, size: int) -> list[int]:
    """A text whose letters are chunks of so many tokens."""
    return [100 * ord(letter) + offset for letter in text for offset in range(size)]


@pytest.mark.parametrize("size", [1, 16])
def test_llamacpp_12161_the_second_removal_takes_what_is_needed(size: int) -> None:
    # c and d go, then g: h and j, two chunks, were shifted and are removed by their old index.
    engine = pd.Engine()
    held = engine.compute(letters("abcdefghj", size))
    prompt = letters("abefhj", size)
    outcome = pd.transfer(held, engine, prompt, rule=pd.llamacpp.shift_reuse)
    assert outcome.loaded == len(prompt)
    assert (outcome.wrong, outcome.unwritten) == (2 * size, 2 * size)


def test_llamacpp_12161_shifting_the_chunk_alone_is_right() -> None:
    engine = pd.Engine()
    held = engine.compute(letters("abcdefghj", 1))
    rule = pd.llamacpp.ShiftReuse(shift_all=False)
    assert right(pd.transfer(held, engine, letters("abefhj", 1), rule=rule)) == (6, 0)


@pytest.mark.parametrize(
    ("policy", "loaded"), [(kvtrie.EXACT_ONLY, 32), (MOVING, 96)], ids=["exact only", "approximate"]
)
def test_llamacpp_12161_by_ranges(policy: kvtrie.ReusePolicy, loaded: int) -> None:
    engine = pd.Engine()
    held = engine.compute(letters("abcdefghj", 16))
    rule = pd.RangePlan(policy)
    outcome = pd.transfer(held, engine, letters("abefhj", 16), rule=rule)
    assert right(outcome) == (loaded, 96 - loaded)
    deltas: Iterable[int] = {pair["delta"] for pair in rule.plans[0].pairs}
    assert sorted(deltas) == ([-48, -32, 0] if policy is MOVING else [0])
