"""What was measured, and what it must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvtrie.gates._errors import is_finite, short
from kvtrie.gates.statistics import paired_interval

MAX_CASES: Final = 1 << 14
_MAX_COUNT: Final = 2**53
_NUMBERS: Final = {"kl_mean": (0, math.inf), "kl_p99": (0, math.inf), "top1": (0, 1)}
_COUNTS: Final = (
    *("cases", "positions", "questions", "right_full", "lost", "gained"),
    *("exact", "moved", "computed"),
)
_LISTS: Final = {"kl_excess": math.inf, "top1_drop": 1.0, "losses": 1.0}
# Sums of many rounded values.
_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a kind of edit must keep to be cleared; see ``docs/calibrate.md`` for the defaults.

    KL and top 1 are compared with those of exact reuse on the same replies.

    Attributes:
        max_loss: Task accuracy that may be lost, 0 to 1.
        max_kl: Most mean KL divergence above that of exact reuse, in nats.
        max_kl_p99: Most KL divergence at the 99th percentile above that of exact reuse, in nats.
        min_top1: Least agreement of the likeliest token, as a share of that of exact reuse.
        loss_per_kind: Whether each kind must show by itself that it loses no more than
            ``max_loss``; else it must not show that it loses more.

    Raises:
        TypeError: A threshold is of another type.
        ValueError: A threshold is out of range, or not finite.
    """

    max_loss: float = 0.01
    max_kl: float = 0.02
    max_kl_p99: float = 0.5
    min_top1: float = 0.98
    loss_per_kind: bool = False

    def __post_init__(self) -> None:
        most = {"max_loss": 1.0, "min_top1": 1.0}
        for name in LIMITS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                msg = f"Thresholds: {name} must be a number, not {short(value)}"
                raise TypeError(msg)
            if not is_finite(value) or not 0 <= value <= most.get(name, math.inf):
                limits = f"in [0, {most[name]}]" if name in most else "finite and at least 0"
                msg = f"Thresholds: {name} must be {limits}, not {short(value)}"
                raise ValueError(msg)
        said: object = self.loss_per_kind
        if not isinstance(said, bool):
            msg = f"Thresholds: loss_per_kind must be True or False, not {short(said)}"
            raise TypeError(msg)


LIMITS: Final = ("max_loss", "max_kl", "max_kl_p99", "min_top1")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one way to build KV did to the replies of one kind, against full recomputation.

    Means are over conversations, each of which has the mean of its positions. The three lists have
    what evidence is made of; those of exact reuse itself are empty.

    Attributes:
        cases: Conversations.
        positions: Next-token distributions that were compared.
        kl_mean: Mean KL divergence from full recomputation, in nats.
        kl_p99: The 99th percentile over positions.
        top1: Share of positions with the same likeliest token.
        questions: Replies that were judged.
        right_full: Replies that are right under full recomputation.
        lost: Of these, the ones that are wrong here.
        gained: Replies that are right here and wrong under full recomputation.
        exact: Prompt tokens reused exactly.
        moved: Prompt tokens reused approximately.
        computed: Prompt tokens computed.
        kl_excess: For each conversation, its mean KL less that of exact reuse.
        top1_drop: For each, the agreement of exact reuse less its own.
        losses: For each with judged replies, the share of them that was lost, less what was gained.
    """

    cases: int
    positions: int
    kl_mean: float
    kl_p99: float
    top1: float
    questions: int
    right_full: int
    lost: int
    gained: int
    exact: int
    moved: int
    computed: int
    kl_excess: tuple[float, ...] = ()
    top1_drop: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def right(self) -> int:
        """Replies that are right."""
        return self.right_full - self.lost + self.gained

    @property
    def loss(self) -> float:
        """Share of the questions that was lost; negative if more were gained."""
        return (self.lost - self.gained) / self.questions if self.questions else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the loss at a single look, paired by question."""
        return paired_interval(self.lost, self.gained, self.questions)

    @property
    def saved(self) -> float:
        """Share of the prompt tokens that were not computed."""
        total = self.exact + self.moved + self.computed
        return (self.exact + self.moved) / total if total else 0.0

    @property
    def replies(self) -> tuple[int, int, int, int]:
        """Cases, positions, questions and right answers of full recomputation: the same data."""
        return self.cases, self.positions, self.questions, self.right_full

    def flaw(self, floor: Figures | None = None) -> str | None:
        """Why these figures are impossible, with the field's name, or None.

        Args:
            floor: Those of exact reuse, from which the lists are; None: these are they.
        """
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _MAX_COUNT:
                return f"{name!r} must be a count in [0, {_MAX_COUNT}], not {short(value)}"
        for name, limits in _NUMBERS.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not is_finite(value):
                return f"{name!r} must be a finite number, not {short(value)}"
            if not limits[0] <= value <= limits[1]:
                return f"{name!r} must be in [{limits[0]}, {limits[1]}], not {short(value)}"
        wrong = self.questions - self.right_full
        for name, most, of in (
            ("right_full", self.questions, "questions"),
            ("lost", self.right_full, "right answers"),
            ("gained", wrong, "wrong answers"),
            ("questions", self.positions, "positions"),
            ("cases", min(self.positions, MAX_CASES), "positions"),
        ):
            value = getattr(self, name)
            if value > most:
                return f"{name!r} is {value}, more than the {most} {of}"
        for name, largest in _LISTS.items():
            for value in getattr(self, name):
                if type(value) not in (int, float) or not is_finite(value) or abs(value) > largest:
                    return f"{name!r} must be finite and at most {largest}, not {short(value)}"
        return None if floor is None else self._flaw_against(floor)

    def _flaw_against(self, floor: Figures) -> str | None:
        if self.replies != floor.replies:
            return f"it is of the replies {self.replies}, exact reuse of {floor.replies}"
        for name, values, mean in (
            ("kl_excess", self.kl_excess, self.kl_mean - floor.kl_mean),
            ("top1_drop", self.top1_drop, floor.top1 - self.top1),
        ):
            if len(values) != self.cases:
                return f"{name!r} has {len(values)} values for {self.cases} cases"
            if values and abs(math.fsum(values) / len(values) - mean) > _TOLERANCE * (
                1 + abs(mean)
            ):
                return f"{name!r} has another mean than its figures, {mean:.6g}"
        if len(self.losses) > self.cases or bool(self.losses) != bool(self.questions):
            return f"'losses' has {len(self.losses)} values for {self.questions} questions"
        if len(self.losses) == self.questions:
            net = math.fsum(self.losses)
            if abs(net - (self.lost - self.gained)) > _TOLERANCE * (1 + len(self.losses)):
                return f"'losses' adds up to {net:.6g}, not {self.lost - self.gained}"
        return None
