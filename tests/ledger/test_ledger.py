"""What SequenceLedger promises, one situation per test. Positions are worked out by hand."""

from __future__ import annotations

import gc
import re
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from tests.together import together

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt="ledger")
BLOCK = 4


def sequence(num_tokens: int, first: int = 0) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(np.arange(first, first + num_tokens), SPACE)


def begun(num_tokens: int, num_blocks: int, **how: Any) -> kvtrie.SequenceLedger:
    """A ledger with the request "a" over tokens 0, 1, ... and blocks 0, 1, ..."""
    ledger = kvtrie.SequenceLedger(BLOCK)
    ledger.begin("a", sequence(num_tokens), list(range(num_blocks)), **how)
    return ledger


def dump(ledger: kvtrie.SequenceLedger, request: object = "a") -> tuple[object, ...]:
    return (
        ledger.sequence(request)[:].tolist(),
        ledger.final_range(request),
        ledger.new_range(request),
        ledger.lookahead(request),
        ledger.missing(request).tolist(),
        ledger.blocks(request).tolist(),
        ledger.labels(request).tolist(),
        ledger.spans(request),
        len(ledger),
    )


def step(
    ledger: kvtrie.SequenceLedger, scheduled: int, computed: int, ids: Any, **more: Any
) -> None:
    ledger.step(["a"], [scheduled], [computed], ids, [0, len(ids)], **more)


def test_prompt_in_chunks_then_decode() -> None:
    ledger = begun(10, 3)
    step(ledger, 4, 0, [])
    assert (ledger.final_range("a"), ledger.lookahead("a")) == ((0, 0), (0, 4))
    step(ledger, 4, 4, [])
    assert (ledger.final_range("a"), ledger.lookahead("a")) == ((0, 4), (4, 8))
    step(ledger, 2, 8, [])
    # The prompt is computed and a token sampled, which has no KV until the next step ends.
    step(ledger, 1, 10, [70])
    assert ledger.final_range("a") == (0, 10)
    assert ledger.missing("a").tolist() == [[10, 11]]
    step(ledger, 1, 11, [71])
    assert ledger.final_range("a") == (0, 11)
    assert len(ledger.sequence("a")) == 12
    assert ledger.blocks_for("a", 0, 11).tolist() == [0, 1, 2]
    assert ledger.blocks_for("a", 4, 8).tolist() == [1]
    assert ledger.blocks_for("a", 3, 5).tolist() == [0, 1]
    assert ledger.blocks_for("a", 5, 5).tolist() == []


def test_counter_that_runs_ahead_of_the_ids_waits_for_them() -> None:
    """LMCache #2821: in decode ids come late; a slice up to the counter is empty for ever."""
    ledger, index = begun(8, 5), kvtrie.RadixIndex(8, BLOCK)
    step(ledger, 8, 0, [])
    step(ledger, 1, 8, [])
    saved = 0
    for at in range(8):
        # The counter says 9 + at tokens, the sequence has 8 + at.
        step(ledger, 1, 9 + at, [])
        assert ledger.final_range("a") == (0, 8 + at)
        ledger.append("a", [50 + at])
        assert ledger.final_range("a") == (0, 9 + at)
        saved += len(ledger.commit("a", index).blocks)
    assert saved == 4
    assert index.lookup(ledger.sequence("a")).num_tokens == 16


def test_placeholders_are_left_out_until_their_ids_come() -> None:
    ledger = begun(4, 3)
    step(ledger, 4, 0, [])
    step(ledger, 1, 4, [-1])
    assert len(ledger.sequence("a")) == 4
    step(ledger, 1, 5, np.array([9, -1], dtype=np.int32))
    assert ledger.sequence("a")[:].tolist() == [0, 1, 2, 3, 9]
    assert ledger.final_range("a") == (0, 5)
    ledger.append("a", [-1, -1])
    assert len(ledger.sequence("a")) == 5
    with pytest.raises(ValueError, match=r"ids\[1\] is a placeholder \(-1\).*follows it at 2"):
        ledger.append("a", [5, -1, 6])


