"""Draws the pictures of the README and of the docs from real plans.

`python benches/pictures.py` writes them to `docs/pictures`; `--check` writes nothing and fails if a
picture is out of date. No picture is drawn by hand.
"""

import argparse
import io
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from workloads.history import Conversation
from workloads.registry import WORKLOADS

import kvtrie

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
BLOCK_SIZE = 16

# Colours that people with any colour vision tell apart, and the words for them.
CLASSES = {
    "exact": ("#2b6cb0", "exact: used in place"),
    "approximate": ("#2f9e6e", "moved: copied, K rotated"),
    "compute": ("#e8833a", "computed"),
}
CACHED = "#cbd5e0"
DROPPED = "#718096"
HEIGHT = 0.62


@dataclass(frozen=True)
class Part:
    """Tokens of a bar: from `start` to `end`, with a colour and a word inside."""

    start: int
    end: int
    colour: str
    word: str = ""
    ink: str = "white"


def main() -> int:
    """Write or check the pictures."""
    parser = argparse.ArgumentParser(description="Draw the pictures in docs/pictures.")
    parser.add_argument("--check", action="store_true", help="fail if a picture is out of date")
    options = parser.parse_args()
    old = 0
    for name, draw in PICTURES.items():
        path, text = FOLDER / name, _svg(draw())
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: python benches/pictures.py", file=sys.stderr)
            old = 1
    return old


def edit() -> Figure:
    """A chat turn with reasoning, and the next prompt, from which the template dropped it."""
    turn = WORKLOADS["W01"].build(system=500, question=120, reasoning=1_000, answer=900)
    segments = _planned(turn)
    exact = sum(end - start for start, end, _, kind in segments if kind == "exact")
    moved = sum(end - start for start, end, _, kind in segments if kind == "approximate")
    fresh = sum(end - start for start, end, _, kind in segments if kind == "compute")

    figure, axes = _bars(len(turn.cached))
    _bar(axes, 2, f"cached: turn 1\n{len(turn.cached):,} tokens", _spans(turn))
    _bar(
        axes,
        1,
        f"turn 2, prefix cache\n{len(turn.prompt) - exact:,} computed",
        [
            Part(0, exact, CLASSES["exact"][0], "exact"),
            Part(exact, len(turn.prompt), CLASSES["compute"][0], "computed"),
        ],
    )
    parts: list[Part] = []
    for first, end, delta, kind in segments:
        start = first
        word = {"exact": "exact", "approximate": f"moved by {delta:,} tokens", "compute": ""}[kind]
        word = word.replace("-", "\N{MINUS SIGN}") if end - start > 200 else ""
        if parts and parts[-1].colour == CLASSES[kind][0]:
            # Used in place and copied next to it: both are exact.
            last = parts.pop()
            start, word = last.start, last.word
        parts.append(Part(start, end, CLASSES[kind][0], word))
    _bar(axes, 0, f"turn 2, kvtrie\n{fresh:,} computed", parts)
    for start, end, delta, kind in segments:
        if kind == "approximate":
            middle = (start + end) / 2
            _arrow(axes, (middle - delta, 2 - HEIGHT / 2), (middle, HEIGHT / 2))
    _legend(axes, moved=moved)
    return figure


def _planned(turn: Conversation) -> list[tuple[int, int, int, str]]:
    """Start, end, delta and class of the segments that kvtrie plans for the next prompt."""
    space = kvtrie.Namespace(model="picture", salt=kvtrie.SHARED)
    cached = kvtrie.TokenSequence(turn.cached, space)
    blocks = turn.num_computed // BLOCK_SIZE
    index = kvtrie.RadixIndex(num_blocks=blocks, block_size=BLOCK_SIZE, seed=0)
    whole = blocks * BLOCK_SIZE
    index.insert(cached, np.arange(blocks), num_computed=whole, source=kvtrie.COMPUTED)
    prompt = kvtrie.TokenSequence(turn.prompt, space)
    with index.plan(prompt, kvtrie.ReusePolicy(approximate=True), keep_last=1) as plan:
        return [
            (
                int(segment["start"]),
                int(segment["end"]),
                int(segment["delta"]),
                list(CLASSES)[int(segment["class"])],
            )
            for segment in plan.segments
        ]


def _spans(turn: Conversation) -> list[Part]:
    """The cached turn by what its tokens are."""
    parts = [Part(0, len(turn.cached), CACHED)]
    for start, end, kind in turn.spans:
        is_gone = kind == "reasoning"
        colour, ink = (DROPPED, "white") if is_gone else (CACHED, "#1a202c")
        word = f"{kind}: dropped by the template" if is_gone else kind
        parts.append(Part(start, end, colour, word if end - start > 250 else "", ink))
    return parts


def _bars(length: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10.4, 3.1))
    axes = figure.add_axes((0.165, 0.0, 0.83, 1.0))
    axes.set_xlim(-10, length + 10)
    axes.set_ylim(-1.05, 2.5)
    axes.axis("off")
    return figure, axes


def _bar(axes: Axes, row: float, label: str, parts: Iterable[Part]) -> None:
    for part in parts:
        width = part.end - part.start
        axes.barh(row, width, HEIGHT, part.start, color=part.colour, edgecolor="white", lw=1.2)
        if part.word:
            middle = part.start + width / 2
            axes.text(middle, row, part.word, ha="center", va="center", color=part.ink)
    axes.text(-40, row, label, ha="right", va="center", color="#1a202c", linespacing=1.35)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    colour = CLASSES["approximate"][0]
    style = "arc3,rad=-0.12"
    arrow = FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=14, lw=1.8, color=colour, connectionstyle=style
    )
    axes.add_patch(arrow)


def _legend(axes: Axes, *, moved: int) -> None:
    handles = [
        mpl.patches.Patch(color=colour, label=word) for colour, word in CLASSES.values() if moved
    ]
    axes.legend(handles=handles, loc="lower left", ncols=3, frameon=False, borderpad=0.2)


def _svg(figure: Figure) -> str:
    """The picture as text: the same for the same plan."""
    with mpl.rc_context(
        {"svg.hashsalt": "kvtrie", "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    return buffer.getvalue()


PICTURES: dict[str, Callable[[], Figure]] = {"edit.svg": edit}

if __name__ == "__main__":
    sys.exit(main())
