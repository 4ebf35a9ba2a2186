"""Every example that a reader may copy runs: README, docs, docstrings of the extension."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import mktestdocs
import pytest

import kvtrie
import kvtrie._core as core

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs_from_top_to_bottom(page: Path) -> None:
    """The blocks of a page share their names, as a reader would type them."""
    mktestdocs.check_md_file(page, memory=True)


def _documented() -> dict[str, object]:
    """Public names of the extension and the members of its classes; pytest collects the rest."""
    found: dict[str, object] = {}
    for name in core.__all__:
        value = getattr(core, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        found[name] = value
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for member, inner in vars(value).items():
                if not member.startswith("_"):
                    found[f"{name}.{member}"] = inner
    return found


DOCUMENTED = _documented()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_exists_and_its_examples_run(name: str) -> None:
    doc = inspect.getdoc(DOCUMENTED[name])
    assert doc, f"kvtrie.{name} has no docstring"
    test = doctest.DocTestParser().get_doctest(doc, {"kvtrie": kvtrie}, name, None, None)
    results = doctest.DocTestRunner(verbose=False).run(test)
    assert results.failed == 0


def test_reference_lists_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: kvtrie\.(\w+)$", text, re.MULTILINE))
    assert {name for name in kvtrie.__all__ if not name.startswith("_")} <= listed