@pytest.mark.parametrize("accepted", range(4))
def test_drafts_count_once_ids_and_a_claim_have_come(accepted: int) -> None:
    ledger = begun(4, 4)
    step(ledger, 4, 0, [])
    step(ledger, 4, 4, [50], num_drafts=[3])
    # One token that is final, at 4, and three drafts after it; the engine counts them all.
    ledger.confirm("a", 8)
    assert ledger.final_range("a") == (0, 5)
    ledger.append("a", list(range(60, 61 + accepted)))
    # The ids are known; the next counter says which KV is theirs.
    assert ledger.final_range("a") == (0, 5)
    assert ledger.missing("a").tolist() == [[5, 6 + accepted]]
    step(ledger, 1, 5 + accepted, [])
    assert ledger.final_range("a") == (0, 5 + accepted)
    assert ledger.missing("a").tolist() == [[5 + accepted, 6 + accepted]]


def test_drafts_of_a_step_under_way_are_after_the_ids_that_arrived() -> None:
    ledger = begun(4, 6)
    step(ledger, 4, 0, [])
    step(ledger, 4, 4, [50], num_drafts=[3])
    # The next step is issued before the accepted drafts are known: 9 to 11 are drafts too.
    step(ledger, 4, 8, [-1], num_drafts=[3])
    assert ledger.final_range("a") == (0, 5)
    # None was: one id, and the counter decreases by three. The step under way is really at 5.
    step(ledger, 4, 9, [60], num_drafts=[3])
    assert ledger.final_range("a") == (0, 6)
    ledger.append("a", [61])
    # 6 holds the KV of a draft that was perhaps refused.
    assert ledger.final_range("a") == (0, 6)
    step(ledger, 1, 10, [])
    assert ledger.final_range("a") == (0, 7)


def test_draft_claims_in_one_step_with_their_ids() -> None:
    ledger = begun(4, 4)
    step(ledger, 4, 0, [])
    step(ledger, 3, 4, [50], num_drafts=[2])
    step(ledger, 3, 6, [60, 61], num_drafts=[2])
    assert ledger.final_range("a") == (0, 6)
    assert ledger.lookahead("a") == (6, 9)


def test_preemption_drops_computed_kv_and_keeps_the_ids() -> None:
    ledger = begun(10, 4, num_computed=10)
    ledger.append("a", [1, 2])
    ledger.schedule("a", 1)
    back = ledger.rollback("a", to=5, drop_blocks=True)
    assert (back.ranges.tolist(), back.blocks.tolist()) == ([[5, 10]], [2, 3])
    assert ledger.missing("a").tolist() == [[5, 12]]
    assert ledger.blocks("a").tolist() == [0, 1]
    with pytest.raises(
        ValueError, match="up to 9 would be issued, the 2 blocks of 4 tokens end at 8"
    ):
        ledger.schedule("a", 4)
    ledger.add_blocks("a", [7])
    ledger.schedule("a", 7)
    ledger.confirm("a", 12)
    assert ledger.final_range("a") == (0, 12)


def test_preemption_to_the_start_drops_every_block() -> None:
    ledger = begun(6, 2, num_computed=6)
    back = ledger.rollback("a", to=0, drop_blocks=True)
    assert back.blocks.tolist() == [0, 1]
    assert (ledger.final_range("a"), ledger.lookahead("a")) == ((0, 0), (0, 0))
    assert ledger.forget("a").tolist() == []


def test_preemption_after_a_commit_is_finish_and_begin() -> None:
    index, ledger = kvtrie.RadixIndex(8, BLOCK), begun(10, 3, num_computed=10)
    seq = ledger.sequence("a")
    assert ledger.commit("a", index).blocks.tolist() == [0, 1]
    before = dump(ledger)
    with pytest.raises(ValueError, match="to is 7, but blocks of the first 8 tokens are committed"):
        ledger.rollback("a", to=7)
    assert dump(ledger) == before
    assert ledger.finish("a", index).surplus.tolist() == [2]
    plan = index.plan(seq)
    ledger.begin("a", seq, [*plan.blocks, 5], source=plan)
    assert (ledger.final_range("a"), ledger.new_range("a")) == ((0, 8), (8, 8))
    assert ledger.missing("a").tolist() == [[8, 10]]
    ledger.finish("a", index)


