"""What a scrape costs, how long it holds the index, and what counting a prompt costs.

`python benches/python/metrics.py` prints both tables; every figure is a median of CPU time.
"""

from __future__ import annotations

import statistics
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

import kvtrie
from kvtrie.metrics import Collector, Prompts

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 16
# All conversations begin with HEAD tokens, and go on with TURN of their own.
HEAD, TURN = 64, 256
CONVERSATIONS = (100, 10_000, 100_000)
LENGTHS = (1_000, 20_000, 100_000)
SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
OWN = kvtrie.ReusePolicy(shared_prefix=HEAD // BLOCK_SIZE)


def microseconds(call: Callable[[], object], times: int) -> float:
    took = []
    for _ in range(times):
        began = thread_time()
        call()
        took.append(thread_time() - began)
    return statistics.median(took) * 1e6


def cached(conversations: int) -> tuple[kvtrie.RadixIndex, np.random.Generator]:
    per = (HEAD + TURN) // BLOCK_SIZE
    index = kvtrie.RadixIndex(conversations * per, BLOCK_SIZE, seed=1)
    rng = np.random.default_rng(0)
    for number in range(conversations):
        ids = np.concatenate([np.arange(HEAD), rng.integers(HEAD, 50_000, TURN)])
        seq = kvtrie.TokenSequence(ids, SPACE)
        start = index.lookup(seq).num_tokens
        blocks = np.arange(per - start // BLOCK_SIZE, dtype=np.int32) + number * per
        index.insert(
            seq,
            blocks,
            num_computed=len(ids),
            start=start,
            source=kvtrie.COMPUTED,
            session=f"chat-{number}",
        )
    return index, rng


def main() -> None:
    for conversations in CONVERSATIONS:
        index, rng = cached(conversations)
        registry = CollectorRegistry()
        registry.register(Collector(index=index, tracker=kvtrie.TurnTracker()))
        held = microseconds(index.stats, 200)
        whole = microseconds(lambda one=registry: generate_latest(one), 50)  # type: ignore[misc] # of this turn
        nodes = index.stats().nodes
        print(f"{nodes:7,} nodes: stats() {held:6.1f} us, a scrape {whole:6.0f} us", flush=True)
    prompts = Prompts(index)
    for length in LENGTHS:
        ids = np.concatenate([np.arange(HEAD), rng.integers(HEAD, 50_000, length - HEAD)])
        seq = kvtrie.TokenSequence(ids, SPACE)
        for name, policy in (("exact", kvtrie.EXACT_ONLY), ("moving", OWN)):
            with index.plan(seq, policy, session="chat-7") as plan:
                took = microseconds(
                    lambda: index.plan(
                        seq,  # noqa: B023
                        policy,  # noqa: B023
                        session="chat-7",
                        pin=False,
                    ).release(),
                    40,
                )
                counted = microseconds(
                    lambda: prompts.count(seq, plan, policy, session="chat-7"),  # noqa: B023
                    40,
                )
            print(f"{length:7,} tokens, {name}: plan {took:6.0f} us, count {counted:6.0f} us")


if __name__ == "__main__":
    main()
