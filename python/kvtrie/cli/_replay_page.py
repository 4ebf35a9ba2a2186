"""A replayed trace as one HTML page that needs nothing else."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined, select_autoescape
from markupsafe import Markup

from kvtrie.cli import _replay_shown
from kvtrie.replay import plot

if TYPE_CHECKING:
    from kvtrie.replay import TrafficReport


def page(report: TrafficReport, *, answers: bool) -> str:
    """The page.

    Args:
        report: What it shows.
        answers: Whether the sizes were asked for, so that each is answered in a sentence.
    """
    source = files("kvtrie.replay").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(source).render(
        report=report,
        head=_replay_shown.head(report),
        # Its texts are escaped where it is drawn.
        picture=Markup(plot.svg(report)),  # noqa: S704 - see above
        tables=_replay_shown.tables(report),
        answers=_replay_shown.answers(report) if answers else [],
        version=version("kvtrie"),
    )
