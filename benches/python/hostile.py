"""How long one tenant's calls keep another tenant waiting.

`python benches/python/hostile.py` prints and records it. While one thread is inside a call that is
as long as a tenant can make it, another one looks up its own short prompt repeatedly: the figure is
its longest wait. The table also has the longest wait while the first thread is idle, and the CPU
time of the call. Figures are medians of rounds. A new case is one more function in `CASES`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures
from forest import BLOCK_SIZE, QUICK
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

    from workloads.documents import Tokens

ROUNDS = 1 if QUICK else 5
SCALE = 20 if QUICK else 1
# Holes of a prompt's path, blocks that are discarded, histories, spans, moved tokens.
MANY = 10_000 // SCALE
PLANS = 64 // (8 if QUICK else 1)
LEAVES = 200_000 // SCALE
NAMESPACES = 20_000 // SCALE
MOVED = kvtrie.ReusePolicy(scope="namespace")
TENANT = kvtrie.Namespace(model="model", salt="tenant")
VICTIM = kvtrie.Namespace(model="model", salt="victim")
KEY = b"k" * 32
# Seeds apart from those of other benchmarks.
SEEDS = 1 << 61


@dataclass(frozen=True)
class Case:
    """A call, and what another thread does meanwhile.

    `probe` is what that thread repeats; the call's time is proportional to `count` of `each`. Plans
    that the call returns, one or a list, are released afterwards.
    """

    work: str
    call: Callable[[], object]
    probe: Callable[[], object]
    each: str
    count: int


@dataclass(frozen=True)
class Round:
    waited: float
    idle: float
    cpu: float


def sequence(ids: Tokens | list[int], space: kvtrie.Namespace = TENANT) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(ids, space)


def looks_up(index: kvtrie.RadixIndex) -> Callable[[], object]:
    prompt = sequence(document(SEEDS, 64), VICTIM)
    return lambda: index.lookup(prompt)


def inserted(index: kvtrie.RadixIndex, ids: Tokens, first: int = 0) -> kvtrie.TokenSequence:
    seq, blocks = sequence(ids), len(ids) // index.block_size
    table = np.arange(first, first + blocks, dtype=np.int32)
    index.insert(seq, table, num_computed=len(ids), source=kvtrie.COMPUTED)
    return seq


def with_holes(*, edges: bool) -> tuple[kvtrie.RadixIndex, Tokens]:
    blocks = 2 * MANY // (5 if edges else 1)
    index = kvtrie.RadixIndex(4 * blocks, BLOCK_SIZE)
    ids = document(SEEDS, blocks * BLOCK_SIZE)
    inserted(index, ids)
    if edges:
        branched(index, ids)
    index.discard(np.arange(1, blocks - 1, 2))
    return index, ids


def branched(index: kvtrie.RadixIndex, ids: Tokens) -> None:
    """Cut the edge of a sequence after each block, by inserting a sibling of the next one."""
    blocks = len(ids) // BLOCK_SIZE
    for at in range(1, blocks):
        branch = sequence(np.append(ids[: at * BLOCK_SIZE], document(SEEDS + at, BLOCK_SIZE)))
        block, start = [blocks + at], at * BLOCK_SIZE
        index.insert(branch, block, num_computed=len(branch), start=start, source=kvtrie.COMPUTED)


def planned(*, edges: bool) -> Case:
    index, ids = with_holes(edges=edges)
    holes = len(ids) // BLOCK_SIZE // 2
    work = f"exact plan over {holes:,} holes" + (", an edge a block" if edges else "")
    prompt = sequence(ids)
    return Case(work, lambda: index.plan(prompt), looks_up(index), "hole", holes)


def plan_over_holes() -> Case:
    return planned(edges=False)


def plan_over_holes_of_edges() -> Case:
    return planned(edges=True)


def release_over_holes() -> Case:
    index, ids = with_holes(edges=False)
    holes = len(ids) // BLOCK_SIZE // 2
    plan = index.plan(sequence(ids))
    return Case(
        f"release of a plan over {holes:,} holes", plan.release, looks_up(index), "hole", holes
    )


def discard_pinned() -> Case:
    index = kvtrie.RadixIndex(2 * MANY, BLOCK_SIZE)
    ids = document(SEEDS, 2 * MANY * BLOCK_SIZE)
    inserted(index, ids)
    plans = [index.plan(sequence(ids)) for _ in range(PLANS // 4)]
    gone = np.arange(1, 2 * MANY, 2)

    def call() -> object:
        index.discard(gone)
        return plans

    work = f"discard of {len(gone):,} blocks that {len(plans)} plans pin"
    each = "block and plan"
    return Case(work, call, looks_up(index), each, len(gone) * len(plans))


def discard_below_plans() -> Case:
    blocks = 2 * MANY // 5
    index = kvtrie.RadixIndex(4 * blocks, BLOCK_SIZE)
    ids = document(SEEDS, blocks * BLOCK_SIZE)
    inserted(index, ids)
    branched(index, ids)
    plans = [index.plan(sequence(ids)) for _ in range(PLANS)]
    gone = np.arange(1, 101)

    def call() -> object:
        index.discard(gone)
        return plans

    work = f"discard of {len(gone)} blocks above {blocks:,} edges that {PLANS} plans pin"
    return Case(work, call, looks_up(index), "edge and plan", blocks * PLANS)


def bound_holes() -> Case:
    """A removal past the bound on holes: a pass over all leaves."""
    index = kvtrie.RadixIndex(2 * LEAVES, 1)
    for leaf in range(LEAVES):
        inserted(index, np.array([leaf], dtype=np.uint32), leaf)
    free, number = np.arange(LEAVES, 2 * LEAVES), LEAVES
    length = LEAVES // 50
    seq = sequence([0])
    # Two of these would be past it.
    while index.stats().holes + length <= 2 * LEAVES:
        ids = np.arange(number, number + length, dtype=np.uint32)
        number += length
        seq = sequence(ids)
        index.insert(seq, free[:length], num_computed=length, source=kvtrie.COMPUTED)
        gone = index.remove_spans(seq, [(0, length - 1)]).freed
        free = np.concatenate([free[length:], gone])
    ids = np.arange(number, number + length, dtype=np.uint32)
    seq = sequence(ids)
    index.insert(seq, free[:length], num_computed=length, source=kvtrie.COMPUTED)
    work = f"remove_spans past the bound on holes, {LEAVES:,} leaves"

    def call() -> object:
        return index.remove_spans(seq, [(0, length - 1)])

    return Case(work, call, looks_up(index), "leaf", LEAVES)


def explain_with_others() -> Case:
    tokens, count = 2_000, 200 // (4 if QUICK else 1)
    blocks = tokens // BLOCK_SIZE
    index = kvtrie.RadixIndex(count * blocks, BLOCK_SIZE)
    ids = document(SEEDS, tokens)
    for number in range(count):
        space = kvtrie.Namespace(model="model", salt="tenant", adapter=f"{number:04}")
        table = np.arange(number * blocks, (number + 1) * blocks)
        index.insert(sequence(ids, space), table, num_computed=tokens, source=kvtrie.COMPUTED)
    prompt = sequence(ids)
    work = f"explain of {tokens:,} tokens with {count} namespaces of the same salt"
    looked_at = min(count, 32)
    return Case(
        work,
        lambda: index.explain(prompt),
        looks_up(index),
        "token and namespace",
        tokens * looked_at,
    )


def explain_with_tenants() -> Case:
    index = kvtrie.RadixIndex(NAMESPACES, BLOCK_SIZE)
    ids = document(SEEDS, BLOCK_SIZE)
    for number in range(NAMESPACES):
        space = kvtrie.Namespace(model="model", salt=f"tenant {number}")
        index.insert(
            sequence(ids, space), [number], num_computed=BLOCK_SIZE, source=kvtrie.COMPUTED
        )
    prompt = sequence(ids)
    work = f"explain with {NAMESPACES:,} other tenants"
    return Case(work, lambda: index.explain(prompt), looks_up(index), "call", 1)


def tag_over_holes() -> Case:
    index, ids = with_holes(edges=False)
    prompt = sequence(ids)
    spans = [kvtrie.Span(at, at + BLOCK_SIZE // 2, "user") for at in range(0, len(ids), BLOCK_SIZE)]
    work = f"tag of {len(spans):,} spans over {len(spans) // 2:,} holes"
    return Case(work, lambda: index.tag(prompt, spans), looks_up(index), "span", len(spans))


def drop_pinned() -> Case:
    blocks = 2 * MANY
    index = kvtrie.RadixIndex(blocks, BLOCK_SIZE)
    ids = document(SEEDS, blocks * BLOCK_SIZE)
    inserted(index, ids)
    plans = [index.plan(sequence(ids)) for _ in range(PLANS // 4)]

    def call() -> object:
        index.drop(TENANT)
        return plans

    work = f"drop of {blocks:,} blocks that {len(plans)} plans pin"
    return Case(work, call, looks_up(index), "block and plan", blocks * len(plans))


def snapshot() -> Case:
    blocks = 20 * MANY
    index = kvtrie.RadixIndex(blocks, BLOCK_SIZE)
    inserted(index, document(SEEDS, blocks * BLOCK_SIZE))
    work = f"snapshot of {blocks * BLOCK_SIZE:,} tokens"
    return Case(work, index.snapshot, looks_up(index), "token", blocks * BLOCK_SIZE)


def transfer() -> Case:
    """A search for moved blocks of a sender that finds none; it holds no lock."""
    tokens, size = 2 * MANY, 528
    theirs = sequence(document(SEEDS, tokens))
    table = np.arange(-(-tokens // size))
    manifest = kvtrie.TransferManifest.from_blocks(
        theirs, table, key=KEY, num_computed=tokens, block_size=size
    )
    mine = sequence(document(SEEDS + 1, tokens))

    def call() -> object:
        return kvtrie.plan_transfer(manifest, mine, table, key=KEY, policy=MOVED)

    index = kvtrie.RadixIndex(64, BLOCK_SIZE)
    work = f"plan_transfer of {tokens:,} tokens, nothing found, the sender's blocks have {size}"
    return Case(work, call, looks_up(index), "token", tokens)


def compare_without_reasoning() -> Case:
    """Histories of which every second token is reasoning; the other asks the same tracker."""
    tokens = 5 * MANY
    tracker = kvtrie.TurnTracker()
    ids = document(SEEDS, tokens)
    spans = [kvtrie.Span(at, at + 1, "reasoning") for at in range(1, tokens, 2)]
    for number in range(4):
        history = np.append(ids[:-1], np.uint32(number))
        tracker.keep(sequence(history), num_computed=tokens, spans=spans)
    kept = np.ones(tokens, dtype=np.bool_)
    kept[3::2] = False
    prompt = sequence(np.append(ids[kept], np.uint32(5)))
    theirs = sequence(document(SEEDS, 64), VICTIM)
    work = f"TurnTracker.compare of 4 histories of {tokens:,} tokens, half of them reasoning"
    return Case(
        work,
        lambda: tracker.compare(prompt, alias=True),
        lambda: tracker.compare(theirs),
        "token and history",
        4 * tokens,
    )


def compare_moved() -> Case:
    """Eight long histories, each planned; the other thread asks the same tracker."""
    tokens = 10 * MANY
    tracker = kvtrie.TurnTracker()
    ids = document(SEEDS, tokens)
    for number in range(8):
        history = ids.copy()
        history[0] = number
        tracker.keep(sequence(history), num_computed=tokens, conversation="c")
    prompt = sequence(np.append(ids[tokens // 2 :], np.uint32(5)))
    theirs = sequence(document(SEEDS, 64), VICTIM)
    work = f"TurnTracker.compare of 8 histories of {tokens:,} tokens, moved runs"
    return Case(
        work,
        lambda: tracker.compare(prompt, conversation="c", policy=MOVED),
        lambda: tracker.compare(theirs),
        "token and history",
        8 * tokens,
    )


def expire_together() -> Case:
    """Histories that all expire at once; the other thread asks the same tracker."""
    count, clock = 2 * MANY, [0.0]
    tracker = kvtrie.TurnTracker(ttl=10.0, clock=lambda: clock[0])
    for number in range(count):
        tracker.keep(sequence([1, 2, number]), num_computed=3)
    prompt = sequence([1, 2, 3])
    theirs = sequence([1, 2, 3], VICTIM)

    def call() -> object:
        clock[0] = 20.0
        return tracker.compare(prompt)

    work = f"TurnTracker.compare that lets {count:,} histories go"
    return Case(work, call, lambda: tracker.compare(theirs), "history", count)


CASES: tuple[Callable[[], Case], ...] = (
    plan_over_holes,
    plan_over_holes_of_edges,
    release_over_holes,
    discard_pinned,
    discard_below_plans,
    bound_holes,
    explain_with_others,
    explain_with_tenants,
    tag_over_holes,
    drop_pinned,
    snapshot,
    transfer,
    compare_without_reasoning,
    compare_moved,
    expire_together,
)


def longest_wait(probe: Callable[[], object], meanwhile: Callable[[], object]) -> float:
    """The longest of the probes that another thread makes while this one is inside a call."""
    begun, over = threading.Event(), threading.Event()
    waits: list[tuple[float, float]] = []

    def repeat() -> None:
        probe()
        while not over.is_set():
            before = perf_counter()
            probe()
            waits.append((before, perf_counter()))
            begun.set()

    thread = threading.Thread(target=repeat)
    thread.start()
    begun.wait()
    start = perf_counter()
    try:
        meanwhile()
    finally:
        end = perf_counter()
        over.set()
        thread.join()
    # A probe that began before the call may wait for it.
    inside = [after - before for before, after in waits if after > start and before < end]
    return max(inside, default=end - start)


def measured(make: Callable[[], Case]) -> tuple[Case, Round]:
    case = make()
    spent = [0.0, 0.0]

    def call() -> object:
        cpu, began = thread_time(), perf_counter()
        answer = case.call()
        spent[:] = thread_time() - cpu, perf_counter() - began
        for plan in answer if isinstance(answer, list) else [answer]:
            if isinstance(plan, kvtrie.ReusePlan):
                plan.release()
        return answer

    waited = longest_wait(case.probe, call)
    idle = longest_wait(case.probe, lambda: time.sleep(max(spent[1], 1e-3)))
    return case, Round(waited, idle, spent[0])


def row(make: Callable[[], Case]) -> figures.Row:
    rounds = [measured(make) for _ in range(ROUNDS)]
    case = rounds[0][0]
    waited, idle, cpu = (
        statistics.median(getattr(each, name) for _, each in rounds)
        for name in ("waited", "idle", "cpu")
    )
    figure = {
        "kvtrie": waited * 1e3,
        "idle": idle * 1e3,
        "cpu": cpu * 1e3,
        "ns_each": cpu * 1e9 / case.count,
    }
    short = {key: float(f"{value:.4g}") for key, value in figure.items()}
    return {"work": case.work, "unit": "ms", **short, "each": case.each, "rounds": ROUNDS}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What one tenant keeps another waiting for.")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--dry-run", action="store_true", help="print the figures only")
    options = parser.parse_args(arguments)
    rows = []
    gc.disable()
    try:
        for make in CASES:
            if options.only not in make.__name__:
                continue
            figure = row(make)
            rows.append(figure)
            print(
                f"{figure['work']:<88}{figure['kvtrie']:>9,.2f} ms, idle{figure['idle']:>7,.2f} ms;"
                f"{figure['cpu']:>10,.2f} ms of CPU,{figure['ns_each']:>9,.1f} ns a "
                f"{figure['each']}",
                flush=True,
            )
    finally:
        gc.enable()
    if not options.dry_run and not options.only:
        names = ("kvtrie", "numpy")
        figures.record("hostile", rows, {name: version(name) for name in names})


if __name__ == "__main__":
    main()
