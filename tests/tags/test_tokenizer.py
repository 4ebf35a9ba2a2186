"""Formats detected from a tokenizer and its chat template."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tags.templates import CHATML, QWEN3, QWQ, TEMPLATES, tokenizer_of

from kvtrie import tags

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "let me look",
        "thinking": "let me look",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": {"k": "v"}}}
        ],
    },
    {"role": "tool", "name": "lookup", "tool_call_id": "a", "content": "found it"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_format_is_recognised(name: str) -> None:
    tokenizer = tokenizer_of(name, TEMPLATES[name])
    tagger = tags.Tagger.from_tokenizer(tokenizer)
    form = tags.preset(name)
    assert tagger.format.name == name
    assert tagger.format.boundary == form.boundary
    assert tagger.format.pairs == form.pairs
    preset = tags.Tagger.from_preset(name, tokenizer)
    talk: list[Any] = TALK
    if name in ("deepseek-r1", "deepseek-v3.1"):
        call = {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
        talk = [*TALK[:2], TALK[2] | {"tool_calls": [call]}, TALK[3]]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tagger.spans(ids) == preset.spans(ids)
    kinds = [span.kind for span in tagger.spans(ids)]
    assert {"system", "user", "tool_call", "tool_result"} <= set(kinds)


def test_qwq_reads_reasoning_in_the_text() -> None:
    tagger = tags.Tagger.from_tokenizer(tokenizer_of("qwen3", QWQ))
    assert tagger.format.name == "qwen3"
    assert tagger.format.boundary == "user"


def test_template_that_keeps_reasoning() -> None:
    tokenizer = tokenizer_of("qwen3", QWEN3)
    assert tags.Tagger.from_tokenizer(tokenizer, preserve=True).format.boundary == "never"
    assert tags.Tagger.from_tokenizer(tokenizer).format.boundary == "user"
    glm = tokenizer_of("glm", TEMPLATES["glm"])
    assert tags.Tagger.from_tokenizer(glm, clear_thinking=False).format.boundary == "never"


def test_template_without_system_messages_or_tools() -> None:
    template = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no') }}{%- endif -%}"
    tokenizer = tokenizer_of("qwen3", template + CHATML, "<tool_call>", "</tool_call>")
    tagger = tags.Tagger.from_tokenizer(tokenizer)
    assert tagger.format.name == "qwen3"


def test_names_do_not_decide() -> None:
    """A model of one family with the template of another is read by its template."""
    tokenizer = tokenizer_of("glm", TEMPLATES["glm"])
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    assert tags.Tagger.from_tokenizer(tokenizer).format.name == "glm"


def test_tokenizer_without_chat_template() -> None:
    with pytest.raises(ValueError, match=r"has no chat template.*from_preset.*qwen3"):
        tags.Tagger.from_tokenizer(tokenizer_of("qwen3", None))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param("{{ 'hello' }}", "omits message text", id="says-nothing"),
        pytest.param("{{ raise_exception('never') }}", "never", id="raises"),
        pytest.param("{{ messages[17].content }}", "does not render", id="wrong"),
        pytest.param(
            "{%- for m in messages -%}{{ '[' ~ m.role ~ ']' ~ m.content }}{%- endfor -%}",
            "qwen3: .* is read as nothing",
            id="unknown-delimiters",
        ),
    ],
)
def test_template_that_is_not_understood(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tags.Tagger.from_tokenizer(tokenizer_of("qwen3", template))


def test_template_whose_tool_calls_are_not_understood() -> None:
    template = QWEN3.replace("<tool_call>", "[[CALL]]")
    with pytest.raises(ValueError, match="tool_call is read as answer"):
        tags.Tagger.from_tokenizer(tokenizer_of("qwen3", template))


def test_no_tokenizer_at_all() -> None:
    with pytest.raises(TypeError, match="str is not a tokenizer"):
        tags.Tagger.from_tokenizer("Qwen/Qwen3-8B")  # type: ignore[arg-type]


def test_preset_of_another_vocabulary() -> None:
    tokenizer = tokenizer_of("qwen3", QWEN3)
    with pytest.raises(ValueError, match=r"kimi-k2.*no token '<\|im_user\|>'"):
        tags.Tagger.from_preset("kimi-k2", tokenizer)


def test_textual_delimiters_merge_with_newlines() -> None:
    """`</function_results>` ends in another token where newlines follow; both are found."""
    tokenizer = tokenizer_of("deepseek-v3.2", None)
    tagger = tags.Tagger.from_preset("deepseek-v3.2", tokenizer)
    for gap in ("", "\n", "\n\n"):
        head = "<｜Assistant｜>x<｜end▁of▁sentence｜>\n\n<function_results>"
        text = f"{head}\n<result>y</result>\n</function_results>{gap}<think>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        kinds = [section.kind for section in tagger.sections(ids)]
        assert kinds == ["answer", "tool_result", "reasoning"]
        # Typed by a user it is text.
        typed = tokenizer.encode(f"<｜User｜>{text[15:]}", add_special_tokens=False)
        assert "tool_result" not in {section.kind for section in tagger.sections(typed[:20])}
