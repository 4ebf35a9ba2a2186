"""The parts of a chat format, as values: delimiters, roles, sections and the end of a turn.

A `Format` names delimiter *strings*; a `Tagger` finds their token ids. For a format built from ids
the strings may be any words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Iterator

Role = Literal["system", "user", "assistant", "tool"]
"""The author of a message; that of a tool result is `tool`, whatever the template calls it."""

SectionKind = Literal["system", "user", "reasoning", "answer", "tool_call", "tool_result"]
"""The kinds of spans that taggers find."""

Drops = Literal["whole", "to_close", "body"]
"""What a template deletes of reasoning: all of it with its delimiters and the following newlines,
all but the closing delimiter, or only the tokens between the delimiters."""

Boundary = Literal["user", "final", "never"]
"""When a template deletes reasoning: once a real user message follows, once a final answer
follows, or never."""

ROLES: tuple[Role, ...] = get_args(Role)
KINDS: tuple[SectionKind, ...] = get_args(SectionKind)

KIND_OF_ROLE: dict[Role, SectionKind] = {
    "system": "system",
    "user": "user",
    "assistant": "answer",
    "tool": "tool_result",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStart:
    """How a message begins.

    Args:
        delimiter: What every such message begins with.
        role: The author if the header does not name one. None: a message with an unknown header
            gets no tag.
        names: Names in the header, with the role of each.
        header_end: The delimiter that ends the header. Without one, a header that is read (`names`)
            ends with the name.
        end: The delimiter that ends this kind of message alone.
        then: The author of the text after `end`, which has no header.
        text: The delimiter is ordinary text, not one token: it counts only where no message is
            open.
    """

    delimiter: str
    role: Role | None = None
    names: tuple[tuple[str, Role], ...] = ()
    header_end: str | None = None
    end: str | None = None
    then: Role | None = None
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A section of an assistant's message, between two delimiters.

    Args:
        kind: `"reasoning"` or `"tool_call"`.
        open: The opening delimiter.
        close: The closing delimiter.
        drops: What the template deletes when it deletes the section.
        ends_reasoning: Opening this section ends open reasoning.
        nests: Count opening delimiters inside the section, so that the last closing one ends it.
            Templates do not count: there the first one ends reasoning.
    """

    kind: Literal["reasoning", "tool_call"]
    open: str
    close: str
    drops: Drops = "whole"
    ends_reasoning: bool = False
    nests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Assistant messages whose header gives their kind (harmony).

    Args:
        delimiter: Precedes the channel's name in a header.
        kinds: Names of channels and the kind of their messages.
        final: The channel whose message ends a turn.
        recipient: The first characters of an address in the header. An assistant's message with an
            address is a tool call on any channel.
    """

    delimiter: str
    kinds: tuple[tuple[str, SectionKind], ...]
    final: str
    recipient: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A chat format.

    Args:
        name: The name in error messages.
        starts: How messages begin.
        ends: What ends a message. Without it a message ends where the next begins.
        pairs: Sections of an assistant's message.
        wrapped: A user message between these two delimiters is a tool result.
        channels: Headers that give the kind of an assistant's message.
        boundary: When the template deletes reasoning.
        initial: The author of the text before the first delimiter.
        optional: Delimiters that a model may lack.
        sources: The sources of these facts.
    """

    name: str
    starts: tuple[MessageStart, ...] = ()
    ends: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    wrapped: tuple[str, str] | None = None
    channels: Channels | None = None
    boundary: Boundary = "user"
    initial: Role | None = None
    optional: frozenset[str] = frozenset()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a format that uses one string for two things."""
        seen: dict[str, str] = {}
        for text, what in self.delimiters():
            if not text:
                msg = f"Format {self.name!r}: {what} is empty; a delimiter must not be empty"
                raise ValueError(msg)
            if seen.setdefault(text, what) != what:
                msg = f"Format {self.name!r}: {text!r} is both {seen[text]} and {what}"
                raise ValueError(msg)
        if self.boundary not in get_args(Boundary):
            msg = (
                f"Format {self.name!r}: boundary is {self.boundary!r}, not one of "
                f"{get_args(Boundary)}"
            )
            raise ValueError(msg)
        for pair in self.pairs:
            if pair.kind not in {"reasoning", "tool_call"} or pair.drops not in get_args(Drops):
                msg = (
                    f"Format {self.name!r}: {pair!r} is not a section: kind is 'reasoning' or "
                    f"'tool_call', drops one of {get_args(Drops)}"
                )
                raise ValueError(msg)

    def delimiters(self) -> Iterator[tuple[str, str]]:
        """Every delimiter with its role."""
        for number, start in enumerate(self.starts):
            yield start.delimiter, f"the start of a message (starts[{number}])"
            if start.header_end is not None:
                yield start.header_end, "the end of a header"
            if start.end is not None:
                yield start.end, f"the end of a message of starts[{number}]"
        for text in self.ends:
            yield text, "the end of a message"
        for pair in self.pairs:
            yield pair.open, f"the start of a {pair.kind}"
            yield pair.close, f"the end of a {pair.kind}"
        if self.wrapped is not None:
            yield self.wrapped[0], "the start of a wrapped tool result"
            yield self.wrapped[1], "the end of a wrapped tool result"
        if self.channels is not None:
            yield self.channels.delimiter, "the start of a channel's name"

    def text_delimiters(self) -> frozenset[str]:
        """The delimiters that may be several tokens of ordinary text."""
        found = {text for pair in self.pairs for text in (pair.open, pair.close)}
        found.update(self.wrapped or ())
        for start in self.starts:
            if start.text:
                found.add(start.delimiter)
                found.update(() if start.end is None else (start.end,))
        return frozenset(found)

    def names(self) -> Iterator[tuple[str, str]]:
        """Every name in headers, with the delimiter before it."""
        for start in self.starts:
            for name, _ in start.names:
                yield start.delimiter, name
        if self.channels is not None:
            for name, _ in self.channels.kinds:
                yield self.channels.delimiter, name
