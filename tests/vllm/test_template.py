"""The served chat template decides what reasoning is dead, whatever the model directory has."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.tags.templates import QWEN3, QWQ
from tests.vllm import chat
from tests.vllm.engine import BLOCK
from tests.vllm.test_dead import REASONING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import Engine

# As QWEN3, but it shows all reasoning always.
KEEPING = QWEN3.replace("(preserve or loop.index0 > ns.last)", "true")
# Served, and in the model directory; whether the served one drops reasoning, and when.
CASES = {
    "qwen3": (QWEN3, KEEPING, True, "next user message"),
    "qwq": (QWQ, KEEPING, True, "next user message"),
    "keeping": (KEEPING, QWEN3, False, "never"),
}
SERVER = "/lib/vllm/entrypoints/openai/api_server.py"


class Served(chat.Chat):
    """A conversation as the server renders it."""

    def __init__(self, engine: Engine, template: str) -> None:
        super().__init__(engine.llm.get_tokenizer())
        self.engine = engine
        self.template = template

    def rendered(self, messages: list[chat.Message], reply: str = "") -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
        )
        # QwQ's prompt opens the reasoning.
        return self.ids(text + reply.removeprefix("<think>\n" if text.endswith(">\n") else ""))

    def say(self, messages: list[chat.Message], reply: str) -> list[int]:
        ids = self.rendered(messages, reply)
        one = {"allowed_token_ids": [self.end], "stop_token_ids": [self.end]}
        self.engine.ask(ids, max_tokens=4, **one)
        return ids

    def dead(self) -> int:
        dead = self.engine.connector.planner.half.dead
        assert dead is not None
        before = self.engine.counts["blocks_dead"]
        dead.settle()
        return self.engine.counts["blocks_dead"] - before


@pytest.fixture
def serve(
    engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Served]:
    def start(served: str, other: str, how: str) -> Served:
        model = chat.model(tmp_path / "model", template=other)
        (tmp_path / "served.jinja").write_text(served)
        settings: dict[str, Any] = {"gate": None}
        if how == "--chat-template":
            monkeypatch.setattr(
                sys, "argv", [SERVER, "--chat-template", str(tmp_path / "served.jinja")]
            )
        elif how == "path":
            settings["chat_template"] = str(tmp_path / "served.jinja")
        elif how == "text":
            settings["chat_template"] = served
        given: dict[str, Any] = {"skip_tokenizer_init": False, "max_model_len": 2000}
        return Served(engine(model, connector=settings, **given), served)

    return start


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What kvtrie logs, whatever vLLM makes of its loggers."""
    lines: list[str] = []
    for level in ("info", "warning"):

        def log(text: str, *given: object, **_: object) -> None:
            lines.append(text % given)

        monkeypatch.setattr(logging.getLogger("vllm.kvtrie"), level, log)
    return lines


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["--chat-template", "path", "text"])
def test_reasoning_is_dead_where_the_served_template_drops_it(
    serve: Callable[..., Served], logged: list[str], name: str, how: str
) -> None:
    served, other, drops, when = CASES[name]
    if how != "--chat-template" and name == "qwq":
        pytest.skip("one way to give it is enough")
    t = serve(served, other, how)
    (summary,) = [line for line in logged if "chat format" in line]
    assert summary.endswith(f"; reasoning dropped at: {when}")
    source = how if how == "--chat-template" else "the setting chat_template"
    assert f"kvtrie: chat template: {source}" in logged
    question, answer = chat.user("question"), "it " * 60
    t.say([question], REASONING + answer)
    num_dead = t.dead()
    num_reasoning = len(t.ids(REASONING)) // BLOCK
    if drops:
        assert num_reasoning - 2 <= num_dead <= num_reasoning
    else:
        # It is part of the next prompt, where it is found.
        assert num_dead == 0
        told = chat.reply("it") | {"reasoning_content": "answers " * 120}
        following = t.rendered([question, told, chat.user("tool")])
        assert t.engine.ask(following, max_tokens=1).num_cached > len(t.ids(REASONING))
    assert t.engine.counts["requests_other_template"] == 0


