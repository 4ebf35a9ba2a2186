"""One index of eight workers next to eight local plans, after W11's edit.

    python benches/python/fleet.py [--conversations 240] [--scale 1.0]

Each conversation is cached by one of eight workers: in an index of its own, as an engine has it,
and in one `KvIndexer` from the events that vLLM would publish. The next prompt lacks all reasoning.
The `KvIndexer` is asked which worker holds most of it; the eight indexes each make a plan. Both
start from fresh sequences, and take turns at being first.

Printed: how often the worker is the one that cached the conversation, the share of the prompt that
it can reuse by either, and the medians of the times with their ratio. The `KvIndexer` gives a hint
from fingerprints of whole blocks; a plan has compared tokens and pinned blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import msgpack
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forest import BLOCK_SIZE, NAMESPACE
from workloads.registry import WORKLOADS

import kvtrie

WORKERS = 8
POLICY = kvtrie.ReusePolicy(scope="namespace")


@dataclass
class Outcome:
    """Over all prompts: tokens and right workers by either way, and seconds of each search."""

    tokens: int = 0
    prompts: int = 0
    right: int = 0
    right_plans: int = 0
    hinted: int = 0
    planned: int = 0
    find: list[float] = field(default_factory=list)
    plans: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        find, plans = statistics.median(self.find), statistics.median(self.plans)
        return (
            f"{self.prompts} prompts of {self.tokens:,} tokens, {WORKERS} workers\n"
            f"right worker: {self.right} by one index, {self.right_plans} by {WORKERS} plans\n"
            f"reusable: {self.hinted / self.tokens:.2%} by one index, "
            f"{self.planned / self.tokens:.2%} by the worker's plan\n"
            f"one index {1e6 * find:.0f} us, {WORKERS} plans {1e6 * plans:.0f} us: "
            f"{plans / find:.1f} times faster"
        )


class Fleet:
    """Eight workers, each with as many blocks as it needs."""

    def __init__(self, blocks: list[int]) -> None:
        self.locals = [kvtrie.RadixIndex(max(1, one), BLOCK_SIZE, seed=0) for one in blocks]
        self.free = [kvtrie.BlockAllocator(max(1, one)) for one in blocks]
        self.shared = kvtrie.KvIndexer(BLOCK_SIZE, b"sixteen bytes ..")
        self.workers = [self.shared.add_worker(str(one), NAMESPACE) for one in range(WORKERS)]

    def cache(self, number: int, ids: np.ndarray, num_computed: int) -> None:
        at, num = number % WORKERS, num_computed // BLOCK_SIZE
        table = self.free[at].allocate(num)
        seq = kvtrie.TokenSequence(ids, NAMESPACE)
        done = self.locals[at].insert(seq, table, num_computed=num_computed, source=kvtrie.COMPUTED)
        self.free[at].free(done.duplicates)
        stored = {
            "type": "BlockStored",
            "block_hashes": list(range(number << 32, (number << 32) + num)),
            "parent_block_hash": None,
            "token_ids": ids[: num * BLOCK_SIZE].tolist(),
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
        }
        self.shared.apply(self.workers[at], msgpack.packb([0.0, [stored], 0]))

    def ask(self, number: int, prompt: np.ndarray, outcome: Outcome) -> None:
        home = number % WORKERS
        found = [self._plans, self._find]
        if number % 2:
            found.reverse()
        tokens = {one.__name__: one(prompt, outcome) for one in found}
        reused, hinted = tokens["_plans"], tokens["_find"]
        outcome.prompts += 1
        outcome.tokens += len(prompt)
        outcome.right += int(np.argmax(hinted)) == home
        outcome.right_plans += int(np.argmax(reused)) == home
        outcome.hinted += int(hinted[home])
        outcome.planned += int(reused[home])

    def _plans(self, prompt: np.ndarray, outcome: Outcome) -> np.ndarray:
        seqs = [kvtrie.TokenSequence(prompt, NAMESPACE) for _ in range(WORKERS)]
        began = perf_counter()
        plans = [one.plan(seq, POLICY) for one, seq in zip(self.locals, seqs, strict=True)]
        outcome.plans.append(perf_counter() - began)
        for one in plans:
            one.release()
        return np.array([one.num_exact + one.num_approximate for one in plans])

    def _find(self, prompt: np.ndarray, outcome: Outcome) -> np.ndarray:
        seq = kvtrie.TokenSequence(prompt, NAMESPACE)
        began = perf_counter()
        scores = self.shared.find_matches(seq, POLICY, keep_last=1)
        outcome.find.append(perf_counter() - began)
        return np.asarray(scores.exact + scores.possible)


def measured(conversations: int, scale: float) -> Outcome:
    cases = [WORKLOADS["W11"].build(seed=one + 1, scale=scale) for one in range(conversations)]
    blocks = [0] * WORKERS
    for number, case in enumerate(cases):
        blocks[number % WORKERS] += case.num_computed // BLOCK_SIZE
    fleet = Fleet(blocks)
    for number, case in enumerate(cases):
        fleet.cache(number, case.cached, case.num_computed)
    outcome = Outcome()
    for number, case in enumerate(cases):
        fleet.ask(number, case.prompt, outcome)
    return outcome


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=240)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args(arguments)
    print(measured(options.conversations, options.scale))


if __name__ == "__main__":
    main()
