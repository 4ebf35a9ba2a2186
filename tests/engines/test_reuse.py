"""Answers with reuse equal answers without any cache, on every kind of model.

Logits: reused KV has the same bits, but the pass that reuses it multiplies matrices of other
shapes, which sum in another order. In float32 that moves a logit by at most 1.8e-5 over 56
architectures; an error in one KV row moves it by tenths. 1e-4 is between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.engines.architectures import CONFIGS

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.engines.transformers import Generator

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Check = Callable[[Generator], None]

TOLERANCE = 1e-4


def exact_after(prompt_len: int, block_size: int) -> int:
    """Tokens found of a prompt computed before: its full blocks, but for the last token."""
    return min(prompt_len - 1, prompt_len // block_size * block_size)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_second_turn_equals_a_model_without_cache(
    architecture: str, make: Make, ids: Ids, reference: Any, check_drained: Check
) -> None:
    generator, plain = make(architecture), reference(architecture)
    first = ids(22).tolist()
    one = generator.generate(first, max_new_tokens=7, ignore_eos=True, return_logits=True)
    assert one.usage == (type(one.usage))(exact=0, moved=0, computed=22)
    assert one.tokens == plain.greedy(first, 7)
    torch.testing.assert_close(one.logits, plain.logits(first, one.tokens), atol=TOLERANCE, rtol=0)

    second = [*first, *one.tokens, *ids(9, seed=1).tolist()]
    two = generator.generate(second, max_new_tokens=9, ignore_eos=True, return_logits=True)
    # 22 + 7 tokens of which the last has no KV: 28 = 7 blocks of 4.
    assert (two.usage.exact, two.usage.computed) == (28, 10)
    assert two.tokens == plain.greedy(second, 9)
    torch.testing.assert_close(two.logits, plain.logits(second, two.tokens), atol=TOLERANCE, rtol=0)
    check_drained(generator)


@pytest.mark.parametrize("block_size", [1, 16, 17])
@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_prompts_around_block_edges(
    block_size: int,
    blocks: int,
    extra: int,
    make: Make,
    ids: Ids,
    reference: Any,
    check_drained: Check,
) -> None:
    length = blocks * block_size + extra
    if length < 1:
        pytest.skip("no prompt of fewer than one token")
    generator, plain = make(block_size=block_size, num_blocks=64), reference()
    prompt = ids(length).tolist()
    want = plain.greedy(prompt, 3)
    for expected in (0, exact_after(length, block_size)):
        done = generator.generate(prompt, max_new_tokens=3, ignore_eos=True, return_logits=True)
        assert done.usage.exact == expected
        assert done.usage.prompt == length
        assert done.tokens == want
        torch.testing.assert_close(done.logits, plain.logits(prompt, want), atol=TOLERANCE, rtol=0)
        generator.index.evict(0)
        # What was generated continues the prompt: only the prompt itself may be found again.
        _keep_prompt_blocks(generator, length)
    check_drained(generator)


def _keep_prompt_blocks(generator: Generator, length: int) -> None:
    surplus = generator.index.stats().indexed - length // generator.index.block_size
    generator.allocator.free(generator.index.evict(surplus))


def test_partly_matching_block_is_copied_not_shared(
    make: Make, ids: Ids, reference: Any, check_drained: Check
) -> None:
    generator, plain = make(block_size=8), reference()
    first = ids(32).tolist()
    generator.generate(first, max_new_tokens=1)
    every = [rows for rows in (*generator.pool.k, *generator.pool.v) if rows is not None]
    before = [rows.clone() for rows in every]
    cached = generator.index.stats().indexed
    second = [*first[:21], *ids(12, seed=1).tolist()]
    done = generator.generate(second, max_new_tokens=5, ignore_eos=True)
    assert done.usage.exact == 21
    assert done.tokens == plain.greedy(second, 5)
    seq = kvtrie.TokenSequence(first, generator.namespace())
    blocks = generator.index.lookup(seq).blocks.astype(np.int64)
    assert len(blocks) == cached == 4
    for now, then in zip(every, before, strict=True):
        assert torch.equal(now[blocks], then[blocks])
    check_drained(generator)


def test_shared_prefix_is_stored_once(make: Make, ids: Ids, check_drained: Check) -> None:
    generator = make(block_size=4)
    head = ids(24).tolist()
    for seed in range(1, 5):
        prompt = [*head, *ids(8, seed=seed).tolist()]
        done = generator.generate(prompt, max_new_tokens=1)
        assert done.usage.exact >= (24 if seed > 1 else 0)
    assert generator.index.stats().indexed == 6 + 4 * 2
    check_drained(generator)


def test_salts_are_walls(make: Make, ids: Ids) -> None:
    generator = make()
    prompt = ids(20)
    for salt in (None, "tenant-a", "tenant-b", kvtrie.SHARED):
        assert generator.generate(prompt, max_new_tokens=1, salt=salt).usage.exact == 0
        assert generator.generate(prompt, max_new_tokens=1, salt=salt).usage.exact == 19
    with pytest.raises(ValueError, match="salt"):
        generator.generate(prompt, max_new_tokens=1, salt="")


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_prefill_in_pieces_changes_nothing(
    chunk: int, make: Make, ids: Ids, reference: Any, check_drained: Check
) -> None:
    generator, plain = make(prefill_chunk=chunk), reference()
    prompt = ids(30).tolist()
    done = generator.generate(prompt, max_new_tokens=6, ignore_eos=True, return_logits=True)
    assert done.tokens == plain.greedy(prompt, 6)
    torch.testing.assert_close(
        done.logits, plain.logits(prompt, done.tokens), atol=TOLERANCE, rtol=0
    )
    check_drained(generator)


def test_forget_drops_everything(make: Make, ids: Ids, check_drained: Check) -> None:
    generator = make()
    generator.generate(ids(20), max_new_tokens=1)
    generator.forget()
    assert generator.block_counts().free == 64
    assert generator.generate(ids(20), max_new_tokens=1).usage.exact == 0
    check_drained(generator)


def test_forget_leaves_running_requests_their_blocks(
    make: Make, ids: Ids, reference: Any, check_blocks: Check, check_drained: Check
) -> None:
    generator, plain = make(), reference()
    prompt = ids(20).tolist()
    events = generator.stream(prompt, max_new_tokens=12, ignore_eos=True)
    tokens = []
    for event in events:
        tokens.append(event.token)
        if len(tokens) % 3 == 0:
            generator.forget()
            check_blocks(generator)
    assert tokens == plain.greedy(prompt, 12)
    check_drained(generator)


def test_only_its_own_slots_are_written(make: Make, ids: Ids) -> None:
    generator = make(num_blocks=16)
    every = [rows for rows in (*generator.pool.k, *generator.pool.v) if rows is not None]
    for rows in every:
        rows.fill_(float("nan"))
    done = generator.generate(ids(10), max_new_tokens=4, ignore_eos=True, return_logits=True)
    assert done.logits is not None
    assert bool(done.logits.isfinite().all())
    # 10 + 4 tokens, the last without KV: 13 slots, in every layer.
    for rows in every:
        assert int(rows[..., 0, 0].isfinite().sum()) == 13