@pytest.mark.parametrize(
    ("setting", "drops"), [(None, False), ({"preserve": False}, True)], ids=["default", "setting"]
)
def test_reasoning_that_the_servers_default_arguments_keep_is_not_dead(
    engine: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
    setting: dict[str, bool] | None,
    drops: bool,
) -> None:
    """It was evicted first, and the next prompt has it."""
    model = chat.model(tmp_path / "model", template=QWEN3)
    kept = '{"preserve": true, "not_read": 1}'
    monkeypatch.setattr(sys, "argv", [SERVER, "--default-chat-template-kwargs", kept])
    given: dict[str, Any] = {"skip_tokenizer_init": False, "max_model_len": 2000}
    settings = {"gate": None, "template_arguments": setting}
    t = Served(engine(model, connector=settings, **given), QWEN3)
    (summary,) = [line for line in logged if "chat format" in line]
    assert summary.endswith(f"dropped at: {'next user message' if drops else 'never'}")
    source = "the model directory's, with --default-chat-template-kwargs"
    assert f"kvtrie: chat template: {source}" in logged
    t.say([chat.user("question")], REASONING + "it " * 60)
    assert (t.dead() > 0) == drops


def test_the_model_directorys_template_counts_where_no_other_is_known(
    serve: Callable[..., Served],
) -> None:
    t = serve(KEEPING, QWEN3, "nothing")
    tagger = t.engine.connector.planner.half.tagger
    assert tagger is not None
    assert tagger.format.boundary == "user"


def test_a_prompt_of_another_template_is_counted_and_logged_once(
    serve: Callable[..., Served], logged: list[str]
) -> None:
    # The server renders with KEEPING, and nobody says so.
    t = serve(KEEPING, QWEN3, "nothing")
    question, told = chat.user("question"), chat.reply("it", reasoning="answers")
    for word in ("tool", "user"):
        t.say([question, told, chat.user(word)], REASONING + "it " * 60)
        # Its reasoning stays, as that of earlier turns has.
        assert t.dead() == 0
    assert t.engine.counts["requests_other_template"] == 2
    (line,) = [line for line in logged if "did not render the prompt" in line]
    assert "it keeps reasoning of an earlier turn, at tokens [" in line
    # A prompt without any message, of the completions endpoint for example.
    t.engine.ask(t.ids("system " * 200), max_tokens=1)
    assert t.engine.counts["requests_other_template"] == 3
    # What the known template renders is explained: it has reasoning of its last turn alone.
    t.template = QWEN3
    t.say([question, told, chat.user("tool")], REASONING + "it " * 60)
    assert t.engine.counts["requests_other_template"] == 3
    assert t.dead() > 0
    assert sum("did not render the prompt" in line for line in logged) == 1


def test_reasoning_that_is_missing_under_a_template_that_keeps_it_is_counted(
    serve: Callable[..., Served], logged: list[str]
) -> None:
    # The server renders with QWEN3, and nobody says so.
    t = serve(KEEPING, KEEPING, "nothing")
    question, answer = chat.user("question"), "it " * 60
    t.say([question], REASONING + answer)
    told = chat.reply("it") | {"reasoning_content": "answers " * 120}
    # What the known template renders is explained.
    t.say([question, told, chat.user("tool")], REASONING + answer)
    assert t.engine.counts["requests_other_template"] == 0
    t.template = QWEN3
    for word in ("tool", "user"):
        t.say([question, told, chat.user(word)], REASONING + answer)
    assert t.engine.counts["requests_other_template"] == 2
    (line,) = [line for line in logged if "did not render the prompt" in line]
    assert "had reasoning before it, and has none" in line
    # An answer that nobody has seen reasoning before may have had none.
    other = chat.reply("answers")
    t.say([question, other, chat.user("tool")], REASONING + answer)
    assert t.engine.counts["requests_other_template"] == 2