def test_rollback_below_what_was_issued_is_no_claim() -> None:
    ledger = begun(8, 3)
    ledger.schedule("a", 8)
    ledger.confirm("a", 2)
    assert ledger.rollback("a", to=6).ranges.tolist() == []
    assert (ledger.final_range("a"), ledger.lookahead("a")) == ((0, 2), (2, 6))


def test_filled_gap_joins_the_segment_after_it() -> None:
    ledger = begun(20, 5, missing=np.array([[3, 5], [9, 10], [18, 20]]))
    assert ledger.final_range("a") == (0, 3)
    ledger.schedule("a", 3)
    assert ledger.lookahead("a") == (3, 18)
    ledger.confirm("a", 4)
    assert ledger.final_range("a") == (0, 4)
    ledger.confirm("a", 5)
    assert ledger.final_range("a") == (0, 9)
    assert ledger.missing("a").tolist() == [[9, 10], [18, 20]]
    ledger.confirm("a", 10)
    assert ledger.final_range("a") == (0, 18)
    assert ledger.rollback("a", to=4).ranges.tolist() == [[4, 18]]


def test_rollback_names_segments_after_gaps_too() -> None:
    ledger = begun(20, 5, missing=[(3, 5), (9, 10)])
    assert ledger.rollback("a", to=2).ranges.tolist() == [[2, 3], [5, 9], [10, 20]]
    assert ledger.missing("a").tolist() == [[2, 20]]


PLAN_INDEX = kvtrie.RadixIndex(8, BLOCK)
CONTRADICTIONS = [
    (lambda led: led.confirm("a", 3), "num_computed is 3, below the 4 tokens"),
    (lambda led: led.confirm("a", 7), "num_computed is 7, but only the positions below 6"),
    (
        lambda led: led.schedule("a", 7),
        "up to 13 would be issued, the 3 blocks of 4 tokens end at 12",
    ),
    (lambda led: led.schedule("a", 1, num_drafts=2), "2 drafts are more than the 1 tokens"),
    (lambda led: led.rollback("a", to=7), "to is 7, but only the positions below 6 were issued"),
    (
        lambda led: led.rollback("a", to=3),
        "to is 3, but blocks of the first 4 tokens are committed",
    ),
    (lambda led: led.append("a", [-1, 5]), r"placeholder \(-1\), but a final id follows it at 1"),
    (
        lambda led: led.append("a", [1 << 32]),
        r"ids\[0\] is 4294967296; it must be in \[-1, 4294967295\]",
    ),
    (lambda led: led.append("a", [1, -2]), r"ids\[1\] is -2"),
    (
        lambda led: led.blocks_for("a", 0, 5),
        r"start and end are 0 and 5; the range must ascend and lie in \[0, 4\]",
    ),
    (lambda led: led.blocks_for("a", 2, 1), "start and end are 2 and 1"),
    (
        lambda led: led.tag("a", [kvtrie.Span(0, 6, "user")]),
        r"\[0, 6\); it must ascend and lie in \[0, 5\], the final tokens",
    ),
    (lambda led: led.begin("a", sequence(2), [9]), "the request is live already"),
    (
        lambda led: led.begin("b", led.sequence("a"), [9]),
        "another request .* has this sequence of 5",
    ),
    (
        lambda led: led.begin("b", sequence(2), [9], num_computed=3),
        r"num_computed is 3; it must be in \[0, 2\]",
    ),
    (
        lambda led: led.begin("b", sequence(6), [9], num_computed=5),
        "position 5, the 1 blocks of 4 .* end at 4",
    ),
    (
        lambda led: led.begin("b", sequence(6), [9], missing=[(0, 7)]),
        r"missing has \[0, 7\); it must ascend and lie in \[0, 6\]",
    ),
    (
        lambda led: led.begin("b", sequence(6), [8, 9], missing=[(2, 4), (3, 5)]),
        r"missing has \[3, 5\) after a range that ends at 4",
    ),
    (
        lambda led: led.begin("b", sequence(6), [8, 9], missing=[(2, 4)], num_computed=2),
        r"num_computed is 2 and missing is given",
    ),
    (
        lambda led: led.commit("a", kvtrie.RadixIndex(8, 16)),
        "the index has blocks of 16 tokens, the ledger of 4",
    ),
    (
        lambda led: led.finish("a", kvtrie.RadixIndex(8, 16)),
        "the index has blocks of 16 tokens, the ledger of 4",
    ),
    (lambda led: led.commit("a", kvtrie.RadixIndex(1, BLOCK)), "the plan belongs to another index"),
    (lambda led: step(led, 1, 7, []), "num_computed is 7, but only the positions below 6"),
    (
        lambda led: step(led, 7, 6, []),
        "up to 13 would be issued, the 3 blocks of 4 tokens end at 12",
    ),
    (lambda led: step(led, 1, 5, [8, -1, 8]), r"ids\[1\] is a placeholder"),
    (lambda led: step(led, 1, 5, [], num_drafts=[2]), "2 drafts are more than the 1 tokens"),
    (
        lambda led: led.step(["a", "a"], [0, 0], [5, 5], [], [0, 0, 0]),
        "the request at 1 came before",
    ),
    (
        lambda led: led.step(["a"], [0, 0], [5], [], [0, 0]),
        "num_scheduled has 2 items; 1 requests need 1",
    ),
    (
        lambda led: led.step(["a"], [0], [5], [1], [0, 0]),
        "offsets go from 0 to 0; they must ascend from 0 to the 1",
    ),
    (lambda led: led.step(["a"], [0], [5], [], [0]), "offsets has 1 items; 1 requests need 2"),
    (lambda led: led.step(["a"], [0], [5], [], [0, 0], num_drafts=[]), "num_drafts has 0 items"),
    (
        lambda led: led.sequence("a").extend([1]),
        "a request of a SequenceLedger has this sequence of 5",
    ),
    (
        lambda led: led.sequence("a").truncate(1),
        "a request of a SequenceLedger has this sequence of 5",
    ),
]


