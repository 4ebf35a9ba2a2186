"""A router: each prompt goes to the worker that already has most of it.

    python examples/router.py

It needs numpy alone. For each worker the router keeps an index of the prompts that it sent there.
The blocks in it are numbers without memory: as many as the worker has, evicted in about the same
order, so that the router forgets what the worker forgets. `docs/router.md` has the other half: how
much of an answer the worker still has at the next turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import kvtrie

BLOCK_SIZE = 16


@dataclass
class Worker:
    """What one engine has in its cache, as far as the router knows.

    ``running`` counts the requests that it was sent; who sees a reply end takes one off.
    """

    name: str
    num_blocks: int
    running: int = 0
    index: kvtrie.RadixIndex = field(init=False)
    free: kvtrie.BlockAllocator = field(init=False)

    def __post_init__(self) -> None:
        self.index = kvtrie.RadixIndex(self.num_blocks, BLOCK_SIZE, moved_runs=False)
        self.free = kvtrie.BlockAllocator(self.num_blocks)

    def cached(self, seq: kvtrie.TokenSequence) -> int:
        """Tokens of a prompt that need not be computed."""
        return self.index.lookup(seq, keep_last=1).num_tokens

    def send(self, seq: kvtrie.TokenSequence) -> None:
        """Note that the worker computes a prompt, which must fit into its cache."""
        with self.index.plan(seq, kvtrie.EXACT_ONLY) as plan:
            new = self.free.allocate(plan.num_new_blocks, evict_from=self.index)
            table = [*plan.blocks, *new]
            done = self.index.insert(seq, table, num_computed=len(seq), source=plan)
            self.free.free(done.surplus)
        self.running += 1


def choose(workers: list[Worker], seq: kvtrie.TokenSequence, *, tokens_per_request: int) -> Worker:
    """The worker with most of the prompt; a running request counts as tokens that it lacks."""
    return max(workers, key=lambda one: one.cached(seq) - tokens_per_request * one.running)


def main() -> None:
    """Two conversations and a third that begins like the first, on two workers."""
    workers = [Worker("gpu-0", num_blocks=64), Worker("gpu-1", num_blocks=64)]
    space = kvtrie.Namespace(model="my-model@1", salt=kvtrie.SHARED)
    system = list(range(200))
    first, second = [*system, *range(1000, 1100)], [*range(5000, 5300)]
    prompts = {
        "chat 1, turn 1": first,
        "chat 2, turn 1": second,
        "chat 1, turn 2": [*first, *range(1100, 1200)],
        "chat 2, turn 2": [*second, *range(5300, 5400)],
        "chat 3, turn 1": [*system, *range(9000, 9050)],
    }
    for name, ids in prompts.items():
        seq = kvtrie.TokenSequence(ids, space)
        worker = choose(workers, seq, tokens_per_request=64)
        print(f"{name}: {worker.name} has {worker.cached(seq)} of {len(ids)} tokens")
        worker.send(seq)


if __name__ == "__main__":
    main()
