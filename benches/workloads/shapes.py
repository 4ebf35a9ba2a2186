"""How long the parts of a history are.

The counts are tokens of histories that were rendered with real templates and tokenizers, so that
shares of a prompt come out as measured there. Markers of a template are not counted.
"""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True)
class Shape:
    _UNSCALED = ("rounds", "turns", "documents", "extra")

    def scaled(self, factor: float) -> Self:
        changed = {
            field.name: _scaled(getattr(self, field.name), factor)
            for field in fields(self)
            if field.name not in self._UNSCALED
        }
        return replace(self, **changed)


def _scaled(length: int, factor: float) -> int:
    return max(1, round(length * factor)) if length else 0


@dataclass(frozen=True)
class ChatTurn(Shape):
    """System prompt, question, reasoning, answer, and then a new question."""

    system: int = 1_325
    question: int = 140
    reasoning: int = 1_529
    answer: int = 400
    extra: int = 0


@dataclass(frozen=True)
class AgentRun(Shape):
    """A question, rounds of reasoning, tool call and tool result, then the answer."""

    system: int = 2_625
    question: int = 145
    first_reasoning: int = 242
    reasoning: int = 198
    call: int = 33
    result: int = 727
    final_reasoning: int = 305
    answer: int = 305
    rounds: int = 12
    extra: int = 0


@dataclass(frozen=True)
class LongChat(Shape):
    """Many turns of question and answer."""

    system: int = 1_325
    question: int = 140
    answer: int = 300
    turns: int = 20
    extra: int = 0


@dataclass(frozen=True)
class Rag(Shape):
    """Documents and a question about them."""

    document: int = 815
    question: int = 12
    answer: int = 300
    documents: int = 8
    extra: int = 0