@pytest.mark.parametrize(("call", "message"), CONTRADICTIONS)
def test_contradiction_names_both_numbers_and_changes_nothing(call: Any, message: str) -> None:
    ledger = begun(5, 3)
    ledger.schedule("a", 6)
    ledger.confirm("a", 4)
    ledger.commit("a", kvtrie.RadixIndex(8, BLOCK))
    ledger.tag("a", [kvtrie.Span(0, 2, "user")])
    before = dump(ledger)
    with pytest.raises(ValueError, match=message):
        call(ledger)
    assert dump(ledger) == before
    assert "b" not in ledger


def test_duplicate_blocks_are_refused() -> None:
    ledger = begun(5, 3)
    before = dump(ledger)
    for blocks in ([2], [8, 8], [*range(10, 20), 1]):
        with pytest.raises(kvtrie.BlockInUseError, match="comes twice in the table"):
            ledger.add_blocks("a", blocks)
    with pytest.raises(kvtrie.BlockInUseError, match="block 4 comes twice"):
        ledger.begin("b", sequence(2), [4, 4])
    assert dump(ledger) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda led, _index: led.schedule("gone", 1),
        lambda led, _index: led.append("gone", [1]),
        lambda led, _index: led.confirm("gone", 0),
        lambda led, _index: led.step(["a", "gone"], [0, 0], [0, 0], [], [0, 0, 0]),
        lambda led, _index: led.add_blocks("gone", [7]),
        lambda led, _index: led.rollback("gone", 0),
        lambda led, _index: led.tag("gone", []),
        lambda led, _index: led.spans("gone"),
        lambda led, _index: led.final_range("gone"),
        lambda led, _index: led.new_range("gone"),
        lambda led, _index: led.missing("gone"),
        lambda led, _index: led.lookahead("gone"),
        lambda led, _index: led.blocks("gone"),
        lambda led, _index: led.blocks_for("gone", 0, 0),
        lambda led, _index: led.labels("gone"),
        lambda led, _index: led.sequence("gone"),
        lambda led, _index: led.source("gone"),
        lambda led, _index: led.commit("gone", _index),
        lambda led, _index: led.finish("gone", _index),
        lambda led, _index: led.forget("gone"),
    ],
)
def test_request_that_is_not_live_is_a_stale_handle(call: Any) -> None:
    ledger, index = begun(5, 2), kvtrie.RadixIndex(8, BLOCK)
    ledger.begin("gone", sequence(3), [7])
    ledger.forget("gone")
    before = dump(ledger)
    with pytest.raises(kvtrie.StaleHandleError, match=r"\(request 'gone'\)"):
        call(ledger, index)
    assert dump(ledger) == before


