"""Degenerate trees: a chain, a comb, a fan, one token repeated. Linear, and in a stack of 256 KiB.

Costs are ratios of one thread's processor time at two sizes: four times the size may cost twelve
times the time, where quadratic work would cost sixteen and more. A ratio that fails is measured
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvtrie
from kvtrie import COMPUTED

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
STACK = 256 * 1024
TRIES = 4
NOISE = 0.02
"""Seconds that a step may take without being looked at: below, the clock is what is measured."""


def in_small_stack(work: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    before = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=body)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if failures:
        raise failures[0]


Steps = dict[str, Callable[[], object]]


def cost(steps: Steps) -> dict[str, float]:
    """The processor time of each step, in order."""
    spent = {}
    for name, step in steps.items():
        began = time.thread_time()
        step()
        spent[name] = time.thread_time() - began
    return spent


def assert_linear(make: Callable[[int], Steps], size: int, *, factor: int = 4) -> None:
    """Each step at `factor` times the size costs at most three times that much more."""

    def work() -> None:
        slow: dict[str, tuple[float, float]] = {}
        best_small: dict[str, float] = {}
        best_large: dict[str, float] = {}
        for _ in range(TRIES):
            for best, n in ((best_small, size), (best_large, size * factor)):
                for name, seconds in cost(make(n)).items():
                    best[name] = min(seconds, best.get(name, seconds))
            slow = {
                name: (best_small[name], best_large[name])
                for name in best_small
                if best_large[name] > 3 * factor * best_small[name] + NOISE
            }
            if not slow:
                return
        pytest.fail(f"not linear (seconds at {size} and {size * factor}): {slow}")

    in_small_stack(work)


def take_all(index: Any, n: int) -> None:
    left = n
    while left:
        got = len(index.evict(min(left, max(1, n // 7))))
        assert got
        left -= got


def plan_all(index: Any, seq: Any, n: int) -> None:
    with index.plan(seq) as plan:
        assert plan.num_exact == n


def expect(found: object, wanted: object) -> None:
    assert found == wanted


def chain_steps(index: Any, ids: np.ndarray[Any, Any], blocks: np.ndarray[Any, Any]) -> Steps:
    n, size = len(ids), index.block_size
    seq = kvtrie.TokenSequence(ids, NS)
    put = {"num_computed": n, "source": COMPUTED}
    return {
        "insert": lambda: expect(len(index.insert(seq, blocks, **put).blocks), len(blocks)),
        "lookup": lambda: expect(index.lookup(seq).num_tokens, n),
        "lookup of a fresh sequence": lambda: expect(
            index.lookup(kvtrie.TokenSequence(ids, NS)).num_tokens, n
        ),
        "plan": lambda: plan_all(index, seq, n - 1),
        "check": index.check,
        "digest": index.digest,
        "evict": lambda: take_all(index, len(blocks)),
        "insert again": lambda: expect(len(index.insert(seq, blocks, **put).blocks), n // size),
        "drop": lambda: expect(len(index.drop(NS)), len(blocks)),
        "insert a third time": lambda: index.insert(seq, blocks, **put),
        "discard": lambda: expect(len(index.discard(blocks)), len(blocks)),
        "check at last": index.check,
    }


def test_chain_of_a_million_blocks() -> None:
    def steps(n: int) -> Steps:
        ids = np.random.default_rng(n).integers(0, 50_000, n, dtype=np.uint32)
        # Ids in order: a permutation would measure the processor's caches.
        return chain_steps(kvtrie.RadixIndex(n, 1), ids, np.arange(n))

    assert_linear(steps, 250_000)


@pytest.mark.parametrize("block_size", [1, 16, 17])
def test_one_token_repeated(block_size: int) -> None:
    def steps(n: int) -> Steps:
        index = kvtrie.RadixIndex(n, block_size)
        return chain_steps(index, np.zeros(n * block_size, dtype=np.uint32), np.arange(n))

    assert_linear(steps, 400_000 // block_size)


def test_one_token_repeated_in_many_lengths() -> None:
    def steps(n: int) -> Steps:
        index = kvtrie.RadixIndex(n, 2)
        seqs = [kvtrie.TokenSequence([5] * length, NS) for length in range(0, 400, 7)]

        def build() -> None:
            seq = kvtrie.TokenSequence([], NS)
            for block in range(n):
                seq.extend([5, 5])
                index.insert(seq, [block], num_computed=len(seq), start=2 * block, source=COMPUTED)

        def read() -> None:
            for seq in seqs * (n // 100):
                assert index.lookup(seq).num_tokens == len(seq) // 2 * 2

        return {"build": build, "lookup": read, "check": index.check, "reset": index.reset}

    assert_linear(steps, 25_000)


def test_chain_grown_block_by_block() -> None:
    def steps(n: int) -> Steps:
        index = kvtrie.RadixIndex(n, 2)
        seq = kvtrie.TokenSequence([], NS)

        def build() -> None:
            for block in range(n):
                seq.extend([block, 7])
                done = index.insert(
                    seq, [block], num_computed=len(seq), start=2 * block, source=COMPUTED
                )
                assert len(done.blocks) == 1

        def decode() -> None:
            # The lookups of an engine's steps: the tokens so far, one more each time.
            for token in range(n):
                seq.extend([token])
                assert index.lookup(seq, start=2 * n).num_tokens == 2 * n

        return {
            "build": build,
            "decode": decode,
            "check": index.check,
            "evict": lambda: take_all(index, n),
        }

    assert_linear(steps, 50_000)


def test_comb_of_deep_branches() -> None:
    """A tooth at every block of a spine: as many nodes in a row as there are teeth."""

    def steps(n: int) -> Steps:
        index = kvtrie.RadixIndex(2 * n, 1)
        seq = kvtrie.TokenSequence([], NS)

        def build() -> None:
            for depth in range(n):
                for token, block in ((1, 2 * depth), (2, 2 * depth + 1)):
                    seq.extend([token])
                    index.insert(seq, [block], num_computed=depth + 1, start=depth, source=COMPUTED)
                    if token == 1:
                        seq.truncate(depth)

        def read() -> None:
            fresh = kvtrie.TokenSequence([2] * n, NS)
            assert index.lookup(fresh).num_tokens == n
            assert index.lookup(kvtrie.TokenSequence([2] * (n - 1) + [1], NS)).num_tokens == n

        return {
            "build": build,
            "lookup": read,
            "plan": lambda: plan_all(index, kvtrie.TokenSequence([2] * n, NS), n - 1),
            "check": index.check,
            "digest": index.digest,
            "evict": lambda: take_all(index, 2 * n),
            "truncate": lambda: seq.truncate(0),
            "build again": build,
            "drop": lambda: expect(len(index.drop(NS)), 2 * n),
        }

    assert_linear(steps, 50_000)


@pytest.mark.parametrize("under", [0, 1], ids=["at the root", "below a block"])
def test_fan_of_100000_children(under: int) -> None:
    def steps(n: int) -> Steps:
        index = kvtrie.RadixIndex(n + 1, 2)
        rng = np.random.default_rng(n)
        head = [9, 9] * under
        tokens = rng.permutation(n).tolist()
        seqs = [kvtrie.TokenSequence([*head, token // 300, token % 300], NS) for token in tokens]
        blocks = range(1, n + 1)
        if under:
            index.insert(kvtrie.TokenSequence(head, NS), [0], num_computed=2, source=COMPUTED)

        def build() -> None:
            for seq, block in zip(seqs, blocks, strict=True):
                done = index.insert(
                    seq, [block], num_computed=len(seq), start=2 * under, source=COMPUTED
                )
                assert len(done.blocks) == 1

        def read() -> None:
            assert all(index.lookup(seq).num_tokens == 2 + 2 * under for seq in seqs)

        def plans() -> None:
            # Each diverges within a block, where many siblings share its first token.
            firsts = [i % (n // 300) for i in range(n // 10)]
            prompts = [kvtrie.TokenSequence([*head, first, 7777, 1], NS) for first in firsts]
            for prompt in prompts:
                with index.plan(prompt) as plan:
                    assert plan.num_exact == 2 * under + 1

        return {
            "build": build,
            "lookup": read,
            "plan": plans,
            "check": index.check,
            "digest": index.digest,
            "evict half": lambda: take_all(index, n // 2),
            "drop": lambda: index.drop(NS),
        }

    assert_linear(steps, 25_000)


def test_holes_at_every_other_block() -> None:
    def steps(n: int) -> Steps:
        index = kvtrie.RadixIndex(n, 1)
        ids = np.arange(n, dtype=np.uint32)
        seq = kvtrie.TokenSequence(ids, NS)
        index.insert(seq, np.arange(n), num_computed=n, source=COMPUTED)
        spare: list[int] = []

        def refill() -> None:
            offer = np.arange(n)
            done = index.insert(
                kvtrie.TokenSequence(ids, NS), offer, num_computed=n, source=COMPUTED
            )
            assert len(done.blocks) == n

        return {
            "discard": lambda: spare.extend(index.discard(np.arange(0, n, 2)).tolist()),
            "lookup": lambda: expect(index.lookup(seq).num_tokens, 0),
            "check": index.check,
            "refill": refill,
            "lookup all": lambda: expect(index.lookup(seq).num_tokens, n),
            "evict": lambda: take_all(index, n),
        }

    assert_linear(steps, 250_000)


def test_evict_with_many_pinned_leaves() -> None:
    """Pinned leaves are older than all others, and must not be visited by every eviction."""

    def steps(n: int) -> Steps:
        index = kvtrie.RadixIndex(2 * n, 1)
        seqs = [kvtrie.TokenSequence([token, 0], NS) for token in range(2 * n)]
        for block, seq in enumerate(seqs):
            index.insert(seq, [block], num_computed=1, source=COMPUTED)
        plans = [index.plan(seq) for seq in seqs[:n]]
        for seq in seqs[n:]:
            index.lookup(seq)

        def release() -> None:
            for plan in plans:
                plan.release()

        def evict_one_by_one() -> None:
            for _ in range(n):
                assert len(index.evict(1)) == 1
                assert index.num_evictable < n

        return {
            "evict": evict_one_by_one,
            "evict nothing": lambda: [index.evict(1) for _ in range(n)],
            "release": release,
            "evict the rest": lambda: take_all(index, n),
        }

    assert_linear(steps, 10_000)


def test_grown_sequence_with_other_traffic() -> None:
    """A decode step costs its new tokens, whatever others insert, evict and release meanwhile."""

    def steps(n: int) -> Steps:
        index = kvtrie.RadixIndex(4 * n, 1)
        seq = kvtrie.TokenSequence([], NS)
        plan = index.plan(seq)
        free = list(range(4 * n))

        def decode() -> None:
            for step in range(n):
                seq.extend([step])
                index.insert(seq, [free.pop()], num_computed=step + 1, start=step, source=plan)
                other = kvtrie.TokenSequence([step % 7, n, step], NS)
                done = index.insert(
                    other, [free.pop() for _ in range(3)], num_computed=3, source=COMPUTED
                )
                free.extend(done.duplicates.tolist())
                if len(free) < n:
                    free.extend(index.evict(2).tolist())
            plan.release()

        return {"decode": decode, "check": index.check}

    assert_linear(steps, 10_000)
