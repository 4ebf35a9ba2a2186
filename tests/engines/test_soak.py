"""Random requests to one generator: every answer is right, and no step loses a block."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.engines.transformers import Generator, Request

    Make = Callable[..., Generator]
    Check = Callable[[Generator], None]

NEW = 6


def draw_prompt(rng: random.Random, heads: list[list[int]], answers: list[list[int]]) -> list[int]:
    fresh = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 20))]
    kind = rng.random()
    if kind < 0.2 or not answers:
        return fresh
    if kind < 0.6:
        head = rng.choice(heads)
        return head[: rng.randrange(1, len(head) + 1)] + fresh
    return rng.choice(answers)[-60:] + fresh[:5]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(4, 30), (1, 110), (7, 14)])
def test_random_life(
    seed: int,
    block_size: int,
    num_blocks: int,
    make: Make,
    check_blocks: Check,
    drain: Check,
    check_drained: Check,
) -> None:
    rng = random.Random(seed)
    oracle = make(num_blocks=400)
    generator = make(num_blocks=num_blocks, block_size=block_size, prefill_chunk=rng.choice([3, 9]))
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    heads = [[rng.randrange(3, 60) for _ in range(30)] for _ in range(3)]
    answers: list[list[int]] = []
    live: list[tuple[Request, list[int]]] = []
    num_cancelled = num_done = num_preempted = 0
    for _ in range(120):
        act = rng.random()
        if act < 0.25:
            prompt = draw_prompt(rng, heads, answers)
            live.append((generator.submit(prompt, **options), prompt))
        elif act < 0.30 and live:
            generator.cancel(rng.choice(live)[0])
            num_cancelled += 1
        elif act < 0.31:
            generator.forget()
        else:
            generator.step()
        check_blocks(generator)
        for request, prompt in [item for item in live if item[0].status == "finished"]:
            live.remove((request, prompt))
            num_preempted += request.num_preemptions
            want = oracle.generate(prompt, **options).tokens
            assert request.tokens == want[: len(request.tokens)], f"seed {seed}: {prompt}"
            if request.finish_reason == "length":
                num_done += 1
                assert request.tokens == want
                answers.append(prompt + want)
            else:
                assert request.finish_reason == "cancelled"
    drain(generator)
    check_drained(generator)
    generator.forget()
    assert generator.block_counts().free == num_blocks
    assert num_done > 5


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(4, 44), (1, 160), (7, 24)])
def test_plain_requests_among_approximate_ones(
    seed: int,
    block_size: int,
    num_blocks: int,
    make: Make,
    check_blocks: Check,
    drain: Check,
    check_drained: Check,
) -> None:
    """Histories are cut in the middle; plain requests never see moved KV."""
    rng = random.Random(seed)
    oracle = make(num_blocks=600)
    generator = make(
        num_blocks=num_blocks,
        block_size=block_size,
        prefill_chunk=rng.choice([3, 9]),
        gate="unchecked",
    )
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    texts = [[rng.randrange(3, 60) for _ in range(60)] for _ in range(3)]
    policies = [
        kvtrie.EXACT_ONLY,
        kvtrie.ReusePolicy(scope="namespace"),
        kvtrie.ReusePolicy(scope="namespace", max_hops=9, recompute_first=2),
    ]
    live: list[tuple[Request, list[int], kvtrie.ReusePolicy]] = []
    num_plain = num_moved = 0
    for _ in range(400):
        act = rng.random()
        if act < 0.15:
            text = rng.choice(texts)
            first, last = sorted(rng.sample(range(len(text)), 2))
            prompt = text[:first] + text[last:] + [rng.randrange(3, 60)]
            policy = rng.choice(policies)
            live.append((generator.submit(prompt, policy=policy, **options), prompt, policy))
        elif act < 0.17 and live:
            generator.cancel(rng.choice(live)[0])
        else:
            generator.step()
        check_blocks(generator)
        for request, prompt, policy in [item for item in live if item[0].status == "finished"]:
            live.remove((request, prompt, policy))
            num_moved += request.usage.moved
            if policy.approximate:
                continue
            assert request.usage.moved == 0
            want = oracle.generate(prompt, **options).tokens
            assert request.tokens == want[: len(request.tokens)], f"seed {seed}: {prompt}"
            num_plain += request.finish_reason == "length"
    drain(generator)
    check_drained(generator)
    assert num_plain > 3
    assert num_moved > 20
