"""The lab on chat templates of others: a real index on the ids, and the first token that differs.

Nothing of the lab is used to find what it should say: prompts are rendered and encoded by the
transformers library, hits are counted by an index of their own, and positions by comparing ids.
"""

from __future__ import annotations

import hashlib
import os
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.tags.templates import tokenizer_of

import kvtrie
from kvtrie import lab

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = Path(__file__).parent / "templates"
# File, kvtrie's name of the format, and the name under which the template reads reasoning.
TEMPLATES = {
    "qwen3": ("qwen3", "reasoning_content"),
    "glm4moe": ("glm", "reasoning_content"),
    "gptoss": ("gpt-oss", "thinking"),
}
# Conversations with each template.
CONVERSATIONS = int(os.environ.get("KVTRIE_LAB_PUBLISHED", "60"))
WORDS = "note harbour blue seven where answer place rooms built early there late what so it".split()
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


@cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer_of(TEMPLATES[name][0], text)


def said(source: random.Random) -> str:
    return " ".join(source.choice(WORDS) for _ in range(source.randint(1, 40)))


def replied(source: random.Random, *, calls: bool, number: int) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": "" if calls else said(source)}
    if source.random() < 0.6:
        reply["reasoning_content"] = said(source)
    if calls:
        function = {"name": "lookup", "arguments": {"word": source.choice(WORDS)}}
        reply["tool_calls"] = [{"id": f"call{number}", "type": "function", "function": function}]
    return reply


def conversation(seed: int) -> lab.Chat:
    """Turns with and without tool calls, by a client that edits, removes and shortens now and then.

    A reply goes into the history as the client got it, and the template decides what stays.
    """
    source = random.Random(seed)
    has_tools = source.random() < 0.6
    system = {"role": "system", "content": said(source)}
    turns: list[list[dict[str, Any]]] = []
    requests = []

    def ask(reply: dict[str, Any]) -> None:
        history = [message for turn in turns for message in turn]
        requests.append(lab.ClientRequest((system, *history), reply))
        turns[-1].append(reply)

    for _ in range(source.randint(2, 4)):
        turns.append([{"role": "user", "content": said(source)}])
        for number in range(source.randint(1, 3) if has_tools and source.random() < 0.7 else 0):
            ask(replied(source, calls=True, number=number))
            result = {"role": "tool", "name": "lookup", "tool_call_id": f"call{number}"}
            turns[-1].append({**result, "content": said(source)})
        ask(replied(source, calls=False, number=0))
        if source.random() < 0.2:
            system = {"role": "system", "content": said(source)}
        if source.random() < 0.3:
            turn = source.choice(turns)
            at = source.randrange(len(turn))
            if turn[at]["content"]:
                turn[at] = {**turn[at], "content": said(source)}
        if source.random() < 0.2 and len(turns) > 1:
            del turns[source.randrange(len(turns) - 1)]
    return lab.Chat(str(seed), tuple(requests), (TOOL,) if has_tools else ())


def prompt_ids(name: str, chat: lab.Chat, request: lab.ClientRequest) -> list[int]:
    """The prompt as a server renders and encodes it."""
    field = TEMPLATES[name][1]
    messages = [
        {(field if key == "reasoning_content" else key): value for key, value in message.items()}
        for message in request.messages
    ]
    ids: Any = tokenizer(name).apply_chat_template(
        messages, tools=list(chat.tools) or None, add_generation_prompt=True, return_dict=False
    )
    return list(ids)


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Cache:
    """A prefix cache with room for everything: whole blocks of every prompt and reply."""

    def __init__(self, block: int, num_blocks: int) -> None:
        self.block = block
        self.index = kvtrie.RadixIndex(num_blocks, block, moved_runs=False)
        self.free = kvtrie.BlockAllocator(num_blocks)
        self.space = kvtrie.Namespace(model="published", salt=kvtrie.SHARED)

    def hit(self, ids: list[int]) -> int:
        seq = kvtrie.TokenSequence(ids, self.space)
        return self.index.lookup(seq, keep_last=1).num_tokens

    def keep(self, ids: list[int]) -> None:
        num = len(ids) // self.block
        done = self.index.insert(
            kvtrie.TokenSequence(ids, self.space),
            self.free.allocate(num),
            num_computed=num * self.block,
            source=kvtrie.COMPUTED,
        )
        self.free.free(done.duplicates)


