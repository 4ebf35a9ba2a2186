"""What all pictures share: colours that work in light and dark mode, bars, boxes, SVG as text."""

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

# Letters, lines and dots on the page itself: a browser replaces these colours by those of the
# reader's mode.
INK = "#123456"
FAINT = "#345678"
PAPER = "#fedcba"
GOOD_LINE = "#121212"
BAD_LINE = "#343434"
MOVED_LINE = "#565656"
_MODES = {
    INK: ("--ink", "#1a202c", "#e2e8f0"),
    FAINT: ("--faint", "#5a6474", "#9aa5b5"),
    PAPER: ("--paper", "#ffffff", "#1e2129"),
    GOOD_LINE: ("--good", "#2b6cb0", "#6cb0f0"),
    BAD_LINE: ("--bad", "#c05621", "#f6995c"),
    MOVED_LINE: ("--moved", "#23805a", "#4fc294"),
}

# Colours that people with any colour vision can distinguish, under white letters.
EXACT = "#2b6cb0"
MOVED = "#23805a"
COMPUTED = "#c05621"
GREY = "#718096"
# Under black letters.
LIGHT = "#cbd5e0"
BLACK = "#1a202c"

_FONT = "'DejaVu Sans'"

CLASSES = {
    "exact": (EXACT, "exact: used in place or copied"),
    "approximate": (MOVED, "moved: copied, K rotated"),
    "compute": (COMPUTED, "computed"),
}


@dataclass(frozen=True)
class Part:
    """A part of a bar, from `start` to `end`, with a colour and a word inside."""

    start: float
    end: float
    colour: str
    word: str = ""
    ink: str = "white"


def canvas(width: float, height: float, box: tuple[float, float, float, float]) -> Axes:
    """An empty picture of so many inches; `box` is the part of it that has coordinates."""
    axes = Figure(figsize=(width, height)).add_axes(box)
    axes.axis("off")
    return axes


def bar(axes: Axes, row: float, parts: Iterable[Part], height: float = 0.62) -> None:
    for part in parts:
        width = part.end - part.start
        axes.barh(row, width, height, part.start, color=part.colour, edgecolor=PAPER, lw=1.2)
        if part.word:
            middle = part.start + width / 2
            axes.text(middle, row, part.word, ha="center", va="center", color=part.ink)


def label(axes: Axes, x: float, y: float, text: str, *, at: str = "right") -> None:
    """Text on the page itself; `at` is the side of the text that is at `x`."""
    axes.text(x, y, text, ha=at, va="center", color=INK, linespacing=1.35)


def box(axes: Axes, x: float, y: float, size: tuple[float, float], part: Part) -> None:
    """A rounded box around a point, with a word inside."""
    width, height = size
    patch = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=part.colour,
        edgecolor="none",
    )
    axes.add_patch(patch)
    axes.text(x, y, part.word, ha="center", va="center", color=part.ink, linespacing=1.25)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str = FAINT,
    bend: float = 0.0,
) -> None:
    patch = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        mutation_scale=14,
        lw=1.6,
        color=colour,
        connectionstyle=f"arc3,rad={bend}",
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(patch)


def legend(axes: Axes, words: dict[str, str], columns: int = 3) -> None:
    handles = [Patch(color=colour, label=word) for colour, word in words.items()]
    axes.legend(
        handles=handles,
        loc="lower left",
        ncols=columns,
        frameon=False,
        borderpad=0.2,
        labelcolor=INK,
    )


def minus(number: int) -> str:
    """A number with a sign that is as wide as the others."""
    return f"{number:+,}".replace("-", "\N{MINUS SIGN}")


def svg(axes: Axes) -> str:
    """The picture as text: the same for the same axes."""
    with mpl.rc_context(
        {"svg.hashsalt": "kvtrie", "svg.fonttype": "none", "font.sans-serif": _FONT[1:-1]}
    ):
        buffer = io.StringIO()
        figure = cast("Figure", axes.figure)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    light, dark = [], []
    for colour, (name, by_day, by_night) in _MODES.items():
        if colour in text:
            text = text.replace(colour, f"var({name})")
            light.append(f"{name}: {by_day}")
            dark.append(f"{name}: {by_night}")
    rules = [
        f":root {{ {'; '.join(light)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {'; '.join(dark)} }} }}",
    ]
    for number, style in enumerate(dict.fromkeys(re.findall(r'style="(font: [^"]*)"', text))):
        text = text.replace(f'style="{style}"', f'class="t{number}"')
        rules.append(f".t{number} {{ {style.replace(_FONT, f'{_FONT}, Verdana, sans-serif')} }}")
    rules = ["<style>", *rules, "</style>"]
    text = text.replace(" <defs>\n", "\n".join([*rules, "<defs>\n"]), 1)
    # Half of the bytes: comments, groups of one text, rotations by nothing.
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r'<g id="text_\d+">\s*(<text.*?</text>)\s*</g>', r"\1", text, flags=re.DOTALL)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())
