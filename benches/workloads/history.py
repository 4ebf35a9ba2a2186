"""What an edit does to a history: cached tokens, the next prompt, and what both have."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from workloads.documents import Tokens

Action = Literal["delete", "replace", "insert", "append"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens that are kept or dropped together; the same object is the same text.

    Args:
        tokens: Its ids.
        kind: What the tokens are: `system`, `user`, `reasoning`, `answer`, `tool_call`,
            `tool_result`, or nothing for a template's own markers.
    """

    tokens: Tokens
    kind: str = ""


class Span(NamedTuple):
    start: int
    end: int
    kind: str


class Kept(NamedTuple):
    """Cached tokens that the prompt has again, in one piece."""

    start: int
    old_start: int
    length: int

    @property
    def delta(self) -> int:
        return self.start - self.old_start

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def old_end(self) -> int:
        return self.old_start + self.length


class Edit(NamedTuple):
    """Cached tokens that are gone, and the prompt's tokens in their place.

    One of the two ranges is empty unless tokens were replaced. New tokens after the last kept
    ones are appended.
    """

    action: Action
    old_start: int
    old_end: int
    start: int
    end: int


@dataclass(frozen=True)
class Conversation:
    """One conversation before its next turn.

    `cached` is the turn before, of which `num_computed` tokens have KV: the last sampled token has
    none. `kept` and `edits` describe `prompt` in its order; `edits` is empty where pieces changed
    their order.
    """

    cached: Tokens
    num_computed: int
    prompt: Tokens
    spans: tuple[Span, ...]
    prompt_spans: tuple[Span, ...]
    kept: tuple[Kept, ...]
    edits: tuple[Edit, ...]

    @property
    def moved(self) -> tuple[Kept, ...]:
        return tuple(kept for kept in self.kept if kept.delta)

    @property
    def reordered(self) -> bool:
        return any(
            after.old_start < before.old_start
            for before, after in zip(self.kept, self.kept[1:], strict=False)
        )

    def edited(self, action: Action) -> tuple[Edit, ...]:
        return tuple(edit for edit in self.edits if edit.action == action)


def conversation(
    cached: Sequence[Piece], prompt: Sequence[Piece], *, sampled: bool = True
) -> Conversation:
    """Compare two histories piece by piece."""
    kept = _kept(cached, prompt)
    num_cached, num_prompt = _length(cached), _length(prompt)
    return Conversation(
        cached=_joined(cached),
        num_computed=num_cached - sampled,
        prompt=_joined(prompt),
        spans=_spans(cached),
        prompt_spans=_spans(prompt),
        kept=kept,
        edits=_edits(kept, num_cached, num_prompt),
    )


def _joined(pieces: Sequence[Piece]) -> Tokens:
    return np.concatenate([piece.tokens for piece in pieces]).astype(np.uint32, copy=False)


def _length(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.tokens) for piece in pieces)


def _spans(pieces: Sequence[Piece]) -> tuple[Span, ...]:
    spans: list[Span] = []
    start = 0
    for piece in pieces:
        end = start + len(piece.tokens)
        if piece.kind and end > start:
            if spans and spans[-1].end == start and spans[-1].kind == piece.kind:
                start = spans.pop().start
            spans.append(Span(start, end, piece.kind))
        start = end
    return tuple(spans)


def _kept(cached: Sequence[Piece], prompt: Sequence[Piece]) -> tuple[Kept, ...]:
    places: dict[int, int] = {}
    start = 0
    for piece in cached:
        places[id(piece)] = start
        start += len(piece.tokens)
    runs: list[Kept] = []
    start = 0
    for piece in prompt:
        old_start = places.get(id(piece))
        if old_start is not None and len(piece.tokens):
            run = Kept(start, old_start, len(piece.tokens))
            if runs and (runs[-1].end, runs[-1].old_end) == (start, old_start):
                run = Kept(runs[-1].start, runs[-1].old_start, runs.pop().length + run.length)
            runs.append(run)
        start += len(piece.tokens)
    return tuple(runs)


def _edits(kept: Sequence[Kept], num_cached: int, num_prompt: int) -> tuple[Edit, ...]:
    edits: list[Edit] = []
    old, new = 0, 0
    for run in (*kept, Kept(num_prompt, num_cached, 0)):
        if run.old_start < old:
            return ()
        gone, came = run.old_start > old, run.start > new
        action: Action = "replace" if gone else "insert" if run.length else "append"
        if gone and not came:
            action = "delete"
        if gone or came:
            edits.append(Edit(action, old, run.old_start, new, run.start))
        old, new = run.old_end, run.end
    return tuple(edits)
