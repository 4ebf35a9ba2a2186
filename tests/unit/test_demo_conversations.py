"""Chat files: both forms, the cut into turns, and one clear sentence for what is broken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvtrie.demo import Conversation, conversation_path, load_conversations

if TYPE_CHECKING:
    from pathlib import Path

USER = {"role": "user", "content": "Hello!"}
REPLY = {"role": "assistant", "content": "Hello."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "42"}


def _write(path: Path, *rows: object) -> Path:
    file = path / "chat.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_load_shipped_file_is_one_conversation_with_tools() -> None:
    (conversation,) = load_conversations()
    roles = [message["role"] for message in conversation.messages]
    assert roles[0] == "system"
    assert roles.count("user") >= 8
    assert roles.count("tool") >= 3
    assert all(turn.reference for turn in conversation.turns())
    assert conversation_path().is_file()


def test_load_lines_of_messages_are_one_conversation(tmp_path: Path) -> None:
    (conversation,) = load_conversations(_write(tmp_path, USER, "", REPLY, USER))
    assert conversation.messages == (USER, REPLY, USER)
    assert conversation.line == 1


def test_load_lines_of_conversations_stay_apart(tmp_path: Path) -> None:
    rows = [{"messages": [USER, REPLY], "tools": [{"type": "function"}]}, {"messages": [USER]}]
    first, second = load_conversations(_write(tmp_path, *rows))
    assert (first.line, first.tools) == (1, ({"type": "function"},))
    assert (second.line, second.tools) == (2, ())


def test_load_replies_that_are_all_calls_where_they_may_be(tmp_path: Path) -> None:
    row = {"messages": [USER, CALL, RESULT, CALL]}
    for rows in ([row], row["messages"]):
        file = _write(tmp_path, *rows)
        with pytest.raises(ValueError, match=r"line 1: no reply is left to generate: .* a tool"):
            load_conversations(file)
        (found,) = load_conversations(file, may_only_call=True)
        assert [one["role"] for one in found.messages] == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(ValueError, match="no user or tool message"):
        load_conversations(_write(tmp_path, {"messages": [CALL]}), may_only_call=True)


def test_load_mixed_forms_close_the_run_of_messages(tmp_path: Path) -> None:
    found = load_conversations(_write(tmp_path, USER, {"messages": [USER]}, USER, REPLY))
    assert [(one.line, len(one.messages)) for one in found] == [(1, 1), (2, 1), (3, 2)]


def test_load_normalises_roles_and_text_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "\u2028b"}]
    rows = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    (conversation,) = load_conversations(
        _write(tmp_path, *rows, {"role": "function", "content": ""})
    )
    assert [message["role"] for message in conversation.messages] == ["system", "user", "tool"]
    assert conversation.messages[1]["content"] == "a\u2028b"


def test_load_accepts_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(USER).encode() + b"\r\n\r\n")
    assert load_conversations(file)[0].messages == (USER,)


def test_load_finds_reasoning_under_every_name(tmp_path: Path) -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        (found,) = load_conversations(_write(tmp_path, USER, {**REPLY, name: "Hm."}))
        assert found.messages[1] == {**REPLY, "reasoning_content": "Hm.", name: "Hm."}
    both = {**REPLY, "reasoning": "Second.", "reasoning_content": "First."}
    (found,) = load_conversations(_write(tmp_path, USER, both))
    assert found.messages[1]["reasoning_content"] == "First."


def test_turns_take_tool_calls_as_recorded() -> None:
    call = {**CALL, "content": ""}
    turns = Conversation((USER, call, RESULT, REPLY, USER)).turns()
    assert [turn.given for turn in turns] == [(USER, call, RESULT), (USER,)]
    assert [turn.reference for turn in turns] == ["Hello.", None]


def test_turns_ask_at_every_user_message_without_a_reply() -> None:
    turns = Conversation((USER, USER, REPLY, RESULT, USER)).turns()
    assert [len(turn.given) for turn in turns] == [1, 1, 1, 1]
    assert [turn.reference for turn in turns] == [None, "Hello.", None, None]


def test_turns_keep_a_greeting_of_the_assistant_as_given() -> None:
    turns = Conversation((REPLY, USER, REPLY, REPLY)).turns()
    assert [turn.given for turn in turns] == [(REPLY, USER)]


def test_turns_drop_the_reasoning_from_the_reference() -> None:
    reply = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    assert Conversation((USER, reply)).turns()[0].reference == "Yes."


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no conversation"),
        (["", "  "], "holds no conversation"),
        ([USER, '{"role": "user", '], "line 2: not JSON"),
        (["[" * 100_000], "line 1:"),
        (["[1]"], "line 1: a JSON object is expected, not a list"),
        ([{"text": "x"}], 'neither "messages"'),
        ([{"role": "robot", "content": "x"}], "unknown role 'robot'"),
        ([{"messages": [USER, {"role": 3}]}], "message 2: unknown role 3"),
        ([{"messages": [USER, "x"]}], "message 2: a message is a JSON object, not a string"),
        ([{"messages": []}], "at least one message"),
        ([{"messages": [USER], "tools": "x"}], '"tools" must be a list'),
        ([{"role": "system", "content": "x"}], "no user or tool message"),
        ([{"messages": [REPLY]}], "no user or tool message"),
        ([{"role": "user", "content": None}], '"content" must be text, not null'),
        ([{"role": "user"}], '"content" must be text, not null'),
        ([{"role": "user", "content": 3}], '"content" must be text, not a number'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
        ([{"role": "user", "content": ["x"]}], "only text parts"),
        ([USER, {**CALL, "tool_calls": [{"id": "a"}]}], "a tool call needs a function"),
        ([USER, {**CALL, "tool_calls": {"id": "a"}}], "a tool call needs a function"),
        (['{"role": "user", "content": "\\ud83d"}'], "half of a surrogate pair"),
        ([{**USER, "token_ids": [1]}], "of an assistant message, not of a user message"),
        ([USER, {**REPLY, "token_ids": []}], "a list of at least one id"),
        ([USER, {**REPLY, "token_ids": [1, True]}], "True is no token id"),
        ([USER, {**REPLY, "token_ids": [1, -1]}], "-1 is no token id"),
        ([USER, {**REPLY, "token_ids": [1 << 32]}], "4294967296 is no token id"),
        ([USER, {**REPLY, "reasoning": ["x"]}], "'reasoning' must be text, not a list"),
        ([USER, '{"role": "user", "content": ' + "9" * 5000 + "}"], "line 2: not JSON that can be"),
    ],
)
def test_load_refuses_with_one_sentence(tmp_path: Path, rows: list[object], words: str) -> None:
    file = _write(tmp_path, *rows)
    with pytest.raises(ValueError, match=r"chat\.jsonl") as caught:
        load_conversations(file)
    text = str(caught.value)
    assert words in text
    assert "\n" not in text
    assert text.endswith(".")


def test_load_refuses_what_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_bytes(b'{"role": "user", "content": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        load_conversations(file)


def test_load_reports_a_missing_file_as_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_conversations(tmp_path / "none.jsonl")


def test_a_recorded_reply_is_given_and_not_generated() -> None:
    recorded = {**REPLY, "recorded": True}
    (turn,) = Conversation((USER, recorded, RESULT, REPLY)).turns()
    assert turn.given == (USER, recorded, RESULT)
    assert turn.reference == "Hello."
