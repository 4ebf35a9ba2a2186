"""Plans of the index and of its model over small families of prompts, shrunk by hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.twin import MANY_CANDIDATES, PLAN, pick

import kvtrie
from kvtrie.testing import strategies as kv
from kvtrie.testing.model import ModelIndex

# Some policies forbid kinds that nothing is tagged with.
pytestmark = pytest.mark.filterwarnings("ignore:.* forbids nothing:UserWarning")

NUM_BLOCKS = 256


@given(
    data=st.data(),
    block_size=st.integers(1, 8),
    family=kv.families(max_prompts=6, max_tokens=48, alphabet=2),
    hash_bits=st.sampled_from([0, 4, 64]),
)
def test_plans_agree_with_model(
    data: st.DataObject, block_size: int, family: list[kv.Prompt], hash_bits: int
) -> None:
    shape: dict[str, Any] = {
        "min_run": 8,
        "max_candidates": MANY_CANDIDATES,
        "hash_bits": hash_bits,
    }
    both: list[Any] = [
        kvtrie.RadixIndex(NUM_BLOCKS, block_size, **shape),
        ModelIndex(NUM_BLOCKS, block_size, **shape),
    ]
    free = list(range(NUM_BLOCKS))
    for prompt in family[:-1]:
        seq, count = prompt.sequence(), len(prompt.ids) // block_size
        if count > len(free):
            break
        source, spans = data.draw(kv.sources(48)), data.draw(kv.spans(len(seq)))
        for index in both:
            done = index.insert(
                seq, free[:count], num_computed=len(seq), source=source, spans=spans
            )
        free = [block for block in free if block not in done.blocks]
        if data.draw(st.integers(0, 2)) == 0:
            ranges, force = data.draw(kv.ranges(len(seq))), data.draw(st.booleans())
            for index in both:
                index.remove_spans(seq, ranges, force=force)
    for prompt in reversed(family):
        seq, policy = prompt.sequence(), data.draw(kv.policies())
        paths = [
            each for each in map(kv.Prompt.sequence, family) if each.namespace == seq.namespace
        ]
        path = data.draw(st.none() | st.sampled_from(paths))
        keep_last = data.draw(st.integers(0, 2))
        plans = [
            index.plan(seq, policy, keep_last=keep_last, pin=False, path=path) for index in both
        ]
        real, model = (pick(plan, PLAN) for plan in plans)
        for plan in plans:
            plan.release()
        assert real == model
