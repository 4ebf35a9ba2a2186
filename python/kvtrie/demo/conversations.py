"""Reads OpenAI-style chat files and splits them into the turns of a replay."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtrie.demo.paths import conversation_path

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
# DeepSeek's API and older vLLM; vLLM and OpenRouter; Ollama and gpt-oss' template.
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class ReplayTurn:
    """One reply to generate.

    Attributes:
        given: Messages appended to the history before generation.
        reference: The recorded answer without its reasoning, or None.
    """

    given: tuple[dict[str, Any], ...]
    reference: str | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of a chat file.

    Attributes:
        messages: Its checked messages. Roles are system, user, assistant and tool; content made of
            text parts is joined to one string; reasoning is in ``reasoning_content``.
        tools: Its declared tools, in OpenAI form.
        line: The line of the file on which it begins, counted from 1.
        places: Where each message is in the file, in words; empty if it is of no file.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    line: int = 1
    places: tuple[str, ...] = ()

    def turns(self) -> list[ReplayTurn]:
        """Split the conversation into the replies that the model generates.

        An assistant message after a user or tool message is generated; its recorded text is the
        reference. One with tool calls, or with a true ``recorded``, is given as recorded, and so
        are tool results. A user or tool message without a reply gets one without a reference.
        Messages after the last reply belong to no turn.
        """
        turns: list[ReplayTurn] = []
        given: list[dict[str, Any]] = []
        for message in self.messages:
            asked = bool(given) and given[-1]["role"] in {"user", "tool"}
            is_given = message.get("tool_calls") or message.get("recorded")
            spoken = message["role"] == "assistant" and not is_given
            if asked and spoken:
                turns.append(ReplayTurn(tuple(given), answer_of(message["content"])))
                given = []
                continue
            if asked and message["role"] in {"user", "system"}:
                turns.append(ReplayTurn(tuple(given), None))
                given = []
            given.append(message)
        if given and given[-1]["role"] in {"user", "tool"}:
            turns.append(ReplayTurn(tuple(given), None))
        return turns


def answer_of(content: str) -> str:
    r"""The answer in a reply: the text after its reasoning.

    Example:
        >>> answer_of("<think>\nTwo and two.\n</think>\n\nFour.")
        'Four.'
    """
    return content.rpartition("</think>")[2].strip("\n")


def load_conversations(
    path: str | Path | None = None, *, may_only_call: bool = False
) -> list[Conversation]:
    r"""Read a chat file: at least one conversation, each with at least one turn.

    A line is a JSON object of one of two forms. ``{"messages": [...], "tools": [...]}`` is a whole
    conversation (``tools`` is optional). ``{"role": ..., "content": ...}`` is one message;
    consecutive lines of this form are one conversation. Blank lines are skipped. An assistant
    message may have ``token_ids``, the ids that an engine returned for it, and its reasoning in
    ``reasoning_content``, ``reasoning`` or ``thinking``.

    Args:
        path: The file, or None for the shipped conversation.
        may_only_call: Also take a conversation without a turn, if it has a user or tool message: a
            run of an agent in which each reply calls a tool.

    Raises:
        ValueError: The file is empty or a line is not a conversation; the text names file, line and
            reason.
        OSError: The file cannot be read.
    """
    path = conversation_path() if path is None else Path(path)
    found: list[Conversation] = []
    run: dict[int, dict[str, Any]] = {}
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        if "messages" in row:
            _close(found, run, path, may_only_call=may_only_call)
            run = {}
            conversation = _conversation(row, where, number)
            found.append(_checked(conversation, where, may_only_call=may_only_call))
        elif "role" in row:
            run[number] = _message(row, where)
        else:
            raise _bad(where, 'it has neither "messages" (a conversation) nor "role" (a message).')
    _close(found, run, path, may_only_call=may_only_call)
    if not found:
        raise _bad(path, "the file holds no conversation.")
    return found


def _rows(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(path, f"the file is not UTF-8 (byte {error.start}).") from None
    # JSONL ends lines with a line feed alone: other separators may be inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise _bad(where, f"not JSON ({error.msg} at column {error.colno}).") from None
        except RecursionError:
            raise _bad(where, "the JSON is nested too deeply.") from None
        except ValueError:
            raise _bad(where, "not JSON that can be read (a number has too many digits).") from None
        if not isinstance(row, dict):
            raise _bad(where, f"a JSON object is expected, not {_name(row)}.")
        yield number, row


def _close(
    found: list[Conversation], run: dict[int, dict[str, Any]], path: Path, *, may_only_call: bool
) -> None:
    """End a conversation whose messages have a line each."""
    if run:
        start = next(iter(run))
        places = tuple(f"{path}, line {number}" for number in run)
        conversation = Conversation(tuple(run.values()), line=start, places=places)
        found.append(_checked(conversation, places[0], may_only_call=may_only_call))


def _conversation(row: dict[str, Any], where: str, number: int) -> Conversation:
    messages, tools = row["messages"], row.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise _bad(where, '"messages" must be a list of at least one message.')
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _bad(where, '"tools" must be a list of objects.')
    places = tuple(f"{where}, message {at}" for at in range(1, len(messages) + 1))
    checked = tuple(_message(one, at) for one, at in zip(messages, places, strict=True))
    _printable(tools, where)
    return Conversation(checked, tuple(tools), number, places)


def _checked(conversation: Conversation, where: str, *, may_only_call: bool) -> Conversation:
    if not any(message["role"] in {"user", "tool"} for message in conversation.messages):
        raise _bad(where, "the conversation has no user or tool message to reply to.")
    if not may_only_call and not conversation.turns():
        raise _bad(
            where,
            "no reply is left to generate: each is given as recorded, because it calls a tool or "
            'has "recorded".',
        )
    return conversation


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(where, f"a message is a JSON object, not {_name(message)}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(where, f"unknown role {role!r} (known: {', '.join(_ROLES)}).")
    _printable(message, where)
    _check_ids(message.get("token_ids"), role, where)
    out = {**message, "role": _ROLES[role]}
    if role == "assistant" and out.get("tool_calls"):
        _check_calls(out["tool_calls"], where)
        out["content"] = "" if out.get("content") is None else _text(out["content"], where)
    else:
        out["content"] = _text(out.get("content"), where)
    if role == "assistant":
        _name_reasoning(out, where)
    return out


def _name_reasoning(message: dict[str, Any], where: str) -> None:
    """Put the reasoning, as engines and clients name it, under one name too."""
    for name in _REASONING:
        found = message.get(name)
        if found is not None and not isinstance(found, str):
            raise _bad(where, f"{name!r} must be text, not {_name(found)}.")
        if found and not message.get(_REASONING[0]):
            message[_REASONING[0]] = found


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, f'"content" must be text, not {_name(content)}.')
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _bad(where, f"only text parts can be replayed, not {kind or _name(part)}.")
        texts.append(part["text"])
    return "".join(texts)


def _check_calls(calls: object, where: str) -> None:
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), (str, dict))
        ):
            raise _bad(where, "a tool call needs a function with a name and arguments.")


def _check_ids(ids: object, role: str, where: str) -> None:
    if ids is None:
        return
    if role != "assistant":
        raise _bad(where, f'"token_ids" are of an assistant message, not of a {role} message.')
    if not isinstance(ids, list) or not ids:
        raise _bad(where, '"token_ids" must be a list of at least one id.')
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < 1 << 32:
            raise _bad(where, f"{one!r} is no token id: a whole number from 0 to {(1 << 32) - 1}.")


def _printable(value: object, where: str) -> None:
    """Refuse text that JSON can express but UTF-8, and so a tokenizer, cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad(where, "the text holds half of a surrogate pair.") from None


def _bad(where: object, why: str) -> ValueError:
    return ValueError(f"{where}: {why}")


def _name(value: object) -> str:
    names = {type(None): "null", str: "a string", list: "a list", dict: "an object", bool: "a bool"}
    return names.get(type(value), "a number")
