"""Mixed traffic through vLLM's real scheduler and cache manager, every slot checked twice.

The shadow follows the scheduler's output; the worker's KV depends on all that it reads, so the
answer of an exact request is known.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.traffic import Ask, Traffic
from tests.vllm_scheduler.worker import continuation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

# Requests of each run.
NUM_REQUESTS = int(os.environ.get("KVTRIE_VLLM_TRAFFIC", "300"))
APPROXIMATE = {"gate": "unchecked", "policy": {"scope": "namespace"}}
EXACT = {"gate": None}
SMALL: dict[str, Any] = {
    "blocks": 90,
    "max_model_len": 1024,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 200,
}

gaps = pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])


class Run:
    def __init__(
        self,
        core: Core,
        seed: int,
        adapters: tuple[str | None, ...] = (None,),
        traffic: Traffic | None = None,
    ) -> None:
        self.core = core
        self.traffic = traffic or Traffic(seed)
        self.rng = self.traffic.random
        self.adapters = adapters
        self.asked: dict[str, tuple[Ask, str | None]] = {}
        self.open: list[str] = []
        self.num_aborted = self.num_checked = self.num_reset = self.num_refused = 0
        self.num_failed = self.num_steps = 0
        self.disturbs = self.resets = True

    def go(self, count: int) -> None:
        while len(self.asked) < count or self.core.is_busy:
            while len(self.asked) < count and len(self.open) < 10 and self.rng.random() < 0.6:
                self._ask()
            self.core.step()
            if self.disturbs:
                self._disturb()
            for name in [name for name in self.open if self.core.answers[name].finished]:
                self.open.remove(name)
                self._look(name)
            self.num_steps += 1
            if self.num_steps % 20 == 0:
                self.core.check()
        self.core.check_idle()

    def _ask(self) -> None:
        ask, adapter = self.traffic.next(), self.rng.choice(self.adapters)
        name = self.core.add(
            ask.prompt,
            max_tokens=ask.max_tokens,
            mode=ask.mode,
            salt=ask.salt,
            adapter=adapter,
            priority=self.rng.randrange(3),
            images=ask.images,
        )
        self.asked[name] = (ask, adapter)
        self.open.append(name)

    def _disturb(self) -> None:
        if self.open and self.rng.random() < 0.03:
            name = self.rng.choice(self.open)
            self.core.abort([name])
            self.open.remove(name)
            self.num_aborted += 1
        if self.resets and self.num_steps % 70 == 69:
            forces, connector = self.rng.random() < 0.7, self.rng.random() < 0.5
            try:
                self.num_reset += self.core.reset_cache(forces=forces, connector=connector)
            except RuntimeError:
                # vLLM keeps blocks of steps under way, as with all that may receive KV.
                assert self.core.scheduler.deferred_frees
                self.num_refused += 1

    def _look(self, name: str) -> None:
        (ask, adapter), said = self.asked[name], self.core.answers[name].tokens
        if self.core.answers[name].has_failed:
            self.num_failed += 1
            return
        assert len(said) == ask.max_tokens
        self.traffic.said(ask, said)
        has_connector = self.core.scheduler.connector is not None
        if ask.may_be_approximate and has_connector and self.core.connector._cleared.approximate:
            return
        self.num_checked += 1
        known = continuation(ask.prompt, ask.max_tokens, adapter=adapter, images=ask.images)
        assert said == known, name


def report(run: Run) -> None:
    vllm = run.core
    print(  # noqa: T201 - shown with pytest -s
        f"\n{len(run.asked)} requests, {run.num_steps} steps, {run.num_aborted} aborted, "
        f"{vllm.num_preempted} preempted, {run.num_reset} resets ({run.num_refused} refused), "
        f"{run.num_checked} exact ones checked, {vllm.worker.num_copied} tokens copied, "
        f"{vllm.worker.num_moved} moved, {vllm.worker.num_computed} computed"
    )


def test_adapters_share_nothing(core: Callable[..., Core]) -> None:
    vllm = core(
        connector=APPROXIMATE, gaps=True, in_flight=True, enable_lora=True, max_loras=3, **SMALL
    )
    run = Run(vllm, seed=71, adapters=(None, "one", "two"))
    run.go(NUM_REQUESTS)
    report(run)
    assert vllm.counts["errors"] == 0
    assert vllm.worker.num_moved > 0
    assert {adapter for _, adapter in run.asked.values()} == {None, "one", "two"}


@gaps
@in_flight
@pytest.mark.parametrize("policy", ["fcfs", pytest.param("priority", marks=pytest.mark.long)])
@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_mixed_traffic(
    core: Callable[..., Core], gaps: bool, in_flight: bool, policy: str, role: str
) -> None:
    vllm = core(
        connector=APPROXIMATE | {"role": role},
        gaps=gaps,
        in_flight=in_flight,
        scheduling_policy=policy,
        **SMALL,
    )
    assert bool(vllm.core.batch_queue_size - 1) == in_flight
    run = Run(vllm, seed=11 + 4 * gaps + 2 * in_flight + (policy == "priority"))
    run.go(NUM_REQUESTS)
    report(run)
    assert vllm.counts["errors"] == 0
    assert vllm.worker.num_moved == vllm.shadow.num_moved > 0
    assert vllm.worker.num_copied == vllm.shadow.num_exact_copies > 0
    assert vllm.num_preempted
    assert run.num_aborted
    assert run.num_reset or run.num_refused
    assert run.num_checked
    assert not run.num_refused or (in_flight and role == "kv_both")


@gaps
@in_flight
def test_the_second_model_runner(core: Callable[..., Core], gaps: bool, in_flight: bool) -> None:
    # It reads the scheduler's count of computed tokens of new requests only, and its requests come
    # back from preemption, and after a gap, as new ones.
    vllm = core(connector=APPROXIMATE, gaps=gaps, in_flight=in_flight, second_runner=True, **SMALL)
    assert vllm.scheduler.use_v2_model_runner
    run = Run(vllm, seed=21 + 2 * gaps + in_flight)
    run.go(NUM_REQUESTS)
    report(run)
    assert vllm.counts["errors"] == 0
    assert vllm.worker.num_moved == vllm.shadow.num_moved > 0
    assert vllm.num_preempted
    assert run.num_checked


@in_flight
def test_exact_reuse_alone(core: Callable[..., Core], in_flight: bool) -> None:
    vllm = core(connector=EXACT, gaps=True, in_flight=in_flight, **SMALL)
    run = Run(vllm, seed=31 + in_flight)
    run.go(NUM_REQUESTS)
    report(run)
    assert vllm.counts["errors"] == 0
    assert vllm.worker.num_moved == 0
    assert vllm.worker.num_copied > 0
    assert run.num_checked > NUM_REQUESTS // 2


@in_flight
def test_without_the_connector(core: Callable[..., Core], in_flight: bool) -> None:
    """The same traffic, worker and shadow with plain vLLM."""
    vllm = core(in_flight=in_flight, **SMALL)
    run = Run(vllm, seed=41 + in_flight)
    run.go(NUM_REQUESTS)
    report(run)
    assert run.num_checked > NUM_REQUESTS // 2


@gaps
@in_flight
@pytest.mark.parametrize("second_runner", [False, True], ids=["V1", "V2"])
def test_copies_that_fail(
    core: Callable[..., Core], gaps: bool, in_flight: bool, second_runner: bool
) -> None:
    vllm = core(
        connector=APPROXIMATE,
        gaps=gaps,
        in_flight=in_flight,
        second_runner=second_runner,
        # It knows of no copies that fail among others that do not.
        shadow=False,
        **SMALL,
    )
    run = Run(vllm, seed=51 + 4 * second_runner + 2 * gaps + in_flight)
    num_failed = 0

    def fails(_: Any) -> bool:
        nonlocal num_failed
        is_failing = run.rng.random() < 0.3
        num_failed += is_failing
        return is_failing

    vllm.worker.fails = fails
    run.go(NUM_REQUESTS)
    report(run)
    assert num_failed > 5
    assert vllm.counts["errors"] == 0
    assert run.num_checked
    assert not run.num_failed


@gaps
def test_drafts_that_are_rejected(core: Callable[..., Core], gaps: bool) -> None:
    # Rejected drafts leave KV of no request in their slots. The shadow does not know drafts.
    vllm = core(
        connector=APPROXIMATE,
        gaps=gaps,
        shadow=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
        **SMALL,
    )
    run = Run(vllm, seed=61 + gaps)
    num_right = 0

    def drafts(tokens: list[int]) -> list[int]:
        nonlocal num_right
        count, right = run.rng.randrange(4), run.rng.randrange(4)
        said = continuation(tokens, min(count, right)) if run.rng.random() < 0.2 else []
        num_right += len(said)
        return said + [run.rng.randrange(3, 500) for _ in range(count - len(said))]

    vllm.worker.drafts = drafts
    run.go(NUM_REQUESTS)
    report(run)
    assert num_right
    assert vllm.counts["errors"] == 0
    assert vllm.worker.num_moved > 0