# Templates of others (their sources are next to them): kvtrie's name of the format, what ends an
# answer and a call, and when reasoning is dropped.
PUBLISHED = {
    "qwen3": ("qwen3", "<|im_end|>", "<|im_end|>", "next user message"),
    "glm4moe": ("glm", "<|user|>", "<|observation|>", "next user message"),
    "gptoss": ("gpt-oss", "<|return|>", "<|call|>", "final answer"),
}
FOLDER = Path(__file__).parents[1] / "lab" / "templates"
PONDERED = "answers " * 120
LOOKUP = {"name": "lookup", "arguments": {"word": "tool"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]


class Published:
    """A server that was started with a template of others; the model directory has another."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.tokenizer = engine.llm.get_tokenizer()
        self.template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")

    def ids(self, text: str) -> list[int]:
        return [int(one) for one in self.tokenizer.encode(text, add_special_tokens=False)]

    def text(self, messages: list[chat.Message], *, opens: bool) -> str:
        given: dict[str, Any] = {"chat_template": self.template, "tools": TOOLS}
        given |= {"tokenize": False, "add_generation_prompt": opens}
        return str(self.tokenizer.apply_chat_template(messages, **given))

    def reply(
        self, messages: list[chat.Message], message: chat.Message, end: str
    ) -> tuple[int, int]:
        """Serve a reply as the template writes it; dead blocks, and those of its reasoning."""
        prompt, whole = (
            self.text(messages, opens=True),
            self.text([*messages, message], opens=False),
        )
        assert whole.startswith(prompt)
        said = whole[len(prompt) :].partition(end)[0]
        assert PONDERED.strip() in said
        (stop,) = self.ids(end)
        one = {"allowed_token_ids": [stop], "stop_token_ids": [stop]}
        before = self.engine.counts["blocks_dead"]
        self.engine.ask(self.ids(prompt + said), max_tokens=4, **one)
        self.engine.connector.planner.half.dead.settle()
        return self.engine.counts["blocks_dead"] - before, len(self.ids(PONDERED)) // BLOCK


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_server_that_was_started_with_a_published_template(
    engine: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
    name: str,
) -> None:
    form, ends, calls, when = PUBLISHED[name]
    model = chat.model(tmp_path / "model", template=KEEPING, form=form)
    served = str(FOLDER / f"{name}.jinja")
    monkeypatch.setattr(sys, "argv", [SERVER, "--chat-template", served])
    given: dict[str, Any] = {"skip_tokenizer_init": False, "max_model_len": 2000}
    t = Published(engine(model, connector={"gate": None}, **given), name)
    (summary,) = [line for line in logged if "chat format" in line]
    assert summary.endswith(f"chat format: {form}; reasoning dropped at: {when}")
    reasoned = {"reasoning_content": PONDERED, "thinking": PONDERED}
    question = chat.user("question")
    # Inside a tool loop the next prompt has it.
    call: chat.Message = {"role": "assistant", "content": "", **reasoned}
    call["tool_calls"] = [{"id": "call_0", "type": "function", "function": LOOKUP}]
    assert t.reply([question], call, calls)[0] == 0
    result = {"role": "tool", "tool_call_id": "call_0", "name": "lookup", "content": "it " * 60}
    loop = [question, call, result]
    assert PONDERED.strip() in t.text(loop, opens=True)
    known = t.engine.ask(t.ids(t.text(loop, opens=True)), max_tokens=1)
    assert known.num_cached > len(t.ids(PONDERED))
    # The turn is answered: the next one has it no more.
    told = chat.reply("it") | reasoned
    dead, of_reasoning = t.reply([chat.user("tool")], told, ends)
    assert PONDERED.strip() not in t.text([chat.user("tool"), told, question], opens=True)
    assert of_reasoning - 2 <= dead <= of_reasoning
    assert t.engine.counts["requests_other_template"] == t.engine.counts["errors"] == 0
