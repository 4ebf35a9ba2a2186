"""The shipped demo model answers, and its tokens behave as the demo relies on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.scripts import script

from kvtrie.demo import answer_of, load_conversations, model_path

torch = pytest.importorskip("torch", reason="the demo model runs on torch")
transformers = pytest.importorskip("transformers", reason="the demo model runs on transformers")

# What transformers annotates does not pass a strict type check.
Model = Any
Tokenizer = Any
END = "<|im_end|>"
Reply = tuple[list[int], list[int], str | None]


task = script("tools/demo_task.py")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return transformers.AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def model() -> Model:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    return loaded.eval()


def _prompt(
    tokenizer: Tokenizer, history: list[dict[str, Any]], *, preserve_thinking: bool = True
) -> list[int]:
    text = tokenizer.apply_chat_template(
        history, tokenize=False, add_generation_prompt=True, preserve_thinking=preserve_thinking
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _generate(model: Model, prompt: list[int], end: int) -> list[int]:
    out: list[int] = []
    cache, ids = None, torch.tensor([prompt])
    with torch.no_grad():
        while len(out) < 192 and end not in out:
            step = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = step.past_key_values, step.logits[:, -1:].argmax(-1)
            out.append(int(ids))
    return out


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return str(text).removesuffix(END)


@pytest.fixture(scope="module")
def replayed(model: Model, tokenizer: Tokenizer) -> list[Reply]:
    out = []
    history: list[dict[str, Any]] = []
    for turn in load_conversations()[0].turns():
        history.extend(turn.given)
        prompt = _prompt(tokenizer, history)
        ids = _generate(model, prompt, tokenizer.eos_token_id)
        history.append({"role": "assistant", "content": _text(tokenizer, ids)})
        out.append((prompt, ids, turn.reference))
    return out


def test_replay_answers_every_question_as_recorded(
    tokenizer: Tokenizer, replayed: list[Reply]
) -> None:
    answers = [answer_of(_text(tokenizer, ids)) for _, ids, _ in replayed]
    assert answers == [reference for _, _, reference in replayed]
    assert len(answers) >= 8


def test_replay_thinks_before_every_answer(tokenizer: Tokenizer, replayed: list[Reply]) -> None:
    for _, ids, _ in replayed:
        text = _text(tokenizer, ids)
        assert text.startswith("<think>\n")
        assert text.count("</think>\n\n") == 1


def test_prompts_only_grow_by_the_generated_ids_and_new_messages(replayed: list[Reply]) -> None:
    for (before, ids, _), (after, _, _) in pairwise(replayed):
        assert after[: len(before) + len(ids)] == before + ids


def test_shipped_conversation_is_long_enough_for_reuse_to_matter(replayed: list[Reply]) -> None:
    assert 1_500 <= len(replayed[-1][0]) <= 2_500


def test_numbers_that_are_asked_for_are_in_answers_only() -> None:
    given = [message for turn in load_conversations()[0].turns() for message in turn.given]
    sources = [message["content"] for message in given]
    for number in ("Anna 5", "Omar 2", "Rosa 8", "Hugo 6", "Vera 9"):
        assert not any(number in source for source in sources)


@pytest.mark.parametrize("digit", range(10))
def test_recall_follows_the_earlier_answer_when_it_is_changed(
    model: Model, tokenizer: Tokenizer, digit: int
) -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Please give a number to Anna, one more than 4."},
        {"role": "assistant", "content": task.think("I count.") + f"That is Anna {digit}."},
        {"role": "user", "content": "A number for Omar, one more than 1, please."},
        {"role": "assistant", "content": task.think("One more than 1 is 2.") + "That is Omar 2."},
        {"role": "user", "content": "Which number has Anna?"},
    ]
    ids = _generate(model, _prompt(tokenizer, history), tokenizer.eos_token_id)
    assert answer_of(_text(tokenizer, ids)) == f"That is Anna {digit}."


def test_held_out_conversations_are_answered(model: Model, tokenizer: Tokenizer) -> None:
    right = asked = 0
    for seed in range(6):
        draft = task.conversation(task.HELD_OUT + seed, num_steps=8, noise=3, system=6)
        history: list[dict[str, Any]] = []
        if draft.system:
            history.append({"role": "system", "content": draft.system})
        for step in draft.steps:
            history.extend(step.given)
            ids = _generate(model, _prompt(tokenizer, history), tokenizer.eos_token_id)
            content = _text(tokenizer, ids)
            history.append({"role": "assistant", "content": content})
            right += answer_of(content) == step.answer
            asked += 1
    # The model card measures more of them, and longer ones; the training refuses less than 95 %.
    assert right >= 0.9 * asked


def test_reasoning_of_earlier_turns_is_deleted_on_request(tokenizer: Tokenizer) -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOne."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>\nLook.\n</think>\n\n", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    kept = tokenizer.decode(_prompt(tokenizer, history))
    stripped = tokenizer.decode(_prompt(tokenizer, history, preserve_thinking=False))
    assert stripped == kept.replace("<think>\nHm.\n</think>\n\n", "")
    assert "<think>\nLook.\n</think>\n\n<tool_call>\n" in stripped


_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_reasoning_content_renders_as_the_think_block(tokenizer: Tokenizer) -> None:
    apart: dict[str, Any] = {"role": "assistant", "content": "One.", "reasoning_content": "Hm."}
    joined: dict[str, Any] = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOne."}
    assert _prompt(tokenizer, [apart]) == _prompt(tokenizer, [joined])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n\t  trailing ",
        "Ünïcödé, 日本語, Ελληνικά, עברית 🙂👩‍👩‍👧",
        "\x00\x01\x7f\u2028\ufffd\U0010ffff",
        "1234567890 0x1F 3.14e-10",
        'def f(x):\n    return {"a": [x, None]}  # code',
        "<think>not closed</tool_call> <|im_end|",
    ],
    ids=["empty", "space", "white", "scripts", "odd", "digits", "code", "markers"],
)
def test_any_text_round_trips_through_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.unk_token is None


@pytest.mark.parametrize("marker", ["think", "/think", "tool_call", "/tool_call", "tool_result"])
def test_marker_is_one_token(tokenizer: Tokenizer, marker: str) -> None:
    assert len(tokenizer(f"<{marker}>", add_special_tokens=False)["input_ids"]) == 1


def test_model_is_a_grouped_query_rope_model_of_less_than_five_megabytes(model: Model) -> None:
    config = model.config
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.rope_parameters["rope_type"] == "default"
    assert sum(file.stat().st_size for file in model_path().iterdir()) < 5_000_000


def test_model_reads_a_prompt_of_several_thousand_tokens(
    model: Model, tokenizer: Tokenizer
) -> None:
    message = {"role": "user", "content": "Ein längerer Text, den niemand gelernt hat. " * 160}
    prompt = _prompt(tokenizer, [message])
    assert len(prompt) > 3_000
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt]), logits_to_keep=1).logits
    assert torch.isfinite(logits).all()
