"""Layers with a window in a pool of their own: as large as the windows of the conversations."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

import kvtrie
from kvtrie import LayoutError
from kvtrie.engines._paged_cache import _WindowSlots
from kvtrie.engines._runner import Runner
from kvtrie.engines._windows import GROUP, blocks_of_window
from kvtrie.kernels import reference as kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from kvtrie.engines.transformers import Generator
    from kvtrie.pool import KVPool

    Make = Callable[..., Generator]
    Ids = Callable[..., np.ndarray]
    Check = Callable[[Generator], None]

WINDOW: Final = 11
BLOCK: Final = 4
# (W - 1 + block) tokens, in whole blocks.
PER_SESSION: Final = -(-(WINDOW - 1 + BLOCK) // BLOCK)


def check_windows(generator: Generator) -> None:
    counts = generator.window_block_counts()
    assert counts is not None
    assert counts.lost == 0, counts
    assert counts.waiting == 0, counts
    assert counts.held == 0, counts
    assert generator.index.group_stats(GROUP).pinned == 0


def test_a_request_needs_a_window_and_a_block() -> None:
    assert PER_SESSION == 4
    for window in range(2, 40):
        for block in (1, 3, 4, 16):
            assert blocks_of_window(window, block) == -(-(window - 1 + block) // block)


@pytest.mark.parametrize("sessions", [1, 3])
@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss", "gemma4", "cohere2", "mimo-v2"])
def test_append_only_turns_need_a_window_and_a_block_per_session(
    architecture: str,
    sessions: int,
    make: Make,
    ids: Ids,
    reference: Any,
    check_drained: Check,
) -> None:
    generator = make(
        architecture, num_blocks=200, num_window_blocks=PER_SESSION * sessions, prefill_chunk=9
    )
    plain = reference(architecture)
    prompts: list[list[int]] = [[] for _ in range(sessions)]
    for turn in range(13):
        for number in range(sessions):
            prompt = prompts[number]
            before = len(prompt)
            prompt += ids(13, seed=100 * number + turn).tolist()
            done = generator.generate(
                prompt,
                max_new_tokens=2,
                ignore_eos=True,
                return_logits=True,
                session=f"conversation {number}",
            )
            # The last token of an answer has no KV, nor is a part of a block shared.
            assert done.usage.exact == max(0, before - 1) // BLOCK * BLOCK
            if turn in (0, 1, 2, 12):
                want = plain.logits(prompt, done.tokens)
                torch.testing.assert_close(done.logits, want, atol=1e-4, rtol=0)
                assert done.tokens == plain.greedy(prompt, 2)
            prompt += done.tokens
            check_windows(generator)
            assert generator.index.group_stats(GROUP).indexed < PER_SESSION * sessions
    check_drained(generator)
    assert generator.window_pool is not None
    assert generator.window_pool.num_blocks == PER_SESSION * sessions
    assert len(prompts[0]) > 17 * WINDOW


def test_without_sessions_windows_of_others_are_evicted(make: Make, ids: Ids) -> None:
    """What a conversation gives up is known by its session alone."""
    exact = []
    for name in ("conversation", None):
        generator = make("gemma3", num_blocks=200, num_window_blocks=PER_SESSION * 3)
        prompts: list[list[int]] = [[] for _ in range(3)]
        for turn in range(5):
            for number in range(3):
                prompt = prompts[number]
                prompt += ids(13, seed=100 * number + turn).tolist()
                session = None if name is None else f"{name} {number}"
                done = generator.generate(prompt, max_new_tokens=1, session=session)
                exact.append(done.usage.exact)
            check_windows(generator)
    assert sum(exact[:15]) == 3 * sum(13 * turn // BLOCK * BLOCK for turn in range(5))
    assert sum(exact[15:]) < sum(exact[:15])


@contextlib.contextmanager
def only_its_window(generator: Generator, slots: _WindowSlots) -> Iterator[int]:
    """Meanwhile, NaN in every slot that a pass does not read."""
    pool = generator.window_pool
    assert pool is not None
    views = [view for view in (*pool.k, *pool.v) if view is not None]
    old = [view.clone() for view in views]
    every = torch.arange(pool.num_blocks * BLOCK)
    unread = every[~torch.isin(every, slots.read_slots)]
    unwritten = every[~torch.isin(every, slots.write_slots)]
    for view in views:
        rows = torch.full_like(kernels.gather_rows(view, unread), torch.nan)
        kernels.scatter_rows(view, unread, rows)
    yield len(unread)
    for view, rows in zip(views, old, strict=True):
        kernels.scatter_rows(view, unwritten, kernels.gather_rows(rows, unwritten))


@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss", "gemma4"])
def test_logits_are_those_of_one_pool_and_nothing_else_is_read(
    architecture: str, make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with NaN in every slot of a window that a pass has no need of."""
    run, filled = Runner._run, 0

    def filling(self: Runner, pool: KVPool, *given: Any) -> torch.Tensor:
        nonlocal filled
        *_, ((start, end),), _, table = given
        if table is None:
            return run(self, pool, *given)
        with only_its_window(windowed, _WindowSlots(table, start, end)) as count:
            filled += count
            return run(self, pool, *given)

    windowed = make(architecture, num_window_blocks=PER_SESSION, prefill_chunk=9)
    plain = make(architecture, prefill_chunk=9)
    monkeypatch.setattr(Runner, "_run", filling)
    prompt: list[int] = []
    for turn in range(4):
        prompt += ids(17, seed=turn).tolist()
        rows = []
        for generator in (windowed, plain):
            policy = kvtrie.EXACT_ONLY.replace(partial_blocks=False)
            done = generator.generate(
                prompt,
                max_new_tokens=3,
                ignore_eos=True,
                return_logits=True,
                session="s",
                policy=policy,
            )
            assert done.logits is not None
            rows.append((done.usage, done.logits))
        assert rows[0][0] == rows[1][0]
        assert torch.equal(rows[0][1], rows[1][1])
        prompt += done.tokens
    assert filled > 50


