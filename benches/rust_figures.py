"""Records the figures of the Rust side in `benches/figures.json`.

cargo bench --package kvtrie-benches && python benches/rust_figures.py
"""

import argparse
import json
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import figures
import instructions
from instructions import MeasureError

ROOT = Path(__file__).resolve().parent.parent

SECTIONS = ("rust", "limits", "memory", "instructions")

# Results that are so much older than the newest belong to deleted benchmarks.
STALE_SECONDS = 3600.0

# What kvtrie does with memory that a limit reads or writes, as (limit, row of the section "rust").
KVTRIE_WORK = {
    "compare 2 KB, warm": "lookup: 512 tokens in one edge, warm",
    "compare 2 KB, cold": "lookup: 512 tokens in one edge, cold",
    "compare 32 KB, warm": "lookup: 8,192 tokens in one edge, warm",
    "compare 32 KB, cold": "lookup: 8,192 tokens in one edge, cold",
    "compare 400 KB, warm": "lookup: 102,400 tokens in one edge, warm",
    "compare 400 KB, cold": "lookup: 102,400 tokens in one edge, cold",
    "copy 32 KB, warm": "insert: 8,192 new tokens",
    "one of many dependent loads": "crowd: lookup of one of 10^5 leaves of 64 tokens, cold",
}

Row = dict[str, Any]


def cargo(*arguments: str) -> str:
    done = subprocess.run(  # noqa: S603 - a command of our own
        [instructions.tool("cargo"), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        text = f"cargo {' '.join(arguments)} failed"
        raise MeasureError(text)
    return done.stdout


def run(binary: str, *arguments: str) -> list[Row]:
    command = ["run", "--quiet", "--release", "--package", "kvtrie-benches", "--bin", binary]
    output = cargo(*command, "--", "--json", *arguments)
    return [json.loads(line) for line in output.splitlines()]


def times() -> list[Row]:
    """Medians of criterion's last run, in microseconds, with the spread of its samples."""
    target = json.loads(cargo("metadata", "--no-deps", "--format-version", "1"))["target_directory"]
    found = sorted(Path(target).glob("criterion/**/new/estimates.json"))
    if not found:
        text = "criterion has no results: run `cargo bench --package kvtrie-benches`"
        raise MeasureError(text)
    newest = max(path.stat().st_mtime for path in found)
    fresh = [path for path in found if path.stat().st_mtime > newest - STALE_SECONDS]
    rows = [time_row(path.parent) for path in sorted(fresh, key=lambda path: path.stat().st_mtime)]
    if any(row["kvtrie"] <= 0 for row in rows):
        text = "criterion measured nothing in one of its benchmarks"
        raise MeasureError(text)
    return rows


def time_row(folder: Path) -> Row:
    about = read(folder / "benchmark.json")
    sample = read(folder / "sample.json")
    median = read(folder / "estimates.json")["median"]["point_estimate"]
    means = [time / calls for time, calls in zip(sample["times"], sample["iters"], strict=True)]
    deciles = statistics.quantiles(means, n=10, method="inclusive")
    tokens = (about["throughput"] or {}).get("Elements")
    row: Row = {
        "work": f"{about['group_id']}: {about['function_id']}",
        "unit": "us",
        "kvtrie": micro(median),
        "kvtrie_p10": micro(deciles[0]),
        "kvtrie_p90": micro(deciles[-1]),
    }
    if tokens:
        row |= {"tokens": tokens, "ns_a_token": round(median / tokens, 4)}
    return row


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def micro(nanoseconds: float) -> float:
    """Microseconds, to a tenth of a nanosecond."""
    return round(nanoseconds / 1000, 4)


def pauses(*arguments: str) -> list[Row]:
    """Single calls, one by one: each call's least time over some rounds, and what was measured."""
    rows = []
    for row in run("pauses", *arguments):
        spread = {f"kvtrie_{name}": row[name] for name in ("p10", "p90", "p99", "p99_9", "max")}
        seen = {name: row[name] for name in ("calls", "max_seen", "over_100_us_seen")}
        work = f"single calls: {row['work']}"
        rows.append({"work": work, "unit": row["unit"], "kvtrie": row["p50"]} | spread | seen)
    return rows


def limits(known: list[Row], *arguments: str) -> list[Row]:
    """What the machine allows, and what kvtrie takes where it does the same to memory."""
    ours = {row["work"]: row["kvtrie"] for row in known}
    rows = []
    for row in run("limits", *arguments):
        names = {"median": "limit", "p10": "limit_p10", "p90": "limit_p90"}
        out: Row = {"work": row["work"], "unit": row["unit"], "kvtrie": None}
        out |= {name: round(row[key], 4) for key, name in names.items()}
        ours_for = KVTRIE_WORK.get(row["work"])
        if ours_for in ours:
            out["kvtrie"] = ours[ours_for] * (1000 if row["unit"] == "ns" else 1)
            out["kvtrie_work"] = ours_for
            out["ratio"] = round(out["kvtrie"] / out["limit"], 2)
        rows.append(out)
    return rows


def memory() -> list[Row]:
    rows = []
    for row in run("memory"):
        rounded = {name: round(row[name], 2) for name in row if name not in {"work", "unit"}}
        out = {"work": row["work"], "unit": "bytes per token", "kvtrie": rounded.pop("a_token")}
        rows.append(out | rounded)
    return rows


def counts() -> list[Row]:
    found = instructions.count_all()["instructions"]
    return [
        {"work": operation.work, "unit": "instructions", "kvtrie": found[operation.name]}
        for operation in instructions.OPERATIONS
    ]


def versions() -> dict[str, str]:
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    return {
        "kvtrie-core": manifest["workspace"]["package"]["version"],
        "rustc": instructions.toolchain()["rustc"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", choices=SECTIONS, action="append", help="a section; may come more than once"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--print", action="store_true", help="print the rows, record nothing")
    options = parser.parse_args()
    sections = options.only or SECTIONS
    quick = ["--quick"] if options.quick else []
    try:
        measured: dict[str, list[Row]] = {}
        known = times() if {"rust", "limits"} & set(sections) else []
        if "rust" in sections:
            measured["rust"] = known + pauses(*quick)
        if "limits" in sections:
            measured["limits"] = limits(known, *quick)
        if "memory" in sections:
            measured["memory"] = memory()
        if "instructions" in sections:
            measured["instructions"] = counts()
    except MeasureError as error:
        print(f"rust_figures: {error}.", file=sys.stderr)
        return 1
    for section, rows in measured.items():
        if options.print:
            for row in rows:
                print(json.dumps({"section": section} | row))
        else:
            figures.record(section, rows, versions())
    return 0


if __name__ == "__main__":
    sys.exit(main())
