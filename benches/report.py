"""Renders `benches/figures.json` into `docs/benchmarks.md` and into the tables of the site.

The words around the figures, the goals and the prototype's figures are in `benches/report.toml`.
`python benches/report.py` writes the page; `--check` writes nothing and fails if the page does not
match the figures; `--tables` prints all tables, which `make docs` makes a page of the site.
"""

import argparse
import math
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
from workloads.registry import named

PAGE = figures.PATH.parent.parent / "docs" / "benchmarks.md"
WORDS = Path(__file__).resolve().parent / "report.toml"

Row = dict[str, Any]

UNITS = {"us": "µs"}

TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
AT_LEAST = "\N{GREATER-THAN OR EQUAL TO}"
AT_MOST = "\N{LESS-THAN OR EQUAL TO}"


@dataclass(frozen=True)
class Goal:
    """A goal and what was measured: `margin` is the ratio by which that is better than the goal.

    `figure` is without the unit, `measured` with it and with both sides of a ratio.
    """

    group: str
    what: str
    wanted: str
    figure: str
    measured: str
    margin: float
    is_met: bool


def main() -> int:
    parser = argparse.ArgumentParser(description="Render figures.json into docs/benchmarks.md.")
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    parser.add_argument("--tables", action="store_true", help="print all tables instead")
    parser.add_argument("--figures", type=Path, default=figures.PATH, help="the figures to render")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args()
    content = figures.load(options.figures)
    if options.tables:
        print(tables(content))
        return 0
    text = render(content)
    if not options.check:
        options.page.write_text(text, encoding="utf-8")
        return 0
    if options.page.exists() and options.page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{options.page.name} does not match {options.figures.name}: run benches/report.py")
    return 1


def render(content: dict[str, Any]) -> str:
    """The page: findings, goals and method."""
    sections: dict[str, list[Row]] = content["sections"]
    words = _words()
    parts = [
        words["introduction"],
        _machine(content),
        words["headlines"],
        _findings(sections, words["findings"]),
        _page_goals(content, words),
        "## Compared with other indexes",
        words["peers_text"],
        "## What a plan reuses",
        words["coverage_page"],
        _page_section(sections, "coverage", _all_coverage),
        words["turns_page"],
        "## First tokens of the embedded engine",
        words["generate"],
        _page_section(sections, "generate", _generate),
        words["method"],
        words["limits_of_figures"],
    ]
    return _joined(parts)


def tables(content: dict[str, Any]) -> str:
    """The appendix: all figures, in tables."""
    sections: dict[str, list[Row]] = content["sections"]
    words = _words()
    parts = [words["tables"], _all_goals(content)]
    for name, (title, body) in SECTIONS.items():
        parts += [f"## {title}", words.get(name, ""), _page_section(sections, name, body)]
        if name == "peers":
            parts += ["## Compared with a prototype", words["prototype"]]
            parts.append(_prototype(sections, words["marks"]))
    return _joined(parts)


def goals(content: dict[str, Any]) -> tuple[list[Goal], list[str]]:
    """All goals that something was measured for, and the names of the others."""
    sections: dict[str, list[Row]] = content["sections"]
    found, missing = [], []
    for row in sections.get("peers", []):
        unit = _unit(row)
        if row.get("goal") is not None:
            pair = f"{number(row['kvtrie'])} against {number(row['theirs'])} {unit}"
            found.append(goal_of(row["peer"], row["work"], row["ratio"], TIMES, row["goal"], pair))
        if row.get("kvtrie_goal") is not None:
            limit = row["kvtrie_goal"]
            found.append(goal_of("kvtrie", row["work"], row["kvtrie"], f" {unit}", limit=limit))
    for goal in _own_goals():
        value = _value(sections, goal)
        if value is None:
            missing.append(goal["what"])
            continue
        value *= goal.get("times", 1)
        group = SECTIONS[goal["section"]][0]
        unit = goal["unit"] if goal["unit"] == TIMES else f" {goal['unit']}"
        least, limit = goal.get("least"), goal.get("limit")
        found.append(goal_of(group, goal["what"], value, unit, least=least, limit=limit))
    return found, missing


