"""All gaps of a prompt in one step, as rows of the batch, next to one step for each."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.prompts import HISTORY, PARTS, gapped, joined, words
from tests.vllm.traffic import Traffic
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import continuation
from vllm.lora.request import LoRARequest

from kvtrie.integrations.vllm import _rows, _version

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.kept import Kept
    from tests.vllm_scheduler.core import Core

UNCHECKED = {"gate": "unchecked", "policy": {"scope": "namespace"}}
in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
runners = pytest.mark.parametrize("second_runner", [False, True], ids=["V1", "V2"])

# 32 runs, each after a gap of 16 tokens.
RUNS = [words(40, 100 + number) for number in range(32)]
PROMPT = joined(*(words(16, 200 + at) + run for at, run in enumerate(RUNS)), words(9, 300))


@pytest.fixture
def seen(core: Callable[..., Core]) -> Callable[..., Core]:
    """A core that has computed the runs, without gaps."""

    def start(**options: Any) -> Core:
        roomy = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "blocks": 400}
        vllm = core(connector=UNCHECKED, gaps=True, **(roomy | options))
        vllm.ask(joined(*RUNS), max_tokens=1)
        return vllm

    return start


def steps_to_answer(vllm: Core, prompt: list[int] = PROMPT) -> tuple[int, list[int]]:
    """Steps that compute the prompt, and the answer."""
    name, steps = vllm.add(prompt), []
    worker: Any = vllm.worker
    run = worker._run

    def counting(output: Any) -> Any:
        if not vllm.answers[name].tokens:
            steps.append(output)
        return run(output)

    worker._run = counting
    vllm.drain()
    worker._run = run
    computed = [one for one in steps if name in one.num_scheduled_tokens]
    # With steps in flight, one more begins before the first token is known.
    late = [one for one in computed[-1:] if vllm.core.batch_queue is not None]
    return len(computed) - len(late), vllm.answers[name].tokens


@in_flight
@runners
def test_32_gaps_take_one_step(
    seen: Callable[..., Core], in_flight: bool, second_runner: bool
) -> None:
    vllm = seen(in_flight=in_flight, second_runner=second_runner)
    before = vllm.worker.num_computed
    steps, answer = steps_to_answer(vllm)
    assert steps == 1
    assert vllm.worker.num_computed - before == 32 * 16 + 9 + 7
    assert (vllm.shadow.num_rows, vllm.shadow.num_in_rows) == (32, 32 * 16)
    vllm.reset()
    vllm.ask(joined(*RUNS), max_tokens=1)
    with vllm.gap_by_gap():
        steps, one_by_one = steps_to_answer(vllm)
    assert steps == 33
    assert answer == one_by_one
    assert vllm.counts["errors"] == 0


@in_flight
@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_num_seqs": 8}, 6),
        ({"max_num_batched_tokens": 64}, 12),
        ({"max_num_batched_tokens": 15, "max_num_seqs": 15}, 66),
        ({"max_num_scheduled_tokens": 100}, 8),
        ({"long_prefill_token_threshold": 80}, 10),
        ({"max_num_active_seqs": 2}, 1),
        ({"max_num_seqs": 1}, 33),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_does_not_fit_is_computed_in_more_steps(
    seen: Callable[..., Core], limits: dict[str, int], most: int, in_flight: bool
) -> None:
    # The shadow checks each step's sequences and tokens.
    vllm = seen(in_flight=in_flight, **limits)
    steps, answer = steps_to_answer(vllm)
    assert 1 <= steps <= most
    vllm.reset()
    vllm.ask(joined(*RUNS), max_tokens=1)
    with vllm.gap_by_gap():
        many, one_by_one = steps_to_answer(vllm)
    assert many >= max(33, steps)
    assert answer == one_by_one
    assert vllm.counts["errors"] == 0


def test_what_rows_copy_is_limited(
    seen: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row repeats the tokens before its piece.
    vllm = seen()
    monkeypatch.setattr(vllm.connector.planner.gaps.rows, "_max_copied", 3 * len(PROMPT))
    copied = []
    send = vllm.scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = send(*args, **kwargs)
        rows = [one for one in output.scheduled_new_reqs if "#" in one.req_id]
        copied.append(sum(len(one.prompt_token_ids) for one in rows))
        return output

    monkeypatch.setattr(vllm.scheduler, "schedule", counting)
    steps, _ = steps_to_answer(vllm)
    assert 2 < steps < 16
    assert 0 < max(copied) <= 3 * len(PROMPT)


def test_a_gap_too_long_for_a_step_is_followed_by_rows(core: Callable[..., Core]) -> None:
    # The request runs by then, and its first gap is computed in chunks.
    vllm = core(connector=UNCHECKED, gaps=True, max_num_seqs=16, max_num_batched_tokens=64)
    vllm.ask(HISTORY)
    prompt = words(200, 5) + gapped(PARTS)
    steps, answer = steps_to_answer(vllm, prompt)
    # One is the rest of it.
    assert vllm.shadow.num_rows == len(PARTS)
    assert steps == 4
    vllm.reset()
    vllm.ask(HISTORY)
    with vllm.gap_by_gap():
        assert steps_to_answer(vllm, prompt) == (9, answer)


@in_flight
def test_rows_take_no_place_for_longer_than_a_step(
    seen: Callable[..., Core], in_flight: bool
) -> None:
    vllm = seen(max_num_seqs=35, in_flight=in_flight)
    most = vllm.scheduler.max_num_active_reqs
    first = vllm.add(PROMPT)
    others = [vllm.add(words(20, 400 + number), mode="exact") for number in range(5)]
    vllm.step()
    assert vllm.shadow.num_rows == 32
    # Two more fit next to the rows.
    assert len(vllm.scheduler.running) == 3
    assert vllm.scheduler.max_num_active_reqs == most
    vllm.step()
    assert len(vllm.scheduler.running) == 6
    vllm.drain()
    assert len(vllm.answers[first].tokens) == 8
    for number, name in enumerate(others):
        assert vllm.answers[name].tokens == continuation(words(20, 400 + number), 8)


def test_tokens_of_rows_are_not_given_to_others(seen: Callable[..., Core]) -> None:
    # The shadow checks the sum; all that is left goes to the next request, and no other is looked
    # up.
    vllm = seen(max_num_batched_tokens=32 * 16 + 9 + 30)
    planner: Any = vllm.connector.planner
    match, asked = planner.match, []

    def matching(request: Any, num_local: int) -> Any:
        asked.append(request.request_id)
        return match(request, num_local)

    planner.match = matching
    try:
        names = [vllm.add(PROMPT), *(vllm.add(words(50, 400 + at)) for at in range(3))]
        vllm.step()
    finally:
        del planner.match
    assert asked == names[:2]
    assert vllm.request(names[1]).num_computed_tokens == 30
    vllm.drain()


@in_flight
def test_a_request_preempted_in_its_own_step_has_no_rows(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, in_flight: bool
) -> None:
    vllm = core(
        connector=UNCHECKED,
        gaps=True,
        in_flight=in_flight,
        max_num_seqs=16,
        max_num_batched_tokens=64,
    )
    vllm.ask(HISTORY)
    prompt = words(150, 5) + gapped(PARTS)
    name = vllm.add(prompt)
    manager = vllm.scheduler.kv_cache_manager
    allocate, skipped = manager.allocate_slots, 0

    def allocating(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal skipped
        pending = vllm.connector.planner.half.requests.live[request.request_id].pending
        if pending is not None and pending.rows and request.num_computed_tokens and skipped < 2:
            skipped += 1
            return None
        return allocate(request, *args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", allocating)
    while not skipped:
        vllm.step()
    assert vllm.num_preempted
    assert vllm.shadow.num_rows == 0
    vllm.check()
    assert not vllm.shadow.unwritten()
    vllm.drain(limit=100)
    assert vllm.shadow.num_rows
    assert len(vllm.answers[name].tokens) == 8
    assert vllm.ask(prompt, mode="exact") == continuation(prompt, 8)
    assert vllm.counts["errors"] == 0


@in_flight
def test_an_abort_leaves_no_rows(seen: Callable[..., Core], in_flight: bool) -> None:
    vllm = seen(in_flight=in_flight)
    name = vllm.add(PROMPT)
    vllm.step()
    vllm.abort([name])
    vllm.drain()
    vllm.ask(words(5, 1), max_tokens=1)
    assert not [one for one in vllm.worker._rows if one.startswith(name)]
    vllm.check_idle()


@in_flight
@runners
def test_copies_that_fail_next_to_rows(
    seen: Callable[..., Core], in_flight: bool, second_runner: bool
) -> None:
    vllm = seen(in_flight=in_flight, second_runner=second_runner, shadow=False)
    rng = Random(3)
    vllm.worker.fails = lambda _: rng.random() < 0.5
    for number in range(8):
        name = vllm.add(PROMPT[number:])
        vllm.drain(limit=300)
        assert len(vllm.answers[name].tokens) == 8
        assert vllm.ask(PROMPT[number:], mode="exact") == continuation(PROMPT[number:], 8)
    assert vllm.worker.num_failed
    assert vllm.counts["errors"] == 0


@pytest.mark.parametrize("change", [-3, -50, 3])
def test_vllm_counts_on_another_number_than_promised(
    seen: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    vllm = seen(shadow=change < 0)
    match = vllm.connector.get_num_new_matched_tokens

    def changed(*given: Any) -> tuple[int, bool]:
        promised, _ = match(*given)
        assert promised
        return promised + change, False

    monkeypatch.setattr(vllm.connector, "get_num_new_matched_tokens", changed)
    name = vllm.add(PROMPT)
    vllm.drain(limit=300)
    assert len(vllm.answers[name].tokens) == 8
    assert vllm.counts["errors"] == vllm.worker.num_failed == (change > 0)


def test_names_of_rows_are_of_no_request(seen: Callable[..., Core]) -> None:
    vllm = seen()
    rows: Any = vllm.connector.planner.gaps.rows
    number = rows._number
    # vLLM gives requests of its front-ends a suffix; others may have any id.
    taken = f"request-{vllm._number + 1}#{number + 2}"
    vllm.scheduler.requests[taken] = None
    vllm.add(PROMPT)
    output = vllm.scheduler.schedule()
    del vllm.scheduler.requests[taken]
    assert taken not in output.num_scheduled_tokens
    assert len(output.num_scheduled_tokens) == 33
    vllm.scheduler.update_from_output(output, vllm.worker._run(output))
    vllm.drain()


@pytest.mark.parametrize("seed", range(4))
def test_random_conversations_say_the_same_gap_by_gap(
    cores: Kept, core: Callable[..., Core], seed: int
) -> None:
    # One request at a time, in cores with the same past, so that each finds the same in the cache.
    said: list[list[list[int]]] = []
    for by_rows in (True, False):
        cores.close()
        vllm = core(
            connector={**UNCHECKED, "seed": seed},
            gaps=True,
            in_flight=bool(seed % 2),
            blocks=120,
            max_model_len=1024,
            max_num_seqs=3 + 4 * seed,
            max_num_batched_tokens=64 << seed,
            shadow=False,
        )
        traffic, answers, before = Traffic(seed, longest=700), [], vllm.num_rows
        with nullcontext() if by_rows else vllm.gap_by_gap():
            for _ in range(60):
                ask = traffic.next()
                answers.append(vllm.ask(ask.prompt, max_tokens=ask.max_tokens, mode=ask.mode))
                traffic.said(ask, answers[-1])
        said.append(answers)
        assert bool(vllm.num_rows > before) == by_rows
    assert said[0] == said[1]


@in_flight
def test_mixed_traffic_with_preemption_by_priority(
    core: Callable[..., Core], in_flight: bool
) -> None:
    options = SMALL | {"max_num_seqs": 12, "blocks": 70}
    vllm = core(
        connector=UNCHECKED,
        gaps=True,
        in_flight=in_flight,
        scheduling_policy="priority",
        **options,
    )
    run = Run(vllm, seed=91 + in_flight)
    run.go(150)
    assert vllm.counts["errors"] == 0
    assert vllm.shadow.num_rows > 5
    assert vllm.num_preempted
    assert run.num_aborted


# --- where rows are not given ----------------------------------------------------------------


def config(**changed: Any) -> Any:
    """A configuration under which gaps share a step, but for what is changed."""
    given: dict[str, Any] = {
        "model_config.logits_processors": None,
        "model_config.runner_type": "generate",
        "model_config.uses_mrope": False,
        "parallel_config.use_ubatching": False,
        "parallel_config.pipeline_parallel_size": 1,
        "cache_config.kv_sharing_fast_prefill": False,
        "aux_output_config.enabled": False,
        **changed,
    }
    made: Any = SimpleNamespace(speculative_config=given.pop("speculative_config", None))
    for path, value in given.items():
        owner, name = path.split(".")
        if not hasattr(made, owner):
            setattr(made, owner, SimpleNamespace())
        setattr(getattr(made, owner), name, value)
    return made


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"parallel_config.use_ubatching": True}, "microbatches"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline"),
        ({"speculative_config": object()}, "speculative"),
        ({"model_config.runner_type": "pooling"}, "pooling"),
        ({"model_config.uses_mrope": True}, "M-RoPE"),
        ({"model_config.logits_processors": ["a.b"]}, "logits processors"),
        ({"cache_config.kv_sharing_fast_prefill": True}, "fast-prefill"),
        ({"aux_output_config.enabled": True}, "routed experts"),
    ],
)
def test_an_engine_whose_gaps_each_take_a_step_says_why(
    changed: dict[str, Any], reason: str
) -> None:
    assert _rows.why_not(config()) is None
    assert reason in str(_rows.why_not(config(**changed)))


def test_an_untested_vllm_computes_gap_by_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_version, "is_tested", lambda: False)
    assert "is untested" in str(_rows.why_not(config()))


def test_logits_processors_of_an_installed_package_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM loads them without being asked to.
    monkeypatch.setattr(_rows, "entry_points", lambda **_: ["one"])
    assert "logits processors" in str(_rows.why_not(config()))


def test_drafts_turn_rows_off(core: Callable[..., Core]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    vllm = core(connector=UNCHECKED, gaps=True, shadow=False, speculative_config=drafts)
    assert vllm.connector.planner.gaps.rows is None
    vllm.ask(HISTORY)
    assert vllm.computed_for(gapped(PARTS)) < len(gapped(PARTS)) // 3


def test_a_request_with_an_adapter_has_no_rows(core: Callable[..., Core]) -> None:
    vllm = core(connector=UNCHECKED, gaps=True, enable_lora=True, max_loras=2)
    adapter = LoRARequest("tuned", 1, "/none")
    vllm.ask(HISTORY, adapter=adapter)
    assert vllm.computed_for(gapped(PARTS), adapter=adapter) < len(gapped(PARTS)) // 3
    assert vllm.shadow.num_rows == 0


def test_a_request_that_wants_probabilities_of_its_prompt_has_no_rows() -> None:
    request: Any = SimpleNamespace(
        sampling_params=SimpleNamespace(prompt_logprobs=None), lora_request=None, mm_features=[]
    )
    assert _rows._may_have_rows(request)
    request.sampling_params.prompt_logprobs = 1
    assert not _rows._may_have_rows(request)
    request.sampling_params = None  # a pooling request
    assert not _rows._may_have_rows(request)


def test_a_surprise_while_rows_are_given_ends_no_engine(
    seen: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = seen()

    def boom(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(vllm.connector.planner.gaps.rows, "fit", boom)
    assert vllm.ask(PROMPT) == continuation(PROMPT, 8)
    assert vllm.counts["errors"] == 1


def test_fit_takes_as_many_gaps_as_the_limits_allow() -> None:
    rng = Random(7)
    for _ in range(500):
        limits = SimpleNamespace(
            running=[None] * rng.randrange(4),
            num_waiting_for_streaming_input=rng.randrange(2),
            max_num_running_reqs=rng.randrange(4, 12),
            max_num_active_reqs=12,
            max_num_scheduled_tokens=rng.randrange(20, 200),
            vllm_config=SimpleNamespace(
                use_v2_model_runner=False,
                scheduler_config=SimpleNamespace(
                    max_num_batched_tokens=150, long_prefill_token_threshold=rng.choice((0, 60))
                ),
            ),
        )
        rows: Any = _rows.GapRows(limits)
        rows._max_copied = rng.choice((400, 1 << 20))
        rows.begin()
        rows.schedule(rng.randrange(15))
        request: Any = SimpleNamespace(
            sampling_params=SimpleNamespace(prompt_logprobs=None), lora_request=None, mm_features=[]
        )
        position, at, ranges = (first := rng.randrange(50)), 0, []
        at = position
        for _ in range(rng.randrange(8)):
            start = at + rng.randrange(0 if at == position else 1, 30)
            at = start + rng.randrange(8, 40)
            ranges.append((start, at))
        is_running = rng.random() < 0.5

        def is_allowed(
            count: int,
            limits: Any = limits,
            rows: Any = rows,
            first: int = first,
            ranges: list[tuple[int, int]] = ranges,
            is_running: bool = is_running,
        ) -> bool:
            edges = [first, *(end for _, end in ranges[:count])]
            gaps = [(a, b[0]) for a, b in zip(edges, ranges[:count], strict=False) if a < b[0]]
            tokens = sum(end - start for start, end in gaps)
            active = len(limits.running) + limits.num_waiting_for_streaming_input
            most = min(150, limits.max_num_scheduled_tokens)
            piece = limits.vllm_config.scheduler_config.long_prefill_token_threshold or most
            return (
                active + (not is_running) + len(gaps) <= limits.max_num_running_reqs or not gaps
            ) and (
                not gaps
                or (
                    tokens < min(piece, most - rows._num_scheduled)
                    and len(gaps) * (gaps[-1][1] + 1) <= rows._max_copied
                )
            )

        wanted = max(count for count in range(len(ranges) + 1) if is_allowed(count))
        assert rows.fit(request, position, ranges, is_running=is_running) == wanted
