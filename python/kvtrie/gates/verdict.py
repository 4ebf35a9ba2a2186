"""The verdict on one kind of edit, and on a policy over all kinds that it was measured on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final, Literal

from kvtrie.gates._errors import short
from kvtrie.gates.boxes import find
from kvtrie.gates.statistics import is_above, is_below, questions_needed, upper_bound

if TYPE_CHECKING:
    from kvtrie._core import ReusePolicy
    from kvtrie.gates.boxes import Box, Terms
    from kvtrie.gates.figures import Figures, Thresholds

CONTROLS: Final = ("drop", "unrotated")
"""The controls, as ``kvtrie.calibrate.policies`` names them."""
LEAST_RIGHT: Final = 0.5
"""Least share of questions that full recomputation must get right, so that losses can show."""
LEAST_ANSWERS: Final = 20
"""Least number of answers of a kind that full recomputation must get right."""
MOST_LOST_BY_ROUNDING: Final = 0.05
"""Most of the judged replies that exact reuse may lose; a control must lose more."""
SPAN: Final = 5.0
"""A conversation counts with at most this many times the limit, in the evidence on a mean."""

State = Literal["cleared", "refused", "undecided"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one kind of edit.

    Attributes:
        state: ``"cleared"``; ``"refused"`` where the figures show a loss; ``"undecided"`` where
            they show neither.
        reason: Why it is not cleared, with values and limits; None if it is.
        looks_worse: Whether a mean or a tail that was measured is beyond its limit, shown or not.
    """

    state: State
    reason: str | None = None
    looks_worse: bool = False


