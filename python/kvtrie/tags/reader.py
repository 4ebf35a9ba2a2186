"""How one token changes the state of a stream: delimiters, messages, sections, turns.

Text inside an open section is skipped (`State.is_idle`); any other token costs one transition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie._core import Span
from kvtrie.tags.automaton import contains
from kvtrie.tags.formats import KIND_OF_ROLE
from kvtrie.tags.sections import Section
from kvtrie.tags.state import (
    ANSWERED,
    BETWEEN,
    BODY,
    HEADER,
    HEADER_LIMIT,
    QUIET,
    UNWRAPPED,
    WORKING,
    WRAPPED,
    Open,
    State,
)

if TYPE_CHECKING:
    from kvtrie.tags.formats import MessageStart, Pair, Role
    from kvtrie.tags.grammar import Grammar


class MessageReader:
    """Reads tokens by one format, and lists the sections and turns that end.

    Every call takes a state and returns the next one. The lists only grow between calls of
    `rewind`; a state has their lengths.
    """

    __slots__ = ("_grammar", "sections", "turns")

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.sections: list[Section] = []
        """Sections that have ended, in the order of their ends."""
        self.turns: list[tuple[int, int, int, int]] = []
        """Per closed turn: start, end, first section, one past the last section."""

    def step(self, state: State, token: int, position: int) -> State:
        """The state after one more token."""
        automaton = self._grammar.automaton
        node = automaton.step(state.node, token)
        delimiter = automaton.outputs.get(node)
        after: State | None = None
        if delimiter is not None:
            after = self._delimiter(
                state, delimiter, position + 1 - automaton.widths[node], position + 1
            )
            node = 0
        if after is None:
            after = self._text(state, token, position)
        return after if after.node == node else after._replace(node=node)

    def finish(self, state: State, position: int, *, complete: bool) -> State:
        """The state after the open message ended at the last token."""
        after = self._settle(state)
        if after.phase == BODY:
            after = self._end_message(after, position, position)
            if state.role == "assistant" and (state.stack or not complete):
                after = after._replace(progress=state.progress)
        return after

    def rewind(self, state: State) -> None:
        """Drop list entries added after a state."""
        del self.sections[state.num_sections :]
        del self.turns[state.num_turns :]

    # --- text -------------------------------------------------------------------------------------

    def _text(self, state: State, token: int, position: int) -> State:
        if state.phase == HEADER:
            return self._header_token(state, token, position)
        if token in self._grammar.newlines:
            section = state.growing
            if section is None:
                return state
            span = Span(section.span.start, position + 1, section.span.kind)
            dropped = (section.dropped[0], position + 1)
            return state._replace(growing=Section(span, section.body, dropped))
        state = self._settle(state)
        if state.phase == BETWEEN:
            return state
        first = position if state.first < 0 else state.first
        wrap = WRAPPED if state.wrap == UNWRAPPED else state.wrap
        answer = state.answer
        if answer < 0 and state.role == "assistant" and state.kind is None and not state.stack:
            answer = position
        return state._replace(first=first, wrap=wrap, answer=answer)

    def _header_token(self, state: State, token: int, position: int) -> State:
        begin = state.begin
        if begin is None or begin.header_end is not None:
            if len(state.header) == HEADER_LIMIT:
                return state
            return state._replace(header=(*state.header, token))
        header = (*state.header, token)
        names = self._grammar.names[begin.delimiter]
        if header in names:
            role = names[header]
            if role is None:
                return state._replace(header=header)
            return self.speak(state, role, position + 1)
        return self._text(self.speak(state, begin.role, state.header_start), token, position)

    # --- delimiters -------------------------------------------------------------------------------

    def _delimiter(self, state: State, delimiter: str, start: int, end: int) -> State | None:
        """The state after a delimiter; None if it counts as text here."""
        grammar = self._grammar
        if (begin := grammar.starts.get(delimiter)) is not None:
            return self._begin_message(state, begin, start, end)
        if delimiter in grammar.ends:
            if state.phase == BODY:
                return self._end_message(state, start, end)
            return state._replace(phase=BETWEEN, role=None, begin=None)
        if state.phase == HEADER:
            return self._header_delimiter(state, delimiter, start, end)
        if state.phase == BETWEEN:
            return None
        if (pair := grammar.opens.get(delimiter)) is not None:
            return self._begin_section(state, pair, start, end)
        if (pair := grammar.closes.get(delimiter)) is not None:
            return self._end_section(state, pair, start, end)
        if state.begin is not None and delimiter == state.begin.end:
            then = state.begin.then
            state = self._end_message(state, start, end)
            if then is None:
                return state
            return self.speak(state._replace(start=end, begin=None), then, end)
        if state.role == "user" and grammar.format.wrapped is not None:
            opening, closing = grammar.format.wrapped
            if delimiter == opening and (state.first in {-1, start} or state.wrap == UNWRAPPED):
                first = start if state.first < 0 else state.first
                return state._replace(wrap=WRAPPED, first=first)
            if delimiter == closing and state.wrap:
                return state._replace(wrap=UNWRAPPED)
        return None

    def _header_delimiter(self, state: State, delimiter: str, start: int, end: int) -> State | None:
        begin, channels = state.begin, self._grammar.format.channels
        if channels is not None and delimiter == channels.delimiter:
            at = start - state.header_start
            return state._replace(
                channel=(at, at + end - start), header=self._header_until(state, end)
            )
        if begin is None or delimiter != begin.header_end:
            return None
        header = self._header_until(state, start)
        if state.channel is None:
            speaker, channel = header, None
        else:
            speaker, channel = header[: state.channel[0]], header[state.channel[1] :]
        return self._speak_as(state, begin, speaker, channel, end)

    def _header_until(self, state: State, position: int) -> tuple[int, ...]:
        """The header's tokens up to a position; -1 for a last token not known yet."""
        width = position - state.header_start
        header = state.header[:width]
        if len(header) < min(width, HEADER_LIMIT):
            header = (*header, -1)
        return header

    def _speak_as(
        self,
        state: State,
        begin: MessageStart,
        speaker: tuple[int, ...],
        channel: tuple[int, ...] | None,
        body: int,
    ) -> State:
        grammar = self._grammar
        role = begin.role
        for name, named in grammar.names[begin.delimiter].items():
            rest = speaker[len(name) :]
            if (
                named is not None
                and speaker[: len(name)] == name
                and (not rest or any(rest[: len(to)] == to for to in grammar.recipients))
            ):
                role = named
        state = self.speak(state, role, body)
        if role != "assistant" or grammar.format.channels is None:
            return state
        if any(contains(speaker + (channel or ()), to) for to in grammar.recipients):
            return state._replace(kind="tool_call")
        for name, kind, final in grammar.channels:
            if channel is not None and channel[: len(name)] == name:
                return state._replace(kind=kind, final=final)
        return state._replace(kind="answer")

    # --- messages ---------------------------------------------------------------------------------

    def _begin_message(
        self, state: State, begin: MessageStart, start: int, end: int
    ) -> State | None:
        if begin.text and state.phase != BETWEEN:
            return None
        if state.phase == BODY:
            state = self._end_message(state, start, start)
        state = self._settle(state)
        if begin.names or begin.header_end is not None:
            return state._replace(
                phase=HEADER,
                begin=begin,
                start=start,
                role=None,
                header_start=end,
                header=(),
                channel=None,
            )
        return self._speak(state, begin.role, end, begin, start)

    def speak(self, state: State, role: Role | None, body: int) -> State:
        """Begin the text of a message."""
        return self._speak(state, role, body, state.begin, state.start)

    def _speak(
        self, state: State, role: Role | None, body: int, begin: MessageStart | None, start: int
    ) -> State:
        if self._grammar.format.boundary == "final" and state.progress == ANSWERED:
            state = self._close_turn(state, start)
        progress = state.progress
        if role == "assistant" or (role == "tool" and progress == ANSWERED):
            progress = WORKING
        # Made new, as it has little of the state before: quicker than `_replace`.
        return State(
            node=state.node,
            phase=BODY,
            begin=begin,
            role=role,
            start=start,
            body=body,
            header_start=state.header_start,
            growing=state.growing,
            turn=state.turn,
            turn_sections=state.turn_sections,
            progress=progress,
            num_sections=state.num_sections,
            num_turns=state.num_turns,
        )

    def _end_message(self, state: State, start: int, end: int) -> State:
        state = self._settle(state)
        role: Role | None = "tool" if state.wrap == UNWRAPPED else state.role
        spoken = 0 <= state.first < start
        if role == "assistant":
            state = self._end_assistant(state, start, end, spoken=spoken)
        elif role is not None:
            closes = role == "user" and self._grammar.format.boundary != "final"
            if closes and state.progress != QUIET:
                state = self._close_turn(state, state.start)
            if role == "tool" and state.progress == ANSWERED:
                state = state._replace(progress=WORKING)
            if spoken:
                span = Span(state.start, end, KIND_OF_ROLE[role])
                body, dropped = (state.body, start), (state.start, end)
                state = self._emit(state, Section(span, body, dropped, complete=end > start))
        return state._replace(phase=BETWEEN, role=None, begin=None, stack=(), kind=None, wrap=0)

    def _end_assistant(self, state: State, start: int, end: int, *, spoken: bool) -> State:
        if state.kind is not None:
            body = (state.body, start)
            whole = body if state.kind == "answer" else (state.start, end)
            if spoken or state.kind != "answer":
                section = Section(Span(*whole, state.kind), body, whole, complete=end > start)
                state = self._emit(state, section)
            if state.final and spoken:
                state = state._replace(progress=ANSWERED)
            return state
        # A call that was cut off also counts as a call: there is no answer yet.
        called = state.called or any(section.pair.kind == "tool_call" for section in state.stack)
        state = self._end_answer(state, start)
        while state.stack:
            state = self._pop(state, start, start)
        if spoken and not called:
            state = state._replace(progress=ANSWERED)
        return state

    def _close_turn(self, state: State, at: int) -> State:
        self.turns.append((state.turn, at, state.turn_sections, state.num_sections))
        return state._replace(
            turn=at,
            turn_sections=state.num_sections,
            progress=QUIET,
            num_turns=state.num_turns + 1,
        )

    # --- sections ---------------------------------------------------------------------------------

    def _begin_section(self, state: State, pair: Pair, start: int, end: int) -> State | None:
        if state.role != "assistant" or state.kind is not None:
            return None
        if state.stack:
            top = state.stack[-1]
            if top.pair is pair and pair.nests:
                deeper = top._replace(depth=top.depth + 1)
                return state._replace(stack=(*state.stack[:-1], deeper))
            if top.pair.kind != "reasoning" or pair.kind != "tool_call":
                return None
            if pair.ends_reasoning:
                state = self._pop(state, start, start)
        state = self._end_answer(self._settle(state), start)
        first = start if state.first < 0 else state.first
        return state._replace(first=first, stack=(*state.stack, Open(pair, start, end, 1)))

    def _end_section(self, state: State, pair: Pair, start: int, end: int) -> State | None:
        if state.role != "assistant" or state.kind is not None:
            return None
        if any(section.pair is pair for section in state.stack):
            top = state.stack[-1]
            if top.pair is pair and top.depth > 1:
                shallower = top._replace(depth=top.depth - 1)
                return state._replace(stack=(*state.stack[:-1], shallower))
            while state.stack[-1].pair is not pair:
                state = self._pop(state, start, start)
            return self._pop(state, start, end)
        if pair.kind != "reasoning" or state.stack or state.reasoned:
            return None
        # Without an opening delimiter, the reasoning began with the message's text.
        state = self._settle(state)
        begun = start if state.answer < 0 else state.answer
        first = start if state.first < 0 else state.first
        return self._pop(
            state._replace(first=first, answer=-1, stack=(Open(pair, begun, begun, 1),)),
            start,
            end,
        )

    def _pop(self, state: State, start: int, end: int) -> State:
        """End the innermost section, whose closing delimiter is `start..end`; may be empty."""
        *rest, top = state.stack
        pair, complete = top.pair, end > start
        dropped = {
            "whole": (top.start, end),
            "to_close": (top.start, start),
            "body": (top.body, start),
        }[pair.drops]
        section = Section(
            Span(top.start, end, pair.kind), (top.body, start), dropped, complete, bool(rest)
        )
        state = state._replace(
            stack=tuple(rest),
            reasoned=state.reasoned or pair.kind == "reasoning",
            called=state.called or (pair.kind == "tool_call" and complete),
        )
        grows = pair.kind == "reasoning" and pair.drops == "whole" and complete and not rest
        return state._replace(growing=section) if grows else self._emit(state, section)

    def _end_answer(self, state: State, end: int) -> State:
        if 0 <= state.answer < end and not state.stack:
            span = (state.answer, end)
            state = self._emit(state, Section(Span(*span, "answer"), span, span))
        return state._replace(answer=-1)

    def _settle(self, state: State) -> State:
        if state.growing is None:
            return state
        return self._emit(state._replace(growing=None), state.growing)

    def _emit(self, state: State, section: Section) -> State:
        if section.span.start == section.span.end:
            return state
        self.sections.append(section)
        return state._replace(num_sections=state.num_sections + 1)
