"""Several requests over one pool: waiting, preemption, eviction, and the same answers as alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtrie._core import OutOfBlocksError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from kvtrie.engines.transformers import Generator

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Check = Callable[[Generator], None]


def prompts(ids: Ids) -> list[list[int]]:
    head = ids(18).tolist()
    return [
        [*head, *ids(5, seed=1).tolist()],
        ids(11, seed=2).tolist(),
        [*head, *ids(9, seed=3).tolist()],
        ids(30, seed=4).tolist(),
        [*head, *ids(5, seed=1).tolist()],
        ids(1, seed=5).tolist(),
    ]


@pytest.mark.parametrize("num_blocks", [200, 24, 13])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_interleaved_requests_equal_one_by_one(
    num_blocks: int, sampled: bool, make: Make, ids: Ids, drain: Check, check_drained: Check
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 14, "ignore_eos": True}
    if sampled:
        options |= {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    alone = [make(num_blocks=200).generate(prompt, **options).tokens for prompt in prompts(ids)]
    generator = make(num_blocks=num_blocks, prefill_chunk=8)
    requests = [generator.submit(prompt, **options) for prompt in prompts(ids)]
    assert {request.status for request in requests} == {"waiting"}
    drain(generator)
    assert [request.tokens for request in requests] == alone
    assert [request.finish_reason for request in requests] == ["length"] * len(requests)
    preemptions = sum(request.num_preemptions for request in requests)
    assert (preemptions > 0) == (num_blocks < 200)
    check_drained(generator)


def test_equal_prompts_at_once_share_what_the_first_computes(
    make: Make, ids: Ids, check_drained: Check
) -> None:
    generator = make()
    one, two = (generator.submit(ids(30), max_new_tokens=2) for _ in range(2))
    generator.step()
    assert (one.usage.exact, two.usage.exact) == (0, 28)
    generator.step()
    assert one.tokens == two.tokens
    check_drained(generator)


def test_same_blocks_computed_twice_are_kept_once(
    make: Make, ids: Ids, drain: Check, check_drained: Check
) -> None:
    generator = make(prefill_chunk=4)
    # In pieces, interleaved: each computes the blocks that the other has not inserted yet.
    requests = [
        generator.submit([*ids(12).tolist(), tail, *ids(20, seed=9).tolist()], max_new_tokens=3)
        for tail in (5, 5, 6)
    ]
    drain(generator)
    assert requests[0].tokens == requests[1].tokens
    assert generator.index.stats().indexed == 3 + 2 * 5
    check_drained(generator)


def test_full_pool_makes_the_next_request_wait(
    make: Make, ids: Ids, drain: Check, check_drained: Check
) -> None:
    generator = make(num_blocks=12)
    one = generator.submit(ids(36), max_new_tokens=5, ignore_eos=True)
    two = generator.submit(ids(36, seed=1), max_new_tokens=5, ignore_eos=True)
    generator.step()
    assert (one.status, two.status) == ("running", "waiting")
    assert two.usage.prompt == 0
    drain(generator)
    assert (one.num_preemptions, two.num_preemptions) == (0, 0)
    assert (len(one.tokens), len(two.tokens)) == (5, 5)
    check_drained(generator)


def test_preempted_request_goes_on_with_its_tokens(
    make: Make, ids: Ids, check_blocks: Check, check_drained: Check
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    alone = [make().generate(ids(8, seed=seed), **options).tokens for seed in range(2)]
    generator = make(num_blocks=10)
    old, young = (generator.submit(ids(8, seed=seed), **options) for seed in range(2))
    seen: list[int] = []
    while young.status != "finished":
        generator.step()
        check_blocks(generator)
        assert young.tokens[: len(seen)] == seen
        seen = list(young.tokens)
        if young.status == "waiting":
            assert old.status == "running"
    assert young.num_preemptions > 0
    assert old.num_preemptions == 0
    assert [old.tokens, young.tokens] == alone
    # The prompt's cost is reported once, not again after a preemption.
    assert young.usage.prompt == 8
    check_drained(generator)


def test_eviction_makes_room_for_ever_new_prompts(
    make: Make, ids: Ids, reference: Any, check_blocks: Check, check_drained: Check
) -> None:
    generator, plain = make(num_blocks=12), reference()
    for seed in range(25):
        prompt = ids(10 + seed, seed=seed).tolist()
        done = generator.generate(prompt, max_new_tokens=4, ignore_eos=True)
        check_blocks(generator)
        if seed % 8 == 0:
            assert done.tokens == plain.greedy(prompt, 4)
    assert generator.index.stats().indexed > 6
    check_drained(generator)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_pool_of_exactly_one_request_is_enough(
    block_size: int, make: Make, ids: Ids, check_drained: Check
) -> None:
    length, new = 33, 8
    num_blocks = -(-(length + new - 1) // block_size)
    want = make(num_blocks=200).generate(ids(length), max_new_tokens=new, ignore_eos=True).tokens
    generator = make(num_blocks=num_blocks, block_size=block_size)
    for seed in (1, 0, 0, 2, 0):
        prompt = ids(length, seed=seed)
        done = generator.generate(prompt, max_new_tokens=new, ignore_eos=True)
        if seed == 0:
            assert done.tokens == want
        check_drained(generator)


def test_copy_is_given_up_where_its_source_has_the_last_block(
    make: Make, ids: Ids, reference: Any, check_drained: Check
) -> None:
    generator, plain = make(num_blocks=4, block_size=8), reference()
    first = ids(31).tolist()
    generator.generate(first, max_new_tokens=2)
    second = [*first[:20], *ids(11, seed=1).tolist()]
    done = generator.generate(second, max_new_tokens=2, ignore_eos=True)
    # The copy of 4 tokens would pin a fifth block.
    assert done.usage.exact == 16
    assert done.tokens == plain.greedy(second, 2)
    check_drained(generator)


@pytest.mark.parametrize("method", ["submit", "stream", "generate"])
def test_pool_too_small_for_one_request_is_one_sentence(
    method: str, make: Make, ids: Ids, check_drained: Check
) -> None:
    generator = make(num_blocks=10)
    with pytest.raises(OutOfBlocksError) as caught:
        getattr(generator, method)(ids(30), max_new_tokens=12)
    assert str(caught.value) == (
        "Generator: 30 prompt tokens and up to 12 new ones need 11 blocks of 4 tokens, the pool "
        "has 10: raise num_blocks or lower max_new_tokens"
    )
    assert generator.block_counts().free == 10
    assert len(generator.generate(ids(30), max_new_tokens=11, ignore_eos=True).tokens) == 11
    check_drained(generator)


def test_streams_run_side_by_side(make: Make, ids: Ids, check_drained: Check) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    alone = [make().generate(ids(9, seed=seed), **options).tokens for seed in range(3)]
    generator = make()
    streams = [generator.stream(ids(9, seed=seed), **options) for seed in range(3)]
    steps = list(zip(*streams, strict=True))
    assert [[event.token for event in events] for events in zip(*steps, strict=True)] == alone
    assert [event.finished for event in steps[-1]] == [True] * 3
    check_drained(generator)


def test_stream_starts_with_the_first_event_asked_for(make: Make, ids: Ids) -> None:
    generator = make()
    generator.stream(ids(9), max_new_tokens=6)
    assert (generator.num_waiting, generator.num_running) == (0, 0)


def test_step_without_requests_does_nothing(make: Make) -> None:
    assert make().step() == []
