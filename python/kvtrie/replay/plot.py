"""The hit rate over the size of the pool, as an SVG picture that needs nothing else.

Colours are distinguishable with any colour vision, and each line has its own marks and dashes.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

from kvtrie.replay.report import NOT_VISIBLE, POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.replay.report import ReuseFigures, TrafficReport

_WIDTH, _HEIGHT = 760, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 46, 104
_LOOKS: Final = {
    "prefix": ("#0072b2", "", "circle"),
    "dead_first": ("#009e73", "7 4", "square"),
    "kvtrie": ("#d55e00", "2 3", "diamond"),
    "optimum": ("#aa6fa0", "10 3 2 3", "triangle"),
}
_STYLE: Final = (
    ":root{--ink:#1a202c;--faint:#8a94a6}"
    "@media (prefers-color-scheme: dark){:root{--ink:#e2e8f0;--faint:#718096}}"
    "text{font:13px system-ui,sans-serif;fill:var(--ink)}.n{font-variant-numeric:tabular-nums}"
    ".grid{stroke:var(--faint);stroke-opacity:.35}.axis{stroke:var(--ink)}"
)


def svg(report: TrafficReport) -> str:
    """The picture."""
    unit, scale = ("tokens", 1.0)
    if report.bytes_per_token is not None:
        unit, scale = ("GB", report.bytes_per_token / 1e9)
    sizes = [row.num_tokens * scale for row in report.rows]
    rates = [found.hit_rate for _, line in _lines(report) for found in line]
    low, high = _bounds([*rates, report.unlimited.hit_rate])
    across = _across(sizes)

    def up(rate: float) -> float:
        return _TOP + (high - rate) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        *_axes(sizes, across, up, (low, high)),
        _text(_LEFT, 380, f"size of the pool in {unit}", "start"),
    ]
    level = up(report.unlimited.hit_rate)
    parts.append(
        f'<path d="M{_LEFT} {level:.1f}H{_WIDTH - _RIGHT}" class="axis" stroke-dasharray="1 4"/>'
    )
    for name, line in _lines(report):
        points = [(across(one), up(found.hit_rate)) for one, found in zip(sizes, line, strict=True)]
        parts += _drawn(name, points)
    parts += _legend(report)
    title = f"{report.path.rpartition('/')[2]}: share of prompt tokens found"
    if report.synthetic:
        title += f", with synthetic reasoning ({report.synthetic})"
    parts.append(_text(_LEFT, 24, title, at="start", weight="600"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{escape(title)} over the size of the pool</title>"
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _lines(report: TrafficReport) -> list[tuple[str, list[ReuseFigures]]]:
    lines = [(name, [getattr(row, name) for row in report.rows]) for name in POLICIES]
    return [(name, line) for name, line in lines if None not in line]


def _bounds(rates: Sequence[float]) -> tuple[float, float]:
    """Tenths around all rates."""
    low = math.floor(min(rates) * 10) / 10
    return low, max(math.ceil(max(rates) * 10) / 10, low + 0.1)


def _across(sizes: Sequence[float]) -> Callable[[float], float]:
    """Where a size is: sizes that differ by the same factor are equally far apart."""
    least, most = min(sizes), max(sizes)
    width = _WIDTH - _LEFT - _RIGHT - 24
    if least == most:
        return lambda _size: _middle()
    span = math.log(most / least)
    return lambda size: _LEFT + 12 + math.log(size / least) / span * width


def _middle() -> float:
    return (_LEFT + _WIDTH - _RIGHT) / 2


def _axes(
    sizes: Sequence[float],
    across: Callable[[float], float],
    up: Callable[[float], float],
    bounds: tuple[float, float],
) -> list[str]:
    floor = _HEIGHT - _BOTTOM
    found = []
    low, high = (round(one * 10) for one in bounds)
    for tenth in range(low, high + 1):
        at = up(tenth / 10)
        found.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" class="grid"/>')
        found.append(_text(_LEFT - 8, at + 4.5, f"{tenth * 10} %", at="end"))
    found.append(f'<path d="M{_LEFT} {_TOP}V{floor}H{_WIDTH - _RIGHT}" class="axis" fill="none"/>')
    for size in _ticks(min(sizes), max(sizes)):
        at = across(size)
        found.append(f'<path d="M{at:.1f} {floor}v5" class="axis"/>')
        found.append(_text(at, floor + 20, _short(size)))
    return found


def _ticks(least: float, most: float) -> list[float]:
    """Round numbers between two sizes; at least one."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    found = [
        step * 10.0**power
        for power in powers
        for step in (1, 2, 5)
        if least <= step * 10.0**power <= most
    ]
    return found or [least]


def _short(size: float) -> str:
    for unit, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if size >= unit:
            return f"{size / unit:.3g}{letter}"
    return f"{size:.3g}"


def _drawn(name: str, points: Sequence[tuple[float, float]]) -> list[str]:
    colour, dashes, _ = _LOOKS[name]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'
    return [line, *(_mark(name, x, y) for x, y in points)]


def _mark(name: str, x: float, y: float) -> str:
    colour, _, shape = _LOOKS[name]
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    # The others are hollow, so that equal values show both marks.
    around = {
        "square": "m-5-5h10v10h-10z",
        "diamond": "m0-8l8 8l-8 8l-8-8z",
        "triangle": "m0-6l6 10h-12z",
    }[shape]
    path = f"M{x:.1f} {y:.1f}{around}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _legend(report: TrafficReport) -> list[str]:
    found = []
    names = [(name, POLICIES[name]) for name, _ in _lines(report)]
    for number, (name, label) in enumerate(names):
        x, y = _LEFT + 340 * (number % 2), 402 + 20 * (number // 2)
        if name == "kvtrie":
            what = (
                "with approximate KV" if report.shows_moved_runs else f"exact part ({NOT_VISIBLE})"
            )
            label += f", {what}"  # noqa: PLW2901 - the label that is drawn
        found += [*_drawn(name, [(x + 4, y), (x + 34, y)]), _text(x + 46, y + 4.5, label, "start")]
    rate = f"dotted: pool without limits, {100 * report.unlimited.hit_rate:.1f} %"
    return [*found, _text(_WIDTH - _RIGHT, 380, rate, "end")]


def _text(x: float, y: float, words: str, at: str = "middle", weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{at}" font-weight="{weight}" class="n">'
        f"{escape(words)}</text>"
    )
