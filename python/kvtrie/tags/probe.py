"""Detects which chat format a tokenizer's own template renders.

Conversations of made-up words are rendered, tokenised, and read with every preset whose delimiters
the tokenizer has. The format is the preset that finds each word where it was put. When reasoning is
deleted, and how much of it, is read from the rendered text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from kvtrie.tags.grammar import Grammar
from kvtrie.tags.presets import PRESETS
from kvtrie.tags.spellings import Tokenizer, from_tokenizer
from kvtrie.tags.stream import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtrie.tags.formats import Boundary, Drops, Format

# Words that no template contains or changes.
_SYSTEM: Final = "zorvexa"
_USERS: Final = ("quibnolt", "hexdrawn")
_REASONING: Final = "mulkwist"
_ANSWER: Final = "taprogue"
_CALL: Final = "vundelop"
_RESULT: Final = "brixolane"
_TOOL: Final = "lookup"

# Special tokens before a message, at most.
_MOST_SPECIAL: Final = 4

Message = dict[str, Any]
Ids = tuple[int, ...]


class _Unreadable(Exception):  # noqa: N818 - it never leaves this module
    """A template does not render a probe, or a format does not fit it."""


def recognise(tokenizer: object, arguments: Mapping[str, Any]) -> Format:
    """The format of a tokenizer's template; see `Tagger.from_tokenizer`."""
    if not isinstance(tokenizer, Tokenizer) or not hasattr(tokenizer, "apply_chat_template"):
        msg = (
            f"from_tokenizer: {type(tokenizer).__name__} is not a tokenizer with encode, decode "
            "and apply_chat_template"
        )
        raise TypeError(msg)
    named = f"one of {', '.join(PRESETS)}"
    if not (arguments.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        msg = (
            "from_tokenizer: the tokenizer has no chat template: set its chat_template, or name "
            f"the format, Tagger.from_preset(name, tokenizer), {named}"
        )
        raise ValueError(msg)
    try:
        probe = _Probe(tokenizer, arguments)
        reasons = []
        for form in PRESETS.values():
            try:
                return _measured(form, probe)
            except (_Unreadable, ValueError) as error:
                reasons.append(f"{form.name}: {error}")
        missing = "; ".join(reasons)
    except _BrokenTemplateError as error:
        missing = str(error)
    msg = (
        f"from_tokenizer: the chat template is not understood ({missing}); name the format, "
        f"Tagger.from_preset(name, tokenizer), {named}, or give delimiters, Tagger.from_ids"
    )
    raise ValueError(msg)


def find_openings(tokenizer: object, arguments: Mapping[str, Any]) -> tuple[Ids, ...]:
    """The ids that messages of users and tools begin with; see `Openings.of`.

    An opening begins with a special token, and ends where it differs from what comes before a
    reply: `<|im_start|>user`, `[INST]`. It is checked that it is found where it was put.
    """
    if not isinstance(tokenizer, Tokenizer) or not hasattr(tokenizer, "apply_chat_template"):
        return ()
    try:
        special = _special(tokenizer)
        probe = _Probe(tokenizer, arguments)
        chat = probe.render([_user(0), _said(), _user(1)], prompt=True)
        user, at = _opening(probe, special, chat, _USERS[1])
        if _last(probe, (user,), chat) != at:
            return ()
    except (_BrokenTemplateError, _Unreadable, TypeError, ValueError):
        # Tokenizers of engines may take no special tokens in text, for example.
        return ()
    style = probe.tool_style
    if style is None:
        return (user,)
    loop = _loop(style)
    try:
        text = probe.render([_user(0), _said(), _user(1), *loop], prompt=True, **style[2])
        tool, at = _opening(probe, special, text, _RESULT)
        both = tuple(dict.fromkeys((user, tool)))
        later = probe.render([_user(0), *loop, _said(), _user(1)], prompt=True, **style[2])
        again = _opening(probe, special, later, _USERS[1])[1]
    except _Unreadable:
        return (user,)
    is_found = _last(probe, both, text) == at and _last(probe, both, later) == again
    return both if is_found else (user,)


def _special(tokenizer: Any) -> frozenset[int]:  # noqa: ANN401 - duck-typed
    known: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return frozenset([*known.values(), *getattr(tokenizer, "all_special_ids", ())])


def _opening(probe: _Probe, special: frozenset[int], text: str, word: str) -> tuple[Ids, int]:
    """What opens the message of a word, and where."""
    own, other = (_before(probe, text, one) for one in (word, _ANSWER))
    own_starts, other_starts = (
        [at for at, token in enumerate(ids) if token in special][::-1] for ids in (own, other)
    )
    for at, there in zip(own_starts[:_MOST_SPECIAL], other_starts, strict=False):
        mine, theirs = own[at:], other[there:]
        pairs = zip(mine, theirs, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same < len(theirs):
            return mine[: same + 1], at
    msg = f"what is before {word!r} is not told from what is before a reply"
    raise _Unreadable(msg)


def _before(probe: _Probe, text: str, word: str) -> Ids:
    if word not in text:
        msg = f"{word!r} is not in the text"
        raise _Unreadable(msg)
    # A token may have white space and the beginning of the word.
    return _encoded(probe, text[: text.index(word)].rstrip())


def _encoded(probe: _Probe, text: str) -> Ids:
    return tuple(int(token) for token in probe.tokenizer.encode(text, add_special_tokens=False))


def _last(probe: _Probe, openings: tuple[Ids, ...], text: str) -> int | None:
    ids = _encoded(probe, text)
    found = [
        at
        for opening in openings
        for at in range(len(ids))
        if ids[at : at + len(opening)] == opening
    ]
    return max(found, default=None)


class _BrokenTemplateError(Exception):
    """A template renders not even a question and its answer."""


class _Probe:
    """Renders conversations with one tokenizer."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:  # noqa: ANN401 - duck-typed: see Tokenizer
        self.tokenizer = tokenizer
        self._arguments = dict(arguments)
        self.chat = self._chat()
        self.tool_style = self._tool_style()

    def render(self, messages: list[Message], *, prompt: bool = False, **more: object) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=prompt,
                **{**self._arguments, **more},
            )
        except Exception as error:  # a template may raise anything
            msg = f"it does not render {[message['role'] for message in messages]}: {error}"
            raise _Unreadable(msg) from error
        if not isinstance(text, str):
            msg = f"apply_chat_template returned {type(text).__name__}, not text"
            raise _Unreadable(msg)
        return text

    def _chat(self) -> tuple[str, bool]:
        """A rendered chat without tools, and whether it has a system message."""
        messages = [_user(0), {"role": "assistant", "content": _ANSWER}, _user(1)]
        try:
            text = self.render([{"role": "system", "content": _SYSTEM}, *messages], prompt=True)
            if _SYSTEM in text:
                return text, True
        except _Unreadable:
            pass
        try:
            text = self.render(messages, prompt=True)
        except _Unreadable as error:
            raise _BrokenTemplateError(str(error)) from error
        if lost := [word for word in (*_USERS, _ANSWER) if word not in text]:
            msg = f"it omits message text: {', '.join(lost)}"
            raise _BrokenTemplateError(msg)
        return text, False

    def _tool_style(self) -> tuple[Any, Any, dict[str, Any]] | None:
        """The form of tool calls; None if the template has none."""
        schema = {"type": "object", "properties": {"word": {"type": "string"}}}
        tool = {"name": _TOOL, "description": _TOOL, "parameters": schema}
        given: dict[str, Any] = {"tools": [{"type": "function", "function": tool}]}
        arguments = {"word": _CALL}
        without: dict[str, Any] = {}
        for more in (without, given):
            for content in ("", None):
                for value in (arguments, json.dumps(arguments)):
                    style = (content, value, more)
                    try:
                        text = self.render([_user(0), *_loop(style)], **more)
                    except _Unreadable:
                        continue
                    if _CALL in text and _RESULT in text:
                        return style
        return None

    def locate(self, ids: list[int], word: str, after: int = 0) -> tuple[int, int]:
        decode = self.tokenizer.decode

        def first(low: int, high: int, test: Any) -> int:  # noqa: ANN401 - a predicate
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if test(middle) else (middle + 1, high)
            return low

        end = first(after, len(ids), lambda at: word in decode(ids[after:at]))
        if word not in decode(ids[after:end]):
            msg = f"{word!r} is lost between encode and decode"
            raise _Unreadable(msg)
        start = first(after, end, lambda at: word not in decode(ids[at:end])) - 1
        return start, end


def _user(number: int) -> Message:
    return {"role": "user", "content": _USERS[number]}


def _said() -> Message:
    return {"role": "assistant", "content": _ANSWER}


def _with_reasoning(message: Message) -> Message:
    """The message with reasoning under every field name that templates use."""
    return message | {
        "reasoning_content": _REASONING,
        "reasoning": _REASONING,
        "thinking": _REASONING,
    }


def _loop(style: tuple[Any, Any, dict[str, Any]], *, reasoning: bool = False) -> list[Message]:
    content, arguments, _ = style
    call = {"id": "call_0", "type": "function"}
    call |= {"function": {"name": _TOOL, "arguments": arguments}}  # type: ignore[dict-item] # messages nest
    message: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "name": _TOOL, "tool_call_id": "call_0", "content": _RESULT}
    return [_with_reasoning(message) if reasoning else message, result]


def _check(probe: _Probe, grammar: Grammar, text: str, words: Iterator[tuple[str, str]]) -> None:
    """Raise `_Unreadable` unless each word has its kind."""
    ids = [int(token) for token in probe.tokenizer.encode(text, add_special_tokens=False)]
    sections = read_whole(grammar, ids).sections
    for word, kind in words:
        start, end = probe.locate(ids, word)
        found = sorted(
            {
                section.kind
                for section in sections
                if section.span.start <= start and end <= section.span.end
            }
        )
        if found != [kind]:
            msg = f"{kind} is read as {' and '.join(found) or 'nothing'}"
            raise _Unreadable(msg)


def _measured(form: Format, probe: _Probe) -> Format:
    """The format with this template's boundary and drops; `_Unreadable` if it does not fit."""
    found = from_tokenizer(form, probe.tokenizer, f"Tagger({form.name!r})")
    grammar = Grammar(form, found)
    text, has_system = probe.chat
    words = [(_USERS[0], "user"), (_ANSWER, "answer"), (_USERS[1], "user")]
    if has_system:
        words.append((_SYSTEM, "system"))
    _check(probe, grammar, text, iter(words))
    style = probe.tool_style
    if style is not None:
        more = style[2]
        answer = {"role": "assistant", "content": _ANSWER}
        text = probe.render([_user(0), *_loop(style), answer, _user(1)], prompt=True, **more)
        words = [(_CALL, "tool_call"), (_RESULT, "tool_result"), (_ANSWER, "answer")]
        _check(probe, grammar, text, iter([*words, (_USERS[1], "user")]))
    boundary = _boundary(form, probe)
    if boundary == "never":
        return replace(form, boundary=boundary)
    drops = _drops(probe, form)
    pairs = tuple(
        replace(pair, drops=drops) if pair.kind == "reasoning" else pair for pair in form.pairs
    )
    return replace(form, boundary=boundary, pairs=pairs)


def _boundary(form: Format, probe: _Probe) -> Boundary:
    style = probe.tool_style
    answer = {"role": "assistant", "content": _ANSWER}
    if style is not None:
        more = style[2]
        loop = _loop(style, reasoning=True)
        if _REASONING in probe.render([_user(0), *loop], prompt=True, **more):
            if _REASONING not in probe.render([_user(0), *loop, _user(1)], prompt=True, **more):
                return "user"
            ended = [_user(0), *loop, answer, _user(1)]
            return (
                "final" if _REASONING not in probe.render(ended, prompt=True, **more) else "never"
            )
    asked = probe.render([_user(0), _with_reasoning(answer), _user(1)], prompt=True)
    if _REASONING in asked:
        return "never"
    pair = next((pair for pair in form.pairs if pair.kind == "reasoning"), None)
    if (
        pair is None
        or _drops(probe, form) != "whole"
        or _REASONING in probe.render([_user(0), _with_reasoning(answer)])
    ):
        return form.boundary
    # The template reads no field for reasoning, so it can only be in the text.
    content = f"{pair.open}\n{_REASONING}\n{pair.close}\n\n{_ANSWER}"
    inline = probe.render(
        [_user(0), {"role": "assistant", "content": content}, _user(1)], prompt=True
    )
    return "never" if _REASONING in inline else form.boundary


def _drops(probe: _Probe, form: Format) -> Drops:
    pair = next((pair for pair in form.pairs if pair.kind == "reasoning"), None)
    if pair is None:
        return "whole"
    answer = _with_reasoning({"role": "assistant", "content": _ANSWER})
    text = probe.render([_user(0), answer, _user(1)], prompt=True)
    left = text[text.index(_USERS[0]) : text.index(_ANSWER)]
    if pair.close not in left:
        return "whole"
    return "body" if pair.open in left else "to_close"
