"""Hit lengths of an index with groups, next to vLLM's `HybridKVCacheCoordinator`.

A case is a random model with groups, a small pool and some requests that share prefixes, in chunks,
several at a time, some of them preempted, with evictions by pressure and of single blocks. Both
sides hold the same KV (`coordinator.py`), and are asked at each request's arrival and about six
prompts at the end. Lengths differ for the reasons alone that docs/groups.md explains; whether one
holds is decided from what is cached. `make soak-vllm-coordinator` runs 20,000 cases.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import runpy
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.vllm_scheduler.coordinator import ALIGNED, INSIDE, LEFT, LayerGroup, SideBySide
from vllm.v1.core import kv_cache_utils

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

SCRIPT = Path(__file__).parents[2] / "benches" / "python" / "coordinator.py"
# Cases of each kind.
NUM_CASES = int(os.environ.get("KVTRIE_VLLM_COORDINATOR", "30"))
# For each kind, the reasons that may make the sides differ.
REASONS = {
    "full + window": {LEFT},
    "full + Mamba": {LEFT},
    "three groups": {LEFT},
    "blocks of two sizes": {LEFT, ALIGNED},
    "hits inside a block": {LEFT, ALIGNED, INSIDE},
}


def model_of(kind: str, rng: random.Random) -> tuple[list[LayerGroup], int]:
    """Random groups of a kind, and the tokens of a block hash."""
    unit = rng.choice([2, 3, 4])

    def window(block: int = unit) -> LayerGroup:
        return LayerGroup(block, window=rng.randint(2, 6 * block))

    def state(block: int = unit) -> LayerGroup:
        return LayerGroup(block, is_state=True)

    groups = [LayerGroup(unit)]
    if kind == "full + window":
        groups += [window()]
    elif kind == "full + Mamba":
        groups += [state()]
    elif kind == "three groups":
        groups += rng.choice([[window(), state()], [window(), window()], [state(), window()]])
    elif kind == "blocks of two sizes":
        wide = unit * rng.choice([2, 3])
        sizes = rng.choice([(unit, wide), (wide, unit), (2 * unit, 3 * unit)])
        groups = [LayerGroup(sizes[0]), window(sizes[1])]
    else:
        wide = unit * rng.choice([2, 3])
        groups = [LayerGroup(rng.choice([unit, wide])), state(wide)]
        if rng.random() < 0.3:
            groups += [window()]
    rng.shuffle(groups)
    return groups, unit


class Play:
    """One case: requests that run next to each other, and what both sides say of them."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = rng = random.Random(f"{kind} {seed}")
        groups, unit = model_of(kind, rng)
        common = SideBySide.common_block(groups)
        self.both = SideBySide(
            groups,
            unit,
            num_blocks=rng.randint(24, 50) * len(groups),
            retention=rng.choice([None, None, 0, common, 3 * common]),
        )
        self.reasons = REASONS[kind]
        self.states = [group.block for group in groups if group.is_state]
        self.texts: list[list[int]] = [self._random(unit)]
        self.running: dict[Request, int] = {}
        self.counts: Counter[str] = Counter()

    def go(self) -> None:
        left = self.rng.randint(4, 16)
        while left or self.running:
            self.both.coordinator.new_step_starts()
            for request in list(self.running):
                self._step(request)
            if left and len(self.running) < 3 and self.rng.random() < 0.7:
                left -= 1
                self._arrive()
            if not self.running and self.rng.random() < 0.2:
                self._evict()
        for _ in range(6):
            prompt = self._prompt()
            self._compare(
                prompt, self.rng.choice([len(prompt) - 1, self.rng.randrange(len(prompt))])
            )
        self.both.check()

    def _compare(self, prompt: Sequence[int], limit: int) -> None:
        answer = self.both.ask(prompt, limit)
        self.counts["asked"] += 1
        self.counts["hits"] += answer.kvtrie > 0
        self.counts["cut"] += answer.kvtrie < answer.full
        self.counts["equal"] += answer.kvtrie == answer.vllm
        assert answer.reasons <= self.reasons, answer
        if not answer.reasons:
            assert answer.kvtrie == answer.vllm, answer
        elif answer.reasons == {LEFT}:
            assert answer.vllm > answer.kvtrie, answer
        elif answer.reasons <= {ALIGNED, INSIDE}:
            assert answer.kvtrie > answer.vllm, answer
        # With `LEFT` and another reason either may be longer; the lengths are those of the rules.
        if answer.kvtrie != answer.vllm:
            self.counts[" and ".join(sorted(answer.reasons))] += 1

    def _arrive(self) -> None:
        request = self.both.request(self._prompt())
        self._compare(request.all_token_ids[:], request.num_tokens - 1)
        manager = self.both.manager
        blocks, found, junction = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        new = self._chunk(request, found)
        if manager.allocate_slots(request, new, found, blocks) is None:
            manager.free(request)
            self.counts["refused"] += 1
        else:
            request.num_computed_tokens = found + new
            self.running[request] = self.rng.choice([0, 1, 5, 20])
        self.both.update(request)

    def _step(self, request: Request) -> None:
        manager = self.both.manager
        if request.num_computed_tokens == request.num_tokens:
            if not self.running[request]:
                self.texts.append(request.all_token_ids[:])
                self._end(request)
                return
            self.running[request] -= 1
            request.append_output_token_ids(self.rng.randrange(3))
        new = self._chunk(request, request.num_computed_tokens)
        if manager.allocate_slots(request, new) is None:
            self.counts["preempted"] += 1
            self._end(request)
            return
        request.num_computed_tokens += new
        self.both.update(request)

    def _end(self, request: Request) -> None:
        del self.running[request]
        self.both.manager.free(request)
        self.both.update(request)

    def _evict(self) -> None:
        pool = self.both.manager.block_pool
        cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
        count = min(len(cached), self.rng.randint(1, 6))
        self.both.manager.evict_blocks(set(self.rng.sample(cached, count)))
        self.both.update()

    def _chunk(self, request: Request, start: int) -> int:
        """Tokens of the next step; with states they end where vLLM's scheduler ends a chunk."""
        both = self.both
        end = min(request.num_tokens, start + self.rng.randint(1, 5) * both.common)
        last = max(request.num_prompt_tokens, request.num_tokens - 1)
        if not self.states or start >= last:
            return int(end - start)
        (block,) = set(self.states)
        if end < last and end // block * block > start:
            end = end // block * block
        junction = request.shared_prefix_boundary
        tail = (request.num_prompt_tokens - 1) // both.unit * both.unit if both.is_fine else 0
        stops = [
            (request.num_tokens - 1) // block * block,
            (start // block + 1) * block if start % block else 0,
            tail,
            start + (junction - start) // block * block if start < junction < end else 0,
        ]
        return int(min((stop for stop in stops if start < stop < end), default=end) - start)

    def _prompt(self) -> list[int]:
        text = self.rng.choice(self.texts)
        if self.rng.random() < 0.3:
            return text[:]
        return text[: self.rng.randint(0, len(text))] + self._random(self.both.unit)

    def _random(self, unit: int) -> list[int]:
        return self.rng.choices(range(3), k=self.rng.randint(1, 12 * unit))


@pytest.mark.parametrize("kind", REASONS)
def test_hit_lengths_are_those_of_vllm(kind: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_CASES):
        play = Play(kind, seed)
        try:
            play.go()
        except AssertionError as error:
            error.add_note(f"{kind!r}, seed {seed}, {play.both.groups}")
            raise
        counts += play.counts
        counts["cases"] += 1
    print(f"\n{kind}: {dict(counts)}")  # noqa: T201 - shown with pytest -s
    # Neither side answers 0 to everything, and a group decides some answers.
    assert counts["hits"] > counts["asked"] / 3
    assert counts["cut"] > counts["asked"] / 20


def computed(both: SideBySide, tokens: Sequence[int], end: int) -> list[list[int]]:
    """vLLM's blocks of a request that is computed up to `end` in one step, and is then freed."""
    request = both.request(tokens)
    manager = both.manager
    blocks, found, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, end - found, found, blocks)
    both.update(request)
    ids: list[list[int]] = list(manager.get_block_ids(request.request_id))
    manager.free(request)
    both.update(request)
    return ids


