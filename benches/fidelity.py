"""What reuse of KV costs the three shipped models: measures, and writes `docs/fidelity.md`.

    python benches/fidelity.py              # all figures, two processes of one thread each
    python benches/fidelity.py --render     # the page again, from benches/fidelity.json

The exit code is 1 if the figures measure nothing: full recomputation is below 95 %, or a control
loses less than 20 points.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from kvtrie import gates

ROOT: Final = Path(__file__).resolve().parent.parent
FIGURES: Final = ROOT / "benches" / "fidelity.json"
PAGE: Final = ROOT / "docs" / "fidelity.md"
BEGIN: Final = "<!-- Written by benches/fidelity.py from benches/fidelity.json. Edit neither. -->"
END: Final = "<!-- End of what is written. -->"

LIMITS: Final = {"max_loss": 0.01, "max_kl_mean": 0.02, "max_kl_p99": 0.5, "min_top1": 0.93}
LEAST_ACCURACY: Final = 0.95
LEAST_CONTROL_LOSS: Final = 0.20
CONTROLS: Final = ("unrotated", "drop")
WANTED_LOSS: Final = 0.01
WANTED_SAVINGS: Final = 0.8
TITLES: Final = {
    "gqa": "GQA, NeoX pairs (Llama form)",
    "partial": "half of the channels, interleaved pairs (GLM form)",
    "mla": "MLA under YaRN (DeepSeek-V3 form)",
}

SUMMARY: Final = (
    "Points of task accuracy lost over the {} questions of all three scenarios, with the upper end "
    "of the 95 % interval in brackets. *Savings*: the least share, over the scenarios, of what "
    "`rotated` saves over `exact`. Bold: at most one point at 80 % of the savings or more."
)

Row = dict[str, Any]


def measure_one(kind: str, questions: int, seed: int) -> tuple[str, Row]:
    import recall_rows  # noqa: PLC0415 - slow: torch

    began, busy = time.perf_counter(), time.process_time()
    document = recall_rows.document(kind, questions, seed)
    document["thresholds"] = LIMITS
    document["cleared"] = cleared(document)
    document["seconds"] = time.perf_counter() - began
    document["processor_seconds"] = time.process_time() - busy
    return kind, document


def cleared(model: Row) -> list[str]:
    """Policies within the limits in every scenario, most tokens saved first.

    These are the limits of the tables, by scenario; a gate decides by kind of edit.
    """
    found: dict[str, list[Row]] = {}
    for row in model["results"]:
        if row["approximate"] and row["policy"] not in CONTROLS:
            found.setdefault(row["policy"], []).append(row)
    kept = []
    for name, rows in found.items():
        lost, gained, asked = (
            sum(row[one] for row in rows) for one in ("lost", "gained", "questions")
        )
        is_near = all(
            row["kl_mean"] <= LIMITS["max_kl_mean"]
            and row["kl_p99"] <= LIMITS["max_kl_p99"]
            and row["top1"] >= LIMITS["min_top1"]
            and row["loss"] <= LIMITS["max_loss"]
            for row in rows
        )
        if is_near and gates.paired_interval(lost, gained, asked)[1] <= LIMITS["max_loss"]:
            kept.append((sum(row["computed"] for row in rows), name))
    return [name for _, name in sorted(kept)]


def measure(questions: int, seed: int, workers: int) -> Row:
    began = time.perf_counter()
    models: dict[str, Row] = {}
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        # The longest comes first, so that the other process does the rest in parallel.
        jobs = [pool.submit(measure_one, kind, questions, seed) for kind in reversed(TITLES)]
        for job in as_completed(jobs):
            kind, document = job.result()
            models[kind] = document
            print(f"{kind}: {document['seconds']:.0f} s", file=sys.stderr, flush=True)
    return {
        "questions": questions,
        "seed": seed,
        "workers": workers,
        "seconds": time.perf_counter() - began,
        "load": os.getloadavg()[0],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "models": {kind: models[kind] for kind in TITLES},
    }


def failures(figures: Row) -> list[str]:
    found = []
    for kind, model in figures["models"].items():
        for row in model["results"]:
            where = f"{kind}, {row['scenario']}, {row['policy']}"
            accuracy = row["right"] / row["questions"]
            if row["policy"] == "full" and accuracy < LEAST_ACCURACY:
                found.append(f"{where}: {accuracy:.1%} right, at least {LEAST_ACCURACY:.0%} wanted")
            if row["policy"] in CONTROLS and row["loss"] < LEAST_CONTROL_LOSS:
                found.append(f"{where}: loses {row['loss']:.1%}, at least 20 % wanted")
    return found


def render(figures: Row) -> str:
    how = (
        f"`python benches/fidelity.py`, seed {figures['seed']}, {figures['questions']} questions "
        f"per model and scenario: {figures['seconds'] / 60:.1f} minutes in {figures['workers']} "
        f"processes of one thread ({figures['machine']}, load {figures['load']:.1f})."
    )
    lines = [how, "", "### Limits, and what was measured", "", *_limits(figures), ""]
    asked = sum(
        row["questions"]
        for row in next(iter(figures["models"].values()))["results"]
        if row["policy"] == "full"
    )
    lines += ["### Policies across the models", "", SUMMARY.format(f"{asked:,}"), ""]
    lines += _summary(figures)
    lines += ["", "### Tokens computed and moved", "", *_tokens(figures)]
    for kind, model in figures["models"].items():
        cleared = ", ".join(f"`{name}`" for name in model["cleared"]) or "nothing"
        if set(model["cleared"]) == {
            row["policy"] for row in model["results"] if row["approximate"]
        } - set(CONTROLS):
            cleared = "every `rotated` policy"
        lines += [
            "",
            f"### {kind}: {TITLES[kind]}",
            "",
            f"`{model['model']}`, KV in {model['kv_dtype']}. Cleared: {cleared}. "
            + _references(model),
            "",
        ]
        lines += _details(model)
    return "\n".join(lines)


def _limits(figures: Row) -> list[str]:
    rows = [
        (row, row["policy"] in model["cleared"])
        for model in figures["models"].values()
        for row in model["results"]
    ]
    cleared = [row for row, is_cleared in rows if is_cleared]
    controls = [row for row, _ in rows if row["policy"] in CONTROLS]
    limits = next(iter(figures["models"].values()))["thresholds"]
    lines = [
        "| figure of a scenario | cleared policies, worst | limit | controls, best |",
        "|---|--:|--:|--:|",
    ]
    for title, name, limit in (
        ("KL mean", "kl_mean", "max_kl_mean"),
        ("KL 99 %", "kl_p99", "max_kl_p99"),
    ):
        worst, best = max(row[name] for row in cleared), min(row[name] for row in controls)
        lines.append(f"| {title} | {worst:.2g} | {limits[limit]:.2g} | {best:.2g} |")
    worst, best = min(row["top1"] for row in cleared), max(row["top1"] for row in controls)
    lines.append(f"| top 1 | {worst:.1%} | {limits['min_top1']:.1%} | {best:.1%} |")
    worst, best = max(row["loss"] for row in cleared), min(row["loss_low"] for row in controls)
    most = limits["max_loss"]
    lines.append(
        f"| points lost (controls: at least) | {100 * worst:.2f} | {100 * most:.2f} "
        f"| {100 * best:.2f} |"
    )
    return lines


def _summary(figures: Row) -> list[str]:
    models = figures["models"]
    names = [
        name
        for name in dict.fromkeys(row["policy"] for m in models.values() for row in m["results"])
        if name != "full"
    ]
    lines = [
        "| policy | savings | " + " | ".join(models) + " |",
        "|---|--:|" + "--:|" * len(models),
    ]
    for name in names:
        rows = {
            kind: [row for row in model["results"] if row["policy"] == name]
            for kind, model in models.items()
        }
        shares = [row["share_of_savings"] for found in rows.values() for row in found]
        cells = []
        for found in rows.values():
            lost, gained, asked = (
                sum(row[name] for row in found) for name in ("lost", "gained", "questions")
            )
            high = gates.paired_interval(lost, gained, asked)[1]
            text = f"{100 * (lost - gained) / asked + 0.0:.2f} ({100 * high:.2f})"
            is_goal = high <= WANTED_LOSS and min(shares) >= WANTED_SAVINGS
            cells.append(f"**{text}**" if is_goal and name.startswith("rotated") else text)
        lines.append(f"| `{name}` | {min(shares):.0%} | " + " | ".join(cells) + " |")
    return lines


def _tokens(figures: Row) -> list[str]:
    found: dict[str, dict[str, str]] = {}
    for rows in zip(*(model["results"] for model in figures["models"].values()), strict=True):
        # One value, as the models see the same tokens.
        ((policy, scenario, computed, moved),) = {
            tuple(row[name] for name in ("policy", "scenario", "computed", "moved")) for row in rows
        }
        found.setdefault(policy, {})[scenario] = f"{computed} | {moved}"
    scenarios = list(found["full"])
    lines = [
        "| policy | " + " | ".join(f"{one}: computed | moved" for one in scenarios) + " |",
        "|---|" + "--:|" * (2 * len(scenarios)),
    ]
    for policy, cells in found.items():
        lines.append(f"| `{policy}` | " + " | ".join(cells[one] for one in scenarios) + " |")
    return lines


def _references(model: Row) -> str:
    """What full recomputation and exact reuse give: without an interval, as one is the other."""
    full, exact = (
        [row for row in model["results"] if row["policy"] == name] for name in ("full", "exact")
    )
    right = ", ".join(f"{row['right']} ({row['scenario']})" for row in full)
    asked = full[0]["questions"]
    lost, gained = (sum(row[name] for row in exact) for name in ("lost", "gained"))
    kl, top1 = max(row["kl_p99"] for row in exact), min(row["top1"] for row in exact)
    return (
        f"`full` is right on {right} of {asked} each. `exact` loses {lost} and gains {gained}; its "
        f"KL 99 % is {_small(kl)}, its top 1 {top1:.1%}."
    )


def _details(model: Row) -> list[str]:
    columns = ("scenario", "policy", "KL mean", "KL 99 %", "top 1", "points lost (95 %)")
    lines = [f"| {' | '.join(columns)} |", "|---|---|" + "--:|" * (len(columns) - 2)]
    before = ""
    for row in model["results"]:
        if row["policy"] in ("full", "exact"):
            continue
        scenario = row["scenario"] if row["scenario"] != before else ""
        before = row["scenario"]
        loss, low, high = (100 * row[name] + 0.0 for name in ("loss", "loss_low", "loss_high"))
        lines.append(
            f"| {scenario} | `{row['policy']}` | {_small(row['kl_mean'])} "
            f"| {_small(row['kl_p99'])} | {row['top1']:.1%} "
            f"| {loss:.2f} [{low:.2f}, {high:.2f}] |"
        )
    return lines


def _small(value: float) -> str:
    return "0" if value < 1e-9 else f"{value:.2g}"


def put(page: str, written: str) -> str:
    """The page with its written part replaced."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        msg = f"{PAGE.name}: the marks are missing around the figures"
        raise ValueError(msg)
    return f"{head}{BEGIN}\n\n{written}\n\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What reuse of KV costs the shipped models.")
    parser.add_argument("--questions", type=int, default=420, help="of each model and scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    figures: Row = {}
    if not options.render:
        figures = measure(options.questions, options.seed, options.workers)
    if figures:
        text = json.dumps(figures, indent=1) + "\n"
        options.figures.write_text(text, encoding="utf-8")
    figures = json.loads(options.figures.read_text(encoding="utf-8"))
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(put(page, render(figures)), encoding="utf-8")
    print(render(figures))
    found = failures(figures)
    for line in found:
        print(f"the task shows nothing: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
