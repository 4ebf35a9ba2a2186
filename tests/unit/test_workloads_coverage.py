"""One plan reuses nearly the most that any choice of pieces could reuse of every workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from workloads.ceiling import Ceiling, coverage, reused
from workloads.registry import WORKLOADS
from workloads.shapes import ChatTurn

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from workloads.history import Conversation

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
MOVED = kvtrie.ReusePolicy(scope="namespace")
NOBODY = np.iinfo(np.uint32).max

# Texts a third as long as in the tables: runs stay longer than a few blocks.
SCALE = 0.3
# The least share of the ceiling that any plan of a workload reuses. The worst is W04 of worded
# texts: of 563 tokens that another choice of pieces covers, those from left to right cover 556.
LEAST = 0.98
# Short prompts of W18 have few looks (P16). Where conversations share words, the worst of them has
# used them up on windows with many places before it meets its long run.
SEARCHES_THAT_END_EARLY = {("W18", "worded"): 0.88}

# Blocks for what a plan copies and computes.
SPARE = 8_192


@dataclass
class Cache:
    """An index with conversations in it, the tokens of its slots, and what a plan could reuse."""

    index: kvtrie.RadixIndex
    slots: npt.NDArray[np.uint32]
    ceiling: Ceiling
    num_blocks: int

    @staticmethod
    def of(cached: Sequence[npt.NDArray[np.uint32]], computed: Sequence[int], size: int) -> Cache:
        num_blocks = sum(len(ids) // size for ids in cached)
        index = kvtrie.RadixIndex(num_blocks + SPARE, size, seed=0)
        pool = kvtrie.BlockAllocator(num_blocks)
        slots = np.full((num_blocks, size), NOBODY, dtype=np.uint32)
        for ids, count in zip(cached, computed, strict=True):
            blocks = pool.allocate(len(ids) // size)
            seq = kvtrie.TokenSequence(ids, SPACE)
            done = index.insert(seq, blocks, num_computed=count, source=kvtrie.COMPUTED)
            pool.free(done.duplicates)
            pool.free(done.surplus)
            slots[done.blocks] = ids[: done.blocks.size * size].reshape(-1, size)
        ceiling = Ceiling(cached, block_size=size, num_computed=computed)
        return Cache(index, slots.ravel(), ceiling, num_blocks)

    def check(self, prompt: npt.NDArray[np.uint32]) -> tuple[float, int]:
        """Plan a prompt; share of the ceiling, and how many candidates were dropped."""
        reach = self.ceiling.of(prompt, keep_last=1)
        with self.index.plan(kvtrie.TokenSequence(prompt, SPACE), MOVED) as plan:
            segments = plan.segments
            fresh = np.arange(plan.num_new_blocks, dtype=np.int32) + self.num_blocks
            table = np.concatenate([plan.blocks, fresh])
            moves = plan.moves(table)
            dropped = plan.candidates_dropped
        self._check_moves(prompt, table, moves)
        # Every reused token is cached somewhere.
        assert not (reused(segments, len(prompt)) & ~reach.mask).any()
        found = coverage(segments, reach)
        assert found <= 1.0
        return found, dropped

    def _check_moves(
        self,
        prompt: npt.NDArray[np.uint32],
        table: npt.NDArray[np.int32],
        moves: npt.NDArray[np.void],
    ) -> None:
        """Every copy takes the tokens that the prompt has where it puts them."""
        size = len(self.slots) // self.num_blocks
        places = {int(block): number * size for number, block in enumerate(table)}
        for move in moves:
            source, dest, count = (
                int(move[name]) for name in ("source_slot", "dest_slot", "num_tokens")
            )
            start = places[dest // size] + dest % size
            assert prompt[start : start + count].tolist() == (
                self.slots[source : source + count].tolist()
            )


@lru_cache(maxsize=4)
def conversations(name: str, count: int, shared: bool, text: str) -> tuple[Conversation, ...]:
    workload = WORKLOADS[name]
    return tuple(
        workload.build(number, seed=1, scale=SCALE, shared=shared, text=text)
        for number in range(count)
    )


@pytest.mark.parametrize("block_size", [16, 32, 1])
@pytest.mark.parametrize("name", WORKLOADS)
def test_coverage_of(name: str, block_size: int) -> None:
    for count in (1, 20):
        made = conversations(name, count, shared=False, text="uniform")
        cache = Cache.of(
            [each.cached for each in made], [each.num_computed for each in made], block_size
        )
        for each in made:
            assert cache.check(each.prompt) == (1.0, 0)


@pytest.mark.parametrize("text", ["uniform", "worded"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_coverage_with_shared_boilerplate_of(name: str, text: str) -> None:
    made = conversations(name, 20, shared=True, text=text)
    cache = Cache.of([each.cached for each in made], [each.num_computed for each in made], 16)
    least = SEARCHES_THAT_END_EARLY.get((name, text), LEAST)
    for each in made[::3]:
        found, dropped = cache.check(each.prompt)
        assert found >= (least if dropped else LEAST)


def test_coverage_where_candidates_are_dropped() -> None:
    workload = WORKLOADS["W01"]
    short = replace(workload, shape=ChatTurn(system=400, question=20, reasoning=20, answer=20))
    made = [short.build(number, seed=1, shared=True) for number in range(1_000)]
    cache = Cache.of([each.cached for each in made], [each.num_computed for each in made], 16)
    # A newcomer: the boilerplate after its own line is in all other conversations.
    found, dropped = cache.check(short.build(1_000, seed=1, shared=True).cached)
    assert dropped > 0
    assert found >= LEAST


@pytest.mark.parametrize("extra", range(16))
def test_answers_of_20_to_255_tokens_are_found_whole(extra: int) -> None:
    for answer in range(20, 256):
        turn = WORKLOADS["W01"].build(
            seed=answer, system=40, question=24, reasoning=70, answer=answer, extra=extra
        )
        (span,) = (span for span in turn.prompt_spans if span.kind == "answer")
        # Within the turn the reasoning is kept, and the user message follows the answer.
        asked = turn.prompt[turn.kept[-1].end :]
        cached = np.concatenate([turn.cached, asked])
        cache = Cache.of([cached], [len(cached)], 16)
        prompt = turn.prompt
        assert cache.check(prompt) == (1.0, 0)
        with cache.index.plan(kvtrie.TokenSequence(prompt, SPACE), MOVED) as plan:
            mask = reused(plan.segments, len(prompt))
        assert mask[span.start : span.end].all(), f"answer={answer}"
