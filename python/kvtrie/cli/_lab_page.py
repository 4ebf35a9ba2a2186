"""A report of the lab as one HTML page that needs nothing else."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined, select_autoescape

from kvtrie.cli._lab_shown import CAUSES, label

if TYPE_CHECKING:
    from kvtrie.lab import TemplateReport


def page(report: TemplateReport, name: str) -> str:
    """The page.

    Args:
        report: What it shows.
        name: The tokenizer's, for the title.
    """
    source = files("kvtrie.lab").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(source).render(
        report=report, name=name, causes=CAUSES, label=label, version=version("kvtrie")
    )
