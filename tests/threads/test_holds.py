"""Calls that take long detach from the interpreter, however short their arguments are."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvtrie
from kvtrie import COMPUTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kvtrie import RadixIndex

NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
APPROXIMATE = kvtrie.ReusePolicy(scope="namespace")
SIZE = 16
TRIES = 10
# The index, the call, and what is released afterwards.
Call = tuple["RadixIndex", "Callable[[], object]", list["kvtrie.ReusePlan"]]


@pytest.fixture(autouse=True)
def never() -> Iterator[None]:
    """Switch threads only where one detaches from the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    yield
    sys.setswitchinterval(before)


def ticks_during(call: Callable[[], object]) -> int:
    """How often another thread ran while this one was inside the call."""
    ticks, over = 0, False

    def tick() -> None:
        nonlocal ticks
        while not over:
            ticks += 1
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    while not ticks:
        time.sleep(1e-4)
    before = ticks
    call()
    after = ticks
    over = True
    thread.join()
    return after - before


def path(
    blocks: int, size: int = SIZE, *, edges: bool = False
) -> tuple[RadixIndex, kvtrie.TokenSequence]:
    """An index with one path of `blocks` blocks, optionally each an edge, and another like it."""
    index = kvtrie.RadixIndex(4 * blocks, size)
    ids = np.arange(blocks * size)
    seq = kvtrie.TokenSequence(ids, NS)
    index.insert(seq, np.arange(blocks), num_computed=len(ids), source=COMPUTED)
    for at in range(1, blocks if edges else 0):
        other = kvtrie.TokenSequence(np.append(ids[: at * size], ids[:size]), NS)
        block, num_computed = [blocks + at], len(other)
        index.insert(other, block, num_computed=num_computed, start=at * size, source=COMPUTED)
    return index, kvtrie.TokenSequence(ids, NS)


def with_holes() -> tuple[RadixIndex, kvtrie.TokenSequence]:
    index, seq = path(60_000)
    index.discard(np.arange(1, 59_999, 2))
    return index, seq


def exact_plan_over_holes() -> Call:
    index, seq = with_holes()
    plans: list[kvtrie.ReusePlan] = []
    return index, lambda: plans.append(index.plan(seq)), plans


def release_of_many_sources() -> Call:
    index, seq = path(300_000)
    index.discard(np.arange(1, 299_999, 2))
    return index, index.plan(seq).release, []


def release_of_sources_alone() -> Call:
    index, seq = path(300_000)
    index.discard(np.arange(1, 299_999, 2))
    plan = index.plan(seq)
    return index, plan.release_sources, [plan]


def discard_of_what_is_pinned() -> Call:
    index, seq = path(400, 1, edges=True)
    plans = [index.plan(seq) for _ in range(2_000)]
    return index, lambda: index.discard([1, 2]), plans


def removal_of_what_is_pinned() -> Call:
    index, seq = path(400, 1, edges=True)
    plans = [index.plan(seq) for _ in range(2_000)]
    short = kvtrie.TokenSequence(seq[:3], NS)
    return index, lambda: index.remove_spans(short, [(1, 3)], force=True), plans


def release_of_what_was_discarded() -> Call:
    index, seq = path(200_000, 1)
    plan = index.plan(seq)
    index.discard(np.arange(200_000))
    return index, plan.release, []


def taking_what_waits() -> Call:
    index, seq = path(1_000_000, 1)
    plan = index.plan(seq)
    index.drop(NS)
    plan.release()
    return index, index.take_freed, []


def removal_past_the_bound_on_holes() -> Call:
    leaves, bound = 40_000, 60_000
    index = kvtrie.RadixIndex(bound, 1)
    for leaf in range(leaves):
        seq = kvtrie.TokenSequence([leaf], NS)
        index.insert(seq, [leaf], num_computed=1, source=COMPUTED)
    free, at = np.arange(leaves, bound), leaves

    def inserted(length: int) -> kvtrie.TokenSequence:
        nonlocal at
        seq = kvtrie.TokenSequence(np.arange(at, at + length), NS)
        at += length
        index.insert(seq, free[:length], num_computed=length, source=COMPUTED)
        return seq

    length = 10_000
    while index.stats().holes + length <= bound:
        gone = index.remove_spans(inserted(length), [(0, length - 1)]).freed
        free = np.concatenate([free[length:], gone])
    # One hole less than the bound allows, and a call that makes two.
    length = bound - index.stats().holes + 2
    index.remove_spans(inserted(length), [(0, length - 3)])
    two = free[length - 3 : length - 1]
    return index, lambda: index.discard(two), []


def many_tags_on_few_tokens() -> Call:
    index, seq = path(100)
    spans = [kvtrie.Span(at, at + 1, "user") for at in range(0, len(seq), 2)] * 500
    return index, lambda: index.tag(seq, spans), []


def searching(cached: npt.ArrayLike, prompt: npt.ArrayLike) -> Call:
    tokens = np.asarray(cached, np.uint32)
    tokens = tokens[: len(tokens) // SIZE * SIZE]
    index = kvtrie.RadixIndex(len(tokens) // SIZE, SIZE, seed=0)
    blocks = np.arange(len(tokens) // SIZE)
    known = kvtrie.TokenSequence(tokens, NS)
    index.insert(known, blocks, num_computed=len(tokens), source=COMPUTED)
    index.plan(kvtrie.TokenSequence(tokens[:SIZE], NS), APPROXIMATE).release()
    seq = kvtrie.TokenSequence(np.asarray(prompt, np.uint32), NS)
    plans: list[kvtrie.ReusePlan] = []
    return index, lambda: plans.append(index.plan(seq, APPROXIMATE)), plans


def search_that_leads_nowhere() -> Call:
    # Runs that are one token too short, each followed by another token than in the prompt.
    runs = np.arange(100_000).reshape(-1, SIZE)
    prompt = runs.copy()
    prompt[:, -1] += 1_000_000
    return searching(runs.ravel(), prompt.ravel())


@pytest.mark.parametrize(
    "made",
    [
        search_that_leads_nowhere,
        exact_plan_over_holes,
        discard_of_what_is_pinned,
        removal_of_what_is_pinned,
        release_of_many_sources,
        release_of_sources_alone,
        release_of_what_was_discarded,
        taking_what_waits,
        removal_past_the_bound_on_holes,
        many_tags_on_few_tokens,
    ],
)
def test_a_call_that_is_long_lets_go_of_the_interpreter(made: Callable[[], Call]) -> None:
    # A machine that is busy may not let both threads run at once: many tries.
    # Where a call keeps the interpreter, it is never.
    for _ in range(20 * TRIES):
        index, call, plans = made()
        ticks = ticks_during(call)
        for plan in plans:
            plan.release()
        index.check()
        if ticks:
            return
    pytest.fail("no other thread ran while the call did")


def test_a_search_that_is_short_keeps_the_interpreter_however_long_its_prompt_is() -> None:
    # The prompt is one moved run: it is found at once, and compared as memory. If the call
    # detaches, the other thread runs in every third try or so.
    text = np.arange(40_000)
    for _ in range(2 * TRIES):
        _, call, plans = searching(text, np.concatenate([[50_000], text[:-1]]))
        assert ticks_during(call) == 0
        assert plans[0].num_approximate > 39_000
        plans[0].release()
