"""The interface of choosers, and the share of a budget that goes to fronts of runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvtrie._core import ReusePlan

_APPROXIMATE, _COMPUTE = 1, 2

WINDOW: Final = 5
"""Positions over which `smoothed` averages: tokens that matter come in phrases."""


@dataclass(frozen=True)
class Moved:
    """What a plan copies approximately.

    Attributes:
        tokens: The prompt, int64 ``[n]``.
        segments: ``ReusePlan.segments``, read before ``recompute``.
        num_in_place: Tokens of ``ReusePlan.blocks``.
        context: For a segment's number, the tokens of the path that it is copied from, at least
            down to the segment's end (``RadixIndex.path_tokens``); None if it is not known.
    """

    tokens: NDArray[np.int64]
    segments: NDArray[np.void]
    num_in_place: int
    context: Callable[[int], NDArray[np.integer[Any]] | None] = lambda _: None

    @classmethod
    def of(cls, plan: ReusePlan, tokens: NDArray[np.integer[Any]], block_size: int) -> Moved:
        """What a plan copies, without contexts.

        Args:
            plan: A live plan.
            tokens: The prompt's ids.
            block_size: Of the index.
        """
        in_place = len(plan.blocks) * block_size
        return cls(np.asarray(tokens, dtype=np.int64), plan.segments, in_place)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The moved segments' numbers, int64."""
        is_moved = self.segments["class"] == _APPROXIMATE
        return np.flatnonzero(is_moved & (self.segments["start"] >= self.num_in_place))

    @property
    def runs(self) -> NDArray[np.int64]:
        """The moved runs, int64 ``[runs, 2]``: touching segments of one delta are one run."""
        runs: list[list[int]] = []
        delta = None
        for segment in self.segments[self.numbers]:
            if runs and runs[-1][1] == segment["start"] and delta == segment["delta"]:
                runs[-1][1] = int(segment["end"])
            else:
                runs.append([int(segment["start"]), int(segment["end"])])
            delta = segment["delta"]
        return np.array(runs, dtype=np.int64).reshape(-1, 2)

    @property
    def positions(self) -> NDArray[np.int64]:
        """All moved positions, ascending, int64."""
        parts = [np.arange(start, end) for start, end in self.runs]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @property
    def gaps(self) -> NDArray[np.int64]:
        """What the plan computes anyway, int64 ``[gaps, 2]``."""
        parts = self.segments[self.segments["class"] == _COMPUTE]
        return np.stack([parts["start"], parts["end"]], axis=1).astype(np.int64)


class Chooser(Protocol):
    """Chooses tokens to compute."""

    def choose(self, moved: Moved, share: float) -> NDArray[np.int64]:
        """Choose about ``share`` of the moved tokens.

        Args:
            moved: What the plan moves.
            share: 0 to 1.

        Returns:
            Ranges for ``ReusePlan.recompute``: int64 ``[ranges, 2]``, ascending and disjoint.
        """


class Fronts:
    """The first N tokens of each run, N the same for all: as the index with ``repair="fronts"``.

    KV differs most at the front of a run, so a share does better than any fixed N. Costs
    O(runs log runs). Source: EPIC (arXiv 2410.15332) recomputes a fixed first N of each chunk.
    """

    def choose(self, moved: Moved, share: float) -> NDArray[np.int64]:
        """See ``Chooser``."""
        runs = moved.runs
        wanted = math.ceil(share * int((runs[:, 1] - runs[:, 0]).sum()))
        return as_ranges(front_positions(runs, wanted))


