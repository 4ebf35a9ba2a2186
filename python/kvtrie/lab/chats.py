"""Conversations as clients send them: for each request the messages, and the reply to it.

The built-in ones differ in what the client changes between requests. Their text is English, made
from a seed, and the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from kvtrie.calibrate import texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvtrie.demo.conversations import Conversation

Message = dict[str, Any]

_MOST_PLACES: Final = 64
CLEARED: Final = "[Old tool result cleared]"
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "read_note",
        "description": "Read the note about a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Name of the place."}},
            "required": ["place"],
        },
    },
}
_SYSTEM: Final = (
    "You answer questions about places. Use the notes that you are given, say where an answer "
    "comes from, and say so if the notes do not have it."
)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request of a client, and the reply that it gets.

    Attributes:
        messages: In OpenAI form; reasoning of replies is in ``reasoning_content``.
        reply: The assistant message that the model generates. Its ``token_ids``, if any, are what
            the model sampled.
        arguments: What is passed to the template with this request alone. ``tools`` replaces the
            conversation's.
    """

    messages: tuple[Message, ...]
    reply: Message
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation.

    Attributes:
        name: For tables.
        requests: In order.
        tools: The declared tools, in OpenAI form.
        about: What the client does, in a sentence.
    """

    name: str
    requests: tuple[ClientRequest, ...]
    tools: tuple[dict[str, Any], ...] = ()
    about: str = ""


def from_conversation(conversation: Conversation, name: str) -> Chat:
    """A conversation of a chat file, sent by a client that only appends.

    Each assistant message is the reply to those before it. A question without a recorded reply at
    the end gets an empty one, so that its prompt is measured too.

    Args:
        conversation: As ``kvtrie.demo.conversations`` reads it.
        name: For tables.
    """
    requests: list[ClientRequest] = []
    messages = conversation.messages
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and at:
            requests.append(ClientRequest(messages[:at], message))
    if messages[-1]["role"] != "assistant":
        requests.append(ClientRequest(messages, {"role": "assistant", "content": ""}))
    return Chat(name, tuple(requests), conversation.tools, f"line {conversation.line} of the file")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


@dataclass
class _Writer:
    """Texts of one conversation."""

    random: Random
    places: Iterator[texts.Place]
    history: list[Message] = field(default_factory=list)
    requests: list[ClientRequest] = field(default_factory=list)

    def place(self) -> texts.Place:
        return next(self.places)

    def reasoning(self) -> str:
        return texts.musing(self.random, 5)

    def ask(self, reply: Message, *, messages: list[Message] | None = None) -> None:
        """Send the history, or other messages, and add the reply to the history."""
        self.requests.append(ClientRequest(tuple(messages or self.history), reply))
        self.history.append(reply)

    def say(self, text: str, *, is_reasoning: bool = False, **more: Any) -> Message:  # noqa: ANN401 - of a message
        reasoning = {"reasoning_content": self.reasoning()} if is_reasoning else {}
        return {"role": "assistant", "content": text, **reasoning, **more}

    def loop(self, steps: int) -> None:
        """A user turn of an agent: calls with their results, then an answer."""
        self.history.append(_user("Compare what the notes say about the oldest places."))
        place = self.place()
        for _ in range(steps):
            place = self.place()
            call_id = f"call{len(self.history):05d}"
            call = {
                "id": call_id,
                "type": "function",
                "function": {"name": "read_note", "arguments": {"place": place.name}},
            }
            self.ask(self.say("", is_reasoning=True, tool_calls=[call]))
            result = {"role": "tool", "name": "read_note", "tool_call_id": call_id}
            self.history.append({**result, "content": place.note})
        self.ask(self.say(place.answer, is_reasoning=True))


def _plain(to: _Writer) -> None:
    _turns(to, is_reasoning=False)


def _reasoning(to: _Writer) -> None:
    _turns(to, is_reasoning=True)


def _turns(to: _Writer, *, is_reasoning: bool) -> None:
    to.history.append({"role": "system", "content": _SYSTEM})
    for _ in range(4):
        place = to.place()
        to.history.append(_user(f"{place.note} {place.question(to.random)}"))
        to.ask(to.say(place.answer, is_reasoning=is_reasoning))


def _agent(to: _Writer) -> None:
    to.history.append({"role": "system", "content": _SYSTEM})
    for _ in range(3):
        to.loop(3)


def _pruned(to: _Writer) -> None:
    to.history.append({"role": "system", "content": _SYSTEM})
    for _ in range(3):
        to.loop(3)
        results = [at for at, one in enumerate(to.history) if one["role"] == "tool"]
        for at in results[:-1]:
            to.history[at] = {**to.history[at], "content": CLEARED}


def _retrieval(to: _Writer) -> None:
    documents = [to.place() for _ in range(6)]
    for _ in range(4):
        to.random.shuffle(documents)
        found = "\n\n".join(one.note for one in documents[:4])
        system = {"role": "system", "content": f"{_SYSTEM}\n\nDocuments:\n\n{found}"}
        to.history[:1] = [system]
        to.history.append(_user(documents[0].question(to.random)))
        to.ask(to.say(documents[0].answer))


def _date(to: _Writer) -> None:
    for turn in range(4):
        clock = f"It is 2026-11-22, 10:{7 * turn:02d}."
        to.history[:1] = [{"role": "system", "content": f"{clock} {_SYSTEM}"}]
        place = to.place()
        to.history.append(_user(f"{place.note} {place.question(to.random)}"))
        to.ask(to.say(place.answer))


def _date_last(to: _Writer) -> None:
    to.history.append({"role": "system", "content": _SYSTEM})
    for turn in range(4):
        clock = f"It is 2026-11-22, 10:{7 * turn:02d}."
        place = to.place()
        to.history.append(_user(f"{place.note} {place.question(to.random)} {clock}"))
        to.ask(to.say(place.answer))


_WRITERS: Final[dict[str, tuple[Callable[[_Writer], None], bool, str]]] = {
    "chat": (_plain, False, "questions and answers; the client only appends"),
    "reasoning": (_reasoning, False, "each reply has reasoning"),
    "agent": (_agent, True, "three tool calls a turn, with reasoning between them"),
    "pruned": (_pruned, True, "as agent, and old results are cleared at each turn"),
    "retrieval": (_retrieval, False, "documents in the system prompt, in another order each turn"),
    "date": (_date, False, "the time is the first thing in the system prompt"),
    "date last": (_date_last, False, "the time is the last thing in the question"),
}


def _written(name: str, seed: int = 0) -> Chat:
    write, has_tools, about = _WRITERS[name]
    random = Random(f"{name} {seed}")
    to = _Writer(random, iter(texts.places(random, _MOST_PLACES)))
    write(to)
    return Chat(name, tuple(to.requests), (_TOOL,) if has_tools else (), about)


BUILT_IN: Final = {name: _written(name) for name in _WRITERS}
"""The built-in conversations by name."""
