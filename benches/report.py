"""Renders `benches/figures.json` into `docs/benchmarks.md`.

The words around the tables, the goals and the prototype's figures are in `benches/report.toml`.
`python benches/report.py` writes the page; `--check` writes nothing and fails if the page does not
match the figures.
"""

import argparse
import math
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures

PAGE = figures.PATH.parent.parent / "docs" / "benchmarks.md"
WORDS = Path(__file__).resolve().parent / "report.toml"

Row = dict[str, Any]

COMMANDS = {
    "peers": "make bench-peers",
    "coverage": "make bench",
    "turns": "make bench",
    "generate": "make bench",
    "moved": "make bench",
    "hostile": "make bench",
    "python": "make bench",
    "rust": "make bench",
    "limits": "make bench",
    "limits-python": "make bench",
    "memory": "make bench",
    "instructions": "make bench",
    "traces": "make bench",
}

UNITS = {"us": "µs"}

TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
AT_LEAST = "\N{GREATER-THAN OR EQUAL TO}"
AT_MOST = "\N{LESS-THAN OR EQUAL TO}"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="Render figures.json into docs/benchmarks.md.")
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    parser.add_argument("--figures", type=Path, default=figures.PATH, help="the figures to render")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args()
    text = render(figures.load(options.figures))
    if not options.check:
        options.page.write_text(text, encoding="utf-8")
        return 0
    if options.page.exists() and options.page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{options.page.name} does not match {options.figures.name}: run benches/report.py")
    return 1


def render(content: dict[str, Any]) -> str:
    """The whole page.

    Args:
        content: What `figures.load` answers.
    """
    sections: dict[str, list[Row]] = content["sections"]
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    parts = [
        words["introduction"],
        _machine(content),
        _goals(sections, words["goals"]),
        words["method"],
        _section(sections, "peers", "Compared with other indexes", _peers),
        words["prototype"],
        _prototype(sections, words["marks"]),
        _section(
            sections,
            "coverage",
            "What a plan reuses",
            lambda rows: words["coverage"].strip() + "\n\n" + _coverage(rows),
        ),
        _section(
            sections,
            "turns",
            "What a turn leaves",
            lambda rows: words["turns"].strip() + "\n\n" + turns(rows),
        ),
        _section(
            sections,
            "generate",
            "First tokens of the embedded engine",
            lambda rows: words["generate"].strip() + "\n\n" + _generate(rows),
        ),
        _section(sections, "moved", "Moved runs", _own),
        _section(
            sections,
            "hostile",
            "What one tenant keeps another waiting for",
            lambda rows: words["hostile"].strip() + "\n\n" + _hostile(rows),
        ),
        _section(sections, "python", "From Python", _own),
        _section(sections, "rust", "In Rust", _own),
        _section(sections, "limits", "What the machine allows", _limits),
        _section(sections, "limits-python", "What the machine allows in Python", _limits),
        _section(sections, "memory", "Memory", _memory),
        _section(sections, "instructions", "Instructions", _instructions),
        _section(sections, "traces", "Recorded traffic", _own),
        words["weaknesses"],
    ]
    return "\n".join(part.strip() + "\n" for part in parts)


