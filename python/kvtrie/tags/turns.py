"""What happens to the spans of a finished turn, as calls on an index.

A turn is finished when the assistant has answered without a tool call, or when a message follows
that is not a tool result. Until then nothing of it is touched: in a tool loop every template keeps
the reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from kvtrie._core import Span, TokenSequence
    from kvtrie.tags.sections import Section, Turn
    from kvtrie.tags.stream import Stream

Action = Literal["keep", "evict_first", "drop"]
"""What happens to a span: nothing, its blocks are evicted first, or they are removed at once."""

Thinking = Literal["interleaved", "preserved"]
"""What the model sees of earlier turns' reasoning: nothing, or all of it."""

ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
_KINDS: Final = ("user", "reasoning", "answer", "tool_call", "tool_result")

Range = tuple[int, int]


class Removed(Protocol):
    """What `remove_spans` returns."""

    @property
    def freed(self) -> npt.NDArray[np.int32]:
        """Blocks that belong to the caller from here on."""
        ...

    @property
    def kept(self) -> npt.NDArray[np.int32]:
        """Blocks that a cached block below them needs."""
        ...

    @property
    def condemned(self) -> npt.NDArray[np.int32]:
        """Blocks that left the index while pinned."""
        ...


class TurnIndex(Protocol):
    """The methods that an index needs: `RadixIndex`, or the naive model of it."""

    def tag(self, seq: Any, spans: Iterable[Span]) -> object:  # noqa: ANN401 - each has its own
        """Tag the tokens of spans."""
        ...

    def mark_dead(self, seq: Any, ranges: Sequence[Range]) -> int:  # noqa: ANN401 - likewise
        """Mark the blocks wholly inside to be evicted first."""
        ...

    def remove_spans(
        self,
        seq: Any,  # noqa: ANN401 - likewise
        ranges: Sequence[Range],
        force: bool = False,
    ) -> Removed:
        """Remove the blocks wholly inside."""
        ...