@dataclass(frozen=True, slots=True)
class Control:
    """A way to build KV that no request can ask for: shows whether replies detect a loss.

    Attributes:
        name: One of ``CONTROLS``.
        figures: On the same replies.

    Raises:
        ValueError: ``name`` is not one of ``CONTROLS``.
    """

    name: str
    figures: Figures

    def __post_init__(self) -> None:
        if self.name not in CONTROLS:
            msg = f"Control: 'name' must be one of {', '.join(CONTROLS)}, not {short(self.name)}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of edit under one policy.

    Attributes:
        name: What the report calls it.
        box: The plans that are of this kind.
        figures: Those of the policy.
        floor: Those of exact reuse on the same replies: what rounding does.
        controls: Those of controls on the same replies.
    """

    name: str
    box: Box
    figures: Figures
    floor: Figures
    controls: tuple[Control, ...]

    def flaw(self) -> str | None:
        """Why these figures contradict themselves, or None."""
        given = [("exact reuse", self.floor.flaw()), ("figures", self.figures.flaw(self.floor))]
        given += [(one.name, one.figures.flaw(self.floor)) for one in self.controls]
        return next((f"{who}: {flaw}" for who, flaw in given if flaw is not None), None)

    def verdict(self, thresholds: Thresholds) -> Verdict:
        """The verdict by these figures.

        It is monotone: a kind that is not cleared stays so if it loses or diverges more.

        Args:
            thresholds: What must be kept.
        """
        flaw = self.flaw()
        if flaw is not None:
            return Verdict("undecided", flaw)
        refused = self._shown_worse(thresholds)
        if refused:
            return Verdict("refused", "; ".join(refused), looks_worse=True)
        unclear = [*self._blind(thresholds), *self._not_shown(thresholds)]
        if unclear:
            return Verdict("undecided", "; ".join(unclear), self._looks_worse(thresholds))
        return Verdict("cleared")

    def _looks_worse(self, limits: Thresholds) -> bool:
        return (
            self._excess > limits.max_kl
            or self.figures.kl_p99 - self.floor.kl_p99 > limits.max_kl_p99
            or self._drop > self._most_drop(limits)
        )

    def _shown_worse(self, limits: Thresholds) -> list[str]:
        one, found = self.figures, []
        if is_above(one.kl_excess, limits.max_kl, -_most(limits.max_kl)):
            found.append(
                f"mean KL is {self._excess:.4g} above that of exact reuse, the limit is "
                f"{limits.max_kl:.4g}"
            )
        least = self._most_drop(limits)
        if is_above(one.top1_drop, least, -_most(least)):
            found.append(self._top1(limits))
        if is_above(one.losses, limits.max_loss, -1.0):
            found.append(
                f"{100 * one.loss:.2f} points of accuracy lost ({one.questions} questions), the "
                f"limit is {100 * limits.max_loss:.2f}"
            )
        return found

    def _not_shown(self, limits: Thresholds) -> list[str]:
        one, found = self.figures, []
        most = _most(limits.max_kl)
        if self._excess > limits.max_kl or not is_below(one.kl_excess, limits.max_kl, most):
            found.append(
                f"mean KL is {self._excess:.4g} above that of exact reuse, by {one.cases} "
                f"conversations not shown to be below {limits.max_kl:.4g}"
            )
        tail = one.kl_p99 - self.floor.kl_p99
        if tail > limits.max_kl_p99:
            found.append(
                f"KL at the 99th percentile is {tail:.4g} above that of exact reuse, the limit is "
                f"{limits.max_kl_p99:.4g}"
            )
        drop = self._most_drop(limits)
        # The evidence counts a conversation with at most SPAN limits: so the mean counts, too.
        if self._drop > drop or not is_below(one.top1_drop, drop, _most(drop)):
            found.append(f"{self._top1(limits)}: not shown by {one.cases} conversations")
        if limits.loss_per_kind and not is_below(one.losses, limits.max_loss, 1.0):
            needed = questions_needed(one.lost, one.gained, limits.max_loss)
            more = "" if needed is None else f" (about {needed} questions are needed)"
            found.append(
                f"up to {100 * loss_bound(one.losses):.2f} points of accuracy may be lost by "
                f"{one.questions} questions, the limit is {100 * limits.max_loss:.2f}{more}"
            )
        return found

    def _blind(self, limits: Thresholds) -> list[str]:
        """Why these replies could not show that a policy is bad."""
        one = self.floor
        if one.questions == 0:
            return ["no reply was judged, so no accuracy was measured"]
        found = []
        if one.right_full < LEAST_RIGHT * one.questions:
            found.append(
                f"full recomputation is right on {one.right_full} of {one.questions} questions, "
                f"at least {LEAST_RIGHT:.0%} are needed"
            )
        if one.right_full < LEAST_ANSWERS:
            found.append(
                f"full recomputation is right on {one.right_full} questions, at least "
                f"{LEAST_ANSWERS} are needed"
            )
        if one.lost > MOST_LOST_BY_ROUNDING * one.right_full:
            found.append(
                f"exact reuse loses {one.lost} of {one.right_full} right replies, at most "
                f"{MOST_LOST_BY_ROUNDING:.0%} may go by rounding"
            )
        if not self.controls:
            return [*found, "no control was measured"]
        if not any(self._detects(control.figures, limits) for control in self.controls):
            shown = ", ".join(
                f"{control.name!r} loses {control.figures.lost - control.figures.gained} of "
                f"{control.figures.questions} replies, with a mean KL of "
                f"{control.figures.kl_mean:.4g}"
                for control in self.controls
            )
            found.append(f"no control is detected as worse: {shown}")
        return found

    def _detects(self, figures: Figures, limits: Thresholds) -> bool:
        """Whether a control is shown to lose more than is allowed, in answers and in KL."""
        lost = max(limits.max_loss, MOST_LOST_BY_ROUNDING)
        return is_above(figures.losses, lost, -1.0) and is_above(
            figures.kl_excess, limits.max_kl, -_most(limits.max_kl)
        )

    @property
    def _excess(self) -> float:
        return self.figures.kl_mean - self.floor.kl_mean

    @property
    def _drop(self) -> float:
        return self.floor.top1 - self.figures.top1

    def _most_drop(self, limits: Thresholds) -> float:
        return (1 - limits.min_top1) * self.floor.top1

    def _top1(self, limits: Thresholds) -> str:
        return (
            f"{self.figures.top1:.2%} of the likeliest tokens agree, the limit is "
            f"{limits.min_top1:.2%} of the {self.floor.top1:.2%} of exact reuse"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy, and the kinds of edit that it was measured on.

    Attributes:
        name: What the report calls it.
        policy: The policy, with the ``min_run`` that was used.
        kinds: Kinds whose boxes do not meet.

    Raises:
        ValueError: Two boxes meet, or two kinds have one name.
    """

    name: str
    policy: ReusePolicy
    kinds: tuple[Kind, ...]

    def __post_init__(self) -> None:
        for one, other in combinations(self.kinds, 2):
            if one.box.meets(other.box):
                msg = f"Measured: the boxes of {one.name!r} and {other.name!r} meet"
                raise ValueError(msg)
            if one.name == other.name:
                msg = f"Measured: two kinds have the name {one.name!r}"
                raise ValueError(msg)

    def kind_of(self, found: Terms) -> Kind | None:
        """The kind of a plan with these terms, or None if no such plan was measured.

        Args:
            found: What ``boxes.terms`` says of a plan.
        """
        number = find(found, [one.box for one in self.kinds])
        return None if number is None else self.kinds[number]

    def cleared(self, thresholds: Thresholds) -> tuple[Kind, ...]:
        """The kinds that are cleared.

        Args:
            thresholds: What must be kept.
        """
        return tuple(one for one in self.kinds if one.verdict(thresholds).state == "cleared")

    def most_lost(self, thresholds: Thresholds) -> float | None:
        """The upper bound of the accuracy lost over all cleared kinds, or None if there is none.

        Args:
            thresholds: What must be kept.
        """
        losses = self._losses(thresholds)
        return loss_bound(losses) if losses else None

    def least_lost(self, thresholds: Thresholds) -> float | None:
        """The lower bound of it, at least 0, or None if no kind is cleared.

        Each kind may be cleared while all of them together show a loss beyond the limit.

        Args:
            thresholds: What must be kept.
        """
        losses = self._losses(thresholds)
        return max(0.0, -loss_bound([-loss for loss in losses])) if losses else None

    def _losses(self, thresholds: Thresholds) -> list[float]:
        return [loss for one in self.cleared(thresholds) for loss in one.figures.losses]


def loss_bound(losses: tuple[float, ...] | list[float]) -> float:
    """The upper 95 % bound of a loss of accuracy, at every look.

    Args:
        losses: As in `Figures`.
    """
    if not losses:
        return 1.0
    return upper_bound(losses, 1.0, sum(losses) / len(losses))


def _most(limit: float) -> float:
    # A limit of 0 still needs a scale.
    return max(SPAN * limit, 0.01)
