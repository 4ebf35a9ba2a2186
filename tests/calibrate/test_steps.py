"""Conversations cut into replies: what the chat template shows, and what a window leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.scripts import script
from transformers import AutoTokenizer

from kvtrie.calibrate import recall, shipped
from kvtrie.calibrate._steps import (
    RECORDED,
    SCENARIOS,
    CalibrationError,
    Renderer,
    Scenario,
    Step,
    built_in,
    count_measured,
)
from kvtrie.calibrate.edits import EditedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ONE, FIVE, WINDOW = SCENARIOS
REASONING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


training = script("tools/train_recall_models.py")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(shipped.model_path("gqa"))
    return loaded


@pytest.fixture
def renderer(tokenizer: PreTrainedTokenizerBase) -> Renderer:
    return Renderer(tokenizer)


def words(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


def steps_of(renderer: Renderer, scenario: Scenario, exchanges: int, seed: int = 3) -> list[Step]:
    return renderer.steps(recall.conversation(seed, exchanges), scenario)


def test_conversation_is_a_function_of_its_seed() -> None:
    assert recall.conversation(5, 8) == recall.conversation(5, 8)
    assert recall.conversation(5, 8) != recall.conversation(6, 8)


@pytest.mark.parametrize("seed", range(20))
def test_questions_ask_for_an_earlier_answer_of_the_window(seed: int) -> None:
    messages = recall.conversation(seed, 30)
    exchanges = [messages[at : at + 2] for at in range(1, len(messages), 2)]
    for number, (asked, reply) in enumerate(exchanges):
        if not reply.get("scored"):
            continue
        kept = exchanges[max(0, number - 9) : number]
        value = reply["content"].removesuffix(" .")
        assert any(value in earlier["content"] for _, earlier in kept)
        assert all(value not in one[0]["content"] for one in kept)
        assert value not in asked["content"]


@pytest.mark.parametrize("kind", shipped.KINDS)
def test_chat_template_shows_what_the_models_were_trained_on(kind: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(shipped.model_path(kind))
    renderer, writer = Renderer(tokenizer), training.Writer(tokenizer)
    messages = recall.conversation(11, 7)
    unlimited = Scenario("all", least_edits=0)
    for number, step in enumerate(renderer.steps(messages, unlimited)):
        lesson = writer.lesson(messages[: 3 + 2 * number])
        assert step.prompt + step.reply == lesson.ids
        assert tokenizer.unk_token_id not in lesson.ids


def test_steps_drop_earlier_reasoning_and_keep_the_reply_whole(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer
) -> None:
    first, second = steps_of(renderer, ONE, 2)
    assert words(tokenizer, first.reply).startswith("<think> ")
    assert words(tokenizer, first.reply).endswith(". <|im_end|>")
    answer = words(tokenizer, first.reply[first.answer_start :])
    assert "</think>" not in answer
    assert "</think>" in words(tokenizer, first.reply[: first.answer_start])
    assert "<think>" not in words(tokenizer, second.prompt)
    assert answer in words(tokenizer, second.prompt)
    assert (first.is_measured, second.is_measured) == (False, True)
    assert (first.is_scored, second.is_scored) == (False, True)
    assert second.answer_start == 0


def test_scenarios_measure_what_they_say(renderer: Renderer) -> None:
    messages = recall.conversation(3, 30)
    assert count_measured(renderer.steps(messages, ONE)) == (2, 1)
    assert count_measured(renderer.steps(messages, FIVE)) == (10, 5)
    assert count_measured(renderer.steps(messages, WINDOW)) == (20, 10)


def test_window_keeps_the_system_prompt_and_the_last_exchanges(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer
) -> None:
    last = steps_of(renderer, WINDOW, 14)[-1]
    text = words(tokenizer, last.prompt)
    assert text.startswith("<|im_start|> system")
    assert text.count("<|im_start|> user") == 10


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_built_in_asks_at_least_as_many_questions(renderer: Renderer, scenario: Scenario) -> None:
    cut = [renderer.steps(messages, scenario) for messages in built_in(21, scenario, 0)]
    asked = sum(count_measured(steps)[1] for steps in cut)
    assert 21 <= asked <= 30


def test_reasoning_between_marks_and_template_that_opens_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = REASONING
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Draw"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nAda 10"},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nAda 11", "scored": True},
    ]
    first, second = Renderer(tokenizer).steps(messages, ONE)
    assert words(tokenizer, first.reply).startswith("hmm </think> Ada 10 <|im_end|>")
    assert words(tokenizer, second.reply[second.answer_start :]) == "Ada 11 <|im_end|>"
    assert second.is_scored
    assert second.is_measured


def test_conversation_without_reasoning_has_nothing_to_measure(renderer: Renderer) -> None:
    plain = [
        {"role": "user", "content": "Draw"},
        {"role": "assistant", "content": "Ada 10"},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "Ada 10"},
    ]
    assert renderer.steps(plain, ONE) == []
    assert renderer.steps(plain, WINDOW) == []


def test_template_that_refuses_says_so(renderer: Renderer) -> None:
    odd: list[dict[str, Any]] = [
        {"role": "user", "content": "Draw"},
        {"role": "tool", "content": "x"},
    ]
    reply: dict[str, Any] = {"role": "assistant", "content": "Ada", "reasoning_content": "hmm"}
    with pytest.raises(CalibrationError, match="unknown role: tool"):
        renderer.steps([*odd, reply, odd[0], reply], Scenario("all", least_edits=0))


def test_reply_that_is_scored_by_text_is_refused(renderer: Renderer) -> None:
    """The text "false" made it right to the letter, and no other reply was judged."""
    asked = {"role": "user", "content": "Draw"}
    for said in ("false", 1, None):
        reply = {"role": "assistant", "content": "Ada", "scored": said}
        with pytest.raises(CalibrationError, match=r'"scored" is .*; it must be true or false'):
            renderer.steps([asked, reply], RECORDED)


def test_tokenizer_without_a_chat_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(CalibrationError, match="no chat template"):
        Renderer(tokenizer)


def test_template_that_refuses_a_system_message_gets_its_text_from_the_user(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """As Gemma 2's and Mistral's do: no shipped edit could be rendered."""
    asked = EditedPrompt(
        [{"role": "system", "content": "You reply."}, {"role": "user", "content": "Draw"}]
    )
    whole = words(tokenizer, Renderer(tokenizer).step(asked).prompt)
    assert whole.count("<|im_start|>") == 3
    template = tokenizer.chat_template
    assert isinstance(template, str)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuses + template
    step = Renderer(tokenizer).step(asked)
    own = EditedPrompt([{"role": "user", "content": "You reply.\n\nDraw"}])
    assert step == Renderer(tokenizer).step(own)
    # A recorded conversation was not served so.
    with pytest.raises(CalibrationError, match="no system"):
        Renderer(tokenizer).steps(
            [*asked.messages, {"role": "assistant", "content": "Ada"}], RECORDED
        )
    tokenizer.chat_template = "{{ raise_exception('nothing at all') }}"
    with pytest.raises(CalibrationError, match="nothing at all"):
        Renderer(tokenizer).step(asked)


def test_a_template_gets_what_the_server_gives_it(tokenizer: PreTrainedTokenizerBase) -> None:
    cut = "m.content.split('</think>')[-1]"
    assert cut in REASONING
    tokenizer.chat_template = REASONING.replace(cut, f"(m.content if keeps else {cut})")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Draw"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nAda 10"},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nAda 11"},
    ]
    for keeps in (False, True):
        last = Renderer(tokenizer, {"keeps": keeps}).steps(messages, RECORDED)[-1]
        assert ("hmm" in words(tokenizer, last.prompt)) == keeps
    with pytest.raises(CalibrationError, match="cannot have tokenize, tools"):
        Renderer(tokenizer, {"tools": [], "keeps": True, "tokenize": True})


def test_nothing_moves_into_the_last_message(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer
) -> None:
    for step in steps_of(renderer, ONE, 2):
        assert step.moved_end is not None
        last = words(tokenizer, step.prompt[step.moved_end :])
        assert last.startswith("<|im_start|> user")
        assert last.count("<|im_start|>") == 2
        assert last.endswith("<|im_start|> assistant")