def number(value: float | None) -> str:
    """A figure with three digits that mean something.

    Args:
        value: None is a dash.
    """
    if value is None:
        return DASH
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}" if digits > 0 else f"{round(value, digits):,.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first and a note are numbers, to the right.

    Args:
        head: Titles of the columns.
        rows: Their cells.
    """
    marks = ["---" if index == 0 or title in _WORDS else "---:" for index, title in enumerate(head)]
    lines = [head, marks, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def turns(rows: Sequence[Row]) -> str:
    """A table a workload of what turn policies leave.

    Args:
        rows: As `benches/python/turns.py` makes them.
    """
    names = dict.fromkeys(row["workload"] for row in rows)
    return "\n".join(_turn([row for row in rows if row["workload"] == name]) for name in names)


_WORDS = ("Note", "What the difference buys", "Goal", "Compared with", "Met")


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


def _goals(sections: dict[str, list[Row]], goals: list[dict[str, Any]]) -> str:
    rows = []
    for row in sections.get("peers", []):
        if row.get("goal") is not None:
            pair = f"{number(row['kvtrie'])} against {number(row['theirs'])} {_unit(row)}"
            rows.append(
                (
                    f"{row['peer']}: {row['work']}",
                    f"{AT_LEAST} {row['goal']:g}{TIMES}",
                    f"{number(row['ratio'])}{TIMES} ({pair})",
                    _met(row["ratio"], at_least=row["goal"]),
                )
            )
        if row.get("kvtrie_goal") is not None:
            rows.append(
                (
                    f"kvtrie: {row['work']}",
                    f"{AT_MOST} {row['kvtrie_goal']:g} {_unit(row)}",
                    f"{number(row['kvtrie'])} {_unit(row)}",
                    _met(row["kvtrie"], at_most=row["kvtrie_goal"]),
                )
            )
    missing = []
    for goal in goals:
        value = _value(sections, goal)
        if value is None:
            missing.append(goal["what"])
            continue
        unit = goal["unit"]
        value *= goal.get("times", 1)
        if "least" in goal:
            wanted = f"{AT_LEAST} {goal['least']:g} {unit}"
            met = _met(value, at_least=goal["least"])
        else:
            wanted = f"{AT_MOST} {goal['limit']:g} {unit}"
            met = _met(value, at_most=goal["limit"])
        # Rounded down, so that 100 % means all of it.
        shown = f"{math.floor(value * 100 + 1e-4) / 100:g}" if unit == "%" else number(value)
        rows.append((goal["what"], wanted, f"{shown} {unit}", met))
    text = "## Goals\n\nWhat kvtrie set out to reach, and what it reaches here.\n\n"
    if rows:
        reached_all = sum(cells[-1] == "yes" for cells in rows)
        text += f"{reached_all} of {len(rows)} are met.\n\n"
        text += table(("Work", "Goal", "Measured", "Met"), rows)
    if missing:
        text += "\nNot measured here (`make bench`): " + "; ".join(missing) + ".\n"
    return text


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


def _section(
    sections: dict[str, list[Row]], name: str, title: str, body: Callable[[list[Row]], str]
) -> str:
    rows = sections.get(name)
    if not rows:
        return f"## {title}\n\nNot measured here: `{COMMANDS[name]}` makes this table.\n"
    return f"## {title}\n\n{body(rows)}"


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
        # What is no Python row stands in the column beside the prototype's own Rust.
        cells = {"native": DASH, "python": DASH}
        factors = []
        for ours in mark["ours"]:
            row = _find(sections, ours["section"], ours["work"])
            if row is not None and row["kvtrie"] is not None:
                column = "python" if ours["section"] in {"python", "moved"} else "native"
                cells[column] = number(row["kvtrie"])
                factors.append(row["kvtrie"] / ours["upper"])
        slower = not mark["ours"] or any(factor > 2 for factor in factors)
        rows.append(
            (
                mark["work"],
                mark["native"],
                cells["native"],
                mark["python"],
                cells["python"],
                " / ".join(map(number, factors)) or DASH,
                mark["buys"] if slower else "",
            )
        )
    columns = ("Prototype", "kvtrie", "Prototype, Python", "kvtrie, Python", "Factor")
    return table(("Work", *columns, "What the difference buys"), rows)


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


def _variant(variant: str, rows: list[Row]) -> str:
    cells = [
        (
            f"{row['workload']} {row['name']}" if "workload" in row else "**all**",
            _percent(row.get("exact_of_prompt")),
            _percent(row.get("possible_of_prompt")),
            _percent(row.get("found_of_prompt")),
            _percent(row["kvtrie"]),
            _percent(row["lowest"]),
            f"{row['candidates_dropped']:,}",
        )
        for row in rows
    ]
    columns = ("Exact", "Could be reused", "Reused", "Of what could be", "Lowest", "Dropped")
    return f"### {variant.capitalize()}\n\n" + table(("Workload", *columns), cells)


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
            f"{number(row['ns_each'])} ns a {row['each']}",
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
    text = "Counted by callgrind, so they are the same on an idle and on a busy machine.\n\n"
    return text + table(("Work", "Instructions"), cells)


def _cached(row: Row) -> str:
    cached = row.get("cached")
    return DASH if cached is None else f"{cached:,}"


def _unit(row: Row) -> str:
    unit: str = UNITS.get(row["unit"]) or row["unit"]
    return f"{unit} a {row['per']}" if "per" in row else unit


def _each(row: Row) -> str:
    for key, value in row.items():
        if key.startswith(("ns_a_", "ns_per_")):
            return f"{number(value)} ns a {key.rpartition('_')[2]}"
    return DASH


def _met(value: float, *, at_least: float = -math.inf, at_most: float = math.inf) -> str:
    return "yes" if at_least <= value <= at_most else "**no**"


if __name__ == "__main__":
    sys.exit(main())
