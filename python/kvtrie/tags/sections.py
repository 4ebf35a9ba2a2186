"""What a stream returns: sections of messages, and turns of sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvtrie._core import Span

TurnState = Literal["open", "answered", "closed"]


@dataclass(frozen=True, slots=True)
class Section:
    """A span and its parts.

    Args:
        span: The tokens, delimiters included, and their kind.
        body: The tokens between the delimiters.
        dropped: What the template deletes when it deletes this section; may be empty.
        complete: The closing delimiter was read.
        nested: The section is inside another one.
    """

    span: Span
    body: tuple[int, int]
    dropped: tuple[int, int]
    complete: bool = True
    nested: bool = False

    @property
    def kind(self) -> str:
        """The kind of the tokens."""
        return self.span.kind


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens from the end of one turn to the end of the next.

    Args:
        start: First token.
        end: One past the last token.
        state: `"open"`: the assistant is expected, is generating, or waits for a tool.
            `"answered"`: the answer is complete; the next message of a user closes the turn.
            `"closed"`: the next turn has begun.
        sections: Everything tagged in it, in the order of the ends.
    """

    start: int
    end: int
    state: TurnState
    sections: tuple[Section, ...]

    @property
    def is_finished(self) -> bool:
        """Whether no tool loop is running."""
        return self.state != "open"