class Scored:
    """A part of the budget on fronts of runs, the rest on the tokens of highest score.

    Equal scores go to the lower position. Costs a sort of the moved tokens next to the scores.

    Args:
        score: Scores of ``moved.positions``, float ``[tokens]``; not-a-number counts as lowest.
        fronts: The part of the budget that goes to fronts, 0 to 1.

    Raises:
        ValueError: ``fronts`` is out of range.
    """

    def __init__(
        self, score: Callable[[Moved], NDArray[np.floating[Any]]], fronts: float = 0.5
    ) -> None:
        if not 0 <= fronts <= 1:
            msg = f"Scored: fronts must be from 0 to 1, not {fronts}"
            raise ValueError(msg)
        self._score = score
        self._fronts = fronts

    def choose(self, moved: Moved, share: float) -> NDArray[np.int64]:
        """See ``Chooser``."""
        positions = moved.positions
        wanted = math.ceil(share * len(positions))
        fronts = front_positions(moved.runs, math.floor(self._fronts * wanted))
        scores = np.nan_to_num(self._score(moved).astype(np.float64), nan=-np.inf)
        scores[np.isin(positions, fronts)] = -np.inf
        best = np.argsort(-scores, kind="stable")[: max(0, wanted - len(fronts))]
        best = best[scores[best] > 0]
        chosen = np.union1d(fronts, positions[best])
        if len(chosen) < wanted:
            # Too few tokens have a score: the rest is spent on longer fronts.
            more = front_positions(moved.runs, wanted)
            more = more[~np.isin(more, chosen)][: wanted - len(chosen)]
            chosen = np.union1d(chosen, more)
        return as_ranges(chosen)


class Probed(Scored):
    """What ``repair="probe"`` does with the probe's scores: a quarter fronts, the rest by score.

    Scores are `smoothed` first. Both were chosen on the tuning conversations of ``make fidelity``.
    Gate files have the version of what is done here (``CHOOSERS`` of ``kvtrie.gates``): a change of
    it raises that.

    Args:
        scores: The probe's, of ``moved.positions``, float ``[tokens]``.
    """

    def __init__(self, scores: NDArray[np.floating[Any]]) -> None:
        super().__init__(lambda moved: smoothed(scores, moved.positions), fronts=0.25)
        self._are_finite = bool(np.isfinite(scores).all())


class Adaptive(Probed):
    """What ``repair="adaptive"`` does: as `Probed`, and more of what changed more.

    The share is that of a plan whose smoothed scores have a mean of ``TYPICAL``. It grows and
    shrinks with the mean, up to ``MOST`` times the share that was asked for. So one cut costs
    little, and a new order of the text much. Where a score is not finite, nobody knows how much
    changed: the share is the one that was asked for.
    """

    TYPICAL: Final = 0.04
    """The mean over hard edits of the tuning conversations of ``make fidelity``."""

    MOST: Final = 2.0

    def choose(self, moved: Moved, share: float) -> NDArray[np.int64]:
        """See ``Chooser``."""
        if not self._are_finite:
            return super().choose(moved, share)
        scores = self._score(moved)
        change = float(scores.mean()) if len(scores) else 0.0
        return super().choose(moved, min(1.0, share * min(self.MOST, change / self.TYPICAL)))


def smoothed(
    scores: NDArray[np.floating[Any]], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The mean of each score and of those at the ``WINDOW`` positions around it, as far as moved.

    Args:
        scores: Of ``positions``, float ``[tokens]``; what is not finite counts as 0.
        positions: Ascending, int64 ``[tokens]``.
    """
    known = np.nan_to_num(np.asarray(scores, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    sums = np.concatenate([[0.0], np.cumsum(known)])
    first = np.searchsorted(positions, positions - WINDOW // 2)
    end = np.searchsorted(positions, positions + WINDOW // 2, side="right")
    means: NDArray[np.float64] = (sums[end] - sums[first]) / (end - first)
    return means


def front_positions(runs: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """The first N positions of each run, for the least N that gives ``wanted`` or more."""
    if wanted <= 0 or not len(runs):
        return np.empty(0, dtype=np.int64)
    lengths = np.sort(runs[:, 1] - runs[:, 0])
    left = wanted
    first = int(lengths[-1])
    for at, length in enumerate(lengths.tolist()):
        each = -(-left // (len(lengths) - at))
        if length >= each:
            first = each
            break
        left -= length
    return np.concatenate([np.arange(start, min(start + first, end)) for start, end in runs])


def as_ranges(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending positions as ranges ``[ranges, 2]``."""
    if not len(positions):
        return np.empty((0, 2), dtype=np.int64)
    edges = np.flatnonzero(np.diff(positions) > 1)
    starts = positions[np.concatenate([[0], edges + 1])]
    ends = positions[np.concatenate([edges, [len(positions) - 1]])] + 1
    return np.stack([starts, ends], axis=1).astype(np.int64)
