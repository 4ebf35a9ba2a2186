"""Splits conversations into replies, each with its prompt by the chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtrie.tags.openings import LastMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from kvtrie.calibrate.edits import EditedPrompt

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"
_SYSTEM_FIRST: Final = [{"role": "system", "content": "Hello."}, {"role": "user", "content": "Hi."}]

Messages = list[dict[str, Any]]


class CalibrationError(ValueError):
    """The input cannot be measured; the text is one sentence."""


class NothingMovesError(CalibrationError):
    """No prompt of the recorded conversations moves KV, so nothing was measured."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which part of a conversation is replayed and measured.

    Attributes:
        name: The name in reports.
        least_edits: Replies are measured once this many earlier reasoning spans have been dropped.
        most_edits: They are measured up to this many dropped spans; None: no limit.
        window: Exchanges (a user message and what follows) kept after the system prompt. With a
            window, replies are measured once the oldest exchange has been dropped.
    """

    name: str
    least_edits: int = 1
    most_edits: int | None = None
    window: int | None = None


RECORDED: Final = Scenario("recorded", least_edits=0)
"""Of recorded conversations, every reply to a prompt that moves KV is measured."""

SCENARIOS: Final = (
    Scenario("one turn", most_edits=1),
    Scenario("five turns", most_edits=5),
    Scenario("window of ten", window=10),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One prompt and its reply.

    The given reply starts with its reasoning and ends with the end-of-sequence id; it is empty if
    there is none. If `is_scored`, only its exact answer counts as right. If `is_measured`, the
    model's reply to the prompt is measured. Nothing moves into the last message, which begins at
    `moved_end`.
    """

    prompt: list[int]
    reply: list[int]
    answer_start: int
    is_scored: bool
    is_measured: bool
    moved_end: int | None = None
    conversation: int = 0


