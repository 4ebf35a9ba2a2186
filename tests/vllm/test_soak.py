"""Mixed traffic in a small pool: nothing leaks, nothing is owned twice, exact stays exact."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.reference import Reference
from tests.vllm.traffic import Ask, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import Engine

# Requests of each of the four soaks; `make soak-vllm` asks for more.
NUM_REQUESTS = int(os.environ.get("KVTRIE_VLLM_SOAK", "500"))
# Rounding moves two likely tokens past each other no further than this.
CLOSE = 2e-3


@pytest.mark.parametrize(
    "in_flight",
    [pytest.param(False, marks=pytest.mark.long, id="sync"), pytest.param(True, id="async")],
)
@pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
def test_soak(  # noqa: PLR0915 - one story
    engine: Callable[..., Engine], llama: Path, gaps: bool, in_flight: bool
) -> None:
    vllm = engine(
        connector=APPROXIMATE,
        gaps=gaps,
        async_scheduling=in_flight,
        blocks=36,
        max_model_len=1024,
        max_num_seqs=6,
        max_num_batched_tokens=200,
    )
    reference = Reference(llama)
    traffic = Traffic(seed=7 + 2 * gaps + in_flight)
    rng = traffic.random
    asked: dict[str, Ask] = {}
    open_names: list[str] = []
    num_aborted = num_preempted = num_checked = step = 0
    preempt = vllm.scheduler._preempt_request

    def counting(request: object, *args: object, **kwargs: object) -> None:
        nonlocal num_preempted
        num_preempted += 1
        preempt(request, *args, **kwargs)

    vllm.scheduler._preempt_request = counting
    try:
        while len(asked) < NUM_REQUESTS or vllm.is_busy:
            step += 1
            while len(asked) < NUM_REQUESTS and len(open_names) < 10 and rng.random() < 0.6:
                ask = traffic.next()
                name = vllm.add(ask.prompt, max_tokens=ask.max_tokens, mode=ask.mode, salt=ask.salt)
                asked[name] = ask
                open_names.append(name)
            vllm.step()
            if open_names and rng.random() < 0.03:
                name = rng.choice(open_names)
                vllm.abort([name])
                open_names.remove(name)
                num_aborted += 1
            # With a connector and steps in flight, vLLM cannot reset.
            if rng.random() < 0.01 and not vllm.core.batch_queue:
                vllm.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            for name in list(open_names):
                answer = vllm.answers[name]
                if not answer.finished:
                    continue
                open_names.remove(name)
                ask = asked[name]
                assert len(answer.tokens) == ask.max_tokens
                traffic.said(ask, answer.tokens)
                if not ask.may_be_approximate:
                    num_checked += 1
                    gap = reference.gap(ask.prompt, answer.tokens)
                    assert gap < CLOSE, f"{name} is {gap} away from what the model says"
            if step % 20 == 0:
                vllm.check()
    finally:
        vllm.scheduler._preempt_request = preempt
    vllm.drain()
    vllm.check_idle()
    assert vllm.counts["errors"] == 0
    assert vllm.counts["copies_failed"] == 0
    assert vllm.shadow.num_moved > 0
    assert vllm.shadow.num_exact_copies > 0
    assert num_aborted
    assert num_preempted
    assert num_checked
    print(  # noqa: T201 - with -s
        f"soak: {len(asked)} requests, {step} steps, {num_aborted} aborted, {num_preempted} "
        f"preempted, {num_checked} exact ones checked, {vllm.shadow.num_moved} tokens moved"
    )
