"""Follows one request while it grows: its spans, the open span, the state of its turn.

A journal of states by position lets `truncate` undo exactly the removed tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from kvtrie._core import Span
from kvtrie.tags.formats import KIND_OF_ROLE, ROLES
from kvtrie.tags.ids import as_position, as_tokens
from kvtrie.tags.reader import MessageReader
from kvtrie.tags.sections import Section, Turn
from kvtrie.tags.state import ANSWERED, BODY, State

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex

    import numpy as np
    import numpy.typing as npt

    from kvtrie.tags.formats import Role, SectionKind
    from kvtrie.tags.grammar import Grammar
    from kvtrie.tags.sections import TurnState

_INPUTS: Final = ("user", "tool_result")
_BEGIN: Final = State()


class Stream:
    """The spans of one request, kept up to date while it grows. Made by `Tagger.stream`.

    The spans depend on the tokens alone, not on the portions in which they are fed or on what was
    rolled back. A stream belongs to one request and one thread.

    Args:
        tagger: The compiled format.
        start: The position of the first token that will be fed.
        role: The author of the message with the first token; None: the format's `initial`.

    Example:
        >>> from kvtrie import tags
        >>> tagger = tags.Tagger.from_ids(reasoning=(7, 8), end=9, initial="assistant")
        >>> stream = tagger.stream()
        >>> stream.feed([7, 1, 2]), stream.open
        ([], Span(0, 3, 'reasoning'))
        >>> stream.feed([3, 8, 4, 5, 9])
        [Span(0, 5, 'reasoning'), Span(5, 7, 'answer')]
    """

    __slots__ = (
        "_base",
        "_journal",
        "_length",
        "_reader",
        "_state",
        "_tagger",
        "_view",
        "num_steps",
    )

    def __init__(self, tagger: Grammar, start: int = 0, role: Role | None = None) -> None:
        start = as_position(start, "stream: start")
        if start < 0:
            msg = f"stream: start is {start}, below 0"
            raise ValueError(msg)
        if role is not None and role not in ROLES:
            msg = f"stream: role is {role!r}, not one of {', '.join(ROLES)}"
            raise ValueError(msg)
        self._tagger = tagger
        self._base = start
        self._length = start
        self._reader = MessageReader(tagger)
        self._journal: list[tuple[int, State]] = []
        self._view: tuple[State, list[Section], list[tuple[int, int, int, int]]] | None = None
        self.num_steps: int = 0
        """Tokens that were processed so far; the others were skipped."""
        state = State(start=start, body=start, turn=start) if start else _BEGIN
        role = tagger.format.initial if role is None else role
        self._state = state if role is None else self._reader.speak(state, role, start)

    def __len__(self) -> int:
        """One past the position of the last token read."""
        return self._length

    def __repr__(self) -> str:
        return (
            f"Stream({self._tagger.format.name!r}, length={self._length}, "
            f"sections={self._now().num_sections})"
        )

    @property
    def tagger(self) -> Grammar:
        """The `Tagger` that made the stream."""
        return self._tagger

    @property
    def sections(self) -> tuple[Section, ...]:
        """All sections that have ended, in that order."""
        return tuple(self._listed())

    @property
    def spans(self) -> list[Span]:
        """The spans of `sections`."""
        return [section.span for section in self._listed()]

    @property
    def open(self) -> Span | None:
        """The innermost open span, up to the last token read."""
        state = self._state
        if self._view is not None or state.phase != BODY or state.role is None:
            return None
        kind: SectionKind
        if state.role != "assistant":
            kind = KIND_OF_ROLE["tool" if state.wrap else state.role]
            return Span(state.start, self._length, kind)
        if state.kind is not None:
            begun = state.body if state.kind == "answer" else state.start
            return Span(begun, self._length, state.kind)
        if state.stack:
            return Span(state.stack[-1].start, self._length, state.stack[-1].pair.kind)
        return Span(state.answer, self._length, "answer") if state.answer >= 0 else None

    @property
    def is_in_message(self) -> bool:
        """Whether the last token is in the text of a message, or the header right before it."""
        return self._view is None and self._state.phase == BODY and self._state.role is not None

    @property
    def moved_end(self) -> int | None:
        """Where the last message of a user or a tool begins; None if there is none.

        A plan of these tokens takes it as its `moved_end`: moved runs supply neither this message
        nor what the template writes after it.
        """
        under_way = self.open
        if under_way is not None and under_way.kind in _INPUTS:
            return under_way.start
        # No message is inside another one, so the last to end is the last to begin.
        for section in reversed(self._listed()):
            if section.kind in _INPUTS:
                return section.span.start
        return None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, the current one last."""
        state, sections = self._now(), self._listed()
        ranges = self._reader.turns if self._view is None else self._reader.turns + self._view[2]
        found = [
            Turn(start, end, "closed", tuple(sections[first:last]))
            for start, end, first, last in ranges[: state.num_turns]
        ]
        if self._length > state.turn:
            current: TurnState = "answered" if state.progress == ANSWERED else "open"
            tail = tuple(sections[state.turn_sections :])
            found.append(Turn(state.turn, self._length, current, tail))
        return tuple(found)

    def feed(
        self, ids: Sequence[int] | npt.NDArray[np.integer], *, final: bool = False
    ) -> list[Span]:
        """Read the next tokens.

        Args:
            ids: Any number of token ids, of the prompt or generated.
            final: None of the tokens read so far will be removed, as after `confirm`.

        Returns:
            The spans that have ended. Reasoning that takes following newlines with it ends at the
            first other token.

        Raises:
            TypeError: The ids are not integers.
            ValueError: An id does not fit u32. Nothing was read.
        """
        tokens = as_tokens(ids, "feed")
        self._view = None
        state, position, count = self._state, self._length, len(tokens)
        before = state.num_sections
        stops: list[int] | None = None
        at = 0
        while at < count:
            if state.is_idle:
                if stops is None:
                    stops = self._tagger.automaton.candidates(tokens)
                found = bisect_left(stops, at)
                if found == len(stops):
                    break
                at = stops[found]
            after = self._reader.step(state, int(tokens[at]), position + at)
            if after != state:
                if not final:
                    self._journal.append((position + at, state))
                self._state = state = after
            self.num_steps += 1
            at += 1
        self._length = position + count
        if final:
            self._journal.clear()
            self._base = self._length
        return [section.span for section in self._reader.sections[before:]]

    def truncate(self, length: SupportsIndex) -> None:
        """Remove every token from `length` on, as if it had never been fed.

        Args:
            length: The position of the first token to remove.

        Raises:
            TypeError: `length` is not an int.
            ValueError: `length` is out of range. Nothing was removed.
        """
        self._length = self._within(length, "truncate")
        self._view = None
        while self._journal and self._journal[-1][0] >= self._length:
            self._state = self._journal.pop()[1]
        self._reader.rewind(self._state)

    def confirm(self, length: SupportsIndex) -> None:
        """Promise that no token before `length` will be removed, and free the records for them.

        `truncate` needs one for every token that began or ended something.

        Args:
            length: The position of the first token that may still be removed.

        Raises:
            TypeError: `length` is not an int.
            ValueError: There are fewer tokens, or more are confirmed already.
        """
        self._base = self._within(length, "confirm")
        del self._journal[: bisect_left(self._journal, self._base, key=itemgetter(0))]

    def _within(self, position: SupportsIndex, call: str) -> int:
        length = as_position(position, f"{call}: length")
        if not self._base <= length <= self._length:
            msg = f"{call}: length is {length}; it must be in [{self._base}, {self._length}]"
            raise ValueError(msg)
        return length

    def finish(self, *, complete: bool = True) -> list[Span]:
        """End the last message, because generation has ended; returns the spans still open.

        A message that ends inside reasoning is no answer, so its turn stays open. Feeding more
        tokens undoes `finish`: the next request of a tool loop continues the stream.

        Args:
            complete: The model stopped by itself. If False, a limit or an abort cut it off, and the
                same prompt may come again.
        """
        state, reader = self._state, self._reader
        after = reader.finish(state, self._length, complete=complete)
        self._view = (after, reader.sections[state.num_sections :], reader.turns[state.num_turns :])
        reader.rewind(state)
        return [section.span for section in self._view[1]]

    @property
    def is_finished(self) -> bool:
        """Whether `finish` was called after the last token."""
        return self._view is not None

    def _now(self) -> State:
        return self._state if self._view is None else self._view[0]

    def _listed(self) -> list[Section]:
        if self._view is not None:
            return self._reader.sections + self._view[1]
        growing = self._state.growing
        sections = self._reader.sections
        return sections if growing is None else [*sections, growing]


def read_whole(grammar: Grammar, ids: Sequence[int] | npt.NDArray[np.integer]) -> Stream:
    """A stream that has read a whole sequence; the last message has ended."""
    stream = Stream(grammar)
    stream.feed(ids)
    stream.finish()
    return stream
