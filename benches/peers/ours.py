"""kvtrie's side of every comparison: an index, its pool, and the calls of an engine."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from workloads.documents import BLOCK_SIZE, Tokens
from workloads.trees import Tree

import kvtrie

COMPUTED = kvtrie.COMPUTED
NAMESPACE = kvtrie.Namespace(model="model", kv_dtype="bfloat16", salt=kvtrie.SHARED)

Blocks = npt.NDArray[np.int32]


class Ours:
    """An index, its pool, and an engine's calls."""

    def __init__(self, cached_tokens: int, *, moved_runs: bool = False) -> None:
        num_blocks = -(-cached_tokens // BLOCK_SIZE)
        self.index = kvtrie.RadixIndex(num_blocks, BLOCK_SIZE, moved_runs=moved_runs, seed=0)
        self.pool = kvtrie.BlockAllocator(num_blocks)

    def sequence(self, tokens: Tokens | Sequence[int]) -> kvtrie.TokenSequence:
        """A fresh sequence, which no index has seen."""
        return kvtrie.TokenSequence(tokens, NAMESPACE)

    def room(self, tokens: int) -> Blocks:
        return self.pool.allocate(tokens // BLOCK_SIZE, evict_from=self.index)

    def store(self, tokens: Tokens, start: int = 0) -> Blocks:
        blocks = self.room(len(tokens) - start)
        done = self.index.insert(
            self.sequence(tokens),
            blocks,
            num_computed=len(tokens),
            start=start,
            source=kvtrie.COMPUTED,
        )
        self.pool.free(done.duplicates)
        return done.blocks

    def store_all(self, documents: Iterable[Tokens]) -> None:
        """Insert documents, each in one edge."""
        for tokens in documents:
            self.store(tokens)

    def grow(self, tree: Tree) -> None:
        """Insert a tree step by step."""
        for tokens, start in tree.inserts():
            self.store(tokens, start)

    def lookup(self, seq: kvtrie.TokenSequence) -> Blocks:
        """The ids that back a sequence."""
        return self.index.lookup(seq).blocks

    def lookup_tokens(self, tokens: Tokens | Sequence[int]) -> Blocks:
        return self.index.lookup(kvtrie.TokenSequence(tokens, NAMESPACE)).blocks

    def turn(self, tokens: kvtrie.TokenSequence | Tokens | Sequence[int]) -> tuple[int, Blocks]:
        """A whole turn of a request: look up, plan, allocate (which evicts), insert, release."""
        index, pool = self.index, self.pool
        if isinstance(tokens, kvtrie.TokenSequence):
            seq = tokens
        else:
            seq = kvtrie.TokenSequence(tokens, NAMESPACE)
        found = index.lookup(seq, keep_last=1).num_tokens
        plan = index.plan(seq, keep_last=1)
        fresh = pool.allocate(plan.num_new_blocks, evict_from=index)
        held = plan.blocks
        start = len(held) * BLOCK_SIZE
        done = index.insert(seq, fresh, num_computed=len(seq), start=start, source=plan)
        pool.free(done.duplicates)
        pool.free(done.surplus)
        plan.release()
        return found, np.concatenate([held, done.blocks])

    def step(self, sequences: list[kvtrie.TokenSequence]) -> tuple[Blocks, Blocks]:
        """A step of a scheduler: all requests get their blocks before any of them is released."""
        index, pool = self.index, self.pool
        plans = [index.plan(seq, keep_last=1) for seq in sequences]
        held, new = [plan.blocks for plan in plans], []
        for seq, plan, blocks in zip(sequences, plans, held, strict=True):
            done = index.insert(
                seq,
                pool.allocate(plan.num_new_blocks, evict_from=index),
                num_computed=len(seq),
                start=len(blocks) * BLOCK_SIZE,
                source=plan,
            )
            pool.free(done.duplicates)
            pool.free(done.surplus)
            new.append(done.blocks)
        for plan in plans:
            plan.release()
        return np.concatenate(held), np.concatenate(new)
