"""Charts of the recorded figures, `benches/figures.json`."""

import math
import re
import textwrap
from typing import Any

import figures
import report
from drawing import (
    BAD_LINE,
    CLASSES,
    COMPUTED,
    EXACT,
    FAINT,
    GOOD_LINE,
    INK,
    MOVED,
    Part,
    bar,
    canvas,
    label,
    legend,
)
from matplotlib.axes import Axes

Row = dict[str, Any]

# Height of a line of a chart, in inches.
LINE = 0.19
# The first of these that a row's name has is its kind of work.
KINDS = {
    "requests of 512": "256 requests",
    "lookups of 512": "256 lookups",
    "chat turn": "chat turn",
    "decode step": "decode step",
    "matcher alone": "moved runs alone",
    "moved runs": "prefix and moved runs",
    "with fingerprints": "insert, evict, fingerprints",
    "insert": "insert, evict",
    "evict": "insert, evict",
    "pin": "pin and release",
    "lookup": "lookup",
    "miss": "miss",
    "memory": "memory",
}


def goals() -> Axes:
    """Every goal: how many times better than the goal the measured figure is."""
    found, _ = report.goals(figures.load())
    groups: dict[str, list[report.Goal]] = {}
    for goal in found:
        groups.setdefault(goal.group, []).append(goal)
    lines = len(found) + len(groups) + 1
    axes = canvas(9.0, lines * LINE, (0.57, 0.0, 0.21, 1.0))
    margins = [goal.margin for goal in found]
    low, high = _decades(axes, min(margins), max(margins), lines, "goal")
    ends: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    row = 1
    for name, members in groups.items():
        label(axes, low, row, name)
        axes.texts[-1].set_fontweight("bold")
        for goal in members:
            row += 1
            ends[goal.is_met].append((math.log10(goal.margin), row))
            words = textwrap.shorten(goal.what.partition(" (")[0], 80, placeholder=" …")
            _small(axes, low, row, words, "right")
            _small(axes, high, row, f"{goal.figure} (goal {goal.wanted})", "left")
        row += 1
    for is_met, points in ends.items():
        if points:
            colour = GOOD_LINE if is_met else BAD_LINE
            xs, ys = zip(*points, strict=True)
            axes.hlines(ys, 0, xs, color=colour, lw=2)
            axes.scatter(xs, ys, s=18, color=colour, clip_on=False)
    return axes


def peers() -> Axes:
    """The same work in kvtrie and in another index: the ratio of the other's time to kvtrie's."""
    groups: dict[str, dict[str, list[float]]] = {}
    for row in figures.load()["sections"]["peers"]:
        kind = next(kind for words, kind in KINDS.items() if re.search(words, row["work"]))
        peer = groups.setdefault(row["peer"], {})
        peer.setdefault(kind, []).append(row["ratio"])
    ratios = [one for kinds in groups.values() for each in kinds.values() for one in each]
    lines = sum(1 + len(kinds) for kinds in groups.values()) + 1
    axes = canvas(9.0, lines * LINE, (0.25, 0.0, 0.6, 1.0))
    low, high = _decades(axes, min(ratios), max(ratios), lines, "equal")
    row = 1
    for name, kinds in groups.items():
        label(axes, low, row, name)
        axes.texts[-1].set_fontweight("bold")
        for kind, each in kinds.items():
            row += 1
            _small(axes, low, row, kind, "right")
            colours = [GOOD_LINE if ratio >= 1 else BAD_LINE for ratio in each]
            ends = [math.log10(ratio) for ratio in each]
            axes.scatter(ends, [row] * len(ends), 36, colours, clip_on=False)
            least, most = (f"{report.number(one)}{report.TIMES}" for one in (min(each), max(each)))
            _small(axes, high, row, least if least == most else f"{least} to {most}", "left")
        row += 1
    return axes


def reuse() -> Axes:
    """The next prompt of each workload: what a plan uses in place, moves, and leaves to compute."""
    rows = [
        row
        for row in figures.load()["sections"]["coverage"]
        if row.get("variant") == "own texts" and "workload" in row
    ]
    axes = canvas(9.0, (len(rows) + 2.5) * LINE, (0.27, 0.0, 0.72, 1.0))
    axes.set_xlim(0, 100)
    axes.set_ylim(len(rows) + 1.5, -1)
    for place, row in enumerate(rows):
        exact, found = 100 * row["exact_of_prompt"], 100 * row["found_of_prompt"]
        _small(axes, -0.8, place, f"{row['workload'].partition('.')[0]} {row['name']}", "right")
        ends = {EXACT: (0, exact), MOVED: (exact, found), COMPUTED: (found, 100)}
        bar(axes, place, [Part(*ends[colour], colour) for colour in ends], 0.74)
        for start, end in (ends[EXACT], ends[MOVED]):
            if end - start > 5:
                text = f"{math.floor(end - start)} %"  # rounded down, so that 100 % means all of it
                axes.text(end - 0.5, place, text, c="white", ha="right", va="center", size=7.5)
    legend(axes, {colour: text.partition(":")[0] for colour, text in CLASSES.values()})
    return axes


def _decades(axes: Axes, least: float, most: float, lines: int, middle: str) -> tuple[float, float]:
    """Draw a logarithmic scale; returns where text left and right of it is placed."""
    low, high = math.log10(least), math.log10(most)
    pad = 0.03 * (high - low)
    axes.set_xlim(low - pad, high + pad)
    axes.set_ylim(lines - 0.5, -0.5)
    for power in range(math.ceil(low), math.floor(high) + 1):
        axes.plot([power, power], [0.5, lines], color=FAINT, lw=0.5 if power else 1.2, zorder=0)
        name = middle if power == 0 else f"{10.0**power:,g}{report.TIMES}"
        _small(axes, power, 0, name, "center")
    return low - 2 * pad, high + 2 * pad


def _small(axes: Axes, x: float, y: float, text: str, at: str) -> None:
    axes.text(x, y, text, ha=at, va="center", color=INK, fontsize=8)
