"""Plans of prompts that share their beginning with several cached texts, next to the model's.

Blocks are longer than the shortest run, labels differ from block to block, and some tokens have a
forbidden kind: then what a block shares with the prompt may be in several runs of one prefix.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from tests.property.kit import imported
from tests.property.twin import MANY_CANDIDATES, PLAN, pick

import kvtrie
from kvtrie.testing.model import ModelIndex, ModelSequence

# Some policies forbid kinds that nothing is tagged with.
pytestmark = pytest.mark.filterwarnings("ignore:.* forbids nothing:UserWarning")

NUM_BLOCKS = 200
NS = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


class Texts:
    """Versions of one text, each with one or two other tokens, and cut somewhere."""

    def __init__(self, rng: Random, block_size: int) -> None:
        self.rng, self.block_size = rng, block_size
        self.base = [rng.randrange(1000) for _ in range(6 * block_size)]

    def next(self) -> list[int]:
        ids = list(self.base)
        for _ in range(self.rng.choice([1, 1, 2])):
            ids[self.rng.randrange(len(ids))] = self.rng.randrange(1000, 1004)
        return ids[: self.rng.randrange(self.block_size, len(ids) + 1)]

    def spans(self, length: int) -> list[kvtrie.Span]:
        starts = [self.rng.randrange(length) for _ in range(self.rng.randrange(5))]
        ends = [min(length, start + self.rng.randrange(1, 12)) for start in starts]
        return [kvtrie.Span(*each, "reasoning") for each in zip(starts, ends, strict=True)]


def fill(both: list[Any], texts: Texts) -> None:
    rng, free = texts.rng, list(range(NUM_BLOCKS))
    for _ in range(rng.randrange(2, 8)):
        ids = texts.next()
        count = len(ids) // texts.block_size
        source = imported(rng.randrange(len(ids) + 1), rng.randrange(3))
        spans = texts.spans(len(ids))
        for index, seq in zip(both, sequences(ids), strict=True):
            done = index.insert(
                seq, free[:count], num_computed=len(ids), source=source, spans=spans
            )
        free = [block for block in free if block not in done.blocks]
        if rng.random() < 0.5:
            hole = [rng.choice(done.blocks.tolist())]
            for index in both:
                index.discard(hole)


def sequences(ids: list[int]) -> list[Any]:
    return [kvtrie.TokenSequence(ids, NS), ModelSequence(ids, NS)]


def test_plans_with_forbidden_tokens_on_the_own_prefix_agree_with_the_model() -> None:
    counts: Counter[str] = Counter()
    for seed in range(250):
        rng = Random(seed)
        block_size = rng.choice([12, 16, 24, 32])
        shape: dict[str, Any] = {"min_run": 8, "max_candidates": MANY_CANDIDATES, "seed": seed}
        both: list[Any] = [
            kvtrie.RadixIndex(NUM_BLOCKS, block_size, **shape),
            ModelIndex(NUM_BLOCKS, block_size, **shape),
        ]
        texts = Texts(rng, block_size)
        fill(both, texts)
        for _ in range(4):
            policy = kvtrie.ReusePolicy(
                scope="namespace",
                min_run=rng.choice([None, None, 10, block_size + 3]),
                max_hops=rng.choice([0, 1, 2, 3]),
                recompute_first=rng.choice([0, 0, 2]),
                forbid_kinds=("reasoning",) if rng.random() < 0.85 else (),
                partial_blocks=rng.random() < 0.6,
            )
            prompt = sequences(texts.next())
            plans = [
                index.plan(seq, policy, keep_last=0, pin=False)
                for index, seq in zip(both, prompt, strict=True)
            ]
            segments = plans[0].segments
            real, model = (pick(plan, PLAN) for plan in plans)
            for plan in plans:
                plan.release()
            assert real == model, (seed, policy)
            is_own = (segments["class"] != 2) & (segments["delta"] == 0)
            inside = is_own & (segments["start"] % block_size > 0)
            counts["plans with a run that begins inside a block"] += bool(inside.any())
        both[0].check()
    assert counts["plans with a run that begins inside a block"] > 200, counts
