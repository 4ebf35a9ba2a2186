"""Reasoning of closed turns is evicted first, in a real engine; prompts and answers stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm import chat
from tests.vllm.engine import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import Answer, Engine

REASONING = "<think>\n" + "answers " * 120 + "\n</think>\n\n"
CALL = '<tool_call>\n{"name": "lookup"}\n</tool_call>'


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat.model(tmp_path_factory.mktemp("models") / "chat")


class Talk(chat.Chat):
    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(engine.llm.get_tokenizer())
        self.engine = engine
        self.table: list[int] = []
        dead = engine.connector.planner.half.dead
        if dead is not None:
            close = dead.close

            def watching(seq: Any, reading: Any, block_ids: list[int], others: Any) -> None:
                self.table = list(block_ids)
                close(seq, reading, block_ids, others)

            monkeypatch.setattr(dead, "close", watching)

    def say(self, messages: list[chat.Message], reply: str, *, stops: bool = True) -> list[int]:
        """Let the model end this reply: by itself, or because it has no tokens left."""
        ids = self.prompt(messages, reply=reply)
        if stops:
            one = {"allowed_token_ids": [self.end], "stop_token_ids": [self.end]}
            self.engine.ask(ids, max_tokens=4, **one)
        else:
            self.engine.ask(ids, max_tokens=1)
        return ids

    def head(self) -> list[int]:
        """The blocks of dead reasoning, in the order in which vLLM would take them."""
        dead = self.engine.connector.planner.half.dead
        before = self.engine.counts["blocks_dead"]
        if dead is not None:
            dead.settle()
        count = self.engine.counts["blocks_dead"] - before
        blocks = self.engine.pool.free_block_queue.get_all_free_blocks()[:count]
        assert all(block.block_hash is not None for block in blocks)
        return [block.block_id for block in blocks]

    def inside(self, ids: list[int], number: int = 0) -> list[int]:
        opens, closes = self.ids("<think>")[0], self.ids("</think>")[0]
        start = [at for at, one in enumerate(ids) if one == opens][number]
        end = [at for at, one in enumerate(ids) if one == closes][number] + 1
        newline = self.ids("\n\n")
        if ids[end : end + len(newline)] == newline:
            end += len(newline)
        return self.table[-(-start // BLOCK) : end // BLOCK][::-1]


@pytest.fixture
def talk(
    engine: Callable[..., Engine], chatting: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Talk]:
    def start(*, blocks: int = 200, **settings: Any) -> Talk:
        connector = {"gate": "unchecked", "policy": {"scope": "namespace"}, **settings}
        given: dict[str, Any] = {"skip_tokenizer_init": False, "max_model_len": 2000}
        made = engine(chatting, connector=connector, blocks=blocks, **given)
        return Talk(made, monkeypatch)

    return start


def test_reasoning_goes_to_the_head_when_the_turn_closes(talk: Callable[..., Talk]) -> None:
    t = talk()
    ids = t.say([chat.user("question")], REASONING + "it " * 60)
    expected = t.inside(ids)
    assert len(expected) > 2
    assert t.head() == expected
    assert t.head() == []


def test_reasoning_is_still_found_until_its_blocks_are_taken(talk: Callable[..., Talk]) -> None:
    t = talk()
    ids = t.say([chat.user("question")], REASONING + "it " * 60)
    assert t.head()
    again: Answer = t.engine.ask(ids, max_tokens=1)
    assert again.num_cached >= len(ids) // BLOCK * BLOCK - BLOCK


def test_nothing_is_dead_inside_a_tool_loop(talk: Callable[..., Talk]) -> None:
    t = talk()
    question = chat.user("question")
    t.say([question], REASONING + CALL)
    assert t.head() == []
    call = {"id": "0", "type": "function", "function": {"name": "lookup", "arguments": {}}}
    asked = chat.reply("", 0, reasoning="answers") | {"tool_calls": [call]}
    result = {"role": "tool", "content": "system " * 60, "tool_call_id": "0"}
    ids = t.say([question, asked, result], REASONING + "it " * 60)
    first, second = t.inside(ids, 0), t.inside(ids, 1)
    assert len(first) > 2
    assert len(second) > 2
    # The answer closes the turn, with all of its reasoning.
    assert sorted(t.head()) == sorted(first + second)


def test_nothing_is_dead_where_the_reply_was_cut_off(talk: Callable[..., Talk]) -> None:
    t = talk()
    t.say([chat.user("question")], REASONING + "it " * 60, stops=False)
    assert t.head() == []


def test_reasoning_that_others_continue_stays(talk: Callable[..., Talk]) -> None:
    t = talk()
    question = chat.user("question")
    ids = t.prompt([question], reply=REASONING + "it " * 60)
    shown = [*ids, t.end, *t.ids("\n<|im_start|>user\n" + "tool " * 100)]
    t.engine.ask(shown, max_tokens=1)
    # The same turn again, which ends where the other one went on.
    t.say([question], REASONING + "it " * 60)
    assert t.head() == []


def test_it_can_be_switched_off(talk: Callable[..., Talk]) -> None:
    t = talk(dead_thinking=False)
    t.say([chat.user("question")], REASONING + "it " * 60)
    assert t.engine.counts["blocks_dead"] == 0


def test_reasoning_that_the_template_keeps_stays(talk: Callable[..., Talk]) -> None:
    t = talk(template_arguments={"preserve": True})
    t.say([chat.user("question")], REASONING + "it " * 60)
    assert t.head() == []


@pytest.mark.parametrize("dead_thinking", [True, False])
def test_prompt_and_answer_survive_the_eviction_of_the_reasoning(
    talk: Callable[..., Talk], dead_thinking: bool
) -> None:
    t = talk(blocks=64, dead_thinking=dead_thinking)
    question = chat.user("question")
    ids = t.say([question], REASONING + "it " * 60)
    # Another request needs all blocks that were never cached, and as many as the reasoning has.
    cached = sum(block.block_hash is not None for block in t.engine.pool.blocks)
    dead = REASONING.count("answers") // BLOCK - 1
    room = (t.engine.pool.num_gpu_blocks - 1 - cached + dead) * BLOCK
    t.engine.ask([5 + at % 200 for at in range(room - 8)], max_tokens=1, salt="other")
    following = t.prompt([question, chat.reply("it"), chat.user("tool")])
    kept = t.engine.ask(following, max_tokens=1).num_cached
    answer = ids.index(t.ids("</think>")[0]) + 2
    whole = ids.index(t.ids("<think>")[0]) + len(ids) - answer
    if dead_thinking:
        # The template's few tokens after the answer belong to the last message: they stay.
        assert kept > 0.9 * whole
    else:
        assert kept < 0.8 * whole
