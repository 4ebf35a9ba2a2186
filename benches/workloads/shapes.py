"""How long the parts of a history are.

The counts are tokens of histories that were rendered with real templates and tokenizers, so that
shares of a prompt come out as measured there. Markers of a template are not counted.
"""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True)
class Shape:
    """Counts of tokens; those in `_UNSCALED` count something else."""

    _UNSCALED = ("rounds", "turns", "documents", "extra")

    def scaled(self, factor: float) -> Self:
        """The same shape with all texts longer or shorter, none of them empty."""
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
    """System prompt, question, reasoning, answer, and then a new question.

    Args:
        system: Tokens of the system prompt.
        question: Of each user message.
        reasoning: Of the reasoning.
        answer: Of the answer.
        extra: Tokens by which the system prompt is longer, to try every alignment.
    """

    system: int = 1_325
    question: int = 140
    reasoning: int = 1_529
    answer: int = 400
    extra: int = 0


@dataclass(frozen=True)
class AgentRun(Shape):
    """A question, rounds of reasoning, tool call and tool result, then the answer.

    Args:
        system: Tokens of the system prompt with its tools.
        question: Of each user message.
        first_reasoning: Of the reasoning of the first round.
        reasoning: Of that of each round after it.
        call: Of a tool call.
        result: Of a tool result.
        final_reasoning: Of that before the answer.
        answer: Of the answer.
        rounds: How many tools are called.
        extra: As for `ChatTurn`.
    """

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
    """Many turns of question and answer.

    Args:
        system: Tokens of the system prompt.
        question: Of each user message.
        answer: Of each answer.
        turns: How many turns are over.
        extra: As for `ChatTurn`.
    """

    system: int = 1_325
    question: int = 140
    answer: int = 300
    turns: int = 20
    extra: int = 0


@dataclass(frozen=True)
class Rag(Shape):
    """Documents and a question about them.

    Args:
        document: Tokens of each document with its title.
        question: Of the question.
        answer: Of the answer.
        documents: How many documents.
        extra: Tokens of an instruction before the documents.
    """

    document: int = 815
    question: int = 12
    answer: int = 300
    documents: int = 8
    extra: int = 0
