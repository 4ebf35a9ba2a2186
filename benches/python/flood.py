"""What many blocks cost that collide under a hash with known constants.

`python benches/python/flood.py` prints a row for each seed and operation. Tokens 4 to 7 of 32,000
sibling blocks are the first constant that foldhash derives from a constant shared seed: a table of
edges hashed with that gives all of them the same hash. They are timed next to as many blocks with
other tokens there.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forest import BLOCK_SIZE, NAMESPACE

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIBLINGS = 32_000
REPEATS = 5
OPERATIONS = ("insert", "lookup", "evict")
# The shared seed that was a constant, and the multiplier that foldhash derives its words with.
SHARED = 0x6B76_7472_6965_0001
MULTIPLIER = 0xBE54_66CF_34E9_0C6C
FORCED_ONES = 1 << 63 | 1 << 31 | 1
PLAIN = 0x1234_5678_9ABC_DEF0


def constant() -> int:
    """The word that foldhash xors into every second word of a block."""
    word = SHARED
    for _ in range(3):
        product = word * MULTIPLIER
        word = (product >> 64 ^ product) % (1 << 64)
    return word | FORCED_ONES


def blocks(word: int, siblings: int) -> list[kvtrie.TokenSequence]:
    tokens = np.full((siblings, BLOCK_SIZE), 7, dtype=np.uint32)
    tokens[:, 0] = np.arange(siblings)
    tokens[:, 4:8] = [word % (1 << 32), word >> 32] * 2
    return [kvtrie.TokenSequence(row, NAMESPACE) for row in tokens]


def seconds(act: Callable[[], object]) -> float:
    began = perf_counter()
    act()
    return perf_counter() - began


def timed(word: int, seed: int, siblings: int) -> dict[str, float]:
    # Every operation on new sequences, which remember nothing.
    new, again = blocks(word, siblings), blocks(word, siblings)
    index = kvtrie.RadixIndex(siblings, BLOCK_SIZE, moved_runs=False, seed=seed)

    def insert() -> None:
        for block, seq in enumerate(new):
            index.insert(seq, [block], num_computed=BLOCK_SIZE, source=kvtrie.COMPUTED)

    def lookup() -> None:
        for seq in again:
            index.lookup(seq)

    def evict() -> None:
        while len(index.evict(1)):
            pass

    return dict(zip(OPERATIONS, map(seconds, (insert, lookup, evict)), strict=True))


def rows(seeds: Sequence[int], siblings: int, repeats: int) -> list[tuple[int, str, float, float]]:
    found = []
    for number, seed in enumerate(seeds):
        pairs = [
            [timed(word, seed, siblings) for word in (PLAIN, constant())] for _ in range(repeats)
        ]
        for name in OPERATIONS:
            plain, flood = (
                statistics.median(pair[side][name] for pair in pairs) / siblings * 1e6
                for side in (0, 1)
            )
            found.append((number, name, plain, flood))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="What a flood of colliding blocks costs.")
    parser.add_argument("--siblings", type=int, default=SIBLINGS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args(argv)
    seeds = [0, secrets.randbits(64), secrets.randbits(64)]
    print("seed    operation   plain, µs   flood, µs   ratio")
    for number, name, plain, flood in rows(seeds, options.siblings, options.repeats):
        seed = "random" if number else "0"
        print(f"{seed:8}{name:12}{plain:9.2f}   {flood:9.2f}   {flood / plain:5.2f}")


if __name__ == "__main__":
    main()
