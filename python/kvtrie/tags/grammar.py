"""A chat format compiled to token ids, for streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.tags.automaton import Automaton

if TYPE_CHECKING:
    from kvtrie.tags.automaton import Spelling
    from kvtrie.tags.formats import Format, MessageStart, Role, SectionKind
    from kvtrie.tags.spellings import Spellings


class Grammar:
    """A format and the ids of its delimiters, in tables that are read per token.

    A `Tagger` is a grammar that makes streams.
    """

    __slots__ = (
        "automaton",
        "channels",
        "closes",
        "ends",
        "format",
        "names",
        "newlines",
        "opens",
        "recipients",
        "starts",
    )

    def __init__(self, form: Format, found: Spellings) -> None:
        self.format = form
        self.automaton = Automaton(found.delimiters)
        self.newlines = found.newlines
        self.recipients = found.recipients
        self.starts = {start.delimiter: start for start in form.starts}
        self.ends = frozenset(form.ends)
        self.opens = {pair.open: pair for pair in form.pairs}
        self.closes = {pair.close: pair for pair in form.pairs}
        self.names: dict[str, dict[Spelling, Role | None]] = {
            start.delimiter: self._prefixes(start, found) for start in form.starts
        }
        self.channels: tuple[tuple[Spelling, SectionKind, bool], ...] = ()
        if form.channels is not None:
            named = found.names.get(form.channels.delimiter, {})
            self.channels = tuple(
                (named[name], kind, name == form.channels.final)
                for name, kind in form.channels.kinds
            )

    @staticmethod
    def _prefixes(start: MessageStart, found: Spellings) -> dict[Spelling, Role | None]:
        roles = dict(start.names)
        table: dict[Spelling, Role | None] = {}
        for name, spelling in found.names.get(start.delimiter, {}).items():
            for width in range(1, len(spelling)):
                table.setdefault(spelling[:width], None)
            table[spelling] = roles[name]
        return table
