"""Many operations of the index against the model, with their distribution.

    python -m tests.property.soak --operations 1000000

Each episode is an index of a random size with a random sequence of calls, every result compared
with the model, drained at its end. `--plan-weight` has more of the calls plan, `--groups` gives
each index one to three groups of layers. A mismatch prints the episode that shows it; run it alone
with `--first N --episodes 1` and the same options. The exit status is 1 when there was one.
"""

from __future__ import annotations

import argparse
import collections
import math
import multiprocessing
import sys
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.property.group_twin import GroupTwin, random_groups
from tests.property.twin import MANY_CANDIDATES, DroppedError, MismatchError, Twin

SHAPES = (
    "depth",
    "branches",
    "fan",
    "indexed",
    "pinned",
    "condemned",
    "waiting",
    "evictable",
    "approximate",
    "dead",
    "holes",
    "live_plans",
)
SAMPLE_EVERY = 8
SHARES = (0.5, 0.9, 0.99, 1.0)


@dataclass
class Report:
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    shapes: dict[str, collections.Counter[int]] = field(
        default_factory=lambda: {name: collections.Counter() for name in SHAPES}
    )
    mismatches: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.counts += other.counts
        for name in SHAPES:
            self.shapes[name] += other.shapes[name]
        self.mismatches += other.mismatches


def episode(
    number: int,
    hash_bits: int | None,
    steps: int,
    plan_weight: int = 1,
    groups: bool = False,
) -> Report:
    rng = Random(number)
    report = Report()
    # One in eight has few blocks, small ones, and deep holes: the bound on holes is met there.
    hollow = rng.random() < 1 / 8
    # Most have room for long histories: runs that move are met there.
    long = not hollow and rng.random() < 2 / 3
    block_size = 1 if hollow else rng.choice([1, 1, 2, 2, 3, 4, 5, 7, 8, 16])
    num_blocks = rng.choice([2, 4, 8, 12, 16, 24, 32])
    if hollow:
        num_blocks = rng.randint(2, 8)
    elif long:
        num_blocks = rng.choice([240, 400]) // max(4, block_size)
    shape: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "hash_bits": rng.choice([0, 4, 8, 64]) if hash_bits is None else hash_bits,
        "seed": rng.getrandbits(64),
        "mirror": number % 4 == 0,
        "alphabet": 3 if hollow else rng.choice([1, 2, 2, 3, 4]),
        "max_tokens": 64 if long else min(64, block_size * rng.choice([4, 8, 16, 32])),
        "holes": 3.0 if hollow else 0.2,
        "min_run": rng.choice([8, 8, 8, 9, 12, 16]),
        "moved_runs": rng.random() < 7 / 8,
        "max_candidates": rng.choice([MANY_CANDIDATES] * 5 + [64, 16, 4]),
        "long": long,
        "plan_weight": plan_weight,
    }
    twin: Twin
    if groups:
        twin = GroupTwin(rng, groups=random_groups(rng, block_size, num_blocks), **shape)
    else:
        twin = Twin(rng, **shape)
    try:
        for i in range(steps):
            twin.step()
            if i % SAMPLE_EVERY == 0:
                for name, value in twin.shape().items():
                    if name in SHAPES:
                        report.shapes[name][value] += 1
        twin.drain()
        report.counts["episodes drained, no block lost"] += 1
    except DroppedError:
        report.counts["episodes ended by dropped candidates"] += 1
        twin.abandon()
    except MismatchError as error:
        report.mismatches.append(f"episode {number}: {error}")
        twin.abandon()
    except BaseException as error:  # a panic of the extension is a finding as well
        if isinstance(error, KeyboardInterrupt):
            raise
        report.mismatches.append(f"episode {number}: {type(error).__name__}: {error}")
        twin.abandon()
    report.counts += twin.counts
    report.counts["episodes"] += 1
    return report


def _worker(task: tuple[int, int | None, int, int, bool]) -> Report:
    return episode(*task)


def run(
    operations: int,
    *,
    first: int = 0,
    episodes: int | None = None,
    hash_bits: int | None = None,
    steps: int = 400,
    plan_weight: int = 1,
    groups: bool = False,
    jobs: int = 1,
    seconds: float = math.inf,
) -> Report:
    total, end = Report(), time.monotonic() + seconds
    count = episodes if episodes is not None else operations // steps + 1
    tasks = [(first + i, hash_bits, steps, plan_weight, groups) for i in range(count)]
    if jobs == 1:
        for task in tasks:
            total.add(_worker(task))
            if time.monotonic() > end:
                break
        return total
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for report in pool.imap_unordered(_worker, tasks, chunksize=8):
            total.add(report)
            if time.monotonic() > end:
                break
    return total


def describe(report: Report, seconds: float) -> str:
    calls, episodes = report.counts["calls"], report.counts["episodes"]
    lines = [
        f"{calls} operations compared in {episodes} episodes, {seconds:.0f} s",
        f"{len(report.mismatches)} mismatches",
        "",
        f"{'at a moment':<24}" + "".join(f"{f'p{share * 100:g}':>8}" for share in SHARES),
    ]
    for name in SHAPES:
        values = sorted(report.shapes[name].elements())
        at = [values[max(0, round(share * len(values)) - 1)] if values else 0 for share in SHARES]
        lines.append(f"  {name:<22}" + "".join(f"{value:>8}" for value in at))
    plans = report.counts["plans"]
    lines += ["", f"of {plans} plans"]
    lines += [
        f"  {name.removeprefix('plans').strip(' ,'):<32}{count / plans:>10.1%}"
        for name, count in sorted(report.counts.items())
        if name.startswith(("plans ", "plans,"))
    ]
    lines += ["", "in all"]
    lines += [
        f"  {name:<32}{count:>10}"
        for name, count in sorted(report.counts.items())
        if not name.startswith(("plans ", "plans,"))
    ]
    lines += ["", *(mismatch.partition(":")[0] for mismatch in report.mismatches[3:])]
    lines += ["", *report.mismatches[:3]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first episode")
    parser.add_argument("--episodes", type=int, default=None, help="so many episodes instead")
    parser.add_argument(
        "--hash-bits", type=int, default=None, help="0, 4, 8 or 64; else they alternate"
    )
    parser.add_argument("--steps", type=int, default=400, help="calls an episode")
    parser.add_argument(
        "--plan-weight", type=int, default=1, help="plans and releases so many times as often"
    )
    parser.add_argument("--groups", action="store_true", help="indexes with groups of layers")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after the episode that ends later"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    began = time.perf_counter()
    report = run(
        args.operations,
        first=args.first,
        episodes=args.episodes,
        hash_bits=args.hash_bits,
        steps=args.steps,
        plan_weight=args.plan_weight,
        groups=args.groups,
        jobs=args.jobs,
        seconds=args.seconds,
    )
    sys.stdout.write(describe(report, time.perf_counter() - began) + "\n")
    return 1 if report.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
