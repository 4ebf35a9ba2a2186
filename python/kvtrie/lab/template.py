"""A tokenizer with its chat template: prompts, what a model would answer, and the switches.

What the model samples is the text that the template writes for the reply, up to its end mark, or
the same with the reasoning written by hand where the template leaves it out at once.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError as JinjaError
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtrie.tags import Tagger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.lab.chats import Chat, ClientRequest

# What every client or library passes.
_GIVEN: Final = frozenset(
    "messages tools documents add_generation_prompt continue_final_message bos_token eos_token "
    "pad_token unk_token sep_token cls_token mask_token additional_special_tokens "
    "raise_exception strftime_now namespace range dict lipsum cycler joiner loop".split()
)
_MOST_SWITCHES: Final = 4
_MARKS: Final = ("<think>", "</think>")


class TemplateError(ValueError):
    """A template is missing, or cannot render a conversation."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One request as token ids.

    Attributes:
        prompt: Its text.
        ids: The prompt's ids.
        sampled: Ids that the model samples for the reply; the KV of the last is never computed.
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
            TemplateError: The template refuses it, with the template's words.
        """
        prompt = self._text(request.messages, chat, opens=True)
        whole = self._text([*request.messages, request.reply], chat, opens=False)
        text = self._sampled(prompt, whole, request.reply)
        return Rendered(prompt, self.encode(prompt), self.encode(text), text)

    def encode(self, text: str) -> list[int]:
        """A text's ids, without special tokens of the tokenizer's own."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: NDArray[np.uint32]) -> str:
        """The text of ids."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def switches(self, chats: Sequence[Chat]) -> Iterator[dict[str, Any]]:
        """Arguments that change what the template makes of conversations, one at a time.

        They are the names that the template reads and no library passes, each with True and with
        False, if that changes a prompt or leaves a reply other than by default. At most
        ``4`` names, in alphabetical order.
        """
        default = self._outcome(chats, {})
        found = 0
        for name in sorted(self._names() - _GIVEN - set(self.arguments)):
            tried = [{name: True}, {name: False}]
            some = [one for one in tried if self._outcome(chats, one) != default]
            yield from some
            found += bool(some)
            if found == _MOST_SWITCHES:
                return

    def _names(self) -> set[str]:
        text = self.tokenizer.chat_template
        texts = list(text.values()) if isinstance(text, dict) else [text]
        found: set[str] = set()
        for one in texts:
            try:
                found |= meta.find_undeclared_variables(_environment().parse(one))
            except JinjaError:
                continue
        return found

    def _outcome(self, chats: Sequence[Chat], switch: dict[str, Any]) -> list[str]:
        """The last prompt of each conversation, or why there is none."""
        found = []
        for chat in chats:
            try:
                found.append(self._text(chat.requests[-1].messages, chat, switch, opens=True))
            except TemplateError as error:
                found.append(str(error))
        return found

    def _text(
        self,
        messages: Sequence[Any],
        chat: Chat,
        switch: Mapping[str, Any] | None = None,
        *,
        opens: bool,
    ) -> str:
        reason: Exception | None = None
        # Templates want the arguments of a call as an object or as JSON text.
        for as_text in (False, True):
            try:
                text = self.tokenizer.apply_chat_template(
                    [_spelled(one, as_text=as_text) for one in messages],
                    tools=list(chat.tools) or None,
                    tokenize=False,
                    add_generation_prompt=opens,
                    **{**self.arguments, **(switch or {})},
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

    def _sampled(self, prompt: str, whole: str, reply: Mapping[str, Any]) -> str:
        reasoning = str(reply.get("reasoning_content") or "")
        if whole.startswith(prompt) and reasoning in whole[len(prompt) :]:
            return self._until_end(whole[len(prompt) :])
        # The template writes the reply of an earlier turn otherwise than it is sampled.
        written = whole[_common(prompt, whole) :]
        content = str(reply.get("content") or "")
        if not reasoning:
            return self._until_end(written if content in written else content)
        opened, closed = self._marks()
        is_open = prompt.rstrip().endswith(opened)
        before = "" if is_open else f"{opened}\n"
        answer = written[written.index(content) :] if content and content in written else written
        answer = answer.removeprefix(opened).lstrip("\n").removeprefix(closed).lstrip("\n")
        return self._until_end(f"{before}{reasoning}\n{closed}\n\n{answer}")

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


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )


def _spelled(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """With the reasoning under all names that templates read, and arguments of calls in one form.

    Args:
        message: In OpenAI form.
        as_text: Whether arguments become JSON text, else what the text says.
    """
    found = dict(message)
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
