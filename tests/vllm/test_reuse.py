"""What is reused, by whom, and what never is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.vllm.conftest import APPROXIMATE, EXACT
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import ANSWER, EDITED, NEXT, QUESTION, REASONING, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import Engine


def test_deleted_reasoning_costs_no_prompt(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)
    assert vllm.computed_for(QUESTION + ANSWER + NEXT) <= len(NEXT) + 1
    assert vllm.counts["tokens_moved"] == len(ANSWER)


@pytest.mark.parametrize(("shared", "copied"), [(7, 0), (8, 8)])
def test_fewer_tokens_than_eight_are_not_worth_a_copy(
    engine: Callable[..., Engine], shared: int, copied: int
) -> None:
    vllm = engine(connector=EXACT)
    first = words(3 * BLOCK, 7)
    vllm.ask(first, max_tokens=1)
    # The tokens that two prompts share after their last common block.
    prompt = first[: BLOCK + shared] + words(50, 8)
    assert vllm.computed_for(prompt) == len(prompt) - BLOCK - copied
    assert vllm.counts["tokens_exact"] == copied


def test_the_next_turn_hits_what_the_last_moved(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)
    said = vllm.ask(EDITED).tokens
    again = EDITED + said + words(20, 5)
    # The tokens after the last whole block are in no cached block.
    tail = len(EDITED + said) % BLOCK
    assert vllm.computed_for(again) <= 20 + tail


def test_what_was_computed_on_moved_kv_is_moved_by_the_next_turn(
    engine: Callable[..., Engine],
) -> None:
    # The policy allows one hop, and an answer that was computed after a moved one has none.
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)
    history, reasoning, answer = QUESTION + ANSWER + NEXT, words(110, 10), words(120, 11)
    vllm.ask(history + reasoning + answer + words(BLOCK, 12))
    assert vllm.computed_for(history + answer + NEXT) <= len(NEXT) + 1
    # Both answers, and the tokens before the reasoning in the block in which it began.
    assert vllm.counts["tokens_moved"] == len(ANSWER) + len(answer) + len(history) % BLOCK


def test_what_was_moved_is_not_moved_on(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)
    vllm.ask(QUESTION + ANSWER + NEXT)
    vllm.evict(QUESTION + REASONING + ANSWER)
    # What is left of the answer was moved once, which is all that the policy allows.
    assert vllm.computed_for(ANSWER) == len(ANSWER)


def test_a_plain_request_hits_nothing_approximate(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)
    vllm.ask(EDITED)
    answer = vllm.ask(EDITED, mode="exact")
    # Its own exact hit, and the copied rest of the block in which the prompts diverge.
    assert answer.num_cached == len(QUESTION)
    plain = engine()
    assert plain.ask(EDITED).tokens == answer.tokens


# One request at a time: the second arrives before the first's approximate blocks are known, and is
# admitted after.
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}], ids=["at-once", "one-at-a-time"])
def test_two_turns_of_one_conversation(
    engine: Callable[..., Engine], options: dict[str, int]
) -> None:
    vllm = engine(connector=APPROXIMATE, **options)
    vllm.ask(QUESTION + REASONING + ANSWER)
    names = [vllm.add(EDITED), vllm.add(EDITED), vllm.add(EDITED + words(60, 6))]
    vllm.drain()
    first, second, _ = (vllm.answers[name] for name in names)
    assert first.tokens == second.tokens


def test_a_lineage_begins_earlier_when_the_exact_prefix_is_gone(
    engine: Callable[..., Engine],
) -> None:
    # Admitted once with an exact prefix, preempted, and admitted again when that prefix has been
    # evicted, so that approximate KV begins earlier than before.
    vllm = engine(connector=APPROXIMATE)
    moved, filler, prefix = words(128, 7), words(64, 8), words(128, 9)
    vllm.ask(filler + prefix + moved)  # both are cached here, at other positions
    vllm.ask(prefix, mode="exact")
    prompt = prefix + moved + NEXT
    name = vllm.add(prompt, max_tokens=40)
    for _ in range(4):
        vllm.step()
    vllm.preempt(name)
    vllm.evict(prefix)
    vllm.drain()
    assert vllm.answers[name].finished
    assert vllm.ask(prompt, mode="exact").num_cached < BLOCK
