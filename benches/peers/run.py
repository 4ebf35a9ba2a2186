"""Measures one peer and kvtrie, inside that peer's environment.

`python benches/peers/run.py --peer sglang` prints the rows and records them in
`benches/figures.json`. `--quick` runs everything at small sizes, checks every result, and records
nothing: it is the test of these benchmarks.
"""

import argparse
import importlib
import importlib.metadata
import logging
import os
import sys
import time
import warnings
from pathlib import Path

_BENCHES = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a peer and kvtrie.")
    parser.add_argument("--peer", choices=("sglang", "vllm", "lmcache"), required=True)
    parser.add_argument("--quick", action="store_true", help="small sizes; records nothing")
    parser.add_argument("--rounds", type=int, default=101, help="rounds of each comparison")
    parser.add_argument("--output", type=Path, help="another file than benches/figures.json")
    options = parser.parse_args()

    # This folder's own modules are imported as `peers.…`, so that none hides a peer's package.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [str(_BENCHES), *(entry for entry in sys.path if entry != here)]
    # One thread each: the clock counts this thread only.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")

    rows = importlib.import_module(f"peers.{options.peer}_rows")
    figures = importlib.import_module("figures")
    harness = importlib.import_module("peers.harness")
    start = time.monotonic()
    measured = list(rows.rows(harness.Effort(rounds=options.rounds, quick=options.quick)))
    print(f"{len(measured)} rows in {time.monotonic() - start:.0f} s")
    if options.quick and options.output is None:
        return 0
    versions = rows.versions() | {"kvtrie": importlib.metadata.version("kvtrie")}
    figures.record("peers", measured, versions, part="engine", path=options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
