"""Sliding windows next to full attention: what is moved is what kvtrie's own engine moves.

That engine keeps the KV of every token in layers with a window too; vLLM keeps, and the connector
copies, what the window needs. Both give the same probabilities. The layers of the two kinds rotate
keys by different frequencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tests.vllm import models
from tests.vllm.embedded import COMPUTED, MOVED, Embedded, Watched
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import ANSWER, NEXT, QUESTION, REASONING
from tests.vllm.reference import Reference
from tests.vllm.test_logits import (
    ANOTHER,
    POLICY,
    ROUNDING,
    a_document_from_far_away,
    documents_in_another_order,
    num,
    odd_places_in_blocks,
    reasoning_at_the_edge_of_a_turn,
    said_by,
    several_deletions,
    the_same_again,
    turns_on_moved_turns,
    what_was_said_is_moved,
)

import kvtrie
from kvtrie.integrations.vllm import _ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.embedded import Served
    from tests.vllm.engine import Engine

OPTIONS: dict[str, Any] = {
    "connector": {"gate": "unchecked", "policy": POLICY},
    "prefix_cache_retention_interval": BLOCK,
    # The shadow follows one group of blocks.
    "shadow": False,
    "blocks": 400,
    "max_logprobs": -1,
}
# Of the model's layers, those with full attention.
FULL = [1, 3]


@pytest.fixture(autouse=True)
def few_tokens_are_copied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the embedded engine does.
    monkeypatch.setattr(_ranges, "LEAST_COPIED", 1)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.gemma(tmp_path_factory.mktemp("models") / "gemma")


def test_the_layers_rotate_differently(gemma: Path) -> None:
    """Or one rotation for both groups would pass."""
    config = transformers.AutoConfig.from_pretrained(gemma)
    thetas = {one["rope_theta"] for one in config.rope_parameters.values()}
    assert len(thetas) == 2


@pytest.mark.parametrize(
    "conversation",
    [
        reasoning_at_the_edge_of_a_turn,
        several_deletions,
        documents_in_another_order,
        a_document_from_far_away,
        odd_places_in_blocks,
        turns_on_moved_turns,
        what_was_said_is_moved,
        the_same_again,
    ],
)
def test_vllm_equals_the_embedded_engine(
    engine: Callable[..., Engine], gemma: Path, monkeypatch: pytest.MonkeyPatch, conversation: Any
) -> None:
    vllm = engine(gemma, **OPTIONS)
    mine = Watched(vllm, monkeypatch)
    policy: dict[str, Any] = POLICY
    other = Embedded(gemma, kvtrie.ReusePolicy(**policy), gaps=False)
    reference = Reference(gemma)
    turns, count = conversation(), said_by(conversation)
    prompt = next(turns)
    has_moved = False
    while True:
        served = mine.ask(prompt, max_tokens=count)
        compare(served, other.ask(prompt, max_tokens=count))
        apart = (served.logprobs - reference.logprobs(prompt, served.tokens)).abs().max()
        is_moved = num(served, MOVED) > 0
        has_moved |= is_moved
        assert apart > ANOTHER if is_moved else apart < ROUNDING
        try:
            prompt = turns.send(served.tokens)
        except StopIteration:
            break
    assert has_moved
    assert num(served, COMPUTED) <= 90
    assert vllm.counts["tokens_without_window"] == vllm.counts["errors"] == 0
    vllm.check_idle()


def compare(mine: Served, other: Served) -> None:
    assert mine.segments == other.segments
    assert mine.tokens == other.tokens
    torch.testing.assert_close(mine.logprobs, other.logprobs, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(mine.k, other.k[FULL], atol=ROUNDING, rtol=0)
    torch.testing.assert_close(mine.v, other.v[FULL], atol=ROUNDING, rtol=0)


def test_an_exact_request_is_as_without_us(engine: Callable[..., Engine], gemma: Path) -> None:
    """Also after others have moved KV of its tokens."""
    vllm = engine(gemma, **OPTIONS)
    reference = Reference(gemma)
    vllm.ask(QUESTION + REASONING + ANSWER)
    following = QUESTION + ANSWER + NEXT
    moved = vllm.ask(following)
    assert vllm.counts["tokens_moved"] > 0
    assert reference.gap(following, moved.tokens) > ROUNDING
    exact = vllm.ask(following, mode="exact")
    assert reference.gap(following, exact.tokens) < ROUNDING
    assert vllm.counts["errors"] == 0
    vllm.check_idle()
