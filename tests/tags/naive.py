"""Spans of a whole sequence, computed naively: cut into messages, then each read by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtrie.tags.formats import KIND_OF_ROLE

if TYPE_CHECKING:
    from kvtrie import tags
    from kvtrie.tags.formats import Format, MessageStart, Pair
    from kvtrie.tags.spellings import Spellings

Found = tuple[int, int, str, tuple[int, int], bool, bool]
"""Start, end, kind, what is dropped, complete, nested."""


@dataclass
class Item:
    name: str | None
    start: int
    end: int


@dataclass
class Message:
    begin: MessageStart | None
    start: int
    body: int
    role: str | None = None
    kind: str | None = None
    final: bool = False
    header: list[Item] | None = None
    items: list[Item] = field(default_factory=list)
    stop: int = -1
    end: int = -1
    closed: bool = True


def items_of(spellings: Spellings, ids: list[int]) -> list[Item]:
    """The leftmost delimiters, those that end first, and the tokens between them."""
    items: list[Item] = []
    fresh = 0
    for end in range(1, len(ids) + 1):
        for name, found in spellings.delimiters.items():
            for spelling in found:
                start = end - len(spelling)
                if start >= fresh and tuple(ids[start:end]) == spelling:
                    items = [item for item in items if item.end <= start]
                    items.append(Item(name, start, end))
                    fresh = end
        if fresh < end:
            items.append(Item(None, end - 1, end))
    return items


class Naive:
    def __init__(self, form: Format, spellings: Spellings) -> None:
        self.form = form
        self.spellings = spellings
        self.starts = {start.delimiter: start for start in form.starts}

    def read(self, ids: list[int]) -> tuple[list[Found], list[tuple[int, int, str, int]]]:
        messages = self.messages(ids)
        found: list[Found] = []
        turns: list[tuple[int, int, str, int]] = []
        begun, count, progress = 0, 0, "quiet"

        def close(at: int) -> None:
            nonlocal begun, count, progress
            turns.append((begun, at, "closed", len(found) - count))
            begun, count, progress = at, len(found), "quiet"

        for message in messages:
            role = message.role
            if message.header is not None:
                continue
            if self.form.boundary == "final" and progress == "answered":
                close(message.start)
            if role == "assistant":
                spans, called, answered = self.assistant(message, ids)
                found += spans
                progress = "answered" if answered and not called else "working"
                continue
            if self.is_wrapped(message, ids):
                role = "tool"
            if role == "user" and self.form.boundary != "final" and progress != "quiet":
                close(message.start)
            if role == "tool" and progress == "answered":
                progress = "working"
            if role is not None and self.text(message.items, ids):
                where = (message.start, message.end)
                kind = KIND_OF_ROLE[role]  # type: ignore[index] # these messages have one of the four roles
                found.append((*where, kind, where, message.end > message.stop, False))
        if len(ids) > begun:
            state = "answered" if progress == "answered" else "open"
            turns.append((begun, len(ids), state, len(found) - count))
        return found, turns

    def messages(self, ids: list[int]) -> list[Message]:
        done: list[Message] = []
        now: Message | None = None
        if self.form.initial is not None:
            now = Message(None, 0, 0, self.form.initial)

        def close(stop: int, end: int) -> None:
            if now is not None:
                now.stop, now.end = stop, end
                done.append(now)

        for item in items_of(self.spellings, ids):
            begin = self.starts.get(item.name or "")
            if begin is not None and not (begin.text and now is not None):
                close(item.start, item.start)
                now = Message(begin, item.start, item.end, begin.role)
                if begin.names or begin.header_end is not None:
                    now.header = []
            elif item.name in self.form.ends:
                close(item.start, item.end)
                now = None
            elif now is None:
                continue
            elif now.header is not None:
                self.read_header(now, item, ids)
            elif now.begin is not None and item.name is not None and item.name == now.begin.end:
                close(item.start, item.end)
                then = now.begin.then
                now = None if then is None else Message(None, item.end, item.end, then)
            else:
                now.items.append(item)
        close(len(ids), len(ids))
        if now is not None:
            now.closed = False
        return done

    def read_header(self, message: Message, item: Item, ids: list[int]) -> None:
        assert message.begin is not None
        assert message.header is not None
        begin = message.begin
        names = self.spellings.names.get(begin.delimiter, {})
        roles = dict(begin.names)
        if begin.header_end is None:
            message.header.append(item)
            read = tuple(ids[message.header[0].start : item.end])
            full = [name for name, spelling in names.items() if spelling == read]
            if full:
                message.role, message.body, message.header = roles[full[0]], item.end, None
            elif not any(spelling[: len(read)] == read for spelling in names.values()):
                message.items, message.body = message.header, message.header[0].start
                message.header = None
            return
        if item.name != begin.header_end:
            message.header.append(item)
            return
        header, message.header, message.body = message.header, None, item.end
        channels = self.form.channels
        at = len(header)
        if channels is not None:
            at = max(
                (n for n, it in enumerate(header) if it.name == channels.delimiter), default=at
            )
        speaker = tuple(token for it in header[:at] for token in ids[it.start : it.end])
        channel = tuple(token for it in header[at + 1 :] for token in ids[it.start : it.end])
        for name, spelling in names.items():
            rest = speaker[len(spelling) :]
            addressed = any(rest[: len(to)] == to for to in self.spellings.recipients)
            if speaker[: len(spelling)] == spelling and (not rest or addressed):
                message.role = roles[name]
        if message.role != "assistant" or channels is None:
            return
        text = (*speaker, *channel)
        message.kind = "answer"
        for name, kind in channels.kinds:
            spelling = self.spellings.names[channels.delimiter][name]
            if at < len(header) and channel[: len(spelling)] == spelling:
                message.kind = kind
                message.final = name == channels.final
        for to in self.spellings.recipients:
            if any(text[n : n + len(to)] == to for n in range(len(text))):
                message.kind, message.final = "tool_call", False

    def text(self, items: list[Item], ids: list[int]) -> bool:
        newlines = self.spellings.newlines
        return any(item.name is not None or ids[item.start] not in newlines for item in items)

    def is_wrapped(self, message: Message, ids: list[int]) -> bool:
        if message.role != "user" or self.form.wrapped is None:
            return False
        newlines = self.spellings.newlines
        said = [it for it in message.items if it.name or ids[it.start] not in newlines]
        opening, closing = self.form.wrapped
        return bool(said) and said[0].name == opening and said[-1].name == closing

    def assistant(self, message: Message, ids: list[int]) -> tuple[list[Found], bool, bool]:
        spoken = self.text(message.items, ids)
        if message.kind is not None:
            whole = (message.start, message.end)
            where = (message.body, message.stop) if message.kind == "answer" else whole
            found: Found = (*where, message.kind, where, message.end > message.stop, False)
            is_found = spoken or message.kind != "answer"
            return [found] if is_found else [], not message.final, message.final and spoken
        self.found: list[Found] = []
        self.stack: list[tuple[Pair, int, int, int]] = []
        self.called = False
        answer, reasoned = -1, False

        def end_answer(at: int) -> None:
            if 0 <= answer < at:
                self.found.append((answer, at, "answer", (answer, at), True, False))

        for number, item in enumerate(message.items):
            opens = next((pair for pair in self.form.pairs if pair.open == item.name), None)
            closes = next((pair for pair in self.form.pairs if pair.close == item.name), None)
            inside = self.stack[-1][0] if self.stack else None
            if opens is not None and (
                inside is None or (inside.kind == "reasoning" and opens.kind == "tool_call")
            ):
                end_answer(item.start)
                answer = -1
                if inside is not None and opens.ends_reasoning:
                    reasoned = True
                    self.pop(item.start, item.start)
                self.stack.append((opens, item.start, item.end, 1))
            elif opens is not None and inside is opens and opens.nests:
                pair, start, body, depth = self.stack.pop()
                self.stack.append((pair, start, body, depth + 1))
            elif closes is not None and any(pair is closes for pair, *_ in self.stack):
                pair, start, body, depth = self.stack[-1]
                if pair is closes and depth > 1:
                    self.stack[-1] = (pair, start, body, depth - 1)
                    continue
                while self.stack[-1][0] is not closes:
                    self.pop(item.start, item.start)
                reasoned |= closes.kind == "reasoning"
                self.pop(item.start, item.end, self.growth(message.items[number + 1 :], ids))
            elif closes is not None and closes.kind == "reasoning" and not (self.stack or reasoned):
                begun = item.start if answer < 0 else answer
                answer, reasoned = -1, True
                self.stack.append((closes, begun, begun, 1))
                self.pop(item.start, item.end, self.growth(message.items[number + 1 :], ids))
            elif not self.stack and answer < 0 and self.text([item], ids):
                answer = item.start
        self.called |= any(pair.kind == "tool_call" for pair, *_ in self.stack)
        # Reasoning that is cut off is not an answer.
        spoken = spoken and (message.closed or not self.stack)
        if not self.stack:
            end_answer(message.stop)
        while self.stack:
            self.pop(message.stop, message.stop)
        return self.found, self.called, spoken

    def growth(self, following: list[Item], ids: list[int]) -> int:
        newlines = self.spellings.newlines
        for count, item in enumerate(following):
            if item.name is not None or ids[item.start] not in newlines:
                return count
        return len(following)

    def pop(self, start: int, end: int, growth: int = 0) -> None:
        pair, begun, body, _ = self.stack.pop()
        nested, complete = bool(self.stack), end > start
        self.called |= pair.kind == "tool_call" and complete
        if pair.drops == "whole":
            if pair.kind == "reasoning" and not nested and complete:
                end += growth
            dropped = (begun, end)
        else:
            dropped = (begun if pair.drops == "to_close" else body, start)
        if end > begun:
            self.found.append((begun, end, pair.kind, dropped, complete, nested))


def spans_of(stream: tags.Stream) -> list[Found]:
    return [
        (it.span.start, it.span.end, it.kind, it.dropped, it.complete, it.nested)
        for it in stream.sections
    ]
