"""Shows what reuse costs: tables for people, one JSON document for machines."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kvtrie import gates
    from kvtrie.calibrate.measure import Report, Result

_WIDTH: Final = 120


def as_json(report: Report, thresholds: gates.Thresholds) -> str:
    """The figures as one JSON document; divergences in nats, lengths in tokens."""
    return json.dumps(document(report, thresholds), ensure_ascii=False, indent=2)


def document(report: Report, thresholds: gates.Thresholds) -> dict[str, Any]:
    """The figures as plain values."""
    return {
        "kvtrie": version("kvtrie"),
        "model": report.model,
        "kv_dtype": report.kv_dtype,
        "data": report.data,
        "block_size": report.block_size,
        "min_run": report.min_run,
        "conversations": report.conversations,
        "thresholds": asdict(thresholds),
        "results": [
            {
                "policy": result.policy.name,
                "approximate": result.policy.reuse.approximate,
                **asdict(result.figures),
                "right": result.figures.right,
                "loss": result.figures.loss,
                "loss_low": result.figures.interval[0],
                "loss_high": result.figures.interval[1],
                "saved": result.figures.saved,
                "share_of_savings": report.savings(result),
                "within_thresholds": verdict(result, thresholds),
            }
            for result in report.results
        ],
    }


def verdict(result: Result, thresholds: gates.Thresholds) -> bool | None:
    """Whether the figures are within the thresholds; None where nothing is to be cleared."""
    if not result.policy.can_be_cleared:
        return None
    return result.figures.failure(thresholds) is None


def show(report: Report, thresholds: gates.Thresholds) -> None:
    """Print one table a scenario and what is cleared to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(
        Text(
            f"{report.model}, KV in {report.kv_dtype}, {report.data}, blocks of "
            f"{report.block_size}, moved runs of at least {report.min_run} tokens"
        )
    )
    for scenario, conversations in report.conversations.items():
        found = [one for one in report.results if one.figures.scenario == scenario]
        positions = found[0].figures.positions
        console.print(
            Text(
                f"\n{scenario}: {conversations} conversations, {positions} positions", style="bold"
            )
        )
        console.print(_table(report, found, thresholds))
    console.print(Text(_summary(report, thresholds)))


def _table(report: Report, found: list[Result], thresholds: gates.Thresholds) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in (
        "tokens\nexact",
        "\nmoved",
        "\ncomputed",
        "of what can\nbe saved",
        "KL\nmean",
        "\n99 %",
        "same\ntop 1",
        "questions\nright",
        "points of accuracy\nlost (95 %)",
        "within\nlimits",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for result in found:
        one, share = result.figures, report.savings(result)
        kept = verdict(result, thresholds)
        table.add_row(
            result.policy.name,
            str(one.exact),
            str(one.moved),
            str(one.computed),
            "" if share is None else f"{share:.0%}",
            f"{one.kl_mean:.2g}",
            f"{one.kl_p99:.2g}",
            f"{one.top1:.1%}",
            f"{one.right} of {one.questions}" if one.questions else "",
            loss_text(result) if one.questions else "",
            {True: "yes", False: "no", None: ""}[kept],
        )
    return table


def loss_text(result: Result) -> str:
    """The loss and its interval, in points."""
    one = result.figures
    low, high = one.interval
    low, loss, high = (100 * value + 0.0 for value in (low, one.loss, high))
    return f"{loss:.2f} ({low:.2f} to {high:.2f})"


def _summary(report: Report, thresholds: gates.Thresholds) -> str:
    if not any(result.policy.can_be_cleared for result in report.results):
        return "no policy was measured that could be cleared"
    gate = report.gate(thresholds)
    cleared = [one.name for one in gate.cleared()]
    if cleared:
        return "cleared for this model, most tokens saved first: " + ", ".join(cleared)
    reason = gate.measured[0].failure(thresholds)
    return f"nothing is cleared for this model: {gate.measured[0].name}: {reason}"