def test_conversations_share_the_window_of_a_common_prompt(
    make: Make, ids: Ids, reference: Any, check_drained: Check
) -> None:
    generator = make("gemma3", num_window_blocks=40)
    common = ids(24).tolist()
    assert generator.generate(common, max_new_tokens=1).usage.exact == 0
    plain = reference("gemma3")
    for number in range(3):
        prompt = [*common, *ids(9, seed=number + 1).tolist()]
        done = generator.generate(prompt, max_new_tokens=2, ignore_eos=True)
        assert done.usage.exact == 24
        assert done.tokens == plain.greedy(prompt, 2)
    # A conversation that passes it gives it up for all others.
    prompt = [*common, *ids(40, seed=9).tolist()]
    assert generator.generate(prompt, max_new_tokens=1, session="s").usage.exact == 24
    prompt = [*common, *ids(9, seed=8).tolist()]
    assert generator.generate(prompt, max_new_tokens=1).usage.exact == 0
    check_windows(generator)
    check_drained(generator)


def test_requests_of_several_conversations_run_at_once(
    make: Make, ids: Ids, reference: Any, drain: Check, check_drained: Check
) -> None:
    """With blocks for one and a half of them, they answer as each alone."""
    generator = make("gemma3", num_blocks=40, num_window_blocks=PER_SESSION + 2, prefill_chunk=7)
    plain = reference("gemma3")
    prompts = [ids(30 + number, seed=number).tolist() for number in range(4)]
    for again in range(2):
        requests = [
            generator.submit(prompt, max_new_tokens=6, ignore_eos=True, session=str(number))
            for number, prompt in enumerate(prompts)
        ]
        drain(generator)
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.tokens == plain.greedy(prompt, 6), again
        check_windows(generator)
        check_drained(generator)


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("how", ["cancel", "fault", "forget"])
def test_blocks_are_free_after_a_request_ends_early(
    how: str,
    steps: int,
    make: Make,
    ids: Ids,
    reference: Any,
    drain: Check,
    check_drained: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = make("gemma3", num_window_blocks=2 * PER_SESSION, prefill_chunk=6)
    text = ids(21).tolist()
    generator.generate(text, max_new_tokens=1, session="s")
    prompt = [*text, *ids(14, seed=1).tolist()]
    request = generator.submit(prompt, max_new_tokens=6, ignore_eos=True, session="s")
    for _ in range(steps):
        generator.step()
    assert request.status == "running"
    if how == "cancel":
        generator.cancel(request)
    elif how == "forget":
        generator.forget()
        drain(generator)
        assert request.tokens == reference("gemma3").greedy(prompt, 6)
    else:
        with monkeypatch.context() as patch:

            def fails(*_: Any, **__: Any) -> None:
                message = "no kernel"
                raise RuntimeError(message)

            patch.setattr(Runner, "_run", fails)
            (event,) = generator.step()
        assert event.finish_reason == "error"
        assert "no kernel" in str(request.error)
    check_windows(generator)
    check_drained(generator)
    # Nothing that a failed pass has left is wrong.
    done = generator.generate(prompt, max_new_tokens=3, ignore_eos=True, session="s")
    assert done.tokens == reference("gemma3").greedy(prompt, 3)
    check_windows(generator)
    check_drained(generator)


def test_random_traffic_loses_no_block_and_no_token(make: Make, reference: Any) -> None:
    """Shared heads, sessions, cancelled requests and pools that are too small for all."""
    plain = reference("gemma3")
    exact = preempted = 0
    for seed in range(5):
        rng = random.Random(seed)
        generator = make(
            "gemma3",
            num_blocks=rng.randint(24, 60),
            num_window_blocks=PER_SESSION + rng.randint(0, 24),
            prefill_chunk=rng.choice([3, 7, 20, 100]),
        )
        heads = [[rng.randint(3, 200) for _ in range(rng.randint(9, 30))] for _ in range(2)]
        requests = []
        for step in range(500):
            if step >= 60 and not (generator.num_running or generator.num_waiting):
                break
            if step < 60 and rng.random() < 0.3:
                more = [rng.randint(3, 200) for _ in range(rng.randint(0, 15))]
                prompt = [*rng.choice(heads), *more]
                options: Any = {"max_new_tokens": rng.randint(1, 6), "ignore_eos": True}
                session = rng.choice([None, "a", "b"])
                requests.append((generator.submit(prompt, session=session, **options), prompt))
            if requests and rng.random() < 0.08:
                generator.cancel(rng.choice(requests)[0])
            if rng.random() < 0.02:
                generator.forget()
            generator.step()
            for counts in (generator.block_counts(), generator.window_block_counts()):
                assert counts is not None
                assert counts.lost == 0, (seed, step, counts)
            generator.index.check()
        check_windows(generator)
        for request, prompt in requests:
            assert request.finish_reason in ("length", "cancelled"), request.error
            assert request.tokens == plain.greedy(prompt, len(request.tokens)), seed
            exact += request.usage.exact
            preempted += request.num_preemptions
    assert exact > 100
    assert preempted > 3


def test_what_the_index_refuses_is_freed(make: Make, ids: Ids, check_drained: Check) -> None:
    """Two requests for one prompt: the second one's blocks are duplicates."""
    generator = make("gemma3", num_window_blocks=3 * PER_SESSION)
    prompt = ids(30).tolist()
    first, second = (generator.submit(prompt, max_new_tokens=4) for _ in range(2))
    while first.status != "finished" or second.status != "finished":
        generator.step()
    assert first.tokens == second.tokens
    check_windows(generator)
    check_drained(generator)


def test_models_and_sizes_that_do_not_fit_are_refused_by_name(make: Make) -> None:
    with pytest.raises(ValueError, match=r"num_window_blocks is 3; .* 11 tokens needs at least 4"):
        make("gemma3", num_window_blocks=3)
    with pytest.raises(LayoutError, match="the model has no layer with a window"):
        make("llama-gqa", num_window_blocks=8)
    with pytest.raises(LayoutError, match=r"has windows of \[11\] tokens in all layers"):
        make("mistral", num_window_blocks=8)
    with pytest.raises(ValueError, match="records='model' are of moved runs"):
        make("gemma3", num_window_blocks=8, records="model")
    moved = kvtrie.ReusePolicy(approximate=True)
    with pytest.raises(ValueError, match="with num_window_blocks a window's KV"):
        make("gemma3", num_window_blocks=8, policy=moved, gate="unchecked")
    generator = make("gemma3", num_window_blocks=8, gate="unchecked")
    with pytest.raises(ValueError, match="with num_window_blocks a window's KV"):
        generator.submit([5, 6], policy=moved)
    assert generator.window_pool is not None
    assert generator.pool.layout.num_layers == generator.window_pool.layout.num_layers == 2
    assert make("gemma3").window_pool is None
    assert make("gemma3").window_block_counts() is None
