"""Evidence that holds at every look, and the paired interval of a loss.

A calibration looks after every conversation and stops as soon as all verdicts are clear. Its
verdicts are tests by betting (Waudby-Smith and Ramdas, Estimating means of bounded random variables
by betting, Journal of the Royal Statistical Society B 86, 2024, 1-27): a stake is bet on each value
at odds that are fair if the mean is at the limit. By Ville's inequality it ever reaches 20 times
itself with a probability of at most 5 %, however often one looks, whatever the distribution within
its limits. Conversations count as independent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ALPHA: Final = 0.05
_FIXED: Final = 1.959963984540054
_MAX_COUNT: Final = 2**53
# The stake is split evenly among bets of these shares of what may be bet.
_SHARES: Final = (0.1, 0.3, 0.6, 0.9)
_STEPS: Final = 40


def is_below(values: Sequence[float], limit: float, most: float) -> bool:
    """Whether the values show that their mean is below a limit.

    Args:
        values: Independent values; those above ``most`` count as ``most``.
        limit: Below ``most``.
        most: The largest value that counts.

    Example:
        >>> is_below([0.001] * 30, 0.02, 0.1), is_below([0.001] * 5, 0.02, 0.1)
        (True, False)
    """
    gains = [(limit - min(value, most)) / (most - limit) for value in values]
    return _has_grown(gains)


def is_above(values: Sequence[float], limit: float, least: float) -> bool:
    """Whether the values show that their mean is above a limit.

    Args:
        values: Independent values; those below ``least`` count as ``least``.
        limit: Above ``least``.
        least: The smallest value that counts.
    """
    return is_below([-value for value in values], -limit, -least)


def upper_bound(values: Sequence[float], most: float, least: float) -> float:
    """The least limit that the values are shown to be below, or ``most``.

    Args:
        values: As for `is_below`.
        most: The largest value that counts.
        least: A bound below the mean.
    """
    low, high = least, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle < most and is_below(values, middle, most):
            high = middle
        else:
            low = middle
    return high


def _has_grown(gains: Sequence[float]) -> bool:
    """Whether the stake reaches 20 times itself; each gain is at least -1."""
    logs = [sum(math.log1p(share * gain) for gain in gains) for share in _SHARES]
    best = max(logs)
    total = best + math.log(sum(math.exp(one - best) for one in logs) / len(_SHARES))
    return total >= -math.log(ALPHA)


def paired_interval(lost: int, gained: int, questions: int) -> tuple[float, float]:
    """The 95 % interval of a loss of accuracy, paired by question.

    Tango's score interval (Statistics in Medicine 17, 1998, 891-908). It keeps its level where few
    pairs differ; normal intervals and bootstraps shrink to nothing there.

    Args:
        lost: As in `Figures`.
        gained: As in `Figures`.
        questions: All questions.

    Returns:
        Lower and upper end of ``(lost - gained) / questions``; ``(-1, 1)`` without questions.

    Example:
        >>> low, high = paired_interval(0, 0, 400)
        >>> round(high, 4)
        0.0095
    """
    if questions == 0:
        return -1.0, 1.0
    return -_upper(gained, lost, questions), _upper(lost, gained, questions)


def _upper(lost: int, gained: int, questions: int) -> float:
    """The loss at which the score statistic falls to the 2.5 % quantile."""
    low, high = (lost - gained) / questions, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        linear = (2 * questions - lost + gained) * middle - lost - gained
        constant = gained * middle * (1 - middle)
        # With 2^29 questions and more, rounding can make a 0 negative.
        root = math.sqrt(max(0.0, linear * linear + 8 * questions * constant))
        variance = questions * ((root - linear) / (2 * questions) + middle * (1 - middle))
        distance = questions * middle - (lost - gained)
        if distance * distance > _FIXED * _FIXED * variance:
            high = middle
        else:
            low = middle
    return high


def questions_needed(lost: int, gained: int, max_loss: float) -> int | None:
    """The least number of questions that bounds a loss, if no further one differs.

    Args:
        lost: As in `Figures`.
        gained: As in `Figures`.
        max_loss: What may be lost, 0 to 1.

    Returns:
        The number, or None if none below 2^53 is enough (``max_loss=0``).

    Example:
        >>> questions_needed(0, 0, 0.01), questions_needed(1, 0, 0.01)
        (381, 563)
    """
    low, high = max(1, lost + gained) - 1, _MAX_COUNT
    if paired_interval(lost, gained, high)[1] > max_loss:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if paired_interval(lost, gained, middle)[1] <= max_loss:
            high = middle
        else:
            low = middle
    return high
