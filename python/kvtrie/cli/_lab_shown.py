"""Shows a report of the lab as tables, with the costliest divergence of each conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from kvtrie.cli._output import console

if TYPE_CHECKING:
    from rich.console import Console

    from kvtrie.lab import LookedUp, ReplayedChat, Row, TemplateReport

_LONGEST: Final = 160

CAUSES: Final = {
    "reasoning": "the template dropped reasoning",
    "encoding": "the same text, encoded to other ids",
    "text": "the text changed",
}


def show(report: TemplateReport) -> None:
    """Print a report, in colour on a terminal without NO_COLOR."""
    out = console()
    if report.format is None:
        why = report.why_unknown
        out.print(Text(f"chat format: unknown ({why[:_LONGEST]}{'...' * (len(why) > _LONGEST)})"))
    else:
        out.print(Text(f"chat format: {report.format}; reasoning dropped at: {report.drops}"))
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in ("conversation", "switch"):
        table.add_column(name)
    for name in ("turns", "prompt", "prefix hit", "computed", "with kvtrie", "re-encoded"):
        table.add_column(name, justify="right")
    table.add_column("first difference")
    for row in report.rows:
        table.add_row(*map(Text, _cells(row)))
    out.print(table)
    out.print(
        Text(
            f"Sums of tokens over all turns, blocks of {report.block_size}. computed: with prefix "
            "caching. with kvtrie: moved runs are approximate. re-encoded: replies whose text "
            "encodes to other ids than were sampled."
        )
    )
    for row in report.rows:
        turn = None if row.switch else _costliest(row.measured)
        if turn is not None:
            _show_divergence(out, row, turn)
    for one in report.savings:
        share = 100 * (one.before - one.after) / one.before
        longer = one.prompt_after - one.prompt_before
        length = f"{abs(longer)} tokens {'longer' if longer > 0 else 'shorter'}"
        out.print(
            Text(
                f"{one.chat}: with {one.change}, {one.before - one.after} tokens less are computed "
                f"({share:.0f} %), and prompts are {length if longer else 'as long'}"
            )
        )


def label(switch: dict[str, object]) -> str:
    """A setting of the template's switches, in a cell."""
    return ", ".join(f"{name}={value}" for name, value in switch.items()) or "default"


def _cells(row: Row) -> list[str]:
    found = row.measured
    if found is None:
        return [row.chat, label(row.switch), *["-"] * 6, row.error]
    turn = _costliest(found)
    where = ""
    if turn is not None and turn.divergence is not None:
        at = found.turns.index(turn) + 1
        where = f"turn {at}, token {turn.divergence.position}: {CAUSES[turn.divergence.cause]}"
    return [
        row.chat,
        label(row.switch),
        str(len(found.turns)),
        str(found.prompt),
        str(found.prompt - found.computed_by_prefix),
        str(found.computed_by_prefix),
        str(found.computed),
        str(sum(one.reencoded is not None for one in found.turns)),
        where,
    ]


def _costliest(found: ReplayedChat | None) -> LookedUp | None:
    """The turn that computes most after a divergence."""
    turns = [one for one in found.turns if one.divergence is not None] if found else []
    return max(turns, key=lambda one: one.prompt - one.prefix, default=None)


def _show_divergence(out: Console, row: Row, turn: LookedUp) -> None:
    where = turn.divergence
    if where is None or row.measured is None:
        return
    at = row.measured.turns.index(turn) + 1
    kind = f", {where.kind}" if where.kind else ""
    out.print(
        Text(f"\n{row.chat}, turn {at}: differs at token {where.position} of {turn.prompt}{kind}")
    )
    out.print(Text(f"  why     {where.reason}", style="dim"))
    for name, text, style in (("cached", where.cached, "red"), ("prompt", where.prompt, "green")):
        line = Text(f"  {name}  ").append(repr(where.before[-60:]), style="dim")
        out.print(line.append(" | ", style="bold").append(repr(text[:90]), style=style))
    after = turn.prompt - where.position
    out.print(Text(f"  kvtrie moves {where.movable_after} of {after} tokens after it"))
