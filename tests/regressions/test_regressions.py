"""Bugs that were fixed, each with its smallest input, through the public API."""

from __future__ import annotations

import numpy as np
import pytest

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def test_empty_span_does_not_name_a_kind() -> None:
    index = kvtrie.RadixIndex(num_blocks=4, block_size=2)
    before = index.kinds
    index.tag(kvtrie.TokenSequence([1, 2], SPACE), [kvtrie.Span(1, 1, "mine")])
    assert index.kinds == before


def test_block_that_the_index_got_elsewhere_is_not_allocated_twice() -> None:
    pool = kvtrie.BlockAllocator(4)
    index = kvtrie.RadixIndex(num_blocks=4, block_size=1)
    pool.allocate(3)
    index.insert(
        kvtrie.TokenSequence([1, 2, 3], SPACE), [0, 1, 3], num_computed=3, source=kvtrie.COMPUTED
    )
    with pytest.raises(ValueError, match="was not handed out here"):
        pool.allocate(4, evict_from=index)
    ids = pool.allocate(3, evict_from=index)
    assert len(np.unique(ids)) == 3


def test_block_in_place_of_a_discarded_pinned_one_is_pinned() -> None:
    index = kvtrie.RadixIndex(num_blocks=8, block_size=1)
    seq = kvtrie.TokenSequence([1, 2], SPACE)
    with index.plan(seq) as plan:
        index.insert(seq, [0, 1], num_computed=2, source=plan)
        index.discard([1])
        index.insert(seq, [0, 2], num_computed=2, source=plan)
        assert index.num_evictable == 0
        index.check()


def _drafting() -> kvtrie.SequenceLedger:
    """A request of ten tokens, all computed, and one that was sampled."""
    ledger = kvtrie.SequenceLedger(block_size=4)
    ledger.begin("a", kvtrie.TokenSequence(np.arange(10), SPACE), np.arange(10))
    ledger.schedule("a", 10)
    ledger.confirm("a", 10)
    ledger.append("a", [100])
    return ledger


def test_drafts_after_refused_drafts_are_not_final() -> None:
    # The issued length did not decrease with the claim, so the next drafts were sought too far on.
    ledger = _drafting()
    ledger.schedule("a", 4, num_drafts=3)
    ledger.confirm("a", 14)
    ledger.append("a", [101])
    ledger.confirm("a", 11)
    with pytest.raises(ValueError, match="14, but only the positions below 11"):
        ledger.confirm("a", 14)
    ledger.schedule("a", 4, num_drafts=3)
    assert ledger.lookahead("a") == (11, 15)
    ledger.confirm("a", 15)
    ledger.append("a", [102])
    assert ledger.final_range("a") == (0, 12)


def test_what_is_issued_does_not_run_away_from_refused_drafts() -> None:
    ledger = _drafting()
    for position in range(11, 25):
        ledger.schedule("a", 4, num_drafts=3)
        ledger.append("a", [position])
        ledger.confirm("a", position)
        assert ledger.lookahead("a") == (position, position)


def test_drafts_after_a_step_without_drafts_are_not_final() -> None:
    # Three steps under way with 3, 0 and 3 drafts: the last ones were moved to the position of the
    # second step's id, and counted as verified when it came.
    ledger = kvtrie.SequenceLedger(block_size=16)
    ledger.begin("a", kvtrie.TokenSequence([1, 2, 3, 4], SPACE), [0, 1])
    for scheduled, computed, ids, drafts in ((4, 0, [], 0), (4, 4, [10], 3), (1, 8, [], 0)):
        ledger.step(["a"], [scheduled], [computed], ids, [0, len(ids)], num_drafts=[drafts])
    ledger.step(["a"], [4], [9], [], [0, 0], num_drafts=[3])
    for token, counter in ((11, 10), (12, 10), (13, 7)):
        ledger.append("a", [token])
        ledger.confirm("a", counter)
    assert ledger.final_range("a") == (0, 7)


