"""Several threads on one index, one sequence, one plan: no inconsistent result, no lost block."""

from __future__ import annotations

import sys
import threading
import time
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.together import together

import kvtrie
from kvtrie import COMPUTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
THREADS = 4


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_index_requests_in_threads_lose_no_block() -> None:
    num_blocks, size = 64, 2
    index, pool = kvtrie.RadixIndex(num_blocks, size), kvtrie.BlockAllocator(num_blocks)
    refused = [0] * THREADS

    def requests(number: int) -> None:
        rng = Random(number)
        for _ in range(4_000):
            ids = [rng.randrange(2) for _ in range(rng.randint(0, 24))]
            seq = kvtrie.TokenSequence(ids, NS)
            with index.plan(seq) as plan:
                try:
                    fresh = pool.allocate(plan.num_new_blocks, evict_from=index)
                except kvtrie.OutOfBlocksError:
                    refused[number] += 1
                    continue
                assert plan.validate().all()
                table = [*plan.blocks.tolist(), *fresh.tolist()]
                done = index.insert(seq, table, num_computed=len(seq), source=plan)
                assert done.num_exact == len(ids) // size * size
                match = index.lookup(seq)
                assert match.num_tokens == done.num_exact
                assert match.blocks.tolist() == done.blocks.tolist()
                for gone in (done.duplicates, done.surplus, done.freed):
                    pool.free(gone)
            pool.free(index.take_freed())

    together(requests)
    index.check()
    stats = index.stats()
    assert (stats.live_plans, stats.pinned, stats.condemned) == (0, 0, 0)
    assert pool.num_free + stats.indexed + stats.waiting == num_blocks
    pool.free(index.evict(num_blocks))
    assert pool.num_free == num_blocks


def test_index_readers_next_to_writers_see_whole_results() -> None:
    index = kvtrie.RadixIndex(512, 1)
    ids = list(range(256))
    index.insert(kvtrie.TokenSequence(ids, NS), ids, num_computed=256, source=COMPUTED)

    def work(number: int) -> None:
        rng = Random(number)
        seq = kvtrie.TokenSequence(ids, NS)
        for _ in range(3_000):
            if number == 0:
                got = index.discard([rng.randrange(256)]).tolist()
                index.insert(seq, ids, num_computed=256, source=COMPUTED)
                assert len(got) <= 1
            elif number == 1:
                index.tag(seq, [kvtrie.Span(0, rng.randint(0, 256), "user")])
                index.check()
            else:
                match = index.lookup(seq)
                assert match.blocks.tolist() == ids[: match.num_tokens]

    together(work)
    assert index.stats().indexed == 256


