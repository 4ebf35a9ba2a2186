"""Shows a replayed trace: what it is, tables over the sizes of the pool, and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from kvtrie.cli._failure import printable
from kvtrie.cli._output import console
from kvtrie.replay.report import NOT_KNOWN, NOT_MARKED, NOT_VISIBLE, POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.replay import LogGaps, PoolRow, ReuseFigures, TrafficReport

_GB: Final = 1e9


def show(report: TrafficReport, *, with_answers: bool) -> None:
    """Print a report."""
    out = console()
    for line in head(report):
        out.print(Text(printable(line)))
    for title, columns, rows in tables(report):
        table = Table(title=title, box=None, pad_edge=False, title_justify="left")
        for name in columns:
            is_size = name.startswith("pool")
            table.add_column(name, justify="right", overflow="fold", no_wrap=is_size)
        for row in rows:
            table.add_row(*map(Text, row))
        out.print(table)
    for line in answers(report) if with_answers else []:
        out.print(Text(line))


def head(report: TrafficReport) -> list[str]:
    """What was replayed, and what the trace does not show."""
    what = f"{report.num_requests:,} requests, {report.prompt_tokens:,} prompt tokens"
    found = [f"{report.path} ({report.format}): {what}, blocks of {report.block_size} tokens"]
    if report.synthetic:
        overlay = f"overlay {report.synthetic}"
        found.append(f"replies and reasoning are synthetic ({overlay}): the trace marks none")
    if report.tokens_are:
        found.append(f"tokens are {report.tokens_are}")
    if report.reasoning:
        found.append(report.reasoning)
    if not report.shows_moved_runs:
        found.append(f"{NOT_VISIBLE}: the trace names blocks and shows no tokens")
    return [*found, *_gaps(report.gaps)]


def _gaps(gaps: LogGaps | None) -> list[str]:
    """What a log does not have, and what that does to the figures."""
    if gaps is None:
        return []
    found = []
    if gaps.rate < 1:
        each = f"as one {1 / gaps.rate:,.3g} times as large has of all" if gaps.rate else "more"
        found.append(
            f"sampled: {100 * gaps.rate:.3g} % of the sessions are in the log: what sessions share "
            f"is found too seldom, and a pool has room for as much of this traffic {each}"
        )
    if gaps.rate < 1 and gaps.without_session:
        found.append(
            f"{gaps.without_session:,} requests name no session and were sampled one by one: their "
            "conversations have gaps, and hit rates are too low"
        )
    if gaps.dropped:
        found.append(f"{gaps.dropped:,} requests were not recorded: hit rates are too low")
    if gaps.num_cut:
        lines = "1 cut last line" if gaps.num_cut == 1 else f"{gaps.num_cut} cut last lines"
        found.append(f"{lines} of the log: not read")
    if gaps.recorders > 1:
        found.append(f"{gaps.recorders} processes wrote the log, each with a key of its own")
    return found


def tables(report: TrafficReport) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, columns and rows."""
    found = [
        _table(report, "hit rate", _rate, "at least"),
        _table(report, "prompt tokens computed", _tokens, "at most"),
    ]
    each = report.bytes_per_token
    if each is not None:
        found.append(
            _table(
                report,
                "KV computed, in GB",
                lambda one: f"{one.computed * each / _GB:,.1f}",
                "at most",
            )
        )
    return found


def answers(report: TrafficReport) -> list[str]:
    """What each size of the pool means, in a sentence."""
    found = []
    for row in report.rows:
        parts = [
            f"{label} finds {_rate(one)} and computes {_with_bytes(report, one.computed)}"
            for name, label in POLICIES.items()
            if (one := getattr(row, name)) is not None
            if name != "kvtrie" or report.shows_moved_runs
        ]
        if not report.shows_moved_runs:
            parts.append(f"kvtrie finds {_rate(row.kvtrie)} as exact KV ({NOT_VISIBLE})")
        size = _with_bytes(report, row.num_tokens)
        found.append(f"a pool of {size}: {'; '.join(parts)}")
    whole = _with_bytes(report, report.distinct_tokens)
    rate = _rate(report.unlimited)
    found.append(f"prefix reuse without limits finds {rate}: nothing is evicted from {whole}")
    return found


def _table(
    report: TrafficReport, title: str, cell: Callable[[ReuseFigures], str], bound: str
) -> tuple[str, list[str], list[list[str]]]:
    each = report.bytes_per_token
    missing = NOT_KNOWN if report.reasoning else NOT_MARKED
    sizes = ["pool, tokens", *(["pool, GB"] if each else [])]
    rows = []
    for row in report.rows:
        begin = [f"{row.num_tokens:,}", *([f"{row.num_tokens * each / _GB:,.2f}"] if each else [])]
        rows.append([*begin, *(_cell(row, name, cell, bound, missing) for name in POLICIES)])
    rest = [""] * (len(POLICIES) - 1)
    rows.append(["no limit", *([""] if each else []), cell(report.unlimited), *rest])
    return title, [*sizes, *POLICIES.values()], rows


def _cell(
    row: PoolRow, name: str, cell: Callable[[ReuseFigures], str], bound: str, missing: str
) -> str:
    found: ReuseFigures | None = getattr(row, name)
    if found is None:
        return missing
    if found.approximate is None:
        return f"{bound} {cell(found)}, {NOT_VISIBLE}"
    return cell(found)


def _rate(found: ReuseFigures) -> str:
    rate = f"{100 * found.hit_rate:.1f} %"
    if not found.approximate:
        return rate
    prompts = found.exact + found.approximate + found.computed
    return f"{rate} ({100 * found.approximate / prompts:.1f} % approximate)"


def _tokens(found: ReuseFigures) -> str:
    return f"{found.computed:,}"


def _with_bytes(report: TrafficReport, tokens: int) -> str:
    if report.bytes_per_token is None:
        return f"{tokens:,} tokens"
    return f"{tokens * report.bytes_per_token / _GB:,.1f} GB ({tokens:,} tokens)"