def test_what_a_live_request_has_committed_is_not_evicted() -> None:
    index, pool = kvtrie.RadixIndex(num_blocks=4, block_size=4), kvtrie.BlockAllocator(4)
    ledger = kvtrie.SequenceLedger(block_size=4)
    ledger.begin("a", kvtrie.TokenSequence(np.arange(9), SPACE), pool.allocate(3), num_computed=9)
    ledger.commit("a", index)
    with pytest.raises(kvtrie.OutOfBlocksError):
        pool.allocate(2, evict_from=index)
    pool.free(ledger.finish("a", index).surplus)
    assert len(pool.allocate(4, evict_from=index)) == 4


def test_a_ledger_takes_no_plan_that_holds_nothing() -> None:
    index = kvtrie.RadixIndex(num_blocks=16, block_size=4)
    first = kvtrie.TokenSequence(np.arange(16), SPACE)
    index.insert(first, np.arange(4), num_computed=16, source=kvtrie.COMPUTED)
    seq = kvtrie.TokenSequence([*range(16), 99, 98], SPACE)
    ledger = kvtrie.SequenceLedger(block_size=4)
    plan = index.plan(seq, pin=False)
    with pytest.raises(ValueError, match="the plan pins nothing, so its 4 blocks in place"):
        ledger.begin("a", seq, [*plan.blocks, 15], source=plan)
    plan.release()
    plan = index.plan(seq)
    ledger.begin("a", seq, [*plan.blocks, 15], source=plan)
    plan.release()
    with pytest.raises(kvtrie.StaleHandleError, match="released already"):
        kvtrie.TransferManifest.from_ledger(ledger, "a", key=b"k" * 32)
    assert ledger.finish("a", index).surplus.tolist() == [15]


def test_a_request_whose_hash_fails_is_not_lost() -> None:
    class Request:
        fails = False

        def __hash__(self) -> int:
            if self.fails:
                raise RuntimeError("hash")
            return 5

    index = kvtrie.RadixIndex(num_blocks=8, block_size=4)
    ledger, request = kvtrie.SequenceLedger(block_size=4), Request()
    seq = kvtrie.TokenSequence(np.arange(5), SPACE)
    ledger.begin(request, seq, [0, 1], num_computed=5)
    request.fails = True
    for end in (ledger.forget, lambda name: ledger.finish(name, index)):
        with pytest.raises(RuntimeError, match="hash"):
            end(request)
        assert (len(ledger), index.stats().indexed) == (1, 0)
    request.fails = False
    assert ledger.finish(request, index).surplus.tolist() == [1]


def test_commits_after_a_longer_cached_path_hold_one_plan() -> None:
    # The plan of a commit was longer than the table, so all plans before it were kept.
    index = kvtrie.RadixIndex(num_blocks=16, block_size=4)
    index.insert(
        kvtrie.TokenSequence(np.arange(32), SPACE),
        np.arange(8),
        num_computed=32,
        source=kvtrie.COMPUTED,
    )
    ledger = kvtrie.SequenceLedger(block_size=4)
    ledger.begin("a", kvtrie.TokenSequence(np.arange(32), SPACE), np.arange(8, 16))
    ledger.schedule("a", 32)
    for computed in range(4, 28, 4):
        ledger.confirm("a", computed)
        ledger.commit("a", index)
        assert index.stats().live_plans == 1
    ledger.finish("a", index)
    assert index.stats().live_plans == 0


def test_text_after_another_image_in_the_first_block_is_a_moved_run() -> None:
    # Placeholders of both images are the same ids: the block was taken for the prompt's own prefix,
    # in which the search does not look, but from which nothing can be taken in place.
    ids = [9, 9, *range(100, 114)]
    index = kvtrie.RadixIndex(num_blocks=4, block_size=16, min_run=8)
    cached = kvtrie.TokenSequence(ids, SPACE, items=[kvtrie.Item(0, 2, b"first")])
    index.insert(cached, [0], num_computed=16, source=kvtrie.COMPUTED)
    prompt = kvtrie.TokenSequence([*ids, 7], SPACE, items=[kvtrie.Item(0, 2, b"second")])
    with index.plan(prompt, kvtrie.ReusePolicy(scope="namespace")) as plan:
        assert (plan.num_exact, plan.num_approximate, plan.num_compute) == (0, 14, 3)
        assert plan.segments["delta"].tolist() == [0, 0, 0]