def test_step_is_all_or_nothing_and_names_the_request() -> None:
    ledger = kvtrie.SequenceLedger(BLOCK)
    requests: list[Any] = [("user", 1), 2, "three", frozenset([4])]
    for number, request in enumerate(requests):
        ledger.begin(request, sequence(3), [number])
    none = np.zeros(4, dtype=np.int64)
    offsets = np.arange(5)
    for wrong in range(4):
        before = [dump(ledger, request) for request in requests]
        scheduled = none.copy()
        scheduled[wrong] = 9
        with pytest.raises(ValueError, match=re.escape(f"(request {requests[wrong]!r})")):
            ledger.step(requests, scheduled, none, np.arange(4), offsets)
        assert [dump(ledger, request) for request in requests] == before
    ledger.step(requests, none + 3, none, np.arange(4), offsets)
    assert [len(ledger.sequence(request)) for request in requests] == [4] * 4


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32, np.uint64, np.int16])
def test_step_takes_arrays_of_any_integer(dtype: type) -> None:
    ledger = begun(4, 2)
    one: np.ndarray = np.ones(1, dtype=dtype)
    ledger.step(["a"], one * 4, one * 0, one * 7, np.array([0, 1], dtype=dtype), num_drafts=one * 0)
    assert ledger.sequence("a")[:].tolist() == [0, 1, 2, 3, 7]
    ledger.step(("a",), (1,), (4,), (8,), (0, 1), num_drafts=(0,))
    assert ledger.final_range("a") == (0, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda led: led.step(["a"], [1.0], [0], [], [0, 0]),
        lambda led: led.step(["a"], np.ones(1), [0], [], [0, 0]),
        lambda led: led.step(["a"], [True], [0], [], [0, 0]),
        lambda led: led.step(5, [1], [0], [], [0, 0]),
        lambda led: led.schedule("a", True),
        lambda led: led.confirm("a", 1.0),
        lambda led: led.append("a", [True]),
        lambda led: led.append("a", 5),
        lambda led: led.begin([], sequence(1), [9]),
        lambda led: led.begin("b", sequence(1), [9], source="computed"),
        lambda led: led.begin("b", [1], [9]),
        lambda led: led.commit("a", None),
        lambda led: led.final_range([]),
    ],
)
def test_wrong_types_are_refused(call: Any) -> None:
    ledger = begun(5, 2)
    before = dump(ledger)
    with pytest.raises(TypeError):
        call(ledger)
    assert dump(ledger) == before


@pytest.mark.parametrize("block_size", [0, -1, 4097])
def test_block_size_has_limits(block_size: int) -> None:
    with pytest.raises(ValueError, match=str(block_size)):
        kvtrie.SequenceLedger(block_size)


@pytest.mark.parametrize("how", ["finish", "forget", "drop"])
def test_sequence_is_its_owners_again_at_the_end(how: str) -> None:
    ledger, index = begun(5, 2, num_computed=5), kvtrie.RadixIndex(8, BLOCK)
    seq = ledger.sequence("a")
    with pytest.raises(ValueError, match="SequenceLedger"):
        seq.extend([1])
    # Reading, planning and looking up are free.
    assert seq[4] == 4
    index.plan(seq).release()
    if how == "finish":
        ledger.finish("a", index)
    elif how == "forget":
        assert ledger.forget("a").tolist() == [0, 1]
    else:
        del ledger
        gc.collect()
    seq.extend([1])
    other = kvtrie.SequenceLedger(BLOCK)
    other.begin("b", seq, [0, 1], num_computed=6)
    assert other.sequence("b") is seq


