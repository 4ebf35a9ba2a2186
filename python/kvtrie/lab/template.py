"""A tokenizer with its chat template: prompts, what a model would answer, and the switches.

What the model sampled is in a reply's ``token_ids`` if the engine returned them. Else it is the
text that the template writes for the reply, up to its end mark, or the same with the reasoning
written by hand where the template leaves it out at once.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtrie.lab.chats import Chat
from kvtrie.lab.switches import uses
from kvtrie.lab.variations import is_date
from kvtrie.tags import Tagger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.lab.chats import ClientRequest
    from kvtrie.lab.switches import Use

# What every client or library passes.
_GIVEN: Final = frozenset(
    "messages tools documents add_generation_prompt continue_final_message bos_token eos_token "
    "pad_token unk_token sep_token cls_token mask_token additional_special_tokens "
    "raise_exception strftime_now namespace range dict lipsum cycler joiner loop".split()
)
_MOST_SWITCHES: Final = 4
_MARKS: Final = ("<think>", "</think>")
SAMPLED_IDS: Final = "token_ids"
"""Of a reply: the ids that the engine returned for it, as vLLM and SGLang name them."""


class TemplateError(ValueError):
    """A template is missing, or cannot render a conversation."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One request as token ids.

    Attributes:
        prompt: Its text.
        ids: The prompt's ids.
        sampled: Ids that the model sampled for the reply, or those of its text; the KV of the last
            is never computed.
        text: Their text.
    """

    prompt: str
    ids: list[int]
    sampled: list[int]
    text: str


class Template:
    """A tokenizer's chat template, with arguments.

    Args:
        tokenizer: With ``apply_chat_template``, ``encode`` and ``decode``, as the transformers
            library has them.
        arguments: Passed to the template with each prompt.

    Raises:
        TemplateError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:  # noqa: ANN401 - transformers has no types for them
        if not getattr(tokenizer, "chat_template", None):
            msg = "the tokenizer has no chat template"
            raise TemplateError(msg)
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self.tagger: Tagger | None = None
        self.untagged = ""
        try:
            self.tagger = Tagger.from_tokenizer(tokenizer, **self.arguments)
        except ValueError as error:
            self.untagged = str(error)

    def render(self, chat: Chat, request: ClientRequest) -> Rendered:
        """A request of a conversation.

        Raises:
            TemplateError: The template refuses it, with the template's words; or an id of the reply
                is not one of the tokenizer's.
        """
        passed = request.arguments
        prompt = self._text(request.messages, chat, passed, opens=True)
        if sampled := request.reply.get(SAMPLED_IDS):
            return Rendered(prompt, self.encode(prompt), list(sampled), self._said(chat, sampled))
        text = self._sampled(prompt, chat, request)
        return Rendered(prompt, self.encode(prompt), self.encode(text), text)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a prompt alone.

        Args:
            messages: In OpenAI form.
            tools: The declared tools, likewise.
            arguments: Passed to the template, besides its own.

        Raises:
            TemplateError: The template refuses it, with the template's words.
        """
        return self.encode(self.text(messages, tools=tools, arguments=arguments))

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt alone; arguments and errors as for `prompt`."""
        chat = Chat("request", (), tuple(tools))
        return self._text(messages, chat, arguments or {}, opens=True)

    def encode(self, text: str) -> list[int]:
        """A text's ids, without special tokens of the tokenizer's own."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: NDArray[np.uint32]) -> str:
        """The text of ids."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def used(self) -> dict[str, Use]:
        """The names that the template reads, with how it uses them."""
        return uses(self.tokenizer.chat_template)

    def switches(self, chats: Sequence[Chat]) -> Iterator[dict[str, Any]]:
        """Arguments that change what the template makes of conversations, one at a time.

        They are the names that the template reads and no library passes, each with the values that
        the template compares it with, else with True and with False, if that changes a prompt or
        leaves a reply other than by default. Values that no conversation can be rendered with are
        left out. At most ``4`` names, in alphabetical order.
        """
        found = 0
        default = self._outcome(chats, {})
        for name, use in self._switchable():
            some = []
            for value in use.values(name):
                outcome = self._outcome(chats, {name: value})
                if outcome != default and any(text is not None for text, _ in outcome):
                    some.append({name: value})
            yield from some
            found += bool(some)
            if found == _MOST_SWITCHES:
                return

    def untried(self, switches: Sequence[Mapping[str, Any]]) -> list[str]:
        """Names that could be switches too, after the most that `switches` returns."""
        names = {name for one in switches for name in one}
        if len(names) < _MOST_SWITCHES:
            return []
        return [name for name, _ in self._switchable() if name > max(names)]

    def unvaried(self, chats: Sequence[Chat]) -> list[str]:
        """Names that could be switches, but of which the template does not say the values."""
        found = []
        for name, use in self._switchable():
            if use.is_own:
                continue
            tried = [self._outcome(chats, {name: value}) for value in use.values(name)]
            if not any(text is not None for outcome in tried for text, _ in outcome):
                found.append(name)
        return found

    def after_reply(self, chat: Chat, earlier: ClientRequest, now: ClientRequest) -> str | None:
        """What the template writes after the reply to an earlier request.

        Args:
            chat: The conversation.
            earlier: The request.
            now: A later one, whose history begins with the messages of the earlier and its reply.

        Returns:
            None if it does not, or if the reply calls tools, or cannot be told from what follows.

        Raises:
            TemplateError: The template refuses the conversation with another reply.
        """
        at = len(earlier.messages)
        if len(now.messages) <= at or now.messages[:at] != earlier.messages:
            return None
        reply = now.messages[at]
        if reply["role"] != "assistant" or reply.get("tool_calls"):
            return None
        # What follows is what two prompts that differ in the end of the reply have in common.
        text, _, common = self._around(
            now.messages[:at], reply, now.messages[at + 1 :], chat, now.arguments, opens=True
        )
        return text[len(text) - common :] if common < len(text) else None

    def _switchable(self) -> Iterator[tuple[str, Use]]:
        for name, use in sorted(self.used().items()):
            if name not in _GIVEN and name not in self.arguments and not is_date(name):
                yield name, use

    def _outcome(
        self, chats: Sequence[Chat], switch: dict[str, Any]
    ) -> list[tuple[str | None, str]]:
        """The last prompt of each conversation, or why there is none."""
        found: list[tuple[str | None, str]] = []
        for chat in chats:
            last = chat.requests[-1]
            passed = {**last.arguments, **switch}
            try:
                found.append((self._text(last.messages, chat, passed, opens=True), ""))
            except TemplateError as error:
                found.append((None, str(error)))
        return found

    def _text(
        self,
        messages: Sequence[Any],
        chat: Chat,
        passed: Mapping[str, Any],
        *,
        opens: bool,
    ) -> str:
        reason: Exception | None = None
        arguments = {"tools": list(chat.tools) or None, **self.arguments, **passed}
        # Templates want the arguments of a call as an object or as JSON text.
        for as_text in (False, True):
            try:
                text = self.tokenizer.apply_chat_template(
                    [_spelled(one, as_text=as_text) for one in messages],
                    tokenize=False,
                    add_generation_prompt=opens,
                    **arguments,
                )
            except Exception as error:  # noqa: BLE001 - a template may raise anything
                reason = reason or error
            else:
                return str(text)
        said = str(reason).strip() or repr(reason)
        line = _line_of(reason)
        if line is not None:
            said = f"line {line} of the template: {said}"
        msg = f"the template does not render {chat.name!r}: {said}"
        raise TemplateError(msg) from reason

    def _said(self, chat: Chat, sampled: Sequence[int]) -> str:
        if max(sampled) >= len(self.tokenizer):
            msg = (
                f"{chat.name!r} has the token id {max(sampled)}; the tokenizer has "
                f"{len(self.tokenizer)} tokens"
            )
            raise TemplateError(msg)
        return str(self.tokenizer.decode(sampled, skip_special_tokens=False))

    def _sampled(self, prompt: str, chat: Chat, request: ClientRequest) -> str:
        reply = request.reply
        written, is_continued = self._written(prompt, chat, request)
        reasoning = str(reply.get("reasoning_content") or "")
        if is_continued and reasoning in written:
            return self._until_end(written)
        # The template writes the reply of an earlier turn otherwise than it is sampled.
        content = str(reply.get("content") or "")
        if not reasoning:
            return self._until_end(written if content in written else content)
        opened, closed = self._marks()
        is_open = prompt.rstrip().endswith(opened)
        before = "" if is_open else f"{opened}\n"
        answer = written[written.index(content) :] if content and content in written else written
        answer = answer.removeprefix(opened).lstrip("\n").removeprefix(closed).lstrip("\n")
        return self._until_end(f"{before}{reasoning}\n{closed}\n\n{answer}")

    def _written(self, prompt: str, chat: Chat, request: ClientRequest) -> tuple[str, bool]:
        """The reply as the template writes it, and whether that continues the prompt's opening."""
        messages, reply, passed = request.messages, request.reply, request.arguments
        whole = self._text([*messages, reply], chat, passed, opens=False)
        if whole.startswith(prompt):
            return whole[len(prompt) :], True
        history = self._text(messages, chat, passed, opens=False)
        if whole.startswith(history):
            return whole[_common(prompt, whole) :], False
        # What is before the reply is written otherwise too: some templates drop its reasoning, or
        # count messages from the last.
        names = [name for name in ("reasoning_content", "content") if reply.get(name)]
        _, begin, _ = self._around(messages, reply, (), chat, passed, names=names or ["content"])
        _, _, after = self._around(messages[:-1], messages[-1], (reply,), chat, passed)
        opening = prompt[len(history) :] if prompt.startswith(history) else ""
        at = whole.find(opening, len(whole) - after, begin) if opening else -1
        return whole[begin if at < 0 else at + len(opening) :], at >= 0

    def _around(
        self,
        before: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        after: Sequence[Mapping[str, Any]],
        chat: Chat,
        passed: Mapping[str, Any],
        *,
        names: Sequence[str] = ("content",),
        opens: bool = False,
    ) -> tuple[str, int, int]:
        """A text with a message, and how many characters at each end its fields do not change."""
        one, other = (
            self._text(
                [*before, {**message, **dict.fromkeys(names, text)}, *after],
                chat,
                passed,
                opens=opens,
            )
            for text in ("A", "B")
        )
        return one, _common(one, other), _common(one[::-1], other[::-1])

    def _until_end(self, text: str) -> str:
        """With the end mark, which is sampled; without what the template writes after it."""
        end = self.tokenizer.eos_token
        if not end or end not in text:
            return text
        return text[: text.index(end) + len(end)]

    def _marks(self) -> tuple[str, str]:
        if self.tagger is not None:
            for pair in self.tagger.format.pairs:
                if pair.kind == "reasoning":
                    return str(pair.open), str(pair.close)
        return _MARKS


def _spelled(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """With the reasoning under all names that templates read, and arguments of calls in one form.

    Args:
        message: In OpenAI form.
        as_text: Whether arguments become JSON text, else what the text says.
    """
    found = {name: value for name, value in message.items() if name != SAMPLED_IDS}
    if reasoning := message.get("reasoning_content"):
        found |= {"reasoning": reasoning, "thinking": reasoning}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call, as_text=as_text) for call in calls]
    return found


def _call(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    function = call["function"]
    given = function.get("arguments", {})
    if as_text and not isinstance(given, str):
        given = json.dumps(given, ensure_ascii=False)
    elif not as_text and isinstance(given, str):
        with contextlib.suppress(ValueError):
            given = json.loads(given)
    return {**call, "function": {**function, "arguments": given}}


def _common(one: str, other: str) -> int:
    """The length of the common beginning."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def _line_of(error: Exception | None) -> int | None:
    """The line of the template that an error names, or was raised at."""
    line = getattr(error, "lineno", None)
    if line is None and error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        # As jinja2 calls a template that has no file.
        lines = [one.lineno for one in frames if one.filename in {"<template>", "<unknown>"}]
        line = lines[-1] if lines else None
    return line
