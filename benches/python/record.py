"""Runs the Python benchmarks and records their figures: `python benches/python/record.py`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures

HERE = Path(__file__).resolve().parent

# Columns of a benchmark that go into its row as they are.
NOTES = (
    "tokens",
    "blocks",
    "requests",
    "cached",
    "source",
    "state",
    "moved_runs",
    "nodes_visited",
    "bytes_compared",
)


def rows_of(report: dict[str, Any]) -> list[figures.Row]:
    rows = []
    for benchmark in sorted(report["benchmarks"], key=lambda benchmark: benchmark["fullname"]):
        info, stats = benchmark["extra_info"], benchmark["stats"]
        row: figures.Row = {
            "work": info["work"],
            "unit": "us",
            "kvtrie": stats["median"] / info["calls"] * 1e6,
            "kvtrie_p10": info["p10"],
            "kvtrie_p90": info["p90"],
            "rounds": stats["rounds"],
            "calls_a_round": info["calls"],
        }
        if info.get("single_calls"):
            row |= {"kvtrie_p99": info["p99"], "kvtrie_max": info["max"]}
        row |= {name: info[name] for name in NOTES if name in info}
        for count, share in (("tokens", "token"), ("blocks", "block"), ("requests", "request")):
            if count in info:
                row[f"ns_per_{share}"] = row["kvtrie"] * 1e3 / info[count]
        rows.append({key: _short(value) for key, value in row.items()})
    return rows


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def versions() -> dict[str, str]:
    names = ("kvtrie", "numpy", "pytest-benchmark")
    return {name: version(name) for name in names}


def measured(arguments: list[str]) -> dict[str, Any]:
    """Run the benchmarks and return pytest-benchmark's report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        options = ["--benchmark-only", "--benchmark-quiet", "--quiet", f"--benchmark-json={path}"]
        status = pytest.main([str(HERE), *options, *arguments])
        if status != pytest.ExitCode.OK:
            raise SystemExit(int(status))
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the Python benchmarks and record them.")
    parser.add_argument("--dry-run", action="store_true", help="print the figures only")
    options, rest = parser.parse_known_args()
    rows = rows_of(measured(rest))
    for row in rows:
        slowest = ""
        if "kvtrie_max" in row:
            slowest = f"  (p99 {row['kvtrie_p99']:,.3f}, max {row['kvtrie_max']:,.3f})"
        print(f"{row['work']:<104}{row['kvtrie']:>10,.3f} µs{slowest}")
    if not options.dry_run:
        figures.record("python", rows, versions())


if __name__ == "__main__":
    main()