def check(name: str, seed: int) -> int:
    """Compare each turn of a conversation; the number of prompts that diverge."""
    chat, block = conversation(seed), 4 + seed % 13
    template = lab.Template(tokenizer(name))
    found = lab.measure(template, chat, block_size=block, min_run=8)
    rendered = [template.render(chat, request) for request in chat.requests]
    num_blocks = sum(1 + (len(one.ids) + len(one.sampled)) // block for one in rendered)
    prefix_cache = Cache(block, num_blocks)
    cached: list[list[int]] = []
    diverged = 0
    for request, one, turn in zip(chat.requests, rendered, found.turns, strict=True):
        ids = prompt_ids(name, chat, request)
        assert one.ids == ids
        assert turn.prompt == len(ids)
        assert turn.prefix == prefix_cache.hit(ids)
        at = max((common(ids, old) for old in cached), default=0)
        nearest = [old for old in cached if common(ids, old) == at]
        if turn.divergence is None:
            assert not cached or at == len(ids) or any(at == len(old) for old in nearest)
        else:
            assert turn.divergence.position == at
            assert any(at < len(old) and old[at] != ids[at] for old in nearest)
            diverged += 1
        whole = [*ids, *one.sampled[:-1]]
        prefix_cache.keep(whole)
        cached.append(whole)
    return diverged


@pytest.mark.parametrize("name", TEMPLATES)
def test_hits_are_those_of_an_index_and_divergences_the_first_other_token(name: str) -> None:
    diverged = sum(check(name, seed) for seed in range(CONVERSATIONS))
    print(f"{name}: {CONVERSATIONS} conversations, {diverged} prompts diverge")  # noqa: T201
    assert diverged > CONVERSATIONS // 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_built_in_conversation_renders_and_the_format_is_known(name: str) -> None:
    report = lab.study(tokenizer(name), list(lab.BUILT_IN.values()))
    default = [row for row in report.rows if not row.switch]
    assert [row.chat for row in default] == list(lab.BUILT_IN)
    assert not [row.error for row in default if row.error]
    assert (report.format, report.why_unknown) == (TEMPLATES[name][0], "")
    causes = {
        row.chat: {turn.divergence.cause for turn in row.measured.turns if turn.divergence}
        for row in default
        if row.measured
    }
    # Each of them drops the reasoning of earlier turns, and of nothing else where there is none.
    assert "reasoning" in causes["reasoning"]
    assert "reasoning" not in causes["chat"]


def test_gpt_oss_tries_its_efforts_and_tools_of_its_own_and_no_error_is_shown() -> None:
    report = lab.study(tokenizer("gptoss"), [lab.BUILT_IN["chat"], lab.BUILT_IN["reasoning"]])
    assert not [row.error for row in report.rows if row.error]
    # "medium" is what the template writes by default, so it changes nothing.
    switches = {str(row.switch): row for row in report.rows if row.switch and not row.when}
    expected = [{"builtin_tools": ["browser", "python"]}, {"tools": "one"}]
    expected += [{"reasoning_effort": effort} for effort in ("low", "high")]
    assert set(switches) == set(map(str, expected))
    assert report.unvaried == ("model_identity",)
    days = [row for row in report.rows if "strftime_now" in row.switch]
    assert days
    for row in days:
        assert row.measured is not None
        found = [turn.divergence for turn in row.measured.turns[1:]]
        # The date is in the first message, before everything else that changes.
        assert {one.position for one in found if one} == {found[0].position if found[0] else None}
        assert {one.kind for one in found if one} == {"system"}


def test_a_changed_last_word_is_not_called_another_encoding() -> None:
    """A prompt that ends just after the change: most of what was compared came before it."""
    template = lab.Template(tokenizer("gptoss"))
    reply = {"role": "assistant", "content": "no"}
    # Long tokens before the word, and little after it.
    asked = [
        lab.ClientRequest(({"role": "user", "content": " commentary" * 12 + f" {one}"},), reply)
        for one in ("so", "it")
    ]
    first, second = lab.measure(template, lab.Chat("edited", tuple(asked)), min_run=8).turns
    assert first.divergence is None
    assert second.divergence is not None
    assert second.divergence.cached.startswith(" so<|end|>")
    assert second.divergence.prompt.startswith(" it<|end|>")
    assert second.divergence.cause == "text"


def test_a_change_near_reasoning_is_not_called_dropped_reasoning() -> None:
    """A short conversation that gets a tool: the system message changes, and soon after it all."""
    reply = {"role": "assistant", "content": "x", "reasoning_content": "because the answer"}
    asked = ({"role": "user", "content": "what"},)
    then = (*asked, reply, {"role": "user", "content": "then"})
    requests = (
        lab.ClientRequest(asked, reply),
        lab.ClientRequest(then, reply, {"tools": [TOOL]}),
    )
    for name in ("qwen3", "glm4moe"):
        template = lab.Template(tokenizer(name))
        _, second = lab.measure(template, lab.Chat("short", requests), min_run=8).turns
        assert second.divergence is not None
        assert second.divergence.cause == "text"


@pytest.mark.parametrize(
    ("reply", "sampled"),
    [
        ({"content": "early"}, "<|channel|>final<|message|>early<|return|>"),
        (
            {"content": "early", "reasoning_content": "it says so"},
            (
                "<|channel|>analysis<|message|>it says so<|end|>"
                "<|start|>assistant<|channel|>final<|message|>early<|return|>"
            ),
        ),
    ],
)
def test_an_answer_after_tool_calls_is_the_reply_alone(reply: dict[str, str], sampled: str) -> None:
    """Regression: gpt-oss drops the reasoning of calls then; calls were part of the reply."""
    call = {"name": "lookup", "arguments": {"word": "so"}}
    calls = {"tool_calls": [{"id": "call0", "type": "function", "function": call}]}
    messages: tuple[dict[str, Any], ...] = (
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": "", "reasoning_content": "I look it up", **calls},
        {"role": "tool", "name": "lookup", "tool_call_id": "call0", "content": "early"},
    )
    request = lab.ClientRequest(messages, {"role": "assistant", **reply})
    one = lab.Template(tokenizer("gptoss")).render(lab.Chat("calls", (request,), (TOOL,)), request)
    assert one.prompt.endswith("<|start|>assistant")
    assert one.text == sampled


def test_templates_are_those_of_the_sources() -> None:
    listed = (FOLDER / "SOURCES.md").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.jinja"):
        assert f"`{path.name}`" in listed
        assert hashlib.sha256(path.read_bytes()).hexdigest() in listed
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(TEMPLATES)
