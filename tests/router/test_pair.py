"""Parameters that a tracker has cut, moved by vLLM's rule between engines that label their KV."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import pd

import kvtrie

IDS = st.lists(st.integers(1, 3), min_size=1, max_size=24)


def read_back(
    held: pd.Computed, history: list[int], prompt: list[int], hit: int, *, alias: bool = False
) -> pd.Outcome | None:
    """The decode engine's blocks, cut by a tracker, read by an engine that trims by count."""
    size = held.engine.block_size
    tracker = kvtrie.TurnTracker(block_size=size)
    space = held.engine.namespace
    tracker.keep(
        kvtrie.TokenSequence(history, space),
        num_computed=held.num_computed,
        spans=[kvtrie.Span(64, 224, "reasoning")] if alias else (),
        kv_transfer_params={
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_block_ids": [held.blocks],
            "remote_num_tokens": held.num_computed,
            "remote_engine_id": "D",
            "remote_request_id": "r",
            "remote_host": "h",
            "remote_port": 1,
        },
    )
    answer = tracker.compare(kvtrie.TokenSequence(prompt, space), alias=alias)
    if answer.kv_transfer_params is None:
        return None
    params = answer.kv_transfer_params
    (blocks,) = params["remote_block_ids"]
    sent = prompt if answer.send is None else answer.send.tolist()
    end = min(params["remote_num_tokens"], len(sent))
    cut = replace(held, blocks=blocks, num_computed=params["remote_num_tokens"])
    hit = min(hit, end) // size * size
    return pd.transfer(cut, pd.Engine("P", block_size=size), sent[:end], cached=hit, rule=RULE)


RULE = pd.vllm.suffix_trim


@pytest.mark.parametrize("hit", [0, 32, 64])
def test_stripped_reasoning_is_read_up_to_the_reasoning(hit: int) -> None:
    question, reasoning, answer = [*range(64)], [*range(100, 260)], [*range(300, 348)]
    history = question + reasoning + answer
    held = pd.Engine("D").compute(history, num_computed=271, lookahead=2)
    outcome = read_back(held, history, question + answer + [*range(400, 432)], hit)
    assert outcome is not None
    assert (outcome.loaded, outcome.wrong) == (64 - hit, 0)
    aliased = read_back(held, history, question + answer + [*range(400, 432)], hit, alias=True)
    assert aliased is not None
    assert (aliased.loaded, aliased.wrong) == (271 - hit, 0)


@given(
    history=IDS,
    edit=st.tuples(st.integers(0, 24), IDS),
    computed=st.integers(0, 24),
    lookahead=st.integers(0, 5),
    hit=st.integers(0, 30),
    size=st.integers(1, 5),
)
def test_whatever_is_handed_out_is_read_right(
    history: list[int],
    edit: tuple[int, list[int]],
    computed: int,
    lookahead: int,
    hit: int,
    size: int,
) -> None:
    prompt = history[: edit[0]] + edit[1]
    held = pd.Engine("D", block_size=size).compute(
        history, num_computed=min(computed, len(history)), lookahead=lookahead
    )
    outcome = read_back(held, history, prompt, hit)
    if outcome is not None:
        assert (outcome.wrong, outcome.tainted, outcome.failed) == (0, 0, None)
