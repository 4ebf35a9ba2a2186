"""Tags: kinds of spans, set on tokens that have a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie import Span
from kvtrie.testing.model._arguments import expect
from kvtrie.testing.model._sequences import AnySequence, Tokens, read
from kvtrie.testing.model._store import Key, ModelStore

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_KINDS = ("system", "user", "reasoning", "answer", "tool_call", "tool_result", "lookahead")
MAX_KINDS = 64


class Tags(ModelStore):
    """Tags belong to the entry: they depend on a prefix and a position in it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._kinds = list(FIRST_KINDS)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    def _bits(self, kinds: Iterable[str]) -> int:
        return sum(1 << bit for bit, kind in enumerate(self._kinds) if kind in set(kinds))

    def _spans(
        self, spans: Iterable[Span], tokens: Tokens
    ) -> tuple[list[str], list[tuple[range, int]]]:
        kinds = list(self._kinds)
        marks = []
        for span in spans:
            expect(span, Span, "a span")
            if span.end > len(tokens):
                message = f"{span!r} ends after the {len(tokens)} tokens of the sequence"
                raise ValueError(message)
            if span.start == span.end:
                continue
            if span.kind not in kinds:
                kinds.append(span.kind)
            marks.append((range(span.start, span.end), 1 << kinds.index(span.kind)))
        if len(kinds) > MAX_KINDS:
            message = f"{len(kinds)} kinds of spans, above {MAX_KINDS}"
            raise ValueError(message)
        return kinds, marks

    def _mark(self, path: list[Key], marks: list[tuple[range, int]]) -> None:
        for depth, key in enumerate(path):
            entry = self._entries.get(key)
            if entry is not None:
                for offset in range(self.block_size):
                    position = depth * self.block_size + offset
                    for where, bit in marks:
                        entry.tags[offset] |= bit if position in where else 0

    def tag(self, seq: AnySequence, spans: Iterable[Span]) -> None:
        namespace, tokens = read(seq)
        self._kinds, marks = self._spans(spans, tokens)
        self._mark(self._path(namespace, tokens), marks)
        self._settle()

    def tags(self, seq: AnySequence) -> list[Span]:
        """Maximal runs of each kind, sorted by (start, end, kind)."""
        namespace, tokens = read(seq)
        bits: list[int] = []
        for key in self._path(namespace, tokens):
            entry = self._entries.get(key)
            bits += entry.tags if entry is not None else [0] * self.block_size
        spans = []
        for bit, kind in enumerate(self._kinds):
            start = None
            for position, here in enumerate([*bits, 0]):
                if here >> bit & 1:
                    start = position if start is None else start
                elif start is not None:
                    spans.append(Span(start, position, kind))
                    start = None
        return sorted(spans, key=lambda span: (span.start, span.end, span.kind))