def _no_ids() -> npt.NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDecision:
    """What a policy decides for finished turns, in token ranges.

    Args:
        turns: The turns concerned; empty during a tool loop.
        spans: All spans in them.
        evict_first: Ranges for `mark_dead`, ascending and disjoint.
        drop: Ranges for `remove_spans`, likewise.
    """

    turns: tuple[Turn, ...] = ()
    spans: tuple[Span, ...] = ()
    evict_first: tuple[Range, ...] = ()
    drop: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedTurn(TurnDecision):
    """The decision that `TurnPolicy.close_turn` carried out, and what the index returned.

    Args:
        num_marked: Blocks that are newly marked.
        freed: Ids of blocks that left the index and belong to the caller.
        kept: Ids of blocks that stay, because others need them.
        condemned: Ids of blocks that left the index while pinned; `take_freed()` returns them
            later.
    """

    num_marked: int = 0
    freed: npt.NDArray[np.int32] = field(default_factory=_no_ids)
    kept: npt.NDArray[np.int32] = field(default_factory=_no_ids)
    condemned: npt.NDArray[np.int32] = field(default_factory=_no_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPolicy:
    """What happens to the spans of a finished turn; ``docs/tags.md`` has examples.

    Each kind is kept (`"keep"`), evicted before everything else (`"evict_first"`), or removed from
    the index at once (`"drop"`). For reasoning this concerns exactly the tokens that the chat
    template deletes, for other kinds the whole span. Sections inside reasoning are treated with it.
    The index touches only blocks wholly inside a range.

    Args:
        thinking: `"interleaved"`: reasoning is dropped when the turn is finished. `"preserved"`:
            the model always sees it.
        reasoning: By default `"evict_first"`, or `"keep"` with `thinking="preserved"`.
        answer: For answers.
        tool_call: For tool calls.
        tool_result: For tool results.
        user: For user messages.

    Raises:
        ValueError: An action or a mode is unknown, or the policy contradicts itself.

    Example:
        >>> from kvtrie import tags
        >>> stream = tags.Tagger.from_ids(user=1, assistant=2, reasoning=(7, 8)).stream()
        >>> spans = stream.feed([1, 40, 2, 7, 50, 51, 8, 60]) + stream.finish()
        >>> tags.TurnPolicy().decide(stream).evict_first
        ((3, 7),)
    """

    thinking: Thinking = "interleaved"
    reasoning: Action | None = None
    answer: Action = "keep"
    tool_call: Action = "keep"
    tool_result: Action = "keep"
    user: Action = "keep"

    def __post_init__(self) -> None:
        """Fill in the default of `reasoning` and refuse what contradicts itself."""
        if self.thinking not in get_args(Thinking):
            msg = f"TurnPolicy: thinking is {self.thinking!r}, not one of {get_args(Thinking)}"
            raise ValueError(msg)
        if self.reasoning is None:
            default: Action = "keep" if self.thinking == "preserved" else "evict_first"
            object.__setattr__(self, "reasoning", default)
        for kind in _KINDS:
            if getattr(self, kind) not in ACTIONS:
                msg = f"TurnPolicy: {kind} is {getattr(self, kind)!r}, not one of {ACTIONS}"
                raise ValueError(msg)
        self._check_preserved("TurnPolicy: reasoning", self.reasoning)

    def _check_preserved(self, what: str, action: Action | None) -> None:
        if self.thinking == "preserved" and action != "keep":
            msg = (
                f"{what}={action!r} contradicts thinking='preserved': reasoning that the model "
                "sees again must be kept"
            )
            raise ValueError(msg)

    def override(self, **changes: Action | Thinking | None) -> TurnPolicy:
        """This policy with changed fields, for one request.

        A change of `thinking` alone also resets `reasoning` to its default.

        Raises:
            TypeError: There is no such field.
            ValueError: As for the policy itself.
        """
        known = [field.name for field in fields(self)]
        if unknown := sorted(set(changes) - set(known)):
            msg = f"override: {', '.join(unknown)}: not among {', '.join(known)}"
            raise TypeError(msg)
        if "thinking" in changes:
            changes.setdefault("reasoning", None)
        return replace(self, **changes)  # type: ignore[arg-type] # fields by name: checked in __post_init__

    def action(self, section: Section) -> Action:
        """The action for a section."""
        if section.kind not in _KINDS:
            return "keep"
        action: Action = getattr(self, section.kind)
        return action

    def decide(
        self,
        stream: Stream,
        *,
        overrides: Mapping[Span, Action] | None = None,
        all_turns: bool = False,
    ) -> TurnDecision:
        """Decide about the last finished turn; earlier ones had their own calls.

        Reasoning is kept if the template never deletes it, unless an override names it.

        Args:
            stream: The spans of the sequence.
            overrides: Other actions for some of its spans. Those of an unfinished turn have no
                effect yet.
            all_turns: Include every finished turn.

        Raises:
            ValueError: An override names a span that the stream has not found, or contradicts the
                policy.
        """
        chosen = self._chosen(stream, overrides or {})
        turns = tuple(turn for turn in stream.turns if turn.is_finished)
        if not all_turns:
            turns = turns[-1:]
        never = stream.tagger.format.boundary == "never"
        ranges: dict[Action, list[Range]] = {action: [] for action in ACTIONS}
        for section in (section for turn in turns for section in turn.sections):
            kept = never and section.kind == "reasoning"
            action = chosen.get(section.span, "keep" if kept else self.action(section))
            # A section inside reasoning is treated with it.
            if not section.nested and section.dropped[0] < section.dropped[1]:
                ranges[action].append(section.dropped)
        return TurnDecision(
            turns=turns,
            spans=tuple(section.span for turn in turns for section in turn.sections),
            evict_first=_merged(ranges["evict_first"]),
            drop=_merged(ranges["drop"]),
        )

    def close_turn(
        self,
        index: TurnIndex,
        seq: TokenSequence | Any,  # noqa: ANN401 - the index's own kind of sequence
        stream: Stream,
        *,
        overrides: Mapping[Span, Action] | None = None,
        all_turns: bool = False,
        force: bool = False,
    ) -> ClosedTurn:
        """Carry out `decide` on an index: tag the spans, mark dead ranges, remove dropped ones.

        Call it when a request has finished, or when the next user message has been fed.

        Args:
            index: The index that holds the blocks of `seq`.
            seq: The sequence that the stream has read, or a longer one.
            stream: As for `decide`.
            overrides: As for `decide`.
            all_turns: As for `decide`.
            force: Also drop blocks that others need.

        Raises:
            ValueError: The sequence is shorter than the stream, or as for `decide`.
                Nothing has changed.
        """
        if len(seq) < len(stream):
            msg = (
                f"close_turn: the sequence has {len(seq)} tokens, the stream has read "
                f"{len(stream)}; truncate() it, or extend() the sequence"
            )
            raise ValueError(msg)
        what = self.decide(stream, overrides=overrides, all_turns=all_turns)
        if what.spans:
            index.tag(seq, list(what.spans))
        num_marked = index.mark_dead(seq, list(what.evict_first)) if what.evict_first else 0
        removed = index.remove_spans(seq, list(what.drop), force=force) if what.drop else None
        return ClosedTurn(
            turns=what.turns,
            spans=what.spans,
            evict_first=what.evict_first,
            drop=what.drop,
            num_marked=num_marked,
            freed=_no_ids() if removed is None else removed.freed,
            kept=_no_ids() if removed is None else removed.kept,
            condemned=_no_ids() if removed is None else removed.condemned,
        )

    def _chosen(self, stream: Stream, overrides: Mapping[Span, Action]) -> Mapping[Span, Action]:
        found = {section.span for section in stream.sections} if overrides else set()
        for span, action in overrides.items():
            if action not in ACTIONS:
                msg = f"decide: overrides[{span!r}] is {action!r}, not one of {ACTIONS}"
                raise ValueError(msg)
            if span not in found:
                msg = f"decide: overrides names {span!r}, which the stream has not found"
                raise ValueError(msg)
            if span.kind == "reasoning":
                self._check_preserved(f"decide: overrides[{span!r}]", action)
        return overrides


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)
