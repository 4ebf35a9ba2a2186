"""Dynamo's `RadixTree` and `KvIndexer` on the same work in one process: find, store, bytes.

    make bench-cluster

Prompts have 1,000 blocks of 16 tokens; all workers have the first 250 in common, and all together
store a million blocks, 8 in each event. `KvIndexer` reads vLLM's bytes, tokens included. Dynamo's
Python binding takes events as JSON that has hashes of tokens and no tokens. So there are two rows:

- *from vLLM's bytes*: both begin with the same messages. For Dynamo they are decoded with msgspec
  into typed structs, hashed with its own `compute_block_hash_for_seq`, encoded as JSON and applied:
  what a router in Python has to do.
- *from ready events*: Dynamo gets the JSON alone; what it takes to make is not counted. `KvIndexer`
  has no such input, so its figure is that of its bytes.

Every result of all is compared. Times are medians of interleaved calls, and next to them the mean
processor time of all threads.

Dynamo's tree works in a thread of its own. Where that has another core, a call takes as long as
this core takes to wake up. `--one-core` runs all threads on one, which is the least that handing
over a call can take.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec
import numpy as np
from dynamo._core import RadixTree, compute_block_hash_for_seq

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, BLOCKS, SHARED, ENTRIES, PER_EVENT = 16, 1_000, 250, 1_000_000, 8
SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
ROUNDS = 3


# What vLLM publishes, of what is used here.
BlockStored = msgspec.defstruct(
    "BlockStored",
    [("block_hashes", list[int]), ("parent_block_hash", int | None), ("token_ids", list[int])],
    tag=True,
    gc=False,
)
Events = list[BlockStored]  # type: ignore[valid-type]  # what msgspec makes is a class
Batch = msgspec.defstruct("Batch", [("ts", float), ("events", Events)], array_like=True, gc=False)


class Translator:
    """From vLLM's messages to the events of Dynamo's binding."""

    def __init__(self) -> None:
        self.decode = msgspec.msgpack.Decoder(Batch).decode
        self.encode = msgspec.json.Encoder().encode
        self.number = 0

    def events(self, raw: bytes) -> list[bytes]:
        translated = []
        for event in self.decode(raw).events:
            hashes = compute_block_hash_for_seq(event.token_ids, SIZE)
            blocks = [
                {"block_hash": name, "tokens_hash": tokens}
                for name, tokens in zip(event.block_hashes, hashes, strict=True)
            ]
            stored = {"parent_hash": event.parent_block_hash, "blocks": blocks}
            data = {"event_id": self.number, "data": {"stored": stored}}
            translated.append(self.encode(data))
            self.number += 1
        return translated


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


def store_ready(events: list[Any]) -> RadixTree:
    tree = RadixTree()
    for worker, event in events:
        tree.apply_event(worker, event)
    tree.find_matches([1])  # waits for its thread
    return tree


def store_bytes(messages: list[Any]) -> RadixTree:
    tree, translator = RadixTree(), Translator()
    for worker, raw in messages:
        for event in translator.events(raw):
            tree.apply_event(worker, event)
    tree.find_matches([1])
    return tree


def store(messages: list[Any], num_workers: int, *, moved_runs: bool) -> kvtrie.KvIndexer:
    index = kvtrie.KvIndexer(SIZE, b"sixteen bytes ..", moved_runs=moved_runs)
    for worker in range(num_workers):
        index.add_worker(f"w{worker}", SPACE)
    for worker, raw in messages:
        index.apply(worker, raw)
    return index


def said(tree: RadixTree, hashes: list[int], num_workers: int) -> list[int]:
    scores = dict.fromkeys(range(num_workers), 0)
    for worker, blocks in tree.find_matches(hashes).scores.items():
        scores[worker[0] if isinstance(worker, tuple) else worker] = blocks
    return list(scores.values())


def rate(name: str, took: Took, stored: int) -> str:
    wall, processor = (stored / time for time in took.figures)
    return f"{name} {wall:.2f} M blocks/s (processor {processor:.2f})"


def stored_row(name: str, their: Took, our: Took, stored: int) -> str:
    ratios = [theirs / ours for theirs, ours in zip(their.figures, our.figures, strict=True)]
    return (
        f"  store, {name}: {rate('Dynamo', their, stored)}, {rate('kvtrie', our, stored)}: "
        f"{ratios[0]:.1f}x ({ratios[1]:.1f}x)"
    )


def compare(num_workers: int, entries: int, asked: int, rounds: int) -> None:
    prompts, theirs, ours = work(num_workers, entries)
    stored = num_workers * SHARED + len(prompts) * (BLOCKS - SHARED)
    ready, translated, plain, moving = (Took() for _ in range(4))
    their_bytes = 0.0
    for number in range(rounds):
        before = resident()
        tree = ready.call(store_ready, theirs)
        if number == 0:
            their_bytes = (resident() - before) / stored
        other = translated.call(store_bytes, ours)
        moved = moving.call(lambda: store(ours, num_workers, moved_runs=True))
        index = plain.call(lambda: store(ours, num_workers, moved_runs=False))
    hashing, finding, digesting, matching, listing = (Took() for _ in range(5))
    random = np.random.default_rng(7)
    results: list[tuple[kvtrie.TokenSequence, list[int], list[int]]] = []
    for _ in range(asked):
        tokens = prompts[random.integers(len(prompts))].copy()
        tokens[random.integers(SHARED * SIZE, len(tokens)) :] = 1
        ids = tokens.tolist()
        seq = kvtrie.TokenSequence(tokens, SPACE)
        hashes = hashing.call(compute_block_hash_for_seq, ids, SIZE)
        finding.call(tree.find_matches, hashes)
        digests = digesting.call(index.digests, seq)
        overlap = matching.call(index.find_matches, digests)
        listing.call(find_in, index, ids)
        results.append((seq, hashes, overlap.exact.tolist()))
    for seq, hashes, exact in results:
        assert moved.find_matches(seq).exact.tolist() == exact
        for one in (tree, other):
            assert [blocks * SIZE for blocks in said(one, hashes, num_workers)] == exact
    whole = both(hashing, finding)
    our_whole = both(digesting, matching)
    print(f"{num_workers} workers, {stored} blocks stored, {asked} prompts asked, 0 differ")
    print(shown("find, digests ready", finding.figures, matching.figures))
    print(shown("find, computed", whole, our_whole))
    print(shown("find, computed from a list", whole, listing.figures))
    print(stored_row("from vLLM's bytes", translated, plain, stored))
    print(stored_row("Dynamo from ready events, kvtrie from vLLM's bytes", ready, plain, stored))
    print(stored_row("from vLLM's bytes, kvtrie with moved runs", translated, moving, stored))
    counted = [one.stats()["bytes"] / stored for one in (index, moved)]
    print(
        f"  bytes per block stored: Dynamo {their_bytes:.0f} resident, "
        f"kvtrie {counted[0]:.1f} counted, with moved runs {counted[1]:.1f}"
    )


def main() -> None:
    quick = "--quick" in sys.argv
    if "--one-core" in sys.argv:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for num_workers in (8, 256):
        # In a process of its own, where nothing that was freed hides what is resident.
        process = multiprocessing.get_context("spawn").Process(
            target=compare,
            kwargs={
                "num_workers": num_workers,
                "entries": 20_000 if quick else ENTRIES,
                "asked": 20 if quick else 400,
                "rounds": 1 if quick else ROUNDS,
            },
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
