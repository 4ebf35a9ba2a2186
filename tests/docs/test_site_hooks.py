"""The site has the tables as a page, and the link to a repository that the metadata names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import figures
import report
from mkdocs.config import load_config
from mkdocs.structure.files import Files
from tools import site_hooks

if TYPE_CHECKING:
    import pytest

SETTINGS = Path(__file__).resolve().parents[2] / "mkdocs.yml"


def test_the_tables_are_a_page() -> None:
    config = load_config(str(SETTINGS))
    (page,) = config.plugins.on_files(Files([]), config=config)
    assert page.src_uri == "benchmarks-tables.md"
    assert page.content_string == report.tables(figures.load())


def test_the_repository_is_linked_if_the_metadata_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "pyproject.toml"
    monkeypatch.setattr(site_hooks, "PROJECT", project)
    for urls, links in (("", None), ('Repository = "https://host/a"', ["https://host/a"])):
        project.write_text(f"[project.urls]\n{urls}\n", encoding="utf-8")
        config = load_config(str(SETTINGS))
        site_hooks.on_config(config)
        social = config.extra.get("social")
        assert (social and [one["link"] for one in social]) == links
