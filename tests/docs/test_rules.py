"""Every rule that is cited anywhere is written down in docs/design.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["rust", "python", "tests", "docs", "benches", "fuzz", "tools"]
CITED = re.compile(r"\bD([1-9]\d?)\b")


def _sources() -> list[Path]:
    return [
        path
        for folder in FOLDERS
        for pattern in ("*.rs", "*.py", "*.pyi", "*.md")
        for path in sorted((ROOT / folder).rglob(pattern))
        if "target" not in path.parts
    ]


def test_design_has_one_section_a_rule() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    anchors = re.findall(r"^### ([DPRGLCS]\d+) · .* \{#([dprglcs]\d+)\}$", text, re.MULTILINE)
    last = {"D": 20, "P": 20, "R": 7, "G": 9, "L": 10, "C": 13, "S": 8}
    rules = [f"{letter}{n}" for letter in last for n in range(1, last[letter] + 1)]
    assert anchors == [(rule, rule.lower()) for rule in rules]


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_cited_rules_exist(path: Path) -> None:
    cited = {int(n) for n in CITED.findall(path.read_text(encoding="utf-8"))}
    assert cited <= set(range(1, 21))
