"""Where the last message begins, in templates that no preset reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.byte_tokenizer import TEMPLATE, byte_tokenizer

from kvtrie.tags.openings import LastMessage, Openings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# As Llama 3, Mistral, Gemma and Llama 2 render messages.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{{ m.tool_calls[0].function | tojson }}<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls[0].function | tojson }}{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('no system message') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = {
    LLAMA3: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    MISTRAL: ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    GEMMA: ("<start_of_turn>", "<end_of_turn>"),
    LLAMA2: (),
}
CALL: dict[str, Any] = {"name": "lookup", "arguments": {"word": "red"}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "which?"},
    {"role": "assistant", "content": "this: [INST] is text"},
    {"role": "user", "content": "and\n\nthen? user assistant"},
]
LOOP: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "a result"},
]


def made(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(list(SPECIAL.get(template, ())), special_tokens=True)
    return tokenizer


def split(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[str, str]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    at = LastMessage(tokenizer)(np.array(ids))
    assert at is not None
    return tokenizer.decode(ids[:at]), tokenizer.decode(ids[at:])


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        (LLAMA3, "<|start_header_id|>user"),
        (MISTRAL, "[INST]"),
        (GEMMA, "<start_of_turn>user"),
        (LLAMA2, "<bos>[INST]"),
        (TEMPLATE, "<eos><user>"),
    ],
    ids=["llama3", "mistral", "gemma", "llama2", "plain"],
)
def test_last_message_of_a_user_is_found_in_any_template(template: str, opens: str) -> None:
    before, last = split(made(template), TALK)
    assert last.startswith(opens)
    assert "then?" in last
    assert "[INST] is text" in before
    if template != TEMPLATE:  # whose first message begins with no special token
        assert split(made(template), TALK[:1])[1].startswith(opens)


@pytest.mark.parametrize(
    ("template", "opens"), [(LLAMA3, "<|start_header_id|>ipython"), (MISTRAL, "[TOOL_RESULTS]")]
)
def test_last_message_of_a_tool_is_found(template: str, opens: str) -> None:
    before, last = split(made(template), [*TALK, *LOOP])
    assert last.startswith(opens)
    assert "a result" in last
    assert "lookup" in before
    assert "then?" in split(made(template), [TALK[0], *LOOP, TALK[1], TALK[2]])[1]


def test_templates_that_say_nothing_have_no_openings() -> None:
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    for template in (bare, "{{ messages[0].content }}", "{{ nothing.at.all }}", None):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        assert Openings.of(tokenizer) is None
        assert LastMessage(tokenizer)(np.arange(9)) is None
    assert Openings.of(object()) is None

    class Odd:
        chat_template = TEMPLATE

        def apply_chat_template(self, messages: list[dict[str, Any]], **_: object) -> str:
            return " ".join(str(one["content"]) for one in messages)

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            raise ValueError(text, add_special_tokens)

        def decode(self, ids: list[int]) -> str:
            return str(ids)

    assert Openings.of(Odd()) is None
    assert LastMessage(None)(np.arange(9)) is None


def test_prompts_without_a_message_have_no_last_one() -> None:
    openings = Openings(((5, 6), (7,)))
    for ids, want in (
        ([], None),
        ([5], None),
        ([5, 5, 6], 1),
        ([7, 5, 6, 5], 1),
        ([5, 6, 7], 2),
        ([6, 5], None),
    ):
        assert openings.last(np.array(ids, dtype=np.int64)) == want
