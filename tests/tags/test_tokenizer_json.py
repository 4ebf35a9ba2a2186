"""What is read of a tokenizer without transformers is what transformers has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.tags.templates import CHATML, QWEN3, QWQ, TEMPLATES, tokenizer_of
from transformers import PreTrainedTokenizerFast

from kvtrie.integrations import _tokenizer_json
from kvtrie.tags import Tagger

if TYPE_CHECKING:
    from pathlib import Path

CALL = {"function": {"name": "look", "arguments": {"a": "<é>"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "lead"},
    {"role": "user", "content": "ask 'é' <b>"},
    {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL]},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "said\n\n"},
    {"role": "user", "content": "and more"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"x": [1, None]}}}]
# What transformers gives templates: its own filter, special tokens, dates, tags, loop controls.
REST = (
    "{{ bos_token }}{{ pad_token is defined }}{{ tools | tojson(indent=2) }}\n"
    "  {% for m in messages %}\n{% if loop.index0 > 1 %}{% break %}{% endif %}\n"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}\n"
    "{{ documents is none }}{{ strftime_now('%Y') }}{{ loud }}{{ '<' }}"
)


def both(folder: Path) -> tuple[Any, Any]:
    return _tokenizer_json.read(folder), PreTrainedTokenizerFast.from_pretrained(folder)


def change(folder: Path, **config: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


@pytest.mark.parametrize("template", [*TEMPLATES, "rest", "raises"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_texts_and_formats_are_those_of_transformers(
    tmp_path: Path, name: str, template: str
) -> None:
    others = {"rest": REST, "raises": "{{ raise_exception('no ' ~ messages[0].role) }}"}
    whole = tokenizer_of(name, {**TEMPLATES, **others}[template])
    whole.bos_token = min(whole.get_added_vocab())
    whole.save_pretrained(tmp_path)
    mine, theirs = both(tmp_path)
    assert mine.chat_template == theirs.chat_template
    for more in ({}, {"tools": TOOLS}, {"loud": "LOUD", "bos_token": "!"}):
        for prompt in (False, True):
            given = {"tokenize": False, "add_generation_prompt": prompt, **more}
            texts = []
            for one in (mine, theirs):
                try:
                    texts.append(one.apply_chat_template(CHAT, **given))
                except Exception as error:  # noqa: BLE001 - a template may raise anything
                    texts.append(f"{type(error).__name__}: {error}")
            assert texts[0] == texts[1]
            ids = [one.encode(texts[0], add_special_tokens=False) for one in (mine, theirs)]
            assert ids[0] == ids[1]
            assert mine.decode(ids[0]) == theirs.decode(ids[0])
    found: list[object] = []
    for one in (mine, theirs):
        try:
            found.append(Tagger.from_tokenizer(one).format)
        except ValueError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_several_templates(tmp_path: Path) -> None:
    tokenizer_of("qwen3", None).save_pretrained(tmp_path)
    named = [{"name": "default", "template": QWEN3}, {"name": "tool_use", "template": QWQ}]
    change(tmp_path, chat_template=named)
    mine, theirs = both(tmp_path)
    for more in ({}, {"tools": TOOLS}, {"chat_template": "tool_use"}, {"chat_template": CHATML}):
        texts = [one.apply_chat_template(CHAT, tokenize=False, **more) for one in (mine, theirs)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"eos_token": "<not there>"}, id="a token to be added"),
        pytest.param({"image_token": "<think>"}, id="a token of the model's own"),
        pytest.param({"extra_special_tokens": ["<not there>"]}, id="further tokens"),
        pytest.param({"extra_special_tokens": {"image_token": "<think>"}}, id="named tokens"),
        pytest.param({"added_tokens_decoder": {"5": {"content": "<x>"}}}, id="added by number"),
        pytest.param({"split_special_tokens": True}, id="special tokens as text"),
    ],
)
def test_transformers_reads_what_may_be_something_else(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    tokenizer_of("qwen3", QWEN3).save_pretrained(tmp_path)
    assert _tokenizer_json.read(tmp_path) is not None
    change(tmp_path, **config)
    assert _tokenizer_json.read(tmp_path) is None


def test_further_files_are_left_to_transformers(tmp_path: Path) -> None:
    tokenizer_of("qwen3", QWEN3).save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert _tokenizer_json.read(tmp_path) is None
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert _tokenizer_json.read(tmp_path) is None
