"""What this machine allows from Python, compared with what kvtrie takes for the same data.

`python benches/python/limits.py` prints and records it. A comparison of memory is `==` on two bytes
objects, which is `memcmp` with about 60 ns around it; a copy is numpy's.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from functools import partial
from importlib.metadata import version
from operator import call, eq
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures
from forest import NAMESPACE, QUICK, Forest, Shape, filled, sequence
from meter import calls_for
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt
    from workloads.documents import Tokens

T = TypeVar("T")

ROUNDS = 5 if QUICK else 200
LENGTHS = (512, 8_192, 102_400)


def time_of(act: Callable[[T], object], fresh: Callable[[], T], calls: int) -> float:
    """Median time of one call in µs, over rounds of `calls` calls on fresh inputs."""
    times = []
    for _ in range(ROUNDS):
        inputs = [fresh() for _ in range(calls)]
        start = perf_counter()
        for item in inputs:
            act(item)
        times.append(perf_counter() - start)
    return statistics.median(times) / calls * 1e6


def repeated(act: Callable[[T], object], item: T, calls: int = 64) -> float:
    """Median time in µs of the same call, repeated."""
    return time_of(act, lambda: item, calls)


def row(work: str, limit: float, kvtrie_work: str = "", ours: float | None = None) -> figures.Row:
    """One row of the table."""
    figure: figures.Row = {"work": work, "unit": "us", "limit": limit, "kvtrie": ours}
    if kvtrie_work and ours is not None:
        figure |= {"kvtrie_work": kvtrie_work, "ratio": ours / limit}
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in figure.items()
    }


def calls_in_and_out(forest: Forest) -> Iterable[figures.Row]:
    index = forest.index
    seq = sequence(forest.rows[0])
    num_evictable = type(index).num_evictable.__get__
    yield row(
        "an empty call into an extension: len(seq)",
        repeated(len, seq),
        "a property under the index's lock: num_evictable",
        repeated(num_evictable, index),
    )
    make = partial(kvtrie.TokenSequence, namespace=NAMESPACE)
    for length in (16, *LENGTHS):
        ids = document(7, length)
        yield row(
            f"copy a uint32 array of {length:,} ids: array.copy()",
            repeated(np.ndarray.copy, ids, calls_for(length)),
            f"TokenSequence of a uint32 array of {length:,} ids",
            repeated(make, ids, calls_for(length)),
        )
    for length in LENGTHS:
        listed: list[int] = document(7, length).tolist()
        yield row(
            f"a list of {length:,} ints to a uint32 array: numpy.array(list)",
            repeated(partial(np.array, dtype=np.uint32), listed, calls_for(length, 40)),
            f"TokenSequence of a list of {length:,} ints",
            repeated(make, listed, calls_for(length, 40)),
        )


def arrays_out(forest: Forest) -> Iterable[figures.Row]:
    match = forest.index.lookup(sequence(forest.rows[0]))
    ids: npt.NDArray[np.int32] = match.blocks
    blocks = type(match).blocks.__get__
    yield row(
        f"make an array of {ids.size:,} int32: numpy.empty",
        repeated(partial(np.empty, dtype=np.int32), ids.size),
    )
    yield row(
        f"copy an array of {ids.size:,} int32: array.copy()",
        repeated(np.ndarray.copy, ids),
        f"match.blocks of {ids.size:,} ids",
        repeated(blocks, match),
    )


def memory(forest: Forest) -> Iterable[figures.Row]:
    length = forest.shape.length
    name = f"{length * 4 / 1024:,.0f} KB"
    calls = calls_for(length)
    rng = random.Random(4)
    stored = [ids.tobytes() for ids in forest.rows]

    def pair(state: str) -> partial[bool]:
        """A comparison of stored bytes with fresh ones that were made without reading those."""
        drawn = forest.draw(rng, state)
        return partial(eq, stored[drawn], forest.rows[drawn].tobytes())

    def fresh(state: str) -> kvtrie.TokenSequence:
        return sequence(forest.rows[forest.draw(rng, state)])

    for state in ("warm", "cold"):
        if not pair(state)():
            message = f"memory: {name} of bytes differ from their copy"
            raise RuntimeError(message)
        yield row(
            f"compare {name} of memory, {state}",
            time_of(call, partial(pair, state), calls),
            f"lookup of {length:,} tokens in one edge, {state}, without taking its ids",
            time_of(forest.index.lookup, partial(fresh, state), calls),
        )
    source: Tokens = forest.rows[0].copy()
    yield row(
        f"copy {name} of memory, warm", repeated(partial(np.copyto, np.empty_like(source)), source)
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What this machine allows from Python.")
    parser.add_argument("--dry-run", action="store_true", help="print the figures only")
    options = parser.parse_args(arguments)
    rows: list[figures.Row] = []
    for length in LENGTHS:
        forest = filled(Shape(length, length))
        if not rows:
            rows.extend(calls_in_and_out(forest))
        rows.extend(itertools.chain(arrays_out(forest), memory(forest)))
    for figure in rows:
        ours = ""
        if figure["kvtrie"] is not None:
            ours = f"{figure['kvtrie']:>12,.3f} µs  {figure['kvtrie_work']}"
        print(f"{figure['work']:<68}{figure['limit']:>12,.3f} µs{ours}")
    if not options.dry_run:
        names = ("kvtrie", "numpy")
        figures.record("limits-python", rows, {name: version(name) for name in names})


if __name__ == "__main__":
    main()
