"""Why tokens are computed, in scripted conversations where the reason of each token is known."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.docs.test_metrics import THEIRS
from tests.vllm.prompts import (
    ANSWER,
    EDITED,
    HISTORY,
    NEXT,
    PARTS,
    QUESTION,
    REASONING,
    gapped,
    words,
)
from tests.vllm_scheduler.test_traffic import SMALL, Run
from tests.vllm_scheduler.worker import BLOCK, continuation
from vllm.v1.metrics import loggers

from kvtrie.integrations.vllm import _gate
from kvtrie.integrations.vllm._ranges import LEAST_COPIED
from kvtrie.integrations.vllm._reasons import REASONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.vllm_scheduler.core import Core

EXACT: dict[str, Any] = {"gate": None}
SAME: dict[str, Any] = {"gate": "unchecked"}
ALL: dict[str, Any] = {"gate": "unchecked", "policy": {"scope": "namespace"}}
TURN = QUESTION + REASONING + ANSWER
GAPPED = gapped(PARTS)
NUM_GAPS = len(GAPPED) - len(HISTORY)


def reasons(counts: Mapping[str, int], kind: str | None = None) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in counts.items():
        what, *labels = name.split("/")
        if what == "computed_tokens" and kind in (None, labels[1]) and count:
            found[labels[0]] = found.get(labels[0], 0) + count
    return found


def computed(vllm: Core, prompt: list[int], **given: Any) -> dict[str, int]:
    """The computed tokens of one request by reason, which are as many as the worker computed."""
    vllm.counts.clear()
    num = vllm.computed_for(prompt, **given)
    found = reasons(vllm.counts)
    assert sum(found.values()) == num
    assert vllm.counts["errors"] == 0
    return found


def with_policy(**policy: Any) -> dict[str, Any]:
    return {"gate": "unchecked", "policy": {"scope": "namespace", **policy}}


def test_every_reason_is_tested() -> None:
    text = open(__file__, encoding="utf-8").read()  # noqa: PTH123, SIM115 - this file
    assert [name for name in REASONS if f'"{name}":' not in text] == []


def test_a_prompt_that_comes_first(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    assert computed(vllm, QUESTION) == {"first_seen": 200}
    assert computed(vllm, words(100, 9)) == {"first_seen": 100}


def test_the_same_prompt_again(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    prompt = words(192, 9)
    vllm.ask(prompt)
    assert computed(vllm, prompt) == {"last_token": 1}


def test_a_prompt_that_goes_on(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    vllm.ask(QUESTION)
    # The last 8 tokens of the question do not fill a block.
    assert computed(vllm, QUESTION + NEXT) == {"new": 48}


def test_tokens_after_an_edit(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    vllm.ask(TURN)
    assert computed(vllm, EDITED) == {"diverged": 190}
    # Where moved runs are found, only what the edit made is left: here only the next message.
    vllm = core(connector=ALL)
    vllm.ask(TURN)
    assert computed(vllm, EDITED) == {"new": 40}


def test_tokens_before_and_between_moved_runs(core: Callable[..., Core]) -> None:
    vllm = core(connector=ALL, gaps=True)
    vllm.ask(HISTORY)
    assert computed(vllm, GAPPED) == {"diverged": NUM_GAPS, "last_token": 1}


def test_reuse_that_ends_at_the_first_gap(core: Callable[..., Core]) -> None:
    vllm = core(connector=ALL)
    vllm.ask(HISTORY)
    assert computed(vllm, GAPPED) == {"diverged": NUM_GAPS, "after_gap": 349, "last_token": 1}


def test_moved_runs_of_other_conversations(core: Callable[..., Core]) -> None:
    vllm = core(connector=SAME, gaps=True)
    vllm.ask(HISTORY)
    assert computed(vllm, GAPPED) == {"diverged": NUM_GAPS, "out_of_scope": 349, "last_token": 1}


@pytest.mark.parametrize("policy", [{"max_cuts": 0}, {"max_lost_context": 0.0}], ids=str)
def test_limits_of_the_policy(core: Callable[..., Core], policy: dict[str, Any]) -> None:
    vllm = core(connector=with_policy(**policy))
    vllm.ask(TURN)
    assert computed(vllm, EDITED) == {"limited": 150, "new": 40}


def test_what_the_policy_recomputes(core: Callable[..., Core]) -> None:
    vllm = core(connector=with_policy(recompute_first=4), gaps=True)
    vllm.ask(TURN)
    assert computed(vllm, EDITED) == {"recomputed": 4, "new": 40}


def test_a_request_that_asks_for_exact_reuse(core: Callable[..., Core]) -> None:
    vllm = core(connector=ALL)
    vllm.ask(TURN)
    assert computed(vllm, EDITED, mode="exact") == {"exact_asked": 150, "new": 40}


def test_an_edit_that_the_gate_does_not_clear(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=ALL)
    vllm.ask(TURN)
    planner = vllm.connector.planner
    decision = replace(planner._decision, kinds=())
    for one in (planner._plans, planner.half.reasons):
        monkeypatch.setattr(one, "_decision", decision)
    assert computed(vllm, EDITED) == {"not_cleared": 150, "new": 40}
    vllm.reset()
    vllm.ask(TURN)
    # Of a request that asks for exact reuse, the gate has the last word.
    assert computed(vllm, EDITED, mode="exact") == {"not_cleared": 150, "new": 40}


def test_an_adapter(core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = core(connector=ALL, enable_lora=True, max_loras=2)
    vllm.ask(TURN)
    assert computed(vllm, QUESTION, adapter="one") == {"other_adapter": 200}
    vllm.ask(TURN, adapter="one")
    monkeypatch.setattr(_gate, "covers", lambda _, adapter: adapter is None)
    assert computed(vllm, EDITED, adapter="one") == {"uncalibrated": 150, "new": 40}


def test_a_salt(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    vllm.ask(QUESTION, salt="one")
    assert computed(vllm, QUESTION, salt="two") == {"other_salt": 200}
    assert computed(vllm, words(200, 9), salt="two") == {"first_seen": 200}


def test_blocks_that_left(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    vllm.ask(TURN)
    vllm.evict(TURN)
    # The last block was of the prompt and of the reply: it is not among them.
    assert computed(vllm, TURN) == {"evicted": 510}
    vllm.evict(TURN[:64])
    assert computed(vllm, TURN + NEXT)["evicted"] >= 64


def test_blocks_that_a_full_pool_gave_to_others(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT, blocks=60, max_model_len=608)
    vllm.ask(TURN)
    vllm.ask(words(600, 9))
    # vLLM took the last blocks first: the other prompt needed ten of them.
    assert computed(vllm, TURN) == {"evicted": 174}


THINK, DONE, USER, ASSISTANT, END = 500, 501, 502, 503, 504
FORMAT = {"user": USER, "assistant": ASSISTANT, "end": END, "reasoning": [THINK, DONE]}


def test_dead_reasoning_that_was_evicted_first(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT | {"chat_format": FORMAT}, blocks=60, max_model_len=608)
    asked = [USER, *words(62, 1), END]
    reply = [ASSISTANT, THINK, *words(123, 2), DONE, *words(62, 3)]
    prompt = asked + reply
    # The model ends the turn with its next token.
    (stop,) = continuation(prompt, 1)
    vllm.ask(prompt, stop_token_ids=[stop])
    assert vllm.counts["blocks_dead"] > 0 or vllm.ask(words(20, 8))
    for seed in range(20, 60):
        vllm.ask(words(120, seed), max_tokens=1)
        if any(not vllm.pool.get_cached_block(one, [0]) for one in hashes(vllm, prompt)):
            break
    again = [*prompt, stop, END, USER, *words(30, 4)]
    found = computed(vllm, again)
    # The six blocks inside it; the end of the reasoning and the reply are there, after the gap.
    assert found["dead_reasoning"] == 96
    assert set(found) == {"dead_reasoning", "after_gap", "new"}
    assert reasons(vllm.counts, "reasoning") == {"dead_reasoning": 96, "after_gap": 14}


def hashes(vllm: Core, tokens: list[int]) -> list[Any]:
    return list(vllm.plain_hashes(tokens))


def test_few_tokens_in_a_row(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    vllm.ask(QUESTION + REASONING)
    # Four tokens more than twelve blocks are the same.
    assert computed(vllm, QUESTION[:196] + NEXT) == {"short": 4, "diverged": 40}


def test_copies_that_fail(core: Callable[..., Core]) -> None:
    vllm = core(connector=ALL, shadow=False)
    vllm.ask(TURN)
    vllm.worker.fails = lambda _: True
    vllm.counts.clear()
    vllm.ask(EDITED)
    assert reasons(vllm.counts) == {"not_copied": 158, "new": 40}


def test_a_request_that_reads_no_cache(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT)
    vllm.ask(QUESTION)
    assert computed(vllm, QUESTION, skip_reading_prefix_cache=True) == {"not_read": 200}


def test_a_plan_that_is_given_up(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=ALL)
    vllm.ask(TURN)
    monkeypatch.setattr(vllm.connector.planner._plans, "of", lambda *_: None)
    assert computed(vllm, EDITED) == {"stale": 198}


@pytest.mark.parametrize("connector", [ALL, {"mode": "exact"}], ids=["moving", "exact"])
def test_what_is_not_planned_has_the_reason_that_it_has_with_a_plan(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, connector: dict[str, Any]
) -> None:
    vllm = core(connector=connector, **SMALL)
    half = vllm.connector.planner.half
    find_nothing = half.reasons.find_nothing
    found: list[tuple[list[int], list[int]]] = []

    def labels(why: Any, count: int) -> list[int]:
        painted = [-1] * count
        for start, end, code in why.paints:
            painted[start:end] = [code] * (end - start)
        assert why.only is None or set(painted) == {why.only}
        return painted

    def finding(request: Any, live: Any) -> bool:
        if not find_nothing(request, live):
            return False
        said, live.why = live.why, None
        plan = half.sources.plan(live.seq, live.policy, live.session)
        assert plan.num_exact + plan.num_approximate < LEAST_COPIED
        half.reasons.look(request, live, plan, 0, [(0, 0)], resumes=False)
        assert live.why.signature == said.signature
        count = request.num_prompt_tokens
        found.append((labels(said, count), labels(live.why, count)))
        return True

    monkeypatch.setattr(half.reasons, "find_nothing", finding)
    Run(vllm, seed=17).go(200)
    assert vllm.counts["errors"] == 0
    assert [one for one, _ in found] == [other for _, other in found]
    assert len(found) > 20
    assert {len(set(one)) for one, _ in found} == {1, 2}
    assert len({one[-1] for one, _ in found}) > 2


@pytest.mark.parametrize("waits", [True, False])
def test_reasons_are_of_when_a_request_is_admitted(core: Callable[..., Core], waits: bool) -> None:
    """They were of when it was asked about first, with what it may not reuse in their place."""
    vllm = core(connector=ALL, blocks=64, max_model_len=608)
    vllm.add(TURN + words(32 * BLOCK - len(TURN), 50), max_tokens=60)
    prompt = words(40, 70) + TURN[20:220] + words(340, 51)
    if waits:
        vllm.add(prompt, mode="exact", max_tokens=2)
    for _ in range(3):
        vllm.step()
    if not waits:
        vllm.add(prompt, mode="exact", max_tokens=2)
    vllm.drain()
    assert vllm.counts["errors"] == 0
    assert reasons(vllm.counts)["exact_asked"] > 100


def test_requests_without_room(core: Callable[..., Core]) -> None:
    vllm = core(connector=ALL, blocks=40, max_model_len=608, max_num_seqs=4)
    total = 0
    for number in range(6):
        vllm.ask(TURN)
        for at in range(4):
            vllm.add(EDITED + words(60, 20 + number), max_tokens=4 + at)
        vllm.drain()
        total = reasons(vllm.counts).get("no_room", 0)
    # Two whole runs at least.
    assert total > 2 * len(ANSWER)
    assert {"no_room": total}["no_room"] <= vllm.counts["requests_without_room"] * len(EDITED)


@pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_reasons_add_up_in_mixed_traffic(
    core: Callable[..., Core], gaps: bool, in_flight: bool
) -> None:
    vllm = core(connector=ALL, gaps=gaps, in_flight=in_flight, **SMALL)
    Run(vllm, seed=91 + 2 * gaps + in_flight).go(200)
    found = reasons(vllm.counts)
    assert vllm.counts["errors"] == 0
    assert vllm.num_preempted
    assert sum(found.values()) == vllm.counts["prompt_tokens/recomputed/other"]
    assert len(found) > 8


def test_one_line_per_request_at_debug_level(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    # An engine that starts configures logging, and takes handlers and levels away.
    vllm = core(connector=ALL)
    handler, logger = Handler(), logging.getLogger("vllm.kvtrie")
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.manager._clear_cache()  # type: ignore[attr-defined] # of what is enabled
    try:
        vllm.ask(TURN)
        said.clear()
        vllm.ask(EDITED)
        vllm.ask(EDITED, mode="exact")
    finally:
        logger.removeHandler(handler)
        monkeypatch.undo()
        logger.manager._clear_cache()  # type: ignore[attr-defined] # likewise
    first, second = said
    assert first.startswith("kvtrie: request request-")
    assert first.endswith(
        ": 390 prompt tokens: 200 exact, 150 moved, 40 computed (new 40); approximate reuse: "
        "the operator is responsible for the quality"
    )
    # Of the first one's blocks, the last 6 tokens filled none.
    assert second.endswith(
        ": 390 prompt tokens: 200 exact, 0 moved, 190 computed (new 6, exact_asked 184); "
        "exact reuse: asked for"
    )


def test_metrics_of_vllm_that_the_docs_name_exist() -> None:
    text = Path(loggers.__file__).read_text(encoding="utf-8")
    assert [name for name in THEIRS if f'"vllm:{name.removesuffix("_total")}"' not in text] == []