def test_sequence_shared_by_threads() -> None:
    indexes = [kvtrie.RadixIndex(64, 2) for _ in range(2)]
    seq = kvtrie.TokenSequence([], NS)
    for index in indexes:
        index.insert(
            kvtrie.TokenSequence([7] * 64, NS), range_list(32), num_computed=64, source=COMPUTED
        )

    def work(number: int) -> None:
        rng = Random(number)
        index = indexes[number % 2]
        for _ in range(5_000):
            if number == 0:
                seq.truncate(rng.randint(0, len(seq)))
                seq.extend([7] * rng.randint(0, 64 - len(seq)))
            elif number == 1:
                with index.plan(seq) as plan:
                    covered = plan.num_exact + plan.num_compute
                    assert covered <= 64
                    assert sum(int(s["end"] - s["start"]) for s in plan.segments) == covered
            else:
                match = index.lookup(seq)
                assert match.num_tokens % 2 == 0
                assert match.blocks.tolist() == range_list(match.num_tokens // 2)
                assert set(seq[:].tolist()) <= {7}

    together(work)
    for index in indexes:
        index.check()


def range_list(n: int) -> list[int]:
    return list(range(n))


def test_plan_released_by_one_thread_only() -> None:
    index = kvtrie.RadixIndex(8, 1)
    seq = kvtrie.TokenSequence([1, 2, 3], NS)
    index.insert(seq, [0, 1, 2], num_computed=3, source=COMPUTED)
    for _ in range(200):
        plan = index.plan(seq)
        outcomes: list[str] = []

        def release(_: int, plan: kvtrie.ReusePlan = plan, out: list[str] = outcomes) -> None:
            try:
                plan.release()
                out.append("released")
            except kvtrie.StaleHandleError:
                out.append("stale")

        together(release, 3)
        assert sorted(outcomes) == ["released", "stale", "stale"]
    assert index.stats().live_plans == 0


def test_allocator_in_threads_hands_out_each_id_once() -> None:
    pool = kvtrie.BlockAllocator(100)
    owner: dict[int, int] = {}

    def work(number: int) -> None:
        rng = Random(number)
        for _ in range(5_000):
            try:
                ids = pool.allocate(rng.randint(0, 40)).tolist()
            except kvtrie.OutOfBlocksError:
                continue
            for block in ids:
                assert owner.setdefault(block, number) == number
            for block in ids:
                del owner[block]
            pool.free(ids)

    together(work)
    assert pool.num_free == 100


def test_two_indexes_in_opposite_order_do_not_deadlock() -> None:
    pair = [kvtrie.RadixIndex(16, 1) for _ in range(2)]
    seqs = [kvtrie.TokenSequence([1, 2, 3], NS) for _ in range(2)]

    def work(number: int) -> None:
        for step in range(10_000):
            for seq in (seqs[number % 2], seqs[1 - number % 2]):
                pair[(number + step) % 2].lookup(seq)

    together(work)
    # Every lookup ticked once: two per step, half of the steps on each index.
    assert [index.stats().clock for index in pair] == [THREADS * 10_000] * 2


def test_index_lets_go_of_the_interpreter_on_long_work() -> None:
    n = 1_000_000
    index = kvtrie.RadixIndex(n, 1)
    seq = kvtrie.TokenSequence(np.arange(n), NS)
    index.insert(seq, np.arange(n), num_computed=n, source=COMPUTED)
    fresh = [kvtrie.TokenSequence(np.arange(n), NS) for _ in range(10)]

    def ticks_during(call: Callable[[], object]) -> int:
        """How often this thread ran while another was inside the call."""
        inside = [False, False]

        def work() -> None:
            inside[0] = True
            call()
            inside[1] = True

        thread = threading.Thread(target=work)
        ticks = 0
        thread.start()
        while not inside[1]:
            ticks += inside[0]
        thread.join()
        return ticks

    # A machine that is busy may not let both run at once: several tries, then it never detached.
    calls: list[Callable[[], object]] = [index.check, lambda: index.lookup(fresh.pop())]
    for call in calls:
        assert any(ticks_during(call) > 1_000 for _ in range(10))


def test_a_step_does_not_wait_for_a_plan_of_a_transfer() -> None:
    """The plan is made of a copy: the sequence stays free, and so does the ledger that has it."""
    size, key, rng = 4096, b"k" * 32, Random(1)
    theirs = kvtrie.TokenSequence([rng.randrange(1 << 20) for _ in range(2 * size)], NS)
    manifest = kvtrie.TransferManifest.from_blocks(
        theirs, [0, 1], key=key, num_computed=2 * size, block_size=size
    )
    tokens = [rng.randrange(1 << 20) for _ in range(5 * size)]
    moving = kvtrie.ReusePolicy(scope="namespace")

    def share_waited() -> float:
        """The longest step during one plan, as a share of the plan's time."""
        # Nothing of it is found, and a window of 4,096 tokens is hashed for each token.
        mine = kvtrie.TokenSequence(tokens, NS)
        ledger = kvtrie.SequenceLedger(block_size=16)
        ledger.begin("a", mine, list(range(8 * size // 16)), num_computed=5 * size)
        plans: list[kvtrie.TransferPlan] = []
        times: list[float] = []

        def work() -> None:
            start = time.perf_counter()
            plan = kvtrie.plan_transfer(manifest, mine, list(range(8)), key=key, policy=moving)
            times.append(time.perf_counter() - start)
            plans.append(plan)

        thread = threading.Thread(target=work)
        thread.start()
        longest, steps = 0.0, 0
        while thread.is_alive() and steps < 2 * size:
            start = time.perf_counter()
            ledger.step(["a"], [1], [5 * size + steps], [steps], [0, 1])
            longest, steps = max(longest, time.perf_counter() - start), steps + 1
            time.sleep(0.001)
        thread.join()
        # The tokens at the time of the call, whatever was appended after them.
        (start, end), *more = plans[0].compute.tolist()
        assert (start, more) == (0, [])
        assert 5 * size <= end <= len(mine)
        assert len(mine) == 5 * size + steps
        return longest / times[0]

    # One that waits does so for nearly all of each plan. A busy machine may do that to a step too,
    # but not each time.
    assert any(share_waited() < 0.75 for _ in range(3))


def test_snapshots_and_explanations_during_other_calls() -> None:
    index = kvtrie.RadixIndex(256, 2)
    seqs = [kvtrie.TokenSequence([n % 7, n % 5, n, n + 1], NS) for n in range(100)]

    def work(number: int) -> None:
        rng = Random(number)
        for turn in range(40):
            seq = seqs[rng.randrange(100)]
            if number == 0:
                kvtrie.RadixIndex.restore(index.snapshot(), pool_id=index.pool_id).check()
            elif number == 1:
                why = index.explain(seq)
                assert why.num_exact in {0, 2, 4}
            elif turn % 8 == 7:
                index.evict(3)
            else:
                ids = [2 * rng.randrange(100) + place for place in (0, 1)]
                try:
                    index.insert(seq, ids, num_computed=4, source=COMPUTED)
                except kvtrie.BlockInUseError:
                    continue

    together(work)
    index.check()
