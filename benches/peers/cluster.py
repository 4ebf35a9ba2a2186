"""Dynamo's `RadixTree` and `KvIndexer` on the same work in one process: find, store, bytes.

    make bench-cluster

Prompts have 1,000 blocks of 16 tokens; all workers have the first 250 in common, and all together
store a million blocks, 8 in each event. `KvIndexer` reads vLLM's bytes, tokens included. Dynamo's
Python binding takes events as JSON with hashes computed already; what they take to compute is not
counted. Every result of both is compared. Times are medians of interleaved calls, and next to them
the mean processor time of all threads: Dynamo's tree works in a thread of its own, so that its
calls wait for the processor on a busy machine.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from dynamo._core import RadixTree, compute_block_hash_for_seq

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, BLOCKS, SHARED, ENTRIES, PER_EVENT = 16, 1_000, 250, 1_000_000, 8
SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Took:
    """Wall and processor times of one kind of call, in microseconds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.processor = 0.0

    def call(self, call: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - what it returns
        began, busy = time.perf_counter(), time.process_time()
        result = call(*args)
        self.processor += 1e6 * (time.process_time() - busy)
        self.wall.append(1e6 * (time.perf_counter() - began))
        return result

    @property
    def figures(self) -> tuple[float, float]:
        return statistics.median(self.wall), self.processor / len(self.wall)


def both(first: Took, second: Took) -> tuple[float, float]:
    return (
        first.figures[0] + second.figures[0],
        first.figures[1] + second.figures[1],
    )


def shown(name: str, their: tuple[float, float], our: tuple[float, float]) -> str:
    ratios = [theirs / ours for theirs, ours in zip(their, our, strict=True)]
    return (
        f"  {name}: Dynamo {their[0]:.1f} us (processor {their[1]:.1f}), kvtrie {our[0]:.1f} "
        f"({our[1]:.1f}): {ratios[0]:.1f}x ({ratios[1]:.1f}x) faster"
    )


def find_in(index: kvtrie.KvIndexer, ids: list[int]) -> kvtrie.OverlapScores:
    return index.find_matches(kvtrie.TokenSequence(ids, SPACE))


def work(num_workers: int, entries: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Prompts, and the events of each in both forms: (worker, bytes)."""
    random = np.random.default_rng(5)
    shared = random.integers(0, 150_000, SHARED * SIZE, dtype=np.uint32)
    prompts: list[Any] = []
    theirs: list[Any] = []
    ours: list[Any] = []
    each = max(1, (entries // num_workers - SHARED) // (BLOCKS - SHARED))
    for _ in range(each):
        for worker in range(num_workers):
            rest = random.integers(0, 150_000, (BLOCKS - SHARED) * SIZE, dtype=np.uint32)
            tokens = np.concatenate([shared, rest])
            hashes = compute_block_hash_for_seq(tokens.tolist(), SIZE)
            names = np.cumsum(np.array(hashes, dtype=np.uint64), dtype=np.uint64).tolist()
            first = 0 if len(prompts) < num_workers else SHARED
            at = first
            while at < BLOCKS:
                end = min(at + PER_EVENT, SHARED if at < SHARED else BLOCKS)
                parent = names[at - 1] if at else None
                blocks = [
                    {"block_hash": names[one], "tokens_hash": hashes[one]} for one in range(at, end)
                ]
                stored = {"parent_hash": parent, "blocks": blocks}
                event = {"event_id": len(theirs), "data": {"stored": stored}}
                theirs.append((worker, json.dumps(event).encode()))
                fields = {
                    "type": "BlockStored",
                    "block_hashes": names[at:end],
                    "parent_block_hash": parent,
                    "token_ids": tokens[at * SIZE : end * SIZE].tolist(),
                    "block_size": SIZE,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                }
                ours.append((worker, msgpack.packb([0.0, [fields], 0])))
                at = end
            prompts.append(tokens)
    return prompts, theirs, ours


def compare(num_workers: int, entries: int, asked: int) -> None:
    prompts, theirs, ours = work(num_workers, entries)
    stored = num_workers * SHARED + len(prompts) * (BLOCKS - SHARED)
    before = resident()
    tree = RadixTree()
    storing = Took()
    storing.call(lambda: [tree.apply_event(*event) for event in theirs] and tree.find_matches([1]))
    their_bytes = (resident() - before) / stored
    index = kvtrie.KvIndexer(SIZE, b"sixteen bytes ..", moved_runs=False)
    for worker in range(num_workers):
        index.add_worker(f"w{worker}", SPACE)
    our_storing = Took()
    our_storing.call(lambda: [index.apply(*event) for event in ours])
    our_bytes = index.stats()["bytes"] / stored
    hashing, finding, digesting, matching, listing = (Took() for _ in range(5))
    random = np.random.default_rng(7)
    for _ in range(asked):
        tokens = prompts[random.integers(len(prompts))].copy()
        tokens[random.integers(SHARED * SIZE, len(tokens)) :] = 1
        ids = tokens.tolist()
        seq = kvtrie.TokenSequence(tokens, SPACE)
        hashes = hashing.call(compute_block_hash_for_seq, ids, SIZE)
        scores = finding.call(tree.find_matches, hashes)
        digests = digesting.call(index.digests, seq)
        overlap = matching.call(index.find_matches, digests)
        listing.call(find_in, index, ids)
        said = dict.fromkeys(range(num_workers), 0)
        for worker, blocks in scores.scores.items():
            said[worker[0] if isinstance(worker, tuple) else worker] = blocks
        assert [said[worker] * SIZE for worker in said] == overlap.exact.tolist()
    whole = both(hashing, finding)
    our_whole = both(digesting, matching)
    print(f"{num_workers} workers, {stored} blocks stored, {asked} prompts asked, 0 differ")
    print(shown("find, digests ready", finding.figures, matching.figures))
    print(shown("find, computed", whole, our_whole))
    print(shown("find, computed from a list", whole, listing.figures))
    rates = [[stored / time for time in took.figures] for took in (storing, our_storing)]
    print(
        f"  store: Dynamo {rates[0][0]:.2f} M blocks/s (processor {rates[0][1]:.2f}), kvtrie "
        f"{rates[1][0]:.2f} ({rates[1][1]:.2f}): {rates[1][0] / rates[0][0]:.1f}x "
        f"({rates[1][1] / rates[0][1]:.1f}x)"
    )
    print(
        f"  bytes per block stored: Dynamo {their_bytes:.0f} resident, "
        f"kvtrie {our_bytes:.1f} counted"
    )


def main() -> None:
    quick = "--quick" in sys.argv
    for num_workers in (8, 256):
        compare(num_workers, 20_000 if quick else ENTRIES, 20 if quick else 400)


if __name__ == "__main__":
    main()
