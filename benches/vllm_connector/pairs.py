"""Paired rounds: members in random order, each round kept as it ends, and how members differ.

A round measures every member once. *off* is what the others are compared with, *control* is *off*
again: their difference is the error of the method. The differences from *off* in the same round
give two estimates, each with the upper end of its one-sided 95 % interval:

* the mean, with Student's t: rare long rounds count, and so does a disturbance of the machine;
* the middle (Hodges-Lehmann: the median of the means of all pairs of differences), with the
  signed-rank test's exact distribution: one disturbed round hardly changes it. It takes the
  differences to be symmetric about their middle.

With a file, rounds survive an interruption: the next run takes those of the same settings and goes
on.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

Round = dict[str, dict[str, float]]
"""Seconds by phase, by member."""

_LEVEL = 0.95
_NORMAL = statistics.NormalDist().inv_cdf(_LEVEL)
# Seconds between two lines of progress.
_SILENCE = 10.0


@dataclass(frozen=True)
class Difference:
    """From *off*, in seconds; ``..._bound``: the upper end of the one-sided 95 % interval."""

    mean: float
    mean_bound: float
    middle: float
    middle_bound: float

    @classmethod
    def of(cls, apart: Sequence[float]) -> Difference:
        mean, error = statistics.fmean(apart), math.inf
        if len(apart) > 1:
            error = student(len(apart) - 1) * statistics.stdev(apart) / len(apart) ** 0.5
        means = sorted((one + other) / 2 for at, one in enumerate(apart) for other in apart[at:])
        rank = signed_rank(len(apart))
        bound = means[len(means) - rank] if rank else math.inf
        return cls(mean, mean + error, statistics.median(means), bound)

    def cell(self, base: float) -> str:
        parts = (
            f"{name} {1e6 * value:+,.0f} us, {100 * value / base:+.2f} %, "
            f"below **{100 * bound / base:+.2f} %**"
            for name, value, bound in (
                ("mean", self.mean, self.mean_bound),
                ("middle", self.middle, self.middle_bound),
            )
        )
        return "; ".join(parts)


def student(freedom: int) -> float:
    """The 95 % quantile of Student's t (Cornish-Fisher; to 0.002 from 7 degrees on)."""
    z = _NORMAL
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


@lru_cache(maxsize=8)
def signed_rank(count: int) -> int:
    """Which of the largest means of pairs is the upper bound of the middle; 0: there is none."""
    # How many of the 2^count signs give each sum of ranks, as shares.
    shares = [1.0]
    for rank in range(1, count + 1):
        longer = [0.5 * one for one in shares] + [0.0] * rank
        for total, share in enumerate(shares):
            longer[total + rank] += 0.5 * share
        shares = longer
    below = 0.0
    for total, share in enumerate(shares):
        below += share
        if below > 1 - _LEVEL:
            return total
    return 0


class Kept:
    """Rounds in a file of JSON lines, or nowhere; those of other settings are left alone."""

    def __init__(self, path: Path | None, settings: Mapping[str, object]) -> None:
        self._path, self._settings = path, dict(settings)

    def read(self, name: str) -> list[Round]:
        if self._path is None or not self._path.exists():
            return []
        found = []
        for line in self._path.read_text().splitlines():
            try:
                one = json.loads(line)
            except ValueError:
                # Cut where an earlier run was ended.
                continue
            if one["name"] == name and one["settings"] == self._settings:
                found.append(one["took"])
        return found

    def add(self, name: str, took: Round) -> None:
        if self._path is None:
            return
        line = json.dumps({"name": name, "settings": self._settings, "took": took})
        # The line before may have been cut.
        with self._path.open("a+") as file:
            file.write(f"\n{line}" if file.tell() else line)


def measure(
    name: str,
    members: Sequence[str],
    take: Callable[[str], dict[str, float]],
    num_rounds: int,
    rng: random.Random,
    *,
    warm_up: int,
    kept: Kept,
) -> list[Round]:
    """Rounds of this name: those that are kept, and as many more as are missing."""
    rounds = kept.read(name)[:num_rounds]
    began = said = time.monotonic()
    before = len(rounds)
    for number in range(-warm_up if before < num_rounds else 0, num_rounds - before):
        order = list(members)
        rng.shuffle(order)
        took = {member: take(member) for member in order}
        if number < 0:
            continue
        rounds.append(took)
        kept.add(name, took)
        now = time.monotonic()
        if now - said > _SILENCE:
            said = now
            each = (now - began) / (number + 1 + warm_up)
            left = each * (num_rounds - len(rounds)) / 60
            _progress(name, rounds, members, f"{len(rounds)} of {num_rounds}, {left:.0f} min left")
    return rounds


def _progress(name: str, rounds: Sequence[Round], members: Sequence[str], where: str) -> None:
    phase = list(rounds[0]["off"])[-1]
    base = statistics.fmean(one["off"][phase] for one in rounds)
    parts = []
    for member in members[1:]:
        found = difference(rounds, member, phase)
        middle, bound = 100 * found.middle / base, 100 * found.middle_bound / base
        parts.append(f"{member} {middle:+.2f} %, below {bound:+.2f} %")
    print(f"{name.format(phase)}: {where}; {'; '.join(parts)}", file=sys.stderr, flush=True)


def difference(rounds: Sequence[Round], member: str, phase: str) -> Difference:
    return Difference.of([one[member][phase] - one["off"][phase] for one in rounds])


def report(name: str, rounds: Sequence[Round], members: Sequence[str]) -> None:
    """A row of a table for each phase; ``{}`` in the name is the phase."""
    for phase in rounds[0]["off"]:
        base = statistics.fmean(one["off"][phase] for one in rounds)
        cells = [name.format(phase), str(len(rounds)), f"{base * 1e3:.3f}"]
        cells += [difference(rounds, member, phase).cell(base) for member in members[1:]]
        print("| " + " | ".join(cells) + " |", flush=True)


def header(what: str, members: Sequence[str]) -> None:
    cells = [what, "rounds", "off (ms)", *members[1:]]
    print("| " + " | ".join(cells) + " |")
    print("|" + " --- |" * len(cells), flush=True)
