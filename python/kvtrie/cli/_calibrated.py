"""Shows what reuse costs by kind of edit, as tables or as one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvtrie.cli import _output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie import gates
    from kvtrie.calibrate.measure import Report

_LISTS = ("kl_excess", "top1_drop", "losses")


def as_json(report: Report, thresholds: gates.Thresholds) -> str:
    """The report as one JSON document: divergences in nats, lengths in tokens."""
    return json.dumps(document(report, thresholds), ensure_ascii=False, indent=2)


def document(report: Report, thresholds: gates.Thresholds) -> dict[str, Any]:
    return {
        "kvtrie": version("kvtrie"),
        "model": report.model,
        "kv_dtype": report.kv_dtype,
        "template": report.template,
        "data": report.data,
        "block_size": report.block_size,
        "min_run": report.min_run,
        "conversations": report.conversations,
        "outside_of_all_kinds": report.outside,
        "thresholds": asdict(thresholds),
        "policies": [
            {
                "policy": one.name,
                "cleared": [kind.name for kind in one.cleared(thresholds)],
                "least_lost": one.least_lost(thresholds),
                "most_lost": one.most_lost(thresholds),
                "kinds": [_kind(kind, thresholds) for kind in one.kinds],
            }
            for one in report.measured
        ],
    }


def _kind(kind: gates.Kind, thresholds: gates.Thresholds) -> dict[str, Any]:
    return {
        "kind": kind.name,
        **asdict(kind.verdict(thresholds)),
        "box": asdict(kind.box),
        **_figures(kind.figures),
        "floor": _figures(kind.floor),
        "controls": {one.name: _figures(one.figures) for one in kind.controls},
    }


def _figures(figures: gates.Figures) -> dict[str, Any]:
    found = {name: value for name, value in asdict(figures).items() if name not in _LISTS}
    low, high = figures.interval
    return {
        **found,
        "right": figures.right,
        "loss": figures.loss,
        "loss_low": low,
        "loss_high": high,
        "saved": figures.saved,
    }


def show(report: Report, thresholds: gates.Thresholds) -> None:
    console = _output.console()
    console.print(
        Text(
            f"{report.model}, KV in {report.kv_dtype}, {report.data}, blocks of "
            f"{report.block_size}, moved runs of at least {report.min_run} tokens"
        )
    )
    conversations = ", ".join(f"{count} {edit}" for edit, count in report.conversations.items())
    console.print(Text(f"conversations: {conversations}"))
    console.print(table(report.measured, thresholds))
    for one in report.measured:
        for kind in one.kinds:
            verdict = kind.verdict(thresholds)
            if verdict.reason is not None:
                console.print(Text(f"{one.name}, {kind.name}: {verdict.state}: {verdict.reason}"))
    if report.outside:
        console.print(Text(f"{report.outside} replies were of no kind"))
    for one in report.measured:
        console.print(Text(summary(one, thresholds)))


def table(measured: Sequence[gates.Measured], thresholds: gates.Thresholds) -> Table:
    found = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("policy", "kind of edit"):
        found.add_column(name, no_wrap=True)
    for name in (
        "conver-\nsations",
        "posi-\ntions",
        "\ncomputed",
        "KL above\nexact",
        "KL\n99 %",
        "top 1\nof exact",
        "lost of\nright",
        "lost by\nexact",
        "lost by\ncontrols",
    ):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("verdict", no_wrap=True)
    for one in measured:
        for kind in one.kinds:
            found.add_row(one.name, kind.name, *_cells(kind), kind.verdict(thresholds).state)
    return found


def _cells(kind: gates.Kind) -> list[str]:
    one, floor = kind.figures, kind.floor
    prompt = one.exact + one.moved + one.computed
    top1 = one.top1 / floor.top1 if floor.top1 else 0.0
    return [
        str(one.cases),
        str(one.positions),
        f"{one.computed / prompt:.1%}" if prompt else "",
        f"{one.kl_mean - floor.kl_mean:.2g}",
        f"{one.kl_p99:.2g}",
        f"{top1:.1%}",
        f"{one.lost - one.gained} of {one.right_full}",
        str(floor.lost - floor.gained),
        ", ".join(str(each.figures.lost - each.figures.gained) for each in kind.controls),
    ]


def summary(one: gates.Measured, thresholds: gates.Thresholds) -> str:
    kept = one.cleared(thresholds)
    if not kept:
        return f"{one.name}: nothing is cleared for this model"
    least, most = one.least_lost(thresholds), one.most_lost(thresholds)
    lost = sum(kind.figures.lost for kind in kept)
    gained = sum(kind.figures.gained for kind in kept)
    questions = sum(kind.figures.questions for kind in kept)
    names = ", ".join(kind.name for kind in kept)
    bound = "" if most is None else f", at most {100 * most:.2f} points (95 %)"
    if least and most is not None:
        bound = f", {100 * least:.2f} to {100 * most:.2f} points (each end 95 %)"
        if least > thresholds.max_loss:
            bound += f": more than {100 * thresholds.max_loss:.2f}, which no kind alone shows"
    return (
        f"{one.name}: cleared for this model after {names}: {lost} replies lost and {gained} "
        f"gained of {questions}{bound}"
    )