def number(value: float | None) -> str:
    """A figure with three significant digits."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}" if digits > 0 else f"{round(value, digits):,.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first and a note are numbers, to the right."""
    marks = ["---" if index == 0 or title in _WORDS else "---:" for index, title in enumerate(head)]
    lines = [head, marks, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def turns(rows: Sequence[Row]) -> str:
    """One table per workload: what turn policies leave."""
    names = dict.fromkeys(row["workload"] for row in rows)
    return "\n".join(_turn([row for row in rows if row["workload"] == name]) for name in names)


_WORDS = ("Note", "Goal", "Compared with", "Met", "Measured")


def _words() -> dict[str, Any]:
    return tomllib.loads(WORDS.read_text(encoding="utf-8"))


def _joined(parts: Iterable[str]) -> str:
    return named("\n".join(part.strip() + "\n" for part in parts if part.strip()))


def _machine(content: dict[str, Any]) -> str:
    machine = content["machine"]
    if not machine:
        return "No figures are recorded: run `make bench`.\n"
    names = (
        ("cpu", "{}"),
        ("cores", "{} cores"),
        ("l3", "{} of last-level cache"),
        ("memory", "{} of memory"),
        ("os", "{}"),
        ("python", "Python {}"),
    )
    text = ", ".join(form.format(machine[name]) for name, form in names if name in machine)
    versions = ", ".join(
        f"{name} {version}" for name, version in sorted(content["versions"].items())
    )
    stamps = content["stamps"]
    other = [
        f"* The section `{name}` is of {stamp['date']}"
        + ("" if stamp["machine"] == machine else ", from another machine or Python")
        + "."
        for name, stamp in sorted(stamps.items())
        if stamp["date"] != content["date"] or stamp["machine"] != machine
    ]
    lines = [f"Measured on {content['date']}: {text}.", "", f"Versions: {versions}."]
    return "\n".join([*lines, *(["", *other] if other else [])]) + "\n"


def _own_goals() -> Iterable[dict[str, Any]]:
    for goal in _words()["goals"]:
        for text in goal.get("each", [""]):
            yield {
                key: value.replace("{}", text) if isinstance(value, str) else value
                for key, value in goal.items()
            }


def goal_of(
    group: str,
    what: str,
    value: float,
    unit: str,
    least: float | None = None,
    pair: str = "",
    limit: float | None = None,
) -> Goal:
    # Rounded down, so that 100 % means all of it.
    shown = f"{math.floor(value * 100 + 1e-4) / 100:g}" if unit == " %" else number(value)
    measured = f"{shown}{unit}" + (f" ({pair})" if pair else "")
    if least is not None:
        wanted, margin, is_met = f"{AT_LEAST} {least:,g}{unit}", value / least, value >= least
    elif limit is not None:
        # A measured 0 has no ratio to its limit.
        margin, is_met = limit / value if value else 1.0, value <= limit
        wanted = f"{AT_MOST} {limit:,g}{unit}"
    else:
        message = f"the goal {what!r} has no bound"
        raise ValueError(message)
    return Goal(group, named(what), wanted, shown, measured, margin, is_met)


def _goal_table(found: Iterable[Goal]) -> str:
    rows = [(f"{goal.group}: {goal.what}", goal.wanted, goal.measured) for goal in found]
    return table(("Work", "Goal", "Measured"), rows)


def _page_goals(content: dict[str, Any], words: dict[str, Any]) -> str:
    found, missing = goals(content)
    if not found:
        return "## Goals\n\nNo figures are recorded: run `make bench`.\n"
    failed = [goal for goal in found if not goal.is_met]
    parts = [f"## Goals\n\n{len(found) - len(failed)} of {len(found)} are met."]
    parts += [words["goals_text"], _goal_table(failed), words["reasons"]]
    if missing:
        parts.append("Not measured here (`make bench`): " + "; ".join(missing) + ".")
    return _joined(parts)


def _all_goals(content: dict[str, Any]) -> str:
    return f"## Goals\n\n{_goal_table(goals(content)[0])}"


def _findings(sections: dict[str, list[Row]], findings: list[dict[str, str]]) -> str:
    lines = []
    for finding in findings:
        wanted = {key: value for key, value in finding.items() if key in {"work", "peer"}}
        rows = [
            row for row in sections.get(finding["section"], []) if wanted.items() <= row.items()
        ]
        lines += [f"* {finding['says'].format_map(_said(row))}." for row in rows]
    return "\n".join(lines)


def _said(row: Row) -> dict[str, str]:
    said = {key: f"{value:,}" for key, value in row.items() if isinstance(value, int)}
    shares = [key for key in row if key.endswith(("_prompt", "_share"))]
    said |= {key: _percent(row[key]) for key in shares}
    for side in ("kvtrie", "theirs"):
        if row.get(side) is not None:
            said[side] = f"{number(row[side])} {_unit(row)}"
    return said | {"ratio": f"{number(row.get('ratio'))}{TIMES}"}


def _value(sections: dict[str, list[Row]], goal: dict[str, Any]) -> float | None:
    column = goal.get("column", "kvtrie")
    row = _find(sections, goal["section"], goal["work"])
    value: float | None = None if row is None else row.get(column)
    if value is None or "over" not in goal:
        return value
    other = _find(sections, goal["section"], goal["over"])
    return None if other is None else value / float(other[column])


def _find(sections: dict[str, list[Row]], section: str, work: str) -> Row | None:
    return next((row for row in sections.get(section, []) if row["work"] == work), None)


def _page_section(
    sections: dict[str, list[Row]], name: str, body: Callable[[list[Row]], str]
) -> str:
    rows = sections.get(name)
    command = "make bench-peers" if name == "peers" else "make bench"
    return body(rows) if rows else f"Not measured here: `{command}` makes this table."


def _peers(rows: list[Row]) -> str:
    peers = dict.fromkeys(row["peer"] for row in rows)
    return "\n".join(_peer(peer, [row for row in rows if row["peer"] == peer]) for peer in peers)


def _peer(peer: str, rows: list[Row]) -> str:
    notes = list(dict.fromkeys(row["note"] for row in rows if row.get("note")))
    cells = []
    for row in rows:
        mark = f" ({notes.index(row['note']) + 1})" if row.get("note") else ""
        cells.append(
            (
                f"{row['work']}{mark}",
                _cached(row),
                f"{number(row['kvtrie'])} {_unit(row)}",
                f"{number(row['theirs'])} {_unit(row)}",
                f"{number(row['ratio'])}{TIMES}",
            )
        )
    parts = [
        f"### {peer}\n",
        table(("Work", "Cached tokens", "kvtrie", peer.partition(",")[0], "Ratio"), cells),
    ]
    if notes:
        parts.append("".join(f"{place}. {note}.\n" for place, note in enumerate(notes, 1)))
    parts += [
        f"Single calls, “{row['work']}”: kvtrie's 99th percentile is {number(row['kvtrie_p99'])} "
        f"{_unit(row)}, the longest of {row['rounds']:,} took {number(row['kvtrie_max'])}; "
        f"{peer}'s took {number(row['theirs_p99'])} and {number(row['theirs_max'])}.\n"
        for row in rows
        if "kvtrie_max" in row
    ]
    return "\n".join(parts)


def _prototype(sections: dict[str, list[Row]], marks: list[dict[str, Any]]) -> str:
    rows = []
    for mark in marks:
        # Rows of other sections are in the column of the prototype's own Rust.
        cells = {"native": DASH, "python": DASH}
        factors = []
        for ours in mark["ours"]:
            row = _find(sections, ours["section"], ours["work"])
            if row is not None and row["kvtrie"] is not None:
                column = "python" if ours["section"] in {"python", "moved"} else "native"
                cells[column] = number(row["kvtrie"])
                factors.append(row["kvtrie"] / ours["upper"])
        rows.append(
            (
                mark["work"],
                mark["native"],
                cells["native"],
                mark["python"],
                cells["python"],
                " / ".join(map(number, factors)) or DASH,
            )
        )
    columns = ("Prototype", "kvtrie", "Prototype, Python", "kvtrie, Python", "Factor")
    return table(("Work", *columns), rows)


def _own(rows: list[Row]) -> str:
    cells = [
        (
            row["work"],
            f"{number(row['kvtrie'])} {_unit(row)}",
            number(row.get("kvtrie_p10")),
            number(row.get("kvtrie_p90")),
            _each(row),
        )
        for row in rows
    ]
    return table(("Work", "Median", "10 %", "90 %", "Each"), cells)


def _generate(rows: list[Row]) -> str:
    cells = [
        (
            row["work"],
            f"{row['computed']:,} of {row['prompt']:,} ({row['computed_share']:.1%})",
            f"{row['computed_after_exact_prefix']:,}",
            f"{number(row['kvtrie'] / 1e3)} ms",
            f"{number(row['exact_prefix'] / 1e3)} ms",
            f"{number(row['ratio'])}{TIMES}",
        )
        for row in rows
    ]
    head = ("Work", "Computed", "Exact prefix alone", "First token", "Exact prefix alone", "Ratio")
    return table(head, cells)


def _coverage(rows: list[Row]) -> str:
    variants = dict.fromkeys(row["variant"] for row in rows if "variant" in row)
    return "\n".join(
        _variant(variant, [row for row in rows if row.get("variant") == variant])
        for variant in variants
    )


def _all_coverage(rows: list[Row]) -> str:
    every = [row for row in rows if "variant" in row and "workload" not in row]
    return _shares("Conversations", [(row["variant"].capitalize(), row) for row in every])


def _variant(variant: str, rows: list[Row]) -> str:
    named = [
        (f"{row['workload']} {row['name']}" if "workload" in row else "**all**", row)
        for row in rows
    ]
    return f"### {variant.capitalize()}\n\n" + _shares("Workload", named)


def _shares(head: str, rows: Iterable[tuple[str, Row]]) -> str:
    cells = [
        (
            name,
            _percent(row.get("exact_of_prompt")),
            _percent(row.get("possible_of_prompt")),
            _percent(row.get("found_of_prompt")),
            _percent(row.get("own_of_prompt")),
            _percent(row.get("no_id_of_prompt")),
            _percent(row["kvtrie"]),
            _percent(row["lowest"]),
            f"{row['candidates_dropped']:,}",
        )
        for name, row in rows
    ]
    columns = (
        *("Exact", "Could be reused", "Reused", "Own, by id", "Own, without id"),
        *("Of what could be", "Lowest", "Dropped"),
    )
    return table((head, *columns), cells)


def _turn(rows: list[Row]) -> str:
    columns = {
        "Needed": "needed",
        "Kept": "kept",
        "Freed": "freed",
        "Marked dead": "dead",
        "Evicted": "evicted",
        "Exact": "exact",
        "To compute": "exact_compute",
        "Approximate: exact": "approximate_exact",
        "Moved": "approximate_moved",
        "To compute then": "approximate_compute",
    }
    cells = [(row["policy"], *(f"{row[key]:,}" for key in columns.values())) for row in rows]
    row = rows[0]
    text = (
        f"### {row['workload']} {row['name']}\n\n{row['cached']:,} tokens are cached; "
        f"the next prompt has {row['prompt']:,}.\n\n"
    )
    return text + table(("Policy", *columns), cells)


def _percent(share: float | None) -> str:
    # Rounded down, so that 100 % means all of it.
    return DASH if share is None else f"{math.floor(share * 10_000 + 1e-6) / 100:.2f} %"


def _limits(rows: list[Row]) -> str:
    cells = [
        (
            row["work"],
            f"{number(row['limit'])} {_unit(row)}",
            row.get("kvtrie_work", ""),
            "" if row["kvtrie"] is None else f"{number(row['kvtrie'])} {_unit(row)}",
            "" if row["kvtrie"] is None else f"{number(row['kvtrie'] / row['limit'])}{TIMES}",
        )
        for row in rows
    ]
    return table(("Limit", "Time", "Compared with", "kvtrie", "Factor"), cells)


def _hostile(rows: list[Row]) -> str:
    cells = [
        (
            row["work"],
            f"{number(row['kvtrie'])} {_unit(row)}",
            f"{number(row['idle'])} {_unit(row)}",
            f"{number(row['cpu'])} {_unit(row)}",
            f"{number(row['ns_each'])} ns per {row['each']}",
        )
        for row in rows
    ]
    head = ("Call", "Longest wait", "Without the call", "CPU time of the call", "Each")
    return table(head, cells)


def _memory(rows: list[Row]) -> str:
    cells = [
        (
            row["work"],
            number(row["kvtrie"]),
            number(row.get("a_block")),
            number(row.get("an_edge_overhead")),
            number(row.get("resident_a_token")),
        )
        for row in rows
    ]
    head = (
        "Shape",
        "Bytes per token",
        "Bytes per block",
        "Bytes per edge without its blocks",
        "Resident bytes per token",
    )
    return table(head, cells)


def _instructions(rows: list[Row]) -> str:
    cells = [(row["work"], number(row["kvtrie"])) for row in rows]
    return table(("Work", "Instructions"), cells)


def _cached(row: Row) -> str:
    cached = row.get("cached")
    return DASH if cached is None else f"{cached:,}"


def _unit(row: Row) -> str:
    unit: str = UNITS.get(row["unit"]) or row["unit"]
    return f"{unit} per {row['per']}" if "per" in row else unit


def _each(row: Row) -> str:
    for key, value in row.items():
        if key.startswith(("ns_a_", "ns_per_")):
            return f"{number(value)} ns per {key.rpartition('_')[2]}"
    return DASH


# The tables, in their order: a section of the figures, its title, and what writes it.
SECTIONS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "peers": ("Compared with other indexes", _peers),
    "coverage": ("What a plan reuses", _coverage),
    "turns": ("What a turn leaves", turns),
    "generate": ("First tokens of the embedded engine", _generate),
    "moved": ("Moved runs", _own),
    "hostile": ("What one tenant keeps another waiting for", _hostile),
    "python": ("From Python", _own),
    "rust": ("In Rust", _own),
    "limits": ("What the machine allows", _limits),
    "limits-python": ("What the machine allows in Python", _limits),
    "memory": ("Memory", _memory),
    "instructions": ("Instructions", _instructions),
    "traces": ("Recorded traffic", _own),
}

if __name__ == "__main__":
    sys.exit(main())