class Renderer:
    """A fast tokenizer with a chat template; any other raises `CalibrationError`.

    ``arguments``: what the server gives to the template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
    ) -> None:
        if not tokenizer.is_fast:
            msg = "the tokenizer is not a fast one, so its tokens cannot be found in the text"
            raise CalibrationError(msg)
        if tokenizer.chat_template is None:
            msg = (
                "the tokenizer has no chat template, so it cannot take messages: put the one that "
                "you serve with into the model directory, as chat_template.jinja"
            )
            raise CalibrationError(msg)
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        own = signature(tokenizer.apply_chat_template).parameters.keys() & self._arguments.keys()
        if own:
            msg = f"the arguments of the chat template cannot have {', '.join(sorted(own))}"
            raise CalibrationError(msg)
        self._last_message = LastMessage(tokenizer, **self._arguments)
        self._takes_system = not self._refuses(_SYSTEM_FIRST) or self._refuses(_SYSTEM_FIRST[1:])

    def steps(
        self,
        messages: Sequence[Mapping[str, Any]],
        scenario: Scenario,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Step]:
        """Split a conversation into its replies, up to the last measured one.

        An assistant message that follows a user or tool message and calls no tool is a reply. It is
        scored if it has ``"scored": true``. Reasoning is ``reasoning_content`` or between think
        marks.

        Raises:
            CalibrationError: The chat template refuses a message, or returns nothing.
        """
        head, exchanges = _exchanges(messages)
        steps: list[Step] = []
        for number, exchange in enumerate(exchanges):
            first = 0 if scenario.window is None else max(0, number + 1 - scenario.window)
            kept: Messages = [*head, *(one for part in exchanges[first:number] for one in part)]
            edits = sum(_has_reasoning(one) for one in kept)
            if scenario.most_edits is not None and edits > scenario.most_edits:
                break
            is_measured = edits >= scenario.least_edits and (scenario.window is None or first > 0)
            for at, message in enumerate(exchange):
                if _is_reply(exchange, at):
                    history = [*kept, *exchange[:at]]
                    steps.append(self._step(history, message, list(tools), is_measured=is_measured))
        while steps and not steps[-1].is_measured:
            steps.pop()
        return steps

    def step(self, prompt: EditedPrompt) -> Step:
        """One prompt of a shipped edit, with its given reply.

        A template that refuses a system message gets its text in the first message of the user.

        Raises:
            CalibrationError: As for `steps`.
        """
        messages = prompt.messages if self._takes_system else _without_system(prompt.messages)
        if prompt.reply is None:
            ids = self._ids(self._text(messages, [], opens=True))
            found = Step(ids, [], 0, False, prompt.is_measured, self._moved_end(ids))
        else:
            message = {"role": "assistant", "content": prompt.reply}
            found = self._step(messages, message, [], is_measured=prompt.is_measured)
        return replace(found, conversation=prompt.conversation)

    def _step(
        self, history: Messages, message: dict[str, Any], tools: list[Any], *, is_measured: bool
    ) -> Step:
        is_scored = message.get("scored", False)
        if not isinstance(is_scored, bool):
            msg = f'a reply\'s "scored" is {is_scored!r:.40}; it must be true or false'
            raise CalibrationError(msg)
        prompt = self._text(history, tools, opens=True)
        reply = self._reply(prompt, history, message, tools)
        encoded = self._tokenizer(reply, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = list(encoded["input_ids"])
        starts = [int(start) for start, _ in encoded["offset_mapping"]]
        if not ids:
            msg = "a reply has no tokens"
            raise CalibrationError(msg)
        mark = reply.rfind(_CLOSE)
        at = 0 if mark < 0 else mark + len(_CLOSE)
        while at < len(reply) and reply[at].isspace():
            at += 1
        asked = self._ids(prompt)
        return Step(
            prompt=asked,
            reply=ids,
            answer_start=next((n for n, start in enumerate(starts) if start >= at), 0),
            is_scored=is_scored,
            is_measured=is_measured,
            moved_end=self._moved_end(asked),
        )

    def _moved_end(self, prompt: list[int]) -> int | None:
        """Where its last message begins, as engines find it: None where they do not."""
        return self._last_message(np.array(prompt, dtype=np.int64))

    def _reply(
        self, prompt: str, history: Messages, message: dict[str, Any], tools: list[Any]
    ) -> str:
        whole = self._text([*history, message], tools, opens=False)
        end = self._tokenizer.eos_token
        eos = end if isinstance(end, str) else ""
        if whole.startswith(prompt) and (_CLOSE in whole[len(prompt) :]) == _has_reasoning(message):
            text = whole[len(prompt) :]
            # The template adds text after the end of the reply.
            return text[: text.rfind(eos) + len(eos)] if eos and eos in text else text
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        text = str(message["content"])
        if reasoning:
            text = f"{_OPEN}\n{str(reasoning).strip()}\n{_CLOSE}\n\n{text}"
        if prompt.rstrip().endswith(_OPEN):
            text = text.lstrip().removeprefix(_OPEN).removeprefix("\n")
        return text + eos

    def _text(self, messages: Messages, tools: list[Any], *, opens: bool) -> str:
        shown = [{k: v for k, v in one.items() if k != "scored"} for one in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                shown,
                tools=tools or None,
                add_generation_prompt=opens,
                tokenize=False,
                **self._arguments,
            )
        except Exception as error:
            # Templates may raise any error, including jinja2's.
            msg = (
                f"the chat template refuses the conversation: {error}; remove what it refuses, "
                "or name the template that is served, --chat-template"
            )
            raise CalibrationError(msg) from error
        return str(text)

    def _refuses(self, messages: Messages) -> bool:
        try:
            self._text(messages, [], opens=True)
        except CalibrationError:
            return True
        return False

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _without_system(messages: Messages) -> Messages:
    first, *rest = messages
    if first["role"] != "system" or not rest:
        return messages
    text = f"{first['content']}\n\n{rest[0]['content']}"
    return [{**rest[0], "content": text}, *rest[1:]]


def _exchanges(messages: Sequence[Mapping[str, Any]]) -> tuple[Messages, list[Messages]]:
    head: Messages = []
    exchanges: list[Messages] = []
    for message in messages:
        if message["role"] == "user":
            exchanges.append([])
        (exchanges[-1] if exchanges else head).append(dict(message))
    return head, exchanges


def _is_reply(exchange: Messages, at: int) -> bool:
    message = exchange[at]
    return (
        message["role"] == "assistant"
        and not message.get("tool_calls")
        and at > 0
        and exchange[at - 1]["role"] in {"user", "tool"}
    )


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    if message["role"] != "assistant":
        return False
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return bool(reasoning) or _CLOSE in str(message.get("content") or "")


def count_measured(steps: Sequence[Step]) -> tuple[int, int]:
    """The number of measured replies, and of scored ones among them."""
    measured = [step for step in steps if step.is_measured]
    return len(measured), sum(step.is_scored for step in measured)


def built_in(num_questions: int, scenario: Scenario, first_seed: int) -> Iterator[Messages]:
    """Conversations of the recall task, enough for this many questions in the scenario."""
    from kvtrie.calibrate import recall  # noqa: PLC0415 - only on request

    window = scenario.window or 10
    if scenario.window is not None:
        exchanges, each = 3 * window, window
    elif scenario.most_edits is not None:
        exchanges, each = 2 * scenario.most_edits, scenario.most_edits
    else:
        exchanges, each = 2 * window, window
    for number in range(-(-num_questions // each)):
        yield recall.conversation(first_seed + number, exchanges, window)
