"""Shows what reuse costs, as tables or as one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvtrie import gates
from kvtrie.cli import _output

if TYPE_CHECKING:
    from kvtrie.calibrate.measure import Report, Result


def as_json(report: Report, thresholds: gates.Thresholds) -> str:
    """The report as one JSON document: divergences in nats, lengths in tokens."""
    return json.dumps(document(report, thresholds), ensure_ascii=False, indent=2)


def document(report: Report, thresholds: gates.Thresholds) -> dict[str, Any]:
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
                **asdict(verdict(report, result, thresholds)),
            }
            for result in report.results
        ],
    }


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one policy in one scenario alone.

    Attributes:
        within_thresholds: None if the data cannot show it, or if no request can ask for the policy.
        reason: Why not, or why the data cannot show it, with value and limit.
        questions_needed: How many would decide it if no further answer is lost; None if no number
            would.
    """

    within_thresholds: bool | None
    reason: str | None = None
    questions_needed: int | None = None


def verdict(report: Report, result: Result, thresholds: gates.Thresholds) -> Verdict:
    """The verdict on one scenario; the gate also combines all scenarios."""
    figures = result.figures
    if not result.policy.can_be_cleared:
        return Verdict(None)
    flaw = figures.flaw()
    failed = [flaw] if flaw is not None else figures.outside(thresholds)
    if failed:
        return Verdict(within_thresholds=False, reason="; ".join(failed))
    unknown = figures.blind(report.controls, thresholds)
    needed = None
    high = figures.interval[1]
    if high > thresholds.max_loss:
        needed = gates.questions_needed(figures.lost, figures.gained, thresholds.max_loss)
        wanted = "no number is enough" if needed is None else f"{needed} questions are needed"
        unknown.append(
            f"up to {100 * high:.2f} points may be lost, the limit is "
            f"{100 * thresholds.max_loss:.2f}: {wanted}, {figures.questions} were asked"
        )
    if unknown:
        return Verdict(None, "; ".join(unknown), needed)
    return Verdict(within_thresholds=True)


def show(report: Report, thresholds: gates.Thresholds) -> None:
    console = _output.console()
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
        for one in found:
            reason = verdict(report, one, thresholds).reason
            if reason is not None:
                console.print(Text(f"{one.policy.name}: {reason}"))
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
        kept = verdict(report, result, thresholds)
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
            _within(kept) if result.policy.can_be_cleared else "",
        )
    return table


def _within(kept: Verdict) -> str:
    if kept.within_thresholds is not None:
        return "yes" if kept.within_thresholds else "no"
    needed = kept.questions_needed
    return "undecided" if needed is None else f"undecided: {needed} needed"


def loss_text(result: Result) -> str:
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
    reason = gate.measured[0].failure(thresholds, gate.controls)
    return f"nothing is cleared for this model: {gate.measured[0].name}: {reason}"