def test_ledger_in_a_cycle_is_collected() -> None:
    class Key:
        """A request that knows its ledger."""

    key: Any = Key()
    key.ledger = kvtrie.SequenceLedger(BLOCK)
    seq = sequence(3)
    key.ledger.begin(key, seq, [1])
    with pytest.raises(ValueError, match="ledger"):
        seq.extend([1])
    del key
    gc.collect()
    seq.extend([1])
    assert len(seq) == 4


def test_request_without_a_repr_is_refused_all_the_same() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no name")

    ledger, odd = kvtrie.SequenceLedger(BLOCK), Odd()
    ledger.begin(odd, sequence(3), [1])
    with pytest.raises(ValueError, match="num_computed is 1"):
        ledger.confirm(odd, 1)
    assert odd in ledger


def test_commit_takes_exactly_what_is_new() -> None:
    index, ledger = kvtrie.RadixIndex(16, BLOCK), begun(10, 4)
    assert ledger.commit("a", index).blocks.tolist() == []
    step(ledger, 10, 0, [])
    ledger.confirm("a", 7)
    done = ledger.commit("a", index)
    assert (done.blocks.tolist(), done.num_exact, done.surplus.tolist()) == ([0], 4, [])
    assert ledger.new_range("a") == (4, 7)
    again = ledger.commit("a", index)
    assert (again.blocks.tolist(), again.num_exact) == ([], 4)
    ledger.confirm("a", 10)
    assert ledger.commit("a", index).blocks.tolist() == [1]
    done = ledger.finish("a", index)
    assert (done.blocks.tolist(), done.surplus.tolist()) == ([], [2, 3])


def test_commit_puts_the_blocks_that_were_there_first_into_the_table() -> None:
    index = kvtrie.RadixIndex(16, BLOCK)
    index.insert(sequence(8), [10, 11], num_computed=8, source=kvtrie.COMPUTED)
    ledger = begun(9, 3, num_computed=9)
    done = ledger.commit("a", index)
    assert (done.blocks.tolist(), done.duplicates.tolist()) == ([10, 11], [0, 1])
    assert ledger.blocks("a").tolist() == [10, 11, 2]
    assert ledger.blocks_for("a", 0, 9).tolist() == [10, 11, 2]
    assert ledger.forget("a").tolist() == [2]


def test_refused_insert_leaves_the_request_live() -> None:
    index = kvtrie.RadixIndex(16, BLOCK)
    index.insert(sequence(4, first=90), [1], num_computed=4, source=kvtrie.COMPUTED)
    ledger = begun(9, 3, num_computed=9)
    before, digest = dump(ledger), index.digest()
    for call in (ledger.commit, ledger.finish):
        with pytest.raises(kvtrie.BlockInUseError, match=r"blocks has 1, .*\(request 'a'\)"):
            call("a", index)
        assert (dump(ledger), index.digest()) == (before, digest)
    assert ledger.forget("a").tolist() == [0, 1, 2]


def test_spans_reach_the_index_with_their_blocks() -> None:
    index, ledger = kvtrie.RadixIndex(16, BLOCK), begun(10, 3)
    step(ledger, 10, 0, [])
    ledger.tag("a", [kvtrie.Span(1, 7, "reasoning")])
    ledger.confirm("a", 5)
    ledger.commit("a", index)
    seq = ledger.sequence("a")
    assert index.tags(seq) == [kvtrie.Span(1, 4, "reasoning")]
    ledger.confirm("a", 10)
    ledger.commit("a", index)
    assert index.tags(seq) == [kvtrie.Span(1, 7, "reasoning")]
    # Later tags reach the index without a new block.
    ledger.tag("a", [kvtrie.Span(0, 2, "user")])
    ledger.commit("a", index)
    assert kvtrie.Span(0, 2, "user") in index.tags(seq)
    assert ledger.spans("a") == [kvtrie.Span(1, 7, "reasoning"), kvtrie.Span(0, 2, "user")]


