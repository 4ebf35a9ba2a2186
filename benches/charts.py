"""Charts of the recorded figures, `benches/figures.json`."""

import math
from typing import Any

import figures
import report
from drawing import COMPUTED, EXACT, FAINT, INK, LIGHT, MOVED, canvas, label, legend
from matplotlib.axes import Axes

Row = dict[str, Any]
# Height of a line of text, in inches.
LINE = 0.185


def goals() -> Axes:
    """Every goal in one chart: how many times better than it the measured figure is."""
    found, _ = report.goals(figures.load())
    groups: dict[str, list[report.Goal]] = {}
    for goal in found:
        groups.setdefault(goal.group, []).append(goal)
    lines = len(found) + len(groups) + 2
    axes = canvas(10.4, lines * LINE, (0.5, 0.0, 0.31, 1.0))
    ends = [math.log10(goal.margin) for goal in found if goal.margin < math.inf]
    low, high = min(ends), max(ends)
    axes.set_xlim(low - 0.1, high + 0.1)
    axes.set_ylim(lines - 0.5, -1.5)
    row = 0
    for name, members in groups.items():
        label(axes, low - 0.2, row, name)
        axes.texts[-1].set_fontweight("bold")
        for goal in members:
            row += 1
            colour = EXACT if goal.is_met else COMPUTED
            end = high if goal.margin == math.inf else math.log10(goal.margin)
            axes.plot([0, end], [row, row], color=colour, lw=2)
            axes.plot([end], [row], marker="o", ms=4.5, color=colour)
            _small(axes, low - 0.2, row, goal.what, "right")
            _small(axes, high + 0.2, row, f"{goal.measured}  ({goal.wanted})", "left")
        row += 1
    for power in range(math.ceil(low), math.floor(high) + 1):
        axes.axvline(power, color=FAINT, lw=0.5 if power else 1.2, zorder=0)
        _small(axes, power, -1, "goal" if power == 0 else f"{10.0**power:g}{report.TIMES}", "center")
    return axes


def peers() -> Axes:
    """The same work in kvtrie and in another index: how many times less time kvtrie takes."""
    rows = [row for row in figures.load()["sections"]["peers"] if row["unit"] == "us"]
    names = list(dict.fromkeys(row["peer"] for row in rows))
    axes = canvas(10.4, 3.4, (0.14, 0.16, 0.84, 0.82))
    axes.set_axis_on()
    return axes


def _small(axes: Axes, x: float, y: float, text: str, at: str) -> None:
    axes.text(x, y, text, ha=at, va="center", color=INK, fontsize=8)


reuse = peers
