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
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(
        mktestdocs.grab_code_blocks(page.read_text(encoding="utf-8"), lang="python"), start=1
    )
]
BUGS = [page for page in PAGES if page.parent.name == "bugs" and page.name != "index.md"]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs_alone(block: str) -> None:
    """A reader may copy any block into a new file."""
    exec(compile(block, "<block>", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own pages


@pytest.mark.parametrize("page", BUGS, ids=lambda page: page.name)
def test_bug_page_is_a_screen_with_a_link_and_one_example(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(example.splitlines()) <= 20
    assert len(text.splitlines()) <= 60
    assert re.search(r"https://github\.com/[\w-]+/[\w.-]+/(issues|pull)/\d+", text)
    for part in ("What happens", "Why", "With kvtrie"):
        assert text.count(f"**{part}.**") == 1
    assert f"({page.name})" in (page.parent / "index.md").read_text(encoding="utf-8")


def _documented() -> dict[str, object]:
    """Public names of the extension and the members of its classes; pytest collects the rest."""
    found: dict[str, object] = {}
    for name in core.__all__:
        value = getattr(core, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        found[name] = value
        if inspect.isclass(value) and not issubclass(value, BaseException):
            # In the order of their names: a type's own depends on the seed of hashes.
            for member, inner in sorted(vars(value).items()):
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
