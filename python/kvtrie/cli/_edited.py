"""What reuse policies compute and cost where a chat template drops earlier reasoning.

Every policy gets the recorded replies, so that distributions can be compared with full
recomputation. Two histories are made of them: *one by one*, in which each prompt drops the
reasoning of one more reply, and *all at once*, in which the last prompt drops all reasoning.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtrie._core import UnsupportedRopeError
from kvtrie.calibrate import policies
from kvtrie.calibrate._engine import Model, Workspace, divergence, tokens_needed
from kvtrie.calibrate._steps import Step
from kvtrie.engines.transformers import Generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.engines.transformers import Event
    from kvtrie.pool.kv_pool import KVPool

_POLICIES: Final = ("full", "exact", "rotated", "rotated+first4")
_KEPT: Final = {"preserve_thinking": True}
_STRIPPED: Final = {"preserve_thinking": False}
_SESSION: Final = "edited"


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
    same likeliest token. ``answer`` is the greedy answer to the last prompt.
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
    answer: str


def measure(
    live: Generator,
    replies: Sequence[Reply],
    *,
    tools: list[dict[str, Any]] | None,
    repeats: int,
    max_new_tokens: int,
) -> tuple[list[Edited], str | None]:
    """One row per history and policy, and the reason if there are none."""
    if len(replies) < 2:
        return [], "there is only one reply, so nothing is edited"
    try:
        model = Model(live.model, live.pool.layout.block_size)
    except UnsupportedRopeError as error:
        return [], str(error)
    # It reuses what a gate would refuse: the rows say what that costs.
    timed = Generator(
        live.model,
        live.tokenizer,
        num_blocks=live.pool.num_blocks,
        block_size=live.pool.layout.block_size,
        gate="unchecked",
    )
    rows: list[Edited] = []
    for shape, steps in _histories(live, replies, tools).items():
        if not any(step.is_measured for step in steps):
            return [], "every prompt continues all the text before it"
        full = [
            model.whole(step.prompt, step.reply) if step.is_measured else None for step in steps
        ]
        pool = model.pool(tokens_needed(steps, model.layout.block_size))
        for name in _POLICIES:
            row = _row(model, pool, shape, steps, full, name)
            seconds, answer = _last(timed, policies.policy(name), steps, repeats, max_new_tokens)
            rows.append(replace(row, seconds=seconds, answer=answer))
    return rows, None


def _histories(
    live: Generator, replies: Sequence[Reply], tools: list[dict[str, Any]] | None
) -> dict[str, list[Step]]:
    def prompts(options: dict[str, Any]) -> list[list[int]]:
        encoded = (
            live.encode(reply.messages, tools=tools, chat_template_kwargs=options)
            for reply in replies
        )
        return [[int(token) for token in ids] for ids in encoded]

    kept, stripped = prompts(_KEPT), prompts(_STRIPPED)
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
                reply=reply.tokens,
                answer_start=0,
                is_scored=False,
                is_measured=not goes_on,
            )
        )
        written = [*prompt, *reply.tokens[:-1]]
    return steps


def _row(
    model: Model,
    pool: KVPool,
    shape: str,
    steps: Sequence[Step],
    full: Sequence[torch.Tensor | None],
    name: str,
) -> Edited:
    """One row, but for the time and the answer."""
    policy = policies.policy(name)
    min_run = policy.reuse.min_run or policies.LEAST_RUN
    space = None if policy.mode == "full" else Workspace(model, pool, min_run)
    divergences: list[torch.Tensor] = []
    agreeing = exact = moved = computed = 0
    for step, reference in zip(steps, full, strict=True):
        rows, usage = reference, None
        if space is not None:
            if reference is not None:
                trial = space.try_(step, step.reply, policy)
                rows, usage = trial.rows, trial.usage
            space.keep(step, policy)
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
        seconds=0,
        kl_mean=float(every.mean()),
        top1=agreeing / len(every),
        positions=len(every),
        answer="",
    )


def _last(
    generator: Generator,
    policy: policies.Policy,
    steps: Sequence[Step],
    repeats: int,
    max_new_tokens: int,
) -> tuple[float, str]:
    """Median time to first token of the last prompt after the reply before it, and its answer."""
    before, last = steps[-2], steps[-1]
    times: list[float] = []
    answer = ""
    for run in range(repeats + 1):
        generator.forget()
        if policy.mode != "full":
            generator.generate([*before.prompt, *before.reply], max_new_tokens=1, session=_SESSION)
        began = time.perf_counter()
        events = generator.stream(
            last.prompt,
            max_new_tokens=1 if run else max_new_tokens,
            policy=policy.reuse,
            session=_SESSION,
        )
        first = next(events)
        if run:
            times.append(time.perf_counter() - began)
            events.close()
        else:  # It allocates: it gives the answer, and no time.
            answer = _text(generator, [first, *events])
    return statistics.median(times), answer


def _text(live: Generator, events: Sequence[Event]) -> str:
    """With special tokens, except the last: reasoning may be between two of them."""
    tokens = [event.token for event in events if event.token is not None]
    if live.tokenizer is None:
        return ""
    kept = tokens[:-1] if events[-1].finish_reason == "stop" else tokens
    text = live.tokenizer.decode(kept, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)
