"""What a search of a cluster index costs, by blocks, edges, holes and workers.

    python benches/python/paths.py [--rounds 400]

All workers hold the one prompt that is asked for, whose digests are ready. Each row changes one
thing: how many blocks it has, how many other prompts leave its path, and so cut it into edges, how
many workers there are, and how many of them lack a block. Printed: the median of a search.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import msgpack

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forest import BLOCK_SIZE, NAMESPACE

import kvtrie


class Shape(NamedTuple):
    """What is in the index."""

    blocks: int = 1_000
    branches: int = 0
    workers: int = 8
    holes: int = 0


SHAPES = (
    *(Shape(blocks=blocks) for blocks in (100, 1_000, 10_000)),
    *(Shape(branches=branches) for branches in (10, 100)),
    *(Shape(workers=workers) for workers in (64, 256, 1_024)),
    Shape(workers=256, blocks=10_000),
    *(Shape(workers=256, holes=holes) for holes in (64, 256)),
)


def stored(hashes: list[int], parent: int | None, tokens: list[int]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
    }


def packed(event: dict[str, Any]) -> bytes:
    done: bytes = msgpack.packb([0.0, [event], 0])
    return done


def filled(shape: Shape) -> tuple[kvtrie.KvIndexer, kvtrie.TokenSequence]:
    """An index, and the prompt."""
    index = kvtrie.KvIndexer(BLOCK_SIZE, b"sixteen bytes ..", moved_runs=False)
    workers = [index.add_worker(str(one), NAMESPACE) for one in range(shape.workers)]
    tokens, hashes = list(range(shape.blocks * BLOCK_SIZE)), list(range(shape.blocks))
    whole = packed(stored(hashes, None, tokens))
    for worker in workers:
        index.apply(worker, whole)
    for branch in range(shape.branches):
        parent = branch * shape.blocks // shape.branches
        other = stored([shape.blocks + branch], parent, [0] * BLOCK_SIZE)
        index.apply(workers[0], packed(other))
    half = shape.blocks // 2
    for worker in workers[: shape.holes]:
        gone = [half + 7 * worker % half]
        index.apply(worker, packed({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}))
    return index, kvtrie.TokenSequence(tokens, NAMESPACE)


def measured(shape: Shape, rounds: int) -> tuple[float, int]:
    """Seconds of a search, and the tokens that workers were found to hold."""
    index, prompt = filled(shape)
    digests, times = index.digests(prompt), []
    for _ in range(rounds):
        began = perf_counter()
        index.find_matches(digests)
        times.append(perf_counter() - began)
    return statistics.median(times), int(index.find_matches(digests).exact.sum())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args(arguments)
    print("blocks  branches  workers  holes       us")
    for shape in SHAPES:
        seconds, _ = measured(shape, options.rounds)
        row = f"{shape.blocks:6}{shape.branches:10}{shape.workers:9}{shape.holes:7}"
        print(f"{row}{1e6 * seconds:9.2f}", flush=True)


if __name__ == "__main__":
    main()
