"""Grades: how strict the policy was that approximate KV was built under."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie import ReusePolicy


class Grade(NamedTuple):
    """The fields of a policy that bound approximate KV; `kinds` has a bit for each forbidden one.

    `shared_prefix` is 0 with `scope="namespace"`. Of the shares, by who chooses what is computed,
    only that of the policy's `repair` is not 0.
    """

    min_run: float
    max_hops: int
    max_approximate_share: float
    recompute_first: float
    recompute_last: float
    max_cuts: float
    max_lost_context: float
    max_new_context: float
    shared_prefix: float
    shares: tuple[float, ...]
    kinds: int

    def is_at_least_as_strict_as(self, other: Grade) -> bool:
        return (
            self.min_run >= other.min_run
            and self.max_hops <= other.max_hops
            and self.max_approximate_share <= other.max_approximate_share
            and self.recompute_first >= other.recompute_first
            and self.recompute_last >= other.recompute_last
            and self.max_cuts <= other.max_cuts
            and self.max_lost_context <= other.max_lost_context
            and self.max_new_context <= other.max_new_context
            and self.shared_prefix >= other.shared_prefix
            and all(mine >= its for mine, its in zip(self.shares, other.shares, strict=True))
            and other.kinds & ~self.kinds == 0
        )


LAXEST = Grade(0, 255, 1.0, 0, 0, math.inf, 1.0, 1.0, 0, (0.0,) * 5, 0)
"""The grade of a policy that bounds nothing, and of KV whose policy is not known."""


_REPAIRS = ("fronts", "ngrams", "probe", "question", "adaptive")


def grade_of(policy: ReusePolicy | None, known: Iterable[str]) -> Grade:
    """The grade of an approximate policy, with the kinds that an index knows, by their bits."""
    if policy is None:
        return LAXEST
    return Grade(
        policy.min_run or 0,
        policy.max_hops,
        policy.max_approximate_share,
        policy.recompute_first,
        policy.recompute_last,
        math.inf if policy.max_cuts is None else policy.max_cuts,
        policy.max_lost_context,
        policy.max_new_context,
        policy.shared_prefix if policy.scope == "conversation" else 0,
        tuple(policy.recompute_share * (policy.repair == name) for name in _REPAIRS),
        sum(1 << bit for bit, kind in enumerate(known) if kind in policy.forbid_kinds),
    )


def meet(grades: Iterable[Grade]) -> Grade:
    """The strictest grade that all are at least as strict as; of none, the strictest of all."""
    huge = math.inf
    # All bits: it forbids the kinds that are not known yet, too.
    met = Grade(huge, 0, 0.0, huge, huge, 0, 0.0, 0.0, huge, (huge,) * 5, -1)
    for grade in grades:
        met = Grade(
            min(met.min_run, grade.min_run),
            max(met.max_hops, grade.max_hops),
            max(met.max_approximate_share, grade.max_approximate_share),
            min(met.recompute_first, grade.recompute_first),
            min(met.recompute_last, grade.recompute_last),
            max(met.max_cuts, grade.max_cuts),
            max(met.max_lost_context, grade.max_lost_context),
            max(met.max_new_context, grade.max_new_context),
            min(met.shared_prefix, grade.shared_prefix),
            tuple(map(min, met.shares, grade.shares)),
            met.kinds & grade.kinds,
        )
    return met