def moved() -> tuple[kvtrie.RadixIndex, kvtrie.TokenSequence, kvtrie.ReusePlan]:
    """8 tokens in place, 4 new, 12 moved from elsewhere, 2 new."""
    index = kvtrie.RadixIndex(32, BLOCK, min_run=8)
    index.insert(sequence(8), [0, 1], num_computed=8, source=kvtrie.COMPUTED)
    index.insert(sequence(12, first=100), [2, 3, 4], num_computed=12, source=kvtrie.COMPUTED)
    seq = kvtrie.TokenSequence([*range(8), 50, 51, 52, 53, *range(100, 112), 60, 61], SPACE)
    return index, seq, index.plan(seq, kvtrie.ReusePolicy(scope="namespace"))


def test_plan_says_what_is_missing_and_how_exact_the_rest_is() -> None:
    index, seq, plan = moved()
    ledger = kvtrie.SequenceLedger(BLOCK)
    ledger.begin("a", seq, [*plan.blocks, 10, 11, 12, 13, 14], source=plan)
    assert ledger.source("a") is plan
    assert ledger.new_range("a") == (8, 8)
    assert ledger.missing("a").tolist() == plan.gaps.tolist() == [[8, 12], [24, 26]]
    step(ledger, 6, 8, [])
    assert ledger.lookahead("a") == (8, 26)
    ledger.confirm("a", 12)
    assert ledger.final_range("a") == (0, 24)
    # From the first moved token on, with one hop; tokens computed after it have none.
    assert ledger.labels("a").tolist() == [(0, 12, 0, 0), (12, 24, 1, 1)]
    ledger.confirm("a", 26)
    assert ledger.labels("a").tolist() == [(0, 12, 0, 0), (12, 24, 1, 1), (24, 26, 1, 0)]
    done = ledger.finish("a", index)
    assert (done.num_exact, done.surplus.tolist()) == (12, [14])
    assert plan.released
    assert index.lookup(seq).num_tokens == 12


def test_plan_is_released_with_what_it_pins() -> None:
    for how in ("finish", "forget"):
        index, seq, plan = moved()
        ledger = kvtrie.SequenceLedger(BLOCK)
        ledger.begin("a", seq, [*plan.blocks, 10, 11, 12, 13, 14], source=plan)
        pinned = index.num_evictable
        if how == "finish":
            ledger.finish("a", index)
        else:
            assert ledger.forget("a").tolist() == [10, 11, 12, 13, 14]
        assert plan.released
        assert index.num_evictable > pinned


def test_plan_must_fit_the_request() -> None:
    _, seq, plan = moved()
    ledger = kvtrie.SequenceLedger(BLOCK)
    table = [*plan.blocks, 10, 11, 12, 13, 14]
    cases: list[tuple[str, kvtrie.SequenceLedger, kvtrie.TokenSequence, Any, dict[str, Any]]] = [
        ("blocks of 4 tokens, the ledger for 16", kvtrie.SequenceLedger(16), seq, table, {}),
        ("does not start with the 26 tokens", ledger, sequence(26), table, {}),
        (r"blocks\[1\] is 9, but the plan has block 1", ledger, seq, [0, 9, *table[2:]], {}),
        ("1 blocks for a plan that has 2", ledger, seq, [0], {}),
        ("position 24, the 5 blocks of 4 tokens end at 20", ledger, seq, table[:5], {}),
        ("a plan says itself", ledger, seq, table, {"num_computed": 4}),
        ("a plan says itself", ledger, seq, table, {"missing": []}),
    ]
    for message, book, tokens, blocks, more in cases:
        with pytest.raises(ValueError, match=message):
            book.begin("a", tokens, blocks, source=plan, **more)
        assert len(book) == 0
    seq.extend([1])
    plan.release()
    with pytest.raises(kvtrie.StaleHandleError, match="released already"):
        ledger.begin("a", seq, table, source=plan)


def test_ids_after_the_plan_are_missing() -> None:
    _, seq, plan = moved()
    seq.extend([62, 63, 64])
    ledger = kvtrie.SequenceLedger(BLOCK)
    ledger.begin("a", seq, [*plan.blocks, 10, 11, 12, 13, 14, 15], source=plan)
    assert ledger.missing("a").tolist() == [[8, 12], [24, 29]]
    ledger.forget("a")


