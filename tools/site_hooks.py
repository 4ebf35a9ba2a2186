"""What mkdocs adds to the site: the tables of the benchmarks, and the address of the repository."""

import sys
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benches"))

import figures
import report

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def on_config(config: MkDocsConfig) -> None:
    """Link the repository that `[project.urls]` of pyproject.toml names; none, where it names none.

    The link is in the footer: for one in the header, the theme asks the repository's host.
    """
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    if address is not None:
        link = {"icon": "material/source-repository", "link": address, "name": "Repository"}
        config.extra["social"] = [link]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the tables of all recorded figures, which no commit has as a page."""
    page = report.tables(figures.load())
    files.append(File.generated(config, "benchmarks-tables.md", content=page))
