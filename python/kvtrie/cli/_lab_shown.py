"""Shows a report of the lab as tables, with the costliest divergence of each conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from kvtrie.cli._failure import printable
from kvtrie.cli._output import console

if TYPE_CHECKING:
    from rich.console import Console

    from kvtrie.lab import LookedUp, ReplayedChat, Row, TemplateReport

_LONGEST: Final = 160
_NEWS: Final = 0.01
_DIGITS: Final = 6

CAUSES: Final = {
    "reasoning": "the template dropped reasoning",
    "encoding": "the same text, encoded to other ids",
    "text": "the text changed",
}


def show(report: TemplateReport) -> None:
    """Print a report, in colour on a terminal without NO_COLOR."""
    out = console()
    if report.format is None:
        why = printable(report.why_unknown)
        out.print(Text(f"chat format: unknown ({why[:_LONGEST]}{'...' * (len(why) > _LONGEST)})"))
    else:
        out.print(Text(f"chat format: {report.format}; reasoning dropped at: {report.drops}"))
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in ("conversation", "changed"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "prompt", "prefix hit", "computed", "with kvtrie", "re-encoded"):
        table.add_column(name, justify="right", overflow="fold", min_width=_DIGITS)
    table.add_column("first difference", overflow="fold")
    default = {row.chat: row.measured for row in report.rows if not row.switch}
    shown = [row for row in report.rows if _is_news(row, default[row.chat])]
    for row in shown:
        table.add_row(*(Text(printable(cell)) for cell in _cells(row)))
    out.print(table)
    out.print(
        Text(
            f"Sums of tokens over all turns, blocks of {report.block_size}. computed: with prefix "
            "caching. with kvtrie: moved runs are approximate. re-encoded: replies whose text "
            "encodes to other ids than were sampled."
        )
    )
    if left := len(report.rows) - len(shown):
        out.print(
            Text(
                f"Not shown: {left} rows in which the computed tokens differ by less than 1 % "
                "from those by default (--json and the page have them)."
            )
        )
    if report.unvaried:
        names = ", ".join(report.unvaried)
        out.print(
            Text(f"Not varied, as the template does not say their values: {names} (use --set).")
        )
    if report.untried:
        names = ", ".join(report.untried)
        out.print(Text(f"Not tried, as others come before: {names} (use --set)."))
    _show_turns(out, report)
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
                f"{one.chat}: with {printable(one.change)}, {one.before - one.after} fewer tokens "
                f"are computed ({share:.0f} %), and prompts are {length if longer else 'as long'}"
            )
        )


def _is_news(row: Row, default: ReplayedChat | None) -> bool:
    found = row.measured
    if not row.switch or found is None or default is None:
        return True
    before, after = default.computed_by_prefix, found.computed_by_prefix
    return abs(after - before) >= _NEWS * before


def label(row: Row) -> str:
    """What is other than by default, in a cell."""
    named = ", ".join(f"{name}={_shown(value)}" for name, value in row.switch.items())
    return f"{named}, {row.when}" if row.when else named or "default"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _show_turns(out: Console, report: TemplateReport) -> None:
    """Every turn by default."""
    table = Table(title="\nTurn by turn", box=None, pad_edge=False, title_justify="left")
    table.add_column("conversation", overflow="fold")
    for name in ("turn", "prompt", "prefix hit", "movable", "computed"):
        table.add_column(name, justify="right", overflow="fold", min_width=_DIGITS)
    table.add_column("first difference", overflow="fold")
    for row in report.rows:
        turns = row.measured.turns if row.measured and not row.switch else ()
        for at, turn in enumerate(turns, 1):
            where = turn.divergence
            cells = [
                row.chat if at == 1 else "",
                str(at),
                str(turn.prompt),
                str(turn.prefix),
                str(turn.movable),
                str(turn.computed),
                f"token {where.position}: {CAUSES[where.cause]}" if where else "",
            ]
            table.add_row(*map(Text, cells))
    out.print(table)
    out.print(
        Text(
            "prefix hit: found by a prefix cache. movable: reused by kvtrie besides. computed: all "
            "but the prefix hit."
        )
    )


def _cells(row: Row) -> list[str]:
    found = row.measured
    if found is None:
        return [row.chat, label(row), *["-"] * 6, row.error]
    turn = _costliest(found)
    where = ""
    if turn is not None and turn.divergence is not None:
        at = found.turns.index(turn) + 1
        where = f"turn {at}, token {turn.divergence.position}: {CAUSES[turn.divergence.cause]}"
    return [
        row.chat,
        label(row),
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
