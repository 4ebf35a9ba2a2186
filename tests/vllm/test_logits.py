"""With approximate reuse, vLLM computes what kvtrie's own engine computes for the same plan.

Each plans by itself, over its own pool. The same tokens must come from the same places; KV and the
probabilities of all tokens must be equal but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.vllm import models
from tests.vllm.embedded import COMPUTED, EXACT, MOVED, Embedded, Watched
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import ANSWER, NEXT, QUESTION, REASONING, joined, words
from tests.vllm.reference import Reference

import kvtrie
from kvtrie.integrations.vllm import _ranges

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.embedded import Served
    from tests.vllm.engine import Engine

# Yields prompts, and is sent the answer to each.
Conversation = Generator[list[int], list[int], None]
Start = Callable[..., "Engine"]

# float32, summed in another order: at most 5e-5 in 300 conversations, with keys up to 8.5.
ROUNDING = 3e-4
# By how much another context changes KV of the last layer and probabilities, at least.
ANOTHER = 0.3
POLICY = {"min_run": 16, "scope": "namespace"}


@pytest.fixture(autouse=True)
def few_tokens_are_copied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # The connector computes runs that are too short to be worth a copy; the embedded engine copies
    # them.
    monkeypatch.setattr(_ranges, "LEAST_COPIED", 1)


DOCUMENTS = [words(100, 10 + number) for number in range(6)]


def reasoning_at_the_edge_of_a_turn() -> Conversation:
    yield QUESTION + REASONING + ANSWER + words(30, 5)
    yield QUESTION + ANSWER + NEXT


def several_deletions() -> Conversation:
    one, _, three, four, five, six = DOCUMENTS
    yield joined(*DOCUMENTS, NEXT)
    yield joined(one, three, four[:50], five, six, words(9, 20))


def documents_in_another_order() -> Conversation:
    one, two, three, four, _, six = DOCUMENTS
    yield joined(*DOCUMENTS, NEXT)
    yield joined(four, one[:77], six, three[3:], two, words(9, 20))


def a_document_from_far_away() -> Conversation:
    yield joined(words(1500, 21), DOCUMENTS[0], DOCUMENTS[1], NEXT)
    yield joined(DOCUMENTS[1], DOCUMENTS[0][10:], words(9, 20))


def the_same_twice() -> Conversation:
    yield joined(*DOCUMENTS[:2], NEXT)
    yield joined(*DOCUMENTS[:2], DOCUMENTS[0][5:], DOCUMENTS[0][:60], words(9, 20))


def odd_places_in_blocks() -> Conversation:
    kept = [words(count, 30 + count) for count in (47, 18, BLOCK + 1, 95, 16, BLOCK, 31, 64)]
    dropped = [words(count, 40 + count) for count in (1, BLOCK - 1, BLOCK, 5, 63, 2, 7, 40)]
    yield [token for pair in zip(kept, dropped, strict=True) for token in joined(*pair)]
    yield joined(*kept, words(3, 20))


def less_than_a_block_moved() -> Conversation:
    # Moved KV would begin in a block that the prompt does not fill: there vLLM gets none.
    yield QUESTION + REASONING + ANSWER
    said = yield QUESTION[: 2 * BLOCK] + ANSWER[:20] + NEXT[:5]
    yield QUESTION[: 2 * BLOCK] + ANSWER[:20] + NEXT[:5] + said + ANSWER[20:90] + words(9, 20)


def turns_on_moved_turns() -> Conversation:
    # Each answer is computed on moved KV, and is moved itself in the next turn.
    history = words(75, 50)
    for number in range(4):
        history += words(45 + 10 * number, 51 + number)
        reasoning = words(90 + number, 61 + number)
        said = yield history + reasoning
        answer = said + words(70 - number, 71 + number)
        yield history + reasoning + answer
        history += answer
    yield history + words(30, 81)


def what_was_said_is_moved() -> Conversation:
    # Not given, but sampled: KV that decode steps have written.
    history = words(75, 90)
    for number in range(4):
        said = yield history
        # The first words of each reply were reasoning.
        history = history + said[10:] + words(40, 91 + number)
    yield history


def the_same_again() -> Conversation:
    yield QUESTION + REASONING + ANSWER + words(30, 5)
    said = yield QUESTION + ANSWER + NEXT
    yield QUESTION + ANSWER + NEXT
    yield QUESTION + ANSWER + NEXT + said + words(25, 6)


def stubs() -> Conversation:
    one, _, three, _, five, six = DOCUMENTS
    yield joined(*DOCUMENTS, NEXT)
    yield joined(one, words(5, 55), three, words(9, 56), five[7:61], six, words(9, 20))


def a_date_in_the_head() -> Conversation:
    yield words(12, 60) + QUESTION + ANSWER + NEXT
    yield words(12, 61) + QUESTION + ANSWER + words(9, 20)


def a_stub_and_then_more_turns() -> Conversation:
    history = joined(*DOCUMENTS)
    said = yield history + NEXT
    history = joined(DOCUMENTS[0], words(5, 55), *DOCUMENTS[2:], NEXT, said)
    said = yield history + words(50, 62)
    history += words(50, 62) + said
    yield history + words(30, 63)
    yield joined(history[:60], words(3, 64), history[90:], words(30, 63))


DELETIONS = [
    reasoning_at_the_edge_of_a_turn,
    several_deletions,
    documents_in_another_order,
    a_document_from_far_away,
    the_same_twice,
    odd_places_in_blocks,
    less_than_a_block_moved,
    turns_on_moved_turns,
    what_was_said_is_moved,
    the_same_again,
]
GAPS = [stubs, a_date_in_the_head, a_stub_and_then_more_turns]


def said_by(conversation: object) -> int:
    return 90 if conversation is what_was_said_is_moved else 6


class Sides:
    def __init__(
        self,
        vllm: Engine,
        model: Path,
        policy: dict[str, Any],
        *,
        gaps: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.vllm = Watched(vllm, monkeypatch)
        self.embedded = Embedded(model, kvtrie.ReusePolicy(**policy), gaps=gaps)
        self.reference = Reference(model)

    def run(self, of: Callable[[], Conversation]) -> list[Served]:
        served = []
        conversation, count = of(), said_by(of)
        prompt = next(conversation)
        while True:
            mine = self.vllm.ask(prompt, max_tokens=count)
            self.compare(mine, self.embedded.ask(prompt, max_tokens=count))
            self.compare_with_computing_all(prompt, mine)
            served.append(mine)
            try:
                prompt = conversation.send(mine.tokens)
            except StopIteration:
                return served

    @staticmethod
    def compare(mine: Served, other: Served) -> None:
        """The same segments, and KV and probabilities that are equal but for rounding."""
        assert mine.segments == other.segments
        assert mine.tokens == other.tokens
        torch.testing.assert_close(mine.logprobs, other.logprobs, atol=ROUNDING, rtol=0)
        torch.testing.assert_close(mine.k, other.k, atol=ROUNDING, rtol=0)
        torch.testing.assert_close(mine.v, other.v, atol=ROUNDING, rtol=0)

    def compare_with_computing_all(self, prompt: list[int], mine: Served) -> None:
        """Moved KV differs from what the model computes for the prompt."""
        k, v = self.reference.kv(prompt + mine.tokens[:-1])
        logprobs = self.reference.logprobs(prompt, mine.tokens)
        # In the first layer nothing depends on other tokens.
        torch.testing.assert_close(mine.k[0], k[0], atol=ROUNDING, rtol=0)
        torch.testing.assert_close(mine.v[0], v[0], atol=ROUNDING, rtol=0)
        moved = [slice(start, end) for start, end, _, kind in mine.segments if kind == MOVED]
        for one in moved:
            assert (mine.k[-1][one] - k[-1][one]).abs().max() > ANOTHER
            assert (mine.v[-1][one] - v[-1][one]).abs().max() > ANOTHER
        first = min((one.start for one in moved), default=k.shape[1])
        torch.testing.assert_close(mine.k[:, :first], k[:, :first], atol=ROUNDING, rtol=0)
        torch.testing.assert_close(mine.v[:, :first], v[:, :first], atol=ROUNDING, rtol=0)
        apart = (mine.logprobs - logprobs).abs().max()
        assert apart > ANOTHER if moved else apart < ROUNDING


def num(served: Served, kind: int) -> int:
    return sum(end - start for start, end, _, this in served.segments if this == kind)


@pytest.mark.parametrize("conversation", DELETIONS + GAPS)
def test_vllm_equals_the_embedded_engine(
    engine: Start, llama: Path, monkeypatch: pytest.MonkeyPatch, conversation: Any
) -> None:
    vllm = engine(connector={"gate": "unchecked", "policy": POLICY}, max_logprobs=-1)
    sides = Sides(vllm, llama, POLICY, gaps=False, monkeypatch=monkeypatch)
    served = sides.run(conversation)
    if conversation in DELETIONS:
        assert num(served[-1], MOVED) > 0
        assert num(served[-1], COMPUTED) <= 90


@pytest.mark.parametrize("conversation", DELETIONS + GAPS)
def test_vllm_equals_the_embedded_engine_after_gaps(
    engine: Start, llama: Path, monkeypatch: pytest.MonkeyPatch, conversation: Any
) -> None:
    # In chunks, too, that end at odd places.
    vllm = engine(
        connector={"gate": "unchecked", "policy": POLICY},
        gaps=True,
        max_num_batched_tokens=75,
        max_num_seqs=4,
        max_logprobs=-1,
    )
    sides = Sides(vllm, llama, POLICY, gaps=True, monkeypatch=monkeypatch)
    served = sides.run(conversation)
    assert num(served[-1], MOVED) > 0
    assert num(served[-1], COMPUTED) <= 90


def test_edges_that_are_computed_anyway(
    engine: Start, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {
        "scope": "namespace",
        "min_run": 24,
        "max_hops": 3,
        "recompute_first": 5,
        "recompute_last": 3,
    }
    vllm = engine(connector={"gate": "unchecked", "policy": policy}, gaps=True, max_logprobs=-1)
    for conversation in (several_deletions, odd_places_in_blocks, stubs, turns_on_moved_turns):
        vllm.reset()
        with monkeypatch.context() as context:
            sides = Sides(vllm, llama, policy, gaps=True, monkeypatch=context)
            served = sides.run(conversation)
            assert num(served[-1], MOVED) > 0


def test_the_segments_of_stripped_reasoning(
    engine: Start, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = engine(connector={"gate": "unchecked", "policy": POLICY}, max_logprobs=-1)
    sides = Sides(vllm, llama, POLICY, gaps=False, monkeypatch=monkeypatch)
    *_, served = sides.run(reasoning_at_the_edge_of_a_turn)
    assert served.segments == [(0, 200, 0, EXACT), (200, 350, 360, MOVED), (350, 390, -1, COMPUTED)]


@pytest.mark.parametrize("name", models.SCALED)
def test_keys_rotated_by_scaled_frequencies(
    engine: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = models.scaled(tmp_path / name, name)
    vllm = engine(
        model, connector={"gate": "unchecked", "policy": POLICY}, gaps=True, max_logprobs=-1
    )
    for conversation in (a_document_from_far_away, odd_places_in_blocks, stubs):
        vllm.reset()
        with monkeypatch.context() as context:
            sides = Sides(vllm, model, POLICY, gaps=True, monkeypatch=context)
            served = sides.run(conversation)
            assert num(served[-1], MOVED) > 0
