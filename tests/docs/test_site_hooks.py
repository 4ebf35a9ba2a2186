"""The site has the tables as a page, and the link to a repository that the metadata names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import figures
import report
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import PluginCollection
from mkdocs.structure.files import Files
from tools import site_hooks

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_tables_are_a_page() -> None:
    files = Files([])
    config = MkDocsConfig()
    config.plugins = PluginCollection()
    site_hooks.on_files(files, config)
    (page,) = files
    assert page.src_uri == "benchmarks-tables.md"
    assert page.content_string == report.tables(figures.load())


def test_the_repository_is_linked_if_the_metadata_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "pyproject.toml"
    monkeypatch.setattr(site_hooks, "PROJECT", project)
    for urls, links in (("", None), ('Repository = "https://host/a"', ["https://host/a"])):
        project.write_text(f"[project.urls]\n{urls}\n", encoding="utf-8")
        config = MkDocsConfig()
        config.extra = {}
        site_hooks.on_config(config)
        social = config.extra.get("social")
        assert (social and [one["link"] for one in social]) == links
