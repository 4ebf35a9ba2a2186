"""Times two sides of the same work, alternating in one process."""

import gc
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from workloads.registry import named

Row: TypeAlias = dict[str, Any]
# What a peer's calls take and return: their packages have no types.
Untyped: TypeAlias = Any
Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Side(Generic[Prepared]):
    """One side of a comparison.

    Args:
        prepare: Makes one call's argument, outside the clock: a fresh one each time.
        call: The work, inside the clock.
        settle: Takes the argument and the result, outside the clock, and restores the state for
            the next call.
        check: Takes the argument and the result, and raises where the result is wrong: for the
            calls of the first round, before anything is timed, and for those of the last.
        units: How many units of work a call does, from its argument: its time is divided by them.
    """

    prepare: Callable[[], Prepared]
    call: Callable[[Prepared], object]
    check: Callable[[Prepared, Any], None]
    settle: Callable[[Prepared, Any], None] | None = None
    units: Callable[[Prepared], int] = lambda _argument: 1


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 101
    quick: bool = False

    def of(self, full: int, quick: int) -> int:
        return quick if self.quick else full


class WrongResultError(Exception):
    """A side returned a wrong result, so its time means nothing."""


def expect(answer: object, expected: object, what: str) -> None:
    """Check one value of a result."""
    if answer != expected:
        text = f"{what}: {answer!r} instead of {expected!r}"
        raise WrongResultError(text)


def compare(
    ours: Side[Any],
    theirs: Side[Any],
    effort: Effort,
    *,
    calls: int = 1,
    rounds: int | None = None,
    warm: bool = False,
) -> Row:
    """Time both sides alternately on the same work.

    The side that comes first alternates, and the cost of reading the clock is subtracted. A round
    prepares `calls` arguments, times that many calls as one interval of this thread's processor
    time, and settles them.

    A warm round repeats one query: it times and drops each call by itself, after one call that is
    not timed and reloads the caches. It uses wall time, which is cheaper to read.
    """
    sides = {"kvtrie": ours, "theirs": theirs}
    clock = time.perf_counter_ns if warm else time.thread_time_ns
    timed = _warm_round if warm else _round
    for side in sides.values():
        timed(side, calls, clock, 0, check=True)
    count = effort.of(rounds or effort.rounds, 3)
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    overhead = _overhead(clock)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(count):
            for name in names if number % 2 else reversed(names):
                last = number == count - 1
                spent = timed(sides[name], calls, clock, overhead, check=last)
                times[name].append(spent / 1e3)
    finally:
        if collecting:
            gc.enable()
    row: Row = {"unit": "us", "rounds": count, "calls": calls}
    for name, values in times.items():
        row |= _spread(name, values)
    row["ratio"] = row["theirs"] / row["kvtrie"]
    return row


def pauses(
    ours: Side[Any], theirs: Side[Any], effort: Effort, *, rounds: int, their_rounds: int
) -> Row:
    """Time single calls one by one: the median, the 99th percentile and the longest.

    Times are wall time, because every cause of a pause counts. The sides alternate until the one
    with fewer rounds has finished.
    """
    counts = {"kvtrie": effort.of(rounds, 20), "theirs": effort.of(their_rounds, 20)}
    sides = {"kvtrie": ours, "theirs": theirs}
    clock = time.perf_counter_ns
    for side in sides.values():
        _round(side, 1, clock, 0, check=True)
    overhead = _overhead(clock)
    times: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for number in range(max(counts.values())):
            for name, side in sides.items():
                if number < counts[name]:
                    spent = _round(side, 1, clock, overhead, check=number == counts[name] - 1)
                    times[name].append(spent / 1e3)
    finally:
        gc.enable()
    row: Row = {"unit": "us", "rounds": counts["kvtrie"], "calls": 1}
    for name, values in times.items():
        row |= _spread(name, values)
        row[f"{name}_p99"] = percentile(values, 99)
        row[f"{name}_max"] = max(values)
    row["ratio"] = row["theirs"] / row["kvtrie"]
    return row


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def report(row: Row) -> Row:
    """Print one row and return it."""
    goal = row.get("goal")
    wanted = "" if goal is None else f"  (goal {goal:g})"
    print(
        f"{row['peer']:<16} {named(row['work']):<98} kvtrie {row['kvtrie']:>10.3f}  "
        f"theirs {row['theirs']:>11.3f} {row['unit']}  ratio {row['ratio']:>8.1f}{wanted}",
        flush=True,
    )
    if "kvtrie_max" in row:
        print(
            f"{'':16}   single calls: kvtrie p99 {row['kvtrie_p99']:.2f}, "
            f"longest {row['kvtrie_max']:.1f}; theirs p99 {row['theirs_p99']:.1f}, "
            f"longest {row['theirs_max']:.1f}",
            flush=True,
        )
    return row


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def _round(
    side: Side[Any], calls: int, clock: Callable[[], int], overhead: float, *, check: bool
) -> float:
    call = side.call
    prepared = [side.prepare() for _ in range(calls)]
    answers: list[object] = [None] * calls
    units = sum(map(side.units, prepared))
    start = clock()
    for number, argument in enumerate(prepared):
        answers[number] = call(argument)
    end = clock()
    for argument, answer in zip(prepared, answers, strict=True):
        if check:
            side.check(argument, answer)
        if side.settle is not None:
            side.settle(argument, answer)
    return (end - start - overhead) / units


def _warm_round(
    side: Side[Any], calls: int, clock: Callable[[], int], overhead: float, *, check: bool
) -> float:
    call, prepare = side.call, side.prepare
    spent = 0.0
    for number in range(calls + 1):
        argument = prepare()
        start = clock()
        answer = call(argument)
        end = clock()
        if number:
            spent += (end - start - overhead) / side.units(argument) / calls
        if check:
            side.check(argument, answer)
        if side.settle is not None:
            side.settle(argument, answer)
        del argument, answer
    return spent


def _overhead(clock: Callable[[], int]) -> float:
    empty = []
    for _ in range(501):
        start = clock()
        empty.append(clock() - start)
    return statistics.median(empty)


def _spread(name: str, values: list[float]) -> Row:
    return {
        name: statistics.median(values),
        f"{name}_p10": percentile(values, 10),
        f"{name}_p90": percentile(values, 90),
    }
