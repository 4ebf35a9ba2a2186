"""Kinds of edit: what an edit did to the context of the KV that a plan moves, and boxes of it.

`terms` reads a plan, and `find` looks for its box. Calibration and engines call the same two, so a
reply is measured under the kind that a live request of the same plan gets. Both take time linear in
the moved runs, respectively the boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtrie.gates._errors import is_finite, short

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ONE_IN: Final = 20
"""A box ends at a value that one measured plan in this many reaches."""


class Run(Protocol):
    """What is read of a moved run; see rule P17."""

    @property
    def cuts(self) -> int:
        """Cuts before the run."""

    @property
    def lost_context(self) -> float:
        """Share of its old context that is gone."""

    @property
    def new_context(self) -> float:
        """Share of its new context that is new."""

    @property
    def distance(self) -> int:
        """How far it moves."""

    @property
    def same_conversation(self) -> bool:
        """Whether it comes from the request's own conversation."""


class Plan(Protocol):
    """What is read of a plan: a `kvtrie.ReusePlan`."""

    @property
    def num_approximate(self) -> int:
        """Approximate tokens."""

    @property
    def moved_runs(self) -> Sequence[Run]:
        """The moved runs."""

    @property
    def segments(self) -> Any:  # noqa: ANN401 - a structured array
        """Its segments."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The worst of a plan's moved runs in each term of rule P17.

    Attributes:
        cuts: Most places before a run where its old context was cut.
        lost_context: Largest share of the old context of a run that is gone.
        new_context: Largest share of the new context of a run that it was not computed in.
        distance: Farthest move in tokens.
        hops: Most hops of approximate KV, in place and moved.
        same_conversation: Whether all runs come from the request's own conversation.
    """

    cuts: int = 0
    lost_context: float = 0.0
    new_context: float = 0.0
    distance: int = 0
    hops: int = 0
    same_conversation: bool = True


def terms(plan: Plan) -> Terms | None:
    """The terms of a plan, or None if all that it reuses is exact.

    Args:
        plan: A plan that is not released. Of approximate KV in place, which no run moves, hops
            alone count.
    """
    if not plan.num_approximate:
        return None
    hops = int(plan.segments["hops"].max())
    runs = plan.moved_runs
    if not runs:
        return Terms(hops=hops)
    return Terms(
        cuts=max(run.cuts for run in runs),
        lost_context=max(run.lost_context for run in runs),
        new_context=max(run.new_context for run in runs),
        distance=max(run.distance for run in runs),
        hops=hops,
        same_conversation=all(run.same_conversation for run in runs),
    )


@dataclass(frozen=True, slots=True)
class Range:
    """The values above one limit, up to another; None: no limit.

    Args:
        above: The range begins after it.
        most: The range ends with it.

    Raises:
        TypeError: A limit is not a number.
        ValueError: A limit is not finite, or the range is empty.
    """

    above: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        for value in (self.above, self.most):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                msg = f"Range: a limit must be a number or None, not {short(value)}"
                raise TypeError(msg)
            if value is not None and not is_finite(value):
                msg = f"Range: a limit must be finite, not {short(value)}"
                raise ValueError(msg)
        if self.above is not None and self.most is not None and self.above >= self.most:
            msg = f"Range: nothing is above {short(self.above)} and at most {short(self.most)}"
            raise ValueError(msg)

    def __contains__(self, value: float) -> bool:
        return (self.above is None or value > self.above) and (
            self.most is None or value <= self.most
        )

    def meets(self, other: Range) -> bool:
        """Whether some number is in both."""
        lows = [one.above for one in (self, other) if one.above is not None]
        highs = [one.most for one in (self, other) if one.most is not None]
        return not lows or not highs or max(lows) < min(highs)


@dataclass(frozen=True, slots=True)
class Box:
    """A set of terms: a range for each number, and whose KV it is.

    Attributes:
        cuts: See `Terms`.
        lost_context: See `Terms`.
        new_context: See `Terms`.
        distance: See `Terms`.
        hops: See `Terms`.
        same_conversation: True or False; None: both.
    """

    cuts: Range = Range()
    lost_context: Range = Range()
    new_context: Range = Range()
    distance: Range = Range()
    hops: Range = Range()
    same_conversation: bool | None = None

    def __contains__(self, found: Terms) -> bool:
        return self.same_conversation in (None, found.same_conversation) and all(
            getattr(found, name) in getattr(self, name) for name in RANGES
        )

    def meets(self, other: Box) -> bool:
        """Whether some terms could be in both."""
        sides = {self.same_conversation, other.same_conversation}
        return sides != {True, False} and all(
            getattr(self, name).meets(getattr(other, name)) for name in RANGES
        )

    def narrowed(self, seen: Iterable[Terms]) -> Box:
        """The box, ending in each term but the distance where measurements became rare.

        Each range ends at the largest value that at least one plan in 20 reaches. It keeps its
        beginning: fewer cuts or hops and less lost or new context are taken to do no more harm.
        The distance is not narrowed: attention sees differences of positions alone, so a rotation
        over any distance is exact but for rounding.

        Args:
            seen: The terms of the measured plans, at least one, all in the box.
        """
        found = list(seen)
        at = -(-len(found) // ONE_IN)
        ends = {}
        for name in RANGES:
            if name == "distance":
                continue
            values = sorted((getattr(one, name) for one in found), reverse=True)
            ends[name] = Range(getattr(self, name).above, values[at - 1])
        return Box(distance=self.distance, same_conversation=self.same_conversation, **ends)


RANGES: Final = tuple(one.name for one in fields(Box) if one.name != "same_conversation")


def find(found: Terms, boxes: Sequence[Box]) -> int | None:
    """The number of the box that holds the terms, or None. Boxes that do not meet leave no choice.

    Args:
        found: The terms of a plan.
        boxes: Boxes of which no two meet.
    """
    return next((number for number, box in enumerate(boxes) if found in box), None)
