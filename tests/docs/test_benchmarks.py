"""The page of benchmarks and the README show recorded figures; the tables show all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import figures
import pytest
import report
from workloads.registry import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
CONTENT = figures.load()
PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))


def _row(section: str, **values: str) -> dict[str, Any]:
    (row,) = (row for row in CONTENT["sections"][section] if values.items() <= row.items())
    return dict(row)


def test_the_page_is_short_and_shows_the_recorded_figures() -> None:
    assert report.render(CONTENT) == PAGE
    assert len(PAGE.split()) < 3_000


def test_another_figure_is_another_page() -> None:
    sections = CONTENT["sections"]
    row = _row("peers", peer="SGLang Rust", work="miss at token 0 of 102,400")
    others = [{**one, "ratio": 9.87} if one == row else one for one in sections["peers"]]
    changed = {**CONTENT, "sections": {**sections, "peers": others}}
    assert "9.87" in report.render(changed)


def test_the_tables_have_every_recorded_row() -> None:
    text = report.tables(CONTENT)
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert CONTENT["sections"].keys() <= report.SECTIONS.keys()
    for name, rows in CONTENT["sections"].items():
        title = report.SECTIONS[name][0]
        part = re.split(r"^## ", text.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]
        shown = sum(line in part for line in lines)
        assert shown >= len([row for row in rows if row["work"] != "all workloads"]), name


def test_every_goal_is_found_and_only_those_that_are_not_met_are_on_the_page() -> None:
    found, missing = report.goals(CONTENT)
    assert not missing
    for goal in found:
        line = f"| {goal.group}: {goal.what} | {goal.wanted} | {goal.measured} |"
        assert (line in PAGE) == (not goal.is_met)
        assert line in report.tables(CONTENT)


@pytest.mark.parametrize(
    ("least", "limit", "value", "is_met"),
    [(4, None, 4.0, True), (4, None, 3.9, False), (None, 4, 4.0, True), (None, 4, 4.1, False)],
)
def test_a_goal_is_met_at_its_bound(
    least: float | None, limit: float | None, value: float, is_met: bool
) -> None:
    goal = report.goal_of("group", "what", value, " µs", least=least, limit=limit)
    assert goal.is_met == is_met


def test_every_workload_is_named() -> None:
    for text in (PAGE, report.tables(CONTENT)):
        found = re.findall(r"\b(W\d\d(?:\.\S*\w)?) (\S*\w)", text)
        assert found
        assert len(found) == len(re.findall(r"\bW\d\d", text))
        assert {name for _, name in found} <= {one.name for one in WORKLOADS.values()}


def test_readme_quotes_recorded_figures() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    reuse = _row("coverage", work="W11 agent.close, own texts")
    engine = _row("generate", work="W11 agent.close, first token of 6,246 tokens")
    lookup = _row(
        "peers", peer="SGLang Rust", work="lookup with ids out, 8,192 tokens in one edge, warm"
    )
    for quoted in (
        f"{reuse['found_of_prompt']:.1%}".replace("%", " %"),
        f"{reuse['exact_of_prompt']:.1%}".replace("%", " %"),
        f"{engine['computed_share']:.1%}".replace("%", " %"),
        f"{engine['prompt']:,} tokens",
        f"{engine['ratio']:.0f}{report.TIMES}",
        f"{lookup['kvtrie']:.1f} µs",
        f"{int(lookup['ratio'])}{report.TIMES}",
    ):
        assert quoted in readme


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_follows_the_mode_of_the_reader(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    assert len(text.encode()) < 60_000
    assert "@media (prefers-color-scheme: dark)" in text
    assert "<dc:date>" not in text
