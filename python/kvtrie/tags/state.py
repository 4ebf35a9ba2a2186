"""The state of a stream between two tokens, one immutable value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kvtrie.tags.formats import MessageStart, Pair, Role, SectionKind
    from kvtrie.tags.sections import Section

# Tokens kept: enough for the role, which comes first.
HEADER_LIMIT: Final = 64
# Phase: outside any message, in a header, in the text of a message.
BETWEEN: Final = 0
HEADER: Final = 1
BODY: Final = 2

# The assistant has not spoken, is generating, has answered.
QUIET: Final = 0
WORKING: Final = 1
ANSWERED: Final = 2

# Wrapped tool result: the opening delimiter was read, the closing one was read.
WRAPPED: Final = 1
UNWRAPPED: Final = 2


class Open(NamedTuple):
    """An open section."""

    pair: Pair
    start: int
    body: int
    depth: int


class State(NamedTuple):
    """Everything that later spans can depend on."""

    node: int = 0
    phase: int = BETWEEN
    begin: MessageStart | None = None
    role: Role | None = None
    start: int = 0
    body: int = 0
    # The header: its first position, its first tokens, the range of the channel's delimiter in it.
    header_start: int = 0
    header: tuple[int, ...] = ()
    channel: tuple[int, int] | None = None
    # The kind of the whole message by its header, and whether it ends the turn.
    kind: SectionKind | None = None
    final: bool = False
    # The text: first token that is not a newline, start of the current answer, open sections.
    first: int = -1
    answer: int = -1
    stack: tuple[Open, ...] = ()
    # A closed section that still takes following newlines.
    growing: Section | None = None
    reasoned: bool = False
    called: bool = False
    wrap: int = 0
    # The turn: start, sections before it, progress.
    turn: int = 0
    turn_sections: int = 0
    progress: int = QUIET
    # Lengths of the stream's lists.
    num_sections: int = 0
    num_turns: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether ordinary text cannot change the state."""
        if self.node or self.growing is not None or self.wrap == UNWRAPPED:
            return False
        if self.phase == BODY:
            return self.first >= 0 and (
                self.role != "assistant"
                or self.kind is not None
                or self.answer >= 0
                or bool(self.stack)
            )
        return self.phase == BETWEEN
