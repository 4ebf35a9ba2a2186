"""The index against its model, driven by hypothesis: every result and count, at every step."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tests.property.soak import describe, run
from tests.property.twin import Pair, Twin

from kvtrie.testing import strategies as kv
from kvtrie.testing.model import ModelSequence

# Some policies forbid kinds that nothing is tagged with.
pytestmark = pytest.mark.filterwarnings("ignore:.* forbids nothing:UserWarning")

RANDOMS = st.randoms(use_true_random=False)


class IndexMachine(RuleBasedStateMachine):
    """Calls of one index, its mirror and its model; `Twin` makes and compares them."""

    hash_bits = 64
    twin: Twin

    @initialize(
        rng=RANDOMS,
        num_blocks=kv.pool_sizes(),
        # The model compares all of a prompt with all that is cached: of 4096 that takes too long.
        block_size=kv.block_sizes().map(lambda size: min(size, 64)),
        family=kv.families(max_tokens=48),
        seed=st.integers(0, 2**64 - 1),
        moved_runs=st.sampled_from([True, True, True, False]),
    )
    def make(
        self,
        rng: Random,
        num_blocks: int,
        block_size: int,
        family: list[kv.Prompt],
        seed: int,
        moved_runs: bool,
    ) -> None:
        self.twin = Twin(
            rng,
            num_blocks=num_blocks,
            block_size=block_size,
            hash_bits=self.hash_bits,
            seed=seed,
            max_tokens=max(48, 2 * block_size),
            moved_runs=moved_runs,
        )
        for prompt in family:
            # Made long enough to fill blocks of the larger sizes.
            times = 1 if block_size <= 8 else block_size // 8 + 1
            ids = list(prompt.ids) * times
            model = ModelSequence(ids, prompt.namespace, prompt.items)
            pair = Pair.of(model)
            self.twin.pairs.append(pair)

    def go(self, rng: Random, call: str) -> None:
        self.twin.rng = rng
        getattr(self.twin, call)()
        self.twin.verify()

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            try:
                self.twin.rng = Random(0)
                self.twin.drain()
            finally:
                self.twin.abandon()

    @rule(rng=RANDOMS, call=st.sampled_from([name for name, _ in Twin.CALLS]))
    def any_call(self, rng: Random, call: str) -> None:
        self.go(rng, call)

    @rule(rng=RANDOMS)
    def insert(self, rng: Random) -> None:
        self.go(rng, "insert")

    @rule(rng=RANDOMS)
    def plan(self, rng: Random) -> None:
        self.go(rng, "plan")

    @rule(
        rng=RANDOMS,
        call=st.sampled_from(
            [
                "hollow",
                "discard",
                "drop",
                "reset",
                "restart",
                "quarantine",
                "mark_dead",
                "remove_spans",
                "evict",
            ]
        ),
    )
    def remove(self, rng: Random, call: str) -> None:
        self.go(rng, call)


@pytest.mark.parametrize("hash_bits", [64, 8, 4, 0])
def test_index_agrees_with_model(hash_bits: int) -> None:
    class Machine(IndexMachine):
        pass

    Machine.hash_bits = hash_bits
    profile = settings()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            profile,
            max_examples=profile.max_examples,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("hash_bits", [64, 8, 4, 0])
def test_index_agrees_with_model_at_random(hash_bits: int) -> None:
    report = run(10_000, first=1_000_000 + 1_000 * hash_bits, hash_bits=hash_bits)
    assert not report.mismatches, describe(report, 0.0)
    ended = report.counts["episodes ended by dropped candidates"]
    drained = report.counts["episodes drained, no block lost"]
    assert drained + ended == report.counts["episodes"]
    assert drained > ended
