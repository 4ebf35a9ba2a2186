"""Replays recorded traffic: `python benches/python/traces.py --traces FOLDER`.

A trace names the blocks of each request by ids. Every id is mapped to its own block of token ids. A
request is looked up, planned, given blocks (which evicts), inserted and released; the clock starts
when its token ids are in a numpy array. With room for everything, the share of blocks found must be
what the trace allows.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures
from forest import NAMESPACE
from workloads.documents import documents

import kvtrie

if TYPE_CHECKING:
    import numpy.typing as npt

    Requests = list[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Trace:
    """A recorded trace: its file, tokens of a block, and the share of hits known for it."""

    name: str
    block_size: int
    ideal: float


TRACES = (
    Trace("agentic40", 64, 0.961),
    Trace("mooncake_conversation", 512, 0.366),
    Trace("mooncake_synthetic", 512, 0.640),
)
# Shares of the distinct blocks that the pool holds; None is room for all.
POOLS = (None, 0.25)


@dataclass
class Replay:
    num_blocks: int = 0
    hit_blocks: int = 0
    evicted: int = 0
    sequence: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)
    insert: list[float] = field(default_factory=list)
    turn: list[float] = field(default_factory=list)


def read(path: Path) -> Requests:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [np.array(json.loads(line)["hash_ids"], dtype=np.int64) for line in lines]


def ideal_share(requests: Requests) -> float:
    """The share of blocks that a prefix cache without limits finds, by a set of ids."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        ids = request.tolist()
        hits += next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
    return hits / sum(len(request) for request in requests)


def replay(requests: Requests, table: npt.NDArray[np.uint32], num_blocks: int) -> Replay:
    """Serve the requests one after the other."""
    block_size = table.shape[1]
    index = kvtrie.RadixIndex(num_blocks, block_size, moved_runs=False, seed=0)
    pool = kvtrie.BlockAllocator(num_blocks)
    result = Replay()
    indexed = 0
    for request in requests:
        ids = table[request].ravel()
        began = perf_counter()
        seq = kvtrie.TokenSequence(ids, NAMESPACE)
        made = perf_counter()
        match = index.lookup(seq)
        found = match.blocks
        looked_up = perf_counter()
        plan = index.plan(seq)
        in_place = plan.blocks.size
        fresh = pool.allocate(plan.num_new_blocks, evict_from=index)
        allocated = perf_counter()
        done = index.insert(
            seq, fresh, num_computed=len(seq), start=in_place * block_size, source=plan
        )
        duplicates = done.duplicates
        inserted = perf_counter()
        plan.release()
        pool.free(duplicates)
        ended = perf_counter()
        result.sequence.append(made - began)
        result.lookup.append(looked_up - made)
        result.insert.append(inserted - allocated)
        result.turn.append(ended - began)
        result.num_blocks += request.size
        result.hit_blocks += found.size
        before, indexed = indexed, index.num_evictable
        result.evicted += before + fresh.size - duplicates.size - indexed
    return result


def rows_of(name: str, result: Replay, ideal: float) -> list[figures.Row]:
    """The rows of one replay."""
    notes = {"requests": len(result.turn), "blocks": result.num_blocks}
    rows: list[figures.Row] = [
        {
            "work": f"{name}: share of blocks found",
            "unit": "share",
            "kvtrie": round(result.hit_blocks / result.num_blocks, 4),
            "ideal": round(ideal, 4),
            "evicted": result.evicted,
            **notes,
        }
    ]
    parts = {
        "TokenSequence of a uint32 array": result.sequence,
        "lookup": result.lookup,
        "insert": result.insert,
        "whole turn": result.turn,
    }
    for part, seconds in parts.items():
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e6
        figure = {
            "kvtrie": p50,
            "kvtrie_p99": p99,
            "kvtrie_mean": float(np.mean(seconds)) * 1e6,
            "ns_per_block": sum(seconds) / result.num_blocks * 1e9,
        }
        short = {key: float(f"{value:.4g}") for key, value in figure.items()}
        rows.append({"work": f"{name}: {part}", "unit": "us", **short, **notes})
    return rows


def measured(trace: Trace, path: Path) -> list[figures.Row]:
    """Replay one trace with every pool."""
    requests = read(path)
    ideal = ideal_share(requests)
    distinct = np.unique(np.concatenate(requests)).size
    longest = max(request.size for request in requests)
    table = documents(0, int(max(request.max() for request in requests)) + 1, trace.block_size)
    rows: list[figures.Row] = []
    for share in POOLS:
        # A request that is cached whole needs a block for the token that is recomputed.
        num_blocks = distinct + 1 if share is None else max(int(distinct * share), longest + 1)
        result = replay(requests, table, num_blocks)
        found = result.hit_blocks / result.num_blocks
        if share is None and not (found == ideal and abs(ideal - trace.ideal) < 0.0005):
            message = f"{trace.name}: found {found:.4f}, ideal {ideal:.4f}, known {trace.ideal}"
            raise RuntimeError(message)
        pool = "room for all" if share is None else f"a pool of {num_blocks:,} blocks"
        rows += rows_of(f"{trace.name}, {pool}", result, ideal)
    return rows


def main(arguments: list[str] | None = None) -> None:
    default = Path(__file__).resolve().parents[3] / "shared" / "traces"
    parser = argparse.ArgumentParser(description="Replay recorded traffic.")
    parser.add_argument("--traces", type=Path, default=default, help="folder of the trace files")
    parser.add_argument("--dry-run", action="store_true", help="print the figures only")
    options = parser.parse_args(arguments)
    rows: list[figures.Row] = []
    gc.disable()
    for trace in TRACES:
        path = options.traces / f"{trace.name}.jsonl.gz"
        if path.is_file():
            rows += measured(trace, path)
        else:
            print(f"traces: skipped {trace.name}: there is no {path.name} in the traces folder")
    for figure in rows:
        if figure["unit"] == "share":
            print(f"{figure['work']:<72}{figure['kvtrie']:>10.4f}  (ideal {figure['ideal']:.4f})")
        else:
            print(
                f"{figure['work']:<72}{figure['kvtrie']:>10,.1f} µs median"
                f"{figure['kvtrie_mean']:>10,.1f} mean{figure['kvtrie_p99']:>10,.1f} p99"
                f"{figure['ns_per_block']:>8,.1f} ns a block"
            )
    if rows and not options.dry_run:
        names = ("kvtrie", "numpy")
        figures.record("traces", rows, {name: version(name) for name in names})


if __name__ == "__main__":
    main()