def test_result_of_the_index_lowers_labels() -> None:
    index = kvtrie.RadixIndex(16, BLOCK)
    # Imported KV: exact up to 4, approximate after it.
    index.insert(sequence(8), [8, 9], num_computed=8, source=kvtrie.Imported(4, hops=3))
    ledger = begun(12, 3, num_computed=12, source=kvtrie.Imported(8, hops=2))
    assert ledger.labels("a").tolist() == [(0, 8, 0, 0), (8, 12, 1, 2)]
    done = ledger.commit("a", index)
    # The offered exact block replaces the approximate one, so nothing is lowered.
    assert (done.num_exact, done.freed.tolist()) == (8, [9])
    assert ledger.labels("a").tolist() == [(0, 8, 0, 0), (8, 12, 1, 2)]

    index = kvtrie.RadixIndex(16, BLOCK)
    ledger = begun(12, 3, num_computed=12)
    ledger.rollback("a", to=5)
    assert ledger.commit("a", index).num_exact == 4
    index.discard([0])
    index.insert(sequence(4), [8], num_computed=4, source=kvtrie.Imported(0, hops=1))
    step(ledger, 7, 5, [])
    ledger.confirm("a", 12)
    assert ledger.labels("a").tolist() == [(0, 12, 0, 0)]
    # The block of the first tokens is approximate by now, and so are the blocks taken after it.
    assert ledger.commit("a", index).num_exact == 0
    assert ledger.labels("a").tolist() == [(0, 12, 1, 0)]


def test_ledger_dropped_with_a_live_plan_warns_as_the_plan_does() -> None:
    index, seq, plan = moved()
    ledger = kvtrie.SequenceLedger(BLOCK)
    ledger.begin("a", seq, [*plan.blocks, 10, 11, 12, 13, 14], source=plan)
    del plan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del ledger
        gc.collect()
    assert [warning.category for warning in caught] == [ResourceWarning]
    assert index.num_evictable == 5


def test_memory_does_not_grow_over_requests() -> None:
    ledger, index = kvtrie.SequenceLedger(BLOCK), kvtrie.RadixIndex(64, BLOCK)

    def cycle(number: int) -> None:
        for request in range(20):
            seq = sequence(9)
            ledger.begin((number, request), seq, [2, 3, 4])
            ledger.step([(number, request)], [9], [0], [1], [0, 1])
            if request % 2:
                ledger.forget((number, request))
            else:
                ledger.finish((number, request), index)

    for number in range(50):
        cycle(number)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(50, 250):
            cycle(number)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(ledger) == 0
    assert grown < 20_000


def test_threads_on_one_ledger_lose_nothing() -> None:
    ledger, index = kvtrie.SequenceLedger(BLOCK), kvtrie.RadixIndex(4096, BLOCK)
    num_steps = 40

    def engine(number: int) -> None:
        names = [(number, at) for at in range(300)]
        for name in names:
            first = (number * 300 + name[1]) * 3
            seq = sequence(4, first=first)
            ledger.begin(name, seq, [first, first + 1, first + 2])
        counter = np.zeros(300, dtype=np.int64)
        ledger.step(names, counter + 4, counter, [], np.zeros(301, dtype=np.int64))
        for at in range(num_steps):
            if at < 8:
                ids = np.full(300, at)
                ledger.step(names, counter + 1, counter + 4 + at, ids, np.arange(301))
            ledger.final_range(names[at])
            if at % 10 == 0:
                ledger.commit(names[at], index)
        for name in names:
            assert ledger.final_range(name) == (0, 11)
            ledger.finish(name, index)

    together(engine)
    assert len(ledger) == 0
    assert index.stats().indexed == 4 * 300 * 2
    index.check()


def test_threads_that_begin_the_same_request_do_it_once() -> None:
    ledger = kvtrie.SequenceLedger(BLOCK)
    seqs = [sequence(4) for _ in range(8)]
    won: list[int] = []

    def begin(at: int) -> None:
        try:
            ledger.begin("a", seqs[at], [at])
        except ValueError:
            seqs[at].extend([1])
        else:
            won.append(at)

    together(begin, len(seqs))
    assert len(won) == len(ledger) == 1
    assert ledger.sequence("a") is seqs[won[0]]
