"""Recorded traffic over a fleet of workers, by what the router knows of their caches.

    python benches/python/simulate.py LOG --workers 8 --pool 600000 --speed 8000

LOG is any file that `kvtrie replay` reads and that has times. Requests arrive at these times. Each
worker has a `RadixIndex` of its own, so blocks leave in kvtrie's order: dead reasoning first, which
leaves holes. It packs what is stored and removed as vLLM's events, and a `KvIndexer` gets these
bytes.

A router sends each request to the worker with the least

    prompt - exact - moved + load weight * outstanding

in tokens: what the worker would compute, and what is expected to be computed there for prompts that
were sent to it and have not ended. Ties go to the worker with less outstanding, then to the one
that has computed less. Routers differ in what they know of `exact` and `moved` when a request
arrives:

* `round robin`: nothing; it takes workers in turn;
* `prefix only`: the blocks of the prompts that it sent to each worker, of as many as a pool has,
  least recently used first, and restarts. It hears no event, like gateways that keep trees of
  their own;
* `KvIndexer`: the scores of one `KvIndexer`, which are of what is cached now;
* `KvIndexer and sent`: the same, or as much as the prompt has in common with one that was sent to
  the worker and has not ended, if that is more;
* `oracle`: each worker's own index, asked without a touch, and its queue.

A worker computes one prompt at a time, in order of arrival, at `--speed` tokens per second after
`--overhead` seconds. It looks a prompt up when it begins it, and its blocks are cached when it has
ended. Replies that the trace has are cached then, too, and take no time: decoding is not simulated.
A worker that restarts has an empty pool, begins its current prompt again, and keeps its queue;
routers hear of it at once.

Where LOG names blocks and shows no tokens, moved runs are not visible. `--overlay` adds synthetic
reasoning and shows them.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.fleet import Setting, simulated
from simulation.routers import MOST_WORKERS, ROUTERS

from kvtrie.replay import OVERLAYS, TraceError, from_keys, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulation.fleet import Outcome

    from kvtrie.replay import Trace


def table(outcomes: Sequence[Outcome], *, shows_moved: bool) -> str:
    """Rows in Markdown."""
    names = ["router", "hit rate", "exact", "moved", "spread", "wait p50, p99"]
    names += ["first token p50, p99", "claims over, under"]
    lines = [f"| {' | '.join(names)} |", f"| --- |{' ---: |' * (len(names) - 1)}"]
    for one in outcomes:
        moved = f"{one.moved / one.prompt:.1%}" if shows_moved else "not visible"
        waits, firsts = (np.percentile(each, [50, 99]) for each in (one.waits, one.firsts))
        wrong = f"{one.over:,}, {one.under:,} of {one.claims:,}" if one.claims else "none made"
        lines.append(
            f"| {one.router} | {one.hit_rate:.1%} | {one.exact / one.prompt:.1%} | {moved} |"
            f" {one.spread:.2f} | {waits[0]:.2f}, {waits[1]:.2f} s |"
            f" {firsts[0]:.2f}, {firsts[1]:.2f} s | {wrong} |"
        )
    return "\n".join(lines)


def notes(outcomes: Sequence[Outcome], *, shows_moved: bool) -> list[str]:
    """What the table does not say."""
    found = []
    for one in outcomes:
        said = f"{one.router}: at most {one.holes:,} holes at a time"
        if one.over or one.under:
            wrong = f"{one.over_tokens:,} tokens too much, {one.under_tokens:,} too little"
            said += f"; claimed {wrong}"
        if shows_moved and one.claimed_moved:
            said += f"; moved tokens: claimed {one.claimed_moved:,}, found {one.moved:,}"
        found.append(said)
    if not shows_moved:
        found.append("moved runs not visible: the trace names blocks and shows no tokens")
    return found


def _number(least: float, most: float = math.inf) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (least <= found <= most and math.isfinite(found)):
            upper = "" if most == math.inf else f" and at most {most:,g}"
            message = f"{text!r} is not a finite number of at least {least:,g}{upper}"
            raise argparse.ArgumentTypeError(message)
        return found

    return number


def _count(least: int, most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            message = f"{text!r} is not an integer from {least:,} to {most:,}"
            raise argparse.ArgumentTypeError(message)
        return found

    return count


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="simulate.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("log", type=Path)
    many = _count(1, MOST_WORKERS)
    parser.add_argument("--workers", type=many, default=8)
    parser.add_argument(
        "--pool", type=_count(1, 2**31), default=600_000, help="tokens of each worker's pool"
    )
    parser.add_argument(
        "--speed", type=_number(1e-3), default=8000.0, help="prompt tokens per second and worker"
    )
    parser.add_argument(
        "--overhead", type=_number(0), default=0.02, help="seconds of each prompt besides"
    )
    parser.add_argument("--load-weight", type=_number(0), default=1.0)
    parser.add_argument(
        "--speedup", type=_number(1e-9), default=1.0, help="divides the times between arrivals"
    )
    parser.add_argument("--restarts", type=_count(0, 1_000_000), default=0)
    parser.add_argument("--seed", type=_count(0, 2**63), default=0)
    parser.add_argument("--first", type=_count(1, 2**31), help="only so many requests")
    parser.add_argument("--overlay", choices=OVERLAYS, help="synthetic reasoning")
    parser.add_argument("--block-size", type=_count(1, 4096))
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    options = parser.parse_args(arguments)
    try:
        trace = read_trace(options.log, options.block_size)
        if options.first is not None:
            trace = first(trace, options.first)
        if options.overlay is not None:
            trace = OVERLAYS[options.overlay].over(trace)
        setting = Setting(
            workers=options.workers,
            num_blocks=max(1, options.pool // trace.block_size),
            speed=options.speed,
            overhead=options.overhead,
            load_weight=options.load_weight,
            speedup=options.speedup,
            restarts=options.restarts,
            seed=options.seed,
        )
        outcomes = [simulated(trace, setting, one) for one in options.routers]
    except TraceError as error:
        parser.exit(2, f"simulate.py: {error}\n")
    synthetic = f", replies and reasoning synthetic ({trace.synthetic})" if trace.synthetic else ""
    print(
        f"{Path(trace.path).name}{synthetic}: {len(trace.requests):,} requests of "
        f"{outcomes[0].prompt:,} tokens, {setting.workers} workers of "
        f"{setting.num_blocks * trace.block_size:,} tokens, {setting.restarts} restarts\n"
    )
    print(table(outcomes, shows_moved=trace.shows_tokens))
    print()
    print("\n".join(notes(outcomes, shows_moved=trace.shows_tokens)))


def first(trace: Trace, count: int) -> Trace:
    """The first requests of a trace."""
    kept = trace.requests[:count]
    chains = [one.cached.astype(np.uint64) for one in kept]
    prompts = [keys[: len(one.prompt)] for keys, one in zip(chains, kept, strict=True)]
    return from_keys(trace, kept, prompts, chains)


if __name__ == "__main__":
    main()