def test_a_state_that_left_with_its_block_stays_in_vllm() -> None:
    both = SideBySide([LayerGroup(4), LayerGroup(4, is_state=True)], 4, 50, retention=None)
    prompt = [*range(8), 99]
    (_, last), _ = computed(both, prompt, 8)
    assert both.ask(prompt, 8).vllm == both.ask(prompt, 8).kvtrie == 8
    both.manager.evict_blocks({last})
    both.update()
    assert both.ask(prompt, 8).vllm == both.ask(prompt, 8).kvtrie == 0
    # The block is computed again by a prompt that passes its end, so that nobody has the state.
    computed(both, [*range(8), *range(50, 59)], 16)
    answer = both.ask(prompt, 8)
    assert (answer.vllm, answer.kvtrie, answer.full) == (8, 0, 8)
    assert answer.reasons == {LEFT}


def test_a_hit_of_vllm_ends_at_a_common_block() -> None:
    both = SideBySide([LayerGroup(4), LayerGroup(8, window=5)], 4, 50, retention=None)
    computed(both, [*range(16), 99], 16)
    answer = both.ask([*range(12), 50], 12)
    assert (answer.vllm, answer.kvtrie, answer.reasons) == (8, 12, frozenset({ALIGNED}))


def test_vllm_finds_no_part_of_a_block_but_the_end_of_its_prompt() -> None:
    both = SideBySide([LayerGroup(8), LayerGroup(8, is_state=True)], 4, 50, retention=None)
    assert both.is_fine
    computed(both, [*range(4), *range(50, 55)], 8)
    prompt = [*range(5)]
    (tail,), _ = computed(both, prompt, 4)
    assert both.ask(prompt, 4).vllm == both.ask(prompt, 4).kvtrie == 4
    both.manager.evict_blocks({tail})
    both.update()
    # The block that is left begins with the same tokens.
    answer = both.ask(prompt, 4)
    assert (answer.vllm, answer.kvtrie, answer.reasons) == (0, 4, frozenset({INSIDE}))


def test_the_benchmark_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The script draws another one, which cores of other tests would hash with.
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", kv_cache_utils.NONE_HASH)
    # It raises where a side's hit is not the known one. It collects garbage before each row, of
    # which vLLM's imports leave much to look through.
    gc.freeze()
    try:
        runpy.run_path(str(SCRIPT))["main"](["--quick", "--kind", "full + window"])
    finally:
        gc.unfreeze()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert {row[1] for row in rows} == {"a next turn", "an edited history"}
    assert len(rows) == 9
    # It silenced the logs of all tests after it.
    assert logging.root.manager.disable == logging.NOTSET
    assert all(float(row[5].removesuffix(" |")) > 0 for row in rows)
