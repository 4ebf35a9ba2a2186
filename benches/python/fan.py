"""What a prompt costs whose windows are in no run, and what others' prompts cost meanwhile.

`python benches/python/fan.py` prints both tables; every figure is a median.

* The *fan*: each window of a text with a period of nine tokens is cached at 64 places, each near
  the end of an edge with 64 children that share one or two tokens more, so that no run has
  `min_run` tokens.
* *Neighbours*: a plan of a prompt that moved as a whole, in an index without others, with as much
  random text of others, and with the fan.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forest import BLOCK_SIZE
from hostile import MOVED, SEEDS, TENANT, VICTIM, longest_wait, looks_up, sequence
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from workloads.documents import Tokens

PERIOD = 9
LENGTHS = (1_000, 8_000, 17_000, 100_000)
# Tokens of each cached text, before the period begins, and before the children begin.
TEXT, HEAD, EDGE = 3 * BLOCK_SIZE, 19, 2 * BLOCK_SIZE
OWN = 4_000


def repeated(start: int, count: int) -> Tokens:
    return (np.arange(start, start + count) % PERIOD).astype(np.uint32)


def with_texts(texts: Sequence[Tokens]) -> kvtrie.RadixIndex:
    """An index with these texts of one tenant."""
    blocks = sum(len(text) for text in texts) // BLOCK_SIZE
    index = kvtrie.RadixIndex(blocks + 2 * OWN, BLOCK_SIZE, seed=1)
    first = 0
    for text in texts:
        count = len(text) // BLOCK_SIZE
        table = np.arange(first, first + count, dtype=np.int32)
        index.insert(sequence(text), table, num_computed=len(text), source=kvtrie.COMPUTED)
        first += count
    return index


def fan(places: int) -> list[Tokens]:
    """The texts of the fan."""
    texts = []
    unused = document(SEEDS, PERIOD * places * (HEAD + places * (TEXT - EDGE))) + PERIOD
    for residue in range(PERIOD):
        for _ in range(places):
            head, unused = unused[:HEAD], unused[HEAD:]
            for child in range(places):
                shared = EDGE + 1 + child % 2
                rest, unused = unused[: TEXT - shared], unused[TEXT - shared :]
                period = repeated(HEAD + residue, shared - HEAD)
                texts.append(np.concatenate([head, period, rest]))
    return texts


def planned(index: kvtrie.RadixIndex, seq: kvtrie.TokenSequence) -> None:
    index.plan(seq, MOVED).release()


def seconds(index: kvtrie.RadixIndex, text: Tokens, space: kvtrie.Namespace) -> float:
    """Seconds of one plan."""
    seq = sequence(text, space)
    before = perf_counter()
    plan = index.plan(seq, MOVED)
    after = perf_counter()
    plan.release()
    return after - before


def median(index: kvtrie.RadixIndex, texts: Iterable[Tokens], space: kvtrie.Namespace) -> float:
    return statistics.median(seconds(index, text, space) for text in texts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a prompt whose windows lead nowhere costs.")
    parser.add_argument("--places", type=int, default=64, help="places of a window")
    parser.add_argument("--rounds", type=int, default=21, help="plans of each kind")
    options = parser.parse_args(arguments)
    texts = fan(options.places)
    index = with_texts(texts)
    probe = looks_up(index)
    print("tokens     fan us  random us   ratio  another tenant's longest wait, ms (idle)")
    rounds = range(options.rounds)
    for length in LENGTHS:
        crafted = median(index, (repeated(turn, length) for turn in rounds), TENANT)
        random = median(index, (document(turn, length) for turn in rounds), TENANT)
        seq = sequence(repeated(0, length))
        waited = longest_wait(probe, partial(planned, index, seq))
        idle = longest_wait(probe, lambda: None)
        print(
            f"{length:>7,}{crafted * 1e6:>10.1f}{random * 1e6:>11.1f}{crafted / random:>8.2f}"
            f"{waited * 1e3:>12.2f} ({idle * 1e3:.2f})"
        )
    own = document(SEEDS + 1, OWN)
    prompt = np.concatenate([document(SEEDS + 2, 9), own])
    print(f"\na moved prompt of {OWN:,} tokens, where others have   us")
    alike = [document(SEEDS + 3 + number, TEXT) for number in range(len(texts))]
    for name, others in (("nothing", []), ("random text", alike), ("the fan", texts)):
        shared = with_texts(others)
        blocks = np.arange(OWN // BLOCK_SIZE, dtype=np.int32) + shared.num_blocks - OWN
        mine = sequence(own, VICTIM)
        shared.insert(mine, blocks, num_computed=OWN, source=kvtrie.COMPUTED)
        took = median(shared, (prompt for _ in rounds), VICTIM)
        print(f"{name:<48}{took * 1e6:>8.1f}")


if __name__ == "__main__":
    main()
