"""One conversation, edited repeatedly: KV is rotated once, from the original, or computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

import kvtrie
from kvtrie import KVLayout, KVPool
from kvtrie.kernels import reference
from kvtrie.rope import RopeSpec, Rotary

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE, NUM_BLOCKS, EDITS, BODY = 16, 256, 64, 160
SPACE = kvtrie.Namespace(model="toy@1", salt=kvtrie.SHARED)
POLICY = kvtrie.ReusePolicy(scope="namespace")
ROTARY = Rotary(tuple(10_000.0 ** (-i / 8) for i in range(8)))


class Engine:
    """The loop of the manual over a pool of bfloat16; computed slots are not changed."""

    def __init__(self) -> None:
        layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=16, dtype="bfloat16")
        self.rope = RopeSpec(layers=(ROTARY,), head_dim=16)
        self.pool = KVPool(layout, self.rope, num_blocks=NUM_BLOCKS)
        self.index = kvtrie.RadixIndex(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.blocks = kvtrie.BlockAllocator(NUM_BLOCKS)

    def ask(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.int32], kvtrie.ReusePlan]:
        seq = kvtrie.TokenSequence(tokens, SPACE)
        plan = self.index.plan(seq, POLICY)
        fresh = self.blocks.allocate(plan.num_new_blocks, evict_from=self.index)
        table = np.concatenate([plan.blocks, fresh])
        self.pool.apply(plan.moves(table))
        plan.release_sources()
        held = table[len(plan.blocks) :]
        done = self.index.insert(
            seq, held, num_computed=len(seq), start=len(plan.blocks) * BLOCK_SIZE, source=plan
        )
        for ids in (done.duplicates, done.surplus, done.freed):
            self.blocks.free(ids)
        plan.release()
        self.blocks.free(self.index.take_freed())
        return table, plan


def test_sixty_four_edits_rotate_every_key_once() -> None:
    engine = Engine()
    body = np.arange(1000, 1000 + BODY)
    k = torch.randn(1, BODY, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    table, _ = engine.ask(body)
    engine.pool.scatter(k, -k, table, start=0)
    for number in range(1, EDITS + 1):
        # Other tokens come before the body each time, one more: it moves, and is cached again.
        prompt = np.concatenate([10_000 + 100 * number + np.arange(number), body])
        table, plan = engine.ask(prompt)
        assert (plan.num_approximate, plan.num_compute) == (BODY - 1, number + 1)
        assert plan.segments["hops"].max() == 1
        found, values = engine.pool.gather(table, number, number + BODY - 1)
        rows = k[0, :-1].transpose(0, 1)
        once = reference.rotate(rows, engine.rope, delta=number).transpose(0, 1)
        assert torch.equal(found[0], once)
        assert values is not None
        assert torch.equal(values[0], -k[0, :-1])
        exact = reference.rotate(rows.double(), engine.rope, delta=number).transpose(0, 1)
        rounding = (exact.bfloat16().double() - exact).norm()
        assert (found[0].double() - exact).norm() <= 1.05 * rounding


def test_kv_without_its_original_is_computed_and_not_rotated_again() -> None:
    engine = Engine()
    body = np.arange(1000, 1000 + BODY)
    original, _ = engine.ask(body)
    engine.ask(np.concatenate([[5000], body]))
    engine.blocks.free(engine.index.discard(original))
    # Its copy is still there, rotated once; a copy of that would be rotated twice.
    prompt = np.concatenate([[6000, 6001], body])
    _, plan = engine.ask(prompt)
    assert (plan.num_approximate, plan.num_compute) == (0, len(prompt))
    seq = kvtrie.TokenSequence(np.concatenate([[7000], body]), SPACE)
    engine.index.discard(engine.index.lookup(kvtrie.TokenSequence(prompt, SPACE)).blocks)
    with engine.index.plan(seq, kvtrie.ReusePolicy(max_hops=2, scope="namespace")) as plan:
        assert plan.num_approximate == BODY - 1
        assert plan.segments["hops"].max() == 2
