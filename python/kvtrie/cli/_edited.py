"""What reuse policies compute and cost where a chat template drops earlier reasoning.

Every policy gets the recorded replies, so that distributions can be compared with full
recomputation. Two histories are made of them: *one by one*, in which each prompt drops the
reasoning of one more reply, and *all at once*, in which the last prompt drops all reasoning.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtrie._core import UnsupportedRopeError
from kvtrie.calibrate import policies
from kvtrie.calibrate._engine import Model, Replay, divergence, tokens_needed
from kvtrie.calibrate._steps import Step
from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.pool.kv_pool import KVPool

_POLICIES: Final = ("full", "exact", "rotated", "rotated+first4", "rotated+last4")
_STRIPPED: Final = {"preserve_thinking": False}


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: the messages before it, and its token ids."""

    messages: list[dict[str, Any]]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Edited:
    """One policy on one edited history, ``shape``: *one by one* or *all at once*.

    Tokens are those of the prompts that drop something. ``seconds`` is the median time to first
    token of the last prompt, ``kl_mean`` is in nats, ``top1`` the share of ``positions`` with the
    same likeliest token.
    """

    shape: str
    policy: str
    prompt: int
    exact: int
    moved: int
    computed: int
    seconds: float
    kl_mean: float
    top1: float
    positions: int


def measure(
    live: Generator,
    replies: Sequence[Reply],
    *,
    tools: list[dict[str, Any]] | None,
    repeats: int,
) -> tuple[list[Edited], str | None]:
    """One row per history and policy, and the reason if there are none."""
    if len(replies) < 2:
        return [], "there is only one reply, so nothing is edited"
    try:
        model = Model(live.model, live.pool.layout.block_size)
    except UnsupportedRopeError as error:
        return [], str(error)
    rows: list[Edited] = []
    for shape, steps in _histories(live, replies, tools).items():
        if not any(step.is_measured for step in steps):
            return [], "every prompt continues all the text before it"
        full = [model.whole(step) if step.is_measured else None for step in steps]
        pool = model.pool(tokens_needed(steps, model.layout.block_size))
        rows += [_row(live, model, pool, shape, steps, full, name, repeats) for name in _POLICIES]
    return rows, None


def _histories(
    live: Generator, replies: Sequence[Reply], tools: list[dict[str, Any]] | None
) -> dict[str, list[Step]]:
    def prompts(options: dict[str, Any] | None) -> list[list[int]]:
        encoded = (
            live.encode(reply.messages, tools=tools, chat_template_kwargs=options)
            for reply in replies
        )
        return [[int(token) for token in ids] for ids in encoded]

    kept, stripped = prompts(None), prompts(_STRIPPED)
    return {
        "one by one": _steps(stripped, replies),
        "all at once": _steps([*kept[:-1], stripped[-1]], replies),
    }


def _steps(prompts: Sequence[list[int]], replies: Sequence[Reply]) -> list[Step]:
    """The steps. Those whose prompt does not continue all text before it are measured."""
    steps: list[Step] = []
    written: list[int] = []
    for prompt, reply in zip(prompts, replies, strict=True):
        goes_on = prompt[: len(written)] == written
        steps.append(
            Step(
                prompt=prompt,
                dropped=prompt,
                reply=reply.tokens,
                answer_start=0,
                is_scored=False,
                is_measured=not goes_on,
            )
        )
        written = [*prompt, *reply.tokens[:-1]]
    return steps


def _row(
    live: Generator,
    model: Model,
    pool: KVPool,
    shape: str,
    steps: Sequence[Step],
    full: Sequence[torch.Tensor | None],
    name: str,
    repeats: int,
) -> Edited:
    policy = policies.policy(name)
    replay = None if policy.mode == "full" else Replay(model, pool, policy)
    divergences: list[torch.Tensor] = []
    agreeing = exact = moved = computed = 0
    for step, reference in zip(steps, full, strict=True):
        if replay is None:
            rows, usage = reference, None
        else:
            rows, usage = replay.step(step)
        if reference is None or rows is None:
            continue
        divergences.append(divergence(reference, rows))
        agreeing += int((reference.argmax(-1) == rows.argmax(-1)).sum())
        exact += usage.exact if usage else 0
        moved += usage.moved if usage else 0
        computed += usage.computed if usage else len(step.prompt)
    every = torch.cat(divergences)
    return Edited(
        shape=shape,
        policy=name,
        prompt=exact + moved + computed,
        exact=exact,
        moved=moved,
        computed=computed,
        seconds=_seconds(live, policy, steps, repeats),
        kl_mean=float(every.mean()),
        top1=agreeing / len(every),
        positions=len(every),
    )


def _seconds(
    live: Generator, policy: policies.Policy, steps: Sequence[Step], repeats: int
) -> float:
    """Median time to first token of the last prompt, after the reply before it."""
    generator = Generator(
        live.model,
        num_blocks=live.pool.num_blocks,
        block_size=live.pool.layout.block_size,
        gate="unchecked",
    )
    before, last = steps[-2], steps[-1]
    times = []
    for _ in range(repeats + 1):
        generator.forget()
        if policy.mode != "full":
            generator.generate([*before.prompt, *before.reply], max_new_tokens=1)
        began = time.perf_counter()
        generator.generate(last.prompt, max_new_tokens=1, policy=policy.reuse)
        times.append(time.perf_counter() - began)
    # The first round allocates.
    return statistics.median(times[1:])
